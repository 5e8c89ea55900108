"""The segment, and the movement of images between it and memory: host memory here, device memory in `gds.py`.

    write    image ─► checksum ─► header │ image ─► segment          one call where images lie in host memory
    read     segment ─► header │ image ─► verified (`record_verifier.py`) ─► delivered

Direct I/O is used where the file system allows it, so that the page cache holds no second copy. Otherwise,
`Segment.direct` is false, and pages are dropped from the cache after they have been synchronised.
"""

from __future__ import annotations

import errno
import logging
import mmap
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from longshore.boundary import DISK_PAGE, Status, align
from longshore.checksums import XXH3_64, checksum
from longshore.errors import TierError
from longshore.tiers.arena import Arena
from longshore.tiers.base import TierOp
from longshore.tiers.file.directory import SEGMENT, Directory
from longshore.tiers.file.io import IoCoroutine, IoQueue, Move, Piece, read_into
from longshore.tiers.file.record_verifier import RecordVerifier

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors of a full disk or an exceeded quota."""

_log = logging.getLogger(__name__)


class Segment:
    """At least `nbytes` of the file of slots, all of them allocated.

    Attributes:
        direct: Whether reads and writes bypass the page cache. Then addresses, offsets and lengths must be aligned
            to `DISK_PAGE`.
        fd: Its descriptor.
        path: The file, for logs.
    """

    def __init__(self, directory: Directory, nbytes: int) -> None:
        self._io = directory.io
        self.path = directory.path / SEGMENT
        self.fd = directory.reserve(SEGMENT, nbytes)
        try:
            self.direct = self._io.enable_direct(self.fd)
        except OSError as error:
            self._io.close(self.fd)
            raise TierError(f"{self.path}: cannot be used: {error.strerror}") from error

    def open_queue(self, pieces: int, buffers: int) -> IoQueue | None:
        """Asynchronous I/O for `pieces` of at most `buffers`; `None` if the system has none."""
        try:
            return self._io.open_queue(self.fd, pieces, buffers) if self.direct else None
        except OSError as error:
            _log.warning(
                "%s: no asynchronous I/O (%s); falling back to a thread pool, which is slower: on ext4 or xfs, check "
                "fs.aio-max-nr",
                self.path,
                error.strerror,
            )
            return None

    def move(self, piece: Piece, *, writing: bool) -> int:
        """Move a piece with one plain call. Returns bytes, or a negative `EINTR`, one of `FULL`, or `EIO`."""
        try:
            moved = (self._io.pwritev if writing else self._io.preadv)(self.fd, piece.buffers, piece.offset)
            if not self.direct:
                if writing:  # only clean pages can be dropped: for the sake of memory, not of durability
                    self._io.fsync(self.fd)
                self._io.drop_cache(self.fd, piece.offset, moved)
        except OSError as error:
            _log.debug("%s: %s at byte %d failed: %s", self.path, "write" if writing else "read", piece.offset, error)
            return -error.errno if error.errno in FULL | {errno.EINTR} else -errno.EIO
        return moved

    def read_page(self, page: memoryview, offset: int) -> bool:
        """Read a page; returns whether the file has all of it. Raises `OSError`."""
        whole = read_into(self._io, self.fd, page, offset) == DISK_PAGE
        if not self.direct:
            self._io.drop_cache(self.fd, offset, DISK_PAGE)
        return whole

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        if self.fd >= 0:
            self._io.close(self.fd)
            self.fd = -1


MakeHeader = Callable[[int, int, int], bytes]
"""Makes the header page of a record: its index in the task, checksum algorithm and checksum -> page."""


class Staging(NamedTuple):
    """Page-aligned memory of one task: header pages, and room for an image that cannot be moved where it is."""

    headers: tuple[memoryview, ...]
    bounce: memoryview

    @property
    def header(self) -> memoryview:
        """The header page of a single record."""
        return self.headers[0]

    def padded(self, length: int) -> memoryview:
        """The pages of `bounce` for an image of `length`, zero after it."""
        body = self.bounce[: align(length)]
        body[length:] = bytes(len(body) - length)
        return body


def make_staging(image_bytes: int, records: int = 1) -> Staging:
    """Staging for images of up to `image_bytes`, and up to `records` of them at once."""
    memory = memoryview(mmap.mmap(-1, records * DISK_PAGE + image_bytes))
    headers = tuple(memory[at * DISK_PAGE : (at + 1) * DISK_PAGE] for at in range(records))
    return Staging(headers, memory[records * DISK_PAGE :])


class ImageIO(Protocol):
    """Moves images between the segment and the memory that the operations' offsets refer to."""

    @property
    def nbytes(self) -> int:
        """Bytes of that memory. Raises `TierClosedError` if it was closed."""

    @property
    def blocks(self) -> bool:
        """Whether its pieces are blocking calls, for the threads of a `ThreadQueue`."""

    def can_coalesce(self, op: TierOp) -> bool:
        """Whether the record of `op` can be coalesced with others."""

    def write(
        self, ops: Sequence[TierOp], staging: Staging, file_offsets: Sequence[int], make_header: MakeHeader
    ) -> IoCoroutine[list[Status]]:
        """Write records to `file_offsets` in the segment, ascending; several only where all join.

        Whether each was written whole. `DeviceError` means that none was.
        """

    def read(
        self, ops: Sequence[TierOp], staging: Staging, file_offsets: Sequence[int], verifier: RecordVerifier
    ) -> IoCoroutine[list[Status]]:
        """Read records at `file_offsets`, headers into those of `staging`; verified images go to the offsets of `ops`.

        Errors as for `write`.
        """

    def close(self) -> None:
        """Release all resources. Idempotent."""


class HostImageIO:
    """Images in `arena`. Each moves together with its header, without a copy if it is aligned."""

    blocks = False

    def __init__(self, arena: Arena, segment: Segment) -> None:
        self._arena = arena
        self._direct = segment.direct

    @property
    def nbytes(self) -> int:
        """Bytes of the arena; raises `TierClosedError` if it was closed."""
        return self._arena.array.nbytes

    def can_coalesce(self, op: TierOp) -> bool:
        """Whether `op` is aligned."""
        return is_aligned(op)

    def write(
        self, ops: Sequence[TierOp], staging: Staging, file_offsets: Sequence[int], make_header: MakeHeader
    ) -> IoCoroutine[list[Status]]:
        """Adjacent records are one piece; all pieces are submitted at once."""
        bodies = [self._body(op, staging) for op in ops]
        for index, (op, body, header) in enumerate(zip(ops, bodies, staging.headers, strict=False)):
            if self._is_staged(op):
                staging.padded(op.length)[: op.length] = self._arena.view(op.offset, op.length)
            header[:] = make_header(index, XXH3_64, checksum(XXH3_64, body[: op.length]))
        return (yield from move_records(staging.headers, bodies, file_offsets, writing=True))

    def read(
        self, ops: Sequence[TierOp], staging: Staging, file_offsets: Sequence[int], verifier: RecordVerifier
    ) -> IoCoroutine[list[Status]]:
        """As `write`."""
        bodies = [self._body(op, staging) for op in ops]
        statuses = yield from move_records(staging.headers, bodies, file_offsets, writing=False)
        for index, (op, body) in enumerate(zip(ops, bodies, strict=True)):
            if statuses[index] is Status.OK:
                image = body[: op.length]
                header = verifier.check_header(index, staging.headers[index])
                statuses[index] = header.status
                if header.status is Status.OK:
                    statuses[index] = verifier.check_image(header, checksum(header.algorithm, image))
                if statuses[index] is Status.OK and self._is_staged(op):
                    self._arena.view(op.offset, op.length)[:] = image
        return statuses

    def close(self) -> None:
        """No resources to release."""

    def _body(self, op: TierOp, staging: Staging) -> memoryview:
        return staging.bounce[: align(op.length)] if self._is_staged(op) else self._arena.view(op.offset, op.length)

    def _is_staged(self, op: TierOp) -> bool:
        return self._direct and not is_aligned(op)


def is_aligned(op: TierOp) -> bool:
    """Whether direct I/O can move the image of `op` where it is."""
    return (op.offset | op.length) % DISK_PAGE == 0


def move_records(
    headers: Sequence[memoryview], bodies: Sequence[memoryview], file_offsets: Sequence[int], *, writing: bool
) -> IoCoroutine[list[Status]]:
    """Move records to or from `file_offsets`, ascending: neighbours as one piece. One status each."""
    pieces: list[Piece] = []
    piece_of: list[int] = []
    end = -1
    for header, body, file_offset in zip(headers, bodies, file_offsets, strict=False):
        if file_offset == end:
            pieces[-1].buffers.extend((header, body))
        else:
            pieces.append(Piece([header, body], file_offset))
        piece_of.append(len(pieces) - 1)
        end = file_offset + DISK_PAGE + len(body)
    statuses = yield Move(pieces, writing)
    return [statuses[piece] for piece in piece_of]
