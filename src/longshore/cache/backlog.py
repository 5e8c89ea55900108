"""What the warmest tier has and the one below lacks: a queue of chunks to back up, heads first.

    dirty     ready in the warmest tier, not in the one below; it would be lost with its slot
    queued    dirty, and its parent is ready below: may be copied now. The oldest goes first
    seldom    not used often enough for a selective write policy: not dirty, may go without a copy
    failed    a backup was tried, and did not succeed; dirty again when it is next used

Heads go first because the tier below must be closed over prefixes on its own: it is all that a restart finds. What is
behind a chunk whose backup is under way waits for it (should that write fail, the host copy must still be there), or
goes with it in the same job. Nothing here ever searches: a chunk is queued when it becomes dirty, or its parent ready.
"""

from __future__ import annotations

from collections.abc import Sequence

from longshore.cache.chains import LISTS, Chains
from longshore.cache.index import ROOT, Index
from longshore.errors import CacheError

_QUEUE = 1
_CLEAN, _DIRTY, _QUEUED = range(3)


class Backlog:
    """The dirty chunks of `index`, which has two tiers or more; with one, nothing is ever dirty."""

    def __init__(self, index: Index, threshold: int = 0) -> None:
        self.failed: set[int] = set()
        self.count = 0
        """Dirty chunks, queued ones included."""
        self._index = index
        self._chains = Chains()
        self._mark = bytearray(LISTS)
        self._on = len(index.tiers) > 1
        self._threshold = threshold if self._on else 0
        self._uses = bytearray(LISTS)

    def grow(self, nodes: int) -> None:
        """Nodes may now have any number below `nodes`."""
        if self._on:
            self._chains.grow(nodes)
            self._mark.extend(bytes(max(0, nodes - len(self._mark))))
            self._uses.extend(bytes(max(0, nodes - len(self._uses))))

    def is_dirty(self, node: int) -> bool:
        """Whether `node` would be lost with its copy in the warmest tier."""
        return self._on and self._mark[node] != _CLEAN

    def note(self, node: int) -> bool:
        """Something has changed about the copies of `node`; says whether it is clean now, and was not."""
        if not self._on:
            return False
        index, mark = self._index, self._mark[node]
        dirty = self._should_be_dirty(node)
        if dirty and mark == _CLEAN:
            self.count += 1
            self._mark[node] = _DIRTY
            parent = index.parent[node]
            if parent == ROOT or index.is_ready(parent, 1):
                self._queue(node)
        elif mark != _CLEAN and not dirty:
            self.count -= 1
            self._mark[node] = _CLEAN
            if mark == _QUEUED:
                self._chains.drop(node)
            return True
        return False

    def backed_up(self, node: int) -> None:
        """`node` has become ready below: what is behind it may follow."""
        for child in self._index.children(node):
            if self._mark[child] == _DIRTY:
                self._queue(child)

    def exposed(self, node: int) -> None:
        """`node` is no longer ready below: what is behind it must wait again."""
        for child in self._index.children(node):
            if self._mark[child] == _QUEUED:
                self._chains.drop(child)
                self._mark[child] = _DIRTY

    def fail(self, node: int) -> bool:
        """A backup of `node` has failed. Says whether it was dirty."""
        self.failed.add(node)
        return self.note(node)

    def use(self, nodes: Sequence[int]) -> None:
        """`nodes` were used: backups that failed earlier are worth another try, and some may be used often now."""
        if self.failed:
            for node in self.failed.intersection(nodes):
                self.failed.discard(node)
                self.note(node)
        if self._threshold:
            for node in nodes:
                self._count_use(node)

    def _count_use(self, node: int) -> None:
        """Another use of `node`. Its ancestors are used as often as it is, whether or not a caller named them."""
        uses, parent = self._uses, self._index.parent
        if uses[node] >= self._threshold:
            return
        uses[node] += 1
        often = uses[node]
        while node and uses[node] <= often:
            uses[node] = often
            self.note(node)
            node = parent[node]
            if uses[node] >= often:
                break

    def _should_be_dirty(self, node: int) -> bool:
        index = self._index
        return (
            index.slot[1][node] < 0
            and index.is_ready(node, 0)
            and node not in self.failed
            and self._uses[node] >= self._threshold
        )

    def forget(self, node: int) -> bool:
        """`node` has no copy in the warmest tier any more. Says whether it was dirty."""
        self.failed.discard(node)
        self._uses[node] = 0
        return self.note(node)

    def choose(self, wanted: int) -> list[int]:
        """At most `wanted` chunks to back up now in one job: the oldest heads, each with what is behind it."""
        chosen: list[int] = []
        node = self._chains.coldest(_QUEUE)
        while node != _QUEUE and len(chosen) < wanted:
            behind = [node]
            while behind and len(chosen) < wanted:
                each = behind.pop()
                chosen.append(each)
                behind += [c for c in self._index.children(each) if self._mark[c] == _DIRTY]
            node = self._chains.after[node]
        return chosen

    def check_integrity(self) -> None:
        """Raise `CacheError` where a mark, the queue and the index disagree."""
        if not self._on:
            return
        index = self._index
        self._chains.check_integrity(_QUEUE)
        queued = set(self._chains.walk(_QUEUE))
        for node in index:
            dirty = self._should_be_dirty(node)
            if dirty != (self._mark[node] != _CLEAN) or (node in queued) != (self._mark[node] == _QUEUED):
                raise CacheError(f"chunk {index.key[node].hex()[:12]} is wrongly marked as dirty or clean")
            parent = index.parent[node]
            if dirty and (node in queued) != (parent == ROOT or index.is_ready(parent, 1)):
                raise CacheError(f"chunk {index.key[node].hex()[:12]} is wrongly queued for a backup, or not")
        if self.count != len(self._mark) - self._mark.count(_CLEAN):
            raise CacheError(f"{self.count} chunks are counted as dirty")

    def _queue(self, node: int) -> None:
        self._mark[node] = _QUEUED
        self._chains.warm(_QUEUE, node)
