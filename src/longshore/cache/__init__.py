"""The control plane: what is where, what moves, what is evicted. Plain Python, sans I/O."""

from longshore.cache.events import Event, EventKind
from longshore.cache.eviction.hit_rates import ReuseHint
from longshore.cache.explain import Account, Verdict, explain
from longshore.cache.index import Presence, Residency
from longshore.cache.manager import TieredCache
from longshore.cache.partial import Partial, PromptTokens
from longshore.cache.pool import EDGES, State
from longshore.cache.recompute_gate import RecomputeGate
from longshore.cache.settings import (
    DEFAULT_PRIORITY,
    CacheGroup,
    CacheSettings,
    PrefetchPolicy,
    Retention,
    TierSpec,
    WritePolicy,
    WriteRule,
)
from longshore.cache.types import (
    UNKNOWN_START,
    Counters,
    DeviceCopy,
    DropReason,
    Found,
    GroupKeys,
    Lease,
    LoadOrder,
    MissReason,
    Need,
    Outcome,
    Part,
    Progress,
    RouteTotals,
    Run,
    SizeStats,
    StoreOrder,
    TierStats,
    Until,
)

__all__ = [
    "DEFAULT_PRIORITY",
    "EDGES",
    "UNKNOWN_START",
    "Account",
    "CacheGroup",
    "CacheSettings",
    "Counters",
    "DeviceCopy",
    "DropReason",
    "Event",
    "EventKind",
    "Found",
    "GroupKeys",
    "Lease",
    "LoadOrder",
    "MissReason",
    "Need",
    "Outcome",
    "Part",
    "Partial",
    "PrefetchPolicy",
    "Presence",
    "Progress",
    "PromptTokens",
    "RecomputeGate",
    "Residency",
    "Retention",
    "ReuseHint",
    "RouteTotals",
    "Run",
    "SizeStats",
    "State",
    "StoreOrder",
    "TierSpec",
    "TierStats",
    "TieredCache",
    "Until",
    "Verdict",
    "WritePolicy",
    "WriteRule",
    "explain",
]
