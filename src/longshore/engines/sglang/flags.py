"""Settings under SGLang: read in the engine, and written as the flags of its server. Needs no SGLang."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longshore.cache import WritePolicy
from longshore.config import Config
from longshore.errors import ConfigError

INSTEAD = {
    "host_size": "host memory is SGLang's own, but with remote stores: set --hicache-size or --hicache-ratio",
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
    "fixed_weights": "every change of weights in a running engine begins another namespace",
    "reset_keep": "flush_cache of SGLang leaves storage as it is",
    "sleep_keep": "SGLang does not tell a storage back end that it sleeps",
    "calibration": "nothing is copied to or from a GPU",
    "kv_events": "SGLang publishes events itself (--kv-events-config)",
    "kv_events_replay": "set replay_endpoint in SGLang's --kv-events-config",
    "kv_events_topic": "set topic in SGLang's --kv-events-config",
    "kv_events_remote": "SGLang passes no events from a storage back end to routers",
    "serve": "peers are served under vLLM: name a store in remote",
    "peer_networks": "requests name peers under vLLM: name a store in remote",
    "peer_url": "requests name peers under vLLM: name a store in remote",
}
"""Settings without effect under SGLang, and the alternative to each."""

THEIRS = frozenset({"backend_name", "module_path", "class_name", "interface_v1", "allocator", "file_storage_path"})
"""Keys of the extra configuration that SGLang reads itself, of those that it passes on."""

PREFIX_KEYS = "hicache_storage_pass_prefix_keys"

_OF_SGLANG: Mapping[str, tuple[type, ...]] = {
    "prefetch_threshold": (int,),
    "prefetch_timeout_base": (int, float),
    "prefetch_timeout_per_ki_token": (int, float),
    "allocator": (str,),
}
"""Keys of the extra configuration that may be set beside ours, and their types."""

_LEAST = {"prefetch_threshold": 1, "prefetch_timeout_base": 0, "prefetch_timeout_per_ki_token": 0}
"""The least values of these, which SGLang does not check."""

_ALLOCATORS = ("default", "shm")
"""What SGLang tells apart with a back end of ours: any other text is its default, too."""

_BACKEND = {
    "backend_name": "longshore",
    "module_path": "longshore.engines.sglang.storage",
    "class_name": "LongshoreStorage",
    "interface_v1": 1,
    PREFIX_KEYS: True,
}


def check_settings(ours: Mapping[str, object]) -> None:
    """Raise `ConfigError` for a setting of Longshore that has no effect under SGLang, or is not served there."""
    for key in ours.keys() & INSTEAD.keys() - ({"host_size"} if ours.get("remote") else set()):
        raise ConfigError(f"{key!r} has no effect under SGLang: {INSTEAD[key]}")
    if ours.get("offload") == WritePolicy.BACK.value:
        raise ConfigError(
            "offload = 'write_back' is not served under SGLang, which does not say which page of host memory it is "
            "about to evict: remove the setting"
        )
    if ours.get("file_mode", "posix") != "posix":
        raise ConfigError(f"file_mode = {ours['file_mode']!r} is not served under SGLang: expected 'posix'")
    if ours.get("file_path") is None and not ours.get("remote"):
        raise ConfigError("expected file_path and file_size, or remote: SGLang has host memory itself")


def check_theirs(theirs: Mapping[str, object]) -> None:
    """Raise `ConfigError` for a key that SGLang does not know in its extra configuration, or that is not to be set."""
    for key, value in theirs.items():
        if key in Config.model_fields:
            raise ConfigError(f"{key!r} is a setting of Longshore: use --set {key}={json.dumps(value)}")
        if key in _BACKEND:
            raise ConfigError(f"{key!r} is set already, to {json.dumps(_BACKEND[key])}: remove it")
        if key not in _OF_SGLANG:
            close = difflib.get_close_matches(key, _OF_SGLANG, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"expected one of {', '.join(_OF_SGLANG)}"
            raise ConfigError(f"{key!r} is no key of SGLang's extra configuration; {hint}")
        if not isinstance(value, _OF_SGLANG[key]) or isinstance(value, bool):
            kind = {int: "a whole number", float: "a number", str: "text"}[_OF_SGLANG[key][-1]]
            raise ConfigError(f"{key} = {value!r}: expected {kind}")
        if isinstance(value, str):
            if value not in _ALLOCATORS:
                raise ConfigError(f"{key} = {value!r}: expected {' or '.join(map(repr, _ALLOCATORS))}")
        elif isinstance(value, int | float) and not _LEAST[key] <= value < math.inf:
            kind = "a whole number" if _OF_SGLANG[key] == (int,) else "a finite number"
            raise ConfigError(f"{key} = {value!r}: expected {kind}, {_LEAST[key]} or more")


def read(extra: Mapping[str, Any], replica: str, replicas: int) -> Config:
    """Our part of SGLang's extra configuration, for one of so many `replicas` of a rank, each with its own directory.

    Sizes are totals over all of them. Raises `ConfigError` for a key that nobody knows, and for one without effect.
    """
    ours = {key: value for key, value in extra.items() if key not in THEIRS}
    check_settings(ours)
    config = Config.make(**ours)
    if config.file_path is not None:
        ours["file_path"], ours["file_size"] = config.file_path / replica, config.file_size // replicas
    if config.remote:
        ours["host_size"] = config.host_size // replicas
    if config.events_path is not None and replicas > 1:
        ours["events_path"] = config.events_path.with_name(f"{config.events_path.name}.{replica}")
    if config.control and replicas > 1:
        name = Path(config.control)
        ours["control"] = str(name.with_stem(f"{name.stem}-{replica}"))
    return Config.make(**ours)


def of_pool(config: Config, name: str, share: float) -> Config:
    """`config` for one of several host pools: its share of the files, in a directory of its own if it has a `name`."""
    if not name and share == 1:
        return config
    if config.file_path is None:
        raise ConfigError("expected file_path and file_size for a model with several host pools")
    update: dict[str, object] = {"file_size": int(config.file_size * share)}
    if name:
        update["file_path"] = config.file_path.with_name(f"{config.file_path.name}-{name}")
        if config.events_path is not None:
            update["events_path"] = config.events_path.with_name(f"{config.events_path.name}.{name}")
    return config.model_copy(update=update)


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
