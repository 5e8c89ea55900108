"""The log of calls that precedes a fault."""

from __future__ import annotations

import pickle
import tempfile
from pathlib import Path

import numpy as np
import pytest
from call_replay import replay
from loop_kit import (
    host_cache,
    path,
)

from longshore.boundary import HOST, Status, TransferResult
from longshore.cache import (
    CacheGroup,
    GroupKeys,
    PromptTokens,
    Protection,
)
from longshore.errors import TraceError
from longshore.runtime.error_handler import CallLog
from residents import residents_of


def test_idle_calls_do_not_evict_others_from_the_call_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cache = host_cache(events=100)
    log = CallLog(cache, lambda error: None)
    job = cache.store({0: GroupKeys(path(3))})[0].job
    assert job is not None
    for step in range(1000):
        cache.apply_results((), float(step))
        cache.end_step()
        assert cache.take_commands() == []
        cache.apply_results([], step + 0.5)
        cache.events()
    cache.apply_results([TransferResult(job, (Status.OK,) * 3)], 2000.0)
    names = [call.name for call in log.calls]
    assert names[0] == "store" and names[-1] == "apply_results"
    assert len(names) <= 16
    written = log.write()
    assert written is not None
    assert {each.key for each in residents_of(replay(written))} == set(path(3))


def test_call_log_keeps_arguments_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    group = CacheGroup(block_size=16, window=1 << 40)
    cache = host_cache(groups=(group, CacheGroup(block_size=16)))
    log, keys = CallLog(cache, lambda error: None), path(4)
    offload = cache.store({0: GroupKeys(keys)})[0]
    results = [TransferResult(offload.job or 0, (Status.OK,) * 4)]
    cache.apply_results(results, 0.0)
    results.clear()
    sight = cache.lookup({0: GroupKeys(keys)}, 0.0, protect=Protection.STEP, independent=True).residency[0]
    cache.end_step()
    wanted = [GroupKeys([], device=[]), GroupKeys(path(4, first=20), device=np.ones(4, bool))]
    cache.lookup(dict(enumerate(wanted)), 1.0)
    cache.load({0: GroupKeys(sight.part(0, 2))})
    assert cache.discard(iter(keys[3:]), HOST) == 1
    keys[:] = path(4, first=9)
    wanted[1].device[:] = False  # type: ignore[index]
    written = log.write()
    assert written is not None
    again = replay(written)
    assert {each.key for each in residents_of(again)} == {each.key for each in residents_of(cache)} == set(path(3))
    assert again.jobs_in_flight == cache.jobs_in_flight == 1
    calls = pickle.loads(written.read_bytes())[1]  # noqa: S301
    (matched,) = [call for call in calls if call[0] == "lookup" and len(call[1][0]) == 2]
    assert matched[1][0][1].device.all()


def test_call_log_is_bounded_and_reports_whether_it_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cache = host_cache()
    log = CallLog(cache, lambda error: None)
    keys = [bytes([i]) * 32 for i in range(200)]
    for _ in range(500):
        cache.lookup({0: GroupKeys(keys)}, 0.0, protect=Protection.STEP, independent=True)
    assert len(log.calls) == 500
    for _ in range(20):
        cache.lookup({0: GroupKeys(keys * 100)}, 0.0, protect=Protection.STEP, independent=True)
    assert 0 < len(log.calls) < 20
    assert sum(call.bytes for call in log.calls) <= 16 << 20
    for _ in range(600):
        cache.lookup({0: GroupKeys(keys[:9])}, 0.0, protect=Protection.STEP, independent=True)
    assert len(log.calls) == 512
    written = log.write()
    assert written is not None
    with pytest.raises(TraceError, match="the last 512"):
        replay(written)
    replay(written, host_cache())


def test_call_log_has_no_prompt_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    group = CacheGroup(block_size=16)
    cache = host_cache(groups=(group,), partial=True)
    log, tokens = CallLog(cache, lambda error: None), list(range(77_001, 77_033))
    text = PromptTokens(tokens, b"root")
    keys = [bytes([i]) * 32 for i in range(2)]
    cache.store({0: GroupKeys(keys, prompt_tokens=text)}, {0: [0, 1]})
    cache.lookup({0: GroupKeys(keys, prompt_tokens=PromptTokens(tokens, b"root"))}, 0.0)
    cache.lookup({0: GroupKeys(keys, device=(), prompt_tokens=text)}, 0.0)
    written = log.write()
    assert pickle.dumps(tokens)[20:60] not in written.read_bytes()
    assert b"PromptTokens" not in written.read_bytes()
    assert {call[0] for call in pickle.loads(written.read_bytes())[1]} == {"store", "lookup"}  # noqa: S301
    replay(written)
