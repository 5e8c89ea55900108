"""`longshore plan`: every option once, what it prints, and how it says no."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from longshore.cli.app import app
from longshore.errors import ConfigError, LongshoreError
from longshore.report.units import quantity

EXCERPT = str(resources.files("longshore.trace").joinpath("data", "conversation_excerpt.jsonl"))
MODEL = ("--model", "llama-3.1-8b")


def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["plan", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def plan_without_provenance(*arguments: str) -> Any:
    """The JSON object without how it was made, which differs from run to run."""
    found = json.loads(run(*arguments, "--json"))
    del found["provenance"]
    return found


def test_the_answer_is_said_in_words_with_its_assumptions() -> None:
    table = run(EXCERPT, *MODEL, "--ttft-p95", "3600s")
    assert "Nothing needs to be bought" in table
    assert "Assumed:" in table
    assert "No size meets a TTFT p95 of" in run(EXCERPT, *MODEL, "--ttft-p95", "0.1ms")


def test_json_and_a_page(tmp_path: Path) -> None:
    prices = tmp_path / "prices.toml"
    prices.write_text('dram_per_gib = 2.5\nnvme_per_gib = 0.1\ncurrency = "EUR"\n')
    arguments = (EXCERPT, *MODEL, "--ttft-p95", "600ms", "--prices", str(prices), "--report", str(tmp_path / "page"))
    found = json.loads(run(*arguments, "--json"))
    assert set(found) >= {
        "requests",
        "curve",
        "choices",
        "frontier",
        "knee",
        "recommended",
        "prices",
        "words",
        "target",
    }
    assert found["kv_bytes_per_token"] == 131_072
    assert found["prices"]["currency"] == "EUR"
    assert found["target"] == 0.6
    page = (tmp_path / "page" / "index.html").read_text().replace("\u00a0", " ")
    for words in (
        "Time to first token by cost",
        "EUR",
        "Sizes replayed",
        "16 GiB of DRAM",
        "The choice, replayed",
        "Hit ratio by capacity",
    ):
        assert words in page
    assert "<script src" not in page


@pytest.mark.parametrize(
    "options", [(), ("--engines", "2", "--file-read", "2GB/s", "--limit", "70", "--profile", "a100")]
)
def test_replay_of_the_recommendation_finds_what_the_plan_says(options: tuple[str, ...]) -> None:
    asked = ["--ttft-p95", "600ms", *options] if not options else ["--ttft-p95", "300ms", *options]
    check_promise(json.loads(run(EXCERPT, *MODEL, *asked, "--json")))


def check_promise(found: Any) -> None:
    """Run the command that the plan prints, and compare."""
    chosen = found["recommended"] or found["frontier"][-1]
    assert chosen["host_bytes"]
    done = CliRunner().invoke(app, [*found["replay"], "--json"], catch_exceptions=False)
    replayed = json.loads(done.stdout)
    assert (chosen["ttft_p50"], chosen["ttft_p95"]) == (replayed["ttft_s"]["p50"], replayed["ttft_s"]["p95"])
    assert chosen["hit_ratio"] == replayed["hit_ratio"]
    assert chosen["host_hit_ratio"] == replayed["hit_ratio_by_tier"]["host"]
    assert chosen["file_write_bytes_per_day"] == replayed["file_write_bytes_per_day"]
    assert chosen["busy"] == replayed["engine_busy"]


def turns(folder: Path, requests: int, prompts: int = 30) -> Path:
    """A trace in which prompts of a GiB each take turns."""
    with (folder / "trace.jsonl").open("w") as file:
        for i in range(requests):
            ids = list(range(16 * (i % prompts), 16 * (i % prompts) + 16))
            asked = {"timestamp": 2000 * i, "input_length": 8192, "output_length": 1, "hash_ids": ids}
            file.write(json.dumps(asked) + "\n")
    return folder / "trace.jsonl"


def test_plan_with_drives_keeps_its_promise_and_shows_endurance(tmp_path: Path) -> None:
    """Thirty prompts, of a GiB each, take turns: a drive is the cheapest that holds them."""
    trace, prices = turns(tmp_path, 720), tmp_path / "prices.toml"
    prices.write_text("dram_per_gib = 2.5\nnvme_per_gib = 0.01\n")
    arguments = (str(trace), *MODEL, "--ttft-p95", "300ms", "--prices", str(prices), "--replays", "3")
    found = json.loads(run(*arguments, "--json"))
    assert found["recommended"]["file_bytes"] == 960 * 10**9
    endurance = next(line for line in found["words"] if line.startswith("Endurance"))
    assert "over a warranty of 5 years" in endurance
    assert f"{quantity(found['recommended']['drive_writes_per_day'])} drive writes per day (DWPD)" in endurance
    assert "16 GiB of DRAM and 0.96 TB of NVMe" in found["words"][0]
    check_promise(found)


OF_A_STORE = ("--ttft-p95", "300ms", "--remote", "20GB/s:1ms", "--route", "round-robin", "--replays", "6")


@pytest.mark.parametrize(("price", "words"), [(1.0, "pays"), (25.0, "does not pay")])
def test_a_store_that_replicas_share_pays_at_a_price(price: float, words: str, tmp_path: Path) -> None:
    """Two replicas have the prompts each, or share them."""
    trace, prices, page = turns(tmp_path, 1550, prompts=31), tmp_path / "prices.toml", tmp_path / "page"
    prices.write_text(f"dram_per_gib = 25\nnvme_per_gib = 20\nstore_per_gib = {price}\n")
    arguments = (str(trace), *MODEL, *OF_A_STORE, "--replicas", "2", "--prices", str(prices))
    found = json.loads(run(*arguments, "--report", str(page), "--json"))
    chosen = found["recommended"]
    assert (chosen["host_bytes"] >> 30, chosen["store_bytes"] >> 30) == ((16, 64) if words == "pays" else (32, 0))
    assert chosen["cost"] == 25 * 2 * (chosen["host_bytes"] >> 30) + price * (chosen["store_bytes"] >> 30)
    said = next(line for line in found["words"] if line.startswith("A store that the replicas share"))
    assert said.startswith(f"A store that the replicas share {words}: the cheapest size with one is 16 GiB of DRAM in")
    assert "without one 32 GiB of DRAM in each of 2 replicas" in said
    text = (page / "index.html").read_text().replace("\u00a0", " ")
    assert said in text
    assert "without a store, TTFT p95" in text
    check_promise(found)


def test_a_store_may_be_needed(tmp_path: Path) -> None:
    """Each of four replicas asks for each prompt too seldom to meet the target alone."""
    found = json.loads(run(str(turns(tmp_path, 720)), *MODEL, *OF_A_STORE, "--replicas", "4", "--json"))
    assert "A store that the replicas share is needed" in " ".join(found["words"])
    assert any(choice["host_bytes"] and not choice["store_bytes"] for choice in found["choices"])
    check_promise(found)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--remote", "3GB/s"), "no effect without --replicas of at least 2"),
        (("--route", "prefix"), "no effect without --replicas of at least 2"),
        (("--replicas", "2", "--remote", "fast"), "--remote: expected a rate"),
        (("--replicas", "2", "--remote", "3GB/s:"), "--remote: expected a time"),
    ],
)
def test_a_store_that_makes_no_sense_is_refused(options: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        run(EXCERPT, *MODEL, *options)


def test_overload_is_a_banner_of_the_plan_and_its_page(tmp_path: Path) -> None:
    slow = (EXCERPT, *MODEL, "--prefill-rate", "50", "--replays", "2")
    done = CliRunner().invoke(
        app, ["plan", *slow, "--report", str(tmp_path / "page"), "--json"], catch_exceptions=False
    )
    overload = json.loads(done.stdout)["overload"]
    assert f"--engines {overload['enough']} would keep up" in overload["words"]
    assert overload["words"] in done.stderr
    assert overload["words"] in (tmp_path / "page" / "index.html").read_text().replace("\u00a0", " ")
    assert run(*slow).startswith(f"Overload. {overload['words']}\n")
    assert json.loads(run(*slow, "--engines", str(overload["enough"]), "--json"))["overload"] is None


def test_a_trace_from_standard_input_is_planned_for() -> None:
    done = CliRunner().invoke(app, ["plan", "-", *MODEL, "--json"], input=Path(EXCERPT).read_bytes())
    assert json.loads(done.stdout)["choices"] == json.loads(run(EXCERPT, *MODEL, "--json"))["choices"]


def test_every_option_changes_the_answer(tmp_path: Path) -> None:
    bench = tmp_path / "bench.json"
    bench.write_text(json.dumps({"cases": [{"name": "read/2MiB", "value": 0.9, "unit": "GB/s"}]}))
    usual = plan_without_provenance(EXCERPT, *MODEL)
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
        ("--replays", "1"),
    ):
        assert plan_without_provenance(EXCERPT, *MODEL, *options) != usual, options
    for name in ("--format", "--form"):
        same = (name, "mooncake", "--block-tokens", "512", "--bad-lines", "skip")
        assert json.loads(run(EXCERPT, *MODEL, *same, "--json"))["choices"] == usual["choices"]


def test_traces_in_which_nothing_comes_back_get_an_honest_answer(tmp_path: Path) -> None:
    lengths = tmp_path / "t.csv"
    lengths.write_text("timestamp,input_length,output_length\n1,900,5\n2,900,5\n")
    told = " ".join(run(str(lengths), *MODEL, "--ttft-p95", "1us").split())
    assert "without tiers, because too few blocks are used again" in told
    assert "The knee is" not in told
    assert "on one engine computing one prompt at a time" in told
    kept = json.loads(run(str(lengths), *MODEL, "--ttft-p95", "3600s", "--json"))
    assert kept["words"][0].startswith("Nothing needs to be bought: without tiers, TTFT p95 is 4")
    assert (kept["recommended"]["host_bytes"], kept["recommended"]["file_bytes"], len(kept["frontier"])) == (0, 0, 1)


def test_a_trace_without_requests_cannot_be_planned_for(tmp_path: Path) -> None:
    header = tmp_path / "t.csv"
    header.write_text("timestamp,input_length,output_length\n")
    with pytest.raises(LongshoreError, match="at least one request, got none"):
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


@pytest.mark.parametrize("option", ["--svg", "--png"])
def test_images_without_a_browser_are_refused_first(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONGSHORE_BROWSER", str(tmp_path / "none"))
    arguments = ("plan", EXCERPT, *MODEL, option, str(tmp_path / "images"))
    with pytest.raises(LongshoreError, match="apt-get install chromium"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert list(tmp_path.iterdir()) == []
