"""Counters for Prometheus: a collector that reads the control plane's books when it is scraped.

Every label is present from the start, at zero, so that a tier that never serves is visible as such.

    REGISTRY.register(LongshoreCollector(stack.runtime, stack.host, stack.engine, stack.events, stack.file))
    REGISTRY.register(tiers.collector)    under transformers, where stacks come and go: before the first call, or later
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
from longshore.runtime.loop import Asked, Guarded
from longshore.runtime.stack import Stack
from longshore.runtime.weighing import Weighing
from longshore.tiers.arena import ArenaReport
from longshore.tiers.base import Tier
from longshore.tiers.host import HostTier
from longshore.transfer import TransferEngine, TransferStats


class LongshoreCollector(Collector):
    """The metrics of one runtime, and of those of its host memory, engine, recorder and file tier that are here."""

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
        """All metric families, read in one go under the runtime's lock; also after its end."""
        with self._runtime.observe() as cache:
            books = [*_counters(cache.counters), *_gauges(cache.stats(), cache.held, cache.jobs_in_flight)]
        arena = [] if self._host is None else _arena(self._host.report)
        transfers = [] if self._engine is None else _transfers(self._engine.stats())
        events = [] if self._events is None else _recorded(self._events)
        file = [] if self._file is None else _filed(self._file)
        faults = CounterMetricFamily(
            "longshore_control_plane_faults", "Failures of the control plane: at the first, the tiers are off"
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
    """The metrics of one `Stack` after another. Counters go on from where those before them ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stack: Stack | None = None
        self._before: dict[str, Metric] = {}
        """Counters of stacks that are closed, by name."""

    def follow(self, stack: Stack | None) -> None:
        """From here on the metrics are those of `stack`; `None`: of none, and counters stay as they are."""
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
    yield _family("longshore_hit_chunks", "Chunks onboarded, by the tier they came from", "tier", counters.hits)
    yield _family("longshore_miss_chunks", "Chunks wanted and not onboarded", "reason", counters.misses)
    yield _family("longshore_evicted_chunks", "Copies evicted", "tier", counters.evictions)
    yield _family("longshore_demoted_chunks", "Copies evicted that a colder tier had", "tier", counters.demotions)
    yield _family("longshore_lost_chunks", "Copies found unusable", "tier", counters.lost)
    drops = CounterMetricFamily("longshore_dropped_chunks", "Chunks not stored", labels=["tier", "reason"])
    for tier, reasons in counters.drops.items():
        for reason, count in reasons.items():
            drops.add_metric([tier, reason.value], count)
    yield drops
    probes = CounterMetricFamily(
        "longshore_probed_chunks", "Chunks that foreign tiers were asked for", labels=["tier", "answer"]
    )
    for tier, answers in counters.probes.items():
        for answer, count in answers.items():
            probes.add_metric([tier, answer.value], count)
    yield probes
    routes = counters.routes
    moved = {route: totals.bytes for route, totals in routes.items()}
    yield _family("longshore_moved_bytes", "Bytes that arrived", "route", moved)
    seconds = {route: totals.seconds for route, totals in routes.items()}
    yield _family("longshore_moving_seconds", "Seconds spent moving", "route", seconds)
    failed = {route: totals.failed for route, totals in routes.items()}
    yield _family("longshore_failed_chunks", "Chunks that a mover did not deliver", "route", failed)


def _gauges(tiers: Iterable[TierStats], held: int, jobs: int) -> Iterable[Metric]:
    used = GaugeMetricFamily("longshore_used_bytes", "Bytes taken, in flight included", labels=["tier"])
    capacity = GaugeMetricFamily("longshore_capacity_bytes", "Bytes of the tier", labels=["tier"])
    for tier in tiers:
        used.add_metric([tier.name], tier.used_bytes)
        capacity.add_metric([tier.name], tier.nbytes)
    yield used
    yield capacity
    yield GaugeMetricFamily("longshore_holds", "Matches not released", value=held)
    yield GaugeMetricFamily("longshore_jobs_in_flight", "Jobs whose results have not come", value=jobs)


def _asked(asked: Asked) -> Iterable[Metric]:
    about = "Requests that an engine looked up by their whole path, each once"
    yield CounterMetricFamily("longshore_requests", about, asked.requests)
    about = "Lookups of these, those included that a scheduler repeated while a request waited"
    yield CounterMetricFamily("longshore_lookup_attempts", about, asked.attempts)


def _guarded(guarded: Guarded) -> Iterable[Metric]:
    about = "Waits of the engine for copies of device blocks that it wants to use again"
    yield CounterMetricFamily("longshore_guard_waits", about, guarded.waits)
    yield CounterMetricFamily("longshore_guard_wait_seconds", "Seconds of these", guarded.seconds)
    yield CounterMetricFamily("longshore_late_blocks", "Device blocks that were not free in time", guarded.late)


def _weighed(weighing: Weighing | None) -> Metric:
    about = "Chunks that were found, and computed all the same, because that is quicker"
    return CounterMetricFamily("longshore_recomputed_chunks", about, weighing.refused if weighing is not None else 0)


def _recorded(events: EventRecorder) -> Iterable[Metric]:
    yield CounterMetricFamily("longshore_events_written", "Events written to the file of events", events.written)
    yield CounterMetricFamily("longshore_events_missed", "Events that are missing in it", events.missed)
    off = events.failure is not None
    yield GaugeMetricFamily("longshore_events_off", "Whether the file could not be written, and is given up", off)


def _filed(file: Tier) -> Iterable[Metric]:
    yield _family("longshore_file_fallbacks", "What the file tier did the slower way", "reason", file.fallbacks)
    yield _family("longshore_file_troubles", "What went wrong in the file tier", "reason", file.troubles)


def _arena(report: ArenaReport) -> Iterable[Metric]:
    gauges = {
        "bytes": ("Bytes of the host arena", report.nbytes),
        "huge_bytes": ("Bytes of the host arena on huge pages, when it was made", report.huge_bytes),
        "registered_bytes": ("Bytes of the host arena that the device reaches directly", report.registered_bytes),
        "registered_pieces": ("Pieces that these are in", report.registered_pieces),
        "numa_bound": ("Whether the host arena is bound to a NUMA node", report.numa_bound),
        "shared": ("Whether other processes can attach to the host arena", report.shared),
    }
    for name, (about, value) in gauges.items():
        yield GaugeMetricFamily(f"longshore_arena_{name}", about, value=value)
    about = "What the host arena had to do without"
    yield _family("longshore_arena_fallbacks", about, "reason", report.fallbacks)


def _transfers(stats: TransferStats) -> Iterable[Metric]:
    queued = GaugeMetricFamily("longshore_queued_transfers", "Transfers that wait", labels=["into", "urgency"])
    for (into, urgency), count in stats.queued.items():
        queued.add_metric([into, urgency.name.lower()], count)
    yield queued
    yield CounterMetricFamily("longshore_refused_transfers", "Transfers that a queue had no room for", stats.refused)
    about = "What the device did the slower way"
    yield _family("longshore_device_fallbacks", about, "reason", stats.fallbacks)


def _family(name: str, about: str, label: str, values: Mapping[Any, float]) -> Metric:
    family = CounterMetricFamily(name, about, labels=[label])
    for key, value in values.items():
        family.add_metric([str(key.value) if isinstance(key, Enum) else str(key)], value)
    return family
