"""Copies on the CPU: any size from one byte up, any mixture, nothing beside them touched."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transfer_kit import flat

from depth import examples
from longshore.transfer import CpuDevice, device_for
from longshore.transfer.device.base import SMALL, copy_pieces


@examples(80)
@given(st.lists(st.sampled_from([1, 7, 8, 24, 656, SMALL - 1, SMALL, SMALL + 1, 70_000]), max_size=40), st.randoms())
def test_pieces_arrive_and_nothing_else_changes(sizes: list[int], random: object) -> None:
    seed = getattr(random, "randrange")(1 << 30)  # noqa: B009 - hypothesis gives an untyped Random
    rng = np.random.default_rng(seed)
    gaps = rng.integers(0, 9, (2, len(sizes)))
    total = sum(sizes) + int(gaps.sum()) + 1
    source = rng.integers(0, 256, total, dtype=np.uint8)
    destination = rng.integers(0, 256, total, dtype=np.uint8)
    expected = destination.copy()
    starts = []
    for gap in gaps:
        order = rng.permutation(len(sizes))
        at, start = 0, [0] * len(sizes)
        for index in order.tolist():
            at += int(gap[index])
            start[index] = at
            at += sizes[index]
        starts.append(np.array(start, dtype=np.uint64))
    for read, write, size in zip(*starts, sizes, strict=True):
        expected[int(write) : int(write) + size] = source[int(read) : int(read) + size]
    copy_pieces(
        starts[0] + np.uint64(source.ctypes.data),
        starts[1] + np.uint64(destination.ctypes.data),
        np.array(sizes, dtype=np.uint64),
    )
    np.testing.assert_array_equal(destination, expected)


@examples(60)
@given(
    st.sampled_from([1024, 4096, 6144, 12288, 16384, 20 << 10, 70_000]),
    st.integers(1, 40),
    st.sampled_from([0, 64, 1024, 4096]),
    st.booleans(),
    st.integers(0, 99),
)
def test_pages_of_medium_size_between_scattered_places_and_images(
    page: int, pages: int, gap: int, gathers: bool, seed: int
) -> None:
    """One side in random order with gaps, the other in images that are contiguous, with gaps between them."""
    rng = np.random.default_rng(seed)
    per_image = int(rng.integers(1, pages + 1))
    pitch = page + gap
    scattered = rng.integers(0, 256, pages * pitch + 5, dtype=np.uint8)
    dense = rng.integers(0, 256, pages * (page + 100) + 5, dtype=np.uint8)
    away = rng.permutation(pages) * pitch + 5
    together = np.arange(pages) * page + np.arange(pages) // per_image * 100 + 3
    sizes = np.where(rng.random(pages) < 0.8, page, page // 2)
    starts = {id(scattered): away, id(dense): together}
    source, destination = (scattered, dense) if gathers else (dense, scattered)
    expected = destination.copy()
    for read, write, size in zip(starts[id(source)], starts[id(destination)], sizes, strict=True):
        expected[write : write + size] = source[read : read + size]
    copy_pieces(
        (starts[id(source)] + source.ctypes.data).astype(np.uint64),
        (starts[id(destination)] + destination.ctypes.data).astype(np.uint64),
        sizes.astype(np.uint64),
    )
    np.testing.assert_array_equal(destination, expected)


@pytest.mark.parametrize("offload", [True, False])
def test_pages_that_lie_around_the_image_they_go_to(offload: bool) -> None:
    page, pages = 16 << 10, 12
    memory = np.random.default_rng(0).integers(0, 256, 3 * pages * page, dtype=np.uint8)
    scattered = np.concatenate([np.arange(0, pages, 2), np.arange(2 * pages, 3 * pages, 2)]) * page
    image = np.arange(pages, 2 * pages) * page
    source, destination = (scattered, image) if offload else (image, scattered)
    expected = memory.copy()
    for read, write in zip(source, destination, strict=True):
        expected[write : write + page] = memory[read : read + page]
    at = memory.ctypes.data
    sizes = np.full(pages, page, dtype=np.uint64)
    copy_pieces((source + at).astype(np.uint64), (destination + at).astype(np.uint64), sizes)
    np.testing.assert_array_equal(memory, expected)


@pytest.mark.parametrize("size", [4, 64, 2 * SMALL])
def test_bits_of_nan_and_negative_zero_survive(size: int) -> None:
    bits = np.array([0x7FC00001, 0xFFC0DEAD, 0x7F800001, 0x80000000], dtype=np.uint32)
    source = np.resize(bits, 8 * SMALL // 4)
    destination = np.zeros_like(source)
    offsets = np.arange(0, source.nbytes, size, dtype=np.uint64)
    copy_pieces(
        offsets + np.uint64(source.ctypes.data),
        offsets + np.uint64(destination.ctypes.data),
        np.full(len(offsets), size, dtype=np.uint64),
    )
    np.testing.assert_array_equal(destination, source)


def test_tensors_in_host_memory_are_served_by_the_cpu() -> None:
    device = device_for(flat(4))
    assert isinstance(device, CpuDevice)
    assert device.record_event(None).query()
    device.close()


def test_pieces_in_memory_far_apart() -> None:
    source, destination = torch.arange(50, dtype=torch.uint8), np.zeros(5000, dtype=np.uint8)
    copy_pieces(
        np.array([source.data_ptr() + 10, source.data_ptr()], dtype=np.uint64),
        np.array([destination.ctypes.data + 4000, destination.ctypes.data + 1], dtype=np.uint64),
        np.array([3, 3], dtype=np.uint64),
    )
    assert destination[4000:4003].tolist() == [10, 11, 12]
    assert destination[1:4].tolist() == [0, 1, 2]
    assert destination.sum() == 36
