"""Exact miss-ratio curves of LRU with tails first, for every capacity at once.

A block is resident when a request arrives if at most N distinct blocks, itself included, were used since its last use;
this number is its stack distance. The hits of any capacity follow from the distances alone, because a parent is used
after its child, so distances never shrink along a path and what is resident is its leading run. After R. Mattson et
al., "Evaluation techniques for storage hierarchies" (IBM Systems Journal, 1970), for whole requests at a time.

    uses            c b a | e d | c b a         each request from its tail on
    distance of c   3 + 2: the uses since its last, less those that were followed by another of the same block

The number of uses in a range that were followed by another use before the request is a count of points in a quadrant.
It is computed for all references together, with sorted runs of 1, 2, 4, ... uses and one bisection per bit of a
position, in numpy, in O(n log n) steps of sorting.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from longshore.errors import TraceError
from longshore.trace.optimum import next_references
from longshore.trace.paths import Paths

NEVER = np.iinfo(np.int64).max
"""The distance of a block that was not used before."""


def stack_distances(paths: Paths) -> npt.NDArray[np.int64]:
    """For each reference, in the order of `paths.blocks`, the smallest capacity in blocks at which it is resident.

    Raises `TraceError` for a request with a repeated block.
    """
    starts = paths.starts
    begin = np.repeat(starts[:-1], np.diff(starts))
    end = np.repeat(starts[1:], np.diff(starts))
    count = len(begin)
    use_of = begin + end - 1 - np.arange(count)  # where a reference stands among the uses, and the other way round
    later = next_references(paths.blocks[use_of]).astype(np.int64)
    if ((later >= 0) & (later < end)).any():
        request = int(np.searchsorted(starts, int(((later >= 0) & (later < end)).argmax()), side="right"))
        raise TraceError(f"request {request}: expected distinct blocks, got one twice")
    again = np.flatnonzero(later >= 0)
    before = np.full(count, -1, np.int64)
    before[later[again]] = again
    later[later < 0] = count
    found = np.full(count, NEVER)
    asked = np.flatnonzero(before[use_of] >= 0)
    last, now = before[use_of][asked], begin[asked]
    repeated = np.concatenate(([0], np.cumsum(before >= 0)))  # uses so far that were followed by another
    found[asked] = now - last - (repeated[now] - _below(later, last, now))
    return found


def hits_at(distances: npt.NDArray[np.int64], capacities: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The hits of LRU at each of `capacities`, in blocks."""
    return np.searchsorted(np.sort(distances), capacities, side="right")


def _below(
    values: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], limits: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """For each query how many of `values[:end]` are below `limit`; values and limits are at most their number."""
    count = len(values)
    found = np.zeros(len(ends), np.int64)
    width = 1
    while width <= count:
        runs = np.full(-(-count // width) * width, count, np.int64)
        runs[:count] = values
        runs = np.sort(runs.reshape(-1, width), axis=1)
        offset = np.arange(len(runs)) * (count + 1)
        ordered = (runs + offset[:, None]).ravel()
        which = np.flatnonzero(ends & width)
        run = ends[which] // width - 1
        found[which] += np.searchsorted(ordered, limits[which] + offset[run]) - run * width
        width *= 2
    return found
