"""Write policies: which chunks are copied to a colder tier, when, and how many bytes of them.

WriteRule       the policy of one route, with its threshold and its bytes per second
OfferFilter     admission filter of selective policies: chunks offered often enough
WriteBudget     token bucket of the bytes that may be written
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

from longshore.boundary import Key
from longshore.cache.eviction.ghosts import Ghosts
from longshore.errors import CacheError


class WritePolicy(enum.Enum):
    """Write policy of one route."""

    THROUGH = "write_through"
    SELECTIVE = "write_through_selective"
    BACK = "write_back"

    def wants(self, *, before_eviction: bool) -> bool:
        """Whether to store a chunk now, which has become complete on the device, or, `before_eviction`, leaves it."""
        return self is not WritePolicy.BACK or before_eviction

    def clean_target(self, slots: int, *, stores_wait: bool) -> int:
        """How many of the `slots` of the warmer tier to keep free or backed up; fewer if stores wait for room."""
        if self is not WritePolicy.BACK:
            return slots
        return -(-slots // 16) if stores_wait else slots // 4


@dataclass(frozen=True, slots=True)
class WriteRule:
    """The write policy of one route. A selective policy copies chunks that were offered or used `threshold` times.

    `bytes_per_second` limits the copies (`WriteBudget`). Chunks beyond it are counted as dropped, and may be evicted
    without a copy until their next use.
    """

    policy: WritePolicy
    threshold: int = 2
    bytes_per_second: float = math.inf

    def __post_init__(self) -> None:
        if not self.bytes_per_second > 0:
            raise CacheError(f"bytes_per_second: expected more than 0, got {self.bytes_per_second}")
        if self.selective and not 2 <= self.threshold <= _MOST_USES:
            raise CacheError(f"threshold: expected 2 to {_MOST_USES} for a selective policy, got {self.threshold}")

    @property
    def selective(self) -> bool:
        """Whether chunks are copied only after several uses."""
        return self.policy is WritePolicy.SELECTIVE


_MOST_USES = 255
"""Uses are counted in one byte."""


SAVED_SECONDS = 3600.0
"""The bucket holds the budget of one hour."""


class WriteBudget:
    """A token bucket of `rate` bytes per second, infinite for no limit; it bounds the wear of an SSD.

        rate     bytes per second, on average over a long time
        bucket   at most one hour of the rate, full at the start, which can be spent at once

    The time is passed by the caller.
    """

    __slots__ = ("_left", "_now", "rate")

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._left = rate * SAVED_SECONDS
        self._now: float | None = None

    def allows(self, now: float, count: int, nbytes: int) -> int:
        """How many of `count` writes of `nbytes` each are allowed at `now`."""
        if self.rate == math.inf:
            return count
        if self._now is not None and now > self._now:
            self._left = min(self._left + (now - self._now) * self.rate, self.rate * SAVED_SECONDS)
        self._now = now if self._now is None else max(now, self._now)
        return min(count, int(self._left // nbytes))

    def spend(self, nbytes: int) -> None:
        """Spend `nbytes` that were allowed."""
        self._left -= nbytes


class OfferFilter:
    """Admission filter of selective write policies: counts how often chunks that no tier has were offered.

    The counts of the last `limit` distinct chunks are kept, in a ring; a chunk that has left it starts at one again.
    """

    def __init__(self, threshold: int, limit: int) -> None:
        if threshold < 2:
            raise CacheError(f"threshold: expected at least 2 offers, got {threshold}")
        self._steps = [Ghosts(limit) for _ in range(threshold - 1)]
        """The keys that were offered once, twice, ..."""

    def leading(self, keys: Sequence[Key]) -> int:
        """Count an offer of each of `keys`; returns how many leading ones have reached the threshold."""
        enough = [self._see(key) for key in keys]
        return next((i for i, each in enumerate(enough) if not each), len(enough))

    def _see(self, key: Key) -> bool:
        last = self._steps[-1]
        for seen, following in zip(self._steps, [*self._steps[1:], last], strict=True):
            if seen.take(key):
                following.add(key, 1)
                return seen is last
        self._steps[0].add(key, 1)
        return False
