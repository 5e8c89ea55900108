"""What operators and routers are told: metrics for vLLM's endpoint, KV events, and where a load came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm.v1.kv_offload.base import LookupResult, Medium, OffloadingHistogramMetadata, OffloadKey
from vllm_kit import TOKENS, Rig, file_settings, keys_of

from longshore.cache import TieredCache, TierSpec, events
from longshore.engines.vllm import LongshoreSpec, spec
from longshore.engines.vllm.metrics import OffloadingMetrics, zero
from longshore.engines.vllm.requests import cache_keys
from longshore.monitoring.metric_names import METRICS

HIT, MISS, PENDING = LookupResult.HIT, LookupResult.MISS, LookupResult.HIT_PENDING
IMAGE = 4096


class Totals:
    """What vLLM adds up of what it is told."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self.stats = zero()

    def __call__(self, name: str, *labels: str) -> float:
        told = self._rig.manager.get_stats()
        if told is not None:
            self.stats.aggregate(told)
        value: float = self.stats.data["data"][name][labels]
        return value


def read(rig: Rig, keys: list[OffloadKey], name: str) -> None:
    """A request that finds all of `keys`, and loads them."""
    context = rig.request(name, keys)
    while PENDING in rig.lookup(keys, context):
        assert rig.manager._runtime._wait(lambda: not rig.cache.jobs_in_flight, 10.0)
    assert rig.lookup(keys, context) == [HIT] * len(keys)
    rig.load(keys, range(len(keys)), context)
    rig.manager.on_request_finished(context)


def lose_host(rig: Rig, keys: list[OffloadKey]) -> None:
    """Only the file tier has `keys` from now on."""
    assert rig.manager._runtime.flush(10.0)
    with rig.manager._runtime.batch() as cache:
        assert cache.discard(cache_keys(keys), "host") == len(keys)


def test_every_metric_label_is_declared_and_starts_at_zero(rigs: Any) -> None:
    definitions = LongshoreSpec.build_metric_definitions({})
    first = rigs().manager.get_stats().data
    counted = {name for name, each in definitions.items() if not isinstance(each, OffloadingHistogramMetadata)}
    assert set(first["data"]) == counted == set(zero().data["data"])
    for name, values in first["data"].items():
        assert values, name
        assert all(len(labels) == len(definitions[name].labelnames) for labels in values)
        levels = ("longshore_build_info", "longshore_tier_available")
        assert name in levels or not any(zero().data["data"][name].values()), name
    for tier in ("host", "file"):
        assert first["data"]["longshore_hit_chunks"][(tier,)] == 0
    assert first["data"]["longshore_miss_chunks"][("corrupt",)] == 0


def test_a_tier_that_serves_nothing_is_not_available(rigs: Any, tmp_path: Path) -> None:
    rig = rigs(**file_settings(tmp_path))
    available = {("host",): 1, ("file",): 1}
    assert rig.manager.get_stats().data["data"]["longshore_tier_available"] == available
    rig.manager._tiers.file._failures["read_only"] = 1
    assert rig.manager.get_stats().data["data"]["longshore_tier_available"] == {("file",): 0}
    off = OffloadingMetrics(is_off=True).stats(TieredCache([TierSpec("host", 1, 1)]))
    assert off.data["data"]["longshore_tier_available"] == {("host",): 1, ("file",): 0}
    rig.manager._runtime.fail(RuntimeError("for a test"))
    assert rig.manager.get_stats().data["data"]["longshore_tier_available"] == {("host",): 0}


def test_each_observation_is_told_once(rigs: Any, tmp_path: Path) -> None:
    rig, keys = rigs(**file_settings(tmp_path)), keys_of(2)
    rig.store(keys, [1, 2], rig.request("writer", keys))
    assert rig.manager._runtime.flush(10.0)
    told = rig.manager.get_stats().data["data"]
    assert told["longshore_transfer_size_bytes"][("host->file",)] == [2 * IMAGE]
    assert told["longshore_transfer_size_bytes"][("device->host",)] == [2 * IMAGE]
    (waited,) = told["longshore_transfer_queue_seconds"][("host->file",)]
    assert waited >= 0
    assert ("device->host",) not in told["longshore_transfer_queue_seconds"]  # vLLM moves these bytes
    assert rig.manager.get_stats() is None
    rig.lookup(keys, rig.request("reader", keys))
    (spent, *_) = rig.manager.get_stats().data["data"]["longshore_lookup_seconds"][()]
    assert spent > 0
    definition = LongshoreSpec.build_metric_definitions({})["longshore_lookup_seconds"]
    assert definition.buckets == METRICS["longshore_lookup_seconds"].buckets


def test_what_has_not_changed_is_not_told_again(rigs: Any) -> None:
    rig, keys = rigs(), keys_of(2)
    rig.manager.get_stats()
    assert rig.manager.get_stats() is None
    rig.store(keys, [1, 2], rig.request("one", keys))
    told = rig.manager.get_stats().data["data"]
    assert told["longshore_moved_bytes"] == {("device->host",): 2 * IMAGE}
    assert told["longshore_used_bytes"] == {("host",): 2 * IMAGE}
    assert rig.manager.get_stats() is None


def test_hits_are_counted_by_the_tier_that_they_came_from(rigs: Any, tmp_path: Path) -> None:
    rig, keys = rigs(**file_settings(tmp_path)), keys_of(3)
    total = Totals(rig)
    rig.store(keys, [1, 2, 3], rig.request("writer", keys))
    read(rig, keys, "from host")
    assert (total("longshore_hit_chunks", "host"), total("longshore_hit_chunks", "file")) == (3, 0)
    lose_host(rig, keys[:2])
    read(rig, keys, "from both")
    assert (total("longshore_hit_chunks", "host"), total("longshore_hit_chunks", "file")) == (4, 2)
    assert total("longshore_hit_tokens", "file") == 2 * TOKENS
    assert total("longshore_moved_bytes", "host->file") == 3 * IMAGE
    assert total("longshore_moved_bytes", "file->host") == 2 * IMAGE
    assert total("longshore_moved_bytes", "host->device") == 6 * IMAGE
    assert total("longshore_moving_seconds", "host->device") > 0
    assert total("longshore_used_bytes", "file") == 3 * (4096 + IMAGE)  # headers lie beside images
    assert total("longshore_capacity_bytes", "host") == 1 << 20


def test_misses_are_counted_once_by_their_reason(rigs: Any) -> None:
    rig, keys = rigs(load_timeout=0.05), keys_of(6)
    total = Totals(rig)
    rig.store(keys[:2], [1, 2], rig.request("writer", keys[:2]))
    rig.store([keys[4]], [3], rig.request("other", [keys[4]]))
    reader = rig.request("reader", keys)
    for _ in range(3):  # a request that waits for blocks of the device is looked up at each step
        assert [rig.manager.lookup(key, reader) for key in keys[1:3]] == [HIT, MISS]
        rig.end_step()
    assert total("longshore_miss_chunks", "absent") == 3  # the third, the fourth and the sixth
    assert total("longshore_miss_chunks", "after_miss") == 1


def test_wait_in_vain_is_a_miss_by_deadline(rigs: Any) -> None:
    rig, keys = rigs(load_timeout=0.05), keys_of(2)
    total = Totals(rig)
    rig.store(keys, [1, 2], rig.request("writer", keys), complete=False)
    reader = rig.request("reader", keys)
    assert rig.lookup(keys, reader) == [PENDING] * 2
    assert total("longshore_miss_chunks", "deadline") == 0
    while rig.lookup(keys, reader) != [MISS] * 2:
        pass
    assert total("longshore_miss_chunks", "deadline") == 1
    assert total("longshore_miss_chunks", "after_miss") == 1


def test_events_tell_what_each_tier_has_got_and_given_up(rigs: Any, tmp_path: Path) -> None:
    rig, keys = rigs(events=True, **file_settings(tmp_path)), keys_of(2)
    rig.store(keys, [1, 2], rig.request("writer", keys))
    assert rig.manager._runtime.flush(10.0)
    stored = list(rig.manager.take_events())
    assert [(each.medium, each.removed) for each in stored] == [(Medium.CPU, False), (Medium.STORAGE, False)]
    assert all(each.keys == keys for each in stored)
    assert list(rig.manager.take_events()) == []
    lose_host(rig, keys)
    (gone,) = rig.manager.take_events()
    assert (gone.medium, gone.removed, sorted(gone.keys)) == (Medium.CPU, True, sorted(keys))
    read(rig, keys, "reader")
    (back,) = rig.manager.take_events()
    assert (back.medium, back.removed, back.keys) == (Medium.CPU, False, keys)
    rig.manager.reset_cache()
    assert list(rig.manager.take_events()) == []
    assert not rig.manager._events._announced.names  # type: ignore[union-attr]


def test_chunks_stored_again_within_one_step_are_announced(rigs: Any) -> None:
    rig, keys = rigs(events=True), keys_of(2)
    rig.store(keys, [1, 2], rig.request("writer", keys))
    rig.manager.take_events()
    lose_host(rig, keys)
    rig.store(keys, [1, 2], rig.request("again", keys))
    gone, back = rig.manager.take_events()
    assert (gone.removed, sorted(gone.keys), back.removed, back.keys) == (True, sorted(keys), False, keys)
    lose_host(rig, keys)
    assert [each.removed for each in rig.manager.take_events()] == [True]
    assert not rig.manager._events._announced.names  # type: ignore[union-attr]


def test_what_a_router_has_dropped_is_announced_again(rigs: Any, tmp_path: Path) -> None:
    """vLLM says that all blocks are cleared when it has emptied the device alone."""
    rig, keys = rigs(events=True, **file_settings(tmp_path)), keys_of(2)
    rig.store(keys, [1, 2], rig.request("writer", keys))
    assert rig.manager._runtime.flush(10.0)
    rig.manager.take_events()
    rig.manager.device_was_reset()
    again = rig.manager.take_events()
    assert {each.medium for each in again} == {Medium.CPU, Medium.STORAGE}
    assert [(each.removed, sorted(each.keys)) for each in again] == [(False, sorted(keys))] * 2
    assert rig.manager.take_events() == []


def test_a_step_announces_a_bounded_number_of_dropped_chunks(rigs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rig, keys = rigs(events=True), keys_of(4)
    rig.store(keys, [1, 2, 3, 4], rig.request("writer", keys))
    rig.manager.take_events()
    monkeypatch.setattr(events, "STEP", 3)
    rig.manager.device_was_reset()
    steps = [rig.manager.take_events() for _ in range(5)]
    told = [[key for each in step for key in each.keys] for step in steps]
    assert max(map(len, told)) <= 3
    assert sorted(key for step in told for key in step) == sorted(keys)


def test_no_copy_is_announced_twice_after_a_reset(rigs: Any, tmp_path: Path) -> None:
    """Stored before it and not told yet, stored after it, or told before: one event for each tier of each chunk."""
    rig, keys = rigs(events=True, **file_settings(tmp_path)), keys_of(3)
    rig.store(keys[:1], [1], rig.request("told", keys[:1]))
    assert rig.manager._runtime.flush(10.0)
    assert len(rig.manager.take_events()) == 2
    rig.store(keys[1:2], [2], rig.request("untold", keys[1:2]))
    assert rig.manager._runtime.flush(10.0)
    rig.manager.device_was_reset()
    rig.store(keys[2:], [3], rig.request("later", keys[2:]))
    assert rig.manager._runtime.flush(10.0)
    told = [*rig.manager.take_events(), *rig.manager.take_events()]
    assert not any(each.removed for each in told)
    copies = [(each.medium, key) for each in told for key in each.keys]
    assert len(copies) == len(set(copies)) == 6
    rig.store(keys, [1, 2, 3], rig.request("again", keys))
    assert rig.manager._runtime.flush(10.0)
    assert list(rig.manager.take_events()) == []


def test_changed_weights_remove_what_was_announced(rigs: Any) -> None:
    """vLLM says nothing then, as its device cache is not reset yet."""
    rig, keys = rigs(events=True), keys_of(2)
    rig.store(keys, [1, 2], rig.request("writer", keys))
    assert [each.removed for each in rig.manager.take_events()] == [False]
    rig.manager._tiers.reports.weights_changed(0)
    rig.end_step()
    (gone,) = rig.manager.take_events()
    assert (gone.medium, gone.removed, sorted(gone.keys)) == (Medium.CPU, True, sorted(keys))


def test_router_is_brought_up_to_date_after_missing_events(rigs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec, "EVENTS_LIMIT", 3)
    rig, keys = rigs(events=True), keys_of(4)
    rig.store(keys, [1, 2, 3, 4], rig.request("writer", keys))  # twice as many events
    there = [key for each in rig.manager.take_events() for key in each.keys]
    assert sorted(there) == sorted(keys)
    lose_host(rig, keys)
    (gone,) = rig.manager.take_events()
    assert (gone.removed, sorted(gone.keys)) == (True, sorted(keys))


def test_only_names_of_stored_blocks_are_kept(rigs: Any) -> None:
    rig, keys = rigs(events=True, offload="write_through_selective", threshold=2), keys_of(3)
    writer = rig.request("writer", keys)
    assert rig.store(keys, [1, 2, 3], writer) == []
    assert rig.manager._events._announced.names == rig.manager._events._given == {}
    output = rig.manager.prepare_store(keys, writer)
    assert output.keys_to_store == keys
    for worker in rig.workers:
        worker.reports.stored(output.store_spec.ticket, 0, output.store_spec.indices[:2], output.store_spec.indices[2:])
    rig.manager.complete_store(set(keys), writer)
    assert list(rig.manager._events._given.values()) == keys[:2]
    (stored,) = rig.manager.take_events()
    assert stored.keys == keys[:2]
    assert list(rig.manager._events._announced.names.values()) == keys[:2]


def test_nothing_is_recorded_for_an_engine_that_publishes_no_events(rigs: Any) -> None:
    rig, keys = rigs(), keys_of(2)
    rig.store(keys, [1, 2], rig.request("writer", keys))
    assert list(rig.manager.take_events()) == []
    assert rig.cache.events() == []


def test_an_error_in_the_metrics_disables_no_tier(
    rigs: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig, keys, fired = rigs(), keys_of(2), []
    rig.store(keys, [1, 2], rig.request("one", keys))

    def broken(*arguments: Any) -> None:
        fired.append(arguments)
        raise ZeroDivisionError("an error of ours")

    with monkeypatch.context() as patched:
        patched.setattr(OffloadingMetrics, "_samples", broken)
        assert [rig.manager.get_stats() for _ in range(3)] == [None] * 3
    assert len(fired) == 3
    assert rig.manager._runtime.fault is None
    read(rig, keys, "two")
    told = rig.manager.get_stats().data["data"]
    assert told["longshore_internal_errors"] == {(): 3}
    assert told["longshore_control_plane_faults"] == {(): 0}
    (logged,) = [record for record in caplog.records if "metrics could not be reported" in record.message]
    assert logged.exc_info
