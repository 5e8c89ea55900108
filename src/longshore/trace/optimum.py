"""Belady's bound for prefixes: the maximum hits of any policy, with knowledge of the future.

After each request, keep the N blocks that are used again soonest, of the resident blocks and the request's own; of one
request's blocks, tails are evicted first. A parent's next use is never later than its child's. The blocks kept
therefore include all parents, every kept block is a hit when it is used, and the bound is reached.

A reference is one block of one request; all references of a trace have numbers, in order:

    request      0            1         2
    blocks       a  b  c      a  d      a  b  c
    reference    0  1  2      3  4      5  6  7          next of 1 (b) is 6, next of 4 (d) is none

The number of a block's next reference therefore gives both its time and its depth, and the block with the greatest
number is evicted. Blocks used since have a number in the past, which is never the greatest; they are removed from time
to time.

The whole trace is kept in memory: 9 bytes per reference, and some more per slot and per unique block.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from longshore.errors import TraceError
from longshore.trace.paths import Paths

BYTES_PER_REFERENCE = 9
"""Memory per reference: number of its block, number of its next reference, and a flag."""

_AT_ONCE = 1 << 18
"""References that are sorted together."""

_FEW = 64
"""Stale entries below this number are not removed."""


def optimal_hits(paths: Paths, slots: int) -> int:
    """The hits of Belady's policy with tails first on `paths`, in O(n log n).

    Equal numbers mean equal content after an equal prefix, so a block has the same position in every path.
    `TraceError` is raised for a capacity below one block.
    """
    if slots < 1:
        raise TraceError(f"expected a capacity of at least one block, got {slots}")
    following = next_references(paths.blocks)
    kept = bytearray(len(following))
    furthest: list[int] = []
    hits = live = 0
    for start, end in pairwise(paths.starts.tolist()):
        gone = kept.find(0, start, end)
        hits += (end if gone < 0 else gone) - start
        live -= kept.count(1, start, end)
        for later in following[start:end].tolist():
            if later >= end:
                heappush(furthest, -later)
                kept[later] = 1
                live += 1
        while live > slots:
            kept[-heappop(furthest)] = 0
            live -= 1
        if len(furthest) > 2 * live + _FEW:
            furthest = [each for each in furthest if -each >= end]
            heapify(furthest)
    return hits


def next_references(blocks: npt.NDArray[np.int32]) -> npt.NDArray[np.signedinteger]:
    """For each reference, the number of the next one to the same block; -1 without one.

    int32 if that is enough, else int64. Computed in blocks from the end, to save memory.
    """
    number = np.dtype(np.int32 if len(blocks) <= np.iinfo(np.int32).max else np.int64)
    following: npt.NDArray[np.signedinteger] = np.full(len(blocks), -1, number)
    first = np.full(int(blocks.max()) + 1 if len(blocks) else 0, -1, number)  # of those looked at, by block
    for end in range(len(blocks), 0, -_AT_ONCE):
        start = max(0, end - _AT_ONCE)
        order = np.argsort(blocks[start:end], kind="stable")
        ordered = blocks[start:end][order]
        order += start
        same = ordered[:-1] == ordered[1:]
        following[order[:-1][same]] = order[1:][same]
        last = np.append(~same, True)
        following[order[last]] = first[ordered[last]]
        begins = np.append(True, ~same)
        first[ordered[begins]] = order[begins]
    return following
