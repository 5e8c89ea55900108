"""The manager's state of a request, the keys of its chunks, and the slots that workers have.

    vLLM's key   `OffloadKey`: hash of the last block of a chunk (16 or 32 bytes) ┊ KV cache group (4 bytes)
    cache key    `Key` of `TieredCache`: the last 32 bytes of vLLM's key, padded with zeros at the end

Each group therefore has keys of its own. The cache keys of a request with a LoRA adapter are SHA-256 of the adapter's
digest and vLLM's key. The scope is stored in the records of tiers that outlive the process.

Three numbers name a copy between device and host memory:

    vllm_job    of vLLM, for a whole load or store of one request
    ticket      of the manager, for each part of it; it is the number of the transfer in each worker
    cache_job   of `TieredCache`, for the slots of one KV cache group in a part
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, islice, takewhile
from operator import eq
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.base import Locality, LookupResult, Medium, OffloadKey, ReqContext

from longshore.boundary import FILE, REMOTE, Key, Slots, Status, TransferResult
from longshore.cache import GroupKeys, Lease, Presence, Protection, Residency, TieredCache
from longshore.errors import HintError
from longshore.hints import RequestHints
from longshore.runtime.rank_reports import RankReports

if TYPE_CHECKING:
    from longshore.tiers.remote.cluster import ClusterNode
    from longshore.tiers.remote.peers import PeerTier

_KEY_BYTES = 32
GROUP_BYTES = 4
"""Bytes of the group number at the end of vLLM's keys."""


def cache_keys(vllm_keys: Iterable[bytes], adapter: bytes = b"") -> list[Key]:
    """The cache keys of chunks; `adapter`: digest of the LoRA adapter that they were computed with, if any."""
    if adapter:
        return [hashlib.sha256(adapter + key).digest() for key in vllm_keys]
    return [key[-_KEY_BYTES:] if len(key) >= _KEY_BYTES else key.ljust(_KEY_BYTES, b"\0") for key in vllm_keys]


_log = logging.getLogger(__name__)

OK = Status.OK
HINTS = "longshore"
"""Where a request has its hints: this key of `kv_transfer_params`, or the action of this type among its KV hints."""


SOURCE = "remote_kv_source"
"""Where a request names the replica that has its blocks: `{"host": ..., "port": ...}` in `kv_transfer_params`."""


@dataclass(frozen=True, slots=True)
class ChunkGroups:
    """The KV cache groups of one engine; all sequences are by our number of a group.

    Attributes:
        numbers: Our number of each group, by the end of its keys.
        tokens: Tokens of a chunk.
        windows: How many chunks its window has; `None` for a group that never slides.
    """

    numbers: dict[bytes, int]
    tokens: Sequence[int]
    windows: Sequence[int | None]

    def __len__(self) -> int:
        """How many groups there are."""
        return len(self.tokens)

    def of(self, key: OffloadKey) -> int:
        """Our number of the group that `key` belongs to."""
        return self.numbers[key[-GROUP_BYTES:]]

    def split(self, keys: Collection[OffloadKey]) -> list[tuple[int, list[OffloadKey]]]:
        """Keys of each group that has any, by our number of it."""
        if len(self) == 1:
            return [(0, list(keys))] if keys else []
        parts: dict[int, list[OffloadKey]] = {}
        for key in keys:
            parts.setdefault(self.of(key), []).append(key)
        return sorted(parts.items())


@dataclass(slots=True)
class RequestPath:
    """Whole chunks of a request in one KV cache group, from the first one on, as far as vLLM has named them.

    Attributes:
        vllm_keys: vLLM's keys.
        cache_keys: The cache keys of these.
        read: How many of all keys that vLLM has named were read.
        adapter: Digest of the adapter that `cache_keys` are of.
    """

    vllm_keys: list[OffloadKey] = field(default_factory=list)
    cache_keys: list[Key] = field(default_factory=list)
    read: int = 0
    adapter: bytes = b""

    def extend(self, ends: dict[OffloadKey, int], of_group: bytes, tokens: int) -> None:
        """Add the chunks that vLLM has named since: of `tokens` tokens each, with keys that end with `of_group`.

        `ends` are `end_tokens` of the request.
        """
        fresh: list[OffloadKey] = []
        for key, end in islice(ends.items(), self.read, None):
            if end == (len(self.vllm_keys) + len(fresh) + 1) * tokens and key.endswith(of_group):
                fresh.append(key)
        self.vllm_keys += fresh
        self.cache_keys += cache_keys(fresh, self.adapter)
        self.read = len(ends)


@dataclass(slots=True)
class RequestState:
    """What is known of one request.

    Attributes:
        name: vLLM's, unique.
        answers: Lookup results of this step, for all chunks of the request that vLLM has named.
        asked_keys: vLLM's keys of these chunks.
        residency: Where they are.
        colder: Those in a colder tier that are to be prefetched.
        wanted: Chunks that vLLM has asked for in this step and that are no misses, in order, if some are `colder`.
        waits: Whether vLLM waits for any of them.
        load_limit: Up to this token, chunks are read from colder tiers: the gate's answer; `None` before.
        waiting_since: When it began to wait.
        leases: On chunks that were prefetched for it, until they are loaded.
        leased: The chunks of these leases.
        probes: Numbers of the probes of remote stores for its chunks, once there are any.
        fetches_end: Whether nothing more is fetched for it from remote stores.
        origins: The tier or remote store that a chunk was prefetched from for it.
        loads_in_parts: Whether more was reported as a hit than fits host memory; it is loaded in parts.
        refused_since: Since when vLLM is asked to offer its chunks again.
        offered: The token up to which its chunks were offered.
        offered_before_reset: The same at the last reset, after which vLLM offers them again: of sliding-window groups,
            it may have given the blocks of these chunks to other requests since. -1 without a reset.
        windows: Of each group that slides, by our number, the chunks of its last window that were offered.
        load_failed: A load for it has failed; it gets no other, because that might fail again and again.
        is_finishing: Its next offer of chunks is the last one.
        finished: vLLM has finished it.
        counted: Its misses have been counted.
        paths: By our number of a KV cache group, the chunks that follow one another from the first one on.
        hints: Its `RequestHints`.
        number: Its number in the cache, from its first lookup or store on.
        source: The replica that it names as the source of its blocks.
        next_probe: When that is probed again, because it computes or stores some of them; 0 if not.
        computed_keys: Cache keys of its chunks that no tier had, kept if peers are served.
        lora: vLLM's `LoRARequest`, if the connector has reported one.
        adapter: Digest of that adapter, once it is known.
    """

    name: str
    answers: dict[OffloadKey, LookupResult] = field(default_factory=dict)
    asked_keys: list[OffloadKey] = field(default_factory=list)
    residency: Residency | None = None
    colder: set[OffloadKey] = field(default_factory=set)
    wanted: dict[OffloadKey, None] = field(default_factory=dict)
    waits: bool = False
    load_limit: float | None = None
    waiting_since: float | None = None
    leases: list[Lease] = field(default_factory=list)
    leased: set[OffloadKey] = field(default_factory=set)
    probes: tuple[int, ...] | None = None
    fetches_end: bool = False
    origins: dict[OffloadKey, str] = field(default_factory=dict)
    loads_in_parts: bool = False
    refused_since: float | None = None
    offered: int = 0
    offered_before_reset: int = -1
    windows: dict[int, list[OffloadKey]] = field(default_factory=dict)
    load_failed: bool = False
    is_finishing: bool = False
    finished: bool = False
    counted: bool = False
    paths: dict[int, RequestPath] = field(default_factory=dict)
    hints: RequestHints = field(default_factory=RequestHints)
    number: int | None = None
    source: ClusterNode | None = None
    next_probe: float = 0.0
    computed_keys: set[Key] = field(default_factory=set)
    lora: Any = None
    adapter: bytes = b""

    def cache_keys(self, vllm_keys: Iterable[OffloadKey]) -> list[Key]:
        """The cache keys of its chunks."""
        return cache_keys(vllm_keys, self.adapter)

    def path_to(
        self, group: int, keys: Sequence[OffloadKey], context: ReqContext, tokens: int
    ) -> tuple[int, list[Key]]:
        """The index at which `keys` begin in the path of the request in `group`, and the cache keys of that path.

        The path ends with `keys`. Each chunk has `tokens` tokens. Of `keys`, those that do not follow the one before
        them are left out; all are if vLLM has not named the chunks before them.
        """
        path, ends = self.paths.get(group), end_tokens(context)
        if path is None or path.adapter != self.adapter:
            path = self.paths[group] = RequestPath(adapter=self.adapter)
        if path.read < len(ends):
            path.extend(ends, keys[0][-GROUP_BYTES:], tokens)
        begin = end_token(keys[0], context)
        first = max(0, -(-begin // tokens) - 1)
        if first > len(path.vllm_keys):
            return 0, []
        if begin % tokens:  # the first tokens of a chunk
            return first, [*path.cache_keys[:first], *self.cache_keys(keys[:1])]
        alike = takewhile(bool, map(eq, keys, path.vllm_keys[first : first + len(keys)]))
        return first, path.cache_keys[: first + len(list(alike))]

    def looked_up(self, vllm_keys: list[OffloadKey]) -> Residency | list[Key]:
        """Where these chunks are, if this step's lookup covered them; else their cache keys."""
        if self.residency is not None and vllm_keys and vllm_keys[0] in self.answers:
            begin = self.asked_keys.index(vllm_keys[0])
            end = begin + len(vllm_keys)
            if self.asked_keys[begin:end] == vllm_keys:
                return self.residency.part(begin, end)
            if all(map(self.answers.__contains__, vllm_keys)):
                at = {key: index for index, key in enumerate(self.asked_keys)}
                return self.residency.pick([at[key] for key in vllm_keys])
        return self.cache_keys(vllm_keys)

    def past_window(
        self, group: int, window: int | None, keys: list[OffloadKey], context: ReqContext
    ) -> tuple[Sequence[Key], list[OffloadKey]]:
        """Chunks that leave the last `window` of `group` when it slides on to `keys`; and the new window."""
        before = self.windows.get(group, [])
        if window is None or (before and end_token(keys[0], context) <= end_token(before[-1], context)):
            return (), before  # offered once more, when the request ends
        path = before + keys
        return self.cache_keys(before[: max(0, len(path) - window)]), path[-window:]

    def may_wait(self, now: float, timeout: float) -> bool:
        """Whether its chunks may be offered again: for at most `timeout` seconds, and not after the last offer."""
        if self.is_finishing:
            return False
        if self.refused_since is None:
            self.refused_since = now
        return now - self.refused_since <= timeout

    def release(self, cache: TieredCache) -> None:
        """Release its leases."""
        for lease in self.leases:
            cache.release(lease)
        self.leases.clear()
        self.leased.clear()

    def drop_answers(self) -> None:
        """Drop the answers of this step."""
        self.answers, self.asked_keys, self.residency = {}, [], None
        self.colder, self.wanted, self.waits = set(), {}, False


@dataclass(slots=True)
class Ticket:
    """Slots that the workers write or read for one part of a load or store.

    Attributes:
        number: Used once.
        since: When it was made.
        epoch: How often weights had changed, and device memory had been freed or restored, when it was made.
        lora: As in `RequestState`.
        adapter: As in `RequestState`.
        cache_jobs: Jobs of `TieredCache`, with the slots of each.
        keys: vLLM's keys of the chunks, if it is a store.
        void: Whether it is a store from before a reset, of which nothing is published.
    """

    number: int
    since: float
    epoch: tuple[int, int]
    lora: Any = None
    adapter: bytes = b""
    cache_jobs: list[tuple[int, Slots]] = field(default_factory=list)
    keys: list[OffloadKey] = field(default_factory=list)
    void: bool = False

    @property
    def slots(self) -> list[int]:
        """The slots of all cache jobs."""
        return [index for _, slots in self.cache_jobs for index in slots.indices]


@dataclass(slots=True)
class JobContext:
    """What the loads and stores of one engine have in common.

    Attributes:
        groups: Its KV cache groups.
        reports: Where ranks report what they have copied.
        epoch: How often weights had changed at the manager's last check, and device memory was freed or restored.
        clock: In seconds.
        timeout: Seconds for which a request waits for chunks, or offers chunks again.
        slots: Slots of host memory.
        image_bytes: Bytes of an image of each size class.
    """

    groups: ChunkGroups
    reports: RankReports
    epoch: Callable[[], tuple[int, int]]
    clock: Callable[[], float]
    timeout: float
    slots: int
    image_bytes: Sequence[int]
    _numbers: Iterator[int] = field(default_factory=lambda: count(1))

    def new_ticket(self) -> Ticket:
        """A new ticket."""
        return Ticket(next(self._numbers), self.clock(), self.epoch())

    def new_load_ticket(self) -> Ticket:
        """A new ticket for a load, whose reports overwrite none on a load that has not ended."""
        ticket = self.new_ticket()
        for _ in range(self.reports.LOADS):
            if self.reports.begin_load(ticket.number):
                break
            ticket = self.new_ticket()
        return ticket

    def end(self, ticket: Ticket, cache: TieredCache, statuses: Sequence[Status] = ()) -> list[TransferResult]:
        """Tell the cache that all cache jobs of `ticket` have ended, with the `statuses` of their slots, in order.

        Without `statuses`, all slots are `OK`; or none is, if a rank has reported a load as failed: the device has not
        got its chunks, which stay in host memory. Returns the results.
        """
        number = ticket.number
        if not statuses:
            status = OK if not self.reports.load_has_failed(number) else self.failure(ticket)
            if status is not OK and self.reports.load_has_internal_error(number):
                status = Status.INTERNAL_ERROR
            statuses = (status,) * len(ticket.slots)
        now, left, results = self.clock(), iter(statuses), []
        for cache_job, slots in ticket.cache_jobs:
            mine = tuple(islice(left, len(slots.indices)))
            nbytes = mine.count(OK) * self.image_bytes[slots.size_class]
            results.append(TransferResult(cache_job, mine, nbytes, (now - ticket.since) / len(ticket.cache_jobs)))
        cache.apply_results(results, now)
        self.reports.end_load(number)
        return results

    def failure(self, ticket: Ticket) -> Status:
        """The status of slots of `ticket` that a rank has reported as failed, if that is no internal error.

        Ranks refuse jobs that were ordered before weights changed or device memory was freed: these are cancelled.
        """
        is_outdated = ticket.epoch != (self.reports.weight_changes, self.reports.sleep_changes)
        return Status.CANCELLED if is_outdated else Status.DEVICE_ERROR


@dataclass(slots=True)
class PendingChunks:
    """Chunks of a store in one KV cache group, some of which have no slots yet.

    Attributes:
        path: Cache keys from the first chunk of the prompt on.
        indices: Those of the chunks in `path`, ascending.
        vllm_keys: vLLM's keys of the chunks.
        placed: How many of them have got slots, or need none.
    """

    path: Sequence[Key]
    indices: Sequence[int]
    vllm_keys: Sequence[OffloadKey]
    placed: int

    @property
    def left(self) -> int:
        """How many chunks have no slots."""
        return len(self.indices) - self.placed


@dataclass(slots=True)
class RequestStore:
    """One store job of vLLM: the chunks of `request` that one call of `prepare_store` accepted.

    Attributes:
        since: When chunks of it got slots last.
        first_ticket: The ticket of its first part, by which workers know it.
        lora: As in `RequestState`.
        adapter: As in `RequestState`.
        keys: vLLM's keys of all its chunks.
        parts: Tickets of the parts that workers copy.
        pending: The chunks of each KV cache group that has some without slots, by our number.
        has_gaps: Whether some of these get no slots: another request has stored them meanwhile, or the cache refuses.
    """

    request: RequestState
    since: float
    first_ticket: int
    lora: Any = None
    adapter: bytes = b""
    keys: list[OffloadKey] = field(default_factory=list)
    parts: list[Ticket] = field(default_factory=list)
    pending: dict[int, PendingChunks] = field(default_factory=dict)
    has_gaps: bool = False

    @staticmethod
    def reported(stores: dict[OffloadKey, list[RequestStore]], keys: Iterable[OffloadKey]) -> list[RequestStore]:
        """Those of the `stores`, by first key, whose keys vLLM reports as done, taken out of `stores`.

        Of those that share keys, one that has slots for all, and of these the oldest: vLLM does not say which it is.
        """
        left, done = set(keys), []
        candidates = [store for key in stores.keys() & left for store in stores[key]]
        for store in sorted(candidates, key=lambda store: (bool(store.pending), store.first_ticket)):
            first = store.keys[0]
            if first in left:
                left.difference_update(store.keys)
                done.append(store)
                stores[first].remove(store)
                if not stores[first]:
                    del stores[first]
        return done


def hints_of(context: ReqContext, usual: RequestHints) -> RequestHints:
    """What a request says of its blocks, or the `usual`; without files or stores that its `load_tiers` leave out.

    Nothing is stored of a request whose hints cannot be read, which the log says: it may have asked for just that.
    """
    said = (context.kv_transfer_params or {}).get(HINTS)
    for action in context.kv_hints.actions if context.kv_hints is not None else ():
        if said is None and action.action_type == HINTS:
            said = action.payload
    try:
        hints = usual if said is None else RequestHints.parse(said)
    except HintError as error:
        source = "kv_transfer_params" if HINTS in (context.kv_transfer_params or {}) else "kv_hints"
        message = "request %s: invalid %s[%r] (%s); none of its blocks are stored"
        _log.warning(message, context.req_id, source, HINTS, error)
        hints = RequestHints(store=False)
    for kind, locality in ((FILE, Locality.LOCAL), (REMOTE, Locality.REMOTE)):
        if kind in hints.load and not context.load_tier_filter.allows(Medium.STORAGE, locality):
            hints = hints.model_copy(update={"load": tuple(tier for tier in hints.load if tier != kind)})
    return hints


def source_of(context: ReqContext, peers: PeerTier | None) -> ClusterNode | None:
    """The replica that a request names as the source of its blocks; `None` if it names none, or one it may not."""
    if peers is None or (said := (context.kv_transfer_params or {}).get(SOURCE)) is None:
        return None
    try:
        return peers.parse(said)
    except HintError as error:
        _log.warning("request %s: kv_transfer_params[%r] is not used: %s", context.req_id, SOURCE, error)
        return None


def end_tokens(context: ReqContext) -> dict[OffloadKey, int]:
    """vLLM's keys of all chunks that it has named, in order, each with the number of prompt tokens up to its end."""
    return getattr(context, "_offload_key_positions", {})


def end_token(key: OffloadKey, context: ReqContext) -> int:
    """The number of prompt tokens up to the end of the chunk `key`; 0 if vLLM has not named it."""
    return context.get_offload_key_position(key) or 0


def has_later_chunks(keys: Sequence[OffloadKey], context: ReqContext) -> bool:
    """Whether vLLM has named chunks after `keys` in their KV cache group."""
    of_group = (key for key in reversed(end_tokens(context)) if key[-GROUP_BYTES:] == keys[0][-GROUP_BYTES:])
    return bool(next(of_group, keys[-1]) != keys[-1])


def residency(cache: TieredCache, keys: Sequence[Key]) -> Residency:
    """Where chunks are now, without a lease."""
    return cache.lookup({0: GroupKeys(keys)}, 0.0, protect=Protection.NONE, independent=True).residency[0]


def has_chunk(cache: TieredCache, key: Key) -> bool:
    """Whether a tier has `key`, or a copy of it is in flight."""
    return residency(cache, [key]).presences[0] is not Presence.ABSENT
