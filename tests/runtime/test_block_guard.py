"""Device blocks between an engine that lets go of them and its free list."""

from __future__ import annotations

import threading

import pytest

from longshore.boundary import DEVICE, HOST, Route
from longshore.cache import GroupKeys, TieredCache, TierSpec
from longshore.runtime import Runtime
from longshore.runtime.block_guard import BlockGuard
from scripted import Scripted

AT_ONCE = 0.0


class Rig:
    """A runtime over a mover whose jobs end when the test says so."""

    def __init__(self, timeout: float = AT_ONCE) -> None:
        self.mover = Scripted(Route(DEVICE, HOST), Route(HOST, DEVICE))
        self.runtime = Runtime(TieredCache([TierSpec(HOST, 8, 4096)]), [self.mover])
        self.guard = BlockGuard(self.runtime, timeout)
        self._keys = 0

    def offload(self, *blocks: int) -> int:
        keys = [bytes([self._keys + i]) * 32 for i in range(len(blocks))]
        self._keys += len(blocks)
        with self.runtime.batch() as cache:
            job = cache.store({0: GroupKeys(keys)}, {0: blocks}, before_eviction=True)[0].job
        assert job is not None
        self.guard.add(job, blocks)
        return job

    def end(self, job: int) -> None:
        self.mover.end(job=job)
        self.runtime.pump()


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_blocks_that_no_job_touches_are_free_at_once(rig: Rig) -> None:
    assert rig.guard.settle([3, 1]) == [3, 1]
    assert rig.runtime.guard_counters.late == 0


def test_block_in_use_by_a_job_is_parked_until_end(rig: Rig) -> None:
    job = rig.offload(3, 4)
    assert rig.guard.settle([1, 3, 4]) == [1]
    assert rig.runtime.guard_counters.late == 2
    assert rig.guard.reclaim() == []
    rig.end(job)
    assert rig.guard.reclaim() == [3, 4]
    assert rig.guard.reclaim() == []


def test_all_jobs_on_a_block_are_waited_for(rig: Rig) -> None:
    first, second = rig.offload(3), rig.offload(3)
    assert rig.guard.settle([3]) == []
    rig.end(first)
    assert rig.guard.reclaim() == []
    assert rig.guard._jobs == {3: [second]}, "what has ended is kept"
    rig.end(second)
    assert rig.guard.reclaim() == [3]
    assert rig.guard._jobs == {}


def test_a_job_on_another_block_is_not_waited_for(rig: Rig) -> None:
    rig.offload(3)
    assert rig.guard.settle([4]) == [4]


def test_settle_waits_for_a_while() -> None:
    rig = Rig(timeout=10.0)
    job = rig.offload(3)
    threading.Timer(0.05, lambda: rig.mover.end(job=job)).start()
    assert rig.guard.settle([3]) == [3]
    assert rig.runtime.guard_counters.late == 0
    assert rig.runtime.guard_counters.waits == 1
    assert rig.runtime.guard_counters.seconds > 0.0


def test_drain_waits_and_forgets_what_was_parked() -> None:
    rig = Rig(timeout=10.0)
    job = rig.offload(3)
    parked = BlockGuard(rig.runtime, AT_ONCE)
    parked.add(job, [3])
    assert parked.settle([3]) == []
    threading.Timer(0.05, lambda: rig.mover.end(job=job)).start()
    rig.guard.drain()
    assert not rig.runtime.in_flight(job)
    parked.drain()
    assert parked.reclaim() == []


def test_what_drain_did_not_wait_for_is_nobodys_any_more(rig: Rig) -> None:
    rig.offload(3)
    rig.guard.drain()
    assert rig.guard.settle([3]) == [3]
