"""Metrics and KV events for operators and routers: metrics on vLLM's `/metrics`, and KV events.

Metric names are those of `longshore.metrics`, as far as they apply. Every known label is there from the first step on,
at zero. vLLM adds up what `get_stats` returns, so that returns increments.

KV events name chunks by vLLM's keys. Our keys lack the first bytes of these, so the keys of stored chunks are kept for
as long as a tier has them. What an earlier process has stored has no name: no event names it until it is stored again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, product
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadKey,
)

from longshore import __version__
from longshore.boundary import DEVICE, FILE, HOST, REMOTE, Key
from longshore.cache import DropReason, EventKind, MissReason, Presence, RouteTotals, TieredCache, TierSpec
from longshore.cache.events import STORING, WEIGHTS, Announcements, Change
from longshore.cache.types import Answer, Histogram
from longshore.monitoring.metric_names import METRICS, QUEUE_SECONDS, VALUES, Metric, MetricKind
from longshore.runtime.tier_host import FAILURE_REASONS, HostedFileTier
from longshore.tiers.base import Tier
from longshore.tiers.remote import FAILURE_REASONS as OF_STORES

if TYPE_CHECKING:
    from longshore.runtime.peer_server import PeerServer

_TIERS = (HOST, FILE)
_ROUTES = tuple(
    f"{source}->{target}" for source, target in ((DEVICE, HOST), (HOST, DEVICE), (HOST, FILE), (FILE, HOST))
)

_NOTHING = RouteTotals()
_QUIET = dict.fromkeys(FAILURE_REASONS, 0)
_NO_STORES = {REMOTE: dict.fromkeys(OF_STORES, 0)}

_Sample = tuple[str, tuple[str, ...]]


def definitions() -> dict[str, Any]:
    """The definitions of all metrics, which vLLM needs before the first value."""
    return {name: _definition(about) for name, about in METRICS.items() if about.vllm}


def _definition(about: Metric) -> Any:
    if about.kind is MetricKind.HISTOGRAM:
        return OffloadingHistogramMetadata(about.help, about.labels, about.buckets)
    kind = OffloadingCounterMetadata if about.kind is MetricKind.COUNTER else OffloadingGaugeMetadata
    return kind(about.help, about.labels)


class OffloadingMetrics:
    """The counters of one cache and its tiers as last reported to vLLM; and why requests miss chunks."""

    def __init__(
        self,
        file: HostedFileTier | None = None,
        remote_stores: Sequence[Tier] = (),
        *,
        histograms: Iterable[tuple[str, tuple[str, ...], Histogram]] = (),
        is_off: bool = False,
    ) -> None:
        """`is_off` says that there is no `file` tier because its directory could not be opened.

        `histograms` are those of the control plane: name, label values, and the histogram.
        """
        self._file = file
        self._remote_stores = remote_stores
        names = [store.name for store in remote_stores]
        self._tiers = (*_TIERS, *names)
        self._routes = (*_ROUTES, *(route for name in names for route in (f"{HOST}->{name}", f"{name}->{HOST}")))
        self._no_file = {**_QUIET, "off": int(is_off)}
        self._reported: dict[_Sample, float] = {}
        self._histograms = [each for each in histograms if METRICS[each[0]].vllm and not _is_of_device(*each[:2])]
        for _, _, histogram in self._histograms:
            histogram.keep_recent()

    def miss_reasons(
        self, found: Sequence[Presence], *, timed_out: bool, was_prefetched: bool, stalled: bool
    ) -> Counter[MissReason] | None:
        """Why a request misses chunks that were found so: it gets no further than to the first that is not ready.

        `None` if it waits for that one, because it is in flight, or may be prefetched. A request that has `timed_out`
        does not wait; nor does one for chunks that were prefetched for it and evicted again (`was_prefetched`), nor any
        while the file tier is `stalled`.
        """
        if found.count(Presence.HOST) == len(found):
            return Counter()
        first = next(i for i, presence in enumerate(found) if presence is not Presence.HOST)
        reason = MissReason.ABSENT
        if found[first] is not Presence.ABSENT:
            if not timed_out and not stalled and not (was_prefetched and found[first] is Presence.COLDER):
                return None
            away = self._file is not None and self._file.is_unavailable
            reason = MissReason.DEADLINE if timed_out else MissReason.UNAVAILABLE if away else MissReason.NO_ROOM
        behind = found[first + 1 :]
        absent = behind.count(Presence.ABSENT)
        reasons = Counter({MissReason.ABSENT: absent, MissReason.AFTER_MISS: len(behind) - absent})
        reasons[reason] += 1
        return reasons

    def stats(
        self,
        cache: TieredCache,
        recomputed: int = 0,
        weights: int = 0,
        faults: int = 0,
        peers: dict[_Sample, float] | None = None,
    ) -> OffloadingConnectorStats | None:
        """What has changed since the last call; at the first, everything. `recomputed` are chunks not loaded by the
        gate.

        `weights` is how often the weights have changed, `faults` how often the control plane has failed; `peers` are
        `peer_samples`.
        """
        new = dict(self._samples(cache)) | (peer_samples() if peers is None else peers)
        serves = {HOST: True, **({FILE: False} if self._no_file["off"] else {})}
        serves |= {
            tier.name: not tier.degraded_reason for tier in (self._file, *self._remote_stores) if tier is not None
        }
        new |= {("longshore_tier_available", (tier,)): int(each and not faults) for tier, each in serves.items()}
        new["longshore_recomputed_chunks", ()] = recomputed
        new["longshore_weight_changes", ()] = weights
        new["longshore_control_plane_faults", ()] = faults
        changed = [(sample, value) for sample, value in new.items() if self._reported.get(sample) != value]
        observed = [(name, labels, each.take_recent()) for name, labels, each in self._histograms]
        if not changed and not any(values for _, _, values in observed):
            return None
        stats = OffloadingConnectorStats()
        for name, labels, values in observed:
            for value in values:
                stats.observe_histogram(name, value, labels)
        for (name, labels), value in changed:
            if METRICS[name].kind is MetricKind.GAUGE:
                stats.set_gauge(name, value, labels)
            else:
                stats.increase_counter(name, value - self._reported.get((name, labels), 0), labels)
        self._reported = new
        return stats

    def _samples(self, cache: TieredCache) -> Iterator[tuple[_Sample, float]]:
        counters, sizes = cache.counters, {stats.name: stats for stats in cache.stats()}
        yield ("longshore_build_info", (__version__,)), 1
        for tier in self._tiers:
            at = (tier,)
            yield ("longshore_hit_chunks", at), counters.hits[tier]
            yield ("longshore_hit_tokens", at), counters.hit_tokens[tier]
            if tier in _TIERS:
                yield ("longshore_evicted_chunks", at), counters.evictions[tier]
                yield ("longshore_lost_chunks", at), counters.lost[tier]
                yield ("longshore_used_bytes", at), sizes[tier].used_bytes if tier in sizes else 0
                yield ("longshore_capacity_bytes", at), sizes[tier].nbytes if tier in sizes else 0
            drops = counters.drops.get(tier) or Counter[DropReason]()
            for reason in DropReason:
                yield ("longshore_dropped_chunks", (tier, reason.value)), drops[reason]
        yield ("longshore_internal_errors", ()), counters.internal_errors
        for missed, count in counters.misses.items():
            yield ("longshore_miss_chunks", (missed.value,)), count
        for failure, times in (self._no_file if self._file is None else self._file.failures).items():
            yield ("longshore_file_failures", (failure,)), times
        failures_of = {store.name: store.failures for store in self._remote_stores} or _NO_STORES
        for name, failures in failures_of.items():
            for failure, times in failures.items():
                yield ("longshore_store_failures", (name, failure)), times
            answers = counters.probes.get(name) or Counter[Answer]()
            for answer in Answer:
                yield ("longshore_probed_chunks", (name, answer.value)), answers[answer]
        for route in self._routes:
            totals = counters.routes.get(route, _NOTHING)
            yield ("longshore_moved_bytes", (route,)), totals.bytes
            yield ("longshore_moving_seconds", (route,)), totals.seconds
            yield ("longshore_failed_chunks", (route,)), totals.failed


def peer_samples(server: PeerServer | None = None, waits: Mapping[str, int] | None = None) -> dict[_Sample, float]:
    """The metrics of peers: of those that are served, and of waiting for others; zero without a server, or stores."""
    answers: Counter[tuple[str, str]] = Counter() if server is None else server.answers
    dropped: Counter[str] = Counter() if server is None else server.dropped
    kinds, said = (VALUES["longshore_peer_values", label] for label in ("request", "answer"))
    samples: dict[_Sample, float] = {("longshore_peer_sent_bytes", ()): 0 if server is None else server.sent_bytes}
    samples |= {("longshore_peer_values", each): answers[each] for each in product(kinds, said)}
    for name, label, counts in (("dropped_clients", "reason", dropped), ("waits", "outcome", waits or {})):
        known = VALUES[f"longshore_peer_{name}", label]
        samples |= {(f"longshore_peer_{name}", (each,)): counts.get(each, 0) for each in known}
    return samples


def _is_of_device(name: str, labels: Sequence[str]) -> bool:
    """Whether vLLM moves the bytes of this route by itself, so that only it knows how long they were queued."""
    return name == QUEUE_SECONDS and DEVICE in labels[0].split("->")


def zero() -> OffloadingConnectorStats:
    """All metrics at zero, for an engine that has not run a step."""
    return OffloadingMetrics().stats(TieredCache([TierSpec(HOST, 0, 1)])) or OffloadingConnectorStats()


EVENTS_LIMIT = 1 << 14
"""Events that the cache keeps until vLLM takes them, which it does in each step."""

_MEDIA = {HOST: Medium.CPU, FILE: Medium.STORAGE}


class EventTranslator:
    """Translates events of the cache into vLLM's KV events; keeps vLLM's keys of stored chunks."""

    def __init__(self) -> None:
        self._announced: Announcements[OffloadKey] = Announcements()
        self._given: dict[Key, OffloadKey] = {}
        """Names that were given since the last call of `translate`."""
        self.were_cleared = False
        """Whether vLLM has said that all blocks are cleared: routers drop what the tiers have as well."""

    def name(self, theirs: Sequence[OffloadKey], ours: Sequence[Key]) -> None:
        """Remember vLLM's keys of these chunks."""
        self._given.update(zip(ours, theirs, strict=True))

    def translate(self, cache: TieredCache) -> Iterator[OffloadingEvent]:
        """vLLM's KV events of the events of `cache` since the last call, in order.

        Copies in own tiers are `LOCAL`. Those in stores are `REMOTE`: a router must not pin a request to this engine
        for what all replicas can read. Their owner is the name of the tier.
        """
        for (tier, removed), some in groupby(self._changes(cache), key=lambda each: each[:2]):
            keys, is_own = [change.name for change in some], tier in _MEDIA
            where = Locality.LOCAL if is_own else Locality.REMOTE
            medium, owner = _MEDIA.get(tier, Medium.STORAGE), None if is_own else tier
            yield OffloadingEvent(keys, medium, removed, where, owner, removal_expected=True)

    def _changes(self, cache: TieredCache) -> Iterator[Change[OffloadKey]]:
        given, self._given = self._given, {}
        named = set[Key]()
        if self.were_cleared:
            self.were_cleared = False
            self._announced.restart(dropped=True)
        for event in cache.events():
            if event.kind is EventKind.RESET and event.cause != WEIGHTS:
                self._announced.restart(dropped=True)  # vLLM says so itself: all blocks are cleared
                continue
            if event.kind in STORING and event.key in given:  # a removal before this event has taken the name along
                named.add(event.key)
                yield from self._announced.name(event.key, given[event.key])
            yield from self._announced.changes(event)
        for key in [each for each in given if each not in named]:  # a tier had it already, or its event is missing
            yield from self._announced.name(key, given[key])
        yield from self._announced.settle(cache.reconcile(self._announced))
