"""Evictions of many copies at once from the only tier: the same go, in the same order, as one by one."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import pytest
from cache_kit import chunks, key, path_of

from longshore.boundary import HOST, Key, Status, TransferResult
from longshore.cache import CacheSettings, GroupKeys, Lease, TieredCache, TierSpec
from longshore.cache.events import EventKind
from longshore.cache.eviction_policies import LRU, POLICIES, EvictionPolicy
from longshore.cache.evictor import Evictor
from longshore.cache.index import Index
from longshore.cache.nodes import ROOT
from longshore.cache.pool import SlotPool
from longshore.errors import CacheError
from residents import residents_of


def cache_of(slots: int) -> TieredCache:
    return TieredCache([TierSpec(HOST, slots, 1, LRU)])


def order(cache: TieredCache, keys: list[Key], first: int = 0) -> int:
    """Begin to store `keys[first:]`; returns the job."""
    job = cache.store({0: GroupKeys(keys, first)}, {0: range(len(keys) - first)})[0].job
    assert job is not None
    return job


def arrive(cache: TieredCache, job: int, count: int = 1) -> None:
    cache.apply_results([TransferResult(job, (Status.OK,) * count)], 0.0)
    cache.check_integrity()


def store(cache: TieredCache, path: str, first: int = 0) -> None:
    arrive(cache, order(cache, chunks(path), first), len(path) - first)


def residents(cache: TieredCache) -> set[str]:
    return {path_of(each.key) for each in residents_of(cache)}


def test_places_of_an_evicted_path_serve_shorter_paths() -> None:
    cache = cache_of(4)
    store(cache, "abcd")
    store(cache, "wxyz")
    assert residents(cache) == {"w", "wx", "wxy", "wxyz"}
    for path in "pqrs":
        store(cache, path)
    assert residents(cache) == set("pqrs")
    store(cache, "abcd")
    assert residents(cache) == {"a", "ab", "abc", "abcd"}


def test_path_stored_piece_by_piece_is_evicted_from_its_end() -> None:
    cache = cache_of(6)
    for first in (0, 2, 4):
        store(cache, "abcdef"[: first + 2], first)
    for path, left in (("p", "abcde"), ("q", "abcd"), ("rs", "ab"), ("tu", "")):
        store(cache, path)
        assert residents(cache) >= {"abcdef"[: i + 1] for i in range(len(left))}
        assert "abcdef"[: len(left) + 1] not in residents(cache)


def test_what_an_eviction_sets_free_goes_before_what_is_younger() -> None:
    cache = cache_of(4)
    store(cache, "a")
    behind = order(cache, chunks("ab"), 1)
    for path in "xyp":  # for `p` something must go: not `a`, which is held now, for what comes behind it
        store(cache, path)
    arrive(cache, behind)
    for path in "qr":
        store(cache, path)
    assert residents(cache) == {"a", "ab", "q", "r"}
    store(cache, "st")
    assert residents(cache) == {"q", "r", "s", "st"}


@pytest.mark.parametrize(
    "branches",
    [("ab", "abc", "abd", "x"), ("abc", "abe", "abcd", "abef", "x"), ("abc", "abde", "abcd", "abdef", "abdeg", "x")],
)
def test_chunk_freed_by_all_branches_goes_before_younger_ones(branches: tuple[str, ...]) -> None:
    known: set[str] = set()
    cache = cache_of(len({path[: i + 1] for path in branches for i in range(len(path))}))
    for path in branches:  # bodies before their tails
        store(cache, path, sum(path[: i + 1] in known for i in range(len(path))))
        known |= {path[: i + 1] for i in range(len(path))}
    store(cache, "z" * (len(known) - 1))
    assert residents(cache) == {"x", *("z" * i for i in range(1, len(known)))}


def test_a_head_stays_while_one_of_two_branches_does() -> None:
    cache = cache_of(4)
    store(cache, "ab")
    store(cache, "abc", 2)
    store(cache, "ae", 1)
    cache.store(
        {0: GroupKeys(chunks("zyx"))}, {0: range(3)}
    )  # one branch goes from its end, then the other: not the head before that
    assert residents(cache) == {"a", "z", "zy", "zyx"}
    cache.check_integrity()


def test_held_chunk_counts_as_child_however_many_branches_go() -> None:
    cache = cache_of(5)
    store(cache, "abc")
    store(cache, "abcd", 3)
    store(cache, "ae", 1)
    hold = cache.lookup({0: GroupKeys(chunks("ab"))}, 0.0).lease
    assert hold is not None
    offload = cache.store({0: GroupKeys(chunks("zyxw"))}, {0: range(4)})[
        0
    ]  # both branches go, and with them all that may: not `a`
    assert residents(cache) == {"a", "ab", "z", "zy", "zyx"}
    assert len(offload.positions) == 3
    cache.check_integrity()


def test_known_chunk_behind_a_wrong_parent_is_refused() -> None:
    cache = cache_of(4)
    store(cache, "ab")
    store(cache, "c")
    with pytest.raises(CacheError, match="is not the child of"):
        cache.store({0: GroupKeys([key("c"), key("ab")], 1)}, {0: [0]})
    cache.check_integrity()


def test_a_number_that_comes_free_has_no_children_left() -> None:
    pool = SlotPool(2)
    index = Index([pool])
    keys = chunks("ab")
    nodes = index.link(ROOT, keys, 0, pool.allocate(2))
    assert index.drop_leaves(np.array(nodes[::-1], np.int32)) == [ROOT]
    for slot, path in enumerate("xy"):
        (node,) = index.link(ROOT, chunks(path), 0, [slot])
        assert index.num_children[0][node] == 0
    index.check_integrity()


class Life:
    """A random life of a cache of 400 slots, whose prompts branch, come back and are held; what left it, in order."""

    def __init__(self, policy: type[EvictionPolicy], seed: int) -> None:
        self.cache = TieredCache([TierSpec(HOST, 400, 1, policy)], CacheSettings(events=1 << 20))
        self.dice = random.Random(seed)
        self.prompts = [chunks_of(0, 40)]
        self.holds: list[Lease] = []

    def run(self, steps: int) -> list[Key]:
        for step in range(1, steps + 1):
            self._store(step)
            for _ in range(self.dice.randrange(3)):
                self._match()
            if self.holds and self.dice.random() < 0.7:
                self.cache.release(self.holds.pop(self.dice.randrange(len(self.holds))))
            if step % 100 == 0:
                self.cache.check_integrity()
        return [event.key for event in self.cache.events() if event.kind is EventKind.REMOVED]

    def _store(self, step: int) -> None:
        elder = self.dice.choice(self.prompts[-12:])
        shared = self.dice.choice([0, 0, self.dice.randrange(len(elder)), len(elder)])
        found = self.cache.lookup({0: GroupKeys(elder[:shared])}, 0.0)
        prompt = [*elder[: found.num_chunks], *chunks_of(step, int(3 * 60 ** self.dice.random()))]
        offload = self.cache.store(
            {0: GroupKeys(prompt, found.num_chunks)}, {0: range(len(prompt) - found.num_chunks)}
        )[0]
        if found.lease is not None:
            self.cache.release(found.lease)
        self.cache.take_commands()
        if offload.job is not None:
            self.cache.apply_results([TransferResult(offload.job, (Status.OK,) * len(offload.slots))], 0.0)
        self.prompts.append(prompt)

    def _match(self) -> None:
        prompt = self.dice.choice(self.prompts[-30:])
        found = self.cache.lookup({0: GroupKeys(prompt[: self.dice.randint(1, len(prompt))])}, 0.0)
        if found.lease is not None:
            self.holds.append(found.lease)


def chunks_of(step: int, count: int) -> list[Key]:
    return [hashlib.sha256(f"{step} {i}".encode()).digest() for i in range(count)]


@pytest.mark.parametrize("policy", POLICIES.values(), ids=list(POLICIES))
@pytest.mark.parametrize("seed", range(3))
def test_batched_eviction_picks_the_same_as_one_by_one(
    policy: type[EvictionPolicy], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = Life(policy, seed).run(300)
    monkeypatch.setattr(Evictor, "_evict_batch", lambda *_, **__: (0, 0, [], 1))
    assert together == Life(policy, seed).run(300)
    assert len(together) > 3000
