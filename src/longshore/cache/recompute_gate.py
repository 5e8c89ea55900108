"""Load or recompute: how many leading chunks of a match are worth loading.

    load n tokens     queue + fixed + n * bytes / bandwidth           the slowest of the routes that they take
    compute them      alpha * n + beta * n * (2 * context + n) / 2    attention reads all tokens before them

Both are measured: the load line and the prefill curve by least squares over recent observations, with
relative errors. Where the caller does not know the queue, it is estimated: the loads ordered here that have not ended,
plus the time that loads have waited for other transfers, a moving average that decays without observations. A loaded
chunk saves its own prefill, and the remaining chunks cost the same either way. So the gate chooses the prefix with the
largest difference between saved prefill time and load time.

A gate that only recomputes would not measure loads any more. So it saves a small share of the recompute time, and
tries a load when the saved time covers the expected loss. Without observations, everything is loaded.

Sans I/O: the runtime reports what it has measured; `now` is passed in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations

from longshore.boundary import DEVICE, HOST, Route, Status, TransferResult
from longshore.cache.types import Run
from longshore.errors import CacheError

EXPLORE = 0.015
"""Share of the recompute time that is spent on trying whether loads have become faster."""

_DECAY = 0.97
"""Weight of an observation after the next one: older ones fade."""

_REFIT = 16
"""Observations between two fits; fewer until there have been as many."""

_QUEUE_STEP = 0.03
"""Step of the moving average of the queue, after enough observations."""

_PROBE_STEP = 0.1
"""Step of the moving average of the round trip of a probe."""

_QUEUE_HALF_LIFE = 600.0
"""Half-life of the average queue without observations, in seconds."""

_NO_QUEUE = 3
"""Initial observations without a queue, so that the first ones measured have little weight."""

_TRY_SHARE = 10
"""A try loads one chunk in this many."""


class RecomputeGate:
    """Decides for one KV cache layout; `tiers` are named warmest first.

    Chunks of the first tier take its route to the device; chunks of another tier, a file or a remote store, first take
    its route into the first tier. Routes work in parallel.

    Args:
        tiers: Names, as in `Run.tier`.
        chunk_tokens: Tokens of one chunk.
        chunk_bytes: Bytes of one chunk's image.
        explore: Share of the recompute time to spend on tries.
        prefill_speed: Prompt tokens that the engine computes per second; 0: measure it.

    Attributes:
        recomputed: Chunks that a tier had, and that were recomputed because that is faster.
    """

    def __init__(
        self,
        tiers: Sequence[str],
        chunk_tokens: int,
        chunk_bytes: int,
        *,
        explore: float = EXPLORE,
        prefill_speed: float = 0.0,
    ) -> None:
        if not tiers or len(set(tiers)) != len(tiers) or min(chunk_tokens, chunk_bytes) < 1 or not 0 <= explore < 1:
            raise CacheError(
                f"expected distinct tier names, chunk_tokens >= 1, chunk_bytes >= 1 and 0 <= explore < 1; "
                f"got {list(tiers)}, {chunk_tokens}, {chunk_bytes} and {explore}"
            )
        self._routes = {tier: _RouteModel() for tier in tiers}
        self._route_tiers = {tier: tuple(dict.fromkeys((tiers[0], tier))) for tier in tiers}
        """The tiers whose routes lead from a tier to the device."""
        self._chunk_tokens, self._chunk_bytes, self._explore = chunk_tokens, chunk_bytes, explore
        self._prefill = _LeastSquares(3)
        self._try_budget = 0.0
        self.recomputed = 0
        self._prefill_is_given = prefill_speed > 0
        if self._prefill_is_given:
            self._prefill.fix((0.0, 1 / prefill_speed, 0.0))

    @property
    def tiers(self) -> tuple[str, ...]:
        """Names, the warmest first."""
        return tuple(self._routes)

    # ------------------------------------------------------------------ observations

    def observe_load(self, tier: str, nbytes: int, seconds: float, queued_seconds: float, now: float) -> None:
        """Record a load of `nbytes` from `tier` in `seconds`, into the first tier or to the device, after a queue."""
        route = self._route(tier)
        _check(nbytes=nbytes, seconds=seconds)
        _check(now=now, queued_seconds=queued_seconds)
        if nbytes and seconds:
            route.observe(nbytes, seconds, queued_seconds, now)

    def observe_transfer(self, route: Route, result: TransferResult, now: float) -> None:
        """Record the end of a transfer on `route`; only loads from a known tier are evaluated."""
        if route.source in self._routes and route.destination in (HOST, DEVICE):
            route_model = self._routes[route.source]
            if Status.DEADLINE in result.statuses:
                route_model.is_late = True
            elif result.bytes:
                route_model.is_late = route_model.is_measured and result.seconds > 2 * route_model.seconds(
                    result.bytes, now, 0.0
                )
            if result.bytes:
                self.observe_load(route.source, result.bytes, result.seconds, result.queued_seconds, now)
            if lost := len(result.statuses) - result.statuses.count(Status.OK):
                for tier in self._route_tiers[route.source]:
                    self._routes[tier].end_unloaded(lost * self._chunk_bytes, now, all_lost=not result.bytes)

    def is_late(self, tier: str) -> bool:
        """Whether the last load from `tier` has missed its deadline, or took more than twice as long as expected."""
        return self._route(tier).is_late

    def observe_prefill(self, context: int, tokens: int, seconds: float) -> None:
        """Record a step that computed `tokens` prompt tokens after `context` in `seconds`; not with `prefill_speed`."""
        _check(context=context, tokens=tokens, seconds=seconds)
        if tokens and seconds and not self._prefill_is_given:
            self._prefill.observe(_prefill_terms(context, tokens), seconds)

    def observe_probe(self, tier: str, seconds: float) -> None:
        """Record a probe that `tier` answered after `seconds`, or had not answered by then."""
        _check(seconds=seconds)
        self._route(tier).observe_probe(seconds)

    # ------------------------------------------------------------------ what is expected

    def prefill_seconds(self, context: int, tokens: int) -> float | None:
        """Seconds that computing `tokens` after `context` adds to a step; `None` if no step was observed."""
        _check(context=context, tokens=tokens)
        _, each, pairs = self._prefill.coefficients
        _, per_token, per_pair = _prefill_terms(context, tokens)
        return each * per_token + pairs * per_pair if self._prefill.count else None

    def load_seconds(self, runs: Sequence[Run], now: float, queued: Mapping[str, float] | None = None) -> float | None:
        """Seconds until all `runs` are on the device; `None` if one of their routes was never observed."""
        _check(now=now)
        _check(**(queued or {}))
        return self._load_seconds(self._chunks_by_route(runs), now, queued or {})

    def worth_probing(self, context: int, run: Run, now: float, *, for_prefetch: bool = False) -> bool:
        """Whether to wait for the answer to a probe: which chunks of `run`, after `context` tokens, its tier has.

        True if loading all of them after the answer is faster than computing, if that is unknown, and if the saved time
        covers a try. `for_prefetch` is as for `worth_loading`.
        """
        round_trip = self._route(run.tier).round_trip
        answered = now + round_trip  # the queue is that of loads ordered then
        saved = self.prefill_seconds(context, run.num_chunks * self._chunk_tokens)
        cost = self._load_seconds(self._chunks_by_route([run]), answered, {})
        if saved is None or cost is None:
            return True
        if cost + round_trip <= saved:
            return True
        attempt = Run(run.tier, -(-run.num_chunks // _TRY_SHARE))
        loss = round_trip - self._gain(context, [attempt], attempt.num_chunks, answered, {}, 0.0)
        budget = min(self._try_budget + self._explore * saved, max(saved, loss))
        if for_prefetch:
            return False
        if loss > budget:
            self._try_budget = budget
            return False
        self._try_budget = max(0.0, self._try_budget - round_trip)
        return True

    def worth_loading(
        self, context: int, runs: Sequence[Run], now: float, *, least: int = 0, for_prefetch: bool = False
    ) -> int:
        """`chunks_to_load` for a request: leading chunks in host memory are always loaded, and others are counted.

        `least`: chunks that are loaded in any case. `for_prefetch`: the request is looked up again: other chunks are
        not counted, and no load is tried.
        """
        total = sum(run.num_chunks for run in runs)
        at_hand = max(least, runs[0].num_chunks if runs and runs[0].tier == HOST else 0)
        if at_hand >= total:
            return total
        count = max(at_hand, self.chunks_to_load(context, runs, now, tries=not for_prefetch))
        self.recomputed += 0 if for_prefetch else total - count
        return count

    def chunks_to_load(
        self,
        context: int,
        runs: Sequence[Run],
        now: float,
        queued: Mapping[str, float] | None = None,
        *,
        spare: float = 0.0,
        tries: bool = True,
    ) -> int:
        """How many leading chunks of a match to load; the remaining ones are to be computed.

        Args:
            context: Tokens before the match, which the device has.
            runs: Where the matched chunks are, from `TieredCache.runs`.
            now: Clock reading, in seconds.
            queued: Seconds that a load would wait, by tier, where the caller knows them.
            spare: Seconds for which the request waits for the engine in any case; loads within them cost nothing.
            tries: Whether a load may be tried where recomputing is faster.

        The result counts as ordered: later loads queue behind it until its expected end.
        """
        queued = queued or {}
        _check(context=context, now=now, spare=spare)
        _check(**queued)
        total = sum(run.num_chunks for run in runs)
        saved = self.prefill_seconds(context, total * self._chunk_tokens)
        cost = self._load_seconds(self._chunks_by_route(runs), now, queued)
        if not total or saved is None or cost is None:
            return self._record_order(runs, total, now)
        gains = {0: 0.0, total: saved - max(0.0, cost - spare)}
        for count in self._candidates(runs, now, queued, spare) - set(gains):
            gains[count] = self._gain(context, runs, count, now, queued, spare)
        best = max(gains, key=lambda count: (gains[count], count))
        if best == total or not tries:
            return self._record_order(runs, best, now)
        attempt = max(best, -(-total // _TRY_SHARE))
        loss = gains[best] - self._gain(context, runs, attempt, now, queued, spare)
        self._try_budget = min(self._try_budget + self._explore * saved, max(saved, loss))
        if attempt == best or loss > self._try_budget:
            return self._record_order(runs, best, now)
        self._try_budget -= loss
        return self._record_order(runs, attempt, now)

    # ------------------------------------------------------------------ inside

    def _record_order(self, runs: Sequence[Run], count: int, now: float) -> int:
        """Record that `count` chunks are ordered now, so that later loads queue behind them; returns `count`."""
        for tier, chunks in self._chunks_by_route(_leading(runs, count)).items():
            if chunks:
                self._routes[tier].begin_load(chunks * self._chunk_bytes, now)
        return count

    def _route(self, tier: str) -> _RouteModel:
        if tier not in self._routes:
            raise CacheError(f"expected a tier of {list(self._routes)}, got {tier!r}")
        return self._routes[tier]

    def _gain(
        self, context: int, runs: Sequence[Run], count: int, now: float, queued: Mapping[str, float], spare: float
    ) -> float:
        saved = self.prefill_seconds(context, count * self._chunk_tokens)
        cost = self._load_seconds(self._chunks_by_route(_leading(runs, count)), now, queued)
        return (saved or 0.0) - max(0.0, (cost or 0.0) - spare)

    def _candidates(self, runs: Sequence[Run], now: float, queued: Mapping[str, float], spare: float) -> set[int]:
        """Where the best prefix can end: at the end of a run, where another route becomes the slowest, or loading ends
        within the `spare` time.
        """
        if len(runs) == 1:  # the prefill time saved grows faster than the load time
            bytes_by_route = [
                self._routes[tier].bytes_within(spare, now, queued.get(tier))
                for tier in self._route_tiers[runs[0].tier]
            ]
            within = int(min(max(min(bytes_by_route) // self._chunk_bytes, 0), runs[0].num_chunks)) if spare else 0
            return {0, within, runs[0].num_chunks}
        ends, count = {0}, 0
        tally = self._chunks_by_route(())
        for run in runs:
            before = dict(tally)
            for tier in self._route_tiers[run.tier]:
                tally[tier] += run.num_chunks
            slowest = max(spare, self._load_seconds(before, now, queued) or 0.0)
            for tier in self._route_tiers[run.tier]:
                free = self._routes[tier].bytes_within(slowest, now, queued.get(tier)) // self._chunk_bytes
                ends.add(count + int(min(max(free - before[tier], 0), run.num_chunks)))
            count += run.num_chunks
            ends.add(count)
        return ends

    def _chunks_by_route(self, runs: Sequence[Run]) -> dict[str, int]:
        tally = dict.fromkeys(self._routes, 0)
        for run in runs:
            self._route(run.tier)
            for tier in self._route_tiers[run.tier]:
                tally[tier] += run.num_chunks
        return tally

    def _load_seconds(self, tally: Mapping[str, int], now: float, queued: Mapping[str, float]) -> float | None:
        slowest = 0.0
        for tier, chunks in tally.items():
            if chunks:
                route = self._routes[tier]
                if not route.is_measured:
                    return None
                slowest = max(slowest, route.seconds(chunks * self._chunk_bytes, now, queued.get(tier)))
        return slowest


class _LeastSquares:
    """Non-negative least squares over recent observations, in relative errors: terms * coefficients ~ seconds.

    Only the moments of the observations are kept. If the best fit has a negative coefficient, all subsets of the terms
    are tried: there are few. If several fits are equally good, the one with the smallest first, constant term is taken.
    """

    def __init__(self, terms: int) -> None:
        self.count = 0
        self._terms = terms
        self._pairs = [(i, j) for i in range(terms) for j in range(i, terms + 1)]
        """The two factors of each moment; the last is the constant that the terms add up to."""
        self._moments = [0.0] * len(self._pairs)
        self._fitted_coefficients: list[float] | None = [0.0] * terms

    def observe(self, terms: Sequence[float], seconds: float) -> None:
        """Record an observation: `terms` took `seconds`, above zero."""
        row = [*(term / seconds for term in terms), 1.0]
        self._moments = [
            _DECAY * moment + row[i] * row[j] for moment, (i, j) in zip(self._moments, self._pairs, strict=True)
        ]
        self.count += 1
        if self.count <= _REFIT or self.count % _REFIT == 0:
            self._fitted_coefficients = None

    def fix(self, coefficients: Sequence[float]) -> None:
        """Use `coefficients` instead of observations."""
        self._fitted_coefficients, self.count = list(coefficients), 1

    @property
    def coefficients(self) -> list[float]:
        """One coefficient per term, none negative."""
        if self._fitted_coefficients is None:
            self._fitted_coefficients = self._solve()
        return self._fitted_coefficients

    def _solve(self) -> list[float]:
        size = self._terms
        moment = dict(zip(self._pairs, self._moments, strict=True))
        scale = [math.sqrt(max(moment[i, i], 1e-300)) for i in range(size)]
        rows = [[moment[min(i, j), max(i, j)] / (scale[i] * scale[j]) for j in range(size)] for i in range(size)]
        for i, row in enumerate(rows):
            row[i] += 1e-9 if i else 1e-4
        sides = [moment[i, size] / scale[i] for i in range(size)]
        best, least = _solved(rows, sides), 0.0
        if not _may_be_seconds(best):
            best = [0.0] * size
            for several in range(1, size):
                for subset in combinations(range(size), several):
                    found = _solved([[rows[i][j] for j in subset] for i in subset], [sides[i] for i in subset])
                    # What is left of the squares, but for a constant.
                    error = -sum(sides[i] * each for i, each in zip(subset, found, strict=True))
                    if error < least and _may_be_seconds(found):
                        least, best = error, [0.0] * size
                        for i, each in zip(subset, found, strict=True):
                            best[i] = each
        return [each / unit for each, unit in zip(best, scale, strict=True)]


def _may_be_seconds(found: Sequence[float]) -> bool:
    return all(each >= 0 for each in found)  # nor no number at all


def _solved(rows: Sequence[Sequence[float]], sides: Sequence[float]) -> list[float]:
    """Solve rows * x = sides for a small symmetric positive definite matrix: elimination without pivoting."""
    lines = [[*row, side] for row, side in zip(rows, sides, strict=True)]
    size = len(lines)
    for i, pivot in enumerate(lines):
        for line in lines[i + 1 :]:
            factor = line[i] / pivot[i]
            for j in range(i, size + 1):
                line[j] -= factor * pivot[j]
    found = [0.0] * size
    for i in reversed(range(size)):
        line = lines[i]
        found[i] = (line[size] - sum(line[j] * found[j] for j in range(i + 1, size))) / line[i]
    return found


class _QueueTime:
    """Seconds that other transfers delay a load: a moving average that starts at 0, and decays without observations."""

    def __init__(self) -> None:
        self._mean, self._count, self._seen_at = 0.0, _NO_QUEUE, -math.inf

    def observe(self, seconds: float, now: float) -> None:
        self._count += 1
        self._mean += max(_QUEUE_STEP, 1 / self._count) * (seconds - self._mean)
        self._seen_at = max(now, self._seen_at)

    def at(self, now: float) -> float:
        return self._mean * 0.5 ** (max(0.0, now - self._seen_at) / _QUEUE_HALF_LIFE) if self._mean else 0.0


class _RouteModel:
    """One route: fixed + bytes / bandwidth, behind a queue.

        own loads in flight ──► other transfers, after a pause or directly behind own loads ──► this load

    Own loads end one after the other, and what fails does not keep later ones waiting. Other transfers accumulate
    meanwhile, so their delay is averaged separately for loads that follow the last one sooner than that took.
    """

    def __init__(self) -> None:
        self._fit = _LeastSquares(2)
        self._after_a_pause, self._right_behind = _QueueTime(), _QueueTime()
        self._busy_until = -math.inf
        """When the load ordered last is expected to end."""
        self._last_end, self._last_seconds = -math.inf, 0.0
        """When the last load ended, and how long it took."""
        self.round_trip = 0.0
        """Seconds from a probe to its answer; a moving average."""
        self._answers = 0
        self.is_late = False

    @property
    def is_measured(self) -> bool:
        return self._fit.count > 0

    def begin_load(self, nbytes: int, now: float) -> None:
        """Record that an own load is ordered now."""
        self._busy_until = now + self.seconds(nbytes, now, None)

    def end_unloaded(self, nbytes: int, now: float, *, all_lost: bool) -> None:
        """Record that `nbytes` of an own load will not come; `all_lost`: nor did any of it."""
        fixed, each = self._fit.coefficients
        self._busy_until = max(min(now, self._busy_until), self._busy_until - each * nbytes - fixed * all_lost)

    def observe(self, nbytes: int, seconds: float, queued_seconds: float, now: float) -> None:
        """Record that an own load has ended now."""
        self._fit.observe((1.0, nbytes), seconds)
        ordered = now - seconds - queued_seconds
        ours = min(queued_seconds, max(0.0, self._last_end - ordered))
        behind = ordered < self._last_end + self._last_seconds
        (self._right_behind if behind else self._after_a_pause).observe(queued_seconds - ours, now)
        self._last_end, self._last_seconds = max(now, self._last_end), seconds

    def observe_probe(self, seconds: float) -> None:
        """Record a probe that was answered after `seconds`, or not by then."""
        self._answers += 1
        self.round_trip += max(_PROBE_STEP, 1 / self._answers) * (seconds - self.round_trip)

    def queue(self, now: float) -> float:
        """Seconds that a load would wait in the queue."""
        ours = max(0.0, self._busy_until - now)
        behind = ours or now < self._last_end + self._last_seconds
        return ours + (self._right_behind if behind else self._after_a_pause).at(now)

    def seconds(self, nbytes: int, now: float, queued: float | None) -> float:
        fixed, each = self._fit.coefficients
        return (self.queue(now) if queued is None else queued) + fixed + each * nbytes

    def bytes_within(self, seconds: float, now: float, queued: float | None) -> float:
        """Bytes that arrive within `seconds`."""
        left = seconds - self.seconds(0, now, queued)
        each = self._fit.coefficients[1]
        return left / each if each and math.isfinite(left / each) else 0.0


def _prefill_terms(context: int, tokens: int) -> tuple[float, float, float]:
    """Terms of a step's time: constant, its tokens, and the pairs of tokens that attention compares."""
    return 1.0, float(tokens), tokens * (2 * context + tokens) / 2


def _leading(runs: Sequence[Run], count: int) -> list[Run]:
    taken = []
    for run in runs:
        if count <= 0:
            break
        taken.append(Run(run.tier, min(count, run.num_chunks)))
        count -= run.num_chunks
    return taken


def _check(**values: float) -> None:
    """Raise `CacheError` unless all are numbers of at least zero."""
    for name, value in values.items():
        if not math.isfinite(value) or value < 0:
            raise CacheError(f"{name}: expected a finite number of at least 0, got {value}")
