"""Histograms: what is observed, in which bucket, and under which label."""

from __future__ import annotations

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.samples import Sample

from longshore import __version__
from longshore.boundary import Route, Status, Transfer, TransferResult
from longshore.cache import GroupKeys, TieredCache, TierSpec
from longshore.cache.types import Histogram
from longshore.metrics import LongshoreCollector
from longshore.monitoring.metric_names import EVICTED_AGE_SECONDS, LOOKUP_SECONDS, METRICS
from longshore.runtime import Runtime
from scripted import Scripted

IMAGE = 4096
ROUTES = ("device->host", "host->device", "host->file", "file->host")


class Watched:
    """A cache over a host tier of four slots and a file tier of eight, on a clock that the test sets."""

    def __init__(self) -> None:
        self.now = 100.0
        self.mover = Scripted(*(Route(*route.split("->")) for route in ROUTES))
        cache = TieredCache([TierSpec("host", 4, IMAGE), TierSpec("file", 8, IMAGE)])
        self.runtime = Runtime(cache, [self.mover], clock=lambda: self.now)
        self._registry = CollectorRegistry()
        self._registry.register(LongshoreCollector(self.runtime))

    def value(self, name: str, **labels: str) -> float:
        found = self._registry.get_sample_value(name, labels)
        assert found is not None, (name, labels)
        return found

    def store(self, *numbers: int) -> None:
        with self.runtime.batch() as cache:
            cache.store({0: GroupKeys(path(*numbers))}, {0: tuple(range(len(numbers)))})
        self.end_all()

    def back_up(self) -> None:
        """Copies to the file tier."""
        with self.runtime.batch() as cache:
            cache.back_up_all()
        self.end_all()

    def end_all(self) -> None:
        while self.mover.open:
            self.mover.end(Status.OK)
            self.runtime.pump()


def path(*numbers: int) -> list[bytes]:
    return [bytes([number]) * 32 for number in numbers]


def buckets(samples: list[Sample]) -> dict[str, float]:
    return {sample.labels["le"]: sample.value for sample in samples if sample.name.endswith("_bucket")}


def test_one_by_one_and_together_are_counted_alike() -> None:
    values = [0.0, 0.5, 1.0, 1.1, 59.0, 60.0, 1e9]
    one, several = Histogram(EVICTED_AGE_SECONDS), Histogram(EVICTED_AGE_SECONDS)
    for value in values:
        one.observe(value)
    several.observe_all(np.array(values))
    several.observe_all(np.array([]))
    assert one == several
    assert one.counts[:4] == [3, 1, 0, 2]  # a bound is in its bucket
    assert one.counts[-1] == 1
    assert one.total == sum(values)


def test_recent_observations_are_bounded_and_taken_once() -> None:
    histogram = Histogram(EVICTED_AGE_SECONDS)
    histogram.observe(1.0)
    assert histogram.take_recent() == []
    histogram.keep_recent(3)
    for value in range(5):
        histogram.observe(float(value))
    assert histogram.take_recent() == [2.0, 3.0, 4.0]
    assert histogram.take_recent() == []
    assert sum(histogram.counts) == 6


def test_every_histogram_has_ascending_buckets() -> None:
    for name, metric in METRICS.items():
        assert list(metric.buckets) == sorted(set(metric.buckets)), name
        assert bool(metric.buckets) == (metric.kind.value == "histogram"), name


def test_a_load_is_timed_by_its_slowest_tier() -> None:
    watched = Watched()
    watched.store(0, 1)
    watched.back_up()
    with watched.runtime.batch() as cache:
        assert cache.discard(path(0, 1)[1:], "host") == 1
        lease = cache.lookup({0: GroupKeys(path(0, 1))}, watched.now, request="r").lease
        assert lease is not None
        cache.load(lease, {0: (2, 3)})
    watched.now += 3.0
    watched.end_all()
    outcome = watched.runtime.wait_load(lease, 1.0).outcome
    assert outcome is not None
    assert outcome.sources == ("host", "file")
    assert watched.value("longshore_load_seconds_sum", tier="file") == 3.0
    assert watched.value("longshore_load_seconds_bucket", tier="file", le="2.5") == 0
    assert watched.value("longshore_load_seconds_bucket", tier="file", le="5.0") == 1
    assert watched.value("longshore_load_seconds_count", tier="host") == 0


def test_a_load_that_brings_nothing_is_not_timed() -> None:
    watched = Watched()
    watched.store(0)
    with watched.runtime.batch() as cache:
        lease = cache.lookup({0: GroupKeys(path(0))}, watched.now).lease
        assert lease is not None
        cache.load(lease, {0: (2,)})
    while watched.mover.open:
        watched.mover.end(Status.IO_ERROR)
        watched.runtime.pump()
    watched.runtime.wait_load(lease, 1.0)
    assert watched.value("longshore_miss_chunks_total", reason="io_error") == 1
    assert watched.value("longshore_load_seconds_count", tier="host") == 0


@pytest.mark.parametrize(("alone", "slots"), [(True, 4), (False, 4), (False, 40)])
def test_the_age_of_evicted_chunks_is_observed(alone: bool, slots: int) -> None:
    cache = TieredCache([TierSpec("host", slots, IMAGE)])
    now = 1000.0
    for first, age in ((0, 0.0), (slots, 30.0)):  # the second path takes the room of the first one
        now += age
        cache.apply_results((), now)
        keys = path(*range(first, first + slots))
        for part in [keys] if not alone else [[key] for key in keys]:
            cache.store({0: GroupKeys(part)}, {0: tuple(range(len(part)))}, before_eviction=True)
            transfers = [each for each in cache.take_commands() if isinstance(each, Transfer)]
            cache.apply_results([TransferResult(each.job, (Status.OK,) * len(each.items)) for each in transfers], now)
    ages = cache.counters.histograms[EVICTED_AGE_SECONDS]["host"]
    assert cache.counters.evictions["host"] == sum(ages.counts) > 0
    assert ages.total == pytest.approx(30.0 * sum(ages.counts))


def test_the_age_of_chunks_with_a_copy_below_is_observed() -> None:
    watched = Watched()
    watched.store(0, 1, 2, 3)
    watched.back_up()
    watched.now += 30.0
    watched.store(4, 5, 6, 7)
    gone = watched.value("longshore_demoted_chunks_total", tier="host")
    assert gone == watched.value("longshore_evicted_age_seconds_count", tier="host") == 4
    assert watched.value("longshore_evicted_age_seconds_sum", tier="host") == 4 * 30.0
    assert watched.value("longshore_evicted_age_seconds_count", tier="file") == 0


def test_chunks_of_an_earlier_process_have_no_age() -> None:
    cache = TieredCache([TierSpec("host", 2, IMAGE)])
    cache.adopt("host", [(0, path(0)[0], None, 0), (1, path(1)[0], None, 0)])
    cache.apply_results((), 50.0)
    cache.store({0: GroupKeys(path(2))}, {0: (0,)}, before_eviction=True)
    assert cache.counters.evictions["host"] >= 1
    assert sum(cache.counters.histograms[EVICTED_AGE_SECONDS]["host"].counts) == 0


def test_queue_wait_and_size_are_observed_by_route() -> None:
    watched = Watched()
    with watched.runtime.batch() as cache:
        cache.store({0: GroupKeys(path(0, 1))}, {0: (0, 1)})
    (transfer,) = watched.mover.open.values()
    result = TransferResult(transfer.job, (Status.OK,) * 2, bytes=2 * IMAGE, seconds=1.0, queued_seconds=0.2)
    with watched.runtime.locked() as cache:
        cache.apply_results([result], watched.now)
    assert watched.value("longshore_transfer_queue_seconds_sum", route="device->host") == 0.2
    assert watched.value("longshore_transfer_queue_seconds_bucket", route="device->host", le="0.1") == 0
    assert watched.value("longshore_transfer_queue_seconds_bucket", route="device->host", le="0.25") == 1
    assert watched.value("longshore_transfer_size_bytes_sum", route="device->host") == 2 * IMAGE
    assert watched.value("longshore_transfer_size_bytes_count", route="file->host") == 0


@pytest.mark.parametrize("status", [Status.QUEUE_FULL, Status.CANCELLED, Status.UNAVAILABLE])
def test_a_transfer_that_moved_nothing_is_not_observed(status: Status) -> None:
    watched = Watched()
    with watched.runtime.batch() as cache:
        cache.store({0: GroupKeys(path(0, 1))}, {0: (0, 1)})
    watched.mover.end(status)
    watched.runtime.pump()
    assert watched.value("longshore_failed_chunks_total", route="device->host") == 2
    for name in ("longshore_transfer_queue_seconds", "longshore_transfer_size_bytes"):
        assert watched.value(f"{name}_count", route="device->host") == 0


def test_lookups_are_timed_and_the_version_is_exported() -> None:
    watched = Watched()
    with watched.runtime.batch(), watched.runtime.lookup_counters.seconds.timed():
        pass
    assert watched.value(f"{LOOKUP_SECONDS}_count") == 1
    assert watched.value("longshore_build_info", version=__version__) == 1
