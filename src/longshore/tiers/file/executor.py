"""The executor of a file tier: one thread that carries out batches over an I/O queue (`io.py`).

    submit ──► reads  ─┐
               writes ─┴─► take ─► run_task ─► pieces ──► queue ~~~ disk ~~~► pieces ─► run_task ─► ended ──► poll
                            ▲                                                             │
                            └────────────── there is room in the window again ────────────┘

Queued reads overtake queued writes, since a request waits for the former and none for the latter; every eighth pick
takes the oldest write, so that those go on under a constant load of reads. A deadline, a cancellation or a close ends
queued operations at once, even while the disk is stuck.

The thread alternates between submitting a task and continuing a completed one, so the disk is busy while checksums are
verified. One thread verifies more than a disk delivers, without contention. Several threads, each of which releases the
interpreter lock for each checksum, wait for that lock up to ten times as long as they work.

The executor is given tasks: operations of a batch that are carried out together, whose adjacent records move as one.

    batch    slots 7 3 9 4 5   ──►   one task   3 4 5 7 9   ──►   pieces   3 4 5 │ 7 │ 9

The chunks of a prompt are written in order, mostly into adjacent slots, and read together. A disk moves one large piece
faster than as many bytes in small ones, with less processor time; locks and system calls are paid once per task.
"""

from __future__ import annotations

import errno
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from longshore.boundary import DISK_PAGE, Status
from longshore.errors import TierClosedError, TierError, log_seldom
from longshore.tiers.base import Op, OpBatch, TierOp, TierResult
from longshore.tiers.file.io import BROKEN, IoCoroutine, IoQueue, Piece
from longshore.tiers.file.segment import FULL, Segment, Staging

_log = logging.getLogger(__name__)

WINDOW_TASKS = 16
"""Largest number of tasks in flight."""

READ_WINDOW, WRITE_WINDOW = 24 << 20, 64 << 20
"""Bytes of images in flight to be read, and to be written; one task more of each is possible.

A disk may complete all submitted reads at once; with a window, reads of a long prompt are verified while others move.
"""

AHEAD = 2
"""Tasks prepared before there is room in the window, because their checksums take time."""

_READS_IN_A_ROW = 7

_INTERRUPTIONS = 100
"""Consecutive interruptions after which a piece has failed."""

_ANSWERS = FULL | {errno.EIO, errno.EINTR, BROKEN}
"""Errors of a call that was made; another one means that the queue did not take the piece."""

_FAILURES = dict.fromkeys(FULL, Status.NO_SPACE) | {BROKEN: Status.INTERNAL_ERROR}

_MOMENT = 1e-6
"""Seconds of sleep between tasks that completed together, so that the polling thread gets the interpreter lock.

A checksum of a short image releases the lock for less time than another thread needs to wake up. Without the sleep,
results are polled only after all tasks, and the disk is idle meanwhile.
"""


TASK_BYTES = 8 << 20
"""Largest number of image bytes in one task. 2 MiB took more processor time; more than 8 MiB were no faster."""

TASK_RECORDS = 32
"""In one task, at most."""

OpIndices = tuple[int, ...]
"""The operations of a task: their indices in the batch, in the order of their records."""


def coalesce(
    batch: Sequence[TierOp], file_offset: Callable[[TierOp], int], can_coalesce: Callable[[TierOp], bool]
) -> list[OpIndices]:
    """The tasks of `batch`, each operation in one; the operations of each are of one kind, and of one generation.

    `file_offset` says where a record begins; `can_coalesce` says whether one can be moved together with others.
    """
    if len(batch) == 1:
        return [(0,)]
    order = sorted((op.op is Op.WRITE, file_offset(op), index) for index, op in enumerate(batch))
    tasks: list[list[int]] = []
    kind = None  # of the operations in the task that may go on
    nbytes = 0  # of its images
    for _, _, index in order:
        op = batch[index]
        mine = (op.op, op.generation) if can_coalesce(op) else None
        fits = nbytes + op.length <= TASK_BYTES and mine is not None
        if fits and mine == kind and len(tasks[-1]) < TASK_RECORDS:
            tasks[-1].append(index)
        else:
            tasks.append([index])
            kind, nbytes = mine, 0
        nbytes += op.length
    return [tuple(task) for task in tasks]


class NumberedOp(NamedTuple):
    """An operation, and its serial number: its position among all that were submitted."""

    op: TierOp
    serial: int


class Executor:
    """Carries out batches, as many tasks at once as there are `stagings`.

    Public methods are thread-safe; the others run in the executor's thread.

    Attributes:
        completed: Number of operations that were carried out.
        on_batch_end: Called, with the lock held, when a batch has ended; what it raises is logged.
    """

    def __init__(
        self,
        queue: IoQueue,
        segment: Segment,
        run_task: Callable[[Sequence[NumberedOp], Staging], IoCoroutine[Sequence[Status]]],
        stagings: Sequence[Staging],
        name: str,
        *,
        depth: float = math.inf,
    ) -> None:
        """Raises `TierError` if there is no thread.

        `run_task` carries out the operations of a task and returns a status for each. `depth`: with as many pieces in
        the queue, no further task is submitted. The queue is closed with this.
        """
        self.completed = 0
        self.on_batch_end: Callable[[], None] = lambda: None
        self._queue = queue
        self._segment = segment
        self._run_task = run_task
        self._depth = depth
        # With the lock: what was submitted.
        self._lock = threading.RLock()
        self._reads: deque[_Task] = deque()
        self._writes: deque[_Task] = deque()
        self._reads_in_a_row = 0
        self._open: dict[int, OpBatch] = {}
        self._earliest = math.inf  # no open batch has a deadline before this one
        self._results: list[TierResult] = []
        self._tickets = 0
        self._serials = 0
        self._closed = False
        # By the thread alone: what has begun.
        self._stagings = list(stagings)
        self._begun: set[_Task] = set()
        self._ready: deque[_Task] = deque()  # to be moved when there is room
        self._moving: dict[int, tuple[_Task, int]] = {}  # by the queue's number, which piece of which
        self._completed: deque[_Task] = deque()
        self._room = {False: READ_WINDOW, True: WRITE_WINDOW}  # in bytes, by whether they are written
        # A daemon: Python does not wait for it when a process ends without close.
        self._thread = threading.Thread(target=self._work, name=f"{name}-queue", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            queue.close()
            raise TierError(f"{name}: cannot start thread: {error}") from error

    def submit(self, ops: Sequence[TierOp], tasks: Sequence[OpIndices], deadline: float) -> int:
        """Queue checked `ops`, all of them in `tasks`, each of one kind; a ticket."""
        with self._lock:
            if self._closed:
                raise TierClosedError("the tier was closed")
            now = time.monotonic()
            batch = OpBatch(self._tickets, ops, deadline, now)
            self._tickets += 1
            self._open[batch.ticket] = batch
            self._earliest = min(self._earliest, deadline)
            if batch.late(now):
                batch.end_pending(Status.DEADLINE, now)
            else:
                for task in tasks:
                    queue = self._reads if ops[task[0]].op is Op.READ else self._writes
                    queue.append(_Task(batch, task, self._serials))
            self._serials += len(ops)
            self._report_if_ended(batch)
            self._queue.wake()
            return batch.ticket

    def poll(self) -> list[TierResult]:
        """Results since the last call."""
        with self._lock:
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
        """End operations of `ticket` that have not begun."""
        with self._lock:
            if ticket in self._open:
                self._end_pending(self._open[ticket], Status.CANCELLED)

    def close(self) -> None:
        """End tasks that have not begun, wait for the others and for the thread; submits are refused. Idempotent."""
        self._stop()
        self._thread.join()
        self._queue.close()

    def _stop(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                for batch in list(self._open.values()):
                    self._end_pending(batch, Status.TIER_OFF)
                self._queue.wake()

    def _end_pending(self, batch: OpBatch, status: Status) -> None:
        if batch.end_pending(status, time.monotonic()):
            self._reads = deque(task for task in self._reads if task.pending)
            self._writes = deque(task for task in self._writes if task.pending)
            self._report_if_ended(batch)

    def _report_if_ended(self, batch: OpBatch) -> None:
        if batch.ended:
            del self._open[batch.ticket]
            self._results.append(batch.result())
            try:
                self.on_batch_end()
            except Exception:  # noqa: BLE001 - the batch has ended all the same
                message = "file tier: the callback of batch %d raised; its results wait for the next poll; report this"
                _log.exception(message, batch.ticket)

    # ------------------------------------------------------------------ the thread

    def _work(self) -> None:
        try:
            self._run()
        except Exception as error:  # noqa: BLE001 - callers would wait for the batches forever
            _log.exception(
                "file tier disabled: asynchronous I/O queue failed (%s: %s); restart the process to re-enable it",
                type(error).__name__,
                error,
            )
            self._stop()
            self._queue.close()  # waits for I/O in flight; only then may its memory be reused
            for task in list(self._begun):
                self._end(task, [_status_of(error)] * len(task.indices))

    def _run(self) -> None:
        while True:
            self._submit_ready()
            begun = self._begin_next()
            if self._completed:
                self._continue(self._completed.popleft())
            elif not begun:
                if self._closed and not self._moving:
                    return
                ended = [(*self._moving.pop(number), moved) for number, moved in self._queue.reap()]
                for task, index, moved in ended:  # their numbers may be reused from here on
                    self._arrive(task, index, moved)

    def _begin_next(self) -> bool:
        """Begin the next task, if there is one and room to prepare it. Returns whether one began."""
        if not self._stagings or len(self._ready) >= AHEAD or (task := self._take()) is None:
            return False
        task.staging = self._stagings.pop()
        task.coroutine = self._run_task(task.ops, task.staging)
        self._begun.add(task)
        self._continue(task)
        self._submit_ready()
        return True

    def _take(self) -> _Task | None:
        with self._lock:
            while self._reads or self._writes:
                task, now = self._next(), time.monotonic()
                if not task.batch.late(now):
                    task.begin(now)
                    return task
                task.end([Status.DEADLINE] * len(task.indices), now)
                self._report_if_ended(task.batch)
        return None

    def _next(self) -> _Task:
        if self._reads and not (self._writes and self._reads_in_a_row >= _READS_IN_A_ROW):
            self._reads_in_a_row += 1
            return self._reads.popleft()
        self._reads_in_a_row = 0
        return self._writes.popleft()

    def _continue(self, task: _Task) -> None:
        """Continue a task up to its next pieces, or to its end."""
        try:
            task.advance()
        except StopIteration as end:
            self._end(task, end.value)
        except Exception as error:  # noqa: BLE001 - the batch must end
            self._fail(task, error)
        else:
            self._ready.append(task)

    def _submit_ready(self) -> None:
        """Submit ready tasks that the window has room for."""
        waiting, self._ready = self._ready, deque()
        for task in waiting:
            if self._room[task.writing] <= 0 or len(self._moving) >= self._depth:
                self._ready.append(task)
                continue
            try:
                numbers = self._queue.submit(task.pieces, writing=task.writing)
            except Exception as error:  # noqa: BLE001 - as above
                self._fail(task, error)
            else:
                self._room[task.writing] -= task.nbytes
                self._moving.update((number, (task, index)) for index, number in enumerate(numbers))

    def _arrive(self, task: _Task, index: int, moved: int) -> None:
        """A piece has ended after `moved` bytes; submit the rest, if it can be retried."""
        piece, size = task.pieces[index], task.pieces[index].nbytes
        if moved < 0 and -moved not in _ANSWERS:
            moved = self._segment.move(piece, writing=task.writing)
        if moved >= size:
            status = Status.OK
        elif (rest := task.rest(index, moved, DISK_PAGE if self._segment.direct else 1)) is not None:
            (number,) = self._queue.submit([rest], writing=task.writing)
            self._moving[number] = task, index
            return
        elif moved >= 0:
            status = Status.IO_ERROR if task.writing else Status.SHORT
        else:
            status = _FAILURES.get(-moved, Status.IO_ERROR)
        if task.arrive(index, status):
            self._room[task.writing] += task.nbytes
            self._completed.append(task)

    def _fail(self, task: _Task, error: Exception) -> None:
        """End a task that raised an unexpected `error`, while it is being handled."""
        op, count = task.ops[0].op, len(task.indices)
        message = "internal error of the file tier: a %s of %d slots from slot %d on failed; report this"
        log_seldom(_log, message, op.op.value, count, op.slot)
        self._end(task, [_status_of(error)] * count)

    def _end(self, task: _Task, statuses: Sequence[Status]) -> None:
        self._begun.remove(task)
        self._stagings.append(task.staging)
        with self._lock:
            task.end(statuses, time.monotonic())
            self.completed += len(task.indices)
            self._report_if_ended(task.batch)
        if self._completed:
            time.sleep(_MOMENT)


def _status_of(error: Exception) -> Status:
    """Of operations that an unexpected `error` ended: the disk is to blame only for what the system says of it."""
    return Status.IO_ERROR if isinstance(error, OSError) else Status.INTERNAL_ERROR


class _Task:
    """The operations of a batch at `indices`: queued, then executed as a whole, or ended early as a whole.

    Attributes, once it has begun:
        ops: The operations.
        nbytes: Of their images.
        pieces: What is to be moved next, or what is left of it.
        writing: Whether those are written.
    """

    __slots__ = (
        "_first",
        "_left",
        "_retries_left",
        "_statuses",
        "batch",
        "coroutine",
        "indices",
        "nbytes",
        "ops",
        "pieces",
        "staging",
        "writing",
    )  # fmt: skip

    staging: Staging
    coroutine: IoCoroutine[Sequence[Status]]

    def __init__(self, batch: OpBatch, indices: OpIndices, first: int) -> None:
        self.batch = batch
        self.indices = indices
        self._first = first
        self._statuses: list[Status] = []  # before it has begun

    @property
    def pending(self) -> bool:
        """Whether it can be begun."""
        return self.batch.pending(self.indices[0])

    def begin(self, now: float) -> None:
        """Record that all operations begin."""
        for each in self.indices:
            self.batch.begin(each, now)
        self.ops = [NumberedOp(self.batch.ops[each], self._first + each) for each in self.indices]
        self.nbytes = sum(op.length for op, _ in self.ops)

    def end(self, statuses: Sequence[Status], now: float) -> None:
        """Record that all operations have ended."""
        for each, status in zip(self.indices, statuses, strict=True):
            self.batch.end(each, status, now)

    def advance(self) -> None:
        """Continue up to the next pieces; raises `StopIteration` with the statuses when there are none."""
        pieces, self.writing = self.coroutine.send(self._statuses) if self._statuses else next(self.coroutine)
        self.pieces = list(pieces)
        self._left = len(self.pieces)
        self._statuses = [Status.IO_ERROR] * self._left
        self._retries_left = [_INTERRUPTIONS] * self._left

    def rest(self, index: int, moved: int, page: int) -> Piece | None:
        """The rest of a piece after `moved` bytes; `None` if it must not be retried.

        Direct I/O continues from the start of a `page`, whose first bytes move a second time.
        """
        if moved == -errno.EINTR and self._retries_left[index]:
            self._retries_left[index] -= 1
        elif moved >= page:
            self._retries_left[index] = _INTERRUPTIONS
            self.pieces[index] = self.pieces[index].after(moved // page * page)
        else:
            return None
        return self.pieces[index]

    def arrive(self, index: int, status: Status) -> bool:
        """Record the status of a piece; returns whether it was the last."""
        self._statuses[index] = status
        self._left -= 1
        return not self._left
