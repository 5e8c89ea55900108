"""The file tier on a real disk: bounds, restarts, rot, torn records."""

import logging
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from longshore.boundary import Status, StoredChunk
from longshore.errors import FormatError, TierClosedError, TierError
from longshore.testing import TierHarness, TierTests, flip_header_bit, flip_image_bit
from longshore.testing.tier_harness import image, key
from longshore.tiers.arena import DISK_PAGE
from longshore.tiers.base import Op
from longshore.tiers.file import FileTier, capacity_for
from longshore.tiers.file.directory import COPIES
from longshore.tiers.file.format import parse_superblock
from longshore.tiers.file.record_verifier import RecordVerifier

IMAGE = TierTests.image_bytes
STRIDE = DISK_PAGE + IMAGE
SLOTS = TierTests.slots

Opener = Callable[..., FileTier]

SUPERBLOCK_OF_VERSION_2 = bytes.fromhex(
    "4c4e475348535550" "02000000" "00100000"  # magic, version, header bytes
    "0700000000000000" "0030000000000000"  # slots, image_bytes
    "0403000000000000" "0605000000000000"  # generation, opens
).ljust(DISK_PAGE - 8, b"\0") + bytes.fromhex("3bdfb10a29655405")  # fmt: skip
"""As that version wrote it, every bit."""


def on_disk(directory: Path) -> int:
    """Bytes that the directory and all in it take, by length or by allocation, whichever is more."""
    stats = [path.stat() for path in [directory, *directory.iterdir()]]
    return sum(max(stat.st_size, stat.st_blocks * 512) for stat in stats)


class TestCapacity:
    @pytest.mark.parametrize("slots", [1, 2, 9])
    @pytest.mark.parametrize("surplus", [0, 1, STRIDE - 1])
    def test_is_a_bound_on_everything_on_disk(
        self, harness_of: Callable[..., TierHarness], directory: Path, slots: int, surplus: int
    ) -> None:
        capacity = capacity_for(slots, IMAGE) + surplus
        harness = harness_of(capacity=capacity)
        assert harness.tier.slabs.slabs == slots
        for slot in range(slots):
            harness.store(slot, slot)
        harness.tier.reset(1)
        assert on_disk(directory) <= capacity

    def test_all_of_it_is_taken_at_start(self, opener: Opener, directory: Path) -> None:
        opener()
        assert (directory / "segment").stat().st_blocks * 512 >= SLOTS * STRIDE

    def test_too_little_for_one_image_is_refused_with_the_figures(self, opener: Opener) -> None:
        least = capacity_for(1, IMAGE)
        with pytest.raises(TierError, match=f"at least {least} bytes, for one image of {IMAGE}, got {least - 1}"):
            opener(capacity=least - 1)

    def test_more_than_the_disk_has_is_met_at_start(
        self, opener: Opener, harness: TierHarness, directory: Path
    ) -> None:
        harness.store(0, 0)
        harness.tier.close()
        space = os.statvfs(directory)
        capacity = 2 * space.f_blocks * space.f_frsize
        with pytest.raises(
            TierError, match=r"room for [\d.]+ MiB more .* the file system has [\d.]+ MiB free; lower file_size"
        ):
            opener(capacity=capacity)
        harness.reopen()
        harness.assert_serves(0, 0)

    def test_disk_that_fills_while_allocating_regains_its_space(
        self, opener: Opener, harness: TierHarness, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        harness.store(0, 0)
        harness.tier.close()
        allocate = os.posix_fallocate

        def fill_up(fd: int, offset: int, nbytes: int) -> None:
            allocate(fd, offset, nbytes - STRIDE)
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(os, "posix_fallocate", fill_up)
            with pytest.raises(TierError, match=r"could not allocate .* No space left"):
                opener(slots=2 * SLOTS)
        assert (directory / "segment").stat().st_size == SLOTS * STRIDE
        harness.reopen()
        harness.assert_serves(0, 0)

    @pytest.mark.parametrize(
        "changes", [{"image_bytes": DISK_PAGE + 1}, {"scope": b"x"}, {"threads": 0}, {"image_bytes": 0}]
    )
    def test_impossible_settings_leave_no_directory(
        self, opener: Opener, directory: Path, changes: dict[str, object]
    ) -> None:
        with pytest.raises(TierError):
            opener(**changes)
        assert not directory.exists()


class TestRestart:
    def test_trap_35_another_scope_recovers_nothing_and_is_never_served(
        self, harness: TierHarness, opener: Opener
    ) -> None:
        harness.store(0, 0)
        harness.tier.close()
        harness.tier = opener(scope=bytes(32))
        assert harness.tier.recover() == []
        assert harness.load(0, 0)[0] is Status.MISMATCH
        harness.tier.close()
        harness.tier = opener()
        assert harness.tier.recover() == [StoredChunk(0, key(0), None)]

    @pytest.mark.parametrize("slots", [3, SLOTS, 13])
    def test_another_capacity_keeps_what_still_has_a_slot(
        self, harness: TierHarness, opener: Opener, directory: Path, slots: int
    ) -> None:
        for slot in range(SLOTS):
            harness.store(slot, slot)
        harness.tier.close()
        harness.tier = opener(slots=slots)
        assert (directory / "segment").stat().st_size == slots * STRIDE
        kept = range(min(slots, SLOTS))
        assert [chunk.slot for chunk in harness.tier.recover()] == list(kept)
        for slot in kept:
            harness.assert_serves(slot, slot)
        harness.store(slots - 1, 99)
        harness.assert_serves(slots - 1, 99)

    def test_what_was_shrunk_away_does_not_come_back(self, harness: TierHarness, opener: Opener) -> None:
        harness.store(SLOTS - 1, 0)
        for slots in (SLOTS - 1, SLOTS):
            harness.tier.close()
            harness.tier = opener(slots=slots)
        assert harness.tier.recover() == []
        assert harness.load(SLOTS - 1, 0)[0] is Status.MISMATCH

    def test_images_of_another_size_start_an_empty_generation(
        self, harness: TierHarness, opener: Opener, caplog: pytest.LogCaptureFixture
    ) -> None:
        harness.tier.reset(5)
        harness.store(0, 0, length=DISK_PAGE)
        harness.tier.close()
        with caplog.at_level(logging.WARNING):
            harness.tier = opener(image_bytes=2 * DISK_PAGE)
        assert [record.getMessage() for record in caplog.records if "all records discarded" in record.getMessage()]
        assert len(caplog.records) == 1
        assert harness.tier.generation == 6
        assert harness.tier.recover() == []
        assert harness.load(0, 0, length=DISK_PAGE, generation=5)[0] is Status.MISMATCH
        assert harness.load(0, 0, length=DISK_PAGE)[0] is Status.MISMATCH

    @pytest.mark.parametrize("version", [1, 2, 3, 5])
    def test_another_version_is_refused_and_nothing_touched(
        self, opener: Opener, directory: Path, version: int
    ) -> None:
        opener().close()
        page = bytearray((directory / "superblock").read_bytes())
        page[8] = version
        if version == 2:
            page = bytearray(SUPERBLOCK_OF_VERSION_2)
        for name in COPIES:
            (directory / name).write_bytes(page)
        before = {path: path.read_bytes() for path in directory.iterdir() if path.name != "lock"}
        with pytest.raises(FormatError, match=rf"version 4, got {version}.*Nothing was changed; remove the directory"):
            opener(slots=2)
        assert {path: path.read_bytes() for path in directory.iterdir() if path.name != "lock"} == before

    @pytest.mark.parametrize("damage", [0, 1, DISK_PAGE - 1, DISK_PAGE + 1])
    def test_a_superblock_of_the_wrong_length_is_refused(self, opener: Opener, directory: Path, damage: int) -> None:
        opener().close()
        whole = (directory / "superblock").read_bytes()
        for name in COPIES:
            (directory / name).write_bytes((whole + b"\0")[:damage] or b"\1")
        with pytest.raises(FormatError):
            opener()

    def test_a_lost_superblock_or_segment_is_an_empty_tier(self, harness: TierHarness, directory: Path) -> None:
        for names in (COPIES, ("segment",)):
            harness.store(0, 0)
            harness.tier.close()
            for name in names:
                (directory / name).unlink()
            harness.reopen()
            assert harness.tier.recover() == []
            assert harness.load(0, 0)[0] is Status.MISMATCH

    def test_every_open_is_counted_on_disk(self, opener: Opener, directory: Path) -> None:
        for opens in (1, 2, 3):
            opener().close()
            assert parse_superblock((directory / "superblock").read_bytes()).opens == opens

    def test_a_generation_is_on_disk_before_forget_returns(self, opener: Opener, directory: Path) -> None:
        tier = opener()
        tier.reset(7)
        assert parse_superblock((directory / "superblock").read_bytes()).generation == 7

    def test_a_generation_that_was_not_made_known_is_refused(self, harness: TierHarness) -> None:
        with pytest.raises(TierError, match=r"generation 1 is newer than the last reset \(0\)"):
            harness.tier.submit([harness.op(Op.WRITE, 0, 0, generation=1)], 1e18)

    def test_generation_is_refused_until_it_is_stored(
        self, harness: TierHarness, opener: Opener, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        harness.store(0, 0)
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", lambda fd: os.close(-1))
            with pytest.raises(TierError, match="superblock: cannot be used: Bad file descriptor"):
                harness.tier.reset(1)
        harness.assert_misses(0, 0, generation=0)
        with pytest.raises(TierError, match=r"generation 1 is newer than the last reset \(0\)"):
            harness.tier.submit([harness.op(Op.WRITE, 1, 1, generation=1)], 1e18)
        harness.tier.reset(1)
        harness.store(1, 1, generation=1)
        harness.tier.close()
        tier = opener()
        assert tier.generation == 1
        assert tier.recover() == [StoredChunk(1, key(1), None)]

    def test_late_write_of_a_forgotten_generation_is_dropped(self, harness: TierHarness) -> None:
        harness.tier.reset(1)
        harness.store(0, 0)
        assert harness.run(harness.op(Op.WRITE, 0, 1, generation=0)) == (Status.CANCELLED,)
        harness.assert_serves(0, 0)

    def test_what_pads_an_image_on_disk_is_zero(self, harness_of: Callable[..., TierHarness], directory: Path) -> None:
        harness = harness_of(threads=1)
        unaligned = harness.offset(0) + 1
        harness.store(0, 0, offset=unaligned)
        harness.store(1, 1, offset=unaligned, length=DISK_PAGE + 1)
        record = (directory / "segment").read_bytes()[STRIDE : 2 * STRIDE]
        assert record[DISK_PAGE : 2 * DISK_PAGE + 1] == image(1, DISK_PAGE + 1).tobytes()
        assert record[2 * DISK_PAGE + 1 :] == bytes(IMAGE - DISK_PAGE - 1)

    def test_closed_is_closed(self, opener: Opener) -> None:
        tier = opener()
        tier.close()
        with pytest.raises(TierClosedError):
            tier.reset(1)
        with pytest.raises(TierClosedError):
            tier.recover()


class TestRot:
    BITS = (0, 7, 8 * DISK_PAGE - 1, 8 * DISK_PAGE, 8 * IMAGE - 1, 8 * IMAGE // 2 + 3)

    @pytest.mark.parametrize("bit", BITS)
    def test_one_bit_of_an_image(self, harness: TierHarness, directory: Path, bit: int) -> None:
        harness.store(2, 0)
        flip_image_bit(directory, 2, bit)
        assert harness.load(2, 0)[0] is Status.CORRUPT
        flip_image_bit(directory, 2, bit)
        harness.assert_serves(2, 0)

    def test_one_bit_of_an_image_is_served_without_checksums(
        self, harness: TierHarness, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(RecordVerifier, "check_image", lambda self, header, computed: Status.OK)
        harness.store(2, 0)
        flip_image_bit(directory, 2, 0)
        status, found = harness.load(2, 0)
        assert status is Status.OK
        assert (found != image(0, IMAGE)).sum() == 1

    @pytest.mark.parametrize("bit", [0, 8 * 8, 8 * 16, 8 * 48, 8 * 112, 8 * 144, 8 * 2000, 8 * DISK_PAGE - 1])
    def test_one_bit_of_a_header(self, harness: TierHarness, directory: Path, bit: int) -> None:
        harness.store(2, 0)
        flip_header_bit(directory, 2, bit)
        assert harness.load(2, 0)[0] is Status.CORRUPT
        assert harness.tier.recover() == []

    def test_a_record_in_the_wrong_slot(self, harness: TierHarness, directory: Path) -> None:
        harness.store(0, 0)
        with (directory / "segment").open("r+b") as segment:
            record = segment.read(STRIDE)
            segment.seek(3 * STRIDE)
            segment.write(record)
            os.fsync(segment.fileno())
        assert harness.load(3, 0)[0] is Status.MISMATCH
        assert harness.tier.recover() == [StoredChunk(0, key(0), None)]
        harness.store(0, 1)
        assert harness.tier.recover() == [StoredChunk(0, key(1), None)]


class TestTornRecords:
    SECTOR = 512

    def test_any_mixture_of_two_records_is_a_miss(self, harness: TierHarness, directory: Path) -> None:
        segment = os.open(directory / "segment", os.O_RDWR)
        records = []
        for number in (0, 1):
            harness.store(1, number)
            records.append(os.pread(segment, STRIDE, STRIDE))
        served = []
        for torn in range(0, STRIDE + 1, self.SECTOR):
            os.pwrite(segment, records[1][:torn] + records[0][torn:], STRIDE)
            os.fsync(segment)
            for number in (0, 1):
                status, found = harness.load(1, number)
                assert status in {Status.OK, Status.CORRUPT, Status.MISMATCH}
                if status is Status.OK:
                    np.testing.assert_array_equal(found, image(number, IMAGE))
                    served.append((torn, number))
        os.close(segment)
        # The last sectors of a header page are the same zeros in both, except for the checksum in the very last.
        assert served == [(0, 0), (STRIDE, 1)]

    @pytest.mark.parametrize("left", [0, 1, 511, DISK_PAGE, DISK_PAGE + 1, 2 * DISK_PAGE + 17, STRIDE - 1])
    def test_trap_35_a_truncated_record_is_a_miss(self, harness: TierHarness, directory: Path, left: int) -> None:
        harness.store(SLOTS - 1, 0)
        os.truncate(directory / "segment", (SLOTS - 1) * STRIDE + left)
        assert harness.load(SLOTS - 1, 0)[0] is Status.SHORT
        harness.reopen()
        assert harness.tier.recover() == []
        assert harness.load(SLOTS - 1, 0)[0] in {Status.CORRUPT, Status.MISMATCH}
