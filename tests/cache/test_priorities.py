"""What is kept longer, what is not stored at all, and until when."""

from __future__ import annotations

import math

import pytest
from cache_kit import IMAGE_BYTES, chunks, key, lookup, path_of, store
from group_kit import end, orders, settle

from longshore.boundary import FILE, HOST, Key, Status, Transfer, TransferResult
from longshore.cache import CacheSettings, DropReason, Retention, TieredCache, TierSpec, WritePolicy
from longshore.cache.eviction_policies import LRU
from longshore.cache.settings import DEFAULT_PRIORITY, OfferFilter, priorities, retention_ranges
from longshore.errors import CacheError, JobError
from residents import residents_of


def build(host: int, file: int = 0, **settings: object) -> TieredCache:
    slots = {HOST: host, **({FILE: file} if file else {})}
    tiers = [TierSpec(name, count, IMAGE_BYTES, LRU) for name, count in slots.items()]
    return TieredCache(tiers, CacheSettings(**settings))  # type: ignore[arg-type]


def put(cache: TieredCache, path: str, *retention: Retention, first: int = 0, prompt: int | None = None) -> None:
    store(cache, chunks(path), range(len(path) - first), first=first, retention=retention, prompt_end=prompt)
    settle(cache)


def on(cache: TieredCache, tier: str = HOST) -> list[str]:
    return sorted(path_of(r.key) for r in residents_of(cache) if r.slot.tier == tier)


def dropped(cache: TieredCache, tier: str = HOST) -> dict[DropReason, int]:
    return {reason: n for reason, n in cache.counters.drops[tier].items() if n}


def use(cache: TieredCache, path: str) -> None:
    hold = lookup(cache, chunks(path), 0.0).lease
    cache.release(hold)


def test_what_has_less_priority_goes_first_though_it_is_younger() -> None:
    cache = build(3)
    put(cache, "a", Retention(0, None, 90))
    put(cache, "b")
    put(cache, "c", Retention(0, None, 10))
    put(cache, "d")
    assert on(cache) == ["a", "b", "d"]
    put(cache, "e")
    put(cache, "f")
    assert on(cache) == ["a", "e", "f"]


def test_a_priority_reaches_over_the_chunks_that_it_names() -> None:
    cache = build(4)
    put(cache, "abcd", Retention(0, 1, 90), Retention(2, None, 5))
    put(cache, "w")
    assert on(cache) == ["a", "ab", "abc", "w"]
    put(cache, "x")
    assert on(cache) == ["a", "ab", "w", "x"]


def test_a_head_of_little_priority_stays_while_its_tail_does() -> None:
    cache = build(2)
    put(cache, "ab", Retention(0, 1, 0), Retention(1, 2, 100))
    put(cache, "x")
    assert on(cache) == ["a", "x"]
    put(cache, "y")
    assert on(cache) == ["x", "y"]


def test_priorities_survive_a_larger_tier() -> None:
    cache = build(1, 8, backup=WritePolicy.THROUGH)
    put(cache, "a", Retention(0, None, 90))
    assert cache.discard(chunks("a"), HOST) == 1
    cache.resize(HOST, 2)
    found = lookup(cache, chunks("a"), 0.0)
    cache.prefetch(found.lease, 0.0)
    settle(cache)
    cache.release(found.lease)
    assert on(cache) == ["a"]
    put(cache, "b")
    put(cache, "c")
    assert on(cache) == ["a", "c"]


def test_a_priority_ends_with_its_time() -> None:
    cache = build(2)
    put(cache, "a", Retention(0, None, 90, seconds=30.0))
    put(cache, "b")
    cache.apply_results((), 29.0)
    put(cache, "c")
    assert on(cache) == ["a", "c"]
    cache.apply_results((), 30.0)
    put(cache, "d")
    assert on(cache) == ["c", "d"]


def test_expired_path_is_evicted_tail_first_before_default_priority() -> None:
    cache = build(5)
    put(cache, "abc", Retention(0, None, 90, seconds=30.0))
    put(cache, "x")
    put(cache, "y", Retention(0, None, 20))
    cache.apply_results((), 30.0)
    cache.check_integrity()
    gone: list[str] = []
    for path in "pqrst":
        before = on(cache)
        put(cache, path)
        gone += set(before).difference(on(cache))
    assert gone == ["y", "abc", "ab", "a", "x"]


def test_low_priority_expires_and_new_priority_replaces_old_one() -> None:
    cache = build(2)
    put(cache, "a", Retention(0, None, 1, seconds=5.0))
    put(cache, "a", Retention(0, None, 80))
    cache.apply_results((), 10.0)
    put(cache, "b")
    put(cache, "c")
    assert on(cache) == ["a", "c"]


def test_a_chunk_that_left_takes_its_priority_along() -> None:
    cache = build(2)
    put(cache, "a", Retention(0, None, 90, seconds=50.0))
    cache.discard([key("a")], HOST)
    put(cache, "b")
    put(cache, "c")
    cache.apply_results((), 60.0)
    put(cache, "d")
    assert on(cache) == ["c", "d"]


@pytest.mark.parametrize("backup", [WritePolicy.THROUGH, WritePolicy.BACK])
def test_higher_priority_stays_while_lower_one_is_being_written(backup: WritePolicy) -> None:
    cache = build(3, 9, backup=backup)
    put(cache, "a", Retention(0, None, 90))
    cache.back_up_all()
    settle(cache)
    assert on(cache, FILE) == ["a"]
    writes = list[Transfer]()
    for path in "bc":
        store(cache, chunks(path), (0,))
        ordered = orders(cache)
        end(cache, [each for each in ordered if each.route.destination == HOST])
        writes += (each for each in ordered if each.route.destination == FILE)
    order = store(cache, chunks("d"), (0,), defer_rest=True)
    assert (order.job, len(order.later)) == (None, 1)  # until the copy of `b` or `c` has ended
    assert on(cache) == ["a", "b", "c"]
    cache.check_integrity()
    end(cache, writes)
    settle(cache)
    for path in "de":
        cache.back_up_all()
        settle(cache)
        put(cache, path)
        assert {"a", path} <= set(on(cache))


def test_dirty_lower_priority_makes_room_for_a_load_before_higher() -> None:
    cache = build(3, 9, backup=WritePolicy.BACK)
    for path, retention in (("x", (Retention(0, None, 90),)), ("f", ())):
        put(cache, path, *retention)
        cache.back_up_all()
        settle(cache)
    cache.discard([key("f")], HOST)
    put(cache, "y")
    put(cache, "z")
    assert (on(cache), on(cache, FILE)) == (["x", "y", "z"], ["f", "x"])
    lease = lookup(cache, chunks("f"), 0.0).lease
    assert lease is not None
    cache.load(lease, {0: (0,)})
    settle(cache)
    assert on(cache) == ["f", "x", "z"]


def test_tokens_become_the_chunks_that_have_one_of_them() -> None:
    assert Retention.of_tokens(5, 9, 90, chunk_tokens=4) == Retention(1, 3, 90)
    assert Retention.of_tokens(4, 8, 90, 2.0, chunk_tokens=4) == Retention(1, 2, 90, 2.0)
    assert Retention.of_tokens(0, None, 1, chunk_tokens=4) == Retention(0, None, 1)


def test_highest_priority_range_wins_and_first_of_equals() -> None:
    ranges = (Retention(0, 2, 10), Retention(1, 4, 20, 5.0), Retention(3, 6, 20))
    assert retention_ranges(ranges, range(7)).tolist() == [0, 1, 1, 1, 2, 2, -1]
    assert priorities(ranges, (6, 0, 4)).tolist() == [DEFAULT_PRIORITY, 10, 20]
    assert priorities((), (0, 1)).tolist() == [DEFAULT_PRIORITY] * 2


@pytest.mark.parametrize(
    "wrong",
    [
        Retention(0, 0, 5),
        Retention(-1, 2, 5),
        Retention(0, 1, 101),
        Retention(0, 1, -1),
        Retention(0, 1, 50.5),  # type: ignore[arg-type]
        Retention(0, 1, 5, 0.0),
        Retention(0, 1, 5, math.nan),
    ],
)
def test_a_retention_that_cannot_be_is_refused(wrong: Retention) -> None:
    cache = build(2)
    for call in (
        lambda: store(cache, [key("a")], (0,), retention=[wrong]),
        lambda: store(cache, [key("a")], retention=[wrong]),
    ):
        with pytest.raises(CacheError, match="retention: expected a range"):
            call()
    assert not residents_of(cache)


def test_below_the_floor_nothing_is_offloaded() -> None:
    cache = build(4, priority_floor=30)
    put(cache, "abcd", Retention(2, 3, 29))
    assert on(cache) == ["a", "ab"]  # what is behind could not be reached
    assert dropped(cache) == {DropReason.PRIORITY: 2}
    put(cache, "x", Retention(0, None, 30))
    assert on(cache) == ["a", "ab", "x"]


def test_of_a_prompt_only_the_prompt_is_offloaded() -> None:
    cache = build(8, prompt_only=True)
    put(cache, "abcd", prompt=2)
    assert on(cache) == ["a", "ab"]
    assert dropped(cache) == {DropReason.GENERATED: 2}
    put(cache, "abcd", first=3, prompt=2)
    assert dropped(cache) == {DropReason.GENERATED: 3}
    put(cache, "abcd")  # the answer has become a part of the next prompt
    assert on(cache) == ["a", "ab", "abc", "abcd"]
    assert store(build(8), chunks("ab"), range(2), prompt_end=1).stored_prefix == 2


def test_a_selective_policy_offloads_what_is_offered_again() -> None:
    cache = build(8, offload=WritePolicy.SELECTIVE, threshold=3)
    for _ in range(2):
        put(cache, "ab")
    assert on(cache) == []
    assert dropped(cache) == {DropReason.BELOW_THRESHOLD: 4}
    put(cache, "abc")
    assert on(cache) == ["a", "ab"]
    assert dropped(cache) == {DropReason.BELOW_THRESHOLD: 5}


def test_sightings_are_counted_for_the_last_so_many_chunks() -> None:
    sightings = OfferFilter(2, 2)
    one, two, three = (bytes([i]) * 32 for i in range(3))
    assert sightings.leading([one, two]) == 0
    assert sightings.leading([three]) == 0  # and "one" is forgotten
    assert sightings.leading([two, one]) == 1
    assert sightings.leading([two]) == 1


def test_selective_policy_backs_up_reused_chunks_and_their_ancestors() -> None:
    cache = build(8, 8, backup=WritePolicy.SELECTIVE, threshold=2)
    put(cache, "abc")
    put(cache, "x")
    cache.end_step()
    assert cache.take_commands() == []
    use(cache, "ab")
    use(cache, "ab")
    cache.end_step()
    settle(cache)
    assert on(cache, FILE) == ["a", "ab"]
    put(cache, "abc", first=2)
    put(cache, "abc", first=2)  # its use is one of the whole path
    cache.end_step()
    settle(cache)
    assert on(cache, FILE) == ["a", "ab", "abc"]
    cache.check_integrity()


@pytest.mark.parametrize(
    "settings",
    [{"offload": WritePolicy.SELECTIVE, "threshold": 1}, {"priority_floor": 101}, {"priority_floor": -1}],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(CacheError):
        CacheSettings(**settings)  # type: ignore[arg-type]


def test_an_offer_that_is_withdrawn_leaves_nothing_behind() -> None:
    cache = build(2, ranks=2)
    keys: list[Key] = chunks("ab")
    job = store(cache, keys).job
    cache.apply_results([TransferResult(job, (Status.OK, Status.OK), rank=1)], 0.0)
    cache.release(job)
    assert (cache.jobs_in_flight, residents_of(cache), cache.stats()[0].used) == (0, [], 0)
    cache.check_integrity()
    with pytest.raises(JobError, match="cannot be released"):
        cache.release(job)
    commanded = store(cache, keys, range(2)).job
    assert commanded is not None
    with pytest.raises(JobError, match="cannot be released"):
        cache.release(commanded)


def test_times_that_were_said_anew_are_not_kept() -> None:
    cache = build(4)
    for _ in range(200):
        put(cache, "ab", Retention(0, None, 90, 1e6))
    assert len(cache._state.priorities._due) < 100
    put(cache, "ab", Retention(0, None, 90, 1.0))
    cache.apply_results((), 2.0)
    put(cache, "cdef")
    assert "a" not in on(cache)
