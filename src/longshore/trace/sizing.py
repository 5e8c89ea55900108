"""Sizing: what so much host memory and so many files would give, for a grid of both at once.

    stack distances ──► blocks of each request in host memory, and in files ──► seconds to load, and to compute
                                                                            ──► engines, one prompt at a time ──► TTFT

Hits are those of LRU with tails first over both tiers as one stack, the warmest blocks in host memory: exact, and in
one pass. Times are those of `longshore.trace.timing`; of nothing, what host memory has, and all, the fastest is loaded.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from longshore.errors import TraceError
from longshore.trace.paths import Paths
from longshore.trace.stack import stack_distances
from longshore.trace.timing import Timing

_GIB = 1 << 30
_AT_ONCE = 4096
_STEPS = 9
_WORTH_IT = 0.99

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Prices:
    """What a GiB costs. Without any, DRAM counts 25 times as much as NVMe."""

    dram_per_gib: float = 25.0
    nvme_per_gib: float = 1.0
    currency: str = "units of a GiB of NVMe"

    @classmethod
    def read(cls, path: Path) -> Prices:
        """From a TOML file with these three names. Raises `TraceError` for anything else."""
        try:
            table = tomllib.loads(path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise TraceError(f"{path}: expected prices in TOML: {error}") from error
        known = {"dram_per_gib", "nvme_per_gib", "currency"}
        numbers = [table.get(name) for name in ("dram_per_gib", "nvme_per_gib")]
        good = all(type(n) in (int, float) and 0 < n < float("inf") for n in numbers)  # type: ignore[operator]
        if set(table) - known or not good or not isinstance(table.get("currency", ""), str):
            raise TraceError(f"{path}: expected dram_per_gib, nvme_per_gib (positive) and currency, got {table}")
        return cls(**table)


@dataclass(frozen=True, slots=True)
class Choice:
    """One size of both tiers, and what it would give. Bytes, seconds, and ratios of blocks asked for."""

    host_bytes: int
    file_bytes: int
    cost: float
    hit_ratio: float
    host_hit_ratio: float
    ttft_p50: float
    ttft_p95: float


@dataclass(frozen=True, slots=True)
class Plan:
    """What was found.

    Attributes:
        curve: Hit ratio by bytes of one tier: (bytes, ratio).
        choices: The whole grid.
        frontier: Those that nothing cheaper beats, by cost.
        knee: Where more money begins to buy little.
        recommended: The cheapest that keeps the target; `None` if none does.
    """

    requests: int
    block_refs: int
    unique_blocks: int
    target: float
    curve: tuple[tuple[int, float], ...]
    choices: tuple[Choice, ...]
    frontier: tuple[Choice, ...]
    knee: Choice
    recommended: Choice | None
    prices: Prices

    def as_json(self) -> dict[str, object]:
        """What `--json` prints."""
        plain = asdict(self)
        plain["curve"] = [{"bytes": count, "hit_ratio": ratio} for count, ratio in self.curve]
        return plain


class Arrivals:
    """The requests of a trace, as sizing needs them: four bytes for each block, and sixteen for each request."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.paths = Paths()
        self._seconds: list[float] = []
        self._tokens: list[int] = []

    def add(self, seconds: float, tokens: int, hash_ids: Sequence[int]) -> None:
        """One request; only its whole blocks count."""
        self.paths.add(hash_ids[: tokens // self.block_tokens])
        self._seconds.append(max(seconds, self._seconds[-1] if self._seconds else 0.0))
        self._tokens.append(tokens)

    @property
    def seconds(self) -> Floats:
        """When each arrived."""
        return np.array(self._seconds)

    @property
    def tokens(self) -> Floats:
        """How long each prompt is."""
        return np.array(self._tokens, np.float64)


def plan(arrivals: Arrivals, timing: Timing, target: float, prices: Prices, *, engines: int = 1) -> Plan:
    """Try a grid of sizes on `arrivals`; `target` is the 95th percentile of the time to first token, in seconds."""
    if not len(arrivals.paths) or engines < 1 or not target > 0:
        raise TraceError("expected a request, an engine and a target above zero to plan for")
    distances = stack_distances(arrivals.paths)
    image = arrivals.block_tokens * timing.geometry.kv_bytes_per_token
    sizes = _sizes(distances, arrivals.paths.unique)
    cells = [(host, file) for host in sizes for file in sizes if host or not file]
    ttft, hits, host_hits = _simulate(arrivals, distances, cells, timing, image, engines)
    refs = max(1, len(distances))
    choices = tuple(
        Choice(
            host * image,
            file * image,
            (host * prices.dram_per_gib + file * prices.nvme_per_gib) * image / _GIB,
            float(hits[i] / refs),
            float(host_hits[i] / refs),
            *(float(p) for p in np.percentile(ttft[:, i], [50, 95])),
        )
        for i, (host, file) in enumerate(cells)
    )
    frontier = _frontier(choices)
    good = [choice for choice in frontier if choice.ttft_p95 <= target]
    ordered = np.sort(distances)
    curve = tuple((size * image, float(np.searchsorted(ordered, size, side="right") / refs)) for size in _curve(sizes))
    return Plan(
        requests=len(arrivals.paths),
        block_refs=len(distances),
        unique_blocks=arrivals.paths.unique,
        target=target,
        curve=curve,
        choices=choices,
        frontier=frontier,
        knee=_knee(frontier),
        recommended=good[0] if good else None,
        prices=prices,
    )


def _sizes(distances: npt.NDArray[np.int64], unique: int) -> list[int]:
    """Capacities to try, in blocks: none, and a geometric row up to what holds everything that comes back."""
    finite = distances[distances <= unique]
    most = int(finite.max()) if len(finite) else 1
    row = np.geomspace(max(1, most // 256), max(1, most), _STEPS)
    return sorted({0, *(round(size) for size in row.tolist())})


def _curve(sizes: Sequence[int]) -> list[int]:
    """More points than the grid has, for the curve."""
    return sorted({int(size) for size in np.geomspace(1, max(sizes[-1], 1), 60).round().tolist()})


def _simulate(
    arrivals: Arrivals,
    distances: npt.NDArray[np.int64],
    cells: Sequence[tuple[int, int]],
    timing: Timing,
    image: int,
    engines: int,
) -> tuple[Floats, Floats, Floats]:
    """TTFT of each request (rows) in each cell (columns), and the hits of each cell: all, and in host memory."""
    starts, tokens, seconds = arrivals.paths.starts, arrivals.tokens, arrivals.seconds
    usable = ((tokens - 1) // arrivals.block_tokens).astype(np.int64)
    warm = np.array([host for host, _ in cells])
    both = np.array([host + file for host, file in cells])
    free = np.zeros((len(cells), engines))
    rows = np.arange(len(cells))
    ttft = np.empty((len(tokens), len(cells)))
    hits, host_hits = np.zeros(len(cells)), np.zeros(len(cells))
    for first in range(0, len(tokens), _AT_ONCE):
        some = range(first, min(first + _AT_ONCE, len(tokens)))
        in_host, in_all = np.empty((len(some), len(cells))), np.empty((len(some), len(cells)))
        for row, request in enumerate(some):
            path = distances[starts[request] : starts[request] + usable[request]]
            in_host[row] = np.searchsorted(path, warm, side="right")
            in_all[row] = np.searchsorted(path, both, side="right")
        hits += in_all.sum(axis=0)
        host_hits += in_host.sum(axis=0)
        loading, computing = _times(timing, arrivals.block_tokens, image, tokens[first : some.stop], in_host, in_all)
        for row, request in enumerate(some):
            engine = free.argmin(axis=1)
            begun = np.maximum(free[rows, engine], seconds[request] + loading[row])
            free[rows, engine] = begun + computing[row]
            ttft[request] = free[rows, engine] - seconds[request]
    return ttft, hits, host_hits


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


def _frontier(choices: Sequence[Choice]) -> tuple[Choice, ...]:
    """Those that are faster than all that cost no more, and by enough to be worth anything; the cheapest first."""
    found: list[Choice] = []
    for choice in sorted(choices, key=lambda each: (each.cost, each.ttft_p95)):
        if not found or choice.ttft_p95 < _WORTH_IT * found[-1].ttft_p95:
            found.append(choice)
    return tuple(found)


def _knee(frontier: Sequence[Choice]) -> Choice:
    """The point of the frontier that lies the furthest below the line between its ends."""
    first, last = frontier[0], frontier[-1]
    cost, gain = last.cost - first.cost, first.ttft_p95 - last.ttft_p95

    def below(choice: Choice) -> float:
        if not cost or not gain:
            return 0.0
        return (first.ttft_p95 - choice.ttft_p95) / gain - (choice.cost - first.cost) / cost

    return max(frontier, key=below)
