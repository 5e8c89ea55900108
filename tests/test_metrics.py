"""Every label is exported from the start, at zero; afterwards metrics are the counters of the control plane."""

from __future__ import annotations

import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest

from longshore.boundary import Route, Slabs, Status
from longshore.cache import CacheSettings, DropReason, GroupKeys, MissReason, Protection, TieredCache, TierSpec
from longshore.errors import CacheError
from longshore.layout import from_rows
from longshore.metrics import LongshoreCollector
from longshore.monitoring.metric_names import METRICS
from longshore.runtime import BlockGuard, Runtime
from longshore.tiers.arena import DISK_PAGE, Arena, ArenaSettings, Fallback
from longshore.tiers.host import HostSlabs
from longshore.transfer import CpuDevice, TransferEngine
from pinning import PinningDevice
from scripted import Scripted

IMAGE_BYTES = 4096
PATH = [bytes([i]) * 32 for i in range(2)]
ROUTES = ("device->host", "host->device", "host->file", "file->host")


def registry(runtime: Runtime) -> CollectorRegistry:
    found = CollectorRegistry()
    found.register(LongshoreCollector(runtime))
    return found


def make() -> tuple[Runtime, Scripted]:
    cache = TieredCache([TierSpec("host", 4, IMAGE_BYTES), TierSpec("file", 8, IMAGE_BYTES)], CacheSettings())
    mover = Scripted(*(Route(*route.split("->")) for route in ROUTES))
    return Runtime(cache, [mover]), mover


def test_every_label_is_exported_at_zero() -> None:
    runtime, _ = make()
    found = registry(runtime)
    for tier in ("host", "file"):
        for name in ("hit", "evicted", "lost"):
            assert found.get_sample_value(f"longshore_{name}_chunks_total", {"tier": tier}) == 0
        for reason in DropReason:
            labels = {"tier": tier, "reason": reason.value}
            assert found.get_sample_value("longshore_dropped_chunks_total", labels) == 0
        assert found.get_sample_value("longshore_used_bytes", {"tier": tier}) == 0
    for miss in MissReason:
        assert found.get_sample_value("longshore_miss_chunks_total", {"reason": miss.value}) == 0
    for route in ROUTES:
        for name in ("moved_bytes", "moving_seconds", "failed_chunks"):
            assert found.get_sample_value(f"longshore_{name}_total", {"route": route}) == 0
    assert found.get_sample_value("longshore_capacity_bytes", {"tier": "file"}) == 8 * IMAGE_BYTES
    assert found.get_sample_value("longshore_leases") == 0
    assert found.get_sample_value("longshore_jobs_in_flight") == 0
    for name in ("block_reuse_waits", "block_reuse_wait_seconds", "block_reuse_timeouts", "recomputed_chunks"):
        assert found.get_sample_value(f"longshore_{name}_total") == 0


def test_metrics_are_the_counters_of_the_control_plane() -> None:
    runtime, mover = make()
    found = registry(runtime)
    with runtime.batch() as cache:
        cache.store({0: GroupKeys(PATH)}, {0: (0, 1)})
    assert found.get_sample_value("longshore_jobs_in_flight") == 1
    mover.end(Status.OK, Status.IO_ERROR)
    runtime.pump()
    with runtime.batch() as cache:
        cache.lookup({0: GroupKeys(PATH)}, 0.0, protect=Protection.STEP, count=False)
        assert cache.protected == 1
    assert found.get_sample_value("longshore_leases") == 0
    with runtime.batch() as cache:
        hold = cache.lookup({0: GroupKeys(PATH)}, 0.0).lease
        assert hold is not None
        cache.load(hold, {0: (5,)})
    mover.end(Status.OK)
    assert runtime.wait_load(hold, 1.0).outcome == (1, ("host",))
    assert found.get_sample_value("longshore_hit_chunks_total", {"tier": "host"}) == 1
    assert found.get_sample_value("longshore_miss_chunks_total", {"reason": "absent"}) == 1
    assert found.get_sample_value("longshore_lost_chunks_total", {"tier": "host"}) == 1
    assert found.get_sample_value("longshore_moved_bytes_total", {"route": "device->host"}) == IMAGE_BYTES
    assert found.get_sample_value("longshore_failed_chunks_total", {"route": "device->host"}) == 1
    assert found.get_sample_value("longshore_used_bytes", {"tier": "host"}) == IMAGE_BYTES
    assert found.get_sample_value("longshore_leases") == 1
    labels = {"tier": "host", "reason": "write_failed"}
    assert found.get_sample_value("longshore_dropped_chunks_total", labels) == 1


def test_waits_for_device_blocks_and_late_blocks_are_counted() -> None:
    ticks = iter(range(1000))
    cache = TieredCache([TierSpec("host", 4, IMAGE_BYTES)])
    runtime = Runtime(cache, [Scripted(Route("device", "host"))], clock=lambda: float(next(ticks)))
    found, guard = registry(runtime), BlockGuard(runtime, 1.0)
    with runtime.batch() as cache:
        job = cache.store({0: GroupKeys(PATH)}, {0: (0, 1)})[0].job
    assert job is not None
    guard.add(job, (0, 1))
    assert guard.settle([0, 1, 2]) == [2]
    assert found.get_sample_value("longshore_block_reuse_waits_total") == 1
    assert (found.get_sample_value("longshore_block_reuse_wait_seconds_total") or 0) >= 1
    assert found.get_sample_value("longshore_block_reuse_timeouts_total") == 2


def test_each_metric_is_described_and_exported_once() -> None:
    host = HostSlabs(Arena(2 * DISK_PAGE), Slabs.of_one_size(DISK_PAGE, 2))
    engine = TransferEngine(from_rows(torch.zeros(4, 8), pages_per_block=2, block_size=4), CpuDevice(), host)
    names = [family.name for family in LongshoreCollector(make()[0], host, engine).collect()]
    engine.close()
    assert len(names) == len(set(names))
    assert set(names) <= METRICS.keys()


def test_a_scrape_starts_no_transfer_and_works_after_close() -> None:
    runtime, mover = make()
    found = registry(runtime)
    with runtime.batch() as cache:
        cache.store({0: GroupKeys(PATH[:1])}, {0: (0,)})
    polls = mover.polls
    assert b"longshore_jobs_in_flight 1.0" in generate_latest(found)
    assert mover.polls == polls
    mover.end(Status.OK)
    runtime.close(0.0)
    assert b"longshore_jobs_in_flight 0.0" in generate_latest(found)


def test_arena_sizes_and_fallbacks_are_exported_from_the_start() -> None:
    arena = Arena(8 * DISK_PAGE, ArenaSettings(shared=True))
    found = CollectorRegistry()
    found.register(LongshoreCollector(make()[0], HostSlabs(arena, Slabs.of_one_size(DISK_PAGE, 8))))
    for reason in Fallback:
        assert found.get_sample_value("longshore_arena_fallbacks_total", {"reason": reason.value}) == 0
    values = {"bytes": 8 * DISK_PAGE, "huge_bytes": 0, "registered_bytes": 0, "registered_pieces": 0}
    for name, value in {**values, "numa_bound": 0, "shared": 1}.items():
        assert found.get_sample_value(f"longshore_arena_{name}") == value
    arena.register(PinningDevice(refused={1}), DISK_PAGE, largest=2 * DISK_PAGE)
    assert found.get_sample_value("longshore_arena_registered_bytes") == 6 * DISK_PAGE
    assert found.get_sample_value("longshore_arena_registered_pieces") == 3
    assert found.get_sample_value("longshore_arena_fallbacks_total", {"reason": "registration"}) == 1
    arena.close()
    assert found.get_sample_value("longshore_arena_registered_bytes") == 0
    assert found.get_sample_value("longshore_arena_bytes") == 8 * DISK_PAGE


def test_without_a_host_tier_there_are_no_arena_metrics() -> None:
    assert b"longshore_arena" not in generate_latest(registry(make()[0]))


def test_queues_and_device_fallbacks_of_an_engine_are_exported() -> None:
    class Slow(CpuDevice):
        def fallbacks(self) -> dict[str, int]:
            return {"new_event": 3}

    host = HostSlabs(Arena(2 * DISK_PAGE), Slabs.of_one_size(DISK_PAGE, 2))
    engine = TransferEngine(from_rows(torch.zeros(4, 8), pages_per_block=2, block_size=4), Slow(), host)
    found = CollectorRegistry()
    found.register(LongshoreCollector(make()[0], engine=engine))
    assert found.get_sample_value("longshore_queued_transfers", {"destination": "host", "class": "write"}) == 0
    assert found.get_sample_value("longshore_refused_transfers_total") == 0
    assert found.get_sample_value("longshore_device_fallbacks_total", {"reason": "new_event"}) == 3
    engine.close()
    assert found.get_sample_value("longshore_device_fallbacks_total", {"reason": "new_event"}) == 3


def test_probed_chunks_are_counted_by_answer() -> None:
    cache = TieredCache([TierSpec("host", 4, IMAGE_BYTES)], remote=["store"])
    runtime = Runtime(cache, [])
    found, labels = registry(runtime), {"tier": "store", "answer": "no_answer"}
    assert found.get_sample_value("longshore_probed_chunks_total", labels) == 0
    with runtime.batch() as control:
        control.lookup({0: GroupKeys(PATH)}, 0.0)  # nobody is there to ask
    assert found.get_sample_value("longshore_probed_chunks_total", labels) == len(PATH)
    assert found.get_sample_value("longshore_dropped_chunks_total", {"tier": "store", "reason": "write_failed"}) == 0


def test_a_repeated_lookup_is_counted_when_requested() -> None:
    runtime, _ = make()
    found = registry(runtime)
    with runtime.batch() as cache:
        for _ in range(5):
            cache.lookup({0: GroupKeys(PATH)}, 0.0, count=False)
        assert found.get_sample_value("longshore_miss_chunks_total", {"reason": "absent"}) == 0
        cache.lookup({0: GroupKeys(PATH)}, 0.0, protect=Protection.NONE, request="mine")
    assert found.get_sample_value("longshore_miss_chunks_total", {"reason": "absent"}) == len(PATH)


def test_a_device_pool_is_not_replaced_while_jobs_use_it() -> None:
    runtime, mover = make()
    with runtime.batch() as cache:
        cache.store({0: GroupKeys(PATH[:1])}, {0: (0,)})
        with pytest.raises(CacheError, match="1 jobs in flight"):
            cache.replace_device(8)
    mover.end(Status.OK)
    runtime.pump()
    with runtime.batch() as cache:
        cache.replace_device(8)
        with pytest.raises(CacheError, match=r"\[0, 8\)"):
            cache.store({0: GroupKeys(PATH)}, {0: (8, 9)})


def test_a_mover_that_is_removed_leaves_no_job_behind() -> None:
    runtime, mover = make()
    with runtime.batch() as cache:
        job = cache.store({0: GroupKeys(PATH[:1])}, {0: (0,)})[0].job
    assert job is not None
    mover.end(Status.OK)
    runtime.remove(mover, 1.0)
    assert not runtime.in_flight(job)
    with runtime.batch() as cache:
        late = cache.store({0: GroupKeys(PATH)}, {0: (0, 1)})[0].job
    assert late is None or not runtime.in_flight(late)
