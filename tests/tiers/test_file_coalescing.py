"""Records that lie one behind the other move in one system call, and each of them still succeeds or fails alone."""

from __future__ import annotations

import errno
import itertools
import os
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore.boundary import Status
from longshore.testing import TierHarness, TierTests
from longshore.testing.tier_harness import image, key
from longshore.tiers.arena import DISK_PAGE
from longshore.tiers.base import Op, TierOp
from longshore.tiers.file import FileTier
from longshore.tiers.file.executor import TASK_BYTES, TASK_RECORDS, coalesce
from longshore.tiers.file.tier import TierState
from plain_io import PlainIo

IMAGE = TierTests.image_bytes
STRIDE = DISK_PAGE + IMAGE
SLOTS = 8
LONG = 1 << 20
"""Of an image so long that the bytes of a task limit how many are in it."""


class Sectors(PlainIo):
    """A disk that keeps where each call began and how much it asked for; any call that touches a bad byte fails."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []
        self.bad: dict[int, int] = {}
        self.fired = 0
        self.short: list[int] = []

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int:
        self._note(buffers, offset)
        return self.short.pop() if self.short else super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int:
        self._note(buffers, offset)
        return super().pwritev(fd, buffers, offset)

    def _note(self, buffers: Sequence[memoryview], offset: int) -> None:
        nbytes = sum(map(len, buffers))
        self.calls.append((offset, nbytes))
        for place, number in self.bad.items():
            if offset <= place < offset + nbytes:
                self.fired += 1
                raise OSError(number, os.strerror(number))


@pytest.fixture
def io() -> Sectors:
    return Sectors()


@pytest.fixture
def harness(io: Sectors, harness_of: Callable[..., TierHarness]) -> Iterator[TierHarness]:
    harness = harness_of(io=io, threads=1, slots=SLOTS)
    io.calls.clear()
    yield harness


def batch(harness: TierHarness, kind: Op, slots: Sequence[int], first: int = 0) -> list[TierOp]:
    """Slot `s` and image `first + s`, at places in another order than the slots."""
    return [harness.op(kind, slot, first + slot, place=len(slots) - 1 - at) for at, slot in enumerate(slots)]


def store(harness: TierHarness, slots: Sequence[int], first: int = 0) -> tuple[Status, ...]:
    ops = batch(harness, Op.WRITE, slots, first)
    for op, slot in zip(ops, slots, strict=True):
        harness.bytes_of(op)[:] = image(first + slot, op.length)
    return harness.run(*ops)


def load(harness: TierHarness, slots: Sequence[int], first: int = 0) -> tuple[Status, ...]:
    """Statuses; what was served is what was written."""
    ops = batch(harness, Op.READ, slots, first)
    for op in ops:
        harness.bytes_of(op)[:] = 0xCC
    statuses = harness.run(*ops)
    for op, slot, status in zip(ops, slots, statuses, strict=True):
        if status is Status.OK:
            np.testing.assert_array_equal(harness.bytes_of(op), image(first + slot, op.length))
    return statuses


def test_neighbours_share_one_call_whatever_their_order(harness: TierHarness, io: Sectors) -> None:
    assert set(store(harness, [3, 1, 7, 2])) == {Status.OK}
    assert io.calls == [(1 * STRIDE, 3 * STRIDE), (7 * STRIDE, STRIDE)]
    io.calls.clear()
    assert set(load(harness, [2, 7, 3, 1])) == {Status.OK}
    assert io.calls == [(1 * STRIDE, 3 * STRIDE), (7 * STRIDE, STRIDE)]


def test_rotten_record_between_others_is_the_only_miss(harness: TierHarness, io: Sectors, directory: Path) -> None:
    store(harness, range(4))
    for slot, at in ((1, DISK_PAGE + 17), (2, 3)):  # an image, and a header
        with (directory / "segment").open("r+b") as segment:
            segment.seek(slot * STRIDE + at)
            byte = segment.read(1)
            segment.seek(-1, os.SEEK_CUR)
            segment.write(bytes([byte[0] ^ 1]))
    io.calls.clear()
    assert load(harness, range(4)) == (Status.OK, Status.CORRUPT, Status.CORRUPT, Status.OK)
    assert len(io.calls) == 1
    assert {chunk.slot for chunk in harness.tier.recover()} == {0, 3}


def test_foreign_record_between_others_is_a_miss_alone(harness: TierHarness) -> None:
    store(harness, range(3))
    harness.store(1, 99)
    assert load(harness, range(3)) == (Status.OK, Status.MISMATCH, Status.OK)


@pytest.mark.parametrize("kind", [Op.READ, Op.WRITE])
def test_a_bad_sector_fails_the_record_that_it_is_in(harness: TierHarness, io: Sectors, kind: Op) -> None:
    store(harness, range(4))
    io.bad = {2 * STRIDE + DISK_PAGE: errno.EIO}
    io.calls.clear()
    run = load if kind is Op.READ else store
    assert run(harness, range(4)) == (Status.OK, Status.OK, Status.IO_ERROR, Status.OK)
    assert io.fired == 2, "together, and then alone"
    assert [nbytes for _, nbytes in io.calls] == [4 * STRIDE, *[STRIDE] * 4]
    io.bad = {}
    assert {chunk.slot for chunk in harness.tier.recover()} == {0, 1, 3}
    assert load(harness, [0, 1, 3]) == (Status.OK,) * 3


def test_full_disk_refuses_one_record_and_takes_others(harness: TierHarness, io: Sectors) -> None:
    io.bad = {STRIDE: errno.ENOSPC}
    assert store(harness, range(3)) == (Status.OK, Status.NO_SPACE, Status.OK)
    assert io.fired == 2
    assert cast(FileTier, harness.tier).failures["write_no_space"] == 1


def test_truncated_file_serves_those_before_its_end(harness: TierHarness, io: Sectors, directory: Path) -> None:
    store(harness, range(4))
    os.truncate(directory / "segment", 2 * STRIDE + DISK_PAGE)
    assert load(harness, range(4)) == (Status.OK, Status.OK, Status.SHORT, Status.SHORT)
    assert len(io.calls) > 1 + 4


def test_a_call_that_moves_a_part_goes_on_from_there(harness: TierHarness, io: Sectors) -> None:
    store(harness, range(3))
    io.short = [0, STRIDE]  # a record, and then nothing: from the end of the list
    assert load(harness, range(3)) == (Status.OK,) * 3
    assert not io.short


def test_failing_disk_is_disabled_after_the_usual_failures(harness: TierHarness, io: Sectors) -> None:
    io.bad = {slot * STRIDE: errno.EIO for slot in range(SLOTS)}
    assert set(store(harness, range(4))) == {Status.IO_ERROR}
    assert cast(FileTier, harness.tier)._health.state is TierState.ON
    assert set(store(harness, range(4))) == {Status.IO_ERROR}
    assert cast(FileTier, harness.tier)._health.state is TierState.READ_ONLY
    assert cast(FileTier, harness.tier).failures["write_io_error"] == 8


def test_unaligned_records_are_not_coalesced(harness: TierHarness, io: Sectors) -> None:
    ops = batch(harness, Op.WRITE, range(4))
    ops[1] = ops[1]._replace(length=IMAGE - DISK_PAGE)
    ops[3] = ops[3]._replace(offset=ops[3].offset + 512)
    assert set(harness.run(*ops)) == {Status.OK}
    direct = cast(FileTier, harness.tier).direct
    assert (
        [nbytes for _, nbytes in io.calls] == [2 * STRIDE - DISK_PAGE, STRIDE, STRIDE] if direct else [2 * STRIDE] * 2
    )


@given(
    slots=st.lists(
        st.tuples(st.integers(0, 300), st.sampled_from(Op), st.sampled_from([DISK_PAGE, LONG]), st.integers(0, 1)),
        max_size=80,
    ),
)
def test_each_operation_is_in_one_task_of_compatible_operations(
    slots: list[tuple[int, Op, int, int]],
) -> None:
    ops = [TierOp(op, slot, key(slot), None, 0, length, generation) for slot, op, length, generation in slots]
    stride = DISK_PAGE + LONG
    tasks = coalesce(ops, lambda op: op.slot * stride, lambda op: op.slot % 10 != 9)
    assert sorted(at for task in tasks for at in task) == list(range(len(ops)))
    for task in tasks:
        assert len(task) <= TASK_RECORDS
        assert len(task) == 1 or sum(ops[at].length for at in task) <= TASK_BYTES
        assert len({(ops[at].op, ops[at].generation) for at in task}) == 1
        assert [ops[at].slot for at in task] == sorted(ops[at].slot for at in task)
        for before, after in itertools.pairwise(task):
            assert ops[before].slot % 10 != 9
            assert ops[after].slot % 10 != 9


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize(("length", "most"), [(DISK_PAGE, TASK_RECORDS), (LONG, TASK_BYTES // LONG)])
def test_many_records_make_few_tasks(step: int, length: int, most: int) -> None:
    """Wherever they lie."""
    ops = [TierOp(Op.READ, step * slot, key(slot), None, 0, length, 0) for slot in range(64)]
    random.Random(0).shuffle(ops)
    tasks = coalesce(ops, lambda op: op.slot * (DISK_PAGE + length), lambda op: True)
    assert [len(task) for task in tasks] == [most] * (64 // most)
