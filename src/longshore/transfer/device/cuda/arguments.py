"""Arguments for kernels and the driver for a part: tables for kernels, runs of an image for the driver.

one chunk of a part, staged     │ ref 0: sub, sub │ ref 1: sub, sub │        dense, each chunk 16-byte aligned
the same in its image         ··│ ref 0: sub, sub │ ref 1: sub, sub │··      one run, if whole references move
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from longshore.boundary import DEVICE, HOST, I64
from longshore.layout.model import U64, KVLayout
from longshore.transfer.pieces import CopyBatch, CopyPart

COLUMNS = 5
"""Columns of a kernel's table: base, stride, width, offset, step; int64, one row per reference."""

WIDEST_WORD = 16
"""Bytes of the widest access."""

PROGRAMS = 16
"""Programs of a kernel between two addresses on the device, one per multiprocessor: four times as fast as the link."""

LINK_PROGRAMS = {HOST: 4, DEVICE: 8}
"""Programs of a kernel on host addresses, by the tier that is written: they saturate a link of 50 GB/s.

More of them gain nothing, and slow down the engine: stores to host memory that wait for the link hold up all others.
"""

_WORDS_AT_ONCE = 1024  # 16 KiB for each program: 256 threads with four accesses of 16 bytes each
_LONGEST_SPAN = 512
_MOST_TAILS = 64  # each of up to 15 bytes, one by one: more of them do not fit the registers


class KernelShape(NamedTuple):
    """Launch parameters of a kernel for a rectangle of pages.

    Attributes:
        chunks: Chunks, hence rows.
        refs: References, hence lines of the table.
        subs: Blocks of each chunk.
        segments: Parts that each page is moved in.
        word: Bytes of an access: 16, 8, 4, 2 or 1.
        span: Words of a segment, a power of two.
        tail: Whether some page is not a whole number of words.
        programs: The most programs of a launch.
    """

    chunks: int
    refs: int
    subs: int
    segments: int
    word: int
    span: int
    tail: bool
    programs: int = PROGRAMS

    @classmethod
    def of(
        cls, chunks: int, refs: int, subs: int, *, widest: int, alignment: int, tail: bool, longest: int | None = None
    ) -> KernelShape:
        """The shape for pages of at most `widest` bytes at multiples of `alignment`, a power of two.

        `longest` is the longest page for the same kernel, by default `widest`.
        """
        word = min(alignment, WIDEST_WORD)
        words = max(1, widest // word)
        span = min(1 << (max(1, (longest or widest) // word) - 1).bit_length(), _LONGEST_SPAN)
        return cls(chunks, refs, subs, -(-words // span), word, span, tail)

    @property
    def rows_at_once(self) -> int:
        """Segments per program iteration, a power of two."""
        return min(max(1, _WORDS_AT_ONCE // self.span), _MOST_TAILS if self.tail else _WORDS_AT_ONCE)

    @property
    def compiled(self) -> tuple[int, int, bool]:
        """The attributes that a kernel is compiled for."""
        return self.word, self.span, self.tail

    @property
    def segments_in_all(self) -> int:
        """Segments of all pages."""
        return self.chunks * self.refs * self.subs * self.segments


_ALIGNMENT = 16


class ImageRuns(NamedTuple):
    """The contiguous ranges that a chunk of a part is in its image.

    Attributes:
        image: uint64, shape `(runs,)`: bytes from the start of the image.
        staged: uint64, shape `(runs,)`: bytes from the start of the chunk in a stage.
        size: uint64, shape `(runs,)`: bytes.
    """

    image: U64
    staged: U64
    size: U64


class PageRows(NamedTuple):
    """Positions of the dense pages of each chunk of a part, for a kernel.

    Attributes:
        starts: int64, shape `(chunks,)`: address of each row.
        offset: uint64, shape `(refs,)`: bytes from there to each reference's first page.
        step: uint64, shape `(refs,)`: bytes between its pages.
    """

    starts: I64
    offset: U64
    step: U64


class KernelArguments(NamedTuple):
    """Arguments of a kernel: int64 arrays for the device, and the shape."""

    blocks: I64
    rows: I64
    table: I64
    shape: KernelShape


def kernel_shapes(layout: KVLayout) -> set[KernelShape]:
    """All kernel shapes of a layout: for whole pages, and for pages of which only the first tokens move."""
    found: set[KernelShape] = set()
    for group in range(len(layout.groups)):
        for split in (False, True):
            table = layout.table(group, split=split)
            widths = np.where(table.token > 0, table.token, table.page) if split else table.page
            block = np.zeros((1, 1), dtype=np.int64)
            part = CopyPart(group, 0, widths, block, np.zeros(1, dtype=np.int64), 0, 0, split=split)
            found.add(kernel_arguments(layout, part, rows_in_stage(part, 0)).shape)
    return found


def image_runs(layout: KVLayout, part: CopyPart) -> ImageRuns:
    """The runs of any chunk of `part`: all have the same."""
    table = layout.table(part.group, split=part.split)
    subs = part.blocks.shape[1]
    offsets = table.image_offsets[part.refs, part.block_in_chunk : part.block_in_chunk + subs].reshape(-1)
    total = part.chunk_bytes
    if int(offsets[-1] - offsets[0]) + int(part.widths[-1]) == total:  # all of it side by side, as for whole references
        return ImageRuns(offsets[:1], np.zeros(1, dtype=np.uint64), np.array([total], dtype=np.uint64))
    sizes = np.repeat(part.widths, subs)
    first = np.flatnonzero(np.concatenate([[True], offsets[:-1] + sizes[:-1] != offsets[1:]]))
    ends = np.cumsum(sizes)
    staged = (ends - sizes)[first]
    return ImageRuns(offsets[first], staged, np.diff(np.append(staged, ends[-1])))


def staged_pitch(part: CopyPart) -> int:
    """Bytes from one chunk of `part` to the next in a stage."""
    return -(-part.chunk_bytes // _ALIGNMENT) * _ALIGNMENT


def pieces_of(part: CopyPart, room: int) -> Iterator[CopyPart]:
    """`part` in parts that fit `room` bytes of a stage, a multiple of 16 and no less than any page."""
    fit = room // staged_pitch(part)
    for piece in part.cut(fit * part.chunk_bytes if fit else room):
        if staged_pitch(piece) <= room:
            yield piece
            continue
        subs = room // int(piece.widths[0])  # one reference's pages of one chunk, which are more than fits
        for first in range(0, piece.blocks.shape[1], subs):
            some = slice(first, first + subs)
            yield piece._replace(blocks=piece.blocks[:, some], block_in_chunk=piece.block_in_chunk + first)


def staged(parts: Iterable[CopyPart], room: int) -> list[list[tuple[CopyPart, int]]]:
    """`parts` in loads of at most `room` bytes, each a list of parts and where they start in the stage."""
    loads: list[list[tuple[CopyPart, int]]] = []
    end = room
    for piece in itertools.chain.from_iterable(pieces_of(part, room) for part in parts):
        size = staged_pitch(piece) * len(piece.images)
        if end + size > room:
            loads.append([])
            end = 0
        loads[-1].append((piece, end))
        end += size
    return loads


def link_copies(batch: CopyBatch, parts: Sequence[tuple[CopyPart, int]], address: int) -> tuple[U64, U64, U64]:
    """Destinations, sources and sizes of the copies between the images and a stage that starts at `address`."""
    columns: list[tuple[U64, U64, U64]] = []
    for part, offset in parts:
        own = image_runs(batch.layout, part)
        starts = (part.images + batch.host_address).view(np.uint64)
        chunks = np.arange(len(starts), dtype=np.uint64) * np.uint64(staged_pitch(part))
        images = starts[:, None] + own.image
        stage = (chunks + np.uint64(address + offset))[:, None] + own.staged
        columns.append((images.reshape(-1), stage.reshape(-1), np.tile(own.size, len(starts))))
    images, stage, size = (np.concatenate(column) for column in zip(*columns, strict=True))
    return (images, stage, size) if batch.destination == HOST else (stage, images, size)


def rows_in_stage(part: CopyPart, address: int) -> PageRows:
    """The chunks of `part` one after the other from `address` on."""
    subs = np.uint64(part.blocks.shape[1])
    sizes = part.widths * subs
    starts = address + np.arange(len(part.images), dtype=np.int64) * staged_pitch(part)
    return PageRows(starts, np.cumsum(sizes) - sizes, part.widths)


def rows_in_images(layout: KVLayout, part: CopyPart, host_address: int) -> PageRows:
    """The images that the chunks of `part` are in."""
    table = layout.table(part.group, split=part.split)
    return PageRows(
        part.images + host_address, table.image_offsets[part.refs, part.block_in_chunk], table.page[part.refs]
    )


def kernel_arguments(layout: KVLayout, part: CopyPart, rows: PageRows) -> KernelArguments:
    """For a kernel that moves the pages of `part` to or from `rows`."""
    table = layout.table(part.group, split=part.split)
    columns = (table.base[part.refs], table.stride[part.refs], part.widths, rows.offset, rows.step)
    lines = np.stack(columns, axis=1).astype(np.int64)
    # What holds for all references and any number of tokens: so that few kernels serve a layout, all known at start.
    bits = (
        int(np.bitwise_or.reduce(rows.starts)) | (table.token_alignment if part.split else table.alignment) | _ALIGNMENT
    )
    alignment = bits & -bits
    chunks, subs = part.blocks.shape
    shape = KernelShape.of(
        chunks,
        len(lines),
        subs,
        widest=int(part.widths.max()),
        alignment=alignment,
        tail=bool((part.widths % np.uint64(alignment)).any()),
        longest=table.longest,
    )
    return KernelArguments(np.ascontiguousarray(part.blocks).reshape(-1), rows.starts, lines.reshape(-1), shape)


def block_copy_arguments(layout: KVLayout, part: CopyPart, sources: I64) -> KernelArguments:
    """For a kernel that moves the pages of `sources`, shape `(chunks, subs)`, to those of `part`'s blocks."""
    none = np.zeros(len(part.widths), dtype=np.uint64)
    arguments = kernel_arguments(layout, part, PageRows(np.zeros(1, dtype=np.int64), none, none))
    return arguments._replace(rows=np.ascontiguousarray(sources).reshape(-1))
