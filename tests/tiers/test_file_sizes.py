"""The file tier with two image sizes: slabs that change hands, restarts, what capacity counts, damage."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from typer.testing import CliRunner

from depth import examples
from longshore.boundary import Slabs, Status, StoredChunk
from longshore.cli.app import app
from longshore.testing import TierHarness, TierTests, flip_header_bit, flip_image_bit
from longshore.testing.tier_harness import image, key
from longshore.tiers.arena import DISK_PAGE
from longshore.tiers.base import Op
from longshore.tiers.file import FileTier, capacity_of
from longshore.tiers.file.directory import COPIES
from longshore.tiers.file.format import (
    ENTRY,
    RecordHeader,
    pack_checkpoint,
    pack_entry,
    pack_superblock,
    parse_superblock,
)
from longshore.tiers.file.fsck import Condition, Fsck, inspect

SMALL = TierTests.image_bytes
PER_SLAB = 4
SLAB = PER_SLAB * (DISK_PAGE + SMALL)
LARGE = SLAB - DISK_PAGE
SLABS = Slabs(SLAB, (DISK_PAGE + SMALL, SLAB), 4)
SIZES = (SMALL, LARGE)
SCOPE = bytes(range(32))

Opener = Callable[..., FileTier]
Killed = Callable[[], None]


@pytest.fixture
def harness(harness_of: Callable[..., TierHarness]) -> TierHarness:
    harness = harness_of(image_bytes=SIZES, capacity=capacity_of(SLABS), threads=2)
    assert harness.tier.slabs == SLABS
    return harness


@pytest.fixture
def killed(harness: TierHarness, directory: Path, tmp_path: Path) -> Killed:
    """Goes on with what a `kill -9` would leave now."""

    def reopen() -> None:
        shutil.copytree(directory, tmp_path / "copy")
        harness.tier.close()
        shutil.rmtree(directory)
        (tmp_path / "copy").rename(directory)
        harness.reopen()

    return reopen


def large(slab: int, number: int) -> tuple[tuple[int, int], dict[str, int]]:
    """What the harness takes for the only large image of a slab."""
    return (slab * PER_SLAB, number), {"size_class": 1, "length": LARGE}


def store_large(harness: TierHarness, slab: int, number: int) -> None:
    at, what = large(slab, number)
    harness.store(*at, **what)


def serves_large(harness: TierHarness, slab: int, number: int) -> bool:
    at, what = large(slab, number)
    status, found = harness.load(*at, **what)
    assert status is not Status.OK or (found == image(number, LARGE)).all()
    return status is Status.OK


def listed(harness: TierHarness) -> dict[tuple[int, int], bytes]:
    return {(chunk.slot, chunk.size_class): chunk.key for chunk in harness.tier.recover()}


class TestCapacity:
    @pytest.mark.parametrize("surplus", [0, 1, SLAB - 1])
    @pytest.mark.parametrize("slabs", [1, 3])
    def test_counts_all_that_is_on_disk_whichever_images_fill_it(
        self, harness_of: Callable[..., TierHarness], directory: Path, slabs: int, surplus: int
    ) -> None:
        capacity = capacity_of(replace(SLABS, slabs=slabs)) + surplus
        harness = harness_of(image_bytes=SIZES, capacity=capacity)
        assert harness.tier.slabs == replace(SLABS, slabs=slabs)
        for slab in range(slabs):
            for slot in SLABS.slots_of(slab, 0):
                harness.store(slot, slot)
        for slot in range(slabs * PER_SLAB):
            harness.assert_serves(slot, slot)
        store_large(harness, slabs - 1, 77)
        assert serves_large(harness, slabs - 1, 77)
        harness.tier.reset(1)
        harness.tier.close()
        stats = [path.stat() for path in [directory, *directory.iterdir()]]
        assert sum(max(stat.st_size, stat.st_blocks * 512) for stat in stats) <= capacity
        assert sum(path.stat().st_size for path in directory.iterdir()) > capacity - surplus - 3 * DISK_PAGE - 1

    def test_small_images_take_the_room_of_small_images(self, harness: TierHarness) -> None:
        """Four times as many as there would be in slots for large ones."""
        assert sum(len(SLABS.slots_of(slab, 0)) for slab in range(4)) == 16
        assert harness.tier.slabs.nbytes == 16 * (DISK_PAGE + SMALL) == 4 * (DISK_PAGE + LARGE)

    def test_slabs_are_as_small_as_goes_without_losing_much(self, opener: Opener) -> None:
        tier = opener(image_bytes=(3 * DISK_PAGE, 4 * DISK_PAGE), capacity=64 << 20)
        assert tier.slabs.slab_bytes % DISK_PAGE == 0
        assert all(tier.slabs.slab_bytes % size <= tier.slabs.slab_bytes / 16 for size in tier.slabs.image_bytes)

    def test_slabs_keep_their_size_when_the_capacity_changes(self, harness: TierHarness, opener: Opener) -> None:
        sizes = (3 * DISK_PAGE, 10 * DISK_PAGE)
        harness.tier.close()
        before = opener(image_bytes=sizes, capacity=2 << 20)
        slab_bytes, generation = before.slabs.slab_bytes, before.generation
        before.close()
        after = opener(image_bytes=sizes, capacity=64 << 20)
        assert Slabs.within(64 << 20, after.slabs.image_bytes).slab_bytes > slab_bytes, "or there is nothing to keep"
        assert (after.slabs.slab_bytes, after.generation) == (slab_bytes, generation)


class TestASlabThatChangesHands:
    def test_replaced_record_is_gone_for_this_process_and_next(self, harness: TierHarness, killed: Killed) -> None:
        for slot in range(2 * PER_SLAB):
            harness.store(slot, slot)
        harness.tier._index.checkpoint()  # type: ignore[attr-defined]
        store_large(harness, 0, 50)
        for _ in range(2):
            assert listed(harness) == {(0, 1): key(50)} | {(slot, 0): key(slot) for slot in range(4, 8)}
            for slot in range(PER_SLAB):
                harness.assert_misses(slot, slot)
            assert serves_large(harness, 0, 50)
            harness.assert_serves(5, 5)
            killed()

    def test_and_back_again(self, harness: TierHarness, killed: Killed) -> None:
        harness.store(1, 1)
        harness.tier._index.checkpoint()  # type: ignore[attr-defined]
        store_large(harness, 0, 50)
        harness.store(2, 2)
        for _ in range(2):
            assert listed(harness) == {(2, 0): key(2)}
            assert not serves_large(harness, 0, 50)
            harness.assert_serves(2, 2)
            killed()

    def test_write_that_never_begins_still_ends_the_old_record(self, harness: TierHarness, killed: Killed) -> None:
        """As a slot does: who orders it has given up what it held."""
        harness.store(1, 1)
        at, what = large(0, 50)
        write = harness.op(Op.WRITE, *at, **what)
        assert harness.run(write, deadline=0.0) == (Status.DEADLINE,)
        assert listed(harness) == {}
        harness.assert_misses(1, 1)
        killed()
        assert listed(harness) == {}

    def test_other_slabs_are_as_they_were(self, harness: TierHarness) -> None:
        store_large(harness, 2, 60)
        for slot in (3, 4, 12):
            harness.store(slot, slot)
        store_large(harness, 1, 61)
        assert listed(harness) == {(8, 1): key(60), (3, 0): key(3), (12, 0): key(12), (4, 1): key(61)}
        assert serves_large(harness, 2, 60)

    def test_a_record_of_another_size_is_not_taken_for_ours(self, harness: TierHarness) -> None:
        """The same key, slot, place and length: only the size of its slot is another."""
        harness.store(4, 9, length=DISK_PAGE)
        assert harness.load(4, 9, length=DISK_PAGE)[0] is Status.OK
        assert harness.load(4, 9, length=DISK_PAGE, size_class=1)[0] is Status.MISMATCH


class TestRestart:
    def test_pools_parents_and_order_survive(self, harness: TierHarness) -> None:
        harness.store(5, 1)
        at, what = large(0, 2)
        harness.store(*at, parent=key(1), **what)
        harness.store(4, 3, parent=key(2))
        expected = [
            StoredChunk(5, key(1), None, 0), StoredChunk(0, key(2), key(1), 1), StoredChunk(4, key(3), key(2), 0)
        ]  # fmt: skip
        for _ in range(2):
            assert harness.tier.recover() == expected
            harness.reopen()

    @pytest.mark.parametrize("sizes", [(SMALL,), (SMALL, LARGE, LARGE + DISK_PAGE), (DISK_PAGE, LARGE)])
    def test_other_sizes_start_empty(self, harness: TierHarness, opener: Opener, sizes: tuple[int, ...]) -> None:
        harness.store(0, 0)
        store_large(harness, 1, 1)
        harness.tier.close()
        harness.tier = opener(image_bytes=sizes, capacity=1 << 20)
        assert harness.tier.recover() == []
        assert len(harness.tier._index.entries()) == 0  # type: ignore[attr-defined]
        assert harness.tier.generation == 1
        harness.assert_misses(0, 0, generation=0, length=DISK_PAGE)
        harness.tier.close()
        harness.tier = opener(image_bytes=SIZES, capacity=capacity_of(SLABS))
        assert harness.tier.recover() == []
        harness.assert_misses(0, 0)

    def test_newest_record_tells_a_slabs_owner_without_index(self, harness: TierHarness, directory: Path) -> None:
        for slot in range(2 * PER_SLAB):
            harness.store(slot, slot)
        store_large(harness, 0, 50)
        store_large(harness, 2, 51)
        harness.store(9, 9)
        harness.tier.close()
        for name in ("index.0", "index.1", "journal.0", "journal.1"):
            (directory / name).unlink()
        harness.reopen()
        kept = {(slot, 0): key(slot) for slot in range(4, 8)}
        assert listed(harness) == {(0, 1): key(50), (9, 0): key(9)} | kept
        assert serves_large(harness, 0, 50)
        harness.assert_serves(9, 9)

    def test_entries_beyond_the_slots_of_a_size_are_ignored(self, harness: TierHarness, directory: Path) -> None:
        store_large(harness, 0, 50)
        harness.tier.close()
        header = RecordHeader(key(7), None, SCOPE, 5, 0, DISK_PAGE, 9, 0, size_class=1)
        lies = [pack_entry(header, 0), pack_entry(header._replace(slot=8, size_class=2), 0)]
        page, body = pack_checkpoint(1000, np.frombuffer(b"".join(lies), ENTRY), 0)
        for name in ("index.0", "index.1", "journal.0", "journal.1"):
            (directory / name).write_bytes(page + body if name == "index.0" else b"")
        harness.reopen()
        assert listed(harness) == {}

    def test_slabs_above_an_untrimmed_end_are_not_recovered(self, harness: TierHarness, directory: Path) -> None:
        """As a crash leaves it between the superblock of a smaller tier and the cut."""
        store_large(harness, 1, 1)
        store_large(harness, 3, 3)
        harness.tier.close()
        before = parse_superblock((directory / "superblock").read_bytes())
        for name in COPIES:
            (directory / name).write_bytes(pack_superblock(before._replace(slabs=2)))
        harness.reopen()
        assert listed(harness) == {(4, 1): key(1)}

    def test_less_capacity_loses_the_slabs_above(self, harness: TierHarness, opener: Opener) -> None:
        for slab in (0, 2):
            store_large(harness, slab, slab)
        harness.store(5, 5)
        harness.tier.close()
        harness.tier = opener(image_bytes=SIZES, capacity=capacity_of(replace(SLABS, slabs=2)))
        assert listed(harness) == {(0, 1): key(0), (5, 0): key(5)}
        harness.tier.close()
        harness.tier = opener(image_bytes=SIZES, capacity=capacity_of(SLABS))
        assert listed(harness) == {(0, 1): key(0), (5, 0): key(5)}
        assert not serves_large(harness, 2, 2)


class TestDamage:
    @pytest.mark.parametrize("bit", [0, 8 * 112, 8 * 152, 8 * DISK_PAGE - 1])
    def test_bits_of_a_large_record(self, harness: TierHarness, directory: Path, bit: int) -> None:
        store_large(harness, 1, 1)
        for flip, at in ((flip_header_bit, bit), (flip_image_bit, 8 * LARGE - 1 - bit)):
            flip(directory, PER_SLAB, at, size_class=1)
            assert not serves_large(harness, 1, 1)
            flip(directory, PER_SLAB, at, size_class=1)
            assert serves_large(harness, 1, 1)

    @examples(25, suppress_health_check=list(HealthCheck))
    @given(
        places=st.lists(
            st.tuples(
                st.sampled_from(["index.0", "index.1", "journal.0", "journal.1", "segment"]), st.integers(0, 2**64 - 1)
            ),
            min_size=1,
            max_size=8,
        )
    )
    def test_whatever_is_written_over_its_files_nothing_wrong_is_served(
        self, harness_of: Callable[..., TierHarness], directory: Path, places: list[tuple[str, int]]
    ) -> None:
        harness = harness_of(image_bytes=SIZES, capacity=capacity_of(SLABS))
        for slot in range(2 * PER_SLAB):
            harness.store(slot, slot)
        store_large(harness, 0, 50)
        store_large(harness, 2, 51)
        harness.tier.close()
        for name, word in places:
            with (directory / name).open("r+b") as file:
                file.seek(word % (directory / name).stat().st_size)
                file.write(word.to_bytes(8, "little"))
        harness.reopen()
        found = listed(harness)
        assert set(found) <= {(0, 1), (8, 1)} | {(slot, 0) for slot in range(2 * PER_SLAB)}
        assert all(len({size_class for slot, size_class in found if slot // PER_SLAB == slab}) < 2 for slab in range(4))
        for slot in range(PER_SLAB, 2 * PER_SLAB):
            status, bytes_ = harness.load(slot, slot)
            assert status is not Status.OK or (bytes_ == image(slot, SMALL)).all()
        for slab, number in ((0, 50), (2, 51)):
            serves_large(harness, slab, number)
        harness.tier.close()


class TestTools:
    @pytest.fixture
    def filled(self, harness: TierHarness, directory: Path) -> Iterator[Path]:
        """Slab 0 was given from small images to a large one, slab 1 the other way round, slab 2 has been emptied."""
        for slot in range(PER_SLAB):
            harness.store(slot, slot)
        store_large(harness, 0, 50)
        store_large(harness, 1, 51)
        for slot in (5, 6):
            harness.store(slot, slot)
        store_large(harness, 2, 52)
        harness.tier.delete_records([2 * PER_SLAB])  # type: ignore[attr-defined]
        harness.tier.close()
        yield directory

    @pytest.mark.parametrize("index", [True, False])
    def test_fsck_finds_no_damage_in_what_was_left_there(self, filled: Path, index: bool) -> None:
        if not index:
            for name in ("index.0", "index.1"):
                (filled / name).unlink()
        with Fsck(filled) as fsck:
            found = {(each.slot, each.size_class): each.condition for each in fsck.records() if each.header is not None}
            assert not any(each.condition.is_damage for each in fsck.records())
        whole = {place for place, condition in found.items() if condition is Condition.WHOLE}
        assert whole == {(0, 1), (5, 0), (6, 0)} | (set() if index else {(8, 1)})

    def test_fsck_repairs_a_record_of_either_size(self, filled: Path, harness: TierHarness, directory: Path) -> None:
        flip_image_bit(filled, 0, 8 * LARGE - 1, size_class=1)
        flip_header_bit(filled, 6, 8 * 20)
        done = CliRunner().invoke(app, ["fsck", str(filled), "--json", "--repair"])
        damaged = json.loads(done.stdout)["damaged"]
        assert [(each["slot"], each["condition"]) for each in damaged] == [(0, "corrupt image"), (6, "corrupt header")]
        with Fsck(filled) as fsck:
            assert Counter(each.condition for each in fsck.records())[Condition.WHOLE] == 1
        harness.reopen()
        assert listed(harness) == {(5, 0): key(5)}

    def test_inspect_says_what_each_size_has(self, filled: Path) -> None:
        with Fsck(filled) as fsck:
            seen = inspect(fsck, fsck.headers(), 0.0)
        assert (seen.slabs, seen.slab_bytes, seen.records) == (4, SLAB, 3)
        assert [(size.image_bytes, size.per_slab, size.slabs, size.records) for size in seen.sizes] == [
            (SMALL, PER_SLAB, 1, 2),
            (LARGE, 1, 1, 1),
        ]


def test_what_is_in_the_journal_alone_counts_by_slab(harness: TierHarness, killed: Killed) -> None:
    """A slab that changes hands again and again between two checkpoints."""
    random = np.random.default_rng(3)
    held: dict[tuple[int, int], int] = {}
    for number in range(60):
        slab = int(random.integers(4))
        if random.random() < 0.5:
            store_large(harness, slab, number)
            place = (slab * PER_SLAB, 1)
        else:
            place = (slab * PER_SLAB + int(random.integers(PER_SLAB)), 0)
            harness.store(place[0], number)
        held = {each: what for each, what in held.items() if each[0] // PER_SLAB != slab or each[1] == place[1]}
        held[place] = number
        if number % 20 == 19:
            assert listed(harness) == {place: key(number) for place, number in held.items()}
            killed()
            assert listed(harness) == {place: key(number) for place, number in held.items()}
    assert {size_class for _, size_class in held} == {0, 1}
    for (slot, size_class), number in held.items():
        if size_class:
            assert serves_large(harness, slot // PER_SLAB, number)
        else:
            harness.assert_serves(slot, number)
