"""Replacing one entry of transformers' allocator registry, and telling allocators who waits, and who asks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.generation.continuous_batching.cache import ATTN_TYPE_TO_ALLOCATOR, PagedAttentionCache
from transformers.generation.continuous_batching.cache_allocators import FullAttentionCacheAllocator
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor
from transformers.generation.continuous_batching.scheduler import Scheduler

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

    Allocators of the class `ours` find in `asking` the request that a prompt is looked up for. They are told which
    requests wait, whenever a batch was scheduled, and when the loop has ended, as these end without a call.
    """
    stock = PagedAttentionCache.search_prefix_match
    make = ContinuousBatchingManager._create_batch_processor
    candidates, cleanup = Scheduler._get_waiting_candidates, Scheduler._cleanup_waiting_queue
    fail = ContinuousBatchProcessor.fail_all_requests

    def create_batch_processor(self: Any) -> Any:
        former = served_model.set(self.model)
        try:
            return make(self)
        finally:
            served_model.reset(former)

    def allocators(cache: Any) -> list[Any]:
        return [allocator for allocator in cache.cache_allocators.values() if isinstance(allocator, ours)]

    def search_prefix_match(self: Any, request_id: str, prompt_ids: list[int]) -> Any:
        for allocator in allocators(self):
            allocator.asking = request_id
        return stock(self, request_id, prompt_ids)

    def expect(allocator: Any, waiting: list[Any]) -> Any:
        fresh = [(state.request_id, state.remaining_prefill_tokens) for state in waiting if not state.is_cpu_offloaded]
        return allocator.expect(fresh)

    def get_waiting_candidates(self: Any) -> Any:
        waiting = candidates(self)
        for allocator in allocators(self.cache):
            if waiting and allocator.holds_back:
                late = expect(allocator, waiting)
                ready = [state for state in waiting if state.request_id not in late]
                alone = not ready and not self.active_requests  # nothing else is held up
                waiting = waiting[:1] if alone else ready
        return waiting

    def cleanup_waiting_queue(self: Any, request_ids_to_remove_from_waiting: set[str]) -> None:
        cleanup(self, request_ids_to_remove_from_waiting)
        for allocator in allocators(self.cache):
            expect(allocator, candidates(self))

    def fail_all_requests(self: Any, error: Exception) -> None:
        fail(self, error)
        for allocator in allocators(self.cache):
            allocator.expect_none()

    with ExitStack() as undo:
        for owner, name, ours_instead in (
            (PagedAttentionCache, "search_prefix_match", search_prefix_match),
            (ContinuousBatchingManager, "_create_batch_processor", create_batch_processor),
            (Scheduler, "_get_waiting_candidates", get_waiting_candidates),
            (Scheduler, "_cleanup_waiting_queue", cleanup_waiting_queue),
            (ContinuousBatchProcessor, "fail_all_requests", fail_all_requests),
        ):
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, ours_instead)
        yield
