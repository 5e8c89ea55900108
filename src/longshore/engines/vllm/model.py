"""The identity of a model: its configuration, the bytes of its weights, its scope; and why it may have none.

vLLM gives an offloading spec the name of the model and, of each group, its layers and the tokens of a block. What else
determines a block's bytes, and the length of windows, is in `VllmConfig`, which workers have. Rank 0 publishes a
`ModelIdentity` made of it (rendezvous.py), from which the scheduler makes the scope. If a later process could not tell
stored blocks apart, `why_not_persistent` says why and what to do about it; `weight_files` hashes files of weights.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longshore.config import Config
from longshore.engines.weight_files import MEMO, UNNAMED, model_path, process_began, settings_digest, weights_digest
from longshore.errors import EngineError
from longshore.keys import Scope

_FROM_FILES = frozenset(
    {
        *("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "pt", "sharded_state"),
        *("bitsandbytes", "gguf", "runai_streamer", "runai_streamer_sharded"),
    }
)
"""Values of `load_format` with which weights come from the files in the model's directory, and from nowhere else."""

_OF_MODEL = (
    *("dtype", "quantization", "quantization_config", "max_model_len", "disable_sliding_window"),
    *("model_impl", "model_class_overrides", "code_revision"),
)
_OF_IMAGES = (
    *("mm_processor_kwargs", "media_io_kwargs", "mm_device_do_normalize", "language_model_only"),
    *("mm_encoder_attn_backend", "mm_encoder_attn_dtype", "video_pruning_rate", "video_pruning_method"),
)
_OF_ATTENTION = (
    *("use_non_causal", "use_prefill_query_quantization", "disable_flashinfer_q_quantization"),
    *("indexer_kv_dtype", "indexer_sparse_logits"),
)
_OF_ADAPTERS = (
    *("lora_dtype", "target_modules", "enable_tower_connector_lora"),
    *("enable_moe_shared_loras", "enable_mixed_moe_lora_format"),
)
_FITTED = -1
"""Given as `max_model_len`: vLLM sets it to what there is memory for, after the model was loaded."""

_OF_CACHE = (
    *("cache_dtype", "kv_cache_dtype_skip_layers"),
    *("mamba_cache_dtype", "mamba_ssm_cache_dtype", "mamba_cache_mode", "mamba_block_size"),
)


_OF_LOADING = ("load_format", "ignore_patterns", "model_loader_extra_config")
"""These choose the files that are loaded, out of all that are hashed."""


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """The model of one engine.

    Attributes:
        config: Digest of the configuration as it is in force: overrides, dtypes and quantisation included.
        weights: Digest of all bytes of the weight files, a draft model's included; empty if blocks are not persistent.
        groups: What vLLM says of each KV cache group.
        windows: How many tokens each group looks back: `None` for all, 1 for a state.
        hashing: How tokens become hashes.
        why_not_persistent: Why no later process may load blocks of this one; empty if one may.
        base_is_mixed: Whether vLLM may compute tokens of the base model with an adapter.
    """

    config: str = ""
    weights: str = ""
    groups: tuple[str, ...] = ()
    windows: tuple[int | None, ...] = ()
    hashing: str = ""
    why_not_persistent: str = ""
    base_is_mixed: bool = False

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> ModelIdentity:
        """The model that `dataclasses.asdict` made `fields` of, by way of JSON."""
        return cls(**{**fields, "groups": tuple(fields["groups"]), "windows": tuple(fields["windows"])})


def vllm_config() -> Any:
    """vLLM's whole configuration, where workers are made; `None` elsewhere."""
    from vllm.config import get_current_vllm_config_or_none  # noqa: PLC0415

    return get_current_vllm_config_or_none()


def instance_id() -> str:
    """What vLLM calls this instance of an engine, in its workers: all ranks of it the same; empty if nothing."""
    return str(getattr(vllm_config(), "instance_id", ""))


def nodes() -> int:
    """How many machines the workers of one replica are on, as far as this process knows."""
    vllm = vllm_config()
    return 1 if vllm is None else int(vllm.parallel_config.nnodes_within_dp)


def ranks_share_memory() -> bool:
    """Whether the ranks of this replica share memory; Ray may have put them on several machines. All ask at once."""
    from vllm.distributed.parallel_state import (  # noqa: PLC0415 - only workers have groups
        get_tp_group,
        in_the_same_node_as,
        model_parallel_is_initialized,
    )

    return not model_parallel_is_initialized() or all(in_the_same_node_as(get_tp_group().cpu_group))


def has_no_shutdown_timeout() -> bool:
    """Whether vLLM kills its engine a few seconds after the request to stop, as far as this process knows."""
    vllm = vllm_config()
    return vllm is not None and vllm.shutdown_timeout == 0


def memo_directory(config: Config) -> Path | None:
    """Where the memo of digests is: with the files, or in the user's cache; `None` where no tier needs digests."""
    if config.file_path is not None or not config.shares:
        return config.file_path
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "longshore"


def model_identity(groups: Sequence[Any], memo: Path | None) -> ModelIdentity:
    """The model whose worker is being made in this process; `groups` are those of an `OffloadingConfig`.

    Its weights are hashed if there is a directory for the `memo` of digests; else there is nothing to be identified.
    """
    vllm = vllm_config()
    if vllm is None:
        return ModelIdentity(windows=(None,) * len(groups), why_not_persistent="vLLM gives no configuration here")
    layers = [_layers(vllm, group.layer_names) for group in groups]
    drafts = getattr(vllm.speculative_config, "draft_model_config", None)
    models = [vllm.model_config, *([] if drafts is None else [drafts])]
    paths = [_path(model, vllm.load_config.download_dir) for model in models]
    why_not_persistent, weights = _reason_not_persistent(vllm, models, paths), ""
    if memo is not None and not why_not_persistent:
        try:
            files, scales = ([path for path in each if path is not None] for each in (paths, [_encoder_scales(vllm)]))
            weights = weights_digest(files, _loading_began(vllm), memo / MEMO, scales)
        except (EngineError, OSError) as error:
            why_not_persistent = f"weights cannot be identified: {error}"
    return ModelIdentity(
        config=settings_digest(
            [_effective(model) for model in models],
            _fields(vllm.cache_config, _OF_CACHE),
            _fields(getattr(vllm, "attention_config", None), _OF_ATTENTION),
            _fields(vllm.lora_config, _OF_ADAPTERS),
            [_fields(each, _OF_LOADING) for each in (vllm.load_config, _drafts_loaded_by(vllm))],
        ),
        weights=weights,
        groups=tuple(_group(group, each, vllm) for group, each in zip(groups, layers, strict=True)),
        windows=tuple(_window([layer.get_kv_cache_spec(vllm) for layer in each]) for each in layers),
        hashing=vllm.cache_config.prefix_caching_hash_algo,
        why_not_persistent=why_not_persistent,
        base_is_mixed=vllm.lora_config is not None and applies_to_base_model(),
    )


def _encoder_scales(vllm: Any) -> Path | None:
    """The file with the scales of the attention over images, if one is given; its bytes count, as those of weights."""
    given = getattr(getattr(vllm.model_config, "multimodal_config", None), "mm_encoder_fp8_scale_path", None)
    return Path(given) if given else None


def _drafts_loaded_by(vllm: Any) -> Any:
    return getattr(vllm.speculative_config, "draft_load_config", None)


def applies_to_base_model() -> bool:
    """Whether this vLLM's CPU kernels compute base-model tokens with the last adapter, in steps with an adapter's."""
    import torch  # noqa: PLC0415 - vLLM has it
    from vllm.lora.ops.torch_ops import bgmv_expand  # noqa: PLC0415
    from vllm.platforms import current_platform  # noqa: PLC0415

    if not current_platform.is_cpu():
        return False
    output = torch.zeros(1, 1)
    bgmv_expand(torch.ones(1, 1), torch.ones(1, 1, 1), output, torch.tensor([-1]), add_inputs=True)
    return bool(output.any())


def _reason_not_persistent(vllm: Any, models: Sequence[Any], paths: Sequence[Path | None]) -> str:
    """Why a later engine cannot use the blocks of this one; empty if it can."""
    load_format = vllm.load_config.load_format
    if load_format not in _FROM_FILES:
        return f"weights of load_format {load_format} come from no file of the model's directory; choose another"
    for model, path in zip(models, paths, strict=True):
        if getattr(model, "model_weights", ""):
            return f"the weights of {model.model} are streamed from {model.model_weights}; download them first"
        if path is None:
            return f"the weights of {model.model} lie in no directory of this machine; download them first"
    if getattr(vllm.cache_config, "calculate_kv_scales", False):
        return "scales of the KV cache are computed at run time; turn calculate_kv_scales off"
    images = getattr(vllm.model_config, "multimodal_config", None)
    if images is not None and not images.mm_processor_cache_gb and not vllm.cache_config.enable_prefix_caching:
        return (
            "vLLM hashes no images, but numbers them anew in each process, without enable_prefix_caching and "
            "mm_processor_cache_gb; turn one of them on"
        )
    if vllm.lora_config is not None and not _connector_names_adapters(vllm):
        return "vLLM's plain OffloadingConnector does not tell which adapter a request has; use LongshoreConnector"
    return ""


def _loading_began(vllm: Any) -> int:
    """When no weights of this engine had been loaded yet, as late as is known; in nanoseconds, like `time.time_ns`.

    That is when its configuration was made, which vLLM writes into it, or when this process began, as all ranks meet
    before they load.
    """
    made = re.match(r"\d{19}(?!\d)", getattr(vllm, "instance_id", ""))
    return max(process_began(), int(made[0]) if made is not None else 0)


def _connector_names_adapters(vllm: Any) -> bool:
    transfer = getattr(vllm, "kv_transfer_config", None)
    return getattr(transfer, "kv_connector_module_path", None) == "longshore.engines.vllm.connector"


def _layers(vllm: Any, names: Sequence[str]) -> list[Any]:
    known = vllm.compilation_config.static_forward_context
    return [known[name] for name in names if name in known]


def _group(group: Any, layers: Sequence[Any], vllm: Any) -> str:
    """Tokens of a block; of each layer the name, what vLLM says of its cache, and the code that fills it."""
    each = [f"{layer.get_kv_cache_spec(vllm)} by {layer.get_attn_backend().__name__}" for layer in layers]
    return f"{group.tokens_per_block} tokens, {list(group.layer_names)}, {each}"


def _window(specs: Sequence[Any]) -> int | None:
    """The window of these layers in tokens, if all have the same one."""
    found = {_looks_back(spec) for spec in specs}
    return found.pop() if len(found) == 1 else None


def _looks_back(spec: Any) -> int | None:
    from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, MambaSpec, SlidingWindowSpec  # noqa: PLC0415

    if isinstance(spec, SlidingWindowSpec):
        return int(max(spec.sliding_window, spec.sliding_window - 1 + spec.extra_retained_tokens))
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return int(spec.attention_chunk_size)
    return 1 if isinstance(spec, MambaSpec) else None


def _effective(model: Any) -> dict[str, Any]:
    config = {key: value for key, value in model.hf_config.to_dict().items() if key not in UNNAMED}
    from vllm import envs  # noqa: PLC0415

    multimodal = getattr(model, "multimodal_config", None)
    images = _fields(multimodal, _OF_IMAGES)
    if multimodal is not None:
        images["video_backend"] = envs.VLLM_VIDEO_LOADER_BACKEND
    fields = _fields(model, _OF_MODEL)
    if getattr(model, "original_max_model_len", None) == _FITTED:
        fields["max_model_len"] = _FITTED  # its rope is made for all the model can do, then memory cuts the length
    return {"config": config, **images, **fields}


def _fields(of: Any, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(of, name, None) for name in names}


def _path(model: Any, downloads: str | None) -> Path | None:
    """Where the files of a model lie; `None` where there are no weights of it on this machine."""
    from vllm import envs  # noqa: PLC0415

    if envs.VLLM_USE_MODELSCOPE and not Path(model.model).exists():  # it has directories of its own
        return None
    with contextlib.suppress(EngineError):
        return model_path(model.model, model.revision, downloads)
    return None


_UNSEEDED_HASHES = ("sha256", "sha256_cbor")
"""Hashes that begin alike in each process; others do only where PYTHONHASHSEED is set."""


def reason_not_persistent(model: ModelIdentity) -> str:
    """Why no later process may be served what this one stores, and what to do about it; empty where it may."""
    hashing = model.hashing
    if not model.why_not_persistent and hashing not in _UNSEEDED_HASHES and _seed() is None:
        return f"{hashing} begins differently in each process; set PYTHONHASHSEED, or choose sha256"
    return model.why_not_persistent


def scope_of(config: Any, model: ModelIdentity, layout: str, device: str, salt: str) -> Scope:
    """What must be equal for two engines' blocks under equal keys to be equal; `config` is an `OffloadingConfig`."""
    import torch  # noqa: PLC0415 - vLLM has it
    import vllm  # noqa: PLC0415

    return Scope(
        model=model.config,
        weights=model.weights,
        dtype=config.model.dtype,
        layout=layout,
        block_size=config.groups[0].tokens_per_block,
        blocks_per_chunk=config.cache.blocks_per_chunk,
        group=json.dumps(model.groups),
        ranks=config.parallel.world_size,
        attention=f"vLLM {vllm.__version__}, torch {torch.__version__}, {device}, {config.kv_cache_layout}",
        salt=salt,
        hash_algorithm=f"{model.hashing} of {config.cache.tokens_per_hash} tokens, seed {_seed()}, paths",
    )


def _seed() -> str | None:
    """What vLLM's hashes begin with, in the process that makes them: the scheduler's."""
    return os.environ.get("PYTHONHASHSEED")
