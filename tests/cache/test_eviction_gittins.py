"""Gittins: what goes first because of what it has learned, what a full tier admits, and what hints change."""

from __future__ import annotations

import hashlib
import math
import random
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eviction import foreseen
from longshore.boundary import HOST, Status, TransferResult
from longshore.cache import GroupKeys, TieredCache, TierSpec
from longshore.cache.columns import LISTS
from longshore.cache.eviction_policies import Gittins
from longshore.cache.eviction_policies.hit_rates import (
    BACK,
    CLASS,
    ENDS,
    HINT,
    ONCE,
    SHARED,
    USES,
    HitRates,
)
from longshore.errors import CacheError
from longshore.trace.experiment import Experiment
from traffic import synthesize


def uses_of(policy: Gittins, node: int) -> int:
    """How often `node` was used; 0 if it ends a prompt, and was not used since."""
    return ((policy._state[node] & USES) >> 3) - 1


class Tier:
    """A Gittins tier of `slots` slots, told of keys."""

    def __init__(self, slots: int, nodes: int = 4096) -> None:
        names = np.empty(LISTS + nodes, object)
        self.policy = Gittins(slots, names)
        self.policy.grow(LISTS + nodes)
        self.slots, self.keys = slots, names
        self.node: dict[int, int] = {}
        self.tick = 0
        self.free = list(range(LISTS, LISTS + nodes))

    def use(self, key: int, *, leaf: bool = False) -> bool:
        """A request for one chunk; whether it was a hit."""
        self.tick += 1
        self.policy.begin(self.tick, 1, self.node.get(key, 0), [key.to_bytes(32, "little")])
        if key in self.node:
            self.policy.touch([self.node[key]])
            return True
        if len(self.node) == self.slots:
            gone = self.policy.victim()
            self.policy.remove(gone, evicted=self.keys[gone])
            del self.node[int.from_bytes(self.keys[gone], "little")]
            self.free.append(gone)
        node = self.node[key] = self.free.pop()
        self.keys[node] = key.to_bytes(32, "little")
        self.policy.insert([node], leaf=leaf)
        return False


def test_part_of_a_loop_longer_than_the_tier_is_kept() -> None:
    tier = Tier(500)
    hits = [tier.use(key) for _ in range(30) for key in range(700)]
    assert sum(hits[-7000:]) > 0.5 * 7000  # where LRU has none


def test_prompt_ends_that_never_return_go_first_once_known() -> None:
    """Bodies come back 56 prompts later: there is room for 56 of them, and not for their ends as well."""
    tier = Tier(256)
    hits = []
    for prompt in range(600):
        tier.use(5 * prompt, leaf=True)
        for key in range(1, 5):
            tier.use(5 * prompt + key)
            hits.append(prompt >= 56 and tier.use(5 * (prompt - 56) + key))
    assert sum(hits[-800:]) > 0.8 * 800
    ends = [node for node in tier.policy.order() if uses_of(tier.policy, node) == 0]
    assert len(ends) < 30
    tier.use(10_000, leaf=True)
    some = [tier.node[10_000], *(tier.node[5 * 599 + key] for key in range(1, 5))]
    assert tier.policy.outrank(some, 1000).tolist() == [False, True, True, True, True]


def test_what_left_comes_back_with_its_uses() -> None:
    tier = Tier(64)
    for _ in range(3):
        tier.use(7)
    key = tier.node[7]
    tier.policy.remove(key, evicted=tier.keys[key])
    tier.policy.insert([key])
    assert uses_of(tier.policy, key) == 3  # it left and came back within a request
    tier.policy.remove(key, evicted=tier.keys[key])
    tier.policy.begin(4, 1)
    tier.policy.insert([key])
    assert uses_of(tier.policy, key) == 4


def test_resizing_forgets_what_left_and_new_names_do_not() -> None:
    tier = Tier(64)
    tier.use(7)
    node = tier.node[7]
    tier.policy.remove(node, evicted=tier.keys[node])
    tier.policy.resize(64, tier.keys)
    assert len(tier.policy._ghosts) == 1
    tier.policy.resize(128, tier.keys)
    assert len(tier.policy._ghosts) == 0


@given(st.lists(st.tuples(st.sampled_from(["use", "hold", "release"]), st.integers(0, 11), st.integers(1, 12))))
def test_told_together_or_one_by_one_is_the_same(steps: list[tuple[str, int, int]]) -> None:
    single, together = (Gittins(12, np.array([bytes([i % 256]) * 32 for i in range(LISTS + 12)], object)) for _ in "ab")
    for policy in (single, together):
        policy.grow(LISTS + 12)
    nodes = list(range(LISTS, LISTS + 12))
    together.insert(nodes, leaf=True)
    for i, node in enumerate(nodes):
        single.insert([node], leaf=i == 0)
    for tick, (verb, start, count) in enumerate(9 * steps):  # long enough for the clock to go on
        some = nodes[start : start + count]
        for policy in (single, together):
            policy.begin(tick - tick % 3, count)
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
def test_long_paths_in_whole_arrays_give_the_same_result(most: int) -> None:
    dice = random.Random(most)
    names = np.array([dice.randbytes(32) for _ in range(LISTS + 2000)], object)
    single, together = Gittins(1500, names), Gittins(1500, names)
    for policy in (single, together):
        policy.grow(LISTS + 2000)
    out, inside = list(range(LISTS, LISTS + 2000)), list[int]()
    for tick in range(60):
        for policy in (single, together):
            policy.begin(tick + 1, 100)
        new = [out.pop(dice.randrange(len(out))) for _ in range(min(dice.randint(1, most), 1500 - len(inside)))]
        together.insert(new)
        for i, node in enumerate(new):
            single.insert([node], continues=i > 0)
        inside += new
        used = dice.sample(inside, min(most, len(inside)))
        if tick % 2:
            assert list(single.order()) == list(together.order())
            used = [node for node in together.order() if node in set(used)]  # neighbours
        together.touch(used)
        for node in used:
            single.touch([node])
        kept = together.next_victims(most)
        together.hold_victims(kept)
        for node in kept:
            single.hold(node)
        together.release(kept[::-1])
        for node in kept[::-1]:
            single.release([node])
        gone = together.next_victims(dice.randint(1, most))
        together.remove_victims(gone, names[gone].tolist())
        for node in gone:
            assert single.victim() == node
            single.remove(node, evicted=names[node])
        inside = [node for node in inside if node not in set(gone)]
        out += gone
        assert list(single.order()) == list(together.order())
    assert single._spans.starts == together._spans.starts
    assert len(single._ghosts) == len(together._ghosts) > 0


def test_chunk_released_among_older_ones_does_not_age_with_them() -> None:
    policy = Gittins(64, np.array([bytes([i % 256]) * 32 for i in range(LISTS + 512)], object))
    policy.grow(LISTS + 512)
    older, younger, *others = range(LISTS, LISTS + 512)
    policy.insert(others[:63])
    policy.insert([older])  # with which the clock goes on
    policy.insert([younger])
    policy.hold(younger)
    for tick in range(1, 14):
        policy.begin(tick, 64)
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
def test_each_node_is_always_listed_by_kind_and_age(steps: list[tuple[str, int, int]]) -> None:
    names = np.array([i.to_bytes(32, "little") for i in range(LISTS + 200)], object)
    policy = Gittins(150, names)
    policy.grow(LISTS + 200)
    for tick, (verb, start, count) in enumerate(3 * steps):
        policy.begin(max(0, tick - tick % 7 * (tick % 2)), count)
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
        elif gone := policy.next_victims(count):
            policy.remove_victims(gone, names[gone].tolist())
        policy.check_integrity()


def test_counts_halve_after_a_number_of_uses_per_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    factors: list[float] = []
    monkeypatch.setattr(HitRates, "fade", lambda _, by: factors.append(by))
    tier = Tier(64)
    for key in range(3 * 64 * 64):
        tier.use(key)
    assert math.prod(factors) == pytest.approx(0.5**3, rel=0.02)
    assert min(factors) > 0.9  # no step: what is evicted must not depend on when the last one was


def test_uses_within_one_request_count_once() -> None:
    policy = Tier(64).policy
    policy.begin(1, 3)
    policy.insert([LISTS + 1, LISTS])
    policy.touch([LISTS])
    assert uses_of(policy, LISTS) == 1
    policy.begin(2, 3, LISTS + 1)
    for _ in range(3):
        policy.touch([LISTS + 1, LISTS])
    assert uses_of(policy, LISTS) == uses_of(policy, LISTS + 1) == 2


@pytest.mark.parametrize("count", [1, 60, 300])
def test_a_request_that_goes_on_counts_no_use_twice(count: int) -> None:
    tier = Tier(1024)
    policy, nodes = tier.policy, list(range(LISTS, LISTS + count))
    tier.keys[nodes] = [node.to_bytes(32, "little") for node in nodes]
    policy.begin(1, count)
    policy.insert(nodes)
    for tick in (2, 3, 2, 2, 3, 2):  # two requests, in alternation
        policy.begin(tick, count, nodes[0])
        policy.touch(nodes)
        policy.check_integrity()
    assert [uses_of(policy, node) for node in nodes] == [3] * count
    assert [policy._used[node] for node in nodes] == [3] * count


def test_chunk_behind_a_known_one_counts_as_much_used() -> None:
    names = np.array([node.to_bytes(32, "little") for node in range(LISTS + 64)], object)
    for together in (False, True):
        policy = Gittins(64, names)
        policy.grow(LISTS + 64)
        for tick in range(1, 5):
            policy.begin(tick, 2)
            if LISTS in policy:
                policy.touch([LISTS])
            else:
                policy.insert([LISTS], leaf=True)
        policy.remove(LISTS, evicted=names[LISTS])
        policy.begin(5, 3, 0, [names[LISTS + 2], names[LISTS + 1], names[LISTS]])
        if together:
            policy.insert([LISTS, LISTS + 1, LISTS + 2])
        else:
            for i in range(3):
                policy.insert([LISTS + i], leaf=not i, continues=i > 0)
        assert [uses_of(policy, LISTS + i) for i in range(3)] == [5] * 3


def test_host_that_tells_no_requests_takes_no_memory() -> None:
    tier = Tier(8)
    for tick in range(20_000):
        tier.policy.insert([LISTS + tick % 64])
        tier.policy.remove(LISTS + tick % 64)
    assert len(tier.policy._hit_rates.events) < 20_000


def test_long_path_in_use_is_one_chunk_after_another() -> None:
    single, together = Tier(16_384).policy, Tier(16_384).policy
    nodes = list(range(LISTS, LISTS + 600))
    for policy in (single, together):
        policy.keys[nodes] = [node.to_bytes(32, "little") for node in nodes]
        policy.insert(nodes[300:])
        policy.insert(nodes[:300])
        policy.begin(1, 100)
        policy.touch(nodes[100:200])
        policy.begin(2, 600)
        for held in (LISTS + 5, LISTS + 6, LISTS + 350):
            policy.hold(held)
    together.touch(nodes)
    for node in nodes:
        single.touch([node])
    together.check_integrity()
    assert list(together.order()) == list(single.order())
    assert together._state == single._state
    noted = [Counter[int](), Counter[int]()]
    for policy, counts in zip((single, together), noted, strict=True):
        for what, count in zip(policy._hit_rates.events[::2], policy._hit_rates.events[1::2], strict=True):
            counts[what] += count
    assert noted[0] == noted[1]


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
    tier.policy._state[tier.node[2]] = ONCE + 8
    with pytest.raises(CacheError, match="is in list"):
        tier.policy.check_integrity()


def test_ages_of_a_long_life_do_not_overflow() -> None:
    policy = Tier(8).policy
    policy.begin(1, 1)
    policy.insert([LISTS])
    policy.begin(2**31 - 2, 1, LISTS)
    policy.touch([LISTS])
    assert math.isfinite(HitRates().table().sum())
    policy.check_integrity()


# ---------------------------------------------------------------------- admission


class Path:
    """A path of new chunks for a full tier: `admitted` of them get room, made by letting others go."""

    def __init__(self, tier: Tier, tick: int, count: int) -> None:
        self.nodes = list(range(LISTS + 1000, LISTS + 1000 + count))
        self.tier, self.free = tier, 0
        keys = tier.keys[self.nodes].tolist()
        tier.policy.begin(tick, count, 0, keys)
        self.admitted = tier.policy.admit(keys, self.make_room)
        known = tier.policy._ghosts.take_all(keys, forget=False)
        self.remembered = sum(count for count, _, state in known if state)
        tier.policy.insert(self.nodes[: self.admitted][::-1])
        tier.policy.check_integrity()

    def make_room(self, count: int) -> int:
        policy, missing = self.tier.policy, count - self.free
        if missing > 0 and (gone := policy.next_victims(missing)):
            policy.remove_victims(gone, self.tier.keys[gone].tolist())
            self.free += len(gone)
        return min(count, self.free)


def full(count: int) -> Tier:
    """A tier of `count` slots, filled by one request, the first."""
    tier = Tier(count)
    tier.keys[:] = [node.to_bytes(32, "little") for node in range(len(tier.keys))]
    tier.policy.begin(1, count)
    tier.policy.insert(list(range(LISTS, LISTS + count))[::-1])
    return tier


def test_new_chunks_of_lower_promise_are_passed_but_one() -> None:
    tier = full(200)
    for tick in range(2, 400):
        tier.policy.begin(tick, 200, LISTS)
        tier.policy.touch(list(range(LISTS, LISTS + 200))[::-1])
    path = Path(tier, 400, 150)
    assert path.admitted == 1
    assert path.remembered == 149  # what gets a slot has not been let pass
    tier.policy.begin(401, 150)
    tier.policy.insert(path.nodes[1:2])
    assert uses_of(tier.policy, path.nodes[1]) == 2  # it was let pass, and is remembered


def test_new_chunks_take_the_place_of_what_promises_no_more() -> None:
    tier = full(60)
    path = Path(tier, 2, 50)
    assert path.admitted == 49  # the end of a prompt is the first to go
    assert len(tier.policy) == 60 - path.free + 49


def test_refused_chunks_advance_the_policy_as_uses_do() -> None:
    """How soon spans end, counts are halved and hit rates are learned anew must not depend on what is admitted."""
    tier = full(200)
    for tick in range(2, 400):
        tier.policy.begin(tick, 200, LISTS)
        tier.policy.touch(list(range(LISTS, LISTS + 200))[::-1])
    rows = [tier.policy._spans.row(tick) for tick in (398, 399)]
    assert rows[0] != rows[1]  # each of these requests has ended a span
    assert Path(tier, 400, 150).admitted == 1
    tier.policy.begin(401, 1)
    assert tier.policy._spans.row(400) == tier.policy._spans.row(401)
    tier.policy.touch([LISTS])  # a span begins with its first use
    assert tier.policy._spans.row(400) != tier.policy._spans.row(401)


# ---------------------------------------------------------------------- hints


def visits(requests: int, hint_of: Callable[[int, int], int]) -> int:
    """Hits of sessions that come back once, after 40 requests, or never, by turns, in a tier of 60 slots.

    `hint_of` says the number of the hint of a session, and of its first or second request.
    """
    tier, hits = Experiment(Gittins, 60), 0
    tier._reuse_hints = SimpleNamespace(begin=lambda tick, now, said: said)  # type: ignore[assignment]
    for tick in range(requests):
        path = range(4 * tick, 4 * tick + 4)
        tier.serve(path, 0.0, hint_of(tick, 0))  # type: ignore[arg-type]
        if tick >= 40 and tick % 2:
            hits += tier.serve(range(4 * (tick - 40), 4 * (tick - 40) + 4), 0.0, hint_of(tick - 40, 1))  # type: ignore[arg-type]
    return hits


def test_right_hints_gain_hits_and_wrong_ones_lose_none() -> None:
    """Half of the sessions end at once; the tier has room for those that do not, and not for all."""
    dice = random.Random(7)

    def wrong(part: float) -> Callable[[int, int], int]:
        flipped = [dice.random() < part for _ in range(3000)]
        return lambda tick, nth: ENDS if nth or (tick % 2 == 0) != flipped[tick] else BACK + 2

    without, right = visits(3000, lambda tick, nth: 0), visits(3000, wrong(0.0))
    assert right > 1.5 * without
    assert visits(3000, wrong(0.3)) >= without
    assert visits(3000, wrong(0.5)) >= 0.97 * without  # which say nothing
    assert visits(3000, wrong(1.0)) > 1.5 * without  # always wrong is as good as always right
    assert visits(3000, lambda tick, nth: CLASS + (nth or 1 - tick % 2)) > 1.5 * without  # as good, once learned


@pytest.mark.parametrize(
    ("traffic", "count", "seed", "a_third", "all_of_them"),
    [("slow chats", 1200, 0, 1.01, 0.98), ("scans", 700, 5, 1.0, 0.5)],
)
def test_hints_of_other_requests_cost_little(
    traffic: str, count: int, seed: int, a_third: float, all_of_them: float
) -> None:
    """Of the requests a third, or all, have the hint of another one; where much or little is seen of each hint."""
    requests = list(synthesize(traffic, requests=count, seed=seed))
    slots, said = round(0.4 * len({block for each in requests for block in each.hash_ids})), foreseen(requests)

    def hits(wrong: float, *seeds: int) -> float:
        total = 0
        for dice in map(random.Random, seeds):
            tier = Experiment(Gittins, slots)
            for request, right in zip(requests, said, strict=True):
                hint = dice.choice(said) if dice.random() < wrong else right
                total += tier.serve(request.hash_ids, request.timestamp_ms / 1000, hint)
        return total / len(seeds)

    tier = Experiment(Gittins, slots)
    without = sum(tier.serve(request.hash_ids, request.timestamp_ms / 1000, None) for request in requests)
    assert hits(0.3, 1, 2, 3) > a_third * without
    assert hits(1.0, 1) > all_of_them * without


def test_what_left_comes_back_with_its_hint() -> None:
    tier = Tier(64)
    tier.keys[:] = [node.to_bytes(32, "little") for node in range(len(tier.keys))]
    some = list(range(LISTS, LISTS + 60))
    tier.policy.begin(1, 60, hint=ENDS)
    tier.policy.insert(some)
    tier.policy.remove_victims(tier.policy.next_victims(30), tier.keys[some[:30]].tolist())
    tier.policy.remove(some[30], evicted=tier.keys[some[30]])
    tier.policy.check_integrity()
    keys = tier.keys[some[:31]].tolist()
    assert {state >> HINT & 15 for _, _, state in tier.policy._ghosts.take_all(keys, forget=False)} == {ENDS}
    assert {tier.policy._ghosts.take_all([key], forget=False)[0][2] >> HINT & 15 for key in keys} == {ENDS}


def test_chunk_of_two_sessions_keeps_the_sooner_return() -> None:
    tier, node = Tier(64), LISTS
    for tick, hint in ((1, BACK + 1), (3, BACK + 3), (4, ENDS)):
        tier.policy.begin(tick, 1, hint=hint)
        tier.policy.insert([node]) if tick == 1 else tier.policy.touch([node])
        assert tier.policy._state[node] >> HINT & 15 == {1: BACK + 1, 3: SHARED, 4: ENDS}[tick]
    tier.policy.check_integrity()


def test_more_victims_than_were_named_are_refused_before_anything_changes() -> None:
    policy = full(8).policy
    before = list(policy.order())
    for take in (policy.hold_victims, lambda nodes: policy.remove_victims(nodes, policy.keys[nodes].tolist())):
        assert policy.next_victims(2) == before[:2]
        with pytest.raises(CacheError, match="4 victims, but next_victims named 2"):
            take(before[:4])
        assert (len(policy), list(policy.order())) == (8, before)
    policy.check_integrity()


def test_a_tier_without_slots_goes_on() -> None:
    """Host memory is given back while an engine sleeps, and may not come back."""
    cache = TieredCache([TierSpec(HOST, 64, 1)])
    for tick in range(200):
        if tick == 100:
            cache.resize(HOST, 0, discard=True)
        keys = [hashlib.sha256(f"{tick} {at}".encode()).digest() for at in range(8)]
        found = cache.lookup({0: GroupKeys(keys)}, 0.0)
        order = cache.store({0: GroupKeys(keys)}, request_number=found.request_number)[0]
        assert (order.job is None) == (tick >= 100)
        if order.job is not None:
            cache.apply_results([TransferResult(order.job, (Status.OK,) * len(order.positions), 8)], 0.0)
        cache.end_step()
    cache.check_integrity()
