"""Least recently used first."""

import pytest

from longshore.cache.eviction import LRU
from longshore.errors import CacheError

A, B, C = (bytes([i]) * 32 for i in range(3))


@pytest.fixture
def lru() -> LRU:
    policy = LRU()
    for key in (A, B, C):
        policy.insert(key)
    return policy


def test_the_oldest_goes_first(lru: LRU) -> None:
    assert list(lru.candidates()) == [A, B, C]


def test_use_makes_young(lru: LRU) -> None:
    lru.touch(A)
    assert list(lru.candidates()) == [B, C, A]
    lru.touch(A)
    assert list(lru.candidates()) == [B, C, A]


def test_what_has_left_is_no_candidate(lru: LRU) -> None:
    lru.remove(B)
    assert list(lru.candidates()) == [A, C]
    assert len(lru) == 2


def test_a_key_comes_in_once(lru: LRU) -> None:
    with pytest.raises(CacheError, match="already in the policy"):
        lru.insert(B)
    assert list(lru.candidates()) == [A, B, C]


@pytest.mark.parametrize("verb", ["touch", "remove"])
def test_an_unknown_key_is_an_error(lru: LRU, verb: str) -> None:
    lru.remove(B)
    with pytest.raises(CacheError, match="is not in the policy"):
        getattr(lru, verb)(B)
    assert list(lru.candidates()) == [A, C]
