"""What vLLM is told with `--kv-transfer-config`. Needs no vLLM."""

from __future__ import annotations

from collections.abc import Mapping

from longshore.cache import WritePolicy
from longshore.errors import ConfigError

INSTEAD = {
    "prompt_only": "set vLLM's own offload_prompt_only in kv_connector_extra_config",
    "prefetch": "lookups wait for at most load_timeout",
    "prefetch_timeout": "lookups wait for at most load_timeout",
    "background": "blocks are always moved in a thread",
    "host_shared": "host memory is always shared",
    "events_path": "vLLM publishes events itself (--kv-events-config)",
    "events_size": "vLLM publishes events itself (--kv-events-config)",
}
"""Settings that would have no effect here, and what there is instead."""


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
            "offload = 'write_back': vLLM offers blocks once they are complete, and not when it evicts them"
        )
    if ours.get("file_mode", "posix") != "posix":
        raise ConfigError(f"file_mode = {ours['file_mode']!r} is not served under vLLM: expected 'posix'")
