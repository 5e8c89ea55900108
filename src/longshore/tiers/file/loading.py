"""What earlier processes left of an index: the newest checkpoint that is whole, changed as the journals behind it say.

    checkpoint e, journal e, journal e + 1     the last one: of a checkpoint that was begun, and not ended

A checkpoint whose own journal has made way for a later one says too little, and is as good as none. Where there is
none, every header page is to be read.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import numpy as np

from longshore.errors import FormatError
from longshore.tiers.arena import PAGE
from longshore.tiers.file import index_format as fmt
from longshore.tiers.file.directory import Directory
from longshore.tiers.file.index_format import Entries, Notes
from longshore.tiers.file.journal import journal_name

_log = logging.getLogger(__name__)

_NEVER = bytes(PAGE)

_AT_ONCE = 4096 * fmt.NOTE.itemsize
"""Bytes of notes that are read together."""


class Found(NamedTuple):
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


def checkpoint_name(epoch: int) -> str:
    """The file of checkpoint `epoch`."""
    return f"index.{epoch % 2}"


def load(directory: Directory, stride: int) -> Found:
    """What the files in `directory` say, of slabs of `stride` slots. Raises `TierError` for files that are not ours."""
    checkpoints = [each for file in (0, 1) if (each := _read_checkpoint(directory, file)) is not None]
    journals = [_read_journal(directory, file) for file in (0, 1)]
    epochs = [each.epoch for each in checkpoints] + [each for each in journals if each is not None]
    highest = max([0, *epochs])
    for checkpoint in sorted(checkpoints, key=lambda each: each.epoch, reverse=True):
        entries = _replayed(directory, checkpoint, journals, stride)
        if entries is not None:
            ahead = highest + 1 - checkpoint.epoch
            return Found(highest + 1 if ahead % 2 else highest + 2, entries)
    return Found(highest + 1, None)


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
        _log.info("%s: %s", directory.path / name, error)
        return None


def _read_journal(directory: Directory, file: int) -> int | None:
    """The epoch of the journal in a file; -1 if there never was one, `None` if its header is no good."""
    page = directory.read(journal_name(file), PAGE)
    if not page or page == _NEVER:
        return -1
    try:
        return fmt.parse_journal_header(page)
    except FormatError as error:
        _log.info("%s: %s", directory.path / journal_name(file), error)
        return None
