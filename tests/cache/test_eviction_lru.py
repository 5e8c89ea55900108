"""Least recently used first; what every policy must do stands in `test_eviction_policies`."""

import numpy as np
import pytest

from longshore.cache.columns import LISTS
from longshore.cache.eviction import LRU

A, B, C = range(LISTS, LISTS + 3)


@pytest.fixture
def lru() -> LRU:
    policy = LRU(3, np.empty(LISTS + 3, object))
    policy.grow(LISTS + 3)
    policy.insert([A, B, C])
    return policy


def test_the_oldest_goes_first(lru: LRU) -> None:
    assert list(lru.order()) == [A, B, C]


def test_use_makes_young(lru: LRU) -> None:
    lru.touch([A])
    assert list(lru.order()) == [B, C, A]
    lru.touch([A])
    assert list(lru.order()) == [B, C, A]


def test_what_was_held_comes_back_as_the_oldest_or_by_use_as_the_youngest(lru: LRU) -> None:
    lru.hold(B)
    assert list(lru.order()) == [A, C]
    lru.release([B])
    assert list(lru.order()) == [B, A, C]
    lru.hold(A)
    lru.touch([A])
    assert list(lru.order()) == [B, C, A]
