"""The verbs that `TieredCache`, `DevicePool` and `Runtime` had before, by the ones that they have: for older tests.

Tests that were written for them go on to demand what they demanded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from longshore.boundary import Addresses, Key, Slots
from longshore.cache import (
    DeviceCopy,
    DevicePool,
    GroupKeys,
    Lease,
    LoadOrder,
    Need,
    Partial,
    Presence,
    Residency,
    StoreOrder,
    TieredCache,
    Until,
)
from longshore.cache.columns import leading
from longshore.cache.events import EVICTED
from longshore.cache.nodes import ROOT
from longshore.cache.residency import nodes_of
from longshore.cache.types import MissReason, Outcome
from longshore.errors import CacheError, LeaseError
from longshore.runtime import containment
from longshore.runtime.loop import Runtime


class Match(NamedTuple):
    start: int
    length: int
    hold: Lease | None
    foreign: int = 0
    probes: tuple[int, ...] = ()
    partial: Partial | None = None
    turn: int = 0


class GroupMatch(NamedTuple):
    tokens: int
    needs: tuple[Need, ...]
    hold: Lease | None
    foreign: int = 0
    probes: tuple[int, ...] = ()
    turn: int = 0


class Loan(NamedTuple):
    job: int
    slots: Addresses


class OnDevice(NamedTuple):
    blocks: tuple[int, ...]
    match: Match


def match(
    self: Any,
    keys: Sequence[Key],
    now: float,
    *,
    start: int = 0,
    request: str | None = None,
    text: Any = None,
    group: int = 0,
    count: bool = True,
    turn: int | None = None,
) -> Match:
    path = {group: GroupKeys(keys, start, text=text)}
    found = self.lookup(path, now, request=request, count=count, turn=turn)
    return Match(start, found.chunks, found.lease, found.foreign, found.probes, found.partial, found.turn or 0)


def begin(self: Any, keys: Any) -> int:
    mine, at = nodes_of(self._store.index, keys)
    turn: int = self._store.begin(mine, leading(at != ROOT))
    return turn


def count_request(self: Any, keys: Sequence[Key], found: Match, *, request: str | None = None) -> None:
    path = {0: GroupKeys(keys, found.start)}
    self.lookup(path, self._flow.now, until=Until.NOTHING, request=request)


def _all_groups(wanted: Sequence[GroupKeys]) -> dict[int, GroupKeys]:
    told = (each if each.device is not None else each._replace(device=()) for each in wanted)
    return dict(enumerate(told))


def match_groups(
    self: Any, wanted: Sequence[GroupKeys], now: float, *, request: str | None = None, turn: int | None = None
) -> GroupMatch:
    found = self.lookup(_all_groups(wanted), now, request=request, turn=turn)
    return GroupMatch(found.tokens, found.needs, found.lease, found.foreign, found.probes, found.turn)


def fetch(self: Any, keys: Sequence[Key], now: float, *, start: int = 0, group: int = 0) -> Any:
    return self.prefetch({group: GroupKeys(keys, start)}, now)


def fetch_groups(self: Any, wanted: Sequence[GroupKeys], now: float) -> Any:
    return self.prefetch(_all_groups(wanted), now)


def runs(self: Any, hold: Lease) -> Any:
    return self._store.watching.runs(self._leases.get(hold).nodes(self._store.index))


def slots(self: Any, hold: Lease) -> Any:
    return self._store.watching.warmest_slots(self._leases.get(hold).nodes(self._store.index))


def _where(self: Any, keys: Any) -> Residency:
    where: Residency = self.lookup({0: GroupKeys(keys)}, self._flow.now, until=Until.NOTHING, each=True).residency[0]
    return where


def peek(self: Any, keys: Any) -> Residency:
    if self._store.turn:
        asked = {0: GroupKeys(keys)}
        found = self.lookup(asked, self._flow.now, until=Until.STEP, each=True, turn=self._store.turn)
        where: Residency = found.residency[0]
    else:  # a lookup would draw the first turn
        where = _where(self, keys)
        there = [presence in (Presence.READY, Presence.COLDER) for presence in where.presences]
        self._leases.protect(where.at[np.array(there, bool)])
    return where


def in_place(self: Any, keys: Sequence[Key]) -> Slots | None:
    found = _where(self, keys).slots()
    pool = self._store.pools[0]
    return None if found is None else Slots(self._store.levels[0].name, pool.pool_of(found[0]), tuple(found))


def knows(self: Any, key: Key) -> bool:
    return _where(self, [key]).presences[0] is not Presence.ABSENT


def onboard(self: Any, hold: Lease, blocks: Sequence[int], *, group: int = 0, **how: Any) -> LoadOrder:
    record = self._leases.get(hold)
    if record.joint:
        raise LeaseError("the lease is of several groups")
    part = record.parts[0]
    named, part.group = part.group, group  # a match did not name it
    try:
        order: LoadOrder = self.load(hold, {group: blocks}, **how)
    except Exception:
        part.group = named
        raise
    return order


def onboard_groups(self: Any, hold: Lease, blocks: Sequence[Sequence[int]], **how: Any) -> LoadOrder:
    if not self._leases.get(hold).joint:
        raise LeaseError("the lease is of one group")
    order: LoadOrder = self.load(hold, dict(enumerate(blocks)), **how)
    return order


_prefetch = TieredCache.prefetch


def prefetch(self: Any, what: Any, now: float | None = None, **how: Any) -> Any:
    return _prefetch(self, what, self._flow.now if now is None else now, **how)


def prefetched(self: Any, hold: Lease) -> int | None:
    record, index = self._leases.get(hold), self._store.index
    if self._prefetching.is_waiting(record):
        return None
    path = record.nodes(index)
    return next((i for i, node in enumerate(path) if not index.is_ready(node, 0)), len(path))


def outcome(self: Any, hold: Lease) -> Outcome | None:
    if self._leases.get(hold).load is None:
        raise LeaseError("the lease was not loaded")
    ended: Outcome | None = self.progress(hold).outcome
    return ended


def give_up(self: Any, hold: Lease) -> Outcome:
    load = self._leases.get(hold).load
    if load is None:
        raise LeaseError("the lease was not loaded")
    if load.outcome is None:
        self._flow.abandon(load)
        self._conclude(load, MissReason.DEADLINE)
    return load.outcome or Outcome(0, ())


def abort(self: Any, request: str) -> int:
    released: int = self.release(request)
    return released


def in_flight(self: Any, job: int) -> bool:
    return not self.progress(job).is_over


def copy_inside(self: Any, sources: Any, blocks: Sequence[int], *, tokens: int | None = None, group: int = 0) -> int:
    job: int = self.load({group: DeviceCopy(sources, tokens)}, {group: blocks}).parts[0].job
    return job


def commit(
    self: Any,
    keys: Sequence[Key],
    blocks: Sequence[int],
    *,
    first: int = 0,
    evicting: bool = False,
    prompt: int | None = None,
    retention: Any = (),
    group: int = 0,
    text: Any = None,
    turn: int | None = None,
) -> StoreOrder:
    path = GroupKeys(keys, first, text=text, prompt=prompt, retention=retention)
    order: StoreOrder = self.store({group: path}, {group: blocks}, evicting=evicting, turn=turn)[group]
    return order


def offer(
    self: Any,
    keys: Sequence[Key],
    *,
    first: int = 0,
    retention: Any = (),
    group: int = 0,
    patient: bool = False,
    turn: int | None = None,
) -> StoreOrder:
    path = GroupKeys(keys, first, retention=retention)
    order: StoreOrder = self.store({group: path}, patient=patient, turn=turn)[group]
    return order


def slide(self: Any, keys: Sequence[Key], *, group: int = 0) -> None:
    if self._device.asleep and self.settings.stands_alone(group):
        self._store.sliding.slide([node for node in self._store.index.find_alone(keys) if node])
    else:
        self.store({group: GroupKeys((), slid=keys)})


def keep(self: Any, keys: Any, *, group: int = 0, request: str | None = None, turn: int | None = None) -> Lease:
    self._store.check_turn(turn)
    where = _where(self, keys)
    if not len(where) or not {*where.presences} <= {Presence.READY, Presence.COLDER}:
        raise CacheError("not all of the chunks are ready in some tier")
    turn = turn or self._store.turn or None
    lease: Lease = self.lookup({group: GroupKeys(keys)}, self._flow.now, each=True, request=request, turn=turn).lease
    return lease


def lend(self: Any, keys: Any, *, group: int = 0, turn: int | None = None) -> Loan:
    (part,) = self.load({group: GroupKeys(keys)}, turn=turn).parts
    return Loan(part.job, part.slots)


def withdraw(self: Any, job: int) -> None:
    self.release(job)


def resize_device(self: Any, blocks: int | None) -> None:
    self.wake(blocks)


def tick(self: Any, now: float) -> None:
    self.apply((), now)


def hide(self: Any, key: Key | None) -> None:
    self._store.log.hidden = key


def note_device(self: Any, came: Any = (), gone: Any = (), *, cause: str = EVICTED) -> None:
    self._store.watching.log_device(came, gone, cause)


_VERBS = (
    *(match, begin, count_request, match_groups, fetch, fetch_groups, runs, slots, peek, in_place, knows, onboard),
    *(onboard_groups, prefetch, prefetched, outcome, give_up, abort, in_flight, copy_inside, commit, offer, slide),
    *(keep, lend, withdraw, resize_device, tick, hide, note_device),
)


def pool_match(self: Any, keys: Sequence[Key], now: float, **how: Any) -> OnDevice:
    blocks, below = self.lookup(keys, now, **how)
    start = len(blocks) // self._per_chunk
    below = Match(start, below.chunks, below.lease, below.foreign, below.probes, below.partial, below.turn)
    return OnDevice(blocks, below)


def pool_commit(
    self: Any, keys: Sequence[Key], blocks: Sequence[int], *, first: int = 0, text: Any = None, **how: Any
) -> StoreOrder:
    more = {name: how.pop(name) for name in ("prompt", "retention") if name in how}
    order: StoreOrder = self.store(GroupKeys(keys, first, text=text, **more), blocks, **how)
    return order


def wait_onboarded(self: Any, hold: Lease, timeout: float) -> Outcome:
    self._wait(lambda: self.fault is not None or outcome(self._cache, hold) is not None, timeout)
    with self._lock, self._watched():
        ended = outcome(self._cache, hold) or give_up(self._cache, hold)
        self._pump()
    return ended


def wait_prefetched(self: Any, hold: Lease) -> int:
    self._wait(lambda: self.fault is not None or prefetched(self._cache, hold) is not None, math.inf)
    with self._lock, self._watched():
        return prefetched(self._cache, hold) or 0


def install(verbs: Iterable[Any] = _VERBS) -> None:
    """Give the classes their old verbs."""
    read_only = ("runs", "slots", "knows", "in_flight", "in_place", "outcome", "prefetched")
    containment._READ_ONLY |= {*read_only}
    containment._IDLE |= {"tick"}
    for verb in verbs:
        setattr(TieredCache, verb.__name__, verb)
    DevicePool.match = pool_match  # type: ignore[attr-defined]
    DevicePool.commit = pool_commit  # type: ignore[attr-defined]
    DevicePool.onboard = DevicePool.load  # type: ignore[attr-defined]
    DevicePool.copy_inside = DevicePool.copy  # type: ignore[attr-defined]
    Runtime.wait_onboarded = wait_onboarded  # type: ignore[attr-defined]
    Runtime.wait_prefetched = wait_prefetched  # type: ignore[attr-defined]


install()
