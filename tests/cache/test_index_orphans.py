"""Chunks whose parent no tier has: found by who has what is before them, first to go, and made whole by the parent."""

from __future__ import annotations

from typing import Any

import pytest
from cache_kit import IMAGE_BYTES, chunks, key
from group_kit import FULL, WINDOW, grouped, keys_of, orders, resident, settle

from longshore.boundary import FILE, HOST, Key, Status, Transfer, TransferResult
from longshore.cache import (
    CacheSettings,
    DropReason,
    GroupKeys,
    MissReason,
    Presence,
    Protection,
    Retention,
    ReuseHint,
    TieredCache,
    TierSpec,
    WritePolicy,
)
from longshore.cache.eviction_policies import LRU, POLICIES, Gittins
from longshore.cache.eviction_policies.partitioned import PartitionedByPriority
from longshore.errors import CacheError
from residents import residents_of

PATH = chunks("abcd")


def made(host: int = 8, file: int | None = None, policy: str = "lru", **settings: Any) -> TieredCache:
    tiers = [TierSpec(HOST, host, IMAGE_BYTES, POLICIES[policy])]
    if file is not None:
        tiers.append(TierSpec(FILE, file, IMAGE_BYTES, POLICIES[policy]))
    return TieredCache(tiers, CacheSettings(**settings))


def put(cache: TieredCache, path: list[Key], first: int = 0, **how: Any) -> list[Transfer]:
    """`path[first:]` are complete on the device, and go down as far as they will."""
    cache.store({0: GroupKeys(path, first, **how)}, {0: range(len(path) - first)})
    return settle(cache)


def found(cache: TieredCache, path: list[Key], first: int = 0) -> int:
    return cache.lookup({0: GroupKeys(path, first)}, 0.0, protect=Protection.NONE).num_chunks


def host(cache: TieredCache) -> set[Key]:
    return {each.key for each in residents_of(cache) if each.slot.tier == HOST}


def test_orphan_is_found_only_by_the_engine_with_its_head() -> None:
    cache = made()
    put(cache, PATH, 2)
    assert [found(cache, PATH, first) for first in range(5)] == [0, 0, 2, 1, 0]
    assert cache.counters.drops[HOST].total() == 0
    misses = cache.counters.misses
    assert (misses[MissReason.ABSENT], misses[MissReason.AFTER_MISS]) == (2 + 1, 2 + 2)


def test_an_orphan_is_loaded_with_what_is_behind_it() -> None:
    cache = made()
    put(cache, PATH, 1)
    lease = cache.lookup({0: GroupKeys(PATH, 1)}, 0.0).lease
    cache.load(lease, {0: range(3)})
    (transfer,) = settle(cache)
    assert [(item.key, item.parent) for item in transfer.items] == list(zip(PATH[1:], PATH, strict=False))
    outcome = cache.progress(lease).outcome
    assert outcome.num_chunks == 3
    cache.release(lease)
    cache.check_integrity()


def test_single_chunk_is_found_and_leased_whatever_precedes_it() -> None:
    cache = made()
    put(cache, PATH, 2)
    (residency,) = cache.lookup({0: GroupKeys(PATH)}, 0.0, protect=Protection.STEP, independent=True).residency.values()
    assert residency.presences == [Presence.ABSENT, Presence.ABSENT, Presence.HOST, Presence.HOST]
    assert cache.load({0: GroupKeys(residency.part(2, 4))}).num_chunks == 2


def test_orphan_is_found_from_first_chunk_once_its_parent_arrives() -> None:
    cache = made()
    put(cache, PATH, 2)
    put(cache, PATH[:1])
    assert found(cache, PATH) == 1
    (offload,) = cache.store({0: GroupKeys(PATH[:2])}, {0: range(2)}).values()
    assert (list(offload.positions), found(cache, PATH), found(cache, PATH, 2)) == ([1], 1, 2)
    settle(cache)
    assert (found(cache, PATH), found(cache, PATH, 2)) == (4, 2)


def test_a_store_fills_the_gaps_between_orphans_by_one_job() -> None:
    cache = made()
    put(cache, PATH[:2], 1)
    put(cache, PATH, 3)
    (order,) = cache.store({0: GroupKeys(chunks("abcde"), prompt_end=5)}, {0: range(10, 15)}).values()
    assert (list(order.positions), list(order.already_stored), order.stored_prefix) == ([0, 2, 4], [1, 3], 5)
    (transfer,) = orders(cache)
    assert [(part.first_block, tuple(part.blocks)) for part in transfer.sections] == [
        (0, (10,)),
        (2, (12,)),
        (4, (14,)),
    ]
    assert [item.parent for item in transfer.items] == [None, key("ab"), key("abcd")]
    cache.apply_results([TransferResult(transfer.job, (Status.OK,) * 3)], 0.0)
    cache.check_integrity()
    assert found(cache, chunks("abcde")) == 5


def test_it_survives_a_parent_that_does_not_arrive() -> None:
    cache = made()
    put(cache, PATH, 1)
    cache.store({0: GroupKeys(PATH[:1])}, {0: range(1)})
    (transfer,) = orders(cache)
    cache.apply_results([TransferResult(transfer.job, (Status.IO_ERROR,))], 0.0)
    cache.check_integrity()
    assert (found(cache, PATH), found(cache, PATH, 1)) == (0, 3)
    put(cache, PATH[:1])
    assert found(cache, PATH) == 4


def test_lease_outlives_its_orphan_becoming_one_of_many() -> None:
    cache = made(3)
    put(cache, PATH[:3], 1)
    lease = cache.lookup({0: GroupKeys(PATH[:3], 1)}, 0.0).lease
    assert lease is not None
    put(cache, PATH[:1])
    put(cache, chunks("xyz"))
    assert host(cache) == set(PATH[:3])
    assert cache.load(lease, {0: range(2)}).num_chunks == 2


@pytest.mark.parametrize("policy", POLICIES)
def test_orphans_go_first_their_leaves_before_their_roots(policy: str) -> None:
    cache = made(6, policy=policy)
    put(cache, chunks("xyz"))
    put(cache, PATH, 1)
    for _ in range(3):
        lease = cache.lookup({0: GroupKeys(PATH, 1)}, 0.0, request="used").lease
        assert lease is not None
        cache.release(lease)
    gone = []
    for name in "klmn":
        before = host(cache)
        put(cache, [key(name)])
        gone += sorted(before - host(cache))
    assert gone[:3] == PATH[:0:-1]
    assert len(gone) == 4
    assert gone[3] not in PATH


def test_what_is_no_orphan_any_more_goes_in_its_turn() -> None:
    cache = made(4)
    put(cache, [key("x")])
    put(cache, PATH[:2], 1)
    put(cache, PATH[:1])
    lease = cache.lookup({0: GroupKeys(PATH[:2])}, 0.0).lease
    cache.release(lease)
    put(cache, [key("k")])
    put(cache, [key("l")])
    assert host(cache) == {*PATH[:2], key("k"), key("l")}


def test_of_less_priority_others_go_before_an_orphan() -> None:
    cache = made(4)
    put(cache, PATH[:2], 1, retention=[Retention(0, None, 50)])
    put(cache, [key("x")], retention=[Retention(0, None, 10)])
    put(cache, [key("y")], retention=[Retention(0, None, 50)])
    put(cache, [key("z")])
    gone = []
    for name in "klm":
        before = host(cache)
        put(cache, [key(name)], retention=[Retention(0, None, 90)])
        gone += sorted(before - host(cache))
    assert gone == [key("x"), key("z"), PATH[1]]


def test_nothing_makes_way_for_an_orphan() -> None:
    cache = made(3)
    put(cache, chunks("xy"))
    put(cache, PATH, 2)
    assert host(cache) == {*chunks("xy"), PATH[2]}
    assert cache.counters.drops[HOST][DropReason.NO_PARENT] == 1
    assert cache.counters.evictions[HOST] == 0


def test_chunk_behind_an_orphan_with_arriving_parent_gets_room() -> None:
    cache = made(5)
    put(cache, chunks("xy"))
    put(cache, PATH[:2], 1)
    cache.store({0: GroupKeys(PATH[:1])}, {0: range(1)})
    cache.store({0: GroupKeys(PATH, 2)}, {0: range(2)})
    settle(cache)
    assert found(cache, PATH) == 4


@pytest.mark.parametrize("backup", [WritePolicy.THROUGH, WritePolicy.BACK])
def test_it_is_backed_up_behind_its_parent_and_not_before(backup: WritePolicy) -> None:
    cache = made(8, 8, backup=backup)
    put(cache, PATH, 1)
    assert cache.back_up_all()
    assert not cache.take_commands()
    put(cache, PATH[:1])
    cache.back_up_all()
    settle(cache)
    written = {each.key: each.parent for each in residents_of(cache) if each.slot.tier == FILE}
    assert written == dict(zip(PATH, [None, *PATH], strict=False))


def test_under_pressure_it_goes_without_a_copy() -> None:
    cache = made(4, 8)
    put(cache, PATH, 1)
    put(cache, chunks("wxyz"))
    assert host(cache) == set(chunks("wxyz"))
    assert not set(PATH) & {each.key for each in residents_of(cache)}


def adopted(*paths: str, host: int = 8, **settings: Any) -> TieredCache:
    cache = made(host, 8, **settings)
    records = [(slot, key(path), key(path[:-1]) if path[1:] else None, 0) for slot, path in enumerate(paths)]
    assert cache.adopt(FILE, records) == len(paths)
    cache.check_integrity()
    return cache


def test_after_a_restart_without_the_record_of_a_parent() -> None:
    """The engine computes and stores it again: then it is copied down at once, and nothing else is."""
    cache = adopted("a", "abc", "abcd")
    assert [found(cache, PATH, first) for first in range(4)] == [1, 0, 2, 1]
    put(cache, chunks("x"))
    moved = put(cache, PATH)
    assert [item.key for each in moved for item in each.items] == [key("ab")] * 2
    assert found(cache, PATH) == 4
    assert resident(cache, FILE) == ["a", "ab", "abc", "abcd"]


def test_after_a_restart_without_two_records_in_a_row() -> None:
    cache = adopted("abc", "abcd")
    moved = put(cache, PATH)
    assert [[item.key for item in each.items] for each in moved] == [PATH[:2]] * 2
    assert found(cache, PATH) == 4


def test_orphan_read_from_file_tier_is_usable_in_host_tier() -> None:
    cache = adopted("abc", "abcd")
    lease = cache.lookup({0: GroupKeys(PATH, 2)}, 0.0).lease
    cache.prefetch(lease, 0.0)
    settle(cache)
    assert cache.progress(lease).leading(HOST) == 2
    cache.release(lease)


def test_orphan_stays_when_its_parent_cannot_be_copied_down() -> None:
    cache = adopted("ab")
    cache.store({0: GroupKeys(PATH[:1])}, {0: range(1)})
    (transfer,) = orders(cache)
    cache.apply_results([TransferResult(transfer.job, (Status.OK,))], 0.0)
    (transfer,) = orders(cache)
    cache.apply_results([TransferResult(transfer.job, (Status.IO_ERROR,))], 0.0)
    cache.end_step()
    assert not orders(cache)
    cache.check_integrity()
    assert [found(cache, PATH, first) for first in (0, 1)] == [1, 1]
    cache.discard(PATH[1:2], FILE)
    put(cache, PATH[:2])
    assert found(cache, PATH[:2]) == 2


def test_orphan_that_is_no_longer_cold_follows_its_parent() -> None:
    cache = adopted("ab")
    lease = cache.lookup({0: GroupKeys(PATH[:2], 1)}, 0.0).lease
    cache.prefetch(lease, 0.0)
    cache.store({0: GroupKeys(PATH[:1])}, {0: range(1)})
    while ordered := [each for each in orders(cache) if each.route.destination == HOST]:
        for each in ordered:
            cache.apply_results([TransferResult(each.job, (Status.OK,) * len(each.items))], 0.0)
    assert found(cache, PATH[:2]) == 1
    cache.release(lease)
    assert cache.discard([PATH[1]], FILE) == 1
    cache.check_integrity()
    assert found(cache, PATH[:2]) == 2


def test_behind_what_is_found_in_its_place_no_orphan_is() -> None:
    """A lease keeps one path."""
    cache = adopted("abc")
    cache.store({0: GroupKeys(PATH[:2])}, {0: range(2)})
    (transfer,) = orders(cache)
    cache.apply_results([TransferResult(transfer.job, (Status.OK,) * 2)], 0.0)
    assert [found(cache, PATH, first) for first in (0, 1, 2)] == [2, 1, 1]


def test_in_a_circle_nothing_is_an_orphan() -> None:
    cache = made(4, 4)
    assert cache.adopt(FILE, [(0, key("x"), key("y"), 0), (1, key("y"), key("x"), 0), (2, key("z"), key("z"), 0)]) == 0
    put(cache, [key("k"), key("x")], 1)
    put(cache, [key("x"), key("k")], 1)
    cache.check_integrity()
    assert found(cache, [key("k"), key("x")], 1) == 1
    put(cache, [key("w")])
    put(cache, [*chunks("wv"), key("u")])


def test_what_does_not_follow_is_refused_and_changes_nothing() -> None:
    cache = made()
    put(cache, PATH, 2)
    before = residents_of(cache)
    for path, first in (
        ([key("x"), PATH[2]], 1),
        ([PATH[2]], 0),
        ([*PATH[:2], PATH[3]], 2),
        ([key("x"), *PATH[2:]], 0),
    ):
        with pytest.raises(CacheError):
            cache.store({0: GroupKeys(path, first)}, {0: range(len(path) - first)})
        if path[1:] != PATH[2:]:  # of which a lookup looks at some keys only
            with pytest.raises(CacheError):
                cache.lookup({0: GroupKeys(path, first)}, 0.0, protect=Protection.NONE)
    assert residents_of(cache) == before
    cache.check_integrity()


def test_only_the_full_attention_group_may_have_orphans() -> None:
    cache = grouped(FULL, WINDOW)
    full, window = keys_of(0, 4), keys_of(1, 8)
    cache.store({0: GroupKeys(full, 2), 1: GroupKeys(window, 4)}, {0: range(2), 1: range(2, 6)})
    settle(cache)

    def tokens(device: list[bool]) -> int:
        asked = {0: GroupKeys(full, device=device), 1: GroupKeys(window)}
        lookup = cache.lookup(asked, 0.0)
        if lookup.lease:
            assert (lookup.matches[0].load, lookup.matches[1].load) == ((2, 3), (5, 6, 7))
            cache.load(lookup.lease, {0: range(2), 1: range(2, 5)})
            (transfer,) = settle(cache)
            assert [item.parent for item in transfer.items] == [*full[1:3], None, None, None]
            cache.release(lookup.lease)
        return lookup.tokens

    assert [tokens(device) for device in ([], [True], [False, True], [True, True])] == [0, 0, 0, 16]
    cache.store({0: GroupKeys(full[:2])}, {0: range(2)})
    settle(cache)
    assert cache.lookup({0: GroupKeys(full, device=()), 1: GroupKeys(window)}, 0.0).tokens == 16


def test_lease_of_all_groups_keeps_no_orphan_behind_tier_hits() -> None:
    cache = grouped(FULL)
    full = keys_of(0, 4)
    for path, first in ((full[:1], 0), (full, 2)):
        cache.store({0: GroupKeys(path, first)}, {0: range(len(path) - first)})
        settle(cache)
    served = [
        cache.lookup({0: GroupKeys(full, device=device)}, 0.0, protect=Protection.NONE).tokens
        for device in ([False, True], [True, True], [True, True, True])
    ]
    assert served == [8, 16, 16]


def test_a_reset_forgets_orphans() -> None:
    cache = made()
    put(cache, PATH, 2)
    cache.reset()
    put(cache, PATH[:2])
    assert found(cache, PATH) == 2


def test_remote_tiers_get_it_once_it_is_none() -> None:
    cache = TieredCache([TierSpec(HOST, 32, IMAGE_BYTES, LRU)], CacheSettings(), remote=["far"])
    cache.store({0: GroupKeys(PATH, 2)}, {0: range(2)})
    assert [str(each.route) for each in settle(cache)] == ["device->host"]
    cache.store({0: GroupKeys(PATH[:2])}, {0: range(2)})
    sent = [item.key for each in settle(cache) if each.route.destination == "far" for item in each.items]
    assert sorted(sent) == PATH


def test_first_orphan_is_used_by_its_own_request() -> None:
    cache = made(policy="gittins")
    for tick in range(5):
        put(cache, chunks("xy")[: tick % 2 + 1])
        cache.lookup({0: GroupKeys(chunks("xy"))}, 0.0, protect=Protection.STEP)
    asked = cache.lookup({0: GroupKeys(PATH)}, 0.0, protect=Protection.STEP, reuse_hint=ReuseHint(ends=True))
    put(cache, PATH, 2)
    policy, node = cache._state.policies[0], cache._state.index.get(PATH[3])
    assert isinstance(policy, PartitionedByPriority)
    orphans = policy.part(policy.wanted(node))
    assert isinstance(orphans, Gittins)
    assert node in orphans
    assert orphans._used[node] == asked.request_number == 6
    assert orphans._hint > 0
