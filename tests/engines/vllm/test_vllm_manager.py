"""Manager and workers through vLLM's abstract interface: real bytes, no engine."""

from __future__ import annotations

import hashlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.kv_offload.base import LookupResult, make_offload_key
from vllm_kit import BLOCKS, Rig, file_settings, keys_of

from longshore.engines.vllm.keys import ours
from longshore.errors import ConfigError, EngineError

HIT, MISS, PENDING = LookupResult.HIT, LookupResult.MISS, LookupResult.HIT_PENDING


@pytest.mark.parametrize("size", [16, 32])
def test_our_keys_differ_by_group_and_begin_with_what_is_spread(size: int) -> None:
    digests = [hashlib.sha256(bytes((at,))).digest()[:size] for at in range(64)]
    theirs = [make_offload_key(digest, group) for digest in digests for group in (0, 1)]
    names = ours(theirs)
    assert len(set(names)) == len(theirs)
    assert {len(name) for name in names} == {32}
    assert len({name[0] for name in names}) > 32


@pytest.mark.parametrize(("world", "per_chunk"), [(1, 1), (1, 4), (2, 1), (2, 2)])
def test_what_was_stored_comes_back_into_other_blocks(rigs: Any, world: int, per_chunk: int) -> None:
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
    assert rig.cache.held == 0 and rig.cache.jobs_in_flight == 0
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


def test_a_rank_that_did_not_stamp_keeps_a_chunk_from_being_found(rigs: Any) -> None:
    rig, keys = rigs(world=2), keys_of(2)
    context = rig.request("one", keys)
    output = rig.manager.prepare_store(keys, context)
    rig.copy_in(output.store_spec, [1, 2], ranks=[0])
    rig.manager.complete_store(set(keys), context)  # which vLLM says whatever happened
    assert rig.lookup(keys, rig.request("two", keys)) == [MISS, MISS]
    assert rig.cache.counters.drops["host"].total() == 2


def test_a_chunk_with_a_freed_block_is_dropped_and_counted(rigs: Any) -> None:
    rig, keys = rigs(per_chunk=4), keys_of(1)
    context = rig.request("one", keys)
    output = rig.manager.prepare_store(keys, context)
    rig.copy_in(output.store_spec, [1, 2, 3])  # the scheduler leaves out a block that a window has slid past
    rig.manager.complete_store(set(keys), context)
    assert rig.lookup(keys, rig.request("two", keys)) == [MISS]
    assert rig.cache.counters.drops["host"].total() == 1
    assert rig.cache.jobs_in_flight == 0


def test_what_is_being_stored_is_waited_for_and_then_given_up(rigs: Any) -> None:
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


def test_a_reset_leaves_slots_alone_until_they_are_stamped(rigs: Any) -> None:
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
    assert rig.store(new, [3, 4], other) == new
    rig.cache.check_integrity()


def test_a_reset_leaves_slots_alone_until_the_workers_have_been_flushed(rigs: Any) -> None:
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
    assert rig.store(new, [3, 4], rig.request("four", new)) == new
    rig.cache.check_integrity()


def test_a_reset_leaves_loans_alone_until_they_are_over(rigs: Any) -> None:
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


def test_requests_that_end_anywhere_leave_nothing_behind(rigs: Any) -> None:
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
    assert rig.cache.held == 0 and rig.cache.jobs_in_flight == 0
    assert set(rig.manager._requests) == {"writer"}


def test_what_only_the_file_tier_has_is_brought_up_and_then_loaded(rigs: Any, tmp_path: Path) -> None:
    rig, keys = rigs(**file_settings(tmp_path)), keys_of(5)
    rig.store(keys, [1, 2, 3, 4, 5], rig.request("writer", keys))
    before = [rig.bytes_of(0, block) for block in range(1, 6)]
    assert rig.manager._runtime.flush(10.0)
    with rig.manager._runtime.control() as cache:
        assert cache.discard(ours(keys), "host") == 5
    reader = rig.request("reader", keys)
    assert rig.lookup(keys, reader) == [PENDING] * 5
    assert rig.manager._runtime._wait(lambda: not rig.cache.jobs_in_flight, 10.0)
    assert rig.lookup(keys, reader) == [HIT] * 5
    assert rig.manager.get_load_source(keys[0], reader).value == "disk"
    rig.load(keys, [11, 12, 13, 14, 15], reader)
    for at in range(5):
        assert all(map(torch.equal, rig.bytes_of(0, 11 + at), before[at]))
    rig.manager.on_request_finished(reader)
    assert rig.cache.held == 0


def test_what_turns_out_rotten_while_another_request_waits_for_it_is_a_miss(rigs: Any, tmp_path: Path) -> None:
    rig, keys = rigs(**file_settings(tmp_path)), keys_of(2)
    rig.store(keys, [1, 2], rig.request("writer", keys))
    assert rig.manager._runtime.flush(10.0)
    with rig.manager._runtime.control() as cache:
        assert cache.discard(ours(keys), "host") == 2
    segment = tmp_path / "tier" / "segment"
    segment.write_bytes(bytes(byte ^ 255 for byte in segment.read_bytes()))
    first, second = rig.request("first", keys), rig.request("second", keys)
    host = rig.manager._store.file._watch.process.pid  # type: ignore[union-attr]
    os.kill(host, signal.SIGSTOP)
    assert rig.lookup(keys, first) == [PENDING] * 2
    assert [rig.manager.lookup(key, second) for key in keys] == [PENDING] * 2
    os.kill(host, signal.SIGCONT)
    assert rig.manager._runtime._wait(lambda: not rig.cache.jobs_in_flight, 10.0)
    rig.end_step()  # which brings up what the second one was promised
    assert rig.cache.counters.lost["file"] == 2
    assert rig.lookup(keys, second) == [MISS] * 2


def test_another_process_finds_what_the_first_one_stored_and_another_model_does_not(tmp_path: Path) -> None:
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


def test_under_the_plain_connector_the_start_says_what_it_cannot_do(caplog: pytest.LogCaptureFixture) -> None:
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
def test_the_start_warns_where_a_stop_would_lose_what_was_not_written_back(
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
    with pytest.raises(ConfigError, match="one block image"):
        Rig(host_size=16)


def test_a_long_prompt_is_taken_whole(rigs: Any) -> None:
    """What is not taken is never offered again."""
    rig, keys = rigs(host_size=2000 * 4096), keys_of(2000)
    assert rig.manager.prepare_store(keys, rig.request("one", keys)).keys_to_store == keys
    small = rigs(host_size=2000 * 4096, max_writes=100)
    assert len(small.manager.prepare_store(keys, small.request("one", keys)).keys_to_store) == 100
