"""KV cache groups: what the next token needs of each, and the longest prefix at which all of them are served.

                       matched length ─┐
    full attention   ■ ■ ■ ■ ■ ■ ■ ■ ■ │       every chunk
    sliding window               ■ ■ ■ │       the chunks that cover the last `window` tokens; older ones may be gone
    recurrent                        ■ │       the last one, whose state is that of its end

A chunk is served that the device has, or of which a tier has a ready copy. What is served of a path with full attention
is closed, so that its end is found by bisection. Elsewhere the search goes back from the end: a chunk that is missing
rules out every length that needs it, so the next length to try ends before it, and no key is looked up twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, takewhile
from typing import NamedTuple

import numpy as np

from longshore.boundary import Key
from longshore.cache.columns import leading
from longshore.cache.index import Index, Residency
from longshore.cache.partial import Partial, PartialPrefixes, Text
from longshore.cache.settings import CacheGroup, Retention
from longshore.errors import CacheError


class GroupKeys(NamedTuple):
    """Chunks of one KV cache group of a request, as the verbs of `TieredCache` take them.

    Attributes:
        keys: The path from the first chunk of the prompt on; or single chunks, where a lookup or a load says so. The
            `Residency` of a lookup saves a load without a lease the search.
        first: Chunks before this position are the engine's own: it has them, and they are not asked for or stored.
        device: Of a lookup for all groups: whether the device has each chunk, from the first on (a numpy array is
            fastest). Those that are left out it does not have.
        text: The tokens, for partial matches (`CacheSettings.partial`).
        prompt: Of a store: chunks from this position on are of the answer.
        retention: Of a store: what is worth keeping.
        slid: Of a store: chunks that the window of the request has slid past, of a host that does not store whole
            paths. They are evicted first from now on, unless a lookup was served from them; others are ignored.
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
        """The keys alone."""
        return self.keys if isinstance(self.keys, Sequence) else self.keys.keys


class Need(NamedTuple):
    """What a matched prefix needs of one group: the chunks `[first, end)`, and of these `load` from the tiers.

    With a `partial` match, behind them the first tokens of another chunk.
    """

    first: int
    end: int
    load: tuple[int, ...]
    partial: Partial | None = None


class GroupSearch:
    """One group's keys, `chunk_tokens` tokens each, and how far they are served.

    With `abroad`, which says whether a foreign tier has a key, how far they can be: also by what is to be fetched from
    there, or is on its way already.
    """

    def __init__(
        self,
        index: Index,
        partials: PartialPrefixes,
        group: CacheGroup,
        chunk_tokens: int,
        wanted: GroupKeys,
        *,
        abroad: Callable[[Key], bool] | None = None,
    ) -> None:
        self.keys, device = wanted.names, () if wanted.device is None else wanted.device
        if len(device) > len(self.keys):
            raise CacheError(f"the device cannot have {len(device)} of {len(self.keys)} chunks")
        self.text = None if wanted.text is None else wanted.text.checked()
        self.group = group
        self.chunk_tokens = chunk_tokens
        self.last_window = group.first_needed(len(self.keys) * chunk_tokens, chunk_tokens)
        """The first chunk that would be needed if all of them were served."""
        self._index = index
        self._partials = partials
        self._abroad = abroad
        self._device = np.zeros(len(self.keys), bool)
        self._device[: len(device)] = np.asarray(device, bool)
        self._clear = len(self.keys)  # from here on, as far as was looked, nothing is missing

    def longest(self, tokens: int) -> int:
        """No more than `tokens` tokens are served, and no fewer than the longest prefix that is."""
        end = tokens // self.chunk_tokens
        missing = self._missing(self.group.first_needed(tokens, self.chunk_tokens), end)
        return tokens if missing is None else missing * self.chunk_tokens

    def beyond(self, tokens: int, most: int) -> int:
        """How many tokens are served behind a prefix of `tokens`, at most `most`: whole chunks, and a part of one."""
        if self.text is None or self.group.recurrent:
            return 0
        at, size = tokens // self.chunk_tokens, self.chunk_tokens
        while at * size < tokens + most and self._serves(at):
            at += 1
        near = self._partials.closest(self.keys, at, self.text, size) if at <= len(self.keys) else None
        return min(most, at * size - tokens + (near.tokens if near else 0))

    def need(self, tokens: int) -> Need:
        """What is needed of this group for a prefix of `tokens` tokens, which is served."""
        first, end = self.group.first_needed(tokens, self.chunk_tokens), tokens // self.chunk_tokens
        load = first + np.flatnonzero(~self._device[first:end])
        return Need(first, end, tuple(load.tolist()), self._partial(end, tokens % self.chunk_tokens))

    def unserved(self, first: int) -> list[Key]:
        """The chunks from `first` on that neither the device has nor any tier of ours, now or soon."""
        has, get = self._device, self._index.get
        return [key for at, key in enumerate(self.keys[first:], first) if not has[at] and not get(key)]

    def _partial(self, at: int, tokens: int) -> Partial | None:
        """Where the first `tokens` tokens of the chunk at `at` come from, if there are any."""
        if not tokens or self.text is None:
            return None
        if self._serves(at):
            return Partial(self.keys[at], tokens, bool(self._device[at]))
        near = self._partials.closest(self.keys, at, self.text, self.chunk_tokens)
        return near and near._replace(tokens=tokens)

    def _serves(self, at: int) -> bool:
        """Whether the chunk at `at` is on the device, or can be read from a tier."""
        if at >= len(self.keys):
            return False
        if self._abroad is not None and (self._index.get(self.keys[at]) or self._abroad(self.keys[at])):
            return True
        return bool(self._device[at] or self._index.is_readable(self.keys[at]))

    def _missing(self, first: int, end: int) -> int | None:
        """A chunk of `[first, end)` that is not served, behind which all are, as far as was looked."""
        if not self.group.alone:
            ready = self._index.reachable_prefix(self.keys[:end], 0)
            if self._abroad is not None:
                ready = self._index.known_prefix(self.keys[:end], ready)
                ready += sum(1 for _ in takewhile(self._abroad, self.keys[ready:end]))
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
    """The longest prefix, in tokens, at which every one of `paths` is served: a multiple of all their chunks.

    Behind that less than one such multiple more, of which all of them have the first tokens.
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
    """Runs of consecutive numbers in `positions`, which ascend: where each begins and ends there."""
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
            raise CacheError(f"expected GroupKeys of a sequence of keys for group {group}, got {_brief(path)}")
        if type(path.first) is not int or not (path.prompt is None or type(path.prompt) is int):
            raise CacheError(f"positions are whole numbers, got first {path.first!r} and prompt {path.prompt!r}")


def check_blocks(blocks: Mapping[int, Sequence[int]], groups: Iterable[int]) -> Mapping[int, Sequence[int]]:
    """`blocks`, which are of `groups`. Raises `CacheError` for others, and for what are no sequences."""
    if not isinstance(blocks, Mapping) or not all(isinstance(each, Sequence) for each in blocks.values()):
        raise CacheError(f"expected sequences of device blocks by number of KV cache group, got {_brief(blocks)}")
    if unknown := {group for group, mine in blocks.items() if len(mine)}.difference(groups):
        raise CacheError(f"there are blocks of groups {list(unknown)}, of which there are no chunks")
    return blocks


def check_distinct(keys: Sequence[Key]) -> None:
    """Raise `CacheError` unless all keys of a request differ."""
    if len(set(keys)) != len(keys):
        raise CacheError(f"the groups of a request have different keys, only {len(set(keys))} of {len(keys)} are")


def _brief(value: object) -> str:
    return f"{value!r:.60}"
