"""Arguments and results of the methods of `TieredCache`: keys, leases, jobs, progress, counters; checks of arguments.

`longshore.metrics` exports the counters; `longshore.monitoring.metric_names` has their names and buckets.
"""

from __future__ import annotations

import enum
import math
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import astuple, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from longshore.boundary import Addresses, Key, Slot, Slots, Status, TransferResult
from longshore.cache.index import Residency
from longshore.cache.partial import Partial, PromptTokens
from longshore.cache.settings import Retention
from longshore.errors import CacheError, former_name
from longshore.monitoring.metric_names import (
    EVICTED_AGE_SECONDS,
    LOAD_SECONDS,
    LOOKUP_SECONDS,
    METRICS,
    QUEUE_SECONDS,
    TRANSFER_SIZE_BYTES,
)

UNKNOWN_START = -(1 << 30)
"""`GroupKeys.start` of a lookup whose caller does not say what is before its keys."""


class GroupKeys(NamedTuple):
    """Chunks of one KV cache group of a request, as the methods of `TieredCache` take them.

    Attributes:
        chunks: Keys of the path from the first chunk of the prompt on; or single ones, for an `independent` lookup and
            a load without a lease. The `Residency` of a lookup saves that load another search. A lease refers to them
            and copies none: keys may be appended meanwhile, not removed or replaced.
        start: Position of the first chunk to look up or store. The engine has the chunks before it. `UNKNOWN_START` in
            a lookup of one path: the index knows what is before the first key.
        device: For a lookup of all groups: whether the device has each chunk, from the first on (a numpy array is
            fastest). False for chunks beyond its end.
        prompt_tokens: The tokens, for partial matches (`CacheSettings.partial`).
        prompt_end: For a store: position of the first chunk of the answer; `None` if all are of the prompt.
        retention: For a store: priorities and times to live.
        past_window: For a store: chunks that the sliding window has moved past, from an engine that does not store
            whole paths. They are evicted first, unless a request has used them. Keys in no tier are ignored.
    """

    chunks: Sequence[Key] | Residency
    start: int = 0
    device: Sequence[bool] | None = None
    prompt_tokens: PromptTokens | None = None
    prompt_end: int | None = None
    retention: Sequence[Retention] = ()
    past_window: Sequence[Key] = ()

    @property
    def keys(self) -> Sequence[Key]:
        """The keys of `chunks`."""
        return self.chunks.keys if isinstance(self.chunks, Residency) else self.chunks


class GroupMatch(NamedTuple):
    """What a prefix consists of in one group: the chunks `[first, end)`, of which those at `load` come from the tiers.

    With `partial`, also the first tokens of another chunk, behind them.
    """

    first: int
    end: int
    load: tuple[int, ...]
    partial: Partial | None = None


class Run(NamedTuple):
    """`num_chunks` consecutive chunks whose warmest ready copy is in `tier`."""

    tier: str
    num_chunks: int


class Lease(NamedTuple):
    """A lease on the chunks that a lookup found: none is evicted until `TieredCache.release(lease)`."""

    id: int


class Protection(enum.Enum):
    """How long the chunks that a lookup has found are not evicted."""

    NONE = "none"  # they may be evicted at once
    STEP = "step"  # until the next `end_step`
    LEASE = "lease"  # until the lease of the lookup is released


class LookupResult(NamedTuple):
    """Result of a lookup.

    Attributes:
        lease: A lease on the chunks to load, if there are any and the lookup was `Protection.LEASE`.
        num_chunks: For a lookup of one group: the number of chunks from `GroupKeys.start` on that are ready in a tier.
        tokens: For a lookup of all groups: the longest prefix that device and tiers have, in tokens. A multiple of the
            chunk sizes of all groups, plus, with `prompt_tokens`, fewer tokens than another multiple.
        matches: What that prefix consists of in each group, in order of group.
        partial: For a lookup of one group: a chunk whose first tokens come next; it is in the lease.
        remote: For a lookup of one group: how many chunks more remote tiers are known to have behind it, for
            `prefetch`.
        probes: Probes of remote tiers in flight, for `progress`. Their answers may increase `remote`.
        ancestor_keys: For a lookup of one group from `UNKNOWN_START`: the keys before its first, as tiers know them.
            For an orphan and its descendants, from the last one on that is in none of the tiers.
        request_number: The number of the request, in the order in which requests began, for its other calls; `None` for
            `Protection.NONE`.
        residency: For a lookup with `independent`: where each chunk is, by group.
        remote_sources: For a lookup with `independent` that keeps nothing, if there are remote tiers: the name of the
            first that is known to have each chunk, by group; empty for none.
    """

    lease: Lease | None = None
    num_chunks: int = 0
    tokens: int = 0
    matches: tuple[GroupMatch, ...] = ()
    partial: Partial | None = None
    remote: int = 0
    probes: tuple[int, ...] = ()
    ancestor_keys: Sequence[Key] = ()
    request_number: int | None = None
    residency: Mapping[int, Residency] = {}
    remote_sources: Mapping[int, Sequence[str]] = {}


class DeviceCopy(NamedTuple):
    """Device slots to copy into device blocks, one for each. Only `tokens` tokens of the last, unless `None`."""

    sources: Sequence[Slot]
    tokens: int | None = None


class LoadJob(NamedTuple):
    """A job of a load of `num_chunks` consecutive chunks. `slots`: where to read them if the inference engine does."""

    job: int
    num_chunks: int
    slots: Addresses = Addresses(Slots("", 0, ()))


class ScheduledLoad(NamedTuple):
    """Result of `load`: `num_chunks` leading chunks, fewer than requested if room was short, are loaded by `jobs`."""

    num_chunks: int
    jobs: tuple[LoadJob, ...]


class Progress(NamedTuple):
    """Progress of a job or a lease.

    Attributes:
        is_over: Whether the job has ended, the load has an outcome, or the prefetch of a lease without a load is over.
        outcome: The outcome of the load of a lease.
        runs: For a lease without a load whose prefetch is over: where its chunks are, as runs by the warmest tier;
            chunks removed since are left out.
        lacks_room: Whether the prefetch of a lease waits for room in the host tier, and for nothing else.
    """

    is_over: bool
    outcome: Outcome | None = None
    runs: tuple[Run, ...] = ()
    lacks_room: bool = False

    def leading(self, tier: str) -> int:
        """The number of leading chunks that are in `tier`."""
        return self.runs[0].num_chunks if self.runs and self.runs[0].tier == tier else 0


class Outcome(NamedTuple):
    """Outcome of a load: the leading `num_chunks` chunks are on the device, read from the tiers `sources`."""

    num_chunks: int
    sources: tuple[str, ...]


class ScheduledStore(NamedTuple):
    """Result of `store` for one group: the chunks at `positions` of the keys, in order, are written to `slots`.

    `job` is `None` if no chunk was accepted. `stored_prefix` is the number of leading chunks of the path that are in a
    tier or on their way into one, including those before `start`; `already_stored` are the positions of given chunks
    that a tier had before. With `retry`, there is no room yet, and backups that make room are in flight: nothing was
    accepted, and the call can be repeated. `later` are, with `defer_rest`, the positions that follow the accepted ones,
    for which room is being made: the call can be repeated for them.
    """

    job: int | None
    positions: Sequence[int] = ()
    slots: Addresses = Addresses(Slots("", 0, ()))
    stored_prefix: int = 0
    already_stored: Sequence[int] = ()
    retry: bool = False
    later: Sequence[int] = ()


LookupResult.before = former_name("before", "ancestor_keys")  # type: ignore[attr-defined]
ScheduledStore.known = former_name("known", "already_stored")  # type: ignore[attr-defined]
ScheduledStore.kept = former_name("kept", "stored_prefix")  # type: ignore[attr-defined]


def origins_of(keys: Iterable[Key], tiers: list[str], origins: Mapping[Key, str] | None) -> list[str]:
    """The tiers that the first of `keys` are read from; of those with an origin, that."""
    return [origins.get(*each) for each in zip(keys, tiers, strict=False)] if origins else tiers


def _tally(tiers: Sources) -> Mapping[str, int]:
    """How often each of `tiers` is named; mostly it is one."""
    if isinstance(tiers, Sequence) and tiers and tiers.count(tiers[0]) == len(tiers):
        return {tiers[0]: len(tiers)}
    return Counter(tiers)


_MAPPINGS, _KEYS, _NUMBERS = (dict, Mapping), (list, tuple, Residency, Sequence), (float, int)
"""Built-in types first: to ask an abstract one takes three times as long."""


def check_paths(paths: Mapping[int, GroupKeys]) -> None:
    """Raise `CacheError` unless `paths` are `GroupKeys` by number of group, with keys in order."""
    if not isinstance(paths, _MAPPINGS):
        raise CacheError(f"expected keys by number of KV cache group, got {_brief(paths)}")
    for group, path in paths.items():
        if type(group) is not int:
            raise CacheError(f"expected keys by number of KV cache group, got {_brief(paths)}")
        if not isinstance(path, GroupKeys) or not isinstance(path.chunks, _KEYS):
            raise CacheError(f"group {group}: expected GroupKeys with a sequence of keys, got {_brief(path)}")
        if type(path.start) is not int or not (path.prompt_end is None or type(path.prompt_end) is int):
            raise CacheError(
                f"group {group}: expected integers, got start={path.start!r}, prompt_end={path.prompt_end!r}"
            )


def check_blocks(blocks: Mapping[int, Sequence[int]], groups: Iterable[int]) -> Mapping[int, Sequence[int]]:
    """`blocks`, checked. Raises `CacheError` unless they are sequences by number of one of `groups`."""
    if not isinstance(blocks, Mapping) or not all(isinstance(each, Sequence) for each in blocks.values()):
        raise CacheError(f"expected sequences of device blocks by number of KV cache group, got {_brief(blocks)}")
    if unknown := {group for group, mine in blocks.items() if len(mine)}.difference(groups):
        raise CacheError(f"got device blocks of groups {list(unknown)}, but no chunks of these")
    return blocks


def check_distinct(keys: Sequence[Key]) -> None:
    """Raise `CacheError` unless all keys of a request are distinct."""
    if len(set(keys)) != len(keys):
        raise CacheError(f"expected {len(keys)} distinct keys over all groups, got {len(set(keys))}")


def check_time(now: float) -> None:
    """Raise `CacheError` unless `now` is a finite number: time would not return from infinity."""
    if not isinstance(now, _NUMBERS) or not math.isfinite(now):
        raise CacheError(f"now: expected a finite number of seconds, got {now!r}")


def _brief(value: object) -> str:
    return f"{value!r:.60}"


class MissReason(enum.Enum):
    """Why a requested chunk was not loaded from a tier. Complete: there is no "other"."""

    ABSENT = "absent"  # no tier has it
    REMOTE = "remote"  # only a remote tier is known to have it; it was not prefetched
    IN_FLIGHT = "in_flight"  # being written to its first tier
    NO_ROOM = "no_room"  # the host tier had no room to read it into
    AFTER_MISS = "after_miss"  # in a tier, but after a chunk that missed
    CORRUPT = "corrupt"  # its checksum did not match
    MISMATCH = "mismatch"  # the slot had a valid record of another key, scope or generation
    SHORT = "short"  # its record was shorter than the image
    IO_ERROR = "io_error"  # reading it failed in the operating system or a store
    DEVICE_ERROR = "device_error"  # copying it to the device failed; the tier keeps it
    INTERNAL_ERROR = "internal_error"  # a bug: an exception ended the transfer; the tier keeps it
    NO_SPACE = "no_space"  # a medium was full
    DEADLINE = "deadline"  # the load timed out, before it began or while it ran
    CANCELLED = "cancelled"  # the request or a reset cancelled the load
    TIER_OFF = "tier_off"  # the tier was closed or disabled
    UNAVAILABLE = "unavailable"  # no tier host ran, its disk was stalled, or a store's breaker was open
    NOT_FOUND = "not_found"  # a remote tier did not have it, or not any more
    QUEUE_FULL = "queue_full"  # a bounded queue was full

    @classmethod
    def of(cls, status: Status) -> MissReason:
        """The reason for the status of a failed item."""
        return cls(status.value)


class DropReason(enum.Enum):
    """Why a chunk was not stored. Complete: there is no "other"."""

    NO_ROOM = "no_room"  # nothing in the tier can be evicted, or has fewer expected hits
    BACKPRESSURE = "backpressure"  # too many writes are in flight
    NO_PARENT = "no_parent"  # no tier has the chunk before it, and no slot was free
    WRITE_FAILED = "write_failed"  # the copy was attempted and did not succeed
    CANCELLED = "cancelled"  # a reset, a change of weights or the engine cancelled the copy
    BELOW_THRESHOLD = "below_threshold"  # offered to host memory less often than `threshold`
    GENERATED = "generated"  # part of the answer, with the setting `prompt_only`
    PRIORITY = "priority"  # of a priority below `priority_floor`
    ADMISSION = "admission"  # fewer expected hits than the chunk to evict for it
    RATE_LIMIT = "rate_limit"  # more bytes per second than the write rule allows
    TIER_OFF = "tier_off"  # the tier is disabled or read-only

    @classmethod
    def of(cls, status: Status) -> DropReason:
        """Why a copy is dropped that ended with `status`."""
        return cls.CANCELLED if status is Status.CANCELLED else cls.WRITE_FAILED


class Answer(enum.Enum):
    """Answer of a remote tier to a probe. Complete: there is no "other"."""

    PRESENT = "present"
    ABSENT = "absent"
    NO_ANSWER = "no_answer"  # no answer before the timeout, or not from all ranks
    NOT_SENT = "not_sent"  # not asked: too many probes are in flight


@dataclass(slots=True)
class RouteTotals:
    """Totals of one route: chunks copied and failed, bytes, seconds of copying."""

    chunks: int = 0
    failed: int = 0
    bytes: int = 0
    seconds: float = 0.0


class Histogram:
    """Counts of observations by bucket. Not thread-safe: its owner's lock guards it.

    Attributes:
        bounds: Upper bounds of the buckets, ascending; one more bucket is above the last.
        counts: Observations in each bucket, not cumulative.
        total: Sum of the observations.
        examples: Name of the last request in each bucket and its value, for exemplars; `None` where there was none.
        recent: The last observations, for engines that take each one by itself; `None` if they are not kept.
    """

    __slots__ = ("bounds", "counts", "examples", "recent", "total")

    def __init__(self, name: str) -> None:
        """`name` is that of a histogram of the table."""
        self.bounds = METRICS[name].buckets
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0
        self.examples: list[tuple[str, float] | None] = [None] * len(self.counts)
        self.recent: deque[float] | None = None

    def observe(self, value: float, request: str | None = None) -> None:
        """Count one observation, made for `request`."""
        bucket = bisect_left(self.bounds, value)
        self.counts[bucket] += 1
        self.total += value
        if request is not None:
            self.examples[bucket] = request, value
        if self.recent is not None:
            self.recent.append(value)

    def observe_all(self, values: npt.NDArray[np.float64]) -> None:
        """Count several observations, shape `(n,)`."""
        found = np.bincount(np.searchsorted(self.bounds, values), minlength=len(self.counts))
        for bucket in np.flatnonzero(found).tolist():
            self.counts[bucket] += int(found[bucket])
        self.total += float(values.sum())
        if self.recent is not None:
            self.recent.extend(values.tolist())

    def add(self, other: Histogram) -> None:
        """Add the observations of another one with the same bounds."""
        self.counts = [ours + theirs for ours, theirs in zip(self.counts, other.counts, strict=True)]
        self.total += other.total

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Observe the seconds that the block takes."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.observe(time.perf_counter() - began)

    def keep_recent(self, most: int = 4096) -> None:
        """Keep the last `most` observations until `take_recent`."""
        self.recent = deque(self.recent or (), maxlen=most)

    def take_recent(self) -> list[float]:
        """The observations since the last call, without those that were too many to keep."""
        found = list(self.recent or ())
        if self.recent is not None:
            self.recent.clear()
        return found

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Histogram) and (self.counts, self.total) == (other.counts, other.total)

    __hash__ = None  # type: ignore[assignment]


@dataclass(slots=True)
class GuardCounters:
    """Counters of block guards: waits, seconds waited, and blocks that were late and parked."""

    waits: int = 0
    seconds: float = 0.0
    late: int = 0


@dataclass(slots=True)
class LookupCounters:
    """Requests looked up by an engine, each counted once, and lookups, which schedulers repeat for waiting requests."""

    requests: int = 0
    attempts: int = 0
    seconds: Histogram = field(default_factory=lambda: Histogram(LOOKUP_SECONDS))


Sources = Mapping[str, int] | Sequence[str]
"""The tiers that chunks came from: of each, or how many of each tier."""


@dataclass(slots=True)
class Counters:
    """Counts since the start. Every known label is present from the start, at zero.

    `hits` are chunks loaded, by source tier; `hit_tokens` the tokens of those of the first group, where `groups` are
    told; `misses` chunks requested and not loaded: an adapter that looks up each chunk by itself adds them, because it
    alone knows what its engine asks for; `drops` chunks not stored, by destination tier; `evictions` copies evicted, by
    tier; `demotions` those of which a colder tier kept a copy; `lost` copies removed because their bytes, or those of
    an ancestor, were invalid; `probes` keys that remote tiers were asked for; `histograms` are
    distributions, by name of the metric and by its label, a tier or a route; `internal_errors` transfers that failed as
    `Status.INTERNAL_ERROR`, with those that waited for them, and what else failed alone because of a bug.
    """

    hits: Counter[str]
    hit_tokens: Counter[str]
    misses: Counter[MissReason]
    drops: dict[str, Counter[DropReason]]
    evictions: Counter[str]
    demotions: Counter[str]
    lost: Counter[str]
    routes: dict[str, RouteTotals] = field(default_factory=dict)
    probes: dict[str, Counter[Answer]] = field(default_factory=dict)
    histograms: dict[str, dict[str, Histogram]] = field(default_factory=dict)
    internal_errors: int = 0

    def count_reads(self, sources: Sequence[str], statuses: Sequence[Status], tokens: int) -> None:
        """Count chunks that the engine has read itself, of `tokens` tokens each: hits, and misses by how they ended."""
        hits, fine = sources, Status.OK
        if statuses.count(fine) < len(statuses):
            hits = [tier for tier, status in zip(sources, statuses, strict=True) if status is fine]
            self.misses.update(MissReason.of(status) for status in statuses if status is not fine)
        self.count_hits(hits, hits, tokens)

    def count_hits(self, chunks: Sources, first_group: Sources, tokens: int) -> None:
        """Count chunks that were loaded; `first_group` are those of the first group, of `tokens` tokens each."""
        for tier, count in _tally(chunks).items():
            self.hits[tier] += count
        for tier, count in _tally(first_group).items():
            self.hit_tokens[tier] += count * tokens

    def observe_load(self, sources: Sources, seconds: float, asked: Sequence[tuple[str | None, Sequence[Key]]]) -> None:
        """Enter a load for the requests `asked` into the histogram of the slowest of `sources`, if there is one."""
        if sources:
            by_tier = self.histograms[LOAD_SECONDS]
            slowest = next(tier for tier in reversed(by_tier) if tier in sources)
            by_tier[slowest].observe(seconds, asked[0][0] if asked else None)

    def count_transfer(self, route: str, result: TransferResult) -> None:
        """Count what a rank moved on `route`. What moved nothing, as after a refusal, is not in the histograms."""
        totals = self.routes.get(route) or self.routes.setdefault(route, RouteTotals())
        succeeded = result.statuses.count(Status.OK)
        totals.chunks += succeeded
        totals.failed += len(result.statuses) - succeeded
        self.internal_errors += succeeded < len(result.statuses) and Status.INTERNAL_ERROR in result.statuses
        totals.bytes += result.bytes
        totals.seconds += result.seconds
        if result.bytes:
            for name, value in ((QUEUE_SECONDS, result.queued_seconds), (TRANSFER_SIZE_BYTES, result.bytes)):
                found = self.histograms[name]
                (found.get(route) or found.setdefault(route, Histogram(name))).observe(value)

    def check_origins(self, origins: Mapping[Key, str] | None) -> None:
        """Raise `CacheError` unless chunks are said to be from tiers of this cache."""
        if unknown := set((origins or {}).values()).difference(self.hits):
            raise CacheError(f"origins: expected tiers of {list(self.hits)}, got {sorted(unknown)}")

    def each_histogram(self) -> Iterator[tuple[str, tuple[str, ...], Histogram]]:
        """Every histogram: its name, its label values, and itself."""
        for name, by_label in self.histograms.items():
            for label, histogram in by_label.items():
                yield name, (label,), histogram

    def copy(self) -> Counters:
        """A copy, to compute differences."""
        return deepcopy(self)

    def add(self, other: Counters) -> None:
        """Add the counts of another cache with the same tiers."""
        for name in ("hits", "hit_tokens", "misses", "evictions", "demotions", "lost"):
            getattr(self, name).update(getattr(other, name))
        self.internal_errors += other.internal_errors
        for tier, drops in other.drops.items():
            self.drops[tier].update(drops)
        for tier, answers in other.probes.items():
            self.probes[tier].update(answers)
        for route, more in other.routes.items():
            total = self.routes[route]
            self.routes[route] = RouteTotals(*(a + b for a, b in zip(astuple(total), astuple(more), strict=True)))
        for histograms, theirs in ((self.histograms[name], each) for name, each in other.histograms.items()):
            for label, histogram in theirs.items():
                histograms[label].add(histogram)

    @classmethod
    def zero(cls, tiers: tuple[str, ...], routes: tuple[str, ...], remote: tuple[str, ...] = ()) -> Counters:
        """All counters at zero, for these tiers, routes and remote tiers (`remote`)."""
        return cls(
            hits=Counter(dict.fromkeys((*tiers, *remote), 0)),
            hit_tokens=Counter(dict.fromkeys((*tiers, *remote), 0)),
            misses=Counter(dict.fromkeys(MissReason, 0)),
            drops={tier: Counter(dict.fromkeys(DropReason, 0)) for tier in (*tiers, *remote)},
            evictions=Counter(dict.fromkeys(tiers, 0)),
            demotions=Counter(dict.fromkeys(tiers, 0)),
            lost=Counter(dict.fromkeys(tiers, 0)),
            routes={route: RouteTotals() for route in routes},
            probes={tier: Counter(dict.fromkeys(Answer, 0)) for tier in remote},
            histograms={
                name: {label: Histogram(name) for label in labels}
                for name, labels in (
                    (LOAD_SECONDS, (*tiers, *remote)),
                    (QUEUE_SECONDS, routes),
                    (TRANSFER_SIZE_BYTES, routes),
                    (EVICTED_AGE_SECONDS, tiers),
                )
            },
        )


class SizeStats(NamedTuple):
    """The slabs assigned to one image size, and their slots that are not free."""

    image_bytes: int
    slabs: int
    used: int


class TierStats(NamedTuple):
    """Slots of one tier: all, used (including those being filled), and ready.

    `slots` is their number if all images have the smallest size. `nbytes` is the capacity of the tier, `used_bytes` the
    part in use. `sizes` has an entry for each image size, by pool.
    """

    name: str
    slots: int
    used: int
    ready: int
    nbytes: int
    used_bytes: int
    sizes: tuple[SizeStats, ...]
