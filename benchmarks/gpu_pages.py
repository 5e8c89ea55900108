"""What the GPU benchmark copies: pages and their images in pinned memory, by the engine and by the driver."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch

from longshore.boundary import HOST, Items, Route, Section, Slabs, Slots, Status, Transfer
from longshore.errors import BenchError
from longshore.layout import KVGroup, KVLayout, PageRef
from longshore.transfer import D2H, H2D, TransferEngine
from longshore.transfer.copy_plan import plan_copy
from longshore.transfer.device.cuda.device import CudaDevice
from longshore.transfer.device.cuda.driver import CudaAccelerator, Driver
from longshore.transfer.device.cuda.streams import WayChooser
from longshore.transfer.device.torch_streams import Events, Fallbacks
from longshore.transfer.pieces import PieceBuilder

_MOST_PAGES = 16_384  # of those that go one by one: each takes the driver a microsecond or more
_LARGEST_IMAGE = 16 << 20


@dataclass(frozen=True, slots=True)
class Rig:
    """The GPU, or what stands in for it.

    Attributes:
        make_device: A device that chooses as it is told; engines close theirs.
        library: The driver's functions.
        finish_compute: Blocks until the calling thread's stream has done its work.
        matrix: Side of the matrices of the product, and where they are.
        on_own_stream: Within it the calling thread is on a stream that no other thread uses.
        vllm_swap: vLLM's own function for blocks of so many bytes on a route; `None` where vLLM is not installed.
    """

    accelerator: CudaAccelerator
    make_device: Callable[[WayChooser | None], CudaDevice]
    library: object
    finish_compute: Callable[[], None]
    matrix: tuple[int, str]
    on_own_stream: Callable[[], AbstractContextManager[object]]
    vllm_swap: Callable[[int, Route], Callable[..., object]] | None = None


class PinnedHost:
    """Slots in pinned memory, side by side."""

    def __init__(self, accelerator: CudaAccelerator, slots: int, image_bytes: int) -> None:
        self.memory = accelerator.pinned_bytes(slots * image_bytes)
        self.slabs = Slabs.of_one_size(image_bytes, slots)
        self.address = self.memory.data_ptr()
        self.nbytes = slots * image_bytes

    @property
    def arena(self) -> PinnedHost:
        return self


class Pages:
    """Pages of one size on the device and as many images in pinned memory; the blocks of an offload and of an onboard
    are apart, so that both may run at once."""

    def __init__(self, rig: Rig, page_bytes: int, total_bytes: int, order: str) -> None:
        refs = max(1, min(64, _LARGEST_IMAGE // page_bytes, total_bytes // page_bytes))
        self.per_chunk = 4 if page_bytes <= 32 << 10 else 1
        chunks = max(1, total_bytes // (refs * page_bytes * self.per_chunk))
        half = chunks * self.per_chunk
        self.rig = rig
        self.page_bytes = page_bytes
        self.nbytes = half * refs * page_bytes
        self.tensor = rig.accelerator.device_bytes(2 * self.nbytes)
        pages = tuple(PageRef(0, ref * 2 * half * page_bytes, page_bytes, page_bytes) for ref in range(refs))
        self.layout = KVLayout((KVGroup("kv", 16, self.per_chunk, pages),), [self.tensor], 2 * half)
        self.host = PinnedHost(rig.accelerator, 2 * chunks, self.layout.image_bytes)
        self.blocks = {D2H: list(range(half)), H2D: list(range(half, 2 * half))}
        self.slots = {D2H: list(range(chunks)), H2D: list(range(chunks, 2 * chunks))}
        if order == "scattered":
            for ids in (*self.blocks.values(), *self.slots.values()):
                random.Random(page_bytes).shuffle(ids)  # noqa: S311 - no secret
        self._jobs = 0

    def engine(self, chooser: WayChooser | None) -> TransferEngine:
        return TransferEngine(self.layout, self.rig.make_device(chooser), self.host)

    def transfer(self, route: Route) -> Transfer:
        self._jobs += 1
        slots = tuple(self.slots[route])
        sides = (None, Slots(HOST, 0, slots)) if route == D2H else (Slots(HOST, 0, slots), None)
        keys = tuple(slot.to_bytes(32, "little") for slot in slots)
        items = Items(keys, (None,) * len(slots), *sides)  # as the cache gives them
        return Transfer(self._jobs, route, items, (Section(0, 0, tuple(self.blocks[route])),))

    def move(self, engine: TransferEngine, routes: Sequence[Route]) -> float:
        """Seconds from the first `submit` until all have their results."""
        transfers = [self.transfer(route) for route in routes]
        begun = time.perf_counter()
        for transfer in transfers:
            engine.submit(transfer)
        engine.wait([transfer.job for transfer in transfers])
        seconds = time.perf_counter() - begun
        for result in engine.poll():
            if set(result.statuses) != {Status.OK}:
                raise BenchError(f"a job ended as {sorted({status.value for status in result.statuses})}")
        return seconds

    def check(self, engine: TransferEngine) -> None:
        """That bytes which go out and come back into other blocks are the same."""
        half = len(self.blocks[D2H])
        out = self.transfer(D2H)
        pages = self.tensor.view(-1, 2 * half, self.page_bytes)
        pages.random_(0, 256)
        self.rig.finish_compute()
        engine.submit(out)
        engine.wait([out.job])
        items = Items(out.items.keys, out.items.parents, out.items.destination, None)
        back = Transfer(out.job + 1_000_000, H2D, items, (Section(0, 0, tuple(self.blocks[H2D])),))
        engine.submit(back)
        engine.wait([back.job])
        engine.poll()
        read, written = (torch.tensor(self.blocks[route], device=pages.device) for route in (D2H, H2D))
        if not torch.equal(pages[:, read], pages[:, written]):
            raise BenchError(f"pages of {self.page_bytes} bytes did not come back as they went")


class References:
    """The driver's own calls, and vLLM's, over the same bytes, on one stream for each direction."""

    def __init__(self, rig: Rig, pages: Pages) -> None:
        self._rig = rig
        self._pages = pages
        self._driver = Driver(rig.library)
        self._driver.make_current(rig.accelerator.ordinal)
        self._events = Events(rig.accelerator, Fallbacks(), 4)
        routes = (D2H, H2D)
        self._streams = {route: rig.accelerator.create_stream(self._driver) for route in routes}
        self._scattered = {route: self._descriptors(route) for route in routes}
        self._some = {route: [column[:_MOST_PAGES] for column in self._scattered[route]] for route in routes}
        if rig.vllm_swap is not None:
            self._swaps = {route: rig.vllm_swap(pages.page_bytes, route) for route in routes}
            self._pinned = {route: [self._pin(column) for column in self._some[route]] for route in routes}

    def large(self, routes: Sequence[Route]) -> float:
        """Bytes per second of one copy in each direction."""
        columns = {}
        for index, route in enumerate(routes):
            sides = (self._pages.tensor.data_ptr(), self._pages.host.address)
            at, to = (side + index * self._pages.nbytes for side in (sides if route == D2H else sides[::-1]))
            columns[route] = [np.array([number], dtype=np.uint64) for number in (to, at, self._pages.nbytes)]
        return self._timed(columns, lambda route: self._driver.copy_each(self._handle(route), *columns[route]))

    def per_page(self, routes: Sequence[Route]) -> float:
        """Bytes per second of one call for each page, over some of them."""
        columns = {route: self._some[route] for route in routes}
        return self._timed(columns, lambda route: self._driver.copy_each(self._handle(route), *columns[route]))

    def batched(self, routes: Sequence[Route]) -> float:
        """Bytes per second of the pages as they are, in batched calls."""
        columns = {route: self._scattered[route] for route in routes}
        return self._timed(columns, lambda route: self._driver.copy(self._handle(route), *columns[route]))

    def vllm(self, routes: Sequence[Route]) -> float | None:
        """Bytes per second of one call of vLLM's own function, over some pages; `None` where vLLM is not installed."""
        if self._rig.vllm_swap is None:
            return None
        return self._timed({route: self._some[route] for route in routes}, self._swap)

    def _swap(self, route: Route) -> None:
        to, at, size = self._pinned[route]
        with self._rig.accelerator.on(self._streams[route]):
            # As its offloading worker calls it: host memory may be read ahead of the stream.
            self._swaps[route](at, to, size, is_src_access_order_any=route == H2D)

    def _pin(self, column: np.ndarray) -> torch.Tensor:
        pinned = self._rig.accelerator.pinned_bytes(column.nbytes).view(torch.int64)
        return pinned.copy_(torch.from_numpy(column.view(np.int64)))

    def _handle(self, route: Route) -> int:
        return self._rig.accelerator.handle(self._streams[route])

    def _timed(self, columns: dict[Route, list[np.ndarray]], send: Callable[[Route], None]) -> float:
        failures: list[BaseException] = []
        threads = [threading.Thread(target=self._send, args=(send, route, failures)) for route in columns]
        begun = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - begun
        if failures:
            raise failures[0]
        return sum(int(column[2].sum()) for column in columns.values()) / seconds

    def _send(self, send: Callable[[Route], None], route: Route, failures: list[BaseException]) -> None:
        try:
            self._driver.make_current(self._rig.accelerator.ordinal)
            send(route)
            self._events.record(self._streams[route]).wait()
        except BaseException as error:  # noqa: BLE001 - raised by the thread that measures
            failures.append(error)

    def _descriptors(self, route: Route) -> list[np.ndarray]:
        """Destination, source and size of every page, none merged."""
        pages = self._pages
        batch = plan_copy(
            pages.layout,
            [Section(0, 0, pages.blocks[route])],
            pages.host.slabs.offsets(0, pages.slots[route]),
            destination=route.destination,
            host_address=pages.host.address,
            host_bytes=pages.host.nbytes,
        ).batch
        merged = PieceBuilder().build(batch)
        counts = merged.size // np.uint64(pages.page_bytes)
        before = np.repeat(np.cumsum(counts) - counts, counts.astype(np.int64))
        within = (np.arange(int(counts.sum()), dtype=np.uint64) - before) * np.uint64(pages.page_bytes)
        device, host = (np.repeat(side, counts.astype(np.int64)) + within for side in (merged.device, merged.host))
        size = np.full(len(device), pages.page_bytes, dtype=np.uint64)
        return [host, device, size] if route.destination == HOST else [device, host, size]
