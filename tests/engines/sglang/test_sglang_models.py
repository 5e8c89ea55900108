"""Real servers of other models."""

from __future__ import annotations

from pathlib import Path

from sglang_kit import Server, prompt, write_window_model

TOKENS, SERVED = 400, 384


def test_sliding_windows_of_which_sglang_keeps_all_tokens(tmp_path: Path) -> None:
    """SGLang has no host pool of its own for the windows of Gemma 3: all layers keep whole prompts."""
    tier = {"file_path": str(tmp_path / "tier"), "file_size": "64MiB"}
    with Server(write_window_model(tmp_path / "model"), tmp_path / "log", tier=tier) as running:
        oracle = [running.ask(prompt(seed, TOKENS)) for seed in range(3)]
        assert len({tuple(answer.logprobs) for answer in oracle}) == 3
        for seed, expected in enumerate(oracle):
            answer = running.ask_storage(prompt(seed, TOKENS), expected, SERVED)
            assert (expected.cached, answer.storage, answer.cached) == (0, SERVED, SERVED)
