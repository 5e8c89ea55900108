"""Every byte through a real GPU: all ways, compute that is late, several engines, thousands of random jobs."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from cuda_stand_in import AnyWay
from device_kit import copied_inside
from gated import PATIENCE
from jobs_kit import Jobs, inside_transfer
from transfer_kit import Bytes, Model, Pools, transfer

from longshore.boundary import DEVICE, HOST, Section, Status
from longshore.layout import KVGroup, KVLayout, PageRef
from longshore.transfer import OFFLOAD, ONBOARD, TransferEngine
from longshore.transfer.device.base import Device
from longshore.transfer.device.cuda import kernels
from longshore.transfer.device.cuda.calibrate import QUICK, Always, everything
from longshore.transfer.device.cuda.chooser import Chooses, Way
from longshore.transfer.device.cuda.device import CudaDevice
from longshore.transfer.device.cuda.shape import COLUMNS, Shape
from longshore.transfer.device.torch_streams import TorchDevice

pytestmark = pytest.mark.gpu

PAGES = (1, 7, 8, 24, 656, 4096, 65_536, 2 << 20)
A_WHILE = 50_000_000
"""Cycles that a kernel sleeps: about 30 ms."""


class GpuPools(Pools):
    """Tensors on the GPU, and host memory that is registered with it."""

    def __init__(self, page: int, *, blocks: int = 24, slots: int = 16, seed: int = 0) -> None:
        sizes = (page, max(1, page // 3), page + 5)
        tensors = [torch.zeros(16 + blocks * (size + 3), dtype=torch.uint8, device="cuda") for size in sizes]
        refs = tuple(PageRef(index, index, size + 3, size) for index, size in enumerate(sizes))
        groups = (KVGroup("pair", 4, 2, refs[:2]), KVGroup("odd", 4, 3, refs[2:]))
        super().__init__(KVLayout(groups, tensors, blocks), slots, seed)
        self._cudart = torch.cuda.cudart()
        assert int(self._cudart.cudaHostRegister(self.arena.address, self.arena.nbytes, 0)) == 0

    def device_bytes(self) -> list[Bytes]:
        return [tensor.cpu().numpy().copy() for tensor in self.tensors]

    def close(self) -> None:
        torch.cuda.synchronize()
        assert int(self._cudart.cudaHostUnregister(self.arena.address)) == 0


def cuda(chooses: Chooses, staging_bytes: int = 1 << 20) -> CudaDevice:
    return CudaDevice("cuda", in_one_piece=everything, chooses=chooses, staging_bytes=staging_bytes)


@pytest.fixture
def pools(request: pytest.FixtureRequest) -> Iterator[Callable[..., GpuPools]]:
    made: list[GpuPools] = []

    def make(page: int, **options: int) -> GpuPools:
        made.append(GpuPools(page, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def round_trip(pools: Pools, device: Device, compute: object = None) -> None:
    """Out, back into other blocks, and from block to block."""
    model = Model(pools)
    engine = TransferEngine(pools.layout, device, pools.host)
    try:
        out = [Section(0, 1, (3, 0, 17, 4, 5)), Section(1, 2, (9, 8, 7, 20))]
        slots = [4, 0, 9, 3, 2]
        engine.begin_step(compute)
        engine.submit(transfer(1, OFFLOAD, out, slots, valid=[3, 3, 3, 7, 7]))
        assert engine.wait([1], PATIENCE)
        model.move(out, pools.images(slots), into=HOST)
        back = [Section(0, 1, (10, 11, 12, 13, 14)), Section(1, 2, (23, 1, 2, 15))]
        engine.submit(transfer(2, ONBOARD, back, slots, valid=[3, 3, 3, 7, 7]))
        assert engine.wait([2], PATIENCE)
        model.move(back, pools.images(slots), into=DEVICE)
        engine.submit(inside_transfer(3, pools.layout, 0, [20, 21, 22], [10, 12, 14]))
        assert engine.wait([3], PATIENCE)
        copied_inside(model.device, pools.layout, 0, [20, 21, 22], [10, 12, 14])
        engine.end_step(compute)
        torch.cuda.synchronize()
        model.check(pools)
        assert {status for result in engine.poll() for status in result.statuses} == {Status.OK}
    finally:
        engine.close()


@pytest.mark.parametrize("way", list(Way))
@pytest.mark.parametrize("page", PAGES)
def test_every_way_keeps_every_byte(pools: Callable[..., GpuPools], page: int, way: Way) -> None:
    device = cuda(Always(way))
    round_trip(pools(page), device)
    assert not set(device.fallbacks()) & {"host_unregistered", "late_bounce", "no_batched_copy"}


def test_compute_may_be_a_stream_of_torchs_general_class(pools: Callable[..., GpuPools]) -> None:
    round_trip(pools(4096), cuda(Always(Way.DIRECT)), torch.accelerator.current_stream())


@pytest.mark.parametrize("page", PAGES)
def test_unregistered_memory_through_pinned_stages(page: int) -> None:
    plain = GpuPools(page)
    plain.close()
    round_trip(plain, CudaDevice("cuda", chooses=Always(Way.DIRECT), staging_bytes=1 << 20))


@pytest.mark.parametrize("page", PAGES)
def test_torch_alone(pools: Callable[..., GpuPools], page: int) -> None:
    round_trip(pools(page), TorchDevice("cuda", staging_bytes=1 << 20))


@pytest.mark.parametrize("name", ["gather", "scatter", "shift"])
@pytest.mark.parametrize("width", [1, 7, 24, 41, 656, 4096])
@pytest.mark.parametrize("skew", [0, 1, 2, 4, 8])
def test_a_kernel_does_what_its_reference_does(name: str, width: int, skew: int) -> None:
    chunks, subs, refs, stride = 3, 2, 2, 4112
    memory = torch.randint(0, 256, (refs + 1, 64 * stride), dtype=torch.uint8)
    on_device = memory.cuda()
    results = []
    for where, function in ((memory, getattr(kernels, f"{name}_reference")), (on_device, getattr(kernels, name))):
        bases = [where[index].data_ptr() + skew for index in range(refs + 1)]
        lines = [(bases[ref], stride, width, ref * subs * stride, stride) for ref in range(refs)]
        table = torch.tensor(lines, dtype=torch.int64).reshape(refs * COLUMNS).to(where.device)
        blocks = torch.tensor([5, 2, 9, 0, 11, 3], device=where.device)
        sources = torch.tensor([6, 1, 8, 4, 12, 7], device=where.device)
        rows = torch.tensor([bases[-1] + chunk * refs * subs * stride for chunk in range(chunks)]).to(where.device)
        alignment = (skew | 16) & -(skew | 16)
        tail = bool(width % min(alignment, 16))
        shape = Shape.of(chunks, refs, subs, widest=width, alignment=alignment, tail=tail)
        function(blocks, sources if name == "shift" else rows, table, shape)
        results.append(where.cpu().numpy())
    np.testing.assert_array_equal(results[1], results[0])


@pytest.mark.parametrize("way", list(Way))
def test_compute_that_is_late_is_waited_for(pools: Callable[..., GpuPools], way: Way) -> None:
    """Compute sleeps, then writes; copies are given at once, and their blocks are used again at once."""
    gpu = pools(4096)
    compute = torch.cuda.Stream()
    engine = TransferEngine(gpu.layout, cuda(Always(way)), gpu.host)
    jobs = Jobs(gpu, engine, compute, on(compute), compute.synchronize)
    try:
        chance = random.Random(3)
        for round_number in range(20):
            for block in chance.sample(range(24), 3):
                jobs.write(block, round_number, lambda: torch.cuda._sleep(A_WHILE))
            for _ in range(4):
                jobs.copy(chance)
        jobs.finish()
    finally:
        engine.close()


def on(stream: torch.cuda.Stream) -> Callable[[Callable[[], object]], None]:
    def give(work: Callable[[], object]) -> None:
        with torch.cuda.stream(stream):
            work()

    return give


def test_two_engines_at_once(pools: Callable[..., GpuPools]) -> None:
    failures: list[BaseException] = []

    def run(gpu: GpuPools, seed: int) -> None:
        torch.cuda.set_device(0)
        compute = torch.cuda.Stream()
        engine = TransferEngine(gpu.layout, cuda(AnyWay(seed)), gpu.host, max_batch_bytes=1 << 18)
        try:
            Jobs(gpu, engine, compute, on(compute), compute.synchronize).run(400, seed)
        except BaseException as error:  # noqa: BLE001 - said by the test's own thread
            failures.append(error)
        finally:
            engine.close()

    threads = [threading.Thread(target=run, args=(pools(656 * (seed + 1), seed=seed), seed)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("page", [24, 656, 4096, 65_536])
def test_2500_random_jobs(pools: Callable[..., GpuPools], page: int) -> None:
    """With three other sizes of page: 10,000."""
    gpu = pools(page, seed=page)
    compute = torch.cuda.Stream()
    engine = TransferEngine(gpu.layout, cuda(AnyWay(page)), gpu.host, max_batch_bytes=1 << 18)
    try:
        jobs = Jobs(gpu, engine, compute, on(compute), compute.synchronize)
        seed = 0
        while jobs.given < 2500:
            jobs.run(250, seed, lambda: torch.cuda._sleep(A_WHILE // 100))
            seed += 1
        assert jobs.ended
    finally:
        engine.close()


def test_a_quick_calibration_takes_little_time(
    pools: Callable[..., GpuPools], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("cache") / "kept.json"
    device = CudaDevice("cuda", in_one_piece=everything, calibration=path)
    found = device.calibrate(QUICK)
    assert path.exists()
    for ways in found.curves.values():
        assert set(ways) == set(Way)
    device.close()
    device = CudaDevice("cuda", in_one_piece=everything, calibration=path)
    round_trip(pools(4096), device)
