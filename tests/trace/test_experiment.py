"""The plain policy experiment: against models made of lists, and against published figures."""

from __future__ import annotations

import pytest
from eviction_models import MODELS, GittinsModel, hits_of
from hypothesis import given
from hypothesis import strategies as st
from trace_kit import prompts, whole_trace

from depth import deep
from longshore.cache.eviction_policies import LRU, POLICIES, Gittins
from longshore.errors import TraceError
from longshore.trace.analysis import Paths, optimal_hits
from longshore.trace.experiment import REFERENCES, Experiment, experiment, policy_named
from longshore.trace.readers import read_excerpt, read_mooncake
from traffic import synthesize

TABLE = {  # hit ratios at 1, 3, 10 and 20 % of the unique blocks of the conversation trace
    "lru": (0.052, 0.126, 0.279, 0.345),
    "arc": (0.077, 0.145, 0.287, 0.322),  # with ghost lists of full capacity each, as ours
    "lru-2": (0.106, 0.174, 0.246, 0.301),
    "s3-fifo": (0.077, 0.152, 0.244, 0.307),
}
BOUND = (0.246, 0.348, 0.366, 0.366)
SHARES = (0.01, 0.03, 0.10, 0.20)


@pytest.mark.parametrize("name", sorted(MODELS))
@given(data=st.data(), paths=prompts(), slots=st.integers(1, 14))
def test_every_policy_hits_what_its_model_hits(
    name: str, data: st.DataObject, paths: list[list[int]], slots: int
) -> None:
    _, kind = policy_named(name)
    tier, model = Experiment(kind, slots), MODELS[name](slots)
    served = []
    for path in paths:
        served.append(tier.serve(path))
        tier.policy.check_integrity()
        assert len(tier.resident()) == len(tier.policy) <= slots
    assert served == hits_of(model, paths)
    assert tier.resident() == set(model.blocks)
    totals = tier.totals()
    assert (totals.requests, totals.block_refs, totals.hits) == (len(paths), sum(map(len, paths)), sum(served))


def test_every_policy_has_a_model() -> None:
    assert set(MODELS) == set(POLICIES) | set(REFERENCES)


@pytest.mark.parametrize("slots", [1, 5, 40, 700])
def test_gittins_hits_what_its_model_hits_over_many_steps(slots: int) -> None:
    paths = [request.hash_ids for request in synthesize("mixed", requests=300, load=0.2)]
    tier, model = Experiment(Gittins, slots), GittinsModel(slots)
    assert [tier.serve(path) for path in paths] == hits_of(model, paths)
    assert tier.resident() == set(model.blocks)
    assert len(model.spans.rows) > 5


@pytest.mark.parametrize("bits", [24, 40])
def test_it_makes_no_difference_which_bits_of_ids_differ(bits: int) -> None:
    paths = [request.hash_ids for request in synthesize("mixed", requests=300, load=0.2)]
    wide = [[block << bits for block in path] for path in paths]
    # Which departures share a bucket differs, and with it a few hits.
    assert experiment(wide, Gittins, 40).hits == pytest.approx(experiment(paths, Gittins, 40).hits, rel=0.1)


def test_hits_are_counted_before_anything_of_the_request_is_done() -> None:
    tier = Experiment(LRU, 2)
    assert tier.serve([1, 2]) == 0
    assert tier.serve([1, 3]) == 1
    assert tier.serve([1, 2]) == 1  # 2 made way for 3: tails go first
    assert tier.serve([4, 2]) == 0  # 2 is there, and not reached


def test_a_request_longer_than_the_tier_keeps_its_head() -> None:
    tier = Experiment(LRU, 2)
    tier.serve([1, 2, 3, 4])
    assert tier.resident() == {1, 2}


def test_a_tier_without_slots_is_refused() -> None:
    with pytest.raises(TraceError, match="at least one block, got 0"):
        Experiment(LRU, 0)
    with pytest.raises(TraceError, match="at least one block, got 0"):
        optimal_hits(Paths([]), 0)


def test_an_empty_trace_hits_nothing() -> None:
    assert experiment([], LRU, 4).ratio == 0.0


def test_an_unknown_policy_is_refused_and_the_known_are_named() -> None:
    with pytest.raises(TraceError, match=r"a policy out of arc, fifo, .*lru.*, got 'mru'"):
        policy_named("mru")
    assert policy_named("LRU") == ("lru", LRU)
    name, kind = policy_named(None)
    assert policy_named(name) == (name, kind)
    assert name not in REFERENCES


@pytest.mark.parametrize("name", sorted(MODELS))
def test_more_room_for_everything_hits_what_an_infinite_cache_hits(name: str) -> None:
    paths = Paths(request.hash_ids for request in read_excerpt())
    _, kind = policy_named(name)
    seen: set[int] = set()
    infinite = 0
    for path in paths:
        infinite += sum(block in seen for block in path)
        seen.update(path)
    assert experiment(paths, kind, paths.unique).hits == infinite == optimal_hits(paths, paths.unique) > 0


def test_no_policy_beats_the_bound_and_lru_gains_by_room() -> None:
    paths = Paths(request.hash_ids for request in read_excerpt())
    last = 0
    for slots in (1, 5, 20, 80, 320):
        bound = optimal_hits(paths, slots)
        hits = {name: experiment(paths, policy_named(name)[1], slots).hits for name in MODELS}
        assert max(hits.values()) <= bound
        assert last <= hits["lru"]
        last = hits["lru"]


@pytest.fixture(scope="module")
def conversation() -> Paths:
    return Paths(request.hash_ids for request in read_mooncake(whole_trace()))


@pytest.mark.parametrize("name", sorted(TABLE))
def test_the_published_table_is_reproduced(name: str, conversation: Paths) -> None:
    _, kind = policy_named(name)
    assert (len(conversation), len(conversation.blocks), conversation.unique) == (12_031, 288_500, 182_790)
    cells = dict(zip(SHARES, TABLE[name], strict=True))
    for share in deep((0.03,), SHARES):
        found = experiment(conversation, kind, round(share * conversation.unique)).ratio
        assert found == pytest.approx(cells[share], abs=0.01)


def test_the_default_policy_hits_what_its_page_says(conversation: Paths) -> None:
    """At 1 and, at night, 10 %, where it leads by the most over LRU, and over LRU-2; docs/eviction.md has all cells."""
    _, kind = policy_named(None)
    for share, ratio in deep([(0.01, 0.110)], [(0.01, 0.110), (0.10, 0.297)]):
        found = experiment(conversation, kind, round(share * conversation.unique)).ratio
        assert found == pytest.approx(ratio, abs=0.002)


def test_what_is_asked_for_twice_and_never_again_makes_way() -> None:
    """A text comes back once, 99 texts later: what was used twice must go before what was used once."""
    texts = [list(range(8 * text, 8 * text + 8)) for text in range(1600)]
    paths = Paths(path for text in range(1500) for path in (texts[text + 99], texts[text]))
    slots = 8 * 120
    hits = {kind: experiment(paths, policy_named(kind)[1], slots).hits for kind in ("gittins", "lru")}
    assert hits["lru"] == 0  # 198 texts were asked for meanwhile
    assert hits["gittins"] > 0.8 * optimal_hits(paths, slots)


def test_the_published_bound_is_reproduced(conversation: Paths) -> None:
    found = [optimal_hits(conversation, round(share * conversation.unique)) / 288_500 for share in SHARES]
    assert found == pytest.approx(BOUND, abs=0.0006)
