"""Ticks of a clock, in spans that are the longer the farther back they lie: old dates need not be exact.

    tick     0 ───────────── 70 │ 71 ──── 85 │ 86 ── 92 │ 93 ─ 95 │ 96 │ 97        now = 97
    row      4                  │ 0          │ 7        │ 2       │ 5  │ 1

Each span has a row of lists. Two neighbours become one when they are together no longer than a quarter of the time that
they lie back, so that what is sorted by spans stays so at the cost of joining whole lists.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
import numpy.typing as npt

from longshore.cache.eviction.uses import AGES_OF, OLDEST

ROWS = 64
"""Spans there can be at most: two neighbours grow by a quarter, from 1 to `_END` ticks."""

_END = OLDEST
"""Spans that lie farther back are one."""


class Spans:
    """The spans of all ticks until now, the oldest first: their rows, and their first ticks."""

    __slots__ = ("_free", "rows", "starts")

    def __init__(self) -> None:
        self.rows, self.starts = [0], [0]
        self._free = list(range(1, ROWS))

    def row(self, tick: int) -> int:
        """The row of the span that `tick` lies in."""
        return self.rows[bisect_right(self.starts, tick) - 1]

    def rows_of(self, ticks: npt.NDArray[np.int32]) -> npt.NDArray[np.intp]:
        """`row` of many."""
        rows: npt.NDArray[np.intp] = np.array(self.rows)[np.searchsorted(self.starts, ticks, "right") - 1]
        return rows

    def ages(self, now: int) -> npt.NDArray[np.intp]:
        """The age class of the last tick of each span."""
        latest = np.array([*self.starts[1:], now + 1]) - 1
        ages: npt.NDArray[np.intp] = AGES_OF[np.minimum(now - latest, OLDEST)].astype(np.intp)
        return ages

    def begin(self, now: int) -> list[tuple[int, int]]:
        """A span begins with tick `now`; which rows become a part of which older ones, in this order."""
        rows, starts, joined = self.rows, self.starts, []
        if starts[-1] == now:
            return []
        starts.append(now)
        at = 0
        while at + 2 < len(starts):
            last = starts[at + 2] - 1
            back = now - last
            if back >= _END or 4 * (last + 1 - starts[at]) <= back or (at + 3 == len(starts) and not self._free):
                joined.append((rows.pop(at + 1), rows[at]))
                del starts[at + 1]
                self._free.append(joined[-1][0])
            else:
                at += 1
        rows.append(self._free.pop())
        return joined
