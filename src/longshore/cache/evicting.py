"""Which copies go when a tier is full: asks the tier's policy, and says no where a copy is needed.

    policy names the coldest ──► may it go? ──► yes: out of all books, and what is before it may be next
                                     │
                                     └► no: held by the policy until something changes (`Store` tells it)

Nothing is ever looked at twice without a cause, so an eviction costs the same however much may not go.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from longshore.cache.states import READY

if TYPE_CHECKING:
    from longshore.cache.store import Store

EVICTED = "evicted"


class Eviction:
    """The evictions of one `Store`."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._passed_over: deque[int] = deque()
        """Dirty chunks that an eviction has passed over, coldest first; some have been cleaned, or used, since."""

    def evict(self, tier: int, count: int, *, spare_dirty: bool) -> int:
        """Evict at most `count` copies from `tier`, coldest first, and says how many; sparing what is not backed up."""
        store = self._store
        gone = 0 if spare_dirty else self._evict_passed_over(tier, count)
        if gone < count:
            alone = len(store.levels) == 1
            gone += self._evict_alone(count) if alone else self._evict(tier, count - gone, spare_dirty=spare_dirty)
        store.counters.evictions[store.levels[tier].name] += gone
        return gone

    def may_go(self, node: int, tier: int) -> bool:
        """Whether nothing works on this ready copy, holds it, or needs it to be reached."""
        store, index = self._store, self._store.index
        if store.pools[tier].readers[index.slot[tier][node]]:
            return False
        above = index.coldest_without(node, tier)
        last = above < 0 or not any(index.is_ready(node, t) for t in index.tiers if t != tier)
        if last and (above >= 0 or node in store.pins):
            return False
        return above >= tier or not index.reach[above + 1][node]

    def _evict(self, tier: int, count: int, *, spare_dirty: bool) -> int:
        def let_go(node: int) -> bool:
            if not self.may_go(node, tier) or self._is_spared(node, tier, spare_dirty):
                return False
            self._store.detach(node, tier, cause=EVICTED)
            return True

        return self._store.policies[tier].evict(count, let_go)

    def _evict_alone(self, count: int) -> int:
        """The same where there is one tier, and so no other copies and no backlog: at half the cost."""
        store = self._store
        index, pool, policy, pins = store.index, store.pools[0], store.policies[0], store.pins
        slots, reach, parents = index.slot[0], index.reach[0], index.parent
        readers, state = pool.readers, pool.state
        drop, remove, retention, log = index.drop_leaf, policy.remove, store.retention, store.log
        freed: list[int] = []
        key_of = index.key

        def let_go(node: int) -> bool:
            slot = slots[node]
            if reach[node] or readers[slot] or node in pins:
                return False
            parent = parents[node]
            if log.on:
                store.log_loss(node, 0, EVICTED)
            key = key_of[node]
            remove(node, evicted=key)
            drop(node, key)
            freed.append(slot)
            if retention.used:
                retention.forget(node)
            if parent and not reach[parent] and state[slots[parent]] == READY:
                policy.release((parent,))
            return True

        gone = policy.evict(count, let_go)
        pool.free_all(freed)
        return gone

    def _evict_passed_over(self, tier: int, count: int) -> int:
        """Evict dirty chunks that were passed over: they are colder than any that the policy would name."""
        gone = 0
        while tier == 0 and gone < count and self._passed_over:
            node = self._passed_over.popleft()
            if self._is_passed_over(node) and self.may_go(node, 0):
                self._store.detach(node, 0, cause=EVICTED)
                gone += 1
        return gone

    def _is_spared(self, node: int, tier: int, spare_dirty: bool) -> bool:
        """In a colder tier, what the warmest has too is spared: it would only have to be written again."""
        store = self._store
        if tier:
            return store.index.slot[0][node] >= 0
        if not spare_dirty or not store.backlog.is_dirty(node):
            return False
        if len(self._passed_over) > 2 * len(store.policies[0]) + 64:
            self._passed_over = deque(dict.fromkeys(filter(self._is_passed_over, self._passed_over)))
        self._passed_over.append(node)
        return True

    def _is_passed_over(self, node: int) -> bool:
        return self._store.backlog.is_dirty(node) and self._store.policies[0].is_held(node)
