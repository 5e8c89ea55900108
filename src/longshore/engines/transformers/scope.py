"""The scope of a transformers model's KV cache: configuration, weights and code, as they are in memory.

Weights are hashed whole, where they lie, not by file names and sizes: a fine-tuned copy of the same shape in the same
place must never be served another's blocks. On the CPU by xxh3, the quickest there; on an accelerator by mix64, a sum
of words that are each mixed with their place. Both change with any single bit, and when bytes change places. Addresses
and `_version` are not looked at: `p.data.add_()` changes neither, and equal bytes have equal blocks wherever they lie.

Code is digested (digest.py) as it is in force: class and hooks of every module, and their attributes, replaced
functions included. Where something of it is opaque, as an open file in a hook's closure is, the scope is private to
this process: blocks are found as long as it runs, and never by another.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import sys
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import masking_utils, modeling_utils

from longshore.engines.tensors import content, pack
from longshore.engines.transformers.digest import Digester
from longshore.keys import Scope
from longshore.layout import KVLayout

_VOLATILE = frozenset({"_name_or_path", "transformers_version", "architectures", "_commit_hash"})
_TOKEN = secrets.token_hex(16)
_log = logging.getLogger(__name__)
_told: set[str] = set()


class ModelScope:
    """The scope of one model's KV cache, looked at anew with each call; with `fixed`, weights and code only once."""

    def __init__(self, model: Any, salt: str, *, fixed: bool = False) -> None:
        self._model = model
        self._salt = salt
        self._fixed = fixed
        self._seen: tuple[str, str] | None = None

    def of(self, layout: KVLayout) -> Scope:
        """What must be equal for two models' blocks under equal tokens to be equal."""
        model, group = self._model, layout.groups[0]
        if self._seen is None or not self._fixed:
            self._seen = weights_digest(model), code_digest(model)
        weights, code = self._seen
        return Scope(
            model=config_digest(model.config),
            weights=weights,
            dtype=str(model.dtype),
            layout=layout.fingerprint,
            block_size=group.block_size,
            blocks_per_chunk=group.blocks_per_chunk,
            group=group.name,
            ranks=layout.ranks,
            attention=f"{_computed_by(model)}, code {code}",
            salt=self._salt,
        )


def config_digest(config: Any) -> str:
    """Digest of the effective configuration: rope, quantisation and all, but not where it was loaded from."""
    effective = {key: value for key, value in config.to_dict().items() if key not in _VOLATILE}
    return hashlib.sha256(json.dumps(effective, sort_keys=True, default=str).encode()).hexdigest()


def weights_digest(model: Any) -> str:
    """Digest of every parameter and buffer: name, dtype, shape and bytes."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return _told_if_private(Digester(content, {}), lambda digester: digester.attributes(tensors, "model"))


def code_digest(model: Any) -> str:
    """Digest of the code that computes the cache: every module's class, hooks and attributes, and what these refer to.

    Of attention and masks the functions that are in force; the hooks of all modules, too.
    """
    modules = {module: name for name, module in model.named_modules()}
    kinds = {getattr(getattr(module, "config", None), "_attn_implementation", None) for module in modules}
    registries = modeling_utils.ALL_ATTENTION_FUNCTIONS, masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    in_force = {
        f"{type(registry).__name__}[{kind}]": registry.get(kind, None)
        for registry in registries
        for kind in kinds
        if isinstance(kind, str)
    }

    def look(digester: Digester) -> bytes:
        parts = [digester.attributes(in_force, "transformers")]
        parts.append(digester.hooks(vars(torch.nn.modules.module), "_global", "torch.nn.Module"))
        return pack(*parts, *(digester.module(module, f"model.{name}") for module, name in modules.items()))

    return _told_if_private(Digester(content, modules), look)


def _told_if_private(digester: Digester, look: Callable[[Digester], bytes]) -> str:
    """What `look` finds. If some of it is opaque, that is said once, and the digest is one of this process."""
    found = look(digester).hex()
    if not digester.opaque:
        return found
    for path in sorted(set(digester.opaque) - _told):
        _told.add(path)
        _log.warning(
            "%s cannot be digested: KV blocks of this model are found until this process ends, not after a restart; "
            "keep such state in plain values, tensors or attributes, or remove what holds it",
            path,
        )
    return f"{found} in process {_TOKEN} {os.getpid()}"


def _computed_by(model: Any) -> str:
    """The code and the kind of device that compute the bytes, and how exactly: their numerics differ."""
    kind, matmul = model.device.type, torch.backends.cuda.matmul
    numerics = (
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None,
        (matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction),
        torch.backends.cudnn.allow_tf32,
        torch.backends.mkldnn.enabled,
    )
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    python = f"python {sys.version_info.major}.{sys.version_info.minor}"
    return f"{model.config._attn_implementation} on {kind}, {versions}, {python}, numerics {numerics}"
