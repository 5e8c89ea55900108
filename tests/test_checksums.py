"""The checksums of images: vectors, single bits, and a plain reference."""

from __future__ import annotations

import random

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from longshore.checksums import FACTOR, MIX64, STEP, XXH3_64, checksum, digest, mix64

MASK = 2**64 - 1

# Written once; also in docs/file-format.md. If these change, the format has: it needs a new version.
VECTORS = [
    (b"", 0x0000000000000000),
    (b"longshore", 0xF1FA317F16ECA52B),
    (bytes(4096), 0x27B6230052DF31D2),
    (bytes(range(256)) * 16, 0xFC6CE686B6971429),
]


def plainly(data: bytes) -> int:
    """As docs/file-format.md says it."""

    def mix(word: int) -> int:
        for _ in range(2):
            word = (word ^ word >> 32) * FACTOR & MASK
        return word ^ word >> 32

    total = 0
    for place, start in enumerate(range(0, len(data), 8), 1):
        word = int.from_bytes(data[start : start + 8].ljust(8, b"\0"), "little")
        total += mix(word ^ place * STEP & MASK)
    return mix(total & MASK ^ len(data))


@pytest.mark.parametrize(("data", "expected"), VECTORS)
def test_vectors(data: bytes, expected: int) -> None:
    assert mix64(data) == plainly(data) == expected


@given(st.binary(max_size=200))
def test_it_is_what_is_written_down(data: bytes) -> None:
    assert mix64(data) == plainly(data)


def test_images_of_many_rounds() -> None:
    data = random.Random(1).randbytes((1 << 19) + 12345)
    assert mix64(data) == plainly(data)


def test_every_flipped_bit_of_an_image_is_seen() -> None:
    image = bytearray(random.Random(2).randbytes(4096))
    for algorithm in (XXH3_64, MIX64):
        right = checksum(algorithm, memoryview(image))
        for bit in range(8 * len(image)):
            image[bit // 8] ^= 1 << bit % 8
            assert checksum(algorithm, memoryview(image)) != right
            image[bit // 8] ^= 1 << bit % 8
        assert checksum(algorithm, memoryview(image)) == right


def test_places_count() -> None:
    chance = random.Random(3)
    words = [chance.randbytes(8) for _ in range(64)]
    right = mix64(b"".join(words))
    for first in range(63):
        swapped = [*words[:first], words[first + 1], words[first], *words[first + 2 :]]
        assert mix64(b"".join(swapped)) != right
    assert len({mix64(bytes(length)) for length in range(64)}) == 64


def test_the_same_bit_flipped_in_two_words_is_seen() -> None:
    """What a plain sum of products would miss."""
    image = bytearray(512)
    right = mix64(image)
    for first in range(0, 512, 8):
        for second in range(first + 8, 512, 8):
            for byte in (first, second):
                image[byte + 7] ^= 0x80
            assert mix64(image) != right
            for byte in (first, second):
                image[byte + 7] ^= 0x80


def test_long_and_short_ways_of_xxh3_agree() -> None:
    for length in (0, 1, 4088, 4096, 4097, 100_000):
        data = bytes(length)
        assert digest(data) == digest(memoryview(data)) == xxhash.xxh3_64_intdigest(data)
