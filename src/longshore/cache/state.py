"""The state of all tiers: slots, index, eviction policies and backlog, which change together.

The modules above (`transfers`, `manager`) use these methods; each leaves all structures consistent:

    allocate          slots for chunks that a job will fill              FREE     -> FILLING
    end_writes        the job has filled them                            FILLING  -> READY
    fail, invalidate  a write failed, or a read found invalid bytes      any      -> FREE or DRAINING, descendants too
    end_reads         readers have ended; the last one frees the slot    DRAINING -> FREE

A chunk is a node of the index, a copy is (node, tier), and jobs name slots. Evictions in batches are in `evictor`;
loads and peers count the readers of slots themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, repeat

import numpy as np
import numpy.typing as npt

from longshore.boundary import Key, Status
from longshore.cache.backlog import Backlog
from longshore.cache.columns import as_i32, filled, i32_view, resized, u8_view, unique
from longshore.cache.events import EVICTED, RESET, EventKind, EventLog
from longshore.cache.eviction_policies import EvictionPolicy
from longshore.cache.eviction_policies.hit_rates import ReuseHint, ReuseHints
from longshore.cache.eviction_policies.partitioned import PartitionedBySize
from longshore.cache.index import Index
from longshore.cache.nodes import ORPHANS, ROOT
from longshore.cache.partial import PartialPrefixes
from longshore.cache.pool import DRAINING, FILLING, FREE, READY, SlotPool
from longshore.cache.priorities import Priorities, WindowMarks
from longshore.cache.settings import CacheSettings
from longshore.cache.types import Counters, MissReason, Run, SizeStats, TierStats
from longshore.errors import CacheError
from longshore.monitoring.metric_names import EVICTED_AGE_SECONDS

_NOWHERE = 255
"""No tier has this number."""

_FEW_SLOTS = 16
"""Ages of more chunks than these are observed as an array."""


@dataclass(slots=True)
class OwnedTier:
    """One owned tier, as the control plane sees it; warmer tiers have lower numbers."""

    name: str
    pool: SlotPool
    make_policy: type[EvictionPolicy]


class NodeRef:
    """Keeps a node and all its ancestors from being evicted. `node` is `ROOT` after it was invalidated."""

    __slots__ = ("node",)

    def __init__(self, node: int) -> None:
        self.node = node


class CacheState:
    """Slots, index, eviction policies and backlog of all tiers."""

    def __init__(
        self,
        tiers: Sequence[OwnedTier],
        counters: Counters,
        settings: CacheSettings,
        thresholds: Sequence[int],
    ) -> None:
        self.tiers = list(tiers)
        self.tier_names = [owned.name for owned in tiers]
        self.counters = counters
        self.pools = [owned.pool for owned in tiers]
        self.several_sizes = len(self.pools[0].slabs.image_bytes) > 1
        self.refs: dict[int, set[NodeRef]] = {}
        self.thresholds = thresholds
        self.coldest = len(tiers) - 1
        """The coldest tier."""
        alike = self.coldest > 0 and not self.several_sizes
        self.coldest_ranks_all = alike and settings.admission and tiers[-1].make_policy.rejects
        """Whether the policy of the coldest tier ranks the chunks of all tiers, as one tier of their size would."""
        self.log = EventLog(settings.events)
        self.log.hidden = settings.self_test_key
        self._token_width = settings.token_width
        self.reuse_hints = ReuseHints()
        self.last_request = self.current_request = 0
        """The number of the last request that began, and that of the request that uses are counted for."""
        self.changes = 0
        """Increases with each change that may make a copy evictable, allow a copy down, or free slots."""
        self._begin()

    def _begin(self) -> None:
        self.index = Index(self.pools)
        self.policies = [self._make_policy(tier) for tier in self.index.tiers]
        self.backlog = Backlog(self.index, self.thresholds)
        self.priorities = Priorities(
            self.index, self.policies, [owned.make_policy for owned in self.tiers], self._current_request
        )
        self.windows = WindowMarks(self.index, self.policies)
        self.partials = PartialPrefixes(self.index, self._token_width)
        self.protected = filled(0, dtype=np.uint8)
        """1 for nodes that a lookup protects until the end of the step."""
        self._invalid_copies: list[tuple[int, int]] = []
        """Tiers and slots of invalid copies, to be removed when the step ends."""
        self.retained_in_host: set[int] = set()
        """Nodes whose copies in the host tier are not evicted, for a prefetch that lacks room."""
        self.grow()
        for policy in self.policies:
            policy.begin(self.last_request)

    def _current_request(self) -> tuple[int, int]:
        return self.current_request, self.reuse_hints.of(self.current_request)

    def ranked_slots(self, tier: int) -> int:
        """The slots of all chunks that the policy of `tier` ranks."""
        ranked = self.pools if self.coldest_ranks_all and tier == self.coldest else [self.pools[tier]]
        return sum(pool.capacity for pool in ranked)

    def _make_policy(self, tier: int) -> EvictionPolicy:
        owned, names = self.tiers[tier], self.index.key
        slabs = owned.pool.slabs
        if not self.several_sizes:
            return owned.make_policy(self.ranked_slots(tier), names)
        parts = [owned.make_policy(slabs.slabs * images, names) for images in slabs.images]
        return PartitionedBySize(owned.pool.capacity, names, parts, self.index.size_classes_of)

    def policy_of(self, tier: int, size_class: int) -> EvictionPolicy:
        """The eviction policy of one image size of a tier."""
        policy = self.policies[tier]
        return policy.part(size_class) if isinstance(policy, PartitionedBySize) else policy

    def grow(self) -> None:
        """Grow all structures to the present size of the index."""
        for policy in self.policies:
            policy.grow(self.index.size)
        self.backlog.grow(self.index.size)
        self.windows.grow(self.index.size)
        self.partials.grow(self.index.size)
        self.priorities.grow(self.index.size)
        self.protected = resized(self.protected, self.index.size)

    def runs(self, nodes: Sequence[int]) -> tuple[Run, ...]:
        """Where `nodes` are, as runs by the warmest tier that has them ready."""
        ids = as_i32(nodes)
        if len(ids) and np.count_nonzero(self.index.are_ready(ids, 0)) == len(ids):
            return (Run(self.tier_names[0], len(ids)),)
        warmest = np.full(len(ids), _NOWHERE, np.uint8)
        for tier in reversed(self.index.tiers):
            warmest[self.index.are_ready(ids, tier)] = tier
        runs = ((tier, len(list(run))) for tier, run in groupby(warmest.tobytes()))
        return tuple(Run(self.tier_names[tier], chunks) for tier, chunks in runs if tier != _NOWHERE)

    def miss_reason(self, key: Key) -> MissReason:
        """Why `key` is a miss for a request whose hit ended before it."""
        index = self.index
        node = index.get(key)
        if not node:
            return MissReason.ABSENT
        return MissReason.IN_FLIGHT if index.warmest_ready(node) < 0 else MissReason.AFTER_MISS

    def count_misses(self, keys: Sequence[Key], end: int, known: int, remote: int = 0) -> None:
        """Count the misses of a request whose hit ended before `keys[end]`.

        The keys before `keys[known]` are in a tier or on their way into one; `remote` of the others are known to be
        in a remote tier. There may be orphans among them.
        """
        misses = self.counters.misses
        if self.index.orphans:
            known = len(keys)
        for key in keys[end:known]:
            misses[self.miss_reason(key)] += 1
        for reason, count in ((MissReason.ABSENT, len(keys) - known - remote), (MissReason.REMOTE, remote)):
            if count:
                misses[reason] += count

    # ------------------------------------------------------------------ arrivals

    def allocate(self, keys: Sequence[Key], parent_key: Key | None, job: int, size_class: int) -> list[int]:
        """Slots of the host tier for `keys`, which follow the key `parent_key` and are in no tier, for `job` to fill.

        The caller has made room for `size_class`, and asked `Index.follow` about the keys.
        """
        slots, index = self.pools[0].allocate(len(keys), size_class), self.index
        parent = ROOT if parent_key is None else index.get(parent_key) or ORPHANS
        nodes = index.link(parent, keys, 0, slots)
        if parent_key is not None and parent == ORPHANS:
            index.add_orphan(nodes[0], parent_key)
        if index.depth[nodes[0]] < 0:
            self.priorities.mark_orphans(nodes)
        if self.windows.used:
            self.windows.enter(nodes)
        self.pools[0].writer.update(zip(slots, repeat(job), strict=False))
        return slots

    def allocate_independent(self, keys: Sequence[Key], job: int, size_class: int) -> list[int]:
        """The same for independent `keys`, of which the caller has asked `Index.find_independent`."""
        slots = self.pools[0].allocate(len(keys), size_class)
        self.windows.enter(self.index.link_independent(keys, 0, slots))
        self.pools[0].writer.update(zip(slots, repeat(job), strict=False))
        return slots

    def allocate_copies(self, nodes: Sequence[int], tier: int, job: int) -> list[int]:
        """Slots in `tier` for other copies of `nodes`, parents first, for `job` to fill. The caller has made room."""
        pool = self.pools[tier]
        if self.several_sizes:
            slots = [slot for node in nodes for slot in pool.allocate(1, self.index.size_class_of(node))]
        else:
            slots = pool.allocate(len(nodes))
        try:
            self.index.add_copies(nodes, tier, slots)
        except CacheError:
            for slot in slots:
                pool.free(slot)
            raise
        pool.writer.update(zip(slots, repeat(job), strict=False))
        if clean := self.backlog.update_all(nodes):
            self.recheck_evictable(as_i32(clean))
        return slots

    def end_writes(self, tier: int, slots: Sequence[int]) -> list[int]:
        """A job has filled these slots; the last is to be evicted first. Returns orphans that now have parents."""
        pool, writer = self.pools[tier], self.pools[tier].writer
        for slot in slots:
            del writer[slot]
        written = as_i32(slots)
        draining = u8_view(pool.state)[written] == DRAINING
        wanted = written[~draining]
        pool.move_all(wanted, FILLING, READY)
        pool.mark_written(wanted, self.log.now)
        attached = self.mark_ready(i32_view(pool.node)[wanted].tolist(), tier)
        for slot in written[draining].tolist():
            self._free_drained(tier, slot)
        return attached

    def mark_ready(self, nodes: Sequence[int], tier: int) -> list[int]:
        """Copies of `nodes`, parents first, have become ready in `tier`. Returns orphans that now have parents."""
        if self.log.on:
            self.log.arrived(self.index, self.tier_names, nodes, tier)
        ids, leaf = as_i32(nodes), bool(nodes) and not self.index.child[nodes[-1]]
        if not tier:
            self.policies[0].insert(nodes[::-1], leaf=leaf)
            self._record_uses_elsewhere(ids[::-1], leaf=leaf)
        elif tier < self.coldest or not self.coldest_ranks_all:
            self.policies[tier].insert_copies(nodes[::-1], leaf=leaf)
        self.rank(ids[::-1], tier, leaf=leaf)
        if self.several_sizes:
            slots = self.index.slot[tier]
            self.pools[tier].record_use([slots[node] for node in reversed(nodes)])
        news = self.index.mark_loadable(nodes)
        if self.windows.used:
            self.windows.mark_ready(nodes, tier)
        if self.coldest:
            self.backlog.arrived(ids)
            if tier and nodes:
                self.backlog.backed_up(ids, tier)
            self.recheck_evictable(ids, apart_from=tier)
        return self.attach_orphans(news)

    def rank(self, nodes: npt.NDArray[np.int32], tier: int, *, leaf: bool = False) -> None:
        """Copies of `nodes`, tail first, are ready in `tier`: the policy that ranks all gets those new to it."""
        if self.coldest_ranks_all and len(nodes):
            new = ~self.index.are_ready_in_any(nodes, [each for each in self.index.tiers if each != tier])
            if new.any():
                self.policies[self.coldest].insert(nodes[new].tolist(), leaf=leaf and bool(new[0]))

    def are_ranked(self, nodes: npt.NDArray[np.int32], tier: int) -> npt.NDArray[np.bool_]:
        """Which of `nodes` the policy of `tier` ranks: those that are ready there, or in any tier."""
        if self.coldest_ranks_all and tier == self.coldest:
            return self.index.are_ready_in_any(nodes, self.index.tiers)
        return self.index.are_ready(nodes, tier)

    def attach_orphans(self, nodes: Sequence[int]) -> list[int]:
        """Attach orphans to their parents among `nodes`, where allowed; returns those that are no orphans any more."""
        attached = self.index.attach_orphans(nodes)
        if attached:
            self.priorities.unmark_orphans(attached)
            self.backlog.arrived(attached)
        return attached

    # ------------------------------------------------------------------ losses

    def fail(self, tier: int, slot: int, fault: Status) -> None:
        """The job that fills this slot has failed."""
        pool = self.pools[tier]
        del pool.writer[slot]
        pool.invalid[slot] = fault
        if pool.state[slot] == DRAINING:
            self._free_drained(tier, slot)
        else:
            self.invalidate(pool.node[slot], tier, fault.value)

    def backup_failed(self, node: int) -> None:
        """A copy of `node` to a colder tier has ended without success: it is not tried again until `node` is used."""
        if self.backlog.fail(node):
            self._recheck_evictable(node)

    def reject(self, nodes: Sequence[int]) -> None:
        """The tier below takes no copy of the dirty `nodes` until they are used again. No dirty chunk waits for one."""
        self.backlog.reject(nodes)
        self.recheck_evictable(as_i32(nodes), apart_from=self.coldest)

    def end_reads(self, tier: int, slots: Sequence[int]) -> None:
        """Reads of these distinct slots have ended."""
        pool = self.pools[tier]
        read, readers = as_i32(slots), i32_view(pool.readers)
        readers[read] -= 1
        idle = read[readers[read] == 0]
        state = u8_view(pool.state)[idle]
        ready = i32_view(pool.node)[idle[state == READY]]
        self._release_held(ready, {tier, self.coldest} if self.coldest_ranks_all else {tier})
        for slot in idle[state == DRAINING].tolist():
            self._free_drained(tier, slot)

    def discard_invalid(self, tier: int, slot: int, fault: Status) -> None:
        """A read has ended that found the bytes of the slot invalid.

        A copy in a colder tier is removed at the end of the step if host memory has chunks after it that a lookup
        protects in this step: what the lookup returned can still be read.
        """
        pool = self.pools[tier]
        pool.readers[slot] -= 1
        pool.invalid.setdefault(slot, fault)
        if pool.state[slot] == DRAINING:
            self._free_drained(tier, slot)
        elif tier and any(
            not where and self.protected[each] for each, where in self.index.orphaned_by(pool.node[slot], -1)
        ):
            self._invalid_copies.append((tier, slot))
        else:
            self.invalidate(pool.node[slot], tier, fault.value)

    def discard_invalid_copies(self) -> None:
        """The step has ended: remove the invalid copies that were kept for the chunks after them."""
        invalid, self._invalid_copies = self._invalid_copies, []
        for tier, slot in invalid:
            pool = self.pools[tier]
            if pool.state[slot] == READY and slot in pool.invalid:
                self.invalidate(pool.node[slot], tier, pool.invalid[slot].value)

    def invalidate(self, node: int, tier: int, cause: str) -> None:
        """Remove an invalid copy, and all copies that cannot be reached without it.

        A copy that is being filled from the invalid one is removed, too.
        """
        for where in self._remove_copies(node, tier, cause):
            self.counters.lost[self.tier_names[where]] += 1

    def _remove_copies(self, node: int, tier: int, cause: str) -> list[int]:
        """The same without counting; returns the tiers of the copies removed."""
        index = self.index
        others = [t for t in index.tiers if t != tier and index.slot[t][node] >= 0]
        if not any(index.is_ready(node, t) for t in others):
            doomed, left = [*others, tier], -1
        else:
            doomed, left = [tier], others[-1]
        copies = [*reversed(index.orphaned_by(node, left)), *((node, t) for t in doomed)]
        for each, where in copies:
            self.remove_copy(each, where, cause=cause)
        return [where for _, where in copies]

    def clear(self, cause: str = "") -> None:
        """Forget every chunk, for `cause`. Slots that jobs still touch drain."""
        if self.log.on:
            self.log.record(EventKind.RESET, cause=cause)
        for pool in self.pools:
            pool.clear()
        for refs in self.refs.values():
            for ref in refs:
                ref.node = ROOT
        self.refs.clear()
        self.index.removed = -1  # no result of an earlier lookup is valid any more
        self._begin()

    def reset_warmer(self, first: int) -> None:
        """Remove all chunks from tiers warmer than tier `first`, and those being written to any tier."""
        self.retain_in_host(())
        for tier, pool in enumerate(self.pools):
            for slot in list(pool.writer):
                if pool.state[slot] == FILLING:
                    self._remove_copies(pool.node[slot], tier, RESET)
        for tier, pool in enumerate(self.pools[:first]):
            for node in sorted(filter(None, pool.node), key=lambda node: -self.index.depth[node]):
                self.remove_copy(node, tier, cause=RESET)

    # ------------------------------------------------------------------ use

    def add_ref(self, node: int) -> NodeRef:
        """Keep `node` and its ancestors from eviction until `remove_ref`."""
        ref = NodeRef(node)
        self.refs.setdefault(node, set()).add(ref)
        return ref

    def is_referenced(self, node: int) -> bool:
        """Whether a lease, or a lookup in this step, references the last copy of `node`."""
        return node in self.refs or bool(self.protected[node])

    def remove_ref(self, ref: NodeRef) -> None:
        """Remove a reference. One whose node was invalidated has no effect any more."""
        node = ref.node
        if node == ROOT:
            return
        ref.node = ROOT
        refs = self.refs[node]
        refs.discard(ref)
        if not refs:
            del self.refs[node]
            self._recheck_evictable(node)

    def retain_in_host(self, nodes: Iterable[int]) -> None:
        """Keep exactly the copies of `nodes` in the host tier from eviction, of all nodes."""
        before, self.retained_in_host = self.retained_in_host, set(nodes)
        self.recheck_evictable(as_i32(sorted(before - self.retained_in_host)))

    def check_size_class(self, nodes: Sequence[int], size_class: int) -> None:
        """Raise `CacheError` if one of `nodes` (0 is no node) is of another size class."""
        if self.several_sizes:
            for node in nodes:
                if node and self.index.size_class_of(node) != size_class:
                    key, got = self.index.key[node].hex()[:12], self.index.size_class_of(node)
                    raise CacheError(f"chunk {key} has images of size class {got}, not {size_class}")

    def total_room(self, tier: int) -> int:
        """How many chunks fit in `tier`, those that it has or is being filled with included.

        With several image sizes, further chunks are taken to be of the largest size.
        """
        pool = self.pools[tier]
        if not self.several_sizes:
            return pool.capacity
        largest = pool.slabs.images.index(min(pool.slabs.images))
        return len(self.policies[tier]) + len(pool.writer) + pool.room(largest)

    def begin_request(self, keys: Sequence[Key], known: int, reuse_hint: ReuseHint | None = None) -> int:
        """A request for the path `keys` begins, of which the first `known` are in some tier; returns its number.

        `reuse_hint` is the hint about when its chunks are used again.
        """
        self.last_request = self.current_request = self.last_request + 1
        last = self.index.get(keys[known - 1]) if known else ROOT
        hint = self.reuse_hints.begin(self.last_request, self.log.now, reuse_hint)
        for policy in self.policies:
            policy.begin(self.last_request, len(keys), last, keys[known:], hint)
        return self.last_request

    def check_request_number(self, number: int | None) -> None:
        """Raise `CacheError` for a number that no lookup returned."""
        if number is not None and not (isinstance(number, int) and 0 < number <= self.last_request):
            raise CacheError(f"request_number: expected 1 to {self.last_request}, as lookups say, got {number!r}")

    def set_request(self, number: int | None) -> None:
        """Count the following uses for the request of this number; for `None`, for the last one that began."""
        number = self.last_request if number is None else number
        if number != self.current_request:
            self.current_request = number
            for policy in self.policies:
                policy.begin(number, hint=self.reuse_hints.of(number))

    def touch(self, nodes: Sequence[int] | npt.NDArray[np.int32]) -> None:
        """The chunks of a path, tail first, were used by the current request. Heads are evicted last."""
        if not len(nodes):
            return
        used = as_i32(nodes)
        for tier, policy in enumerate(self.policies):
            ranked = used[self.are_ranked(used, tier)]
            policy.touch(ranked)
            if self.several_sizes:
                self.pools[tier].record_use(i32_view(self.index.slot[tier])[ranked].tolist())
        self._record_uses_elsewhere(used)
        if self.coldest:
            dirty = sum(self.backlog.counts)
            self.backlog.use(used)
            self.changes += self.several_sizes or sum(self.backlog.counts) != dirty

    # ------------------------------------------------------------------ monitoring

    def stats(self) -> tuple[TierStats, ...]:
        """Occupancy per tier, warmest first."""
        return tuple(
            TierStats(
                name,
                pool.capacity,
                pool.used,
                int(np.count_nonzero(u8_view(pool.state) == READY)),
                pool.slabs.nbytes,
                pool.used_bytes,
                tuple(SizeStats(size, *pool.used_by(each)) for each, size in enumerate(pool.slabs.image_bytes)),
            )
            for name, pool in zip(self.tier_names, self.pools, strict=True)
        )

    def check_integrity(self) -> None:
        """Check all data structures; raises `CacheError` where two of them are inconsistent."""
        index, nodes = self.index, self.index.all_nodes()
        for part in (index, self.backlog, self.partials):
            part.check_integrity()
        for tier, (name, pool, policy) in enumerate(zip(self.tier_names, self.pools, self.policies, strict=True)):
            pool.check_integrity()
            policy.check_integrity()
            live = nodes[i32_view(index.slot[tier])[nodes] >= 0]
            if len(live) + np.count_nonzero(u8_view(pool.state) == DRAINING) != pool.used:
                raise CacheError(f"{name}: {len(live)} copies use {pool.used} slots")
            ready = nodes[self.are_ranked(nodes, tier)]
            if len(policy) != len(ready) or not policy.resident(index.size)[ready].all():
                raise CacheError(f"{name}: the eviction policy has {len(policy)} of {len(ready)} ready chunks")
        for node, refs in self.refs.items():
            if index.key[node] is None or not refs or any(ref.node != node for ref in refs):
                raise CacheError(f"node {node} is referenced, but was removed")

    # ------------------------------------------------------------------ inside

    def _record_uses_elsewhere(self, used: npt.NDArray[np.int32], *, leaf: bool = False) -> None:
        """Record uses, tail first, in the policies of colder tiers that lack the chunks. A `leaf` ends a prompt."""
        for tier in self.index.tiers[1 : self.coldest + (not self.coldest_ranks_all)]:
            there = self.index.are_ready(used, tier)
            if not there.all():
                self.policies[tier].record_uses(unique(used[~there]).tolist(), leaf=leaf and not there[0])

    def recheck_evictable(self, nodes: npt.NDArray[np.int32], *, apart_from: int = -1) -> None:
        """Nodes may have become evictable, in all tiers except `apart_from`."""
        self.changes += bool(len(nodes))
        self._release_held(nodes, set(range(len(self.policies))) - {apart_from})

    def _release_held(self, nodes: npt.NDArray[np.int32], tiers: set[int]) -> None:
        """Release those of `nodes` that are held by the policies of `tiers`, each once."""
        for policy in (self.policies[each] for each in tiers):
            if len(held := nodes[policy.are_held(nodes)]):
                policy.release(unique(held).tolist())

    def _recheck_evictable(self, node: int) -> None:
        """The same for one node."""
        self.changes += 1
        for tier, policy in enumerate(self.policies):
            ranked = self.index.is_ready(node, tier) or (self.coldest_ranks_all and tier == self.coldest)
            if ranked and policy.is_held(node):
                policy.release((node,))

    def observe_ages(self, tier: int, slots: npt.NDArray[np.int32]) -> None:
        """The copies in these slots are being evicted: record their ages."""
        histogram = self.counters.histograms[EVICTED_AGE_SECONDS][self.tier_names[tier]]
        if len(slots) > _FEW_SLOTS:
            histogram.observe_all(self.pools[tier].ages(slots, self.log.now))
            return
        for slot in slots.tolist():  # faster for so few
            if (age := self.pools[tier].age(slot, self.log.now)) is not None:
                histogram.observe(age)

    def remove_copy(self, node: int, tier: int, *, cause: str) -> None:
        """Remove a copy from all structures, and free its slot."""
        index, pool = self.index, self.pools[tier]
        slot, parent = index.slot[tier][node], index.parent[node]
        if cause == EVICTED and (age := pool.age(slot, self.log.now)) is not None:
            self.counters.histograms[EVICTED_AGE_SECONDS][self.tier_names[tier]].observe(age)
        if self.log.on:
            self.log.lost(self.index, self.tier_names, node, tier, cause)
        if pool.state[slot] == READY:
            self._remove_from_policies(node, tier, index.key[node] if cause == EVICTED else None)
        gone = index.drop_copy(node, tier)
        pool.move(slot, DRAINING if pool.is_busy(slot) else FREE)
        if gone:
            self.forget((node,))
            for ref in self.refs.pop(node, ()):
                ref.node = ROOT
            self.protected[node] = 0
            self.retained_in_host.discard(node)
            self.backlog.forget(node)
        else:
            if cause == EVICTED:
                self.counters.demotions[self.tier_names[tier]] += 1
            self.backlog.exposed(node)
            self.backlog.update(node)
            self._recheck_evictable(node)
            if parent_key := index.orphans.get(node):  # its copies may be in warmer tiers now
                self.attach_orphans((index.get(parent_key),))
        if parent > ORPHANS and not index.num_children[tier][parent]:
            self._recheck_evictable(parent)

    def _remove_from_policies(self, node: int, tier: int, evicted: Key | None) -> None:
        """The ready copy of `node` in `tier` is being removed: remove it from policies that do not rank it any more."""
        index = self.index
        if tier < self.coldest or not self.coldest_ranks_all:
            self.policies[tier].remove(node, evicted=evicted)
        if self.coldest_ranks_all and not any(index.is_ready(node, each) for each in index.tiers if each != tier):
            self.policies[self.coldest].remove(node, evicted=evicted)

    def forget(self, nodes: Sequence[int]) -> None:
        """`nodes` are in no tier any more: remove them from priorities and partial prefixes."""
        self.changes += 1
        if self.priorities.used:
            self.priorities.forget(nodes)
        if self.partials.on:
            self.partials.forget(nodes)

    def _free_drained(self, tier: int, slot: int) -> None:
        if not self.pools[tier].is_busy(slot):
            self.pools[tier].move(slot, FREE)
