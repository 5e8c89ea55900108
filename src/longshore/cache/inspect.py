"""Read-only views of a `Store`: residents, occupancy, and `check_integrity`."""

from __future__ import annotations

from longshore.cache.columns import column
from longshore.cache.pool import STATES
from longshore.cache.store import Store
from longshore.cache.types import Resident, SizeStats, TierStats
from longshore.errors import CacheError


def residents(store: Store) -> list[Resident]:
    """Every chunk that is ready or being filled, once for each tier that it is in."""
    index, nodes = store.index, list(store.index)
    return [
        Resident(
            index.key[node],
            before,
            store.slot(tier, slot),
            STATES[index.pools[tier].state[slot]],
        )
        for node, before in zip(nodes, index.before(nodes), strict=True)
        for tier in index.tiers
        if (slot := index.slot[tier][node]) >= 0
    ]


def stats(store: Store) -> tuple[TierStats, ...]:
    """Occupancy per tier, warmest first."""
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


def check_integrity(store: Store) -> None:
    """Check all data structures; raises `CacheError` where two of them are inconsistent."""
    index, nodes = store.index, store.index.entered()
    for book in (index, store.backlog, store.partials):
        book.check_integrity()
    for tier, (level, pool, policy) in enumerate(zip(store.levels, store.pools, store.policies, strict=True)):
        pool.check_integrity()
        policy.check_integrity()
        live = nodes[column(index.slot[tier])[nodes] >= 0]
        if len(live) + len(pool.draining()) != pool.used:
            raise CacheError(f"{level.name}: {len(live)} copies use {pool.used} slots")
        ready = live[index.are_ready(live, tier)]
        if len(policy) != len(ready) or not policy.resident(index.size)[ready].all():
            raise CacheError(f"{level.name}: the eviction policy has {len(policy)} of {len(ready)} ready chunks")
    for node, pins in store.pins.items():
        if index.key[node] is None or not pins or any(pin.node != node for pin in pins):
            raise CacheError(f"node {node} is pinned, but was removed")
