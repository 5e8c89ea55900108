"""The mapping behind an arena: of exactly the requested size, aligned for huge pages, between inaccessible guard pages.

                 multiple of `alignment`
    ┌─────────────┬──────────────────────────┬─────────────┐
    │  forbidden  │  nbytes                  │  forbidden  │      one address range, given back as one
    └─────────────┴──────────────────────────┴─────────────┘

An overrun faults instead of writing to other memory. Shared memory is a memfd with a sealed size: no process can shrink
it while another copies into it.
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
"""Alignment of every image in bytes, as required by direct I/O."""

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
    """A new file descriptor for the shared memory of another arena.

    `source` is a descriptor received over a socket or by inheritance (which the caller keeps), or its path,
    `/proc/PID/fd/N`. Raises `TierError` if it cannot be opened, is not an arena, or has another size than `nbytes`
    rounded up to a page.
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
    """`nbytes` at `address`, a multiple of `alignment`; private and zeroed, or the shared memory `fd`.

    `fd` belongs to the memory from then on. Raises `OSError`, or `OverflowError` for a size beyond the address space;
    only `fd` is left then.
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
        """Free the mapping. Idempotent. Existing views keep it alive."""
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
