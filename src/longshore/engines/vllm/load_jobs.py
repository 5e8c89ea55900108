"""Loads: slots that are leased to the workers; in parts, if a load has more chunks than host memory has room for.

    prepare_load ──► first part: what is in host memory ──► workers ──► reports of all ranks ──► slots are given back
                                                               ▲                                      │
                           lent in a later step's metadata ────┴── read from colder tiers ◄───────────┘

The request waits, and vLLM continues with its steps, until the workers report the load: after its last part, or after
one has failed. A load whose next chunks are lost, or do not arrive in time, is ended, and its request is recomputed.
Each part gets its slots at once and gives them back without needing others, so loads do not wait for each other.

Chunks that only stores of replicas have are asked for once for each request, and fetched while it waits:

    lookup, some chunks are in no tier ─► ask ─(the probe ends)─► gate ─► fetch into host memory ─► lookup: HIT
                                              MISS: not there, or quicker to compute, or not in time

A peer that computes or stores some of them answers that they are coming, and is asked again. Nothing here waits. vLLM
asks about a request again in each step; the answer is `HIT_PENDING` until then.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, takewhile
from typing import TYPE_CHECKING

from vllm.v1.kv_offload.base import OffloadKey

from longshore.boundary import FILE, HOST, PEERS, REMOTE, Key
from longshore.cache import (
    GroupKeys,
    Lease,
    MissReason,
    PrefetchPolicy,
    Presence,
    Protection,
    RecomputeGate,
    Residency,
    Run,
    TieredCache,
)
from longshore.engines.vllm.requests import GROUP_BYTES, ChunkGroups, JobContext, RequestState, Ticket, residency
from longshore.engines.vllm.store_jobs import NO_SLOTS
from longshore.engines.vllm.weight_changes import BlockValidity
from longshore.engines.vllm.worker import JobPart, SlotsSpec
from longshore.runtime.loop import Runtime
from longshore.runtime.remote_fetch import fetch_timeout, worth_probing

if TYPE_CHECKING:
    from longshore.tiers.remote.peers import PeerTier

Paths = Mapping[int, Residency | Sequence[Key]]
"""Chunks by our number of their KV cache group."""


@dataclass(slots=True)
class StreamedLoad:
    """What the workers load for the request `name`, whose `tick` it is, in parts.

    Attributes:
        origins: The tiers that chunks were brought up from, by key.
        lent: How many chunks of each KV cache group were lent, by our number.
        number: That of its first part, by which workers know it.
        parts: Tickets of the parts that workers read.
        rest: The chunks that were not lent, in order: our number of the group, and the key.
        lease: Keeps `rest` in some tier.
        fetch: On the first of `rest`, as many as are `fetched`: they are being brought up.
        failed: Whether a part has failed, or will not come.
    """

    name: str
    tick: int | None
    lent: list[int]
    origins: Mapping[Key, str]
    number: int = 0
    parts: list[Ticket] = field(default_factory=list)
    rest: list[tuple[int, Key]] = field(default_factory=list)
    lease: Lease | None = None
    fetch: Lease | None = None
    fetched: int = 0
    failed: bool = False


class Loads:
    """The loads of one engine, one of each request at most. Calls are made inside a transaction of the runtime."""

    def __init__(self, jobs: JobContext, validity: BlockValidity) -> None:
        self._jobs = jobs
        self._groups = len(jobs.groups)
        self._reports = jobs.reports
        self._validity = validity
        self._loads: dict[str, StreamedLoad] = {}
        self._new_parts: list[JobPart] = []

    def __contains__(self, name: str) -> bool:
        """Whether the workers load something for the request `name`."""
        return name in self._loads

    def __len__(self) -> int:
        """Loads that the workers have not reported."""
        return len(self._loads)

    @property
    def tickets(self) -> list[Ticket]:
        """The tickets of all parts that workers read."""
        return [ticket for load in self._loads.values() for ticket in load.parts]

    def begin(
        self,
        cache: TieredCache,
        name: str,
        tick: int | None,
        paths: Paths,
        origins: Mapping[Key, str],
        *,
        streams: bool,
    ) -> SlotsSpec:
        """The first part of a load of `paths`: what is in host memory, which is all of them unless the load `streams`.

        `origins` are the tiers that chunks were brought up from, by key.
        """
        load = StreamedLoad(name, tick, [0] * self._groups, origins)
        first, load.rest = _ready(cache, paths) if streams else (paths, [])
        spec = self._lend(cache, load, first)
        load.number = spec.ticket
        if load.rest:
            load.lease = _lease(cache, load, load.rest)
        self._loads[name] = load
        left = tuple(sum(group == each for each, _ in load.rest) for group in range(self._groups))
        return SlotsSpec(spec.ticket, spec.group_slots, spec.epoch, *((spec.chunks_before, left) if load.rest else ()))

    def proceed(self, cache: TieredCache) -> None:
        """End parts that all ranks have read, which gives their slots back, and lend the next ones.

        What loads have in host memory beyond their first part is at most half of its slots, or one chunk of each.
        """
        slots = self._jobs.slots
        streams = [load for load in self._loads.values() if load.rest]
        for load in streams:
            for ticket in [each for each in load.parts if self._reports.load_has_ended(each.number)]:
                load.failed |= self._reports.load_has_failed(ticket.number)
                load.parts.remove(ticket)
                self._jobs.end(ticket, cache)
            ahead, is_late = load.rest[:slots], load.fetch is not None and cache.progress(load.fetch).is_over
            ready, rest = _ready(cache, _by_group(ahead))
            if load.failed or (is_late and not ready):
                self.stop(cache, load.name, MissReason.AFTER_MISS if load.failed else MissReason.DEADLINE)
                continue
            if ready:
                del load.rest[: len(ahead) - len(rest)]
                load.fetched -= len(ahead) - len(rest)
                self._new_parts.append(JobPart(load.number, self._lend(cache, load, ready)))
            if load.fetched <= 0 and load.fetch is not None:
                cache.release(load.fetch)
                load.fetch = None
            if not load.rest:
                _release(cache, load)
            elif load.fetch is None:
                self._bring_up(cache, load, max(1, slots // 2 // len(streams)))

    def stop(self, cache: TieredCache, name: str, reason: MissReason = MissReason.CANCELLED) -> None:
        """No more is lent for `name`: the chunks that were not are misses, and the load has failed.

        The workers report that when they have read what they were lent.
        """
        load = self._loads.get(name)
        if load is not None and load.rest:
            cache.counters.misses[reason] += len(load.rest)
            load.failed, load.rest = True, []
            self._new_parts.append(JobPart(load.number, None))
            _release(cache, load)

    def end(self, cache: TieredCache, name: str) -> tuple[list[Ticket], bool]:
        """The workers have reported the load for `name`, or will in vain. Its open parts, and whether it has failed."""
        self.stop(cache, name)
        load = self._loads.pop(name)
        return load.parts, load.failed or any(self._reports.load_has_failed(ticket.number) for ticket in load.parts)

    def end_all(self, cache: TieredCache) -> list[Ticket]:
        """End the loads of all requests; returns the tickets of open parts."""
        return [ticket for name in list(self._loads) for ticket in self.end(cache, name)[0]]

    def take(self) -> list[JobPart]:
        """Parts that are sent to the workers in this step."""
        parts, self._new_parts = self._new_parts, []
        return parts

    def abandon(self) -> list[JobPart]:
        """`take` after the control plane has failed: loads that have more parts are ended."""
        streams = [load for load in self._loads.values() if load.rest]
        for load in streams:
            load.rest = []
        return [*self.take(), *(JobPart(load.number, None) for load in streams)]

    def _bring_up(self, cache: TieredCache, load: StreamedLoad, share: int) -> None:
        """Have the next chunks read into host memory: half of the load's `share`, so that reads and copies overlap."""
        chunks = load.rest[: max(1, share // 2)]
        if load.parts and len(chunks) + sum(len(each.slots) for each in load.parts) > share:
            return
        load.fetch, load.fetched = _lease(cache, load, chunks), len(chunks)
        if load.fetch is None:
            self.stop(cache, load.name, MissReason.ABSENT)
        else:
            now, timeout = self._jobs.clock(), self._jobs.timeout
            cache.prefetch(load.fetch, now, policy=PrefetchPolicy.TIMEOUT, timeout=timeout)

    def _lend(self, cache: TieredCache, load: StreamedLoad, paths: Paths) -> SlotsSpec:
        """Lease the slots of the next chunks, which are in host memory, to the workers."""
        ticket, runs, begins = self._jobs.ticket(), [NO_SLOTS] * self._groups, tuple(load.lent)
        order = cache.load(
            {group: GroupKeys(keys) for group, keys in paths.items()}, tick=load.tick, origins=load.origins
        )
        for group, part in zip(paths, order.jobs, strict=True):
            runs[group] = part.slots.of
            load.lent[group] += part.chunks
            ticket.jobs.append((part.job, part.slots.of))
        if ticket.jobs:
            load.parts.append(ticket)
        return SlotsSpec(ticket.number, tuple(runs), self._validity.epoch, begins)


def _by_group(chunks: Sequence[tuple[int, Key]]) -> dict[int, list[Key]]:
    paths: dict[int, list[Key]] = {}
    for group, key in chunks:
        paths.setdefault(group, []).append(key)
    return paths


def _lease(cache: TieredCache, load: StreamedLoad, chunks: Sequence[tuple[int, Key]]) -> Lease | None:
    """A lease on `chunks`; `None` if no tier has any of them."""
    asked = {group: GroupKeys(keys) for group, keys in _by_group(chunks).items()}
    return cache.lookup(asked, 0.0, independent=True, request=load.name, tick=load.tick).lease


def _release(cache: TieredCache, load: StreamedLoad) -> None:
    for lease in (load.lease, load.fetch):
        if lease is not None:
            cache.release(lease)
    load.lease = load.fetch = None


def _ready(cache: TieredCache, paths: Paths) -> tuple[dict[int, Residency], list[tuple[int, Key]]]:
    """The leading chunks of `paths`, group after group, that are in host memory; and the others."""
    ready, rest = dict[int, Residency](), list[tuple[int, Key]]()
    for group, keys in paths.items():
        seen = keys if isinstance(keys, Residency) else residency(cache, keys)
        lead = takewhile(lambda presence: presence is Presence.READY, () if rest else seen.presences)
        count = len(list(lead))
        if count:
            ready[group] = seen.part(0, count)
        rest += [(group, key) for key in seen.keys[count:]]
    return ready, rest


_TIER = {Presence.READY: HOST, Presence.IN_FLIGHT: HOST, Presence.COLDER: FILE, Presence.ABSENT: ""}


def tiers_of(found: Sequence[Presence]) -> list[str]:
    """The tier that chunks found so are read from; empty for none."""
    return [_TIER[presence] for presence in found]


def load_limit(
    gate: RecomputeGate | None,
    ends: Mapping[OffloadKey, int],
    tiers: Sequence[str],
    first: OffloadKey,
    now: float,
) -> float:
    """The gate: up to which token of a prompt, computed up to the chunk `first`, loading is faster than computing.

    vLLM asks chunk by chunk, and loads the longest prefix that it was promised, so chunks behind this token are not
    promised. Chunks of the group that vLLM asks for first stand for those of all groups. Infinity without a `gate`.

    Args:
        ends: For each chunk, in order, the token that it ends with.
        tiers: Where each of them is read from; empty for nowhere.
    """
    if gate is None or first not in ends:
        return math.inf
    group = first[-GROUP_BYTES:]
    mine = sorted(
        (end, tier) for (key, end), tier in zip(ends.items(), tiers, strict=True) if key[-GROUP_BYTES:] == group
    )
    computed = ends[first] - mine[0][0]
    chain = list(takewhile(lambda chunk: chunk[1], (chunk for chunk in mine if chunk[0] > computed)))
    runs = [Run(tier, len(list(same))) for tier, same in groupby(tier for _, tier in chain)]
    count = gate.worth_loading(computed, runs, now)
    return chain[count - 1][0] if count else computed


_ASKS_AGAIN, _LONGER = 0.01, 0.05
"""A peer that computes chunks is asked again after so many seconds, and after so much of the time waited for it."""


class RemoteFetches:
    """Asks stores about the chunks of requests, and fetches, for one manager."""

    def __init__(self, runtime: Runtime, groups: ChunkGroups, peers: PeerTier | None = None) -> None:
        self._runtime = runtime
        self._groups = groups
        self._peers = peers
        self.peer_waits: Counter[str] = Counter()
        """How waiting for blocks that a peer computes has ended: `arrived`, `gone`, `late`."""

    def look(
        self,
        request: RequestState,
        ends: Mapping[OffloadKey, int],
        found: Sequence[Presence],
        first: OffloadKey,
        *,
        late: bool = False,
    ) -> Sequence[Presence]:
        """`found`, in which chunks that a store is asked for, or sends, are on their way.

        Nothing is asked for a request that is `late`: it has waited for too long.

        Args:
            request: Whose chunks they are.
            ends: vLLM's keys of all chunks that it has named, in order, each with the token that it ends with.
            found: Where each of them is.
            first: The chunk that vLLM asks for.
        """
        if late and request.asks_again and not request.fetches_end:
            request.fetches_end = True
            self.peer_waits["late"] += 1
        if late or request.fetches_end or REMOTE not in request.hints.load:
            return found
        absent = [key for key, presence in zip(ends, found, strict=True) if presence is Presence.ABSENT]
        now = self._runtime.clock()
        if request.probes is None and now < request.asks_again:
            return _on_their_way(found, ends, set(absent))
        with self._runtime.transaction() as cache:
            asked = {0: GroupKeys(request.ours(absent))}
            asks = self._worth_asking(ends, absent, first) if request.probes is None else []
            if request.source is None:  # a peer is asked by requests that name it
                asks = [name for name in asks if name != PEERS]
            elif self._peers is not None and asks:
                self._peers.route(asked[0].keys, request.source)
            known = cache.lookup(asked, now, protect=Protection.NONE, independent=True, remote_tiers=asks)
            if request.probes is None:
                request.probes = known.probes
            if not all(cache.progress(probe).is_over for probe in request.probes):
                return _on_their_way(found, ends, set(absent))
            if self._peers is not None and request.source is not None and self._peers.are_coming(asked[0].keys):
                request.probes = None
                request.asks_again = now + max(_ASKS_AGAIN, _LONGER * (now - (request.waiting_since or now)))
                return _on_their_way(found, ends, set(absent))
            request.fetches_end = True
            names = dict(zip(absent, known.remote_sources.get(0, [""] * len(absent)), strict=True))
            if request.source is None:  # what a peer has that another request has named
                names = {key: "" if name == PEERS else name for key, name in names.items()}
            if request.asks_again:
                self.peer_waits["arrived" if PEERS in names.values() else "gone"] += 1
            if not any(names.values()):
                return found
            tiers = [names.get(key) or tier for key, tier in zip(ends, tiers_of(found), strict=True)]
            sent = Counter(names[key] for key in absent if names[key] and key[-GROUP_BYTES:] == first[-GROUP_BYTES:])
            longest = fetch_timeout(self._runtime, cache, [Run(*each) for each in sent.items()], now)
            request.load_limit = load_limit(self._runtime.gate, ends, tiers, first, now)
            coming = self._fetch(cache, request, ends, {key for key in absent if names[key]}, now, longest)
        request.origins.update((key, names[key]) for key in coming)
        return _on_their_way(found, ends, coming)

    def _worth_asking(
        self, ends: Mapping[OffloadKey, int], absent: Sequence[OffloadKey], first: OffloadKey
    ) -> list[str]:
        """The stores to wait for; chunks of the group that vLLM asks for first stand for those of all groups."""
        group = first[-GROUP_BYTES:]
        mine = [ends[key] for key in absent if key[-GROUP_BYTES:] == group and ends[key] >= ends[first]]
        tokens = self._groups.tokens[self._groups.of(first)]
        # A chunk may be named before it is full.
        return worth_probing(self._runtime, (mine[0] - 1) // tokens * tokens, len(mine)) if mine else []

    def _fetch(
        self,
        cache: TieredCache,
        request: RequestState,
        ends: Mapping[OffloadKey, int],
        there: set[OffloadKey],
        now: float,
        longest: float | None,
    ) -> set[OffloadKey]:
        """Order those chunks that stores have, up to the load limit; which are on their way now."""
        keys = list(ends)
        has = _known(cache, request, keys)
        reach, parts = request.load_limit or 0.0, self._groups.split(keys)
        for group, mine in parts:  # a prefix is served as far as each group without a window reaches
            if self._groups.windows[group] is None:
                whole = ends[mine[0]] == self._groups.tokens[group]  # from the first chunk on
                known = takewhile(lambda key: key in there or key in has, mine if whole else ())
                reach = min(reach, max((ends[key] for key in known), default=0))
        for group, mine in parts:
            window, tokens = self._groups.windows[group], self._groups.tokens[group]
            wanted = [key for key in mine if ends[key] <= reach]
            if window is not None:
                wanted = [key for key in wanted if ends[key] > reach - (window + 1) * tokens and key in there]
            if wanted:
                cache.prefetch({group: GroupKeys(request.ours(wanted))}, now, timeout=longest)
        return _known(cache, request, [key for key in keys if key in there])


def _known(cache: TieredCache, request: RequestState, keys: Sequence[OffloadKey]) -> set[OffloadKey]:
    """Those of `keys` that a tier has, or that are on their way."""
    presences = residency(cache, request.ours(keys)).presences
    return {key for key, each in zip(keys, presences, strict=True) if each is not Presence.ABSENT}


def _on_their_way(
    found: Sequence[Presence], ends: Mapping[OffloadKey, int], keys: set[OffloadKey]
) -> Sequence[Presence]:
    return [Presence.IN_FLIGHT if key in keys else presence for key, presence in zip(ends, found, strict=True)]
