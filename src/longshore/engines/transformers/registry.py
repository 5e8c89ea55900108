"""Replacing one entry of transformers' allocator registry, and telling allocators whom they are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.generation.continuous_batching.cache import ATTN_TYPE_TO_ALLOCATOR, PagedAttentionCache
from transformers.generation.continuous_batching.cache_allocators import FullAttentionCacheAllocator

from longshore.errors import EngineError

_NAME = "full_attention"

served_model: ContextVar[Any] = ContextVar("served_model", default=None)
"""The model whose manager makes a device cache at present. Two models may share one configuration object."""


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


@contextmanager
def informed_allocators(ours: Any) -> Iterator[None]:
    """Within this block, `served_model` is set while a manager makes its device cache.

    Allocators of the class `ours` find in `asking` the request that a prompt is looked up for.
    """
    stock = PagedAttentionCache.search_prefix_match
    make = ContinuousBatchingManager._create_batch_processor

    def create_batch_processor(self: Any) -> Any:
        former = served_model.set(self.model)
        try:
            return make(self)
        finally:
            served_model.reset(former)

    def search_prefix_match(self: Any, request_id: str, prompt_ids: list[int]) -> Any:
        for allocator in self.cache_allocators.values():
            if isinstance(allocator, ours):
                allocator.asking = request_id
        return stock(self, request_id, prompt_ids)

    cache: Any = PagedAttentionCache
    manager: Any = ContinuousBatchingManager
    cache.search_prefix_match = search_prefix_match
    manager._create_batch_processor = create_batch_processor
    try:
        yield
    finally:
        cache.search_prefix_match = stock
        manager._create_batch_processor = make
