"""Numbers of requests: eviction's clock advances once per request, and what one uses several times was used once."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from cache_kit import lookup, residency, store
from group_kit import settle

from longshore.boundary import Key, Status, TransferResult
from longshore.cache import (
    CacheGroup,
    CacheSettings,
    GroupKeys,
    Protection,
    ReuseHint,
    TieredCache,
    TierSpec,
    WritePolicy,
)
from longshore.cache.eviction_policies.hit_rates import ENDS, HINT, USES
from longshore.errors import CacheError


def keys_of(*names: str) -> list[Key]:
    return [hashlib.sha256(name.encode()).digest() for name in names]


def cache_of(*tiers: str, **settings: Any) -> TieredCache:
    return TieredCache([TierSpec(name, 8, 4096) for name in tiers or ("host",)], CacheSettings(**settings))


def alone() -> TieredCache:
    return cache_of(groups=(CacheGroup(block_size=4, window=1 << 40),))


def deliver(cache: TieredCache, *jobs: int | None) -> None:
    """What was ordered has arrived, and `jobs` of one chunk each."""
    cache.apply_results([TransferResult(job, (Status.OK,)) for job in jobs if job is not None], 0.0)
    settle(cache)


def uses(cache: TieredCache, key: Key, tier: int = 0) -> int:
    """How often the default policy of a tier counts `key` as used; 0 for the end of a prompt, not used since."""
    policy: Any = cache._state.policies[tier]
    return ((policy._state[cache._state.index.get(key)] & USES) >> 3) - 1


def look(cache: TieredCache, keys: Sequence[Key], request_number: int | None = None) -> int | None:
    """Each of `keys` is looked at by itself; the number of the request."""
    return cache.lookup(
        {0: GroupKeys(keys)}, 0.0, protect=Protection.STEP, independent=True, request_number=request_number
    ).request_number


def ticks(cache: TieredCache) -> int:
    """Requests that the default policy has been told of."""
    policy: Any = cache._state.policies[0]
    return int(policy._now)


def test_match_onboard_release_commit_of_a_request_is_one_use() -> None:
    cache, keys = cache_of(), keys_of("a", "b")
    store(cache, keys, (0, 1), request_number=lookup(cache, keys, 0.0).request_number)
    deliver(cache)
    before = [uses(cache, key) for key in keys]
    found = lookup(cache, keys, 1.0)
    cache.load(found.lease, {0: (2, 3)})
    deliver(cache)
    store(cache, keys, (2, 3), request_number=found.request_number)
    cache.release(found.lease)
    again = lookup(cache, keys, 2.0, request_number=found.request_number)  # as an engine does whose request waits
    assert again.lease is not None and again.request_number == found.request_number
    cache.release(again.lease)
    store(cache, keys, (2, 3), request_number=found.request_number)
    assert [uses(cache, key) for key in keys] == [before[0] + 1, before[1] + 2]  # the end of a prompt was no use
    assert ticks(cache) == 2
    cache.check_integrity()


def test_requests_that_run_at_the_same_time_count_once_each() -> None:
    cache, keys = cache_of(), keys_of("a", "b")
    store(cache, keys, (0, 1), request_number=lookup(cache, keys, 0.0).request_number)
    deliver(cache)
    found = [lookup(cache, keys, 1.0) for _ in range(3)]
    for each in found:
        cache.release(each.lease)
    for each in found:
        store(cache, keys, (2, 3), request_number=each.request_number)
    assert uses(cache, keys[0]) == 4
    assert ticks(cache) == 4


def test_what_arrives_for_a_request_has_its_age() -> None:
    cache, (a, b) = cache_of(), keys_of("a", "b")
    request_number = lookup(cache, [a], 0.0).request_number
    store(cache, [a], (0,), request_number=request_number)
    lookup(cache, [b], 0.0)
    deliver(cache)
    policy: Any = cache._state.policies[0]
    assert policy._used[cache._state.index.get(a)] == request_number == 1
    store(cache, [a], (0,), request_number=request_number)
    assert uses(cache, a) == 0


def test_request_asked_key_by_key_counts_its_uses_once() -> None:
    cache, keys = alone(), keys_of("a")
    request_number = look(cache, keys)
    deliver(cache, store(cache, keys, request_number=request_number).job)
    second = look(cache, residency(cache, keys))
    for _ in range(3):
        assert look(cache, keys, second) == second
        cache.end_step()
    cache.release(cache.lookup({0: GroupKeys(keys)}, 0.0, independent=True, request_number=second).lease)
    deliver(cache, cache.load({0: GroupKeys(keys)}, request_number=second).jobs[0].job)
    store(cache, keys, request_number=second)
    store(cache, keys, request_number=second)
    assert uses(cache, keys[0]) == 2
    assert ticks(cache) == 2
    cache.check_integrity()


def test_a_tier_below_counts_a_request_once_too() -> None:
    cache, keys = cache_of("host", "file", backup=WritePolicy.THROUGH), keys_of("a", "b")
    store(cache, keys, (0, 1), request_number=lookup(cache, keys, 0.0).request_number)
    deliver(cache)
    found = lookup(cache, keys, 1.0)
    store(cache, keys, (0, 1), request_number=found.request_number)
    cache.release(found.lease)
    assert [uses(cache, keys[0], tier) for tier in (0, 1)] == [2, 2]


def test_turns_go_on_after_a_reset() -> None:
    cache, keys = cache_of(), keys_of("a", "b")
    first = lookup(cache, keys, 0.0).request_number
    cache.reset()
    store(cache, keys, (0, 1), request_number=first)  # by a request from before
    deliver(cache)
    assert lookup(cache, keys, 1.0).request_number == first + 1
    cache.check_integrity()


@pytest.mark.parametrize("request_number", [0, -1, 2, 10**9])
def test_a_turn_that_was_not_drawn_is_refused(request_number: int) -> None:
    cache, keys = alone(), keys_of("a")
    deliver(cache, store(cache, keys, request_number=look(cache, keys)).job)
    paths = {0: GroupKeys(keys)}
    for call in (cache.store, cache.load, partial(cache.lookup, now=0.0, independent=True)):
        with pytest.raises(CacheError, match="request_number: expected 1 to"):
            call(paths, request_number=request_number)  # type: ignore[operator]


def test_each_request_has_its_own_hint_however_they_take_turns() -> None:
    cache, one, other = cache_of("host", "file"), keys_of("a", "b"), keys_of("c", "d")
    over = cache.lookup({0: GroupKeys(one)}, 0.0, reuse_hint=ReuseHint(ends=True)).request_number
    plain = cache.lookup({0: GroupKeys(other)}, 1.0).request_number
    cache.store({0: GroupKeys(one)}, {0: (0, 1)}, request_number=over)
    cache.store({0: GroupKeys(other)}, {0: (2, 3)}, request_number=plain)
    deliver(cache)
    policy: Any = cache._state.policies[0]
    hints = [policy._state[cache._state.index.get(key)] >> HINT & 15 for key in (*one, *other)]
    assert hints == [ENDS, ENDS, 0, 0]


def test_a_tier_counts_uses_of_what_only_host_memory_has() -> None:
    """A copy that comes later is used as often, and as long ago, as the chunk was in host memory."""
    cache, keys = cache_of("host", "file", backup=WritePolicy.BACK), keys_of("a", "b")
    for now in range(5):
        found = cache.lookup({0: GroupKeys(keys)}, float(now))
        if found.lease is None:
            cache.store({0: GroupKeys(keys)}, {0: (0, 1)}, request_number=found.request_number)
        else:
            cache.release(found.lease)
        deliver(cache)
    others = keys_of("c", "d")
    cache.lookup({0: GroupKeys(others)}, 9.0)
    cache.back_up_all()
    deliver(cache)
    below: Any = cache._state.policies[1]
    nodes = [cache._state.index.get(key) for key in keys]
    assert [uses(cache, key, 1) for key in keys] == [uses(cache, key) for key in keys] == [5, 5]
    assert [below._used[node] for node in nodes] == [5, 5]
