"""The policy experiment: one tier of a number of blocks, an eviction policy, and no time.

    request   b0  b1  b2  b3        hits: the leading resident blocks, before the request changes anything
              ◄── access ────       then the policy sees each of its blocks, the last one first, one by one

An access to a resident block is a use. An access to another block evicts one, if no slot is free, and inserts the
block. No block is pinned, and there are never more blocks than slots. The policies are driven through their own
interface as by the cache: an inserted block gets a free number, which may be reused, and has a digest for its key,
which policies may remember in part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from xxhash import xxh3_64_digest

from longshore.cache.columns import LISTS
from longshore.cache.eviction.base import EvictionPolicy
from longshore.cache.eviction.hit_rates import Return, Returns
from longshore.errors import TraceError


@dataclass(frozen=True, slots=True)
class Hits:
    """Result of an experiment: hits, and block references."""

    requests: int
    block_refs: int
    hits: int

    @property
    def ratio(self) -> float:
        """Hits per block reference; 0 without any."""
        return self.hits / self.block_refs if self.block_refs else 0.0


class Experiment:
    """A tier of `slots` slots, empty at the start, under policy `kind`. Memory grows with the slots that are used."""

    def __init__(self, kind: type[EvictionPolicy], slots: int) -> None:
        if slots < 1:
            raise TraceError(f"expected a capacity of at least one block, got {slots}")
        self._names = np.empty(LISTS, object)
        self.policy = kind(slots, self._names)
        self._slots, self._returns = slots, Returns()
        self._free: list[int] = []
        self._node: dict[int, int] = {}
        self._block = [-1] * LISTS
        self._requests = self._refs = self._hits = 0

    def serve(self, path: Sequence[int], now: float = 0.0, returns: Return | None = None) -> int:
        """Serve one request for the blocks `path` (ids from 0 to 2**64 - 1, head first); returns its hits.

        It arrives at `now` seconds, and its host knows this of its return.
        """
        resident = self._node
        hits = 0
        for block in path:
            if block not in resident:
                break
            hits += 1
        self._requests += 1
        self._refs += len(path)
        self._hits += hits
        last = resident[path[hits - 1]] if hits else 0
        hint = self._returns.begin(self._requests, now, returns)
        self.policy.begin(self._requests, len(path), last, [key_of(block) for block in path[hits:]], hint)
        self._access(path)
        return hits

    def totals(self) -> Hits:
        """The result so far."""
        return Hits(self._requests, self._refs, self._hits)

    def resident(self) -> set[int]:
        """The resident blocks."""
        return set(self._node)

    def _access(self, path: Sequence[int]) -> None:
        """Uses of neighbours are told together, as the policy's contract allows."""
        resident, touch = self._node, self.policy.touch
        used: list[int] = []
        for block in reversed(path):
            node = resident.get(block)
            if node is not None:
                used.append(node)
                continue
            if used:
                touch(used)
                used = []
            self._bring_in(block, leaf=block == path[-1])
        if used:
            touch(used)

    def _bring_in(self, block: int, *, leaf: bool) -> None:
        policy, names = self.policy, self._names
        if len(self._node) >= self._slots:
            victim = policy.coldest()
            policy.remove(victim, evicted=names[victim])
            del self._node[self._block[victim]]
            self._free.append(victim)
        elif not self._free:
            names = self._grow()
        node = self._free.pop()
        names[node] = key_of(block)
        self._block[node] = block
        self._node[block] = node
        policy.insert((node,), leaf=leaf, continues=not leaf)

    def _grow(self) -> np.ndarray[tuple[int], np.dtype[np.object_]]:
        """Numbers for more blocks."""
        old = len(self._names)
        size = min(2 * old, LISTS + self._slots)
        self._names = np.concatenate([self._names, np.empty(size - old, object)])
        self._block += [-1] * (size - old)
        self._free += range(size - 1, old - 1, -1)
        self.policy.resize(self._slots, self._names)
        self.policy.grow(size)
        return self._names


def key_of(block: int) -> bytes:
    """The key that policies see of `block`."""
    return xxh3_64_digest(block.to_bytes(8, "big"))


def experiment(paths: Iterable[Sequence[int]], kind: type[EvictionPolicy], slots: int) -> Hits:
    """Serve all `paths` from a tier of `slots` slots under policy `kind`."""
    tier = Experiment(kind, slots)
    for path in paths:
        tier.serve(path)
    return tier.totals()
