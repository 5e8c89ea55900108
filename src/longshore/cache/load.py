"""Loads onto the device, and prefetches of leased chunks into the host tier while their request is queued.

prefetch policy   the request waits                     reads are cancelled
best effort       not at all                            when the lease is released, or after `load_timeout`
wait              until all have arrived; `load_timeout`  the same
timeout           the same, at most `timeout` seconds   when the lease is released, or after `timeout`

Where a prefetch that is waited for lacks room, evicting clean chunks only, it schedules backups. Such prefetches get
room in order:

    the first that lacks room    gets the room made; its chunks in the host tier are kept until it is over
    those after it               schedule nothing yet
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from longshore.boundary import Addresses, Key, Section, Slots
from longshore.cache.columns import as_i32, count_leading, i32_view, u8_view
from longshore.cache.lookups import LeaseRecord, Leases
from longshore.cache.offload import Offloader
from longshore.cache.pool import READY
from longshore.cache.settings import PrefetchPolicy, timeout_of
from longshore.cache.transfers import Load, TierSlots, Transfers, Waiter
from longshore.cache.types import MissReason, origins_of
from longshore.errors import CacheError

LOAD_BATCH = 16
"""Chunks of one load job. The jobs that have arrived by the deadline are used."""


class Batch(NamedTuple):
    """Chunks of one load job: `parents` are their parent keys, `tiers` and `slots` the copies to read.

    `in_host`: all of them are ready in the host tier.
    """

    nodes: Sequence[int]
    keys: Sequence[Key]
    parents: Sequence[Key | None]
    tiers: Sequence[int]
    slots: Sequence[int]
    in_host: bool


def _batches(in_host: int, count: int) -> Iterator[tuple[int, int]]:
    """The leading run in the host tier, which needs no read; then `LOAD_BATCH` chunks at a time."""
    if in_host:
        yield 0, in_host
    for start in range(in_host, count, LOAD_BATCH):
        yield start, min(start + LOAD_BATCH, count)


class Loader:
    """Orders loads on one `Transfers`."""

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self._state = transfers.state

    def load(
        self,
        lease: LeaseRecord,
        blocks: Sequence[int],
        skip: int,
        *,
        timeout: float,
        by_layer: bool = False,
        tokens: int | None = None,
    ) -> Load:
        """Load the leading chunks of a leased path into device `blocks`, as far as the host tier has room.

        `skip` blocks of the first chunk are left out, and of the last block all but `tokens` tokens. The load ends
        after `timeout` seconds.
        """
        state, per_chunk = self._state, self._transfers.settings.blocks_per_chunk
        (chunks,) = lease.groups
        keys, tail = chunks.keys[: -(-(skip + len(blocks)) // per_chunk)], chunks.refs[0].node
        leased, first_block = len(chunks.positions), chunks.positions[0] * per_chunk + skip
        load, waiter = self._begin(timeout)
        load.requests, load.first_group_chunks = [(lease.request, keys)], 0 if chunks.group else len(keys)
        index = state.index
        path = index.path(tail, leased)[leased - len(keys) :][::-1].tolist() if tail else index.loadable_nodes(keys)
        tiers, slots, in_host = self._claim(load, path, keys)
        path = path[: len(tiers)]
        load.not_scheduled += [state.miss_reason(key) for key in keys[len(path) + len(load.not_scheduled) :]]
        parent_key = index.parent_keys(path[:1])[0] if path else None
        for start, end in _batches(in_host, len(path)):
            here = slice(start, end)
            parents = [parent_key, *keys[start : end - 1]]
            batch = Batch(path[here], keys[here], parents, tiers[here], slots[here], in_host=end <= in_host)
            parent_key = keys[end - 1]
            taken = min(len(blocks), len(batch.nodes) * per_chunk - first_block % per_chunk)
            sections = (Section(chunks.group, first_block, tuple(blocks[:taken])),)
            last = tokens if end == len(keys) else None
            self._schedule_batch(load, waiter, batch, sections, by_layer=by_layer, tokens=last)
            blocks, first_block = blocks[taken:], first_block + taken
        return load

    def load_together(
        self,
        nodes: Sequence[int],
        keys: Sequence[Key],
        sections: Sequence[Section],
        *,
        timeout: float,
        by_layer: bool = False,
    ) -> Load:
        """Load `keys`, of all groups, into the device blocks of `sections`, by one job that waits for all reads.

        `nodes` are their nodes, fewer if some were removed. Then, or if the host tier has no room for all reads,
        nothing is loaded.
        """
        state = self._state
        load, waiter = self._begin(timeout, is_whole=True)
        if len(nodes) < len(keys):
            load.not_scheduled = [state.miss_reason(key) for key in keys]
            return load
        tiers, slots, in_host = self._claim(load, nodes, keys)
        if tiers:
            batch = Batch(nodes, keys, state.index.parent_keys(nodes), tiers, slots, in_host=in_host == len(nodes))
            self._schedule_batch(load, waiter, batch, tuple(sections), by_layer=by_layer)
        return load

    def _begin(self, timeout: float, *, is_whole: bool = False) -> tuple[Load, Waiter]:
        load = Load(self._transfers.new_id(), began=self._transfers.now, is_whole=is_whole)
        waiter = Waiter(load.waiter, self._transfers.now + timeout, load, blocks_request=True)
        self._transfers.waiters.begin(waiter)
        return load, waiter

    def lease_slots(
        self,
        keys: Sequence[Key],
        nodes: npt.NDArray[np.int32],
        request_number: int | None,
        origins: Mapping[Key, str] | None,
        *,
        is_first: bool,
        count: bool = True,
    ) -> tuple[int, int, Addresses]:
        """Begin a job that reads `keys`, distinct chunks at `nodes`, ready in the host tier: a use of each.

        The engine carries it out itself. Returns the job, their number, and the slots, which are not written before the
        job has ended. When it ends, each chunk is a hit or a miss. `is_first`: they are of the first group. Unless
        `count`, it is neither a use, nor hits or misses.
        """
        state = self._state
        taken = i32_view(state.index.slot[0])[nodes]
        i32_view(state.pools[0].readers)[taken] += 1
        slots, name = taken.tolist(), state.tier_names[0]
        job = self._transfers.new_id()
        if count:
            if state.windows.used:
                state.windows.mark_used(nodes.tolist())
            state.set_request(request_number)
            state.touch(nodes[::-1])
        record = self._transfers.schedule(job, keys, [None] * len(slots), TierSlots(0, slots), None, command=False)
        if count:
            record.sources, record.is_first_group = origins_of(keys, [name] * len(keys), origins), is_first
        return job, len(keys), Addresses(Slots(name, state.pools[0].size_class_of(slots[0]), tuple(slots)))

    def _add_readers(self, path: Sequence[int]) -> tuple[list[int], list[int], list[int], int]:
        """Add a reader to the copy that each loadable node is read from.

        Returns tiers and slots, the positions of those not in the host tier, and the number of leading chunks that are
        ready in the host tier.
        """
        index, pools = self._state.index, self._state.pools
        host_slots = i32_view(index.slot[0])[as_i32(path)]
        absent = (host_slots < 0).nonzero()[0].tolist()
        i32_view(pools[0].readers)[host_slots[host_slots >= 0]] += 1
        in_host = count_leading(u8_view(pools[0].state)[host_slots[: absent[0] if absent else len(path)]] == READY)
        slots, tiers = host_slots.tolist(), [0] * len(path)
        for i in absent:
            tier = tiers[i] = index.warmest_ready(path[i])
            slots[i] = index.slot[tier][path[i]]
            pools[tier].readers[slots[i]] += 1
        return tiers, slots, absent, in_host

    def _claim(self, load: Load, path: Sequence[int], keys: Sequence[Key]) -> tuple[list[int], list[int], int]:
        """`_add_readers`, and make room in the host tier for those that it lacks, if necessary without backups.

        Chunks from the first without room on are not loaded; if `load.is_whole`, none is.
        """
        tiers, slots, colder, in_host = self._add_readers(path)
        self._state.log.evicted_for = keys[colder[0]] if colder else None
        lacking, evictor = [path[i] for i in colder], self._transfers.evictor
        if (room := evictor.room_for(0, lacking, clean_only=True)) < len(colder):
            room = evictor.room_for(0, lacking, clean_only=False)
        if room < len(colder):
            cut = 0 if load.is_whole else colder[room]
            self._cut(load, tiers[cut:], slots[cut:])
            return tiers[:cut], slots[:cut], in_host
        return tiers, slots, in_host

    def _cut(self, load: Load, tiers: Sequence[int], slots: Sequence[int]) -> None:
        """There is no room for the first of these copies: none of them is loaded."""
        load.not_scheduled = [MissReason.NO_ROOM if tier else MissReason.AFTER_MISS for tier in tiers]
        for tier in sorted(set(tiers)):
            self._state.end_reads(tier, [slot for slot, other in zip(slots, tiers, strict=True) if other == tier])

    def _schedule_batch(
        self,
        load: Load,
        waiter: Waiter,
        batch: Batch,
        sections: tuple[Section, ...],
        *,
        by_layer: bool,
        tokens: int | None = None,
    ) -> None:
        names = self._state.tier_names
        in_host = list(batch.slots)
        if batch.in_host:
            load.sources += [names[0]] * len(in_host)
        else:
            load.sources += [names[self._state.index.warmest_ready(node)] for node in batch.nodes]
            for tier in sorted({tier for tier in batch.tiers if tier}):
                chosen = [i for i, each in enumerate(batch.tiers) if each == tier]
                job = self._transfers.schedule_copies([batch.nodes[i] for i in chosen], tier, 0, has_readers=True)
                for i, slot in zip(chosen, job.destination.slots if job.destination else (), strict=True):
                    in_host[i] = slot
                    self._state.pools[0].readers[slot] += 1
        load.jobs.append(
            self._transfers.schedule(
                self._transfers.new_id(),
                batch.keys,
                batch.parents,
                TierSlots(0, in_host),
                None,
                sections=sections,
                after=self._transfers.join(waiter, in_host),
                load=load,
                deadline=waiter.deadline,
                by_layer=by_layer,
                tokens=tokens,
            )
        )


class Prefetcher:
    """Orders prefetches on one `Transfers`."""

    def __init__(self, transfers: Transfers, offloader: Offloader, leases: Leases) -> None:
        self._transfers = transfers
        self._state = transfers.state
        self._offloader = offloader
        self._leases = leases
        self.queue: dict[int, tuple[LeaseRecord, Waiter]] = {}
        """Prefetches that requests wait for, oldest first, by number of the waiter, until the lease is released."""
        self._is_new = False
        """Whether the queue has changed since the last `proceed`."""
        self._seen = 0
        """`CacheState.changes` at the start of the last `proceed`, so that its own changes cause another one."""

    def check(self, policy: PrefetchPolicy | None, timeout: float | None) -> tuple[PrefetchPolicy, float]:
        """The policy, and its seconds. Raises `CacheError` for an invalid timeout, or one with another policy."""
        settings = self._transfers.settings
        policy = policy or settings.prefetch
        if timeout is not None and policy is not PrefetchPolicy.TIMEOUT:
            raise CacheError(f"timeout: expected only with the policy {PrefetchPolicy.TIMEOUT}, got it with {policy}")
        timed = policy is PrefetchPolicy.TIMEOUT
        return policy, timeout_of(timeout, settings.prefetch_timeout if timed else settings.load_timeout)

    def prefetch(self, record: LeaseRecord, policy: PrefetchPolicy, timeout: float) -> Waiter:
        """Prefetch the chunks of `record` that are not in the host tier; ends the wait of an earlier prefetch."""
        blocks_request = policy is not PrefetchPolicy.BEST_EFFORT
        former, waiter = (
            record.prefetch,
            Waiter(self._transfers.new_id(), self._transfers.now + timeout, blocks_request=blocks_request),
        )
        self._schedule(
            record,
            waiter,
            waits_its_turn=blocks_request and any(each.lacks_room for _, each in self.queue.values()),
        )
        record.prefetch = waiter
        if former is not None:
            self.cancel(former)
        if blocks_request and (waiter.lacks_room or waiter.jobs):
            if not any(each.lacks_room for _, each in self.queue.values()):
                self._state.retain_in_host(self._state.retained_in_host.union(self._path(record)))
            self.queue[waiter.number] = record, waiter
            self._is_new = True
            self.proceed()
        return waiter

    def cancel(self, waiter: Waiter) -> None:
        """End the wait of a request."""
        self._transfers.cancel_wait(waiter)
        if self.queue.pop(waiter.number, None) is not None:
            self._is_new = True
            self.proceed()

    def clear(self) -> None:
        """The cache was cleared."""
        self.queue.clear()

    def proceed(self) -> None:
        """Schedule reads of queued prefetches for which room was made; end waits for which no room can be made.

        Does nothing unless the queue or the cache has changed. The chunks in the host tier of the first prefetch
        that lacks room, and of those before it, are not evicted.
        """
        for number in [number for number, (_, waiter) in self.queue.items() if self._transfers.now >= waiter.deadline]:
            del self.queue[number]
            self._is_new = True
        state, is_new = self._state, self._is_new
        if not is_new and self._seen == state.changes:
            return
        self._is_new, self._seen = False, state.changes
        retained, earlier_requests = set[int]() if is_new else state.retained_in_host, set[str | None]()
        for record, waiter in self.queue.values():
            if is_new or waiter.lacks_room:
                retained = retained.union(self._path(record))
            if waiter.lacks_room:
                state.retain_in_host(retained)
                self._schedule(record, waiter)
                others = len(self._transfers.jobs) > len(waiter.jobs) or not earlier_requests <= {record.request}
                waiter.lacks_room &= others or self._leases.protects
                is_new = True  # `retained` changes for those after it
            if waiter.lacks_room:
                break
            earlier_requests.add(record.request)
        if retained or state.retained_in_host:
            state.retain_in_host(retained)

    def is_waiting(self, record: LeaseRecord) -> bool:
        """Whether the request of `record` has to wait for more chunks in the host tier."""
        waiter, index = record.prefetch, self._state.index
        if (
            waiter is None
            or not waiter.blocks_request
            or not (waiter.jobs or (waiter.lacks_room and waiter.number in self.queue))
        ):
            return False
        return bool(waiter.jobs) or not all(index.is_ready(node, 0) for node in record.nodes(index))

    def _path(self, record: LeaseRecord) -> list[int]:
        """The nodes of the leased chunks, at most as many as fit in the host tier."""
        return record.nodes(self._state.index)[: self._state.total_room(0)]

    def _schedule(self, record: LeaseRecord, waiter: Waiter, *, waits_its_turn: bool = False) -> None:
        """Join reads in flight, and schedule reads from colder tiers as far as clean chunks make room.

        The waiter `lacks_room` for the others if more may be made, or, with `waits_its_turn`, for all of them.
        """
        state, transfers, path = self._state, self._transfers, self._path(record)
        state.set_request(record.request_number)
        transfers.join(waiter, [slot for node in path if (slot := state.index.slot[0][node]) >= 0])
        colder = [i for i, node in enumerate(path) if state.index.slot[0][node] < 0]
        waiter.lacks_room = waits_its_turn and bool(colder)
        if waiter.lacks_room or not colder:
            transfers.waiters.begin(waiter)
            return
        state.log.evicted_for = state.index.key[path[colder[0]]]
        in_host = state.retained_in_host
        state.retain_in_host(in_host.union(path))
        room = self._offloader.make_room_from_clean([path[i] for i in colder], back_up=waiter.blocks_request)
        state.retain_in_host(in_host & state.retained_in_host)
        waiter.lacks_room, colder = waiter.blocks_request and room < len(colder), colder[:room]
        for start in range(0, len(colder), LOAD_BATCH):
            chosen = colder[start : start + LOAD_BATCH]
            warmest = {path[i]: state.index.warmest_ready(path[i]) for i in chosen}
            for tier in sorted(set(warmest.values())):
                nodes = [node for node, each in warmest.items() if each == tier]
                transfers.waiters.join(waiter, [transfers.schedule_copies(nodes, tier, 0, prefetch=True)])
        transfers.waiters.begin(waiter)
