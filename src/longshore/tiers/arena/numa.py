"""Memory on the NUMA node of a device. Copies to the memory of another node use the link between the sockets.

    /sys/bus/pci/devices/0000:3b:00.0/numa_node ─► 1 ─► mbind(address, nbytes, MPOL_PREFERRED, {1}) ─► pages on node 1

The node is preferred, not required. With `MPOL_BIND`, the out-of-memory killer ends the process when the node is full,
even if other nodes have free memory, and an arena is often larger than one node. Pages that the node has no room for
are on other nodes, and slower; `count_strays` counts them.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from longshore.boundary import PAGE
from longshore.tiers.arena.memory import System

MPOL_PREFERRED = 1
_SAMPLES = 1024
_BITS = 64


class _Numbers(NamedTuple):
    mbind: int
    move_pages: int


# From the kernel's tables: arch/x86/entry/syscalls/syscall_64.tbl, include/uapi/asm-generic/unistd.h.
_NUMBERS = {"x86_64": _Numbers(237, 279), "aarch64": _Numbers(235, 239)}

_PCI_ADDRESS = re.compile(r"0*([0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])")


def node_of_device(pci_address: str, sysfs: Path) -> int | None:
    """The node of the device at `pci_address`, such as `0000:3B:00.0`; `None` if the machine does not report it."""
    match = _PCI_ADDRESS.fullmatch(pci_address.lower())
    if match is None:
        return None
    try:
        node = int(sysfs.joinpath("bus/pci/devices", match[1], "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def bind(system: System, address: int, nbytes: int, node: int) -> None:
    """Allocate untouched pages of this range on `node` while it has free memory. Raises `OSError`."""
    words = node // _BITS + 1
    mask = (ctypes.c_uint64 * words)()
    mask[-1] = 1 << node % _BITS
    system.syscall(
        _numbers().mbind,
        ctypes.c_void_p(address),
        ctypes.c_size_t(nbytes),
        ctypes.c_int(MPOL_PREFERRED),
        mask,
        ctypes.c_ulong(words * _BITS + 1),  # the kernel takes one off
        ctypes.c_uint(0),
    )


def count_strays(system: System, address: int, nbytes: int, node: int) -> int:
    """Number of pages not on `node`, of about a thousand evenly spread touched pages. Raises `OSError`."""
    pages = -(-nbytes // PAGE)
    samples = np.unique(np.linspace(0, pages - 1, min(pages, _SAMPLES)).astype(np.uint64))
    addresses = samples * np.uint64(PAGE) + np.uint64(address)
    found = np.zeros(len(samples), dtype=np.int32)
    system.syscall(
        _numbers().move_pages,  # without nodes to move to it only looks
        ctypes.c_int(0),
        ctypes.c_ulong(len(samples)),
        ctypes.c_void_p(addresses.ctypes.data),
        None,
        ctypes.c_void_p(found.ctypes.data),
        ctypes.c_int(0),
    )
    if found.min() < 0:
        raise OSError(-int(found.min()), os.strerror(-int(found.min())))
    return int((found != node).sum())


def _numbers() -> _Numbers:
    try:
        return _NUMBERS[platform.machine()]
    except KeyError:
        raise OSError(errno.ENOSYS, f"NUMA system calls are not supported on {platform.machine()}") from None
