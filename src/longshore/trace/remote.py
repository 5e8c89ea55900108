"""A remote store in virtual time: a bounded number of images by key.

    probe    which of these are there          write    they are now; what was used the longest ago makes way
    read     those that are still there; the others have lapsed

To the cache it is a foreign tier, asked by `Probe`, which may drop images. Other machines that share it are not
modelled.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from longshore.boundary import Key, Status
from longshore.errors import TraceError

REMOTE = "remote"
"""The name of the tier."""


class RemoteStore:
    """A store of `slots` images, empty at the start, with LRU eviction."""

    def __init__(self, slots: int) -> None:
        if slots < 1:
            raise TraceError(f"{REMOTE}: expected room for at least one block, got {slots}")
        self.slots = slots
        self.evictions = 0
        """Number of evicted images."""
        self._keys: OrderedDict[Key, None] = OrderedDict()

    def __len__(self) -> int:
        """How many images it has."""
        return len(self._keys)

    def probe(self, keys: Iterable[Key]) -> tuple[bool, ...]:
        """Which of `keys` the store has; does not count as a use."""
        return tuple(key in self._keys for key in keys)

    def read(self, keys: Iterable[Key]) -> tuple[Status, ...]:
        """Read `keys`; those in the store are used in this order."""
        return tuple(Status.OK if self._use(key) else Status.LAPSED for key in keys)

    def write(self, keys: Iterable[Key]) -> None:
        """Store `keys`, used in this order."""
        for key in keys:
            self._keys[key] = None
            self._use(key)
            if len(self._keys) > self.slots:
                self._keys.popitem(last=False)
                self.evictions += 1

    def _use(self, key: Key) -> bool:
        there = key in self._keys
        if there:
            self._keys.move_to_end(key)
        return there
