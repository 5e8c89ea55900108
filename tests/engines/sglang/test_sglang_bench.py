"""`longshore bench sglang` with real servers on the CPU: what it reports, not how fast it is."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from sglang_kit import HERE, HICACHE_ON_CPU, ON_CPU, PAGE, flags_on_cpu, write_model
from typer.testing import CliRunner

from longshore.bench.harness import check_engine
from longshore.cli.app import app
from longshore.errors import BenchError


def test_returning_prompts_are_restored_beside_sglang_and_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "model")
    for name, value in ON_CPU.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE / "on_cpu"), os.environ.get("PYTHONPATH", "")]))
    command = ["bench", "sglang", "--model", str(tmp_path / "model"), "--dir", str(tmp_path), "--json"]
    sizes = {
        "sessions": 4,
        "prompt": 200,
        "turn-tokens": 20,
        "output-tokens": 8,
        "file-size": "64MiB",
        "threshold": PAGE,
    }
    command += [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    command += ["--flags", " ".join(flags_on_cpu()), "--of-cache", " ".join(HICACHE_ON_CPU)]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    cases = {case["name"]: case for case in json.loads(result.stdout)["cases"]}
    times = [f"ttft-returning/{share}/{side}" for share in ("p50", "p95") for side in ("alone", "file")]
    assert set(cases) == {"zero-reuse/alone", "zero-reuse/file", *times, "restored", "restored/share"}
    assert all(cases[name]["value"] > 0 and cases[name]["reference_value"] > 0 for name in (*times, "zero-reuse/alone"))
    pages = 4 * (200 // PAGE) * PAGE
    assert cases["restored"]["value"] == cases["restored"]["reference_value"] == pages


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"config\.json is not there"):
        check_engine("SGLang", tmp_path)
