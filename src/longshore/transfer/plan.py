"""From a transfer's ids to arrays of addresses and sizes, whole arrays at a time.

    select()      ids checked, what moves            selection.py
    describe()    device, host, size of each piece   whole-array numpy, runs merged
    plan()        both, as source, destination, size, with the bounds of each batch

Pieces come chunk by chunk, in each chunk reference by reference, in each reference block by block: the order of bytes
in the images, so that whatever can merge is adjacent, and bytes arrive item by item.
"""

from __future__ import annotations

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
    """The copies of one transfer; arguments and errors as for `select`.

    A batch has at most `max_descriptors` copies, and at most `max_bytes` unless one reference's pages of one chunk are
    more.
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
    described = [describe(batch) for batch in selection.whole.cut(max_bytes)]
    batches: list[tuple[int, int]] = []
    start = 0
    for pieces in described:
        stop = start + len(pieces.size)
        batches += [(at, min(at + max_descriptors, stop)) for at in range(start, stop, max_descriptors)]
        start = stop
    device, host, size = joined(described)
    source, destination = (device, host) if into == HOST else (host, device)
    return Plan(source, destination, size, tuple(batches))


def describe(batch: Batch) -> Pieces:
    """Addresses and sizes of what `batch` moves, adjacent runs merged.

    Raises:
        FreedLayoutError: The device memory is gone, or is no longer that which the ids were checked against.
    """
    layout = batch.layout
    if batch.generation != layout.generation:
        raise FreedLayoutError(f"planned in generation {batch.generation} of a layout that is in {layout.generation}")
    counts = [part.blocks.size * len(part.widths) for part in batch.parts]
    pieces = Pieces(*(np.empty(sum(counts), dtype=np.uint64) for _ in range(3)))
    start = 0
    for part, count in zip(batch.parts, counts, strict=True):
        shape = (len(part.images), len(part.widths), part.blocks.shape[1])
        device, host, size = (column[start : start + count].reshape(shape) for column in pieces)
        table = layout.table(part.group)
        _device_addresses(part, table, device)
        host_addresses(part, table, batch.host_address, host)
        size[...] = part.widths[:, None]
        start += count
    return merge(pieces)


def host_addresses(part: Part, table: RefTable, host_address: int, out: U64) -> None:
    """Fill `out`, shape `(chunks, references, subs)`, with the addresses of the part's pages in their images."""
    subs = np.arange(part.sub, part.sub + part.blocks.shape[1], dtype=np.uint64)
    in_image = table.image[part.refs, None] + table.page[part.refs, None] * subs + np.uint64(host_address)
    np.add(part.images.astype(np.uint64)[:, None, None], in_image, out=out)


def _device_addresses(part: Part, table: RefTable, out: U64) -> None:
    base, stride = table.base[part.refs], table.stride[part.refs]
    blocks = part.blocks.astype(np.uint64)
    if (stride == stride[0]).all():  # one product per block, not per block and reference
        np.add((blocks * stride[0])[:, None, :], base[:, None], out=out)
    else:
        np.multiply(blocks[:, None, :], stride[:, None], out=out)
        out += base[:, None]


def merge(pieces: Pieces) -> Pieces:
    """`pieces` with each run that is adjacent on both sides as one piece, in the same order."""
    device, host, size = pieces
    if len(size) < 2:
        return pieces
    starts = np.empty(len(size), dtype=np.bool_)
    starts[0] = True
    np.not_equal(host[:-1] + size[:-1], host[1:], out=starts[1:])
    starts[1:] |= device[:-1] + size[:-1] != device[1:]
    first = np.flatnonzero(starts)
    if len(first) == len(size):
        return pieces
    return Pieces(device[first], host[first], np.add.reduceat(size, first))


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
