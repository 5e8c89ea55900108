"""Measures each way of copying on the device: fixed cost per copy and cost per byte, by page size.

Blocks are in random order, so that no two pages merge; images are as long as a stage, so that cuts do not matter. A
small and a large load give the two figures; the best of several runs counts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from longshore.boundary import DEVICE, HOST, Section
from longshore.layout.model import KVGroup, KVLayout, PageRef
from longshore.transfer.batch import CopyBatch
from longshore.transfer.device.cuda.chooser import CopyShape, Sample, Way
from longshore.transfer.device.cuda.driver import RELAXED
from longshore.transfer.device.cuda.resources import CopyStreams
from longshore.transfer.device.cuda.streams import CudaStream, Tools
from longshore.transfer.selection import select

_IMAGE = 1 << 20
_FASTEST = 1e12  # bytes per second that no link reaches: a measurement that says more is no measurement


@dataclass(frozen=True, slots=True)
class Effort:
    """How much to measure.

    Attributes:
        sizes: Sizes of pages, ascending.
        small: Bytes of the small load; at least one page moves.
        large: Bytes of the large one.
        repeats: Runs of each.
    """

    sizes: tuple[int, ...]
    small: int
    large: int
    repeats: int


QUICK = Effort((4 << 10, 16 << 10, 64 << 10, 512 << 10, 2 << 20), 1 << 18, 16 << 20, 3)
"""A fraction of a second, without the compilation of the kernels."""

THOROUGH = Effort(tuple(512 << shift for shift in range(13)), 1 << 18, 32 << 20, 9)
"""Some seconds."""


class Always:
    """Chooses one way, whatever there is to copy."""

    def __init__(self, way: Way) -> None:
        self.way = way

    def choose(self, load: CopyShape, ways: Collection[Way]) -> Way:
        """That one."""
        return self.way


class SamplePages:
    """Pages of one size on the device, images for them in pinned memory, and batches between them."""

    def __init__(self, tools: Tools, page_bytes: int, total_bytes: int) -> None:
        image = min(_IMAGE, total_bytes)
        refs = max(1, image // page_bytes)
        self.blocks = max(2, total_bytes // (refs * page_bytes))
        self.device = tools.accelerator.device_bytes(refs * self.blocks * page_bytes)
        pages = tuple(PageRef(0, ref * self.blocks * page_bytes, page_bytes, page_bytes) for ref in range(refs))
        self.layout = KVLayout((KVGroup("pages", 1, 1, pages),), [self.device], self.blocks)
        self.host = tools.accelerator.pinned_bytes(self.blocks * self.layout.image_bytes)
        order = list(range(self.blocks))
        random.Random(page_bytes).shuffle(order)  # noqa: S311 - no secret
        self._order = tuple(order)

    def batch(self, into: str, nbytes: int) -> CopyBatch:
        """About `nbytes` of scattered pages, at least one block."""
        count = min(self.blocks, max(1, nbytes // self.layout.groups[0].block_bytes))
        return select(
            self.layout,
            [Section(0, 0, self._order[:count])],
            np.arange(count, dtype=np.int64) * self.layout.image_bytes,
            into=into,
            host_address=self.host.data_ptr(),
            host_bytes=self.host.numel(),
        ).whole


def measure(tools: Tools, staging_bytes: int, effort: Effort) -> Mapping[str, Mapping[Way, tuple[Sample, ...]]]:
    """Samples of every way that the device has, in both directions.

    Takes two streams and one ring for all of them, and gives them and all memory back. The calling thread is on its own
    stream whenever memory is taken, so that torch keeps one pool of it.
    """
    curves: dict[str, dict[Way, list[Sample]]] = {into: {way: [] for way in tools.ways} for into in (HOST, DEVICE)}
    accelerator, driver = tools.accelerator, tools.driver
    with accelerator.as_current():
        paths = CopyStreams(accelerator, driver, tools.fallbacks, staging_bytes, max(effort.sizes))
        try:
            for size in effort.sizes:
                pages = SamplePages(tools, size, effort.large)
                for into, ways in curves.items():
                    for way, samples in ways.items():
                        samples.append(_sample(tools, paths, pages, into, way, effort))
                del pages
        finally:
            paths.close()
            accelerator.empty_cache()
    return {into: {way: tuple(samples) for way, samples in ways.items()} for into, ways in curves.items()}


def everything(offsets: npt.ArrayLike, lengths: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """`InOnePiece` of host memory that was pinned as one."""
    return np.ones(np.broadcast(offsets, lengths).shape, dtype=np.bool_)


def _sample(tools: Tools, paths: CopyStreams, pages: SamplePages, into: str, way: Way, effort: Effort) -> Sample:
    small, large = pages.batch(into, effort.small), pages.batch(into, effort.large)
    size = pages.layout.groups[0].refs[0].page_bytes
    stream = CudaStream(tools, pages.layout, into, Always(way), everything, 0, paths=paths)
    before = tools.accelerator.current_stream()
    mode = tools.driver.exchange_capture_mode(RELAXED)
    try:
        stream.bind()
        short, long = (_best(lambda: stream.copy(batch, ()).finish(), effort.repeats) for batch in (small, large))  # noqa: B023
    finally:
        try:
            stream.drain()
        finally:
            tools.accelerator.use(before)
            tools.driver.exchange_capture_mode(mode)
            stream.close()
    more = large.nbytes - small.nbytes
    per_byte = max((long - short) / more if more else long / large.nbytes, 1 / _FASTEST)
    return Sample(size, max(0.0, short - per_byte * small.nbytes), per_byte)


def _best(run: Callable[[], float], repeats: int) -> float:
    """The shortest of `repeats` runs, after one that does not count."""
    run()
    return min(run() for _ in range(repeats))
