"""What earlier processes left: which records lie where, by checkpoint and journals, else by the headers of all records.

    checkpoint e, journal e, journal e + 1     the last one: of a checkpoint that was begun, and not ended

The newest checkpoint that is whole is changed as the journals behind it say. One whose own journal has made way for a
later one says too little, and is as good as none. Where there is none, every header page is read.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from longshore.errors import FormatError
from longshore.slabs import Slabs
from longshore.tiers.arena import PAGE
from longshore.tiers.file import format as records
from longshore.tiers.file import index_format as fmt
from longshore.tiers.file.directory import Directory
from longshore.tiers.file.index import checkpoint_name, journal_name
from longshore.tiers.file.index_format import ENTRY, Entries, Notes, pack_entry
from longshore.tiers.file.segment import Segment

_log = logging.getLogger(__name__)

_NEVER = bytes(PAGE)

_THREADS = 16

_AT_ONCE = 4096 * fmt.NOTE.itemsize
"""Bytes of notes that are read together."""


class IndexOnDisk(NamedTuple):
    """What was found.

    Attributes:
        epoch: Of the next checkpoint: higher than any, and not in the file of the one that was found.
        entries: Least recently used first; `None` where no checkpoint can be used.
    """

    epoch: int
    entries: Entries | None


class _Checkpoint(NamedTuple):
    epoch: int
    known: int
    entries: Entries


def recover(directory: Directory, segment: Segment, superblock: records.Superblock, held: int) -> tuple[Entries, int]:
    """What the first `held` slabs hold, least recently used first; and the epoch of the next checkpoint."""
    slabs = replace(superblock.geometry, slabs=held)
    epoch, entries = load(directory, slabs.stride)
    if entries is None:
        if held:
            _log.warning("%s: no usable index; recovering from the record headers of %d slabs", directory.path, held)
        entries = scan(segment, slabs)
    entries = entries.take(np.flatnonzero((entries["generation"] == superblock.generation) & fmt.fit(entries, slabs)))
    return fmt.one_size_a_slab(entries, slabs.stride), epoch


def load(directory: Directory, stride: int) -> IndexOnDisk:
    """What the files in `directory` say, of slabs of `stride` slots. Raises `TierError` for files that are not ours."""
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
        notes = _notes(directory, journals[epoch % 2], epoch)
        if notes is None:
            return None
        if epoch == checkpoint.epoch:
            notes = notes[notes["serial"] > checkpoint.known]
        entries = fmt.replay(entries, notes, stride)
    return entries


def _notes(directory: Directory, begun: int | None, epoch: int) -> Notes | None:
    """The notes of journal `epoch`, in whose file journal `begun` stands; none, if it was never begun; `None` if lost.

    No more is read than there are notes: there may be room for many.
    """
    if begun is None or begun > epoch:
        return None
    notes: list[Notes] = [np.zeros(0, fmt.NOTE)]
    last, more = 0, begun == epoch
    while more:
        data = directory.read(journal_name(epoch), _AT_ONCE, PAGE + _AT_ONCE * (len(notes) - 1))
        notes.append(fmt.parse_notes(epoch, data, after=last))
        more = notes[-1].nbytes == _AT_ONCE
        last = int(notes[-1]["serial"][-1]) if more else 0
    return np.concatenate(notes)


def _read_checkpoint(directory: Directory, file: int) -> _Checkpoint | None:
    name = checkpoint_name(file)
    page = directory.read(name, PAGE)
    if not page or page == _NEVER:
        return None
    try:
        header = fmt.parse_checkpoint_header(page)
        body = directory.read(name, header.records * fmt.ENTRY.itemsize, PAGE)
        return _Checkpoint(header.epoch, header.known, fmt.parse_checkpoint_body(header, body))
    except FormatError as error:
        _log.info("%s is not used: %s", directory.path / name, error)
        return None


def _read_journal(directory: Directory, file: int) -> int | None:
    """The epoch of the journal in a file; -1 if there never was one, `None` if its header is no good."""
    page = directory.read(journal_name(file), PAGE)
    if not page or page == _NEVER:
        return -1
    try:
        return fmt.parse_journal_header(page)
    except FormatError as error:
        _log.info("%s is not used: %s", directory.path / journal_name(file), error)
        return None


def scan(segment: Segment, slabs: Slabs) -> Entries:
    """Entries for all records whose headers are whole, and stand in their places; least recently written first.

    Of one slot there is only the record that was written last.
    """

    def headers(some: range) -> list[records.RecordHeader]:
        page = memoryview(mmap.mmap(-1, PAGE))
        return [
            header
            for slab in some
            for slot, pool in places(slabs, slab)
            if (header := _header(segment, slabs, slot, pool, page)) is not None
        ]

    ranges = [range(first, slabs.slabs, _THREADS) for first in range(_THREADS)]
    try:
        with ThreadPoolExecutor(_THREADS) as threads:
            found = [header for some in threads.map(headers, ranges) for header in some]
    except RuntimeError as error:
        _log.warning("recovery: reading record headers one by one, which is slower: no threads (%s)", error)
        found = headers(range(slabs.slabs))
    found.sort(key=lambda header: header.sequence)
    newest = {header.slot: header for header in found}
    return np.frombuffer(b"".join(pack_entry(each, 0) for each in found if newest[each.slot] is each), ENTRY)


def places(slabs: Slabs, slab: int) -> Iterator[tuple[int, int]]:
    """Slots and pools: all the records that could be in `slab`."""
    for pool in range(len(slabs.images)):
        for slot in slabs.slots_of(slab, pool):
            yield slot, pool


def _header(segment: Segment, slabs: Slabs, slot: int, pool: int, page: memoryview) -> records.RecordHeader | None:
    """The header of the record in `slot` of `pool`, read into `page`; `None` where none is, or it is torn or rotten."""
    try:
        whole = segment.read_page(page, slabs.offset(pool, slot))
        header = records.parse_header(bytes(page)) if whole and not records.is_empty(bytes(page)) else None
    except FormatError:
        return None
    except OSError as error:
        _log.warning("recovery: the record in slot %d is lost: its header cannot be read: %s", slot, error)
        return None
    return header if header is not None and (header.slot, header.pool) == (slot, pool) else None
