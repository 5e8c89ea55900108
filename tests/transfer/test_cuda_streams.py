"""The CUDA device's streams, on stand-ins that move every byte as late as the order that was asked for allows."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Collection
from pathlib import Path

import numpy as np
import pytest
import torch
from cuda_stand_in import AnyWay, StandIn, StandInLibrary, World
from device_kit import Lane, between, copied_inside, inside
from gated_device import TIMEOUT
from hypothesis import given
from hypothesis import strategies as st
from transfer_kit import Bytes, Model, Pools, chunks_of, elsewhere, flat, layouts, sections, transfer

from depth import examples
from longshore.boundary import DEVICE, HOST, Section, Status
from longshore.errors import DeviceError, FreedLayoutError
from longshore.layout import KVGroup, KVLayout, PageRef
from longshore.transfer import D2H, H2D, TransferEngine
from longshore.transfer.copy_plan import plan_copy
from longshore.transfer.device.cuda.arguments import KernelShape, image_runs, pieces_of, staged, staged_pitch
from longshore.transfer.device.cuda.calibration import Always, all_registered
from longshore.transfer.device.cuda.driver import RELAXED, Driver
from longshore.transfer.device.cuda.streams import RING_SLOTS, CopyShape, DescriptorBuffer, Way, take_ring
from longshore.transfer.device.torch_streams import EVENTS, Fallbacks

WAYS = list(Way)


@pytest.mark.parametrize("way", WAYS)
@examples(30)
@given(data=st.data())
def test_offload_then_onboard(way: Way, data: st.DataObject) -> None:
    layout = data.draw(layouts())
    parts = data.draw(sections(layout))
    there = data.draw(st.composite(lambda draw: elsewhere(draw, layout, parts))())
    items = chunks_of(layout, parts)
    pools = Pools(layout, slots=items + 1, seed=data.draw(st.integers(0, 99)))
    slots = data.draw(st.permutations(range(items + 1)))[:items]
    tokens = data.draw(st.none() | st.integers(1, 15))
    max_bytes = data.draw(st.integers(1, 9000))
    gpu = StandIn(Always(way), staging_bytes=data.draw(st.sampled_from([0, 4096, 40000])))
    model = Model(pools)
    out = gpu.lane(layout, HOST)
    out.send(between(pools, parts, slots, HOST, tokens).batch.cut(max_bytes))
    out.close()
    model.move(parts, pools.images(slots), destination=HOST, tokens=tokens)
    model.check(pools)
    for tensor in pools.tensors:
        tensor.bitwise_not_()
    model.device = pools.device_bytes()
    back = gpu.lane(layout, DEVICE)  # a thread has one stream at a time
    back.send(between(pools, there, slots, DEVICE, tokens).batch.cut(max_bytes))
    back.close()
    model.move(there, pools.images(slots), destination=DEVICE, tokens=tokens)
    model.check(pools)
    assert not gpu.library.breaches
    assert not set(gpu.device.fallbacks()) & {"host_unregistered", "straddling_piece", "no_batched_copy"}
    gpu.device.close()


@examples(20)
@given(data=st.data())
def test_copies_inside_the_device(data: st.DataObject) -> None:
    layout = data.draw(layouts())
    blocks = data.draw(st.permutations(range(layout.num_blocks)))
    count = data.draw(st.integers(1, layout.num_blocks // 2))
    written, read = blocks[:count], blocks[count : 2 * count]
    pools = Pools(layout, slots=1)
    expected = pools.device_bytes()
    copied_inside(expected, layout, 0, written, read)
    gpu = StandIn(Always(Way.DIRECT))
    lane = gpu.lane(layout, DEVICE)
    lane.send(inside(layout, 0, written, read).batch.cut(data.draw(st.integers(1, 9000))))
    lane.close()
    for got, wanted in zip(pools.device_bytes(), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)
    assert set(gpu.accelerator.kernels) == {"copy_blocks"}
    # The driver has brought orders and nothing else: what it prefers for the link is slow inside the device.
    assert {count for _, count in gpu.library.calls} == {1}


def test_the_ring_is_gathered_into_while_the_link_empties_it() -> None:
    """A place is gathered into again only after the link has left it, but the next place at once."""
    pools = Pools(flat(64, 4096, refs=1), slots=64)
    gpu = StandIn(Always(Way.STAGED), staging_bytes=RING_SLOTS * 4096)
    lane = gpu.lane(pools.layout, HOST)
    lane.send([between(pools, [Section(0, 0, tuple(range(64)))], range(64), HOST).batch])
    assert len(gpu.accelerator.kernels) == 64
    lane.finish()
    np.testing.assert_array_equal(pools.arena.array[: 64 * 4096], pools.tensors[0].numpy())


@pytest.mark.parametrize("destination", [HOST, DEVICE])
@pytest.mark.parametrize("way", [Way.STAGED, Way.ZERO_COPY])
@pytest.mark.parametrize(("page", "padding"), [(7, 0), (24, 0), (24, 8), (656, 0), (4096, 0), (1 << 16, 0)])
def test_kernels_for_whole_blocks_are_compiled_at_start(way: Way, destination: str, page: int, padding: int) -> None:
    """Nothing is compiled while copies wait: neither for another shape, nor for pointers that are aligned otherwise."""
    pools = Pools(flat(9, page, refs=3, blocks_per_chunk=2, padding=padding), slots=5)
    gpu = StandIn(Always(way), staging_bytes=1 << 20)
    lane = gpu.lane(pools.layout, destination)
    prepared = set(gpu.accelerator.prepared)
    for blocks in ((5, 2, 8, 1), (3, 4), (7,)):
        parts = [Section(0, 0, blocks)]
        lane.send([between(pools, parts, range((len(blocks) + 1) // 2), destination).batch])
    if destination == DEVICE:
        lane.send([inside(pools.layout, 0, [1, 2, 3], [4, 5, 6]).batch])
    lane.finish()
    assert gpu.accelerator.launched <= prepared
    assert gpu.accelerator.all_aligned


def test_one_dma_for_each_image() -> None:
    pools = Pools(flat(64, 512, refs=8, blocks_per_chunk=4), slots=16)
    gpu = StandIn(Always(Way.STAGED))
    lane = gpu.lane(pools.layout, HOST)
    lane.send([between(pools, [Section(0, 0, tuple(range(63, -1, -1)))], range(16), HOST).batch])
    lane.finish()
    assert [count for _, count in gpu.library.calls] == [1, 16]  # the kernel's orders, and 16 images of 32 pages each


@pytest.mark.parametrize("destination", [HOST, DEVICE])
def test_host_memory_that_is_not_registered_goes_through_pinned_stages(destination: str) -> None:
    pools = Pools(flat(64, 656, refs=3, blocks_per_chunk=2), slots=32)
    gpu = StandIn(Always(Way.DIRECT), mood="eager", in_one_piece=lambda offsets, lengths: np.asarray(offsets) % 2 == 1)
    lane = gpu.lane(pools.layout, destination)
    model = Model(pools)
    for _ in range(2):
        parts, slots = [Section(0, 0, tuple(range(20, 40)))], list(range(10))
        lane.send(between(pools, parts, slots, destination).batch.cut(9000))
        model.move(parts, pools.images(slots), destination=destination)
    lane.close()
    model.check(pools)
    assert not gpu.library.calls
    assert gpu.device.fallbacks()["host_unregistered"] > 2
    assert gpu.device.fallbacks()["late_bounce"] == 1


def test_copies_inside_the_device_do_not_ask_for_host_memory() -> None:
    pools = Pools(flat(8), slots=8)
    gpu = StandIn(Always(Way.DIRECT), in_one_piece=None)
    expected = pools.device_bytes()
    copied_inside(expected, pools.layout, 0, [1, 2], [4, 5])
    lane = gpu.lane(pools.layout, DEVICE)
    lane.send([inside(pools.layout, 0, [1, 2], [4, 5]).batch])
    lane.close()
    assert gpu.device.fallbacks() == {}
    np.testing.assert_array_equal(pools.device_bytes(), expected)


def test_stages_for_unregistered_host_memory_are_taken_at_start() -> None:
    pools = Pools(flat(8), slots=8)
    gpu = StandIn(Always(Way.DIRECT), mood="eager", in_one_piece=None)
    lane = gpu.lane(pools.layout, HOST)
    lane.send([between(pools, [Section(0, 0, (3,))], [1], HOST).batch])
    lane.close()
    assert gpu.device.fallbacks() == {"host_unregistered": 1}


def test_no_copy_leaves_a_registered_piece() -> None:
    """Blocks side by side and images side by side would be one piece, half of which is registered apart."""
    layout = flat(8, 4096, refs=1)
    pools = Pools(layout, slots=8)
    border = pools.host.slabs.offset(0, 2)

    def in_one_piece(offsets: Bytes, lengths: Bytes) -> Bytes:
        first, last = np.asarray(offsets), np.asarray(offsets) + lengths
        return (first >= border) | (last <= border)

    class DirectIfItMay:
        def choose(self, load: CopyShape, ways: Collection[Way]) -> Way:
            return Way.DIRECT if Way.DIRECT in ways else Way.STAGED

    gpu = StandIn(DirectIfItMay(), in_one_piece=in_one_piece)
    lane = gpu.lane(layout, HOST)
    lane.send([between(pools, [Section(0, 0, (0, 1, 2, 3))], [0, 1, 2, 3], HOST).batch])
    assert gpu.device.fallbacks() == {"straddling_piece": 1}
    lane.finish()
    np.testing.assert_array_equal(pools.arena.array[: 4 * 4096], pools.tensors[0].numpy()[: 4 * 4096])


def test_where_no_way_is_left_copies_go_through_pinned_stages() -> None:
    """No ring, host memory that kernels do not reach, and a copy across two registered pieces."""
    layout = flat(8, 4096, refs=1)
    pools = Pools(layout, slots=8)
    library = StandInLibrary(World())
    library.host_pointers_serve = 0
    one_image = pools.host.slabs.offset(0, 1)
    gpu = StandIn(AnyWay(3), library=library, in_one_piece=lambda offsets, lengths: np.asarray(lengths) <= one_image)
    library.world = gpu.world
    gpu.accelerator.refuse_above = 1 << 20
    lane = gpu.lane(layout, HOST)
    gpu.accelerator.refuse_above = None
    lane.send([between(pools, [Section(0, 0, (0, 1))], [0, 1], HOST).batch])
    lane.finish()
    assert gpu.device.fallbacks() == {"smaller_ring": 2, "no_ring": 1, "straddling_piece": 1, "late_bounce": 1}
    np.testing.assert_array_equal(pools.arena.array[: 2 * 4096], pools.tensors[0].numpy()[: 2 * 4096])


@pytest.mark.parametrize("destination", [HOST, DEVICE])
@pytest.mark.parametrize("reached", [True, False])
def test_memory_is_freed_before_the_streams_that_used_it(
    monkeypatch: pytest.MonkeyPatch, reached: bool, destination: str
) -> None:
    """torch records an event on each stream that used pinned memory when that is freed: a destroyed one is a crash."""
    pools = Pools(flat(8, 4096), slots=8)
    gpu = StandIn(Always(Way.STAGED), mood="eager", in_one_piece=all_registered if reached else None)
    taken: list[weakref.ref[Bytes]] = []
    left: list[int] = []

    def watched(nbytes: int) -> torch.Tensor:
        memory = np.empty(nbytes, np.uint8)
        taken.append(weakref.ref(memory))
        return torch.from_numpy(memory)

    def destroyed(driver: object, streams: object) -> None:
        left.append(sum(memory() is not None for memory in taken))

    monkeypatch.setattr(gpu.accelerator, "device_bytes", watched)
    monkeypatch.setattr(gpu.accelerator, "pinned_bytes", watched)
    monkeypatch.setattr(gpu.accelerator, "destroy_streams", destroyed)
    lane = gpu.lane(pools.layout, destination)
    lane.send([between(pools, [Section(0, 0, (3,))], [1], destination).batch])
    assert taken and all(memory() is not None for memory in taken)
    gc.disable()  # a cycle of references would be freed later
    try:
        lane.close()
    finally:
        gc.enable()
    assert left == [0]


def test_less_memory_to_stage_in_is_counted() -> None:
    pools = Pools(flat(8), slots=8)
    gpu = StandIn(Always(Way.STAGED), staging_bytes=8 << 20)
    gpu.accelerator.refuse_above = 4 << 20
    lane = gpu.lane(pools.layout, HOST)
    assert gpu.device.fallbacks() == {"smaller_ring": 1}
    lane.send([between(pools, [Section(0, 0, (3,))], [1], HOST).batch])
    lane.finish()
    start = pools.host.slabs.offset(0, 1)
    np.testing.assert_array_equal(pools.arena.array[start : start + 24], pools.tensors[0].numpy()[72:96])


def test_without_a_ring_nothing_is_staged() -> None:
    pools = Pools(flat(8), slots=8)
    ways = AnyWay(1)
    gpu = StandIn(ways, staging_bytes=8 << 20)
    gpu.accelerator.refuse_above = 1 << 20
    lane = gpu.lane(pools.layout, HOST)
    assert gpu.device.fallbacks() == {"smaller_ring": 2, "no_ring": 1}
    for _ in range(20):
        lane.send([between(pools, [Section(0, 0, (3,))], [1], HOST).batch])
    lane.finish()
    assert ways.chosen == {Way.DIRECT, Way.ZERO_COPY}


def test_more_orders_than_was_taken_room_for_are_counted() -> None:
    pools = Pools(flat(70_000, 1, refs=1), slots=70_000 // 4096 + 1)
    layout = pools.layout
    blocks = tuple(np.random.default_rng(0).permutation(70_000).tolist())
    half = len(blocks) // 2
    expected = pools.device_bytes()
    expected[0][list(blocks[:half])] = expected[0][list(blocks[half:])]
    gpu = StandIn(Always(Way.DIRECT))
    lane = gpu.lane(layout, DEVICE)
    lane.send([inside(layout, 0, blocks[:half], blocks[half:]).batch])
    lane.finish()
    np.testing.assert_array_equal(pools.device_bytes()[0], expected[0])
    assert gpu.device.fallbacks() == {"descriptors_grown": 1}


def test_kernels_leave_host_memory_of_useless_addresses_alone() -> None:
    world = World()
    library = StandInLibrary(world)
    library.host_pointers_serve = 0
    ways = AnyWay(2)
    gpu = StandIn(ways, library=library)
    library.world = gpu.world
    pools = Pools(flat(8), slots=8)
    lane = gpu.lane(pools.layout, HOST)
    for _ in range(20):
        lane.send([between(pools, [Section(0, 0, (3,))], [1], HOST).batch])
    lane.finish()
    assert ways.chosen == {Way.DIRECT, Way.STAGED}


def test_a_driver_without_batches_is_counted() -> None:
    world = World()
    library = StandInLibrary(world, newest=12060)
    gpu = StandIn(Always(Way.DIRECT), library=library)
    assert gpu.device.fallbacks() == {"no_batched_copy": 1}


def test_what_the_driver_refuses_ends_one_copy_only() -> None:
    pools = Pools(flat(8, 4096), slots=8)
    gpu = StandIn(Always(Way.STAGED))
    lane = gpu.lane(pools.layout, HOST)
    batch = between(pools, [Section(0, 0, (3,))], [1], HOST).batch
    gpu.library.fail_with = 1
    with pytest.raises(DeviceError, match="CUDA_ERROR_INVALID_VALUE"):
        lane.send([batch])
    lane.stream.drain()
    gpu.library.fail_with = 0
    lane.send([batch])
    lane.finish()
    start = pools.host.slabs.offset(0, 1)
    np.testing.assert_array_equal(
        pools.arena.array[start : start + 4096], pools.tensors[0].numpy()[3 * 4096 : 4 * 4096]
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("refused", [False, True])
def test_events_are_used_again(way: Way, refused: bool) -> None:
    """Those of copies that have ended, and of copies that were refused: as many as were taken at start suffice."""
    pools = Pools(flat(8, 4096), slots=8)
    gpu = StandIn(Always(way))
    lane = gpu.lane(pools.layout, HOST)
    batch = between(pools, [Section(0, 0, (3,))], [1], HOST).batch
    for _ in range(EVENTS + 1):
        if refused:
            gpu.library.fail_with = 1
            with pytest.raises(DeviceError):
                lane.send([batch])
            lane.stream.drain()
        gpu.library.fail_with = 0
        lane.send([batch])
        lane.finish()
    assert gpu.device.fallbacks() == {}


@pytest.mark.parametrize("is_back", [False, True])
@pytest.mark.parametrize("is_inside", [False, True])
def test_a_batch_of_freed_memory_is_refused_before_it_moves(is_inside: bool, is_back: bool) -> None:
    """Also when the engine has given the layout new memory."""
    pools = Pools(flat(16), slots=16)
    gpu = StandIn(Always(Way.DIRECT))
    lane = gpu.lane(pools.layout, DEVICE)
    batch = (
        inside(pools.layout, 0, [1], [2]).batch
        if is_inside
        else between(pools, [Section(0, 0, (3,))], [1], DEVICE).batch
    )
    pools.layout.free()
    if is_back:
        pools.layout.take_back([tensor.clone() for tensor in pools.tensors])
    with pytest.raises(FreedLayoutError):
        lane.send([batch])
    assert not gpu.library.calls


@pytest.mark.parametrize("on_device", [True, False])
def test_images_are_padded_where_they_are_kept(on_device: bool) -> None:
    gpu = StandIn(Always(Way.ZERO_COPY))
    pools = Pools(flat(8), slots=8)
    images = gpu.device.allocate_images(16384) if on_device else None
    address = pools.arena.address if images is None else images.address
    before = bytearray(b"\xff" * 8192)
    if images is None:
        pools.arena.array[:8192] = 0xFF
    else:
        images.store(0, memoryview(before))
    gpu.lane(pools.layout, HOST).stream.zero(address + 4096, 24)
    found = bytearray(8192)
    if images is None:
        found[:] = pools.arena.array[:8192].tobytes()
    else:
        images.load(0, memoryview(found))
    assert found == b"\xff" * 4096 + bytes(24) + b"\xff" * (4096 - 24)


@examples(60)
@given(data=st.data())
def test_loads_fit_and_lose_nothing(data: st.DataObject) -> None:
    layout = data.draw(layouts())
    parts = data.draw(sections(layout))
    items = chunks_of(layout, parts)
    pools = Pools(layout, slots=max(1, items))
    batch = between(pools, parts, range(items), DEVICE).batch
    room = 16 * data.draw(st.integers(41, 600))
    for part in batch.parts:
        pieces = list(pieces_of(part, room))
        assert sum(piece.nbytes for piece in pieces) == part.nbytes
        assert all(staged_pitch(piece) * len(piece.images) <= room for piece in pieces)
        for piece in pieces:
            assert int(image_runs(layout, piece).size.sum()) == piece.chunk_bytes
    for load in staged(batch.parts, room):
        ends = [offset + staged_pitch(part) * len(part.images) for part, offset in load]
        assert [offset for _, offset in load] == [0, *ends[:-1]]
        assert ends[-1] <= room


def test_the_engine_over_the_device() -> None:
    """Both directions from their threads, ways at random: what comes back into other blocks is what went out."""
    pools = Pools(flat(64, 656, refs=3, blocks_per_chunk=2), slots=32)
    gpu = StandIn(AnyWay(5), staging_bytes=1 << 14)
    before = [tensor.clone() for tensor in pools.tensors]
    engine = TransferEngine(pools.layout, gpu.device, pools.host, max_batch_bytes=10_000)
    try:
        engine.submit(transfer(1, D2H, [Section(0, 0, tuple(range(32)))], list(range(16))))
        assert engine.wait([1], TIMEOUT)
        engine.submit(transfer(2, H2D, [Section(0, 0, tuple(range(63, 31, -1)))], list(range(16))))
        assert engine.wait([2], TIMEOUT)
        assert {status for result in engine.poll() for status in result.statuses} == {Status.OK}
    finally:
        engine.close()
    for tensor, old in zip(pools.tensors, before, strict=True):
        assert (tensor.view(64, 656)[32:] == old.view(64, 656)[:32].flip(0)).all()
    assert not gpu.library.breaches


def test_lanes_close_idle() -> None:
    gpu = StandIn(Always(Way.STAGED))
    Lane(gpu.device.stream(flat(4), HOST)).close()


def test_thread_bound_to_a_stream_has_its_device_context() -> None:
    gpu = StandIn(Always(Way.DIRECT))
    stream = gpu.device.stream(flat(4), HOST)
    seen: list[object] = []

    def run() -> None:
        stream.bind()
        seen.append(gpu.library.contexts.now)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(TIMEOUT)
    assert seen == [0xC0]


def test_slots_of_a_ring_take_turns() -> None:
    ring = take_ring(StandIn(Always(Way.STAGED)).accelerator, Fallbacks(), 1 << 20, 4096)
    addresses = [ring.next().address for _ in range(2 * RING_SLOTS)]
    assert len(set(addresses)) == RING_SLOTS
    assert addresses[:RING_SLOTS] == addresses[RING_SLOTS:]


def test_descriptor_buffer_keeps_descriptors_until_its_next_use() -> None:
    buffer = DescriptorBuffer(StandIn(Always(Way.STAGED)).accelerator, Fallbacks())
    column = np.zeros(3, np.uint64)
    gone = weakref.ref(column)
    buffer.keep(column, column, column)
    del column
    assert gone() is not None
    buffer.begin()
    assert gone() is None


def test_lane_thread_ends_no_capture_of_a_graph() -> None:
    gpu = StandIn(Always(Way.DIRECT))
    engine = TransferEngine(flat(4), gpu.device, Pools(flat(4), slots=4).host)
    try:
        engine.submit(transfer(1, D2H, [Section(0, 0, (3,))], [1]))
        assert engine.wait([1], TIMEOUT)
        modes = {thread: mode for thread, mode in gpu.library.capture_modes.items() if thread != threading.get_ident()}
        assert list(modes.values()) == [RELAXED]
    finally:
        engine.close()


@pytest.mark.parametrize("destination", [HOST, DEVICE])
@pytest.mark.parametrize("way", list(Way))
def test_without_a_compiler_pages_go_one_by_one(way: Way, destination: str, caplog: pytest.LogCaptureFixture) -> None:
    pools = Pools(flat(8, 24), slots=8)
    model = Model(pools)
    gpu = StandIn(Always(way))
    gpu.accelerator.compiler_error = RuntimeError("Failed to find C compiler")
    lane = gpu.lane(pools.layout, destination)
    lane.send([between(pools, [Section(0, 0, (3, 5))], [1, 2], destination).batch])
    assert len(gpu.library.calls) == 1  # over the link, and not through stages
    model.move([Section(0, 0, (3, 5))], pools.images([1, 2]), destination=destination)
    if destination == DEVICE:
        lane.finish()
        lane.send([inside(pools.layout, 0, [6, 7], [3, 1]).batch])
        copied_inside(model.device, pools.layout, 0, [6, 7], [3, 1])
    lane.close()
    model.check(pools)
    assert not gpu.accelerator.kernels
    assert gpu.device.fallbacks()["no_kernels"] == (3 if destination == DEVICE else 2)
    (line,) = [record.getMessage() for record in caplog.records if "copy kernels for" in record.getMessage()]
    assert "gcc" in line and "Python.h" in line and "Failed to find C compiler" in line


@pytest.mark.parametrize("compiles", [True, False])
def test_a_kernel_is_compiled_once_whether_that_fails_or_not(compiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, asked = StandIn(Always(Way.STAGED)), list[KernelShape]()
    prepare = gpu.accelerator.prepare
    gpu.accelerator.compiler_error = None if compiles else FileNotFoundError("ptxas")
    monkeypatch.setattr(gpu.accelerator, "prepare", lambda shape: (asked.append(shape), prepare(shape))[1])
    for destination in (HOST, DEVICE, HOST):
        gpu.lane(flat(8, 24), destination).close()
    assert len(asked) == len({shape.compiled for shape in asked}) > 0
    assert compiles or len(asked) == 1


@pytest.mark.parametrize("compiles", [True, False])
def test_stages_are_allocated_before_the_first_copy(compiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of host memory that is not registered; and for copies inside the device, where there are no kernels."""
    pools = Pools(flat(8, 24), slots=8)
    gpu, pinned = StandIn(Always(Way.DIRECT), in_one_piece=None if compiles else all_registered), list[int]()
    pinned_bytes = gpu.accelerator.pinned_bytes
    gpu.accelerator.compiler_error = None if compiles else FileNotFoundError("ptxas")
    monkeypatch.setattr(gpu.accelerator, "pinned_bytes", lambda size: (pinned.append(size), pinned_bytes(size))[1])
    lane = gpu.lane(pools.layout, DEVICE)
    before = list(pinned)
    chosen = between(pools, [Section(0, 0, (3,))], [1], DEVICE) if compiles else inside(pools.layout, 0, [6], [3])
    lane.send([chosen.batch])
    lane.close()
    assert pinned == before != []


def test_without_a_compiler_nothing_is_calibrated_or_kept(tmp_path: Path) -> None:
    gpu = StandIn(None, calibration=tmp_path / "kept.json")
    gpu.accelerator.compiler_error = FileNotFoundError("ptxas")
    lane = gpu.lane(flat(8, 24), HOST)
    lane.close()
    assert not (tmp_path / "kept.json").exists()
    assert not gpu.accelerator.kernels
    with pytest.raises(DeviceError, match="cannot hold chunk images: the copy kernels cannot be compiled"):
        gpu.device.allocate_images(1 << 20)
    with pytest.raises(DeviceError, match="kernels cannot be compiled"):
        gpu.device.calibrate()


def test_a_stream_that_cannot_be_made_leaves_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = StandIn(Always(Way.STAGED))
    monkeypatch.setattr(gpu.accelerator, "pinned_bytes", _out_of_memory)
    monkeypatch.setattr("longshore.transfer.device.cuda.streams.pinned_or_pageable", _out_of_memory)
    with pytest.raises(RuntimeError, match="no memory"):
        gpu.device.stream(flat(4), HOST)
    assert gpu.library.made == gpu.library.destroyed != []


def test_without_a_second_stream_the_first_is_destroyed(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = StandIn(Always(Way.STAGED))
    create, made = gpu.accelerator.create_stream, list[torch.Stream]()

    def create_one(driver: Driver) -> torch.Stream:
        if made:
            raise DeviceError("no more streams")
        made.append(create(driver))
        return made[0]

    monkeypatch.setattr(gpu.accelerator, "create_stream", create_one)
    with pytest.raises(DeviceError, match="no more streams"):
        gpu.device.stream(flat(4), HOST)
    assert len(made) == 1
    assert gpu.library.made == gpu.library.destroyed != []


@pytest.mark.parametrize("destination", [HOST, DEVICE])
@pytest.mark.parametrize("way", [Way.STAGED, Way.ZERO_COPY])
def test_kernels_for_any_tokens_and_layers_are_compiled_at_start(way: Way, destination: str) -> None:
    sizes = ((0, 160, 10), (1, 4096, 256), (2, 24, None), (3, 656 * 16, 656))
    tensors = [torch.zeros(9 * (size + 48), dtype=torch.uint8) for _, size, _ in sizes]
    refs = tuple(PageRef(index, 0, size + 48, size, token) for index, size, token in sizes)
    layout = KVLayout((KVGroup("kv", 16, 2, refs),), tensors, 9)
    pools = Pools(layout, slots=5)
    gpu = StandIn(Always(way), staging_bytes=1 << 20)
    lane = gpu.lane(layout, destination)
    prepared = set(gpu.accelerator.prepared)
    assert len(prepared) <= 3
    for tokens in (None, 1, 3, 15):
        chosen = plan_copy(
            layout, [Section(0, 0, (5, 2, 8))], pools.images([0, 3]), destination=destination,
            host_address=pools.arena.address,
            host_bytes=pools.arena.nbytes, tokens=tokens,
        )  # fmt: skip
        lane.send([chosen.batch])
        lane.send([chosen.batch.of_layer(layer) for layer in range(len(sizes))])
    lane.finish()
    assert gpu.accelerator.launched <= prepared


def _out_of_memory(*arguments: object) -> torch.Tensor:
    raise RuntimeError("no memory")
