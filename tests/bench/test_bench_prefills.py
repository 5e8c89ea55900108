"""`longshore bench prefill`: a figure for each length, that a replay takes for its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from longshore.bench import prefills
from longshore.cli.app import app
from longshore.errors import LongshoreError
from longshore.trace.machine import PROFILES, with_bench

TINY = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "hidden_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 256,
    "max_position_embeddings": 512, "dtype": "float32",
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tmp_path.joinpath("config.json").write_text(json.dumps(TINY))
    return tmp_path


def test_each_length_has_a_figure_and_a_reference(model: Path) -> None:
    cases = list(prefills.run(model, tokens=[16, 64], repeats=1))
    assert [case.name for case in cases] == ["prefill/16", "prefill/64"]
    for case in cases:
        assert case.unit == "TFLOPS"
        assert case.value > 0
        assert case.ratio == pytest.approx(case.value / case.reference_value)


def test_a_replay_takes_the_figure_of_the_longest_prompt(model: Path, tmp_path: Path) -> None:
    command = ["bench", "prefill", "--model", str(model), "--tokens", "16,64", "--repeats", "1", "--json"]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert done.exit_code == 0
    report = json.loads(done.stdout)
    path = tmp_path / "prefill.json"
    path.write_text(done.stdout)
    assert with_bench(PROFILES["h100"], path).flops == pytest.approx(1e12 * report["cases"][-1]["value"])
    assert report["machine"]["device"] == "cpu"


def test_no_model_no_tokens_and_no_gpu_are_refused(model: Path, tmp_path: Path) -> None:
    for options in (
        ("--model", str(tmp_path / "absent")),
        ("--model", str(model), "--tokens", "0"),
        ("--model", str(model), "--tokens", "many"),
    ):
        with pytest.raises(LongshoreError):
            CliRunner().invoke(app, ["bench", "prefill", *options], catch_exceptions=False)
