"""benchmarks/gpu.py on a stand-in for the GPU: every figure is taken, and no byte is lost on the way."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from longshore.errors import BenchError
from longshore.transfer.device.cuda.calibrate import Effort
from longshore.transfer.device.cuda.chooser import Way

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "tests" / "transfer"), str(ROOT / "benchmarks")]

ENV = {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}

TINY = Effort((512, 4096), small=4096, large=1 << 15, repeats=1)


@pytest.fixture(scope="module")
def gpu() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_of_the_gpu", ROOT / "benchmarks" / "gpu.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def rig_of(gpu: ModuleType, folder: Path) -> Any:
    from cuda_stand_in import StandInAccelerator, StandInLibrary

    from longshore.transfer.device.cuda.calibrate import everything
    from longshore.transfer.device.cuda.device import CudaDevice

    accelerator = StandInAccelerator()
    accelerator.world.eager = True
    library = StandInLibrary(accelerator.world)

    def make(chooses: Any) -> CudaDevice:
        return CudaDevice(
            "cuda:0",
            in_one_piece=everything,
            chooses=chooses,
            accelerator=accelerator,
            library=library,
            calibration=folder / "kept.json",
            staging_bytes=1 << 16,
        )

    return gpu.Rig(accelerator, make, library, lambda: None, (16, "cpu"))


def test_every_figure_is_taken_and_written(gpu: ModuleType, tmp_path: Path) -> None:
    report = gpu.run(rig_of(gpu, tmp_path), sizes=(512, 4096), total_bytes=1 << 15, repeats=1, effort=TINY)
    assert report["left_out"] == 0
    cases = {(row["page_bytes"], row["order"], row["direction"]) for row in report["copies"]}
    assert cases == {(size, order, name) for size in (512, 4096) for order in gpu.ORDERS for name in gpu.DIRECTIONS}
    for row in report["copies"]:
        assert min(row["ours"], row["large"], row["per_page"], row["batched"]) > 0
        assert row["share"] == pytest.approx(row["ours"] / row["large"])
        assert set(row["ways"]) == ({way.value for way in Way} if row["order"] == "scattered" else set())
    assert {(row["page_bytes"], row["direction"]) for row in report["slowdowns"]} == {
        (size, name) for size in (512, 4096) for name in gpu.DIRECTIONS
    }
    path = gpu.save(report, tmp_path / "results")
    assert path.name == f"stand-in-gpu-{report['date']}.json"
    assert json.loads(path.read_text()) == report
    assert {"torch", "triton", "cuda_driver", "batched_copy"} <= set(report["versions"])
    text = gpu.table(report)
    assert len(text.splitlines()) == 2 + len(cases) + 1 + len(report["slowdowns"])


def test_what_there_is_no_time_for_is_said(gpu: ModuleType, tmp_path: Path) -> None:
    report = gpu.run(rig_of(gpu, tmp_path), sizes=(512,), total_bytes=1 << 15, repeats=1, effort=TINY, budget=-1)
    assert report["copies"] == report["slowdowns"] == []
    assert report["left_out"] == len(gpu.ORDERS) * len(gpu.DIRECTIONS) + len(gpu.DIRECTIONS)
    assert "9 figures were left out" in gpu.table(report)


def test_bytes_that_do_not_come_back_end_the_benchmark(gpu: ModuleType, tmp_path: Path) -> None:
    rig = rig_of(gpu, tmp_path)
    rig.library._move = lambda destination, source, nbytes: None
    pages = gpu.Pages(rig, 4096, 1 << 15, "scattered")
    engine = pages.engine(gpu.Always(Way.DIRECT))
    with pytest.raises(BenchError, match="did not come back"):
        pages.check(engine)
    engine.close()


def test_without_a_gpu_nothing_is_measured_and_that_is_an_error() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={"CUDA_VISIBLE_DEVICES": "", **ENV})
    assert done.returncode == 2
    assert "no GPU here" in done.stderr
