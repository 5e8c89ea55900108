"""What a tier has and no colder one: queues of chunks to copy down, heads first.

    dirty     ready in one tier and in none below, though there is one: it would be lost with its slot
    queued    dirty, and its parent is ready below: may be copied down now. The oldest goes first
    seldom    not used often enough for a selective write policy: not dirty, may go without a copy
    failed    a copy was tried, and did not succeed; dirty again when it is next used
    orphan    not dirty: it is not written down until a tier has its parent, and may go without a copy

A chunk is dirty in one tier at most, the coldest that has it, so one mark for each says all.

Heads go first because each tier must be closed over prefixes together with those below it: these are all that a
restart finds. What is behind a chunk whose copy is under way waits for it (should that write fail, the warmer copy must
still be there), or goes with it in the same job. Nothing here ever searches: a chunk is queued when it becomes dirty,
or its parent ready.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import numpy as np
import numpy.typing as npt

from longshore.cache.columns import LISTS, LinkedLists, column, leading, marks, numbers, once
from longshore.cache.index import Index
from longshore.cache.nodes import ORPHANS, ROOT
from longshore.cache.pool import READY
from longshore.errors import CacheError

_CLEAN = 0


class Backlog:
    """The dirty chunks of `index`. `thresholds` say how often one is used, for each tier, before it is copied down."""

    def __init__(self, index: Index, thresholds: Sequence[int] = ()) -> None:
        self.counts = [0] * len(index.tiers)
        """Dirty chunks of each tier, queued ones included."""
        self._index = index
        self._last = len(index.tiers) - 1
        self._thresholds = [*thresholds[: self._last], *[0] * (self._last - len(thresholds))]
        self._most = max(self._thresholds, default=0)
        self._linked = LinkedLists()
        self._mark = bytearray(LISTS)
        """Clean, or dirty in tier t: an odd number while it waits for its parent, an even one when it is queued."""
        self._uses = bytearray(LISTS)
        self._failed = bytearray(LISTS)
        """1 for what is not to be copied before it is used again."""

    def grow(self, nodes: int) -> None:
        """Nodes may now have any number below `nodes`."""
        if self._last:
            self._linked.grow(nodes)
            self._mark.extend(bytes(max(0, nodes - len(self._mark))))
            self._uses.extend(bytes(max(0, nodes - len(self._uses))))
            self._failed.extend(bytes(max(0, nodes - len(self._failed))))

    def is_dirty(self, node: int, tier: int) -> bool:
        """Whether `node` would be lost with its copy in `tier`, and is worth a copy below."""
        return self._last > 0 and self._mark[node] != _CLEAN and _tier(self._mark[node]) == tier

    def leading_sole(self, nodes: Sequence[int], tier: int) -> int:
        """How many of `nodes` lead that are dirty in `tier`, and in no other."""
        if not self.is_dirty(nodes[0], tier):
            return 0
        at = np.array(nodes, np.int32)
        mark = marks(self._mark)[at]
        sole = (mark == _waiting(tier)) | (mark == _waiting(tier) + 1)
        for warmer in range(tier):
            sole &= column(self._index.slot[warmer])[at] < 0
        return leading(sole)

    def update(self, node: int) -> bool:
        """Something has changed about the copies of `node`; says whether it is clean now where it was dirty."""
        if not self._last:
            return False
        mark, tier = self._mark[node], self._dirty_in(node)
        was = (mark - 1) // 2  # -1 where it is clean
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

    def update_all(self, nodes: Sequence[int]) -> list[int]:
        """The same for many; says which of them."""
        if not self._last or not nodes:
            return []
        at = numbers(nodes)
        mark, due = marks(self._mark)[at], self._all_due(at)
        was = np.frombuffer(mark.tobytes().translate(_WAITING), np.uint8)
        changed = was != due
        if (count := np.count_nonzero(changed)) < len(at):
            if not count:
                return []
            at, mark, was, due = at[changed], mark[changed], was[changed], due[changed]
        for node in at[was != mark].tolist():
            self._linked.remove(node)
        for tier in range(self._last):
            becomes = (due == _waiting(tier)).nonzero()[0]
            self.counts[tier] += len(becomes) - int(np.count_nonzero(was == _waiting(tier)))
            if len(becomes):
                above = column(self._index.parent)[at[becomes]]
                queued = becomes[self._are_safe_below(above, tier)]
                due[queued] += 1
                self._linked.extend(_list(tier), at[queued])
        marks(self._mark)[at] = due
        clean: list[int] = at[mark != _CLEAN].tolist()
        return clean

    def backed_up(self, nodes: Sequence[int], tier: int) -> None:
        """`nodes` have become ready in `tier`: what is behind them in warmer tiers may follow."""
        behind, mark = self._index.all_children(nodes), marks(self._mark)
        for warmer in range(tier):
            may_follow = behind[mark[behind] == _waiting(warmer)]
            mark[may_follow] += 1
            self._linked.extend(_list(warmer), may_follow)

    def exposed(self, node: int) -> None:
        """`node` is in one of the colder tiers no more: what is behind it may have to wait again."""
        for child in self._index.children(node):
            mark = self._mark[child]
            if mark and _is_queued(mark) and not self._is_safe_below(node, _tier(mark)):
                self._linked.remove(child)
                self._mark[child] = _waiting(_tier(mark))

    def fail(self, node: int) -> bool:
        """A copy of `node` to the tier below has failed. Says whether it was dirty."""
        self._failed[node] = 1
        return self.update(node)

    def refuse(self, nodes: Sequence[int]) -> list[int]:
        """`nodes`, which are queued, and what waits for them are not to be copied until they are used; all of them."""
        refused, left = list[int](), list(nodes)
        while left:
            node = left.pop()
            if mark := self._mark[node]:
                left += (child for child in self._index.children(node) if self.is_dirty(child, _tier(mark)))
                self._failed[node] = 1
                refused.append(node)
        self.update_all(refused)
        return refused

    def arrived(self, nodes: Sequence[int]) -> None:
        """`nodes`, parents first, have become ready: what is behind a chunk that is not to be copied is not either."""
        if not self._last:
            return
        failed, parent, coldest = self._failed, self._index.parent, self._index.coldest_tier
        if marks(failed)[column(parent)[numbers(nodes)]].any():
            for node in nodes:
                if failed[parent[node]] and not self._is_safe_below(parent[node], coldest(node)):
                    failed[node] = 1
        self.update_all(nodes)

    def use(self, nodes: Sequence[int]) -> None:
        """`nodes` were used: copies that failed earlier are worth another try, and some may be used often now."""
        at = numbers(nodes)
        if len(again := at[marks(self._failed)[at] != 0]):
            marks(self._failed)[again] = 0
            self.update_all(once(again).tolist())
        if self._most:
            for node in nodes:
                self._count_use(node)

    def _count_use(self, node: int) -> None:
        """Another use of `node`. Its ancestors are used as often as it is, whether or not a caller named them."""
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
        """The tier in which `node` should be dirty; -1 for none."""
        slots, last = self._index.slot, self._last
        if slots[last][node] >= 0 or self._index.depth[node] < 0:
            return -1
        tier = next((each for each in range(last - 1, -1, -1) if slots[each][node] >= 0), -1)
        if tier < 0 or self._index.pools[tier].state[slots[tier][node]] != READY:
            return -1
        return -1 if self._failed[node] or self._uses[node] < self._thresholds[tier] else tier

    def _all_due(self, at: npt.NDArray[np.int32]) -> npt.NDArray[np.uint8]:
        """For each of the nodes `at` the mark that it should have, as long as it waits."""
        index, due = self._index, np.zeros(len(at), np.uint8)
        lost = column(index.slot[self._last])[at] < 0  # with the copies that are not in the last tier
        if not np.count_nonzero(lost):
            return due
        for tier in range(self._last):
            there = column(index.slot[tier])[at] >= 0
            dirty = index.are_ready(at, tier)
            if self._thresholds[tier]:
                dirty &= marks(self._uses)[at] >= self._thresholds[tier]
            due[there] = dirty[there] * np.uint8(_waiting(tier))
        due *= lost
        if index.orphans:
            due[column(index.depth)[at] < 0] = _CLEAN
        due[marks(self._failed)[at] != 0] = _CLEAN
        return due

    def _is_safe_below(self, node: int, tier: int) -> bool:
        """Whether `node` has a ready copy in a tier colder than `tier`, so that what is behind it may follow."""
        index = self._index
        return node == ROOT or any(index.is_ready(node, colder) for colder in index.tiers[tier + 1 :])

    def _are_safe_below(self, at: npt.NDArray[np.int32], tier: int) -> npt.NDArray[np.bool_]:
        """The same for nodes `at`."""
        safe: npt.NDArray[np.bool_] = at == ROOT
        for colder in self._index.tiers[tier + 1 :]:
            safe |= self._index.are_ready(at, colder)
        return safe

    def forget(self, node: int) -> None:
        """`node` is in no tier any more."""
        if self._last:
            self._failed[node] = 0
            self._uses[node] = 0
            self.update(node)

    def forget_all(self, nodes: Sequence[int]) -> None:
        """The same for clean `nodes`."""
        if self._last:
            at = numbers(nodes)
            marks(self._uses)[at] = marks(self._failed)[at] = 0

    def choose(self, tier: int, wanted: int) -> list[int]:
        """At most `wanted` chunks to copy down from `tier` in one job: the oldest heads, each with those behind it."""
        chosen: list[int] = []
        child, older, mark, waiting = self._index.child, self._index.older, self._mark, _waiting(tier)
        head = self._linked.first(_list(tier))
        while head != _list(tier) and len(chosen) < wanted:
            node, behind = head, list[int]()
            while node and len(chosen) < wanted:
                chosen.append(node)
                node = child[node]
                while node and (older[node] or mark[node] != waiting):  # an only child that waits is next
                    if mark[node] == waiting:
                        behind.append(node)
                    node = older[node]
                if not node and behind:
                    node = behind.pop()
            head = self._linked.after[head]
        return chosen

    def chain(self, node: int) -> tuple[list[int], int]:
        """What is to be copied down so that a colder tier has `node`, heads first, and the tier that it is in.

        Nothing as long as it may not be copied, or has to wait for what is before it.
        """
        if not (mark := self._mark[node]):
            return [], 0
        path = self._index.path(node, self._index.depth[node] + 1)
        chain = list(takewhile(lambda each: self.is_dirty(each, _tier(mark)), path))[::-1]
        return chain if _is_queued(self._mark[chain[0]]) else [], _tier(mark)

    def check_integrity(self) -> None:
        """Raise `CacheError` where a mark, a queue and the index disagree."""
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
                raise CacheError(f"chunk {name} is wrongly queued for a copy below, or not")
        if self.counts != counts or sum(counts) != len(self._mark) - self._mark.count(_CLEAN):
            raise CacheError(f"{self.counts} chunks are counted as dirty, by tier, but {counts} are")

    def _walk(self, tier: int) -> set[int]:
        self._linked.check_integrity(_list(tier))
        return set(self._linked.walk(_list(tier)))

    def _queue(self, node: int, tier: int) -> None:
        self._mark[node] = _waiting(tier) + 1
        self._linked.append(_list(tier), node)


def _waiting(tier: int) -> int:
    """The mark of what is dirty in `tier`, and not queued."""
    return 2 * tier + 1


def _tier(mark: int) -> int:
    """The tier in which a chunk with this mark is dirty."""
    return (mark - 1) // 2


def _is_queued(mark: int) -> bool:
    return mark % 2 == 0


_WAITING = bytes([_CLEAN, *(mark - 1 | 1 for mark in range(1, 256))])
"""The mark of what is dirty in the same tier, and not queued."""


def _list(tier: int) -> int:
    """The list that is the queue of `tier`."""
    return tier + 1
