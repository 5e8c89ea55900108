"""One direction of a transfer engine: chooses the next copy, submits it to the device, ends jobs in order.

    queues     demand    ■ ■            the most urgent class goes first whose job's turn has come: so an
               prefetch                 urgent job overtakes others, between two batches of a large one
               write     ■▨ ■ ■ ■
                           │ batch by batch
    under way              ▼
               ▢ ▢         at most `Stream.depth` copies at once, finished in order
                           │
    ended                  ▼            per class in the order of submission

A job begins when all jobs that it conflicts with have ended, in any direction and class.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

from longshore.boundary import HOST, Status, Urgency
from longshore.errors import FreedLayoutError
from longshore.transfer.device.base import Copy, Stream
from longshore.transfer.driver import WaitCondition
from longshore.transfer.job import Board, CopyJob, CopyStep
from longshore.transfer.selection import Selection

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Sent:
    """A step that was taken: what of it is under way. `is_last`: nothing comes after it."""

    job: CopyJob
    copy: Copy | None
    nbytes: int
    is_last: bool


class Lane:
    """One direction. Only its generator `serve` uses the stream."""

    def __init__(self, name: str, stream: Stream, board: Board) -> None:
        self.name = name
        self._stream = stream
        self._board = board
        self._lock = board.driver
        self._queues: dict[Urgency, deque[CopyJob]] = {urgency: deque() for urgency in sorted(Urgency)}
        self._under_way: deque[_Sent] = deque()
        self._bound = False

    def queued(self, urgency: Urgency) -> int:
        """Number of jobs of a class not yet submitted to the device completely. With the lock held."""
        return len(self._queues[urgency])

    def put(self, job: CopyJob) -> None:
        """Queue `job`. With the lock held."""
        self._queues[job.transfer.urgency].append(job)
        self._lock.notify()

    def close(self) -> None:
        """Release the resources of the stream, once `serve` has returned."""
        self._stream.close()

    def serve(self) -> Generator[WaitCondition, None, None]:
        """Run until the board is closing and no job is left."""
        try:
            yield from self._steps()
        except Exception:  # noqa: BLE001 - a fault of ours, or of the clock: jobs must end all the same
            _log.exception(
                "transfer lane %s failed; transfer engine closed, nothing is stored or loaded; restart the engine",
                self.name,
            )
            self._give_up()

    def _steps(self) -> Iterator[WaitCondition]:
        while True:
            yield WaitCondition(self._has_work)
            with self._lock:
                job = self._next()
                stopped = None if job is None else self._board.why_stop(job)
            if job is not None:
                self._take_step(job, stopped)
            elif self._under_way:
                sent = self._under_way[0]
                if sent.copy is not None:
                    yield WaitCondition(sent.copy.passed, is_device=True)
                self._retire(sent)
            else:
                return

    def _has_work(self) -> bool:
        return bool(self._under_way) or self._next() is not None or self._board.closing

    def _next(self) -> CopyJob | None:
        """The job whose step is to be taken next; `None` when none can go on."""
        if len(self._under_way) >= self._stream.depth:
            return None
        heads = (queue[0] for queue in self._queues.values() if queue)
        return next((job for job in heads if self._can_go_on(job)), None)

    def _can_go_on(self, job: CopyJob) -> bool:
        return self._board.may_begin(job) or self._board.why_stop(job) is not None

    def _take_step(self, job: CopyJob, stopped: Status | None) -> None:
        """Give the next piece of `job` to the device, unless it is `stopped`: then it ends here."""
        step: CopyStep | None = None
        copy: Copy | None = None
        if stopped is None:
            try:
                step, copy = self._send(job)
            except Exception as error:  # noqa: BLE001 - whatever the device raises ends this job, never the lane
                stopped = self._failed(job, error)
        with self._lock:
            job.stopped = stopped
            job.handed = stopped is not None or job.ahead is None
            if copy is not None:
                job.reached = copy.reached
            job.layers |= dict.fromkeys(step.completes if step is not None else (), job.reached)
            if job.handed:
                self._queues[job.transfer.urgency].popleft()
            nbytes = 0 if step is None or step.batch is None else step.batch.nbytes
            self._under_way.append(_Sent(job, copy, nbytes, job.handed))
            self._lock.notify()

    def _send(self, job: CopyJob) -> tuple[CopyStep | None, Copy | None]:
        """Give the next step of `job` to the device."""
        if not self._bound:
            self._stream.bind()
            self._bound = True
        if job.begun is None:
            if job.transfer.route.destination == HOST:
                zero_padding(job.selection, self._stream.zero)
            job.begin(self._board.clock(), self._board.max_batch_bytes)
        step, copy = job.ahead, None
        if step is not None and step.batch is not None:
            copy = self._stream.copy(step.batch, job.fences)
        job.advance()
        return step, copy

    def _failed(self, job: CopyJob, error: Exception) -> Status:
        """What `error` means for `job`. When this returns, nothing that was begun is still under way."""
        is_freed = isinstance(error, FreedLayoutError)
        if not is_freed:
            _log.error("transfer job %d (%s) failed", job.transfer.job, job.transfer.route, exc_info=error)
        try:
            self._stream.drain()
        except Exception:  # noqa: BLE001 - the job has failed anyway
            _log.exception("device synchronization failed after a failed copy of %s", job.transfer.route)
        return Status.TIER_OFF if is_freed else Status.IO_ERROR

    def _give_up(self) -> None:
        """End all jobs as failed, once nothing of them is under way."""
        with contextlib.suppress(Exception):
            self._stream.drain()
        with self._lock:
            self._board.closing = True
            jobs = [sent.job for sent in self._under_way if sent.is_last]
            jobs += [job for queue in self._queues.values() for job in queue]
            for job in jobs:
                job.stopped, job.handed = Status.IO_ERROR, True
                self._board.end(job)
            self._queues = {urgency: deque() for urgency in self._queues}
            self._lock.notify()

    def _retire(self, sent: _Sent) -> None:
        """Take in the oldest step, which is in place or failed; end its job if it was the last."""
        job, failed, seconds = sent.job, None, 0.0
        try:
            if sent.copy is not None:
                seconds = sent.copy.finish()
        except Exception as error:  # noqa: BLE001 - as above; what was copied may not have arrived
            failed = self._failed(job, error)
        with self._lock:
            self._under_way.popleft()
            job.seconds += seconds
            job.arrived += sent.nbytes
            job.stopped = failed or job.stopped
            if sent.is_last:
                self._board.end(job)
            self._lock.notify()


def zero_padding(selection: Selection, zero: Callable[[int, int], None]) -> None:
    """Call `zero` (address, bytes) for the padding of the images that are written, which may have old bytes."""
    layout = selection.whole.layout
    begin = 0
    for index, items in selection.sections:
        group = layout.groups[index]
        padding = group.part_bytes - group.used_bytes
        if padding:
            first = selection.whole.host_address + layout.rank * group.part_bytes + group.used_bytes
            for image in selection.images[begin : begin + items].tolist():
                zero(first + image, padding)
        begin += items
