"""Detects pages that share bytes.

Two pages of one group must never share a byte. Pages of two groups may, if an engine uses one physical pool for several
groups, but only pages of the *same* block, so that a block id identifies the bytes. Groups that share bytes have one
pool, and a common numbering of slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from longshore.errors import LayoutError

I64 = npt.NDArray[np.int64]


class PagesOf(NamedTuple):
    """All references of a layout, flat. Each array has shape `(references,)`.

    Attributes:
        base: Address of block 0's page.
        stride: Bytes between the pages of consecutive blocks.
        page: Bytes of a page.
        group: Index of the group.
    """

    base: I64
    stride: I64
    page: I64
    group: I64


class _Shared(NamedTuple):
    """How the pages of one reference meet those of others; boolean arrays, one element per other reference."""

    same_block: npt.NDArray[np.bool_]
    other_block: npt.NDArray[np.bool_]


def pools_of(pages: PagesOf, num_blocks: int, names: Sequence[str]) -> tuple[int, ...]:
    """The pool of each group; `LayoutError` for invalid overlaps.

    `names` are the groups' names. Pools are numbered from 0 in the order of their first group.
    """
    pool = list(range(len(names)))
    order = np.argsort(pages.base, kind="stable")
    pages = PagesOf(*(column[order] for column in pages))
    end = pages.base + (num_blocks - 1) * pages.stride + pages.page
    candidates = np.searchsorted(pages.base, end, side="left")
    for first, stop in enumerate(candidates.tolist()):
        if stop <= first + 1:
            continue
        others = slice(first + 1, stop)
        shared = _shared(pages, first, others, num_blocks)
        same_group = pages.group[others] == pages.group[first]
        bad = shared.other_block | (shared.same_block & same_group)
        if bad.any():
            second = first + 1 + int(np.argmax(bad))
            raise LayoutError(_complaint(pages, first, second, names))
        for group in np.unique(pages.group[others][shared.same_block]).tolist():
            _join(pool, int(pages.group[first]), group)
    numbers = {root: number for number, root in enumerate(dict.fromkeys(pool))}
    return tuple(numbers[root] for root in pool)


def _shared(pages: PagesOf, first: int, others: slice, num_blocks: int) -> _Shared:
    """Which of `others` (at higher addresses than `first`) have a page that meets one of `first`."""
    stride = int(pages.stride[first])
    gap = pages.base[others] - pages.base[first]
    # With one stride s, page m of the other starts gap + (m - n) * s bytes after page n of the first. No page is
    # longer than its stride, so only two shifts m - n can bring them together: to the right of it, and to the left.
    # The first of them always has its two blocks, because the other starts before our last page ends.
    shift, right = -(gap // stride), gap % stride
    meets_right = right < pages.page[first]
    meets_left = (stride - right < pages.page[others]) & (shift - 1 > -num_blocks)
    same = meets_right & (shift == 0)
    other = (meets_right & (shift != 0)) | meets_left
    for index in np.flatnonzero(pages.stride[others] != stride).tolist():
        same[index], other[index] = _shared_at_two_strides(pages, first, others.start + index, num_blocks)
    return _Shared(same, other)


def _shared_at_two_strides(pages: PagesOf, first: int, second: int, num_blocks: int) -> tuple[bool, bool]:
    blocks = np.arange(num_blocks, dtype=np.int64)
    start = pages.base[first] + blocks * pages.stride[first]
    other = pages.base[second] + blocks * pages.stride[second]
    low = np.searchsorted(other + pages.page[second], start, side="right")
    high = np.searchsorted(other, start + pages.page[first], side="left")
    meets = high > low
    same = meets & (low <= blocks) & (blocks < high)
    more_than_same = (high - low) > same
    return bool(same.any()), bool((meets & more_than_same).any())


def _join(pool: list[int], first: int, second: int) -> None:
    keep, drop = sorted((pool[first], pool[second]))
    pool[:] = [keep if root == drop else root for root in pool]


def _complaint(pages: PagesOf, first: int, second: int, names: Sequence[str]) -> str:
    described = " and ".join(
        f"{int(pages.page[i])} bytes at {int(pages.base[i]):#x} every {int(pages.stride[i])} "
        f"(group {names[int(pages.group[i])]!r})"
        for i in (first, second)
    )
    return f"pages overlap: {described}; only pages of one block, in different groups, may share bytes"
