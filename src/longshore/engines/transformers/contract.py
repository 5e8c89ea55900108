"""The internals of transformers that the adapter uses: a check that they are there, and the hooks it puts into them.

Continuous batching makes its device cache from the class in `ATTN_TYPE_TO_ALLOCATOR`; `replaced_allocator` replaces
that entry. `informed_allocators` wraps methods of the scheduler, so that allocators know which requests wait. `check`
names each internal that has moved in this version, and what was expected.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

from longshore.errors import ContractError, EngineError, with_extra

SUPPORTED = "transformers >= 5.18, < 5.24"

_NAME = "full_attention"

served_model: ContextVar[Any] = ContextVar("served_model", default=None)
"""The model whose manager makes a device cache at present. Two models may share one configuration object."""

_PARAMETERS: dict[str, tuple[str, ...]] = {
    "FullAttentionCacheAllocator.__init__": (
        *("self", "index", "config", "num_key_value_heads", "cache_dtype", "page_size", "layer_indices"),
        "allow_block_sharing",
    ),
    "FullAttentionCacheAllocator.register_cache_tensor": (
        *("self", "bytes_per_sector", "non_trash_bytes", "cache_tensor", "pool"),
    ),
    "FullAttentionCacheAllocator.match_prefix_blocks": ("self", "prompt_ids"),
    "FullAttentionCacheAllocator.mark_complete_blocks": ("self", "request_id", "token_ids", "new_new_blocks"),
    "FullAttentionCacheAllocator.get_cache_for_block_table": ("self", "layer_idx"),
    "FullAttentionCacheAllocator.free_blocks": ("self", "request_id", "no_cache"),
    "FullAttentionCacheAllocator.allocate_cache_to_request": ("self", "request_id", "past_length", "query_length"),
    "FullAttentionCacheAllocator.free_all_requests": ("self",),
    "PagedAttentionCache.search_prefix_match": ("self", "request_id", "prompt_ids"),
    "ContinuousBatchingManager._create_batch_processor": ("self",),
    "ContinuousBatchProcessor.fail_all_requests": ("self", "error"),
    "Scheduler._cleanup_waiting_queue": ("self", "request_ids_to_remove_from_waiting"),
    "Scheduler._get_waiting_candidates": ("self",),
    "BlockLedger.release": ("self", "block_id", "no_cache"),
    "BlockLedger.evict_cached_blocks": ("self",),
    "BlockLedger.register_new_hash": ("self", "block_id", "block_hash"),
    "BlockLedger.reset": ("self",),
    "CachePool.get_free_blocks": ("self", "index", "num_blocks"),
    "CachePool.free_blocks": ("self", "index", "block_ids"),
    "CachePool.count_free_blocks": ("self", "index"),
    "CachePool.allocate_sector": ("self", "index"),
    "compute_block_hash": ("parent_hash", "tokens"),
}
_ALLOCATOR_FIELDS = (
    *("_copy_view", "block_table", "blocks_per_sector", "bytes_per_block", "index", "ledger", "num_blocks"),
    *("pages_per_block", "pool", "tokens_per_page", "use_block_sharing"),
)
_LEDGER_FIELDS = ("hash_to_block", "block_to_hash", "cached_blocks")
_SCHEDULER_FIELDS = ("active_requests", "cache")
_REQUEST_FIELDS = ("is_cpu_offloaded", "remaining_prefill_tokens", "request_id")


def load() -> dict[str, Any]:
    """The internals in use, by name. Raises `ContractError` if one is missing."""
    try:
        import transformers  # noqa: PLC0415 - a probe, like the others
    except ImportError as error:
        raise EngineError(f"{error}; the adapter needs an extra: {with_extra('transformers')}") from error
    try:
        from transformers.generation.continuous_batching import ContinuousBatchingManager  # noqa: PLC0415
        from transformers.generation.continuous_batching.cache import (  # noqa: PLC0415
            ATTN_TYPE_TO_ALLOCATOR,
            PagedAttentionCache,
            group_layers_by_attn_type,
        )
        from transformers.generation.continuous_batching.cache_allocators import (  # noqa: PLC0415
            CachePool,
            FullAttentionCacheAllocator,
        )
        from transformers.generation.continuous_batching.cache_allocators.cache_allocator import (  # noqa: PLC0415
            BlockLedger,
            compute_block_hash,
        )
        from transformers.generation.continuous_batching.continuous_api import (  # noqa: PLC0415
            ContinuousBatchProcessor,
        )
        from transformers.generation.continuous_batching.requests import RequestState  # noqa: PLC0415
        from transformers.generation.continuous_batching.scheduler import FIFOScheduler, Scheduler  # noqa: PLC0415
    except ImportError as error:
        raise ContractError(
            f"{error}; Longshore works with {SUPPORTED}, this is transformers {transformers.__version__}"
        ) from error
    return {
        "ATTN_TYPE_TO_ALLOCATOR": ATTN_TYPE_TO_ALLOCATOR,
        "BlockLedger": BlockLedger,
        "CachePool": CachePool,
        "ContinuousBatchProcessor": ContinuousBatchProcessor,
        "ContinuousBatchingManager": ContinuousBatchingManager,
        "FIFOScheduler": FIFOScheduler,
        "FullAttentionCacheAllocator": FullAttentionCacheAllocator,
        "PagedAttentionCache": PagedAttentionCache,
        "RequestState": RequestState,
        "Scheduler": Scheduler,
        "compute_block_hash": compute_block_hash,
        "group_layers_by_attn_type": group_layers_by_attn_type,
        "version": transformers.__version__,
    }


def check() -> None:
    """Raise `ContractError`, which names each changed internal, unless all are as expected."""
    found = load()
    moved = [message for path, expected in _PARAMETERS.items() if (message := _compare(found, path, expected))]
    registered = found["ATTN_TYPE_TO_ALLOCATOR"].get("full_attention")
    if not (isinstance(registered, type) and issubclass(registered, found["FullAttentionCacheAllocator"])):
        moved.append(f"ATTN_TYPE_TO_ALLOCATOR['full_attention'] is {registered!r}")
    scheduler = found["FIFOScheduler"](cache=None, safety_margin=0.0, max_requests_per_batch=1)
    states = dict.fromkeys(field.name for field in dataclasses.fields(found["RequestState"]))
    for owner, fields, present in (
        ("BlockLedger", _LEDGER_FIELDS, vars(found["BlockLedger"]())),
        ("RequestState", _REQUEST_FIELDS, states),
        ("Scheduler", _SCHEDULER_FIELDS, vars(scheduler)),
    ):
        moved += [f"{owner} has no {name}" for name in fields if name not in present]
    if moved:
        raise ContractError(
            f"transformers {found['version']} has changed internals that Longshore uses; install {SUPPORTED}: "
            + "; ".join(moved)
        )


def check_allocator(allocator: Any) -> None:
    """Raise `ContractError` unless an allocator whose tensor exists has all attributes in use."""
    missing = [name for name in _ALLOCATOR_FIELDS if not hasattr(allocator, name)]
    if not hasattr(allocator.pool, "num_free_sectors"):
        missing.append("pool.num_free_sectors")
    if missing:
        raise ContractError(
            f"an allocator of transformers has no {', '.join(missing)} (Longshore works with {SUPPORTED})"
        )


def _compare(found: dict[str, Any], path: str, expected: tuple[str, ...]) -> str | None:
    head, *rest = path.split(".")
    target = found[head]
    for name in rest:
        target = getattr(target, name, None)
    if target is None:
        return f"{path} is gone"
    actual = tuple(inspect.signature(target).parameters)
    return None if actual == expected else f"{path} takes {actual}, expected {expected}"


@contextmanager
def replaced_allocator(ours: type[Any]) -> Iterator[None]:
    """Within this block, full-attention caches are made by the class `ours`; one such block at a time per process."""
    found = load()
    registry = found["ATTN_TYPE_TO_ALLOCATOR"]
    stock = registry[_NAME]
    if stock is not found["FullAttentionCacheAllocator"]:
        raise EngineError(
            f"the allocator of {_NAME} is replaced already, by {stock!r}: close the other tiered() block first"
        )
    registry[_NAME] = ours
    try:
        yield
    finally:
        registry[_NAME] = stock


@contextmanager
def informed_allocators(ours: Any) -> Iterator[None]:
    """Within this block, `served_model` is set while a manager makes its device cache.

    Allocators of the class `ours` find in `asking` the request that a prompt is looked up for. They are called with the
    requests that wait after each batch was scheduled, and when the loop has ended, as these end without a call.
    """
    found = load()
    paged, manager, scheduler = found["PagedAttentionCache"], found["ContinuousBatchingManager"], found["Scheduler"]
    processor = found["ContinuousBatchProcessor"]
    stock = paged.search_prefix_match
    make = manager._create_batch_processor
    candidates, cleanup = scheduler._get_waiting_candidates, scheduler._cleanup_waiting_queue
    fail = processor.fail_all_requests

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

    def prefetch(allocator: Any, waiting: list[Any]) -> Any:
        fresh = [(state.request_id, state.remaining_prefill_tokens) for state in waiting if not state.is_cpu_offloaded]
        return allocator.prefetch_waiting(fresh)

    def get_waiting_candidates(self: Any) -> Any:
        waiting = candidates(self)
        for allocator in allocators(self.cache):
            if waiting and allocator.delays_requests:
                late = prefetch(allocator, waiting)
                ready = [state for state in waiting if state.request_id not in late]
                alone = not ready and not self.active_requests  # nothing else is held up
                waiting = waiting[:1] if alone else ready
        return waiting

    def cleanup_waiting_queue(self: Any, request_ids_to_remove_from_waiting: set[str]) -> None:
        cleanup(self, request_ids_to_remove_from_waiting)
        for allocator in allocators(self.cache):
            prefetch(allocator, candidates(self))

    def fail_all_requests(self: Any, error: Exception) -> None:
        fail(self, error)
        for allocator in allocators(self.cache):
            allocator.loop_ended()

    with ExitStack() as undo:
        for owner, name, ours_instead in (
            (paged, "search_prefix_match", search_prefix_match),
            (manager, "_create_batch_processor", create_batch_processor),
            (scheduler, "_get_waiting_candidates", get_waiting_candidates),
            (scheduler, "_cleanup_waiting_queue", cleanup_waiting_queue),
            (processor, "fail_all_requests", fail_all_requests),
        ):
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, ours_instead)
        yield
