"""Columns: a stack that never moves gives what a list would."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from longshore.cache.columns import FreeList


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
