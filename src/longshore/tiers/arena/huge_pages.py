"""Huge pages: requested before the first touch, counted after it.

A request does not guarantee huge pages: they may be disabled, memory may be fragmented, or the mapping misaligned. The
pages are therefore counted in `smaps` afterwards.
"""

from __future__ import annotations

import contextlib
import mmap
import re
from collections.abc import Iterable

from longshore.tiers.arena.memory import System

_DEFAULT_SIZE = 2 << 20
_HEADER = re.compile(r"([0-9a-f]+)-[0-9a-f]+ ")
_FIELD = re.compile(r"(?:AnonHugePages|ShmemPmdMapped|FilePmdMapped): +(\d+) kB")


def size(system: System) -> int:
    """Bytes of one huge page."""
    try:
        return int(system.sysfs.joinpath("kernel/mm/transparent_hugepage/hpage_pmd_size").read_text())
    except (OSError, ValueError):
        return _DEFAULT_SIZE


def ask(system: System, address: int, nbytes: int) -> None:
    """Request huge pages for this range. Raises `OSError` if the kernel does not support them."""
    system.madvise(address, nbytes, mmap.MADV_HUGEPAGE)


def refuse(system: System, address: int, nbytes: int) -> None:
    """Disable huge pages for this range."""
    with contextlib.suppress(OSError):  # a kernel that knows none
        system.madvise(address, nbytes, mmap.MADV_NOHUGEPAGE)


def possible(address: int, nbytes: int, page: int) -> int:
    """Bytes of this range that whole huge pages of `page` bytes can cover."""
    return max(0, (address + nbytes) // page - -(-address // page)) * page


def count(system: System, address: int, nbytes: int) -> int:
    """Bytes of this range, a mapping of its own, that are on huge pages; zero if the system does not report it."""
    try:
        with system.process.joinpath("smaps").open() as lines:
            return _count(lines, address, address + nbytes)
    except OSError:
        return 0


def _count(lines: Iterable[str], start: int, end: int) -> int:
    found = 0
    inside = False
    for line in lines:
        header = _HEADER.match(line)
        if header is not None:
            first = int(header[1], 16)
            if first >= end:
                break
            inside = first >= start
        elif inside and (field := _FIELD.match(line)):
            found += int(field[1]) << 10
    return found
