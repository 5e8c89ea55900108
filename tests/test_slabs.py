"""`Slabs`: every slot of every pool lies in its slab, apart from all others, wherever one looks."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore.boundary import Slabs, by_size
from longshore.errors import LayoutError, PlanError

PAGE = 4096


@st.composite
def geometries(draw: st.DrawFn) -> Slabs:
    sizes = draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    return Slabs(draw(st.integers(max(sizes), 120)), tuple(sizes), draw(st.integers(0, 5)))


@given(geometries())
def test_images_of_one_pool_fill_their_slabs_and_never_overlap(slabs: Slabs) -> None:
    for pool, size in enumerate(slabs.image_bytes):
        taken = np.zeros(slabs.nbytes, int)
        for slab in range(slabs.slabs):
            for index in slabs.slots_of(slab, pool):
                at = slabs.offset(pool, index)
                assert slabs.slab_of(index) == slab == at // slabs.slab_bytes == (at + size - 1) // slabs.slab_bytes
                taken[at : at + size] += 1
        assert taken.max(initial=0) <= 1
        lost = slabs.nbytes - taken.sum()
        assert lost == slabs.slabs * (slabs.slab_bytes % size), "a slab loses only what no image would fit in"


@given(geometries())
def test_many_offsets_at_once_are_the_offsets_one_by_one(slabs: Slabs) -> None:
    for pool in range(len(slabs.image_bytes)):
        good = [index for slab in range(slabs.slabs) for index in slabs.slots_of(slab, pool)]
        assert slabs.offsets(pool, good).tolist() == [slabs.offset(pool, index) for index in good]
        for bad in set(range(-2, slabs.indices + 2)) - set(good):
            with pytest.raises(PlanError, match=str(bad)):
                slabs.offset(pool, bad)
            with pytest.raises(PlanError, match=str(bad)):
                slabs.offsets(pool, [*good, bad])


@given(geometries())
def test_images_that_overlap_touch_a_slot_in_common(slabs: Slabs) -> None:
    pools = range(len(slabs.image_bytes))
    images = [(pool, index) for pool in pools for index in slabs.slots_of(0, pool)] if slabs.slabs else []
    for one in images:
        touched = set(slabs.overlap_units(one[0], [one[1]]).tolist())
        assert touched
        assert touched <= set(range(slabs.stride))
        for other in images:
            ends = [slabs.offset(*each) + slabs.image_bytes[each[0]] for each in (one, other)]
            overlap = slabs.offset(*one) < ends[1] and slabs.offset(*other) < ends[0]
            assert not overlap or touched & set(slabs.overlap_units(other[0], [other[1]]).tolist())


def test_the_smallest_images_touch_their_own_slots_alone() -> None:
    assert Slabs(12, (3, 4), 9).overlap_units(0, [17, 2]).tolist() == [17, 2]
    assert Slabs.of_one_size(5, 9).overlap_units(0, [8, 0]).tolist() == [8, 0]


def test_one_size_counts_images_and_loses_nothing() -> None:
    slabs = Slabs.of_one_size(3 * PAGE, 10)
    assert (slabs.indices, slabs.stride, slabs.nbytes) == (10, 1, 30 * PAGE)
    assert [slabs.offset(0, index) for index in range(10)] == [index * 3 * PAGE for index in range(10)]
    assert Slabs.within(31 * PAGE, [3 * PAGE]) == slabs


def test_slabs_are_as_small_as_goes_without_losing_much() -> None:
    assert Slabs.within(1000 * PAGE, [PAGE, 5 * PAGE]) == Slabs(5 * PAGE, (PAGE, 5 * PAGE), 200)
    uneven = Slabs.within(10_000 * PAGE, [2 * PAGE, 3 * PAGE])
    assert uneven.slab_bytes == 6 * PAGE, "3 pages would lose one for every image of 2"
    assert uneven.slabs == 10_000 // 6


@given(st.integers(0, 5000), st.lists(st.integers(1, 60), min_size=1, max_size=4))
def test_slabs_within_a_capacity_stay_within_it(nbytes: int, sizes: list[int]) -> None:
    slabs = Slabs.within(nbytes, sizes)
    assert slabs.nbytes <= nbytes
    assert nbytes < max(sizes) or slabs.slabs >= 1, "where an image fits, there is a slab"
    assert nbytes - slabs.nbytes < slabs.slab_bytes


def test_pools_are_image_sizes_shared_by_equal_groups() -> None:
    assert by_size([12, 4, 12, 7]) == ((4, 7, 12), (2, 0, 2, 1))


def test_slabs_are_plain_data() -> None:
    slabs = Slabs(12, (3, 4), 2)
    assert pickle.loads(pickle.dumps(slabs)) == slabs  # noqa: S301 - our own
    assert hash(slabs) == hash(Slabs(12, (3, 4), 2)) != hash(Slabs(12, (3, 4), 3))


@pytest.mark.parametrize(
    ("slab", "sizes", "count"), [(8, (), 1), (8, (0,), 1), (8, (9,), 1), (8, (-1, 2), 1), (8, (8,), -1)]
)
def test_sizes_that_cannot_be_are_refused(slab: int, sizes: tuple[int, ...], count: int) -> None:
    with pytest.raises(LayoutError):
        Slabs(slab, sizes, count)


@pytest.mark.parametrize("sizes", [[], [0, 3], [-1]])
def test_capacities_are_not_cut_for_sizes_that_cannot_be(sizes: list[int]) -> None:
    with pytest.raises(LayoutError):
        Slabs.within(100, sizes)


def test_unknown_pools_and_slabs_are_refused() -> None:
    slabs = Slabs(12, (3, 4), 2)
    for call in (
        lambda: slabs.offset(2, 0),
        lambda: slabs.offsets(-1, [0]),
        lambda: slabs.slots_of(2, 0),
        lambda: slabs.slots_of(0, 2),
        lambda: slabs.slab_of(8),
        lambda: slabs.slab_of(-1),
    ):
        with pytest.raises(PlanError):
            call()
