"""`LongshoreManager`: the scheduler's side. It answers vLLM key by key, from one `TieredCache`.

    lookup ... lookup      asked once for the whole request; what only a colder tier has is brought up meanwhile
    prepare_load           slots lent to the workers ────────────► complete_load gives them back (`Loads`)
    prepare_store          slots offered to the workers ─────────► complete_store: published as reported (`StoreJobs`)
    on_schedule_end        protections end, chunks are ordered up, tickets from before a reset are looked after

A lookup never blocks. `HIT` means verified bytes in the host tier; what is on its way is `HIT_PENDING` until
`Config.load_timeout` is over, then `MISS`. Where failed loads are recomputed, `HIT` is also said of chunks in colder
tiers of a request that needs more than host memory has room for: these are read during the load.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    OffloadPolicy,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from longshore.boundary import DEVICE, FILE, HOST, Key, Route, Slots
from longshore.cache import GroupKeys, MissReason, PrefetchPolicy, Presence, Protection, Residency, TieredCache
from longshore.engines.vllm.connector import Backoff
from longshore.engines.vllm.load_jobs import Loads, RemoteFetches, load_limit, tiers_of
from longshore.engines.vllm.metrics import EventTranslator, OffloadingMetrics, peer_samples
from longshore.engines.vllm.requests import (
    GROUP_BYTES,
    ChunkGroups,
    JobContext,
    RequestState,
    Ticket,
    hints_of,
    known_keys,
    residency,
    source_of,
)
from longshore.engines.vllm.store_jobs import NO_SLOTS, StoreJobs
from longshore.engines.vllm.tiers import SchedulerTiers
from longshore.engines.vllm.weight_changes import BlockValidity
from longshore.engines.vllm.worker import JobPart, SlotsSpec
from longshore.errors import log_seldom
from longshore.hints import RequestHints
from longshore.monitoring.metric_names import LOOKUP_SECONDS
from longshore.runtime.containment import contained
from longshore.runtime.control import ControlServer

if TYPE_CHECKING:
    from longshore.runtime.peer_server import PeerServer

_log = logging.getLogger(__name__)
HIT, MISS, PENDING = LookupResult.HIT, LookupResult.MISS, LookupResult.HIT_PENDING
_THERE = (Presence.READY, Presence.COLDER)
LOAD = Route(HOST, DEVICE)
_HIT_SOURCES = {HOST: CacheHitSource.HOST, FILE: CacheHitSource.DISK}
WHOLE_PATHS = RequestOffloadingContext(policy=OffloadPolicy.REQUEST_LEVEL)
"""vLLM offers each request from its first chunk on, what it has loaded or found on the device included."""


class LongshoreManager(OffloadingManager):  # type: ignore[misc]
    """vLLM's offloading manager over the tiers of one engine."""

    def __init__(
        self,
        tiers: SchedulerTiers,
        groups: Sequence[int],
        timeout: float,
        *,
        announces: bool = False,
        hints: RequestHints = RequestHints(),  # noqa: B008 - it is frozen
    ) -> None:
        """`groups` are vLLM's numbers of the KV cache groups, in our order; `timeout` is in seconds.

        `announces`: KV events tell of the tiers, which must record them. `hints`: of requests that have none.
        """
        self._hints = hints
        self._tiers = tiers
        self._runtime = tiers.runtime
        self._requests: dict[str, RequestState] = {}
        self._asked: list[RequestState] = []
        self._stale: list[tuple[Ticket, bool]] = []
        """Tickets of which vLLM reports no end (workers' reports end them), and whether they are stores."""
        self._fenced: set[int] = set()
        """The numbers of those that were open at vLLM's last reset."""
        self.observes_device_resets = False
        """Whether the connector calls `device_was_reset` each time vLLM's prefix cache is emptied."""
        self._validity = BlockValidity(tiers.reports, base_is_mixed=tiers.base_is_mixed)
        self.may_stream = False
        """Whether loads may have parts: the connector passes them to workers, and failed loads are recomputed."""
        self._backoff = Backoff()
        self._closed = False
        self.ctl_server: ControlServer | None = None
        self.peer_server: PeerServer | None = None
        """If there is one, it asks `is_coming`."""
        self._computes: dict[Key, str] = {}
        """The request that computes a chunk which no tier has, and will offer it; kept for peers alone."""
        self._events = EventTranslator() if announces else None
        with self._runtime.locked() as cache:
            histograms = [*cache.counters.each_histogram(), (LOOKUP_SECONDS, (), self._runtime.lookup_counters.seconds)]
            self._metrics = OffloadingMetrics(tiers.file, tiers.stores, histograms=histograms, is_off=tiers.is_off)
            host = cache.stats()[0]
            self._groups = ChunkGroups(
                {number.to_bytes(GROUP_BYTES, "big"): index for index, number in enumerate(groups)},
                [cache.settings.group(index)[1] for index in range(len(groups))],
                tiers.windows,
            )
        images = [size.image_bytes for size in host.sizes]
        epoch, clock = lambda: self._validity.epoch, self._runtime.clock
        self._jobs = JobContext(self._groups, tiers.reports, epoch, clock, timeout, host.slots, images)
        self._fetches = RemoteFetches(self._runtime, self._groups, tiers.peers) if tiers.stores else None
        self._loads = Loads(self._jobs, self._validity)
        self._stores = StoreJobs(self._jobs, self._validity, self._events, tiers.write_timeout)

    # ------------------------------------------------------------------ loading

    @contained(lambda self, req_context: WHOLE_PATHS)
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """A request has arrived. From now on the device may have blocks of it."""
        self._look_for_new_weights()  # the device had no block of this request before they changed
        self._validity.used()
        request = self._begin(req_context)
        request.hints, request.source = hints_of(req_context, self._hints), source_of(req_context, self._tiers.peers)
        return WHOLE_PATHS

    @contained(lambda self, key, req_context: MISS)
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Where a chunk is. The first call in a step answers for all chunks of the request."""
        try:
            request = self._requests[req_context.req_id]
            answer = request.answers[key]
        except KeyError:
            request = self._begin(req_context)
            answer = self._ask(request, key, req_context)
        if request.colder and answer is not MISS:
            request.wanted[key] = None
        return answer

    def pass_parts(self, *, loads: bool) -> None:
        """The connector passes parts of jobs to workers. Loads have parts only if failed `loads` are recomputed."""
        self._stores.may_stream, self.may_stream = True, loads

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        """The tier that a chunk came from."""
        request = self._requests.get(req_context.req_id)
        origin = HOST if request is None else request.origins.get(key, HOST)
        return _HIT_SOURCES.get(origin, CacheHitSource.EXTERNAL_UNSPECIFIED)

    @contained(lambda self, keys, req_context: self._in_place(keys, req_context))
    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> SlotsSpec:
        """Lend the slots of these chunks to the workers; if the request streams, as far as they are in host memory."""
        name = req_context.req_id
        request = self._requests.get(name) or self._begin(req_context)
        paths = {group: request.seen(mine) for group, mine in self._groups.split(keys)}
        origins = dict(zip(request.ours(request.origins), request.origins.values(), strict=True))
        with self._runtime.transaction() as cache:
            spec = self._loads.begin(cache, name, request.tick, paths, origins, streams=request.streams)
            self._release(request, cache)
        request.waiting_since = None
        return spec

    @contained(lambda self, keys, req_context: None)
    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """The workers have read the slots of a load."""
        name = req_context.req_id
        request = self._requests.get(name)
        if request is not None and name in self._loads:
            with self._runtime.transaction() as cache:
                parts, failed = self._loads.end(cache, name)
                request.load_failed |= failed
                results = [result for ticket in parts for result in self._jobs.end(ticket, cache)]
                if not request.streams:  # the seconds of a part include those between two steps
                    self._runtime.observe_loads(LOAD, results)
            self._forget_if_done(name, request)

    @contained(lambda self: self._loads.abandon() + self._stores.abandon())
    def take_parts(self) -> list[JobPart]:
        """Parts of loads and stores that are sent to the workers in this step."""
        return self._loads.take() + self._stores.take()

    @contained(lambda self, context, tokens, seconds: None)
    def observe_prefill(self, context: int, tokens: int, seconds: float) -> None:
        """Report to the gate that a step computed `tokens` prompt tokens after `context` in `seconds`."""
        self._runtime.observe_prefill(context, tokens, seconds)

    # ------------------------------------------------------------------ storing

    @contained(lambda self, keys, req_context: PrepareStoreOutput([], self._nothing(), []))
    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Offer slots for what no tier has, heads first. With `None` vLLM offers the same again.

        An answer that takes a part, or nothing, is final. If the workers take parts, all is accepted for which there is
        room, or room is being made. Else the answer is `None` as long as room is being made, for a head that more is to
        come behind, and behind what the tiers have of the request.
        """
        self._look_for_new_weights()
        self._validity.used()
        request = self._begin(req_context)
        takes = request.hints.store and self._validity.may_store(request, keys, self._stores)
        with self._runtime.transaction() as cache:
            taken = self._stores.offer(cache, request, keys, req_context, takes=takes)
            if self._computes and taken is not None:  # it is on its way now, or not stored at all
                self._no_longer_computes(request.ours(keys))
        return None if taken is None else PrepareStoreOutput(*taken, [])

    @contained(lambda self, keys, req_context, success=True: None)
    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        """All ranks report these chunks as done: publish the chunks that all of them have copied."""
        self._look_for_new_weights()
        with self._runtime.transaction() as cache:
            left = self._stores.report(cache, keys)
        self._stale += [(ticket, True) for ticket in left]

    # ------------------------------------------------------------------ between steps

    @contained(lambda self, name: None)
    def will_finish(self, name: str) -> None:
        """The next offer of the request `name` is its last one; called by `LongshoreConnector`."""
        if name in self._requests:
            self._requests[name].is_finishing = True

    @contained(lambda self, req_context: None)
    def on_request_finished(self, req_context: ReqContext) -> None:
        """Release the leases of a finished request; slots that workers still read stay reserved."""
        request = self._requests.get(req_context.req_id)
        if request is not None:
            with self._runtime.transaction() as cache:
                self._release(request, cache)
                self._loads.stop(cache, request.name)
                self._no_longer_computes(key for key in request.computes if self._computes.get(key) == request.name)
            request.finished = True
            self._forget_if_done(req_context.req_id, request)

    @contained(lambda self, context: None)
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """A step was planned: prefetch the chunks that were asked for and are in a colder tier."""
        self._look_for_new_weights()
        self._tiers.sleeps.restore_host_memory()
        for name in self._requests.keys() & context.preempted_req_ids:
            self._requests[name].stale = -1  # its blocks are computed again
        with self._runtime.transaction() as cache:
            if any(request.wanted for request in self._asked):
                cache.end_step()  # what this step reads is lent by now: a tail may make way for the head before it
            for request in self._asked:
                self._bring_up(request, cache)
                if self.peer_server is not None and request.hints.store and not request.finished:
                    computes = request.ours(key for key, answer in request.answers.items() if answer is MISS)
                    request.computes.update(computes)
                    self._computes.update(dict.fromkeys(computes, request.name))
                request.drop_answers()
            self._asked.clear()
            cache.end_step()
            self._loads.proceed(cache)
            self._stores.proceed(cache)
            self._stale = [each for each in self._stale if not self._is_over(*each, cache)]
        self._backoff.step_planned(self._is_awaited)

    def has_pending_work(self) -> bool:
        """Whether steps are needed even without requests."""
        return self._runtime.fault is None and bool(self._stale)

    @contained(lambda self: None)
    def reset_cache(self) -> None:
        """vLLM reset its caches: clear the tiers, except those that the settings keep."""
        self._look_for_new_weights()
        workers = sum(len(ticket.jobs) for ticket in self._tickets)
        self._forget_all(keep=self._tiers.sleeps.kept())
        self._tiers.sleeps.give_back(self.peer_server, idle=not workers)
        self._stores.by_key.clear()  # no store from before is reported
        self._fenced = {ticket.number for ticket, _ in self._stale}
        for request in self._requests.values():
            request.stale = request.offered
        if not self.observes_device_resets and not self._is_serving:
            self.device_was_reset()

    @contained(lambda self: None)
    def device_was_reset(self) -> None:
        """vLLM's prefix cache was emptied: only running requests have blocks on the device, and will compute them."""
        self._look_for_new_weights()
        self._validity.device_was_reset()
        if self._events is not None:
            self._events.were_cleared = True
        if self._is_serving:
            self._validity.used()

    @contained(lambda self, name, lora: None)
    def set_adapter(self, name: str, lora: Any) -> None:
        """The request `name`, which arrives next, uses the adapter of vLLM's `LoRARequest`."""
        self._requests.setdefault(name, RequestState(name)).lora = lora

    def _look_for_new_weights(self) -> None:
        """Clear all tiers if weights have changed."""
        if self._validity.weights_changed_since():
            self._forget_all(weights=True)

    def _forget_all(self, keep: tuple[str, ...] = (), *, weights: bool = False) -> None:
        """Clear the tiers but those to `keep`. Slots in flight stay reserved until the workers have reported them."""
        with self._runtime.transaction() as cache:
            for request in self._requests.values():
                self._release(request, cache)
            self._stale += [(ticket, False) for ticket in self._loads.end_all(cache)]
            self._stale += [(ticket, True) for ticket in self._stores.void_all()]
            cache.reset(keep=keep, weights=weights)
            self._computes.clear()
        for request in self._asked:
            request.drop_answers()
        for name in [name for name, request in self._requests.items() if request.finished]:
            del self._requests[name]

    @contained(lambda self: None)
    def on_reset_flushed(self) -> None:
        """All jobs in flight at the last reset were reported: no worker uses their slots any more (vLLM 0.33)."""
        with self._runtime.transaction() as cache:
            for ticket, _ in self._stale:
                if ticket.number in self._fenced:
                    self._jobs.end(ticket, cache)
        self._stale = [each for each in self._stale if each[0].number not in self._fenced]

    # ------------------------------------------------------------------ watching

    def get_stats(self) -> OffloadingConnectorStats | None:
        """The increments of the counters since the last call; all counters at the first call."""
        with self._runtime.locked() as cache:
            try:
                gate = self._runtime.gate
                refused = 0 if gate is None else gate.refused
                peers = peer_samples(self.peer_server, None if self._fetches is None else self._fetches.peer_waits)
                return self._metrics.stats(cache, refused, self._validity.weight_changes, self._runtime.faults, peers)
            except Exception:  # noqa: BLE001 - what is wrong with the metrics is no reason to serve nothing
                log_seldom(_log, "metrics could not be reported to vLLM, which shows the last ones; report this")
                cache.counters.internal_errors += 1
                return None

    @property
    def loaded_tokens(self) -> Mapping[str, int]:
        """Tokens of the first KV cache group that were loaded so far, by the tier they came from."""
        with self._runtime.locked() as cache:
            return dict(cache.counters.hit_tokens)

    @contained(lambda self: list[OffloadingEvent]())
    def take_events(self) -> list[OffloadingEvent]:
        """KV events since the last call: chunks that tiers stored and removed; none unless vLLM publishes events."""
        if self._events is None:
            return []
        with self._runtime.locked() as cache:
            return list(self._events.translate(cache))

    def is_coming(self, key: Key) -> bool:
        """Whether a request computes a chunk, or it waits to be stored. In a transaction of the runtime."""
        return key in self._computes or key in self._stores.coming

    def flush(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds until all stored chunks are in every tier; returns whether they are."""
        return self._runtime.flush(timeout)

    def shutdown(self) -> None:
        """Write back chunks that a restart would lose, then release all resources. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for close in [server.close for server in (self.ctl_server, self.peer_server) if server is not None]:
            close()
        self._withdraw(self._tickets)
        self._tiers.close()

    # ------------------------------------------------------------------ inside

    @contained(lambda self, tickets: None)
    def _withdraw(self, tickets: Sequence[Ticket]) -> None:
        """End all loads, and release the jobs of `tickets`: vLLM reports nothing any more."""
        with self._runtime.transaction() as cache:
            self._loads.end_all(cache)
            for job, _ in (each for ticket in tickets for each in ticket.jobs):
                cache.release(job)

    def _nothing(self) -> SlotsSpec:
        """An answer without slots, of which a load fails."""
        return self._slots_spec([NO_SLOTS] * len(self._groups))

    def _in_place(self, keys: Collection[OffloadKey], context: ReqContext) -> SlotsSpec:
        """Slots of chunks found before the control plane failed, if all are in place; else `_nothing`."""
        request, runs = self._begin(context), [NO_SLOTS] * len(self._groups)
        try:
            with self._runtime.locked() as cache:
                for group, mine in self._groups.split(keys):
                    seen = request.seen(mine)
                    if not isinstance(seen, Residency) or (slots := seen.slots()) is None:
                        return self._nothing()
                    runs[group] = Slots(HOST, cache.settings.pool_of(group), tuple(slots))
                return self._slots_spec(runs)
        except Exception:  # noqa: BLE001 - of state that failed an integrity check
            log_seldom(_log, "chunks found before all tiers were disabled cannot be read; they are recomputed")
        return self._nothing()

    def _ask(self, request: RequestState, key: OffloadKey, context: ReqContext) -> LookupResult:
        """Look up all chunks of the request that vLLM named; returns the answer for `key`."""
        positions = known_keys(context)
        asked = positions if key in positions else {key: 0}
        if not self._asked:  # the first in this step: what follows from answers is not taken back
            self._look_for_new_weights()
            self._tiers.sleeps.restore_host_memory()
        self._validity.used()
        barred = request.load_failed or not self._validity.knows(request) or not request.hints.load
        barred |= self._tiers.reports.is_asleep() or not self._tiers.sleeps.has_memory
        request.asked_keys, request.streams = list(asked), False
        now = self._runtime.clock()
        with self._runtime.transaction() as cache:
            late = (waited := now - (request.waiting_since or now)) > self._jobs.timeout
            brought = bool(request.leases) and all(cache.progress(lease).is_over for lease in request.leases)
            asks = {0: GroupKeys(request.ours(() if barred else request.asked_keys))}
            with self._runtime.lookup_counters.seconds.timed():
                seen = cache.lookup(
                    asks,
                    now,
                    protect=Protection.STEP,
                    independent=True,
                    tick=request.tick,
                    reuse_hint=request.hints.reuse_hint,
                )
            request.residency, request.tick = seen.residency[0], seen.tick
        self._asked.append(request)
        if barred:
            request.answers = dict.fromkeys(asked, MISS)
            if not request.counted and not request.load_failed and request.hints.load:
                with self._runtime.locked() as cache:
                    cache.counters.misses[MissReason.ABSENT] += len(asked)
            request.counted = True
            return MISS
        found = request.residency.presences
        if FILE not in request.hints.load:
            found = [Presence.ABSENT if each is Presence.COLDER else each for each in found]
        if self._fetches is not None and Presence.ABSENT in found and asked is positions:
            found = self._fetches.look(request, positions, found, key, late=late)
        coming = self._coming(
            request, positions, found, key, waits=2 * waited <= self._jobs.timeout
        )  # then it is loaded
        stalled = self._tiers.file is not None and self._tiers.file.is_stalled
        if self.may_stream and Presence.COLDER in found and not late and not stalled:
            found = self._promised(request, asked, found, key)
        found = [Presence.IN_FLIGHT if at in coming else each for at, each in enumerate(found)] if coming else found
        self._count_misses(request, found, key, late=late, brought=brought, stalled=stalled)
        request.answers = dict.fromkeys(asked, HIT)
        if found.count(Presence.READY) == len(found):
            return HIT
        for each, presence in zip(request.asked_keys, found, strict=True):
            if presence is Presence.READY:
                continue
            waits = presence is Presence.IN_FLIGHT and not late and not stalled
            # What was brought up for this request, and is colder again, would be so for ever.
            again = brought and each in request.leased
            comes = presence is Presence.COLDER and not late and not again and not stalled
            if comes and positions.get(each, 0) <= (request.load_limit or 0):
                waits = True
                if not coming:  # host memory is for what is stored
                    request.colder.add(each)
            request.waits |= waits
            request.answers[each] = PENDING if waits else MISS
        return request.answers[key]

    def _coming(
        self,
        request: RequestState,
        positions: Mapping[OffloadKey, int],
        found: Sequence[Presence],
        first: OffloadKey,
        *,
        waits: bool,
    ) -> set[int]:
        """Which chunks of `request` no tier has yet, but a store that waits for room, if the request `waits` for any.

        Asks the gate first how much of it is loaded from colder tiers; the others are not waited for.
        """
        asks = waits and FILE in request.hints.load and Presence.ABSENT in found
        stored = self._stores.coming if asks else ()
        keys = request.ours(request.asked_keys) if stored else ()
        absent = [each is Presence.ABSENT and key in stored for key, each in zip(keys, found, strict=False)]
        coming = {at for at, is_coming in enumerate(absent) if is_coming}
        if request.load_limit is None and (coming or Presence.COLDER in found):
            tiers = [FILE if at in coming else tier for at, tier in enumerate(tiers_of(found))]
            request.load_limit = load_limit(self._runtime.gate, positions, tiers, first, self._runtime.clock())
        return {at for at in coming if positions.get(request.asked_keys[at], 0) <= (request.load_limit or 0)}

    def _promised(
        self, request: RequestState, positions: Mapping[OffloadKey, int], found: Sequence[Presence], first: OffloadKey
    ) -> Sequence[Presence]:
        """What to say of chunks that were found so, the first of which is asked for.

        If all that is there does not fit host memory, `request` streams: what is colder is promised like what is ready.
        """
        there = [each in _THERE for each in found[request.asked_keys.index(first) :]]
        if sum(there) <= self._jobs.slots:
            return found
        ends, worth = list(zip(positions.items(), found, strict=True)), request.load_limit or 0
        cold = {key for (key, end), each in ends if each is Presence.COLDER and end <= worth}
        request.streams = True
        request.origins.update(dict.fromkeys(cold, FILE))
        return [Presence.READY if key in cold else each for (key, _), each in ends]

    def _count_misses(
        self,
        request: RequestState,
        found: Sequence[Presence],
        first: OffloadKey,
        *,
        late: bool,
        brought: bool,
        stalled: bool,
    ) -> None:
        """Count the misses of `request`, which asks for chunks from `first` on; once."""
        if request.counted or self._groups.of(first):
            return
        group, begin = first[-GROUP_BYTES:], request.asked_keys.index(first)
        asked = zip(request.asked_keys[begin:], found[begin:], strict=True)
        mine = [each for each in asked if each[0][-GROUP_BYTES:] == group]
        reasons = self._metrics.reasons([each[1] for each in mine], late=late, brought=brought, stalled=stalled)
        if reasons is None:
            return
        # The cache has counted those that a store did not send, by what went wrong.
        sent = [key for key, presence in mine if presence is Presence.ABSENT and key in request.origins]
        reasons[MissReason.ABSENT] -= sum(request.origins[key] != FILE for key in sent)
        request.counted = True
        with self._runtime.locked() as cache:
            cache.counters.misses.update(reasons)

    def _bring_up(self, request: RequestState, cache: TieredCache) -> None:
        """Prefetch the chunks that `request` waits for, and lease those that are ready; heads first if not all fit."""
        if request.waits and request.waiting_since is None:
            request.waiting_since = self._runtime.clock()
        wanted = [key for key in request.wanted if key not in request.leased]
        if request.colder.isdisjoint(wanted):
            return
        now = self._runtime.clock()
        where = residency(cache, request.ours(wanted)).presences
        found = list(zip(wanted, where, strict=True))
        if len(request.wanted) > self._jobs.slots:  # what is on its way gets its slot before those behind it
            found = list(takewhile(lambda each: each[1] in _THERE, found))
        # What was read for another request meanwhile, and was corrupt, is not there any more.
        there = [key for key, presence in found if presence in _THERE]
        for group, mine in self._groups.split(there):
            chunks = {group: GroupKeys(request.ours(mine))}
            lease = cache.lookup(chunks, now, independent=True, request=request.name, tick=request.tick).lease
            if lease is not None:
                cache.prefetch(lease, now, policy=PrefetchPolicy.TIMEOUT, timeout=self._jobs.timeout)
                request.leases.append(lease)
        request.leased.update(there)
        request.origins.update(dict.fromkeys(request.colder.intersection(there), FILE))

    def _release(self, request: RequestState, cache: TieredCache) -> None:
        for lease in request.leases:
            cache.release(lease)
        request.leases.clear()
        request.leased.clear()

    def _no_longer_computes(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self._computes.pop(key, None)

    def _forget_if_done(self, name: str, request: RequestState) -> None:
        if request.finished and name not in self._loads:
            self._requests.pop(name, None)

    @property
    def _tickets(self) -> list[Ticket]:
        """All tickets whose slots workers may still use."""
        return [*self._stores.tickets, *self._loads.tickets, *(ticket for ticket, _ in self._stale)]

    @property
    def _is_serving(self) -> bool:
        return any(not request.finished for request in self._requests.values())

    def _is_over(self, ticket: Ticket, is_store: bool, cache: TieredCache) -> bool:
        """End a ticket from before a reset if no worker uses its slots any more; returns whether it did."""
        if is_store:
            return self._stores.end(ticket, cache) is not None
        over = self._tiers.reports.load_has_ended(ticket.number)
        if over:
            self._jobs.end(ticket, cache)
        return over

    def _is_awaited(self) -> bool:
        """Whether copies are in flight that a request or a later step waits for."""
        waiting = (request.leases for request in self._requests.values())
        return bool(self._stores or self._stale or self._loads) or any(waiting)

    def _slots_spec(self, runs: Sequence[Slots]) -> SlotsSpec:
        return SlotsSpec(self._jobs.ticket().number, tuple(runs), self._validity.epoch)

    def _begin(self, context: ReqContext) -> RequestState:
        return self._requests.setdefault(context.req_id, RequestState(context.req_id))
