"""Stores: slots that vLLM is offered for new chunks, until every rank has reported them.

    offer  ──► slots for what no tier has ──► workers copy ──► reports of all ranks ──► end: published, or given back

vLLM reports a store when all ranks say that they are done. What is published is what all of them report as done; a slot
is given back only after all ranks have reported it, because until then a worker may write there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import compress

from vllm.v1.kv_offload.base import OffloadKey, ReqContext

from longshore.boundary import HOST, Slots, TransferResult
from longshore.cache import GroupKeys, TieredCache, Until
from longshore.engines.vllm.changes import BlockValidity
from longshore.engines.vllm.metrics import EventTranslator
from longshore.engines.vllm.requests import ChunkGroups, RequestState, Ticket, has_more, knows, ours, position
from longshore.errors import CacheError, IntegrityError
from longshore.runtime.rank_reports import DONE, RankReports

_log = logging.getLogger(__name__)
NO_SLOTS = Slots(HOST, 0, ())


class Stores:
    """The stores of one engine that vLLM has not reported yet. Whoever calls has the control of the cache.

    Attributes:
        by_key: Stores that vLLM will report, oldest first, by their first key: it reports all keys of one together.
    """

    def __init__(
        self,
        groups: ChunkGroups,
        reports: RankReports,
        trust: BlockValidity,
        patience: float,
        events: EventTranslator | None,
    ) -> None:
        """`patience` is in seconds; the `events`, if there is one, learns vLLM's names of what is published."""
        self._groups = groups
        self._reports = reports
        self._validity = trust
        self._patience = patience
        self._events = events
        self._tickets: dict[int, Ticket] = {}
        self.by_key: dict[OffloadKey, list[Ticket]] = {}

    def __len__(self) -> int:
        """Stores that vLLM has not reported."""
        return len(self._tickets)

    def __iter__(self) -> Iterator[Ticket]:
        """Their tickets, oldest first."""
        return iter(list(self._tickets.values()))

    def offer(
        self,
        cache: TieredCache,
        request: RequestState,
        keys: Collection[OffloadKey],
        context: ReqContext,
        ticket: Ticket,
        *,
        takes: bool,
    ) -> list[Slots] | None:
        """The slots of each group for those of `keys` that `ticket` names then; `None` if vLLM is to offer them again.

        Unless `takes`, there are none. Heads come first. The same is offered again as long as room is being made for a
        head that more is to come behind, and behind what the tiers have of the request.
        """
        ticket.lora, ticket.adapter = request.lora, request.adapter
        request.offered = max([request.offered, *(position(key, context) for key in keys)])
        runs = [NO_SLOTS] * len(self._groups)
        if request.turn is None:
            begins = {0: GroupKeys(request.ours(keys))}
            returns = request.hints.returns
            request.turn = cache.lookup(begins, ticket.since, until=Until.STEP, each=True, returns=returns).turn
            cache.end_step()  # what this step reads is lent by now: heads may make way for what follows them
        for group, offered in self._groups.split(keys if takes else ()):
            again, slots = self._offer_group(cache, request, group, offered, context, ticket)
            if again:
                return None
            if slots is not None:
                runs[group] = slots
        request.refused_since = None
        if ticket.keys:
            self._tickets[ticket.number] = ticket
            self.by_key.setdefault(ticket.keys[0], []).append(ticket)
        return runs

    def _offer_group(
        self,
        cache: TieredCache,
        request: RequestState,
        group: int,
        keys: list[OffloadKey],
        context: ReqContext,
        ticket: Ticket,
    ) -> tuple[bool, Slots | None]:
        """Whether vLLM is to offer the chunks of this group again; and slots for them, if there are any."""
        tokens, window = self._groups.tokens[group], self._groups.windows[group]
        slides = window is not None
        if slides and not (keys := [key for key in keys if position(key, context) > request.stale]):
            return False, None
        first, path = (0, request.ours(keys)) if slides else request.path_to(group, keys, context, tokens)
        comes_again = knows(cache, path[first - 1]) if first else not slides and has_more(keys, context)
        begin, rest = divmod(position(keys[0], context) - 1, tokens)
        patient = comes_again and rest == tokens - 1 and not ticket.jobs
        patient = patient and request.may_wait(ticket.since, self._patience)
        try:
            retention = request.hints.chunks(tokens, max(0, begin) - first)
            slid, last_window = request.slid(group, window, keys, context)
            whole = GroupKeys(path, first, retention=retention, slid=slid)
            order = cache.store({group: whole}, patient=patient, turn=request.turn)[group]
        except IntegrityError:
            raise
        except CacheError as error:  # before anything has changed
            _log.warning(
                "request %s: the cache refused %d chunks, which are not stored: %s", context.req_id, len(keys), error
            )
            return False, None
        if order.again:
            return True, None
        request.windows[group] = last_window
        if order.job is None:
            return False, None
        ticket.keys += [keys[at - first] for at in order.positions]
        ticket.jobs.append((order.job, order.slots.of))
        return False, order.slots.of

    def report(self, keys: Collection[OffloadKey], end: Callable[[Ticket], bool]) -> list[Ticket]:
        """vLLM reports `keys` as done: `end` their stores. Returns those that not all ranks have reported yet.

        For these the report was of another store of the same key.
        """
        left = []
        for ticket in Ticket.reported(self.by_key, keys):
            # A store that is not known any more is from before weights changed: the reports of the ranks end it.
            if self._tickets.pop(ticket.number, None) is not None and not end(ticket):
                left.append(ticket)
        return left

    def end(
        self, ticket: Ticket, cache: TieredCache, now: float, image_bytes: Sequence[int]
    ) -> list[TransferResult] | None:
        """Publish what all ranks report as done, and give the rest back; `None` until all have reported."""
        outcomes = self._reports.outcomes(ticket.number, ticket.slots)
        if not outcomes.all():
            return None
        good = (outcomes == DONE).all(axis=1).tolist()
        if ticket.void or not self._validity.is_valid(ticket):
            good = [False] * len(good)
        if self._events is not None:
            stored = list(compress(ticket.keys, good))
            self._events.name(stored, ours(stored, ticket.adapter))
        return ticket.end(cache, good, now, image_bytes)

    def void_all(self) -> list[Ticket]:
        """None of the stores publishes anything any more; their tickets, whose slots workers may still write."""
        tickets = list(self)
        for ticket in tickets:
            ticket.void = True
        self._tickets.clear()
        return tickets
