"""What a host has seen of some chunks, so that it can borrow a part of them without another search for their keys.

Numbers of nodes mean the same as long as none has gone. So a sight remembers how many had gone when it was taken, and
is as good as its keys alone from the next one on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from longshore.boundary import Key
from longshore.cache.columns import marks, numbers
from longshore.cache.index import Index
from longshore.cache.nodes import ROOT
from longshore.cache.types import Presence

_PRESENCES = (Presence.ABSENT, Presence.IN_FLIGHT, Presence.READY, Presence.COLDER)
_ABSENT, _IN_FLIGHT, _READY, _COLDER = range(len(_PRESENCES))

At = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Sight:
    """Where each of `keys` was, in `presences`."""

    keys: Sequence[Key]
    presences: Sequence[Presence]
    at: At = field(compare=False, repr=False)
    index: Index = field(compare=False, repr=False)
    gone: int = field(compare=False, repr=False)

    def part(self, begin: int, end: int) -> Sight:
        """The same of the keys `[begin, end)`."""
        return Sight(self.keys[begin:end], self.presences[begin:end], self.at[begin:end], self.index, self.gone)

    @classmethod
    def take(cls, index: Index, keys: Sequence[Key]) -> Sight:
        """Look for `keys`. Raises `CacheError` for what cannot be one."""
        at = numbers(index.find(keys))
        reachable = marks(index.reachable)[at] != 0
        found = np.where(reachable, np.where(index.are_ready(at, 0), _READY, _COLDER), _IN_FLIGHT)
        found[at == ROOT] = _ABSENT
        if (found == _READY).all():
            return cls(keys, [Presence.READY] * len(keys), at, index, index.gone)
        return cls(keys, [_PRESENCES[each] for each in found.tolist()], at, index, index.gone)


def nodes_of(index: Index, keys: Sequence[Key] | Sight) -> tuple[Sequence[Key], At]:
    """Keys and their nodes, `ROOT` for those that no tier has. Raises `CacheError` for what cannot be a key."""
    if not isinstance(keys, Sight):
        return keys, numbers(index.find(keys))
    if keys.index is index and keys.gone == index.gone:
        return keys.keys, keys.at
    return nodes_of(index, keys.keys)
