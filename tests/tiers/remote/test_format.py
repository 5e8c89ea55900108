"""The value's bytes: a golden vector, and every bit of the header."""

import numpy as np
import pytest

from longshore.boundary import Status
from longshore.checksums import digest
from longshore.tiers.remote.format import HEADER_BYTES, Identity, address, pack_header, verify

NAMESPACE, KEY = bytes(range(32)), bytes(range(32, 64))
IMAGE = memoryview(bytes(range(256)) * 16)
CHECKSUM = digest(IMAGE)
IDENTITY = Identity(NAMESPACE, KEY, len(IMAGE), 3)

GOLDEN = bytes.fromhex(
    "4c4e47534856414c" "01000000" "0100" "0000" "00000000" "03000000"
    "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
    "202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f"
    "0010000000000000" "51918707377c4beb" "00000000000000000000000000000000" "885b1b7e7e6b604d"
)  # fmt: skip
"""Written by version 1, and readable as long as that version is."""


def test_the_golden_value() -> None:
    assert pack_header(IDENTITY, IMAGE) == GOLDEN
    assert verify(GOLDEN, CHECKSUM, IDENTITY) is Status.OK


def test_addresses() -> None:
    assert IDENTITY.address == f"ls1/{NAMESPACE.hex()}/{KEY.hex()}.r3".encode()
    assert address(NAMESPACE, KEY) == f"ls1/{NAMESPACE.hex()}/{KEY.hex()}".encode()


def test_no_bit_of_the_header_can_change_unseen() -> None:
    for bit in range(8 * HEADER_BYTES):
        changed = bytearray(GOLDEN)
        changed[bit // 8] ^= 1 << bit % 8
        assert verify(changed, CHECKSUM, IDENTITY) is Status.CORRUPT


def test_no_bit_of_the_image_can_change_unseen() -> None:
    for bit in np.random.default_rng(0).integers(0, 8 * len(IMAGE), 500).tolist():
        changed = bytearray(IMAGE)
        changed[bit // 8] ^= 1 << bit % 8
        assert verify(GOLDEN, digest(bytes(changed)), IDENTITY) is Status.CORRUPT


@pytest.mark.parametrize(
    "other",
    [
        IDENTITY._replace(namespace=bytes(32)),
        IDENTITY._replace(key=bytes(32)),
        IDENTITY._replace(rank=2),
        IDENTITY._replace(length=len(IMAGE) - 1),
    ],
)
def test_a_valid_value_of_something_else_is_a_mismatch(other: Identity) -> None:
    assert verify(GOLDEN, CHECKSUM, other) is Status.MISMATCH
    image = IMAGE[: other.length]
    assert verify(pack_header(other, image), digest(image), IDENTITY) is Status.MISMATCH


@pytest.mark.parametrize("length", [0, 1, HEADER_BYTES - 1, HEADER_BYTES + 1])
def test_a_header_of_another_length_is_corrupt(length: int) -> None:
    assert verify((GOLDEN * 2)[:length], CHECKSUM, IDENTITY) is Status.CORRUPT


def test_values_of_later_versions_are_not_served() -> None:
    import struct

    for at, what in ((8, "<I"), (12, "<H"), (14, "<H"), (16, "<I")):
        fields = bytearray(GOLDEN[:120])
        struct.pack_into(what, fields, at, 9)
        later = bytes(fields) + struct.pack("<Q", digest(bytes(fields)))
        assert verify(later, CHECKSUM, IDENTITY) is Status.MISMATCH
