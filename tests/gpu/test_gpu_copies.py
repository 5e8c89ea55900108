"""Every byte through a real GPU: all ways, compute that is late, several engines, thousands of random jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import kernel_references
import numpy as np
import pytest
import torch
from cuda_stand_in import AnyWay
from jobs_kit import DevicePools, Hardware, compute_is_late, layer_by_layer, random_jobs, round_trip, side_by_side

from longshore.transfer.device.cuda import kernels
from longshore.transfer.device.cuda.arguments import COLUMNS, KernelShape
from longshore.transfer.device.cuda.calibration import QUICK, Always, all_registered
from longshore.transfer.device.cuda.device import CudaDevice
from longshore.transfer.device.cuda.streams import Way, WayChooser
from longshore.transfer.device.torch_streams import TorchDevice

pytestmark = pytest.mark.gpu

PAGES = (1, 7, 8, 24, 656, 4096, 65_536, 2 << 20)
A_WHILE = 50_000_000
"""Cycles that a kernel sleeps: about 30 ms."""


class Cuda(Hardware):
    name = "cuda"

    def new_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream()

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager[object]:
        return torch.cuda.stream(stream)

    def late(self, share: float = 1.0) -> None:
        torch.cuda._sleep(int(share * A_WHILE))

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def register(self, address: int, nbytes: int) -> None:
        assert int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)) == 0

    def unregister(self, address: int) -> None:
        assert int(torch.cuda.cudart().cudaHostUnregister(address)) == 0


def cuda(chooser: WayChooser, staging_bytes: int = 1 << 20) -> CudaDevice:
    return CudaDevice("cuda", in_one_piece=all_registered, chooser=chooser, staging_bytes=staging_bytes)


@pytest.fixture
def pools() -> Iterator[Callable[..., DevicePools]]:
    made: list[DevicePools] = []

    def make(page: int, **options: Any) -> DevicePools:
        made.append(DevicePools(Cuda(), page, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("way", list(Way))
@pytest.mark.parametrize("page", PAGES)
def test_every_way_keeps_every_byte(pools: Callable[..., DevicePools], page: int, way: Way) -> None:
    device = cuda(Always(way))
    round_trip(pools(page), device)
    assert not set(device.fallbacks()) & {"host_unregistered", "late_bounce", "no_batched_copy"}


def test_compute_may_be_a_stream_of_torchs_general_class(pools: Callable[..., DevicePools]) -> None:
    round_trip(pools(4096), cuda(Always(Way.DIRECT)), torch.accelerator.current_stream())


@pytest.mark.parametrize("page", PAGES)
def test_unregistered_memory_through_pinned_stages(pools: Callable[..., DevicePools], page: int) -> None:
    plain = pools(page, registered=False)
    round_trip(plain, CudaDevice("cuda", chooser=Always(Way.DIRECT), staging_bytes=1 << 20))


@pytest.mark.parametrize("page", PAGES)
def test_torch_alone(pools: Callable[..., DevicePools], page: int) -> None:
    round_trip(pools(page), TorchDevice("cuda", staging_bytes=1 << 20))


@pytest.mark.parametrize("name", ["gather", "scatter", "copy_blocks"])
@pytest.mark.parametrize("width", [1, 7, 24, 41, 656, 4096])
@pytest.mark.parametrize("skew", [0, 1, 2, 4, 8])
def test_a_kernel_does_what_its_reference_does(name: str, width: int, skew: int) -> None:
    chunks, subs, refs, stride = 3, 2, 2, 4112
    memory = torch.randint(0, 256, (refs + 1, 64 * stride), dtype=torch.uint8)
    on_device = memory.cuda()
    results = []
    reference = getattr(kernel_references, f"{name}_reference")
    for where, function in ((memory, reference), (on_device, getattr(kernels, name))):
        bases = [where[index].data_ptr() + skew for index in range(refs + 1)]
        lines = [(bases[ref], stride, width, ref * subs * stride, stride) for ref in range(refs)]
        table = torch.tensor(lines, dtype=torch.int64).reshape(refs * COLUMNS).to(where.device)
        blocks = torch.tensor([5, 2, 9, 0, 11, 3], device=where.device)
        sources = torch.tensor([6, 1, 8, 4, 12, 7], device=where.device)
        rows = torch.tensor([bases[-1] + chunk * refs * subs * stride for chunk in range(chunks)]).to(where.device)
        alignment = (skew | 16) & -(skew | 16)
        tail = bool(width % min(alignment, 16))
        shape = KernelShape.of(chunks, refs, subs, widest=width, alignment=alignment, tail=tail)
        function(blocks, sources if name == "copy_blocks" else rows, table, shape)
        results.append(where.cpu().numpy())
    np.testing.assert_array_equal(results[1], results[0])


@pytest.mark.parametrize("way", list(Way))
def test_compute_that_is_late_is_waited_for(pools: Callable[..., DevicePools], way: Way) -> None:
    compute_is_late(pools(4096), cuda(Always(way)))


def test_compute_reads_each_layer_as_it_comes(pools: Callable[..., DevicePools]) -> None:
    layer_by_layer(pools(4096), cuda(Always(Way.STAGED)))


def test_two_engines_at_once(pools: Callable[..., DevicePools]) -> None:
    both = [pools(656 * (seed + 1), seed=seed) for seed in range(2)]
    side_by_side(*(partial(random_jobs, gpu, cuda(AnyWay(seed)), 400, seed=seed) for seed, gpu in enumerate(both)))


@pytest.mark.parametrize("page", [24, 656, 4096, 65_536])
def test_2500_random_jobs(pools: Callable[..., DevicePools], page: int) -> None:
    """With three other sizes of page: 10,000."""
    random_jobs(pools(page, seed=page), cuda(AnyWay(page)), 2500)


def test_a_quick_calibration_takes_little_time(
    pools: Callable[..., DevicePools], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("cache") / "kept.json"
    device = CudaDevice("cuda", in_one_piece=all_registered, calibration=path)
    found = device.calibrate(QUICK)
    assert path.exists()
    for ways in found.curves.values():
        assert set(ways) == set(Way)
    device.close()
    device = CudaDevice("cuda", in_one_piece=all_registered, calibration=path)
    round_trip(pools(4096), device)
