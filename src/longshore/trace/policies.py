"""The eviction policies of a replay by name: those of the cache, and references for comparison."""

from __future__ import annotations

from longshore.cache.eviction import DEFAULT_POLICY, POLICIES, EvictionPolicy
from longshore.trace.names import unknown
from longshore.trace.references import FIFO, LRU2, S3FIFO

REFERENCES: dict[str, type[EvictionPolicy]] = {"fifo": FIFO, "lru-2": LRU2, "s3-fifo": S3FIFO}


def policy_named(name: str | None) -> tuple[str, type[EvictionPolicy]]:
    """The policy called `name`, or the default policy, and its name; raises `TraceError` for an unknown name."""
    known = POLICIES | REFERENCES
    if name is None:
        return next(each for each in known.items() if each[1] is DEFAULT_POLICY)
    if name.lower() not in known:
        raise unknown("a policy", name, sorted(known))
    return name.lower(), known[name.lower()]
