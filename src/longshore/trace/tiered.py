"""Replay in virtual time: the requests of a trace through the control plane that runs in production.

    arrives ──► waits ──► admitted: match, gate, onboard ──► loaded ──► computed: first token, commit ──► released
               in order    (twice as many as engines)       the rest on the next engine that is idle

What is real here is `TieredCache` and `Gate`, called as an engine's adapter calls them; what is modelled is how long
copies and prefills take (`longshore.trace.timing`), and an engine that computes one prompt at a time. Decoding takes no
time, answers are not stored, and the device keeps nothing: what the tiers give is over and above its own prefix cache.
"""

from __future__ import annotations

import hashlib
import heapq
from array import array
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from longshore.boundary import DEVICE, FILE, HOST, Key, Transfer, TransferResult
from longshore.cache import CacheSettings, Counters, Gate, Hold, TieredCache, TierSpec
from longshore.cache.eviction import EvictionPolicy
from longshore.errors import TraceError
from longshore.trace.request import TraceRequest
from longshore.trace.timing import Timing
from longshore.trace.virtual import VirtualMovers

_ROOT = hashlib.sha256(b"longshore replay 1").digest()


@dataclass(slots=True)
class Tally:
    """What a replay has seen so far. Blocks are the whole blocks of prompts; times are seconds, one per request."""

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


class _Visit:
    """A request on its way."""

    __slots__ = ("arrival", "hold", "keys", "loaded", "matched", "number", "request")

    def __init__(self, request: TraceRequest, arrival: float) -> None:
        self.request, self.arrival = request, arrival
        self.keys: list[Key] = []
        self.hold: Hold | None = None
        self.matched = self.number = self.loaded = 0


class _Working:
    """Who computes: how many engines are `idle`, what is `ready` for them, and prompts under way by when they end."""

    def __init__(self, count: int) -> None:
        self.idle = count
        self.ready: deque[_Visit] = deque()
        self.under_way: list[tuple[float, int, _Visit, float]] = []
        self.started = 0


class TieredReplay:
    """One cache of `engines` engines, with tiers of so many bytes.

    Args:
        timing: The model, on its machine.
        block_tokens: Tokens of one block of the trace, which is one chunk here.
        tiers: Bytes of `host`, and of `file` if there is one.
        policy: Eviction policy of both.
        engines: How many prompts are computed at a time.
        gated: Whether loading is weighed against computing; without it whatever is found is loaded.
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
    ) -> None:
        if engines < 1 or block_tokens < 1 or list(tiers) not in ([HOST], [HOST, FILE]):
            raise TraceError(f"expected an engine, a block and host memory at least, got {engines}, {block_tokens}")
        image = block_tokens * timing.geometry.kv_bytes_per_token
        specs = [TierSpec(name, nbytes // image, image, policy) for name, nbytes in tiers.items()]
        for spec, nbytes in zip(specs, tiers.values(), strict=True):
            if not spec.slots:
                raise TraceError(f"{spec.name}: expected room for a block of {image} bytes, got {nbytes} bytes")
        self.tally = Tally()
        self.cache = TieredCache(specs, CacheSettings())
        self.movers = VirtualMovers(timing, image)
        self.image_bytes = image
        self.slots = sum(spec.slots for spec in specs if isinstance(spec.slots, int))
        self.timing, self.block_tokens, self.engines = timing, block_tokens, engines
        self._gate = Gate(list(tiers), block_tokens, image) if gated else None
        self._working = _Working(engines)
        self._waiting: deque[_Visit] = deque()
        self._loading: list[_Visit] = []
        self._admitted, self._most = 0, 2 * engines
        self._without = [0.0] * engines
        self._now = 0.0

    @property
    def counters(self) -> Counters:
        """Those of the control plane."""
        return self.cache.counters

    def run(self, requests: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
        """Serve `requests`, in order of arrival; yields each when it has arrived, and ends when all were served."""
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
        self._advance(float("inf"))

    # ------------------------------------------------------------------ time

    def _advance(self, until: float) -> None:
        """Let everything happen that ends at `until` or before."""
        working = self._working
        while True:
            end = self.movers.next_end
            computed = working.under_way[0][0] if working.under_way else None
            if end is not None and end <= until and (computed is None or end <= computed):
                self._now = end
                self._moved(*self.movers.pop())
            elif computed is not None and computed <= until:
                self._now = computed
                _, _, visit, seconds = heapq.heappop(working.under_way)
                self._computed(visit, seconds)
            else:
                break
        if until < float("inf"):
            self._now = until

    def _submit(self) -> None:
        self.movers.submit(self.cache.take(), self._now)

    def _moved(self, transfer: Transfer, result: TransferResult) -> None:
        route = transfer.route
        if self._gate is not None and result.bytes and route.destination in (DEVICE, HOST) and route.source != DEVICE:
            self._gate.observe_load(route.source, result.bytes, result.seconds, result.queued_seconds, self._now)
        self.cache.apply([result], self._now)
        self._submit()
        for visit in list(self._loading):
            outcome = self.cache.outcome(visit.hold) if visit.hold is not None else None
            if outcome is not None:
                self._loading.remove(visit)
                visit.loaded = outcome.chunks
                self.tally.hits.update(outcome.sources)
                self._ready(visit)

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
            number = visit.request.input_length // self.block_tokens
            visit.keys = _keys(visit.request.hash_ids[:number])
            usable = visit.keys[: (visit.request.input_length - 1) // self.block_tokens]
            match = self.cache.match(usable, self._now)
            visit.matched, visit.hold = match.length, match.hold
            count = self._worth(visit)
            if count and visit.hold is not None:
                self.cache.onboard(visit.hold, range(count))
                self._loading.append(visit)
            else:
                self._ready(visit)
            self._submit()

    def _worth(self, visit: _Visit) -> int:
        """How many of the matched chunks to load."""
        if self._gate is None or visit.hold is None:
            return visit.matched
        queued = {HOST: self.movers.wait(HOST, DEVICE, self._now), FILE: self.movers.wait(FILE, HOST, self._now)}
        count = self._gate.chunks_to_load(0, self.cache.runs(visit.hold), self._now, queued)
        self.tally.computed_by_choice += visit.matched - count
        return count

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
        self.cache.tick(self._now)
        first = visit.matched
        if first < len(visit.keys):
            self.cache.commit(visit.keys, range(len(visit.keys) - first), first=first)
        if visit.hold is not None:
            self.cache.release(visit.hold)
        self._submit()
        self._working.idle += 1
        self._admitted -= 1
        self._start()
        self._admit()


def _keys(path: Sequence[int]) -> list[Key]:
    """Keys of a path of ids: each names its whole prefix, so nothing needs to be remembered."""
    keys, key, sha256 = [], _ROOT, hashlib.sha256
    for block in path:
        key = sha256(key + block.to_bytes(8, "big")).digest()
        keys.append(key)
    return keys
