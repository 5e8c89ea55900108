"""Tiny models with random weights, one of each kind of KV cache that the adapter serves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 512
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_COMMON, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2))


def _gemma() -> Any:
    """Sliding windows in two layers of three: two groups over one pool."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            **_COMMON,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            sliding_window=64,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        )
    )


MODELS: dict[str, Callable[[], Any]] = {
    "llama": _llama,
    "gemma": _gemma,
}


def save(name: str, directory: Path, seed: int = 0) -> Path:
    """Write a model into `directory`, unless it is there."""
    path = directory / f"{name}-{seed}"
    if not (path / "config.json").exists():
        torch.manual_seed(seed)
        MODELS[name]().save_pretrained(path)
    return path
