"""The control plane: what is where, what moves, what is evicted. Plain Python, sans I/O."""

from longshore.cache.beginnings import Partial, Text
from longshore.cache.device_pool import DevicePool, DeviceStats
from longshore.cache.events import Event, EventKind
from longshore.cache.explain import Account, Verdict, explain
from longshore.cache.gate import Gate
from longshore.cache.groups import CacheGroup, Need, Wanted
from longshore.cache.manager import TieredCache
from longshore.cache.retention import DEFAULT_PRIORITY, Retention
from longshore.cache.settings import CacheSettings, TierSpec
from longshore.cache.sight import Sight
from longshore.cache.states import EDGES, State
from longshore.cache.types import (
    Counters,
    DropReason,
    GroupMatch,
    Hold,
    Loan,
    Match,
    MissReason,
    Offload,
    Onboarding,
    Outcome,
    Part,
    Placement,
    Presence,
    Resident,
    RouteTotals,
    Run,
    SizeStats,
    TierStats,
)
from longshore.cache.waiting import PrefetchPolicy
from longshore.cache.writing import WritePolicy, WriteRule

__all__ = [
    "DEFAULT_PRIORITY",
    "EDGES",
    "Account",
    "CacheGroup",
    "CacheSettings",
    "Counters",
    "DevicePool",
    "DeviceStats",
    "DropReason",
    "Event",
    "EventKind",
    "Gate",
    "GroupMatch",
    "Hold",
    "Loan",
    "Match",
    "MissReason",
    "Need",
    "Offload",
    "Onboarding",
    "Outcome",
    "Part",
    "Partial",
    "Placement",
    "PrefetchPolicy",
    "Presence",
    "Resident",
    "Retention",
    "RouteTotals",
    "Run",
    "Sight",
    "SizeStats",
    "State",
    "Text",
    "TierSpec",
    "TierStats",
    "TieredCache",
    "Verdict",
    "Wanted",
    "WritePolicy",
    "WriteRule",
    "explain",
]
