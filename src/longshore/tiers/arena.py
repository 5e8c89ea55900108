"""The host arena: one anonymous mapping that holds block images.

Everything below the device reads and writes through it, by byte offset: the transfer engine at one edge, tiers at
the other. The mapping has the exact size asked for (rounded up to a page), starts on a page boundary, and is given
back by `close`, never by a finaliser. Its pages are touched at start, huge ones where the system allows: a copy into a
page that does not exist yet runs at a fraction of memory speed.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

from longshore.errors import TierClosedError, TierError

PAGE = 4096
"""Alignment of every image, in bytes: what direct I/O asks for."""


def align(size: int) -> int:
    """`size` rounded up to a multiple of `PAGE`."""
    return -(-size // PAGE) * PAGE


class Arena:
    """`nbytes` of host memory, zeroed, page-aligned.

    Attributes:
        nbytes: Size in bytes.
        address: Address of the first byte, for copy plans.
    """

    def __init__(self, nbytes: int) -> None:
        if nbytes <= 0:
            raise TierError(f"an arena needs a positive number of bytes, got {nbytes}")
        self.nbytes = align(nbytes)
        self._mapping: mmap.mmap | None = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without transparent huge pages
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        array: npt.NDArray[np.uint8] = np.frombuffer(self._mapping, dtype=np.uint8)
        self.address: int = array.__array_interface__["data"][0]
        array[::PAGE] = 0
        self._array: npt.NDArray[np.uint8] | None = array

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """The whole arena, shape `(nbytes,)`, uint8, writable."""
        if self._array is None:
            raise TierClosedError("the arena was closed")
        return self._array

    def view(self, offset: int, length: int) -> memoryview[Any]:
        """Writable bytes `[offset, offset + length)`; raises `TierError` when they do not lie within the arena."""
        if offset < 0 or length < 0 or offset + length > self.nbytes:
            raise TierError(f"bytes [{offset}, {offset + length}) do not lie within an arena of {self.nbytes}")
        return memoryview(self.array.data)[offset : offset + length]

    def close(self) -> None:
        """Give the memory back. Idempotent. Views that are still held keep the mapping alive until they go."""
        self._array = None
        if self._mapping is not None:
            with contextlib.suppress(BufferError):  # a view is still exported: the mapping goes with the last of them
                self._mapping.close()
            self._mapping = None
