"""Who goes first when a tier is full. One policy a file, one small interface."""

from longshore.cache.eviction.arc import ARC
from longshore.cache.eviction.base import EvictionPolicy
from longshore.cache.eviction.lru import LRU

__all__ = ["ARC", "LRU", "EvictionPolicy"]
