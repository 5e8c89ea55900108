"""The index of the file tier: what a later process is told of, after a close, a kill, a lost or damaged file."""

import errno
import logging
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from longshore.boundary import Slabs, Status, StoredChunk
from longshore.errors import TierError
from longshore.testing import TierHarness, TierTests, flip_header_bit, flip_image_bit
from longshore.testing.tier_harness import key
from longshore.tiers.arena import DISK_PAGE
from longshore.tiers.base import Op
from longshore.tiers.file import FileTier
from longshore.tiers.file.directory import Directory
from longshore.tiers.file.format import ENTRY, JOURNAL_RECORD, Entries, RecordHeader, pack_entry, sequence
from longshore.tiers.file.index import RecordIndex, journal_records_for
from longshore.tiers.file.recovery import load
from plain_io import PlainIo

IMAGE, SLOTS = TierTests.image_bytes, TierTests.slots

Opener = Callable[..., FileTier]


def found(tier: FileTier) -> dict[int, bytes]:
    return {chunk.slot: chunk.key for chunk in tier.recover()}


@pytest.fixture
def killed(harness: TierHarness, opener: Opener, directory: Path, tmp_path: Path) -> Callable[..., FileTier]:
    """Opens what a `kill -9` would leave of the directory now: all that has reached the system, and nothing else."""

    def reopen(**settings: object) -> FileTier:
        shutil.copytree(directory, tmp_path / "copy", dirs_exist_ok=True)
        harness.tier.close()
        shutil.rmtree(directory)
        (tmp_path / "copy").rename(directory)
        harness.tier = opener(**settings)
        return harness.tier

    return reopen


class TestWhatALaterProcessIsToldOf:
    def test_all_that_was_reported_as_written_also_after_a_kill(
        self, harness: TierHarness, killed: Callable[..., FileTier]
    ) -> None:
        for slot in range(SLOTS):
            harness.store(slot, slot, parent=key(slot - 1) if slot else None)
        expected = [StoredChunk(slot, key(slot), key(slot - 1) if slot else None) for slot in range(SLOTS)]
        assert killed().recover() == expected

    def test_a_write_that_failed_leaves_nothing_listed(self, harness_of: Callable[..., TierHarness]) -> None:
        class Full(PlainIo):
            full = False

            def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int:
                if self.full:
                    raise OSError(errno.ENOSPC, "No space left on device")
                return super().pwritev(fd, buffers, offset)

        io = Full()
        harness = harness_of(io=io)
        harness.store(0, 0)
        io.full = True
        assert harness.run(harness.op(Op.WRITE, 0, 1)) == (Status.NO_SPACE,)
        assert harness.tier.recover() == []

    @pytest.mark.parametrize("flip", [flip_header_bit, flip_image_bit])
    def test_what_was_found_corrupt_is_not_adopted_again(
        self,
        harness: TierHarness,
        directory: Path,
        killed: Callable[..., FileTier],
        flip: Callable[[Path, int, int], None],
    ) -> None:
        harness.store(0, 0)
        harness.store(1, 1)
        flip(directory, 0, 100)
        assert harness.load(0, 0)[0] is Status.CORRUPT
        assert found(killed()) == {1: key(1)}

    def test_asking_for_another_key_condemns_nothing(
        self, harness: TierHarness, killed: Callable[..., FileTier]
    ) -> None:
        harness.store(0, 0)
        harness.assert_misses(0, 1)
        assert found(killed()) == {0: key(0)}

    def test_newest_record_of_a_key_is_listed(self, harness: TierHarness, killed: Callable[..., FileTier]) -> None:
        for slot, number in ((3, 5), (1, 5), (0, 6), (2, 5), (1, 7)):
            harness.store(slot, number)
        assert found(killed()) == {0: key(6), 1: key(7), 2: key(5)}

    def test_what_was_forgotten_is_not_listed(self, harness: TierHarness, killed: Callable[..., FileTier]) -> None:
        harness.store(0, 0)
        harness.tier._index.checkpoint()  # type: ignore[attr-defined]
        harness.tier.reset(1)
        assert harness.tier.recover() == []
        harness.store(1, 1)
        assert found(killed()) == {1: key(1)}

    def test_the_order_of_use_survives_a_close(self, harness: TierHarness) -> None:
        for slot in range(4):
            harness.store(slot, slot)
        harness.assert_serves(1, 1)
        harness.assert_serves(0, 0)
        for _ in range(2):
            assert [chunk.slot for chunk in harness.tier.recover()] == [2, 3, 1, 0]
            harness.reopen()

    def test_use_order_after_kill_is_checkpoint_then_later_writes(
        self, harness: TierHarness, killed: Callable[..., FileTier]
    ) -> None:
        for slot in range(4):
            harness.store(slot, slot)
        harness.assert_serves(0, 0)
        harness.tier._index.checkpoint()  # type: ignore[attr-defined]
        harness.assert_serves(1, 1)
        harness.store(2, 5)
        assert [chunk.slot for chunk in killed().recover()] == [1, 3, 0, 2]


class TestDamage:
    @pytest.mark.parametrize("damaged", [("index.0", "index.1"), ("journal.0", "journal.1")])
    @pytest.mark.parametrize("how", ["removed", "zeroed", "noise", "cut"])
    def test_every_header_is_read_without_a_usable_index(
        self, harness: TierHarness, directory: Path, damaged: tuple[str, ...], how: str
    ) -> None:
        for slot in range(SLOTS):
            harness.store(slot, slot)
        harness.tier.close()
        for name in damaged:
            path = directory / name
            noise = {"zeroed": bytes(DISK_PAGE), "noise": os.urandom(DISK_PAGE), "cut": b"LNGSH"}
            path.unlink() if how == "removed" else path.write_bytes(noise[how])
        harness.reopen()
        assert found(harness.tier) == {slot: key(slot) for slot in range(SLOTS)}  # type: ignore[arg-type]
        harness.assert_serves(3, 3)

    def test_damaged_checkpoint_is_replaced_by_another_or_headers(self, harness: TierHarness, directory: Path) -> None:
        for name in ("index.0", "index.1"):
            harness.store(0, 0)
            harness.tier._index.checkpoint()  # type: ignore[attr-defined]
            harness.store(1, 1)
            harness.store(0, 2)
            harness.tier.close()
            with (directory / name).open("r+b") as file:
                file.seek(DISK_PAGE + 5)
                file.write(b"\xff\xff")
            harness.reopen()
            assert found(harness.tier) == {0: key(2), 1: key(1)}  # type: ignore[arg-type]

    def test_a_header_that_cannot_be_read_is_left_out(
        self, harness: TierHarness, opener: Opener, directory: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        harness.store(0, 0)
        harness.store(1, 1)
        harness.tier.close()
        for name in ("index.0", "index.1"):
            (directory / name).unlink()

        class Bad(PlainIo):
            def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int:
                if len(buffers[0]) == DISK_PAGE and offset == DISK_PAGE + IMAGE:
                    raise OSError(errno.EIO, "Input/output error")
                return super().preadv(fd, buffers, offset)

        with caplog.at_level(logging.WARNING):
            assert found(opener(io=Bad())) == {0: key(0)}
        assert "the record in slot 1 is lost" in caplog.text
        assert "no usable index" in caplog.text


class NotesRefused(PlainIo):
    """A disk that refuses what is written to a file whose name begins like this."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.refusing = False
        self.only_once = False
        self.refused = 0

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int, /) -> int:
        if self.refusing and Path(f"/proc/self/fd/{fd}").readlink().name.startswith(self.name):
            self.refused += 1
            self.refusing = not self.only_once
            raise OSError(errno.EIO, "Input/output error")
        return super().pwrite(fd, data, offset)


class TestWhenTheIndexCannotBeWritten:
    def test_tier_continues_without_journal_until_the_next_checkpoint(
        self, harness_of: Callable[..., TierHarness], caplog: pytest.LogCaptureFixture
    ) -> None:
        io = NotesRefused("journal")
        harness = harness_of(io=io)
        io.refusing = io.only_once = True
        harness.store(0, 0)
        assert "are lost if the process ends before the next checkpoint" in caplog.text
        _until(lambda: not harness.tier._index.due)  # type: ignore[attr-defined]
        assert io.refused == 1
        harness.assert_serves(0, 0)

    def test_failed_checkpoint_keeps_the_last_one_and_can_retry(
        self, harness_of: Callable[..., TierHarness], directory: Path, tmp_path: Path, opener: Opener
    ) -> None:
        io = NotesRefused("index")
        harness = harness_of(io=io)
        harness.store(0, 0)
        io.refusing = True
        for number in (1, 2):
            with pytest.raises(TierError, match=r"index\.[01]: cannot be used: Input/output error"):
                harness.tier._index.checkpoint()  # type: ignore[attr-defined]
            harness.store(number, number)
        shutil.copytree(directory, tmp_path / "copy")
        io.refusing = False
        harness.tier._index.checkpoint()  # type: ignore[attr-defined]
        harness.store(0, 3)
        harness.tier.close()
        for expected in ({0: key(3), 1: key(1), 2: key(2)}, {0: key(0), 1: key(1), 2: key(2)}):
            tier = opener()
            assert found(tier) == expected
            tier.close()
            shutil.rmtree(directory)
            if (tmp_path / "copy").exists():
                (tmp_path / "copy").rename(directory)

    def test_close_without_a_last_checkpoint_is_a_warning(
        self, harness_of: Callable[..., TierHarness], opener: Opener, caplog: pytest.LogCaptureFixture
    ) -> None:
        io = NotesRefused("index")
        harness = harness_of(io=io)
        harness.store(0, 0)
        io.refusing = True
        harness.tier.close()
        assert io.refused == 1
        assert "may be lost at a restart" in caplog.text
        assert found(opener()) == {0: key(0)}


def _until(done: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 30
    while not done():
        assert time.monotonic() < give_up
        time.sleep(0.001)


class TestJournalsThatFillUp:
    def test_checkpoints_are_made_by_themselves(
        self, harness: TierHarness, directory: Path, killed: Callable[..., FileTier]
    ) -> None:
        before = {name: (directory / name).read_bytes()[:DISK_PAGE] for name in ("index.0", "index.1")}
        written = {}
        for number in range(3 * journal_records_for(SLOTS) // 2):
            harness.store(number % SLOTS, number, length=DISK_PAGE)
            written[number % SLOTS] = key(number)
        _until(lambda: not harness.tier._index.due)  # type: ignore[attr-defined]
        assert {name: (directory / name).read_bytes()[:DISK_PAGE] for name in before} != before
        assert found(killed()) == written

    def test_a_full_journal_stays_within_its_file(self, directory: Path) -> None:
        opened = Directory(directory)
        index = RecordIndex(opened, Slabs.of_one_size(2 * DISK_PAGE, 4), np.zeros(0, ENTRY), 1, sequence(1, 0))
        for number in range(2 * journal_records_for(4)):
            index.invalidate([(number % 4, 0)])
            index.insert([_record(number % 4, number + 1)])
            index.flush()
        assert index.due
        size = (directory / "journal.1").stat().st_size
        assert size <= 2 * DISK_PAGE + (4 + journal_records_for(4)) * JOURNAL_RECORD.itemsize
        index.checkpoint()
        index.insert([_record(0, 9999)])
        index.flush()
        index.close()
        again = load(opened, 1).entries
        assert sorted(zip(again["slot"].tolist(), again["sequence"].tolist(), strict=True)) == [
            (0, 9999), (1, 510), (2, 511), (3, 512)
        ]  # fmt: skip
        opened.close()


def _record(slot: int, written: int) -> RecordHeader:
    return RecordHeader(written.to_bytes(32, "little"), None, bytes(32), slot, 0, DISK_PAGE, written, 0)


def test_half_a_million_records_are_listed_from_the_index_alone(directory: Path) -> None:
    """Nothing of the segment is read: there is none."""
    many = 500_000
    opened = Directory(directory)
    RecordIndex(opened, Slabs.of_one_size(2 * DISK_PAGE, many), _many(many), 1, sequence(1, 0)).close()
    again = load(opened, 1).entries
    assert again is not None
    np.testing.assert_array_equal(again, _many(many))
    opened.close()


def _many(count: int) -> Entries:
    entries = np.repeat(np.frombuffer(pack_entry(_record(0, 1), 0), ENTRY), count)
    entries["slot"] = np.arange(count)
    return entries
