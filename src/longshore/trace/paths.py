"""The blocks of a whole trace, four bytes per reference.

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
