"""The seam for eviction policies.

A policy knows keys and the order in which they should go; it knows nothing of slots, states, holds or prefixes.
The cache asks for candidates, coldest first, and takes those that may go (`longshore.cache.store`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from longshore.boundary import Key


class EvictionPolicy(ABC):
    """An order of eviction over the resident keys of one tier.

    The cache calls `insert` when a copy became ready, `touch` when it was used (a request's chunks tail first, so that
    heads stay longest), and `remove` when it left for whatever reason. `insert` of a key that is in, `touch` and
    `remove` of one that is not, raise `CacheError`.
    """

    @abstractmethod
    def insert(self, key: Key) -> None:
        """`key` became resident."""

    @abstractmethod
    def touch(self, key: Key) -> None:
        """`key` was used."""

    @abstractmethod
    def remove(self, key: Key) -> None:
        """`key` left."""

    @abstractmethod
    def candidates(self) -> Iterator[Key]:
        """Resident keys, the first to go first. The policy must not be changed while this is consumed."""

    @abstractmethod
    def __len__(self) -> int:
        """Resident keys."""
