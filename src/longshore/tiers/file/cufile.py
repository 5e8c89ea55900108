"""NVIDIA's cuFile: bytes between a file and a device's memory, without a stop in host memory.

A thin layer over the functions of `cuda.bindings.cufile`, whose names it keeps: the library object can be another, and
so all of this is tested without a GPU. Whatever the library raises, and a count that is short, is a `DeviceError`.
"""

from __future__ import annotations

import ctypes
import importlib
import struct
from collections.abc import Callable
from typing import Any

from longshore.errors import DeviceError

DESCRIPTOR = struct.Struct("<i4xqq")
"""`CUfileDescr_t`: the type of handle, the file descriptor, and functions of other file systems."""

OPAQUE_FD = 1
"""The type of handle that is a file descriptor of Linux."""


def load() -> object:
    """The library's functions; `DeviceError` when the package is not installed."""
    try:
        return importlib.import_module("cuda.bindings.cufile")
    except ImportError as error:
        raise DeviceError(f"no cuFile: {error}; expected the package cuda-bindings") from error


class CuFile:
    """One file, and one piece of device memory of `nbytes` at `address`, registered with cuFile until `close`.

    Reads and writes block until they are done, in order with nothing that a stream does: whoever calls has waited for
    what touches those bytes, and whoever is told has others touch them only then.
    """

    def __init__(self, library: object, fd: int, address: int, nbytes: int) -> None:
        """Raises `DeviceError`, with nothing registered."""
        self._library = library
        self._address = address
        self._undo: list[tuple[str, tuple[Any, ...]]] = []
        descriptor = ctypes.create_string_buffer(DESCRIPTOR.pack(OPAQUE_FD, fd, 0))
        try:
            self._call("driver_open")
            self._undo.append(("driver_close", ()))
            self._handle = int(self._call("handle_register", ctypes.addressof(descriptor)))
            self._undo.append(("handle_deregister", (self._handle,)))
            self._call("buf_register", address, nbytes, 0)
            self._undo.append(("buf_deregister", (address,)))
        except DeviceError:
            self.close()
            raise

    def read(self, offset: int, nbytes: int, place: int) -> None:
        """`nbytes` of the file from `place` on, to `offset` of the memory."""
        self._move("read", offset, nbytes, place)

    def write(self, offset: int, nbytes: int, place: int) -> None:
        """`nbytes` of the memory from `offset` on, to `place` of the file."""
        self._move("write", offset, nbytes, place)

    def close(self) -> None:
        """Let go of memory, file and library, as far as each of them lets itself be let go of. Idempotent."""
        while self._undo:
            name, arguments = self._undo.pop()
            try:
                self._call(name, *arguments)
            except DeviceError:
                continue

    def _move(self, name: str, offset: int, nbytes: int, place: int) -> None:
        moved = self._call(name, self._handle, self._address, nbytes, place, offset)
        if moved != nbytes:
            raise DeviceError(f"cuFile {name}: expected {nbytes} bytes, got {moved}")

    def _call(self, name: str, *arguments: Any) -> Any:
        function: Callable[..., Any] | None = getattr(self._library, name, None)
        if function is None:
            raise DeviceError(f"cuFile has no {name}: a version that is not known here")
        try:
            return function(*arguments)
        except Exception as error:
            raise DeviceError(f"cuFile {name}: {error}") from error
