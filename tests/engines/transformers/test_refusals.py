"""What cannot be served exactly is refused, or served without tiers; never served wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from serving import make_demo
from transformers import AutoModelForCausalLM, DeepseekV3Config, DynamicCache, LlamaConfig

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
        assert "another model" in caplog.text
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
