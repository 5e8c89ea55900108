"""A transfer between `submit` and its result, and what the engine's lanes know of each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from longshore.boundary import Status, Transfer, TransferResult
from longshore.transfer.batch import Batch
from longshore.transfer.device.base import Event
from longshore.transfer.driver import Driver
from longshore.transfer.hazards import Hazards, Ticket
from longshore.transfer.selection import Selection


class Step(NamedTuple):
    """A piece of a job. `completes`: layers of which this is the last piece, where the job goes layer by layer."""

    batch: Batch | None
    completes: tuple[int, ...] = ()


@dataclass(slots=True)
class Job:
    """A transfer in flight.

    Attributes:
        fences: The points of compute that its copies wait for.
        keeps: Owners of the memory that it touches on both sides, held until it has ended.
        steps: What comes after `ahead`.
        ahead: What is given to the device next; `None` before the job begins, and after its last step.
        reached: The point from which on others may use the device memory of what was given to the device so far.
        layers: That point for each layer that has been given to the device whole; `None` where there was nothing.
        handed: Nothing more of it will be given to the device.
        arrived: Bytes in place on both sides, in order.
        stopped: Why it ended before its end.
        result: Set when it has ended.
    """

    transfer: Transfer
    selection: Selection
    fences: tuple[Event, ...]
    ticket: Ticket
    submitted: float
    keeps: object = None
    begun: float | None = None
    steps: Iterator[Step] = field(default_factory=lambda: iter(()))
    ahead: Step | None = None
    reached: Event | None = None
    layers: dict[int, Event | None] = field(default_factory=dict)
    handed: bool = False
    cancelled: bool = False
    arrived: int = 0
    seconds: float = 0.0
    stopped: Status | None = None
    result: TransferResult | None = None

    def begin(self, now: float, max_bytes: int) -> None:
        """From here on it has begun: cut it into steps."""
        self.begun = now
        self.steps = _steps(self, max_bytes)
        self.advance()

    def advance(self) -> None:
        """`ahead` was given to the device."""
        self.ahead = next(self.steps, None)

    def end(self) -> TransferResult:
        """The result, once nothing of it is under way."""
        statuses, arrived = _statuses(self)
        begun = self.submitted if self.begun is None else self.begun
        layout = self.selection.whole.layout
        self.result = TransferResult(
            job=self.transfer.job,
            statuses=statuses,
            bytes=arrived,
            seconds=self.seconds,
            queued_seconds=begun - self.submitted,
            rank=layout.rank,
        )
        self.keeps = None
        return self.result


def _steps(job: Job, max_bytes: int) -> Iterator[Step]:
    whole = job.selection.whole
    if not job.transfer.by_layer:
        yield from map(Step, whole.cut(max_bytes))
        return
    for layer in range(*(job.transfer.layers or (0, whole.layout.num_layers))):
        *rest, last = tuple(whole.of_layer(layer).cut(max_bytes)) or (None,)
        yield from map(Step, rest)
        yield Step(last, (layer,))


def _statuses(job: Job) -> tuple[tuple[Status, ...], int]:
    """Status of each item, and the bytes of those that are whole."""
    item_bytes = job.selection.item_bytes
    if job.stopped is None:
        return (Status.OK,) * len(item_bytes), job.arrived
    # Layer by layer, all items arrive at the end. And a device may have failed earlier than it said.
    in_order = not job.transfer.by_layer and job.stopped is not Status.IO_ERROR
    count = int(np.searchsorted(np.cumsum(item_bytes), job.arrived, side="right")) if in_order else 0
    statuses = (Status.OK,) * count + (job.stopped,) * (len(item_bytes) - count)
    return statuses, int(item_bytes[:count].sum())


@dataclass(slots=True)
class Board:
    """What the lanes and the callers of one engine share; `driver` is the lock that guards it.

    Attributes:
        jobs: Those in flight, by number.
        results: Those that nobody has fetched.
        closing: Nothing that has not begun shall begin.
    """

    driver: Driver
    hazards: Hazards
    clock: Callable[[], float]
    max_batch_bytes: int
    jobs: dict[int, Job] = field(default_factory=dict)
    results: list[TransferResult] = field(default_factory=list)
    closing: bool = False

    def stop(self) -> None:
        """Begin nothing more. Takes the lock, and waits for nothing."""
        with self.driver:
            self.closing = True
            self.driver.notify()

    def why_stop(self, job: Job) -> Status | None:
        """Why what has not been given to the device of `job` should not be."""
        if job.stopped is not None:
            return job.stopped
        if self.closing or job.selection.whole.generation != job.selection.whole.layout.generation:
            return Status.TIER_OFF
        if job.cancelled:
            return Status.CANCELLED
        return Status.DEADLINE if self.clock() > job.transfer.deadline else None

    def may_begin(self, job: Job) -> bool:
        """Whether nothing that `job` conflicts with is in flight."""
        return self.hazards.is_clear(job.ticket)

    def end(self, job: Job) -> None:
        """Nothing of `job` is under way any more: others may touch its slots, and its result may be seen."""
        self.hazards.end(job.ticket)
        del self.jobs[job.transfer.job]
        self.results.append(job.end())


class Layered:
    """Jobs that go layer by layer, for those who wait for a layer: in flight, or ended a short while ago."""

    MOST = 1024
    """Ended ones that are kept where nobody ends steps."""

    def __init__(self) -> None:
        self._jobs: dict[int, Job] = {}
        self._old: set[int] = set()

    def add(self, job: Job) -> None:
        """`job` has been submitted; whatever had its number before is forgotten."""
        number = job.transfer.job
        self._jobs.pop(number, None)
        self._old.discard(number)
        if job.transfer.by_layer:
            self._jobs[number] = job
            if len(self._jobs) > self.MOST:
                self._forget(self._ended()[:1])

    def get(self, number: int) -> Job | None:
        """The job of that number, if it is known."""
        return self._jobs.get(number)

    def age(self) -> None:
        """A step has ended: forget those that had ended when the step before did."""
        self._forget(self._old)
        self._old = set(self._ended())

    def _ended(self) -> list[int]:
        return [number for number, job in self._jobs.items() if job.result is not None]

    def _forget(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._jobs.pop(number, None)
