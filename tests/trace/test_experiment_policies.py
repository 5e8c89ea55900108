"""The policies to compare with keep the contract of the cache's own, as far as it says nothing about their order."""

from __future__ import annotations

import numpy as np
import pytest

from longshore.cache.columns import LISTS
from longshore.cache.eviction_policies import EvictionPolicy
from longshore.errors import CacheError
from longshore.trace.experiment import REFERENCES

SLOTS = 8
NODES = range(LISTS, LISTS + 12)
A, B, C, D = NODES[:4]


def make(name: str) -> EvictionPolicy:
    names = np.array([i.to_bytes(8, "big") for i in range(LISTS + 64)], object)
    policy = REFERENCES[name](SLOTS, names)
    policy.grow(LISTS + 64)
    return policy


@pytest.fixture(params=sorted(REFERENCES))
def policy(request: pytest.FixtureRequest) -> EvictionPolicy:
    policy = make(request.param)
    policy.insert([A, B, C])
    return policy


def test_without_use_the_oldest_go_first(policy: EvictionPolicy) -> None:
    gone = []
    while node := policy.victim():
        assert policy.victim() == node
        policy.remove(node, evicted=policy.keys[node])
        gone.append(node)
    assert gone == [A, B, C]
    assert policy.next_victims(1) == []


def test_released_goes_first_and_kept_does_not_go(policy: EvictionPolicy) -> None:
    assert policy.next_victims(1) == [A]
    policy.hold_victims([A])
    assert policy.is_held(A)
    assert policy.victim() == B
    policy.hold(C)
    policy.release([C, A])
    for node in (A, C, B):
        assert policy.victim() == node
        policy.remove_victims([node], [policy.keys[node]])
        policy.check_integrity()
    assert len(policy) == 0


def test_use_ends_a_hold_of_the_policy(policy: EvictionPolicy) -> None:
    policy.hold(A)
    policy.touch([A])
    assert not policy.is_held(A)
    assert A in set(policy.order())


def test_what_is_not_in_is_an_error(policy: EvictionPolicy) -> None:
    for call in (policy.touch, policy.release):
        with pytest.raises(CacheError, match="is not in the policy"):
            call([D])
    for single in (policy.hold, policy.remove):
        with pytest.raises(CacheError, match="is not in the policy"):
            single(D)
    for nodes in ([A], [D, D], [1]):
        with pytest.raises(CacheError, match="already in the policy"):
            policy.insert(nodes)
