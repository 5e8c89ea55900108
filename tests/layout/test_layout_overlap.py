"""Pages that share bytes are found, whatever their strides; groups over the same bytes share a pool."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from depth import examples
from longshore.errors import LayoutError
from longshore.layout import KVGroup, KVLayout, PageRef

NUM_BLOCKS = 6


def build(*groups: list[PageRef], num_blocks: int = NUM_BLOCKS) -> KVLayout:
    made = [KVGroup(f"group{i}", 4, 1, tuple(refs)) for i, refs in enumerate(groups)]
    return KVLayout(made, [torch.zeros(2000, dtype=torch.uint8)], num_blocks)


def test_pages_of_one_group_must_not_overlap() -> None:
    build([PageRef(0, 0, 16, 8), PageRef(0, 8, 16, 8)])
    with pytest.raises(LayoutError, match="pages overlap"):
        build([PageRef(0, 0, 16, 8), PageRef(0, 7, 16, 8)])
    with pytest.raises(LayoutError, match="pages overlap"):
        build([PageRef(0, 0, 16, 8), PageRef(0, 0, 16, 8)])


def test_page_may_not_reach_into_anothers_next_block() -> None:
    build([PageRef(0, 0, 16, 8), PageRef(0, 24, 16, 8)])
    with pytest.raises(LayoutError, match="pages overlap"):
        build([PageRef(0, 0, 16, 8), PageRef(0, 25, 16, 8)])


def test_groups_over_the_same_blocks_are_one_pool() -> None:
    layout = build([PageRef(0, 0, 16, 16)], [PageRef(0, 500, 16, 16)], [PageRef(0, 4, 16, 10)])
    assert layout.pools == (0, 1, 0)


def test_groups_may_not_share_the_bytes_of_different_blocks() -> None:
    with pytest.raises(LayoutError, match="pages overlap"):
        build([PageRef(0, 0, 16, 16)], [PageRef(0, 16, 16, 16)])
    with pytest.raises(LayoutError, match="pages overlap"):
        build([PageRef(0, 0, 16, 16)], [PageRef(0, 0, 24, 16)])


def test_pools_join_through_a_third_group() -> None:
    layout = build(
        [PageRef(0, 0, 16, 8)],
        [PageRef(0, 500, 16, 8)],
        [PageRef(0, 0, 16, 8), PageRef(0, 500, 16, 8)],
    )
    assert layout.pools == (0, 0, 0)


def test_one_block_has_no_stride() -> None:
    assert build([PageRef(0, 0, 0, 8), PageRef(0, 8, 3, 8)], num_blocks=1).num_blocks == 1
    with pytest.raises(LayoutError, match="pages overlap"):
        build([PageRef(0, 0, 0, 8), PageRef(0, 7, 0, 8)], num_blocks=1)


def touched(ref: PageRef, block: int) -> set[int]:
    start = ref.offset + block * ref.stride
    return set(range(start, start + ref.page_bytes))


refs = st.builds(
    PageRef,
    st.just(0),
    st.integers(0, 90),
    st.integers(1, 30),
    st.integers(1, 12),
    st.none(),
    st.just(0),
    st.just(""),
    st.just(1),
).filter(lambda ref: ref.page_bytes <= ref.stride)


@examples(400)
@given(st.lists(st.lists(refs, min_size=1, max_size=3), min_size=1, max_size=3), st.integers(1, 5))
def test_it_agrees_with_looking_at_every_byte(groups: list[list[PageRef]], num_blocks: int) -> None:
    flat = [(group, ref) for group, refs in enumerate(groups) for ref in refs]
    joined = set()
    allowed = True
    for (first_group, first), (second_group, second) in itertools.combinations(flat, 2):
        for one, other in itertools.product(range(num_blocks), repeat=2):
            if touched(first, one) & touched(second, other):
                allowed = allowed and one == other and first_group != second_group
                joined.add((first_group, second_group))
    if not allowed:
        with pytest.raises(LayoutError, match="pages overlap"):
            build(*groups, num_blocks=num_blocks)
        return
    pools = build(*groups, num_blocks=num_blocks).pools
    for first_group, second_group in joined:
        assert pools[first_group] == pools[second_group]
    if len(groups) == 2:  # with three, two may be joined through the third
        assert (pools[0] == pools[1]) == bool(joined)
