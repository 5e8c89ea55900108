"""The simulated device: copies and marks of compute are operations on queues."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from longshore.layout.model import U64, KVLayout
from longshore.testing.simulation import BlockedError, Mark, SimulatedQueue, Simulation
from longshore.transfer.device.base import Copy, Device, DeviceEvent, Stream, copy_pieces
from longshore.transfer.pieces import CopyBatch, PieceBuilder

CELL = 8
"""Bytes that are read or written as one; all addresses and sizes must be multiples of it."""


class SimulatedEvent(DeviceEvent):
    """A mark; an actor that sees it as passed knows the operations before it."""

    def __init__(self, world: Simulation, mark: Mark) -> None:
        self.mark = mark
        self._world = world

    def query(self) -> bool:
        """Whether it has passed; the current actor then knows."""
        has_passed = self.mark.has_passed()
        if has_passed:
            self._world.knows(self.mark.clock)
        return has_passed

    def wait(self) -> None:
        """Let other actors run until it has passed."""
        self._world.wait_for(self.query)


class SimulatedCopy(Copy):
    """A copy submitted to a queue."""

    def __init__(self, event: SimulatedEvent) -> None:
        self._event = event

    @property
    def done_event(self) -> DeviceEvent:
        """Its end."""
        return self._event

    def query(self) -> bool:
        """Whether it has ended."""
        return self._event.query()

    def finish(self) -> float:
        """Does not wait: the lane has done so."""
        if not self.query():
            raise BlockedError("finish would have blocked")
        return 0.0


class SimulatedDevice(Device):
    """Queues of a world. `compute` is a `SimulatedQueue`; `None` is the default queue of the device."""

    def __init__(self, world: Simulation, compute: SimulatedQueue, *, depth: int = 2, name: str = "copies") -> None:
        """`depth`: largest number of copies in flight per direction, and of descriptor buffers."""
        self._world = world
        self._compute = compute
        self._depth = depth
        self._name = name

    def stream(self, layout: KVLayout, destination: str) -> Stream:
        """A queue, with a descriptor buffer per copy in flight."""
        return SimulatedStream(self._world, self._world.queue(f"{self._name} into {destination}"), self._depth)

    def resolve(self, compute: object) -> object:
        """The queue itself."""
        return self._queue(compute)

    def record_event(self, compute: object) -> DeviceEvent:
        """The end of the work submitted to `compute`."""
        return SimulatedEvent(self._world, self._world.mark(self._queue(compute)))

    def wait_event(self, compute: object, event: DeviceEvent) -> None:
        """The next operation of `compute` waits for `event`."""
        if not isinstance(event, SimulatedEvent):
            raise TypeError(f"not an event of this device: {event!r}")
        self._queue(compute).holds.append(event.mark)

    def close(self) -> None:
        """Nothing was taken."""

    def _queue(self, compute: object) -> SimulatedQueue:
        return compute if isinstance(compute, SimulatedQueue) else self._compute


class PlannerRing:
    """One planner per copy in flight, used in turn.

    A device may read the arrays of a copy until it has finished, so they must not be overwritten earlier.
    """

    def __init__(self, depth: int) -> None:
        self._planners = [PieceBuilder() for _ in range(depth)]
        self._turn = 0

    def take(self) -> tuple[int, PieceBuilder]:
        """The next planner, and its number."""
        turn = self._turn
        self._turn = (turn + 1) % len(self._planners)
        return turn, self._planners[turn]


class SimulatedStream(Stream):
    """Copies real bytes in two halves, when the world schedules them."""

    def __init__(self, world: Simulation, queue: SimulatedQueue, depth: int) -> None:
        self.depth = depth
        self._world = world
        self._queue = queue
        self._planners = PlannerRing(depth)
        self._copies = 0
        self._user: str | None = None

    def bind(self) -> None:
        """Make the current actor the only user."""
        self._user = self._world.actor

    def copy(self, batch: CopyBatch, wait_events: tuple[DeviceEvent, ...]) -> Copy:
        """Describe the batch in the next buffer, and submit the copy to the queue."""
        if self._world.actor != self._user:
            raise BlockedError(f"{self._queue.name} belongs to {self._user}, and is used by {self._world.actor}")
        turn, planner = self._planners.take()
        buffer = (self._queue.name, "descriptors", turn)
        label = f"copy {self._copies} {self._queue.name}"
        self._copies += 1
        self._world.touch(f"descriptors of {label}", writes=[buffer])
        destination, source, size = planner.build(batch).directed(batch.destination)
        mark = self._world.give(
            self._queue,
            label,
            _halves(source, destination, size),
            after=tuple(event.mark for event in wait_events if isinstance(event, SimulatedEvent)),
            reads=[*cells(source, size), buffer],
            writes=cells(destination, size),
        )
        return SimulatedCopy(SimulatedEvent(self._world, mark))

    def drain(self) -> None:
        """Let other actors run until all copies have ended."""
        self._world.wait_for(SimulatedEvent(self._world, self._world.mark(self._queue)).query)

    def close(self) -> None:
        """Nothing was taken."""


def cells(addresses: U64, sizes: U64) -> list[int]:
    """The cells of these pieces of memory."""
    found: list[int] = []
    for address, size in zip(addresses.tolist(), sizes.tolist(), strict=True):
        if address % CELL or size % CELL:
            raise ValueError(f"{size} bytes at {address} are not whole cells of {CELL}")
        found += range(address // CELL, (address + size) // CELL)
    return found


def _halves(source: U64, destination: U64, size: U64) -> tuple[Callable[[], None], ...]:
    """Two calls that copy half of the pieces each; the arrays are read when they are called."""
    middle = (len(size) + 1) // 2
    parts = slice(0, middle), slice(middle, None)
    return tuple(partial(_copy, source, destination, size, part) for part in parts)


def _copy(source: U64, destination: U64, size: U64, part: slice) -> None:
    copy_pieces(source[part], destination[part], size[part])
