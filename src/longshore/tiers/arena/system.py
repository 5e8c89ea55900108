"""Operating system calls of an arena that Python has no function for, in one replaceable object."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

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
