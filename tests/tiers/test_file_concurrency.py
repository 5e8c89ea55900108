"""Eight threads on one tier: mixed puts, gets, evictions and removals, every byte looked at; nothing grows.

For `FILE_SOAK_SECONDS` seconds if that is set, else for a few hundred operations of each thread.
"""

from __future__ import annotations

import math
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from longshore.boundary import Status
from longshore.errors import TierInUseError
from longshore.testing.tier_harness import MISSES, key
from longshore.tiers.arena import PAGE, Arena
from longshore.tiers.base import Op, TierOp
from longshore.tiers.file import FileTier, capacity_for

THREADS, SLOTS, IMAGE = 8, 48, 4 * PAGE
OPERATIONS = 300


class Shared:
    """A tier that many threads use, and what each slot holds; a slot is one thread's at a time."""

    def __init__(self, directory: Path) -> None:
        self.arena = Arena(THREADS * IMAGE)
        self.open = lambda: FileTier(
            directory,
            capacity=capacity_for(SLOTS, IMAGE),
            image_bytes=IMAGE,
            arena=self.arena,
            scope=bytes(32),
            threads=THREADS,
        )
        self.tier = self.open()
        self.holds: list[int | None] = [None] * SLOTS
        self.owned = [threading.Lock() for _ in range(SLOTS)]
        self.done: Counter[str] = Counter()
        self._results: dict[int, Status] = {}
        self._turn = threading.Lock()

    def run(self, op: TierOp) -> Status:
        with self._turn:
            ticket = self.tier.submit([op], math.inf)
        while True:
            with self._turn:
                self._results.update((each.ticket, each.statuses[0]) for each in self.tier.poll())
                if ticket in self._results:
                    return self._results.pop(ticket)
            time.sleep(0.0002)


def picture(number: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """The image of a key: no two are alike, in any sector."""
    words = np.arange(IMAGE // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(number)
    return words.view(np.uint8)


def work(shared: Shared, me: int, go_on: Callable[[int], bool]) -> None:
    dice = random.Random(me)
    place = shared.arena.array[me * IMAGE : (me + 1) * IMAGE]
    count = 0
    while go_on(count):
        slot = dice.randrange(SLOTS)
        if not shared.owned[slot].acquire(blocking=False):
            continue
        try:
            count += 1
            held, generation = shared.holds[slot], shared.tier.generation
            what = dice.choice(["put", "get", "get", "evict", "remove"])
            if what == "put" or held is None:
                what, number = "put", dice.randrange(1 << 30)
                place[:] = picture(number)
                shared.holds[slot] = None
                assert shared.run(TierOp(Op.WRITE, slot, key(number), None, me * IMAGE, IMAGE, generation)) is Status.OK
                shared.holds[slot] = number
            elif what == "get":
                place[:] = 0xCC
                assert shared.run(TierOp(Op.READ, slot, key(held), None, me * IMAGE, IMAGE, generation)) is Status.OK
                assert np.array_equal(place, picture(held)), f"slot {slot} served something else as {held}"
            elif what == "evict":
                shared.holds[slot] = None
            else:
                other = TierOp(Op.READ, slot, key(held + 1), None, me * IMAGE, IMAGE, generation)
                assert shared.run(other) in MISSES
                shared.holds[slot] = None
            shared.done[what] += 1
        finally:
            shared.owned[slot].release()


def resources() -> tuple[int, int]:
    """Descriptors and threads of this process, but for those of a checkpoint, the end of which is waited for."""
    give_up = time.monotonic() + 60.0
    while any(thread.name.endswith("-index") for thread in threading.enumerate()):
        assert time.monotonic() < give_up, "a checkpoint does not end"
        time.sleep(0.001)
    return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()


def resident() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def soak(shared: Shared, seconds: float) -> None:
    end = time.monotonic() + seconds
    go_on = (lambda count: time.monotonic() < end) if seconds else (lambda count: count < OPERATIONS)
    with ThreadPoolExecutor(THREADS) as pool:
        for each in [pool.submit(work, shared, me, go_on) for me in range(THREADS)]:
            each.result()


def test_eight_threads_get_back_what_they_put(tmp_path: Path) -> None:
    shared = Shared(tmp_path / "tier")
    soak(shared, 0)  # all that is made on first use has been made
    before, memory = resources(), resident()
    soak(shared, float(os.environ.get("FILE_SOAK_SECONDS", "0")))
    assert all(after <= former for after, former in zip(resources(), before, strict=True))
    assert resident() - memory < 32 << 20
    assert min(shared.done[what] for what in ("put", "get", "evict", "remove")) > THREADS
    shared.tier.close()
    shared.tier = shared.open()
    there = {chunk.slot: chunk.key for chunk in shared.tier.recover()}
    assert {
        slot: key(number) for slot, number in enumerate(shared.holds) if number is not None
    }.items() <= there.items()
    shared.tier.close()
    shared.arena.close()


def test_opening_and_closing_leaves_nothing_behind(tmp_path: Path) -> None:
    shared = Shared(tmp_path / "tier")
    shared.tier.close()
    before, memory = resources(), resident()
    for _ in range(40):
        tier = shared.open()
        with pytest.raises(TierInUseError, match="in use"):
            shared.open()
        tier.close()
    assert all(after <= former for after, former in zip(resources(), before, strict=True))
    assert resident() - memory < 16 << 20
    shared.arena.close()
