"""Chunks that left a cache lately, and what was known of them: long memories in few bytes, without a search.

    ring     ... │ a │ b │ c │    │ d │ e │ ...         what leaves next is noted in the oldest place
                       ▲   │         ▲
                       └───┘         │                  each place names an older one of the same hash, as in the
    heads    ... ────────────────────┘ ...              window of LZ77: a link to something younger has been overtaken

Keys, which are digests, are told apart by their first four bytes alone. At a million places one in some thousand takes
for another's: what is remembered guides guesses, and no more.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from longshore.boundary import Key
from longshore.cache.columns import sparse
from longshore.errors import CacheError

_FEW = 24
"""So many chains are sooner followed one by one."""

_TAG = 4
"""Bytes of a key that are remembered."""

_Places = npt.NDArray[np.int64]


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
        # Single numbers are read faster by `data`.
        self._tags, self._before = sparse(places, np.uint32).data, sparse(places, np.uint32).data
        self._when, self._uses = sparse(places, np.int32).data, sparse(places, np.uint8).data
        self._heads = sparse(heads, np.uint32).data

    def add(self, key: Key, when: int, uses: int) -> None:
        """`key`, which is not remembered, left: it takes the place of the oldest."""
        if not len(self._tags):
            self._allocate(self._limit, self._mask + 1)
        at, tag = self._next, _tag_of(key)
        head = tag & self._mask
        if not self._uses[at]:
            self.count += 1
        self._tags[at], self._when[at], self._uses[at] = tag, when, uses
        self._before[at] = self._heads[head]
        at += 1
        self._heads[head] = at  # one more than the place: 0 is none
        self._next = at if at < self._limit else 0

    def add_all(self, keys: Sequence[Key], when: npt.ArrayLike, uses: npt.ArrayLike) -> None:
        """The same for many different keys, which left in this order: by whole arrays, at most once around the ring."""
        if not len(self._tags):
            self._allocate(self._limit, self._mask + 1)
        tags, then, use = _tags_of(keys), np.asarray(when, np.int32), np.asarray(uses, np.uint8)
        for start in range(0, len(keys), self._limit):
            some = slice(start, start + self._limit)
            self._add_round(tags[some], then[some], use[some])

    def _add_round(self, tags: _Places, when: npt.NDArray[np.int32], uses: npt.NDArray[np.uint8]) -> None:
        at = self._next + np.arange(len(tags))
        at[at >= self._limit] -= self._limit
        known, heads = np.asarray(self._uses), np.asarray(self._heads)
        self.count += len(tags) - int(np.count_nonzero(known[at]))
        np.asarray(self._tags)[at], np.asarray(self._when)[at], known[at] = tags, when, uses
        head = tags & self._mask
        np.asarray(self._before)[at] = heads[head]
        heads[head] = at + 1
        overtaken = heads[head] != at + 1
        if overtaken.any():
            self._link(at[overtaken].tolist(), head[overtaken].tolist())
        self._next = (self._next + len(tags)) % self._limit

    def _link(self, places: Sequence[int], hashes: Sequence[int]) -> None:
        """These were noted together with younger ones of their hashes: each of those leads to the one before it."""
        before, last = self._before, dict[int, int]()
        for place, hash_ in zip(places, hashes, strict=True):
            if hash_ in last:
                before[place] = last[hash_] + 1
            last[hash_] = place
        for hash_, place in last.items():
            before[self._heads[hash_] - 1] = place + 1

    def take(self, key: Key) -> tuple[int, int] | None:
        """When `key` was used, and how, if it is remembered; it is forgotten now."""
        if not self.count:
            return None
        tag = _tag_of(key)
        at = self._search(tag, self._heads[tag & self._mask] - 1, -1)
        if at < 0:
            return None
        use = self._uses[at]
        self._uses[at] = 0
        self.count -= 1
        return self._when[at], use

    def take_all(self, keys: Sequence[Key]) -> list[tuple[int, int, int]]:
        """Which of many `keys` are remembered, by position, when they were used, and how; they are forgotten now."""
        if not self.count:
            return []
        places = self._search_all(_tags_of(keys))
        who = np.flatnonzero(places >= 0)
        at, uses = places[who], np.asarray(self._uses)
        found = list(zip(who.tolist(), np.asarray(self._when)[at].tolist(), uses[at].tolist(), strict=True))
        uses[at] = 0
        self.count -= len(set(at.tolist()))  # two keys may begin alike
        return found

    def _search(self, tag: int, at: int, last: int) -> int:
        """The place of `tag`, by the links from place `at` on, which is older than `last`; or -1."""
        tags, uses, before, mask = self._tags, self._uses, self._before, self._mask
        youngest, limit = self._next - 1, self._limit
        while at >= 0:
            age, other = (youngest - at) % limit, tags[at] ^ tag
            if age <= last or other & mask:
                break
            if not other and uses[at]:
                return at
            at, last = before[at] - 1, age
        return -1

    def _search_all(self, tags: _Places) -> _Places:
        """`_search` from the heads on: all links of a length are followed at once, until few chains are left."""
        noted, uses, before = np.asarray(self._tags), np.asarray(self._uses), np.asarray(self._before)
        places, who, last = np.full(len(tags), -1), np.arange(len(tags)), np.full(len(tags), -1)
        at = np.asarray(self._heads)[tags & self._mask].astype(np.int64) - 1
        while len(who) > _FEW:
            age, other = (self._next - 1 - at) % self._limit, noted[at] ^ tags[who]
            linked = (at >= 0) & (age > last) & (other & self._mask == 0)
            found = linked & (other == 0) & (uses[at] > 0)
            places[who[found]] = at[found]
            further = linked & ~found
            who, last = who[further], age[further]
            at = before[at[further]].astype(np.int64) - 1
        for each, tag, place, age in zip(who.tolist(), tags[who].tolist(), at.tolist(), last.tolist(), strict=True):
            places[each] = self._search(tag, place, age)
        return places

    def check_integrity(self) -> None:
        """Raise `CacheError` unless what is remembered is counted."""
        noted = np.count_nonzero(self._uses)
        if noted != self.count:
            raise CacheError(f"{noted} departures are noted, {self.count} counted")


def _tag_of(key: Key) -> int:
    """The first bytes of `key`."""
    return int.from_bytes(key[:_TAG], "little")


def _tags_of(keys: Sequence[Key]) -> _Places:
    """The same of each key, at once where all are equally long, in whole words."""
    words, rest = divmod(len(keys[0]), _TAG) if keys else (0, 0)
    if not words or rest or list(map(len, keys)).count(words * _TAG) < len(keys):
        return np.fromiter(map(_tag_of, keys), np.int64, len(keys))
    return np.frombuffer(b"".join(keys), "<u4")[::words].astype(np.int64)
