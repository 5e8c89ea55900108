"""Host memory above files, without time: together they find about what one tier of their size does."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from trace_kit import ROOT

from depth import NIGHTLY, deep
from longshore.cache.eviction_policies import POLICIES, Gittins
from longshore.trace import read_mooncake
from longshore.trace.experiment import CacheReplay
from traffic import synthesize

TRACES = ROOT.parent / "shared" / "traces"
"""Recorded traces beside the clone, where there are any."""


def ratios(paths: Sequence[Sequence[int]], host: float = 0.03, file: float = 0.10) -> tuple[float, float, CacheReplay]:
    """Hit ratios of both tiers, which have these shares of the unique blocks, and of one as large as both."""
    unique, asked = len({block for path in paths for block in path}), sum(map(len, paths))
    both, one = (round(share * unique) for share in (file, host + file))
    tiers, single = CacheReplay(Gittins, one - both, both), CacheReplay(Gittins, one)
    hits = sum(map(tiers.serve, paths)), sum(map(single.serve, paths))
    tiers.cache.check_integrity()
    assert (tiers.cache.leases, tiers.cache.protected, tiers.cache.jobs_in_flight) == (0, 0, 0)
    assert sum(tiers.hits.values()) == hits[0]
    return hits[0] / asked, hits[1] / asked, tiers


@pytest.mark.parametrize("family", deep(["documents"], ["agents", "chats", "documents", "mixed"]))
def test_two_tiers_find_what_one_of_their_size_does(family: str) -> None:
    paths = [request.hash_ids for request in synthesize(family, requests=800, seed=3)]
    two, one, tiers = ratios(paths)
    assert two >= one - 0.01
    assert tiers.moved["file->host"] <= sum(tiers.hits.values())
    assert tiers.hits["host"] > 0 < tiers.hits["file"]


def test_path_longer_than_host_memory_moves_in_parts() -> None:
    tiers = CacheReplay(Gittins, 8, 64)
    assert [tiers.serve(range(40)), tiers.serve(range(40))] == [0, 40]
    assert tiers.moved["host->file"] >= 32
    tiers.cache.check_integrity()


def test_blocks_for_which_host_memory_has_no_slot_are_computed() -> None:
    """Both tiers are full of what the lease of a prompt holds that is longer than host memory."""
    tiers = CacheReplay(POLICIES["lru"], 64, 16)
    hits = tiers.serve(range(1, 81)), tiers.serve(range(1, 81), 1.0)
    assert hits[0] == 0 <= hits[1] < 80
    assert sum(tiers.hits.values()) == sum(hits)
    tiers.cache.check_integrity()
    assert (tiers.cache.leases, tiers.cache.protected, tiers.cache.jobs_in_flight) == (0, 0, 0)


@pytest.mark.parametrize("name", ["mooncake_conversation", "agent_a", "agent_dense", "agent_sparse"])
@pytest.mark.skipif(not (NIGHTLY and TRACES.is_dir()), reason="whole recorded traces: at night, beside the clone")
def test_two_tiers_find_as_much_on_recorded_traces(name: str) -> None:
    two, one, _ = ratios([request.hash_ids for request in read_mooncake(TRACES / f"{name}.jsonl")])
    assert two >= one - 0.01
