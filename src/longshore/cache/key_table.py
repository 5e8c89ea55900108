"""The key of each node, and the node of each key: a hash table in arrays.

    hash(key) ─► bucket ─ first ─► node 17 ─ following ─► node 9        `before` is the reverse link
                                   rows[17], the key                    before[17] is ~bucket

A key of 32 bytes takes 44 to 48 bytes, about a third of what an entry of a dictionary takes with its key and number.
Nothing grows: there are as many places as nodes. Digests have one length; keys of several lengths are separate objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from longshore.boundary import Key
from longshore.cache.columns import column, zeros
from longshore.errors import CacheError

_FEW = 24
"""From this number of keys on, array operations are faster than a loop."""

At = npt.NDArray[np.int32]


class KeyTable:
    """Keys by node, for nodes from 1 to below `size`; reads like an array of them, with `None` for nodes without."""

    __slots__ = ("_before", "_count", "_first", "_following", "_mask", "_rows")

    def __init__(self, size: int) -> None:
        self._rows: npt.NDArray[Any] = np.empty(size, "V1")
        self._following, self._before = zeros(size), zeros(size)
        """The next and the previous node of the same bucket; the first one has `~bucket`, nodes without a key 0."""
        self._count = 0
        self._begin(size)

    def _begin(self, size: int) -> None:
        self._mask = (1 << (size - 1).bit_length()) - 1
        self._first = zeros(self._mask + 1)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, which: int) -> Any: ...
    @overload
    def __getitem__(self, which: Sequence[int] | npt.NDArray[np.integer[Any]]) -> npt.NDArray[Any]: ...
    def __getitem__(self, which: Any) -> Any:
        """The key of a node, or `None`; the keys of several nodes, which have one, as an array (`tolist`: bytes)."""
        if isinstance(which, (int, np.integer)):
            return self._rows.item(which) if self._before[which] else None
        return self._rows.take(np.asarray(which, np.intp))

    def has(self, at: At) -> npt.NDArray[np.bool_]:
        """Whether each of the nodes `at` has a key."""
        found: npt.NDArray[np.bool_] = column(self._before)[at] != 0
        return found

    def nodes(self) -> At:
        """All nodes with a key, ascending."""
        return np.flatnonzero(column(self._before)).astype(np.int32)

    def get(self, key: Key) -> int:
        """The node of `key`; 0 for none. Raises `CacheError` if it is not bytes."""
        if not key or not isinstance(key, bytes):
            raise no_key(key)
        node = self._first[hash(key) & self._mask]
        item, following = self._rows.item, self._following
        while node and item(node) != key:
            node = following[node]
        return node

    def find(self, keys: Sequence[Key]) -> list[int]:
        """`get` for many."""
        if len(keys) < _FEW:
            return list(map(self.get, keys))
        found: list[int] = self.find_all(keys).tolist()
        return found

    def find_all(self, keys: Sequence[Key]) -> At:
        """`get` for many, as an array."""
        try:
            lengths = set(map(len, keys))
            if len(lengths) > 1 or 0 in lengths:
                return np.array([self.get(key) for key in keys], np.int32)
            found = column(self._first).take(self._buckets(keys))
            wanted = self._column(keys, max(lengths, default=1))
        except TypeError:
            raise no_key(next(key for key in keys if not isinstance(key, bytes))) from None
        if wanted.dtype != self._rows.dtype:
            return np.zeros(len(keys), np.int32)
        left = np.flatnonzero(found)  # positions whose node is not known to be the right one
        while len(left):
            at = found.take(left)
            left = left[self._rows.take(at) != wanted.take(left)]
            found[left] = column(self._following).take(found.take(left))
            left = left[found.take(left) != 0]
        return found

    def insert(self, at: At, keys: Sequence[Key] | npt.NDArray[Any]) -> None:
        """Give each of the nodes `at`, which have none, its key. They are distinct, and in no table."""
        names = keys.tolist() if isinstance(keys, np.ndarray) else keys
        lengths = set(map(len, names))
        if not self._count and len(lengths) == 1:
            if lengths != {self._rows.itemsize} or self._rows.dtype == object:
                self._rows = np.empty(len(self._rows), f"V{max(lengths)}")
        elif self._rows.dtype != object and lengths != {self._rows.itemsize}:
            self._rows = self._rows.astype(object)
        same = isinstance(keys, np.ndarray) and keys.dtype == self._rows.dtype
        self._rows[at] = keys if same else self._column(names, self._rows.itemsize)
        self._count += len(at)
        self._link(at, self._buckets(names))

    def _column(self, keys: Sequence[Key], length: int) -> npt.NDArray[Any]:
        """`keys` as an array of what the table has, for digests of this `length`."""
        if self._rows.dtype != object:
            return np.frombuffer(b"".join(keys), np.dtype((np.void, length)))
        of = np.empty(len(keys), object)
        of[:] = keys
        return of

    def _buckets(self, keys: Sequence[Key]) -> npt.NDArray[np.int64]:
        return np.fromiter(map(hash, keys), np.int64, len(keys)) & self._mask

    def _link(self, at: At, buckets: npt.NDArray[np.int64]) -> None:
        if len(at) >= _FEW:
            # The first of each bucket together, the others one by one.
            order = np.argsort(buckets, kind="stable")
            other = np.zeros(len(at), bool)
            other[order[1:]] = buckets[order[1:]] == buckets[order[:-1]]
            some, into = at[~other], buckets[~other]
            after = column(self._first)[into]
            column(self._following)[some] = after
            column(self._before)[some] = ~into
            column(self._first)[into] = some
            linked = after > 0
            column(self._before)[after[linked]] = some[linked]
            at, buckets = at[other], buckets[other]
        first, following, before = self._first, self._following, self._before
        for node, bucket in zip(at.tolist(), buckets.tolist(), strict=True):
            after = following[node] = first[bucket]
            before[node] = ~bucket
            first[bucket] = node
            if after:
                before[after] = node

    def remove(self, nodes: Sequence[int]) -> None:
        """Remove the keys of `nodes`, which have one."""
        first, following, before = self._first, self._following, self._before
        for node in nodes:
            above, after = before[node], following[node]
            if above > 0:
                following[above] = after
            else:
                first[~above] = after
            if after:
                before[after] = above
            before[node] = 0
        self._count -= len(nodes)

    def grow(self, size: int) -> None:
        """Make room for nodes below `size`."""
        more = size - len(self._rows)
        if more <= 0:
            return
        self._rows = np.concatenate([self._rows, np.empty(more, self._rows.dtype)])
        self._following.extend(zeros(more))
        self._before.extend(zeros(more))
        if size > len(self._first):
            at = self.nodes()
            self._begin(size)
            self._link(at, self._buckets(self._rows.take(at).tolist()))

    def check_integrity(self) -> None:
        """Raise `CacheError` unless each node with a key is found in its bucket, and only there."""
        at = self.nodes()
        following, before = column(self._following)[at], column(self._before)[at]
        is_first = before < 0
        above = np.where(is_first, column(self._first)[~before * is_first], column(self._following)[before * ~is_first])
        linked = following > 0
        behind = column(self._before)[following[linked]]
        if len(at) != self._count or (above != at).any() or (behind != at[linked]).any():
            raise CacheError(f"the table of keys has {len(at)} nodes, counts {self._count}, or has damaged links")
        if (found := self.find_all(self._rows.take(at).tolist())).tolist() != at.tolist():
            node = at[found != at][0]
            raise CacheError(f"chunk {self[int(node)].hex()[:12]} is not found by its key")


def no_key(key: object) -> CacheError:
    """The error for what is no key."""
    return CacheError(f"expected a key as a digest (non-empty bytes), got {key!r}")
