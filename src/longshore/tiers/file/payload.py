"""How images get between memory and the segment: through host memory, or straight from a device's (`gds.py`).

write    image ─► checksum ─► header │ image ─► segment          one call where images lie in host memory
read     segment ─► header │ image                                verified by whoever asked, then delivered

Of several records (`turns.py`), those that lie one behind the other are one piece: header │ image │ header │ ...
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from longshore.boundary import Status
from longshore.checksums import XXH3_64, checksum
from longshore.tiers.arena import PAGE, Arena, align
from longshore.tiers.base import TierOp
from longshore.tiers.file.segment import Segment
from longshore.tiers.file.steps import Move, Steps
from longshore.tiers.file.system import Piece

Seal = Callable[[int, int, int], bytes]
"""The header page of a record, given its position among those that are written, algorithm and checksum of its image."""


class Lane(NamedTuple):
    """Page-aligned memory of one turn: header pages, and room for an image that cannot be moved where it is."""

    headers: tuple[memoryview, ...]
    bounce: memoryview

    @property
    def header(self) -> memoryview:
        """That of a single record."""
        return self.headers[0]


class Arrived(NamedTuple):
    """Which records a read brought whole, and whether the image is in the lane and not yet in its place."""

    statuses: list[Status]
    in_lane: bool


class Payload(Protocol):
    """The images of a tier's operations, in the memory that their offsets mean."""

    @property
    def nbytes(self) -> int:
        """Bytes of that memory. Raises `TierClosedError` when it is gone."""

    @property
    def waits(self) -> bool:
        """Whether its steps take their time, so that there must be threads for them."""

    def joins(self, op: TierOp) -> bool:
        """Whether its record can be moved together with others."""

    def write(self, ops: Sequence[TierOp], lane: Lane, places: Sequence[int], seal: Seal) -> Steps[list[Status]]:
        """Write records to bytes `places` of the segment, ascending; several only where all join.

        Whether each was written whole. `OSError` means that none was.
        """

    def read(self, ops: Sequence[TierOp], lane: Lane, places: Sequence[int]) -> Steps[Arrived]:
        """Read the records at `places`, headers into those of the lane. As `write`."""

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

    @property
    def waits(self) -> bool:
        """For nothing but memory."""
        return False

    def joins(self, op: TierOp) -> bool:
        """Whether it is moved where it is."""
        return is_aligned(op)

    def write(self, ops: Sequence[TierOp], lane: Lane, places: Sequence[int], seal: Seal) -> Steps[list[Status]]:
        """As many pieces as do not lie one behind the other, all at once."""
        bodies = [self._body(op, lane) for op in ops]
        for at, (op, body, header) in enumerate(zip(ops, bodies, lane.headers, strict=False)):
            if self._needs_lane(op):
                padded(lane, op.length)[: op.length] = self._arena.view(op.offset, op.length)
            header[:] = seal(at, XXH3_64, checksum(XXH3_64, body[: op.length]))
        return (yield from _move(bodies, lane, places, writing=True))

    def read(self, ops: Sequence[TierOp], lane: Lane, places: Sequence[int]) -> Steps[Arrived]:
        """The same."""
        bodies = [self._body(op, lane) for op in ops]
        statuses = yield from _move(bodies, lane, places, writing=False)
        return Arrived(statuses, self._needs_lane(ops[0]))

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

    def _body(self, op: TierOp, lane: Lane) -> memoryview:
        return lane.bounce[: align(op.length)] if self._needs_lane(op) else self._arena.view(op.offset, op.length)

    def _needs_lane(self, op: TierOp) -> bool:
        return self._segment.direct and not is_aligned(op)


def _move(bodies: Sequence[memoryview], lane: Lane, places: Sequence[int], *, writing: bool) -> Steps[list[Status]]:
    """Each with its header; those that lie one behind the other as one piece."""
    pieces: list[Piece] = []
    piece_of: list[int] = []
    end = -1
    for body, header, place in zip(bodies, lane.headers, places, strict=False):
        if place == end:
            pieces[-1].buffers.extend((header, body))
        else:
            pieces.append(Piece([header, body], place))
        piece_of.append(len(pieces) - 1)
        end = place + PAGE + len(body)
    statuses = yield Move(pieces, writing)
    return [statuses[piece] for piece in piece_of]


def is_aligned(op: TierOp) -> bool:
    """Whether direct I/O can move the image of `op` where it is."""
    return (op.offset | op.length) % PAGE == 0


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
