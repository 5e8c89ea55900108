"""Settings under SGLang: read in the engine, and written as the flags of its server. Needs no SGLang."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from longshore.cache import WritePolicy
from longshore.config import Config
from longshore.errors import ConfigError

INSTEAD = {
    "host_size": "host memory is SGLang's own: set --hicache-size or --hicache-ratio",
    "host_numa": "host memory is SGLang's own",
    "host_huge_pages": "host memory is SGLang's own: set SGLANG_HUGEPAGE_SIZE",
    "host_shared": "host memory is SGLang's own",
    "backup": "what SGLang copies to host memory is offered to the file tier: set offload, or --hicache-write-policy",
    "prompt_only": "SGLang does not tell prompts from answers",
    "request_hints": "SGLang passes no hints of requests to a storage back end",
    "priority_floor": "SGLang passes no priorities to a storage back end",
    "prefetch": "set --hicache-storage-prefetch-policy",
    "prefetch_timeout": "set prefetch_timeout_base and prefetch_timeout_per_ki_token of SGLang's extra configuration",
    "blocks_per_chunk": "SGLang asks page by page: set --page-size",
    "background": "pages are always moved in a thread",
    "fixed_weights": "nothing is stored or read any more once weights have changed in a running engine",
    "reset_keep": "flush_cache of SGLang leaves storage as it is",
    "sleep_keep": "SGLang does not tell a storage back end that it sleeps",
    "calibration": "nothing is copied to or from a GPU",
}
"""Settings without effect under SGLang, and the alternative to each."""

THEIRS = frozenset({"backend_name", "module_path", "class_name", "interface_v1", "allocator", "file_storage_path"})
"""Keys of the extra configuration that SGLang reads itself, of those that it passes on."""

PREFIX_KEYS = "hicache_storage_pass_prefix_keys"

_BACKEND = {
    "backend_name": "longshore",
    "module_path": "longshore.engines.sglang.storage",
    "class_name": "LongshoreStorage",
    "interface_v1": 1,
    PREFIX_KEYS: True,
}


def check_settings(ours: Mapping[str, object]) -> None:
    """Raise `ConfigError` for a setting of Longshore that has no effect under SGLang, or is not served there."""
    for key in ours.keys() & INSTEAD.keys():
        raise ConfigError(f"{key!r} has no effect under SGLang: {INSTEAD[key]}")
    if ours.get("offload") == WritePolicy.BACK.value:
        raise ConfigError(
            "offload = 'write_back' is not served under SGLang, which does not say which page of host memory it is "
            "about to evict: remove the setting"
        )
    if ours.get("remote"):
        raise ConfigError("remote is not served under SGLang: remove the setting")
    if ours.get("file_mode", "posix") != "posix":
        raise ConfigError(f"file_mode = {ours['file_mode']!r} is not served under SGLang: expected 'posix'")
    if ours.get("file_path") is None:
        raise ConfigError("expected file_path and file_size: SGLang has host memory itself, files are what is added")


def read(extra: Mapping[str, Any], replica: str, replicas: int) -> Config:
    """Our part of SGLang's extra configuration, for one of so many `replicas` of a rank, each with its own directory.

    Sizes are totals over all of them. Raises `ConfigError` for a key that nobody knows, and for one without effect.
    """
    ours = {key: value for key, value in extra.items() if key not in THEIRS}
    check_settings(ours)
    config = Config.make(**ours)
    if config.file_path is None:
        raise ConfigError("expected file_path")
    ours["file_path"], ours["file_size"] = config.file_path / replica, config.file_size // replicas
    if config.events_path is not None and replicas > 1:
        ours["events_path"] = config.events_path.with_name(f"{config.events_path.name}.{replica}")
    return Config.make(**ours)


def server_flags(ours: Mapping[str, object], theirs: Mapping[str, object]) -> list[str]:
    """Flags of `python -m sglang.launch_server` that turn on its hierarchical cache with this back end.

    `ours` are settings of Longshore, `theirs` those of SGLang's extra configuration.
    """
    extra = json.dumps({**_BACKEND, **theirs, **ours})
    return [
        "--enable-hierarchical-cache",
        *("--hicache-write-policy", "write_through"),
        *("--hicache-storage-backend", "dynamic"),
        *("--hicache-storage-prefetch-policy", "wait_complete"),
        *("--hicache-storage-backend-extra-config", extra),
    ]
