"""Partial matches: the chunk that begins like the one that is wanted, in tiers or on the device."""

from __future__ import annotations

import math

import pytest
from cache_kit import lookup, store
from group_kit import FULL, STATE, WINDOW, end, grouped, orders, resident, settle
from hypothesis import given
from hypothesis import strategies as st

from longshore.boundary import DEVICE, FILE, HOST, Key, Section, Slot, Status
from longshore.cache import (
    CacheGroup,
    CacheSettings,
    DeviceCopy,
    GroupKeys,
    Lease,
    Partial,
    PromptTokens,
    TieredCache,
    WritePolicy,
)
from longshore.errors import CacheError
from longshore.keys import chain
from residents import residents_of

ROOT = b"root".ljust(32, b".")
ROOTS = [ROOT, *(f"root {group}".encode().ljust(32, b".") for group in (1, 2))]
"""Each group has a scope of its own."""

ABC = [*range(100, 112)]
"""Three chunks of four tokens."""


def path(tokens: list[int], size: int = 4, root: Key = ROOT) -> list[Key]:
    return chain(root, tokens, size)


def stored(*texts: list[int], group: CacheGroup = FULL, **settings: object) -> TieredCache:
    """A cache that keeps the tokens of what it has: these texts."""
    cache = grouped(group, partial=True, **settings)  # type: ignore[arg-type]
    for text in texts:
        commit(cache, 0, text)
    return cache


def commit(cache: TieredCache, group: int, tokens: list[int], root: Key | None = None) -> None:
    root, size = root or ROOTS[group], cache.settings.group(group)[1]
    keys = path(tokens, size, root)
    blocks = range(len(keys) * cache.settings.blocks_per_chunk)
    store(cache, keys, blocks, group=group, prompt_tokens=PromptTokens(tokens, root))
    settle(cache)


def wanted(tokens: list[int], *sizes: int) -> dict[int, GroupKeys]:
    """A request for these tokens, of groups with chunks of these sizes."""
    return {
        group: GroupKeys(path(tokens, size, root), prompt_tokens=PromptTokens(tokens, root), device=())
        for group, (size, root) in enumerate(zip(sizes, ROOTS, strict=False))
    }


def leased(cache: TieredCache, lease: Lease) -> int:
    """How many chunks a lease has."""
    return sum(run.num_chunks for run in cache.progress(lease).runs)


def test_the_chunk_with_the_longest_beginning_in_common_is_found() -> None:
    cache = stored(ABC, [*ABC[:8], 108, 0, 0, 0], [*ABC[:4], 104, 105, 106, 1])
    tokens = [*ABC[:8], 108, 109, 7, 7]
    found = lookup(cache, path(tokens), 0.0, prompt_tokens=PromptTokens(tokens, ROOT))
    assert (found.num_chunks, found.partial) == (2, Partial(path(ABC)[2], 2))


def test_partial_match_of_all_tokens_leaves_one_to_compute() -> None:
    cache = stored(ABC)
    keys = [*path(ABC)[:2], b"by another name".ljust(32, b".")]
    found = lookup(cache, keys, 0.0, prompt_tokens=PromptTokens(ABC, ROOT))
    assert (found.num_chunks, found.partial) == (2, Partial(path(ABC)[2], 3))


def test_its_first_tokens_are_loaded_with_the_rest() -> None:
    cache = stored(ABC)
    tokens = [*ABC[:10], 7, 7]
    found = lookup(cache, path(tokens), 0.0, prompt_tokens=PromptTokens(tokens, ROOT))
    order = cache.load(found.lease, {0: [5, 6, 7]}, tokens=found.partial.tokens)
    (transfer,) = orders(cache)
    assert (transfer.tokens, transfer.sections) == (2, (Section(0, 0, (5, 6, 7)),))
    assert [item.key for item in transfer.items] == path(ABC)
    assert order.num_chunks == 3
    end(cache, [transfer])
    assert cache.progress(found.lease).outcome == (3, (HOST,) * 3)
    cache.release(found.lease)
    cache.check_integrity()


def test_an_engine_that_does_not_want_it_loads_the_rest() -> None:
    cache = stored(ABC)
    tokens = [*ABC[:10], 7, 7]
    hold = lookup(cache, path(tokens), 0.0, prompt_tokens=PromptTokens(tokens, ROOT)).lease
    cache.load(hold, {0: [5, 6]})
    (transfer,) = orders(cache)
    assert (transfer.tokens, len(transfer.items)) == (None, 2)


def test_only_the_last_of_several_jobs_is_partial() -> None:
    cache = stored(ABC, file=16, backup=WritePolicy.THROUGH)
    assert cache.discard(path(ABC)[1:], HOST) == 2
    tokens = [*ABC[:10], 7, 7]
    hold = lookup(cache, path(tokens), 0.0, prompt_tokens=PromptTokens(tokens, ROOT)).lease
    cache.load(hold, {0: [5, 6, 7]}, tokens=2)
    assert [(t.route.source, t.tokens) for t in orders(cache)] == [(HOST, None), (FILE, None), (HOST, 2)]


def test_first_chunk_may_be_partial_under_its_own_root() -> None:
    """Chunks of another scope may have the same tokens, and other bytes."""
    cache = stored()
    other = b"other".ljust(32, b".")
    commit(cache, 0, ABC, other)
    tokens = [*ABC[:3], 0]
    assert lookup(cache, path(tokens), 0.0, prompt_tokens=PromptTokens(tokens, ROOT)).partial is None
    commit(cache, 0, ABC)
    found = lookup(cache, path(tokens), 0.0, prompt_tokens=PromptTokens(tokens, ROOT))
    assert (found.num_chunks, found.partial) == (0, Partial(path(ABC)[0], 3))
    assert found.lease is not None


def test_what_the_device_has_is_preferred() -> None:
    cache = stored(ABC)
    tokens = [*ABC[:10], 7, 7]
    above, here = path(ABC)[1], path(ABC)[2]
    for beside, expected in (
        ([(here, ABC[8:])], Partial(here, 2, device=True)),
        ([(b"x", ABC[8:9])], Partial(here, 2)),
        ([(b"x", [*ABC[8:10], 7])], Partial(b"x", 3, device=True)),
    ):
        found = lookup(cache, path(tokens), 0.0, prompt_tokens=PromptTokens(tokens, ROOT, {above: beside}))
        assert found.partial == expected
        assert found.lease is not None
        assert leased(cache, found.lease) == (2 if expected.device else 3)


def test_what_is_on_its_way_or_gone_is_not_found() -> None:
    cache = stored()
    tokens = [*ABC[:3], 0]
    store(cache, path(ABC), range(3), prompt_tokens=PromptTokens(ABC, ROOT))
    assert lookup(cache, path(tokens), 0.0, prompt_tokens=PromptTokens(tokens, ROOT)).partial is None
    settle(cache)
    assert lookup(cache, path(tokens), 0.0, prompt_tokens=PromptTokens(tokens, ROOT)).partial is not None
    cache.reset()
    assert lookup(cache, path(tokens), 0.0, prompt_tokens=PromptTokens(tokens, ROOT)).partial is None


def test_what_is_held_partially_does_not_make_way() -> None:
    cache = stored(ABC, host=3)
    tokens = [*ABC[:10], 7, 7]
    hold = lookup(cache, path(tokens), 0.0, prompt_tokens=PromptTokens(tokens, ROOT)).lease
    assert hold is not None
    commit(cache, 0, [1, 2, 3, 4])
    assert leased(cache, hold) == 3
    cache.release(hold)
    commit(cache, 0, [1, 2, 3, 4])
    assert lookup(cache, path(tokens), 0.0, prompt_tokens=PromptTokens(tokens, ROOT)).partial is None
    cache.check_integrity()


def test_tokens_are_learnt_of_what_was_adopted() -> None:
    before = stored(ABC, file=8, backup=WritePolicy.THROUGH)
    found = [(each.slot.index, each.key, each.parent, 0) for each in residents_of(before) if each.slot.tier == FILE]
    after = stored(file=8)
    after.adopt(FILE, found)
    tokens = [*ABC[:10], 7, 7]
    assert lookup(after, path(tokens), 0.0, prompt_tokens=PromptTokens(tokens, ROOT)).partial is None
    commit(after, 0, ABC)
    assert lookup(after, path(tokens), 0.0, prompt_tokens=PromptTokens(tokens, ROOT)).partial == Partial(
        path(ABC)[2], 2
    )


def test_a_reset_and_a_resize_keep_the_books_whole() -> None:
    cache = stored(ABC, host=4)
    cache.resize(HOST, 8)
    commit(cache, 0, [*ABC[:8], 1, 2, 3, 4])
    tokens = [*ABC[:8], 1, 2, 0, 0]
    assert lookup(cache, path(tokens), 0.0, prompt_tokens=PromptTokens(tokens, ROOT)).partial is not None
    cache.reset()
    assert lookup(cache, path(tokens), 0.0, prompt_tokens=PromptTokens(tokens, ROOT)).partial is None
    cache.check_integrity()


def test_nothing_is_kept_unless_the_settings_ask_for_it() -> None:
    cache = grouped(FULL)
    store(cache, path(ABC), range(3), prompt_tokens=PromptTokens(ABC, ROOT))
    settle(cache)
    assert not cache._state.partials.on
    with pytest.raises(CacheError, match="expected groups as well"):
        CacheSettings(partial=True)


def test_texts_that_cannot_be_are_refused() -> None:
    cache = stored()
    for text in (
        PromptTokens(ABC[:11], ROOT),
        PromptTokens(ABC, b""),
        PromptTokens([-1] * 12, ROOT),
        PromptTokens([1 << 32] * 12, ROOT),
    ):
        with pytest.raises(CacheError, match=r"tokens and a root|token ids"):
            store(cache, path(ABC), range(3), prompt_tokens=text)
    assert resident(cache) == []
    with pytest.raises(CacheError, match="a root"):
        lookup(cache, path(ABC), 0.0, prompt_tokens=PromptTokens(ABC, b""))
    with pytest.raises(CacheError, match="a root"):
        cache.lookup({0: GroupKeys(path(ABC), prompt_tokens=PromptTokens(ABC, b""), device=())}, 0.0)


# ---------------------------------------------------------------------- several groups


def test_groups_of_different_chunks_share_a_length_in_tokens() -> None:
    """Eight tokens match whole; then five more: one chunk of two and a half of the next, a chunk of four and one."""
    full, window = CacheGroup(block_size=8), CacheGroup(block_size=2, window=5)
    cache = grouped(full, window, partial=True)
    told = [*range(200, 224)]
    for group in (0, 1):
        commit(cache, group, told)
    tokens = [*told[:13], 7, 7, 7]
    found = cache.lookup(wanted(tokens, 8, 2), 0.0)
    large, small = path(told, 8), path(told, 2, ROOTS[1])
    assert found.tokens == 13
    assert found.matches[0] == (0, 1, (0,), Partial(large[1], 5))
    assert found.matches[1] == (4, 6, (4, 5), Partial(small[6], 1))
    cache.load(found.lease, {0: [1, 2], 1: [3, 4, 5]})
    (transfer,) = orders(cache)
    assert transfer.sections == (Section(0, 0, (1, 2)), Section(1, 4, (3, 4, 5)))
    assert [item.key for item in transfer.items] == [*large[:2], *small[4:7]]


def test_the_group_that_has_least_says_how_much() -> None:
    cache = grouped(FULL, FULL, partial=True)
    told = [*range(200, 208)]
    commit(cache, 0, told)
    commit(cache, 1, [*told[:5], 7, 7, 7])
    found = cache.lookup(wanted([*told[:7], 0], 4, 4), 0.0)
    assert found.tokens == 5
    assert [need.partial and need.partial.tokens for need in found.matches] == [1, 1]


def test_a_state_cannot_be_had_in_part() -> None:
    cache = grouped(FULL, STATE, partial=True)
    told = [*range(200, 224)]
    for group in (0, 1):
        commit(cache, group, told)
    tokens = [*told[:13], 7, 7, 7]
    assert cache.lookup(wanted(tokens, 4, 8), 0.0).tokens == 8


def test_a_partial_chunk_takes_as_many_blocks_as_its_tokens() -> None:
    cache = grouped(FULL, WINDOW, partial=True, blocks_per_chunk=2)
    told = [*range(200, 216)]
    for group in (0, 1):
        commit(cache, group, told)
    tokens = [*told[:13], 7, 7, 7]  # chunks of eight and four tokens
    found = cache.lookup(wanted(tokens, 8, 4), 0.0)
    assert [need.partial and need.partial.tokens for need in found.matches] == [5, 1]
    assert found.lease is not None
    with pytest.raises(CacheError, match=r"expected \[4, 3\] blocks"):
        cache.load(found.lease, {0: range(4), 1: range(4)})
    cache.load(found.lease, {0: range(4), 1: range(4, 7)})


def test_a_partial_chunk_that_is_lost_keeps_all_away() -> None:
    cache = grouped(FULL, WINDOW, partial=True)
    told = [*range(200, 216)]
    for group in (0, 1):
        commit(cache, group, told)
    tokens = [*told[:13], 7, 7, 7]
    one, two = (cache.lookup(wanted(tokens, 4, 2), 0.0).lease for _ in range(2))
    assert two is not None
    cache.load(one, {0: range(4), 1: range(4, 7)})
    end(cache, orders(cache), Status.CORRUPT)
    assert cache.load(two, {0: range(4), 1: range(4, 7)}).num_chunks == 0
    for hold in (one, two):
        cache.release(hold)
    cache.check_integrity()


@st.composite
def conversations(draw: st.DrawFn) -> tuple[list[CacheGroup], list[list[int]], list[int]]:
    groups = [
        CacheGroup(block_size=draw(st.sampled_from((1, 2, 3, 4))), window=draw(st.sampled_from((None, 1, 3, 6))))
        for _ in range(draw(st.integers(1, 3)))
    ]
    token = st.integers(0, 1)
    texts = draw(st.lists(st.lists(token, max_size=16), max_size=4))
    return groups, texts, draw(st.lists(token, max_size=16))


@given(conversations())
def test_the_longest_partial_reuse_is_found(said: tuple[list[CacheGroup], list[list[int]], list[int]]) -> None:
    """Against the texts themselves: how far can every group go on from the longest whole match?"""
    groups, texts, tokens = said
    cache = grouped(*groups, partial=True)
    for group, kind in enumerate(groups):
        for text in texts:
            commit(cache, group, text[: len(text) // kind.block_size * kind.block_size])
    asked = wanted(tokens, *(kind.block_size for kind in groups))
    found = cache.lookup(asked, 0.0)
    whole = cache.lookup({g: each._replace(prompt_tokens=None) for g, each in asked.items()}, 0.0).tokens
    unit = math.lcm(*(kind.block_size for kind in groups))
    ends = [furthest(texts, tokens, kind.block_size, whole) for kind in groups]
    assert found.tokens == min(*ends, whole + unit - 1)
    for kind, need in zip(groups, found.matches, strict=True):
        assert (need.partial.tokens if need.partial else 0) == found.tokens % kind.block_size
    cache.check_integrity()


def furthest(texts: list[list[int]], tokens: list[int], size: int, whole: int) -> int:
    """How many tokens of a group are there, as whole chunks and the beginning of one, from `whole` on."""
    common = [whole]
    for text in texts:
        stored = text[: len(text) // size * size]
        same = next((i for i, (a, b) in enumerate(zip(stored, tokens, strict=False)) if a != b), None)
        common.append(min(len(stored), len(tokens)) if same is None else same)
    return max(common)


def test_impossible_text_is_refused_before_a_miss_is_counted() -> None:
    cache = stored(ABC, events=10)
    cache.events()
    before = cache.counters.copy()
    with pytest.raises(CacheError, match="token ids"):
        lookup(cache, path(ABC), 1.0, prompt_tokens=PromptTokens([*ABC, -1, 0, 0, 0], ROOT))
    assert (cache.counters, cache.events(), cache.leases + cache.protected) == (before, [], 0)


def test_chunks_that_stand_alone_have_no_partial_match_by_path() -> None:
    cache = stored(ABC, group=WINDOW)
    with pytest.raises(CacheError, match="are independent"):
        lookup(cache, path(ABC, 2)[:1], 0.0, prompt_tokens=PromptTokens(ABC, ROOT), group=0)
    assert (cache.leases, cache.protected) == (0, 0)


@pytest.mark.parametrize("tokens", [-1, 0, 5])
def test_tokens_that_a_block_has_not_are_refused(tokens: int) -> None:
    cache = stored(ABC, device_blocks=8)
    hold = lookup(cache, path(ABC), 0.0).lease
    assert hold is not None
    with pytest.raises(CacheError, match="expected 1 to 4 of a block"):
        cache.load(hold, {0: [0, 1, 2]}, tokens=tokens)
    with pytest.raises(CacheError, match="expected 1 to 4 of a block"):
        cache.load({0: DeviceCopy([Slot(DEVICE, 0, 0)], tokens)}, {0: [1]})
    with pytest.raises(CacheError, match="expected device blocks in"):
        cache.load({0: DeviceCopy([Slot(DEVICE, 0, 8)])}, {0: [1]})
    assert cache.take_commands() == []
    assert cache.load(hold, {0: [0, 1, 2]}, tokens=4).num_chunks == 3
