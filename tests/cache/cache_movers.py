"""Simulated movers below a `TieredCache`: what lies in all bytes of every tier and in every device block, by rank.

A tag (key, generation) is written where a transfer delivers it; while one is under way, or after it failed, there is
poison. A reader that finds bytes bad makes them so for good: `secret` until the cache has been told, `fault` after.
Remote tiers keep what they are given by key, and lose it when a test says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from cache_kit import IMAGE_BYTES, Setup, parent

from longshore.boundary import DEVICE, FILE, HOST, Item, Key, Slot, Status, Transfer, TransferResult, Urgency


class Tag(NamedTuple):
    """What lies in a slot, or (`sub`) in a device block."""

    key: Key
    generation: int
    sub: int = -1


BAD = "bytes that a reader found unusable"
POISON = "no bytes, or half-written ones"


class Place(NamedTuple):
    """Where one device block of a transfer belongs: to an item, as its block `sub`, and to a `chunk` of a group."""

    item: int
    group: int
    sub: int
    chunk: int
    block: int


def places(t: Transfer, per_chunk: int) -> Iterator[Place]:
    """All device blocks of a transfer whose sections have its items, in order."""
    item = -1
    for section in t.sections:
        for i, block in enumerate(section.blocks):
            chunk, sub = divmod(section.first_block + i, per_chunk)
            item += not i or not sub
            yield Place(item, section.group, sub, chunk, block)


class Job:
    """A transfer that the cache has ordered: where its ranks are, and what the cache has been told."""

    def __init__(self, transfer: Transfer, blocks: Sequence[int] = ()) -> None:
        self.transfer = transfer
        self.blocks = list(blocks)
        self.moving = set(range(transfer.ranks))
        self.untold = set(range(transfer.ranks))
        self.told = [Status.OK] * len(transfer.items)
        self.happened: dict[int, tuple[Status, ...]] = {}

    def tell(self, result: TransferResult) -> bool:
        """Merge a result. Bad bytes on one rank outweigh a late or cancelled part of another."""
        self.untold.discard(result.rank)
        for i, new in enumerate(result.statuses):
            old = self.told[i]
            if old is Status.OK or (new.invalidates_source and not old.invalidates_source):
                self.told[i] = new
        return not self.untold


class Memory:
    """The bytes of all tiers on one rank, in units; each remembers which part of which image it is."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._units: dict[tuple[str, int], tuple[Any, int]] = {}

    def write(self, slot: Slot, what: Any) -> None:
        """Put an image, or `BAD`, or `POISON`, into `slot`, over whatever lay in any part of it."""
        for i, unit in enumerate(self._setup.units(slot)):
            self._units[slot.tier, unit] = what, i

    def read(self, slot: Slot) -> Any:
        """What lies in `slot`, which is `POISON` unless all its parts belong together."""
        parts = [self._units.get((slot.tier, unit), (POISON, 0)) for unit in self._setup.units(slot)]
        whole = all(part == (parts[0][0], i) for i, part in enumerate(parts))
        return parts[0][0] if whole else POISON


class Movers:
    """Everything below the cache. `results` are those that it has not been told of."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.memory = [Memory(setup) for _ in range(setup.ranks)]
        self.secret: set[tuple[str, int, int]] = set()
        self.fault: dict[tuple[str, int], Status] = {}
        self.device = [[POISON] * setup.device_blocks for _ in range(setup.ranks)]
        self.stores: dict[str, set[tuple[Key, int, int]]] = {name: set() for name in setup.remote}
        """What each remote tier has: key, generation and rank."""
        self.jobs: dict[int, Job] = {}
        self.ended: dict[int, Job] = {}
        self.results: list[TransferResult] = []
        for slot, found, its_parent in setup.found:
            if parent(found) == its_parent:
                for memory in self.memory:
                    memory.write(Slot(FILE, 0, slot), Tag(found, setup.generation))

    def begin(self, t: Transfer) -> None:
        """`t` is under way: what it writes is poison from now on."""
        self.jobs[t.job] = Job(t)
        for item in t.items:
            if item.destination is not None:
                self.spoil(item.destination)
        if t.route.destination == DEVICE:
            for rank in self.device:
                for section in t.sections:
                    for block in section.blocks:
                        rank[block] = POISON

    def spoil(self, slot: Slot) -> None:
        """`slot` is about to be written."""
        self.fault.pop((slot.tier, slot.index), None)
        for rank, memory in enumerate(self.memory):
            memory.write(slot, POISON)
            self.secret.discard((slot.tier, slot.index, rank))

    def runnable(self) -> list[tuple[Job, int]]:
        """Jobs and ranks that can end now: all that they come after has."""
        return [
            (job, rank)
            for job in self.jobs.values()
            if not any(self.jobs[each].moving for each in job.transfer.after if each in self.jobs)
            for rank in sorted(job.moving)
        ]

    def on(self, route: str) -> list[Job]:
        """Jobs in flight on `"host->file"` or another route, oldest first."""
        return [job for job in self.jobs.values() if str(job.transfer.route) == route]

    def deliver(self, job: Job, rank: int, wanted: Sequence[Status]) -> None:
        """One rank of `job` ends, item by item as `wanted`, if possible. The result waits for `apply_results`."""
        t = job.transfer
        behind = self.behind_failures(job)
        statuses = [
            self.possible(t, i, item, rank, wanted[i % len(wanted)])
            for i, item in enumerate(t.items[: len(t.items) - len(behind)])
        ] + behind
        for i, (item, status) in enumerate(zip(t.items, statuses, strict=True)):
            if status is Status.OK:
                self.copy(t, i, item, rank)
            elif self.reads_slot(t) and status.invalidates_source and item.source is not None:
                self.blame(item.source, rank)
        job.moving.discard(rank)
        job.happened[rank] = tuple(statuses)
        self.results.append(TransferResult(t.job, tuple(statuses), statuses.count(Status.OK) * IMAGE_BYTES, rank=rank))

    def blame(self, slot: Slot, rank: int) -> None:
        """A reader finds the bytes in `slot` unusable, and so they are from now on."""
        if isinstance(self.memory[rank].read(slot), Tag):
            self.memory[rank].write(slot, BAD)
            self.secret.add((slot.tier, slot.index, rank))

    def behind_failures(self, job: Job) -> list[Status]:
        """What the runtime reports for the items that it does not submit: those from the first failure upstream on."""
        failed: dict[Slot, Status] = {}
        for each in job.transfer.after:
            upstream = self.ended.get(each) or self.jobs.get(each)
            for statuses in upstream.happened.values():
                for item, status in zip(upstream.transfer.items, statuses, strict=True):
                    if status is not Status.OK and item.destination is not None:
                        failed.setdefault(item.destination, status)
        statuses = [failed.get(item.source, Status.OK) if item.source else Status.OK for item in job.transfer.items]
        first = next((i for i, status in enumerate(statuses) if status is not Status.OK), len(statuses))
        return [Status.CANCELLED if status is Status.OK else status for status in statuses[first:]]

    def possible(self, t: Transfer, index: int, item: Item, rank: int, wanted: Status) -> Status:
        """Checks that what the cache wants read is there.

        Bad bytes are noticed below the host tier, by checksums, and elsewhere until the cache should know of them.
        """
        if t.route == (DEVICE, DEVICE):
            return wanted
        if t.route.source in self.stores:
            there = (item.key, t.generation, rank) in self.stores[t.route.source]
            return wanted if there or wanted is not Status.OK else Status.NOT_FOUND
        if item.source is None:
            for place in self.places_of(t, index):
                assert self.device[rank][place.block] == Tag(item.key, t.generation, place.sub)
            return wanted
        content = self.memory[rank].read(item.source)
        if content == BAD:
            noticed = (item.source.tier, item.source.index, rank) in self.secret or item.source.tier != HOST
            return Status.CORRUPT if noticed and wanted is Status.OK else wanted
        assert content == Tag(item.key, t.generation), f"{t} reads {content!r} from {item.source}"
        return wanted

    def copy(self, t: Transfer, index: int, item: Item, rank: int) -> None:
        """The bytes of one item go over, whatever they are; inside the device nobody asks what they were."""
        if t.route == (DEVICE, DEVICE):
            return
        source = Tag(item.key, t.generation) if item.source is None else self.memory[rank].read(item.source)
        if item.destination is not None:
            self.memory[rank].write(item.destination, source)
        elif t.route.destination in self.stores:
            self.stores[t.route.destination].add((item.key, t.generation, rank))
        for place in self.places_of(t, index) if t.route.destination == DEVICE else ():
            self.device[rank][place.block] = source._replace(sub=place.sub) if isinstance(source, Tag) else BAD

    def places_of(self, t: Transfer, index: int) -> list[Place]:
        """The device blocks of item `index`."""
        return [place for place in places(t, self.setup.per_chunk) if place.item == index]

    @staticmethod
    def reads_slot(t: Transfer) -> bool:
        """Whether a failure of this transfer is its source's fault."""
        return t.urgency is not Urgency.WRITE and t.route.source != DEVICE
