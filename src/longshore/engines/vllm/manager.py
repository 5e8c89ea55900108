"""`LongshoreManager`, vLLM's `OffloadingManager`: it runs in the scheduler, and answers from one `TieredCache`.

    lookup ... lookup      one lookup in the cache for all chunks of the request; those in colder tiers are prefetched
    prepare_load           slots leased to the workers ──────────► complete_load releases them (`LoadJobs`)
    prepare_store          slots offered to the workers ─────────► complete_store: published as reported (`StoreJobs`)
    on_schedule_end        end of the step: prefetches begin, parts and tickets that workers have reported are ended

A lookup never blocks. `HIT` means verified bytes in host memory. Chunks in flight are `HIT_PENDING` until
`Config.load_timeout` is over, then `MISS`. Where failed loads are recomputed, chunks in colder tiers are `HIT` as well
if the request needs more slots than host memory has: they are read during the load.
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

from longshore.boundary import DEVICE, FILE, HOST, Key, Route, Slots, Status
from longshore.cache import GroupKeys, MissReason, PrefetchPolicy, Presence, Protection, Residency, TieredCache
from longshore.engines.vllm.connector import GilYield
from longshore.engines.vllm.load_jobs import LoadJobs, RemoteFetches, load_limit, tiers_of
from longshore.engines.vllm.metrics import EventTranslator, OffloadingMetrics, peer_samples
from longshore.engines.vllm.requests import (
    GROUP_BYTES,
    ChunkGroups,
    JobContext,
    RequestState,
    Ticket,
    end_tokens,
    hints_of,
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
from longshore.runtime.control import ControlServer
from longshore.runtime.error_handler import with_fallback

if TYPE_CHECKING:
    from longshore.runtime.peer_server import PeerServer

_log = logging.getLogger(__name__)
HIT, MISS, PENDING = LookupResult.HIT, LookupResult.MISS, LookupResult.HIT_PENDING
STEP = Protection.STEP
_IN_A_TIER = (Presence.HOST, Presence.COLDER)
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
        publishes_events: bool = False,
        hints: RequestHints = RequestHints(),  # noqa: B008 - it is frozen
    ) -> None:
        """`groups` are vLLM's numbers of the KV cache groups, in our order; `timeout`: seconds, as `load_timeout`.

        `publishes_events`: vLLM publishes KV events, which the tiers must record. `hints`: of requests without any.
        """
        self._hints = hints
        self._tiers = tiers
        self._runtime = tiers.runtime
        self._requests: dict[str, RequestState] = {}
        self._requests_of_step: list[RequestState] = []
        self._unreported: list[tuple[Ticket, bool]] = []
        """Tickets whose end vLLM does not report, and whether they are stores; the reports of the ranks end them."""
        self._open_at_reset: set[int] = set()
        """The numbers of those that were open at vLLM's last reset."""
        self.observes_device_resets = False
        """Whether the connector calls `device_was_reset` each time vLLM's prefix cache is emptied."""
        self._validity = BlockValidity(tiers.reports, base_is_mixed=tiers.base_is_mixed)
        self.load_parts_allowed = False
        """Whether loads may have parts: the connector passes them to workers, and failed loads are recomputed."""
        self._gil_yield = GilYield()
        self._closed = False
        self.ctl_server: ControlServer | None = None
        self.peer_server: PeerServer | None = None
        """Serves peers, if there are any; it calls `is_coming`."""
        self._computed_by: dict[Key, str] = {}
        """By cache key, the request that computes a chunk which no tier has; kept only if peers are served."""
        self._events = EventTranslator() if publishes_events else None
        with self._runtime.locked() as cache:
            histograms = [*cache.counters.each_histogram(), (LOOKUP_SECONDS, (), self._runtime.lookup_counters.seconds)]
            self._metrics = OffloadingMetrics(
                tiers.file, tiers.remote_stores, histograms=histograms, is_off=tiers.is_off
            )
            host = cache.stats()[0]
            self._groups = ChunkGroups(
                {number.to_bytes(GROUP_BYTES, "big"): index for index, number in enumerate(groups)},
                [cache.settings.group(index)[1] for index in range(len(groups))],
                tiers.windows,
            )
        images = [size.image_bytes for size in host.sizes]
        epoch, clock = lambda: self._validity.epoch, self._runtime.clock
        self._job_context = JobContext(self._groups, tiers.reports, epoch, clock, timeout, host.slots, images)
        self._fetches = RemoteFetches(self._runtime, self._groups, tiers.peers) if tiers.remote_stores else None
        self._load_jobs = LoadJobs(self._job_context, self._validity)
        self._store_jobs = StoreJobs(self._job_context, self._validity, self._events, tiers.write_timeout)

    # ------------------------------------------------------------------ loading

    @with_fallback(lambda self, req_context: WHOLE_PATHS)
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """A request has arrived. From now on the device may have blocks of it."""
        self._check_weights()  # the device had no block of this request before they changed
        self._validity.device_used()
        request = self._request_state(req_context)
        request.hints, request.source = hints_of(req_context, self._hints), source_of(req_context, self._tiers.peers)
        return WHOLE_PATHS

    @with_fallback(lambda self, key, req_context: MISS)
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Where a chunk is. The first call in a step answers for all chunks of the request."""
        try:
            request = self._requests[req_context.req_id]
            answer = request.answers[key]
        except KeyError:
            request = self._request_state(req_context)
            answer = self._look_up(request, key, req_context)
        if request.colder and answer is not MISS:
            request.wanted[key] = None
        return answer

    def allow_parts(self, *, loads: bool) -> None:
        """The connector passes parts of jobs to workers. Loads have parts only if failed `loads` are recomputed."""
        self._store_jobs.parts_allowed, self.load_parts_allowed = True, loads

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        """The tier that a chunk came from."""
        request = self._requests.get(req_context.req_id)
        origin = HOST if request is None else request.origins.get(key, HOST)
        return _HIT_SOURCES.get(origin, CacheHitSource.EXTERNAL_UNSPECIFIED)

    @with_fallback(lambda self, keys, req_context: self._slots_after_fault(keys, req_context))
    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> SlotsSpec:
        """Lease the slots of these chunks to the workers; of a load in parts, of those in host memory."""
        name = req_context.req_id
        request = self._requests.get(name) or self._request_state(req_context)
        paths = {group: request.looked_up(mine) for group, mine in self._groups.split(keys)}
        origins = dict(zip(request.cache_keys(request.origins), request.origins.values(), strict=True))
        with self._runtime.batch() as cache:
            spec = self._load_jobs.begin(cache, name, request.number, paths, origins, in_parts=request.loads_in_parts)
            request.release(cache)
        request.waiting_since = None
        return spec

    @with_fallback(lambda self, keys, req_context: None)
    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """The workers have read the slots of a load."""
        name = req_context.req_id
        request = self._requests.get(name)
        if request is not None and name in self._load_jobs:
            with self._runtime.batch() as cache:
                parts, failed = self._load_jobs.end(cache, name)
                request.load_failed |= failed
                results = [result for ticket in parts for result in self._job_context.end(ticket, cache)]
                if not request.loads_in_parts:  # the seconds of a part include those between two steps
                    self._runtime.observe_loads(LOAD, results)
            self._drop_if_finished(name, request)

    @with_fallback(lambda self: self._load_jobs.abandon() + self._store_jobs.abandon())
    def take_parts(self) -> list[JobPart]:
        """Parts of loads and stores that are sent to the workers in this step."""
        return self._load_jobs.take() + self._store_jobs.take()

    @with_fallback(lambda self, context, tokens, seconds: None)
    def observe_prefill(self, context: int, tokens: int, seconds: float) -> None:
        """Report to the gate that a step computed `tokens` prompt tokens after `context` in `seconds`."""
        self._runtime.observe_prefill(context, tokens, seconds)

    # ------------------------------------------------------------------ storing

    @with_fallback(lambda self, keys, req_context: PrepareStoreOutput([], self._no_slots(), []))
    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Give slots to the chunks that no tier has, from the beginning of the prompt on (`StoreJobs.offer`).

        With `None` vLLM offers the same chunks again; any other answer is final, also for chunks that it leaves out.
        """
        self._check_weights()
        self._validity.device_used()
        request = self._request_state(req_context)
        accepts = request.hints.store and self._validity.may_store(request, keys, self._store_jobs)
        with self._runtime.batch() as cache:
            accepted = self._store_jobs.offer(cache, request, keys, req_context, accepts=accepts)
            if self._computed_by and accepted is not None:  # they are in flight now, or not stored at all
                self._no_longer_computes(request.cache_keys(keys))
        return None if accepted is None else PrepareStoreOutput(*accepted, [])

    @with_fallback(lambda self, keys, req_context, success=True: None)
    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        """vLLM reports these chunks as done: publish the chunks that all ranks have copied."""
        self._check_weights()
        with self._runtime.batch() as cache:
            left = self._store_jobs.report(cache, keys)
        self._unreported += [(ticket, True) for ticket in left]

    # ------------------------------------------------------------------ between steps

    @with_fallback(lambda self, name: None)
    def will_finish(self, name: str) -> None:
        """The next offer of the request `name` is its last one; called by `LongshoreConnector`."""
        if name in self._requests:
            self._requests[name].is_finishing = True

    @with_fallback(lambda self, req_context: None)
    def on_request_finished(self, req_context: ReqContext) -> None:
        """Release the leases of a finished request; slots that workers still read stay reserved."""
        request = self._requests.get(req_context.req_id)
        if request is not None:
            with self._runtime.batch() as cache:
                request.release(cache)
                self._load_jobs.stop(cache, request.name)
                self._load_jobs.making_way.discard(request.name)
                mine = [key for key in request.computed_keys if self._computed_by.get(key) == request.name]
                self._no_longer_computes(mine)
            request.finished = True
            self._drop_if_finished(req_context.req_id, request)

    @with_fallback(lambda self, context: None)
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """A step was planned: prefetch the chunks that were asked for and are in a colder tier."""
        self._check_weights()
        self._tiers.sleeps.restore_host_memory()
        for name in self._requests.keys() & context.preempted_req_ids:
            self._requests[name].offered_before_reset = -1  # its blocks are computed again
        with self._runtime.batch() as cache:
            if any(request.wanted for request in self._requests_of_step):
                cache.end_step()  # loads of this step have leases by now; other chunks may be evicted
            self._load_jobs.reclaim_slots(cache, self._requests.values())
            for request in self._requests_of_step:
                self._prefetch(request, cache)
                if self.peer_server is not None and request.hints.store and not request.finished:
                    computes = request.cache_keys(key for key, answer in request.answers.items() if answer is MISS)
                    request.computed_keys.update(computes)
                    self._computed_by.update(dict.fromkeys(computes, request.name))
                request.drop_answers()
            self._requests_of_step.clear()
            cache.end_step()
            self._load_jobs.proceed(cache)
            self._store_jobs.proceed(cache)
            self._unreported = [each for each in self._unreported if not self._end_unreported(*each, cache)]
        self._gil_yield.step_planned(self._has_copies_in_flight)

    def has_pending_work(self) -> bool:
        """Whether steps are needed even without requests."""
        return self._runtime.fault is None and bool(self._unreported)

    @with_fallback(lambda self: None)
    def reset_cache(self) -> None:
        """vLLM reset its caches: clear the tiers, except those that the settings keep."""
        self._check_weights()
        workers = sum(len(ticket.cache_jobs) for ticket in self._tickets)
        self._clear_tiers(keep=self._tiers.sleeps.kept())
        self._tiers.sleeps.give_back(self.peer_server, idle=not workers)
        self._store_jobs.by_first_key.clear()  # no store from before is reported
        self._open_at_reset = {ticket.number for ticket, _ in self._unreported}
        for request in self._requests.values():
            request.offered_before_reset = request.offered
        if not self.observes_device_resets and not self._is_serving:
            self.device_was_reset()

    @with_fallback(lambda self: None)
    def device_was_reset(self) -> None:
        """vLLM's prefix cache was emptied: only running requests have blocks on the device, and will compute them."""
        self._check_weights()
        self._validity.device_was_reset()
        if self._events is not None:
            self._events.were_cleared = True
        if self._is_serving:
            self._validity.device_used()

    @with_fallback(lambda self, name, lora: None)
    def set_adapter(self, name: str, lora: Any) -> None:
        """The request `name`, which arrives next, uses the adapter of vLLM's `LoRARequest`."""
        self._requests.setdefault(name, RequestState(name)).lora = lora

    def _check_weights(self) -> None:
        """Clear all tiers if weights have changed."""
        if self._validity.weights_have_changed():
            self._clear_tiers(weights=True)

    def _clear_tiers(self, keep: tuple[str, ...] = (), *, weights: bool = False) -> None:
        """Clear the tiers but those to `keep`. Slots in flight stay reserved until the workers have reported them."""
        with self._runtime.batch() as cache:
            for request in self._requests.values():
                request.release(cache)
            self._unreported += [(ticket, False) for ticket in self._load_jobs.end_all(cache)]
            self._unreported += [(ticket, True) for ticket in self._store_jobs.void_all()]
            cache.reset(keep=keep, weights=weights)
            self._computed_by.clear()
        for request in self._requests_of_step:
            request.drop_answers()
        for name in [name for name, request in self._requests.items() if request.finished]:
            del self._requests[name]

    @with_fallback(lambda self: None)
    def on_reset_flushed(self) -> None:
        """All jobs in flight at the last reset were reported: no worker uses their slots any more (vLLM 0.33)."""
        with self._runtime.batch() as cache:
            for ticket, is_store in self._unreported:
                if ticket.number in self._open_at_reset:
                    self._job_context.end(ticket, cache, [Status.CANCELLED] * len(ticket.slots) if is_store else ())
        self._unreported = [each for each in self._unreported if each[0].number not in self._open_at_reset]

    # ------------------------------------------------------------------ watching

    def get_stats(self) -> OffloadingConnectorStats | None:
        """The increments of the counters since the last call; all counters at the first call."""
        with self._runtime.locked() as cache:
            try:
                recomputed = 0 if (gate := self._runtime.gate) is None else gate.recomputed
                peers = peer_samples(self.peer_server, None if self._fetches is None else self._fetches.peer_waits)
                changes = self._validity.weight_changes
                return self._metrics.stats(cache, recomputed, changes, self._runtime.faults, peers)
            except Exception:  # noqa: BLE001 - what is wrong with the metrics is no reason to serve nothing
                log_seldom(_log, "metrics could not be reported to vLLM, which shows the last ones; report this")
                cache.counters.internal_errors += 1
                return None

    @property
    def loaded_tokens(self) -> Mapping[str, int]:
        """Tokens of the first KV cache group that were loaded so far, by the tier they came from."""
        with self._runtime.locked() as cache:
            return dict(cache.counters.hit_tokens)

    @with_fallback(lambda self: list[OffloadingEvent]())
    def take_events(self) -> list[OffloadingEvent]:
        """KV events since the last call: chunks that tiers stored and removed; none unless vLLM publishes events."""
        if self._events is None:
            return []
        with self._runtime.locked() as cache:
            return list(self._events.translate(cache))

    def is_coming(self, key: Key) -> bool:
        """Whether a request computes a chunk, or it waits to be stored. In a batch of the runtime."""
        return key in self._computed_by or key in self._store_jobs.keys_without_slots

    def flush(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds until what is to be copied down was; returns whether it was."""
        return self._runtime.flush(timeout)

    def shutdown(self) -> None:
        """Write back chunks that a restart would lose, then release all resources. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for close in [server.close for server in (self.ctl_server, self.peer_server) if server is not None]:
            close()
        self._release_tickets(self._tickets)
        self._tiers.close()

    # ------------------------------------------------------------------ inside

    @with_fallback(lambda self, tickets: None)
    def _release_tickets(self, tickets: Sequence[Ticket]) -> None:
        """End all loads, and release the cache jobs of `tickets`: vLLM reports nothing any more."""
        with self._runtime.batch() as cache:
            self._load_jobs.end_all(cache)
            for cache_job, _ in (each for ticket in tickets for each in ticket.cache_jobs):
                cache.release(cache_job)

    def _no_slots(self) -> SlotsSpec:
        """An answer without slots: a load with it fails."""
        return self._slots_spec([NO_SLOTS] * len(self._groups))

    def _slots_after_fault(self, keys: Collection[OffloadKey], context: ReqContext) -> SlotsSpec:
        """Slots of chunks found before the control plane failed, if all are in place; else `_no_slots`."""
        request, group_slots = self._request_state(context), [NO_SLOTS] * len(self._groups)
        try:
            with self._runtime.locked() as cache:
                for group, mine in self._groups.split(keys):
                    seen = request.looked_up(mine)
                    if not isinstance(seen, Residency) or (slots := seen.slots()) is None:
                        return self._no_slots()
                    group_slots[group] = Slots(HOST, cache.settings.size_class_of(group), tuple(slots))
                return self._slots_spec(group_slots)
        except Exception:  # noqa: BLE001 - of state that failed an integrity check
            log_seldom(_log, "chunks found before all tiers were disabled cannot be read; they are recomputed")
        return self._no_slots()

    def _look_up(self, request: RequestState, key: OffloadKey, context: ReqContext) -> LookupResult:
        """Look up all chunks of the request that vLLM named; returns the answer for `key`."""
        ends = end_tokens(context)
        asked = ends if key in ends else {key: 0}
        if not self._requests_of_step:  # the first in this step, before vLLM acts on any answer
            self._check_weights()
            self._tiers.sleeps.restore_host_memory()
        self._validity.device_used()
        must_recompute = request.load_failed or not self._validity.adapter_is_known(request) or not request.hints.load
        must_recompute |= self._tiers.reports.is_asleep() or not self._tiers.sleeps.has_memory
        request.asked_keys, request.loads_in_parts = list(asked), False
        now = self._runtime.clock()
        with self._runtime.batch() as cache:
            timed_out = (waited := now - (request.waiting_since or now)) > self._job_context.timeout
            was_prefetched = bool(request.leases) and all(cache.progress(lease).is_over for lease in request.leases)
            asks = {0: GroupKeys(request.cache_keys(() if must_recompute else request.asked_keys))}
            hint = request.hints.reuse_hint
            with self._runtime.lookup_counters.seconds.timed():
                seen = cache.lookup(
                    asks, now, protect=STEP, independent=True, request_number=request.number, reuse_hint=hint
                )
            request.residency, request.number = seen.residency[0], seen.request_number
        self._requests_of_step.append(request)
        if must_recompute:
            request.answers = dict.fromkeys(asked, MISS)
            if not request.counted and not request.load_failed and request.hints.load:
                with self._runtime.locked() as cache:
                    cache.counters.misses[MissReason.ABSENT] += len(asked)
            request.counted = True
            return MISS
        found = request.residency.presences
        if FILE not in request.hints.load:
            found = [Presence.ABSENT if each is Presence.COLDER else each for each in found]
        if self._fetches is not None and Presence.ABSENT in found and asked is ends:
            found = self._fetches.look_up(request, ends, found, key, timed_out=timed_out)
        # The other half of the timeout is for the load.
        coming = self._being_stored(request, ends, found, key, waits=2 * waited <= self._job_context.timeout)
        stalled = self._tiers.file is not None and self._tiers.file.is_stalled
        if self.load_parts_allowed and Presence.COLDER in found and not timed_out and not stalled:
            found = self._report_hits_in_parts(request, asked, found, key)
        found = [Presence.IN_FLIGHT if at in coming else each for at, each in enumerate(found)] if coming else found
        self._count_misses(request, found, key, timed_out=timed_out, was_prefetched=was_prefetched, stalled=stalled)
        request.answers = dict.fromkeys(asked, HIT)
        if found.count(Presence.HOST) == len(found):
            return HIT
        for each, presence in zip(request.asked_keys, found, strict=True):
            if presence is Presence.HOST:
                continue
            waits = presence is Presence.IN_FLIGHT and not timed_out and not stalled
            # A chunk that was prefetched for this request and evicted again would be so each time.
            was_evicted = was_prefetched and each in request.leased
            prefetches = presence is Presence.COLDER and not timed_out and not was_evicted and not stalled
            if prefetches and ends.get(each, 0) <= (request.load_limit or 0):
                waits = True
                if not coming:  # else host memory is needed for chunks that are stored
                    request.colder.add(each)
            request.waits |= waits
            request.answers[each] = PENDING if waits else MISS
        return request.answers[key]

    def _being_stored(
        self,
        request: RequestState,
        ends: Mapping[OffloadKey, int],
        found: Sequence[Presence],
        first: OffloadKey,
        *,
        waits: bool,
    ) -> set[int]:
        """Indices of the chunks of `request` that are in no tier, but in a store that waits for slots, if it `waits`.

        Asks the gate first how much of the prompt is loaded from colder tiers; only these chunks are waited for.
        """
        asks = waits and FILE in request.hints.load and Presence.ABSENT in found
        stored = self._store_jobs.keys_without_slots if asks else ()
        keys = request.cache_keys(request.asked_keys) if stored else ()
        absent = [each is Presence.ABSENT and key in stored for key, each in zip(keys, found, strict=False)]
        coming = {at for at, is_coming in enumerate(absent) if is_coming}
        if request.load_limit is None and (coming or Presence.COLDER in found):
            tiers = [FILE if at in coming else tier for at, tier in enumerate(tiers_of(found))]
            request.load_limit = load_limit(self._runtime.gate, ends, tiers, first, self._runtime.clock())
        return {at for at in coming if ends.get(request.asked_keys[at], 0) <= (request.load_limit or 0)}

    def _report_hits_in_parts(
        self, request: RequestState, ends: Mapping[OffloadKey, int], found: Sequence[Presence], first: OffloadKey
    ) -> Sequence[Presence]:
        """`found`; chunks in colder tiers are `HOST` if more chunks are in tiers than host memory has slots.

        vLLM looks up the chunk `first`. Such a load has parts.
        """
        there = [each in _IN_A_TIER for each in found[request.asked_keys.index(first) :]]
        if sum(there) <= self._job_context.slots:
            return found
        found_by_key, limit = list(zip(ends.items(), found, strict=True)), request.load_limit or 0
        colder = {key for (key, end), each in found_by_key if each is Presence.COLDER and end <= limit}
        request.loads_in_parts = True
        request.origins.update(dict.fromkeys(colder, FILE))
        return [Presence.HOST if key in colder else each for (key, _), each in found_by_key]

    def _count_misses(
        self,
        request: RequestState,
        found: Sequence[Presence],
        first: OffloadKey,
        *,
        timed_out: bool,
        was_prefetched: bool,
        stalled: bool,
    ) -> None:
        """Count the misses of `request`, of which vLLM looks up the chunks from `first` on; once."""
        if request.counted or self._groups.of(first):
            return
        group, begin = first[-GROUP_BYTES:], request.asked_keys.index(first)
        asked = zip(request.asked_keys[begin:], found[begin:], strict=True)
        mine = [each for each in asked if each[0][-GROUP_BYTES:] == group]
        reasons = self._metrics.miss_reasons(
            [each[1] for each in mine], timed_out=timed_out, was_prefetched=was_prefetched, stalled=stalled
        )
        if reasons is None:
            return
        # The cache has counted those that a remote store did not send, by reason.
        sent = [key for key, presence in mine if presence is Presence.ABSENT and key in request.origins]
        reasons[MissReason.ABSENT] -= sum(request.origins[key] != FILE for key in sent)
        request.counted = True
        with self._runtime.locked() as cache:
            cache.counters.misses.update(reasons)

    def _prefetch(self, request: RequestState, cache: TieredCache) -> None:
        """Prefetch the chunks that `request` waits for, and lease those that are ready; leading chunks first."""
        if request.waits and request.waiting_since is None:
            request.waiting_since = self._runtime.clock()
        if request.name in self._load_jobs.making_way:
            return
        wanted = [key for key in request.wanted if key not in request.leased]
        if request.colder.isdisjoint(wanted):
            return
        now = self._runtime.clock()
        where = residency(cache, request.cache_keys(wanted)).presences
        found = list(zip(wanted, where, strict=True))
        if len(request.wanted) > self._job_context.slots:  # chunks in flight get their slots before those behind them
            found = list(takewhile(lambda each: each[1] in _IN_A_TIER, found))
        # A chunk that was read for another request meanwhile, and was corrupt, is in no tier any more.
        there = [key for key, presence in found if presence in _IN_A_TIER]
        for group, mine in self._groups.split(there):
            chunks = {group: GroupKeys(request.cache_keys(mine))}
            here = cache.lookup(chunks, now, independent=True, request=request.name, request_number=request.number)
            if here.lease is not None:
                cache.prefetch(here.lease, now, policy=PrefetchPolicy.TIMEOUT, timeout=self._job_context.timeout)
                request.leases.append(here.lease)
        request.leased.update(there)
        request.origins.update(dict.fromkeys(request.colder.intersection(there), FILE))

    def _no_longer_computes(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self._computed_by.pop(key, None)

    def _drop_if_finished(self, name: str, request: RequestState) -> None:
        if request.finished and name not in self._load_jobs:
            self._requests.pop(name, None)

    @property
    def _tickets(self) -> list[Ticket]:
        """All tickets whose slots workers may still use."""
        return [*self._store_jobs.tickets, *self._load_jobs.tickets, *(ticket for ticket, _ in self._unreported)]

    @property
    def _is_serving(self) -> bool:
        return any(not request.finished for request in self._requests.values())

    def _end_unreported(self, ticket: Ticket, is_store: bool, cache: TieredCache) -> bool:
        """End a ticket whose end vLLM does not report, if all ranks have reported it; returns whether they have."""
        if is_store:
            return self._store_jobs.end(ticket, cache) is not None
        has_ended = self._tiers.reports.load_has_ended(ticket.number)
        if has_ended:
            self._job_context.end(ticket, cache)
        return has_ended

    def _has_copies_in_flight(self) -> bool:
        """Whether copies are in flight that a request or a later step waits for."""
        waiting = (request.leases for request in self._requests.values())
        return bool(self._store_jobs or self._unreported or self._load_jobs) or any(waiting)

    def _slots_spec(self, group_slots: Sequence[Slots]) -> SlotsSpec:
        return SlotsSpec(self._job_context.new_ticket().number, tuple(group_slots), self._validity.epoch)

    def _request_state(self, context: ReqContext) -> RequestState:
        return self._requests.setdefault(context.req_id, RequestState(context.req_id))
