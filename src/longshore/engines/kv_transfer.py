"""The connector's configuration: written for `--kv-transfer-config`, checked, and read in the engine. Needs no vLLM."""

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


def kv_transfer(extra: Mapping[str, object], *, report_failures: bool = True) -> dict[str, object]:
    """The configuration of the connector, with `extra` settings of ours and of vLLM's offloading connector.

    With `report_failures` requests whose blocks cannot be loaded are computed; else the engine stops.
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


THEIRS = frozenset(
    {
        *("spec_name", "spec_module_path", "block_size", "blocks_per_chunk", "offload_prompt_only"),
        *("self_describing_kv_events", "canonical_layout"),
    }
)
"""Keys that vLLM reads itself."""


def read(extra: Mapping[str, Any], blocks_per_chunk: int, replica: int = 0, replicas: int = 1) -> Config:
    """Our part of the extra configuration; replicas of data-parallel engines get a sub-directory each.

    Raises `ConfigError` for a key that nobody knows, with the nearest one that somebody does; for one that would have
    no effect; and for `file_mode` gds, which goes from a worker's device to a file: here files are the scheduler's.
    """
    ours = {key: value for key, value in extra.items() if key not in THEIRS}
    check_settings(ours)
    config = Config.make(**{**ours, "blocks_per_chunk": blocks_per_chunk, "host_shared": True})
    if replicas > 1 and config.file_path is not None:
        return Config.make(**{**config.model_dump(), "file_path": config.file_path / f"replica-{replica}"})
    return config


def refuse(parallel: Any, nodes: int) -> None:
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
