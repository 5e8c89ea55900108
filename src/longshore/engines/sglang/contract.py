"""What this adapter relies on inside SGLang, and a check that it is still there."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Mapping

from longshore.errors import ContractError, EngineError

_VERSIONS = ("0.5.23",)
"""Those that are served, from the oldest to the newest."""

SUPPORTED = f"sglang {' or '.join(_VERSIONS)}"

_STORAGE = "sglang.srt.mem_cache.hicache_storage"
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater"
UPDATES = (
    *("update_weights_from_disk", "update_weights_from_tensor", "load_weights_from_distributed"),
    *("update_weights_from_ipc", "begin_weight_update", "end_weight_update"),
)
"""Methods of SGLang's `WeightUpdater` between which, and in which, weights change."""

_PARAMETERS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    _STORAGE: {
        "HiCacheStorage.register_mem_pool_host": ("self", "mem_pool_host"),
        "HiCacheStorage.register_mem_host_pool_v2": ("self", "host_pool", "host_pool_name"),
        "HiCacheStorage.batch_exists": ("self", "keys", "extra_info"),
        "HiCacheStorage.batch_get_v1": ("self", "keys", "host_indices", "extra_info"),
        "HiCacheStorage.batch_set_v1": ("self", "keys", "host_indices", "extra_info"),
        "HiCacheStorage.on_host_pools_registered": ("self",),
        "HiCacheStorage.batch_exists_v2": ("self", "keys", "pool_transfers", "extra_info"),
        "HiCacheStorage.batch_get_v2": ("self", "transfers", "extra_info"),
        "HiCacheStorage.batch_set_v2": ("self", "transfers", "extra_info"),
        "HiCacheStorage.clear": ("self",),
        "HiCacheStorage.get_stats": ("self",),
    },
    _UPDATER: {f"WeightUpdater.{name}": ("self",) for name in UPDATES},
    "sglang.srt.managers.cache_controller": {
        "HiCacheController.reset": ("self",),
        "HiCacheController._stop_storage_threads": ("self",),
    },
    "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller": {
        "HybridCacheController._storage_hit_query": ("self", "operation"),
    },
    "sglang.srt.mem_cache.utils": {"get_hash_str": ("token_ids", "prior_hash", "page_size")},
    "sglang.srt.mem_cache.pool_host.base": {"HostKVCache.alloc": ("self", "need_size")},
    "sglang.srt.mem_cache.pool_host.mha": {"MHATokenToKVPoolHost.get_page_buffer_meta": ("self", "indices")},
    "sglang.srt.runtime_context": {"RuntimeContext.resolved_server_args_dict": ("self",)},
    "sglang.srt.configs.model_config": {"ModelConfig.from_server_args": ("server_args",)},
}
_FIELDS: Mapping[str, tuple[str, ...]] = {
    "HiCacheStorageConfig": (
        *("tp_rank", "tp_size", "pp_size", "attn_cp_size", "is_mla_model", "dcp_size", "should_split_heads"),
        *("dp_rank", "enable_storage_metrics", "extra_config"),
    ),
    "HiCacheStorageExtraInfo": ("prefix_keys",),
    "PoolTransfer": ("name", "host_indices", "keys", "hit_policy"),
    "PoolTransferResult": ("kv_hit_pages", "extra_pool_hit_pages", "restorable_prefix_pages"),
}


def check() -> None:
    """Raise `ContractError` unless this is an SGLang that the adapter knows; `EngineError` without any."""
    try:
        import sglang  # noqa: PLC0415 - a probe
    except ImportError as error:
        raise EngineError(f"{error}; the adapter needs {SUPPORTED}") from error
    if sglang.__version__ not in _VERSIONS:
        raise ContractError(f"expected {SUPPORTED}, got {sglang.__version__}")
    if wrong := violations():
        raise ContractError(f"SGLang {sglang.__version__} has changed what Longshore uses: {'; '.join(wrong)}")


def violations() -> list[str]:
    """What differs from what is relied on, in plain words."""
    found = []
    for module, functions in _PARAMETERS.items():
        try:
            names = vars(importlib.import_module(module))
        except ModuleNotFoundError as error:
            found.append(f"expected {', '.join(f'{path}{named}' for path, named in functions.items())}, got {error}")
            continue
        for path, expected in functions.items():
            owner, _, method = path.partition(".")
            function = getattr(names.get(owner), method, None) if method else names.get(owner)
            got = tuple(inspect.signature(function).parameters) if callable(function) else ()
            if got[: len(expected)] != expected:
                found.append(f"expected {path}{expected}, got {got or 'nothing'}")
    names = vars(sys.modules.get(_STORAGE, object))
    for owner, fields in _FIELDS.items():
        known = getattr(names.get(owner), "__dataclass_fields__", {})
        missing = [field for field in fields if field not in known]
        if missing:
            found.append(f"expected {owner} to have {', '.join(missing)}")
    return found
