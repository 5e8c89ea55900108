"""A store that two engines share: what one has computed the other restores, and never what other weights computed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_calls import generate
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from longshore.boundary import REMOTE
from longshore.config import Config
from longshore.engines.transformers import PrefixStore, scope, tiered

BLOCK = 16
PROMPT = [int(t) for t in torch.randint(0, 256, (203,), generator=torch.manual_seed(5))]


def make_model(seed: int) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().requires_grad_(requires_grad=False)


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Config]:
    """Settings of engines that share nothing but a store. The gate would compute: these models are tiny."""
    directory = tmp_path / "shared"
    directory.mkdir()
    url = f"file://{directory}?probe_timeout=20s&fetch_timeout=20s&write_timeout=20s"
    yield Config.make(host_size="4MiB", remote=url, gate=False, blocks_per_chunk=2, load_timeout=60)


def prefill(model: Any, tokens: list[int]) -> DynamicCache:
    return model(torch.tensor([tokens]), past_key_values=DynamicCache(), use_cache=True).past_key_values


def continued(model: Any, cache: DynamicCache) -> list[int]:
    """Eight tokens after the prompt, of which `cache` has the first."""
    return model.generate(torch.tensor([PROMPT]), past_key_values=cache, max_new_tokens=8, do_sample=False)[0].tolist()


def stored_by(model: Any, config: Config) -> None:
    with PrefixStore(model, config, block_size=BLOCK, staging_blocks=8) as store:
        assert store.store_prefix(PROMPT, prefill(model, PROMPT)) == 192


def restored_by(model: Any, config: Config) -> tuple[int, list[int]]:
    with PrefixStore(model, config, block_size=BLOCK, staging_blocks=8) as store:
        cache, tokens = store.restore_prefix(PROMPT[:-1])
        return tokens, continued(model, cache)


def test_another_engine_of_the_same_weights_restores_the_prefix(shared: Config) -> None:
    stored_by(make_model(1), shared)
    tokens, answer = restored_by(make_model(1), shared)
    assert tokens == 192
    assert answer == continued(make_model(1), DynamicCache())


@pytest.mark.parametrize("guarded", [True, False])
def test_engines_of_other_weights_exchange_nothing(
    shared: Config, guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = continued(make_model(2), DynamicCache())
    if not guarded:  # the negative control: without the guard the other engine's bytes come, and its answer changes
        monkeypatch.setattr(scope, "weights_digest", lambda model: "the same for all")
    stored_by(make_model(1), shared)
    tokens, answer = restored_by(make_model(2), shared)
    assert tokens == (0 if guarded else 192)
    assert (answer == right) is guarded


def served(model: Any, config: Config) -> tuple[list[int], tuple[str, ...]]:
    """The answer to the prompt by continuous batching, and where its leading blocks came from."""
    with tiered(model, config) as tiers:
        (output,) = generate(model, [PROMPT])
        return list(output.generated_tokens), tiers.records[0].sources


def test_continuous_batching_is_served_what_another_engine_has_stored(shared: Config) -> None:
    first, none = served(make_model(1), shared)
    second, sources = served(make_model(1), shared)
    assert (none, sources) == ((), (REMOTE,) * 12)
    assert first == second


def test_reset_keeps_the_store_and_new_weights_rename_it(shared: Config) -> None:
    model = make_model(1)
    stored_by(model, shared)
    with PrefixStore(model, shared, block_size=BLOCK, staging_blocks=8) as store:
        (tier,) = store._stack.remote
        name = tier.namespace  # type: ignore[attr-defined]
        with store._stack.runtime.batch() as cache:
            cache.reset()
        assert tier.namespace == name  # type: ignore[attr-defined]
        assert store.restore_prefix(PROMPT[:-1])[1] == 192
        model.model.layers[0].self_attn.k_proj.weight.add_(1.0)
        assert store.restore_prefix(PROMPT[:-1])[1] == 0
        assert store._stack.remote[0].namespace != name  # type: ignore[attr-defined]
        with store._stack.runtime.batch() as cache:
            cache.reset(weights=True)
        known = store._stack.scope.digest
        assert store._stack.remote[0].namespace not in (name, known)  # type: ignore[attr-defined]


def test_a_store_slower_than_computing_is_asked_seldom(shared: Config) -> None:
    model = make_model(1)
    stored_by(model, shared)
    config = Config.make(
        host_size="4MiB", remote=shared.remote, prefill_speed=1e9, blocks_per_chunk=2, load_timeout=60, background=False
    )
    asked = 0
    with PrefixStore(model, config, block_size=BLOCK, staging_blocks=8) as store:
        assert store.restore_prefix(PROMPT[:-1])[1] == 192  # nothing is known of the store yet
        runtime, cache = store._stack.runtime, store._stack.runtime._cache
        before = cache.counters.probes[REMOTE].total()
        for prompt in range(10):
            assert store.restore_prefix([prompt, *PROMPT[1:-1]])[1] == 0
            asked += len(runtime._probing)
        assert runtime.flush(60)
        asked += cache.counters.probes[REMOTE].total() - before
    assert asked <= 6  # of 60 chunks: a try now and then
