"""Chunks that left a cache lately, and what was known of them: long memories in few bytes, without a search.

    ring     ... │ a │ b │ c │    │ d │ e │ ...         what leaves next is noted in the oldest place
                       ▲   │         ▲
                       └───┘         │                  each place names an older one of the same hash, as in the
    heads    ... ────────────────────┘ ...              window of LZ77: a link to something younger has been overtaken

Keys are told apart by 32 bits of checksum alone. One in some hundred takes for another's at a million places: what is
remembered guides guesses, and no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

import numpy as np

from longshore.boundary import Key
from longshore.errors import CacheError


class Departed:
    """The last `limit` chunks that left, less those that came back. 17 to 21 bytes each, from the first one on.

    Of each it is remembered when it was last used, and how (a number from 1 to 255), both as the caller counts.
    """

    __slots__ = ("_before", "_heads", "_limit", "_mask", "_next", "_tags", "_uses", "_when", "count")

    def __init__(self, limit: int) -> None:
        self._limit = max(1, limit)
        self._mask = (1 << (self._limit - 1).bit_length()) - 1
        self._next = 0
        self.count = 0
        """Chunks that are remembered."""
        self._allocate(0, 0)

    def _allocate(self, places: int, heads: int) -> None:
        # Zeros of numpy take memory only where they are written to. Single numbers are read faster by `data`.
        self._tags, self._before = np.zeros(places, np.uint32), np.zeros(places, np.uint32)
        self._when, self._uses = np.zeros(places, np.int32), np.zeros(places, np.uint8)
        self._heads = np.zeros(heads, np.uint32)

    def add(self, key: Key, when: int, uses: int) -> None:
        """`key`, which is not remembered, left: it takes the place of the oldest."""
        self.add_all((key,), (when,), (uses,))

    def add_all(self, keys: Sequence[Key], when: Sequence[int], uses: Sequence[int]) -> None:
        """The same for many different keys, which left in this order."""
        if not len(self._tags):
            self._allocate(self._limit, self._mask + 1)
        tags, before, heads, last = self._tags.data, self._before.data, self._heads.data, self._when.data
        known, at, limit, count = self._uses.data, self._next, self._limit, self.count
        for key, then, use in zip(keys, when, uses, strict=True):
            tag = crc32(key)
            if not known[at]:
                count += 1
            tags[at], last[at], known[at] = tag, then, use
            head = tag & self._mask
            before[at] = heads[head]
            at += 1
            heads[head] = at  # one more than the place: 0 is none
            if at == limit:
                at = 0
        self._next, self.count = at, count

    def take_all(self, keys: Sequence[Key]) -> list[tuple[int, int, int]]:
        """Which of `keys` are remembered, by position, when they were used, and how; they are forgotten now."""
        found: list[tuple[int, int, int]] = []
        if not self.count:
            return found
        tags, before, heads = self._tags.data, self._before.data, self._heads.data
        when, uses, mask = self._when.data, self._uses.data, self._mask
        for position, key in enumerate(keys):
            tag = crc32(key)
            at, last = heads[tag & mask] - 1, -1
            while at >= 0:
                age = (self._next - 1 - at) % self._limit
                if age <= last:
                    break
                if tags[at] == tag and uses[at]:
                    found.append((position, when[at], uses[at]))
                    uses[at] = 0
                    break
                at, last = before[at] - 1, age
        self.count -= len(found)
        return found

    def check_integrity(self) -> None:
        """Raise `CacheError` unless what is remembered is counted."""
        noted = np.count_nonzero(self._uses)
        if noted != self.count:
            raise CacheError(f"{noted} departures are noted, {self.count} counted")
