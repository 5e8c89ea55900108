"""The verbs of `TieredCache`: what they refuse changes nothing, and what they take of several groups is of each."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from group_kit import orders, settle

from longshore.boundary import DEVICE, HOST, Slot
from longshore.cache import (
    UNKNOWN_START,
    CacheGroup,
    CacheSettings,
    DeviceCopy,
    GroupKeys,
    Lease,
    PrefetchPolicy,
    Presence,
    Protection,
    TieredCache,
    TierSpec,
)
from longshore.cache.eviction_policies import LRU
from longshore.errors import CacheError, LongshoreError
from residents import residents_of

GROUPS = (CacheGroup(block_size=16), CacheGroup(block_size=16))
FILE = "file"


def keys(name: str, count: int = 3) -> list[bytes]:
    return [f"{name}{position}".encode().ljust(32, b".") for position in range(count)]


def made(groups: tuple[CacheGroup, ...] = GROUPS, slots: int = 16, **settings: Any) -> TieredCache:
    return TieredCache([TierSpec(HOST, slots), TierSpec(FILE, 64)], CacheSettings(groups=groups, **settings))


def stored(cache: TieredCache, *names: str) -> None:
    for group, name in enumerate(names):
        cache.store({group: GroupKeys(keys(name))}, {group: [10 * group + each for each in range(3)]})
    settle(cache)


def books(cache: TieredCache) -> tuple[Any, ...]:
    cache.check_integrity()
    return (
        cache.stats(),
        cache.leases,
        cache.protected,
        cache.jobs_in_flight,
        residents_of(cache),
        cache.counters.copy(),
    )


def test_there_are_twenty_verbs() -> None:
    import subprocess
    import sys

    script = (
        "from longshore.cache import TieredCache as T\n"
        "print(len([n for n in dir(T) if n[0] != '_' and callable(getattr(T, n))]))"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, text=True)
    assert int(said.stdout) <= 20


@pytest.mark.parametrize("known", list(itertools.product((0, 1, 2, 3), repeat=2)))
def test_a_store_of_several_groups_is_one_of_each(known: tuple[int, int]) -> None:
    cache, apart = made(), made()
    for each in (cache, apart):
        for group, count in enumerate(known):
            path = keys("ab"[group], count)
            each.store({group: GroupKeys(path)}, {group: range(count)})
        settle(each)
    paths, blocks = {0: GroupKeys(keys("a")), 1: GroupKeys(keys("b"))}, {0: [0, 1, 2], 1: [3, 4, 5]}
    orders = cache.store(paths, blocks)
    assert [list(order.positions) for order in orders.values()] == [list(range(count, 3)) for count in known]
    for group, path in paths.items():
        apart.store({group: path}, {group: blocks[group]})
    settle(cache)
    settle(apart)
    assert {(each.key, each.parent) for each in residents_of(cache)} == {
        (each.key, each.parent) for each in residents_of(apart)
    }
    cache.check_integrity()


def test_store_of_one_group_may_evict_chunks_of_the_next() -> None:
    cache = TieredCache([TierSpec(HOST, 4, policy=LRU)], CacheSettings(groups=GROUPS))
    cache.store({1: GroupKeys(keys("b"))}, {1: range(3)})
    settle(cache)
    paths, blocks = {0: GroupKeys(keys("a", 4)), 1: GroupKeys(keys("b"))}, {0: range(4), 1: range(4, 7)}
    orders = cache.store(paths, blocks)
    assert len(orders[0].positions) == 4
    assert (orders[1].stored_prefix, list(orders[1].already_stored), orders[1].job) == (0, [], None)
    with pytest.warns(DeprecationWarning, match="ScheduledStore.kept was renamed: use stored_prefix"):
        assert orders[1].kept == 0
    settle(cache)
    assert {each.key for each in residents_of(cache)} == set(keys("a", 4))
    cache.check_integrity()


WRONG_STORES: dict[str, tuple[Any, Any]] = {
    "keys of both groups": ({0: GroupKeys(keys("x")), 1: GroupKeys(keys("x"))}, {0: [0, 1, 2], 1: [3, 4, 5]}),
    "a path of two": (
        {0: GroupKeys(keys("x")), 1: GroupKeys([keys("a")[1], keys("b")[0]])},
        {0: [0, 1, 2], 1: [3, 4]},
    ),
    "a prompt of a half": (
        {0: GroupKeys(keys("x")), 1: GroupKeys(keys("y"), prompt_end=1.5)},
        {0: [0, 1, 2], 1: [3, 4, 5]},
    ),  # type: ignore[arg-type]
    "blocks of no group": ({0: GroupKeys(keys("x"))}, {0: [0, 1, 2], 1: [3]}),
    "too few blocks": ({0: GroupKeys(keys("x")), 1: GroupKeys(keys("y"))}, {0: [0, 1, 2], 1: [3, 4]}),
    "no blocks": ({0: GroupKeys(keys("x")), 1: GroupKeys(keys("y"))}, {0: [0, 1, 2]}),
    "half blocks": ({0: GroupKeys(keys("x"))}, {0: [0.5, 1, 2]}),
    "a group that is none": ({0: GroupKeys(keys("x")), 7: GroupKeys(keys("y"))}, {0: [0, 1, 2], 7: [3, 4, 5]}),
    "a group by name": ({"a": GroupKeys(keys("x"))}, {"a": [0, 1, 2]}),
    "plain keys": ({0: keys("x")}, {0: [0, 1, 2]}),
    "no keys": ({0: GroupKeys(None)}, {0: []}),  # type: ignore[arg-type]
    "a list of paths": ([GroupKeys(keys("x"))], [[0, 1, 2]]),
    "no mapping of blocks": ({0: GroupKeys(keys("x"))}, [[0, 1, 2]]),
    "a first of a half": ({0: GroupKeys(keys("x"), 0.5)}, {0: [0, 1, 2]}),  # type: ignore[arg-type]
    "slid past a path": ({0: GroupKeys(keys("x"), past_window=keys("a"))}, {0: [0, 1, 2]}),
}


@pytest.mark.parametrize("wrong", WRONG_STORES)
def test_a_store_that_is_refused_changes_nothing(wrong: str) -> None:
    cache = made(prompt_only=True)
    stored(cache, "a", "b")
    before, (paths, blocks) = books(cache), WRONG_STORES[wrong]
    with pytest.raises(CacheError):
        cache.store(paths, blocks)
    assert books(cache) == before


WRONG_LOADS: dict[str, Any] = {
    "blocks for what the host reads": lambda cache, lease: cache.load({0: GroupKeys(keys("a"))}, {0: [7, 8, 9]}),
    "plain keys": lambda cache, lease: cache.load({0: keys("a")}),
    "nothing of a group": lambda cache, lease: cache.load({0: None, 1: GroupKeys(keys("b"))}),
    "a first": lambda cache, lease: cache.load({0: GroupKeys(keys("a"), 2)}),
    "a skip of what the host reads": lambda cache, lease: cache.load({0: GroupKeys(keys("a"))}, skip=1),
    "chunks and copies": lambda cache, lease: cache.load(
        {0: DeviceCopy([Slot(DEVICE, 0, 1)]), 1: GroupKeys(keys("b"))}, {0: [2]}
    ),
    "blocks of no copy": lambda cache, lease: cache.load({0: DeviceCopy([Slot(DEVICE, 0, 1)])}, {0: [2], 1: [3]}),
    "blocks of another group": lambda cache, lease: cache.load(lease, {1: [7, 8, 9]}),
    "blocks of two groups": lambda cache, lease: cache.load(lease, {0: [7, 8, 9], 1: [1]}),
    "no blocks": lambda cache, lease: cache.load(lease),
    "no lease": lambda cache, lease: cache.load(Lease(99), {0: [7]}),
}


@pytest.mark.parametrize("wrong", WRONG_LOADS)
def test_a_load_that_is_refused_changes_nothing(wrong: str) -> None:
    cache = made()
    stored(cache, "a", "b")
    lease = cache.lookup({0: GroupKeys(keys("a"))}, 1.0).lease
    before = books(cache)
    with pytest.raises(LongshoreError):
        WRONG_LOADS[wrong](cache, lease)
    assert books(cache) == before
    assert not orders(cache)


WRONG_LOOKUPS: dict[str, tuple[Any, dict[str, Any]]] = {
    "a key that is none behind what is found": ({0: GroupKeys(keys("a")), 1: GroupKeys([*keys("b"), "x"])}, {}),  # type: ignore[list-item]
    **{
        f"a key that is none, {position} behind what is found": (
            {0: GroupKeys(keys("a")), 1: GroupKeys([*keys("b"), *keys("y", position), "x", *keys("z", 9)])},  # type: ignore[list-item]
            {},
        )
        for position in range(1, 9)
    },
    "a key that is none before a first behind all": ({0: GroupKeys([*keys("a"), "x"], 4)}, {}),  # type: ignore[list-item]
    "a key that is none before the first": ({0: GroupKeys(["x", *keys("a")], 1)}, {}),  # type: ignore[list-item]
    "one group of three": ({0: GroupKeys(keys("a"), device=())}, {}),
    "a group that is none": ({9: GroupKeys(keys("a"))}, {}),
    "a first for all groups": ({0: GroupKeys(keys("a"), 1), 1: GroupKeys(keys("b"))}, {}),
    "a first of single chunks": ({0: GroupKeys(keys("a"), 1)}, {"independent": True}),
    "protect a word": ({0: GroupKeys(keys("a"))}, {"protect": "none"}),
    "a request number that was not given": ({0: GroupKeys(keys("a"))}, {"request_number": 99}),
    "a request number that is a word": ({0: GroupKeys(keys("a"))}, {"request_number": "x"}),
}


@pytest.mark.parametrize("wrong", WRONG_LOOKUPS)
def test_refused_lookup_changes_nothing_and_ends_no_load(wrong: str) -> None:
    cache = made(load_timeout=2.0)
    stored(cache, "a", "b")
    lease = cache.lookup({0: GroupKeys(keys("a"))}, 1.0).lease
    cache.load(lease, {0: [20, 21, 22]})
    cache.take_commands()
    before, (paths, how) = books(cache), WRONG_LOOKUPS[wrong]
    for _ in range(2):
        with pytest.raises(CacheError):
            cache.lookup(paths, 50.0, **how)
    assert books(cache) == before
    assert cache.progress(lease).outcome is None, "time has not passed"


@pytest.mark.parametrize("paths", [{0: "a"}, {0: "a", 1: "b"}])
@pytest.mark.parametrize("independent", [False, True])
def test_lookup_keeps_chunks_until_its_step_ends(paths: dict[int, str], independent: bool) -> None:
    cache = made(slots=6)
    stored(cache, "a", "b")
    asked = {group: GroupKeys(keys(name)) for group, name in paths.items()}
    found = cache.lookup(asked, 1.0, protect=Protection.STEP, independent=independent)
    assert found.lease is None
    assert (cache.leases, cache.protected) == (0, 3 * len(paths))
    cache.store({0: GroupKeys(keys("x", 6))}, {0: range(6)}, before_eviction=True)
    settle(cache)
    for name in paths.values():
        where = cache.lookup({0: GroupKeys(keys(name))}, 1.0, protect=Protection.NONE, independent=True).residency[0]
        assert set(where.presences) == {Presence.HOST}
    cache.end_step()
    assert cache.protected == 0


def test_slots_of_a_residency_from_before_a_reset_are_nobodys() -> None:
    cache = made()
    stored(cache, "a")
    where = cache.lookup({0: GroupKeys(keys("a"))}, 1.0, protect=Protection.NONE, independent=True).residency[0]
    assert where.slots() is not None
    cache.reset()
    stored(cache, "b")
    assert where.slots() is None


def test_a_prefetch_waits_from_the_time_that_it_is_told() -> None:
    cache = made()
    cache.adopt(FILE, [(slot, key, above, 0) for slot, (key, above) in enumerate(zip(keys("a"), [None, *keys("a")]))])  # noqa: B905
    lease = cache.lookup({0: GroupKeys(keys("a"))}, 1.0).lease
    cache.prefetch(lease, 100.0, policy=PrefetchPolicy.TIMEOUT, timeout=5.0)
    cache.apply_results((), 100.0)
    assert not cache.progress(lease).is_over
    settle(cache, 101.0)
    assert cache.progress(lease).leading(HOST) == 3


def test_invalid_foreign_slots_are_refused_before_anything_is_adopted() -> None:
    cache = made()
    before = books(cache)
    with pytest.raises(CacheError, match="expected slots in"):
        cache.adopt(FILE, [(0, keys("a")[0], None, 0)], other_scope_slots=[99])
    assert books(cache) == before


def test_a_store_of_known_chunks_is_a_use_of_them() -> None:
    cache = TieredCache([TierSpec(HOST, 3, policy=LRU)], CacheSettings())
    a, b, c = keys("a", 2), keys("b", 1), keys("c", 1)
    for path in (a, b, a, c):
        cache.store({0: GroupKeys(path)}, {0: range(len(path))})
        settle(cache)
    assert {each.key for each in residents_of(cache)} == {*a, *c}


def test_lookup_of_a_host_that_omits_what_precedes_keys() -> None:
    cache, path = made(), keys("a")
    stored(cache, "a")
    told = cache.lookup({0: GroupKeys(path, 1)}, 0.0)
    untold = cache.lookup({0: GroupKeys(path[1:], UNKNOWN_START)}, 0.0)
    assert untold.num_chunks == told.num_chunks == len(path) - 1
    assert (list(untold.ancestor_keys), list(told.ancestor_keys)) == ([path[0]], [])
    assert cache.lookup({0: GroupKeys(keys("b"), UNKNOWN_START)}, 0.0).num_chunks == 0
    with pytest.raises(CacheError, match="start"):
        cache.lookup({0: GroupKeys((), UNKNOWN_START)}, 0.0)
    with pytest.raises(CacheError, match="start"):
        cache.store({0: GroupKeys(path[1:], UNKNOWN_START)})
    for lease in (told.lease, untold.lease):
        assert lease is not None
        cache.release(lease)
    cache.check_integrity()


@pytest.mark.parametrize("first", range(2, 6))
def test_lookup_of_a_host_that_omits_orphans_parents(first: int) -> None:
    cache, path = made(), keys("a", 6)
    cache.store({0: GroupKeys(path, 2)}, {0: range(4)})
    settle(cache)
    found = cache.lookup({0: GroupKeys(path[first:], UNKNOWN_START)}, 0.0)
    assert list(found.ancestor_keys) == path[1:first]
    assert found.num_chunks == 6 - first
    assert found.lease is not None
    cache.release(found.lease)
    cache.check_integrity()
