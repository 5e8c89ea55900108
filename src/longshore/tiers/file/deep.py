"""Many pieces in the disk at once, from one thread and with two system calls: Linux's asynchronous I/O (libaio's).

    pieces ──► io_submit ──► disk ──► io_getevents ──► bytes moved, each

A thread that sleeps in `preadv` for each piece costs about as much processor time as the rest of the way of a short
image. The calls go through ctypes; the structures are those of linux/aio_abi.h on little-endian machines. Source of
their use: the manual pages io_setup(2), io_submit(2), io_getevents(2), io_destroy(2).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Sequence
from typing import NamedTuple

from longshore.tiers.file.system import Piece, Queue, SystemIo


class _Numbers(NamedTuple):
    """Of the system calls."""

    setup: int
    destroy: int
    getevents: int
    submit: int


_NUMBERS = {"x86_64": _Numbers(206, 207, 208, 209), "aarch64": _Numbers(0, 1, 4, 2)}

_PREADV, _PWRITEV = 7, 8
_CONTROL = struct.Struct("<QIIHhIQQqQII")  # data, key, flags, operation, priority, fd, vectors, count, offset; unused
_VECTOR = struct.Struct("<QQ")  # address, bytes
_EVENT = struct.Struct("<QQqq")  # data, control block, result; unused

_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.argtypes = [ctypes.c_long] * 6
_syscall.restype = ctypes.c_long


class DeepIo(SystemIo):
    """`RawIo` of the operating system, with its queue."""

    def open_queue(self, fd: int, buffers: int, /) -> Queue | None:
        """Asynchronous I/O, where this system has it."""
        numbers = _NUMBERS.get(platform.machine()) if sys.platform == "linux" else None
        if numbers is None:
            return None
        queue = AioQueue(numbers, fd, buffers)
        try:
            queue.open_context()
        except OSError:  # not compiled in, not allowed, or none left
            return None
        return queue


class AioQueue:
    """A context of the system's for each thread that moves something, kept for the next one."""

    def __init__(self, numbers: _Numbers, fd: int, buffers: int) -> None:
        self._numbers = numbers
        self._fd = fd
        self._buffers = buffers
        self._idle: list[_Context] = []

    def open_context(self) -> None:
        """Have one ready. Raises `OSError` where the system refuses."""
        self._idle.append(_Context(self._numbers, self._fd, self._buffers))

    def move(self, pieces: Sequence[Piece], /, *, writing: bool) -> list[int]:
        """As `Queue.move`; `OSError` where the system has no more contexts."""
        try:
            context = self._idle.pop()
        except IndexError:
            context = _Context(self._numbers, self._fd, self._buffers)
        moved = context.move(pieces, writing=writing)
        self._idle.append(context)
        return moved

    def close(self) -> None:
        """Give back the contexts. Idempotent; in a forked child, which has none, nothing happens."""
        while self._idle:
            self._idle.pop().close()


class _Context:
    """What one thread asks of the system, in memory that the system reads while pieces move."""

    def __init__(self, numbers: _Numbers, fd: int, buffers: int) -> None:
        self._numbers = numbers
        self._fd = fd
        self._controls = ctypes.create_string_buffer(buffers * _CONTROL.size)
        self._vectors = ctypes.create_string_buffer(buffers * _VECTOR.size)
        self._events = ctypes.create_string_buffer(buffers * _EVENT.size)
        first = ctypes.addressof(self._controls)
        self._pointers = (ctypes.c_uint64 * buffers)(*range(first, first + len(self._controls), _CONTROL.size))
        made = ctypes.c_ulong(0)
        self._call(numbers.setup, buffers, ctypes.addressof(made))
        self._id = made.value

    def move(self, pieces: Sequence[Piece], *, writing: bool) -> list[int]:
        """As `Queue.move`."""
        self._describe(pieces, _PWRITEV if writing else _PREADV)
        moved = [0] * len(pieces)
        begun = ended = 0
        pointers = ctypes.addressof(self._pointers)
        try:
            while begun < len(pieces):
                begun += self._call(self._numbers.submit, self._id, len(pieces) - begun, pointers + 8 * begun)
        except OSError as error:  # the others are under way, and must end before their memory is anybody else's
            moved[begun:] = [-(error.errno or errno.EIO)] * (len(pieces) - begun)
        try:
            while ended < begun:
                ended += self._reap(begun - ended, moved)
        except BaseException:
            self.close()  # which waits for them
            raise
        return moved

    def close(self) -> None:
        """Wait for what is under way, and give the context back."""
        with contextlib.suppress(OSError):  # a forked child has none
            self._call(self._numbers.destroy, self._id)

    def _describe(self, pieces: Sequence[Piece], operation: int) -> None:
        vectors, at = ctypes.addressof(self._vectors), 0
        for number, (buffers, offset) in enumerate(pieces):
            control = (number, 0, 0, operation, 0, self._fd, vectors + at, len(buffers), offset, 0, 0, 0)
            _CONTROL.pack_into(self._controls, number * _CONTROL.size, *control)
            for buffer in buffers:
                address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
                _VECTOR.pack_into(self._vectors, at, address, len(buffer))
                at += _VECTOR.size

    def _reap(self, count: int, moved: list[int]) -> int:
        """Wait for as many pieces; how many ended, and what came of them into `moved`."""
        try:
            ended = self._call(self._numbers.getevents, self._id, count, count, ctypes.addressof(self._events))
        except InterruptedError:
            return 0
        for number, _, result, _ in _EVENT.iter_unpack(memoryview(self._events)[: ended * _EVENT.size]):
            moved[number] = result
        return ended

    def _call(self, number: int, *arguments: int) -> int:
        result = int(_syscall(number, *arguments, *[0] * (5 - len(arguments))))
        if result < 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        return result
