"""Exact results for a whole trace: Belady's bound, and the miss-ratio curve of LRU.

`Paths` keeps the blocks of a trace, four bytes per reference. A reference is one block of one request:

    request      0            1         2
    blocks       a  b  c      a  d      a  b  c          kept as 0 1 2  0 3  0 1 2, numbered as they first appear
    reference    0  1  2      3  4      5  6  7          next of 1 (b) is 6, next of 4 (d) is none

**Belady's bound** (`optimal_hits`) is the maximum number of hits of any policy that knows the future. After each
request, keep the N blocks that are used again soonest, of the resident blocks and the request's own; of one request's
blocks, tails are evicted first. A parent's next use is never later than its child's. The blocks kept therefore include
all parents, every kept block is a hit when it is used, and the bound is reached. The number of a block's next reference
gives both its time and its depth, so the block with the greatest number is evicted. Blocks used since have a number in
the past, which is never the greatest; they are removed from time to time.

**Stack distances** (`stack_distances`) give the hits of LRU with tails first for every capacity at once. A block is
resident when a request arrives if at most N distinct blocks, itself included, were used since its last use; this
number is its stack distance. A parent is used after its child, so distances never shrink along a path. After R.
Mattson et al., "Evaluation techniques for storage hierarchies" (IBM Systems Journal, 1970), for whole requests at a
time.

    uses            c b a | e d | c b a         each request from its tail on
    distance of c   3 + 2: the uses since its last, less those that were followed by another of the same block

The number of uses in a range that were followed by another use before the request is a count of points in a quadrant.
It is computed for all references together, with sorted runs of 1, 2, 4, ... uses and one bisection per bit of a
position, in numpy, in O(n log n) steps of sorting.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from longshore.errors import TraceError


class Paths(Sequence[list[int]]):
    """The block numbers of each request, head first."""

    def __init__(self, paths: Iterable[Sequence[int]] = ()) -> None:
        self._numbers: dict[int, int] = {}
        self._blocks, self._starts = array("i"), array("q", [0])
        for path in paths:
            self.add(path)

    def add(self, path: Sequence[int]) -> None:
        """Add a request by the ids of its blocks. Must not be called while a view of `blocks` or `starts` exists."""
        numbers = self._numbers
        self._blocks.extend([numbers.setdefault(block, len(numbers)) for block in path])
        self._starts.append(len(self._blocks))

    @property
    def blocks(self) -> npt.NDArray[np.int32]:
        """One number per reference, in the order of requests."""
        return np.frombuffer(self._blocks, np.int32)

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        """Start of each request in `blocks`, and the end."""
        return np.frombuffer(self._starts, np.int64)

    @property
    def references(self) -> int:
        """Number of references."""
        return len(self._blocks)

    @property
    def unique(self) -> int:
        """Number of unique blocks; block numbers are below it."""
        return len(self._numbers)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __iter__(self) -> Iterator[list[int]]:
        return (self._blocks[start:end].tolist() for start, end in pairwise(self._starts))

    def __getitem__(self, at: int) -> list[int]:  # type: ignore[override]  # one request at a time
        number = range(len(self))[at]
        return self._blocks[self._starts[number] : self._starts[number + 1]].tolist()


BYTES_PER_REFERENCE = 9
"""Memory per reference: number of its block, number of its next reference, and a flag."""

_BATCH_BLOCKS = 1 << 18
"""References that are sorted together."""

_FEW_BLOCKS = 64
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
        if len(furthest) > 2 * live + _FEW_BLOCKS:
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
    for end in range(len(blocks), 0, -_BATCH_BLOCKS):
        start = max(0, end - _BATCH_BLOCKS)
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
