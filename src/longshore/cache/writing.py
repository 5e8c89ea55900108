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
from dataclasses import dataclass

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

    `bytes_per_second` bounds what is copied (`longshore.cache.budget`); what it does not allow is refused, and counted:
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
