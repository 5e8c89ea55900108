"""Manager and workers through vLLM's abstract interface: real bytes, no engine."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LookupResult,
    Medium,
    OffloadPolicy,
    ReqContext,
    TierFilter,
    TierMatcher,
    make_offload_key,
)
from vllm_kit import BLOCKS, TOKENS, Rig, file_settings, keys_of

from longshore.cache import Return, TieredCache
from longshore.cache.eviction import POLICIES
from longshore.cache.eviction.hit_rates import USES
from longshore.engines.vllm.requests import ours
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
    assert HIT not in rig.lookup(keys, rig.request("two", keys))
    assert rig.manager.has_pending_work(), "a worker may still write there"
    rig.workers[1].stamps.stored(output.store_spec.job, 1, [], output.store_spec.indices)
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


@pytest.mark.parametrize("eviction", POLICIES)
def test_every_tier_evicts_by_the_policy_of_the_settings(rigs: Any, tmp_path: Path, eviction: str) -> None:
    rig = rigs(eviction=eviction, **file_settings(tmp_path))
    assert [type(policy) for policy in rig.cache._store.policies] == [POLICIES[eviction]] * 2


def test_a_prompt_longer_than_host_memory_is_served_from_its_head(rigs: Any) -> None:
    """Without a file tier: what fits stays, however often the rest is offered."""
    rig, keys = rigs(host_size=12 * 4096), keys_of(28)
    for visit in range(3):
        context = rig.request(f"visit {visit}", keys)
        found = rig.lookup(keys, context)
        served = found.index(MISS)
        assert served == (12 if visit else 0)
        assert HIT not in found[served:]
        if served:
            rig.load(keys[:served], range(1, 1 + served), context)
        rig.store(keys[served:], [1] * (28 - served), context)
        rig.manager.on_request_finished(context)
        rig.cache.check_integrity()
    other = rig.request("another", keys_of(2, name="another"))
    assert rig.store(keys_of(2, name="another"), [1, 2], other), "it makes way for others"


def test_storing_goes_on_behind_a_head_as_host_memory_drains(rigs: Any, tmp_path: Path) -> None:
    rig, keys = rigs(host_size=12 * 4096, **file_settings(tmp_path)), keys_of(28)
    context, told_again, stored = rig.request("first", keys), 0, 0
    rig.lookup(keys, context)
    for end in range(4, 29, 4):  # as a prompt is computed
        deadline = time.monotonic() + 60
        while (output := rig.manager.prepare_store(keys[stored:end], context)) is None:
            told_again += 1
            assert time.monotonic() < deadline
            rig.end_step()
        taken = output.keys_to_store
        assert taken == keys[stored:end], "all of it, or none of it yet"
        rig.copy_in(output.store_spec, [1] * len(taken))
        rig.manager.complete_store(set(taken), context)
        stored = end
        rig.end_step()
    assert told_again, "host memory was full, and vLLM was told to offer again"
    rig.manager.on_request_finished(context)
    assert rig.manager.flush(60)
    second, deadline = rig.request("second", keys), time.monotonic() + 60
    while PENDING in (found := rig.lookup(keys, second)):
        assert time.monotonic() < deadline
    served = found.index(MISS)
    assert served == 12, "what fits host memory"
    rig.load(keys[:served], range(1, 1 + served), second)
    rig.cache.check_integrity()


def offered_in_pieces(rig: Any, keys: list[Any], name: str, lag: int, chunks: int, told: bool = True) -> None:
    """A prompt as vLLM computes it, four chunks a step, of which `chunks` before it ends or is aborted.

    Stores are reported `lag` steps late. What is refused is offered again with what has come; at the end for the last
    time, and the manager is `told` of that.
    """
    context, stored, open_stores = rig.request(name, keys), 0, list[tuple[int, Any]]()
    for step, end in enumerate([*range(4, chunks + 1, 4), *[chunks] * 3]):
        rig.end_step()
        if told and step >= chunks // 4 + 2:
            rig.manager.will_finish(name)
        output = rig.manager.prepare_store(keys[stored:end], context) if stored < end else None
        if output is not None:
            stored = end
            if output.keys_to_store:
                rig.copy_in(output.store_spec, [1] * len(output.keys_to_store))
                open_stores.append((step + lag, output))
        for at, each in open_stores:
            if at == step:
                rig.manager.complete_store(set(each.keys_to_store), context)
    rig.manager.on_request_finished(context)
    for at, each in open_stores:
        if at > step:
            rig.manager.complete_store(set(each.keys_to_store), context)


def asked_as_vllm_does(rig: Any, keys: list[Any], context: Any) -> list[LookupResult]:
    """One step: chunk by chunk, up to the first that is missing."""
    found = []
    for key in keys:
        found.append(rig.manager.lookup(key, context))
        if found[-1] is MISS:
            break
    rig.end_step()
    return found


def served(rig: Any, keys: list[Any], context: Any) -> int:
    """How many chunks are served, and loaded."""
    deadline = time.monotonic() + 60
    while PENDING in (found := asked_as_vllm_does(rig, keys, context)):
        assert time.monotonic() < deadline
    count = found.count(HIT)
    if count:
        rig.load(keys[:count], range(1, 1 + count), context)
    rig.manager.on_request_finished(context)
    return count


@pytest.mark.parametrize("lag", [0, 2, 9])
@pytest.mark.parametrize("told", [True, False])
def test_a_long_prompt_offered_in_pieces_is_served_at_once(rigs: Any, tmp_path: Path, lag: int, told: bool) -> None:
    """However late stores are reported, and with nothing waited for: at least what fits host memory."""
    rig, keys = rigs(host_size=12 * 4096, load_timeout=60.0, **file_settings(tmp_path)), keys_of(28)
    offered_in_pieces(rig, keys, "first", lag, 28, told)
    assert served(rig, keys, rig.request("second", keys)) == 12
    for chunks in (4, 16):  # another is aborted
        offered_in_pieces(rig, keys_of(28, name=f"other {chunks}"), f"aborted {chunks}", lag, chunks, told)
        assert served(rig, keys, rig.request(f"after {chunks}", keys)) == 12
    rig.cache.check_integrity()
    assert rig.manager.flush(60)
    assert rig.cache.jobs_in_flight == 0


def test_long_prompts_at_once_are_served_in_turn(rigs: Any, tmp_path: Path) -> None:
    rig = rigs(host_size=12 * 4096, load_timeout=60.0, **file_settings(tmp_path))
    prompts = {name: keys_of(28, name=name) for name in ("one", "two")}
    for name, keys in prompts.items():
        offered_in_pieces(rig, keys, name, 1, 28)
        assert rig.manager.flush(60)
    waiting = {name: rig.request(f"again {name}", keys) for name, keys in prompts.items()}
    counts, deadline = {}, time.monotonic() + 60
    while waiting:
        assert time.monotonic() < deadline
        for name in list(waiting):
            found = [rig.manager.lookup(key, waiting[name]) for key in prompts[name]]
            if PENDING not in found:
                counts[name] = found.index(MISS)
                rig.load(prompts[name][: counts[name]], range(1, 1 + counts[name]), waiting[name])
                rig.manager.on_request_finished(waiting.pop(name))
        rig.end_step()
    assert counts == {"one": 12, "two": 12}
    rig.cache.check_integrity()


def test_the_last_offer_of_a_request_is_taken_as_far_as_there_is_room(rigs: Any, tmp_path: Path) -> None:
    rig, keys = rigs(host_size=12 * 4096, load_timeout=60.0, **file_settings(tmp_path)), keys_of(28)
    context = rig.request("one", keys)
    assert len(rig.store(keys[:8], [1] * 8, context, complete=False)) == 8
    assert rig.manager.prepare_store(keys[8:28], context) is None, "room may be made for more"
    rig.manager.will_finish("one")
    assert rig.manager.prepare_store(keys[8:28], context).keys_to_store == keys[8:12]


def test_loads_promised_in_another_order_than_told_are_in_place_after_a_fault(rigs: Any) -> None:
    rig, keys = rigs(), keys_of(5)
    assert rig.store(keys, [1, 2, 3, 4, 5], rig.request("first", keys)) == keys
    second = rig.request("second", [*keys[:3], keys[4], keys[3]])
    assert [rig.manager.lookup(key, second) for key in keys] == [HIT] * 5
    rig.manager._runtime.fail(RuntimeError("by the test"))
    with rig.manager._runtime.observe() as cache:
        index = cache._store.index
        expected = [index.slot[0][index.get(key)] for key in ours(keys[:4])]
    assert list(rig.manager.prepare_load(keys[:4], second).indices) == expected


@pytest.mark.parametrize("verb", ["lookup", "prepare_load", "prepare_store", "complete_store", "on_schedule_end"])
def test_an_inconsistent_cache_turns_the_tiers_off_and_nothing_else(
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

    broken = {"lookup": "lookup", "prepare_load": "load", "prepare_store": "store", "complete_store": "apply"}
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
        lost = rig.cache._store.index.get(ours(keys)[2])
        rig.cache._store.pools[0].node[rig.cache._store.index.slot[0][lost]] = 0
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
    assert stats is not None
    assert "longshore_control_plane_faults" in str(stats.data)


def test_a_request_advances_the_clock_of_eviction_once_and_uses_count_once(rigs: Any) -> None:
    rig, keys = rigs(), keys_of(2)
    policy = rig.cache._store.policies[0]
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
    nodes = [rig.cache._store.index.get(key) for key in ours(keys)]
    assert [(policy._used[node], ((policy._state[node] & USES) >> 3) - 1) for node in nodes] == [(3, 2)] * 2


def test_a_request_that_is_only_offered_draws_a_turn(rigs: Any) -> None:
    rig, keys = rigs(), keys_of(2)
    context = rig.request("one", keys)
    rig.store(keys[:1], [1], context)
    rig.store(keys[1:], [2], context)
    assert rig.cache._store.policies[0]._now == 1


def test_vllm_is_asked_to_offer_whole_paths(rigs: Any) -> None:
    context = ReqContext(req_id="one")
    assert rigs().manager.on_new_request(context).policy is OffloadPolicy.REQUEST_LEVEL


def test_tails_are_evicted_before_heads_of_a_path(rigs: Any) -> None:
    rig, one, two = rigs(host_size=8 * 4096), keys_of(6), keys_of(4, name="two")
    rig.store(one, range(1, 7), rig.request("one", one))
    rig.store(two, range(7, 11), rig.request("two", two))
    assert rig.lookup(one, rig.request("again", one)) == [HIT] * 5 + [MISS]  # the end of `two` was let pass
    rig.cache.check_integrity()


def test_chunks_are_linked_to_the_path_that_vllm_told(rigs: Any) -> None:
    """In parts, as a prompt is computed; the second time with what the tiers have in front."""
    rig, keys = rigs(), keys_of(6)
    first = rig.request("first", keys)
    for begin in (0, 2):
        assert rig.store(keys[begin : begin + 2], [1, 2], first) == keys[begin : begin + 2]
    assert rig.store(keys, range(1, 7), rig.request("second", keys)) == keys[4:]
    index = rig.cache._store.index
    nodes = [index.get(key) for key in ours(keys)]
    assert [index.parent[node] for node in nodes] == [0, *nodes[:-1]]


def test_an_offer_with_a_gap_is_taken_up_to_the_gap(rigs: Any) -> None:
    rig, keys = rigs(), keys_of(6)
    context = rig.request("one", keys)
    assert rig.store([*keys[:2], *keys[3:]], range(1, 6), context) == keys[:2]
    assert rig.store(keys[4:], [5, 6], context) == keys[4:], "orphans, as the chunk before them is in no tier"
    assert rig.store(keys, range(1, 7), context) == keys[2:4], "a whole path heals it"
    assert rig.lookup(keys, rig.request("two", keys)) == [HIT] * 6
    rig.cache.check_integrity()


def asking(rig: Any, name: str, keys: Any, **fields: Any) -> ReqContext:
    """A new request with fields of vLLM's own."""
    context = ReqContext(req_id=name, **fields)
    rig.manager.on_new_request(context)
    rig.tell(keys, context)
    return context


def test_a_request_that_says_so_is_not_stored_and_still_loads(rigs: Any) -> None:
    rig, keys = rigs(), keys_of(4)
    private = {"longshore": {"store": False}}
    assert rig.store(keys, range(1, 5), asking(rig, "private", keys, kv_transfer_params=private)) == []
    assert rig.store(keys[:2], range(1, 3), rig.request("other", keys)) == keys[:2]
    assert rig.lookup(keys, asking(rig, "again", keys, kv_transfer_params=private)) == [HIT] * 2 + [MISS] * 2


def test_nothing_is_stored_of_a_request_whose_hints_cannot_be_read(rigs: Any, caplog: pytest.LogCaptureFixture) -> None:
    rig, keys = rigs(), keys_of(4)
    context = asking(rig, "odd", keys, kv_transfer_params={"longshore": {"stor": False}})
    assert rig.store(keys, range(1, 5), context) == []
    assert "request odd: request hints: stor: Extra inputs are not permitted" in caplog.text


def test_hints_of_the_settings_are_those_of_requests_without(rigs: Any) -> None:
    rig, keys = rigs(request_hints={"store": False}), keys_of(2)
    assert rig.store(keys, range(1, 3), rig.request("one", keys)) == []
    context = asking(rig, "two", keys, kv_transfer_params={"longshore": {}})
    assert rig.store(keys, range(1, 3), context) == keys


def test_kv_hints_say_the_same_as_transfer_parameters(rigs: Any) -> None:
    rig, keys = rigs(), keys_of(2)
    action = KvHintAction("1", "longshore", "1", {"store": False})
    context = asking(rig, "one", keys, kv_hints=KvHintsEnvelope("1", "message", [action]))
    assert rig.store(keys, range(1, 3), context) == []


@pytest.mark.parametrize(
    "fields",
    [
        {"kv_transfer_params": {"longshore": {"load": ["host"]}}},
        {"load_tier_filter": TierFilter((TierMatcher(medium=Medium.CPU),))},
    ],
)
def test_files_are_not_read_for_a_request_that_leaves_them_out(rigs: Any, tmp_path: Path, fields: Any) -> None:
    rig, keys = rigs(host_size=4 * 4096, backup="write_through", **file_settings(tmp_path)), keys_of(4)
    rig.store(keys, range(1, 5), rig.request("one", keys))
    assert rig.manager.flush(60)
    others = keys_of(3, name="other")
    assert rig.store(others, range(1, 4), rig.request("other", others)) == others
    assert rig.lookup(keys, asking(rig, "host alone", keys, **fields)) == [HIT] + [MISS] * 3
    assert PENDING in rig.lookup(keys, asking(rig, "both", keys))


def test_a_request_that_loads_nothing_misses_everything(rigs: Any) -> None:
    rig, keys = rigs(), keys_of(2)
    rig.store(keys, range(1, 3), rig.request("one", keys))
    nothing = {"longshore": {"load": []}}
    assert rig.lookup(keys, asking(rig, "two", keys, kv_transfer_params=nothing)) == [MISS] * 2


@pytest.mark.parametrize("looks_up", [True, False])
def test_what_a_request_says_of_its_return_reaches_the_cache(
    rigs: Any, monkeypatch: pytest.MonkeyPatch, looks_up: bool
) -> None:
    said, lookup = list[Return](), TieredCache.lookup

    def watched(cache: TieredCache, *of: Any, **how: Any) -> Any:
        if how.get("turn") is None and how.get("returns") is not None:
            said.append(how["returns"])
        return lookup(cache, *of, **how)

    monkeypatch.setattr(TieredCache, "lookup", watched)
    rig, keys = rigs(), keys_of(2)
    for name, hints in (("over", {"ends": True}), ("tool", {"returns_in": 2.5}), ("batch", {"class": "batch"})):
        context = asking(rig, name, keys, kv_transfer_params={"longshore": hints})
        if looks_up:
            rig.lookup(keys, context)
        rig.store(keys, range(1, 3), context)
    assert said == [Return(ends=True), Return(seconds=2.5), Return(of="batch")]


def test_priorities_of_requests_decide_what_is_evicted_first(rigs: Any) -> None:
    rig, low, high = rigs(host_size=8 * 4096), keys_of(4, name="low"), keys_of(4, name="high")
    for name, keys, priority in (("high", high, 90), ("low", low, 10)):
        hints = {"longshore": {"retention": [{"priority": priority}]}}
        assert rig.store(keys, range(1, 5), asking(rig, name, keys, kv_transfer_params=hints)) == keys
    others = keys_of(4, name="others")
    assert rig.store(others, range(1, 5), rig.request("others", others)) == others
    assert rig.lookup(high, rig.request("high again", high)) == [HIT] * 4, "older, and worth more"
    assert rig.lookup(low, rig.request("low again", low)) == [MISS] * 4


def test_priorities_lapse_when_their_time_is_over(rigs: Any) -> None:
    rig, first, second = rigs(host_size=8 * 4096, eviction="lru"), keys_of(4, name="first"), keys_of(4, name="second")
    for name, keys, seconds in (("first", first, 0.1), ("second", second, None)):
        hints = {"longshore": {"retention": [{"priority": 90, "seconds": seconds}]}}
        assert rig.store(keys, range(1, 5), asking(rig, name, keys, kv_transfer_params=hints)) == keys
    time.sleep(0.2)
    others = keys_of(4, name="others")
    assert rig.store(others, range(1, 5), rig.request("others", others)) == others
    assert rig.lookup(first, rig.request("first again", first)) == [MISS] * 4
    assert rig.lookup(second, rig.request("second again", second)) == [HIT] * 4


def test_blocks_below_the_priority_floor_are_not_stored(rigs: Any) -> None:
    rig, keys = rigs(priority_floor=50), keys_of(4)
    assert rig.store(keys, range(1, 5), rig.request("one", keys)) == []
    hints = {"longshore": {"retention": [{"end": 2 * TOKENS, "priority": 50}]}}
    assert rig.store(keys, range(1, 5), asking(rig, "two", keys, kv_transfer_params=hints)) == keys[:2]


def test_a_slot_is_not_given_away_while_a_worker_may_write_there(rigs: Any) -> None:
    """The parent of a chunk under way is lost, and a later store of both ends first, under the same keys."""
    rig, keys, others = rigs(host_size=3 * 4096), keys_of(2), keys_of(3, name="other")
    worker, first = rig.workers[0], rig.request("first", keys)
    parent = rig.manager.prepare_store(keys[:1], first)
    worker.stamps.stored(parent.store_spec.job, 0, [], parent.store_spec.indices)
    child = rig.manager.prepare_store(keys[1:], first)  # the worker copies it from here on
    rig.manager.complete_store(set(keys[:1]), first)
    second = rig.request("second", keys)
    again = rig.manager.prepare_store(keys, second)
    assert again.keys_to_store == keys
    worker.stamps.stored(again.store_spec.job, 0, [], again.store_spec.indices)
    rig.manager.complete_store(set(keys), second)
    taken = rig.manager.prepare_store(others, rig.request("third", others))
    assert not set(taken.store_spec.indices) & set(child.store_spec.indices)
    worker.stamps.stored(child.store_spec.job, 0, child.store_spec.indices, [])
    rig.end_step()
    assert not rig.manager.has_pending_work()
    rig.cache.check_integrity()
