"""`longshore demo`: the facts that it prints, its defaults, and what it says to impossible wishes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import Gemma3TextConfig
from typer.testing import CliRunner

from longshore.cli import demo_runs
from longshore.cli.app import app
from longshore.cli.demo_report import DemoOptions
from longshore.cli.demo_runs import Demo, run_demo
from longshore.errors import ConfigError, EngineError

SMALL = {"layers": 2, "width": 128, "device": "cpu"}
ALWAYS = {"settings": {"gate": "false"}}
"""A model as small as that computes sooner than it loads."""


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request's blocks are stored before the next one comes, so that all that was computed before is hit."""

    def sample(tiers: Any, *rest: Any) -> Any:
        assert tiers.stack.runtime.flush(600)
        return taken(tiers, *rest)

    taken = demo_runs._sample
    monkeypatch.setattr(demo_runs, "_sample", sample)


def hits_possible(demo: Demo) -> list[int]:
    """Tokens of each prompt that prompts before it have computed, in whole blocks."""
    seen: set[tuple[int, ...]] = set()
    found = []
    for request in demo.workload:
        size = demo.options.block_tokens
        prefixes = [tuple(request.prompt[:end]) for end in range(size, len(request.prompt) + 1, size)]
        hits = next((count for count, prefix in enumerate(prefixes) if prefix not in seen), len(prefixes))
        found.append(min(hits * size, (len(request.prompt) - 1) // size * size))
        seen.update(prefixes)
    return found


@pytest.mark.usefixtures("stored")
def test_the_runs_and_their_json(tmp_path: Path) -> None:
    result = run_demo(DemoOptions(**SMALL, **ALWAYS, block_tokens=16), tmp_path, Console(quiet=True))
    hits = [r.prompt_tokens - r.computed_tokens for r in result.tiered.requests]
    assert hits == hits_possible(Demo(DemoOptions(**SMALL, **ALWAYS, block_tokens=16)))
    facts = result.as_json()
    assert list(facts) == [
        "bit_exact",
        "requests",
        "restored_blocks",
        "fetched_bytes",
        "ttft_ms",
        "tokens",
        "routes",
        "misses",
    ]
    assert facts["bit_exact"] is True
    assert facts["requests"] >= 60
    restored = facts["restored_blocks"]
    assert restored["file"] >= 0.2 * (restored["file"] + restored["host"]) > 0
    assert set(facts["ttft_ms"]) == {"recompute", "tiered"}
    assert sum(facts["tokens"].values()) == sum(r.prompt_tokens for r in result.resident.requests)
    assert set(facts["routes"]) == {"device->host", "host->device", "host->file", "file->host"}
    assert all(route["bytes"] > 0 for route in facts["routes"].values())
    assert facts["misses"]["absent"] > 0
    assert facts["misses"]["corrupt"] == 0
    found = re.fullmatch(r"a new engine found (\d+) blocks of the last prompt: .*", result.setup["second call"])
    assert int(found[1]) > 0
    json.dumps(facts)


def test_straight_between_device_and_files(tmp_path: Path) -> None:
    """Without a host tier, and bit for bit the same; where there is no cuFile, image by image by way of the host."""
    options = DemoOptions(**SMALL, block_tokens=16, requests=16, settings={"file_mode": "gds", "gate": "false"})
    facts = run_demo(options, tmp_path, Console(quiet=True)).as_json()
    assert facts["bit_exact"] is True
    assert facts["restored_blocks"]["file"] > facts["restored_blocks"]["host"] == 0
    assert set(facts["routes"]) == {"device->file", "file->device"}
    assert all(route["bytes"] > 0 for route in facts["routes"].values())


def test_the_defaults_outgrow_the_device_and_the_host() -> None:
    demo = Demo(DemoOptions(**SMALL))
    assert len(demo.workload) >= 60
    assert demo.device_blocks <= 0.25 * demo.workload.unique_blocks
    assert demo.host_blocks <= 0.5 * demo.workload.unique_blocks


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"model": Path("/nowhere")}, ConfigError, "config.json"),
        ({"workload": Path("/nowhere")}, ConfigError, "no such file"),
        ({"device_share": 0.01}, ConfigError, "the longest request needs .* raise --device-share to"),
    ],
)
def test_impossible_wishes(options: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Demo(DemoOptions(**{**SMALL, **options}))


def test_a_model_with_sliding_windows_is_refused_with_the_reason(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    settings = Gemma3TextConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=16,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(settings).save_pretrained(tmp_path / "gemma")
    with pytest.raises(EngineError, match="sliding_attention layers, and transformers shares prefixes only"):
        Demo(DemoOptions(**SMALL, model=tmp_path / "gemma"))


def test_a_local_model_is_served(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    torch.manual_seed(0)
    settings = Qwen2Config(
        vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(settings).save_pretrained(tmp_path / "qwen")
    options = DemoOptions(model=tmp_path / "qwen", device="cpu", requests=40, block_tokens=16, **ALWAYS)
    result = run_demo(options, tmp_path, Console(quiet=True))
    assert result.bit_exact
    assert sum(result.tiered.restored_blocks.values()) > 0


def test_help_teaches() -> None:
    output = CliRunner().invoke(app, ["demo", "--help"]).output
    for word in ("tiered", "resident", "recompute", "--device-share", "--report", "--json"):
        assert word in output
