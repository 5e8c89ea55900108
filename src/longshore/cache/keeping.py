"""Which chunks have a priority of their own, and until when; and which go first of those that have the same.

    2 * priority        orphans
    2 * priority + 1    all others

Until somebody names a priority, or there is an orphan, nothing of this costs anything: only then are the tiers'
eviction policies split (`longshore.cache.eviction.partitioned`).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from longshore.cache.columns import marks, numbers
from longshore.cache.eviction import EvictionPolicy
from longshore.cache.eviction.partitioned import Banded, Sized
from longshore.cache.settings import DEFAULT_PRIORITY, Retention, said

if TYPE_CHECKING:
    from longshore.cache.store import Store


Nodes = Sequence[int] | npt.NDArray[np.int32]

_USUAL = 2 * DEFAULT_PRIORITY + 1


class Keeping:
    """Priorities and times of the chunks of one `Store`."""

    def __init__(self, store: Store) -> None:
        self.used = False
        self._store = store
        self._priority = bytearray()
        """By node, once one has been named: the number of its band."""
        self._until: dict[int, float] = {}
        self._due: list[tuple[float, tuple[int, ...]]] = []
        """When times end that were named, and whose; some of them have been named anew since. A heap."""
        self._listed = 0
        """Nodes in it."""
        self._bands: list[Banded] = []

    def grow(self, nodes: int) -> None:
        """Nodes may now have any number below `nodes`."""
        if self.used:
            self._priority.extend(bytes([_USUAL]) * (nodes - len(self._priority)))

    def apply(self, nodes: Nodes, positions: npt.ArrayLike, retention: Sequence[Retention], now: float) -> None:
        """`nodes` are the chunks at `positions` of a request, parents first, of which `retention` says something."""
        which, at = said(retention, positions), numbers(nodes)
        for number, each in enumerate(retention):
            mine = at[which == number]
            if len(mine):
                self._set(mine, each.priority, None if each.seconds is None else now + each.seconds)
                for band in self._bands if each.priority != DEFAULT_PRIORITY else ():
                    band.refuses = False  # hits are not weighed against priorities
        self._move(at[which >= 0])

    def expire(self, now: float) -> None:
        """Time has passed: those whose time is over have the default priority again."""
        while self._due and self._due[0][0] <= now:
            until, nodes = heapq.heappop(self._due)
            self._listed -= len(nodes)
            over = numbers([node for node in nodes if self._until.get(node) == until])
            self._set(over, DEFAULT_PRIORITY, None)
            self._move(over)

    def forget(self, nodes: Sequence[int]) -> None:
        """`nodes` are in no tier any more."""
        self._set(numbers(nodes), DEFAULT_PRIORITY, None)
        marks(self._priority)[numbers(nodes)] = _USUAL

    def sink(self, nodes: Sequence[int]) -> None:
        """`nodes`, which are new, are orphans, or behind one."""
        if not self.used:
            self._begin()
        marks(self._priority)[numbers(nodes)] &= 0xFE

    def land(self, nodes: Sequence[int]) -> None:
        """`nodes`, a part of a path, parents first, are no orphans any more."""
        marks(self._priority)[numbers(nodes)] |= 1
        self._move(numbers(nodes))

    def _set(self, at: npt.NDArray[np.int32], priority: int, until: float | None) -> None:
        if not self.used:
            self._begin()
        bands = marks(self._priority)
        bands[at] = 2 * priority + (bands[at] & 1)
        if until is not None:
            nodes: tuple[int, ...] = tuple(at.tolist())
            self._until.update(dict.fromkeys(nodes, until))
            heapq.heappush(self._due, (until, nodes))
            self._listed += len(nodes)
            if self._listed > 2 * len(self._until) + 64:
                self._list_anew()
        elif self._until:
            for node in at.tolist():
                self._until.pop(node, None)

    def _list_anew(self) -> None:
        """Leave out the times that have been named anew."""
        due: dict[float, list[int]] = {}
        for node, until in self._until.items():
            due.setdefault(until, []).append(node)
        self._due = [(until, tuple(nodes)) for until, nodes in sorted(due.items())]
        self._listed = len(self._until)

    def _move(self, at: npt.NDArray[np.int32]) -> None:
        """The priorities of nodes `at` have changed."""
        for band in self._bands:
            band.move(at)

    def _begin(self) -> None:
        """Split the eviction policies."""
        store, self.used = self._store, True
        self._priority = bytearray([_USUAL]) * store.index.size
        for tier, level in enumerate(store.levels):
            split = partial(self._split, level.make_policy)
            policy = store.policies[tier]
            if isinstance(policy, Sized):
                policy.replace(split)
            else:
                store.policies[tier] = split(policy)

    def _split(self, make: type[EvictionPolicy], first: EvictionPolicy) -> EvictionPolicy:
        turn, hint = self._store.served, self._store.returns.of(self._store.served)
        band = Banded(first.slots, first.names, make, first, _USUAL, self._priority, turn, hint)
        self._bands.append(band)
        return band
