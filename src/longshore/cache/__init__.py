"""The control plane: what is where, what moves, what is evicted. Plain Python, sans I/O."""

from longshore.cache.events import Event, EventKind
from longshore.cache.eviction_policies.hit_rates import ReuseHint
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
    GroupKeys,
    GroupMatch,
    Lease,
    LoadJob,
    LookupResult,
    MissReason,
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
from longshore.errors import former_names

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
    "GroupKeys",
    "GroupMatch",
    "Lease",
    "LoadJob",
    "LookupResult",
    "MissReason",
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

__getattr__ = former_names(__name__, {"Found": "LookupResult", "Need": "GroupMatch"})
