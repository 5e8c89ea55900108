"""The file tier's I/O: system calls, and the queue that moves many pieces at once.

    RawIo          the calls that a file tier makes; SystemIo makes them, tests substitute a simulated disk

    executor ──submit──► IoQueue ~~~ disk ~~~► reap ──► executor
                           │
                           ├─ AioQueue      Linux's asynchronous I/O (io_submit, io_getevents): no thread waits
                           └─ ThreadQueue   threads that make plain calls: where there is none, and for cuFile

Calls behave as in `os` and raise `OSError`, except `close`, which never raises. Nothing else in `longshore.tiers.file`
calls the operating system for a file. A queue moves bytes and reports how many; the executor retries short, interrupted
and refused pieces.

A thread that sleeps in `preadv` for each piece costs about as much processor time as everything else that a short image
needs. `AioQueue` therefore calls the kernel with ctypes; the structures are those of linux/aio_abi.h on little-endian
machines. Sources: io_setup(2), io_submit(2), io_getevents(2), io_destroy(2), eventfd(2).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import itertools
import logging
import mmap
import os
import platform
import struct
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple, Protocol, TypeVar

from longshore.boundary import DISK_PAGE, Status
from longshore.errors import TierError, log_seldom

T = TypeVar("T")

BROKEN = 1 << 16
"""Beyond every error number of the system."""

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


IoCoroutine = Generator[Move, list[Status], T]
"""A generator that yields pieces to move, is sent a status for each, and returns its result."""


class IoQueue(Protocol):
    """Moves pieces of one file, for one thread; only `wake` may be called by others."""

    def submit(self, pieces: Sequence[Piece], /, *, writing: bool) -> list[int]:
        """Begin to move `pieces`. Returns their numbers, which identify them until `reap` has returned them."""

    def reap(self) -> list[tuple[int, int]]:
        """Wait until a piece has ended, or `wake` was called, since the last call.

        Returns numbers of pieces that have ended, with the bytes moved or a negative error number. An error other than
        `EINTR`, `EIO` or those of a full disk means that the queue did not accept the piece; a plain call may work.
        `BROKEN` is no error of the system: the call raised an exception that is not an `OSError`.
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
                raise TierError(f"{name}: cannot start thread {started + 1} of {threads}: {error}") from error

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
                log_seldom(_log, "internal error of the file tier: I/O at byte %d failed; report this", piece.offset)
                moved = -BROKEN
            self._ended.put((number, moved))


class _Calls(NamedTuple):
    """Numbers of the system calls."""

    setup: int
    destroy: int
    getevents: int
    submit: int


_CALLS = {"x86_64": _Calls(206, 207, 208, 209), "aarch64": _Calls(0, 1, 4, 2)}

_PREADV, _PWRITEV = 7, 8
_CONTROL = struct.Struct("<QIIHhIQQqQII")  # data, key, 0, operation, 0, fd, vectors, count, offset, 0, flags, event
_TELL_EVENT = 1  # a flag: IOCB_FLAG_RESFD
_VECTOR = struct.Struct("<QQ")  # address, bytes
_EVENT = struct.Struct("<QQqq")  # data, control block, result; unused

_ASYNCHRONOUS = frozenset({"ext4", "xfs"})
"""File systems where `io_submit` does not wait for the disk. On others it may, and threads are faster."""

_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.argtypes = [ctypes.c_long] * 6
_syscall.restype = ctypes.c_long


def open_aio_queue(fd: int, pieces: int, buffers: int) -> AioQueue | None:
    """A queue for `pieces` of at most `buffers` each; `None` if the system has no asynchronous I/O.

    Raises `OSError`: not compiled in, not allowed, fs.aio-max-nr, or a file system where `io_submit` may block.
    """
    calls = _CALLS.get(platform.machine()) if sys.platform == "linux" else None
    if calls is None:
        return None
    kind = file_system_of(os.fstat(fd).st_dev)
    if kind not in _ASYNCHRONOUS:
        raise OSError(errno.EOPNOTSUPP, f"io_submit is not known to be asynchronous on {kind}")
    return AioQueue(calls, fd, pieces, buffers)


def file_system_of(device: int) -> str:
    """Type of the file system with this `st_dev`, as /proc/self/mountinfo names it (proc_pid_mountinfo(5))."""
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, _, what = line.partition(" - ")
        if mount.split()[2] == number:
            return what.split()[0]
    return "an unknown file system"


def try_directory(directory: Path) -> tuple[bool, OSError | None]:
    """Whether files in `directory` have direct I/O, and if so, what asynchronous I/O fails with.

    Raises `OSError` if no file can be written there.
    """
    with tempfile.TemporaryFile(dir=directory) as file:
        file.write(bytes(DISK_PAGE))
        file.flush()
        if not SystemIo().enable_direct(file.fileno()):
            return False, None
        try:
            queue = open_aio_queue(file.fileno(), 1, 1)
        except OSError as error:
            return True, error
    if queue is None:
        return True, OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    queue.close()
    return True, None


class AioQueue:
    """An asynchronous I/O context of the kernel, and the eventfd that it signals. For one thread, except `wake`.

    The number of a piece is its position in the arrays of control blocks and vectors.
    """

    def __init__(self, calls: _Calls, fd: int, pieces: int, buffers: int) -> None:
        """Raises `OSError` where the system refuses."""
        self._calls = calls
        self._fd = fd
        self._controls = ctypes.create_string_buffer(pieces * _CONTROL.size)
        self._vectors = ctypes.create_string_buffer(pieces * buffers * _VECTOR.size)
        self._events = ctypes.create_string_buffer(pieces * _EVENT.size)
        self._pointers = (ctypes.c_uint64 * pieces)()
        self._vectors_each = buffers * _VECTOR.size
        self._free = list(range(pieces))
        self._in_flight: dict[int, None] = {}  # in order of submission
        self._refused: list[tuple[int, int]] = []
        self._is_warned = False
        self._event = os.eventfd(0)
        try:
            self._context: int | None = self._open_context(pieces)
        except OSError:
            os.close(self._event)
            raise

    def submit(self, pieces: Sequence[Piece], /, *, writing: bool) -> list[int]:
        """As `IoQueue.submit`."""
        given = self._free[-len(pieces) :]
        for at, (number, piece) in enumerate(zip(given, pieces, strict=True)):
            self._describe(number, piece, _PWRITEV if writing else _PREADV)
            self._pointers[at] = ctypes.addressof(self._controls) + number * _CONTROL.size
        del self._free[-len(pieces) :]
        self._in_flight.update(dict.fromkeys(given))
        begun = 0
        try:
            while begun < len(given):
                left = ctypes.addressof(self._pointers) + 8 * begun
                begun += self._call(self._calls.submit, self._opened(), len(given) - begun, left)
        except OSError as error:
            self._refuse(given[begun:], error)
        return given

    def reap(self) -> list[tuple[int, int]]:
        """As `IoQueue.reap`."""
        os.read(self._event, 8)
        ended, self._refused = self._refused, []
        if self._in_flight:
            ended += self._events_of_the_system()
        self._free += [number for number, _ in ended]
        return ended

    def wake(self) -> None:
        """As `IoQueue.wake`."""
        os.eventfd_write(self._event, 1)

    def close(self) -> None:
        """Wait for pieces in flight, and release all resources. Idempotent; a forked child has no context to close."""
        self._close_context()
        if self._event >= 0:
            os.close(self._event)
            self._event = -1

    def _describe(self, number: int, piece: Piece, operation: int) -> None:
        first = at = number * self._vectors_each
        for buffer in piece.buffers:
            _VECTOR.pack_into(self._vectors, at, ctypes.addressof(ctypes.c_char.from_buffer(buffer)), len(buffer))
            at += _VECTOR.size
        where = ctypes.addressof(self._vectors) + first, len(piece.buffers), piece.offset
        control = (number, 0, 0, operation, 0, self._fd, *where, 0, _TELL_EVENT, self._event)
        _CONTROL.pack_into(self._controls, number * _CONTROL.size, *control)

    def _events_of_the_system(self) -> list[tuple[int, int]]:
        at_most = len(self._in_flight)
        try:
            count = self._call(self._calls.getevents, self._opened(), 0, at_most, ctypes.addressof(self._events))
        except InterruptedError:
            self.wake()
            return []
        except OSError as error:  # results are lost: close the context, which waits, before the memory is reused
            self._close_context()
            self._refuse(list(self._in_flight), error)
            ended, self._refused = self._refused, []
            return ended
        events = memoryview(self._events)[: count * _EVENT.size]
        ended = [(number, result) for number, _, result, _ in _EVENT.iter_unpack(events)]
        for number, _ in ended:
            del self._in_flight[number]
        return ended

    def _refuse(self, numbers: Sequence[int], error: OSError) -> None:
        """End pieces that the system did not accept; `reap` returns them with the error."""
        if not self._is_warned:
            self._is_warned = True
            _log.warning(
                "asynchronous I/O refused (%s); using plain calls, which are slower: check fs.aio-max-nr and memory. "
                "Later refusals are not logged",
                error,
            )
        for number in numbers:
            del self._in_flight[number]
        self._refused += [(number, -(error.errno or errno.EAGAIN)) for number in numbers]
        self.wake()

    def _open_context(self, pieces: int) -> int:
        made = ctypes.c_ulong(0)
        self._call(self._calls.setup, pieces, ctypes.addressof(made))
        return made.value

    def _opened(self) -> int:
        """The context, a new one if it was closed. Raises `OSError`."""
        if self._context is None:
            self._context = self._open_context(len(self._pointers))
        return self._context

    def _close_context(self) -> None:
        if self._context is not None:
            with contextlib.suppress(OSError):  # a forked child has none
                self._call(self._calls.destroy, self._context)
            self._context = None

    def _call(self, number: int, *arguments: int) -> int:
        result = int(_syscall(number, *arguments, *[0] * (5 - len(arguments))))
        if result < 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        return result


_INTERRUPTIONS = 100
"""Consecutive interruptions of a call after which it has failed."""

_NEVER_THROUGH_A_LINK = os.O_NOFOLLOW | os.O_CLOEXEC


class RawIo(Protocol):
    """The system calls of a file tier. `preadv`, `pwritev` and the queue move images, the others metadata."""

    def open_directory(self, path: Path, /, *, create: bool) -> int:
        """A descriptor of a directory; with `create`, it is created with its parents if missing."""

    def open(self, name: str, directory: int, /, *, create: bool) -> int:
        """A descriptor, for reading and writing, of a file in `directory`; mode 0600 if it is created here."""

    def close(self, fd: int, /) -> None:
        """`os.close`; never raises. The descriptor is invalid afterwards, also after an error."""

    def fstat(self, fd: int, /) -> os.stat_result:
        """`os.fstat`."""

    def fchmod(self, fd: int, mode: int, /) -> None:
        """`os.fchmod`."""

    def lock(self, fd: int, /) -> bool:
        """Lock a file for this process, until it closes the file or ends. Does not wait; returns whether it could."""

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
        """Allocate the first `nbytes` of a file; new bytes read as zeros."""

    def free_bytes(self, fd: int, /) -> int:
        """Bytes of the file system of `fd` that this user can allocate."""

    def enable_direct(self, fd: int, /) -> bool:
        """Switch `fd` to direct I/O; returns whether that worked."""

    def open_queue(self, fd: int, pieces: int, buffers: int, /) -> IoQueue | None:
        """A queue for `pieces` of at most `buffers` each, for a file with direct I/O; `None` if there is none."""

    def drop_cache(self, fd: int, offset: int, nbytes: int, /) -> None:
        """Drop a synchronised range of a file from the page cache."""


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
        """`os.close`. Durable data was synchronised before, so an error is only logged."""
        try:
            os.close(fd)
        except OSError as error:
            if error.errno == errno.EBADF:
                raise  # it was not ours: a mistake in here, and no trouble with the disk
            _log.warning("closing file descriptor %d failed: %s; it stays open until the process ends", fd, error)

    def lock(self, fd: int, /) -> bool:
        """A record lock: unlike `flock`'s it belongs to the process, and a forked child does not inherit it."""
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
            self.preadv(fd, [memoryview(mmap.mmap(-1, DISK_PAGE))], 0)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            fcntl.fcntl(fd, fcntl.F_SETFL, 0)
            return False
        return True

    def open_queue(self, fd: int, pieces: int, buffers: int, /) -> IoQueue | None:
        """Linux's asynchronous I/O; `None` on other systems, `OSError` where it is refused."""
        return open_aio_queue(fd, pieces, buffers)

    def drop_cache(self, fd: int, offset: int, nbytes: int, /) -> None:
        """`os.posix_fadvise`."""
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)


def read_all(io: RawIo, fd: int, nbytes: int, offset: int) -> bytes:
    """Read `nbytes` from `offset`; fewer only at the end of the file."""
    parts: list[bytes] = []
    done = 0
    while done < nbytes:
        part = retry_interrupted(io.pread, fd, nbytes - done, offset + done)
        if not part:
            break
        parts.append(part)
        done += len(part)
    return b"".join(parts)


def read_into(io: RawIo, fd: int, buffer: memoryview, offset: int) -> int:
    """Fill `buffer` from `offset`; returns the bytes read, fewer only at the end of the file."""
    done = 0
    while done < len(buffer):
        moved = retry_interrupted(io.preadv, fd, [buffer[done:]], offset + done)
        if moved <= 0:
            break
        done += moved
    return done


def write_all(io: RawIo, fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data` at `offset`. Raises `OSError`."""
    left = memoryview(data).cast("B")
    done = 0
    while done < len(left):
        written = retry_interrupted(io.pwrite, fd, left[done:], offset + done)
        if written <= 0:
            raise OSError(errno.EIO, f"only {done} of {len(left)} bytes were written")
        done += written


def retry_interrupted(call: Callable[..., T], *arguments: object) -> T:
    """Retry `call` while it is interrupted; raises `InterruptedError` after too many interruptions."""
    for _ in range(_INTERRUPTIONS):
        try:
            return call(*arguments)
        except InterruptedError:
            continue
    return call(*arguments)
