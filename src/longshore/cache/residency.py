"""Where each of some chunks is: what a lookup of single keys answers.

Numbers of nodes mean the same as long as none was removed. A `Residency` remembers how many had been removed when it
was taken, and is as good as its keys alone from the next removal on.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from longshore.boundary import Key
from longshore.cache.columns import marks, numbers
from longshore.cache.index import Index
from longshore.cache.nodes import ROOT
from longshore.cache.pool import SlotPool
from longshore.cache.states import READY


class Presence(enum.Enum):
    """Where a chunk is."""

    ABSENT = "absent"
    IN_FLIGHT = "in_flight"
    READY = "ready"  # in the warmest tier: can be loaded at once
    COLDER = "colder"  # ready, but only below the warmest tier


_PRESENCES = (Presence.ABSENT, Presence.IN_FLIGHT, Presence.READY, Presence.COLDER)
_ABSENT, _IN_FLIGHT, _READY, _COLDER = range(len(_PRESENCES))

At = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Residency:
    """Where each of `keys` was, in `presences`; `keys` of a `GroupKeys` may be one, and saves a search."""

    keys: Sequence[Key]
    presences: Sequence[Presence]
    at: At = field(compare=False, repr=False)
    index: Index = field(compare=False, repr=False)
    pool: SlotPool = field(compare=False, repr=False)
    gone: int = field(compare=False, repr=False)

    def __len__(self) -> int:
        return len(self.keys)

    def part(self, begin: int, end: int) -> Residency:
        """The same of the keys `[begin, end)`."""
        here = slice(begin, end)
        return Residency(self.keys[here], self.presences[here], self.at[here], self.index, self.pool, self.gone)

    def pick(self, positions: Sequence[int]) -> Residency:
        """The same of the keys at `positions`."""
        keys, presences = [self.keys[at] for at in positions], [self.presences[at] for at in positions]
        return Residency(keys, presences, self.at[list(positions)], self.index, self.pool, self.gone)

    def slots(self) -> list[int] | None:
        """The slots of the warmest tier that the chunks are ready in now; `None` unless all books agree on each.

        For reading what was found before the control plane failed: nothing is written there since.
        """
        index, pool, slots = self.index, self.pool, list[int]()
        if index.gone < 0:
            return None  # all was forgotten since
        for key in self.keys:
            node = index.get(key)
            slot = index.slot[0][node] if node else -1
            if slot < 0 or pool.state[slot] != READY or pool.node[slot] != node or index.key[node] != key:
                return None
            slots.append(slot)
        return slots

    @classmethod
    def take(cls, index: Index, pool: SlotPool, keys: Sequence[Key]) -> Residency:
        """Look for `keys`; `pool` is the warmest tier's. Raises `CacheError` for what cannot be a key."""
        at = numbers(index.find(keys))
        reachable = marks(index.reachable)[at] != 0
        found = np.where(reachable, np.where(index.are_ready(at, 0), _READY, _COLDER), _IN_FLIGHT)
        found[at == ROOT] = _ABSENT
        if (found == _READY).all():
            return cls(keys, [Presence.READY] * len(keys), at, index, pool, index.gone)
        return cls(keys, [_PRESENCES[each] for each in found.tolist()], at, index, pool, index.gone)


def nodes_of(index: Index, keys: Sequence[Key] | Residency) -> tuple[Sequence[Key], At]:
    """Keys and their nodes, `ROOT` for those that no tier has. Raises `CacheError` for what cannot be a key."""
    if not isinstance(keys, Residency):
        return keys, numbers(index.find(keys))
    if keys.index is index and keys.gone == index.gone:
        return keys.keys, keys.at
    return nodes_of(index, keys.keys)
