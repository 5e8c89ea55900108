"""Evictions of many copies at once: the same that would go one by one, in the same order, by whole arrays.

    coldest first   ── safe ── safe ── safe ── spared ── spared ── sole ── sole ── ...
                       └──── go together ────┘  └─ held together ┘

    safe     a colder tier has it: nothing can be lost, and nobody needs this copy to be reached
    spared   only a warmer tier has it too: it would be written again; or something reads it
    sole     the only copy: in the last tier it may go if nothing is behind it but what has just gone

Copies that are not backed up are left to whoever looks at them one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from longshore.cache.columns import column, leading, marks
from longshore.cache.events import EVICTED
from longshore.cache.nodes import LIMBO
from longshore.cache.pool import READY

if TYPE_CHECKING:
    from longshore.cache.eviction import EvictionPolicy
    from longshore.cache.store import Store

Mask = npt.NDArray[np.bool_]


class Many:
    """Runs of copies of one `Store` that go, or stay, together."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def settle(self, nodes: Sequence[int], tier: int, policy: EvictionPolicy, most: int) -> tuple[int, int]:
        """Evict at most so many of `nodes`, which `policy` has just named, or hold some: the leading ones of one kind.

        Says how many went, and how many are held. Neither if the first is to be looked at by itself.
        """
        at = np.array(nodes, np.int32)
        safe, sole = self._kinds(at, tier)
        if run := min(leading(safe), most):
            self._drop_copies(nodes[:run], at[:run], tier)
            return run, 0
        kept = 0
        if not sole[0]:
            kept = leading(~safe & ~sole)
        elif tier == self._store.last:
            alone = leading(sole)
            going, kept = self._leaves(nodes[:alone], at[:alone], tier, policy, most)
            if going:
                self._drop_leaves(going, tier)
                return len(going), 0
        if kept:
            policy.keep(nodes[:kept])
        return 0, kept

    def _kinds(self, at: npt.NDArray[np.int32], tier: int) -> tuple[Mask, Mask]:
        """Which of the nodes `at` are safe, and which have their only copy in `tier`."""
        store, index = self._store, self._store.index
        ready, colder, others = (np.zeros(len(at), bool) for _ in range(3))
        for other in index.tiers:
            if other != tier:
                slots = column(index.slot[other])[at]
                there = slots >= 0
                others |= there
                ready[there] |= marks(store.pools[other].state)[slots[there]] == READY
                if other > tier:
                    colder |= there
        if not np.count_nonzero(others):
            return others, ~others
        return self._idle(at, tier) & colder & ready, ~others

    def _idle(self, at: npt.NDArray[np.int32], tier: int) -> Mask:
        """Which copies nothing reads; in the warmest tier also not kept there, nor looked at in this step."""
        store = self._store
        idle: Mask = column(store.pools[tier].readers)[column(store.index.slot[tier])[at]] == 0
        if not tier:
            idle &= marks(store.seen)[at] == 0
            if store.warm:
                idle &= [node not in store.warm for node in at.tolist()]
        return idle

    def _leaves(
        self, nodes: Sequence[int], at: npt.NDArray[np.int32], tier: int, policy: EvictionPolicy, most: int
    ) -> tuple[list[int], int]:
        """The sole copies that go one after the other, with those that they set free; or how many lead that cannot go.

        A node may go when nothing is behind it, or only the one before it, which goes first.
        """
        index = self._store.index
        parents, below = column(index.parent)[at], column(index.reach[0])[at]
        behind = np.zeros(len(at), bool)
        np.equal(parents[:-1], at[1:], out=behind[1:])
        idle = self._free(at, tier)
        free = leading(idle & (below <= behind))
        if not free:
            return [], leading(~idle | (below > 0))
        tops = parents[:free] > LIMBO
        tops[:-1] &= ~behind[1:free]
        return self._with_freed(nodes[:free], tops.nonzero()[0].tolist(), tier, policy, most), 0

    def _with_freed(
        self, nodes: Sequence[int], tops: Sequence[int], tier: int, policy: EvictionPolicy, most: int
    ) -> list[int]:
        """At most so many of `nodes`, which go; and right behind any of `tops` the held ones that it sets free.

        Ends where one is set free that does not go at once, but may go before what comes next.
        """
        parent, reach, is_held = self._store.index.parent, self._store.index.reach[0], policy.is_held
        going: list[int] = []
        left: dict[int, int] = {}
        """Children of nodes that have lost some."""
        begin = 0
        for top in tops:
            above = parent[nodes[top]]
            left[above] = left.get(above, reach[above]) - 1
            if left[above] or not is_held(above):
                continue
            going += nodes[begin : top + 1]
            begin = top + 1
            chain = self._held_chain(above, tier, policy, left, most - len(going))
            follow = policy.following(nodes[top], chain)
            going += chain[:follow]
            if len(going) >= most or follow < len(chain):
                return going[:most]
        return [*going, *nodes[begin:]][:most]

    def _drop_copies(self, nodes: Sequence[int], at: npt.NDArray[np.int32], tier: int) -> None:
        """Evict safe copies: what is left of each reaches as far down as before."""
        store, index = self._store, self._store.index
        slots = column(index.slot[tier])[at]
        self._log(nodes, tier)
        store.counters.demotions[store.levels[tier].name] += len(nodes)
        store.policies[tier].leave(nodes, index.key[at].tolist())
        index.drop_copies(at, tier)
        store.pools[tier].free_all(slots)
        store.reconsider(at[::-1], apart_from=tier)

    def _drop_leaves(self, nodes: Sequence[int], tier: int) -> None:
        """Evict sole copies of the last tier."""
        store, index, policy = self._store, self._store.index, self._store.policies[tier]
        at = np.array(nodes, np.int32)
        keys, slots = index.key[at].tolist(), column(index.slot[tier])[at]
        self._log(nodes, tier)
        policy.leave(nodes, keys)
        parents = index.drop_leaves(at, keys, tier)
        store.pools[tier].free_all(slots)
        store.backlog.forget_all(nodes)
        store.forget(nodes)
        freed = [parent for parent in parents if parent > LIMBO and not index.reach[0][parent]]
        for parent in freed:
            if index.is_ready(parent, tier) and policy.is_held(parent):
                policy.release(self._held_chain(parent, tier, policy, {}, len(policy))[::-1])
        if tier and freed:
            store.reconsider(np.array(freed, np.int32), apart_from=tier)

    def _held_chain(self, node: int, tier: int, policy: EvictionPolicy, left: dict[int, int], most: int) -> list[int]:
        """`node`, which is held, and behind which nothing is left; and those that may go right after it, each if held.

        At most so many in all. `left` has how many children some nodes will have, of those that will have fewer than
        they have now; it is told what will be behind the last of these.
        """
        parent, reach, is_held = self._store.index.parent, self._store.index.reach[0], policy.is_held
        if most < 1 or not self._free(np.array((node,), np.int32), tier)[0]:  # a warmer tier may have the whole path
            return []
        chain: list[int] = []
        while node > LIMBO and len(chain) < most and is_held(node):
            chain.append(node)
            node = parent[node]
            if left.get(node, reach[node]) > 1:
                break
        del chain[leading(self._free(np.array(chain, np.int32), tier)) :]
        above = parent[chain[-1]]
        left[above] = left.get(above, reach[above]) - 1
        return chain

    def _free(self, at: npt.NDArray[np.int32], tier: int) -> Mask:
        """Which of the nodes `at`, whose copies in `tier` are ready, have no other copy, and nothing that keeps it."""
        store, index = self._store, self._store.index
        free = self._idle(at, tier)
        if tier:
            free &= marks(store.seen)[at] == 0
        for other in index.tiers:
            if other != tier:
                free &= column(index.slot[other])[at] < 0
        if store.pins:
            free &= [node not in store.pins for node in at.tolist()]
        return free

    def _log(self, nodes: Sequence[int], tier: int) -> None:
        if self._store.log.on:
            for node in nodes:
                self._store.watching.log_loss(node, tier, EVICTED)
