"""Manager and workers through vLLM's abstract interface: real bytes, no engine."""

from __future__ import annotations

import hashlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LookupResult,
    OffloadPolicy,
    ReqContext,
    make_offload_key,
)
from vllm_kit import BLOCKS, Rig, file_settings, keys_of

from longshore.cache import DropReason, MissReason, Residency
from longshore.cache.eviction_policies.hit_rates import USES
from longshore.engines.vllm.requests import cache_keys
from longshore.errors import ConfigError, DeviceError, EngineError
from longshore.transfer.ordering import Lane

HIT, MISS, PENDING = LookupResult.HIT, LookupResult.MISS, LookupResult.HIT_PENDING


@pytest.mark.parametrize("size", [16, 32])
def test_keys_differ_by_group_and_start_with_digest_bytes(size: int) -> None:
    digests = [hashlib.sha256(bytes((at,))).digest()[:size] for at in range(64)]
    theirs = [make_offload_key(digest, group) for digest in digests for group in (0, 1)]
    names = cache_keys(theirs)
    assert len(set(names)) == len(theirs)
    assert {len(name) for name in names} == {32}
    assert len({name[0] for name in names}) > 32


@pytest.mark.parametrize(("world", "per_chunk"), [(1, 1), (1, 4), (2, 1), (2, 2)])
def test_stored_bytes_load_into_other_blocks(rigs: Any, world: int, per_chunk: int) -> None:
    rig, keys = rigs(world=world, per_chunk=per_chunk), keys_of(2)
    first = rig.request("first", keys)
    assert rig.lookup(keys, first) == [MISS, MISS]
    blocks = list(range(1, 1 + 2 * per_chunk))
    before = [[rig.bytes_of(rank, block) for block in blocks] for rank in range(world)]
    assert rig.store(keys, blocks, first) == keys
    second = rig.request("second", keys)
    assert rig.lookup(keys, second) == [HIT, HIT]
    others = [BLOCKS - 1 - at for at in range(2 * per_chunk)]
    rig.load(keys, others, second)
    for rank in range(world):
        for at, block in enumerate(others):
            assert all(map(torch.equal, rig.bytes_of(rank, block), before[rank][at]))
    for context in (first, second):
        rig.manager.on_request_finished(context)
    assert rig.cache.leases == rig.cache.protected == 0 and rig.cache.jobs_in_flight == 0
    rig.cache.check_integrity()


def test_two_groups_have_keys_and_chunks_of_their_own(rigs: Any) -> None:
    rig = rigs(groups=(0, 3))
    for group, block in ((0, 1), (3, 2)):
        keys = keys_of(1, group)
        context = rig.request(f"of {group}", keys)
        rig.store(keys, [block], context)
    for group, block in ((0, 1), (3, 2)):
        keys = keys_of(1, group)
        context = rig.request(f"again {group}", keys)
        assert rig.lookup(keys, context) == [HIT]
        rig.load(keys, [9], context)
        assert all(map(torch.equal, rig.bytes_of(0, 9), rig.bytes_of(0, block)))


def test_chunk_without_a_report_of_every_rank_is_a_miss(rigs: Any) -> None:
    rig, keys = rigs(world=2), keys_of(2)
    context = rig.request("one", keys)
    output = rig.manager.prepare_store(keys, context)
    rig.copy_in(output.store_spec, [1, 2], ranks=[0])
    rig.manager.complete_store(set(keys), context)  # which vLLM says whatever happened
    assert HIT not in rig.lookup(keys, rig.request("two", keys))
    assert rig.manager.has_pending_work(), "a worker may still write there"
    rig.workers[1].reports.stored(output.store_spec.ticket, 1, [], output.store_spec.indices)
    rig.end_step()
    assert rig.lookup(keys, rig.request("three", keys)) == [MISS, MISS]
    assert rig.cache.counters.drops["host"].total() == 2
    assert not rig.manager.has_pending_work()


def test_a_chunk_with_a_freed_block_is_dropped_and_counted(rigs: Any) -> None:
    rig, keys = rigs(per_chunk=4), keys_of(1)
    context = rig.request("one", keys)
    output = rig.manager.prepare_store(keys, context)
    rig.copy_in(output.store_spec, [1, 2, 3])  # the scheduler leaves out a block that a window has slid past
    rig.manager.complete_store(set(keys), context)
    assert rig.lookup(keys, rig.request("two", keys)) == [MISS]
    assert rig.cache.counters.drops["host"].total() == 1
    assert rig.cache.jobs_in_flight == 0


def test_lookup_waits_for_a_store_until_load_timeout(rigs: Any) -> None:
    rig, keys = rigs(load_timeout=0.2), keys_of(1)
    writer = rig.request("writer", keys)
    rig.store(keys, [1], writer, complete=False)
    reader = rig.request("reader", keys)
    assert rig.lookup(keys, reader) == [PENDING]
    assert rig.lookup(keys, reader) == [PENDING]
    now = rig.manager._runtime.clock()
    while rig.manager._runtime.clock() < now + 0.25:
        pass
    assert rig.lookup(keys, reader) == [MISS]


def test_a_reset_leaves_slots_alone_until_they_are_reported(rigs: Any) -> None:
    rig, old, new = rigs(host_size=8192), keys_of(2), keys_of(2, name="new")
    context = rig.request("one", old)
    output = rig.manager.prepare_store(old, context)
    rig.manager.reset_cache()
    assert rig.lookup(old, rig.request("two", old)) == [MISS, MISS]
    other = rig.request("three", new)
    assert rig.store(new, [3, 4], other) == []  # the workers may still write into both slots
    assert rig.manager.has_pending_work()
    rig.copy_in(output.store_spec, [1, 2])
    rig.end_step()
    assert not rig.manager.has_pending_work()
    drops = rig.cache.counters.drops["host"]
    assert (drops[DropReason.CANCELLED], drops[DropReason.WRITE_FAILED]) == (2, 0)
    assert rig.store(new, [3, 4], other) == new
    rig.cache.check_integrity()


def test_reset_leaves_slots_alone_until_workers_have_flushed(rigs: Any) -> None:
    rig, old, new = rigs(host_size=8192), keys_of(2), keys_of(2, name="new")
    rig.store(old[:1], [1], rig.request("one", old))
    reader = rig.request("two", old)
    assert rig.lookup(old[:1], reader) == [HIT]
    rig.manager.prepare_load(old[:1], reader)
    assert rig.manager.prepare_store(old[1:], reader).keys_to_store == old[1:]
    rig.manager.reset_cache()
    assert rig.store(new, [3, 4], rig.request("three", new)) == []
    rig.manager.on_reset_flushed()  # which vLLM 0.33 says when all workers have reported
    assert not rig.manager.has_pending_work()
    assert rig.cache.counters.drops["host"][DropReason.CANCELLED] == 1
    assert rig.store(new, [3, 4], rig.request("four", new)) == new
    rig.cache.check_integrity()


def test_reset_keeps_slots_of_loads_until_they_end(rigs: Any) -> None:
    rig, old, new = rigs(host_size=4096), keys_of(1), keys_of(1, name="new")
    rig.store(old, [1], rig.request("one", old))
    reader = rig.request("two", old)
    assert rig.lookup(old, reader) == [HIT]
    spec = rig.manager.prepare_load(old, reader)
    rig.manager.reset_cache()
    assert rig.store(new, [3], rig.request("three", new)) == []
    rig.run("submit_load", spec, rig._theirs(spec, [9]))
    rig.end_step()
    assert rig.store(new, [3], rig.request("four", new)) == new


def test_requests_ending_at_any_point_leak_nothing(rigs: Any) -> None:
    rig, keys = rigs(), keys_of(3)
    rig.store(keys, [1, 2, 3], rig.request("writer", keys))
    looked, loading = rig.request("looked", keys), rig.request("loading", keys)
    rig.lookup(keys, looked)
    rig.manager.on_request_finished(looked)
    rig.lookup(keys, loading)
    spec = rig.manager.prepare_load(keys, loading)
    rig.manager.on_request_finished(loading)  # aborted: its completion comes later
    rig.run("submit_load", spec, rig._theirs(spec, [7, 8, 9]))
    rig.manager.complete_load(set(keys), loading)
    assert rig.cache.leases == rig.cache.protected == 0 and rig.cache.jobs_in_flight == 0
    assert set(rig.manager._requests) == {"writer"}


def test_file_tier_hit_is_prefetched_then_loaded(rigs: Any, tmp_path: Path) -> None:
    rig, keys = rigs(**file_settings(tmp_path)), keys_of(5)
    rig.store(keys, [1, 2, 3, 4, 5], rig.request("writer", keys))
    before = [rig.bytes_of(0, block) for block in range(1, 6)]
    assert rig.manager._runtime.flush(10.0)
    with rig.manager._runtime.batch() as cache:
        assert cache.discard(cache_keys(keys), "host") == 5
    reader = rig.request("reader", keys)
    assert rig.lookup(keys, reader) == [PENDING] * 5
    assert rig.manager._runtime._wait(lambda: not rig.cache.jobs_in_flight, 10.0)
    assert rig.lookup(keys, reader) == [HIT] * 5
    assert rig.manager.get_load_source(keys[0], reader).value == "disk"
    rig.load(keys, [11, 12, 13, 14, 15], reader)
    for at in range(5):
        assert all(map(torch.equal, rig.bytes_of(0, 11 + at), before[at]))
    rig.manager.on_request_finished(reader)
    assert rig.cache.leases == rig.cache.protected == 0


def test_corrupt_record_is_a_miss_for_every_waiting_request(rigs: Any, tmp_path: Path) -> None:
    rig, keys = rigs(**file_settings(tmp_path)), keys_of(2)
    rig.store(keys, [1, 2], rig.request("writer", keys))
    assert rig.manager._runtime.flush(10.0)
    with rig.manager._runtime.batch() as cache:
        assert cache.discard(cache_keys(keys), "host") == 2
    segment = tmp_path / "tier" / "segment"
    segment.write_bytes(bytes(byte ^ 255 for byte in segment.read_bytes()))
    first, second = rig.request("first", keys), rig.request("second", keys)
    host = rig.manager._tiers.file._supervisor.process.pid  # type: ignore[union-attr]
    os.kill(host, signal.SIGSTOP)
    assert rig.lookup(keys, first) == [PENDING] * 2
    assert [rig.manager.lookup(key, second) for key in keys] == [PENDING] * 2
    os.kill(host, signal.SIGCONT)
    assert rig.manager._runtime._wait(lambda: not rig.cache.jobs_in_flight, 10.0)
    rig.end_step()  # which brings up what the second one was promised
    assert rig.cache.counters.lost["file"] == 2
    assert rig.lookup(keys, second) == [MISS] * 2


def test_later_process_hits_stored_blocks_unless_the_model_differs(tmp_path: Path) -> None:
    keys, settings = keys_of(2), file_settings(tmp_path)
    for expected in (MISS, PENDING):
        rig = Rig(**settings)
        context = rig.request("one", keys)
        assert rig.lookup(keys, context) == [expected] * 2
        if expected is MISS:
            rig.store(keys, [1, 2], context)
        rig.close()
    (tmp_path / "model" / "config.json").write_text('{"rope_theta": 2}')
    rig = Rig(**settings)
    assert rig.lookup(keys, rig.request("one", keys)) == [MISS] * 2
    rig.close()


def test_a_request_whose_load_failed_gets_no_other(rigs: Any) -> None:
    rig, keys = rigs(), keys_of(2)
    rig.store(keys, [1, 2], rig.request("writer", keys))
    unlucky = rig.request("unlucky", keys)
    assert rig.lookup(keys, unlucky) == [HIT, HIT]
    spec = rig.manager.prepare_load(keys, unlucky)
    rig.workers[0].reports_failures = True
    rig.run("submit_load", spec, rig._theirs(spec, [BLOCKS, BLOCKS + 1]))  # blocks that there are not
    assert rig.workers[0].take_failed({0, 1, 2, 3}) == {1}
    rig.manager.complete_load(set(keys), unlucky)
    assert rig.lookup(keys, unlucky) == [MISS, MISS]
    assert rig.lookup(keys, rig.request("another", keys)) == [HIT, HIT]
    assert rig.cache.jobs_in_flight == 0


@pytest.mark.parametrize("step", ["_transfer", "submit"])
def test_internal_error_of_a_worker_fails_its_load_alone(
    rigs: Any, step: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM would stop the engine if it were raised."""
    rig, keys = rigs(), keys_of(2)
    rig.store(keys, [1, 2], rig.request("writer", keys))
    unlucky, worker = rig.request("unlucky", keys), rig.workers[0]
    assert rig.lookup(keys, unlucky) == [HIT, HIT]
    worker.reports_failures = True
    with monkeypatch.context() as broken:
        broken.setattr(worker if step == "_transfer" else worker.engine, step, lambda _: {}["of the test"])
        rig.load(keys, [3, 4], unlucky)
    assert worker.take_failed({0, 1, 2, 3}) == {1}
    (logged,) = [record for record in caplog.records if "internal error: transfer job" in record.message]
    assert logged.exc_info
    counters = rig.cache.counters
    assert +counters.misses == {MissReason.INTERNAL_ERROR: 2}
    assert counters.internal_errors == 1
    assert rig.lookup(keys, rig.request("another", keys)) == [HIT, HIT]
    assert rig.cache.jobs_in_flight == 0


@pytest.mark.parametrize(
    ("error", "expected"), [(KeyError("of the test"), 1), (DeviceError("the device refuses copies"), 0)]
)
def test_internal_errors_of_stores_are_counted_apart_from_device_errors(
    rigs: Any, error: Exception, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, keys, fired = rigs(world=2), keys_of(2), list[object]()

    def broken(transfer: object) -> None:
        fired.append(transfer)
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(rig.workers[1].engine, "submit", broken)
        rig.store(keys, [1, 2], rig.request("one", keys))
    assert fired
    assert rig.cache.counters.internal_errors == expected
    assert rig.cache.counters.drops["host"][DropReason.WRITE_FAILED] == 2
    assert rig.lookup(keys, rig.request("two", keys)) == [MISS, MISS]


def test_load_ended_by_a_broken_transfer_engine_is_internal_error(rigs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rig, keys, fired = rigs(), keys_of(2), list[object]()
    rig.store(keys, [1, 2], rig.request("writer", keys))
    unlucky, worker = rig.request("unlucky", keys), rig.workers[0]
    assert rig.lookup(keys, unlucky) == [HIT, HIT]
    worker.reports_failures = True

    def broken(*arguments: object) -> None:
        fired.append(arguments)
        raise ZeroDivisionError("of the test")

    with monkeypatch.context() as patched:
        patched.setattr(Lane, "_retire", broken)
        rig.load(keys, [3, 4], unlucky)
    assert len(fired) == 1, "the engine is closed, and refuses the second try"
    assert rig.cache.counters.misses[MissReason.INTERNAL_ERROR] == 2
    assert rig.cache.counters.misses[MissReason.DEVICE_ERROR] == 0


def test_start_warns_under_the_plain_connector(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(world=2)
    rig.close()
    (said,) = [record.getMessage() for record in caplog.records if "OffloadingConnector" in record.getMessage()]
    assert "stop the engine" in said
    assert "longshore vllm-config" in said


@pytest.mark.parametrize(
    ("change", "warned"),
    [
        ({}, 1),
        ({"vllm": {"shutdown_timeout": 120}}, 0),
        ({"backup": "write_through"}, 0),
        ({"file_path": None, "file_size": 0}, 0),
    ],
)
def test_start_warns_when_shutdown_would_lose_unwritten_blocks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: dict[str, Any], warned: int
) -> None:
    Rig(world=2, **{**file_settings(tmp_path), **change}).close()
    said = [record.getMessage() for record in caplog.records if "--shutdown-timeout" in record.getMessage()]
    assert len(said) == warned
    assert all("backup: write_through" in each for each in said)


def test_what_cannot_be_served_is_refused_at_start() -> None:
    with pytest.raises(EngineError, match="pipeline"):
        Rig(parallel={"pp_size": 2})
    with pytest.raises(ConfigError, match="host_size"):
        Rig(hots_size="1GiB")
    with pytest.raises(ConfigError, match="one chunk image"):
        Rig(host_size=16)


def test_promised_loads_stay_in_place_after_a_fault(rigs: Any) -> None:
    rig, keys = rigs(), keys_of(5)
    assert rig.store(keys, [1, 2, 3, 4, 5], rig.request("first", keys)) == keys
    second = rig.request("second", [*keys[:3], keys[4], keys[3]])
    assert [rig.manager.lookup(key, second) for key in keys] == [HIT] * 5
    rig.manager._runtime.fail(RuntimeError("by the test"))
    with rig.manager._runtime.locked() as cache:
        index = cache._state.index
        expected = [index.slot[0][index.get(key)] for key in cache_keys(keys[:4])]
    assert list(rig.manager.prepare_load(keys[:4], second).indices) == expected


@pytest.mark.parametrize("verb", ["lookup", "prepare_load", "prepare_store", "complete_store", "on_schedule_end"])
def test_inconsistent_cache_disables_tiers_but_not_the_engine(
    rigs: Any, verb: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it is noticed first: vLLM gets an answer, and computes."""
    rig, keys, fired = rigs(), keys_of(4), []
    rig.workers[0].reports_failures = True
    first = rig.request("first", keys)
    assert rig.store(keys, [1, 2, 3, 4], first) == keys
    output = rig.manager.prepare_store(keys_of(2, name="open"), rig.request("open", keys_of(2, name="open")))
    second = rig.request("second", keys)
    if verb == "prepare_load":
        assert [rig.manager.lookup(key, second) for key in keys] == [HIT] * 4

    def damaged(*arguments: Any, **named: Any) -> Any:
        fired.append(verb)
        raise IndexError("damaged by the test")

    broken = {"lookup": "lookup", "prepare_load": "load", "prepare_store": "store", "complete_store": "apply_results"}
    method = broken.get(verb, "end_step")
    monkeypatch.setattr(rig.cache, method, rig.manager._runtime._calls._watched(method, damaged))
    assert verb != "lookup" or rig.manager.lookup(keys[0], second) is MISS
    spec = rig.manager.prepare_load(keys, second) if verb == "prepare_load" else None
    rig.manager.prepare_store(keys_of(2, name="new"), first)
    rig.manager.complete_store(set(output.keys_to_store), first)
    rig.end_step()
    assert fired
    assert rig.manager._runtime.faults == 1
    (told,) = [record for record in caplog.records if "all tiers disabled" in record.message]
    assert told.levelname == "ERROR"
    assert told.exc_info
    if spec is not None:  # what was promised is in place
        rig.run("submit_load", spec, GPULoadStoreSpec([5, 6, 7, 8], group_sizes=[4], block_indices=[0]))
        assert not rig.workers[0].failed
        rig.manager.complete_load(set(keys), second)
        lost = rig.cache._state.index.get(cache_keys(keys)[2])
        rig.cache._state.pools[0].node[rig.cache._state.index.slot[0][lost]] = 0
        spec = rig.manager.prepare_load(keys, second)
        rig.run("submit_load", spec, GPULoadStoreSpec([5, 6, 7, 8], group_sizes=[4], block_indices=[0]))
        assert rig.workers[0].failed, "as books disagree on a slot"
    assert rig.manager.lookup(keys[0], rig.request("third", keys)) is MISS
    assert rig.manager.prepare_store(keys, second).keys_to_store == []
    for context in (first, second):
        rig.manager.on_request_finished(context)
    before = len(rig.manager._requests)
    rig.manager.set_adapter("later", object())
    rig.manager.on_request_finished(rig.request("later", keys))
    assert len(rig.manager._requests) == before, "nothing is kept of requests that come later"
    rig.manager.reset_cache()
    stats = rig.manager.get_stats()
    assert "longshore_control_plane_faults" in str(stats.data)


def test_request_advances_the_eviction_clock_and_use_counts_once(rigs: Any) -> None:
    rig, keys = rigs(), keys_of(2)
    policy = rig.cache._state.policies[0]
    first = rig.request("first", keys)
    rig.lookup(keys, first)
    rig.store(keys, [1, 2], first)
    rig.manager.on_request_finished(first)
    rig.lookup(keys_of(1, name="another"), rig.request("other"))
    second = rig.request("second", keys)
    for _ in range(3):  # as vLLM does while the request waits
        assert rig.lookup(keys, second) == [HIT, HIT]
    rig.load(keys, [3, 4], second)
    for _ in range(2):
        rig.store(keys, [3, 4], second)
    assert policy._now == 3
    nodes = [rig.cache._state.index.get(key) for key in cache_keys(keys)]
    assert [(policy._used[node], ((policy._state[node] & USES) >> 3) - 1) for node in nodes] == [(3, 2)] * 2


def test_vllm_is_asked_to_offer_whole_paths(rigs: Any) -> None:
    context = ReqContext(req_id="one")
    assert rigs().manager.on_new_request(context).policy is OffloadPolicy.REQUEST_LEVEL


def test_tails_are_evicted_before_heads_of_a_path(rigs: Any) -> None:
    rig, one, two = rigs(host_size=8 * 4096), keys_of(6), keys_of(4, name="two")
    rig.store(one, range(1, 7), rig.request("one", one))
    rig.store(two, range(7, 11), rig.request("two", two))
    assert rig.lookup(one, rig.request("again", one)) == [HIT] * 5 + [MISS]  # the end of `two` was let pass
    rig.cache.check_integrity()


def test_offer_with_a_gap_is_taken_to_the_gap(rigs: Any) -> None:
    rig, keys = rigs(), keys_of(6)
    context = rig.request("one", keys)
    assert rig.store([*keys[:2], *keys[3:]], range(1, 6), context) == keys[:2]
    assert rig.store(keys[4:], [5, 6], context) == keys[4:], "orphans, as the chunk before them is in no tier"
    assert rig.store(keys, range(1, 7), context) == keys[2:4], "a whole path heals it"
    assert rig.lookup(keys, rig.request("two", keys)) == [HIT] * 6
    rig.cache.check_integrity()


def test_slot_is_not_reused_while_a_worker_may_write_it(rigs: Any) -> None:
    """The parent of a chunk under way is lost, and a later store of both ends first, under the same keys."""
    rig, keys, others = rigs(host_size=3 * 4096), keys_of(2), keys_of(3, name="other")
    worker, first = rig.workers[0], rig.request("first", keys)
    parent = rig.manager.prepare_store(keys[:1], first)
    worker.reports.stored(parent.store_spec.ticket, 0, [], parent.store_spec.indices)
    child = rig.manager.prepare_store(keys[1:], first)  # the worker copies it from here on
    rig.manager.complete_store(set(keys[:1]), first)
    second = rig.request("second", keys)
    again = rig.manager.prepare_store(keys, second)
    assert again.keys_to_store == keys
    worker.reports.stored(again.store_spec.ticket, 0, [], again.store_spec.indices)
    rig.manager.complete_store(set(keys), second)
    taken = rig.manager.prepare_store(others, rig.request("third", others))
    assert not set(taken.store_spec.indices) & set(child.store_spec.indices)
    worker.reports.stored(child.store_spec.ticket, 0, child.store_spec.indices, [])
    rig.end_step()
    assert not rig.manager.has_pending_work()
    rig.cache.check_integrity()


def test_chunks_that_cannot_be_read_after_a_fault_are_logged(
    rigs: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig, keys, fired = rigs(), keys_of(2), []
    assert rig.store(keys, [1, 2], rig.request("first", keys)) == keys
    second = rig.request("second", keys)
    assert [rig.manager.lookup(key, second) for key in keys] == [HIT] * 2
    rig.manager._runtime.fail(RuntimeError("by the test"))

    def damaged(residency: Residency) -> None:
        fired.append(residency)
        raise IndexError("damaged by the test")

    monkeypatch.setattr(Residency, "slots", damaged)
    assert list(rig.manager.prepare_load(keys, second).indices) == []
    assert fired
    (told,) = [record for record in caplog.records if "cannot be read; they are recomputed" in record.message]
    assert told.exc_info
