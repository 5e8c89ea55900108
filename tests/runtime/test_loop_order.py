"""Order of transfers, upstream failures, refusals, and ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loop_kit import (
    IN,
    OUT,
    Machine,
    Rig,
    StubCache,
    in_chain,
    path,
)

from longshore.boundary import FILE, HOST, Cancel, Route, Status
from longshore.cache import CacheGroup, GroupKeys, MissReason
from longshore.errors import (
    CacheError,
    DeviceError,
    FreedLayoutError,
    PlanError,
    QueueFullError,
    TierClosedError,
    TierError,
)
from longshore.runtime import Runtime, TierMover
from longshore.tiers.base import Op, TierOp
from residents import residents_of
from scripted import Scripted


def test_transfer_waits_for_the_jobs_it_depends_on(rig: Rig) -> None:
    rig.store(path(2))
    hold = rig.load(path(2), [5, 6])
    (reading,) = rig.files.submitted
    assert rig.device.submitted == []
    rig.runtime.pump()
    assert rig.device.submitted == []
    rig.files.end()
    rig.runtime.pump()
    (copying,) = rig.device.submitted
    assert copying.after == (reading.job,)
    assert copying.sections[0].blocks == (5, 6)
    rig.device.end()
    assert rig.runtime.wait_load(hold, 0.0).outcome == (2, (FILE, FILE))
    rig.check_idle()


def test_two_requests_for_the_same_chunks_share_one_read(rig: Rig) -> None:
    rig.store(path(2))
    first, second = rig.load(path(2), [1, 2]), rig.load(path(2), [3, 4])
    assert len(rig.files.submitted) == 1
    rig.files.end()
    rig.runtime.pump()
    assert [t.sections[0].blocks for t in rig.device.submitted] == [(1, 2), (3, 4)]
    rig.device.end()
    rig.device.end()
    assert rig.runtime.wait_load(first, 0.0).outcome == rig.runtime.wait_load(second, 0.0).outcome == (2, (FILE, FILE))


@pytest.mark.parametrize(
    ("per_chunk", "skip", "blocks", "left"),
    [(1, 0, [4, 5, 6], (4,)), (2, 0, [4, 5, 6, 7, 8], (4, 5)), (2, 1, [4, 5, 6, 7, 8], (4,))],
)
def test_failed_upstream_items_and_items_behind_them_are_not_copied(
    per_chunk: int, skip: int, blocks: list[int], left: tuple[int, ...]
) -> None:
    rig = Rig(blocks_per_chunk=per_chunk)
    rig.store(path(3))
    hold = rig.load(path(3), blocks, skip)
    rig.files.end(Status.OK, Status.CORRUPT, Status.OK)
    rig.runtime.pump()
    (copying,) = rig.device.submitted
    assert [item.key for item in copying.items] == path(1)
    assert copying.sections[0].blocks == left
    rig.device.end()
    assert rig.runtime.wait_load(hold, 0.0).outcome.num_chunks == 1
    assert rig.misses() == {"corrupt": 1, "after_miss": 1}
    rig.check_idle()


def test_failed_item_of_a_group_is_counted_and_others_behind() -> None:
    rig = Rig(groups=(CacheGroup(block_size=1), CacheGroup(block_size=1, window=2)))
    groups = {0: path(3), 1: path(3, first=50)}
    for group, keys in groups.items():
        rig.store(keys, group)
    with rig.runtime.batch() as cache:
        found = cache.lookup({group: GroupKeys(keys) for group, keys in groups.items()}, rig.now)
        assert found.lease is not None
        order = cache.load(found.lease, {0: [1, 2, 3], 1: [4, 5]})
        assert order.num_chunks == 5
    rig.files.end(Status.OK, Status.OK, Status.OK, Status.CORRUPT, Status.OK)
    rig.runtime.pump()
    rig.device.end()
    assert rig.runtime.wait_load(found.lease, 0.0).outcome == (0, ())
    assert rig.misses() == {"corrupt": 1, "after_miss": 4}
    rig.check_idle()


def test_failed_first_upstream_item_ends_the_dependent_transfer(rig: Rig) -> None:
    rig.store(path(2))
    hold = rig.load(path(2), [1, 2])
    rig.files.end(Status.IO_ERROR, Status.OK)
    assert rig.runtime.wait_load(hold, 0.0).outcome == (0, ())
    assert rig.device.submitted == []
    assert rig.misses() == {"io_error": 1, "after_miss": 1}
    rig.check_idle()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (TierError("no"), "internal_error"),
        (PlanError("no"), "internal_error"),
        (TierClosedError("no"), "tier_off"),
        (FreedLayoutError("no"), "tier_off"),
        (QueueFullError("no"), "queue_full"),
        (DeviceError("no"), "device_error"),
        (RuntimeError("CUDA error"), "internal_error"),
    ],
    ids=lambda e: type(e).__name__,
)
def test_refused_load_is_a_miss_and_copies_no_slots(error: Any, reason: str) -> None:
    rig = Rig()
    rig.store(path(2))
    rig.files.refuse = error
    hold = rig.load(path(2), [1, 2])
    rig.runtime.pump()
    assert rig.device.submitted == [], "bytes that never came were copied to the device"
    assert rig.runtime.wait_load(hold, 0.0).outcome == (0, ())
    assert rig.misses() == {reason: 2}
    assert {r.slot.tier for r in residents_of(rig.cache)} == {FILE}, "a refusal is not the fault of the stored bytes"
    rig.check_idle()


def test_refused_backup_keeps_the_chunk_in_host_memory(rig: Rig) -> None:
    rig.store(path(1))
    rig.device.refuse = PlanError("block 99 does not exist")
    hold = rig.load(path(1), [1])
    rig.files.end()
    assert rig.runtime.wait_load(hold, 0.0).outcome == (0, ())
    assert {r.slot.tier for r in residents_of(rig.cache)} == {HOST, FILE}
    rig.check_idle()


def test_route_without_a_mover_is_a_miss() -> None:
    rig = Rig(with_files=False)
    with rig.runtime.batch() as cache:
        cache.store({0: GroupKeys(path(1))}, {0: [0]})
    rig.device.end()
    rig.check_idle()
    assert rig.cache.counters.drops[FILE].total() == 1
    assert [r.slot.tier for r in residents_of(rig.cache)] == [HOST]


def test_transfer_ends_when_all_ranks_have_ended(rig: Rig) -> None:
    rig = Rig(ranks=2)
    rig.store(path(2))
    hold = rig.load(path(2), [1, 2])
    rig.files.end(rank=0)
    rig.runtime.pump()
    assert rig.device.submitted == []
    rig.files.end(rank=1)
    rig.runtime.pump()
    assert len(rig.device.submitted) == 1
    rig.device.end(rank=0)
    rig.runtime.pump()
    assert rig.cache.progress(hold).outcome is None
    rig.device.end(Status.OK, Status.SHORT, rank=1)
    assert rig.runtime.wait_load(hold, 0.0).outcome == (1, (FILE,))
    rig.check_idle()


@pytest.mark.parametrize("failing", [0, 1])
def test_failure_on_one_rank_fails_later_dependents(failing: int) -> None:
    rig = Rig(ranks=2)
    rig.store(path(2))
    first = rig.load(path(2), [1, 2])
    how = (Status.OK, Status.CORRUPT)
    rig.files.end(*(how if failing == 0 else (Status.OK,)), rank=0)
    rig.runtime.pump()
    second = rig.load(path(2), [3, 4])
    rig.files.end(*(how if failing == 1 else (Status.OK,)), rank=1)
    rig.runtime.pump()
    assert [len(copying.items) for copying in rig.device.submitted] == [1, 1]
    rig.device.end()
    rig.device.end()
    assert rig.runtime.wait_load(first, 0.0).outcome == rig.runtime.wait_load(second, 0.0).outcome == (1, (FILE,))
    rig.check_idle()


@pytest.mark.parametrize("end", ["deadline", "close"])
def test_each_transfer_of_a_chain_ends_exactly_once(end: str) -> None:
    cache, mover, now = StubCache(*in_chain(1, 2, 3, 4)), Scripted(Route(HOST, HOST)), 0.0
    runtime = Runtime(cache, [mover], clock=lambda: now)  # type: ignore[arg-type]
    runtime.pump()
    if end == "close":
        runtime.close(0.0)
    else:
        now = 11.0
        runtime.pump()
        assert mover.cancelled == [1]
        mover.end(Status.CANCELLED)
        runtime.pump()
    assert sorted(result.job for result in cache.results) == [1, 2, 3, 4]


def test_failure_propagates_through_a_chain_of_transfers() -> None:
    cache, mover = StubCache(*in_chain(1, 2, 3)), Scripted(Route(HOST, HOST))
    runtime = Runtime(cache, [mover], clock=lambda: 0.0)  # type: ignore[arg-type]
    runtime.pump()
    mover.end(Status.SHORT)
    runtime.pump()
    assert [(r.job, r.statuses) for r in cache.results] == [(job, (Status.SHORT,)) for job in (1, 2, 3)]
    assert len(mover.submitted) == 1


def test_cancel_of_an_ended_job_is_ignored() -> None:
    runtime = Runtime(StubCache(Cancel(7)), [])  # type: ignore[arg-type]
    assert not runtime.pump()


def test_commands_before_a_callers_error_are_submitted(rig: Rig) -> None:
    with pytest.raises(CacheError), rig.runtime.batch() as cache:
        cache.store({0: GroupKeys(path(1))}, {0: [0]})
        cache.store({0: GroupKeys(path(1))}, {0: [0, 1, 2]})
    assert len(rig.device.submitted) == 1


@pytest.mark.parametrize("route", [OUT, IN])
def test_internal_error_of_a_submission_fails_one_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, route: Route
) -> None:
    machine, fired = Machine(tmp_path), list[Route]()
    operation = TierMover._operation

    def broken(mover: TierMover, op: Op, *rest: Any) -> TierOp:
        if (op is Op.WRITE) == (route == OUT):
            fired.append(route)
            raise ZeroDivisionError("an error of ours")
        return operation(mover, op, *rest)

    def store(keys: list[bytes], blocks: list[int]) -> None:
        with machine.runtime.batch() as cache:
            cache.store({0: GroupKeys(keys)}, {0: blocks})
        assert machine.runtime.flush(10.0)

    first, second = path(2), path(2, first=50)
    machine.memory.blocks[:] = np.arange(8, dtype=np.uint8)[:, None]
    if route == IN:
        store(first, [0, 1])
        with machine.runtime.batch() as cache:
            cache.discard(first, HOST)
    with monkeypatch.context() as patched:
        patched.setattr(TierMover, "_operation", broken)
        if route == OUT:
            store(first, [0, 1])
        else:
            assert machine.load(first, [4, 5]) == (0, ())
    assert fired, "the fault did not fire"
    assert {each.slot.tier for each in residents_of(machine.cache)} == {HOST if route == OUT else FILE}
    store(second, [2, 3])
    assert {each.key for each in residents_of(machine.cache) if each.slot.tier == FILE} >= set(second)
    if route == IN:
        assert machine.load(first, [4, 5]) == (2, (FILE, FILE))
        assert (machine.memory.blocks[4:6] == machine.memory.blocks[:2]).all()
        assert machine.cache.counters.misses[MissReason.INTERNAL_ERROR] == 2
    assert len(fired) == 1
    assert machine.cache.counters.internal_errors == (2 if route == IN else 1), "with the copy that waited for the read"
    (told,) = [record for record in caplog.records if "could not be submitted" in record.message]
    assert told.exc_info
    machine.close()


def test_repeated_internal_errors_are_counted_each_and_logged_seldom(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.store(path(1))
    rig.files.refuse = ZeroDivisionError("an error of ours")
    for _ in range(5):
        rig.load(path(1), [1])
        rig.runtime.pump()
    assert rig.cache.counters.internal_errors == 10, "with the copies that waited for the reads"
    assert len([record for record in caplog.records if "could not be submitted" in record.message]) == 1
