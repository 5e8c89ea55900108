"""How a file tier begins: from what is in its directory to files that fit, and an index of what they hold.

    capacity ──► slots                    as many as fit, the books beside them included
    superblock, index ──► entries         what earlier processes left; without a usable index, every header is read
    ──► segment, index, superblock        each whole on the medium before the next one relies on it

When images have another size than before, the index is emptied first: at no time does an old record stand under a new
geometry, nor an entry without a record.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from longshore.errors import FormatError, TierError
from longshore.tiers.arena import PAGE
from longshore.tiers.file import format as fmt
from longshore.tiers.file.directory import OVERHEAD, SEGMENT, Directory
from longshore.tiers.file.index import Index, index_bytes
from longshore.tiers.file.index_format import ENTRY, Entries, pack_entry
from longshore.tiers.file.loading import load
from longshore.tiers.file.segment import Segment

_log = logging.getLogger(__name__)

_SCAN_THREADS = 16


@dataclass(frozen=True, slots=True)
class Opened:
    """The files of a tier, open."""

    superblock: fmt.Superblock
    segment: Segment
    index: Index


def capacity_for(slots: int, image_bytes: int) -> int:
    """The least `capacity` of a `FileTier` with `slots` slots, in bytes."""
    return OVERHEAD + index_bytes(slots) + slots * (PAGE + image_bytes)


def slots_within(capacity: int, image_bytes: int) -> int:
    """How many slots `capacity` bytes have room for; raises `TierError` if there is none."""
    if image_bytes <= 0 or image_bytes % PAGE:
        raise TierError(f"image_bytes must be a positive multiple of {PAGE}, got {image_bytes}")
    few, many = 0, max(0, capacity) // (PAGE + image_bytes) + 1
    while many - few > 1:
        slots = (few + many) // 2
        few, many = (slots, many) if capacity_for(slots, image_bytes) <= capacity else (few, slots)
    if few == 0:
        raise TierError(
            f"expected a capacity of at least {capacity_for(1, image_bytes)} bytes, "
            f"for one image of {image_bytes}, got {capacity}"
        )
    return few


def open_files(directory: Directory, slots: int, image_bytes: int) -> Opened:
    """Open the files in `directory` for `slots` images of `image_bytes`, and keep what they hold of that."""
    before = directory.read_superblock()
    found = load(directory)
    superblock = _next_superblock(directory, before, slots, image_bytes)
    keep = before is not None and before.image_bytes == image_bytes
    stride, serial = PAGE + image_bytes, fmt.sequence(superblock.opens, 0)
    held = min(slots, directory.length(SEGMENT) // stride)
    with contextlib.ExitStack() as undo:
        if not keep:
            index = Index(directory, slots, np.zeros(0, ENTRY), found.epoch, serial)
            undo.callback(index.close)
        segment = Segment(directory, slots * stride, erase=not keep)
        undo.callback(segment.close)
        if keep:
            entries = found.entries
            if entries is None:
                _log.warning("%s has no index that can be used: reading all %d headers", directory.path, held)
                entries = _scan(segment, held, stride)
            here = (entries["slot"] < held) & (entries["length"] <= image_bytes)
            here &= entries["generation"] == superblock.generation
            index = Index(directory, slots, entries[here], found.epoch, serial)
            undo.callback(index.close)
        directory.write_superblock(superblock)
        undo.pop_all()
    return Opened(superblock, segment, index)


def _next_superblock(
    directory: Directory, before: fmt.Superblock | None, slots: int, image_bytes: int
) -> fmt.Superblock:
    if before is None:
        return fmt.Superblock(slots, image_bytes, generation=0, opens=1)
    if before.opens + 1 >= fmt.OPENS_LIMIT:
        raise FormatError(f"{directory.path} was opened {before.opens} times, the most it can be; remove the directory")
    if before.image_bytes != image_bytes:
        _log.warning(
            "%s held images of %d bytes; it starts empty, for images of %d bytes",
            directory.path,
            before.image_bytes,
            image_bytes,
        )
    return fmt.Superblock(slots, image_bytes, before.generation, before.opens + 1)


def _scan(segment: Segment, slots: int, stride: int) -> Entries:
    """Entries for all records whose headers are whole, least recently written first."""

    def headers(some: range) -> list[fmt.RecordHeader]:
        page = memoryview(mmap.mmap(-1, PAGE))
        return [header for slot in some if (header := _header(segment, slot, stride, page)) is not None]

    with ThreadPoolExecutor(_SCAN_THREADS) as pool:
        ranges = [range(first, slots, _SCAN_THREADS) for first in range(_SCAN_THREADS)]
        found = [header for some in pool.map(headers, ranges) for header in some]
    found.sort(key=lambda header: header.sequence)
    return np.frombuffer(b"".join(pack_entry(header, 0) for header in found), ENTRY)


def _header(segment: Segment, slot: int, stride: int, page: memoryview) -> fmt.RecordHeader | None:
    """The header of the record in `slot`, read into `page`; `None` for a slot that is free, torn or rotten."""
    try:
        whole = segment.read([page], slot * stride) == PAGE
        header = fmt.parse_header(bytes(page)) if whole and not fmt.is_empty(bytes(page)) else None
    except FormatError:
        return None
    except OSError as error:
        _log.warning("slot %d cannot be read: %s", slot, error)
        return None
    return header if header is not None and header.slot == slot else None
