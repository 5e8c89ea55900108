"""benchmarks/gpu.py on a stand-in for the GPU: every figure is taken, and no byte is lost on the way."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from longshore.errors import BenchError
from longshore.transfer.device.cuda.calibration import Effort
from longshore.transfer.device.cuda.streams import Way

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "tests" / "transfer"), str(ROOT / "tests" / "tiers"), str(ROOT / "benchmarks")]

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


def rig_of(gpu: ModuleType, folder: Path, vllm_swap: Any = None) -> Any:
    from cuda_stand_in import LazyStream, StandInAccelerator, StandInLibrary

    from longshore.transfer.device.cuda.calibration import all_registered
    from longshore.transfer.device.cuda.device import CudaDevice

    accelerator = StandInAccelerator()
    accelerator.world.eager = True
    library = StandInLibrary(accelerator.world)

    def make(chooser: Any) -> CudaDevice:
        return CudaDevice(
            "cuda:0",
            in_one_piece=all_registered,
            chooser=chooser,
            accelerator=accelerator,
            library=library,
            calibration=folder / "kept.json",
            staging_bytes=1 << 16,
        )

    @contextmanager
    def on_own_stream() -> Iterator[None]:
        before = accelerator.current_stream()
        accelerator.use(LazyStream("copier", accelerator.world))
        try:
            yield
        finally:
            accelerator.use(before)

    return gpu.Rig(accelerator, make, library, lambda: None, (16, "cpu"), on_own_stream, vllm_swap)


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
    assert {"torch", "triton", "driver", "cuda_driver", "cuda_torch", "batched_copy"} <= set(report["versions"])
    assert report["commit"]
    text = gpu.table(report)
    missed = gpu.missed_bars(report)
    assert len(text.splitlines()) == 2 + len(cases) + 1 + len(report["slowdowns"]) + 2 + len(missed)
    assert "no folder was named" in report["gds"]["why_not"]
    assert report["gds"]["why_not"] in text


def test_vllms_function_is_called_with_the_same_pages(gpu: ModuleType, tmp_path: Path) -> None:
    asked: list[tuple[int, Any]] = []
    calls: list[tuple[str, bool, int]] = []

    def swap(page_bytes: int, route: Any) -> Any:
        asked.append((page_bytes, route))

        def copy(at: Any, to: Any, sizes: Any, *, is_src_access_order_any: bool) -> None:
            assert {tensor.dtype for tensor in (at, to, sizes)} == {torch.int64}
            for source, destination, nbytes in zip(at.tolist(), to.tolist(), sizes.tolist(), strict=True):
                ctypes.memmove(destination, source, nbytes)
            calls.append((rig.accelerator.current_stream().name, is_src_access_order_any, len(sizes)))

        return copy

    rig = rig_of(gpu, tmp_path, swap)
    pages = gpu.Pages(rig, 512, 1 << 15, "scattered")
    pages.tensor.random_(0, 256)
    references = gpu.References(rig, pages)
    assert asked == [(512, gpu.D2H), (512, gpu.H2D)]
    for routes in gpu.ROUTES.values():
        before = pages.tensor.clone(), pages.host.memory.clone()
        assert references.vllm(routes) > 0
        after = pages.tensor.clone(), pages.host.memory.clone()
        for side, left in ((pages.tensor, before[0]), (pages.host.memory, before[1])):
            side.copy_(left)
        assert references.batched(routes) > 0
        assert torch.equal(after[0], pages.tensor)
        assert torch.equal(after[1], pages.host.memory)
    assert {(is_any, count) for _, is_any, count in calls} == {(False, 256), (True, 256)}
    assert len({stream for stream, *_ in calls}) == 2, "a stream for each direction"


def test_a_function_of_vllm_that_fails_ends_the_benchmark(gpu: ModuleType, tmp_path: Path) -> None:
    def swap(*_: Any, **__: Any) -> None:
        raise RuntimeError("no such operator")

    rig = rig_of(gpu, tmp_path, lambda *_: swap)
    with pytest.raises(RuntimeError, match="no such operator"):
        gpu.References(rig, gpu.Pages(rig, 512, 1 << 15, "scattered")).vllm(gpu.ROUTES["both"])


def test_interrupted_run_keeps_the_cases_that_were_done(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slowdowns, written = gpu.slowdowns, []

    def cut_off(*arguments: Any, **options: Any) -> Any:
        yield next(slowdowns(*arguments, **options))
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu, "slowdowns", cut_off)
    options = {"sizes": (512,), "total_bytes": 1 << 15, "repeats": 1, "effort": TINY, "commit": "0123abcd"}
    with pytest.raises(KeyboardInterrupt):
        gpu.run(
            rig_of(gpu, tmp_path), **options, keep=lambda report: written.append(gpu.save(report, tmp_path / "out"))
        )
    assert len(written) == 1 + len(gpu.ORDERS) * len(gpu.DIRECTIONS) + 1
    (path,) = (tmp_path / "out").iterdir()
    left = json.loads(path.read_text())
    assert (len(left["copies"]), len(left["slowdowns"]), left["left_out"]) == (6, 1, 2)
    assert left["commit"] == "0123abcd"
    assert left["gds"]["why_not"] == "not measured yet"
    assert left["vllm"]["version"] is None
    assert "cuMemcpyBatchAsync" in left["vllm"]["why_not"]
    gpu.table(left)


def test_a_result_is_replaced_whole_or_not_at_all(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = gpu.save({"device": "d", "date": "2000-01-01", "n": 1}, tmp_path)
    before = path.read_text()

    def full(self: Path, text: str) -> int:
        with self.open("w") as file:
            file.write(text[:5])
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="no space"):
        gpu.save({"device": "d", "date": "2000-01-01", "n": 2}, tmp_path)
    assert path.read_text() == before


def test_what_misses_a_bar_is_named(gpu: ModuleType) -> None:
    def copy(size: int, share: float) -> dict[str, Any]:
        return {"page_bytes": size, "order": "scattered", "direction": "offload", "share": share}

    def product(slowdown: float) -> dict[str, Any]:
        return {"page_bytes": 4096, "direction": "both", "slowdown": slowdown}

    good = {"copies": [copy(2048, 0.1), copy(4096, 0.85), copy(16384, 0.95)], "slowdowns": [product(0.04)]}
    assert gpu.missed_bars(good) == []
    bad = {"copies": [copy(8192, 0.84), copy(2 << 20, 0.94)], "slowdowns": [product(0.05)]}
    assert [line.partition(":")[0] for line in gpu.missed_bars(bad)] == [
        "8192 bytes, scattered, offload",
        "2097152 bytes, scattered, offload",
        "4096 bytes, both",
    ]


def test_copies_beside_a_product_do_not_wait_for_its_stream(gpu: ModuleType, tmp_path: Path) -> None:
    rig = rig_of(gpu, tmp_path)
    pages = gpu.Pages(rig, 4096, 1 << 15, "scattered")
    engine = pages.engine(gpu.Always(Way.DIRECT))
    log = rig.accelerator.world.log
    before = len(log)
    copier = gpu.Copier(pages, engine, gpu.ROUTES["offload"])
    assert copier.stop() > 0
    engine.close()
    marked = {stream for what, stream, _ in log[before:] if what == "record" and not stream.startswith("stream")}
    assert marked == {"copier"}


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


def test_cufile_measures_files_or_the_reason_is_given(gpu: ModuleType, tmp_path: Path) -> None:
    from cufile_stand_in import StandInCuFile, cuFileError

    from longshore.transfer.device import CpuDevice

    def measured(library: Any) -> Any:
        return gpu.gds(tmp_path, CpuDevice, "cpu", total_bytes=4 << 20, library=library)

    found = measured(StandInCuFile())
    assert found.why_not is None
    assert min(found.stored, found.loaded) > 0
    for call in ("driver_open", "write", "read"):
        library, faults = StandInCuFile(), []

        def fault(name: str, call: str = call, faults: list[str] = faults) -> None:
            if name == call:
                faults.append(name)
                raise cuFileError(5001)

        library.fault = fault
        assert measured(library).why_not
        assert faults
    assert list(tmp_path.iterdir()) == []


def test_no_gpu_is_an_error_and_measures_nothing() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={"CUDA_VISIBLE_DEVICES": "", **ENV})
    assert done.returncode == 2
    assert "no GPU here" in done.stderr


@pytest.fixture(scope="module")
def ready() -> ModuleType:
    return importlib.import_module("gpu_ready")


@pytest.mark.parametrize(
    ("cuda", "driver", "said"),
    [
        (None, None, "built without CUDA, and there is no CUDA driver"),
        ("13.0", 12090, "CUDA 13.0, the driver serves CUDA 12.9; install a build of torch for cu128"),
        ("12.8", 13000, "the driver serves CUDA 13.0; expected a device in nvidia-smi"),
        (None, 13010, "the driver serves CUDA 13.1; install a build of torch for cu130"),
        ("12.8", 10020, "the driver serves CUDA 10.2; update the driver"),
    ],
)
def test_why_there_is_no_gpu_names_both_versions(
    ready: ModuleType, cuda: str | None, driver: int | None, said: str
) -> None:
    assert said in ready.why_no_gpu(cuda, driver)


@pytest.mark.parametrize("target", ["gpu-tests", "gpu-engine", "gpu-sanitize", "gpu-bench"])
def test_gpu_targets_need_neither_registry_nor_environment(target: str) -> None:
    command = ["make", "-n", target, "GPU_PYTHON=python3"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert ".venv" not in done.stdout
    assert "pip" not in done.stdout
    assert done.stdout.count("timeout 590") == 1, "a part ends within ten minutes"
    assert "--report-api-errors no" in done.stdout or target != "gpu-sanitize"


def test_gpu_target_names_what_is_missing_and_fails() -> None:
    command = ["make", "gpu-tests", f"GPU_PYTHON={sys.executable}"]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=env)
    assert done.returncode != 0
    assert "torch sees no CUDA device" in done.stderr
    assert "Nothing was tested or measured." in done.stderr


LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}


def prefixes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The first prompt's figures by `gpu_prefix.py`, on the CPU."""
    import gpu_prefix

    (folder / "config.json").write_text(json.dumps(LLAMA))
    options = ["--device", "cpu", "--model", str(folder / "config.json"), "--tokens", "128", "--host", "16MiB"]
    monkeypatch.setattr(sys, "argv", ["gpu_prefix.py", *options, "--repeats", "1", "--out", str(folder)])
    assert gpu_prefix.main() == 0
    (path,) = folder.glob("prefix-cpu-*.json")
    found: dict[str, Any] = json.loads(path.read_text())["prompts"][0]
    return found


def test_time_to_first_token_is_taken_by_each_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = prefixes(tmp_path, monkeypatch)
    assert (found["tokens"], found["restored_tokens"], found["torch_pinned_ms"]) == (128, 128, None)
    assert found["same_logits"]
    assert found["kv_bytes"] == 2 * 2 * 128 * 32 * 4
    assert all(found[f"{way}_ms"] > 0 for way in ("computed", "restored", "torch_pageable", "store"))


def test_other_logits_after_restoring_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from longshore.engines.transformers import PrefixStore

    restore = PrefixStore.restore_prefix

    def changed(self: PrefixStore, tokens: list[int]) -> tuple[Any, int]:
        cache, known = restore(self, tokens)
        for layer in cache.layers:
            layer.values.neg_()
        return cache, known

    monkeypatch.setattr(PrefixStore, "restore_prefix", changed)
    assert not prefixes(tmp_path, monkeypatch)["same_logits"]
