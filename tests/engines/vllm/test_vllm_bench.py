"""Benchmarks that need vLLM: what they report, not how fast it is."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiny_models import save
from typer.testing import CliRunner

from longshore.bench import files, vllm_runs
from longshore.bench.files import ALONE, SCATTERED, Images, VllmFiles
from longshore.cli.app import app
from longshore.errors import BenchError, TraceError
from longshore.trace.readers import read_trace

ENGINE = {
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": 32,
    "num_gpu_blocks_override": 16,
    "max_model_len": 256,
    "max_num_seqs": 4,
}


def test_the_scheduler_is_timed_beside_vllms_own_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    vllm_manager = importlib.import_module("vllm_manager")
    cases = list(vllm_manager.run(blocks=[4 * vllm_manager.PROMPT], repeats=1))
    assert [case.name for case in cases] == ["load/8192", "store/8192", "pause/8192"]
    assert all(case.value > 0 and case.reference_value > 0 for case in cases)
    assert {case.reference for case in cases} == {"vLLM's ARC manager"}
    with pytest.raises(BenchError, match="at least"):
        list(vllm_manager.run(blocks=[64]))


@pytest.mark.parametrize("kind", ["read", SCATTERED, ALONE])
def test_vllms_own_file_tier_moves_the_same_images(tmp_path: Path, kind: str) -> None:
    images = Images(4096, 128 * 4096)
    side = VllmFiles(tmp_path / "files", images)
    expected = np.random.default_rng(0).integers(0, 256, images.nbytes, dtype=np.uint8)
    for again in (expected, expected[::-1]):  # the second time over the first: it never overwrites by itself
        images.arena.array[:] = again
        assert side.move("overwrite") > 0
        images.arena.array[:] = 0
        assert side.move(kind) > 0
        np.testing.assert_array_equal(images.arena.array, again)
    assert len(list(tmp_path.rglob("*.bin"))) == images.count
    next(iter(tmp_path.rglob("*.bin"))).unlink()
    with pytest.raises(BenchError, match="failed to move an image"):
        side.move(kind)
    side.close()
    images.arena.close()


def test_the_file_tier_is_timed_beside_vllms_own(tmp_path: Path) -> None:
    names = [f"vs-per-file-{kind}/256KiB" for kind in ("write", "read", SCATTERED, ALONE)]
    cases = list(files.run(tmp_path, total_bytes=8 << 20, repeats=1, only=names))
    assert [case.name for case in cases] == names
    assert {case.reference for case in cases} == {VllmFiles.name}


def test_sessions_come_back_from_host_memory_and_then_from_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    sizes = {"host_size": "32MiB", "file_size": "32MiB", "settings": {"gate": False}}
    plan = vllm_runs.SessionPlan(sessions=8, prompt=150, more=20, answer=8, engine=ENGINE, **sizes)  # type: ignore[arg-type]
    cases = {case.name: case for case in vllm_runs.run_sessions(save("llama", tmp_path), tmp_path, plan)}
    times = [f"ttft-{tier}/{share}" for tier in ("host", "file") for share in ("p50", "p95")]
    assert set(cases) == {"zero-reuse", "zero-reuse/cpu", *times, "found-host", "found-file"}
    assert all(cases[name].value > 0 and cases[name].reference_value > 0 for name in times)
    for tier in ("host", "file"):  # whole blocks of what was said before; the device has lost all of it
        assert cases[f"found-{tier}"].value > 0.6
        assert cases[f"found-{tier}"].reference_value == 0


def test_last_first_turns_come_back_in_their_order() -> None:
    asked: list[list[list[int]]] = []

    def ask(prompts: list[list[list[int]]], answer: int) -> list[dict[str, Any]]:
        asked.append(prompts[0])
        answers = [{"ttft": 0.1, "tokens": [1] * answer, "cached": 0} for _ in prompts[0]]
        return [{"seconds": 1.0, "cpu_seconds": 1.0, "answers": answers}] * 2

    plan = vllm_runs.SessionPlan(sessions=6, prompt=20, more=5, answer=2, engine={})
    sessions, both = vllm_runs.Sessions(plan, {"vocabulary": 999, "longest": 99}, print), SimpleNamespace(ask=ask)
    list(sessions.begin(both))  # type: ignore[arg-type]
    first = [text for batch in asked[1:] for text in batch]
    assert len(first) == 48
    asked.clear()
    list(sessions.go_on(both, "host"))  # type: ignore[arg-type]
    assert [prompt[:20] for (prompt,) in asked] == first[-6:]


def test_orders_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    for text in ("{", "[]"):
        with pytest.raises(BenchError, match=r"arguments of vllm\.LLM"):
            vllm_runs.options_of(text)
    assert vllm_runs.options_of('{"dtype": "float32"}') == {"dtype": "float32"}
    with pytest.raises(BenchError, match=r"nothing/config\.json is not there"):
        list(vllm_runs.run_sessions(tmp_path / "nothing", tmp_path, vllm_runs.SessionPlan(engine={})))
    (tmp_path / "config.json").write_text('{"model_type": "no such model"}')
    with pytest.raises(BenchError, match="no such model"):  # the end of the engine's output
        list(vllm_runs.run_sessions(tmp_path, tmp_path, vllm_runs.SessionPlan(engine={})))


def conversations(path: Path, users: int) -> Path:
    """Each user asks once, and then once more behind that, when all others have asked; blocks of 32 tokens."""
    with path.open("w") as file:
        for turn in range(2):
            for user in range(users):
                blocks = [100 * user + block for block in range(4 + turn)]
                request = {"timestamp": 0, "input_length": 32 * len(blocks) - 5, "output_length": 8, "hash_ids": blocks}
                file.write(json.dumps(request) + "\n")
    return path


def test_bench_sends_a_trace_to_both_engines_and_hits_tiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    model, trace = save("llama", tmp_path / "model"), conversations(tmp_path / "trace.jsonl", 6)
    order = ["bench", "vllm", "--model", str(model), "--trace", str(trace)]
    order += ["--block-tokens", "32", "--output-tokens", "8"]
    order += ["--engine", json.dumps(ENGINE), "--host-size", "32MiB", "--file-size", "32MiB", "--dir", str(tmp_path)]
    done = CliRunner().invoke(app, [*order, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    cases = {case["name"]: case for case in json.loads(done.stdout)["cases"]}
    times = ["ttft-trace/p50", "ttft-trace/p95"]
    assert set(cases) == {"served-trace", "loaded-trace", "found-trace", *times}
    assert (cases["served-trace"]["value"], cases["served-trace"]["reference_value"]) == (12, 12)
    # The device has lost them all: each brings its first three blocks whole, the fourth was not complete.
    assert cases["loaded-trace"]["value"] == 6 * 3 * 32
    assert cases["loaded-trace"]["reference_value"] == 6 * (123 + 155)
    assert cases["found-trace"]["value"] == pytest.approx(3 * 32 / 155)
    assert cases["found-trace"]["reference_value"] == 0
    assert all(cases[name]["value"] > 0 and cases[name]["reference_value"] > 0 for name in times)
    assert "request 12 of 12" in done.stderr
    assert list(tmp_path.glob("longshore-bench-*")) == []


def test_run_that_the_device_kept_whole_says_what_helps(tmp_path: Path) -> None:
    asked = list(read_trace(conversations(tmp_path / "trace.jsonl", 2), block_tokens=32))
    facts, told = {"vocabulary": 100, "longest": 256}, list[str]()
    for loaded in (0, 96):
        said = {"loaded": {"host": loaded}, "answers": [{"ttft": 0.1, "tokens": [1] * 8, "cached": 96}]}
        both: Any = SimpleNamespace(ask=lambda prompts, answer, said=said: [said, said])
        cases = {case.name: case for case in vllm_runs._ask(asked, both, 8, facts, 32, told.append)}
        assert ("num_gpu_blocks_override" in cases["loaded-trace"].reference) == (not loaded)


def test_unusable_trace_is_refused_before_an_engine_starts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    plan = vllm_runs.SessionPlan(engine={})
    once = tmp_path / "once.jsonl"
    once.write_text(conversations(tmp_path / "all.jsonl", 1).read_text().splitlines()[0])
    (tmp_path / "bad.jsonl").write_text('{"hash_ids": [1], "input_length": "many"}')
    for name, error in (("once", BenchError), ("bad", TraceError), ("missing", TraceError)):
        with pytest.raises(error, match=name):
            list(vllm_runs.run_trace(tmp_path, tmp_path / f"{name}.jsonl", tmp_path, plan, requests=9, block_tokens=32))
    assert list(tmp_path.glob("*.log")) == []
