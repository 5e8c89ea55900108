"""Chunks that a host has found by itself: kept, and lent to be read by others."""

from __future__ import annotations

import hashlib

import pytest

from longshore.boundary import Key, Status, TransferResult
from longshore.cache import CacheGroup, CacheSettings, Presence, TieredCache, TierSpec
from longshore.errors import CacheError, HoldError, JobError

ALONE = CacheSettings(groups=(CacheGroup(block_size=4, window=1 << 40), CacheGroup(block_size=4)))


def keys_of(*names: str) -> list[Key]:
    return [hashlib.sha256(name.encode()).digest() for name in names]


def cache_of(slots: int) -> TieredCache:
    return TieredCache([TierSpec("host", slots, 4096)], ALONE)


def store(cache: TieredCache, keys: list[Key]) -> int:
    """Offer `keys`, and report them as stored; says how many were taken."""
    offload = cache.offer(keys)
    if offload.job is None:
        return 0
    cache.apply([TransferResult(offload.job, (Status.OK,) * len(offload.slots))], 0.0)
    return len(offload.slots)


def test_what_is_lent_stays_until_it_is_reported() -> None:
    cache, (a, b, c, d) = cache_of(2), keys_of("a", "b", "c", "d")
    assert store(cache, [a, b]) == 2
    loan = cache.lend([a, b])
    assert [slot.tier for slot in loan.slots] == ["host", "host"]
    assert store(cache, [c]) == 0
    cache.check_integrity()
    cache.apply([TransferResult(loan.job, (Status.OK, Status.OK))], 1.0)
    assert store(cache, [c, d]) == 2
    assert [cache.peek(key) for key in (a, b, c, d)] == [Presence.ABSENT] * 2 + [Presence.READY] * 2
    cache.end_step()
    cache.check_integrity()


def test_a_loan_is_a_use() -> None:
    cache, (a, b, c) = cache_of(2), keys_of("a", "b", "c")
    store(cache, [a])
    store(cache, [b])
    cache.apply([TransferResult(cache.lend([a]).job, (Status.OK,))], 1.0)
    assert store(cache, [c]) == 1
    assert cache.peek(a) is Presence.READY and cache.peek(b) is Presence.ABSENT
    assert cache.counters.hits["host"] == 1


def test_a_loan_outlives_a_reset() -> None:
    cache, (a, b) = cache_of(1), keys_of("a", "b")
    store(cache, [a])
    loan = cache.lend([a])
    cache.reset()
    assert cache.peek(a) is Presence.ABSENT
    assert store(cache, [b]) == 0  # the slot is still being read
    cache.apply([TransferResult(loan.job, (Status.OK,))], 1.0)
    assert store(cache, [b]) == 1
    cache.check_integrity()


def test_what_is_given_back_unread_is_there_as_before() -> None:
    cache, (a,) = cache_of(1), keys_of("a")
    store(cache, [a])
    loan = cache.lend([a])
    cache.withdraw(loan.job)
    with pytest.raises(JobError):
        cache.withdraw(loan.job)
    assert cache.peek(a) is Presence.READY


def test_what_is_kept_is_not_evicted() -> None:
    cache, (a, b) = cache_of(1), keys_of("a", "b")
    store(cache, [a])
    hold = cache.keep([a])
    assert store(cache, [b]) == 0
    cache.release(hold)
    assert store(cache, [b]) == 1


@pytest.mark.parametrize("verb", ["keep", "lend"])
def test_what_cannot_be_read_is_refused_and_nothing_has_changed(verb: str) -> None:
    cache, (a, b, c) = cache_of(2), keys_of("a", "b", "c")
    store(cache, [a])
    cache.offer([b])
    for keys in ([], [a, a], [a, b], [a, c]):
        with pytest.raises(CacheError):
            getattr(cache, verb)(keys)
    with pytest.raises(CacheError):
        getattr(cache, verb)([a], group=1)
    assert cache.held == 0
    cache.check_integrity()


def test_what_is_kept_alone_is_not_onboarded_as_a_path() -> None:
    cache, keys = cache_of(2), keys_of("a", "b")
    store(cache, keys)
    hold = cache.keep(keys)
    with pytest.raises(HoldError, match="stand alone"):
        cache.onboard(hold, [0, 1])
    assert (cache.take(), cache.counters.misses.total()) == ([], 0)
    cache.release(hold)


def test_nothing_is_offered_or_lent_to_a_device_that_sleeps() -> None:
    cache, keys = cache_of(2), keys_of("a", "b")
    store(cache, keys[:1])
    assert cache.sleep()
    with pytest.raises(CacheError, match="given up"):
        cache.offer(keys[1:])
    with pytest.raises(CacheError, match="given up"):
        cache.lend(keys[:1])
    assert cache.sleep()
    cache.wake()
    assert cache.lend(keys[:1]).slots
