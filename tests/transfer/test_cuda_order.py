"""The order of copies on the CUDA device, in every mood of the stand-in: each wait is missed by one of them."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from cuda_stand_in import AnyWay, StandIn
from device_kit import between, copied_inside, inside
from hypothesis import given
from hypothesis import strategies as st
from transfer_kit import Bytes, Model, Pools, flat

from depth import deep, examples
from longshore.boundary import DEVICE, HOST, Section
from longshore.transfer.device.cuda.calibration import Always, all_registered
from longshore.transfer.device.cuda.streams import RING_SLOTS, Way

WAYS = list(Way)
MOODS: list[str | int] = ["lazy", "eager", 1, 2, 3]


@pytest.mark.parametrize("mood", ["lazy", "eager", "random"])
@examples(60)
@given(seed=st.integers(0, 1 << 30), staging=st.sampled_from([0, 4096, 1 << 20]))
def test_what_follows_another_way_sees_its_bytes(mood: str, seed: int, staging: int) -> None:
    """Onboard into some blocks, copy them on inside the device, onboard over what was copied: in one lane's order.

    The last of them is waited for first.
    """
    chance = random.Random(seed)
    pools = Pools(flat(12, chance.choice([7, 24, 656]), refs=3, blocks_per_chunk=2), slots=6, seed=seed % 100)
    gpu = StandIn(AnyWay(seed), staging_bytes=staging, mood=seed if mood == "random" else mood)
    lane = gpu.lane(pools.layout, DEVICE)
    model = Model(pools)
    for _ in range(lane.stream.depth):
        blocks = chance.sample(range(12), 12)
        if chance.random() < 0.6:
            parts, slots = [Section(0, 0, tuple(blocks[:10]))], chance.sample(range(6), 5)
            lane.send([between(pools, parts, slots, DEVICE).batch])
            model.move(parts, pools.images(slots), destination=DEVICE)
        else:
            lane.send([inside(pools.layout, 0, blocks[:6], blocks[6:]).batch])
            copied_inside(model.device, pools.layout, 0, blocks[:6], blocks[6:])
    gpu.device.wait_event(gpu.accelerator.compute, lane.under_way[-1].done_event)
    gpu.device.record_event(gpu.accelerator.compute).wait()
    lane.close()
    model.check(pools)


@pytest.mark.parametrize("mood", MOODS)
@pytest.mark.parametrize("seed", range(deep(3, 6)))
def test_copies_reach_in_the_order_of_their_calls(mood: str | int, seed: int) -> None:
    """Whoever waits for the last of several offloads by several ways may overwrite the pages of all."""
    pools = Pools(flat(16, 656), slots=16)
    gpu = StandIn(AnyWay(seed), mood=mood)
    lane = gpu.lane(pools.layout, HOST)
    model = Model(pools)
    for first in range(0, 16, 4):
        parts, slots = [Section(0, 0, tuple(range(first, first + 4)))], list(range(first, first + 4))
        lane.send([between(pools, parts, slots, HOST).batch])
        model.move(parts, pools.images(slots), destination=HOST)
    gpu.device.wait_event(gpu.accelerator.compute, lane.under_way[-1].done_event)
    gpu.on_compute(lambda: pools.tensors[0].fill_(7))
    gpu.device.record_event(gpu.accelerator.compute).wait()
    lane.finish()
    np.testing.assert_array_equal(pools.host_bytes(), model.host)


@pytest.mark.parametrize("mood", MOODS)
@pytest.mark.parametrize("way", WAYS)
def test_an_onboard_reads_the_host_only_when_it_may(way: Way, mood: str | int) -> None:
    pools = Pools(flat(8, 4096), slots=8)
    gpu = StandIn(Always(way), mood=mood)
    lane = gpu.lane(pools.layout, DEVICE)
    gpu.on_compute(lambda: pools.arena.array.fill(9))
    mark = gpu.device.record_event(gpu.accelerator.compute)
    lane.send([between(pools, [Section(0, 0, (3,))], [1], DEVICE).batch], (mark,))
    lane.finish()
    assert (pools.tensors[0].view(8, 4096)[3] == 9).all()


@pytest.mark.parametrize("destination", [HOST, DEVICE])
@pytest.mark.parametrize("seed", range(deep(4, 8)))
def test_ring_slot_is_refilled_only_when_empty(destination: str, seed: int) -> None:
    pools = Pools(flat(40, 512, refs=1), slots=40)
    gpu = StandIn(Always(Way.STAGED), staging_bytes=RING_SLOTS * 512, mood=seed)
    lane = gpu.lane(pools.layout, destination)
    model = Model(pools)
    parts = [Section(0, 0, tuple(range(40)))]
    lane.send([between(pools, parts, range(40), destination).batch])
    model.move(parts, pools.images(range(40)), destination=destination)
    lane.finish()
    model.check(pools)


@pytest.mark.parametrize("destination", [HOST, DEVICE])
@pytest.mark.parametrize("way", [*WAYS, None])
def test_after_a_drain_nothing_is_in_flight(way: Way | None, destination: str) -> None:
    """Whichever way it went; without one, through pinned stages."""
    pools = Pools(flat(8, 4096), slots=8)
    gpu = StandIn(Always(way or Way.DIRECT), in_one_piece=all_registered if way else None)
    stream = gpu.device.stream(pools.layout, destination)
    stream.bind()
    parts = [Section(0, 0, (3,))]
    stream.copy(between(pools, parts, [1], destination).batch, ())
    stream.drain()
    model = Model(pools)
    model.move(parts, pools.images([1]), destination=destination)
    model.check(pools)


@pytest.mark.parametrize("destination", [HOST, DEVICE])
@pytest.mark.parametrize("way", WAYS)
def test_copies_in_flight_together_each_say_their_end(way: Way, destination: str) -> None:
    """Nobody waits to give a stream as many copies as it takes."""
    pools = Pools(flat(8, 4096), slots=8)
    gpu = StandIn(Always(way))
    stream = gpu.device.stream(pools.layout, destination)
    gpu.accelerator.compute.run_to(gpu.accelerator.compute.given)
    stream.bind()
    copies = [
        stream.copy(between(pools, [Section(0, 0, (block,))], [block], destination).batch, ())
        for block in range(stream.depth)
    ]
    assert not any(copy.query() for copy in copies)
    stream.drain()
    assert all(copy.query() for copy in copies)
    assert all(copy.finish() >= 0 for copy in copies)


def test_bounced_copies_are_ordered_on_both_streams() -> None:
    """After what was copied directly before, and before what is copied directly next."""
    pools = Pools(flat(8, 4096), slots=8)
    reached = [True, False, True]
    gpu = StandIn(
        Always(Way.DIRECT), mood="eager", in_one_piece=lambda offsets, lengths: np.full(np.size(offsets), reached[0])
    )
    lane = gpu.lane(pools.layout, HOST)
    kernels, link = (stream.name for stream in list(gpu.world.streams.values())[1:3])
    batch = between(pools, [Section(0, 0, (3,))], [1], HOST).batch
    for before, after in ((None, None), (link, kernels), (kernels, link)):
        gpu.world.log.clear()
        lane.send([batch])
        reached.pop(0)
        pairs = [(one[:2], two[:2]) for one, two in itertools.pairwise(gpu.world.log) if one[2] == two[2]]
        if before is not None:
            assert (("record", before), ("wait", after)) in pairs
    assert gpu.device.fallbacks()["host_unregistered"] == 1
    lane.finish()


@pytest.mark.parametrize(("destination", "way"), [(DEVICE, Way.DIRECT), (HOST, Way.ZERO_COPY)])
def test_copy_after_a_staged_one_waits_for_its_last_stream(destination: str, way: Way) -> None:
    """Though the last copy before the staged one was on the same stream as this one."""
    pools = Pools(flat(8, 4096), slots=8)
    chooser = Always(way)
    gpu = StandIn(chooser, mood="eager")
    lane = gpu.lane(pools.layout, destination)
    kernels, link = (stream.name for stream in list(gpu.world.streams.values())[1:3])
    last, other = (kernels, link) if destination == DEVICE else (link, kernels)
    batch = between(pools, [Section(0, 0, (3,))], [1], destination).batch
    lane.send([batch])
    chooser.way = Way.STAGED
    lane.send([batch])
    chooser.way = way
    gpu.world.log.clear()
    lane.send([batch])
    pairs = [(one[:2], two[:2]) for one, two in itertools.pairwise(gpu.world.log) if one[2] == two[2]]
    assert (("record", last), ("wait", other)) in pairs
    lane.finish()


@pytest.mark.parametrize("destination", [HOST, DEVICE])
@pytest.mark.parametrize("way", WAYS)
def test_copies_of_one_way_wait_for_no_other_stream(way: Way, destination: str) -> None:
    pools = Pools(flat(8, 4096), slots=8)
    gpu = StandIn(Always(way), mood="eager")
    lane = gpu.lane(pools.layout, destination)
    batch = between(pools, [Section(0, 0, (3,))], [1], destination).batch
    lane.send([batch])
    gpu.world.log.clear()
    lane.send([batch])
    waits = [line for line in gpu.world.log if line[0] == "wait"]
    assert len(waits) == (1 if way is Way.STAGED else 0)  # from kernel to link, or back
    lane.finish()


def test_streams_begin_after_what_used_their_memory_before() -> None:
    gpu = StandIn(Always(Way.DIRECT))
    gpu.device.stream(flat(4), HOST)
    waits = [line for line in gpu.world.log if line[0] == "wait"]
    assert [stream for _, stream, _ in waits] == [stream.name for stream in list(gpu.world.streams.values())[1:3]]
    assert all(isinstance(point, tuple) and point[0] == "compute" for *_, point in waits)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mood", MOODS)
def test_a_copy_waits_for_compute(way: Way, mood: str | int) -> None:
    pools = Pools(flat(8, 4096), slots=8)
    gpu = StandIn(Always(way), mood=mood)
    lane = gpu.lane(pools.layout, HOST)
    gpu.on_compute(lambda: pools.tensors[0].fill_(7))
    mark = gpu.device.record_event(gpu.accelerator.compute)
    lane.send([between(pools, [Section(0, 0, (3,))], [1], HOST).batch], (mark,))
    lane.finish()
    offset = pools.host.slabs.offset(0, 1)
    assert (pools.arena.array[offset : offset + 4096] == 7).all()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mood", MOODS)
def test_an_onboard_waits_for_compute_that_still_reads(way: Way, mood: str | int) -> None:
    pools = Pools(flat(8, 4096), slots=8)
    gpu = StandIn(Always(way), mood=mood)
    lane = gpu.lane(pools.layout, DEVICE)
    seen: list[Bytes] = []
    before = pools.tensors[0].numpy().copy()
    gpu.on_compute(lambda: seen.append(pools.tensors[0].numpy().copy()))
    mark = gpu.device.record_event(gpu.accelerator.compute)
    lane.send([between(pools, [Section(0, 0, (3,))], [1], DEVICE).batch], (mark,))
    lane.finish()
    np.testing.assert_array_equal(seen[0], before)
    assert (pools.tensors[0].numpy() != before).any()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mood", MOODS)
def test_pages_are_reusable_once_an_offload_passed_its_point(way: Way, mood: str | int) -> None:
    pools = Pools(flat(64, 4096), slots=64)
    gpu = StandIn(Always(way), mood=mood, staging_bytes=1 << 16)
    lane = gpu.lane(pools.layout, HOST)
    before = pools.tensors[0].numpy().copy()
    lane.send([between(pools, [Section(0, 0, tuple(range(64)))], range(64), HOST).batch])
    gpu.device.wait_event(gpu.accelerator.compute, lane.under_way[0].done_event)
    gpu.on_compute(lambda: pools.tensors[0].fill_(7))
    gpu.device.record_event(gpu.accelerator.compute).wait()
    assert (pools.tensors[0] == 7).all()
    lane.finish()
    for block in range(64):
        start = pools.host.slabs.offset(0, block)
        page = slice(block * 4096, (block + 1) * 4096)
        np.testing.assert_array_equal(pools.arena.array[start : start + 4096], before[page])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mood", MOODS)
def test_compute_that_is_held_sees_what_was_onboarded(way: Way, mood: str | int) -> None:
    pools = Pools(flat(64, 4096), slots=64)
    gpu = StandIn(Always(way), mood=mood, staging_bytes=1 << 16)
    lane = gpu.lane(pools.layout, DEVICE)
    lane.send([between(pools, [Section(0, 0, tuple(range(64)))], range(64), DEVICE).batch])
    gpu.device.wait_event(gpu.accelerator.compute, lane.under_way[0].done_event)
    seen: list[Bytes] = []
    gpu.on_compute(lambda: seen.append(pools.tensors[0].numpy().copy()))
    gpu.device.record_event(gpu.accelerator.compute).wait()
    lane.finish()
    np.testing.assert_array_equal(seen[0], pools.tensors[0].numpy())
    np.testing.assert_array_equal(seen[0][:4096], pools.arena.array[:4096])


@pytest.mark.parametrize("destination", [HOST, DEVICE])
@pytest.mark.parametrize("way", WAYS)
def test_more_copies_than_buffers_leave_no_descriptor_behind(way: Way, destination: str) -> None:
    """What describes a copy is not written again while the copy may still read it."""
    pools = Pools(flat(64, 656), slots=64)
    gpu = StandIn(Always(way), staging_bytes=1 << 13)
    stream = gpu.device.stream(pools.layout, destination)
    stream.bind()
    model = Model(pools)
    copies = []
    for at in range(0, 64, 4):
        parts, slots = [Section(0, 0, tuple(range(at, at + 4)))], list(range(at, at + 4))
        copies.append(stream.copy(between(pools, parts, slots, destination).batch, ()))
        model.move(parts, pools.images(slots), destination=destination)
    for copy in copies:
        assert copy.finish() >= 0
    model.check(pools)
