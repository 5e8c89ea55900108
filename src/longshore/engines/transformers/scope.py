"""The scope of a transformers model's KV cache: configuration and weights, as they are in memory.

Weights are hashed whole (xxh3, at memory speed), not by file names and sizes: a fine-tuned copy of the same shape in
the same place must never be served another's blocks.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import xxhash

from longshore.keys import Scope
from longshore.layout import KVLayout

if TYPE_CHECKING:
    import torch

_VOLATILE = frozenset({"_name_or_path", "transformers_version", "architectures", "_commit_hash"})
_ADAPTER_FIELDS = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")
_PIECE = 64 << 20


def model_scope(model: Any, layout: KVLayout, *, salt: str) -> Scope:
    """What must be equal for two models' blocks under equal tokens to be equal."""
    group = layout.groups[0]
    return Scope(
        model=config_digest(model.config),
        weights=weights_digest(model),
        dtype=str(model.dtype),
        layout=layout.fingerprint,
        block_size=group.block_size,
        blocks_per_chunk=group.blocks_per_chunk,
        group=group.name,
        ranks=layout.ranks,
        attention=_computed_by(model),
        lora=adapters_digest(model),
        salt=salt,
    )


def adapters_digest(model: Any) -> str:
    """Which adapters are in force, and how strongly: all that they add to the weights but their weights."""
    state = [
        (name, [repr(getattr(module, field, None)) for field in _ADAPTER_FIELDS])
        for name, module in model.named_modules()
        if hasattr(module, "base_layer")
    ]
    return hashlib.sha256(json.dumps(state).encode()).hexdigest() if state else ""


def _computed_by(model: Any) -> str:
    """The code and the kind of device that compute the bytes: their numerics differ."""
    import torch  # noqa: PLC0415 - the model's owner has it
    import transformers  # noqa: PLC0415

    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return f"{model.config._attn_implementation} on {model.device.type}, {versions}"


def config_digest(config: Any) -> str:
    """Digest of the effective configuration: rope, quantisation and all, but not where it was loaded from."""
    effective = {key: value for key, value in config.to_dict().items() if key not in _VOLATILE}
    return hashlib.sha256(json.dumps(effective, sort_keys=True, default=str).encode()).hexdigest()


def weights_digest(model: Any) -> str:
    """Digest of every parameter and buffer: name, dtype, shape and bytes."""
    digest = hashlib.sha256()
    for name, tensor in sorted({**dict(model.named_parameters()), **dict(model.named_buffers())}.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(_content(tensor.detach()).encode())
    return digest.hexdigest()


def _content(tensor: torch.Tensor) -> str:
    import torch  # noqa: PLC0415 - the model's owner has it

    flat = tensor.contiguous().view(-1).view(torch.uint8)
    state = xxhash.xxh3_128()
    for start in range(0, flat.numel(), _PIECE):
        state.update(flat[start : start + _PIECE].cpu().numpy().data)
    return str(state.hexdigest())
