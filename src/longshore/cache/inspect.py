"""Views of a `Store` that change nothing: residency, occupancy, reasons for misses, and `check_integrity`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from longshore.boundary import Key
from longshore.cache.columns import column, marks
from longshore.cache.pool import READY, STATES
from longshore.cache.store import Store
from longshore.cache.types import MissReason, Resident, Run, SizeStats, TierStats
from longshore.errors import CacheError

_NOWHERE = 255
"""No tier has this number."""


def runs(store: Store, nodes: Sequence[int]) -> tuple[Run, ...]:
    """Where `nodes` are, as runs by the warmest tier that has them ready."""
    at = np.array(nodes, np.int32)
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


def residents(store: Store) -> list[Resident]:
    """Every chunk that has a slot and can be found, or soon can, once for each tier that it is in."""
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


def miss(store: Store, key: Key) -> MissReason:
    """Why a request that got no further than to some chunk before `key` does without it."""
    index = store.index
    node = index.get(key)
    if not node:
        return MissReason.ABSENT
    return MissReason.IN_FLIGHT if index.warmest_ready(node) < 0 else MissReason.BEHIND


def count_misses(store: Store, keys: Sequence[Key], end: int, known: int, foreign: int = 0) -> None:
    """A request got no further than to before `keys[end]`; a tier will have what leads to before `keys[known]`.

    So many of the rest a foreign tier is known to have. Orphans may be among it.
    """
    misses = store.counters.misses
    if store.index.orphans:
        known = len(keys)
    for key in keys[end:known]:
        misses[miss(store, key)] += 1
    misses[MissReason.ABSENT] += len(keys) - known - foreign
    misses[MissReason.FOREIGN] += foreign


def check_integrity(store: Store) -> None:
    """Walk all books; raise `CacheError` where two of them disagree."""
    index = store.index
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
