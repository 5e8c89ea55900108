"""Evictions of many copies at once from the only tier: the same go, in the same order, as one by one."""

from __future__ import annotations

import numpy as np
import pytest
from cache_setup import chunks, key, path_of

from longshore.boundary import HOST, Key, Status, TransferResult
from longshore.cache import TieredCache, TierSpec
from longshore.cache.eviction import LRU
from longshore.cache.index import Index
from longshore.cache.nodes import ROOT
from longshore.cache.pool import SlotPool
from longshore.errors import CacheError


def cache_of(slots: int) -> TieredCache:
    return TieredCache([TierSpec(HOST, slots, 1, LRU)])


def order(cache: TieredCache, keys: list[Key], first: int = 0) -> int:
    """Begin to store `keys[first:]`; returns the job."""
    job = cache.commit(keys, range(len(keys) - first), first=first).job
    assert job is not None
    return job


def arrive(cache: TieredCache, job: int, count: int = 1) -> None:
    cache.apply([TransferResult(job, (Status.OK,) * count)], 0.0)
    cache.check_integrity()


def store(cache: TieredCache, path: str, first: int = 0) -> None:
    arrive(cache, order(cache, chunks(path), first), len(path) - first)


def residents(cache: TieredCache) -> set[str]:
    return {path_of(each.key) for each in cache.residents()}


def test_places_of_a_path_that_went_can_be_taken_by_shorter_ones() -> None:
    cache = cache_of(4)
    store(cache, "abcd")
    store(cache, "wxyz")
    assert residents(cache) == {"w", "wx", "wxy", "wxyz"}
    for path in "pqrs":
        store(cache, path)
    assert residents(cache) == set("pqrs")
    store(cache, "abcd")
    assert residents(cache) == {"a", "ab", "abc", "abcd"}


def test_a_path_that_was_stored_piece_by_piece_goes_from_its_end() -> None:
    cache = cache_of(6)
    for first in (0, 2, 4):
        store(cache, "abcdef"[: first + 2], first)
    for path, left in (("p", "abcde"), ("q", "abcd"), ("rs", "ab"), ("tu", "")):
        store(cache, path)
        assert residents(cache) >= {"abcdef"[: i + 1] for i in range(len(left))}
        assert "abcdef"[: len(left) + 1] not in residents(cache)


def test_what_an_eviction_sets_free_goes_before_what_is_younger() -> None:
    cache = cache_of(4)
    store(cache, "a")
    behind = order(cache, chunks("ab"), 1)
    for path in "xyp":  # for `p` something must go: not `a`, which is held now, for what comes behind it
        store(cache, path)
    arrive(cache, behind)
    for path in "qr":
        store(cache, path)
    assert residents(cache) == {"a", "ab", "q", "r"}
    store(cache, "st")
    assert residents(cache) == {"q", "r", "s", "st"}


def test_a_known_chunk_behind_another_one_than_its_own_is_refused() -> None:
    cache = cache_of(4)
    store(cache, "ab")
    store(cache, "c")
    with pytest.raises(CacheError, match="does not follow"):
        cache.commit([key("c"), key("ab")], [0], first=1)
    cache.check_integrity()


def test_a_number_that_comes_free_has_no_children_left() -> None:
    pool = SlotPool(2)
    index = Index([pool])
    keys = chunks("ab")
    nodes = index.extend(ROOT, keys, 0, pool.allocate(2))
    assert index.drop_leaves(np.array(nodes[::-1], np.int32), keys[::-1]) == [ROOT]
    for slot, path in enumerate("xy"):
        (node,) = index.extend(ROOT, chunks(path), 0, [slot])
        assert index.reach[0][node] == 0
    index.check_integrity()
