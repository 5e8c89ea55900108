"""The oracle's spec where vLLM keeps no prefix cache of its own: blocks in a dictionary, copied at once.

No tiers, no eviction, no threads, nothing of Longshore: what is served has the schedule of a tier, and can only be
what was stored.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LoadStoreSpec,
    LookupResult,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    TransferResult,
)


@dataclass(frozen=True)
class Names(LoadStoreSpec):
    """Chunks of one job, by name, in order."""

    keys: tuple[OffloadKey, ...]


class PlainManager(OffloadingManager):
    """Knows what was stored: all, or the first so many `chunks`."""

    def __init__(self, chunks: int = sys.maxsize) -> None:
        self.left = chunks
        self.stored: set[OffloadKey] = set()
        self.loaded = 0

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return LookupResult.HIT if key in self.stored else LookupResult.MISS

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> Names:
        self.loaded += len(keys)
        return Names(tuple(keys))

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput:
        fresh = [key for key in keys if key not in self.stored]
        fresh = fresh[: self.left]
        self.left -= len(fresh)
        return PrepareStoreOutput(fresh, Names(tuple(fresh)), [])

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        self.stored |= set(keys)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()


class PlainWorker(OffloadingWorker):
    """Has the bytes of each block of each chunk."""

    def __init__(self, caches: Any, per_chunk: int) -> None:
        self.pages = [
            [(caches.tensors[ref.tensor_idx].tensor, ref.page_size_bytes) for ref in refs]
            for refs in caches.group_data_refs
        ]
        self.per_chunk = per_chunk
        self.bytes: dict[tuple[OffloadKey, int], list[torch.Tensor]] = {}
        self.done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        for place, group, block in self._each(dst_spec, src_spec):
            self.bytes[place] = [tensor[block, :size].clone() for tensor, size in self.pages[group]]
        self.done.append(TransferResult(job_id, True))
        return True

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        for place, group, block in self._each(src_spec, dst_spec):
            for (tensor, size), page in zip(self.pages[group], self.bytes[place], strict=True):
                tensor[block, :size] = page
        self.done.append(TransferResult(job_id, True))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self.done = self.done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is ever under way."""

    def _each(self, names: Any, blocks: GPULoadStoreSpec) -> Iterator[tuple[tuple[OffloadKey, int], int, int]]:
        """Of each block the chunk and its place there, its group, and itself."""
        ids, keys = iter(blocks.block_ids.tolist()), iter(names.keys)
        for group, (size, index) in enumerate(zip(blocks.group_sizes, blocks.block_indices, strict=True)):
            for at in range(index, index + size):
                if at == index or at % self.per_chunk == 0:
                    key = next(keys)
                yield (key, at % self.per_chunk), group, next(ids)


class PlainSpec(OffloadingSpec):
    """Answers are stored too, as Longshore does."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.offload_prompt_only = False

    def get_manager(self) -> PlainManager:
        return PlainManager(self.extra_config.get("chunks", sys.maxsize))

    def get_worker(self, kv_caches: Any) -> PlainWorker:
        return PlainWorker(kv_caches, self.blocks_per_chunk)
