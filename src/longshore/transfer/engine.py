"""The mover at the device's edge: device <-> host, one thread for each direction.

submit()   check everything, note who must be waited for, queue        caller's thread
─────────────────────────────────────────────────────────────────────────────────────
wait for the jobs of the other direction that touch the same slots     direction's thread
begin      on the device: wait for the compute that was marked
copy       batch by batch; between two, cancel and deadline are heard
finish     block until the last byte is in place
result     only now: the job has ended, others may touch its slots
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import numpy as np

from longshore.boundary import DEVICE, HOST, Route, Status, Transfer, TransferResult
from longshore.errors import FreedLayoutError, LayoutError, PlanError, TierClosedError
from longshore.layout.model import KVLayout
from longshore.transfer.device.base import Device, Event, Stream
from longshore.transfer.hazards import Access, Hazards, Place
from longshore.transfer.host_side import HostSlots, slots_of, zero_padding
from longshore.transfer.plan import MAX_BYTES
from longshore.transfer.selection import I64, Selection, select

OFFLOAD = Route(DEVICE, HOST)
ONBOARD = Route(HOST, DEVICE)

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Job:
    """A transfer between `submit` and its result."""

    transfer: Transfer
    selection: Selection
    fences: tuple[Event, ...]
    ticket: int
    needs: tuple[int, ...]
    submitted: float
    cancelled: bool = False
    copied: Event | None = None
    ended: bool = False


@dataclass(slots=True)
class _Lane:
    """One direction: jobs start and end in the order of their tickets."""

    index: int
    stream: Stream
    queue: deque[_Job] = field(default_factory=deque)
    tickets: int = 0
    ended: int = 0
    bound: bool = False


class TransferEngine:
    """Moves blocks between device and host; a `longshore.boundary.Mover`.

    Use from one thread or several; nothing blocks except `wait`, `end_step` and `close`. It owns `device`. `close` must
    be called: there is no finaliser.

    Order against compute: copies submitted between `begin_step` and `end_step` wait for what was given to compute
    before `begin_step`; copies submitted at any other time for what was given to it before `submit`. `end_step` makes
    compute wait for every copy submitted so far.
    """

    def __init__(
        self,
        layout: KVLayout,
        device: Device,
        host: HostSlots,
        *,
        max_batch_bytes: int = MAX_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` is the one that deadlines are given in; `max_batch_bytes` bounds how late a cancel may be heard.

        Raises:
            LayoutError: The host's slots are too small for an image.
        """
        if host.image_bytes < layout.image_bytes:
            raise LayoutError(f"an image has {layout.image_bytes} bytes, a host slot only {host.image_bytes}")
        if max_batch_bytes <= 0:
            raise PlanError(f"max_batch_bytes must be positive, got {max_batch_bytes}")
        self._layout = layout
        self._device = device
        self._host = host
        self._max_batch_bytes = max_batch_bytes
        self._clock = clock
        self._compute: object = None
        self._step: tuple[Event, ...] = ()
        self._changed = threading.Condition()
        self._closing = False
        self._outstanding: dict[int, _Job] = {}
        self._results: list[TransferResult] = []
        places = {Place(DEVICE, pool): layout.num_blocks for pool in layout.pools}
        self._hazards = Hazards({**places, Place(HOST, 0): host.slots}, lanes=2)
        self._lanes = {
            OFFLOAD: _Lane(0, device.stream(layout, HOST)),
            ONBOARD: _Lane(1, device.stream(layout, DEVICE)),
        }
        self._threads = [
            threading.Thread(target=self._serve, args=(lane,), name=f"longshore {route}", daemon=True)
            for route, lane in self._lanes.items()
        ]
        for thread in self._threads:
            thread.start()

    @property
    def routes(self) -> frozenset[Route]:
        """Device to host, and host to device."""
        return frozenset(self._lanes)

    def begin_step(self, compute: object = None) -> None:
        """Copies submitted until `end_step` wait for what was given to `compute` so far.

        `compute` is the device's own kind of stream, `None` the one at hand. A second call adds to the first.
        """
        event = self._device.mark(compute)
        with self._changed:
            self._check_open()
            self._compute = compute
            self._step = (*(earlier for earlier in self._step if not earlier.passed()), event)

    def end_step(self, compute: object = None) -> None:
        """What is given to `compute` from here on waits for all copies submitted so far.

        Blocks until the last of them has been handed to the device (on the CPU: until it has ended).
        """
        with self._changed:
            self._compute = compute
            self._step = ()
            jobs = list(self._outstanding.values())
            self._changed.wait_for(lambda: all(job.ended or job.copied is not None for job in jobs))
        for job in jobs:
            if job.copied is not None:
                self._device.hold(compute, job.copied)

    def submit(self, transfer: Transfer) -> None:
        """Begin `transfer`.

        Raises:
            PlanError: A route, id, slot or mask that does not fit, or a job that is in flight. Nothing has changed.
            FreedLayoutError: The device memory is gone.
            TierClosedError: The engine was closed.
        """
        lane = self._lanes.get(transfer.route)
        if lane is None:
            raise PlanError(f"route {transfer.route} is not served, only {', '.join(map(str, self._lanes))}")
        slots = slots_of(transfer, self._host)
        selection = select(
            self._layout,
            transfer.sections,
            [self._host.offset(slot) for slot in slots],
            into=transfer.route.destination,
            host_address=self._host.arena.address,
            host_bytes=self._host.arena.nbytes,
            valid=[item.valid for item in transfer.items],
            layers=transfer.layers,
            tokens=transfer.tokens,
        )
        accesses = _accesses(selection, np.array(slots, dtype=np.int64))
        with self._changed:
            self._check_open()
            if transfer.job in self._outstanding:
                raise PlanError(f"job {transfer.job} is already in flight")
            fences = self._step or (self._device.mark(self._compute),)
            lane.tickets += 1
            needs = self._hazards.admit(lane.index, lane.tickets, accesses)
            job = _Job(transfer, selection, fences, lane.tickets, needs, self._clock())
            self._outstanding[transfer.job] = job
            lane.queue.append(job)
            self._changed.notify_all()

    def poll(self) -> list[TransferResult]:
        """Results since the last call, without waiting. Works after `close` too."""
        with self._changed:
            results, self._results = self._results, []
        return results

    def wait(self, jobs: Collection[int], timeout: float | None = None) -> bool:
        """Block until `jobs` have ended; `False` when that took longer than `timeout` seconds.

        Their results come out of `poll`. A job that is not in flight counts as ended.
        """
        with self._changed:
            return self._changed.wait_for(lambda: not any(job in self._outstanding for job in jobs), timeout)

    def cancel(self, job: int) -> None:
        """What has not begun of `job` need not begin; a job that is not in flight is ignored."""
        with self._changed:
            if job in self._outstanding:
                self._outstanding[job].cancelled = True
                self._changed.notify_all()

    def close(self) -> None:
        """Wait for the batches that have begun, end the rest as `Status.TIER_OFF`, close the device. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        for lane in self._lanes.values():
            lane.stream.close()
        self._device.close()

    def _check_open(self) -> None:
        if self._closing:
            raise TierClosedError("the transfer engine was closed")

    # From here on: the threads of the lanes.

    def _serve(self, lane: _Lane) -> None:
        while (job := self._next(lane)) is not None:
            result = self._run(lane, job)
            with self._changed:
                lane.ended = job.ticket
                job.ended = True
                del self._outstanding[job.transfer.job]
                self._results.append(result)
                self._changed.notify_all()

    def _next(self, lane: _Lane) -> _Job | None:
        """The next job, when nothing that it conflicts with is in flight; `None` when there will be no more."""
        with self._changed:
            self._changed.wait_for(lambda: lane.queue or self._closing)
            if not lane.queue:
                return None
            job = lane.queue.popleft()
            self._changed.wait_for(lambda: self._is_clear(job) or job.cancelled or self._closing)
            return job

    def _is_clear(self, job: _Job) -> bool:
        return all(lane.ended >= job.needs[lane.index] for lane in self._lanes.values())

    def _run(self, lane: _Lane, job: _Job) -> TransferResult:
        """Copy, as far as it is wanted, and say how each item ended."""
        begun = self._clock()
        seconds = 0.0
        done = 0
        stopped = self._stopped(job)
        if stopped is None:
            try:
                done, stopped = self._copy(lane, job)
            except FreedLayoutError:
                stopped = Status.TIER_OFF
            except Exception:  # noqa: BLE001 - whatever the device raises ends this job, never the thread or the engine
                _log.exception("job %d failed on %s", job.transfer.job, job.transfer.route)
                stopped = Status.IO_ERROR
            try:
                seconds = lane.stream.finish()
            except Exception:  # noqa: BLE001 - as above; what was copied may not have arrived
                _log.exception("job %d did not finish on %s", job.transfer.job, job.transfer.route)
                done, stopped = 0, Status.IO_ERROR
        statuses, arrived = _statuses(job.selection, done, stopped)
        return TransferResult(
            job=job.transfer.job,
            statuses=statuses,
            bytes=arrived,
            seconds=seconds,
            queued_seconds=begun - job.submitted,
            rank=self._layout.rank,
        )

    def _copy(self, lane: _Lane, job: _Job) -> tuple[int, Status | None]:
        """Copy batch by batch. Returns the bytes copied, and why it stopped before the end."""
        if not lane.bound:
            lane.stream.bind()
            lane.bound = True
        lane.stream.begin(job.fences)
        if job.transfer.route == OFFLOAD:
            zero_padding(job.selection)
        done = 0
        stopped = None
        for batch in job.selection.whole.cut(self._max_batch_bytes):
            stopped = self._stopped(job)
            if stopped is not None:
                break
            lane.stream.copy(batch)
            done += batch.nbytes
        copied = lane.stream.end()
        with self._changed:
            job.copied = copied
            self._changed.notify_all()
        return done, stopped

    def _stopped(self, job: _Job) -> Status | None:
        """Why what has not begun of `job` should not begin."""
        if self._closing or job.selection.whole.generation != self._layout.generation:
            return Status.TIER_OFF
        if job.cancelled:
            return Status.CANCELLED
        return Status.DEADLINE if self._clock() > job.transfer.deadline else None


def _accesses(selection: Selection, slots: I64) -> list[Access]:
    into = selection.whole.into
    device = [Access(Place(DEVICE, pool), blocks, into == DEVICE) for pool, blocks in selection.blocks().items()]
    return [*device, Access(Place(HOST, 0), slots, into == HOST)]


def _statuses(selection: Selection, done: int, stopped: Status | None) -> tuple[tuple[Status, ...], int]:
    """Status of each item when the first `done` bytes of all arrived, and the bytes of those that are whole."""
    if stopped is None:
        return (Status.OK,) * len(selection.item_bytes), done
    arrived = np.cumsum(selection.item_bytes) <= done if done else np.zeros(len(selection.item_bytes), dtype=np.bool_)
    statuses = tuple(Status.OK if ok else stopped for ok in arrived.tolist())
    return statuses, int(selection.item_bytes[arrived].sum())
