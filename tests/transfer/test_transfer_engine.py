"""The engine as a mover: results per item, refusals that change nothing, cancel, deadline, failure, close."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gated import A_MOMENT, PATIENCE, GatedDevice
from hypothesis import given, settings
from hypothesis import strategies as st
from transfer_kit import Model, Pools, chunks_of, elsewhere, flat, layouts, sections, transfer

from longshore.boundary import DEVICE, FILE, HOST, Item, Mover, Route, Section, Slot, Status, Transfer, Urgency
from longshore.errors import FreedLayoutError, LayoutError, PlanError, QueueFullError, TierClosedError
from longshore.layout import KVGroup, KVLayout, PageRef, from_rows
from longshore.transfer import INSIDE, OFFLOAD, ONBOARD, CpuDevice, TransferEngine
from longshore.transfer.lane import Layered
from longshore.transfer.plan import CopyBatch

OK = Status.OK


class Rig:
    """An engine over gated copies, with a clock that the test sets."""

    def __init__(self, layout: KVLayout | None = None, slots: int = 8, **options: Any) -> None:
        self.pools = Pools(layout or flat(16), slots)
        self.model = Model(self.pools)
        self.device = GatedDevice()
        self.now = 0.0
        self.engine = TransferEngine(self.pools.layout, self.device, self.pools.host, clock=lambda: self.now, **options)

    def offload(self, job: int, blocks: tuple[int, ...], slots: list[int], **fields: Any) -> None:
        self.engine.submit(transfer(job, OFFLOAD, [Section(0, 0, blocks)], slots, **fields))

    def onboard(self, job: int, blocks: tuple[int, ...], slots: list[int], **fields: Any) -> None:
        self.engine.submit(transfer(job, ONBOARD, [Section(0, 0, blocks)], slots, **fields))

    def expect(self, into: str, blocks: tuple[int, ...], slots: list[int]) -> None:
        self.model.move([Section(0, 0, blocks)], self.pools.images(slots), into=into)

    def results(self, *jobs: int) -> list[Any]:
        assert self.engine.wait(jobs, PATIENCE)
        return sorted(self.engine.poll(), key=lambda result: result.job)


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    for gate in made.device.gates.values():
        gate.open()
    made.engine.close()


def test_it_is_a_mover(rig: Rig) -> None:
    mover: Mover = rig.engine
    assert mover.routes == {Route(DEVICE, HOST), Route(HOST, DEVICE), Route(DEVICE, DEVICE)}


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_offload_then_onboard_into_other_blocks(data: st.DataObject) -> None:
    """Same bytes in other blocks; padding, neighbours, guard bytes and other slots untouched; image padding zero."""
    layout = data.draw(layouts())
    parts = data.draw(sections(layout))
    there = data.draw(st.composite(lambda draw: elsewhere(draw, layout, parts))())
    items = chunks_of(layout, parts)
    pools = Pools(layout, slots=items + 2, seed=data.draw(st.integers(0, 99)))
    slots = data.draw(st.permutations(range(items + 2)))[:items]
    valid = [
        (1 << layout.groups[section.group].blocks_per_chunk) - 1
        for section in parts
        for _ in range(chunks_of(layout, [section]))
    ]
    model = Model(pools)
    engine = TransferEngine(layout, CpuDevice(), pools.host, max_batch_bytes=data.draw(st.integers(1, 9000)))
    try:
        engine.submit(transfer(1, OFFLOAD, parts, slots, valid=valid))
        assert engine.wait([1], PATIENCE)
        model.move(parts, pools.images(slots), into=HOST)
        model.check(pools)
        for tensor in pools.tensors:
            tensor.bitwise_not_()
        model.device = pools.device_bytes()
        engine.submit(transfer(2, ONBOARD, there, slots, valid=valid))
        assert engine.wait([2], PATIENCE)
        model.move(there, pools.images(slots), into=DEVICE)
        model.check(pools)
        out, back = engine.poll()
        assert out.statuses == back.statuses == (OK,) * items
        moved = sum(len(section.blocks) * layout.groups[section.group].block_bytes for section in parts)
        assert out.bytes == back.bytes == moved
    finally:
        engine.close()


def test_results_say_job_bytes_seconds_and_rank() -> None:
    rig = Rig(KVLayout(flat(16).groups, flat(16).tensors, 16, ranks=2, rank=1))
    rig.device.gates[HOST].shut()
    rig.offload(7, (3, 4), [1, 2])
    assert rig.device.gates[HOST].wait_arrived(1)
    rig.device.gates[HOST].open()
    (result,) = rig.results(7)
    assert (result.job, result.statuses, result.bytes, result.rank) == (7, (OK, OK), 96, 1)
    assert result.seconds > 0
    assert result.queued_seconds == 0.0
    rig.engine.close()


def test_seconds_in_the_queue_are_those_before_the_copy(rig: Rig) -> None:
    rig.device.gates[HOST].shut()
    rig.offload(1, (3,), [1])
    assert rig.device.gates[HOST].wait_arrived(1)
    rig.offload(2, (4,), [2])
    rig.now = 5.0
    rig.device.gates[HOST].open()
    assert [result.queued_seconds for result in rig.results(1, 2)] == [0.0, 5.0]


def test_a_result_comes_when_the_copy_has_ended_not_when_it_was_submitted(rig: Rig) -> None:
    rig.device.gates[HOST].shut()
    rig.offload(1, (3,), [1])
    assert rig.device.gates[HOST].wait_arrived(1)
    assert rig.engine.poll() == []
    assert not rig.engine.wait([1], 0)
    rig.device.gates[HOST].open()
    assert [result.statuses for result in rig.results(1)] == [(OK,)]
    assert rig.engine.poll() == []


def test_a_transfer_of_nothing_ends_too(rig: Rig) -> None:
    rig.engine.submit(Transfer(1, OFFLOAD, ()))
    (result,) = rig.results(1)
    assert (result.statuses, result.bytes) == ((), 0)


def test_jobs_of_one_direction_end_in_order(rig: Rig) -> None:
    for job in range(8):
        rig.offload(job, (job,), [job])
    assert rig.engine.wait(range(8), PATIENCE)
    assert [result.job for result in rig.engine.poll()] == list(range(8))
    assert rig.device.bound == 1


def test_source_and_destination_ids_are_not_confused(rig: Rig) -> None:
    rig.onboard(1, (9, 1), [2, 6])
    rig.expect(DEVICE, (9, 1), [2, 6])
    rig.results(1)
    rig.offload(2, (12,), [3])
    rig.expect(HOST, (12,), [3])
    rig.results(2)
    rig.model.check(rig.pools)


def item(source: Slot | None, destination: Slot | None, valid: int = 1) -> Item:
    return Item(b"k" * 32, None, source, destination, valid)


HERE = Slot(HOST, 0, 1)

REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("a route of another mover", {"route": Route(HOST, FILE)}),
    ("a route that looks like an onboard", {"route": Route(FILE, DEVICE), "items": (item(HERE, None),)}),
    ("a route from the device to itself", {"route": Route(DEVICE, DEVICE)}),
    ("no host side", {"items": (item(None, None),)}),
    ("two host sides", {"items": (item(HERE, HERE),)}),
    ("the sides exchanged", {"items": (item(HERE, None),)}),
    ("a slot of another tier", {"items": (item(None, Slot(FILE, 0, 1)),)}),
    ("a slot of another pool", {"items": (item(None, Slot(HOST, 1, 1)),)}),
    ("a slot beyond the pool", {"items": (item(None, Slot(HOST, 0, 8)),)}),
    ("a negative slot", {"items": (item(None, Slot(HOST, 0, -1)),)}),
    ("no valid sub-block", {"items": (item(None, HERE, 0),)}),
    ("an item too many", {"items": (item(None, HERE), item(None, Slot(HOST, 0, 2)))}),
    ("an item too few", {"items": ()}),
    ("one slot twice", {"items": (item(None, HERE),) * 2, "sections": (Section(0, 0, (3, 4)),)}),
    ("a block beyond the pool", {"sections": (Section(0, 0, (16,)),)}),
    ("a group that does not exist", {"sections": (Section(1, 0, (3,)),)}),
    ("layers that do not exist", {"layers": (0, 9)}),
    ("layers that are no integers", {"layers": (0.0, 1.0)}),
    ("a deadline that is none", {"deadline": None}),
    ("a job that is in flight", {"job": 99}),
]


@pytest.mark.parametrize(("why", "changes"), REFUSED, ids=[case[0] for case in REFUSED])
def test_what_does_not_fit_is_refused_and_changes_nothing(rig: Rig, why: str, changes: dict[str, Any]) -> None:
    rig.device.gates[HOST].shut()
    rig.offload(99, (0,), [0])
    rig.expect(HOST, (0,), [0])
    good: dict[str, Any] = {
        "job": 1,
        "route": OFFLOAD,
        "items": (item(None, HERE),),
        "sections": (Section(0, 0, (3,)),),
    }
    with pytest.raises(PlanError):
        rig.engine.submit(Transfer(**(good | changes)))
    rig.device.gates[HOST].open()
    assert [result.job for result in rig.results(99, 1)] == [99]
    rig.model.check(rig.pools)
    rig.engine.submit(Transfer(**good))
    rig.expect(HOST, (3,), [1])
    assert [result.statuses for result in rig.results(1)] == [(OK,)]
    rig.model.check(rig.pools)


def test_a_job_id_is_free_again_when_it_has_ended(rig: Rig) -> None:
    rig.offload(1, (3,), [1])
    rig.results(1)
    rig.offload(1, (4,), [1])
    assert len(rig.results(1)) == 1


def test_slots_must_hold_an_image() -> None:
    big = Pools(flat(4, 5000), slots=2)
    with pytest.raises(LayoutError, match="a block image has 12288 bytes, the largest host slot only 4096"):
        TransferEngine(big.layout, CpuDevice(), Pools(flat(4), 2).host)


def test_cancel_is_heard_between_batches() -> None:
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
    rig.model.host[rig.pools.host.offset(0, 4) + 48 :][: 4096 - 48] = 0
    rig.model.check(rig.pools)
    rig.engine.close()


def test_a_job_that_is_cancelled_in_the_queue_moves_nothing(rig: Rig) -> None:
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


def test_cancel_after_the_end_is_ignored(rig: Rig) -> None:
    rig.offload(1, (0,), [0])
    assert [result.statuses for result in rig.results(1)] == [(OK,)]
    rig.engine.cancel(1)
    assert rig.engine.poll() == []


def test_what_has_not_begun_by_the_deadline_does_not_begin() -> None:
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
def test_a_device_that_fails_ends_the_job_and_no_other(rig: Rig, step: str, caplog: pytest.LogCaptureFixture) -> None:
    def fail_once(at: str, batch: CopyBatch | None) -> None:
        if at == step:
            rig.device.fault = lambda at, batch: None
            raise RuntimeError("the device fell off the bus")

    rig.device.fault = fail_once
    rig.offload(1, (0, 1), [0, 1])
    rig.offload(2, (2,), [2])
    first, second = rig.results(1, 2)
    assert (first.statuses, first.bytes) == ((Status.IO_ERROR, Status.IO_ERROR), 0)
    assert second.statuses == (OK,)
    assert [record.message for record in caplog.records] == ["transfer job 1 (device->host) failed"]


def test_a_failed_batch_fails_all_items() -> None:
    rig = Rig(max_batch_bytes=48)

    def fail_second(at: str, batch: CopyBatch | None) -> None:
        if batch is not None and batch.parts[0].item == 1:
            raise RuntimeError("no")

    rig.device.fault = fail_second
    rig.onboard(1, (0, 1, 2), [0, 1, 2])
    (result,) = rig.results(1)
    # What the batches before it brought is not trusted: the device may have failed earlier than it said.
    assert (result.statuses, result.bytes) == ((Status.IO_ERROR,) * 3, 0)
    rig.engine.close()


def test_close_waits_for_what_has_begun_and_ends_the_rest() -> None:
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
    closing.join(PATIENCE)
    rig.engine.close()
    assert [(result.job, result.statuses) for result in rig.engine.poll()] == [(1, (OK,)), (2, (Status.TIER_OFF,))]
    assert set(threading.enumerate()) <= before
    assert rig.device.closed >= 1
    assert rig.device.streams_closed >= 2
    rig.expect(HOST, (0,), [0])
    rig.model.check(rig.pools)


def test_after_close_only_results_can_be_had() -> None:
    rig = Rig()
    rig.engine.close()
    with pytest.raises(TierClosedError):
        rig.offload(1, (0,), [0])
    with pytest.raises(TierClosedError):
        rig.engine.begin_step()
    assert rig.engine.wait([1], 0)
    assert rig.engine.poll() == []


def test_jobs_against_freed_memory_are_refused_or_move_nothing(rig: Rig) -> None:
    gate = rig.device.gates[HOST]
    gate.shut()
    rig.offload(1, (0,), [0])
    assert gate.wait_arrived(1)
    rig.onboard(2, (5,), [5])
    rig.offload(3, (6,), [6])
    assert rig.engine.wait([2], PATIENCE)
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


def test_partial_blocks_and_ranges_of_layers() -> None:
    layout = flat(16, 24, refs=4)
    rig = Rig(layout)
    parts = [Section(0, 0, (1, 2))]
    rig.engine.submit(transfer(1, OFFLOAD, parts, [0, 1], layers=(1, 3)))
    rig.model.move(parts, rig.pools.images([0, 1]), into=HOST, layers=(1, 3))
    rig.engine.submit(transfer(2, ONBOARD, parts, [2, 3], tokens=2))
    rig.model.move(parts, rig.pools.images([2, 3]), into=DEVICE, tokens=2)
    assert [result.bytes for result in rig.results(1, 2)] == [96, 192]
    rig.model.check(rig.pools)
    rig.engine.close()


def test_the_padding_of_every_image_is_zero_even_where_no_block_means_anything() -> None:
    rig = Rig(flat(16, 24, refs=2, blocks_per_chunk=2))
    parts = [Section(0, 1, (5, 6, 7))]
    rig.engine.submit(transfer(1, OFFLOAD, parts, [3, 4], valid=[0b01, 0b11]))
    rig.model.move(parts, rig.pools.images([3, 4]), into=HOST, valid=[0b01, 0b11])
    assert [(result.statuses, result.bytes) for result in rig.results(1)] == [((OK, OK), 96)]
    rig.model.check(rig.pools)
    rig.engine.close()


def test_float_payloads_keep_their_bits() -> None:
    payload = torch.tensor([float("nan"), -0.0, float("-inf"), 1e-45] * 16).view(16, 4)
    rows = torch.zeros(16, 4)
    layout = from_rows(rows, pages_per_block=2, block_size=1)
    pools = Pools(layout, slots=16)
    rows.copy_(payload)
    engine = TransferEngine(layout, CpuDevice(), pools.host)
    everything = tuple(range(16))
    engine.submit(transfer(1, OFFLOAD, [Section(0, 0, everything)], everything))
    assert engine.wait([1], PATIENCE)
    rows.fill_(float("nan"))
    engine.submit(transfer(2, ONBOARD, [Section(0, 0, everything[::-1])], everything))
    assert engine.wait([2], PATIENCE)
    engine.close()
    assert torch.equal(rows.view(torch.int32), payload.flip(0).view(torch.int32))


def inside(job: int, pairs: dict[int, int], **fields: Any) -> Transfer:
    """Copies inside the device: `{target: source}`."""
    items = tuple(Item(b"k" * 32, None, Slot(DEVICE, 0, source), None, 1) for source in pairs.values())
    return Transfer(job, INSIDE, items, (Section(0, 0, tuple(pairs)),), **fields)


def test_blocks_are_copied_inside_the_device() -> None:
    refs = tuple(PageRef(index, 0, 24, 24, 6 if index else None, index) for index in range(3))
    rig = Rig(KVLayout((KVGroup("kv", 4, 1, refs),), flat(16, 24, refs=3).tensors, 16))
    rig.engine.submit(inside(1, {5: 2, 6: 3, 9: 2}, tokens=3))
    rig.engine.submit(inside(2, {7: 9}, layers=(1, 2)))
    for tensor, last in zip(rig.model.device, (24, 18, 18), strict=True):  # the first layer cannot be split
        pages = tensor.reshape(16, 24)
        pages[5], pages[6], pages[9, :last] = pages[2], pages[3], pages[2, :last]
    layer = rig.model.device[1].reshape(16, 24)
    layer[7] = layer[9]
    first, second = rig.results(1, 2)
    assert (first.statuses, first.bytes) == ((OK, OK, OK), 3 * (24 + 24) + 24 + 18 + 18)
    assert (second.statuses, second.bytes) == ((OK,), 24)
    rig.model.check(rig.pools)
    rig.engine.close()


REFUSED_INSIDE: list[tuple[str, dict[str, Any]]] = [
    ("a block that is written twice", {"sections": (Section(0, 0, (5, 5)),), "items": None}),
    ("a block that is written and copied from", {"sections": (Section(0, 0, (2, 6)),), "items": None}),
    ("an item too few", {"sections": (Section(0, 0, (5, 6, 7)),), "items": None}),
    ("a source beyond the pool", {"items": (item(Slot(DEVICE, 0, 16), None),) * 2}),
    ("a source in another pool", {"items": (item(Slot(DEVICE, 1, 2), None),) * 2}),
    ("a source on the host", {"items": (item(Slot(HOST, 0, 2), None),) * 2}),
    ("a source that is no integer", {"items": (item(Slot(DEVICE, 0, 2.0), None),) * 2}),  # type: ignore[arg-type]
    ("an empty section of a group that does not exist", {"sections": (Section(0, 0, (5, 6)), Section(7, 0, ()))}),
    ("a negative first block", {"sections": (Section(0, -5, (5, 6)),)}),
    ("sub-blocks", {"items": (item(Slot(DEVICE, 0, 2), None, 2),) * 2}),
    ("no source", {"items": (item(None, None),) * 2}),
    ("a destination", {"items": (item(Slot(DEVICE, 0, 2), HERE),) * 2}),
    ("a block beyond the pool", {"sections": (Section(0, 0, (5, 16)),), "items": None}),
    ("a group that does not exist", {"sections": (Section(1, 0, (5, 6)),), "items": None}),
    ("layers that do not exist", {"layers": (1, 1), "items": None}),
]


def test_a_transfer_is_checked_without_being_begun(rig: Rig) -> None:
    rig.engine.check(transfer(1, OFFLOAD, [Section(0, 0, (1,))], [1]))
    with pytest.raises(PlanError, match="block ids"):
        rig.engine.check(transfer(1, OFFLOAD, [Section(0, 0, (99,))], [1]))
    assert rig.engine.wait([1], 0.0)
    assert rig.engine.poll() == []


@pytest.mark.parametrize(("why", "changes"), REFUSED_INSIDE, ids=[case[0] for case in REFUSED_INSIDE])
def test_copies_inside_that_do_not_fit_are_refused(rig: Rig, why: str, changes: dict[str, Any]) -> None:
    good = {"sections": (Section(0, 0, (5, 6)),), "items": (item(Slot(DEVICE, 0, 2), None),) * 2}
    given = {name: value for name, value in changes.items() if value is not None}
    with pytest.raises(PlanError):
        rig.engine.submit(Transfer(1, INSIDE, **(good | given)))
    assert rig.results(1) == []
    rig.model.check(rig.pools)


def test_a_copy_of_a_block_in_flight_waits_for_it(rig: Rig) -> None:
    gate = rig.device.gates[DEVICE]
    gate.shut()
    rig.onboard(1, (2,), [7])
    rig.expect(DEVICE, (2,), [7])
    rig.engine.submit(inside(2, {5: 2}))
    for tensor in rig.model.device:
        pages = tensor.reshape(16, 24)
        pages[5] = pages[2]
    assert gate.wait_arrived(1)
    gate.open()
    rig.results(1, 2)
    rig.model.check(rig.pools)


@pytest.mark.parametrize("route", [OFFLOAD, ONBOARD], ids=str)
def test_layer_by_layer_moves_the_same_bytes(route: Route) -> None:
    rig = Rig(flat(16, 24, refs=5), max_batch_bytes=48)
    parts = [Section(0, 0, (3, 1, 8))]
    rig.engine.submit(transfer(1, route, parts, [6, 2, 4], by_layer=True, layers=(1, 4)))
    rig.model.move(parts, rig.pools.images([6, 2, 4]), into=route.destination, layers=(1, 4))
    (result,) = rig.results(1)
    assert (result.statuses, result.bytes) == ((OK,) * 3, 3 * 3 * 24)
    rig.model.check(rig.pools)
    rig.engine.close()


def test_a_layer_can_be_used_while_the_next_one_travels() -> None:
    rig = Rig(flat(16, 24, refs=3))
    gate = rig.device.gates[DEVICE]
    gate.shut(after=1)
    parts = [Section(0, 0, (3, 1))]
    rig.engine.submit(transfer(1, ONBOARD, parts, [6, 2], by_layer=True))
    assert rig.engine.wait_layer(1, 0, PATIENCE) is OK
    assert rig.engine.wait_layer(1, 1, 0) is Status.DEADLINE
    rig.model.move(parts, rig.pools.images([6, 2]), into=DEVICE, layers=(0, 1))
    rig.model.check(rig.pools)
    gate.open()
    assert [rig.engine.wait_layer(1, layer, PATIENCE) for layer in (2, 1, 0)] == [OK, OK, OK]
    rig.results(1)
    rig.engine.end_step()
    assert rig.engine.wait_layer(1, 2) is OK  # until the step after the one in which it ended is over
    rig.engine.end_step()
    with pytest.raises(PlanError, match="ended before the last two calls of end_step"):
        rig.engine.wait_layer(1, 2)
    rig.engine.close()


def test_layers_that_cannot_be_waited_for_are_refused(rig: Rig) -> None:
    rig.engine.submit(transfer(1, ONBOARD, [Section(0, 0, (3,))], [6], by_layer=True, layers=(1, 2)))
    rig.onboard(2, (4,), [6])
    for job, layer in ((1, 0), (1, 2), (1, -1), (2, 1), (3, 1)):
        with pytest.raises(PlanError, match=f"job {job} "):
            rig.engine.wait_layer(job, layer, 0)
    assert rig.engine.wait_layer(1, 1, PATIENCE) is OK


def test_layers_that_do_not_come_are_said_to_be_missing() -> None:
    rig = Rig(flat(16, 24, refs=3))
    gate = rig.device.gates[DEVICE]
    gate.shut(after=1)
    rig.engine.submit(transfer(1, ONBOARD, [Section(0, 0, (3, 1))], [6, 2], by_layer=True))
    assert gate.wait_arrived(2)
    rig.engine.cancel(1)
    gate.open()
    (result,) = rig.results(1)
    assert (result.statuses, result.bytes) == ((Status.CANCELLED,) * 2, 0)
    assert [rig.engine.wait_layer(1, layer) for layer in range(3)] == [OK, OK, Status.CANCELLED]
    rig.engine.close()


def test_a_layer_whose_copy_fails_at_its_end_is_missing() -> None:
    rig = Rig(flat(16, 24, refs=3))

    def fail(step: str, batch: CopyBatch | None) -> None:
        if step == "finish":
            raise RuntimeError("the device fell off the bus")

    rig.device.fault = fail
    rig.engine.submit(transfer(1, ONBOARD, [Section(0, 0, (3, 1))], [6, 2], by_layer=True))
    (result,) = rig.results(1)
    assert result.statuses == (Status.IO_ERROR,) * 2
    assert [rig.engine.wait_layer(1, layer) for layer in range(3)] == [Status.IO_ERROR] * 3
    rig.engine.close()


def test_an_urgent_job_goes_between_the_batches_of_a_large_one() -> None:
    rig = Rig(max_batch_bytes=48)
    gate = rig.device.gates[HOST]
    gate.shut()
    rig.offload(1, (0, 1, 2, 3), [0, 1, 2, 3], urgency=Urgency.WRITE)
    rig.offload(2, (4,), [4], urgency=Urgency.WRITE)
    assert gate.wait_arrived(1)
    rig.offload(3, (5,), [5], urgency=Urgency.PREFETCH)
    rig.offload(4, (6,), [6])
    rig.offload(5, (7,), [7])
    gate.open()
    assert rig.engine.wait([1, 2, 3, 4, 5], PATIENCE)
    assert [result.job for result in rig.engine.poll()] == [4, 5, 3, 1, 2]
    rig.engine.close()


def test_a_queue_has_an_end() -> None:
    rig = Rig(max_queued=2)
    gate = rig.device.gates[HOST]
    gate.shut()
    rig.offload(1, (0,), [0])
    assert gate.wait_arrived(1)
    rig.offload(2, (1,), [1])
    with pytest.raises(QueueFullError, match="2 DEMAND jobs are already queued to go into host"):
        rig.offload(3, (2,), [2])
    assert rig.engine.stats().refused == 1
    assert {at: n for at, n in rig.engine.stats().queued.items() if n} == {(HOST, Urgency.DEMAND): 2}
    rig.offload(4, (2,), [2], urgency=Urgency.WRITE)
    rig.onboard(5, (3,), [3])
    gate.open()
    assert [result.job for result in rig.results(1, 2, 3, 4, 5)] == [1, 2, 4, 5]
    rig.offload(3, (2,), [2])
    assert [result.statuses for result in rig.results(3)] == [(OK,)]
    rig.engine.close()


@pytest.mark.parametrize("bound", ["max_batch_bytes", "max_queued"])
def test_bounds_are_positive(bound: str) -> None:
    with pytest.raises(PlanError, match=f"{bound}=0"):
        Rig(**{bound: 0})


def test_shutdown_drains() -> None:
    rig = Rig()
    gate = rig.device.gates[HOST]
    gate.shut()
    for job in range(4):
        rig.offload(job, (job,), [job])
    threading.Timer(0.05, gate.open).start()
    assert rig.engine.shutdown(PATIENCE)
    assert [result.statuses for result in rig.results(0, 1, 2, 3)] == [(OK,)] * 4
    assert rig.engine.shutdown()


def test_shutdown_in_a_hurry_says_so() -> None:
    rig = Rig()
    gate = rig.device.gates[HOST]
    gate.shut()
    rig.offload(1, (1,), [1])
    assert gate.wait_arrived(1)
    rig.offload(2, (2,), [2])
    threading.Timer(0.2, gate.open).start()
    assert not rig.engine.shutdown(0.05)
    assert [result.statuses for result in rig.results(1, 2)] == [(OK,), (Status.TIER_OFF,)]


def test_a_step_ends_without_waiting_for_jobs_that_it_does_not_name(rig: Rig) -> None:
    gate = rig.device.gates[HOST]
    gate.shut()
    rig.offload(1, (1,), [1], urgency=Urgency.WRITE)
    rig.onboard(2, (2,), [2])
    assert gate.wait_arrived(1)
    rig.engine.end_step(None, [2])
    assert not rig.engine.wait([1], 0)


def test_a_layer_that_a_group_does_not_have_is_there_at_once() -> None:
    refs = (PageRef(0, 0, 24, 24, None, 1), PageRef(1, 0, 24, 24, None, 3))
    rig = Rig(KVLayout((KVGroup("kv", 4, 1, refs),), flat(16, 24, refs=2).tensors, 16))
    parts = [Section(0, 0, (3, 1))]
    rig.engine.submit(transfer(1, ONBOARD, parts, [6, 2], by_layer=True))
    assert [rig.engine.wait_layer(1, layer, PATIENCE) for layer in range(4)] == [OK] * 4
    (result,) = rig.results(1)
    assert (result.statuses, result.bytes) == ((OK, OK), 96)
    rig.model.move(parts, rig.pools.images([6, 2]), into=DEVICE)
    rig.model.check(rig.pools)
    rig.engine.close()


def test_when_a_copy_has_failed_the_rest_of_its_job_is_not_copied() -> None:
    rig = Rig(max_batch_bytes=48)

    def fail(step: str, batch: CopyBatch | None) -> None:
        if step == "finish":
            raise RuntimeError("the device fell off the bus")

    rig.device.fault = fail
    rig.onboard(1, (0, 1, 2), [0, 1, 2])
    assert [result.statuses for result in rig.results(1)] == [(Status.IO_ERROR,) * 3]
    assert rig.device.log == ["device begins", "device ends"]
    rig.engine.close()


def test_compute_goes_on_when_copies_are_given_to_the_device_not_when_they_have_ended() -> None:
    """`finish` blocks; whoever waits for a layer, or for the end of the step, does not."""
    rig = Rig()
    go_on = threading.Event()

    def slow(step: str, batch: CopyBatch | None) -> None:
        if step == "finish":
            assert go_on.wait(PATIENCE)

    rig.device.fault = slow
    rig.engine.submit(transfer(1, ONBOARD, [Section(0, 0, (3,))], [6], by_layer=True, layers=(0, 1)))
    assert rig.engine.wait_layer(1, 0, PATIENCE) is OK
    rig.offload(2, (4,), [7])
    rig.engine.end_step()
    assert rig.engine.poll() == []
    go_on.set()
    assert [result.statuses for result in rig.results(1, 2)] == [(OK,), (OK,)]
    rig.engine.close()


WAITS: list[tuple[str, Callable[[TransferEngine], object]]] = [
    ("wait", lambda engine: engine.wait([1])),
    ("wait_layer", lambda engine: engine.wait_layer(1, 1)),
    ("end_step", lambda engine: engine.end_step()),
    ("shutdown", lambda engine: engine.shutdown()),
]


@pytest.mark.parametrize(("name", "wait"), WAITS, ids=[name for name, _ in WAITS])
def test_whoever_waits_without_an_end_is_woken(name: str, wait: Callable[[TransferEngine], object]) -> None:
    rig = Rig()
    rig.device.fault = lambda step, batch: time.sleep(A_MOMENT if step == "finish" else 0.0)  # it sleeps again by then
    gate = rig.device.gates[DEVICE]
    gate.shut()
    rig.engine.submit(transfer(1, ONBOARD, [Section(0, 0, (3,))], [6], by_layer=True))
    waiting = threading.Thread(target=wait, args=(rig.engine,), daemon=True)
    waiting.start()
    assert gate.wait_arrived(1)
    waiting.join(0.05)
    assert waiting.is_alive()
    gate.open()
    waiting.join(PATIENCE)
    assert not waiting.is_alive()
    rig.engine.close()


def test_of_those_who_never_end_steps_the_latest_jobs_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Layered, "MOST", 3)
    rig = Rig()
    for job in range(6):
        rig.onboard(job, (job,), [job], by_layer=True)
        assert rig.engine.wait([job], PATIENCE)
    with pytest.raises(PlanError):
        rig.engine.wait_layer(2, 0)
    assert rig.engine.wait_layer(3, 0) is OK
    rig.onboard(3, (3,), [3])
    with pytest.raises(PlanError):
        rig.engine.wait_layer(3, 0)  # the number is another job's now
    rig.engine.close()


def test_a_lane_that_fails_ends_its_jobs_and_closes_the_engine(caplog: pytest.LogCaptureFixture) -> None:
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
    engine.submit(transfer(1, OFFLOAD, [Section(0, 0, (1,))], [1]))
    assert device.gates[HOST].wait_arrived(1)
    is_broken = True
    engine.submit(transfer(2, OFFLOAD, [Section(0, 0, (2,))], [2], deadline=5.0))
    opener = threading.Timer(A_MOMENT, device.gates[HOST].open)
    opener.start()
    assert engine.wait([1, 2])  # it sleeps by then, and is woken by the lane, not by the clock
    opener.join()
    assert {result.job: result.statuses for result in engine.poll()}[2] == (Status.IO_ERROR,)
    with pytest.raises(TierClosedError):
        engine.submit(transfer(3, OFFLOAD, [Section(0, 0, (3,))], [3]))
    assert device.drained == 1
    assert not any(engine.stats().queued.values())
    assert engine.shutdown(PATIENCE)
    assert "transfer lane into host failed" in caplog.text


def test_a_fault_while_a_lane_waits_ends_its_jobs_though_it_came_but_once() -> None:
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
    engine.submit(transfer(1, OFFLOAD, [Section(0, 0, (1,))], [1]))
    assert device.gates[HOST].wait_arrived(1)
    engine.submit(transfer(2, ONBOARD, [Section(0, 0, (2,))], [1], deadline=5.0))  # reads what job 1 still writes
    assert engine.wait([2], PATIENCE)
    assert faults == 1
    device.gates[HOST].open()
    assert engine.wait([1], PATIENCE)
    assert {result.job: result.statuses for result in engine.poll()}[2] == (Status.IO_ERROR,)
    assert engine.shutdown(PATIENCE)


def test_a_number_that_is_used_again_is_as_young_as_its_new_job() -> None:
    rig = Rig()
    for _ in range(2):
        rig.onboard(1, (3,), [6], by_layer=True)
        assert rig.engine.wait([1], PATIENCE)
        rig.engine.end_step()
        assert rig.engine.wait_layer(1, 0) is OK
    rig.engine.close()


_GONE = """
import gc, sys, threading
import torch
from transfer_kit import transfer
from longshore.boundary import Section
from longshore.layout import KVGroup, KVLayout, PageRef
from longshore.boundary import Slabs
from longshore.tiers.arena import Arena
from longshore.tiers.host import HostTier
from longshore.transfer import OFFLOAD, ONBOARD, CpuDevice, TransferEngine
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
    engine = TransferEngine(layout, CpuDevice(), HostTier(arena, Slabs.of_one_size(PAGE, BLOCKS)))
    engine.submit(transfer(1, route, [Section(0, 0, tuple(range(BLOCKS)))], list(range(BLOCKS))))
    arrived.wait()
    return engine, layout, arena

base.copy_pieces = late
engine, layout, arena = submitted({"offload": OFFLOAD, "onboard": ONBOARD}[sys.argv[1]])
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
def test_a_job_in_flight_keeps_its_memory(how: str, direction: str) -> None:
    command = [sys.executable, "-c", _GONE, direction, how]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=300)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_lanes_of_a_dropped_engine_end() -> None:
    before = threading.enumerate()
    pools = Pools(flat(16), 8)
    engine = TransferEngine(pools.layout, CpuDevice(), pools.host)
    lanes = [thread for thread in threading.enumerate() if thread not in before]
    assert len(lanes) == 2
    del engine
    gc.collect()
    for thread in lanes:
        thread.join(PATIENCE)
        assert not thread.is_alive()


def test_a_job_lets_go_of_memory_when_it_has_ended() -> None:
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


def test_a_closed_arena_is_refused(rig: Rig) -> None:
    rig.pools.arena.close()
    with pytest.raises(TierClosedError):
        rig.offload(1, (3,), [1])
    assert not rig.engine.stats().queued[HOST, Urgency.DEMAND]
