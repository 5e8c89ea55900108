"""How much may be written to a tier: a bucket that fills at a steady rate, so that an SSD lasts as long as it should.

    rate     bytes per second, on the average of any long time
    bucket   holds an hour's worth at most, and is full at the start: what is saved up can be spent at once

The clock is the caller's: whatever readings it passes, and never one of our own.
"""

from __future__ import annotations

import math

SAVED_SECONDS = 3600.0
"""So much of the rate can be saved up."""


class WriteBudget:
    """A budget of `rate` bytes per second; infinite for no limit."""

    __slots__ = ("_left", "_now", "rate")

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._left = rate * SAVED_SECONDS
        self._now: float | None = None

    def allows(self, now: float, count: int, nbytes: int) -> int:
        """How many of `count` writes of `nbytes` each may be made at `now`."""
        if self.rate == math.inf:
            return count
        if self._now is not None and now > self._now:
            self._left = min(self._left + (now - self._now) * self.rate, self.rate * SAVED_SECONDS)
        self._now = now if self._now is None else max(now, self._now)
        return min(count, int(self._left // nbytes))

    def spend(self, nbytes: int) -> None:
        """So many bytes, which were allowed, will be written."""
        self._left -= nbytes
