"""`LongshoreManager`: the scheduler's side. It answers vLLM key by key, from one `TieredCache`.

    lookup ... lookup      asked once for the whole request; what only a colder tier has is brought up meanwhile
    prepare_load           slots lent to the workers ────────────► complete_load ends the loan
    prepare_store          slots offered to the workers ─────────► complete_store: published where all ranks stamped
    on_schedule_end        protections end, chunks are ordered up, tickets from before a reset are looked after

A lookup never blocks. `HIT` means verified bytes in the host tier; what is on its way is `HIT_PENDING` until
`Config.load_timeout` is over, then `MISS`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import compress

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from longshore.boundary import DEVICE, HOST, Route, Slots
from longshore.cache import MissReason, PrefetchPolicy, Presence, TieredCache
from longshore.engines.vllm.announce import Announcer
from longshore.engines.vllm.keys import GROUP_BYTES, ours
from longshore.engines.vllm.pace import Pace
from longshore.engines.vllm.requests import Request, Ticket
from longshore.engines.vllm.store import Store
from longshore.engines.vllm.tally import Tally
from longshore.engines.vllm.worker import SlotsSpec
from longshore.engines.vllm.worth import worth_until
from longshore.runtime.stamps import GOOD

HIT, MISS, PENDING = LookupResult.HIT, LookupResult.MISS, LookupResult.HIT_PENDING
NO_SLOTS = Slots(HOST, 0, ())
LOAD = Route(HOST, DEVICE)


class LongshoreManager(OffloadingManager):  # type: ignore[misc]
    """Tiers for one engine."""

    def __init__(self, store: Store, groups: Sequence[int], patience: float, *, announces: bool = False) -> None:
        """`groups` are vLLM's numbers of the KV cache groups, in our order; `patience` is in seconds.

        With `announces`, KV events tell what the tiers get and give up; `store` must record them.
        """
        self._store = store
        self._runtime = store.runtime
        self._groups = {number.to_bytes(GROUP_BYTES, "big"): index for index, number in enumerate(groups)}
        self._patience = patience
        self._requests: dict[str, Request] = {}
        self._asked: list[Request] = []
        self._last_ticket = 0
        self._stores: dict[int, Ticket] = {}
        self._by_key: dict[OffloadKey, Ticket] = {}
        """Stores by their first key: vLLM reports all keys of a store together, in any order."""
        self._stale: list[tuple[Ticket, bool]] = []
        """Tickets of which nobody will tell any more, and whether they are stores."""
        self._pace = Pace()
        self._closed = False
        self._tally = Tally(store.file)
        self._announcer = Announcer() if announces else None
        with self._runtime.observe() as cache:
            self._image_bytes = [size.image_bytes for size in cache.stats()[0].sizes]
            self._chunk_tokens = cache.settings.group(0)[1]

    # ------------------------------------------------------------------ loading

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """A request has come."""
        self._begin(req_context)
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Where a chunk is: from the answers of this step, which are had for all chunks of the request at once."""
        try:
            answer = self._requests[req_context.req_id].answers[key]
        except KeyError:
            answer = self._ask(self._begin(req_context), key, req_context)
        if answer is PENDING:
            self._requests[req_context.req_id].want(key)
        return answer

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        """The tier that a chunk came from."""
        request = self._requests.get(req_context.req_id)
        came_up = request is not None and key in request.origin
        return CacheHitSource.DISK if came_up else CacheHitSource.HOST

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> SlotsSpec:
        """Lend the slots of these chunks to the workers."""
        request = self._requests.get(req_context.req_id) or self._begin(req_context)
        ticket, runs = self._ticket(), [NO_SLOTS] * len(self._groups)
        with self._runtime.control() as cache:
            for group, mine in self._by_group(keys):
                loan = cache.lend(request.seen(mine), group=group)
                runs[group] = loan.slots.of
                ticket.jobs.append((loan.job, loan.slots.of))
                came_up = len(request.origin.intersection(mine)) if request.origin else 0
                self._tally.loaded(len(mine), came_up, 0 if group else self._chunk_tokens)
            self._release(request, cache)
        request.loan, request.since = ticket, None
        return SlotsSpec(ticket.number, tuple(runs))

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """The workers have read what they were lent."""
        request = self._requests.get(req_context.req_id)
        if request is not None and request.loan is not None:
            ticket, request.loan = request.loan, None
            request.barred |= self._store.stamps.has_failed(ticket.number)
            with self._runtime.control() as cache:
                results = ticket.end(cache, (), self._runtime.clock(), self._image_bytes)
                self._runtime.saw_loads(LOAD, results)
            self._forget_if_done(req_context.req_id, request)

    def saw_prefill(self, context: int, tokens: int, seconds: float) -> None:
        """A step computed `tokens` of prompts behind `context` others: for the gate."""
        self._runtime.saw_prefill(context, tokens, seconds)

    # ------------------------------------------------------------------ storing

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput:
        """Offer slots for what no tier has."""
        ticket, runs, request = self._ticket(), [NO_SLOTS] * len(self._groups), self._begin(req_context)
        with self._runtime.control() as cache:
            for group, mine in self._by_group(keys):
                offload = cache.offer(ours(mine), group=group)
                self._slide(request, group, mine, req_context, cache)
                if offload.job is not None:
                    ticket.keys += map(mine.__getitem__, offload.positions)
                    ticket.jobs.append((offload.job, offload.slots.of))
                    runs[group] = offload.slots.of
        if ticket.keys:
            self._stores[ticket.number] = ticket
            self._by_key[ticket.keys[0]] = ticket
        return PrepareStoreOutput(ticket.keys.copy(), SlotsSpec(ticket.number, tuple(runs)), [])

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        """All ranks say that they are done with these chunks; what is published is what they have stamped."""
        tickets = [self._by_key.pop(key) for key in sorted(self._by_key.keys() & keys)]
        with self._runtime.control() as cache:
            for ticket in tickets:
                good = (self._store.stamps.said(ticket.number, ticket.slots) == GOOD).all(axis=1).tolist()
                if self._announcer is not None:
                    stored = list(compress(ticket.keys, good))
                    self._announcer.name(stored, ours(stored))
                ticket.end(cache, good, self._runtime.clock(), self._image_bytes)
                del self._stores[ticket.number]

    # ------------------------------------------------------------------ between steps

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Nothing is kept for a request any more, but what workers still read."""
        request = self._requests.get(req_context.req_id)
        if request is not None:
            with self._runtime.control() as cache:
                self._release(request, cache)
            request.finished = True
            self._forget_if_done(req_context.req_id, request)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """A step is planned: order up what was asked for and is colder."""
        with self._runtime.control() as cache:
            for request in self._asked:
                self._bring_up(request, cache)
                request.end_step()
            self._asked.clear()
            cache.end_step()
            self._stale = [each for each in self._stale if not self._is_over(*each, cache)]
        self._pace.planned(self._is_awaited)

    def has_pending_work(self) -> bool:
        """Whether steps are needed even without requests."""
        return bool(self._stale)

    def reset_cache(self) -> None:
        """Forget all. Slots in flight are left alone until the workers have stamped them."""
        with self._runtime.control() as cache:
            for request in self._requests.values():
                self._release(request, cache)
                if request.loan is not None:
                    self._stale.append((request.loan, False))
                    request.loan = None
            self._stale += [(ticket, True) for ticket in self._stores.values()]
            cache.reset()
        self._stores.clear()
        self._by_key.clear()
        for request in self._asked:
            request.end_step()
        for name in [name for name, request in self._requests.items() if request.finished]:
            del self._requests[name]

    def on_reset_flushed(self) -> None:
        """All that was in flight at the last reset has been reported: no worker touches its slots (vLLM 0.33)."""
        with self._runtime.control() as cache:
            for ticket, _ in self._stale:
                ticket.end(cache, (), self._runtime.clock(), self._image_bytes)
        self._stale.clear()

    # ------------------------------------------------------------------ watching

    def get_stats(self) -> OffloadingConnectorStats | None:
        """What the counters have gained since the last call; at the first, every one of them."""
        with self._runtime.observe() as cache:
            weighing = self._runtime.weighing
            return self._tally.stats(cache, 0 if weighing is None else weighing.refused)

    @property
    def loaded_tokens(self) -> Mapping[str, int]:
        """Tokens of the first KV cache group that were loaded until now, by the tier that they came from."""
        return self._tally.tokens

    def take_events(self) -> Iterable[OffloadingEvent]:
        """What tiers have got and given up since the last call, if vLLM publishes KV events."""
        if self._announcer is None:
            return ()
        with self._runtime.observe() as cache:
            return list(self._announcer.translate(cache.events()))

    def flush(self, timeout: float) -> bool:
        """Wait until all that was stored is safe in every tier, at most so many seconds; says whether it is."""
        return self._runtime.flush(timeout)

    def shutdown(self) -> None:
        """Write back what a restart would lose, and give everything back. Idempotent."""
        if self._closed:
            return
        self._closed = True
        loans = [request.loan for request in self._requests.values() if request.loan is not None]
        open_ones = [*self._stores.values(), *loans, *(ticket for ticket, _ in self._stale)]
        with self._runtime.control() as cache:
            for job, _ in (each for ticket in open_ones for each in ticket.jobs):
                cache.withdraw(job)  # nobody will tell, and nothing is served any more
        self._store.close()

    # ------------------------------------------------------------------ inside

    def _ask(self, request: Request, key: OffloadKey, context: ReqContext) -> LookupResult:
        """The answer for `key`; and, for the lookups to come, those for all chunks of the request that vLLM told of."""
        told: dict[OffloadKey, int] = getattr(context, "_offload_key_positions", {})
        asked = told if key in told else {key: 0}
        request.told = list(asked)
        now = self._runtime.clock()
        with self._runtime.control() as cache:
            late = request.since is not None and now - request.since > self._patience
            brought = bool(request.holds) and all(cache.prefetched(hold) is not None for hold in request.holds)
            request.sight = cache.peek(ours(() if request.barred else request.told))
        self._asked.append(request)
        if request.barred:
            request.answers = dict.fromkeys(asked, MISS)
            self._tally.misses[MissReason.IO_ERROR] += 0 if request.counted else len(asked)
            request.counted = True
            return MISS
        found = request.sight.presences
        if request.worth is None and Presence.COLDER in found:
            request.worth = self._worth(told, found, key)
        self._count_misses(request, key, late=late, brought=brought)
        request.answers = dict.fromkeys(asked, HIT)
        if found.count(Presence.READY) == len(found):
            return HIT
        for each, presence in zip(request.told, found, strict=True):
            if presence is Presence.READY:
                continue
            waits = presence is Presence.IN_FLIGHT and not late
            # What was brought up for this request, and is colder again, would be so for ever.
            if presence is Presence.COLDER and not late and not brought and told.get(each, 0) <= (request.worth or 0):
                waits = True
                request.colder.add(each)
            request.waits |= waits
            request.answers[each] = PENDING if waits else MISS
        return request.answers[key]

    def _worth(self, told: dict[OffloadKey, int], found: Sequence[Presence], first: OffloadKey) -> float:
        """Up to which token of the prompt to read from colder tiers; `first` is what vLLM asks for first."""
        if self._runtime.weighing is None or first not in told:
            return math.inf
        return worth_until(self._runtime.weighing, told, found, first, self._runtime.clock())

    def _count_misses(self, request: Request, first: OffloadKey, *, late: bool, brought: bool) -> None:
        """Count what `request`, which asks for chunks from `first` on, does without; once."""
        if request.counted or request.sight is None:
            return
        group, begin = first[-GROUP_BYTES:], request.told.index(first)
        found = request.sight.presences[begin:]
        if len(self._groups) > 1:
            mine = zip(request.told[begin:], found, strict=True)
            found = [presence for key, presence in mine if key[-GROUP_BYTES:] == group]
        if self._groups[group] == 0:
            request.counted = self._tally.missed(found, late=late, brought=brought)

    def _bring_up(self, request: Request, cache: TieredCache) -> None:
        """Order what `request` was told to wait for."""
        if request.waits and request.since is None:
            request.since = self._runtime.clock()
        if not request.wanted or request.holds:
            return
        # What was read for another request meanwhile, and found rotten, is not there any more.
        wanted = list(request.wanted)
        found = zip(wanted, cache.peek(ours(wanted)).presences, strict=True)
        there = [key for key, presence in found if presence in (Presence.READY, Presence.COLDER)]
        for group, mine in self._by_group(there):
            hold = cache.keep(ours(mine), group=group)
            cache.prefetch(hold, policy=PrefetchPolicy.TIMEOUT, timeout=self._patience)
            request.holds.append(hold)
            request.origin.update(mine)

    def _slide(
        self, request: Request, group: int, keys: list[OffloadKey], context: ReqContext, cache: TieredCache
    ) -> None:
        """`keys` have been offered behind the last window of `request`, which slides past what it leaves."""
        window, before = self._store.windows[group], request.windows.get(group, [])
        if window is None or (before and _position(keys[0], context) <= _position(before[-1], context)):
            return  # offered once more, when the request ends
        path = before + keys
        request.windows[group] = path[-window:]
        cache.slide(ours(before[: max(0, len(path) - window)]), group=group)

    def _release(self, request: Request, cache: TieredCache) -> None:
        for hold in request.holds:
            cache.release(hold)
        request.holds.clear()

    def _forget_if_done(self, name: str, request: Request) -> None:
        if request.finished and request.loan is None:
            self._requests.pop(name, None)

    def _is_over(self, ticket: Ticket, is_store: bool, cache: TieredCache) -> bool:
        """Whether no worker touches the slots of a ticket from before a reset; if so, they are given back."""
        stamps = self._store.stamps
        over = bool(stamps.said(ticket.number, ticket.slots).all()) if is_store else stamps.has_loaded(ticket.number)
        if over:
            ticket.end(cache, (), self._runtime.clock(), self._image_bytes)
        return over

    def _is_awaited(self) -> bool:
        """Whether copies are on their way that a request, or a step to come, waits for."""
        waiting = (request.loan is not None or request.holds for request in self._requests.values())
        return bool(self._stores or self._stale) or any(waiting)

    def _ticket(self) -> Ticket:
        self._last_ticket += 1
        return Ticket(self._last_ticket, self._runtime.clock())

    def _begin(self, context: ReqContext) -> Request:
        return self._requests.setdefault(context.req_id, Request())

    def _by_group(self, keys: Collection[OffloadKey]) -> list[tuple[int, list[OffloadKey]]]:
        """Keys of each group that has any, by our number of it."""
        if len(self._groups) == 1:
            return [(0, list(keys))] if keys else []
        parts: dict[bytes, list[OffloadKey]] = {}
        for key in keys:
            parts.setdefault(key[-GROUP_BYTES:], []).append(key)
        return sorted((self._groups[number], mine) for number, mine in parts.items())


def _position(key: OffloadKey, context: ReqContext) -> int:
    """Tokens up to the end of a chunk."""
    return context.get_offload_key_position(key) or 0
