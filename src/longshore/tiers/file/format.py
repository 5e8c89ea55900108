"""The bytes of the file tier: record headers and the superblock. Pure; no I/O. Exact in docs/file-format.md.

    segment   ┌───────────────────────────────────┬───────────────────────────────────┬──
    slab      │ 0, for images of one size         │ 1, of another                     │
    slots     │ header │ image   header │ image   │ header │   image                  │
              └────────┴───────┴────────┴─────────┴────────┴──────────────────────────┴──
              0        4096                       slab_bytes

Where a slot lies follows from its number, its pool (the number of an image size) and the superblock
(`longshore.boundary`), and a header names both; so none can be taken for that of another place.

Every page here is 4096 bytes, little-endian, and ends with a checksum of everything before it, so no single bit of
it can change unseen. An all-zero header page is a slot that was never written.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from longshore.boundary import PAGE, Key, Slabs, Status
from longshore.checksums import ALGORITHMS, XXH3_64, digest
from longshore.errors import FormatError
from longshore.tiers.base import KEY_BYTES

VERSION = 4
"""Version of all pages. A superblock of another version is refused, and its directory not changed."""

RECORD_MAGIC = b"LNGSHREC"
SUPERBLOCK_MAGIC = b"LNGSHSUP"
RESET_MAGIC = b"LNGSHRST"

OPENS_LIMIT = 2**24
"""A segment can be opened fewer times than this: `opens` is the upper part of a 64-bit write sequence number."""

SIZES_LIMIT = 255
"""A segment has fewer image sizes than this."""

SLOTS_LIMIT = 2**32
"""Numbers of slots lie below this one."""

_SERIAL_BITS = 40
_HAS_PARENT = 1
_NO_PARENT = bytes(KEY_BYTES)
_EMPTY = bytes(PAGE)

_PROLOGUE = struct.Struct("<8sI")  # magic, version: the same in every version there will be
_RECORD = struct.Struct("<8sIHH32s32s32sQQQQQQ")
_SUPERBLOCK = struct.Struct("<8sIIQQQQQ")
_RESET = struct.Struct("<8sIIQ")
_CHECKSUM = struct.Struct("<Q")
_CHECKED = PAGE - _CHECKSUM.size


class RecordHeader(NamedTuple):
    """The header before an image: identity and checksum of the image."""

    key: Key
    parent: Key | None
    scope: bytes
    slot: int
    generation: int
    length: int
    sequence: int
    payload_checksum: int
    pool: int = 0
    algorithm: int = XXH3_64


class Superblock(NamedTuple):
    """Geometry and generation of a segment: `slabs` slabs of `slab_bytes`, for images of the sizes `image_bytes`.

    The sizes ascend; the pool of each is its place among them. `opens` counts the processes that have opened the
    segment for writing; it is the upper part of their write sequence numbers, so that those grow across restarts
    without a scan.
    """

    slabs: int
    slab_bytes: int
    image_bytes: tuple[int, ...]
    generation: int
    opens: int

    @property
    def geometry(self) -> Slabs:
        """Slabs and slots, each slot with its header page."""
        return Slabs(self.slab_bytes, tuple(PAGE + size for size in self.image_bytes), self.slabs)


class Wanted(NamedTuple):
    """The record that a reader expects."""

    key: Key
    scope: bytes
    slot: int
    pool: int
    generation: int
    length: int


class HeaderCheck(NamedTuple):
    """Result of `judge` for a header page; the payload's checksum is valid only if `status` is OK."""

    status: Status
    payload_checksum: int = 0
    algorithm: int = XXH3_64


def sequence(opens: int, serial: int) -> int:
    """Write sequence number of the `serial`th write of the process that opened the segment as its `opens`th."""
    return opens << _SERIAL_BITS | serial


def pack_header(header: RecordHeader) -> bytes:
    """The header page of `header`."""
    fields = _RECORD.pack(
        RECORD_MAGIC,
        VERSION,
        header.algorithm,
        0 if header.parent is None else _HAS_PARENT,
        header.key,
        _NO_PARENT if header.parent is None else header.parent,
        header.scope,
        header.slot,
        header.generation,
        header.length,
        header.sequence,
        header.payload_checksum,
        header.pool,
    )
    return seal(fields)


def is_empty(page: bytes) -> bool:
    """Whether `page` is the header of a slot that was never written."""
    return page == _EMPTY


def parse_header(page: bytes) -> RecordHeader:
    """The header in `page`; raises `FormatError` unless every bit of it is as `pack_header` would write it."""
    check_page("record header", page, RECORD_MAGIC)
    _, _, algorithm, flags, key, parent, scope, *numbers = _RECORD.unpack_from(page)
    slot, generation, length, written, payload, pool = numbers
    if algorithm not in ALGORITHMS:
        raise FormatError(f"record header: expected a checksum algorithm out of {ALGORITHMS}, got {algorithm}")
    if flags & ~_HAS_PARENT:
        raise FormatError(f"record header: unknown flags {flags:#06x}")
    if not flags and parent != _NO_PARENT:
        raise FormatError("record header: a parent without the flag that says so")
    if not length:
        raise FormatError("record header: an image of length 0")
    check_padding("record header", page, _RECORD.size)
    before = parent if flags else None
    return RecordHeader(key, before, scope, slot, generation, length, written, payload, pool, algorithm)


def judge(page: bytes, wanted: Wanted) -> HeaderCheck:
    """Compare the header in `page` with `wanted`. Does not verify the image."""
    if is_empty(page):
        return HeaderCheck(Status.MISMATCH)
    try:
        header = parse_header(page)
    except FormatError:
        return HeaderCheck(Status.CORRUPT)
    found = (header.key, header.scope, header.slot, header.pool, header.generation, header.length)
    return HeaderCheck(Status.OK if found == wanted else Status.MISMATCH, header.payload_checksum, header.algorithm)


def pack_superblock(superblock: Superblock) -> bytes:
    """The superblock page of `superblock`."""
    slabs, slab_bytes, sizes, generation, opens = superblock
    fields = _SUPERBLOCK.pack(SUPERBLOCK_MAGIC, VERSION, PAGE, slabs, slab_bytes, generation, opens, len(sizes))
    return seal(fields + struct.pack(f"<{len(sizes)}Q", *sizes))


def parse_superblock(page: bytes) -> Superblock:
    """The superblock in `page`; raises `FormatError` unless it is valid, and of this version."""
    check_page("superblock", page, SUPERBLOCK_MAGIC)
    _, _, header_bytes, slabs, slab_bytes, generation, opens, count = _SUPERBLOCK.unpack_from(page)
    if header_bytes != PAGE:
        raise FormatError(f"superblock: expected header pages of {PAGE} bytes, got {header_bytes}")
    if not 0 < count < SIZES_LIMIT:
        raise FormatError(f"superblock: expected from 1 to {SIZES_LIMIT - 1} image sizes, got {count}")
    sizes = struct.unpack_from(f"<{count}Q", page, _SUPERBLOCK.size)
    if list(sizes) != sorted(set(sizes)) or not sizes[0] or any(size % PAGE for size in sizes):
        raise FormatError(f"superblock: image_bytes must be positive multiples of {PAGE}, ascending, got {sizes}")
    if slab_bytes % PAGE or slab_bytes < PAGE + sizes[-1]:
        raise FormatError(f"superblock: slabs of {slab_bytes} bytes, for images of {sizes[-1]}")
    if not slabs:
        raise FormatError("superblock: a segment without slabs")
    if opens >= OPENS_LIMIT:
        raise FormatError(f"superblock: expected fewer than {OPENS_LIMIT} opens, got {opens}")
    superblock = Superblock(slabs, slab_bytes, sizes, generation, opens)
    if superblock.geometry.indices > SLOTS_LIMIT:
        raise FormatError(f"superblock: {superblock.geometry.indices} slots, the most are {SLOTS_LIMIT}")
    check_padding("superblock", page, _SUPERBLOCK.size + 8 * count)
    return superblock


def pack_reset(generation: int) -> bytes:
    """The page of a pending reset: nothing older than `generation` may be served."""
    return seal(_RESET.pack(RESET_MAGIC, VERSION, 0, generation))


def parse_reset(page: bytes) -> int:
    """The generation in `page`; raises `FormatError` unless it is valid, and of this version."""
    check_page("reset", page, RESET_MAGIC)
    _, _, zero, generation = _RESET.unpack_from(page)
    if zero:
        raise FormatError(f"reset: expected 0 behind the version, got {zero}")
    check_padding("reset", page, _RESET.size)
    return int(generation)


def seal(fields: bytes) -> bytes:
    """A page of `fields`, zeros, and the checksum of all that."""
    checked = fields.ljust(_CHECKED, b"\0")
    return checked + _CHECKSUM.pack(digest(checked))


def check_page(what: str, page: bytes, expected: bytes) -> None:
    """Raise `FormatError` unless `page` has a valid checksum, this version and magic; `what` is its name."""
    if len(page) != PAGE:
        raise FormatError(f"{what}: expected {PAGE} bytes, got {len(page)}")
    magic, version = _PROLOGUE.unpack_from(page)
    if magic != expected:
        raise FormatError(f"{what}: expected magic {expected!r}, got {magic!r}")
    if version != VERSION:
        raise FormatError(f"{what}: expected format version {VERSION}, got {version}")
    (stored,) = _CHECKSUM.unpack_from(page, _CHECKED)
    computed = digest(memoryview(page)[:_CHECKED])
    if stored != computed:
        raise FormatError(f"{what}: expected checksum {stored:#018x}, got {computed:#018x}")


def check_padding(what: str, page: bytes, used: int) -> None:
    """Raise `FormatError` unless nothing but zeros follows the `used` bytes of fields in `page`."""
    if page[used:_CHECKED] != _EMPTY[used:_CHECKED]:
        raise FormatError(f"{what}: padding that is not zero")
