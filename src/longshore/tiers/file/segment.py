"""Input and output on one preallocated file: whole vectors, or an honest count.

Direct I/O where the file system allows it, so that neither writes nor reads live off the page cache. Where it does not,
`Segment.direct` says so, and pages are dropped from the cache once they are on the medium.
"""

from __future__ import annotations

import errno
from collections.abc import Callable

from longshore.errors import TierError
from longshore.tiers.arena import PAGE
from longshore.tiers.file.directory import SEGMENT, Directory
from longshore.tiers.file.system import patiently

Buffers = list[memoryview]


class Segment:
    """At least `nbytes` of a file, all of them allocated.

    Attributes:
        direct: Whether reads and writes bypass the page cache. Then addresses, offsets and lengths must be aligned
            to `PAGE`.
    """

    def __init__(self, directory: Directory, nbytes: int) -> None:
        self._io = directory.io
        self._fd = directory.reserve(SEGMENT, nbytes)
        try:
            self.direct = self._io.enable_direct(self._fd)
        except OSError as error:
            self._io.close(self._fd)
            raise TierError(f"{directory.path / SEGMENT}: cannot be used: {error.strerror}") from error

    @property
    def fd(self) -> int:
        """The file's descriptor, for those who move its bytes by other calls."""
        return self._fd

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
        """Give the descriptor back. Idempotent."""
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


def _size(buffers: Buffers) -> int:
    return sum(buffer.nbytes for buffer in buffers)


def _drop(buffers: Buffers, nbytes: int) -> None:
    """Remove the first `nbytes` of `buffers`, in place."""
    while buffers and nbytes >= buffers[0].nbytes:
        nbytes -= buffers[0].nbytes
        del buffers[0]
    if nbytes:
        buffers[0] = buffers[0][nbytes:]
