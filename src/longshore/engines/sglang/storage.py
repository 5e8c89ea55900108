"""`LongshoreStorage`: what SGLang's hierarchical cache is told to load as its storage back end.

    SGLang's host memory ◄──copies──► ring in shared memory ◄──tier host──► files

SGLang asks from threads of its own, which block until a call returns. It takes the pages of a call back as soon as that
returns, so no copy may touch them then. Only this process touches them, by copies between them and a bounded ring: a
call can return at its deadline, however long a disk takes. A tier host that mapped SGLang's memory could not be called
back from a hung disk. A store returns when its pages are in the ring; the files are written behind.

Every rank has a process, files, and a scope of its own. Whatever fails makes fewer pages: the calls raise nothing.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolName

from longshore.boundary import Key
from longshore.cache import UNTOLD, GroupKeys
from longshore.config import Config
from longshore.engines.sglang import contract, identity
from longshore.engines.sglang.flags import PREFIX_KEYS, read
from longshore.engines.sglang.pool import HostPages
from longshore.engines.weight_files import MEMO
from longshore.errors import EngineError, LongshoreError
from longshore.metrics import LongshoreCollector, MirroredMetrics
from longshore.runtime.containment import contained
from longshore.runtime.loop import Runtime
from longshore.runtime.ring_mover import ImageRing
from longshore.runtime.selftest import self_test
from longshore.runtime.stack import RING_BYTES, open_stack
from longshore.runtime.tier_host import HostedFileTier
from longshore.tiers.arena import Arena, ArenaSettings
from longshore.tiers.base import Tier
from longshore.transfer.device import CpuDevice

_log = logging.getLogger(__name__)

_LEAST_RING = 8  # pages
_TURNS = 4096
"""Requests that were looked up, whose turn is kept until they are loaded."""

_open = weakref.WeakSet["LongshoreStorage"]()


class LongshoreStorage(HiCacheStorage):  # type: ignore[misc]
    """A file tier behind SGLang's host memory."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        """`storage_config` is a `HiCacheStorageConfig`. Raises `ConfigError`, `ContractError` or `EngineError`."""
        contract.check()
        self._told = identity.settings()
        identity.refuse(storage_config, self._told)
        self._check_prefix_keys()
        rank, ranks = storage_config.tp_rank, storage_config.tp_size
        self.settings: Config = read(storage_config.extra_config, f"rank-{rank}-of-{ranks}", ranks)
        self._storage_config = storage_config
        self._turns: OrderedDict[Key, int] = OrderedDict()
        self._lock = threading.Lock()
        self._why_off = ""
        self._metrics: MirroredMetrics | None = None

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Open the tiers for the pages of SGLang's host memory, and test them. Raises `LongshoreError`."""
        super().register_mem_pool_host(mem_pool_host)
        identity.check_pool(mem_pool_host)
        self._pages = HostPages(mem_pool_host)
        layout, config = self._pages.layout, self.settings
        if config.file_path is None:  # `read` has seen to it
            raise EngineError("expected file_path")
        memo = config.file_path.parent / MEMO
        scope = identity.scope_of(self._storage_config, self._told, layout, config.salt, memo)
        with contextlib.ExitStack() as undo:
            images = max(RING_BYTES // layout.image_bytes, _LEAST_RING)
            ring = Arena(images * layout.image_bytes, ArenaSettings(numa_node=None, shared=True))
            undo.callback(ring.close)
            slots = ImageRing(ring, layout.image_bytes)
            self._stack = open_stack(config, layout, scope, CpuDevice(), open_gds=_open_files, ring=slots)
            undo.callback(self._stack.close, 0.0)
            self._test(mem_pool_host)
            _watch_weights()
            undo.pop_all()
        self._arena = ring
        if self._storage_config.enable_storage_metrics:
            stack, rank = self._stack, {"tp_rank": str(self._storage_config.tp_rank)}
            collector = LongshoreCollector(stack.runtime, None, stack.engine, stack.events, stack.file)
            self._metrics = MirroredMetrics(collector, rank)
        _open.add(self)
        _log.info("%s, scope %s", layout, scope.root.hex()[:12])

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Raises `EngineError` for a pool beside that of the keys and values: models with several are not served."""
        if host_pool_name != PoolName.KV:
            self.close()
            raise EngineError(f"models with a host pool {host_pool_name!s} beside their KV cache are not served")

    # ------------------------------------------------------------------ pages, from SGLang's threads

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many of `keys`, pages that follow one another, lead that are stored."""
        before = len(getattr(extra_info, "prefix_keys", None) or ())
        return self._count(_digests(keys), before)

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Read the pages of `keys` into host memory; whether each is there, of which a leading run is."""
        found = self._load(_digests(keys), host_indices)
        return [True] * found + [False] * (len(keys) - found)

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Store pages of host memory under `keys`; whether each was taken, or is stored."""
        before = getattr(extra_info, "prefix_keys", None)
        return self._store(_digests(before), _digests(keys), host_indices, is_told=before is not None)

    @contained(lambda self, keys, before: 0, expected=(LongshoreError,))
    def _count(self, keys: Sequence[Key], before: int) -> int:
        if not keys or self._why_off:
            return 0
        runtime = self._runtime
        with runtime.control() as cache:
            found = cache.lookup({0: GroupKeys(keys, UNTOLD)}, runtime.clock())
        runtime.asked.requests += 1
        runtime.asked.attempts += 1
        if found.turn is not None:
            with self._lock:
                self._turns[keys[0]] = found.turn
                while len(self._turns) > _TURNS:
                    self._turns.popitem(last=False)
        if found.lease is None:
            return 0
        try:
            return runtime.worth_loading(found.lease, before * self._pages.page_size)
        finally:
            with runtime.control() as cache:
                cache.release(found.lease)

    @contained(lambda self, keys, indices: 0, expected=(LongshoreError,))
    def _load(self, keys: Sequence[Key], indices: torch.Tensor) -> int:
        if not keys or self._why_off:
            return 0
        pages, runtime = self._pages.pages(indices, len(keys)), self._runtime
        with self._lock:
            turn = self._turns.get(keys[0])
        lease, jobs = None, list[int]()
        try:
            with runtime.control() as cache:
                asked = {0: GroupKeys(keys, UNTOLD)}
                found = cache.lookup(asked, runtime.clock(), turn=turn, count=False)
                lease = found.lease
                if lease is None:
                    return 0
                jobs += [part.job for part in cache.load(lease, {0: pages[: found.chunks]}).parts]
            outcome = runtime.wait_over(lease).outcome
            return 0 if outcome is None or self._why_off else outcome.chunks
        finally:
            if lease is not None:
                with contextlib.suppress(LongshoreError), runtime.control() as cache:
                    cache.release(lease)
            self._let_go(jobs)

    @contained(lambda self, before, keys, indices, is_told: [False] * len(keys), expected=(LongshoreError,))
    def _store(self, before: Sequence[Key], keys: Sequence[Key], indices: torch.Tensor, is_told: bool) -> list[bool]:
        if self._why_off or not keys:
            return [False] * len(keys)
        if not is_told:
            raise EngineError(f"SGLang does not say what precedes a page: set {PREFIX_KEYS} in its extra configuration")
        pages, runtime = self._pages.pages(indices, len(keys)), self._runtime
        path, first = [*before, *keys], len(before)
        jobs = list[int]()
        try:
            with runtime.control() as cache:
                order = cache.store({0: GroupKeys(path, first)}, {0: pages})[0]
                jobs += [] if order.job is None else [order.job]
        finally:
            self._let_go(jobs)
        taken = {*order.positions, *order.known}
        return [at in taken or at < order.kept for at in range(first, len(path))]

    def _let_go(self, jobs: Sequence[int]) -> None:
        """Wait until no copy touches the pages of `jobs`: jobs have deadlines, and a copy that has begun is short."""
        mover = self._stack.ring_mover
        if mover is None:
            return
        while not self._runtime.wait_for_blocks(jobs, mover.touches_blocks, self.settings.write_timeout):
            _log.error("pages of jobs %s are still being copied", list(jobs))

    # ------------------------------------------------------------------ the rest

    def clear(self) -> None:
        """Forget all stored pages, also after a restart."""
        with contextlib.suppress(LongshoreError), self._runtime.control() as cache:
            cache.reset()

    def flush(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds until all pages that were taken are in files; returns whether they are."""
        return self._runtime.flush(timeout)

    def close(self) -> None:
        """Write what was taken, and close the tiers. Idempotent."""
        self._why_off = self._why_off or "closed"
        if hasattr(self, "_arena"):
            self._stack.close()
            self._arena.close()

    def get_stats(self) -> None:
        """Write our metrics, which have names of their own, for SGLang's `/metrics`. SGLang asks now and then."""
        if self._metrics is not None:
            self._metrics.update()

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        """Nothing: pages are read by `batch_get_v1`."""

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[None]:
        """Nothing: pages are read by `batch_get_v1`."""
        return [None] * len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Refused: pages are stored by `batch_set_v1`."""
        return False

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Refused: pages are stored by `batch_set_v1`."""
        return False

    def exists(self, key: str) -> bool:
        """Whether the page of `key` is stored, and all before it."""
        return self.batch_exists([key]) == 1

    @property
    def _runtime(self) -> Runtime:
        return self._stack.runtime

    def weights_change(self) -> None:
        """Weights are about to change: pages of the new ones could not be told from pages of those before."""
        self._turn_off("weights have changed in the running engine; restart it to store and read pages again")

    def _turn_off(self, why: str) -> None:
        if not self._why_off:
            _log.warning("file tier off: %s", why)
            self._why_off = why

    def _check_prefix_keys(self) -> None:
        """Raise `EngineError` if SGLang was started with this back end, and not told to say what precedes a page."""
        from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController  # noqa: PLC0415

        if self._told["hicache_storage_backend"] != "dynamic":  # attached later, with a configuration of its own
            return
        extra = self._told["hicache_storage_backend_extra_config"]
        if not HybridCacheController.parse_storage_backend_extra_config(extra)[4]:
            raise EngineError(f"expected {PREFIX_KEYS} to be true in --hicache-storage-backend-extra-config")

    def _test(self, pool: Any) -> None:
        """A page goes into a file and back; one that SGLang does not use."""
        indices = pool.alloc(self._pages.page_size)
        if indices is None:
            _log.info("self-test skipped, because host memory has no free page")
            return
        try:
            self_test(self._stack, self._pages, self._pages.pages(indices, 1))
        finally:
            pool.free(indices)


def _digests(keys: Sequence[str] | None) -> list[Key]:
    """SGLang's keys, hexadecimal, as bytes."""
    return [bytes.fromhex(key) for key in keys or ()]


def _open_files(directory: Any, *, memory: Arena, **named: Any) -> Tier:
    return HostedFileTier(directory, arena=memory, fixed_weights=True, **named)


def _watch_weights() -> None:
    """Wrap what changes the weights of a running engine, so that open back ends hear of it before. Once a process."""
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater  # noqa: PLC0415

    if getattr(WeightUpdater, "longshore_watches", False):
        return
    for name in (*contract.UPDATES, "update_weights_from_ipc"):
        setattr(WeightUpdater, name, _announced(getattr(WeightUpdater, name)))
    WeightUpdater.longshore_watches = True


def _announced(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*arguments: Any, **named: Any) -> Any:
        for storage in list(_open):
            storage.weights_change()
        return method(*arguments, **named)

    return call
