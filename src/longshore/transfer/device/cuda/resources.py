"""Resources of one direction: streams, a staging ring in device memory, kernels, and descriptors of copies in flight.

A place in the ring, or a slip, is reused only after its last use has ended: the stream, or the thread, waits for the
point after it.

    ring    │ place 0 │ place 1 │ ... │      a kernel fills one while the link empties another
    slips   │ slip 0 │ ... │                 descriptors, and a kernel's orders in pinned memory and on the device
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from longshore.errors import DeviceError
from longshore.layout.model import U64
from longshore.transfer.device.accelerator import Accelerator, Fallbacks, Point, pinned_or_pageable
from longshore.transfer.device.cuda.accelerator import CudaAccelerator
from longshore.transfer.device.cuda.driver import Driver
from longshore.transfer.device.cuda.runs import KernelShape, Orders
from longshore.transfer.plan import Planner

PLACES = 4

Descriptors = tuple[U64, U64, U64]
"""Destinations, sources and sizes of copies."""

Arguments = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Arguments of a kernel: int64, on the device."""

_ALIGNMENT = 256
_NUMBERS = 64 << 10

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class RingSlot:
    """One piece of the ring: its address, and the point after its last use."""

    address: int
    used: Point | None = None


class Ring:
    """`PLACES` pieces of one piece of device memory, each for at least one page.

    Attributes:
        room: Bytes of each.
    """

    def __init__(self, accelerator: Accelerator, nbytes: int, largest_page: int) -> None:
        """Allocate `nbytes`, or `PLACES` largest pages if that is more; `RuntimeError` on failure."""
        self.room = max(nbytes // PLACES // _ALIGNMENT, -(-largest_page // _ALIGNMENT)) * _ALIGNMENT
        self._memory = accelerator.device_bytes(PLACES * self.room)
        address = self._memory.data_ptr()
        self._places = [RingSlot(address + index * self.room) for index in range(PLACES)]
        self._turn = 0

    def next(self) -> RingSlot:
        """The place used least recently."""
        place = self._places[self._turn]
        self._turn = (self._turn + 1) % PLACES
        return place


def take_ring(accelerator: Accelerator, fallbacks: Fallbacks, nbytes: int, largest_page: int) -> Ring | None:
    """A ring of `nbytes`, else of a half or a quarter, else none; failures are counted and logged."""
    for part in (1, 2, 4):
        try:
            return Ring(accelerator, nbytes // part, largest_page)
        except RuntimeError as error:
            _log.warning(
                "cannot allocate a staging buffer of %d bytes on %s; copies may be slower: %s",
                nbytes // part,
                accelerator.device,
                error,
            )
            fallbacks.count("smaller_ring" if part < 4 else "no_ring")
    return None


class CopyStreams:
    """The two streams of one direction, and the ring between them.

    Attributes:
        kernels: Runs kernels.
        link: Runs copies over the link.
        ring: Device memory for staging; `None` if it could not be allocated.
    """

    def __init__(
        self, accelerator: CudaAccelerator, driver: Driver, fallbacks: Fallbacks, nbytes: int, largest_page: int
    ) -> None:
        """Allocate all; arguments as for `take_ring`. Raises `DeviceError` with nothing allocated."""
        self._accelerator = accelerator
        self._driver = driver
        self.kernels = accelerator.own_stream(driver)
        try:
            self.link = accelerator.own_stream(driver)
        except DeviceError:
            accelerator.give_back_stream(driver, self.kernels)
            raise
        self.ring = take_ring(accelerator, fallbacks, nbytes, largest_page)

    def close(self) -> None:
        """Free the memory, then the streams. No copy may be in flight."""
        self.ring = None
        for stream in (self.kernels, self.link):
            try:
                self._accelerator.give_back_stream(self._driver, stream)
            except DeviceError as error:
                _log.warning("a CUDA stream of %s could not be destroyed: %s", self._accelerator.device, error)


class Kernels:
    """Compiles kernels. Triton compiles a launcher for each at run time, with a C compiler."""

    def __init__(self, accelerator: CudaAccelerator, fallbacks: Fallbacks) -> None:
        self._accelerator = accelerator
        self._fallbacks = fallbacks
        self._lock = threading.Lock()
        self._ready: set[tuple[int, int, bool]] = set()
        self._broken = False

    def prepare(self, shapes: Iterable[KernelShape]) -> bool:
        """Compile the kernels for `shapes`. Returns `False` if any compilation has ever failed."""
        for shape in shapes:
            with self._lock:
                if not self._broken and shape.compiled not in self._ready:
                    self._compile(shape)
                if self._broken:
                    self._fallbacks.count("no_kernels")
                    return False
        return True

    def _compile(self, shape: KernelShape) -> None:
        try:
            self._accelerator.prepare(shape)
        except Exception as error:  # noqa: BLE001 - a compiler fails in many ways; copies then go without kernels
            self._broken = True
            _log.warning(
                "copy kernels for %s cannot be compiled; small pages are copied one by one, which is slow: %s. "
                "Install Triton, gcc (or set CC) and Python.h, and restart",
                self._accelerator.device,
                error,
            )
        else:
            self._ready.add(shape.compiled)


class Slip:
    """Descriptors of one copy, in buffers that are not reused until the copy has ended."""

    def __init__(self, accelerator: Accelerator, fallbacks: Fallbacks) -> None:
        self.planner = Planner()
        self.used: Point | None = None
        self._accelerator = accelerator
        self._fallbacks = fallbacks
        self._kept: list[Descriptors] = []
        self._take(_NUMBERS)

    def begin(self) -> None:
        """Wait until the last copy described here has ended."""
        if self.used is not None:
            self.used.wait()
        self._kept.clear()

    def keep(self, *descriptors: U64) -> Descriptors:
        """Destinations, sources and sizes, each of shape `(copies,)`, which stay until the copy has ended."""
        to, at, size = descriptors
        self._kept.append((to, at, size))
        return to, at, size

    def write(self, orders: list[Orders]) -> tuple[Descriptors, list[Arguments]]:
        """Write kernel arguments `orders`. Returns the copy of them to the device, and their addresses there."""
        columns = [column for order in orders for column in (order.blocks, order.rows, order.table)]
        # A kernel is compiled anew for pointers that are aligned otherwise: so all are multiples of 16 bytes.
        ends = list(itertools.accumulate((column.size + column.size % 2 for column in columns), initial=0))
        total = ends[-1]
        if total > self._host.numel():
            self._fallbacks.count("longer_slip")
            self._take(1 << (total - 1).bit_length())
        array = self._host.numpy()
        places: list[torch.Tensor] = []
        for column, start in zip(columns, ends, strict=False):
            array[start : start + column.size] = column
            places.append(self._device[start : start + column.size])
        arguments = list(zip(places[::3], places[1::3], places[2::3], strict=True))
        whole = (self._device.data_ptr(), self._host.data_ptr(), 8 * total)
        return self.keep(*(np.array([number], dtype=np.uint64) for number in whole)), arguments

    def _take(self, numbers: int) -> None:
        """Allocate room for `numbers`. The previous array is kept until the copy has ended."""
        self._host = pinned_or_pageable(self._accelerator, self._fallbacks, 8 * numbers).view(torch.int64)
        self._device = self._accelerator.device_bytes(8 * numbers).view(torch.int64)
