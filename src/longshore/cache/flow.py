"""What moves: turns decisions into transfers, and results into changes of the books.

load      file ──A──► host ──B──► device      B waits for A; a slot that is being filled already is joined
offload   device ──► host
backup    host ──► file                       heads first, within the limits of `writing`
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import repeat
from typing import NamedTuple

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
from longshore.cache.index import ROOT
from longshore.cache.jobs import Job, Load, Side
from longshore.cache.settings import CacheSettings
from longshore.cache.states import READY
from longshore.cache.store import Store
from longshore.cache.types import DropReason, MissReason, Offload
from longshore.errors import CacheError, JobError

LOAD_BATCH = 16
"""Chunks that one onboarding job waits for together: what has arrived by a deadline can be used."""


_new_item: Callable[[Iterable[object]], Item] = partial(tuple.__new__, Item)
# A named tuple from C: there may be thousands in one call, and its own constructor runs in Python.


class Batch(NamedTuple):
    """Consecutive chunks to load together; `above` is the key before them, `tiers` and `slots` say what is pinned.

    All of them are ready in the host tier when they are `warm`.
    """

    nodes: Sequence[int]
    keys: Sequence[Key]
    above: Key | None
    tiers: Sequence[int]
    slots: Sequence[int]
    warm: bool


def _batches(warm: int, count: int) -> Iterator[tuple[int, int]]:
    """The leading warm run, which waits for nothing; then `LOAD_BATCH` chunks at a time."""
    if warm:
        yield 0, warm
    for start in range(warm, count, LOAD_BATCH):
        yield start, min(start + LOAD_BATCH, count)


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
        self, keys: Sequence[Key], blocks: Sequence[int], first_block: int, *, tail: int = ROOT, held: int = 0
    ) -> Load:
        """Order `keys` (as far as they are ready, and the host tier has room) into device `blocks`.

        `first_block` is the logical index of `blocks[0]`, a block of the first chunk. `keys` are the first of `held`
        chunks that end at `tail`, if that is known and reachable.
        """
        store, load = self.store, Load()
        path = store.index.path(tail, held)[held - len(keys) :][::-1] if tail else store.index.readable(keys)
        tiers, slots = self._pin(path)
        cold = [i for i, tier in enumerate(tiers) if tier]
        room = store.make_room(0, len(cold), spare_dirty=True)
        if room < len(cold):
            room = store.make_room(0, len(cold), spare_dirty=False)
        if room < len(cold):
            cut = cold[room]
            load.cut = [MissReason.NO_ROOM if tier else MissReason.BEHIND for tier in tiers[cut:]]
            for tier, slot in zip(tiers[cut:], slots[cut:], strict=True):
                store.unread(tier, [slot])
            path, tiers, slots = path[:cut], tiers[:cut], slots[:cut]
        load.cut += [store.miss(key) for key in keys[len(path) + len(load.cut) :]]
        above = store.index.key[store.index.parent[path[0]]] if path else None
        warm = self._warm(tiers, slots)
        for start, end in _batches(warm, len(path)):
            here = slice(start, end)
            batch = Batch(path[here], keys[here], above, tiers[here], slots[here], warm=end <= warm)
            above = keys[end - 1]
            blocks, first_block = self._order_batch(load, batch, blocks, first_block)
        return load

    def abandon(self, load: Load) -> None:
        """Nobody waits for `load` any more. What is on its way into the host tier goes on, for the next one."""
        self.outbox += [Cancel(job.transfer.job) for job in load.pending]

    def _pin(self, path: Sequence[int]) -> tuple[list[int], list[int]]:
        """Pin the copy that each reachable node is read from, or will be: says tiers and slots."""
        index, pools = self.store.index, self.store.pools
        slots, tiers = [index.slot[0][node] for node in path], [0] * len(path)
        readers = pools[0].readers
        for i, slot in enumerate(slots):
            if slot >= 0:
                readers[slot] += 1
            else:
                tier = tiers[i] = index.warmest_ready(path[i])
                slots[i] = index.slot[tier][path[i]]
                pools[tier].readers[slots[i]] += 1
        return tiers, slots

    def _warm(self, tiers: Sequence[int], slots: Sequence[int]) -> int:
        """How many chunks lead that are ready in the host tier."""
        state, count = self.store.pools[0].state, 0
        for tier, slot in zip(tiers, slots, strict=True):
            if tier or state[slot] != READY:
                break
            count += 1
        return count

    def _order_batch(
        self, load: Load, batch: Batch, blocks: Sequence[int], first_block: int
    ) -> tuple[Sequence[int], int]:
        """Order one batch; returns the blocks that are left for the next, and the logical index of their first."""
        host, names = self.store.pools[0], [level.name for level in self.store.levels]
        warm = list(batch.slots)
        if batch.warm:
            load.sources += [names[0]] * len(warm)
        else:
            load.sources += [names[self.store.index.warmest_ready(node)] for node in batch.nodes]
            for tier in sorted({tier for tier in batch.tiers if tier}):
                self._order_read(batch, tier, warm)
        per_chunk = self.settings.blocks_per_chunk
        taken = min(len(blocks), len(batch.nodes) * per_chunk - first_block % per_chunk)
        writer = host.writer
        load.parts.append(
            self._order(
                self.new_id(),
                batch.keys,
                [batch.above, *batch.keys[:-1]],
                Side(0, warm),
                None,
                sections=(Section(0, first_block, tuple(blocks[:taken])),),
                after=tuple(dict.fromkeys(writer[slot] for slot in warm if slot in writer)) if writer else (),
                load=load,
            )
        )
        return blocks[taken:], first_block + taken

    def _order_read(self, batch: Batch, tier: int, warm: list[int]) -> None:
        """Order what a batch has in a colder `tier` into the host tier; enters its slots there into `warm`."""
        job = self.new_id()
        chosen = [i for i, each in enumerate(batch.tiers) if each == tier]
        for i in chosen:
            warm[i] = self.store.place_copy(batch.nodes[i], 0, job)
            self.store.pools[0].readers[warm[i]] += 1
        self._order(
            job,
            [batch.keys[i] for i in chosen],
            [batch.keys[i - 1] if i else batch.above for i in chosen],
            Side(tier, [batch.slots[i] for i in chosen]),
            Side(0, [warm[i] for i in chosen]),
        )

    # ------------------------------------------------------------------ offload and backup

    def offload(self, keys: Sequence[Key], first: int, path: Sequence[int], blocks: Sequence[int] | None) -> Offload:
        """Order what the tiers lack of `keys[first:]` into the host tier; `blocks` is `None` if the host moves it.

        `path` are the nodes of what they do not lack.
        """
        store = self.store
        known = first + len(path)
        store.touch(path[::-1])
        parent = path[-1] if path else store.index.get(keys[first - 1]) if first else ROOT
        fresh = self._admit(len(keys) - known, parent, orphan=known > 0 and parent == ROOT)
        if not fresh:
            return Offload(None, kept=known)
        job = self.new_id()
        mine = keys[known : known + fresh]
        slots = store.place(mine, parent, job)
        sections: tuple[Section, ...] = ()
        if blocks is not None:
            per_chunk = self.settings.blocks_per_chunk
            taken = blocks[(known - first) * per_chunk : (known - first + fresh) * per_chunk]
            sections = (Section(0, known * per_chunk, tuple(taken)),)
        parents = [store.index.key[parent], *mine[:-1]]
        record = self._order(job, mine, parents, None, Side(0, slots), sections=sections, command=blocks is not None)
        places = tuple([item.destination for item in record.transfer.items if item.destination is not None])
        return Offload(job, known, places, known + fresh)

    def clean(self, at_least: int = 0) -> None:
        """Order backups until the target of the write policy (or `at_least` chunks) is safe to evict."""
        store = self.store
        if not store.backlog.count:
            return
        slots = store.pools[0].capacity
        target = self.settings.backup.clean_target(slots)
        wanted = max(target - (slots - store.backlog.count), at_least - self._writing[1])
        chosen = store.backlog.choose(min(wanted, self.settings.max_writes - self._writing[1]))
        # What is chosen has its ancestors in the host tier, too, where they are spared; or they are needed.
        chosen = chosen[: store.make_room(1, len(chosen), spare_dirty=False)]
        if not chosen:
            return
        job = self.new_id()
        sources = [store.index.slot[0][node] for node in chosen]
        for slot in sources:
            store.pools[0].readers[slot] += 1
        copies = [store.place_copy(node, 1, job) for node in chosen]
        index = store.index
        keys = [index.key[node] for node in chosen]
        parents = [index.key[index.parent[node]] for node in chosen]
        self._order(job, keys, parents, Side(0, sources), Side(1, copies))

    def _admit(self, wanted: int, parent: int, *, orphan: bool) -> int:
        """How many of `wanted` chunks behind `parent` the host tier takes, room made; the others count as dropped."""
        store = self.store
        if not wanted:
            return 0
        if orphan:
            self._drop(0, wanted, DropReason.ORPHAN)
            return 0
        allowed = min(wanted, max(0, self.settings.max_writes - self._writing[0]))
        pin = store.pin(parent) if parent else None
        room = self._offload_room(allowed)
        if pin is not None:
            store.unpin(pin)
        if room < wanted:
            busy = allowed < wanted or (len(store.levels) > 1 and self._writing[1] > 0)
            self._drop(0, wanted - room, DropReason.BACKPRESSURE if busy else DropReason.NO_ROOM)
        return room

    def _offload_room(self, count: int) -> int:
        """Make room for up to `count` new chunks. What is not backed up yet is spared while a backup is under way."""
        room = self.store.make_room(0, count, spare_dirty=True)
        if room < count:
            self.clean(at_least=count)
            spare = len(self.store.levels) > 1 and self._writing[1] > 0
            room = self.store.make_room(0, count, spare_dirty=spare)
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

    def _order(
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
        command: bool = True,
    ) -> Job:
        """Register a job for chunks whose source slots are pinned and whose destinations are placed.

        Without `command` the host knows of it already, and moves the bytes itself.
        """
        writing = destination is not None and (source is None or source.tier < destination.tier)
        timeout = self.settings.write_timeout if writing else self.settings.load_timeout
        transfer = Transfer(
            job=job,
            route=Route(self._name(source and source.tier), self._name(destination and destination.tier)),
            items=self._items(keys, parents, source, destination),
            sections=sections,
            urgency=Urgency.WRITE if writing else Urgency.DEMAND,
            deadline=self.now + timeout,
            after=after,
            generation=self.generation,
            ranks=self.settings.ranks,
        )
        if writing and destination is not None:
            self._writing[destination.tier] += len(keys)
        record = self.jobs[job] = Job(transfer, source, destination, load)
        if command:
            self.outbox.append(transfer)
        return record

    def _name(self, tier: int | None) -> str:
        return DEVICE if tier is None else self.store.levels[tier].name

    def _items(
        self, keys: Sequence[Key], parents: Sequence[Key | None], source: Side | None, destination: Side | None
    ) -> tuple[Item, ...]:
        valid = (1 << self.settings.blocks_per_chunk) - 1
        sides = self._slots(source), self._slots(destination)
        return tuple(map(_new_item, zip(keys, parents, *sides, repeat(valid, len(keys)), strict=False)))

    def _slots(self, side: Side | None) -> Iterable[Slot | None]:
        if side is None:
            return repeat(None)
        return self.store.addresses(side.tier, side.slots)

    def _finish(self, job: Job) -> None:
        """All ranks have reported: failures first, then sources, then arrivals, so that nothing unreachable arrives."""
        store, statuses = self.store, job.statuses
        writing = job.transfer.urgency is Urgency.WRITE
        if job.source is not None:
            job.blame_sources(store.pools[job.source.tier].fault)
        good = all(status is Status.OK for status in statuses)
        if writing and job.destination is not None:
            self._writing[job.destination.tier] -= len(statuses)
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
            store.arrive(tier, slots)

    def _let_go(self, source: Side, statuses: Sequence[Status], *, blame: bool) -> None:
        """A job has read its sources; if there is reason to `blame` them, some may be unusable."""
        tier, slots = source
        if not blame:
            self.store.unread(tier, slots)
            return
        for slot, status in zip(slots, statuses, strict=True):
            if status.condemns_source:
                self.store.condemn(tier, slot, status)
            else:
                self.store.unread(tier, [slot])

    def _fail(self, tier: int, slot: int, status: Status, *, writing: bool) -> None:
        store = self.store
        if writing:
            self._drop(tier, 1, DropReason.WRITE_FAILED)
            node = store.pools[tier].node[slot]
            if tier and node:
                store.backup_failed(node)
        store.fail(tier, slot, status)

    def _count(self, job: Job, result: TransferResult) -> None:
        totals = self.store.counters.routes[str(job.transfer.route)]
        arrived = result.statuses.count(Status.OK)
        totals.chunks += arrived
        totals.failed += len(result.statuses) - arrived
        totals.bytes += result.bytes
        totals.seconds += result.seconds
