"""Belady's bound, against every choice that could be made."""

from __future__ import annotations

import tracemalloc
from functools import cache
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_kit import prompts

from depth import examples
from longshore.trace.analysis import Paths, next_references, optimal_hits


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


@examples(150)
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


@examples(50)
@given(blocks=st.lists(st.integers(0, 5), max_size=20), at_once=st.integers(1, 21))
def test_next_references_are_found_some_at_a_time(blocks: list[int], at_once: int) -> None:
    following = [next((j for j in range(i + 1, len(blocks)) if blocks[j] == blocks[i]), -1) for i in range(len(blocks))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("longshore.trace.analysis._BATCH_BLOCKS", at_once)
        assert next_references(np.array(blocks, np.int32)).tolist() == following


def test_always_hit_trace_takes_nine_bytes_a_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longshore.trace.analysis._BATCH_BLOCKS", 1 << 13)
    paths = Paths(range(16 * (i % 40), 16 * (i % 40) + 16) for i in range(6_000))
    assert (paths.references, paths.unique) == (96_000, 640)
    tracemalloc.start()
    hits = optimal_hits(paths, 400)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert hits > paths.references // 2
    assert peak < 5 * paths.references + (1 << 19)  # 4 of the 9 bytes are the paths' own
