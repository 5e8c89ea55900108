"""A replay of replicas against replicas: processes with tiers and clients of one Valkey server serve the same trace."""

from __future__ import annotations

from pathlib import Path

import pytest

from longshore.boundary import HOST, REMOTE
from longshore.cache.eviction_policies import DEFAULT_POLICY
from longshore.trace import TraceRequest
from longshore.trace.machine import PROFILES, Timing, geometry_of
from longshore.trace.replay import TieredReplay
from traffic import synthesize

REPLICAS, BLOCK, GAP = 3, 512, 20.0
TIMING = Timing(geometry_of("llama-3.1-8b"), PROFILES["h100"])
IMAGE = BLOCK * TIMING.geometry.kv_bytes_per_token


@pytest.mark.parametrize(("share", "bound"), [(2.0, 0.0), (0.5, 0.06)])
def test_a_replay_has_the_hits_of_real_replicas(share: float, bound: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal where the store loses nothing; with room for half of the blocks, to 6 % of all.

    Valkey's LRU looks at samples, and its clock has seconds, of which this trace takes few.
    """
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import replicas  # type: ignore[import-not-found]

    made = list(synthesize("agents", requests=150, seed=5))
    paths = [each.hash_ids[: each.input_length // BLOCK] for each in made]
    paths = [path for path in paths if path]
    blocks = sum(map(len, paths))
    slots = round(share * len({block for path in paths for block in path}))
    host = 4 * max(map(len, paths))
    hits, _ = replicas.measured([(list(path), GAP * at) for at, path in enumerate(paths)], REPLICAS, slots, 1, host, 20)
    replay = TieredReplay(
        TIMING, BLOCK, {HOST: host * IMAGE, REMOTE: slots * IMAGE}, DEFAULT_POLICY, gated=False, replicas=REPLICAS
    )
    for _ in replay.run(
        TraceRequest(1000 * GAP * at, len(path) * BLOCK + 10, 1, path) for at, path in enumerate(paths)
    ):
        pass
    assert replay.remote is not None
    assert abs(sum(replay.tally.hits.values()) - hits) <= bound * blocks
    assert replay.tally.hits[REMOTE] > 0.1 * blocks  # far more than the bound
    assert (replay.remote.evictions > 0) == (share < 1)
