"""Tiny models with random weights, one of each kind of KV cache that the adapter serves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

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


def _deepseek() -> Any:
    """Multi-head latent attention; vLLM on the CPU has it for this size of latent alone, and without a prefix cache."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    return DeepseekV2ForCausalLM(
        DeepseekV2Config(
            **_COMMON,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            kv_lora_rank=512,
            q_lora_rank=None,
            qk_nope_head_dim=32,
            qk_rope_head_dim=64,
            v_head_dim=32,
            first_k_dense_replace=2,
            n_routed_experts=2,
            num_experts_per_tok=1,
            n_shared_experts=1,
            moe_intermediate_size=64,
            n_group=1,
            topk_group=1,
        )
    )


def _qwen() -> Any:
    """Recurrent states in every other layer. The state is small: vLLM makes blocks of attention as large as one."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    return Qwen3NextForCausalLM(
        Qwen3NextConfig(
            **_COMMON,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=128,
            linear_num_value_heads=2,
            linear_num_key_heads=1,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            full_attention_interval=2,
            num_experts=2,
            num_experts_per_tok=1,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=64,
        )
    )


class Kind(NamedTuple):
    """How to make a model, its dtype, whether vLLM's own prefix cache can be its oracle, and more options of vLLM."""

    make: Callable[[], Any]
    dtype: str = "float32"
    is_cached_by_vllm: bool = True
    options: Mapping[str, Any] = MappingProxyType({})


MODELS = {
    "llama": Kind(_llama),
    "gemma": Kind(_gemma),
    # On a processor with AMX vLLM picks a backend for MLA that takes no float32.
    "deepseek": Kind(_deepseek, is_cached_by_vllm=False, options={"attention_backend": "CPU_MLA"}),
    "qwen": Kind(_qwen, dtype="bfloat16", is_cached_by_vllm=False),
}


def save(name: str, directory: Path, seed: int = 0) -> Path:
    """Write a model into `directory`, unless it is there."""
    path = directory / f"{name}-{seed}"
    if not (path / "config.json").exists():
        torch.manual_seed(seed)
        MODELS[name].make().to(getattr(torch, MODELS[name].dtype)).save_pretrained(path)
    return path
