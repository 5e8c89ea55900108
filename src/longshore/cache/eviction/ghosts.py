"""Keys that left a cache lately: what adaptive policies remember, in bounded memory and without a search.

    ring     ... │ k7 │ k8 │    │ k2 │ k3 │ ...        the place written next holds the oldest
                             ▲ next

The newest key takes the place of the oldest. Keys find their place in 64 dictionaries, so that none takes long to grow;
the ring is an array that the garbage collector does not walk.
"""

from __future__ import annotations

import numpy as np

from longshore.boundary import Key
from longshore.errors import CacheError

_SHARDS = 64


class Ghosts:
    """The last `limit` keys that were added, and not taken back. About 170 bytes each, key included."""

    __slots__ = ("_count", "_next", "_place", "_ring")

    def __init__(self, limit: int) -> None:
        self._ring = np.empty(max(1, limit), object)
        self._place: list[dict[Key, int]] = [{} for _ in range(_SHARDS)]
        self._next = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, key: Key) -> None:
        """Remember `key`, which is not remembered, in place of the oldest."""
        at, ring = self._next, self._ring
        oldest = ring[at]
        if oldest is None:
            self._count += 1
        else:
            del self._place[oldest[-1] % _SHARDS][oldest]
        ring[at] = key
        self._place[key[-1] % _SHARDS][key] = at
        self._next = at + 1 if at + 1 < len(ring) else 0

    def take(self, key: Key) -> bool:
        """Forget `key`; says whether it was remembered."""
        at = self._place[key[-1] % _SHARDS].pop(key, None)
        if at is None:
            return False
        self._ring[at] = None
        self._count -= 1
        return True

    def check_integrity(self) -> None:
        """Raise `CacheError` unless ring, places and count agree."""
        placed = {key: at for places in self._place for key, at in places.items()}
        found = {key: at for at, key in enumerate(self._ring) if key is not None}
        if placed != found or len(found) != self._count:
            raise CacheError(f"{len(found)} ghosts are in the ring, {len(placed)} have a place, {self._count} counted")
