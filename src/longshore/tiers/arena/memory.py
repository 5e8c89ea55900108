"""The mapping behind an arena: of the exact size asked for, aligned for huge pages, with forbidden memory around it.

                 multiple of `alignment`
    ┌─────────────┬──────────────────────────┬─────────────┐
    │  forbidden  │  nbytes                  │  forbidden  │      one address range, given back as one
    └─────────────┴──────────────────────────┴─────────────┘

What runs over an end of it stops there, instead of writing into somebody else's memory. Shared memory is a memfd, whose
size is sealed: no process can shrink it under another that copies into it.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from longshore.errors import TierError
from longshore.tiers.arena import system

PAGE = 4096
"""Alignment of every image, in bytes: what direct I/O asks for."""

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def align(size: int) -> int:
    """`size` rounded up to a multiple of `PAGE`."""
    return _round_up(size, PAGE)


def create_shared(nbytes: int) -> int:
    """File descriptor of `nbytes` of memory that other processes can map; its size never changes.

    Raises `OSError`, or `OverflowError` for a size that no file has.
    """
    fd = os.memfd_create("longshore-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except (OSError, OverflowError):
        os.close(fd)
        raise
    return fd


def open_shared(source: int | str | Path, nbytes: int) -> int:
    """A file descriptor of our own for the shared memory of another arena.

    `source` is a descriptor that came over a socket or by inheritance (it stays the caller's), or the path of one,
    `/proc/PID/fd/N`. Raises `TierError` when there is nothing to open, when it is not an arena's memory, or when that
    has another size than `nbytes` rounded up to a page.
    """
    try:
        fd = os.dup(source) if isinstance(source, int) else os.open(source, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise TierError(f"cannot open the arena at {source}: {error.strerror}") from error
    try:
        _check_shared(fd, source, align(nbytes))
    except TierError:
        os.close(fd)
        raise
    return fd


def _check_shared(fd: int, source: int | str | Path, nbytes: int) -> None:
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise TierError(f"{source} is not an arena: expected a memfd ({error.strerror})") from error
    if seals & _SEALS != _SEALS:
        raise TierError(f"{source} is not an arena: its size is not sealed (seals {seals:#x})")
    found = os.fstat(fd).st_size
    if found != nbytes:
        raise TierError(f"the arena at {source} has {found} bytes, expected {nbytes}")


class Memory:
    """`nbytes` at `address`, a multiple of `alignment`; private and zeroed, or those of the shared memory `fd`.

    `fd` belongs to the memory from then on. Raises `OSError`, or `OverflowError` for a size that no address range has;
    nothing is left behind then but `fd`.
    """

    def __init__(self, nbytes: int, alignment: int, fd: int | None = None) -> None:
        span = nbytes + 2 * alignment
        mapping = mmap.mmap(-1, span, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        whole: npt.NDArray[np.uint8] = np.frombuffer(mapping, dtype=np.uint8)
        first: int = whole.__array_interface__["data"][0]
        self.nbytes = nbytes
        self.address = _round_up(first + 1, alignment)
        self.fd = fd
        offset = self.address - first
        end = offset + _round_up(nbytes, mmap.PAGESIZE)
        try:
            if fd is not None:
                system.map_over(self.address, nbytes, fd)
            system.forbid(first, offset)
            system.forbid(first + end, span - end)
        except OSError:
            del whole
            mapping.close()
            raise
        self._mapping: mmap.mmap | None = mapping
        self._array: npt.NDArray[np.uint8] | None = whole[offset : offset + nbytes]

    @property
    def array(self) -> npt.NDArray[np.uint8] | None:
        """All bytes, shape `(nbytes,)`, writable; `None` once closed."""
        return self._array

    def close(self) -> None:
        """Give it all back. Idempotent. Views that are still held keep the mapping alive until they go."""
        self._array = None
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            with contextlib.suppress(BufferError):  # a view is still exported: the mapping goes with the last of them
                mapping.close()
        fd, self.fd = self.fd, None
        if fd is not None:
            os.close(fd)


def _round_up(size: int, step: int) -> int:
    return -(-size // step) * step
