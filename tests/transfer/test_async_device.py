"""The jobs that a GPU is given, on an asynchronous device on the CPU; and again without each of the waits."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from async_device import Queued, QueuedGpu, QueuedLibrary, devices, gpu, take_faults
from cuda_stand_in import AnyWay
from jobs_kit import (
    DevicePools,
    compute_is_late,
    images_of_two_ranks,
    layer_by_layer,
    one_rank,
    random_jobs,
    round_trip,
    side_by_side,
)

import longshore
from depth import deep
from longshore.boundary import DEVICE, HOST
from longshore.layout import KVLayout
from longshore.tiers.arena import Arena
from longshore.transfer.device.base import Device, Stream
from longshore.transfer.device.cuda.arguments import KernelShape
from longshore.transfer.device.cuda.calibration import Always, Effort
from longshore.transfer.device.cuda.device import CudaDevice
from longshore.transfer.device.cuda.streams import CudaStream, Way
from longshore.transfer.device.torch_streams import Accelerator, StagedStream, StreamCopy, StreamEvent, TorchDevice
from longshore.transfer.ordering import EngineState

PAUSE = 100
"""Microseconds."""

TINY = Effort((24, 512, 4096), small=4096, large=1 << 16, repeats=1)

KINDS: dict[str, Callable[[], Device]] = {
    "torch": lambda: TorchDevice("queued:0", staging_bytes=1 << 14),
    "bounced": lambda: gpu(chooser=Always(Way.DIRECT), in_one_piece=None),
    **{way.value: partial(gpu, chooser=Always(way)) for way in Way},
    "any": lambda: gpu(chooser=AnyWay(5)),
}


@pytest.fixture
def both() -> Iterator[tuple[Queued, Queued]]:
    with devices() as found:
        yield found


@pytest.fixture
def pools(both: tuple[Queued, Queued]) -> Iterator[Callable[..., DevicePools]]:
    made: list[DevicePools] = []

    def make(page: int, index: int = 0, **options: Any) -> DevicePools:
        both[index].pauses(page, PAUSE)
        made.append(DevicePools(both[index], page, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page", [1, 7, 24, 656, 4096])
def test_every_way_keeps_every_byte(pools: Callable[..., DevicePools], kind: str, page: int) -> None:
    round_trip(pools(page), KINDS[kind]())


@pytest.mark.parametrize("kind", KINDS)
def test_compute_that_is_late_is_waited_for(pools: Callable[..., DevicePools], kind: str) -> None:
    compute_is_late(pools(656), KINDS[kind](), rounds=4)


@pytest.mark.parametrize("kind", KINDS)
def test_compute_reads_each_layer_as_it_comes(pools: Callable[..., DevicePools], kind: str) -> None:
    layer_by_layer(pools(656), KINDS[kind]())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page", [24, 656])
def test_random_jobs(pools: Callable[..., DevicePools], kind: str, page: int) -> None:
    random_jobs(pools(page), KINDS[kind](), 80, each=40)


def loses(run: Callable[[int], object], *, how: str = "Arrays are not equal", most: int = 60) -> None:
    """In one of `most` tries bytes are not what they must be, or work is told to touch what it may not."""
    for seed in range(most):
        wrong = ""
        try:
            run(seed)
        except AssertionError as error:
            wrong = str(error)
        if take_faults() or re.search(how, wrong):
            return
        assert not wrong
    pytest.fail(f"no byte was wrong in {most} tries")


def nothing(*_: object, **__: object) -> None:
    return None


def without_fences(patch: pytest.MonkeyPatch, kind: type[Stream]) -> None:
    copy = kind.copy
    patch.setattr(kind, "copy", lambda self, batch, after: copy(self, batch, ()))


def unfenced(patch: pytest.MonkeyPatch) -> None:
    without_fences(patch, CudaStream)
    without_fences(patch, StagedStream)


def unheld(patch: pytest.MonkeyPatch) -> None:
    for kind in (TorchDevice, CudaDevice):
        patch.setattr(kind, "wait_event", nothing)


def unmarked(patch: pytest.MonkeyPatch) -> None:
    """Points on the stream of whoever asks, not on that which computes."""
    for kind in (TorchDevice, CudaDevice):
        patch.setattr(kind, "record_event", lambda self, compute, mark=kind.record_event: mark(self, None))


def ended_when_given(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StreamCopy, "query", lambda self: True)
    patch.setattr(StreamCopy, "finish", lambda self: 0.0)


def unwaited(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StreamEvent, "wait", nothing)
    patch.setattr(StreamEvent, "seconds_until", lambda self, later: 0.0)  # torch would notice


GUARDS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a stream waits for a point": lambda patch: patch.setattr(StreamEvent, "make_wait", nothing),
    "a thread waits for a point": unwaited,
    "copies against copies": lambda patch: patch.setattr(EngineState, "may_begin", lambda self, job: True),
    "copies against compute: begin_step": unfenced,
    "copies against compute: which stream": unmarked,
    "copies against compute: end_step": unheld,
    "results against bytes": ended_when_given,
}
INNER = {
    "the link and the kernels": ("staged", "_join"),
    "one way and another": ("any", "_join"),
    "a place of the ring": ("staged", "_wait_for_slot"),
}


def jobs_that_lose(pools: Callable[..., DevicePools], kind: str) -> None:
    """Compute is late in one try, and prompt in the next."""

    def run(seed: int) -> None:
        given = pools(656, seed=seed)
        given.hardware.pauses(seed, 3 * PAUSE)
        random_jobs(given, KINDS[kind](), 30, seed=seed, each=40, late=0.2 * (seed % 2))

    loses(run)


@pytest.mark.parametrize("guard", GUARDS)
@pytest.mark.parametrize("kind", deep(["torch", "any"], list(KINDS)))
def test_random_jobs_lose_bytes_without_a_guard(
    pools: Callable[..., DevicePools], kind: str, guard: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    GUARDS[guard](monkeypatch)
    jobs_that_lose(pools, kind)


@pytest.mark.parametrize("guard", INNER)
def test_random_jobs_lose_bytes_when_streams_do_not_wait(
    pools: Callable[..., DevicePools], guard: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, name = INNER[guard]
    monkeypatch.setattr(CudaStream, name, nothing)
    jobs_that_lose(pools, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_compute_reads_old_layers_without_a_wait(
    pools: Callable[..., DevicePools], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    unheld(monkeypatch)
    loses(lambda seed: layer_by_layer(pools(656, seed=seed), KINDS[kind]()))


@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("kind", ["torch", "staged"])
def test_stages_are_used_only_after_their_memorys_last_owner(
    pools: Callable[..., DevicePools], kind: str, guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory is freed while the stream that it was taken on is busy; what that still does to it comes late."""

    def run(seed: int) -> None:
        given = pools(656, seed=seed)
        owner = given.hardware.new_stream()
        with given.hardware.on(owner):
            earlier = [KINDS[kind]().stream(given.layout, destination) for destination in (HOST, DEVICE)]
            given.hardware.late(0.5 + seed % 8)
        for each in earlier:
            each.close()
        device = KINDS[kind]()

        def stream(layout: KVLayout, destination: str, take: Callable[..., Stream] = device.stream) -> Stream:
            with monkeypatch.context() as patch, given.hardware.on(owner):
                if not guarded:
                    patch.setattr(StreamEvent, "make_wait", nothing)
                return take(layout, destination)

        monkeypatch.setattr(device, "stream", stream)
        random_jobs(given, device, 30, seed=seed, each=40, late=0)

    if guarded:
        for seed in range(4):
            run(seed)
    else:
        loses(run)


# Several devices

ON = {
    "torch": lambda index: TorchDevice(f"queued:{index}", staging_bytes=1 << 14),
    "staged": lambda index: gpu(index, chooser=Always(Way.STAGED)),
    "any": lambda index: gpu(index, chooser=AnyWay(index)),
}


@pytest.mark.parametrize("kind", ON)
def test_lanes_of_device_1_never_touch_device_0(
    both: tuple[Queued, Queued], pools: Callable[..., DevicePools], kind: str
) -> None:
    """Whoever makes the engine, submits and polls is on device 0."""
    zero, one = both
    before = zero.work, zero.reserved, zero.drawn
    random_jobs(pools(656, 1), ON[kind](1), 40, each=40)
    assert (zero.work, zero.reserved, zero.drawn) == before
    assert one.work


@pytest.mark.parametrize("kind", ON)
def test_lane_off_its_stream_or_device_is_noticed(
    both: tuple[Queued, Queued], pools: Callable[..., DevicePools], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Accelerator, "use", nothing)
    monkeypatch.setattr(QueuedGpu, "use", nothing)
    zero, _ = both

    def run(seed: int) -> None:
        before = zero.work
        random_jobs(pools(656, 1, seed=seed), ON[kind](1), 40, seed=seed, each=40)
        assert zero.work == before, "device 0 was given work"

    loses(run, how="device 0 was given work|Arrays are not equal")


def test_two_devices_in_one_process(both: tuple[Queued, Queued], pools: Callable[..., DevicePools]) -> None:
    given = [pools(656, index, seed=index) for index in range(2)]
    side_by_side(*(partial(random_jobs, given[index], ON["any"](index), 60, seed=index, each=30) for index in range(2)))


@pytest.mark.parametrize("kind", ON)
def test_two_ranks_of_one_process_share_an_image(both: tuple[Queued, Queued], kind: str) -> None:
    arena = images_of_two_ranks()
    both[0].register(arena.address, arena.nbytes)
    together = threading.Barrier(2)
    side_by_side(
        *(partial(one_rank, each, ON[kind](each.index), arena, each.index, lambda: together.wait(600)) for each in both)
    )
    both[0].unregister(arena.address)
    check_parts(arena)


def test_two_ranks_of_two_processes_share_an_image(both: tuple[Queued, Queued]) -> None:
    arena = images_of_two_ranks()
    script = Path(__file__).with_name("async_device.py")
    paths = [str(Path(longshore.__file__).parents[1]), str(script.parent), str(script.parents[1])]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(arena.path), str(rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        for rank in range(2)
    ]
    for rank in ranks:
        assert rank.stdout.readline() == "stored\n"
    check_parts(arena)
    assert [rank.communicate("load\n", 600)[0] for rank in ranks] == ["", ""]
    assert [rank.returncode for rank in ranks] == [0, 0]


def check_parts(arena: Arena) -> None:
    """Each rank's part of every image is what that rank had, and its padding is zero."""
    images = arena.array.reshape(-1, 2, 4096)
    for rank in range(2):
        pattern = np.random.default_rng(rank).integers(1, 256, (2, 16, 656), dtype=np.uint8)[:, :8]
        used = images[:, rank, : 2 * 656].reshape(8, 2, 656)
        np.testing.assert_array_equal(used.transpose(1, 0, 2), pattern)
        assert not images[:, rank, 2 * 656 :].any()


# What a start takes


def started(hardware: Queued, path: Path) -> tuple[CudaDevice, QueuedGpu, QueuedLibrary, int]:
    """A device that has made its streams, for an engine that has drawn every stream that torch has, and closed them."""
    gc.collect()
    hardware.empty_cache()
    engines = [hardware.new_stream() for _ in range(32)]
    assert len({stream.stream_id for stream in engines}) == 32
    drawn, reserved = hardware.drawn, hardware.reserved
    accelerator, library = QueuedGpu(), QueuedLibrary()
    device = gpu(chooser=None, calibration=path, accelerator=accelerator, library=library)
    given = DevicePools(hardware, 656)
    before = hardware.reserved
    streams = [device.stream(given.layout, destination) for destination in (HOST, DEVICE)]
    taken = hardware.reserved - before
    assert hardware.drawn == drawn
    assert not {each.stream_id for each in engines} & {stream for *_, stream in accelerator.launched}
    for stream in streams:
        stream.close()
    device.close()
    given.close()
    assert reserved <= before
    return device, accelerator, library, taken


def test_start_takes_bounded_streams_and_memory_its_own(
    both: tuple[Queued, Queued], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a calibration, and with the file that it leaves."""
    monkeypatch.setattr("longshore.transfer.device.cuda.calibration.QUICK", TINY)
    hardware, _ = both
    _, accelerator, library, with_calibration = started(hardware, tmp_path / "kept.json")
    assert {name for name, *_ in accelerator.launched} == {"gather", "scatter"}
    assert (len(library.made), sorted(library.destroyed)) == (2 + 4, sorted(library.made))
    _, accelerator, library, without = started(hardware, tmp_path / "kept.json")
    assert not accelerator.launched
    assert (len(library.made), sorted(library.destroyed)) == (4, sorted(library.made))
    ring, descriptors = 1 << 14, CudaStream.depth * 8 * (64 << 10)
    assert 2 * ring <= with_calibration == without <= 2 * (ring + descriptors) + (1 << 12)


def test_calibration_gives_all_its_memory_back(both: tuple[Queued, Queued], tmp_path: Path) -> None:
    hardware, _ = both
    device = gpu(chooser=None, calibration=tmp_path / "kept.json")
    before = hardware.reserved
    device.calibrate(TINY)
    assert hardware.reserved == before


def test_torch_takes_two_streams_beside_the_engines_own(
    both: tuple[Queued, Queued], pools: Callable[..., DevicePools]
) -> None:
    given = pools(656)
    before = both[0].drawn
    device = TorchDevice("queued:0", staging_bytes=1 << 14)
    for destination in (HOST, DEVICE):
        device.stream(given.layout, destination)
    assert both[0].drawn == before + 2


def test_each_kernel_is_compiled_once(pools: Callable[..., DevicePools], monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, prepare = [], QueuedGpu.prepare

    def count(self: QueuedGpu, shape: KernelShape) -> None:
        compiled.append(shape.compiled)
        prepare(self, shape)

    monkeypatch.setattr(QueuedGpu, "prepare", count)
    random_jobs(pools(656), gpu(chooser=None, accelerator=QueuedGpu()), 40, each=40)
    assert len(compiled) == len(set(compiled)) > 0


def test_kernels_that_cannot_be_compiled_are_done_without_and_counted(
    pools: Callable[..., DevicePools], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_compiler(self: QueuedGpu, shape: KernelShape) -> None:
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")

    monkeypatch.setattr(QueuedGpu, "prepare", no_compiler)
    accelerator = QueuedGpu()
    device = gpu(chooser=None, accelerator=accelerator)
    random_jobs(pools(656), device, 40, each=40)
    assert not accelerator.launched
    assert device.fallbacks()["no_kernels"] > 0
    assert [record.getMessage() for record in caplog.records if "C compiler" in record.getMessage()] != []
    assert len([record for record in caplog.records if "C compiler" in record.getMessage()]) == 1


COLLECT = """
import sys
import pytest, torch
torch.cuda.is_available = lambda: sys.argv[1] == "a GPU"
sys.exit(pytest.main(["-q", "--collect-only", "-p", "no:cacheprovider", sys.argv[2]]))
"""


@pytest.mark.parametrize("where", ["a GPU", "no GPU"])
def test_gpu_tests_are_collected_and_never_fail_to_import(where: str) -> None:
    folder = Path(__file__).parents[1] / "gpu"
    paths = {"PYTHONPATH": str(Path(longshore.__file__).parents[1])}
    command = [sys.executable, "-c", COLLECT, where, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **paths})
    assert done.returncode == (0 if where == "a GPU" else 5), done.stdout + done.stderr
    assert ("test_random_jobs" in done.stdout or "test_2500_random_jobs" in done.stdout) == (where == "a GPU")
