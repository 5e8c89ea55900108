"""The scheduler's side of the tiers: the control plane over the arena that the workers made, and the file tier.

TieredCache ── Runtime ── TierMover ── HostedFileTier ══ tier host, a process that reads and writes files
                              └─────── HostTier over the shared arena        (device <-> host is the workers' work)
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from typing import Any

from longshore.boundary import FILE, HOST, Mover
from longshore.cache import CacheGroup, CacheSettings, Gate, TieredCache, TierSpec, WriteRule
from longshore.config import Config
from longshore.engines.vllm.meeting import Note, attach
from longshore.keys import Scope
from longshore.runtime.background import BackgroundLoop
from longshore.runtime.loop import Runtime
from longshore.runtime.stamps import Stamps
from longshore.runtime.tier_host import HostedFileTier
from longshore.runtime.tier_mover import TierMover
from longshore.runtime.weighing import Weighing
from longshore.tiers.arena import Arena
from longshore.tiers.base import Tier
from longshore.tiers.host import HostTier

_log = logging.getLogger(__name__)

_EVER = 1 << 40
"""Tokens of a window that never slides. vLLM keeps parents on the device, or drops them there: chunks stand alone."""

_MAX_WRITES = 1 << 14
"""Chunks in flight to a tier, unless the configuration says otherwise: vLLM offers long prompts whole, and but once."""


@dataclass(frozen=True, slots=True)
class Store:
    """What `open_store` built.

    Attributes:
        file: The file tier, if there is one.
        windows: How many chunks the window of each group has; `None` for those that never slide.
    """

    runtime: Runtime
    stamps: Stamps
    arena: Arena
    loop: BackgroundLoop
    file: HostedFileTier | None
    windows: tuple[int | None, ...]

    def close(self) -> None:
        """Write back what a restart would lose, and give everything back. Idempotent."""
        self.loop.close()
        if not self.runtime.close():
            _log.warning("closed before all blocks were written to the file tier")
        self.stamps.close()
        self.arena.close()


def open_store(config: Config, note: Note, scope: Scope | None, groups: Any, *, events: int = 0) -> Store:
    """The tiers of `config` in the memory that `note` tells of; without a `scope` there is no file tier.

    The cache keeps so many `events` until somebody asks for them.
    """
    with contextlib.ExitStack() as undo:
        arena, stamps = attach(note)
        undo.callback(arena.close)
        undo.callback(stamps.close)
        host = HostTier(arena, note.layout)
        file: HostedFileTier | None = None
        if config.file_path is not None and scope is not None:
            file = HostedFileTier(
                config.file_path,
                capacity=config.file_size,
                image_bytes=note.image_bytes,
                arena=arena,
                scope=scope.root,
                threads=config.file_threads,
                fixed_weights=config.fixed_weights,
            )
            undo.callback(file.close)
        cache = _make_cache(config, note, host, file, groups, events)
        movers: list[Mover] = [] if file is None else [TierMover(file, host)]
        sizes = [group.tokens_per_block * config.blocks_per_chunk for group in groups]
        weighing = _make_weighing(config, note, sizes[0]) if config.gate and file is not None else None
        runtime = Runtime(cache, movers, [] if file is None else [file], weighing=weighing)
        loop = BackgroundLoop(runtime)
        undo.pop_all()
    windows = tuple(window and -(-window // size) for window, size in zip(note.model.windows, sizes, strict=True))
    return Store(runtime, stamps, arena, loop, file, windows)


def _make_weighing(config: Config, note: Note, tokens: int) -> Weighing:
    """A gate for chunks of so many tokens, which stand for those of all groups."""
    of_all_groups = sum(note.image_bytes[pool] for pool in note.pools)
    return Weighing(Gate([HOST, FILE], tokens, of_all_groups), config.prefill_speed)


def _budget(config: Config, file: Tier | None) -> dict[str, WriteRule]:
    """How much may be written to the file tier."""
    if file is None or not config.file_daily_writes:
        return {}
    return {FILE: WriteRule(config.backup, config.threshold, config.file_daily_writes / 86_400)}


def _make_cache(config: Config, note: Note, host: HostTier, file: Tier | None, groups: Any, events: int) -> TieredCache:
    tiers = [TierSpec(HOST, host.slabs)]
    if file is not None:
        tiers.append(TierSpec(FILE, file.slabs, outlives=True))
    settings = CacheSettings(
        blocks_per_chunk=config.blocks_per_chunk,
        events=events,
        offload=config.offload,
        backup=config.backup,
        threshold=config.threshold,
        into=_budget(config, file),
        load_timeout=config.load_timeout,
        write_timeout=config.write_timeout,
        max_writes=config.max_writes if "max_writes" in config.model_fields_set else _MAX_WRITES,
        groups=tuple(
            CacheGroup(block_size=group.tokens_per_block, window=window or _EVER)
            for group, window in zip(groups, note.model.windows, strict=True)
        ),
        pools=note.pools,
    )
    cache = TieredCache(tiers, settings, generation=0 if file is None else file.generation)
    if file is not None:
        found = file.recover()
        adopted = cache.adopt(FILE, found)
        _log.info("file tier: %d block images found, %d of them reachable", len(found), adopted)
    return cache
