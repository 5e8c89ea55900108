"""`StoreJobs`: slots of host memory that workers fill for a store, from `prepare_store` until all ranks have reported.

A store that needs more slots than host memory has gets them in parts:

    prepare_store ──► first part: what has room ──► workers ──► reports of all ranks ──► published, written to files
                                                      ▲                                                   │
                 slots in a later step's metadata ────┴── slots of chunks that files have ◄───────────────┘

vLLM reports a store when all ranks say that they are done. What is published is what all of them report as done; a slot
is given back only after all ranks have reported it, because until then a worker may write there. The workers end a
store early when vLLM gives its blocks to others: chunks that have no slot by then are not stored.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from itertools import compress

from vllm.v1.kv_offload.base import OffloadKey, ReqContext

from longshore.boundary import HOST, Key, Slots, Status
from longshore.cache import DropReason, GroupKeys, Presence, Protection, ScheduledStore, TieredCache
from longshore.engines.vllm.metrics import EventTranslator
from longshore.engines.vllm.requests import (
    JobContext,
    PendingChunks,
    RequestState,
    RequestStore,
    Ticket,
    cache_keys,
    end_token,
    has_chunk,
    has_later_chunks,
    residency,
)
from longshore.engines.vllm.weight_changes import BlockValidity
from longshore.engines.vllm.worker import JobPart, SlotsSpec
from longshore.errors import CacheError, IntegrityError
from longshore.runtime.rank_reports import DONE, INTERNAL_ERROR

_log = logging.getLogger(__name__)
NO_SLOTS = Slots(HOST, 0, ())


class StoreJobs:
    """The stores of one engine that vLLM has not reported yet. Calls are made inside a batch of the runtime.

    Attributes:
        by_first_key: Stores that vLLM will report, oldest first, by their first key: it reports all keys of a store.
        parts_allowed: Whether stores may have parts: the connector passes them to workers.
        chunks_cut_off: How many chunks had no slot when their store was ended: drops by back-pressure.
    """

    def __init__(
        self, context: JobContext, validity: BlockValidity, events: EventTranslator | None, write_timeout: float
    ) -> None:
        """`write_timeout`: seconds for which a store waits for slots.

        `events`, if any, is told vLLM's keys of the chunks that are published.
        """
        self._context = context
        self._groups = context.groups
        self._validity = validity
        self._events = events
        self._write_timeout = write_timeout
        self._stores: dict[int, RequestStore] = {}
        self._new_parts: list[JobPart] = []
        self._keys_without_slots: set[Key] | None = None
        self.by_first_key: dict[OffloadKey, list[RequestStore]] = {}
        self.parts_allowed = False
        self.chunks_cut_off = self._cut_off_counted = 0
        self._newest = self._submitted = 0
        """The last store, and the last that the workers had been given when a step was planned."""

    def __len__(self) -> int:
        """Stores that vLLM has not reported."""
        return len(self._stores)

    def __iter__(self) -> Iterator[RequestStore]:
        """These, oldest first."""
        return iter(list(self._stores.values()))

    @property
    def keys_without_slots(self) -> set[Key]:
        """Cache keys of the chunks that have no slots yet."""
        if self._keys_without_slots is None:
            rests = [rest for store in self._stores.values() for rest in store.pending.values()]
            self._keys_without_slots = {rest.path[at] for rest in rests for at in rest.indices[rest.placed :]}
        return self._keys_without_slots

    @property
    def tickets(self) -> list[Ticket]:
        """The tickets of all parts that workers copy."""
        return [ticket for store in self._stores.values() for ticket in store.parts]

    def offer(
        self,
        cache: TieredCache,
        request: RequestState,
        keys: Collection[OffloadKey],
        context: ReqContext,
        *,
        accepts: bool,
    ) -> tuple[list[OffloadKey], SlotsSpec] | None:
        """Answer `prepare_store`: those of `keys` that are stored, and the slots of their first part.

        The first chunks of the prompt come first. Without `accepts` no key is stored. The answer is `None`, and vLLM
        offers the same keys again, while slots are being freed: where stores have parts, for a sliding window; where
        they have none, for chunks that follow those in the tiers, or that other chunks of the request follow.
        """
        first = self._context.new_ticket()
        store = RequestStore(request, first.since, first.number, request.lora, request.adapter)
        first.lora, first.adapter = store.lora, store.adapter
        request.offered = max([request.offered, *(end_token(key, context) for key in keys)])
        group_slots = [NO_SLOTS] * len(self._groups)
        if request.number is None:
            asked = {0: GroupKeys(request.cache_keys(keys))}
            reuse_hint = request.hints.reuse_hint
            request.number = cache.lookup(
                asked, first.since, protect=Protection.STEP, independent=True, reuse_hint=reuse_hint
            ).request_number
            cache.end_step()  # what this step loads is leased by now; leading chunks may be evicted for the next ones
        groups = self._groups.split(keys if accepts else ())
        if self.parts_allowed:  # windows get slots first: they have no parts, and are offered again with the others
            groups.sort(key=lambda each: self._groups.windows[each[0]] is None)
        for group, offered in groups:
            again, slots = self._offer_group(cache, store, group, offered, context, first)
            if again:
                return None
            if slots is not None:
                group_slots[group] = slots
        request.refused_since = None
        store.keys = first.keys + [key for rest in store.pending.values() for key in rest.vllm_keys[rest.placed :]]
        left = tuple(store.pending[group].left if group in store.pending else 0 for group in range(len(self._groups)))
        if store.keys:
            self._keys_without_slots = None
            self._stores[store.first_ticket], self._newest = store, store.first_ticket
            self.by_first_key.setdefault(store.keys[0], []).append(store)
            store.parts += [first] if first.cache_jobs else []
        spec = SlotsSpec(
            store.first_ticket, tuple(group_slots), self._validity.epoch, (), left if store.pending else ()
        )
        return store.keys.copy(), spec

    def _offer_group(
        self,
        cache: TieredCache,
        store: RequestStore,
        group: int,
        keys: list[OffloadKey],
        context: ReqContext,
        ticket: Ticket,
    ) -> tuple[bool, Slots | None]:
        """Whether vLLM is to offer the chunks of this group again; and the slots of those that have got some."""
        request, tokens, window = store.request, self._groups.tokens[group], self._groups.windows[group]
        has_window = window is not None
        if has_window:
            keys = [key for key in keys if end_token(key, context) > request.offered_before_reset]
        if not keys:
            return False, None
        first, path = (0, request.cache_keys(keys)) if has_window else request.path_to(group, keys, context, tokens)
        begin, rest = divmod(end_token(keys[0], context) - 1, tokens)
        in_parts = self.parts_allowed and not has_window and rest == tokens - 1
        if in_parts and first < len(path) and any(group in each.pending for each in self if each.request is request):
            store.pending[group] = PendingChunks(path, range(first, len(path)), keys[: len(path) - first], 0)
            return False, None
        is_connected = (
            has_chunk(cache, path[first - 1]) if first else not has_window and has_later_chunks(keys, context)
        )
        all_or_retry = (
            self.parts_allowed if has_window else is_connected and rest == tokens - 1 and not in_parts
        ) and not ticket.cache_jobs
        all_or_retry = all_or_retry and request.may_wait(ticket.since, self._context.timeout)
        past_window, last_window = request.past_window(group, window, keys, context)
        retention = request.hints.chunks(tokens, max(0, begin) - first)
        whole = GroupKeys(path, first, retention=retention, past_window=past_window)
        scheduled = self._schedule_slots(cache, store, whole, group, all_or_retry=all_or_retry, defer_rest=in_parts)
        if scheduled is None or scheduled.retry:
            return scheduled is not None, None
        request.windows[group] = last_window
        if scheduled.later:
            indices = [*scheduled.positions, *scheduled.later]
            vllm_keys = [keys[at - first] for at in indices]
            store.pending[group] = PendingChunks(path, indices, vllm_keys, len(scheduled.positions))
        if scheduled.job is None:
            return False, None
        ticket.keys += [keys[at - first] for at in scheduled.positions]
        ticket.cache_jobs.append((scheduled.job, scheduled.slots.of))
        return False, scheduled.slots.of

    @staticmethod
    def _schedule_slots(
        cache: TieredCache,
        store: RequestStore,
        path: GroupKeys,
        group: int,
        *,
        all_or_retry: bool = False,
        defer_rest: bool = False,
    ) -> ScheduledStore | None:
        """Have the cache give slots to the chunks of `path`; `None` if it refuses the call."""
        try:
            return cache.store(
                {group: path}, all_or_retry=all_or_retry, defer_rest=defer_rest, request_number=store.request.number
            )[group]
        except IntegrityError:
            raise
        except CacheError as error:  # before anything has changed
            count, name = len(path.keys) - path.start, store.request.name
            _log.warning("request %s: the cache refused %d chunks, which are not stored: %s", name, count, error)
            return None

    def proceed(self, cache: TieredCache) -> None:
        """End parts that all ranks have copied, and give slots to chunks that have none yet.

        Requests that have got slots longest ago come first. A store that gets none within the timeout, or of which a
        part has failed, is ended: its other chunks are not stored.
        """
        now = self._context.clock()
        cache.counters.drops[HOST][DropReason.BACKPRESSURE] += self.chunks_cut_off - self._cut_off_counted
        self._cut_off_counted = self.chunks_cut_off
        waiting, served = set[str](), dict[str, float]()
        stores = [each for each in self if each.pending]
        for store in stores:
            served[store.request.name] = max(store.since, served.get(store.request.name, 0.0))
        for store in sorted(stores, key=lambda store: (served[store.request.name], store.first_ticket)):
            self._keys_without_slots = None
            outcomes = {ticket.number: self.end(ticket, cache) for ticket in store.parts}
            store.parts = [ticket for ticket in store.parts if outcomes[ticket.number] is None]
            if False in outcomes.values() or now - served[store.request.name] > self._write_timeout:
                self._cut(store)
            elif store.request.name not in waiting:  # else it is behind what waits
                for group, rest in list(store.pending.items()):
                    while rest.left and self._next_part(cache, store, group):
                        pass
                    if not rest.left:
                        del store.pending[group]
                if store.pending:
                    waiting.add(store.request.name)
                elif store.has_gaps:
                    self._cut(store)

    def _next_part(self, cache: TieredCache, store: RequestStore, group: int) -> bool:
        """Give slots to the next chunks of `group`, which follow one another; whether any got some, or need none."""
        rest = store.pending[group]
        ahead = rest.indices[rest.placed : rest.placed + self._context.slots]
        lacks = [each is Presence.ABSENT for each in residency(cache, [rest.path[at] for at in ahead]).presences]
        there = lacks.index(True) if True in lacks else len(lacks)
        if there:  # stored for another request meanwhile
            rest.placed, store.has_gaps = rest.placed + there, True
            return True
        first, run = ahead[0], 1
        while run < len(ahead) and lacks[run] and ahead[run] == first + run:
            run += 1
        retention = store.request.hints.chunks(self._groups.tokens[group], 0)
        path = GroupKeys(rest.path[: first + run], first, retention=retention)
        scheduled = self._schedule_slots(cache, store, path, group, defer_rest=True)
        got, start = (0 if scheduled is None else len(scheduled.positions)), rest.placed
        if scheduled is not None and scheduled.job is not None:
            ticket = self._context.new_ticket()
            ticket.lora, ticket.adapter = store.lora, store.adapter
            ticket.keys, ticket.cache_jobs = (
                list(rest.vllm_keys[start : start + got]),
                [(scheduled.job, scheduled.slots.of)],
            )
            store.parts.append(ticket)
            group_slots, chunks_before = [NO_SLOTS] * len(self._groups), [0] * len(self._groups)
            group_slots[group], chunks_before[group] = scheduled.slots.of, start
            spec = SlotsSpec(ticket.number, tuple(group_slots), self._validity.epoch, tuple(chunks_before))
            self._new_parts.append(JobPart(store.first_ticket, spec, is_store=True))
            rest.placed, store.since = start + got, ticket.since
        kept = got + (0 if scheduled is None else len(scheduled.later))
        if kept < run:  # the cache will not store the others, of which it has counted those of this run
            self.chunks_cut_off += len(rest.indices) - start - (0 if scheduled is None else run)
            rest.indices, store.has_gaps = rest.indices[: start + kept], True
        return got > 0

    def _cut(self, store: RequestStore) -> None:
        """No more of `store` gets slots: the workers report it when they have copied what they were given."""
        self.chunks_cut_off += sum(rest.left for rest in store.pending.values())
        store.pending.clear()
        self._new_parts.append(JobPart(store.first_ticket, None, is_store=True))

    def take(self) -> list[JobPart]:
        """Parts that are sent to the workers in this step: of stores from before it, which vLLM submits a step late."""
        parts = [part for part in self._new_parts if part.first_ticket <= self._submitted]
        self._new_parts = [part for part in self._new_parts if part.first_ticket > self._submitted]
        self._submitted = self._newest
        return parts

    def abandon(self) -> list[JobPart]:
        """`take` after the control plane has failed: stores that have more parts are ended."""
        for store in [each for each in self if each.pending]:
            self._cut(store)
        return self.take()

    def report(self, cache: TieredCache, keys: Collection[OffloadKey]) -> list[Ticket]:
        """vLLM reports `keys` as done: end their stores. Returns tickets that not all ranks have reported yet.

        For these the report was of another store of the same key, or the workers have ended the store early.
        """
        left = []
        for store in RequestStore.reported(self.by_first_key, keys):
            # A store that is not known any more is from before weights changed: the reports of the ranks end it.
            if self._stores.pop(store.first_ticket, None) is not None:
                self._keys_without_slots = None
                if store.pending:  # the workers go on with it, if the report was of another store
                    self._cut(store)
                left += [ticket for ticket in store.parts if self.end(ticket, cache) is None]
        return left

    def end(self, ticket: Ticket, cache: TieredCache) -> bool | None:
        """Publish what all ranks report as done, and give the rest back; whether that was all of it.

        `None` until all have reported.
        """
        outcomes = self._context.reports.outcomes(ticket.number, ticket.slots)
        if not outcomes.all():
            return None
        is_void = ticket.void or not self._validity.is_valid(ticket)
        failure = Status.CANCELLED if is_void else self._context.failure(ticket)
        is_done, has_bug = (outcomes == DONE).all(axis=1), (outcomes == INTERNAL_ERROR).any(axis=1)
        statuses = [
            Status.INTERNAL_ERROR if bug else Status.OK if done and not is_void else failure
            for done, bug in zip(is_done.tolist(), has_bug.tolist(), strict=True)
        ]
        good = [status is Status.OK for status in statuses]
        if self._events is not None:
            stored = list(compress(ticket.keys, good))
            self._events.name(stored, cache_keys(stored, ticket.adapter))
        self._context.end(ticket, cache, statuses)
        return all(good)

    def void_all(self) -> list[Ticket]:
        """None of the stores publishes anything any more; the tickets whose slots workers may still write."""
        tickets = self.tickets
        for ticket in tickets:
            ticket.void = True
        for store in [each for each in self if each.pending]:
            self._cut(store)
        self._stores.clear()
        self._keys_without_slots = None
        return tickets
