"""`longshore ctl` with a running `PrefixStore`, and under `tiered`: each command, what it prints, how it says no."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, DynamicCache, GenerationConfig, LlamaConfig
from typer.testing import CliRunner

from longshore.cli.app import app
from longshore.config import Config
from longshore.engines.transformers import PrefixStore, tiered
from longshore.errors import CacheError, CommandError, ConfigError, EngineError
from longshore.runtime import control

TOKENS = list(range(100, 164))


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    shape = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    return AutoModelForCausalLM.from_config(LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2)).eval()


@pytest.fixture
def config(tmp_path: Path) -> Config:
    tmp_path.chmod(0o700)
    files = {"file_path": tmp_path / "kv", "file_size": "4MiB"}
    return Config.make(host_size="1MiB", control=str(tmp_path / "one.ctl"), backup="write_through", **files)


@pytest.fixture
def store(model: Any, config: Config) -> Iterator[PrefixStore]:
    with torch.no_grad(), PrefixStore(model, config, block_size=16) as opened:
        past = model(torch.tensor([TOKENS]), past_key_values=DynamicCache(), use_cache=True).past_key_values
        assert opened.store_prefix(TOKENS, past) == 64
        yield opened


def run(config: Config, *arguments: str, given: str | None = None) -> str:
    done = CliRunner().invoke(app, ["ctl", config.control, *arguments], input=given, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_each_command_of_a_running_store(store: PrefixStore, config: Config, tmp_path: Path) -> None:
    ids = ",".join(map(str, [*TOKENS, *range(16)]))
    assert run(config, "lookup", "--tokens", ids).split() == ["tier", "leading", "chunks", "host", "4", "none", "1"]
    said = json.loads(run(config, "lookup", "--tokens", ids, "--json"))
    assert said == {"chunks": 5, "leading": 4, "runs": [{"tier": "host", "chunks": 4}]}
    (tmp_path / "ids").write_text(json.dumps(TOKENS))
    assert run(config, "pin", "--tokens", f"@{tmp_path / 'ids'}") == "4 of 4 chunks are pinned\n"
    assert json.loads(run(config, "stats"))["pinned_chunks"] == 4
    assert (
        run(config, "unpin", "--tokens", "@-", given="\n".join(map(str, TOKENS)))
        == "4 chunks are not pinned any more\n"
    )
    keys = ",".join(key.hex() for key in store._keys(TOKENS))
    assert json.loads(run(config, "lookup", "--keys", keys, "--json"))["leading"] == 4
    assert store._stack.runtime.flush(60.0)
    assert run(config, "clear") == "dropped: 4 chunks in host, 4 chunks in file\n"
    assert store.restore_prefix(TOKENS)[1] == 0


def test_stats_are_told_after_a_fault_of_the_cache(store: PrefixStore, config: Config) -> None:
    assert run(config, "pin", "--tokens", ",".join(map(str, TOKENS))) == "4 of 4 chunks are pinned\n"
    with store._stack.runtime.locked() as cache:
        cache._state.index.depth[cache._state.index.get(store._keys(TOKENS)[0])] += 1
        with pytest.raises(CacheError):
            cache.check_integrity()
    said = json.loads(run(config, "stats"))
    (faults,) = said["metrics"]["longshore_control_plane_faults_total"]
    assert faults["value"] == 1
    assert {each["value"] for each in said["metrics"]["longshore_tier_available"]} == {0.0}
    assert said["pinned_chunks"] == 4
    with pytest.raises(CommandError, match="all tiers disabled"):
        run(config, "clear")


def test_commands_go_on_through_sleep_and_other_weights(store: PrefixStore, config: Config, model: Any) -> None:
    ids = ("--tokens", ",".join(map(str, TOKENS)), "--json")
    assert json.loads(run(config, "pin", *ids))["pinned"] == 4
    store.sleep(keep=("file",))
    assert json.loads(run(config, "lookup", *ids))["runs"] == [{"tier": "file", "chunks": 4}]
    run(config, "stats")
    store.wake()
    assert store.restore_prefix(TOKENS)[1] == 64
    run(config, "unpin")
    assert json.loads(run(config, "pin", *ids))["pinned"] == 4
    with torch.no_grad():
        model.model.norm.weight.mul_(1.5)
    try:
        assert store.restore_prefix(TOKENS)[1] == 0  # the tiers were opened again
        assert json.loads(run(config, "unpin", "--json")) == {"unpinned": 0}
        assert json.loads(run(config, "lookup", *ids))["leading"] == 0
    finally:
        with torch.no_grad():
            model.model.norm.weight.div_(1.5)


def test_clear_within_a_restore_gives_no_wrong_byte(store: PrefixStore, config: Config, model: Any) -> None:
    with torch.no_grad():
        past = model(torch.tensor([TOKENS]), past_key_values=DynamicCache(), use_cache=True).past_key_values
    over = threading.Event()

    def clear() -> None:
        while not over.is_set():
            run(config, "clear")

    thread = threading.Thread(target=clear)
    thread.start()
    try:
        for _ in range(20):
            store.store_prefix(TOKENS, past)
            restored, count = store.restore_prefix(TOKENS)
            for mine, theirs in zip(restored.layers, past.layers, strict=False) if count else ():
                assert torch.equal(mine.keys, theirs.keys[:, :, :count])
    finally:
        over.set()
        thread.join()
    assert store._stack.runtime.fault is None


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("lookup",), "lookup needs a prompt: add --tokens or --keys"),
        (("pin",), "pin needs a prompt"),
        (("clear", "--tokens", "1"), "clear concerns no prompt: remove --tokens"),
        (("stats", "--keys", "00"), "stats concerns no prompt: remove --keys"),
        (("lookup", "--tokens", "1", "--keys", "00"), "got both"),
        (("lookup", "--tokens", "one"), "whole numbers such as 1,2,3, got 'one'"),
        (("lookup", "--tokens", "[1, 2.5]"), "got '2.5'"),
        (("lookup", "--keys", "abc"), "--keys: expected keys of chunks, 64 hexadecimal digits each, got 'abc'"),
        (("pin", "--keys", "00ff00ff00ff00ff"), "--keys: .* got '00ff00ff00ff00ff'"),
        (("unpin", "--keys", f"[{64 * '1'}]"), "--keys: .* got '1111"),
        (("lookup", "--tokens", "[1, 2"), "expected a JSON list"),
        (("lookup", "--tokens", "@nowhere/at/all"), "No such file"),
        (("lookup", "--tokens", ",".join(["4294967295"] * 250_000)), "expected at most 2097152 bytes"),
        (("stats", "--timeout", "0"), "positive number of seconds"),
        (("stats", "--timeout", "nan"), "positive number of seconds"),
        (("stats", "--timeout", "1e12"), "positive number of seconds, at most 86,400, got 1000000000000.0"),
    ],
)
def test_a_call_that_makes_no_sense_is_refused(tmp_path: Path, arguments: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        run(Config.make(control=str(tmp_path / "none.ctl")), *arguments)


@pytest.mark.parametrize("name", ["", "../one", "n" * 108])
def test_a_name_that_no_socket_can_have_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"^control: "):
        run(Config.make(control=name), "stats")


def test_missing_engine_is_named_with_those_that_run(store: PrefixStore, config: Config) -> None:
    other = Config.make(control=config.control.replace("one.ctl", "two.ctl"))
    with pytest.raises(CommandError, match=r"two\.ctl: no such socket\. Engines with one: one; .* setting control"):
        run(other, "stats")
    with pytest.raises(CommandError, match="one whole chunk"):
        run(config, "lookup", "--tokens", "1,2,3")


def test_a_socket_that_cannot_be_made_leaves_nothing_open(model: Any, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    config = Config.make(host_size="1MiB", file_path=tmp_path / "kv", file_size="1MiB", control=str(tmp_path / "x.ctl"))
    with pytest.raises(EngineError, match="mode 0700"):
        PrefixStore(model, config, block_size=16)
    PrefixStore(model, Config.make(**{**config.model_dump(), "control": ""}), block_size=16).close()


def test_a_socket_without_a_thread_leaves_nothing_open(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread(**_: Any) -> None:
        raise RuntimeError("can't start new thread")

    tmp_path.chmod(0o700)
    config = Config.make(host_size="1MiB", file_path=tmp_path / "kv", file_size="1MiB", control=str(tmp_path / "x.ctl"))
    with monkeypatch.context() as patch:
        patch.setattr(control, "threading", SimpleNamespace(Thread=no_thread))
        with pytest.raises(EngineError, match="can't start new thread"):
            PrefixStore(model, config, block_size=16)
    assert not (tmp_path / "x.ctl").exists()
    PrefixStore(model, config, block_size=16).close()


def generate(model: Any) -> list[int]:
    """Answer the prompt by continuous batching; its tokens."""
    sizes = {"page_size": 16, "num_blocks": 64, "max_batch_tokens": 128}
    (output,) = model.generate_batch(
        [[*TOKENS, 1]],
        generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=4),
        continuous_batching_config=ContinuousBatchingConfig(**sizes, use_async_batching=False, use_cuda_graph=False),
        progress_bar=False,
    ).values()
    assert output.error is None
    return list(output.generated_tokens)


def test_each_command_of_an_engine_under_tiered(model: Any, config: Config) -> None:
    ids = ("--tokens", ",".join(map(str, TOKENS)), "--json")
    with tiered(model, Config.make(**{**config.model_dump(), "gate": False})) as tiers:
        with pytest.raises(CommandError, match="no tiers now"):
            run(config, "lookup", *ids)
        assert json.loads(run(config, "stats"))["pinned_chunks"] == 0
        first = generate(model)
        said = {"chunks": 4, "leading": 4, "runs": [{"tier": "host", "chunks": 4}]}
        assert json.loads(run(config, "lookup", *ids)) == said
        assert json.loads(run(config, "pin", *ids)) == {"chunks": 4, "pinned": 4}
        stats = json.loads(run(config, "stats"))
        assert stats["pinned_chunks"] == 4
        assert any(each["value"] for each in stats["metrics"]["longshore_used_bytes"])
        tiers.sleep(keep=("file",))
        assert json.loads(run(config, "lookup", *ids))["runs"] == [{"tier": "file", "chunks": 4}]
        tiers.wake()
        assert generate(model) == first  # another engine, from files
        assert tiers.records[-1].sources[:4] == ("file",) * 4
        assert json.loads(run(config, "unpin", *ids)) == {"unpinned": 4}
        assert sum(json.loads(run(config, "clear", "--json"))["dropped"].values()) >= 8
        assert json.loads(run(config, "lookup", *ids))["leading"] == 0
        assert generate(model) == first
        assert set(tiers.records[-1].sources[:4]) <= {"device", "computed"}
        assert tiers.stack is not None
        assert tiers.stack.runtime.fault is None
    with pytest.raises(CommandError, match="no such socket"):
        run(config, "stats")


def test_a_lookup_of_several_groups_has_a_table_for_each(monkeypatch: pytest.MonkeyPatch, config: Config) -> None:
    groups = [
        {"chunks": 5, "leading": 4, "runs": [{"tier": "host", "chunks": 4}]},
        {"chunks": 2, "leading": 0, "runs": [{"tier": "none", "chunks": 1}, {"tier": "file", "chunks": 1}]},
    ]
    answer = {"tokens": 64, "leading_tokens": 64, "groups": groups}
    monkeypatch.setattr("longshore.cli.ctl.ask", lambda *_: answer)
    shown = run(config, "lookup", "--tokens", "1").split("\n")
    assert [line.split() for line in shown] == [
        ["tier", "chunks", "of", "group", "0"], ["host", "4"], ["none", "1"],
        ["tier", "chunks", "of", "group", "1"], ["none", "1"], ["file", "1"], ["none", "0"],
        ["all", "groups", "have", "the", "first", "64", "of", "64", "tokens"], [],
    ]  # fmt: skip
