"""What was struck stays struck: through full journals, failing disks, failing checkpoints, slabs that change hands."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from depth import deep
from longshore.boundary import Slabs, Status
from longshore.errors import PlanError, TierError
from longshore.testing import TierHarness
from longshore.testing.disk import SimulatedDisk
from longshore.testing.tier_harness import key
from longshore.tiers.arena import DISK_PAGE
from longshore.tiers.base import Op
from longshore.tiers.file.directory import Directory
from longshore.tiers.file.format import (
    ENTRY,
    INSERTED,
    JOURNAL_RECORD,
    RecordHeader,
    fits_geometry,
    pack_entry,
    pack_journal_record,
    sequence,
)
from longshore.tiers.file.index import RecordIndex, index_files, journal_records_for
from longshore.tiers.file.recovery import load
from plain_io import PlainIo

ONE_SIZE = Slabs.of_one_size(2 * DISK_PAGE, 6)
TWO_SIZES = Slabs(6 * DISK_PAGE, (2 * DISK_PAGE, 3 * DISK_PAGE), 3)


class Flaky(SimulatedDisk):
    """A disk of which some writes fail, after a part of them; and all to files whose names begin with `refuses`."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__(remember=False)
        self.chance = 0.0
        self.refuses = "-"
        self.fired = 0
        self._dice = dice

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int, /) -> int:
        if self._name(fd).startswith(self.refuses):
            self.fired += 1
            raise OSError(errno.EIO, "Input/output error")
        if self._dice.random() < self.chance:
            self.fired += 1
            part = bytes(data)[: self._dice.randrange(len(data) + 1)]
            if part:
                super().pwrite(fd, part, offset)
            raise OSError(errno.EIO, "Input/output error")
        return super().pwrite(fd, data, offset)


class World:
    """An index, and what it ought to know."""

    def __init__(self, slabs: Slabs, seed: int) -> None:
        self.dice = random.Random(seed)
        self.disk = Flaky(self.dice)
        self.slabs = slabs
        self.directory = Directory(Path("/simulated"), self.disk)
        for name, nbytes in index_files(slabs.indices).items():
            self.directory.io.close(self.directory.reserve(name, nbytes))
        self.index = RecordIndex(self.directory, slabs, np.zeros(0, ENTRY), 1, sequence(1, 0))
        self.live: dict[int, tuple[int, int]] = {}  # pool and sequence number, by slot
        self.dropped: dict[int, tuple[int, int]] = {}  # the same, as long as the disk may not know
        self.serial = 0
        self.refused = 0

    def restart(self) -> None:
        """Another process begins with what the disk says, if it says anything."""
        epoch, entries = load(self.directory, self.slabs.stride)
        if entries is None:
            return
        self.index.close()
        self.index = RecordIndex(self.directory, self.slabs, entries, epoch, sequence(2, self.serial))
        pools, written = entries["size_class"].tolist(), entries["sequence"].tolist()
        self.live = dict(zip(entries["slot"].tolist(), zip(pools, written, strict=True), strict=True))
        self.dropped = {}

    def write(self) -> None:
        """As the tier does; what could not be struck is not overwritten."""
        pool = self.dice.randrange(len(self.slabs.images))
        slot = self.dice.choice(self.slabs.slots_of(self.dice.randrange(self.slabs.slabs), pool))
        try:
            self.index.invalidate([(slot, pool)])
        except OSError:
            self.refused += 1
            return
        self.live, self.dropped = self.without(self.live, slot, pool), self.without(self.dropped, slot, pool)
        self.serial += 1
        written = sequence(1, self.serial)
        self.index.insert([RecordHeader(bytes([slot]) * 32, None, bytes(32), slot, 0, DISK_PAGE, written, 0, pool)])
        self.live[slot] = pool, written

    def without(self, held: dict[int, tuple[int, int]], slot: int, pool: int) -> dict[int, tuple[int, int]]:
        slab = self.slabs.slab_of(slot)
        return {
            each: what
            for each, what in held.items()
            if each != slot and (self.slabs.slab_of(each) != slab or what[0] == pool)
        }

    def drop(self) -> None:
        slots = self.dice.sample(sorted(self.live), min(2, len(self.live)))
        self.index.delete_records(slots)
        for slot in slots:
            self.dropped[slot] = self.live.pop(slot)

    def condemn(self) -> None:
        if self.live:
            slot = self.dice.choice(sorted(self.live))
            self.index.delete_record(slot, self.live[slot][1])
            self.dropped[slot] = self.live.pop(slot)

    def checkpoint(self) -> bool:
        try:
            self.index.checkpoint()
        except TierError:
            return False
        self.dropped = {}
        return True

    def listed(self) -> dict[int, tuple[int, int]] | None:
        """What a process that began now would be told of."""
        entries = load(self.directory, self.slabs.stride).entries
        if entries is None:
            return None
        assert fits_geometry(entries, self.slabs).all()
        pools, written = entries["size_class"].tolist(), entries["sequence"].tolist()
        return dict(zip(entries["slot"].tolist(), zip(pools, written, strict=True), strict=True))

    def close(self) -> None:
        self.index.close()
        self.directory.close()


@pytest.fixture(params=[ONE_SIZE, TWO_SIZES], ids=["one size", "two sizes"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    world = World(request.param, 7)
    yield world
    world.close()


def test_full_journal_loses_insertions_but_no_invalidation(world: World) -> None:
    for _ in range(4 * journal_records_for(world.slabs.indices)):
        world.write()
        world.index.flush()
        listed = world.listed()
        assert listed.items() <= world.live.items()
    assert world.index.due
    assert world.listed() != world.live, "there was room for all"
    world.drop()
    world.condemn()
    listed = world.listed()
    assert listed.items() <= world.live.items()
    assert world.checkpoint()
    assert world.listed() == world.live
    assert not world.index.due
    assert world.refused == 0


@pytest.mark.parametrize("seed", range(deep(1, 3)))
@pytest.mark.parametrize("slabs", [ONE_SIZE, TWO_SIZES], ids=["one size", "two sizes"])
def test_invalidated_records_are_never_listed_on_a_flaky_disk(
    slabs: Slabs, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longshore.tiers.file.index._FEW_RECORDS", 8)  # so that journals are full all the time
    monkeypatch.setattr("longshore.tiers.file.recovery._READ_BYTES", 3 * JOURNAL_RECORD.itemsize)
    world = World(slabs, seed)
    told, partly, done = 0, 0, 0
    for step in range(1500):
        world.disk.chance = 0.15 if step // 100 % 2 else 0.0
        kind = world.dice.random()
        if kind < 0.9:
            world.write()
        elif kind < 0.97:
            world.drop()
        elif kind < 0.98:
            world.condemn()
        elif kind < 0.997 or world.disk.chance:
            done += world.checkpoint()
        else:
            world.restart()
        if world.dice.random() < 0.5:
            world.index.flush()
        listed = world.listed()
        if listed is not None:
            told += 1
            partly += listed != world.live
            assert listed.items() <= world.live.items() | world.dropped.items()
    world.disk.chance = 0.0
    assert world.checkpoint()
    assert world.listed() == world.live
    assert min(world.disk.fired, partly, done) > 2
    assert told > 700
    world.close()


def write_to(world: World, slot: int) -> None:
    """Alone in the index: struck, and entered."""
    world.index.invalidate([(slot, 0)])
    world.serial += 1
    world.index.insert([RecordHeader(bytes(32), None, bytes(32), slot, 0, DISK_PAGE, sequence(1, world.serial), 0)])
    world.index.flush()


def test_failed_checkpoint_does_not_hide_listed_records(world: World) -> None:
    """It knew already of what could not be struck; the one before it does not."""
    write_to(world, 0)
    for refused in ("journal", "index"):
        world.disk.refuses = refused
        world.index.delete_records([0]) if refused == "journal" else world.checkpoint()
    assert world.disk.fired == 2
    world.disk.refuses = "-"
    listed = world.listed()
    assert listed is not None
    assert set(listed) == {0}, "nobody could write it down"
    world.index.invalidate([(0, 0)])
    assert world.listed() == {}


def test_retried_checkpoint_lists_only_records_its_journal_can_invalidate(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longshore.tiers.file.index._FEW_RECORDS", 8)
    world.disk.refuses = "index"
    assert not world.checkpoint()
    for _ in range(20):  # until there is no room for records in the journal that was begun
        write_to(world, 0)
    assert world.index.due
    assert world.listed() == {}
    world.disk.refuses = "journal.1"  # the next journal: only what was begun before is ended
    assert not world.checkpoint()
    world.disk.refuses = "-"
    world.index.invalidate([(0, 0)])
    assert world.listed() == {}
    write_to(world, 1)
    assert world.checkpoint()
    assert set(world.listed() or ()) == {1}


@pytest.mark.parametrize("together", [1, 2, 4096])
def test_stale_journal_bytes_after_the_end_are_ignored(
    world: World, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longshore.tiers.file.recovery._READ_BYTES", together * JOURNAL_RECORD.itemsize)
    for slot in (0, 1):
        write_to(world, slot)
    fd = world.directory.open("journal.1")
    entry = pack_entry(RecordHeader(bytes(32), None, bytes(32), 2, 0, DISK_PAGE, 9, 0), 0)
    world.disk.pwrite(
        fd, pack_journal_record(1, sequence(1, 1), INSERTED, entry), DISK_PAGE + 2 * JOURNAL_RECORD.itemsize
    )
    assert set(world.listed() or ()) == {0, 1}


def test_write_to_a_slab_of_another_size_is_not_indexed() -> None:
    world = World(TWO_SIZES, 0)
    for place in ((0, 0), (1, 1)):
        world.index.invalidate([place])
    world.index.insert([RecordHeader(bytes(32), None, bytes(32), 0, 0, DISK_PAGE, 5, 0, 0)])
    world.index.flush()
    assert world.listed() == {}
    assert len(world.index.entries()) == 0
    world.close()


class NoJournal(PlainIo):
    """A disk that takes nothing for a journal, if so told."""

    refusing = False
    refused = 0

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int, /) -> int:
        if self.refusing and Path(f"/proc/self/fd/{fd}").readlink().name.startswith("journal"):
            self.refused += 1
            raise OSError(errno.EIO, "Input/output error")
        return super().pwrite(fd, data, offset)


def test_what_cannot_be_struck_is_not_overwritten(harness_of: Callable[..., TierHarness]) -> None:
    io = NoJournal()
    harness = harness_of(io=io)
    harness.store(0, 0)
    io.refusing = True
    assert harness.run(harness.op(Op.WRITE, 0, 1)) == (Status.IO_ERROR,)
    assert io.refused > 1, "for the batch, and again for the record"
    harness.assert_serves(0, 0)
    assert [chunk.key for chunk in harness.tier.recover()] == [key(0)]
    io.refusing = False
    harness.store(0, 1)
    harness.reopen()
    assert [chunk.key for chunk in harness.tier.recover()] == [key(1)]


def test_what_was_dropped_is_not_found_again(harness: TierHarness) -> None:
    for slot in range(4):
        harness.store(slot, slot)
    harness.tier.delete_records([1, 3, 3])  # type: ignore[attr-defined]
    for _ in range(2):
        assert {chunk.slot for chunk in harness.tier.recover()} == {0, 2}
        harness.reopen()


def test_a_slot_that_does_not_exist_cannot_be_dropped(harness: TierHarness) -> None:
    harness.store(0, 0)
    with pytest.raises(PlanError, match=r"expected a slot in \[0, 8\), got 8"):
        harness.tier.delete_records([0, 8])  # type: ignore[attr-defined]
    assert {chunk.slot for chunk in harness.tier.recover()} == {0}
