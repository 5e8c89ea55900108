"""StoreJobs: slots that vLLM is offered for new chunks, until every rank has reported them; in parts, if they need more
slots than host memory has.

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
from longshore.cache import DropReason, GroupKeys, Presence, Protection, StoreOrder, TieredCache
from longshore.engines.vllm.metrics import EventTranslator
from longshore.engines.vllm.requests import (
    JobContext,
    PathRest,
    RequestState,
    StoreUnderWay,
    Ticket,
    has_more,
    knows,
    ours,
    position,
    residency,
)
from longshore.engines.vllm.weight_changes import BlockValidity
from longshore.engines.vllm.worker import JobPart, SlotsSpec
from longshore.errors import CacheError, IntegrityError
from longshore.runtime.rank_reports import DONE, INTERNAL_ERROR

_log = logging.getLogger(__name__)
NO_SLOTS = Slots(HOST, 0, ())


class StoreJobs:
    """The stores of one engine that vLLM has not reported yet. Calls are made inside a transaction of the runtime.

    Attributes:
        by_key: Stores that vLLM will report, oldest first, by their first key: it reports all keys of one together.
        may_stream: Whether stores may have parts: the connector passes them to workers.
        cut_off: How many chunks have found no slot before the workers ended their store: dropped by back-pressure.
    """

    def __init__(
        self, jobs: JobContext, validity: BlockValidity, events: EventTranslator | None, write_timeout: float
    ) -> None:
        """`write_timeout`: seconds for which a store waits for slots.

        The `events`, if there is one, learns vLLM's names of what is published.
        """
        self._jobs = jobs
        self._groups = jobs.groups
        self._validity = validity
        self._events = events
        self._write_timeout = write_timeout
        self._stores: dict[int, StoreUnderWay] = {}
        self._new_parts: list[JobPart] = []
        self._coming: set[Key] | None = None
        self.by_key: dict[OffloadKey, list[StoreUnderWay]] = {}
        self.may_stream = False
        self.cut_off = self._counted = 0
        self._newest = self._submitted = 0
        """The last store, and the last that the workers had been given when a step was planned."""

    def __len__(self) -> int:
        """Stores that vLLM has not reported."""
        return len(self._stores)

    def __iter__(self) -> Iterator[StoreUnderWay]:
        """These, oldest first."""
        return iter(list(self._stores.values()))

    @property
    def coming(self) -> set[Key]:
        """Our keys of the chunks that have no slots yet."""
        if self._coming is None:
            rests = [rest for store in self._stores.values() for rest in store.rest.values()]
            self._coming = {rest.path[at] for rest in rests for at in rest.positions[rest.done :]}
        return self._coming

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
        takes: bool,
    ) -> tuple[list[OffloadKey], SlotsSpec] | None:
        """Those of `keys` that are stored, and the slots of their first part; `None` if vLLM is to offer them again.

        Unless `takes`, there are none. Heads come first. As long as room is being made
        for a window, the same is offered again; without parts, also for a head that more is to come behind, and behind
        what the tiers have of the request.
        """
        first = self._jobs.ticket()
        store = StoreUnderWay(request, first.since, first.number, request.lora, request.adapter)
        first.lora, first.adapter = store.lora, store.adapter
        request.offered = max([request.offered, *(position(key, context) for key in keys)])
        runs = [NO_SLOTS] * len(self._groups)
        if request.tick is None:
            begins = {0: GroupKeys(request.ours(keys))}
            reuse_hint = request.hints.reuse_hint
            request.tick = cache.lookup(
                begins, first.since, protect=Protection.STEP, independent=True, reuse_hint=reuse_hint
            ).tick
            cache.end_step()  # what this step reads is lent by now: heads may make way for what follows them
        groups = self._groups.split(keys if takes else ())
        if self.may_stream:  # windows get room first: they have no parts, so they are offered again with all the others
            groups.sort(key=lambda each: self._groups.windows[each[0]] is None)
        for group, offered in groups:
            again, slots = self._offer_group(cache, store, group, offered, context, first)
            if again:
                return None
            if slots is not None:
                runs[group] = slots
        request.refused_since = None
        store.keys = first.keys + [key for rest in store.rest.values() for key in rest.theirs[rest.done :]]
        left = tuple(store.rest[group].left if group in store.rest else 0 for group in range(len(self._groups)))
        if store.keys:
            self._coming = None
            self._stores[store.number], self._newest = store, store.number
            self.by_key.setdefault(store.keys[0], []).append(store)
            store.parts += [first] if first.jobs else []
        spec = SlotsSpec(store.number, tuple(runs), self._validity.epoch, (), left if store.rest else ())
        return store.keys.copy(), spec

    def _offer_group(
        self,
        cache: TieredCache,
        store: StoreUnderWay,
        group: int,
        keys: list[OffloadKey],
        context: ReqContext,
        ticket: Ticket,
    ) -> tuple[bool, Slots | None]:
        """Whether vLLM is to offer the chunks of this group again; and slots for them, if there are any."""
        request, tokens, window = store.request, self._groups.tokens[group], self._groups.windows[group]
        slides = window is not None
        if slides and not (keys := [key for key in keys if position(key, context) > request.stale]):
            return False, None
        first, path = (0, request.ours(keys)) if slides else request.path_to(group, keys, context, tokens)
        begin, rest = divmod(position(keys[0], context) - 1, tokens)
        streams = self.may_stream and not slides and rest == tokens - 1
        if streams and first < len(path) and any(group in each.rest for each in self if each.request is request):
            store.rest[group] = PathRest(path, range(first, len(path)), keys[: len(path) - first], 0)
            return False, None
        comes_again = knows(cache, path[first - 1]) if first else not slides and has_more(keys, context)
        wait_for_room = (
            self.may_stream if slides else comes_again and rest == tokens - 1 and not streams
        ) and not ticket.jobs
        wait_for_room = wait_for_room and request.may_wait(ticket.since, self._jobs.timeout)
        past_window, last_window = request.past_window(group, window, keys, context)
        retention = request.hints.chunks(tokens, max(0, begin) - first)
        whole = GroupKeys(path, first, retention=retention, past_window=past_window)
        order = self._order(cache, store, whole, group, wait_for_room=wait_for_room, stream=streams)
        if order is None or order.retry:
            return order is not None, None
        request.windows[group] = last_window
        if order.later:
            positions = [*order.positions, *order.later]
            theirs = [keys[at - first] for at in positions]
            store.rest[group] = PathRest(path, positions, theirs, len(order.positions))
        if order.job is None:
            return False, None
        ticket.keys += [keys[at - first] for at in order.positions]
        ticket.jobs.append((order.job, order.slots.of))
        return False, order.slots.of

    @staticmethod
    def _order(
        cache: TieredCache,
        store: StoreUnderWay,
        path: GroupKeys,
        group: int,
        *,
        wait_for_room: bool = False,
        stream: bool = False,
    ) -> StoreOrder | None:
        """Have the cache give slots to the chunks of `path`; `None` if it refuses the call."""
        try:
            return cache.store({group: path}, wait_for_room=wait_for_room, stream=stream, tick=store.request.tick)[
                group
            ]
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
        now = self._jobs.clock()
        cache.counters.drops[HOST][DropReason.BACKPRESSURE] += self.cut_off - self._counted
        self._counted = self.cut_off
        waiting, served = set[str](), dict[str, float]()
        stores = [each for each in self if each.rest]
        for store in stores:
            served[store.request.name] = max(store.since, served.get(store.request.name, 0.0))
        for store in sorted(stores, key=lambda store: (served[store.request.name], store.number)):
            self._coming = None
            outcomes = {ticket.number: self.end(ticket, cache) for ticket in store.parts}
            store.parts = [ticket for ticket in store.parts if outcomes[ticket.number] is None]
            if False in outcomes.values() or now - served[store.request.name] > self._write_timeout:
                self._cut(store)
            elif store.request.name not in waiting:  # else it is behind what waits
                for group, rest in list(store.rest.items()):
                    while rest.left and self._next_part(cache, store, group):
                        pass
                    if not rest.left:
                        del store.rest[group]
                if store.rest:
                    waiting.add(store.request.name)
                elif store.has_gaps:
                    self._cut(store)

    def _next_part(self, cache: TieredCache, store: StoreUnderWay, group: int) -> bool:
        """Give slots to the next chunks of `group`, which follow one another; whether any got some, or need none."""
        rest = store.rest[group]
        ahead = rest.positions[rest.done : rest.done + self._jobs.slots]
        lacks = [each is Presence.ABSENT for each in residency(cache, [rest.path[at] for at in ahead]).presences]
        there = lacks.index(True) if True in lacks else len(lacks)
        if there:  # stored for another request meanwhile
            rest.done, store.has_gaps = rest.done + there, True
            return True
        first, run = ahead[0], 1
        while run < len(ahead) and lacks[run] and ahead[run] == first + run:
            run += 1
        retention = store.request.hints.chunks(self._groups.tokens[group], 0)
        path = GroupKeys(rest.path[: first + run], first, retention=retention)
        order = self._order(cache, store, path, group, stream=True)
        got, start = (0 if order is None else len(order.positions)), rest.done
        if order is not None and order.job is not None:
            ticket = self._jobs.ticket()
            ticket.lora, ticket.adapter = store.lora, store.adapter
            ticket.keys, ticket.jobs = list(rest.theirs[start : start + got]), [(order.job, order.slots.of)]
            store.parts.append(ticket)
            runs, begins = [NO_SLOTS] * len(self._groups), [0] * len(self._groups)
            runs[group], begins[group] = order.slots.of, start
            spec = SlotsSpec(ticket.number, tuple(runs), self._validity.epoch, tuple(begins))
            self._new_parts.append(JobPart(store.number, spec, is_store=True))
            rest.done, store.since = start + got, ticket.since
        kept = got + (0 if order is None else len(order.later))
        if kept < run:  # the cache will not store the others, of which it has counted those of this run
            self.cut_off += len(rest.positions) - start - (0 if order is None else run)
            rest.positions, store.has_gaps = rest.positions[: start + kept], True
        return got > 0

    def _cut(self, store: StoreUnderWay) -> None:
        """No more of `store` gets slots: the workers report it when they have copied what they were given."""
        self.cut_off += sum(rest.left for rest in store.rest.values())
        store.rest.clear()
        self._new_parts.append(JobPart(store.number, None, is_store=True))

    def take(self) -> list[JobPart]:
        """Parts that are sent to the workers in this step: of stores from before it, which vLLM submits a step late."""
        parts = [part for part in self._new_parts if part.first_ticket <= self._submitted]
        self._new_parts = [part for part in self._new_parts if part.first_ticket > self._submitted]
        self._submitted = self._newest
        return parts

    def abandon(self) -> list[JobPart]:
        """`take` after the control plane has failed: stores that have more parts are ended."""
        for store in [each for each in self if each.rest]:
            self._cut(store)
        return self.take()

    def report(self, cache: TieredCache, keys: Collection[OffloadKey]) -> list[Ticket]:
        """vLLM reports `keys` as done: end their stores. Returns those that not all ranks have reported yet.

        For these the report was of another store of the same key, or the workers have ended the store early.
        """
        left = []
        for store in StoreUnderWay.reported(self.by_key, keys):
            # A store that is not known any more is from before weights changed: the reports of the ranks end it.
            if self._stores.pop(store.number, None) is not None:
                self._coming = None
                if store.rest:  # the workers go on with it, if the report was of another store
                    self._cut(store)
                left += [ticket for ticket in store.parts if self.end(ticket, cache) is None]
        return left

    def end(self, ticket: Ticket, cache: TieredCache) -> bool | None:
        """Publish what all ranks report as done, and give the rest back; whether that was all of it.

        `None` until all have reported.
        """
        outcomes = self._jobs.reports.outcomes(ticket.number, ticket.slots)
        if not outcomes.all():
            return None
        failure, is_void = self._jobs.failure(ticket), ticket.void or not self._validity.is_valid(ticket)
        is_done, has_bug = (outcomes == DONE).all(axis=1), (outcomes == INTERNAL_ERROR).any(axis=1)
        statuses = [
            Status.INTERNAL_ERROR if bug else Status.OK if done and not is_void else failure
            for done, bug in zip(is_done.tolist(), has_bug.tolist(), strict=True)
        ]
        good = [status is Status.OK for status in statuses]
        if self._events is not None:
            stored = list(compress(ticket.keys, good))
            self._events.name(stored, ours(stored, ticket.adapter))
        self._jobs.end(ticket, cache, statuses)
        return all(good)

    def void_all(self) -> list[Ticket]:
        """None of the stores publishes anything any more; the tickets whose slots workers may still write."""
        tickets = self.tickets
        for ticket in tickets:
            ticket.void = True
        for store in [each for each in self if each.rest]:
            self._cut(store)
        self._stores.clear()
        self._coming = None
        return tickets
