"""When chunks go that stand alone: those that a window has slid past go first.

    fresh    in the last window of the request that stored it
    slid     the window has moved on, and nobody has come back for it: goes first, in every tier
    served   a match needed it: keeps its place in the order, for others may part there as well

Until such a chunk is stored, nothing of this costs anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from longshore.cache.store import Store

_FRESH, _SLID, _SERVED = range(3)


class Sliding:
    """What has become of the chunks of one `Store` that stand alone. A byte per node."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._mark = bytearray()

    def grow(self, nodes: int) -> None:
        """Nodes may now have any number below `nodes`."""
        if self._mark:
            self._mark.extend(bytes(nodes - len(self._mark)))

    def enter(self, nodes: Sequence[int]) -> None:
        """`nodes` lie in the last window of their request; or they are new, and do not stand alone."""
        if self._mark:
            for node in nodes:
                self._mark[node] = _FRESH

    def slide(self, nodes: Sequence[int]) -> None:
        """A window has slid past `nodes`: they go first from now on, unless a match was served from them."""
        if not self._mark:
            self._mark = bytearray(self._store.index.size)
        for node in nodes:
            if self._mark[node] == _FRESH:
                self._mark[node] = _SLID
                for tier in self._store.index.tiers:
                    self._chill(node, tier)

    def serve(self, nodes: Sequence[int]) -> None:
        """A match needed `nodes`."""
        if self._mark:
            for node in nodes:
                self._mark[node] = _SERVED

    def settle(self, nodes: Sequence[int], tier: int) -> None:
        """Copies of `nodes` have become ready in `tier`."""
        if self._mark:
            for node in nodes:
                if self._mark[node] == _SLID:
                    self._chill(node, tier)

    def _chill(self, node: int, tier: int) -> None:
        if self._store.index.is_ready(node, tier):
            policy = self._store.policies[tier]
            policy.hold(node)
            policy.release((node,))
