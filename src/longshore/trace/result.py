"""Results of a replay in virtual time, as JSON and as table rows."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from longshore.boundary import DEVICE, FILE, REMOTE
from longshore.cache import DropReason, MissReason
from longshore.config import format_bytes
from longshore.report.units import quantity, seconds, share
from longshore.trace.replay import Routing, TieredReplay
from longshore.trace.tally import ReplayTally

_DAY = 86_400.0

_COMFORTABLE = 0.7
"""Utilisation of engines at which queues stay short."""

_MORE, _BETTER = 1.25, 0.99
"""Factor of engines for the next try, and the relative improvement required."""

MOST_ENGINES = 10_000

_ZERO = frozenset({"0", "0 B", "0.0 %"})
"""Values of rows of which the table gives the names alone."""

Row = tuple[str, str, str]
"""Name, value, note."""


class Sharing(NamedTuple):
    """What the replicas of a replay are compared with.

    Attributes:
        one_cache: Hits of one cache with the blocks of all tiers of all replicas, without time.
        alone: The same replicas without their store; `None` if they have none.
    """

    one_cache: int
    alone: TieredReplay | None


@dataclass(frozen=True, slots=True)
class Replayed:
    """The figures of a finished replay.

    Attributes:
        replay: The replay.
        policy: The eviction policy's name.
        unique: Number of unique blocks.
        optimal: Maximum hits of one tier of the same capacity, if computed.
        overload: Set if the engines were overloaded.
        unfiltered: Bytes written to files and to a remote store if no block is refused; `None` if not replayed.
        assumption: Assumptions about the trace as text, if any.
        sharing: Set if there are several replicas.
    """

    replay: TieredReplay
    policy: str
    unique: int
    optimal: int | None
    overload: Overload | None = None
    assumption: str = ""
    unfiltered: Mapping[str, int] | None = None
    sharing: Sharing | None = None

    @property
    def hits(self) -> dict[str, int]:
        """Blocks loaded, by tier."""
        return {tier: self.replay.tally.hits[tier] for tier in self.slots}

    @property
    def slots(self) -> dict[str, int]:
        """Capacity of each tier in blocks, warmest first; of each replica, or of the store."""
        return self.replay.capacity

    @property
    def evictions(self) -> dict[str, dict[str, int]]:
        """Evictions by tier: a colder tier has a copy, none has, or the bytes were unusable."""
        counters, remote = self.replay.counters, self.replay.remote
        found = {
            tier: {
                "demoted": counters.demotions[tier],
                "forgotten": count - counters.demotions[tier],
                "unusable": counters.lost[tier],
            }
            for tier, count in counters.evictions.items()
        }
        if remote is not None:
            found[REMOTE] = {"demoted": 0, "forgotten": remote.evictions, "unusable": 0}
        return found

    @property
    def hit_ratio(self) -> float:
        """Blocks loaded per block reference."""
        return ratio(sum(self.hits.values()), self.replay.tally.block_refs)

    @property
    def optimal_hit_ratio(self) -> float | None:
        """The maximum hit ratio of one tier of the same capacity."""
        return None if self.optimal is None else ratio(self.optimal, self.replay.tally.block_refs)

    @property
    def ttft(self) -> dict[str, float]:
        """Seconds to the first token, with tiers, and if everything is computed."""
        with_tiers, without = self.replay.tally.ttft, self.replay.tally.recompute
        return {
            "p50": percentile(with_tiers, 50),
            "p95": percentile(with_tiers, 95),
            "recompute_p50": percentile(without, 50),
            "recompute_p95": percentile(without, 95),
        }

    @property
    def routes(self) -> dict[str, dict[str, float]]:
        """Seconds that each route was busy, and that transfers waited for it."""
        routes = self.replay.routes
        return {str(route): {"moving": busy, "waiting": waited} for route, (busy, waited) in routes.items()}

    @property
    def network(self) -> dict[str, dict[str, float]] | None:
        """Bytes moved from and to the remote store, and the share of its bandwidth; `None` without one."""
        remote, replay = self.replay.remote, self.replay
        if remote is None:
            return None
        return {
            str(route): {
                "bytes": blocks * replay.image_bytes,
                "share_of_bandwidth": ratio(remote.busy[route], replay.tally.seconds),
            }
            for route, blocks in remote.blocks.items()
        }

    def write_bytes_per_day(self, tier: str) -> float:
        """Bytes written to a tier per day, at the rate of the trace."""
        return _DAY * ratio(bytes_to(tier, self.replay), self.replay.tally.seconds)

    def unfiltered_bytes_per_day(self, tier: str) -> float | None:
        """The same if the tier refused no block; `None` if not replayed."""
        return None if self.unfiltered is None else _DAY * ratio(self.unfiltered[tier], self.replay.tally.seconds)

    def drive_writes(self, bytes_per_day: float) -> float:
        """How often this fills the file tier."""
        replay = self.replay
        return ratio(bytes_per_day, len(replay.replicas) * self.slots.get(FILE, 0) * replay.image_bytes)

    @property
    def losses(self) -> dict[str, int]:
        """Blocks that were computed, by cause; with the hits, all block references."""
        return {cause.value: count for cause, count in self.replay.losses.items()}

    @property
    def bytes_per_hit(self) -> dict[str, float]:
        """Bytes that each route between tiers has moved per block loaded."""
        hits, routes = sum(self.hits.values()), self.replay.counters.routes
        return {
            route: ratio(totals.bytes, hits)
            for route, totals in sorted(routes.items())
            if DEVICE not in route.split("->")
        }

    @property
    def assumptions(self) -> list[str]:
        """The assumptions behind the figures."""
        timing = self.replay.timing
        return [timing.geometry.source, timing.profile.source, *([self.assumption] if self.assumption else [])]

    def as_json(self) -> dict[str, object]:
        """What `--json` prints."""
        replay, tally, counters = self.replay, self.replay.tally, self.replay.counters
        writes = {"": self.write_bytes_per_day, "_without_admission": self.unfiltered_bytes_per_day}
        return {
            "requests": tally.requests,
            "block_refs": tally.block_refs,
            "unique_blocks": self.unique,
            "hit_ratio": self.hit_ratio,
            "hit_ratio_by_tier": {tier: ratio(count, tally.block_refs) for tier, count in self.hits.items()},
            "optimal_hit_ratio": self.optimal_hit_ratio,
            "ttft_s": self.ttft,
            **{
                f"{tier}_write_bytes_per_day{which}": of(tier)
                for tier in (FILE, REMOTE)
                for which, of in writes.items()
            },
            **{
                f"drive_writes_per_day{which}": None if (written := of(FILE)) is None else self.drive_writes(written)
                for which, of in writes.items()
            },
            "policy": self.policy,
            "hit_tokens_ratio": ratio(sum(self.hits.values()) * replay.block_tokens, tally.prompt_tokens),
            "kv_bytes_per_token": replay.timing.geometry.kv_bytes_per_token,
            "block_bytes": replay.image_bytes,
            "blocks_by_tier": self.slots,
            "seconds": tally.seconds,
            "evictions": self.evictions,
            "drops": {tier: _counted(drops) for tier, drops in counters.drops.items()},
            "misses": _counted(counters.misses),
            "computed_by_choice": tally.computed_by_choice,
            "losses": self.losses,
            "bytes_per_hit": self.bytes_per_hit,
            "engine_busy": ratio(tally.computing, self._engine_seconds),
            "engine_busy_recompute": ratio(tally.recomputing, self._engine_seconds),
            "network": self.network,
            "route_busy_s": {route: seconds["moving"] for route, seconds in self.routes.items()},
            "route_queued_s": {route: seconds["waiting"] for route, seconds in self.routes.items()},
            "overload": None if self.overload is None else self.overload.as_json(),
            "assumptions": self.assumptions,
            **self._sharing_json(),
        }

    @property
    def _engine_seconds(self) -> float:
        return self.replay.tally.seconds * self.replay.engines * len(self.replay.replicas)

    def _sharing_json(self) -> dict[str, object]:
        if self.sharing is None:
            return {}
        alone = None if self.sharing.alone is None else Replayed(self.sharing.alone, self.policy, self.unique, None)
        return {
            "replicas": len(self.replay.replicas),
            "route": self.replay.router.routing.value,
            "requests_by_replica": self.replay.router.dealt,
            "one_cache_hit_ratio": ratio(self.sharing.one_cache, self.replay.tally.block_refs),
            "without_store": alone and {"hit_ratio": alone.hit_ratio, "ttft_s": alone.ttft},
        }

    def rows(self) -> list[Row]:
        """Rows of a table; of times and traffic, those with nothing are one row."""
        rows = [*self._time_rows(), *self._traffic_rows()]
        zero = ", ".join(name for name, value, _ in rows if value in _ZERO)
        shown = [row for row in rows if row[1] not in _ZERO]
        return [*self._cache_rows(), *self._sharing_rows(), *shown, *([("zero", "", zero)] if zero else [])]

    def _sharing_rows(self) -> list[Row]:
        if self.sharing is None:
            return []
        replay, dealt = self.replay, self.replay.router.dealt
        how = "in turn" if replay.router.routing is Routing.ROUND_ROBIN else "by the longest prefix"
        rows = [
            ("replicas", f"{len(dealt):,}", f"requests dealt {how}: {min(dealt):,} to {max(dealt):,} each"),
            (
                "hits, one cache",
                share(self.sharing.one_cache, replay.tally.block_refs),
                f"one cache of {replay.slots:,} blocks, as many as all have together, without time",
            ),
        ]
        if self.sharing.alone is not None:
            alone = Replayed(self.sharing.alone, self.policy, self.unique, None)
            note = f"TTFT p50 {seconds(alone.ttft['p50'])}, p95 {seconds(alone.ttft['p95'])}"
            rows.append(("hits, no store", share(alone.hit_ratio, 1), note))
        return rows

    def _cache_rows(self) -> list[Row]:
        replay, tally = self.replay, self.replay.tally
        each, found = replay.timing.geometry.kv_bytes_per_token, self.hits
        rows = [
            ("requests", f"{tally.requests:,}", f"{tally.prompt_tokens:,} tokens in {tally.seconds:,.0f} s"),
            ("blocks", f"{tally.block_refs:,}", f"references, {self.unique:,} unique"),
            ("KV cache", f"{each:,} B", f"per token; {format_bytes(replay.image_bytes)} per block"),
            ("policy", self.policy, ""),
        ]
        for tier, slots in self.slots.items():
            each_has = " in each replica" if self.sharing is not None and tier != REMOTE else ""
            note = f"of all block references; capacity {slots:,} blocks{each_has}"
            rows.append((f"hits, {tier}", share(found[tier], tally.block_refs), note))
        tokens = share(sum(found.values()) * replay.block_tokens, tally.prompt_tokens)
        rows.append(("hits, total", share(self.hit_ratio, 1), f"{tokens} of all prompt tokens"))
        best = self.optimal_hit_ratio
        if best is not None:
            rows.append(("best possible", share(best, 1), "Belady's optimum for one tier of the same capacity"))
        return rows

    def _time_rows(self) -> list[Row]:
        tally, ttft = self.replay.tally, self.ttft
        rows = [
            (f"TTFT {name}", seconds(ttft[name]), f"{seconds(ttft[f'recompute_{name}'])} without tiers")
            for name in ("p50", "p95")
        ]
        room = self._engine_seconds
        busy = f"of their time; {share(tally.recomputing, room)} without tiers"
        rows.append(("engines busy", share(tally.computing, room), busy))
        note = "blocks found, but faster to compute than to load"
        rows.append(("computed by choice", f"{tally.computed_by_choice:,}", note))
        return rows

    def _traffic_rows(self) -> list[Row]:
        replay = self.replay
        files = self.write_bytes_per_day(FILE)
        rows = [("file writes", format_bytes(files), "per day, at the rate of the trace")]
        if FILE in self.slots:
            every, note = self.unfiltered_bytes_per_day(FILE), "of the file tier"
            if every is not None:
                note += f"; {quantity(self.drive_writes(every))} if it refused no block"
            rows.append(("drive writes per day", quantity(self.drive_writes(files)), note))
        if REMOTE in self.slots:
            every, note = self.unfiltered_bytes_per_day(REMOTE), "per day"
            if every is not None:
                note += f"; {format_bytes(every)} if no block is refused"
            rows.append(("store writes", format_bytes(self.write_bytes_per_day(REMOTE)), note))
        causes = ", ".join(f"{count:,} {cause.replace('_', ' ')}" for cause, count in self.losses.items() if count)
        rows.append(("not loaded", f"{sum(self.losses.values()):,}", f"blocks: {causes or 'none'}"))
        moved = ", ".join(f"{format_bytes(nbytes)} {route}" for route, nbytes in self.bytes_per_hit.items())
        if moved:
            rows.append(("moved per hit", moved, f"blocks have {format_bytes(replay.image_bytes)}"))
        for tier, gone in self.evictions.items():
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in gone.items() if count)
            note = "blocks; a colder tier still has demoted ones" if gone["demoted"] else "blocks, by reason"
            rows.append((f"left {tier}", reasons or "0", note))
        for tier, drops in replay.counters.drops.items():
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in _counted(drops).items())
            rows.append((f"not taken, {tier}", reasons or "0", "blocks, by reason"))
        for route, times in self.routes.items():
            note, network = f"busy; transfers waited {seconds(times['waiting'])} in total", self.network or {}
            if route in network:
                note = f"of the store's bandwidth, {format_bytes(network[route]['bytes'])}; {note.partition('; ')[2]}"
            machines = 1 if route in network else len(replay.replicas)
            rows.append((route, share(times["moving"], replay.tally.seconds * machines), note))
        return rows


def bytes_to(tier: str, replay: TieredReplay) -> int:
    """Bytes that a replay has written to a tier."""
    return sum(totals.bytes for route, totals in replay.counters.routes.items() if route.endswith(f"->{tier}"))


class Overload(NamedTuple):
    """Overloaded engines: queues and times grow with the length of the trace.

    Attributes:
        engines: Number of engines.
        busy: Computing time as a share of the engines' time.
        enough: Number of engines that suffices, by a replay, or by the average if `ttft_p95` is `None`.
        ttft_p95: Seconds to the first token with that number.
        missed: The target exceeded, which more engines do not meet either.
        replicas: Machines that each have so many engines.
    """

    engines: int
    busy: float
    enough: int
    ttft_p95: float | None
    missed: float | None = None
    replicas: int = 1

    @property
    def words(self) -> str:
        """The overload as text."""
        many = "1 engine" if self.engines == 1 else f"{self.engines:,} engines"
        many += f" in each of {self.replicas:,} replicas" if self.replicas > 1 else ""
        words = "would suffice" if self.missed is None else "would keep up"
        found = " by the average load"
        if self.ttft_p95 is not None:
            found = f"; in a replay with them, TTFT p95 is {seconds(self.ttft_p95)}"
        if self.missed is not None:
            found += f", and {seconds(self.missed)} needs faster engines, not more of them"
        enough = f"--engines {self.enough} {words}{found}"
        if self.enough > MOST_ENGINES:
            enough = f"{self.enough:,} such engines would be needed; no more than {MOST_ENGINES:,} can be replayed"
        return (
            f"The trace needs {100 * self.busy:,.0f} % of the capacity of {many}, so queues and times to first token "
            f"grow with the length of the trace. {enough}."
        )

    def as_json(self) -> dict[str, object]:
        """The overload as plain data, with `words`."""
        return {**self._asdict(), "words": self.words}


def overload(
    tally: ReplayTally,
    engines: int,
    again: Callable[[int], ReplayTally | None],
    *,
    tiers: bool = True,
    target: float = math.inf,
    replicas: int = 1,
) -> Overload | None:
    """The overload of a replay with `engines` in each of its `replicas`, if any.

    `again` replays the trace with another number of engines, or returns `None` if no more replays are wanted.

    A number of engines is sufficient if they keep up and, if possible for any number, meet `target` seconds for the
    95th percentile of the time to first token. Without `tiers`, the engines compute everything.
    """

    def load(tally: ReplayTally) -> float:
        """Engines of a replica that are always busy."""
        return ratio(tally.computing if tiers else tally.recomputing, tally.seconds * replicas)

    if load(tally) <= engines:
        return None
    count, found = engines, tally
    enough, p95 = 0, math.inf
    while p95 > target or not enough:
        count = max(count + 1, math.ceil(_MORE * enough), math.ceil(load(found) / _COMFORTABLE))
        if count > MOST_ENGINES or (more := again(count)) is None:
            break
        found = more
        if load(found) > count:
            continue
        now = percentile(found.ttft if tiers else found.recompute, 95)
        if now > _BETTER * p95:  # the rest is computing, which more engines do not shorten
            break
        enough, p95 = count, now
    busy = load(tally) / engines
    if not enough:
        return Overload(engines, busy, count, None, replicas=replicas)
    return Overload(engines, busy, enough, p95, target if p95 > target else None, replicas)


def ratio(part: float, whole: float) -> float:
    """`part / whole`; 0 of nothing."""
    return part / whole if whole else 0.0


def percentile(values: array[float], at: int) -> float:
    """The value below which `at` % of `values` lie; 0 of none."""
    return float(np.percentile(np.frombuffer(values, np.float64), at)) if len(values) else 0.0


def _counted(counts: Counter[DropReason] | Counter[MissReason]) -> dict[str, int]:
    """The reasons with a count above zero."""
    return {reason.value: count for reason, count in counts.items() if count}
