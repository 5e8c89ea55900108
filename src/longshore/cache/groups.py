"""Lookups over several KV cache groups: the longest prefix that every group can serve.

                          prefix end ─┐
    full attention   ■ ■ ■ ■ ■ ■ ■ ■ ■ │       every chunk
    sliding window               ■ ■ ■ │       the chunks of the last `window` tokens; older ones may be missing
    recurrent                        ■ │       the last one, which has the state at its end

A chunk can be served if the device has it, or a tier has a ready copy. With full attention, a served chunk implies its
ancestors, so bisection finds the end. In other groups the search goes backwards: a missing chunk excludes every length
that needs it, so the next length to try ends before it, and no key is looked up twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from longshore.boundary import Key
from longshore.cache.columns import leading
from longshore.cache.index import Index, Residency
from longshore.cache.partial import Partial, PartialPrefixes, Text
from longshore.cache.settings import CacheGroup, Retention
from longshore.errors import CacheError

UNTOLD = -(1 << 30)
"""`GroupKeys.first` of a lookup whose host does not say what is before its keys."""


class GroupKeys(NamedTuple):
    """Chunks of one KV cache group of a request, as the methods of `TieredCache` take them.

    Attributes:
        keys: The path from the first chunk of the prompt on; or single chunks, for a lookup with `each` and a load
            without a lease. The `Residency` of a lookup saves that load another search.
        first: Position of the first chunk to look up or store. The engine has the chunks before it. `UNTOLD` in a
            lookup of one path: the index knows what is before the first key.
        device: For a lookup of all groups: whether the device has each chunk, from the first on (a numpy array is
            fastest). False for chunks beyond its end.
        text: The tokens, for partial matches (`CacheSettings.partial`).
        prompt: For a store: position of the first chunk of the answer; `None` if all are of the prompt.
        retention: For a store: priorities and times to live.
        slid: For a store: chunks that the sliding window has moved past, from an engine that does not store whole
            paths. They are evicted first, unless a lookup was served from them. Keys in no tier are ignored.
    """

    keys: Sequence[Key] | Residency
    first: int = 0
    device: Sequence[bool] | None = None
    text: Text | None = None
    prompt: int | None = None
    retention: Sequence[Retention] = ()
    slid: Sequence[Key] = ()

    @property
    def names(self) -> Sequence[Key]:
        """The keys, also of a `Residency`."""
        return self.keys if isinstance(self.keys, Sequence) else self.keys.keys


class Need(NamedTuple):
    """What a prefix needs of one group: the chunks `[first, end)`, of which those at `load` come from the tiers.

    With `partial`, also the first tokens of another chunk, behind them.
    """

    first: int
    end: int
    load: tuple[int, ...]
    partial: Partial | None = None


class GroupSearch:
    """The search for the longest served prefix in one group, whose chunks have `chunk_tokens` tokens each."""

    def __init__(
        self, index: Index, partials: PartialPrefixes, group: CacheGroup, chunk_tokens: int, wanted: GroupKeys
    ) -> None:
        self.keys, device = wanted.names, () if wanted.device is None else wanted.device
        if len(device) > len(self.keys):
            raise CacheError(f"device: expected at most {len(self.keys)} values, one for each key, got {len(device)}")
        self.text = None if wanted.text is None else wanted.text.checked()
        self.group = group
        self.chunk_tokens = chunk_tokens
        self.last_window = group.first_needed(len(self.keys) * chunk_tokens, chunk_tokens)
        """The first chunk that would be needed if all of them were served."""
        self._index = index
        self._partials = partials
        self._device = np.zeros(len(self.keys), bool)
        self._device[: len(device)] = np.asarray(device, bool)
        self._clear = len(self.keys)  # chunks from here on that were examined are served

    def longest(self, tokens: int) -> int:
        """An upper bound of the longest served prefix, at most `tokens`; equal to `tokens` if that is served."""
        end = tokens // self.chunk_tokens
        missing = self._missing(self.group.first_needed(tokens, self.chunk_tokens), end)
        return tokens if missing is None else missing * self.chunk_tokens

    def beyond(self, tokens: int, most: int) -> int:
        """How many tokens behind a served prefix of `tokens` are served, with a partial chunk; at most `most`."""
        if self.text is None or self.group.recurrent:
            return 0
        at, size = tokens // self.chunk_tokens, self.chunk_tokens
        while at * size < tokens + most and self._serves(at):
            at += 1
        near = self._partials.closest(self.keys, at, self.text, size) if at <= len(self.keys) else None
        return min(most, at * size - tokens + (near.tokens if near else 0))

    def need(self, tokens: int) -> Need:
        """What a served prefix of `tokens` tokens needs of this group."""
        first, end = self.group.first_needed(tokens, self.chunk_tokens), tokens // self.chunk_tokens
        load = first + np.flatnonzero(~self._device[first:end])
        return Need(first, end, tuple(load.tolist()), self._partial(end, tokens % self.chunk_tokens))

    def _partial(self, at: int, tokens: int) -> Partial | None:
        """Where the first `tokens` tokens of the chunk at `at` come from, if any are needed."""
        if not tokens or self.text is None:
            return None
        if self._serves(at):
            return Partial(self.keys[at], tokens, bool(self._device[at]))
        near = self._partials.closest(self.keys, at, self.text, self.chunk_tokens)
        return near and near._replace(tokens=tokens)

    def _serves(self, at: int) -> bool:
        """Whether the chunk at `at` is on the device, or can be read from a tier."""
        return at < len(self.keys) and bool(self._device[at] or self._index.is_readable(self.keys[at]))

    def _missing(self, first: int, end: int) -> int | None:
        """The last chunk of `[first, end)` that is not served, of those examined; `None` if all are served."""
        if not self.group.alone:
            ready = self._index.reachable_prefix(self.keys[:end], 0)
            ready += leading(self._device[ready:end])
            if self._index.orphans and 0 < ready < end and self._device[:ready].all():
                ready = self._index.reachable_prefix(self.keys[:end], ready)
                ready += leading(self._device[ready:end])
            return None if ready >= end else ready
        at = min(self._clear, end)
        while at > first and self._serves(at - 1):
            at -= 1
        self._clear = at
        return None if at <= first else at - 1


def longest_served(paths: Sequence[GroupSearch]) -> int:
    """The longest prefix, in tokens, that every one of `paths` serves.

    It is a multiple of the chunk sizes of all groups, plus, for partial matches, fewer tokens than another multiple.
    """
    unit = math.lcm(*(path.chunk_tokens for path in paths))
    tokens = min(len(path.keys) * path.chunk_tokens for path in paths) // unit * unit
    while True:
        shorter = tokens
        for path in paths:
            shorter = path.longest(shorter) // unit * unit
        if shorter == tokens:
            return tokens + min(path.beyond(tokens, unit - 1) for path in paths)
        tokens = shorter


def runs_of(positions: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Runs of consecutive numbers in the ascending `positions`: start and end index of each."""
    if not positions:
        return
    if positions[-1] - positions[0] == len(positions) - 1:
        yield 0, len(positions)
        return
    ends = np.flatnonzero(np.diff(positions) != 1) + 1
    starts = [0, *ends.tolist(), len(positions)]
    yield from pairwise(starts)


def check_paths(paths: Mapping[int, GroupKeys]) -> None:
    """Raise `CacheError` unless `paths` are `GroupKeys` by number of group, with keys in order."""
    if not isinstance(paths, Mapping) or any(type(group) is not int for group in paths):
        raise CacheError(f"expected keys by number of KV cache group, got {_brief(paths)}")
    for group, path in paths.items():
        if not isinstance(path, GroupKeys) or not isinstance(path.keys, Sequence | Residency):
            raise CacheError(f"group {group}: expected GroupKeys with a sequence of keys, got {_brief(path)}")
        if type(path.first) is not int or not (path.prompt is None or type(path.prompt) is int):
            raise CacheError(f"group {group}: expected integers, got first={path.first!r}, prompt={path.prompt!r}")


def check_blocks(blocks: Mapping[int, Sequence[int]], groups: Iterable[int]) -> Mapping[int, Sequence[int]]:
    """`blocks`, checked. Raises `CacheError` unless they are sequences by number of one of `groups`."""
    if not isinstance(blocks, Mapping) or not all(isinstance(each, Sequence) for each in blocks.values()):
        raise CacheError(f"expected sequences of device blocks by number of KV cache group, got {_brief(blocks)}")
    if unknown := {group for group, mine in blocks.items() if len(mine)}.difference(groups):
        raise CacheError(f"got device blocks of groups {list(unknown)}, but no chunks of these")
    return blocks


def check_distinct(keys: Sequence[Key]) -> None:
    """Raise `CacheError` unless all keys of a request are distinct."""
    if len(set(keys)) != len(keys):
        raise CacheError(f"expected {len(keys)} distinct keys over all groups, got {len(set(keys))}")


def _brief(value: object) -> str:
    return f"{value!r:.60}"
