"""Replacing one entry of transformers' allocator registry, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers.generation.continuous_batching.cache import ATTN_TYPE_TO_ALLOCATOR
from transformers.generation.continuous_batching.cache_allocators import FullAttentionCacheAllocator

from longshore.errors import EngineError

_NAME = "full_attention"


@contextmanager
def replaced_allocator(ours: type[FullAttentionCacheAllocator]) -> Iterator[None]:
    """Within this block, full-attention caches are made by the class `ours`; one such block at a time per process."""
    stock = ATTN_TYPE_TO_ALLOCATOR[_NAME]
    if stock is not FullAttentionCacheAllocator:
        raise EngineError(f"the allocator of {_NAME} is replaced already, by {stock!r}")
    ATTN_TYPE_TO_ALLOCATOR[_NAME] = ours
    try:
        yield
    finally:
        ATTN_TYPE_TO_ALLOCATOR[_NAME] = stock
