"""Chunks that are evicted before or after others whatever the eviction policy says: priorities, and sliding windows.

Priorities (`Retention`; from 0 to 100, with or without a time limit) divide chunks into bands. The lowest band is
evicted first:

    2 * priority        orphans
    2 * priority + 1    all others

The policies of the tiers are partitioned (`longshore.cache.eviction_policies.partitioned`) when the first priority is
set, or the first orphan is stored; before that, priorities cost nothing.

Chunks of sliding windows and recurrent states:

    fresh    in the last window of the request that stored it
    slid     the window has moved past it, and no request has needed it since: evicted first, in every tier
    used     a request needed it: keeps its place in the policy's order, because other requests may branch off there
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from longshore.cache.columns import as_i32, sparse, u8_view
from longshore.cache.eviction_policies import EvictionPolicy
from longshore.cache.eviction_policies.partitioned import PartitionedByPriority, PartitionedBySize
from longshore.cache.index import Index
from longshore.cache.settings import DEFAULT_PRIORITY, Retention, retention_ranges

Nodes = Sequence[int] | npt.NDArray[np.int32]

_USUAL = 2 * DEFAULT_PRIORITY + 1


class Priorities:
    """Priorities and times to live of chunks, by node of `index`.

    When the first one is set, the policies in `policies` (one for each tier, made by `makers`) are partitioned.
    """

    def __init__(
        self,
        index: Index,
        policies: list[EvictionPolicy],
        makers: Sequence[type[EvictionPolicy]],
        current_request: Callable[[], tuple[int, int]],
    ) -> None:
        """`current_request` returns the request for which uses are counted, and the number of its reuse hint."""
        self.used = False
        self._index = index
        self._policies = policies
        self._makers = makers
        self._current_request = current_request
        self._priority: memoryview[int] = memoryview(b"")
        """After the first priority was set, the band of each node, xor `_USUAL`: zeroed memory is the default."""
        self._until: dict[int, float] = {}
        self._due: list[tuple[float, tuple[int, ...]]] = []
        """Expiry times and their nodes, a heap. Entries may be outdated, if the time of a node was set again."""
        self._listed = 0
        """Number of nodes in the heap."""
        self._bands: list[PartitionedByPriority] = []

    def grow(self, nodes: int) -> None:
        """Nodes may now have any number below `nodes`."""
        if self.used:
            larger = sparse(nodes, np.uint8).data
            larger[: len(self._priority)] = self._priority
            self._priority = larger
            for band in self._bands:
                band.priorities = self._priority

    def of(self, node: int) -> int:
        """The priority of `node`."""
        return (self._priority[node] ^ _USUAL) // 2 if self.used else DEFAULT_PRIORITY

    def apply(self, nodes: Nodes, positions: npt.ArrayLike, retention: Sequence[Retention], now: float) -> None:
        """Set the priorities of `nodes`, the chunks at `positions` of a request, parents first, from `retention`."""
        which, ids = retention_ranges(retention, positions), as_i32(nodes)
        for number, each in enumerate(retention):
            mine = ids[which == number]
            if len(mine):
                self._set(mine, each.priority, None if each.seconds is None else now + each.seconds)
                for band in self._bands if each.priority != DEFAULT_PRIORITY else ():
                    band.rejects = False  # expected hits are not comparable across priorities
        self._move(ids[which >= 0])

    def expire(self, now: float) -> None:
        """Reset the priorities whose time has expired at `now` to the default."""
        while self._due and self._due[0][0] <= now:
            until, nodes = heapq.heappop(self._due)
            self._listed -= len(nodes)
            over = as_i32([node for node in nodes if self._until.get(node) == until])
            self._set(over, DEFAULT_PRIORITY, None)
            self._move(over)

    def forget(self, nodes: Sequence[int]) -> None:
        """`nodes` were removed from all tiers."""
        self._set(as_i32(nodes), DEFAULT_PRIORITY, None)
        u8_view(self._priority)[as_i32(nodes)] = 0

    def mark_orphans(self, nodes: Sequence[int]) -> None:
        """Mark new `nodes` as orphans, or as descendants of one."""
        if not self.used:
            self._begin()
        u8_view(self._priority)[as_i32(nodes)] |= 1

    def unmark_orphans(self, nodes: Sequence[int]) -> None:
        """`nodes`, a part of a path, parents first, were attached to their parents."""
        u8_view(self._priority)[as_i32(nodes)] &= 0xFE
        self._move(as_i32(nodes))

    def _set(self, ids: npt.NDArray[np.int32], priority: int, until: float | None) -> None:
        if not self.used:
            self._begin()
        bands = u8_view(self._priority)
        bands[ids] = (bands[ids] & 1) | 2 * (priority ^ DEFAULT_PRIORITY)
        if until is not None:
            nodes: tuple[int, ...] = tuple(ids.tolist())
            self._until.update(dict.fromkeys(nodes, until))
            heapq.heappush(self._due, (until, nodes))
            self._listed += len(nodes)
            if self._listed > 2 * len(self._until) + 64:
                self._list_anew()
        elif self._until:
            for node in ids.tolist():
                self._until.pop(node, None)

    def _list_anew(self) -> None:
        due: dict[float, list[int]] = {}
        for node, until in self._until.items():
            due.setdefault(until, []).append(node)
        self._due = [(until, tuple(nodes)) for until, nodes in sorted(due.items())]
        self._listed = len(self._until)

    def _move(self, nodes: npt.NDArray[np.int32]) -> None:
        for band in self._bands:
            band.move(nodes)

    def _begin(self) -> None:
        self.used = True
        self._priority = sparse(self._index.size, np.uint8).data
        for tier, make in enumerate(self._makers):
            split = partial(self._split, make)
            policy = self._policies[tier]
            if isinstance(policy, PartitionedBySize):
                policy.replace(split)
            else:
                self._policies[tier] = split(policy)

    def _split(self, make: type[EvictionPolicy], first: EvictionPolicy) -> EvictionPolicy:
        band = PartitionedByPriority(
            first.slots, first.keys, make, first, _USUAL, self._priority, *self._current_request()
        )
        self._bands.append(band)
        return band


_FRESH, _SLID, _USED = range(3)


class WindowMarks:
    """Which chunks of sliding windows and recurrent states the window has moved past. One byte per node."""

    def __init__(self, index: Index, policies: list[EvictionPolicy]) -> None:
        self._index = index
        self._policies = policies
        self.used = False
        self._mark = bytearray()

    def grow(self, nodes: int) -> None:
        """Nodes may now have any number below `nodes`."""
        if self.used:
            self._mark.extend(bytes(nodes - len(self._mark)))

    def enter(self, nodes: Sequence[int]) -> None:
        """`nodes` are in the last window of their request, or are new chunks of a group without a window."""
        if self.used:
            for node in nodes:
                self._mark[node] = _FRESH

    def slide(self, nodes: Sequence[int]) -> None:
        """A window has moved past `nodes`: evict them first, unless a request has used them."""
        if not self.used:
            self.used, self._mark = True, bytearray(self._index.size)
        for node in nodes:
            if self._mark[node] == _FRESH:
                self._mark[node] = _SLID
                for tier in self._index.tiers:
                    self._evict_first(node, tier)

    def mark_used(self, nodes: Sequence[int]) -> None:
        """A request has used `nodes`."""
        if self.used:
            for node in nodes:
                self._mark[node] = _USED

    def mark_ready(self, nodes: Sequence[int], tier: int) -> None:
        """Copies of `nodes` have become ready in `tier`."""
        if self.used:
            for node in nodes:
                if self._mark[node] == _SLID:
                    self._evict_first(node, tier)

    def _evict_first(self, node: int, tier: int) -> None:
        if self._index.is_ready(node, tier):
            policy = self._policies[tier]
            policy.hold(node)
            policy.release((node,))
