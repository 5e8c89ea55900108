"""Allocates all pages of an arena before its first use, in several threads without the interpreter lock.

A copy into a page that is not allocated runs at a fraction of memory speed.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from longshore.boundary import PAGE
from longshore.tiers.arena.memory import System

MADV_POPULATE_WRITE = 23
_RANGE = 64 << 20
"""Bytes that one thread touches at a time: a multiple of the usual huge page."""

_MOST_THREADS = 16


def default_threads() -> int:
    """One per core that this process may use, up to the number that saturates a memory controller."""
    return min(_MOST_THREADS, len(os.sched_getaffinity(0)))


def populate(system: System, address: int, nbytes: int, threads: int) -> bool:
    """Have the kernel allocate all pages; their content stays. Returns whether the kernel can (Linux 5.14 and newer).

    Raises `OSError` if there is not enough memory.
    """

    def work(start: int, stop: int) -> None:
        system.madvise(address + start, stop - start, MADV_POPULATE_WRITE)

    try:
        _in_ranges(work, nbytes, threads)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
    return True


def touch(array: npt.NDArray[np.uint8], threads: int) -> None:
    """Write a zero into every page of `array`, which must not be in use."""

    def work(start: int, stop: int) -> None:
        array[start:stop:PAGE] = 0

    _in_ranges(work, array.nbytes, threads)


def _in_ranges(work: Callable[[int, int], None], nbytes: int, threads: int) -> None:
    starts = range(0, nbytes, _RANGE)
    stops = [min(start + _RANGE, nbytes) for start in starts]
    if len(starts) == 1:
        work(starts[0], stops[0])
        return
    with ThreadPoolExecutor(min(threads, len(starts)), thread_name_prefix="longshore-arena") as pool:
        list(pool.map(work, starts, stops))
