"""The engine as a mover: results per item, refusals that change nothing, copies by layer and inside the device."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest
from engine_rig import Rig
from gated_device import A_MOMENT, TIMEOUT, Compute
from hypothesis import given
from hypothesis import strategies as st
from transfer_kit import Model, Pools, chunks_of, elsewhere, flat, layouts, sections, transfer

from depth import examples
from longshore.boundary import DEVICE, FILE, HOST, Item, Mover, Route, Section, Slot, Status, Transfer, Urgency
from longshore.errors import LayoutError, PlanError, QueueFullError
from longshore.layout import KVGroup, KVLayout, PageRef
from longshore.transfer import D2D, D2H, H2D, CpuDevice, TransferEngine
from longshore.transfer.ordering import LayerWiseJobs
from longshore.transfer.pieces import CopyBatch

OK = Status.OK


def test_engine_serves_the_three_routes_of_the_device(rig: Rig) -> None:
    mover: Mover = rig.engine
    assert mover.routes == {Route(DEVICE, HOST), Route(HOST, DEVICE), Route(DEVICE, DEVICE)}


@examples(40)
@given(st.data())
def test_offload_then_onboard_restores_bytes_in_other_blocks(data: st.DataObject) -> None:
    """Same bytes in other blocks; padding, neighbours, guard bytes and other slots untouched; image padding zero."""
    layout = data.draw(layouts())
    parts = data.draw(sections(layout))
    there = data.draw(st.composite(lambda draw: elsewhere(draw, layout, parts))())
    items = chunks_of(layout, parts)
    pools = Pools(layout, slots=items + 2, seed=data.draw(st.integers(0, 99)))
    slots = data.draw(st.permutations(range(items + 2)))[:items]
    model = Model(pools)
    engine = TransferEngine(layout, CpuDevice(), pools.host, max_batch_bytes=data.draw(st.integers(1, 9000)))
    try:
        engine.submit(transfer(1, D2H, parts, slots))
        assert engine.wait([1], TIMEOUT)
        model.move(parts, pools.images(slots), destination=HOST)
        model.check(pools)
        for tensor in pools.tensors:
            tensor.bitwise_not_()
        model.device = pools.device_bytes()
        engine.submit(transfer(2, H2D, there, slots))
        assert engine.wait([2], TIMEOUT)
        model.move(there, pools.images(slots), destination=DEVICE)
        model.check(pools)
        out, back = engine.poll()
        assert out.statuses == back.statuses == (OK,) * items
        moved = sum(len(section.blocks) * layout.groups[section.group].block_bytes for section in parts)
        assert out.bytes == back.bytes == moved
    finally:
        engine.close()


def test_results_have_job_bytes_seconds_and_rank() -> None:
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


def test_queued_seconds_end_where_the_copy_begins(rig: Rig) -> None:
    rig.device.gates[HOST].shut()
    rig.offload(1, (3,), [1])
    assert rig.device.gates[HOST].wait_arrived(1)
    rig.offload(2, (4,), [2])
    rig.now = 5.0
    rig.device.gates[HOST].open()
    assert [result.queued_seconds for result in rig.results(1, 2)] == [0.0, 5.0]


def test_jobs_of_one_direction_end_in_order_of_submission(rig: Rig) -> None:
    for job in range(8):
        rig.offload(job, (job,), [job])
    assert rig.engine.wait(range(8), TIMEOUT)
    assert [result.job for result in rig.engine.poll()] == list(range(8))
    assert rig.device.bound == 1


def item(source: Slot | None, destination: Slot | None) -> Item:
    return Item(b"k" * 32, None, source, destination)


HERE = Slot(HOST, 0, 1)


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("a route of another mover", {"route": Route(HOST, FILE)}),
    ("a route that looks like an onboard", {"route": Route(FILE, DEVICE), "items": (item(HERE, None),)}),
    ("a route from the device to itself", {"route": Route(DEVICE, DEVICE)}),
    ("no host side", {"items": (item(None, None),)}),
    ("two host sides", {"items": (item(HERE, HERE),)}),
    ("the sides exchanged", {"items": (item(HERE, None),)}),
    ("a slot of another tier", {"items": (item(None, Slot(FILE, 0, 1)),)}),
    ("a slot of another size class", {"items": (item(None, Slot(HOST, 1, 1)),)}),
    ("a slot beyond the pool", {"items": (item(None, Slot(HOST, 0, 8)),)}),
    ("a negative slot", {"items": (item(None, Slot(HOST, 0, -1)),)}),
    ("an item too many", {"items": (item(None, HERE), item(None, Slot(HOST, 0, 2)))}),
    ("an item too few", {"items": ()}),
    ("one slot twice", {"items": (item(None, HERE),) * 2, "sections": (Section(0, 0, (3, 4)),)}),
    ("a block beyond the pool", {"sections": (Section(0, 0, (16,)),)}),
    ("a group that does not exist", {"sections": (Section(1, 0, (3,)),)}),
    ("a deadline that is none", {"deadline": None}),
    ("a job that is in flight", {"job": 99}),
]


@pytest.mark.parametrize(("why", "changes"), REFUSED, ids=[case[0] for case in REFUSED])
def test_invalid_transfers_are_refused_and_change_nothing(rig: Rig, why: str, changes: dict[str, Any]) -> None:
    rig.device.gates[HOST].shut()
    rig.offload(99, (0,), [0])
    rig.expect(HOST, (0,), [0])
    good: dict[str, Any] = {
        "job": 1,
        "route": D2H,
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


def test_job_id_can_be_reused_after_its_end(rig: Rig) -> None:
    rig.offload(1, (3,), [1])
    rig.results(1)
    rig.offload(1, (4,), [1])
    assert len(rig.results(1)) == 1


def test_slots_must_hold_an_image() -> None:
    big = Pools(flat(4, 5000), slots=2)
    with pytest.raises(LayoutError, match="a chunk image has 12288 bytes, the largest host slot only 4096"):
        TransferEngine(big.layout, CpuDevice(), Pools(flat(4), 2).host)


def test_partial_blocks_move_their_bytes_only() -> None:
    refs = tuple(PageRef(index, 0, 24, 24, 6, index) for index in range(4))
    rig = Rig(KVLayout((KVGroup("kv", 4, 1, refs),), flat(16, 24, refs=4).tensors, 16))
    parts = [Section(0, 0, (1, 2))]
    rig.engine.submit(transfer(1, D2H, parts, [0, 1], tokens=3))
    rig.model.move(parts, rig.pools.images([0, 1]), destination=HOST, tokens=3)
    rig.engine.submit(transfer(2, H2D, parts, [2, 3], tokens=2))
    rig.model.move(parts, rig.pools.images([2, 3]), destination=DEVICE, tokens=2)
    assert [result.bytes for result in rig.results(1, 2)] == [96 + 4 * 18, 96 + 4 * 12]
    rig.model.check(rig.pools)
    rig.engine.close()


def test_padding_of_every_image_is_zeroed() -> None:
    rig = Rig(flat(16, 24, refs=2, blocks_per_chunk=2))
    parts = [Section(0, 1, (5, 6, 7))]
    rig.engine.submit(transfer(1, D2H, parts, [3, 4]))
    rig.model.move(parts, rig.pools.images([3, 4]), destination=HOST)
    assert [(result.statuses, result.bytes) for result in rig.results(1)] == [((OK, OK), 144)]
    rig.model.check(rig.pools)
    rig.engine.close()


def inside(job: int, pairs: dict[int, int], **fields: Any) -> Transfer:
    """Copies inside the device: `{target: source}`."""
    items = tuple(Item(b"k" * 32, None, Slot(DEVICE, 0, source), None) for source in pairs.values())
    return Transfer(job, D2D, items, (Section(0, 0, tuple(pairs)),), **fields)


def test_blocks_are_copied_inside_the_device() -> None:
    refs = tuple(PageRef(index, 0, 24, 24, 6 if index else None, index) for index in range(3))
    rig = Rig(KVLayout((KVGroup("kv", 4, 1, refs),), flat(16, 24, refs=3).tensors, 16))
    rig.engine.submit(inside(1, {5: 2, 6: 3, 9: 2}, tokens=3))
    rig.engine.submit(inside(2, {7: 9}))
    for tensor, last in zip(rig.model.device, (24, 18, 18), strict=True):  # the first layer cannot be split
        pages = tensor.reshape(16, 24)
        pages[5], pages[6], pages[9, :last] = pages[2], pages[3], pages[2, :last]
        pages[7] = pages[9]
    first, second = rig.results(1, 2)
    assert (first.statuses, first.bytes) == ((OK, OK, OK), 3 * (24 + 24) + 24 + 18 + 18)
    assert (second.statuses, second.bytes) == ((OK,), 3 * 24)
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
    ("no source", {"items": (item(None, None),) * 2}),
    ("a destination", {"items": (item(Slot(DEVICE, 0, 2), HERE),) * 2}),
    ("a block beyond the pool", {"sections": (Section(0, 0, (5, 16)),), "items": None}),
    ("a group that does not exist", {"sections": (Section(1, 0, (5, 6)),), "items": None}),
]


def test_check_raises_the_errors_of_submit_and_starts_nothing(rig: Rig) -> None:
    rig.engine.check(transfer(1, D2H, [Section(0, 0, (1,))], [1]))
    with pytest.raises(PlanError, match="block ids"):
        rig.engine.check(transfer(1, D2H, [Section(0, 0, (99,))], [1]))
    assert rig.engine.wait([1], 0.0)
    assert rig.engine.poll() == []


@pytest.mark.parametrize(("why", "changes"), REFUSED_INSIDE, ids=[case[0] for case in REFUSED_INSIDE])
def test_invalid_copies_inside_the_device_are_refused(rig: Rig, why: str, changes: dict[str, Any]) -> None:
    good = {"sections": (Section(0, 0, (5, 6)),), "items": (item(Slot(DEVICE, 0, 2), None),) * 2}
    given = {name: value for name, value in changes.items() if value is not None}
    with pytest.raises(PlanError):
        rig.engine.submit(Transfer(1, D2D, **(good | given)))
    assert rig.results(1) == []
    rig.model.check(rig.pools)


@pytest.mark.parametrize("route", [D2H, H2D], ids=str)
def test_layer_wise_transfer_moves_the_same_bytes(route: Route) -> None:
    rig = Rig(flat(16, 24, refs=5), max_batch_bytes=48)
    parts = [Section(0, 0, (3, 1, 8))]
    rig.engine.submit(transfer(1, route, parts, [6, 2, 4], by_layer=True))
    rig.model.move(parts, rig.pools.images([6, 2, 4]), destination=route.destination)
    (result,) = rig.results(1)
    assert (result.statuses, result.bytes) == ((OK,) * 3, 3 * 5 * 24)
    rig.model.check(rig.pools)
    rig.engine.close()


def test_arrived_layer_is_readable_while_later_layers_are_in_flight() -> None:
    rig = Rig(flat(16, 24, refs=3))
    gate = rig.device.gates[DEVICE]
    gate.shut(after=1)
    parts = [Section(0, 0, (3, 1))]
    rig.engine.submit(transfer(1, H2D, parts, [6, 2], by_layer=True))
    assert rig.engine.wait_layer(1, 0, TIMEOUT) is OK
    assert rig.engine.wait_layer(1, 1, 0) is Status.DEADLINE
    rig.model.move(parts, rig.pools.images([6, 2]), destination=DEVICE, layers=(0, 1))
    rig.model.check(rig.pools)
    gate.open()
    assert [rig.engine.wait_layer(1, layer, TIMEOUT) for layer in (2, 1, 0)] == [OK, OK, OK]
    rig.results(1)
    rig.engine.end_step()
    assert rig.engine.wait_layer(1, 2) is OK  # until the step after the one in which it ended is over
    rig.engine.end_step()
    with pytest.raises(PlanError, match="ended before the last two calls of end_step"):
        rig.engine.wait_layer(1, 2)
    rig.engine.close()


def test_a_layer_submitted_wakes_who_waits_for_it() -> None:
    rig = Rig(flat(16, 24, refs=3))
    gate = rig.device.gates[DEVICE]
    gate.shut()
    rig.engine.submit(transfer(1, H2D, [Section(0, 0, (3, 1))], [6, 2], by_layer=True))
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(rig.engine.wait_layer, 1, 0)
        assert gate.wait_arrived(1)
        assert not wait([waits], A_MOMENT).done
        gate.shut()
        assert waits.result(TIMEOUT / 2) is OK
        assert rig.engine.wait_layer(1, 1, 0) is Status.DEADLINE
    gate.open()
    rig.results(1)
    rig.engine.close()


def test_wait_layer_refuses_unknown_jobs_and_layers(rig: Rig) -> None:
    rig.engine.submit(transfer(1, H2D, [Section(0, 0, (3,))], [6], by_layer=True))
    rig.onboard(2, (4,), [6])
    for job, layer in ((1, rig.pools.layout.num_layers), (1, -1), (2, 1), (3, 1)):
        with pytest.raises(PlanError, match=f"job {job} "):
            rig.engine.wait_layer(job, layer, 0)
    assert rig.engine.wait_layer(1, 1, TIMEOUT) is OK


def test_urgent_job_runs_between_batches_of_a_large_job() -> None:
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
    assert rig.engine.wait([1, 2, 3, 4, 5], TIMEOUT)
    assert [result.job for result in rig.engine.poll()] == [4, 5, 3, 1, 2]
    rig.engine.close()


def test_bytes_in_flight_exceed_the_largest_batch_by_one_batch() -> None:
    rig = Rig(depth=4, max_batch_bytes=48)
    rig.device.is_finished.clear()
    rig.offload(1, (0, 1, 2, 3), [0, 1, 2, 3])
    gate = rig.device.gates[HOST]
    assert gate.wait_arrived(2)
    assert not gate.wait_arrived(3, A_MOMENT)
    rig.device.is_finished.set()
    rig.results(1)
    assert gate.arrived == 4
    rig.engine.close()


def test_batches_of_one_job_wait_for_compute_once() -> None:
    rig = Rig(max_batch_bytes=48)
    compute = Compute()
    compute.start().done()
    rig.engine.begin_step(compute)
    rig.offload(1, (0, 1, 2, 3), [0, 1, 2, 3])
    rig.results(1)
    assert rig.device.gates[HOST].arrived == 4
    assert compute.given[0].waits == 1
    rig.engine.close()


def test_full_queue_refuses_jobs_and_counts_them() -> None:
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
def test_limits_must_be_positive(bound: str) -> None:
    with pytest.raises(PlanError, match=f"{bound}=0"):
        Rig(**{bound: 0})


def test_end_step_waits_for_named_jobs_only(rig: Rig) -> None:
    gate = rig.device.gates[HOST]
    gate.shut()
    rig.offload(1, (1,), [1], urgency=Urgency.WRITE)
    rig.onboard(2, (2,), [2])
    assert gate.wait_arrived(1)
    rig.engine.end_step(None, [2])
    assert not rig.engine.wait([1], 0)


def test_layer_without_pages_of_the_group_is_ready_at_once() -> None:
    refs = (PageRef(0, 0, 24, 24, None, 1), PageRef(1, 0, 24, 24, None, 3))
    rig = Rig(KVLayout((KVGroup("kv", 4, 1, refs),), flat(16, 24, refs=2).tensors, 16))
    parts = [Section(0, 0, (3, 1))]
    rig.engine.submit(transfer(1, H2D, parts, [6, 2], by_layer=True))
    assert [rig.engine.wait_layer(1, layer, TIMEOUT) for layer in range(4)] == [OK] * 4
    (result,) = rig.results(1)
    assert (result.statuses, result.bytes) == ((OK, OK), 96)
    rig.model.move(parts, rig.pools.images([6, 2]), destination=DEVICE)
    rig.model.check(rig.pools)
    rig.engine.close()


def test_end_step_waits_for_submission_not_for_completion() -> None:
    """`finish` blocks; whoever waits for a layer, or for the end of the step, does not."""
    rig = Rig(flat(16, 24, refs=1))
    go_on = threading.Event()

    def slow(step: str, batch: CopyBatch | None) -> None:
        if step == "finish":
            assert go_on.wait(TIMEOUT)

    rig.device.fault = slow
    rig.engine.submit(transfer(1, H2D, [Section(0, 0, (3,))], [6], by_layer=True))
    assert rig.engine.wait_layer(1, 0, TIMEOUT) is OK
    rig.offload(2, (4,), [7])
    rig.engine.end_step()
    assert rig.engine.poll() == []
    go_on.set()
    assert [result.statuses for result in rig.results(1, 2)] == [(OK,), (OK,)]
    rig.engine.close()


def test_only_latest_layer_wise_jobs_are_kept_without_end_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LayerWiseJobs, "MAX_ENDED", 3)
    rig = Rig()
    for job in range(6):
        rig.onboard(job, (job,), [job], by_layer=True)
        assert rig.engine.wait([job], TIMEOUT)
    with pytest.raises(PlanError):
        rig.engine.wait_layer(2, 0)
    assert rig.engine.wait_layer(3, 0) is OK
    rig.onboard(3, (3,), [3])
    with pytest.raises(PlanError):
        rig.engine.wait_layer(3, 0)  # the number is another job's now
    rig.engine.close()


def test_reused_job_number_has_the_age_of_the_new_job() -> None:
    rig = Rig()
    for _ in range(2):
        rig.onboard(1, (3,), [6], by_layer=True)
        assert rig.engine.wait([1], TIMEOUT)
        rig.engine.end_step()
        assert rig.engine.wait_layer(1, 0) is OK
    rig.engine.close()
