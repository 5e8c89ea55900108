"""Sizing: recommends sizes of host memory, files and a store that replicas share, for a trace.

    stack distances ──► blocks of each request in host memory, files, store ──► seconds to load, and to compute
                                                                            ──► engines, one prompt at a time ──► TTFT
    estimates of all sizes that can be bought ──► their frontier: where to look
                                                        │
    replays of the choice and its neighbours ◄──────────┘ ──► what is recommended

Estimates only select sizes to replay. Their hits are those of LRU with tails first over both tiers as one stack, with
the most recently used blocks in host memory; they are computed exactly, in one pass over the requests of each replica,
and one over all of them for a store. Each request loads nothing, its blocks in host memory, those in its replica's
tiers, or all blocks found, whichever is fastest. Every figure reported comes from a replay, as made by `longshore
replay` with the same size. Sizes with and without a store are replayed, so that the price of one can be compared.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from longshore.boundary import FILE, HOST
from longshore.errors import TraceError
from longshore.trace.analysis import Paths, stack_distances
from longshore.trace.machine import Timing
from longshore.trace.replay import MOST_BLOCKS, Router, Routing, TieredReplay
from longshore.trace.result import Overload, Replayed, overload, ratio
from longshore.trace.tally import ReplayTally

GIB = 1 << 30
_MOST_PRICE = 1e12
_BATCH_CELLS = 1 << 19
"""Estimates that are made together."""

Floats = npt.NDArray[np.float64]


class Size(NamedTuple):
    """Bytes of host memory and of files, both of each replica, and of the store that replicas share."""

    host: int
    file: int = 0
    store: int = 0


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices per GiB. By default, DRAM costs 25 times as much as NVMe, and a store as much as DRAM."""

    dram_per_gib: float = 25.0
    nvme_per_gib: float = 1.0
    store_per_gib: float = 25.0
    currency: str = "units of a GiB of NVMe"

    @classmethod
    def read(cls, path: Path) -> Prices:
        """Prices from a TOML file with these keys. Raises `TraceError` for other content."""
        try:
            table = tomllib.loads(path.read_text("utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            why = getattr(error, "strerror", None) or error
            raise TraceError(f"{path}: expected prices in TOML: {why}") from error
        prices = {"store_per_gib": table.get("dram_per_gib"), **table}
        known = {"dram_per_gib", "nvme_per_gib", "store_per_gib", "currency"}
        numbers = [prices.get(name) for name in known - {"currency"}]
        good = all(type(n) in (int, float) and 0 < n <= _MOST_PRICE for n in numbers)  # type: ignore[operator]
        if set(table) - known or not good or not isinstance(table.get("currency", ""), str):
            names = "dram_per_gib, nvme_per_gib, store_per_gib (positive; as dram_per_gib, unless given) and currency"
            raise TraceError(f"{path}: expected {names}, got {table}")
        return cls(**prices)

    def of(self, size: Size, replicas: int = 1) -> float:
        """The cost of the tiers of so many replicas, and of their store."""
        each = size.host * self.dram_per_gib + size.file * self.nvme_per_gib
        return (replicas * each + size.store * self.store_per_gib) / GIB


@dataclass(frozen=True, slots=True)
class Estimate:
    """The estimate for one size."""

    host_bytes: int
    file_bytes: int
    store_bytes: int
    cost: float
    ttft_p95: float

    @property
    def size(self) -> Size:
        """The size."""
        return Size(self.host_bytes, self.file_bytes, self.store_bytes)


class Distances(NamedTuple):
    """The stack distance of each reference: among the requests of its replica, and among all."""

    own: npt.NDArray[np.int64]
    shared: npt.NDArray[np.int64]


class Arrivals:
    """The requests of a trace for sizing, dealt to replicas: four bytes per block and 24 per request."""

    def __init__(self, block_tokens: int, replicas: int = 1, routing: Routing = Routing.ROUND_ROBIN) -> None:
        self.block_tokens, self.replicas = block_tokens, replicas
        self.paths = Paths()
        self.replica: list[int] = []
        """Of each request."""
        self._router = Router(replicas, routing)
        self._seconds: list[float] = []
        self._tokens: list[int] = []

    def add(self, seconds: float, tokens: int, hash_ids: Sequence[int]) -> None:
        """Add one request; only its complete blocks count."""
        path = hash_ids[: tokens // self.block_tokens]
        self.paths.add(path)
        self.replica.append(self._router.deal(path))
        self._seconds.append(max(seconds, self._seconds[-1] if self._seconds else 0.0))
        self._tokens.append(tokens)

    def distances(self) -> Distances:
        """The stack distances of all references."""
        shared = stack_distances(self.paths)
        if self.replicas == 1:
            return Distances(shared, shared)
        own, starts, replica = np.empty_like(shared), self.paths.starts, np.array(self.replica)
        for number in range(self.replicas):
            mine = np.flatnonzero(replica == number).tolist()
            places = [np.arange(starts[request], starts[request + 1]) for request in mine]
            if places:
                own[np.concatenate(places)] = stack_distances(Paths(self.paths[request] for request in mine))
        return Distances(own, shared)

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
    arrivals: Arrivals, distances: Distances, cells: Sequence[Size], timing: Timing, prices: Prices, engines: int
) -> tuple[Estimate, ...]:
    """Estimates for `cells`; `engines` are those of each replica."""
    image = arrivals.block_tokens * timing.geometry.kv_bytes_per_token
    starts, tokens, seconds = arrivals.paths.starts, arrivals.tokens, arrivals.seconds
    usable = ((tokens - 1) // arrivals.block_tokens).astype(np.int64)
    warm = np.array([size.host // image for size in cells])
    both = warm + np.array([size.file // image for size in cells])
    shared = np.array([size.store // image for size in cells])
    free = np.zeros((arrivals.replicas, len(cells), engines))
    rows, at_once = np.arange(len(cells)), max(1, _BATCH_CELLS // len(cells))
    ttft = np.empty((len(tokens), len(cells)))
    for first in range(0, len(tokens), at_once):
        some = range(first, min(first + at_once, len(tokens)))
        in_host, in_own, in_all = (np.empty((len(some), len(cells))) for _ in range(3))
        for row, request in enumerate(some):
            path = slice(starts[request], starts[request] + usable[request])
            in_host[row] = np.searchsorted(distances.own[path], warm, side="right")
            in_own[row] = np.searchsorted(distances.own[path], both, side="right")
            in_all[row] = np.maximum(in_own[row], np.searchsorted(distances.shared[path], shared, side="right"))
        blocks = in_host, in_own, in_all
        loading, computing = _times(timing, arrivals.block_tokens, image, tokens[first : some.stop], *blocks)
        for row, request in enumerate(some):
            mine = free[arrivals.replica[request]]
            first_free = mine.argmin(axis=1)
            begun = np.maximum(mine[rows, first_free], seconds[request] + loading[row])
            mine[rows, first_free] = begun + computing[row]
            ttft[request] = mine[rows, first_free] - seconds[request]
    p95 = np.percentile(ttft, 95, axis=0).tolist()
    return tuple(
        Estimate(*cell, prices.of(cell, arrivals.replicas), each) for cell, each in zip(cells, p95, strict=True)
    )


def _times(
    timing: Timing, block_tokens: int, image: int, tokens: Floats, in_host: Floats, in_own: Floats, in_all: Floats
) -> tuple[Floats, Floats]:
    """Seconds to load and to compute the rest, for the blocks whose loading minimises the sum.

    So many blocks are in host memory, in the tiers of the replica, and in these or the store.
    """
    profile, length = timing.profile, tokens[:, None]

    def compute(blocks: Floats) -> Floats:
        context = blocks * block_tokens
        rest = length - context
        return profile.step + timing.alpha * rest + timing.beta * rest * (2 * context + rest) / 2

    def move(blocks: Floats, rate: float, delay: float = 0.0) -> Floats:
        return np.where(blocks > 0, profile.fixed + delay + blocks * image / rate, 0.0)

    nothing = np.zeros_like(in_all)
    link, computing = [], []
    for blocks in (nothing, in_host, in_own, in_all):
        link.append(move(blocks, profile.link))
        computing.append(compute(blocks))
    files = move(in_own - in_host, profile.file_read)
    store = np.maximum(files, move(in_all - in_own, profile.remote_read, profile.remote_delay))
    loading = [*link[:2], np.maximum(link[2], files), np.maximum(link[3], store)]
    best = np.argmin([load + rest for load, rest in zip(loading, computing, strict=True)], axis=0)
    return np.choose(best, loading), np.choose(best, computing)


_WORTH_IT = 0.99

Replay = Callable[[Size, int], TieredReplay]
"""Replays with given sizes, and a number of engines in each replica."""


DRAM_GIB = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
"""Sizes of host memory for one machine, in GiB."""

DRIVES_GB = (960, 1920, 3840, 7680, 15360, 2 * 15360, 4 * 15360, 8 * 15360)
"""Capacities of data-centre NVMe drives in GB; above 15.36 TB, several drives."""

STORE_GIB = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
"""Sizes of stores that replicas share, in GiB."""

LARGEST_DRIVE = 15_360 * 10**9
WARRANTY_YEARS = 5
"""Warranty period for a drive's endurance in drive writes per day (DWPD)."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One size and the result of its replay, in bytes, seconds and ratios of block references.

    Attributes:
        cost: Of all replicas and their store.
        busy: Computing time as a share of the engines' time.
        file_write_bytes_per_day: Of each replica, at the trace's own pace.
    """

    host_bytes: int
    file_bytes: int
    store_bytes: int
    cost: float
    hit_ratio: float
    host_hit_ratio: float
    ttft_p50: float
    ttft_p95: float
    busy: float = 0.0
    file_write_bytes_per_day: float = 0.0

    @property
    def size(self) -> Size:
        """The size."""
        return Size(self.host_bytes, self.file_bytes, self.store_bytes)

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
        engines: Number of engines of each replica.
        replicas: Number of replicas.
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
    replicas: int = 1
    tally: ReplayTally | None = None

    @property
    def by_store(self) -> tuple[Choice | None, Choice | None]:
        """The cheapest choice that meets the target without a store, and with one; `None` where none does."""
        good = [choice for choice in self.choices if choice.ttft_p95 <= self.target]
        without, with_one = ([each for each in good if bool(each.store_bytes) is kind] for kind in (False, True))
        return next(iter(without), None), next(iter(with_one), None)

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

    `replay` replays the requests of `arrivals` with given sizes and number of engines. At most `replays` sizes are
    replayed, none with a tier of more than `most_blocks`; with several replicas, some of them with a store that these
    share, and some without. Raises `TraceError` for a trace without requests.
    """
    if not len(arrivals.paths):
        raise TraceError("expected a trace of at least one request, got none")
    if engines < 1 or replays < 1 or not target > 0:
        raise TraceError(
            f"expected at least one engine, one replay and a target above zero, got {engines}, {replays}, {target}"
        )
    found, unique = arrivals.distances(), arrivals.paths.unique
    image = arrivals.block_tokens * timing.geometry.kv_bytes_per_token
    shared = most_useful(found.shared, unique) * image if arrivals.replicas > 1 else 0
    sizes = sizes_for(most_useful(found.own, unique) * image, image, most_blocks, shared=shared)
    search = _Search(replay, prices, target, arrivals.replicas, engines, replays)
    estimates = estimate(arrivals, found, sizes.cells, timing, prices, engines)
    search.run(estimates, sizes)
    choices = tuple(sorted(search.choices.values(), key=lambda each: each.cost))
    frontier = frontier_of(choices)
    recommended = next((choice for choice in choices if choice.ttft_p95 <= target), None)
    chosen = recommended or frontier[-1]
    ordered = np.sort(found.shared)
    refs = max(1, len(ordered))
    points = np.geomspace(1, max(1, *(sum(cell) // image for cell in sizes.cells)), 60).round()
    curve = [(int(n) * image, float(np.searchsorted(ordered, n, side="right") / refs)) for n in sorted({*points})]
    return Plan(
        requests=len(arrivals.paths),
        block_refs=len(ordered),
        unique_blocks=unique,
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
        replicas=arrivals.replicas,
        tally=search.tallies.get(chosen.size),
    )


class _Search:
    """The sizes replayed so far, and the choice of the next one."""

    def __init__(
        self, replay: Replay, prices: Prices, target: float, replicas: int, engines: int, replays: int
    ) -> None:
        self.choices: dict[Size, Choice] = {}
        self._replay, self._prices, self._target = replay, prices, target
        self._replicas, self._engines, self._left = replicas, engines, replays
        self.tallies: dict[Size, ReplayTally] = {}

    def run(self, estimates: Sequence[Estimate], sizes: Sizes) -> None:
        """Replay the best estimate, costlier sizes until one meets the target, cheaper neighbours, then the rest.

        If stores are sold, a quarter of the replays compares sizes with one and without one.
        """
        kinds = {bool(size.store) for size in sizes.cells}
        kept = self._left // 4 if len(kinds) > 1 else 0
        self._left -= kept
        cells, at = self._towards(estimates, sizes)
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
        self._left += kept
        good = [size for size in self.choices if self._keeps(size)]
        for kind in sorted(kinds - {bool(size.store) for size in good}) if kept and Size(0) not in good else ():
            cells, at = self._towards([each for each in estimates if bool(each.store_bytes) is kind], sizes)
            next((cell for cell in cells[at:] if self._keeps(cell)), None)

    def _towards(self, estimates: Sequence[Estimate], sizes: Sizes) -> tuple[list[Size], int]:
        """The sizes of the frontier of `estimates`, and the position of the first that is to meet the target."""
        frontier = [each for each in frontier_of(estimates) if each.host_bytes]
        at = next((at for at, each in enumerate(frontier) if each.ttft_p95 <= self._target), len(frontier) - 1)
        return [each.size for each in frontier] or [sizes.cells[1]], max(at, 0)

    def overload(self, choice: Choice) -> Overload | None:
        """Whether the engines are overloaded with `choice`."""
        size = choice.size if choice.host_bytes else next(iter(self.tallies))

        def again(engines: int) -> ReplayTally:
            return self._replay(size, engines).tally

        tiers, target, replicas = choice.host_bytes > 0, self._target, self._replicas
        return overload(self.tallies[size], self._engines, again, tiers=tiers, target=target, replicas=replicas)

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
        return self._prices.of(size, self._replicas)

    def _keeps(self, size: Size) -> bool:
        """Whether the replay of `size` meets the target; false if no more replays are allowed."""
        if size not in self.choices and self._left:
            self._left -= 1
            self._take(size, self._replay(size, self._engines))
        return size in self.choices and self.choices[size].ttft_p95 <= self._target

    def _take(self, size: Size, run: TieredReplay) -> None:
        found = Replayed(run, "", 0, None)
        ttft, room = found.ttft, run.tally.seconds * run.engines * self._replicas
        self.tallies[size] = run.tally
        if len(self.tallies) == 1:
            p50, p95 = ttft["recompute_p50"], ttft["recompute_p95"]
            self.choices[Size(0)] = Choice(0, 0, 0, 0.0, 0.0, 0.0, p50, p95, ratio(run.tally.recomputing, room))
        self.choices[size] = Choice(
            *size,
            self._cost(size),
            found.hit_ratio,
            ratio(found.hits[HOST], run.tally.block_refs),
            ttft["p50"],
            ttft["p95"],
            ratio(run.tally.computing, room),
            found.write_bytes_per_day(FILE) / self._replicas,
        )


class Sizes:
    """Sizes on sale: of host memory, of drives, including none, and of stores, including none."""

    def __init__(self, hosts: Sequence[int], files: Sequence[int], stores: Sequence[int] = (0,)) -> None:
        self._sold = [list(hosts), list(files), list(stores)]
        self.cells = [Size(0), *(Size(*each) for each in product(*self._sold))]

    def around(self, size: Size) -> list[Size]:
        """Neighbouring sizes: one step more or less of one, or one step exchanged between two; smaller ones first."""
        at = [sold.index(each) for sold, each in zip(self._sold, size, strict=True)]
        steps = [each for each in product((-1, 0, 1), repeat=3) if any(each) and max(map(each.count, (-1, 1))) < 2]
        moved = [[here + by for here, by in zip(at, each, strict=True)] for each in sorted(steps, key=sum)]
        good = [to for to in moved if all(0 <= n < len(sold) for n, sold in zip(to, self._sold, strict=True))]
        return [Size(*(sold[n] for n, sold in zip(to, self._sold, strict=True))) for to in good]


def sizes_for(useful: int, image: int, most_blocks: int = MOST_BLOCKS, shared: int = 0) -> Sizes:
    """Sizes up to those that hold `useful` bytes, or `shared` bytes in a store, and at most `most_blocks` images."""

    def fitting(sizes: Sequence[int], useful: int) -> list[int]:
        fit = [size for size in sizes if image <= size <= image * most_blocks]
        return fit[: 1 + next((i for i, size in enumerate(fit) if size >= useful), len(fit))]

    hosts = fitting([gib * GIB for gib in DRAM_GIB], useful)
    if not hosts:
        raise TraceError(f"expected a block far smaller than {DRAM_GIB[-1]} GiB, got {image} bytes")
    files = fitting([gb * 10**9 for gb in DRIVES_GB], useful) if hosts[0] < useful else []
    stores = fitting([gib * GIB for gib in STORE_GIB], shared) if shared else []
    return Sizes(hosts, [0, *files], [0, *stores])


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
