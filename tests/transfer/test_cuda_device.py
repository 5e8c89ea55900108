"""Which device serves a layout, and which way it takes: what is measured, kept, and read again."""

from __future__ import annotations

import json
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cuda_stand_in import StandIn
from device_kit import between
from transfer_kit import Pools, flat

from longshore.boundary import DEVICE, HOST, Section
from longshore.transfer.device import device_for
from longshore.transfer.device.cuda import calibration as calibrations
from longshore.transfer.device.cuda import driver
from longshore.transfer.device.cuda.arguments import KernelShape
from longshore.transfer.device.cuda.calibration import QUICK, THOROUGH, Calibration, Effort, Sample
from longshore.transfer.device.cuda.driver import CudaAccelerator
from longshore.transfer.device.cuda.streams import CopyShape, Way

TINY = Effort((24, 512, 4096), small=4096, large=1 << 16, repeats=2)


def calibration(**fixed: float) -> Calibration:
    """Direct pays for each piece, kernels for each byte; zero copy starts sooner and runs slower."""
    link = 1 / 50e9
    sizes = (512, 4096, 32768, 2 << 20)
    direct = tuple(Sample(size, 5e-6, 0.5e-6 / size + link) for size in sizes)
    staged = tuple(Sample(size, 20e-6, link * 1.03) for size in sizes)
    zero_copy = tuple(Sample(size, 8e-6, link * 1.3) for size in sizes)
    curves = {Way.DIRECT: direct, Way.STAGED: staged, Way.ZERO_COPY: zero_copy}
    return Calibration("GPU", 13000, {HOST: curves, DEVICE: curves})


def scattered(page: int, count: int, run: int = 1 << 20) -> CopyShape:
    return CopyShape(HOST, page * count, count, count, max(1, page * count // run))


WAYS = tuple(Way)


def test_small_pages_are_staged_and_large_ones_go_directly() -> None:
    found = calibration()
    assert found.choose(scattered(4096, 8192), WAYS) is Way.STAGED
    assert found.choose(scattered(2 << 20, 16), WAYS) is Way.DIRECT
    assert found.choose(scattered(4096, 16), WAYS) is Way.ZERO_COPY
    assert found.choose(scattered(4096, 8192), (Way.DIRECT, Way.ZERO_COPY)) is Way.ZERO_COPY


def test_small_pages_that_merge_go_directly() -> None:
    load = CopyShape(HOST, 4096 * 8192, pages=8192, pieces=16, runs=16)
    assert calibration().choose(load, WAYS) is Way.DIRECT


def test_staging_does_not_help_images_in_short_runs() -> None:
    assert calibration().choose(scattered(4096, 8192, run=4096), WAYS) is Way.ZERO_COPY


def test_between_sizes_that_were_measured_times_are_between_theirs() -> None:
    found = calibration()
    times = [found.seconds(scattered(page, (1 << 24) // page), Way.DIRECT) for page in (256, 512, 1024, 4096, 8192)]
    assert times == sorted(times, reverse=True)
    assert times[0] == pytest.approx(2 * times[1], rel=0.05)  # what a page costs does not shrink with it
    large = [found.seconds(scattered(page, (1 << 26) // page), Way.DIRECT) for page in (2 << 20, 4 << 20)]
    assert large[0] == pytest.approx(large[1])


def test_dma_that_keeps_a_processor_busy_is_not_chosen() -> None:
    """Of 64 MiB, kernels take a tenth longer than DMA, whose pieces of 32 KiB take a processor all the time."""
    sizes = (4096, 2 << 20)
    curves = {HOST: {Way.DIRECT: tuple(Sample(size, 0.0, 20e-12) for size in sizes),
                     Way.ZERO_COPY: tuple(Sample(size, 0.0, 22e-12) for size in sizes)}}  # fmt: skip
    found = Calibration("GPU", 1, curves)
    ways = (Way.DIRECT, Way.ZERO_COPY)
    assert found.choose(scattered(32 << 10, 2048), ways) is Way.ZERO_COPY
    assert found.choose(scattered(256 << 10, 256), ways) is Way.DIRECT


def test_a_way_that_was_not_measured_is_not_chosen() -> None:
    curves = {HOST: {Way.DIRECT: (Sample(4096, 1e-6, 2e-9),)}}
    assert Calibration("GPU", 1, curves).choose(scattered(4096, 9), WAYS[::-1]) is Way.DIRECT


def test_a_calibration_is_what_was_saved(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file.json"
    found = calibration()
    found.save(path)
    assert calibrations.load(path, "GPU", 13000) == found
    assert calibrations.load(path, "another GPU", 13000) is None
    assert calibrations.load(path, "GPU", 12080) is None
    assert calibrations.load(tmp_path / "none", "GPU", 13000) is None
    assert [entry.name for entry in path.parent.iterdir()] == ["file.json"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda found: "not JSON",
        lambda found: json.dumps([found]),
        lambda found: json.dumps({**found, "curves": {HOST: {"by mule": []}}}),
        lambda found: json.dumps({**found, "curves": {HOST: {"direct": [[4096, 1.0, 0.0]]}}}),
        lambda found: json.dumps({**found, "curves": {HOST: {"direct": [[4096, 1, 1], [512, 1, 1]]}}}),
        lambda found: json.dumps({**found, "curves": {HOST: {"direct": []}}}),
        lambda found: json.dumps({key: value for key, value in found.items() if key != "curves"}),
    ],
)
def test_a_damaged_calibration_is_no_calibration(tmp_path: Path, damage: Any) -> None:
    path = tmp_path / "file.json"
    path.write_text(damage(calibration().as_json()))
    assert calibrations.load(path, "GPU", 13000) is None


def test_it_is_kept_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = calibrations.default_path("NVIDIA H200", 13000, "x16 32.0 GT/s PCIe")
    assert path == tmp_path / "longshore" / "copy-nvidia-h200-13000-x16-32-0-gt-s-pcie.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert calibrations.default_path("GPU", 1) == tmp_path / ".cache" / "longshore" / "copy-gpu-1-unknown.json"


def test_a_calibration_measures_every_way_and_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    gpu = StandIn(None, calibration=path, staging_bytes=1 << 16)
    found = gpu.device.calibrate(TINY)
    assert calibrations.load(path, "Stand-in GPU", 12080) == found
    for destination in (HOST, DEVICE):
        assert set(found.curves[destination]) == set(Way)
        for samples in found.curves[destination].values():
            assert [sample.page_bytes for sample in samples] == list(TINY.sizes)
    assert {"gather", "scatter"} <= set(gpu.accelerator.kernels)
    assert not gpu.library.breaches
    assert gpu.accelerator.current_stream() is gpu.accelerator.compute


def test_a_first_use_measures_by_itself_and_the_second_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longshore.transfer.device.cuda.calibration.QUICK", TINY)
    path = tmp_path / "file.json"
    pools = Pools(flat(8), slots=8)
    for kernels in (True, False):
        gpu = StandIn(None, calibration=path, staging_bytes=1 << 16)
        lane = gpu.lane(pools.layout, HOST)
        assert bool(gpu.accelerator.kernels) == kernels
        lane.send([between(pools, [Section(0, 0, (3,))], [1], HOST).batch])
        lane.finish()
    assert gpu.device.calibration_path == path


def test_a_calibration_that_cannot_be_kept_is_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    gpu = StandIn(None, calibration=tmp_path / "file" / "below", staging_bytes=1 << 16)
    assert gpu.device.calibrate(TINY).curves
    assert "could not be saved" in caplog.text


def test_efforts_have_ascending_sizes() -> None:
    for effort in (QUICK, THOROUGH):
        assert list(effort.sizes) == sorted(set(effort.sizes))
        assert effort.sizes[-1] == 2 << 20
        assert effort.small < effort.large


class FakeCudaLayout:
    device = "cuda:0"


def test_without_a_driver_torch_alone_serves(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    served: list[str] = []
    monkeypatch.setattr("longshore.transfer.device.torch_streams.TorchDevice", served.append)
    monkeypatch.setattr(driver.ctypes, "CDLL", _absent)
    device_for(FakeCudaLayout())  # type: ignore[arg-type]
    assert served == ["cuda:0"]
    assert "cannot load the CUDA driver" in caplog.text


def test_without_triton_copies_run_on_streams_of_the_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not on torch's, which an engine may be handed again."""
    gpu = StandIn(None, calibration=tmp_path / "none.json", staging_bytes=1 << 16)
    accelerator = gpu.accelerator
    monkeypatch.setattr("longshore.transfer.device.cuda.device.CudaDevice", lambda name, calibration: gpu.device)
    monkeypatch.setattr(accelerator, "new_stream", lambda: pytest.fail("a stream of torch's pool was drawn"))
    monkeypatch.setattr(accelerator, "prepare", partial(CudaAccelerator.prepare, accelerator))
    monkeypatch.delattr("longshore.transfer.device.cuda.kernels", raising=False)
    for name in ("triton", "longshore.transfer.device.cuda.kernels"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert device_for(FakeCudaLayout()) is gpu.device  # type: ignore[arg-type]
    pools = Pools(flat(8), slots=8)
    lane = gpu.lane(pools.layout, HOST)
    assert len(gpu.world.streams) == 3  # the engine's, and two of this direction
    lane.send([between(pools, [Section(0, 0, (3,))], [1], HOST).batch])
    lane.finish()
    assert gpu.device.fallbacks()["no_kernels"] > 0


def test_with_a_driver_the_cuda_device_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[tuple[str, Path | None]] = []

    def device(name: str, calibration: Path | None) -> None:
        served.append((name, calibration))

    monkeypatch.setattr("longshore.transfer.device.cuda.device.CudaDevice", device)
    device_for(FakeCudaLayout())  # type: ignore[arg-type]
    device_for(FakeCudaLayout(), Path("mine.json"))  # type: ignore[arg-type]
    assert served == [("cuda:0", None), ("cuda:0", Path("mine.json"))]


def test_a_thread_that_measures_is_where_it_was_afterwards(tmp_path: Path) -> None:
    stand_in = StandIn(None, calibration=tmp_path / "kept.json")
    stand_in.device.calibrate(TINY)
    assert not stand_in.accelerator.is_current
    assert stand_in.accelerator.current_stream() is stand_in.accelerator.compute


def test_kernels_are_compiled_on_the_gpu_that_they_are_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now: list[torch.device] = []
    seen: list[list[torch.device]] = []

    @contextmanager
    def current(device: torch.device) -> Iterator[None]:
        now.append(device)
        yield
        now.pop()

    monkeypatch.setattr(torch.cuda, "device", current)
    for name in ("gather", "scatter", "copy_blocks"):
        monkeypatch.setattr(f"longshore.transfer.device.cuda.kernels.{name}", lambda *_: seen.append(now.copy()))
    where = torch.device("cpu")
    CudaAccelerator(where).prepare(KernelShape.of(1, 1, 1, widest=16, alignment=16, tail=False))
    assert seen == [[where]] * 3
    assert not now


GENERAL = torch.Stream(stream_id=7, device_index=1, device_type=1)
"""As `torch.accelerator.current_stream()` gives it."""


def test_compute_may_be_a_stream_of_torchs_general_class() -> None:
    stand_in = StandIn(calibration())
    device, compute = stand_in.device, stand_in.accelerator.compute
    assert device.resolve(GENERAL) is compute
    given = compute.given
    device.wait_event(GENERAL, device.record_event(GENERAL))
    assert compute.given == given + 2


def test_a_stream_of_torchs_general_class_is_named_by_cudas(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        def __init__(self, **names: int) -> None:
            self.names = names

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    accelerator = CudaAccelerator(torch.device("cuda:1"))
    found: Any = accelerator.of_cuda(GENERAL)
    assert found.names == {"stream_id": 7, "device_index": 1, "device_type": 1}
    assert accelerator.of_cuda(found) is found


def _absent(name: str) -> None:
    raise OSError(f"{name}: cannot open")


def test_lanes_have_streams_of_their_own_and_give_them_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of torch's, which are 32 for each device and the engine's as well; calibration takes two."""
    monkeypatch.setattr("longshore.transfer.device.cuda.calibration.QUICK", TINY)
    monkeypatch.setattr(torch.cuda, "Stream", _refused)
    monkeypatch.setattr(torch, "Stream", _refused)
    gpu = StandIn(None, calibration=tmp_path / "kept.json", staging_bytes=1 << 16)
    lanes = [gpu.device.stream(flat(4), HOST)]
    assert len(gpu.library.made) == 2 + 2
    assert gpu.library.destroyed == gpu.library.made[:2]
    lanes.append(gpu.device.stream(flat(4), DEVICE))
    assert len(gpu.library.made) == 2 + 4
    for lane in lanes:
        lane.close()
    assert sorted(gpu.library.destroyed) == sorted(gpu.library.made)
    assert not gpu.library.breaches


def test_a_calibration_leaves_no_memory_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One ring for all of it, and memory taken on the caller's stream alone: torch keeps a pool for each stream."""
    gpu = StandIn(None, calibration=tmp_path / "kept.json", staging_bytes=1 << 20)
    accelerator = gpu.accelerator
    taken: list[tuple[int, object]] = []
    alive: list[weakref.ref[Any]] = []

    def device_bytes(nbytes: int) -> torch.Tensor:
        memory = np.zeros(nbytes, dtype=np.uint8)
        taken.append((nbytes, accelerator.current_stream()))
        alive.append(weakref.ref(memory))
        return torch.from_numpy(memory)

    monkeypatch.setattr(accelerator, "device_bytes", device_bytes)
    left = []
    monkeypatch.setattr(accelerator, "empty_cache", lambda: left.append([memory() for memory in alive]))
    gpu.device.calibrate(TINY)
    assert sum(nbytes >= 1 << 20 for nbytes, _ in taken) == 1
    assert {stream for _, stream in taken} == {accelerator.compute}
    assert left == [[None] * len(taken)]


def test_calibration_leaves_the_threads_capture_mode_as_it_was(tmp_path: Path) -> None:
    gpu = StandIn(None, calibration=tmp_path / "kept.json", staging_bytes=1 << 16)
    gpu.library.capture_modes[threading.get_ident()] = 1
    gpu.device.calibrate(TINY)
    assert gpu.library.capture_modes[threading.get_ident()] == 1


def test_another_link_is_measured_anew(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    found = Calibration("GPU", 13000, calibration().curves, "x16 32.0 GT/s PCIe")
    found.save(path)
    assert calibrations.load(path, "GPU", 13000, "x16 32.0 GT/s PCIe") == found
    assert calibrations.load(path, "GPU", 13000, "x8 32.0 GT/s PCIe") is None


def test_a_start_on_another_link_measures_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longshore.transfer.device.cuda.calibration.QUICK", TINY)
    pools, measures = Pools(flat(8), slots=8), []
    for link in ("x16 32.0 GT/s PCIe", "x16 32.0 GT/s PCIe", "x8 32.0 GT/s PCIe"):
        monkeypatch.setattr(calibrations, "link_of", lambda address, link=link: link)
        gpu = StandIn(None, calibration=tmp_path / "kept.json", staging_bytes=1 << 16)
        gpu.lane(pools.layout, HOST)
        measures.append(bool(gpu.accelerator.kernels))
    assert measures == [True, False, True]


def test_link_is_that_of_the_slower_side(tmp_path: Path) -> None:
    bridge = tmp_path / "devices" / "0000:00:01.0"
    device = bridge / "0000:3b:00.0"
    device.mkdir(parents=True)
    (tmp_path / "bus/pci/devices").mkdir(parents=True)
    (tmp_path / "bus/pci/devices/0000:3b:00.0").symlink_to(device)
    assert calibrations.link_of("0000:3b:00.0", tmp_path) == "unknown"
    (device / "current_link_width").write_text("8\n")
    (device / "max_link_speed").write_text("32.0 GT/s PCIe\n")
    assert calibrations.link_of("0000:3b:00.0", tmp_path) == "x8 32.0 GT/s PCIe"
    (bridge / "max_link_speed").write_text("16.0 GT/s PCIe\n")
    assert calibrations.link_of("0000:3b:00.0", tmp_path) == "x8 16.0 GT/s PCIe"


def _refused(*arguments: Any, **options: Any) -> None:
    raise AssertionError("a stream of torch's was drawn")
