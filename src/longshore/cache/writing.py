"""When a chunk is copied to a colder tier: a rule for each route down, named by the tier that it leads into.

    write_through   as soon as it is complete (device -> host) or ready (host -> file, file -> the next)
    write_through_selective   the same, once it was offered (device -> host) or used (from there on) so many times
    write_back      when the engine evicts it (device -> host), or before the tier above has to (from there on)

Below the host tier copies are made by one mechanism, `clean_target`: keep so many slots of the tier above free or
backed up, all of them for write-through, a quarter for write-back, so that an eviction never has to wait for a write.
`longshore.cache.backlog` says which chunks go, and in what order.
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

    def wants(self, *, evicting: bool) -> bool:
        """Whether a chunk on the device is to be copied now that it is complete, or `evicting`."""
        return self is not WritePolicy.BACK or evicting

    def clean_target(self, slots: int) -> int:
        """How many of the upper tier's `slots` are to be free, or safe to evict."""
        return slots // 4 if self is WritePolicy.BACK else slots


@dataclass(frozen=True, slots=True)
class WriteRule:
    """The write policy of one route. A selective one copies what was offered, or used, `threshold` times.

    `bytes_per_second` bounds what is copied (`WriteBudget`); what it does not allow is refused, and counted:
    it may go without a copy until it is used again.
    """

    policy: WritePolicy
    threshold: int = 2
    bytes_per_second: float = math.inf

    def __post_init__(self) -> None:
        if not self.bytes_per_second > 0:
            raise CacheError(f"a write budget is a positive number of bytes per second, got {self.bytes_per_second}")
        if self.selective and not 2 <= self.threshold <= _MOST_USES:
            raise CacheError(f"a selective policy has a threshold from 2 to {_MOST_USES}, got {self.threshold}")

    @property
    def selective(self) -> bool:
        """Whether chunks have to come back before they are copied."""
        return self.policy is WritePolicy.SELECTIVE


_MOST_USES = 255
"""Uses are counted in a byte."""


SAVED_SECONDS = 3600.0
"""So much of the rate can be saved up."""


class WriteBudget:
    """A budget of `rate` bytes per second; infinite for no limit. An SSD lasts as long as it should.

        rate     bytes per second, on the average of any long time
        bucket   holds an hour's worth at most, and is full at the start: what is saved up can be spent at once

    The clock is the caller's: whatever readings it passes, and never one of our own.
    """

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


class Sightings:
    """How often chunks that no tier has were offered: for write policies that store what comes back.

    Counts are kept for the last `limit` different chunks, in a ring; who was forgotten starts again at one.
    """

    def __init__(self, threshold: int, limit: int) -> None:
        if threshold < 2:
            raise CacheError(f"a threshold of sightings is at least 2, got {threshold}")
        self._steps = [Ghosts(limit) for _ in range(threshold - 1)]
        """The keys that were seen once, twice, ..."""

    def leading(self, keys: Sequence[Key]) -> int:
        """Count another sighting of each of `keys`; says how many lead that were seen often enough now."""
        enough = [self._see(key) for key in keys]
        return next((i for i, each in enumerate(enough) if not each), len(enough))

    def _see(self, key: Key) -> bool:
        """Whether this is at least the sighting that the threshold asks for. Goes on being so."""
        last = self._steps[-1]
        for seen, following in zip(self._steps, [*self._steps[1:], last], strict=True):
            if seen.take(key):
                following.add(key, 1)
                return seen is last
        self._steps[0].add(key, 1)
        return False
