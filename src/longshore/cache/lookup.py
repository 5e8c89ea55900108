"""What becomes of a path of keys: how far it is known, how far it can be read, and whether it is a path at all.

    known       some tier has it, or will have it             A ── B ── C ── D ── E
    readable    so can be everything before it                A ── B ── C

Both lead without a gap from the first chunk on, so the end of each is found by bisection, whatever the length.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from longshore.boundary import Key
from longshore.cache.columns import column, numbers
from longshore.cache.nodes import ROOT, Nodes
from longshore.errors import CacheError


class Lookup(Nodes):
    """Questions about paths of keys."""

    __slots__ = ()

    def reachable_prefix(self, keys: Sequence[Key], first: int) -> int:
        """How many of `keys` lead without a gap to the deepest that can be read, but at least `first`; by bisection.

        Raises `CacheError` if what is found shows that `keys` is no path.
        """
        low, high, reachable = first, len(keys), self.reachable
        while low < high:
            middle = (low + high) // 2
            node = self._at(keys, middle)
            if node and reachable[node]:
                low = middle + 1
            else:
                high = middle
        return low

    def known_prefix(self, keys: Sequence[Key], first: int) -> int:
        """The same for chunks that some tier has, or will have."""
        low, high = first, len(keys)
        while low < high:
            middle = (low + high) // 2
            if self._at(keys, middle):
                low = middle + 1
            else:
                high = middle
        return low

    def follow(self, keys: Sequence[Key], first: int) -> list[int]:
        """Nodes of the leading chunks of `keys[first:]` that some tier has, or will have.

        Raises `CacheError` unless these follow one another, and the key before them, and the rest is new and distinct.
        """
        try:
            before = self._at(keys, first - 1) if first else ROOT
            end = self.known_prefix(keys, first)
            path = self.path(self.get(keys[end - 1]), end - first)[::-1] if end > first else []
            rest, shards = keys[end:], self._shards
            for key in rest:
                if key in shards[key[0]]:
                    raise _broken(keys, keys.index(key, first))
        except (IndexError, TypeError):
            raise CacheError("the keys of a path are digests in bytes") from None
        if path and (self.parent[path[0]] != before or self.key[path].tolist() != list(keys[first:end])):
            raise _broken(keys, first)
        if len(set(rest)) != len(rest):
            raise CacheError(f"the {len(rest)} new keys of a path differ, only {len(set(rest))} do")
        return path

    def readable(self, keys: Sequence[Key]) -> list[int]:
        """Nodes of the leading chunks of `keys` that can be read, or that can be once a copy on its way has arrived."""
        shards, reachable = self._shards, self.reachable
        path: list[int] = []
        for key in keys:
            node = shards[key[0]].get(key, ROOT)
            if not node or not reachable[node]:
                break
            path.append(node)
        return path

    def is_readable(self, key: Key) -> bool:
        """Whether `key`, and all that it needs to be reached, can be read."""
        return bool(self.reachable[node] if (node := self.get(key)) else 0)

    def find_alone(self, keys: Sequence[Key]) -> list[int]:
        """The node of each of `keys`, which stand alone; `ROOT` for those that no tier has, or will have.

        Raises `CacheError` if they are not distinct, or one is known as the child of another.
        """
        nodes = self.find(keys)
        if len(set(keys)) != len(keys):
            raise CacheError(f"the {len(keys)} keys of a path differ, only {len(set(keys))} do")
        self.check_alone(numbers(nodes))
        return nodes

    def check_alone(self, at: npt.NDArray[np.int32]) -> None:
        """Raise `CacheError` if one of the nodes `at` is the child of another."""
        behind = at[column(self.parent)[at] != ROOT].tolist()
        if behind:
            name = self.key[behind[0]].hex()[:12]
            raise CacheError(f"chunk {name} was stored behind another, and does not stand alone")

    def check_link(self, keys: Sequence[Key], position: int) -> int:
        """The node of `keys[position]`; raises `CacheError` if it does not follow the key before it."""
        node = self._at(keys, position)
        if node and position and self.key[self.parent[node]] != keys[position - 1]:
            raise _broken(keys, position)
        return node

    def _at(self, keys: Sequence[Key], position: int) -> int:
        key = keys[position]
        node = self.get(key)
        if node and self.depth[node] != position:
            raise _broken(keys, position)
        return node


def _broken(keys: Sequence[Key], position: int) -> CacheError:
    return CacheError(f"key {position} of a path, {keys[position].hex()[:12]}, does not follow the one before it")
