"""Every record verified: what `fsck` finds, and what is refused before anything is read."""

from __future__ import annotations

import os
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from longshore.checksums import digest
from longshore.errors import FormatError, TierError, TierInUseError
from longshore.testing import TierHarness, TierTests, flip_header_bit, flip_image_bit
from longshore.testing.tier_harness import key
from longshore.tiers.arena import DISK_PAGE
from longshore.tiers.file.directory import COPIES
from longshore.tiers.file.format import Superblock, pack_superblock
from longshore.tiers.file.fsck import Condition, Fsck, inspect
from longshore.tiers.file.index import checkpoint_name

IMAGE, SLOTS = TierTests.image_bytes, TierTests.slots
STRIDE = DISK_PAGE + IMAGE


def found(directory: Path) -> list[Condition]:
    with Fsck(directory) as fsck:
        return [finding.condition for finding in fsck.records()]


def test_whole_and_empty_slots(harness: TierHarness, directory: Path) -> None:
    for slot in (1, 3):
        harness.store(slot, slot, length=IMAGE - 100 * slot)
    harness.tier.close()
    expected = [Condition.EMPTY] * SLOTS
    expected[1] = expected[3] = Condition.WHOLE
    assert found(directory) == expected
    with Fsck(directory) as fsck:
        headers = {finding.slot: finding.header for finding in fsck.records() if finding.header}
    assert {slot: header.key for slot, header in headers.items()} == {1: key(1), 3: key(3)}


@pytest.mark.parametrize(
    ("damage", "condition"),
    [
        (lambda path: flip_header_bit(path, 2, 8 * 20), Condition.TORN_HEADER),
        (lambda path: flip_image_bit(path, 2, 8 * IMAGE - 1), Condition.TORN_IMAGE),
        (lambda path: copy_slot(path, 5, 2), Condition.MISPLACED),
    ],
    ids=["header", "image", "place"],
)
def test_damage_is_named_and_repaired(
    harness: TierHarness, directory: Path, damage: Callable[[Path], None], condition: Condition
) -> None:
    for slot in range(SLOTS):
        harness.store(slot, slot)
    harness.tier.close()
    damage(directory)
    with Fsck(directory) as fsck:
        findings = {finding.slot: finding for finding in fsck.records()}
        assert {slot for slot, each in findings.items() if each.condition.is_damage} == {2}
        assert findings[2].condition is condition
        fsck.repair([findings[2]])
    assert found(directory) == [Condition.WHOLE] * 2 + [Condition.EMPTY] + [Condition.WHOLE] * 5
    harness.reopen()
    assert {chunk.slot for chunk in harness.tier.recover()} == set(range(SLOTS)) - {2}
    harness.assert_misses(2, 2)
    harness.assert_serves(3, 3)


def copy_slot(directory: Path, source: int, target: int) -> None:
    with (directory / "segment").open("r+b") as file:
        file.seek(source * STRIDE)
        record = file.read(STRIDE)
        file.seek(target * STRIDE)
        file.write(record)


def test_records_of_earlier_generations_are_no_damage(harness: TierHarness, directory: Path) -> None:
    harness.store(0, 0)
    harness.tier.reset(1)
    harness.store(1, 1, generation=1)
    harness.tier.close()
    assert Counter(found(directory)) == {Condition.STALE: 1, Condition.WHOLE: 1, Condition.EMPTY: SLOTS - 2}


def test_a_segment_that_ends_early(harness: TierHarness, directory: Path) -> None:
    for slot in range(SLOTS):
        harness.store(slot, slot)
    harness.tier.close()
    os.truncate(directory / "segment", 5 * STRIDE + DISK_PAGE + 10)
    with Fsck(directory) as fsck:
        assert (fsck.slabs.slabs, fsck.missing) == (6, 2)
        assert [finding.condition for finding in fsck.records()] == [Condition.WHOLE] * 5 + [Condition.SHORT]


def test_a_slot_that_cannot_be_read(harness: TierHarness, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harness.store(0, 0)
    harness.tier.close()
    with Fsck(directory) as fsck:
        preadv, fired = fsck._io.preadv, []

        def fail(fd: int, buffers: object, offset: int) -> int:
            if offset == 3 * STRIDE:
                fired.append(offset)
                raise OSError(5, "Input/output error")
            return preadv(fd, buffers, offset)  # type: ignore[arg-type]

        monkeypatch.setattr(fsck._io, "preadv", fail)
        conditions = [finding.condition for finding in fsck.records()]
    assert fired
    assert conditions[3] is Condition.UNREADABLE
    assert conditions[0] is Condition.WHOLE


class TestRefusals:
    def test_a_missing_directory_is_not_made(self, tmp_path: Path) -> None:
        with pytest.raises(TierError, match="does not exist"):
            Fsck(tmp_path / "nowhere")
        assert not (tmp_path / "nowhere").exists()

    def test_what_is_no_directory(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(TierError, match="is not a directory"):
            Fsck(tmp_path / "file")

    def test_a_directory_of_something_else_is_left_as_it_is(self, tmp_path: Path) -> None:
        (tmp_path / "photos").mkdir(mode=0o700)
        with pytest.raises(TierError, match="has no superblock"):
            Fsck(tmp_path / "photos")
        assert not list((tmp_path / "photos").iterdir())

    def test_a_directory_in_use(self, harness: TierHarness, directory: Path) -> None:
        with pytest.raises(TierInUseError):
            Fsck(directory)
        harness.store(0, 0)

    def test_it_is_released_again(self, harness: TierHarness, directory: Path) -> None:
        harness.tier.close()
        with Fsck(directory), pytest.raises(TierInUseError):
            Fsck(directory)
        harness.reopen()

    def test_another_version(self, harness: TierHarness, directory: Path) -> None:
        harness.tier.close()
        page = bytearray((directory / "superblock").read_bytes())
        page[8] = 99
        for name in COPIES:
            (directory / name).write_bytes(page)
        with pytest.raises(FormatError, match="format version"):
            Fsck(directory)

    @pytest.mark.parametrize("image_bytes", [2**40, 2**62 // DISK_PAGE * DISK_PAGE])
    def test_giant_images_take_no_memory(self, harness: TierHarness, directory: Path, image_bytes: int) -> None:
        harness.tier.close()
        forged = Superblock(1, DISK_PAGE + image_bytes, (image_bytes,), 0, 1)
        for name in COPIES:
            (directory / name).write_bytes(pack_superblock(forged))
        with pytest.raises(TierError, match="less than one slab of"):
            Fsck(directory)

    def test_giant_numbers_of_slots_end(self, harness: TierHarness, directory: Path) -> None:
        harness.store(0, 0)
        harness.tier.close()
        for name in COPIES:
            (directory / name).write_bytes(pack_superblock(Superblock(2**31, STRIDE, (IMAGE,), 0, 1)))
        with Fsck(directory) as fsck:
            assert fsck.slabs.slabs <= SLOTS + 1
            assert fsck.missing > 2**30
            assert next(fsck.records()).condition is Condition.WHOLE

    def test_a_header_with_a_giant_length_is_not_followed(self, harness: TierHarness, directory: Path) -> None:
        harness.store(0, 0)
        harness.tier.close()
        with (directory / "segment").open("r+b") as file:
            page = bytearray(file.read(DISK_PAGE))
            struct.pack_into("<Q", page, 128, 2**62)
            struct.pack_into("<Q", page, DISK_PAGE - 8, digest(bytes(page[: DISK_PAGE - 8])))
            file.seek(0)
            file.write(page)
        with Fsck(directory) as fsck:
            assert next(fsck.records()).condition is Condition.MISPLACED


class TestInspection:
    def test_scopes_ages_and_reads(
        self, harness: TierHarness, directory: Path, harness_of: Callable[..., TierHarness]
    ) -> None:
        for slot in range(4):
            harness.store(slot, slot, length=IMAGE - DISK_PAGE)
        for _ in range(3):
            harness.assert_serves(2, 2, length=IMAGE - DISK_PAGE)
        harness.tier.close()
        other = harness_of(scope=bytes([9]) * 32)
        other.store(7, 7)
        other.tier.close()
        with Fsck(directory) as fsck:
            entries = fsck.entries()
            now = float(entries["written_at"].max())
            seen = inspect(fsck, fsck.headers(), now)
            later = inspect(fsck, fsck.headers(), now + 3 * 24 * 3600)
        assert (seen.slabs, seen.records, seen.stale, seen.from_index) == (SLOTS, 5, 0, True)
        assert [(each.records, each.bytes, each.reads) for each in seen.scopes] == [
            (4, 4 * IMAGE - 4 * DISK_PAGE, 3),
            (1, IMAGE, 0),
        ]
        assert seen.scopes[1].scope == (bytes([9]) * 32).hex()
        assert {age.written: age.records for age in seen.ages if age.records} == {"in the last hour": 5}
        assert {age.written: age.records for age in later.ages if age.records} == {"in the last week": 5}

    def test_without_an_index_from_the_headers(self, harness: TierHarness, directory: Path) -> None:
        harness.store(1, 1)
        harness.tier.reset(1)
        harness.store(2, 2, generation=1)
        harness.tier.close()
        for epoch in (0, 1):
            (directory / checkpoint_name(epoch)).unlink(missing_ok=True)
        with Fsck(directory) as fsck:
            seen = inspect(fsck, fsck.headers(), 0.0)
        assert (seen.from_index, seen.records, seen.stale) == (False, 1, 1)
        assert [(age.written, age.records) for age in seen.ages if age.records] == [("not known", 1)]

    def test_nothing_at_all(self, harness: TierHarness, directory: Path) -> None:
        harness.tier.close()
        with Fsck(directory) as fsck:
            seen = inspect(fsck, fsck.headers(), 0.0)
        assert (seen.records, seen.scopes) == (0, ())
        assert np.array([age.records for age in seen.ages]).sum() == 0
