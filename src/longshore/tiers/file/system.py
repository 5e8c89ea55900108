"""What the file tier asks of the operating system, in one place: tests put another disk here, whole.

Every call is as in `os`, and fails as there, with an `OSError`; but `close` never does. Nothing else in
`longshore.tiers.file` reaches a file.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from longshore.boundary import PAGE
from longshore.tiers.file import aio
from longshore.tiers.file.queue import IoQueue

T = TypeVar("T")

_log = logging.getLogger(__name__)

_INTERRUPTIONS = 100
"""A call that is interrupted more often than this in a row is an error, not bad luck."""

_NEVER_THROUGH_A_LINK = os.O_NOFOLLOW | os.O_CLOEXEC


class RawIo(Protocol):
    """The system calls of a file tier. `preadv`, `pwritev` and a queue move images; the others keep the books."""

    def open_directory(self, path: Path, /, *, create: bool) -> int:
        """A descriptor of a directory, which may be made, with its parents, when it does not exist."""

    def open(self, name: str, directory: int, /, *, create: bool) -> int:
        """A descriptor, for reading and writing, of a file in `directory`; mode 0600 if it is made here."""

    def close(self, fd: int, /) -> None:
        """`os.close`; the descriptor is gone then, whatever the system has to say, and nobody can be told."""

    def fstat(self, fd: int, /) -> os.stat_result:
        """`os.fstat`."""

    def fchmod(self, fd: int, mode: int, /) -> None:
        """`os.fchmod`."""

    def lock(self, fd: int, /) -> bool:
        """Lock a file for this process, until it closes the file or ends; whether that could be had at once."""

    def pread(self, fd: int, nbytes: int, offset: int, /) -> bytes:
        """`os.pread`."""

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int, /) -> int:
        """`os.pwrite`."""

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int:
        """Bytes read; 0 at the end of the file."""

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int:
        """Bytes written."""

    def fsync(self, fd: int, /) -> None:
        """`os.fsync`, of a file or a directory."""

    def ftruncate(self, fd: int, nbytes: int, /) -> None:
        """`os.ftruncate`."""

    def allocate(self, fd: int, nbytes: int, /) -> None:
        """Have the first `nbytes` of a file allocated; what was not there reads as zeros."""

    def free_bytes(self, fd: int, /) -> int:
        """What the file system of `fd` has free for us."""

    def enable_direct(self, fd: int, /) -> bool:
        """Switch `fd` to direct I/O; whether it can."""

    def open_queue(self, fd: int, pieces: int, buffers: int, /) -> IoQueue | None:
        """For a file with direct I/O, and so many pieces of so many buffers; `None` where there is none."""

    def drop_cache(self, fd: int, offset: int, nbytes: int, /) -> None:
        """Have the page cache let go of a range of a file that is on the medium."""


class SystemIo:
    """`RawIo` of the operating system."""

    fstat = staticmethod(os.fstat)
    fchmod = staticmethod(os.fchmod)
    pread = staticmethod(os.pread)
    ftruncate = staticmethod(os.ftruncate)

    def open_directory(self, path: Path, /, *, create: bool) -> int:
        """`Path.mkdir`, `os.open`."""
        if create:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | _NEVER_THROUGH_A_LINK)

    def open(self, name: str, directory: int, /, *, create: bool) -> int:
        """`os.open`, never through a symbolic link, and without waiting for the other end of a pipe."""
        flags = os.O_RDWR | os.O_NONBLOCK | _NEVER_THROUGH_A_LINK | (os.O_CREAT if create else 0)
        return os.open(name, flags, 0o600, dir_fd=directory)

    def close(self, fd: int, /) -> None:
        """`os.close`. All that must last was synchronised before; what the system says of the rest goes to the log."""
        try:
            os.close(fd)
        except OSError as error:
            if error.errno == errno.EBADF:
                raise  # it was not ours: a mistake in here, and no trouble with the disk
            _log.warning("closing file descriptor %d failed: %s", fd, error)

    def lock(self, fd: int, /) -> bool:
        """A record lock: unlike `flock`'s it is the process's own, and a forked child does not keep it."""
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int, /) -> int:
        """`os.pwrite`."""
        return os.pwrite(fd, data, offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int:
        """`os.preadv`."""
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int:
        """`os.pwritev`."""
        return os.pwritev(fd, buffers, offset)

    def fsync(self, fd: int, /) -> None:
        """`os.fsync`."""
        os.fsync(fd)

    def allocate(self, fd: int, nbytes: int, /) -> None:
        """`os.posix_fallocate`."""
        os.posix_fallocate(fd, 0, nbytes)

    def free_bytes(self, fd: int, /) -> int:
        """`os.fstatvfs`."""
        space = os.fstatvfs(fd)
        return space.f_bavail * space.f_frsize

    def enable_direct(self, fd: int, /) -> bool:
        """`F_SETFL`, and a direct read to see whether it works."""
        try:
            fcntl.fcntl(fd, fcntl.F_SETFL, os.O_DIRECT)
            self.preadv(fd, [memoryview(mmap.mmap(-1, PAGE))], 0)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            fcntl.fcntl(fd, fcntl.F_SETFL, 0)
            return False
        return True

    def open_queue(self, fd: int, pieces: int, buffers: int, /) -> IoQueue | None:
        """Linux's asynchronous I/O; `None` on other systems, `OSError` where it is refused."""
        return aio.open_queue(fd, pieces, buffers)

    def drop_cache(self, fd: int, offset: int, nbytes: int, /) -> None:
        """`os.posix_fadvise`."""
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)


def read_all(io: RawIo, fd: int, nbytes: int, offset: int) -> bytes:
    """`nbytes` from `offset`, fewer only where the file ends."""
    parts: list[bytes] = []
    done = 0
    while done < nbytes:
        part = patiently(io.pread, fd, nbytes - done, offset + done)
        if not part:
            break
        parts.append(part)
        done += len(part)
    return b"".join(parts)


def read_into(io: RawIo, fd: int, buffer: memoryview, offset: int) -> int:
    """Fill `buffer` from `offset`; bytes read, fewer only where the file ends."""
    done = 0
    while done < len(buffer):
        moved = patiently(io.preadv, fd, [buffer[done:]], offset + done)
        if moved <= 0:
            break
        done += moved
    return done


def write_all(io: RawIo, fd: int, data: bytes | memoryview, offset: int) -> None:
    """All of `data` at `offset`; `OSError` if that cannot be had."""
    left = memoryview(data).cast("B")
    done = 0
    while done < len(left):
        written = patiently(io.pwrite, fd, left[done:], offset + done)
        if written <= 0:
            raise OSError(errno.EIO, f"only {done} of {len(left)} bytes were written")
        done += written


def patiently(call: Callable[..., T], *arguments: object) -> T:
    """What `call` gives once it is not interrupted; raises `InterruptedError` if that never seems to end."""
    for _ in range(_INTERRUPTIONS):
        try:
            return call(*arguments)
        except InterruptedError:
            continue
    return call(*arguments)
