"""The scheduler's side of the tiers: opened over the arena that the workers made, put to sleep, closed.

TieredCache ── Runtime ─┬ TierMover ──── HostedFileTier ══ tier host, a process that reads and writes files
                        ├ KeyedMover ─ HostedRemoteTier ═════ tier host, with connections to a store that replicas share
                        └ HostSlabs over the shared arena                      (device <-> host is the workers' work)

EngineCore.sleep ─► waits for requests ─► resets caches, the connector's too ─► the workers free device memory

vLLM does not tell a connector why it is reset. So `EngineCore` is wrapped: at level 1 weights are kept, and so are the
tiers; at level 2 neither is. Host memory that is not kept is freed while the engine sleeps.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import logging
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longshore.boundary import FILE, HOST, PEERS
from longshore.cache import CacheGroup, TieredCache
from longshore.cache.eviction_policies import EvictionPolicy
from longshore.config import Config, Kept
from longshore.engines.vllm import contract
from longshore.engines.vllm.rendezvous import EngineMemory, attach
from longshore.errors import CapacityError, ConfigError, TierError
from longshore.keys import Scope
from longshore.runtime.loop import BackgroundLoop, Runtime
from longshore.runtime.rank_reports import RankReports
from longshore.runtime.stack import close_runtime, make_runtime, named_stores
from longshore.runtime.stack import make_cache as make_tiered_cache
from longshore.runtime.tier_host import HostedFileTier, HostedRemoteTier
from longshore.tiers.arena import Arena
from longshore.tiers.base import Tier
from longshore.tiers.file.recovery import slabs_within
from longshore.tiers.host import HostSlabs
from longshore.tiers.mover import KeyedMover, TierMover
from longshore.tiers.remote.settings import parse_url

if TYPE_CHECKING:
    from longshore.runtime.peer_server import PeerServer
    from longshore.tiers.remote.peers import PeerTier

_sleep_level: ContextVar[int] = ContextVar("level", default=0)
"""Level of the sleep whose reset is in progress; 0 in any other reset."""

Watched = Callable[..., Any]


def watch_sleeps() -> None:
    """Wrap `EngineCore`, so that resets of a sleep are known. Raises `ContractError` if a method is missing."""
    from vllm.v1.engine.core import EngineCore  # noqa: PLC0415 - it is there where there are managers

    contract.check_has(EngineCore, "sleep", "release_kv_cache_memory", "_reset_caches")
    if not hasattr(EngineCore, "longshore_sleeps"):
        EngineCore.longshore_sleeps = ()
        EngineCore.sleep = _mark_sleep(EngineCore.sleep)
        EngineCore.release_kv_cache_memory = _mark_sleep(EngineCore.release_kv_cache_memory)
        EngineCore._reset_caches = _mark_reset(EngineCore._reset_caches)


def correct_connector() -> None:
    """Correct two faults of vLLM 0.32's own part of the connector; 0.33 has both right.

    A session of streaming input is scheduled as a new request with each input. Its whole block table was appended to
    the one before, and blocks of the beginning were stored under the keys of those behind. And a request that a reset
    has preempted may load in the same step: an assertion that it has stores alone stopped the engine.

    Raises `ContractError` if a method is missing.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (  # noqa: PLC0415
        OffloadingConnectorScheduler,
    )

    contract.check_has(OffloadingConnectorScheduler, "_update_req_states", "build_connector_meta")
    update, build = OffloadingConnectorScheduler._update_req_states, OffloadingConnectorScheduler.build_connector_meta
    if getattr(build, "is_corrected", False):
        return

    @functools.wraps(update)
    def update_states(scheduler: Any, output: Any) -> None:
        for new in output.scheduled_new_reqs:
            for group in scheduler._req_status[new.req_id].group_states:
                group.block_ids.clear()
        update(scheduler, output)

    @functools.wraps(build)
    def build_meta(scheduler: Any, output: Any) -> Any:
        preempted = set(output.preempted_req_ids or ())
        loading = preempted.intersection(job.req_id for job in scheduler._current_batch_load_jobs.values())
        if loading:  # they have no stores: vLLM lets none of those load
            output = copy.copy(output)
            output.preempted_req_ids = preempted - loading
        return build(scheduler, output)

    build_meta.is_corrected = True  # type: ignore[attr-defined]
    OffloadingConnectorScheduler._update_req_states = update_states
    OffloadingConnectorScheduler.build_connector_meta = build_meta


def _mark_sleep(method: Watched) -> Watched:
    """A method that marks resets of the engine as those of a sleep until its future is done."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    def sleep(engine: Any, *arguments: Any, **named: Any) -> Any:
        bound = signature.bind(engine, *arguments, **named)
        bound.apply_defaults()
        level = int(bound.arguments.get("level", 1))  # to release the memory of blocks alone keeps weights
        engine.longshore_sleeps += (level,)

        def over(_: Any = None) -> None:
            left = list(engine.longshore_sleeps)
            left.remove(level)
            engine.longshore_sleeps = tuple(left)

        try:
            future = method(engine, *arguments, **named)
        except BaseException:
            over()
            raise
        if future is None:
            over()
        else:
            future.add_done_callback(over)
        return future

    return sleep


def _mark_reset(method: Watched) -> Watched:
    @functools.wraps(method)
    def reset(engine: Any, *arguments: Any, **named: Any) -> Any:
        before = _sleep_level.set(max(engine.longshore_sleeps, default=0))
        try:
            return method(engine, *arguments, **named)
        finally:
            _sleep_level.reset(before)

    return reset


class SleepControl:
    """Which tiers a reset keeps, and whether host memory is freed while the engine sleeps."""

    def __init__(self, runtime: Runtime, reports: RankReports, slabs: int, config: Config) -> None:
        """`slabs` is the number of slabs of the host tier."""
        self._runtime = runtime
        self._reports = reports
        self._slabs = slabs
        self._config = config
        self.has_memory = True
        """Whether the host tier has its slots."""

    def kept(self) -> tuple[str, ...]:
        """The tiers that the current reset keeps; the file tier with all blocks that are to be written to it."""
        level = _sleep_level.get()
        kept = self._config.reset_keep if not level else self._config.sleep_keep if level == 1 else Kept.NONE
        with self._runtime.locked() as cache:
            keep = tuple(tier.name for tier in cache.stats() if tier.name in kept.tiers)
        if keep == (FILE,) and not self._runtime.flush(self._config.write_timeout):
            what = "sleep" if level else "reset"
            _log.warning(
                "not all blocks were written to the file tier within write_timeout (%g s); the others are dropped by "
                "this %s: raise write_timeout, or set %s_keep: all",
                *(self._config.write_timeout, what, what),
            )
        return keep

    def give_back(self, peers: PeerServer | None, *, idle: bool) -> None:
        """Free host memory before a sleep, unless `sleep_keep` keeps it. All other blocks have been discarded.

        Until it is allocated again the host tier has no slots: lookups are misses, and nothing is stored. It is not
        freed while workers (if not `idle`) or the tier host use some of it. Clients of `peers` that read it are closed.
        """
        if not _sleep_level.get() or self._config.sleep_keep is Kept.ALL:
            return
        if peers is not None:
            peers.drop_clients()
        if idle:
            self._runtime.wait_idle(self._config.load_timeout)
        try:
            with self._runtime.batch() as cache:
                cache.resize(HOST, 0, discard=True)
        except CapacityError as error:
            _log.warning("host memory is not freed for this sleep, because copies are in flight: %s", error)
            return
        self.has_memory, self._reports.frees_host_memory = False, True

    def restore_host_memory(self) -> None:
        """A step is planned, so the engine is awake: use the slots again if all workers have the memory again."""
        if not self.has_memory and not self._reports.is_asleep() and not self._reports.lacks_memory():
            self.has_memory, self._reports.frees_host_memory = True, False
            with self._runtime.batch() as cache:
                cache.resize(HOST, self._slabs)


_log = logging.getLogger(__name__)

_MAX_WRITES = 1 << 14
"""Chunks in flight to a tier, unless the configuration says otherwise: vLLM offers long prompts whole, and but once."""


@dataclass(frozen=True, slots=True)
class SchedulerTiers:
    """What `open_tiers` built.

    Attributes:
        file: The file tier, if there is one.
        base_is_mixed: Whether vLLM may have computed blocks of the base model with an adapter.
        remote_stores: The stores that replicas share.
        is_off: Whether there is no file tier because its directory could not be opened.
        windows: How many chunks the window of each group has; `None` for those that never slide.
        sleeps: What resets keep.
        write_timeout: Seconds for which a store waits for slots.
        peers: The other replicas, the last of `remote_stores`.
    """

    runtime: Runtime
    reports: RankReports
    arena: Arena
    loop: BackgroundLoop
    file: HostedFileTier | None
    windows: tuple[int | None, ...]
    sleeps: SleepControl
    base_is_mixed: bool = False
    is_off: bool = False
    remote_stores: tuple[HostedRemoteTier | PeerTier, ...] = ()
    write_timeout: float = 60.0
    peers: PeerTier | None = None

    def close(self) -> None:
        """Write back chunks that a restart would lose, then release all resources. Idempotent."""
        self.loop.close()
        close_runtime(self.runtime)
        self.reports.close()
        self.arena.close()


def open_tiers(
    config: Config, memory: EngineMemory, scope: Scope | None, groups: Any, *, events: int = 0
) -> SchedulerTiers:
    """The tiers of `config` in `memory`; without a `scope` there are neither files nor remote stores.

    If its directory cannot be opened, there is no file tier either, and the log has the reason. The cache keeps at
    most `events` events until they are read. Raises `TierError` if `file_size` has no room for one image, or a
    certificate of a store cannot be used.
    """
    with contextlib.ExitStack() as undo:
        arena, reports = attach(memory)
        undo.callback(arena.close)
        undo.callback(reports.close)
        host = HostSlabs(arena, memory.layout)
        file: HostedFileTier | None = None
        if config.file_path is not None and scope is not None:
            slabs_within(config.file_size, memory.image_bytes)
            file = _open_file_tier(config, config.file_path, memory, arena, scope)
            if file is not None:
                undo.callback(file.close)
        stores = tuple(_open_stores(config, memory, arena, scope, file, undo))
        cache = make_cache(config, memory, file, groups, events, stores=[store.name for store in stores])
        movers = [] if file is None else [TierMover(file, host)]
        probers = [KeyedMover(store, host) for store in stores]
        sizes = [group.tokens_per_block * config.blocks_per_chunk for group in groups]
        chunk = sizes[0], sum(memory.image_bytes[size_class] for size_class in memory.size_classes)  # of all groups
        runtime = make_runtime(config, cache, file, movers, probers, chunk)
        loop = BackgroundLoop(runtime)
        undo.pop_all()
    windows = tuple(window and -(-window // size) for window, size in zip(memory.model.windows, sizes, strict=True))
    is_off = scope is not None and config.file_path is not None and file is None
    sleeps = SleepControl(runtime, reports, memory.slabs, config)
    peers: Any = next((store for store in stores if store.name == PEERS), None)
    more = (memory.model.base_is_mixed, is_off, stores, config.write_timeout, peers)
    return SchedulerTiers(runtime, reports, arena, loop, file, windows, sleeps, *more)


def _open_stores(
    config: Config,
    memory: EngineMemory,
    arena: Arena,
    scope: Scope | None,
    file: Tier | None,
    undo: contextlib.ExitStack,
) -> Iterator[HostedRemoteTier | PeerTier]:
    """The stores that replicas share; `undo` closes them."""
    if scope is None:
        return
    for name, url in named_stores(config).items():
        store = HostedRemoteTier(
            url,
            name=name,
            image_bytes=memory.image_bytes,
            arena=arena,
            namespace=scope.digest,
            generation=0 if file is None else file.generation,
            fixed_weights=config.fixed_weights,
        )
        undo.callback(store.close)
        _log.info("remote tier opened: %s (%s), namespace %s", name, store.settings, scope.digest.hex()[:16])
        yield store
    if config.serve or config.peer_networks:
        from longshore.tiers.remote.peers import PeerTier  # noqa: PLC0415 - only an engine with peers has it

        if len(memory.size_classes) > 1:
            raise ConfigError("serve and peer_networks are for models with one KV cache group: remove them")
        peers = PeerTier(
            parse_url(config.peer_url),
            config.peer_networks,
            image_bytes=memory.image_bytes,
            arena=arena,
            namespace=scope.digest,
            generation=0 if file is None else file.generation,
            fixed_weights=config.fixed_weights,
        )
        undo.callback(peers.close)
        yield peers


def _open_file_tier(
    config: Config, path: Path, memory: EngineMemory, arena: Arena, scope: Scope
) -> HostedFileTier | None:
    """The file tier; nothing where `path` cannot be used as one, which the log says: the engine serves without."""
    try:
        return HostedFileTier(
            path,
            capacity=config.file_size,
            image_bytes=memory.image_bytes,
            arena=arena,
            scope=scope.digest,
            threads=config.file_threads,
            fixed_weights=config.fixed_weights,
        )
    except TierError as error:
        _log.error(
            "file tier disabled: %s. The engine starts without it. Stop it, then repair the directory if that can be "
            "done (longshore fsck --repair %s), else remove it (rm -r %s; it holds a cache and nothing else), "
            "or correct file_path or file_size, and start again",
            error,
            *2 * (shlex.quote(str(path)),),
        )
        return None


def make_cache(
    config: Config,
    memory: EngineMemory,
    file: Tier | None,
    groups: Any,
    events: int,
    policy: type[EvictionPolicy] | None = None,
    stores: Sequence[str] = (),
) -> TieredCache:
    """The control plane over host memory as in `memory`, over `file`, and beside `stores`; `groups` are vLLM's.

    Its tiers have the eviction policy of `config`, or `policy`.
    """
    windows = zip(groups, memory.model.windows, strict=True)
    return make_tiered_cache(
        config,
        memory.layout,
        file,
        remote=stores,
        policy=policy,
        events=events,
        max_writes=config.max_writes if "max_writes" in config.model_fields_set else _MAX_WRITES,
        groups=tuple(CacheGroup(block_size=group.tokens_per_block, window=window) for group, window in windows),
        size_classes=memory.size_classes,
        stores_wait=True,
    )
