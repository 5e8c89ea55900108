"""Loads: slots that are leased to the workers; in parts, if a load has more chunks than host memory has room for.

    prepare_load ──► first part: what is in host memory ──► workers ──► reports of all ranks ──► slots are given back
                                                               ▲                                      │
                           lent in a later step's metadata ────┴── read from colder tiers ◄───────────┘

The request waits, and vLLM continues with its steps, until the workers report the load: after its last part, or after
one has failed. A load whose next chunks are lost, or do not arrive in time, is ended, and its request is recomputed.
Each part gets its slots at once and gives them back without needing others, so loads do not wait for each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from longshore.boundary import Key
from longshore.cache import GroupKeys, Lease, PrefetchPolicy, Presence, Residency, TieredCache
from longshore.engines.vllm.changes import BlockValidity
from longshore.engines.vllm.requests import JobContext, Ticket, residency
from longshore.engines.vllm.stores import NO_SLOTS
from longshore.engines.vllm.worker import JobPart, SlotsSpec

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
    """The loads of one engine, one of each request at most. Whoever calls has the control of the cache."""

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
        load.number = spec.job
        if load.rest:
            load.lease = _lease(cache, load, load.rest)
        self._loads[name] = load
        left = tuple(sum(group == each for each, _ in load.rest) for group in range(self._groups))
        return SlotsSpec(spec.job, spec.runs, spec.epoch, *((spec.begins, left) if load.rest else ()))

    def proceed(self, cache: TieredCache) -> None:
        """End parts that all ranks have read, which gives their slots back, and lend the next ones.

        What loads have in host memory beyond their first part is at most half of its slots, or one chunk of each.
        """
        slots = self._jobs.slots
        streams = [load for load in self._loads.values() if load.rest]
        for load in streams:
            for ticket in [each for each in load.parts if self._reports.has_loaded(each.number)]:
                load.failed |= self._reports.has_failed(ticket.number)
                load.parts.remove(ticket)
                self._jobs.end(ticket, cache)
            ahead, is_late = load.rest[:slots], load.fetch is not None and cache.progress(load.fetch).is_over
            ready, rest = _ready(cache, _by_group(ahead))
            if load.failed or (is_late and not ready):
                self.stop(cache, load.name)
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

    def stop(self, cache: TieredCache, name: str) -> None:
        """No more is lent for `name`: the workers report the load as failed when they have read what they were lent."""
        load = self._loads.get(name)
        if load is not None and load.rest:
            load.failed, load.rest = True, []
            self._new_parts.append(JobPart(load.number, None))
            _release(cache, load)

    def end(self, cache: TieredCache, name: str) -> tuple[list[Ticket], bool]:
        """The workers have reported the load for `name`, or will in vain. Its open parts, and whether it has failed."""
        self.stop(cache, name)
        load = self._loads.pop(name)
        return load.parts, load.failed or any(self._reports.has_failed(ticket.number) for ticket in load.parts)

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
            self.stop(cache, load.name)
        else:
            now, patience = self._jobs.clock(), self._jobs.patience
            cache.prefetch(load.fetch, now, policy=PrefetchPolicy.TIMEOUT, timeout=patience)

    def _lend(self, cache: TieredCache, load: StreamedLoad, paths: Paths) -> SlotsSpec:
        """Lease the slots of the next chunks, which are in host memory, to the workers."""
        ticket, runs, begins = self._jobs.ticket(), [NO_SLOTS] * self._groups, tuple(load.lent)
        order = cache.load(
            {group: GroupKeys(keys) for group, keys in paths.items()}, tick=load.tick, origins=load.origins
        )
        for group, part in zip(paths, order.parts, strict=True):
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
    return cache.lookup(asked, 0.0, each=True, request=load.name, tick=load.tick).lease


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
