"""The machine that figures were taken on."""

from __future__ import annotations

import os
import platform
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from longshore.errors import BenchError

_RAM_DISKS = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})


def has_vllm() -> bool:
    """Whether vLLM is installed: a directory of that name is no package."""
    found = find_spec("vllm")
    return found is not None and found.origin is not None


def machine_facts() -> dict[str, object]:
    """CPU, cores this process may use, memory in bytes, kernel, versions; torch only where something imported it."""
    facts: dict[str, object] = {
        "cpu": _field(Path("/proc/cpuinfo"), "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        facts["torch"] = str(torch.__version__)
    return facts


def file_system_of(path: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """Type of the file system that `path` is on, for instance `ext4`."""
    device = path.stat().st_dev
    found = ""
    # Several may be mounted one over the other: the last one is what is seen. The device number settles which it is.
    for line in mounts.read_text().splitlines():
        _, where, kind, *_ = line.split(" ")
        try:
            if Path(_unescaped(where)).stat().st_dev == device:
                found = kind
        except OSError:
            continue  # a mount point that this user may not look at
    return found or "unknown"


def check_disk(path: Path, *, allow_ram_disk: bool) -> dict[str, object]:
    """What is to be said about the file system of `path`; `BenchError` when it is memory and that was not asked for."""
    kind = file_system_of(path)
    if kind not in _RAM_DISKS:
        return {"file_system": kind}
    if not allow_ram_disk:
        raise BenchError(f"{path} is on a RAM disk ({kind}): expected a disk, or --allow-ram-disk to measure memory")
    return {"file_system": kind, "ram_disk": True}


def check_direct(path: Path, *, direct: bool, allow_page_cache: bool) -> dict[str, object]:
    """What is to be said when files under `path` are not read by direct I/O; `BenchError` unless that was asked for."""
    if direct:
        return {}
    if not allow_page_cache:
        raise BenchError(f"{path} has no direct I/O: expected it, or --allow-page-cache to measure through the cache")
    return {"page_cache": True}


def _field(path: Path, name: str) -> str | None:
    for line in path.read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None


def _unescaped(text: str) -> str:
    """A mount point, with what `/proc/self/mounts` writes in octal."""
    return text.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")
