"""From a transfer's ids to arrays of addresses and sizes, whole arrays at a time.

    select()      ids checked, what moves            selection.py
    describe()    device, host, size of each piece   whole-array numpy, runs merged
    plan()        both, as source, destination, size, with the bounds of each batch

Pieces come chunk by chunk, in each chunk reference by reference, in each reference block by block: the order of bytes
in the images, so that whatever can merge is adjacent, and bytes arrive item by item.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from longshore.boundary import HOST, Section
from longshore.errors import FreedLayoutError, PlanError
from longshore.layout.model import U64, KVLayout, RefTable
from longshore.transfer.selection import I64, Batch, Part, select

MAX_DESCRIPTORS = 4096
"""Descriptors per batch: a driver crashed at more than about 50,000 in one call."""

MAX_BYTES = 32 << 20
"""Bytes per batch: what a more urgent copy may have to wait for."""


_LONG_ROW = 16


class Pieces(NamedTuple):
    """What lies where: uint64 arrays of one shape `(pieces,)`, sizes in bytes."""

    device: U64
    host: U64
    size: U64


class Plan(NamedTuple):
    """Copies to make.

    Attributes:
        source: uint64, shape `(copies,)`, addresses.
        destination: uint64, shape `(copies,)`, addresses.
        size: uint64, shape `(copies,)`, bytes.
        batches: Half-open ranges of copies to submit together, in order.
    """

    source: U64
    destination: U64
    size: U64
    batches: tuple[tuple[int, int], ...]


class Planner:
    """Makes plans in buffers of its own, which grow to the longest plan and are kept.

    What a call returns is overwritten by the next one. Not thread-safe: one for each thread.
    """

    def __init__(self) -> None:
        self._room = 0
        self._reserve(1024)

    def plan(
        self,
        layout: KVLayout,
        sections: Sequence[Section],
        images: Sequence[int] | I64,
        *,
        into: str,
        host_address: int,
        host_bytes: int,
        valid: Sequence[int] | None = None,
        layers: tuple[int, int] | None = None,
        tokens: int | None = None,
        max_descriptors: int = MAX_DESCRIPTORS,
        max_bytes: int = MAX_BYTES,
    ) -> Plan:
        """The copies of one transfer; arguments and errors as for `select`.

        A batch has at most `max_descriptors` copies, and at most `max_bytes` unless one reference's pages of one chunk
        are more.
        """
        if max_descriptors <= 0 or max_bytes <= 0:
            raise PlanError(f"a batch needs a positive size, got {max_descriptors} descriptors, {max_bytes} bytes")
        selection = select(
            layout,
            sections,
            images,
            into=into,
            host_address=host_address,
            host_bytes=host_bytes,
            valid=valid,
            layers=layers,
            tokens=tokens,
        )
        cuts = _cuts(selection.whole, max_bytes)
        (device, host, size), ends = self._describe(selection.whole, cuts)
        batches: list[tuple[int, int]] = []
        start = 0
        for stop in ends:
            batches += [(at, min(at + max_descriptors, stop)) for at in range(start, stop, max_descriptors)]
            start = stop
        source, destination = (device, host) if into == HOST else (host, device)
        return Plan(source, destination, size, tuple(batches))

    def describe(self, batch: Batch) -> Pieces:
        """Addresses and sizes of what `batch` moves, adjacent runs merged.

        Raises:
            FreedLayoutError: The device memory is gone, or is no longer that which the ids were checked against.
        """
        return self._describe(batch, ())[0]

    def _describe(self, batch: Batch, cuts: Sequence[int]) -> tuple[Pieces, Sequence[int]]:
        """What `batch` moves, and where it ends; nothing merges across `cuts`, which are then ends too."""
        layout = batch.layout
        if batch.generation != layout.generation:
            raise FreedLayoutError(
                f"planned in generation {batch.generation} of a layout that is in {layout.generation}"
            )
        total = sum(part.pieces for part in batch.parts)
        pieces = self._reserve(total)
        start = 0
        adjacent = False
        for part in batch.parts:
            stop = start + part.pieces
            shape = (len(part.images), len(part.widths), part.blocks.shape[1])
            device, host, size = (column[start:stop].reshape(shape) for column in pieces)
            table = layout.table(part.group)
            _device_addresses(part, table, device)
            host_addresses(part, table, batch.host_address, host)
            size.reshape(shape[0], -1)[...] = part.widths if shape[2] == 1 else np.repeat(part.widths, shape[2])
            adjacent = adjacent or _may_merge(part, table) or (start > 0 and _meet(pieces, start))
            start = stop
        ends = (*cuts, total)
        return _merged(pieces, ends) if adjacent else (pieces, ends)

    def _reserve(self, count: int) -> Pieces:
        """The first `count` elements of the buffers."""
        if count > self._room:
            self._room = max(count, 2 * self._room)
            self._buffers = Pieces(*(np.empty(self._room, dtype=np.uint64) for _ in range(3)))
        device, host, size = self._buffers
        return Pieces(device[:count], host[:count], size[:count])


def plan(
    layout: KVLayout,
    sections: Sequence[Section],
    images: Sequence[int] | I64,
    *,
    into: str,
    host_address: int,
    host_bytes: int,
    valid: Sequence[int] | None = None,
    layers: tuple[int, int] | None = None,
    tokens: int | None = None,
    max_descriptors: int = MAX_DESCRIPTORS,
    max_bytes: int = MAX_BYTES,
) -> Plan:
    """`Planner.plan` in arrays of the plan's own."""
    return Planner().plan(
        layout,
        sections,
        images,
        into=into,
        host_address=host_address,
        host_bytes=host_bytes,
        valid=valid,
        layers=layers,
        tokens=tokens,
        max_descriptors=max_descriptors,
        max_bytes=max_bytes,
    )


def describe(batch: Batch) -> Pieces:
    """`Planner.describe` in arrays of the pieces' own."""
    return Planner().describe(batch)


def host_addresses(part: Part, table: RefTable, host_address: int, out: U64) -> None:
    """Fill `out`, shape `(chunks, references, subs)`, with the addresses of the part's pages in their images."""
    places = table.places[part.refs, part.sub : part.sub + part.blocks.shape[1]]
    images = part.images.view(np.uint64) + np.uint64(host_address)
    np.add(images[:, None, None], places, out=out)


def _device_addresses(part: Part, table: RefTable, out: U64) -> None:
    base, subs = table.base[part.refs], part.blocks.shape[1]
    blocks = part.blocks.view(np.uint64)
    if table.pitch is None:
        np.multiply(blocks[:, None, :], table.stride[part.refs, None], out=out)
        out += base[:, None]
        return
    offsets = blocks * table.pitch  # one product per block, not per block and reference
    if subs >= _LONG_ROW:
        np.add(offsets[:, None, :], base[:, None], out=out)
    else:  # numpy runs along the last axis, and each run costs as much as many elements: rather along the references
        for sub in range(subs):
            np.add(offsets[:, sub, None], base, out=out[:, :, sub])


def _may_merge(part: Part, table: RefTable) -> bool:
    """Whether two pieces of `part` may be adjacent on both sides: no is certain, yes is not.

    Looks at blocks and images, not at each piece: whoever has scattered blocks need not search for runs among them.
    """
    chunks, subs = part.blocks.shape
    first, last = part.blocks[:, 0], part.blocks[:, -1]
    if table.pitch is None or table.seams is None:
        return True
    if subs > 1 and (part.blocks[:, 1:] - part.blocks[:, :-1] == 1).any():
        return True
    if table.seams and len(part.widths) > 1:
        if subs == 1:
            if 0 in table.seams:
                return True
        elif any((last - first == seam).any() for seam in table.seams):
            return True
    if chunks == 1:
        return False
    # From the last page of a chunk to the first page of the next one.
    ref = part.first_ref + len(part.widths) - 1
    image_step = int(table.places[ref, part.sub + subs - 1]) + int(part.widths[-1]) - int(
        table.places[part.first_ref, part.sub]
    )
    next_image = part.images[1:] - part.images[:-1] == image_step
    if not next_image.any():
        return False
    gap = int(table.base[ref]) + int(part.widths[-1]) - int(table.base[part.first_ref])
    return bool((next_image & ((first[1:] - last[:-1]) * int(table.pitch) == gap)).any())


def _meet(pieces: Pieces, at: int) -> bool:
    """Whether piece `at` continues the one before it on both sides."""
    size = pieces.size[at - 1]
    return bool(pieces.host[at - 1] + size == pieces.host[at] and pieces.device[at - 1] + size == pieces.device[at])


def _cuts(batch: Batch, max_bytes: int) -> tuple[int, ...]:
    """Where to cut the pieces of `batch` so that it moves in batches of at most `max_bytes`."""
    counts = [sum(part.pieces for part in piece.parts) for piece in batch.cut(max_bytes)]
    return tuple(itertools.accumulate(counts[:-1]))


def merge(pieces: Pieces) -> Pieces:
    """`pieces` with each run that is adjacent on both sides as one piece, in the same order."""
    return _merged(pieces, (len(pieces.size),))[0]


def _merged(pieces: Pieces, ends: Sequence[int]) -> tuple[Pieces, Sequence[int]]:
    """`merge`, but never across `ends`; and the ends in what it makes."""
    device, host, size = pieces
    if len(size) < 2:
        return pieces, ends
    starts = np.empty(len(size), dtype=np.bool_)
    starts[0] = True
    np.not_equal(host[:-1] + size[:-1], host[1:], out=starts[1:])
    starts[1:] |= device[:-1] + size[:-1] != device[1:]
    starts[list(ends[:-1])] = True
    first = np.flatnonzero(starts)
    if len(first) == len(size):
        return pieces, ends
    return Pieces(device[first], host[first], np.add.reduceat(size, first)), np.searchsorted(first, ends).tolist()


def joined(many: Sequence[Pieces]) -> Pieces:
    """All of `many`, one after the other."""
    if len(many) == 1:
        return many[0]
    empty = np.empty(0, dtype=np.uint64)
    return Pieces(*(np.concatenate([empty, *(pieces[column] for pieces in many)]) for column in range(3)))


def expand(ids: npt.ArrayLike, factor: int, skip: int = 0) -> I64:
    """The small ids that make up large ones: `factor` consecutive ones each, without the first `skip`.

    For block tables that count in larger blocks than a tensor does: `expand([0, 1, 3], 4, skip=1)` is
    `[1, 2, 3, 4, 5, 6, 7, 12, 13, 14, 15]`. Result: int64, shape `(len(ids) * factor - skip,)`.
    """
    large = np.asarray(ids, dtype=np.int64).reshape(-1)
    if factor <= 0 or not 0 <= skip <= len(large) * factor or (large < 0).any():
        raise PlanError(f"cannot expand {len(large)} ids (none negative) by {factor} and skip {skip} of the result")
    return (large[:, None] * factor + np.arange(factor)).reshape(-1)[skip:]
