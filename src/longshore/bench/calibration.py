"""`longshore bench copy --calibrate`: measures the ways of copying on this GPU, and saves the calibration."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

from longshore.boundary import HOST
from longshore.errors import BenchError
from longshore.transfer.device.cuda.calibration import THOROUGH, Calibration, Effort
from longshore.transfer.device.cuda.device import CudaDevice
from longshore.transfer.device.cuda.streams import CopyShape

LOADS = (1 << 20, 32 << 20)
"""Bytes of the transfers in the table: a short job, and a full batch."""


def run(device: CudaDevice | None = None, effort: Effort = THOROUGH) -> dict[str, Any]:
    """Measure the current GPU, or `device`; raises `BenchError` where there is none.

    Returns what `--json` prints: the calibration, its path, and the ways `chosen` by direction and sizes.
    """
    with contextlib.closing(device or _current()) as gpu:
        calibration, path = gpu.calibrate(effort), str(gpu.calibration_path)
    return {**calibration.as_json(), "path": path, "chosen": list(_chosen(calibration))}


def _chosen(calibration: Calibration) -> Iterator[dict[str, Any]]:
    """The way for scattered pages by direction, size of transfer and of page, and the GB/s expected of each way."""
    for destination, ways in calibration.curves.items():
        sizes = sorted({sample.page_bytes for samples in ways.values() for sample in samples})
        for nbytes, size in itertools.product(LOADS, sizes):
            pages = max(1, nbytes // size)
            load = CopyShape(destination, pages * size, pages, pages, max(1, nbytes >> 20))
            rates = {way.value: load.nbytes / calibration.seconds(load, way) / 1e9 for way in ways}
            way = calibration.choose(load, tuple(ways)).value
            direction = "offload" if destination == HOST else "onboard"
            sizes_of = {"page_bytes": size, "bytes": load.nbytes}
            yield {"direction": direction, **sizes_of, "way": way, "gb_per_s": rates[way], "rates": rates}


def _current() -> CudaDevice:
    import torch  # noqa: PLC0415 - slow to import

    if not torch.cuda.is_available():
        raise BenchError("expected a CUDA GPU to calibrate: torch finds none")
    return CudaDevice("cuda")
