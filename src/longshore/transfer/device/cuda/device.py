"""`CudaDevice`: NVIDIA GPUs, with torch's streams, batched copies of the driver, and Triton kernels."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch

from longshore.errors import DeviceError
from longshore.layout.model import KVLayout
from longshore.transfer.device.base import InOnePiece, Stream
from longshore.transfer.device.cuda import calibration as calibrations
from longshore.transfer.device.cuda import driver
from longshore.transfer.device.cuda.arguments import KernelShape
from longshore.transfer.device.cuda.calibration import THOROUGH, Always, Calibration, Effort, all_registered
from longshore.transfer.device.cuda.driver import RELAXED, CudaAccelerator, Driver
from longshore.transfer.device.cuda.streams import CudaResources, CudaStream, Kernels, Way, WayChooser
from longshore.transfer.device.torch_streams import StreamDevice, with_index

_PAGE = 4096


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
                f"cannot allocate {nbytes} bytes for chunk images on {accelerator.device}: {error}"
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
        self._accelerator.destroy_streams(self._driver, streams)

    def _piece(self, offset: int, length: int) -> torch.Tensor:
        return self._memory[offset : offset + length]

    @contextlib.contextmanager
    def _on_own_stream(self) -> Iterator[None]:
        """On the calling thread's own stream. Torch says what went wrong in errors without a type of their own."""
        stream = getattr(self._own, "stream", None)
        if stream is None:
            stream = self._own.stream = self._accelerator.create_stream(self._driver)
            with self._lock:
                self._streams.append(stream)
        try:
            with self._accelerator.on(stream):
                yield
        except RuntimeError as error:
            raise DeviceError(f"GPU operation failed: {error}") from error


STAGING_BYTES = 64 << 20
"""Device memory for staging, per direction."""

_log = logging.getLogger(__name__)


class CudaDevice(StreamDevice):
    """One GPU. `compute` is a torch stream of either class, or `None` for the calling thread's current stream.

    Fallbacks beside those of all devices with streams: `no_batched_copy`: the driver has no batched call.
    `host_unregistered`: a batch was copied through pinned stages. `late_bounce`: these were allocated only then.
    `straddling_piece`: adjacent images are in different registrations. `smaller_ring`, `no_ring`: less device memory
    for staging. `descriptors_grown`: more kernel arguments than allocated for. `no_kernels`: kernels cannot be
    compiled, so pages were copied one by one.
    """

    def __init__(
        self,
        device: torch.device | str,
        *,
        in_one_piece: InOnePiece | None = None,
        staging_bytes: int = STAGING_BYTES,
        calibration: Path | None = None,
        chooser: WayChooser | None = None,
        accelerator: CudaAccelerator | None = None,
        library: object | None = None,
    ) -> None:
        """Allocate the events; streams allocate the rest.

        Args:
            device: Which GPU.
            in_one_piece: Which host memory is registered with CUDA; none by default. `set_registered_memory` sets it
                later.
            staging_bytes: Device memory for staging, per direction.
            calibration: Calibration file; by default one in the user's cache directory.
            chooser: Chooses the way instead of a calibration.
            accelerator: Calls of torch and Triton.
            library: The driver's functions; by default those of `libcuda`.

        Raises:
            DeviceError: There is no driver, or a call failed.
        """
        self._accelerator = accelerator or CudaAccelerator(with_index(torch.device(device)))
        self._driver = Driver(driver.load() if library is None else library)
        ways = [Way.DIRECT, Way.STAGED]
        if self._driver.reaches_host_pointers(self._accelerator.ordinal):
            ways.append(Way.ZERO_COPY)
        super().__init__(self._accelerator)
        if self._driver.batch_version is None:
            self._fallbacks.count("no_batched_copy")
        kernels = Kernels(self._accelerator, self._fallbacks)
        self._resources = CudaResources(
            self._accelerator, self._driver, self._events, self._fallbacks, kernels, tuple(ways)
        )
        self._staging_bytes = staging_bytes
        self._in_one_piece = in_one_piece
        self._link = calibrations.link_of(self._driver.pci_address(self._accelerator.ordinal))
        self._key = (self._accelerator.name, self._driver.version, self._link)
        self._path = calibration or calibrations.default_path(*self._key)
        self._chooser = chooser
        self._images: CudaImages | None = None

    @property
    def calibration_path(self) -> Path:
        """Where the calibration is kept."""
        return self._path

    def set_registered_memory(self, in_one_piece: InOnePiece) -> None:
        """Set which host memory is registered; other memory is copied through pinned stages."""
        if self._images is None:
            self._in_one_piece = in_one_piece

    def stream(self, layout: KVLayout, destination: str) -> Stream:
        """Two streams of the GPU and staging memory. Calibrates the device if there is no calibration."""
        if self._chooser is None:
            if self._has_kernels():
                self._chooser = calibrations.load(self._path, *self._key) or self.calibrate(calibrations.QUICK)
            else:
                self._chooser = Always(Way.DIRECT)
        return CudaStream(
            self._resources, layout, destination, self._chooser, self._in_one_piece, self._staging_bytes, self._images
        )

    def allocate_images(self, nbytes: int) -> CudaImages:
        """Device memory for images. Kernels gather pages into it and scatter them from it."""
        if not self._has_kernels():
            raise DeviceError(
                f"{self._accelerator.device} cannot hold chunk images: the copy kernels cannot be compiled"
            )
        self._images = CudaImages(self._accelerator, nbytes, self._driver)
        self._resources = replace(self._resources, ways=(Way.ZERO_COPY,))
        self._chooser = Always(Way.ZERO_COPY)
        self._in_one_piece = all_registered
        return self._images

    def calibrate(self, effort: Effort = THOROUGH) -> Calibration:
        """Measure every way, save the result, and use it for streams made from now on.

        Raises `DeviceError` if kernels cannot be compiled, because there is only one way then.
        """
        if not self._has_kernels():
            raise DeviceError(f"cannot calibrate {self._accelerator.device}: the copy kernels cannot be compiled")
        curves = calibrations.measure(self._resources, self._staging_bytes, effort)
        self._chooser = found = Calibration(*self._key[:2], curves, self._link)
        try:
            found.save(self._path)
        except OSError as error:
            _log.warning(
                "calibration of %s could not be saved, and is measured again at the next start: %s",
                self._accelerator.name,
                error,
            )
        return found

    def resolve(self, compute: object) -> torch.Stream:
        """The stream, by torch's class for CUDA."""
        return super().resolve(None) if compute is None else self._accelerator.of_cuda(cast(torch.Stream, compute))

    def close(self) -> None:
        """Release the events and the streams of images."""
        super().close()
        if self._images is not None:
            self._images.close()

    def _has_kernels(self) -> bool:
        """Whether one can be compiled, which is tried."""
        return self._resources.kernels.prepare([KernelShape.of(1, 1, 1, widest=16, alignment=16, tail=False)])
