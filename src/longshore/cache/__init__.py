"""The control plane: what is where, what moves, what is evicted. Plain Python, sans I/O."""

from longshore.cache.events import Event, EventKind
from longshore.cache.eviction.hit_rates import ReuseHint
from longshore.cache.explain import Account, Verdict, explain
from longshore.cache.index import Presence, Residency
from longshore.cache.manager import TieredCache
from longshore.cache.partial import Partial, PromptTokens
from longshore.cache.pool import EDGES, SlotState
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
    LoadJob,
    MissReason,
    Need,
    Outcome,
    Progress,
    Protection,
    RouteTotals,
    Run,
    ScheduledLoad,
    ScheduledStore,
    SizeStats,
    TierStats,
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
    "LoadJob",
    "MissReason",
    "Need",
    "Outcome",
    "Partial",
    "PrefetchPolicy",
    "Presence",
    "Progress",
    "PromptTokens",
    "Protection",
    "RecomputeGate",
    "Residency",
    "Retention",
    "ReuseHint",
    "RouteTotals",
    "Run",
    "ScheduledLoad",
    "ScheduledStore",
    "SizeStats",
    "SlotState",
    "TierSpec",
    "TierStats",
    "TieredCache",
    "Verdict",
    "WritePolicy",
    "WriteRule",
    "explain",
]
