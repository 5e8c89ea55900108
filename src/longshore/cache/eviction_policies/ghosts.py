"""Ghost lists of keys: the keys evicted last, in bounded memory and without a search (for ARC).

    ring     ... │ k7 │ k8 │    │ k2 │ k3 │ ...        the place written next holds the oldest
                             ▲ next

The newest key takes the place of the oldest. Keys find their place in 64 dictionaries, so that none takes long to grow;
the ring is an array that the garbage collector does not walk.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from longshore.boundary import Key
from longshore.errors import CacheError

_SHARDS = 64
_SHARD = _SHARDS - 1


class Ghosts:
    """The last `limit` keys evicted from each of two lists, 1 and 2, and not stored again. About 170 bytes each."""

    __slots__ = ("_next", "_place", "_rings", "counts")

    def __init__(self, limit: int) -> None:
        self._rings = tuple(np.empty(max(1, limit), object) for _ in range(3))
        self._place: list[dict[Key, int]] = [{} for _ in range(_SHARDS)]
        self._next = [0, 0, 0]
        self.counts = [0, 0, 0]
        """Number of keys, by the list that they were evicted from."""

    def add(self, key: Key, which: int) -> None:
        """Add `key`, evicted from list `which`, in place of the oldest key of that list."""
        at, ring = self._next[which], self._rings[which]
        oldest = ring[at]
        if oldest is None:
            self.counts[which] += 1
        else:
            del self._place[oldest[-1] & _SHARD][oldest]
        ring[at] = key
        self._place[key[-1] & _SHARD][key] = 4 * at + which
        at += 1
        self._next[which] = at if at < len(ring) else 0

    def add_all(self, keys: Sequence[Key], which: int) -> None:
        """`add` for many different keys, evicted in this order."""
        ring, places, start = self._rings[which], self._place, 0
        while start < len(keys):
            at = self._next[which]
            some = keys[start : start + len(ring) - at]
            end = at + len(some)
            oldest = [key for key in ring[at:end].tolist() if key is not None]
            for key in oldest:
                del places[key[-1] & _SHARD][key]
            place = 4 * at + which
            for key in some:
                places[key[-1] & _SHARD][key] = place
                place += 4
            ring[at:end] = some
            self.counts[which] += len(some) - len(oldest)
            self._next[which] = end if end < len(ring) else 0
            start += len(some)

    def among(self, keys: Sequence[Key]) -> npt.NDArray[np.bool_]:
        """Which of `keys` are in a ghost list."""
        if not any(self.counts):
            return np.zeros(len(keys), bool)
        places = self._place
        return np.array([key in places[key[-1] & _SHARD] for key in keys], bool)

    def take(self, key: Key) -> int:
        """Remove `key`; returns the list that it was evicted from, 0 if it is in none."""
        place = self._place[key[-1] & _SHARD].pop(key, 0)
        if not place:
            return 0
        which = place & 3
        self._rings[which][place >> 2] = None
        self.counts[which] -= 1
        return which

    def check_integrity(self) -> None:
        """Raise `CacheError` unless rings, places and counts agree."""
        placed = {key: place for places in self._place for key, place in places.items()}
        found = [
            (key, 4 * at + which)
            for which, ring in enumerate(self._rings)
            for at, key in enumerate(ring)
            if key is not None
        ]
        counts = [sum(place & 3 == which for _, place in found) for which in range(3)]
        if placed != dict(found) or len(placed) != len(found) or counts != self.counts:
            seen = f"{counts} in the rings and {len(placed)} places"
            raise CacheError(f"internal error: ghost lists: counted {self.counts} keys, found {seen}")
