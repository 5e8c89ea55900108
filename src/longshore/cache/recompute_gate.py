"""Load or recompute: how many leading chunks of a match are worth loading.

    load n tokens     queue + fixed + n * bytes / bandwidth           the slowest of the routes that they take
    compute them      alpha * n + beta * n * (2 * context + n) / 2    attention looks back at what is there already

Both are learned from what was observed: the load line and the prefill curve by least squares over recent observations,
in which errors count in proportion to the time taken. Where the caller does not know the queue, it is taken to be what
was ordered here and has not ended, and behind that what loads have waited for others until now, by a moving average
that fades where nothing is seen. What is loaded saves its own prefill, and the rest costs the same either way, so the
gate picks the prefix for which saved time exceeds loading time by the most.

A gate that refuses learns nothing about loading, so it puts a small share of the time that it spends on recomputing
aside, and buys a try when that suffices for what the try is expected to lose. Nothing known yet: load.

Sans I/O: whoever loads and computes tells the gate what was seen; `now` is passed in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations

from longshore.boundary import DEVICE, HOST, Route, TransferResult
from longshore.cache.types import Run
from longshore.errors import CacheError

EXPLORE = 0.015
"""Share of the time spent on recomputing that goes into finding out whether loading has become faster."""

_MEMORY = 0.97
"""How much an observation still counts when the next one comes."""

_REFIT = 16
"""Observations between two fits, once there were so many; fewer before."""

_QUEUE_STEP = 0.03
"""How far the average queue moves towards what was seen last, once enough was seen."""

_PROBE_STEP = 0.1
"""The same of the average round trip of a question."""

_QUEUE_HALF_LIFE = 600.0
"""Seconds after which half of the average queue is taken to be gone, where nothing was seen."""

_NO_QUEUE = 3
"""Imagined loads that did not wait, before any was seen: a few that did by chance are not believed too soon."""

_TRY_SHARE = 10
"""A try loads one chunk out of so many."""


class Gate:
    """Decides for one KV cache layout; `tiers` are named warmest first.

    Chunks of the first tier take its route onto the device, those of any other its own into the first one before that:
    what is in files, or in a remote store, goes through host memory. Routes work side by side.

    Args:
        tiers: Names, as in `Run.tier`.
        chunk_tokens: Tokens of one chunk.
        chunk_bytes: Bytes of one chunk's image.
        explore: Share of recomputing time to spend on tries.
        prefill_speed: Prompt tokens that the engine computes per second; 0: measured.

    Attributes:
        refused: Chunks that `worth_loading` found, but had recomputed because that is faster.
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
                f"a gate has tiers of different names, chunks of at least a token and a byte, and an exploring share "
                f"in [0, 1); got {list(tiers)}, {chunk_tokens}, {chunk_bytes} and {explore}"
            )
        self._routes = {tier: _Line() for tier in tiers}
        self._ways = {tier: tuple(dict.fromkeys((tiers[0], tier))) for tier in tiers}
        """The tiers whose routes lead from a tier to the device."""
        self._chunk_tokens, self._chunk_bytes, self._explore = chunk_tokens, chunk_bytes, explore
        self._prefill = _Fit(3)
        self._spare = 0.0
        self.refused = 0
        self._is_told = prefill_speed > 0
        if self._is_told:
            self._prefill.fix((0.0, 1 / prefill_speed, 0.0))

    @property
    def tiers(self) -> tuple[str, ...]:
        """Names, the warmest first."""
        return tuple(self._routes)

    # ------------------------------------------------------------------ what was seen

    def observe_load(self, tier: str, nbytes: int, seconds: float, queued_seconds: float, now: float) -> None:
        """`nbytes` took `seconds` from `tier` into the first one (or onto the device), after some time in a queue."""
        route = self._route(tier)
        _check(nbytes=nbytes, seconds=seconds)
        _check(now=now, queued_seconds=queued_seconds)
        if nbytes and seconds:
            route.observe(nbytes, seconds, queued_seconds, now)

    def observe_transfer(self, route: Route, result: TransferResult, now: float) -> None:
        """Record the end of a transfer on `route`; only loads from a known tier are evaluated."""
        if result.bytes and route.source in self._routes and route.destination in (HOST, DEVICE):
            self.observe_load(route.source, result.bytes, result.seconds, result.queued_seconds, now)

    def observe_prefill(self, context: int, tokens: int, seconds: float) -> None:
        """A step computed `tokens` prompt tokens behind `context` others in `seconds`. Ignored with `prefill_speed`."""
        _check(context=context, tokens=tokens, seconds=seconds)
        if tokens and seconds and not self._is_told:
            self._prefill.observe(_prefill_terms(context, tokens), seconds)

    def observe_probe(self, tier: str, seconds: float) -> None:
        """`tier` took so long to say what it has, or did not say it for so long."""
        _check(seconds=seconds)
        self._route(tier).observe_probe(seconds)

    # ------------------------------------------------------------------ what is expected

    def prefill_seconds(self, context: int, tokens: int) -> float | None:
        """Time that computing `tokens` behind `context` adds to a step; `None` if no step was observed."""
        _check(context=context, tokens=tokens)
        _, each, pairs = self._prefill.coefficients
        _, per_token, per_pair = _prefill_terms(context, tokens)
        return each * per_token + pairs * per_pair if self._prefill.count else None

    def load_seconds(self, runs: Sequence[Run], now: float, queued: Mapping[str, float] | None = None) -> float | None:
        """Time until all `runs` are on the device; `None` if a route that they take was never observed."""
        _check(now=now)
        _check(**(queued or {}))
        return self._cost(self._tally(runs), now, queued or {})

    def worth_asking(self, context: int, run: Run, now: float, *, ahead: bool = False) -> bool:
        """Whether to wait until the tier of `run` has said which of these chunks it has, `context` tokens before them.

        It is if loading all of them, after the answer, is quicker than computing; if that is not known; and if the time
        that is set aside covers a try. `ahead` is as for `worth_loading`.
        """
        saved, cost = (
            self.prefill_seconds(context, run.chunks * self._chunk_tokens),
            self._cost(self._tally([run]), now, {}),
        )
        if saved is None or cost is None:
            return True
        asking = self._route(run.tier).round_trip
        if cost + asking <= saved:
            return True
        attempt = Run(run.tier, -(-run.chunks // _TRY_SHARE))
        loss = asking - self._gain(context, [attempt], attempt.chunks, now, {}, 0.0)
        spare = min(self._spare + self._explore * saved, max(saved, loss))
        if ahead:
            return False
        if loss > spare:
            self._spare = spare
            return False
        self._spare = max(0.0, self._spare - asking)
        return True

    def worth_loading(
        self, context: int, runs: Sequence[Run], now: float, *, least: int = 0, ahead: bool = False
    ) -> int:
        """`chunks_to_load` for a request: chunks that lead in host memory are always loaded, and refusals are counted.

        `least`: how many are loaded in any case. `ahead`: for a prefetch, whose request is looked up again: refused
        chunks are not counted, and no load is tried.
        """
        total = sum(run.chunks for run in runs)
        at_hand = max(least, runs[0].chunks if runs and runs[0].tier == HOST else 0)
        if at_hand >= total:
            return total
        count = max(at_hand, self.chunks_to_load(context, runs, now, tries=not ahead))
        self.refused += 0 if ahead else total - count
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
        """How many leading chunks of a match to load; the rest is to be computed.

        Args:
            context: Tokens before the match, which the device has already.
            runs: Where the matched chunks are, from `TieredCache.runs`.
            now: Clock reading, in seconds.
            queued: Seconds that a load would wait, by tier, where the caller knows them.
            spare: Seconds for which the request waits for an engine whatever is loaded: loading in that time is free.
            tries: Whether a try may be bought, where the answer is to recompute.

        The answer counts as ordered: until these loads should have ended, others wait for them.
        """
        queued = queued or {}
        _check(context=context, now=now, spare=spare)
        _check(**queued)
        total = sum(run.chunks for run in runs)
        saved = self.prefill_seconds(context, total * self._chunk_tokens)
        cost = self._cost(self._tally(runs), now, queued)
        if not total or saved is None or cost is None:
            return self._order(runs, total, now)
        gains = {0: 0.0, total: saved - max(0.0, cost - spare)}
        for count in self._candidates(runs, now, queued, spare) - set(gains):
            gains[count] = self._gain(context, runs, count, now, queued, spare)
        best = max(gains, key=lambda count: (gains[count], count))
        if best == total or not tries:
            return self._order(runs, best, now)
        attempt = max(best, -(-total // _TRY_SHARE))
        loss = gains[best] - self._gain(context, runs, attempt, now, queued, spare)
        self._spare = min(self._spare + self._explore * saved, max(saved, loss))
        if attempt == best or loss > self._spare:
            return self._order(runs, best, now)
        self._spare -= loss
        return self._order(runs, attempt, now)

    # ------------------------------------------------------------------ inside

    def _order(self, runs: Sequence[Run], count: int, now: float) -> int:
        """So many chunks are ordered now: what comes later waits for them. Returns their number."""
        for tier, chunks in self._tally(_first(runs, count)).items():
            if chunks:
                self._routes[tier].order(chunks * self._chunk_bytes, now)
        return count

    def _route(self, tier: str) -> _Line:
        if tier not in self._routes:
            raise CacheError(f"the gate knows the tiers {', '.join(self._routes)}, got {tier!r}")
        return self._routes[tier]

    def _gain(
        self, context: int, runs: Sequence[Run], count: int, now: float, queued: Mapping[str, float], spare: float
    ) -> float:
        """Seconds won by loading the first `count` chunks instead of computing them."""
        saved = self.prefill_seconds(context, count * self._chunk_tokens)
        cost = self._cost(self._tally(_first(runs, count)), now, queued)
        return (saved or 0.0) - max(0.0, (cost or 0.0) - spare)

    def _candidates(self, runs: Sequence[Run], now: float, queued: Mapping[str, float], spare: float) -> set[int]:
        """Where the best prefix can end: at the end of a run, where another route becomes the slowest, or loading ends
        within the `spare` time.
        """
        if len(runs) == 1:  # saving grows faster than loading does
            ways = [self._routes[tier].bytes_within(spare, now, queued.get(tier)) for tier in self._ways[runs[0].tier]]
            within = int(min(max(min(ways) // self._chunk_bytes, 0), runs[0].chunks)) if spare else 0
            return {0, within, runs[0].chunks}
        ends, count = {0}, 0
        tally = self._tally(())
        for run in runs:
            before = dict(tally)
            for tier in self._ways[run.tier]:
                tally[tier] += run.chunks
            slowest = max(spare, self._cost(before, now, queued) or 0.0)
            for tier in self._ways[run.tier]:
                free = self._routes[tier].bytes_within(slowest, now, queued.get(tier)) // self._chunk_bytes
                ends.add(count + int(min(max(free - before[tier], 0), run.chunks)))
            count += run.chunks
            ends.add(count)
        return ends

    def _tally(self, runs: Sequence[Run]) -> dict[str, int]:
        """Chunks that take the route of each tier."""
        tally = dict.fromkeys(self._routes, 0)
        for run in runs:
            self._route(run.tier)
            for tier in self._ways[run.tier]:
                tally[tier] += run.chunks
        return tally

    def _cost(self, tally: Mapping[str, int], now: float, queued: Mapping[str, float]) -> float | None:
        slowest = 0.0
        for tier, chunks in tally.items():
            if chunks:
                route = self._routes[tier]
                if not route.known:
                    return None
                slowest = max(slowest, route.seconds(chunks * self._chunk_bytes, now, queued.get(tier)))
        return slowest


class _Fit:
    """Non-negative least squares over recent observations, in relative errors: terms * coefficients ~ seconds.

    Only the moments of the observations are kept. Where the best fit has a coefficient below zero, every subset of the
    terms is tried: there are few. Where observations leave a choice, the first term, which is the same each time, takes
    as little as it can.
    """

    def __init__(self, terms: int) -> None:
        self.count = 0
        self._terms = terms
        self._pairs = [(i, j) for i in range(terms) for j in range(i, terms + 1)]
        """Of which two the moments are; the last is the constant that the terms are to make up."""
        self._moments = [0.0] * len(self._pairs)
        self._found: list[float] | None = [0.0] * terms

    def observe(self, terms: Sequence[float], seconds: float) -> None:
        """Take in that `terms` took `seconds`, which is more than zero."""
        row = [*(term / seconds for term in terms), 1.0]
        self._moments = [
            _MEMORY * moment + row[i] * row[j] for moment, (i, j) in zip(self._moments, self._pairs, strict=True)
        ]
        self.count += 1
        if self.count <= _REFIT or self.count % _REFIT == 0:
            self._found = None

    def fix(self, coefficients: Sequence[float]) -> None:
        """Take `coefficients` as they are, in place of observations."""
        self._found, self.count = list(coefficients), 1

    @property
    def coefficients(self) -> list[float]:
        """One per term, none below zero."""
        if self._found is None:
            self._found = self._fitted()
        return self._found

    def _fitted(self) -> list[float]:
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
    """The `x` of rows * x = sides, for few, symmetric and positive definite rows: by elimination, without pivots."""
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
    """How long others make a load wait: a moving average, which fades where nothing is seen, and begins at nothing."""

    def __init__(self) -> None:
        self._mean, self._count, self._seen_at = 0.0, _NO_QUEUE, -math.inf

    def observe(self, seconds: float, now: float) -> None:
        self._count += 1
        self._mean += max(_QUEUE_STEP, 1 / self._count) * (seconds - self._mean)
        self._seen_at = max(now, self._seen_at)

    def at(self, now: float) -> float:
        return self._mean * 0.5 ** (max(0.0, now - self._seen_at) / _QUEUE_HALF_LIFE) if self._mean else 0.0


class _Line:
    """One route: fixed + bytes / bandwidth, behind a queue.

        ours, under way ──► others, after a pause, or right behind ours ──► this load

    Loads of ours end one after the other. What others do piles up meanwhile, so their part is averaged apart for loads
    that come sooner after the last one than that took.
    """

    def __init__(self) -> None:
        self._fit = _Fit(2)
        self._after_a_pause, self._right_behind = _QueueTime(), _QueueTime()
        self._busy_until = -math.inf
        """When what was ordered last is expected to end."""
        self._last_end, self._last_seconds = -math.inf, 0.0
        """When the last load ended, and how long it took."""
        self.round_trip = 0.0
        """Seconds from a question to its answer, of a tier that is asked what it has; a moving average."""
        self._answers = 0

    @property
    def known(self) -> bool:
        return self._fit.count > 0

    def order(self, nbytes: int, now: float) -> None:
        """A load of ours is ordered now."""
        self._busy_until = now + self.seconds(nbytes, now, None)

    def observe(self, nbytes: int, seconds: float, queued_seconds: float, now: float) -> None:
        """A load of ours has ended now."""
        self._fit.observe((1.0, nbytes), seconds)
        ordered = now - seconds - queued_seconds
        ours = min(queued_seconds, max(0.0, self._last_end - ordered))
        behind = ordered < self._last_end + self._last_seconds
        (self._right_behind if behind else self._after_a_pause).observe(queued_seconds - ours, now)
        self._last_end, self._last_seconds = max(now, self._last_end), seconds

    def observe_probe(self, seconds: float) -> None:
        """A question was answered after so long, or was not until then."""
        self._answers += 1
        self.round_trip += max(_PROBE_STEP, 1 / self._answers) * (seconds - self.round_trip)

    def queue(self, now: float) -> float:
        """Seconds that a load would wait."""
        ours = max(0.0, self._busy_until - now)
        behind = ours or now < self._last_end + self._last_seconds
        return ours + (self._right_behind if behind else self._after_a_pause).at(now)

    def seconds(self, nbytes: int, now: float, queued: float | None) -> float:
        fixed, each = self._fit.coefficients
        return (self.queue(now) if queued is None else queued) + fixed + each * nbytes

    def bytes_within(self, seconds: float, now: float, queued: float | None) -> float:
        """How many bytes arrive in so much time."""
        left = seconds - self.seconds(0, now, queued)
        each = self._fit.coefficients[1]
        return left / each if each and math.isfinite(left / each) else 0.0


def _prefill_terms(context: int, tokens: int) -> tuple[float, float, float]:
    """What a step's time is made of: itself, its tokens, and the pairs of tokens that attention compares."""
    return 1.0, float(tokens), tokens * (2 * context + tokens) / 2


def _first(runs: Sequence[Run], count: int) -> list[Run]:
    """The first `count` chunks of `runs`."""
    taken = []
    for run in runs:
        if count <= 0:
            break
        taken.append(Run(run.tier, min(count, run.chunks)))
        count -= run.chunks
    return taken


def _check(**values: float) -> None:
    """Raise `CacheError` unless all are numbers of at least zero."""
    for name, value in values.items():
        if not math.isfinite(value) or value < 0:
            raise CacheError(f"{name}: expected a finite number of at least 0, got {value}")
