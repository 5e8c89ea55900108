"""Measurements and their reports: our side and the reference run in turn, and the median of each counts.

repeat 0     repeat 1     repeat 2                 temporary load on the machine
ours ref     ref ours     ours ref    ...          affects both sides alike
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from longshore.errors import BenchError

_RAM_DISKS = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})

SEED = 0
"""Of the random numbers of all benchmarks."""


Tell = Callable[[str], None]
"""Shows a line about the progress of a benchmark."""


def is_installed(*packages: str) -> bool:
    """Whether all `packages` are installed; a directory of such a name does not count."""
    found = map(find_spec, packages)
    return all(each is not None and each.origin is not None for each in found)


def check_engine(name: str, model: Path) -> None:
    """Raise `BenchError` if the engine `name` is not installed, or `model` is not the directory of a model."""
    if not is_installed(name.lower()):
        raise BenchError(f"{name} is not installed beside Longshore: run this with the Python that runs {name}")
    if not (model / "config.json").is_file():
        raise BenchError(f"expected the directory of a model, {model / 'config.json'} is not there")


def machine_facts() -> dict[str, object]:
    """CPU, cores this process may use, memory in bytes, kernel, versions; torch only if it has been imported."""
    facts: dict[str, object] = {
        "cpu": _field(Path("/proc/cpuinfo"), "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        facts["torch"] = str(torch.__version__)
    return facts


def file_system_of(path: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """Type of the file system that `path` is on, for instance `ext4`."""
    device = path.stat().st_dev
    found = ""
    # Of several file systems mounted at one place the last one is visible; the device number identifies it.
    for line in mounts.read_text().splitlines():
        _, where, kind, *_ = line.split(" ")
        try:
            if Path(_unescaped(where)).stat().st_dev == device:
                found = kind
        except OSError:
            continue  # a mount point that this user may not read
    return found or "unknown"


def check_disk(path: Path, *, allow_ram_disk: bool) -> dict[str, object]:
    """Marks of the report for the file system of `path`; raises `BenchError` for a RAM disk unless it is allowed."""
    kind = file_system_of(path)
    if kind not in _RAM_DISKS:
        return {"file_system": kind}
    if not allow_ram_disk:
        raise BenchError(f"{path} is on a RAM disk ({kind}): expected a disk, or --allow-ram-disk to measure memory")
    return {"file_system": kind, "ram_disk": True}


def check_direct(path: Path, *, direct: bool, allow_page_cache: bool) -> dict[str, object]:
    """Marks of the report for I/O through the page cache; raises `BenchError` unless it is allowed."""
    if direct:
        return {}
    if not allow_page_cache:
        raise BenchError(f"{path} has no direct I/O: expected it, or --allow-page-cache to measure the page cache")
    return {"page_cache": True}


def _field(path: Path, name: str) -> str | None:
    for line in path.read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None


def _unescaped(text: str) -> str:
    """A mount point, with what `/proc/self/mounts` writes in octal."""
    return text.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")


@dataclass(frozen=True, slots=True)
class Case:
    """One figure and its reference.

    Attributes:
        name: For instance `plan/10240/4`.
        value: The figure, in `unit`.
        unit: For instance `us` or `GB/s`.
        reference: What it is compared with, as text.
        reference_value: The reference's figure, in `unit`, taken in the same run.
        ratio: Our figure relative to the reference; higher is better.
    """

    name: str
    value: float
    unit: str
    reference: str
    reference_value: float
    ratio: float


@dataclass(frozen=True, slots=True)
class Report:
    """The cases of one benchmark, and the machine they were taken on."""

    machine: Mapping[str, object]
    cases: tuple[Case, ...]

    def as_json(self) -> dict[str, object]:
        """What `--json` prints: exactly `machine` and `cases`."""
        return {"machine": dict(self.machine), "cases": [asdict(case) for case in self.cases]}


class Seconds(NamedTuple):
    """Median seconds of both sides."""

    ours: float
    reference: float


def compare(ours: Callable[[], float], reference: Callable[[], float], *, repeats: int, warm_ups: int = 1) -> Seconds:
    """Medians of `repeats` interleaved measurements; each call returns the seconds that it took."""
    return Seconds(*medians([ours, reference], repeats=repeats, warm_ups=warm_ups))


def medians(sides: Sequence[Callable[[], float]], *, repeats: int, warm_ups: int = 1) -> list[float]:
    """Medians of `repeats` measurements of each side; the order of sides changes with every repeat."""
    if repeats <= 0:
        raise BenchError(f"a benchmark needs at least one repeat, got {repeats}")
    taken: list[list[float]] = [[] for _ in sides]
    for repeat in range(-warm_ups, repeats):
        for turn in range(len(sides)):
            side = (turn + repeat) % len(sides)
            seconds = sides[side]()
            if repeat >= 0:
                taken[side].append(seconds)
    return [statistics.median(seconds) for seconds in taken]


def timed(
    call: Callable[[], object], loops: int = 1, *, clock: Callable[[], float] = time.perf_counter
) -> Callable[[], float]:
    """A function that runs `call` `loops` times and returns the mean seconds of `clock`."""

    def run() -> float:
        begun = clock()
        for _ in range(loops):
            call()
        return (clock() - begun) / loops

    return run


def loops_within(call: Callable[[], object], seconds: float = 1e-3) -> int:
    """Number of calls that take about `seconds`, at least one.

    Sides of different speed are measured for the same time, not for the same number of calls, because other load on the
    machine interrupts long measurements more often.
    """
    call()
    return max(1, round(seconds / timed(call)()))


def duration(name: str, taken: Seconds, reference: str) -> Case:
    """A case in microseconds; lower is better, and `ratio` is the reference divided by ours."""
    return Case(name, taken.ours * 1e6, "us", reference, taken.reference * 1e6, taken.reference / taken.ours)


def rate(name: str, taken: Seconds, reference: str, nbytes: int) -> Case:
    """A case in GB/s for `nbytes` that both sides moved; `ratio` is ours divided by the reference."""
    ours, other = nbytes / taken.ours / 1e9, nbytes / taken.reference / 1e9
    return Case(name, ours, "GB/s", reference, other, ours / other)


def first_tokens(name: str, ours: Sequence[float], theirs: Sequence[float], reference: str) -> Iterator[Case]:
    """Cases of seconds to the first token, in ms; `{}` in `name` is the percentile."""
    for percentile, share in (("p50", 0.5), ("p95", 0.95)):
        mine, others = (1e3 * sorted(each)[min(len(each) - 1, int(share * len(each)))] for each in (ours, theirs))
        yield Case(name.format(percentile), mine, "ms", reference, others, others / mine)


def chosen(names: Sequence[str], only: Sequence[str]) -> list[str]:
    """The `names` that are in `only`, in order; all if `only` is empty. Raises `BenchError` for an unknown name."""
    unknown = sorted(set(only) - set(names))
    if unknown:
        raise BenchError(f"no case {', '.join(unknown)}; there are {', '.join(names)}")
    return [name for name in names if not only or name in only]


class ArrayTensor:
    """An array of bytes with the methods of a torch tensor that layouts and planners call."""

    dtype = "uint8"
    device = "cpu"

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self.shape, self._array = array.shape, array

    def data_ptr(self) -> int:
        return int(self._array.__array_interface__["data"][0])

    def nbytes(self) -> int:
        return self._array.nbytes

    def element_size(self) -> int:
        return 1

    @overload
    def stride(self) -> tuple[int, ...]: ...
    @overload
    def stride(self, axis: int) -> int: ...
    def stride(self, axis: int | None = None) -> int | tuple[int, ...]:
        return self._array.strides if axis is None else self._array.strides[axis]

    def untyped_storage(self) -> ArrayTensor:
        return self
