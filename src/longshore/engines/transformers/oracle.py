"""The oracle: an engine whose device cache never evicts, made to hit exactly what another run hit.

Another hit length is another shape of prefill, and so other numerics: two runs can only be compared bit for bit when
each request starts from the same number of cached tokens (and shares its batches with the same others).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from transformers.generation.continuous_batching.cache_allocators import FullAttentionCacheAllocator

from longshore.engines.transformers.registry import replaced_allocator
from longshore.errors import EngineError


@contextmanager
def replaying(hits: Iterable[int]) -> Iterator[None]:
    """Within this block, the i-th prompt that a transformers engine looks up matches exactly `hits[i]` blocks.

    Raises `EngineError` in the engine when a prompt has fewer blocks on the device than that.
    """
    waiting = deque(hits)

    class ReplayingAllocator(FullAttentionCacheAllocator):
        """A stock allocator whose matches are cut to the recorded lengths."""

        def match_prefix_blocks(self, prompt_ids: list[int]) -> list[int]:
            blocks: list[int] = super().match_prefix_blocks(prompt_ids)
            wanted = waiting.popleft() if waiting else 0
            if len(blocks) < wanted:
                raise EngineError(f"the oracle has {len(blocks)} blocks of a prompt of which {wanted} were hit")
            return blocks[:wanted]

    with replaced_allocator(ReplayingAllocator):
        yield


@contextmanager
def recording() -> Iterator[list[int]]:
    """Within this block, how many blocks each prompt matches on the device of a stock engine is appended to a list."""
    hits: list[int] = []

    class RecordingAllocator(FullAttentionCacheAllocator):
        """A stock allocator that keeps count."""

        def match_prefix_blocks(self, prompt_ids: list[int]) -> list[int]:
            blocks: list[int] = super().match_prefix_blocks(prompt_ids)
            hits.append(len(blocks))
            return blocks

    with replaced_allocator(RecordingAllocator):
        yield hits
