"""The control plane: what is where, what moves, what is evicted. Plain Python, sans I/O."""

from longshore.cache.beginnings import Partial, Text
from longshore.cache.device_pool import DevicePool, DeviceStats
from longshore.cache.events import Event, EventKind
from longshore.cache.eviction.returns import Return
from longshore.cache.explain import Account, Verdict, explain
from longshore.cache.gate import Gate
from longshore.cache.groups import CacheGroup, GroupKeys, Need
from longshore.cache.manager import TieredCache
from longshore.cache.residency import Presence, Residency
from longshore.cache.retention import DEFAULT_PRIORITY, Retention
from longshore.cache.settings import CacheSettings, PrefetchPolicy, TierSpec
from longshore.cache.states import EDGES, State
from longshore.cache.types import (
    Counters,
    DeviceCopy,
    DropReason,
    Found,
    Lease,
    LoadOrder,
    MissReason,
    Outcome,
    Part,
    Placement,
    Progress,
    Resident,
    RouteTotals,
    Run,
    SizeStats,
    StoreOrder,
    TierStats,
    Until,
)
from longshore.cache.writing import WritePolicy, WriteRule

__all__ = [
    "DEFAULT_PRIORITY",
    "EDGES",
    "Account",
    "CacheGroup",
    "CacheSettings",
    "Counters",
    "DeviceCopy",
    "DevicePool",
    "DeviceStats",
    "DropReason",
    "Event",
    "EventKind",
    "Found",
    "Gate",
    "GroupKeys",
    "Lease",
    "LoadOrder",
    "MissReason",
    "Need",
    "Outcome",
    "Part",
    "Partial",
    "Placement",
    "PrefetchPolicy",
    "Presence",
    "Progress",
    "Residency",
    "Resident",
    "Retention",
    "Return",
    "RouteTotals",
    "Run",
    "SizeStats",
    "State",
    "StoreOrder",
    "Text",
    "TierSpec",
    "TierStats",
    "TieredCache",
    "Until",
    "Verdict",
    "WritePolicy",
    "WriteRule",
    "explain",
]
