"""Each system call of a file tier fails once, at every place of a story: typed errors, no wrong byte, nothing stuck."""

from __future__ import annotations

import errno
import functools
import itertools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crash_kit import APART, TWO_SIZES, Shape, one_size

from depth import deep
from longshore.boundary import Slabs, Status
from longshore.errors import LongshoreError
from longshore.testing.disk import Image, OneByOneQueue, SimulatedDisk
from longshore.testing.tier_harness import image, key
from longshore.tiers.arena import DISK_PAGE, Arena
from longshore.tiers.base import Op, TierOp
from longshore.tiers.file import FileTier, RawIo, capacity_of
from longshore.tiers.file.directory import COPIES

NUMBERS = 4
CALLS = [name for name in vars(RawIo) if not name.startswith("_")]


class FailsOnce:
    """A disk of which the `nth` call goes wrong, and no other."""

    def __init__(self, inner: SimulatedDisk, nth: int, wrong: Callable[[str, Callable[..., Any], Any], Any]) -> None:
        self.calls = 0
        self.failed: str | None = None
        self._inner = inner
        self._nth = nth
        self._wrong = wrong

    def __getattr__(self, name: str) -> Any:
        if name not in CALLS:
            raise AttributeError(name)
        return functools.partial(self._call, name)

    def _call(self, name: str, *arguments: Any, **named: Any) -> Any:
        self.calls += 1
        call = functools.partial(getattr(self._inner, name), **named)
        if self.calls != self._nth or name == "close":
            # Each piece that a queue moves is a call of its own, and may be the one.
            return OneByOneQueue(self, arguments[0]) if name == "open_queue" else call(*arguments)  # type: ignore[arg-type]
        self.failed = name
        return self._wrong(name, call, arguments)


def fails_with(number: int) -> Callable[[str, Callable[..., Any], Any], Any]:
    def wrong(name: str, call: Callable[..., Any], arguments: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return wrong


def moves_half(name: str, call: Callable[..., Any], arguments: Any) -> Any:
    """Half of what is to be read or written, in whole pages where there are several buffers."""
    if name in ("pwrite", "pread"):
        fd, what, offset = arguments
        return call(fd, what // 2 if name == "pread" else what[: len(what) // 2], offset)
    if name in ("preadv", "pwritev"):
        fd, buffers, offset = arguments
        return call(fd, buffers[:1], offset)
    return call(*arguments)


class Machine:
    """A tier of this `shape` on `io`, and what it was asked for."""

    def __init__(self, io: RawIo, shape: Shape) -> None:
        self.shape = shape
        self.arena = Arena(NUMBERS * shape.slabs.slab_bytes)
        try:
            self.tier = FileTier(
                Path("/simulated"),
                capacity=capacity_of(shape.slabs),
                image_bytes=[nbytes - DISK_PAGE for nbytes in shape.slabs.image_bytes],
                arena=self.arena,
                scope=bytes(32),
                threads=1,
                io=io,
            )
        except BaseException:
            self.arena.close()
            raise

    def listed(self) -> set[tuple[int, int]]:
        """Places and numbers."""
        numbers = {key(number): number for number in range(NUMBERS)}
        chunks = self.tier.recover()
        return {(self.shape.places.index((chunk.slot, chunk.size_class)), numbers[chunk.key]) for chunk in chunks}

    def run(self, op: Op, pairs: Collection[tuple[int, int]]) -> tuple[Status, ...]:
        """Places and numbers, as one batch."""
        ops = []
        for place, number in pairs:
            (slot, pool), nbytes = self.shape.places[place], self.shape.image_bytes(place)
            offset = number * self.shape.slabs.slab_bytes
            ops.append(TierOp(op, slot, key(number), None, offset, nbytes, self.tier.generation, pool))
            self._bytes_of(ops[-1])[:] = image(number, nbytes) if op is Op.WRITE else 0xCC
        self.tier.submit(ops, math.inf)
        give_up = time.monotonic() + 30
        while not (results := self.tier.poll()):
            assert time.monotonic() < give_up
            time.sleep(0.0001)
        for each, (_, number), status in zip(ops, pairs, results[0].statuses, strict=True):
            if status is Status.OK:
                assert (self._bytes_of(each) == image(number, each.length)).all(), "a wrong byte was served"
        return results[0].statuses

    def write(self, stored: set[tuple[int, int]], *pairs: tuple[int, int]) -> set[tuple[int, int]]:
        """What is `stored` after this was tried."""
        statuses = self.run(Op.WRITE, pairs)
        left = {old for old in stored if not any(self.shape.meet(new, old[0]) for new, _ in pairs)}
        return left | set(itertools.compress(pairs, (status is Status.OK for status in statuses)))

    def _bytes_of(self, op: TierOp) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        return self.arena.array[op.offset : op.offset + op.length]

    def close(self) -> None:
        self.tier.close()
        self.arena.close()


def story(io: RawIo, shape: Shape) -> set[tuple[int, int]]:
    """Writes, reads, a checkpoint, a reset; what went well. Raises nothing but errors of our own."""
    machine = Machine(io, shape)
    stored: set[tuple[int, int]] = set()
    last = len(shape.places) - 1  # with two image sizes, over all others
    try:
        stored = machine.write(stored, (0, 0), (1, 1))
        stored = machine.write(stored, (0, 2) if last == 1 else (last, 2))
        try:
            machine.tier._index.checkpoint()
        except LongshoreError:
            logging.getLogger(__name__).debug("no checkpoint")
        statuses = machine.run(Op.READ, sorted(stored))
        stored = set(itertools.compress(sorted(stored), (status is Status.OK for status in statuses)))
        stored = machine.write(stored, (1, 3))
    finally:
        machine.close()
    return stored


def judge(disk: Image, stored: set[tuple[int, int]], shape: Shape) -> None:
    """The next process, on a disk that works, serves all that went well, and what it serves is right."""
    machine = Machine(SimulatedDisk(disk, remember=False), shape)
    assert stored <= machine.listed()
    for place, number in itertools.product(range(len(shape.places)), range(NUMBERS)):
        (status,) = machine.run(Op.READ, [(place, number)])
        assert status in {Status.OK, Status.MISMATCH, Status.CORRUPT}
        assert status is Status.OK or (place, number) not in stored
    machine.close()


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


WRONG = {
    "EINTR": fails_with(errno.EINTR),
    "EIO": fails_with(errno.EIO),
    "ENOSPC": fails_with(errno.ENOSPC),
    "half": moves_half,
}


def workers() -> list[str]:
    """Threads that move images."""
    names = (thread.name for thread in threading.enumerate())
    return [name for name in names if name.startswith("longshore-file-") and not name.endswith("-index")]


SHAPES = {"one size": one_size(), "apart": APART, "two sizes": TWO_SIZES}
TURNS = [  # each error, each shape, and both beginnings; nightly, each of one with each of the others
    *[("EIO", True, "one size"), ("EIO", False, "apart"), ("EINTR", False, "one size"), ("EINTR", True, "two sizes")],
    *[("ENOSPC", True, "apart"), ("ENOSPC", False, "two sizes"), ("half", False, "one size"), ("half", True, "apart")],
]


@pytest.mark.parametrize(
    ("wrong", "again", "shape"), deep(TURNS, list(itertools.product(WRONG, (False, True), SHAPES))), ids=str
)
def test_every_call_in_turn(wrong: str, again: bool, shape: str) -> None:
    """Until the story is told without a failure, since it has no more calls."""
    told, end = SHAPES[shape], {(1, 3)} if shape == "two sizes" else {(0, 2), (1, 3)}
    before: Image = {}
    if again:
        first = SimulatedDisk()
        story(first, told)
        before = first.moments[-1].killed()
    failed = []
    for nth in itertools.count(1):
        disk = SimulatedDisk(before)
        io = FailsOnce(disk, nth, WRONG[wrong])
        try:
            stored = story(io, told)  # type: ignore[arg-type]
        except LongshoreError:
            assert io.failed is not None
            stored = set()
        assert disk.descriptors == 0, io.failed
        assert workers() == [], io.failed
        if io.failed is None and io.calls < nth:
            assert stored == end
            break
        failed.append(io.failed)
        image_now = disk.moments[-1].killed() if disk.moments else before
        judge(image_now, stored, told)
    elsewhere = {"allocate", "free_bytes"} if again else set()
    assert set(failed) - {None} == set(CALLS) - {"close", "fchmod", "drop_cache", "ftruncate"} - elsewhere


class FailsFrom(FailsOnce):
    """A disk that fails from the `nth` call on, and takes no more."""

    def _call(self, name: str, *arguments: Any, **named: Any) -> Any:
        if self.calls >= self._nth and name not in ("close", "open_queue"):
            self._nth = self.calls + 1
        return super()._call(name, *arguments, **named)


@pytest.mark.parametrize("kind", [FailsOnce, FailsFrom])
@pytest.mark.parametrize("wrong", WRONG)
def test_reset_that_returned_or_was_closed_holds_under_faults(wrong: str, kind: Any) -> None:
    """But where a disk takes nothing at all any more, not even that a file becomes shorter: the log says so."""
    shape, failed, lost = one_size(), [], 0
    first = SimulatedDisk()
    story(first, shape)
    before = first.moments[-1].killed()
    for nth in itertools.count(1):
        disk = SimulatedDisk(before)
        machine = Machine(disk, shape)  # type: ignore[arg-type]
        io = kind(disk, nth, WRONG[wrong])
        machine.tier._directory.io = io
        returned = True
        try:
            machine.tier.reset(1)
        except LongshoreError:
            assert io.failed is not None
            returned = False
        killed = disk.moments[-1].killed()
        machine.close()
        if io.failed is None:
            break
        failed.append(io.failed)
        for image_now in [disk.moments[-1].killed()] + [killed] * returned:
            after = Machine(SimulatedDisk(image_now, remember=False), shape)
            if after.listed():
                lost += 1
                assert not returned
                assert kind is FailsFrom
            after.close()
    assert {"pwrite", "fsync"} <= set(failed)
    assert lost == (1 if kind is FailsFrom and wrong in ("EIO", "ENOSPC", "EINTR") else 0), "only if nothing was taken"


MORE = Shape(Slabs.of_one_size(2 * DISK_PAGE, 5), ((0, 0), (1, 0)))
FEWER = Shape(Slabs.of_one_size(2 * DISK_PAGE, 1), ((0, 0),))
OTHERS = {"larger images": one_size(pages=2), "two sizes": TWO_SIZES, "more": MORE, "fewer": FEWER}


@pytest.mark.parametrize("wrong", ["EIO", "ENOSPC"])
@pytest.mark.parametrize("other", OTHERS)
def test_failed_open_with_other_slabs_leaves_directory_unchanged(wrong: str, other: str) -> None:
    """Up to the superblock, which says in one step that they are others; from there on, the tier is the new one."""
    shape = one_size()
    first = SimulatedDisk()
    stored = story(first, shape)
    before = first.moments[-1].killed()
    kept, changed = 0, 0
    for nth in itertools.count(1):
        disk = SimulatedDisk(before)
        io = FailsOnce(disk, nth, WRONG[wrong])
        try:
            Machine(io, OTHERS[other]).close()  # type: ignore[arg-type]
        except LongshoreError:
            image_now = disk.moments[-1].killed() if disk.moments else before
            if all(image_now[name] == before[name] for name in COPIES) or io.failed in ("allocate", "free_bytes"):
                kept += 1
                judge(image_now, stored, shape)
            else:
                changed += 1
                judge(image_now, set(), OTHERS[other])
        if io.failed is None and io.calls < nth:
            break
    assert kept > 10
    assert changed > 1
