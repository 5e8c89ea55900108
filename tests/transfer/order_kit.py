"""Stories about the engine on the simulated device: what a script does, told in some order, judged by two models.

The expectation is that of a script which runs alone, one thing after the other: so every job must have the effect that
it has where it stands in the script, whatever overtakes it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from transfer_kit import Bytes, Model, Pools, transfer

from longshore.boundary import DEVICE, Item, Section, Slot, Status, Transfer, TransferResult
from longshore.layout import KVGroup, KVLayout, PageRef
from longshore.testing.simulated_device import CELL, SimulatedDevice, SimulatedEvent
from longshore.testing.simulation import Clock, Mark, SimulatedQueue, Simulation, WatchedHazards
from longshore.transfer import D2D, D2H, H2D, TransferEngine
from longshore.transfer.device.base import Copy, DeviceEvent, Stream
from longshore.transfer.ordering import CopyJob, QueuePosition, WaitCondition
from longshore.transfer.pieces import CopyBatch

BLOCKS = 4
SLOTS = 4
LAYERS = 2
PAGE = 2 * CELL


def small_layout() -> KVLayout:
    """A page for each of two layers, two tokens to a block."""
    tensors = [torch.zeros(BLOCKS * PAGE, dtype=torch.uint8) for _ in range(LAYERS)]
    refs = tuple(PageRef(layer, 0, PAGE, PAGE, CELL, layer) for layer in range(LAYERS))
    return KVLayout((KVGroup("kv", 2, 1, refs),), tensors, BLOCKS)


class Known(Model):
    """Moves like the bytes; what it says is 1 where the bytes are expected, 0 where nothing is promised."""

    def __init__(self, pools: Pools) -> None:
        super().__init__(pools)
        for array in (*self.device, self.host):
            array[:] = 1

    def _zero_padding(self, group_index: int, image: int) -> None:
        """Padding is no cell that anyone reads."""


class LoggedDevice(SimulatedDevice):
    """Notes the device blocks of each copy that is given to it; `fault` may raise before, `late_fault` after that."""

    def __init__(self, world: Simulation, compute: SimulatedQueue, depth: int) -> None:
        super().__init__(world, compute, depth=depth)
        self.log: list[tuple[str, tuple[int, ...]]] = []
        self.fault: Callable[[CopyBatch], None] = lambda batch: None
        self.late_fault: Callable[[CopyBatch], None] = lambda batch: None

    def stream(self, layout: KVLayout, destination: str) -> Stream:
        stream = super().stream(layout, destination)
        copy = stream.copy

        def logged(batch: CopyBatch, after: tuple[DeviceEvent, ...]) -> Copy:
            self.log.append(
                (destination, tuple(block for part in batch.parts for block in part.blocks.ravel().tolist()))
            )
            self.fault(batch)
            given = copy(batch, after)
            self.late_fault(batch)
            return given

        stream.copy = logged  # type: ignore[method-assign]
        return stream


class Tale:
    """One run of `script` over a new engine; its methods are what a script can do."""

    pools: Pools | None = None
    image: tuple[list[Bytes], Bytes] | None = None
    tensors: tuple[Any, ...] | None = None

    def __init__(
        self,
        world: Simulation,
        script: Callable[[Tale], None],
        *,
        max_batch_bytes: int = 1 << 20,
        max_queued: int = 64,
        depth: int = 2,
    ) -> None:
        self.world = world
        self.script = script
        self.now = 0.0
        self.compute = world.queue("compute")
        self.memory = self._memory()
        self.expected = Model(self.memory)
        self.known = Known(self.memory)
        self.device = LoggedDevice(world, self.compute, depth)
        self.engine = TransferEngine(
            self.memory.layout,
            self.device,
            self.memory.host,
            max_batch_bytes=max_batch_bytes,
            max_queued=max_queued,
            clock=lambda: self.now,
            driver=world,
        )
        self.results: dict[int, TransferResult] = {}
        self.wrong: list[str] = []
        self.tickets: dict[int, QueuePosition] = {}
        self.given: dict[int, tuple[Transfer, Sequence[int]]] = {}
        self._jobs = 0
        self._writes = 0
        self._done: list[object] = []
        self._generation = self.memory.layout.generation

    @classmethod
    def _memory(cls) -> Pools:
        """The same memory for every run, with the same bytes."""
        if cls.pools is None:
            cls.pools = Pools(small_layout(), SLOTS)
            cls.image = cls.pools.device_bytes(), cls.pools.host_bytes()
            cls.tensors = cls.pools.layout.tensors
        pools, image = cls.pools, cls.image
        assert image is not None and cls.tensors is not None
        if pools.layout.freed:  # a run that went no further left it so
            pools.layout.take_back(cls.tensors)
        for tensor, data in zip(pools.tensors, image[0], strict=True):
            tensor.numpy()[:] = data
        pools.arena.array[:] = image[1]
        return pools

    # What a script can do. Others may go on before each.

    def writes(self, block: int, *, queue: SimulatedQueue | None = None) -> None:
        """Compute writes a block."""
        self._pause()
        self._writes += 1
        value = 128 + self._writes
        queue = queue or self.compute
        pages = self._pages(block)
        for layer in range(LAYERS):
            self.expected.device[layer][pages] = value
            self.known.device[layer][pages] = 1
        parts = tuple(partial(self._write, layer, pages, value) for layer in range(LAYERS))
        self.world.give(queue, f"compute writes {block}", parts, writes=self._cells(range(LAYERS), block))

    def reads(self, block: int, *, layers: Sequence[int] = range(LAYERS), queue: SimulatedQueue | None = None) -> None:
        """Compute reads a block, and looks at what it reads."""
        self._pause()
        pages = self._pages(block)
        parts = tuple(
            partial(
                self._look, layer, pages, *(model.device[layer][pages].copy() for model in (self.expected, self.known))
            )
            for layer in layers
        )
        self.world.give(queue or self.compute, f"compute reads {block}", parts, reads=self._cells(layers, block))

    def begin_step(self, queue: SimulatedQueue | None = None) -> None:
        self._pause()
        self.engine.begin_step(queue)

    def end_step(self, jobs: Sequence[int] | None = None, queue: SimulatedQueue | None = None) -> None:
        self._pause()
        self._hazards().learn_all()
        self.engine.end_step(queue, jobs)
        self._did()

    def offload(self, blocks: Sequence[int], slots: Sequence[int], **fields: Any) -> int:
        return self._submit(transfer(self._number(), D2H, [Section(0, 0, tuple(blocks))], slots, **fields), slots)

    def onboard(self, blocks: Sequence[int], slots: Sequence[int], **fields: Any) -> int:
        return self._submit(transfer(self._number(), H2D, [Section(0, 0, tuple(blocks))], slots, **fields), slots)

    def inside(self, source: int, target: int, **fields: Any) -> int:
        item = Item(b"k" * 32, None, Slot(DEVICE, 0, source), None)
        return self._submit(Transfer(self._number(), D2D, (item,), (Section(0, 0, (target,)),), **fields), [source])

    def cancel(self, job: int) -> None:
        """Cancel a job; nothing is promised of what it writes."""
        self._pause()
        self.engine.cancel(job)
        given, slots = self.given[job]
        if given.route == D2H:
            self.forget(slots=slots)
        else:
            self.forget(blocks=given.sections[0].blocks)

    def wait(self, *jobs: int) -> None:
        self._pause()
        assert self.engine.wait(jobs)
        self._learn(jobs)
        self._did()

    def poll(self) -> list[int]:
        """Jobs whose results have come."""
        self._pause()
        return self._poll()

    def wait_layer(self, job: int, layer: int, timeout: float | None = None) -> Status:
        self._pause()
        status = self.engine.wait_layer(job, layer, timeout)
        self._did(status)
        return status

    def free(self) -> None:
        """The engine's memory goes, whatever is in flight."""
        self._pause()
        self.memory.layout.free()

    def take_back(self) -> None:
        """The memory comes back."""
        self._pause()
        self.memory.layout.take_back(self.tensors or ())

    def later(self, now: float) -> None:
        """The clock moves on."""
        self._pause()
        self.now = now

    # Story

    def play(self) -> None:
        self.script(self)
        self._pause()
        self.engine.shutdown()
        self._poll()
        self.world.settle()

    def verify(self) -> None:
        assert not self.wrong, self.wrong[0]
        assert sorted(self.results) == list(range(1, self._jobs + 1)), f"results of {sorted(self.results)}"
        got = [*self.memory.device_bytes(), self.memory.host_bytes()]
        want = [*self.expected.device, self.expected.host]
        known = [*self.known.device, self.known.host]
        for name, here, there, sure in zip(("layer 0", "layer 1", "host"), got, want, known, strict=True):
            differ = np.flatnonzero((here != there) & (sure == 1))
            assert not len(differ), f"{name} is wrong at {differ[:4]}: {here[differ[:4]]}, not {there[differ[:4]]}"

    def state(self) -> int:
        """All that what happens next, or is reported next, may depend on."""
        state, hazards = self.engine._state, self._hazards()
        jobs = tuple(map(_of_job, {**self.engine._layer_wise_jobs._jobs, **state.jobs}.values()))
        lanes = tuple(
            (
                tuple(tuple(job.transfer.job for job in queue) for queue in lane._queues.values()),
                tuple((sent.job.transfer.job, sent.is_last) for sent in lane._in_flight),
            )
            for lane in self.engine._lanes.values()
        )
        actors = tuple((lane.name, lane.is_running, _position(lane.steps)) for lane in self.world.lanes)
        queues = tuple(
            (
                (queue.given, queue.ended, queue.half),
                tuple((operation.label, tuple(map(_of_mark, operation.after))) for operation in queue.waiting),
                tuple(map(_of_mark, queue.holds)),
            )
            for queue in self.world.queues
        )
        clocks = tuple(map(_of_clock, (*self.world._clocks.values(), *(queue.clock for queue in self.world.queues))))
        known = tuple((ticket, _of_clock(clock)) for ticket, clock in hazards._told.items())
        ended = frozenset((turn, _of_clock(clock)) for turn, clock in hazards._ends.items())
        results = tuple((result.job, result.statuses) for result in (*state.results, *self.results.values()))
        memory = [zlib.crc32(data.numpy()) for data in self.memory.tensors] + [zlib.crc32(self.memory.arena.array)]
        script = (tuple(self._done), self.now, state.closing, len(self.wrong), len(self.device.log))
        step = tuple(map(_of_event, self.engine._step))
        layout = self.memory.layout.generation - self._generation
        return hash((jobs, lanes, actors, queues, clocks, known, ended, results, tuple(memory), script, step, layout))

    # Inside

    def _pause(self) -> None:
        self.world.pause()
        self._done.append("begun")

    def _did(self, outcome: object = None) -> None:
        """The engine has answered: the script is elsewhere than while it waited."""
        self._done.append(outcome)

    def _number(self) -> int:
        self._jobs += 1
        return self._jobs

    def _submit(self, given: Transfer, slots: Sequence[int]) -> int:
        self._pause()
        self.engine.submit(given)
        ticket = self._hazards().newest
        assert ticket is not None
        self.tickets[given.job] = ticket
        self.given[given.job] = given, slots
        for model in (self.expected, self.known):
            self._move(model, given, slots)
        return given.job

    def _move(self, model: Model, given: Transfer, slots: Sequence[int]) -> None:
        if given.route != D2D:
            images = self.memory.images(slots)
            destination = given.route.destination
            model.move(given.sections, images, destination=destination, tokens=given.tokens)
            return
        source, target = self._pages(slots[0]), self._pages(given.sections[0].blocks[0])
        size = given.tokens * CELL if given.tokens == 1 else PAGE
        for pages in model.device:
            pages[target.start : target.start + size] = pages[source.start : source.start + size]

    def forget(self, *, blocks: Sequence[int] = (), slots: Sequence[int] = ()) -> None:
        """Nothing is promised of what these hold: a job into them may not be whole."""
        for block in blocks:
            for layer in range(LAYERS):
                self.known.device[layer][self._pages(block)] = 0
        for image in self.memory.images(slots):
            self.known.host[image : image + self.memory.layout.image_bytes] = 0

    def _poll(self) -> list[int]:
        results = self.engine.poll()
        for result in results:
            assert result.job not in self.results, f"two results of job {result.job}"
            self.results[result.job] = result
        self._learn([result.job for result in results])
        return [result.job for result in results]

    def _learn(self, jobs: Sequence[int]) -> None:
        for job in jobs:
            self._hazards().learn(self.tickets[job])

    def _hazards(self) -> WatchedHazards:
        hazards = self.engine._state.hazards
        assert isinstance(hazards, WatchedHazards)
        return hazards

    @staticmethod
    def _pages(block: int) -> slice:
        return slice(block * PAGE, (block + 1) * PAGE)

    def _cells(self, layers: Sequence[int], block: int) -> list[int]:
        starts = [self.memory.tensors[layer].data_ptr() + block * PAGE for layer in layers]
        return [start // CELL + cell for start in starts for cell in range(PAGE // CELL)]

    def _write(self, layer: int, pages: slice, value: int) -> None:
        self.memory.tensors[layer].numpy()[pages] = value

    def _look(self, layer: int, pages: slice, expected: Bytes, known: Bytes) -> None:
        got = self.memory.tensors[layer].numpy()[pages]
        if ((got != expected) & (known == 1)).any():
            self.wrong.append(f"compute read {got} of layer {layer} at {pages.start}, not {expected}")


def tale(script: Callable[[Tale], None], **options: Any) -> Callable[[Simulation], Tale]:
    """Makes the story of `script`, for `explore`."""
    return lambda world: Tale(world, script, **options)


def _position(steps: Generator[WaitCondition, None, None]) -> tuple[int, ...]:
    """Where a generator, and those that it yields from, have stopped."""
    inner = steps.gi_yieldfrom
    return (steps.gi_frame.f_lasti, *(_position(inner) if isinstance(inner, Generator) else ()))


def _of_clock(clock: Clock) -> frozenset[tuple[str, int]]:
    return frozenset(clock.items())


def _of_mark(mark: Mark) -> tuple[object, ...]:
    return mark.queue.name, mark.number, _of_clock(mark.clock)


def _of_event(event: DeviceEvent | None) -> tuple[object, ...] | None:
    return _of_mark(event.mark) if isinstance(event, SimulatedEvent) else None


def _of_job(job: CopyJob) -> tuple[object, ...]:
    return (
        (
            job.transfer.job,
            job.begun,
            job.fully_submitted,
            job.cancelled,
            job.done_bytes,
            job.early_status,
            job.next_slice is None,
        ),
        job.result is None,
        tuple((layer, _of_event(event)) for layer, event in job.layers.items()),
        tuple(map(_of_event, job.wait_events)),
        _of_event(job.done_event),
    )
