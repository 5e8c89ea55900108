"""Conformance suite for every `Tier`: subclass `TierTests` with a fixture that opens the tier, and run pytest.

    class TestMyTier(TierTests):
        persistent = True

        def open_tier(self, arena: Arena, directory: Path) -> Tier:
            return MyTier(directory, slots=self.slots, image_bytes=self.image_bytes, arena=arena)

Nothing here looks inside a tier: tests submit, poll, and look at the bytes of the arena.
"""

# ruff: noqa: D102 - the name of a test says what it demands
from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longshore.boundary import DISK_PAGE, Status, StoredChunk
from longshore.errors import TierClosedError, TierError
from longshore.testing.tier_harness import POISON, TierHarness, image, key, span
from longshore.tiers.arena import Arena
from longshore.tiers.base import BY_KEY, Op, Tier

_PLACES = 32
_SPECIAL = np.array([0x7FA00001, 0xFFC12345, 0x80000000, 0x7F800000, 0x00000001], np.uint32)
"""NaNs with payloads (signalling, quiet), negative zero, infinity, a denormal: a number's copy may change them."""


class TierTests:
    """The contract of `Tier`, one test a clause.

    Attributes:
        image_bytes: Of the tier that `open_tier` opens.
        slots: Of that tier; at least 8.
        reserved_bytes: Where the tier's own slots lie in the arena, their end; a multiple of the page.
        persistent: Whether what was written outlives `close`, under the same `directory`.
        by_key: Whether it is a `KeyedTier`: addressed by key, without slots, and nothing is recovered from it.
    """

    image_bytes: int = 4 * DISK_PAGE
    slots: int = 8
    reserved_bytes: int = 0
    persistent: bool = False
    by_key: bool = False

    def open_tier(self, arena: Arena, directory: Path) -> Tier:
        """An open tier; the same one again, if it is persistent and `directory` was used before."""
        raise NotImplementedError

    def make_arena(self, nbytes: int) -> Arena:
        """Memory for the tests; a tier in another process asks for shared memory."""
        return Arena(nbytes)

    @pytest.fixture
    def harness(self, tmp_path: Path) -> Iterator[TierHarness]:
        """An open tier, in a directory of its own."""
        harness = self._open_harness(tmp_path / "tier")
        yield harness
        harness.tier.close()
        harness.arena.close()

    # What is written is what is read

    @pytest.mark.parametrize("shift", [0, 1, 512])
    @pytest.mark.parametrize("missing", [0, 1, DISK_PAGE, 3 * DISK_PAGE - 8])
    def test_round_trip_of_any_length_at_any_offset(self, harness: TierHarness, missing: int, shift: int) -> None:
        length = self.image_bytes - missing
        there, here = harness.offset(0) + shift, harness.offset(1) + shift
        harness.store(2, 5, length=length, offset=there)
        harness.assert_serves(2, 5, length=length, offset=here)

    def test_bytes_that_are_no_ordinary_numbers(self, harness: TierHarness) -> None:
        write = harness.op(Op.WRITE, 0, 0)
        expected = np.resize(_SPECIAL.view(np.uint8), self.image_bytes)
        harness.bytes_of(write)[:] = expected
        assert harness.run(write) == (Status.OK,)
        status, found = harness.load(0, 0)
        assert status is Status.OK
        np.testing.assert_array_equal(found, expected)

    @pytest.mark.parametrize("length", [4 * DISK_PAGE, 2 * DISK_PAGE, DISK_PAGE + 1, 1])
    def test_a_read_changes_its_destination_and_nothing_else(self, harness: TierHarness, length: int) -> None:
        harness.store(1, 1, length=length)
        read = harness.op(Op.READ, 1, 1, place=2, length=length)
        harness.arena.array[self.reserved_bytes :] = POISON
        expected = harness.arena.array.copy()
        expected[read.offset : read.offset + length] = image(1, length)
        assert harness.run(read) == (Status.OK,)
        np.testing.assert_array_equal(harness.arena.array, expected)

    def test_a_write_changes_nothing_outside_the_tier(self, harness: TierHarness) -> None:
        write = harness.op(Op.WRITE, 1, 1)
        harness.bytes_of(write)[:] = image(1, self.image_bytes)
        before = harness.arena.array[self.reserved_bytes :].copy()
        assert harness.run(write) == (Status.OK,)
        np.testing.assert_array_equal(harness.arena.array[self.reserved_bytes :], before)

    def test_slots_do_not_touch_each_other(self, harness: TierHarness) -> None:
        for slot in range(self.slots):
            harness.store(slot, slot)
        for slot in range(self.slots):
            harness.assert_serves(slot, slot)

    def test_overwriting_replaces_key_and_bytes(self, harness: TierHarness) -> None:
        self._only_with_slots()
        harness.store(3, 1)
        harness.store(3, 2)
        harness.assert_serves(3, 2)
        harness.assert_misses(3, 1)

    def test_many_in_flight(self, harness: TierHarness) -> None:
        for slot in range(self.slots):
            harness.store(slot, slot)
        for turn in range(4):
            harness.arena.array[self.reserved_bytes :] = POISON
            slots = [(place + turn) % self.slots for place in range(_PLACES)]
            reads = [harness.op(Op.READ, slot, slot, place) for place, slot in enumerate(slots)]
            tickets = [harness.tier.submit([read], math.inf) for read in reads]
            for ticket, read, slot in reversed(list(zip(tickets, reads, slots, strict=True))):
                assert harness.wait(ticket).statuses == (Status.OK,)
                np.testing.assert_array_equal(harness.bytes_of(read), image(slot, self.image_bytes))

    # Nothing else is served

    def test_a_slot_that_was_never_written_is_a_miss(self, harness: TierHarness) -> None:
        self._only_with_slots()
        harness.store(0, 0)
        harness.assert_misses(1, 0)

    def test_another_key_is_a_miss(self, harness: TierHarness) -> None:
        harness.store(0, 0)
        harness.assert_misses(0, 1)
        harness.assert_serves(0, 0)

    def test_another_length_is_a_miss(self, harness: TierHarness) -> None:
        harness.store(0, 0, length=2 * DISK_PAGE)
        harness.assert_misses(0, 0, length=DISK_PAGE)
        harness.assert_misses(0, 0, length=3 * DISK_PAGE)

    def test_what_was_forgotten_is_a_miss_under_any_generation(self, harness: TierHarness) -> None:
        old = harness.tier.generation
        harness.tier.reset(old + 1)
        harness.store(0, 0, generation=old + 1)
        harness.tier.reset(old + 2)
        harness.assert_misses(0, 0, generation=old + 1)
        harness.assert_misses(0, 0, generation=old + 2)
        harness.assert_misses(0, 0, generation=old)

    def test_a_late_write_of_a_forgotten_generation_is_never_served(self, harness: TierHarness) -> None:
        old = harness.tier.generation
        harness.tier.reset(old + 1)
        harness.run(harness.op(Op.WRITE, 0, 0, generation=old))
        harness.assert_misses(0, 0, generation=old)
        harness.assert_misses(0, 0, generation=old + 1)

    def test_forgetting_does_not_end_the_tier_and_never_goes_back(self, harness: TierHarness) -> None:
        new = harness.tier.generation + 3
        harness.tier.reset(new)
        harness.store(0, 0, generation=new)
        harness.tier.reset(new)
        harness.tier.reset(new - 1)
        harness.assert_serves(0, 0, generation=new)

    # A batch is taken as a whole, or refused as a whole

    @pytest.mark.parametrize(
        "changes",
        [
            {"slot": -1},
            {"slot": 10**9},
            {"offset": -1},
            {"offset": 2**62},
            {"length": -DISK_PAGE},
            {"length": 0},
            {"length": 5 * DISK_PAGE},
            {"key": b"short"},
            {"parent": b"short"},
            {"generation": -1},
            {"op": "read"},
        ],
        ids=str,
    )
    def test_a_bad_operation_refuses_the_whole_batch(self, harness: TierHarness, changes: dict[str, Any]) -> None:
        if self.by_key and changes == {"slot": BY_KEY}:
            pytest.skip("this is how a tier without slots is addressed")
        harness.store(0, 0)
        good = harness.op(Op.WRITE, 0, 1)
        bad = harness.op(Op.READ, 1, 1)._replace(**changes)
        before = harness.arena.array.copy()
        with pytest.raises(TierError, match=r"."):
            harness.tier.submit([good, bad], math.inf)
        assert harness.tier.poll() == []
        np.testing.assert_array_equal(harness.arena.array, before)
        harness.assert_serves(0, 0)

    def test_the_last_byte_of_the_arena_is_the_last_one(self, harness: TierHarness) -> None:
        end = harness.arena.nbytes - self.image_bytes
        harness.store(0, 0, offset=end)
        harness.assert_serves(0, 0, offset=end)
        with pytest.raises(TierError):
            harness.tier.submit([harness.op(Op.READ, 0, 0, offset=end + 1)], math.inf)

    def test_the_last_slot_is_the_last_one(self, harness: TierHarness) -> None:
        self._only_with_slots()
        assert (harness.tier.slabs.indices, harness.tier.image_bytes) == (self.slots, (self.image_bytes,))
        harness.store(self.slots - 1, 0)
        harness.assert_serves(self.slots - 1, 0)
        with pytest.raises(TierError):
            harness.tier.submit([harness.op(Op.WRITE, self.slots, 0)], math.inf)

    def test_a_deadline_must_be_a_number(self, harness: TierHarness) -> None:
        with pytest.raises(TierError):
            harness.tier.submit([harness.op(Op.WRITE, 0, 0)], math.nan)

    def test_an_empty_batch_has_a_result_too(self, harness: TierHarness) -> None:
        assert harness.run() == ()

    # Every batch ends, once

    def test_one_result_for_each_ticket(self, harness: TierHarness) -> None:
        tickets = [harness.tier.submit([harness.op(Op.WRITE, n, n)], math.inf) for n in range(self.slots)]
        assert len(set(tickets)) == len(tickets)
        for ticket in tickets:
            harness.wait(ticket)
        assert harness.tier.poll() == []

    def test_after_the_deadline_nothing_begins(self, harness: TierHarness) -> None:
        harness.store(0, 0)
        write, read = harness.op(Op.WRITE, 0, 1, place=2), harness.op(Op.READ, 0, 0, place=3)
        harness.bytes_of(read)[:] = POISON
        late = (Status.DEADLINE, Status.DEADLINE)
        assert harness.run(write, read, deadline=time.monotonic() - 1) == late
        assert set(harness.bytes_of(read).tolist()) == {POISON}
        harness.assert_serves(0, 0)

    def test_a_cancelled_batch_ends_and_what_had_not_begun_has_no_effect(self, harness: TierHarness) -> None:
        for slot in range(self.slots):
            harness.store(slot, slot)
        writes = [harness.op(Op.WRITE, slot, slot, place=2) for slot in range(self.slots)]
        changed = harness.bytes_of(writes[0])
        changed[:] = image(99, self.image_bytes)
        ticket = harness.tier.submit(writes, math.inf)
        harness.tier.cancel(ticket)
        for slot, status in enumerate(harness.wait(ticket).statuses):
            assert status in {Status.OK, Status.CANCELLED}
            loaded, found = harness.load(slot, slot)
            assert loaded is Status.OK
            if status is Status.OK and not (self.by_key and np.array_equal(found, image(slot, self.image_bytes))):
                np.testing.assert_array_equal(found, changed)  # a key that is there need not be written again
            else:
                np.testing.assert_array_equal(found, image(slot, self.image_bytes))

    def test_cancelling_the_unknown_or_the_ended_is_ignored(self, harness: TierHarness) -> None:
        ticket = harness.tier.submit([harness.op(Op.WRITE, 0, 0)], math.inf)
        harness.wait(ticket)
        harness.tier.cancel(ticket)
        harness.tier.cancel(10**9)
        assert harness.tier.poll() == []

    def test_close_ends_everything_and_the_results_can_be_collected(self, harness: TierHarness) -> None:
        tickets = [harness.tier.submit([harness.op(Op.WRITE, n, n)], math.inf) for n in range(self.slots)]
        harness.tier.close()
        statuses = {status for ticket in tickets for status in harness.wait(ticket).statuses}
        assert statuses <= {Status.OK, Status.TIER_OFF}

    def test_close_is_idempotent_and_final(self, harness: TierHarness) -> None:
        harness.tier.close()
        harness.tier.close()
        with pytest.raises(TierClosedError):
            harness.tier.submit([harness.op(Op.WRITE, 0, 0)], math.inf)
        assert harness.tier.poll() == []

    def test_close_gives_back_threads_and_descriptors(self, tmp_path: Path) -> None:
        def resources() -> tuple[set[threading.Thread], set[str]]:
            return set(threading.enumerate()), {path.name for path in Path("/proc/self/fd").iterdir()}

        before = resources()
        harness = self._open_harness(tmp_path / "tier")
        harness.store(0, 0)
        harness.tier.close()
        harness.arena.close()
        assert resources() == before

    # What outlives the process

    def test_nothing_is_recovered_from_a_tier_that_was_never_used(self, harness: TierHarness) -> None:
        assert harness.tier.recover() == []

    def test_a_later_process_serves_what_was_written(self, harness: TierHarness) -> None:
        self._only_if_persistent()
        harness.store(4, 0)
        harness.reopen()
        harness.assert_serves(4, 0)
        harness.assert_misses(4, 1)

    def test_recovery_has_parents_and_the_order_of_writing(self, harness: TierHarness) -> None:
        self._only_with_slots()
        self._only_if_persistent()
        harness.store(5, 0)
        harness.store(1, 1, parent=key(0))
        harness.reopen()
        harness.store(3, 2, parent=key(1))
        harness.reopen()
        assert harness.tier.recover() == [
            StoredChunk(5, key(0), None),
            StoredChunk(1, key(1), key(0)),
            StoredChunk(3, key(2), key(1)),
        ]

    def test_of_two_records_with_one_key_the_newer_is_recovered(self, harness: TierHarness) -> None:
        self._only_with_slots()
        self._only_if_persistent()
        for slot in (1, 6, 2):
            harness.store(slot, 0)
        harness.store(3, 1)
        harness.reopen()
        assert harness.tier.recover() == [StoredChunk(2, key(0), None), StoredChunk(3, key(1), None)]

    def test_what_was_discarded_is_not_recovered(self, harness: TierHarness) -> None:
        self._only_with_slots()
        self._only_if_persistent()
        for slot in range(3):
            harness.store(slot, slot)
        harness.tier.delete_records([1])
        harness.reopen()
        assert harness.tier.recover() == [StoredChunk(0, key(0), None), StoredChunk(2, key(2), None)]
        harness.store(1, 3)
        harness.assert_serves(1, 3)

    def test_generations_survive(self, harness: TierHarness) -> None:
        self._only_with_slots()
        self._only_if_persistent()
        harness.store(0, 0)
        new = harness.tier.generation + 1
        harness.tier.reset(new)
        harness.store(1, 1, generation=new)
        harness.reopen()
        assert harness.tier.generation == new
        assert harness.tier.recover() == [StoredChunk(1, key(1), None)]
        harness.assert_misses(0, 0, generation=new - 1)
        harness.assert_misses(0, 0)
        harness.assert_serves(1, 1)

    def _open_harness(self, directory: Path) -> TierHarness:
        arena = self.make_arena(self.reserved_bytes + _PLACES * span(self.image_bytes))
        return TierHarness(lambda: self.open_tier(arena, directory), arena, self.reserved_bytes, by_key=self.by_key)

    def _only_with_slots(self) -> None:
        if self.by_key:
            pytest.skip("this tier is addressed by key")

    def _only_if_persistent(self) -> None:
        if not self.persistent:
            pytest.skip("this tier does not outlive its process")
