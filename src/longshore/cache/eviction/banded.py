"""Priorities: one policy for each priority in use, the lowest goes first.

priority 10   ──► goes first, in its own policy's order
priority 35   ──► then these
priority 90   ──► these last
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from longshore.boundary import Key
from longshore.cache.columns import marks, numbers, once
from longshore.cache.eviction.base import EvictionPolicy, Names
from longshore.cache.eviction.parted import OUT, Parted


class Banded(Parted):
    """Policies by priority, made by `make` as they are needed; `first` is that of `priority`, and may know nodes."""

    def __init__(
        self,
        slots: int,
        names: Names,
        make: Callable[[int, Names], EvictionPolicy],
        first: EvictionPolicy,
        priority: int,
        priorities: bytearray,
        turn: int = 0,
        hint: int = 0,
    ) -> None:
        """`priorities`: those that nodes are to have, by node; whoever changes one calls `move`.

        The request of `turn` is served, which has this `hint`; `first` has been told.
        """
        super().__init__(slots, names, {priority: first}, len(priorities))
        self.refuses, self._usual = first.refuses, first
        self._turn, self._hint = turn, hint
        self._make = make
        self._priorities = priorities

    def wanted(self, node: int) -> int:
        """The priority that `node` is to have."""
        return self._priorities[node]

    def all_wanted(self, nodes: Sequence[int]) -> bytes:
        """The priority that each of `nodes` is to have."""
        return marks(self._priorities)[numbers(nodes)].tobytes()

    def part(self, number: int) -> EvictionPolicy:
        """The policy of a priority, made if there is none yet."""
        if number not in self._parts:
            policy = self._make(self.slots, self.names)
            policy.grow(len(self._part))
            policy.begin(self._turn, hint=self._hint)
            self._parts = dict(sorted([*self._parts.items(), (number, policy)]))
        return self._parts[number]

    def admit(self, keys: Sequence[Key], make_room: Callable[[int], int], *, copies: bool = False) -> tuple[int, int]:
        """As the first policy, as long as all others are of what goes before its nodes; they say so by `refuses`."""
        if not self.refuses:
            return super().admit(keys, make_room, copies=copies)
        return self._usual.admit(keys, make_room, copies=copies)

    def move(self, at: npt.NDArray[np.int32]) -> None:
        """Those of the nodes `at`, a part of a path, parents first, that are in get the priority they are to have.

        Each goes first among those of that priority, the last of them before the others.
        """
        at = once(at)
        part, wanted = marks(self._part)[at], marks(self._priorities)[at]
        moving = (part != OUT) & (part != wanted)
        at, part, wanted = at[moving], part[moving], wanted[moving]
        for number in sorted(set(part.tobytes())):
            self._parts[number].remove_all(at[part == number].tolist())
        for number in sorted(set(wanted.tobytes())):
            policy, ours = self.part(number), at[wanted == number].tolist()
            policy.insert(ours)
            policy.hold_all(ours)
            policy.release(ours)
        marks(self._part)[at] = wanted
