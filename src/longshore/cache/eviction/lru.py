"""Least recently used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from longshore.boundary import Key
from longshore.cache.eviction.base import EvictionPolicy
from longshore.errors import CacheError


class LRU(EvictionPolicy):
    """The key that was not used for the longest time goes first. Every operation is O(1)."""

    def __init__(self) -> None:
        self._order: OrderedDict[Key, None] = OrderedDict()

    def insert(self, key: Key) -> None:
        """`key` became resident; it is now the most recently used."""
        if key in self._order:
            raise CacheError(f"key {key.hex()[:12]} is already in the policy")
        self._order[key] = None

    def touch(self, key: Key) -> None:
        """`key` is now the most recently used."""
        try:
            self._order.move_to_end(key)
        except KeyError:
            raise CacheError(f"key {key.hex()[:12]} is not in the policy") from None

    def remove(self, key: Key) -> None:
        """`key` left."""
        if key not in self._order:
            raise CacheError(f"key {key.hex()[:12]} is not in the policy")
        del self._order[key]

    def candidates(self) -> Iterator[Key]:
        """Keys, least recently used first."""
        return iter(self._order)

    def __len__(self) -> int:
        """Resident keys."""
        return len(self._order)
