"""Slabs of one image size that are emptied for another.

    wanted: slots of A      a slab of B     if it was last used before any of A's own: all that is in it goes
                            A's own         otherwise, in the order of their eviction policy (`evicting`)
                            a slab of B     of any age, if nothing of A may go

So what goes is what was not used for longest, of whatever size, as nearly as whole slabs can tell. A slab is only
emptied when all of it may go, together with what cannot be reached without it, tails before heads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import islice
from typing import TYPE_CHECKING

from longshore.cache.events import EVICTED
from longshore.cache.pool import READY
from longshore.cache.slab_pool import SlabPool

if TYPE_CHECKING:
    from longshore.cache.store import Store

_TRIES = 8
"""Slabs that are looked at, the oldest first, for one that may be emptied."""

_MORE = 64
"""Chunks outside a slab that may have to go with it."""


class Emptying:
    """Room for one size from that of others, in the tiers of one `Store`."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def make_room(self, tier: int, slots: SlabPool, wanted: Mapping[int, int], *, spare_dirty: bool) -> None:
        """Evict until as many slots as `wanted`, by pool, can be had together of those of `tier`; as far as may be."""
        for _ in range(sum(wanted.values())):  # what was emptied for one size may be lacking for another
            pool, missing = slots.shortage(wanted)
            if not missing:
                break
            if self._empty_one(tier, slots, pool, slots.last_use(pool), spare_dirty=spare_dirty):
                continue
            several = min(missing, slots.slabs.images[pool])
            if self._store.eviction.evict(tier, several, pool, spare_dirty=spare_dirty):
                continue
            if not self._empty_one(tier, slots, pool, math.inf, spare_dirty=spare_dirty):
                break

    def _empty_one(self, tier: int, slots: SlabPool, pool: int, before: float, *, spare_dirty: bool) -> bool:
        """Empty a slab of another size that was last used earlier than `before`; says whether there was one."""
        store = self._store
        going: list[int] = []
        for slab, used in islice(slots.slabs_of_others(pool), _TRIES):
            if used >= before or (going := self._goes_with(tier, slots, slab, spare_dirty=spare_dirty)):
                break
        for node in sorted(going, key=lambda node: -store.index.depth[node]):
            store.detach(node, tier, cause=EVICTED)
        store.counters.evictions[store.levels[tier].name] += len(going)
        return bool(going)

    def _goes_with(self, tier: int, slots: SlabPool, slab: int, *, spare_dirty: bool) -> list[int]:
        """All that goes when `slab` is emptied; nothing if it cannot be."""
        index, eviction = self._store.index, self._store.eviction
        inside = slots.contents(slab)
        if any(slots.state[slot] != READY for slot in inside):
            return []
        going = dict.fromkeys(slots.node[slot] for slot in inside)
        queue = list(going)
        for node in queue:
            if index.coldest_without(node, tier) >= tier:
                continue
            below = [child for child in index.children(node) if child not in going and index.slot[tier][child] >= 0]
            going.update(dict.fromkeys(below))
            queue += below
            if len(going) > len(inside) + _MORE:
                return []
        if all(
            eviction.may_go_with(node, tier, going) and not eviction.is_spared(node, tier, spare_dirty=spare_dirty)
            for node in going
        ):
            return list(going)
        return []
