"""Ghost lists: the chunks that were evicted last, in bounded memory and without a search.

`Ghosts` (for ARC) has their keys:

    ring     ... │ k7 │ k8 │    │ k2 │ k3 │ ...        the place written next holds the oldest
                             ▲ next

The newest key takes the place of the oldest. Keys find their place in 64 dictionaries, so that none takes long to grow;
the ring is an array that the garbage collector does not walk.

`GhostList` (for the default policy) has how each chunk was used, and a tag in place of its key. Eight bytes a chunk:

    bucket    │ a │ b │   │ c │ d │ ... 16 words        what is evicted next replaces the oldest of its key's bucket
                        ▲ next
    word      63 ... 33                32 ... 15               14 ... 0
              request of last use      tag of the key          state without its hint, 0 where the word is free

Hints have a column of their own, which takes memory once there was one: a byte more a chunk.

A key is told apart by 18 bits beside its bucket: of keys that are not in the list, one in 16,000 is taken for another.
The chunk evicted longest ago is replaced, not the one used longest ago: that lost up to .003 of all hits.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from longshore.boundary import Key
from longshore.cache.columns import has_duplicates, runs, sparse
from longshore.cache.eviction_policies.hit_rates import HINT, REQUEST
from longshore.errors import CacheError

_SHARDS = 64
_SHARD = _SHARDS - 1


class Ghosts:
    """The last `limit` keys evicted from each of two lists, 1 and 2, and not stored again. About 170 bytes each."""

    __slots__ = ("_next", "_place", "_rings", "counts")

    def __init__(self, limit: int) -> None:
        self._rings = tuple(np.empty(max(1, limit), object) for _ in range(3))
        self._place: list[dict[Key, int]] = [{} for _ in range(_SHARDS)]
        self._next = [0, 0, 0]
        self.counts = [0, 0, 0]
        """Number of keys, by the list that they were evicted from."""

    def add(self, key: Key, which: int) -> None:
        """Add `key`, evicted from list `which`, in place of the oldest key of that list."""
        at, ring = self._next[which], self._rings[which]
        oldest = ring[at]
        if oldest is None:
            self.counts[which] += 1
        else:
            del self._place[oldest[-1] & _SHARD][oldest]
        ring[at] = key
        self._place[key[-1] & _SHARD][key] = 4 * at + which
        at += 1
        self._next[which] = at if at < len(ring) else 0

    def add_all(self, keys: Sequence[Key], which: int) -> None:
        """`add` for many different keys, evicted in this order."""
        ring, places, start = self._rings[which], self._place, 0
        while start < len(keys):
            at = self._next[which]
            some = keys[start : start + len(ring) - at]
            end = at + len(some)
            oldest = [key for key in ring[at:end].tolist() if key is not None]
            for key in oldest:
                del places[key[-1] & _SHARD][key]
            place = 4 * at + which
            for key in some:
                places[key[-1] & _SHARD][key] = place
                place += 4
            ring[at:end] = some
            self.counts[which] += len(some) - len(oldest)
            self._next[which] = end if end < len(ring) else 0
            start += len(some)

    def among(self, keys: Sequence[Key]) -> npt.NDArray[np.bool_]:
        """Which of `keys` are in a ghost list."""
        if not any(self.counts):
            return np.zeros(len(keys), bool)
        places = self._place
        return np.array([key in places[key[-1] & _SHARD] for key in keys], bool)

    def take(self, key: Key) -> int:
        """Remove `key`; returns the list that it was evicted from, 0 if it is in none."""
        place = self._place[key[-1] & _SHARD].pop(key, 0)
        if not place:
            return 0
        which = place & 3
        self._rings[which][place >> 2] = None
        self.counts[which] -= 1
        return which

    def check_integrity(self) -> None:
        """Raise `CacheError` unless rings, places and counts agree."""
        placed = {key: place for places in self._place for key, place in places.items()}
        found = [
            (key, 4 * at + which)
            for which, ring in enumerate(self._rings)
            for at, key in enumerate(ring)
            if key is not None
        ]
        counts = [sum(place & 3 == which for _, place in found) for which in range(3)]
        if placed != dict(found) or len(placed) != len(found) or counts != self.counts:
            seen = f"{counts} in the rings and {len(placed)} places"
            raise CacheError(f"internal error: ghost lists: counted {self.counts} keys, found {seen}")


WAYS = 16
"""Words in a bucket."""

_FEW = 12
"""Below this number of keys, a loop is faster than array operations."""

_GHOST_WHEN, _TAG = 33, 15
_TAGS, _STATES = (1 << _GHOST_WHEN - _TAG) - 1, (1 << _TAG) - 1
_HINT_BITS = REQUEST - HINT
_BELOW, _HINT, _ABOVE = (1 << HINT) - 1, (1 << REQUEST) - (1 << HINT), _STATES & ~((1 << HINT) - 1)
"""Bits of a state below the hint, and of the hint; and those above the hint, where they are in a word."""
_ODD = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_ODD64, _HALF64, _TAG64, _TAGS64, _TAG_BITS64 = map(np.uint64, (_ODD, 32, _TAG, _TAGS, _TAGS << _TAG))

_Places = npt.NDArray[np.int64]
_Ticks = npt.NDArray[np.int32]
_States = npt.NDArray[np.uint32]
_Words = npt.NDArray[np.uint64]
Keys: TypeAlias = "Sequence[Key] | npt.NDArray[Any]"
"""Keys, or an array of them as `KeyTable` has them."""


class GhostList:
    """About the last `limit` chunks that were evicted, less those that came back.

    Of each it keeps the request of its last use (31 bits) and its state (see `OUT`).
    """

    __slots__ = ("_any", "_buckets", "_hinted", "_hints", "_next")

    def __init__(self, limit: int) -> None:
        self._any = False
        """Whether anything was ever inserted."""
        self._hinted = False
        """Whether any of them had a hint."""
        self._next = sparse(max(1, limit // WAYS), np.uint8)
        """The word of each bucket that is replaced next."""
        self._buckets: _Words = sparse(max(1, limit // WAYS) * WAYS, np.uint64).reshape(-1, WAYS)
        self._hints: npt.NDArray[np.uint8] = sparse(self._buckets.size, np.uint8)

    def __len__(self) -> int:
        return int(np.count_nonzero(self._buckets))

    def insert(self, key: Key, when: int, state: int) -> tuple[int, int] | None:
        """`key`, which is not in the list, was evicted; the last use and state of the chunk that it replaces."""
        self._any = True
        bucket, tag = self._place_of(key)
        at = int(self._next[bucket])
        place = bucket * WAYS + at
        old, hint = int(self._buckets[bucket, at]), int(self._hints[place]) if self._hinted else 0
        self._buckets[bucket, at] = when << _GHOST_WHEN | tag << _TAG | _low(state)
        if self._hinted or state & _HINT:
            self._hinted, self._hints[place] = True, (state & _HINT) >> HINT
        self._next[bucket] = (at + 1) % WAYS
        return (old >> _GHOST_WHEN, _state(old & _STATES, hint)) if old else None

    def insert_all(self, keys: Keys, when: _Ticks, states: _States) -> tuple[_Ticks, _States]:
        """`insert` of many different keys, which were evicted in this order; what they replace."""
        self._any = True
        buckets, tags = self._places_of(keys)
        words = when.astype(np.uint64) << _GHOST_WHEN | tags << _TAG | _low(states)
        order = np.argsort(buckets, kind="stable")
        buckets, words, hints = buckets[order], words[order], ((states & _HINT) >> HINT)[order].astype(np.uint8)
        starts, counts = runs(buckets)
        place = np.arange(len(buckets)) - np.repeat(starts, counts)
        stay = place >= np.repeat(counts, counts) - WAYS  # of more than a bucket has room for
        at = buckets * WAYS + (place + self._next[buckets]) % WAYS
        self._next[buckets[starts]] = (self._next[buckets[starts]] + counts) % WAYS
        at, every = at[stay], self._buckets.reshape(-1)
        old, every[at] = every[at], words[stay]
        before = hints[stay]
        if self._hinted or np.count_nonzero(hints):
            self._hinted, before, self._hints[at] = True, self._hints[at], before
        there = old > 0
        return _unpacked(np.concatenate([old[there], words[~stay]]), np.concatenate([before[there], hints[~stay]]))

    def take_all(self, keys: Keys, *, forget: bool = True) -> list[tuple[int, int, int]]:
        """What is known of many different `keys`, in runs: how many, their last use and their state, 0 if unknown.

        They are no longer in the list, unless told otherwise.
        """
        if not self._any:
            return [(len(keys), 0, 0)] if len(keys) else []
        if len(keys) < _FEW:
            if isinstance(keys, np.ndarray):
                keys = keys.tolist()
            return [(len(list(same)), *left) for left, same in groupby(self._take(key, forget=forget) for key in keys)]
        who, at = self._search(keys)
        if not len(who):
            return [(len(keys), 0, 0)]
        if has_duplicates(at):  # two keys may be taken for one
            at, first = np.unique(at, return_index=True)
            who = who[first]
        words, found = self._buckets.reshape(-1), np.zeros(len(keys), np.uint64)
        # The hint takes the place of the tag.
        found[who] = words[at] & ~np.uint64(_TAGS << _TAG) | self._hints[at].astype(np.uint64) << np.uint64(_TAG)
        if forget:
            words[at] = 0
        starts, counts = runs(found)
        hints = (found[starts] >> np.uint64(_TAG) & np.uint64(_TAGS)).astype(np.uint8)
        when, states = (each.tolist() for each in _unpacked(found[starts], hints))
        return list(zip(counts.tolist(), when, states, strict=True))

    def _take(self, key: Key, *, forget: bool) -> tuple[int, int]:
        bucket, tag = self._place_of(key)
        for at, word in enumerate(self._buckets[bucket].tolist()):
            if word >> _TAG & _TAGS == tag and word:
                if forget:
                    self._buckets[bucket, at] = 0
                hint = int(self._hints[bucket * WAYS + at]) if self._hinted else 0
                return word >> _GHOST_WHEN, _state(word & _STATES, hint)
        return 0, 0

    def latest(self, keys: Sequence[Key]) -> int | None:
        """The last use of the last of `keys` that is in the list."""
        _, at = self._search(keys)
        return int(self._buckets.reshape(-1)[at[-1]]) >> _GHOST_WHEN if len(at) else None

    def everything(self) -> tuple[_Ticks, _States]:
        """The last uses and the states of all that is in the list."""
        words = self._buckets.reshape(-1)
        return _unpacked(words[words > 0], self._hints[words > 0])

    def _search(self, keys: Keys) -> tuple[_Places, _Places]:
        """Which of `keys` are in the list, and their places."""
        if not len(keys) or not self._any:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        buckets, tags = self._places_of(keys)
        words = self._buckets.take(buckets, axis=0)
        same = words & _TAG_BITS64 == (tags << _TAG64)[:, None]
        if np.count_nonzero(tags) < len(tags):  # as an empty word has
            same &= words > 0
        who, which = same.nonzero()
        if len(who) > 1:  # one key may be taken for two chunks
            first, _ = runs(who)
            who, which = who[first], which[first]
        return who, buckets[who] * WAYS + which

    def _place_of(self, key: Key) -> tuple[int, int]:
        """The bucket of `key`, and what tells it apart there."""
        mixed = int.from_bytes(key[:8], "little") * _ODD & _MASK
        mixed = (mixed ^ mixed >> 32) * _ODD & _MASK
        return (mixed >> 32) * len(self._buckets) >> 32, mixed & _TAGS

    def _places_of(self, keys: Keys) -> tuple[_Places, _Words]:
        if isinstance(keys, np.ndarray) and (keys.dtype.kind != "V" or keys.itemsize % 8):
            keys = keys.tolist()
        words, rest = (0, 0) if isinstance(keys, np.ndarray) or not keys else divmod(len(keys[0]), 8)
        if isinstance(keys, np.ndarray):
            mixed = keys.view("<u8")[:: keys.itemsize // 8].astype(np.uint64)
        elif not words or rest or list(map(len, keys)).count(words * 8) < len(keys):
            mixed = np.fromiter((int.from_bytes(key[:8], "little") for key in keys), np.uint64, len(keys))
        else:
            mixed = np.frombuffer(b"".join(keys), "<u8")[::words].astype(np.uint64)
        mixed *= _ODD64
        mixed ^= mixed >> _HALF64
        mixed *= _ODD64
        buckets = ((mixed >> _HALF64) * np.uint64(len(self._buckets)) >> _HALF64).astype(np.int64)
        return buckets, mixed & _TAGS64


def _unpacked(words: _Words, hints: npt.NDArray[np.uint8]) -> tuple[_Ticks, _States]:
    states = (words & _STATES).astype(np.uint32)
    return (words >> _GHOST_WHEN).astype(np.int32), _state(states, hints.astype(np.uint32))


def _low(state: Any) -> Any:
    """A state without its hint."""
    return state & _BELOW | (state >> _HINT_BITS) & _ABOVE


def _state(low: Any, hint: Any) -> Any:
    """The state that consists of these."""
    return low & _BELOW | hint << HINT | (low & _ABOVE) << _HINT_BITS
