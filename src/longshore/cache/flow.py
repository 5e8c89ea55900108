"""What moves: turns decisions into transfers, and results into changes of the books.

load      file ──A──► host ──B──► device      B waits for A; a slot that is being filled already is joined
offload   device ──► host
backup    host ──► file                       heads first, within the limits of `writing`
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from longshore.boundary import (
    DEVICE,
    Cancel,
    Command,
    Forget,
    Item,
    Key,
    Route,
    Section,
    Slot,
    Status,
    Transfer,
    TransferResult,
    Urgency,
)
from longshore.cache.index import Copy, Entry
from longshore.cache.jobs import Job, Load
from longshore.cache.store import Store
from longshore.cache.types import DropReason, MissReason, Offload, Placement, RouteTotals
from longshore.cache.writing import WritePolicy, to_clean
from longshore.errors import CacheError, JobError

LOAD_BATCH = 16
"""Chunks that one onboarding job waits for together: what has arrived by a deadline can be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSettings:
    """How a `TieredCache` behaves.

    Attributes:
        blocks_per_chunk: Device blocks per chunk.
        ranks: How many ranks hold a part of each image, and report each job.
        offload: Write policy device -> warmest tier.
        backup: Write policy warmest tier -> the one below.
        load_timeout: Seconds after which a load that has not begun is not worth beginning.
        write_timeout: The same for writes.
        max_writes: Chunks in flight per write route; more are dropped (offloads) or left for later (backups).
        device_blocks: Blocks of the device pool, to check ids against; `None` leaves that to the data plane.
    """

    blocks_per_chunk: int = 1
    ranks: int = 1
    offload: WritePolicy = WritePolicy.THROUGH
    backup: WritePolicy = WritePolicy.BACK
    load_timeout: float = 10.0
    write_timeout: float = 60.0
    max_writes: int = 1024
    device_blocks: int | None = None

    def __post_init__(self) -> None:
        if min(self.blocks_per_chunk, self.ranks, self.max_writes) < 1:
            raise CacheError(f"blocks_per_chunk, ranks and max_writes are at least 1, got {self}")


class Flow:
    """Jobs in flight over one `Store`, and the commands that wait to be taken."""

    def __init__(self, store: Store, settings: CacheSettings, generation: int) -> None:
        self.store = store
        self.settings = settings
        self.generation = generation
        self.jobs: dict[int, Job] = {}
        self.outbox: list[Command] = []
        self.now = 0.0
        self._last_id = 0
        self._writing = dict.fromkeys(range(len(store.levels)), 0)

    def new_id(self) -> int:
        """Identities of jobs and holds, never used twice."""
        self._last_id += 1
        return self._last_id

    # ------------------------------------------------------------------ load

    def load(
        self, keys: Sequence[Key], blocks: Sequence[int], first_block: int, group: int = 0, *, by_layer: bool = False
    ) -> Load:
        """Order `keys` (as far as they are ready, and the host tier has room) into device `blocks`.

        `first_block` is the logical index of `blocks[0]`, a block of the first chunk.
        """
        path = self._pin(keys)
        left: list[Entry] = []
        cold = [entry for entry in path if entry.copies[0] is None]
        room = self._demand_room(len(cold))
        if room < len(cold):
            cut = path.index(cold[room])
            self._unpin(path[cut:])
            path, left = path[:cut], path[cut:]
        load = Load()
        for batch in _batches(path):
            taken = min(len(blocks), len(batch) * self.settings.blocks_per_chunk - self._skip(first_block))
            self._order_batch(load, batch, Section(group, first_block, tuple(blocks[:taken])), by_layer=by_layer)
            blocks, first_block = blocks[taken:], first_block + taken
        load.cut = [MissReason.NO_ROOM if entry.copies[0] is None else MissReason.BEHIND for entry in left]
        load.cut += [self.store.miss(key) for key in keys[len(path) + len(left) :]]
        return load

    def abandon(self, load: Load) -> None:
        """Nobody waits for `load` any more. What is on its way into the host tier goes on, for the next one."""
        self.outbox += [Cancel(job.transfer.job) for job in load.pending]

    def _pin(self, keys: Sequence[Key]) -> list[Entry]:
        """The leading entries that can be loaded; the copy that each is read from is pinned."""
        path: list[Entry] = []
        for key in keys:
            entry = self.store.index.get(key)
            ready = entry.warmest_ready() if entry is not None else None
            if entry is None or ready is None:
                break
            (entry.copies[0] or ready).readers += 1
            path.append(entry)
        return path

    def _unpin(self, path: Sequence[Entry]) -> None:
        for entry in path:
            copy = entry.copies[0] or entry.warmest_ready()
            if copy is not None:
                copy.readers -= 1

    def _demand_room(self, count: int) -> int:
        """Make room for up to `count` chunks that a request waits for, backed-up ones first; says for how many."""
        if self.store.make_room(0, count, spare_dirty=True):
            return count
        room = self.store.room(0, count, spare_dirty=False)
        self.store.make_room(0, room, spare_dirty=False)
        return room

    def _skip(self, first_block: int) -> int:
        return first_block % self.settings.blocks_per_chunk

    def _order_batch(self, load: Load, batch: Sequence[Entry], section: Section, *, by_layer: bool) -> None:
        """Order one batch into the device blocks of `section`."""
        reading, copying = self.new_id(), self.new_id()
        cold: list[Copy] = []
        warm: list[Copy] = []
        for entry in batch:
            load.sources.append(self._source(entry))
            copy = entry.copies[0]
            if copy is None:
                cold.append(_readable(entry))
                copy = self.store.place(entry.key, entry.parent_key, 0, reading)
                copy.readers += 1
            warm.append(copy)
        if cold:
            self._order(reading, cold, [copy for copy in warm if copy.writer == reading])
        load.parts.append(
            self._order(
                copying,
                warm,
                None,
                sections=(section,),
                after=tuple(dict.fromkeys(copy.writer for copy in warm if copy.writer is not None)),
                load=load,
                by_layer=by_layer,
            )
        )

    def _source(self, entry: Entry) -> str:
        """The tier that a chunk comes from: below the host tier also when its slot there is still being filled."""
        return self.store.levels[_readable(entry).tier].name

    # ------------------------------------------------------------------ inside the device

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
        self.jobs[job] = Job(transfer, [None] * len(blocks), [None] * len(blocks))
        self.outbox.append(transfer)
        return job

    # ------------------------------------------------------------------ offload and backup

    def offload(self, keys: Sequence[Key], first: int, blocks: Sequence[int] | None, group: int = 0) -> Offload:
        """Order what the tiers lack of `keys[first:]` into the host tier; `blocks` is `None` if the host moves it."""
        store = self.store
        known = first
        while known < len(keys) and store.index.get(keys[known]) is not None:
            known += 1
        fresh = self._admit(keys, known)
        if not fresh:
            return Offload(None, (), known)
        job = self.new_id()
        copies = [store.place(keys[i], keys[i - 1] if i else None, 0, job) for i in range(known, known + fresh)]
        sections: tuple[Section, ...] = ()
        if blocks is not None:
            per_chunk = self.settings.blocks_per_chunk
            mine = blocks[(known - first) * per_chunk : (known - first + fresh) * per_chunk]
            sections = (Section(group, known * per_chunk, tuple(mine)),)
        self._order(job, None, copies, sections=sections, command=blocks is not None)
        placed = tuple(Placement(known + i, store.slot(copy)) for i, copy in enumerate(copies))
        return Offload(job, placed, known + fresh)

    def clean(self, at_least: int = 0) -> None:
        """Order backups until the target of the write policy (or `at_least` entries) is safe to evict."""
        store = self.store
        if len(store.levels) < 2 or not store.dirty:
            return
        target = self.settings.backup.clean_target(store.levels[0].pool.capacity)
        wanted = max(target - (store.levels[0].pool.capacity - len(store.dirty)), at_least - self._writing[1])
        chosen = to_clean(store, min(wanted, self.settings.max_writes - self._writing[1]))
        chosen = chosen[: self._backup_room(chosen)]
        if not chosen:
            return
        job = self.new_id()
        sources = [_readable(entry) for entry in chosen]
        for source in sources:
            source.readers += 1
        self._order(job, sources, [store.place(entry.key, entry.parent_key, 1, job) for entry in chosen])

    def _backup_room(self, chosen: Sequence[Entry]) -> int:
        """Make room in the file tier for a leading part of `chosen`.

        Their ancestors stay: each is in the host tier, too, and spared; or has a child there, and is needed.
        """
        room = self.store.room(1, len(chosen), spare_dirty=False)
        self.store.make_room(1, room, spare_dirty=False)
        return room

    def _admit(self, keys: Sequence[Key], known: int) -> int:
        """How many of `keys[known:]` the host tier takes, room made; the others are counted as dropped."""
        store, wanted = self.store, len(keys) - known
        if not wanted:
            return 0
        parent = store.index.get(keys[known - 1]) if known else None
        if known and parent is None:
            self._drop(0, wanted, DropReason.ORPHAN)
            return 0
        allowed = min(wanted, max(0, self.settings.max_writes - self._writing[0]))
        if parent is not None:
            parent.holds += 1
        room = self._offload_room(allowed)
        if parent is not None:
            parent.holds -= 1
        busy = allowed < wanted or (len(store.levels) > 1 and self._writing[1] > 0)
        self._drop(0, wanted - room, DropReason.BACKPRESSURE if busy else DropReason.NO_ROOM)
        return room

    def _offload_room(self, count: int) -> int:
        """Make room for up to `count` new chunks. What is not backed up yet is spared while a backup is under way."""
        store = self.store
        if store.make_room(0, count, spare_dirty=True):
            return count
        self.clean(at_least=count)
        spare = len(store.levels) > 1 and self._writing[1] > 0
        room = store.room(0, count, spare_dirty=spare)
        store.make_room(0, room, spare_dirty=spare)
        return room

    def _drop(self, tier: int, count: int, reason: DropReason) -> None:
        self.store.counters.drops[self.store.levels[tier].name][reason] += count

    # ------------------------------------------------------------------ jobs

    def forget(self) -> None:
        """Begin a new generation: whatever is in flight changes nothing any more."""
        self.generation += 1
        self.store.clear()
        self.outbox += [Cancel(job) for job in self.jobs]
        self.outbox.append(Forget(self.generation))

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
                if job.load is not None and job.load not in loads:
                    loads.append(job.load)
        return loads

    def check_integrity(self) -> None:
        """Raise `CacheError` unless every copy has exactly the readers and the writer that the jobs in flight say."""
        readers: dict[int, int] = {}
        writers: dict[int, int] = {}
        for job in self.jobs.values():
            for copy in job.sources:
                if copy is not None:
                    readers[id(copy)] = readers.get(id(copy), 0) + 1
            for copy in job.destinations:
                if copy is not None:
                    writers[id(copy)] = job.transfer.job
        for copy in self.store.copies():
            if copy.readers != readers.get(id(copy), 0) or copy.writer != writers.get(id(copy)):
                raise CacheError(f"slot {self.store.slot(copy)} has {copy.readers} readers and writer {copy.writer}")

    def _order(
        self,
        job: int,
        sources: Sequence[Copy] | None,
        destinations: Sequence[Copy] | None,
        *,
        sections: tuple[Section, ...] = (),
        after: tuple[int, ...] = (),
        load: Load | None = None,
        by_layer: bool = False,
        command: bool = True,
    ) -> Job:
        """Register a job whose sources are pinned and whose destinations are placed (`None`: the device).

        Without `command` the host knows of it already, and moves the bytes itself.
        """
        source = None if sources is None else sources[0].tier
        destination = None if destinations is None else destinations[0].tier
        writing = destination is not None and (source is None or source < destination)
        count = len(sources if sources is not None else destinations or ())
        froms: list[Copy | None] = [None] * count if sources is None else list(sources)
        tos: list[Copy | None] = [None] * count if destinations is None else list(destinations)
        timeout = self.settings.write_timeout if writing else self.settings.load_timeout
        transfer = Transfer(
            job=job,
            route=Route(self._name(source), self._name(destination)),
            items=tuple(map(self._item, froms, tos)),
            sections=sections,
            by_layer=by_layer,
            urgency=Urgency.WRITE if writing else Urgency.DEMAND,
            deadline=self.now + timeout,
            after=after,
            generation=self.generation,
            ranks=self.settings.ranks,
        )
        if writing and destination is not None:
            self._writing[destination] += count
        record = self.jobs[job] = Job(transfer, froms, tos, load)
        if command:
            self.outbox.append(transfer)
        return record

    def _name(self, tier: int | None) -> str:
        return DEVICE if tier is None else self.store.levels[tier].name

    def _item(self, source: Copy | None, destination: Copy | None) -> Item:
        copy = source or destination
        if copy is None:
            raise CacheError("a transfer has a slot on one side at least")
        return Item(
            copy.entry.key,
            copy.entry.parent_key,
            None if source is None else self.store.slot(source),
            None if destination is None else self.store.slot(destination),
            (1 << self.settings.blocks_per_chunk) - 1,
        )

    def _finish(self, job: Job) -> None:
        """All ranks have reported: failures first, then sources, then arrivals, so that nothing unreachable arrives."""
        store = self.store
        writing = job.transfer.urgency is Urgency.WRITE
        job.blame_sources()
        if writing and job.destinations[0] is not None:
            self._writing[job.destinations[0].tier] -= len(job.statuses)
        for copy, status in zip(job.destinations, job.statuses, strict=True):
            if copy is not None and status is not Status.OK:
                if writing:
                    self._drop(copy.tier, 1, DropReason.WRITE_FAILED)
                    if copy.tier > 0:
                        store.keep_dirty(copy.entry)
                store.fail(copy, status)
        for source, status in zip(job.sources, job.statuses, strict=True):
            if source is not None:
                store.unread(source, status if status.condemns_source and not writing else None)
        arrivals = zip(job.destinations, job.statuses, strict=True)
        for copy, status in reversed(list(arrivals)):  # tails first, so that heads are the most recently used
            if copy is not None and status is Status.OK:
                store.arrive(copy)

    def _count(self, job: Job, result: TransferResult) -> None:
        totals = self.store.counters.routes.setdefault(str(job.transfer.route), RouteTotals())
        arrived = sum(status is Status.OK for status in result.statuses)
        totals.chunks += arrived
        totals.failed += len(result.statuses) - arrived
        totals.bytes += result.bytes
        totals.seconds += result.seconds


def _batches(path: Sequence[Entry]) -> Iterator[Sequence[Entry]]:
    """The leading run that is ready in the host tier, which waits for nothing; then `LOAD_BATCH` chunks at a time."""
    warm = 0
    while warm < len(path) and path[warm].ready(0) is not None:
        warm += 1
    if warm:
        yield path[:warm]
    for start in range(warm, len(path), LOAD_BATCH):
        yield path[start : start + LOAD_BATCH]


def _readable(entry: Entry) -> Copy:
    """The ready copy of an entry that was found, and pinned or marked, as having one."""
    copy = entry.warmest_ready()
    if copy is None:
        raise CacheError(f"chunk {entry.key.hex()[:12]} was to be read, and has no ready copy")
    return copy
