"""A reset that returned has happened: on a full disk, without descriptors, with damaged pages, after a kill."""

from __future__ import annotations

import errno
import itertools
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
from crash_kit import Distinct, Story, after

from longshore.errors import FormatError, TierError
from longshore.testing import TierHarness, TierTests
from longshore.tiers.arena import DISK_PAGE, Arena
from longshore.tiers.file import FileTier, PendingReset, capacity_for
from longshore.tiers.file.directory import COPIES, FILES, RESET
from longshore.tiers.file.format import parse_superblock
from plain_io import PlainIo

IMAGE, SLOTS = TierTests.image_bytes, TierTests.slots
SCOPE = bytes(range(32))
CAPACITY = capacity_for(SLOTS, IMAGE)

Opener = Callable[..., FileTier]


ROOM = CAPACITY + (1 << 20)


class Quota(PlainIo):
    """For those who may not mount a file system: nothing gets a block any more once this is `full`."""

    full = False

    def free_bytes(self, fd: int, /) -> int:
        return 0 if self.full else ROOM

    def open(self, name: str, directory: int, /, *, create: bool) -> int:
        self._check(create and name not in os.listdir(directory))
        return super().open(name, directory, create=create)

    def allocate(self, fd: int, nbytes: int, /) -> None:
        self._check(nbytes > os.fstat(fd).st_blocks * 512)
        super().allocate(fd, nbytes)

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int, /) -> int:
        self._check(offset + len(data) > os.fstat(fd).st_blocks * 512)
        return super().pwrite(fd, data, offset)

    def _check(self, grows: bool) -> None:
        if grows and self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class SmallDisk:
    """A file system of its own, a little larger than a tier."""

    def __init__(self, path: Path, arena: Arena, *, mounted: bool) -> None:
        self.path = path / "tier"
        self.io = None if mounted else Quota()
        self._arena = arena

    def open(self, more: int = 0) -> FileTier:
        """A tier on it, and so many bytes more than it is meant for."""
        return FileTier(
            self.path, capacity=CAPACITY + more, image_bytes=IMAGE, arena=self._arena, scope=SCOPE, io=self.io
        )

    def fill(self) -> None:
        """Take all that is free, and see that there is nothing left."""
        if self.io is not None:
            self.io.full = True
            return
        with pytest.raises(OSError, match="No space"), (self.path.parent / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(DISK_PAGE))
        with pytest.raises(OSError, match="No space"):
            (self.path.parent / "one more").write_bytes(b"x")


@pytest.fixture
def small_disk(tmp_path: Path, arena: Arena) -> Iterator[SmallDisk]:
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={ROOM}", "none", path]
    mounted = os.geteuid() == 0 and not subprocess.run(mount, check=False, capture_output=True).returncode
    yield SmallDisk(path, arena, mounted=mounted)
    if mounted:
        subprocess.run(["umount", "-l", path], check=True)


class TestFullDisk:
    def test_a_reset_is_written_on_a_full_disk(self, small_disk: SmallDisk, arena: Arena) -> None:
        harness = TierHarness(small_disk.open, arena)
        harness.store(0, 0)
        small_disk.fill()
        harness.tier.reset(1)
        harness.store(1, 1)
        harness.reopen()
        assert (harness.tier.generation, [chunk.slot for chunk in harness.tier.recover()]) == (1, [1])
        harness.tier.close()

    def test_a_full_tier_is_opened_again_on_a_full_disk(self, small_disk: SmallDisk, arena: Arena) -> None:
        harness = TierHarness(small_disk.open, arena)
        for slot in range(SLOTS):
            harness.store(slot, slot)
        harness.tier.close()
        small_disk.fill()
        harness.tier = small_disk.open()
        for slot in range(SLOTS):
            harness.assert_serves(slot, slot)
        harness.tier.close()

    def test_an_open_without_room_leaves_nothing_behind(self, small_disk: SmallDisk) -> None:
        with pytest.raises(TierError, match="room for"):
            small_disk.open(more=2 << 20)
        assert {path.name for path in small_disk.path.iterdir() if path.stat().st_blocks} == {"lock"}
        small_disk.open().close()


class LiesAboutRoom(PlainIo):
    """Says that there is room, and has none for the file that is the `nth` to need it."""

    def __init__(self, nth: int) -> None:
        self.left = nth

    def allocate(self, fd: int, nbytes: int, /) -> None:
        super().allocate(fd, nbytes)
        self.left -= 1
        if not self.left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("nth", range(1, 9))
def test_an_open_that_runs_out_of_room_leaves_nothing_behind(opener: Opener, directory: Path, nth: int) -> None:
    io = LiesAboutRoom(nth)
    with pytest.raises(TierError, match="could not allocate"):
        opener(io=io)
    assert io.left == 0
    assert {path.name: path.stat().st_size for path in directory.iterdir() if path.stat().st_size} == {"lock": 16}
    opener()


def test_a_reset_is_written_without_descriptors(harness: TierHarness) -> None:
    harness.store(0, 0)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))  # noqa: PTH208 - `Path` needs more descriptors
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest, limits[1]))
    others: list[int] = []
    try:
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                others.append(os.open(os.devnull, os.O_RDONLY))
        harness.tier.reset(1)
    finally:
        for each in others:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    harness.reopen()
    assert (harness.tier.generation, harness.tier.recover()) == (1, [])


class TestTwins:
    @pytest.mark.parametrize("name", COPIES)
    @pytest.mark.parametrize("bit", [0, 65, 8 * 40, 8 * DISK_PAGE - 1])
    def test_a_flipped_bit_in_one_copy_costs_nothing(
        self, harness: TierHarness, directory: Path, name: str, bit: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        harness.tier.reset(3)
        harness.store(0, 0)
        harness.tier.close()
        page = bytearray((directory / name).read_bytes())
        page[bit // 8] ^= 1 << bit % 8
        (directory / name).write_bytes(page)
        harness.reopen()
        assert harness.tier.generation == 3
        harness.assert_serves(0, 0)
        assert f"{name} is damaged" in caplog.text
        harness.tier.close()
        assert len({(directory / each).read_bytes() for each in COPIES}) == 1, "it was written anew"

    @pytest.mark.parametrize("name", COPIES)
    def test_a_copy_that_is_gone_or_empty_costs_nothing(self, harness: TierHarness, directory: Path, name: str) -> None:
        harness.tier.reset(2)
        harness.store(0, 0)
        for damage in (
            Path.unlink,
            lambda path: path.write_bytes(b""),
            lambda path: path.write_bytes(bytes(DISK_PAGE)),
        ):
            harness.tier.close()
            damage(directory / name)
            harness.reopen()
            assert harness.tier.generation == 2
            harness.assert_serves(0, 0)

    def test_two_damaged_copies_are_refused_and_nothing_touched(
        self, opener: Opener, harness: TierHarness, directory: Path
    ) -> None:
        harness.store(0, 0)
        harness.tier.close()
        for name in COPIES:
            page = bytearray((directory / name).read_bytes())
            page[100] ^= 1
            (directory / name).write_bytes(page)
        before = {path: path.read_bytes() for path in directory.iterdir() if path.name != "lock"}
        for _ in range(2):
            with pytest.raises(FormatError, match="Nothing was changed; remove the directory"):
                opener()
        assert {path: path.read_bytes() for path in directory.iterdir() if path.name != "lock"} == before

    @pytest.mark.parametrize("name", COPIES)
    def test_crash_while_rewriting_a_damaged_copy_leaves_one(self, name: str) -> None:
        story = Story()
        story.reset()
        story.write(0, 1)
        story.close()
        image = dict(story.disk.moments[-1].killed())
        image[name] = b"\1" + image[name][1:]
        again, distinct, random = Story(image), Distinct(), Random(7)
        again.close()
        for moment in again.disk.moments:
            for left in distinct(itertools.chain([moment.killed()], moment.sample(20, random))):
                assert after(left).generation == 1
        assert len(distinct.seen) > 20


class TestPending:
    def test_is_applied_before_anything_is_served(self, harness: TierHarness, directory: Path) -> None:
        harness.store(0, 0)
        pending = PendingReset(directory)  # whoever writes it has not the lock
        pending.write(5)
        pending.close()
        harness.reopen()
        assert (harness.tier.generation, harness.tier.recover()) == (5, [])
        harness.assert_misses(0, 0, generation=0)
        harness.tier.close()
        assert {parse_superblock((directory / name).read_bytes()).generation for name in COPIES} == {5}

    @pytest.mark.parametrize("half", [0, 1])
    def test_survives_damage_to_either_of_its_pages(self, harness: TierHarness, directory: Path, half: int) -> None:
        pending = PendingReset(directory)
        pending.write(5)
        pending.close()
        harness.tier.close()
        data = bytearray((directory / RESET).read_bytes())
        data[half * DISK_PAGE + 20] ^= 1
        (directory / RESET).write_bytes(data)
        harness.reopen()
        assert harness.tier.generation == 5

    def test_damage_to_both_pages_is_refused(self, opener: Opener, harness: TierHarness, directory: Path) -> None:
        harness.tier.close()
        (directory / RESET).write_bytes(b"\1" * FILES[RESET])
        with pytest.raises(FormatError, match=r"reset in it are damaged.*remove the directory"):
            opener()

    def test_survives_the_loss_of_the_superblock(self, harness: TierHarness, directory: Path) -> None:
        pending = PendingReset(directory)
        pending.write(5)
        pending.close()
        harness.tier.close()
        for name in COPIES:
            (directory / name).unlink()
        harness.reopen()
        assert harness.tier.generation == 5

    def test_a_file_that_was_removed_is_said(self, harness: TierHarness, directory: Path) -> None:
        pending = PendingReset(directory)
        (directory / RESET).unlink()
        with pytest.raises(TierError, match="removed"):
            pending.write(1)
        pending.close()
        with pytest.raises(TierError, match="reset"):
            PendingReset(directory)

    def test_every_crash_state_keeps_a_reset_that_returned(self) -> None:
        story = Story()
        story.write(0, 1)
        began = len(story.disk.moments)
        pending = PendingReset(Path("/simulated"), story.disk)
        pending.write(1)
        returned = len(story.disk.moments)
        pending.write(2)
        moments = list(story.disk.moments)
        distinct = Distinct()
        seen = set()
        for number, moment in enumerate(moments[began - 1 :], began):
            for image in distinct(itertools.chain([moment.killed()], moment.sample(40, Random(number)))):
                judged = after(image)
                assert judged.generation in ({0, 1} if number < returned else {1, 2})
                assert not judged.generation or not judged.listed
                seen.add(judged.generation)
        assert seen == {0, 1, 2}
        story.close()
