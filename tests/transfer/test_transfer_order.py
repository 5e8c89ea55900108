"""Order: copies against copies that touch the same slots, copies against compute, compute against copies."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest
from gated_device import A_MOMENT, TIMEOUT, Compute, GatedDevice, SlowDevice
from transfer_kit import Model, Pools, flat, transfer

from depth import deep
from longshore.boundary import DEVICE, HOST, Route, Section, Status
from longshore.layout import KVGroup, KVLayout, PageRef
from longshore.transfer import D2H, H2D, TransferEngine


class Rig:
    def __init__(self, layout: KVLayout | None = None) -> None:
        self.pools = Pools(layout or flat(16), slots=16)
        self.model = Model(self.pools)
        self.device = GatedDevice()
        self.engine = TransferEngine(self.pools.layout, self.device, self.pools.host)

    def submit(self, job: int, route: Route, blocks: tuple[int, ...], slots: list[int], **fields: Any) -> None:
        sections = fields.pop("sections", [Section(0, 0, blocks)])
        self.engine.submit(transfer(job, route, sections, slots, **fields))
        self.model.move(sections, self.pools.images(slots), destination=route.destination)

    def finish(self, *jobs: int) -> None:
        for gate in self.device.gates.values():
            gate.open()
        assert self.engine.wait(jobs, TIMEOUT)
        self.engine.close()


def test_groups_over_one_pool_share_their_blocks() -> None:
    """The same block through another group is the same slot."""
    tensor = flat(16, 24, refs=1).tensors[0]
    groups = [KVGroup(name, 4, 1, (PageRef(0, 0, 24, 24),)) for name in "ab"]
    rig = Rig(KVLayout(groups, [tensor], 16))
    rig.device.gates[HOST].shut()
    rig.submit(1, D2H, (), [1], sections=[Section(0, 0, (3,))])
    assert rig.device.gates[HOST].wait_arrived(1)
    rig.submit(2, H2D, (), [2], sections=[Section(1, 0, (3,))])
    assert not rig.device.gates[DEVICE].wait_arrived(1, A_MOMENT)
    rig.finish(1, 2)
    rig.model.check(rig.pools)


def test_a_cancelled_job_waits_for_nobody() -> None:
    rig = Rig()
    rig.device.gates[HOST].shut()
    rig.submit(1, D2H, (3,), [7])
    assert rig.device.gates[HOST].wait_arrived(1)
    rig.engine.submit(transfer(2, H2D, [Section(0, 0, (3,))], [8]))
    assert not rig.engine.wait([2], A_MOMENT)
    rig.engine.cancel(2)
    assert rig.engine.wait([2], TIMEOUT)
    assert [result.statuses for result in rig.engine.poll()] == [(Status.CANCELLED,)]
    # It took its place in line all the same: what conflicts with job 1 still waits for job 1.
    rig.submit(3, H2D, (3,), [9])
    assert not rig.device.gates[DEVICE].wait_arrived(1, A_MOMENT)
    rig.finish(1, 3)
    rig.model.check(rig.pools)


def test_copies_do_not_wait_for_their_steps_own_compute() -> None:
    rig = Rig()
    compute = Compute()
    compute.start().done()
    rig.engine.begin_step(compute)
    during = compute.start()
    rig.submit(1, D2H, (3,), [7])
    assert rig.engine.wait([1], TIMEOUT)
    during.done()
    rig.finish(1)


def test_steps_without_an_end_do_not_pile_up() -> None:
    rig = Rig()
    compute = Compute()
    for _ in range(100):
        compute.start().done()
        rig.engine.begin_step(compute)
    rig.submit(1, D2H, (3,), [7])
    rig.finish(1)
    assert sum(work.waits for work in compute.given) == 1


def test_end_step_survives_failed_and_cancelled_jobs() -> None:
    rig = Rig()

    def fail(step: str, batch: object) -> None:
        raise RuntimeError("no")

    rig.device.fault = fail
    rig.engine.submit(transfer(1, D2H, [Section(0, 0, (3,))], [7]))
    rig.engine.submit(transfer(2, D2H, [Section(0, 0, (3,))], [7]))
    rig.engine.cancel(2)
    step = threading.Thread(target=rig.engine.end_step, daemon=True)
    step.start()
    step.join(TIMEOUT)
    assert not step.is_alive()
    rig.finish(1, 2)
    assert Status.OK not in [status for result in rig.engine.poll() for status in result.statuses]


@pytest.mark.parametrize("seed", range(deep(4, 12)))
def test_many_jobs_on_few_slots_equal_a_sequential_run(seed: int) -> None:
    """Both directions at once, copies cut in halves with pauses: any overtaking leaves other bytes."""
    rng = random.Random(seed)
    pools = Pools(flat(6, 24, refs=2, blocks_per_chunk=2), slots=4, seed=seed)
    model = Model(pools)
    engine = TransferEngine(pools.layout, SlowDevice(seed), pools.host, max_batch_bytes=96)
    jobs = range(30)
    for job in jobs:
        route = rng.choice([D2H, H2D])
        sections = [Section(0, rng.randrange(2), tuple(rng.sample(range(6), rng.randint(1, 4))))]
        chunks = (sections[0].first_block + len(sections[0].blocks) + 1) // 2
        slots = rng.sample(range(4), chunks)
        engine.submit(transfer(job, route, sections, slots))
        model.move(sections, pools.images(slots), destination=route.destination)
        if rng.random() < 0.1:
            engine.end_step()
    assert engine.wait(jobs, TIMEOUT)
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
