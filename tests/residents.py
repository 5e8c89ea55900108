"""Which chunks a cache has, by tier: what tests compare with a model."""

from __future__ import annotations

from typing import NamedTuple

from longshore.boundary import Key, Slot
from longshore.cache import SlotState, TieredCache
from longshore.cache.pool import STATES


class Resident(NamedTuple):
    """One chunk in one tier: filling or ready."""

    key: Key
    parent: Key | None
    slot: Slot
    state: SlotState


def residents_of(cache: TieredCache) -> list[Resident]:
    """Every chunk that is ready or being filled, once for each tier that it is in."""
    state, index = cache._state, cache._state.index
    nodes = index.all_nodes().tolist()
    return [
        Resident(index.key[node], before, Slot(tier.name, pool.size_class_of(slot), slot), STATES[pool.state[slot]])
        for node, before in zip(nodes, index.parent_keys(nodes), strict=True)
        for tier, pool, slots in zip(state.tiers, state.pools, index.slot, strict=True)
        if (slot := slots[node]) >= 0
    ]
