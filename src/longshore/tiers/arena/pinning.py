"""Registration of host memory with a device, which then copies from and to it directly.

    slots    │ 0 │ 1 │ 2 │ 3 │ 4 │ 5 │ 6 │ 7 │
    pieces   ├─── 0 ─────┼─── 1 ─────┼── 2 ──┤      each boundary between two slots and between two pages

A single registration fails on some systems (above 64 GiB), and a copy across two registrations fails on all. There are
therefore several, and no slot straddles two. If the device refuses a piece, the others remain usable.

A failed call leaves its error in the CUDA runtime, and torch would raise it from an unrelated kernel launch. Each
failure is therefore cleared at once, in the same thread. torch has no function for that, nor for a device's address.
Both are called with ctypes in the library that torch has loaded, because a second copy of the library would have its
own last error.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from longshore.boundary import DISK_PAGE
from longshore.errors import RegistrationError, TierError

LARGEST_PIECE = 16 << 30
"""Bytes of the largest piece: well below sizes that were seen to fail."""


class Registrar(Protocol):
    """A device that host memory can be registered with."""

    def register(self, address: int, nbytes: int) -> None:
        """Register `nbytes` at `address`. Raises `RegistrationError`, after clearing the error state."""

    def unregister(self, address: int) -> None:
        """Unregister the memory at `address`. Raises `RegistrationError`, after clearing the error state."""


def cut(nbytes: int, slot_bytes: int, largest: int = LARGEST_PIECE) -> list[tuple[int, int]]:
    """`(offset, length)` of pieces of at most `largest` bytes that cover `[0, nbytes)` exactly, in order.

    Slots of `slot_bytes` are adjacent from 0; none straddles two pieces. All pieces but the last have equal length.
    Raises `TierError` for impossible sizes, or when not even one slot fits into a piece.
    """
    if nbytes <= 0 or slot_bytes <= 0 or slot_bytes % DISK_PAGE:
        raise TierError(
            f"expected a positive size and slots of a positive multiple of {DISK_PAGE} bytes, "
            f"got {nbytes} and {slot_bytes}"
        )
    step = math.lcm(slot_bytes, mmap.PAGESIZE)
    if step > largest:
        raise TierError(f"a registered piece is at most {largest} bytes, but a slot and its pages need {step}")
    length = largest // step * step
    return [(offset, min(length, nbytes - offset)) for offset in range(0, nbytes, length)]


class Registration:
    """The registered pieces of the memory at `address`. One thread may change it; any thread may query it."""

    def __init__(self, registrar: Registrar, address: int) -> None:
        self._registrar = registrar
        self._address = address
        self._bounds: npt.NDArray[np.int64] = np.zeros((2, 0), dtype=np.int64)
        """First offset of each piece, and the offset after its end; replaced as a whole."""

    @property
    def pieces(self) -> int:
        """Number of pieces."""
        return len(self._bounds[0])

    @property
    def nbytes(self) -> int:
        """Bytes in all pieces."""
        starts, ends = self._bounds
        return int((ends - starts).sum())

    def add(self, offset: int, length: int) -> None:
        """Register the next piece, behind all others. Raises `RegistrationError` with nothing changed."""
        self._registrar.register(self._address + offset, length)
        self._bounds = np.column_stack([self._bounds, (offset, offset + length)])

    def covers(self, offsets: npt.ArrayLike, lengths: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Whether each `[offset, offset + length)` is within one piece; the arguments are broadcast together."""
        starts, ends = self._bounds
        first = np.asarray(offsets, dtype=np.int64)
        size = np.asarray(lengths, dtype=np.int64)
        piece = np.searchsorted(starts, first, side="right") - 1
        end = np.append(ends, 0)[piece]  # what lies before all pieces has number -1
        return np.asarray((piece >= 0) & (size >= 0) & (size <= end - first))

    def close(self) -> None:
        """Unregister all pieces. If some fail, raises `RegistrationError` after the last. Idempotent."""
        starts = self._bounds[0].tolist()
        self._bounds = self._bounds[:, :0]
        failures = []
        for start in starts:
            try:
                self._registrar.unregister(self._address + start)
            except RegistrationError as error:
                failures.append(str(error))
        if failures:
            raise RegistrationError(
                f"{len(failures)} of {len(starts)} pieces of host memory could not be unregistered: {failures[0]}"
            )


FLAGS = 1 | 2
"""cudaHostRegisterPortable: pinned for every device; cudaHostRegisterMapped: kernels may use the host addresses."""


class CudaRegistrar:
    """Registers host memory with one CUDA device, for use by all of them."""

    def __init__(self, runtime: TorchCudaRuntime) -> None:
        self._runtime = runtime

    def pci_address(self) -> str:
        """PCI address of the device, such as `0000:3B:00.0`; `unknown` if the runtime does not report it."""
        try:
            return self._runtime.pci_address()
        except RegistrationError:
            return "unknown"

    def register(self, address: int, nbytes: int) -> None:
        """Pin `nbytes` at `address`. Raises `RegistrationError`, with the runtime's last error cleared."""
        self._check(self._runtime.host_register(address, nbytes, FLAGS), f"cudaHostRegister of {nbytes} bytes")

    def unregister(self, address: int) -> None:
        """Undo `register` at `address`. Raises `RegistrationError`, with the runtime's last error cleared."""
        self._check(self._runtime.host_unregister(address), "cudaHostUnregister")

    def _check(self, code: int, call: str) -> None:
        if code:
            self._runtime.take_last_error()
            raise RegistrationError(f"{call} failed: {self._runtime.error_name(code)} ({code})")


class TorchCudaRuntime:
    """Calls of the CUDA runtime in torch, on `device`, such as `cuda:1`. Code 0 is success.

    All but registrations may raise `RegistrationError`.
    """

    def __init__(self, device: str) -> None:
        import torch  # noqa: PLC0415 - torch is optional

        cuda: Any = torch.cuda
        index = torch.device(device).index
        self._index: int = cuda.current_device() if index is None else index
        self._device = cuda.device(self._index)
        self._torch = cuda.cudart()
        self._found = _loaded_library(torch.version.cuda or "")

    def host_register(self, address: int, nbytes: int, flags: int) -> int:
        """`cudaHostRegister`: releases the interpreter lock; creates the device's context if there is none."""
        _ = self._library  # an error that nobody could take back must not come into being
        with self._device:
            return int(self._torch.cudaHostRegister(address, nbytes, flags))

    def host_unregister(self, address: int) -> int:
        """`cudaHostUnregister`, without the interpreter lock."""
        with self._device:
            return int(self._torch.cudaHostUnregister(address))

    def take_last_error(self) -> int:
        """`cudaGetLastError`: the calling thread's last error, which is then cleared."""
        return int(self._library.cudaGetLastError())

    def error_name(self, code: int) -> str:
        """Such as `cudaErrorHostMemoryAlreadyRegistered`."""
        name: bytes = self._library.cudaGetErrorName(code)
        return name.decode()

    def pci_address(self) -> str:
        """`domain:bus:device.function`, in hexadecimal digits."""
        text = ctypes.create_string_buffer(32)
        code = self._library.cudaDeviceGetPCIBusId(text, len(text), self._index)
        if code:
            self.take_last_error()
            raise RegistrationError(f"cudaDeviceGetPCIBusId failed: {self.error_name(code)} ({code})")
        return text.value.decode()

    @property
    def _library(self) -> Any:
        if self._found is None:
            raise RegistrationError("cannot find the CUDA runtime that torch uses in this process")
        return self._found


def _loaded_library(version: str) -> ctypes.CDLL | None:
    """The CUDA runtime of `version`, such as `12.8`, as it is loaded already: by its name, or in the global scope."""
    major = version.partition(".")[0]
    for name in (f"libcudart.so.{major}", f"libcudart.so.{major}.0", None):
        with contextlib.suppress(OSError, AttributeError):
            library = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
            library.cudaGetErrorName.restype = ctypes.c_char_p
            _ = library.cudaGetLastError, library.cudaDeviceGetPCIBusId
            return library
    return None
