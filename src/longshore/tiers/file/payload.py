"""How images get between memory and the segment: through host memory, or straight from a device's (`gds.py`).

write    image ─► checksum ─► header │ image ─► segment          one call where images lie in host memory
read     segment ─► header │ image                                verified by whoever asked, then delivered

Several records that lie one behind the other (`runs.py`) go in one call: header │ image │ header │ image │ ...
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from longshore.checksums import XXH3_64, checksum
from longshore.tiers.arena import PAGE, Arena, align
from longshore.tiers.base import TierOp
from longshore.tiers.file.segment import Segment

Seal = Callable[[int, int, int], bytes]
"""The header page of a record, given its position among those that are written, algorithm and checksum of its image."""


class Lane(NamedTuple):
    """Page-aligned memory of one worker: header pages, and room for an image that cannot be moved where it is."""

    headers: tuple[memoryview, ...]
    bounce: memoryview

    @property
    def header(self) -> memoryview:
        """That of a single record."""
        return self.headers[0]


class Arrived(NamedTuple):
    """What a read brought: bytes, header included, and whether the image is in the lane and not yet in its place."""

    nbytes: int
    in_lane: bool


class Payload(Protocol):
    """The images of a tier's operations, in the memory that their offsets mean."""

    @property
    def nbytes(self) -> int:
        """Bytes of that memory. Raises `TierClosedError` when it is gone."""

    def joins(self, op: TierOp) -> bool:
        """Whether its record can be moved in one call with those before and behind it."""

    def write(self, ops: Sequence[TierOp], lane: Lane, place: int, seal: Seal) -> None:
        """Write records one behind the other from byte `place` of the segment on; several only where all join.

        `OSError` if that cannot be done whole.
        """

    def read(self, ops: Sequence[TierOp], lane: Lane, place: int) -> Arrived:
        """Read as many records from `place` on, headers into those of the lane; fewer bytes where the segment ends."""

    def checksum(self, op: TierOp, lane: Lane, arrived: Arrived, algorithm: int) -> int:
        """Of the image that was read."""

    def deliver(self, op: TierOp, lane: Lane, arrived: Arrived) -> None:
        """Bring the image, which is the right one, to where `op` wants it."""

    def close(self) -> None:
        """Give back what was taken at start. Idempotent."""


class HostPayload:
    """Images in `arena`: moved with their header in one call, from and to where they are if addresses allow it."""

    def __init__(self, arena: Arena, segment: Segment) -> None:
        self._arena = arena
        self._segment = segment

    @property
    def nbytes(self) -> int:
        """Bytes of the arena; raises when it was closed under us."""
        return self._arena.array.nbytes

    def joins(self, op: TierOp) -> bool:
        """Whether it is moved where it is."""
        return is_aligned(op)

    def write(self, ops: Sequence[TierOp], lane: Lane, place: int, seal: Seal) -> None:
        """One vectored call."""
        buffers = []
        for at, (op, header) in enumerate(zip(ops, lane.headers, strict=False)):
            body = image = self._arena.view(op.offset, op.length)
            if self._needs_lane(op):
                body = padded(lane, op.length)
                body[: op.length] = image
            header[:] = seal(at, XXH3_64, checksum(XXH3_64, body[: op.length]))
            buffers += [header, body]
        self._segment.write(buffers, place)

    def read(self, ops: Sequence[TierOp], lane: Lane, place: int) -> Arrived:
        """One vectored call."""
        in_lane = self._needs_lane(ops[0])
        buffers = []
        for op, header in zip(ops, lane.headers, strict=False):
            buffers += [header, lane.bounce[: align(op.length)] if in_lane else self._arena.view(op.offset, op.length)]
        return Arrived(self._segment.read(buffers, place), in_lane)

    def checksum(self, op: TierOp, lane: Lane, arrived: Arrived, algorithm: int) -> int:
        """Of the image, wherever it is."""
        view = lane.bounce[: op.length] if arrived.in_lane else self._arena.view(op.offset, op.length)
        return checksum(algorithm, view)

    def deliver(self, op: TierOp, lane: Lane, arrived: Arrived) -> None:
        """Copy it, if it is in the lane."""
        if arrived.in_lane:
            self._arena.view(op.offset, op.length)[:] = lane.bounce[: op.length]

    def close(self) -> None:
        """Nothing was taken."""

    def _needs_lane(self, op: TierOp) -> bool:
        return self._segment.direct and not is_aligned(op)


def is_aligned(op: TierOp) -> bool:
    """Whether direct I/O can move the image of `op` where it is."""
    return op.offset % PAGE == 0 and op.length % PAGE == 0


def make_lane(image_bytes: int, records: int = 1) -> Lane:
    """A lane for images of up to `image_bytes`, and up to `records` of them at once."""
    memory = memoryview(mmap.mmap(-1, records * PAGE + image_bytes))
    headers = tuple(memory[at * PAGE : (at + 1) * PAGE] for at in range(records))
    return Lane(headers, memory[records * PAGE :])


def padded(lane: Lane, length: int) -> memoryview:
    """The whole pages of the lane that an image of `length` takes, zero behind it."""
    body = lane.bounce[: align(length)]
    body[length:] = bytes(len(body) - length)
    return body
