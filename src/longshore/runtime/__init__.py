"""The loop between the planes: passes commands of the cache to movers, and results back."""

from longshore.runtime.block_guard import BlockGuard
from longshore.runtime.loop import BackgroundLoop, Runtime
from longshore.runtime.recorder import EventRecorder
from longshore.tiers.mover import KeyedMover, TierMover

__all__ = [
    "BackgroundLoop",
    "BlockGuard",
    "EventRecorder",
    "KeyedMover",
    "Runtime",
    "TierMover",
]
