"""Replay in virtual time: the requests of a trace through the control plane that runs in production.

    arrives ──► waits ──► admitted: match, gate, onboard ──► loaded ──► computed: first token, commit ──► released
               in order    (twice as many as engines)       the rest on the next engine that is idle
                           probe, fetch: what only a remote store has arrives in host memory, and is onboarded then

`TieredCache` and `Gate` are those of production, called as an engine's adapter calls them. The durations of copies and
prefills are modelled (`longshore.trace.machine`), and so is the engine, which computes one prompt at a time. Decoding
takes no time, answers are not stored, and the device keeps nothing: hits in the tiers are in addition to those in the
engine's own prefix cache.
"""

from __future__ import annotations

import enum
import heapq
import math
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile

from xxhash import xxh3_128_digest

from longshore.boundary import (
    DEVICE,
    FILE,
    HOST,
    REMOTE,
    Key,
    Probe,
    ProbeResult,
    Result,
    Status,
    Transfer,
    TransferResult,
)
from longshore.cache import (
    CacheSettings,
    Counters,
    DropReason,
    Found,
    Gate,
    GroupKeys,
    Lease,
    Presence,
    Run,
    TieredCache,
    TierSpec,
    Until,
)
from longshore.cache.eviction import EvictionPolicy
from longshore.config import format_bytes
from longshore.errors import IntegrityError, TraceError
from longshore.trace.machine import RemoteStore, Timing, VirtualMovers
from longshore.trace.parsing import TraceRequest

_ROOT = xxh3_128_digest(b"longshore replay 2")

MOST_BLOCKS = 1 << 28
"""Largest number of blocks of a tier, because each slot takes memory even if it is never filled."""

_TIERS = (HOST, FILE, REMOTE)


class Loss(enum.Enum):
    """Why a block was computed. Closed: each complete block of a prompt was loaded, or has one of these causes."""

    FIRST_USE = "first_use"  # no request has asked for it before
    LAST_TOKEN = "last_token"  # noqa: S105 - the last token of a prompt is always computed, and this block ends with it
    PENDING = "pending"  # asked for before, and not in host memory yet
    BACKPRESSURE = "backpressure"  # not stored: what was to make way had not been copied down yet
    NOT_STORED = "not_stored"  # not stored, for other reasons
    FORGOTTEN = "forgotten"  # evicted from host memory before a colder tier had a copy
    EVICTED = "evicted"  # evicted from the coldest tier that had it
    NOT_LOADED = "not_loaded"  # found, but no room for it, or not in time
    CHOICE = "computed_by_choice"  # found, but faster to compute than to load


class _Losses:
    """What has become of each block that was asked for, by what movers report and by what the cache takes.

    About 100 bytes for each different block.
    """

    def __init__(self, coldest: str) -> None:
        self.counts = Counter[Loss]()
        self._coldest = coldest
        self._cause: dict[int, Loss] = {}
        """The cause that counts if the block is asked for and not there; by the first 8 bytes of its key."""

    def miss(self, keys: Sequence[Key], usable: int) -> None:
        """A request looked for `keys`, of which the first `usable` may be loaded, and found none of them."""
        for at, key in enumerate(keys):
            name = int.from_bytes(key[:8])
            cause = self._cause.get(name, Loss.FIRST_USE)
            if cause is Loss.FIRST_USE:
                self._cause[name] = Loss.PENDING
            elif at >= usable:
                cause = Loss.LAST_TOKEN
            self.counts[cause] += 1

    def arrived(self, transfer: Transfer, result: TransferResult) -> None:
        """Copies have come into a tier."""
        tier = transfer.route.destination
        if tier == DEVICE or transfer.route.source not in (DEVICE, HOST):
            return
        cause = Loss.FORGOTTEN if tier == HOST and self._coldest != HOST else Loss.EVICTED
        for item, status in zip(transfer.items, result.statuses, strict=True):
            if status is Status.OK:
                self._cause[int.from_bytes(item.key[:8])] = cause

    def refused(self, keys: Sequence[Key], cause: Loss) -> None:
        """Host memory did not take `keys`."""
        self._cause.update(dict.fromkeys((int.from_bytes(key[:8]) for key in keys), cause))


@dataclass(slots=True)
class ReplayTally:
    """Counters of a replay. Blocks are the complete blocks of prompts; times are in seconds, one per request."""

    requests: int = 0
    block_refs: int = 0
    prompt_tokens: int = 0
    hits: Counter[str] = field(default_factory=Counter)
    computed_by_choice: int = 0
    computing: float = 0.0
    recomputing: float = 0.0
    ttft: array[float] = field(default_factory=lambda: array("d"))
    recompute: array[float] = field(default_factory=lambda: array("d"))
    first: float = 0.0
    last: float = 0.0

    @property
    def seconds(self) -> float:
        """From the first arrival to the last."""
        return self.last - self.first


@dataclass(slots=True)
class _LeasedRun:
    """Chunks that a visit holds, and how many of them were ordered onto the device."""

    lease: Lease
    chunks: int
    ordered: int = 0
    fetched: bool = False


@dataclass(slots=True)
class _Visit:
    """A request on its way.

    Attributes:
        keys: Of its whole blocks; as many as are `usable` may be loaded, for the last token is always computed.
        parts: What is held for it, in order, `matched` chunks in all.
        awaited: Probes or fetches that it waits for, before it will `go_on`.
        until: When the control plane gives its load up.
        wanted: Leading chunks that are to be loaded.
        loaded: Leading chunks that have come onto the device.
        tick: Its tick in the cache, once it was matched.
    """

    request: TraceRequest
    arrival: float
    number: int = 0
    keys: Sequence[Key] = ()
    usable: int = 0
    parts: list[_LeasedRun] = field(default_factory=list)
    matched: int = 0
    awaited: set[int] = field(default_factory=set)
    go_on: Callable[[], None] | None = None
    until: float = math.inf
    wanted: int = 0
    loaded: int = 0
    tick: int | None = None


class _Working:
    """Engines in virtual time: the number `idle`, prompts `ready` for them, and prompts in progress by end time."""

    def __init__(self, count: int) -> None:
        self.idle = count
        self.ready: deque[_Visit] = deque()
        self.under_way: list[tuple[float, int, _Visit, float]] = []
        self.started = 0


class TieredReplay:
    """One cache shared by `engines` engines, with tiers of given sizes.

    Args:
        timing: Timing of the model on its machine.
        block_tokens: Tokens per block of the trace; one block is one chunk.
        tiers: Bytes of `host`, and optionally of `file` and of a `remote` store, in this order.
        policy: Eviction policy of host memory and files; a remote store evicts its least recently used blocks.
        engines: Number of prompts computed at a time.
        gated: Whether the gate decides between loading and computing; without it, all blocks found are loaded.
        admission: Whether the file tier, once full, refuses blocks that promise fewer hits than those they replace.

    Raises:
        TraceError: A tier is smaller than a block or larger than `MOST_BLOCKS`; no host memory, engine or token per
            block.
    """

    def __init__(
        self,
        timing: Timing,
        block_tokens: int,
        tiers: dict[str, int],
        policy: type[EvictionPolicy],
        *,
        engines: int = 1,
        gated: bool = True,
        admission: bool = True,
    ) -> None:
        names = list(tiers)
        if engines < 1 or block_tokens < 1 or HOST not in names or names != [n for n in _TIERS if n in names]:
            raise TraceError(
                f"expected at least one engine, one token per block and host memory, got {engines}, {block_tokens}"
            )
        image = block_tokens * timing.geometry.kv_bytes_per_token
        for name, nbytes in tiers.items():
            if nbytes < image:
                raise TraceError(f"{name}: expected at least the {image} bytes of one block, got {nbytes} bytes")
            if nbytes // image > MOST_BLOCKS:
                raise TraceError(
                    f"{name}: expected at most {format_bytes(image * MOST_BLOCKS)}, {MOST_BLOCKS:,} blocks of "
                    f"{format_bytes(image)}, got {format_bytes(nbytes)}"
                )
        slots = {name: nbytes // image for name, nbytes in tiers.items()}
        self.slots = sum(slots.values())
        self.remote = RemoteStore(slots.pop(REMOTE)) if REMOTE in slots else None
        self.tally = ReplayTally()
        self._losses = _Losses(names[-1])
        specs = [TierSpec(name, count, image, policy) for name, count in slots.items()]
        self.cache = TieredCache(
            specs, CacheSettings(admission=admission), remote=[REMOTE] if self.remote is not None else []
        )
        self.movers = VirtualMovers(timing, image, self.remote)
        self.image_bytes = image
        self.timing, self.block_tokens, self.engines = timing, block_tokens, engines
        self._gate = Gate(names, block_tokens, image) if gated else None
        self._sources = [name for name in names if name != HOST]
        self._working = _Working(engines)
        self._waiting: deque[_Visit] = deque()
        self._awaited: dict[int, list[_Visit]] = {}
        self._loading: list[_Visit] = []
        self._admitted, self._most = 0, 2 * engines
        self._without = [0.0] * engines
        self._now = 0.0

    @property
    def losses(self) -> dict[Loss, int]:
        """Blocks computed, by cause: with those loaded, all that were asked for."""
        return {cause: self._losses.counts[cause] for cause in Loss}

    @property
    def counters(self) -> Counters:
        """Those of the control plane."""
        return self.cache.counters

    def run(self, requests: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
        """Serve `requests`, in order of arrival; yields each at its arrival, and ends when all have been served.

        Raises `TraceError` for a request whose ids do not cover its tokens.
        """
        for request in requests:
            blocks = request.input_length // self.block_tokens
            if len(request.hash_ids) < blocks:
                raise TraceError(
                    f"request at {request.timestamp_ms} ms: expected {blocks} hash ids for {request.input_length} "
                    f"tokens in blocks of {self.block_tokens}, got {len(request.hash_ids)}"
                )
            arrival = max(self._now, request.timestamp_ms / 1000)
            self._advance(arrival)
            self._arrive(_Visit(request, arrival), blocks)
            yield request
        self._advance(math.inf)
        if left := len(self._loading) + len(self._waiting):
            raise IntegrityError(f"{left} requests of the replay were never completed: please report this")

    # ------------------------------------------------------------------ time

    def _advance(self, until: float) -> None:
        """Let everything happen that ends at `until` or before."""
        working = self._working
        while True:
            end = self.movers.next_end
            computed = working.under_way[0][0] if working.under_way else None
            if end is not None and end <= until and (computed is None or end <= computed):
                self._now = end
                self._ended(*self.movers.pop())
            elif computed is not None and computed <= until:
                self._now = computed
                _, _, visit, seconds = heapq.heappop(working.under_way)
                self._computed(visit, seconds)
            else:
                break
        if until < math.inf:
            self._now = until

    def _submit(self) -> None:
        if commands := self.cache.take():
            self.movers.submit(commands, self._now)

    def _ended(self, command: Transfer | Probe, result: TransferResult | ProbeResult) -> None:
        """Apply a mover's result to the gate and the cache, and continue the requests that wait for it."""
        number, onto_device = result.probe if isinstance(result, ProbeResult) else result.job, False
        if isinstance(command, Transfer) and isinstance(result, TransferResult):
            source, onto_device = command.route.source, command.route.destination == DEVICE
            self._losses.arrived(command, result)
            if self._gate is not None and result.bytes and (onto_device or source in self._sources):
                self._gate.observe_load(source, result.bytes, result.seconds, result.queued_seconds, self._now)
        self._apply(result)
        for visit in self._awaited.pop(number, ()):
            visit.awaited.discard(number)
            if not visit.awaited and visit.go_on is not None:
                visit.go_on()
        if self._loading and (onto_device or self._loading[0].until <= self._now):
            for visit in list(self._loading):
                self._settle(visit)

    def _apply(self, result: Result) -> None:
        self.cache.apply([result], self._now)
        self._submit()

    def _wait(self, visit: _Visit, jobs: Sequence[int], go_on: Callable[[], None]) -> None:
        """Have `visit` go on when all of `jobs` have ended, of which there is one at least."""
        visit.awaited, visit.go_on = set(jobs), go_on
        for job in jobs:
            self._awaited.setdefault(job, []).append(visit)

    # ------------------------------------------------------------------ the way of a request

    def _arrive(self, visit: _Visit, blocks: int) -> None:
        tally, request = self.tally, visit.request
        tally.first = visit.arrival if not tally.requests else tally.first
        tally.last = visit.arrival
        visit.number = tally.requests
        tally.requests += 1
        tally.block_refs += blocks
        tally.prompt_tokens += request.input_length
        free = heapq.heappop(self._without)
        seconds = self.timing.prefill(0, request.input_length)
        done = max(free, visit.arrival) + seconds
        tally.recomputing += seconds
        heapq.heappush(self._without, done)
        tally.recompute.append(done - visit.arrival)
        tally.ttft.append(0.0)
        self._waiting.append(visit)
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._admitted < self._most:
            self._admitted += 1
            visit = self._waiting.popleft()
            length = visit.request.input_length
            visit.keys = keys_of(visit.request.hash_ids[: length // self.block_tokens])
            visit.usable = (length - 1) // self.block_tokens
            found = self._look(visit, visit.usable)
            if found.probes:
                self._wait(visit, found.probes, partial(self._look_again, visit))
            else:
                self._load(visit, self._coming(visit, found))
            self._submit()

    def _look(self, visit: _Visit, end: int) -> Found:
        """Lease what the tiers have of the keys up to `end`, behind what is leased already."""
        path = GroupKeys(visit.keys[:end], visit.matched)
        found = self.cache.lookup({0: path}, self._now, tick=visit.tick, returns=visit.request.returns)
        visit.tick = found.tick
        if found.lease is not None:
            visit.parts.append(_LeasedRun(found.lease, found.chunks))
            visit.matched += found.chunks
        return found

    def _look_again(self, visit: _Visit) -> None:
        """The remote store has said what it has."""
        self._load(visit, self._coming(visit, self._look(visit, visit.usable)))
        self._submit()

    def _coming(self, visit: _Visit, found: Found) -> int:
        """Number of chunks after the leased ones that the remote store has, including those in flight."""
        if self.remote is None:
            return 0
        rest = {0: GroupKeys(visit.keys[visit.matched : visit.usable])}
        where = self.cache.lookup(rest, self._now, until=Until.NOTHING, each=True).residency[0].presences
        return found.remote + sum(1 for _ in takewhile(lambda each: each is not Presence.ABSENT, where))

    def _load(self, visit: _Visit, coming: int) -> None:
        """Order the chunks worth loading: of the leased ones, and of `coming` more in the remote store."""
        left = wanted = visit.wanted = self._worth(visit, coming)
        found = visit.matched + coming
        self._losses.counts[Loss.CHOICE] += found - wanted
        self._losses.miss(visit.keys[found:], visit.usable - found)
        for part in visit.parts:
            part.ordered = min(left, part.chunks)
            left -= part.ordered
            self._onboard(visit, part)
        if left and (jobs := self.cache.prefetch({0: GroupKeys(visit.keys[:wanted])}, self._now)):
            self._wait(visit, jobs, partial(self._fetched, visit, wanted))
        if visit.awaited or (visit.parts and visit.parts[0].ordered):
            self._loading.append(visit)
            self._settle(visit)  # what is refused at once, for lack of room say, has ended already
        else:
            self._ready(visit)

    def _fetched(self, visit: _Visit, wanted: int) -> None:
        """What the remote store still had of the first `wanted` chunks is in host memory."""
        before = len(visit.parts)
        self._look(visit, wanted)
        for part in visit.parts[before:]:
            part.ordered, part.fetched = part.chunks, True
            self._onboard(visit, part)
        self._submit()
        self._settle(visit)

    def _onboard(self, visit: _Visit, part: _LeasedRun) -> None:
        if part.ordered:
            self.cache.load(part.lease, {0: range(part.ordered)})
            visit.until = self._now + self.cache.settings.load_timeout

    def _worth(self, visit: _Visit, coming: int) -> int:
        """How many chunks to load: of the leased ones, and of `coming` more in the remote store."""
        found = visit.matched + coming
        if self._gate is None or not found:
            return found
        runs = [run for part in visit.parts for run in self.cache.progress(part.lease).runs]
        runs += [Run(REMOTE, coming)] if coming else []
        queued = {HOST: self.movers.wait(HOST, DEVICE, self._now)}
        queued |= {source: self.movers.wait(source, HOST, self._now) for source in self._sources}
        count = self._gate.chunks_to_load(0, runs, self._now, queued, spare=self._engine_wait())
        self.tally.computed_by_choice += found - count
        return count

    def _engine_wait(self) -> float:
        """Seconds until an engine is left for one more request, by those that compute and those that load now."""
        working = self._working
        behind = len(working.ready) + len(self._loading) - working.idle
        if behind < 0:
            return 0.0
        ends = heapq.nsmallest(behind + 1, (end for end, *_ in working.under_way))
        return max(0.0, ends[-1] - self._now) if ends else 0.0

    def _settle(self, visit: _Visit) -> None:
        """Go on with a visit if all that was ordered for it has ended."""
        parts = [part for part in visit.parts if part.ordered]
        outcomes = [outcome for part in parts if (outcome := self.cache.progress(part.lease).outcome) is not None]
        if visit.awaited or len(outcomes) < len(parts):
            return
        self._loading.remove(visit)
        for part, outcome in zip(parts, outcomes, strict=True):
            visit.loaded += outcome.chunks
            self.tally.hits.update([REMOTE] * outcome.chunks if part.fetched else outcome.sources)
            if outcome.chunks < part.ordered:
                break
        self._ready(visit)

    def _ready(self, visit: _Visit) -> None:
        self._working.ready.append(visit)
        self._start()

    def _start(self) -> None:
        working = self._working
        while working.ready and working.idle:
            visit = working.ready.popleft()
            context = visit.loaded * self.block_tokens
            seconds = self.timing.prefill(context, visit.request.input_length - context)
            working.idle -= 1
            working.started += 1
            heapq.heappush(working.under_way, (self._now + seconds, working.started, visit, seconds))

    def _computed(self, visit: _Visit, seconds: float) -> None:
        context = visit.loaded * self.block_tokens
        if self._gate is not None:
            self._gate.observe_prefill(context, visit.request.input_length - context, seconds)
        self.tally.computing += seconds
        self.tally.ttft[visit.number] = self._now - visit.arrival
        self.cache.apply((), self._now)
        first = visit.matched
        if first < len(visit.keys):
            path, blocks = {0: GroupKeys(visit.keys, first)}, {0: range(len(visit.keys) - first)}
            held = self.counters.drops[HOST][DropReason.BACKPRESSURE]
            order = self.cache.store(path, blocks, tick=visit.tick)[0]
            had = {*order.positions, *order.known}
            busy = self.counters.drops[HOST][DropReason.BACKPRESSURE] > held
            lacking = [visit.keys[at] for at in range(first, len(visit.keys)) if at not in had]
            self._losses.refused(lacking, Loss.BACKPRESSURE if busy else Loss.NOT_STORED)
        self._losses.counts[Loss.NOT_LOADED] += visit.wanted - visit.loaded
        for part in visit.parts:
            self.cache.release(part.lease)
        self._submit()
        self._working.idle += 1
        self._admitted -= 1
        self._start()
        self._admit()


def keys_of(path: Sequence[int]) -> list[Key]:
    """Keys of a path of ids, each of which identifies its whole prefix.

    The keys are internal to the replay: a fast 16-byte hash, repeated to the length of a key.
    """
    keys, parent = [], _ROOT
    for block in path:
        parent = xxh3_128_digest(parent + block.to_bytes(8, "big"))
        keys.append(parent + parent)
    return keys
