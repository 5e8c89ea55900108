"""GPUDirect Storage on a real GPU: mix64 on the device, and blocks from pages to files and back, by the real cuFile.

Where the machine has no cuFile, or no file system that it reaches, everything goes by way of the host, with the same
bytes. So the test in strict mode, in which that is an error, runs where GDS_DIR names a folder that cuFile reaches.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import random
import tempfile
from pathlib import Path

import pytest
import torch

from longshore.boundary import FILE
from longshore.cache import GroupKeys
from longshore.checksums import mix64
from longshore.config import Config
from longshore.keys import Scope
from longshore.layout import from_rows
from longshore.runtime.stack import open_stack
from longshore.tiers.file import GdsFileTier, capacity_for
from longshore.transfer.device.cuda.device import CudaDevice

pytestmark = pytest.mark.gpu

_log = logging.getLogger(__name__)

BLOCKS, ROW, CHUNKS = 64, 1 << 20, 24
KEYS = [hashlib.sha256(bytes([index])).digest() for index in range(CHUNKS)]


@pytest.mark.parametrize("nbytes", [8, 4096, 32768, 32776, 2 << 20, (2 << 20) + 4096])
def test_the_kernel_and_its_twin_agree(nbytes: int) -> None:
    images = CudaDevice("cuda").allocate_images(4 << 20)
    data = bytearray(random.Random(nbytes).randbytes(nbytes))
    images.store(4096, memoryview(data))
    assert images.mix64(4096, nbytes) == mix64(data)
    found = bytearray(nbytes)
    images.load(4096, memoryview(found))
    assert found == data
    images.zero(4096, 8)
    data[:8] = bytes(8)
    assert images.mix64(4096, nbytes) == mix64(data)


def test_blocks_go_to_files_and_come_back_whichever_way(tmp_path: Path) -> None:
    there_and_back(tmp_path, strict=False)


if "GDS_DIR" in os.environ:

    def test_blocks_go_to_files_and_come_back_by_cufile_alone() -> None:
        with tempfile.TemporaryDirectory(dir=os.environ["GDS_DIR"]) as folder:
            there_and_back(Path(folder), strict=True)


def there_and_back(folder: Path, *, strict: bool) -> None:
    rows = torch.randint(0, 256, (BLOCKS, ROW), dtype=torch.uint8, device="cuda")
    layout = from_rows(rows, pages_per_block=8, block_size=16)
    config = Config.make(
        file_path=folder, file_size=capacity_for(2 * CHUNKS, layout.image_bytes), file_mode="gds", background=False
    )
    scope = Scope(model="m", weights="w", dtype="d", layout=layout.fingerprint, block_size=16)
    blocks = list(range(CHUNKS))
    open_gds_tier = functools.partial(GdsFileTier, strict=strict)
    with open_stack(config, layout, scope, CudaDevice("cuda"), open_gds_tier=open_gds_tier) as stack:
        assert stack.host is None
        rows[:CHUNKS].bitwise_xor_(0x5A)  # late: only its event says when it has ended
        before = rows[:CHUNKS].clone()
        stack.transfer_engine.begin_step(None)
        with stack.runtime.batch() as cache:
            job = cache.store({0: GroupKeys(KEYS)}, {0: blocks})[0].job
        assert job is not None
        assert stack.runtime.wait_jobs([job], 60)
        rows.zero_()
        stack.transfer_engine.begin_step(None)
        with stack.runtime.batch() as cache:
            hold = cache.lookup({0: GroupKeys(KEYS)}, stack.runtime.clock()).lease
            assert hold is not None
            cache.load(hold, {0: blocks})
        outcome = stack.runtime.wait_load(hold, 60).outcome
        assert outcome.sources == (FILE,) * CHUNKS
        assert torch.equal(rows[:CHUNKS], before)
        assert isinstance(stack.file, GdsFileTier)
        went = {reason: count for reason, count in stack.file.fallbacks.items() if count}
        assert not (strict and went)
        _log.warning("by way of the host: %s", went)
