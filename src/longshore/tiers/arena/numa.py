"""Memory on the NUMA node that a device hangs on: a copy to another node's memory shares the link between the sockets.

    /sys/bus/pci/devices/0000:3b:00.0/numa_node ─► 1 ─► mbind(address, nbytes, MPOL_PREFERRED, {1}) ─► pages on node 1

The node is preferred, not required. Required memory (`MPOL_BIND`) that the node does not have ends the process, through
the out-of-memory killer, while other nodes have plenty; and an arena is often larger than one node. What the node
could not give is then elsewhere, and slower: `count_strays` says so.
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

from longshore.tiers.arena.memory import PAGE
from longshore.tiers.arena.system import System

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
    """The node of the device at `pci_address`, such as `0000:3B:00.0`; `None` when the machine does not say."""
    match = _PCI_ADDRESS.fullmatch(pci_address.lower())
    if match is None:
        return None
    try:
        node = int(sysfs.joinpath("bus/pci/devices", match[1], "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def bind(system: System, address: int, nbytes: int, node: int) -> None:
    """Let what is not yet touched of this range come from `node`, as long as that has memory. Raises `OSError`."""
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
    """Of about a thousand touched pages, evenly spread, those that are not on `node`. Raises `OSError`."""
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
