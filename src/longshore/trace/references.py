"""Published eviction policies for comparison, with the interface of the cache's policies. Simple rather than fast.

| policy | idea |
|---|---|
| FIFO | evicts the oldest chunk |
| LRU-2 | evicts the chunk with the oldest second-to-last use; chunks used once first |
| S3-FIFO | a small queue for new chunks, a main queue for chunks used again, and a ghost list |
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import ClassVar

from longshore.boundary import Key
from longshore.cache.columns import LISTS, Chains
from longshore.cache.eviction import LRU, EvictionPolicy
from longshore.cache.eviction.base import Names, check_in, check_new, known, unknown
from longshore.errors import CacheError


class FIFO(LRU):
    """Evicts the chunk that was inserted first, however often it was used."""

    def touch(self, nodes: Sequence[int]) -> None:
        """`nodes` were used, which changes nothing; held ones are inserted again."""
        check_in(self._place, nodes)
        super().touch([node for node in nodes if self.is_held(node)])


class OneByOne(EvictionPolicy):
    """A policy that names one victim at a time, because the next one depends on its eviction."""

    def ahead(self, count: int) -> list[int]:
        """The next victim."""
        node = self.coldest() if count else 0
        return [node] if node else []

    def leave(self, nodes: Sequence[int], keys: Sequence[Key]) -> None:
        """Evict these, the next victims."""
        for node, key in zip(nodes, keys, strict=True):
            self.remove(node, evicted=key)

    def keep(self, nodes: Sequence[int]) -> None:
        """Hold these, the next victims, which cannot be evicted at present."""
        for node in nodes:
            self.hold(node)


class LRU2(OneByOne):
    """Evicts the chunk with the oldest second-to-last use. Uses are remembered without limit, by key.

    After E. O'Neil, P. O'Neil and G. Weikum, "The LRU-K page replacement algorithm for database disk buffering" (SIGMOD
    1993), K = 2, without a correlated reference period. Chunks used once are evicted first, least recently used first.
    O(log n).
    """

    def __init__(self, slots: int, names: Names) -> None:
        super().__init__(slots, names)
        self._uses: dict[Key, tuple[int, int]] = {}
        self._rank: dict[int, tuple[int, int] | None] = {}  # (last use but one, last use); None while held
        self._heap: list[tuple[tuple[int, int], int]] = []
        self._clock = 0

    def grow(self, nodes: int) -> None:
        """Nodes may now have any number below `nodes`."""

    def insert(self, nodes: Sequence[int], *, leaf: bool = False, continues: bool = False) -> None:
        """`nodes` became resident, the last was used last."""
        for i, node in enumerate(nodes):
            if node < LISTS or node in self._rank or node in nodes[:i]:
                raise known(node)
        for node in nodes:
            self._use(node)

    def touch(self, nodes: Sequence[int]) -> None:
        """`nodes` were used, the last was used last."""
        for node in nodes:
            self._known(node)
            self._use(node)

    def hold(self, node: int) -> None:
        """`node` cannot go at present."""
        self._known(node)
        self._rank[node] = None

    def release(self, nodes: Sequence[int]) -> None:
        """Those of `nodes` that are held may go again, and first."""
        for node in nodes:
            self._known(node)
            if self._rank[node] is None:
                self._clock += 1
                self._place(node, (-self._clock, 0))

    def remove(self, node: int, *, evicted: Key | None = None) -> None:
        """`node` left; its uses are remembered."""
        self._known(node)
        del self._rank[node]

    def coldest(self) -> int:
        """The node with the oldest second-to-last use; 0 if there is none."""
        heap, rank = self._heap, self._rank
        while heap and rank.get(heap[0][1]) != heap[0][0]:
            heappop(heap)
        return heap[0][1] if heap else 0

    def order(self) -> Iterator[int]:
        """Nodes by their second-to-last use."""
        ranked = [(rank, node) for node, rank in self._rank.items() if rank is not None]
        return (node for _, node in sorted(ranked))

    def is_held(self, node: int) -> bool:
        """Whether `node` is resident and held."""
        return node in self._rank and self._rank[node] is None

    def __contains__(self, node: object) -> bool:
        return node in self._rank

    def __len__(self) -> int:
        return len(self._rank)

    def check_integrity(self) -> None:
        """Raise `CacheError` if an evictable node would not be found."""
        lost = {(rank, node) for node, rank in self._rank.items() if rank is not None}.difference(self._heap)
        if lost:
            raise CacheError(f"LRU-2 has lost {len(lost)} nodes")

    def _use(self, node: int) -> None:
        self._clock += 1
        _, last = self._uses.get(self.names[node], (0, 0))
        rank = self._uses[self.names[node]] = (last, self._clock)
        self._place(node, rank)

    def _place(self, node: int, rank: tuple[int, int]) -> None:
        self._rank[node] = rank
        heappush(self._heap, (rank, node))
        if len(self._heap) > 4 * len(self._rank) + 64:
            self._heap = [(rank, node) for node, rank in self._rank.items() if rank is not None]
            heapify(self._heap)

    def _known(self, node: int) -> None:
        if node not in self._rank:
            raise unknown(node)


class S3FIFO(OneByOne):
    """New chunks enter a small queue; those used there move to the main queue.

    After J. Yang et al., "FIFO queues are all you need for cache eviction" (SOSP 2023): the small queue has a tenth of
    the slots, and uses are counted up to three. A chunk evicted from the small queue is remembered until as many others
    have been evicted from it as there are slots, and is inserted into the main queue if it returns. A chunk in the main
    queue is reinserted once for each use. The paper moves chunks after two uses; one use has more hits in small prefix
    caches, and fewer in large ones. Amortised constant time per use.
    """

    SMALL, MAIN = 1, 2
    MOST: ClassVar[int] = 3
    TO_MOVE_ON: ClassVar[int] = 1

    def __init__(self, slots: int, names: Names) -> None:
        super().__init__(slots, names)
        self._chains = Chains()
        self._queue = bytearray(LISTS)
        self._held = bytearray(LISTS)
        self._uses = bytearray(LISTS)
        self._counts = [0, 0, 0]
        self._ghosts: OrderedDict[Key, None] = OrderedDict()

    def grow(self, nodes: int) -> None:
        """Nodes may now have any number below `nodes`."""
        self._chains.grow(nodes)
        for each in (self._queue, self._held, self._uses):
            each.extend(bytes(max(0, nodes - len(each))))

    def insert(self, nodes: Sequence[int], *, leaf: bool = False, continues: bool = False) -> None:
        """`nodes` became resident: in the main queue if they were evicted from the small one recently."""
        check_new(self._queue, nodes)
        for node in nodes:
            key = self.names[node]
            self._uses[node] = 0
            if key in self._ghosts:
                del self._ghosts[key]
                self._enter(node, self.MAIN)
            else:
                self._enter(node, self.SMALL)

    def touch(self, nodes: Sequence[int]) -> None:
        """`nodes` were used; held ones are inserted again at the end of their queue."""
        check_in(self._queue, nodes)
        for node in nodes:
            self._uses[node] = min(self.MOST, self._uses[node] + 1)
            if self._held[node]:
                self._held[node] = 0
                self._chains.warm(self._queue[node], node)

    def hold(self, node: int) -> None:
        """`node` cannot go at present."""
        self._known(node)
        if not self._held[node]:
            self._chains.drop(node)
            self._held[node] = 1

    def release(self, nodes: Sequence[int]) -> None:
        """Held `nodes` may be evicted again, first in their queue, as if they had not been used."""
        check_in(self._queue, nodes)
        for node in nodes:
            if self._held[node]:
                self._held[node] = self._uses[node] = 0
                self._chains.chill(self._queue[node], node)

    def remove(self, node: int, *, evicted: Key | None = None) -> None:
        """`node` left; its key is remembered if it was evicted from the small queue."""
        self._known(node)
        if evicted is not None and self._queue[node] == self.SMALL:
            self._ghosts[evicted] = None
            if len(self._ghosts) > self.slots:
                self._ghosts.popitem(last=False)
        self._exit(node)
        self._held[node] = 0

    def coldest(self) -> int:
        """The next victim; 0 if there is none. Used nodes before it have been moved, and stay so."""
        if self._counts[self.SMALL] >= self._small_slots:
            return self._first_of_small() or self._first_of_main()
        return self._first_of_main() or self._first_of_small()

    def order(self) -> Iterator[int]:
        """The nodes of the small queue, then those of the main one, each the oldest first."""
        yield from self._chains.walk(self.SMALL)
        yield from self._chains.walk(self.MAIN)

    def is_held(self, node: int) -> bool:
        """Whether `node` is resident and held."""
        return node < len(self._held) and bool(self._held[node])

    def __contains__(self, node: object) -> bool:
        return isinstance(node, int) and node < len(self._queue) and self._queue[node] != 0

    def __len__(self) -> int:
        return self._counts[self.SMALL] + self._counts[self.MAIN]

    def check_integrity(self) -> None:
        """Raise `CacheError` where queues, marks and counts disagree."""
        for which in (self.SMALL, self.MAIN):
            self._chains.check_integrity(which)
            queued = {node for node, queue in enumerate(self._queue) if queue == which and not self._held[node]}
            if set(self._chains.walk(which)) != queued or self._queue.count(which) != self._counts[which]:
                raise CacheError(f"S3-FIFO marks {len(queued)} nodes for queue {which}, counts {self._counts[which]}")

    @property
    def _small_slots(self) -> int:
        return max(1, self.slots // 10)

    def _first_of_small(self) -> int:
        while (node := self._chains.coldest(self.SMALL)) != self.SMALL:
            if self._uses[node] < self.TO_MOVE_ON:
                return node
            self._exit(node)
            self._enter(node, self.MAIN)
        return 0

    def _first_of_main(self) -> int:
        while (node := self._chains.coldest(self.MAIN)) != self.MAIN:
            if not self._uses[node]:
                return node
            self._uses[node] -= 1
            self._chains.drop(node)
            self._chains.warm(self.MAIN, node)
        return 0

    def _enter(self, node: int, which: int) -> None:
        self._queue[node] = which
        self._counts[which] += 1
        self._chains.warm(which, node)

    def _exit(self, node: int) -> None:
        if not self._held[node]:
            self._chains.drop(node)
        self._counts[self._queue[node]] -= 1
        self._queue[node] = 0

    def _known(self, node: int) -> None:
        if node not in self:
            raise unknown(node)
