"""Belady's bound for prefixes: the most that any policy could hit, knowing the future.

After each request keep, of what is resident and the request's own blocks, the N that are used again the soonest; of
one request's blocks the tails go first. A parent's next use is never later than its child's, so what is kept is closed
under parents, every kept block counts when it is used, and the bound is reached.

A reference is one block of one request; all references of a trace have numbers, in order:

    request      0            1         2
    blocks       a  b  c      a  d      a  b  c
    reference    0  1  2      3  4      5  6  7          next of 1 (b) is 6, next of 4 (d) is none

So the number of a block's next reference says both when it comes and how deep it stands, and the kept block to give up
is the one of the greatest number. What was used since has a number that has passed: it can never be the greatest while
something else is kept, and needs no removing.
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from longshore.errors import TraceError
from longshore.trace.paths import Paths


def optimal_hits(paths: Paths, slots: int) -> int:
    """The hits of Belady's policy with tails first on `paths`, in O(n log n).

    Equal numbers stand for equal content after an equal prefix, so a block has the same place in every path.
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
    return hits


def next_references(blocks: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """For each reference, the number of the next one to the same block; -1 without one."""
    order = np.argsort(blocks, kind="stable")
    same = blocks[order[:-1]] == blocks[order[1:]]
    following = np.full(len(blocks), -1, np.int64)
    following[order[:-1][same]] = order[1:][same]
    return following
