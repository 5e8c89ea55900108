"""What moves: turns decisions into transfers, and results into changes of the books.

load      file ──A──► host ──B──► device      B waits for A; a slot that is being filled already is joined
offload   device ──► host
backup    host ──► file                       heads first, within the limits of `writing`
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, repeat

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
from longshore.cache.types import DropReason, MissReason, Offload, Placement
from longshore.errors import CacheError, JobError

LOAD_BATCH = 16
"""Chunks that one onboarding job waits for together: what has arrived by a deadline can be used."""


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

    def load(self, keys: Sequence[Key], blocks: Sequence[int], first_block: int) -> Load:
        """Order `keys` (as far as they are ready, and the host tier has room) into device `blocks`.

        `first_block` is the logical index of `blocks[0]`, a block of the first chunk.
        """
        store, load = self.store, Load()
        path = self._readable(keys)
        pinned = [self._pin(node) for node in path]
        cold = [i for i, (tier, _) in enumerate(pinned) if tier]
        room = store.make_room(0, len(cold), spare_dirty=True)
        if room < len(cold):
            room = store.make_room(0, len(cold), spare_dirty=False)
        if room < len(cold):
            cut = cold[room]
            load.cut = [MissReason.NO_ROOM if tier else MissReason.BEHIND for tier, _ in pinned[cut:]]
            for tier, slot in pinned[cut:]:
                store.unread(tier, slot)
            path, pinned = path[:cut], pinned[:cut]
        load.cut += [store.miss(key) for key in keys[len(path) + len(load.cut) :]]
        for start, end in self._batches(pinned):
            batch = path[start:end]
            blocks, first_block = self._order_batch(load, batch, pinned[start:end], blocks, first_block)
        return load

    def abandon(self, load: Load) -> None:
        """Nobody waits for `load` any more. What is on its way into the host tier goes on, for the next one."""
        self.outbox += [Cancel(job.transfer.job) for job in load.pending]

    def _readable(self, keys: Sequence[Key]) -> list[int]:
        """The nodes of the leading keys that can be loaded."""
        index = self.store.index
        reachable = index.reachable
        path: list[int] = []
        for key in keys:
            node = index.get(key)
            if not node or not reachable[node]:
                break
            path.append(node)
        return path

    def _pin(self, node: int) -> tuple[int, int]:
        """Pin the copy that a reachable node is read from, or will be: (tier, slot); says which."""
        index = self.store.index
        tier, slot = 0, index.slot[0][node]
        if slot < 0:
            tier = index.warmest_ready(node)
            slot = index.slot[tier][node]
        self.store.pools[tier].readers[slot] += 1
        return tier, slot

    def _batches(self, pinned: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """The leading run that is ready in the host tier, which waits for nothing; then `LOAD_BATCH` chunks a time."""
        state = self.store.pools[0].state
        warm = 0
        while warm < len(pinned) and pinned[warm][0] == 0 and state[pinned[warm][1]] == READY:
            warm += 1
        if warm:
            yield 0, warm
        for start in range(warm, len(pinned), LOAD_BATCH):
            yield start, min(start + LOAD_BATCH, len(pinned))

    def _order_batch(
        self,
        load: Load,
        nodes: Sequence[int],
        pinned: Sequence[tuple[int, int]],
        blocks: Sequence[int],
        first_block: int,
    ) -> tuple[Sequence[int], int]:
        """Order one batch; returns the blocks that are left for the next, and the logical index of their first."""
        store, host = self.store, self.store.pools[0]
        warm: list[int] = []
        cold: dict[int, list[tuple[int, int, int]]] = {}  # by tier: node, source slot, host slot
        reading = {tier: self.new_id() for tier in sorted({tier for tier, _ in pinned if tier})}
        copying = self.new_id()
        for node, (tier, slot) in zip(nodes, pinned, strict=True):
            at = slot
            if tier:
                at = store.place_copy(node, 0, reading[tier])
                host.readers[at] += 1
                cold.setdefault(tier, []).append((node, slot, at))
            warm.append(at)
            source = tier if tier or host.state[at] == READY else store.index.warmest_ready(node)
            load.sources.append(store.levels[source].name)
        for tier, moves in cold.items():
            path, sources, slots = (list(column) for column in zip(*moves, strict=True))
            self._order(reading[tier], path, Side(tier, sources), Side(0, slots))
        per_chunk = self.settings.blocks_per_chunk
        taken = min(len(blocks), len(nodes) * per_chunk - first_block % per_chunk)
        writer = host.writer
        load.parts.append(
            self._order(
                copying,
                nodes,
                Side(0, warm),
                None,
                sections=(Section(0, first_block, tuple(blocks[:taken])),),
                after=tuple(dict.fromkeys(writer[slot] for slot in warm if slot in writer)) if writer else (),
                load=load,
            )
        )
        return blocks[taken:], first_block + taken

    # ------------------------------------------------------------------ offload and backup

    def offload(self, keys: Sequence[Key], first: int, blocks: Sequence[int] | None) -> Offload:
        """Order what the tiers lack of `keys[first:]` into the host tier; `blocks` is `None` if the host moves it."""
        store = self.store
        path = self._known(keys, first)
        known = first + len(path)
        store.touch(path[::-1])
        fresh = self._admit(keys, known)
        if not fresh:
            return Offload(None, (), known)
        job = self.new_id()
        parent = store.index.get(keys[known - 1]) if known else ROOT
        nodes, slots = store.place(keys[known : known + fresh], parent, job)
        sections: tuple[Section, ...] = ()
        if blocks is not None:
            per_chunk = self.settings.blocks_per_chunk
            mine = blocks[(known - first) * per_chunk : (known - first + fresh) * per_chunk]
            sections = (Section(0, known * per_chunk, tuple(mine)),)
        record = self._order(job, nodes, None, Side(0, slots), sections=sections, command=blocks is not None)
        places = (item.destination for item in record.transfer.items)
        return Offload(job, tuple(map(Placement._make, zip(count(known), places, strict=False))), known + fresh)

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
        self._order(job, chosen, Side(0, sources), Side(1, copies))

    def _known(self, keys: Sequence[Key], first: int) -> list[int]:
        """Nodes of the leading chunks of `keys[first:]` that a tier has or will have."""
        index = self.store.index
        path: list[int] = []
        for key in keys[first:]:
            node = index.get(key)
            if not node:
                break
            path.append(node)
        return path

    def _admit(self, keys: Sequence[Key], known: int) -> int:
        """How many of `keys[known:]` the host tier takes, room made; the others are counted as dropped."""
        store, wanted = self.store, len(keys) - known
        if not wanted:
            return 0
        parent = store.index.get(keys[known - 1]) if known else ROOT
        if known and not parent:
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
        nodes: Sequence[int],
        source: Side | None,
        destination: Side | None,
        *,
        sections: tuple[Section, ...] = (),
        after: tuple[int, ...] = (),
        load: Load | None = None,
        command: bool = True,
    ) -> Job:
        """Register a job for `nodes` whose source slots are pinned and whose destinations are placed.

        Without `command` the host knows of it already, and moves the bytes itself.
        """
        writing = destination is not None and (source is None or source.tier < destination.tier)
        timeout = self.settings.write_timeout if writing else self.settings.load_timeout
        transfer = Transfer(
            job=job,
            route=Route(self._name(source and source.tier), self._name(destination and destination.tier)),
            items=self._items(nodes, source, destination),
            sections=sections,
            urgency=Urgency.WRITE if writing else Urgency.DEMAND,
            deadline=self.now + timeout,
            after=after,
            generation=self.generation,
            ranks=self.settings.ranks,
        )
        if writing and destination is not None:
            self._writing[destination.tier] += len(nodes)
        record = self.jobs[job] = Job(transfer, source, destination, load)
        if command:
            self.outbox.append(transfer)
        return record

    def _name(self, tier: int | None) -> str:
        return DEVICE if tier is None else self.store.levels[tier].name

    def _items(self, nodes: Sequence[int], source: Side | None, destination: Side | None) -> tuple[Item, ...]:
        index = self.store.index
        parent = index.parent
        keys = index.key[nodes].tolist()
        parents = index.key[[parent[node] for node in nodes]].tolist()
        valid = (1 << self.settings.blocks_per_chunk) - 1
        sources, destinations = self._slots(source), self._slots(destination)
        return tuple(
            map(Item._make, zip(keys, parents, sources, destinations, repeat(valid, len(nodes)), strict=False))
        )

    def _slots(self, side: Side | None) -> Iterable[Slot | None]:
        if side is None:
            return repeat(None)
        return map(Slot._make, zip(repeat(self._name(side.tier)), repeat(0), side.slots, strict=False))

    def _finish(self, job: Job) -> None:
        """All ranks have reported: failures first, then sources, then arrivals, so that nothing unreachable arrives."""
        store, statuses = self.store, job.statuses
        writing = job.transfer.urgency is Urgency.WRITE
        if job.source is not None:
            job.blame_sources(store.pools[job.source.tier].fault)
        if job.destination is not None:
            tier, slots = job.destination
            if writing:
                self._writing[tier] -= len(slots)
            for slot, status in zip(slots, statuses, strict=True):
                if status is not Status.OK:
                    self._fail(tier, slot, status, writing=writing)
        if job.source is not None:
            tier, slots = job.source
            for slot, status in zip(slots, statuses, strict=True):
                store.unread(tier, slot, status if status.condemns_source and not writing else None)
        if job.destination is not None:
            tier, slots = job.destination
            for i in range(len(slots) - 1, -1, -1):  # tails first, so that heads are the most recently used
                if statuses[i] is Status.OK:
                    store.arrive(tier, slots[i])

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
