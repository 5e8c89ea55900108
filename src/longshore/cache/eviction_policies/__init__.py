"""Eviction policies: which chunk is evicted when a tier is full. One policy per file, one interface."""

from longshore.cache.eviction_policies.arc import ARC
from longshore.cache.eviction_policies.base import EvictionPolicy
from longshore.cache.eviction_policies.gittins import Gittins
from longshore.cache.eviction_policies.lru import LRU

POLICIES: dict[str, type[EvictionPolicy]] = {"gittins": Gittins, "arc": ARC, "lru": LRU}
"""Every policy, by its name in the settings."""

DEFAULT_POLICY: type[EvictionPolicy] = Gittins
"""The policy of a tier without a setting."""

__all__ = ["ARC", "DEFAULT_POLICY", "LRU", "POLICIES", "EvictionPolicy", "Gittins"]
