"""Real engines of vLLM on the CPU: what goes wrong costs time, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_runs import CONNECTOR, Serve, asked, long_prompt, prompts, tiers


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


def test_tier_host_killed_during_reads_changes_no_answer(serve: Serve, oracles: Any, tmp_path: Path) -> None:
    """It dies with reads under way; until there is another one its blocks are computed, and then served again."""
    ask, oracle = asked(prompts()), oracles("llama")
    to_files = [["drop_host"], ["reset"]]
    steps = [*ask, *to_files, ["kill_tier_host"], *ask, ["revive_tier_host"], *to_files, *ask]
    served = serve("llama", steps, tiers(tmp_path / "tier"), 160)
    assert served.answers == [*oracle[:3], *oracle]
    assert served.counters["failures"]["file"]["tier_host"] == 1
    assert served.counters["failed"]["file->host"] > 0
    assert served.counters["arrived"]["file->host"] > 0
    assert served.counters["held"] == 0


def test_blocks_slower_to_read_than_to_compute_are_computed(serve: Serve, oracles: Any, tmp_path: Path) -> None:
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


def test_a_damaged_eviction_order_costs_time_and_nothing_else(serve: Serve, oracles: Any, tmp_path: Path) -> None:
    ask = asked(prompts())
    steps = [*ask, ["reset"], ["damage"], *ask, ["reset"], *ask]
    served = serve("llama", steps, tiers(tmp_path / "tier"), 160, connector=CONNECTOR)
    assert served.counters["faults"] == 1, "the damage was met"
    tokens = [each["tokens"] for each in oracles("llama")[:3]]
    assert [each["tokens"] for each in served.answers] == tokens * 3
    assert served.answers[-1]["cached"] == oracles("llama")[2]["cached"], "computed, but for what the device has"


CHUNKED = {"max_num_batched_tokens": 128}
"""Prompts are computed, and offered, four chunks at a time."""


def test_prompt_longer_than_host_memory_is_served_when_chunked(serve: Serve, tmp_path: Path) -> None:
    prompt = long_prompt()
    ask, extra = asked([prompt]), {**tiers(tmp_path / "tier"), "host_size": "576KiB"}
    cold = serve("llama", ask, None, 160, options=CHUNKED).answers[0]["tokens"]
    aborts = [["abort", prompt, 1], ["settle"]], [["abort", prompt, 4], ["settle"]]  # loads end before a reset
    steps = [["reset"], *ask, ["reset"], *aborts[0], ["reset"], *ask, ["reset"], *aborts[1]]
    served = serve("llama", [*ask, *steps, ["reset"], *ask], extra, 160, options=CHUNKED)
    assert served.counters["image_bytes"] == [576 * 1024 // 12], "12 chunks of 28"
    assert [each["tokens"] for each in served.answers] == [cold] * 4
    assert [each["cached"] >= 12 * 32 for each in served.answers] == [False, True, True, True], served
    assert served.counters["held"] == 0


@pytest.mark.parametrize("tokens", [128, 1024], ids=["in pieces", "at once"])
def test_a_prompt_longer_than_host_memory_is_stored_whole(serve: Serve, tmp_path: Path, tokens: int) -> None:
    """One request stores it, and the next one loads it; also from files after a restart."""
    prompts, options = [long_prompt(seed=seed) for seed in (1, 2)], {"max_num_batched_tokens": tokens}
    cold = [each["tokens"] for each in serve("llama", asked(prompts), None, 160, options=options).answers]
    extra = {**tiers(tmp_path / "tier"), "host_size": "576KiB"}
    steps = [*asked(prompts[:1]), ["settle"], ["reset"]] * 2 + [
        *asked(prompts[1:]),
        ["settle"],
        ["reset"],
        *asked(prompts),
    ]
    served = serve("llama", steps, extra, 160, options=options, connector=CONNECTOR)
    assert served.counters["image_bytes"] == [576 * 1024 // 12], "12 chunks of 28"
    assert [each["tokens"] for each in served.answers] == [cold[0], cold[0], cold[1], *cold]
    assert [each["cached"] for each in served.answers] == [0, 28 * 32, 0, 28 * 32, 28 * 32]
    assert served.counters["held"] == served.counters["faults"] == 0
    restarted = serve("llama", asked(prompts[:1]), extra, 160, options=options, connector=CONNECTOR)
    assert (restarted.answers[0]["tokens"], restarted.answers[0]["cached"]) == (cold[0], 28 * 32)


def test_long_prompt_is_whole_again_after_a_cut_store(serve: Serve, tmp_path: Path) -> None:
    """By an abort, a tier host that dies, a reset of the tiers. What comes again at once waits for its store."""
    prompt = long_prompt()
    (cold,) = serve("llama", asked([prompt]), None, 160, options=CHUNKED).answers
    ask, extra = (
        ["ask", prompt],
        {**tiers(tmp_path / "tier"), "host_size": "576KiB", "load_timeout": 120.0, "write_timeout": 10.0},
    )
    whole = [ask, ["settle"], ["reset"], ask, ["reset"]]
    steps = [["abort", prompt, 4], ["reset"], ask, ["reset"], ask, ["reset"]]
    steps += [["reset_tiers"], ["kill_tier_host"], ask, ["revive_tier_host"], ["reset"], *whole]
    steps += [["abort", prompt, 4], ["settle"], ["reset_tiers"], *whole]
    served = serve("llama", steps, extra, 160, options=CHUNKED, connector=CONNECTOR)
    assert [each["tokens"] for each in served.answers] == [cold["tokens"]] * 7
    assert [each["cached"] == 28 * 32 for each in served.answers] == [False, True, False, False, True, False, True]
    assert served.counters["held"] == served.counters["faults"] == 0


def test_prompts_longer_than_host_memory_are_loaded_whole(serve: Serve, tmp_path: Path) -> None:
    """One alone, and two at once; also after one is aborted, and after its load is cut off by a reset of the tiers."""
    prompts = [long_prompt(seed=seed) for seed in (1, 2)]
    cold = [each["tokens"] for each in serve("llama", asked(prompts), None, 160, options=CHUNKED).answers]
    extra = {**tiers(tmp_path / "tier"), "host_size": "576KiB"}
    extra |= {"spec_name": "WatchedSpec", "spec_module_path": "watched_spec"}
    stored = [*(["fill", tokens, 9 * 32] for tokens in prompts), ["reset"]]
    alone = [["ask", prompts[0]], ["reset"]]
    steps = [*stored, *alone, ["abort", prompts[0], 3], *alone, ["ask_together", prompts], ["reset"]]
    steps += [["cut_off", prompts[1], 3], ["reset"], *stored, *alone, ["settle"], ["witness"]]
    served = serve("llama", steps, extra, 160, options=CHUNKED, script="many_requests.py", connector=CONNECTOR)
    first, second, together, cut, last, seen = served.answers
    whole = [first, second, *together, last]
    assert [each["tokens"] for each in (*whole, cut)] == [cold[0], cold[0], *cold, cold[0], cold[1]]
    assert [each["cached"] for each in whole] == [28 * 32] * 5
    assert seen["loads"] > 0
    assert (seen["wrong"], seen["open"]) == (0, 0)
    assert served.counters["held"] == served.counters["faults"] == 0


def test_hints_of_requests_are_followed_in_a_running_engine(serve: Serve, tmp_path: Path) -> None:
    prompt = prompts()[0]
    hints: list[dict[str, Any] | None] = [{"store": False}, None, {"load": []}, None, {"retention": [{"priority": 90}]}]
    steps = [step for each in hints for step in (["ask", prompt, "", each], ["settle"], ["reset"])]
    answers = serve("llama", steps, tiers(tmp_path / "tier"), 160).answers
    assert [each["tokens"] for each in answers] == [answers[0]["tokens"]] * 5
    assert [each["cached"] > 0 for each in answers] == [False, False, False, True, True]
