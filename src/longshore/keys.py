"""Keys of chunks, as `PrefixStore` and engines without hashes of their own make them: the same in every process.

    key[0] = SHA-256(root   || tokens of chunk 0)
    key[i] = SHA-256(key[i-1] || tokens of chunk i)          tokens packed as little-endian uint32

A chunk that holds a part of a multimodal item (its tokens are placeholders, the same for every image) appends

    "longshore items 1" NUL, then for each item: offset, start and end (int64, little-endian), 32 bytes of its hash

where `offset` is the position of the chunk's first token in the item, negative if the item begins later, and `start`
and `end` are the range of the chunk's tokens that belong to the item. Chunks without items have no suffix.

`root` is `Scope.digest`, of everything that must be equal for stored bytes to be valid. Two such keys are equal
only if all tokens up to them, and their scopes, are equal. The format is persistent; tests have golden vectors.

Under vLLM and SGLang, keys are the engine's own hashes of tokens, which contain no scope. There, and here as well, the
digest in each record of a file, and in the namespace of a remote store, keeps apart the bytes of different scopes.
"""

from __future__ import annotations

import hashlib
import json
import struct
import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from longshore.boundary import Key
from longshore.errors import TokenError

KEY_BYTES = 32
HASH_ALGORITHM = "sha256-le32"
_ITEMS = b"longshore items 1\0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """Everything that must be equal for equal tokens to have equal bytes.

    Attributes:
        model: Digest of the effective model configuration.
        weights: Digest of the weights.
        dtype: Of the KV cache, e.g. `"torch.bfloat16"`.
        layout: Fingerprint of the `KVLayout`, quantisation scales included.
        block_size: Tokens per block.
        blocks_per_chunk: Blocks per chunk.
        group: KV cache group.
        ranks: How many ranks share one chunk image.
        attention: The implementation that computed the bytes (numerics differ between them).
        lora: Adapter identity, empty without one.
        salt: Separates tenants that must not share blocks.
        hash_algorithm: Algorithm that turns tokens into keys.
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
    hash_algorithm: str = HASH_ALGORITHM

    @property
    def digest(self) -> Key:
        """32 bytes: the key before every first chunk, and the identity of the scope in files and remote stores."""
        canonical = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(b"longshore scope 1\0" + canonical.encode()).digest()

    @property
    def self_test_key(self) -> Key:
        """The chunk that a self-test of the tiers writes and reads: 32 bytes, the key of no tokens."""
        return hashlib.sha256(b"longshore self-test\0" + self.digest).digest()


class MediaItem(NamedTuple):
    """An image or another item behind the placeholder tokens `[start, end)` of a sequence.

    `digest` identifies its content: equal for equal content only, of any length above zero.
    """

    start: int
    end: int
    digest: bytes


def items_in(items: Sequence[MediaItem], begin: int, end: int) -> list[MediaItem]:
    """Those of the ordered `items` that have a token in `[begin, end)`."""
    first = bisect_right(items, begin, key=lambda item: item.end)
    last = bisect_left(items, end, key=lambda item: item.start)
    return list(items[first:last])


class KeyChain:
    """Keys of a growing sequence of tokens; only complete chunks have a key.

    Args:
        root: 32 bytes, from `Scope.digest`.
        chunk_tokens: Tokens per chunk (`block_size * blocks_per_chunk`).
        items: Multimodal items of the sequence, in order, without overlap. An item may end after the last token known
            so far.
    """

    __slots__ = ("_items", "_pending", "_tip", "chunk_bytes", "keys")

    def __init__(self, root: Key, chunk_tokens: int, items: Sequence[MediaItem] = ()) -> None:
        if not isinstance(root, bytes) or len(root) != KEY_BYTES:
            raise TokenError(f"expected a root key of {KEY_BYTES} bytes, got {root!r}")
        if chunk_tokens < 1:
            raise TokenError(f"expected chunk_tokens of at least 1, got {chunk_tokens}")
        for item, following in zip_longest(items, items[1:]):
            if not 0 <= item.start < item.end or not item.digest or (following and following.start < item.end):
                raise TokenError(f"expected items in order, without overlap, each with tokens and a digest; got {item}")
        self.chunk_bytes = 4 * chunk_tokens
        self._items = list(items)
        self.keys: list[Key] = []
        self._tip = root
        self._pending = b""

    def extend(self, tokens: Sequence[int] | npt.NDArray[np.integer]) -> list[Key]:
        """Append tokens (each in `[0, 2**32)`); returns the keys of the chunks they complete."""
        data = self._pending + pack(tokens)
        whole = len(data) - len(data) % self.chunk_bytes
        tip, step, sha256 = self._tip, self.chunk_bytes, hashlib.sha256
        fresh: list[Key] = []
        if self._items:
            fresh = self._with_items(data[:whole])
            tip = fresh[-1] if fresh else tip
        else:
            for start in range(0, whole, step):
                tip = sha256(tip + data[start : start + step]).digest()
                fresh.append(tip)
        self._tip, self._pending = tip, data[whole:]
        self.keys += fresh
        return fresh

    def _with_items(self, data: bytes) -> list[Key]:
        size = self.chunk_bytes // 4
        tip, fresh = self._tip, []
        for i in range(len(data) // self.chunk_bytes):
            begin = (len(self.keys) + i) * size
            extra = b"".join(_packed(item, begin, size) for item in items_in(self._items, begin, begin + size))
            tokens = data[i * self.chunk_bytes : (i + 1) * self.chunk_bytes]
            tip = hashlib.sha256(tip + tokens + (_ITEMS + extra if extra else b"")).digest()
            fresh.append(tip)
        return fresh


def _packed(item: MediaItem, begin: int, size: int) -> bytes:
    """What an item adds to the key of the chunk of `size` tokens at `begin`: which part of it lies where."""
    places = begin - item.start, max(0, item.start - begin), min(size, item.end - begin)
    return struct.pack("<3q", *places) + hashlib.sha256(item.digest).digest()


def chain(
    root: Key, tokens: Sequence[int] | npt.NDArray[np.integer], chunk_tokens: int, items: Sequence[MediaItem] = ()
) -> list[Key]:
    """Keys of all complete chunks of `tokens`. Raises `TokenError` for ids outside `[0, 2**32)`."""
    return KeyChain(root, chunk_tokens, items).extend(tokens)


def pack(tokens: Sequence[int] | npt.NDArray[np.integer]) -> bytes:
    """Token ids as little-endian uint32. Raises `TokenError` for other ids."""
    if isinstance(tokens, np.ndarray):
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise TokenError(f"expected tokens as a vector of integers, got shape {tokens.shape} of {tokens.dtype}")
        if tokens.size and (int(tokens.min()) < 0 or int(tokens.max()) >= 2**32):
            raise TokenError(f"expected token ids in [0, 2**32), got {int(tokens.min())} to {int(tokens.max())}")
        return tokens.astype("<u4").tobytes()
    if isinstance(tokens, (bytes, bytearray, str)):  # `array` would take bytes for machine words
        raise TokenError(f"expected tokens as a sequence of integers, got {type(tokens).__name__}")
    try:
        packed = array("I", tokens)
    except (OverflowError, TypeError) as error:
        raise TokenError(f"expected token ids as integers in [0, 2**32): {error}") from error
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()
