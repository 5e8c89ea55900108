"""Checksums of images: one that is fast on a CPU, and one that is fast on a GPU. Each record names its algorithm.

    xxh3_64   of images that pass through host memory
    mix64     of images that go from a device's memory to the file and back: every 8 bytes are mixed with their place,
              and added up in any order, so that thousands of threads can share the work

Both change with any single bit. docs/file-format.md is the specification. Sources: xxHash by Yann Collet; the mixing
step follows Bret Mulvey and Christopher Wellons (shift, exclusive or, multiply by an odd number). It is a bijection:
different words in one position never mix to the same value.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

XXH3_64 = 1
MIX64 = 2

ALGORITHMS = (XXH3_64, MIX64)
"""Algorithm numbers that a record may name."""

STEP = 0x9E3779B97F4A7C15
"""Factor of a word's position, modulo 2**64: 2**64 divided by the golden ratio, odd."""

FACTOR = 0xD6E8FEB86659FD93
"""Factor of the mixing step."""

_MASK = 2**64 - 1
_WORD = 8
_SHORT = 4096  # bytes that take less time than to hand over the interpreter lock
_BATCH_WORDS = 1 << 15
"""Words that are mixed at a time; they and the intermediate results fit a core's cache."""

_PLACES: npt.NDArray[np.uint64] = np.arange(1, _BATCH_WORDS + 1, dtype=np.uint64) * np.uint64(STEP)


def checksum(algorithm: int, data: memoryview) -> int:
    """Checksum of `data` by one of `ALGORITHMS`. Releases the interpreter lock."""
    return mix64(data) if algorithm == MIX64 else digest(data)


def digest(data: bytes | memoryview) -> int:
    """xxh3_64 of `data`. Releases the interpreter lock for data of some size."""
    if len(data) <= _SHORT:
        return int(xxhash.xxh3_64_intdigest(data))
    state = xxhash.xxh3_64()
    state.update(data)  # the object's update, not the one-shot function, gives up the interpreter lock in all releases
    return int(state.intdigest())


def mix64(data: bytes | memoryview) -> int:
    """mix64 of `data`: what `longshore.transfer.device.cuda.kernels` computes on a GPU."""
    whole = len(data) // _WORD
    total = 0
    words = np.frombuffer(data, "<u8", count=whole)
    for first in range(0, whole, _BATCH_WORDS):
        some = words[first : first + _BATCH_WORDS]
        places = _PLACES[: len(some)] + np.uint64(first * STEP & _MASK)
        total += int(_mixed(places ^ some).sum(dtype=np.uint64))
    if len(data) % _WORD:
        last = int.from_bytes(data[whole * _WORD :], "little")
        total += _mix(last ^ ((whole + 1) * STEP & _MASK))
    return finish(total, len(data))


def finish(total: int, length: int) -> int:
    """The checksum of `length` bytes whose mixed words have the sum `total`, modulo 2**64."""
    return _mix((total ^ length) & _MASK)


def _mix(word: int) -> int:
    word ^= word >> 32
    word = word * FACTOR & _MASK
    word ^= word >> 32
    word = word * FACTOR & _MASK
    return word ^ word >> 32


def _mixed(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """`_mix` of each of `words`, in place."""
    half, factor = np.uint64(32), np.uint64(FACTOR)
    words ^= words >> half
    words *= factor
    words ^= words >> half
    words *= factor
    words ^= words >> half
    return words
