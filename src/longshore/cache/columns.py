"""Columns of numbers, one place for each node or slot: nothing for a garbage collector to walk.

They are plain arrays, which Python reads one place at a time at little cost. To change many places at once, numpy looks
at the same memory, but for the moment only: while it does, a column cannot grow.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from mmap import MADV_NOHUGEPAGE, MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

_INT32, _UINT32, _UINT8 = map(
    np.dtype, (np.int32, np.uint32, np.uint8)
)  # found out anew each time, they would cost as much again
_seen_as = np.frombuffer

Column: TypeAlias = "array[int] | memoryview[int]"


def zeros(count: int) -> array[int]:
    """A column of `count` 32-bit zeros."""
    return array("i", [0]) * count


def sparse(count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Zeros that take memory only where they are written to, a small page at a time.

    Those of numpy take it in huge pages: whoever writes all over the place for the first time would wait for all of
    them, which was seen to take 67 ms at a million chunks.
    """
    places = mmap(-1, max(1, count * np.dtype(dtype).itemsize), MAP_PRIVATE | MAP_ANONYMOUS)
    with suppress(OSError):  # of a kernel without huge pages
        places.madvise(MADV_NOHUGEPAGE)
    return np.frombuffer(places, dtype, count)


def grown(numbers: Column, size: int) -> Column:
    """The same column, with zeros behind up to `size` places, which take memory only where they are written to."""
    if size <= len(numbers):
        return numbers
    places = sparse(size, _INT32).data
    places[: len(numbers)] = memoryview(numbers)
    return places


def column(numbers: Column) -> npt.NDArray[np.int32]:
    """A column of 32-bit numbers as numpy sees it."""
    return _seen_as(numbers, _INT32)


def marks(each: bytearray) -> npt.NDArray[np.uint8]:
    """A column of bytes as numpy sees it."""
    return _seen_as(each, _UINT8)


def words(each: array[int]) -> npt.NDArray[np.uint32]:
    """A column of 32-bit numbers without a sign as numpy sees it."""
    return _seen_as(each, _UINT32)


def numbers(each: Sequence[int] | npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Some 32-bit numbers as numpy sees them: sooner than by `np.array`."""
    if isinstance(each, np.ndarray):
        return each
    return column(array("i", each)) if len(each) else np.empty(0, np.int32)


def has_twins(at: npt.NDArray[np.int32]) -> bool:
    """Whether some of these numbers are equal."""
    ordered = np.sort(at)
    return bool((ordered[1:] == ordered[:-1]).any())


def once(at: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """These numbers without repetitions: of equal ones the first."""
    if len(at) < 2 or not has_twins(at):
        return at
    return at[np.sort(np.unique(at, return_index=True)[1])]


def leading(true: npt.NDArray[np.bool_]) -> int:
    """How many lead that are true."""
    first = int(true.argmin()) if len(true) else 0
    return len(true) if not len(true) or true[first] else first


class FreeList:
    """Numbers, taken and given back at the end. It never shrinks: an array that does may move, 2 ms for a million."""

    def __init__(self, numbers: array[int]) -> None:
        self._places = numbers
        self._count = len(numbers)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        return iter(self._places[: self._count])

    def take(self, count: int) -> array[int]:
        """The last `count`, which there are; the last of all comes last."""
        before, self._count = self._count, self._count - count
        return self._places[self._count : before]

    def give(self, numbers: array[int]) -> None:
        """More behind the last."""
        end = self._count + len(numbers)
        self._places[self._count : end] = numbers
        self._count = end
