"""Slots of several sizes against a model that keeps one set of slots for each slab, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from object_state import state_of

from depth import examples
from longshore.boundary import Slabs
from longshore.cache.pool import DRAINING, FILLING, FREE, READY
from longshore.cache.slab_pool import NOBODY, SlabPool
from longshore.errors import CacheError, CapacityError

SMALL, LARGE = 0, 1
GEOMETRIES = ((12, (3, 4)), (12, (4, 12)), (10, (2, 5, 10)), (13, (4, 6)), (8, (8, 1)))


class Model(RuleBasedStateMachine):
    """Any calls; what is taken, and whose each slab is, must be as the model says."""

    @initialize(geometry=st.sampled_from(GEOMETRIES), slabs=st.integers(0, 6))
    def begin(self, geometry: tuple[int, tuple[int, ...]], slabs: int) -> None:
        self.slabs = Slabs(*geometry, slabs)
        self.pool = SlabPool(self.slabs)
        self.pools = len(self.slabs.images)
        self.owner: dict[int, int] = {}
        self.taken: dict[int, set[int]] = {}

    def room(self, pool: int) -> int:
        images = self.slabs.images[pool]
        own = sum(images - len(self.taken[slab]) for slab, owner in self.owner.items() if owner == pool)
        return own + images * (self.slabs.slabs - len(self.owner))

    def take(self, pool: int, index: int) -> None:
        slab = index // self.slabs.stride
        assert self.owner.setdefault(slab, pool) == pool, "a slab has one size"
        assert index not in self.taken.setdefault(slab, set())
        self.taken[slab].add(index)

    def give_back(self, index: int) -> None:
        slab = index // self.slabs.stride
        self.taken[slab].remove(index)
        if not self.taken[slab]:
            del self.taken[slab], self.owner[slab]

    @property
    def all_taken(self) -> list[int]:
        return sorted(index for slots in self.taken.values() for index in slots)

    @rule(data=st.data(), count=st.integers(-2, 9))
    def allocate(self, data: st.DataObject, count: int) -> None:
        pool = data.draw(st.integers(0, self.pools - 1))
        before = state_of(self.pool)
        room = self.room(pool)
        if 0 <= count <= room:
            spare = self.slabs.slabs - len(self.owner)
            given = self.pool.allocate(count, pool)
            assert len(given) == count
            for index in given:
                assert index in self.slabs.slots_of(index // self.slabs.stride, pool)
                self.take(pool, index)
            opened = spare - (self.slabs.slabs - len(self.owner))
            own = room - spare * self.slabs.images[pool]
            assert opened == max(0, -(-(count - own) // self.slabs.images[pool])), "its own slabs first"
        else:
            with pytest.raises(CapacityError if count > 0 else CacheError):
                self.pool.allocate(count, pool)
            assert state_of(self.pool) == before

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        index = data.draw(st.sampled_from(self.all_taken))
        self.pool.free(index)
        self.give_back(index)

    @rule(index=st.integers(-3, 80))
    def free_what_is_not_taken(self, index: int) -> None:
        if index not in self.all_taken:
            before = state_of(self.pool)
            with pytest.raises(CacheError):
                self.pool.free(index)
            assert state_of(self.pool) == before

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def free_together(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.all_taken), unique=True))
        filling = [index for index in chosen if self.pool.state[index] == FILLING]
        self.pool.move_all(filling, FILLING, READY)
        self.pool.free_all(chosen)
        for index in chosen:
            self.give_back(index)

    @rule(data=st.data())
    def claim(self, data: st.DataObject) -> None:
        wanted = data.draw(
            st.lists(st.tuples(st.integers(0, self.slabs.indices + 1), st.integers(0, self.pools)), max_size=4)
        )
        before = state_of(self.pool)
        slots, pools = [slot for slot, _ in wanted], [pool for _, pool in wanted]
        owners = dict(self.owner)
        good = len(set(slots)) == len(slots) and not set(slots) & set(self.all_taken)
        for slot, pool in wanted:
            slab, position = divmod(slot, self.slabs.stride)
            good = good and pool < self.pools and slot < self.slabs.indices and position < self.slabs.images[pool]
            good = good and owners.setdefault(slab, pool) == pool
        if good:
            self.pool.claim(slots, pools)
            for slot, pool in wanted:
                self.take(pool, slot)
        else:
            with pytest.raises(CacheError):
                self.pool.claim(slots, pools)
            assert state_of(self.pool) == before

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def use(self, data: st.DataObject) -> None:
        self.pool.record_use(data.draw(st.lists(st.sampled_from(self.all_taken), min_size=1)))

    @rule(data=st.data())
    def clear(self, data: st.DataObject) -> None:
        """What jobs touch drains, and keeps its slab."""
        taken = self.all_taken
        busy = data.draw(st.lists(st.sampled_from(taken), unique=True, max_size=3)) if taken else []
        busy = [index for index in busy if self.pool.state[index] == FILLING]
        for index in busy:
            self.pool.writer[index] = 1
        self.pool.clear()
        for index in set(taken) - set(busy):
            self.give_back(index)
        self.pool.check_integrity()
        for index in busy:
            assert self.pool.state[index] == DRAINING
            del self.pool.writer[index]
            self.pool.move(index, FREE)
            self.give_back(index)

    @rule(slabs=st.integers(-1, 8))
    def resize(self, slabs: int) -> None:
        before = state_of(self.pool)
        if slabs >= 0 and all(slab < slabs for slab in self.owner):
            self.pool.resize(slabs)
            self.slabs = self.pool.slabs
            assert self.slabs.slabs == slabs
        else:
            with pytest.raises(CacheError):
                self.pool.resize(slabs)
            assert state_of(self.pool) == before

    @invariant()
    def books_agree(self) -> None:
        pool = self.pool
        pool.check_integrity()
        assert [pool.room(each) for each in range(self.pools)] == [self.room(each) for each in range(self.pools)]
        assert pool.used == len(self.all_taken)
        assert {slab: owner for slab, owner in enumerate(pool.owner) if owner != NOBODY} == self.owner
        owners = [self.owner[index // self.slabs.stride] for index in self.all_taken]
        assert [pool.size_class_of(index) for index in self.all_taken] == owners
        assert pool.size_classes_of(np.array(self.all_taken, np.int32)).tolist() == owners
        sizes = self.slabs.image_bytes
        assert pool.used_bytes == sum(sizes[pool.size_class_of(index)] for index in self.all_taken) <= self.slabs.nbytes
        for each in range(self.pools):
            owned = [slab for slab, owner in self.owner.items() if owner == each]
            assert pool.used_by(each) == (len(owned), sum(len(self.taken[slab]) for slab in owned))
            others = {slab for slab, owner in self.owner.items() if owner != each}
            assert {slab for slab, _ in pool.slabs_of_others(each)} == others


Model.TestCase.settings = examples(60, stateful_step_count=40)
TestSlabPool = Model.TestCase


def test_a_slab_that_is_empty_goes_to_whoever_needs_one() -> None:
    pool = SlabPool(Slabs(12, (3, 12), 2))
    small = pool.allocate(5, SMALL)
    assert [index // 4 for index in small] == [0, 0, 0, 0, 1]
    with pytest.raises(CapacityError):
        pool.allocate(1, LARGE)
    pool.free(small[4])
    assert pool.allocate(1, LARGE) == [4]
    assert pool.room(SMALL) == 0


def test_least_recently_used_slab_is_named_first() -> None:
    pool = SlabPool(Slabs(12, (3, 12), 4))
    a, b = pool.allocate(4, SMALL), pool.allocate(4, SMALL)
    pool.allocate(1, LARGE)
    assert [slab for slab, _ in pool.slabs_of_others(LARGE)] == [0, 1]
    assert pool.last_use(SMALL) < pool.last_use(LARGE)
    pool.record_use(a[:1])
    assert [slab for slab, _ in pool.slabs_of_others(LARGE)] == [1, 0]
    pool.record_use([*a[1:], *b[:1]])
    assert [slab for slab, _ in pool.slabs_of_others(LARGE)] == [0, 1]
    assert pool.last_use(SMALL) > pool.last_use(LARGE)
    pool.free_all([])
    for index in (*a, *b):
        pool.free(index)
    assert pool.last_use(SMALL) == float("inf")


def test_slots_of_slabs_that_are_begun_can_be_claimed() -> None:
    pool = SlabPool(Slabs(12, (3, 4), 3))
    assert pool.allocate(5, SMALL) == [0, 1, 2, 3, 4]
    pool.claim([8, 7, 5], [LARGE, SMALL, SMALL])
    pool.check_integrity()
    assert pool.allocate(1, SMALL) == [6]
    assert (pool.room(SMALL), pool.room(LARGE), pool.used) == (0, 2, 9)


def test_too_many_sizes_are_refused() -> None:
    with pytest.raises(CacheError, match="fewer than 255 image sizes, got 255"):
        SlabPool(Slabs(255, tuple(range(1, 256)), 1))


def test_integrity_notices_a_slab_with_the_wrong_owner() -> None:
    pool = SlabPool(Slabs(12, (3, 4), 2))
    pool.allocate(2, SMALL)
    pool.owner[0] = LARGE
    with pytest.raises(CacheError, match="slab 0"):
        pool.check_integrity()


def test_integrity_notices_a_count_that_is_wrong() -> None:
    pool = SlabPool(Slabs(12, (3, 4), 2))
    pool.allocate(2, SMALL)
    pool._open[SMALL] += 1
    with pytest.raises(CacheError, match="size classes count"):
        pool.check_integrity()


@pytest.mark.parametrize(
    ("taken", "wanted", "lacking"),
    [
        ((), {0: 6}, (0, 0)),  # three of the small images in a slab, two of the large ones, and two slabs
        ((), {0: 7}, (0, 1)),
        ((), {1: 4}, (0, 0)),
        ((), {0: 3, 1: 2}, (0, 0)),
        ((), {0: 4, 1: 2}, (1, 2)),
        ((), {0: 3, 1: 3}, (1, 1)),
        ((0,), {0: 2, 1: 2}, (0, 0)),  # in the slab that has one, there is room for two more
        ((0,), {0: 3, 1: 1}, (1, 1)),
        ((0,), {0: 1, 1: 3}, (1, 1)),
        ((0, 1), {0: 2, 1: 1}, (0, 0)),
        ((0, 1), {0: 2, 1: 3}, (1, 2)),
        ((0, 0, 0, 1, 1), {1: 1}, (1, 1)),
    ],
)
def test_it_says_of_which_size_how_many_are_lacking_together(
    taken: tuple[int, ...], wanted: dict[int, int], lacking: tuple[int, int]
) -> None:
    pool = SlabPool(Slabs(6, (2, 3), 2))
    for size in taken:
        pool.allocate(1, size)
    assert pool.shortage(wanted) == lacking
    in_turn = [size for size, count in sorted(wanted.items()) for _ in range(count)]
    assert pool.leading(in_turn) == len(in_turn) - lacking[1]
