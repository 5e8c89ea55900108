"""Estimates for all sizes of host memory and files at once, to select sizes for replay.

    stack distances ──► blocks of each request in host memory, and in files ──► seconds to load, and to compute
                                                                            ──► engines, one prompt at a time ──► TTFT

Hits are those of LRU with tails first over both tiers as one stack, with the most recently used blocks in host memory;
they are computed exactly, in one pass. Times are those of `longshore.trace.timing`. Each request loads nothing, its
blocks in host memory, or all blocks found, whichever is fastest.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from longshore.errors import TraceError
from longshore.trace.paths import Paths
from longshore.trace.timing import Timing

GIB = 1 << 30
_AT_ONCE = 4096

Floats = npt.NDArray[np.float64]

Size = tuple[int, int]
"""Bytes of host memory, and of files."""


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices per GiB. By default, DRAM costs 25 times as much as NVMe."""

    dram_per_gib: float = 25.0
    nvme_per_gib: float = 1.0
    currency: str = "units of a GiB of NVMe"

    @classmethod
    def read(cls, path: Path) -> Prices:
        """Prices from a TOML file with these three keys. Raises `TraceError` for other content."""
        try:
            table = tomllib.loads(path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise TraceError(f"{path}: expected prices in TOML: {why}") from error
        known = {"dram_per_gib", "nvme_per_gib", "currency"}
        numbers = [table.get(name) for name in ("dram_per_gib", "nvme_per_gib")]
        good = all(type(n) in (int, float) and 0 < n < float("inf") for n in numbers)  # type: ignore[operator]
        if set(table) - known or not good or not isinstance(table.get("currency", ""), str):
            raise TraceError(f"{path}: expected dram_per_gib, nvme_per_gib (positive) and currency, got {table}")
        return cls(**table)

    def of(self, host_bytes: int, file_bytes: int) -> float:
        """The cost of both sizes."""
        return (host_bytes * self.dram_per_gib + file_bytes * self.nvme_per_gib) / GIB


@dataclass(frozen=True, slots=True)
class Estimate:
    """The estimate for one size of both tiers."""

    host_bytes: int
    file_bytes: int
    cost: float
    ttft_p95: float


class Arrivals:
    """The requests of a trace for sizing: four bytes per block and sixteen per request."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.paths = Paths()
        self._seconds: list[float] = []
        self._tokens: list[int] = []

    def add(self, seconds: float, tokens: int, hash_ids: Sequence[int]) -> None:
        """Add one request; only its complete blocks count."""
        self.paths.add(hash_ids[: tokens // self.block_tokens])
        self._seconds.append(max(seconds, self._seconds[-1] if self._seconds else 0.0))
        self._tokens.append(tokens)

    @property
    def seconds(self) -> Floats:
        """Arrival times in seconds."""
        return np.array(self._seconds)

    @property
    def tokens(self) -> Floats:
        """Prompt lengths in tokens."""
        return np.array(self._tokens, np.float64)


def most_useful(distances: npt.NDArray[np.int64], unique: int) -> int:
    """The smallest capacity in blocks at which every repeated block is a hit."""
    finite = distances[distances <= unique]
    return int(finite.max()) if len(finite) else 1


def estimate(
    arrivals: Arrivals,
    distances: npt.NDArray[np.int64],
    cells: Sequence[Size],
    timing: Timing,
    prices: Prices,
    engines: int,
) -> tuple[Estimate, ...]:
    """Estimates for `cells`: pairs of bytes of host memory and of files."""
    image = arrivals.block_tokens * timing.geometry.kv_bytes_per_token
    blocks = [(host // image, file // image) for host, file in cells]
    ttft = _simulate(arrivals, distances, blocks, timing, image, engines)
    p95 = np.percentile(ttft, 95, axis=0).tolist()
    return tuple(Estimate(*cell, prices.of(*cell), each) for cell, each in zip(cells, p95, strict=True))


def _simulate(
    arrivals: Arrivals,
    distances: npt.NDArray[np.int64],
    cells: Sequence[tuple[int, int]],
    timing: Timing,
    image: int,
    engines: int,
) -> Floats:
    """TTFT of each request (rows) in each cell (columns)."""
    starts, tokens, seconds = arrivals.paths.starts, arrivals.tokens, arrivals.seconds
    usable = ((tokens - 1) // arrivals.block_tokens).astype(np.int64)
    warm = np.array([host for host, _ in cells])
    both = np.array([host + file for host, file in cells])
    free = np.zeros((len(cells), engines))
    rows = np.arange(len(cells))
    ttft = np.empty((len(tokens), len(cells)))
    for first in range(0, len(tokens), _AT_ONCE):
        some = range(first, min(first + _AT_ONCE, len(tokens)))
        in_host, in_all = np.empty((len(some), len(cells))), np.empty((len(some), len(cells)))
        for row, request in enumerate(some):
            path = distances[starts[request] : starts[request] + usable[request]]
            in_host[row] = np.searchsorted(path, warm, side="right")
            in_all[row] = np.searchsorted(path, both, side="right")
        loading, computing = _times(timing, arrivals.block_tokens, image, tokens[first : some.stop], in_host, in_all)
        for row, request in enumerate(some):
            engine = free.argmin(axis=1)
            begun = np.maximum(free[rows, engine], seconds[request] + loading[row])
            free[rows, engine] = begun + computing[row]
            ttft[request] = free[rows, engine] - seconds[request]
    return ttft


def _times(
    timing: Timing, block_tokens: int, image: int, tokens: Floats, in_host: Floats, in_all: Floats
) -> tuple[Floats, Floats]:
    """Seconds to load, and to compute the rest: of what may be loaded, what makes the sum least."""
    profile, length = timing.profile, tokens[:, None]

    def compute(blocks: Floats) -> Floats:
        context = blocks * block_tokens
        rest = length - context
        return profile.step + timing.alpha * rest + timing.beta * rest * (2 * context + rest) / 2

    def load(blocks: Floats, cold: Floats) -> Floats:
        link = np.where(blocks > 0, profile.fixed + blocks * image / profile.link, 0.0)
        return np.maximum(link, np.where(cold > 0, profile.fixed + cold * image / profile.file_read, 0.0))

    nothing = np.zeros_like(in_all)
    ways = [(load(b, c), compute(b)) for b, c in ((nothing, nothing), (in_host, nothing), (in_all, in_all - in_host))]
    best = np.argmin([loading + computing for loading, computing in ways], axis=0)
    return np.choose(best, [loading for loading, _ in ways]), np.choose(best, [computing for _, computing in ways])
