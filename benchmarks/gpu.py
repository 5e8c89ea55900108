"""Copies of a GPU at every size of page, and what they take from a matrix product that runs meanwhile.

    python benchmarks/gpu.py [--json] [--bytes 256MiB] [--budget 420] [--out benchmarks/results]

Each figure is GB/s of payload through the transfer engine, from `submit` to the result, beside three references that
were taken in turn with it: one large copy from and to pinned memory, `cuMemcpyAsync` page by page, and the pages as
they are in batched DMA. The reference of "both" is two large copies at once. A table is printed, and everything is
written to `<out>/<device>-<date>.json`, with the versions and the commit.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from gpu_pages import Pages, References, Rig
from longshore.bench.harness import size_of
from longshore.bench.machine import machine_facts
from longshore.boundary import Route
from longshore.transfer import OFFLOAD, ONBOARD, TransferEngine
from longshore.transfer.device.cuda.accelerator import CudaAccelerator
from longshore.transfer.device.cuda.calibrate import THOROUGH, Always, Effort, everything
from longshore.transfer.device.cuda.chooser import Chooses, Way
from longshore.transfer.device.cuda.device import CudaDevice
from longshore.transfer.device.cuda.driver import Driver, load
from longshore.transfer.device.torch_streams import with_index

SIZES = (512, 2 << 10, 4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10, 256 << 10, 2 << 20)
ORDERS = ("scattered", "contiguous")
DIRECTIONS = ("offload", "onboard", "both")
ROUTES = {"offload": (OFFLOAD,), "onboard": (ONBOARD,), "both": (OFFLOAD, ONBOARD)}


@dataclass(frozen=True, slots=True)
class Figure:
    """GB/s for pages of one size; `share` is of the large copy."""

    page_bytes: int
    order: str
    direction: str
    ours: float
    large: float
    per_page: float | None
    batched: float | None
    share: float
    ways: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Slowdown:
    """How much longer a bf16 matrix product takes while pages of one size are copied; 0.04 is 4 %."""

    page_bytes: int
    direction: str
    slowdown: float
    copied: float


def copies(
    rig: Rig, chooses: Chooses | None, *, sizes: Sequence[int], total_bytes: int, repeats: int, deadline: float
) -> Iterator[Figure]:
    """A figure for each size, order and direction, until `deadline` (`time.monotonic`)."""
    for size in sizes:
        for order in ORDERS:
            if time.monotonic() > deadline:
                return
            pages = Pages(rig, size, total_bytes, order)
            references = References(rig, pages)
            engine = pages.engine(chooses)
            try:
                pages.check(engine)
                taken = {name: _in_turn(pages, engine, references, ROUTES[name], repeats) for name in DIRECTIONS}
            finally:
                engine.close()
            ways = _ways(pages, repeats) if order == "scattered" else {}
            for name in DIRECTIONS:
                ours, large, per_page, batched = taken[name]
                yield Figure(size, order, name, ours, large, per_page, batched, ours / large, ways.get(name, {}))


def _in_turn(
    pages: Pages, engine: TransferEngine, references: References, routes: Sequence[Route], repeats: int
) -> tuple[float, float, float, float]:
    """Medians of ours, the large copy, page by page, and batched, in GB/s."""
    taken: list[list[float]] = [[], [], [], []]
    for repeat in range(repeats + 1):
        sides = (
            len(routes) * pages.nbytes / pages.move(engine, routes),
            references.large(routes),
            references.per_page(routes),
            references.batched(routes),
        )
        for figures, side in zip(taken, sides, strict=True):
            if repeat:
                figures.append(side / 1e9)
    ours, large, per_page, batched = map(statistics.median, taken)
    return ours, large, per_page, batched


def _ways(pages: Pages, repeats: int) -> dict[str, dict[str, float]]:
    """GB/s by each way alone, by direction."""
    found: dict[str, dict[str, float]] = {name: {} for name in DIRECTIONS}
    for way in Way:
        engine = pages.engine(Always(way))
        try:
            for name, routes in ROUTES.items():
                rates = [len(routes) * pages.nbytes / pages.move(engine, routes) for _ in range(repeats + 1)][1:]
                found[name][way.value] = statistics.median(rates) / 1e9
        finally:
            engine.close()
    return found


def slowdowns(
    rig: Rig, chooses: Chooses | None, *, sizes: Sequence[int], total_bytes: int, repeats: int, deadline: float
) -> Iterator[Slowdown]:
    """What copies take from a bf16 matrix product, for each size and direction."""
    side, where = rig.matrix
    left, right = (torch.randn(side, side, dtype=torch.bfloat16, device=where) for _ in range(2))
    out = torch.empty_like(left)
    for size in sizes:
        pages = Pages(rig, size, total_bytes, "scattered")
        engine = pages.engine(chooses)
        try:
            for name, routes in ROUTES.items():
                if time.monotonic() > deadline:
                    return
                ratios, rates = [], []
                for repeat in range(repeats + 1):
                    alone = _product(rig, left, right, out)
                    copier = Copier(pages, engine, routes)
                    beside = _product(rig, left, right, out)
                    rate = copier.stop()
                    if repeat:
                        ratios.append(beside / alone - 1)
                        rates.append(rate)
                yield Slowdown(size, name, statistics.median(ratios), statistics.median(rates) / 1e9)
        finally:
            engine.close()


class Copier:
    """Copies without a break, in a thread, until it is told to stop."""

    def __init__(self, pages: Pages, engine: TransferEngine, routes: Sequence[Route]) -> None:
        self._pages, self._engine, self._routes = pages, engine, routes
        self._stopped = threading.Event()
        self._moving = threading.Event()
        self._rates: list[float] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self._moving.wait(60)

    def stop(self) -> float:
        """Stop, and return the bytes per second that were copied."""
        self._stopped.set()
        self._thread.join()
        return statistics.median(self._rates)

    def _run(self) -> None:
        while not self._stopped.is_set():
            seconds = self._pages.move(self._engine, self._routes)
            self._rates.append(len(self._routes) * self._pages.nbytes / seconds)
            self._moving.set()


def _product(rig: Rig, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, times: int = 50) -> float:
    rig.finish_compute()
    begun = time.perf_counter()
    for _ in range(times):
        torch.mm(left, right, out=out)
    rig.finish_compute()
    return time.perf_counter() - begun


def run(
    rig: Rig,
    *,
    sizes: Sequence[int] = SIZES,
    total_bytes: int = 256 << 20,
    repeats: int = 5,
    budget: float = 420,
    effort: Effort = THOROUGH,
) -> dict[str, Any]:
    """Everything, as it is written to the file. What the budget of seconds has no room for is left out, and said so."""
    deadline = time.monotonic() + budget
    device = rig.make_device(None)
    calibration = device.calibrate(effort)
    device.close()
    options = {"total_bytes": total_bytes, "repeats": repeats, "deadline": deadline}
    figures = list(copies(rig, calibration, sizes=sizes, **options))
    beside = sizes[2:3] + sizes[-3:-2] + sizes[-1:] if len(sizes) > 3 else sizes
    taken = list(slowdowns(rig, calibration, sizes=beside, **options))
    wanted = len(sizes) * len(ORDERS) * len(DIRECTIONS) + len(beside) * len(DIRECTIONS)
    return {
        "device": rig.accelerator.name,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": _commit(),
        "versions": _versions(Driver(rig.library)),
        "machine": machine_facts(),
        "bytes": total_bytes,
        "left_out": wanted - len(figures) - len(taken),
        "calibration": calibration.as_json(),
        "copies": [asdict(figure) for figure in figures],
        "slowdowns": [asdict(slowdown) for slowdown in taken],
    }


def table(report: dict[str, Any]) -> str:
    """The figures as text."""
    lines = [f"{report['device']}, {report['date']}, commit {report['commit']}; GB/s"]
    columns = ("ours", "large", "batched", "per_page")
    lines.append(f"{'page':>9} {'order':<11}{'direction':<9}" + "".join(f"{name:>10}" for name in columns) + "   share")
    for row in report["copies"]:
        rates = "".join(f"{row[name]:>10.1f}" for name in columns)
        ways = "  ".join(f"{way} {rate:.1f}" for way, rate in row["ways"].items())
        lines.append(
            f"{row['page_bytes']:>9} {row['order']:<11}{row['direction']:<9}{rates}{row['share']:>8.2f}  {ways}"
        )
    lines.append("slow-down of a bf16 matrix product")
    lines += [
        f"{row['page_bytes']:>9} {row['direction']:<9}{row['slowdown']:>8.1%}  while copying {row['copied']:.1f} GB/s"
        for row in report["slowdowns"]
    ]
    if report["left_out"]:
        lines.append(f"{report['left_out']} figures were left out: no time")
    return "\n".join(lines)


def save(report: dict[str, Any], folder: Path) -> Path:
    """Write `report` to `<device>-<date>.json` in `folder`."""
    name = "".join(letter if letter.isalnum() else "-" for letter in str(report["device"]).lower())
    path = folder / f"{name}-{report['date']}.json"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    return path


def _versions(driver: Driver) -> dict[str, Any]:
    names = ("torch", "triton", "numpy")
    versions: dict[str, Any] = {name: importlib.metadata.version(name) for name in names}
    return {**versions, "cuda_driver": driver.version, "batched_copy": driver.batch_version}


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def cuda_rig() -> Rig:
    """The current GPU."""
    where = with_index(torch.device("cuda"))
    library = load()

    def make(chooses: Chooses | None) -> CudaDevice:
        return CudaDevice(where, in_one_piece=everything, chooses=chooses, library=library)

    def finish() -> None:
        torch.cuda.current_stream(where).synchronize()

    return Rig(CudaAccelerator(where), make, library, finish, (8192, str(where)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the JSON object in place of the table")
    parser.add_argument("--bytes", default="256MiB", type=size_of, help="bytes of each copy")
    parser.add_argument("--budget", default=420.0, type=float, help="seconds after which nothing new is begun")
    parser.add_argument("--out", default=Path(__file__).parent / "results", type=Path, help="folder for the result")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: torch sees no CUDA device, so nothing was measured", file=sys.stderr)
        return 2
    report = run(cuda_rig(), total_bytes=options.bytes, budget=options.budget)
    path = save(report, options.out)
    print(json.dumps(report) if options.json else table(report))
    print(f"written to {path}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
