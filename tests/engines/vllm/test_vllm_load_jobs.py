"""Loads of more chunks than host memory has room for: vLLM's own scheduler part, our manager, workers of two ranks.

Red when slots of a part are given back before all ranks have read it, and when parts are lent to a load that has ended.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from parts_kit import CHUNKS, HOST_CHUNKS, Engine, finish_load, settled
from vllm.v1.request import Request, RequestStatus
from vllm_kit import TOKENS

from longshore.boundary import FILE, HOST
from longshore.cache import MissReason
from longshore.engines.vllm import manager as manager_module
from longshore.runtime.rank_reports import DONE, RankReports


@pytest.mark.parametrize("engine", [1, 2], indirect=True, ids=["full attention", "a window"])
def test_a_prompt_longer_than_host_memory_is_loaded_whole(engine: Engine) -> None:
    request = engine.request(CHUNKS)
    assert engine.begin(request) == CHUNKS
    assert sum(engine.manager.loaded_tokens.values()) <= HOST_CHUNKS * TOKENS, "what was lent"
    assert finish_load(engine, request) > 3, "in parts"
    assert not engine.failed
    loaded = engine.manager.loaded_tokens
    assert loaded[HOST] + loaded[FILE] == CHUNKS * TOKENS
    assert loaded[FILE] >= (CHUNKS - HOST_CHUNKS) * TOKENS
    assert engine.wrong(request, CHUNKS) == 0
    engine.finish(request)
    settled(engine)


def finish_whole(engine: Engine, requests: Sequence[Request]) -> None:
    """The loads of `requests` end, each with all chunks, and leave nothing open."""
    finish_load(engine, *requests)
    assert not engine.failed
    assert [engine.wrong(each, CHUNKS) for each in requests] == [0] * len(requests)
    for each in requests:
        engine.finish(each)
    settled(engine)
    assert engine.manager._tiers.reports._expected == {}, "reports on loads that have ended are still expected"


@pytest.mark.parametrize("engine", [1, 2], indirect=True, ids=["full attention", "a window"])
def test_two_are_loaded_whole_at_once(engine: Engine) -> None:
    engine.store(CHUNKS, first=1000)
    requests = [engine.request(CHUNKS), engine.request(CHUNKS, first=1000)]
    assert [engine.begin(each) for each in requests] == [CHUNKS] * 2
    finish_whole(engine, requests)


@pytest.mark.parametrize("first", [1, 1000], ids=["vLLM delays it", "the device has no room"])
def test_waiting_requests_make_way_for_a_load_in_parts(engine: Engine, first: int) -> None:
    """All that the second request needs is found, and fills host memory; vLLM begins its load after the first one.

    It delays requests for chunks that another one loads, and those that have no room on the device.
    """
    engine.store(HOST_CHUNKS, first=first)
    request, second = engine.request(CHUNKS), engine.request(HOST_CHUNKS, first=first)
    assert engine.begin(request) == CHUNKS
    for _ in range(3000):
        if not engine.is_loading(request):
            break
        engine.scheduler.get_num_new_matched_tokens(second, 0)
        engine.step()
        time.sleep(0.001)
    assert not engine.failed
    assert engine.wrong(request, CHUNKS) == 0
    engine.finish(request)
    for _ in range(3000):
        if found := engine.begin(second):
            break
        engine.step()
        time.sleep(0.001)
    assert found == HOST_CHUNKS
    finish_load(engine, second)
    assert engine.wrong(second, HOST_CHUNKS) == 0
    engine.finish(second)
    settled(engine)


def test_request_that_makes_way_is_answered_at_its_deadline(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads lack slots one after the other, and it has to make way for all of them."""
    engine.store(HOST_CHUNKS, first=1000)
    jobs = engine.manager._load_jobs
    first, second = engine.request(CHUNKS), engine.request(HOST_CHUNKS, first=1000)
    assert engine.begin(first) == CHUNKS
    monkeypatch.setattr(jobs, "reclaim_slots", lambda cache, requests: None)
    jobs.making_way.add(engine.manager._requests[second.request_id].name)
    assert engine.scheduler.get_num_new_matched_tokens(second, 0)[0] is None
    until = time.monotonic() + 60
    while engine.scheduler.get_num_new_matched_tokens(second, 0)[0] is None:
        assert time.monotonic() < until
        engine.step()
        time.sleep(0.01)
    engine.finish(second)
    assert not jobs.making_way


@pytest.mark.parametrize("engine", [1, 2], indirect=True, ids=["full attention", "a window"])
def test_slots_return_when_the_last_rank_has_read_them(engine: Engine) -> None:
    request = engine.request(CHUNKS)
    assert engine.begin(request) == CHUNKS
    for _ in range(50):
        engine.step(ranks=(0,))
        (load,) = engine.manager._load_jobs._by_request.values()
        assert len(load.parts) > 0, "the second rank has read nothing"
        assert sum(len(part.slots) for part in load.parts) <= HOST_CHUNKS
    assert load.pending
    engine.take_in(1)
    finish_load(engine, request)
    assert not engine.failed
    assert engine.wrong(request, CHUNKS) == 0
    engine.finish(request)
    settled(engine)


def test_later_loads_do_not_overwrite_reports_on_an_earlier_part(engine: Engine) -> None:
    engine.store(CHUNKS, first=1000)
    requests = [engine.request(CHUNKS), engine.request(CHUNKS, first=1000)]
    assert engine.begin(requests[0]) == CHUNKS
    engine.step(ranks=(0,))
    context, (load,) = engine.manager._job_context, engine.manager._load_jobs._by_request.values()
    part = load.parts[0].number
    assert engine.manager._tiers.reports._loads[part % RankReports.LOADS, 0] == 4 * part + DONE
    while context.new_ticket().number < part + RankReports.LOADS - 2:
        pass
    assert engine.begin(requests[1]) == CHUNKS
    for _ in range(10):
        engine.step(ranks=(0,))
    assert context.new_ticket().number > part + RankReports.LOADS, "others have been begun"
    finish_whole(engine, requests)


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_an_aborted_request_is_loaded_no_further(engine: Engine, steps: int) -> None:
    request = engine.request(CHUNKS)
    assert engine.begin(request) == CHUNKS
    for _ in range(steps):
        engine.step(ranks=(0,))
    engine.finish(request, RequestStatus.FINISHED_ABORTED)
    assert finish_load(engine, request) <= 3
    settled(engine)
    again = engine.request(CHUNKS)
    assert engine.begin(again) == CHUNKS
    finish_load(engine, again)
    assert engine.wrong(again, CHUNKS) == 0


@pytest.mark.parametrize("steps", [1, 4])
def test_a_load_that_a_reset_cuts_off_has_failed(engine: Engine, steps: int) -> None:
    request = engine.request(CHUNKS)
    assert engine.begin(request) == CHUNKS
    for _ in range(steps):
        engine.step(ranks=(0,))
    (job,) = engine.scheduler._req_status[request.request_id].transfer_jobs
    engine.scheduler.reset_cache()
    for _ in range(3):
        engine.step(ranks=(0,))
        assert engine.rig.cache.jobs_in_flight > 0, "the second rank may still read what it was lent"
    for _ in range(3):
        engine.step()
    assert engine.ended[job] == 2, "both ranks have reported it"
    assert job in engine.failed
    assert engine.begin(request) == 0, "nothing is stored any more"
    engine.finish(request, RequestStatus.FINISHED_ABORTED)
    settled(engine)


def test_a_part_that_cannot_be_copied_fails_the_load(engine: Engine) -> None:
    request = engine.request(CHUNKS)
    assert engine.begin(request) == CHUNKS
    engine.step()
    worker: Any = engine.rig.workers[1]
    submit, worker._submit = worker._submit, lambda job: False
    finish_load(engine, request)
    worker._submit = submit
    assert engine.failed
    assert engine.begin(request) == 0, "it is computed"
    misses = engine.rig.cache.counters.misses
    assert (misses[MissReason.DEVICE_ERROR] > 0, misses[MissReason.IO_ERROR]) == (True, 0)
    assert engine.rig.cache.counters.lost.total() == 0
    engine.finish(request, RequestStatus.FINISHED_ABORTED)
    settled(engine)


def test_a_rotten_record_fails_the_load(engine: Engine, tmp_path: Path) -> None:
    (segment,) = (tmp_path / "tier").glob("segment*")
    content = np.fromfile(segment, np.uint8)
    content[2048::4096] ^= 1
    content.tofile(segment)
    request = engine.request(CHUNKS)
    assert engine.begin(request) == CHUNKS
    finish_load(engine, request)
    assert engine.failed
    engine.finish(request, RequestStatus.FINISHED_ABORTED)
    settled(engine)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_tier_host_that_dies_or_hangs_fails_the_load(engine: Engine, how: signal.Signals) -> None:
    file = cast(Any, engine.manager._tiers.file)
    request = engine.request(CHUNKS)
    process = file._supervisor.process.pid
    os.kill(process, how)
    assert engine.begin(request) == CHUNKS
    finish_load(engine, request)
    assert engine.failed
    if how is signal.SIGSTOP:
        os.kill(process, signal.SIGCONT)
    engine.finish(request, RequestStatus.FINISHED_ABORTED)
    settled(engine)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_tier_host_death_or_hang_between_parts_fails_the_load(engine: Engine, how: signal.Signals) -> None:
    file = cast(Any, engine.manager._tiers.file)
    request = engine.request(CHUNKS)
    assert engine.begin(request) == CHUNKS
    (load,) = engine.manager._load_jobs._by_request.values()
    first = sum(load.chunks_leased)
    while sum(load.chunks_leased) == first:
        engine.step()
        time.sleep(0.001)
    process, arrived = file._supervisor.process.pid, sum(load.chunks_leased)
    os.kill(process, how)
    assert len(load.pending) > HOST_CHUNKS // 2, "more than has been read ahead"
    finish_load(engine, request)
    if how is signal.SIGSTOP:
        os.kill(process, signal.SIGCONT)
        assert engine.failed
    else:  # a machine that was busy may find it running again
        assert file.failures["tier_host"] == 1
    assert engine.wrong(request, arrived if engine.failed else CHUNKS) == 0
    engine.finish(request, RequestStatus.FINISHED_ABORTED)
    settled(engine)


def test_after_a_fault_of_the_control_plane_open_loads_fail(engine: Engine) -> None:
    request = engine.request(CHUNKS)
    assert engine.begin(request) == CHUNKS
    engine.step()
    engine.manager._runtime.fail(RuntimeError("made by the test"))
    finish_load(engine, request)
    assert engine.failed


def test_only_what_is_worth_reading_is_loaded(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager_module, "load_limit", lambda *_: 20 * TOKENS)
    request = engine.request(CHUNKS)
    assert engine.begin(request) == 20
    finish_load(engine, request)
    engine.finish(request, RequestStatus.FINISHED_ABORTED)
    settled(engine)


def test_without_the_connector_as_much_is_loaded_as_fits(engine: Engine) -> None:
    engine.manager.load_parts_allowed = False
    request = engine.request(CHUNKS)
    give_up = time.monotonic() + 10.0
    while not (found := engine.begin(request)) and time.monotonic() < give_up:
        engine.step()
    assert 0 < found <= HOST_CHUNKS
    finish_load(engine, request)
    assert not engine.failed
    assert engine.wrong(request, found) == 0
    engine.finish(request, RequestStatus.FINISHED_ABORTED)
    settled(engine)
