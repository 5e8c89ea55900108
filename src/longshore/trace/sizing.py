"""Sizing: recommends sizes of host memory and files for a trace.

    stack distances ──► blocks of each request in host memory, and in files ──► seconds to load, and to compute
                                                                            ──► engines, one prompt at a time ──► TTFT
    estimates of all sizes that can be bought ──► their frontier: where to look
                                                        │
    replays of the choice and its neighbours ◄──────────┘ ──► what is recommended

Estimates only select sizes to replay. Their hits are those of LRU with tails first over both tiers as one stack, with
the most recently used blocks in host memory; they are computed exactly, in one pass. Each request loads nothing, its
blocks in host memory, or all blocks found, whichever is fastest. Every figure reported comes from a replay, as made by
`longshore replay` with the same size.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from longshore.boundary import FILE, HOST
from longshore.errors import TraceError
from longshore.trace.analysis import Paths, stack_distances
from longshore.trace.machine import Timing
from longshore.trace.replay import MOST_BLOCKS, TieredReplay
from longshore.trace.result import Overload, Replayed, overload, ratio
from longshore.trace.tally import ReplayTally

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
    starts, tokens, seconds = arrivals.paths.starts, arrivals.tokens, arrivals.seconds
    usable = ((tokens - 1) // arrivals.block_tokens).astype(np.int64)
    warm = np.array([host // image for host, _ in cells])
    both = np.array([host // image + file // image for host, file in cells])
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
    p95 = np.percentile(ttft, 95, axis=0).tolist()
    return tuple(Estimate(*cell, prices.of(*cell), each) for cell, each in zip(cells, p95, strict=True))


def _times(
    timing: Timing, block_tokens: int, image: int, tokens: Floats, in_host: Floats, in_all: Floats
) -> tuple[Floats, Floats]:
    """Seconds to load and to compute the rest, for the blocks whose loading minimises the sum."""
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


_WORTH_IT = 0.99

Replay = Callable[[int, int, int], TieredReplay]
"""Replays with given bytes of host memory and of files, and a number of engines."""


DRAM_GIB = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
"""Sizes of host memory for one machine, in GiB."""

DRIVES_GB = (960, 1920, 3840, 7680, 15360, 2 * 15360, 4 * 15360, 8 * 15360)
"""Capacities of data-centre NVMe drives in GB; above 15.36 TB, several drives."""

LARGEST_DRIVE = 15_360 * 10**9
WARRANTY_YEARS = 5
"""Warranty period for a drive's endurance in drive writes per day (DWPD)."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One size of both tiers and the result of its replay, in bytes, seconds and ratios of block references.

    Attributes:
        busy: Computing time as a share of the engines' time.
        file_write_bytes_per_day: At the trace's own pace.
    """

    host_bytes: int
    file_bytes: int
    cost: float
    hit_ratio: float
    host_hit_ratio: float
    ttft_p50: float
    ttft_p95: float
    busy: float = 0.0
    file_write_bytes_per_day: float = 0.0

    @property
    def size(self) -> Size:
        """Both sizes."""
        return self.host_bytes, self.file_bytes

    @property
    def drive_writes_per_day(self) -> float:
        """Drive writes per day (DWPD)."""
        return self.file_write_bytes_per_day / self.file_bytes if self.file_bytes else 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What was found.

    Attributes:
        curve: Hit ratio by bytes of one tier: (bytes, ratio).
        estimates: Estimates of all sizes.
        choices: Sizes that were replayed, and the one without any tier; by cost.
        frontier: Choices that no cheaper choice beats, by cost.
        knee: The choice after which additional cost improves little.
        recommended: The cheapest choice that meets the target; `None` if none does.
        overload: Set if the engines are overloaded with the recommended choice, or else with the best one.
        engines: Number of engines.
        tally: Of the replay of the recommended choice, or else of the best one; `None` if that has no tiers.
    """

    requests: int
    block_refs: int
    unique_blocks: int
    target: float
    curve: tuple[tuple[int, float], ...]
    estimates: tuple[Estimate, ...]
    choices: tuple[Choice, ...]
    frontier: tuple[Choice, ...]
    knee: Choice
    recommended: Choice | None
    prices: Prices
    overload: Overload | None
    engines: int = 1
    tally: ReplayTally | None = None

    def as_json(self) -> dict[str, object]:
        """What `--json` prints."""
        plain = asdict(replace(self, tally=None))
        del plain["tally"]
        plain["curve"] = [{"bytes": count, "hit_ratio": ratio} for count, ratio in self.curve]
        plain["overload"] = None if self.overload is None else self.overload.as_json()
        if self.recommended is not None:
            plain["recommended"]["drive_writes_per_day"] = self.recommended.drive_writes_per_day
        return plain


C = TypeVar("C", Estimate, Choice)


def plan(
    arrivals: Arrivals,
    timing: Timing,
    target: float,
    prices: Prices,
    replay: Replay,
    *,
    engines: int = 1,
    replays: int = 16,
    most_blocks: int = MOST_BLOCKS,
) -> Plan:
    """Find the cheapest size that meets `target`, the 95th percentile of the time to first token, in seconds.

    `replay` replays the requests of `arrivals` with given tier sizes in bytes and number of engines. At most `replays`
    sizes are replayed, none with a tier of more than `most_blocks`. Raises `TraceError` for a trace without requests.
    """
    if not len(arrivals.paths):
        raise TraceError("expected a trace of at least one request, got none")
    if engines < 1 or replays < 1 or not target > 0:
        raise TraceError(
            f"expected at least one engine, one replay and a target above zero, got {engines}, {replays}, {target}"
        )
    distances = stack_distances(arrivals.paths)
    image = arrivals.block_tokens * timing.geometry.kv_bytes_per_token
    sizes = sizes_for(most_useful(distances, arrivals.paths.unique) * image, image, most_blocks)
    search = _Search(replay, prices, target, engines, replays)
    estimates = estimate(arrivals, distances, sizes.cells, timing, prices, engines)
    search.run(frontier_of(estimates), sizes)
    choices = tuple(sorted(search.choices.values(), key=lambda each: each.cost))
    frontier = frontier_of(choices)
    recommended = next((choice for choice in choices if choice.ttft_p95 <= target), None)
    chosen = recommended or frontier[-1]
    ordered = np.sort(distances)
    refs = max(1, len(distances))
    points = np.geomspace(1, max(1, *(sum(cell) // image for cell in sizes.cells)), 60).round()
    curve = [(int(n) * image, float(np.searchsorted(ordered, n, side="right") / refs)) for n in sorted({*points})]
    return Plan(
        requests=len(arrivals.paths),
        block_refs=len(distances),
        unique_blocks=arrivals.paths.unique,
        target=target,
        curve=tuple(curve),
        estimates=estimates,
        choices=choices,
        frontier=frontier,
        knee=_knee(frontier),
        recommended=recommended,
        prices=prices,
        overload=search.overload(chosen),
        engines=engines,
        tally=search.tallies.get(chosen.size),
    )


class _Search:
    """The sizes replayed so far, and the choice of the next one."""

    def __init__(self, replay: Replay, prices: Prices, target: float, engines: int, replays: int) -> None:
        self.choices: dict[Size, Choice] = {}
        self._replay, self._prices, self._target = replay, prices, target
        self._engines, self._left = engines, replays
        self.tallies: dict[Size, ReplayTally] = {}

    def run(self, frontier: Sequence[Estimate], sizes: Sizes) -> None:
        """Replay the best estimate, costlier sizes until one meets the target, cheaper neighbours, then the rest."""
        cells = [(each.host_bytes, each.file_bytes) for each in frontier if each.host_bytes] or [sizes.cells[1]]
        first = next((i for i, each in enumerate(frontier) if each.host_bytes and each.ttft_p95 <= self._target), -1)
        at = cells.index((frontier[first].host_bytes, frontier[first].file_bytes)) if first >= 0 else len(cells) - 1
        if all(self._is_too_much(cell) for cell in (cells[at], cells[-1])):
            return  # no size helps: there are too few engines
        found = next((cell for cell in cells[at:] if self._keeps(cell)), None)
        if found is None:
            found = self._climb(sizes)
        while found is not None:
            cheaper = sorted((n for n in sizes.around(found) if self._cost(n) < self._cost(found)), key=self._cost)
            found = next((cell for cell in cheaper if cell not in self.choices and self._keeps(cell)), None)
        for cell in cells:
            self._keeps(cell)

    def overload(self, choice: Choice) -> Overload | None:
        """Whether the engines are overloaded with `choice`."""
        size = choice.size if choice.host_bytes else next(iter(self.tallies))

        def again(engines: int) -> ReplayTally:
            return self._replay(*size, engines).tally

        return overload(self.tallies[size], self._engines, again, tiers=choice.host_bytes > 0, target=self._target)

    def _is_too_much(self, size: Size) -> bool:
        """Whether the engines are overloaded with this size, so that it misses the target."""
        return not self._keeps(size) and size in self.choices and self.choices[size].busy > 1

    def _climb(self, sizes: Sizes) -> Size | None:
        """The first larger size that meets the target, as long as larger sizes improve."""
        while self._left and self.choices:
            best = min(self.choices.values(), key=lambda each: each.ttft_p95)
            size = best.size if best.host_bytes else sizes.cells[1]
            larger = [cell for cell in sizes.around(size) if self._cost(cell) > best.cost]
            fresh = [cell for cell in larger if cell not in self.choices]
            found = next((cell for cell in fresh if self._keeps(cell)), None)
            if found is not None:
                return found
            if min(each.ttft_p95 for each in self.choices.values()) >= _WORTH_IT * best.ttft_p95:
                return None
        return None

    def _cost(self, size: Size) -> float:
        return self._prices.of(*size)

    def _keeps(self, size: Size) -> bool:
        """Whether the replay of `size` meets the target; false if no more replays are allowed."""
        if size not in self.choices and self._left:
            self._left -= 1
            self._take(size, self._replay(*size, self._engines))
        return size in self.choices and self.choices[size].ttft_p95 <= self._target

    def _take(self, size: Size, run: TieredReplay) -> None:
        found = Replayed(run, "", 0, None)
        ttft, room = found.ttft, run.tally.seconds * run.engines
        self.tallies[size] = run.tally
        if len(self.tallies) == 1:
            p50, p95 = ttft["recompute_p50"], ttft["recompute_p95"]
            self.choices[0, 0] = Choice(0, 0, 0.0, 0.0, 0.0, p50, p95, ratio(run.tally.recomputing, room))
        self.choices[size] = Choice(
            *size,
            self._cost(size),
            found.hit_ratio,
            ratio(found.hits[HOST], run.tally.block_refs),
            ttft["p50"],
            ttft["p95"],
            ratio(run.tally.computing, room),
            found.write_bytes_per_day(FILE),
        )


class Sizes:
    """Sizes on sale: of host memory, and of drives, including none."""

    def __init__(self, hosts: Sequence[int], files: Sequence[int]) -> None:
        self._hosts, self._files = list(hosts), list(files)
        self.cells: list[Size] = [(0, 0), *((host, file) for host in self._hosts for file in self._files)]

    def around(self, size: Size) -> list[Size]:
        """Neighbouring sizes: one step more or less of either, or one step exchanged between them."""
        host, file = self._hosts.index(size[0]), self._files.index(size[1])
        steps = ((-1, 0), (0, -1), (-1, 1), (1, -1), (1, 0), (0, 1))
        return [
            (self._hosts[host + more], self._files[file + other])
            for more, other in steps
            if 0 <= host + more < len(self._hosts) and 0 <= file + other < len(self._files)
        ]


def sizes_for(useful: int, image: int, most_blocks: int = MOST_BLOCKS) -> Sizes:
    """Sizes up to those that hold `useful` bytes, and at most `most_blocks` images."""

    def fitting(sizes: Sequence[int]) -> list[int]:
        fit = [size for size in sizes if image <= size <= image * most_blocks]
        return fit[: 1 + next((i for i, size in enumerate(fit) if size >= useful), len(fit))]

    hosts = fitting([gib * GIB for gib in DRAM_GIB])
    if not hosts:
        raise TraceError(f"expected a block far smaller than {DRAM_GIB[-1]} GiB, got {image} bytes")
    return Sizes(hosts, [0, *(fitting([gb * 10**9 for gb in DRIVES_GB]) if hosts[0] < useful else [])])


def frontier_of(choices: Sequence[C]) -> tuple[C, ...]:
    """Choices that are at least a hundredth faster than all that cost no more; cheapest first."""
    found: list[C] = []
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
