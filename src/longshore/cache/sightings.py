"""How often chunks that no tier has were offered: for write policies that store what comes back.

Counts are kept for the last `limit` different chunks, in a ring, as in `longshore.cache.eviction.ghosts`; who was
forgotten starts again at one.
"""

from __future__ import annotations

from collections.abc import Sequence

from longshore.boundary import Key
from longshore.cache.eviction.ghosts import Ghosts
from longshore.errors import CacheError


class Sightings:
    """Counts of at most `limit` keys."""

    def __init__(self, threshold: int, limit: int) -> None:
        if threshold < 2:
            raise CacheError(f"a threshold of sightings is at least 2, got {threshold}")
        self._steps = [Ghosts(limit) for _ in range(threshold - 1)]
        """The keys that were seen once, twice, ..."""

    def leading(self, keys: Sequence[Key]) -> int:
        """Count another sighting of each of `keys`; says how many lead that were seen often enough now."""
        enough = [self._see(key) for key in keys]
        return next((i for i, each in enumerate(enough) if not each), len(enough))

    def _see(self, key: Key) -> bool:
        """Whether this is at least the sighting that the threshold asks for. Goes on being so."""
        last = self._steps[-1]
        for seen, following in zip(self._steps, [*self._steps[1:], last], strict=True):
            if seen.take(key):
                following.add(key, 1)
                return seen is last
        self._steps[0].add(key, 1)
        return False
