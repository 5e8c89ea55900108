"""The scope of a model that vLLM serves: its configuration and weights, as they lie in its directory.

Weights are known by the names and sizes of their files and a digest of each file's header, which lists every tensor.
What cannot be found out, cannot be shared with a later process: then nothing outlives this one.
"""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

from longshore.engines.vllm.meeting import Note
from longshore.keys import Scope

_LONGEST_HEADER = 100 << 20
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_SMALL = ("config.json", "generation_config.json", "quantize_config.json", "hf_quant_config.json")


def scope_of(config: Any, note: Note, salt: str) -> Scope | None:
    """What must be equal for two engines' blocks under equal keys to be equal; `None` where that cannot be known.

    `config` is an `OffloadingConfig`.
    """
    directory = Path(config.model.name)
    if not directory.joinpath("config.json").is_file():
        return None
    import torch  # noqa: PLC0415 - vLLM has it
    import vllm  # noqa: PLC0415

    return Scope(
        model=_digest_of_files(directory, _SMALL),
        weights=_weights(directory),
        dtype=config.model.dtype,
        layout=note.fingerprint,
        block_size=config.groups[0].tokens_per_block,
        blocks_per_chunk=config.cache.blocks_per_chunk,
        group=json.dumps([[group.tokens_per_block, group.layer_names] for group in config.groups]),
        ranks=config.parallel.world_size,
        attention=f"vLLM {vllm.__version__}, torch {torch.__version__}, {note.device}, {config.kv_cache_layout}",
        salt=salt,
        hash_algorithm=_hashing(config.cache.tokens_per_hash),
    )


def is_seed_random() -> bool:
    """Whether equal tokens have other hashes in the next process."""
    from vllm.v1.core import kv_cache_utils  # noqa: PLC0415

    seed = getattr(kv_cache_utils, "get_none_hash_seed", lambda: "")()
    default = getattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED", "")
    import os  # noqa: PLC0415

    return bool(seed != default and os.environ.get("PYTHONHASHSEED") is None)


def _hashing(tokens_per_hash: int) -> str:
    from vllm.v1.core import kv_cache_utils  # noqa: PLC0415

    root = getattr(kv_cache_utils, "NONE_HASH", b"")
    return f"vLLM's block hashes of {tokens_per_hash} tokens from {bytes(root).hex()}"


def _digest_of_files(directory: Path, names: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for name in names:
        path = directory / name
        if path.is_file():
            digest.update(f"{name}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _weights(directory: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted({path for pattern in _WEIGHTS for path in directory.glob(pattern)}):
        status = path.stat()
        digest.update(f"{path.name} {status.st_size} ".encode() + _header(path))
    return digest.hexdigest()


def _header(path: Path) -> bytes:
    """The header of a safetensors file; of any other, its first and last bytes and when it was changed."""
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if path.suffix == ".safetensors" and length <= _LONGEST_HEADER:
            return hashlib.sha256(file.read(length)).digest() + _ends(path)
    return _ends(path) + str(path.stat().st_mtime_ns).encode()


def _ends(path: Path, size: int = 1 << 16) -> bytes:
    with path.open("rb") as file:
        first = file.read(size)
        file.seek(max(0, path.stat().st_size - size))
        return hashlib.sha256(first + file.read(size)).digest()
