"""Each system call of a file tier fails once, at every place of a story: typed errors, no wrong byte, nothing stuck."""

from __future__ import annotations

import errno
import functools
import itertools
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from longshore.boundary import Status
from longshore.errors import LongshoreError
from longshore.testing.simulated_disk import Image, SimulatedDisk
from longshore.testing.tier_harness import image, key
from longshore.tiers.arena import PAGE, Arena
from longshore.tiers.base import Op, TierOp
from longshore.tiers.file import FileTier, RawIo, capacity_for

SLOTS, NUMBERS = 2, 4
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
            return call(*arguments)
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
    """A tier on `io`, and what it was asked for."""

    def __init__(self, io: RawIo) -> None:
        self.arena = Arena(NUMBERS * PAGE)
        try:
            self.tier = FileTier(
                Path("/simulated"),
                capacity=capacity_for(SLOTS, PAGE),
                image_bytes=PAGE,
                arena=self.arena,
                scope=bytes(32),
                threads=1,
                io=io,
            )
        except BaseException:
            self.arena.close()
            raise

    def run(self, op: Op, slot: int, number: int) -> Status:
        place = self.arena.array[number * PAGE : (number + 1) * PAGE]
        place[:] = image(number, PAGE) if op is Op.WRITE else 0xCC
        self.tier.submit([TierOp(op, slot, key(number), None, number * PAGE, PAGE, self.tier.generation)], math.inf)
        give_up = time.monotonic() + 30
        while not (results := self.tier.poll()):
            assert time.monotonic() < give_up
            time.sleep(0.0001)
        if op is Op.READ and results[0].statuses == (Status.OK,):
            assert (place == image(number, PAGE)).all(), "a wrong byte was served"
        return results[0].statuses[0]

    def close(self) -> None:
        self.tier.close()
        self.arena.close()


def story(io: RawIo) -> set[tuple[int, int]]:
    """Writes, reads, a checkpoint, a reset; what went well. Raises nothing but errors of our own."""
    machine = Machine(io)
    stored: set[tuple[int, int]] = set()
    try:
        for slot, number in ((0, 0), (1, 1), (0, 2)):
            stored = {pair for pair in stored if pair[0] != slot}
            if machine.run(Op.WRITE, slot, number) is Status.OK:
                stored.add((slot, number))
        try:
            machine.tier.checkpoint()
        except LongshoreError:
            logging.getLogger(__name__).debug("no checkpoint")
        for slot, number in sorted(stored):
            if machine.run(Op.READ, slot, number) is not Status.OK:
                stored.discard((slot, number))
        stored = {pair for pair in stored if pair[0] != 1}
        if machine.run(Op.WRITE, 1, 3) is Status.OK:
            stored.add((1, 3))
    finally:
        machine.close()
    return stored


def judge(disk: Image, stored: set[tuple[int, int]]) -> None:
    """The next process, on a disk that works, serves all that went well, and what it serves is right."""
    machine = Machine(SimulatedDisk(disk, remember=False))
    listed = {(chunk.slot, chunk.key) for chunk in machine.tier.recover()}
    assert {(slot, key(number)) for slot, number in stored} <= listed
    for slot, number in itertools.product(range(SLOTS), range(NUMBERS)):
        status = machine.run(Op.READ, slot, number)
        assert status in {Status.OK, Status.MISMATCH, Status.CORRUPT}
        assert status is Status.OK or (slot, number) not in stored
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


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("again", [False, True], ids=["new", "again"])
def test_every_call_in_turn(wrong: str, again: bool) -> None:
    """Until the story is told without a failure, since it has no more calls."""
    before: Image = {}
    if again:
        first = SimulatedDisk()
        story(first)
        before = first.moments[-1].killed()
    failed = []
    for nth in itertools.count(1):
        disk = SimulatedDisk(before)
        io = FailsOnce(disk, nth, WRONG[wrong])
        try:
            stored = story(io)  # type: ignore[arg-type]
        except LongshoreError:
            assert io.failed is not None
            stored = set()
        if io.failed is None and io.calls < nth:
            assert len(stored) == 2
            break
        failed.append(io.failed)
        image_now = disk.moments[-1].killed() if disk.moments else before
        judge(image_now, stored)
    # A new disk has nothing to be read at the start, an old one has all its files.
    elsewhere = {"allocate", "free_bytes"} if again else {"pread"}
    assert set(failed) - {None} == set(CALLS) - {"close", "fchmod", "drop_cache"} - elsewhere
