"""Prefetches: held chunks into the warmest tier, while their request waits for its turn.

policy          the request waits                  called off
best effort     not at all                         when the hold is let go of, or after a load's time
wait            until all is there                 the same
timeout         until all is there, or so long     the same, or after so long
"""

from __future__ import annotations

from collections.abc import Sequence

from longshore.boundary import Key
from longshore.cache.flow import Flow
from longshore.cache.jobs import Hold, Job, Side
from longshore.cache.loading import LOAD_BATCH
from longshore.cache.waiting import PrefetchPolicy, Wait, seconds
from longshore.errors import CacheError


class Prefetching:
    """Orders prefetches on one `Flow`."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._store = flow.store

    def prefetch(self, hold: Hold, policy: PrefetchPolicy | None, timeout: float | None) -> Wait:
        """Have `hold` wait for what it lacks in the warmest tier; a wait of an earlier prefetch is over.

        Raises `CacheError` for a timeout that is none, or that the policy does not have.
        """
        settings = self._flow.settings
        policy = policy or settings.prefetch
        if timeout is not None and policy is not PrefetchPolicy.TIMEOUT:
            raise CacheError(f"only a prefetch by {PrefetchPolicy.TIMEOUT} has a timeout, not one by {policy}")
        timed = policy is PrefetchPolicy.TIMEOUT
        longest = seconds(timeout, settings.prefetch_timeout if timed else settings.load_timeout)
        patient = policy is not PrefetchPolicy.BEST_EFFORT
        former, wait = hold.prefetch, Wait(self._flow.new_id(), self._flow.now + longest, None, patient=patient)
        self._order(hold.nodes(self._store.index), wait)
        hold.prefetch = wait
        if wait.jobs:
            self._flow.waits.begin(wait)
        if former is not None:
            self._flow.leave(former)
        return wait

    def progress(self, hold: Hold) -> int | None:
        """How many chunks of `hold` lead that are in the warmest tier; `None` while it is to wait for more."""
        wait, index = hold.prefetch, self._store.index
        if wait is not None and wait.patient and wait.jobs:
            return None
        path = hold.nodes(index)
        return next((i for i, node in enumerate(path) if not index.is_ready(node, 0)), len(path))

    def _order(self, path: Sequence[int], wait: Wait) -> None:
        """Join what is on its way, and order what only colder tiers have, as far as clean room is there."""
        store, flow = self._store, self._flow
        keys = [store.index.key[node] for node in path]
        flow.join(wait, [slot for node in path if (slot := store.index.slot[0][node]) >= 0])
        cold = [i for i, node in enumerate(path) if store.index.slot[0][node] < 0]
        store.log.by = keys[cold[0]] if cold else None
        cold = cold[: store.room_for(0, [path[i] for i in cold], spare_dirty=True)]
        for start in range(0, len(cold), LOAD_BATCH):
            chosen = cold[start : start + LOAD_BATCH]
            nodes, mine = [path[i] for i in chosen], [keys[i] for i in chosen]
            above = [store.index.key[store.index.parent[node]] for node in nodes]
            for tier in sorted({store.index.warmest_ready(node) for node in nodes}):
                flow.waits.join(wait, [self._read(tier, nodes, mine, above)])

    def _read(self, tier: int, nodes: Sequence[int], keys: Sequence[Key], above: Sequence[Key | None]) -> Job:
        """Order those of `nodes` that are read from `tier` into the warmest one."""
        store, job = self._store, self._flow.new_id()
        ours = [i for i, node in enumerate(nodes) if store.index.warmest_ready(node) == tier]
        sources = [store.index.slot[tier][nodes[i]] for i in ours]
        for slot in sources:
            store.pools[tier].readers[slot] += 1
        slots = store.place_copies([nodes[i] for i in ours], 0, job)
        sides = Side(tier, sources), Side(0, slots)
        return self._flow.order(job, [keys[i] for i in ours], [above[i] for i in ours], *sides, prefetch=True)
