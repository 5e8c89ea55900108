"""How far several KV cache groups are served: against a model that tries every length."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
from group_kit import FULL, WINDOW, end, grouped, keys_of, orders, store, wanted
from hypothesis import given
from hypothesis import strategies as st
from object_state import state_of

from longshore.boundary import HOST
from longshore.cache import CacheGroup, CacheSettings, EventKind, GroupKeys, MissReason, TieredCache, TierSpec
from longshore.errors import CacheError, LeaseError


class Chunks(NamedTuple):
    """One group of a request: how many chunks it wants, which of them the tiers and the device have."""

    group: CacheGroup
    count: int
    stored: frozenset[int]
    device: tuple[bool, ...]


@st.composite
def requests(draw: st.DrawFn) -> list[Chunks]:
    chosen = []
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(("full", "window", "recurrent")))
        window = draw(st.integers(1, 20)) if kind == "window" else None
        group = CacheGroup(block_size=draw(st.sampled_from((1, 2, 3, 4))), window=window, recurrent=kind == "recurrent")
        count = draw(st.integers(0, 24))
        stored = frozenset(range(count)) - draw(st.frozensets(st.integers(0, 23), max_size=4))
        if not group.is_independent:  # a prefix: what is behind a gap could not be stored
            stored = frozenset(range(next((i for i in range(count) if i not in stored), count)))
        device = tuple(draw(st.lists(st.booleans(), max_size=count)))
        chosen.append(Chunks(group, count, stored, device))
    return chosen


def is_served(each: Chunks, per_chunk: int, tokens: int) -> bool:
    """Whether every chunk that the next token sees is in a tier, or on the device."""
    size, group = each.group.block_size * per_chunk, each.group
    seen = tokens if not group.is_independent else min(tokens, group.window or 1)
    chunks = {at // size for at in range(tokens - seen, tokens)}
    return all(at in each.stored or (at < len(each.device) and each.device[at]) for at in chunks)


def longest(request: list[Chunks], per_chunk: int) -> int:
    sizes = [each.group.block_size * per_chunk for each in request]
    most = min(each.count * size for each, size in zip(request, sizes, strict=True))
    lengths = range(0, most + 1, math.lcm(*sizes))
    return max(tokens for tokens in lengths if all(is_served(each, per_chunk, tokens) for each in request))


@given(request=requests(), per_chunk=st.integers(1, 2))
def test_longest_length_that_all_groups_serve_is_found(request: list[Chunks], per_chunk: int) -> None:
    cache = grouped(*(each.group for each in request), blocks_per_chunk=per_chunk)
    for group, each in enumerate(request):
        keys = keys_of(group, each.count)
        for at in sorted(each.stored):
            store(cache, group, keys[: at + 1], at)
    asked = {g: GroupKeys(keys_of(g, each.count), device=each.device) for g, each in enumerate(request)}
    found = cache.lookup(asked, 0.0)
    assert found.tokens == longest(request, per_chunk)
    for group, (each, need) in enumerate(zip(request, found.matches, strict=True)):
        size = each.group.block_size * per_chunk
        lacking = [at for at in range(need.first, need.end) if at >= len(each.device) or not each.device[at]]
        assert need.end == found.tokens // size
        assert list(need.load) == lacking
        assert set(lacking) <= each.stored, group
        # One chunk fewer would not do: the first is seen by the next token.
        seen = each.group.window or 1
        assert need.first == (max(0, found.tokens - seen) // size if each.group.is_independent else 0)
    cache.check_integrity()
    assert (found.lease is None) == (not any(need.load for need in found.matches))
    if found.lease is not None:
        cache.release(found.lease)
        cache.check_integrity()


def test_hole_in_a_window_rules_out_lengths_that_need_it() -> None:
    cache = grouped(FULL, WINDOW)
    paths = [keys_of(0, 8), keys_of(1, 16)]
    for group, path in enumerate(paths):
        store(cache, group, path)
    assert cache.discard(paths[1][14:15], HOST) == 1
    found = cache.lookup(wanted(*paths), 0.0)
    assert found.tokens == 28  # 14 chunks of two tokens: the hole is right behind
    assert cache.counters.misses[MissReason.ABSENT] == 1
    assert cache.counters.misses[MissReason.AFTER_MISS] == 1 + 1  # the full group's last, the window's last


def test_chunks_on_their_way_are_not_served_yet() -> None:
    cache = grouped(FULL, WINDOW)
    paths = [keys_of(0, 2), keys_of(1, 4)]
    store(cache, 0, paths[0])
    cache.store({1: GroupKeys(paths[1])}, {1: range(4)})
    assert cache.lookup(wanted(*paths), 0.0).tokens == 0
    end(cache, orders(cache))
    assert cache.lookup(wanted(*paths), 0.0).tokens == 8


@pytest.mark.parametrize("groups", [(), (FULL, WINDOW)])
def test_a_match_is_for_all_groups(groups: tuple[CacheGroup, ...]) -> None:
    with pytest.raises(CacheError, match=f"or of all {len(groups)}, got"):
        grouped(*groups).lookup(wanted(keys_of(0, 1)), 0.0)


def test_what_cannot_be_is_refused() -> None:
    cache = grouped(FULL, WINDOW)
    with pytest.raises(CacheError, match="expected at most 1 values"):
        cache.lookup({0: GroupKeys(keys_of(0, 1), device=[True, True]), 1: GroupKeys(())}, 0.0)
    with pytest.raises(CacheError, match=r"expected a group in \[0, 2\), got 2"):
        cache.store({2: GroupKeys(keys_of(0, 1))}, {2: [0]})
    for wrong in ({"block_size": 0}, {"block_size": 1, "window": 0}, {"block_size": 1, "window": 3, "recurrent": True}):
        with pytest.raises(CacheError, match="window or recurrent, not both"):
            CacheGroup(**wrong)  # type: ignore[arg-type]


def test_keys_out_of_place_are_refused_with_nothing_changed() -> None:
    cache = grouped(FULL, WINDOW)
    paths = [keys_of(0, 2), keys_of(1, 4)]
    for group, path in enumerate(paths):
        store(cache, group, path)
    for bad in ([paths[0][::-1], paths[1]], [paths[0], [*paths[1][:3], paths[0][1]]]):
        with pytest.raises(CacheError, match=r"is not the child|independent"):
            cache.lookup(wanted(*bad), 0.0)
    assert (cache.leases, cache.protected) == (0, 0)
    with pytest.raises(CacheError, match="expected independent chunks"):
        cache.store({1: GroupKeys([paths[0][1]])}, {1: [0]})


def test_misplaced_keys_of_last_group_are_refused_with_nothing_changed() -> None:
    cache = grouped(FULL, FULL, events=9)
    known, new = keys_of(1, 4), keys_of(1, 5, "b")
    store(cache, 1, known)
    before = state_of(cache)
    with pytest.raises(CacheError, match="key 2 of a path"):
        cache.lookup(wanted(keys_of(0, 5), [known[0], new[1], known[1], *new[3:]]), 1.0)
    assert state_of(cache) == before


def test_each_group_of_a_request_is_an_event() -> None:
    cache = grouped(FULL, WINDOW, events=100)
    paths = [keys_of(0, 2), keys_of(1, 4)]
    for group, path in enumerate(paths):
        store(cache, group, path)
    cache.events()
    cache.lookup(wanted(*paths), 0.0, request="r")
    asked = [event for event in cache.events() if event.kind is EventKind.REQUEST]
    assert [(event.request, len(event.keys), event.length) for event in asked] == [("r/0", 2, 2), ("r/1", 3, 3)]


def test_abort_lets_go_of_all_groups() -> None:
    cache = grouped(FULL, WINDOW)
    paths = [keys_of(0, 2), keys_of(1, 4)]
    for group, path in enumerate(paths):
        store(cache, group, path)
    hold = cache.lookup(wanted(*paths), 0.0, request="r").lease
    assert hold is not None
    assert all(cache.discard(path, HOST) < len(path) for path in paths)
    cache.release(hold)
    assert (cache.leases, cache.protected) == (0, 0)
    with pytest.raises(LeaseError):
        cache.release(hold)


def test_a_window_costs_no_look_at_what_it_has_passed() -> None:
    """Only the last window is looked at where it is there."""
    looks: list[int] = []

    class Keys(list[bytes]):
        def __getitem__(self, at: object) -> bytes:  # type: ignore[override]
            if isinstance(at, int):
                looks.append(at)
            return super().__getitem__(at)  # type: ignore[index,no-any-return]

    cache = TieredCache([TierSpec(HOST, 64, 4096)], CacheSettings(groups=(WINDOW,)))
    path = keys_of(0, 40)
    store(cache, 0, path)
    found = cache.lookup(wanted(Keys(path)), 0.0)
    assert found.tokens == 80
    assert set(looks) >= {37, 38, 39}
    assert len(set(looks)) < 8  # of 40; keys with the same hash bits in the table are looked at one by one


def test_groups_that_share_a_key_are_refused() -> None:
    cache = grouped(FULL, FULL)
    keys = keys_of(0, 2)
    store(cache, 0, keys)
    with pytest.raises(CacheError, match="distinct keys over all groups"):
        cache.lookup(wanted(keys, keys), 0.0)
    assert (cache.leases, cache.protected) == (0, 0)
    cache.check_integrity()
