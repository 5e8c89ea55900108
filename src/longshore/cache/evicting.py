"""Which copies go when a tier is full: asks the tier's policy, and says no where a copy is needed.

    policy names the coldest ──► may it go? ──► yes: out of all books, and what is before it may be next
                                     │
                                     └► no: held by the policy until something changes (`Store` tells it)

Nothing is ever looked at twice without a cause, so an eviction costs the same however much may not go.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from longshore.cache.events import EVICTED
from longshore.cache.many import Many
from longshore.errors import IntegrityError

if TYPE_CHECKING:
    from longshore.cache.store import Store

_ROUNDS = 4
"""At most so many rounds for each chunk of a tier: in each, one goes or is held, and some that it kept are released."""

_AT_FIRST, _AT_LEAST = 2048, 256
"""How many copies are looked at together at first; later twice as many as went, or stay, but no fewer than this."""


class Eviction:
    """The evictions of one `Store`."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._many = Many(store)
        self._passed_over: list[list[deque[int]]] = [[deque() for _ in pool.slabs.images] for pool in store.pools]
        """Dirty chunks that an eviction passed over, by tier and pool, coldest first; some were cleaned, or used."""

    def evict(self, tier: int, count: int, pool: int = 0, *, spare_dirty: bool) -> int:
        """Evict at most `count` copies of `pool` from `tier`, coldest first, and says how many.

        What is not backed up is spared if `spare_dirty`.
        """
        store = self._store
        gone = 0 if spare_dirty else self._evict_passed_over(tier, count, pool)
        gone += self._evict(tier, count - gone, pool, spare_dirty=spare_dirty)
        store.counters.evictions[store.levels[tier].name] += gone
        return gone

    def may_go(self, node: int, tier: int) -> bool:
        """Whether nothing works on this ready copy, holds it, or needs it to be reached."""
        store, index = self._store, self._store.index
        if store.pools[tier].readers[index.slot[tier][node]] or self._stays_warm(node, tier):
            return False
        above = index.coldest_without(node, tier)
        last = above < 0 or not any(index.is_ready(node, t) for t in index.tiers if t != tier)
        if last and (above >= 0 or store.is_kept(node)):
            return False
        return above >= tier or not index.reach[above + 1][node]

    def may_go_with(self, node: int, tier: int, going: Collection[int]) -> bool:
        """Whether a copy may go once those of `going` in the same tier have."""
        store, index = self._store, self._store.index
        above = index.coldest_without(node, tier)
        if not index.is_ready(node, tier) or store.pools[tier].readers[index.slot[tier][node]]:
            return False
        if self._stays_warm(node, tier):
            return False
        if (above < 0 and store.is_kept(node)) or (above >= 0 and not index.is_ready(node, above)):
            return False
        return above >= tier or all(
            index.coldest_without(child, tier) <= above and (child in going or index.slot[tier][child] < 0)
            for child in index.children(node)
        )

    def _stays_warm(self, node: int, tier: int) -> bool:
        return tier == 0 and (bool(self._store.seen[node]) or node in self._store.warm)

    def _evict(self, tier: int, count: int, pool: int, *, spare_dirty: bool) -> int:
        """Evict in the policy's order: as many at once as may go together, the others one by one."""
        policy, gone, several = self._store.order(tier, pool), 0, min(count, _AT_FIRST)
        rounds = _ROUNDS * len(policy) + _AT_LEAST
        while gone < count and (nodes := policy.ahead(several)):
            rounds -= 1
            if rounds < 0:
                raise IntegrityError(f"the eviction order of tier {tier} names the same chunks again and again")
            if spare_dirty and (passed := self._store.backlog.leading_sole(nodes, tier)):
                self._remember(nodes[:passed], tier, pool)
                policy.keep(nodes[:passed])
                several = max(2 * passed, _AT_LEAST)
                continue
            free, kept = self._many.settle(nodes, tier, policy, count - gone)
            gone += free
            several = max(2 * (free or kept), _AT_LEAST)
            if not kept:
                several = min(several, count - gone)
            if not free and not kept:
                gone += self._evict_few(tier, several, pool, spare_dirty=spare_dirty)
        return gone

    def _evict_few(self, tier: int, count: int, pool: int, *, spare_dirty: bool) -> int:
        """Look at the `count` coldest, one by one; how many went."""
        policy, gone = self._store.order(tier, pool), 0
        for _ in range(count):
            node = policy.coldest()
            if not node:
                break
            if self.may_go(node, tier) and not self._pass_over(node, tier, pool, spare_dirty=spare_dirty):
                self._store.detach(node, tier, cause=EVICTED)
                gone += 1
            else:
                policy.hold(node)
        return gone

    def _remember(self, nodes: Sequence[int], tier: int, pool: int) -> None:
        """These dirty chunks were passed over."""
        queue = self._passed_over[tier][pool]
        if len(queue) > 2 * len(self._store.policies[tier]) + 64:
            kept = dict.fromkeys(each for each in queue if self._is_passed_over(each, tier, pool))
            queue = self._passed_over[tier][pool] = deque(kept)
        queue.extend(nodes)

    def _evict_passed_over(self, tier: int, count: int, pool: int) -> int:
        """Evict dirty chunks that were passed over: they are colder than any that the policy would name."""
        gone = 0
        queue = self._passed_over[tier][pool]
        while gone < count and queue:
            node = queue.popleft()
            if self._is_passed_over(node, tier, pool) and self.may_go(node, tier):
                self._store.detach(node, tier, cause=EVICTED)
                gone += 1
        return gone

    def is_spared(self, node: int, tier: int, *, spare_dirty: bool) -> bool:
        """What is not below is spared on request; and always if a warmer tier has it: it would be written again."""
        return self._is_warmer(node, tier) or (spare_dirty and self._store.backlog.is_dirty(node, tier))

    def _is_warmer(self, node: int, tier: int) -> bool:
        return 0 <= self._store.index.coldest_without(node, tier) < tier

    def _pass_over(self, node: int, tier: int, pool: int, *, spare_dirty: bool) -> bool:
        """Whether `node` is spared; if that is because it is dirty, remember it."""
        if not self.is_spared(node, tier, spare_dirty=spare_dirty):
            return False
        if not self._is_warmer(node, tier):
            self._remember((node,), tier, pool)
        return True

    def _is_passed_over(self, node: int, tier: int, pool: int) -> bool:
        return self._store.backlog.is_dirty(node, tier) and self._store.order(tier, pool).is_held(node)
