"""The blocks of a whole trace, four bytes for each reference: for what needs all of it at once.

request    0          1        2
starts     0          3        5           8
blocks     0  1  2    0  3     0  1  2          different ids, numbered as they first appear
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt


class Paths(Sequence[list[int]]):
    """For each request the numbers of its blocks, head first.

    Attributes:
        blocks: int32, one per reference, requests one after the other.
        starts: int64, where each request begins in `blocks`, and the end.
        unique: How many different blocks there are; their numbers are below it.
    """

    def __init__(self, paths: Iterable[Sequence[int]]) -> None:
        numbers: dict[int, int] = {}
        blocks, starts = array("i"), array("q", [0])
        for path in paths:
            blocks.extend([numbers.setdefault(block, len(numbers)) for block in path])
            starts.append(len(blocks))
        self.blocks: npt.NDArray[np.int32] = np.frombuffer(blocks, np.int32)
        self.starts: npt.NDArray[np.int64] = np.frombuffer(starts, np.int64)
        self.unique = len(numbers)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __iter__(self) -> Iterator[list[int]]:
        blocks = self.blocks
        return (blocks[start:end].tolist() for start, end in pairwise(self.starts.tolist()))

    def __getitem__(self, at: int) -> list[int]:  # type: ignore[override]  # one request at a time
        number = range(len(self))[at]
        path: list[int] = self.blocks[self.starts[number] : self.starts[number + 1]].tolist()
        return path
