"""Calibration of a device: which way of copying is the fastest for a batch, by measurement.

For each direction, way and page size, a measurement gives two figures: fixed seconds per copy and seconds per byte. The
latter is interpolated between sizes; there are no fixed thresholds. Blocks are in random order, so that no two pages
merge; images are as long as a stage, so that cuts do not matter. A small copy, and several large ones one after the
other, as an engine submits them, give the two figures; the best of several runs counts.
"""

from __future__ import annotations

import bisect
import json
import logging
import math
import os
import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from longshore.boundary import DEVICE, HOST, Section
from longshore.layout.model import KVGroup, KVLayout, PageRef
from longshore.transfer.copy_plan import plan_copy
from longshore.transfer.device.cuda.driver import RELAXED
from longshore.transfer.device.cuda.streams import CopyShape, CopyStreams, CudaResources, CudaStream, Way
from longshore.transfer.device.torch_streams import StreamCopy
from longshore.transfer.pieces import CopyBatch

_FORMAT = 3
_UNKNOWN = "unknown"
_KERNELS_COST = 1.3
_PIECE_COST = 3e-7  # of 0.7 us that the driver takes for a piece
_IN_A_ROW = 4

_log = logging.getLogger(__name__)


class Sample(NamedTuple):
    """A measurement of one way with pages of one size: `fixed` seconds, and `per_byte` seconds for each byte."""

    page_bytes: int
    fixed: float
    per_byte: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """Measurements on one device.

    Attributes:
        device: Its name.
        driver: The driver's version.
        curves: Samples by destination tier and way, in ascending order of page size.
        link: Width and speed of the link, from `link_of`.
    """

    device: str
    driver: int
    curves: Mapping[str, Mapping[Way, tuple[Sample, ...]]]
    link: str = _UNKNOWN

    def seconds(self, shape: CopyShape, way: Way) -> float:
        """An estimate for a batch of this `shape` by `way`; infinite for a way that was not measured."""
        if way is Way.DIRECT:
            fixed, per_byte = self._at(shape.destination, way, shape.nbytes / shape.pieces)
        else:
            fixed, per_byte = self._at(shape.destination, way, shape.nbytes / shape.pages)
        if way is Way.STAGED:  # kernel and link work at the same time
            per_byte = max(per_byte, self._at(shape.destination, Way.DIRECT, shape.nbytes / shape.runs)[1])
        return fixed + per_byte * shape.nbytes

    def choose(self, shape: CopyShape, ways: Collection[Way]) -> Way:
        """The way of the least cost: its time, and what it takes from others.

        Kernels take multiprocessors, and both directions together are no faster by them than one: DMA reaches 1.7 times
        as much. DMA takes a processor for each piece, and where it keeps one busy (pieces of less than 64 KiB at 50
        GB/s) copies were half as fast as in calibration.
        """

        def cost(way: Way) -> float:
            seconds = self.seconds(shape, way)
            return seconds + _PIECE_COST * shape.pieces if way is Way.DIRECT else _KERNELS_COST * seconds

        return min(ways, key=cost)

    def _at(self, destination: str, way: Way, page_bytes: float) -> tuple[float, float]:
        samples = self.curves.get(destination, {}).get(way, ())
        if not samples:
            return math.inf, math.inf
        after = bisect.bisect([sample.page_bytes for sample in samples], page_bytes)
        low, high = samples[max(0, after - 1)], samples[min(after, len(samples) - 1)]
        if low is high:
            # Below the smallest page that was measured, what a page costs stays; what a byte costs grows.
            return low.fixed, low.per_byte * (max(1.0, low.page_bytes / page_bytes) if after == 0 else 1.0)
        share = math.log(page_bytes / low.page_bytes) / math.log(high.page_bytes / low.page_bytes)
        per_byte = low.per_byte * (high.per_byte / low.per_byte) ** share
        return low.fixed + share * (high.fixed - low.fixed), per_byte

    def as_json(self) -> dict[str, object]:
        """For `json.dump`."""
        curves = {destination: {way.value: list(map(list, samples)) for way, samples in ways.items()}
                  for destination, ways in self.curves.items()}  # fmt: skip
        return {"format": _FORMAT, "device": self.device, "driver": self.driver, "link": self.link, "curves": curves}

    def save(self, path: Path) -> None:
        """Write it to `path` atomically; raises `OSError`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f"{path.name}.{os.getpid()}")
        beside.write_text(json.dumps(self.as_json()))
        beside.replace(path)


def load(path: Path, device: str, driver: int, link: str = _UNKNOWN) -> Calibration | None:
    """The calibration in `path`; `None` if it does not exist, is invalid, or is of another device, driver or link."""
    try:
        found: Any = json.loads(path.read_text())
        if found["format"] != _FORMAT or (found["device"], found["driver"], found["link"]) != (device, driver, link):
            return None
        curves = {
            str(destination): {Way(way): _samples(samples) for way, samples in ways.items()}
            for destination, ways in found["curves"].items()
        }
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        _log.warning("calibration file %s is invalid, measuring again: %s", path, error)
        return None
    return Calibration(device, driver, curves, link)


def default_path(device: str, driver: int, link: str = _UNKNOWN) -> Path:
    """Default path of a device's calibration, in the user's cache directory."""
    root = os.environ.get("XDG_CACHE_HOME")
    name = "".join(letter if letter.isalnum() else "-" for letter in f"{device}-{driver}-{link}".lower())
    return (Path(root) if root else Path.home() / ".cache") / "longshore" / f"copy-{name}.json"


def link_of(pci_address: str, sysfs: Path = Path("/sys")) -> str:
    """Width and speed of a device's link, such as `x16 32.0 GT/s PCIe`; `unknown` if the system does not report it.

    The speed is the lower maximum of the device and of the bridge above it: the current one falls when the GPU idles.
    """
    device = sysfs / "bus/pci/devices" / pci_address
    try:
        width = (device / "current_link_width").read_text().strip()
        speeds = [(device / "max_link_speed").read_text().strip()]
        bridge = device.resolve().parent / "max_link_speed"
        if bridge.exists():
            speeds.append(bridge.read_text().strip())
        return f"x{width} {min(speeds, key=lambda speed: float(speed.split()[0]))}"
    except (OSError, ValueError, IndexError):
        return _UNKNOWN


def _samples(given: Any) -> tuple[Sample, ...]:
    samples = tuple(Sample(int(page), float(fixed), float(per_byte)) for page, fixed, per_byte in given)
    sizes = [sample.page_bytes for sample in samples]
    if not samples or sizes != sorted(set(sizes)) or sizes[0] < 1:
        raise ValueError(f"expected page sizes in ascending order, got {sizes}")
    if any(sample.fixed < 0 or not 0 < sample.per_byte < math.inf for sample in samples):
        raise ValueError(f"expected positive times, got {samples}")
    return samples


_IMAGE = 1 << 20
_FASTEST = 1e12  # bytes per second that no link reaches: a measurement that says more is no measurement


@dataclass(frozen=True, slots=True)
class Effort:
    """How much to measure.

    Attributes:
        sizes: Sizes of pages, ascending.
        small: Bytes of the small copy; at least one page moves.
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

    def choose(self, shape: CopyShape, ways: Collection[Way]) -> Way:
        """The way that was given."""
        return self.way


class SamplePages:
    """Pages of one size on the device, images for them in pinned memory, and batches between them."""

    def __init__(self, resources: CudaResources, page_bytes: int, total_bytes: int) -> None:
        image = min(_IMAGE, total_bytes)
        refs = max(1, image // page_bytes)
        self.blocks = max(2, total_bytes // (refs * page_bytes))
        self.device = resources.accelerator.device_bytes(refs * self.blocks * page_bytes)
        pages = tuple(PageRef(0, ref * self.blocks * page_bytes, page_bytes, page_bytes) for ref in range(refs))
        self.layout = KVLayout((KVGroup("pages", 1, 1, pages),), [self.device], self.blocks)
        self.host = resources.accelerator.pinned_bytes(self.blocks * self.layout.image_bytes)
        order = list(range(self.blocks))
        random.Random(page_bytes).shuffle(order)  # noqa: S311 - no secret
        self._order = tuple(order)

    def batch(self, destination: str, nbytes: int) -> CopyBatch:
        """About `nbytes` of scattered pages, at least one block."""
        count = min(self.blocks, max(1, nbytes // self.layout.groups[0].block_bytes))
        return plan_copy(
            self.layout,
            [Section(0, 0, self._order[:count])],
            np.arange(count, dtype=np.int64) * self.layout.image_bytes,
            destination=destination,
            host_address=self.host.data_ptr(),
            host_bytes=self.host.numel(),
        ).batch


def measure(
    resources: CudaResources, staging_bytes: int, effort: Effort
) -> Mapping[str, Mapping[Way, tuple[Sample, ...]]]:
    """Samples of every way that the device has, in both directions.

    Takes two streams and one ring for all of them, and gives them and all memory back. The calling thread is on its own
    stream whenever memory is taken, so that torch keeps one pool of it.
    """
    curves: dict[str, dict[Way, list[Sample]]] = {
        destination: {way: [] for way in resources.ways} for destination in (HOST, DEVICE)
    }
    accelerator, driver = resources.accelerator, resources.driver
    with accelerator.as_current():
        streams = CopyStreams(accelerator, driver, resources.fallbacks, staging_bytes, max(effort.sizes))
        try:
            for size in effort.sizes:
                pages = SamplePages(resources, size, effort.large)
                for destination, ways in curves.items():
                    for way, samples in ways.items():
                        samples.append(_sample(resources, streams, pages, destination, way, effort))
                del pages
        finally:
            streams.close()
            accelerator.empty_cache()
    return {destination: {way: tuple(samples) for way, samples in ways.items()} for destination, ways in curves.items()}


def all_registered(offsets: npt.ArrayLike, lengths: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """`InOnePiece` of host memory that was pinned as one."""
    return np.ones(np.broadcast(offsets, lengths).shape, dtype=np.bool_)


def _sample(
    resources: CudaResources, streams: CopyStreams, pages: SamplePages, destination: str, way: Way, effort: Effort
) -> Sample:
    small, large = pages.batch(destination, effort.small), pages.batch(destination, effort.large)
    size = pages.layout.groups[0].refs[0].page_bytes
    stream = CudaStream(resources, pages.layout, destination, Always(way), all_registered, 0, streams=streams)
    before = resources.accelerator.current_stream()
    mode = resources.driver.exchange_capture_mode(RELAXED)
    try:
        stream.bind()
        short = _best(lambda: stream.copy(small, ()).finish(), effort.repeats)
        long = _best(lambda: _in_a_row(stream, large), effort.repeats)
    finally:
        try:
            stream.drain()
        finally:
            resources.accelerator.use(before)
            resources.driver.exchange_capture_mode(mode)
            stream.close()
    per_byte = max((long - short) / (_IN_A_ROW * large.nbytes - small.nbytes), 1 / _FASTEST)
    return Sample(size, max(0.0, short - per_byte * small.nbytes), per_byte)


def _in_a_row(stream: CudaStream, batch: CopyBatch) -> float:
    """Seconds of several copies of `batch`, each submitted while the one before it is in flight."""
    copies = [cast(StreamCopy, stream.copy(batch, ())) for _ in range(_IN_A_ROW)]
    copies[-1].ended.wait()
    seconds = copies[0].begun.seconds_until(copies[-1].ended)
    for copy in copies:
        copy.finish()
    return seconds


def _best(run: Callable[[], float], repeats: int) -> float:
    """The shortest of `repeats` runs, after one that does not count."""
    run()
    return min(run() for _ in range(repeats))
