"""Traps that file tiers before this one fell into, by number; 35 stands in test_file.py, 38 in test_file_faults.py."""

import math
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from longshore.boundary import FILE, HOST, Status
from longshore.cache import CacheSettings, TieredCache, TierSpec
from longshore.testing import TierHarness, TierTests
from longshore.tiers.arena import DISK_PAGE
from longshore.tiers.base import Op
from longshore.tiers.file import capacity_for
from longshore.tiers.file.io import IoQueue, Piece, SystemIo
from plain_io import PlainIo

IMAGE, SLOTS = TierTests.image_bytes, TierTests.slots
STRIDE = DISK_PAGE + IMAGE


def test_trap_36_tier_does_not_grow_and_restart_counts_records(harness: TierHarness, directory: Path) -> None:
    for turn in range(5):
        for slot in range(SLOTS):
            harness.store(slot, 100 * turn + slot)
        harness.reopen()
    on_disk = sum(max(path.stat().st_size, path.stat().st_blocks * 512) for path in [directory, *directory.iterdir()])
    assert on_disk <= capacity_for(SLOTS, IMAGE)
    cache = TieredCache([TierSpec(HOST, 4, STRIDE), TierSpec(FILE, SLOTS, STRIDE)], CacheSettings())
    assert cache.adopt(FILE, harness.tier.recover()) == SLOTS
    assert cache.stats()[1].used_bytes == SLOTS * STRIDE


def test_trap_39_sixteen_reads_are_in_the_disk_at_once(harness_of: Callable[..., TierHarness]) -> None:
    class Meeting(PlainIo):
        """Nobody's read begins before sixteen have been asked for."""

        together: threading.Barrier | None = None

        def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int:
            if self.together is not None:
                self.together.wait(60)
            return super().preadv(fd, buffers, offset)

    io = Meeting()
    harness = harness_of(io=io)
    harness.store(0, 0)
    io.together = threading.Barrier(16)
    batch = [harness.op(Op.READ, 0, 0, place=place) for place in range(16)]
    assert harness.run(*batch) == (Status.OK,) * 16


@pytest.mark.parametrize("batches", [1, 16])
def test_trap_39_sixteen_reads_are_queued_at_once(harness_of: Callable[..., TierHarness], batches: int) -> None:
    """Of one thread, where it has the system's queue in place of others, of which none ends before all have begun."""

    class Withholding(SystemIo):
        under_way = most = wanted = 0

        def open_queue(self, fd: int, pieces: int, buffers: int, /) -> IoQueue | None:
            queue = super().open_queue(fd, pieces, buffers)
            submit, reap = queue.submit, queue.reap

            def submitted(pieces: Sequence[Piece], /, *, writing: bool) -> list[int]:
                numbers = submit(pieces, writing=writing)
                self.under_way += len(pieces)
                self.most = max(self.most, self.under_way)
                return numbers

            def reaped() -> list[tuple[int, int]]:
                if self.most < self.wanted:  # the queue is not asked: it would give these numbers out again
                    time.sleep(0.001)
                    return []
                over = reap()
                self.under_way -= len(over)
                return over

            queue.submit, queue.reap = submitted, reaped  # type: ignore[method-assign]
            return queue

    io = Withholding()
    harness = harness_of(io=io, slots=32)
    apart = range(0, 32, 2)
    for slot in apart:
        harness.store(slot, slot)
    assert io.most == 1
    io.wanted = 16
    ops = [harness.op(Op.READ, slot, slot, place=place) for place, slot in enumerate(apart)]
    each = len(ops) // batches
    tickets = [harness.tier.submit(ops[at : at + each], math.inf) for at in range(0, len(ops), each)]
    give_up = time.monotonic() + 60
    while io.most < 16 and time.monotonic() < give_up:
        time.sleep(0.001)
    most, io.wanted = io.most, 0
    assert [set(harness.wait(ticket).statuses) for ticket in tickets] == [{Status.OK}] * batches
    assert most == 16
