"""Slots: every operation is all or nothing, and no id is trusted."""

import re
from collections.abc import Callable

import numpy as np
import pytest
from object_state import state_of

from longshore.boundary import Status
from longshore.cache.pool import DRAINING, FILLING, FREE, READY, SlotPool
from longshore.errors import CacheError, CapacityError


def test_the_lowest_slots_go_first() -> None:
    pool = SlotPool(4)
    assert pool.allocate(2) == [0, 1]
    assert pool.allocate(2) == [2, 3]
    assert (pool.room(), pool.used) == (0, 4)


def test_what_came_back_last_goes_out_first() -> None:
    pool = SlotPool(3)
    pool.allocate(3)
    pool.free(1)
    pool.free(0)
    assert pool.allocate(1) == [0]
    assert pool.allocate(1) == [1]


@pytest.mark.parametrize("count", [-1, -3])
def test_a_negative_count_is_refused(count: int) -> None:
    pool = SlotPool(3)
    with pytest.raises(CacheError, match=f"cannot allocate {count} slots"):
        pool.allocate(count)
    assert pool.room() == 3


def test_more_than_there_is_changes_nothing() -> None:
    pool = SlotPool(3)
    pool.allocate(2)
    with pytest.raises(CapacityError, match="cannot allocate 2 slots: 1 of 3 are free"):
        pool.allocate(2)
    assert pool.allocate(1) == [2]


@pytest.mark.parametrize("index", [-1, 3, 2])
def test_a_slot_that_is_not_taken_cannot_be_freed(index: int) -> None:
    pool = SlotPool(3)
    pool.allocate(2)
    with pytest.raises(CacheError, match=f"slot {index} of 3 is not in use"):
        pool.free(index)
    assert pool.room() == 1
    pool.check_integrity()


def test_a_double_free_is_refused() -> None:
    pool = SlotPool(3)
    pool.allocate(3)
    pool.free(1)
    with pytest.raises(CacheError, match="slot 1 of 3 is not in use"):
        pool.free(1)
    assert pool.allocate(1) == [1]


def test_claimed_slots_are_taken_and_the_others_are_not() -> None:
    pool = SlotPool(5)
    pool.claim([3, 0], [0, 0])
    assert pool.allocate(3) == [1, 2, 4]
    pool.check_integrity()


@pytest.mark.parametrize(("indices", "named"), [([1, 4], "[4]"), ([-1], "[-1]"), ([2, 2], "[2, 2]"), ([2, 0], "[0]")])
def test_claiming_what_is_taken_or_does_not_exist_changes_nothing(indices: list[int], named: str) -> None:
    pool = SlotPool(4)
    pool.claim([0], [0])
    before = state_of(pool)
    with pytest.raises(CacheError, match=re.escape(f"expected free, distinct slots below 4, got {named}")):
        pool.claim(indices, [0] * len(indices))
    assert state_of(pool) == before


def test_a_pool_may_be_empty_but_not_less() -> None:
    assert SlotPool(0).allocate(0) == []
    with pytest.raises(CacheError, match="zero or more slots, got -1"):
        SlotPool(-1)


def test_integrity_notices_a_slot_that_is_free_and_taken() -> None:
    pool = SlotPool(2)
    pool.allocate(2)
    pool.free(0)
    pool.state[0] = READY
    with pytest.raises(CacheError, match="free list: counted 1 slots, found 0 free"):
        pool.check_integrity()


def test_slots_change_their_state_together_or_not_at_all() -> None:
    pool = SlotPool(3)
    pool.allocate(2)
    with pytest.raises(CacheError, match="slot 2 is free, not filling"):
        pool.move_all([0, 1, 2], FILLING, READY)
    assert pool.state[0] == pool.state[1] == FILLING


def test_a_pool_has_no_fewer_slots_than_none() -> None:
    pool = SlotPool(3)
    with pytest.raises(CacheError, match="got -1"):
        pool.resize(-1)
    assert pool.capacity == 3


def test_slots_that_are_freed_together_are_nobodys_and_without_fault() -> None:
    pool = SlotPool(3)
    taken = pool.allocate(2)
    pool.move_all(taken, FILLING, READY)
    pool.node[0], pool.invalid[1] = 7, Status.CORRUPT
    pool.free_all(taken)
    assert pool.node[0] == 0
    assert not pool.invalid
    pool.check_integrity()


def test_one_image_size_means_one_pool_to_claim_from() -> None:
    pool = SlotPool(4)
    with pytest.raises(CacheError, match=r"expected size class 0, as all images have one size; got \[0 1\]"):
        pool.claim([2, 3], [0, 1])
    assert pool.room() == 4
    pool.check_integrity()


def test_a_slot_that_is_gone_is_not_told_of() -> None:
    pool = SlotPool(4)
    pool.freed = []
    pool.claim([1, 3], [0, 0])
    pool.free(3)
    pool.free(1)
    pool.resize(3)
    assert pool.take_freed() == (1,)


def test_slots_that_nobody_asks_for_are_not_written_down() -> None:
    pool = SlotPool(2)
    pool.free(pool.allocate(1)[0])
    assert pool.take_freed() == ()
    assert pool.freed is None


def _is_read(pool: SlotPool) -> None:
    pool.readers[1] = 1


def _is_written(pool: SlotPool) -> None:
    pool.writer[1] = 5


def _is_bad(pool: SlotPool) -> None:
    pool.invalid[1] = Status.CORRUPT


def _is_owned(pool: SlotPool) -> None:
    pool.node[1] = 3


def _stays_as_it_is(pool: SlotPool) -> None:
    """Whose state alone is wrong."""


@pytest.mark.parametrize(
    ("state", "spoil"),
    [
        (FREE, _is_read),
        (FREE, _is_written),
        (FREE, _is_bad),
        (FREE, _is_owned),
        (READY, _is_written),
        (DRAINING, _stays_as_it_is),
    ],
)
def test_marks_that_do_not_fit_a_slots_state_are_found(state: int, spoil: Callable[[SlotPool], None]) -> None:
    pool = SlotPool(3)
    if state != FREE:
        pool.claim([1], [0])
        pool.state[1] = state
    spoil(pool)
    with pytest.raises(CacheError, match="slot 1 is"):
        pool.check_integrity()


@pytest.mark.parametrize(("state", "spoil"), [(DRAINING, _is_read), (DRAINING, _is_written), (FILLING, _is_written)])
def test_a_slot_is_drained_while_a_job_touches_it(state: int, spoil: Callable[[SlotPool], None]) -> None:
    pool = SlotPool(3)
    pool.claim([1], [0])
    pool.state[1] = state
    spoil(pool)
    pool.check_integrity()


def test_clear_keeps_faults_only_of_slots_that_jobs_touch() -> None:
    """A reset may come between the read that found bad bytes and the end of the step, when the copy is lost."""
    pool = SlotPool(3)
    pool.allocate(3)
    for slot in range(3):
        pool.move(slot, READY)
        pool.invalid[slot] = Status.CORRUPT
    pool.readers[1] = 1
    pool.clear()
    assert pool.invalid == {1: Status.CORRUPT}
    pool.check_integrity()


def test_freed_slot_belongs_to_no_node_and_is_told() -> None:
    pool = SlotPool(4)
    pool.freed = []
    for index in pool.allocate(3):
        pool.move(index, READY)
        pool.node[index] = 7
    pool.move(0, FREE)
    assert pool.node[0] == 0
    pool.free_all([1, 2])
    assert pool.take_freed() == (0, 1, 2)


def test_age_is_that_of_what_this_process_has_written() -> None:
    pool = SlotPool(4)
    (slot,) = pool.allocate(1)
    pool.mark_written(np.array([slot], np.int32), 100.0)
    age = pool.age(slot, 103.0)
    assert age is not None
    assert 3.0 <= age < 5.0
    pool.free(slot)
    pool.claim([slot], [0])
    assert pool.age(slot, 103.0) is None, "it was recovered"
