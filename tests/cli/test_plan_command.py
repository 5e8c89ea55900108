"""`longshore plan`: every option once, what it prints, and how it says no."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import pytest
from typer.testing import CliRunner

from longshore.cli.app import app
from longshore.errors import LongshoreError

EXCERPT = str(resources.files("longshore.trace").joinpath("data", "conversation_excerpt.jsonl"))
MODEL = ("--model", "llama-3.1-8b")


def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["plan", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_answer_is_said_in_words_with_its_assumptions() -> None:
    table = run(EXCERPT, *MODEL, "--ttft-p95", "3600s")
    assert "Nothing needs to be bought" in table
    assert "Assumed:" in table
    assert "No size keeps" in run(EXCERPT, *MODEL, "--ttft-p95", "0.1ms")


def test_json_and_a_page(tmp_path: Path) -> None:
    prices = tmp_path / "prices.toml"
    prices.write_text('dram_per_gib = 2.5\nnvme_per_gib = 0.1\ncurrency = "EUR"\n')
    arguments = (EXCERPT, *MODEL, "--ttft-p95", "900ms", "--prices", str(prices), "--report", str(tmp_path / "page"))
    found = json.loads(run(*arguments, "--json"))
    assert set(found) >= {"requests", "curve", "frontier", "knee", "recommended", "prices", "words", "target"}
    assert found["kv_bytes_per_token"] == 131_072
    assert found["prices"]["currency"] == "EUR"
    assert found["target"] == 0.9
    page = (tmp_path / "page" / "index.html").read_text()
    assert "What a budget gives" in page
    assert "EUR" in page
    assert "<script src" not in page


def test_every_option_changes_the_answer(tmp_path: Path) -> None:
    bench = tmp_path / "bench.json"
    bench.write_text(json.dumps({"cases": [{"name": "read/2MiB", "value": 0.9, "unit": "GB/s"}]}))
    usual = json.loads(run(EXCERPT, *MODEL, "--json"))
    for options in (
        ("--profile", "a100"),
        ("--link", "5GB"),
        ("--file-read", "2GB/s"),
        ("--file-write", "1GB"),
        ("--prefill-rate", "9000"),
        ("--bench", str(bench)),
        ("--engines", "2"),
        ("--limit", "30"),
        ("--ttft-p95", "2s"),
        ("--model", "qwen2.5-7b"),
    ):
        assert json.loads(run(EXCERPT, *MODEL, *options, "--json")) != usual, options
    same = ("--form", "mooncake", "--block-tokens", "512", "--bad-lines", "skip")
    assert json.loads(run(EXCERPT, *MODEL, *same, "--json")) == usual


def test_traces_in_which_nothing_comes_back_get_an_honest_answer(tmp_path: Path) -> None:
    lengths = tmp_path / "t.csv"
    lengths.write_text("timestamp,input_length,output_length\n1,900,5\n2,900,5\n")
    told = " ".join(run(str(lengths), *MODEL, "--ttft-p95", "1us").split())
    assert "to compute all, as nothing that is worth keeping comes back" in told
    assert "The knee is" not in told
    assert "on one engine computing one prompt at a time" in told
    kept = json.loads(run(str(lengths), *MODEL, "--ttft-p95", "3600s", "--json"))
    assert kept["words"][0].startswith("Nothing needs to be bought: all computed, 0.04")
    assert (kept["recommended"]["host_bytes"], kept["recommended"]["file_bytes"], len(kept["frontier"])) == (0, 0, 1)


def test_a_trace_without_requests_cannot_be_planned_for(tmp_path: Path) -> None:
    header = tmp_path / "t.csv"
    header.write_text("timestamp,input_length,output_length\n")
    with pytest.raises(LongshoreError, match="expected a request"):
        run(str(header), *MODEL)


@pytest.mark.parametrize("time", ["500", "ms", "-1s", "0s", "nans", "infs", "soon"])
def test_a_target_that_is_no_time_is_refused(time: str) -> None:
    with pytest.raises(LongshoreError, match="--ttft-p95: expected a time such as 500ms or 2s"):
        run(EXCERPT, *MODEL, f"--ttft-p95={time}")


def test_a_plan_needs_a_model_and_a_trace(tmp_path: Path) -> None:
    with pytest.raises(LongshoreError, match="--model"):
        run(EXCERPT)
    with pytest.raises(LongshoreError, match="absent"):
        run(str(tmp_path / "absent"), *MODEL)
