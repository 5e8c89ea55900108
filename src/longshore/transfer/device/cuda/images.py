"""Memory of a GPU for images that go to files and come back without a stop in host memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from longshore.errors import DeviceError
from longshore.transfer.device.cuda.accelerator import CudaAccelerator

_PAGE = 4096


class CudaImages:
    """An `ImageMemory` on one GPU.

    Calls go to the calling thread's current stream, and return when the bytes are there: nothing here is in order with
    any other stream, which is why nobody may call while a copy of those bytes is under way. They raise `DeviceError`
    when the GPU fails.
    """

    def __init__(self, accelerator: CudaAccelerator, nbytes: int) -> None:
        """Take the memory; `DeviceError` when it cannot be had."""
        try:
            whole = accelerator.device_bytes(nbytes + _PAGE)
        except RuntimeError as error:
            raise DeviceError(f"no {nbytes} bytes for images on {accelerator.device}: {error}") from error
        first = -whole.data_ptr() % _PAGE
        self._accelerator = accelerator
        self._memory = whole[first : first + nbytes]
        self._memory.zero_()
        accelerator.wait()
        self.address = self._memory.data_ptr()
        self.nbytes = nbytes

    def mix64(self, offset: int, length: int) -> int:
        """By a kernel."""
        with _as_device_errors():
            return self._accelerator.mix64(self._piece(offset, length).view(torch.int64))

    def load(self, offset: int, host: memoryview) -> None:
        """Copy out."""
        with _as_device_errors():
            torch.frombuffer(host, dtype=torch.uint8).copy_(self._piece(offset, len(host)))

    def store(self, offset: int, host: memoryview) -> None:
        """Copy in."""
        with _as_device_errors():
            self._piece(offset, len(host)).copy_(torch.frombuffer(host, dtype=torch.uint8))
            self._accelerator.wait()

    def zero(self, offset: int, length: int) -> None:
        """Zero a range."""
        with _as_device_errors():
            self._piece(offset, length).zero_()
            self._accelerator.wait()

    def _piece(self, offset: int, length: int) -> torch.Tensor:
        return self._memory[offset : offset + length]


@contextlib.contextmanager
def _as_device_errors() -> Iterator[None]:
    """Torch says what went wrong on the device in errors without a type of their own."""
    try:
        yield
    except RuntimeError as error:
        raise DeviceError(f"the GPU failed: {error}") from error
