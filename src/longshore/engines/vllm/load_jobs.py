"""`LoadJobs`: slots of host memory that workers read for a load, from `prepare_load` until every rank has reported it.

A load of more chunks than host memory has room for gets its slots in parts:

    prepare_load ──► first part: what is in host memory ──► workers ──► reports of all ranks ──► slots are given back
                                                               ▲                                      │
                           slots in a later step's metadata ───┴── read from colder tiers ◄───────────┘

The request waits, and vLLM continues with its steps, until the workers report the load: after its last part, or after
one has failed. A load whose next chunks are lost, or do not arrive in time, is ended, and its request is recomputed.
Each part gets its slots at once and gives them back without needing others, so loads do not wait for each other.
Requests that vLLM does not load yet, although all their chunks are in host memory, make way for such a load.

`RemoteFetches`: remote stores are probed once for the chunks of a request that no tier of this engine has, and those
that a store has are fetched while the request waits:

    lookup, some chunks are in no tier ─► probe ─(it ends)─► gate ─► fetch into host memory ─► lookup: HIT
                                              MISS: not there, or faster to recompute, or not in time

A peer that computes or stores some of them answers "coming", and is probed again. No call blocks. vLLM looks the chunks
up again in each step, and is answered `HIT_PENDING` until they are there.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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
"""Chunks, by our number of their KV cache group."""


@dataclass(slots=True)
class RequestLoad:
    """One load job of vLLM: what the workers load for the request `name`, in one part or several.

    Attributes:
        request_number: Of the request in the cache.
        chunks_leased: How many chunks of each KV cache group workers have got the slots of, by our number.
        origins: The tiers that chunks were prefetched from, by key.
        first_ticket: The ticket of its first part, by which workers know it.
        parts: Tickets of the parts that workers read.
        pending: The chunks whose slots workers have not got, in order: our number of the group, and the cache key.
        lease: Keeps `pending` in some tier.
        prefetch_lease: A lease on the first of `pending`, which are read into host memory.
        prefetched: How many chunks that lease has.
        failed: Whether a part has failed, or will not be sent.
    """

    name: str
    request_number: int | None
    chunks_leased: list[int]
    origins: Mapping[Key, str]
    first_ticket: int = 0
    parts: list[Ticket] = field(default_factory=list)
    pending: list[tuple[int, Key]] = field(default_factory=list)
    lease: Lease | None = None
    prefetch_lease: Lease | None = None
    prefetched: int = 0
    failed: bool = False


class LoadJobs:
    """The loads of one engine, one of each request at most. Calls are made inside a batch of the runtime.

    Attributes:
        making_way: Requests for which nothing is prefetched until the loads that lacked slots have ended, by name.
    """

    def __init__(self, context: JobContext, validity: BlockValidity) -> None:
        self._context = context
        self._groups = len(context.groups)
        self._reports = context.reports
        self._validity = validity
        self._by_request: dict[str, RequestLoad] = {}
        self._new_parts: list[JobPart] = []
        self._lack_slots: set[str] = set()
        self._lacked_slots: set[str] = set()
        """Requests whose load gets no slots now, and those of open loads that have got none before."""
        self.making_way: set[str] = set()

    def __contains__(self, name: str) -> bool:
        """Whether the workers load something for the request `name`."""
        return name in self._by_request

    def __len__(self) -> int:
        """Loads that the workers have not reported."""
        return len(self._by_request)

    @property
    def tickets(self) -> list[Ticket]:
        """The tickets of all parts that workers read."""
        return [ticket for load in self._by_request.values() for ticket in load.parts]

    def begin(
        self,
        cache: TieredCache,
        name: str,
        request_number: int | None,
        paths: Paths,
        origins: Mapping[Key, str],
        *,
        in_parts: bool,
    ) -> SlotsSpec:
        """Answer `prepare_load`: the first part of a load of `paths`, which is all of it unless `in_parts`.

        `origins` are the tiers that chunks were prefetched from, by cache key.
        """
        load = RequestLoad(name, request_number, [0] * self._groups, origins)
        first, load.pending = _ready(cache, paths) if in_parts else (paths, [])
        spec = self._lease_part(cache, load, first)
        load.first_ticket = spec.ticket
        if load.pending:
            load.lease = _lease(cache, load, load.pending)
        self._by_request[name] = load
        left = tuple(sum(group == each for each, _ in load.pending) for group in range(self._groups))
        return SlotsSpec(
            spec.ticket, spec.group_slots, spec.epoch, *((spec.chunks_before, left) if load.pending else ())
        )

    def proceed(self, cache: TieredCache) -> None:
        """End parts that all ranks have read, which frees their slots, and lease the slots of the next parts.

        What is read into host memory for all loads together takes at most half of its slots, or one for each load. All
        chunks that are there anyway are leased at once: their slots are free again when they are copied.
        """
        slots = self._context.slots
        self._lack_slots.clear()
        divided = [load for load in self._by_request.values() if load.pending]
        for load in divided:
            for ticket in [each for each in load.parts if self._reports.load_has_ended(each.number)]:
                load.failed |= self._reports.load_has_failed(ticket.number)
                load.parts.remove(ticket)
                self._context.end(ticket, cache)
            ahead, lease = load.pending[:slots], load.prefetch_lease
            prefetch = None if lease is None else cache.progress(lease)
            is_late = prefetch is not None and prefetch.is_over
            ready, rest = _ready(cache, _by_group(ahead))
            if load.failed or (is_late and not ready):
                self.stop(cache, load.name, MissReason.AFTER_MISS if load.failed else MissReason.DEADLINE)
                continue
            if ready:
                del load.pending[: len(ahead) - len(rest)]
                load.prefetched -= len(ahead) - len(rest)
                self._new_parts.append(JobPart(load.first_ticket, self._lease_part(cache, load, ready)))
            elif prefetch is not None and prefetch.lacks_room and not load.parts:
                self._lack_slots.add(load.name)
            if load.prefetched <= 0 and load.prefetch_lease is not None:
                cache.release(load.prefetch_lease)
                load.prefetch_lease = None
            if not load.pending:
                _release(cache, load)
            elif load.prefetch_lease is None:
                self._prefetch(cache, load, max(1, slots // 2 // len(divided)))

    def reclaim_slots(self, cache: TieredCache, requests: Iterable[RequestState]) -> None:
        """Release the leases of `requests` that vLLM does not load yet, if a load in parts gets no slots.

        vLLM delays a request whose chunks another one loads, and one that has no room on the device. Both may last
        until the load in parts has ended; chunks that are evicted for it are prefetched again after that.
        """
        self._lacked_slots |= self._lack_slots
        self._lacked_slots &= {load.name for load in self._by_request.values() if load.pending}
        if not self._lacked_slots:
            self.making_way.clear()
        if not self._lack_slots:
            return
        for request in requests:
            if request.leases and not request.waits and request.name not in self._by_request:
                self.making_way.add(request.name)
                request.release(cache)
                request.waiting_since = None  # it had all chunks, and waits for them from now on

    def stop(self, cache: TieredCache, name: str, reason: MissReason = MissReason.CANCELLED) -> None:
        """No further part is sent for the request `name`: its pending chunks are misses, and the load has failed.

        The workers report the load when they have read the parts that they have got.
        """
        load = self._by_request.get(name)
        if load is not None and load.pending:
            cache.counters.misses[reason] += len(load.pending)
            load.failed, load.pending = True, []
            self._new_parts.append(JobPart(load.first_ticket, None))
            _release(cache, load)

    def end(self, cache: TieredCache, name: str) -> tuple[list[Ticket], bool]:
        """End the load of the request `name`; returns its open parts, and whether it has failed."""
        self.stop(cache, name)
        load = self._by_request.pop(name)
        return load.parts, load.failed or any(self._reports.load_has_failed(ticket.number) for ticket in load.parts)

    def end_all(self, cache: TieredCache) -> list[Ticket]:
        """End the loads of all requests; returns the tickets of open parts."""
        return [ticket for name in list(self._by_request) for ticket in self.end(cache, name)[0]]

    def take(self) -> list[JobPart]:
        """Parts that are sent to the workers in this step."""
        parts, self._new_parts = self._new_parts, []
        return parts

    def abandon(self) -> list[JobPart]:
        """`take` after the control plane has failed: loads that have more parts are ended."""
        divided = [load for load in self._by_request.values() if load.pending]
        for load in divided:
            load.pending = []
        return [*self.take(), *(JobPart(load.first_ticket, None) for load in divided)]

    def _prefetch(self, cache: TieredCache, load: RequestLoad, share: int) -> None:
        """Prefetch the next chunks: half of the load's `share` of slots, so that reads and copies overlap."""
        chunks = load.pending[: max(1, share // 2)]
        if load.parts and len(chunks) + sum(len(each.slots) for each in load.parts) > share:
            return
        load.prefetch_lease, load.prefetched = _lease(cache, load, chunks), len(chunks)
        if load.prefetch_lease is None:
            self.stop(cache, load.name, MissReason.ABSENT)
        else:
            now, timeout = self._context.clock(), self._context.timeout
            cache.prefetch(load.prefetch_lease, now, policy=PrefetchPolicy.TIMEOUT, timeout=timeout)

    def _lease_part(self, cache: TieredCache, load: RequestLoad, paths: Paths) -> SlotsSpec:
        """Lease the slots of the next chunks, which are in host memory, to the workers."""
        ticket, group_slots, chunks_before = (
            self._context.new_load_ticket(),
            [NO_SLOTS] * self._groups,
            tuple(load.chunks_leased),
        )
        scheduled = cache.load(
            {group: GroupKeys(keys) for group, keys in paths.items()},
            request_number=load.request_number,
            origins=load.origins,
        )
        for group, part in zip(paths, scheduled.jobs, strict=True):
            group_slots[group] = part.slots.of
            load.chunks_leased[group] += part.num_chunks
            ticket.cache_jobs.append((part.job, part.slots.of))
        if ticket.cache_jobs:
            load.parts.append(ticket)
        else:
            self._context.reports.end_load(ticket.number)
        return SlotsSpec(ticket.number, tuple(group_slots), self._validity.epoch, chunks_before)


def _by_group(chunks: Sequence[tuple[int, Key]]) -> dict[int, list[Key]]:
    paths: dict[int, list[Key]] = {}
    for group, key in chunks:
        paths.setdefault(group, []).append(key)
    return paths


def _lease(cache: TieredCache, load: RequestLoad, chunks: Sequence[tuple[int, Key]]) -> Lease | None:
    """A lease on `chunks`; `None` if no tier has any of them."""
    asked = {group: GroupKeys(keys) for group, keys in _by_group(chunks).items()}
    return cache.lookup(asked, 0.0, independent=True, request=load.name, request_number=load.request_number).lease


def _release(cache: TieredCache, load: RequestLoad) -> None:
    for lease in (load.lease, load.prefetch_lease):
        if lease is not None:
            cache.release(lease)
    load.lease = load.prefetch_lease = None


def _ready(cache: TieredCache, paths: Paths) -> tuple[dict[int, Residency], list[tuple[int, Key]]]:
    """The leading chunks of `paths`, group after group, that are in host memory; and the others."""
    ready, rest = dict[int, Residency](), list[tuple[int, Key]]()
    for group, keys in paths.items():
        seen = keys if isinstance(keys, Residency) else residency(cache, keys)
        lead = takewhile(lambda presence: presence is Presence.HOST, () if rest else seen.presences)
        count = len(list(lead))
        if count:
            ready[group] = seen.part(0, count)
        rest += [(group, key) for key in seen.keys[count:]]
    return ready, rest


_TIER = {Presence.HOST: HOST, Presence.IN_FLIGHT: HOST, Presence.COLDER: FILE, Presence.ABSENT: ""}


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
    """Ask the gate up to which token of a prompt, computed up to the chunk `first`, loading beats recomputing.

    vLLM looks chunks up one by one, and loads the longest prefix of hits, so chunks behind this token are not
    reported. Chunks of the group that vLLM asks for first stand for those of all groups. Infinity without a `gate`.

    Args:
        ends: vLLM's keys of the chunks, in order, each with the prompt tokens up to its end.
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


_PROBE_AGAIN, _PROBE_AGAIN_SHARE = 0.01, 0.05
"""A peer that computes chunks is probed again after so many seconds, or this share of the time waited, if longer."""


class RemoteFetches:
    """Probes remote stores for chunks of requests, and fetches them, for one manager."""

    def __init__(self, runtime: Runtime, groups: ChunkGroups, peers: PeerTier | None = None) -> None:
        self._runtime = runtime
        self._groups = groups
        self._peers = peers
        self.peer_waits: Counter[str] = Counter()
        """How waiting for blocks that a peer computes has ended: `arrived`, `gone`, `late`."""

    def look_up(
        self,
        request: RequestState,
        ends: Mapping[OffloadKey, int],
        found: Sequence[Presence],
        first: OffloadKey,
        *,
        timed_out: bool = False,
    ) -> Sequence[Presence]:
        """`found`, in which chunks that a remote store is probed for, or that are fetched, are `IN_FLIGHT`.

        Nothing is probed for a request that has `timed_out`.

        Args:
            request: Whose chunks they are.
            ends: As in `load_limit`, of all chunks that vLLM has named.
            found: Where each of them is.
            first: The chunk that vLLM looks up.
        """
        if timed_out and request.next_probe and not request.fetches_end:
            request.fetches_end = True
            self.peer_waits["late"] += 1
        if timed_out or request.fetches_end or REMOTE not in request.hints.load:
            return found
        absent = [key for key, presence in zip(ends, found, strict=True) if presence is Presence.ABSENT]
        now = self._runtime.clock()
        if request.probes is None and now < request.next_probe:
            return _with_in_flight(found, ends, set(absent))
        with self._runtime.batch() as cache:
            asked = {0: GroupKeys(request.cache_keys(absent))}
            asks = self._stores_to_probe(ends, absent, first) if request.probes is None else []
            if request.source is None:  # only requests that name a peer probe it
                asks = [name for name in asks if name != PEERS]
            elif self._peers is not None and asks:
                self._peers.route(asked[0].keys, request.source)
            known = cache.lookup(asked, now, protect=Protection.NONE, independent=True, remote_tiers=asks)
            if request.probes is None:
                request.probes = known.probes
            if not all(cache.progress(probe).is_over for probe in request.probes):
                return _with_in_flight(found, ends, set(absent))
            if self._peers is not None and request.source is not None and self._peers.are_coming(asked[0].keys):
                request.probes = None
                request.next_probe = now + max(
                    _PROBE_AGAIN, _PROBE_AGAIN_SHARE * (now - (request.waiting_since or now))
                )
                return _with_in_flight(found, ends, set(absent))
            request.fetches_end = True
            names = dict(zip(absent, known.remote_sources.get(0, [""] * len(absent)), strict=True))
            if request.source is None:  # from a peer that another request has named
                names = {key: "" if name == PEERS else name for key, name in names.items()}
            if request.next_probe:
                self.peer_waits["arrived" if PEERS in names.values() else "gone"] += 1
            if not any(names.values()):
                return found
            tiers = [names.get(key) or tier for key, tier in zip(ends, tiers_of(found), strict=True)]
            sent = Counter(names[key] for key in absent if names[key] and key[-GROUP_BYTES:] == first[-GROUP_BYTES:])
            timeout = fetch_timeout(self._runtime, cache, [Run(*each) for each in sent.items()], now)
            request.load_limit = load_limit(self._runtime.gate, ends, tiers, first, now)
            coming = self._fetch(cache, request, ends, {key for key in absent if names[key]}, now, timeout)
        request.origins.update((key, names[key]) for key in coming)
        return _with_in_flight(found, ends, coming)

    def _stores_to_probe(
        self, ends: Mapping[OffloadKey, int], absent: Sequence[OffloadKey], first: OffloadKey
    ) -> list[str]:
        """The remote stores to probe; chunks of the group that vLLM looks up first stand for those of all groups."""
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
        timeout: float | None,
    ) -> set[OffloadKey]:
        """Fetch the chunks that stores have, up to the load limit; returns those that are in flight now."""
        keys = list(ends)
        has = _keys_in_tiers(cache, request, keys)
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
                cache.prefetch({group: GroupKeys(request.cache_keys(wanted))}, now, timeout=timeout)
        return _keys_in_tiers(cache, request, [key for key in keys if key in there])


def _keys_in_tiers(cache: TieredCache, request: RequestState, keys: Sequence[OffloadKey]) -> set[OffloadKey]:
    """Those of `keys` that a tier has, or that are in flight to one."""
    presences = residency(cache, request.cache_keys(keys)).presences
    return {key for key, each in zip(keys, presences, strict=True) if each is not Presence.ABSENT}


def _with_in_flight(
    found: Sequence[Presence], ends: Mapping[OffloadKey, int], keys: set[OffloadKey]
) -> Sequence[Presence]:
    return [Presence.IN_FLIGHT if key in keys else presence for key, presence in zip(ends, found, strict=True)]
