"""Files know nothing of streams (trap 5): blocks between device and file, told in every order, on a simulated disk too.

The disk is one more queue of the world: it reads and writes the staging area on the device when the world says so.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from order_kit import LAYERS, PAGE, Tale, small_layout
from transfer_kit import Bytes

from longshore.boundary import DEVICE, FILE, Item, Route, Section, Slabs, Slot, Status, Transfer, TransferResult
from longshore.runtime.staging_mover import StagingMover, StagingSlots
from longshore.testing.simulated_device import CELL, SimulatedEvent, SimulatedStream
from longshore.testing.simulation import Simulation, WrongError, explore
from longshore.tiers.arena import Arena
from longshore.tiers.base import Op, Tier, TierOp, TierResult
from longshore.transfer import D2H

Patch = pytest.MonkeyPatch

CHUNKS = 3


class StagingMemory:
    """The arena of the tests as a device's memory for images."""

    def __init__(self, arena: Arena, nbytes: int) -> None:
        self.arena = arena
        self.address = arena.address
        self.nbytes = nbytes

    def mix64(self, offset: int, length: int) -> int:
        raise NotImplementedError

    def load(self, offset: int, host: memoryview) -> None:
        raise NotImplementedError

    def store(self, offset: int, host: memoryview) -> None:
        raise NotImplementedError

    def zero(self, offset: int, length: int) -> None:
        self.arena.array[offset : offset + length] = 0


class Disk(Tier):
    """A tier whose every operation is one of a queue, in two halves; its results come when they have ended."""

    def __init__(self, world: Simulation, memory: StagingMemory, image_bytes: int) -> None:
        self.name = FILE
        self.slabs = Slabs.of_one_size(image_bytes, CHUNKS)
        self.image_bytes = (image_bytes,)
        self.bytes = np.zeros((CHUNKS, image_bytes), np.uint8)
        self.unheard: set[int] = set()
        self._world = world
        self._memory = memory
        self._queue = world.queue("disk")
        self._tickets: dict[int, tuple[SimulatedEvent, int]] = {}
        self._given = 0

    def submit(self, batch: Sequence[TierOp], deadline: float) -> int:
        for op in batch:
            start = (self._memory.address + op.offset) // CELL
            memory = range(start, start + op.length // CELL)
            file = [("file", op.slot, cell) for cell in range(op.length // CELL)]
            reads, writes = (memory, file) if op.op is Op.WRITE else (file, memory)
            parts = tuple(partial(self._move, op, half) for half in (0, 1))
            mark = self._world.give(self._queue, f"disk {op.op.value} {op.slot}", parts, reads=reads, writes=writes)
        self._given += 1
        self._tickets[self._given] = SimulatedEvent(self._world, mark), len(batch)
        return self._given

    def has_results(self) -> bool:
        return any(event.mark.has_passed() for event, _ in self._tickets.values())

    def poll(self) -> list[TierResult]:
        done = [ticket for ticket, (event, _) in self._tickets.items() if event.query()]
        counts = {ticket: self._tickets.pop(ticket)[1] for ticket in done}
        return [
            TierResult(ticket, (Status.OK,) * counts[ticket], 0, 0, 0) for ticket in done if ticket not in self.unheard
        ]

    def cancel(self, ticket: int) -> None:
        """It has begun."""

    def close(self) -> None:
        """Nothing was taken."""

    def state(self) -> tuple[object, ...]:
        return zlib.crc32(self.bytes), tuple(self._tickets)

    def _move(self, op: TierOp, half: int) -> None:
        middle = op.length // 2
        some = slice(0, middle) if half == 0 else slice(middle, op.length)
        staging = self._memory.arena.array[op.offset : op.offset + op.length]
        if op.op is Op.WRITE:
            self.bytes[op.slot, some] = staging[some]
        else:
            staging[some] = self.bytes[op.slot, some]


class GdsTale(Tale):
    """A tale whose blocks go to files and come back, through a staging area of `images`."""

    def __init__(self, world: Simulation, script: Callable[[GdsTale], None], *, images: int = 2) -> None:
        super().__init__(world, script)  # type: ignore[arg-type]
        layout = self.memory.layout
        memory = StagingMemory(self.memory.arena, images * layout.image_bytes)
        self.disk = Disk(world, memory, layout.image_bytes)
        self.staging = StagingSlots(memory, layout.image_bytes)
        self.mover = StagingMover(self.engine, layout, self.staging, self.disk, clock=lambda: 0.0)
        self.filed: dict[int, list[Bytes]] = {}
        self.ended: dict[int, TransferResult] = {}
        self._sent = 0
        self.known.host[:] = 0  # what is in the staging area is nobody's business
        self._listen()

    def to_file(self, blocks: Sequence[int], chunks: Sequence[int]) -> int:
        """Blocks into files; what they hold by the script's own order is what must come back."""
        self._pause()
        for block, chunk in zip(blocks, chunks, strict=True):
            self.filed[chunk] = [self.expected.device[layer][self._pages(block)].copy() for layer in range(LAYERS)]
        return self._send(Route(DEVICE, FILE), blocks, chunks)

    def from_file(self, blocks: Sequence[int], chunks: Sequence[int]) -> int:
        """The reverse."""
        self._pause()
        for block, chunk in zip(blocks, chunks, strict=True):
            for layer in range(LAYERS):
                self.expected.device[layer][self._pages(block)] = self.filed[chunk][layer]
        return self._send(Route(FILE, DEVICE), blocks, chunks)

    def finish(self, *jobs: int) -> None:
        """Until the results of `jobs` have come."""
        self._pause()
        while not set(jobs) <= set(self.ended):
            self.world.wait_for(lambda: bool(self.engine._state.results) or self.disk.has_results())
            for result in self.mover.poll():
                self.ended[result.job] = result
        self._did(len(self.ended))

    def verify(self) -> None:
        super().verify()
        for result in self.ended.values():
            assert set(result.statuses) == {Status.OK}
        for chunk, layers in self.filed.items():
            found = self.disk.bytes[chunk][: LAYERS * PAGE]
            assert (found == np.concatenate(layers)).all(), f"file {chunk} holds {found}"

    def state(self) -> int:
        return hash((super().state(), self.disk.state(), self.staging.free, tuple(self.ended)))

    def _send(self, route: Route, blocks: Sequence[int], chunks: Sequence[int]) -> int:
        self._sent += 1
        items = []
        for chunk in chunks:
            slot = Slot(FILE, 0, chunk)
            source, destination = (None, slot) if route.destination == FILE else (slot, None)
            items.append(Item(bytes([chunk]) * 32, None, source, destination))
        self.mover.submit(Transfer(self._sent, route, tuple(items), (Section(0, 0, tuple(blocks)),)))
        return self._sent

    def _listen(self) -> None:
        """Who polls the engine's results knows what whoever ended those jobs knew."""
        submit, poll = self.engine.submit, self.engine.poll

        def submitting(transfer: Transfer) -> None:
            submit(transfer)
            ticket = self._hazards().newest
            assert ticket is not None
            self.tickets[transfer.job] = ticket

        def polling() -> list[TransferResult]:
            results = poll()
            self._learn([result.job for result in results])
            return results

        self.engine.submit = submitting  # type: ignore[method-assign]
        self.engine.poll = polling  # type: ignore[method-assign]


def gds(script: Callable[[GdsTale], None], **options: Any) -> Callable[[Simulation], GdsTale]:
    return lambda world: GdsTale(world, script, **options)


def goes_wrong(script: Callable[[GdsTale], None], how: str, **options: Any) -> None:
    with pytest.raises(WrongError, match=how):
        explore(gds(script, **options))


def store(told: GdsTale) -> None:
    told.writes(0)
    told.begin_step()
    told.finish(told.to_file([0], [0]))
    told.writes(0)


def there_and_back(told: GdsTale) -> None:
    told.writes(0)
    told.begin_step()
    told.finish(told.to_file([0], [0]))
    told.reads(1)
    told.begin_step()
    told.finish(told.from_file([1], [0]))
    told.reads(1)


def two_through_a_ring_of_one(told: GdsTale) -> None:
    told.writes(0)
    told.begin_step()
    first, second = told.to_file([0], [0]), told.to_file([1], [1])
    told.finish(first, second)


def load_after_load_through_a_ring_of_one(told: GdsTale) -> None:
    told.finish(told.to_file([0], [0]), told.to_file([1], [1]))
    told.finish(told.from_file([2], [0]), told.from_file([3], [1]))


def test_the_ring_is_what_the_layout_says() -> None:
    assert small_layout().image_bytes >= LAYERS * PAGE


@pytest.mark.parametrize("script", [store, there_and_back])
def test_trap_5_files_keep_stream_order(script: Callable[[GdsTale], None]) -> None:
    explore(gds(script))


@pytest.mark.parametrize("script", [two_through_a_ring_of_one, load_after_load_through_a_ring_of_one])
def test_ring_place_has_one_user_at_a_time(script: Callable[[GdsTale], None]) -> None:
    explore(gds(script, images=1))


# The same without what guards it


@pytest.mark.parametrize(("script", "how"), [(store, "RAW: copy"), (there_and_back, "(RAW|WAR): copy")])
def test_without_the_fence_of_compute(script: Callable[[GdsTale], None], how: str, monkeypatch: Patch) -> None:
    copy = SimulatedStream.copy
    monkeypatch.setattr(SimulatedStream, "copy", lambda self, batch, after: copy(self, batch, ()))
    goes_wrong(script, how)


def test_a_file_that_does_not_wait_for_the_copy(monkeypatch: Patch) -> None:
    """The write begins when the copy has been submitted."""
    copy = StagingMover._copy

    def early(self: StagingMover, piece: Any, count: int, route: Route) -> None:
        copy(self, piece, count, route)
        if route == D2H:
            del self._copying[piece.number]
            self._to_file(piece, [Status.OK] * count)

    monkeypatch.setattr(StagingMover, "_copy", early)
    goes_wrong(store, "RAW: disk write|WAR: copy")


def test_a_copy_that_does_not_wait_for_the_file(monkeypatch: Patch) -> None:
    """The copy into pages begins when the read has been submitted."""
    file = StagingMover._file

    def early(self: StagingMover, piece: Any, statuses: Sequence[Status], op: Op) -> None:
        file(self, piece, statuses, op)
        if op is Op.READ:
            ticket = max(self._filing)
            assert isinstance(self._tier, Disk)
            self._tier.unheard.add(ticket)
            self._to_pages(self._filing.pop(ticket), statuses)

    monkeypatch.setattr(StagingMover, "_file", early)
    goes_wrong(there_and_back, "RAW: copy|WAR: disk read|compute read")


@pytest.mark.parametrize(
    ("step", "script", "how"),
    [
        ("_to_file", two_through_a_ring_of_one, "WAR: copy|RAW: disk write|file . holds"),
        ("_to_pages", load_after_load_through_a_ring_of_one, "WAR: disk read|RAW: copy|is wrong at"),
    ],
)
def test_a_place_that_is_given_back_too_early(
    step: str, script: Callable[[GdsTale], None], how: str, monkeypatch: Patch
) -> None:
    """When the second side has been told to begin, not when it has ended."""
    begin, give_back = getattr(StagingMover, step), StagingSlots.give_back
    early: list[int] = []  # of whom each list of slots is

    def begin_and_give_back(self: StagingMover, piece: Any, statuses: Sequence[Status]) -> None:
        begin(self, piece, statuses)
        give_back(self._staging, piece.slots)
        early.append(id(piece.slots))

    monkeypatch.setattr(StagingMover, step, begin_and_give_back)
    monkeypatch.setattr(
        StagingSlots, "give_back", lambda self, slots: None if id(slots) in early else give_back(self, slots)
    )
    goes_wrong(script, how, images=1)
