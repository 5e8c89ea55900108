"""Asynchronous I/O between memory and the segment, many pieces at once: the interface under the executor.

    executor ──submit──► queue ~~~ disk ~~~► reap ──► executor
                           │
                           ├─ AioQueue      Linux's asynchronous I/O (`aio.py`): no thread waits for the disk
                           └─ ThreadQueue   threads that make plain calls: where there is none, and for cuFile

A queue moves bytes and reports how many. The executor retries short, interrupted and refused pieces.

The executor is given tasks: operations of a batch that are carried out together, whose adjacent records move as one.

    batch    slots 7 3 9 4 5   ──►   one task   3 4 5 7 9   ──►   pieces   3 4 5 │ 7 │ 9

The chunks of a prompt are written in order, mostly into adjacent slots, and read together. A disk moves one large piece
faster than as many bytes in small ones, with less processor time; locks and system calls are paid once per task.
"""

from __future__ import annotations

import errno
import itertools
import logging
import threading
from collections.abc import Callable, Generator, Sequence
from queue import SimpleQueue
from typing import NamedTuple, Protocol, TypeVar

from longshore.boundary import PAGE, Status
from longshore.errors import TierError
from longshore.tiers.base import Op, TierOp

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Piece(NamedTuple):
    """Memory that moves in one call, and the byte of the file that it begins at.

    With a `call` and no buffers, it is a blocking call for a thread of a `ThreadQueue`, which returns 0 or a negative
    error number.
    """

    buffers: list[memoryview]
    offset: int
    call: Callable[[], int] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(buffer.nbytes for buffer in self.buffers)

    def after(self, nbytes: int) -> Piece:
        """The piece without its first `nbytes`."""
        left = list(self.buffers)
        offset = self.offset + nbytes
        while left and nbytes >= left[0].nbytes:
            nbytes -= left.pop(0).nbytes
        if nbytes:
            left[0] = left[0][nbytes:]
        return Piece(left, offset)


class Move(NamedTuple):
    """Pieces to move between memory and the segment, in any order."""

    pieces: Sequence[Piece]
    writing: bool


Steps = Generator[Move, list[Status], T]
"""A generator that yields pieces to move, is sent a status for each, and returns its result."""


class IoQueue(Protocol):
    """Moves pieces of one file, for one thread; only `wake` may be called by others."""

    def submit(self, pieces: Sequence[Piece], /, *, writing: bool) -> list[int]:
        """Begin to move `pieces`. Returns their numbers, which identify them until `reap` has returned them."""

    def reap(self) -> list[tuple[int, int]]:
        """Wait until a piece has ended, or `wake` was called, since the last call.

        Returns numbers of pieces that have ended, with the bytes moved or a negative error number. An error other than
        `EINTR`, `EIO` or those of a full disk means that the queue did not accept the piece; a plain call may work.
        """

    def wake(self) -> None:
        """End `reap`, or the next one."""

    def close(self) -> None:
        """Wait for pieces in flight, and release all resources. Idempotent; also called in a forked child."""


class ThreadQueue:
    """A queue of `threads` threads, each of which moves one piece at a time with `move`, in order of submission.

    Raises `TierError` if the system gives fewer threads.
    """

    def __init__(self, move: Callable[..., int], threads: int, name: str) -> None:
        self._move = move
        self._numbers = itertools.count()
        self._submitted: SimpleQueue[tuple[int, Piece, bool] | None] = SimpleQueue()
        self._ended: SimpleQueue[tuple[int, int] | None] = SimpleQueue()
        # Daemons: a process that ends without close must not wait for a stuck device.
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{index}", daemon=True) for index in range(threads)
        ]
        for started, thread in enumerate(self._threads):
            try:
                thread.start()
            except RuntimeError as error:
                del self._threads[started:]
                self.close()
                raise TierError(f"expected {threads} threads, the system gave {started}: {error}") from error

    def submit(self, pieces: Sequence[Piece], /, *, writing: bool) -> list[int]:
        """As `IoQueue.submit`."""
        numbers = [next(self._numbers) for _ in pieces]
        for number, piece in zip(numbers, pieces, strict=True):
            self._submitted.put((number, piece, writing))
        return numbers

    def reap(self) -> list[tuple[int, int]]:
        """As `IoQueue.reap`."""
        ended = [self._ended.get()]
        while not self._ended.empty():
            ended.append(self._ended.get())
        return [each for each in ended if each is not None]

    def wake(self) -> None:
        """As `IoQueue.wake`."""
        self._ended.put(None)

    def close(self) -> None:
        """As `IoQueue.close`."""
        alive = [thread for thread in self._threads if thread.is_alive()]  # none, in a forked child
        for _ in alive:
            self._submitted.put(None)
        for thread in alive:
            thread.join()

    def _work(self) -> None:
        while (submitted := self._submitted.get()) is not None:
            number, piece, writing = submitted
            try:
                moved = self._move(piece, writing=writing) if piece.call is None else piece.call()
            except Exception:  # noqa: BLE001 - the piece must end
                _log.exception("internal error of the file tier: I/O at byte %d failed; report this", piece.offset)
                moved = -errno.EIO
            self._ended.put((number, moved))


TASK_BYTES = 8 << 20
"""Of images in one task. With 2 MiB, more processor time goes into handing over; more than 8 MiB were no better."""

TASK_RECORDS = 32
"""In one task, at most."""

Task = tuple[int, ...]
"""Positions in the batch, in the order of their records."""


def coalesce(batch: Sequence[TierOp], place: Callable[[TierOp], int], joins: Callable[[TierOp], bool]) -> list[Task]:
    """The tasks of `batch`, each position in one; the operations of each are of one kind, and of one generation.

    `place` is the byte where a record begins; `joins` says whether one can be moved together with others.
    """
    if len(batch) == 1:
        return [(0,)]
    order = sorted((op.op is Op.WRITE, place(op), at) for at, op in enumerate(batch))
    tasks: list[list[int]] = []
    kind = None  # of the operations in the task that may go on
    nbytes = 0  # of its images
    for _, _, at in order:
        op = batch[at]
        mine = (op.op, op.generation) if joins(op) else None
        fits = nbytes + op.length <= TASK_BYTES and mine is not None
        if fits and mine == kind and len(tasks[-1]) < TASK_RECORDS:
            tasks[-1].append(at)
        else:
            tasks.append([at])
            kind, nbytes = mine, 0
        nbytes += op.length
    return [tuple(task) for task in tasks]


def move_records(
    headers: Sequence[memoryview], bodies: Sequence[memoryview], places: Sequence[int], *, writing: bool
) -> Steps[list[Status]]:
    """Move records to or from `places`, ascending: neighbours as one piece. One status each."""
    pieces: list[Piece] = []
    piece_of: list[int] = []
    end = -1
    for header, body, place in zip(headers, bodies, places, strict=False):
        if place == end:
            pieces[-1].buffers.extend((header, body))
        else:
            pieces.append(Piece([header, body], place))
        piece_of.append(len(pieces) - 1)
        end = place + PAGE + len(body)
    statuses = yield Move(pieces, writing)
    return [statuses[piece] for piece in piece_of]
