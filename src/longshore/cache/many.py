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
from longshore.cache.nodes import ROOT
from longshore.cache.states import READY

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
        free = kept = 0
        if sole[0] and tier == self._store.last:
            free, kept = self._leaves(nodes[: leading(sole)], tier, policy)
            free = min(free, most)
        elif not sole[0]:
            kept = leading(~safe & ~sole)
        if free:
            self._drop_leaves(nodes[:free], at[:free], tier)
        elif kept:
            policy.keep(nodes[:kept])
        return free, kept

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
        if not others.any():
            return others, ~others
        return self._idle(at, tier) & colder & ready, ~others

    def _idle(self, at: npt.NDArray[np.int32], tier: int) -> Mask:
        """Which copies nothing reads, nor has looked at in this step."""
        store = self._store
        idle: Mask = column(store.pools[tier].readers)[column(store.index.slot[tier])[at]] == 0
        if not tier:
            idle &= marks(store.seen)[at] == 0
        return idle

    def _leaves(self, nodes: Sequence[int], tier: int, policy: EvictionPolicy) -> tuple[int, int]:
        """How many sole copies lead that may go one after the other, up to the first that sets another free; or cannot.

        A node may go when nothing is behind it, or only the one before it, which goes first.
        """
        store, index = self._store, self._store.index
        at = np.array(nodes, np.int32)
        parents, reach = column(index.parent)[at], column(index.reach[0])
        behind = np.zeros(len(at), bool)
        np.equal(parents[:-1], at[1:], out=behind[1:])
        idle = self._idle(at, tier) & (marks(store.seen)[at] == 0)
        if store.pins:
            idle &= [node not in store.pins for node in nodes]
        below = reach[at]
        free = leading(idle & (below <= behind))
        if not free:
            return 0, leading(~idle | (below > 0))
        ends = (parents != ROOT) & (reach[parents] == 1)
        ends[:-1] &= ~behind[1:]
        freed = np.flatnonzero(ends[:free]).tolist()
        freeing = (i for i in freed if index.slot[tier][parents[i]] >= 0 and policy.is_held(int(parents[i])))
        return next(freeing, free - 1) + 1, 0

    def _drop_copies(self, nodes: Sequence[int], at: npt.NDArray[np.int32], tier: int) -> None:
        """Evict safe copies: what is left of each reaches as far down as before."""
        store, index = self._store, self._store.index
        slots = column(index.slot[tier])[at]
        self._log(nodes, tier)
        store.counters.demotions[store.levels[tier].name] += len(nodes)
        store.policies[tier].leave(nodes, index.key[at].tolist())
        index.drop_copies(at, tier)
        store.pools[tier].free_all(slots)
        store.reconsider(at, apart_from=tier)

    def _drop_leaves(self, nodes: Sequence[int], at: npt.NDArray[np.int32], tier: int) -> None:
        """Evict sole copies of the last tier."""
        store, index, policy = self._store, self._store.index, self._store.policies[tier]
        keys, slots = index.key[at].tolist(), column(index.slot[tier])[at]
        self._log(nodes, tier)
        policy.leave(nodes, keys)
        parents = index.drop_leaves(at, keys, tier)
        store.pools[tier].free_all(slots)
        store.backlog.forget_all(nodes)
        store.forget(nodes)
        freed = [parent for parent in parents if parent and not index.reach[0][parent]]
        for parent in freed:
            if index.is_ready(parent, tier):
                policy.release(self._held_chain(parent, tier, policy)[::-1])
        if tier and freed:
            store.reconsider(np.array(freed, np.int32), apart_from=tier)

    def _held_chain(self, node: int, tier: int, policy: EvictionPolicy) -> list[int]:
        """`node`, and those of its ancestors that may go right after it, as long as they are held."""
        store, index = self._store, self._store.index
        parent, reach, slots, is_held = index.parent, index.reach[0], index.slot[tier], policy.is_held
        is_kept, state = store.is_kept, store.pools[tier].state
        chain = [node]
        while is_held(node) and not is_kept(node) and (node := parent[node]) and reach[node] == 1:
            slot = slots[node]
            if slot < 0 or state[slot] != READY:
                break
            chain.append(node)
        return chain

    def _log(self, nodes: Sequence[int], tier: int) -> None:
        if self._store.log.on:
            for node in nodes:
                self._store.watching.log_loss(node, tier, EVICTED)
