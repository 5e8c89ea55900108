"""Manager and workers of the adapter, driven as vLLM's scheduler and workers drive them, without an engine."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    LookupResult,
    OffloadKey,
    ReqContext,
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
_engines = itertools.count()


def keys_of(count: int, group: int = 0, name: str = "prompt") -> list[OffloadKey]:
    """Keys of the first chunks of a prompt."""
    return [make_offload_key(hashlib.sha256(f"{name} {i}".encode()).digest(), group) for i in range(count)]


def config_of(
    rank: int, world: int, groups: Sequence[int], engine: str, per_chunk: int, extra: dict[str, Any]
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
    ours = {key: value for key, value in extra.items() if key not in ("parallel", "model")}
    return OffloadingConfig(
        groups=tuple(OffloadingGroupConfig(TOKENS, (f"layer {number}",), number) for number in groups),
        worker_kv_bytes_per_block=0,
        enable_kv_cache_events=False,
        extra_config={"host_size": "1MiB", "host_huge_pages": False, **ours},
        engine_id=engine,
        model=OffloadingModelConfig(extra.get("model", "no such directory"), "float32"),
        cache=OffloadingCacheConfig(TOKENS, per_chunk),
        parallel=OffloadingParallelConfig(**parallel),
    )


class Rig:
    """One manager, and a worker for each rank over tensors of its own."""

    def __init__(self, *, world: int = 1, groups: Sequence[int] = (0,), per_chunk: int = 1, **extra: Any) -> None:
        engine = f"engine {next(_engines)} of {id(self)}"
        generator = torch.Generator().manual_seed(5)
        self.per_chunk = per_chunk
        self.tensors = [
            [torch.randint(-128, 127, (BLOCKS, PAGE), dtype=torch.int8, generator=generator) for _ in range(2)]
            for _ in range(world)
        ]
        specs = [LongshoreSpec(config_of(rank, world, groups, engine, per_chunk, extra)) for rank in range(world)]
        self.workers: list[LongshoreWorker] = [
            spec.get_worker(
                CanonicalKVCaches(
                    [CanonicalKVCacheTensor(tensor, PAGE) for tensor in tensors],
                    [[CanonicalKVCacheRef(index, PAGE - 8) for index in range(len(tensors))] for _ in groups],
                )
            )
            for spec, tensors in zip(specs, self.tensors, strict=True)
        ]
        self.manager: LongshoreManager = specs[0].get_manager()
        self.cache: Any = self.manager._runtime._cache
        self._jobs = itertools.count()

    def request(self, name: str, keys: Sequence[OffloadKey] = ()) -> ReqContext:
        """A new request, of which vLLM has told `keys`."""
        context = ReqContext(req_id=name)
        self.manager.on_new_request(context)
        for position, key in enumerate(keys):
            context.set_offload_key_position(key, (position + 1) * TOKENS * self.per_chunk)
        return context

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
        return [tensor[block, : PAGE - 8].clone() for tensor in self.tensors[rank]]

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
    """A file tier, for a model whose directory `path` has room for."""
    model = path / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    return {"file_path": str(path / "tier"), "file_size": "1MiB", "model": str(model)}
