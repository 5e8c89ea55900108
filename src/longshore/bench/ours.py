"""The cache manager as the benchmark drives it: the same verbs as its rivals', and the longest single call."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import numpy as np

from longshore.boundary import FILE, HOST, Key, Status, Transfer, TransferResult
from longshore.cache import CacheSettings, GroupKeys, Retention, TieredCache, TierSpec, WritePolicy
from longshore.cache.chains import LISTS
from longshore.cache.eviction import DEFAULT_POLICY, Gittins
from longshore.errors import BenchError

T = TypeVar("T")

PIECE = 1024
"""Blocks that are stored at a time."""


class TakesAll(Gittins):
    """The default policy, which lets nothing pass: evictions are measured, and rivals take all blocks."""

    def admit(self, keys: Sequence[Key], make_room: Callable[[int], int]) -> int:
        """As many as there is room for."""
        return make_room(len(keys))


class Policy:
    """The default policy alone, over `slots` slots. Whatever it allocates is its own: keys are not kept."""

    def __init__(self, slots: int) -> None:
        self._policy = DEFAULT_POLICY(slots, np.empty(0, object))
        self._policy.grow(LISTS + slots)
        self._unused = range(LISTS, LISTS + slots)
        self._turn = 0

    def store(self, keys: Sequence[Key]) -> None:
        """A prompt becomes resident, which is a request; where there is no room, as many blocks are evicted."""
        policy, count = self._policy, len(keys)
        nodes, self._unused = list(self._unused[:count]), self._unused[count:]
        while len(nodes) < count:
            victims = policy.ahead(count - len(nodes))
            policy.leave(victims, [key[::-1] for key in keys[len(nodes) :][: len(victims)]])  # stand for their keys
            nodes += victims
        policy.names = np.broadcast_to(np.array(keys[0], object), (max(nodes) + 1,))
        self._turn += 1
        policy.begin(self._turn, count)
        policy.insert(nodes[::-1], leaf=True)


class Ours:
    """`TieredCache` with one tier of `slots` slots, and the longest call so far."""

    name = "longshore"

    def __init__(self, slots: int) -> None:
        self.cache = TieredCache([TierSpec(HOST, slots, 1, TakesAll)], CacheSettings(max_writes=PIECE))
        self.longest = 0.0

    def match(self, keys: Sequence[Key]) -> None:
        """Match, hold and release."""
        lease = self._call(lambda: self.cache.lookup({0: GroupKeys(keys)}, 0.0)).lease
        if lease is not None:
            self._call(lambda: self.cache.release(lease))

    def known(self, keys: Sequence[Key]) -> None:
        """A store of which nothing is taken."""
        self._call(lambda: self.cache.store({0: GroupKeys(keys)}, {0: range(len(keys))}))

    def store(self, keys: Sequence[Key], first: int = 0, *, evicting: bool = False) -> None:
        """A store, its command, and its result."""
        for start in range(first, len(keys), PIECE):
            path, blocks = keys[: start + PIECE], range(min(PIECE, len(keys) - start))
            store = partial(self.cache.store, {0: GroupKeys(path, start)}, {0: blocks})
            offload = (store() if evicting else self._call(store))[0]
            if offload.job is None or len(offload.slots) != len(blocks):
                raise BenchError(f"{len(offload.slots)} of {len(blocks)} blocks were taken")
            self._call(self.cache.take)
            result = TransferResult(offload.job, (Status.OK,) * len(blocks))
            self._call(partial(self.cache.apply, (result,), 0.0))

    def onboard(self, keys: Sequence[Key]) -> float:
        """Order the loading of a resident prompt, and let it arrive; the seconds that the order took."""
        lease = self.cache.lookup({0: GroupKeys(keys)}, 0.0).lease
        if lease is None:
            raise BenchError("a resident prompt was not found")
        begun = time.thread_time()
        parts = self._call(partial(self.cache.load, lease, {0: range(len(keys))})).parts
        self.cache.take()
        taken = time.thread_time() - begun
        results = [TransferResult(part.job, (Status.OK,) * part.chunks) for part in parts]
        self._call(partial(self.cache.apply, results, 0.0))
        self._call(partial(self.cache.release, lease))
        return taken

    def lend(self, keys: Sequence[Key]) -> None:
        """A load of a resident prompt whose bytes the host moves: the order, and its result."""
        (part,) = self.cache.load({0: GroupKeys(keys)}).parts
        self.cache.apply([TransferResult(part.job, (Status.OK,) * part.chunks)], 0.0)

    def prefer(self, keys: Sequence[Key]) -> None:
        """A store of resident blocks that gives them a priority: before the first one no book knows of any."""
        path = GroupKeys(keys, retention=(Retention(0, None, 90),))
        self._call(partial(self.cache.store, {0: path}, {0: range(len(keys))}))

    def _call(self, method: Callable[[], T]) -> T:
        begun = time.thread_time()
        answer = method()
        self.longest = max(self.longest, time.thread_time() - begun)
        return answer


class Two(Ours):
    """The same with a tier of as many slots below, into which everything is written through."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        tiers = [TierSpec(name, slots, 1) for name in (HOST, FILE)]
        self.cache = TieredCache(tiers, CacheSettings(max_writes=PIECE, backup=WritePolicy.THROUGH))

    def store(self, keys: Sequence[Key], first: int = 0, *, evicting: bool = False) -> None:
        """A store, and all that follows from it."""
        for start in range(first, len(keys), PIECE):
            path = keys[: start + PIECE]
            self.cache.store({0: GroupKeys(path, start)}, {0: range(len(path) - start)})
            while orders := [command for command in self.cache.take() if isinstance(command, Transfer)]:
                self.cache.apply([TransferResult(each.job, (Status.OK,) * len(each.items)) for each in orders], 0.0)
