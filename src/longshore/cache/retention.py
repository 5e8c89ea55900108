"""How long parts of a request are worth keeping: priorities from 0 to 100, for a time or for good.

    tokens     0 ──────── 512 ─────────────────── 4096
    priority   90         10, for 30 seconds           35 where nothing is said

What has the lowest priority is evicted first, whatever its age. When its time is over, a chunk has the priority of
those of which nothing was said. After the retention settings of TensorRT-LLM.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from longshore.errors import CacheError

DEFAULT_PRIORITY = 35
HIGHEST_PRIORITY = 100


class Retention(NamedTuple):
    """Chunks `[first, end)` of a request have `priority`, for some `seconds` or for good.

    `end` is `None` for all chunks behind.
    """

    first: int
    end: int | None
    priority: int
    seconds: float | None = None

    @classmethod
    def of_tokens(
        cls, first: int, end: int | None, priority: int, seconds: float | None = None, *, chunk_tokens: int
    ) -> Retention:
        """The same for tokens `[first, end)`: every chunk that has one of them."""
        return cls(first // chunk_tokens, None if end is None else -(-end // chunk_tokens), priority, seconds)


def check(retention: Sequence[Retention]) -> None:
    """Raise `CacheError` for a range, a priority or a time that cannot be."""
    for each in retention:
        good = each.first >= 0 and (each.end is None or each.end > each.first)
        good &= isinstance(each.priority, int) and 0 <= each.priority <= HIGHEST_PRIORITY
        if not good or (each.seconds is not None and not each.seconds > 0):
            raise CacheError(
                f"a retention names chunks, a priority in [0, {HIGHEST_PRIORITY}] and a positive time, got {each}"
            )


def said(retention: Sequence[Retention], positions: npt.ArrayLike) -> npt.NDArray[np.intp]:
    """Which of `retention` is meant for the chunk at each of `positions`; -1 for none. Shape `(len(positions),)`.

    If several ranges have it, the one with the highest priority is, and the first of equals.
    """
    at = np.asarray(positions, np.int64)
    which = np.full(len(at), -1)
    for number in sorted(range(len(retention)), key=lambda each: (retention[each].priority, -each)):
        first, end = retention[number][:2]
        which[(at >= first) & (at < (math.inf if end is None else end))] = number
    return which


def priorities(retention: Sequence[Retention], positions: npt.ArrayLike) -> npt.NDArray[np.uint8]:
    """The priority of the chunk at each of `positions`. Shape `(len(positions),)`."""
    of = np.array([*(each.priority for each in retention), DEFAULT_PRIORITY], np.uint8)
    return of[said(retention, positions)]
