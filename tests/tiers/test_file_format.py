"""The file format: golden bytes, every single bit, hostile pages."""

import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from longshore.boundary import Status
from longshore.checksums import ALGORITHMS, XXH3_64, digest
from longshore.errors import FormatError
from longshore.tiers.arena import DISK_PAGE
from longshore.tiers.file.format import (
    OPENS_LIMIT,
    RecordHeader,
    Superblock,
    is_empty,
    pack_header,
    pack_superblock,
    parse_header,
    parse_superblock,
    sequence,
)
from longshore.tiers.file.record_verifier import ExpectedRecord, check_header

HEADER = RecordHeader(
    key=bytes(range(32)),
    parent=bytes(range(32, 64)),
    scope=bytes(range(64, 96)),
    slot=0x0102,
    generation=0x0304,
    length=0x050607,
    sequence=0x08090A0B0C0D,
    payload_checksum=0x1112131415161718,
    size_class=3,
)
WANTED = ExpectedRecord(HEADER.key, HEADER.scope, HEADER.slot, HEADER.size_class, HEADER.generation, HEADER.length)
SUPERBLOCK = Superblock(
    slabs=7, slab_bytes=8 * DISK_PAGE, image_bytes=(DISK_PAGE, 3 * DISK_PAGE), generation=0x0304, opens=0x0506
)

# Written once, by hand where possible. If these change, the format has: it needs a new version.
GOLDEN_HEADER = bytes.fromhex(
    "4c4e475348524543" "04000000" "0100" "0100"  # magic, version, algorithm, flags
    "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"  # key
    "202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f"  # parent
    "404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f"  # scope
    "0201000000000000" "0403000000000000" "0706050000000000"  # slot, generation, length
    "0d0c0b0a09080000" "1817161514131211" "0300000000000000"  # sequence, payload checksum, pool
).ljust(DISK_PAGE - 8, b"\0") + bytes.fromhex("6e02c02806c53f8f")  # fmt: skip
GOLDEN_SUPERBLOCK = bytes.fromhex(
    "4c4e475348535550" "04000000" "00100000"  # magic, version, header bytes
    "0700000000000000" "0080000000000000"  # slabs, slab_bytes
    "0403000000000000" "0605000000000000"  # generation, opens
    "0200000000000000" "0010000000000000" "0030000000000000"  # how many image sizes, and these
).ljust(DISK_PAGE - 8, b"\0") + bytes.fromhex("16efed298e61faeb")  # fmt: skip


def sealed(page: bytes) -> bytes:
    """`page` with a checksum that is right."""
    return page[:-8] + struct.pack("<Q", xxhash.xxh3_64_intdigest(page[:-8]))


def changed(page: bytes, offset: int, new: bytes) -> bytes:
    return page[:offset] + new + page[offset + len(new) :]


def test_golden_bytes() -> None:
    assert pack_header(HEADER) == GOLDEN_HEADER
    assert parse_header(GOLDEN_HEADER) == HEADER
    assert pack_superblock(SUPERBLOCK) == GOLDEN_SUPERBLOCK
    assert parse_superblock(GOLDEN_SUPERBLOCK) == SUPERBLOCK


def test_the_checksum_is_xxh3_64() -> None:
    assert digest(b"longshore") == 5138796374492514774
    assert digest(memoryview(b"longshore")) == 5138796374492514774


def test_later_processes_have_higher_sequence_numbers() -> None:
    assert sequence(3, 2**40 - 1) < sequence(4, 0) < sequence(4, 1) < sequence(OPENS_LIMIT - 1, 2**40 - 1) < 2**64


def test_the_right_header_is_judged_ok() -> None:
    assert check_header(GOLDEN_HEADER, WANTED) == (Status.OK, HEADER.payload_checksum, XXH3_64)


def test_every_flipped_bit_of_a_superblock_is_seen() -> None:
    page = bytearray(GOLDEN_SUPERBLOCK)
    for bit in range(8 * DISK_PAGE):
        page[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FormatError):
            parse_superblock(bytes(page))
        page[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize(
    "other",
    [
        WANTED._replace(key=bytes(32)),
        WANTED._replace(scope=bytes(32)),
        WANTED._replace(slot=WANTED.slot + 1),
        WANTED._replace(size_class=WANTED.size_class - 1),
        WANTED._replace(generation=WANTED.generation - 1),
        WANTED._replace(generation=WANTED.generation + 1),
        WANTED._replace(length=WANTED.length - 1),
    ],
)
def test_a_whole_header_of_something_else_is_a_mismatch(other: ExpectedRecord) -> None:
    assert check_header(GOLDEN_HEADER, other).status is Status.MISMATCH


def test_a_slot_that_was_never_written_is_a_mismatch() -> None:
    assert is_empty(bytes(DISK_PAGE))
    assert not is_empty(GOLDEN_HEADER)
    assert check_header(bytes(DISK_PAGE), WANTED).status is Status.MISMATCH


@pytest.mark.parametrize(
    ("offset", "new", "message"),
    [
        (0, b"LNGSHSUP", "magic"),
        (8, b"\x01", "format version 4, got 1"),
        (12, b"\x03", "checksum algorithm out of .1, 2., got 3"),
        (14, b"\x03", "unknown flags 0x0003"),
        (14, b"\x00", "parent set, flag missing"),
        (128, bytes(8), "length 0"),
        (160, b"\x01", "padding"),
        (DISK_PAGE - 9, b"\x01", "padding"),
    ],
)
def test_a_sealed_header_with_a_wrong_field_is_refused(offset: int, new: bytes, message: str) -> None:
    page = sealed(changed(GOLDEN_HEADER, offset, new))
    with pytest.raises(FormatError, match=message):
        parse_header(page)
    assert check_header(page, WANTED).status is Status.CORRUPT


@pytest.mark.parametrize(
    ("offset", "new", "message"),
    [
        (0, b"LNGSHREC", "magic"),
        (8, b"\x01", "format version 4, got 1"),
        (12, b"\x01", "header pages of 4096"),
        (16, bytes(8), "without slabs"),
        (16, struct.pack("<Q", 2**31), "the most are 4294967296"),
        (24, bytes(8), "slabs of 0 bytes, for images of 12288"),
        (24, struct.pack("<Q", 3 * DISK_PAGE), "slabs of 12288 bytes, for images of 12288"),
        (24, b"\x01", "slabs of 32769 bytes"),
        (40, struct.pack("<Q", OPENS_LIMIT), "opens"),
        (48, bytes(8), "from 1 to 254 image sizes, got 0"),
        (48, struct.pack("<Q", 255), "from 1 to 254 image sizes, got 255"),
        (48, b"\x03", "image_bytes must be .* ascending"),
        (56, bytes(8), "image_bytes must be positive"),
        (56, b"\x01", "image_bytes must be positive multiples"),
        (56, struct.pack("<Q", 3 * DISK_PAGE), "ascending"),
        (72, b"\x01", "padding"),
    ],
)
def test_a_sealed_superblock_with_a_wrong_field_is_refused(offset: int, new: bytes, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        parse_superblock(sealed(changed(GOLDEN_SUPERBLOCK, offset, new)))


def test_another_version_is_named_despite_its_unknown_checksum() -> None:
    with pytest.raises(FormatError, match="format version 4, got 9"):
        parse_superblock(changed(GOLDEN_SUPERBLOCK, 8, b"\x09"))


digests = st.binary(min_size=32, max_size=32)
words = st.integers(0, 2**64 - 1)
headers = st.builds(
    RecordHeader,
    digests,
    st.none() | digests,
    digests,
    words,
    words,
    st.integers(1, 2**64 - 1),
    words,
    words,
    words,
    st.sampled_from(ALGORITHMS),
)


@given(headers)
def test_any_header_survives(header: RecordHeader) -> None:
    assert parse_header(pack_header(header)) == header


@given(headers, st.integers(0, DISK_PAGE - 1), st.integers(1, 255))
def test_no_changed_byte_goes_unseen(header: RecordHeader, offset: int, change: int) -> None:
    page = bytearray(pack_header(header))
    page[offset] ^= change
    with pytest.raises(FormatError):
        parse_header(bytes(page))
