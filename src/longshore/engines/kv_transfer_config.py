"""vLLM's `KVTransferConfig` for Longshore. Needs no vLLM.

`longshore vllm-config` prints it (`kv_transfer_config`). In the engine, `LongshoreSpec` checks and reads its
`kv_connector_extra_config` (`read_extra_config`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longshore.cache import WritePolicy
from longshore.config import Config
from longshore.errors import ConfigError, EngineError

INSTEAD = {
    "prompt_only": "set vLLM's own offload_prompt_only in kv_connector_extra_config",
    "prefetch": "lookups wait for at most load_timeout",
    "prefetch_timeout": "lookups wait for at most load_timeout",
    "background": "blocks are always moved in a thread",
    "host_shared": "host memory is always shared",
    "events_path": "vLLM publishes events itself (--kv-events-config)",
    "events_size": "vLLM publishes events itself (--kv-events-config)",
    "kv_events": "vLLM publishes events itself (--kv-events-config)",
    "kv_events_replay": "set replay_endpoint in vLLM's --kv-events-config",
    "kv_events_topic": "set topic in vLLM's --kv-events-config",
}
"""Settings without effect under vLLM, and the alternative to each."""


def kv_transfer_config(extra: Mapping[str, object], *, report_failures: bool = True) -> dict[str, object]:
    """The value of `--kv-transfer-config`. `extra`: `kv_connector_extra_config`, settings of Longshore and of vLLM.

    With `report_failures` the connector is `LongshoreConnector`, and requests whose blocks cannot be loaded are
    recomputed; else it is vLLM's `OffloadingConnector`, and the engine stops.
    """
    connector: dict[str, object] = {"kv_connector": "OffloadingConnector"}
    if report_failures:
        connector = {
            "kv_connector": "LongshoreConnector",
            "kv_connector_module_path": "longshore.engines.vllm.connector",
            "kv_load_failure_policy": "recompute",
        }
    ours = {"spec_name": "LongshoreSpec", "spec_module_path": "longshore.engines.vllm", **extra}
    return {**connector, "kv_role": "kv_both", "kv_connector_extra_config": ours}


def check_settings(ours: Mapping[str, object]) -> None:
    """Raise `ConfigError` for a setting of Longshore that has no effect in vLLM, or is not served there."""
    for key in ours.keys() & INSTEAD.keys():
        raise ConfigError(f"{key!r} has no effect in vLLM: {INSTEAD[key]}")
    if ours.get("offload") == WritePolicy.BACK.value:
        raise ConfigError(
            "offload = 'write_back' is not served under vLLM, which offers blocks when they are complete, not when it "
            "evicts them: remove the setting"
        )
    if ours.get("file_mode", "posix") != "posix":
        raise ConfigError(f"file_mode = {ours['file_mode']!r} is not served under vLLM: expected 'posix'")


VLLM_SETTINGS = frozenset(
    {
        *("spec_name", "spec_module_path", "block_size", "blocks_per_chunk", "offload_prompt_only"),
        *("self_describing_kv_events", "canonical_layout"),
    }
)
"""Keys of `kv_connector_extra_config` that vLLM reads itself."""


def read_extra_config(extra: Mapping[str, Any], blocks_per_chunk: int, replica: int = 0, replicas: int = 1) -> Config:
    """Longshore's settings in `kv_connector_extra_config`; replicas of data-parallel engines get a sub-directory each.

    Raises `ConfigError` for an unknown key, and names the most similar known one; for a setting without effect under
    vLLM; and for `file_mode` gds: the tier host, which reads and writes files, does not reach the workers' devices.
    """
    ours = {key: value for key, value in extra.items() if key not in VLLM_SETTINGS}
    check_settings(ours)
    config = Config.make(**{**ours, "blocks_per_chunk": blocks_per_chunk, "host_shared": True})
    if replicas > 1 and config.file_path is not None:
        return Config.make(**{**config.model_dump(), "file_path": config.file_path / f"replica-{replica}"})
    return config


def check_parallelism(parallel: Any, nodes: int) -> None:
    """Raise `EngineError` for engines that are not served; `nodes` is the number of nodes of a replica's workers."""
    served = {"pp_size": "pipeline", "pcp_size": "prefill context", "dcp_size": "decode context"}
    for field, name in served.items():
        if getattr(parallel, field) > 1:
            raise EngineError(f"{name} parallel engines are not served, got {field}={getattr(parallel, field)}")
    if parallel.world_size != parallel.tp_size:
        raise EngineError(f"expected tensor parallel ranks only (world_size = tp_size), got {parallel}")
    if nodes > 1:
        raise EngineError(
            f"ranks on several nodes are not served, because ranks share host memory: expected 1 node, got {nodes}"
        )
