"""Plans: ids consumed exactly or refused, runs merged, batches bounded, and the bytes where the image wants them."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transfer_kit import Model, Pools, chunks_of, elsewhere, flat, layouts, sections

from depth import examples
from longshore.boundary import DEVICE, HOST, Section
from longshore.errors import FreedLayoutError, PlanError
from longshore.layout import KVGroup, KVLayout, PageRef, from_axes, from_rows
from longshore.transfer.copy_plan import plan_copy
from longshore.transfer.device.base import copy_pieces
from longshore.transfer.pieces import PieceBuilder, Pieces, merge
from plans import Copies, plan


def make_plan(pools: Pools, parts: Any, slots: Any, destination: str = HOST, **options: Any) -> Copies:
    return plan(
        pools.layout,
        parts,
        pools.images(slots),
        destination=destination,
        host_address=pools.arena.address,
        host_bytes=pools.arena.nbytes,
        **options,
    )


def run(made: Copies) -> None:
    copy_pieces(*made)


@examples(60)
@given(st.data())
def test_offload_then_onboard_restores_bytes_in_other_blocks(data: st.DataObject) -> None:
    layout = data.draw(layouts())
    parts = data.draw(sections(layout))
    items = chunks_of(layout, parts)
    pools = Pools(layout, slots=items + 2, seed=data.draw(st.integers(0, 99)))
    slots = data.draw(st.permutations(range(items + 2)))[:items]
    there = data.draw(st.composite(lambda draw: elsewhere(draw, layout, parts))())
    model = Model(pools)
    in_any_order = data.draw(st.booleans())

    run(make_plan(pools, parts, slots, HOST, any_order=in_any_order))
    model.move(parts, pools.images(slots), destination=HOST)
    _ignore_padding(model, pools)
    model.check(pools)

    for tensor in pools.tensors:
        tensor.bitwise_not_()
    model.device = pools.device_bytes()
    run(make_plan(pools, there, slots, DEVICE, any_order=in_any_order))
    model.move(there, pools.images(slots), destination=DEVICE)
    model.check(pools)


def _ignore_padding(model: Model, pools: Pools) -> None:
    """A plan has no part in the padding's zeros: the engine writes them."""
    differs = model.host != pools.arena.array
    assert (model.host[differs] == 0).all()
    model.host[differs] = pools.arena.array[differs]


@examples(60)
@given(st.data())
def test_leading_tokens(data: st.DataObject) -> None:
    layout = data.draw(layouts())
    parts = data.draw(sections(layout))
    items = chunks_of(layout, parts)
    pools = Pools(layout, slots=items + 1)
    slots = data.draw(st.permutations(range(items + 1)))[:items]
    tokens = data.draw(st.none() | st.integers(-1, 17))
    destination = data.draw(st.sampled_from([DEVICE, HOST]))
    model = Model(pools)

    run(make_plan(pools, parts, slots, destination, tokens=tokens))
    model.move(parts, pools.images(slots), destination=destination, tokens=tokens)

    if destination == HOST:
        _ignore_padding(model, pools)
    model.check(pools)


def test_two_groups_with_an_empty_one_between() -> None:
    tensors = [torch.zeros(100 * 24, dtype=torch.uint8) for _ in range(3)]
    groups = [
        KVGroup("full", 16, 4, (PageRef(0, 0, 24, 24),)),
        KVGroup("none", 16, 2, (PageRef(1, 0, 24, 24),)),
        KVGroup("window", 16, 3, (PageRef(2, 0, 24, 24),)),
    ]
    pools = Pools(KVLayout(groups, tensors, 100), slots=8)
    parts = [Section(0, 6, tuple(range(50, 57))), Section(1, 5, ()), Section(2, 4, (9, 8, 7, 6))]
    model = Model(pools)

    made = make_plan(pools, parts, [5, 0, 3, 1, 6], HOST)

    run(made)
    model.move(parts, pools.images([5, 0, 3, 1, 6]), destination=HOST)
    _ignore_padding(model, pools)
    model.check(pools)
    # Group 0 from logical block 6 on: 2 blocks, 4 blocks, 1 block; group 2 from 4 on: 2 and 2, which run backwards.
    assert [int(size) // 24 for size in made.size] == [2, 4, 1, 1, 1, 1, 1]


def test_runs_that_are_adjacent_on_both_sides_are_one_copy() -> None:
    pools = Pools(flat(64, 4096, refs=1), slots=64)
    made = make_plan(pools, [Section(0, 0, (8, 9, 10, 20, 30, 31))], [4, 5, 6, 7, 1, 2], HOST)
    assert [int(size) // 4096 for size in made.size] == [3, 1, 2]
    apart = make_plan(pools, [Section(0, 0, (8, 9, 10))], [4, 6, 5], HOST)
    assert [int(size) // 4096 for size in apart.size] == [1, 1, 1]


def test_row_of_all_a_blocks_pages_is_one_copy() -> None:
    rows = torch.zeros(10, 12 * 40, dtype=torch.uint8)
    pools = Pools(from_rows(rows, pages_per_block=12, block_size=4), slots=4)
    made = make_plan(pools, [Section(0, 0, (7, 2))], [0, 3], DEVICE)
    assert made.size.tolist() == [480, 480]
    assert (made.destination - np.uint64(rows.data_ptr())).tolist() == [7 * 480, 2 * 480]


def adjacent(pieces: Pieces) -> list[int]:
    """Pieces that continue the one before them on both sides, one by one."""
    device, host, size = (column.tolist() for column in pieces)
    return [
        i
        for i in range(1, len(size))
        if device[i - 1] + size[i - 1] == device[i] and host[i - 1] + size[i - 1] == host[i]
    ]


def ascending(draw: st.DrawFn, layout: KVLayout) -> tuple[Section, ...]:
    """One section per group, of runs of blocks."""
    drawn = []
    for group in range(len(layout.groups)):
        left_out = draw(st.sets(st.integers(0, layout.num_blocks - 1)))
        blocks = tuple(block for block in range(layout.num_blocks) if block not in left_out)
        drawn.append(Section(group, draw(st.integers(0, 9)), blocks))
    return tuple(drawn)


@examples(100)
@given(st.data())
def test_nothing_that_is_adjacent_is_left_apart(data: st.DataObject) -> None:
    layout = data.draw(layouts())
    parts = data.draw(st.composite(lambda draw: ascending(draw, layout))())
    items = chunks_of(layout, parts)
    slots = sorted(data.draw(st.permutations(range(items + 2)))[:items])
    pools = Pools(layout, slots=items + 2)
    for any_order in (False, True):
        made = make_plan(pools, parts, slots, HOST, any_order=any_order)
        assert adjacent(Pieces(made.source, made.destination, made.size)) == []


@examples(100)
@given(st.data())
def test_cut_batches_move_the_same_bytes(data: st.DataObject) -> None:
    layout = data.draw(layouts())
    parts = data.draw(sections(layout))
    items = chunks_of(layout, parts)
    images = [layout.image_bytes * at for at in range(items)]
    whole = plan_copy(
        layout, parts, images, destination=HOST, host_address=0, host_bytes=layout.image_bytes * (items + 1)
    ).batch
    max_bytes = data.draw(st.integers(1, 9000))
    cut = list(whole.cut(max_bytes))
    moved = [byte for batch in cut for byte in every_byte(PieceBuilder().build(batch))]
    assert sorted(moved) == sorted(every_byte(PieceBuilder().build(whole)))
    longest = max(ref.page_bytes * group.blocks_per_chunk for group in layout.groups for ref in group.refs)
    assert all(batch.nbytes <= max(max_bytes, longest) for batch in cut)


def every_byte(pieces: Pieces) -> list[tuple[int, int]]:
    lists = (column.tolist() for column in pieces)
    return [(d + i, h + i) for d, h, n in zip(*lists, strict=True) for i in range(n)]


@examples(60)
@given(st.data())
def test_both_piece_orders_move_the_same_bytes(data: st.DataObject) -> None:
    layout = data.draw(layouts())
    parts = data.draw(st.composite(lambda draw: ascending(draw, layout))())
    items = chunks_of(layout, parts)
    images = [layout.image_bytes * (at + 1) for at in data.draw(st.permutations(range(items)))]
    host_bytes = layout.image_bytes * (items + 2)
    batch = plan_copy(layout, parts, images, destination=HOST, host_address=0, host_bytes=host_bytes).batch
    by_image = PieceBuilder().build(batch)
    quickest = PieceBuilder().build(batch, any_order=True)
    assert sorted(every_byte(by_image)) == sorted(every_byte(quickest))
    # The host's bytes come image after image, and in an image from front to back.
    position = {image: at for at, image in enumerate(images)}
    places = [(position[at // layout.image_bytes * layout.image_bytes], at) for _, at in every_byte(by_image)]
    assert places == sorted(places)


def test_runs_within_chunks_are_one_copy_in_every_reference() -> None:
    pools = Pools(flat(64, 32, refs=3, blocks_per_chunk=4), slots=4)
    # Chunks of 2, 4, and 3 blocks; 12 and 13 follow one another, but in two chunks.
    made = make_plan(pools, [Section(0, 2, (8, 9, 20, 21, 22, 12, 13, 4, 5))], [3, 0, 1], HOST)
    of_one = [2, 3, 1, 1, 2]
    assert [int(size) // 32 for size in made.size] == of_one[:1] * 3 + of_one[1:3] * 3 + of_one[3:] * 3


def test_a_plan_leaves_the_settings_of_numpy_alone() -> None:
    pools = Pools(flat(200, 8, refs=3), slots=100)
    before = np.setbufsize(4096)
    try:
        make_plan(pools, [Section(0, 0, tuple(range(0, 200, 2)))], range(100), HOST)
        assert np.getbufsize() == 4096
    finally:
        np.setbufsize(before)


def test_run_continues_from_a_partial_chunk_into_whole_ones() -> None:
    pools = Pools(flat(64, 4096, refs=1, blocks_per_chunk=2), slots=8)
    made = make_plan(pools, [Section(0, 1, (7, 8, 9))], [3, 4], HOST)
    assert made.size.tolist() == [3 * 4096]


@pytest.mark.parametrize("blocks_per_chunk", [1, 3])
def test_k_and_v_of_one_tensor_merge_at_their_seam(blocks_per_chunk: int) -> None:
    both = torch.zeros(2 * 6 * 24, dtype=torch.uint8)
    refs = (PageRef(0, 0, 24, 24), PageRef(0, 6 * 24, 24, 24))
    layout = KVLayout((KVGroup("kv", 16, blocks_per_chunk, refs),), [both], 6)
    pools = Pools(layout, slots=6)
    # Block 5 is the last of K, block 0 the first of V, which follows.
    one = make_plan(pools, [Section(0, 0, (0, 4, 5) if blocks_per_chunk == 3 else (5,))], [2], HOST)
    assert one.size.tolist() == ([24, 72, 48] if blocks_per_chunk == 3 else [24, 24])


@examples(60)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(1, 3)), max_size=30))
def test_merged_pieces_are_the_same_bytes(steps: list[tuple[int, int, int]]) -> None:
    device = host = 100
    rows = []
    for device_gap, host_gap, size in steps:
        device, host = device + device_gap // 4, host + host_gap // 4
        rows.append((device, host, size))
        device, host = device + size, host + size
    columns = np.array(rows, dtype=np.uint64).reshape(-1, 3).T
    pieces = Pieces(*(column.copy() for column in columns))
    merged = merge(pieces)

    assert every_byte(merged) == every_byte(pieces)
    assert adjacent(merged) == []


def test_planner_reuses_its_arrays_for_each_plan() -> None:
    pools = Pools(flat(64, 24, refs=3), slots=64)
    planner = PieceBuilder()
    for blocks in [(5, 9), tuple(range(60)), (7,), ()]:
        arguments = {"destination": HOST, "host_address": pools.arena.address, "host_bytes": pools.arena.nbytes}
        images = pools.images(range(len(blocks)))
        fresh = plan(pools.layout, [Section(0, 0, blocks)], images, **arguments)  # type: ignore[arg-type]
        again = plan(pools.layout, [Section(0, 0, blocks)], images, planner=planner, **arguments)  # type: ignore[arg-type]
        for one, other in zip(fresh, again, strict=True):
            np.testing.assert_array_equal(one, other)


@examples(60)
@given(st.data())
def test_reused_planner_makes_the_same_plans_as_a_new_one(data: st.DataObject) -> None:
    planner = PieceBuilder()
    for _ in range(4):
        layout = data.draw(layouts())
        parts = data.draw(sections(layout))
        items = chunks_of(layout, parts)
        pools = Pools(layout, slots=items + 1)
        arguments = {"destination": HOST, "host_address": pools.arena.address, "host_bytes": pools.arena.nbytes}
        arguments["any_order"] = data.draw(st.booleans())
        fresh = plan(layout, parts, pools.images(range(items)), **arguments)  # type: ignore[arg-type]
        again = plan(layout, parts, pools.images(range(items)), planner=planner, **arguments)  # type: ignore[arg-type]
        for one, other in zip(fresh, again, strict=True):
            np.testing.assert_array_equal(one, other)


def test_pages_of_another_size_get_sizes_of_their_own() -> None:
    planner = PieceBuilder()
    for page in (24, 656, 24):
        pools = Pools(flat(64, page, refs=3), slots=8)
        arguments = {"destination": HOST, "host_address": pools.arena.address, "host_bytes": pools.arena.nbytes}
        blocks = [Section(0, 0, (5, 9))]
        made = plan(pools.layout, blocks, pools.images([1, 4]), planner=planner, **arguments)  # type: ignore[arg-type]
        assert made.size.tolist() == [page] * 6


def test_block_ids_may_be_an_array() -> None:
    pools = Pools(flat(64, 24), slots=4)
    ids = np.array([3, 9, 1, 2], dtype=np.int32)
    made = make_plan(pools, [Section(0, 0, ids)], range(4), HOST)  # type: ignore[arg-type]
    plain = make_plan(pools, [Section(0, 0, (3, 9, 1, 2))], range(4), HOST)
    assert made.source.tolist() == plain.source.tolist()


def test_arrays_are_uint64() -> None:
    pools = Pools(flat(200, 8, refs=3), slots=100)
    made = make_plan(pools, [Section(0, 0, tuple(range(0, 200, 2)))], range(100), HOST)
    assert made.source.dtype == made.destination.dtype == made.size.dtype == np.uint64


REFUSED: list[tuple[str, list[Section], list[int], dict[str, Any]]] = [
    ("an item too few", [Section(0, 0, (1, 2, 3))], [0], {}),
    ("an item too many", [Section(0, 0, (1, 2))], [0, 1], {}),
    ("an unaligned start that needs one more", [Section(0, 1, (1, 2))], [0], {}),
    ("no section for an item", [], [0], {}),
    ("a block beyond the pool", [Section(0, 0, (1, 16))], [0], {}),
    ("a negative block", [Section(0, 0, (-1, 1))], [0], {}),
    ("a block that is no integer", [Section(0, 0, (1.5, 1))], [0], {}),  # type: ignore[arg-type]
    ("a block beyond 64 bits", [Section(0, 0, (1 << 70, 1))], [0], {}),
    ("a group that does not exist", [Section(1, 0, (1, 2))], [0], {}),
    ("a negative group", [Section(-1, 0, (1, 2))], [0], {}),
    ("a negative first block", [Section(0, -2, (1, 2))], [0], {}),
    ("an image beyond the host", [Section(0, 0, (1, 2))], [4], {}),
    ("an image before the host", [Section(0, 0, (1, 2))], [-1], {}),
    ("neither tier", [Section(0, 0, (1, 2))], [0], {"destination": "file"}),
]


@pytest.mark.parametrize(("why", "parts", "images", "options"), REFUSED, ids=[case[0] for case in REFUSED])
def test_what_does_not_fit_is_refused(why: str, parts: Any, images: list[int], options: dict[str, Any]) -> None:
    layout = flat(16, 24, refs=2, blocks_per_chunk=2)
    with pytest.raises(PlanError):
        plan(
            layout,
            parts,
            [image * 4096 for image in images],
            **{"destination": HOST, "host_address": 0, "host_bytes": 4 * 4096, **options},
        )


def test_what_is_written_may_not_be_named_twice() -> None:
    layout = flat(16, 24, refs=1, blocks_per_chunk=2)
    twice = [Section(0, 0, (1, 2, 3, 1))]

    def attempt(parts: list[Section], images: list[int], destination: str) -> None:
        plan_copy(layout, parts, images, destination=destination, host_address=0, host_bytes=1 << 20)

    with pytest.raises(PlanError, match="block 1 of device pool 0 would be written twice"):
        attempt(twice, [0, 4096], DEVICE)
    with pytest.raises(PlanError, match=r"image at offset .* would be written twice"):
        attempt([Section(0, 0, (1, 2, 3, 4))], [4096, 4096], HOST)
    attempt(twice, [0, 4096], HOST)  # to read twice is fine
    attempt([Section(0, 0, (1, 2, 3, 4))], [4096, 4096], DEVICE)


@pytest.mark.parametrize("host_bytes", [200 * 4096, 1 << 40])
@pytest.mark.parametrize("count", [2, 100])
def test_images_written_twice_are_found_among_few_and_many(count: int, host_bytes: int) -> None:
    layout = flat(200, 24, refs=1)
    blocks = tuple(range(count))
    images = [4096 * (199 - image) for image in blocks]
    plan_copy(layout, [Section(0, 0, blocks)], images, destination=HOST, host_address=0, host_bytes=host_bytes)
    images[-1] = images[0]
    with pytest.raises(PlanError, match=f"image at offset {images[0]} of host memory would be written twice"):
        plan_copy(layout, [Section(0, 0, blocks)], images, destination=HOST, host_address=0, host_bytes=host_bytes)


def test_small_images_close_to_one_another_are_not_one() -> None:
    """Slots may be as long as a group's own images, which are shorter than those of another group."""
    tensors = [torch.zeros(16 * size, dtype=torch.uint8) for size in (24, 20_000)]
    groups = [KVGroup(str(i), 16, 1, (PageRef(i, 0, size, size),)) for i, size in enumerate((24, 20_000))]
    layout = KVLayout(groups, tensors, 16)
    images = [0, 4096, 16_384]
    made = plan(layout, [Section(0, 0, (1, 2, 3))], images, destination=HOST, host_address=0, host_bytes=20_480)
    assert made.destination.tolist() == images


def test_equal_block_ids_in_separate_groups_are_distinct() -> None:
    tensors = [torch.zeros(16 * 24, dtype=torch.uint8) for _ in range(2)]
    groups = [KVGroup(name, 16, 1, (PageRef(i, 0, 24, 24),)) for i, name in enumerate("ab")]
    parts = [Section(0, 0, (3,)), Section(1, 0, (3,))]
    apart = KVLayout(groups, tensors, 16)
    plan_copy(apart, parts, [0, 4096], destination=DEVICE, host_address=0, host_bytes=1 << 20)
    shared = KVLayout(groups, [tensors[0], tensors[0]], 16)
    with pytest.raises(PlanError, match="block 3 of device pool 0"):
        plan_copy(shared, parts, [0, 4096], destination=DEVICE, host_address=0, host_bytes=1 << 20)


@pytest.mark.parametrize("tokens", [None, -1, 0, 16, 17])
def test_these_token_counts_mean_the_whole_block(tokens: int | None) -> None:
    layout = from_rows(torch.zeros(8, 4 * 64, dtype=torch.uint8), pages_per_block=4, block_size=16)
    plan = plan_copy(
        layout, [Section(0, 0, (1,))], [0], destination=HOST, host_address=0, host_bytes=4096, tokens=tokens
    )
    assert plan.batch.nbytes == 256


def test_only_the_last_block_is_partial() -> None:
    layout = from_rows(torch.zeros(8, 4 * 64, dtype=torch.uint8), pages_per_block=4, block_size=16)
    made = plan(layout, [Section(0, 0, (1, 2))], [0, 4096], destination=HOST, host_address=0, host_bytes=8192, tokens=5)
    assert made.size.tolist() == [256, 20, 20, 20, 20]


def test_pages_that_cannot_be_split_are_copied_whole() -> None:
    pages = (PageRef(0, 0, 64, 64, token_bytes=4), PageRef(1, 0, 8, 8))
    tensors = [torch.zeros(8 * 64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)]
    layout = KVLayout((KVGroup("kv", 16, 1, pages),), tensors, 8)
    made = plan(layout, [Section(0, 0, (1,))], [0], destination=HOST, host_address=0, host_bytes=4096, tokens=5)
    assert made.size.tolist() == [20, 8]


def test_item_bytes_are_what_moves_of_each() -> None:
    layout = flat(16, 24, refs=2, blocks_per_chunk=4)
    plan = plan_copy(
        layout,
        [Section(0, 3, (1, 2, 3, 4, 5, 6))],
        [0, 4096, 8192],
        destination=HOST,
        host_address=0,
        host_bytes=12288,
    )
    assert plan.item_bytes.tolist() == [48, 4 * 48, 48]
    assert plan.blocks()[0].tolist() == [1, 2, 3, 4, 5, 6]


def test_plans_against_freed_memory_are_refused() -> None:
    layout = flat(16)
    parts = [Section(0, 0, (1,))]
    batch = plan_copy(layout, parts, [0], destination=HOST, host_address=0, host_bytes=4096).batch
    layout.free()
    with pytest.raises(FreedLayoutError):
        plan(layout, parts, [0], destination=HOST, host_address=0, host_bytes=4096)
    with pytest.raises(FreedLayoutError):
        plan(layout, [], [], destination=HOST, host_address=0, host_bytes=4096)
    layout.take_back([torch.zeros(16 * 24, dtype=torch.uint8) for _ in range(2)])
    plan(layout, parts, [0], destination=HOST, host_address=0, host_bytes=4096)
    with pytest.raises(FreedLayoutError, match="generation 0"):
        PieceBuilder().build(batch)


def test_nothing_here_imports_torch() -> None:
    code = (
        "import sys, longshore.layout, longshore.transfer.pieces, longshore.transfer; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("destination", [HOST, DEVICE])
def test_only_the_tokens_asked_for_move_where_heads_are_outermost(destination: str) -> None:
    """As many bytes as where tokens are, and each in its place."""
    shape = {"layer": 2, "block": 4, "token": 16, "head": 8, "dim": 2}
    moved = []
    for memory in (("layer", "block", "token", "head", "dim"), ("layer", "block", "head", "token", "dim")):
        layout = from_axes([torch.zeros([shape[name] for name in memory])], memory, block_size=16, blocks_per_chunk=2)
        pools = Pools(layout, slots=2)
        model = Model(pools)
        parts = [Section(0, 0, (2, 0, 3))]
        found = plan(
            layout, parts, pools.images([1, 0]), destination=destination, host_address=pools.arena.address,
            host_bytes=pools.arena.nbytes, tokens=3,
        )  # fmt: skip
        model.move(parts, pools.images([1, 0]), destination=destination, tokens=3)
        moved.append(int(found.size.sum()))
        for to, at, size in zip(found.destination.tolist(), found.source.tolist(), found.size.tolist(), strict=True):
            ctypes.memmove(to, at, size)
        for expected, got in zip(model.device, pools.device_bytes(), strict=True):
            np.testing.assert_array_equal(got, expected)
    assert moved[0] == moved[1] == (2 * 16 + 3) * 64 * 2
