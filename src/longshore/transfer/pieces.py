"""Batches of pages, how they are cut, and their arrays of addresses and sizes, with adjacent pages merged.

A `CopyPart` is a number of chunks of one group, the same consecutive blocks of each chunk, and some of their pages. The
arrays of pieces, and the gather on a device, are computed from parts without a loop over blocks or references.

Pieces come in one of two orders:

    by image        chunk by chunk, in each chunk reference by reference, in each reference block by block: the order of
                    bytes in the images, so that pieces that can merge are adjacent
    by reference    reference by reference, in each reference block by block: long rows, which numpy fills several times
                    faster; used where nothing can merge and the order is not relevant
"""

from __future__ import annotations

from collections.abc import Iterator
from contextvars import Context
from typing import NamedTuple

import numpy as np

from longshore.boundary import HOST, I64
from longshore.errors import FreedLayoutError, former_name
from longshore.layout.model import U64, KVLayout, RefTable


class CopyPart(NamedTuple):
    """A rectangle of blocks of one group.

    Attributes:
        group: Index of the group.
        first_ref: First reference that moves; there are as many as `widths`.
        widths: uint64, shape `(references,)`: bytes that move of each page, from its start.
        blocks: int64, shape `(chunks, subs)`: device blocks, `subs` consecutive blocks of each chunk.
        images: int64, shape `(chunks,)`: byte offset of each chunk's image in host memory.
        block_in_chunk: Position of `blocks[:, 0]` in its chunk.
        item: Item of the transfer that `images[0]` belongs to; the others follow.
        sources: For copies inside the device, in place of images: int64, shape `(chunks, subs)`, the blocks to copy
            from.
        split: Whether references are pieces of pages, as in `KVLayout.table`; true if only some tokens of a page move.
    """

    group: int
    first_ref: int
    widths: U64
    blocks: I64
    images: I64
    block_in_chunk: int
    item: int
    sources: I64 | None = None
    split: bool = False

    @property
    def refs(self) -> slice:
        """The references that move, to index a `RefTable`."""
        return slice(self.first_ref, self.first_ref + len(self.widths))

    @property
    def chunk_bytes(self) -> int:
        """Bytes that move of each chunk."""
        return int(np.add.reduce(self.widths)) * int(self.blocks.shape[1])

    @property
    def nbytes(self) -> int:
        """Bytes that move."""
        return self.chunk_bytes * len(self.images)

    @property
    def page_copies(self) -> int:
        """Number of pages, or parts of pages, that move."""
        return self.blocks.size * len(self.widths)

    def cut(self, max_bytes: int) -> Iterator[CopyPart]:
        """Cut into parts of at most `max_bytes`, in order.

        Cuts between chunks; a chunk that is too long by itself is cut between references. A part has at least one
        reference's pages of one chunk.
        """
        chunk_bytes = self.chunk_bytes
        if chunk_bytes * len(self.images) <= max_bytes:
            yield self
            return
        chunks = max(1, max_bytes // chunk_bytes)
        for first in range(0, len(self.images), chunks):
            rows = slice(first, first + chunks)
            sources = None if self.sources is None else self.sources[rows]
            piece = self._replace(
                blocks=self.blocks[rows], images=self.images[rows], item=self.item + first, sources=sources
            )
            if chunk_bytes <= max_bytes:
                yield piece
            else:
                yield from piece._cut_chunk(max_bytes)

    def _cut_chunk(self, max_bytes: int) -> Iterator[CopyPart]:
        """One chunk, cut between its references."""
        ends = np.cumsum(self.widths, dtype=np.int64) * self.blocks.shape[1]
        first = 0
        while first < len(ends):
            before = int(ends[first - 1]) if first else 0
            stop = max(first + 1, int(np.searchsorted(ends, before + max_bytes, side="right")))
            yield self.between(first, stop)
            first = stop

    def between(self, first: int, stop: int) -> CopyPart:
        """The part with only `[first, stop)` of its references."""
        return self._replace(first_ref=self.first_ref + first, widths=self.widths[first:stop])


class CopyBatch(NamedTuple):
    """Parts to copy together, in item order.

    Attributes:
        layout: The layout that the ids were checked against.
        generation: The layout's generation then.
        destination: The tier that is written: `DEVICE` or `HOST`.
        host_address: Where the host memory starts.
        parts: What moves.
    """

    layout: KVLayout
    generation: int
    destination: str
    host_address: int
    parts: tuple[CopyPart, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that move."""
        return sum(part.nbytes for part in self.parts)

    @property
    def is_d2d(self) -> bool:
        """Whether the copies are inside the device, and not between device and host."""
        return any(part.sources is not None for part in self.parts)

    def check_live(self) -> None:
        """Raise `FreedLayoutError` if the device memory was freed, or replaced, since the ids were checked."""
        now = self.layout.generation
        if self.generation != now:
            generations = f"layout generation {self.generation}, now {now}"
            raise FreedLayoutError(f"the device memory was freed or rebound since planning ({generations})")

    def of_layer(self, layer: int) -> CopyBatch:
        """The part of the batch that belongs to one model layer; may be empty."""
        parts = []
        for part in self.parts:
            layers = self.layout.table(part.group, split=part.split).layer[part.refs]
            first, stop = np.searchsorted(layers, (layer, layer + 1)).tolist()
            if first < stop:
                parts.append(part.between(first, stop))
        return self._replace(parts=tuple(parts))

    def cut(self, max_bytes: int) -> Iterator[CopyBatch]:
        """Cut into batches of at most `max_bytes`, in order, as `CopyPart.cut` does."""
        if self.nbytes <= max_bytes:
            if self.parts:
                yield self
            return
        taken: list[CopyPart] = []
        room = max_bytes
        for part in self.parts:
            for piece in part.cut(max_bytes):
                if taken and piece.nbytes > room:
                    yield self._replace(parts=tuple(taken))
                    taken, room = [], max_bytes
                taken.append(piece)
                room -= piece.nbytes
        if taken:
            yield self._replace(parts=tuple(taken))


CopyBatch.into = former_name("into", "destination")  # type: ignore[attr-defined]


_BUFFER_SIZE_IS_LOCAL = int(np.__version__.partition(".")[0]) >= 2  # to the context; before, to the thread


class Pieces(NamedTuple):
    """Addresses and sizes of pieces: uint64 arrays of shape `(pieces,)`, sizes in bytes.

    For copies inside the device, `host` has the addresses of the source blocks.
    """

    device: U64
    host: U64
    size: U64

    def directed(self, destination: str) -> tuple[U64, U64, U64]:
        """Destination, source and size."""
        return (self.host, self.device, self.size) if destination == HOST else (self.device, self.host, self.size)


class BlockRuns(NamedTuple):
    """Runs of blocks that are adjacent on both sides, the same in every reference.

    Attributes:
        first: uint64, shape `(2, runs)`: distance of the first page of each from `RefTable.starts`, on either side.
        sizes: uint64, shape `(runs,)`: bytes; `None`: each is one page.
        size: Bytes of each run, if all are equal.
    """

    first: U64
    sizes: U64 | None
    size: int | None


def block_runs(batch: CopyBatch, part: CopyPart, table: RefTable) -> BlockRuns | None:
    """The runs of `part`; `None` where they differ by reference, or span several."""
    chunks, subs = part.blocks.shape
    width = one_value(part.widths)
    if table.pitch is None or table.seams is None or part.sources is not None or (width is None and subs > 1):
        return None
    if table.seams and len(part.widths) > 1 and _spans_references(part.blocks, table.seams):
        return None
    blocks = part.blocks.reshape(-1)
    first = np.empty((2, chunks * subs), dtype=np.uint64)
    np.multiply(blocks.view(np.uint64), table.pitch, out=first[0])
    images = part.images.view(np.uint64)
    if subs == 1 or width is None:
        np.add(images, np.uint64(batch.host_address), out=first[1])
    else:
        within = np.arange(batch.host_address, batch.host_address + subs * width, width, dtype=np.uint64)
        np.add(images[:, None], within, out=first[1].reshape(chunks, subs))
    # No run leaves an image, unless images are as long as what one reference has in them.
    if width is None or width != table.pitch or (subs == 1 and width < batch.layout.image_bytes_of(part.group)):
        return BlockRuns(first, None, width)
    follows = blocks[1:] - blocks[:-1] == 1
    if np.count_nonzero(follows):
        follows &= first[1, 1:] - first[1, :-1] == width
    if not np.count_nonzero(follows):
        return BlockRuns(first, None, width)
    begins = np.flatnonzero(np.concatenate([[True], ~follows]))
    sizes = np.diff(begins, append=len(blocks)).astype(np.uint64) * table.pitch
    return BlockRuns(first[:, begins], sizes, None)


def count_pieces(batch: CopyBatch, part: CopyPart) -> int | None:
    """How many pieces `part` has after merging; `None` where that takes more than a look at its blocks."""
    runs = block_runs(batch, part, batch.layout.table(part.group, split=part.split))
    return None if runs is None else runs.first.shape[1] * len(part.widths)


def _spans_references(blocks: I64, seams: frozenset[int]) -> bool:
    """Whether, in some chunk, a page of the last block may end where one of the first block begins."""
    between = blocks[:, -1] - blocks[:, 0]
    return any(np.count_nonzero(between == seam) for seam in seams)


def may_merge(part: CopyPart, table: RefTable) -> Iterator[slice]:
    """Ranges of chunks outside which no two pieces of `part` are adjacent on both sides.

    Looks at blocks and images, not at each piece, so that scattered blocks need no search for runs.
    """
    chunks, subs = part.blocks.shape
    if table.pitch is None or table.seams is None or part.sources is not None:
        yield slice(0, chunks)
        return
    first, last = part.blocks[:, 0], part.blocks[:, -1]
    if subs > 1:
        yield from _rows(np.flatnonzero(part.blocks[:, 1:] - part.blocks[:, :-1] == 1) // (subs - 1), 1)
    if len(part.widths) > 1:
        for seam in table.seams:
            yield from _rows(np.flatnonzero(last - first == seam), 1)
    if chunks > 1:  # from the last page of a chunk to the first page of the next one
        ref = part.first_ref + len(part.widths) - 1
        end = table.image_offsets[ref, part.block_in_chunk + subs - 1] + part.widths[-1]
        step = int(end - table.image_offsets[part.first_ref, part.block_in_chunk])
        follows = np.flatnonzero(part.images[1:] - part.images[:-1] == step)
        if len(follows):
            gap = int(table.base[ref]) + int(part.widths[-1]) - int(table.base[part.first_ref])
            both = (first[follows + 1] - last[follows]) * int(table.pitch) == gap
            yield from _rows(follows[both], 2)


def _rows(which: I64, extent: int) -> Iterator[slice]:
    """From the first of `which`, which ascend, up to and including `extent` chunks from the last."""
    if len(which):
        yield slice(int(which[0]), int(which[-1]) + extent)


def one_value(values: U64) -> int | None:
    """The value that all of `values` have; `None` where they differ."""
    first = values[:1].tobytes()
    return int(values[0]) if values.tobytes() == first * len(values) else None


class PieceBuilder:
    """Makes pieces in its own buffers, which grow to the largest batch.

    The next call overwrites the result of a call. Not thread-safe: use one per thread.
    """

    def __init__(self) -> None:
        self._equal: tuple[int, int] = (0, 0)
        """The first sizes in the buffer are equal: their value and their number."""
        self._room = 0
        self._reserve(1024)
        # Numpy takes operands that it broadcasts through a buffer, even where types agree: that costs three times as
        # much as the sum. Only a buffer shorter than a row keeps it from that; its size is a setting of the context.
        self._unbuffered = Context()
        if _BUFFER_SIZE_IS_LOCAL:
            self._unbuffered.run(np.setbufsize, 16)

    def build(self, batch: CopyBatch, *, any_order: bool = False) -> Pieces:
        """Addresses and sizes of the pieces of `batch`, with adjacent pieces merged; by image, or in the fastest order.

        Raises:
            FreedLayoutError: The device memory was freed, or replaced since the ids were validated.
        """
        batch.check_live()
        layout = batch.layout
        room = self._reserve(sum([part.page_copies for part in batch.parts]))
        start = 0
        low, high = len(room.size), 0  # pieces between which some may merge
        for part in batch.parts:
            table = layout.table(part.group, split=part.split)
            runs = block_runs(batch, part, table) if any_order else None
            if runs is not None:
                stop = start + runs.first.shape[1] * len(part.widths)
                self._fill_by_reference(part, runs, table, start, stop)
                self._fill_sizes(part, runs, start, stop)
            else:
                stop = start + part.page_copies
                self._equal = self._equal[0], min(self._equal[1], start)
                _fill_by_image(part, table, batch.host_address, _span(room, start, stop))
                row = part.page_copies // len(part.images)
                for rows in may_merge(part, table):
                    low, high = min(low, start + rows.start * row), max(high, start + rows.stop * row)
            if start > 0 and _meet(room, start):
                low, high = min(low, start - 1), max(high, start + 1)
            start = stop
        pieces = _span(room, 0, start)
        return merge(pieces, low, high) if low < high else pieces

    def _fill_by_reference(self, part: CopyPart, runs: BlockRuns, table: RefTable, start: int, stop: int) -> None:
        refs, count = len(part.widths), runs.first.shape[1]
        column, row = table.starts[:, part.refs, part.block_in_chunk, None], runs.first[:, None]
        out = self._addresses[:, start:stop].reshape(2, refs, count)
        self._unbuffered.run(np.add, column, row, out)

    def _fill_sizes(self, part: CopyPart, runs: BlockRuns, start: int, stop: int) -> None:
        size, count = self._equal
        if runs.size == size and stop <= count:  # as in most batches: the sizes are those of the last one
            return
        self._equal = (runs.size, stop) if runs.size is not None and not start else (size, min(count, start))
        out = self._sizes[start:stop]
        if runs.size is not None:
            out.fill(runs.size)
        else:
            out.reshape(len(part.widths), -1)[...] = part.widths[:, None] if runs.sizes is None else runs.sizes

    def _reserve(self, count: int) -> Pieces:
        """The first `count` elements of the buffers."""
        if count > self._room:
            self._room = max(count, 2 * self._room)
            self._addresses = np.empty((2, self._room), dtype=np.uint64)  # on the device, in the host
            self._sizes = np.empty(self._room, dtype=np.uint64)
            self._equal = (0, 0)
        return Pieces(self._addresses[0, :count], self._addresses[1, :count], self._sizes[:count])


def host_addresses(part: CopyPart, table: RefTable, host_address: int, out: U64) -> None:
    """Fill `out`, shape `(chunks, references, subs)`, with the addresses of the part's pages in their images."""
    offsets = table.image_offsets[part.refs, part.block_in_chunk : part.block_in_chunk + part.blocks.shape[1]]
    images = part.images.view(np.uint64) + np.uint64(host_address)
    np.add(images[:, None, None], offsets, out=out)


def _fill_by_image(part: CopyPart, table: RefTable, host_address: int, out: Pieces) -> None:
    shape = (len(part.images), len(part.widths), part.blocks.shape[1])
    device, host, size = (column.reshape(shape) for column in out)
    _device_addresses(part, part.blocks, table, device)
    if part.sources is None:
        host_addresses(part, table, host_address, host)
    else:
        _device_addresses(part, part.sources, table, host)
    width = one_value(part.widths)
    if width is None:
        size[...] = part.widths[:, None]
    else:
        size.fill(width)


def _span(pieces: Pieces, start: int, stop: int) -> Pieces:
    if stop - start == len(pieces.size):
        return pieces
    return Pieces(*(column[start:stop] for column in pieces))


def _device_addresses(part: CopyPart, blocks: I64, table: RefTable, out: U64) -> None:
    base, subs = table.base[part.refs], blocks.shape[1]
    if table.pitch is None:
        np.multiply(blocks.view(np.uint64)[:, None, :], table.stride[part.refs, None], out=out)
        out += base[:, None]
        return
    offsets = blocks.view(np.uint64) * table.pitch  # one product per block, not per block and reference
    if subs == 1:
        np.add(offsets, base, out=out[:, :, 0])
        return
    # Numpy runs along the last axis, and each run costs as much as several elements: so in runs of a whole chunk.
    rows = np.repeat(offsets, len(base), axis=0).reshape(len(blocks), -1)
    np.add(rows, np.repeat(base, subs), out=out.reshape(rows.shape))


def _meet(pieces: Pieces, at: int) -> bool:
    """Whether piece `at` continues the one before it on both sides."""
    size = pieces.size[at - 1]
    return bool(pieces.host[at - 1] + size == pieces.host[at] and pieces.device[at - 1] + size == pieces.device[at])


def merge(pieces: Pieces, low: int = 0, high: int | None = None) -> Pieces:
    """`pieces` in the same order, with each run among `[low, high)` that is adjacent on both sides as one piece."""
    device, host, size = (column[low:high] for column in pieces)
    begins = np.ones(len(size), dtype=np.bool_)
    np.not_equal(host[:-1] + size[:-1], host[1:], out=begins[1:])
    begins[1:] |= device[:-1] + size[:-1] != device[1:]
    first = np.flatnonzero(begins)
    if len(first) == len(size):
        return pieces
    stop = low + len(size)
    columns = (device[first], host[first], np.add.reduceat(size, first))
    if stop - low == len(pieces.size):
        return Pieces(*columns)
    parts = zip(pieces, columns, strict=True)
    return Pieces(*(np.concatenate([column[:low], merged, column[stop:]]) for column, merged in parts))
