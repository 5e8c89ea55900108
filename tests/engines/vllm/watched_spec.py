"""`LongshoreSpec` with a witness where bytes move: digests of the blocks of the device, when stored and when loaded.

Names of chunks are the scheduler's, bytes are the worker's, as in one process both can be seen. What a load brings must
be what was stored last under the same name when the load was promised.
"""

from __future__ import annotations

import hashlib
from typing import Any

from vllm.v1.kv_offload.base import GPULoadStoreSpec

from longshore.engines.vllm import LongshoreManager, LongshoreSpec, LongshoreWorker


class Witness:
    """What was stored and loaded in this process."""

    def __init__(self) -> None:
        self.tensors: list[Any] = []
        self.names: dict[int, list[bytes]] = {}
        self.stored: dict[bytes, bytes] = {}
        self.promised: dict[int, list[bytes]] = {}
        self.loading: dict[int, tuple[int, list[int]]] = {}
        self.loads = 0
        self.chunks = 0
        self.wrong = 0

    def digests(self, blocks: list[int]) -> list[bytes]:
        """Of the bytes that all layers have of each block."""
        return [self._digest(block) for block in blocks]

    def _digest(self, block: int) -> bytes:
        digest = hashlib.blake2b(digest_size=16)
        for tensor in self.tensors:
            digest.update(tensor[block].contiguous().numpy().tobytes())
        return digest.digest()

    def store(self, ticket: int, blocks: list[int]) -> None:
        """The worker is told to store `blocks`."""
        self.stored.update(zip(self.names.pop(ticket), self.digests(blocks), strict=True))

    def promise(self, ticket: int, keys: list[bytes]) -> None:
        """The scheduler says that these chunks are there."""
        self.promised[ticket] = [self.stored[key] for key in keys]

    def loaded(self, job: int, *, failed: bool) -> None:
        """The worker says that the blocks of a load are in place, or that it has failed."""
        ticket, blocks = self.loading.pop(job)
        expected, found = self.promised.pop(ticket), self.digests(blocks)
        if failed:
            return
        self.loads += 1
        self.chunks += len(found)
        self.wrong += sum(one != other for one, other in zip(expected, found, strict=True))


WITNESS = Witness()


class WatchedSpec(LongshoreSpec):
    """Has a witness."""

    def get_manager(self) -> LongshoreManager:
        manager = super().get_manager()
        prepare_store, prepare_load = manager.prepare_store, manager.prepare_load

        def store(keys: Any, context: Any) -> Any:
            output = prepare_store(keys, context)
            if output is not None:
                WITNESS.names[output.store_spec.ticket] = list(output.keys_to_store)
            return output

        def load(keys: Any, context: Any) -> Any:
            spec = prepare_load(keys, context)
            WITNESS.promise(spec.ticket, list(keys))
            return spec

        manager.prepare_store, manager.prepare_load = store, load
        return manager

    def get_worker(self, kv_caches: Any) -> LongshoreWorker:
        worker = super().get_worker(kv_caches)
        WITNESS.tensors = [each.tensor for each in kv_caches.tensors]
        submit_store, submit_load, get_finished = worker.submit_store, worker.submit_load, worker.get_finished

        def store(job: int, source: GPULoadStoreSpec, target: Any) -> bool:
            WITNESS.store(target.ticket, source.block_ids.tolist())
            return submit_store(job, source, target)

        def load(job: int, source: Any, target: GPULoadStoreSpec, *more: Any) -> bool:
            WITNESS.loading[job] = source.ticket, target.block_ids.tolist()
            return submit_load(job, source, target, *more)

        def finished() -> Any:
            done = get_finished()
            for each in done:
                if each.job_id in WITNESS.loading:
                    WITNESS.loaded(each.job_id, failed=each.job_id in worker.failed)
            return done

        worker.submit_store, worker.submit_load, worker.get_finished = store, load, finished
        return worker
