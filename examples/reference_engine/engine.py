"""The engine: requests in, logits out; a step at a time.

    begin_step ─► admit ──────────► compute ────────────────► end_step ─► publish
                  device prefix,    per request and layer:                complete blocks go into the
                  match, onboard,   arrival.layer(l)?  then compute       prefix cache, and down to the tiers
                  partial copies    arrival.whole()?   then believe it
                                        no: recompute, in other blocks

Requests of one step are admitted together and computed one after the other, so a request may find blocks that are
still on their way for another one: it shares them, and waits for the same arrival.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple

import torch

from examples.reference_engine.below import Arrival, Below, DeviceOnly, Found
from examples.reference_engine.model import Decoder
from examples.reference_engine.pool import DevicePool, Known
from longshore.errors import CapacityError, EngineError
from longshore.keys import KeyChain, Scope


class Schedule(NamedTuple):
    """What another engine must do likewise to compute the same bits.

    Attributes:
        turn: Requests were admitted in this order, which is not that of submission where one had to begin anew.
        hit: Leading tokens that were not computed.
        sources: For each group, the block that the last of them were copied from, if any.
        published: Blocks that went into the prefix cache as this request computed them.
    """

    turn: int = 0
    hit: int = 0
    sources: tuple[bytes | None, ...] = ()
    published: frozenset[bytes] = frozenset()


@dataclass(eq=False)
class Request:
    """One prompt, and what has become of it.

    Attributes:
        tokens: The prompt, and the answer so far.
        wanted: Tokens of the answer that are still to come.
        replay: Do as another engine did.
        logits: One for each token of the answer, shape `(vocab,)`.
        schedule: What was done since the request was last admitted.
        hits: Tokens that were not computed then: those that the `"device"` had, those of which a group came from the
            `"tiers"`, and those `"copied"` out of another request's block.
        restarts: How often something that was promised did not come.
        tables: For each group, its blocks in logical order; -1 where the window has passed.
        computed: Leading tokens whose K and V are in those blocks, or on their way.
        published: For each group, leading blocks that have been published.
        arrivals: For each group, what is on its way into the blocks.
    """

    tokens: list[int]
    wanted: int
    chains: list[KeyChain]
    replay: Schedule | None = None
    logits: list[torch.Tensor] = field(default_factory=list)
    schedule: Schedule = field(default_factory=Schedule)
    hits: Counter[str] = field(default_factory=Counter)
    restarts: int = 0
    tables: list[list[int]] = field(default_factory=list)
    computed: int = 0
    published: list[int] = field(default_factory=list)
    arrivals: list[list[Arrival]] = field(default_factory=list)


class _Part(NamedTuple):
    """How one group of a request is to be had.

    First `skipped` blocks that its window has passed, then blocks of the prefix `cached` on the device, `loaded` blocks
    from below, blocks that are cached `beyond` them; the first `copied` tokens of the block behind come from `source`.
    """

    skipped: int
    cached: list[Known]
    loaded: int
    beyond: list[Known]
    source: Known | None
    copied: int
    total: int

    @property
    def fresh(self) -> int:
        """Blocks to take, the loaded ones included."""
        return self.total - self.skipped - len(self.cached) - len(self.beyond)


class _DidNotComeError(Exception):
    """Something that a request was promised: one layer of it, or the whole."""


class Engine:
    """Serves at most `batch` requests at a time. Used from one thread."""

    def __init__(self, decoder: Decoder, pool: DevicePool, below: Below | None = None, *, batch: int = 2) -> None:
        self.decoder = decoder
        self.pool = pool
        self.below = below or DeviceOnly(pool)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._batch = batch
        self._groups = decoder.shape.groups
        scope = scope_of(decoder, pool)
        self._roots = [replace(scope, group=group.name, block_size=group.block_size).root for group in self._groups]
        self._arriving: dict[int, Arrival] = {}
        self._turns = 0

    # ------------------------------------------------------------------ requests

    def submit(self, prompt: Sequence[int], wanted: int, replay: Schedule | None = None) -> Request:
        """Queue a prompt, of which an answer of `wanted` tokens is asked. `CapacityError` if it could never fit."""
        chains = [KeyChain(root, group.block_size) for root, group in zip(self._roots, self._groups, strict=True)]
        request = Request([], wanted, chains, replay)
        self._append(request, prompt)
        needed = sum(self._blocks_of(request))
        if needed > self.pool.size or not prompt or wanted < 1:
            raise CapacityError(f"{len(prompt)} + {wanted} tokens need {needed} blocks, of {self.pool.size}")
        self.waiting.append(request)
        return request

    def run(self) -> None:
        """Step until nothing is left. `CapacityError` if that cannot be: copies never let go of the blocks needed."""
        while self.waiting or self.running:
            if not self.step():
                raise CapacityError(f"{len(self.waiting)} requests wait for blocks that copies still touch")

    def step(self) -> bool:
        """Compute one token for each request; whether there was any."""
        self.admit()
        return self.compute()

    def admit(self) -> None:
        """The first half of a step: what waits gets its blocks, and what they need begins to travel."""
        self.below.begin_step()
        while self.waiting and len(self.running) < self._batch:
            try:
                self._admit(self.waiting[0], len(self.waiting[0].tokens) - 1)
            except CapacityError:
                return
            self.running.append(self.waiting.pop(0))

    def compute(self) -> bool:
        """The second half: compute on layers as they arrive; whether anything was."""
        done = [(request, logits) for request in list(self.running) if (logits := self._compute(request)) is not None]
        self.below.end_step()
        for request in self.running:
            request.arrivals = [[] for _ in self._groups]
        self._close_arrivals()
        for request, logits in done:
            request.logits.append(logits)
            request.computed = len(request.tokens)
            self._publish(request)
            self._append(request, [int(logits.argmax())])
            request.wanted -= 1
            self._let_go(request)
        return bool(done)

    def abort(self, request: Request) -> None:
        """Nobody waits for the answer any more; what is on its way for nobody else is cancelled."""
        if request in self.waiting:
            self.waiting.remove(request)
        elif request in self.running:
            self._stop(request)
            self._close_arrivals()

    def sleep(self, *, clear: bool = False) -> None:
        """Give the device's memory back; requests begin anew after `wake_up`. `clear` also forgets the tiers."""
        self.below.end_step()
        for request in self.running[::-1]:
            self._stop(request)
            self.waiting.insert(0, request)
        self._close_arrivals()
        self.below.sleep(clear=clear)
        self.pool.sleep()

    def wake_up(self) -> None:
        """Take new memory."""
        self.pool.layout.take_back([self.pool.wake_up()])

    # ------------------------------------------------------------------ admit

    def _admit(self, request: Request, most: int) -> None:
        """Give `request` its blocks, with up to `most` tokens in them; all or nothing, else `CapacityError`."""
        if request.replay is not None:
            most = min(most, request.replay.hit)
        found = self.below.match([each.keys for each in request.chains], most)
        hit = min(self._walk(request, group, found.tokens, most)[2] for group in range(len(self._groups)))
        if request.replay is not None and hit != request.replay.hit:
            self.below.drop(found)
            raise EngineError(f"{request.replay.hit} tokens are to be replayed, only {hit} can be")
        parts = [self._part(request, group, found, hit) for group in range(len(self._groups))]
        known = [each for part in parts for each in (*part.cached, *part.beyond, part.source) if each is not None]
        shared = [self.pool.share(each) for each in known]
        try:
            fresh = self.pool.take(sum(part.fresh for part in parts))
        except CapacityError:
            self.pool.give(shared)
            self.below.drop(found)
            raise
        request.tables, request.arrivals = [], []
        for group, part in enumerate(parts):
            mine, fresh = fresh[: part.fresh], fresh[part.fresh :]
            self._fill(request, group, part, mine, found)
        self.pool.give([part.source.block for part in parts if part.source is not None])
        request.computed = hit
        request.published = [part.skipped for part in parts]
        sources = tuple(part.source.key if part.source is not None else None for part in parts)
        self._turns += 1
        request.schedule = Schedule(self._turns, hit, sources)
        loaded = [part.loaded * kind.block_size for part, kind in zip(parts, self._groups, strict=True)]
        request.hits = Counter(device=found.tokens - max(loaded), tiers=max(loaded), copied=hit - found.tokens)

    def _walk(self, request: Request, group: int, start: int, most: int) -> tuple[list[Known], Known | None, int]:
        """From `start` on, what the device's cache has: whole blocks, then one to copy from; and how far that goes."""
        keys, size, at = request.chains[group].keys, self._groups[group].block_size, start
        whole: list[Known] = []
        while at + size <= most and (known := self.pool.index.get(keys[at // size])) is not None:
            whole.append(known)
            at += size
        parent = keys[at // size - 1] if at else self._roots[group]
        source, copied = self.pool.closest(parent, request.tokens[at:most])
        if request.replay is not None and copied:
            source = self.pool.index.get(request.replay.sources[group] or b"")
            copied = copied if source is not None else 0
        return whole, source, at + copied

    def _part(self, request: Request, group: int, found: Found, hit: int) -> _Part:
        kind, match = self._groups[group], found.matches[group]
        skipped = kind.first_needed(found.tokens)
        cached = [self.pool.index[key] for key in request.chains[group].keys[skipped : match.start]]
        beyond, source, _ = self._walk(request, group, found.tokens, hit)
        total = self._blocks_of(request)[group]
        return _Part(skipped, cached, match.length, beyond, source, hit % kind.block_size, total)

    def _fill(self, request: Request, group: int, part: _Part, fresh: list[int], found: Found) -> None:
        """The block table of one group, and what fills it."""
        loading, own = fresh[: part.loaded], fresh[part.loaded :]
        shared = [known.block for known in (*part.cached, *part.beyond, part.source) if known is not None]
        arrivals = list(dict.fromkeys(self._arriving[block] for block in shared if block in self._arriving))
        cached = [known.block for known in part.cached]
        table = [-1] * part.skipped + cached + loading + [known.block for known in part.beyond] + own
        if loading:
            arrival = self.below.onboard(found, group, loading)
            arrivals.append(arrival)
            for at in range(part.skipped + len(cached), part.skipped + len(cached) + len(loading)):
                self.pool.publish(self._known(request, group, at, table[at]))
                self._arriving[table[at]] = arrival
        if part.source is not None:
            copy = self.below.copy(group, part.source.block, own[0], part.copied)
            arrivals.append(copy)
            self._arriving[own[0]] = copy
        request.tables.append(table)
        request.arrivals.append(arrivals)

    # ------------------------------------------------------------------ compute

    def _compute(self, request: Request) -> torch.Tensor | None:
        """Logits after the last token; `None` if there are no blocks left to compute in."""
        while True:
            try:
                return self._forward(request)
            except _DidNotComeError:
                request.restarts += 1
            self._give_blocks(request)
            try:
                self._admit(request, 0)
            except CapacityError:
                self.running.remove(request)
                self.waiting.insert(0, request)
                return None

    def _forward(self, request: Request) -> torch.Tensor:
        def before_layer(layer: int) -> None:
            for arrival in request.arrivals[self.decoder.shape.group_of(layer)]:
                if not arrival.layer(layer):
                    raise _DidNotComeError

        new = request.tokens[request.computed :]
        logits = self.decoder.forward(new, request.computed, request.tables, self.pool.pages, before_layer)
        for arrival in chain.from_iterable(request.arrivals):
            if not arrival.whole():
                raise _DidNotComeError
        return logits

    # ------------------------------------------------------------------ publish

    def _close_arrivals(self) -> None:
        """Let go of what no request waits for. What has not arrived by now never will: nobody may find it."""
        awaited = {arrival for request in self.running for arrival in chain.from_iterable(request.arrivals)}
        for arrival in dict.fromkeys(self._arriving.values()):
            if arrival not in awaited and not arrival.close():
                for block in arrival.blocks:
                    self.pool.forget(block)
        self._arriving = {block: arrival for block, arrival in self._arriving.items() if arrival in awaited}

    def _publish(self, request: Request) -> None:
        """Blocks that became complete go down, and into the prefix cache.

        There is one version of a block: equal tokens, computed in prompts of different lengths, may differ in their
        last bits. Where the device or the tiers have one, ours stays this request's own.
        """
        for group, kind in enumerate(self._groups):
            first, stop = request.published[group], request.computed // kind.block_size
            if first == stop:
                continue
            path, table = request.chains[group].keys[:stop], request.tables[group]
            former = [self.pool.index.get(key) for key in path[first:]]
            blocks = [table[at] if known is None else known.block for at, known in enumerate(former, start=first)]
            unique = self.below.commit(group, path, blocks, first)
            if request.replay is not None:
                chosen = [at for at in range(first, stop) if path[at] in request.replay.published]
            else:
                chosen = [at for at, known in enumerate(former, start=first) if known is None and at in unique]
            for at in chosen:
                self.pool.publish(self._known(request, group, at, table[at]))
            keys = request.schedule.published.union(path[at] for at in chosen)
            request.schedule = request.schedule._replace(published=keys)
            request.published[group] = stop

    def _let_go(self, request: Request) -> None:
        """Give back what the window has passed, or all when the answer is complete."""
        if not request.wanted:
            self._stop(request)
            return
        for kind, table in zip(self._groups, request.tables, strict=True):
            passed = [at for at in range(kind.first_needed(request.computed)) if table[at] >= 0]
            self.pool.give([table[at] for at in passed])
            for at in passed:
                table[at] = -1

    def _stop(self, request: Request) -> None:
        self._give_blocks(request)
        self.running.remove(request)

    def _give_blocks(self, request: Request) -> None:
        """Tails first: what is evicted first is what is needed least."""
        self.pool.give([block for table in request.tables for block in reversed(table) if block >= 0])
        request.tables, request.arrivals = [], []

    # ------------------------------------------------------------------ inside

    def _append(self, request: Request, tokens: Sequence[int]) -> None:
        request.tokens += tokens
        for each in request.chains:
            each.extend(tokens)

    def _known(self, request: Request, group: int, at: int, block: int) -> Known:
        keys, size = request.chains[group].keys, self._groups[group].block_size
        tokens = tuple(request.tokens[at * size : (at + 1) * size])
        return Known(keys[at], keys[at - 1] if at else self._roots[group], tokens, block)

    def _blocks_of(self, request: Request) -> list[int]:
        """Blocks for the prompt and the answer, per group; the last token's K and V are never needed."""
        stored = len(request.tokens) + request.wanted - 1
        return [-(-stored // group.block_size) for group in self._groups]


def scope_of(decoder: Decoder, pool: DevicePool) -> Scope:
    """What must be equal for blocks of equal tokens to be equal. Each group has a scope of its own beneath it."""
    return Scope(
        model=hashlib.sha256(repr(decoder.shape).encode()).hexdigest(),
        weights=f"random, seed {decoder.seed}",
        dtype=str(torch.float32),
        layout=pool.layout.fingerprint,
        block_size=0,
        attention="reference",
    )
