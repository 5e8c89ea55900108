"""The control plane: what is where, what moves, what is evicted. Plain Python, sans I/O."""

from longshore.cache.flow import CacheSettings
from longshore.cache.manager import TieredCache, TierSpec
from longshore.cache.types import (
    Counters,
    DropReason,
    Hold,
    Match,
    MissReason,
    Offload,
    Onboarding,
    Outcome,
    Part,
    Placement,
    Presence,
    RouteTotals,
    Run,
    TierStats,
)
from longshore.cache.writing import WritePolicy

__all__ = [
    "CacheSettings",
    "Counters",
    "DropReason",
    "Hold",
    "Match",
    "MissReason",
    "Offload",
    "Onboarding",
    "Outcome",
    "Part",
    "Placement",
    "Presence",
    "RouteTotals",
    "Run",
    "TierSpec",
    "TierStats",
    "TieredCache",
    "WritePolicy",
]
