"""Many pieces in the disk at once, from one thread: Linux's asynchronous I/O (libaio's).

    submit: io_submit ──► disk ──► event ──► reap: io_getevents ──► bytes moved, each
                           wake ────┘

A thread that sleeps in `preadv` for each piece costs about as much processor time as the rest of the way of a short
image. The calls go through ctypes; the structures are those of linux/aio_abi.h on little-endian machines. Source of
their use: the manual pages io_setup(2), io_submit(2), io_getevents(2), io_destroy(2), eventfd(2).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import platform
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from longshore.tiers.file.queue import Piece

_log = logging.getLogger(__name__)


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
"""File systems of which `io_submit` does not wait for the disk. On others it may: then threads are faster."""

_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.argtypes = [ctypes.c_long] * 6
_syscall.restype = ctypes.c_long


def open_queue(fd: int, pieces: int, buffers: int) -> AioQueue | None:
    """Asynchronous I/O for `pieces` of at most `buffers`, where this system has it.

    Raises `OSError`: not compiled in, not allowed, fs.aio-max-nr, or a file system where `io_submit` may block.
    """
    calls = _CALLS.get(platform.machine()) if sys.platform == "linux" else None
    if calls is None:
        return None
    kind = file_system_of(fd)
    if kind not in _ASYNCHRONOUS:
        raise OSError(errno.EOPNOTSUPP, f"io_submit is not known to be asynchronous on {kind}")
    return AioQueue(calls, fd, pieces, buffers)


def file_system_of(fd: int) -> str:
    """Type of the file system that a file is on, as /proc/self/mountinfo names it (proc_pid_mountinfo(5))."""
    device = os.fstat(fd).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, _, what = line.partition(" - ")
        if mount.split()[2] == number:
            return what.split()[0]
    return "an unknown file system"


class AioQueue:
    """A context of the system's, and an event that it signals. For one thread, but for `wake`.

    A piece has the number of its place in the arrays that the system is told of it by.
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
        self._under_way: dict[int, None] = {}  # in order of submission
        self._refused: list[tuple[int, int]] = []
        self._has_warned = False
        self._event = os.eventfd(0)
        try:
            self._context: int | None = self._open_context(pieces)
        except OSError:
            os.close(self._event)
            raise

    def submit(self, pieces: Sequence[Piece], /, *, writing: bool) -> list[int]:
        """As `Queue.submit`."""
        given = self._free[-len(pieces) :]
        for at, (number, piece) in enumerate(zip(given, pieces, strict=True)):
            self._describe(number, piece, _PWRITEV if writing else _PREADV)
            self._pointers[at] = ctypes.addressof(self._controls) + number * _CONTROL.size
        del self._free[-len(pieces) :]
        self._under_way.update(dict.fromkeys(given))
        begun = 0
        try:
            while begun < len(given):
                left = ctypes.addressof(self._pointers) + 8 * begun
                begun += self._call(self._calls.submit, self._opened(), len(given) - begun, left)
        except OSError as error:
            self._refuse(given[begun:], error)
        return given

    def reap(self) -> list[tuple[int, int]]:
        """As `Queue.reap`."""
        os.read(self._event, 8)
        ended, self._refused = self._refused, []
        if self._under_way:
            ended += self._events_of_the_system()
        self._free += [number for number, _ in ended]
        return ended

    def wake(self) -> None:
        """As `Queue.wake`."""
        os.eventfd_write(self._event, 1)

    def close(self) -> None:
        """Wait for what is under way, and give all back. Idempotent; in a forked child, which has no context, too."""
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
        at_most = len(self._under_way)
        try:
            count = self._call(self._calls.getevents, self._opened(), 0, at_most, ctypes.addressof(self._events))
        except InterruptedError:
            self.wake()
            return []
        except OSError as error:  # nobody can say how they end: they must, before their memory is anybody else's
            self._close_context()
            self._refuse(list(self._under_way), error)
            ended, self._refused = self._refused, []
            return ended
        events = memoryview(self._events)[: count * _EVENT.size]
        ended = [(number, result) for number, _, result, _ in _EVENT.iter_unpack(events)]
        for number, _ in ended:
            del self._under_way[number]
        return ended

    def _refuse(self, numbers: Sequence[int], error: OSError) -> None:
        """They have failed; `reap` says so."""
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "asynchronous I/O was refused (%s); slower plain calls instead, now and whenever it is: check "
                "fs.aio-max-nr and memory. This is said once",
                error,
            )
        for number in numbers:
            del self._under_way[number]
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
