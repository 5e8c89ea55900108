"""The device cache of continuous batching, with tiers below it.

    prefetch_waiting       what files and stores have of requests that wait is read into host memory
    match_prefix_blocks    blocks that the device lacks come up from the tiers, within a deadline
    mark_complete_blocks   complete blocks are committed
    evict_cached_blocks    blocks about to be evicted are committed again; none is reused while a job reads it

transformers identifies device blocks by a 64-bit hash of its own; below the device Longshore's keys are used.
Where the tiers fail, the engine sees fewer blocks: always safe.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch
from transformers.generation.continuous_batching.cache_allocators import FullAttentionCacheAllocator
from transformers.generation.continuous_batching.cache_allocators.cache_allocator import BlockLedger, compute_block_hash

from longshore.boundary import DEVICE, FILE, HOST, REMOTE, Key
from longshore.cache import GroupKeys, Lease, PromptTokens, Protection, Retention
from longshore.engines.transformers.contract import check_allocator
from longshore.engines.transformers.requests import PromptLookup, PromptRecord, WaitingPrefetcher
from longshore.errors import DeviceError, EngineError, QueueFullError, TierClosedError, TierError, TokenError
from longshore.hints import RequestHints
from longshore.keys import KeyChain, chain
from longshore.runtime.block_guard import BlockGuard
from longshore.runtime.error_handler import with_fallback
from longshore.runtime.loop import Runtime
from longshore.runtime.remote_fetch import fetch_and_wait
from longshore.runtime.stack import Stack

_EXPECTED = (TokenError, TierError, DeviceError, QueueFullError)
"""Errors that are no fault of the control plane: the blocks of one call are computed, or not stored."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A chunk on the device: the path of keys that ends with it, `prompt` of them a prompt's; and its blocks.

    `retention` is what its request says of the path. `tokens` are the chunk's, where partial matches ask for them.
    """

    path: Sequence[Key]
    position: int
    prompt: int
    blocks: tuple[int, ...]
    retention: tuple[Retention, ...]
    tokens: array[int] | None


class TierOwner(Protocol):
    """Owns the tiers of an allocator."""

    def register_cache(self, config: Any) -> int:
        """The number of a cache for a model of this configuration object, from 1; 0 if it may not have tiers.

        A former one gives them up.
        """

    def open(self, allocator: TieredAllocator) -> Stack | None:
        """The tiers for an allocator whose tensor exists, and that has no request; `None` if they are off."""

    def record(self, prompt: PromptRecord) -> None:
        """A prompt of a registered cache was looked up."""

    def hints_for(self, request: str) -> RequestHints:
        """The hints of a request that begins, by the engine's name; asked for once."""


class TieredLedger(BlockLedger):
    """transformers' ledger, whose blocks pass `leaving` on their way back to the pool."""

    def __init__(
        self,
        leaving: Callable[[list[int]], list[int]],
        evicting: Callable[[list[int]], None],
        forgotten: Callable[[], None],
    ) -> None:
        super().__init__()
        self._leaving = leaving
        self._evicting = evicting
        self._forgotten = forgotten

    def reset(self) -> None:
        """Forget everything; the pool is about to take all blocks back."""
        super().reset()
        self._forgotten()

    def release(self, block_id: int, no_cache: bool = False) -> bool:
        """Drop a reference; whether the block may go to the pool now."""
        return bool(super().release(block_id, no_cache)) and bool(self._leaving([block_id]))

    def evict_cached_blocks(self) -> list[int]:
        """Evict all cached blocks; those that may go to the pool now."""
        self._evicting(list(self.cached_blocks))
        return self._leaving(super().evict_cached_blocks())

    def drop_cached_blocks(self) -> list[int]:
        """Evict all cached blocks as worthless; those that may go to the pool now."""
        return self._leaving(super().evict_cached_blocks())

    def evict_oldest(self, count: int, keep: set[int]) -> list[int]:
        """Evict up to `count` cached blocks that are not in `keep`, least recently released first."""
        victims = [block for block in self.cached_blocks if block not in keep][:count]
        self._evicting(victims)
        for block in victims:
            del self.cached_blocks[block]
            del self.hash_to_block[self.block_to_hash.pop(block)]
        return self._leaving(victims)


class TieredAllocator(FullAttentionCacheAllocator):
    """transformers' full-attention allocator over a `Stack`.

    transformers makes it, from a class in its registry: `over` gives the class whose instances ask `owner` for tiers.
    """

    owner: TierOwner

    @classmethod
    def over(cls, owner: TierOwner) -> type[TieredAllocator]:
        """The class whose instances get their tiers from `owner`."""
        return type(cls.__name__, (cls,), {"owner": owner})

    def __init__(self, *, config: Any, **kwargs: Any) -> None:
        super().__init__(config=config, **kwargs)
        self._number = self.owner.register_cache(config)
        self._compute: torch.Stream | None = None
        self._stack: Stack | None = None
        self._ahead: WaitingPrefetcher | None = None
        self._chains: dict[str, tuple[KeyChain, int]] = {}
        """Keys of each request, and how many of its chunks are of the prompt alone."""
        self._chunks: dict[Key, _Chunk] = {}
        self._key_of: dict[int, Key] = {}
        self.asking: str | None = None
        """The request that the next prompt is looked up for."""
        self._unnamed = itertools.count()
        self._lookups: dict[str, PromptLookup] = {}
        self._thread: threading.Thread | None = None
        """Where the engine's loop runs."""

    # ------------------------------------------------------------------ what transformers calls

    def register_cache_tensor(self, *args: Any, **kwargs: Any) -> None:
        """The device cache exists: build the tiers for it."""
        super().register_cache_tensor(*args, **kwargs)
        check_allocator(self)
        if threading.current_thread() is not threading.main_thread():
            self._thread = threading.current_thread()
        if self._number:
            self.attach(self.owner.open(self))

    def free_all_requests(self) -> None:
        """The engine's loop begins anew: whether the tiers still fit the model is looked at."""
        super().free_all_requests()
        self._thread = threading.current_thread()
        if self._number and hasattr(self, "_copy_view"):
            self.attach(self.owner.open(self))

    @property
    def in_use(self) -> bool:
        """Whether an engine's loop, other than one in the calling thread, works with this device cache."""
        thread = self._thread
        return thread is not None and thread is not threading.current_thread() and thread.is_alive()

    def offload_cached(self) -> None:
        """Offload the blocks that are kept for reuse; they stay where they are."""
        self._offload_evicted(list(self.ledger.cached_blocks))

    def attach(self, stack: Stack | None) -> None:
        """From here on, `stack` is below the device cache; with `None`, nothing is."""
        if stack is self._stack:
            return
        self._reclaim()
        self._stop_waiting(self._lookups.values())
        self._stack, self._ahead = stack, None
        for lookup in self._lookups.values():
            lookup.path = lookup.request_number = lookup.kept = None  # of the former tiers
        if stack is not None:
            if stack.host is not None and (stack.file is not None or stack.remote) and self.use_block_sharing:
                self._ahead = WaitingPrefetcher(stack)
            self._guard = BlockGuard(stack.runtime, stack.config.write_timeout)
            if not isinstance(self.ledger, TieredLedger):
                self.ledger = TieredLedger(self._leaving, self._offload_evicted, self._forgotten)

    def forget(self) -> None:
        """Evict all cached blocks of the device, without offloading them. No request may be active."""
        if self.block_table:
            raise EngineError(
                f"expected an idle engine, got {len(self.block_table)} active requests: wait until they have ended"
            )
        if isinstance(self.ledger, TieredLedger):
            self.pool.free_blocks(self.index, self.ledger.drop_cached_blocks())

    @property
    def delays_requests(self) -> bool:
        """Whether requests do not begin before their prefetch is over, by the setting `prefetch`."""
        return self._ahead is not None and self._ahead.waits

    def prefetch_waiting(self, waiting: Iterable[tuple[str, list[int]]]) -> set[str]:
        """Requests wait, these, in this order, by name and prompt: prefetch for them, from files into host memory.

        Returns the names of those that are not to begin yet, if requests are held back.
        """
        if self._stack is None or self._ahead is None:
            return set()
        return self._fetch(self._stack, self._ahead, waiting)

    def loop_ended(self) -> None:
        """The engine's loop has ended, and with it all requests."""
        self._stop_waiting(self._lookups.values())
        self._lookups.clear()

    def match_prefix_blocks(self, prompt_ids: list[int]) -> list[int]:
        """Blocks of the longest prefix that is on the device, or comes up from the tiers in time."""
        blocks: list[int] = super().match_prefix_blocks(prompt_ids)
        sources = [DEVICE] * len(blocks)
        request, self.asking = self.asking or f"prompt-{next(self._unnamed)}", None
        lookup = self._lookup(request)
        if self._stack is not None:
            self._stack.runtime.lookup_counters.attempts += 1
            onboarded, tiers = self._onboard(self._stack, lookup, prompt_ids, blocks)
            blocks, sources = blocks + onboarded, sources + tiers
            lookup.at = self._stack.runtime.clock()
        lookup.tokens, lookup.context = len(prompt_ids), len(blocks) * self.tokens_per_page
        lookup.sources = tuple(sources)
        if blocks:
            self._end_lookup(lookup)
        return blocks

    def allocate_cache_to_request(self, request_id: str, past_length: int, query_length: int) -> None:
        """A request gets blocks: if it has waited for them, it is not looked up again."""
        super().allocate_cache_to_request(request_id, past_length, query_length)
        if request_id in self._lookups:
            self._end_lookup(self._lookups[request_id])

    def _lookup(self, request: str) -> PromptLookup:
        name = request if self._number < 2 else f"{request}@{self._number}"  # transformers names begin anew
        if request not in self._lookups:
            self._lookups[request] = PromptLookup(name, self.owner.hints_for(request))
        return self._lookups[request]

    def _end_lookup(self, lookup: PromptLookup) -> None:
        """The request begins with what its latest lookup has found."""
        if lookup.is_over:
            return
        lookup.is_over = True
        if self._number:
            self.owner.record(PromptRecord(lookup.tokens, self.tokens_per_page, lookup.sources, lookup.request))
        if self._stack is not None:
            self._stack.runtime.lookup_counters.requests += 1
            self._count_request(self._stack, lookup)
            self._stop_waiting([lookup])

    @with_fallback(lambda self, stack, lookup: None, expected=_EXPECTED)
    def _count_request(self, stack: Stack, lookup: PromptLookup) -> None:
        """The request begins now: what the tiers lack of it is missed."""
        with stack.runtime.batch() as cache:
            if lookup.path is not None and not lookup.is_counted:
                lookup.is_counted = True
                path, now, name = {0: lookup.path}, stack.runtime.clock(), lookup.request
                cache.lookup(path, now, protect=Protection.NONE, request=name, request_number=lookup.request_number)

    def mark_complete_blocks(self, request_id: str, token_ids: list[int], new_new_blocks: int) -> None:
        """A forward pass completed blocks of a request: commit the chunks that are whole now."""
        super().mark_complete_blocks(request_id, token_ids, new_new_blocks)
        if self._stack is not None:
            self._commit_request(self._stack, request_id, token_ids)

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """A layer's keys and values, written and read: on the stream that copies must be ordered with."""
        self._note_compute()
        return super().update(*args, **kwargs)

    def get_cache_for_block_table(self, layer_idx: int) -> Any:
        """A layer's pages, for a kernel on the stream that copies must be ordered with."""
        self._note_compute()
        return super().get_cache_for_block_table(layer_idx)

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        """A request has ended. Its blocks are released tail first, so that the head of a prefix is evicted last."""
        self._chains.pop(request_id, None)
        if (lookup := self._lookups.pop(request_id, None)) is not None:
            self._stop_waiting([lookup])
        self._reclaim()
        if request_id in self.block_table:
            self.block_table[request_id] = self.block_table[request_id][::-1]
        super().free_blocks(request_id, no_cache)

    @property
    def used_bytes(self) -> int:
        """Bytes of the device cache that are not free, blocks that are kept for reuse included."""
        return (int(self.num_blocks) - self._obtainable()) * int(self.bytes_per_block)

    @property
    def _runtime(self) -> Runtime:
        """The runtime whose faults are handled here; only asked for where there are tiers."""
        return cast("Stack", self._stack).runtime

    # ------------------------------------------------------------------ requests that wait

    @with_fallback(lambda self, stack, ahead, waiting: set[str](), expected=_EXPECTED)
    def _fetch(self, stack: Stack, ahead: WaitingPrefetcher, waiting: Iterable[tuple[str, list[int]]]) -> set[str]:
        late: set[str] = set()
        with stack.runtime.batch() as cache:
            for request, prompt in waiting:
                lookup = self._lookup(request)
                if not lookup.is_fetched:
                    if ahead.is_full:
                        break
                    lookup.is_fetched = True  # whatever comes of it
                    present = len(super().match_prefix_blocks(prompt))
                    if {FILE, REMOTE}.intersection(lookup.hints.load) and present < self._limit(prompt):
                        path = self._path(stack, prompt, present)
                        ahead.fetch(cache, lookup, path, present * self.tokens_per_page, self.tokens_per_page)
                if ahead.is_late(cache, lookup):
                    late.add(request)
        return late

    def _stop_waiting(self, lookups: Iterable[PromptLookup]) -> None:
        """End the prefetches of requests that wait no longer."""
        kept = [lookup for lookup in lookups if lookup.kept is not None]
        if kept and self._stack is not None and self._ahead is not None:
            self._end_prefetches(self._stack, self._ahead, kept)

    @with_fallback(lambda self, stack, ahead, lookups: None, expected=_EXPECTED)
    def _end_prefetches(self, stack: Stack, ahead: WaitingPrefetcher, lookups: Sequence[PromptLookup]) -> None:
        with contextlib.suppress(TierClosedError), stack.runtime.batch() as cache:
            for lookup in lookups:
                ahead.end(cache, lookup)

    def _limit(self, prompt: Sequence[int]) -> int:
        """Blocks of `prompt` that need not be computed: its last token always is."""
        return (len(prompt) - 1) // self.tokens_per_page

    def _path(self, stack: Stack, prompt: list[int], present: int) -> GroupKeys:
        """What to look up of `prompt`, whose first `present` blocks are on the device."""
        per_chunk, limit = stack.config.blocks_per_chunk, self._limit(prompt)
        keys = chain(stack.scope.digest, prompt, per_chunk * self.tokens_per_page)[: -(-limit // per_chunk)]
        text = PromptTokens(prompt[: limit * self.tokens_per_page], stack.scope.digest) if per_chunk > 1 else None
        stack.record_tokens(keys, 0, prompt)
        return GroupKeys(keys, min(present // per_chunk, len(keys)), prompt_tokens=text)

    # ------------------------------------------------------------------ onboard

    @with_fallback(lambda self, stack, lookup, prompt, present: (list[int](), list[str]()), expected=_EXPECTED)
    def _onboard(
        self, stack: Stack, lookup: PromptLookup, prompt: list[int], present: list[int]
    ) -> tuple[list[int], list[str]]:
        """Device blocks for the blocks after `present`, filled and registered, and the tier of each."""
        per_chunk, limit = stack.config.blocks_per_chunk, self._limit(prompt)
        if len(present) >= limit or not lookup.hints.load:
            return [], []
        skip = len(present) % per_chunk
        lookup.path = self._path(stack, prompt, len(present))
        if stack.remote and REMOTE in lookup.hints.load:
            context, timeout = len(present) * self.tokens_per_page, stack.config.load_timeout
            sent = fetch_and_wait(stack.runtime, lookup.path, context, per_chunk * self.tokens_per_page, timeout)
            lookup.fetched_from.update(sent)
        now, name = stack.runtime.clock(), lookup.request
        with stack.runtime.batch() as cache, stack.runtime.lookup_counters.seconds.timed():
            found = cache.lookup(
                {0: lookup.path},
                now,
                request=name,
                count=False,
                request_number=lookup.request_number,
                reuse_hint=lookup.hints.reuse_hint,
                remote_tiers=(),
            )
        lookup.request_number, lease = found.request_number, found.lease
        if lease is None:
            return [], []
        blocks: list[int] = []
        filled: list[str] = []
        try:
            fetched = max(0, lookup.fetched - lookup.path.start)
            chunks = stack.runtime.worth_loading(lease, len(present) * self.tokens_per_page, least=fetched)
            if FILE not in lookup.hints.load:
                with stack.runtime.batch() as cache:
                    chunks = min(chunks, cache.progress(lease).leading(HOST))
            leading = found.partial.tokens // self.tokens_per_page if found.partial and chunks > found.num_chunks else 0
            wanted = min(min(chunks, found.num_chunks) * per_chunk + leading - skip, limit - len(present))
            if wanted <= 0:
                return [], []
            reserve = -(-len(prompt) // self.tokens_per_page) - len(present)
            blocks = self._take_blocks(wanted, reserve, keep=present)
            if not blocks:
                return [], []
            self._count_request(stack, lookup)
            stack.transfer_engine.begin_step(self._compute)
            origins, uses = lookup.fetched_from, self._guard.add
            sources = stack.load_path(found, lookup.path, blocks, uses, skip=skip, request=name, origins=origins)
            filled = [tier for tier in sources for _ in range(per_chunk)][skip : skip + len(blocks)]
        finally:
            self._give_blocks(blocks[len(filled) :])
            self._release(stack, lease)
        return self._register(prompt, present, blocks[: len(filled)]), filled

    @with_fallback(lambda self, stack, lease: None, expected=_EXPECTED)
    def _release(self, stack: Stack, lease: Lease) -> None:
        with stack.runtime.batch() as cache:
            cache.release(lease)

    def _take_blocks(self, wanted: int, reserve: int, keep: Sequence[int]) -> list[int]:
        """Up to `wanted` free blocks, cached ones evicted so that `reserve` blocks, the whole request, are available.

        None if they cannot: onboarding for a request that cannot run would only take blocks from those that do.
        """
        self._reclaim()
        missing = reserve - self._obtainable()
        if missing > 0 and isinstance(self.ledger, TieredLedger):
            self._give_blocks(self.ledger.evict_oldest(missing, set(keep)), settled=True)
        count = wanted if self._obtainable() >= reserve else 0
        while self.pool.count_free_blocks(self.index) < count:
            self.pool.allocate_sector(self.index)
        blocks: list[int] = self.pool.get_free_blocks(self.index, count)
        return blocks

    def _register(self, prompt: list[int], present: list[int], blocks: list[int]) -> list[int]:
        """Make filled blocks known to the ledger as cached; where it has one of the same content, that one is used."""
        page = self.tokens_per_page
        parent = self.ledger.block_to_hash[present[-1]] if present else None
        known: list[int] = []
        for i, block in enumerate(blocks, start=len(present)):
            parent = compute_block_hash(parent, prompt[i * page : (i + 1) * page])
            twin = self.ledger.register_new_hash(block, parent)
            if twin is None:
                self.ledger.cached_blocks[block] = None
            else:
                self._give_blocks([block])
            known.append(block if twin is None else twin)
        return known

    # ------------------------------------------------------------------ offload

    @with_fallback(lambda self, stack, request_id, token_ids: None, expected=_EXPECTED)
    def _commit_request(self, stack: Stack, request_id: str, token_ids: list[int]) -> None:
        table = self.block_table[request_id]
        complete = next((i for i, b in enumerate(table) if b not in self.ledger.block_to_hash), len(table))
        per_chunk = stack.config.blocks_per_chunk
        chunk_tokens = per_chunk * self.tokens_per_page
        if request_id not in self._chains:
            prompt = self._begin(stack, request_id, token_ids, complete) // chunk_tokens
            self._chains[request_id] = KeyChain(stack.scope.digest, chunk_tokens), prompt
        keys, prompt = self._chains[request_id]
        lookup = self._lookups.get(request_id)
        hints = stack.config.request_hints if lookup is None else lookup.hints
        if not hints.store:
            return
        known, retention = len(keys.keys), hints.chunks(chunk_tokens)
        whole = complete // per_chunk
        if whole <= known:
            return
        keys.extend(token_ids[known * chunk_tokens : whole * chunk_tokens])
        for position in range(known, whole):
            blocks = tuple(table[position * per_chunk : (position + 1) * per_chunk])
            mine = token_ids[position * chunk_tokens : (position + 1) * chunk_tokens]
            tokens = array("I", mine) if per_chunk > 1 or stack.config.kv_events else None
            self._remember(_Chunk(keys.keys, position, prompt, blocks, retention, tokens))
        stack.record_tokens(keys.keys, known, token_ids[known * chunk_tokens : whole * chunk_tokens])
        request_number = None if lookup is None else lookup.request_number
        text = PromptTokens(token_ids[: whole * chunk_tokens], stack.scope.digest) if per_chunk > 1 else None
        path = GroupKeys(keys.keys[:whole], prompt_end=prompt, retention=retention, prompt_tokens=text)
        self._store(stack, path, table[: whole * per_chunk], before_eviction=False, request_number=request_number)

    def _begin(self, stack: Stack, request_id: str, token_ids: list[int], complete: int) -> int:
        """The first blocks of a request are complete; returns how many of its tokens are its prompt.

        What the step took tells the gate how quick computing is: never too little, as others were computed with it.
        """
        lookup = self._lookups.get(request_id)
        if lookup is None:
            return len(token_ids)
        computed = min(complete * self.tokens_per_page, lookup.tokens) - lookup.context
        stack.runtime.observe_prefill(lookup.context, max(0, computed), stack.runtime.clock() - lookup.at)
        return lookup.tokens

    def _remember(self, chunk: _Chunk) -> None:
        key = chunk.path[chunk.position]
        former = self._chunks.get(key)
        if former is not None and former.blocks != chunk.blocks:
            for block in former.blocks:
                self._key_of.pop(block, None)
        self._chunks[key] = chunk
        self._key_of.update(dict.fromkeys(chunk.blocks, key))

    def _offload_evicted(self, blocks: list[int]) -> None:
        """Commit the chunks of `blocks`, with those of their ancestors that are on the device."""
        if self._stack is None:
            return
        keys = dict.fromkeys(self._key_of[block] for block in blocks if block in self._key_of)
        self._commit_paths(self._stack, [self._chunks[key] for key in keys])

    @with_fallback(lambda self, stack, chunks: None, expected=_EXPECTED)
    def _commit_paths(self, stack: Stack, chunks: Sequence[_Chunk]) -> None:
        done: set[Key] = set()
        for tail in sorted(chunks, key=lambda chunk: -chunk.position):
            if tail.path[tail.position] in done:
                continue
            first = tail.position
            run = [tail]
            while first and (parent := self._chunks.get(tail.path[first - 1])) is not None:
                run.append(parent)
                first -= 1
            run.reverse()
            done.update(tail.path[first : tail.position + 1])
            blocks = [block for chunk in run for block in chunk.blocks]
            keys, text = tail.path[: tail.position + 1], None
            known = [np.array(chunk.tokens, np.uint32) for chunk in run if chunk.tokens is not None]
            if known:  # of the chunks before them nothing is asked
                stack.record_tokens(keys, tail.position + 1 - len(known), np.concatenate(known).tolist())
                text = PromptTokens(
                    np.concatenate([np.zeros(first * len(known[0]), np.uint32), *known]), stack.scope.digest
                )
            path = GroupKeys(keys, first, prompt_tokens=text, prompt_end=tail.prompt, retention=tail.retention)
            self._store(stack, path, blocks, before_eviction=True)

    def _store(
        self,
        stack: Stack,
        path: GroupKeys,
        blocks: Sequence[int],
        *,
        before_eviction: bool,
        request_number: int | None = None,
    ) -> None:
        stack.transfer_engine.begin_step(self._compute)
        with stack.runtime.locked() as cache:
            is_long = len(path.keys) > cache.stats()[0].slots
        timeout = stack.config.write_timeout if before_eviction and is_long else 0.0
        stack.store_path(
            path,
            blocks,
            self._guard.add,
            before_eviction=before_eviction,
            request_number=request_number,
            timeout=timeout,
        )

    # ------------------------------------------------------------------ blocks

    def _leaving(self, blocks: list[int]) -> list[int]:
        """The `blocks`, which return to the pool, that no job uses: these may return now."""
        for block in blocks:
            chunk = self._chunks.pop(self._key_of.get(block, b""), None)
            for each in chunk.blocks if chunk is not None else (block,):
                self._key_of.pop(each, None)
        return self._guard.settle(blocks)

    def _forgotten(self) -> None:
        """transformers resets its cache: all blocks return to the pool, so wait until no job uses one."""
        self._chains.clear()
        self._lookups.clear()
        self._chunks.clear()
        self._key_of.clear()
        self._guard.drain()

    def _note_compute(self) -> None:
        if self._copy_view.device.type != "cpu":
            self._compute = torch.accelerator.current_stream()

    def _obtainable(self) -> int:
        """Blocks that are free, or in sectors that are."""
        free: int = self.pool.count_free_blocks(self.index)
        return free + int(self.pool.num_free_sectors) * int(self.blocks_per_sector)

    def _give_blocks(self, blocks: Sequence[int], *, settled: bool = False) -> None:
        """Return blocks to the pool; those that a job still uses, when it has ended."""
        if blocks:
            self.pool.free_blocks(self.index, list(blocks) if settled else self._guard.settle(blocks))

    def _reclaim(self) -> None:
        if self._stack is not None and (freed := self._guard.reclaim()):
            self.pool.free_blocks(self.index, freed)
