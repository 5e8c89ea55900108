"""Replay in virtual time: the requests of a trace through the control plane that runs in production.

    arrives ──► waits ──► admitted: lookup, gate, load ──► loaded ──► computed: first token, store ──► released
               in order    (twice as many as engines)     the rest on the next engine that is idle
                           probe, fetch: what only a remote store has arrives in host memory, and is loaded then

`TieredCache` and `RecomputeGate` are those of production, called as an engine's adapter calls them. The durations of
copies and prefills are modelled (`longshore.trace.machine`), and so is the engine, which computes one prompt at a time.
Decoding takes no time, answers are not stored, and the device keeps nothing: hits in the tiers are in addition to those
in the engine's own prefix cache.

Replicas have a cache and tiers of their own, engines that compute, and one store that they share; what happens in any
of them happens in the order of its time.
"""

from __future__ import annotations

import enum
import heapq
import math
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
    Route,
    Transfer,
    TransferResult,
)
from longshore.cache import (
    CacheSettings,
    Counters,
    DropReason,
    GroupKeys,
    Lease,
    LookupResult,
    Presence,
    Protection,
    RecomputeGate,
    Run,
    TieredCache,
    TierSpec,
)
from longshore.cache.eviction_policies import EvictionPolicy
from longshore.config import format_bytes
from longshore.errors import IntegrityError, TraceError
from longshore.trace.machine import RemoteStore, Timing, VirtualMovers
from longshore.trace.parsing import TraceRequest
from longshore.trace.tally import Loss, Losses, ReplayTally

_ROOT = xxh3_128_digest(b"longshore replay 2")

MOST_BLOCKS = 1 << 28
"""Largest number of blocks of a tier, because each slot takes memory even if it is never filled."""

_TIERS = (HOST, FILE, REMOTE)


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
        request_number: Its number in the cache, once it was matched.
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
    request_number: int | None = None


class _Working:
    """Engines in virtual time: the number `idle`, prompts `ready` for them, and prompts in progress by end time."""

    def __init__(self, count: int) -> None:
        self.idle = count
        self.ready: deque[_Visit] = deque()
        self.under_way: list[tuple[float, int, _Visit, float]] = []
        self.started = 0


class Routing(enum.StrEnum):
    """How requests are dealt to replicas."""

    ROUND_ROBIN = "round-robin"
    PREFIX = "prefix"


class Router:
    """Deals requests to replicas.

    By prefix, a request goes to the replica that has last been dealt the longest part of it, if that is at least half
    of it, and else to the replica with the fewest requests so far: a session stays where it began.

    Attributes:
        dealt: Requests that each replica was dealt.
        routing: How.
    """

    def __init__(self, replicas: int, routing: Routing) -> None:
        self.dealt = [0] * replicas
        self.routing = routing
        self._last: dict[int, int] = {}

    def deal(self, path: Sequence[int]) -> int:
        """The replica that serves a request of these blocks."""
        at = sum(self.dealt) % len(self.dealt)
        if self.routing is Routing.PREFIX and len(self.dealt) > 1:
            known = next((n for n in range(len(path), 0, -1) if path[n - 1] in self._last), 0)
            at = self._last[path[known - 1]] if known and 2 * known >= len(path) else self.dealt.index(min(self.dealt))
            self._last.update(dict.fromkeys(path, at))
        self.dealt[at] += 1
        return at


class TieredReplay:
    """Replicas that each have a cache shared by `engines` engines, with tiers of given sizes, and share one store.

    Args:
        timing: Timing of the model on its machine.
        block_tokens: Tokens per block of the trace; one block is one chunk.
        tiers: Bytes of `host`, and optionally of `file`, both of each replica, and of a `remote` store that the
            replicas share, in this order.
        policy: Eviction policy of host memory and files; a remote store evicts its least recently used blocks.
        engines: Number of prompts that a replica computes at a time.
        gated: Whether the gate decides between loading and computing; without it, all blocks found are loaded.
        admission: Whether the file tier, once full, refuses blocks that promise fewer hits than those they replace.
        replicas: Number of replicas.
        routing: How requests are dealt to them.

    Raises:
        TraceError: A tier is smaller than a block or larger than `MOST_BLOCKS`; no host memory, replica, engine or
            token per block.
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
        replicas: int = 1,
        routing: Routing = Routing.ROUND_ROBIN,
    ) -> None:
        names, least = list(tiers), min(engines, replicas, block_tokens)
        if least < 1 or HOST not in names or names != [n for n in _TIERS if n in names]:
            raise TraceError(
                f"expected at least one engine, one replica, one token per block and host memory, got {engines}, "
                f"{replicas}, {block_tokens}"
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
        self.capacity = {name: nbytes // image for name, nbytes in tiers.items()}
        """Blocks of each tier: of one replica, or of the store."""
        self.remote = RemoteStore(self.capacity[REMOTE]) if REMOTE in names else None
        self.tally = ReplayTally()
        self.router = Router(replicas, routing)
        asked: set[int] | None = set() if replicas > 1 else None
        self.image_bytes = image
        self.timing, self.block_tokens, self.engines = timing, block_tokens, engines
        self.replicas = tuple(
            Replica(self, policy, Losses(names[-1], self.tally.losses, asked), gated=gated, admission=admission)
            for _ in range(replicas)
        )
        self._now = 0.0

    @property
    def slots(self) -> int:
        """Blocks of all tiers of all replicas together."""
        shared = self.capacity.get(REMOTE, 0)
        return len(self.replicas) * (sum(self.capacity.values()) - shared) + shared

    @property
    def losses(self) -> dict[Loss, int]:
        """Blocks computed, by cause: with those loaded, all that were asked for."""
        return {cause: self.tally.losses[cause] for cause in Loss}

    @property
    def counters(self) -> Counters:
        """Those of the control planes, added up."""
        total = self.replicas[0].cache.counters.copy()
        for replica in self.replicas[1:]:
            total.add(replica.cache.counters)
        return total

    @property
    def routes(self) -> dict[Route, tuple[float, float]]:
        """Seconds that each route was busy, and that transfers waited for it, of all replicas together."""
        busy, queued = Counter[Route](), Counter[Route]()
        for replica in self.replicas:
            busy.update(replica.movers.busy)
            queued.update(replica.movers.queued)
        return {route: (busy[route], queued[route]) for route in sorted(busy)}

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
            self._now = arrival
            self.replicas[self.router.deal(request.hash_ids[:blocks])].arrive(request, arrival, blocks)
            yield request
        self._advance(math.inf)
        if left := sum(replica.left for replica in self.replicas):
            raise IntegrityError(f"{left} requests of the replay were never completed: please report this")

    def _advance(self, until: float) -> None:
        """Let everything happen that ends at `until` or before, of all replicas in the order of time."""
        while True:
            ends = [replica.next_end() for replica in self.replicas]
            end = min(ends)
            if end > until or end == math.inf:
                break
            self._now = end
            self.replicas[ends.index(end)].step(end)


class Replica:
    """One machine of a replay: a cache, its movers, and engines. Counts in the tally of its replay."""

    def __init__(
        self, replay: TieredReplay, policy: type[EvictionPolicy], losses: Losses, *, gated: bool, admission: bool
    ) -> None:
        self.timing, self.block_tokens, engines = replay.timing, replay.block_tokens, replay.engines
        image, self.tally, self.remote = replay.image_bytes, replay.tally, replay.remote
        names = list(replay.capacity)
        specs = [TierSpec(name, count, image, policy) for name, count in replay.capacity.items() if name != REMOTE]
        self.cache = TieredCache(
            specs, CacheSettings(admission=admission), remote=[REMOTE] if self.remote is not None else []
        )
        self.movers = VirtualMovers(self.timing, image, self.remote)
        self._losses = losses
        self._gate = RecomputeGate(names, self.block_tokens, image) if gated else None
        self._sources = [name for name in names if name != HOST]
        self._working = _Working(engines)
        self._waiting: deque[_Visit] = deque()
        self._awaited: dict[int, list[_Visit]] = {}
        self._loading: list[_Visit] = []
        self._admitted, self._most = 0, 2 * engines
        self._without = [0.0] * engines
        self._now = 0.0

    @property
    def left(self) -> int:
        """Requests that have not been completed."""
        return len(self._loading) + len(self._waiting)

    # ------------------------------------------------------------------ time

    def next_end(self) -> float:
        """When the next transfer, probe or prefill ends; infinite if none is in flight."""
        working, end = self._working.under_way, self.movers.next_end
        return min(working[0][0] if working else math.inf, math.inf if end is None else end)

    def step(self, end: float) -> None:
        """Let what ends next, at `end`, happen: a transfer's end before a prefill's."""
        self._now = end
        if self.movers.next_end == self._now:
            self._ended(*self.movers.pop())
        else:
            _, _, visit, seconds = heapq.heappop(self._working.under_way)
            self._computed(visit, seconds)

    def _submit(self) -> None:
        if commands := self.cache.take_commands():
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
        self.cache.apply_results([result], self._now)
        self._submit()

    def _wait(self, visit: _Visit, jobs: Sequence[int], go_on: Callable[[], None]) -> None:
        """Have `visit` go on when all of `jobs` have ended, of which there is one at least."""
        visit.awaited, visit.go_on = set(jobs), go_on
        for job in jobs:
            self._awaited.setdefault(job, []).append(visit)

    # ------------------------------------------------------------------ the way of a request

    def arrive(self, request: TraceRequest, arrival: float, blocks: int) -> None:
        """A request with so many whole blocks arrives, now."""
        self._now, visit, tally = arrival, _Visit(request, arrival), self.tally
        tally.prompt_tokens += request.input_length
        free = heapq.heappop(self._without)
        seconds = self.timing.prefill(0, request.input_length)
        done = max(free, arrival) + seconds
        tally.recomputing += seconds
        heapq.heappush(self._without, done)
        visit.number = tally.arrive(arrival, blocks, done - arrival)
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

    def _look(self, visit: _Visit, end: int) -> LookupResult:
        """Lease what the tiers have of the keys up to `end`, behind what is leased already."""
        path = GroupKeys(visit.keys[:end], visit.matched)
        found = self.cache.lookup(
            {0: path}, self._now, request_number=visit.request_number, reuse_hint=visit.request.reuse_hint
        )
        visit.request_number = found.request_number
        if found.lease is not None:
            visit.parts.append(_LeasedRun(found.lease, found.num_chunks))
            visit.matched += found.num_chunks
        return found

    def _look_again(self, visit: _Visit) -> None:
        """The remote store has said what it has."""
        self._load(visit, self._coming(visit, self._look(visit, visit.usable)))
        self._submit()

    def _coming(self, visit: _Visit, found: LookupResult) -> int:
        """Number of chunks after the leased ones that the remote store has, including those in flight."""
        if self.remote is None:
            return 0
        rest = {0: GroupKeys(visit.keys[visit.matched : visit.usable])}
        where = self.cache.lookup(rest, self._now, protect=Protection.NONE, independent=True).residency[0].presences
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
            self._load_part(visit, part)
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
            self._load_part(visit, part)
        self._submit()
        self._settle(visit)

    def _load_part(self, visit: _Visit, part: _LeasedRun) -> None:
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
            visit.loaded += outcome.num_chunks
            self.tally.load(visit.number, {REMOTE: outcome.num_chunks} if part.fetched else Counter(outcome.sources))
            if outcome.num_chunks < part.ordered:
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
            self.tally.waited[visit.number] = self._now - visit.arrival
            heapq.heappush(working.under_way, (self._now + seconds, working.started, visit, seconds))

    def _computed(self, visit: _Visit, seconds: float) -> None:
        context = visit.loaded * self.block_tokens
        if self._gate is not None:
            self._gate.observe_prefill(context, visit.request.input_length - context, seconds)
        self.tally.computing += seconds
        self.tally.ttft[visit.number] = self._now - visit.arrival
        self.cache.apply_results((), self._now)
        first = visit.matched
        if first < len(visit.keys):
            path, blocks = {0: GroupKeys(visit.keys, first)}, {0: range(len(visit.keys) - first)}
            held = self.cache.counters.drops[HOST][DropReason.BACKPRESSURE]
            scheduled = self.cache.store(path, blocks, request_number=visit.request_number)[0]
            had = {*scheduled.positions, *scheduled.already_stored}
            if len(had) < len(visit.keys) - first:
                busy = self.cache.counters.drops[HOST][DropReason.BACKPRESSURE] > held
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
    parent, digest = _ROOT, xxh3_128_digest
    return [2 * (parent := digest(parent + block.to_bytes(8, "big"))) for block in path]
