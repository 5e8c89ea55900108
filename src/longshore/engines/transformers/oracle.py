"""The oracle: an engine whose device cache never evicts, made to reuse exactly the blocks that another run reused.

Another hit length is another shape of prefill, and so other numerics: two runs can only be compared bit for bit when
each request starts from the same number of cached tokens (and shares its batches with the same others). For the same
reason equal tokens may have several blocks, which differ in their last bits: one from each request that computed them.
The oracle keeps them all, and takes the one that the recorded run had, known by a digest of its bytes.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from transformers.generation.continuous_batching.cache_allocators import FullAttentionCacheAllocator
from transformers.generation.continuous_batching.cache_allocators.cache_allocator import BlockLedger

from longshore.engines.tensors import RowBlocks
from longshore.engines.transformers.contract import replaced_allocator
from longshore.errors import EngineError


@dataclass(frozen=True, slots=True)
class RequestBlocks:
    """The blocks of one request: the first `hits` were found, the others computed.

    `digests` are of the bytes of its complete blocks as they were at its end, first to last; where one is missing, the
    oracle takes the block that was computed first, or the request's own.
    """

    hits: int
    digests: tuple[bytes, ...] = ()


def block_digests(allocator: FullAttentionCacheAllocator, tokens: Sequence[int]) -> tuple[bytes, ...]:
    """Digests of the blocks that the device has of `tokens`, up to the first that it lacks. No request may be active.

    The last token is left out, as in a lookup.
    """
    return _digests(allocator, FullAttentionCacheAllocator.match_prefix_blocks(allocator, list(tokens)))


def _digests(allocator: FullAttentionCacheAllocator, blocks: Sequence[int]) -> tuple[bytes, ...]:
    rows = RowBlocks(allocator._copy_view)  # read one by one: together they may not fit the device's free memory
    return tuple(hashlib.blake2b(rows.read([block]).tobytes(), digest_size=16).digest() for block in blocks)


class _KeepingLedger(BlockLedger):
    """A ledger of all blocks of the same tokens; `hash_to_block` has the one that was computed first."""

    def register_new_hash(self, block_id: int, block_hash: int) -> None:
        """Keep the block, whether or not there is one of the same tokens."""
        self.block_to_hash[block_id] = block_hash
        self.hash_to_block.setdefault(block_hash, block_id)

    def evict_cached_blocks(self) -> list[int]:
        """Evict nothing. Raises `EngineError` if there are cached blocks to evict."""
        if self.cached_blocks:
            raise EngineError("the oracle's device cache is full: give it more blocks")
        return []


@contextmanager
def replaying(requests: Iterable[RequestBlocks]) -> Iterator[None]:
    """Within this block, the i-th prompt that a transformers engine looks up is served with the blocks `requests[i]`.

    Requests must come one at a time.

    Raises `EngineError` in the engine when a prompt has fewer blocks on the device than were hit, or when the device
    is full.
    """
    waiting = deque(requests)

    class ReplayingAllocator(FullAttentionCacheAllocator):
        """A stock allocator that hits as many blocks as recorded, and of blocks of the same tokens takes the same."""

        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.ledger = _KeepingLedger()
            self._computed: dict[tuple[int, bytes], int] = {}
            """The first block of each hash and digest."""
            self._recorded = RequestBlocks(0)

        def match_prefix_blocks(self, prompt_ids: list[int]) -> list[int]:
            self._recorded = waiting.popleft() if waiting else RequestBlocks(0)
            hits = self._recorded.hits
            blocks: list[int] = super().match_prefix_blocks(prompt_ids)
            if len(blocks) < hits:
                raise EngineError(f"the oracle has {len(blocks)} blocks of a prompt of which {hits} were hit")
            return [self._reused(position, block) for position, block in enumerate(blocks[:hits])]

        def mark_complete_blocks(self, request_id: str, token_ids: list[int], new_new_blocks: int) -> None:
            """Keep the request's own blocks, but where the recorded run went on with others of the same tokens."""
            table, known = self.block_table[request_id], self.ledger.block_to_hash
            first = next((i for i, block in enumerate(table) if block not in known), len(table))
            super().mark_complete_blocks(request_id, token_ids, new_new_blocks)
            own = [block for block in table[first:] if block in known]
            for position, (block, digest) in enumerate(zip(own, _digests(self, own), strict=True), start=first):
                self._computed.setdefault((known[block], digest), block)
                table[position] = self._reused(position, block)
                self.ledger.acquire(table[position])
                self.ledger.release(block)

        def _reused(self, position: int, block: int) -> int:
            """Of the blocks with the tokens of `block`, the one that the recorded request had; `block` if none."""
            if position >= len(self._recorded.digests):
                return block
            wanted = self.ledger.block_to_hash[block], self._recorded.digests[position]
            return self._computed.get(wanted, block)

    with replaced_allocator(ReplayingAllocator):
        yield


@contextmanager
def recording() -> Iterator[list[int]]:
    """Within this block, how many blocks each prompt matches on the device of a stock engine is appended to a list."""
    hits: list[int] = []

    class RecordingAllocator(FullAttentionCacheAllocator):
        """A stock allocator that records hits."""

        def match_prefix_blocks(self, prompt_ids: list[int]) -> list[int]:
            blocks: list[int] = super().match_prefix_blocks(prompt_ids)
            hits.append(len(blocks))
            return blocks

    with replaced_allocator(RecordingAllocator):
        yield hits
