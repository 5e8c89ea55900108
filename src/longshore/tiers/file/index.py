"""The tier's index: which record lies in which slot, for the next process. This one asks its control plane.

    strike      these slots hold nothing from now on: said before anything is written to them
    enter       this record was written, whole
    condemn     this record was found unusable
    touch       this record was served: it is the one used last
    checkpoint  all that is known, in one go, into the older of two files

A strike reaches the system before the first byte of what replaces the record does, so no process that follows is told
of a record that was being overwritten. Only a crash of the machine can lose that, and reading verifies anyway. What was
entered may wait, for others to be noted in the same call: a crash before `flush` loses records, and never a strike.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from longshore.boundary import Key
from longshore.tiers.arena import PAGE
from longshore.tiers.file import index_format as fmt
from longshore.tiers.file.directory import Directory
from longshore.tiers.file.format import RecordHeader
from longshore.tiers.file.index_format import ENTRY, Entries
from longshore.tiers.file.journal import Journal, journal_name
from longshore.tiers.file.loading import checkpoint_name
from longshore.tiers.file.system import write_all

_FEW_NOTES, _MANY_NOTES = 256, 65536
_SIZE = ENTRY.itemsize
_NOTHING = bytes(_SIZE)
_KEY, _SCOPE = slice(0, 32), slice(64, 96)  # of an entry

_AT_ONCE = 64
"""Records that are noted together at the latest."""


def notes_for(slots: int) -> int:
    """Notes that a journal of a tier of `slots` slots has room for."""
    return min(max(slots, _FEW_NOTES), _MANY_NOTES)


def index_bytes(slots: int) -> int:
    """Bytes on disk of the index of `slots` slots: two checkpoints, two journals."""
    return 2 * (fmt.checkpoint_bytes(slots) + fmt.journal_bytes(notes_for(slots)))


class Index:
    """The index of `slots` slots in `directory`. Thread-safe.

    It begins with `entries`, least recently used first, which are on the medium, as checkpoint `epoch`, when this
    returns; `loading.load` says which epoch may be next. Notes have serial numbers above `serial`.
    """

    def __init__(self, directory: Directory, slots: int, entries: Entries, epoch: int, serial: int) -> None:
        self._directory = directory
        self._slots = slots
        self._table: Entries = np.zeros(slots, ENTRY)
        self._rows = self._table.view(np.uint8).data
        self._used: npt.NDArray[np.int64] = np.zeros(slots, np.int64)
        self._clock = len(entries)
        self._touched = 0
        self._entered: list[bytes] = []  # not yet noted
        self._changing = threading.Lock()  # what is in memory, and the journal
        self._writing = threading.Lock()  # a checkpoint
        self._table[entries["slot"]] = entries
        self._used[entries["slot"]] = np.arange(1, self._clock + 1)
        # Until this checkpoint is whole, the one before it must be: its files are the last to be touched.
        self._write(epoch, entries, serial)
        self._journal = Journal(directory, epoch, notes_for(slots))
        self._journal.serial = serial
        self._epoch = epoch
        try:
            for name, nbytes in (
                (checkpoint_name(epoch + 1), fmt.checkpoint_bytes(slots)),
                (journal_name(epoch + 1), fmt.journal_bytes(notes_for(slots))),
            ):
                directory.io.close(directory.reserve(name, nbytes))
        except BaseException:
            self._journal.close()
            raise

    @property
    def due(self) -> bool:
        """Whether it is time for a checkpoint."""
        return self._journal.silent or 2 * max(self._journal.written, self._touched) >= notes_for(self._slots)

    def entries(self) -> Entries:
        """The entries of all records, least recently used first."""
        with self._changing:
            return _in_order(self._table.copy(), self._used.copy())

    def claimed(self, slot: int, key: Key, scope: bytes) -> int:
        """The write sequence number of the record in `slot`, if there is one of `key` in `scope`; otherwise 0."""
        with self._changing:
            record = bytes(self._rows[slot * _SIZE : (slot + 1) * _SIZE])
            if record[_KEY] != key or record[_SCOPE] != scope or not self._table["length"][slot]:
                return 0
            return int(self._table["sequence"][slot])

    def strike(self, slots: Sequence[int]) -> None:
        """`slots` hold nothing from now on."""
        with self._changing:
            self._strike([slot for slot in slots if self._table["length"][slot]])

    def condemn(self, slot: int, sequence: int) -> None:
        """The record that was written with this sequence number is unusable: strike it, if `slot` still holds it."""
        with self._changing:
            if self._table["length"][slot] and self._table["sequence"][slot] == sequence:
                self._strike([slot])

    def enter(self, header: RecordHeader) -> None:
        """A record was written."""
        entry = fmt.pack_entry(header, int(time.time()))
        with self._changing:
            self._rows[header.slot * _SIZE : (header.slot + 1) * _SIZE] = entry
            self._use(header.slot)
            self._entered.append(entry)
            if len(self._entered) >= _AT_ONCE:
                self._note()

    def flush(self) -> None:
        """Note what was entered: the next process knows of it from here on."""
        with self._changing:
            if self._entered:
                self._note()

    def touch(self, slot: int) -> None:
        """The record in `slot` was served."""
        with self._changing:
            if self._table["length"][slot]:
                self._table["hits"][slot] += 1
                self._use(slot)
                self._touched += 1

    def forget(self, generation: int) -> None:
        """What is older than `generation` is gone; the superblock says so already."""
        with self._changing:
            self._table[self._table["generation"] < generation] = np.zeros(1, ENTRY)

    def checkpoint(self) -> None:
        """Put all that is known on the medium. Raises `TierError`: then what stood there before still does.

        From its beginning on, notes go into the next journal; until its end, the checkpoint before it and both journals
        say the same.
        """
        with self._writing:
            if self._journal.epoch == self._epoch:  # else an earlier attempt got that far
                self._turn_over()
            with self._changing:
                self._touched = 0
                known, table, used = self._journal.serial, self._table.copy(), self._used.copy()
            self._write(self._journal.epoch, _in_order(table, used), known)
            self._epoch = self._journal.epoch

    def close(self) -> None:
        """Give the descriptor back, and note nothing: a forked child may call this. Idempotent."""
        self._journal.close()

    def _use(self, slot: int) -> None:
        self._clock += 1
        self._used[slot] = self._clock

    def _strike(self, live: Sequence[int]) -> None:
        for slot in live:
            self._rows[slot * _SIZE : (slot + 1) * _SIZE] = _NOTHING
        if live:
            self._note([fmt.pack_strike(slot) for slot in live])

    def _note(self, struck: Sequence[bytes] = ()) -> None:
        """Note what was entered, and then what was struck, in one call."""
        notes = [(fmt.ENTERED, entry) for entry in self._entered]
        self._entered.clear()
        self._journal.append(notes + [(fmt.STRUCK, entry) for entry in struck])

    def _turn_over(self) -> None:
        """Begin the next journal."""
        following = Journal(self._directory, self._epoch + 1, notes_for(self._slots))
        with self._changing:
            following.serial = self._journal.serial
            self._journal, full = following, self._journal
        full.close()

    def _write(self, epoch: int, entries: Entries, known: int) -> None:
        name, io = checkpoint_name(epoch), self._directory.io
        header, body = fmt.pack_checkpoint(epoch, entries, known)
        fd = self._directory.reserve(name, fmt.checkpoint_bytes(self._slots))
        try:
            with self._directory.as_tier_errors(name):
                write_all(io, fd, body, PAGE)
                io.fsync(fd)  # before the header says that it is there
                write_all(io, fd, header, 0)
                io.fsync(fd)
        finally:
            io.close(fd)


def _in_order(table: Entries, used: npt.NDArray[np.int64]) -> Entries:
    """The entries of `table` that describe a record, least recently used first."""
    live = np.flatnonzero(table["length"])
    return table.take(live.take(np.argsort(used.take(live))))  # `take` copies whole entries; indexing, field by field
