"""The loop between the planes: passes commands of the cache to movers, and results back."""

from longshore.runtime.background import BackgroundLoop
from longshore.runtime.chain import TierChain
from longshore.runtime.guard import BlockGuard
from longshore.runtime.loop import Runtime
from longshore.runtime.ranks import Rank, RankMover
from longshore.runtime.recorder import EventRecorder
from longshore.runtime.tier_mover import ForeignMover, TierMover

__all__ = [
    "BackgroundLoop",
    "BlockGuard",
    "EventRecorder",
    "ForeignMover",
    "Rank",
    "RankMover",
    "Runtime",
    "TierChain",
    "TierMover",
]
