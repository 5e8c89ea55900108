"""Chooses the way of copying for a batch, from measurements on the device.

    direct      pages ◄──── batched DMA, one piece each ────► images           large pieces
    staged      pages ◄─ kernel ─► stage ◄─ batched DMA ────► images           small pages, long runs in the images
    zero copy   pages ◄──── kernel on host addresses ───────► images           small pages, few bytes or short runs

For each direction, way and page size, a measurement gives two figures: fixed seconds per copy and seconds per byte. The
latter is interpolated between sizes; there are no fixed thresholds.
"""

from __future__ import annotations

import bisect
import json
import logging
import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, Protocol

_FORMAT = 2
_UNKNOWN = "unknown"

_log = logging.getLogger(__name__)


class Way(StrEnum):
    """A way of copying a batch."""

    DIRECT = "direct"
    STAGED = "staged"
    ZERO_COPY = "zero_copy"


class CopyShape(NamedTuple):
    """Sizes of a batch to copy.

    Attributes:
        into: The tier that is written.
        nbytes: Bytes of all pages.
        pages: Number of pages; kernels move each.
        pieces: Number of pieces after merging adjacent pages, for the direct way.
        runs: Number of contiguous ranges of the images, for the staged way.
    """

    into: str
    nbytes: int
    pages: int
    pieces: int
    runs: int


class Chooses(Protocol):
    """Chooses the way of copying a batch."""

    def choose(self, load: CopyShape, ways: Collection[Way]) -> Way:
        """One of `ways`, of which there is at least one."""


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

    def seconds(self, load: CopyShape, way: Way) -> float:
        """An estimate for `load` by `way`; infinite for a way that was not measured."""
        if way is Way.DIRECT:
            fixed, per_byte = self._at(load.into, way, load.nbytes / load.pieces)
        else:
            fixed, per_byte = self._at(load.into, way, load.nbytes / load.pages)
        if way is Way.STAGED:  # kernel and link work at the same time
            per_byte = max(per_byte, self._at(load.into, Way.DIRECT, load.nbytes / load.runs)[1])
        return fixed + per_byte * load.nbytes

    def choose(self, load: CopyShape, ways: Collection[Way]) -> Way:
        """The fastest of `ways`."""
        return min(ways, key=lambda way: self.seconds(load, way))

    def _at(self, into: str, way: Way, page_bytes: float) -> tuple[float, float]:
        samples = self.curves.get(into, {}).get(way, ())
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
        curves = {into: {way.value: list(map(list, samples)) for way, samples in ways.items()}
                  for into, ways in self.curves.items()}  # fmt: skip
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
            str(into): {Way(way): _samples(samples) for way, samples in ways.items()}
            for into, ways in found["curves"].items()
        }
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
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
