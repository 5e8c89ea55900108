"""A store elsewhere, in virtual time: what it has by key, and no more than so many images of it.

    probe    which of these are there          write    they are now; what was used the longest ago makes way
    read     those that are still there; the others have lapsed

It is a foreign tier to the cache: asked by `Probe`, and free to forget. Other machines that share it are not modelled.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from longshore.boundary import Key, Status
from longshore.errors import TraceError

REMOTE = "remote"
"""The name of the tier."""


class RemoteStore:
    """A store of `slots` images, empty at the start, that forgets what was written or read the longest ago."""

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
        """Which of `keys` are there; no use of them."""
        return tuple(key in self._keys for key in keys)

    def read(self, keys: Iterable[Key]) -> tuple[Status, ...]:
        """Those that are there are used, the last the last."""
        return tuple(Status.OK if self._use(key) else Status.LAPSED for key in keys)

    def write(self, keys: Iterable[Key]) -> None:
        """These are there now, the last used the last."""
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
