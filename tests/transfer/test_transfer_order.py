"""Order: copies against copies that touch the same slots, copies against compute, compute against copies."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest
from gated_device import A_MOMENT, PATIENCE, Compute, GatedDevice, SlowDevice
from transfer_kit import Model, Pools, flat, transfer

from longshore.boundary import DEVICE, HOST, Route, Section, Status
from longshore.layout import KVGroup, KVLayout, PageRef
from longshore.transfer import OFFLOAD, ONBOARD, TransferEngine


class Rig:
    def __init__(self, layout: KVLayout | None = None) -> None:
        self.pools = Pools(layout or flat(16), slots=16)
        self.model = Model(self.pools)
        self.device = GatedDevice()
        self.engine = TransferEngine(self.pools.layout, self.device, self.pools.host)

    def submit(self, job: int, route: Route, blocks: tuple[int, ...], slots: list[int], **fields: Any) -> None:
        sections = fields.pop("sections", [Section(0, 0, blocks)])
        self.engine.submit(transfer(job, route, sections, slots, **fields))
        self.model.move(sections, self.pools.images(slots), into=route.destination)

    def finish(self, *jobs: int) -> None:
        for gate in self.device.gates.values():
            gate.open()
        assert self.engine.wait(jobs, PATIENCE)
        self.engine.close()


CONFLICTS = [
    ("a block is written while it is read", (OFFLOAD, (3,), [7]), (ONBOARD, (3,), [8])),
    ("a block is read while it is written", (ONBOARD, (3,), [7]), (OFFLOAD, (3,), [8])),
    ("a slot is written while it is read", (ONBOARD, (3,), [7]), (OFFLOAD, (4,), [7])),
    ("a slot is read while it is written", (OFFLOAD, (3,), [7]), (ONBOARD, (4,), [7])),
    ("one of many", (OFFLOAD, (1, 2, 3), [1, 2, 3]), (ONBOARD, (9, 3, 8), [9, 8, 7])),
]


@pytest.mark.parametrize(("why", "first", "second"), CONFLICTS, ids=[case[0] for case in CONFLICTS])
def test_a_job_waits_for_the_other_direction(why: str, first: Any, second: Any) -> None:
    rig = Rig()
    early, late = first[0].destination, second[0].destination
    rig.device.gates[early].shut()
    rig.submit(1, *first)
    assert rig.device.gates[early].wait_arrived(1)
    rig.submit(2, *second)
    assert not rig.device.gates[late].wait_arrived(1, A_MOMENT)
    rig.finish(1, 2)
    assert rig.device.log == [f"{early} begins", f"{early} ends", f"{late} begins", f"{late} ends"]
    rig.model.check(rig.pools)


FREE = [
    ("block 5 is not slot 5", (OFFLOAD, (5,), [7]), (ONBOARD, (7,), [5])),
    ("other blocks and slots", (OFFLOAD, (1, 2), [1, 2]), (ONBOARD, (3, 4), [3, 4])),
]


@pytest.mark.parametrize(("why", "first", "second"), FREE, ids=[case[0] for case in FREE])
def test_jobs_that_share_nothing_do_not_wait(why: str, first: Any, second: Any) -> None:
    rig = Rig()
    rig.device.gates[HOST].shut()
    rig.submit(1, *first)
    assert rig.device.gates[HOST].wait_arrived(1)
    rig.submit(2, *second)
    assert rig.engine.wait([2], PATIENCE)
    rig.finish(1, 2)
    rig.model.check(rig.pools)


def test_groups_over_one_pool_share_their_blocks() -> None:
    """The same block through another group is the same slot."""
    tensor = flat(16, 24, refs=1).tensors[0]
    groups = [KVGroup(name, 4, 1, (PageRef(0, 0, 24, 24),)) for name in "ab"]
    rig = Rig(KVLayout(groups, [tensor], 16))
    rig.device.gates[HOST].shut()
    rig.submit(1, OFFLOAD, (), [1], sections=[Section(0, 0, (3,))])
    assert rig.device.gates[HOST].wait_arrived(1)
    rig.submit(2, ONBOARD, (), [2], sections=[Section(1, 0, (3,))])
    assert not rig.device.gates[DEVICE].wait_arrived(1, A_MOMENT)
    rig.finish(1, 2)
    rig.model.check(rig.pools)


def test_the_record_lasts_until_the_copy_has_ended() -> None:
    """Not until it was submitted, nor until a later job touched the slot."""
    rig = Rig()
    rig.device.gates[HOST].shut()
    rig.submit(1, OFFLOAD, (3,), [7])
    rig.submit(2, OFFLOAD, (3,), [8])
    assert rig.device.gates[HOST].wait_arrived(1)
    rig.submit(3, ONBOARD, (3,), [9])
    assert not rig.device.gates[DEVICE].wait_arrived(1, A_MOMENT)
    rig.finish(1, 2, 3)
    assert rig.device.log[-2:] == ["device begins", "device ends"]
    rig.model.check(rig.pools)


def test_a_cancelled_job_waits_for_nobody() -> None:
    rig = Rig()
    rig.device.gates[HOST].shut()
    rig.submit(1, OFFLOAD, (3,), [7])
    assert rig.device.gates[HOST].wait_arrived(1)
    rig.engine.submit(transfer(2, ONBOARD, [Section(0, 0, (3,))], [8]))
    assert not rig.engine.wait([2], A_MOMENT)
    rig.engine.cancel(2)
    assert rig.engine.wait([2], PATIENCE)
    assert [result.statuses for result in rig.engine.poll()] == [(Status.CANCELLED,)]
    # It took its place in line all the same: what conflicts with job 1 still waits for job 1.
    rig.submit(3, ONBOARD, (3,), [9])
    assert not rig.device.gates[DEVICE].wait_arrived(1, A_MOMENT)
    rig.finish(1, 3)
    rig.model.check(rig.pools)


@pytest.mark.parametrize("route", [OFFLOAD, ONBOARD], ids=str)
def test_copies_wait_for_the_compute_scheduled_so_far(route: Route) -> None:
    rig = Rig()
    compute = Compute()
    work = compute.start()
    rig.engine.begin_step(compute)
    rig.engine.submit(transfer(1, route, [Section(0, 0, (3,))], [7]))
    assert work.waited_for.wait(PATIENCE)
    # Compute is still at work on block 3: an offload must take what it leaves, an onboard must not disturb it.
    assert rig.device.gates[route.destination].arrived == 0
    rig.pools.tensors[0][3 * 24 : 4 * 24] = 77
    rig.model.device[0][3 * 24 : 4 * 24] = 77
    work.done()
    rig.model.move([Section(0, 0, (3,))], rig.pools.images([7]), into=route.destination)
    rig.finish(1)
    rig.model.check(rig.pools)


def test_copies_do_not_wait_for_their_steps_own_compute() -> None:
    rig = Rig()
    compute = Compute()
    compute.start().done()
    rig.engine.begin_step(compute)
    during = compute.start()
    rig.submit(1, OFFLOAD, (3,), [7])
    assert rig.engine.wait([1], PATIENCE)
    during.done()
    rig.finish(1)


def test_between_steps_copies_wait_for_the_compute_scheduled_at_submit() -> None:
    rig = Rig()
    compute = Compute()
    compute.start().done()
    rig.engine.begin_step(compute)
    rig.engine.end_step(compute)
    after = compute.start()
    rig.submit(1, OFFLOAD, (3,), [7])
    assert after.waited_for.wait(PATIENCE)
    assert rig.device.gates[HOST].arrived == 0
    after.done()
    rig.finish(1)


def test_two_begin_steps_are_both_waited_for() -> None:
    rig = Rig()
    streams = Compute(), Compute()
    first, second = (stream.start() for stream in streams)
    for stream in streams:
        rig.engine.begin_step(stream)
    rig.submit(1, OFFLOAD, (3,), [7])
    second.done()
    assert first.waited_for.wait(PATIENCE)
    assert rig.device.gates[HOST].arrived == 0
    first.done()
    rig.finish(1)
    assert second.waits == 1


def test_steps_without_an_end_do_not_pile_up() -> None:
    rig = Rig()
    compute = Compute()
    for _ in range(100):
        compute.start().done()
        rig.engine.begin_step(compute)
    rig.submit(1, OFFLOAD, (3,), [7])
    rig.finish(1)
    assert sum(work.waits for work in compute.given) == 1


@pytest.mark.parametrize("route", [OFFLOAD, ONBOARD], ids=str)
def test_compute_waits_for_the_copies_submitted_so_far(route: Route) -> None:
    rig = Rig()
    gate = rig.device.gates[route.destination]
    gate.shut()
    rig.engine.begin_step()
    rig.submit(1, route, (3,), [7])
    rig.submit(2, route, (4,), [8])
    threading.Timer(A_MOMENT, gate.open).start()
    rig.engine.end_step()
    rig.device.log.append("compute")
    assert rig.device.log.count(f"{route.destination} ends") == 2
    assert rig.device.log[-1] == "compute"
    rig.model.check(rig.pools)
    rig.finish(1, 2)


def test_end_step_survives_failed_and_cancelled_jobs() -> None:
    rig = Rig()

    def fail(step: str, batch: object) -> None:
        raise RuntimeError("no")

    rig.device.fault = fail
    rig.engine.submit(transfer(1, OFFLOAD, [Section(0, 0, (3,))], [7]))
    rig.engine.submit(transfer(2, OFFLOAD, [Section(0, 0, (3,))], [7]))
    rig.engine.cancel(2)
    step = threading.Thread(target=rig.engine.end_step, daemon=True)
    step.start()
    step.join(PATIENCE)
    assert not step.is_alive()
    rig.finish(1, 2)
    assert Status.OK not in [status for result in rig.engine.poll() for status in result.statuses]


@pytest.mark.parametrize("seed", range(12))
def test_many_jobs_on_few_slots_equal_a_sequential_run(seed: int) -> None:
    """Both directions at once, copies cut in halves with pauses: any overtaking leaves other bytes."""
    rng = random.Random(seed)
    pools = Pools(flat(6, 24, refs=2, blocks_per_chunk=2), slots=4, seed=seed)
    model = Model(pools)
    engine = TransferEngine(pools.layout, SlowDevice(seed), pools.host, max_batch_bytes=96)
    jobs = range(30)
    for job in jobs:
        route = rng.choice([OFFLOAD, ONBOARD])
        sections = [Section(0, rng.randrange(2), tuple(rng.sample(range(6), rng.randint(1, 4))))]
        chunks = (sections[0].first_block + len(sections[0].blocks) + 1) // 2
        slots = rng.sample(range(4), chunks)
        engine.submit(transfer(job, route, sections, slots))
        model.move(sections, pools.images(slots), into=route.destination)
        if rng.random() < 0.1:
            engine.end_step()
    assert engine.wait(jobs, PATIENCE)
    engine.close()
    results = engine.poll()
    assert sorted(result.job for result in results) == list(jobs)
    assert {status for result in results for status in result.statuses} == {Status.OK}
    model.check(pools)


def test_the_model_that_judges_can_fail() -> None:
    """A control: one wrong bit is seen."""
    pools = Pools(flat(6), slots=4)
    model = Model(pools)
    model.check(pools)
    pools.tensors[1][7] ^= 1
    with pytest.raises(AssertionError):
        model.check(pools)
    pools.tensors[1][7] ^= 1
    pools.arena.array[-1] ^= np.uint8(1)
    with pytest.raises(AssertionError):
        model.check(pools)
