"""Prometheus collectors, which read values when they are scraped. `monitoring.metric_names` lists the metrics.

Every label value is exported from the start, at zero, so that a tier without hits is visible.

    REGISTRY.register(LongshoreCollector(stack.runtime, stack.host, stack.transfer_engine, stack.events, stack.file))
    REGISTRY.register(tiers.collector)    under transformers, where each call may open a new stack

    serve_metrics(tiers.collector, "0.0.0.0:9464")    the same without a registry, with /health (monitoring.endpoint)
    MirroredMetrics(collector, labels).update()    under SGLang, which exports what processes write into files

vLLM exports what the table marks for it in its own `/metrics`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import accumulate
from typing import Any, ClassVar

from prometheus_client import Counter, Gauge
from prometheus_client import Histogram as MultiProcessHistogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar, Sample

from longshore import __version__
from longshore.cache import Counters, TierStats
from longshore.cache.types import Histogram
from longshore.monitoring.endpoint import HealthReport, serve_metrics
from longshore.monitoring.metric_names import LOOKUP_SECONDS, METRICS, MetricKind
from longshore.runtime import EventRecorder, Runtime
from longshore.runtime.stack import Stack
from longshore.tiers.arena import ArenaReport
from longshore.tiers.base import Tier
from longshore.tiers.host import HostSlabs
from longshore.transfer import TransferEngine, TransferStats

__all__ = ["FollowingCollector", "LongshoreCollector", "MirroredMetrics", "serve_metrics"]

_EXAMPLE_LENGTH = 100
"""Characters of a request's name in an exemplar: OpenMetrics allows 128, with the label's name."""


class LongshoreCollector(Collector):
    """The metrics of one runtime, and of its host tier, engine, recorder, file tier and stores where given."""

    def __init__(
        self,
        runtime: Runtime,
        host: HostSlabs | None = None,
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

    def health(self) -> HealthReport:
        """Whether the tiers serve requests; if not as they should, why."""
        runtime = self._runtime
        if runtime.fault is not None:
            return HealthReport.disabled(f"the control plane failed: {type(runtime.fault).__name__}; see the log")
        if runtime.closed:
            return HealthReport.disabled("the tiers were closed")
        tiers = [tier for tier in (self._file, *self._stores) if tier is not None]
        reasons = [f"{tier.name}: {reason}" for tier in tiers if (reason := tier.degraded_reason)]
        if self._events is not None and self._events.failure is not None:
            reasons.append("events: the event file cannot be written")
        return HealthReport.of(reasons)

    def collect(self) -> Iterable[Metric]:
        """All metric families, read under the runtime's lock; also after it was closed."""
        runtime = self._runtime
        with runtime.locked() as cache:
            metrics = [*_of_cache(cache.counters), *_of_tiers(cache.stats())]
            metrics += [
                _metric("longshore_leases", cache.leases),
                _metric("longshore_jobs_in_flight", cache.jobs_in_flight),
                _histograms(LOOKUP_SECONDS, {(): runtime.lookup_counters.seconds}),
            ]
            tiers = [tier.name for tier in cache.stats()]
        asked, guarded, gate = runtime.lookup_counters, runtime.guard_counters, runtime.gate
        metrics += [
            _metric("longshore_control_plane_faults", runtime.faults),
            _metric("longshore_requests", asked.requests),
            _metric("longshore_lookup_attempts", asked.attempts),
            _metric("longshore_block_reuse_waits", guarded.waits),
            _metric("longshore_block_reuse_wait_seconds", guarded.seconds),
            _metric("longshore_block_reuse_timeouts", guarded.late),
            _metric("longshore_recomputed_chunks", gate.recomputed if gate is not None else 0),
        ]
        others = {tier.name: not tier.degraded_reason for tier in (self._file, *self._stores) if tier is not None}
        works = runtime.fault is None and not runtime.closed
        available = {name: float(works and others.get(name, True)) for name in dict.fromkeys((*tiers, *others))}
        metrics += [
            _metric("longshore_tier_available", available),
            _metric("longshore_build_info", {__version__: 1}),
        ]
        if self._host is not None:
            metrics += _of_arena(self._host.arena.report)
        if self._engine is not None:
            metrics += _of_engine(self._engine.stats())
        if self._events is not None:
            metrics += _of_events(self._events)
        if self._file is not None:
            metrics.append(_metric("longshore_file_fallbacks", self._file.fallbacks))
            metrics.append(_metric("longshore_file_failures", self._file.failures))
        failures = _by_two({store.name: store.failures for store in self._stores})
        return [*metrics, _metric("longshore_store_failures", failures)]

    def histograms(self) -> Iterator[tuple[str, tuple[str, ...], Histogram]]:
        """Every histogram: its name, its label values, and itself. To be read within `Runtime.locked`."""
        with self._runtime.locked() as cache:
            yield from cache.counters.each_histogram()
            yield LOOKUP_SECONDS, (), self._runtime.lookup_counters.seconds


_CUMULATIVE = ("counter", "histogram")


class FollowingCollector(Collector):
    """The metrics of one `Stack` after another. Counters continue from the values of earlier stacks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stack: Stack | None = None
        self._before: dict[str, Metric] = {}
        """Counters and histograms of closed stacks, by name."""

    def health(self) -> HealthReport:
        """That of the present stack."""
        with self._lock:
            return (
                HealthReport.disabled("no tiers are open") if self._stack is None else _collector(self._stack).health()
            )

    def follow(self, stack: Stack | None) -> None:
        """Export the metrics of `stack` from now on; `None`: counters keep their values."""
        with self._lock:
            old, self._stack = self._stack, stack
            if old is None:
                return
            ended = [] if stack is not None and stack.runtime is old.runtime else _of_stack(old)
            if not ended and stack is not None and stack.transfer_engine is not old.transfer_engine:
                ended = _of_engine(old.transfer_engine.stats())  # its tiers live on under another device cache
            self._before = {metric.name: metric for metric in self._add(ended) if metric.type in _CUMULATIVE}

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


class MirroredMetrics:
    """The metrics of a collector as objects of `prometheus_client`, the only ones that its multi-process mode exports.

    In that mode a process writes each value into a file, and another one answers scrapes: collectors are never asked.
    """

    _made: ClassVar[dict[str, Counter | Gauge | MultiProcessHistogram]] = {}
    """By name; a name can be registered once in a process."""

    def __init__(self, collector: LongshoreCollector, labels: Mapping[str, str]) -> None:
        """`labels` are added to those of each metric."""
        self._collector = collector
        self._labels = dict(labels)
        self._before: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        for _, _, histogram in collector.histograms():
            histogram.keep_recent()

    def update(self) -> None:
        """Write the current values."""
        for metric in self._collector.collect():
            for sample in metric.samples if metric.type != "histogram" else ():
                labels = {**sample.labels, **self._labels}
                child = self._made_for(metric.name, labels)
                if isinstance(child, Gauge):
                    child.set(sample.value)
                elif isinstance(child, Counter):
                    before = self._before.get(_labelled(sample), 0.0)
                    self._before[_labelled(sample)] = sample.value
                    child.inc(max(0.0, sample.value - before))
        for name, values, histogram in self._collector.histograms():
            child = self._made_for(name, {**dict(zip(METRICS[name].labels, values, strict=True)), **self._labels})
            for value in histogram.take_recent():
                child.observe(value)

    def _made_for(self, name: str, labels: Mapping[str, str]) -> Any:
        if name not in self._made:
            about = METRICS[name]
            if about.kind is MetricKind.HISTOGRAM:
                self._made[name] = MultiProcessHistogram(name, about.help, tuple(labels), buckets=about.buckets)
            elif about.kind is MetricKind.COUNTER:
                self._made[name] = Counter(name, about.help, tuple(labels))
            else:
                self._made[name] = Gauge(name, about.help, tuple(labels), multiprocess_mode="livesum")
        return self._made[name].labels(**labels)


def _collector(stack: Stack) -> LongshoreCollector:
    return LongshoreCollector(stack.runtime, stack.host, stack.transfer_engine, stack.events, stack.file, stack.remote)


def _of_stack(stack: Stack) -> Iterable[Metric]:
    return _collector(stack).collect()


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
    yield _metric("longshore_internal_errors", counters.internal_errors)
    routes = counters.routes
    yield _metric("longshore_moved_bytes", {route: totals.bytes for route, totals in routes.items()})
    yield _metric("longshore_moving_seconds", {route: totals.seconds for route, totals in routes.items()})
    yield _metric("longshore_failed_chunks", {route: totals.failed for route, totals in routes.items()})
    for name, by_label in counters.histograms.items():
        yield _histograms(name, by_label)


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
    queued = {(destination, urgency.name.lower()): count for (destination, urgency), count in stats.queued.items()}
    yield _metric("longshore_queued_transfers", queued)
    yield _metric("longshore_refused_transfers", stats.refused)
    yield _metric("longshore_device_fallbacks", stats.fallbacks)


def _by_two(values: Mapping[Any, Mapping[Any, float]]) -> dict[tuple[Any, Any], float]:
    return {(first, second): value for first, inner in values.items() for second, value in inner.items()}


def _metric(name: str, values: Mapping[Any, float] | float) -> Metric:
    """The metric `name` with `values`: one for each label value, or tuple of them; a number where it has no labels."""
    about = METRICS[name]
    family: CounterMetricFamily | GaugeMetricFamily
    kind = CounterMetricFamily if about.kind is MetricKind.COUNTER else GaugeMetricFamily
    family = kind(name, about.help, labels=about.labels)
    for key, value in (values if isinstance(values, Mapping) else {(): values}).items():
        family.add_metric(_label_values(key), value)
    return family


def _histograms(name: str, values: Mapping[Any, Histogram]) -> Metric:
    """The histogram `name`, one for each label value, with the last request of each bucket as its exemplar."""
    about = METRICS[name]
    family = HistogramMetricFamily(name, about.help, labels=about.labels)
    bounds = [*(repr(bound) for bound in about.buckets), "+Inf"]
    for key, histogram in values.items():
        buckets: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
        for bound, count, example in zip(bounds, accumulate(histogram.counts), histogram.examples, strict=True):
            if example is None:
                buckets.append((bound, count))
            else:
                name_of, value = example
                buckets.append((bound, count, Exemplar({"request": name_of[:_EXAMPLE_LENGTH]}, value)))
        family.add_metric(_label_values(key), buckets, histogram.total)
    return family


def _label_values(key: Any) -> list[str]:
    labels = key if type(key) is tuple else (key,)
    return [str(each.value) if isinstance(each, Enum) else str(each) for each in labels]
