"""Input and output on one preallocated file: whole vectors, or an honest count.

Direct I/O where the file system allows it, so that neither writes nor reads live off the page cache. Where it does not,
`Segment.direct` says so, and pages are dropped from the cache once they are on the medium.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Sequence
from typing import Protocol

from longshore.errors import TierError
from longshore.tiers.arena import PAGE
from longshore.tiers.file.directory import SEGMENT, Directory

Buffers = list[memoryview]

_INTERRUPTIONS = 100
"""A call that is interrupted more often than this in a row is an error, not bad luck."""


class RawIo(Protocol):
    """The two system calls that move images, as in `os`. Tests give their own to see every way they can end."""

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int:
        """Bytes read; 0 at the end of the file."""

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int:
        """Bytes written."""


class SystemIo:
    """`RawIo` of the operating system."""

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int:
        """`os.preadv`."""
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int:
        """`os.pwritev`."""
        return os.pwritev(fd, buffers, offset)


class Segment:
    """`nbytes` of a file, all of them allocated.

    Attributes:
        direct: Whether reads and writes bypass the page cache. Then addresses, offsets and lengths must be aligned
            to `PAGE`.
    """

    def __init__(self, directory: Directory, nbytes: int, io: RawIo, *, erase: bool) -> None:
        self.nbytes = nbytes
        self._io = io
        path = directory.path / SEGMENT
        self._fd = directory.open(SEGMENT, os.O_CREAT)
        try:
            _allocate(self._fd, nbytes, erase=erase, name=str(path))
            self.direct = _enable_direct(self._fd, io)
        except OSError as error:
            os.close(self._fd)
            raise TierError(f"{path}: cannot hold {nbytes} bytes: {error.strerror}") from error
        except BaseException:
            os.close(self._fd)
            raise

    def read(self, buffers: Buffers, offset: int) -> int:
        """Fill `buffers` from `offset`; fewer bytes than they hold only where the file ends."""
        done = self._move(self._io.preadv, buffers, offset)
        if not self.direct:
            os.posix_fadvise(self._fd, offset, done, os.POSIX_FADV_DONTNEED)
        return done

    def write(self, buffers: Buffers, offset: int) -> None:
        """Write all of `buffers` at `offset`."""
        total = _size(buffers)
        done = self._move(self._io.pwritev, buffers, offset)
        if done < total:
            raise OSError(errno.EIO, f"only {done} of {total} bytes were written")
        if not self.direct:
            # Only clean pages can be dropped. This is for the sake of memory, not of durability.
            os.fdatasync(self._fd)
            os.posix_fadvise(self._fd, offset, total, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Give the descriptor back. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _move(self, call: Callable[..., int], buffers: Buffers, offset: int) -> int:
        """Repeat `call` until all of `buffers` have been moved or nothing moves any more; bytes moved."""
        left = list(buffers)
        done = interruptions = 0
        while left:
            try:
                moved = call(self._fd, left, offset + done)
            except InterruptedError:
                interruptions += 1
                if interruptions > _INTERRUPTIONS:
                    raise
                continue
            interruptions = 0
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


def _allocate(fd: int, nbytes: int, *, erase: bool, name: str) -> None:
    """Make the file exactly `nbytes` long, with every block of it allocated, or as long as what was kept."""
    before = os.fstat(fd)
    space = os.fstatvfs(fd)
    free = space.f_bavail * space.f_frsize
    missing = nbytes - before.st_blocks * 512
    if missing > free:
        raise TierError(
            f"{name}: expected room for {missing} more bytes (capacity {nbytes}), the file system has {free} free"
        )
    kept = 0 if erase else min(before.st_size, nbytes)
    os.ftruncate(fd, kept)  # what comes back by allocation reads as zeros
    try:
        os.posix_fallocate(fd, 0, nbytes)
        os.fsync(fd)
    except OSError as error:
        os.ftruncate(fd, kept)
        raise TierError(
            f"{name}: could not allocate {nbytes} bytes ({kept} kept, {free} free): {error.strerror}"
        ) from error


def _enable_direct(fd: int, io: RawIo) -> bool:
    """Switch `fd` to direct I/O; whether a direct read then works."""
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_DIRECT)
        io.preadv(fd, [memoryview(mmap.mmap(-1, PAGE))], 0)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        fcntl.fcntl(fd, fcntl.F_SETFL, 0)
        return False
    return True
