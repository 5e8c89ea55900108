"""`longshore bench copy --calibrate`, with a stand-in for the GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from longshore.bench import calibration as module
from longshore.cli.app import app
from longshore.errors import BenchError
from longshore.transfer.device.cuda.calibration import Effort, load
from longshore.transfer.device.cuda.streams import Way

sys.path.append(str(Path(__file__).parents[1] / "transfer"))

TINY = Effort((512, 4096), small=4096, large=1 << 16, repeats=1)


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from cuda_stand_in import StandIn

    path = tmp_path / "kept.json"
    gpu = StandIn(None, calibration=path, staging_bytes=1 << 16)
    monkeypatch.setattr(module, "_current", lambda: gpu.device)
    monkeypatch.setattr(module.run, "__defaults__", (None, TINY))
    return path


def test_what_was_measured_is_printed_and_kept(stand_in: Path) -> None:
    result = CliRunner().invoke(app, ["bench", "copy", "--device", "cuda", "--calibrate", "--json"])
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert printed["path"] == str(stand_in)
    assert len(printed["chosen"]) == 2 * len(module.LOADS) * len(TINY.sizes)
    kept = load(stand_in, "Stand-in GPU", 12080)
    assert printed["curves"] == kept.as_json()["curves"]


def test_the_table_names_every_way_and_the_file(stand_in: Path) -> None:
    result = CliRunner().invoke(app, ["bench", "copy", "--device", "cuda", "--calibrate"])
    assert result.exit_code == 0, result.output
    assert {way.value for way in Way} <= set(result.stdout.split())
    assert stand_in.name in result.stdout
    assert result.stdout.count("offload") == len(module.LOADS) * len(TINY.sizes)


@pytest.mark.parametrize("flags", [["--calibrate"], ["--device", "cuda"]])
def test_a_gpu_is_calibrated_and_nothing_else(flags: list[str]) -> None:
    result = CliRunner().invoke(app, ["bench", "copy", *flags])
    assert isinstance(result.exception, BenchError)


def test_no_gpu_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BenchError, match="expected a CUDA GPU"):
        module.run()
