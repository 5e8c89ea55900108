"""The tier's index: which record is in which slot. It is read by the next process; this one asks its control plane.

    invalidate      these slots hold no record; called before anything is written to them
    insert          this record was written completely
    delete_record   this record was found unusable
    touch           this record was served: it is the most recently used one
    checkpoint      write all entries into the older of two files
    Checkpointer    writes checkpoints when they are due, in a thread of its own

An invalidation is written to the journal before the first byte that overwrites the record, so no later process lists a
record that was being overwritten; a record that cannot be invalidated must not be overwritten. A journal has room for
an invalidation of every record that the disk lists. Only a crash of the machine can lose one, and reads verify anyway.
Insertions are written in batches, and not at all where they would take the room of invalidations: a crash loses such
records until the next checkpoint, and never an invalidation.

    entries   slot 0: a    slot 1: -    slot 2: b    slot 3: c
    listed    yes          no           yes          no            whether checkpoint and journal on disk list a record

Only records that the disk lists have to be invalidated. A slab has the entries of one size class: a write for another
invalidates all of them with one journal record.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from longshore.boundary import DISK_PAGE, Key, Slabs
from longshore.errors import TierError
from longshore.tiers.file import format as fmt
from longshore.tiers.file.directory import Directory
from longshore.tiers.file.format import ENTRY, Entries, RecordHeader
from longshore.tiers.file.io import write_all

_log = logging.getLogger(__name__)

_FEW_RECORDS, _MANY_RECORDS = 256, 65536

_JOURNAL_BATCH_RECORDS = 64
"""Insertions after which the journal is written at the latest."""

_SIZE = ENTRY.itemsize
_WHOLE = np.dtype((np.void, _SIZE))  # an entry as a piece of memory: as `ENTRY`, it is copied field by field
_NOTHING = bytes(_SIZE)
_KEY, _SCOPE = slice(0, 32), slice(64, 96)  # of an entry


def checkpoint_name(epoch: int) -> str:
    """The file of checkpoint `epoch`."""
    return f"index.{epoch % 2}"


def journal_name(epoch: int) -> str:
    """The file of journal `epoch`."""
    return f"journal.{epoch % 2}"


def journal_records_for(slots: int) -> int:
    """Journal records that call for the next checkpoint of a tier of `slots` slots, at the latest."""
    return min(max(slots, _FEW_RECORDS), _MANY_RECORDS)


def index_files(slots: int) -> dict[str, int]:
    """The files of the index of `slots` slots, and how long each is: two checkpoints, two journals."""
    journal = fmt.journal_bytes(_room(slots))
    checkpoints = {checkpoint_name(epoch): fmt.checkpoint_bytes(slots) for epoch in (0, 1)}
    return checkpoints | {journal_name(epoch): journal for epoch in (0, 1)}


def _room(slots: int) -> int:
    """Journal records of one journal: one invalidation for each slot, and what calls for a checkpoint."""
    return slots + journal_records_for(slots)


class RecordIndex:
    """The index of the slots of `slabs` in `directory`, where room is reserved for its files. Thread-safe.

    It begins with `entries`, least recently used first, which are on the medium, as checkpoint `epoch`, when this
    returns; `recovery.load` says which epoch may be next. Journal records have serial numbers above `serial`.
    """

    def __init__(self, directory: Directory, slabs: Slabs, entries: Entries, epoch: int, serial: int) -> None:
        self._directory = directory
        self._slots, self._stride = slabs.indices, slabs.stride
        self._changing = threading.Lock()  # what is in memory, and the journal
        self._writing = threading.Lock()  # a checkpoint
        self._table: Entries = np.zeros(slabs.indices, ENTRY)
        self._used: npt.NDArray[np.int64] = np.zeros(slabs.indices, np.int64)  # when, by the clock
        self._clock = len(entries)
        self._is_listed = np.zeros(slabs.indices, np.bool_)
        self._size_classes = np.zeros(slabs.slabs, np.uint16)  # of each slab; that of one without entries means nothing
        slots = entries["slot"]
        self._table.view(_WHOLE)[slots] = np.ascontiguousarray(entries).view(_WHOLE)
        self._used[slots] = np.arange(1, self._clock + 1)
        self._is_listed[slots] = True
        self._size_classes[slots // self._stride] = entries["size_class"]
        # The same, a place at a time.
        self._rows, self._listed = self._table.view(np.uint8).data, self._is_listed.view(np.uint8).data
        self._class_of_slab = self._size_classes.data
        self._lengths, self._sequences, self._hits = (self._table[name] for name in ("length", "sequence", "hits"))
        self._listed_slots = len(entries)  # none needs more than one invalidation
        self._touched = 0
        self._inserted: dict[int, bytes] = {}  # by slot; not yet journaled
        self._missing = False  # whether something was inserted that is not journaled, and will not be
        # Until this checkpoint is whole, the one before it must be: its files are the last to be touched.
        self._write(epoch, entries, serial)
        self._journal = _Journal(directory, epoch, self._slots, serial)
        self._epoch = epoch

    @property
    def due(self) -> bool:
        """Whether it is time for a checkpoint."""
        return self._missing or 2 * max(self._journal.num_records, self._touched) >= journal_records_for(self._slots)

    def entries(self, wanted: Callable[[Entries], npt.NDArray[np.bool_]] | None = None) -> Entries:
        """The entries of all records, or of those `wanted`, least recently used first."""
        with self._changing:
            live = np.flatnonzero(self._lengths if wanted is None else wanted(self._table) & (self._lengths > 0))
            table, used = self._table.take(live), self._used.take(live)
        return _in_order(table, used)

    def find(self, records: Iterable[tuple[int, int, Key]], scope: bytes) -> list[int]:
        """The write sequence numbers of records by slot, size class and key; 0 where there is none in `scope`."""
        with self._changing:
            return [self._find(slot, size_class, key, scope) for slot, size_class, key in records]

    def is_assigned(self, slot: int, size_class: int) -> bool:
        """Whether the slab of `slot` is that of `size_class`: else nothing of it is there."""
        return self._class_of_slab[slot // self._stride] == size_class

    def invalidate(self, places: Iterable[tuple[int, int]]) -> None:
        """Invalidate slots, each with its size class, and all records of other size classes in their slabs.

        Raises `OSError` if the journal cannot be written. Nothing has changed then, and the slots must not be written.
        """
        with self._changing:
            self._invalidate(list(places))

    def delete_records(self, slots: Iterable[int]) -> None:
        """Delete the records in `slots`; no process finds them any more."""
        with self._changing:
            self._discard(slots)

    def delete_record(self, slot: int, sequence: int) -> None:
        """The record that was written with this sequence number is unusable: delete it, if `slot` still holds it."""
        with self._changing:
            if self._sequences[slot] == sequence:
                self._discard([slot])

    def insert(self, headers: Sequence[RecordHeader]) -> None:
        """Insert records that were written, except those whose slab was assigned to another size class meanwhile."""
        now = min(max(int(time.time()), 0), fmt.MAX_TIME)  # whatever the clock says
        entries = [fmt.pack_entry(header, now) for header in headers]
        with self._changing:
            for header, entry in zip(headers, entries, strict=True):
                slot = header.slot
                if self.is_assigned(slot, header.size_class):
                    self._rows[slot * _SIZE : (slot + 1) * _SIZE] = entry
                    self._use(slot)
                    self._inserted[slot] = entry
            if len(self._inserted) >= _JOURNAL_BATCH_RECORDS:
                self._journal_inserted()

    def flush(self) -> None:
        """Write insertions to the journal, for the next process."""
        with self._changing:
            if self._inserted:
                self._journal_inserted()

    def touch(self, slots: Iterable[int]) -> None:
        """Record that the records in `slots` were served."""
        with self._changing:
            for slot in slots:
                if self._sequences[slot]:
                    self._hits[slot] += 1
                    self._use(slot)
                    self._touched += 1

    def reset(self, generation: int) -> None:
        """Drop entries older than `generation`. The superblock already excludes them, so the journal need not."""
        with self._changing:
            older = self._table["generation"] < generation
            self._table[older] = np.zeros(1, ENTRY)
            self._is_listed[older] = False
            self._listed_slots = int(np.count_nonzero(self._is_listed))

    def checkpoint(self) -> None:
        """Write a checkpoint. After a `TierError`, the previous checkpoint and its journals are still valid.

        Changes go into the next journal as soon as the checkpoint begins; until it is complete, the previous checkpoint
        and both journals have the same content.
        """
        with self._writing:
            if self._journal.epoch != self._epoch:
                # An earlier attempt got that far. What its journal had no room for must wait for the next one.
                with self._changing:
                    table, used, covered_serial = self._table.copy(), self._used.copy(), self._journal.serial
                    table["length"][~self._is_listed] = 0
                self._finish(_in_order(table, used), covered_serial)
            following = _Journal(self._directory, self._epoch + 1, self._slots)
            with self._changing:
                following.serial = covered_serial = self._journal.serial
                self._journal, full = following, self._journal
                self._touched, self._missing = 0, False
                self._is_listed |= self._lengths > 0
                self._listed_slots = int(np.count_nonzero(self._is_listed))
                table, used = self._table.copy(), self._used.copy()
            full.close()
            self._finish(_in_order(table, used), covered_serial)

    def close(self) -> None:
        """Close the descriptor without writing the journal; a forked child may call this. Idempotent."""
        self._journal.close()

    def _find(self, slot: int, size_class: int, key: Key, scope: bytes) -> int:
        record = bytes(self._rows[slot * _SIZE : (slot + 1) * _SIZE])
        is_it = record[_KEY] == key and record[_SCOPE] == scope and self.is_assigned(slot, size_class)
        return int(self._sequences[slot]) if is_it else 0

    def _use(self, slot: int) -> None:
        self._clock += 1
        self._used[slot] = self._clock

    def _slab(self, slot: int) -> slice:
        first = slot // self._stride * self._stride
        return slice(first, first + self._stride)

    def _discard(self, slots: Iterable[int]) -> None:
        places = [(slot, self._class_of_slab[slot // self._stride]) for slot in slots]
        try:
            self._invalidate(places)
        except OSError as error:
            self._clear(places)
            self._journal_failed(error)

    def _invalidate(self, places: list[tuple[int, int]]) -> None:
        records: dict[range, bytes] = {}
        for slot, size_class in places:
            slab = self._slab(slot)
            if self.is_assigned(slot, size_class):
                which = range(slot, slot + self._listed[slot])
            else:
                which = range(slab.start, slab.stop if self._is_listed[slab].any() else slab.start)
            if which and which not in records:
                records[which] = fmt.pack_invalidation(slot, size_class)
        if records:
            self._journal.append([(fmt.INVALIDATED, entry) for entry in records.values()])
            for which in records:
                for slot in which:
                    self._listed_slots -= self._listed[slot]
                    self._listed[slot] = 0
        self._clear(places)

    def _clear(self, places: list[tuple[int, int]]) -> None:
        for slot, size_class in places:
            if self.is_assigned(slot, size_class):
                self._rows[slot * _SIZE : (slot + 1) * _SIZE] = _NOTHING
                self._inserted.pop(slot, None)
                continue
            slab = self._slab(slot)
            self._table[slab] = np.zeros(1, ENTRY)
            self._size_classes[slot // self._stride] = size_class
            for ended in [each for each in self._inserted if slab.start <= each < slab.stop]:
                del self._inserted[ended]

    def _journal_inserted(self) -> None:
        """Write insertions to the journal in one call, as far as it has room besides all future invalidations."""
        inserted, journal = list(self._inserted.items()), self._journal
        self._inserted.clear()
        some = inserted[: max(0, (journal.room - journal.num_records - self._listed_slots) // 2)]
        self._missing |= len(some) < len(inserted)
        for slot, _ in some:  # also if the write fails: part of it may be on disk
            self._listed_slots += not self._listed[slot]
            self._listed[slot] = 1
        try:
            journal.append([(fmt.INSERTED, entry) for _, entry in some])
        except OSError as error:
            self._journal_failed(error)

    def _journal_failed(self, error: OSError) -> None:
        if not self._missing:
            _log.warning(
                "%s: cannot be written: %s; newer records are lost if the process ends before the next checkpoint; "
                "check the disk",
                self._directory.path / journal_name(self._journal.epoch),
                error,
            )
        self._missing = True

    def _finish(self, entries: Entries, covered_serial: int) -> None:
        """Write the checkpoint whose journal has begun."""
        try:
            self._write(self._journal.epoch, entries, covered_serial)
        except TierError:
            self._missing = True  # on disk
            raise
        self._epoch = self._journal.epoch

    def _write(self, epoch: int, entries: Entries, covered_serial: int) -> None:
        name, io = checkpoint_name(epoch), self._directory.io
        header, body = fmt.pack_checkpoint(epoch, entries, covered_serial)
        fd = self._directory.reserve(name, fmt.checkpoint_bytes(self._slots))
        try:
            with self._directory.as_tier_errors(name):
                write_all(io, fd, body, DISK_PAGE)
                io.fsync(fd)  # before the header says that it is there
                write_all(io, fd, header, 0)
                io.fsync(fd)
        finally:
            io.close(fd)


def _in_order(table: Entries, used: npt.NDArray[np.int64]) -> Entries:
    """The entries of `table` that describe a record, least recently used first."""
    live = np.flatnonzero(table["length"])
    return table.take(live.take(np.argsort(used.take(live))))  # `take` copies whole entries; indexing, field by field


class _Journal:
    """An open, empty journal for the changes after checkpoint `epoch`.

    Nothing is synchronised. Records that the process has written survive a `kill -9`. A crash of the machine may lose
    the newest ones; verification at each read covers that.

    Attributes:
        room: Journal records that it has room for.
        serial: Of the last journal record, in this journal or one before it.
        num_records: Journal records that are in it.
    """

    def __init__(self, directory: Directory, epoch: int, slots: int, serial: int = 0) -> None:
        self.epoch = epoch
        self.room = _room(slots)
        self.serial = serial
        self.num_records = 0
        self._io = directory.io
        self._fd = directory.reserve(journal_name(epoch), fmt.journal_bytes(self.room))
        try:
            with directory.as_tier_errors(journal_name(epoch)):
                write_all(self._io, self._fd, fmt.pack_journal_header(epoch), 0)
        except BaseException:
            self._io.close(self._fd)
            raise

    def append(self, records: Sequence[tuple[int, bytes]]) -> None:
        """Append `records`, kinds and entries, in one write. After an `OSError` they are not valid, even if on disk.

        What comes next has higher serial numbers, and stands in their place.
        """
        if not records:
            return
        first = self.serial + 1
        self.serial += len(records)
        if self.num_records + len(records) > self.room:
            raise OSError(errno.ENOSPC, f"{journal_name(self.epoch)}: no room for {len(records)} more journal records")
        packed = (fmt.pack_journal_record(self.epoch, first + n, *each) for n, each in enumerate(records))
        data = b"".join(packed)
        write_all(self._io, self._fd, data, DISK_PAGE + self.num_records * fmt.JOURNAL_RECORD.itemsize)
        self.num_records += len(records)

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        if self._fd >= 0:
            self._io.close(self._fd)
            self._fd = -1


RETRY_SECONDS = 30.0
"""Delay after a failed checkpoint."""


class Checkpointer:
    """Writes checkpoints of `index`, one at a time. Thread-safe.

    Attributes:
        failures: Checkpoints that could not be written. The index continues; a restart may recover fewer records.
    """

    def __init__(self, index: RecordIndex, name: str) -> None:
        self.failures = 0
        self._index = index
        self._name = name
        self._busy = threading.Lock()  # from a begin_if_due to the end of its checkpoint; for ever, once closed
        self._closed = False
        self._not_before = 0.0

    def begin_if_due(self) -> None:
        """Begin a checkpoint if one is due, unless one is in progress or has just failed."""
        if self._index.due and time.monotonic() >= self._not_before and self._busy.acquire(blocking=False):
            try:
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
            except RuntimeError as error:  # the system has no more of them, or the interpreter is about to end
                self._failed(error)
                self._busy.release()

    def close(self) -> None:
        """Wait for the checkpoint in progress, and write a last one. Idempotent."""
        if not self._closed:
            self._closed = True
            self._busy.acquire()
            self._checkpoint()

    def _work(self) -> None:
        try:
            self._checkpoint()
        finally:
            self._busy.release()

    def _checkpoint(self) -> None:
        try:
            self._index.checkpoint()
        except TierError as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        self._not_before = time.monotonic() + RETRY_SECONDS
        self.failures += 1
        if self.failures == 1:
            _log.warning(
                "index checkpoint failed: %s; retry in %d s. Records written since the last one may be lost "
                "at a restart: check the disk. Later failures are only counted",
                error,
                RETRY_SECONDS,
            )
