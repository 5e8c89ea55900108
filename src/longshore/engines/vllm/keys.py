"""vLLM's keys and ours.

    theirs   hash of the last block of a chunk (16 or 32 bytes) ┊ number of the KV cache group (4 bytes)
    ours     the last 32 bytes of it, filled up with zeros at the end: what begins with digests is spread well

So groups have keys of their own. Of a request with a LoRA adapter, ours are SHA-256 of the adapter's digest and vLLM's
key. The scope stands in the records of tiers that outlive the process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from longshore.boundary import Key

_KEY_BYTES = 32
GROUP_BYTES = 4
"""The end of vLLM's keys."""


def ours(theirs: Iterable[bytes], adapter: bytes = b"") -> list[Key]:
    """Our keys of chunks; `adapter` is the digest of the adapter that they were computed with, if there was one."""
    if adapter:
        return [hashlib.sha256(adapter + key).digest() for key in theirs]
    return [key[-_KEY_BYTES:] if len(key) >= _KEY_BYTES else key.ljust(_KEY_BYTES, b"\0") for key in theirs]
