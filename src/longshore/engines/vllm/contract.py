"""What this adapter relies on inside vLLM, and a check that it is still there.

vLLM's offloading connector loads the class that its settings name, and asks it for a manager (in the scheduler's
process) and a worker (in each worker's). These interfaces are experimental, and change between versions; where one has
moved, `check` says which, and what was expected.
"""

from __future__ import annotations

import inspect
from typing import Any

from longshore.errors import ContractError, EngineError

SUPPORTED = "vllm >= 0.32, < 0.34"

_VERSIONS = ((0, 32), (0, 33))

_PARAMETERS: dict[str, tuple[str, ...]] = {
    "OffloadingManager.lookup": ("self", "key", "req_context"),
    "OffloadingManager.prepare_load": ("self", "keys", "req_context"),
    "OffloadingManager.complete_load": ("self", "keys", "req_context"),
    "OffloadingManager.prepare_store": ("self", "keys", "req_context"),
    "OffloadingManager.complete_store": ("self", "keys", "req_context", "success"),
    "OffloadingManager.on_new_request": ("self", "req_context"),
    "OffloadingManager.on_request_finished": ("self", "req_context"),
    "OffloadingManager.on_schedule_end": ("self", "context"),
    "OffloadingManager.reset_cache": ("self",),
    "ReqContext.get_offload_key_position": ("self", "key"),
    "OffloadingWorker.submit_store": ("self", "job_id", "src_spec", "dst_spec"),
    "OffloadingWorker.get_finished": ("self",),
    "OffloadingWorker.wait": ("self", "job_ids"),
    "OffloadingSpec.__init__": ("self", "config"),
    "OffloadingSpec.get_worker": ("self", "kv_caches"),
}
_FIELDS: dict[str, tuple[str, ...]] = {
    "ReqContext": ("req_id", "_offload_key_positions"),
    "OffloadingConfig": ("groups", "extra_config", "engine_id", "model", "cache", "parallel", "replicated_layout"),
    "OffloadingGroupConfig": ("tokens_per_block", "layer_names", "group_id"),
    "OffloadingCacheConfig": ("tokens_per_hash", "blocks_per_chunk"),
    "OffloadingParallelConfig": (
        *("rank", "world_size", "tp_size", "pp_size", "pcp_size", "dcp_size"),
        *("data_parallel_index", "data_parallel_size"),
    ),
    "CanonicalKVCaches": ("tensors", "group_data_refs"),
    "CanonicalKVCacheTensor": ("tensor", "page_size_bytes"),
    "CanonicalKVCacheRef": ("tensor_idx", "page_size_bytes"),
    "TransferResult": ("job_id", "success", "transfer_size", "transfer_time"),
    "PrepareStoreOutput": ("keys_to_store", "store_spec", "evicted_keys"),
}
_ANSWERS = ("HIT", "HIT_PENDING", "MISS", "RETRY")


def check() -> None:
    """Raise `ContractError` unless this is a vLLM that the adapter knows; `EngineError` without any."""
    try:
        import vllm  # noqa: PLC0415 - a probe
        from vllm.v1.kv_offload import base, config  # noqa: PLC0415
    except ImportError as error:
        raise EngineError(f"{error}; the adapter needs {SUPPORTED}") from error
    version = tuple(int(part) for part in vllm.__version__.split(".")[:2] if part.isdecimal())
    if version not in _VERSIONS:
        raise ContractError(f"expected {SUPPORTED}, got {vllm.__version__}")
    wrong = violations({**vars(config), **vars(base)})
    if wrong:
        raise ContractError(f"vLLM {vllm.__version__} has changed interfaces that Longshore uses: {'; '.join(wrong)}")


def check_has(owner: Any, *names: str) -> None:
    """Raise `ContractError` unless `owner`, a class or an object of vLLM, has all of these attributes."""
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        kind = owner if isinstance(owner, type) else type(owner)
        raise ContractError(
            f"expected {kind.__module__}.{kind.__qualname__} to have {', '.join(missing)}; Longshore works with "
            f"{SUPPORTED}"
        )


def violations(names: dict[str, Any]) -> list[str]:
    """What differs from what is relied on, in plain words; `names` are those of vLLM's two modules."""
    found = []
    for path, expected in _PARAMETERS.items():
        owner, _, method = path.partition(".")
        function = getattr(names.get(owner), method, None)
        got = tuple(inspect.signature(function).parameters) if function is not None else ()
        if got[: len(expected)] != expected:
            found.append(f"expected {path}{expected}, got {got or 'nothing'}")
    for owner, fields in _FIELDS.items():
        known = getattr(names.get(owner), "__dataclass_fields__", {})
        missing = [field for field in fields if field not in known]
        if missing:
            found.append(f"expected {owner} to have {', '.join(missing)}")
    answers = [answer for answer in _ANSWERS if not hasattr(names.get("LookupResult"), answer)]
    if answers:
        found.append(f"expected LookupResult to have {', '.join(answers)}")
    return found
