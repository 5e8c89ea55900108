"""What a full file tier rejects: copies that promise fewer hits than what would have to go for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from depth import deep
from longshore.boundary import FILE, HOST, Status, Transfer, TransferResult
from longshore.cache import (
    CacheSettings,
    DropReason,
    GroupKeys,
    Retention,
    TieredCache,
    TierSpec,
    WritePolicy,
    evictor,
)
from longshore.cache.columns import as_i32
from longshore.cache.events import EventKind
from longshore.cache.eviction_policies import ARC, LRU, EvictionPolicy, Gittins
from longshore.cache.evictor import Evictor
from longshore.trace.replay import keys_of
from residents import residents_of
from traffic import synthesize


class Tiers:
    """Host memory over files, or alone; served one request at a time; copies end as soon as they are ordered."""

    def __init__(
        self,
        host: int,
        file: int,
        *,
        policy: type[EvictionPolicy] = Gittins,
        backup: WritePolicy = WritePolicy.BACK,
        admission: bool = True,
        is_served: bool = False,
        remote: Sequence[str] = (),
        events: int = 0,
    ) -> None:
        specs = [TierSpec(name, slots, policy=policy) for name, slots in ((HOST, host), (FILE, file)) if slots]
        settings = CacheSettings(
            backup=backup, admission=admission, is_served=is_served, max_writes=1 << 14, events=events
        )
        self.cache = TieredCache(specs, settings, remote=remote)
        self.hits = self.asked = self.written = 0

    def serve(self, path: Sequence[int]) -> int:
        cache, keys = self.cache, keys_of(path)
        found = cache.lookup({0: GroupKeys(keys)}, 0.0)
        if found.lease is not None:
            cache.load(found.lease, {0: range(found.num_chunks)})
            self.move()
        if found.num_chunks < len(keys):
            left = range(found.num_chunks, len(keys))
            cache.store({0: GroupKeys(keys, found.num_chunks)}, {0: left}, request_number=found.request_number)
            self.move()
        if found.lease is not None:
            cache.release(found.lease)
        cache.end_step()
        self.move()
        self.hits += found.num_chunks
        self.asked += len(keys)
        return found.num_chunks

    def move(self) -> None:
        while jobs := [each for each in self.cache.take_commands() if isinstance(each, Transfer)]:
            self.written += sum(len(job.items) for job in jobs if job.route.destination == FILE)
            self.cache.apply_results([TransferResult(job.job, (Status.OK,) * len(job.items), 1) for job in jobs], 0.0)

    def flush(self) -> None:
        for _ in range(99):
            if self.cache.back_up_all():
                return
            self.move()
        pytest.fail("a flush never ends")

    def in_file(self) -> set[bytes]:
        return {each.key for each in residents_of(self.cache) if each.slot.tier == FILE}

    @property
    def rejected(self) -> int:
        return self.cache.counters.drops[FILE][DropReason.ADMISSION]


def served(family: str, share: float, **how: object) -> Tiers:
    """A file tier with room for this share of the blocks of all requests, beside a fifth of that in host memory."""
    paths = [request.hash_ids for request in synthesize(family, requests=deep(300, 700), seed=3, load=1.0)]
    slots = round(share * len({block for path in paths for block in path}))
    tiers = Tiers(slots // 5, slots, **how)  # type: ignore[arg-type]
    for path in paths:
        tiers.serve(path)
    tiers.flush()
    tiers.cache.check_integrity()
    return tiers


FAMILIES = [
    (family, rule) for family in ("agents", "chats", "scans") for rule in (WritePolicy.BACK, WritePolicy.THROUGH)
]


@pytest.mark.parametrize(("family", "backup"), deep(FAMILIES[:4:3], FAMILIES))
def test_full_file_tier_takes_fewer_writes_for_as_many_hits(family: str, backup: WritePolicy) -> None:
    everything, chosen = (served(family, 0.05, backup=backup, admission=on) for on in (False, True))
    assert chosen.rejected > 0 == everything.rejected
    assert chosen.written < 0.7 * everything.written
    assert chosen.hits >= everything.hits - 0.005 * chosen.asked


@pytest.mark.parametrize("policy", [LRU, ARC])
def test_policy_without_hit_rates_rejects_no_chunk(policy: type[EvictionPolicy]) -> None:
    everything, chosen = (served("chats", 0.1, policy=policy, admission=on) for on in (False, True))
    assert (chosen.written, chosen.rejected) == (everything.written, 0)


def test_a_tier_that_is_not_full_rejects_nothing() -> None:
    tiers = Tiers(64, 400)
    for tick in range(40):
        tiers.serve(range(10 * tick, 10 * tick + 8))
    tiers.flush()
    assert (tiers.rejected, tiers.written) == (0, 40 * 8)


def popular(**how: object) -> Tiers:
    """A file tier full of chunks that are used in each second request, for long."""
    tiers = Tiers(16, 32, backup=WritePolicy.THROUGH, **how)  # type: ignore[arg-type]
    for tick in range(600):
        tiers.serve(range(100 * (tick % 3), 100 * (tick % 3) + 10))
    assert tiers.serve(range(100, 110)) == 10
    return tiers


@pytest.mark.parametrize("how", [{}, {"remote": ["far"]}, {"is_served": True}, {"admission": False}], ids=str)
def test_host_memory_rejects_new_paths_unless_others_are_offered(how: dict[str, Any]) -> None:
    """All that both tiers have was used for long; a new prompt is larger than what is free."""
    tiers = popular(**how)
    tiers.serve(range(900, 930))
    rejected = tiers.cache.counters.drops[HOST][DropReason.ADMISSION]
    assert (rejected > 0) is (not how)
    if how.get("admission", True):
        assert all(tiers.serve(range(100 * each, 100 * each + 10)) == 10 for each in range(3))
    tiers.cache.check_integrity()


@pytest.mark.parametrize("admission", [True, False])
def test_host_memory_alone_rejects_only_with_admission(admission: bool) -> None:
    tiers = Tiers(32, 0, admission=admission)
    for tick in range(600):
        tiers.serve(range(100 * (tick % 3), 100 * (tick % 3) + 10))
    tiers.serve(range(900, 930))
    assert (len(residents_of(tiers.cache)) == 32) and (tiers.serve(range(900, 930)) == 30) is not admission


def test_rejected_chunk_stays_in_host_memory_and_is_offered_again() -> None:
    tiers, new = popular(), range(900, 904)
    before, written = tiers.rejected, tiers.written
    tiers.serve(new)
    assert tiers.rejected - before >= 2  # two had room
    assert {each.slot.tier for each in residents_of(tiers.cache) if each.key == keys_of(new)[3]} == {HOST}
    for _ in range(200):
        assert tiers.serve(new) == 4
    assert tiers.written > written
    assert set(keys_of(new)) <= tiers.in_file()
    tiers.cache.check_integrity()


def test_chunks_after_a_rejected_one_are_rejected_and_flush_ends() -> None:
    tiers = popular()
    before, rejected = tiers.written, tiers.rejected
    tiers.serve(range(900, 910))
    assert (tiers.written - before, tiers.rejected - rejected) == (2, 8), "two had room"
    tiers.serve(range(900, 914))  # longer
    assert tiers.cache._state.backlog.counts == [0, 0], "nothing waits for what was rejected"
    tiers.flush()
    assert not set(keys_of(range(900, 914))[4:]) & tiers.in_file()
    tiers.cache.check_integrity()


def test_rejected_chunks_are_evicted_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    examined, evict_few = list[int](), Evictor._evict_few

    def count(self: Evictor, tier: int, most: int, pool: int, *, clean_only: bool) -> int:
        examined.append(most)
        return evict_few(self, tier, most, pool, clean_only=clean_only)

    monkeypatch.setattr(Evictor, "_evict_few", count)
    tiers, first = Tiers(1000, 1000, backup=WritePolicy.THROUGH), 0
    for tick in range(70):
        keys = keys_of(range(first, first := first + (8 << tick % 7)))
        tiers.cache.store({0: GroupKeys(keys)}, {0: range(len(keys))})
        tiers.move()
    assert tiers.rejected > 40
    assert sum(examined) < 10
    assert tiers.cache.counters.evictions[HOST] > 8000
    tiers.cache.check_integrity()


@pytest.mark.parametrize(("family", "backup"), deep(FAMILIES[:4:3], FAMILIES))
def test_victims_and_rejections_do_not_depend_on_where_batches_end(
    family: str, backup: WritePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def victims() -> tuple[list[bytes], int]:
        tiers = served(family, 0.05, backup=backup, events=1 << 20)
        return [each.key for each in tiers.cache.events() if each.kind is EventKind.REMOVED], tiers.rejected

    together = victims()
    for size in (1, 5):
        monkeypatch.setattr(evictor, "_AT_FIRST", size)
        monkeypatch.setattr(evictor, "_AT_LEAST", size)
        assert together == victims()
    assert len(together[0]) > 3000
    assert together[1] > 500


def test_an_orphan_changes_nothing_about_what_is_rejected() -> None:
    tiers = Tiers(16, 32, backup=WritePolicy.THROUGH)
    tiers.cache.store({0: GroupKeys(keys_of(range(5000, 5002)), 1)}, {0: range(1)})
    tiers.move()
    for tick in range(600):
        tiers.serve(range(100 * (tick % 3), 100 * (tick % 3) + 10))
    before = tiers.rejected
    tiers.serve(range(900, 904))
    assert tiers.rejected - before >= 2  # two had room
    tiers.cache.check_integrity()


def test_a_priority_of_their_own_is_not_weighed_against_hits() -> None:
    tiers, keys = popular(), keys_of(range(900, 904))
    said = (Retention(0, 4, 90),)
    tiers.cache.store({0: GroupKeys(keys, retention=said)}, {0: range(4)})
    tiers.move()
    tiers.flush()
    assert set(keys) <= tiers.in_file()
    tiers.cache.check_integrity()


def test_orphan_behind_a_rejected_chunk_is_rejected_with_it() -> None:
    tiers, keys = popular(), keys_of(range(900, 906))
    tiers.serve(range(900, 904))
    assert not set(keys[2:4]) & tiers.in_file()
    assert tiers.cache.discard(keys_of(range(100, 110)), HOST)
    tiers.cache.store({0: GroupKeys(keys, 5)}, {0: range(1)})
    tiers.move()
    assert {keys[5]: HOST}.items() <= {each.key: each.slot.tier for each in residents_of(tiers.cache)}.items()
    tiers.cache.store({0: GroupKeys(keys[:5], 4)}, {0: range(1)})
    tiers.move()
    index = tiers.cache._state.index
    assert index.get(keys[5]) and not index.orphans
    assert tiers.cache._state.backlog.counts == [0, 0]


def test_coldest_tier_without_slots_ranks_chunks_that_others_have() -> None:
    specs = [TierSpec(HOST, 8), TierSpec(FILE, 0)]
    cache = TieredCache(specs, CacheSettings(backup=WritePolicy.THROUGH))
    job = cache.store({0: GroupKeys(keys_of(range(3)))}, {0: range(3)})[0].job
    assert job is not None
    cache.apply_results([TransferResult(job, (Status.OK,) * 3)], 0.0)
    assert [each.slot.tier for each in residents_of(cache)] == [HOST] * 3
    cache.check_integrity()


def test_chunks_with_a_copy_in_files_are_not_rejected() -> None:
    tiers = popular()
    node, other = map(tiers.cache._state.index.get, keys_of((100, 200)))
    tiers.cache._state.retained_in_host.add(other)
    assert not tiers.cache._transfers.evictor._may_be_rejected(as_i32((node,))).any()


def test_rejection_by_the_third_tier_spares_chunks_for_the_second() -> None:
    cache = TieredCache([TierSpec(name, 8) for name in (HOST, FILE, "third")], CacheSettings(backup=WritePolicy.BACK))
    keys, store = keys_of(range(3)), cache._state
    cache.store({0: GroupKeys(keys)}, {0: range(3)})

    def move() -> None:
        for job in [each for each in cache.take_commands() if isinstance(each, Transfer)]:
            cache.apply_results([TransferResult(job.job, (Status.OK,) * len(job.items), 1)], 0.0)

    move()
    first, second, third = map(store.index.get, keys)
    cache._offloader._copy_down([first], 0)
    move()
    assert store.backlog.counts == [2, 1, 0]
    store.reject([first])
    assert store.backlog.counts == [2, 0, 0]
    cache._offloader._copy_down([second], 0)
    move()
    assert store.backlog.counts == [1, 0, 0], "what is behind what was rejected is rejected"
    assert store.backlog.is_dirty(third, 0)
    cache.check_integrity()
