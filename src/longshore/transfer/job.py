"""A transfer between `submit` and its result; state shared by the engine's lanes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from longshore.boundary import Status, Transfer, TransferResult
from longshore.transfer.batch import CopyBatch
from longshore.transfer.device.base import DeviceEvent
from longshore.transfer.driver import LaneDriver
from longshore.transfer.hazards import Hazards, LanePosition
from longshore.transfer.selection import Selection


class CopyStep(NamedTuple):
    """A piece of a job. `completes`: layers whose last piece this is, in a layer-wise job."""

    batch: CopyBatch | None
    completes: tuple[int, ...] = ()


@dataclass(slots=True)
class CopyJob:
    """A transfer in flight.

    Attributes:
        fences: Points of compute that its copies wait for.
        keeps: References to the memory on both sides, kept until the job has ended.
        steps: The steps after `ahead`.
        ahead: The next step to submit to the device; `None` before the job begins, and after its last step.
        reached: The point after which other work may use the device memory of the steps submitted so far.
        layers: That point for each completely submitted layer; `None` for an empty layer.
        handed: Whether the last step has been submitted to the device.
        arrived: Bytes that are in place on both sides, in order.
        stopped: Status of a job that was stopped early.
        result: Set when it has ended.
    """

    transfer: Transfer
    selection: Selection
    fences: tuple[DeviceEvent, ...]
    ticket: LanePosition
    submitted: float
    keeps: object = None
    begun: float | None = None
    steps: Iterator[CopyStep] = field(default_factory=lambda: iter(()))
    ahead: CopyStep | None = None
    reached: DeviceEvent | None = None
    layers: dict[int, DeviceEvent | None] = field(default_factory=dict)
    handed: bool = False
    cancelled: bool = False
    arrived: int = 0
    seconds: float = 0.0
    stopped: Status | None = None
    result: TransferResult | None = None

    def begin(self, now: float, max_bytes: int) -> None:
        """Begin the job: cut it into steps."""
        self.begun = now
        self.steps = _steps(self, max_bytes)
        self.advance()

    def advance(self) -> None:
        """Record that `ahead` was submitted to the device."""
        self.ahead = next(self.steps, None)

    def end(self) -> TransferResult:
        """The result, once no copy of the job is in flight."""
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


def _steps(job: CopyJob, max_bytes: int) -> Iterator[CopyStep]:
    whole = job.selection.whole
    if not job.transfer.by_layer:
        yield from map(CopyStep, whole.cut(max_bytes))
        return
    for layer in range(*(job.transfer.layers or (0, whole.layout.num_layers))):
        *rest, last = tuple(whole.of_layer(layer).cut(max_bytes)) or (None,)
        yield from map(CopyStep, rest)
        yield CopyStep(last, (layer,))


def _statuses(job: CopyJob) -> tuple[tuple[Status, ...], int]:
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
    """State shared by the lanes and the callers of one engine; `driver` is its lock.

    Attributes:
        jobs: Jobs in flight, by number.
        results: Results that have not been polled.
        closing: Whether no further step may begin.
    """

    driver: LaneDriver
    hazards: Hazards
    clock: Callable[[], float]
    max_batch_bytes: int
    jobs: dict[int, CopyJob] = field(default_factory=dict)
    results: list[TransferResult] = field(default_factory=list)
    closing: bool = False

    def stop(self) -> None:
        """Let no further step begin. Takes the lock; does not wait."""
        with self.driver:
            self.closing = True
            self.driver.notify()

    def why_stop(self, job: CopyJob) -> Status | None:
        """The status with which the remaining steps of `job` must be stopped, if any."""
        if job.stopped is not None:
            return job.stopped
        if self.closing or job.selection.whole.generation != job.selection.whole.layout.generation:
            return Status.TIER_OFF
        if job.cancelled:
            return Status.CANCELLED
        return Status.DEADLINE if self.clock() > job.transfer.deadline else None

    def may_begin(self, job: CopyJob) -> bool:
        """Whether no conflicting job is in flight."""
        return self.hazards.is_clear(job.ticket)

    def end(self, job: CopyJob) -> None:
        """End `job`, which has no copy in flight: release its slots and publish its result."""
        self.hazards.end(job.ticket)
        del self.jobs[job.transfer.job]
        self.results.append(job.end())


class Layered:
    """Layer-wise jobs, in flight or ended recently, for `wait_layer`."""

    MOST = 1024
    """Largest number of ended jobs kept if `end_step` is not called."""

    def __init__(self) -> None:
        self._jobs: dict[int, CopyJob] = {}
        self._old: set[int] = set()

    def add(self, job: CopyJob) -> None:
        """Add a submitted `job`, in place of an earlier one with its number."""
        number = job.transfer.job
        self._jobs.pop(number, None)
        self._old.discard(number)
        if job.transfer.by_layer:
            self._jobs[number] = job
            if len(self._jobs) > self.MOST:
                self._forget(self._ended()[:1])

    def get(self, number: int) -> CopyJob | None:
        """The job of that number, if known."""
        return self._jobs.get(number)

    def age(self) -> None:
        """At the end of a step: forget the jobs that had ended at the end of the step before."""
        self._forget(self._old)
        self._old = set(self._ended())

    def _ended(self) -> list[int]:
        return [number for number, job in self._jobs.items() if job.result is not None]

    def _forget(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._jobs.pop(number, None)
