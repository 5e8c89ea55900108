"""Prefetches: held chunks into the warmest tier, while their request waits for its turn.

policy          the request waits                  called off
best effort     not at all                         when the hold is let go of, or after a load's time
wait            until all is there                 the same
timeout         until all is there, or so long     the same, or after so long

Where clean room is short, a request that waits has copies down ordered, and takes the room that they make in its turn:

    first that lacks room    takes what room is made; what it has in the warmest tier is not evicted until it lets go
    those behind it          order nothing yet
"""

from __future__ import annotations

from collections.abc import Sequence

from longshore.boundary import Key
from longshore.cache.flow import Flow
from longshore.cache.jobs import Job, LeaseRecord, Side, Wait
from longshore.cache.leases import Leases
from longshore.cache.loading import LOAD_BATCH
from longshore.cache.settings import PrefetchPolicy, seconds
from longshore.cache.storing import Storing
from longshore.errors import CacheError


class Prefetching:
    """Orders prefetches on one `Flow`."""

    def __init__(self, flow: Flow, storing: Storing, holds: Leases) -> None:
        self._flow = flow
        self._store = flow.store
        self._storing = storing
        self._holds = holds
        self.queue: dict[int, tuple[LeaseRecord, Wait]] = {}
        """Prefetches that requests wait for, oldest first, by the number of their wait; until the hold lets go."""
        self._is_new = False
        """Whether the queue is another one than `proceed` last saw."""
        self._seen = 0
        """`Store.changes` before `proceed` last looked for room: what it changes itself has it look once more."""

    def check(self, policy: PrefetchPolicy | None, timeout: float | None) -> tuple[PrefetchPolicy, float]:
        """The policy, and for how many seconds.

        Raises `CacheError` for a timeout that is none, or that the policy does not have.
        """
        settings = self._flow.settings
        policy = policy or settings.prefetch
        if timeout is not None and policy is not PrefetchPolicy.TIMEOUT:
            raise CacheError(f"only a prefetch by {PrefetchPolicy.TIMEOUT} has a timeout, not one by {policy}")
        timed = policy is PrefetchPolicy.TIMEOUT
        return policy, seconds(timeout, settings.prefetch_timeout if timed else settings.load_timeout)

    def prefetch(self, hold: LeaseRecord, policy: PrefetchPolicy, longest: float) -> Wait:
        """Have `hold` wait for what it lacks in the warmest tier; a wait of an earlier prefetch is over."""
        patient = policy is not PrefetchPolicy.BEST_EFFORT
        former, wait = hold.prefetch, Wait(self._flow.new_id(), self._flow.now + longest, None, patient=patient)
        self._order(hold, wait, waits_its_turn=patient and any(before.lacks for _, before in self.queue.values()))
        hold.prefetch = wait
        if former is not None:
            self.leave(former)
        if patient and (wait.lacks or wait.jobs):
            if not any(before.lacks for _, before in self.queue.values()):
                self._store.keep_warm(self._store.warm.union(self._path(hold)))
            self.queue[wait.number] = hold, wait
            self._is_new = True
            self.proceed()
        return wait

    def leave(self, wait: Wait) -> None:
        """A request waits no longer."""
        self._flow.leave(wait)
        if self.queue.pop(wait.number, None) is not None:
            self._is_new = True
            self.proceed()

    def clear(self) -> None:
        """All was forgotten."""
        self.queue.clear()

    def proceed(self) -> None:
        """Whoever lacks room takes what was made, in turn; one for whom no more will be made does without.

        Nothing is looked at unless the queue or the store has changed. What the first in the queue that lacks room has
        in the warmest tier, and what those before it have, is not evicted.
        """
        for number in [number for number, (_, wait) in self.queue.items() if self._flow.now >= wait.deadline]:
            del self.queue[number]
            self._is_new = True
        store, is_new = self._store, self._is_new
        if not is_new and self._seen == store.changes:
            return
        self._is_new, self._seen = False, store.changes
        kept, before = set[int]() if is_new else store.warm, set[str | None]()
        for hold, wait in self.queue.values():
            if is_new or wait.lacks:
                kept = kept.union(self._path(hold))
            if wait.lacks:
                store.keep_warm(kept)
                self._order(hold, wait)
                others = len(self._flow.jobs) > len(wait.jobs) or not before <= {hold.request}
                wait.lacks &= others or self._holds.protects
                is_new = True  # those behind it are new to `kept`
            if wait.lacks:
                break
            before.add(hold.request)
        if kept or store.warm:
            store.keep_warm(kept)

    def is_waiting(self, hold: LeaseRecord) -> bool:
        """Whether the request of `hold` is to wait for more of it in the warmest tier."""
        wait, index = hold.prefetch, self._store.index
        if wait is None or not wait.patient or not (wait.jobs or (wait.lacks and wait.number in self.queue)):
            return False
        return bool(wait.jobs) or not all(index.is_ready(node, 0) for node in hold.nodes(index))

    def _path(self, hold: LeaseRecord) -> list[int]:
        """The nodes of the held chunks, as many from the first on as the warmest tier can have at once."""
        return hold.nodes(self._store.index)[: self._store.room_in_all(0)]

    def _order(self, hold: LeaseRecord, wait: Wait, *, waits_its_turn: bool = False) -> None:
        """Join what is on its way, and order what only colder tiers have, as far as clean room is there.

        If more room may be made it `lacks` the rest; or all, if it is not yet its turn.
        """
        store, flow, path = self._store, self._flow, self._path(hold)
        store.serve(hold.turn)
        keys = [store.index.key[node] for node in path]
        flow.join(wait, [slot for node in path if (slot := store.index.slot[0][node]) >= 0])
        cold = [i for i, node in enumerate(path) if store.index.slot[0][node] < 0]
        wait.lacks = waits_its_turn and bool(cold)
        if wait.lacks or not cold:
            flow.waits.begin(wait)
            return
        store.log.by = keys[cold[0]]
        warm = store.warm
        store.keep_warm(warm.union(path))
        room = self._storing.clean_room([path[i] for i in cold], cleans=wait.patient)
        store.keep_warm(warm & store.warm)
        wait.lacks, cold = wait.patient and room < len(cold), cold[:room]
        for start in range(0, len(cold), LOAD_BATCH):
            chosen = cold[start : start + LOAD_BATCH]
            nodes, mine = [path[i] for i in chosen], [keys[i] for i in chosen]
            above = store.index.before(nodes)
            for tier in sorted({store.index.warmest_ready(node) for node in nodes}):
                flow.waits.join(wait, [self._read(tier, nodes, mine, above)])
        flow.waits.begin(wait)

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
