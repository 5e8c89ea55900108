"""An engine whose prompts need more than host memory: vLLM's own scheduler part, our manager, workers of two ranks."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from sequences_kit import content
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock, get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus
from vllm_kit import PAGE, TOKENS, Group, Rig, file_settings, vllm_config

CHUNKS, HOST_CHUNKS = 28, 12
"""Of the prompt, and of host memory."""


class Engine:
    """Steps of an engine: a prompt is stored piece by piece; then it is loaded, by ranks that take their time."""

    def __init__(self, rig: Rig) -> None:
        self.rig, self.manager = rig, rig.manager
        self.manager.allow_parts(loads=True)
        spec: Any = rig.specs[0]
        spec.get_manager = lambda: rig.manager
        for worker in rig.workers:
            worker.reports_failures = True
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(TOKENS, sha256)
        groups = [KVCacheGroupSpec(list(group.names), group.get_kv_cache_spec(None)) for group in rig.groups]
        config = KVCacheConfig(num_blocks=len(rig.tensors[0][0]), kv_cache_tensors=[], kv_cache_groups=groups)
        vllm = vllm_config(rig.groups, {"vllm": {"parallel_config.world_size": len(rig.workers)}})
        self.scheduler = OffloadingConnectorScheduler(spec, vllm, config)
        self.numbers, self.free = itertools.count(1), itertools.count(1)
        self.told: list[list[Any]] = [[] for _ in rig.workers]
        """What each rank was told, step by step, and has not taken in."""
        self.ended: Counter[int] = Counter()
        self.failed: set[int] = set()
        self.blocks: dict[str, list[list[KVCacheBlock]]] = {}
        self.parts_of_stores = 0
        self.submits_late = False
        """Whether stores are submitted at the beginning of the next step, as by vLLM's workers."""
        self.unsubmitted: list[list[Any]] = [[] for _ in rig.workers]
        self.after_flush: Callable[[int], None] = lambda rank: None

    def request(self, chunks: int, *, first: int = 1) -> Request:
        tokens = [first + at for at in range(chunks * TOKENS + 5)]
        request = Request(f"{next(self.numbers)}", tokens, SamplingParams(max_tokens=1), None, block_hasher=self.hasher)
        self.scheduler.on_new_request(request)
        return request

    def step(self, ranks: tuple[int, ...] = (0, 1), **what: Any) -> None:
        """A step is planned, and these ranks take in all that they were told until then."""
        about = {"new": (), "scheduled": {}, "finished": set(), **what}
        meta = self.scheduler.build_connector_meta(
            SimpleNamespace(
                scheduled_new_reqs=about["new"],
                scheduled_cached_reqs=SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set()),
                num_scheduled_tokens=about["scheduled"],
                finished_req_ids=about["finished"],
                preempted_req_ids=None,
                kv_cache_block_copies=None,
                kv_connector_block_state=None,
            )
        )
        parts = self.manager.take_parts()
        self.parts_of_stores += sum(part.is_store for part in parts)
        for rank, told in enumerate(self.told):
            told.append((meta, parts))
            if rank in ranks:
                self.take_in(rank)

    def take_in(self, rank: int) -> None:
        worker, counts = self.rig.workers[rank], Counter[int]()
        for meta, parts in self.told[rank]:
            stores, self.unsubmitted[rank] = self.unsubmitted[rank], list(meta.store_jobs.items())
            for job, each in stores:
                worker.submit_store(job, each.src_spec, each.dst_spec)
            if meta.jobs_to_flush:
                worker.wait(meta.jobs_to_flush)
                self.after_flush(rank)
            if not self.submits_late:
                for job, each in self.unsubmitted[rank]:
                    worker.submit_store(job, each.src_spec, each.dst_spec)
                self.unsubmitted[rank].clear()
            for job, each in meta.load_jobs.items():
                worker.submit_load(job, each.src_spec, each.dst_spec)
            worker.submit_parts(parts)
            worker.engine.wait(list(worker._parts))
            for result in worker.get_finished():
                counts[result.job_id] += 1
        self.told[rank].clear()
        self.failed |= worker.take_failed(range(1000))
        self.ended += counts
        said = OffloadingWorkerMetadata(completed_jobs=dict(counts))
        self.scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=said))

    def store(self, chunks: int, *, first: int = 1) -> None:
        """Compute a prompt a few chunks at a time, each of which is in files before the next."""
        for end in [*range(HOST_CHUNKS // 2, chunks, HOST_CHUNKS // 2), chunks]:
            request = self.request(end, first=first)
            blocks = self.blocks[request.request_id] = self._allocate(request, 0)
            self.fill(request, *range(len(self.rig.workers)))
            ids = tuple([block.block_id for block in mine] for mine in blocks)
            new = SimpleNamespace(req_id=request.request_id, block_ids=ids)
            self.step(new=[new], scheduled={request.request_id: request.num_tokens})
            self.finish(request)
            self.step()
            assert self.manager.flush(10.0)

    def compute(self, chunks: int, pieces: int, *, first: int = 1) -> Request:
        """Compute a prompt, so many chunks in a step; its stores, which have a minute to get slots, have not ended."""
        self.manager._store_jobs._write_timeout = 60.0
        request = self.request(chunks, first=first)
        blocks = self.blocks[request.request_id] = self._allocate(request, 0)
        self.fill(request, 0, 1)
        ids = tuple([block.block_id for block in mine] for mine in blocks)
        new = [SimpleNamespace(req_id=request.request_id, block_ids=ids)]
        while request.num_computed_tokens < request.num_tokens:
            count = min(pieces * TOKENS, request.num_tokens - request.num_computed_tokens)
            self.step(new=new, scheduled={request.request_id: count})
            request.num_computed_tokens += count
            new = []
        for _ in range(20 * (len(blocks) - 1)):  # it decodes: windows for which there was no room are offered again
            self.step(scheduled={request.request_id: 0})
            time.sleep(0.005)
        return request

    def fill(self, request: Request, *ranks: int) -> None:
        """Compute the blocks of a prompt."""
        for rank, group, block, at in self._each(request, self.blocks[request.request_id]):
            for layer, tensor in enumerate(self.rig.tensors[rank][: group.layers]):
                if rank in ranks:
                    tensor[block, : PAGE - 8] = self._content(request, group, at, rank, layer)

    def finish(self, request: Request, status: RequestStatus = RequestStatus.FINISHED_STOPPED) -> None:
        self.manager.will_finish(request.request_id)
        request.num_computed_tokens = request.num_tokens if status is RequestStatus.FINISHED_STOPPED else 0
        request.status = status
        self.scheduler.request_finished(request)
        self.step(finished={request.request_id})

    def begin(self, request: Request) -> int:
        """Ask what the tiers have of a prompt, and have that loaded into blocks; how many chunks."""
        hit, _ = self.scheduler.get_num_new_matched_tokens(request, 0)
        if not hit:
            return 0
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        blocks = self._allocate(request, hit)
        for rank, _, block, _ in self._each(request, blocks):
            for tensor in self.rig.tensors[rank]:
                tensor[block] = 0x55
        self.scheduler.update_state_after_alloc(request, KVCacheBlocks(tuple(blocks)), hit)
        self.blocks[request.request_id] = blocks
        return hit // TOKENS

    def is_loading(self, request: Request) -> bool:
        status = self.scheduler._req_status.get(request.request_id)
        return status is not None and any(not self.scheduler._jobs[job].is_store for job in status.transfer_jobs)

    def wrong(self, request: Request, hit: int) -> int:
        """How many blocks of the first `hit` chunks do not have what was computed."""
        return sum(
            not np.array_equal(
                tensor[block, : PAGE - 8].numpy().view(np.uint8), self._content(request, group, at, rank, layer, False)
            )
            for rank, group, block, at in self._each(request, self.blocks[request.request_id])
            if at < hit
            for layer, tensor in enumerate(self.rig.tensors[rank][: group.layers])
        )

    def _content(self, request: Request, group: Group, at: int, rank: int, layer: int, signed: bool = True) -> Any:
        import torch

        key = bytes(request.block_hashes[at]) + bytes([group.number])
        made = content(key, "", rank, layer)
        return torch.from_numpy(made.view(np.int8).copy()) if signed else made

    def _allocate(self, request: Request, hit: int) -> list[list[KVCacheBlock]]:
        blocks = []
        for group in self.rig.groups:
            first = 0 if group.window is None else max(0, hit - group.window + 1) // TOKENS
            mine = [
                KVCacheBlock(0 if at < first else next(self.free)) for at in range(-(-request.num_tokens // TOKENS))
            ]
            for block in mine[:first]:
                block.is_null = True
            blocks.append(mine)
        return blocks

    def _each(self, request: Request, blocks: list[list[KVCacheBlock]]) -> list[tuple[int, Group, int, int]]:
        return [
            (rank, group, block.block_id, at)
            for rank in range(len(self.rig.workers))
            for group, mine in zip(self.rig.groups, blocks, strict=True)
            for at, block in enumerate(mine[: request.num_tokens // TOKENS])
            if not block.is_null
        ]


def engine_of(groups: int, rigs: Any, path: Path) -> Engine:
    """Whose files have a prompt; with a sliding window beside full attention if asked for."""
    made_of = [Group(0), Group(1, window=40)][:groups]
    size = f"{2 * HOST_CHUNKS * 4096}"
    settings = {**file_settings(path), "file_size": "4MiB", "backup": "write_through", "gate": False}
    vllm = {"parallel_config.world_size": 2}
    rig = rigs(world=2, groups=made_of, blocks=2000, host_size=size, load_timeout=1.0, vllm=vllm, **settings)
    assert rig.cache.stats()[0].slots == HOST_CHUNKS
    made = Engine(rig)
    made.store(CHUNKS)
    return made


def settled(engine: Engine) -> None:
    """Nothing is held, or in flight."""
    for _ in range(5):
        engine.step()
    assert engine.manager.flush(10.0)
    assert engine.rig.cache.leases == engine.rig.cache.protected == 0
    assert engine.rig.cache.jobs_in_flight == 0
    assert not len(engine.manager._load_jobs)
    assert not engine.manager._requests
    assert not engine.manager._unreported
    engine.rig.cache.check_integrity()


def finish_load(engine: Engine, *requests: Request, ranks: tuple[int, ...] = (0, 1)) -> int:
    """Steps until nothing is loaded any more for `requests`; how many."""
    for steps in range(3000):
        if not any(map(engine.is_loading, requests)):
            return steps
        engine.step(ranks)
        time.sleep(0.001)
    raise AssertionError("a load does not end")
