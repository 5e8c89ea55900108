"""Batches of copies: rectangles of blocks, and how they are cut.

A `CopyPart` is a number of chunks of one group, the same consecutive blocks of each chunk, and some of their pages. The
arrays of a plan, and the gather on a device, are computed from parts without a loop over blocks or references.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from longshore.layout.model import U64, KVLayout

I64 = npt.NDArray[np.int64]


class CopyPart(NamedTuple):
    """A rectangle of blocks of one group.

    Attributes:
        group: Index of the group.
        first_ref: First reference that moves; there are as many as `widths`.
        widths: uint64, shape `(references,)`: bytes that move of each page, from its start.
        blocks: int64, shape `(chunks, subs)`: device blocks.
        images: int64, shape `(chunks,)`: byte offset of each chunk's image in host memory.
        sub: Position of `blocks[:, 0]` in its chunk.
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
    sub: int
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
    def pieces(self) -> int:
        """Pages that move."""
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
        into: The tier that is written: `DEVICE` or `HOST`.
        host_address: Where the host memory starts.
        parts: What moves.
    """

    layout: KVLayout
    generation: int
    into: str
    host_address: int
    parts: tuple[CopyPart, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that move."""
        return sum(part.nbytes for part in self.parts)

    @property
    def inside(self) -> bool:
        """Whether the copies are inside the device, and not between device and host."""
        return any(part.sources is not None for part in self.parts)

    def of_layer(self, layer: int) -> CopyBatch:
        """The part of the batch that belongs to one model layer; may be empty."""
        parts = (part.between(*self._refs_of(part, layer)) for part in self.parts)
        return self._replace(parts=tuple(part for part in parts if len(part.widths)))

    def _refs_of(self, part: CopyPart, layer: int) -> tuple[int, int]:
        layers = self.layout.table(part.group, split=part.split).layer[part.refs]
        first, stop = np.searchsorted(layers, (layer, layer + 1)).tolist()
        return first, stop

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
