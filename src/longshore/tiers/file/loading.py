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


class _Journal(NamedTuple):
    epoch: int
    data: bytes


def checkpoint_name(epoch: int) -> str:
    """The file of checkpoint `epoch`."""
    return f"index.{epoch % 2}"


def load(directory: Directory) -> Found:
    """What the files in `directory` say. Raises `TierError` for files that are not ours."""
    checkpoints = [each for file in (0, 1) if (each := _read_checkpoint(directory, file)) is not None]
    journals = [_read_journal(directory, file) for file in (0, 1)]
    highest = max((each.epoch for each in (*checkpoints, *journals) if each is not None), default=0)
    for checkpoint in sorted(checkpoints, key=lambda each: each.epoch, reverse=True):
        entries = _replayed(checkpoint, journals)
        if entries is not None:
            ahead = highest + 1 - checkpoint.epoch
            return Found(highest + 1 if ahead % 2 else highest + 2, entries)
    return Found(highest + 1, None)


def _replayed(checkpoint: _Checkpoint, journals: list[_Journal | None]) -> Entries | None:
    entries = checkpoint.entries
    for epoch in (checkpoint.epoch, checkpoint.epoch + 1):
        notes = _notes(journals[epoch % 2], epoch)
        if notes is None:
            return None
        if epoch == checkpoint.epoch:
            notes = notes[notes["serial"] > checkpoint.known]
        entries = fmt.replay(entries, notes)
    return entries


def _notes(journal: _Journal | None, epoch: int) -> Notes | None:
    """The notes of journal `epoch` in this file; none if it was never begun; `None` if they are lost."""
    if journal is None or journal.epoch > epoch:
        return None
    return fmt.parse_notes(epoch, journal.data) if journal.epoch == epoch else np.zeros(0, fmt.NOTE)


def _read_checkpoint(directory: Directory, file: int) -> _Checkpoint | None:
    name = checkpoint_name(file)
    try:
        data = directory.read(name)
        header = fmt.parse_checkpoint_header(data[:PAGE])
        body = data[PAGE : PAGE + header.records * fmt.ENTRY.itemsize]
        return _Checkpoint(header.epoch, header.known, fmt.parse_checkpoint_body(header, body))
    except FormatError as error:
        if data.strip(b"\0"):
            _log.info("%s: %s", directory.path / name, error)
        return None


def _read_journal(directory: Directory, file: int) -> _Journal | None:
    """The journal in a file; with epoch -1 if there never was one, `None` if its header is no good."""
    data = directory.read(journal_name(file))
    page = data[:PAGE]
    if not page or page == _NEVER:
        return _Journal(-1, b"")
    try:
        return _Journal(fmt.parse_journal_header(page), data[PAGE:])
    except FormatError as error:
        _log.info("%s: %s", directory.path / journal_name(file), error)
        return None
