"""`LongshoreManager`: the scheduler's side. It answers vLLM key by key, from one `TieredCache`.

    lookup ... lookup      asked once for the whole request; what only a colder tier has is brought up meanwhile
    prepare_load           slots lent to the workers ────────────► complete_load ends the loan
    prepare_store          slots offered to the workers ─────────► complete_store: published where all ranks stamped
    on_schedule_end        protections end, chunks are ordered up, tickets from before a reset are looked after

A lookup never blocks. `HIT` means verified bytes in the host tier; what is on its way is `HIT_PENDING` until
`Config.load_timeout` is over, then `MISS`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from longshore.boundary import Key, Slot, Status, TransferResult
from longshore.cache import Hold, PrefetchPolicy, Presence, TieredCache
from longshore.engines.vllm.store import Store
from longshore.engines.vllm.worker import SlotsSpec

HIT, MISS, PENDING = LookupResult.HIT, LookupResult.MISS, LookupResult.HIT_PENDING

_KEY_BYTES = 32
_GROUP_BYTES = 4


@dataclass(slots=True)
class _Request:
    """What is known of one request.

    Attributes:
        answers: Those of this step, for all chunks of the request that vLLM has told of.
        colder: What of that is in a colder tier alone.
        wanted: What of that vLLM has asked for.
        since: When it was first told to wait.
        holds: What was brought up for it, until it is loaded.
        origin: Chunks that came from a colder tier.
        loan: The ticket of what workers read for it.
        barred: A load for it has failed: it gets no other, or it might fail for ever.
        finished: Nothing will be asked for it any more.
    """

    answers: dict[OffloadKey, LookupResult] = field(default_factory=dict)
    colder: set[OffloadKey] = field(default_factory=set)
    wanted: dict[OffloadKey, None] = field(default_factory=dict)
    since: float | None = None
    holds: list[Hold] = field(default_factory=list)
    origin: set[OffloadKey] = field(default_factory=set)
    loan: _Ticket | None = None
    barred: bool = False
    finished: bool = False


@dataclass(slots=True)
class _Ticket:
    """Slots that the workers fill, or read: the cache's `jobs`, with the slots of each. Its number is used once."""

    number: int
    jobs: list[tuple[int, list[int]]] = field(default_factory=list)
    keys: list[OffloadKey] = field(default_factory=list)


class LongshoreManager(OffloadingManager):  # type: ignore[misc]
    """Tiers for one engine."""

    def __init__(self, store: Store, groups: Sequence[int], patience: float) -> None:
        """`groups` are vLLM's numbers of the KV cache groups, in our order; `patience` is in seconds."""
        self._store = store
        self._runtime = store.runtime
        self._groups = {number.to_bytes(_GROUP_BYTES, "big"): index for index, number in enumerate(groups)}
        self._patience = patience
        self._requests: dict[str, _Request] = {}
        self._asked: list[_Request] = []
        self._last_ticket = 0
        self._stores: dict[int, _Ticket] = {}
        self._by_key: dict[OffloadKey, _Ticket] = {}
        self._stale: list[tuple[_Ticket, bool]] = []
        """Tickets of which nobody will tell any more, and whether they are stores."""
        self._closed = False

    # ------------------------------------------------------------------ loading

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """A request has come."""
        self._requests.setdefault(req_context.req_id, _Request())
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Where a chunk is: from the answers of this step, which are had for all chunks of the request at once."""
        request = self._requests.setdefault(req_context.req_id, _Request())
        answer = request.answers.get(key)
        if answer is None:
            self._ask(request, key, req_context)
            answer = request.answers[key]
        if answer is PENDING and key in request.colder:
            request.wanted[key] = None
        return answer

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        """The tier that a chunk came from."""
        request = self._requests.get(req_context.req_id)
        came_up = request is not None and key in request.origin
        return CacheHitSource.DISK if came_up else CacheHitSource.HOST

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> SlotsSpec:
        """Lend the slots of these chunks to the workers."""
        request = self._requests.setdefault(req_context.req_id, _Request())
        ticket, counts, slots = self._ticket(), [0] * len(self._groups), list[Slot]()
        with self._runtime.control() as cache:
            for group, mine in self._by_group(keys):
                loan = cache.lend([self._key(key) for key in mine], group=group)
                counts[group] = len(loan.slots)
                slots += loan.slots
                ticket.jobs.append((loan.job, [slot.index for slot in loan.slots]))
            self._release(request, cache)
        request.loan, request.since = ticket, None
        return _spec(ticket, counts, slots)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """The workers have read what they were lent."""
        request = self._requests.get(req_context.req_id)
        if request is not None and request.loan is not None:
            ticket, request.loan = request.loan, None
            request.barred |= self._store.stamps.has_failed(ticket.number)
            with self._runtime.control() as cache:
                _end(cache, ticket, {}, self._runtime.clock())
            self._forget_if_done(req_context.req_id, request)

    # ------------------------------------------------------------------ storing

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput:
        """Offer slots for what no tier has."""
        ticket, counts, slots = self._ticket(), [0] * len(self._groups), list[Slot]()
        with self._runtime.control() as cache:
            for group, mine in self._by_group(keys):
                offload = cache.offer([self._key(key) for key in mine], group=group)
                if offload.job is None:
                    continue
                ticket.keys += [mine[place.position] for place in offload.accepted]
                ticket.jobs.append((offload.job, [slot.index for slot in offload.slots]))
                counts[group] = len(offload.slots)
                slots += offload.slots
        if ticket.keys:
            self._stores[ticket.number] = ticket
            self._by_key.update(dict.fromkeys(ticket.keys, ticket))
        return PrepareStoreOutput(list(ticket.keys), _spec(ticket, counts, slots), [])

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        """All ranks say that they are done with these chunks; what is published is what they have stamped."""
        tickets = {ticket.number: ticket for key in keys if (ticket := self._by_key.get(key)) is not None}
        with self._runtime.control() as cache:
            for number, ticket in sorted(tickets.items()):
                _end(cache, ticket, self._statuses(ticket), self._runtime.clock())
                del self._stores[number]
                for key in ticket.keys:
                    del self._by_key[key]

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
                request.answers.clear()
                request.colder.clear()
                request.wanted.clear()
            self._asked.clear()
            cache.end_step()
            self._stale = [each for each in self._stale if not self._is_over(*each, cache)]

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
            request.answers.clear()
        for name in [name for name, request in self._requests.items() if request.finished]:
            del self._requests[name]

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

    def _ask(self, request: _Request, key: OffloadKey, context: ReqContext) -> None:
        """Answers for all chunks of a request that vLLM has told of, `key` among them."""
        told = getattr(context, "_offload_key_positions", {})
        keys = list(told) if key in told else [key]
        now = self._runtime.clock()
        with self._runtime.control() as cache:
            late = request.since is not None and now - request.since > self._patience
            brought = bool(request.holds) and all(cache.prefetched(hold) is not None for hold in request.holds)
            for each in keys:
                presence = Presence.ABSENT if request.barred else cache.peek(self._key(each))
                if presence is Presence.READY:
                    request.answers[each] = HIT
                elif presence is Presence.ABSENT or late or (presence is Presence.COLDER and brought):
                    request.answers[each] = MISS
                else:
                    request.answers[each] = PENDING
                    if presence is Presence.COLDER:
                        request.colder.add(each)
        self._asked.append(request)

    def _bring_up(self, request: _Request, cache: TieredCache) -> None:
        """Order what `request` was told to wait for."""
        waits = any(answer is PENDING for answer in request.answers.values())
        if waits and request.since is None:
            request.since = self._runtime.clock()
        if not request.wanted or request.holds:
            return
        # What was read for another request meanwhile, and found rotten, is not there any more.
        there = [key for key in request.wanted if cache.peek(self._key(key)) in (Presence.READY, Presence.COLDER)]
        for group, mine in self._by_group(there):
            hold = cache.keep([self._key(key) for key in mine], group=group)
            cache.prefetch(hold, policy=PrefetchPolicy.TIMEOUT, timeout=self._patience)
            request.holds.append(hold)
            request.origin.update(mine)

    def _release(self, request: _Request, cache: TieredCache) -> None:
        for hold in request.holds:
            cache.release(hold)
        request.holds.clear()

    def _forget_if_done(self, name: str, request: _Request) -> None:
        if request.finished and request.loan is None:
            self._requests.pop(name, None)

    def _statuses(self, ticket: _Ticket) -> Mapping[int, Status]:
        """Slots that were not stamped good by all ranks."""
        slots = [slot for _, mine in ticket.jobs for slot in mine]
        said = self._store.stamps.said(ticket.number, slots)
        return {slot: Status.IO_ERROR for slot, ranks in zip(slots, said.tolist(), strict=True) if min(ranks) < 2}

    def _is_over(self, ticket: _Ticket, is_store: bool, cache: TieredCache) -> bool:
        """Whether no worker touches the slots of a ticket from before a reset; if so, they are given back."""
        stamps = self._store.stamps
        slots = [slot for _, mine in ticket.jobs for slot in mine]
        over = bool(stamps.said(ticket.number, slots).all()) if is_store else stamps.has_loaded(ticket.number)
        if over:
            _end(cache, ticket, {}, self._runtime.clock())
        return over

    def _ticket(self) -> _Ticket:
        self._last_ticket += 1
        return _Ticket(self._last_ticket)

    def _by_group(self, keys: Collection[OffloadKey]) -> Iterator[tuple[int, list[OffloadKey]]]:
        """Keys of each group, by our number; vLLM gives them group after group."""
        for number, mine in groupby(sorted(keys, key=_group_of), key=_group_of):
            yield self._groups[number], list(mine)

    @staticmethod
    def _key(key: OffloadKey) -> Key:
        """Our key: the end of the hash, and the group. The scope stands in the records of tiers that outlive us."""
        return bytes(key[-_KEY_BYTES:].rjust(_KEY_BYTES, b"\0"))


def _group_of(key: OffloadKey) -> bytes:
    return bytes(key[-_GROUP_BYTES:])


def _spec(ticket: _Ticket, counts: Sequence[int], slots: Sequence[Slot]) -> SlotsSpec:
    return SlotsSpec(ticket.number, tuple(counts), tuple((slot.pool, slot.index) for slot in slots))


def _end(cache: TieredCache, ticket: _Ticket, bad: Mapping[int, Status], now: float) -> None:
    """Tell the cache that all jobs of a ticket have ended."""
    cache.apply(
        [TransferResult(job, tuple(bad.get(slot, Status.OK) for slot in slots)) for job, slots in ticket.jobs],
        now,
    )
