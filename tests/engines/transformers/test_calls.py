"""One `tiered` block over many calls: warm from the second on, never with what an earlier model computed."""

from __future__ import annotations

import json
import logging
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, LlamaConfig

from longshore.boundary import DEVICE
from longshore.cache import DEFAULT_PRIORITY, ReuseHint, TieredCache
from longshore.config import Config
from longshore.engines.transformers import Tiers, attach, tiered
from longshore.errors import HintError
from residents import residents_of

README = Path(__file__).parents[3] / "README.md"
PROMPTS = [[number, *range(2, 100)] for number in (200, 201, 202)]
GENERATION = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=4)


def make_model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


def batching(**settings: Any) -> ContinuousBatchingConfig:
    sizes = {"page_size": 16, "num_blocks": 64, "max_batch_tokens": 128, "return_logprobs": True}
    return ContinuousBatchingConfig(**{**sizes, "use_async_batching": False, "use_cuda_graph": False, **settings})


def generate(model: Any, prompts: list[list[int]] = PROMPTS, persistent: bool = False, **settings: Any) -> list[Any]:
    outputs = model.generate_batch(
        prompts, generation_config=GENERATION, continuous_batching_config=batching(**settings),
        persistent_manager=persistent, progress_bar=False,
    )  # fmt: skip
    assert len(outputs) == len(prompts)
    assert all(output.error is None for output in outputs.values())
    return list(outputs.values())


def close(outputs: list[Any], others: list[Any]) -> bool:
    """Whether the same model computed both; other lengths of prefills round otherwise."""
    pairs = [zip(a.logprobs, b.logprobs, strict=True) for a, b in zip(outputs, others, strict=True)]
    return all(abs(a - b) < 1e-3 for pair in pairs for a, b in pair)


def sources(tiers: Tiers) -> list[tuple[str, ...]]:
    """Of the prompts of the last call, in their order."""
    call = tiers.records[-1].request.partition("@")[2]
    mine = [record for record in tiers.records if record.request.partition("@")[2] == call]
    return [record.sources for record in sorted(mine, key=lambda record: record.request)]


@pytest.fixture
def memory() -> Config:
    return Config.make(host_size="4MiB", gate=False)


@pytest.fixture
def files(tmp_path: Path) -> Config:
    return Config.make(host_size="4MiB", gate=False, file_path=tmp_path / "kv", file_size="8MiB")


@pytest.mark.parametrize("offload", ["write_through", "write_back"])
@pytest.mark.parametrize("blocks", [64, 32, 200])
def test_the_second_call_hits_in_host_memory(offload: str, blocks: int) -> None:
    model = make_model()
    with tiered(model, Config.make(host_size="4MiB", gate=False, offload=offload)) as tiers:
        first = generate(model)
        arena = tiers.stack and tiers.stack.arena
        second = generate(model, num_blocks=blocks)
        assert all(len(each) == 6 for each in sources(tiers))
        assert "host" in sources(tiers)[0]
        assert tiers.stack.arena is arena
        with tiers.stack.runtime.batch() as cache:
            cache.check_integrity()
            assert (cache.leases, cache.protected, cache.jobs_in_flight) == (0, 0, 0)
    assert close(first, second)


def test_any_number_of_calls_and_kinds_of_managers(files: Config) -> None:
    model = make_model()
    expected = generate(model)
    with tiered(model, files) as tiers:
        opened = set()
        for call, persistent in enumerate((False, True, True, False, False, True)):
            assert close(generate(model, persistent=persistent, num_blocks=60 + call), expected)
            opened.add(id(tiers.stack and tiers.stack.runtime))
            assert not call or all(len(each) == 6 for each in sources(tiers)[-3:])
        assert len(opened) == 1
        model.destroy_cached_continuous_batching_manager()


def test_scope_is_equal_in_every_process(files: Config) -> None:
    with tiered(make_model(), files) as tiers:
        generate(tiers.model)
        assert "in process" not in tiers.stack.scope.attention


def test_a_kept_manager_goes_on_without_tiers_after_the_block(memory: Config) -> None:
    model = make_model()
    with tiered(model, memory) as tiers:
        first = generate(model, persistent=True)
    assert close(generate(model, persistent=True), first)
    assert tiers.stack is None
    model.destroy_cached_continuous_batching_manager()


CHANGES: dict[str, Callable[[Any], object]] = {
    "weights": lambda model: model.model.layers[0].self_attn.k_proj.weight.data.mul_(3),
    "code": lambda model: model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: 3 * output),
    "a setting": lambda model: setattr(model.model.layers[0].self_attn, "scaling", 2.0),
}


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_nothing_of_before_a_change_between_calls_is_served(files: Config, change: str, persistent: bool) -> None:
    model = make_model()
    with tiered(model, files) as tiers:
        before = generate(model, persistent=persistent)
        CHANGES[change](model)
        after = generate(model, persistent=persistent)
        assert sources(tiers)[-3] == ()
        assert "file" not in {source for each in sources(tiers)[-3:] for source in each}
        again = generate(model, persistent=persistent)
        assert all(len(each) == 6 for each in sources(tiers)[-3:])
        assert close(after, again)
        assert not close(before, after)
        model.destroy_cached_continuous_batching_manager()
    changed = make_model()
    CHANGES[change](changed)
    assert close(generate(changed), after)


@pytest.mark.parametrize("other", [{"page_size": 32}, {"dtype": torch.bfloat16}])
def test_another_layout_gets_tiers_of_its_own(files: Config, other: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    with tiered(model, files) as tiers:
        generate(model)
        if "dtype" in other:
            model.to(other["dtype"])
        settings = {key: value for key, value in other.items() if key != "dtype"}
        first = generate(model, **settings)
        assert sources(tiers)[0] == ()
        assert "reopening the tiers, because these have changed" in caplog.text
        assert "layout" in caplog.text
        assert close(generate(model, **settings), first)
        assert "host" in sources(tiers)[0]


def ask(manager: Any, prompt: list[int]) -> Any:
    manager.add_request(list(prompt), max_new_tokens=4)
    while (result := manager.get_result(timeout=1.0)) is None:
        assert manager.is_running()
    assert result.error is None
    return result


def test_a_manager_beside_a_running_one_has_no_tiers(memory: Config, caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    expected = generate(model, PROMPTS[:1])
    with tiered(model, memory) as tiers:
        managers = [model.init_continuous_batching(GENERATION, batching()) for _ in range(2)]
        try:
            for manager in managers:
                manager.start()
                assert close([ask(manager, PROMPTS[0])], expected)
            assert "no tiers for this continuous-batching manager" in caplog.text
            assert close([ask(managers[0], PROMPTS[0])], expected)
            assert sources(tiers)[-1] == (DEVICE,) * 6
        finally:
            for manager in managers:
                manager.stop(block=True)
                manager.destroy()
        assert close(generate(model, PROMPTS[:1]), expected)
        assert sources(tiers)[-1] == ("host",) * 6


def test_another_model_over_the_same_configuration_has_no_tiers(
    memory: Config, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model()
    torch.manual_seed(1)
    other = type(model)(model.config).eval()
    expected = generate(other)
    with tiered(model, memory) as tiers:
        generate(model)
        looked_up = tiers.lookups
        assert close(generate(other), expected)
        assert tiers.lookups == looked_up
    assert "its model is not the one given to tiered()" in caplog.text


# ---------------------------------------------------------------------- metrics


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[CollectorRegistry]:
    yield CollectorRegistry()


def value(registry: CollectorRegistry, name: str, **labels: str) -> float:
    return registry.get_sample_value(name, labels) or 0.0


def recipe() -> str:
    """The line that README has for the collector."""
    (line,) = re.findall(r"^REGISTRY\.register\(.*$", README.read_text(), re.MULTILINE)
    return line


@pytest.mark.parametrize("when", ["before", "after"])
def test_readme_registers_metrics_once_before_or_after_the_first_call(
    memory: Config, registry: CollectorRegistry, when: str
) -> None:
    model = make_model()
    with tiered(model, memory) as tiers:
        if when == "after":
            generate(model)
        exec(recipe(), {"REGISTRY": registry, "tiers": tiers})  # noqa: S102 - the line as an operator copies it
        if when == "before":
            generate(model)
        assert value(registry, "longshore_requests_total") == 3
        assert value(registry, "longshore_miss_chunks_total", reason="absent") > 0
        generate(model)
        assert value(registry, "longshore_requests_total") == 6
        assert value(registry, "longshore_hit_chunks_total", tier="host") > 0
        assert value(registry, "longshore_used_bytes", tier="host") > 0
    assert value(registry, "longshore_requests_total") == 6


def test_counters_never_go_back(files: Config, registry: CollectorRegistry) -> None:
    model = make_model()

    def counters() -> dict[Any, float]:
        metrics = [metric for metric in registry.collect() if metric.type == "counter"]
        return {(s.name, *sorted(s.labels.items())): s.value for metric in metrics for s in metric.samples}

    with tiered(model, files) as tiers:
        registry.register(tiers.collector)
        seen = counters()
        steps: list[Callable[[], object]] = [
            lambda: generate(model), lambda: generate(model), lambda: CHANGES["weights"](model),
            lambda: generate(model), lambda: generate(model, page_size=32), tiers.reset, lambda: generate(model),
        ]  # fmt: skip
        for step in steps:
            step()
            now = counters()
            assert all(now[key] >= seen[key] for key in seen)
            seen = now
    now = counters()
    assert all(now[key] >= seen[key] for key in seen)
    assert now["longshore_requests_total",] == 15


def test_a_request_that_waits_is_counted_once_under_its_name(registry: CollectorRegistry) -> None:
    model = make_model()
    config = Config.make(host_size="4MiB", gate=False, background=False)
    prompts = [[100 + number, *range(2, 99)] for number in range(20)]
    with tiered(model, config) as tiers:
        registry.register(tiers.collector)
        manager = model.init_continuous_batching(GENERATION, batching(num_blocks=16))
        for number, prompt in enumerate(prompts):
            manager.add_request(prompt, request_id=f"mine-{number}", max_new_tokens=30)
        manager.start()
        try:
            for _ in prompts:
                while (result := manager.get_result(timeout=1.0)) is None:
                    assert manager.is_running()
                assert result.error is None
        finally:
            manager.stop(block=True)
            manager.destroy()
        names = [record.request for record in tiers.records]
    attempts = value(registry, "longshore_lookup_attempts_total")
    assert attempts > 40
    assert len(names) < attempts
    assert set(names) == {f"mine-{number}" for number in range(20)}
    assert value(registry, "longshore_requests_total") == len(names)
    found = sum(value(registry, "longshore_hit_chunks_total", tier=tier) for tier in ("host", "file"))
    missed = sum(
        sample.value
        for metric in registry.collect()
        if metric.name == "longshore_miss_chunks"
        for sample in metric.samples
    )
    assert 0 < missed + found <= len(names) * 8


def test_the_self_test_is_in_no_metric_and_no_event(registry: CollectorRegistry, tmp_path: Path) -> None:
    sizes = {"host_size": "4MiB", "file_path": tmp_path / "kv", "file_size": "4MiB", "events_path": tmp_path / "events"}
    with tiered(make_model(), Config.make(**sizes)) as tiers:
        registry.register(tiers.collector)
        generate(tiers.model, [[1, 2]])  # shorter than a block: nothing is stored, and nothing asked for
        generate(tiers.model, [[1, 2]])  # on another device, which is tested, too
        assert tiers.stack is not None
        assert tiers.failure is None
        figures = [metric for metric in registry.collect() if re.search("hit_|moved_|failed_|written", metric.name)]
        assert len(figures) == 5
        found = {(sample.name, *sample.labels.values()): sample.value for each in figures for sample in each.samples}
    assert set(found.values()) == {0.0, found["longshore_events_written_total",]}
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "events").read_text().splitlines()]
    assert kinds == ["reset"]


def test_records_and_names_of_requests_go_on_over_calls(memory: Config) -> None:
    with tiered(make_model(), memory) as tiers:
        for call in range(1, 4):
            generate(tiers.model)
            assert tiers.lookups == len(tiers.records) == 3 * call
        names = [record.request for record in tiers.records]
    assert sorted(names) == sorted(f"req_{i}{call}" for call in ("", "@2", "@3") for i in range(3))


def test_what_is_said_at_a_warm_start(memory: Config, caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    with caplog.at_level(logging.WARNING, "longshore"), tiered(model, memory):
        generate(model)
        generate(model)
    assert not [record for record in caplog.records if record.name.startswith("longshore")]


def test_failing_eviction_policy_mid_batch_changes_no_answer(
    memory: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model, registry = make_model(), CollectorRegistry()
    plain, damaged = generate(model), []

    with tiered(model, memory) as tiers:
        registry.register(tiers.collector)
        assert [each.generated_tokens for each in generate(model)] == [each.generated_tokens for each in plain]
        first = tiers.stack
        with first.runtime.locked() as cache:
            policy, lookup = cache._state.policies[0], cache.lookup

        def damage(*arguments: Any, **named: Any) -> Any:
            if named.get("protect") is None:  # not only counted
                damaged.append(len(policy))
            if len(damaged) == 2:
                policy.remove_all(np.flatnonzero(policy.resident(cache._state.index.size)).tolist())
            return lookup(*arguments, **named)

        monkeypatch.setattr(cache, "lookup", damage)
        served = generate(model)
        assert len(damaged) == 2
        assert damaged[1] > 0
        assert first.runtime.faults == 1
        assert [each.generated_tokens for each in served] == [each.generated_tokens for each in plain]
        assert registry.get_sample_value("longshore_control_plane_faults_total") == 1
        assert tiers.occupancy()[DEVICE] > 0
        tiers.reset()
        for _ in range(2):  # over new tiers, which are cold, and then warm
            served = generate(model)
            assert [each.generated_tokens for each in served] == [each.generated_tokens for each in plain]
        assert tiers.stack is not None
        assert tiers.stack is not first
        assert tiers.stack.runtime.fault is None
        assert "host" in sources(tiers)[0]
        assert registry.get_sample_value("longshore_control_plane_faults_total") == 1


def stored_keys(tiers: Tiers) -> set[bytes]:
    with tiers.stack.runtime.locked() as cache:
        return {each.key for each in residents_of(cache)}


def test_hints_say_which_request_is_stored() -> None:
    model, expected = make_model(), generate(make_model())
    with tiered(model, Config.make(host_size="4MiB", gate=False)) as tiers:
        tiers.hint("req_0", {"store": False})
        assert close(generate(model), expected)
        assert len(stored_keys(tiers)) == 2 * 6, "of the other two requests"
        assert close(generate(model, num_blocks=32), expected)
        assert len(stored_keys(tiers)) == 3 * 6, "the names of requests begin anew, and their hints do not"


def test_what_requests_say_of_their_return_reaches_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    said, lookup = list[ReuseHint](), TieredCache.lookup

    def watched(cache: TieredCache, *of: Any, **how: Any) -> Any:
        if how.get("turn") is None and how.get("reuse_hint") is not None:
            said.append(how["reuse_hint"])
        return lookup(cache, *of, **how)

    monkeypatch.setattr(TieredCache, "lookup", watched)
    model, expected = make_model(), generate(make_model())
    with tiered(model, Config.make(host_size="4MiB", gate=False)) as tiers:
        tiers.hint("req_0", {"ends": True})
        tiers.hint("req_2", {"returns_in": 2.5, "class": "chat"})
        assert close(generate(model), expected)
    assert sorted(said, key=str) == [ReuseHint(seconds=2.5, of="chat"), ReuseHint(ends=True)]


def test_hints_in_the_settings_are_for_all_requests() -> None:
    model, expected = make_model(), generate(make_model())
    with tiered(model, Config.make(host_size="4MiB", gate=False, request_hints={"store": False})) as tiers:
        assert close(generate(model), expected)
        tiers.hint("req_1", {})
        assert close(generate(model, num_blocks=32), expected)
        assert len(stored_keys(tiers)) == 6


def test_hints_say_which_tiers_are_loaded_from(files: Config) -> None:
    model = make_model()
    expected = generate(model)
    with tiered(model, files):
        assert close(generate(model), expected)
    with tiered(model, files) as tiers:  # which has them in files
        tiers.hint("req_0", {"load": []})
        tiers.hint("req_1", {"load": ["host"]})
        assert close(generate(model), expected)
        assert [set(each) for each in sources(tiers)] == [set(), set(), {"file"}]
        tiers.hint("req_0", {"load": []})
        tiers.hint("req_1", {"load": ["host"]})
        assert close(generate(model, num_blocks=32), expected)
        assert [set(each) for each in sources(tiers)] == [set(), set(), {"host"}], (
            "only what was loaded is in host memory"
        )


@pytest.mark.parametrize("seconds", [None, 0.05])
def test_hinted_prefix_outlives_others_until_its_hint_expires(seconds: float | None) -> None:
    model = make_model()
    with tiered(model, Config.make(host_size="128KiB", gate=False, eviction="lru")) as tiers:
        tiers.hint("req_0", {"retention": [{"priority": 90, "seconds": seconds}]})
        generate(model, PROMPTS[:1])
        kept = stored_keys(tiers)
        assert len(kept) == 6
        time.sleep(seconds or 0.0)
        for number in range(203, 206):
            generate(model, [[number, *range(2, 100)]], num_blocks=number)
        assert (kept < stored_keys(tiers)) == (seconds is None)


@pytest.mark.parametrize("offload", ["write_through", "write_back"])
def test_hinted_priorities_apply_at_commit_and_eviction(offload: str) -> None:
    model = make_model()
    with tiered(model, Config.make(host_size="4MiB", gate=False, offload=offload)) as tiers:
        tiers.hint("req_0", {"retention": [{"priority": 90}]})
        generate(model, PROMPTS[:1])
        if offload == "write_back":
            assert not stored_keys(tiers)
            generate(model, PROMPTS[1:2], num_blocks=32)  # the device cache before this one lets go of its blocks
        keys = stored_keys(tiers)
        with tiers.stack.runtime.locked() as cache:
            nodes = [cache._state.index.get(key) for key in keys]
            found = [cache._state.priorities._priority[node] >> 1 ^ DEFAULT_PRIORITY for node in nodes]
        assert found == [90] * 6


def test_hints_that_cannot_be_read_are_refused(memory: Config) -> None:
    with tiered(make_model(), memory) as tiers, pytest.raises(HintError, match="priority"):
        tiers.hint("req_0", {"retention": [{"priority": 101}]})


def test_hints_of_requests_that_never_begin_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attach, "_MOST_HINTS", 3)
    with tiered(make_model(), Config.make(host_size="4MiB")) as tiers:
        for number in range(5):
            tiers.hint(f"req_{number}", {"ends": True})
        assert list(tiers._hints) == ["req_2", "req_3", "req_4"]
        with pytest.raises(HintError, match="the name of a request, got 3"):
            tiers.hint(3, {})  # type: ignore[arg-type]


# ---------------------------------------------------------------------- a prefix that ends within a chunk

STEM = list(range(2, 130))
SPLIT = [*STEM[:40], *range(200, 240)]
"""Like `STEM` for two and a half blocks of 16 tokens."""


@pytest.mark.parametrize("offload", ["write_through", "write_back"])
def test_leading_blocks_of_a_chunk_are_reused(offload: str) -> None:
    model = make_model()
    expected = generate(model, [SPLIT])
    with tiered(model, Config.make(host_size="4MiB", gate=False, blocks_per_chunk=4, offload=offload)) as tiers:
        generate(model, [STEM])
        found = generate(model, [SPLIT], num_blocks=32)
        assert sources(tiers)[0] == ("host",) * 2
        assert close(found, expected)
        assert close(generate(model, [SPLIT], num_blocks=33), expected)
        assert sources(tiers)[0] == ("host",) * 4, "its own chunk, which begins with the blocks of another, is stored"
        with tiers.stack.runtime.batch() as cache:
            cache.check_integrity()
            assert (cache.leases, cache.protected, cache.jobs_in_flight) == (0, 0, 0)


def test_leading_blocks_follow_whole_chunks_and_what_the_device_has() -> None:
    model = make_model()
    prompts = [[*STEM[:100], 250, 251], [*STEM[:84], 250], [*STEM[:116], 252]]
    expected = [generate(model, [prompt]) for prompt in prompts]
    with tiered(model, Config.make(host_size="4MiB", gate=False, blocks_per_chunk=4)) as tiers:
        generate(model, [[*STEM, 1]])
        found = generate(model, prompts[:1], num_blocks=32)
        assert sources(tiers)[0] == ("host",) * 6, "four of the first chunk, two of the next"
        manager = model.init_continuous_batching(GENERATION, batching(num_blocks=33))
        manager.start()
        try:
            found += [ask(manager, prompt) for prompt in prompts[1:]]
        finally:
            manager.stop(block=True)
            manager.destroy()
        assert [record.sources for record in tiers.records][-2:] == [
            ("host",) * 5, (DEVICE,) * 5 + ("host",) * 2
        ]  # fmt: skip
    assert close(found, [each for one in expected for each in one])


def test_partial_block_is_not_reused_with_one_block_per_chunk() -> None:
    model = make_model()
    for per_chunk, prompt in ((4, [*STEM[:15], *range(200, 240)]), (1, [*STEM[:15], *range(200, 240)])):
        expected = generate(model, [prompt])
        with tiered(model, Config.make(host_size="4MiB", gate=False, blocks_per_chunk=per_chunk)) as tiers:
            generate(model, [STEM])
            assert close(generate(model, [prompt], num_blocks=32), expected)
            assert sources(tiers)[0] == ()
