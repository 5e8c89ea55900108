"""Copies of a GPU at every size of page, and what they take from a matrix product that runs meanwhile.

    python benchmarks/gpu.py [--json] [--bytes 256MiB] [--sizes 32KiB,2MiB] [--budget 420] [--gds DIR] [--out DIR]

Each figure is GB/s of payload through the transfer engine, from `submit` to the result, beside references that were
taken in turn with it: one large copy from and to pinned memory, `cuMemcpyAsync` page by page, the pages as they are in
`cuMemcpyBatchAsync`, and the function that vLLM's offloading worker swaps blocks with, where vLLM is installed. The
reference of "both" is two large copies at once. With a folder in `--gds` (or GDS_DIR), images go to files there and
back by cuFile alone; nothing goes by way of the host. A table is printed, and everything is written to
`<out>/<device>-<date>.json` after each case, so that a run that is cut off leaves the cases that were done.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import hashlib
import importlib.metadata
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from gpu_pages import Pages, References, Rig
from longshore.bench.harness import is_installed, machine_facts
from longshore.boundary import Route
from longshore.cache import GroupKeys
from longshore.config import Config, parse_size
from longshore.errors import BenchError, LongshoreError
from longshore.keys import Scope
from longshore.layout import from_rows
from longshore.runtime.stack import open_stack
from longshore.tiers.file import GdsFileTier, capacity_for
from longshore.transfer import D2H, H2D, TransferEngine
from longshore.transfer.device.base import Device
from longshore.transfer.device.cuda.calibration import THOROUGH, Always, Effort, all_registered
from longshore.transfer.device.cuda.device import CudaDevice
from longshore.transfer.device.cuda.driver import CudaAccelerator, Driver, load
from longshore.transfer.device.cuda.streams import Way, WayChooser
from longshore.transfer.device.torch_streams import with_index

SIZES = (512, 2 << 10, 4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10, 256 << 10, 2 << 20)
ORDERS = ("scattered", "contiguous")
DIRECTIONS = ("offload", "onboard", "both")
_GDS_PATIENCE = 30.0  # seconds
_MOST_SLOWDOWN = 0.05
ROUTES = {"offload": (D2H,), "onboard": (H2D,), "both": (D2H, H2D)}


@dataclass(frozen=True, slots=True)
class Figure:
    """GB/s for pages of one size; `share` is of the large copy."""

    page_bytes: int
    order: str
    direction: str
    ours: float
    large: float
    per_page: float
    batched: float
    vllm: float | None
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
    rig: Rig, chooser: WayChooser | None, *, sizes: Sequence[int], total_bytes: int, repeats: int, deadline: float
) -> Iterator[Figure]:
    """A figure for each size, order and direction, until `deadline` (`time.monotonic`)."""
    for size in sizes:
        for order in ORDERS:
            if time.monotonic() > deadline:
                return
            pages = Pages(rig, size, total_bytes, order)
            references = References(rig, pages)
            engine = pages.engine(chooser)
            try:
                pages.check(engine)
                taken = {name: _in_turn(pages, engine, references, ROUTES[name], repeats) for name in DIRECTIONS}
            finally:
                engine.close()
            ways = _ways(pages, repeats) if order == "scattered" else {}
            for name in DIRECTIONS:
                ours, large, per_page, batched, vllm = taken[name]
                yield Figure(size, order, name, ours, large, per_page, batched, vllm, ours / large, ways.get(name, {}))


def _in_turn(
    pages: Pages, engine: TransferEngine, references: References, routes: Sequence[Route], repeats: int
) -> tuple[float, float, float, float, float | None]:
    """Medians of ours, the large copy, page by page, batched, and vLLM's function, in GB/s."""
    taken: list[tuple[float, float, float, float, float | None]] = []
    for _ in range(repeats + 1):
        rate = len(routes) * pages.nbytes / pages.move(engine, routes)
        large, per_page, batched = references.large(routes), references.per_page(routes), references.batched(routes)
        taken.append((rate, large, per_page, batched, references.vllm(routes)))
    ours, large, per_page, batched = (
        statistics.median(column) / 1e9 for column in list(zip(*taken[1:], strict=True))[:4]
    )
    vllm = [row[4] for row in taken[1:] if row[4] is not None]
    return ours, large, per_page, batched, statistics.median(vllm) / 1e9 if vllm else None


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
    rig: Rig, chooser: WayChooser | None, *, sizes: Sequence[int], total_bytes: int, repeats: int, deadline: float
) -> Iterator[Slowdown]:
    """What copies take from a bf16 matrix product, for each size and direction."""
    side, where = rig.matrix
    left, right = (torch.randn(side, side, dtype=torch.bfloat16, device=where) for _ in range(2))
    out = torch.empty_like(left)
    for size in sizes:
        pages = Pages(rig, size, total_bytes, "scattered")
        engine = pages.engine(chooser)
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
        # A job waits for what its thread's stream was given: on the products' stream it would wait for the products.
        with self._pages.rig.on_own_stream():
            while not self._stopped.is_set():
                seconds = self._pages.move(self._engine, self._routes)
                self._rates.append(len(self._routes) * self._pages.nbytes / seconds)
                self._moving.set()


@dataclass(frozen=True, slots=True)
class Gds:
    """GB/s of images between device memory and files, by cuFile alone; or why there are none."""

    stored: float | None = None
    loaded: float | None = None
    why_not: str | None = None


def gds(
    folder: Path | None,
    make_device: Callable[[], Device],
    where: str,
    *,
    total_bytes: int,
    library: object | None = None,
) -> Gds:
    """One store and one load of `total_bytes` in blocks of 1 MiB; `library` stands for cuFile's functions."""
    if folder is None:
        return Gds(why_not="no folder was named: give one on a disk that cuFile reaches in --gds or GDS_DIR")
    try:
        with tempfile.TemporaryDirectory(dir=folder) as inside:
            return _to_files_and_back(Path(inside), make_device(), where, max(1, total_bytes >> 20), library)
    except (LongshoreError, OSError) as error:
        return Gds(why_not=str(error))


def _to_files_and_back(folder: Path, device: Device, where: str, count: int, library: object | None) -> Gds:
    rows = torch.randint(0, 256, (count, 1 << 20), dtype=torch.uint8, device=where)
    before = rows.clone()
    layout = from_rows(rows, pages_per_block=8, block_size=16)
    size = capacity_for(2 * count, layout.image_bytes)
    config = Config.make(file_path=folder / "tier", file_size=size, file_mode="gds", background=False)
    scope = Scope(model="benchmark", weights="", dtype="", layout=layout.fingerprint, block_size=16)
    keys, blocks = [hashlib.sha256(index.to_bytes(8, "little")).digest() for index in range(count)], list(range(count))
    open_gds_tier = functools.partial(GdsFileTier, strict=True, library=library)
    with open_stack(config, layout, scope, device, open_gds_tier=open_gds_tier) as stack:
        stack.transfer_engine.begin_step(None)
        begun = time.perf_counter()
        with stack.runtime.batch() as cache:
            job = cache.store({0: GroupKeys(keys)}, {0: blocks})[0].job
        if job is None or not stack.runtime.wait_jobs([job], _GDS_PATIENCE):
            raise BenchError(f"{count} images were not stored within {_GDS_PATIENCE:.0f} s")
        stored = time.perf_counter() - begun
        rows.zero_()
        stack.transfer_engine.begin_step(None)
        begun = time.perf_counter()
        with stack.runtime.batch() as cache:
            lease = cache.lookup({0: GroupKeys(keys)}, stack.runtime.clock()).lease
            if lease is None:
                raise BenchError("cuFile stored no image: its log (cufile.log) says why")
            cache.load(lease, {0: blocks}, timeout=_GDS_PATIENCE)
        outcome = stack.runtime.wait_load(lease).outcome
        found = 0 if outcome is None else outcome.num_chunks
        loaded = time.perf_counter() - begun
        if found != count or not torch.equal(rows, before):
            raise BenchError(f"{found} of {count} images came back by cuFile: its log (cufile.log) says why")
    return Gds(rows.numel() / stored / 1e9, rows.numel() / loaded / 1e9)


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
    gds_folder: Path | None = None,
    commit: str = "",
    keep: Callable[[dict[str, Any]], object] = lambda report: None,
) -> dict[str, Any]:
    """Everything, as it is written to the file. `keep` is given the report so far at the start and after each case.

    What the budget of seconds has no room for is left out, and said so; a fifth of it is kept for the slow-downs.
    """
    begun = time.monotonic()
    device = rig.make_device(None)
    calibration = device.calibrate(effort)
    device.close()
    beside = sizes[2:3] + sizes[-3:-2] + sizes[-1:] if len(sizes) > 3 else sizes
    report: dict[str, Any] = {
        "device": rig.accelerator.name,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit or _commit(),
        "versions": _versions(Driver(rig.library)),
        "machine": machine_facts(),
        "bytes": total_bytes,
        "left_out": len(sizes) * len(ORDERS) * len(DIRECTIONS) + len(beside) * len(DIRECTIONS),
        "vllm": _of_vllm(rig),
        "calibration": calibration.as_json(),
        "copies": [],
        "slowdowns": [],
        "gds": asdict(Gds(why_not="not measured yet")),
    }
    keep(report)
    options = {"total_bytes": total_bytes, "repeats": repeats}
    taken: Iterator[tuple[str, Figure | Slowdown]] = itertools.chain(
        (("copies", each) for each in copies(rig, calibration, sizes=sizes, deadline=begun + 0.8 * budget, **options)),
        (("slowdowns", each) for each in slowdowns(rig, calibration, sizes=beside, deadline=begun + budget, **options)),
    )
    for where, figure in taken:
        report[where].append(asdict(figure))
        report["left_out"] -= 1
        keep(report)
    report["gds"] = asdict(gds(gds_folder, lambda: rig.make_device(None), rig.matrix[1], total_bytes=total_bytes))
    keep(report)
    return report


def missed_bars(report: dict[str, Any]) -> list[str]:
    """What is slower than it should be, a line for each figure."""
    bars = [(4 << 10, 0.85), (16 << 10, 0.95)]
    found = []
    for row in report["copies"]:
        bar = max((share for size, share in bars if size <= row["page_bytes"]), default=0.0)
        if row["share"] < bar:
            found.append(
                f"{row['page_bytes']} bytes, {row['order']}, {row['direction']}: {row['share']:.2f} of a large copy, "
                f"expected {bar}"
            )
    for row in report["slowdowns"]:
        if row["slowdown"] >= _MOST_SLOWDOWN:
            found.append(
                f"{row['page_bytes']} bytes, {row['direction']}: compute {row['slowdown']:.1%} slower, expected less "
                f"than {_MOST_SLOWDOWN:.0%}"
            )
    return found


def table(report: dict[str, Any]) -> str:
    """The figures as text."""
    lines = [f"{report['device']}, {report['date']}, commit {report['commit']}; GB/s"]
    columns = ("ours", "large", "batched", "per_page", *(["vllm"] if report["vllm"]["version"] else []))
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
    files = report["gds"]
    lines.append(
        "files by cuFile alone: "
        + (files["why_not"] or f"stored at {files['stored']:.1f} GB/s, loaded at {files['loaded']:.1f} GB/s")
    )
    lines.append("vLLM's function: " + (report["vllm"]["why_not"] or f"that of vLLM {report['vllm']['version']}"))
    lines += [f"below the bar: {missed}" for missed in missed_bars(report)]
    if report["left_out"]:
        lines.append(f"{report['left_out']} figures were left out: no time")
    return "\n".join(lines)


def save(report: dict[str, Any], folder: Path) -> Path:
    """Write `report` to `<device>-<date>.json` in `folder`, in place of what was there, whole or not at all."""
    name = "".join(letter if letter.isalnum() else "-" for letter in str(report["device"]).lower())
    path = folder / f"{name}-{report['date']}.json"
    folder.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(report, indent=1) + "\n")
    temporary.replace(path)
    return path


def _versions(driver: Driver) -> dict[str, Any]:
    names = ("torch", "triton", "numpy")
    versions: dict[str, Any] = {name: importlib.metadata.version(name) for name in names}
    cuda = {"driver": _driver(), "cuda_driver": driver.version, "cuda_torch": torch.version.cuda}
    return {**versions, **cuda, "batched_copy": driver.batch_version}


def _driver() -> str:
    """Version of NVIDIA's driver, such as 580.159.04."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return _said(command).partition("\n")[0] or "unknown"


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    return _said(command) or "unknown"


def _said(command: list[str]) -> str:
    """What a command prints; nothing where it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _of_vllm(rig: Rig) -> dict[str, str | None]:
    """Whose function the figures `vllm` are of."""
    if rig.vllm_swap is None:
        return {
            "version": None,
            "why_not": "not measured, vLLM is not installed; its swap_blocks_batch calls cuMemcpyBatchAsync over all "
            "blocks as of CUDA 12.8, which is 'batched' here, and cuMemcpyAsync block by block before, 'per_page'",
        }
    return {"version": importlib.metadata.version("vllm"), "why_not": None}


def vllm_swap() -> Callable[[int, Route], Callable[..., object]] | None:
    """What vLLM's offloading worker swaps blocks with, by their bytes and the route; `None` where there is no vLLM."""
    if not is_installed("vllm"):
        return None
    from vllm.v1.kv_offload.base import CanonicalKVCacheRef
    from vllm.v1.kv_offload.cpu import gpu_worker

    def swap(page_bytes: int, route: Route) -> Callable[..., object]:
        page = CanonicalKVCacheRef(tensor_idx=0, page_size_bytes=page_bytes)
        found: Callable[..., object] = gpu_worker._select_swap_blocks_fn([[page]], route == D2H)
        return found

    return swap


def cuda_rig() -> Rig:
    """The current GPU."""
    where = with_index(torch.device("cuda"))
    library = load()

    def make(chooser: WayChooser | None) -> CudaDevice:
        return CudaDevice(where, in_one_piece=all_registered, chooser=chooser, library=library)

    def finish() -> None:
        torch.cuda.current_stream(where).synchronize()

    def on_own_stream() -> AbstractContextManager[object]:
        return torch.cuda.stream(torch.cuda.Stream(where))

    return Rig(CudaAccelerator(where), make, library, finish, (8192, str(where)), on_own_stream, vllm_swap())


def _page_sizes(text: str) -> tuple[int, ...]:
    return tuple(sorted(parse_size(size) for size in text.split(",")))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the JSON object in place of the table")
    parser.add_argument("--bytes", default="256MiB", type=parse_size, help="bytes of each copy")
    parser.add_argument("--sizes", default=SIZES, type=_page_sizes, help="page sizes, such as 32KiB,2MiB; ascending")
    parser.add_argument("--budget", default=420.0, type=float, help="seconds after which nothing new is begun")
    folder = os.environ.get("GDS_DIR")
    parser.add_argument(
        "--gds", default=folder and Path(folder), type=Path, help="folder on a disk that cuFile reaches"
    )
    parser.add_argument("--out", default=Path(__file__).parent / "results", type=Path, help="folder for the result")
    parser.add_argument("--commit", default="", help="what is measured, where it is no checkout; else git says it")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: torch sees no CUDA device, so nothing was measured", file=sys.stderr)
        return 2
    report = run(
        cuda_rig(),
        sizes=options.sizes,
        total_bytes=options.bytes,
        budget=options.budget,
        gds_folder=options.gds,
        commit=options.commit,
        keep=functools.partial(save, folder=options.out),
    )
    path = save(report, options.out)
    print(json.dumps(report) if options.json else table(report))
    print(f"written to {path}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
