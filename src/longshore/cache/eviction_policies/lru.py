"""Least recently used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from longshore.boundary import Key
from longshore.cache.columns import (
    I32,
    LISTS,
    LinkedLists,
    as_i32,
    as_list,
    check_in,
    check_new,
    filled,
    not_in_policy,
    resized,
    u8_view,
    unique,
)
from longshore.cache.eviction_policies.base import EvictionPolicy, NodeKeys
from longshore.errors import CacheError

_ORDER = 1
_OUT, _IN, _HELD = range(3)


class LRU(EvictionPolicy):
    """Evicts the least recently used chunk first. Every operation is O(1); 9 bytes per node."""

    def __init__(self, slots: int, keys: NodeKeys) -> None:
        super().__init__(slots, keys)
        self._linked = LinkedLists()
        self._place = filled(LISTS, dtype=np.uint8)
        self._count = 0

    def grow(self, nodes: int) -> None:
        """Make room for node numbers below `nodes`."""
        self._linked.grow(nodes)
        self._place = resized(self._place, max(nodes, len(self._place)))

    def insert(self, nodes: Sequence[int], *, leaf: bool = False, continues: bool = False) -> None:
        """Insert `nodes`; the last becomes the most recently used."""
        check_new(self._place, nodes)
        if len(nodes) == 1:  # ten times faster than by whole arrays
            self._place[nodes[0]] = _IN
            self._linked.append(_ORDER, nodes[0])
            self._count += 1
            return
        u8_view(self._place)[np.array(nodes, np.int32)] = _IN
        self._linked.extend(_ORDER, nodes)
        self._count += len(nodes)

    def touch(self, nodes: Sequence[int] | I32) -> None:
        """Record uses of `nodes`; the last becomes the most recently used. Adjacent nodes move together."""
        nodes = as_list(nodes)
        place, after, before = self._place, self._linked.after, self._linked.before
        at, count = 0, len(nodes)
        while at < count:
            first = last = nodes[at]
            at += 1
            if place[first] == _IN:
                while at < count and after[last] == nodes[at]:
                    last = nodes[at]
                    at += 1
                behind, ahead = before[first], after[last]
                after[behind] = ahead
                before[ahead] = behind
            elif place[first] == _OUT:
                raise not_in_policy(first)
            place[first] = _IN
            hottest = before[_ORDER]
            after[hottest] = first
            before[first] = hottest
            after[last] = _ORDER
            before[_ORDER] = last

    def hold(self, node: int) -> None:
        """Hold `node`: it cannot be evicted until it is released."""
        place = self._place[node]
        if place == _IN:
            self._linked.remove(node)
            self._place[node] = _HELD
        elif place == _OUT:
            raise not_in_policy(node)

    def release(self, nodes: Sequence[int]) -> None:
        """Release those of `nodes` that are held: they are evicted next."""
        if len(nodes) == 1:
            place = self._place[nodes[0]]
            if place == _OUT:
                raise not_in_policy(nodes[0])
            if place == _HELD:
                self._place[nodes[0]] = _IN
                self._linked.prepend(_ORDER, nodes[0])
            return
        at, places = np.array(nodes, np.int32), u8_view(self._place)
        check_in(self._place, nodes)
        held = unique(at[places[at] == _HELD])
        places[held] = _IN
        self._linked.prepend_all(_ORDER, held)

    def remove(self, node: int, *, evicted: Key | None = None) -> None:
        """Remove `node`."""
        place, after, before = self._place, self._linked.after, self._linked.before
        if place[node] == _IN:
            behind, ahead = before[node], after[node]
            after[behind] = ahead
            before[ahead] = behind
        elif place[node] == _OUT:
            raise not_in_policy(node)
        place[node] = _OUT
        self._count -= 1

    def remove_victims(self, nodes: Sequence[int], keys: Sequence[Key]) -> None:
        """Remove the first nodes of the order, and held ones among them."""
        check_in(self._place, nodes)
        at, place = unique(as_i32(nodes)), u8_view(self._place)
        if len(first := at[place[at] == _IN]):
            self._linked.drop_first(_ORDER, int(first[-1]))
        place[at] = _OUT
        self._count -= len(at)

    def hold_victims(self, nodes: Sequence[int]) -> None:
        """Hold the first nodes of the order."""
        at = unique(as_i32(nodes))
        self._linked.drop_first(_ORDER, int(at[-1]))
        u8_view(self._place)[at] = _HELD

    def next_victims(self, count: int) -> list[int]:
        """The least recently used nodes."""
        return self._linked.first_few(_ORDER, count)

    def victims_after(self, node: int, held: Sequence[int]) -> int:
        """All of `held`: released nodes are evicted next."""
        return len(held)

    def victim(self) -> int:
        """The least recently used node; 0 if there is none."""
        node = self._linked.after[_ORDER]
        return 0 if node == _ORDER else node

    def order(self) -> Iterator[int]:
        """Nodes, least recently used first."""
        return self._linked.walk(_ORDER)

    def is_held(self, node: int) -> bool:
        """Whether `node` is in the policy, and held."""
        return self._place[node] == _HELD

    def are_held(self, at: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        """Which of the nodes `at` are in the policy, and held."""
        held: npt.NDArray[np.bool_] = u8_view(self._place).take(at) == _HELD
        return held

    def __contains__(self, node: object) -> bool:
        return isinstance(node, int) and node < len(self._place) and self._place[node] != _OUT

    def resident(self, nodes: int) -> npt.NDArray[np.bool_]:
        """For each node below `nodes`, whether it is in the policy, held or not."""
        there: npt.NDArray[np.bool_] = u8_view(self._place)[:nodes] != _OUT
        return there

    def __len__(self) -> int:
        return self._count

    def check_integrity(self) -> None:
        """Raise `CacheError` unless the order and the marks agree."""
        self._linked.check_integrity(_ORDER)
        ordered = set(self.order())
        marked = set(np.flatnonzero(u8_view(self._place) == _IN).tolist())
        held = int(np.count_nonzero(u8_view(self._place) == _HELD))
        if ordered != marked or len(marked) + held != self._count:
            found = f"{len(ordered)} in order, {len(marked)} marked and {held} held"
            raise CacheError(f"internal error: LRU: counted {self._count} nodes, found {found}")
