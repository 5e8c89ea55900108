"""A runtime over scripted movers, over a stub of a cache, and over real tiers."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from longshore.boundary import DEVICE, FILE, HOST, Item, Route, Slabs, Slot, Status, Transfer, TransferResult
from longshore.cache import (
    CacheSettings,
    GroupKeys,
    Lease,
    TieredCache,
    TierSpec,
    WritePolicy,
)
from longshore.cache.eviction_policies import LRU
from longshore.runtime import Runtime, TierMover
from longshore.tiers.arena import Arena
from longshore.tiers.file import FileTier, capacity_for
from longshore.tiers.host import HostSlabs
from scripted import Scripted

IMAGE = 4096
DOWN, UP = Route(DEVICE, HOST), Route(HOST, DEVICE)
OUT, IN = Route(HOST, FILE), Route(FILE, HOST)


def path(length: int, first: int = 0) -> list[bytes]:
    return [bytes([first + i]) * 32 for i in range(length)]


class Rig:
    """A runtime over scripted movers, with a clock that stands still."""

    def __init__(self, *, with_files: bool = True, **settings: Any) -> None:
        self.now = 100.0
        self.device = Scripted(DOWN, UP)
        self.files = Scripted(OUT, IN)
        settings = {"load_timeout": 5.0, "write_timeout": 7.0, **settings}
        self.cache = TieredCache(
            [TierSpec(HOST, 8, IMAGE), TierSpec(FILE, 8, IMAGE)], CacheSettings(backup=WritePolicy.THROUGH, **settings)
        )
        self.runtime = Runtime(
            self.cache, [self.device, self.files] if with_files else [self.device], clock=lambda: self.now
        )

    def store(self, keys: list[bytes], group: int = 0) -> None:
        """`keys` lie in the file tier, and in no other."""
        blocks = range(len(keys) * self.cache.settings.blocks_per_chunk)
        with self.runtime.batch() as cache:
            cache.store({group: GroupKeys(keys)}, {group: list(blocks)})
        for mover in (self.device, self.files):
            mover.end()
            self.runtime.pump()
        with self.runtime.batch() as cache:
            assert cache.discard(keys, HOST) == len(keys)
        self.device.submitted.clear()
        self.files.submitted.clear()

    def load(self, keys: list[bytes], blocks: list[int], skip: int = 0) -> Lease:
        with self.runtime.batch() as cache:
            hold = cache.lookup({0: GroupKeys(keys)}, self.now).lease
            assert hold is not None
            cache.load(hold, {0: blocks}, skip=skip)
        return hold

    def misses(self) -> dict[str, int]:
        return {reason.value: n for reason, n in self.cache.counters.misses.items() if n}

    def check_idle(self) -> None:
        assert not self.runtime.pump()
        assert self.cache.jobs_in_flight == 0
        self.cache.check_integrity()
        for stats in self.cache.stats():
            assert stats.used == stats.ready


class StubCache:
    """Gives out commands, and keeps what comes back."""

    def __init__(self, *commands: Any) -> None:
        self.commands = list(commands)
        self.results: list[TransferResult] = []
        self.settings = CacheSettings()
        self.constructor_arguments = ()

    def stats(self) -> tuple[()]:
        return ()

    def take_commands(self) -> list[Any]:
        commands, self.commands = self.commands, []
        return commands

    def apply_results(self, results: list[TransferResult], now: float) -> None:
        self.results += results

    def tick(self, now: float) -> None: ...

    def back_up_all(self) -> bool:
        return False


def in_chain(*jobs: int) -> list[Transfer]:
    """Transfers that come one after the other, from slot to slot."""
    return [
        Transfer(
            job,
            Route(HOST, HOST),
            (Item(path(1)[0], None, Slot(HOST, 0, i), Slot(HOST, 0, i + 1)),),
            deadline=10.0,
            after=jobs[i - 1 : i] if i else (),
        )
        for i, job in enumerate(jobs)
    ]


class Prompt(Scripted):
    """A mover that ends everything well when it is polled."""

    def poll(self) -> list[TransferResult]:
        while self.open:
            self.end()
        return super().poll()


def until(done: Callable[[], bool]) -> bool:
    end = time.monotonic() + 60.0
    while not done() and time.monotonic() < end:
        time.sleep(1e-3)
    return done()


class Memory:
    """A device of plain host memory: copies when it is told to, `DEVICE` <-> `HOST`."""

    routes = frozenset((DOWN, UP))

    def __init__(self, blocks: int, host: HostSlabs) -> None:
        self.blocks = np.zeros((blocks, IMAGE), dtype=np.uint8)
        self.host = host
        self.results: list[TransferResult] = []

    def submit(self, transfer: Transfer) -> None:
        for item, block in zip(transfer.items, transfer.sections[0].blocks, strict=True):
            slot = item.source or item.destination
            image = np.frombuffer(
                self.host.arena.view(self.host.slabs.offset(slot.size_class, slot.index), IMAGE), dtype=np.uint8
            )
            if transfer.route == DOWN:
                image[:] = self.blocks[block]
            else:
                self.blocks[block] = image
        statuses = (Status.OK,) * len(transfer.items)
        self.results.append(TransferResult(transfer.job, statuses, len(statuses) * IMAGE))

    def poll(self) -> list[TransferResult]:
        results, self.results = self.results, []
        return results

    def cancel(self, job: int) -> None: ...

    def close(self) -> None: ...


class Machine:
    """One process's worth of real tiers over `directory`."""

    def __init__(self, directory: Path) -> None:
        self.arena = Arena(4 * IMAGE)
        host = HostSlabs(self.arena, Slabs.of_one_size(IMAGE, 4))
        capacity = capacity_for(8, IMAGE)
        self.file = FileTier(directory, capacity=capacity, image_bytes=IMAGE, arena=self.arena, scope=bytes(32))
        self.memory = Memory(8, host)
        tiers = [TierSpec(HOST, 4, IMAGE), TierSpec(FILE, 8, IMAGE)]
        self.cache = TieredCache(tiers, CacheSettings(), generation=self.file.generation)
        self.found = self.cache.adopt(FILE, self.file.recover())
        self.runtime = Runtime(self.cache, [self.memory, TierMover(self.file, host)], [self.file])

    def load(self, keys: list[bytes], blocks: list[int]) -> tuple[int, tuple[str, ...]]:
        with self.runtime.batch() as cache:
            hold = cache.lookup({0: GroupKeys(keys)}, self.runtime.clock()).lease
            if hold is None:
                return 0, ()
            cache.load(hold, {0: blocks})
        outcome = self.runtime.wait_load(hold, 10.0).outcome
        with self.runtime.batch() as cache:
            cache.release(hold)
        return outcome

    def close(self) -> None:
        assert self.runtime.close()
        self.arena.close()


def host_cache(**settings: Any) -> TieredCache:
    return TieredCache([TierSpec(HOST, 8, 4096, LRU)], CacheSettings(**settings))
