"""Deadlines and cancellation of transfers and waits."""

from __future__ import annotations

import time

import pytest
from loop_kit import (
    Rig,
    path,
)

from longshore.boundary import FILE, HOST, Status
from longshore.cache import (
    GroupKeys,
    PrefetchPolicy,
    load,
)
from residents import residents_of


def test_transfer_not_begun_by_its_deadline_ends(rig: Rig) -> None:
    rig.store(path(1))
    hold = rig.load(path(1), [1])
    rig.now += 4.9
    assert rig.runtime.pump()
    assert rig.files.cancelled == []
    rig.now += 0.2
    rig.runtime.pump()
    assert rig.runtime.wait_load(hold, 0.0).outcome == (0, ())
    assert rig.files.cancelled == [rig.files.submitted[0].job]  # it has begun, as far as anyone knows here
    rig.runtime.pump()
    assert len(rig.files.cancelled) == 1
    assert rig.misses() == {"deadline": 1}
    rig.files.end(Status.CANCELLED)
    rig.check_idle()
    assert [r.slot.tier for r in residents_of(rig.cache)] == [FILE]


def test_each_deadline_passes_without_a_call_of_the_engine(rig: Rig) -> None:
    rig.store(path(2))
    first = rig.load(path(2), [1, 2])
    rig.now += 3.0
    second = rig.load(path(2), [3, 4])
    (read,) = rig.files.submitted
    rig.now += 2.0
    rig.runtime.pump()
    assert rig.cache.progress(first).outcome == (0, ())
    assert (rig.cache.progress(second).outcome, rig.files.cancelled) == (None, [])
    rig.now += 3.0
    rig.runtime.pump()
    assert rig.cache.progress(second).outcome == (0, ())
    assert rig.files.cancelled == [read.job]
    rig.files.end(Status.CANCELLED)
    rig.check_idle()


def test_prefetch_policy_decides_how_long_a_request_waits(rig: Rig) -> None:
    rig.store(path(2))
    with rig.runtime.batch() as cache:
        hold = cache.lookup({0: GroupKeys(path(2))}, rig.now).lease
        assert hold is not None
        cache.prefetch(hold, rig.now)
    assert rig.runtime.wait_load(hold).leading(HOST) == 0
    with rig.runtime.batch() as cache:
        cache.prefetch(hold, rig.now, policy=PrefetchPolicy.WAIT)
    rig.files.end()
    assert rig.runtime.wait_load(hold).leading(HOST) == 2
    rig.check_idle()


def test_item_cancelled_at_its_deadline_ends_as_deadline(rig: Rig) -> None:
    rig.store(path(2))
    hold = rig.load(path(2), [1, 2])
    rig.files.end()
    rig.runtime.pump()
    rig.now += 6.0
    rig.device.end(Status.OK, Status.CANCELLED)
    assert rig.runtime.wait_load(hold, 0.0).outcome == (1, (FILE,))
    assert rig.device.cancelled == [rig.device.submitted[0].job]
    assert rig.misses() == {"deadline": 1}
    rig.check_idle()


def test_item_never_submitted_does_not_end_as_deadline(rig: Rig) -> None:
    rig.store(path(3))
    hold = rig.load(path(3), [1, 2, 3])
    rig.files.end(Status.OK, Status.CORRUPT, Status.OK)
    rig.runtime.pump()
    rig.now += 6.0
    rig.device.end(Status.CANCELLED)
    assert rig.runtime.wait_load(hold, 0.0).outcome == (0, ())
    assert rig.misses() == {"deadline": 1, "corrupt": 1, "after_miss": 1}


def test_writes_use_the_write_timeout(rig: Rig) -> None:
    with rig.runtime.batch() as cache:
        cache.store({0: GroupKeys(path(1))}, {0: [0]})
    rig.now += 6.9
    rig.runtime.pump()
    assert rig.device.cancelled == []
    rig.now += 0.2
    rig.runtime.pump()
    assert len(rig.device.cancelled) == 1


def test_deadline_counts_from_the_command(rig: Rig) -> None:
    rig.now += 1000.0
    with rig.runtime.batch() as cache:
        cache.store({0: GroupKeys(path(1))}, {0: [0]})
    rig.runtime.pump()
    assert rig.device.submitted[0].deadline == rig.now + 7.0
    assert rig.device.cancelled == []


def test_cancelled_waiting_transfer_is_never_submitted(rig: Rig) -> None:
    rig.store(path(1))
    hold = rig.load(path(1), [1])
    with rig.runtime.batch() as cache:
        cache.release(hold)
    rig.files.end()
    rig.check_idle()
    assert rig.device.submitted == []
    assert {r.slot.tier for r in residents_of(rig.cache)} == {HOST, FILE}  # what arrives is there for the next


def test_cancelled_running_transfer_ends_with_a_result(rig: Rig) -> None:
    rig.store(path(1))
    hold = rig.load(path(1), [1])
    rig.files.end()
    rig.runtime.pump()
    (copying,) = rig.device.submitted
    with rig.runtime.batch() as cache:
        cache.release(hold)
    assert rig.device.cancelled == [copying.job]
    assert rig.runtime.in_flight(copying.job)
    assert not rig.runtime.wait_jobs([copying.job], 0.0)
    rig.device.end(Status.CANCELLED)
    assert rig.runtime.wait_jobs([copying.job], 0.0)
    rig.check_idle()


def test_wait_ends_at_its_deadline_with_the_chunks_that_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "LOAD_BATCH", 1)
    rig = Rig(load_timeout=0.5)
    rig.runtime.clock = time.monotonic
    rig.now = begin = time.monotonic()
    rig.store(path(3))
    hold = rig.load(path(3), [1, 2, 3])
    rig.files.end()
    rig.runtime.pump()
    rig.device.end()
    assert rig.runtime.wait_load(hold, 0.02).outcome is None
    assert rig.runtime.wait_load(hold).outcome == (1, (FILE,))
    assert time.monotonic() - begin >= 0.5
    assert rig.misses() == {"deadline": 2}
    while rig.files.open:
        rig.files.end()
    rig.check_idle()
