"""Priorities: one policy for each priority in use, the lowest goes first.

priority 10   ──► goes first, in its own policy's order
priority 35   ──► then these
priority 90   ──► these last
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
        nodes: int,
    ) -> None:
        super().__init__(slots, names, {priority: first}, nodes)
        self._make = make
        self._default = priority
        self.priorities: dict[int, int] = {}
        """The priority that a node is to have; those that are not here have the default."""

    def wanted(self, node: int) -> int:
        """The priority that `node` is to have."""
        return self.priorities.get(node, self._default)

    def part(self, number: int) -> EvictionPolicy:
        """The policy of a priority, made if there is none yet."""
        if number not in self._parts:
            policy = self._make(self.slots, self.names)
            policy.grow(len(self._part))
            self._parts = dict(sorted([*self._parts.items(), (number, policy)]))
        return self._parts[number]

    def move(self, nodes: Sequence[int]) -> None:
        """Those of `nodes` that are in get the priority that they are to have.

        Each goes first among those of that priority, the last of them before the others.
        """
        moving = [node for node in nodes if self._part[node] not in (OUT, self.wanted(node))]
        for node in moving:
            self.remove(node)
        self.insert(moving)
        for node in moving:
            self.hold(node)
        self.release(moving)
