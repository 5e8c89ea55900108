"""`longshore bench copy --calibrate`: measures the ways of copying on this GPU, and saves the calibration."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from longshore.boundary import HOST
from longshore.errors import BenchError
from longshore.transfer.device.cuda.calibration import THOROUGH, Calibration, Effort
from longshore.transfer.device.cuda.device import CudaDevice
from longshore.transfer.device.cuda.streams import CopyShape, Way

LOADS = (1 << 20, 32 << 20)
"""Bytes of the transfers in the table: a short job, and a full batch."""


@dataclass(frozen=True, slots=True)
class Calibrated:
    """A calibration, and the path of its file."""

    calibration: Calibration
    path: Path

    def as_json(self) -> dict[str, object]:
        """The output of `--json`: the calibration, its path, and the chosen ways by direction and sizes."""
        chosen = [
            {
                "direction": line.direction,
                "page_bytes": line.page_bytes,
                "bytes": line.nbytes,
                "way": line.way.value,
                "gb_per_s": line.rates[line.way],
            }
            for line in self.lines()
        ]
        return {**self.calibration.as_json(), "path": str(self.path), "chosen": chosen}

    def lines(self) -> Iterator[CalibrationRow]:
        """The expected rate of each way, by direction, size of transfer and of page."""
        for into, ways in self.calibration.curves.items():
            sizes = sorted({sample.page_bytes for samples in ways.values() for sample in samples})
            for nbytes in LOADS:
                for size in sizes:
                    pages = max(1, nbytes // size)
                    load = CopyShape(into, pages * size, pages, pages, max(1, nbytes >> 20))
                    rates = {way: load.nbytes / self.calibration.seconds(load, way) / 1e9 for way in ways}
                    direction = "offload" if into == HOST else "onboard"
                    yield CalibrationRow(
                        direction, size, load.nbytes, rates, self.calibration.choose(load, tuple(ways))
                    )


@dataclass(frozen=True, slots=True)
class CalibrationRow:
    """GB/s of each way for scattered pages of one size, and the chosen way."""

    direction: str
    page_bytes: int
    nbytes: int
    rates: dict[Way, float]
    way: Way


def run(device: CudaDevice | None = None, effort: Effort = THOROUGH) -> Calibrated:
    """Measure the current GPU, or `device`; raises `BenchError` where there is none."""
    with contextlib.closing(device or _current()) as gpu:
        return Calibrated(gpu.calibrate(effort), gpu.calibration_path)


def _current() -> CudaDevice:
    import torch  # noqa: PLC0415 - slow to import

    if not torch.cuda.is_available():
        raise BenchError("expected a CUDA GPU to calibrate: torch finds none")
    return CudaDevice("cuda")
