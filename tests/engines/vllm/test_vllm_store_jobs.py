"""Stores of more chunks than host memory has room for, by vLLM's own scheduler part, our manager, workers of two ranks.

Red when workers begin a part after vLLM has waited for its store, and when a store goes on that vLLM took for another.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from parts_kit import CHUNKS, HOST_CHUNKS, Engine, finish_load, settled
from vllm.v1.kv_offload.base import GPULoadStoreSpec
from vllm.v1.request import Request, RequestStatus
from vllm_kit import TOKENS

from longshore.boundary import Slots
from longshore.engines.vllm import manager as manager_module
from longshore.engines.vllm.worker import JobPart, SlotsSpec
from longshore.runtime.rank_reports import DONE, FAILED


def begin_when_known(engine: Engine, request: Request) -> int:
    """Steps until the request has not to wait any more; then as `Engine.begin`."""
    deadline = time.monotonic() + 30.0
    while engine.scheduler.get_num_new_matched_tokens(request, 0)[0] is None:
        engine.step()
        assert time.monotonic() < deadline
    return engine.begin(request)


def finish_stores(engine: Engine) -> int:
    """Steps until nothing is stored any more; how many."""
    for steps in range(3000):
        if not len(engine.manager._store_jobs):
            return steps
        engine.step()
        time.sleep(0.001)
    raise AssertionError("a store does not end")


@pytest.mark.parametrize("engine", [1, 2], indirect=True, ids=["full attention", "a window"])
@pytest.mark.parametrize("pieces", [CHUNKS, 5])
def test_a_prompt_longer_than_host_memory_is_stored_whole(engine: Engine, pieces: int) -> None:
    stored = engine.compute(CHUNKS, pieces, first=1000)
    engine.finish(stored)
    finish_stores(engine)
    assert engine.parts_of_stores > 1 or pieces < HOST_CHUNKS
    assert engine.manager._store_jobs.chunks_cut_off == 0, dict(engine.rig.cache.counters.drops)
    request = engine.request(CHUNKS, first=1000)
    assert begin_when_known(engine, request) == CHUNKS
    finish_load(engine, request)
    assert engine.wrong(request, CHUNKS) == 0
    engine.finish(request)
    settled(engine)


@pytest.mark.parametrize("how", ["in time", "late"])
def test_a_lookup_waits_for_chunks_that_are_still_stored(
    engine: Engine, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a prompt that comes again before all of it has a slot; not for longer than `load_timeout`."""
    if how == "in time":
        monkeypatch.setattr(engine.manager._job_context, "timeout", 600.0)
    resume = kill_tier_host(engine, signal.SIGSTOP)  # no room is made meanwhile
    engine.finish(engine.compute(CHUNKS, CHUNKS, first=1000))
    assert len(engine.manager._store_jobs.keys_without_slots) == CHUNKS - HOST_CHUNKS
    request = engine.request(CHUNKS, first=1000)
    assert engine.scheduler.get_num_new_matched_tokens(request, 0)[0] is None, "it waits"
    if how == "in time":
        resume()
    hit = begin_when_known(engine, request)
    assert hit == (CHUNKS if how == "in time" else HOST_CHUNKS)
    finish_load(engine, request)
    assert engine.wrong(request, hit) == 0
    engine.finish(request)
    resume()
    finish_stores(engine)
    settled(engine)


def test_only_what_is_worth_reading_is_waited_for(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.manager._job_context, "timeout", 600.0)
    monkeypatch.setattr(manager_module, "load_limit", lambda *_: HOST_CHUNKS * TOKENS)
    monkeypatch.setattr(type(engine.manager._tiers.file), "is_stalled", False)  # else it waits for nothing
    resume = kill_tier_host(engine, signal.SIGSTOP)
    engine.finish(engine.compute(CHUNKS, CHUNKS, first=1000))
    assert len(engine.manager._store_jobs.keys_without_slots) == CHUNKS - HOST_CHUNKS
    request = engine.request(CHUNKS, first=1000)
    assert begin_when_known(engine, request) == HOST_CHUNKS
    resume()
    engine.finish(request, RequestStatus.FINISHED_ABORTED)
    finish_stores(engine)
    settled(engine)


@pytest.mark.parametrize("ranks", [(0, 1), (0,)], ids=["both ranks", "one rank"])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_store_ends_when_its_blocks_are_given_to_others(engine: Engine, steps: int, ranks: tuple[int, ...]) -> None:
    """What has no slot by then is not stored; what is copied later would be another's bytes."""
    resume = kill_tier_host(engine, signal.SIGSTOP)
    stored = engine.compute(CHUNKS, CHUNKS, first=1000)
    engine.finish(stored)
    for _ in range(steps):
        engine.step(ranks)
    assert engine.manager._store_jobs.keys_without_slots, "there are parts to come"
    (job,) = engine.scheduler._jobs
    other = engine.request(CHUNKS, first=5000)
    blocks = engine.blocks[other.request_id] = engine.blocks[stored.request_id]
    ids = tuple([block.block_id for block in mine] for mine in blocks)
    new = SimpleNamespace(req_id=other.request_id, block_ids=ids)
    engine.step((), new=[new], scheduled={other.request_id: TOKENS})
    engine.after_flush = lambda rank: engine.fill(other, rank)
    for rank in (0, 1):
        engine.take_in(rank)
    resume()
    finish_stores(engine)
    assert engine.ended[job] == 2
    engine.finish(other, RequestStatus.FINISHED_ABORTED)
    request = engine.request(CHUNKS, first=1000)
    hit = begin_when_known(engine, request)
    assert 0 < hit < CHUNKS
    finish_load(engine, request)
    assert engine.wrong(request, hit) == 0
    engine.finish(request)
    settled(engine)


def nap(engine: Engine) -> None:
    """Both ranks sleep, lose their blocks, and wake up, and the manager does not see it."""
    for worker, tensors in zip(engine.rig.workers, engine.rig.tensors, strict=True):
        worker.before_device_release()
        for tensor in tensors:
            tensor.fill_(0x55)
        worker.after_device_restore()


CUTS: dict[str, Callable[[Engine], Callable[[], None] | None]] = {
    "weights": lambda engine: engine.rig.workers[0].reports.weights_changed(0),
    "reset": lambda engine: engine.scheduler.reset_cache(),
    "sleep": lambda engine: engine.rig.workers[1].before_device_release(),
    "nap": nap,
    "kill": lambda engine: kill_tier_host(engine, signal.SIGKILL),
    "hang": lambda engine: kill_tier_host(engine, signal.SIGSTOP),
    "fault": lambda engine: engine.manager._runtime.fail(RuntimeError("made by the test")),
}


def kill_tier_host(engine: Engine, how: signal.Signals) -> Callable[[], None]:
    process = cast(Any, engine.manager._tiers.file)._supervisor.process.pid
    os.kill(process, how)
    return lambda: os.kill(process, signal.SIGCONT) if how is signal.SIGSTOP else None


@pytest.mark.parametrize("what", [*CUTS, "part"])
def test_a_store_that_something_cuts_off_ends(engine: Engine, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    undo = CUTS[what](engine) if what == "hang" else None  # before it can write what makes room
    engine.finish(engine.compute(CHUNKS, CHUNKS, first=1000))
    engine.step((0,))
    assert engine.manager._store_jobs.keys_without_slots
    (job,) = engine.scheduler._jobs
    with monkeypatch.context() as patch:
        if what == "part":
            patch.setattr(engine.rig.workers[1], "_submit", lambda part: False)
        elif what != "hang":
            undo = CUTS[what](engine)
        engine.manager._store_jobs._write_timeout = 1.0
        for _ in range(3000):
            engine.step()
            time.sleep(0.001)
            if engine.ended[job] == 2:
                break
    assert engine.ended[job] == 2, "both ranks have reported it"
    assert not any(worker._jobs for worker in engine.rig.workers)
    if what == "fault":
        return
    # Else all may have had slots by then, as another tier host, or a fast one, has written what was before.
    assert engine.manager._store_jobs.chunks_cut_off > 0 or what not in ("weights", "reset", "hang")
    if what == "sleep":
        engine.rig.workers[1].after_device_restore()
    if undo is not None:
        undo()
    request = engine.request(CHUNKS, first=1000)
    hit = begin_when_known(engine, request)
    assert hit == 0 or what not in ("weights", "reset")
    finish_load(engine, request)
    assert engine.failed or not hit or engine.wrong(request, hit) == 0
    engine.finish(request, RequestStatus.FINISHED_ABORTED)
    settled(engine)


def test_a_store_that_lacks_a_block_has_no_parts(engine: Engine) -> None:
    """Which blocks are those of a later part would be a guess."""
    worker, blocks = engine.rig.workers[0], [1, 2, 3, 5, 6, 7]
    for ticket, mine in ((900, blocks), (950, blocks[:-1])):
        first, second = (SlotsSpec(ticket + at, (Slots("host", 0, (at, at + 1, at + 2)),)) for at in (0, 5))
        whole = GPULoadStoreSpec(mine, group_sizes=[len(mine)], block_indices=[0])
        worker.submit_store(ticket, whole, replace(first, chunks_after=(3,)))
        worker.submit_parts([JobPart(ticket, replace(second, chunks_before=(3,)), is_store=True)])
        worker.wait({ticket})
        assert [each.job_id for each in worker.get_finished()] == [ticket]
        for part in (first, second):
            said = worker.reports.outcomes(part.ticket, part.indices)[:, 0]
            assert (said == (DONE if ticket == 900 else FAILED)).all()


def offered_together(engine: Engine, *firsts: int) -> list[Request]:
    """Prompts that begin with these tokens are computed, each in one piece, in one step."""
    engine.manager._store_jobs._write_timeout = 60.0
    requests, new = [engine.request(CHUNKS, first=first) for first in firsts], []
    for each in requests:
        blocks = engine.blocks[each.request_id] = engine._allocate(each, 0)
        engine.fill(each, 0, 1)
        ids = tuple([block.block_id for block in mine] for mine in blocks)
        new.append(SimpleNamespace(req_id=each.request_id, block_ids=ids))
    engine.step(new=new, scheduled={each.request_id: each.num_tokens for each in requests})
    for each in requests:
        each.num_computed_tokens = each.num_tokens
    return requests


def all_end(engine: Engine) -> None:
    """Steps until vLLM waits for no job."""
    deadline = time.monotonic() + 60.0
    while engine.scheduler._jobs:
        engine.step()
        time.sleep(0.001)
        assert time.monotonic() < deadline, "vLLM steps for ever"
    assert not any(worker._jobs for worker in engine.rig.workers)


@pytest.mark.parametrize("victim", range(3))
def test_stores_of_the_same_chunks_all_end(engine: Engine, victim: int) -> None:
    """vLLM reports keys, and not which store it means: one is ended early, as its request is preempted."""
    requests = offered_together(engine, 1000, 1000, 1000)
    assert [len(store.keys) for store in engine.manager._store_jobs] == [28, 16, 16]
    (job,) = engine.scheduler._req_status[requests[victim].request_id].transfer_jobs
    engine.scheduler._current_batch_jobs_to_flush.add(job)
    all_end(engine)
    assert not len(engine.manager._store_jobs)
    for each in requests:
        engine.finish(each)
    all_end(engine)
    settled(engine)


@pytest.mark.parametrize("what", ["weights", "fault"])
def test_store_cut_off_in_the_step_of_its_offer_ends(engine: Engine, what: str) -> None:
    """vLLM's workers are given stores a step late, and the ends of stores are not."""
    engine.submits_late = True
    prepare, calls = engine.manager.prepare_store, []

    def watched(keys: Any, context: Any) -> Any:
        calls.append(context.req_id)
        if len(calls) == 2 and what == "weights":
            engine.rig.workers[0].reports.weights_changed(0)
        elif len(calls) == 2:
            engine.manager._runtime.fail(RuntimeError("made by the test"))
        return prepare(keys, context)

    engine.manager.prepare_store = watched  # type: ignore[method-assign]
    offered_together(engine, 1000, 5000)
    assert len(calls) == 2
    assert engine.scheduler._jobs
    all_end(engine)


def test_what_is_there_is_loaded_after_a_wait_in_vain(engine: Engine) -> None:
    """The last six chunks get no slots in time; the others are in files by then."""
    engine.finish(engine.compute(CHUNKS, CHUNKS, first=1000))
    assert engine.manager._store_jobs.keys_without_slots
    request, stores = engine.request(CHUNKS, first=1000), cast(Any, engine.manager._store_jobs)
    give = stores._next_part
    stores._next_part = lambda cache, store, group, *more: (
        store.pending[group].left > 6 and give(cache, store, group, *more)
    )
    context, until = engine.manager._job_context, time.monotonic() + 60.0
    context.timeout = 60.0
    while engine.rig.cache.stats()[1].used <= CHUNKS + HOST_CHUNKS and time.monotonic() < until:
        assert engine.scheduler.get_num_new_matched_tokens(request, 0)[0] is None
        engine.step()
    context.timeout = 1.0
    hit = begin_when_known(engine, request)
    assert HOST_CHUNKS < hit < CHUNKS
    finish_load(engine, request)
    assert engine.wrong(request, hit) == 0
    del stores._next_part
    engine.finish(request)
    finish_stores(engine)
    settled(engine)


def test_stores_have_time_while_one_of_them_gets_slots(engine: Engine) -> None:
    """Later pieces of a prompt are queued behind the first one; nothing is written to files meanwhile."""
    resume = kill_tier_host(engine, signal.SIGSTOP)
    request = engine.compute(CHUNKS, 5, first=1000)
    stores, now = list(engine.manager._store_jobs), engine.manager._runtime.clock()
    assert len([store for store in stores if store.pending]) > 2
    for store in stores:
        store.since = now - 100.0
    stores[-1].since = now
    engine.step()
    assert engine.manager._store_jobs.chunks_cut_off == 0
    stores[-1].since = now - 100.0
    engine.step()
    assert engine.manager._store_jobs.chunks_cut_off > 0
    resume()
    all_end(engine)
    engine.finish(request)
    all_end(engine)
    settled(engine)


@pytest.mark.parametrize("is_store", [True, False])
def test_a_last_part_of_another_epoch_ends_its_job(engine: Engine, is_store: bool) -> None:
    worker = engine.rig.workers[0]
    first = SlotsSpec(900, (Slots("host", 0, (0, 1)),), (0, 0), chunks_after=(2,))
    blocks = GPULoadStoreSpec([1, 2, 3, 4], group_sizes=[4], block_indices=[0])
    if is_store:
        worker.submit_store(7, blocks, first)
    else:
        worker.submit_load(7, first, blocks)
    worker.engine.wait(list(worker._parts))
    assert not worker.get_finished()
    worker.submit_parts([JobPart(900, SlotsSpec(901, (Slots("host", 0, (2, 3)),), (0, 2), (2,)), is_store)])
    assert [each.job_id for each in worker.get_finished()] == [7]
    assert worker.take_failed([7]) == (set() if is_store else {7})
