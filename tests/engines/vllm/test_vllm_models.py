"""Each kind of model in a real engine of vLLM on the CPU: log-probabilities are bit-equal to those of an oracle.

The oracle keeps everything and has the same schedule: one request at a time, as many tokens from its cache.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_runs import Serve, ask_oracle, asked, prompts, tiers
from tiny_models import MODELS


@pytest.mark.parametrize("model", sorted(MODELS))
def test_every_answer_is_that_of_the_oracle(model: str, serve: Serve, oracles: Any, tmp_path: Path) -> None:
    """From the host tier, from the file tier, and from the file tier after a restart; but not with a bit flipped."""
    oracle, ask = oracles(model), asked(prompts())
    cold, warm = oracle[:3], oracle[3:]
    assert all(each["cached"] > 0 for each in warm)
    steps = [*ask, ["reset"], *ask, ["drop_host"], ["reset"], *ask, ["settle"], ["reset"], ["flip"], *ask]
    first = serve(model, steps, tiers(tmp_path / "tier"), 160)
    answers, flipped = first.answers[:9], first.answers[9:]
    assert answers == [*cold, *warm, *warm]
    assert first.counters["arrived"]["host->device"] > first.counters["arrived"]["file->host"] > 0
    assert first.counters["held"] == 0
    assert [each["cached"] for each in flipped] == [each["cached"] for each in warm]
    assert all(ours["logprobs"] != theirs["logprobs"] for ours, theirs in zip(flipped, warm, strict=True))

    second = serve(model, ask, tiers(tmp_path / "tier"), 160)
    assert second.answers == warm
    assert second.counters["arrived"]["file->host"] > 0
    assert second.counters["held"] == 0


@pytest.mark.parametrize(("model", "chunks"), [("gemma", {"block_size": 128}), ("qwen", {"blocks_per_chunk": 2})])
def test_chunks_of_several_blocks_in_several_groups(
    model: str, chunks: dict[str, int], serve: Serve, tmp_path: Path
) -> None:
    """A window begins and ends within a chunk, a state is the last block of one."""
    oracle, ask = ask_oracle(serve, model, chunks), asked(prompts())
    cached = [each["cached"] for each in oracle[3:]]
    assert cached == [512, 384, 384] or (model == "qwen" and min(cached) > 0)  # whose blocks differ between processors
    steps = [*ask, ["reset"], *ask, ["drop_host"], ["reset"], *ask]
    served = serve(model, steps, {**tiers(tmp_path / "tier"), **chunks}, 160)
    assert served.answers == [*oracle, *oracle[3:]]
    assert served.counters["arrived"]["file->host"] > 0
    assert served.counters["held"] == 0
