"""Rot, bit by bit: of a whole record, of a larger one by chance, of one in a store. Served wrong: 0."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

import pytest

from longshore.boundary import Status
from longshore.checksums import ALGORITHMS, MIX64, XXH3_64, checksum
from longshore.testing import TierHarness
from longshore.tiers.arena import DISK_PAGE, Arena
from longshore.tiers.base import Op
from longshore.tiers.file import FileTier
from longshore.tiers.file.format import RecordHeader, pack_header
from longshore.tiers.file.record_verifier import ExpectedRecord, check_header

WANTED = ExpectedRecord(bytes(range(32)), bytes(range(64, 96)), slot=3, size_class=2, generation=1, length=0)


class Record:
    """A record as it lies on disk, and what a reader would come for."""

    def __init__(self, data: bytearray, wanted: ExpectedRecord) -> None:
        self.data = data
        self.wanted = wanted

    @classmethod
    def of(cls, length: int, algorithm: int = XXH3_64) -> Self:
        image = random.Random(length).randbytes(length)
        wanted = WANTED._replace(length=length)
        found = checksum(algorithm, memoryview(image))
        header = RecordHeader(
            wanted.key, None, wanted.scope, wanted.slot, 1, length, 7, found, wanted.size_class, algorithm
        )
        return cls(bytearray(pack_header(header) + image), wanted)

    def flip(self, bit: int) -> None:
        self.data[bit // 8] ^= 1 << bit % 8

    def is_believed(self) -> bool:
        """Whether a read of it would serve its image: all that a read looks at."""
        verdict = check_header(bytes(self.data[:DISK_PAGE]), self.wanted)
        if verdict.status is not Status.OK:
            return False
        image = memoryview(self.data)[DISK_PAGE:]
        return checksum(verdict.algorithm, image) == verdict.payload_checksum


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_bit_of_a_whole_record(algorithm: int) -> None:
    record = Record.of(DISK_PAGE, algorithm)
    assert record.is_believed()
    served_wrong = 0
    for bit in range(8 * len(record.data)):
        record.flip(bit)
        served_wrong += record.is_believed()
        record.flip(bit)
    assert served_wrong == 0
    assert record.is_believed()


def test_a_hundred_thousand_random_flips_of_a_larger_record() -> None:
    record = Record.of(32 * DISK_PAGE)
    chance = random.Random(5)
    assert record.is_believed()
    served_wrong = 0
    for _ in range(100_000):
        bit = chance.randrange(8 * len(record.data))
        record.flip(bit)
        served_wrong += record.is_believed()
        record.flip(bit)
    assert served_wrong == 0
    assert record.is_believed()


def test_random_flips_of_a_larger_record_of_a_device() -> None:
    record = Record.of(16 * DISK_PAGE, MIX64)
    chance = random.Random(6)
    served_wrong = 0
    for _ in range(2_000):
        bits = [chance.randrange(8 * len(record.data)) for _ in range(chance.randint(1, 4))]
        for bit in set(bits):
            record.flip(bit)
        served_wrong += record.is_believed()
        for bit in set(bits):
            record.flip(bit)
    assert served_wrong == 0
    assert record.is_believed()


def test_the_judge_can_be_wrong() -> None:
    """The negative control: without its checksum, rot in the image would be believed."""
    record = Record.of(DISK_PAGE)
    record.flip(8 * DISK_PAGE + 5)
    assert check_header(bytes(record.data[:DISK_PAGE]), record.wanted).status is Status.OK
    assert not record.is_believed()


class Disk:
    """The first record of a segment, changed around the page cache, a page at a time."""

    def __init__(self, segment: Path, pages: int) -> None:
        self._fd = os.open(segment, os.O_RDWR | os.O_DIRECT)
        self._memory = mmap.mmap(-1, pages * DISK_PAGE)
        os.preadv(self._fd, [self._memory], 0)

    def flip(self, bit: int) -> None:
        page = bit // (8 * DISK_PAGE)
        self._memory[bit // 8] ^= 1 << bit % 8
        os.pwritev(self._fd, [memoryview(self._memory)[page * DISK_PAGE : (page + 1) * DISK_PAGE]], page * DISK_PAGE)

    def close(self) -> None:
        os.close(self._fd)


def test_a_store_serves_no_rotten_bit_of_its_first_record(
    opener: Callable[..., FileTier], arena: Arena, directory: Path
) -> None:
    """On disk, through reads: each bit in which a header says something, and one of every other byte."""
    harness = TierHarness(lambda: opener(image_bytes=DISK_PAGE, threads=1), arena)
    if not harness.tier.direct:  # type: ignore[attr-defined]
        pytest.skip("the disk is read through the page cache")
    harness.store(0, 0)
    said = [*range(8 * 160), *range(8 * (DISK_PAGE - 8), 8 * DISK_PAGE)]
    others = [8 * byte + byte % 8 for byte in range(160, 2 * DISK_PAGE)]
    read = harness.op(Op.READ, 0, 0)
    served_wrong = 0
    with contextlib.closing(Disk(directory / "segment", 2)) as disk:
        for bit in (*said, *others):
            disk.flip(bit)
            ticket = harness.tier.submit([read], math.inf)
            while not (results := harness.tier.poll()):
                time.sleep(2e-5)
            assert results[0].ticket == ticket
            served_wrong += results[0].statuses == (Status.OK,)
            disk.flip(bit)
    assert served_wrong == 0
    harness.assert_serves(0, 0)
