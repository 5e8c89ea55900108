"""The conformance suite of tiers on a file tier whose files another process reads and writes."""

from pathlib import Path

from longshore.runtime.tier_host import HostedFileTier
from longshore.testing import TierTests
from longshore.tiers.arena import Arena, ArenaSettings
from longshore.tiers.base import Tier
from longshore.tiers.file import capacity_for


class TestHostedFileTier(TierTests):
    persistent = True

    def make_arena(self, nbytes: int) -> Arena:
        return Arena(nbytes, ArenaSettings(shared=True, huge_pages=False))

    def open_tier(self, arena: Arena, directory: Path) -> Tier:
        capacity = capacity_for(self.slots, self.image_bytes)
        return HostedFileTier(
            directory, capacity=capacity, image_bytes=self.image_bytes, arena=arena, scope=bytes(32), fixed_weights=True
        )
