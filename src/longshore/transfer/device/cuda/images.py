"""GPU memory for images that are copied directly to and from files."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator

import torch

from longshore.errors import DeviceError
from longshore.transfer.device.cuda.accelerator import CudaAccelerator
from longshore.transfer.device.cuda.driver import RELAXED, Driver

_PAGE = 4096

_log = logging.getLogger(__name__)


class CudaImages:
    """An `ImageMemory` on one GPU.

    Each calling thread has its own stream, so that calls do not wait for compute. Calls return when the bytes are in
    place. They are not ordered with other streams, so no copy of the bytes may be in flight during a call. They raise
    `DeviceError` if the GPU fails.
    """

    def __init__(self, accelerator: CudaAccelerator, nbytes: int, driver: Driver) -> None:
        """Allocate the memory; `DeviceError` on failure."""
        try:
            whole = accelerator.device_bytes(nbytes + _PAGE)
        except RuntimeError as error:
            raise DeviceError(
                f"cannot allocate {nbytes} bytes for block images on {accelerator.device}: {error}"
            ) from error
        first = -whole.data_ptr() % _PAGE
        self._accelerator = accelerator
        self._driver = driver
        self._memory = whole[first : first + nbytes]
        self._memory.zero_()
        accelerator.wait()
        self._own = threading.local()
        self._lock = threading.Lock()
        self._streams: list[torch.Stream] = []
        self.address = self._memory.data_ptr()
        self.nbytes = nbytes

    def bind(self) -> Callable[[], None]:
        """Set the GPU's context in the calling thread, and relax its capture mode."""
        driver = self._driver
        context = driver.make_current(self._accelerator.ordinal)
        mode = driver.exchange_capture_mode(RELAXED)

        def undo() -> None:
            driver.exchange_capture_mode(mode)
            driver.set_context(context)

        return undo

    def mix64(self, offset: int, length: int) -> int:
        """By a kernel."""
        with self._on_own_stream():
            return self._accelerator.mix64(self._piece(offset, length).view(torch.int64))

    def load(self, offset: int, host: memoryview) -> None:
        """Copy out."""
        with self._on_own_stream():
            torch.frombuffer(host, dtype=torch.uint8).copy_(self._piece(offset, len(host)))

    def store(self, offset: int, host: memoryview) -> None:
        """Copy in."""
        with self._on_own_stream():
            self._piece(offset, len(host)).copy_(torch.frombuffer(host, dtype=torch.uint8))
            self._accelerator.wait()

    def zero(self, offset: int, length: int) -> None:
        """Zero a range."""
        with self._on_own_stream():
            self._piece(offset, length).zero_()
            self._accelerator.wait()

    def close(self) -> None:
        """Destroy the streams. No call may be in progress."""
        with self._lock:
            streams, self._streams = self._streams, []
        for stream in streams:
            try:
                self._accelerator.give_back_stream(self._driver, stream)
            except DeviceError as error:
                _log.warning("a CUDA stream of %s could not be destroyed: %s", self._accelerator.device, error)

    def _piece(self, offset: int, length: int) -> torch.Tensor:
        return self._memory[offset : offset + length]

    @contextlib.contextmanager
    def _on_own_stream(self) -> Iterator[None]:
        """On the calling thread's own stream. Torch says what went wrong in errors without a type of their own."""
        stream = getattr(self._own, "stream", None)
        if stream is None:
            stream = self._own.stream = self._accelerator.own_stream(self._driver)
            with self._lock:
                self._streams.append(stream)
        try:
            with self._accelerator.on(stream):
                yield
        except RuntimeError as error:
            raise DeviceError(f"GPU operation failed: {error}") from error
