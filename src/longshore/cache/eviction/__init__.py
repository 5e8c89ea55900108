"""Who goes first when a tier is full. One policy a file, one small interface."""

from longshore.cache.eviction.arc import ARC
from longshore.cache.eviction.base import EvictionPolicy
from longshore.cache.eviction.gittins import Gittins
from longshore.cache.eviction.lru import LRU

POLICIES: dict[str, type[EvictionPolicy]] = {"gittins": Gittins, "arc": ARC, "lru": LRU}
"""Every policy that a tier can have, by the name that users write."""

DEFAULT_POLICY: type[EvictionPolicy] = Gittins
"""What a tier has when nothing is said."""

__all__ = ["ARC", "DEFAULT_POLICY", "LRU", "POLICIES", "EvictionPolicy", "Gittins"]
