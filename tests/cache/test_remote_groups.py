"""Requests over several KV cache groups, of which a remote tier has a part."""

from __future__ import annotations

import pytest
from cache_kit import IMAGE_BYTES
from group_kit import FULL, WINDOW, end, keys_of, orders, store, wanted
from object_state import state_of

from longshore.boundary import HOST, Probe, ProbeResult
from longshore.cache import CacheSettings, MissReason, TieredCache, TierSpec
from longshore.cache.eviction import LRU
from longshore.errors import CacheError

STORE = "store"
FULLS, WINDOWS = keys_of(0, 4), keys_of(1, 8)
BOTH = wanted(FULLS, WINDOWS)
"""A prompt of 16 tokens: four chunks of full attention, and eight of a window that sees the last five tokens."""


def answered(cache: TieredCache, there: list[bytes]) -> None:
    """The store says that it has `there`, and nothing else."""
    for command in cache.take():
        if isinstance(command, Probe):
            cache.apply([ProbeResult(command.probe, tuple(each in there for each in command.keys))], 0.0)


def remote(slots: int = 64) -> TieredCache:
    return TieredCache([TierSpec(HOST, slots, IMAGE_BYTES, LRU)], CacheSettings(groups=(FULL, WINDOW)), remote=[STORE])


def test_missing_chunks_are_probed_and_longest_common_prefix_fetched() -> None:
    cache = remote()
    store(cache, 0, FULLS[:1])
    store(cache, 1, WINDOWS[:2])
    found = cache.lookup(BOTH, 0.0)
    assert (found.tokens, found.remote, len(found.probes)) == (4, 0, 2)
    answered(cache, [*FULLS[:3], *WINDOWS[:6]])  # 12 tokens of each
    found = cache.lookup(BOTH, 0.0)
    assert (found.tokens, found.remote, found.probes) == (4, 8, ())
    jobs = cache.prefetch(BOTH, 0.0)
    transfers = [each for each in orders(cache) if each.route.source == STORE]
    assert [each.job for each in transfers] == list(jobs)
    # The twelfth token's window begins with token 7, in chunk 3.
    assert [item.key for each in transfers for item in each.items] == [*FULLS[1:3], *WINDOWS[3:6]]
    end(cache, transfers)
    assert cache.lookup(BOTH, 0.0).tokens == 12
    cache.check_integrity()


def test_chunk_only_in_the_store_has_its_own_reason() -> None:
    cache = remote()
    cache.lookup(BOTH, 0.0)
    answered(cache, [FULLS[0], WINDOWS[7]])
    before = cache.counters.misses.copy()
    cache.lookup(BOTH, 0.0)
    new = cache.counters.misses - before
    assert new == {MissReason.REMOTE: 2, MissReason.ABSENT: 3 + 2}  # three chunks lie in the last window


def test_a_window_that_the_store_lacks_keeps_the_prefix_short() -> None:
    cache = remote()
    cache.lookup(BOTH, 0.0)
    answered(cache, [*FULLS, *WINDOWS[:4]])
    assert cache.lookup(BOTH, 0.0).remote == 8
    cache.prefetch(BOTH, 0.0)
    transfers = orders(cache)
    assert [item.key for each in transfers for item in each.items] == [*FULLS[:2], *WINDOWS[1:4]]


def test_fetch_takes_no_room_that_its_own_prefix_needs() -> None:
    cache = remote(slots=6)
    store(cache, 1, WINDOWS[:6], first=3)  # what is needed after 12 tokens
    store(cache, 0, keys_of(0, 3, "new"))  # and what was used later
    cache.lookup(BOTH, 0.0)
    answered(cache, FULLS[:3])
    cache.prefetch(BOTH, 0.0)
    transfers = [each for each in orders(cache) if each.route.source == STORE]
    assert [item.key for each in transfers for item in each.items] == FULLS[:3]
    end(cache, transfers)
    assert cache.lookup(BOTH, 0.0).tokens == 12


def test_misplaced_keys_for_remote_probe_are_refused_with_nothing_changed() -> None:
    cache = TieredCache([TierSpec(HOST, 64)], CacheSettings(groups=(FULL, FULL), events=9), remote=[STORE])
    known, new = keys_of(0, 6), keys_of(0, 7, "b")
    store(cache, 0, known)
    store(cache, 1, keys_of(1, 5))
    before = state_of(cache)
    with pytest.raises(CacheError, match="key 3 of a path"):
        cache.lookup(wanted([known[0], *new[1:3], known[5], *new[4:]], keys_of(1, 5)), 1.0)
    assert state_of(cache) == before
