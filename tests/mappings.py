"""What this process has mapped and open, as the kernel tells it."""

from __future__ import annotations

import os
from pathlib import Path


def mapped(address: int) -> dict[str, int]:
    """Bytes that `/proc/self/smaps` has about the mapping that begins at `address`."""
    about: dict[str, int] = {}
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.startswith(f"{address:x}-"):
            for field in lines:
                name, _, text = field.partition(":")
                if not text.endswith(" kB"):
                    return about
                about[name] = int(text.split()[0]) << 10
    raise AssertionError(f"nothing is mapped from {address:#x} on")


def is_mapped(address: int) -> bool:
    """Whether anything is mapped at `address`."""
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(first, 16) <= address < int(last, 16) for first, last in ranges)


def open_files() -> set[str]:
    """Numbers of the open file descriptors, as text."""
    return set(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names only
