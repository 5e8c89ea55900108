"""Runs of blocks of a part that move as one piece, found among its blocks and not among its pages.

    blocks    8  9  20  21  22  5        two to a run, three to a run, one alone
              └──┘  └────────┘  └        the same in every reference, whose pages are as far apart as its blocks

An additional reference costs a row of sums, and no search.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from longshore.layout.model import U64, RefTable
from longshore.transfer.batch import I64, Batch, Part


class Runs(NamedTuple):
    """Runs of blocks that are adjacent on both sides, the same in every reference.

    Attributes:
        first: uint64, shape `(2, runs)`: distance of the first page of each from `RefTable.starts`, on either side.
        sizes: uint64, shape `(runs,)`: bytes; `None`: each is one page.
        size: Bytes of each run, if all are equal.
    """

    first: U64
    sizes: U64 | None
    size: int | None


def runs_of(batch: Batch, part: Part, table: RefTable, max_bytes: int | None) -> Runs | None:
    """The runs of `part`, none longer than `max_bytes`; `None` where they differ by reference, or span several."""
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
        return Runs(first, None, width)
    follows = blocks[1:] - blocks[:-1] == 1
    if np.count_nonzero(follows):
        follows &= first[1, 1:] - first[1, :-1] == width
    if not np.count_nonzero(follows):
        return Runs(first, None, width)
    begins = np.flatnonzero(np.concatenate([[True], ~follows]))
    sizes = np.diff(begins, append=len(blocks)).astype(np.uint64) * table.pitch
    if max_bytes is not None and np.maximum.reduce(sizes) > max_bytes:
        return None
    return Runs(first[:, begins], sizes, None)


def _spans_references(blocks: I64, seams: frozenset[int]) -> bool:
    """Whether, in some chunk, a page of the last block may end where one of the first block begins."""
    between = blocks[:, -1] - blocks[:, 0]
    return any(np.count_nonzero(between == seam) for seam in seams)


def may_merge(part: Part, table: RefTable) -> Iterator[slice]:
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
        end = table.places[ref, part.sub + subs - 1] + part.widths[-1]
        step = int(end - table.places[part.first_ref, part.sub])
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
