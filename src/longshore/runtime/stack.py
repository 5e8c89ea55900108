"""`Stack`: everything below one engine's device cache, built from a `Config`, a layout and a scope.

Runtime ── TieredCache                                file_mode = "gds":
   ├── TransferEngine   device <-> host                  device pages <-> a staging area for images on the device
   ├── HostSlabs        slots in one Arena               (none)
   ├── FileTier         (with a file_path)               GdsFileTier, between the staging area and the file
   └── RemoteTier ...   (those of `remote`)              (none)

An engine that has a host tier of its own brings its `staging` slots in host memory, and is served like with `gds`: its
host tier is the device then.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

from longshore.boundary import FILE, HOST, PEERS, REMOTE, Key, Mover, Slabs, by_size
from longshore.cache import (
    CacheGroup,
    CacheSettings,
    GroupKeys,
    Lease,
    LookupResult,
    PrefetchPolicy,
    RecomputeGate,
    TieredCache,
    TierSpec,
    WritePolicy,
    WriteRule,
)
from longshore.cache.eviction_policies import POLICIES, EvictionPolicy
from longshore.config import Config, available_memory, format_bytes
from longshore.errors import ConfigError, TierError
from longshore.keys import Scope
from longshore.layout import KVLayout
from longshore.runtime.loop import BackgroundLoop, Runtime
from longshore.runtime.recorder import EventRecorder, kept_events, open_recorder
from longshore.runtime.staging_mover import StagingMover, StagingSlots, open_staging
from longshore.tiers.arena import Arena, ArenaSettings
from longshore.tiers.arena.pinning import CudaRegistrar, TorchCudaRuntime
from longshore.tiers.base import KeyedTier, Tier
from longshore.tiers.file import FileTier, GdsFileTier, capacity_for
from longshore.tiers.host import HostSlabs
from longshore.tiers.mover import KeyedMover, TierMover
from longshore.tiers.remote import ClusterTier, RemoteTier, open_store, parse_url
from longshore.transfer.device.base import Device
from longshore.transfer.engine import TransferEngine


def registrar_for(device: str) -> CudaRegistrar | None:
    """The registrar of host memory for `device`, such as `cuda:0`; `None` if none is needed. May import torch."""
    return CudaRegistrar(TorchCudaRuntime(device)) if device.startswith("cuda") else None


def open_arena(config: Config, slabs: int, slab_bytes: int, registrar: CudaRegistrar | None) -> Arena:
    """An arena for `slabs` slabs of `slab_bytes`. Raises `TierError`, with nothing left behind, if memory is short."""
    settings = ArenaSettings(
        numa_node=None if config.host_numa == "off" else config.host_numa,
        pci_address=None if registrar is None else registrar.pci_address(),
        huge_pages=config.host_huge_pages,
        shared=config.host_shared or any(parse_url(url).is_mooncake for url in config.remote),
    )
    with contextlib.ExitStack() as undo:
        arena = Arena(slabs * slab_bytes, settings)
        undo.callback(arena.close)
        if registrar is not None:
            arena.register(registrar, slab_bytes)
        undo.pop_all()
    return arena


def take_back(arena: Arena) -> None:
    """Allocate an arena again that was given back. Raises `TierError` if there is not as much memory."""
    available = available_memory()
    if arena.nbytes > available:
        needed, free = format_bytes(arena.nbytes), format_bytes(available)
        raise TierError(f"expected {needed} of free memory for the host tier, got {free}; lower host_size")
    arena.take_back()


_WRITES = {"all": WritePolicy.THROUGH, "second_use": WritePolicy.SELECTIVE, "evict": WritePolicy.BACK}
"""Write policies of stores, as in their URLs."""

_ANSWER_SECONDS = 0.05
"""Seconds added to the time limit of a store's probe, for its answer to arrive."""

_log = logging.getLogger(__name__)

Origins = Mapping[Key, str] | None
JobCallback = Callable[[int, Sequence[int]], None]
"""Called with a job, and the device blocks that it reads or writes until it has ended."""


@dataclass(frozen=True, slots=True)
class Stack:
    """The result of `open_stack`. A context manager; `close` flushes first, and is idempotent.

    Attributes:
        host: The host tier; `None` with `file_mode` gds.
        arena: Its memory.
        remote: The remote tiers, in the order of opening.
        staging_mover: What moves images through a staging area, where there is no host tier.
    """

    config: Config
    layout: KVLayout
    scope: Scope
    runtime: Runtime
    transfer_engine: TransferEngine
    host: HostSlabs | None
    file: Tier | None
    arena: Arena | None
    loop: BackgroundLoop | None
    events: EventRecorder | None
    remote: tuple[KeyedTier, ...] = ()
    staging_mover: StagingMover | None = None

    def record_tokens(self, keys: Sequence[Key], first: int, tokens: Sequence[int]) -> None:
        """Record the tokens of `keys[first:]` for KV events."""
        if self.events is not None and self.events.publisher is not None:
            self.events.publisher.record_tokens(keys, first, tokens)

    def load_path(
        self,
        found: LookupResult,
        path: GroupKeys,
        blocks: Sequence[int],
        on_job: JobCallback,
        *,
        skip: int = 0,
        request: str | None = None,
        origins: Origins = None,
    ) -> list[str]:
        """Fill device `blocks` with the leading chunks of what `found` leases of `path`; the tier that each came from.

        `origins` are the tiers that chunks were brought up from for this prompt before, by key.
        If the missing chunks exceed half of the host tier, or it has too many chunks without a backup, they are
        loaded in parts of that size, and backups make room before each part. All ends within `load_timeout`, and what
        has arrived by then counts. The caller releases the lease. `on_job` is called with each job and the blocks that
        it fills: a job may still run when this returns. The first of the blocks is block `skip` of its chunk.
        """
        return self.start_load(found, path, blocks, on_job, skip=skip, request=request, origins=origins)()

    def start_load(
        self,
        found: LookupResult,
        path: GroupKeys,
        blocks: Sequence[int],
        on_job: JobCallback,
        *,
        skip: int = 0,
        request: str | None = None,
        origins: Origins = None,
        timeout: float | None = None,
    ) -> Callable[[], list[str]]:
        """Begin `load_path`, for `timeout` seconds; the function that is returned waits for it, and returns the tiers.

        Copies from the host tier begin now. If chunks are in colder tiers, all copies begin when that is called.
        """
        lease, per_chunk = found.lease, self.config.blocks_per_chunk
        timeout = self.config.load_timeout if timeout is None else timeout
        if lease is None:
            return list
        with self.runtime.batch() as cache:
            runs, dirty = cache.progress(lease).runs, cache.backups_needed
        tiers = [run.tier for run in runs for _ in range(run.num_chunks)][: -(-(skip + len(blocks)) // per_chunk)]
        missing = len(tiers) - tiers.count(FILE if self.host is None else HOST)
        if missing > self._part_chunks or (
            missing and len(tiers) + dirty > 2 * self._part_chunks
        ):  # room has to be made
            origins = {**dict(zip(path.keys[path.start :], tiers, strict=False)), **(origins or {})}
            found = found._replace(num_chunks=min(len(tiers), found.num_chunks))
            return lambda: self._load_in_parts(found, path, blocks, on_job, skip, request, origins, timeout)
        begin = functools.partial(self._schedule_load, lease, blocks, skip, on_job, origins, timeout)
        if not missing:
            begin()
        return lambda: self._wait_load(lease, begin if missing else None)

    def _load_in_parts(
        self,
        found: LookupResult,
        path: GroupKeys,
        blocks: Sequence[int],
        on_job: JobCallback,
        skip: int,
        request: str | None,
        origins: Origins,
        timeout: float,
    ) -> list[str]:
        runtime, per_chunk, sources = self.runtime, self.config.blocks_per_chunk, list[str]()
        deadline, number = runtime.clock() + timeout, found.request_number
        while len(sources) < found.num_chunks and (left := deadline - runtime.clock()) > 0:
            done, now, end = len(sources), runtime.clock(), min(found.num_chunks, len(sources) + self._part_chunks)
            part = GroupKeys(path.keys[: path.start + end], path.start + done)
            with runtime.batch() as cache:
                hit = cache.lookup({0: part}, now, request=request, request_number=number, count=False, remote_tiers=())
                if hit.lease is None:
                    break
                cache.prefetch(hit.lease, now, policy=PrefetchPolicy.TIMEOUT, timeout=left)
            mine = blocks[max(0, done * per_chunk - skip) : (done + hit.num_chunks) * per_chunk - skip]
            try:
                runtime.wait_load(hit.lease)
                if (left := deadline - runtime.clock()) > 0:
                    self._schedule_load(hit.lease, mine, 0 if done else skip, on_job, origins, left)
                    sources += self._wait_load(hit.lease)
            finally:
                with runtime.batch() as cache:
                    cache.release(hit.lease)
            if len(sources) < end:
                break
        return sources

    def store_path(
        self,
        path: GroupKeys,
        blocks: Sequence[int],
        on_job: JobCallback,
        *,
        before_eviction: bool = False,
        request_number: int | None = None,
        timeout: float = 0.0,
    ) -> int:
        """Store chunks of a path as `TieredCache.store` does; how long a prefix is stored, or being stored, then.

        With `timeout`, in seconds, they are offered in parts of half of the host tier, and room that is being made
        for a part is waited for. `on_job` is told which of the `blocks` each job reads.
        """
        runtime, per_chunk, names = self.runtime, self.config.blocks_per_chunk, path.keys
        deadline, first, most = runtime.clock() + timeout, path.start, self._part_chunks if timeout else len(names)
        while True:
            end, left = min(len(names), first + most), 0.0 if runtime.gives_up else deadline - runtime.clock()
            part, skipped = path._replace(chunks=names[:end], start=first), (first - path.start) * per_chunk
            mine = blocks[skipped : (end - path.start) * per_chunk]
            with runtime.batch() as cache:
                store = functools.partial(cache.store, before_eviction=before_eviction, request_number=request_number)
                scheduled = store({0: part}, {0: mine}, all_or_retry=left > 0)[0]
                if scheduled.job is not None:
                    at = [position - first for position in scheduled.positions]
                    on_job(scheduled.job, [block for i in at for block in mine[i * per_chunk : (i + 1) * per_chunk]])
            if scheduled.retry:
                runtime.wait_idle(left, except_to=runtime.remote_tiers)  # a store that hangs makes no room
            elif scheduled.stored_prefix < end or end == len(names):
                return scheduled.stored_prefix
            else:
                first = end

    @property
    def _part_chunks(self) -> int:
        """How many chunks pass through the host tier at a time, if not all fit: half of its slots."""
        tier = self.file if self.host is None else self.host
        return 1 if tier is None else max(1, tier.slabs.indices // 2)

    def _schedule_load(
        self, lease: Lease, blocks: Sequence[int], skip: int, on_job: JobCallback, origins: Origins, timeout: float
    ) -> None:
        per_chunk, at = self.config.blocks_per_chunk, -skip
        with self.runtime.batch() as cache:
            for job in cache.load(lease, {0: blocks}, skip=skip, timeout=timeout, origins=origins).jobs:
                end = at + job.num_chunks * per_chunk
                on_job(job.job, blocks[max(0, at) : end])
                at = end

    def _wait_load(self, lease: Lease, begin: Callable[[], None] | None = None) -> list[str]:
        if begin is not None:
            begin()
        outcome = self.runtime.wait_load(lease).outcome
        return [] if outcome is None else list(outcome.sources)

    def close(self, flush_timeout: float = 30.0) -> bool:
        """Write back, stop, and release all resources; returns whether all blocks were written."""
        if self.loop is not None:
            self.loop.close()
        flushed = close_runtime(self.runtime, flush_timeout)
        if self.events is not None:
            self.events.close()
        if self.arena is not None:
            self.arena.close()
        return flushed

    def unbind(self) -> None:
        """Detach the device cache. Its copies have ended or do not arrive, and its tensors can be freed.

        Not with `file_mode` gds, where the staging area is in device memory.
        """
        self.runtime.remove(self.transfer_engine, self.config.write_timeout)
        self.layout.free()

    def bind(self, layout: KVLayout, device: Device) -> Stack:
        """Attach the tiers to another device cache with the same image format, after `unbind`.

        Raises `ConfigError` if they are not.
        """
        if self.host is None:
            raise ConfigError("expected a stack with a host tier, got one with file_mode gds")
        if layout.fingerprint != self.layout.fingerprint:
            raise ConfigError(f"expected a device cache with the former layout ({self.layout}), got {layout}")
        if self.arena is not None:
            device.set_registered_memory(self.arena.in_one_piece)
        engine = TransferEngine(layout, device, self.host)
        with self.runtime.locked() as cache:
            cache.replace_device(layout.num_blocks)
        self.runtime.add(engine)
        return replace(self, layout=layout, transfer_engine=engine)

    def sleep(self, keep: Sequence[str]) -> None:
        """Forget all but what the coldest tiers, those to `keep`, have; give host memory back unless that is kept.

        What host memory alone has is written to files before, if these are kept. After `unbind`, and until `wake`.
        """
        if keep and HOST not in keep and not self.runtime.flush(self.config.write_timeout):
            _log.warning(
                "sleep: some blocks were not written to the file tier within write_timeout (%g s); they are misses "
                "after waking up; raise write_timeout",
                self.config.write_timeout,
            )
        with self.runtime.batch() as cache:
            cache.reset(keep=keep)
        if HOST in keep or self.arena is None:
            return
        if self.runtime.wait_idle(self.config.load_timeout) and self.runtime.fault is None:
            self.arena.give_back()
        else:
            _log.warning(
                "sleep: host memory (%s) stays allocated until the engine wakes up, because copies are in flight",
                format_bytes(self.arena.nbytes),
            )

    def wake(self) -> None:
        """Have host memory again. Raises `TierError` if there is not enough; nothing may use it then."""
        if self.arena is not None and self.arena.is_given_back:
            take_back(self.arena)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _open_store(
    url: str, name: str, *, arena: Arena, image_bytes: tuple[int, ...], scope: bytes, generation: int
) -> RemoteTier | ClusterTier:
    """A store whose namespace is the scope, which identifies the weights: adapters open another stack for others."""
    return open_store(
        url,
        arena=arena,
        image_bytes=image_bytes,
        namespace=scope,
        generation=generation,
        fixed_weights=True,
        name=name,
    )


def open_stack(
    config: Config,
    layout: KVLayout,
    scope: Scope,
    device: Device,
    *,
    open_file_tier: Callable[..., Tier] = FileTier,
    open_gds_tier: Callable[..., Tier] = GdsFileTier,
    open_remote: Sequence[Callable[..., KeyedTier]] = (),
    open_store: Callable[..., KeyedTier] = _open_store,
    groups: Sequence[CacheGroup] = (),
    partial: bool = False,
    staging: StagingSlots | None = None,
) -> Stack:
    """Build the tiers of `config` for chunk images of `layout`.

    `groups` says what the layout does not: which of its groups see a window only, or keep a state. With `partial`, the
    tokens of chunks are kept for partial matches. Without either all of a path must be there.
    `open_file_tier` makes the file tier, with the arguments of `FileTier`, `open_gds_tier` that of mode `gds`, with
    those of `GdsFileTier`: the place for wrappers. `open_remote` makes remote tiers beside the stores of `config`,
    of which the first that has a chunk is read; each is called with `arena`, `image_bytes` (by size class), `scope` and
    `generation` (that of the file tier), and closed with the stack. `open_store` makes those of `config`, from a URL,
    a name, and the same. Where the device keeps no images, `gds` becomes
    `posix` with a host tier of the default size, and the log says so. Raises `ConfigError` when the machine cannot give
    what is asked for, or a tier cannot hold a single image, and `TierError` when the file tier cannot be opened;
    nothing stays behind then.

    With a `staging` there is no host tier: images pass through it on their way between the device and what
    `open_gds_tier` makes. The caller closes its memory, after the stack.
    """
    _check_config(config, layout, staging, has_stores=bool(open_remote or config.remote))
    staging = staging or open_staging(config, layout, device)
    arena = host = file = staging_mover = None
    sizes: tuple[int, ...] = (layout.image_bytes,)
    size_classes: tuple[int, ...] = ()
    with contextlib.ExitStack() as undo:
        if staging is None:
            check_size("host_size", config.host_size, layout.image_bytes)
            sizes, size_classes = by_size([layout.image_bytes_of(group) for group in range(len(layout.groups))])
            slabs = Slabs.within(config.host_size, sizes)
            arena = open_arena(config, slabs.slabs, slabs.slab_bytes, registrar_for(layout.device))
            undo.callback(arena.close)
            host = HostSlabs(arena, slabs)
        if staging is not None or config.file_path is not None:
            file = (open_file_tier if staging is None else open_gds_tier)(
                config.file_path,
                capacity=config.file_size,
                image_bytes=sizes,
                scope=scope.digest,
                threads=config.file_threads,
                **({"arena": arena} if staging is None else {"memory": staging.arena}),
            )
            undo.callback(file.close)
        if arena is not None:
            device.set_registered_memory(arena.in_one_piece)
        slots: Any = host or staging
        engine = TransferEngine(layout, device, slots)
        undo.callback(engine.close)
        movers: list[Mover] = [engine]
        if staging is not None and file is not None:
            movers = [staging_mover := StagingMover(engine, layout, staging, file)]
        elif file is not None:
            movers.append(TierMover(file, slots))
        probers, generation = list[KeyedMover](), 0 if file is None else file.generation
        openers: list[Callable[..., KeyedTier]] = [
            functools.partial(open_store, url, name) for name, url in named_stores(config).items()
        ]
        for opener in (*openers, *open_remote):
            tier = opener(arena=arena, image_bytes=sizes, scope=scope.digest, generation=generation)
            undo.callback(tier.close)
            probers.append(KeyedMover(tier, slots))
        of_groups = {"groups": tuple(groups), "partial": partial, "size_classes": size_classes}
        runtime = _make_runtime(config, layout, scope, host, file, movers, probers, **of_groups)
        undo.callback(runtime.close, 0.0)
        loop = BackgroundLoop(runtime) if config.background else None
        if loop is not None:
            undo.callback(loop.close)
        events = open_recorder(runtime, config, layout.groups[0].block_size * config.blocks_per_chunk)
        stores = tuple(prober.tier for prober in probers)
        undo.pop_all()
    return Stack(config, layout, scope, runtime, engine, host, file, arena, loop, events, stores, staging_mover)


def _check_config(config: Config, layout: KVLayout, staging: StagingSlots | None, *, has_stores: bool) -> None:
    """Raise `ConfigError` where the machine cannot give what is asked for, or settings contradict each other."""
    if staging is None:
        config.check_machine()
    else:
        config.check_files()
    if has_stores and config.file_mode == "gds":
        raise ConfigError("remote tiers need a host tier, which file_mode gds does not have; use file_mode posix")
    if config.serve or config.peer_networks:
        raise ConfigError("serve and peer_networks are for vLLM: other engines neither serve peers nor read from them")
    if has_stores and staging is not None:
        raise ConfigError("remote stores need a host tier, which this engine has of its own; remove remote")
    if config.file_path is not None:
        check_size("file_size", config.file_size, capacity_for(1, layout.image_bytes))


def _make_runtime(
    config: Config,
    layout: KVLayout,
    scope: Scope,
    host: HostSlabs | None,
    file: Tier | None,
    movers: Sequence[Mover],
    probers: Sequence[KeyedMover],
    **of_groups: Any,
) -> Runtime:
    cache = make_cache(
        config,
        None if host is None else host.slabs,
        file,
        remote=[prober.tier.name for prober in probers],
        ranks=layout.ranks,
        events=kept_events(config),
        max_writes=config.max_writes,
        device_blocks=layout.num_blocks,
        self_test_key=scope.self_test_key,
        **of_groups,
    )
    tokens = layout.groups[0].block_size * config.blocks_per_chunk
    chunk = (tokens, layout.image_bytes) if len(layout.groups) == 1 else None  # chunks of several groups differ
    return make_runtime(config, cache, file, movers, probers, chunk)


def make_runtime(
    config: Config,
    cache: TieredCache,
    file: Tier | None,
    movers: Sequence[Mover],
    probers: Sequence[KeyedMover],
    chunk: tuple[int, int] | None,
) -> Runtime:
    """The loop over `cache`. `chunk`: tokens and bytes of a chunk, for the gate; without it there is no gate."""
    stores = [prober.tier for prober in probers]
    tiers, gate = [*([] if file is None else [file]), *stores], None
    if tiers and chunk is not None and config.gate:
        names = [*(level.name for level in cache.stats()), *(tier.name for tier in stores)]
        gate = RecomputeGate(names, *chunk, prefill_speed=config.prefill_speed)
    return Runtime(cache, [*movers, *probers], tiers, probers=probers, gate=gate)


def close_runtime(runtime: Runtime, flush_timeout: float = 30.0) -> bool:
    """Write back and close; returns whether all blocks were written, and logs it if they were not."""
    if runtime.close(flush_timeout):
        return True
    if runtime.pid != os.getpid():  # a forked process: the lock may be held by a thread that it does not have
        return False
    with runtime.locked() as cache:
        colder = [tier.name for tier in cache.stats() if tier.name != HOST] + list(runtime.remote_tiers)
    reason = f"waited {flush_timeout:g} s" if runtime.fault is None else "the control plane has failed"
    what = "tiers closed while copies were in flight"
    if colder:
        what = f"tiers closed before all blocks were written to {' and '.join(colder)}"
    advice = ": allow more time to shut down, or set backup to write_through" if runtime.fault is None else ""
    loss = f"; blocks not written are misses after a restart{advice}" if colder else ""
    _log.warning("%s (%s)%s", what, reason, loss)
    return False


def named_stores(config: Config) -> dict[str, str]:
    """The URLs of the stores that `config` names, by the names of their tiers: remote, remote-2, ..."""
    return {REMOTE if at == 1 else f"{REMOTE}-{at}": url for at, url in enumerate(config.remote, 1)}


def adopt_found(cache: TieredCache, file: Tier) -> None:
    """Have `cache` adopt the records that a file tier recovered at start, and log their number."""
    found, other_scope_slots = file.recover(), file.other_scope_slots()
    adopted = cache.adopt(FILE, found, other_scope_slots)
    skipped = len(found) - adopted
    _log.info("file tier: recovered %d of %d chunk images", adopted, len(found))
    if skipped:
        _log.info("file tier: %d records skipped: their image size is not that of their slab or parent", skipped)
    if other_scope_slots:
        _log.warning(
            "file tier: %d records belong to other models, weights or settings; they are overwritten when no empty "
            "slot is left; `longshore gc DIRECTORY` lists and removes them",
            len(other_scope_slots),
        )


def make_cache(
    config: Config,
    host: Slabs | None,
    file: Tier | None,
    *,
    remote: Sequence[str] = (),
    policy: type[EvictionPolicy] | None = None,
    **of_engine: Any,
) -> TieredCache:
    """The control plane over a host tier of these slots, over `file`, and beside `remote` tiers.

    It has the settings of `config`, and the `CacheSettings` of its engine. `policy` takes the place of the eviction
    policy of `config`. What `file` recovered at its start is adopted.
    """
    policy = policy or POLICIES[config.eviction]
    tiers = [] if host is None else [TierSpec(HOST, host, policy=policy)]
    if file is not None:
        tiers.append(TierSpec(FILE, file.slabs, policy=policy, outlives=True))
    daily, rule = config.file_daily_writes, config.offload if host is None else config.backup
    write_rules = {FILE: WriteRule(rule, config.threshold, daily / 86_400)} if file is not None and daily else {}
    for name, url in named_stores(config).items() if remote else ():
        write_rules[name] = WriteRule(_WRITES[parse_url(url).write])
    urls = [*config.remote, *([config.peer_url] if PEERS in remote else [])]
    slowest = max((parse_url(url).probe_timeout for url in urls), default=0.0)
    stores: dict[str, Any] = {"probe_timeout": slowest + _ANSWER_SECONDS} if urls else {}
    settings = CacheSettings(
        write_rules=write_rules,
        blocks_per_chunk=config.blocks_per_chunk,
        offload=config.offload,
        backup=config.backup,
        threshold=config.threshold,
        admission=config.admission,
        is_served=bool(config.serve),
        prompt_only=config.prompt_only,
        priority_floor=config.priority_floor,
        prefetch=config.prefetch,
        prefetch_timeout=config.prefetch_timeout,
        load_timeout=config.load_timeout,
        write_timeout=config.write_timeout,
        remote_events=config.kv_events_remote,
        read_only=(PEERS,),
        **stores,
        **of_engine,
    )
    cache = TieredCache(tiers, settings, remote=remote, generation=file.generation if file is not None else 0)
    if file is not None:
        adopt_found(cache, file)
    return cache


def check_size(setting: str, size: int, least: int) -> None:
    """Raise `ConfigError` if `size` bytes are less than the `least` bytes of an image."""
    if size < least:
        raise ConfigError(
            f"{setting} is {format_bytes(size)}, but one chunk image of this model needs {format_bytes(least)}: "
            "raise it, or lower blocks_per_chunk"
        )
