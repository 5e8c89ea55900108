"""How jobs end early: cancel, deadline, failure, close; what they keep until then."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_rig import Rig
from gated_device import A_MOMENT, TIMEOUT, GatedDevice
from transfer_kit import Pools, flat, transfer

from longshore.boundary import DEVICE, HOST, Section, Status, Urgency
from longshore.errors import DeviceError, FreedLayoutError, TierClosedError
from longshore.transfer import D2H, H2D, CpuDevice, TransferEngine, ordering
from longshore.transfer.pieces import CopyBatch

OK = Status.OK


def test_cancel_takes_effect_between_batches() -> None:
    rig = Rig(max_batch_bytes=100)  # two blocks of 48 bytes a batch
    gate = rig.device.gates[HOST]
    gate.shut(after=1)
    rig.offload(1, (0, 2, 4, 6, 8), [0, 1, 2, 3, 4])
    assert gate.wait_arrived(2)
    rig.engine.cancel(1)
    gate.open()
    (result,) = rig.results(1)
    assert result.statuses == (OK, OK, OK, OK, Status.CANCELLED)
    assert result.bytes == 4 * 48
    rig.expect(HOST, (0, 2, 4, 6), [0, 1, 2, 3])
    rig.model.host[rig.pools.host.slabs.offset(0, 4) + 48 :][: 4096 - 48] = 0
    rig.model.check(rig.pools)
    rig.engine.close()


def test_job_cancelled_in_the_queue_copies_nothing(rig: Rig) -> None:
    gate = rig.device.gates[HOST]
    gate.shut()
    rig.offload(1, (0,), [0])
    assert gate.wait_arrived(1)
    rig.offload(2, (1,), [1])
    rig.engine.cancel(2)
    rig.engine.cancel(2)
    rig.engine.cancel(12345)
    gate.open()
    first, second = rig.results(1, 2)
    assert (first.statuses, second.statuses, second.bytes) == ((OK,), (Status.CANCELLED,), 0)
    rig.expect(HOST, (0,), [0])
    rig.model.check(rig.pools)


def test_cancel_of_an_ended_job_is_ignored(rig: Rig) -> None:
    rig.offload(1, (0,), [0])
    assert [result.statuses for result in rig.results(1)] == [(OK,)]
    rig.engine.cancel(1)
    assert rig.engine.poll() == []


def test_batches_do_not_begin_after_the_deadline() -> None:
    rig = Rig(max_batch_bytes=48)
    gate = rig.device.gates[DEVICE]
    gate.shut(after=1)
    rig.onboard(1, (0, 1, 2), [0, 1, 2], deadline=3.0)
    rig.onboard(2, (5,), [5], deadline=3.0)
    rig.onboard(3, (6,), [6], deadline=9.0)
    assert gate.wait_arrived(2)
    rig.now = 4.0
    gate.open()
    first, second, third = rig.results(1, 2, 3)
    assert first.statuses == (OK, OK, Status.DEADLINE)
    assert (second.statuses, second.bytes) == ((Status.DEADLINE,), 0)
    assert third.statuses == (OK,)
    rig.expect(DEVICE, (0, 1), [0, 1])
    rig.expect(DEVICE, (6,), [6])
    rig.model.check(rig.pools)
    rig.engine.close()


@pytest.mark.parametrize("step", ["bind", "copy", "finish"])
def test_device_failure_ends_its_job_and_no_other(rig: Rig, step: str, caplog: pytest.LogCaptureFixture) -> None:
    def fail_once(at: str, batch: CopyBatch | None) -> None:
        if at == step:
            rig.device.fault = lambda at, batch: None
            raise RuntimeError("the device fell off the bus")

    rig.device.fault = fail_once
    rig.offload(1, (0, 1), [0, 1])
    rig.offload(2, (2,), [2])
    first, second = rig.results(1, 2)
    assert (first.statuses, first.bytes) == ((Status.DEVICE_ERROR, Status.DEVICE_ERROR), 0)
    assert second.statuses == (OK,)
    assert [record.message for record in caplog.records] == [
        "transfer job 1 (device->host) failed; its blocks were not stored; read the traceback, and report it if "
        "it repeats"
    ]


@pytest.mark.parametrize("step", ["bind", "copy", "finish"])
@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (KeyError("a bug"), Status.INTERNAL_ERROR),
        (TypeError("a bug"), Status.INTERNAL_ERROR),
        (NotImplementedError("a bug"), Status.INTERNAL_ERROR),
        (MemoryError("no room for indices"), Status.DEVICE_ERROR),
        (DeviceError("cuMemcpyAsync failed"), Status.DEVICE_ERROR),
    ],
    ids=lambda each: each.value if isinstance(each, Status) else type(each).__name__,
)
def test_a_bug_in_a_copy_is_no_device_error(rig: Rig, step: str, error: Exception, expected: Status) -> None:
    def fail_once(at: str, batch: CopyBatch | None) -> None:
        if at == step:
            rig.device.fault = lambda at, batch: None
            raise error

    rig.device.fault = fail_once
    rig.offload(1, (0, 1), [0, 1])
    rig.offload(2, (2,), [2])
    first, second = rig.results(1, 2)
    assert (first.statuses, first.bytes) == ((expected,) * 2, 0)
    assert second.statuses == (OK,)


def test_failed_batch_fails_all_items_of_its_job() -> None:
    rig = Rig(max_batch_bytes=48)

    def fail_second(at: str, batch: CopyBatch | None) -> None:
        if batch is not None and batch.parts[0].item == 1:
            raise RuntimeError("no")

    rig.device.fault = fail_second
    rig.onboard(1, (0, 1, 2), [0, 1, 2])
    (result,) = rig.results(1)
    # What the batches before it brought is not trusted: the device may have failed earlier than it said.
    assert (result.statuses, result.bytes) == ((Status.DEVICE_ERROR,) * 3, 0)
    rig.engine.close()


def test_close_waits_for_running_batches_and_ends_the_rest() -> None:
    before = set(threading.enumerate())
    rig = Rig()
    gate = rig.device.gates[HOST]
    gate.shut()
    rig.offload(1, (0,), [0])
    rig.offload(2, (1,), [1])
    assert gate.wait_arrived(1)
    closing = threading.Thread(target=rig.engine.close)
    closing.start()
    with pytest.raises(TierClosedError):
        while closing.is_alive():
            rig.engine.begin_step()
    gate.open()
    closing.join(TIMEOUT)
    rig.engine.close()
    assert [(result.job, result.statuses) for result in rig.engine.poll()] == [(1, (OK,)), (2, (Status.TIER_OFF,))]
    assert set(threading.enumerate()) <= before
    assert rig.device.closed >= 1
    assert rig.device.streams_closed >= 2
    rig.expect(HOST, (0,), [0])
    rig.model.check(rig.pools)


def test_closed_engine_only_returns_results() -> None:
    rig = Rig()
    rig.engine.close()
    with pytest.raises(TierClosedError):
        rig.offload(1, (0,), [0])
    with pytest.raises(TierClosedError):
        rig.engine.begin_step()
    assert rig.engine.wait([1], 0)
    assert rig.engine.poll() == []


def test_jobs_on_freed_memory_are_refused_or_copy_nothing(rig: Rig) -> None:
    gate = rig.device.gates[HOST]
    gate.shut()
    rig.offload(1, (0,), [0])
    assert gate.wait_arrived(1)
    rig.onboard(2, (5,), [5])
    rig.offload(3, (6,), [6])
    assert rig.engine.wait([2], TIMEOUT)
    rig.expect(DEVICE, (5,), [5])
    tensors = rig.pools.layout.tensors
    rig.pools.layout.free()
    with pytest.raises(FreedLayoutError):
        rig.offload(4, (0,), [0])
    rig.pools.layout.take_back(tensors)
    gate.open()
    statuses = {result.job: result.statuses for result in rig.results(1, 2, 3)}
    assert statuses[3] == (Status.TIER_OFF,)
    assert statuses[1] == (Status.TIER_OFF,)  # it was begun, but its addresses were of the memory that went
    rig.model.host[48:4096] = 0  # only the padding of its slot was written
    rig.model.check(rig.pools)
    rig.offload(5, (7,), [7])
    rig.expect(HOST, (7,), [7])
    assert [result.statuses for result in rig.results(5)] == [(OK,)]


def test_wait_layer_returns_the_status_of_a_stopped_job() -> None:
    rig = Rig(flat(16, 24, refs=3))
    gate = rig.device.gates[DEVICE]
    gate.shut(after=1)
    rig.engine.submit(transfer(1, H2D, [Section(0, 0, (3, 1))], [6, 2], by_layer=True))
    assert gate.wait_arrived(2)
    rig.engine.cancel(1)
    gate.open()
    (result,) = rig.results(1)
    assert (result.statuses, result.bytes) == ((Status.CANCELLED,) * 2, 0)
    assert [rig.engine.wait_layer(1, layer) for layer in range(3)] == [OK, OK, Status.CANCELLED]
    rig.engine.close()


def test_layer_whose_copy_fails_on_completion_is_missing() -> None:
    rig = Rig(flat(16, 24, refs=3))

    def fail(step: str, batch: CopyBatch | None) -> None:
        if step == "finish":
            raise RuntimeError("the device fell off the bus")

    rig.device.fault = fail
    rig.engine.submit(transfer(1, H2D, [Section(0, 0, (3, 1))], [6, 2], by_layer=True))
    (result,) = rig.results(1)
    assert result.statuses == (Status.DEVICE_ERROR,) * 2
    assert [rig.engine.wait_layer(1, layer) for layer in range(3)] == [Status.DEVICE_ERROR] * 3
    rig.engine.close()


def test_shutdown_waits_for_all_jobs() -> None:
    rig = Rig()
    gate = rig.device.gates[HOST]
    gate.shut()
    for job in range(4):
        rig.offload(job, (job,), [job])
    threading.Timer(0.05, gate.open).start()
    assert rig.engine.shutdown(TIMEOUT)
    assert [result.statuses for result in rig.results(0, 1, 2, 3)] == [(OK,)] * 4
    assert rig.engine.shutdown()


def test_shutdown_returns_false_after_its_timeout() -> None:
    rig = Rig()
    gate = rig.device.gates[HOST]
    gate.shut()
    rig.offload(1, (1,), [1])
    assert gate.wait_arrived(1)
    rig.offload(2, (2,), [2])
    threading.Timer(0.2, gate.open).start()
    assert not rig.engine.shutdown(0.05)
    assert [result.statuses for result in rig.results(1, 2)] == [(OK,), (Status.TIER_OFF,)]


def test_batches_after_a_failed_one_are_not_copied() -> None:
    rig = Rig(max_batch_bytes=48)

    def fail(step: str, batch: CopyBatch | None) -> None:
        if step == "finish":
            raise RuntimeError("the device fell off the bus")

    rig.device.fault = fail
    rig.onboard(1, (0, 1, 2), [0, 1, 2])
    assert [result.statuses for result in rig.results(1)] == [(Status.DEVICE_ERROR,) * 3]
    assert rig.device.log == ["device begins", "device ends"]
    rig.engine.close()


WAITS: list[tuple[str, Callable[[TransferEngine], object]]] = [
    ("wait", lambda engine: engine.wait([1])),
    ("wait_layer", lambda engine: engine.wait_layer(1, 1)),
    ("end_step", lambda engine: engine.end_step()),
    ("shutdown", lambda engine: engine.shutdown()),
]


@pytest.mark.parametrize(("name", "wait"), WAITS, ids=[name for name, _ in WAITS])
def test_waits_without_timeout_return_when_the_job_ends(name: str, wait: Callable[[TransferEngine], object]) -> None:
    rig = Rig()
    rig.device.fault = lambda step, batch: time.sleep(A_MOMENT if step == "finish" else 0.0)  # it sleeps again by then
    gate = rig.device.gates[DEVICE]
    gate.shut()
    rig.engine.submit(transfer(1, H2D, [Section(0, 0, (3,))], [6], by_layer=True))
    waiting = threading.Thread(target=wait, args=(rig.engine,), daemon=True)
    waiting.start()
    assert gate.wait_arrived(1)
    waiting.join(0.05)
    assert waiting.is_alive()
    gate.open()
    waiting.join(TIMEOUT)
    assert not waiting.is_alive()
    rig.engine.close()


def test_failed_lane_ends_its_jobs_and_closes_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    """A fault where none is expected: of the clock, say."""
    pools = Pools(flat(16), 8)
    device = GatedDevice()

    def clock() -> float:
        if is_broken and threading.current_thread().name == "longshore into host":
            raise OverflowError("the clock struck thirteen")
        return 0.0

    is_broken = False
    engine = TransferEngine(pools.layout, device, pools.host, clock=clock)
    device.fault = lambda step, batch: time.sleep(A_MOMENT if step == "drain" else 0.0)  # who waits sleeps by then
    device.gates[HOST].shut()
    engine.submit(transfer(1, D2H, [Section(0, 0, (1,))], [1]))
    assert device.gates[HOST].wait_arrived(1)
    is_broken = True
    engine.submit(transfer(2, D2H, [Section(0, 0, (2,))], [2], deadline=5.0))
    opener = threading.Timer(A_MOMENT, device.gates[HOST].open)
    opener.start()
    assert engine.wait([1, 2])  # it sleeps by then, and is woken by the lane, not by the clock
    opener.join()
    assert {result.job: result.statuses for result in engine.poll()}[2] == (Status.INTERNAL_ERROR,)
    with pytest.raises(TierClosedError):
        engine.submit(transfer(3, D2H, [Section(0, 0, (3,))], [3]))
    assert device.drained == 1
    assert not any(engine.stats().queued.values())
    assert engine.shutdown(TIMEOUT)
    assert "copies into host stopped: their thread failed" in caplog.text


def test_a_failed_lane_whose_device_cannot_be_synchronized_says_so(caplog: pytest.LogCaptureFixture) -> None:
    pools, device, fired = Pools(flat(16), 8), GatedDevice(), list[str]()

    def clock() -> float:
        if threading.current_thread().name == "longshore into host":
            raise OverflowError("the clock struck thirteen")
        return 0.0

    def fail(step: str, batch: CopyBatch | None) -> None:
        if step == "drain":
            fired.append(step)
            raise RuntimeError("the device fell off the bus")

    device.fault = fail
    engine = TransferEngine(pools.layout, device, pools.host, clock=clock)
    engine.submit(transfer(1, D2H, [Section(0, 0, (1,))], [1], deadline=5.0))
    assert engine.wait([1], TIMEOUT)
    assert [result.statuses for result in engine.poll()] == [(Status.INTERNAL_ERROR,)]
    assert engine.shutdown(TIMEOUT)
    assert fired == ["drain"]
    (told,) = [record for record in caplog.records if "device synchronization failed" in record.message]
    assert told.exc_info
    assert "the device fell off the bus" in caplog.text


def test_single_fault_in_a_wait_ends_its_lanes_jobs() -> None:
    """The lane stands at its gate when the clock fails: it is told, and does not take the gate for open."""
    pools = Pools(flat(16), 8)
    device = GatedDevice()
    faults = 0

    def clock() -> float:
        nonlocal faults
        if threading.current_thread().name == "longshore into device" and not faults:
            faults += 1
            raise OverflowError("the clock struck thirteen")
        return 0.0

    engine = TransferEngine(pools.layout, device, pools.host, clock=clock)
    device.gates[HOST].shut()
    engine.submit(transfer(1, D2H, [Section(0, 0, (1,))], [1]))
    assert device.gates[HOST].wait_arrived(1)
    engine.submit(transfer(2, H2D, [Section(0, 0, (2,))], [1], deadline=5.0))  # reads what job 1 still writes
    assert engine.wait([2], TIMEOUT)
    assert faults == 1
    device.gates[HOST].open()
    assert engine.wait([1], TIMEOUT)
    assert {result.job: result.statuses for result in engine.poll()}[2] == (Status.INTERNAL_ERROR,)
    assert engine.shutdown(TIMEOUT)


_GONE = """
import gc, sys, threading
import torch
from transfer_kit import transfer
from longshore.boundary import Section
from longshore.layout import KVGroup, KVLayout, PageRef
from longshore.boundary import Slabs
from longshore.tiers.arena import Arena
from longshore.tiers.host import HostSlabs
from longshore.transfer import D2H, H2D, CpuDevice, TransferEngine
from longshore.transfer.device import base

BLOCKS, PAGE = 4, 4 << 20
arrived, gone, copied = threading.Event(), threading.Event(), threading.Event()
copy_pieces = base.copy_pieces

def late(source, destination, size):
    arrived.set()
    gone.wait()
    copy_pieces(source, destination, size)
    copied.set()

def submitted(route):
    tensor = torch.ones(BLOCKS * PAGE, dtype=torch.uint8)
    layout = KVLayout((KVGroup("kv", 4, 1, (PageRef(0, 0, PAGE, PAGE),)),), [tensor], BLOCKS)
    arena = Arena(BLOCKS * PAGE)
    engine = TransferEngine(layout, CpuDevice(), HostSlabs(arena, Slabs.of_one_size(PAGE, BLOCKS)))
    engine.submit(transfer(1, route, [Section(0, 0, tuple(range(BLOCKS)))], list(range(BLOCKS))))
    arrived.wait()
    return engine, layout, arena

base.copy_pieces = late
engine, layout, arena = submitted({"offload": D2H, "onboard": H2D}[sys.argv[1]])
if sys.argv[2] == "freed":
    layout.free()
elif sys.argv[2] == "closed":
    arena.close()
else:
    del engine, layout, arena
gc.collect()
gone.set()
print(copied.wait(60))
"""


@pytest.mark.parametrize(("how", "direction"), [("dropped", "offload"), ("freed", "onboard"), ("closed", "offload")])
def test_job_in_flight_keeps_its_memory_alive(how: str, direction: str) -> None:
    command = [sys.executable, "-c", _GONE, direction, how]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=300)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_threads_of_a_collected_engine_end() -> None:
    before = threading.enumerate()
    pools = Pools(flat(16), 8)
    engine = TransferEngine(pools.layout, CpuDevice(), pools.host)
    lanes = [thread for thread in threading.enumerate() if thread not in before]
    assert len(lanes) == 2
    del engine
    gc.collect()
    for thread in lanes:
        thread.join(TIMEOUT)
        assert not thread.is_alive()


def test_interpreter_exit_waits_for_threads_of_open_engines() -> None:
    before = set(threading.enumerate())
    rig = Rig()
    threads = set(threading.enumerate()) - before
    assert len(threads) == 2
    gate = rig.device.gates[HOST]
    gate.shut()
    rig.offload(1, (0,), [0])
    assert gate.wait_arrived(1)
    opener = threading.Timer(A_MOMENT, gate.open)
    opener.start()
    ordering._stop_all()  # as `atexit` does
    assert not any(thread.is_alive() for thread in threads)
    opener.join()
    assert [result.statuses for result in rig.engine.poll()] == [(OK,)]
    rig.engine.close()


def test_ended_job_holds_no_reference_to_memory() -> None:
    rig = Rig()
    memory = weakref.ref(rig.pools.layout.tensors[0])
    rig.offload(1, (3,), [1], by_layer=True)
    (result,) = rig.results(1)
    assert result.statuses == (OK,)
    rig.pools.layout.free()
    rig.pools.tensors.clear()
    gc.collect()
    assert memory() is None
    rig.engine.close()


def test_submit_refuses_a_closed_arena(rig: Rig) -> None:
    rig.pools.arena.close()
    with pytest.raises(TierClosedError):
        rig.offload(1, (3,), [1])
    assert not rig.engine.stats().queued[HOST, Urgency.DEMAND]
