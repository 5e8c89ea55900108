"""The file tier: chunk images on local NVMe that outlive the process; every read is verified.

Each operation moves [header, image] between a slot of the segment and the memory where images are (`segment.py`). It is
a cache: nothing is synchronised per record, so a crash may lose or tear the newest ones. Every read therefore verifies
everything, and what does not verify is a miss.

`Health` counts failures and disables the tier after repeated ones:

    on ──► read-only     `MAX_FAILURES` writes in a row failed: the disk is full or worn out
       ──► off           `MAX_FAILURES` reads in a row failed

A success resets the count. A tier that is read-only or off stays so until it is opened again; this is logged once.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from pathlib import Path

import numpy as np

from longshore.boundary import FILE, Status, StoredChunks
from longshore.errors import DeviceError, TierClosedError, TierError
from longshore.tiers.arena import Arena
from longshore.tiers.base import (
    Op,
    Tier,
    TierOp,
    TierResult,
    check_batch,
    check_digest,
    check_generation,
    check_slots,
)
from longshore.tiers.file import format as fmt
from longshore.tiers.file.directory import Directory
from longshore.tiers.file.executor import TASK_RECORDS, WINDOW_TASKS, Executor, NumberedOp, coalesce
from longshore.tiers.file.index import Checkpointer
from longshore.tiers.file.io import IoCoroutine, IoQueue, RawIo, ThreadQueue
from longshore.tiers.file.record_verifier import ExpectedRecord, RecordVerifier
from longshore.tiers.file.recovery import open_files, slabs_within
from longshore.tiers.file.segment import FULL, HostImageIO, ImageIO, Segment, Staging, make_staging

MAX_FAILURES = 8
"""Consecutive failures of reads, or of writes, that change the state."""

_UNWRITABLE = (Status.IO_ERROR, Status.NO_SPACE, Status.DEVICE_ERROR)
_UNREADABLE = (Status.CORRUPT, Status.MISMATCH, Status.SHORT, Status.IO_ERROR, Status.DEVICE_ERROR)
_WRONG = (*((Op.READ, each) for each in _UNREADABLE), *((Op.WRITE, each) for each in _UNWRITABLE))
"""Counted failures."""

_FAILED = frozenset(_UNWRITABLE)


class TierState(enum.Enum):
    """Operations that a file tier accepts: all, reads only, or none."""

    ON = "on"
    READ_ONLY = "read_only"
    OFF = "off"


FAILURE_REASONS = (
    *(f"{op.value}_{status.value}" for op, status in _WRONG),
    *(state.value for state in (TierState.READ_ONLY, TierState.OFF)),
    "checkpoint",
)
"""Keys of `FileTier.failures`."""


class Health:
    """Health of the disk of the tier called `name`. Updated by one thread; attributes may be read by any.

    Attributes:
        state: The state.
    """

    def __init__(self, name: str) -> None:
        self.state = TierState.ON
        self._name = name
        self._failures = dict.fromkeys(Op, 0)
        self._wrong: Counter[tuple[Op, Status]] = Counter()

    def allows(self, op: Op) -> bool:
        """Whether operations of this kind are accepted."""
        return self.state is TierState.ON or (self.state is TierState.READ_ONLY and op is Op.READ)

    @property
    def failures(self) -> dict[str, int]:
        """Number of failures by kind, and 0 or 1 for the states read-only and off."""
        wrong = {f"{op.value}_{status.value}": self._wrong[op, status] for op, status in _WRONG}
        return {**wrong, **{state.value: int(state is self.state) for state in (TierState.READ_ONLY, TierState.OFF)}}

    def record(self, op: Op, statuses: Sequence[Status]) -> None:
        """Record the statuses of operations, in order."""
        if not self._failures[op] and statuses.count(Status.OK) == len(statuses):
            return
        for status in statuses:
            if status is Status.INTERNAL_ERROR:  # which says nothing of the disk
                continue
            if status is not Status.OK:
                self._wrong[op, status] += 1
            self._failures[op] = self._failures[op] + 1 if status in _FAILED else 0
            if self._failures[op] >= MAX_FAILURES and self.allows(op):
                self.state = TierState.OFF if op is Op.READ else TierState.READ_ONLY
                _log.error(
                    "file tier %s is %s until it is reopened (restart the engine); check the %s: %d %ss in a row "
                    "failed, the last with %s",
                    self._name,
                    self.state.value.replace("_", "-"),
                    "device" if status is Status.DEVICE_ERROR else "disk",
                    MAX_FAILURES,
                    op.value,
                    status.value,
                )


_log = logging.getLogger(__name__)

_NOT_MOVED = frozenset({Status.IO_ERROR, Status.NO_SPACE, Status.SHORT, Status.INTERNAL_ERROR})
"""Statuses of records that were not moved completely."""


class FileTier(Tier):
    """Slots for images of `image_bytes` in one file in `directory`, which is locked until `close`.

    `capacity` bounds the bytes on disk, headers and administration included; they are allocated here, so that a full
    disk is an error at start. Records of an earlier process are kept if its images had the same sizes; with less
    capacity, the slots above the new end are lost. Records of images of other sizes are discarded. The slab size is
    kept as well, unless the capacity has room for too few slabs of it.

    Attributes:
        direct: Whether the file system allows direct I/O. If not, pages are dropped from the page cache after each use.
    """

    def __init__(
        self,
        directory: Path,
        *,
        capacity: int,
        image_bytes: int | Sequence[int],
        arena: Arena | Callable[[Segment], ImageIO],
        scope: bytes,
        threads: int = 16,
        io: RawIo | None = None,
    ) -> None:
        """Open the tier. Raises `TierError`, `TierInUseError` or `FormatError`, and leaves the files unchanged then.

        Exception: a disk that fails after the superblock with the new geometry was written. The next start recovers
        the records that fit the new geometry.

        `arena` is the memory of the images, or a function that opens a `ImageIO` for other memory. `scope` is the
        32-byte fingerprint under which bytes must have been written to be served. `threads` move images where the
        system has no asynchronous I/O, or where images are on a device. `io` replaces the system calls, for tests.
        `image_bytes` may be several sizes, by size class and ascending.
        """
        sizes = (image_bytes,) if isinstance(image_bytes, int) else tuple(image_bytes)
        slabs_within(capacity, sizes)  # or it cannot be
        check_digest("a scope", scope)
        if threads <= 0:
            raise TierError(f"a file tier needs at least one thread, got {threads}")
        self.name = FILE
        self.image_bytes = sizes
        self._scope = scope
        self._closed = False
        self._pid = os.getpid()
        self._aio: IoQueue | None = None
        self._health = Health(str(directory))
        with contextlib.ExitStack() as resources:
            self._directory = Directory(directory, io)
            resources.callback(self._directory.close)
            opened = open_files(self._directory, capacity, sizes)
            self._superblock, self._segment, self._index = opened.superblock, opened.segment, opened.index
            self._superblocks = opened.superblocks
            resources.callback(self._superblocks.close)
            resources.callback(self._retry_reset)
            self.slabs = self._superblock.geometry
            self._stored_generation = self.generation
            resources.callback(self._segment.close)
            resources.callback(self._index.close)
            resources.callback(self._index.flush)
            self.direct = self._segment.direct
            if not self.direct:
                _log.warning(
                    "%s: the file system has no direct I/O; using buffered I/O, which is slower: put the directory on "
                    "local ext4 or xfs",
                    directory,
                )
            self._images = HostImageIO(arena, self._segment) if isinstance(arena, Arena) else arena(self._segment)
            resources.callback(self._images.close)
            self._checkpointer = Checkpointer(self._index, f"longshore-{self.name}-index")
            resources.callback(self._checkpointer.close)
            self._executor = self._start(threads)
            resources.callback(self._executor.close)
            self._resources = resources.pop_all()

    @property
    def fallbacks(self) -> Mapping[str, int]:
        """1 for each slower fallback in use, else 0.

        `no_direct_io`: I/O through the page cache. `no_queue`: one piece per thread, instead of asynchronous I/O.
        """
        return {"no_direct_io": int(not self.direct), "no_queue": int(self._aio is None and not self._images.blocks)}

    @property
    def generation(self) -> int:
        """The generation last given to `reset`, by this process or an earlier one; 0 at first."""
        return self._superblock.generation

    @property
    def completed(self) -> int:
        """Number of completed operations; while it grows, the disk responds."""
        return self._executor.completed

    @property
    def failures(self) -> dict[str, int]:
        """Number of failures, by kind; every kind is present from the start."""
        return {**self._health.failures, "checkpoint": self._checkpointer.failures}

    def submit(self, batch: Sequence[TierOp], deadline: float) -> int:
        """Queue `batch`. Raises `TierError` for a generation that `reset` was never called with."""
        self._check_open()
        nbytes, sizes = self._images.nbytes, self.image_bytes  # raises when that memory is gone
        last = self._stored_generation  # after a crash, a newer record could be served after a later reset
        check_batch(batch, deadline, slabs=self.slabs, image_bytes=sizes, arena_bytes=nbytes, last_reset=last)
        if self._health.allows(Op.WRITE):
            # All at once, in one system call; `_write` invalidates what was inserted since, or what failed.
            with contextlib.suppress(OSError):
                self._index.invalidate((op.slot, op.size_class) for op in batch if op.op is Op.WRITE)
        return self._executor.submit(batch, coalesce(batch, self._file_offset, self._images.can_coalesce), deadline)

    def poll(self) -> list[TierResult]:
        """Results since the last call. Records that they report as written are in the journal."""
        self._check_process()
        results = self._executor.poll()
        if results and not self._closed:
            self._index.flush()
            self._checkpointer.begin_if_due()
        return results

    def set_completion_callback(self, call: Callable[[], None]) -> None:
        """Set a completion callback: called in any thread when a batch has ended. It must be short."""
        self._executor.on_batch_end = call

    def cancel(self, ticket: int) -> None:
        """End operations of `ticket` that have not begun."""
        self._check_process()
        self._executor.cancel(ticket)

    def close(self) -> None:
        """End queued operations, wait for those that have begun, release threads, files and the lock.

        In a forked child, which has neither threads nor lock of its own, only its copies of the descriptors go.
        """
        self._closed = True
        if os.getpid() != self._pid:
            self._superblocks.close()
            if self._aio is not None:
                self._aio.close()
            self._segment.close()
            self._index.close()
            self._directory.close()
        else:
            self._resources.close()

    def reset(self, generation: int, scope: bytes | None = None) -> None:
        """Serve no record older than `generation`; durable on return. With `scope`, use that from now on.

        Raises `TierError` if the reset cannot be stored. This process then serves nothing older and accepts nothing
        newer, but a later process might serve older records, until a second call succeeds or `close` has written the
        reset or dropped the superblock.
        """
        self._check_open()
        check_generation(generation)
        check_digest("a scope", self._scope if scope is None else scope)
        if generation > self._stored_generation:
            self._superblock = self._superblock._replace(generation=max(generation, self.generation))
            self._superblocks.write(self._superblock)
            self._stored_generation = self.generation
            self._index.reset(self.generation)
        if scope is not None:
            self._scope = scope

    def weights_changed(self) -> None:
        """Records written from now on are served to this process only."""
        self._scope = os.urandom(len(self._scope))

    def recover(self) -> StoredChunks:
        """Chunks of this scope, least recently used first; of two with one key, the one written later.

        Reads the index only: an image that was torn in a crash is detected when it is read (`record_verifier.py`).
        """
        self._check_open()
        # A write that `reset` overtook may have been entered after it.
        scope, generation = np.void(self._scope), self.generation
        entries = self._index.entries(lambda each: (each["scope"] == scope) & (each["generation"] >= generation))
        keys = np.ascontiguousarray(entries["key"])
        beginnings = np.sort(keys.view("<u8")[:: keys.itemsize // 8])
        if (beginnings[1:] == beginnings[:-1]).any():  # there may be two of one key
            names, sequences = keys.tolist(), entries["sequence"].tolist()
            newest: dict[bytes, int] = {}
            for key, sequence in zip(names, sequences, strict=True):
                newest[key] = max(sequence, newest.get(key, 0))
            entries = entries[[newest[key] == sequence for key, sequence in zip(names, sequences, strict=True)]]
        numbers = (entries[name].astype(np.int64) for name in ("slot", "size_class"))
        keys, parents = (np.ascontiguousarray(entries[name]) for name in ("key", "parent"))
        slots, size_classes = numbers
        return StoredChunks(slots, keys, parents, entries["flags"] != 0, size_classes)

    def other_scope_slots(self) -> list[int]:
        """Slots that hold records of other scopes, least recently used first."""
        self._check_open()
        scope, generation = np.void(self._scope), self.generation
        theirs = self._index.entries(lambda each: (each["scope"] != scope) & (each["generation"] >= generation))
        slots: list[int] = theirs["slot"].tolist()
        return slots

    def delete_records(self, slots: Sequence[int]) -> None:
        """Delete the records in `slots`: the next process does not recover them.

        Raises `PlanError` for a slot out of range.
        """
        self._check_open()
        check_slots(slots, self.slabs)
        self._index.delete_records(slots)

    def _retry_reset(self) -> None:
        """Retry a reset that `reset` could not write; if that fails, drop the superblock, and with it all records."""
        if self.generation == self._stored_generation:
            return
        try:
            self._superblocks.write(self._superblock)
        except TierError as error:
            _log.error("%s; discarding all records, so that none from before the reset is served", error)
            try:
                self._superblocks.drop()
            except TierError as worse:
                _log.error(
                    "%s; remove %s before the next start, or records from before the reset may be served",
                    worse,
                    self._directory.path,
                )

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise TierClosedError(f"{self._directory.path}: the file tier belongs to the process that forked this one")

    def _check_open(self) -> None:
        self._check_process()
        if self._closed:
            raise TierClosedError(f"{self._directory.path}: the file tier was closed")

    def _file_offset(self, op: TierOp) -> int:
        """The byte of the segment where the record of `op` begins."""
        return self.slabs.offset(op.size_class, op.slot)

    def _start(self, threads: int) -> Executor:
        name = f"longshore-{self.name}"
        if not self._images.blocks:
            self._aio = self._segment.open_queue(WINDOW_TASKS * TASK_RECORDS, 2 * TASK_RECORDS)
        tasks, depth = (threads, threads) if self._aio is None else (WINDOW_TASKS, math.inf)
        stagings = [make_staging(self.image_bytes[-1], TASK_RECORDS) for _ in range(tasks)]
        queue = self._aio or ThreadQueue(self._segment.move, threads, name)
        return Executor(queue, self._segment, self._run_task, stagings, name, depth=depth)

    def _run_task(self, task: Sequence[NumberedOp], staging: Staging) -> IoCoroutine[Sequence[Status]]:
        """Carry out operations of one kind and generation; several only if all of them can be coalesced.

        Records that were not moved completely are retried one by one: a bad sector fails one record.
        """
        if (refusal := self._refusal(task[0].op)) is not None:
            return [refusal] * len(task)
        sequences, statuses = yield from self._try(task, staging)
        if len(task) == 1 or _all_ok(statuses):
            return self._record_results(task, sequences, statuses)
        moved = [status not in _NOT_MOVED for status in statuses]
        whole = list(compress(task, moved)), list(compress(sequences, moved)), list(compress(statuses, moved))
        settled = iter(self._record_results(*whole))
        ended: list[Status] = []
        for numbered, was_moved in zip(task, moved, strict=True):
            ended += [next(settled)] if was_moved else (yield from self._run_task([numbered], staging))
        return ended

    def _refusal(self, op: TierOp) -> Status | None:
        """The status of operations like `op` that must not be tried; `None` if they may."""
        if op.generation < self.generation:
            return Status.MISMATCH if op.op is Op.READ else Status.CANCELLED
        return None if self._health.allows(op.op) else Status.TIER_OFF

    def _try(self, task: Sequence[NumberedOp], staging: Staging) -> IoCoroutine[tuple[list[int], list[Status]]]:
        """Sequence numbers of the records to read (`RecordIndex.find`), and the statuses of `task`."""
        ops = [op for op, _ in task]
        reading = ops[0].op is Op.READ
        sequences = self._index.find([(op.slot, op.size_class, op.key) for op in ops], self._scope) if reading else []
        try:
            return sequences, (yield from self._read(ops, staging) if reading else self._write(task, staging))
        except OSError as error:
            _log.debug("%s of %d slots from %d on: %s", ops[0].op.value, len(ops), ops[0].slot, error)
            return sequences, [Status.NO_SPACE if error.errno in FULL else Status.IO_ERROR] * len(ops)
        except DeviceError as error:  # of the device where images are: what the disk holds is as good as before
            _log.debug("%s of slot %d: %s", ops[0].op.value, ops[0].slot, error)
            return [], [Status.DEVICE_ERROR] * len(ops)

    def _record_results(
        self, task: Sequence[NumberedOp], sequences: Sequence[int], statuses: list[Status]
    ) -> list[Status]:
        """Update index and health from `statuses`; returns them, as misses if there was a reset meanwhile."""
        if sequences:
            self._index.touch([op.slot for (op, _), how in zip(task, statuses, strict=True) if how is Status.OK])
            if not _all_ok(statuses):
                for (op, _), sequence, status in zip(task, sequences, statuses, strict=True):
                    if sequence and status.invalidates_source:
                        self._index.delete_record(op.slot, sequence)
            if task[0].op.generation < self.generation:
                statuses = [Status.MISMATCH if how is Status.OK else how for how in statuses]
        if statuses:
            self._health.record(task[0].op.op, statuses)
        self._checkpointer.begin_if_due()
        return statuses

    def _write(self, task: Sequence[NumberedOp], staging: Staging) -> IoCoroutine[list[Status]]:
        headers: list[fmt.RecordHeader] = []

        def make_header(index: int, algorithm: int, checksum: int) -> bytes:
            op, serial = task[index]
            sequence = fmt.sequence(self._superblock.opens, serial)
            identity = op.key, op.parent, self._scope, op.slot, op.generation, op.length
            headers.append(fmt.RecordHeader(*identity, sequence, checksum, op.size_class, algorithm))
            return fmt.pack_header(headers[-1])

        ops = [op for op, _ in task]
        self._index.invalidate([(op.slot, op.size_class) for op in ops])
        statuses = yield from self._images.write(ops, staging, list(map(self._file_offset, ops)), make_header)
        self._index.insert([header for header, how in zip(headers, statuses, strict=True) if how is Status.OK])
        return statuses

    def _read(self, ops: Sequence[TierOp], staging: Staging) -> IoCoroutine[list[Status]]:
        def expected(index: int) -> ExpectedRecord | None:
            op = ops[index]
            if not self._index.is_assigned(op.slot, op.size_class):
                return None
            return ExpectedRecord(op.key, self._scope, op.slot, op.size_class, op.generation, op.length)

        return (yield from self._images.read(ops, staging, list(map(self._file_offset, ops)), RecordVerifier(expected)))


def _all_ok(statuses: list[Status]) -> bool:
    return statuses.count(Status.OK) == len(statuses)  # by identity, in C: a status hashes itself in Python
