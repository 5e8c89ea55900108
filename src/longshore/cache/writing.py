"""When a chunk is copied to a colder tier.

    write_through   as soon as it is complete (device -> host) or ready (host -> file)
    write_through_selective   the same, once it was offered (device -> host) or used (host -> file) so many times
    write_back      when the engine evicts it (device -> host), or before the host tier has to (host -> file)

Either way a file copy is made by one mechanism, `clean_target`: keep so many slots of the host tier free or backed up,
all of them for write-through, a quarter for write-back, so that an eviction never has to wait for a write.
`longshore.cache.backlog` says which chunks go, and in what order.
"""

from __future__ import annotations

import enum


class WritePolicy(enum.Enum):
    """Write policy of one route."""

    THROUGH = "write_through"
    SELECTIVE = "write_through_selective"
    BACK = "write_back"

    def wants(self, *, evicting: bool) -> bool:
        """Whether a chunk on the device is to be copied now that it is complete, or `evicting`."""
        return self is not WritePolicy.BACK or evicting

    def clean_target(self, slots: int) -> int:
        """How many of the host tier's `slots` are to be free, or safe to evict."""
        return slots // 4 if self is WritePolicy.BACK else slots
