"""Stands in for what SGLang's hierarchical cache needs of a GPU: streams, events, page-locked memory, copy kernels.

SGLang loads it in each of its processes, as a plug-in (`sglang.srt.plugins`). Nothing of the cache itself is replaced.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch


class Event(torch.cpu.Event):
    def __init__(self, *arguments: Any, **named: Any) -> None:
        pass

    def elapsed_time(self, other: object) -> float:
        return 0.0


class Stream(torch.cpu.Stream):
    def __init__(self, *arguments: Any, **named: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()


def transfer_kv_direct(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Host pages, shape `(pages, layers, tokens, ...)`, into one layer of the device, shape `(tokens, ...)`."""
    pages = src_indices[::page_size] // page_size
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices] = source[pages, layer_id].reshape(-1, *target.shape[1:])


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """All layers of the device, those of the keys first, into host pages; or all latents of MLA."""
    layers = len(src_ptrs) // len(dst_ptrs)
    pages = dst_indices[::page_size] // page_size
    for at, target in enumerate(dst_ptrs):
        for layer, source in enumerate(src_ptrs[at * layers : (at + 1) * layers]):
            target[pages, layer] = source[src_indices].view(-1, page_size, *source.shape[1:])


WITHOUT_RANK = "LONGSHORE_TEST_WITHOUT_RANK"
"""A variable of the environment: if it is set, the rank is left out of the address of pages, as a control of tests."""


def leave_rank_out() -> None:
    """Make the scope of every rank that of rank 0."""
    from longshore.engines.sglang import identity

    scope_of = identity.scope_of

    def without(storage: Any, *arguments: Any) -> Any:
        rank, storage.tp_rank = storage.tp_rank, 0
        made = scope_of(storage, *arguments)
        storage.tp_rank = rank
        return made

    identity.scope_of = without  # type: ignore[assignment]


def _not_page_locked(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`function`, which makes a tensor, in memory that is not page-locked."""

    def call(*arguments: Any, pin_memory: bool = False, **named: Any) -> torch.Tensor:
        return function(*arguments, **named)

    return call


def _in_its_own_pool(method: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`method` of SGLang's attention in torch, which looks for pages of windows at their places in the other pool."""

    def call(
        backend: Any, query: Any, output: Any, k_cache: Any, v_cache: Any, table: Any, *more: Any, **named: Any
    ) -> Any:
        if backend.use_sliding_window_kv_pool and named.get("sliding_window_size") is not None:
            table = backend.token_to_kv_pool.translate_loc_from_full_to_swa(table).to(table.dtype).clamp(min=0)
        return method(backend, query, output, k_cache, v_cache, table, *more, **named)

    return call


def register() -> None:
    """What SGLang calls when it starts."""
    if os.environ.get(WITHOUT_RANK):
        leave_rank_out()
    torch.cpu.Event, torch.cpu.Stream = Event, Stream  # type: ignore[misc]
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign,assignment]
    torch.tensor, torch.zeros = _not_page_locked(torch.tensor), _not_page_locked(torch.zeros)
    torch.empty = _not_page_locked(torch.empty)
    torch.Tensor.pin_memory = lambda self, device=None: self  # type: ignore[method-assign]
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.mem_cache.pool_host import base, common, mha, mla

    for name in ("_run_sdpa_forward_extend", "_run_sdpa_forward_decode"):
        setattr(TorchNativeAttnBackend, name, _in_its_own_pool(getattr(TorchNativeAttnBackend, name)))
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0  # 10 GiB that it wants left over
    common._cuda_host_register = lambda *arguments, **named: None
    for function in (
        transfer_kv_direct,
        transfer_kv_per_layer_direct_pf_lf,
        transfer_kv_all_layer_direct_lf_pf,
    ):
        setattr(mha, function.__name__, function)
        setattr(mla, function.__name__, function)
