"""Tokens and log-probabilities over tiers equal those of a device cache that never evicts, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from serving import serve

from longshore.boundary import Status
from longshore.cache import Lease, MissReason
from longshore.runtime.loop import Runtime
from longshore.tiers.file import FileTier
from longshore.tiers.file.record_verifier import RecordVerifier
from plain_io import PlainIo


class FlippingIo(PlainIo):
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


@pytest.mark.parametrize(("dtype", "attention"), [("float32", "eager"), ("bfloat16", "eager"), ("float32", "sdpa")])
def test_tiered_equals_resident(tmp_path: Path, dtype: str, attention: str) -> None:
    served = serve(tmp_path, dtype=dtype, attention=attention, gate=False, load_timeout=120.0)
    assert min(served.tiered.restored_blocks.values()) > 0, served.counters
    assert served.equal
    assert served.held == 0


@pytest.mark.parametrize("settings", [{"offload": "write_back"}, {"backup": "write_through"}, {"background": False}])
def test_tiered_equals_resident_under_every_write_policy(tmp_path: Path, settings: dict[str, object]) -> None:
    # A loaded machine reads files slower than it computes, and later than in ten seconds.
    served = serve(tmp_path, gate=False, load_timeout=120.0, **settings)
    assert min(served.tiered.restored_blocks.values()) > 0, served.counters
    assert served.equal


@pytest.mark.parametrize("blocks", [2, 4])
def test_chunks_of_several_blocks(tmp_path: Path, blocks: int) -> None:
    served = serve(tmp_path, blocks_per_chunk=blocks)
    assert served.restored > 0
    assert served.equal


def test_blocks_lost_by_the_tiers_are_recomputed(tmp_path: Path) -> None:
    served = serve(tmp_path, shape_matters=True, file_path=None, file_size=0)
    assert served.counters.misses[MissReason.ABSENT] > 0
    assert served.restored > 0
    assert served.equal


@pytest.mark.parametrize("whole_blocks", [False, True])
def test_blocks_in_the_tiers_are_recomputed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole_blocks: bool
) -> None:
    """Device and tiers then have different blocks of the same tokens, and later requests hit both."""
    stock, lookups, refused = Runtime.worth_loading, count(), []

    def every_third_refused(self: Runtime, lease: Lease, context: int, **named: Any) -> int:
        chunks = stock(self, lease, context, **named)
        if named.get("ahead") or next(lookups) % 3 or not chunks:
            return chunks
        refused.append(chunks)
        return 0

    monkeypatch.setattr(Runtime, "worth_loading", every_third_refused)
    served = serve(tmp_path, shape_matters=True, whole_blocks=whole_blocks)
    assert refused
    assert served.restored > 0
    assert served.equal


def test_negative_control_flipped_bits_without_checksums_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RecordVerifier, "check_image", lambda self, header, computed: Status.OK)
    io = FlippingIo()
    served = serve(tmp_path, open_file_tier=partial(FileTier, io=io))
    assert io.flips > 0
    assert served.tiered.restored_blocks["file"] > 0
    assert not served.equal


def test_flipped_bits_are_counted_misses(tmp_path: Path) -> None:
    io = FlippingIo()
    served = serve(tmp_path, open_file_tier=partial(FileTier, io=io))
    assert io.flips > 0
    assert served.counters.misses[MissReason.CORRUPT] > 0
    assert served.restored > 0
    assert served.equal
    assert served.held == 0
