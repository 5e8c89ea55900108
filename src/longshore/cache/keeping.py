"""Which chunks have a priority of their own, and until when.

Until somebody names a priority, nothing of this costs anything: only then are the tiers' eviction policies split by
priority (`longshore.cache.eviction.banded`).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from longshore.cache.eviction import EvictionPolicy
from longshore.cache.eviction.banded import Banded
from longshore.cache.eviction.sized import Sized
from longshore.cache.retention import DEFAULT_PRIORITY, Retention, at

if TYPE_CHECKING:
    from longshore.cache.store import Store


class Keeping:
    """Priorities and times of the chunks of one `Store`."""

    def __init__(self, store: Store) -> None:
        self.used = False
        self._store = store
        self._priority: dict[int, int] = {}
        self._until: dict[int, float] = {}
        self._due: list[tuple[float, int]] = []
        self._bands: list[Banded] = []

    def apply(self, nodes: Sequence[int], first: int, retention: Sequence[Retention], now: float) -> None:
        """`nodes` are the chunks of a request from position `first` on, of which `retention` says something."""
        for position, node in enumerate(nodes, first):
            said = at(retention, position)
            if said is not None:
                self._set(node, said.priority, None if said.seconds is None else now + said.seconds)
        self._move(nodes)

    def expire(self, now: float) -> None:
        """Time has passed: those whose time is over have the default priority again."""
        while self._due and self._due[0][0] <= now:
            until, node = heapq.heappop(self._due)
            if self._until.get(node) == until:
                self._set(node, DEFAULT_PRIORITY, None)
                self._move((node,))

    def forget(self, node: int) -> None:
        """`node` is in no tier any more."""
        self._until.pop(node, None)
        self._priority.pop(node, None)

    def _set(self, node: int, priority: int, until: float | None) -> None:
        if not self.used:
            self._begin()
        self._until.pop(node, None)
        self._priority.pop(node, None)
        if priority != DEFAULT_PRIORITY:
            self._priority[node] = priority
        if until is not None:
            if len(self._due) > 2 * len(self._until) + 64:
                self._due = sorted((due, each) for each, due in self._until.items())
            self._until[node] = until
            heapq.heappush(self._due, (until, node))

    def _move(self, nodes: Sequence[int]) -> None:
        """The priorities of some of `nodes` have changed."""
        for band in self._bands:
            band.move(nodes)

    def _begin(self) -> None:
        """Split the eviction policies by priority."""
        store, self.used = self._store, True
        for tier, level in enumerate(store.levels):
            split = partial(self._split, level.make_policy)
            policy = store.policies[tier]
            if isinstance(policy, Sized):
                policy.replace(split)
            else:
                store.policies[tier] = split(policy)

    def _split(self, make: type[EvictionPolicy], first: EvictionPolicy) -> EvictionPolicy:
        band = Banded(first.slots, first.names, make, first, DEFAULT_PRIORITY, self._store.index.size)
        band.priorities = self._priority
        self._bands.append(band)
        return band
