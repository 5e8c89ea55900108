"""`LongshoreSpec`: the class that vLLM's offloading connector loads.

vllm serve MODEL --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
    "kv_connector_extra_config": {"spec_name": "LongshoreSpec", "spec_module_path": "longshore.engines.vllm",
                                  "host_size": "64GiB", "file_path": "/mnt/nvme/longshore", "file_size": "1TiB"}}'
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

from vllm.v1.kv_offload.base import OffloadingSpec

from longshore.boundary import HOST, Key, Section, Slabs, Slot, by_size
from longshore.cache import WritePolicy
from longshore.engines.kv_transfer_config import check_parallelism, read_extra_config
from longshore.engines.tensors import RowBlocks
from longshore.engines.vllm import contract
from longshore.engines.vllm.manager import LongshoreManager
from longshore.engines.vllm.metrics import EVENTS_LIMIT, definitions
from longshore.engines.vllm.model import (
    has_no_shutdown_timeout,
    instance_id,
    memo_directory,
    model_identity,
    nodes,
    ranks_share_memory,
    reason_not_persistent,
    scope_of,
    vllm_config,
)
from longshore.engines.vllm.rendezvous import (
    EngineMemory,
    attach,
    record_memory_info,
    remove_memory_info,
    wait_for_memory_info,
)
from longshore.engines.vllm.requests import cache_keys
from longshore.engines.vllm.tiers import SchedulerTiers, correct_connector, open_tiers, watch_sleeps
from longshore.engines.vllm.weight_changes import watch_calls
from longshore.engines.vllm.worker import LongshoreWorker
from longshore.errors import EngineError
from longshore.layout import KVGroup, KVLayout, PageRef
from longshore.metrics import LongshoreCollector
from longshore.runtime.commands import ControlledEngine, ControlledGroup
from longshore.runtime.control import ControlServer
from longshore.runtime.rank_reports import RankReports
from longshore.runtime.selftest import copy_test
from longshore.runtime.stack import check_size, open_arena, registrar_for
from longshore.tiers.arena import Arena
from longshore.tiers.host import HostSlabs
from longshore.transfer.device import device_for
from longshore.transfer.engine import TransferEngine


def layout_of(caches: Any, config: Any) -> KVLayout:
    """The layout of this rank: a row of bytes for each block of each tensor.

    Groups share one pool of physical blocks, and often tensors. A reference is one layer's page without its padding.
    vLLM orders whole blocks (`GPULoadStoreSpec` has no tokens) and does not say how its pages are ordered inside, so no
    reference has `token_bytes`; they are part of the fingerprint of files.
    `caches` are `CanonicalKVCaches`, `config` is an `OffloadingConfig`.

    Raises `LayoutError` where pages overlap, or lie outside their tensors.
    """
    tensors = [each.tensor for each in caches.tensors]
    # Where all ranks hold the same bytes one image part serves them all.
    ranks = 1 if config.replicated_layout else config.parallel.world_size
    rank = 0 if config.replicated_layout else config.parallel.rank
    groups = tuple(
        KVGroup(
            f"group {group.group_id}",
            group.tokens_per_block,
            config.cache.blocks_per_chunk,
            tuple(
                PageRef(ref.tensor_idx, 0, tensors[ref.tensor_idx].stride(0), ref.page_size_bytes, None, layer)
                for layer, ref in enumerate(refs)
            ),
        )
        for group, refs in zip(config.groups, caches.group_data_refs, strict=True)
    )
    return KVLayout(groups, tensors, len(tensors[0]), ranks, rank)


_log = logging.getLogger(__name__)

_SEVERAL_NODES = (
    "ranks on several nodes are not served, because ranks share host memory: run them on one machine, with one /dev/shm"
)
_PLAIN_CONNECTOR = (
    "vLLM's plain OffloadingConnector cannot report failed loads: a load that fails twice will stop the engine. With "
    "LongshoreConnector its request is recomputed: `longshore vllm-config` prints the configuration."
)

_NO_SHUTDOWN_TIMEOUT = (
    "vLLM kills its engine a few seconds after it is told to stop, and blocks that only host memory has are lost: give "
    "it time to write them to files (--shutdown-timeout 120), or set backup: write_through."
)

_MIXED_ADAPTERS = (
    "this vLLM computes base-model requests on the CPU with the last LoRA adapter when they share a step with requests "
    "of an adapter (vLLM 0.33 has it right): blocks of the base model are not stored"
)


class LongshoreSpec(OffloadingSpec):  # type: ignore[misc]
    """Host and file tiers behind vLLM's offloading connector."""

    def __init__(self, config: Any) -> None:
        """`config` is vLLM's `OffloadingConfig`. Raises `ConfigError`, `ContractError` or `EngineError`."""
        contract.check()
        super().__init__(config)
        check_parallelism(config.parallel, nodes())
        self.reports_failures = False
        """Whether the connector reports failed loads to vLLM; `LongshoreConnector` does."""
        self.offload_prompt_only = bool(self.extra_config.get("offload_prompt_only", False))
        self.replicated_layout = config.replicated_layout
        parallel = config.parallel
        self.settings = read_extra_config(
            self.extra_config,
            config.cache.blocks_per_chunk,
            parallel.data_parallel_index,
            parallel.data_parallel_size,
        )

    def get_manager(self) -> LongshoreManager:
        """The scheduler's side. The workers have allocated the memory by now."""
        watch_sleeps()
        correct_connector()
        memory = wait_for_memory_info(self.config.engine_id)
        scope = None
        if self.settings.file_path is not None or self.settings.shares:
            reason = reason_not_persistent(memory.model)
            if reason:
                if self.settings.file_path is not None:
                    _log.error("file tier disabled: %s", reason)
                if self.settings.shares:
                    _log.error("remote tiers disabled: %s", reason)
            else:
                scope = scope_of(self.config, memory.model, memory.fingerprint, memory.device, self.settings.salt)
        if memory.model.base_is_mixed:
            _log.error(_MIXED_ADAPTERS)
        publishes_events = self.kv_events_config.enable_kv_cache_events
        if self.settings.kv_events_remote and not publishes_events:
            _log.warning("kv_events_remote has no effect: vLLM publishes no KV events (--kv-events-config)")
        try:
            tiers = open_tiers(
                self.settings, memory, scope, self.config.groups, events=EVENTS_LIMIT if publishes_events else 0
            )
        finally:
            remove_memory_info(self.config.engine_id, memory)
        numbers = [group.group_id for group in self.config.groups]
        manager = LongshoreManager(
            tiers,
            numbers,
            self.settings.load_timeout,
            publishes_events=publishes_events,
            hints=self.settings.request_hints,
        )
        try:
            watch_calls(tiers.reports)
            if self.settings.control:
                serve_commands(manager, tiers, self.config, self.settings.control, memory.model.hashing)
            if self.settings.serve and (peers := tiers.peers) is not None:
                from longshore.runtime.peer_server import PeerServer, TierSource  # noqa: PLC0415 - only for who serves

                host = HostSlabs(tiers.arena, memory.layout)
                source = TierSource(tiers.runtime, host, lambda: peers.namespace, manager.is_coming)
                manager.peer_server = PeerServer(self.settings.serve, source)
        except BaseException:
            manager.shutdown()
            raise
        return manager

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """The metrics that `LongshoreManager.get_stats` reports."""
        return definitions()

    def get_worker(self, kv_caches: Any) -> LongshoreWorker:
        """A rank's side. Rank 0 allocates the memory, and publishes it after its self-test."""
        parallel = self.config.parallel
        if parallel.world_size > 1 and not ranks_share_memory():  # before whatever may fail on one rank alone: all ask
            raise EngineError(_SEVERAL_NODES)
        layout = layout_of(kv_caches, self.config)
        _log.info("KV cache layout: %s", layout)
        with contextlib.ExitStack() as undo:
            if parallel.rank == 0:
                arena, reports, memory = self._make_memory(layout)
            else:
                memory = wait_for_memory_info(self.config.engine_id, instance_id())
                arena, reports = attach(memory)
                registrar = registrar_for(layout.device)
                if registrar is not None:
                    arena.register(registrar, memory.slab_bytes)
            undo.callback(arena.close)
            undo.callback(reports.close)
            device = device_for(layout, self.settings.calibration)
            device.set_registered_memory(arena.in_one_piece)
            engine = TransferEngine(layout, device, HostSlabs(arena, memory.layout))
            undo.callback(engine.close)
            has_part = parallel.rank < layout.ranks
            self._test(engine, kv_caches, layout, memory, slab=0 if has_part else parallel.rank)
            if parallel.rank == 0:
                record_memory_info(self.config.engine_id, memory)
            undo.pop_all()
        per_chunk = self.config.cache.blocks_per_chunk
        states = [group for group, window in enumerate(memory.model.windows) if window == 1]
        worker = LongshoreWorker(
            *(engine, arena, reports, parallel.rank, per_chunk), has_part=has_part, states=states, vllm=vllm_config()
        )
        worker.reports_failures = self.reports_failures
        if parallel.rank == 0:
            self._warn()
        return worker

    def _warn(self) -> None:
        """Log what the configuration may cost."""
        if not self.reports_failures:
            _log.warning(_PLAIN_CONNECTOR)
        if (
            self.settings.file_path is not None
            and self.settings.backup is WritePolicy.BACK
            and has_no_shutdown_timeout()
        ):
            _log.warning(_NO_SHUTDOWN_TIMEOUT)

    def _test(self, engine: TransferEngine, caches: Any, layout: KVLayout, memory: EngineMemory, *, slab: int) -> None:
        """Copies a chunk of each group to host memory and back. No request has begun: no block is in use, and no slot.

        Ranks that have no part of the images try it each in a slab of their own, as far as there are as many.
        """
        if slab >= memory.slabs:
            return
        for group, size_class in enumerate(memory.size_classes):
            blocks = tuple(range(min(layout.groups[group].blocks_per_chunk, layout.num_blocks)))
            slot = Slot(HOST, size_class, memory.layout.slots_of(slab, size_class)[0])
            refs = caches.group_data_refs[group]
            rows = (caches.tensors[ref.tensor_idx].tensor[:, : ref.page_size_bytes] for ref in refs)
            copy_test(engine, RowBlocks(*rows), Section(group, 0, blocks), slot)

    def _make_memory(self, layout: KVLayout) -> tuple[Arena, RankReports, EngineMemory]:
        """The arena, the table of the reports of the ranks, and what other processes need to attach to both."""
        self.settings.check_host()  # whatever is wrong with the file tier's directory does not stop the engine
        check_size("host_size", self.settings.host_size, layout.image_bytes)
        sizes, size_classes = by_size([layout.image_bytes_of(group) for group in range(len(layout.groups))])
        slabs = Slabs.within(self.settings.host_size, sizes)
        arena = open_arena(self.settings, slabs.slabs, slabs.slab_bytes, registrar_for(layout.device))
        reports = RankReports.make(slabs.indices, self.config.parallel.world_size, layout.ranks)
        memory = EngineMemory(
            arena=str(arena.path),
            reports=str(reports.memory.path),
            slab_bytes=slabs.slab_bytes,
            image_bytes=slabs.image_bytes,
            slabs=slabs.slabs,
            size_classes=size_classes,
            ranks=layout.ranks,
            world=self.config.parallel.world_size,
            fingerprint=layout.fingerprint,
            device=layout.device,
            model=model_identity(self.config.groups, memo_directory(self.settings)),
            instance=instance_id(),
            writers=(os.getpid(), os.getppid()),
        )
        return arena, reports, memory


def serve_commands(manager: LongshoreManager, tiers: SchedulerTiers, config: Any, name: str, hashing: str) -> None:
    """Open the socket `name` for commands of `longshore ctl` to `manager`, which closes it.

    `config` is vLLM's `OffloadingConfig`, `hashing` the name of its hash of blocks. Raises as `ControlServer`.
    """
    metrics = LongshoreCollector(tiers.runtime, file=tiers.file, stores=tiers.remote_stores)
    with tiers.runtime.locked() as cache:
        kinds = [cache.settings.group(number) for number in range(len(config.groups))]
    groups = [ControlledGroup(tiers.runtime, size, kind.window, number) for number, (kind, size) in enumerate(kinds)]
    manager.ctl_server = ControlServer(
        name, ControlledEngine(lambda: groups, keys_of(config, hashing), metrics.collect)
    )


def keys_of(config: Any, hashing: str) -> Callable[[Sequence[int]], list[list[Key]]]:
    """The cache keys of prompts in each KV cache group, of requests without adapter, `cache_salt` or images.

    Raises `ContractError` if vLLM has no such function.
    """
    from vllm.utils import hashing as hashes  # noqa: PLC0415 - only an engine that serves commands needs them
    from vllm.v1.core import kv_cache_utils  # noqa: PLC0415
    from vllm.v1.kv_offload.base import make_offload_key  # noqa: PLC0415

    contract.check_has(kv_cache_utils, "hash_block_tokens")
    contract.check_has(hashes, "get_hash_fn_by_name")
    function, per_hash = hashes.get_hash_fn_by_name(hashing), config.cache.tokens_per_hash

    def keys(tokens: Sequence[int]) -> list[list[Key]]:
        vllm_keys: dict[int, list[Any]] = {group.group_id: [] for group in config.groups}
        parent = None
        for end in range(per_hash, len(tokens) + 1, per_hash):
            parent = kv_cache_utils.hash_block_tokens(function, parent, tokens[end - per_hash : end], None)
            for group in config.groups:
                if end % (group.tokens_per_block * config.cache.blocks_per_chunk) == 0:
                    vllm_keys[group.group_id].append(make_offload_key(parent, group.group_id))
        return [cache_keys(each) for each in vllm_keys.values()]

    return keys
