"""Threads that carry out the operations of submitted batches, turn by turn, and the books that say how each one ended.

    submit ──► reads  ─┐                      ┌──► ended batches ──► poll
               writes ─┴─► worker 0 .. n-1 ───┘

Queued reads overtake queued writes, since a request waits for the former and none for the latter; every eighth pick
takes the oldest write, so that those go on under a constant load of reads. A deadline, a cancellation or a close
ends queued operations at once, even while every worker is stuck in the device.
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
from longshore.errors import TierClosedError, TierError
from longshore.tiers.base import Op, TierOp, TierResult
from longshore.tiers.file.turns import Turn
from longshore.tiers.ops import Batch

_log = logging.getLogger(__name__)

_READS_IN_A_ROW = 7


class Order(NamedTuple):
    """An operation, and its serial number in order of submission."""

    op: TierOp
    serial: int


Execute = Callable[[Sequence[Order], int], Sequence[Status]]
"""Carries out the operations of a turn, given the index of the worker; a status for each."""


class _Job(NamedTuple):
    """A turn of a batch whose first operation has serial number `first`."""

    batch: Batch
    first: int
    turn: Turn

    @property
    def pending(self) -> bool:
        return self.batch.pending(self.turn[0])  # a turn begins, or is ended from outside, as a whole

    @property
    def orders(self) -> list[Order]:
        return [Order(self.batch.ops[at], self.first + at) for at in self.turn]

    def begin(self, now: float) -> None:
        for at in self.turn:
            self.batch.begin(at, now)

    def end(self, statuses: Iterable[Status], now: float) -> None:
        for at, status in zip(self.turn, statuses, strict=True):
            self.batch.end(at, status, now)


class Workers:
    """`threads` workers that call `execute`, each with one turn at a time. Raises `TierError` if there are fewer."""

    def __init__(self, execute: Execute, threads: int, name: str) -> None:
        self._execute = execute
        self._changed = threading.Condition()
        self._reads: deque[_Job] = deque()
        self._writes: deque[_Job] = deque()
        self._picked_reads = 0
        self._open: dict[int, Batch] = {}
        self._earliest = math.inf  # no open batch has a deadline before this one
        self._results: list[TierResult] = []
        self._tickets = 0
        self._serials = 0
        self._closed = False
        self.ended = 0
        """Operations that workers have carried out."""
        # Daemons: a process that ends without close must not wait for a stuck device.
        self._threads = [
            threading.Thread(target=self._work, args=(index,), name=f"{name}-{index}", daemon=True)
            for index in range(threads)
        ]
        for started, thread in enumerate(self._threads):
            try:
                thread.start()
            except RuntimeError as error:
                del self._threads[started:]
                self.close()
                raise TierError(f"expected {threads} threads, the system gave {started}: {error}") from error

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
        """End what has not begun, wait for what has, and for the threads. Idempotent."""
        with self._changed:
            self._closed = True
            for batch in list(self._open.values()):
                self._end_pending(batch, Status.TIER_OFF)
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _enqueue(self, batch: Batch, turns: Sequence[Turn]) -> None:
        for job in (_Job(batch, self._serials, turn) for turn in turns):
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

    def _begin_next(self) -> _Job | None:
        """The next job, begun; waits for one; `None` when closed. With the lock held."""
        while True:
            while not (self._reads or self._writes):
                if self._closed:
                    return None
                self._changed.wait()
            job = self._next()
            now = time.monotonic()
            if not job.batch.late(now):
                job.begin(now)
                return job
            job.end([Status.DEADLINE] * len(job.turn), now)
            self._settle(job.batch)

    def _next(self) -> _Job:
        writes_turn = self._picked_reads >= _READS_IN_A_ROW
        if self._reads and not (self._writes and writes_turn):
            self._picked_reads += 1
            return self._reads.popleft()
        self._picked_reads = 0
        return self._writes.popleft()

    def _work(self, worker: int) -> None:
        with self._changed:
            job = self._begin_next()
        while job is not None:
            orders = job.orders
            try:
                statuses = self._execute(orders, worker)
            except Exception:  # noqa: BLE001 - a worker that died would leave its batch without a result
                op = orders[0].op
                _log.exception("unexpected error in %s of %d slots from %d on", op.op.value, len(orders), op.slot)
                statuses = [Status.IO_ERROR] * len(orders)
            with self._changed:  # once for the end of one and the begin of the next: threads are many, images short
                job.end(statuses, time.monotonic())
                self.ended += len(orders)
                self._settle(job.batch)
                job = self._begin_next()
