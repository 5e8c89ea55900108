"""Transfers in flight, and the changes to the cache when they end.

A job has ended when every rank has reported it. An item has succeeded if it did on all ranks.

`Waiters` holds which requests wait for reads into the host tier, and until when.

    request 1 ── until 10.0 ──┐
    request 2 ── until 14.5 ──┴──► job 7        cancelled when no request waits for it any more

A read has no deadline of its own, because later requests may join it: it goes on as long as a request waits for it. The
reads of a load that is given up go on until its deadline, for other requests; those of a prefetch are cancelled at
once.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import NamedTuple

import numpy as np

from longshore.boundary import (
    DEVICE,
    Cancel,
    Command,
    Item,
    Items,
    Key,
    Reset,
    Route,
    Section,
    Slot,
    Slots,
    Status,
    Transfer,
    TransferResult,
    Urgency,
)
from longshore.cache.columns import as_i32, i32_view
from longshore.cache.events import WEIGHTS, EventKind
from longshore.cache.evictor import Evictor
from longshore.cache.settings import CacheSettings
from longshore.cache.state import CacheState
from longshore.cache.types import DropReason, MissReason, Outcome
from longshore.errors import CacheError, JobError


@dataclass(slots=True, eq=False)
class Load:
    """The load of a lease onto the device by one or several jobs, and their progress.

    Attributes:
        waiter: Number of the waiter of the load.
        began: Time at which the load was scheduled, in seconds.
        is_whole: Whether the load counts only if all its chunks arrive. Any other counts up to the first missing one.
        requests: The requested keys, by name of the request.
        first_group_chunks: How many of these keys are of the first group.
        sources: For each scheduled chunk, the tier that it is read from, or was read from into the host tier before.
        not_scheduled: For each chunk that was not scheduled, which are the last ones, why.
        jobs: The jobs that copy it.
        outcome: What has arrived, once the load has ended.
    """

    waiter: int = 0
    began: float = 0.0
    is_whole: bool = False
    requests: Sequence[tuple[str | None, Sequence[Key]]] = ()
    first_group_chunks: int = 0
    sources: list[str] = field(default_factory=list)
    not_scheduled: list[MissReason] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    outcome: Outcome | None = None

    @property
    def pending(self) -> list[Job]:
        """Jobs that have not ended."""
        return [job for job in self.jobs if job.pending_ranks]

    def conclude(self, unfinished: MissReason) -> list[MissReason]:
        """Set the outcome: the chunks that have arrived. Returns the misses; pending chunks count as `unfinished`."""
        lead = next((i for i, job in enumerate(self.jobs) if not job.succeeded), len(self.jobs))
        if self.is_whole and lead < len(self.jobs):
            lead = 0
        loaded_chunks = sum(len(job.statuses) for job in self.jobs[:lead])
        misses: list[MissReason] = []
        has_failed = False
        for reason in self._reasons(self.jobs[lead:], unfinished):
            if reason is None and not has_failed and not self.is_whole:
                loaded_chunks += 1
            elif reason is None or (has_failed and reason is MissReason.CANCELLED):
                misses.append(MissReason.AFTER_MISS)
            else:
                has_failed = True
                misses.append(reason)
        self.outcome = Outcome(loaded_chunks, tuple(self.sources[:loaded_chunks]))
        return misses + self.not_scheduled

    def revoke(self) -> list[MissReason]:
        """A reset has invalidated the load: set an empty outcome. Returns the misses that were not counted yet."""
        misses = [] if self.outcome is not None else [MissReason.CANCELLED] * len(self.sources) + self.not_scheduled
        self.outcome = Outcome(0, ())
        return misses

    @staticmethod
    def _reasons(jobs: Sequence[Job], unfinished: MissReason) -> Iterator[MissReason | None]:
        for job in jobs:
            for status in job.statuses:
                if job.pending_ranks:
                    yield unfinished
                else:
                    yield None if status is Status.OK else MissReason.of(status)


class TierSlots(NamedTuple):
    """The slots of `tier` that a job reads or writes, in order of its items."""

    tier: int
    slots: list[int]


@dataclass(slots=True, eq=False)
class Job:
    """One transfer in flight between two sides, of which one may be the device (`None`).

    It is `commanded` unless the inference engine moves the bytes itself. `pending_ranks` are the ranks that have not
    reported, `waiters` those of requests for its destination, by number; `request_number` that of the request that
    ordered it. Of a read by the engine itself, `sources` are the tiers that its chunks are hits of, `is_first_group` or
    not.
    """

    transfer: Transfer
    source: TierSlots | None = None
    destination: TierSlots | None = None
    load: Load | None = None
    commanded: bool = True
    request_number: int = 0
    sources: Sequence[str] = ()
    is_first_group: bool = False
    pending_ranks: set[int] = field(init=False)
    statuses: list[Status] = field(init=False)
    waiters: dict[int, Waiter] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.pending_ranks = set(range(self.transfer.ranks))
        self.statuses = [Status.OK] * len(self.transfer.items)

    @property
    def succeeded(self) -> bool:
        """Whether the job has ended, and every item has succeeded."""
        return not self.pending_ranks and self.statuses.count(Status.OK) == len(self.statuses)

    def check(self, result: TransferResult) -> None:
        """Raise `JobError` unless `result` is of a rank that has not reported, with a status for each item."""
        if result.rank not in self.pending_ranks:
            raise JobError(
                f"job {result.job}: expected results of ranks {sorted(self.pending_ranks)}, got {result.rank}"
            )
        if len(result.statuses) != len(self.statuses):
            raise JobError(f"job {result.job}: expected {len(self.statuses)} statuses, got {len(result.statuses)}")

    def report(self, result: TransferResult) -> bool:
        """Merge a checked result; returns whether it was the last. Invalid bytes supersede other failures."""
        self.pending_ranks.discard(result.rank)
        if result.statuses.count(Status.OK) == len(self.statuses):
            return not self.pending_ranks
        for i, status in enumerate(result.statuses):
            if status is Status.OK:
                continue
            known = self.statuses[i]
            if known is Status.OK or (status.invalidates_source and not known.invalidates_source):
                self.statuses[i] = status
        return not self.pending_ranks

    def fail_invalid_sources(self, faults: Mapping[int, Status], writers: Mapping[int, int]) -> None:
        """Items read from slots whose bytes were found invalid meanwhile have failed, whatever the mover reported.

        So have items read from slots whose writer has not reported yet.
        """
        if self.source is not None and (faults or writers):
            for i, slot in enumerate(self.source.slots):
                if self.statuses[i] is Status.OK and (slot in faults or slot in writers):
                    self.statuses[i] = faults.get(slot, Status.CANCELLED)


@dataclass(slots=True, eq=False)
class Waiter:
    """What waits, for one request, for reads, until `deadline`.

    `jobs` are the reads that have not ended, `load` is the load that needs them, if any. The engine does not run the
    request meanwhile if it is `blocks_request`. It `lacks_room` if not all reads could be ordered, and may be later.
    """

    number: int
    deadline: float
    load: Load | None = None
    blocks_request: bool = field(kw_only=True)
    lacks_room: bool = False
    jobs: set[int] = field(init=False, default_factory=set)

    @property
    def is_over(self) -> bool:
        """Whether no job and no load is waited for any more."""
        return not self.jobs and (self.load is None or self.load.outcome is not None)


_NOT_REPEATED = frozenset(
    status for status in Status if status in (Status.OK, Status.CANCELLED) or status.invalidates_source
)
"""How a read ends that is not ordered again: the chunk has arrived or is removed, or no request wants it any more."""


class Waiters:
    """The waiters that are not done, ordered by deadline."""

    def __init__(self) -> None:
        self.open: dict[int, Waiter] = {}
        """By number."""
        self._due: list[tuple[float, int]] = []

    def begin(self, waiter: Waiter) -> None:
        """Add `waiter`, unless it is done."""
        if waiter.is_over:
            return
        if len(self._due) > 2 * len(self.open) + 64:
            self._due = sorted((each.deadline, each.number) for each in self.open.values())
        self.open[waiter.number] = waiter
        heapq.heappush(self._due, (waiter.deadline, waiter.number))

    def join(self, waiter: Waiter, jobs: Iterable[Job]) -> None:
        """`waiter` waits for these reads, too."""
        for job in jobs:
            job.waiters[waiter.number] = waiter
            waiter.jobs.add(job.transfer.job)

    def job_ended(self, job: Job) -> None:
        """A read has ended: remove it from all waiters.

        If it failed and its source is still valid, a read ordered again might fail at once, again and again: of its
        waiters, none orders more reads.
        """
        would_repeat = job.statuses.count(Status.OK) < len(job.statuses) and not _NOT_REPEATED.issuperset(job.statuses)
        for waiter in job.waiters.values():
            waiter.jobs.discard(job.transfer.job)
            waiter.lacks_room &= not would_repeat
            self.close(waiter.number)

    def close(self, number: int) -> None:
        """Remove a waiter, if it is done."""
        waiter = self.open.get(number)
        if waiter is not None and waiter.is_over:
            del self.open[number]

    def due(self, now: float) -> list[Waiter]:
        """The waiters whose deadline has passed, in order; each is returned once."""
        found: list[Waiter] = []
        while self._due and self._due[0][0] <= now:
            waiter = self.open.get(heapq.heappop(self._due)[1])
            if waiter is not None:
                found.append(waiter)
        return found

    def clear(self) -> None:
        """Remove all waiters."""
        for waiter in self.open.values():
            waiter.jobs.clear()
        self.open.clear()
        self._due.clear()


class Transfers:
    """Jobs in flight over one `CacheState`, and the queue of commands."""

    def __init__(self, state: CacheState, settings: CacheSettings, generation: int) -> None:
        self.state = state
        self.evictor = Evictor(state)
        self.settings = settings
        self.generation = generation
        self.jobs: dict[int, Job] = {}
        self.commands: list[Command] = []
        self.waiters = Waiters()
        self.now = 0.0
        self._last_id = 0
        self.writing: dict[int | str, int] = dict.fromkeys(range(len(state.tiers)), 0)
        """Chunks being written to each tier from a warmer one; remote tiers by name."""
        self.arrived_from_device: list[Key] | None = None
        """Chunks that have arrived from the device, to be stored in remote tiers; `None` if there are none."""
        self.rejecting_tiers: set[int] = set()
        """Tiers that have reported `TIER_OFF` for a write: they get no writes any more."""

    def new_id(self) -> int:
        """A new number of a job or lease."""
        self._last_id += 1
        return self._last_id

    def join(self, waiter: Waiter, slots: Sequence[int]) -> tuple[int, ...]:
        """Have `waiter` wait for the jobs that fill these slots of the host tier; returns the jobs."""
        writer = self.state.pools[0].writer
        jobs = tuple(dict.fromkeys(writer[slot] for slot in slots if slot in writer)) if writer else ()
        self.waiters.join(waiter, [self.jobs[job] for job in jobs])
        return jobs

    def cancel_wait(self, waiter: Waiter) -> None:
        """End a wait. Reads that no other request waits for are cancelled; they own their slots until they end."""
        for job in sorted(waiter.jobs):
            waiters = self.jobs[job].waiters
            del waiters[waiter.number]
            if not waiters:
                self.commands.append(Cancel(job))
        waiter.jobs.clear()
        self.waiters.close(waiter.number)

    def count_drop(self, tier: int, count: int, reason: DropReason) -> None:
        """Count chunks that `tier` did not store."""
        self.state.counters.drops[self.state.tier_names[tier]][reason] += count

    def reset(self, first: int, *, weights: bool) -> None:
        """Remove all chunks that are not ready in tier `first` or a colder one. Jobs in flight have no effect any more.

        If there is no such tier, a new generation begins.
        """
        self.waiters.clear()
        self.commands += [Cancel(job) for job in self.jobs]
        if first < len(self.state.tiers):
            self.state.reset_warmer(first)
            return
        self.generation += 1
        self.state.clear(WEIGHTS if weights else "")
        self.evictor.clear()
        self.commands.append(Reset(self.generation, weights))

    def apply(self, results: Sequence[TransferResult]) -> list[Load]:
        """Apply results; returns the loads of which a part has ended. Raises `JobError` with nothing changed."""
        seen: set[tuple[int, int]] = set()
        for result in results:
            job = self.jobs.get(result.job)
            if job is None or (result.job, result.rank) in seen:
                raise JobError(f"job {result.job} is not in flight, or rank {result.rank} has reported it twice")
            job.check(result)
            seen.add((result.job, result.rank))
        loads: list[Load] = []
        for result in sorted(results, key=lambda each: bool(self.jobs[each.job].transfer.after)):  # writers first
            job = self.jobs[result.job]
            self._count(job, result)
            if job.report(result):
                self._finish(self.jobs.pop(result.job))
                self.waiters.job_ended(job)
                if job.load is not None and job.load not in loads:
                    loads.append(job.load)
                job.load = None  # avoids a reference cycle
        return loads

    def copy_inside(self, sources: Sequence[Slot], blocks: Sequence[int], tokens: int | None, group: int) -> int:
        """Schedule copies between device blocks in no tier, after loads that wait for reads. Returns the job."""
        job, read = self.new_id(), {source.index for source in sources}
        loads = (each.transfer for each in self.jobs.values() if each.transfer.route.destination == DEVICE)
        late = [load for load in loads if load.after and any(read.intersection(each.blocks) for each in load.sections)]
        transfer = Transfer(
            job=job,
            route=Route(DEVICE, DEVICE),
            items=tuple(Item(b"", None, source, None) for source in sources),
            sections=(Section(group, 0, tuple(blocks)),),
            by_layer=True,
            tokens=tokens,
            deadline=self.now + self.settings.load_timeout,
            after=tuple(load.job for load in late),
            generation=self.generation,
            ranks=self.settings.ranks,
        )
        self.jobs[job] = Job(transfer)
        self.commands.append(transfer)
        return job

    def withdraw(self, job: int) -> None:
        """End a job that the engine carries out itself as cancelled. Raises `JobError` for any other job."""
        record = self.jobs.get(job)
        if record is None or record.commanded:
            raise JobError(f"job {job} cannot be released: it is not in flight, or its bytes are moved by a mover")
        statuses = (Status.CANCELLED,) * len(record.statuses)
        self.apply([TransferResult(job, statuses, rank=rank) for rank in sorted(record.pending_ranks)])

    def check_integrity(self) -> None:
        """Raise `CacheError` unless the readers and the writer of every slot are those of the jobs in flight."""
        pools = self.state.pools
        readers = [np.zeros(pool.capacity, np.int32) for pool in pools]
        writers: list[dict[int, int]] = [{} for _ in pools]
        for number, job in self.jobs.items():
            if job.source is not None:
                np.add.at(readers[job.source.tier], as_i32(job.source.slots), 1)
            if job.destination is not None:
                writers[job.destination.tier].update(dict.fromkeys(job.destination.slots, number))
        for tier, pool in enumerate(pools):
            for slot in np.flatnonzero(i32_view(pool.readers) != readers[tier]).tolist():
                count = readers[tier][slot]
                raise CacheError(f"slot {slot} of {self._name(tier)} has {pool.readers[slot]} readers, not {count}")
            if pool.writer != writers[tier]:
                raise CacheError(f"slots of {self._name(tier)} have writers {pool.writer}, not {writers[tier]}")

    def schedule(
        self,
        job: int,
        keys: Sequence[Key],
        parents: Sequence[Key | None],
        source: TierSlots | None,
        destination: TierSlots | None,
        *,
        sections: tuple[Section, ...] = (),
        after: tuple[int, ...] = (),
        load: Load | None = None,
        deadline: float = math.inf,
        by_layer: bool = False,
        tokens: int | None = None,
        prefetch: bool = False,
        command: bool = True,
        remote: str = "",
    ) -> Job:
        """Register a job for chunks whose source slots have a reader, and whose destinations are allocated.

        A side that is `None` is the device, or the `remote` tier. Without `command`, the inference engine moves the
        bytes. Writes have the deadline `settings.write_timeout`.
        """
        ours = [None if side is None else side.tier for side in (source, destination)]
        route = Route(*(self._name(tier, remote) for tier in ours))
        goes_down = destination is not None and (source is None or source.tier < destination.tier)
        writing = destination is None if remote else goes_down
        if writing:
            deadline = self.now + self.settings.write_timeout
        transfer = Transfer(
            job=job,
            route=route,
            items=self._items(keys, parents, source, destination),
            sections=sections,
            by_layer=by_layer,
            tokens=tokens,
            urgency=Urgency.WRITE if writing else Urgency.PREFETCH if prefetch else Urgency.DEMAND,
            deadline=deadline,
            after=after,
            generation=self.generation,
            ranks=self.settings.ranks,
        )
        if writing:
            self.writing[remote if destination is None else destination.tier] += len(keys)
        record = self.jobs[job] = Job(
            transfer, source, destination, load, commanded=command, request_number=self.state.current_request
        )
        if destination is not None and self.state.log.on:
            self.state.log.record(EventKind.ORDERED, keys, tier=self._name(destination.tier))
        if command:
            self.commands.append(transfer)
        return record

    def schedule_copies(
        self, nodes: Sequence[int], tier: int, to: int, *, prefetch: bool = False, has_readers: bool = False
    ) -> Job:
        """Schedule one job that copies `nodes`, parents first, from `tier` to the tier `to`, which has room.

        `has_readers`: the sources have a reader already.
        """
        index, job = self.state.index, self.new_id()
        sources = [index.slot[tier][node] for node in nodes]
        for slot in () if has_readers else sources:
            self.state.pools[tier].readers[slot] += 1
        sides = TierSlots(tier, sources), TierSlots(to, self.state.allocate_copies(nodes, to, job))
        return self.schedule(job, index.key[nodes].tolist(), index.parent_keys(nodes), *sides, prefetch=prefetch)

    def _items(
        self,
        keys: Sequence[Key],
        parents: Sequence[Key | None],
        source: TierSlots | None,
        destination: TierSlots | None,
    ) -> Sequence[Item]:
        """The items, in columns if all slots of a side are of one size class."""
        if not self.state.several_sizes or all(
            side is None or len(self._size_classes(side)) < 2 for side in (source, destination)
        ):
            return Items(tuple(keys), tuple(parents), self._slots(source), self._slots(destination))
        begins, ends = (repeat(None) if side is None else self._addresses(*side) for side in (source, destination))
        rows = zip(keys, parents, begins, ends, strict=False)
        return tuple(map(Item._make, rows))

    def _size_classes(self, side: TierSlots) -> set[int]:
        return set(map(self.state.pools[side.tier].size_class_of, side.slots))

    def _addresses(self, tier: int, slots: Sequence[int]) -> Iterator[Slot]:
        name, size_class_of = self._name(tier), self.state.pools[tier].size_class_of
        return (Slot(name, size_class_of(slot), slot) for slot in slots)

    def _name(self, tier: int | None, elsewhere: str = "") -> str:
        return elsewhere or DEVICE if tier is None else self.state.tier_names[tier]

    def _slots(self, side: TierSlots | None) -> Slots | None:
        if side is None:
            return None
        tier, slots = side
        return Slots(self._name(tier), self.state.pools[tier].size_class_of(slots[0]) if slots else 0, tuple(slots))

    def _finish(self, job: Job) -> None:
        """All ranks have reported: apply failures, then sources, then arrivals, so that each arrival is loadable."""
        state, statuses = self.state, job.statuses
        state.changes += 1
        writing = job.transfer.urgency is Urgency.WRITE
        if job.source is not None:
            pool = state.pools[job.source.tier]
            job.fail_invalid_sources(pool.invalid, pool.writer)
        good = statuses.count(Status.OK) == len(statuses)
        if writing:
            destination = job.transfer.route.destination if job.destination is None else job.destination.tier
            self.writing[destination] -= len(statuses)
        if job.destination is not None and not good:
            tier, slots = job.destination
            for slot, status in zip(slots, statuses, strict=True):
                if status is not Status.OK:
                    self._fail(tier, slot, status, writing=writing)
        if job.sources:
            state.counters.count_reads(job.sources, statuses, self.settings.first_tokens if job.is_first_group else 0)
        if job.source is not None:
            self._end_reads(job.source, statuses, blame=not good and not writing)
        if job.destination is not None:
            tier, slots = job.destination
            if not good:
                slots = [slot for slot, status in zip(slots, statuses, strict=True) if status is Status.OK]
            ours = job.transfer.generation == self.generation
            if self.arrived_from_device is not None and ours and job.transfer.route.source == DEVICE:
                items = zip(job.transfer.items, statuses, strict=True)
                self.arrived_from_device += [item.key for item, status in items if status is Status.OK]
            state.set_request(job.request_number)
            attached = state.end_writes(tier, slots)
            if self.arrived_from_device is not None:
                self.arrived_from_device += state.index.key[attached].tolist()

    def _end_reads(self, source: TierSlots, statuses: Sequence[Status], *, blame: bool) -> None:
        """A job has read its sources; with `blame`, some of them may have invalid bytes."""
        tier, slots = source
        if not blame:
            self.state.end_reads(tier, slots)
            return
        invalid = [each for each in zip(slots, statuses, strict=True) if each[1].invalidates_source]
        bad = {slot for slot, _ in invalid}
        self.state.end_reads(tier, [slot for slot in slots if slot not in bad])
        for slot, status in invalid:
            self.state.discard_invalid(tier, slot, status)

    def _fail(self, tier: int, slot: int, status: Status, *, writing: bool) -> None:
        state = self.state
        if writing:
            if status is Status.TIER_OFF:
                self.rejecting_tiers.add(tier)
            self.count_drop(tier, 1, DropReason.of(status))
            node = state.pools[tier].node[slot]
            if tier and node:  # a warmer tier has it as well
                state.backup_failed(node)
        state.fail(tier, slot, status)

    def _count(self, job: Job, result: TransferResult) -> None:
        hidden = self.state.log.hidden
        if hidden is not None and all(item.key == hidden for item in job.transfer.items):
            return
        self.state.counters.count_transfer(str(job.transfer.route), result)
