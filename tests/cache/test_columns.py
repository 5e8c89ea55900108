"""Columns: a stack that never moves, links that are followed in runs, and duplicates, as plain lists have them."""

from __future__ import annotations

from array import array
from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore.cache.columns import FEW, FreeList, as_i32, filled, follow, has_duplicates


@given(st.lists(st.integers(-5, 5)), st.lists(st.one_of(st.integers(0, 4), st.lists(st.integers(-5, 5), max_size=4))))
def test_a_stack_gives_what_a_list_would(first: list[int], steps: list[int | list[int]]) -> None:
    stack, plain = FreeList(array("i", first)), list(first)
    for step in steps:
        if isinstance(step, list):
            stack.give(array("i", step))
            plain += step
        elif step <= len(plain):
            assert stack.take(step).tolist() == plain[len(plain) - step :]
            del plain[len(plain) - step :]
        assert (len(stack), list(stack)) == (len(plain), plain)


RUNS = st.lists(st.one_of(st.integers(1, 4), st.integers(100, 700)), min_size=1, max_size=12)


@pytest.mark.parametrize("step", [-1, 1])
@pytest.mark.parametrize("end", [0, 7])
@given(RUNS, st.integers(0, 4_000), st.randoms(use_true_random=False))
def test_links_are_followed_as_one_by_one(step: int, end: int, runs: list[int], most: int, dice: object) -> None:
    ends = list(accumulate(runs, initial=end + 1))
    pieces = [list(range(first, last))[::step] for first, last in pairwise(ends)]
    dice.shuffle(pieces)  # type: ignore[attr-defined]
    order = [number for piece in pieces for number in piece]
    links = filled(ends[-1])
    for number, following in zip(order, [*order[1:], end], strict=True):
        links[number] = following
    assert follow(links, order[0], end, most).tolist() == order[:most]
    assert follow(links, end, end, most).tolist() == []


def test_links_that_form_a_cycle_are_followed_to_the_limit() -> None:
    links = filled(2_000)
    for number in range(1, 2_000):
        links[number] = number - 1 or 1_999
    assert len(follow(links, 1_999, 0, 5_000)) == 5_000


@given(
    st.lists(st.integers(0, 3 * FEW), max_size=3 * FEW),
    st.sampled_from([list, sorted, lambda all_: sorted(all_)[::-1]]),
)
def test_duplicates_are_found_in_any_order(numbers: list[int], ordered: object) -> None:
    for some in (numbers, list(dict.fromkeys(numbers))):
        listed = ordered(some)  # type: ignore[operator]
        assert has_duplicates(as_i32(listed)) == (len(set(listed)) < len(listed))
        assert has_duplicates(np.array(listed, np.int64)) == (len(set(listed)) < len(listed))


@pytest.mark.parametrize(
    "numbers", [[*range(60), 30], [*range(60, 0, -1), 30], [*range(60), 59], [*range(60, 0, -1), 1]]
)
def test_one_duplicate_is_found_in_what_is_nearly_sorted(numbers: list[int]) -> None:
    assert has_duplicates(as_i32(numbers))
