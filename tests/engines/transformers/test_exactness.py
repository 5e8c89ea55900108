"""Tokens and log-probabilities over tiers equal those of a device cache that never evicts, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
from serving import serve

from longshore.cache import MissReason
from longshore.tiers.file import FileTier, SystemIo


class FlippingIo(SystemIo):
    """A disk that rots: every second image that is read comes with one bit flipped, in the exponent of one float."""

    def __init__(self) -> None:
        self.reads = 0
        self.flips = 0

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int:
        count = super().preadv(fd, buffers, offset)
        if len(buffers) > 1:  # header and image, not a scan of headers
            self.reads += 1
            if self.reads > 2 and self.reads % 2:  # the self-test reads first
                buffers[-1][3] ^= 0x40  # top byte of a little-endian float32
                self.flips += 1
        return count


class UncheckedFileTier(FileTier):
    """A file tier that believes its disk."""

    def _payload_is_intact(self, found: int, expected: int) -> bool:
        return True


@pytest.mark.parametrize(("dtype", "attention"), [("float32", "eager"), ("bfloat16", "eager"), ("float32", "sdpa")])
def test_tiered_equals_resident(tmp_path: Path, dtype: str, attention: str) -> None:
    served = serve(tmp_path, dtype=dtype, attention=attention)
    assert served.tiered.restored_blocks["host"] > 0
    assert served.tiered.restored_blocks["file"] > 0
    assert served.equal
    assert served.held == 0


@pytest.mark.parametrize("settings", [{"offload": "write_back"}, {"backup": "write_through"}, {"background": False}])
def test_tiered_equals_resident_under_every_write_policy(tmp_path: Path, settings: dict[str, object]) -> None:
    served = serve(tmp_path, **settings)
    assert min(served.tiered.restored_blocks.values()) > 0
    assert served.equal


def test_chunks_of_several_blocks(tmp_path: Path) -> None:
    served = serve(tmp_path, blocks_per_chunk=2)
    assert served.restored > 0
    assert served.equal


def test_negative_control_flipped_bits_without_checksums_are_noticed(tmp_path: Path) -> None:
    io = FlippingIo()
    served = serve(tmp_path, open_file=partial(UncheckedFileTier, io=io))
    assert io.flips > 0
    assert served.tiered.restored_blocks["file"] > 0
    assert not served.equal


def test_flipped_bits_are_counted_misses(tmp_path: Path) -> None:
    io = FlippingIo()
    served = serve(tmp_path, open_file=partial(FileTier, io=io))
    assert io.flips > 0
    assert served.counters.misses[MissReason.CORRUPT] > 0
    assert served.restored > 0
    assert served.equal
    assert served.held == 0
