"""Belady's bound, against every choice that could be made."""

from __future__ import annotations

from functools import cache
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_kit import prompts

from longshore.trace.optimum import optimal_hits
from longshore.trace.paths import Paths


def best_of_all(paths: list[list[int]], slots: int) -> int:
    """The most hits over every choice of what to keep after each request."""

    @cache
    def best(at: int, kept: frozenset[int]) -> int:
        if at == len(paths):
            return 0
        gone = [i for i, block in enumerate(paths[at]) if block not in kept]
        hits = gone[0] if gone else len(paths[at])
        there = kept.union(paths[at])
        choices = combinations(sorted(there), min(slots, len(there)))
        return hits + max(best(at + 1, frozenset(choice)) for choice in choices)

    return best(0, frozenset())


@settings(max_examples=150, deadline=None)
@given(paths=prompts(blocks=7, requests=7), slots=st.integers(1, 4))
def test_nothing_that_could_be_kept_would_hit_more(paths: list[list[int]], slots: int) -> None:
    assert optimal_hits(Paths(paths), slots) == best_of_all(paths, slots)


def test_tails_go_before_the_heads_that_they_need() -> None:
    paths = [[1, 2, 3], [4, 5], [1, 2, 3]]
    assert [optimal_hits(Paths(paths), slots) for slots in (1, 2, 3)] == [1, 2, 3]


def test_what_comes_back_sooner_is_kept() -> None:
    assert optimal_hits(Paths([[1], [2], [2], [1], [2]]), 1) == best_of_all([[1], [2], [2], [1], [2]], 1) == 2
    assert optimal_hits(Paths([[1], [2], [2], [1], [2]]), 2) == 3


@pytest.mark.parametrize("paths", [[], [[]], [[], [1], [], [1]]])
def test_traces_with_little_in_them(paths: list[list[int]]) -> None:
    assert optimal_hits(Paths(paths), 1) == best_of_all(paths, 1)


def test_paths_are_numbered_as_they_first_appear() -> None:
    paths = Paths([[2**63, 7], [], [2**63, 9]])
    assert (list(paths), paths[2], paths[-1], len(paths), paths.unique) == ([[0, 1], [], [0, 2]], [0, 2], [0, 2], 3, 3)
    with pytest.raises(IndexError):
        paths[3]
