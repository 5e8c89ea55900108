"""The value of one key in a remote store: a header of 128 bytes, then the chunk image. The same in every store.

    offset  bytes  field                                offset  bytes  field
         0      8  magic "LNGSHVAL"                         24     32  namespace
         8      4  version (1)                              56     32  key
        12      2  checksum algorithm (1: xxh3_64)          88      8  length of the image
        14      2  cipher (0: none)                         96      8  checksum of the image
        16      4  number of the cipher's key (0)          104     16  reserved, zero
        20      4  rank (0xFFFFFFFF: none)                 120      8  xxh3_64 of the 120 bytes before

Integers are little-endian. The address of a value is `ls1/<namespace>/<key>`, followed by `.r<rank>` if there is a
rank; namespace and key are in hexadecimal. The header repeats all of it: a value under a wrong address is not served.

xxh3 detects accidents. It does not stop somebody who may write to the store: they can compute it as well.
"""

from __future__ import annotations

import logging
import os
import struct
from typing import NamedTuple

from longshore.boundary import Key, Status
from longshore.checksums import XXH3_64, digest
from longshore.tiers.base import check_digest, check_generation

MAGIC = b"LNGSHVAL"
VERSION = 1
HEADER_BYTES = 128

NO_RANK = 0xFFFFFFFF
"""The rank of an image that is not divided among ranks."""

_log = logging.getLogger(__name__)

_NO_CIPHER = 0
_FIELDS = struct.Struct("<8sIHHII32s32sQQ16x")
_CHECKSUM = struct.Struct("<Q")
_CHECKED = HEADER_BYTES - _CHECKSUM.size


class Identity(NamedTuple):
    """What an image is: bytes are served only under the identity that they were stored under.

    `namespace` and `key` are of 32 bytes, `length` is that of the image, `rank` the part of a divided image.
    """

    namespace: bytes
    key: Key
    length: int
    rank: int = NO_RANK

    @property
    def address(self) -> bytes:
        """The key in the store; `length` is not part of it."""
        return address(self.namespace, self.key, self.rank)


def address(namespace: bytes, key: Key, rank: int = NO_RANK) -> bytes:
    """The key in the store of one rank's part of an image."""
    suffix = "" if rank == NO_RANK else f".r{rank}"
    return f"ls1/{namespace.hex()}/{key.hex()}{suffix}".encode()


def pack_header(identity: Identity, image: memoryview) -> bytes:
    """The header before `image`, which has `identity.length` bytes."""
    return _packed(identity, digest(image))


def _packed(identity: Identity, checksum: int) -> bytes:
    namespace, key, length, rank = identity
    fields = _FIELDS.pack(MAGIC, VERSION, XXH3_64, _NO_CIPHER, 0, rank, namespace, key, length, checksum)
    return fields + _CHECKSUM.pack(digest(fields))


def version_of(header: bytes) -> int | None:
    """The version of the value that begins with `header`; `None` if it is not one of ours."""
    if len(header) < HEADER_BYTES or not header.startswith(MAGIC):
        return None
    return int(_FIELDS.unpack_from(header)[1])


def verify(header: bytes | memoryview, checksum: int, expected: Identity) -> Status:
    """Whether a value is the one that was asked for; `checksum` is xxh3_64 of the image that was read.

    `CORRUPT`: a bit of it has changed. `MISMATCH`: it is another value, or one of another version, algorithm or cipher.
    """
    if header == _packed(expected, checksum):
        return Status.OK
    if len(header) != HEADER_BYTES or _CHECKSUM.unpack_from(header, _CHECKED)[0] != digest(header[:_CHECKED]):
        return Status.CORRUPT
    magic, version, algorithm, cipher, cipher_key, rank, namespace, key, length, stored = _FIELDS.unpack_from(header)
    known = (magic, version, algorithm, cipher, cipher_key) == (MAGIC, VERSION, XXH3_64, _NO_CIPHER, 0)
    if not known or Identity(namespace, key, length, rank) != expected:
        return Status.MISMATCH
    return Status.OK if stored == checksum else Status.CORRUPT


class Namespace:
    """The namespace of one engine, over its resets.

    Attributes:
        current: 32 bytes.
        generation: That of the last reset.
    """

    def __init__(self, first: bytes, generation: int, *, fixed_weights: bool) -> None:
        """With `fixed_weights`, resets keep it, unless weights have changed. Raises `TierError` for invalid values."""
        check_digest("a namespace", first)
        check_generation(generation)
        self.current = first
        self.generation = generation
        self._keeps = self._fixed_weights = fixed_weights

    def weights_changed(self) -> None:
        """The next reset is to other weights."""
        self._keeps = False

    def reset(self, generation: int, to: bytes | None, store: object) -> bool:
        """Begin `generation`; returns whether it is later than that of the last reset: an earlier one changes nothing.

        `to` is a namespace that is known to be right; without it, unless weights are fixed, it is a random one. `store`
        is for the log. Raises `TierError`, with nothing changed, for invalid values.
        """
        check_generation(generation)
        check_digest("a namespace", self.current if to is None else to)
        if generation <= self.generation:
            return False
        self.generation = generation
        if to is None and not self._keeps:
            to = os.urandom(len(self.current))
            _log.warning(
                "%s: the weights may have changed: from now on, images are stored for this engine alone, and those of "
                "other engines are not read; start the engine again to share, or set fixed_weights if resets never "
                "mean other weights",
                store,
            )
        self.current = self.current if to is None else to
        self._keeps = self._fixed_weights
        return True
