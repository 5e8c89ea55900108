"""What every eviction policy must do; and what ARC does beyond it."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore.cache.columns import LISTS, filled
from longshore.cache.eviction_policies import ARC, LRU, EvictionPolicy, Gittins
from longshore.cache.eviction_policies.ghosts import Ghosts
from longshore.cache.eviction_policies.partitioned import PartitionedByPriority, PartitionedBySize
from longshore.errors import CacheError, IntegrityError
from longshore.trace.experiment import REFERENCES

SLOTS = 8
A, B, C, D = range(LISTS, LISTS + 4)
NODES = range(LISTS, LISTS + 12)


def make(kind: type[EvictionPolicy], slots: int = SLOTS) -> EvictionPolicy:
    names = np.empty(LISTS + 64, object)
    names[:] = [i.to_bytes(32, "little") for i in range(LISTS + 64)]
    policy = kind(slots, names)
    policy.grow(LISTS + 64)
    return policy


USUAL = 35
"""The priority of the first policy; priorities are stored xor this one."""


def banded(slots: int = SLOTS, kind: type[EvictionPolicy] = LRU) -> PartitionedByPriority:
    """Priorities over `kind`; no node has one of its own yet."""
    first = make(kind, slots)
    return PartitionedByPriority(slots, first.keys, kind, first, USUAL, filled(LISTS + 64, dtype=np.uint8))


def sized(kind: type[EvictionPolicy] = LRU) -> PartitionedBySize:
    """Two image sizes over `kind`; every third node is of the second."""
    parts = [make(kind) for _ in range(2)]
    policy = PartitionedBySize(
        SLOTS, parts[0].keys, parts, lambda nodes: [int(node % 3 == 0 and node > D) for node in nodes]
    )
    policy.grow(LISTS + 64)
    return policy


MAKERS = {
    "LRU": lambda: make(LRU),
    "ARC": lambda: make(ARC),
    "Gittins": lambda: make(Gittins),
    "banded": banded,
    "sized": sized,
}


@pytest.fixture(params=MAKERS)
def policy(request: pytest.FixtureRequest) -> EvictionPolicy:
    policy: EvictionPolicy = MAKERS[request.param]()
    policy.insert([A, B, C])
    return policy


def offer_victims(policy: EvictionPolicy, count: int, let_go: Callable[[int], bool]) -> int:
    """Evict `count` nodes one by one, those that `let_go` does not refuse; how many were evicted."""
    gone = 0
    while gone < count and (node := policy.victim()):
        if let_go(node):
            gone += 1
        else:
            policy.hold(node)
    return gone


def evict(policy: EvictionPolicy, count: int, *, refuse: tuple[int, ...] = ()) -> list[int]:
    gone: list[int] = []

    def let_go(node: int) -> bool:
        if node in refuse:
            return False
        policy.remove(node, evicted=policy.keys[node])
        gone.append(node)
        return True

    assert offer_victims(policy, count, let_go) == len(gone)
    policy.check_integrity()
    return gone


def test_the_oldest_go_first_and_no_more_than_asked_for(policy: EvictionPolicy) -> None:
    assert evict(policy, 0) == []
    assert evict(policy, 2) == [A, B]
    assert (A in policy, C in policy, len(policy)) == (False, True, 1)
    assert evict(policy, 5) == [C]


def test_use_keeps(policy: EvictionPolicy) -> None:
    policy.touch([A])
    assert evict(policy, 2) == [B, C]


def test_what_is_refused_is_held_and_not_asked_for_again(policy: EvictionPolicy) -> None:
    asked: list[int] = []
    assert offer_victims(policy, 3, lambda node: bool(asked.append(node))) == 0
    assert asked == [A, B, C]
    assert offer_victims(policy, 3, lambda node: bool(asked.append(node))) == 0
    assert asked == [A, B, C]
    assert all(map(policy.is_held, (A, B, C)))
    assert len(policy) == 3


def test_what_is_released_goes_first(policy: EvictionPolicy) -> None:
    policy.hold(C)
    policy.hold(C)
    policy.release([C, A])
    assert evict(policy, 2) == [C, A]


def test_use_ends_a_hold(policy: EvictionPolicy) -> None:
    policy.hold(A)
    policy.touch([A])
    assert not policy.is_held(A)
    assert evict(policy, 3) == [B, C, A]


def test_a_held_node_can_leave(policy: EvictionPolicy) -> None:
    policy.hold(A)
    policy.remove(A)
    assert (len(policy), A in policy) == (2, False)
    policy.insert([A])
    assert sorted(evict(policy, 3)) == [A, B, C]


@given(
    kind=st.sampled_from(sorted(MAKERS)),
    some=st.lists(st.sampled_from(NODES), unique=True),
    held=st.sets(st.sampled_from(NODES)),
)
def test_many_are_held_or_leave_together_as_one_by_one(kind: str, some: list[int], held: set[int]) -> None:
    for verb in ("hold", "remove"):
        single, together = MAKERS[kind](), MAKERS[kind]()
        for policy in (single, together):
            policy.insert(list(NODES))
            for node in held:
                policy.hold(node)
        getattr(together, f"{verb}_all")(some)
        for node in some:
            getattr(single, verb)(node)
        assert list(together.order()) == list(single.order())
        assert [together.is_held(node) for node in NODES] == [single.is_held(node) for node in NODES]
        assert len(together) == len(single)
        together.check_integrity()
        with pytest.raises(CacheError, match="is not in the policy"):
            getattr(together, f"{verb}_all")([*NODES, LISTS + 40])
        together.check_integrity()


def test_neighbours_that_are_used_together_keep_their_order(policy: EvictionPolicy) -> None:
    policy.insert([D])
    policy.touch([B, C, A])
    assert evict(policy, 4) == [D, B, C, A]


def test_what_lets_another_go_may_release_it_meanwhile(policy: EvictionPolicy) -> None:
    policy.hold(A)
    gone: list[int] = []

    def let_go(node: int) -> bool:
        policy.remove(node, evicted=policy.keys[node])
        if node == B:
            policy.release([A])
        gone.append(node)
        return True

    offer_victims(policy, 3, let_go)
    assert gone == [B, A, C]


def evict_together(policy: EvictionPolicy, count: int) -> list[int]:
    """The same as `evict`, as many at once as the policy names."""
    gone: list[int] = []
    while len(gone) < count and (nodes := policy.next_victims(count - len(gone))):
        policy.remove_victims(nodes, [policy.keys[node] for node in nodes])
        gone += nodes
        policy.check_integrity()
    return gone


def test_who_is_in_is_told_of_all_nodes_at_once(policy: EvictionPolicy) -> None:
    policy.hold(B)
    policy.remove(C)
    assert policy.resident(D + 1).tolist() == [node in (A, B) for node in range(D + 1)]


def test_leading_victims_leave_together_and_others_stay_in_order(policy: EvictionPolicy) -> None:
    assert policy.next_victims(2) == [A, B]
    policy.remove_victims([A], [policy.keys[A]])
    assert (A in policy, len(policy), list(policy.order())) == (False, 2, [B, C])
    policy.check_integrity()
    assert evict_together(policy, 5) == [B, C]
    assert policy.next_victims(1) == []


def test_leading_victims_are_kept_together_and_return_in_order(policy: EvictionPolicy) -> None:
    policy.hold_victims(policy.next_victims(2))
    assert [policy.is_held(node) for node in (A, B, C)] == [True, True, False]
    assert (len(policy), policy.next_victims(3)) == (3, [C])
    policy.check_integrity()
    policy.release([A, B, C])
    assert policy.next_victims(3) == [B, A, C]
    policy.check_integrity()


@given(
    kind=st.sampled_from(sorted(MAKERS)),
    rounds=st.lists(st.tuples(st.permutations(NODES[:SLOTS]), st.integers(0, 5), st.integers(0, SLOTS)), max_size=6),
)
def test_batched_victims_go_in_the_order_of_single_ones(kind: str, rounds: list[tuple[list[int], int, int]]) -> None:
    single, together = MAKERS[kind](), MAKERS[kind]()
    for nodes, used, count in rounds:
        for policy in (single, together):
            policy.insert([node for node in nodes if node not in policy])
            policy.touch(nodes[:used])
        assert evict_together(together, count) == evict(single, count)
        assert list(together.order()) == list(single.order())


@pytest.mark.parametrize("verb", ["touch", "release"])
def test_an_unknown_node_is_an_error(policy: EvictionPolicy, verb: str) -> None:
    with pytest.raises(CacheError, match="is not in the policy"):
        getattr(policy, verb)([D])
    for single in (policy.hold, policy.remove):
        with pytest.raises(CacheError, match="is not in the policy"):
            single(D)
    policy.check_integrity()


def test_a_node_comes_in_once_and_lists_are_no_nodes(policy: EvictionPolicy) -> None:
    with pytest.raises(CacheError, match="already in the policy"):
        policy.insert([D, NODES[5], D])
    for node in (A, 1):
        with pytest.raises(CacheError, match="already in the policy"):
            policy.insert([node])
    assert sorted(policy.order()) == [A, B, C]


@given(
    kind=st.sampled_from([*sorted(MAKERS), *sorted(REFERENCES)]),
    steps=st.lists(
        st.tuples(st.sampled_from(["insert", "touch", "hold", "release", "remove", "evict"]), st.sampled_from(NODES))
    ),
)
def test_random_lives_keep_the_books(kind: str, steps: list[tuple[str, int]]) -> None:
    policy: EvictionPolicy = MAKERS[kind]() if kind in MAKERS else make(REFERENCES[kind])
    if isinstance(policy, PartitionedByPriority):
        for node in NODES[1::2]:
            policy.priorities[node] = (node % 3) ^ USUAL
    resident: set[int] = set()
    held: set[int] = set()
    for verb, node in steps:
        if verb == "insert" and node not in resident and len(resident) < SLOTS:
            policy.insert([node])
            resident.add(node)
        elif verb == "evict":
            gone = evict(policy, 1, refuse=(node,))
            assert bool(gone) == bool(resident - held - {node})
            assert resident.issuperset(gone)
            assert held.isdisjoint(gone)
            resident -= set(gone)
            held = {each for each in resident if policy.is_held(each)}
        elif verb in ("touch", "release") and node in resident:
            getattr(policy, verb)([node])
            held.discard(node)
        elif verb in ("hold", "remove") and node in resident:
            getattr(policy, verb)(node)
            held.discard(node)
            if verb == "hold":
                held.add(node)
            else:
                resident.discard(node)
        assert {each for each in NODES if each in policy} == resident
        assert set(policy.order()) == resident - held
        assert len(policy) == len(resident)
        policy.check_integrity()


WIDE = 2000
"""Nodes of the tests of repetitions: more than any number from which policies work by whole arrays."""


KINDS: dict[str, type[EvictionPolicy]] = {"LRU": LRU, "ARC": ARC, "Gittins": Gittins}


def wide(name: str) -> EvictionPolicy:
    names = np.empty(LISTS + WIDE, object)
    names[:] = [i.to_bytes(32, "little") for i in range(LISTS + WIDE)]
    kind = KINDS[name.rsplit(maxsplit=1)[-1]]
    policy: EvictionPolicy = kind(WIDE, names)
    if name.startswith("sized"):
        policy = PartitionedBySize(
            WIDE, names, [kind(WIDE, names) for _ in range(2)], lambda some: [node % 2 for node in some]
        )
    policy.grow(LISTS + WIDE)
    if name.startswith("banded"):
        policy = PartitionedByPriority(
            WIDE,
            names,
            kind,
            policy,
            USUAL,
            np.array([(30 + node % 3) ^ USUAL for node in range(LISTS + WIDE)], np.uint8).data,
        )
    return policy


@pytest.mark.parametrize("size", [3, 5, 24, 48, 64, 256, 300])
@pytest.mark.parametrize("name", [f"{how} {kind}" for how in ("one", "banded", "sized") for kind in KINDS])
def test_a_node_named_twice_in_a_call_counts_once(name: str, size: int) -> None:
    draw = random.Random(f"{name} {size}")
    plain, doubled = wide(name), wide(name)
    nodes = list(range(LISTS, LISTS + 6 * size))
    for policy in (plain, doubled):
        policy.insert(nodes[::-1])
    for verb in ("touch", "hold_all", "release", "touch", "hold_all", "touch", "hold_all", "release", "remove_all"):
        some = draw.sample(nodes, size)
        # Of what is used the last mention counts, of all else the first.
        twice = sorted([*some, *draw.choices(some, k=size)], key=some.index)
        again = draw.sample(twice, len(twice))
        once = list(dict.fromkeys(again[::-1]))[::-1] if verb == "touch" else list(dict.fromkeys(again))
        for policy, named in ((plain, once), (doubled, again)):
            getattr(policy, verb)(named)
            policy.check_integrity()
        nodes = nodes if verb != "remove_all" else [node for node in nodes if node not in some]
        assert list(doubled.order()) == list(plain.order()), verb
        assert [doubled.is_held(node) for node in nodes] == [plain.is_held(node) for node in nodes]
    for verb in ("hold", "remove", "remove"):
        for policy in (plain, doubled):
            named = policy.next_victims(max(2, size // 4))
            named += [] if policy is plain else named
            if verb == "hold":
                policy.hold_victims(named)
            else:
                policy.remove_victims(named, [policy.keys[node] for node in named])
            policy.check_integrity()
        assert list(doubled.order()) == list(plain.order()), verb
        assert len(doubled) == len(plain)


@pytest.mark.parametrize("name", ["one LRU", "one ARC", "one Gittins", "banded LRU", "sized ARC"])
def test_node_inserted_twice_is_an_error_and_none_enters(name: str) -> None:
    policy = wide(name)
    for nodes in ([A, B, A], [A, B, C, 1], [*range(A, A + 300), A + 7]):
        with pytest.raises(CacheError, match="already in the policy"):
            policy.insert(nodes)
        assert (len(policy), list(policy.order())) == (0, [])
        policy.check_integrity()


@pytest.mark.parametrize("kind", KINDS)
def test_a_walk_along_a_damaged_list_ends(kind: str) -> None:
    policy = MAKERS[kind]()
    policy.insert([A, B, C])
    policy._linked.after[C] = A  # type: ignore[attr-defined]
    with pytest.raises(IntegrityError, match="does not lead back"):
        list(policy.order())
    with pytest.raises(CacheError):
        policy.check_integrity()


def test_arc_keeps_what_was_seen_often_through_a_scan() -> None:
    arc = make(ARC, 4)
    arc.insert([A, B])
    arc.touch([A, B])
    for node in range(LISTS + 10, LISTS + 30):
        if len(arc) == 4:
            evict(arc, 1)
        arc.insert([node])
    assert A in arc
    assert B in arc


def test_arc_gives_room_to_the_list_whose_ghosts_return() -> None:
    arc = make(ARC, 4)
    assert isinstance(arc, ARC)
    arc.insert([A, B, C, D])
    assert evict(arc, 1) == [A]
    arc.insert([A])  # seen once, evicted, and back: recency deserves more
    assert arc.target == 1
    arc.touch([B])
    evict(arc, 4)
    arc.insert([B])  # seen often, evicted, and back
    assert arc.target == 0
    arc.check_integrity()


def test_arc_learns_more_from_a_ghost_of_rarer_kind() -> None:
    arc = make(ARC, 8)
    assert isinstance(arc, ARC)
    arc.insert([A, *NODES[4:8]])
    arc.touch(NODES[4:8])
    assert evict(arc, 5) == [A, *NODES[4:8]]
    arc.insert([A])  # the only one seen once, beside four seen often
    assert arc.target == 4


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_many_ghosts_at_once_are_as_many_one_by_one(count: int) -> None:
    single, together = Ghosts(3), Ghosts(3)
    keys = [bytes([i]) * 32 for i in range(12)]
    for start in range(0, 12, count):
        for key in keys[start : start + count]:
            single.add(key, 1)
        together.add_all(keys[start : start + count], 1)
        together.check_integrity()
        assert together.among(keys).tolist() == single.among(keys).tolist()
    assert together.counts == single.counts == [0, 3, 0]
    assert together.among(keys).tolist() == [False] * 9 + [True] * 3


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 12))))
def test_ghosts_are_the_last_evicted_and_not_taken_back(steps: list[tuple[int, int]]) -> None:
    ghosts = Ghosts(3)
    places: dict[int, list[bytes | None]] = {1: [None] * 3, 2: [None] * 3}
    at = {1: 0, 2: 0}
    for which, i in steps:
        key = bytes([i]) * 32
        left = next((each for each, keys in places.items() if key in keys), 0)
        if which and not left:
            ghosts.add(key, which)
            places[which][at[which]] = key
            at[which] = (at[which] + 1) % 3
        elif not which:
            assert ghosts.take(key) == left
            places = {each: [None if k == key else k for k in keys] for each, keys in places.items()}
        assert ghosts.counts == [0, 3 - places[1].count(None), 3 - places[2].count(None)]
        ghosts.check_integrity()


def test_the_lowest_priority_goes_first_whatever_its_age() -> None:
    policy = banded()
    policy.priorities[A], policy.priorities[B] = 90 ^ USUAL, 10 ^ USUAL
    policy.insert([C, B, A])
    policy.touch([B])
    assert evict(policy, 3) == [B, C, A]


@pytest.mark.parametrize("kind", [LRU, ARC, Gittins])
def test_batch_of_several_priorities_equals_one_by_one(kind: type[EvictionPolicy]) -> None:
    """More of them than are looked at one by one."""
    nodes = list(range(LISTS, LISTS + 60))
    singly, together = banded(64, kind), banded(64, kind)
    for policy in (singly, together):
        for node in nodes[::3]:
            policy.priorities[node] = 90 ^ USUAL
        policy.insert(nodes)
    together.touch(nodes)
    together.hold_all(nodes[:55])
    together.release(nodes[:50])
    for node in nodes:
        singly.touch([node])
    for node in nodes[:55]:
        singly.hold(node)
    for node in nodes[:50]:
        singly.release([node])
    together.check_integrity()
    assert [together.is_held(node) for node in nodes] == [singly.is_held(node) for node in nodes]
    order = list(together.order())
    assert order == list(singly.order())
    assert set(order[-18:]) == {node for node in nodes[::3] if node not in nodes[50:55]}


def test_changed_priority_moves_a_node_to_go_first_there() -> None:
    policy = banded()
    policy.insert([A, B, C])
    for node in (C, A, D):  # which is not in
        policy.priorities[node] = 90 ^ USUAL
        policy.move(np.array([node], np.int32))
    policy.check_integrity()
    assert evict(policy, 3) == [B, A, C]
