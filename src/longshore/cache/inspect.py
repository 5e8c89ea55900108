"""Read-only views of a `CacheState`: residents, occupancy, and `check_integrity`."""

from __future__ import annotations

from longshore.cache.columns import column
from longshore.cache.pool import READY, STATES
from longshore.cache.state import CacheState
from longshore.cache.types import Resident, SizeStats, TierStats
from longshore.errors import CacheError


def residents(state: CacheState) -> list[Resident]:
    """Every chunk that is ready or being filled, once for each tier that it is in."""
    index, nodes = state.index, list(state.index)
    return [
        Resident(
            index.key[node],
            before,
            state.slot(tier, slot),
            STATES[index.pools[tier].state[slot]],
        )
        for node, before in zip(nodes, index.before(nodes), strict=True)
        for tier in index.tiers
        if (slot := index.slot[tier][node]) >= 0
    ]


def stats(state: CacheState) -> tuple[TierStats, ...]:
    """Occupancy per tier, warmest first."""
    return tuple(
        TierStats(
            level.name,
            pool.capacity,
            pool.used,
            pool.state.count(READY),
            pool.slabs.nbytes,
            pool.used_bytes,
            tuple(SizeStats(size, *pool.used_by(each)) for each, size in enumerate(pool.slabs.image_bytes)),
        )
        for level, pool in zip(state.levels, state.pools, strict=True)
    )


def check_integrity(state: CacheState) -> None:
    """Check all data structures; raises `CacheError` where two of them are inconsistent."""
    index, nodes = state.index, state.index.entered()
    for book in (index, state.backlog, state.partials):
        book.check_integrity()
    for tier, (level, pool, policy) in enumerate(zip(state.levels, state.pools, state.policies, strict=True)):
        pool.check_integrity()
        policy.check_integrity()
        live = nodes[column(index.slot[tier])[nodes] >= 0]
        if len(live) + len(pool.draining()) != pool.used:
            raise CacheError(f"{level.name}: {len(live)} copies use {pool.used} slots")
        ready = nodes[state.are_ranked(nodes, tier)]
        if len(policy) != len(ready) or not policy.resident(index.size)[ready].all():
            raise CacheError(f"{level.name}: the eviction policy has {len(policy)} of {len(ready)} ready chunks")
    for node, pins in state.pins.items():
        if index.key[node] is None or not pins or any(pin.node != node for pin in pins):
            raise CacheError(f"node {node} is pinned, but was removed")
