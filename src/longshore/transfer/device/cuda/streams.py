"""Copies in one direction of an NVIDIA GPU: a stream for kernels, a stream for the link, and three ways of copying.

    staged offload     kernels   gather 0 │ gather 1 │ gather 2 │          done_event: after the last gather
                       link               │ run 0 ──── │ run 1 ──── │      finished: after the last run

    direct      pages ◄──── batched DMA, one piece each ────► images           large pieces
    staged      pages ◄─ kernel ─► stage ◄─ batched DMA ────► images           small pages, long runs in the images
    zero copy   pages ◄──── kernel on host addresses ───────► images           small pages, few bytes or short runs

Work on one stream waits for the other only where a slot of the ring requires it, or where the way changes: a copy on
one stream (by kernel on host addresses, inside the device, or directly by DMA) waits for the other stream unless the
copy before it was on the same one, and a staged copy waits for the last copy that was on one stream.

A slot of the staging ring, and the descriptors of a copy, are reused only after their last use has ended: the stream,
or the thread, waits for the event after it. While a kernel fills one slot, the link empties another.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch

from longshore.boundary import HOST
from longshore.errors import DeviceError
from longshore.layout.model import U64, KVLayout
from longshore.transfer.device.base import Copy, DeviceEvent, ImageMemory, InOnePiece, Stream
from longshore.transfer.device.cuda.arguments import (
    LINK_PROGRAMS,
    PROGRAMS,
    KernelArguments,
    KernelShape,
    block_copy_arguments,
    image_runs,
    kernel_arguments,
    kernel_shapes,
    link_copies,
    rows_in_images,
    rows_in_stage,
    staged,
)
from longshore.transfer.device.cuda.driver import RELAXED, CudaAccelerator, Driver
from longshore.transfer.device.torch_streams import (
    Accelerator,
    Events,
    Fallbacks,
    StagedStream,
    StreamCopy,
    StreamEvent,
    pinned_or_pageable,
    stream_into,
)
from longshore.transfer.pieces import CopyBatch, PieceBuilder, Pieces, count_pieces

RING_SLOTS = 4

Descriptors = tuple[U64, U64, U64]
"""Destinations, sources and sizes of copies."""

DeviceArguments = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Arguments of a kernel: int64, on the device."""

_ALIGNMENT = 256
_NUMBERS = 64 << 10

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class RingSlot:
    """A slot of the ring: its address, and the event after its last use."""

    address: int
    last_use: StreamEvent | None = None


class Ring:
    """`RING_SLOTS` slots in one piece of device memory, each for at least one page.

    Attributes:
        slot_bytes: Bytes of each slot.
    """

    def __init__(self, accelerator: Accelerator, nbytes: int, largest_page: int) -> None:
        """Allocate `nbytes`, or `RING_SLOTS` largest pages if that is more; `RuntimeError` on failure."""
        self.slot_bytes = max(nbytes // RING_SLOTS // _ALIGNMENT, -(-largest_page // _ALIGNMENT)) * _ALIGNMENT
        self._memory = accelerator.device_bytes(RING_SLOTS * self.slot_bytes)
        address = self._memory.data_ptr()
        self._slots = [RingSlot(address + index * self.slot_bytes) for index in range(RING_SLOTS)]
        self._next = 0

    def next(self) -> RingSlot:
        """The slot used least recently."""
        slot = self._slots[self._next]
        self._next = (self._next + 1) % RING_SLOTS
        return slot


def take_ring(accelerator: Accelerator, fallbacks: Fallbacks, nbytes: int, largest_page: int) -> Ring | None:
    """A ring of `nbytes`, else of a half or a quarter, else none; failures are counted and logged."""
    for part in (1, 2, 4):
        try:
            return Ring(accelerator, nbytes // part, largest_page)
        except RuntimeError as error:
            _log.warning(
                "cannot allocate a staging buffer of %d bytes on %s; copies may be slower; free device memory: %s",
                nbytes // part,
                accelerator.device,
                error,
            )
            fallbacks.count("smaller_ring" if part < 4 else "no_ring")
    return None


class CopyStreams:
    """The two streams of one direction, and the ring between them.

    Attributes:
        kernel_stream: Runs kernels.
        link_stream: Runs copies over the link.
        ring: Device memory for staging; `None` if it could not be allocated.
    """

    def __init__(
        self, accelerator: CudaAccelerator, driver: Driver, fallbacks: Fallbacks, nbytes: int, largest_page: int
    ) -> None:
        """Allocate all; arguments as for `take_ring`. Raises `DeviceError` with nothing allocated."""
        self._accelerator = accelerator
        self._driver = driver
        self.kernel_stream = accelerator.create_stream(driver)
        try:
            self.link_stream = accelerator.create_stream(driver)
        except DeviceError:
            accelerator.destroy_stream(driver, self.kernel_stream)
            raise
        self.ring = take_ring(accelerator, fallbacks, nbytes, largest_page)

    def close(self) -> None:
        """Free the memory, then the streams. No copy may be in flight."""
        self.ring = None
        self._accelerator.destroy_streams(self._driver, (self.kernel_stream, self.link_stream))


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


class DescriptorBuffer:
    """Descriptors of one copy, in buffers that are not reused until the copy has ended."""

    def __init__(self, accelerator: Accelerator, fallbacks: Fallbacks) -> None:
        self.builder = PieceBuilder()
        self.last_use: StreamEvent | None = None
        self._accelerator = accelerator
        self._fallbacks = fallbacks
        self._kept: list[Descriptors] = []
        self._take(_NUMBERS)

    def begin(self) -> None:
        """Wait until the last copy described here has ended."""
        if self.last_use is not None:
            self.last_use.wait()
        self._kept.clear()

    def keep(self, *descriptors: U64) -> Descriptors:
        """Destinations, sources and sizes, each of shape `(copies,)`, which stay until the copy has ended."""
        to, at, size = descriptors
        self._kept.append((to, at, size))
        return to, at, size

    def write(self, orders: list[KernelArguments]) -> tuple[tuple[int, int, int], list[DeviceArguments]]:
        """Write kernel arguments `orders`.

        Returns destination, source and size of the copy that brings them to the device, and their tensors there.
        """
        columns = [column for order in orders for column in (order.blocks, order.rows, order.table)]
        # A kernel is compiled anew for pointers that are aligned otherwise: so all are multiples of 16 bytes.
        ends = list(itertools.accumulate((column.size + column.size % 2 for column in columns), initial=0))
        total = ends[-1]
        if total > self._host.numel():
            self._fallbacks.count("descriptors_grown")
            self._take(1 << (total - 1).bit_length())
        array = self._host.numpy()
        parts: list[torch.Tensor] = []
        for column, start in zip(columns, ends, strict=False):
            array[start : start + column.size] = column
            parts.append(self._device[start : start + column.size])
        arguments = list(zip(parts[::3], parts[1::3], parts[2::3], strict=True))
        return (self._device.data_ptr(), self._host.data_ptr(), 8 * total), arguments

    def _take(self, numbers: int) -> None:
        """Allocate memory for `numbers` int64. The previous memory is kept until the copy has ended."""
        self._host = pinned_or_pageable(self._accelerator, self._fallbacks, 8 * numbers).view(torch.int64)
        self._device = self._accelerator.device_bytes(8 * numbers).view(torch.int64)


class Way(StrEnum):
    """A way of copying a batch."""

    DIRECT = "direct"
    STAGED = "staged"
    ZERO_COPY = "zero_copy"


class CopyShape(NamedTuple):
    """Sizes of a batch to copy.

    Attributes:
        destination: The tier that is written.
        nbytes: Bytes of all pages.
        pages: Number of pages; kernels move each.
        pieces: Number of pieces after merging adjacent pages, for the direct way.
        runs: Number of contiguous ranges of the images, for the staged way.
    """

    destination: str
    nbytes: int
    pages: int
    pieces: int
    runs: int


class WayChooser(Protocol):
    """Chooses the way of copying a batch."""

    def choose(self, shape: CopyShape, ways: Collection[Way]) -> Way:
        """One of `ways`, of which there is at least one."""


@dataclass(frozen=True, slots=True)
class CudaResources:
    """State shared by the streams of a device.

    Attributes:
        ways: Ways of copying available with kernels.
    """

    accelerator: CudaAccelerator
    driver: Driver
    events: Events
    fallbacks: Fallbacks
    kernels: Kernels
    ways: tuple[Way, ...]


def _none_registered(offsets: npt.ArrayLike, lengths: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """`InOnePiece` of host memory that is not registered."""
    return np.zeros(np.broadcast(offsets, lengths).shape, dtype=np.bool_)


class CudaStream(Stream):
    """One direction. Every method runs in the thread that called `bind`."""

    depth = 4

    def __init__(
        self,
        resources: CudaResources,
        layout: KVLayout,
        destination: str,
        chooser: WayChooser,
        in_one_piece: InOnePiece | None,
        staging_bytes: int,
        images: ImageMemory | None = None,
        streams: CopyStreams | None = None,
    ) -> None:
        """`images`: device memory of the images, if they are there. The caller closes `streams`, if it gives them."""
        self._resources = resources
        self._images = images
        self._destination = destination
        self._chooser = chooser
        self._in_one_piece = in_one_piece or _none_registered
        self._layout = layout
        self._staging_bytes = staging_bytes
        self._programs = PROGRAMS if images is not None else LINK_PROGRAMS[destination]
        accelerator = resources.accelerator
        self._has_own_streams = streams is None
        if streams is None:
            largest = max(ref.page_bytes for group in layout.groups for ref in group.refs)
            streams = CopyStreams(accelerator, resources.driver, resources.fallbacks, staging_bytes, largest)
        self._streams = streams
        self._kernel_stream, self._link_stream, self._ring = streams.kernel_stream, streams.link_stream, streams.ring
        self._bounce: StagedStream | None = None
        self._buffers: list[DescriptorBuffer] = []
        self._copies = 0
        self._only_stream: torch.Stream | None = None
        """The stream that all copies since the last staged one used; `None` after a staged one, which uses both."""
        try:
            self._buffers += [DescriptorBuffer(accelerator, resources.fallbacks) for _ in range(self.depth)]
            self._has_kernels = resources.kernels.prepare(sorted(kernel_shapes(layout)))
            if in_one_piece is None or not self._has_kernels:
                self._take_bounce()
            # The memory may have had another owner, whose work on the current stream is not done.
            for stream in (self._kernel_stream, self._link_stream):
                self._join(accelerator.current_stream(), stream)
        except BaseException:
            self.close()
            raise

    def bind(self) -> None:
        """Make this stream and its device current in the calling thread, and relax its capture mode."""
        self._resources.accelerator.use(self._kernel_stream)
        self._resources.driver.make_current(self._resources.accelerator.ordinal)
        self._resources.driver.exchange_capture_mode(RELAXED)

    def copy(self, batch: CopyBatch, wait_events: tuple[DeviceEvent, ...]) -> Copy:
        """Submit `batch` by the fastest way; the streams wait for `wait_events`, the calling thread does not."""
        batch.check_live()
        for event in wait_events:
            for stream in (self._kernel_stream, self._link_stream):
                cast(StreamEvent, event).make_wait(stream)
        if not batch.is_d2d and not self._is_registered(batch):
            self._resources.fallbacks.count("host_unregistered")
            return self._through_bounce(batch)
        if batch.is_d2d and not self._has_kernels:
            self._resources.fallbacks.count("no_kernels")
            return self._through_bounce(batch)
        buffer = self._buffers[self._copies % self.depth]
        self._copies += 1
        buffer.begin()
        if batch.is_d2d:
            return self._copy_on(self._kernel_stream, buffer, lambda: self._copy_blocks(batch, buffer))
        way, pieces = self._choose(batch, buffer.builder)
        if way is Way.DIRECT:
            # In the order of the images: the link is twice as fast where their addresses ascend.
            pieces = buffer.builder.build(batch) if pieces is None else pieces
            if self._in_registrations(batch, pieces):
                return self._copy_on(
                    self._link_stream,
                    buffer,
                    lambda: self._copy_over_link(buffer.keep(*pieces.directed(self._destination))),
                )
            self._resources.fallbacks.count("straddling_piece")
            way, _ = self._choose(batch, buffer.builder, without=Way.DIRECT)
        match way:
            case Way.ZERO_COPY:
                return self._copy_on(self._kernel_stream, buffer, lambda: self._zero_copy(batch, buffer))
            case Way.STAGED if self._ring is not None:
                return self._staged(batch, buffer, self._ring)
            case _:
                return self._through_bounce(batch)

    def zero(self, address: int, nbytes: int) -> None:
        """In the memory that has the images."""
        if self._images is None:
            super().zero(address, nbytes)
        else:
            self._images.zero(address - self._images.address, nbytes)

    def drain(self) -> None:
        """Wait for both streams, and empty the bounce stages."""
        try:
            if self._bounce is not None:
                self._bounce.drain()
        finally:
            for stream in (self._kernel_stream, self._link_stream):
                self._resources.events.record(stream).wait()

    def close(self) -> None:
        """Free memory, then the streams: torch records an event on each stream that used the pinned memory it frees."""
        if self._bounce is not None:
            self._bounce.close()
        self._bounce = self._ring = None
        self._buffers = []
        if self._has_own_streams:
            self._streams.close()

    def _is_registered(self, batch: CopyBatch) -> bool:
        """Whether the device can access the images of `batch`: each lies in one piece of registered memory."""
        return all(
            bool(np.all(self._in_one_piece(part.images, batch.layout.image_bytes_of(part.group))))
            for part in batch.parts
        )

    def _in_registrations(self, batch: CopyBatch, pieces: Pieces) -> bool:
        """Whether each piece is in one registration: images side by side are copied as one piece."""
        offsets = pieces.host.view(np.int64) - batch.host_address
        return bool(np.all(self._in_one_piece(offsets, pieces.size.view(np.int64))))

    def _choose(
        self, batch: CopyBatch, builder: PieceBuilder, without: Way | None = None
    ) -> tuple[Way | None, Pieces | None]:
        """The way to copy `batch`, `None` if none is possible; and its pieces, if they were needed to choose."""
        ways = [way for way in self._resources.ways if way is not Way.STAGED or self._ring is not None]
        if not self._has_kernels:
            self._resources.fallbacks.count("no_kernels")
            ways = [Way.DIRECT]
        ways = [way for way in ways if way is not without]
        if len(ways) < 2:
            return ways[0] if ways else None, None
        counts = [count_pieces(batch, part) for part in batch.parts]
        pieces = builder.build(batch) if None in counts else None
        shape = CopyShape(
            self._destination,
            batch.nbytes,
            sum(part.page_copies for part in batch.parts),
            len(pieces.size) if pieces is not None else sum(count for count in counts if count is not None),
            sum(len(image_runs(batch.layout, part).size) * len(part.images) for part in batch.parts),
        )
        return self._chooser.choose(shape, ways), pieces

    def _copy_on(self, stream: torch.Stream, buffer: DescriptorBuffer, send: Callable[[], None]) -> Copy:
        """A copy on `stream`, ordered after all earlier work on both streams."""
        if self._only_stream is not stream:
            self._join(self._link_stream if stream is self._kernel_stream else self._kernel_stream, stream)
            self._only_stream = stream
        begun = self._record(stream)
        try:
            send()
            ended = self._record(stream)
        except BaseException:
            self._resources.events.release(begun)
            raise
        buffer.last_use = ended
        return StreamCopy(self._resources.events, begun, ended, ended)

    def _zero_copy(self, batch: CopyBatch, buffer: DescriptorBuffer) -> None:
        orders = []
        for part in batch.parts:
            order = kernel_arguments(batch.layout, part, rows_in_images(batch.layout, part, batch.host_address))
            orders.append(order._replace(shape=order.shape._replace(programs=self._programs)))
        self._run(zip(orders, self._upload(buffer, orders), strict=True))

    def _copy_blocks(self, batch: CopyBatch, buffer: DescriptorBuffer) -> None:
        orders = [
            block_copy_arguments(batch.layout, part, part.sources) for part in batch.parts if part.sources is not None
        ]
        self._launch("copy_blocks", zip(orders, self._upload(buffer, orders), strict=True))

    def _staged(self, batch: CopyBatch, buffer: DescriptorBuffer, ring: Ring) -> Copy:
        offloads = self._destination == HOST
        if self._only_stream is not None:
            self._join(
                self._only_stream,
                self._link_stream if self._only_stream is self._kernel_stream else self._kernel_stream,
            )
            self._only_stream = None
        begun = self._record(self._kernel_stream if offloads else self._link_stream)
        try:
            done_event = self._through_ring(batch, buffer, ring)
            ended = self._record(self._link_stream if offloads else self._kernel_stream)
        except BaseException:
            self._resources.events.release(begun)
            raise
        buffer.last_use = ended
        return StreamCopy(self._resources.events, begun, done_event if offloads else ended, ended)

    def _through_ring(self, batch: CopyBatch, buffer: DescriptorBuffer, ring: Ring) -> StreamEvent:
        """Submit a batch to both streams, slot by slot. Returns the event after the last kernel."""
        slots = [(ring.next(), parts) for parts in staged(batch.parts, ring.slot_bytes)]
        orders = [
            kernel_arguments(batch.layout, part, rows_in_stage(part, slot.address + offset))
            for slot, parts in slots
            for part, offset in parts
        ]
        given = iter(zip(orders, self._upload(buffer, orders), strict=True))
        for slot, parts in slots:
            descriptors = buffer.keep(*link_copies(batch, parts, slot.address))
            launches = list(itertools.islice(given, len(parts)))
            if self._destination == HOST:
                self._wait_for_slot(slot, self._kernel_stream)
                self._run(launches)
                self._join(self._kernel_stream, self._link_stream)
                self._copy_over_link(descriptors)
                slot.last_use = self._resources.events.record(self._link_stream)
            else:
                self._wait_for_slot(slot, self._link_stream)
                self._copy_over_link(descriptors)
                self._join(self._link_stream, self._kernel_stream)
                self._run(launches)
                slot.last_use = self._resources.events.record(self._kernel_stream)
        return self._resources.events.record(self._kernel_stream)

    def _through_bounce(self, batch: CopyBatch) -> Copy:
        """Through pinned stages that this thread fills and empties, after everything on both streams."""
        bounce = self._bounce
        if bounce is None:
            self._resources.fallbacks.count("late_bounce")
            bounce = self._take_bounce()
        if self._only_stream is not self._kernel_stream:
            self._join(self._link_stream, self._kernel_stream)
            self._only_stream = self._kernel_stream
        return bounce.copy(batch, ())

    def _take_bounce(self) -> StagedStream:
        resources = self._resources
        self._bounce = stream_into(
            self._destination, resources.accelerator, resources.events, resources.fallbacks, self._kernel_stream,
            self._layout, self._staging_bytes,
        )  # fmt: skip
        return self._bounce

    def _upload(self, buffer: DescriptorBuffer, orders: list[KernelArguments]) -> list[DeviceArguments]:
        """Bring `orders` to the device, before the kernels that follow."""
        copy, arguments = buffer.write(orders)
        self._resources.driver.copy_one(self._handle(self._kernel_stream), *copy)
        return arguments

    def _run(self, launches: Iterable[tuple[KernelArguments, DeviceArguments]]) -> None:
        self._launch("gather" if self._destination == HOST else "scatter", launches)

    def _launch(self, kernel: str, launches: Iterable[tuple[KernelArguments, DeviceArguments]]) -> None:
        for order, arguments in launches:
            self._resources.accelerator.launch(kernel, *arguments, order.shape)

    def _copy_over_link(self, descriptors: Descriptors) -> None:
        self._resources.driver.copy(self._handle(self._link_stream), *descriptors)

    def _wait_for_slot(self, slot: RingSlot, stream: torch.Stream) -> None:
        if slot.last_use is not None:
            slot.last_use.make_wait(stream)

    def _join(self, before: torch.Stream, after: torch.Stream) -> None:
        """Order all later work on `after` after all earlier work on `before`."""
        self._resources.events.record(before).make_wait(after)

    def _record(self, stream: torch.Stream) -> StreamEvent:
        return self._resources.events.record(stream, keep=True)

    def _handle(self, stream: torch.Stream) -> int:
        return self._resources.accelerator.handle(stream)
