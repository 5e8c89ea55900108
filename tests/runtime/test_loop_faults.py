"""Faults of the control plane, of movers, and of callers."""

from __future__ import annotations

import contextlib
import pickle
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from call_replay import replay
from loop_kit import (
    Rig,
    StubCache,
    host_cache,
    in_chain,
    path,
    until,
)

from longshore.boundary import DEVICE, FILE, HOST, Route, Status, TransferResult
from longshore.cache import (
    GroupKeys,
    Lease,
    TieredCache,
    TierSpec,
)
from longshore.cache.eviction_policies import LRU
from longshore.errors import CacheError, JobError, StateError, TierClosedError
from longshore.runtime import BackgroundLoop, Runtime
from residents import residents_of
from scripted import Scripted


def test_fault_is_logged_once_and_its_call_log_replays(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def make() -> TieredCache:
        return TieredCache([TierSpec(HOST, 8, 4096, LRU)])

    runtime, keys = Runtime(make(), []), [bytes([i]) * 32 for i in range(8)]
    with pytest.raises(CacheError), runtime.batch() as cache:
        cache.store({0: GroupKeys([keys[0], keys[0]])})
    assert runtime.fault is None, "what a caller did wrong is the caller's"
    with runtime.batch() as cache:
        job = cache.store({0: GroupKeys(keys)})[0].job
        assert job is not None
        cache.apply_results([TransferResult(job, (Status.OK,) * 8)], 0.0)
        policy = cache._state.policies[0]
        policy._linked.after[next(iter(policy.order()))] = 1  # type: ignore[attr-defined]
        policy._place[:] = bytes(len(policy._place))  # type: ignore[attr-defined]
    for _ in range(2):
        with pytest.raises(TierClosedError, match="all tiers disabled"), runtime.batch() as cache:
            cache.store({0: GroupKeys([b"new".ljust(32)])})
    assert runtime.faults == 1
    assert not runtime.pump()
    assert not runtime.flush(1.0)
    (told,) = [record for record in caplog.records if "all tiers disabled" in record.message]
    assert told.exc_info
    (written,) = tmp_path.iterdir()
    _, calls, is_whole = pickle.loads(written.read_bytes())  # noqa: S301
    assert is_whole
    refused = [call for call in calls if call[0] == "store" and len(set(call[1][0][0].keys)) < len(call[1][0][0].keys)]
    assert len(refused) == 1
    again = replay(written)
    assert {each.key for each in residents_of(again)} <= {*keys, b"new".ljust(32)}
    assert residents_of(again)
    runtime.close(0.0)


@pytest.mark.parametrize("error", [CacheError, StateError, JobError, KeyError])
@pytest.mark.parametrize("method", ["apply_results", "take_commands", "end_step"])
def test_any_exception_of_a_loop_method_is_a_fault(
    error: type[Exception], method: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    fired = []

    def damaged(*arguments: Any) -> Any:
        fired.append(method)
        raise error("damaged by the test")

    monkeypatch.setattr(TieredCache, method, damaged)
    runtime = Runtime(host_cache(), [])
    with contextlib.suppress(TierClosedError), runtime.batch() as cache:
        cache.end_step()
    assert len(fired) == runtime.faults == 1
    assert not runtime.flush(1.0)


@pytest.mark.parametrize("error", [StateError, KeyError])
def test_internal_error_of_any_method_is_a_fault(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(TieredCache, "lookup", lambda self, *_: (_ for _ in ()).throw(error("damaged by the test")))
    runtime = Runtime(host_cache(), [])
    with pytest.raises(TierClosedError), runtime.batch() as cache:
        cache.lookup({}, 0.0)
    assert runtime.faults == 1


@pytest.mark.parametrize(("method", "faults"), [("lookup", 1), ("take_commands", 1), ("progress", 0)])
def test_interrupt_is_a_fault_if_state_may_be_half_changed(
    method: str, faults: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TieredCache, method, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    runtime = Runtime(host_cache(), [])
    with pytest.raises(KeyboardInterrupt), runtime.batch() as cache:
        getattr(cache, method)(*{"lookup": ({}, 0.0), "progress": (1,)}.get(method, ()))
    assert runtime.faults == faults


@pytest.mark.parametrize("error", [KeyError, CacheError])
def test_callers_exception_is_not_a_fault(error: type[Exception]) -> None:
    runtime = Runtime(host_cache(), [])
    with pytest.raises(error), runtime.batch():
        raise error("of the code around the calls")
    assert runtime.fault is None


def test_exception_of_mover_poll_is_not_a_fault() -> None:
    """Its exception is its caller's to see, and nothing is lost for the poll that follows."""
    cache, mover = StubCache(*in_chain(1)), Scripted(Route(HOST, HOST))
    runtime, poll = Runtime(cache, [mover]), mover.poll  # type: ignore[arg-type]
    polls = []

    def fail() -> list[TransferResult]:
        polls.append("failed")
        raise OSError("failed by the test")

    runtime.pump()  # starts the job
    mover.poll = fail  # type: ignore[method-assign]
    with pytest.raises(OSError, match="failed by the test"):
        runtime.pump()
    mover.poll = poll  # type: ignore[method-assign]
    mover.end(Status.OK)
    runtime.pump()
    assert polls == ["failed"]
    assert runtime.fault is None
    assert [result.job for result in cache.results] == [1]


def test_exception_of_mover_poll_in_the_background_disables_the_tiers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is there to see its exception: what waits ends all the same."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cache, mover, polled = host_cache(), Scripted(Route(DEVICE, HOST)), threading.Event()
    runtime = Runtime(cache, [mover])

    def fail() -> list[TransferResult]:
        polled.set()
        raise OSError("failed by the test")

    mover.poll = fail  # type: ignore[method-assign]
    loop = BackgroundLoop(runtime)
    try:
        assert polled.wait(10)
        assert until(lambda: runtime.fault is not None)
        assert isinstance(runtime.fault, OSError)
        with pytest.raises(TierClosedError), runtime.batch():
            pass
    finally:
        loop.close()


def test_exception_of_mover_close_closes_the_others(caplog: pytest.LogCaptureFixture) -> None:
    movers = [Scripted(Route(DEVICE, HOST)), Scripted(Route(HOST, FILE))]

    def fail() -> None:
        raise OSError("failed by the test")

    movers[0].close = fail  # type: ignore[method-assign]
    runtime = Runtime(host_cache(), movers)
    assert runtime.close(0.0)
    assert movers[1].closed
    assert "copies between device and host memory: could not be closed" in caplog.text


WAITS: dict[str, Callable[[Rig, Lease], Any]] = {
    "progress of a lease": lambda rig, lease: rig.runtime.wait_load(lease),
    "progress of a job": lambda rig, lease: rig.runtime.wait_jobs([rig.files.submitted[0].job], 0.0),
    "back_up_all of a flush": lambda rig, lease: rig.runtime.flush(1e9),
}


@pytest.mark.parametrize(
    ("wait", "error"),
    [
        *((wait, KeyError) for wait in WAITS),
        *((wait, StateError) for wait in WAITS),
        ("back_up_all of a flush", CacheError),
    ],
)
def test_wait_ends_when_the_control_plane_fails(
    rig: Rig, wait: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    rig.store(path(1))
    hold, fired, method = rig.load(path(1), [0]), [], wait.split(maxsplit=1)[0]

    def damaged(*arguments: Any) -> Any:
        fired.append(method)
        raise error("damaged by the test")

    monkeypatch.setattr(rig.cache, method, rig.runtime._calls._watched(method, damaged))
    said = None
    with contextlib.suppress(TierClosedError):
        said = WAITS[wait](rig, hold)
    assert said is {"progress of a job": False, "back_up_all of a flush": False}.get(wait), (
        "a job that has not ended is in flight"
    )
    assert len(fired) == rig.runtime.faults == 1
    assert rig.runtime.in_flight(rig.files.submitted[0].job)
    rig.files.end()
    assert rig.runtime.wait_jobs([rig.files.submitted[0].job], 1e9)


def test_failing_mover_is_polled_once_after_a_fault(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    rig.store(path(1))
    rig.load(path(1), [0])
    (reading,) = rig.files.submitted
    with rig.runtime.batch() as cache:
        cache.store({0: GroupKeys(path(1, first=7))}, {0: [3]})
    (storing,) = rig.device.submitted
    polls = []

    def fail(*arguments: Any) -> Any:
        polls.append(arguments)
        raise OSError("failed by the test")

    rig.files.poll = rig.files.cancel = fail  # type: ignore[method-assign]
    rig.runtime.fail(KeyError("damaged by the test"))
    assert polls == [(reading.job,)]
    assert rig.device.cancelled == [storing.job], "also behind a mover that cannot cancel"
    assert rig.runtime.pump()
    rig.device.end()
    for _ in range(3):
        assert not rig.runtime.pump(), "nothing will be heard of any more"
    assert polls == [(reading.job,), ()]
    assert not rig.runtime.wait_jobs([reading.job], 0.0), "what has not ended may still write"
    assert rig.runtime.wait_jobs([storing.job], 0.0)
    assert (
        sum(
            "file tier: results cannot be read; slots of jobs in flight are blocked" in record.getMessage()
            for record in caplog.records
        )
        == 1
    )
    assert not rig.runtime.close(0.0)
    assert rig.files.closed


def test_failing_device_copies_are_not_blamed_on_a_tier(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def fail() -> list[TransferResult]:
        raise OSError("failed by the test")

    rig.device.poll = fail  # type: ignore[method-assign]
    rig.runtime.fail(KeyError("damaged by the test"))
    rig.runtime.pump()
    lines = [record.getMessage() for record in caplog.records if "results cannot be read" in record.getMessage()]
    assert lines == [
        "copies between device and host memory: results cannot be read; slots of jobs in flight are blocked; "
        "restart the engine"
    ]


def test_former_name_of_a_batch_warns(rig: Rig) -> None:
    with (
        pytest.warns(DeprecationWarning, match="Runtime.transaction was renamed: use batch"),
        rig.runtime.transaction() as cache,
    ):
        assert cache is rig.cache
