"""Two tensor parallel ranks on the CPU, each in a process of its own, over one arena."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_runs import CONNECTOR, Serve, ask_oracle, asked, long_prompt, prompts, tiers

TWO = {"options": {"tensor_parallel_size": 2}, "environment": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}}
FLOAT = 4


@pytest.mark.parametrize(
    ("model", "image_bytes"),
    [
        # Keys and values of three layers: 32 tokens, one head of 32 numbers on each rank.
        pytest.param("llama", 2 * 3 * 2 * 32 * 32 * FLOAT, id="a part of each rank"),
        # The latent of two layers, 16 tokens of 576 numbers: the same on both ranks.
        pytest.param("deepseek", 2 * 16 * 576 * FLOAT, id="one part for both"),
    ],
)
def test_two_ranks_are_served_what_they_stored(model: str, image_bytes: int, serve: Serve, tmp_path: Path) -> None:
    """From the host tier and after a restart, but not with a bit flipped, which every rank must load to notice."""
    oracle, ask = ask_oracle(serve, model, **TWO), asked(prompts())
    cold, warm = oracle[:3], oracle[3:]
    assert all(each["cached"] > 0 for each in warm)
    steps = [*ask, ["reset"], *ask, ["settle"], ["reset"], ["flip"], *ask]
    first = serve(model, steps, tiers(tmp_path / "tier"), 160, **TWO)
    answers, flipped = first.answers[:6], first.answers[6:]
    assert answers == [*cold, *warm]
    assert first.counters["image_bytes"] == [image_bytes]
    assert first.counters["arrived"]["host->device"] > 0
    assert first.counters["held"] == 0
    assert all(ours["logprobs"] != theirs["logprobs"] for ours, theirs in zip(flipped, warm, strict=True))

    second = serve(model, ask, tiers(tmp_path / "tier"), 160, **TWO)
    assert second.answers == warm
    assert second.counters["arrived"]["file->host"] > 0


def test_two_ranks_load_a_prompt_longer_than_host_memory_whole(serve: Serve, tmp_path: Path) -> None:
    prompt = long_prompt()
    chunked = {**TWO, "options": {**TWO["options"], "max_num_batched_tokens": 128}}
    (cold,) = serve("llama", asked([prompt]), None, 160, **chunked).answers
    steps = [["fill", prompt, 9 * 32], ["reset"], ["ask", prompt], ["reset"], ["ask", prompt]]
    extra = {**tiers(tmp_path / "tier"), "host_size": "576KiB"}
    served = serve("llama", steps, extra, 160, script="many_requests.py", connector=CONNECTOR, **chunked)
    assert [each["tokens"] for each in served.answers] == [cold["tokens"]] * 2
    assert [each["cached"] for each in served.answers] == [28 * 32] * 2
    assert served.counters["held"] == served.counters["faults"] == 0


@pytest.mark.parametrize("what", ["store", "load"])
def test_rank_death_within_a_long_prompt_costs_only_hits(serve: Serve, tmp_path: Path, what: str) -> None:
    """Its engine ends; the next one on the same files computes what is not there, and then finds the prompt whole."""
    prompt, patient = long_prompt(), {"load_timeout": 120.0, "write_timeout": 600.0}  # also on a busy machine
    extra = {**tiers(tmp_path / "tier"), "host_size": "576KiB", **patient}
    chunked = {**TWO, "options": {**TWO["options"], "max_num_batched_tokens": 1024}}
    (cold,) = serve("llama", asked([prompt]), None, 160, **chunked).answers
    whole = [["ask", prompt], ["settle"], ["reset"], ["ask", prompt]]
    before = [] if what == "store" else [["ask", prompt], ["settle"], ["reset"]]
    died = serve("llama", [*before, ["kill_rank", prompt, what]], extra, 160, connector=CONNECTOR, **chunked)
    assert died.answers[-1]["died"]
    served = serve("llama", whole, extra, 160, connector=CONNECTOR, **chunked)
    assert [each["tokens"] for each in served.answers] == [cold["tokens"]] * 2
    assert served.answers[-1]["cached"] == 28 * 32, served
    assert served.answers[0]["cached"] == 28 * 32 or what == "store"
    assert served.counters["held"] == served.counters["faults"] == 0


def test_another_number_of_ranks_finds_nothing(serve: Serve, oracles: Any, tmp_path: Path) -> None:
    ask = asked(prompts())
    stored = serve("llama", [*ask[:1], ["settle"]], tiers(tmp_path / "tier"), 160, **TWO)
    assert stored.counters["arrived"]["host->file"] > 0
    alone = serve("llama", ask, tiers(tmp_path / "tier"), 160)
    assert alone.answers == oracles("llama")[:3]
    assert alone.counters["arrived"]["file->host"] == 0
