"""The scheduler's side of the tiers: the control plane over the arena that the workers made, and the file tier.

TieredCache ── Runtime ── TierMover ── HostedFileTier ══ tier host, a process that reads and writes files
                              └─────── HostTier over the shared arena        (device <-> host is the workers' work)
"""

from __future__ import annotations

import contextlib
import logging
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longshore.boundary import FILE, HOST, Mover
from longshore.cache import CacheGroup, TieredCache
from longshore.cache.eviction import EvictionPolicy
from longshore.config import Config
from longshore.engines.vllm.meeting import Note, attach
from longshore.engines.vllm.sleeping import Sleeps
from longshore.errors import TierError
from longshore.keys import Scope
from longshore.runtime.loop import BackgroundLoop, Runtime
from longshore.runtime.stack import make_cache as make_tiers
from longshore.runtime.stack import make_gate
from longshore.runtime.stamps import Stamps
from longshore.runtime.tier_host import HostedFileTier
from longshore.tiers.arena import Arena
from longshore.tiers.base import Tier
from longshore.tiers.file.recovery import slabs_within
from longshore.tiers.host import HostTier, TierMover

_log = logging.getLogger(__name__)

_MAX_WRITES = 1 << 14
"""Chunks in flight to a tier, unless the configuration says otherwise: vLLM offers long prompts whole, and but once."""


@dataclass(frozen=True, slots=True)
class TierStore:
    """What `open_store` built.

    Attributes:
        file: The file tier, if there is one.
        base_is_mixed: Whether vLLM may have computed blocks of the base model with an adapter.
        is_off: Whether there is no file tier because its directory could not be opened.
        windows: How many chunks the window of each group has; `None` for those that never slide.
        sleeps: What resets keep.
    """

    runtime: Runtime
    stamps: Stamps
    arena: Arena
    loop: BackgroundLoop
    file: HostedFileTier | None
    windows: tuple[int | None, ...]
    sleeps: Sleeps
    base_is_mixed: bool = False
    is_off: bool = False

    def close(self) -> None:
        """Write back what a restart would lose, and give everything back. Idempotent."""
        self.loop.close()
        if not self.runtime.close():
            _log.warning("closed before all blocks were written to the file tier; those are misses after a restart")
        self.stamps.close()
        self.arena.close()


def open_store(config: Config, note: Note, scope: Scope | None, groups: Any, *, events: int = 0) -> TierStore:
    """The tiers of `config` in the memory that `note` tells of; without a `scope` there is no file tier.

    Nor is there one where its directory cannot be opened: the log says why. The cache keeps so many `events` until
    somebody asks for them. Raises `TierError` where `file_size` has no room for one image.
    """
    with contextlib.ExitStack() as undo:
        arena, stamps = attach(note)
        undo.callback(arena.close)
        undo.callback(stamps.close)
        host = HostTier(arena, note.layout)
        file: HostedFileTier | None = None
        if config.file_path is not None and scope is not None:
            slabs_within(config.file_size, note.image_bytes)
            file = _open_file_tier(config, config.file_path, note, arena, scope)
            if file is not None:
                undo.callback(file.close)
        cache = make_cache(config, note, file, groups, events)
        movers: list[Mover] = [] if file is None else [TierMover(file, host)]
        sizes = [group.tokens_per_block * config.blocks_per_chunk for group in groups]
        of_all_groups = sum(note.image_bytes[pool] for pool in note.pools)
        gate = None if file is None else make_gate(config, [HOST, FILE], sizes[0], of_all_groups)
        runtime = Runtime(cache, movers, [] if file is None else [file], gate=gate)
        loop = BackgroundLoop(runtime)
        undo.pop_all()
    windows = tuple(window and -(-window // size) for window, size in zip(note.model.windows, sizes, strict=True))
    is_off = scope is not None and config.file_path is not None and file is None
    sleeps = Sleeps(runtime, stamps, note.slabs, config)
    return TierStore(runtime, stamps, arena, loop, file, windows, sleeps, note.model.base_is_mixed, is_off)


def _open_file_tier(config: Config, path: Path, note: Note, arena: Arena, scope: Scope) -> HostedFileTier | None:
    """The file tier; nothing where `path` cannot be used as one, which the log says: the engine serves without."""
    try:
        return HostedFileTier(
            path,
            capacity=config.file_size,
            image_bytes=note.image_bytes,
            arena=arena,
            scope=scope.root,
            threads=config.file_threads,
            fixed_weights=config.fixed_weights,
        )
    except TierError as error:
        _log.error(
            "NO FILE TIER: %s. The engine starts with host memory alone. Stop it, then repair the directory if that "
            "can be done (longshore fsck --repair %s), else remove it (rm -r %s; it holds a cache and nothing else), "
            "or correct file_path or file_size, and start again",
            error,
            *2 * (shlex.quote(str(path)),),
        )
        return None


def make_cache(
    config: Config,
    note: Note,
    file: Tier | None,
    groups: Any,
    events: int,
    policy: type[EvictionPolicy] | None = None,
) -> TieredCache:
    """The control plane over host memory as in `note`, and over `file`; `groups` are vLLM's.

    Its tiers have the eviction policy of `config`, or `policy`.
    """
    windows = zip(groups, note.model.windows, strict=True)
    return make_tiers(
        config,
        note.layout,
        file,
        policy=policy,
        events=events,
        max_writes=config.max_writes if "max_writes" in config.model_fields_set else _MAX_WRITES,
        groups=tuple(CacheGroup(block_size=group.tokens_per_block, window=window) for group, window in windows),
        pools=note.pools,
    )
