"""Priorities: one policy for each priority in use, the lowest goes first.

priority 10   ──► goes first, in its own policy's order
priority 35   ──► then these
priority 90   ──► these last
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from longshore.boundary import Key
from longshore.cache.eviction.base import EvictionPolicy, Names, known, unknown
from longshore.errors import CacheError

_OUT = 255


class Banded(EvictionPolicy):
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
        super().__init__(slots, names)
        self._make = make
        self._nodes = nodes
        self._bands = {priority: first}
        self._band = bytearray(priority if node in first else _OUT for node in range(nodes))
        self._default = priority
        self.wanted: dict[int, int] = {}
        """The priority that a node is to have; those that are not here have the default."""

    def resize(self, slots: int, names: Names) -> None:
        """The tier has `slots` slots now."""
        super().resize(slots, names)
        for policy in self._bands.values():
            policy.resize(slots, names)

    def grow(self, nodes: int) -> None:
        """Nodes may now have any number below `nodes`."""
        self._nodes = nodes
        self._band.extend(bytes([_OUT]) * (nodes - len(self._band)))
        for policy in self._bands.values():
            policy.grow(nodes)

    def move(self, node: int) -> None:
        """`node`, if it is in, gets the priority that it is to have, and goes first among those of that priority."""
        if self._band[node] in (_OUT, self.wanted.get(node, self._default)):
            return
        self.remove(node)
        self.insert([node])
        self.hold(node)
        self.release([node])

    def insert(self, nodes: Sequence[int]) -> None:
        """`nodes` became resident, each at its own priority."""
        for node in nodes:
            if self._band[node] != _OUT:
                raise known(node)
        for priority, ours in self._split(nodes, lambda node: self.wanted.get(node, self._default)):
            if priority not in self._bands:
                policy = self._make(self.slots, self.names)
                policy.grow(self._nodes)
                self._bands = dict(sorted([*self._bands.items(), (priority, policy)]))
            self._bands[priority].insert(ours)
            for node in ours:
                self._band[node] = priority

    def touch(self, nodes: Sequence[int]) -> None:
        """`nodes` were used."""
        for policy, ours in self._by_policy(nodes):
            policy.touch(ours)

    def hold(self, node: int) -> None:
        """`node` cannot go at present."""
        self._of(node).hold(node)

    def release(self, nodes: Sequence[int]) -> None:
        """Those of `nodes` that are held may go again, and first of their priority."""
        for policy, ours in self._by_policy(nodes):
            policy.release(ours)

    def remove(self, node: int, *, evicted: Key | None = None) -> None:
        """`node` left."""
        self._of(node).remove(node, evicted=evicted)
        self._band[node] = _OUT

    def leave(self, nodes: Sequence[int], keys: Sequence[Key]) -> None:
        """These left, all of one priority."""
        self._of(nodes[0]).leave(nodes, keys)
        for node in nodes:
            self._band[node] = _OUT

    def keep(self, nodes: Sequence[int]) -> None:
        """These, all of one priority, cannot go at present."""
        self._of(nodes[0]).keep(nodes)

    def ahead(self, count: int) -> list[int]:
        """The nodes that should go first among those of the lowest priority."""
        return next((nodes for policy in self._bands.values() if (nodes := policy.ahead(count))), [])

    def coldest(self) -> int:
        """The node that should go first among those of the lowest priority; 0 without one."""
        for policy in self._bands.values():
            node = policy.coldest()
            if node:
                return node
        return 0

    def order(self) -> Iterator[int]:
        """Nodes, the lowest priority first."""
        for policy in self._bands.values():
            yield from policy.order()

    def is_held(self, node: int) -> bool:
        """Whether `node` is in, and held."""
        return self._band[node] != _OUT and self._of(node).is_held(node)

    def __contains__(self, node: object) -> bool:
        return isinstance(node, int) and node < len(self._band) and self._band[node] != _OUT

    def __len__(self) -> int:
        return sum(map(len, self._bands.values()))

    def check_integrity(self) -> None:
        """Raise `CacheError` unless each node is in the policy of its priority, and in no other."""
        for priority, policy in self._bands.items():
            policy.check_integrity()
            ours = [node for node, band in enumerate(self._band) if band == priority]
            if len(policy) != len(ours) or not all(node in policy for node in ours):
                raise CacheError(f"priority {priority} has {len(policy)} nodes, {len(ours)} are marked")

    def _of(self, node: int) -> EvictionPolicy:
        band = self._band[node]
        if band == _OUT:
            raise unknown(node)
        return self._bands[band]

    def _by_policy(self, nodes: Sequence[int]) -> Iterator[tuple[EvictionPolicy, Sequence[int]]]:
        for node in nodes:
            if self._band[node] == _OUT:
                raise unknown(node)
        return ((self._bands[band], ours) for band, ours in self._split(nodes, self._band.__getitem__))

    @staticmethod
    def _split(nodes: Sequence[int], band_of: Callable[[int], int]) -> list[tuple[int, list[int]]]:
        """`nodes` by band, in their order."""
        split: dict[int, list[int]] = {}
        for node in nodes:
            split.setdefault(band_of(node), []).append(node)
        return list(split.items())
