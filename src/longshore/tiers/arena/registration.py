"""Pieces of an arena registered with a device, which copies from and to them directly.

    slots    │ 0 │ 1 │ 2 │ 3 │ 4 │ 5 │ 6 │ 7 │
    pieces   ├─── 0 ─────┼─── 1 ─────┼── 2 ──┤      each boundary between two slots and between two pages

A single registration fails on some systems (above 64 GiB), and a copy across two registrations fails on all. There are
therefore several, and no slot straddles two. If the device refuses a piece, the others remain usable.
"""

from __future__ import annotations

import math
import mmap
from typing import Protocol

import numpy as np
import numpy.typing as npt

from longshore.boundary import PAGE
from longshore.errors import RegistrationError, TierError

LARGEST_PIECE = 16 << 30
"""Bytes of the largest piece: well below sizes that were seen to fail."""


class Registrar(Protocol):
    """A device that host memory can be registered with."""

    def register(self, address: int, nbytes: int) -> None:
        """Register `nbytes` at `address`. Raises `RegistrationError`, after clearing the error state."""

    def unregister(self, address: int) -> None:
        """Unregister the memory at `address`. Raises `RegistrationError`, after clearing the error state."""


def cut(nbytes: int, slot_bytes: int, largest: int = LARGEST_PIECE) -> list[tuple[int, int]]:
    """`(offset, length)` of pieces of at most `largest` bytes that cover `[0, nbytes)` exactly, in order.

    Slots of `slot_bytes` are adjacent from 0; none straddles two pieces. All pieces but the last have equal length.
    Raises `TierError` for impossible sizes, or when not even one slot fits into a piece.
    """
    if nbytes <= 0 or slot_bytes <= 0 or slot_bytes % PAGE:
        raise TierError(
            f"expected a positive size and slots of a positive multiple of {PAGE} bytes, got {nbytes} and {slot_bytes}"
        )
    step = math.lcm(slot_bytes, mmap.PAGESIZE)
    if step > largest:
        raise TierError(f"a registered piece is at most {largest} bytes, but a slot and its pages need {step}")
    length = largest // step * step
    return [(offset, min(length, nbytes - offset)) for offset in range(0, nbytes, length)]


class Registration:
    """The registered pieces of the memory at `address`. One thread may change it; any thread may query it."""

    def __init__(self, registrar: Registrar, address: int) -> None:
        self._registrar = registrar
        self._address = address
        self._bounds: npt.NDArray[np.int64] = np.zeros((2, 0), dtype=np.int64)
        """First offset of each piece, and the offset after its end; replaced as a whole."""

    @property
    def pieces(self) -> int:
        """Number of pieces."""
        return len(self._bounds[0])

    @property
    def nbytes(self) -> int:
        """Bytes in all pieces."""
        starts, ends = self._bounds
        return int((ends - starts).sum())

    def add(self, offset: int, length: int) -> None:
        """Register the next piece, behind all others. Raises `RegistrationError` with nothing changed."""
        self._registrar.register(self._address + offset, length)
        self._bounds = np.column_stack([self._bounds, (offset, offset + length)])

    def covers(self, offsets: npt.ArrayLike, lengths: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Whether each `[offset, offset + length)` is within one piece; the arguments are broadcast together."""
        starts, ends = self._bounds
        first = np.asarray(offsets, dtype=np.int64)
        size = np.asarray(lengths, dtype=np.int64)
        piece = np.searchsorted(starts, first, side="right") - 1
        end = np.append(ends, 0)[piece]  # what lies before all pieces has number -1
        return np.asarray((piece >= 0) & (size >= 0) & (size <= end - first))

    def close(self) -> None:
        """Unregister all pieces. If some fail, raises `RegistrationError` after the last. Idempotent."""
        starts = self._bounds[0].tolist()
        self._bounds = self._bounds[:, :0]
        failures = []
        for start in starts:
            try:
                self._registrar.unregister(self._address + start)
            except RegistrationError as error:
                failures.append(str(error))
        if failures:
            raise RegistrationError(
                f"{len(failures)} of {len(starts)} pieces of host memory could not be unregistered: {failures[0]}"
            )
