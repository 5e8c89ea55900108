"""Miss-ratio curves against direct simulation, and what is made of them."""

from __future__ import annotations

import json
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from trace_kit import prompts, whole_trace

from longshore.cache.eviction_policies import DEFAULT_POLICY, LRU
from longshore.errors import TraceError
from longshore.trace import read_excerpt, read_mooncake
from longshore.trace.analysis import NEVER, Paths, stack_distances
from longshore.trace.experiment import experiment
from longshore.trace.machine import PROFILES, Timing, geometry_of
from longshore.trace.replay import TieredReplay
from longshore.trace.result import Replayed
from longshore.trace.sizing import (
    DRAM_GIB,
    DRIVES_GB,
    Arrivals,
    Estimate,
    Plan,
    Prices,
    Replay,
    Size,
    estimate,
    plan,
    sizes_for,
)
from traffic import synthesize

TIMING = Timing(geometry_of("llama-3.1-8b"), PROFILES["h100"])


def hits_at(distances: npt.NDArray[np.int64], capacities: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The hits of LRU at each of `capacities`, in blocks."""
    return np.searchsorted(np.sort(distances), capacities, side="right")


@given(prompts(blocks=14, requests=25))
def test_the_curve_is_what_simulation_of_every_capacity_finds(paths: list[list[int]]) -> None:
    curve = stack_distances(Paths(paths))
    capacities = np.arange(1, 20)
    assert hits_at(curve, capacities).tolist() == [experiment(paths, LRU, int(n)).hits for n in capacities]


@given(prompts(blocks=14, requests=25))
def test_distances_grow_along_paths_and_hits_with_room(paths: list[list[int]]) -> None:
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
    with pytest.raises(TraceError, match="request 3: expected distinct blocks, got one twice"):
        stack_distances(Paths([[1, 2], [1, 2], [3, 1, 3]]))


def test_the_published_lru_row_is_on_the_curve() -> None:
    paths = Paths(request.hash_ids for request in read_mooncake(whole_trace()))
    sizes = np.array([round(share * paths.unique) for share in (0.01, 0.03, 0.10, 0.20)])
    ratios = hits_at(stack_distances(paths), sizes) / len(paths.blocks)
    assert ratios.tolist() == pytest.approx([0.052, 0.126, 0.279, 0.345], abs=0.001)


def arrivals(*, gap: float = 1.0, replicas: int = 1) -> Arrivals:
    """The excerpt, evenly spaced."""
    found = Arrivals(512, replicas)
    for i, request in enumerate(read_excerpt()):
        found.add(gap * i, request.input_length, request.hash_ids)
    return found


def replay(size: Size, engines: int, *, gap: float = 1.0) -> TieredReplay:
    tiers = {"host": size.host} | ({"file": size.file} if size.file else {})
    run = TieredReplay(TIMING, 512, tiers, DEFAULT_POLICY, engines=engines)
    for _ in run.run(replace(request, timestamp_ms=1000 * gap * i) for i, request in enumerate(read_excerpt())):
        pass
    return run


def made(target: float = 0.5, prices: Prices = Prices(), **changes: Any) -> Plan:  # noqa: B008 - frozen
    return plan(arrivals(), TIMING, target, prices, replay, **changes)


def estimates(known: Arrivals, sizes: list[Size]) -> list[Estimate]:
    return list(estimate(known, known.distances(), sizes, TIMING, Prices(), 1))


def test_estimates_of_larger_sizes_are_never_slower() -> None:
    sold = [(host << 30, file << 30) for host in (0, 1, 4, 16, 64) for file in (0, 8, 64) if host or not file]
    sizes = [Size(*each, store << 30) for each in sold for store in (0, 8, 128) if each[0] or not store]
    found = dict(zip(sizes, (each.ttft_p95 for each in estimates(arrivals(replicas=2), sizes)), strict=True))
    for size in sizes:
        for other in sizes:
            if all(more >= less for more, less in zip(other, size, strict=True)):
                assert found[other] <= found[size]
    assert found[Size(4 << 30, 0, 128 << 30)] < found[Size(4 << 30)]


def test_an_estimate_of_nothing_is_what_computing_everything_takes() -> None:
    (nothing,) = estimates(arrivals(), [Size(0)])
    assert nothing.cost == 0
    assert nothing.ttft_p95 == pytest.approx(np.percentile(replay(Size(1 << 30), 1).tally.recompute, 95))


def test_an_estimate_is_what_a_replay_finds_where_nothing_waits() -> None:
    """LRU, and half a minute between requests; one tier, or also a store of three replicas."""
    seen = list(synthesize("chats", requests=300, seed=5))
    spread = [replace(request, timestamp_ms=30_000.0 * i) for i, request in enumerate(seen)]
    for replicas, store in ((1, 0), (3, 0), (3, 64)):
        known = Arrivals(512, replicas)
        for request in spread:
            known.add(request.timestamp_ms / 1000, request.input_length, request.hash_ids)
        for each in estimates(known, [Size(gib << 30, 0, store << 30) for gib in (2, 16, 64)]):
            tiers = {"host": each.host_bytes} | ({"remote": each.store_bytes} if store else {})
            run = TieredReplay(TIMING, 512, tiers, LRU, gated=False, replicas=replicas)
            for _ in run.run(spread):
                pass
            assert np.percentile(run.tally.ttft, 95) == pytest.approx(each.ttft_p95, rel=0.05)


def test_every_figure_of_a_plan_is_that_of_a_replay() -> None:
    found = made(0.6)
    assert len(found.choices) > 2
    for choice in found.choices[1:]:
        again = Replayed(replay(choice.size, 1), "", 0, None)
        assert (choice.ttft_p50, choice.ttft_p95) == (again.ttft["p50"], again.ttft["p95"])
        assert choice.hit_ratio == again.hit_ratio
        assert choice.file_write_bytes_per_day == again.write_bytes_per_day("file")
    nothing = found.choices[0]
    assert (nothing.size, nothing.cost, nothing.ttft_p95) == (Size(0), 0, again.ttft["recompute_p95"])
    assert set(found.frontier) <= set(found.choices)
    assert found.knee in found.frontier


def test_sizes_are_those_that_are_sold() -> None:
    for choice in made(0.01).choices[1:]:
        assert choice.host_bytes in [gib << 30 for gib in DRAM_GIB]
        assert choice.file_bytes in [0, *(gb * 10**9 for gb in DRIVES_GB)]
    large = sizes_for(10**13, 1 << 26)
    assert Size(16 << 30, 7_680 * 10**9) in large.cells
    assert max(size.file for size in large.cells) == 15_360 * 10**9
    assert max(size.host for size in large.cells) == 4096 << 30
    assert max(size.host // (1 << 26) for size in sizes_for(10**13, 1 << 26, most_blocks=3000).cells) <= 3000
    with pytest.raises(TraceError, match="expected a block far smaller than"):
        sizes_for(10**13, 1 << 50)


def synthetic_replays(times: dict[Size, float]) -> tuple[list[Size], Replay]:
    """Replays of which only the times are known, which contradict all estimates."""
    asked: list[Size] = []

    def pretend(size: Size, engines: int) -> TieredReplay:
        asked.append(size)
        run = replay(size, engines)
        run.tally.ttft = array("d", [times.get(size, 9.0)] * len(run.tally.ttft))
        return run

    return asked, pretend


def test_recommendation_keeps_the_target_in_its_replay() -> None:
    known = arrivals()
    estimated = estimates(known, [Size(16 << 30), Size(32 << 30)])
    between = (estimated[0].ttft_p95 + estimated[1].ttft_p95) / 2
    asked, none_keeps = synthetic_replays({})
    assert plan(known, TIMING, between, Prices(), none_keeps).recommended is None
    assert Size(32 << 30) in asked
    asked, small_keeps = synthetic_replays({Size(16 << 30): between / 2, Size(32 << 30): between / 3})
    found = plan(known, TIMING, between, Prices(), small_keeps).recommended
    assert found.size == Size(16 << 30)
    assert asked[0] == Size(32 << 30), "the estimate's own choice comes first, then its cheaper neighbours"


def test_no_more_sizes_are_replayed_than_allowed() -> None:
    asked, pretend = synthetic_replays({})
    found = plan(arrivals(), TIMING, 0.01, Prices(), pretend, replays=1)
    assert len(asked) == 1
    assert [choice.size for choice in found.choices] == [Size(0), asked[0]]


def test_the_cheapest_replayed_size_that_keeps_the_target_is_recommended() -> None:
    generous, best = made(1e6), made().frontier[-1]
    assert generous.recommended == generous.choices[0]
    assert made(best.ttft_p95 / 2).recommended is None
    found = made(best.ttft_p95 * 1.02)
    assert found.recommended.ttft_p95 <= best.ttft_p95 * 1.02
    assert all(each.ttft_p95 > found.target for each in found.choices if each.cost < found.recommended.cost)


def test_overload_of_a_plan_names_engines_that_were_replayed() -> None:
    def rushed(size: Size, engines: int) -> TieredReplay:
        return replay(size, engines, gap=0.01)

    found = plan(arrivals(gap=0.01), TIMING, 0.5, Prices(), rushed)
    assert found.overload.engines == 1
    chosen = found.recommended or found.frontier[-1]
    again = rushed(chosen.size, found.overload.enough)
    assert again.tally.computing <= again.tally.seconds * found.overload.enough
    assert found.overload.ttft_p95 == np.percentile(again.tally.ttft, 95)
    assert made().overload is None


def test_overload_replays_one_size_and_engines_meet_the_target() -> None:
    asked: list[tuple[Size, int]] = []

    def rushed(size: Size, engines: int) -> TieredReplay:
        asked.append((size, engines))
        return replay(size, engines, gap=0.01)

    found = plan(arrivals(gap=0.01), TIMING, 2.0, Prices(), rushed)
    assert len({size for size, engines in asked if engines == 1}) <= 2
    assert found.recommended is None
    assert found.overload.missed is None
    assert found.overload.ttft_p95 is not None
    assert found.overload.ttft_p95 <= 2.0
    alone = max(rushed(asked[0][0], 1000).tally.ttft)  # nobody waits: what is left is computing
    out_of_reach = plan(arrivals(gap=0.01), TIMING, 1e-3, Prices(), rushed).overload
    assert out_of_reach.missed == 1e-3
    assert out_of_reach.ttft_p95 is not None
    assert out_of_reach.ttft_p95 <= alone
    assert "would keep up" in out_of_reach.words
    assert "needs faster engines, not more of them" in out_of_reach.words


def test_more_engines_are_faster_and_the_plan_is_deterministic() -> None:
    one, two = made(), made(engines=2)
    assert two.choices[0].ttft_p95 <= one.choices[0].ttft_p95
    assert made().as_json() == one.as_json()
    json.dumps(one.as_json())


@pytest.mark.parametrize("content", ["{", "dram_per_gib = 1", "dram_per_gib = 1\nnvme_per_gib = -1", "x = 1",
                                     "dram_per_gib = true\nnvme_per_gib = 1",
                                     "dram_per_gib = 1\nnvme_per_gib = 1\nstore_per_gib = 0",
                                     "dram_per_gib = 1\nnvme_per_gib = 1\ncurrency = 3"])  # fmt: skip
def test_prices_that_are_none_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(content)
    with pytest.raises(TraceError, match=r"prices\.toml: expected"):
        Prices.read(path)
    with pytest.raises(TraceError, match=r"absent"):
        Prices.read(tmp_path / "absent")


def test_prices_change_what_a_size_costs(tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text('dram_per_gib = 2.5\nnvme_per_gib = 0.1\ncurrency = "EUR"\n')
    prices = Prices.read(path)
    assert prices == Prices(2.5, 0.1, 2.5, "EUR")
    assert made(prices=prices).frontier[-1].cost < made().frontier[-1].cost
    assert prices.of(Size(4 << 30, 10 << 30)) == pytest.approx(11)
    path.write_text("dram_per_gib = 2.5\nnvme_per_gib = 0.1\nstore_per_gib = 0.5\n")
    assert Prices.read(path).of(Size(4 << 30, 10 << 30, 8 << 30), 3) == pytest.approx(3 * 11 + 4)


def test_distances_of_replicas_are_those_of_their_own_requests() -> None:
    known = Arrivals(1, replicas=2)
    for path in ([1, 2], [3], [1, 2], [4], [5], [1, 2]):
        known.add(0.0, len(path), path)
    own, shared = known.distances()
    assert shared.tolist() == [NEVER] * 3 + [2, 3] + [NEVER] * 2 + [3, 4]
    assert own.tolist() == [NEVER] * 3 + [1, 2] + [NEVER] * 4


def test_there_must_be_something_to_plan_for() -> None:
    with pytest.raises(TraceError, match="at least one request, got none"):
        plan(Arrivals(512), TIMING, 0.5, Prices(), replay)
    with pytest.raises(TraceError, match="a target above zero"):
        plan(arrivals(), TIMING, 0.0, Prices(), replay)
