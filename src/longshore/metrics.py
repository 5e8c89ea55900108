"""Metrics: the name, help text and labels of each, and Prometheus collectors that read them when they are scraped.

Every label value is exported from the start, at zero, so that a tier without hits is visible.

    REGISTRY.register(LongshoreCollector(stack.runtime, stack.host, stack.engine, stack.events, stack.file))
    REGISTRY.register(tiers.collector)    under transformers, where each call may open a new stack

    MirroredMetrics(collector, labels).update()    under SGLang, which exports what processes write into files

vLLM exports those of `VLLM_COUNTERS` and `VLLM_GAUGES` in its own `/metrics`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, ClassVar, NamedTuple

from prometheus_client import Counter, Gauge
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from longshore.cache import Counters, TierStats
from longshore.runtime import EventRecorder, Runtime
from longshore.runtime.stack import Stack
from longshore.tiers.arena import ArenaReport
from longshore.tiers.base import Tier
from longshore.tiers.host import HostTier
from longshore.transfer import TransferEngine, TransferStats


class Description(NamedTuple):
    """Help text and label names of a metric."""

    help: str
    labels: tuple[str, ...] = ()


COUNTERS: Mapping[str, Description] = {
    "longshore_requests": Description("Requests looked up by an engine, each counted once"),
    "longshore_lookup_attempts": Description("Lookups of requests, including repeated lookups while a request waits"),
    "longshore_hit_chunks": Description("Chunks loaded, by the tier they were read from", ("tier",)),
    "longshore_hit_tokens": Description(
        "Tokens of the chunks loaded, of the first KV cache group, by the tier they were read from", ("tier",)
    ),
    "longshore_miss_chunks": Description("Chunks looked up and not loaded, by reason", ("reason",)),
    "longshore_probed_chunks": Description("Chunks looked up in remote tiers, by answer", ("tier", "answer")),
    "longshore_recomputed_chunks": Description("Chunks found, but recomputed because that is faster"),
    "longshore_evicted_chunks": Description("Chunks evicted from a tier", ("tier",)),
    "longshore_demoted_chunks": Description("Chunks evicted from a tier while a colder tier had a copy", ("tier",)),
    "longshore_lost_chunks": Description("Chunks in a tier that could not be read, or were damaged", ("tier",)),
    "longshore_dropped_chunks": Description("Chunks offered to a tier and not stored, by reason", ("tier", "reason")),
    "longshore_moved_bytes": Description("Bytes transferred", ("route",)),
    "longshore_moving_seconds": Description("Seconds spent transferring", ("route",)),
    "longshore_failed_chunks": Description("Chunks whose transfer failed", ("route",)),
    "longshore_refused_transfers": Description("Transfers refused because a queue was full"),
    "longshore_device_fallbacks": Description(
        "Copies of the device that used a slower fallback, by reason", ("reason",)
    ),
    "longshore_guard_waits": Description(
        "Times that the engine waited for copies of device blocks before reusing them"
    ),
    "longshore_guard_wait_seconds": Description("Seconds that the engine waited for copies of device blocks"),
    "longshore_late_blocks": Description("Device blocks whose copies did not end in time"),
    "longshore_arena_fallbacks": Description("Fallbacks of the host arena, by reason", ("reason",)),
    "longshore_file_fallbacks": Description(
        "Operations of the file tier that used a slower fallback, by reason", ("reason",)
    ),
    "longshore_file_failures": Description("Failures in the file tier, by reason", ("reason",)),
    "longshore_file_troubles": Description("The former name of longshore_file_failures", ("reason",)),
    "longshore_store_failures": Description("Failures of a store that replicas share, by reason", ("tier", "reason")),
    "longshore_store_troubles": Description("The former name of longshore_store_failures", ("tier", "reason")),
    "longshore_control_plane_faults": Description("Failures of the control plane; the first one disables all tiers"),
    "longshore_weight_changes": Description(
        "Times that the weights of a rank changed in the running engine, which discards all blocks"
    ),
    "longshore_events_written": Description("Events written to the event file"),
    "longshore_events_missed": Description("Events missing from the event file"),
}
"""Every counter; Prometheus appends `_total` to the name."""

GAUGES: Mapping[str, Description] = {
    "longshore_used_bytes": Description("Bytes used in a tier, including transfers in flight", ("tier",)),
    "longshore_capacity_bytes": Description("Size of a tier in bytes", ("tier",)),
    "longshore_holds": Description("Leases that have not been released"),
    "longshore_jobs_in_flight": Description("Transfer jobs in flight"),
    "longshore_queued_transfers": Description("Transfers waiting in a queue", ("into", "urgency")),
    "longshore_arena_bytes": Description("Bytes of the host arena"),
    "longshore_arena_huge_bytes": Description("Bytes of the host arena on huge pages, at start"),
    "longshore_arena_registered_bytes": Description("Bytes of the host arena registered with the device"),
    "longshore_arena_registered_pieces": Description("Registered pieces of the host arena"),
    "longshore_arena_numa_bound": Description("Whether the host arena is bound to a NUMA node"),
    "longshore_arena_shared": Description("Whether other processes can attach to the host arena"),
    "longshore_events_off": Description("Whether event recording has stopped because the file could not be written"),
}
"""Every gauge."""

VLLM_COUNTERS = {
    name: COUNTERS[name]
    for name in (
        "longshore_hit_chunks",
        "longshore_hit_tokens",
        "longshore_miss_chunks",
        "longshore_control_plane_faults",
        "longshore_recomputed_chunks",
        "longshore_weight_changes",
        "longshore_evicted_chunks",
        "longshore_lost_chunks",
        "longshore_dropped_chunks",
        "longshore_moved_bytes",
        "longshore_moving_seconds",
        "longshore_failed_chunks",
        "longshore_file_failures",
        "longshore_file_troubles",
        "longshore_store_failures",
        "longshore_store_troubles",
        "longshore_probed_chunks",
    )
}
"""Counters in vLLM's own `/metrics`."""

VLLM_GAUGES = {name: GAUGES[name] for name in ("longshore_used_bytes", "longshore_capacity_bytes")}
"""Gauges in vLLM's own `/metrics`."""


class LongshoreCollector(Collector):
    """The metrics of one runtime, and of its host tier, engine, recorder, file tier and stores where given."""

    def __init__(
        self,
        runtime: Runtime,
        host: HostTier | None = None,
        engine: TransferEngine | None = None,
        events: EventRecorder | None = None,
        file: Tier | None = None,
        stores: Sequence[Tier] = (),
    ) -> None:
        self._runtime = runtime
        self._host = host
        self._engine = engine
        self._events = events
        self._file = file
        self._stores = stores

    def collect(self) -> Iterable[Metric]:
        """All metric families, read under the runtime's lock; also after it was closed."""
        runtime = self._runtime
        with runtime.observe() as cache:
            metrics = [*_of_cache(cache.counters), *_of_tiers(cache.stats())]
            metrics += [
                _metric("longshore_holds", cache.held),
                _metric("longshore_jobs_in_flight", cache.jobs_in_flight),
            ]
        asked, guarded, gate = runtime.asked, runtime.guarded, runtime.gate
        metrics += [
            _metric("longshore_control_plane_faults", runtime.faults),
            _metric("longshore_requests", asked.requests),
            _metric("longshore_lookup_attempts", asked.attempts),
            _metric("longshore_guard_waits", guarded.waits),
            _metric("longshore_guard_wait_seconds", guarded.seconds),
            _metric("longshore_late_blocks", guarded.late),
            _metric("longshore_recomputed_chunks", gate.refused if gate is not None else 0),
        ]
        if self._host is not None:
            metrics += _of_arena(self._host.report)
        if self._engine is not None:
            metrics += _of_engine(self._engine.stats())
        if self._events is not None:
            metrics += _of_events(self._events)
        if self._file is not None:
            metrics.append(_metric("longshore_file_fallbacks", self._file.fallbacks))
            metrics += [_metric(f"longshore_file_{name}", self._file.failures) for name in ("failures", "troubles")]
        failures = _by_two({store.name: store.failures for store in self._stores})
        metrics += [_metric(f"longshore_store_{name}", failures) for name in ("failures", "troubles")]
        return metrics


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
            ended = [] if stack is not None and stack.runtime is old.runtime else of_stack(old)
            if not ended and stack is not None and stack.engine is not old.engine:
                ended = _of_engine(old.engine.stats())  # its tiers live on under another device cache
            self._before = {metric.name: metric for metric in self._add(ended) if metric.type == "counter"}

    def collect(self) -> Iterable[Metric]:
        """All metric families."""
        with self._lock:
            return self._add([] if self._stack is None else of_stack(self._stack))

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


class MirroredMetrics:
    """The metrics of a collector as objects of `prometheus_client`, the only ones that its multi-process mode exports.

    In that mode a process writes each value into a file, and another one answers scrapes: collectors are never asked.
    """

    _made: ClassVar[dict[str, Counter | Gauge]] = {}
    """By name; a name can be registered once in a process."""

    def __init__(self, collector: Collector, labels: Mapping[str, str]) -> None:
        """`labels` are added to those of each metric."""
        self._collector = collector
        self._labels = dict(labels)
        self._before: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}

    def update(self) -> None:
        """Write the current values."""
        for metric in self._collector.collect():
            for sample in metric.samples:
                labels = {**sample.labels, **self._labels}
                made = self._made.get(metric.name) or self._make(metric, tuple(labels))
                child = made.labels(**labels)
                if isinstance(child, Gauge):
                    child.set(sample.value)
                else:
                    before = self._before.get(_labelled(sample), 0.0)
                    self._before[_labelled(sample)] = sample.value
                    child.inc(max(0.0, sample.value - before))

    def _make(self, metric: Metric, labels: Sequence[str]) -> Counter | Gauge:
        name, text = metric.name, metric.documentation
        made = (
            Counter(name, text, labels)
            if metric.type == "counter"
            else Gauge(name, text, labels, multiprocess_mode="livesum")
        )
        self._made[name] = made
        return made


def of_stack(stack: Stack) -> Iterable[Metric]:
    """The metrics of one stack."""
    return LongshoreCollector(stack.runtime, stack.host, stack.engine, stack.events, stack.file, stack.remote).collect()


def _labelled(sample: Sample) -> tuple[str, frozenset[tuple[str, str]]]:
    return sample.name, frozenset(sample.labels.items())


def _of_cache(counters: Counters) -> Iterable[Metric]:
    yield _metric("longshore_hit_chunks", counters.hits)
    yield _metric("longshore_hit_tokens", counters.hit_tokens)
    yield _metric("longshore_miss_chunks", counters.misses)
    yield _metric("longshore_evicted_chunks", counters.evictions)
    yield _metric("longshore_demoted_chunks", counters.demotions)
    yield _metric("longshore_lost_chunks", counters.lost)
    yield _metric("longshore_dropped_chunks", _by_two(counters.drops))
    yield _metric("longshore_probed_chunks", _by_two(counters.probes))
    routes = counters.routes
    yield _metric("longshore_moved_bytes", {route: totals.bytes for route, totals in routes.items()})
    yield _metric("longshore_moving_seconds", {route: totals.seconds for route, totals in routes.items()})
    yield _metric("longshore_failed_chunks", {route: totals.failed for route, totals in routes.items()})


def _of_tiers(tiers: Iterable[TierStats]) -> Iterable[Metric]:
    sizes = {tier.name: tier for tier in tiers}
    yield _metric("longshore_used_bytes", {name: tier.used_bytes for name, tier in sizes.items()})
    yield _metric("longshore_capacity_bytes", {name: tier.nbytes for name, tier in sizes.items()})


def _of_events(events: EventRecorder) -> Iterable[Metric]:
    yield _metric("longshore_events_written", events.written)
    yield _metric("longshore_events_missed", events.missed)
    yield _metric("longshore_events_off", events.failure is not None)


def _of_arena(report: ArenaReport) -> Iterable[Metric]:
    yield _metric("longshore_arena_bytes", report.nbytes)
    yield _metric("longshore_arena_huge_bytes", report.huge_bytes)
    yield _metric("longshore_arena_registered_bytes", report.registered_bytes)
    yield _metric("longshore_arena_registered_pieces", report.registered_pieces)
    yield _metric("longshore_arena_numa_bound", report.numa_bound)
    yield _metric("longshore_arena_shared", report.shared)
    yield _metric("longshore_arena_fallbacks", report.fallbacks)


def _of_engine(stats: TransferStats) -> Iterable[Metric]:
    queued = {(into, urgency.name.lower()): count for (into, urgency), count in stats.queued.items()}
    yield _metric("longshore_queued_transfers", queued)
    yield _metric("longshore_refused_transfers", stats.refused)
    yield _metric("longshore_device_fallbacks", stats.fallbacks)


def _by_two(values: Mapping[Any, Mapping[Any, float]]) -> dict[tuple[Any, Any], float]:
    return {(first, second): value for first, inner in values.items() for second, value in inner.items()}


def _metric(name: str, values: Mapping[Any, float] | float) -> Metric:
    """The metric `name` with `values`: one for each label value, or tuple of them; a number where it has no labels."""
    about = COUNTERS.get(name) or GAUGES[name]
    family: CounterMetricFamily | GaugeMetricFamily
    kind = CounterMetricFamily if name in COUNTERS else GaugeMetricFamily
    family = kind(name, about.help, labels=about.labels)
    for key, value in (values if isinstance(values, Mapping) else {(): values}).items():
        labels = key if type(key) is tuple else (key,)
        family.add_metric([str(each.value) if isinstance(each, Enum) else str(each) for each in labels], value)
    return family
