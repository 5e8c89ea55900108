"""`PrefixStore` gives back what it was given, bit for bit, through a window smaller than the prefix."""

from __future__ import annotations

import contextlib
import linecache
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CLIPVisionConfig,
    DynamicCache,
    Gemma3TextConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

import longshore
from longshore.boundary import FILE, HOST
from longshore.cache.explain import Verdict, explain, read_events
from longshore.config import Config
from longshore.engines.transformers import PrefixStore
from longshore.errors import CacheError, CopyTimeoutError, EngineError, TierClosedError, TierError
from longshore.transfer.device.base import CpuStream

OURS = str(Path(longshore.__file__).parent)


def make_model(seed: int = 0, **settings: Any) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, **settings,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model()


def prefill(model: Any, tokens: list[int]) -> DynamicCache:
    with torch.no_grad():
        return model(torch.tensor([tokens]), past_key_values=DynamicCache(), use_cache=True).past_key_values


def bits(cache: DynamicCache, tokens: int) -> list[bytes]:
    states = [s for layer in cache.layers for s in (layer.keys, layer.values)]
    return [s[:, :, :tokens].contiguous().numpy().tobytes() for s in states]


@pytest.fixture(params=[1, 2])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Config]:
    yield Config.make(host_size="1MiB", file_path=tmp_path / "kv", file_size="4MiB", blocks_per_chunk=request.param)


def test_what_goes_in_comes_out(model: Any, config: Config) -> None:
    tokens = [int(t) for t in torch.randint(0, 256, (500,))]
    cache = prefill(model, tokens)
    with PrefixStore(model, config, block_size=16, staging_blocks=8) as store:
        kept = store.store_prefix(tokens, cache)
        assert kept == 500 // (16 * config.blocks_per_chunk) * 16 * config.blocks_per_chunk
        restored, n = store.restore_prefix(tokens)
        assert n == kept
        assert bits(restored, n) == bits(cache, n)
        assert store.restore_prefix([1, *tokens])[1] == 0
        _, part = store.restore_prefix(tokens[:100])
        assert part == 96


def test_explain_tells_what_a_restore_found(model: Any, tmp_path: Path) -> None:
    """Under the caller's name or `restore_N`, through a window smaller than the prefix, from both tiers."""
    tokens, events = [int(t) for t in torch.randint(0, 256, (160,))], tmp_path / "events"
    config = Config.make(host_size="16KiB", file_path=tmp_path / "kv", file_size="4MiB", events_path=events)
    with PrefixStore(model, config, block_size=16, staging_blocks=4) as store:
        store.store_prefix(tokens[:128], prefill(model, tokens))
        assert store.restore_prefix([1, *tokens])[1] == 0
        assert store.restore_prefix(tokens)[1] == 128
        assert store.restore_prefix(tokens[:64], request="mine")[1] == 64
    told = explain(read_events(events))
    assert list(told) == ["restore_1", "restore_2", "mine"]
    assert {chunk.verdict for chunk in told["restore_1"]} == {Verdict.NEVER_SEEN}
    assert [chunk.verdict for chunk in told["restore_2"]] == 8 * [Verdict.FOUND] + 2 * [Verdict.NEVER_SEEN]
    assert {chunk.tier for chunk in told["restore_2"][:8]} == {HOST, FILE}
    assert [chunk.verdict for chunk in told["mine"]] == 4 * [Verdict.FOUND]


def test_it_survives_a_restart_but_not_other_weights(model: Any, config: Config) -> None:
    tokens = [int(t) for t in torch.randint(0, 256, (200,))]
    cache = prefill(model, tokens)
    with PrefixStore(model, config, block_size=16) as store:
        kept = store.store_prefix(tokens, cache)
    with PrefixStore(model, config, block_size=16) as store:
        restored, n = store.restore_prefix(tokens)
        assert n == kept
        assert bits(restored, n) == bits(cache, n)
    with PrefixStore(make_model(seed=1), config, block_size=16) as store:
        assert store.restore_prefix(tokens)[1] == 0


def test_generation_goes_on_from_it(model: Any, config: Config) -> None:
    tokens = [int(t) for t in torch.randint(0, 256, (130,))]
    with PrefixStore(model, config, block_size=16) as store:
        store.store_prefix(tokens, prefill(model, tokens))
        restored, n = store.restore_prefix(tokens[:-1])
    assert n == 128
    with torch.no_grad():
        ours = model(torch.tensor([tokens[n:]]), past_key_values=restored).logits
        theirs = model(torch.tensor([tokens[n:]]), past_key_values=prefill(model, tokens[:n])).logits
    assert torch.allclose(ours, theirs)


def test_threads_take_turns_with_the_window(model: Any) -> None:
    prompts = [[token] * 64 for token in range(4)]
    caches = [prefill(model, prompt) for prompt in prompts]
    with PrefixStore(model, Config.make(host_size="4MiB", fixed_weights=True), block_size=8, staging_blocks=2) as store:
        for prompt, cache in zip(prompts, caches, strict=True):
            assert store.store_prefix(prompt, cache) == 64

        def restore(which: int) -> list[bool]:
            found = [store.restore_prefix(prompts[which]) for _ in range(10)]
            return [n == 64 and bits(cache, n) == bits(caches[which], n) for cache, n in found]

        with ThreadPoolExecutor(len(prompts)) as threads:
            assert all(all(exact) for exact in threads.map(restore, range(len(prompts))))


def is_block(path: str, line: int) -> bool:
    return linecache.getline(path, line).lstrip().startswith(("with ", "try:"))


def interrupted_at(line: int, call: Callable[[], Any]) -> int:
    """Call `call` with a KeyboardInterrupt at this line of ours that it runs, if it runs so many; how many it ran.

    A `with` or a `try` does not count: what a trace function raises there, where Python handles no signal, would keep a
    lock. The line of a `with` is told of again when its block ends.
    """
    ran = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal ran
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        is_line = event == "line" and not is_block(frame.f_code.co_filename, frame.f_lineno)
        ran += is_line
        if is_line and ran == line:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return ran


def test_late_copies_raise_a_timeout_error(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, copy, free = [7] * 48, CpuStream.copy, threading.Event()
    cache, late = prefill(model, tokens), list[object]()

    def copy_late(stream: CpuStream, batch: Any, after: Any) -> Any:
        late.append(batch)
        free.wait(60.0)
        return copy(stream, batch, after)

    config = Config.make(host_size="1MiB", write_timeout=0.2, fixed_weights=True)
    with PrefixStore(model, config, block_size=8) as store:
        monkeypatch.setattr(CpuStream, "copy", copy_late)
        try:
            with pytest.raises(CopyTimeoutError, match="raise write_timeout") as raised:
                store.store_prefix(tokens, cache)
        finally:
            free.set()
        assert late and isinstance(raised.value, TimeoutError) and not isinstance(raised.value, CacheError)
        monkeypatch.setattr(CpuStream, "copy", copy)
        until = time.monotonic() + 60.0
        while store._jobs and time.monotonic() < until:  # the copy that was late ends, and the store serves again
            with contextlib.suppress(CopyTimeoutError):
                store.store_prefix(tokens, cache)
        restored, found = store.restore_prefix(tokens)
        assert found == 48 and bits(restored, found) == bits(cache, found)


@pytest.mark.parametrize("verb", ["store", "restore"])
def test_an_interrupted_call_costs_hits_at_most(model: Any, tmp_path: Path, verb: str) -> None:
    """Ctrl-C at any line: the next calls give back what was stored, bit for bit."""
    prompts = [[token] * 48 for token in range(3)]
    caches = [prefill(model, prompt) for prompt in prompts]
    config = Config.make(
        host_size="64KiB", file_path=tmp_path / "kv", file_size="2MiB", write_timeout=2, fixed_weights=True
    )
    with PrefixStore(model, config, block_size=8, staging_blocks=2) as store:

        def call(new: int) -> None:
            """A restore from the file tier, or a store of blocks that no tier has."""
            if verb == "restore":
                store.restore_prefix(prompts[0])
            else:
                store.store_prefix([new] * 48, caches[0])

        fired, lines = 0, 0
        for new in range(100, 124):
            for which in range(3):
                store.store_prefix(prompts[which], caches[which])
                cache, found = store.restore_prefix(prompts[which])
                assert found > 0, f"after {fired} interrupts"
                assert bits(cache, found) == bits(caches[which], found), f"after {fired} interrupts"
            with store._stack.runtime.locked() as control:
                control.check_integrity()
            if not lines:
                lines = interrupted_at(0, lambda: call(99))
                continue
            try:
                interrupted_at((new - 100) * lines // 64, lambda: call(new))  # noqa: B023 - called at once
            except KeyboardInterrupt:
                fired += 1
        assert fired > 6


def test_forked_process_is_told_that_its_parent_owns_tiers(model: Any) -> None:
    prompt = [7] * 48
    cache = prefill(model, prompt)
    with PrefixStore(model, Config.make(host_size="1MiB", fixed_weights=True), block_size=8) as store:
        assert store.store_prefix(prompt, cache) == 48
        child = os.fork()
        if not child:
            told = 0
            for call in (lambda: store.restore_prefix(prompt), lambda: store.store_prefix(prompt, cache)):
                try:
                    call()
                except TierClosedError:
                    told += 1
            os._exit(told if store.close() is False else 0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
        found, tokens = store.restore_prefix(prompt)
        assert bits(found, tokens) == bits(cache, 48)


def test_forked_process_closes_while_a_parents_thread_held_the_lock(model: Any) -> None:
    with PrefixStore(model, Config.make(host_size="1MiB", fixed_weights=True), block_size=8) as store:
        held, free = threading.Event(), threading.Event()

        def hold() -> None:
            with store._stack.runtime.locked():
                held.set()
                free.wait(60.0)

        holder = threading.Thread(target=hold)
        holder.start()
        assert held.wait(60.0)
        child = os.fork()
        if not child:
            signal.alarm(20)  # ends it if it waits for the lock
            os._exit(2 if store.close() is False else 0)
        free.set()
        holder.join()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2


@pytest.mark.parametrize("make", [list, tuple, torch.tensor], ids=["list", "tuple", "tensor"])
def test_tokens_may_be_any_sequence_of_integers(model: Any, make: Any) -> None:
    tokens = list(range(40))
    with PrefixStore(model, Config.make(host_size="4MiB", fixed_weights=True), block_size=8) as store:
        assert store.store_prefix(make(tokens), prefill(model, tokens)) == 40
        assert store.restore_prefix(make(tokens))[1] == 40


@pytest.mark.parametrize("cache", [None, DynamicCache()], ids=["none", "empty"])
def test_what_is_no_cache_of_the_model_is_refused(model: Any, cache: Any) -> None:
    with (
        PrefixStore(model, Config.make(host_size="4MiB", fixed_weights=True), block_size=8) as store,
        pytest.raises(CacheError, match="keys and values in all layers"),
    ):
        store.store_prefix(list(range(40)), cache)


def test_a_cache_that_is_too_short_is_refused(model: Any, config: Config) -> None:
    with PrefixStore(model, config, block_size=16) as store, pytest.raises(CacheError, match="at least 40 tokens"):
        store.store_prefix([1] * 40, prefill(model, [1] * 39))


BAD_LAYERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "fewer tokens": lambda values: values[:, :, :20],
    "more sequences": lambda values: values.repeat(2, 1, 1, 1),
    "no sequence": lambda values: values[:0],
    "three dimensions": lambda values: values[0],
}


@pytest.mark.parametrize("change", BAD_LAYERS)
def test_each_layer_of_a_cache_is_checked(model: Any, change: str) -> None:
    with PrefixStore(model, Config.make(host_size="4MiB", fixed_weights=True), block_size=8) as store:
        cache = prefill(model, [1] * 40)
        cache.layers[1].values = BAD_LAYERS[change](cache.layers[1].values)
        with pytest.raises(CacheError, match="layer 1"):
            store.store_prefix([1] * 40, cache)
        assert store.restore_prefix([1] * 40)[1] == 0


@pytest.mark.parametrize("numbers", [{"block_size": 0}, {"block_size": 1.5}, {"staging_blocks": 0}], ids=str)
def test_impossible_numbers_are_refused(model: Any, numbers: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match="expected a whole number of at least 1"):
        PrefixStore(model, Config.make(host_size="1MiB"), **numbers)


def test_no_autograd_history_is_kept_or_restored(model: Any) -> None:
    tokens = list(range(40))
    cache = model(torch.tensor([tokens]), past_key_values=DynamicCache()).past_key_values
    assert cache.layers[0].keys.requires_grad
    with PrefixStore(model, Config.make(host_size="4MiB", fixed_weights=True), block_size=8) as store:
        assert store.store_prefix(tokens, cache) == 40
        restored, _ = store.restore_prefix(tokens)
        assert not restored.layers[0].keys.requires_grad
        store.sleep()
        with torch.inference_mode():
            store.wake()  # allocates staging blocks
        assert store.store_prefix(tokens, cache) == 40


def test_sliding_windows_are_refused(tmp_path: Path) -> None:
    settings = Gemma3TextConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=16,
    )  # fmt: skip
    gemma = AutoModelForCausalLM.from_config(settings)
    with pytest.raises(EngineError, match="sliding_attention"):
        PrefixStore(gemma, Config.make(host_size="1MiB"))


SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            lambda: LlavaForConditionalGeneration(
                LlavaConfig(vision_config=CLIPVisionConfig(**SMALL), text_config=LlamaConfig(**SMALL))
            ),
            "it takes image",
        ),
        (
            lambda: T5ForConditionalGeneration(
                T5Config(vocab_size=128, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4)
            ),
            "encoder",
        ),
    ],
)
def test_models_that_read_more_than_tokens_are_refused(make: Callable[[], Any], reason: str) -> None:
    with pytest.raises(EngineError, match=reason):
        PrefixStore(make(), Config.make(host_size="1MiB"))


CHANGES: dict[str, Callable[[Any], object]] = {
    "by .data": lambda model: model.model.layers[0].self_attn.k_proj.weight.data.add_(0.5),
    "by .data.copy_": lambda model: model.model.layers[0].mlp.up_proj.weight.data.copy_(torch.ones(96, 64)),
    "by another parameter": lambda model: setattr(
        model.model.layers[0].mlp.up_proj, "weight", torch.nn.Parameter(torch.ones(96, 64))
    ),
    "by a buffer": lambda model: model.model.rotary_emb.inv_freq.data.mul_(1.5),
    "by a hook": lambda model: model.model.layers[0].register_forward_hook(lambda module, args, output: 2 * output),
    "by a setting": lambda model: setattr(model.model.layers[1].input_layernorm, "variance_epsilon", 0.1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_nothing_stored_before_a_change_in_place_is_restored(config: Config, change: str) -> None:
    model = make_model()
    tokens = [int(t) for t in torch.randint(0, 256, (200,))]
    with PrefixStore(model, config, block_size=16) as store:
        kept = store.store_prefix(tokens, prefill(model, tokens))
        assert store.restore_prefix(tokens)[1] == kept > 0
        versions = [p._version for p in model.parameters()]
        CHANGES[change](model)
        assert [p._version for p in model.parameters()] == versions or "another" in change
        assert store.restore_prefix(tokens)[1] == 0
        cache = prefill(model, tokens)
        assert store.store_prefix(tokens, cache) == kept
        restored, n = store.restore_prefix(tokens)
        assert bits(restored, n) == bits(cache, kept)


def test_blocks_of_a_changed_model_are_not_restored_after_undo(model: Any, config: Config) -> None:
    model = make_model()
    tokens = [int(t) for t in torch.randint(0, 256, (200,))]
    weight = model.model.layers[0].self_attn.k_proj.weight
    original = weight.data.clone()
    with PrefixStore(model, config, block_size=16) as store:
        weight.data.mul_(2)
        store.store_prefix(tokens, prefill(model, tokens))
        weight.data.copy_(original)
        assert store.restore_prefix(tokens)[1] == 0


def test_fixed_weights_are_looked_at_once(tmp_path: Path) -> None:
    model = make_model()
    tokens = [int(t) for t in torch.randint(0, 256, (200,))]
    with PrefixStore(model, Config.make(host_size="1MiB", fixed_weights=True), block_size=16) as store:
        kept = store.store_prefix(tokens, prefill(model, tokens))
        model.model.layers[0].self_attn.k_proj.weight.data.add_(0.5)
        assert store.restore_prefix(tokens)[1] == kept


def host_bytes_in_use(store: PrefixStore) -> int:
    """Bytes of the host arena that the system has allocated."""
    begin = store._stack.arena.address
    lines = Path("/proc/self/smaps").read_text().splitlines()
    (at,) = [i for i, line in enumerate(lines) if line.startswith(f"{begin:x}-")]
    return next(1024 * int(line.split()[1]) for line in lines[at:] if line.startswith("Rss:"))


@pytest.mark.parametrize(
    ("keep", "is_found"),
    [(("host", "file"), True), (("file",), True), ((), False)],
    ids=["all", "files", "nothing"],
)
def test_sleep_frees_the_window_and_keeps_named_tiers(
    model: Any, tmp_path: Path, keep: tuple[str, ...], is_found: bool
) -> None:
    tokens = [int(t) for t in torch.randint(0, 256, (200,))]
    cache = prefill(model, tokens)
    config = Config.make(host_size="64MiB", file_path=tmp_path / "kv", file_size="64MiB", backup="write_back")
    with PrefixStore(model, config, block_size=16) as store:
        kept = store.store_prefix(tokens, cache)
        assert kept == 192
        with pytest.raises(CacheError, match="only the coldest"):
            store.sleep(keep=("host",))
        window = weakref.ref(store._pages)
        assert window() is not None
        store.sleep(keep=keep)
        store.sleep(keep=keep)
        assert window() is None, "the window's memory is free"
        assert (host_bytes_in_use(store) > 0) == ("host" in keep)
        assert store.store_prefix(tokens, cache) == 0
        assert store.restore_prefix(tokens)[1] == 0
        store.wake()
        store.wake()
        restored, n = store.restore_prefix(tokens)
        assert n == (kept if is_found else 0)
        assert not n or bits(restored, n) == bits(cache, n)
        assert store.store_prefix(tokens, cache) == kept
        restored, n = store.restore_prefix(tokens)
        assert n == kept
        assert bits(restored, n) == bits(cache, n)
        with store._stack.runtime.batch() as control:
            control.check_integrity()
            assert control.leases == control.protected == 0
        store.sleep(keep=keep)
    with PrefixStore(model, config, block_size=16) as store:
        assert store.restore_prefix(tokens)[1] == (kept if is_found else 0), "it was closed asleep"


def test_a_closed_store_does_not_sleep(model: Any, config: Config) -> None:
    store = PrefixStore(model, config, block_size=16)
    store.close()
    for _ in range(2):
        with pytest.raises(TierClosedError):
            store.sleep()
        with pytest.raises(TierClosedError):
            store.restore_prefix(list(range(64)))


def test_a_store_without_memory_after_a_sleep_sleeps_on(
    model: Any, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = [int(t) for t in torch.randint(0, 256, (200,))]
    cache = prefill(model, tokens)
    with PrefixStore(model, config, block_size=16) as store:
        kept = store.store_prefix(tokens, cache)
        store.sleep(keep=("file",))
        with monkeypatch.context() as patch:
            patch.setattr("longshore.runtime.stack.available_memory", lambda: 4096)
            with pytest.raises(TierError, match="free memory"):
                store.wake()
        assert store.restore_prefix(tokens)[1] == 0
        store.wake()
        restored, n = store.restore_prefix(tokens)
        assert n == kept > 0
        assert bits(restored, n) == bits(cache, n)


def test_weights_that_change_during_a_sleep_are_noticed(config: Config) -> None:
    model = make_model()
    tokens = [int(t) for t in torch.randint(0, 256, (200,))]
    with PrefixStore(model, config, block_size=16) as store:
        assert store.store_prefix(tokens, prefill(model, tokens)) > 0
        store.sleep()
        model.model.layers[0].self_attn.k_proj.weight.data.mul_(2)
        store.wake()
        assert store.restore_prefix(tokens)[1] == 0
        cache = prefill(model, tokens)
        kept = store.store_prefix(tokens, cache)
        restored, n = store.restore_prefix(tokens)
        assert n == kept > 0
        assert bits(restored, n) == bits(cache, n)
