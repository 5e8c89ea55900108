"""What can be seen of the books: where chunks are, how full tiers are, what is missing and why, what has happened.

Nothing here changes them; `Watching.check_integrity` looks whether they still agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from longshore.boundary import DEVICE, Key, Slot, addresses
from longshore.cache.columns import column, marks
from longshore.cache.events import EVICTED, EventKind
from longshore.cache.pool import READY, STATES
from longshore.cache.types import MissReason, Resident, Run, SizeStats, TierStats
from longshore.errors import CacheError

if TYPE_CHECKING:
    from longshore.cache.store import Store

_NOWHERE = 255
"""No tier has this number."""


class Watching:
    """Views of one `Store`."""

    def __init__(self, store: Store) -> None:
        self._store = store

    # ------------------------------------------------------------------ where

    def slot(self, tier: int, index: int) -> Slot:
        """The address of a slot."""
        store = self._store
        return Slot(store.levels[tier].name, store.pools[tier].pool_of(index), index)

    def addresses(self, tier: int, slots: Sequence[int]) -> list[Slot]:
        """The addresses of many slots of one tier."""
        name, pool_of = self._store.levels[tier].name, self._store.pools[tier].pool_of
        if self._store.several_sizes:
            return [Slot(name, pool_of(slot), slot) for slot in slots]
        return list(addresses(name, 0, slots))

    def is_of_one_pool(self, tier: int, slots: Sequence[int]) -> bool:
        """Whether no two of these slots are of different pools."""
        return not self._store.several_sizes or len(set(map(self._store.pools[tier].pool_of, slots))) < 2

    def runs(self, nodes: Sequence[int]) -> tuple[Run, ...]:
        """Where `nodes` are, as runs by the warmest tier that has them ready."""
        store, at = self._store, np.array(nodes, np.int32)
        if len(at) and np.count_nonzero(store.index.are_ready(at, 0)) == len(at):
            return (Run(store.levels[0].name, len(at)),)
        warmest = np.full(len(at), _NOWHERE, np.uint8)
        for tier in reversed(store.index.tiers):
            slots = column(store.index.slot[tier])[at]
            there = slots >= 0
            there[there] = marks(store.pools[tier].state)[slots[there]] == READY
            warmest[there] = tier
        runs = ((tier, len(list(run))) for tier, run in groupby(warmest.tobytes()))
        return tuple(Run(store.levels[tier].name, chunks) for tier, chunks in runs if tier != _NOWHERE)

    def residents(self) -> list[Resident]:
        """Every chunk that has a slot and can be found, or soon can, once for each tier that it is in."""
        index, nodes = self._store.index, list(self._store.index)
        return [
            Resident(
                index.key[node],
                before,
                self.slot(tier, slot),
                STATES[index.pools[tier].state[slot]],
            )
            for node, before in zip(nodes, index.before(nodes), strict=True)
            for tier in index.tiers
            if (slot := index.slot[tier][node]) >= 0
        ]

    def stats(self) -> tuple[TierStats, ...]:
        """Occupancy per tier, warmest first."""
        store = self._store
        return tuple(
            TierStats(
                level.name,
                pool.capacity,
                pool.used,
                len(policy),
                pool.slabs.nbytes,
                pool.used_bytes,
                tuple(SizeStats(size, *pool.used_by(each)) for each, size in enumerate(pool.slabs.image_bytes)),
            )
            for level, pool, policy in zip(store.levels, store.pools, store.policies, strict=True)
        )

    # ------------------------------------------------------------------ what is missing

    def miss(self, key: Key) -> MissReason:
        """Why a request that got no further than to some chunk before `key` does without it."""
        index = self._store.index
        node = index.get(key)
        if not node:
            return MissReason.ABSENT
        return MissReason.IN_FLIGHT if index.warmest_ready(node) < 0 else MissReason.BEHIND

    def count_misses(self, keys: Sequence[Key], end: int, known: int, foreign: int = 0) -> None:
        """A request got no further than to before `keys[end]`; a tier will have what leads to before `keys[known]`.

        So many of the rest a foreign tier is known to have. Orphans may be among it.
        """
        misses = self._store.counters.misses
        if self._store.index.orphans:
            known = len(keys)
        for key in keys[end:known]:
            misses[self.miss(key)] += 1
        misses[MissReason.ABSENT] += len(keys) - known - foreign
        misses[MissReason.FOREIGN] += foreign

    # ------------------------------------------------------------------ what has happened

    def log_arrivals(self, nodes: Sequence[int], tier: int) -> None:
        """Record that copies have become ready."""
        store, index, names = self._store, self._store.index, [level.name for level in self._store.levels]
        for node in nodes:
            others = [t for t in index.tiers if t != tier and index.is_ready(node, t)]
            kind = EventKind.MOVED if others else EventKind.STORED
            # A copy goes down from the tier above, and comes up from the warmest that had it.
            source = names[max((t for t in others if t < tier), default=others[0])] if others else ""
            (parent,) = index.before((node,))
            store.log.record(kind, [index.key[node]], tier=names[tier], parent=parent, source=source)

    def log_loss(self, node: int, tier: int, cause: str) -> None:
        """Record that a copy leaves, or will not come."""
        store = self._store
        kind = EventKind.REMOVED if store.index.is_ready(node, tier) else EventKind.FAILED
        by = store.log.by if cause == EVICTED else None
        store.log.record(kind, [store.index.key[node]], tier=store.levels[tier].name, cause=cause, by=by)

    def log_device(self, came: Sequence[tuple[Key, Key | None]], gone: Sequence[Key], cause: str) -> None:
        """Record what somebody else's books say of the device."""
        store = self._store
        warmest = [store.index.warmest_ready(store.index.get(key)) for key, _ in came]
        for key in gone:
            store.index.get(key)
        if not store.log.on:
            return
        for (key, parent), tier in zip(came, warmest, strict=True):
            source = store.levels[tier].name if tier >= 0 else ""
            kind = EventKind.MOVED if source else EventKind.STORED
            store.log.record(kind, [key], tier=DEVICE, parent=parent, source=source)
        store.log.record(EventKind.REMOVED, gone, tier=DEVICE, cause=cause)

    # ------------------------------------------------------------------ whether all agree

    def check_integrity(self) -> None:
        """Walk all books; raise `CacheError` where two of them disagree."""
        store, index = self._store, self._store.index
        for book in (index, store.backlog, store.beginnings):
            book.check_integrity()
        for tier, (level, pool, policy) in enumerate(zip(store.levels, store.pools, store.policies, strict=True)):
            pool.check_integrity()
            policy.check_integrity()
            live = [node for node in index if index.slot[tier][node] >= 0]
            if len(live) + len(pool.draining()) != pool.used:
                raise CacheError(f"{level.name}: {len(live)} copies own {pool.used} slots")
            ready = [node for node in live if index.is_ready(node, tier)]
            if len(policy) != len(ready) or not all(node in policy for node in ready):
                raise CacheError(f"{level.name}: the eviction policy knows {len(policy)} of {len(ready)} chunks")
        for node, pins in store.pins.items():
            if index.key[node] is None or not pins or any(pin.node != node for pin in pins):
                raise CacheError(f"node {node} is pinned, and gone")
