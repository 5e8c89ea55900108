"""What vLLM is told with `--kv-transfer-config`. Needs no vLLM."""

from __future__ import annotations

from collections.abc import Mapping


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
