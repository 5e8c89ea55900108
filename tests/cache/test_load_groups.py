"""Load of several groups: one transfer, all or nothing."""

from __future__ import annotations

import pytest
from group_kit import FULL, STATE, WINDOW, end, grouped, keys_of, orders, resident, settle, store, wanted
from hypothesis import given
from hypothesis import strategies as st

from depth import examples
from longshore.boundary import FILE, HOST, Section, Status, TransferResult
from longshore.cache import GroupKeys, MissReason, Outcome, TieredCache, Verdict, WritePolicy, explain
from longshore.errors import CacheError, LeaseError
from residents import residents_of

PATHS = [keys_of(0, 8), keys_of(1, 16), keys_of(2, 4)]
NAMES = [FULL, WINDOW, STATE]


def stored(**settings: object) -> TieredCache:
    cache = grouped(*NAMES, **settings)  # type: ignore[arg-type]
    for group, path in enumerate(PATHS):
        store(cache, group, path)
    return cache


def test_all_groups_travel_in_one_transfer_with_a_section_each() -> None:
    cache = stored()
    hold = cache.lookup(wanted(*PATHS), 0.0).lease
    order = cache.load(hold, {0: range(8), 1: range(8, 11), 2: [11]}, by_layer=True)
    (transfer,) = orders(cache)
    assert (order.num_chunks, len(order.jobs)) == (12, 1)
    assert transfer.by_layer
    assert transfer.sections == (
        Section(0, 0, tuple(range(8))),
        Section(1, 13, (8, 9, 10)),
        Section(2, 3, (11,)),
    )
    assert [item.key for item in transfer.items] == [*PATHS[0], *PATHS[1][13:], PATHS[2][3]]
    at = {each.key: each.slot for each in residents_of(cache)}
    assert [item.source for item in transfer.items] == [at[item.key] for item in transfer.items]
    end(cache, [transfer])
    assert cache.progress(hold).outcome == Outcome(12, (HOST,) * 12)
    cache.release(hold)
    cache.check_integrity()


def test_group_with_gaps_has_several_sections() -> None:
    cache = stored()
    device = [False, True, False, False, True, False, True, True]
    found = cache.lookup({**wanted(*PATHS), 0: GroupKeys(PATHS[0], device=device)}, 0.0)
    assert found.matches[0].load == (0, 2, 3, 5)
    cache.load(found.lease, {0: [20, 21, 22, 23], 1: [0, 1, 2], 2: [3]})
    (transfer,) = orders(cache)
    assert transfer.sections[:3] == (Section(0, 0, (20,)), Section(0, 2, (21, 22)), Section(0, 5, (23,)))
    assert [item.key for item in transfer.items][:4] == [PATHS[0][at] for at in (0, 2, 3, 5)]


def test_group_whole_on_the_device_does_not_travel() -> None:
    cache = stored()
    found = cache.lookup({**wanted(*PATHS), 0: GroupKeys(PATHS[0], device=[True] * 8)}, 0.0)
    cache.load(found.lease, {0: (), 1: [0, 1, 2], 2: [3]})
    assert [section.group for section in orders(cache)[0].sections] == [1, 2]


def test_what_must_be_read_first_is_read_first() -> None:
    cache = stored(host=64, file=64, backup=WritePolicy.THROUGH)
    assert cache.discard(PATHS[0][6:], HOST) == 2
    assert cache.discard(PATHS[1][14:15], HOST) == 1
    hold = cache.lookup(wanted(*PATHS), 0.0).lease
    cache.load(hold, {0: range(8), 1: range(8, 11), 2: [11]}, by_layer=True)
    read, load = orders(cache)
    assert [item.key for item in read.items] == [*PATHS[0][6:], PATHS[1][14]]
    assert load.after == (read.job,)
    end(cache, [read])
    end(cache, [load])
    outcome = cache.progress(hold).outcome
    assert [outcome.sources.count(tier) for tier in (HOST, FILE)] == [9, 3]


def test_without_room_for_all_nothing_is_ordered() -> None:
    cache = stored(host=64, file=64, backup=WritePolicy.THROUGH)
    for path in PATHS:
        cache.discard(path, HOST)
    cache.resize(HOST, 11)
    hold = cache.lookup(wanted(*PATHS), 0.0).lease
    order = cache.load(hold, {0: range(8), 1: range(8, 11), 2: [11]})
    assert (order.num_chunks, orders(cache)) == (0, [])
    assert cache.progress(hold).outcome == Outcome(0, ())
    assert cache.counters.misses[MissReason.NO_ROOM] == 12
    cache.release(hold)
    cache.check_integrity()


def test_a_chunk_that_was_lost_meanwhile_keeps_all_away() -> None:
    cache = stored()
    first, second = (cache.lookup(wanted(*PATHS), 0.0).lease for _ in range(2))
    assert second is not None
    cache.load(first, {0: range(8), 1: range(8, 11), 2: [11]})
    end(cache, orders(cache), Status.CORRUPT)
    assert cache.load(second, {0: range(8), 1: range(8, 11), 2: [11]}).num_chunks == 0
    assert cache.progress(second).outcome == Outcome(0, ())
    for hold in (first, second):
        cache.release(hold)
    cache.check_integrity()
    assert len(resident(cache)) == 13 + 3  # what a match did not need


def test_lost_chunk_of_a_window_keeps_all_away() -> None:
    cache = grouped(WINDOW)
    path = keys_of(0, 3)
    store(cache, 0, path)
    first, second = (cache.lookup(wanted(path), 0.0).lease for _ in range(2))
    assert second is not None
    cache.load(first, {0: range(3)})
    (transfer,) = orders(cache)
    cache.apply_results([TransferResult(transfer.job, (Status.OK, Status.CORRUPT, Status.OK))], 0.0)
    assert [run.num_chunks for run in cache.progress(second).runs] == [1]  # what leads to it
    assert cache.load(second, {0: range(3)}).num_chunks == 0
    assert orders(cache) == []
    assert cache.counters.misses[MissReason.ABSENT] == 1


def test_nothing_that_is_held_makes_way() -> None:
    cache = grouped(FULL, WINDOW, host=7)
    paths = [keys_of(0, 4), keys_of(1, 8)]
    store(cache, 0, paths[0])
    store(cache, 1, paths[1], first=5)
    hold = cache.lookup(wanted(*paths), 0.0).lease
    assert hold is not None
    store(cache, 0, keys_of(0, 3, "b"))
    assert len([name for name in resident(cache) if name.startswith("a")]) == 7
    cache.release(hold)
    store(cache, 0, keys_of(0, 3, "b"))
    assert len([name for name in resident(cache) if name.startswith("b")]) == 3


def test_blocks_that_do_not_fit_are_refused() -> None:
    cache = stored()
    hold = cache.lookup(wanted(*PATHS), 0.0).lease
    assert hold is not None
    for blocks in ([range(8), range(8, 11)], [range(8), range(8, 10), [11]], [range(9), range(9, 11), [11]]):
        with pytest.raises(CacheError, match=r"expected .* blocks"):
            cache.load(hold, dict(enumerate(blocks)))
    with pytest.raises(CacheError, match="distinct"):
        cache.load(hold, {0: range(8), 1: [8, 8, 9], 2: [11]})
    with pytest.raises(CacheError, match=r"expected \[8, 3, 1\] blocks"):
        cache.load(hold, {0: [1]})
    single = cache.lookup({0: GroupKeys(PATHS[0])}, 0.0).lease
    assert single is not None
    with pytest.raises(CacheError, match="but no chunks of these"):
        cache.load(single, {0: range(8), 1: [8]})
    cache.load(hold, {0: range(8), 1: range(8, 11), 2: [11]})
    with pytest.raises(LeaseError, match="loaded before"):
        cache.load(hold, {0: range(8), 1: range(8, 11), 2: [11]})


def test_the_deadline_of_a_load_that_has_not_come() -> None:
    cache = stored()
    hold = cache.lookup(wanted(*PATHS), 0.0).lease
    cache.load(hold, {0: range(8), 1: range(8, 11), 2: [11]}, timeout=5.0)
    (transfer,) = orders(cache)
    cache.apply_results((), 5.0)
    assert cache.progress(hold).outcome == Outcome(0, ())
    cache.release(hold)
    end(cache, [transfer], Status.CANCELLED)
    settle(cache)
    assert (cache.leases, cache.protected, cache.jobs_in_flight) == (0, 0, 0)


def test_each_group_of_a_load_that_fails_is_accounted_for() -> None:
    cache = stored(events=1000)
    hold = cache.lookup(wanted(*PATHS), 0.0, request="r").lease
    cache.load(hold, {0: range(8), 1: range(8, 11), 2: [11]})
    cache.apply_results((), 20.0)
    events = cache.events()
    assert [(a.verdict, a.cause) for a in explain(events, "r/0")["r/0"]] == [
        (Verdict.MISSED, "deadline"),
        *[(Verdict.MISSED, "after_miss")] * 7,
    ]
    assert {(a.verdict, a.cause) for a in explain(events, "r/2")["r/2"]} == {(Verdict.MISSED, "after_miss")}


FAILURES = [Status.OK, Status.IO_ERROR, Status.DEVICE_ERROR, Status.CORRUPT, Status.CANCELLED, Status.DEADLINE]


@given(st.data())
@examples(150)
def test_a_joint_load_reports_all_its_chunks_or_none(data: st.DataObject) -> None:
    """Items fail at random, on several ranks, in any order; some chunks are read from a file first."""
    ranks = data.draw(st.integers(1, 3), "ranks")
    cache = grouped(*NAMES, host=64, file=64, backup=WritePolicy.THROUGH, ranks=ranks)
    for group, path in enumerate(PATHS):
        store(cache, group, path)
    cold = data.draw(st.integers(0, 8), "cold")
    assert cache.discard(PATHS[0][8 - cold :], HOST) == cold
    hold = cache.lookup(wanted(*PATHS), 0.0).lease
    assert hold is not None
    misses = cache.counters.misses.total()
    cache.load(hold, {0: range(8), 1: range(8, 11), 2: [11]})
    failed = False
    for transfer in orders(cache):  # the read, if there is one, and then the load
        for rank in data.draw(st.permutations(range(ranks))):
            fails = data.draw(st.booleans())
            each = st.sampled_from(FAILURES if fails else FAILURES[:1])
            statuses = tuple(data.draw(each) for _ in transfer.items)
            failed |= any(status is not Status.OK for status in statuses)
            cache.apply_results([TransferResult(transfer.job, statuses, rank=rank)], 0.0)
    outcome = cache.progress(hold).outcome
    assert outcome.num_chunks == len(outcome.sources) == (0 if failed else 12)
    assert cache.counters.hits.total() == outcome.num_chunks
    assert cache.counters.misses.total() - misses == 12 - outcome.num_chunks
    cache.release(hold)
    cache.check_integrity()


@pytest.mark.parametrize("lends", [True, False])
def test_hits_count_for_the_tier_chunks_came_from(lends: bool) -> None:
    """As an adapter tells it that has fetched chunks for a request before it loads them; for each form of a load."""
    cache = grouped(*NAMES, host=64, file=64, backup=WritePolicy.THROUGH)
    for group, path in enumerate(PATHS):
        store(cache, group, path)
    origins = dict.fromkeys([*PATHS[0][:3], *PATHS[1][:1], b"of another".ljust(32)], FILE)
    if lends:
        order = cache.load(wanted(*PATHS[:2]), origins=origins)
        assert cache.counters.hits.total() == 0  # nothing was read
        cache.apply_results([TransferResult(part.job, (Status.OK,) * part.num_chunks) for part in order.jobs], 0.0)
        assert cache.counters.hits == {HOST: len(PATHS[0]) + len(PATHS[1]) - 4, FILE: 4}
    else:
        found = cache.lookup(wanted(*PATHS), 0.0)
        assert found.lease is not None
        order = cache.load(found.lease, {0: range(8), 1: range(8, 11), 2: [11]}, origins=origins)
        assert cache.counters.hits.total() == 0  # nothing has arrived
        settle(cache)
        outcome = cache.progress(found.lease).outcome
        assert outcome is not None
        assert outcome.sources == (*[FILE] * 3, *[HOST] * 9)  # the window begins behind its first chunk
        assert cache.counters.hits == {HOST: 9, FILE: 3}
    tokens = cache.settings.group(0)[1]
    assert cache.counters.hit_tokens == {HOST: 5 * tokens, FILE: 3 * tokens}  # of the first group alone


def test_chunk_not_read_by_the_engine_is_no_hit() -> None:
    cache = grouped(*NAMES, host=64)
    store(cache, 0, PATHS[0])
    (part,) = cache.load({0: GroupKeys(PATHS[0])}).jobs
    count, before = len(PATHS[0]), cache.counters.misses.total()
    failed = [Status.DEVICE_ERROR, *[Status.OK] * (count - 2), Status.CANCELLED]
    cache.apply_results([TransferResult(part.job, tuple(failed))], 0.0)
    assert cache.counters.hits == {HOST: count - 2}
    assert cache.counters.hit_tokens == {HOST: (count - 2) * cache.settings.group(0)[1]}
    misses = cache.counters.misses
    assert (misses[MissReason.DEVICE_ERROR], misses[MissReason.CANCELLED], misses.total() - before) == (1, 1, 2)
    assert cache.lookup({0: GroupKeys(PATHS[0])}, 0.0, independent=True).num_chunks == count  # host memory keeps them
    (part,) = cache.load({0: GroupKeys(PATHS[0])}, count=False).jobs
    cache.apply_results([TransferResult(part.job, (Status.DEVICE_ERROR,) * count)], 0.0)
    assert (cache.counters.hits.total(), cache.counters.misses.total() - before) == (count - 2, 2)


def test_origin_that_is_no_tier_is_refused_unchanged() -> None:
    cache = grouped(*NAMES, host=64)
    store(cache, 0, PATHS[0])
    with pytest.raises(CacheError, match="origins: expected tiers"):
        cache.load({0: GroupKeys(PATHS[0])}, origins={PATHS[0][0]: "nowhere"})
    assert (cache.jobs_in_flight, cache.counters.hits.total()) == (0, 0)
