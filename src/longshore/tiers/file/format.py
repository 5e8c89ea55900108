"""All bytes of the file tier: record headers, superblock, checkpoints, journals. No I/O. Exact: docs/file-format.md.

    segment   ┌───────────────────────────────────┬───────────────────────────────────┬──
    slab      │ 0, for images of one size         │ 1, of another                     │
    slots     │ header │ image   header │ image   │ header │   image                  │
              └────────┴───────┴────────┴─────────┴────────┴──────────────────────────┴──
              0        4096                       slab_bytes

    index.0, index.1       ┌────────┬───────┬───────┬──     one page, and an entry for each record,
                           │ header │ entry │ entry │       least recently used first
                           └────────┴───────┴───────┴──
    journal.0, journal.1   ┌────────┬──────┬──────┬──       one page, and a journal record for each change since then
                           │ header │ rec. │ rec. │
                           └────────┴──────┴──────┴──

The position of a slot follows from its number, its size class (the number of an image size) and the superblock
(`longshore.boundary`). A header names slot and size class, so a record cannot be read as that of another slot.

Every page is 4096 bytes, little-endian, and ends with a checksum of everything before it: any changed bit is detected.
An all-zero header page is a slot that was never written. Checkpoint `e` and journal `e` are in the files `e % 2`. A
journal ends before the first record that is torn, or older than the one before it.

`record_verifier.py` checks a record at each read; `recovery.py` reads index and headers after a crash.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from longshore.boundary import DISK_PAGE, Key, Slabs, align
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
HAS_PARENT = 1
NO_PARENT = bytes(KEY_BYTES)
_EMPTY = bytes(DISK_PAGE)

_PROLOGUE = struct.Struct("<8sI")  # magic, version: the same in every version there will be
_RECORD = struct.Struct("<8sIHH32s32s32sQQQQQQ")
_SUPERBLOCK = struct.Struct("<8sIIQQQQQ")
_RESET = struct.Struct("<8sIIQ")
_CHECKSUM = struct.Struct("<Q")
_CHECKED = DISK_PAGE - _CHECKSUM.size


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
    size_class: int = 0
    algorithm: int = XXH3_64


class Superblock(NamedTuple):
    """Geometry and generation of a segment: `slabs` slabs of `slab_bytes`, for images of the sizes `image_bytes`.

    The sizes ascend; the size class of each is its place among them. `opens` counts the processes that have opened the
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
        return Slabs(self.slab_bytes, tuple(DISK_PAGE + size for size in self.image_bytes), self.slabs)


def sequence(opens: int, serial: int) -> int:
    """Write sequence number of the `serial`th write of the process that opened the segment as its `opens`th."""
    return opens << _SERIAL_BITS | serial


def pack_header(header: RecordHeader) -> bytes:
    """The header page of `header`."""
    fields = _RECORD.pack(
        RECORD_MAGIC,
        VERSION,
        header.algorithm,
        0 if header.parent is None else HAS_PARENT,
        header.key,
        NO_PARENT if header.parent is None else header.parent,
        header.scope,
        header.slot,
        header.generation,
        header.length,
        header.sequence,
        header.payload_checksum,
        header.size_class,
    )
    return finish_page(fields)


def is_empty(page: bytes) -> bool:
    """Whether `page` is the header of a slot that was never written."""
    return page == _EMPTY


def parse_header(page: bytes) -> RecordHeader:
    """The header in `page`; raises `FormatError` unless every bit of it is as `pack_header` would write it."""
    check_page("record header", page, RECORD_MAGIC)
    _, _, algorithm, flags, key, parent, scope, *numbers = _RECORD.unpack_from(page)
    slot, generation, length, sequence, payload, size_class = numbers
    if algorithm not in ALGORITHMS:
        raise FormatError(f"record header: expected a checksum algorithm out of {ALGORITHMS}, got {algorithm}")
    if flags & ~HAS_PARENT:
        raise FormatError(f"record header: unknown flags {flags:#06x}")
    if not flags and parent != NO_PARENT:
        raise FormatError("record header: parent set, flag missing")
    if not length:
        raise FormatError("record header: an image of length 0")
    check_padding("record header", page, _RECORD.size)
    before = parent if flags else None
    return RecordHeader(key, before, scope, slot, generation, length, sequence, payload, size_class, algorithm)


def pack_superblock(superblock: Superblock) -> bytes:
    """The superblock page of `superblock`."""
    slabs, slab_bytes, sizes, generation, opens = superblock
    fields = _SUPERBLOCK.pack(SUPERBLOCK_MAGIC, VERSION, DISK_PAGE, slabs, slab_bytes, generation, opens, len(sizes))
    return finish_page(fields + struct.pack(f"<{len(sizes)}Q", *sizes))


def parse_superblock(page: bytes) -> Superblock:
    """The superblock in `page`; raises `FormatError` unless it is valid, and of this version."""
    check_page("superblock", page, SUPERBLOCK_MAGIC)
    _, _, header_bytes, slabs, slab_bytes, generation, opens, count = _SUPERBLOCK.unpack_from(page)
    if header_bytes != DISK_PAGE:
        raise FormatError(f"superblock: expected header pages of {DISK_PAGE} bytes, got {header_bytes}")
    if not 0 < count < SIZES_LIMIT:
        raise FormatError(f"superblock: expected from 1 to {SIZES_LIMIT - 1} image sizes, got {count}")
    sizes = struct.unpack_from(f"<{count}Q", page, _SUPERBLOCK.size)
    if list(sizes) != sorted(set(sizes)) or not sizes[0] or any(size % DISK_PAGE for size in sizes):
        raise FormatError(f"superblock: image_bytes must be positive multiples of {DISK_PAGE}, ascending, got {sizes}")
    if slab_bytes % DISK_PAGE or slab_bytes < DISK_PAGE + sizes[-1]:
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
    return finish_page(_RESET.pack(RESET_MAGIC, VERSION, 0, generation))


def parse_reset(page: bytes) -> int:
    """The generation in `page`; raises `FormatError` unless it is valid, and of this version."""
    check_page("reset", page, RESET_MAGIC)
    _, _, zero, generation = _RESET.unpack_from(page)
    if zero:
        raise FormatError(f"reset: non-zero reserved field {zero:#x}")
    check_padding("reset", page, _RESET.size)
    return int(generation)


def finish_page(fields: bytes) -> bytes:
    """A page of `fields`, zeros, and the checksum of all that."""
    checked = fields.ljust(_CHECKED, b"\0")
    return checked + _CHECKSUM.pack(digest(checked))


def check_page(what: str, page: bytes, expected: bytes) -> None:
    """Raise `FormatError` unless `page` has a valid checksum, this version and magic; `what` is its name."""
    if len(page) != DISK_PAGE:
        raise FormatError(f"{what}: expected {DISK_PAGE} bytes, got {len(page)}")
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


CHECKPOINT_MAGIC = b"LNGSHIDX"
JOURNAL_MAGIC = b"LNGSHJNL"

ENTRY = np.dtype(
    [
        ("key", "V32"),
        ("parent", "V32"),  # zeros without one
        ("scope", "V32"),
        ("slot", "<u4"),
        ("flags", "<u2"),
        ("size_class", "<u2"),
        ("length", "<u8"),
        ("generation", "<u8"),
        ("sequence", "<u8"),
        ("written_at", "<u4"),  # Unix time in seconds; 0 where it is not known
        ("hits", "<u4"),  # reads that were served, up to the last checkpoint
    ]
)
"""An entry: 136 bytes. `length` 0 means no record."""

JOURNAL_RECORD = np.dtype([("checksum", "<u8"), ("epoch", "<u8"), ("serial", "<u8"), ("kind", "<u8"), ("entry", ENTRY)])
"""A journal record: 168 bytes."""

Entries = npt.NDArray[np.void]
JournalRecords = npt.NDArray[np.void]

INSERTED = 1
"""Kind of journal record: the slot holds this record."""

INVALIDATED = 2
"""Kind of journal record: the slot holds no record. Both kinds assign the slab to the size class of the slot."""

MAX_TIME = 2**32 - 1
"""The last second of Unix time that an entry can name."""

EPOCH_LIMIT = 2**63
"""Upper bound of epochs."""

_ENTRY = struct.Struct("<32s32s32sIHHQQQII")
_RECORD_HEAD = struct.Struct("<QQQ")  # epoch, serial, kind: what stands between the checksum and the entry
_CHECKPOINT = struct.Struct("<8sIIQQQQ")
_JOURNAL = struct.Struct("<8sIIQ")


class CheckpointHeader(NamedTuple):
    """The first page of a checkpoint."""

    epoch: int
    records: int
    covered_serial: int
    """Serial number of the last journal record that these entries include."""
    checksum: int
    """Checksum of the entries."""


def checkpoint_bytes(slots: int) -> int:
    """Length of a file for checkpoints of up to `slots` records."""
    return DISK_PAGE + align(slots * ENTRY.itemsize)


def journal_bytes(records: int) -> int:
    """Length of a file for journals of up to `records` records."""
    return DISK_PAGE + align(records * JOURNAL_RECORD.itemsize)


def pack_entry(header: RecordHeader, written_at: int) -> bytes:
    """The entry for a record that was written with `header`, in second `written_at` of Unix time."""
    parent, flags = (NO_PARENT, 0) if header.parent is None else (header.parent, HAS_PARENT)
    return _ENTRY.pack(
        header.key,
        parent,
        header.scope,
        header.slot,
        flags,
        header.size_class,
        header.length,
        header.generation,
        header.sequence,
        written_at,
        0,
    )


def entries_of(headers: Iterable[RecordHeader]) -> Entries:
    """The entries for records with these headers; nobody knows when they were written."""
    return np.frombuffer(b"".join(pack_entry(header, 0) for header in headers), ENTRY)


def pack_checkpoint(epoch: int, entries: Entries, covered_serial: int) -> tuple[bytes, bytes]:
    """Header page and body of a checkpoint of `entries` (`ENTRY`), least recently used first.

    They include the journal records up to serial number `covered_serial`.
    """
    body = entries.tobytes()
    fields = _CHECKPOINT.pack(
        CHECKPOINT_MAGIC, VERSION, ENTRY.itemsize, epoch, len(entries), covered_serial, digest(body)
    )
    return finish_page(fields), body


def parse_checkpoint_header(page: bytes) -> CheckpointHeader:
    """The header in `page`; raises `FormatError` unless it is valid, and of this version."""
    check_page("checkpoint", page, CHECKPOINT_MAGIC)
    _, _, entry_bytes, epoch, count, covered_serial, checksum = _CHECKPOINT.unpack_from(page)
    if entry_bytes != ENTRY.itemsize:
        raise FormatError(f"checkpoint: expected entries of {ENTRY.itemsize} bytes, got {entry_bytes}")
    _check_epoch("checkpoint", epoch)
    check_padding("checkpoint", page, _CHECKPOINT.size)
    return CheckpointHeader(epoch, count, covered_serial, checksum)


def parse_checkpoint_body(header: CheckpointHeader, body: bytes) -> Entries:
    """The entries in `body`; raises `FormatError` unless they are those that `header` was written with."""
    if len(body) != header.records * ENTRY.itemsize:
        raise FormatError(f"checkpoint: expected {header.records} entries, got {len(body)} bytes")
    if digest(body) != header.checksum:
        raise FormatError(f"checkpoint: expected entries with checksum {header.checksum:#018x}")
    entries = np.frombuffer(body, ENTRY)
    right = valid_entries(entries)
    if not right.all():
        raise FormatError(f"checkpoint: invalid entry {int(right.argmin())}")
    slots = np.sort(entries["slot"])
    if (slots[1:] == slots[:-1]).any():
        raise FormatError("checkpoint: two entries for one slot")
    return entries


def valid_entries(entries: Entries) -> npt.NDArray[np.bool_]:
    """Which of `entries` could have come from `pack_entry`."""
    alone = entries["flags"] == 0
    fits: npt.NDArray[np.bool_] = np.where(
        alone, entries["parent"] == np.void(NO_PARENT), entries["flags"] == HAS_PARENT
    )
    return fits & (entries["length"] > 0)


def fits_geometry(entries: Entries, slabs: Slabs) -> npt.NDArray[np.bool_]:
    """Which of `entries` are of slots that `slabs` have, whose images include a header page, and not too long."""
    images, room = np.array(slabs.images), np.array(slabs.image_bytes) - DISK_PAGE
    has_class = entries["size_class"] < len(images)
    size_classes = np.where(has_class, entries["size_class"], 0)
    slab, position = np.divmod(entries["slot"], slabs.stride)
    inside: npt.NDArray[np.bool_] = has_class & (slab < slabs.slabs) & (position < images[size_classes])
    return inside & (entries["length"] <= room[size_classes].astype(np.uint64))


def pack_journal_header(epoch: int) -> bytes:
    """The first page of journal `epoch`."""
    return finish_page(_JOURNAL.pack(JOURNAL_MAGIC, VERSION, JOURNAL_RECORD.itemsize, epoch))


def parse_journal_header(page: bytes) -> int:
    """The epoch in `page`; raises `FormatError` unless it is valid, and of this version."""
    check_page("journal", page, JOURNAL_MAGIC)
    _, _, record_bytes, epoch = _JOURNAL.unpack_from(page)
    if record_bytes != JOURNAL_RECORD.itemsize:
        raise FormatError(f"journal: expected journal records of {JOURNAL_RECORD.itemsize} bytes, got {record_bytes}")
    _check_epoch("journal", epoch)
    check_padding("journal", page, _JOURNAL.size)
    return int(epoch)


def _check_epoch(what: str, epoch: int) -> None:
    if not 0 < epoch < EPOCH_LIMIT:
        raise FormatError(f"{what}: expected an epoch from 1 to {EPOCH_LIMIT - 1}, got {epoch}")


def pack_journal_record(epoch: int, serial: int, kind: int, entry: bytes) -> bytes:
    """A record for journal `epoch`; `serial` must be higher than that of the record before it."""
    fields = _RECORD_HEAD.pack(epoch, serial, kind) + entry
    return _CHECKSUM.pack(digest(fields)) + fields


def pack_invalidation(slot: int, size_class: int) -> bytes:
    """The entry of a journal record that invalidates `slot` of `size_class`."""
    return _ENTRY.pack(NO_PARENT, NO_PARENT, NO_PARENT, slot, 0, size_class, 0, 0, 0, 0, 0)


def parse_journal_records(epoch: int, data: bytes, after: int = 0) -> JournalRecords:
    """The valid records of journal `epoch` that `data` begins with; their serial numbers are above `after`."""
    records = np.frombuffer(data, JOURNAL_RECORD, count=len(data) // JOURNAL_RECORD.itemsize)
    good = records["epoch"] == epoch
    good[:1] &= records["serial"][:1] > after
    good[1:] &= records["serial"][1:] > records["serial"][:-1]
    inserted, invalidated = records["kind"] == INSERTED, records["kind"] == INVALIDATED
    good &= (inserted & valid_entries(records["entry"])) | (invalidated & (records["entry"]["length"] == 0))
    few = len(good) if good.all() else int(good.argmin())  # before the first that is not good
    raw = memoryview(data)
    size, skip = JOURNAL_RECORD.itemsize, _CHECKSUM.size
    for at, stored in enumerate(records["checksum"][:few].tolist()):
        if digest(raw[at * size + skip : (at + 1) * size]) != stored:
            return records[:at]
    return records[:few]
