"""What cannot be served exactly is refused, or served without tiers; never served wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from serving import make_demo
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DynamicCache,
    FalconConfig,
    FalconForCausalLM,
    LlamaConfig,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    RwkvConfig,
    RwkvForCausalLM,
)

from longshore.cli.demo_runs import _engine
from longshore.config import Config
from longshore.engines.transformers import PrefixStore, tiered, why_not_served
from longshore.errors import CacheError, EngineError


def llama(**settings: Any) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, **settings,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


def falcon(**settings: Any) -> Any:
    torch.manual_seed(0)
    config = FalconConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, **settings)
    return FalconForCausalLM(config).eval()


def test_another_model_in_the_same_process_gets_no_tiers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ours, other = make_demo(tmp_path), make_demo(tmp_path)
    with torch.no_grad():
        other.model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)
    request = ours.workload.requests[9]
    with _engine(ours, ours.device_blocks) as ask:
        expected = ask(request)
    with tiered(ours.model, ours.config(tmp_path)) as tiers:
        with _engine(other, other.device_blocks) as ask:
            ask(request)
        assert tiers.stack is None
        assert "its model is not the one" in caplog.text
        with _engine(ours, ours.device_blocks) as ask:
            answer = ask(request)
        assert tiers.records[-1].sources == ()
    assert answer.generated_tokens == expected.generated_tokens
    assert answer.logprobs == expected.logprobs


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_embeddings_of_the_whole_prompt_are_refused(kind: str) -> None:
    model = llama()
    model.config.rope_parameters = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    assert kind in (why_not_served(model) or "")


def test_latent_attention_is_refused() -> None:
    config = DeepseekV3Config(num_hidden_layers=1, hidden_size=64)

    class Model:
        def __init__(self) -> None:
            self.config = config

    assert "MLA" in (why_not_served(Model()) or "")


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: None, "NoneType cannot be served with tiers: expected a causal language model of transformers"),
        (lambda: "gpt2", "str cannot be served with tiers: expected a causal language model of transformers"),
        (
            lambda: RwkvForCausalLM(
                RwkvConfig(vocab_size=64, hidden_size=32, attention_hidden_size=32, num_hidden_layers=2)
            ),
            r"RwkvForCausalLM .*: it has no KV cache: its forward\(\) takes no past_key_values",
        ),
        (
            lambda: OpenAIGPTLMHeadModel(OpenAIGPTConfig(vocab_size=64, n_embd=32, n_layer=2, n_head=4)),
            "OpenAIGPTLMHeadModel cannot be served with tiers: it has no KV cache",
        ),
        (lambda: falcon(multi_query=True), "FalconForCausalLM .* one KV head .*num_key_value_heads"),
    ],
    ids=["nothing", "a name", "RWKV", "OpenAI GPT", "Falcon with multi_query"],
)
def test_what_has_no_usable_kv_cache_is_refused(model: Callable[[], Any], reason: str) -> None:
    made = model()
    with pytest.raises(EngineError, match=reason):
        PrefixStore(made, Config.make(host_size="1MiB"))
    with pytest.raises(EngineError, match=reason), tiered(made, Config.make(host_size="1MiB")):
        pass


@pytest.mark.parametrize(
    "settings", [{"multi_query": False}, {"multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 2}]
)
def test_other_falcons_are_served(settings: dict[str, Any]) -> None:
    model, tokens = falcon(**settings), list(range(40))
    with torch.no_grad():
        cache = model(torch.tensor([tokens]), past_key_values=DynamicCache()).past_key_values
    with PrefixStore(model, Config.make(host_size="1MiB"), block_size=8, staging_blocks=8) as store:
        assert store.store_prefix(tokens, cache) == 40
        restored, length = store.restore_prefix(tokens)
    assert length == 40
    assert torch.equal(restored.layers[1].keys, cache.layers[1].keys)


def test_a_kept_manager_is_refused(tmp_path: Path) -> None:
    model = llama()
    model._cached_continuous_batching_manager = object()
    with pytest.raises(EngineError, match="destroy_cached"), tiered(model, Config.make(host_size="1MiB")):
        pass


def test_a_cache_of_another_dtype_is_refused(tmp_path: Path) -> None:
    model = llama()
    with torch.no_grad():
        cache = model(torch.ones((1, 40), dtype=torch.long), past_key_values=DynamicCache()).past_key_values
    half = llama().to(torch.bfloat16)
    store = PrefixStore(half, Config.make(host_size="1MiB"), block_size=16)
    with store, pytest.raises(CacheError, match="bfloat16"):
        store.store_prefix([1] * 40, cache)


def test_what_does_not_fit_is_not_said_to_be_kept(tmp_path: Path) -> None:
    model = llama()
    tokens = list(range(200)) + list(range(56))
    with torch.no_grad():
        cache = model(torch.tensor([tokens]), past_key_values=DynamicCache()).past_key_values
    with PrefixStore(model, Config.make(host_size="32KiB"), block_size=16) as store:
        kept = store.store_prefix(tokens, cache)
        assert 0 < kept < 256
        assert store.restore_prefix(tokens)[1] == kept
