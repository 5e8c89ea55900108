"""Room and copies down are made a little ahead, for many at a time; and what leaves for good is told from the rest."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from group_kit import end, orders, settle

from longshore.boundary import FILE, HOST, Key, Status, Transfer
from longshore.cache import CacheSettings, GroupKeys, Retention, TieredCache, TierSpec, WritePolicy
from longshore.cache.eviction_policies import LRU
from longshore.cache.evictor import Evictor
from longshore.keys import Scope, chain
from residents import residents_of

ROOT = Scope(model="m", weights="w", dtype="d", layout="l", block_size=1).digest


def path(name: int, blocks: int) -> list[Key]:
    return chain(ROOT, [name, *range(1000, 1000 + blocks - 1)], 1)


def store(cache: TieredCache, name: int, blocks: int = 1) -> list[Transfer]:
    cache.store({0: GroupKeys(path(name, blocks))}, {0: range(blocks)})
    return settle(cache)


@pytest.mark.parametrize(("slots", "ahead"), [(255, 0), (256, 1), (1024, 4), (40_000, 64)])
def test_room_is_made_for_a_few_more(slots: int, ahead: int) -> None:
    cache = TieredCache([TierSpec(HOST, slots, 64, LRU)], CacheSettings(max_writes=slots))
    store(cache, 0, slots)
    store(cache, 1, 2)
    assert cache.counters.evictions[HOST] == 2 + ahead
    assert cache.stats()[0].used == slots - ahead
    for name in range(2, 2 + ahead):
        store(cache, name)
    assert cache.counters.evictions[HOST] == 2 + ahead
    store(cache, 999)
    assert cache.counters.evictions[HOST] == 2 + ahead + 1 + ahead
    cache.check_integrity()


@pytest.mark.parametrize(("slots", "ahead"), [(60, 0), (64, 1), (640, 10)])
def test_write_back_copies_a_few_more_than_it_must(slots: int, ahead: int) -> None:
    tiers = [TierSpec(HOST, slots, 64, LRU), TierSpec(FILE, 4 * slots, 64, LRU)]
    cache = TieredCache(tiers, CacheSettings(max_writes=slots))
    dirty = slots - slots // 4
    assert [str(each.route) for each in store(cache, 0, dirty)] == ["device->host"]
    (_, copied) = store(cache, 1)
    assert (str(copied.route), len(copied.items)) == ("host->file", 1 + ahead)
    for name in range(2, 2 + ahead):
        assert len(store(cache, name)) == 1
    cache.check_integrity()


def test_evictions_from_the_last_tier_are_told_from_others() -> None:
    cache = TieredCache([TierSpec(HOST, 4, 64, LRU), TierSpec(FILE, 6, 64, LRU)], CacheSettings())
    for name in range(12):
        store(cache, name, 2)
        cache.back_up_all()
        settle(cache)
    cache.check_integrity()
    counters = cache.counters
    assert counters.evictions[HOST] == counters.demotions[HOST] == 20
    assert counters.evictions[FILE] == 24 - 6
    assert counters.demotions[FILE] == 0


def test_chunk_without_backup_is_passed_over_once_then_evicted() -> None:
    """The file tier refuses, so nothing in host memory is safe; the coldest go all the same, in their order."""
    cache = TieredCache([TierSpec(HOST, 8, 64, LRU), TierSpec(FILE, 8, 64, LRU)], CacheSettings())
    for name in range(12):
        cache.store({0: GroupKeys(path(name, 1))}, {0: range(1)})
        while ordered := orders(cache):
            for each in ordered:
                end(cache, [each], Status.NO_SPACE if each.route.destination == FILE else Status.OK)
        cache.check_integrity()
    here = {resident.key for resident in residents_of(cache)}
    assert here == {path(name, 1)[0] for name in range(4, 12)}
    assert (cache.counters.evictions[HOST], cache.counters.demotions[HOST]) == (4, 0)


def of_six_dirty_chunks() -> tuple[TieredCache, Evictor]:
    """A cache whose evictor has passed over chunks 0 to 5, all dirty, coldest first."""
    cache = TieredCache([TierSpec(HOST, 8, 64, LRU), TierSpec(FILE, 64, 64, LRU)], CacheSettings(max_writes=1))
    evictor = Evictor(cache._state)
    for name in range(6):
        store(cache, name)
    assert evictor.evict(0, 1, clean_only=True) == 0
    return cache, evictor


def test_a_reused_node_number_is_not_evicted_before_its_turn() -> None:
    """The coldest of six dirty chunks was passed over and discarded; a new one, the warmest, takes its node number."""
    cache, evictor = of_six_dirty_chunks()
    (coldest,) = path(0, 1)
    node = cache._state.index.get(coldest)
    assert evictor.discard([coldest], 0) == 1
    store(cache, 6)
    assert cache._state.index.get(path(6, 1)[0]) == node
    assert evictor.evict(0, 1, clean_only=True) == 0
    assert evictor.evict(0, 1, clean_only=False) == 1
    assert {each.key for each in residents_of(cache)} == {path(name, 1)[0] for name in range(2, 7)}


def test_chunk_used_since_it_was_passed_over_goes_last() -> None:
    cache, evictor = of_six_dirty_chunks()
    cache.release(cache.lookup({0: GroupKeys(path(0, 1))}, 0.0).lease)
    assert evictor.evict(0, 1, clean_only=True) == 0
    for gone in range(1, 6):
        assert evictor.evict(0, 1, clean_only=False) == 1
        assert {each.key for each in residents_of(cache)} == {path(name, 1)[0] for name in (0, *range(gone + 1, 6))}
    assert evictor.evict(0, 1, clean_only=False) == 1
    assert not residents_of(cache)


def test_chunk_of_raised_priority_loses_its_turn() -> None:
    """It is held again, as by a copy that failed, when the turn comes that it had before."""
    cache, evictor = of_six_dirty_chunks()
    state = cache._state
    node = state.index.get(path(0, 1)[0])
    state.priorities.apply([node], [0], [Retention(0, None, 90)], 0.0)
    state.policies[0].hold(node)
    assert evictor.evict(0, 1, clean_only=False) == 1
    assert {each.key for each in residents_of(cache)} == {path(name, 1)[0] for name in (0, 2, 3, 4, 5)}
    assert evictor.evict(0, 4, clean_only=False) == 4
    assert {each.key for each in residents_of(cache)} == {path(0, 1)[0]}
    assert evictor.evict(0, 1, clean_only=False) == 1


def test_clean_chunks_between_dirty_ones_go_in_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    tiers = [TierSpec(HOST, 32, 64, LRU), TierSpec(FILE, 64, 64, LRU)]
    cache, held = TieredCache(tiers, CacheSettings()), list[int]()
    for name in range(16):
        store(cache, name)
    for name in range(0, 16, 2):
        cache._offloader._copy_down([cache._state.index.get(path(name, 1)[0])], 0)
    settle(cache)
    hold = LRU.hold_victims

    def counted(policy: LRU, nodes: Sequence[int]) -> None:
        held.append(len(nodes))
        hold(policy, nodes)

    monkeypatch.setattr(LRU, "hold_victims", counted)
    assert Evictor(cache._state).evict(0, 8, clean_only=True) == 8
    here = {each.key for each in residents_of(cache) if each.slot.tier == HOST}
    assert here == {path(name, 1)[0] for name in range(1, 16, 2)}
    assert held == [15]
    cache.check_integrity()


def test_one_call_holds_a_bounded_number_of_file_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both tiers have all chunks; those that leave host memory first are the last ones of the file tier."""
    monkeypatch.setattr("longshore.cache.evictor._MOST_HELD", 40)
    tiers = [TierSpec(name, 256, 64, LRU) for name in (HOST, FILE)]
    cache, backups = TieredCache(tiers, CacheSettings(backup=WritePolicy.THROUGH)), list[Transfer]()
    for name in range(32):
        cache.store({0: GroupKeys(path(name, 8))}, {0: range(8)})
        end(cache, orders(cache))
        backups += orders(cache)
    end(cache, reversed(backups))
    held = list[int]()
    hold = LRU.hold_victims

    def counted(policy: LRU, nodes: Sequence[int]) -> None:
        held.append(len(nodes))
        hold(policy, nodes)

    monkeypatch.setattr(LRU, "hold_victims", counted)
    cache.store({0: GroupKeys(path(100, 8))}, {0: range(8)})
    end(cache, orders(cache))
    assert 40 < sum(held) <= 40 + 64
    assert orders(cache) == []
    for _ in range(8):
        cache.apply_results((), 0.0)
        settle(cache)
    assert sum(held) >= 200
    assert not set(path(100, 8)) - {each.key for each in residents_of(cache) if each.slot.tier == FILE}
    assert cache.counters.evictions[FILE] >= 8
    cache.check_integrity()
