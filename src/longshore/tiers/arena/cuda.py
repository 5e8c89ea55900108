"""`CudaRegistrar`: host memory for CUDA devices, through the runtime that torch has loaded.

A failed call leaves its error in the CUDA runtime, and torch would raise it from an unrelated kernel launch. Each
failure is therefore cleared at once, in the same thread. torch has no function for that, nor for a device's address;
both are called with ctypes in the library that torch has loaded, because a second copy of the library would have its
own last error.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import Any, Protocol

from longshore.errors import RegistrationError

FLAGS = 1 | 2
"""cudaHostRegisterPortable: pinned for every device; cudaHostRegisterMapped: kernels may use the host addresses."""


class CudaRuntime(Protocol):
    """The calls of the CUDA runtime that are used here. Code 0 is success. Each may raise `RegistrationError`."""

    def host_register(self, address: int, nbytes: int, flags: int) -> int:
        """`cudaHostRegister`."""

    def host_unregister(self, address: int) -> int:
        """`cudaHostUnregister`."""

    def take_last_error(self) -> int:
        """`cudaGetLastError`: the last error, which is then cleared."""

    def error_name(self, code: int) -> str:
        """`cudaGetErrorName`."""

    def pci_address(self) -> str:
        """`cudaDeviceGetPCIBusId` of the device."""


class CudaRegistrar:
    """Registers host memory with one CUDA device, for use by all of them."""

    def __init__(self, runtime: CudaRuntime) -> None:
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
    """The runtime of the CUDA build of torch, on `device`, such as `cuda:1`."""

    def __init__(self, device: str) -> None:
        import torch  # noqa: PLC0415 - torch is optional

        cuda: Any = torch.cuda
        index = torch.device(device).index
        self._index: int = cuda.current_device() if index is None else index
        self._device = cuda.device(self._index)
        self._torch = cuda.cudart()
        self._found = _loaded_library(torch.version.cuda or "")

    def host_register(self, address: int, nbytes: int, flags: int) -> int:
        """Releases the interpreter lock; creates the device's context if there is none."""
        _ = self._library  # an error that nobody could take back must not come into being
        with self._device:
            return int(self._torch.cudaHostRegister(address, nbytes, flags))

    def host_unregister(self, address: int) -> int:
        """Without the interpreter lock."""
        with self._device:
            return int(self._torch.cudaHostUnregister(address))

    def take_last_error(self) -> int:
        """The calling thread's."""
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
