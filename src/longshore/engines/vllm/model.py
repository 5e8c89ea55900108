"""`Model`: what a worker knows of the model, and the scheduler's side must know too. The note carries it there.

vLLM tells an offloading spec the name of the model and, of each group, its layers and the tokens of a block. What else
decides a block's bytes, and how far back a group looks, stands in `VllmConfig`, at hand where workers are made.

What cannot be found out cannot be shared with a later process: then `transient` says why, and what to do about it.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LONGEST_HEADER = 100 << 20
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_VOLATILE = frozenset({"_name_or_path", "transformers_version", "_commit_hash"})
_OF_MODEL = ("dtype", "quantization", "max_model_len", "disable_sliding_window", "model_impl")
_OF_CACHE = (
    *("cache_dtype", "kv_cache_dtype_skip_layers"),
    *("mamba_cache_dtype", "mamba_ssm_cache_dtype", "mamba_cache_mode", "mamba_block_size"),
)


@dataclass(frozen=True, slots=True)
class Model:
    """The model of one engine.

    Attributes:
        config: Digest of the configuration as it is in force: overrides, dtypes and quantisation included.
        weights: Digest of the files of its weights: names, sizes, headers and ends; those of a draft model, too.
        groups: What vLLM says of each KV cache group.
        windows: How many tokens each group looks back: `None` for all, 1 for a state.
        hashing: How tokens become hashes.
        transient: Why blocks cannot outlive the process; empty where they can.
    """

    config: str = ""
    weights: str = ""
    groups: tuple[str, ...] = ()
    windows: tuple[int | None, ...] = ()
    hashing: str = ""
    transient: str = ""

    @classmethod
    def told(cls, fields: dict[str, Any]) -> Model:
        """The model that `dataclasses.asdict` made `fields` of, by way of JSON."""
        return cls(**{**fields, "groups": tuple(fields["groups"]), "windows": tuple(fields["windows"])})


def nodes() -> int:
    """How many machines the workers of one replica are on, as far as this process knows."""
    from vllm.config import get_current_vllm_config_or_none  # noqa: PLC0415 - only workers have one

    vllm = get_current_vllm_config_or_none()
    return 1 if vllm is None else int(vllm.parallel_config.nnodes_within_dp)


def are_together() -> bool:
    """Whether the ranks of this replica share memory; Ray may have put them on several machines. All ask at once."""
    from vllm.distributed.parallel_state import (  # noqa: PLC0415 - only workers have groups
        get_tp_group,
        in_the_same_node_as,
        model_parallel_is_initialized,
    )

    return not model_parallel_is_initialized() or all(in_the_same_node_as(get_tp_group().cpu_group))


def is_killed_at_once() -> bool:
    """Whether vLLM kills its engine a few seconds after it was told to stop, as far as this process knows."""
    from vllm.config import get_current_vllm_config_or_none  # noqa: PLC0415 - only workers have one

    vllm = get_current_vllm_config_or_none()
    return vllm is not None and vllm.shutdown_timeout == 0


def describe(groups: Sequence[Any], salt: str) -> Model:
    """The model whose worker is being made in this process; `groups` are those of an `OffloadingConfig`."""
    from vllm.config import get_current_vllm_config_or_none  # noqa: PLC0415 - only workers have one

    vllm = get_current_vllm_config_or_none()
    if vllm is None:
        return Model(windows=(None,) * len(groups), transient="vLLM has not told its configuration")
    layers = [_layers(vllm, group.layer_names) for group in groups]
    drafts = getattr(vllm.speculative_config, "draft_model_config", None)
    models = [vllm.model_config, *([] if drafts is None else [drafts])]
    directories = [_directory(model, vllm.load_config.download_dir) for model in models]
    return Model(
        config=_digest([_effective(model) for model in models], _fields(vllm.cache_config, _OF_CACHE)),
        weights=_digest([None if each is None else _weights(each) for each in directories]),
        groups=tuple(_group(group, each, vllm) for group, each in zip(groups, layers, strict=True)),
        windows=tuple(_window([layer.get_kv_cache_spec(vllm) for layer in each]) for each in layers),
        hashing=vllm.cache_config.prefix_caching_hash_algo,
        transient=_transient(vllm, models, directories, salt),
    )


def _transient(vllm: Any, models: Sequence[Any], directories: Sequence[Path | None], salt: str) -> str:
    """Why the blocks of this engine mean nothing to a later one, if so."""
    if vllm.load_config.load_format == "dummy":
        return "weights of load_format dummy come from no file"
    for model, directory in zip(models, directories, strict=True):
        if directory is None or not _files(directory):
            return f"the weights of {model.model} lie in no directory of this machine; download them first"
    if getattr(vllm.cache_config, "calculate_kv_scales", False):
        return "scales of the KV cache are computed at run time; turn calculate_kv_scales off"
    if vllm.lora_config is not None and not salt:
        return "adapters are known by their names alone; set salt to a text that changes when one of them does"
    return ""


def _layers(vllm: Any, names: Sequence[str]) -> list[Any]:
    known = vllm.compilation_config.static_forward_context
    return [known[name] for name in names if name in known]


def _group(group: Any, layers: Sequence[Any], vllm: Any) -> str:
    """Tokens of a block; of each layer the name, what vLLM says of its cache, and the code that fills it."""
    each = [f"{layer.get_kv_cache_spec(vllm)} by {layer.get_attn_backend().__name__}" for layer in layers]
    return f"{group.tokens_per_block} tokens, {list(group.layer_names)}, {each}"


def _window(specs: Sequence[Any]) -> int | None:
    """How many tokens back all of these layers look, if that is one number."""
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
    config = {key: value for key, value in model.hf_config.to_dict().items() if key not in _VOLATILE}
    return {"config": config, **_fields(model, _OF_MODEL)}


def _fields(of: Any, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(of, name, None) for name in names}


def _digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _directory(model: Any, downloads: str | None) -> Path | None:
    """Where the files of a model lie: its name, or the snapshot of its revision that was downloaded."""
    if Path(model.model).is_dir():
        return Path(model.model)
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - vLLM has it

    try:
        return Path(snapshot_download(model.model, revision=model.revision, cache_dir=downloads, local_files_only=True))
    except (OSError, ValueError):  # not there; or no name of a model at all
        return None


def _files(directory: Path) -> list[Path]:
    return sorted({path for pattern in _WEIGHTS for path in directory.glob(pattern)})


def _weights(directory: Path) -> list[str]:
    return [f"{path.name} {path.stat().st_size} {_header(path)}" for path in _files(directory)]


def _header(path: Path) -> str:
    """Digest of the header of a safetensors file, which lists every tensor, and of the ends of any file.

    Of other files also when they were changed.
    """
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if path.suffix == ".safetensors" and length <= _LONGEST_HEADER:
            return hashlib.sha256(file.read(length)).hexdigest() + _ends(path)
    return f"{_ends(path)} {path.stat().st_mtime_ns}"


def _ends(path: Path, size: int = 1 << 16) -> str:
    with path.open("rb") as file:
        first = file.read(size)
        file.seek(max(0, path.stat().st_size - size))
        return hashlib.sha256(first + file.read(size)).hexdigest()
