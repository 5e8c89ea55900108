"""Miss-ratio curves against direct simulation, and what is made of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from trace_kit import prompts, whole_trace

from longshore.cache.eviction import LRU
from longshore.errors import TraceError
from longshore.trace import read_excerpt, read_mooncake, synthesize
from longshore.trace.experiment import experiment
from longshore.trace.geometry import geometry_of
from longshore.trace.paths import Paths
from longshore.trace.sizing import Arrivals, Plan, Prices, plan
from longshore.trace.stack import NEVER, hits_at, stack_distances
from longshore.trace.tiered import TieredReplay
from longshore.trace.timing import PROFILES, Timing

TIMING = Timing(geometry_of("llama-3.1-8b"), PROFILES["h100"])


@given(prompts(blocks=14, requests=25))
def test_the_curve_is_what_simulation_of_every_capacity_finds(paths: list[list[int]]) -> None:
    curve = stack_distances(Paths(paths))
    capacities = np.arange(1, 20)
    assert hits_at(curve, capacities).tolist() == [experiment(paths, LRU, int(n)).hits for n in capacities]


@given(prompts(blocks=14, requests=25))
def test_distances_never_shrink_along_a_path_and_hits_never_with_room(paths: list[list[int]]) -> None:
    found = Paths(paths)
    curve = stack_distances(found)
    for start, end in zip(found.starts[:-1], found.starts[1:], strict=True):
        assert (np.diff(curve[start:end].astype(float)) >= 0).all()
    hits = hits_at(curve, np.arange(0, 20))
    assert hits[0] == 0
    assert (np.diff(hits) >= 0).all()
    assert hits[-1] == (curve < NEVER).sum()


def test_distances_by_hand() -> None:
    assert stack_distances(Paths([[1, 2, 3], [4, 5], [1, 2, 3]])).tolist() == [NEVER] * 5 + [3, 4, 5]
    assert stack_distances(Paths([])).tolist() == []
    assert stack_distances(Paths([[], [7], [], [7]])).tolist() == [NEVER, 1]
    with pytest.raises(TraceError, match="request 3: expected different blocks, got one twice"):
        stack_distances(Paths([[1, 2], [1, 2], [3, 1, 3]]))


def test_the_published_lru_row_is_on_the_curve() -> None:
    paths = Paths(request.hash_ids for request in read_mooncake(whole_trace()))
    sizes = np.array([round(share * paths.unique) for share in (0.01, 0.03, 0.10, 0.20)])
    ratios = hits_at(stack_distances(paths), sizes) / len(paths.blocks)
    assert ratios.tolist() == pytest.approx([0.052, 0.126, 0.279, 0.345], abs=0.001)


def arrivals(*, gap: float = 1.0) -> Arrivals:
    """The excerpt, evenly spaced."""
    found = Arrivals(512)
    for i, request in enumerate(read_excerpt()):
        found.add(gap * i, request.input_length, request.hash_ids)
    return found


def made(target: float = 0.5, **changes: object) -> Plan:
    return plan(arrivals(), TIMING, target, Prices(), **changes)  # type: ignore[arg-type]


def test_more_of_anything_never_hits_less_and_the_frontier_never_gets_slower() -> None:
    found = made()
    choices = {(each.host_bytes, each.file_bytes): each for each in found.choices}
    for each in found.choices:
        for other in found.choices:
            if other.host_bytes >= each.host_bytes and other.file_bytes >= each.file_bytes:
                assert other.hit_ratio >= each.hit_ratio
    assert choices[0, 0].hit_ratio == 0
    costs, times = zip(*((each.cost, each.ttft_p95) for each in found.frontier), strict=True)
    assert list(costs) == sorted(costs)
    assert list(times) == sorted(times, reverse=True)
    assert found.knee in found.frontier
    ratios = [ratio for _, ratio in found.curve]
    assert ratios == sorted(ratios)


def test_nothing_bought_computes_everything() -> None:
    found = made()
    replay = TieredReplay(TIMING, 512, {"host": 1 << 30}, LRU)
    requests = [replace(r, timestamp_ms=1000.0 * i) for i, r in enumerate(read_excerpt())]
    for _ in replay.run(requests):
        pass
    nothing = found.frontier[0]
    assert (nothing.host_bytes, nothing.cost) == (0, 0)
    assert nothing.ttft_p50 == pytest.approx(np.percentile(replay.tally.recompute, 50))
    assert nothing.ttft_p95 == pytest.approx(np.percentile(replay.tally.recompute, 95))


def test_a_size_gives_in_a_replay_what_the_plan_says() -> None:
    """Where nothing waits for anything, one tier, and LRU, both must say the same."""
    seen = list(synthesize("chats", requests=300, seed=5))
    spread = [replace(request, timestamp_ms=30_000.0 * i) for i, request in enumerate(seen)]
    known = Arrivals(512)
    for request in spread:
        known.add(request.timestamp_ms / 1000, request.input_length, request.hash_ids)
    found = plan(known, TIMING, 1.0, Prices())
    for choice in [each for each in found.choices if not each.file_bytes][2::3]:
        replay = TieredReplay(TIMING, 512, {"host": choice.host_bytes}, LRU, gated=False)
        for _ in replay.run(spread):
            pass
        hits = sum(replay.tally.hits.values()) / replay.tally.block_refs
        assert hits == pytest.approx(choice.hit_ratio, abs=0.01)
        assert np.percentile(replay.tally.ttft, 50) == pytest.approx(choice.ttft_p50, rel=0.05)


def test_the_cheapest_that_keeps_the_target_is_recommended() -> None:
    generous, best = made(1e6), made().frontier[-1]
    assert generous.recommended == generous.frontier[0]
    assert made(best.ttft_p95 / 2).recommended is None
    middle = made(best.ttft_p95 * 1.02).recommended
    assert middle is not None
    assert middle.ttft_p95 <= best.ttft_p95 * 1.02
    cheaper = [each for each in made().choices if each.cost < middle.cost]
    assert all(each.ttft_p95 > best.ttft_p95 * 1.02 or each in made().frontier for each in cheaper)


def test_more_engines_are_faster_and_the_plan_is_deterministic() -> None:
    one, two = made(), made(engines=2)
    assert two.frontier[0].ttft_p95 <= one.frontier[0].ttft_p95
    assert made().as_json() == one.as_json()
    json.dumps(one.as_json())


@pytest.mark.parametrize("content", ["{", "dram_per_gib = 1", "dram_per_gib = 1\nnvme_per_gib = -1", "x = 1",
                                     "dram_per_gib = true\nnvme_per_gib = 1",
                                     "dram_per_gib = 1\nnvme_per_gib = 1\ncurrency = 3"])  # fmt: skip
def test_prices_that_are_none_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(content)
    with pytest.raises(TraceError, match=r"prices\.toml: expected"):
        Prices.read(path)
    with pytest.raises(TraceError, match=r"absent"):
        Prices.read(tmp_path / "absent")


def test_prices_change_what_is_cheapest(tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text('dram_per_gib = 2.5\nnvme_per_gib = 0.1\ncurrency = "EUR"\n')
    prices = Prices.read(path)
    assert prices == Prices(2.5, 0.1, "EUR")
    assert plan(arrivals(), TIMING, 0.5, prices).frontier[-1].cost < made().frontier[-1].cost


def test_there_must_be_something_to_plan_for() -> None:
    with pytest.raises(TraceError, match="expected a request"):
        plan(Arrivals(512), TIMING, 0.5, Prices())
    with pytest.raises(TraceError, match="a target above zero"):
        plan(arrivals(), TIMING, 0.0, Prices())
