"""cuFile without a GPU: real bytes between real files and "device" memory, by the very addresses that are handed over.

It checks the rules of the library: nothing before `driver_open`, only registered files and memory, nothing outside of
them, and everything given back. What breaks one is refused, as the library would, and noted in `breaches`.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from longshore.checksums import mix64
from longshore.tiers.arena import Arena
from longshore.tiers.file.gds import DESCRIPTOR, OPAQUE_FD

_bound = threading.local()
"""`count`: how often the device was made the calling thread's own."""


class cuFileError(Exception):  # noqa: N801 - as the library calls it
    """What the library raises."""


class StandInCuFile:
    """The functions of `cuda.bindings.cufile`. `fault` may raise, or return a count in place of the bytes moved."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.breaches: list[str] = []
        self.wants_context = False
        self.fault: Callable[[str], int | None] = lambda name: None
        self._lock = threading.Lock()
        self._open = 0
        self._files: dict[int, int] = {}
        self._memory: dict[int, int] = {}

    def driver_open(self) -> None:
        self._begin("driver_open")
        self._open += 1

    def driver_close(self) -> None:
        self._begin("driver_close")
        self._open -= 1

    def handle_register(self, descriptor: int) -> int:
        self._begin("handle_register")
        kind, fd, functions = DESCRIPTOR.unpack(ctypes.string_at(descriptor, DESCRIPTOR.size))
        self._rule(kind == OPAQUE_FD and not functions, "a handle that is no file descriptor")
        self._rule(self._open > 0, "a file before the driver was opened")
        os.fstat(fd)
        handle = 0x1000 + len(self._files)
        self._files[handle] = fd
        return handle

    def handle_deregister(self, handle: int) -> None:
        self._begin("handle_deregister")
        self._rule(self._files.pop(handle, None) is not None, "a handle that is not registered")

    def buf_register(self, address: int, nbytes: int, flags: int) -> None:
        self._begin("buf_register")
        self._rule(flags == 0 and nbytes > 0, "odd memory")
        self._memory[address] = nbytes

    def buf_deregister(self, address: int) -> None:
        self._begin("buf_deregister")
        self._rule(self._memory.pop(address, None) is not None, "memory that is not registered")

    def read(self, handle: int, address: int, size: int, file_offset: int, offset: int) -> int:
        return self._move("read", os.preadv, handle, address, size, file_offset, offset)

    def write(self, handle: int, address: int, size: int, file_offset: int, offset: int) -> int:
        return self._move("write", os.pwritev, handle, address, size, file_offset, offset)

    @property
    def is_clean(self) -> bool:
        """Whether all that was taken was given back, and no rule was broken."""
        return not (self._open or self._files or self._memory or self.breaches)

    def _move(
        self, name: str, call: Callable[..., int], handle: int, address: int, size: int, file_offset: int, offset: int
    ) -> int:
        short = self._begin(name)
        if short is not None:
            return short
        self._rule(handle in self._files, "a file that is not registered")
        self._rule(offset >= 0 and offset + size <= self._memory.get(address, 0), "bytes outside registered memory")
        piece = (ctypes.c_uint8 * size).from_address(address + offset)
        return call(self._files[handle], [memoryview(piece).cast("B")], file_offset)

    def _begin(self, name: str) -> int | None:
        with self._lock:
            self.calls[name] += 1
        if self.wants_context and not name.endswith(("close", "deregister")):
            self._rule(getattr(_bound, "count", 0) > 0, f"{name} in a thread without a context")
        return self.fault(name)

    def _rule(self, kept: bool, breach: str) -> None:
        if not kept:
            self.breaches.append(breach)
            raise cuFileError(f"invalid value: {breach}")


class HostAsDevice:
    """An `ImageMemory` that is an arena in host memory; counts how bytes go in and out other than by cuFile."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self.calls: Counter[str] = Counter()

    @property
    def address(self) -> int:
        return self._arena.address

    @property
    def nbytes(self) -> int:
        return self._arena.array.nbytes

    def bind(self) -> Callable[[], None]:
        _bound.count = getattr(_bound, "count", 0) + 1

        def undo() -> None:
            _bound.count -= 1

        return undo

    def mix64(self, offset: int, length: int) -> int:
        self.calls["mix64"] += 1
        return mix64(self._arena.view(offset, length))

    def load(self, offset: int, host: memoryview) -> None:
        self.calls["load"] += 1
        host[:] = self._arena.view(offset, len(host))

    def store(self, offset: int, host: memoryview) -> None:
        self.calls["store"] += 1
        self._arena.view(offset, len(host))[:] = host


def library_of(**changes: Any) -> StandInCuFile:
    """A stand-in of which some functions are others, or (`None`) missing."""
    kind = type("Changed", (StandInCuFile,), changes)
    made = kind()
    assert isinstance(made, StandInCuFile)
    return made
