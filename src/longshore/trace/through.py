"""Requests of a trace through the verbs of `TieredCache`: one tier, no bytes, no time.

    lookup, load ──► loaded ──► store ──► stored ──► release        one request after the other

The device keeps nothing: each request looks up its whole path, loads what is found and computes the rest. A simulated
device ends every copy with success as soon as it is ordered. What a hit is, and which blocks a request has, is as in
the plain policy experiment (`longshore.trace.experiment`), so that the two may be compared.
"""

from __future__ import annotations

from collections.abc import Sequence

from longshore.boundary import HOST, Status, Transfer, TransferResult
from longshore.cache import CacheSettings, GroupKeys, Return, TieredCache, TierSpec
from longshore.cache.eviction import EvictionPolicy
from longshore.errors import IntegrityError
from longshore.trace.tiered import keys_of

_MAX_WRITES = 1 << 14
"""Chunks in flight to the tier: more than any request has, so that the limit has no effect."""


class CacheReplay:
    """A `TieredCache` over one tier of `slots` slots, empty at the start, under policy `kind`."""

    def __init__(self, kind: type[EvictionPolicy], slots: int) -> None:
        self.cache = TieredCache([TierSpec(HOST, slots, policy=kind)], CacheSettings(max_writes=_MAX_WRITES))
        self._now = 0.0

    def serve(self, path: Sequence[int], now: float = 0.0, returns: Return | None = None) -> int:
        """Serve one request for the blocks `path` (ids from 0 to 2**64 - 1, head first); its hits.

        It arrives at `now` seconds, and its host knows this of its return.
        """
        cache, keys = self.cache, keys_of(path)
        self._now = now
        found = cache.lookup({0: GroupKeys(keys)}, now, returns=returns)
        hits, lease = found.chunks, found.lease
        if lease is not None:
            cache.load(lease, {0: range(hits)})
            self._move()
            outcome = cache.progress(lease).outcome
            if outcome is None or outcome.chunks < hits:
                raise IntegrityError(f"not all of the {hits} blocks found were loaded: {outcome}")
        if hits < len(keys):
            cache.store({0: GroupKeys(keys, hits)}, {0: range(hits, len(keys))}, turn=found.turn)
            self._move()
        if lease is not None:
            cache.release(lease)
        return hits

    def _move(self) -> None:
        """The simulated device: whatever was ordered has succeeded."""
        done = [
            TransferResult(command.job, (Status.OK,) * len(command.items), len(command.items))
            for command in self.cache.take()
            if isinstance(command, Transfer)
        ]
        self.cache.apply(done, self._now)
