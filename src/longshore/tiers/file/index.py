"""The tier's index: which record lies in which slot, for the next process. This one asks its control plane.

    strike      these slots hold nothing from now on: said before anything is written to them
    enter       this record was written, whole
    condemn     this record was found unusable
    touch       this record was served: it is the one used last
    checkpoint  all that is known, in one go, into the older of two files

A strike reaches the system before the first byte of what replaces the record does, so no process that follows is told
of a record that was being overwritten: what cannot be struck must not be overwritten. A journal has room for a strike
of every record that the disk lists, whatever else is noted in it. Only a crash of the machine can lose one, and reading
verifies anyway. What was entered may wait, for others to be noted in the same call, and is not noted where that would
take the room of strikes: a crash loses such records until the next checkpoint, and never a strike.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence

from longshore.boundary import Key
from longshore.errors import TierError
from longshore.slabs import Slabs
from longshore.tiers.arena import PAGE
from longshore.tiers.file import index_format as fmt
from longshore.tiers.file.directory import Directory
from longshore.tiers.file.format import RecordHeader
from longshore.tiers.file.index_format import Entries
from longshore.tiers.file.journal import Journal, journal_name
from longshore.tiers.file.ledger import Ledger, in_order
from longshore.tiers.file.loading import checkpoint_name
from longshore.tiers.file.system import write_all

_log = logging.getLogger(__name__)

_FEW_NOTES, _MANY_NOTES = 256, 65536

_AT_ONCE = 64
"""Records that are noted together at the latest."""


def notes_for(slots: int) -> int:
    """Notes that call for the next checkpoint of a tier of `slots` slots, at the latest."""
    return min(max(slots, _FEW_NOTES), _MANY_NOTES)


def index_files(slots: int) -> dict[str, int]:
    """The files of the index of `slots` slots, and how long each is: two checkpoints, two journals."""
    journal = fmt.journal_bytes(_room(slots))
    checkpoints = {checkpoint_name(epoch): fmt.checkpoint_bytes(slots) for epoch in (0, 1)}
    return checkpoints | {journal_name(epoch): journal for epoch in (0, 1)}


def _room(slots: int) -> int:
    """Notes of one journal: one strike for each slot, and what calls for a checkpoint."""
    return slots + notes_for(slots)


class Index:
    """The index of the slots of `slabs` in `directory`, where room is reserved for its files. Thread-safe.

    It begins with `entries`, least recently used first, which are on the medium, as checkpoint `epoch`, when this
    returns; `loading.load` says which epoch may be next. Notes have serial numbers above `serial`.
    """

    def __init__(self, directory: Directory, slabs: Slabs, entries: Entries, epoch: int, serial: int) -> None:
        self._directory = directory
        self._slots = slabs.indices
        self._ledger = Ledger(slabs, entries)
        self._touched = 0
        self._entered: dict[int, bytes] = {}  # by slot; not yet noted
        self._missing = False  # whether something was entered that is not noted, and will not be
        self._changing = threading.Lock()  # what is in memory, and the journal
        self._writing = threading.Lock()  # a checkpoint
        # Until this checkpoint is whole, the one before it must be: its files are the last to be touched.
        self._write(epoch, entries, serial)
        self._journal = Journal(directory, epoch, _room(self._slots))
        self._journal.serial = serial
        self._epoch = epoch

    @property
    def due(self) -> bool:
        """Whether it is time for a checkpoint."""
        return self._missing or 2 * max(self._journal.written, self._touched) >= notes_for(self._slots)

    def entries(self) -> Entries:
        """The entries of all records, least recently used first."""
        with self._changing:
            everything = self._ledger.entries()
        return in_order(*everything)

    def claimed(self, records: Iterable[tuple[int, int, Key]], scope: bytes) -> list[int]:
        """The write sequence numbers of records by slot, pool and key, where there are such in `scope`; otherwise 0."""
        with self._changing:
            return [self._ledger.claimed(slot, pool, key, scope) for slot, pool, key in records]

    def is_given(self, slot: int, pool: int) -> bool:
        """Whether the slab of `slot` is that of `pool`: else nothing of it is there."""
        return self._ledger.pool_of(slot) == pool

    def strike(self, places: Iterable[tuple[int, int]]) -> None:
        """The slots of `places`, each with its pool, hold nothing from now on, nor do their slabs for other pools.

        Raises `OSError` where the disk does not take that. Nothing has changed then: they must not be written to.
        """
        with self._changing:
            self._strike(list(places))

    def discard(self, slots: Iterable[int]) -> None:
        """Nobody is to find the records in `slots` any more."""
        with self._changing:
            self._discard(slots)

    def condemn(self, slot: int, sequence: int) -> None:
        """The record that was written with this sequence number is unusable: discard it, if `slot` still holds it."""
        with self._changing:
            if self._ledger.sequence(slot) == sequence:
                self._discard([slot])

    def enter(self, headers: Sequence[RecordHeader]) -> None:
        """Records were written. One whose slab was given to another pool meanwhile is not there any more."""
        now = min(max(int(time.time()), 0), fmt.MAX_TIME)  # whatever the clock says
        entries = [fmt.pack_entry(header, now) for header in headers]
        with self._changing:
            for (slot, pool), entry in zip(((header.slot, header.pool) for header in headers), entries, strict=True):
                if self._ledger.pool_of(slot) == pool:
                    self._ledger.enter(slot, entry)
                    self._entered[slot] = entry
            if len(self._entered) >= _AT_ONCE:
                self._note_entered()

    def flush(self) -> None:
        """Note what was entered: the next process knows of it from here on."""
        with self._changing:
            if self._entered:
                self._note_entered()

    def touch(self, slots: Iterable[int]) -> None:
        """The records in `slots` were served."""
        with self._changing:
            for slot in slots:
                if self._ledger.sequence(slot):
                    self._ledger.count_hit(slot)
                    self._touched += 1

    def forget(self, generation: int) -> None:
        """What is older than `generation` is gone; the superblock says so already."""
        with self._changing:
            self._ledger.forget(generation)

    def checkpoint(self) -> None:
        """Put all that is known on the medium. Raises `TierError`: then what stood there before still does.

        From its beginning on, notes go into the next journal; until its end, the checkpoint before it and both journals
        say the same.
        """
        with self._writing:
            if self._journal.epoch != self._epoch:
                # An earlier attempt got that far. What its journal had no room for must wait for the next one.
                with self._changing:
                    everything, known = self._ledger.entries(told_only=True), self._journal.serial
                self._finish(in_order(*everything), known)
            following = Journal(self._directory, self._epoch + 1, _room(self._slots))
            with self._changing:
                following.serial = known = self._journal.serial
                self._journal, full = following, self._journal
                self._touched, self._missing = 0, False
                self._ledger.tell_all()
                everything = self._ledger.entries()
            full.close()
            self._finish(in_order(*everything), known)

    def close(self) -> None:
        """Give the descriptor back, and note nothing: a forked child may call this. Idempotent."""
        self._journal.close()

    def _discard(self, slots: Iterable[int]) -> None:
        places = [(slot, self._ledger.pool_of(slot)) for slot in slots]
        try:
            self._strike(places)
        except OSError as error:
            self._clear(places)
            self._note_missing(error)

    def _strike(self, places: list[tuple[int, int]]) -> None:
        strikes: dict[range, bytes] = {}
        for slot, pool in places:
            which = self._ledger.to_strike(slot, pool)
            if which and which not in strikes:
                strikes[which] = fmt.pack_strike(slot, pool)
        if strikes:
            self._journal.append([(fmt.STRUCK, entry) for entry in strikes.values()])
            for which in strikes:
                self._ledger.note_struck(which)
        self._clear(places)

    def _clear(self, places: list[tuple[int, int]]) -> None:
        for slot, pool in places:
            for ended in self._ledger.clear(slot, pool):
                self._entered.pop(ended, None)

    def _note_entered(self) -> None:
        """Note what was entered, in one call, as far as there is room for that and the strikes to come."""
        entered, journal = list(self._entered.items()), self._journal
        self._entered.clear()
        some = entered[: max(0, (journal.room - journal.written - self._ledger.strikable) // 2)]
        self._missing |= len(some) < len(entered)
        for slot, _ in some:
            self._ledger.note_entered(slot)  # also where that fails: part of it may lie there
        try:
            journal.append([(fmt.ENTERED, entry) for _, entry in some])
        except OSError as error:
            self._note_missing(error)

    def _note_missing(self, error: OSError) -> None:
        if not self._missing:
            _log.warning("%s: %s; the next checkpoint covers it", journal_name(self._journal.epoch), error)
        self._missing = True

    def _finish(self, entries: Entries, known: int) -> None:
        """Write the checkpoint whose journal has begun."""
        try:
            self._write(self._journal.epoch, entries, known)
        except TierError:
            self._missing = True  # in what is on the medium
            raise
        self._epoch = self._journal.epoch

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
