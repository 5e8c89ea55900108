"""The scope of stored pages, and what SGLang may not be asked to do with them.

SGLang's keys are SHA-256 over tokens and salt alone. Whatever else decides a page's bytes is in the scope: every byte
of the weight files, the model's configuration as it is in force, every setting of the model and of its execution, the
layout of a page, and the rank. Under tensor parallelism all ranks ask for the same keys, and each has other bytes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from longshore.engines.weight_files import UNNAMED, model_path, process_began, settings_digest, weights_digest
from longshore.errors import EngineError
from longshore.keys import Scope
from longshore.layout import KVLayout

_NUMERIC = ("model", "exec", "lora")
"""SGLang's namespaces of settings that may change what a model computes."""

_OTHERWISE = (
    *("model_path", "download_dir", "trust_remote_code", "weight_loader_prefetch_num_threads"),
    *("lora_paths", "max_loaded_loras", "max_loras_per_batch", "lora_eviction_policy", "lora_drain_wait_threshold"),
    *("enable_lora_overlap_loading", "lora_strict_loading"),
    *("engine_info_bootstrap_port", "weight_cache_socket", "weight_cache_timeout", "model_checksum"),
    *("modelopt_export_path", "modelopt_checkpoint_save_path", "mooncake_ib_device", "elastic_ep_scale_timeout"),
    *("sampling_backend", "sampling_mask_max_tokens", "grammar_backend", "disable_outlines_disk_cache"),
    *("enable_custom_logit_processor", "enable_return_hidden_states", "return_hidden_states_mode"),
    *("enable_watermark", "watermark_config", "watermark_key", "watermark_key_b", "watermark_context_window"),
    *("watermark_mixing_probability", "watermark_max_probability", "watermark_default_enabled"),
    *("watermark_enforce_all", "enable_layerwise_nvtx_marker", "enable_profile_cuda_graph"),
)
"""Settings of these without effect on bytes; where weights lie is not what they are, and keys name the adapter. Ports
and devices differ between servers, and how tokens are chosen decides which prompts there are, not their pages."""

_NAME_FILES = ("_path", "_file", "_config")
"""Ends of the names of settings that may name a file or a directory, which then counts by its bytes, too."""

_IS_PATH = "_path"
"""End of the names of those that are a path and nothing else, of weights or scales: if it is read, it must exist."""

_READ_WITH = {"quantization_param_path": ("kv_cache_dtype", "fp8_e4m3")}
"""The setting, and its value, with which alone SGLang reads such a path (`load_kv_cache_scales`)."""

_WITH_NEIGHBOURS = frozenset({"kt_weight_path", "modelopt_checkpoint_restore_path"})
"""Of these, if they are a file, weights beside it count: ktransformers reads the whole directory of a file."""

_FROM_FILES = frozenset({"auto", "safetensors", "fastsafetensors", "pt", "mistral", "gguf", "bitsandbytes"})
"""Values of `load_format` with which weights come from the files in the model's directory, and from nowhere else."""


def settings() -> dict[str, Any]:
    """SGLang's settings as they are in force in this process."""
    from sglang.srt.runtime_context import get_context  # noqa: PLC0415 - SGLang is there where this is called

    told: dict[str, Any] = get_context().resolved_server_args_dict()
    return told


def check_served(storage: Any, told: dict[str, Any]) -> None:
    """Raise `EngineError`, with its name, for what is not served. `storage` is a `HiCacheStorageConfig`."""
    if not (storage.extra_config or {}).get("interface_v1"):
        raise EngineError("expected interface_v1 to be 1: `longshore sglang-config` prints the configuration")
    parallel = {"pp_size": "pipeline", "attn_cp_size": "context", "dcp_size": "decode context"}
    for field, name in parallel.items():
        if getattr(storage, field) > 1:
            raise EngineError(f"{name} parallel engines are not served, got {field}={getattr(storage, field)}")
    if told["dp_size"] > 1:
        raise EngineError(f"data parallel engines are not served, got dp_size={told['dp_size']}: start one for each")
    if storage.is_mla_model and storage.tp_size > 1:
        raise EngineError("one copy for all ranks (MLA) is not served with several of them: expected tp_size=1")
    if storage.should_split_heads:
        raise EngineError("tp_lcm_size is not served: remove it from the extra configuration")
    for key in ("speculative_algorithm", "uno_lora_path", "enable_hisparse"):
        if told.get(key):
            raise EngineError(f"{key} is not served, got {told[key]!r}")
    if told.get("enable_lora") and not storage.extra_config.get("salt"):
        raise EngineError(
            "enable_lora needs the setting salt: SGLang's keys have an adapter's name and path, and not its bytes. "
            "Set it to a text that changes whenever an adapter does"
        )
    if told.get("hicache_host_memory_mode", "cache") != "cache":
        raise EngineError(f"hicache_host_memory_mode is {told['hicache_host_memory_mode']!r}: expected 'cache'")
    if told["disaggregation_mode"] != "null":
        raise EngineError(f"disaggregation_mode is {told['disaggregation_mode']!r}: expected no disaggregation")
    _refuse_weights(told)


def _refuse_weights(told: dict[str, Any]) -> None:
    """Raise `EngineError` for weights that may not be those in the model's files."""
    if told["load_format"] not in _FROM_FILES:
        raise EngineError(f"load_format is {told['load_format']!r}: expected one of {sorted(_FROM_FILES)}")
    if told.get("weight_cache_mode", "off") != "off":
        raise EngineError(
            f"weight_cache_mode is {told['weight_cache_mode']!r}: a daemon gives weights that it has loaded earlier, "
            "and the files may have changed since. Expected 'off'"
        )


def model_config() -> Any:
    """SGLang's `ModelConfig` of the model that this process serves."""
    from sglang.srt.configs.model_config import ModelConfig  # noqa: PLC0415 - SGLang is there where this is called
    from sglang.srt.runtime_context import get_server_args  # noqa: PLC0415

    return ModelConfig.from_server_args(get_server_args())


def check_pool(pool: Any) -> None:
    """Raise `EngineError` for host memory in which pages move, or are shared with other pools."""
    if pool.shared_allocation_domain is not None:
        raise EngineError("host memory that several pools share (enable_unified_memory) is not served")


def scope_of(
    storage: Any, told: dict[str, Any], layout: KVLayout, salt: str, memo: Path | None, pool: str = ""
) -> Scope:
    """What must be equal for two servers' pages under equal keys to be equal.

    `memo`, if there is one, has the digests of weight files that were hashed before. `pool` names a host pool beside
    that of the keys and values. Raises `EngineError` where weights cannot be told apart, or the model is not served.
    """
    import sglang  # noqa: PLC0415

    model = model_config()
    if model.is_multimodal:
        raise EngineError("multimodal models are not served: keys of pages name images by short hashes only")
    config = {key: value for key, value in model.hf_config.to_dict().items() if key not in UNNAMED}
    return Scope(
        model=settings_digest(config, _numeric(told)),
        weights=_weights(told, memo),
        dtype=str(model.dtype),
        layout=layout.fingerprint,
        block_size=layout.groups[0].block_size,
        group=f"rank {storage.tp_rank} of {storage.tp_size}" + (pool and f", pool {pool}"),
        attention=f"SGLang {sglang.__version__}, torch {torch.__version__}, {told['device']}",
        salt=salt,
        hash_algorithm="SGLang's SHA-256 of a page's tokens, chained",
    )


def _weights(told: dict[str, Any], memo: Path | None) -> str:
    """The digest of the model's files, and of those that settings name."""
    paths = [model_path(told["model_path"], told["revision"], told["download_dir"])]
    alone: list[Path] = []
    for name, value in _numeric(told).items():
        if not (name.endswith(_NAME_FILES) and isinstance(value, str) and value):
            continue
        if os.path.exists(value):  # noqa: PTH110 - takes any text
            (paths if name in _WITH_NEIGHBOURS else alone).append(Path(value))
        elif name.endswith(_IS_PATH) and _is_read(name, told):
            raise EngineError(f"{name} is {value}: no such file or directory, so what is loaded cannot be identified")
    return weights_digest(paths, process_began(), memo, alone)


def _is_read(name: str, told: dict[str, Any]) -> bool:
    """Whether SGLang reads the path that this setting has."""
    if name not in _READ_WITH:
        return True
    setting, value = _READ_WITH[name]
    return bool(told.get(setting) == value)


def _numeric(told: dict[str, Any]) -> dict[str, Any]:
    """The settings that may change what a model computes."""
    from sglang.srt.arg_groups.arg_utils import namespace_of  # noqa: PLC0415
    from sglang.srt.server_args import ServerArgs  # noqa: PLC0415

    spaces = namespace_of(ServerArgs)
    names = sorted(name for name, space in spaces.items() if space.partition(".")[0] in _NUMERIC)
    return {name: told.get(name) for name in names if name not in _OTHERWISE}
