"""Small stories that must come out right."""

from __future__ import annotations

import contextlib

import cache_soak
import numpy as np
import numpy.typing as npt
import pytest
from cache_kit import IMAGE_BYTES, chunks, key, lookup, residency, store
from group_kit import settle

from depth import deep
from longshore.boundary import FILE, HOST, Status, TransferResult
from longshore.cache import CacheGroup, CacheSettings, Protection, TieredCache, TierSpec, WritePolicy
from longshore.cache.eviction_policies import ARC, LRU, EvictionPolicy, Gittins
from longshore.errors import CacheError
from longshore.runtime import error_handler
from longshore.runtime.error_handler import CallLog
from residents import residents_of


def stored(paths: list[list[bytes]], slots: int) -> TieredCache:
    """A cache with one tier that has these paths."""
    cache = TieredCache([TierSpec(HOST, slots, IMAGE_BYTES)])
    for path in paths:
        offload = store(cache, path)
        cache.apply_results([TransferResult(offload.job, (Status.OK,) * len(offload.slots))], 0.0)
    return cache


def evictable(cache: TieredCache, paths: list[list[bytes]]) -> int:
    """How many copies go when all of these paths are discarded."""
    return sum(cache.discard(path, HOST) for path in paths)


def test_a_hundred_branches_over_a_shared_prefix_fifty_released() -> None:
    trunk = chunks("abc")
    branches = [[*trunk, b"branch".ljust(31) + bytes([i])] for i in range(100)]
    cache = stored(branches, 200)
    holds = [lookup(cache, branch, 0.0).lease for branch in branches]
    for hold in holds[:50]:
        cache.release(hold)
    assert cache.leases == 50
    cache.check_integrity()
    assert evictable(cache, branches) == 50
    assert all(lookup(cache, branch, 0.0).num_chunks == 4 for branch in branches[50:])


@pytest.mark.parametrize("policy", [LRU, ARC, Gittins])
@pytest.mark.parametrize("size", [30, 70, 300])
@pytest.mark.parametrize("alone", [False, True])
def test_overlapping_lookups_in_a_step_leave_the_order_whole(
    policy: type[EvictionPolicy], size: int, alone: bool
) -> None:
    settings = CacheSettings(groups=(CacheGroup(block_size=4, window=1 << 40 if alone else None),))
    cache = TieredCache([TierSpec(HOST, size, IMAGE_BYTES, policy)], settings)
    keys = [i.to_bytes(32, "big") for i in range(size)]
    number = lookup(cache, keys, 0.0).request_number
    job = store(cache, keys, request_number=number).job
    cache.apply_results([TransferResult(job, (Status.OK,) * size)], 0.0)
    for _ in range(3):
        residency(cache, keys, Protection.STEP, request_number=number)
        residency(cache, keys[5 : size - 5], Protection.STEP, request_number=number)
        assert (cache.leases, cache.protected) == (0, size), "a chunk that two lookups have found is protected once"
        assert store(cache, [b"new".ljust(32)]).job is None  # it needs room, and all is protected
        cache.end_step()
        cache.check_integrity()
        assert cache.leases == cache.protected == 0
    offload = store(cache, [(b"new%i" % i).ljust(32) for i in range(size)])
    # The end of a prompt promises less than what else is in: Gittins lets it pass where it knows the path.
    assert len(offload.positions) == size - (policy is Gittins and not alone and size < 300)


@pytest.mark.parametrize("policy", [LRU, ARC, Gittins])
def test_siblings_that_go_in_several_runs_release_their_parent_once(policy: type[EvictionPolicy]) -> None:
    """A parent in both tiers, all of whose children go from the colder one."""
    asked: list[list[int]] = []

    class Watched(policy):  # type: ignore[misc, valid-type]
        def are_held(self, at: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
            asked.append(at.tolist())
            return super().are_held(at)  # type: ignore[no-any-return]

    settings = CacheSettings(backup=WritePolicy.THROUGH, admission=False)
    cache = TieredCache([TierSpec(HOST, 32, IMAGE_BYTES, Watched), TierSpec(FILE, 15, IMAGE_BYTES, Watched)], settings)
    trunks = [[b"%c" % trunk * 32] for trunk in b"abc"]
    for i in range(12):
        leaf = (b"leaf%02i" % i).ljust(32)
        store_in_both(cache, [*trunks[i % 3], leaf])
        assert cache.discard([leaf], HOST) == 1
    for trunk in trunks:
        store(cache, trunk)  # used last of all
    asked.clear()
    store_in_both(cache, [(b"scan%02i" % at).ljust(32) for at in range(12)])
    cache.check_integrity()
    assert any(len(set(nodes)) == 3 for nodes in asked), "the trunks may be released"
    assert not [nodes for nodes in asked if len(set(nodes)) < len(nodes)]


def store_in_both(cache: TieredCache, path: list[bytes]) -> None:
    """Offer `path`, and have every transfer end well."""
    offload = store(cache, path)
    if offload.job is not None:
        cache.apply_results([TransferResult(offload.job, (Status.OK,) * len(offload.slots))], 0.0)
    settle(cache)


def test_five_users_of_one_block() -> None:
    cache = stored([[key("a")]], 1)
    holds = [lookup(cache, [key("a")], 0.0).lease for _ in range(5)]
    for users_left, hold in zip((5, 4, 3, 2, 1), holds, strict=True):
        assert cache.leases == users_left
        assert evictable(cache, [[key("a")]]) == 0
        cache.release(hold)
    assert cache.leases == cache.protected == 0
    assert evictable(cache, [[key("a")]]) == 1


def test_what_is_held_has_an_address_for_each_chunk() -> None:
    cache = stored([chunks("abcd")], 8)
    hold = lookup(cache, chunks("abcde"), 0.0, first=1).lease
    assert cache.progress(hold).runs == ((HOST, 3),)
    at = {r.key: r.slot.index for r in residents_of(cache)}
    assert residency(cache, chunks("abcd")[1:]).slots() == [at[each] for each in chunks("abcd")[1:]]


@pytest.mark.parametrize("seed", range(deep(10, 30)))
def test_overlapping_requests_by_chance_leave_every_structure_whole(seed: int) -> None:
    """Requests of many lengths, policies and sizes; more of them by `make cache-soak`."""
    assert cache_soak.run(seed, 150).total() == 150


@pytest.mark.parametrize("seed", range(deep(4, 12)))
def test_logged_calls_made_again_lead_to_the_same_state(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although idle calls are left out of the log."""
    monkeypatch.setattr(error_handler, "_KEPT", 1 << 20)
    storm = cache_soak.Storm(seed)
    monkeypatch.setattr(storm, "restart", lambda: None)  # the calls are those of one cache
    log, asked = CallLog(storm.cache, lambda error: None), 0
    for _ in range(150):
        storm.step()
        storm.cache.take_commands()
        storm.cache.apply_results((), storm.now)
        asked += 3
    tiers, settings, remote, generation = storm.cache.constructor_arguments
    again = TieredCache(tiers, settings, remote=remote, generation=generation)
    for call in log.calls:
        with contextlib.suppress(CacheError):  # refused the first time, too
            getattr(again, call.name)(*call.arguments, **call.named)
    assert sum(call.name in ("take_commands", "apply_results") for call in log.calls) < asked
    assert residents_of(again) == residents_of(storm.cache)
    assert again.counters == storm.cache.counters
    assert (again.generation, again.jobs_in_flight, again.leases, again.protected) == (
        *(storm.cache.generation, storm.cache.jobs_in_flight, storm.cache.leases, storm.cache.protected),
    )
    again.check_integrity()
