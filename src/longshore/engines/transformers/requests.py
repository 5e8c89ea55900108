"""Prompts that were looked up. transformers repeats a lookup while its request waits; the request is counted once.

match_prefix_blocks ──► the latest `PromptLookup` of a request, again and again
the request begins ───► a `PromptRecord`, and the counters

While it waits, `WaitingPrefetcher` keeps what it is to find, and has it read from files into host memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from longshore.boundary import REMOTE, Key
from longshore.cache import GroupKeys, Lease, PrefetchPolicy, TieredCache
from longshore.hints import RequestHints
from longshore.runtime.remote_fetch import fetch
from longshore.runtime.stack import Stack


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """Where a prompt's leading blocks came from: `sources[i]` names the tier of block `i` (`"device"` included).

    What a store has sent for this prompt is the store's, though it went through host memory.

    `request` is what `longshore explain` knows it by: the engine's name of it, `req_0`. The names of transformers begin
    anew with each device cache, so those of the second one are `req_0@2`, `req_1@2`, ...
    """

    prompt_tokens: int
    block_size: int
    sources: tuple[str, ...]
    request: str


class KeptLease(NamedTuple):
    """A lease for a request that waits, on the chunks `keys`."""

    lease: Lease
    keys: Sequence[Key]


@dataclass(slots=True)
class PromptLookup:
    """The latest lookup for a request: transformers repeats it while the request waits, and it is counted once.

    `hints` are what the request says of its blocks. `context` of the prompt's `tokens` were on the device at time `at`.
    `path` is what the tiers were asked for, `request_number` that of the request in the cache, once it was looked up.

    While the request waits, `kept` is what is kept for it. Of its prompt `fetched` chunks are in host memory, on the
    device before them, or on their way. `is_fetched` says that no more will be prefetched, `is_late` that the request
    waits for it. `fetched_from` names the store of each chunk that one was asked to send for it.
    """

    request: str
    hints: RequestHints
    tokens: int = 0
    context: int = 0
    at: float = 0.0
    sources: tuple[str, ...] = ()
    path: GroupKeys | None = None
    request_number: int | None = None
    is_counted: bool = False
    is_over: bool = False
    kept: KeptLease | None = None
    fetched: int = 0
    is_fetched: bool = False
    is_late: bool = False
    fetched_from: dict[Key, str] = field(default_factory=dict)


class WaitingPrefetcher:
    """Prefetches for requests that wait. All their leases together take at most half of the host tier."""

    def __init__(self, stack: Stack) -> None:
        self._runtime = stack.runtime
        self.waits = stack.config.prefetch is not PrefetchPolicy.BEST_EFFORT
        self._has_stores = bool(stack.remote)
        self._per_chunk = stack.config.blocks_per_chunk
        with stack.runtime.locked() as cache:
            self.room = cache.stats()[0].slots // 2
        self.keys: Counter[Key] = Counter()
        """Leased chunks, and for how many requests each."""

    @property
    def is_full(self) -> bool:
        """Whether no more chunks can be leased."""
        return len(self.keys) >= self.room

    def fetch(self, cache: TieredCache, lookup: PromptLookup, path: GroupKeys, context: int, block_size: int) -> None:
        """Prefetch what the tiers have of `path`, as far as there is room, and as reading is quicker than computing.

        `context`: tokens before it, which are on the device. Without room for all of it, or while a store is asked or
        read, `lookup` is not `is_fetched`.
        """
        is_probing = False
        if self._has_stores and REMOTE in lookup.hints.load:
            chunk_tokens = self._per_chunk * block_size
            under_way = fetch(self._runtime, cache, path, context, chunk_tokens, for_prefetch=True)
            lookup.fetched_from.update(under_way.names)
            is_probing = bool(under_way.probes or under_way.jobs)
        keys, former = path.keys, lookup.kept
        end, left = path.start, self.room - len(self.keys)
        while end < len(keys) and left > 0:
            left -= keys[end] not in self.keys
            end += 1
        lookup.is_fetched = end == len(keys) and not is_probing
        if end < len(keys):
            path = path._replace(chunks=keys[:end], prompt_tokens=None)
        try:
            kept = self._keep(cache, lookup, path)
            if kept is not None:
                worth = self._runtime.worth_loading(kept.lease, context, for_prefetch=True)
                if worth < len(kept.keys):
                    self.end(cache, lookup)
                    less = path._replace(chunks=keys[: path.start + worth], prompt_tokens=None)
                    kept = self._keep(cache, lookup, less) if worth else None
            if kept is not None:
                lookup.fetched = path.start + len(kept.keys)
                cache.prefetch(kept.lease, self._runtime.clock())
                lookup.is_late = self.waits
        finally:
            if former is not None:
                self._let_go(cache, former)

    def is_late(self, cache: TieredCache, lookup: PromptLookup) -> bool:
        """Whether the request must wait for its prefetch, by the setting `prefetch`."""
        if lookup.is_late and lookup.kept is not None:
            lookup.is_late = not cache.progress(lookup.kept.lease).is_over
        return lookup.is_late

    def end(self, cache: TieredCache, lookup: PromptLookup) -> None:
        """The request waits no longer: cancel prefetches that no other request waits for."""
        kept, lookup.kept = lookup.kept, None
        if kept is not None:
            self._let_go(cache, kept)

    def _keep(self, cache: TieredCache, lookup: PromptLookup, path: GroupKeys) -> KeptLease | None:
        """Lease what the tiers have of `path`."""
        now = self._runtime.clock()
        found = cache.lookup(
            {0: path}, now, request=lookup.request, count=False, request_number=lookup.request_number, remote_tiers=()
        )
        lookup.request_number, lookup.kept = found.request_number, None
        if found.lease is not None:
            keys = list(path.keys[path.start : path.start + found.num_chunks])
            lookup.kept = KeptLease(found.lease, keys if found.partial is None else [*keys, found.partial.key])
            self.keys.update(lookup.kept.keys)
        return lookup.kept

    def _let_go(self, cache: TieredCache, kept: KeptLease) -> None:
        cache.release(kept.lease)
        self.keys.subtract(kept.keys)
        for key in kept.keys:
            if not self.keys[key]:
                del self.keys[key]
