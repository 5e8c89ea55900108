"""Real engines of vLLM on the CPU: what goes wrong costs time, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine_runs import Serve, asked, prompts, tiers


def test_rotten_files_cost_time_and_nothing_else(serve: Serve, oracles: Any, tmp_path: Path) -> None:
    path, ask = tmp_path / "tier", asked(prompts())
    serve("llama", [*ask, ["settle"]], tiers(path), 160)
    segment = path / "segment"
    content = bytearray(segment.read_bytes())
    content[2048::4096] = bytes(byte ^ 1 for byte in content[2048::4096])
    segment.write_bytes(content)
    rotten = serve("llama", ask, tiers(path), 160)
    assert rotten.answers[:2] == oracles("llama")[:2]
    assert [each["tokens"] for each in rotten.answers] == [each["tokens"] for each in oracles("llama")[:3]]
    assert rotten.counters["misses"]["corrupt"] + rotten.counters["lost"]["file"] > 0


def test_a_tier_host_that_is_killed_while_it_reads_costs_time_and_nothing_else(
    serve: Serve, oracles: Any, tmp_path: Path
) -> None:
    """It dies with reads under way; until there is another one its blocks are computed, and then served again."""
    ask, oracle = asked(prompts()), oracles("llama")
    to_files = [["drop_host"], ["reset"]]
    steps = [*ask, *to_files, ["kill_tier_host"], *ask, ["revive_tier_host"], *to_files, *ask]
    served = serve("llama", steps, tiers(tmp_path / "tier"), 160)
    assert served.answers == [*oracle[:3], *oracle]
    assert served.counters["troubles"]["file"]["tier_host"] == 1
    assert served.counters["failed"]["file->host"] > 0
    assert served.counters["arrived"]["file->host"] > 0
    assert served.counters["held"] == 0


CONNECTOR = {
    "kv_connector": "LongshoreConnector",
    "kv_connector_module_path": "longshore.engines.vllm.connector",
    "kv_load_failure_policy": "recompute",
}


def test_what_takes_longer_to_read_than_steps_have_taken_is_computed(
    serve: Serve, oracles: Any, tmp_path: Path
) -> None:
    """Nobody says how quickly prompts are computed: that is seen in the engine's own steps."""
    ask = asked(prompts()[:2])
    steps = [*ask, ["learn_that_files_are_slow"], ["drop_host"], ["reset"], *ask]
    served = serve("llama", steps, {**tiers(tmp_path / "tier"), "gate": True}, 160, connector=CONNECTOR)
    assert served.answers == oracles("llama")[:2] * 2
    assert served.counters["recomputed"] > 0
    assert served.counters["arrived"].get("file->host", 0) == 0


def test_requests_whose_loads_fail_are_computed(serve: Serve, oracles: Any) -> None:
    ask = asked(prompts()[:2])
    steps = [*ask, ["reset"], ["refuse_loads"], *ask]
    served = serve("llama", steps, {"host_size": "96MiB"}, 160, connector=CONNECTOR)
    assert served.counters["refused"] >= 2
    assert served.counters["held"] == 0
    cold = oracles("llama")[:2]
    assert [each["tokens"] for each in served.answers] == [each["tokens"] for each in cold * 2]
    assert [each["logprobs"] for each in served.answers] == [each["logprobs"] for each in cold * 2]
