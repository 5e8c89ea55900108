"""Tiers that grow and shrink while they are in use: all or nothing.

slots   0 ─────────── new size ─────────── old size
        stays         in the way: refused, or discarded together if nothing needs them
"""

from __future__ import annotations

from longshore.cache.states import DRAINING
from longshore.cache.store import Store
from longshore.errors import CapacityError


def resize(store: Store, tier: int, slots: int, *, discard: bool) -> None:
    """Have `slots` slots in `tier`; with `discard`, what lies above goes, if all of it may.

    Raises `CapacityError`, and changes nothing, if something that must stay is in the way.
    """
    pool, index = store.pools[tier], store.index
    above = [node for node in pool.node[max(0, slots) :] if node] if discard else []
    going = set(above)
    if not all(_may_go(store, node, tier, going) for node in above):
        raise CapacityError(f"some of the {len(above)} chunks from slot {slots} on are in use, or needed by others")
    if slots < 0 or DRAINING in pool.state[slots:]:
        pool.resize(slots)  # which says what is wrong
    for node in sorted(above, key=lambda node: -index.depth[node]):
        store.detach(node, tier, cause="discarded")
    pool.resize(slots)
    index.resize()
    store.fit()
    for each, policy in zip(store.pools, store.policies, strict=True):
        policy.resize(each.capacity, index.key)


def _may_go(store: Store, node: int, tier: int, going: set[int]) -> bool:
    """Whether a copy may go once those of `going` in the same tier have."""
    index = store.index
    above = index.coldest_without(node, tier)
    if not index.is_ready(node, tier) or store.pools[tier].readers[index.slot[tier][node]]:
        return False
    if (above < 0 and node in store.pins) or (above >= 0 and not index.is_ready(node, above)):
        return False
    return above >= tier or all(
        index.coldest_without(child, tier) <= above and (child in going or index.slot[tier][child] < 0)
        for child in index.children(node)
    )
