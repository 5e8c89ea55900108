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
import ctypes
import fcntl
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from longshore.boundary import align
from longshore.errors import TierError

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mmap.restype = ctypes.c_void_p

_PROT_NONE, _PROT_READ, _PROT_WRITE = 0, 1, 2
_MAP_SHARED, _MAP_FIXED = 0x01, 0x10
_MAP_FAILED = ctypes.c_void_p(-1).value


def syscall(number: int, *arguments: object) -> int:
    """System call `number`; the arguments are ctypes objects or ints of 32 bits. Raises `OSError`."""
    result: int = _libc.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        raise _last_error()
    return result


def madvise(address: int, nbytes: int, advice: int) -> None:
    """Like `mmap.madvise`, but for any range, and without the interpreter lock. Raises `OSError`."""
    if _libc.madvise(address, nbytes, advice):
        raise _last_error()


def forbid(address: int, nbytes: int) -> None:
    """Make this range inaccessible. Raises `OSError`."""
    if _libc.mprotect(address, nbytes, _PROT_NONE):
        raise _last_error()


def map_over(address: int, nbytes: int, fd: int) -> None:
    """Map the first `nbytes` of file `fd`, shared, over the mapping at `address`. Raises `OSError`."""
    flags = _MAP_SHARED | _MAP_FIXED
    if _libc.mmap(address, nbytes, _PROT_READ | _PROT_WRITE, flags, fd, 0) == _MAP_FAILED:
        raise _last_error()


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


@dataclass(frozen=True, slots=True)
class System:
    """The system calls and paths that an arena uses.

    Attributes:
        syscall: `syscall` above, for calls without a function in the C library.
        madvise: `madvise` above.
        sysfs: Where sysfs is mounted.
        process: The directory of this process in procfs.
    """

    syscall: Callable[..., int] = syscall
    madvise: Callable[[int, int, int], None] = madvise
    sysfs: Path = Path("/sys")
    process: Path = Path("/proc/self")


DONTNEED, REMOVE = 4, 9
"""Advice of `madvise` that frees pages: of private memory, and of shared memory for all that have it."""

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


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
                map_over(self.address, nbytes, fd)
            forbid(first, offset)
            forbid(first + end, span - end)
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
