"""What was submitted and has not ended: which turn is next, and how each operation ended.

    submit ──► reads  ─┐                      ┌──► ended batches ──► poll
               writes ─┴─► take ─► ... ─► end ─┘

Queued reads overtake queued writes, since a request waits for the former and none for the latter; every eighth pick
takes the oldest write, so that those go on under a constant load of reads. A deadline, a cancellation or a close
ends queued operations at once, even while whoever takes turns is stuck in the device.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from longshore.boundary import Status
from longshore.errors import TierClosedError
from longshore.tiers.base import Op, TierOp, TierResult
from longshore.tiers.file.turns import Turn
from longshore.tiers.ops import Batch

_log = logging.getLogger(__name__)

_READS_IN_A_ROW = 7


class Order(NamedTuple):
    """An operation, and its serial number in order of submission."""

    op: TierOp
    serial: int


class Job(NamedTuple):
    """A turn of a batch whose first operation has serial number `first`."""

    batch: Batch
    first: int
    turn: Turn

    @property
    def pending(self) -> bool:
        """Whether it can be begun: a turn begins, or is ended from outside, as a whole."""
        return self.batch.pending(self.turn[0])

    @property
    def orders(self) -> list[Order]:
        """Its operations."""
        return [Order(self.batch.ops[at], self.first + at) for at in self.turn]

    def begin(self, now: float) -> None:
        """All of them move from now on."""
        for at in self.turn:
            self.batch.begin(at, now)

    def end(self, statuses: Iterable[Status], now: float) -> None:
        """All of them are over."""
        for at, status in zip(self.turn, statuses, strict=True):
            self.batch.end(at, status, now)


class Dispatcher:
    """Batches, turn by turn, to whoever carries them out. Thread-safe.

    Attributes:
        ended: Operations that were carried out.
        wake: Called, with the lock held, when there may be something to take, and when this is closed.
        at_end: Called, with the lock held, when a batch has ended; what it raises is logged.
    """

    def __init__(self) -> None:
        self.ended = 0
        self.wake: Callable[[], None] = lambda: None
        self.at_end: Callable[[], None] = lambda: None
        self._changed = threading.Condition()
        self._reads: deque[Job] = deque()
        self._writes: deque[Job] = deque()
        self._picked_reads = 0
        self._open: dict[int, Batch] = {}
        self._earliest = math.inf  # no open batch has a deadline before this one
        self._results: list[TierResult] = []
        self._tickets = 0
        self._serials = 0
        self._closed = False

    def submit(self, ops: Sequence[TierOp], turns: Sequence[Turn], deadline: float) -> int:
        """Queue checked `ops`, all of them in `turns`, each of one kind; a ticket."""
        with self._changed:
            if self._closed:
                raise TierClosedError("the tier was closed")
            now = time.monotonic()
            batch = Batch(self._tickets, ops, deadline, now)
            self._tickets += 1
            self._open[batch.ticket] = batch
            self._earliest = min(self._earliest, deadline)
            if batch.late(now):
                batch.end_pending(Status.DEADLINE, now)
            self._enqueue(batch, turns)
            self._settle(batch)
            self._changed.notify(len(turns))
            self.wake()
            return batch.ticket

    def poll(self) -> list[TierResult]:
        """Results since the last call."""
        with self._changed:
            now = time.monotonic()
            if now > self._earliest:
                for batch in [batch for batch in self._open.values() if batch.late(now)]:
                    self._end_pending(batch, Status.DEADLINE)
                self._earliest = min(
                    (batch.deadline for batch in self._open.values() if not batch.late(now)), default=math.inf
                )
            results, self._results = self._results, []
            return results

    def cancel(self, ticket: int) -> None:
        """End what has not begun of `ticket`."""
        with self._changed:
            if ticket in self._open:
                self._end_pending(self._open[ticket], Status.CANCELLED)

    def close(self) -> None:
        """End what has not begun; nothing more can be submitted, nor taken. Idempotent."""
        with self._changed:
            if not self._closed:
                self._closed = True
                for batch in list(self._open.values()):
                    self._end_pending(batch, Status.TIER_OFF)
                self._changed.notify_all()
                self.wake()

    @property
    def closed(self) -> bool:
        """Whether it was."""
        return self._closed

    def take(self) -> Job | None:
        """The next turn, begun, if there is one."""
        with self._changed:
            return self._take()

    def wait(self) -> Job | None:
        """The next turn, begun, as soon as there is one; `None` when closed."""
        with self._changed:
            return self._wait()

    def end(self, job: Job, statuses: Sequence[Status]) -> None:
        """The operations of `job` ended so."""
        with self._changed:
            self._end(job, statuses)

    def end_and_wait(self, job: Job, statuses: Sequence[Status]) -> Job | None:
        """`end`, then `wait`, under one lock: threads are many, and images short."""
        with self._changed:
            self._end(job, statuses)
            return self._wait()

    def _end(self, job: Job, statuses: Sequence[Status]) -> None:
        job.end(statuses, time.monotonic())
        self.ended += len(job.turn)
        self._settle(job.batch)

    def _wait(self) -> Job | None:
        while (job := self._take()) is None and not self._closed:
            self._changed.wait()
        return job

    def _take(self) -> Job | None:
        while self._reads or self._writes:
            job = self._next()
            now = time.monotonic()
            if not job.batch.late(now):
                job.begin(now)
                return job
            job.end([Status.DEADLINE] * len(job.turn), now)
            self._settle(job.batch)
        return None

    def _next(self) -> Job:
        writes_turn = self._picked_reads >= _READS_IN_A_ROW
        if self._reads and not (self._writes and writes_turn):
            self._picked_reads += 1
            return self._reads.popleft()
        self._picked_reads = 0
        return self._writes.popleft()

    def _enqueue(self, batch: Batch, turns: Sequence[Turn]) -> None:
        for job in (Job(batch, self._serials, turn) for turn in turns):
            if job.pending:
                queue = self._reads if batch.ops[job.turn[0]].op is Op.READ else self._writes
                queue.append(job)
        self._serials += len(batch.ops)

    def _end_pending(self, batch: Batch, status: Status) -> None:
        if batch.end_pending(status, time.monotonic()):
            self._reads = deque(job for job in self._reads if job.pending)
            self._writes = deque(job for job in self._writes if job.pending)
            self._settle(batch)

    def _settle(self, batch: Batch) -> None:
        if batch.ended:
            del self._open[batch.ticket]
            self._results.append(batch.result())
            try:
                self.at_end()
            except Exception:  # noqa: BLE001 - the batch has ended, whatever its owner makes of that
                _log.exception("completion callback raised; batch %d is done", batch.ticket)
