"""What Gittins learns and remembers: hit rates by kind and age, spans of time, the ghost list, and hints as numbers."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore.cache.eviction_policies.ghosts import GhostList
from longshore.cache.eviction_policies.hit_rates import (
    AGAIN,
    AGE_BEGINS,
    AGE_OF,
    AGES,
    BACK,
    BECAME,
    CLASS,
    ENDS,
    FORGOTTEN,
    GAP_OF,
    GAPS,
    HINT,
    KIND_OF,
    LEAF,
    OLDEST,
    ONCE,
    PLAIN,
    REQUEST,
    RETURNED,
    ROWS,
    SHARED,
    WEIGHTS,
    HitRates,
    ReuseHint,
    ReuseHints,
    Spans,
    sooner,
    window,
)

WIDTHS = np.diff([*AGE_BEGINS, 2 * OLDEST]).tolist()


def best_by_hand(chances: list[float], age: int) -> float:
    """The most hits per tick, over all ages until which a chunk of this age could be kept, one chunk at a time."""
    best, still, hits, time = 0.0, 1.0, 0.0, 0.0
    for each in range(age, AGES):
        hits += still * chances[each]
        time += still * WIDTHS[each]
        still *= 1 - chances[each]
        best = max(best, hits / time)
    return best


@given(st.integers(0, 2**32), st.integers(1, 400))
def test_promise_is_the_best_rate_and_grows_with_uses(seed: int, most: int) -> None:
    promises, dice = HitRates(), np.random.default_rng(seed)
    promises._reached[:] = dice.integers(0, most, (PLAIN, AGES))
    promises._back[:] = promises._reached * dice.random((PLAIN, AGES)) ** 3
    chances, table = promises.chances(), promises.table()
    assert ((chances > 0) & (chances < 1)).all()
    for age in range(0, AGES, 5):
        raw = [best_by_hand(chances[kind].tolist(), age) for kind in range(PLAIN)]
        for kind in range(1 + GAPS, PLAIN):
            raw[kind] = max(raw[kind], raw[kind - GAPS])
        assert table[:, age].tolist() == pytest.approx(raw)


def test_with_nothing_known_the_oldest_go_first() -> None:
    assert HitRates().order(np.array([7, 3, 3, 0])).tolist() == list(range(4 * PLAIN))


def test_kind_that_returns_after_a_pause_promises_most_before() -> None:
    promises = HitRates()
    promises._reached[1, :15], promises._back[1, 14] = 100_000, 90_000
    table = promises.table()[1]
    assert table[14] == max(table)
    assert table[2] < table[13]
    assert table[15] < table[2]


def test_what_reached_an_age_is_counted_once_whenever_spans_end() -> None:
    """Of ten that were used at tick 1 one comes back 5 ticks later, and another is forgotten 9 ticks later."""
    promises, spans = HitRates(), Spans()
    weight, kind = 7, 1
    state = ONCE | weight << REQUEST
    for now in range(1, 40):
        for row, older in spans.begin(now):
            promises.join(row, older)
        if now == 1:
            promises.record(BECAME, state, 1, count=10)
        if now == 6:
            promises.record(RETURNED, state, 1, AGE_OF[5])
        if now == 10:
            promises.record(FORGOTTEN, state, 1, AGE_OF[9])
        promises.learn(spans, now)
    reached = promises._reached[kind] / WEIGHTS[weight]
    assert reached[: AGE_OF[5] + 1].tolist() == pytest.approx([10] * (AGE_OF[5] + 1))
    assert reached[AGE_OF[6] : AGE_OF[9] + 1].tolist() == pytest.approx([9] * (AGE_OF[9] - AGE_OF[5]))
    assert reached[AGE_OF[12] : AGE_OF[30]].tolist() == pytest.approx([8] * (AGE_OF[30] - AGE_OF[12]))
    assert promises._back[kind].sum() == pytest.approx(WEIGHTS[weight])


@pytest.mark.parametrize(
    ("uses", "gap", "kind"), [(0, 3, 0), (1, 0, 1), (1, 5, 6), (3, 2, 15), (4, 0, 19), (7, 1, 20), (64, 5, 48)]
)
def test_kinds_are_uses_in_doublings_by_gap(uses: int, gap: int, kind: int) -> None:
    how = ONCE + 8 * (uses - 1) | gap if uses else LEAF | gap
    assert KIND_OF[how] == kind
    assert AGAIN[how] == ONCE + 8 * min(max(uses, 1), 63)


def test_ages_are_two_per_doubling_and_gaps_lie_between() -> None:
    assert [AGE_OF[age] for age in (0, 1, 3, 4, 5, 6, 8, 11, 12, OLDEST)] == [0, 1, 3, 4, 4, 5, 6, 6, 7, AGES - 1]
    assert [GAP_OF[AGE_OF[gap]] for gap in (0, 1, 2, 7, 8, 31, 32, 127, 128, OLDEST)] == [0, 1, 2, 2, 3, 3, 4, 4, 5, 5]


@pytest.mark.parametrize("step", [1, 3, 200])
def test_spans_are_few_and_short_for_their_age(step: int) -> None:
    spans = Spans()
    for now in range(step, 12_000, step):
        spans.begin(now)
        assert len(spans.rows) == len(spans.starts) == len(set(spans.rows)) < ROWS
    for start, end in list(zip(spans.starts, spans.starts[1:], strict=False))[1:]:
        assert end - start <= max(step, (now + 1 - end) / 4)
    assert [spans.row(tick) for tick in range(now)] == spans.rows_of(np.arange(now)).tolist()


@pytest.mark.parametrize("step", [1, 2, 7, 60, 900])
def test_spans_become_one_as_the_rule_says(step: int) -> None:
    spans, dice, now, starts = Spans(), random.Random(step), 0, [0]
    for _ in range(5_000):
        now += dice.randint(1, step)
        starts.append(now)
        at = 0
        while at + 2 < len(starts):
            back = now - (starts[at + 2] - 1)
            full = at + 3 == len(starts) and len(starts) > ROWS
            if back >= OLDEST or 4 * (starts[at + 2] - starts[at]) <= back or full:
                del starts[at + 1]
            else:
                at += 1
        spans.begin(now)
        assert spans.starts == starts


# ---------------------------------------------------------------------- ghost list


def test_ghost_list_remembers_the_last_that_left_until_their_return() -> None:
    dice = random.Random(3)
    keys = [dice.randbytes(32) for _ in range(20_000)]
    ghosts = GhostList(4_000)
    when, states = np.arange(20_000, dtype=np.int32), np.full(20_000, 7, np.uint16)
    forgotten, _ = ghosts.insert_all(keys, when, states)
    assert len(forgotten) + len(ghosts) == 20_000
    counts, last, left = np.array(ghosts.take_all(keys)).T
    last, known = last.repeat(counts), left.repeat(counts) == 7
    assert len(known) == len(keys)
    assert (last == when)[known].mean() > 0.99  # some are taken for others
    assert known[18_000:].mean() > 0.97
    assert known[:10_000].mean() < 0.01
    assert len(ghosts) < 5  # what was taken for others


@pytest.mark.parametrize(("limit", "most"), [(7, 30), (300, 200), (1000, 700), (1000, 1500)])
def test_batch_that_leaves_or_returns_equals_one_by_one(limit: int, most: int) -> None:
    single, together, dice = GhostList(limit), GhostList(limit), random.Random(most)
    keys = [dice.randbytes(32) for _ in range(3 * limit)]
    hits = 0
    for now in range(40):
        some = dice.sample(keys, dice.randint(1, min(most, len(keys))))
        found = [left for key in some for _, *left in single.take_all([key])]
        assert [left for count, *left in together.take_all(some, forget=False) for _ in range(count)] == found
        assert [left for count, *left in together.take_all(some) for _ in range(count)] == found
        hits += sum(state > 0 for _, state in found)
        states = [1 + i % 9 for i in range(len(some))]
        gone = together.insert_all(some, np.full(len(some), now, np.int32), np.array(states, np.uint16))
        one = [left for key, state in zip(some, states, strict=True) if (left := single.insert(key, now, state))]
        assert sorted(zip(*(each.tolist() for each in gone), strict=True)) == sorted(one)
        assert len(single) == len(together)
        assert single.latest(keys) == together.latest(keys)
    assert hits > limit // 2


# ---------------------------------------------------------------------- hints


def test_new_hint_counts_a_little() -> None:
    """Nothing has been seen of a hint: what it says changes a little how often those used alike come back."""
    rates, once, twice = HitRates(), 8 * 2, 8 * 3 + 1
    rates._reached[KIND_OF[once], :8] = 9e6  # and did not come back
    rates._reached[KIND_OF[twice], 1:8] = 1e6
    rates._back[KIND_OF[twice], 3:8] = 0.4e6
    rates.add_hints()
    hints = (0, CLASS, ENDS, BACK + 1, SHARED)  # the last two: in 4 to 15 requests, which are ages 4 to 7
    plain, of_class, ends, back, shared = (rates.chances()[KIND_OF[hint << HINT | twice]] for hint in hints)
    assert plain[3:8] == pytest.approx([0.4] * 5, abs=0.001)
    assert of_class[:8] == pytest.approx(plain[:8], abs=0.001)
    assert ends[3:8] == pytest.approx([0.28] * 5, abs=0.001)
    assert back[3:8] == pytest.approx([0.28, 0.8, 0.8, 0.8, 0.8], abs=0.001)
    assert back[8:] == pytest.approx(plain[8:], abs=0.001)
    assert shared == pytest.approx(back)
    assert [window(hint)[0] for hint in range(BACK, CLASS)] == [0, 4, 16, 64, 256, 1024]


def test_hint_seen_on_other_chunks_tells_of_all_with_it() -> None:
    """Chunks of `ends` that were used once did not come back: those that were used twice are taken to do so, too."""
    rates, once, twice = HitRates(), 8 * 2, 8 * 3 + 1
    rates.add_hints()
    for how in (once, twice):
        rates._reached[KIND_OF[how], :8] = 1e6
        rates._back[KIND_OF[how], 7] = 0.4e6
    rates._reached[KIND_OF[ENDS << HINT | once], :8] = 1e5
    told, silent = (rates.chances()[KIND_OF[each << HINT | twice], 7] for each in (ENDS, BACK))
    assert told < 0.05
    assert silent > 0.25


@pytest.mark.parametrize(("uses", "gap", "often", "late"), [(10, 1, 40, 1), (2, 1, 4, 1), (1, 0, 1, 1), (4, 2, 4, 3)])
def test_hint_leaves_what_uses_and_gap_say(uses: int, gap: int, often: int, late: int) -> None:
    """One class for all: a chunk that a session uses often does not count as one that all sessions share."""
    rates = HitRates()
    rates.add_hints()
    one, other = (KIND_OF[CLASS << HINT | ONCE + 8 * (n - 1) | each] for n, each in ((uses, gap), (often, late)))
    rates._reached[[one, other], :8] = 1e6
    rates._back[other, 7] = 0.4e6
    assert rates.chances()[one, 7] < 0.01
    assert rates.chances()[other, 7] == pytest.approx(0.4, abs=0.01)


def test_of_one_hint_and_gap_more_uses_promise_no_less() -> None:
    """By chance, chunks come back more often that were used once than those used twice, and these than others."""
    rates = HitRates()
    rates.add_hints()
    rates._reached[:] = 1e6
    every = [[KIND_OF[hint << HINT | 8 * (1 + uses) | 2] for uses in (1, 2, 8)] for hint in (0, ENDS, CLASS)]
    for kinds in every:
        rates._back[kinds, 5] = 0.3e6, 0.2e6, 0.1e6
    for kinds in every:
        once, twice, more = rates.table()[kinds]
        assert (once <= twice).all()
        assert (twice <= more).all()
        assert twice[5] > 0.05  # what was used once promises that


def test_classes_are_learned_apart_and_bounded_in_number() -> None:
    reuse_hint = ReuseHints()
    numbers = [reuse_hint.begin(tick, float(tick), ReuseHint(of=f"class {tick % 9}")) for tick in range(1, 40)]
    assert len(set(numbers[:9])) == SHARED - CLASS
    assert numbers[:9] == numbers[9:18]
    assert max(numbers) == SHARED - 1


def test_later_return_does_not_replace_a_sooner_one() -> None:
    within_16, within_64 = BACK + 1, BACK + 2
    assert sooner(within_16, 3, within_64) == SHARED
    assert sooner(within_64, 15, CLASS - 1) == SHARED + 1
    assert sooner(within_16, 4, within_64) == within_64  # its time has begun: it may be the one that came back
    assert sooner(within_64, 3, within_16) == within_16
    for new in (0, ENDS, CLASS):
        assert sooner(within_16, 3, new) == new
    assert sooner(SHARED, 1, within_64) == within_64
    assert sooner(BACK, 0, within_64) == within_64


def test_times_are_requests_at_the_rate_of_the_last_ones() -> None:
    reuse_hint = ReuseHints()
    assert reuse_hint.begin(1, 0.0, ReuseHint(seconds=5.0)) == 0  # no rate is known
    for tick in range(2, 400):
        reuse_hint.begin(tick, tick / 10, None)
    assert reuse_hint.begin(400, 40.0, ReuseHint(seconds=0.3)) == BACK
    assert reuse_hint.begin(401, 40.1, ReuseHint(seconds=5.0)) == BACK + 2  # 50 requests
    assert reuse_hint.begin(402, 40.2, ReuseHint(seconds=1e9)) == CLASS - 1
    assert (reuse_hint.of(401), reuse_hint.of(399)) == (BACK + 2, 0)
    for tick in range(403, 403 + 5000):
        reuse_hint.begin(tick, 41.0, ReuseHint(ends=True))
    assert reuse_hint.of(401) == 0  # it is long ago
    assert reuse_hint.of(5402) == ENDS
