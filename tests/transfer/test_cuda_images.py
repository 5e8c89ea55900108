"""Memory of a GPU for images, over an accelerator that is not there: where its bytes are, and what it raises."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import cast

import pytest
import torch
from cuda_stand_in import StandInLibrary, World

from longshore.checksums import mix64
from longshore.errors import DeviceError
from longshore.transfer.device.cuda.device import CudaImages
from longshore.transfer.device.cuda.driver import CudaAccelerator, Driver

PAGE = 4096


class HostAccelerator:
    """Memory of the host, until it fails as torch does."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.broken = False

    def device_bytes(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def create_stream(self, driver: object) -> object:
        return None

    def on(self, stream: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def wait(self) -> None:
        if self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def mix64(self, memory: torch.Tensor) -> int:
        self.wait()
        return mix64(memory.numpy().tobytes())


@pytest.fixture
def accelerator() -> HostAccelerator:
    return HostAccelerator()


@pytest.fixture
def images(accelerator: HostAccelerator) -> CudaImages:
    return CudaImages(cast(CudaAccelerator, accelerator), 2 * PAGE, Driver(StandInLibrary(World())))


def test_bytes_go_in_and_out_at_page_aligned_addresses(images: CudaImages) -> None:
    written, read = bytearray(range(256)) * 16, bytearray(2 * PAGE)
    images.store(PAGE, memoryview(written))
    images.load(0, memoryview(read))
    assert images.address % PAGE == 0
    assert bytes(read) == bytes(PAGE) + written
    assert images.mix64(PAGE, PAGE) == mix64(bytes(written))
    images.zero(PAGE, PAGE)
    assert images.mix64(0, 2 * PAGE) == mix64(bytes(2 * PAGE))


@pytest.mark.parametrize(
    "call",
    [
        lambda images: images.mix64(0, PAGE),
        lambda images: images.store(0, memoryview(bytearray(PAGE))),
        lambda images: images.zero(0, PAGE),
    ],
    ids=["mix64", "store", "zero"],
)
def test_a_gpu_that_fails_is_a_device_error(
    images: CudaImages, accelerator: HostAccelerator, call: Callable[[CudaImages], object]
) -> None:
    accelerator.broken = True
    with pytest.raises(DeviceError, match="GPU operation failed: CUDA error: an illegal memory access"):
        call(images)
