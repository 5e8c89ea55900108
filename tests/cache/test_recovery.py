"""Adopting what a tier holds at start, beside a plain model of it: who can be reached, and who goes first."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from cache_kit import key, lookup, parent, path_of, store
from group_kit import end, orders
from hypothesis import given
from hypothesis import strategies as st
from object_state import state_of

from depth import examples
from longshore.boundary import FILE, HOST, Key, Slabs, StoredChunk
from longshore.cache import CacheSettings, TieredCache, TierSpec, WritePolicy
from longshore.cache.eviction_policies import POLICIES
from longshore.errors import CacheError
from residents import residents_of

THIRD = "third"
SMALL, LARGE = 0, 1
SLABS = Slabs(12, (3, 12), 40)

paths = st.text("abc", min_size=1, max_size=9)


class Copy(NamedTuple):
    """A copy that a restart finds, by its path; the first branch says the image size, where there are several."""

    slot: int
    path: str
    size_class: int = 0

    @property
    def found(self) -> StoredChunk:
        return StoredChunk(self.slot, key(self.path), parent(key(self.path)), self.size_class)


def taken(found: list[Copy]) -> list[str]:
    """Model: paths in the order of age, oldest first.

    From the newest to the oldest, each with all that is right before it, heads first; but none twice.
    """
    there = {copy.path for copy in found}
    newest: list[str] = []
    for copy in reversed(found):
        row = [copy.path]
        while row[0][:-1] in there:
            row.insert(0, row[0][:-1])
        newest += [each for each in row if each not in newest]
    return newest[::-1]


def adrift(warm: list[Copy], cold: list[Copy]) -> set[str]:
    """Model: of what lies in two tiers, orphans and what is behind them. A chunk is that behind a warmer one, too."""
    warmer, colder = ({copy.path for copy in each} for each in (warm, cold))

    def is_adrift(path: str) -> bool:
        above = path[:-1]
        return bool(above) and (above not in (colder if path in colder else colder | warmer) or is_adrift(above))

    return set(filter(is_adrift, warmer | colder))


def first_to_go(found: list[str], adrift: set[str]) -> list[str]:
    return sorted(found, key=lambda path: path not in adrift)


def order_of(cache: TieredCache, tier: int) -> list[str]:
    store = cache._state
    return [path_of(store.index.key[node]) for node in store.policies[tier].order()]


def where(cache: TieredCache, tier: str) -> dict[str, int]:
    return {path_of(each.key): each.slot.index for each in residents_of(cache) if each.slot.tier == tier}


def check(cache: TieredCache, tier: int, found: list[Copy], expected: list[str]) -> None:
    name = (HOST, FILE, THIRD)[tier]
    cache.check_integrity()
    assert order_of(cache, tier) == expected
    assert where(cache, name) == {copy.path: copy.slot for copy in found if copy.path in expected}


def check_matches(cache: TieredCache, served: set[str], asked: set[str]) -> None:
    for path in asked:
        keys = [key(path[:end]) for end in range(1, len(path) + 1)]
        length = next((end for end in range(len(path)) if path[: end + 1] not in served), len(path))
        match = lookup(cache, keys, 0.0)
        assert match.num_chunks == length
        if match.lease is not None:
            cache.release(match.lease)


@st.composite
def lists_found(draw: st.DrawFn, slots: int = 40) -> list[Copy]:
    """Different paths, with and without what is before them, in any slots and any order."""
    some = draw(st.lists(paths, max_size=8))
    whole = {path[:end] for path in some for end in range(1, len(path) + 1)}
    kept = draw(st.permutations(sorted(whole)))[:slots]
    gone = draw(st.sets(st.sampled_from(kept), max_size=3)) if kept else set()
    kept = [path for path in kept if path not in gone]
    return [Copy(slot, path) for slot, path in zip(draw(st.permutations(range(slots))), kept, strict=False)]


@pytest.mark.parametrize("policy", POLICIES)
@examples(30)
@given(found=lists_found())
def test_recovered_chunks_are_adopted_and_oldest_orphans_evicted_first(policy: str, found: list[Copy]) -> None:
    tiers = [TierSpec(HOST, 4, 4096, POLICIES[policy]), TierSpec(FILE, 40, 4096, POLICIES[policy])]
    cache = TieredCache(tiers, CacheSettings())
    orphans, paths = adrift([], found), {copy.path for copy in found}
    assert cache.adopt(FILE, [copy.found for copy in found]) == len(found)
    check(cache, 1, found, first_to_go(taken(found), orphans))
    check_matches(cache, paths - orphans, paths)


@examples(40)
@given(third=lists_found(), file=lists_found(), policy=st.sampled_from(sorted(POLICIES)))
def test_recovery_beside_a_warmer_tier_with_same_chunks_or_descendants(
    third: list[Copy], file: list[Copy], policy: str
) -> None:
    tiers = [TierSpec(name, 40, 4096, POLICIES[policy]) for name in (HOST, FILE, THIRD)]
    cache = TieredCache(tiers, CacheSettings(backup=WritePolicy.THROUGH, admission=False))
    orphans, paths = adrift(file, third), {copy.path for copy in (*third, *file)}
    assert cache.adopt(THIRD, [copy.found for copy in third]) == len(third)
    assert cache.adopt(FILE, [copy.found for copy in file]) == len(file)
    check(cache, 2, third, first_to_go(taken(third), orphans))
    check(cache, 1, file, first_to_go(taken(file), orphans))
    check_matches(cache, paths - orphans, paths)
    cache.back_up_all()
    moved = [path_of(item.key) for each in cache.take_commands() for item in getattr(each, "items", ())]
    assert sorted(moved) == sorted(paths - {copy.path for copy in third} - orphans)


@examples(40)
@given(data=st.data(), policy=st.sampled_from(sorted(POLICIES)))
def test_images_of_several_sizes_each_keep_their_order(data: st.DataObject, policy: str) -> None:
    found = []
    free = {SMALL: list(range(0, 20 * 4)), LARGE: list(range(20 * 4, 40 * 4, 4))}
    for copy in data.draw(lists_found(20)):
        size_class = LARGE if copy.path[0] == "a" else SMALL
        found.append(
            Copy(free[size_class].pop(data.draw(st.integers(0, len(free[size_class]) - 1))), copy.path, size_class)
        )
    tiers = [TierSpec(name, SLABS, policy=POLICIES[policy]) for name in (HOST, FILE)]
    cache = TieredCache(tiers, CacheSettings(size_classes=(SMALL, LARGE)))
    assert cache.adopt(FILE, [copy.found for copy in found]) == len(found)
    cache.check_integrity()
    orphans, expected = adrift([], found), taken(found)
    by_size_class = [
        [path for path in expected if (path[0] == "a") == (size_class == LARGE)] for size_class in (SMALL, LARGE)
    ]
    assert order_of(cache, 1) == [path for size_class in by_size_class for path in first_to_go(size_class, orphans)]
    assert where(cache, FILE) == {copy.path: copy.slot for copy in found if copy.path in expected}
    slots = {copy.path: copy.slot for copy in found}
    last_used = list(dict.fromkeys(slots[path] // SLABS.stride for path in reversed(expected)))[::-1]
    by_age = {
        size_class: [slots[path] // SLABS.stride for path in by_size_class[size_class]] for size_class in (SMALL, LARGE)
    }
    for size_class, other in ((SMALL, LARGE), (LARGE, SMALL)):
        ages = [slab for slab, _ in cache._state.pools[1].slabs_of_others(other)]  # type: ignore[attr-defined]
        assert ages == [slab for slab in last_used if slab in by_age[size_class]]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("length", [1, 100, 5000], ids=["alone", "prompts", "one path"])
def test_many_chunks_are_evicted_in_the_order_found(policy: str, length: int) -> None:
    count = 5000
    keys: list[Key] = [b"%032d" % (each * 7919 % count) for each in range(count)]
    parents = [None if each % length == 0 else keys[each - 1] for each in range(count)]
    cache = TieredCache([TierSpec(HOST, 4), TierSpec(FILE, count, policy=POLICIES[policy])], CacheSettings())
    oldest_first = list(range(count))[::-1]
    assert cache.adopt(FILE, ((each, keys[each], parents[each], 0) for each in oldest_first)) == count
    cache.check_integrity()
    store = cache._state
    assert [store.index.slot[1][node] for node in store.policies[1].order()] == oldest_first
    assert lookup(cache, keys[-length:], 0.0).num_chunks == length


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_recovered_chunk_has_no_advantage_over_later_ones(policy: str) -> None:
    cache = TieredCache([TierSpec(HOST, 4, 4096, POLICIES[policy])], CacheSettings())
    cache.adopt(HOST, [Copy(slot, path).found for slot, path in enumerate("ab")])
    for path in "cdef":
        store(cache, [key(path)], [0])
        end(cache, orders(cache))
    assert set(where(cache, HOST)) == set("cdef")


@pytest.mark.parametrize(
    "bad",
    [
        [(0, key("a"), None, 0), (1, key("a"), key("gone"), 0)],
        [(0, "a", None, 0)],
        [(0, [1], None, 0)],
        [(0, key("a"), [1], 0)],
        [(0, key("a"), 7, 0)],
        [("0", key("a"), None, 0)],
        [(0.5, key("a"), None, 0)],
        [(1 << 70, key("a"), None, 0)],
        [(0, key("a"), None, 1)],
    ],
    ids=["key twice", "no key", "list", "no parent", "number", "text", "fraction", "huge", "no size class"],
)
def test_invalid_chunk_is_refused_and_nothing_is_taken_in(bad: list[tuple[Any, Any, Any, Any]]) -> None:
    cache = TieredCache([TierSpec(name, 4, policy=POLICIES["lru"]) for name in (HOST, FILE)], CacheSettings())
    before = state_of(cache)
    with pytest.raises(CacheError):
        cache.adopt(FILE, [(3, key("b"), None, 0), *bad])
    assert state_of(cache) == before


@pytest.mark.parametrize("slabs", [Slabs.of_one_size(4, 6), Slabs(8, (4,), 3), Slabs(8, (4, 8), 6)])
def test_slots_of_other_scopes_are_allocated_last_in_order(slabs: Slabs) -> None:
    pool = TierSpec(FILE, slabs).make_pool()
    others = [0, 2, 1] if slabs.stride == 1 else [0, slabs.stride]
    pool.give_last(others)
    pool.check_integrity()
    given = [pool.allocate(1)[0] for _ in range(pool.room())]
    pool.check_integrity()
    rest = [
        slot for slot in range(slabs.indices) if slot // slabs.stride not in {each // slabs.stride for each in others}
    ]
    assert given[: len(rest)] == rest
    assert given[len(rest) :: slabs.stride] == others
    with pytest.raises(CacheError, match="expected slots in"):
        pool.give_last([slabs.indices])


def test_recovery_of_several_images_per_slab_never_overfills() -> None:
    pool = TierSpec(FILE, Slabs(10, (4,), 3)).make_pool()
    assert pool.room() == 6
    for taken in range(7):
        assert pool.used_bytes == 4 * taken <= pool.slabs.nbytes
        pool.check_integrity()
        if taken < 6:
            pool.allocate(1)
