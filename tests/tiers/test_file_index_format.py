"""The bytes of the index: golden bytes, single bits, torn and stale notes."""

import struct

import numpy as np
import pytest
import test_file_format
import xxhash

from longshore.checksums import digest
from longshore.errors import FormatError
from longshore.tiers.arena import DISK_PAGE
from longshore.tiers.file.format import (
    ENTRY,
    INSERTED,
    INVALIDATED,
    JOURNAL_RECORD,
    CheckpointHeader,
    Entries,
    finish_page,
    pack_checkpoint,
    pack_entry,
    pack_invalidation,
    pack_journal_header,
    pack_journal_record,
    parse_checkpoint_body,
    parse_checkpoint_header,
    parse_journal_header,
    parse_journal_records,
)
from longshore.tiers.file.recovery import replay_journal

HEADER = test_file_format.HEADER._replace(payload_checksum=0)

# Written once. If these change, the format has: it needs a new version.
GOLDEN_ENTRY = bytes.fromhex(
    "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"  # key
    "202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f"  # parent
    "404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f"  # scope
    "02010000" "0100" "0300" "0706050000000000"  # slot, flags, pool, length
    "0403000000000000" "0d0c0b0a09080000"  # generation, sequence
    "04030201" "00000000"  # written, hits
)  # fmt: skip
GOLDEN_CHECKPOINT = bytes.fromhex(
    "4c4e475348494458" "04000000" "88000000"  # magic, version, entry bytes
    "0a00000000000000" "0100000000000000" "0b00000000000000"  # epoch, records, known
    "e2df87c6c0cf0e31"
).ljust(DISK_PAGE - 8, b"\0") + bytes.fromhex("4f885420556215d0")  # fmt: skip
GOLDEN_JOURNAL = bytes.fromhex(
    "4c4e4753484a4e4c" "04000000" "a8000000"  # magic, version, note bytes
    "0a00000000000000"  # epoch
).ljust(DISK_PAGE - 8, b"\0") + bytes.fromhex("1b43a19f590e96a0")  # fmt: skip
GOLDEN_NOTE = (
    bytes.fromhex(
        "5bf3a8aa953cfef1"
        "0a00000000000000" "0c00000000000000" "0100000000000000"  # epoch, serial, kind
    )
    + GOLDEN_ENTRY
)  # fmt: skip


def entries(*slots: int) -> Entries:
    """An entry for each of `slots`."""
    packed = b"".join(pack_entry(HEADER._replace(slot=slot, key=bytes([slot]) * 32), 7) for slot in slots)
    return np.frombuffer(packed, ENTRY)


def slots_of(found: Entries) -> list[int]:
    return [int(slot) for slot in found["slot"]]


def test_golden_bytes() -> None:
    assert pack_entry(HEADER, 0x01020304) == GOLDEN_ENTRY
    page, body = pack_checkpoint(10, np.frombuffer(GOLDEN_ENTRY, ENTRY), 11)
    assert (page, body) == (GOLDEN_CHECKPOINT, GOLDEN_ENTRY)
    assert pack_journal_header(10) == GOLDEN_JOURNAL
    assert pack_journal_record(10, 12, INSERTED, GOLDEN_ENTRY) == GOLDEN_NOTE


def test_golden_bytes_are_read() -> None:
    header = parse_checkpoint_header(GOLDEN_CHECKPOINT)
    assert header == CheckpointHeader(10, 1, 11, digest(GOLDEN_ENTRY))
    (entry,) = parse_checkpoint_body(header, GOLDEN_ENTRY)
    assert (entry["key"].tobytes(), entry["parent"].tobytes(), entry["scope"].tobytes()) == HEADER[:3]
    assert [int(entry[name]) for name in ENTRY.names[3:]] == [  # type: ignore[index]
        HEADER.slot,
        1,
        HEADER.size_class,
        HEADER.length,
        HEADER.generation,
        HEADER.sequence,
        0x01020304,
        0,
    ]
    assert parse_journal_header(GOLDEN_JOURNAL) == 10
    (note,) = parse_journal_records(10, GOLDEN_NOTE)
    assert (int(note["serial"]), int(note["kind"]), note["entry"].tobytes()) == (12, INSERTED, GOLDEN_ENTRY)


def test_every_flipped_bit_of_a_checkpoint_is_seen() -> None:
    whole = bytearray(GOLDEN_CHECKPOINT + GOLDEN_ENTRY)
    for bit in range(8 * len(whole)):
        whole[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FormatError):
            parse_checkpoint_body(parse_checkpoint_header(bytes(whole[:DISK_PAGE])), bytes(whole[DISK_PAGE:]))
        whole[bit // 8] ^= 1 << bit % 8


def test_every_flipped_bit_of_a_journal_is_seen() -> None:
    page = bytearray(GOLDEN_JOURNAL)
    for bit in range(8 * DISK_PAGE):
        page[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FormatError):
            parse_journal_header(bytes(page))
        page[bit // 8] ^= 1 << bit % 8
    note = bytearray(GOLDEN_NOTE)
    for bit in range(8 * len(note)):
        note[bit // 8] ^= 1 << bit % 8
        assert len(parse_journal_records(10, bytes(note))) == 0
        note[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize(
    ("offset", "new", "message"),
    [
        (0, b"LNGSHREC", "magic"),
        (8, b"\x01", "format version 4, got 1"),
        (12, b"\x80", "entries of 136 bytes, got 128"),
        (48, b"\x01", "padding"),
    ],
)
def test_a_sealed_checkpoint_with_a_wrong_field_is_refused(offset: int, new: bytes, message: str) -> None:
    page = GOLDEN_CHECKPOINT[:offset] + new + GOLDEN_CHECKPOINT[offset + len(new) : DISK_PAGE - 8]
    with pytest.raises(FormatError, match=message):
        parse_checkpoint_header(finish_page(page))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"length": 0}, "invalid entry 1"),
        ({"flags": 2}, "invalid entry 1"),
        ({"flags": 0}, "invalid entry 1"),
        ({"slot": 3}, "two entries for one slot"),
    ],
)
def test_a_checkpoint_of_impossible_entries_is_refused(changes: dict[str, int], message: str) -> None:
    some = entries(3, 4, 5).copy()
    for name, value in changes.items():
        some[name][1] = value
    page, body = pack_checkpoint(1, some, 0)
    with pytest.raises(FormatError, match=message):
        parse_checkpoint_body(parse_checkpoint_header(page), body)


def test_more_entries_than_there_are_bytes_is_refused() -> None:
    header = parse_checkpoint_header(pack_checkpoint(1, entries(1, 2), 0)[0])._replace(records=2**60)
    with pytest.raises(FormatError, match="expected 1152921504606846976 entries, got 272 bytes"):
        parse_checkpoint_body(header, entries(1, 2).tobytes())


def notes(*lines: tuple[int, int, int, bytes]) -> bytes:
    return b"".join(pack_journal_record(*line) for line in lines)


class TestNotes:
    ENTRIES = tuple(entries(slot).tobytes() for slot in range(6))

    def serials(self, data: bytes) -> list[int]:
        return [int(serial) for serial in parse_journal_records(1, data)["serial"]]

    def test_they_end_where_nothing_was_written(self) -> None:
        data = notes((1, 5, INSERTED, self.ENTRIES[1]), (1, 6, INVALIDATED, pack_invalidation(1, 3)))
        assert self.serials(data) == self.serials(data + bytes(3 * JOURNAL_RECORD.itemsize)) == [5, 6]
        assert self.serials(data + data[:-1]) == [5, 6]

    def test_they_end_at_a_torn_one(self) -> None:
        whole = [(1, serial, INSERTED, self.ENTRIES[serial]) for serial in range(1, 5)]
        data = bytearray(notes(*whole))
        data[2 * JOURNAL_RECORD.itemsize + 100] ^= 1
        assert self.serials(bytes(data)) == [1, 2]

    def test_what_another_epoch_left_behind_them_does_not_count(self) -> None:
        assert self.serials(notes((1, 1, INSERTED, self.ENTRIES[1]), (0, 2, INSERTED, self.ENTRIES[2]))) == [1]

    def test_leftovers_of_a_failed_append_do_not_count(self) -> None:
        newer, older = (1, 9, INSERTED, self.ENTRIES[1]), (1, 8, INSERTED, self.ENTRIES[2])
        assert self.serials(notes(newer, older)) == [9]
        assert self.serials(notes(newer, newer)) == [9]

    @pytest.mark.parametrize("kind", [0, 3, 2**64 - 1])
    def test_unknown_kinds_end_them(self, kind: int) -> None:
        assert self.serials(notes((1, 1, kind, self.ENTRIES[1]))) == []

    def test_sealed_nonsense_ends_them(self) -> None:
        assert self.serials(notes((1, 1, INSERTED, pack_invalidation(1, 3)))) == []
        assert self.serials(notes((1, 1, INVALIDATED, self.ENTRIES[1]))) == []

    def test_last_journal_record_of_a_slot_counts_and_is_newest(self) -> None:
        data = notes(
            (1, 1, INSERTED, self.ENTRIES[4]),
            (1, 2, INVALIDATED, pack_invalidation(1, 3)),
            (1, 3, INSERTED, self.ENTRIES[0]),
            (1, 4, INVALIDATED, pack_invalidation(4, 3)),
            (1, 5, INSERTED, self.ENTRIES[2]),
            (1, 6, INVALIDATED, pack_invalidation(5, 3)),
        )
        assert slots_of(replay_journal(entries(0, 1, 2, 3), parse_journal_records(1, data), 1)) == [3, 0, 2]


def test_the_checksum_is_that_of_records() -> None:
    (stored,) = struct.unpack_from("<Q", GOLDEN_NOTE)
    assert stored == xxhash.xxh3_64_intdigest(GOLDEN_NOTE[8:])
