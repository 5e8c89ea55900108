"""The order of copies: against compute, against each other, and the order in which jobs end. One lane per direction.

    compute, then copy      the stream of a copy (`device`) waits for events of compute, `CopyJob.wait_events`, which
                            `begin_step` or `submit` of the engine has recorded on the compute stream
    copy, then compute      `end_step` and `wait_layer` of the engine make compute wait for the copies of a job
    copy, then copy         `Hazards`: a slot is written after its readers and its writer have ended, and read after
                            its writer

A lane chooses the next copy, submits it to the device, and ends jobs in order:

    queues     demand    ■ ■            the first job of the most urgent class that may begin: so an urgent
               prefetch                 job overtakes others, between two batches of a large one
               write     ■▨ ■ ■ ■
                           │ batch by batch
    in flight              ▼
               ▢ ▢         at most `Stream.depth` copies at once, finished in order
                           │
    ended                  ▼            per class in the order of submission

A job begins when all jobs that it conflicts with have ended, in any direction and class.

A lane is a generator. It yields a `WaitCondition`, and does not block on another lane between two yields. A
`LaneDriver` resumes it: in production `Threads`, a thread for each lane, which sleeps until the condition is met; where
the lane waits for the device (`is_device`) it is resumed at once, and blocks in `Copy.finish`. In tests that try every
order, a scheduler resumes it, when either condition is met.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from longshore.boundary import HOST, Status, Transfer, TransferResult, Urgency
from longshore.errors import FreedLayoutError, log_seldom
from longshore.transfer.copy_plan import CopyPlan, zero_padding
from longshore.transfer.device.base import Copy, DeviceEvent, Stream
from longshore.transfer.pieces import CopyBatch


class TierPool(NamedTuple):
    """A pool of slots in a tier."""

    tier: str
    pool: int


class Access(NamedTuple):
    """The slots of one pool that a job reads or writes. `slots`: int64, shape `(slots,)`."""

    pool: TierPool
    slots: npt.NDArray[np.int64]
    writes: bool


class QueuePosition(NamedTuple):
    """The position of a job.

    Attributes:
        queue: The queue of the job: one per direction and class.
        number: Position in the queue; the first is 1.
        needs: For each queue, the position that must have ended before the job begins.
    """

    queue: int
    number: int
    needs: tuple[int, ...]


class Hazards:
    """The last reader and writer of every slot, per queue. Not thread-safe: the engine's lock guards it.

    A slot is (tier, pool, index): slot 5 of the host is not block 5 of the device. A lane has a queue per class, and
    ends the jobs of a queue in order. Per slot and queue, the number of the last reader therefore covers all readers of
    that queue, and that of the last writer all writers:

                           slot 0   slot 1   slot 2  ...
        writers   queue 0     4        0        4          slot 0 was last written in queue 0 by its job 4
                  queue 1     0        7        7
        readers   queue 0     ...

    Entries are never removed. An entry is irrelevant once its queue has ended the job of that number.
    """

    def __init__(self, sizes: Mapping[TierPool, int], queues: int) -> None:
        """`sizes`: slots of each pool."""
        self._last_number = [0] * queues
        self._ended = [0] * queues
        self._readers = {pool: np.zeros((queues, size), dtype=np.int64) for pool, size in sizes.items()}
        self._writers = {pool: np.zeros((queues, size), dtype=np.int64) for pool, size in sizes.items()}

    def add(self, queue: int, accesses: Sequence[Access]) -> QueuePosition:
        """Record the slots of the next job of `queue`; returns its position, with the jobs to wait for."""
        needs = np.zeros(len(self._last_number), dtype=np.int64)
        for pool, slots, writes in accesses:
            if not len(slots):
                continue
            np.maximum(needs, self._writers[pool][:, slots].max(axis=1), out=needs)
            if writes:
                np.maximum(needs, self._readers[pool][:, slots].max(axis=1), out=needs)
        self._last_number[queue] += 1
        for pool, slots, writes in accesses:
            newest = self._writers if writes else self._readers
            newest[pool][queue, slots] = self._last_number[queue]
        return QueuePosition(queue, self._last_number[queue], tuple(needs.tolist()))

    def is_clear(self, position: QueuePosition) -> bool:
        """Whether all jobs that the job at `position` depends on have ended."""
        return all(ended >= need for ended, need in zip(self._ended, position.needs, strict=True))

    def end(self, position: QueuePosition) -> None:
        """Record that the job at `position`, and all before it in its queue, have ended."""
        self._ended[position.queue] = position.number


class WaitCondition(NamedTuple):
    """A condition that a lane waits for.

    Attributes:
        is_met: Whether the lane may continue. Reads state under the engine's lock, unless `is_device`.
        is_device: Whether the device meets it. `Threads` resumes the lane at once, which blocks in `Copy.finish`.
    """

    is_met: Callable[[], bool]
    is_device: bool = False


class LaneDriver(ABC):
    """The lock of one engine, waits for the state that it guards, and the threads that run its lanes.

    Attributes:
        lock: The lock; may be entered again by the thread that holds it.
    """

    lock: AbstractContextManager[object]

    @abstractmethod
    def wait_for(self, is_met: Callable[[], bool], timeout: float | None = None) -> bool:
        """With the lock held, release it until `is_met`, for at most `timeout` seconds. Returns whether it is met."""

    @abstractmethod
    def notify(self) -> None:
        """With the lock held: report that the guarded state has changed."""

    @abstractmethod
    def start(self, name: str, lane: Generator[WaitCondition, None, None], stop: Callable[[], None]) -> None:
        """Start to run `lane`; `stop` makes it return soon."""

    @abstractmethod
    def join(self) -> None:
        """Wait until all lanes have returned."""

    def watch(self, hazards: Hazards) -> Hazards:
        """The hazards for the engine: `hazards`, or a wrapper that observes it."""
        return hazards


class Threads(LaneDriver):
    """A thread for each lane."""

    def __init__(self) -> None:
        self.lock = lock = threading.RLock()
        self._changed = threading.Condition(lock)
        self._threads: list[threading.Thread] = []
        self.stop: Callable[[], None] = lambda: None

    def wait_for(self, is_met: Callable[[], bool], timeout: float | None = None) -> bool:
        """Sleep until another thread reports a change."""
        return self._changed.wait_for(is_met, timeout)

    def notify(self) -> None:
        """Wake all waiting threads."""
        self._changed.notify_all()

    def start(self, name: str, lane: Generator[WaitCondition, None, None], stop: Callable[[], None]) -> None:
        """Start a thread called `name`, which is stopped and joined when the interpreter exits."""
        self.stop = stop
        _running.add(self)
        thread = threading.Thread(target=self._run, args=(lane,), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def join(self, timeout: float | None = None) -> None:
        """Join the threads, each at most `timeout` seconds."""
        for thread in self._threads:
            thread.join(timeout)

    def _run(self, lane: Generator[WaitCondition, None, None]) -> None:
        for condition in lane:
            if not condition.is_device:
                try:
                    with self._changed:
                        self._changed.wait_for(condition.is_met)
                except Exception as error:  # noqa: BLE001 - the lane is told, and returns
                    with contextlib.suppress(StopIteration):
                        lane.throw(error)


_EXIT_TIMEOUT = 30.0
"""Seconds that the interpreter waits for one thread at exit."""

_running: weakref.WeakSet[Threads] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Stop all lanes at exit: a thread stopped inside torch aborts the process."""
    drivers = list(_running)
    for driver in drivers:
        driver.stop()
    for driver in drivers:
        driver.join(_EXIT_TIMEOUT)


class CopySlice(NamedTuple):
    """A part of a job that is submitted at once. `completes`: layers whose last slice this is, in a layer-wise job."""

    batch: CopyBatch | None
    completes: tuple[int, ...] = ()


@dataclass(slots=True)
class CopyJob:
    """A transfer in flight.

    Attributes:
        wait_events: Events of compute that its copies wait for; empty once the first of them has been submitted.
        keep_alive: References to the memory on both sides, kept until the job has ended.
        slices: The slices after `next_slice`.
        next_slice: The next slice to submit to the device; `None` before the job begins, and after its last one.
        done_event: The event after which other work may use the device memory of the slices submitted so far.
        layers: That event for each completely submitted layer; `None` for an empty layer.
        fully_submitted: Whether the last slice has been submitted to the device.
        done_bytes: Bytes that are in place on both sides, in order.
        early_status: Status of a job that was stopped early.
        result: Set when it has ended.
    """

    transfer: Transfer
    plan: CopyPlan
    wait_events: tuple[DeviceEvent, ...]
    position: QueuePosition
    submitted: float
    keep_alive: object = None
    begun: float | None = None
    slices: Iterator[CopySlice] = field(default_factory=lambda: iter(()))
    next_slice: CopySlice | None = None
    done_event: DeviceEvent | None = None
    layers: dict[int, DeviceEvent | None] = field(default_factory=dict)
    fully_submitted: bool = False
    cancelled: bool = False
    done_bytes: int = 0
    seconds: float = 0.0
    early_status: Status | None = None
    result: TransferResult | None = None

    def begin(self, now: float, max_bytes: int) -> None:
        """Begin the job: cut it into slices."""
        self.begun = now
        self.slices = _slices(self, max_bytes)
        self.advance()

    def advance(self) -> None:
        """Record that `next_slice` was submitted to the device."""
        self.next_slice = next(self.slices, None)

    def end(self) -> TransferResult:
        """The result, once no copy of the job is in flight."""
        statuses, arrived = _statuses(self)
        begun = self.submitted if self.begun is None else self.begun
        layout = self.plan.batch.layout
        self.result = TransferResult(
            job=self.transfer.job,
            statuses=statuses,
            bytes=arrived,
            seconds=self.seconds,
            queued_seconds=begun - self.submitted,
            rank=layout.rank,
        )
        self.keep_alive = None
        return self.result


def _slices(job: CopyJob, max_bytes: int) -> Iterator[CopySlice]:
    batch = job.plan.batch
    if not job.transfer.by_layer:
        yield from map(CopySlice, batch.cut(max_bytes))
        return
    for layer in range(batch.layout.num_layers):
        *rest, last = tuple(batch.of_layer(layer).cut(max_bytes)) or (None,)
        yield from map(CopySlice, rest)
        yield CopySlice(last, (layer,))


def _statuses(job: CopyJob) -> tuple[tuple[Status, ...], int]:
    """Status of each item, and the bytes of those that are whole."""
    item_bytes = job.plan.item_bytes
    if job.early_status is None:
        return (Status.OK,) * len(item_bytes), job.done_bytes
    # Layer by layer, all items arrive at the end. And a device may have failed earlier than it said.
    in_order = not job.transfer.by_layer and job.early_status not in FAILED
    count = int(np.searchsorted(np.cumsum(item_bytes), job.done_bytes, side="right")) if in_order else 0
    statuses = (Status.OK,) * count + (job.early_status,) * (len(item_bytes) - count)
    return statuses, int(item_bytes[:count].sum())


FAILED = frozenset({Status.DEVICE_ERROR, Status.INTERNAL_ERROR})
"""Statuses after which nothing that the job has copied counts as arrived."""


@dataclass(slots=True)
class EngineState:
    """State shared by the lanes and the callers of one engine; `driver` has its lock.

    Attributes:
        jobs: Jobs in flight, by number.
        results: Results that have not been polled.
        closing: Whether no further slice may begin.
    """

    driver: LaneDriver
    hazards: Hazards
    clock: Callable[[], float]
    max_batch_bytes: int
    jobs: dict[int, CopyJob] = field(default_factory=dict)
    results: list[TransferResult] = field(default_factory=list)
    closing: bool = False

    def stop(self) -> None:
        """Begin no further slice. Takes the lock; does not wait."""
        with self.driver.lock:
            self.closing = True
            self.driver.notify()

    def stop_reason(self, job: CopyJob) -> Status | None:
        """The status with which the remaining slices of `job` must be stopped, if any."""
        if job.early_status is not None:
            return job.early_status
        if self.closing or job.plan.batch.generation != job.plan.batch.layout.generation:
            return Status.TIER_OFF
        if job.cancelled:
            return Status.CANCELLED
        return Status.DEADLINE if self.clock() > job.transfer.deadline else None

    def may_begin(self, job: CopyJob) -> bool:
        """Whether no conflicting job is in flight."""
        return self.hazards.is_clear(job.position)

    def end(self, job: CopyJob) -> None:
        """End `job`, which has no copy in flight: release its slots and publish its result."""
        self.hazards.end(job.position)
        del self.jobs[job.transfer.job]
        self.results.append(job.end())


class LayerWiseJobs:
    """Layer-wise jobs, in flight or ended recently, for `wait_layer`."""

    MAX_ENDED = 1024
    """Largest number of ended jobs kept if `end_step` is not called."""

    def __init__(self) -> None:
        self._jobs: dict[int, CopyJob] = {}
        self._ended_before: set[int] = set()

    def add(self, job: CopyJob) -> None:
        """Add a submitted `job`, in place of an earlier one with its number."""
        number = job.transfer.job
        self._jobs.pop(number, None)
        self._ended_before.discard(number)
        if job.transfer.by_layer:
            self._jobs[number] = job
            if len(self._jobs) > self.MAX_ENDED:
                self._forget(self._ended()[:1])

    def get(self, number: int) -> CopyJob | None:
        """The job of that number, if known."""
        return self._jobs.get(number)

    def age(self) -> None:
        """At the end of an engine step: forget the jobs that had ended at the end of the step before."""
        self._forget(self._ended_before)
        self._ended_before = set(self._ended())

    def _ended(self) -> list[int]:
        return [number for number, job in self._jobs.items() if job.result is not None]

    def _forget(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._jobs.pop(number, None)


_log = logging.getLogger(__name__)

_BUGS = (
    *(ArithmeticError, AssertionError, AttributeError, BufferError, LookupError, NameError),
    *(NotImplementedError, RecursionError, TypeError, ValueError),
)
"""What no device raises: its failures are `RuntimeError` (torch), `OSError`, `MemoryError`, `DeviceError`."""


@dataclass(slots=True)
class _SubmittedSlice:
    """A slice in flight. `is_last`: it is the last one of its job."""

    job: CopyJob
    copy: Copy | None
    nbytes: int
    is_last: bool


class Lane:
    """One direction. Only its generator `run` uses the stream."""

    def __init__(self, name: str, stream: Stream, state: EngineState) -> None:
        self.name = name
        self._stream = stream
        self._state = state
        self._driver = state.driver
        self._lock = state.driver.lock
        self._queues: dict[Urgency, deque[CopyJob]] = {urgency: deque() for urgency in sorted(Urgency)}
        self._in_flight: deque[_SubmittedSlice] = deque()
        self._bound = False

    def queued(self, urgency: Urgency) -> int:
        """Number of jobs of a class not yet submitted to the device completely. With the lock held."""
        return len(self._queues[urgency])

    def put(self, job: CopyJob) -> None:
        """Queue `job`. With the lock held."""
        self._queues[job.transfer.urgency].append(job)
        self._driver.notify()

    def close(self) -> None:
        """Release the resources of the stream, once `run` has returned."""
        self._stream.close()

    def run(self) -> Generator[WaitCondition, None, None]:
        """Run until the state is closing and no job is left."""
        try:
            yield from self._steps()
        except Exception:  # noqa: BLE001 - an internal error, or one of the clock: jobs must end
            _log.exception(
                "copies %s stopped: their thread failed; nothing is stored or loaded; restart the engine; report this",
                self.name,
            )
            self._give_up()

    def _steps(self) -> Iterator[WaitCondition]:
        while True:
            yield WaitCondition(self._has_work)
            with self._lock:
                job = self._next_job()
                stopped = None if job is None else self._state.stop_reason(job)
            if job is not None:
                self._submit_slice(job, stopped)
            elif self._in_flight:
                oldest = self._in_flight[0]
                if oldest.copy is not None:
                    yield WaitCondition(oldest.copy.query, is_device=True)
                self._retire(oldest)
            else:
                return

    def _has_work(self) -> bool:
        return bool(self._in_flight) or self._next_job() is not None or self._state.closing

    def _next_job(self) -> CopyJob | None:
        """The job whose slice is to be taken next; `None` when none can go on."""
        in_flight = sum(copy_slice.nbytes for copy_slice in self._in_flight)
        if len(self._in_flight) >= self._stream.depth or in_flight > self._state.max_batch_bytes:
            return None
        heads = (queue[0] for queue in self._queues.values() if queue)
        return next((job for job in heads if self._can_go_on(job)), None)

    def _can_go_on(self, job: CopyJob) -> bool:
        return self._state.may_begin(job) or self._state.stop_reason(job) is not None

    def _submit_slice(self, job: CopyJob, stopped: Status | None) -> None:
        """Submit the next slice of `job` to the device, unless it is `stopped`: then it ends here."""
        copy_slice: CopySlice | None = None
        copy: Copy | None = None
        if stopped is None:
            try:
                copy_slice, copy = self._submit(job)
            except Exception as error:  # noqa: BLE001 - whatever the device raises ends this job, never the lane
                stopped = self._failed(job, error)
        with self._lock:
            job.early_status = stopped
            job.fully_submitted = stopped is not None or job.next_slice is None
            if copy is not None:
                job.done_event = copy.done_event
            layers = copy_slice.completes if copy_slice is not None else ()
            job.layers |= dict.fromkeys(layers, job.done_event)
            if job.fully_submitted:
                self._queues[job.transfer.urgency].popleft()
            nbytes = 0 if copy_slice is None or copy_slice.batch is None else copy_slice.batch.nbytes
            self._in_flight.append(_SubmittedSlice(job, copy, nbytes, job.fully_submitted))
            if job.fully_submitted or layers:
                self._driver.notify()  # callers wait for nothing else, and would take the interpreter's lock

    def _submit(self, job: CopyJob) -> tuple[CopySlice | None, Copy | None]:
        if not self._bound:
            self._stream.bind()
            self._bound = True
        if job.begun is None:
            if job.transfer.route.destination == HOST:
                zero_padding(job.plan, self._stream.zero)
            job.begin(self._state.clock(), self._state.max_batch_bytes)
        copy_slice, copy = job.next_slice, None
        if copy_slice is not None and copy_slice.batch is not None:
            copy = self._stream.copy(copy_slice.batch, job.wait_events)
            job.wait_events = ()  # a stream runs in order: later slices wait for them too
        job.advance()
        return copy_slice, copy

    def _failed(self, job: CopyJob, error: Exception) -> Status:
        """Log `error`, which is being handled; wait until no copy is in flight; return the status of `job`."""
        is_freed = isinstance(error, FreedLayoutError)
        if not is_freed:
            route = job.transfer.route
            message = "transfer job %d (%s) failed; %s; read the traceback, and report it if it repeats"
            log_seldom(_log, message, job.transfer.job, route, route.loss)
        self._drain()
        if is_freed:
            return Status.TIER_OFF
        return Status.INTERNAL_ERROR if isinstance(error, _BUGS) else Status.DEVICE_ERROR

    def _drain(self) -> None:
        """Wait until no copy is in flight, after a failure."""
        try:
            self._stream.drain()
        except Exception:  # noqa: BLE001 - the jobs have failed anyway
            message = (
                "device synchronization failed after a failed copy (%s); copies in flight count as failed; restart the "
                "engine if it repeats"
            )
            log_seldom(_log, message, self.name)

    def _give_up(self) -> None:
        """End all jobs as failed, once no copy is in flight."""
        self._drain()
        with self._lock:
            self._state.closing = True
            jobs = [copy_slice.job for copy_slice in self._in_flight if copy_slice.is_last]
            jobs += [job for queue in self._queues.values() for job in queue]
            for job in jobs:
                job.early_status, job.fully_submitted = Status.INTERNAL_ERROR, True
                self._state.end(job)
            self._queues = {urgency: deque() for urgency in self._queues}
            self._driver.notify()

    def _retire(self, copy_slice: _SubmittedSlice) -> None:
        """Finish the oldest slice in flight; end its job if it was the last."""
        job, failed, seconds = copy_slice.job, None, 0.0
        try:
            if copy_slice.copy is not None:
                seconds = copy_slice.copy.finish()
        except Exception as error:  # noqa: BLE001 - as above; what was copied may not have arrived
            failed = self._failed(job, error)
        with self._lock:
            self._in_flight.popleft()
            job.seconds += seconds
            job.done_bytes += copy_slice.nbytes
            job.early_status = failed or job.early_status
            if copy_slice.is_last:
                self._state.end(job)
                self._driver.notify()
