"""Requests of a trace through the path verbs of the control plane."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_kit import prompts

from longshore.cache import GroupKeys, ReuseHint
from longshore.cache.eviction_policies import LRU, POLICIES, Gittins
from longshore.errors import CacheError, IntegrityError
from longshore.trace.experiment import CacheReplay, Experiment
from longshore.trace.readers import read_excerpt
from residents import residents_of


@given(paths=prompts(), slots=st.integers(1, 14))
def test_lru_through_the_cache_hits_what_plain_lru_hits(paths: list[list[int]], slots: int) -> None:
    plain, through = Experiment(LRU, slots), CacheReplay(LRU, slots)
    for path in paths:
        assert through.serve(path) == plain.serve(path)
        assert len(residents_of(through.cache)) == len(plain.resident())


@pytest.mark.parametrize("slots", [40, 255])
def test_lru_through_the_cache_is_plain_lru(slots: int) -> None:
    """Of more slots than these, evictions free some ahead of demand."""
    plain, through = Experiment(LRU, slots), CacheReplay(LRU, slots)
    paths = [request.hash_ids for request in read_excerpt()]
    assert [through.serve(path) for path in paths] == [plain.serve(path) for path in paths]


@pytest.mark.parametrize("name", sorted(POLICIES))
@given(paths=prompts(), slots=st.integers(1, 14))
def test_nothing_is_held_or_moving_after_a_request(name: str, paths: list[list[int]], slots: int) -> None:
    replay = CacheReplay(POLICIES[name], slots)
    seen: set[int] = set()
    for path in paths:
        assert replay.serve(path) <= next((at for at, block in enumerate(path) if block not in seen), len(path))
        seen.update(path)
        replay.cache.check_integrity()
        assert (replay.cache.leases, replay.cache.protected, replay.cache.jobs_in_flight) == (0, 0, 0)


def test_a_prompt_longer_than_the_tier_keeps_its_head() -> None:
    replay = CacheReplay(Gittins, 4)
    assert [replay.serve(range(9)), replay.serve(range(9))] == [0, 4]


def test_prompt_beyond_default_writes_in_flight_is_stored_at_once() -> None:
    replay = CacheReplay(Gittins, 3000)
    assert [replay.serve(range(2500)), replay.serve(range(2500))] == [0, 2500]


def test_a_load_that_fails_is_an_error_and_no_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    replay = CacheReplay(Gittins, 4)
    replay.serve([1, 2])
    monkeypatch.setattr(replay, "_move", lambda: None)  # the device never reports
    with pytest.raises(IntegrityError, match="not all of the 2 blocks found were loaded"):
        replay.serve([1, 2])


def test_trace_hints_reach_the_policy_as_in_the_experiment() -> None:
    """Half of the sessions end at once, the others come back 40 requests later; there is room for those alone."""
    for kind in (Experiment, CacheReplay):
        hits = {}
        for said in (False, True):
            tier, hits[said] = kind(Gittins, 60), 0
            for turn in range(1500):
                ends, back = ReuseHint(ends=True), ReuseHint(seconds=40.0)
                path, old = (range(4 * each, 4 * each + 4) for each in (turn, turn - 40))
                tier.serve(path, float(turn), (back if turn % 2 else ends) if said else None)
                if turn >= 40 and turn % 2:
                    hits[said] += tier.serve(old, float(turn), ends if said else None)
        assert hits[True] > 1.5 * hits[False], kind


def test_a_return_that_cannot_be_is_refused_before_anything_changed() -> None:
    cache = CacheReplay(Gittins, 8).cache
    seconds = [ReuseHint(ends=True, seconds=1.0), ReuseHint(seconds=-1.0), ReuseHint(seconds=math.nan)]
    for said in (*seconds, ReuseHint(of=3), "ends"):
        with pytest.raises(CacheError, match=r"ReuseHint|again"):
            cache.lookup({0: GroupKeys([b"k" * 32])}, 0.0, reuse_hint=said)  # type: ignore[arg-type]
    assert cache.lookup({0: GroupKeys([b"k" * 32])}, 0.0).request_number == 1
