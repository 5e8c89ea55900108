"""The file tier: block images on local NVMe that outlive the process, and never a byte that was not written.

Each operation moves [header, image] between a slot of the segment and the memory where images are (`payload.py`). It is
a cache: nothing is synchronised per record, so a crash may lose or tear the newest ones. Every read therefore verifies
everything, and what does not verify is a miss.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from longshore.boundary import FILE, Status
from longshore.errors import FormatError, TierClosedError, TierError
from longshore.slabs import Slabs
from longshore.tiers.arena import PAGE, Arena
from longshore.tiers.base import Op, StoredChunk, Tier, TierOp, TierResult
from longshore.tiers.file import format as fmt
from longshore.tiers.file.directory import OVERHEAD, Directory
from longshore.tiers.file.payload import HostPayload, Lane, Payload, make_lane
from longshore.tiers.file.segment import Segment
from longshore.tiers.file.system import RawIo
from longshore.tiers.file.workers import Workers
from longshore.tiers.ops import check_batch, check_digest, check_generation

_log = logging.getLogger(__name__)

_SCAN_THREADS = 16
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def capacity_for(slots: int, image_bytes: int) -> int:
    """The least `capacity` of a `FileTier` with `slots` slots, in bytes."""
    return OVERHEAD + slots * (PAGE + image_bytes)


class FileTier(Tier):
    """Slots for images of `image_bytes` in one file in `directory`, which this process alone uses until `close`.

    `capacity` bounds the bytes on disk, headers and administration included; they are allocated here, so that a full
    disk is met at start. Opening keeps what an earlier process wrote, if it wrote images of this size: with less
    capacity, the slots above are lost; with more, there are more. Images of another size are dropped: it is a cache.

    Attributes:
        direct: Whether the file system allows direct I/O. If not, pages are dropped from the page cache after each use.
    """

    def __init__(
        self,
        directory: Path,
        *,
        capacity: int,
        image_bytes: int,
        arena: Arena | Callable[[Segment], Payload],
        scope: bytes,
        threads: int = 16,
        io: RawIo | None = None,
    ) -> None:
        """Open the tier; raises `TierError`, `TierInUseError` or `FormatError`, with the files as they were.

        `arena` is where images are, or opens what moves them between the segment and other memory. `scope` is the
        32-byte fingerprint that bytes must have been written under to be served. `io` replaces the system calls, for
        tests.
        """
        slots = _slots_within(capacity, image_bytes)
        check_digest("a scope", scope)
        if threads <= 0:
            raise TierError(f"a file tier needs at least one thread, got {threads}")
        self.name = FILE
        self.slabs = Slabs.of_one_size(PAGE + image_bytes, slots)
        self.image_bytes = (image_bytes,)
        self._scope = scope
        self._closed = False
        self._superblock: fmt.Superblock
        with contextlib.ExitStack() as resources:
            self._directory = Directory(directory, io)
            resources.callback(self._directory.close)
            self._segment = self._open_segment()
            resources.callback(self._segment.close)
            self.direct = self._segment.direct
            self._payload = HostPayload(arena, self._segment) if isinstance(arena, Arena) else arena(self._segment)
            resources.callback(self._payload.close)
            self._lanes = [make_lane(image_bytes) for _ in range(threads)]
            self._workers = Workers(self._execute, threads, f"longshore-{self.name}")
            resources.callback(self._workers.close)
            self._resources = resources.pop_all()

    @property
    def generation(self) -> int:
        """The generation last given to `forget`, by this process or an earlier one; 0 at first."""
        return self._superblock.generation

    def submit(self, batch: Sequence[TierOp], deadline: float) -> int:
        """Queue `batch`. Generations above `generation` are refused: they have not been made known by `forget`."""
        self._check_open()
        arena_bytes = self._payload.nbytes  # raises when that memory is gone
        check_batch(batch, deadline, slabs=self.slabs, image_bytes=self.image_bytes, arena_bytes=arena_bytes)
        newest = max((op.generation for op in batch), default=0)
        if newest > self.generation:
            # Such a record would outlive a crash without its generation, and could be served after a later reset.
            raise TierError(f"generation {newest} was never given to forget(), which knows {self.generation}")
        return self._workers.submit(batch, deadline)

    def poll(self) -> list[TierResult]:
        """Results since the last call."""
        self._check_process()
        return self._workers.poll()

    def cancel(self, ticket: int) -> None:
        """End what has not begun of `ticket`."""
        self._check_process()
        self._workers.cancel(ticket)

    def close(self) -> None:
        """End what is queued, wait for what has begun, give back threads, files and the lock.

        In a forked child, which has neither threads nor lock of its own, only its copies of the descriptors go.
        """
        self._closed = True
        if self._directory.forked:
            self._segment.close()
            self._directory.close()
        else:
            self._resources.close()

    def forget(self, generation: int) -> None:
        """Serve nothing older than `generation`; that is on the medium when this returns.

        Raises `TierError` when it cannot be stored. Then this process still serves nothing older, but a later one
        might: the tier's directory must not be opened again.
        """
        self._check_open()
        check_generation(generation)
        if generation > self.generation:
            self._superblock = self._superblock._replace(generation=generation)
            self._directory.write_superblock(self._superblock)

    def recover(self) -> list[StoredChunk]:
        """Chunks of our scope and generation, least recently written first; of two with one key, the newer.

        Reads headers only: an image that was torn in a crash is found when it is read.
        """
        self._check_open()
        slots = self.slabs.slabs
        with ThreadPoolExecutor(min(_SCAN_THREADS, slots)) as pool:
            ranges = [range(first, slots, _SCAN_THREADS) for first in range(min(_SCAN_THREADS, slots))]
            found = [header for headers in pool.map(self._scan, ranges) for header in headers]
        found.sort(key=lambda header: header.sequence)
        newest = {header.key: header for header in found}
        return [StoredChunk(header.slot, header.key, header.parent) for header in found if newest[header.key] is header]

    def _check_process(self) -> None:
        if self._directory.forked:
            raise TierClosedError(f"{self._directory.path}: the file tier belongs to the process that forked this one")

    def _check_open(self) -> None:
        self._check_process()
        if self._closed:
            raise TierClosedError(f"{self._directory.path}: the file tier was closed")

    def _open_segment(self) -> Segment:
        path, (image_bytes,) = self._directory.path, self.image_bytes
        found = self._directory.read_superblock()
        if found is None:
            found = fmt.Superblock(self.slabs.slabs, image_bytes, generation=0, opens=0)
            erase = True
        else:
            erase = found.image_bytes != image_bytes
            if erase:
                _log.warning(
                    "%s held images of %d bytes; it starts empty, for images of %d bytes",
                    path,
                    found.image_bytes,
                    image_bytes,
                )
        if found.opens + 1 >= fmt.OPENS_LIMIT:
            raise FormatError(f"{path} was opened {found.opens} times, the most it can be; remove the directory")
        # The file first: whatever a crash leaves of it is a segment of the old geometry, at worst an empty one.
        segment = Segment(self._directory, self.slabs.slabs * self._stride, erase=erase)
        self._superblock = fmt.Superblock(self.slabs.slabs, image_bytes, found.generation, found.opens + 1)
        try:
            self._directory.write_superblock(self._superblock)
        except BaseException:
            segment.close()
            raise
        if not segment.direct:
            _log.warning("%s: the file system has no direct I/O; buffered reads and writes instead", path)
        return segment

    @property
    def _stride(self) -> int:
        return self.slabs.slab_bytes

    def _execute(self, op: TierOp, serial: int, worker: int) -> Status:
        if op.generation < self.generation:
            return Status.MISMATCH if op.op is Op.READ else Status.CANCELLED
        lane = self._lanes[worker]
        try:
            if op.op is Op.WRITE:
                return self._write(op, serial, lane)
            status = self._read(op, lane)
        except OSError as error:
            _log.debug("%s of slot %d: %s", op.op.value, op.slot, error)
            return Status.NO_SPACE if error.errno in _FULL else Status.IO_ERROR
        forgotten_meanwhile = status is Status.OK and op.generation < self.generation
        return Status.MISMATCH if forgotten_meanwhile else status

    def _write(self, op: TierOp, serial: int, lane: Lane) -> Status:
        def seal(algorithm: int, checksum: int) -> bytes:
            return fmt.pack_header(
                fmt.RecordHeader(
                    key=op.key,
                    parent=op.parent,
                    scope=self._scope,
                    slot=op.slot,
                    generation=op.generation,
                    length=op.length,
                    sequence=fmt.sequence(self._superblock.opens, serial),
                    payload_checksum=checksum,
                    algorithm=algorithm,
                )
            )

        self._payload.write(op, lane, op.slot * self._stride, seal)
        return Status.OK

    def _read(self, op: TierOp, lane: Lane) -> Status:
        arrived = self._payload.read(op, lane, op.slot * self._stride)
        if arrived.nbytes < PAGE + op.length:
            return Status.SHORT
        wanted = fmt.Wanted(op.key, self._scope, op.slot, op.generation, op.length)
        verdict = fmt.judge(bytes(lane.header), wanted)
        if verdict.status is not Status.OK:
            return verdict.status
        if not self._payload_is_intact(
            self._payload.checksum(op, lane, arrived, verdict.algorithm), verdict.payload_checksum
        ):
            return Status.CORRUPT
        self._payload.deliver(op, lane, arrived)
        return Status.OK

    def _payload_is_intact(self, found: int, expected: int) -> bool:
        """Whether an image has the checksum that was written. The one place: a negative control overrides it."""
        return found == expected

    def _scan(self, slots: range) -> list[fmt.RecordHeader]:
        """The valid headers of `slots` that are of our scope and generation."""
        page = make_lane(0).header
        found = []
        for slot in slots:
            try:
                whole = self._segment.read([page], slot * self._stride) == PAGE
                header = fmt.parse_header(bytes(page)) if whole and not fmt.is_empty(bytes(page)) else None
            except FormatError:
                continue  # torn or rotten: free space
            except OSError as error:
                _log.warning("%s: slot %d cannot be read: %s", self._directory.path, slot, error)
                continue
            if header is not None and self._is_ours(header, slot):
                found.append(header)
        return found

    def _is_ours(self, header: fmt.RecordHeader, slot: int) -> bool:
        return (
            header.scope == self._scope
            and header.generation == self.generation
            and header.slot == slot
            and header.length <= self.image_bytes[0]
        )


def _slots_within(capacity: int, image_bytes: int) -> int:
    if image_bytes <= 0 or image_bytes % PAGE:
        raise TierError(f"image_bytes must be a positive multiple of {PAGE}, got {image_bytes}")
    slots = (capacity - OVERHEAD) // (PAGE + image_bytes)
    if slots <= 0:
        raise TierError(
            f"expected a capacity of at least {capacity_for(1, image_bytes)} bytes, "
            f"for one image of {image_bytes}, got {capacity}"
        )
    return slots
