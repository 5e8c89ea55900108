"""Recovery: opens the files of a tier directory, loads the checkpoint, replays the journals.

    capacity, image sizes ──► slabs       as many as fit, index files included
    ──► all files reserved                a failure up to here leaves the directory as it was
    ──► superblock, and its copy          from here on the geometry is the new one, whatever fails afterwards
    index, else headers ──► entries       `recover`
    ──► files trimmed                     what is beyond the new ends

Where images have other sizes than before, the superblock also begins a generation: no older record or entry is valid,
so none can be read with a geometry that is not its own.

    checkpoint e, journal e, journal e + 1     the last one: of a checkpoint that was begun, and not completed

The newest complete checkpoint is loaded, and the journals after it are replayed (`replay_journal`). A checkpoint whose
own journal has been overwritten by a later one is not used. Without a usable checkpoint, every header page is read.

Torn journal records end the replay (`format.parse_journal_records`). Images are not read here: a torn one is detected
when it is served (`record_verifier`).
"""

from __future__ import annotations

import contextlib
import logging
import mmap
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from longshore.boundary import DISK_PAGE, Slabs
from longshore.errors import FormatError, TierError
from longshore.tiers.base import MAX_GENERATION
from longshore.tiers.file import format as fmt
from longshore.tiers.file.directory import FILES, SEGMENT, Directory, Superblocks
from longshore.tiers.file.format import ENTRY, Entries, JournalRecords
from longshore.tiers.file.index import RecordIndex, checkpoint_name, index_files, journal_name
from longshore.tiers.file.segment import Segment

_log = logging.getLogger(__name__)

_NEVER = bytes(DISK_PAGE)

_THREADS = 16

_READ_BYTES = 4096 * fmt.JOURNAL_RECORD.itemsize
"""Bytes of journal records read at once."""


class IndexOnDisk(NamedTuple):
    """The index in the files.

    Attributes:
        epoch: Epoch of the next checkpoint: higher than any, and not in the file of the checkpoint that was loaded.
        entries: Least recently used first; `None` where no checkpoint can be used.
    """

    epoch: int
    entries: Entries | None


class _Checkpoint(NamedTuple):
    epoch: int
    covered_serial: int
    entries: Entries


def recover(directory: Directory, segment: Segment, superblock: fmt.Superblock, held: int) -> tuple[Entries, int]:
    """Entries of the first `held` slabs, least recently used first, and the epoch of the next checkpoint."""
    slabs = replace(superblock.geometry, slabs=held)
    epoch, entries = load(directory, slabs.stride)
    if entries is None:
        if held:
            message = "%s: no usable index; recovering from the record headers of %d slabs, so this start is slower"
            _log.warning(message, directory.path, held)
        entries = scan(segment, slabs)
    entries = entries.take(
        np.flatnonzero((entries["generation"] == superblock.generation) & fmt.fits_geometry(entries, slabs))
    )
    return drop_former_sizes(entries, slabs.stride), epoch


def load(directory: Directory, stride: int) -> IndexOnDisk:
    """Load checkpoint and journals of a tier whose slabs have `stride` slots. Raises `TierError` for invalid files."""
    checkpoints = [each for file in (0, 1) if (each := _read_checkpoint(directory, file)) is not None]
    journals = [_read_journal(directory, file) for file in (0, 1)]
    epochs = [each.epoch for each in checkpoints] + [each for each in journals if each is not None]
    highest = max([0, *epochs])
    for checkpoint in sorted(checkpoints, key=lambda each: each.epoch, reverse=True):
        entries = _replayed(directory, checkpoint, journals, stride)
        if entries is not None:
            ahead = highest + 1 - checkpoint.epoch
            return IndexOnDisk(highest + 1 if ahead % 2 else highest + 2, entries)
    return IndexOnDisk(highest + 1, None)


def _replayed(directory: Directory, checkpoint: _Checkpoint, journals: list[int | None], stride: int) -> Entries | None:
    entries = checkpoint.entries
    for epoch in (checkpoint.epoch, checkpoint.epoch + 1):
        records = _journal_records(directory, journals[epoch % 2], epoch)
        if records is None:
            return None
        if epoch == checkpoint.epoch:
            records = records[records["serial"] > checkpoint.covered_serial]
        entries = replay_journal(entries, records, stride)
    return entries


def _journal_records(directory: Directory, begun: int | None, epoch: int) -> JournalRecords | None:
    """The records of journal `epoch`: empty if it was never begun, `None` if it was overwritten or is damaged.

    `begun` is the epoch of the journal in its file. Only as much of the file is read as has records.
    """
    if begun is None or begun > epoch:
        return None
    records: list[JournalRecords] = [np.zeros(0, fmt.JOURNAL_RECORD)]
    last, more = 0, begun == epoch
    while more:
        data = directory.read(journal_name(epoch), _READ_BYTES, DISK_PAGE + _READ_BYTES * (len(records) - 1))
        records.append(fmt.parse_journal_records(epoch, data, after=last))
        more = records[-1].nbytes == _READ_BYTES
        last = int(records[-1]["serial"][-1]) if more else 0
    return np.concatenate(records)


def _read_checkpoint(directory: Directory, file: int) -> _Checkpoint | None:
    name = checkpoint_name(file)
    page = directory.read(name, DISK_PAGE)
    if not page or page == _NEVER:
        return None
    try:
        header = fmt.parse_checkpoint_header(page)
        body = directory.read(name, header.records * fmt.ENTRY.itemsize, DISK_PAGE)
        return _Checkpoint(header.epoch, header.covered_serial, fmt.parse_checkpoint_body(header, body))
    except FormatError as error:
        why = "recovery: %s is not used: %s; the other checkpoint is read, or the record headers, which is slower"
        _log.info(why, directory.path / name, error)
        return None


def _read_journal(directory: Directory, file: int) -> int | None:
    """The epoch of the journal in a file; -1 if there never was one, `None` if its header is invalid."""
    page = directory.read(journal_name(file), DISK_PAGE)
    if not page or page == _NEVER:
        return -1
    try:
        return fmt.parse_journal_header(page)
    except FormatError as error:
        why = "recovery: %s is not used: %s; an older checkpoint is read, or the record headers, which is slower"
        _log.info(why, directory.path / journal_name(file), error)
        return None


def replay_journal(entries: Entries, records: JournalRecords, stride: int) -> Entries:
    """`entries` after `records` were applied, in order of insertion. A slab has `stride` slots.

    A journal record about a slot of one size class ends what other size classes had in its slab.
    """
    if not len(records):
        return entries
    lines = np.empty(len(entries) + len(records), ENTRY)
    lines[: len(entries)] = entries
    lines[len(entries) :] = records["entry"]
    slots = np.ascontiguousarray(lines["slot"])
    last = np.sort(_last_of_each(slots))
    last = last[last > _ended(slots // stride, np.ascontiguousarray(lines["size_class"]))[last]]
    replayed: Entries = lines.take(last[lines["length"][last] > 0])
    return replayed


def drop_former_sizes(entries: Entries, stride: int) -> Entries:
    """`entries` without those of former image sizes of slabs; the record written last has the current size."""
    if not entries["size_class"].any():
        return entries
    by_age = np.argsort(entries["sequence"], kind="stable")
    slabs = entries["slot"] // stride
    ended = np.empty(len(entries), np.int64)
    ended[by_age] = _ended(slabs[by_age], entries["size_class"][by_age])
    place = np.empty(len(entries), np.int64)
    place[by_age] = np.arange(len(entries))
    left: Entries = entries.take(np.flatnonzero(place > ended))
    return left


def _last_of_each(numbers: npt.NDArray[np.uint32]) -> npt.NDArray[np.int64]:
    """The last position of each of `numbers`."""
    order = np.argsort(numbers, kind="stable")
    following = numbers.take(order)
    last: npt.NDArray[np.int64] = order[np.append(following[1:] != following[:-1], True)]
    return last


def _ended(slabs: npt.NDArray[np.uint32], size_classes: npt.NDArray[np.uint16]) -> npt.NDArray[np.int64]:
    """For each line, in order of time: the last line that gave its slab to another size class than it has at last.

    What stands up to there is gone; -1 where the slab has had one size class only.
    """
    if not size_classes.any() or (size_classes == size_classes[0]).all():
        return np.full(len(slabs), -1)
    order = np.argsort(slabs, kind="stable")
    following = slabs.take(order)
    first = np.append(True, following[1:] != following[:-1])
    group = np.cumsum(first) - 1
    last_class = size_classes.take(order[np.append(first[1:], True)])
    other = np.where(size_classes.take(order) != last_class[group], order, -1)
    ended = np.empty(len(slabs), np.int64)
    ended[order] = np.maximum.reduceat(other, np.flatnonzero(first))[group]
    return ended


def scan(segment: Segment, slabs: Slabs) -> Entries:
    """Entries of all records with valid headers, least recently written first; the newest record of each slot."""

    def headers(some: range) -> list[fmt.RecordHeader]:
        page = memoryview(mmap.mmap(-1, DISK_PAGE))
        return [
            header
            for slab in some
            for slot, size_class in slots_of_slab(slabs, slab)
            if (header := _header(segment, slabs, slot, size_class, page)) is not None
        ]

    count = max(1, min(_THREADS, slabs.slabs))
    ranges = [range(first, slabs.slabs, count) for first in range(count)]
    try:
        with ThreadPoolExecutor(count) as threads:
            found = [header for some in threads.map(headers, ranges) for header in some]
    except RuntimeError as error:
        message = "recovery: %s: reading record headers one by one, which is slower: cannot start threads: %s"
        _log.warning(message, segment.path, error)
        found = headers(range(slabs.slabs))
    found.sort(key=lambda header: header.sequence)
    newest = {header.slot: header for header in found}
    return fmt.entries_of(each for each in found if newest[each.slot] is each)


def slots_of_slab(slabs: Slabs, slab: int) -> Iterator[tuple[int, int]]:
    """All slots that could be in `slab`, each with its size class."""
    for size_class in range(len(slabs.images)):
        for slot in slabs.slots_of(slab, size_class):
            yield slot, size_class


def _header(segment: Segment, slabs: Slabs, slot: int, size_class: int, page: memoryview) -> fmt.RecordHeader | None:
    """The header of the record in `slot` of `size_class`, read into `page`; `None` if none, or damaged."""
    try:
        whole = segment.read_page(page, slabs.offset(size_class, slot))
        header = fmt.parse_header(bytes(page)) if whole and not fmt.is_empty(bytes(page)) else None
    except FormatError:
        return None
    except OSError as error:
        message = "recovery: %s: the record in slot %d is lost: its header cannot be read: %s; check the disk"
        _log.warning(message, segment.path, slot, error)
        return None
    return header if header is not None and (header.slot, header.size_class) == (slot, size_class) else None


OVERHEAD = 2 * DISK_PAGE + sum(FILES.values())
"""Bytes of a tier's capacity that are neither slots nor index: the directory, the lock, superblock, copy and reset."""

_ENOUGH = 16
"""Slabs for each image size at which the slab size of a directory is kept."""


@dataclass(frozen=True, slots=True)
class OpenFiles:
    """The open files of a tier."""

    superblock: fmt.Superblock
    superblocks: Superblocks
    segment: Segment
    index: RecordIndex


def capacity_for(slots: int, image_bytes: int) -> int:
    """The least `capacity` of a `FileTier` with `slots` slots for images of one size, in bytes."""
    return capacity_of(Slabs.of_one_size(DISK_PAGE + image_bytes, slots))


def capacity_of(slabs: Slabs) -> int:
    """The least `capacity` of a `FileTier` with these slabs, in bytes; their images include a header page each."""
    return OVERHEAD + sum(index_files(slabs.indices).values()) + slabs.nbytes


def slabs_within(capacity: int, image_bytes: Sequence[int], slab_bytes: int | None = None) -> Slabs:
    """The slabs that fit `capacity` bytes, of `slab_bytes` if given.

    Raises `TierError` if there is none, or for invalid image sizes.
    """
    sizes = tuple(image_bytes)
    if not sizes or list(sizes) != sorted(set(sizes)) or len(sizes) >= fmt.SIZES_LIMIT:
        raise TierError(f"expected different image sizes, ascending, fewer than {fmt.SIZES_LIMIT}, got {sizes}")
    if sizes[0] <= 0 or any(size % DISK_PAGE for size in sizes):
        raise TierError(f"image_bytes must be a positive multiple of {DISK_PAGE}, got {sizes}")
    slots = tuple(DISK_PAGE + size for size in sizes)
    slabs = Slabs.within(max(0, capacity), slots) if slab_bytes is None else Slabs(slab_bytes, slots, 0)
    few, many = 0, max(0, capacity) // slabs.slab_bytes + 1
    while many - few > 1:
        some = (few + many) // 2
        few, many = (some, many) if capacity_of(replace(slabs, slabs=some)) <= capacity else (few, some)
    if few == 0:
        least = capacity_of(replace(slabs, slabs=1))
        raise TierError(f"expected a capacity of at least {least} bytes, for one image of {sizes[-1]}, got {capacity}")
    if few * slabs.stride > fmt.SLOTS_LIMIT:
        raise TierError(f"expected at most {fmt.SLOTS_LIMIT} slots, {capacity} bytes are {few * slabs.stride}")
    return replace(slabs, slabs=few)


def open_files(directory: Directory, capacity: int, image_bytes: Sequence[int]) -> OpenFiles:
    """Open the files in `directory` for images of `image_bytes`, and recover their records."""
    superblocks = Superblocks(directory)
    before = superblocks.read()
    for name, why in superblocks.damaged.items():
        _log.warning("%s: %s is damaged; rewriting it from the other copy: %s", directory.path, name, why)
    superblock = _next_superblock(directory, before, capacity, image_bytes, superblocks)
    slabs = superblock.geometry
    files = {**index_files(slabs.indices), **FILES}
    held = 0 if before is None else min(before.slabs, slabs.slabs, directory.length(SEGMENT) // slabs.slab_bytes)
    if before is None and directory.length(SEGMENT):
        directory.trim(SEGMENT, 0)  # the last generation is unknown
    directory.reserve_all({SEGMENT: slabs.nbytes, **files})
    directory.sync()
    with contextlib.ExitStack() as undo:
        segment = Segment(directory, slabs.nbytes)
        undo.callback(segment.close)
        undo.callback(superblocks.close)
        superblocks.open()
        superblocks.write(superblock)
        entries, epoch = recover(directory, segment, superblock, held)
        index = RecordIndex(directory, slabs, entries, epoch, fmt.sequence(superblock.opens, 0))
        undo.callback(index.close)
        for name, nbytes in {**files, SEGMENT: slabs.nbytes}.items():
            directory.trim(name, nbytes)
        undo.pop_all()
    return OpenFiles(superblock, superblocks, segment, index)


def _next_superblock(
    directory: Directory,
    before: fmt.Superblock | None,
    capacity: int,
    image_bytes: Sequence[int],
    superblocks: Superblocks,
) -> fmt.Superblock:
    sizes = tuple(image_bytes)
    fresh = slabs_within(capacity, sizes)
    if before is None:
        return fmt.Superblock(fresh.slabs, fresh.slab_bytes, sizes, superblocks.reset(), opens=1)
    if before.opens + 1 >= fmt.OPENS_LIMIT:
        raise FormatError(f"{directory.path} was opened {before.opens} times, which is the limit; remove the directory")
    if before.image_bytes == sizes:
        enough = max(fresh.slab_bytes, capacity // (_ENOUGH * len(sizes)))
        if before.slab_bytes <= enough:
            kept = slabs_within(capacity, sizes, before.slab_bytes)
            return before._replace(slabs=kept.slabs, opens=before.opens + 1)
    if before.generation >= MAX_GENERATION:
        raise FormatError(f"{directory.path} was reset too often for other image sizes; remove the directory")
    _log.warning(
        "%s: all records discarded: they are images of %s bytes in slabs of %d, and this model has images of %s bytes; "
        "give each model a directory of its own",
        directory.path,
        _listed(before.image_bytes),
        before.slab_bytes,
        _listed(sizes),
    )
    return fmt.Superblock(fresh.slabs, fresh.slab_bytes, sizes, before.generation + 1, before.opens + 1)


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))
