"""Input and output on one preallocated file: whole vectors, or an honest count.

Direct I/O where the file system allows it, so that neither writes nor reads live off the page cache. Where it does not,
`Segment.direct` says so, and pages are dropped from the cache once they are on the medium.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable

from longshore.boundary import Status
from longshore.errors import TierError
from longshore.tiers.arena import PAGE
from longshore.tiers.file.directory import SEGMENT, Directory
from longshore.tiers.file.steps import Move
from longshore.tiers.file.system import Piece, Queue, patiently
from longshore.tiers.file.turns import TURN_RECORDS

Buffers = list[memoryview]

_log = logging.getLogger(__name__)

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_FINAL = _FULL | {errno.EIO}


class Segment:
    """At least `nbytes` of a file, all of them allocated.

    Attributes:
        direct: Whether reads and writes bypass the page cache. Then addresses, offsets and lengths must be aligned
            to `PAGE`.
    """

    def __init__(self, directory: Directory, nbytes: int) -> None:
        self._io = directory.io
        self._fd = directory.reserve(SEGMENT, nbytes)
        self._queue: Queue | None = None
        try:
            self.direct = self._io.enable_direct(self._fd)
        except OSError as error:
            self._io.close(self._fd)
            raise TierError(f"{directory.path / SEGMENT}: cannot be used: {error.strerror}") from error

    @property
    def fd(self) -> int:
        """The file's descriptor, for those who move its bytes by other calls."""
        return self._fd

    def open_queue(self, turns: int) -> Queue | None:
        """What moves many pieces at once, for so many turns; `None` where the system has none. Closed with this."""
        try:
            if self.direct:
                self._queue = self._io.open_queue(self._fd, turns * TURN_RECORDS, 2 * TURN_RECORDS)
        except OSError as error:
            _log.warning("no asynchronous I/O, threads instead (is fs.aio-max-nr used up?): %s", error.strerror)
        return self._queue

    def move(self, move: Move) -> list[Status]:
        """Whether each piece was moved whole, with all patience and one after the other, or else why not."""
        return [self._move_one(piece, writing=move.writing) for piece in move.pieces]

    def _move_one(self, piece: Piece, *, writing: bool) -> Status:
        try:
            if writing:
                self.write(*piece)
            elif self.read(*piece) < _size(piece.buffers):
                return Status.SHORT
        except OSError as error:
            _log.debug("%s of byte %d: %s", "write" if writing else "read", piece.offset, error)
            return status_of(error)
        return Status.OK

    def read(self, buffers: Buffers, offset: int) -> int:
        """Fill `buffers` from `offset`; fewer bytes than they hold only where the file ends."""
        done = self._move(self._io.preadv, buffers, offset)
        if not self.direct:
            self._io.drop_cache(self._fd, offset, done)
        return done

    def write(self, buffers: Buffers, offset: int) -> None:
        """Write all of `buffers` at `offset`."""
        total = _size(buffers)
        done = self._move(self._io.pwritev, buffers, offset)
        if done < total:
            raise OSError(errno.EIO, f"only {done} of {total} bytes were written")
        if not self.direct:
            # Only clean pages can be dropped. This is for the sake of memory, not of durability.
            self._io.fsync(self._fd)
            self._io.drop_cache(self._fd, offset, total)

    def close(self) -> None:
        """Give the descriptor back, and the queue, which nobody uses any more. Idempotent."""
        if self._queue is not None:
            self._queue.close()
            self._queue = None
        if self._fd >= 0:
            self._io.close(self._fd)
            self._fd = -1

    def _move(self, call: Callable[..., int], buffers: Buffers, offset: int) -> int:
        """Repeat `call` until all of `buffers` have been moved or nothing moves any more; bytes moved."""
        left = list(buffers)
        done = 0
        while left:
            moved = patiently(call, self._fd, left, offset + done)
            # Direct I/O must go on from an aligned place: what lies beyond it is moved a second time.
            step = moved if not self.direct or moved >= _size(left) else moved // PAGE * PAGE
            if step <= 0:
                break
            done += step
            _drop(left, step)
        return done


def status_of(error: OSError) -> Status:
    """What became of an operation that ended so."""
    return Status.NO_SPACE if error.errno in _FULL else Status.IO_ERROR


def outcome(piece: Piece, moved: int) -> Status | None:
    """What became of a piece of which a queue moved so many bytes, or which ended with an error number below zero.

    `None` where that is not the disk's last word: what was interrupted, refused or cut short may go well yet.
    """
    if moved < 0:
        return status_of(OSError(-moved, os.strerror(-moved))) if -moved in _FINAL else None
    return Status.OK if moved == _size(piece.buffers) else None


def _size(buffers: Buffers) -> int:
    return sum(buffer.nbytes for buffer in buffers)


def _drop(buffers: Buffers, nbytes: int) -> None:
    """Remove the first `nbytes` of `buffers`, in place."""
    while buffers and nbytes >= buffers[0].nbytes:
        nbytes -= buffers[0].nbytes
        del buffers[0]
    if nbytes:
        buffers[0] = buffers[0][nbytes:]
