"""Flip single bits of records that a `FileTier` has stored.

flip_header_bit(directory, slot, bit)     ┌────────┬──────────────┐
flip_image_bit(directory, slot, bit)      │ header │    image     │   of one slot; bit 0 is the lowest of byte 0
                                          └────────┴──────────────┘
"""

from __future__ import annotations

import os
from pathlib import Path

from longshore.boundary import PAGE
from longshore.errors import PlanError, TierError
from longshore.tiers.file.directory import SEGMENT, SUPERBLOCK
from longshore.tiers.file.format import parse_superblock


def flip_header_bit(directory: Path, slot: int, bit: int, pool: int = 0) -> None:
    """Flip one bit of the header page of `slot`."""
    _flip(directory, slot, bit, pool, start=0, nbytes=PAGE)


def flip_image_bit(directory: Path, slot: int, bit: int, pool: int = 0) -> None:
    """Flip one bit of the image in `slot` of `pool`."""
    image_bytes = parse_superblock((directory / SUPERBLOCK).read_bytes()).image_bytes[pool]
    _flip(directory, slot, bit, pool, start=PAGE, nbytes=image_bytes)


def _flip(directory: Path, slot: int, bit: int, pool: int, *, start: int, nbytes: int) -> None:
    slabs = parse_superblock((directory / SUPERBLOCK).read_bytes()).geometry
    if not 0 <= bit < 8 * nbytes:
        raise TierError(f"bit {bit} does not lie in [0, {8 * nbytes})")
    try:
        offset = slabs.offset(pool, slot) + start + bit // 8
    except PlanError as error:
        raise TierError(str(error)) from None
    fd = os.open(directory / SEGMENT, os.O_RDWR)
    try:
        (byte,) = os.pread(fd, 1, offset)
        os.pwrite(fd, bytes([byte ^ 1 << bit % 8]), offset)
        os.fsync(fd)  # a tier that reads around the page cache must see it
    finally:
        os.close(fd)
