"""What the control plane knows of the device's own blocks: which ids there are, and whether their memory is there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from longshore.errors import CacheError


class DeviceBlocks:
    """Blocks 0 .. `count` - 1 of the device pool; any number of them if that is `None`."""

    def __init__(self, count: int | None) -> None:
        if count is not None and (not isinstance(count, int) or count < 0):
            raise CacheError(f"a device pool has zero or more blocks, got {count!r}")
        self._count = count
        self.asleep = False
        """Whether their memory was given up."""

    def check(self, blocks: Sequence[int]) -> None:
        """Raise `CacheError` unless `blocks` are there, and distinct."""
        if self.asleep:
            raise CacheError("the device's memory was given up by `sleep`, and not taken back by `wake`")
        if any(not issubclass(kind, int | np.integer) or kind is bool for kind in set(map(type, blocks))):
            raise CacheError(f"device blocks are whole numbers, got {list(blocks)[:8]}")
        if len(set(blocks)) != len(blocks):
            raise CacheError(f"device blocks are distinct, got {list(blocks)[:8]}")
        if blocks and (min(blocks) < 0 or (self._count is not None and max(blocks) >= self._count)):
            raise CacheError(f"device blocks lie in [0, {self._count}), got {min(blocks)} to {max(blocks)}")
