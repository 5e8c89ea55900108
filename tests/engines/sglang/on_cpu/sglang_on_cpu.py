"""Stands in for what SGLang's hierarchical cache needs of a GPU: streams, events, page-locked memory, copy kernels.

SGLang loads it in each of its processes, as a plug-in (`sglang.srt.plugins`). Nothing of the cache itself is replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """All layers of the device, those of the keys first, into host pages."""
    layers = len(src_ptrs) // 2
    pages = dst_indices[::page_size] // page_size
    for target, sources in zip(dst_ptrs, (src_ptrs[:layers], src_ptrs[layers:]), strict=True):
        for layer, source in enumerate(sources):
            target[pages, layer] = source[src_indices].view(-1, page_size, *source.shape[1:])


def register() -> None:
    """What SGLang calls when it starts."""
    torch.cpu.Event, torch.cpu.Stream = Event, Stream  # type: ignore[misc]
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign,assignment]
    from sglang.srt.mem_cache.pool_host import base, common, mha

    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0  # 10 GiB that it wants left over
    common._cuda_host_register = lambda *arguments, **named: None
    for function in (
        transfer_kv_direct,
        transfer_kv_per_layer_direct_pf_lf,
        transfer_kv_all_layer_direct_lf_pf,
    ):
        setattr(mha, function.__name__, function)
