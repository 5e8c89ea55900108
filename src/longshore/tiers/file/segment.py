"""Input and output on one preallocated file: whole vectors, or an honest count; one by one, or several at once.

Direct I/O where the file system allows it, so that neither writes nor reads live off the page cache. Where it does not,
`Segment.direct` says so, and pages are dropped from the cache once they are on the medium.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Sequence

from longshore.boundary import Status
from longshore.errors import TierError
from longshore.tiers.arena import PAGE
from longshore.tiers.file.directory import SEGMENT, Directory
from longshore.tiers.file.system import Piece, Queue, patiently
from longshore.tiers.file.turns import TURN_RECORDS

Buffers = list[memoryview]

_log = logging.getLogger(__name__)

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


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
        self._has_warned = False
        try:
            self.direct = self._io.enable_direct(self._fd)
            if self.direct:
                self._queue = self._io.open_queue(self._fd, 2 * TURN_RECORDS)
        except OSError as error:
            self._io.close(self._fd)
            raise TierError(f"{directory.path / SEGMENT}: cannot be used: {error.strerror}") from error

    @property
    def fd(self) -> int:
        """The file's descriptor, for those who move its bytes by other calls."""
        return self._fd

    @property
    def has_queue(self) -> bool:
        """Whether several pieces are moved at once, and not one after the other."""
        return self._queue is not None

    def move(self, pieces: Sequence[Piece], *, writing: bool) -> list[Status]:
        """Whether each of `pieces`, of up to `TURN_RECORDS` records in all, was moved whole, or else why not.

        A single one is moved with all patience; of several, one that is interrupted or stops halfway has failed.
        """
        if len(pieces) == 1 or self._queue is None:
            return [self._move_one(piece, writing=writing) for piece in pieces]
        try:
            counts = self._queue.move(pieces, writing=writing)
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                _log.warning("each record goes by itself, several at once were refused (fs.aio-max-nr?): %s", error)
            return [status_of(error)] * len(pieces)
        short = Status.IO_ERROR if writing else Status.SHORT
        return [
            Status.OK if count == _size(piece.buffers) else short if count >= 0 else status_of(OSError(-count, ""))
            for piece, count in zip(pieces, counts, strict=True)
        ]

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
        """Give the descriptor back, and the queue. Idempotent."""
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


def _size(buffers: Buffers) -> int:
    return sum(buffer.nbytes for buffer in buffers)


def _drop(buffers: Buffers, nbytes: int) -> None:
    """Remove the first `nbytes` of `buffers`, in place."""
    while buffers and nbytes >= buffers[0].nbytes:
        nbytes -= buffers[0].nbytes
        del buffers[0]
    if nbytes:
        buffers[0] = buffers[0][nbytes:]
