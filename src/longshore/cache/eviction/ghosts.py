"""Keys that left a cache lately: what adaptive policies remember, in bounded memory and without a search.

A ghost list is a set of keys of which the oldest are forgotten. Each of 64 shards keeps a young and an old generation:
when the young one is full, the old one is forgotten and they change places. So between half and all of `limit` keys
are remembered, and no call ever forgets, or grows, more than a 64th of it.
"""

from __future__ import annotations

from longshore.boundary import Key
from longshore.errors import CacheError

_SHARDS = 64


class Ghosts:
    """At most `limit` keys (but at least one in each shard), the oldest forgotten first."""

    __slots__ = ("_count", "_half", "_old", "_young")

    def __init__(self, limit: int) -> None:
        self._half = max(1, limit // (2 * _SHARDS))
        self._young: list[dict[Key, None]] = [{} for _ in range(_SHARDS)]
        self._old: list[dict[Key, None]] = [{} for _ in range(_SHARDS)]
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, key: Key) -> bool:
        shard = key[-1] % _SHARDS
        return key in self._young[shard] or key in self._old[shard]

    def add(self, key: Key) -> None:
        """Remember `key` as the youngest."""
        shard = key[-1] % _SHARDS
        self.discard(key)
        young = self._young[shard]
        young[key] = None
        self._count += 1
        if len(young) >= self._half:
            self._count -= len(self._old[shard])
            self._old[shard], self._young[shard] = young, {}

    def discard(self, key: Key) -> bool:
        """Forget `key`; says whether it was remembered."""
        shard = key[-1] % _SHARDS
        for generation in (self._young[shard], self._old[shard]):
            if key in generation:
                del generation[key]
                self._count -= 1
                return True
        return False

    def check_integrity(self) -> None:
        """Raise `CacheError` unless the count is right, and no key is remembered twice."""
        keys = [key for generations in (self._young, self._old) for shard in generations for key in shard]
        if len(keys) != self._count or len(set(keys)) != len(keys):
            raise CacheError(f"{len(keys)} ghosts are remembered, {self._count} counted")
