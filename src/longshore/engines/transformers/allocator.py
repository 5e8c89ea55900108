"""The device cache of continuous batching, with tiers below it.

    match_prefix_blocks    blocks that the device lacks come up from the tiers, within a deadline
    mark_complete_blocks   complete blocks are committed
    evict_cached_blocks    blocks about to be evicted are committed again; none is reused while a job reads it

transformers identifies device blocks by a 64-bit hash of its own; below the device Longshore's keys are used.
Where the tiers fail, the engine sees fewer blocks: always safe.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers.generation.continuous_batching.cache_allocators import FullAttentionCacheAllocator
from transformers.generation.continuous_batching.cache_allocators.cache_allocator import (
    BlockLedger,
    compute_block_hash,
)

from longshore.boundary import DEVICE, Key
from longshore.engines.transformers.contract import check_allocator
from longshore.engines.transformers.prompts import Prompts
from longshore.errors import EngineError, LongshoreError
from longshore.keys import KeyChain, chain
from longshore.runtime.guard import BlockGuard
from longshore.runtime.stack import Stack

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """Where a prompt's leading blocks came from: `sources[i]` names the tier of block `i` (`"device"` included).

    `request` is what `longshore explain` knows the prompt by: transformers does not say for whom it looks blocks up.
    """

    prompt_tokens: int
    block_size: int
    sources: tuple[str, ...]
    request: str


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A chunk on the device: the path of keys that ends with it, `prompt` of them a prompt's; and its blocks."""

    path: Sequence[Key]
    position: int
    prompt: int
    blocks: tuple[int, ...]


class Owner(Protocol):
    """Who has the tiers of an allocator."""

    def admit(self, config: Any) -> bool:
        """Whether a cache for a model of this configuration object is to have tiers; those before it are closed."""

    def open(self, allocator: TieredAllocator) -> Stack | None:
        """The tiers for an allocator whose tensor exists; `None` if they are off."""


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

    owner: Owner

    @classmethod
    def over(cls, owner: Owner) -> type[TieredAllocator]:
        """The class whose instances get their tiers from `owner`."""
        return type(cls.__name__, (cls,), {"owner": owner})

    def __init__(self, *, config: Any, **kwargs: Any) -> None:
        super().__init__(config=config, **kwargs)
        self._admitted = self.owner.admit(config)
        self._compute: torch.Stream | None = None
        self._stack: Stack | None = None
        self._chains: dict[str, tuple[KeyChain, int]] = {}
        """Keys of each request, and how many of its chunks are of the prompt alone."""
        self._chunks: dict[Key, _Chunk] = {}
        self._key_of: dict[int, Key] = {}
        self.records: deque[PromptRecord] = deque(maxlen=4096)
        self.lookups = 0
        self._prompts = Prompts()

    # ------------------------------------------------------------------ what transformers calls

    def register_cache_tensor(self, *args: Any, **kwargs: Any) -> None:
        """The device cache exists: build the tiers for it."""
        super().register_cache_tensor(*args, **kwargs)
        check_allocator(self)
        if self._admitted:
            self.attach(self.owner.open(self))

    def attach(self, stack: Stack | None) -> None:
        """From here on, `stack` is below the device cache; with `None`, nothing is. The one before is closed."""
        self._reclaim()
        self._stack = stack
        if stack is not None:
            self._guard = BlockGuard(stack.runtime, stack.config.write_timeout)
            self.ledger = TieredLedger(self._leaving, self._offload_evicted, self._forgotten)

    def forget(self) -> None:
        """Evict all cached blocks of the device, without offloading them. No request may be active."""
        if self.block_table:
            raise EngineError(f"{len(self.block_table)} requests are active: the engine must be idle")
        if isinstance(self.ledger, TieredLedger):
            self.pool.free_blocks(self.index, self.ledger.drop_cached_blocks())

    def match_prefix_blocks(self, prompt_ids: list[int]) -> list[int]:
        """Blocks of the longest prefix that is on the device, or comes up from the tiers in time."""
        blocks: list[int] = super().match_prefix_blocks(prompt_ids)
        sources = [DEVICE] * len(blocks)
        request = f"prompt-{self.lookups}"
        if self._stack is not None:
            try:
                onboarded, tiers = self._onboard(self._stack, request, prompt_ids, blocks)
                blocks, sources = blocks + onboarded, sources + tiers
            except LongshoreError:
                _log.exception("a prompt is recomputed: its blocks could not be looked up")
            self._prompts.looked_up(prompt_ids, len(blocks) * self.tokens_per_page, self._stack.runtime.clock())
        self.lookups += 1
        self.records.append(PromptRecord(len(prompt_ids), self.tokens_per_page, tuple(sources), request))
        return blocks

    def mark_complete_blocks(self, request_id: str, token_ids: list[int], new_new_blocks: int) -> None:
        """A forward pass completed blocks of a request: commit the chunks that are whole now."""
        super().mark_complete_blocks(request_id, token_ids, new_new_blocks)
        if self._stack is not None:
            try:
                self._commit_request(self._stack, request_id, token_ids)
            except LongshoreError:
                _log.exception("blocks were not offloaded")

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """A layer's keys and values, written and read: on the stream that copies must be ordered with."""
        self._note_compute()
        return super().update(*args, **kwargs)

    def get_cache_for_block_table(self, layer_idx: int) -> Any:
        """A layer's pages, for a kernel on the stream that copies must be ordered with."""
        self._note_compute()
        return super().get_cache_for_block_table(layer_idx)

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        """A request is over. Its blocks are released tail first, so that a prefix's head is evicted last."""
        self._chains.pop(request_id, None)
        self._reclaim()
        if request_id in self.block_table:
            self.block_table[request_id] = self.block_table[request_id][::-1]
        super().free_blocks(request_id, no_cache)

    @property
    def used_bytes(self) -> int:
        """Bytes of the device cache that are not free, blocks that are kept for reuse included."""
        return (int(self.num_blocks) - self._obtainable()) * int(self.bytes_per_block)

    # ------------------------------------------------------------------ onboard

    def _onboard(
        self, stack: Stack, request: str, prompt: list[int], present: list[int]
    ) -> tuple[list[int], list[str]]:
        """Device blocks for what follows `present`, filled and registered, and the tier that each came from."""
        per_chunk = stack.config.blocks_per_chunk
        limit = (len(prompt) - 1) // self.tokens_per_page  # the last token is always computed
        if len(present) >= limit:
            return [], []
        keys = chain(stack.scope.root, prompt, per_chunk * self.tokens_per_page)[: -(-limit // per_chunk)]
        start, skip = divmod(len(present), per_chunk)
        with stack.runtime.control() as cache:
            match = cache.match(keys, stack.runtime.clock(), start=min(start, len(keys)), request=request)
        if match.hold is None:
            return [], []
        blocks: list[int] = []
        filled: list[str] = []
        try:
            chunks = stack.runtime.worth_loading(match.hold, len(present) * self.tokens_per_page)
            wanted = min(chunks * per_chunk - skip, limit - len(present))
            blocks = self._take_blocks(wanted, reserve=self._blocks_for(len(prompt)) - len(present), keep=present)
            if not blocks:
                return [], []
            stack.engine.begin_step(self._compute)
            with stack.runtime.control() as cache:
                order = cache.onboard(match.hold, blocks, skip=skip)
                at = -skip
                for part in order.parts:
                    end = at + part.chunks * per_chunk
                    self._guard.add(part.job, blocks[max(0, at) : end])
                    at = end
            outcome = stack.runtime.wait_onboarded(match.hold, stack.config.load_timeout)
            filled = [tier for tier in outcome.sources for _ in range(per_chunk)][skip : skip + len(blocks)]
        finally:
            self._give_blocks(blocks[len(filled) :])
            with stack.runtime.control() as cache:
                cache.release(match.hold)
        return self._register(prompt, present, blocks[: len(filled)]), filled

    def _take_blocks(self, wanted: int, reserve: int, keep: Sequence[int]) -> list[int]:
        """Up to `wanted` free blocks, cached ones evicted so that `reserve` blocks, the whole request, can be had.

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

    def _commit_request(self, stack: Stack, request_id: str, token_ids: list[int]) -> None:
        table = self.block_table[request_id]
        complete = next((i for i, b in enumerate(table) if b not in self.ledger.block_to_hash), len(table))
        per_chunk = stack.config.blocks_per_chunk
        chunk_tokens = per_chunk * self.tokens_per_page
        if request_id not in self._chains:
            prompt = self._begin(stack, token_ids, complete) // chunk_tokens
            self._chains[request_id] = KeyChain(stack.scope.root, chunk_tokens), prompt
        keys, prompt = self._chains[request_id]
        known = len(keys.keys)
        whole = complete // per_chunk
        if whole <= known:
            return
        keys.extend(token_ids[known * chunk_tokens : whole * chunk_tokens])
        for position in range(known, whole):
            blocks = tuple(table[position * per_chunk : (position + 1) * per_chunk])
            self._remember(_Chunk(keys.keys, position, prompt, blocks))
        self._commit(stack, keys.keys[:whole], table[: whole * per_chunk], 0, prompt, evicting=False)

    def _begin(self, stack: Stack, token_ids: list[int], complete: int) -> int:
        """The first blocks of a request are complete; returns how many of its tokens are its prompt.

        What the step took tells the gate how quick computing is: never too little, as others were computed with it.
        """
        told = self._prompts.began(token_ids)
        if told is None:
            return len(token_ids)
        computed = min(complete * self.tokens_per_page, told.tokens) - told.context
        stack.runtime.saw_prefill(told.context, max(0, computed), stack.runtime.clock() - told.at)
        return told.tokens

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
        try:
            self._commit_paths(self._stack, [self._chunks[key] for key in keys])
        except LongshoreError:
            _log.exception("evicted blocks were not offloaded")

    def _commit_paths(self, stack: Stack, chunks: Sequence[_Chunk]) -> None:
        done: set[Key] = set()
        for tail in sorted(chunks, key=lambda chunk: -chunk.position):
            if tail.path[tail.position] in done:
                continue
            first = tail.position
            run = [tail]
            while first and (parent := self._chunks.get(tail.path[first - 1])) is not None:
                run.insert(0, parent)
                first -= 1
            done.update(tail.path[first : tail.position + 1])
            blocks = [block for chunk in run for block in chunk.blocks]
            self._commit(stack, tail.path[: tail.position + 1], blocks, first, tail.prompt, evicting=True)

    def _commit(
        self, stack: Stack, keys: Sequence[Key], blocks: Sequence[int], first: int, prompt: int, *, evicting: bool
    ) -> None:
        per_chunk = stack.config.blocks_per_chunk
        stack.engine.begin_step(self._compute)
        with stack.runtime.control() as cache:
            offload = cache.commit(keys, blocks, first=first, evicting=evicting, prompt=prompt)
            if offload.job is not None:
                taken = [placement.position - first for placement in offload.accepted]
                read = [b for i in taken for b in blocks[i * per_chunk : (i + 1) * per_chunk]]
                self._guard.add(offload.job, read)

    # ------------------------------------------------------------------ blocks

    def _leaving(self, blocks: list[int]) -> list[int]:
        """`blocks` are on their way to the pool: those of them that no job touches may go there now."""
        for block in blocks:
            chunk = self._chunks.pop(self._key_of.get(block, b""), None)
            for each in chunk.blocks if chunk is not None else (block,):
                self._key_of.pop(each, None)
        return self._guard.settle(blocks)

    def _forgotten(self) -> None:
        """transformers resets its cache: all blocks go to the pool at once, so no job may touch one any more."""
        self._chains.clear()
        self._chunks.clear()
        self._key_of.clear()
        self._guard.drain()

    def _note_compute(self) -> None:
        if self._copy_view.device.type != "cpu":
            self._compute = torch.accelerator.current_stream()

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.tokens_per_page)

    def _obtainable(self) -> int:
        """Blocks that are free, or in sectors that are."""
        free: int = self.pool.count_free_blocks(self.index)
        return free + int(self.pool.num_free_sectors) * int(self.blocks_per_sector)

    def _give_blocks(self, blocks: Sequence[int], *, settled: bool = False) -> None:
        """Give blocks back to the pool, those that a job still touches later."""
        if blocks:
            self.pool.free_blocks(self.index, list(blocks) if settled else self._guard.settle(blocks))

    def _reclaim(self) -> None:
        if self._stack is not None and (freed := self._guard.reclaim()):
            self.pool.free_blocks(self.index, freed)
