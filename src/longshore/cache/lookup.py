"""What becomes of a path of keys: how far it is known, how far it can be read, and whether it is a path at all.

    known       some tier has it, or will have it             A ── B ── C ── D ── E
    readable    so can be everything before it                A ── B ── C

Both lead without a gap from the first chunk on, so the end of each is found by bisection, whatever the length. Behind
an orphan, which only those can use who have what is before it, one chunk is looked at after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import numpy as np
import numpy.typing as npt

from longshore.boundary import Key
from longshore.cache.columns import column, numbers
from longshore.cache.nodes import ADRIFT, ROOT, ROOTED, Nodes
from longshore.errors import CacheError


class Lookup(Nodes):
    """Questions about paths of keys."""

    __slots__ = ()

    def reachable_prefix(self, keys: Sequence[Key], first: int) -> int:
        """How many of `keys` lead without a gap to the deepest that can be read, but at least `first`; by bisection.

        From `first` on that may be an orphan, and what follows it: whoever asks has what is before.

        Raises `CacheError` if what is found shows that `keys` is no path.
        """
        low, high, reachable = first, len(keys), self.reachable
        while low < high:
            middle = (low + high) // 2
            node = self._at(keys, middle)
            if node and reachable[node] == ROOTED:
                low = middle + 1
            else:
                high = middle
        if self.orphans and low == first:
            while low < len(keys) and reachable[node := self.get(keys[low])] == ADRIFT:
                self.check_link(keys, low)
                low += 1
        return low

    def known_prefix(self, keys: Sequence[Key], first: int) -> int:
        """The same for chunks that some tier has, or will have, none of them behind an orphan."""
        low, high = first, len(keys)
        while low < high:
            middle = (low + high) // 2
            if (node := self._at(keys, middle)) and self.depth[node] >= 0:
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
            if path and (self.parent[path[0]] != before or self.key[path].tolist() != list(keys[first:end])):
                raise _broken(keys, first)
            if self.orphans:
                path += self._follow_adrift(keys, end)
                end = first + len(path)
            rest, shards = keys[end:], self._shards
            for key in rest:
                if key in shards[key[0]] and self.depth[self.get(key)] >= 0:
                    raise _broken(keys, keys.index(key, first))
        except (IndexError, TypeError):
            raise CacheError("the keys of a path are digests in bytes") from None
        if len(set(rest)) != len(rest):
            raise CacheError(f"the {len(rest)} new keys of a path differ, only {len(set(rest))} do")
        return path

    def _follow_adrift(self, keys: Sequence[Key], first: int) -> list[int]:
        """The nodes of `keys[first:]` that lead, of which none is in its place from the first chunk on.

        Raises `CacheError` if one of the others, too, does not follow the key before it.
        """
        nodes = self.find(keys[first:])
        for position, node in enumerate(nodes, first):
            if node:
                self.check_link(keys, position)
        return list(takewhile(bool, nodes))

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
        return self.reachable[node] == ROOTED if (node := self.get(key)) else False

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
        before = self.orphans.get(node) if self.orphans else None
        if node and (before or self.key[self.parent[node]]) != (keys[position - 1] if position else None):
            raise _broken(keys, position)
        return node

    def _at(self, keys: Sequence[Key], position: int) -> int:
        key = keys[position]
        node = self.get(key)
        if node and self.depth[node] != position and self.depth[node] >= 0:
            raise _broken(keys, position)
        return node


def _broken(keys: Sequence[Key], position: int) -> CacheError:
    return CacheError(f"key {position} of a path, {keys[position].hex()[:12]}, does not follow the one before it")
