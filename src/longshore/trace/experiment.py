"""The policy experiment: one tier of a number of blocks, an eviction policy, and no time.

    request   b0  b1  b2  b3        hits: the leading resident blocks, before the request changes anything
              ◄── access ────       then the policy sees each of its blocks, the last one first, one by one

An access to a resident block is a use. An access to another block evicts one, if no slot is free, and inserts the
block. No block is pinned, and there are never more blocks than slots. The policies are driven through their own
interface as by the cache: an inserted block gets a free number, which may be reused, and has a digest for its key,
which policies may remember in part.

`CacheReplay` serves the same requests through the control plane, so that the two can be compared: one tier, or host
memory above files; no bytes, no time. The device keeps nothing: each request looks up its whole path, loads what is
found and computes the rest.

    lookup, load ──► loaded ──► store ──► stored ──► release        one request after the other

Policies are those of the cache, and published ones for comparison, simple rather than fast:

| policy | idea |
|---|---|
| FIFO | evicts the oldest chunk |
| LRU-2 | evicts the chunk with the oldest second-to-last use; chunks used once first |
| S3-FIFO | a small queue for new chunks, a main queue for chunks used again, and a ghost list |
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import ClassVar

import numpy as np
from xxhash import xxh3_64_digest

from longshore.boundary import FILE, HOST, Key, Status, Transfer, TransferResult
from longshore.cache import CacheSettings, GroupKeys, Lease, ReuseHint, TieredCache, TierSpec
from longshore.cache.columns import (
    I32,
    LISTS,
    LinkedLists,
    as_list,
    check_in,
    check_new,
    filled,
    in_policy_already,
    not_in_policy,
    resized,
)
from longshore.cache.eviction_policies import DEFAULT_POLICY, LRU, POLICIES, EvictionPolicy
from longshore.cache.eviction_policies.base import NodeKeys
from longshore.cache.eviction_policies.hit_rates import ReuseHints
from longshore.errors import CacheError, IntegrityError, TraceError
from longshore.trace.analysis import Paths, optimal_hits, stack_distances
from longshore.trace.parsing import unknown_name
from longshore.trace.replay import keys_of


class FIFO(LRU):
    """Evicts the chunk that was inserted first, however often it was used."""

    def touch(self, nodes: Sequence[int] | I32) -> None:
        """`nodes` were used, which changes nothing; held ones are inserted again."""
        check_in(self._place, nodes)
        super().touch([node for node in as_list(nodes) if self.is_held(node)])


class OneByOne(EvictionPolicy):
    """A policy that names one victim at a time, because the next one depends on its eviction."""

    def next_victims(self, count: int) -> list[int]:
        """The next victim."""
        node = self.victim() if count else 0
        return [node] if node else []

    def remove_victims(self, nodes: Sequence[int], keys: Sequence[Key]) -> None:
        """Evict these, the next victims."""
        for node, key in zip(nodes, keys, strict=True):
            self.remove(node, evicted=key)

    def hold_victims(self, nodes: Sequence[int]) -> None:
        """Hold these, the next victims, which cannot be evicted at present."""
        for node in nodes:
            self.hold(node)


class LRU2(OneByOne):
    """Evicts the chunk with the oldest second-to-last use. Uses are remembered without limit, by key.

    After E. O'Neil, P. O'Neil and G. Weikum, "The LRU-K page replacement algorithm for database disk buffering" (SIGMOD
    1993), K = 2, without a correlated reference period. Chunks used once are evicted first, least recently used first.
    O(log n).
    """

    def __init__(self, slots: int, keys: NodeKeys) -> None:
        super().__init__(slots, keys)
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
                raise in_policy_already(node)
        for node in nodes:
            self._use(node)

    def touch(self, nodes: Sequence[int] | I32) -> None:
        """`nodes` were used, the last was used last."""
        for node in as_list(nodes):
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

    def victim(self) -> int:
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
        _, last = self._uses.get(self.keys[node], (0, 0))
        rank = self._uses[self.keys[node]] = (last, self._clock)
        self._place(node, rank)

    def _place(self, node: int, rank: tuple[int, int]) -> None:
        self._rank[node] = rank
        heappush(self._heap, (rank, node))
        if len(self._heap) > 4 * len(self._rank) + 64:
            self._heap = [(rank, node) for node, rank in self._rank.items() if rank is not None]
            heapify(self._heap)

    def _known(self, node: int) -> None:
        if node not in self._rank:
            raise not_in_policy(node)


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

    def __init__(self, slots: int, keys: NodeKeys) -> None:
        super().__init__(slots, keys)
        self._linked = LinkedLists()
        self._queue = filled(LISTS, dtype=np.uint8)
        self._held = filled(LISTS, dtype=np.uint8)
        self._uses = filled(LISTS, dtype=np.uint8)
        self._counts = [0, 0, 0]
        self._ghosts: OrderedDict[Key, None] = OrderedDict()

    def grow(self, nodes: int) -> None:
        """Nodes may now have any number below `nodes`."""
        self._linked.grow(nodes)
        nodes = max(nodes, len(self._queue))
        self._queue, self._held, self._uses = (resized(each, nodes) for each in (self._queue, self._held, self._uses))

    def insert(self, nodes: Sequence[int], *, leaf: bool = False, continues: bool = False) -> None:
        """`nodes` became resident: in the main queue if they were evicted from the small one recently."""
        check_new(self._queue, nodes)
        for node in nodes:
            key = self.keys[node]
            self._uses[node] = 0
            if key in self._ghosts:
                del self._ghosts[key]
                self._enter(node, self.MAIN)
            else:
                self._enter(node, self.SMALL)

    def touch(self, nodes: Sequence[int] | I32) -> None:
        """`nodes` were used; held ones are inserted again at the end of their queue."""
        check_in(self._queue, nodes)
        for node in as_list(nodes):
            self._uses[node] = min(self.MOST, self._uses[node] + 1)
            if self._held[node]:
                self._held[node] = 0
                self._linked.append(self._queue[node], node)

    def hold(self, node: int) -> None:
        """`node` cannot go at present."""
        self._known(node)
        if not self._held[node]:
            self._linked.remove(node)
            self._held[node] = 1

    def release(self, nodes: Sequence[int]) -> None:
        """Held `nodes` may be evicted again, first in their queue, as if they had not been used."""
        check_in(self._queue, nodes)
        for node in nodes:
            if self._held[node]:
                self._held[node] = self._uses[node] = 0
                self._linked.prepend(self._queue[node], node)

    def remove(self, node: int, *, evicted: Key | None = None) -> None:
        """`node` left; its key is remembered if it was evicted from the small queue."""
        self._known(node)
        if evicted is not None and self._queue[node] == self.SMALL:
            self._ghosts[evicted] = None
            if len(self._ghosts) > self.slots:
                self._ghosts.popitem(last=False)
        self._exit(node)
        self._held[node] = 0

    def victim(self) -> int:
        """The next victim; 0 if there is none. Used nodes before it have been moved, and stay so."""
        if self._counts[self.SMALL] >= self._small_slots:
            return self._first_of_small() or self._first_of_main()
        return self._first_of_main() or self._first_of_small()

    def order(self) -> Iterator[int]:
        """The nodes of the small queue, then those of the main one, each the oldest first."""
        yield from self._linked.walk(self.SMALL)
        yield from self._linked.walk(self.MAIN)

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
            self._linked.check_integrity(which)
            queued = {node for node, queue in enumerate(self._queue) if queue == which and not self._held[node]}
            if set(self._linked.walk(which)) != queued or bytes(self._queue).count(which) != self._counts[which]:
                raise CacheError(f"S3-FIFO marks {len(queued)} nodes for queue {which}, counts {self._counts[which]}")

    @property
    def _small_slots(self) -> int:
        return max(1, self.slots // 10)

    def _first_of_small(self) -> int:
        while (node := self._linked.first(self.SMALL)) != self.SMALL:
            if self._uses[node] < self.TO_MOVE_ON:
                return node
            self._exit(node)
            self._enter(node, self.MAIN)
        return 0

    def _first_of_main(self) -> int:
        while (node := self._linked.first(self.MAIN)) != self.MAIN:
            if not self._uses[node]:
                return node
            self._uses[node] -= 1
            self._linked.remove(node)
            self._linked.append(self.MAIN, node)
        return 0

    def _enter(self, node: int, which: int) -> None:
        self._queue[node] = which
        self._counts[which] += 1
        self._linked.append(which, node)

    def _exit(self, node: int) -> None:
        if not self._held[node]:
            self._linked.remove(node)
        self._counts[self._queue[node]] -= 1
        self._queue[node] = 0

    def _known(self, node: int) -> None:
        if node not in self:
            raise not_in_policy(node)


REFERENCES: dict[str, type[EvictionPolicy]] = {"fifo": FIFO, "lru-2": LRU2, "s3-fifo": S3FIFO}


def policy_named(name: str | None) -> tuple[str, type[EvictionPolicy]]:
    """The policy called `name`, or the default policy, and its name; raises `TraceError` for an unknown name."""
    known = POLICIES | REFERENCES
    if name is None:
        return next(each for each in known.items() if each[1] is DEFAULT_POLICY)
    if name.lower() not in known:
        raise unknown_name("a policy", name, sorted(known))
    return name.lower(), known[name.lower()]


@dataclass(frozen=True, slots=True)
class Hits:
    """Result of an experiment: hits, and block references."""

    requests: int
    block_refs: int
    hits: int

    @property
    def ratio(self) -> float:
        """Hits per block reference; 0 without any."""
        return self.hits / self.block_refs if self.block_refs else 0.0


class Experiment:
    """A tier of `slots` slots, empty at the start, under policy `kind`. Memory grows with the slots that are used."""

    def __init__(self, kind: type[EvictionPolicy], slots: int) -> None:
        if slots < 1:
            raise TraceError(f"expected a capacity of at least one block, got {slots}")
        self._keys = np.empty(LISTS, object)
        self.policy = kind(slots, self._keys)
        self._slots, self._reuse_hints = slots, ReuseHints()
        self._free: list[int] = []
        self._node: dict[int, int] = {}
        self._block = [-1] * LISTS
        self._requests = self._refs = self._hits = 0

    def serve(self, path: Sequence[int], now: float = 0.0, reuse_hint: ReuseHint | None = None) -> int:
        """Serve one request for the blocks `path` (ids from 0 to 2**64 - 1, head first); returns its hits.

        It arrives at `now` seconds, and its host knows this of its return.
        """
        resident = self._node
        hits = 0
        for block in path:
            if block not in resident:
                break
            hits += 1
        self._requests += 1
        self._refs += len(path)
        self._hits += hits
        last = resident[path[hits - 1]] if hits else 0
        hint = self._reuse_hints.begin(self._requests, now, reuse_hint)
        self.policy.begin(self._requests, len(path), last, [key_of(block) for block in path[hits:]], hint)
        self._access(path)
        return hits

    def totals(self) -> Hits:
        """The result so far."""
        return Hits(self._requests, self._refs, self._hits)

    def resident(self) -> set[int]:
        """The resident blocks."""
        return set(self._node)

    def _access(self, path: Sequence[int]) -> None:
        """Uses of adjacent nodes are reported together, as the policy's contract allows."""
        resident, touch = self._node, self.policy.touch
        used: list[int] = []
        for block in reversed(path):
            node = resident.get(block)
            if node is not None:
                used.append(node)
                continue
            if used:
                touch(used)
                used = []
            self._bring_in(block, leaf=block == path[-1])
        if used:
            touch(used)

    def _bring_in(self, block: int, *, leaf: bool) -> None:
        policy, keys = self.policy, self._keys
        if len(self._node) >= self._slots:
            victim = policy.victim()
            policy.remove(victim, evicted=keys[victim])
            del self._node[self._block[victim]]
            self._free.append(victim)
        elif not self._free:
            keys = self._grow()
        node = self._free.pop()
        keys[node] = key_of(block)
        self._block[node] = block
        self._node[block] = node
        policy.insert((node,), leaf=leaf, continues=not leaf)

    def _grow(self) -> np.ndarray[tuple[int], np.dtype[np.object_]]:
        """Numbers for more blocks."""
        old = len(self._keys)
        size = min(2 * old, LISTS + self._slots)
        self._keys = np.concatenate([self._keys, np.empty(size - old, object)])
        self._block += [-1] * (size - old)
        self._free += range(size - 1, old - 1, -1)
        self.policy.resize(self._slots, self._keys)
        self.policy.grow(size)
        return self._keys


def key_of(block: int) -> bytes:
    """The key that policies see of `block`."""
    return xxh3_64_digest(block.to_bytes(8, "big"))


def experiment(paths: Iterable[Sequence[int]], kind: type[EvictionPolicy], slots: int) -> Hits:
    """Serve all `paths` from a tier of `slots` slots under policy `kind`."""
    tier = Experiment(kind, slots)
    for path in paths:
        tier.serve(path)
    return tier.totals()


_PARTS = 16
"""A load takes at most one slot in this many of host memory at a time."""

_MAX_WRITES = 1 << 14
"""Chunks in flight to the tier: more than any request has, so that the limit has no effect."""


class CacheReplay:
    """A `TieredCache`, empty at the start, under policy `kind`: one tier of `slots` slots.

    With `file_slots`, there is a file tier of as many slots, under `write_back`. Copies between the tiers end as soon
    as they are ordered. What is found is loaded in parts of a sixteenth of host memory, and a store waits for room that
    is being made.

    Attributes:
        hits: Blocks loaded, by tier.
    """

    def __init__(self, kind: type[EvictionPolicy], slots: int, file_slots: int = 0) -> None:
        specs = [TierSpec(HOST, slots, policy=kind)]
        specs += [TierSpec(FILE, file_slots, policy=kind)] if file_slots else []
        self.cache = TieredCache(specs, CacheSettings(max_writes=_MAX_WRITES, stores_wait=file_slots > 0))
        self.hits: Counter[str] = Counter(dict.fromkeys((spec.name for spec in specs), 0))
        self._part_chunks = max(1, slots // _PARTS) if file_slots else 0
        self._now = 0.0

    @property
    def moved(self) -> dict[str, int]:
        """Blocks that each route between tiers has moved."""
        routes = self.cache.counters.routes
        return {route: routes[route].chunks if route in routes else 0 for route in ("host->file", "file->host")}

    def serve(self, path: Sequence[int], now: float = 0.0, reuse_hint: ReuseHint | None = None) -> int:
        """Serve one request for the blocks `path` (ids from 0 to 2**64 - 1, head first); its hits.

        It arrives at `now` seconds, and its host knows this of its return.
        """
        cache, keys = self.cache, keys_of(path)
        self._now = now
        found = cache.lookup({0: GroupKeys(keys)}, now, reuse_hint=reuse_hint)
        hits = loaded = found.num_chunks
        lease = found.lease
        if lease is not None and self._part_chunks and hits > self._part_chunks:
            loaded = 0
            for first in range(0, hits, self._part_chunks):
                part = GroupKeys(keys[: min(hits, first + self._part_chunks)], first)
                mine = cache.lookup({0: part}, now, request_number=found.request_number).lease
                if mine is None:
                    raise IntegrityError(f"held blocks were evicted: those found from {first} on")
                wanted = len(part.keys) - first
                arrived = self._load(mine, wanted)
                loaded += arrived
                cache.release(mine)
                cache.end_step()
                self._move()
                if arrived < wanted:  # the rest is computed
                    break
        elif lease is not None:
            loaded = self._load(lease, hits)
        if hits < len(keys):
            self._store(keys, hits, found.request_number)
        if lease is not None:
            cache.release(lease)
        if self._part_chunks:
            cache.end_step()
            self._move()
        return loaded

    def _load(self, lease: Lease, wanted: int) -> int:
        """Load what is held, `wanted` blocks; how many arrived: fewer where host memory has no slot for a read."""
        self.cache.load(lease, {0: range(wanted)})
        self._move()
        outcome = self.cache.progress(lease).outcome
        if outcome is None or (outcome.num_chunks < wanted and not self._part_chunks):
            raise IntegrityError(f"not all of the {wanted} blocks found were loaded: {outcome}")
        self.hits.update(outcome.sources)
        return outcome.num_chunks

    def _store(self, keys: Sequence[Key], first: int, request_number: int | None) -> None:
        """Store what is behind the hits; if there are files, again as long as that makes room for more."""
        waits = bool(self._part_chunks)
        while first < len(keys):
            blocks = {0: range(first, len(keys))}
            scheduled = self.cache.store(
                {0: GroupKeys(keys, first)}, blocks, request_number=request_number, all_or_retry=waits
            )[0]
            ordered = self._move()
            if not waits or not (scheduled.positions or (scheduled.retry and ordered)):
                break
            first = scheduled.positions[-1] + 1 if scheduled.positions else first

    def _move(self) -> bool:
        """The simulated device: whatever was ordered has succeeded; whether anything was."""
        any_were = False
        while jobs := [command for command in self.cache.take_commands() if isinstance(command, Transfer)]:
            any_were = True
            done = [TransferResult(job.job, (Status.OK,) * len(job.items), len(job.items)) for job in jobs]
            self.cache.apply_results(done, self._now)
            if not self._part_chunks:
                break
        return any_were


@dataclass(frozen=True, slots=True)
class HitCurves:
    """Hit ratios of one tier by its capacity.

    Attributes:
        sizes: Capacities in blocks, ascending.
        ratios: Hits per block reference at each of them: `optimum`, `gittins`, `arc`, `lru`.
        requests: Requests that were served.
        of: Requests of the trace.
    """

    sizes: tuple[int, ...]
    ratios: dict[str, list[float]]
    requests: int
    of: int


_MOST_REFERENCES = 500_000
"""Block references of a trace that hit ratios by capacity are computed for."""


def hit_curves(paths: Paths, tell: Callable[[int, int], None], *, points: int = 9) -> HitCurves:
    """Hit ratios by capacity, from 1 % of the blocks to all; before each size, `tell` gets its number, of how many.

    LRU is exact, from stack distances; the other policies and the optimum are run at each size.
    """
    served = min(len(paths), int(np.searchsorted(paths.starts, _MOST_REFERENCES, side="right")) - 1)
    some = paths if served == len(paths) else Paths(paths[at] for at in range(served))
    distances = np.sort(stack_distances(some))
    sizes = sorted({*np.geomspace(max(1, some.unique / 100), max(1, some.unique), points).round().astype(int).tolist()})
    ratios: dict[str, list[float]] = {"optimum": [], "gittins": [], "arc": [], "lru": []}
    refs = max(1, some.references)
    for number, size in enumerate(sizes):
        tell(number + 1, len(sizes))
        ratios["optimum"].append(optimal_hits(some, size) / refs)
        ratios["lru"].append(int(np.searchsorted(distances, size, side="right")) / refs)
        for name in ("gittins", "arc"):
            run = Experiment(POLICIES[name], size)
            for path in some:
                run.serve(path)
            ratios[name].append(run.totals().ratio)
    return HitCurves(tuple(sizes), ratios, served, len(paths))
