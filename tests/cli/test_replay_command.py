"""`longshore replay`: every option once, what it prints, and how it says no."""

from __future__ import annotations

import gzip
import json
import sys
from importlib import resources
from pathlib import Path

import pytest
from typer.testing import CliRunner

from longshore.cache.eviction_policies import POLICIES
from longshore.cli.app import app
from longshore.errors import EngineError, LongshoreError
from longshore.trace.experiment import REFERENCES

EXCERPT = str(resources.files("longshore.trace").joinpath("data", "conversation_excerpt.jsonl"))
KEYS = {
    "requests", "block_refs", "unique_blocks", "hit_ratio", "hit_ratio_by_tier", "optimal_hit_ratio", "ttft_s",
    "file_write_bytes_per_day",
}  # fmt: skip
TIMED = ("--model", "llama-3.1-8b", "--host", "4GiB", "--file", "1TiB")


def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["replay", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def facts(*arguments: str) -> dict[str, object]:
    return answer(run(*arguments, "--json"))


def answer(printed: str) -> dict[str, object]:
    """The JSON object without how it was made, which differs from run to run."""
    found: dict[str, object] = json.loads(printed)
    assert set(found) >= KEYS
    del found["provenance"]
    return found


def test_the_plain_experiment() -> None:
    found = facts(EXCERPT, "--capacity-blocks", "100", "--policy", "lru")
    assert found["policy"] == "lru"
    assert found["ttft_s"] is None
    assert 0 < float(str(found["hit_ratio"])) <= float(str(found["optimal_hit_ratio"])) < 1
    default = facts(EXCERPT, "--capacity-blocks", "100", "--no-optimum")
    assert default["optimal_hit_ratio"] is None
    assert "best possible" in run(EXCERPT, "--capacity-blocks", "100", "--limit", "20")


def test_the_experiment_through_the_path_verbs_of_the_cache() -> None:
    options = (EXCERPT, "--capacity-blocks", "100", "--policy", "lru")
    plain, through = facts(*options), facts(*options, "--through", "cache")
    assert (plain["through"], through["through"]) == (None, "cache")
    assert {**through, "through": None} == plain
    assert "through cache" in run(*options, "--through", "cache")


def test_the_experiment_with_files_below_host_memory() -> None:
    options = (EXCERPT, "--capacity-blocks", "100", "--through", "cache", "--file-blocks", "400")
    found = facts(*options)
    assert found["file_blocks"] == 400
    assert set(dict(found["hit_ratio_by_tier"])) == {"host", "file"}  # type: ignore[call-overload]
    assert "file tier" in run(*options)


def test_without_vllm_its_interface_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("longshore.engines.vllm")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(EngineError, match="run longshore with the Python that runs vLLM"):
        run(EXCERPT, "--capacity-blocks", "100", "--through", "vllm")


def test_a_replay_in_virtual_time(tmp_path: Path) -> None:
    found = facts(EXCERPT, *TIMED, "--report", str(tmp_path / "page"), "--engines", "2", "--policy", "lru")
    ttft = found["ttft_s"]
    assert isinstance(ttft, dict)
    assert set(ttft) == {"p50", "p95", "recompute_p50", "recompute_p95"}
    assert found["kv_bytes_per_token"] == 131_072
    by_tier = found["hit_ratio_by_tier"]
    assert isinstance(by_tier, dict)
    assert set(by_tier) == {"host", "file"}
    assert sum(by_tier.values()) == pytest.approx(found["hit_ratio"])
    evictions = found["evictions"]
    assert isinstance(evictions, dict)
    assert evictions["host"]["demoted"] > 0
    assert set(evictions["file"]) == {"demoted", "forgotten", "unusable"}
    page = (tmp_path / "page" / "index.html").read_text().replace("\u00a0", " ")
    for figure in (
        "Time to first token",
        "Hits over time, by tier",
        "Queue",
        "Hit ratio by capacity",
        "Evictions",
        "Routes",
    ):
        assert figure in page
    assert "demoted" in page
    assert "http-equiv" in page
    table = run(EXCERPT, *TIMED)
    assert "TTFT p95" in table
    assert "assumed:" in table


def test_drive_writes_are_shown_with_and_without_refused_ones() -> None:
    small = (EXCERPT, "--model", "llama-3.1-8b", "--host", "2GiB", "--file", "8GiB", "--no-optimum")
    chosen = facts(*small)
    drops, blocks, size = chosen["drops"], chosen["blocks_by_tier"], chosen["block_bytes"]
    assert isinstance(drops, dict)
    assert isinstance(blocks, dict)
    assert isinstance(size, int)
    assert drops["file"]["admission"] > 0
    writes = [float(str(chosen[f"file_write_bytes_per_day{which}"])) for which in ("", "_without_admission")]
    assert 0 < writes[0] < 0.9 * writes[1]
    drive = [float(str(chosen[f"drive_writes_per_day{which}"])) for which in ("", "_without_admission")]
    assert drive == pytest.approx([each / (blocks["file"] * size) for each in writes])
    alone = facts(*small, "--no-comparisons")
    changed = {name: value for name, value in alone.items() if value != chosen[name]}
    assert changed == {
        f"{name}_per_day_without_admission": None for name in ("file_write_bytes", "remote_write_bytes", "drive_writes")
    }
    every = facts(*small, "--policy", "lru")
    assert every["file_write_bytes_per_day"] == every["file_write_bytes_per_day_without_admission"]
    assert "if it refused no block" in run(*small, "--limit", "50")
    assert "if it refused no block" not in run(*small, "--limit", "50", "--no-comparisons")


def test_store_writes_are_shown_with_and_without_unsent_ones() -> None:
    small = (EXCERPT, "--model", "llama-3.1-8b", "--host", "2GiB", "--remote", "4GiB", "--no-gate", "--no-optimum")
    chosen = facts(*small)
    drops = chosen["drops"]
    assert isinstance(drops, dict)
    assert drops["remote"]["admission"] > 0
    writes = [float(str(chosen[f"remote_write_bytes_per_day{which}"])) for which in ("", "_without_admission")]
    assert 0 < writes[0] < writes[1]
    assert "if no block is refused" in run(*small, "--limit", "50")
    assert "if no block is refused" not in run(*small, "--limit", "50", "--no-comparisons")


def test_an_optimum_that_takes_much_memory_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longshore.cli.replay._MUCH", 300)
    experiment = ["replay", EXCERPT, "--capacity-blocks", "100"]
    told = " ".join(CliRunner().invoke(app, experiment, catch_exceptions=False).stderr.split())
    assert told.count("More than 300 block references") == 1
    assert "takes 9 bytes of memory for each; --no-optimum skips it" in told
    assert "--no-optimum" not in CliRunner().invoke(app, [*experiment, "--no-optimum"], catch_exceptions=False).stderr


def test_overload_is_a_banner_with_enough_engines(tmp_path: Path) -> None:
    slow = (EXCERPT, *TIMED, "--prefill-rate", "50")
    page = ("--report", str(tmp_path / "page"))
    done = CliRunner().invoke(app, ["replay", *slow, *page, "--json"], catch_exceptions=False)
    overload = json.loads(done.stdout)["overload"]
    assert overload["busy"] > 1
    assert f"--engines {overload['enough']} would suffice" in overload["words"]
    assert overload["words"] in done.stderr
    assert overload["words"] in (tmp_path / "page" / "index.html").read_text().replace("\u00a0", " ")
    assert run(*slow).startswith(f"Overload. {overload['words']}\n")
    enough = facts(*slow, "--engines", str(overload["enough"]))
    assert enough["overload"] is None
    ttft = enough["ttft_s"]
    assert isinstance(ttft, dict)
    assert ttft["p95"] == overload["ttft_p95"]
    assert "Overload" not in run(EXCERPT, *TIMED)


def test_overload_beyond_all_engines_is_told_without_a_replay() -> None:
    overload = facts(EXCERPT, *TIMED, "--prefill-rate", "0.001")["overload"]
    assert isinstance(overload, dict)
    assert overload["ttft_p95"] is None
    assert overload["enough"] > 10_000


@pytest.mark.parametrize("mode", [("--capacity-blocks", "100"), TIMED])
def test_compressed_traces_and_standard_input_are_read_alike(
    mode: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = facts(EXCERPT, *mode)
    packed = tmp_path / "trace.jsonl.gz"
    packed.write_bytes(gzip.compress(Path(EXCERPT).read_bytes()))
    assert facts(str(packed), *mode) == plain
    for content in (Path(EXCERPT).read_bytes(), packed.read_bytes()):
        done = CliRunner().invoke(app, ["replay", "-", *mode, "--json"], input=content, catch_exceptions=False)
        assert answer(done.stdout) == plain
    packed.write_bytes(packed.read_bytes()[:1000])
    with pytest.raises(LongshoreError, match="ended before"):
        run(str(packed), *mode)


def test_messages_call_standard_input_by_its_name() -> None:
    line = b'{"timestamp": 1, "input_length": 512, "output_length": 1, "hash_ids": [1]}\n'
    call = ["replay", "-", "--capacity-blocks", "5"]
    with pytest.raises(LongshoreError, match=r"^standard input, line 2: expected a field 'input_length'"):
        CliRunner().invoke(app, call, input=line + b"{}\n", catch_exceptions=False)
    done = CliRunner().invoke(app, [*call, "--bad-lines", "skip"], input=line + b"{}\n", catch_exceptions=False)
    assert done.stderr.startswith("skipped: standard input, line 2: expected a field 'input_length'")


def test_time_that_runs_backwards_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    line = '{{"timestamp": {}, "input_length": 512, "output_length": 1, "hash_ids": [{}]}}\n'
    path.write_text("".join(line.format(*each) for each in ((5, 1), (7, 2), (6, 3), (7, 4))))
    with pytest.raises(
        LongshoreError, match=r"line 3: timestamp 6 ms is earlier than the one before, 7: sort the trace"
    ):
        run(str(path), *TIMED)
    assert facts(str(path), *TIMED, "--bad-lines", "skip")["requests"] == 3
    lengths = tmp_path / "t.csv"
    lengths.write_text("timestamp,input_length,output_length\n9,900,5\n2,900,5\n")
    with pytest.raises(LongshoreError, match=r"line 3: timestamp .* is earlier than the one before"):
        run(str(lengths), *TIMED)


def test_made_up_times_are_said(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"tokens": [1, 2, 3], "timestamp": 0}\n' + 2 * '{"tokens": [1, 2, 3]}\n')
    words = "2 of 3 requests have no timestamp: each is taken to arrive 1 s after the one before it"
    done = CliRunner().invoke(app, ["replay", str(path), *TIMED, "--json"], catch_exceptions=False)
    assert words in done.stderr
    assert words in " ".join(json.loads(done.stdout)["assumptions"])
    assert words in run(str(path), *TIMED)


def test_the_machine_can_be_described(tmp_path: Path) -> None:
    bench = tmp_path / "bench.json"
    bench.write_text(json.dumps({"cases": [{"name": "read/2MiB", "value": 1.0, "unit": "GB/s"}]}))
    prefill = tmp_path / "prefill.json"
    prefill.write_text(json.dumps({"cases": [{"name": "prefill/512", "value": 30.0, "unit": "TFLOPS"}]}))
    usual = facts(EXCERPT, *TIMED)
    for options in (
        ("--profile", "a100"),
        ("--link", "1GB/s"),
        ("--file-read", "1GB"),
        ("--file-write", "1MB"),
        ("--prefill-rate", "5000"),
        ("--bench", str(bench)),
        ("--bench", str(bench), "--bench", str(prefill)),
        ("--remote", "1TiB"),
        ("--no-gate", "--file-read", "100MB"),
        ("--no-optimum",),
        ("--limit", "10"),
    ):
        assert facts(EXCERPT, *TIMED, *options) != usual, options
    assert facts(EXCERPT, *TIMED, "--gate", "--optimum", "--comparisons", "--profile", "h100") == usual


def test_a_remote_store_can_be_described() -> None:
    tiered = ("--model", "llama-3.1-8b", "--host", "2GiB", "--remote", "1TiB", "--no-gate")
    usual = facts(EXCERPT, *tiered)
    by_tier = usual["hit_ratio_by_tier"]
    assert isinstance(by_tier, dict)
    assert by_tier["remote"] > 0
    for options in (("--remote-read", "500MB/s"), ("--remote-write", "9MB"), ("--remote-delay", "40ms")):
        assert facts(EXCERPT, *tiered, *options)["ttft_s"] != usual["ttft_s"], options
    table = run(EXCERPT, *tiered)
    for word in ("hits, remote", "left host", "remote->host"):
        assert word in table


def test_without_comparisons_overload_is_an_average_and_replicas_stand_alone() -> None:
    tiered = ("--model", "llama-3.1-8b", "--host", "4GiB", "--replicas", "3", "--remote", "1TiB:3GB/s:1ms")
    busy = facts(EXCERPT, *tiered, "--prefill-rate", "20", "--no-gate", "--no-comparisons")
    overload = busy["overload"]
    assert isinstance(overload, dict)
    assert overload["enough"] > overload["engines"]
    assert f"--engines {overload['enough']} would suffice by the average load." in overload["words"]
    assert (overload["ttft_p95"], busy["without_store"]) == (None, None)


def test_replicas_that_share_a_store_are_compared_with_others() -> None:
    tiered = ("--model", "llama-3.1-8b", "--host", "4GiB", "--replicas", "3")
    shared = facts(EXCERPT, *tiered, "--remote", "1TiB:3GB/s:1ms")
    alone = facts(EXCERPT, *tiered)
    without = shared["without_store"]
    assert isinstance(without, dict)
    assert without == {key: alone[key] for key in ("hit_ratio", "ttft_s")}
    assert float(str(alone["hit_ratio"])) < float(str(shared["hit_ratio"])) <= float(str(shared["one_cache_hit_ratio"]))
    assert (alone["without_store"], alone["network"], shared["replicas"]) == (None, None, 3)
    network = shared["network"]
    assert isinstance(network, dict)
    assert all(each["bytes"] > 0 < each["share_of_bandwidth"] < 1 for each in network.values())
    written = facts(EXCERPT, *tiered, "--remote", "1TiB", "--remote-read", "3GB/s", "--remote-write", "3GB/s",
                    "--remote-delay", "1ms")  # fmt: skip
    assert written == shared
    sticky = facts(EXCERPT, *tiered, "--route", "prefix")
    assert float(str(sticky["hit_ratio"])) > float(str(alone["hit_ratio"]))
    table = run(EXCERPT, *tiered, "--remote", "1TiB:3GB/s:1ms")
    for word in ("replicas", "hits, one cache", "hits, no store", "of the store's bandwidth"):
        assert word in table
    assert "replicas" not in facts(EXCERPT, *TIMED)


def test_help_names_every_policy_and_suggests_the_nearest() -> None:
    text = " ".join(CliRunner().invoke(app, ["replay", "--help"], terminal_width=200).output.split())
    for name in POLICIES | REFERENCES:
        assert name in text
    with pytest.raises(LongshoreError, match=r"got 'gitins'; did you mean gittins\?"):
        run(EXCERPT, "--capacity-blocks", "5", "--policy", "gitins")


def test_forms_and_bad_lines(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text('{"tokens": [1, 2, 3, 4, 5]}\nnonsense\n{"tokens": [1, 2, 3, 4, 6]}\n')
    options = ("--capacity-blocks", "9", "--block-tokens", "2")
    with pytest.raises(LongshoreError, match="line 2"):
        run(str(path), *options)
    for name in ("--format", "--form"):
        found = json.loads(run(str(path), *options, "--bad-lines", "skip", name, "prompts", "--json"))
        assert (found["requests"], found["hit_ratio"]) == (2, 2 / 6)
    lengths = tmp_path / "t.csv"
    lengths.write_text("timestamp,input_length,output_length\n1,900,5\n2,900,5\n")
    done = CliRunner().invoke(app, ["replay", str(lengths), "--capacity-blocks", "9"], catch_exceptions=False)
    assert "lengths only" in done.stderr


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ((), "--host and --model, or --capacity-blocks"),
        (("--host", "4GiB"), "--model"),
        (("--host", "lots", "--model", "llama-3.1-8b"), "--host: a size is"),
        (("--host", "1KiB", "--model", "llama-3.1-8b"), "expected at least 64.0 MiB, one block"),
        (("--host", "4GiB", "--model", "nothing"), "llama-3.1-8b"),
        (("--host", "4GiB", "--model", "llama-3.1-8b", "--profile", "abacus"), "h100"),
        (("--host", "4GiB", "--model", "llama-3.1-8b", "--link", "-1"), "--link"),
        (("--capacity-blocks", "5", "--model", "llama-3.1-8b"), "simulates no time"),
        (("--capacity-blocks", "5", "--policy", "best"), "expected a policy out of"),
        (("--capacity-blocks", "5", "--block-tokens", "16"), "hash ids"),
        (("--capacity-blocks", "5", "--remote", "1GiB"), "simulates no time"),
        (("--host", "4GiB", "--model", "llama-3.1-8b", "--remote", "some"), "--remote: a size is"),
        (("--host", "4GiB", "--model", "llama-3.1-8b", "--remote-delay", "5"), "--remote-delay: expected a time"),
        (("--host", "4GiB", "--model", "llama-3.1-8b", "--bench", EXCERPT), "longshore bench"),
    ],
)
def test_what_cannot_be_is_refused_with_a_reason(options: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(LongshoreError, match=complaint):
        run(EXCERPT, *options)


@pytest.mark.parametrize("option", ["--svg", "--png"])
def test_images_without_a_browser_are_refused_first(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONGSHORE_BROWSER", str(tmp_path / "none"))
    arguments = ("replay", EXCERPT, "--capacity-blocks", "100", option, str(tmp_path / "images"))
    with pytest.raises(LongshoreError, match="apt-get install chromium"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert list(tmp_path.iterdir()) == []
