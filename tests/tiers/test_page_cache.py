"""What the file tier reads comes from the disk: none of its pages are in the page cache, before or after."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import time
from pathlib import Path

import pytest

from longshore.boundary import Status
from longshore.tiers.arena import Arena
from longshore.tiers.base import Op, TierOp
from longshore.tiers.file import FileTier, capacity_for

IMAGE = 256 << 10


def resident_pages(path: Path) -> int:
    """Pages of a file that are in the page cache (mincore(2))."""
    size = path.stat().st_size
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as mapping:
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        marks = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        if ctypes.CDLL(None, use_errno=True).mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), marks):
            raise OSError(ctypes.get_errno(), "mincore")
        return sum(mark & 1 for mark in marks)


def segment(directory: Path) -> Path:
    return max((path for path in directory.iterdir() if path.is_file()), key=lambda path: path.stat().st_size)


def test_the_measure_sees_cached_pages(tmp_path: Path) -> None:
    path = tmp_path / "cached"
    path.write_bytes(b"x" * IMAGE)
    assert resident_pages(path) == IMAGE // mmap.PAGESIZE


def test_images_do_not_stay_in_the_page_cache(tmp_path: Path) -> None:
    arena = Arena(8 * IMAGE)
    tier = FileTier(
        tmp_path, capacity=capacity_for(8, IMAGE), image_bytes=IMAGE, arena=arena, scope=hashlib.sha256().digest()
    )
    if not tier.direct:
        pytest.skip("this file system has no direct I/O; dropping pages is tested with the forced fallback")
    for op in (Op.WRITE, Op.READ):
        batch = [TierOp(op, slot, bytes([slot]) * 32, None, slot * IMAGE, IMAGE, 0) for slot in range(8)]
        tier.submit(batch, time.monotonic() + 60)
        while not (results := tier.poll()):
            time.sleep(0.001)
        assert results[0].statuses == (Status.OK,) * 8
        assert resident_pages(segment(tmp_path)) == 0
    tier.close()
    arena.close()
