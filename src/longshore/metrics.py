"""Prometheus collectors that read the counters of the control plane when they are scraped.

Every label value is exported from the start, at zero, so that a tier without hits is visible.

    REGISTRY.register(LongshoreCollector(stack.runtime, stack.host, stack.engine, stack.events, stack.file))
    REGISTRY.register(tiers.collector)    under transformers, where each call may open a new stack
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from longshore.cache import Counters, TierStats
from longshore.runtime import EventRecorder, Runtime
from longshore.runtime.loop import GuardCounters, LookupCounters
from longshore.runtime.stack import Stack
from longshore.runtime.weighing import Weighing
from longshore.tiers.arena import ArenaReport
from longshore.tiers.base import Tier
from longshore.tiers.host import HostTier
from longshore.transfer import TransferEngine, TransferStats


class LongshoreCollector(Collector):
    """The metrics of one runtime, and of its host tier, engine, recorder and file tier where given."""

    def __init__(
        self,
        runtime: Runtime,
        host: HostTier | None = None,
        engine: TransferEngine | None = None,
        events: EventRecorder | None = None,
        file: Tier | None = None,
    ) -> None:
        self._runtime = runtime
        self._host = host
        self._engine = engine
        self._events = events
        self._file = file

    def collect(self) -> Iterable[Metric]:
        """All metric families, read under the runtime's lock; also after it was closed."""
        with self._runtime.observe() as cache:
            books = [*_counters(cache.counters), *_gauges(cache.stats(), cache.held, cache.jobs_in_flight)]
        arena = [] if self._host is None else _arena(self._host.report)
        transfers = [] if self._engine is None else _transfers(self._engine.stats())
        events = [] if self._events is None else _recorded(self._events)
        file = [] if self._file is None else _filed(self._file)
        faults = CounterMetricFamily(
            "longshore_control_plane_faults", "Failures of the control plane; the first one disables all tiers"
        )
        faults.add_metric([], self._runtime.faults)
        waits = [
            faults,
            *_asked(self._runtime.asked),
            *_guarded(self._runtime.guarded),
            _weighed(self._runtime.weighing),
        ]
        return [*books, faults, *waits, *arena, *transfers, *events, *file]


class FollowingCollector(Collector):
    """The metrics of one `Stack` after another. Counters continue from the values of earlier stacks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stack: Stack | None = None
        self._before: dict[str, Metric] = {}
        """Counters of closed stacks, by name."""

    def follow(self, stack: Stack | None) -> None:
        """Export the metrics of `stack` from now on; `None`: counters keep their values."""
        with self._lock:
            old, self._stack = self._stack, stack
            if old is None:
                return
            ended = [] if stack is not None and stack.runtime is old.runtime else _of_stack(old)
            if not ended and stack is not None and stack.engine is not old.engine:
                ended = _transfers(old.engine.stats())  # its tiers live on under another device cache
            self._before = {metric.name: metric for metric in self._add(ended) if metric.type == "counter"}

    def collect(self) -> Iterable[Metric]:
        """All metric families."""
        with self._lock:
            return self._add([] if self._stack is None else _of_stack(self._stack))

    def _add(self, metrics: Iterable[Metric]) -> list[Metric]:
        """`metrics`, with what was before added to counters; and those of which only that is there."""
        left, found = dict(self._before), list[Metric]()
        for metric in metrics:
            before = left.pop(metric.name, None)
            if before is not None:
                values = {_labelled(sample): sample for sample in before.samples}
                metric.samples = [
                    sample._replace(value=sample.value + values.pop(_labelled(sample), sample._replace(value=0)).value)
                    for sample in metric.samples
                ] + list(values.values())
            found.append(metric)
        return found + list(left.values())


def _of_stack(stack: Stack) -> Iterable[Metric]:
    return LongshoreCollector(stack.runtime, stack.host, stack.engine, stack.events, stack.file).collect()


def _labelled(sample: Sample) -> tuple[str, frozenset[tuple[str, str]]]:
    return sample.name, frozenset(sample.labels.items())


def _counters(counters: Counters) -> Iterable[Metric]:
    yield _family("longshore_hit_chunks", "Chunks loaded, by the tier they were read from", "tier", counters.hits)
    yield _family("longshore_miss_chunks", "Chunks looked up and not loaded, by reason", "reason", counters.misses)
    yield _family("longshore_evicted_chunks", "Chunks evicted from a tier", "tier", counters.evictions)
    yield _family(
        "longshore_demoted_chunks",
        "Chunks evicted from a tier while a colder tier had a copy",
        "tier",
        counters.demotions,
    )
    yield _family(
        "longshore_lost_chunks", "Chunks in a tier that could not be read, or were damaged", "tier", counters.lost
    )
    drops = CounterMetricFamily(
        "longshore_dropped_chunks", "Chunks offered to a tier and not stored, by reason", labels=["tier", "reason"]
    )
    for tier, reasons in counters.drops.items():
        for reason, count in reasons.items():
            drops.add_metric([tier, reason.value], count)
    yield drops
    probes = CounterMetricFamily(
        "longshore_probed_chunks", "Chunks looked up in foreign tiers, by answer", labels=["tier", "answer"]
    )
    for tier, answers in counters.probes.items():
        for answer, count in answers.items():
            probes.add_metric([tier, answer.value], count)
    yield probes
    routes = counters.routes
    moved = {route: totals.bytes for route, totals in routes.items()}
    yield _family("longshore_moved_bytes", "Bytes transferred", "route", moved)
    seconds = {route: totals.seconds for route, totals in routes.items()}
    yield _family("longshore_moving_seconds", "Seconds spent transferring", "route", seconds)
    failed = {route: totals.failed for route, totals in routes.items()}
    yield _family("longshore_failed_chunks", "Chunks whose transfer failed", "route", failed)


def _gauges(tiers: Iterable[TierStats], held: int, jobs: int) -> Iterable[Metric]:
    used = GaugeMetricFamily(
        "longshore_used_bytes", "Bytes used in a tier, including transfers in flight", labels=["tier"]
    )
    capacity = GaugeMetricFamily("longshore_capacity_bytes", "Size of a tier in bytes", labels=["tier"])
    for tier in tiers:
        used.add_metric([tier.name], tier.used_bytes)
        capacity.add_metric([tier.name], tier.nbytes)
    yield used
    yield capacity
    yield GaugeMetricFamily("longshore_holds", "Holds that have not been released", value=held)
    yield GaugeMetricFamily("longshore_jobs_in_flight", "Transfer jobs in flight", value=jobs)


def _asked(asked: LookupCounters) -> Iterable[Metric]:
    about = "Requests looked up by an engine, each counted once"
    yield CounterMetricFamily("longshore_requests", about, asked.requests)
    about = "Lookups of requests, including repeated lookups while a request waits"
    yield CounterMetricFamily("longshore_lookup_attempts", about, asked.attempts)


def _guarded(guarded: GuardCounters) -> Iterable[Metric]:
    about = "Times that the engine waited for copies of device blocks before reusing them"
    yield CounterMetricFamily("longshore_guard_waits", about, guarded.waits)
    yield CounterMetricFamily(
        "longshore_guard_wait_seconds", "Seconds that the engine waited for copies of device blocks", guarded.seconds
    )
    yield CounterMetricFamily("longshore_late_blocks", "Device blocks whose copies did not end in time", guarded.late)


def _weighed(weighing: Weighing | None) -> Metric:
    about = "Chunks found in a file, but recomputed because that is faster"
    return CounterMetricFamily("longshore_recomputed_chunks", about, weighing.refused if weighing is not None else 0)


def _recorded(events: EventRecorder) -> Iterable[Metric]:
    yield CounterMetricFamily("longshore_events_written", "Events written to the event file", events.written)
    yield CounterMetricFamily("longshore_events_missed", "Events missing from the event file", events.missed)
    off = events.failure is not None
    yield GaugeMetricFamily(
        "longshore_events_off", "Whether event recording has stopped because the file could not be written", off
    )


def _filed(file: Tier) -> Iterable[Metric]:
    yield _family(
        "longshore_file_fallbacks",
        "Operations of the file tier that used a slower fallback, by reason",
        "reason",
        file.fallbacks,
    )
    yield _family("longshore_file_troubles", "Failures in the file tier, by reason", "reason", file.troubles)


def _arena(report: ArenaReport) -> Iterable[Metric]:
    gauges = {
        "bytes": ("Bytes of the host arena", report.nbytes),
        "huge_bytes": ("Bytes of the host arena on huge pages, at start", report.huge_bytes),
        "registered_bytes": ("Bytes of the host arena registered with the device", report.registered_bytes),
        "registered_pieces": ("Registered pieces of the host arena", report.registered_pieces),
        "numa_bound": ("Whether the host arena is bound to a NUMA node", report.numa_bound),
        "shared": ("Whether other processes can attach to the host arena", report.shared),
    }
    for name, (about, value) in gauges.items():
        yield GaugeMetricFamily(f"longshore_arena_{name}", about, value=value)
    about = "Fallbacks of the host arena, by reason"
    yield _family("longshore_arena_fallbacks", about, "reason", report.fallbacks)


def _transfers(stats: TransferStats) -> Iterable[Metric]:
    queued = GaugeMetricFamily("longshore_queued_transfers", "Transfers waiting in a queue", labels=["into", "urgency"])
    for (into, urgency), count in stats.queued.items():
        queued.add_metric([into, urgency.name.lower()], count)
    yield queued
    yield CounterMetricFamily(
        "longshore_refused_transfers", "Transfers refused because a queue was full", stats.refused
    )
    about = "Copies of the device that used a slower fallback, by reason"
    yield _family("longshore_device_fallbacks", about, "reason", stats.fallbacks)


def _family(name: str, about: str, label: str, values: Mapping[Any, float]) -> Metric:
    family = CounterMetricFamily(name, about, labels=[label])
    for key, value in values.items():
        family.add_metric([str(key.value) if isinstance(key, Enum) else str(key)], value)
    return family
