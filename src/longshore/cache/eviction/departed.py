"""Chunks that left a cache lately, and what was known of them: long memories in few bytes, without a search.

    bucket    │ a │ b │   │ c │ d │ ... 16        what leaves next is noted in the oldest place of its key's bucket
                        ▲ turn

A key is told apart by 32 bits beside its bucket: with 16, so many were taken for another's that hits were lost.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from longshore.boundary import Key
from longshore.cache.columns import sparse
from longshore.errors import CacheError

WAYS = 16
"""Places in a bucket."""

_ODD = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_LOW = (1 << 32) - 1

_Places = npt.NDArray[np.int64]
_Ticks = npt.NDArray[np.int32]
_States = npt.NDArray[np.uint16]


class Departed:
    """About the last `limit` chunks that left, less those that came back. 10 bytes each.

    Of each it is remembered when it was last used, and its state (a number from 1 to 65535), both as the caller counts.
    """

    __slots__ = ("_any", "_buckets", "_states", "_tags", "_turns", "_when")

    def __init__(self, limit: int) -> None:
        self._any = False
        """Whether anything has ever left."""
        self._buckets = max(1, limit // WAYS)
        places = self._buckets * WAYS
        self._tags, self._states = sparse(places, np.uint32), sparse(places, np.uint16)
        self._when, self._turns = sparse(places, np.int32), sparse(self._buckets, np.uint8)

    def __len__(self) -> int:
        return int(np.count_nonzero(self._states))

    def add(self, key: Key, when: int, state: int) -> tuple[int, int] | None:
        """`key`, which is not remembered, left; when that was used which is forgotten for it, and its state."""
        self._any = True
        bucket, tag = self._place_of(key)
        turn = int(self._turns[bucket])
        at = bucket * WAYS + turn
        old = int(self._states[at])
        forgotten = (int(self._when[at]), old) if old else None
        self._tags[at], self._when[at], self._states[at] = tag, when, state
        self._turns[bucket] = (turn + 1) % WAYS
        return forgotten

    def add_all(self, keys: Sequence[Key], when: _Ticks, states: _States) -> tuple[_Ticks, _States]:
        """The same for many different keys, which left in this order."""
        self._any = True
        buckets, tags = self._places_of(keys)
        order = np.argsort(buckets, kind="stable")
        sorted_, tags, when, states = buckets[order], tags[order], when[order], states[order]
        starts = np.flatnonzero(np.diff(sorted_, prepend=-1))
        counts = np.diff(starts, append=len(sorted_))
        turns = np.arange(len(sorted_)) - np.repeat(starts, counts)
        stay = turns >= np.repeat(counts, counts) - WAYS
        at = sorted_ * WAYS + (turns + self._turns[sorted_]) % WAYS
        self._turns[sorted_[starts]] = (self._turns[sorted_[starts]] + counts) % WAYS
        kept = at[stay]
        old = self._states[kept]
        gone = old > 0
        forgotten = (
            np.concatenate([self._when[kept[gone]], when[~stay]]),
            np.concatenate([old[gone], states[~stay]]),
        )
        self._tags[kept], self._when[kept], self._states[kept] = tags[stay], when[stay], states[stay]
        return forgotten

    def take(self, key: Key) -> tuple[int, int] | None:
        """When `key` was used, and its state, if it is remembered; it is forgotten now."""
        if not self._any:
            return None
        bucket, tag = self._place_of(key)
        first = bucket * WAYS
        tags = self._tags[first : first + WAYS].tolist()
        if tag in tags:
            for at, each in enumerate(tags, first):
                if each == tag and (state := int(self._states[at])):
                    self._states[at] = 0
                    return int(self._when[at]), state
        return None

    def take_all(self, keys: Sequence[Key], *, forget: bool = True) -> tuple[_Places, _Ticks, _States]:
        """Which of many different `keys` are remembered, by position, when they were used, and their states.

        They are forgotten now, unless told otherwise.
        """
        who, at = self._search(keys)
        at, first = np.unique(at, return_index=True)  # two keys may be taken for one
        order = np.argsort(first)
        at, who = at[order], who[first[order]]
        found = who, self._when[at], self._states[at]
        if forget:
            self._states[at] = 0
        return found

    def latest(self, keys: Sequence[Key]) -> int | None:
        """When the last one of `keys` that is remembered was used."""
        _, at = self._search(keys)
        return int(self._when[at[-1]]) if len(at) else None

    def everything(self) -> tuple[_Ticks, _States]:
        """When all that is remembered was used, and its states."""
        there = self._states > 0
        return self._when[there], self._states[there]

    def check_integrity(self) -> None:
        """Raise `CacheError` unless the next place of each bucket is one."""
        if len(self._turns) and int(self._turns.max()) >= WAYS:
            raise CacheError("a bucket of departures goes on behind its end")

    def _search(self, keys: Sequence[Key]) -> tuple[_Places, _Places]:
        """Which of `keys` are remembered, and their places."""
        if not keys or not self._any:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        buckets, tags = self._places_of(keys)
        places = self._tags.reshape(-1, WAYS)[buckets] == tags[:, None]
        places &= self._states.reshape(-1, WAYS)[buckets] > 0
        which = places.argmax(axis=1)
        who = np.flatnonzero(places[np.arange(len(keys)), which])
        return who, buckets[who] * WAYS + which[who]

    def _place_of(self, key: Key) -> tuple[int, int]:
        """The bucket of `key`, and what tells it apart there."""
        mixed = int.from_bytes(key[:8], "little") * _ODD & _MASK
        mixed = (mixed ^ mixed >> 32) * _ODD & _MASK
        return (mixed >> 32) * self._buckets >> 32, mixed & _LOW

    def _places_of(self, keys: Sequence[Key]) -> tuple[_Places, npt.NDArray[np.uint32]]:
        words, rest = divmod(len(keys[0]), 8) if keys else (0, 0)
        if not words or rest or list(map(len, keys)).count(words * 8) < len(keys):
            mixed = np.fromiter((int.from_bytes(key[:8], "little") for key in keys), np.uint64, len(keys))
        else:
            mixed = np.frombuffer(b"".join(keys), "<u8")[::words].astype(np.uint64)
        mixed = mixed * np.uint64(_ODD)
        mixed ^= mixed >> np.uint64(32)
        mixed *= np.uint64(_ODD)
        buckets = ((mixed >> np.uint64(32)) * np.uint64(self._buckets) >> np.uint64(32)).astype(np.int64)
        return buckets, mixed.astype(np.uint32)
