"""Tokens for a hash id, derived from the id alone.

    digest[c]  = BLAKE2b(id, c as two little-endian uint64; person "longshore.tokens")     64 bytes: 8 words
    token[i]   = FIRST_TOKEN + word[i] mod (vocab_size - FIRST_TOKEN)                      words little-endian

Equal ids give equal tokens in every process, on every platform, under every version of every library; a
longer run begins with the shorter one. Golden vectors in the tests hold this format.
"""

from __future__ import annotations

import hashlib
import math
import struct

from longshore.errors import ConfigError

FIRST_TOKEN = 8
"""Smaller token ids are not used: vocabularies have padding, begin, end and unknown there."""

MIN_VOCAB = 64
"""The smallest supported vocabulary."""

MIN_BLOCK_BITS = 48
"""Least information of a block in bits, so that two ids do not have the same tokens by chance."""

_WORDS = struct.Struct("<8Q")
_INPUT = struct.Struct("<QQ")


def tokens_of(hash_id: int, length: int, vocab_size: int) -> tuple[int, ...]:
    """The first `length` tokens for `hash_id` (0 to 2**64 - 1)."""
    usable = vocab_size - FIRST_TOKEN
    words: list[int] = []
    for counter in range(-(-length // 8)):
        block = _INPUT.pack(hash_id, counter)
        words += _WORDS.unpack(hashlib.blake2b(block, person=b"longshore.tokens").digest())
    return tuple(FIRST_TOKEN + word % usable for word in words[:length])


def check_alphabet(vocab_size: int, block_tokens: int) -> None:
    """Raise `ConfigError` for a vocabulary or a block too small to distinguish ids."""
    if vocab_size < MIN_VOCAB:
        raise ConfigError(f"vocab_size: expected at least {MIN_VOCAB}, got {vocab_size}")
    bits = block_tokens * math.log2(vocab_size - FIRST_TOKEN)
    if bits < MIN_BLOCK_BITS:
        least = math.ceil(MIN_BLOCK_BITS / math.log2(vocab_size - FIRST_TOKEN))
        raise ConfigError(
            f"block_tokens: expected at least {least} with a vocabulary of {vocab_size}, "
            f"so that every block of the trace has distinct tokens, got {block_tokens}"
        )
