"""The scope of what vLLM's blocks mean, and whether they mean anything to a later process."""

from __future__ import annotations

import json
import os
from typing import Any

from longshore.engines.vllm.meeting import Note
from longshore.keys import Scope

_ALIKE_EVERYWHERE = ("sha256", "sha256_cbor")
"""Hashes that begin alike in each process; others do only where PYTHONHASHSEED is set."""


def why_transient(note: Note) -> str:
    """Why no later process may be served what this one stores, and what to do about it; empty where it may."""
    hashing = note.model.hashing
    if not note.model.transient and hashing not in _ALIKE_EVERYWHERE and _seed() is None:
        return f"{hashing} begins differently in each process; set PYTHONHASHSEED, or choose sha256"
    return note.model.transient


def scope_of(config: Any, note: Note, salt: str) -> Scope:
    """What must be equal for two engines' blocks under equal keys to be equal; `config` is an `OffloadingConfig`."""
    import torch  # noqa: PLC0415 - vLLM has it
    import vllm  # noqa: PLC0415

    return Scope(
        model=note.model.config,
        weights=note.model.weights,
        dtype=config.model.dtype,
        layout=note.fingerprint,
        block_size=config.groups[0].tokens_per_block,
        blocks_per_chunk=config.cache.blocks_per_chunk,
        group=json.dumps(note.model.groups),
        ranks=config.parallel.world_size,
        attention=f"vLLM {vllm.__version__}, torch {torch.__version__}, {note.device}, {config.kv_cache_layout}",
        salt=salt,
        hash_algorithm=f"{note.model.hashing} of {config.cache.tokens_per_hash} tokens, seed {_seed()}, paths",
    )


def _seed() -> str | None:
    """What vLLM's hashes begin with, in the process that makes them: the scheduler's."""
    return os.environ.get("PYTHONHASHSEED")
