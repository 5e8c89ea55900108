"""The connector's extra configuration: what is vLLM's own, and the rest, which is a `longshore.config.Config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longshore.config import Config
from longshore.engines.kv_transfer import check_settings
from longshore.errors import EngineError

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
    """Raise `EngineError` for engines that are not served; a replica's workers are on so many `nodes`."""
    served = {"pp_size": "pipeline", "pcp_size": "prefill context", "dcp_size": "decode context"}
    for field, name in served.items():
        if getattr(parallel, field) > 1:
            raise EngineError(f"{name} parallel engines are not served, got {field}={getattr(parallel, field)}")
    if parallel.world_size != parallel.tp_size:
        raise EngineError(f"expected tensor parallel ranks alone, got {parallel}")
    if nodes > 1:
        raise EngineError(f"ranks on several nodes are not served: they share memory; got {nodes} nodes")
