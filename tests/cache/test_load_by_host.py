"""Chunks that a host has found by itself: kept, and lent to be read by others."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import pytest
from cache_kit import residency
from group_kit import settle
from object_state import state_of

from longshore.boundary import Key, Status, Transfer, TransferResult
from longshore.cache import (
    CacheGroup,
    CacheSettings,
    DropReason,
    GroupKeys,
    Lease,
    Presence,
    Protection,
    TieredCache,
    TierSpec,
    WritePolicy,
)
from longshore.cache.eviction_policies import LRU
from longshore.errors import CacheError, JobError, LeaseError

ALONE = CacheSettings(groups=(CacheGroup(block_size=4, window=1 << 40), CacheGroup(block_size=4)))


def keys_of(*names: str) -> list[Key]:
    return [hashlib.sha256(name.encode()).digest() for name in names]


def cache_of(slots: int) -> TieredCache:
    return TieredCache([TierSpec("host", slots, 4096)], ALONE)


def two_tiers(slots: int) -> TieredCache:
    """All that is stored is copied to the file tier at once."""
    settings = replace(ALONE, backup=WritePolicy.THROUGH)
    return TieredCache([TierSpec("host", slots, 4096), TierSpec("file", 64, 4096)], settings)


def store(cache: TieredCache, keys: list[Key]) -> int:
    """Offer `keys`, and report them as stored; says how many were taken."""
    offload = cache.store({0: GroupKeys(keys)})[0]
    if offload.job is None:
        return 0
    cache.apply_results([TransferResult(offload.job, (Status.OK,) * len(offload.slots))], 0.0)
    settle(cache)
    return len(offload.slots)


def kept(cache: TieredCache, keys: Sequence[Key], group: int = 0) -> Lease:
    """A lease on single chunks, all of which some tier has."""
    found = cache.lookup({group: GroupKeys(keys)}, 0.0, independent=True)
    assert found.lease is not None
    assert found.num_chunks == len(keys)
    return found.lease


def test_what_is_lent_stays_until_it_is_reported() -> None:
    cache, (a, b, c, d) = cache_of(2), keys_of("a", "b", "c", "d")
    assert store(cache, [a, b]) == 2
    loan = cache.load({0: GroupKeys([a, b])}).jobs[0]
    assert [slot.tier for slot in loan.slots] == ["host", "host"]
    assert store(cache, [c]) == 0
    cache.check_integrity()
    cache.apply_results([TransferResult(loan.job, (Status.OK, Status.OK))], 1.0)
    assert store(cache, [c, d]) == 2
    assert residency(cache, [a, b, c, d], Protection.STEP).presences == [Presence.ABSENT] * 2 + [Presence.HOST] * 2
    cache.end_step()
    cache.check_integrity()


def test_a_loan_is_a_use() -> None:
    cache, (a, b, c) = cache_of(2), keys_of("a", "b", "c")
    store(cache, [a])
    store(cache, [b])
    cache.apply_results([TransferResult(cache.load({0: GroupKeys([a])}).jobs[0].job, (Status.OK,))], 1.0)
    assert store(cache, [c]) == 1
    assert residency(cache, [a, b], Protection.STEP).presences == [Presence.HOST, Presence.ABSENT]
    assert cache.counters.hits["host"] == 1


def test_a_loan_outlives_a_reset() -> None:
    cache, (a, b) = cache_of(1), keys_of("a", "b")
    store(cache, [a])
    loan = cache.load({0: GroupKeys([a])}).jobs[0]
    cache.reset()
    assert residency(cache, [a], Protection.STEP).presences == [Presence.ABSENT]
    assert store(cache, [b]) == 0  # the slot is still being read
    cache.apply_results([TransferResult(loan.job, (Status.OK,))], 1.0)
    assert store(cache, [b]) == 1
    cache.check_integrity()


def test_what_is_given_back_unread_is_there_as_before() -> None:
    cache, (a,) = cache_of(1), keys_of("a")
    store(cache, [a])
    loan = cache.load({0: GroupKeys([a])}).jobs[0]
    cache.release(loan.job)
    with pytest.raises(JobError):
        cache.release(loan.job)
    assert residency(cache, [a], Protection.STEP).presences == [Presence.HOST]


def test_looked_up_chunks_stay_in_host_tier_until_step_ends() -> None:
    """With a copy below, too: a host that was told that a chunk is ready may borrow it in the same step."""
    cache, (a, b, c) = two_tiers(2), keys_of("a", "b", "c")
    store(cache, [a, b])
    assert residency(cache, [a], Protection.STEP).presences == [Presence.HOST]
    assert store(cache, [c]) == 1
    assert residency(cache, [a, b, c], Protection.STEP).presences == [
        Presence.HOST,
        Presence.COLDER,
        Presence.HOST,
    ]
    assert len(cache.load({0: GroupKeys([a])}).jobs[0].slots) == 1
    assert (cache.leases, cache.protected) == (0, 3)
    cache.end_step()
    assert cache.leases == cache.protected == 0
    cache.check_integrity()


def test_part_of_a_lookup_can_be_leased_after_other_evictions() -> None:
    cache, keys = cache_of(4), keys_of(*"abcd")
    store(cache, keys)
    sight = residency(cache, keys, Protection.STEP)
    loan = cache.load({0: GroupKeys(sight.part(1, 3))}).jobs[0]
    assert list(loan.slots) == list(cache.load({0: GroupKeys(keys[1:3])}).jobs[0].slots)
    cache.end_step()
    new = keys_of("x", "y")
    assert store(cache, new) == 2  # a and d have made way, and their numbers may be taken
    with pytest.raises(CacheError, match="2 of 4 chunks are not ready"):
        cache.load({0: GroupKeys(sight)})
    assert list(cache.load({0: GroupKeys(sight.part(1, 3))}).jobs[0].slots) == list(loan.slots)
    cache.reset()
    with pytest.raises(CacheError, match="not ready"):
        cache.load({0: GroupKeys(sight.part(1, 3))})
    cache.check_integrity()


def test_a_reset_forgets_what_was_looked_at() -> None:
    cache, (a, b, c) = cache_of(1), keys_of("a", "b", "c")
    store(cache, [a])
    residency(cache, [a], Protection.STEP)
    cache.reset()
    assert store(cache, [b]) == 1
    assert store(cache, [c]) == 1  # nobody has looked at b
    residency(cache, [c], Protection.STEP)
    assert store(cache, [a]) == 0
    cache.end_step()
    assert store(cache, [a]) == 1
    cache.check_integrity()


def test_what_is_no_key_is_refused() -> None:
    cache = cache_of(1)
    assert not residency(cache, [], Protection.STEP).presences
    for wrong in ([b""], [None], keys_of("a")[0]):
        with pytest.raises(CacheError, match="digest"):
            residency(cache, wrong, Protection.STEP)  # type: ignore[arg-type]


def test_what_is_kept_is_not_evicted() -> None:
    cache, (a, b) = cache_of(1), keys_of("a", "b")
    store(cache, [a])
    hold = kept(cache, [a])
    assert store(cache, [b]) == 0
    cache.release(hold)
    assert store(cache, [b]) == 1


def test_what_cannot_be_read_is_refused_and_nothing_has_changed() -> None:
    cache, (a, b, c) = cache_of(2), keys_of("a", "b", "c")
    store(cache, [a])
    cache.store({0: GroupKeys([b])})
    before = state_of(cache)
    for keys, group in (([], 0), ([a, a], 0), ([a, b], 0), ([a, c], 0), ([a], 2)):
        with pytest.raises(CacheError):
            cache.load({group: GroupKeys(keys)})
        assert state_of(cache) == before


def test_single_chunks_that_are_not_ready_are_not_leased() -> None:
    cache, (a, b, c) = cache_of(2), keys_of("a", "b", "c")
    store(cache, [a])
    cache.store({0: GroupKeys([b])})
    found = cache.lookup({0: GroupKeys([a, b, c])}, 0.0, independent=True)
    assert (found.num_chunks, cache.leases) == (1, 1)
    assert [each.value for each in found.residency[0].presences] == ["host", "in_flight", "absent"]
    for none in ([], [b, c]):
        assert cache.lookup({0: GroupKeys(none)}, 0.0, independent=True)[:2] == (None, 0)
    before = state_of(cache)
    for keys, group in (([a, a], 0), ([a], 2)):
        with pytest.raises(CacheError):
            cache.lookup({group: GroupKeys(keys)}, 0.0, independent=True)
        assert state_of(cache) == before


def test_a_loan_that_is_refused_changes_no_order_of_eviction() -> None:
    cache = TieredCache([TierSpec("host", 2, 4096, LRU), TierSpec("file", 1, 4096, LRU)], ALONE)
    a, b = keys_of("a", "b")
    store(cache, [a])
    cache.back_up_all()
    (down,) = cache.take_commands()
    assert isinstance(down, Transfer)
    cache.apply_results([TransferResult(down.job, (Status.OK,))], 0.0)
    assert cache.discard([a], "host") == 1
    hold = kept(cache, [a])
    assert cache.prefetch(hold, 0.0)
    cache.release(hold)  # it is still being read, and so cannot make way for the next
    cache.apply_results([TransferResult(cache.store({0: GroupKeys([b])})[0].job or 0, (Status.OK,))], 0.0)
    cache.back_up_all()
    before = state_of(cache)
    with pytest.raises(CacheError, match="not all of 1 chunks are ready in the host tier"):
        cache.load({0: GroupKeys([a])})
    assert state_of(cache) == before


def test_chunks_of_a_path_are_kept_and_lent_like_others() -> None:
    cache, keys = cache_of(3), keys_of("a", "b", "c")
    job = cache.store({1: GroupKeys(keys)})[1].job or 0
    cache.apply_results([TransferResult(job, (Status.OK,) * 3)], 0.0)
    hold, loan = kept(cache, keys[1:2], 1), cache.load({1: GroupKeys(keys[:1])}).jobs[0]
    assert store(cache, keys_of("d", "e", "f")) == 1, "c alone goes: b is kept, a is read"
    cache.apply_results([TransferResult(loan.job, (Status.OK,))], 0.0)
    assert store(cache, keys_of("g")) == store(cache, keys_of("h")) == 1
    assert residency(cache, keys, Protection.STEP).presences[:2] == [Presence.HOST] * 2, "a is needed to reach b"
    cache.release(hold)
    cache.end_step()
    cache.check_integrity()


def test_a_patient_offer_behind_its_head_waits_for_room() -> None:
    """What would not come together is not taken in part, and evicts nothing of its own path."""
    cache, keys = two_tiers(4), keys_of(*"abcdef")
    head = cache.store({1: GroupKeys(keys[:3])})[1]
    cache.apply_results([TransferResult(head.job or 0, (Status.OK,) * 3)], 0.0)
    waits = cache.store({1: GroupKeys(keys, 3)}, all_or_retry=True)[1]
    assert (waits.job, waits.retry, waits.positions) == (None, True, ())
    assert cache.counters.drops["host"].total() == 0
    settle(cache)
    tail = cache.store({1: GroupKeys(keys, 3)}, all_or_retry=True)[1]
    assert (tail.retry, list(tail.positions)) == (False, [3, 4, 5])
    assert residency(cache, keys[:3], Protection.STEP).presences.count(Presence.COLDER) == 2
    cache.end_step()
    cache.check_integrity()


def test_offer_whose_head_is_in_no_tier_does_not_wait() -> None:
    cache, keys = cache_of(3), keys_of("a", "b", "c", "d", "e")
    offload = cache.store({1: GroupKeys(keys, 1)}, all_or_retry=True)[1]
    assert (list(offload.positions), offload.retry) == ([1, 2, 3], False)
    assert cache.counters.drops["host"][DropReason.NO_PARENT] == 1


def test_what_is_kept_alone_is_not_onboarded_as_a_path() -> None:
    cache, keys = cache_of(2), keys_of("a", "b")
    store(cache, keys)
    hold = kept(cache, keys)
    with pytest.raises(LeaseError, match="single chunks"):
        cache.load(hold, {0: [0, 1]})
    assert (cache.take_commands(), cache.counters.misses.total()) == ([], 0)
    cache.release(hold)


def test_chunk_reported_in_a_step_is_leased_despite_corrupt_parent() -> None:
    cache, keys = two_tiers(4), keys_of("a", "b")
    job = cache.store({1: GroupKeys(keys)})[1].job or 0
    cache.apply_results([TransferResult(job, (Status.OK,) * 2)], 0.0)
    settle(cache)
    assert cache.discard(keys[:1], "host") == 1
    (read,) = cache.prefetch(kept(cache, keys[:1], 1), 0.0)
    assert residency(cache, keys[1:], Protection.STEP).presences == [Presence.HOST]
    cache.apply_results([TransferResult(read, (Status.CORRUPT,))], 0.0)
    loan = cache.load({1: GroupKeys(keys[1:])}).jobs[0]
    cache.check_integrity()
    cache.end_step()
    assert residency(cache, keys, Protection.STEP).presences == [Presence.ABSENT] * 2, "nothing leads to it any more"
    cache.apply_results([TransferResult(loan.job, (Status.OK,))], 0.0)
    assert cache.counters.lost == {"host": 2, "file": 2}
    cache.end_step()
    cache.check_integrity()
