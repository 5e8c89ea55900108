"""`longshore bench cache` measures the real manager, and both sides see the same blocks."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from longshore.bench import managers
from longshore.bench.cache_sides import Ours, PlainLRU, PromptSet
from longshore.boundary import HOST
from longshore.cli.app import app
from longshore.cli.options import counts_of
from longshore.errors import BenchError, ConfigError

KINDS = (
    "match",
    "commit",
    "offload",
    "evict",
    "below",
    "prompt",
    "slots",
    "onboard",
    "memory",
    "policy",
    "ghosts",
    "pause",
)


def test_every_case_has_a_figure_and_a_reference() -> None:
    cases = {case.name: case for case in managers.run(blocks=[512], repeats=1)}
    assert set(cases) == {*(f"{kind}/512" for kind in KINDS), "hash"}
    for case in cases.values():
        if case.name not in ("memory/512", "ghosts/512"):  # so few fit into what is there already
            assert case.value > 0 and case.reference_value > 0
        assert case.unit in ("ns", "us", "ms", "bytes")


def test_memory_is_that_of_filled_tiers() -> None:
    (memory,) = managers.run(blocks=[20_000], only=["memory/20000"], repeats=1)
    assert 100 < memory.value < 400
    assert memory.reference_value > 50


def test_policy_and_ghost_list_stay_within_their_bounds() -> None:
    policy, ghosts = managers.run(blocks=[100_000], only=["policy/100000", "ghosts/100000"], repeats=1)
    assert (policy.reference_value, ghosts.reference_value) == (20, 60)
    assert 10 < policy.value < 20
    assert 25 < ghosts.value < 60


def test_load_has_the_requested_distinct_blocks_and_shares_prefixes() -> None:
    load = PromptSet(5000)
    assert len({key for prompt in load.prompts for key in prompt}) == 5000
    assert any(load.shared)
    for prompt, shared in zip(load.prompts, load.shared, strict=True):
        assert shared == 0 or any(elder[:shared] == prompt[:shared] for elder in load.prompts if elder is not prompt)
    assert PromptSet(5000).prompts == load.prompts


def test_stored_blocks_are_resident_and_evicted_ones_are_not() -> None:
    load, ours = PromptSet(256), Ours(256)
    for prompt, shared in zip(load.prompts, load.shared, strict=True):
        ours.store(prompt, shared)
    assert ours.cache.stats()[0].ready == 256
    ours.store(load.fresh(64), before_eviction=True)
    assert ours.cache.counters.evictions[HOST] == 64 + 1  # one slot in 256 is freed ahead
    assert (ours.cache.leases, ours.cache.protected, ours.cache.jobs_in_flight) == (0, 0, 0)


def test_the_plain_reference_keeps_what_was_used_last() -> None:
    plain = PlainLRU(2)
    plain.store([b"a", b"b"])
    plain.match([b"a"])
    plain.store([b"c"])
    plain.slots([b"a", b"c"])
    with pytest.raises(KeyError):
        plain.slots([b"b"])


def test_too_few_blocks_and_unknown_cases_are_refused() -> None:
    with pytest.raises(BenchError, match="at least 64"):
        list(managers.run(blocks=[8]))
    with pytest.raises(BenchError, match="no case match/9"):
        list(managers.run(blocks=[64], only=["match/9"]))
    assert counts_of("10000,1000000", "--blocks", 64) == [10_000, 1_000_000]
    with pytest.raises(ConfigError, match="--blocks: expected comma-separated whole numbers of at least 64"):
        counts_of("10k", "--blocks", 64)


def test_the_command_prints_one_json_object() -> None:
    options = ["--blocks", "128", "--case", "match/128", "--repeats", "1", "--json"]
    told = CliRunner().invoke(app, ["bench", "cache", *options])
    assert told.exit_code == 0, told.output
    (case,) = json.loads(told.stdout)["cases"]
    assert (case["name"], case["unit"]) == ("match/128", "ns")
