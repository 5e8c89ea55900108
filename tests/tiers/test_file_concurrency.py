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

from longshore.boundary import Slabs, Status
from longshore.errors import TierInUseError
from longshore.testing.tier_harness import MISSES, key
from longshore.tiers.arena import DISK_PAGE, Arena
from longshore.tiers.base import Op, TierOp
from longshore.tiers.file import FileTier, capacity_of

THREADS, OPERATIONS = 8, 300

ONE_SIZE = Slabs.of_one_size(5 * DISK_PAGE, 48)
TWO_SIZES = Slabs(10 * DISK_PAGE, (2 * DISK_PAGE, 5 * DISK_PAGE), 40)
"""A slab holds five images of a page, or two of four; any thread may give it from one size to the other."""


class Shared:
    """A tier that many threads use, and what each slot holds, with its pool; a slab is one thread's at a time."""

    def __init__(self, directory: Path, slabs: Slabs) -> None:
        self.slabs = slabs
        self.room = max(slabs.image_bytes)
        self.arena = Arena(THREADS * self.room)
        self.open = lambda: FileTier(
            directory,
            capacity=capacity_of(slabs),
            image_bytes=[nbytes - DISK_PAGE for nbytes in slabs.image_bytes],
            arena=self.arena,
            scope=bytes(32),
            threads=THREADS,
        )
        self.tier = self.open()
        assert self.tier.slabs == slabs
        self.holds: list[dict[tuple[int, int], int]] = [{} for _ in range(slabs.slabs)]
        self.owned = [threading.Lock() for _ in range(slabs.slabs)]
        self.done: Counter[str] = Counter()
        self._results: dict[int, Status] = {}
        self._turn = threading.Lock()

    def run(self, op: Op, place: tuple[int, int], number: int, me: int) -> Status:
        """What comes of it for key `number` in this slot and pool; the image of thread `me`."""
        length = self.slabs.image_bytes[place[1]] - DISK_PAGE
        order = TierOp(op, place[0], key(number), None, me * self.room, length, self.tier.generation, place[1])
        with self._turn:
            ticket = self.tier.submit([order], math.inf)
        while True:
            with self._turn:
                self._results.update((each.ticket, each.statuses[0]) for each in self.tier.poll())
                if ticket in self._results:
                    return self._results.pop(ticket)
            time.sleep(0.0002)

    def discard(self, slot: int) -> None:
        with self._turn:
            self.tier.delete_records([slot])


def picture(number: int, nbytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """The image of a key: no two are alike, in any sector."""
    words = np.arange(nbytes // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(number)
    return words.view(np.uint8)


def work(shared: Shared, me: int, go_on: Callable[[int], bool]) -> None:
    dice = random.Random(me)
    count = 0
    while go_on(count):
        slab = dice.randrange(shared.slabs.slabs)
        if not shared.owned[slab].acquire(blocking=False):
            continue
        try:
            count += 1
            shared.done[work_on(shared, me, slab, dice)] += 1
        finally:
            shared.owned[slab].release()


def work_on(shared: Shared, me: int, slab: int, dice: random.Random) -> str:
    """Something with a slot of `slab`; what it was."""
    holds = shared.holds[slab]
    what = dice.choice(["put", "get", "get", "evict", "remove"]) if holds else "put"
    if what == "put":
        return put(shared, me, slab, dice)
    place, held = dice.choice(list(holds.items()))
    image = shared.arena.array[me * shared.room :][: shared.slabs.image_bytes[place[1]] - DISK_PAGE]
    if what == "get":
        image[:] = 0xCC
        assert shared.run(Op.READ, place, held, me) is Status.OK
        assert np.array_equal(image, picture(held, len(image))), f"{place} served something else as {held}"
        return what
    del holds[place]
    if what == "remove":
        assert shared.run(Op.READ, place, held + 1, me) in MISSES
        shared.discard(place[0])
    return what


def put(shared: Shared, me: int, slab: int, dice: random.Random) -> str:
    """An image into a slot of `slab`, mostly of its size; else it is taken from that one, with all that is in it."""
    holds, number = shared.holds[slab], dice.randrange(1 << 30)
    pools = range(len(shared.slabs.images))
    pool = dice.choice([*(pool for _, pool in holds), *pools])
    given = {each for _, each in holds} - {pool}
    place = dice.choice(shared.slabs.slots_of(slab, pool)), pool
    shared.arena.array[me * shared.room :][: shared.slabs.image_bytes[pool] - DISK_PAGE] = picture(
        number, shared.slabs.image_bytes[pool] - DISK_PAGE
    )
    former = dict(holds) if given else {}
    if given:
        holds.clear()
    holds.pop(place, None)
    assert shared.run(Op.WRITE, place, number, me) is Status.OK
    holds[place] = number
    for gone, held in former.items():
        assert shared.run(Op.READ, gone, held, me) in MISSES, "served from a slab that is another size's"
    return "give" if given else "put"


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


@pytest.mark.parametrize("slabs", [ONE_SIZE, TWO_SIZES], ids=["one size", "two sizes"])
def test_eight_threads_get_back_what_they_put(tmp_path: Path, slabs: Slabs) -> None:
    shared = Shared(tmp_path / "tier", slabs)
    soak(shared, 0)  # all that is made on first use has been made
    before, memory = resources(), resident()
    soak(shared, float(os.environ.get("FILE_SOAK_SECONDS", "0")))
    assert all(after <= former for after, former in zip(resources(), before, strict=True))
    assert resident() - memory < 32 << 20
    kinds = ("put", "get", "evict", "remove", *(["give"] if len(slabs.images) > 1 else []))
    assert min(shared.done[what] for what in kinds) > THREADS
    shared.tier.close()
    shared.tier = shared.open()
    there = {((chunk.slot, chunk.size_class), chunk.key) for chunk in shared.tier.recover()}
    held = {(place, key(number)) for holds in shared.holds for place, number in holds.items()}
    assert len(held) > slabs.slabs // 2
    assert held <= there
    shared.tier.close()
    shared.arena.close()


def test_opening_and_closing_leaves_nothing_behind(tmp_path: Path) -> None:
    shared = Shared(tmp_path / "tier", ONE_SIZE)
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
