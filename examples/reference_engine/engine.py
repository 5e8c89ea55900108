"""The engine: requests in, logits out; a step at a time.

    begin_step ─► admit ──────────► compute ────────────────► end_step ─► publish
                  lookup, load,     per request and layer:                complete blocks go into the
                  partial copies    pending.wait_layer(l)?    prefix cache, and to the tiers
                                    pending.wait_all()?
                                        no: recompute, in other blocks

Requests of one step are admitted together and computed one after the other, so a request may find blocks that are in
flight for another one: it shares them, and waits for the same copies.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from examples.reference_engine.connector import NoTiers, PendingCopy
from examples.reference_engine.model import Decoder
from examples.reference_engine.pool import DevicePool, Known
from longshore.cache import GroupKeys, GroupMatch, LookupResult, PromptTokens
from longshore.errors import CapacityError, EngineError
from longshore.keys import KeyChain, Scope


class Schedule(NamedTuple):
    """What another engine must do likewise to compute the same bits.

    Attributes:
        turn: Requests were admitted in this order, which is not that of submission where one had to begin anew.
        hit: Leading tokens that were not computed.
        sources: For each group, the block that the last of them are the first of; empty without one.
        published: Blocks that went into the prefix cache as this request computed them.
    """

    turn: int = 0
    hit: int = 0
    sources: tuple[bytes, ...] = ()
    published: frozenset[bytes] = frozenset()


@dataclass(eq=False)
class Request:
    """One prompt and its state.

    Attributes:
        tokens: The prompt, and the answer so far.
        wanted: Tokens of the answer that are still to come.
        replay: Do as another engine did.
        logits: One for each token of the answer, shape `(vocab,)`.
        schedule: What was done since the request was last admitted.
        hits: Tokens that were not computed then: those that the `"device"` had, those of which a group came from the
            `"tiers"`, and those `"copied"` out of another request's block.
        restarts: How often a copy failed or was late, so that the request was computed again.
        tables: For each group, its blocks in logical order; -1 where the window has passed.
        computed: Leading tokens whose K and V are in those blocks, or in flight.
        published: For each group, leading blocks that have been published.
        pending: Copies in flight into the blocks.
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
    pending: list[PendingCopy] = field(default_factory=list)


class _Part(NamedTuple):
    """How one group of a request is to be had.

    First `skipped` blocks that its window has passed, then the blocks before `end`: those that the device has, by their
    position, and those at the positions `loaded`, of which the last may be a partial one; or its first tokens are
    copied from `source`.
    """

    skipped: int
    end: int
    cached: dict[int, Known]
    loaded: list[int]
    source: Known | None

    @classmethod
    def of(cls, need: GroupMatch, keys: Sequence[bytes], pool: DevicePool) -> _Part:
        cached = {at: pool.index[keys[at]] for at in range(need.first, need.end) if at not in set(need.load)}
        if need.partial is None:
            return cls(need.first, need.end, cached, list(need.load), None)
        if need.partial.device:
            return cls(need.first, need.end, cached, list(need.load), pool.index[need.partial.key])
        return cls(need.first, need.end, cached, [*need.load, need.end], None)

    @property
    def shared(self) -> list[Known]:
        """Blocks of the prefix cache that get another user, the source for a moment."""
        return [*self.cached.values(), *([] if self.source is None else [self.source])]

    @property
    def kept(self) -> int:
        """Blocks that need not be taken."""
        return self.skipped + len(self.cached)

    def table(self, fresh: Iterator[int], total: int) -> list[int]:
        """The block table of `total` blocks, all that the device has not from `fresh`."""
        behind = range(self.skipped, total)
        return [-1] * self.skipped + [self.cached[at].block if at in self.cached else next(fresh) for at in behind]


class _NotLoadedError(Exception):
    """A layer, or the whole, of a load failed or is late."""


class Engine:
    """Serves at most `batch` requests at a time. Used from one thread."""

    def __init__(self, decoder: Decoder, pool: DevicePool, tiers: NoTiers | None = None, *, batch: int = 2) -> None:
        self.decoder = decoder
        self.pool = pool
        self.tiers = tiers or NoTiers(pool)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._batch = batch
        self._groups = decoder.shape.groups
        scope = scope_of(decoder, pool)
        self._roots = [replace(scope, group=group.name, block_size=group.block_size).digest for group in self._groups]
        self._pending: dict[int, PendingCopy] = {}
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
        self.tiers.begin_step()
        while self.waiting and len(self.running) < self._batch:
            try:
                self._admit(self.waiting[0], len(self.waiting[0].tokens) - 1)
            except CapacityError:
                return
            self.running.append(self.waiting.pop(0))

    def compute(self) -> bool:
        """The second half: compute on layers as they arrive; whether anything was."""
        done = [(request, logits) for request in list(self.running) if (logits := self._compute(request)) is not None]
        self.tiers.end_step()
        for request in self.running:
            request.pending = []
        self._close_pending()
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
            self._close_pending()

    def sleep(self, *, clear: bool = False) -> None:
        """Give the device's memory back; requests begin anew after `wake_up`. `clear` also forgets the tiers."""
        self.tiers.end_step()
        for request in self.running[::-1]:
            self._stop(request)
            self.waiting.insert(0, request)
        self._close_pending()
        self.tiers.sleep(clear=clear)
        self.pool.sleep()

    def wake_up(self) -> None:
        """Take new memory."""
        self.pool.layout.take_back([self.pool.wake_up()])

    # ------------------------------------------------------------------ admit

    def _admit(self, request: Request, most: int) -> None:
        """Give `request` its blocks, with up to `most` tokens in them; all or nothing, else `CapacityError`."""
        most = most if request.replay is None else min(most, request.replay.hit)
        found = self.tiers.lookup({group: self._wanted(request, group, most) for group in range(len(self._groups))})
        if request.replay is not None and found.tokens != request.replay.hit:
            self.tiers.release(found)
            raise EngineError(f"{request.replay.hit} tokens are to be replayed, only {found.tokens} can be")
        parts = [_Part.of(need, each.keys, self.pool) for need, each in zip(found.matches, request.chains, strict=True)]
        shared = [self.pool.share(known) for part in parts for known in part.shared]
        totals = self._blocks_of(request)
        try:
            fresh = iter(self.pool.take(sum(totals) - sum(part.kept for part in parts)))
        except CapacityError:
            self.pool.give(shared)
            self.tiers.release(found)
            raise
        arriving = [self._pending[block] for block in shared if block in self._pending]
        request.tables = [part.table(fresh, total) for part, total in zip(parts, totals, strict=True)]
        request.pending = list(dict.fromkeys(arriving)) + self._fill(request, found, parts)
        self.pool.give([part.source.block for part in parts if part.source is not None])
        request.computed, request.published = found.tokens, [need.first for need in found.matches]
        self._turns += 1
        sources = tuple(need.partial.key if need.partial else b"" for need in found.matches)
        request.schedule = Schedule(self._turns, found.tokens, sources)
        request.hits = self._hits(found)

    def _wanted(self, request: Request, group: int, most: int) -> GroupKeys:
        """What `request` wants of one group, and what the device has of it; at most `most` tokens."""
        keys = request.chains[group].keys[: most // self._groups[group].block_size]
        beside: Mapping[bytes, Sequence[tuple[bytes, Sequence[int]]]] = self.pool.behind
        if request.replay is not None:
            sources = [
                known for key in request.replay.sources[group : group + 1] if (known := self.pool.index.get(key))
            ]
            beside = {source.parent: [(source.key, source.tokens)] for source in sources}
        text = PromptTokens(request.tokens[:most], self._roots[group], beside)
        return GroupKeys(keys, device=[key in self.pool.index for key in keys], prompt_tokens=text)

    def _fill(self, request: Request, found: LookupResult, parts: Sequence[_Part]) -> list[PendingCopy]:
        """Have the tables of `request` filled with what was found: by one load, and copies inside the device."""
        pending: list[PendingCopy] = []
        if found.lease is not None:
            tables = enumerate(zip(parts, request.tables, strict=True))
            blocks = {group: [table[at] for at in part.loaded] for group, (part, table) in tables}
            pending.append(self.tiers.load(found.lease, blocks))
            for group, need in enumerate(found.matches):
                for at in need.load:
                    self.pool.publish(self._known(request, group, at, request.tables[group][at]))
        for group, (part, need) in enumerate(zip(parts, found.matches, strict=True)):
            if part.source is not None and need.partial is not None:
                own = request.tables[group][need.end]
                copy = self.tiers.copy(group, part.source.block, own, need.partial.tokens)
                pending += [] if copy is None else [copy]
        self._pending.update((block, copy) for copy in pending for block in copy.blocks)
        return pending

    def _hits(self, found: LookupResult) -> Counter[str]:
        unit = math.lcm(*(group.block_size for group in self._groups))
        partials = [need.partial for need in found.matches if need.partial is not None]
        loaded = max(
            len(need.load) * group.block_size + (need.partial.tokens if need.partial and not need.partial.device else 0)
            for need, group in zip(found.matches, self._groups, strict=True)
        )
        copied = found.tokens % unit if partials and all(partial.device for partial in partials) else 0
        return Counter(device=found.tokens - loaded - copied, tiers=loaded, copied=copied)

    # ------------------------------------------------------------------ compute

    def _compute(self, request: Request) -> torch.Tensor | None:
        """Logits after the last token; `None` if there are no blocks left to compute in."""
        while True:
            try:
                return self._forward(request)
            except _NotLoadedError:
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
            for copy in request.pending:
                if not copy.wait_layer(layer):
                    raise _NotLoadedError

        new = request.tokens[request.computed :]
        logits = self.decoder.forward(new, request.computed, request.tables, self.pool.pages, before_layer)
        for copy in request.pending:
            if not copy.wait_all():
                raise _NotLoadedError
        return logits

    # ------------------------------------------------------------------ publish

    def _close_pending(self) -> None:
        """Close the copies that no request waits for. Blocks that have not arrived by now leave the prefix cache."""
        awaited = {copy for request in self.running for copy in request.pending}
        for copy in dict.fromkeys(self._pending.values()):
            if copy not in awaited and not copy.close():
                for block in copy.blocks:
                    self.pool.forget(block)
        self._pending = {block: copy for block, copy in self._pending.items() if copy in awaited}

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
            text = PromptTokens(request.tokens[: request.computed], self._roots[group])
            unique = self.tiers.store(group, path, blocks, first, text)
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
        request.tables, request.pending = [], []

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
