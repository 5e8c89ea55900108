"""Manager and workers of the adapter, driven as vLLM's scheduler and workers drive them, without an engine."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    LookupResult,
    OffloadKey,
    ReqContext,
    get_offload_group_idx,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

from longshore.engines.vllm import LongshoreManager, LongshoreSpec, LongshoreWorker

BLOCKS = 16
PAGE = 192
TOKENS = 16
NOT_SETTINGS = ("parallel", "model", "dtype", "vllm", "replicated", "events")
_engines = itertools.count()


@dataclass(frozen=True)
class Group:
    """One KV cache group: vLLM's number, tokens of a block, layers (of the two tensors), and how far back it looks."""

    number: int = 0
    tokens: int = TOKENS
    layers: int = 2
    window: int | None = None
    is_state: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"layer {self.number}.{layer}" for layer in range(self.layers))

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        """As vLLM's layers have it."""
        if self.is_state:
            return MambaSpec(block_size=self.tokens, shapes=((4,),), dtypes=(torch.float32,))
        shape = {"block_size": self.tokens, "num_kv_heads": 1, "head_size": 4, "dtype": torch.float32}
        return (
            FullAttentionSpec(**shape)
            if self.window is None
            else SlidingWindowSpec(sliding_window=self.window, **shape)
        )

    def get_attn_backend(self) -> type:
        return Group


def keys_of(count: int, group: int = 0, name: str = "prompt") -> list[OffloadKey]:
    """Keys of the first chunks of a prompt."""
    return [make_offload_key(hashlib.sha256(f"{name} {i}".encode()).digest(), group) for i in range(count)]


def group_config(group: Group, per_chunk: int) -> OffloadingGroupConfig:
    """As vLLM tells its connector of a group: from 0.33 on with the chunks of its window, which 0.32 adds later."""
    about = (group.tokens, group.names, group.number)
    if "sliding_window_size_in_chunks" not in OffloadingGroupConfig.__dataclass_fields__:
        return OffloadingGroupConfig(*about)
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import get_sliding_window_size_in_chunks

    window = get_sliding_window_size_in_chunks(group.get_kv_cache_spec(None), group.tokens * per_chunk)
    return OffloadingGroupConfig(*about, sliding_window_size_in_chunks=window)


def config_of(
    rank: int, world: int, groups: Sequence[Group], engine: str, per_chunk: int, extra: dict[str, Any]
) -> OffloadingConfig:
    parallel = {
        "rank": rank,
        "world_size": world,
        "tp_size": world,
        "pp_size": 1,
        "pcp_size": 1,
        "dcp_size": 1,
        "data_parallel_index": 0,
        "data_parallel_size": 1,
        "data_parallel_rank_local": None,
        "is_parallelism_agnostic": False,
        **extra.get("parallel", {}),
    }
    ours = {key: value for key, value in extra.items() if key not in NOT_SETTINGS}
    return OffloadingConfig(
        groups=tuple(group_config(group, per_chunk) for group in groups),
        worker_kv_bytes_per_block=0,
        enable_kv_cache_events=extra.get("events", False),
        extra_config={"host_size": "1MiB", "host_huge_pages": False, **ours},
        engine_id=engine,
        model=OffloadingModelConfig(extra.get("model", "no such directory"), extra.get("dtype", "float32")),
        cache=OffloadingCacheConfig(TOKENS, per_chunk),
        parallel=OffloadingParallelConfig(**parallel),
        replicated_layout=extra.get("replicated", False),
    )


def vllm_config(groups: Sequence[Group], extra: dict[str, Any]) -> Any:
    """What of vLLM's whole configuration the adapter looks at; `extra["vllm"]` changes some of it."""
    directory = Path(extra.get("model", "no such directory"))
    path = directory / "config.json"
    model = SimpleNamespace(
        model=str(directory),
        revision=None,
        dtype=torch.float32,
        hf_config=SimpleNamespace(to_dict=lambda: json.loads(path.read_text()) if path.exists() else {}),
    )
    whole = SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(
            cache_dtype="auto",
            prefix_caching_hash_algo="sha256",
            enable_prefix_caching=True,
            prefix_cache_retention_interval=0,
        ),
        load_config=SimpleNamespace(load_format="auto", download_dir=None),
        parallel_config=SimpleNamespace(nnodes_within_dp=1, decode_context_parallel_size=1, world_size=1),
        speculative_config=None,
        shutdown_timeout=0,
        lora_config=None,
        instance_id=str(time.time_ns() + 10**9),  # as if files that were just written were so a second before
        compilation_config=SimpleNamespace(
            static_forward_context={name: group for group in groups for name in group.names}
        ),
    )
    for place, value in extra.get("vllm", {}).items():
        *owners, name = place.split(".")
        setattr(reduce(getattr, owners, whole), name, value)
    return whole


class Rig:
    """One manager, and a worker for each rank over tensors of its own."""

    def __init__(
        self,
        *,
        world: int = 1,
        groups: Sequence[int | Group] = (0,),
        per_chunk: int = 1,
        page: int = PAGE,
        blocks: int = BLOCKS,
        **extra: Any,
    ) -> None:
        """Pages have `page` bytes, of which the last eight are padding; `extra` are settings, or `NOT_SETTINGS`."""
        engine = f"engine {next(_engines)} of {os.getpid()}"
        generator = torch.Generator().manual_seed(5)
        self.per_chunk = per_chunk
        self.page = page
        self.groups = [Group(each) if isinstance(each, int) else each for each in groups]
        replicated = extra.get("replicated", False)
        first = [torch.randint(-128, 127, (blocks, page), dtype=torch.int8, generator=generator) for _ in range(2)]
        self.tensors = [first] + [
            [each.clone() if replicated else torch.randint_like(each, -128, 127) for each in first]
            for _ in range(world - 1)
        ]
        self.caches = [
            CanonicalKVCaches(
                [CanonicalKVCacheTensor(tensor, page) for tensor in tensors],
                [[CanonicalKVCacheRef(at, page - 8) for at in range(group.layers)] for group in self.groups],
            )
            for tensors in self.tensors
        ]
        with set_current_vllm_config(vllm_config(self.groups, extra)):
            self.specs = [
                LongshoreSpec(config_of(rank, world, self.groups, engine, per_chunk, extra)) for rank in range(world)
            ]
            self.workers: list[LongshoreWorker] = [
                spec.get_worker(caches) for spec, caches in zip(self.specs, self.caches, strict=True)
            ]
        self.manager: LongshoreManager = self.specs[0].get_manager()
        self.cache: Any = self.manager._runtime._cache
        self._jobs = itertools.count()

    def request(self, name: str, keys: Sequence[OffloadKey] = ()) -> ReqContext:
        """A new request, of which vLLM has told `keys`."""
        context = ReqContext(req_id=name)
        self.manager.on_new_request(context)
        self.tell(keys, context)
        return context

    def tell(self, keys: Sequence[OffloadKey], context: ReqContext) -> None:
        """Tell the manager of the next chunks of a request, as vLLM does before it asks for any, or offers them."""
        told = context._offload_key_positions
        for key in keys:
            group = get_offload_group_idx(key)
            (tokens,) = (each.tokens for each in self.groups if each.number == group)
            before = sum(get_offload_group_idx(other) == group for other in told)
            if key not in told:
                context.set_offload_key_position(key, (before + 1) * tokens * self.per_chunk)

    def lookup(self, keys: Sequence[OffloadKey], context: ReqContext) -> list[LookupResult]:
        """What the manager says of `keys`, in one step."""
        said = [self.manager.lookup(key, context) for key in keys]
        self.end_step()
        return said

    def end_step(self) -> None:
        self.manager.on_schedule_end(SimpleNamespace(new_req_ids=(), preempted_req_ids=()))

    def store(
        self, keys: Sequence[OffloadKey], blocks: Sequence[int], context: ReqContext, *, complete: bool = True
    ) -> list[OffloadKey]:
        """Store chunks of one group that lie in `blocks`; says which the manager took."""
        self.tell(keys, context)
        output = self.manager.prepare_store(keys, context)
        if not output.keys_to_store:
            return []
        taken = [block for key, block in self._blocks(keys, blocks) if key in output.keys_to_store]
        self.copy_in(output.store_spec, taken)
        if complete:
            self.manager.complete_store(set(output.keys_to_store), context)
        return list(output.keys_to_store)

    def load(self, keys: Sequence[OffloadKey], blocks: Sequence[int], context: ReqContext) -> None:
        """Load chunks of one group into `blocks`."""
        spec = self.manager.prepare_load(keys, context)
        self.run("submit_load", spec, self._theirs(spec, blocks))
        self.manager.complete_load(set(keys), context)

    def copy_in(self, spec: Any, blocks: Sequence[int], ranks: Sequence[int] | None = None) -> None:
        """What the workers do for a store."""
        self.run("submit_store", self._theirs(spec, blocks), spec, ranks=ranks)

    def run(self, verb: str, source: Any, destination: Any, ranks: Sequence[int] | None = None) -> None:
        job = next(self._jobs)
        for rank, worker in enumerate(self.workers):
            if ranks is not None and rank not in ranks:
                continue
            if not getattr(worker, verb)(job, source, destination):
                raise AssertionError("vLLM expects True")
            worker.wait({job})
            (done,) = worker.get_finished()
            if (done.job_id, done.success) != (job, True):
                raise AssertionError(f"vLLM expects success of job {job}, got {done}")

    def bytes_of(self, rank: int, block: int) -> list[torch.Tensor]:
        """What a rank has of a block, without padding."""
        return [tensor[block, : self.page - 8].clone() for tensor in self.tensors[rank]]

    def close(self) -> None:
        for worker in self.workers:
            worker.shutdown()
        self.manager.shutdown()

    def _blocks(self, keys: Sequence[OffloadKey], blocks: Sequence[int]) -> list[tuple[OffloadKey, int]]:
        each = self.per_chunk
        return [(key, block) for at, key in enumerate(keys) for block in blocks[at * each : (at + 1) * each]]

    @staticmethod
    def _theirs(spec: Any, blocks: Sequence[int]) -> GPULoadStoreSpec:
        """The blocks of the one group that `spec` is of."""
        sizes = [len(blocks) if count else 0 for count in spec.counts]
        return GPULoadStoreSpec(list(blocks), group_sizes=sizes, block_indices=[0] * len(sizes))


def file_settings(path: Path) -> dict[str, Any]:
    """A file tier, and a model whose directory lies in `path`."""
    model = path / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}" + bytes(64))
    return {"file_path": str(path / "tier"), "file_size": "1MiB", "model": str(model)}
