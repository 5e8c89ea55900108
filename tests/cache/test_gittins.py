"""Gittins: what is learned, what is remembered, and what goes first because of it."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore.cache.chains import LISTS
from longshore.cache.eviction import Gittins
from longshore.cache.eviction.departed import Departed
from longshore.cache.eviction.gittins import _FADE
from longshore.cache.eviction.promise import AGES, KINDS, Promises, age_of, kind_of
from longshore.errors import CacheError

ONCE, TWICE, THRICE = 1, 2, 3


def learned(seen: dict[int, int], back: dict[tuple[int, int], int]) -> Promises:
    promises = Promises()
    for kind, count in seen.items():
        promises.became += bytes([kind]) * count
    for (kind, age), count in back.items():
        promises.came_back += bytes([kind * AGES + age]) * count
    promises.learn()
    return promises


def best_by_hand(chances: list[float], age: int) -> float:
    """The most hits per step, over all ages until which a chunk of this age could be kept, one chunk at a time."""
    best, still, hits, time = 0.0, 1.0, 0.0, 0.0
    for each in range(age, AGES):
        width = 0.5 if each == 0 else 2.0 ** (each - 1)
        hits += still * chances[each]
        time += still * width * (1 - chances[each] / 2)
        still *= 1 - chances[each]
        best = max(best, hits / time)
    return best


@given(
    st.lists(st.integers(0, 2000), min_size=KINDS, max_size=KINDS),
    st.lists(st.tuples(st.integers(0, KINDS - 1), st.integers(0, AGES - 1)), max_size=60),
)
def test_a_promise_is_the_best_rate_of_hits_and_more_uses_promise_no_less_unless_they_hardly_come_back(
    seen: list[int], back: list[tuple[int, int]]
) -> None:
    promises = learned(dict(enumerate(seen)), {each: 7 * back.count(each) for each in back})
    chances, table, shares = promises.chances(), promises.table(), [1.0, 1.0, *promises.shares().tolist()]
    assert ((chances > 0) & (chances < 1)).all()
    for age in range(AGES):
        raw = [best_by_hand(chances[kind].tolist(), age) for kind in range(KINDS)]
        assert table[0, age] == pytest.approx(min(raw[0], raw[1]))
        for kind in range(1, KINDS):
            raw[kind] = max(raw[kind], shares[kind] * max(raw[1:kind], default=0.0))
        assert table[1:, age].tolist() == pytest.approx(raw[1:])


def test_more_uses_promise_as_much_until_they_come_back_four_times_more_rarely() -> None:
    def share(back: int) -> float:
        return float(learned({ONCE: 100_000, TWICE: 80_000}, {(ONCE, 6): 80_000, (TWICE, 6): back}).shares()[0])

    assert share(80_000) == share(20_000) == 1.0
    assert share(8_000) == pytest.approx(0.5, abs=0.01)
    assert share(0) < 0.01


def test_chances_are_those_of_what_has_got_so_far() -> None:
    promises = learned({ONCE: 100_000}, {(ONCE, 2): 50_000, (ONCE, 5): 40_000})
    chances = promises.chances()[ONCE]
    assert chances[[0, 2, 3, 5]] == pytest.approx([0, 0.5, 0, 0.8], abs=0.001)
    promises.fade()
    assert promises.chances()[ONCE] == pytest.approx(chances, abs=0.001)


def test_nothing_is_known_at_first_and_the_oldest_go() -> None:
    order = Promises().order([7, 3, 3, 0]).tolist()
    assert order == list(range(4 * KINDS))


def test_the_end_of_a_prompt_is_let_go_before_what_it_follows() -> None:
    promises = learned({0: 100, ONCE: 100_000}, {(0, 2): 90})  # little is known of ends, and much good
    assert promises.order([2]).tolist()[:2] == [0, ONCE]
    assert promises.chances()[0, 2] > promises.chances()[ONCE, 2]


def test_a_kind_that_comes_back_after_a_pause_is_worth_waiting_for_until_then() -> None:
    table = learned({ONCE: 100_000, TWICE: 0}, {(ONCE, 6): 90_000}).table()[ONCE]
    assert table[6] == max(table)
    assert table[2] < table[5]
    assert table[7] < table[2]


@pytest.mark.parametrize(("uses", "kind"), [(0, 0), (1, 1), (3, 3), (4, 4), (7, 4), (8, 5), (15, 5), (16, 6), (32, 7)])
def test_kinds_are_uses_in_doublings(uses: int, kind: int) -> None:
    assert kind_of(uses) == kind


def test_ages_are_doublings_too_and_the_last_has_no_end() -> None:
    assert [age_of(steps) for steps in (0, 1, 2, 3, 4, 7, 8)] == [0, 1, 2, 2, 3, 3, 4]
    assert age_of(10**9) == AGES - 1
    steps = np.arange(5000, dtype=np.int32)
    assert np.minimum(np.frexp(steps)[1], AGES - 1).tolist() == [age_of(each) for each in steps.tolist()]


# ---------------------------------------------------------------------- departed


@given(st.integers(1, 5), st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 12), unique=True, max_size=8))))
def test_the_last_that_left_are_remembered_unless_they_came_back(
    limit: int, steps: list[tuple[bool, list[int]]]
) -> None:
    departed = Departed(limit)
    ring: list[tuple[int, int] | None] = [None] * limit
    for now, (leave, who) in enumerate(steps):
        known = {entry[0]: entry for entry in ring if entry}
        if leave:
            new = [each for each in who if each not in known]
            departed.add_all([bytes([each]) * 32 for each in new], [now] * len(new), [each + 1 for each in new])
            ring = [*ring, *((each, now) for each in new)][-limit:]
        else:
            found = departed.take_all([bytes([each]) * 32 for each in who])
            assert found == [(i, known[each][1], each + 1) for i, each in enumerate(who) if each in known]
            ring = [None if entry and entry[0] in who else entry for entry in ring]
        assert departed.count == limit - ring.count(None)
        departed.check_integrity()


def test_a_chain_ends_where_the_ring_has_come_round() -> None:
    departed = Departed(64)
    dice = random.Random(3)
    keys = [dice.randbytes(32) for _ in range(1000)]
    departed.add_all(keys, range(1000), [1] * 1000)
    assert departed.take_all(keys[:936]) == []
    assert departed.take_all(keys[936:]) == [(i, 936 + i, 1) for i in range(64)]
    assert departed.count == 0


@pytest.mark.parametrize(("limit", "most"), [(7, 30), (300, 200), (1000, 700), (1000, 1500)])
def test_many_that_leave_or_come_back_together_are_as_many_one_by_one(limit: int, most: int) -> None:
    single, together, dice = Departed(limit), Departed(limit), random.Random(most)
    keys = [dice.randbytes(32) for _ in range(3 * limit)]
    hits = 0
    for now in range(40):
        some = dice.sample(keys, dice.randint(1, min(most, len(keys))))
        found = [(i, *left) for i, key in enumerate(some) if (left := single.take(key))]
        assert together.take_all(some) == found
        hits += len(found)
        together.add_all(some, [now] * len(some), [1 + i % 9 for i in range(len(some))])
        for i, key in enumerate(some):
            single.add(key, now, 1 + i % 9)
        assert together.count == single.count
        together.check_integrity()
    assert hits > limit


# ---------------------------------------------------------------------- the policy


class Tier:
    """A Gittins tier of `slots` slots, told of keys."""

    def __init__(self, slots: int, nodes: int = 4096) -> None:
        names = np.empty(LISTS + nodes, object)
        self.policy = Gittins(slots, names)
        self.policy.grow(LISTS + nodes)
        self.slots, self.names = slots, names
        self.node: dict[int, int] = {}
        self.free = list(range(LISTS, LISTS + nodes))

    def use(self, key: int, *, leaf: bool = False) -> bool:
        """One access; whether it was a hit."""
        if key in self.node:
            self.policy.touch([self.node[key]])
            return True
        if len(self.node) == self.slots:
            gone = self.policy.coldest()
            self.policy.remove(gone, evicted=self.names[gone])
            del self.node[int.from_bytes(self.names[gone], "little")]
            self.free.append(gone)
        node = self.node[key] = self.free.pop()
        self.names[node] = key.to_bytes(32, "little")
        self.policy.insert([node], leaf=leaf)
        return False


def test_of_a_loop_longer_than_the_tier_a_part_is_kept() -> None:
    tier = Tier(500)
    hits = [tier.use(key) for _ in range(30) for key in range(700)]
    assert sum(hits[-7000:]) > 0.5 * 7000  # where LRU has none


def test_what_ends_prompts_and_never_comes_back_goes_first_once_that_is_known() -> None:
    """Bodies come back 56 prompts later: there is room for 56 of them, and not for their ends as well."""
    tier = Tier(256)
    hits = []
    for prompt in range(600):
        tier.use(5 * prompt, leaf=True)
        for key in range(1, 5):
            tier.use(5 * prompt + key)
            hits.append(prompt >= 56 and tier.use(5 * (prompt - 56) + key))
    assert sum(hits[-800:]) > 0.8 * 800
    ends = [node for node in tier.policy.order() if tier.policy._place[node] == 1]
    assert len(ends) < 30


def test_what_left_comes_back_with_its_uses() -> None:
    tier = Tier(64)
    for _ in range(3):
        tier.use(7)
    key = tier.node[7]
    tier.policy.remove(key, evicted=tier.names[key])
    tier.policy.insert([key])
    assert tier.policy._place[key] == 1 + 4  # the fourth use


def test_resizing_forgets_what_left_and_a_new_column_of_names_does_not() -> None:
    tier = Tier(64)
    tier.use(7)
    node = tier.node[7]
    tier.policy.remove(node, evicted=tier.names[node])
    tier.policy.resize(64, tier.names)
    assert tier.policy._departed.count == 1
    tier.policy.resize(128, tier.names)
    assert tier.policy._departed.count == 0


@given(st.lists(st.tuples(st.sampled_from(["use", "hold", "release"]), st.integers(0, 11), st.integers(1, 12))))
def test_told_together_or_one_by_one_is_the_same(steps: list[tuple[str, int, int]]) -> None:
    single, together = (Gittins(12, np.array([bytes([i % 256]) * 32 for i in range(LISTS + 12)], object)) for _ in "ab")
    for policy in (single, together):
        policy.grow(LISTS + 12)
    nodes = list(range(LISTS, LISTS + 12))
    together.insert(nodes, leaf=True)
    for i, node in enumerate(nodes):
        single.insert([node], leaf=i == 0)
    for verb, start, count in 9 * steps:  # long enough for the clock to go on
        some = nodes[start : start + count]
        if verb == "use":
            together.touch(some)
            for node in some:
                single.touch([node])
        elif verb == "hold":
            for policy in (single, together):
                policy.hold(some[0])
        else:
            for policy in (single, together):
                policy.release(some)
        together.check_integrity()
    single.check_integrity()
    assert list(single.order()) == list(together.order())
    assert single._now == together._now


@pytest.mark.parametrize("most", [40, 700])
def test_long_paths_are_told_in_whole_arrays_to_the_same_end(most: int) -> None:
    dice = random.Random(most)
    names = np.array([dice.randbytes(32) for _ in range(LISTS + 2000)], object)
    single, together = Gittins(1500, names), Gittins(1500, names)
    for policy in (single, together):
        policy.grow(LISTS + 2000)
    out, inside = list(range(LISTS, LISTS + 2000)), list[int]()
    for turn in range(60):
        new = [out.pop(dice.randrange(len(out))) for _ in range(min(dice.randint(1, most), 1500 - len(inside)))]
        together.insert(new)
        for node in new:
            single.insert([node])
        inside += new
        used = dice.sample(inside, min(most, len(inside)))
        if turn % 2:
            used = [node for node in together.order() if node in set(used)]  # neighbours
        together.touch(used)
        for node in used:
            single.touch([node])
        kept = together.ahead(most)
        together.keep(kept)
        for node in kept:
            single.hold(node)
        together.release(kept[::-1])
        for node in kept[::-1]:
            single.release([node])
        gone = together.ahead(dice.randint(1, most))
        together.leave(gone, names[gone].tolist())
        for node in gone:
            assert single.coldest() == node
            single.remove(node, evicted=names[node])
        inside = [node for node in inside if node not in set(gone)]
        out += gone
        assert list(single.order()) == list(together.order())
    assert single._now == together._now > 10
    assert single._departed.count == together._departed.count > 0


def test_what_is_released_among_older_ones_does_not_grow_older_with_them() -> None:
    policy = Gittins(64, np.array([bytes([i % 256]) * 32 for i in range(LISTS + 512)], object))
    policy.grow(LISTS + 512)
    older, younger, *others = range(LISTS, LISTS + 512)
    policy.insert(others[:63])
    policy.insert([older])  # with which the clock goes on
    policy.insert([younger])
    policy.hold(younger)
    policy.touch(others[:63])
    for _ in range(12):
        policy.touch([*others[:63], others[0]])
        policy.release([younger])
        policy.check_integrity()
        policy.hold(younger)


@given(
    st.lists(
        st.tuples(st.sampled_from(["use", "hold", "release", "evict"]), st.integers(0, 199), st.integers(1, 90)),
        min_size=8,
    )
)
def test_whatever_happens_each_node_is_in_the_list_of_its_kind_and_age(steps: list[tuple[str, int, int]]) -> None:
    names = np.array([i.to_bytes(32, "little") for i in range(LISTS + 200)], object)
    policy = Gittins(150, names)
    policy.grow(LISTS + 200)
    for verb, start, count in 3 * steps:
        some = [LISTS + (start + i) % 200 for i in range(count)]
        inside = [node for node in some if node in policy]
        if verb == "use":
            policy.touch(inside)
            policy.insert([node for node in some if node not in policy][: 150 - len(policy)])
        elif verb == "hold":
            for node in inside:
                policy.hold(node)
        elif verb == "release":
            policy.release(inside)
        elif gone := policy.ahead(count):
            policy.leave(gone, names[gone].tolist())
        policy.check_integrity()


def test_what_was_counts_for_half_after_each_so_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    faded: list[int] = []
    monkeypatch.setattr(Promises, "fade", lambda _: faded.append(tier.policy._now))
    tier = Tier(8)
    tier.use(0)
    while tier.policy._now < 2 * _FADE + 1:
        tier.use(0)
    assert faded == [_FADE, 2 * _FADE]


def test_a_long_path_that_is_used_is_one_chunk_after_the_other() -> None:
    single, together = Tier(16_384).policy, Tier(16_384).policy
    nodes = list(range(LISTS, LISTS + 600))
    for policy in (single, together):
        policy.names[nodes] = [node.to_bytes(32, "little") for node in nodes]
        policy.insert(nodes[300:])
        policy.insert(nodes[:300])
        policy.touch(nodes[100:200])
        for held in (LISTS + 5, LISTS + 6, LISTS + 350):
            policy.hold(held)
    together.touch(nodes)
    for node in nodes:
        single.touch([node])
    together.check_integrity()
    assert list(together.order()) == list(single.order())
    assert together._place == single._place
    assert together._promises.came_back == single._promises.came_back


@pytest.mark.parametrize("method", ["hold_all", "release", "remove_all"])
@pytest.mark.parametrize("count", [5, 60])
def test_columns_can_grow_while_somebody_keeps_a_refusal(method: str, count: int) -> None:
    policy = Gittins(100, {})
    policy.grow(600)
    with pytest.raises(CacheError, match="not in") as kept:
        getattr(policy, method)(range(300, 300 + count))
    policy.grow(700)
    assert kept.value.__traceback__ is not None


def test_lists_that_disagree_are_found() -> None:
    tier = Tier(8)
    for key in range(4):
        tier.use(key)
    tier.policy._place[tier.node[2]] = 3
    with pytest.raises(CacheError, match="is in list"):
        tier.policy.check_integrity()


def test_a_life_of_a_million_steps_does_not_overflow_an_age() -> None:
    assert age_of(2**31 - 1) == AGES - 1
    assert math.isfinite(Promises().table().sum())
