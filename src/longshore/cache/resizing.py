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
    first = max(0, slots) * pool.slabs.stride
    above = [node for node in pool.node[first:] if node] if discard else []
    going = set(above)
    if not all(store.eviction.may_go_with(node, tier, going) for node in above):
        raise CapacityError(f"some of the {len(above)} chunks from slot {slots} on are in use, or needed by others")
    if slots < 0 or DRAINING in pool.state[first:]:
        pool.resize(slots)  # which says what is wrong
    for node in sorted(above, key=lambda node: -index.depth[node]):
        store.detach(node, tier, cause="discarded")
    pool.resize(slots)
    index.resize()
    store.fit()
    store.changes += 1
    for each, policy in zip(store.pools, store.policies, strict=True):
        policy.resize(each.capacity, index.key)
