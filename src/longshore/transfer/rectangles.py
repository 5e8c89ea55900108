"""The blocks of a section as rectangles of chunks and blocks.

Here 9 blocks from logical block 3 on, 4 blocks to a chunk:

    chunk 0   chunk 1   chunk 2
    · · · 0   1 2 3 4   5 6 7 8          [0, 1) x [3, 4)    [1, 3) x [0, 4)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from longshore.errors import PlanError


class Rectangle(NamedTuple):
    """Chunks `[first, stop)` of a section, positions `[low, high)` of each; several chunks only if complete."""

    first: int
    stop: int
    low: int
    high: int


def chunks_of(count: int, skip: int, per_chunk: int) -> int:
    """Number of chunks of `count` blocks, if the first `skip` positions of the first chunk are skipped."""
    return -(-(skip + count) // per_chunk) if count else 0


def lay_out(count: int, skip: int, per_chunk: int) -> list[Rectangle]:
    """Lay out `count` blocks over chunks of `per_chunk`, skipping the first `skip` positions of the first chunk."""
    if not count:
        return []
    rectangles = []
    first = 0
    if skip:
        rectangles.append(Rectangle(0, 1, skip, min(per_chunk, skip + count)))
        first = 1
    whole, rest = divmod(skip + count, per_chunk)
    if whole > first:
        rectangles.append(Rectangle(first, whole, 0, per_chunk))
    if rest and whole >= first:
        rectangles.append(Rectangle(whole, whole + 1, 0, rest))
    return rectangles


def keep_valid(rectangles: Sequence[Rectangle], valid: Sequence[int], per_chunk: int) -> list[Rectangle]:
    """`rectangles` without the positions whose bit is not set in `valid`, one mask per chunk."""
    full = (1 << per_chunk) - 1
    for mask in valid:
        if not 0 < mask <= full:
            raise PlanError(f"expected valid to be a non-zero mask of {per_chunk} bits, got {mask:#x}")
    kept = []
    for whole in rectangles:
        first = whole.first
        # Only chunks with holes are looked at one by one: those at the edge of a sliding window.
        for chunk in [chunk for chunk in range(whole.first, whole.stop) if valid[chunk] != full]:
            if first < chunk:
                kept.append(whole._replace(first=first, stop=chunk))
            kept += [Rectangle(chunk, chunk + 1, *run) for run in _runs(valid[chunk], whole.low, whole.high)]
            first = chunk + 1
        if first < whole.stop:
            kept.append(whole._replace(first=first))
    return kept


def set_apart(rectangles: Sequence[Rectangle], chunk: int, place: int) -> list[Rectangle]:
    """`rectangles` with the last position of the last chunk in a rectangle of its own."""
    apart: list[Rectangle] = []
    for box in rectangles:
        if (box.stop - 1, box.high - 1) != (chunk, place):
            apart.append(box)
            continue
        if box.stop - box.first > 1:
            apart.append(box._replace(stop=chunk))
        if box.high - box.low > 1:
            apart.append(Rectangle(chunk, chunk + 1, box.low, place))
        apart.append(Rectangle(chunk, chunk + 1, place, place + 1))
    return apart


def _runs(mask: int, low: int, high: int) -> Iterator[tuple[int, int]]:
    """Runs of set bits of `mask` within `[low, high)`."""
    start: int | None = None
    for bit in range(low, high + 1):
        is_set = bit < high and mask >> bit & 1
        if is_set and start is None:
            start = bit
        elif not is_set and start is not None:
            yield start, bit
            start = None
