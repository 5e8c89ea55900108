"""Registration in pieces: no slot straddles two, a piece that fails leaves the others usable, all are taken back."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore.errors import RegistrationError, TierError
from longshore.tiers.arena import DISK_PAGE, Arena, Fallback
from longshore.tiers.arena.pinning import LARGEST_PIECE, cut
from mappings import mapped
from pinning import PinningDevice

GIB = 1 << 30
SLOT = 3 * DISK_PAGE


# cutting


@given(data=st.data())
def test_pieces_cover_everything_exactly_and_no_slot_straddles_two(data: st.DataObject) -> None:
    slot_bytes = data.draw(st.integers(1, 64), "pages") * DISK_PAGE
    slots = data.draw(st.integers(1, 200), "slots")
    rest = data.draw(st.integers(0, slot_bytes // DISK_PAGE - 1), "pages behind the slots") * DISK_PAGE
    largest = data.draw(st.integers(slot_bytes, 300 * DISK_PAGE), "largest")
    nbytes = slots * slot_bytes + rest
    pieces = cut(nbytes, slot_bytes, largest)
    offsets = [0, *(offset + length for offset, length in pieces)]
    assert [offset for offset, _ in pieces] == offsets[:-1]
    assert offsets[-1] == nbytes
    assert all(0 < length <= largest for _, length in pieces)
    for slot in range(slots):
        first, last = slot * slot_bytes, (slot + 1) * slot_bytes - 1
        assert sum(offset <= first and last < offset + length for offset, length in pieces) == 1
    assert len(pieces) == -(-nbytes // (largest // slot_bytes * slot_bytes))  # no more than it takes


@pytest.mark.parametrize("page", [4096, 16384, 65536])
def test_boundaries_are_between_two_pages_of_the_system(monkeypatch: pytest.MonkeyPatch, page: int) -> None:
    monkeypatch.setattr(mmap, "PAGESIZE", page)
    pieces = cut(1000 * SLOT, SLOT, 70 * DISK_PAGE)
    assert len(pieces) > 10
    assert all(offset % page == 0 and offset % SLOT == 0 for offset, _ in pieces)


def test_trap_14_terabyte_is_registered_in_safe_pieces() -> None:
    pieces = cut(1 << 40, 5 << 20)
    assert LARGEST_PIECE < 64 * GIB
    assert max(length for _, length in pieces) <= LARGEST_PIECE
    assert len(pieces) == 65


@pytest.mark.parametrize(
    ("nbytes", "slot_bytes", "largest"),
    [
        (0, DISK_PAGE, GIB),
        (-DISK_PAGE, DISK_PAGE, GIB),
        (DISK_PAGE, 0, GIB),
        (DISK_PAGE, -DISK_PAGE, GIB),
        (DISK_PAGE, DISK_PAGE + 1, GIB),
        (DISK_PAGE, 100, GIB),
        (4 * DISK_PAGE, 2 * DISK_PAGE, DISK_PAGE),
        (DISK_PAGE, DISK_PAGE, 0),
    ],
)
def test_impossible_sizes_are_refused(nbytes: int, slot_bytes: int, largest: int) -> None:
    with pytest.raises(TierError, match=f"{slot_bytes}"):
        cut(nbytes, slot_bytes, largest)


# an arena and its device


def test_a_device_gets_all_of_the_arena_in_pieces() -> None:
    arena, device = Arena(10 * SLOT), PinningDevice()
    arena.register(device, SLOT, largest=4 * SLOT)
    expected = {arena.address: 4 * SLOT, arena.address + 4 * SLOT: 4 * SLOT, arena.address + 8 * SLOT: 2 * SLOT}
    assert device.ranges == expected
    assert (arena.report.registered_pieces, arena.report.registered_bytes) == (3, 10 * SLOT)
    assert arena.report.fallbacks[Fallback.REGISTRATION] == 0
    arena.close()


@given(
    refused=st.sets(st.integers(0, 4)),
    spans=st.lists(
        st.tuples(st.integers(-DISK_PAGE, 21 * DISK_PAGE), st.integers(0, 8 * DISK_PAGE)), min_size=1, max_size=50
    ),
)
def test_trap_14_arena_knows_copies_within_one_piece(refused: set[int], spans: list[tuple[int, int]]) -> None:
    arena, device = Arena(20 * DISK_PAGE), PinningDevice(refused)
    arena.register(device, DISK_PAGE, largest=4 * DISK_PAGE)
    spans += [
        (4 * DISK_PAGE * i + edge, 4 * DISK_PAGE + wide) for i in range(5) for edge in (-1, 0, 1) for wide in (-1, 0, 1)
    ]
    offsets, lengths = np.array(spans).T
    known = arena.in_one_piece(offsets, lengths)
    assert known.dtype == np.bool_
    assert known.tolist() == [device.reaches(arena.address + offset, length) for offset, length in spans]
    arena.close()


def test_the_question_is_broadcast() -> None:
    arena = Arena(4 * DISK_PAGE)
    assert not arena.in_one_piece(0, DISK_PAGE)
    assert arena.in_one_piece(np.zeros((2, 1)), np.ones(3)).tolist() == [[False] * 3] * 2
    arena.register(PinningDevice(), DISK_PAGE, largest=2 * DISK_PAGE)
    assert bool(arena.in_one_piece(0, DISK_PAGE)) is True
    offsets = np.array([0, DISK_PAGE, 2 * DISK_PAGE, 3 * DISK_PAGE], dtype=np.uint64)
    assert arena.in_one_piece(offsets, 2 * DISK_PAGE).tolist() == [True, False, True, False]
    assert arena.in_one_piece(offsets.reshape(2, 2), [[DISK_PAGE], [2 * DISK_PAGE]]).tolist() == [
        [True, True],
        [True, False],
    ]
    assert not arena.in_one_piece(DISK_PAGE, -1)
    assert not arena.in_one_piece(2 * DISK_PAGE, -DISK_PAGE)
    arena.close()
    assert not arena.in_one_piece(0, DISK_PAGE)


def test_failing_piece_is_counted_and_the_rest_usable(caplog: pytest.LogCaptureFixture) -> None:
    arena, device = Arena(8 * SLOT), PinningDevice(refused={1, 3})
    arena.register(device, SLOT, largest=2 * SLOT)
    report = arena.report
    assert (report.registered_pieces, report.registered_bytes) == (2, 4 * SLOT)
    assert report.fallbacks[Fallback.REGISTRATION] == 2
    slots = np.arange(8) * SLOT
    assert arena.in_one_piece(slots, SLOT).tolist() == [True, True, False, False] * 2
    assert f"bytes [{2 * SLOT}, {4 * SLOT}) cannot be pinned: the device is full (registration)" in caplog.text
    arena.close()
    assert device.ranges == {}


def test_arena_that_no_device_registers_is_still_memory() -> None:
    arena, device = Arena(4 * SLOT), PinningDevice(refused=range(4))
    arena.register(device, SLOT, largest=SLOT)
    assert (arena.report.registered_pieces, arena.report.fallbacks[Fallback.REGISTRATION]) == (0, 4)
    assert not arena.in_one_piece([0, SLOT], SLOT).any()
    arena.array[:] = 1
    arena.close()
    assert device.unregistered == []


def test_impossible_slots_are_refused_before_anything_is_registered() -> None:
    arena, device = Arena(4 * SLOT), PinningDevice()
    with pytest.raises(TierError):
        arena.register(device, 100)
    assert device.asked == []
    arena.register(device, SLOT)
    arena.close()


def test_a_second_registration_is_refused_and_changes_nothing() -> None:
    arena, device = Arena(4 * SLOT), PinningDevice()
    arena.register(device, SLOT)
    with pytest.raises(TierError, match="registered already"):
        arena.register(device, SLOT)
    assert len(device.asked) == arena.report.registered_pieces == 1
    arena.close()


# the end


def test_everything_is_unregistered_once_and_before_the_memory_goes() -> None:
    arena, device = Arena(6 * SLOT), PinningDevice()
    arena.register(device, SLOT, largest=2 * SLOT)
    there: list[int] = []
    device.before_unregister = lambda: there.append(arena.array.nbytes)  # raises once the arena is closed
    arena.close()
    arena.close()
    assert there == [6 * SLOT] * 3
    assert device.ranges == {}
    assert (arena.report.registered_pieces, arena.report.registered_bytes) == (0, 0)


def test_failed_unregistration_raises_after_the_rest_is_released() -> None:
    arena, device = Arena(6 * SLOT), PinningDevice(kept={1})
    arena.register(device, SLOT, largest=2 * SLOT)
    with pytest.raises(
        RegistrationError, match="1 of 3 pieces of host memory could not be unregistered: the device does not answer"
    ):
        arena.close()
    assert list(device.ranges) == [arena.address + 2 * SLOT]
    with pytest.raises(TierError, match="closed"):
        _ = arena.array
    arena.close()
    assert len(device.unregistered) == 3


def test_registrations_before_our_own_fault_are_taken_back() -> None:
    class Faulty(PinningDevice):
        def register(self, address: int, nbytes: int) -> None:
            super().register(address, nbytes)
            if len(self.ranges) == 2:
                self.ranges.popitem()
                raise ZeroDivisionError

    arena, device = Arena(6 * SLOT), Faulty()
    with pytest.raises(ZeroDivisionError):
        arena.register(device, SLOT, largest=2 * SLOT)
    assert len(device.ranges) == 1
    arena.close()
    assert device.ranges == {}


def test_freed_memory_is_unregistered_first_and_registered_alike_again() -> None:
    arena, device = Arena(6 * SLOT), PinningDevice()
    arena.register(device, SLOT, largest=2 * SLOT)
    pieces = dict(device.ranges)
    there: list[int] = []
    device.before_unregister = lambda: there.append(mapped(arena.address)["Rss"])
    arena.give_back()
    assert len(there) == 3
    assert all(there)
    assert device.ranges == {}
    assert not arena.in_one_piece(0, SLOT)
    arena.take_back()
    assert device.ranges == pieces
    assert arena.in_one_piece(0, SLOT)
    assert arena.report.registered_pieces == 3
    arena.close()
    assert device.ranges == {}
