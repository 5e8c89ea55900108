"""What moves: the transfers in flight, the commands that wait to be taken, and what results change in the books.

    loading, storing ──► order ──► outbox ──► take()          apply(results) ──► finish ──► books

Which chunks are loaded or stored is decided in `longshore.cache.prefetching` and `longshore.cache.storing`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from longshore.boundary import (
    DEVICE,
    Cancel,
    Command,
    Forget,
    Item,
    Items,
    Key,
    Route,
    Section,
    Slot,
    Slots,
    Status,
    Transfer,
    TransferResult,
    Urgency,
)
from longshore.cache.events import EventKind
from longshore.cache.evict import Evictor
from longshore.cache.jobs import Job, Load, Side, Wait, Waits
from longshore.cache.settings import CacheSettings
from longshore.cache.store import Store
from longshore.cache.types import DropReason, RouteTotals
from longshore.errors import CacheError, JobError


class Flow:
    """Jobs in flight over one `Store`, and the commands that wait to be taken."""

    def __init__(self, store: Store, settings: CacheSettings, generation: int) -> None:
        self.store = store
        self.evictor = Evictor(store)
        self.settings = settings
        self.generation = generation
        self.jobs: dict[int, Job] = {}
        self.outbox: list[Command] = []
        self.waits = Waits()
        self.now = 0.0
        self._last_id = 0
        self._valid = (1 << settings.blocks_per_chunk) - 1
        self.writing: dict[int | str, int] = dict.fromkeys(range(len(store.levels)), 0)
        """Chunks on their way to each tier from a warmer one; foreign tiers stand here by name."""
        self.offloaded: list[Key] | None = None
        """Chunks that have come from the device, for whoever takes them from here; `None` if nobody does."""
        self.refusing: set[int] = set()
        """Tiers that have said that they take no writes any more."""

    def new_id(self) -> int:
        """Identities of jobs and holds, never used twice."""
        self._last_id += 1
        return self._last_id

    def abandon(self, load: Load) -> None:
        """Nobody waits for `load` any more. What is on its way into the host tier goes on, for the next one."""
        self.outbox += [Cancel(job.transfer.job) for job in load.pending]

    def join(self, wait: Wait, slots: Sequence[int]) -> tuple[int, ...]:
        """`wait` is also for what is on its way into these slots of the warmest tier; the jobs."""
        writer = self.store.pools[0].writer
        jobs = tuple(dict.fromkeys(writer[slot] for slot in slots if slot in writer)) if writer else ()
        self.waits.join(wait, [self.jobs[job] for job in jobs])
        return jobs

    def leave(self, wait: Wait) -> None:
        """A request waits no longer: reads that nobody else waits for are cancelled, and own their slots until then."""
        for job in sorted(wait.jobs):
            waits = self.jobs[job].waits
            del waits[wait.number]
            if not waits:
                self.outbox.append(Cancel(job))
        wait.jobs.clear()
        self.waits.close(wait.number)

    def drop(self, tier: int, count: int, reason: DropReason) -> None:
        """Count chunks that `tier` did not take."""
        self.store.counters.drops[self.store.levels[tier].name][reason] += count

    def forget(self, first: int, *, weights: bool) -> None:
        """Keep what is ready in tier `first` and colder ones; whatever is in flight changes nothing any more.

        Without a tier to keep a new generation begins.
        """
        self.waits.clear()
        self.outbox += [Cancel(job) for job in self.jobs]
        if first < len(self.store.levels):
            self.store.keep_from(first)
            return
        self.generation += 1
        self.store.clear()
        self.evictor.clear()
        self.outbox.append(Forget(self.generation, weights))

    def apply(self, results: Sequence[TransferResult]) -> list[Load]:
        """Take in results; returns the loads of which a part has ended. Raises `JobError` before any change."""
        seen: set[tuple[int, int]] = set()
        for result in results:
            job = self.jobs.get(result.job)
            if job is None or (result.job, result.rank) in seen:
                raise JobError(f"job {result.job} is not in flight, or was reported twice by rank {result.rank}")
            job.check(result)
            seen.add((result.job, result.rank))
        loads: list[Load] = []
        for result in results:
            job = self.jobs[result.job]
            self._count(job, result)
            if job.report(result):
                self._finish(self.jobs.pop(result.job))
                self.waits.ended(job)
                if job.load is not None and job.load not in loads:
                    loads.append(job.load)
                job.load = None  # which has this job among its parts: nothing shall be left to a garbage collector
        return loads

    def copy_inside(self, sources: Sequence[Slot], blocks: Sequence[int], tokens: int | None, group: int) -> int:
        """Order copies between device blocks, of which the books know nothing; returns the job."""
        job = self.new_id()
        transfer = Transfer(
            job=job,
            route=Route(DEVICE, DEVICE),
            items=tuple(Item(b"", None, source, None, 1) for source in sources),
            sections=(Section(group, 0, tuple(blocks)),),
            by_layer=True,
            tokens=tokens,
            deadline=self.now + self.settings.load_timeout,
            generation=self.generation,
            ranks=self.settings.ranks,
        )
        self.jobs[job] = Job(transfer, None, None)
        self.outbox.append(transfer)
        return job

    def leave_device(self) -> bool:
        """Cancel what moves bytes into or out of the device; says whether nothing does any more."""
        touching = [job for job, record in self.jobs.items() if DEVICE in record.transfer.route]
        self.outbox += [Cancel(job) for job in touching]
        return not touching

    def withdraw(self, job: int) -> None:
        """The host gives an offer back: it ends as cancelled. Raises `JobError` for any other job."""
        record = self.jobs.get(job)
        if record is None or record.commanded:
            raise JobError(f"job {job} is no offer that is still open")
        statuses = (Status.CANCELLED,) * len(record.statuses)
        self.apply([TransferResult(job, statuses, rank=rank) for rank in sorted(record.waiting)])

    def check_integrity(self) -> None:
        """Raise `CacheError` unless every slot has exactly the readers and the writer that the jobs in flight say."""
        readers: Counter[tuple[int, int]] = Counter()
        writers: dict[tuple[int, int], int] = {}
        for number, job in self.jobs.items():
            if job.source is not None:
                readers.update((job.source.tier, slot) for slot in job.source.slots)
            if job.destination is not None:
                writers.update(((job.destination.tier, slot), number) for slot in job.destination.slots)
        for tier, pool in enumerate(self.store.pools):
            for slot in range(pool.capacity):
                at = tier, slot
                if pool.readers[slot] != readers[at] or pool.writer.get(slot) != writers.get(at):
                    raise CacheError(
                        f"slot {slot} of {self._name(tier)} has {pool.readers[slot]} readers and writer "
                        f"{pool.writer.get(slot)}, the jobs say {readers[at]} and {writers.get(at)}"
                    )

    def order(
        self,
        job: int,
        keys: Sequence[Key],
        parents: Sequence[Key | None],
        source: Side | None,
        destination: Side | None,
        *,
        sections: tuple[Section, ...] = (),
        after: tuple[int, ...] = (),
        load: Load | None = None,
        deadline: float = math.inf,
        by_layer: bool = False,
        tokens: int | None = None,
        prefetch: bool = False,
        command: bool = True,
        foreign: str = "",
    ) -> Job:
        """Register a job for chunks whose source slots are pinned and whose destinations are placed.

        A side that is `None` is the device, or the `foreign` tier. Without `command` the host knows of it already, and
        moves the bytes itself. Writes have a deadline of their own.
        """
        ours = [None if side is None else side.tier for side in (source, destination)]
        route = Route(*(self._name(tier, foreign) for tier in ours))
        writing = (
            destination is None
            if foreign
            else destination is not None and (source is None or source.tier < destination.tier)
        )
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
            self.writing[foreign if destination is None else destination.tier] += len(keys)
        record = self.jobs[job] = Job(transfer, source, destination, load, commanded=command, turn=self.store.served)
        if destination is not None and self.store.log.on:
            self.store.log.record(EventKind.ORDERED, keys, tier=self._name(destination.tier))
        if command:
            self.outbox.append(transfer)
        return record

    def _items(
        self, keys: Sequence[Key], parents: Sequence[Key | None], source: Side | None, destination: Side | None
    ) -> Sequence[Item]:
        """In columns, unless slots of several sizes are among them."""
        sides = [side for side in (source, destination) if side is not None]
        store = self.store
        if all(store.is_of_one_pool(*side) for side in sides):
            return Items(tuple(keys), tuple(parents), self._slots(source), self._slots(destination), self._valid)
        begins, ends = (
            [None] * len(keys) if side is None else self.store.addresses(*side) for side in (source, destination)
        )
        rows = zip(keys, parents, begins, ends, strict=True)
        return tuple(Item(key, above, begin, end, self._valid) for key, above, begin, end in rows)

    def _name(self, tier: int | None, elsewhere: str = "") -> str:
        return elsewhere or DEVICE if tier is None else self.store.levels[tier].name

    def _slots(self, side: Side | None) -> Slots | None:
        if side is None:
            return None
        tier, slots = side
        return Slots(self._name(tier), self.store.pools[tier].pool_of(slots[0]) if slots else 0, tuple(slots))

    def _finish(self, job: Job) -> None:
        """All ranks have reported: failures first, then sources, then arrivals, so that nothing unreachable arrives."""
        store, statuses = self.store, job.statuses
        store.changes += 1
        writing = job.transfer.urgency is Urgency.WRITE
        if job.source is not None:
            job.blame_sources(store.pools[job.source.tier].fault)
        good = statuses.count(Status.OK) == len(statuses)
        if writing:
            at = job.transfer.route.destination if job.destination is None else job.destination.tier
            self.writing[at] -= len(statuses)
        if job.destination is not None and not good:
            tier, slots = job.destination
            for slot, status in zip(slots, statuses, strict=True):
                if status is not Status.OK:
                    self._fail(tier, slot, status, writing=writing)
        if job.source is not None:
            self._let_go(job.source, statuses, blame=not good and not writing)
        if job.destination is not None:
            tier, slots = job.destination
            if not good:
                slots = [slot for slot, status in zip(slots, statuses, strict=True) if status is Status.OK]
            ours = job.transfer.generation == self.generation
            if self.offloaded is not None and ours and job.transfer.route.source == DEVICE:
                items = zip(job.transfer.items, statuses, strict=True)
                self.offloaded += [item.key for item, status in items if status is Status.OK]
            store.serve(job.turn)
            landed = store.arrive(tier, slots)
            if self.offloaded is not None:
                self.offloaded += store.index.key[landed].tolist()

    def _let_go(self, source: Side, statuses: Sequence[Status], *, blame: bool) -> None:
        """A job has read its sources; if there is reason to `blame` them, some may be unusable."""
        tier, slots = source
        if not blame:
            self.store.unread(tier, slots)
            return
        condemned = [each for each in zip(slots, statuses, strict=True) if each[1].invalidates_source]
        bad = {slot for slot, _ in condemned}
        self.store.unread(tier, [slot for slot in slots if slot not in bad])
        for slot, status in condemned:
            self.store.condemn(tier, slot, status)

    def _fail(self, tier: int, slot: int, status: Status, *, writing: bool) -> None:
        store = self.store
        if writing:
            if status is Status.TIER_OFF:
                self.refusing.add(tier)
            self.drop(tier, 1, DropReason.WRITE_FAILED)
            node = store.pools[tier].node[slot]
            if tier and node:  # which is in a warmer tier as well
                store.backup_failed(node)
        store.fail(tier, slot, status)

    def _count(self, job: Job, result: TransferResult) -> None:
        hidden = self.store.log.hidden
        if hidden is not None and all(item.key == hidden for item in job.transfer.items):
            return
        routes, route = self.store.counters.routes, str(job.transfer.route)
        totals = routes.get(route) or routes.setdefault(route, RouteTotals())
        arrived = result.statuses.count(Status.OK)
        totals.chunks += arrived
        totals.failed += len(result.statuses) - arrived
        totals.bytes += result.bytes
        totals.seconds += result.seconds
