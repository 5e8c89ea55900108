"""Keys: what a chunk's bytes are called, in every tier and every process.

    key[0] = SHA-256(root   || tokens of chunk 0)
    key[i] = SHA-256(key[i-1] || tokens of chunk i)          tokens packed as little-endian uint32

`root` is the digest of a `Scope`: everything that must be equal for the bytes to mean the same. Two chains meet only
if all their tokens so far, and their scopes, are equal. This is a persistent format: tests hold golden vectors.
"""

from __future__ import annotations

import hashlib
import json
import sys
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from longshore.boundary import Key
from longshore.errors import TokenError

KEY_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What must be equal for the bytes under equal tokens to be equal.

    Attributes:
        model: Digest of the effective model configuration.
        weights: Digest of the weights.
        dtype: Of the KV cache, e.g. `"torch.bfloat16"`.
        layout: Fingerprint of the `KVLayout`, quantisation scales included.
        block_size: Tokens per block.
        blocks_per_chunk: Blocks per chunk.
        group: KV cache group.
        ranks: How many ranks share one block image.
        attention: The implementation that computed the bytes (numerics differ between them).
        lora: Adapter identity, empty without one.
        salt: Set by tenants who must not share.
        hash_algorithm: How tokens became keys.
    """

    model: str
    weights: str
    dtype: str
    layout: str
    block_size: int
    blocks_per_chunk: int = 1
    group: str = ""
    ranks: int = 1
    attention: str = ""
    lora: str = ""
    salt: str = ""
    hash_algorithm: str = "sha256-le32"

    @property
    def root(self) -> Key:
        """The parent of every first chunk: 32 bytes."""
        canonical = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(b"longshore scope 1\0" + canonical.encode()).digest()


class KeyChain:
    """Keys of one growing sequence of tokens; only whole chunks have a key.

    Args:
        root: 32 bytes, from `Scope.root`.
        chunk_tokens: Tokens per chunk (`block_size * blocks_per_chunk`).
    """

    __slots__ = ("_pending", "_tip", "chunk_bytes", "keys")

    def __init__(self, root: Key, chunk_tokens: int) -> None:
        if not isinstance(root, bytes) or len(root) != KEY_BYTES:
            raise TokenError(f"a root has {KEY_BYTES} bytes, got {root!r}")
        if chunk_tokens < 1:
            raise TokenError(f"a chunk has at least one token, got chunk_tokens={chunk_tokens}")
        self.chunk_bytes = 4 * chunk_tokens
        self.keys: list[Key] = []
        self._tip = root
        self._pending = b""

    def extend(self, tokens: Sequence[int] | npt.NDArray[np.integer]) -> list[Key]:
        """Append tokens (each in `[0, 2**32)`); returns the keys of the chunks that they completed."""
        data = self._pending + pack(tokens)
        whole = len(data) - len(data) % self.chunk_bytes
        tip, step, sha256 = self._tip, self.chunk_bytes, hashlib.sha256
        fresh: list[Key] = []
        for start in range(0, whole, step):
            tip = sha256(tip + data[start : start + step]).digest()
            fresh.append(tip)
        self._tip, self._pending = tip, data[whole:]
        self.keys += fresh
        return fresh


def chain(root: Key, tokens: Sequence[int] | npt.NDArray[np.integer], chunk_tokens: int) -> list[Key]:
    """Keys of all whole chunks of `tokens`. Raises `TokenError` for ids outside `[0, 2**32)`."""
    return KeyChain(root, chunk_tokens).extend(tokens)


def pack(tokens: Sequence[int] | npt.NDArray[np.integer]) -> bytes:
    """Token ids as little-endian uint32. Raises `TokenError` for what does not fit."""
    if isinstance(tokens, np.ndarray):
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise TokenError(f"tokens are a vector of integers, got shape {tokens.shape} of {tokens.dtype}")
        if tokens.size and (int(tokens.min()) < 0 or int(tokens.max()) >= 2**32):
            raise TokenError(f"token ids lie in [0, 2**32), got {int(tokens.min())} to {int(tokens.max())}")
        return tokens.astype("<u4").tobytes()
    if isinstance(tokens, (bytes, bytearray, str)):  # `array` would take bytes for machine words
        raise TokenError(f"tokens are a sequence of integers, got {type(tokens).__name__}")
    try:
        packed = array("I", tokens)
    except (OverflowError, TypeError) as error:
        raise TokenError(f"token ids are integers in [0, 2**32): {error}") from error
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()
