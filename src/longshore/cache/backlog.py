"""Dirty chunks, which no colder tier has: queues of chunks to copy down, heads first.

    dirty     ready in one tier and in none below, though there is one: lost if its slot is reused
    queued    dirty, and its parent is ready below: can be copied down now, oldest first
    seldom    not used often enough for a selective write policy: not dirty, evicted without a copy
    failed    a copy has failed, or the tier below has rejected it: not dirty until the next use
    orphan    not dirty: not copied down until a tier has its parent, evicted without a copy

A chunk is dirty in one tier at most, the coldest that has it, so one mark per chunk suffices.

Heads are copied first because the chunks of a tier and all colder ones have to be closed under "parent of"; a restart
finds these only. A chunk whose parent is being copied waits for that copy, because the write may fail, or is copied in
the same job. No operation searches: a chunk is queued when it becomes dirty, or when its parent becomes ready below.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from longshore.cache.columns import LISTS, LinkedLists, as_i32, filled, i32_view, resized, u8_view, unique
from longshore.cache.index import Index
from longshore.cache.nodes import ORPHANS, ROOT
from longshore.cache.pool import READY
from longshore.errors import CacheError

_CLEAN = 0

Nodes: TypeAlias = "Sequence[int] | npt.NDArray[np.int32]"


class Backlog:
    """The dirty chunks of `index`. `thresholds` are the uses of a chunk, by tier, before it is copied down."""

    def __init__(self, index: Index, thresholds: Sequence[int] = ()) -> None:
        self.counts = [0] * len(index.tiers)
        """Dirty chunks of each tier, queued ones included."""
        self._index = index
        self._last = len(index.tiers) - 1
        self._thresholds = [*thresholds[: self._last], *[0] * (self._last - len(thresholds))]
        self._most = max(self._thresholds, default=0)
        self._linked = LinkedLists()
        self._mark = filled(LISTS, dtype=np.uint8)
        """0 for clean; for dirty in tier t an odd number while waiting for the parent, an even one when queued."""
        self._uses = filled(LISTS, dtype=np.uint8)
        self._needs_use = filled(LISTS, dtype=np.uint8)
        """1 for chunks that are not copied before their next use."""

    def grow(self, nodes: int) -> None:
        """Nodes may now have any number below `nodes`."""
        if self._last:
            self._linked.grow(nodes)
            nodes = max(nodes, len(self._mark))
            self._mark, self._uses = resized(self._mark, nodes), resized(self._uses, nodes)
            self._needs_use = resized(self._needs_use, nodes)

    def is_dirty(self, node: int, tier: int) -> bool:
        """Whether `node` is dirty in `tier`."""
        return self._last > 0 and self._mark[node] != _CLEAN and _tier(self._mark[node]) == tier

    def are_clean(self, nodes: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        """Whether `nodes` are not to be copied down: some tier below has them, or rejected them; bool."""
        return u8_view(self._mark)[nodes] == _CLEAN if self._last else np.ones(len(nodes), bool)

    def dirty_in(self, nodes: npt.NDArray[np.int32]) -> npt.NDArray[np.int8]:
        """The tier in which each of `nodes` is dirty; -1 for none."""
        tiers: npt.NDArray[np.int8] = (u8_view(self._mark)[nodes].astype(np.int8) - 1) // 2
        return tiers

    def update(self, node: int) -> bool:
        """Update the mark of `node` after a change of its copies; returns whether it has become clean."""
        if not self._last:
            return False
        mark, tier = self._mark[node], self._dirty_in(node)
        was = (mark - 1) // 2  # -1 for clean
        if was == tier:
            return False
        if mark:
            self.counts[was] -= 1
            self._mark[node] = _CLEAN
            if _is_queued(mark):
                self._linked.remove(node)
        if tier >= 0:
            self.counts[tier] += 1
            self._mark[node] = _waiting(tier)
            if self._is_safe_below(self._index.parent[node], tier):
                self._queue(node, tier)
        return mark != _CLEAN

    def update_all(self, nodes: Nodes) -> list[int]:
        """`update` for many; returns those that have become clean."""
        if not self._last or not len(nodes):
            return []
        ids = as_i32(nodes)
        mark, due = u8_view(self._mark)[ids], self._all_due(ids)
        was = np.frombuffer(mark.tobytes().translate(_WAITING), np.uint8)
        changed = was != due
        if (count := np.count_nonzero(changed)) < len(ids):
            if not count:
                return []
            ids, mark, was, due = ids[changed], mark[changed], was[changed], due[changed]
        for node in ids[was != mark].tolist():
            self._linked.remove(node)
        for tier in range(self._last):
            becomes = (due == _waiting(tier)).nonzero()[0]
            self.counts[tier] += len(becomes) - int(np.count_nonzero(was == _waiting(tier)))
            if len(becomes):
                parents = i32_view(self._index.parent)[ids[becomes]]
                queued = becomes[self._are_safe_below(parents, tier)]
                due[queued] += 1
                self._linked.extend(_list(tier), ids[queued])
        u8_view(self._mark)[ids] = due
        clean: list[int] = ids[mark != _CLEAN].tolist()
        return clean

    def backed_up(self, nodes: Nodes, tier: int) -> None:
        """`nodes` have become ready in `tier`: queue their dirty children in warmer tiers."""
        children, mark = self._index.all_children(nodes), u8_view(self._mark)
        for warmer in range(tier):
            may_follow = children[mark[children] == _waiting(warmer)]
            mark[may_follow] += 1
            self._linked.extend(_list(warmer), may_follow)

    def exposed(self, node: int) -> None:
        """`node` was removed from a colder tier: its children may have to wait again."""
        for child in self._index.children(node):
            mark = self._mark[child]
            if mark and _is_queued(mark) and not self._is_safe_below(node, _tier(mark)):
                self._linked.remove(child)
                self._mark[child] = _waiting(_tier(mark))

    def fail(self, node: int) -> bool:
        """A copy of `node` to the tier below has failed. Returns whether it was dirty."""
        self._needs_use[node] = 1
        return self.update(node)

    def waits_for_use(self, node: int) -> bool:
        """Whether `node` is not copied before its next use."""
        return bool(self._needs_use[node])

    def reject(self, nodes: Sequence[int]) -> None:
        """Copy the dirty `nodes`, which no dirty chunk of their tier waits for, only after their next use."""
        u8_view(self._needs_use)[as_i32(nodes)] = 1
        self.update_all(nodes)

    def arrived(self, nodes: Nodes) -> None:
        """`nodes`, parents first, have become ready. A chunk after one that is not copied is not copied, either."""
        if not self._last:
            return
        needs_use, parent, coldest = self._needs_use, self._index.parent, self._index.coldest_tier
        ids = as_i32(nodes)
        if u8_view(needs_use)[i32_view(parent)[ids]].any():
            for node in ids.tolist():
                if needs_use[parent[node]] and not self._is_safe_below(parent[node], coldest(node)):
                    needs_use[node] = 1
        self.update_all(ids)

    def use(self, nodes: npt.NDArray[np.int32]) -> None:
        """The `nodes` were used: retry failed copies, and copy chunks that have reached the threshold."""
        if len(again := nodes[u8_view(self._needs_use)[nodes] != 0]):
            u8_view(self._needs_use)[again] = 0
            self.update_all(unique(again).tolist())
        if self._most:
            for node in nodes.tolist():
                self._count_use(node)

    def _count_use(self, node: int) -> None:
        """Count a use of `node`. Its ancestors count at least as many uses."""
        uses, parent = self._uses, self._index.parent
        if uses[node] >= self._most:
            return
        uses[node] += 1
        often = uses[node]
        while node > ORPHANS and uses[node] <= often:
            uses[node] = often
            self.update(node)
            node = parent[node]
            if uses[node] >= often:
                break

    def _dirty_in(self, node: int) -> int:
        """The tier in which `node` is dirty by its copies; -1 for none."""
        slots, last = self._index.slot, self._last
        if slots[last][node] >= 0 or self._index.depth[node] < 0:
            return -1
        tier = next((each for each in range(last - 1, -1, -1) if slots[each][node] >= 0), -1)
        if tier < 0 or self._index.pools[tier].state[slots[tier][node]] != READY:
            return -1
        return -1 if self._needs_use[node] or self._uses[node] < self._thresholds[tier] else tier

    def _all_due(self, nodes: npt.NDArray[np.int32]) -> npt.NDArray[np.uint8]:
        """The mark of each of `nodes` by its copies, not queued."""
        index, due = self._index, np.zeros(len(nodes), np.uint8)
        lost = i32_view(index.slot[self._last])[nodes] < 0  # copies that are not in the last tier
        if not np.count_nonzero(lost):
            return due
        for tier in range(self._last):
            dirty = index.are_ready(nodes, tier)
            if self._thresholds[tier]:
                dirty &= u8_view(self._uses)[nodes] >= self._thresholds[tier]
            if tier:
                due[i32_view(index.slot[tier])[nodes] >= 0] = _CLEAN
            due[dirty] = _waiting(tier)
        due *= lost
        if index.orphans:
            due[i32_view(index.depth)[nodes] < 0] = _CLEAN
        due[u8_view(self._needs_use)[nodes] != 0] = _CLEAN
        return due

    def _is_safe_below(self, node: int, tier: int) -> bool:
        """Whether `node` has a ready copy in a tier colder than `tier`, so that its children can be copied down."""
        index = self._index
        return node == ROOT or any(index.is_ready(node, colder) for colder in index.tiers[tier + 1 :])

    def _are_safe_below(self, nodes: npt.NDArray[np.int32], tier: int) -> npt.NDArray[np.bool_]:
        """The same for `nodes`."""
        safe: npt.NDArray[np.bool_] = nodes == ROOT
        for colder in self._index.tiers[tier + 1 :]:
            safe |= self._index.are_ready(nodes, colder)
        return safe

    def forget(self, node: int) -> None:
        """`node` is in no tier any more."""
        if self._last:
            self._needs_use[node] = 0
            self._uses[node] = 0
            self.update(node)

    def forget_all(self, nodes: Sequence[int]) -> None:
        """`forget` for clean `nodes`."""
        if self._last:
            ids = as_i32(nodes)
            u8_view(self._uses)[ids] = u8_view(self._needs_use)[ids] = 0

    def choose(self, tier: int, wanted: int) -> list[int]:
        """At most `wanted` chunks to copy down from `tier` in one job: the oldest heads, each with its descendants."""
        chosen: list[int] = []
        child, older, mark, waiting = self._index.child, self._index.older, self._mark, _waiting(tier)
        head = self._linked.first(_list(tier))
        while head != _list(tier) and len(chosen) < wanted:
            node, branches = head, list[int]()
            while node and len(chosen) < wanted:
                chosen.append(node)
                node = child[node]
                while node and (older[node] or mark[node] != waiting):  # continue with an only child that waits
                    if mark[node] == waiting:
                        branches.append(node)
                    node = older[node]
                if not node and branches:
                    node = branches.pop()
            head = self._linked.after[head]
        return chosen

    def chain(self, node: int) -> tuple[list[int], int]:
        """The chunks to copy down so that a colder tier has `node`, heads first, and their tier.

        None while one of them may not be copied, or waits for its parent.
        """
        if not (mark := self._mark[node]):
            return [], 0
        path = self._index.path(node, self._index.depth[node] + 1).tolist()
        chain = list(takewhile(lambda each: self.is_dirty(each, _tier(mark)), path))[::-1]
        return chain if _is_queued(self._mark[chain[0]]) else [], _tier(mark)

    def check_integrity(self) -> None:
        """Raise `CacheError` where marks, queues and index are inconsistent."""
        if not self._last:
            return
        index = self._index
        counts = [0] * len(index.tiers)
        queued = [self._walk(tier) for tier in index.tiers]
        for node in index:
            mark, tier, name = self._mark[node], self._dirty_in(node), index.key[node].hex()[:12]
            if mark != _CLEAN:
                counts[_tier(mark)] += 1
            if (_tier(mark) if mark else -1) != tier:
                raise CacheError(f"chunk {name} is wrongly marked as dirty or clean")
            in_queues = [t for t in index.tiers if node in queued[t]]
            due = tier >= 0 and self._is_safe_below(index.parent[node], tier)
            if in_queues != ([tier] if due else []) or (mark != _CLEAN and _is_queued(mark)) != due:
                raise CacheError(f"chunk {name} is queued for a copy down, or not queued, in error")
        if self.counts != counts or sum(counts) != np.count_nonzero(u8_view(self._mark)):
            raise CacheError(f"dirty chunks by tier: counted {self.counts}, found {counts}")

    def _walk(self, tier: int) -> set[int]:
        self._linked.check_integrity(_list(tier))
        return set(self._linked.walk(_list(tier)))

    def _queue(self, node: int, tier: int) -> None:
        self._mark[node] = _waiting(tier) + 1
        self._linked.append(_list(tier), node)


def _waiting(tier: int) -> int:
    """The mark of chunks that are dirty in `tier`, and not queued."""
    return 2 * tier + 1


def _tier(mark: int) -> int:
    """The tier in which a chunk with this mark is dirty."""
    return (mark - 1) // 2


def _is_queued(mark: int) -> bool:
    return mark % 2 == 0


_WAITING = bytes([_CLEAN, *(mark - 1 | 1 for mark in range(1, 256))])
"""The same mark, not queued."""


def _list(tier: int) -> int:
    """The list that is the queue of `tier`."""
    return tier + 1
