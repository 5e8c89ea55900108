"""mix64 on a GPU: the kernel under Triton's interpreter against its twin, and compiled; images in a device's memory."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading

import pytest
import torch
from cuda_stand_in import StandIn, StandInAccelerator

from longshore.checksums import mix64
from longshore.errors import DeviceError
from longshore.transfer.device.base import CpuDevice
from longshore.transfer.device.cuda import kernels
from longshore.transfer.device.cuda.driver import RELAXED
from longshore.transfer.device.torch_streams import TorchDevice

SPAN_BYTES = kernels.SPAN * kernels.WORD


INTERPRETED = """
import random, sys, torch
from longshore.checksums import mix64
from longshore.transfer.device.cuda import kernels
for nbytes in map(int, sys.argv[1:]):
    for image in (bytearray(random.Random(nbytes).randbytes(nbytes)), bytearray(b"\\xff" * nbytes)):
        found = kernels.mix64(torch.frombuffer(image, dtype=torch.int64))
        assert found == mix64(image), (nbytes, found, mix64(image))
        image[-1] ^= 0x80
        assert kernels.mix64(torch.frombuffer(image, dtype=torch.int64)) != found
        print("same", nbytes)
"""


def test_the_kernel_does_what_its_twin_does() -> None:
    """In a process of its own: Triton's own functions are interpreted only where all is, from the beginning."""
    sizes = [8, 4096, SPAN_BYTES, SPAN_BYTES + 8, 3 * SPAN_BYTES - 16]
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED, *map(str, sizes)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [word for size in sizes for word in ("same", str(size)) * 2]


@pytest.mark.parametrize("mood", ["lazy", "eager", 3])
def test_images_in_the_memory_of_the_device(mood: str | int) -> None:
    stand_in = StandIn(None, mood=mood)
    images = stand_in.device.allocate_images(16384)
    assert images.address % 4096 == 0
    assert images.nbytes == 16384
    own = torch.zeros(images.nbytes, dtype=torch.uint8)
    images.load(0, memoryview(own.numpy()))
    assert not own.any()
    data = bytearray(random.Random(0).randbytes(4096))
    images.store(8192, memoryview(data))
    assert images.mix64(8192, 4096) == mix64(data)
    images.zero(8192, 2048)
    found = bytearray(4096)
    images.load(8192, memoryview(found))
    assert found == bytes(2048) + data[2048:]
    assert stand_in.device.fallbacks() == {}


def test_checksums_and_stores_do_not_wait_for_compute() -> None:
    """Each thread has a stream of its own, with the device's context current and no capture of a graph ended."""
    stand_in = StandIn(None)
    images = stand_in.device.allocate_images(16384)
    compute = stand_in.accelerator.compute
    compute.give(lambda: None)
    left = len(compute.queue)
    seen: list[object] = []

    def work() -> None:
        images.bind()
        seen.append(stand_in.library.contexts.now)
        seen.append(stand_in.library.capture_modes[threading.get_ident()])
        images.store(4096, memoryview(bytearray(4096)))
        images.mix64(4096, 4096)
        images.zero(0, 4096)

    for _ in range(2):
        worker = threading.Thread(target=work)
        worker.start()
        worker.join()
    assert seen == [0xC0, RELAXED] * 2
    assert len(compute.queue) == left
    assert len(stand_in.library.made) == 2
    stand_in.device.close()
    assert stand_in.library.destroyed == stand_in.library.made


def test_memory_that_cannot_be_had_is_an_error() -> None:
    stand_in = StandIn(None)
    stand_in.accelerator.refuse_above = 1 << 20
    with pytest.raises(DeviceError, match="cannot allocate 2097152 bytes for chunk images"):
        stand_in.device.allocate_images(2 << 20)


def test_devices_that_keep_no_images_say_so() -> None:
    with pytest.raises(DeviceError, match="TorchDevice cannot hold chunk images"):
        TorchDevice("cuda:0", accelerator=StandInAccelerator()).allocate_images(4096)


def test_on_the_processor_images_are_in_host_memory() -> None:
    images = CpuDevice().allocate_images(3 * 4096)
    data = bytearray(random.Random(1).randbytes(4096))
    images.store(4096, memoryview(data))
    assert images.mix64(4096, 4096) == mix64(data)
    images.zero(4096, 8)
    found = bytearray(4096)
    images.load(4096, memoryview(found))
    assert found == bytes(8) + data[8:]
    assert images.address % 4096 == 0
