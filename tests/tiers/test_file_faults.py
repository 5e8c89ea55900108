"""The file tier on a disk that misbehaves: every way that a system call can end; a disk that is stuck."""

import errno
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import cast

import pytest

from longshore.boundary import Status
from longshore.testing import TierHarness, TierTests
from longshore.tiers.arena import DISK_PAGE
from longshore.tiers.base import Op, TierOp
from longshore.tiers.file import FileTier, RawIo
from longshore.tiers.file.executor import AHEAD
from mappings import open_files
from plain_io import PlainIo

IMAGE = TierTests.image_bytes
Call = Callable[[Callable[..., int], int, Sequence[memoryview], int], int]


def fails_with(number: int) -> Call:
    def call(real: Callable[..., int], fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        raise OSError(number, os.strerror(number))

    return call


def moves_only(nbytes: int) -> Call:
    """Moves no more than the pages that `nbytes` lie in, and says `nbytes`."""

    def call(real: Callable[..., int], fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        left, some = -(-nbytes // DISK_PAGE) * DISK_PAGE, []
        for buffer in buffers:
            some.append(buffer[:left])
            left -= len(some[-1])
        if nbytes:
            real(fd, [buffer for buffer in some if buffer], offset)
        return nbytes

    return call


class ScriptedIo(PlainIo):
    """Does as the script says, call by call; when it has ended, does what the system does."""

    def __init__(self) -> None:
        self.script: list[Call] = []

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int:
        return self._next(super().preadv, fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int:
        return self._next(super().pwritev, fd, buffers, offset)

    def _next(self, real: Callable[..., int], fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return self.script.pop(0)(real, fd, buffers, offset) if self.script else real(fd, buffers, offset)


@pytest.fixture(params=["direct", "buffered"])
def io(request: pytest.FixtureRequest) -> ScriptedIo:
    io = ScriptedIo()
    if request.param == "buffered":
        io.script = [fails_with(errno.EINVAL)]  # to the probe for direct I/O
    return io


@pytest.fixture
def harness(io: RawIo, harness_of: Callable[..., TierHarness]) -> TierHarness:
    return harness_of(io=io, threads=1)


INTERRUPTED = fails_with(errno.EINTR)
STEPS = [
    ([moves_only(DISK_PAGE)], Status.OK),
    ([moves_only(DISK_PAGE), moves_only(2 * DISK_PAGE)], Status.OK),
    ([moves_only(DISK_PAGE + 512)], Status.OK),
    ([moves_only(3 * DISK_PAGE - 1), INTERRUPTED, moves_only(DISK_PAGE)], Status.OK),
    ([INTERRUPTED, INTERRUPTED], Status.OK),
    ([INTERRUPTED] * 1000, Status.IO_ERROR),
    ([fails_with(errno.EIO)], Status.IO_ERROR),
    ([moves_only(2 * DISK_PAGE), fails_with(errno.EIO)], Status.IO_ERROR),
    ([moves_only(DISK_PAGE), moves_only(DISK_PAGE), fails_with(errno.ENODEV)], Status.IO_ERROR),
]
WRITE_STEPS = [
    ([fails_with(errno.ENOSPC)], Status.NO_SPACE),
    ([fails_with(errno.EDQUOT)], Status.NO_SPACE),
    ([moves_only(DISK_PAGE), fails_with(errno.ENOSPC)], Status.NO_SPACE),
    ([moves_only(0)], Status.IO_ERROR),
    ([moves_only(DISK_PAGE), moves_only(0)], Status.IO_ERROR),
]
READ_STEPS = [
    ([moves_only(0)], Status.SHORT),
    ([moves_only(DISK_PAGE), moves_only(0)], Status.SHORT),
    ([moves_only(4 * DISK_PAGE), moves_only(0)], Status.SHORT),
]


@pytest.mark.parametrize(("script", "expected"), STEPS + WRITE_STEPS)
def test_a_write_that_goes_wrong(harness: TierHarness, io: ScriptedIo, script: list[Call], expected: Status) -> None:
    harness.store(0, 0)
    write = harness.op(Op.WRITE, 0, 1)
    harness.bytes_of(write)[:] = 1
    io.script = list(script)
    assert harness.run(write) == (expected,)
    assert len(io.script) in {0, 1000 - 101}
    io.script = []
    # Whatever it left behind: the new image whole, the old one whole, or a miss.
    status, found = harness.load(0, 1)
    assert (status is Status.OK) == (expected is Status.OK)
    if status is Status.OK:
        assert set(found.tolist()) == {1}
    if harness.load(0, 0)[0] is Status.OK:
        harness.assert_serves(0, 0)
    harness.store(0, 2)
    harness.assert_serves(0, 2)


@pytest.mark.parametrize(("script", "expected"), STEPS + READ_STEPS)
def test_a_read_that_goes_wrong(harness: TierHarness, io: ScriptedIo, script: list[Call], expected: Status) -> None:
    harness.store(0, 0)
    io.script = list(script)
    if expected is Status.OK:
        harness.assert_serves(0, 0)
    else:
        assert harness.load(0, 0)[0] is expected
    assert len(io.script) in {0, 1000 - 101}
    io.script = []
    harness.assert_serves(0, 0)


def test_less_than_a_page_is_no_progress_with_direct_io(harness: TierHarness, io: ScriptedIo) -> None:
    assert isinstance(harness.tier, FileTier)
    harness.store(0, 0)
    io.script = [moves_only(100)]
    assert harness.load(0, 0)[0] is (Status.SHORT if harness.tier.direct else Status.OK)
    io.script = [moves_only(100)]
    expected = Status.IO_ERROR if harness.tier.direct else Status.OK
    assert harness.run(harness.op(Op.WRITE, 0, 0)) == (expected,)


def test_an_unexpected_error_is_logged_and_ends_one_operation(
    harness: TierHarness, io: ScriptedIo, caplog: pytest.LogCaptureFixture
) -> None:
    def explode(*_: object) -> int:
        raise ZeroDivisionError("nobody expects this")

    io.script = [explode]
    assert harness.run(harness.op(Op.WRITE, 0, 0)) == (Status.INTERNAL_ERROR,)
    assert "nobody expects this" in caplog.text
    harness.store(0, 0)
    harness.assert_serves(0, 0)


def test_error_of_closing_a_descriptor_stops_nothing(
    opener: Callable[..., FileTier], directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each descriptor of a tier, from its opening to its end, the last checkpoint's included."""
    opener().close()
    before, threads, close = open_files(), threading.active_count(), os.close
    failed: list[str] = []

    def failing(fd: int) -> None:
        name = Path(f"/proc/self/fd/{fd}").readlink()
        close(fd)
        if directory in (name, name.parent):
            failed.append(name.name)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "close", failing)
    tier = opener()
    opened = len(failed)
    tier.close()
    assert {"index.0", "index.1"} & set(failed[opened:]), "a checkpoint was written in the end"
    assert {"lock", "segment", directory.name} <= set(failed[opened:])
    assert len(caplog.records) == len(failed)
    assert open_files() == before
    assert threading.active_count() == threads
    assert tier.failures["checkpoint"] == 0
    opener().close()  # the lock was released, too
    monkeypatch.undo()  # pytest removes the directory


def test_a_descriptor_that_is_not_open_is_a_mistake() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        PlainIo().close(1 << 20)


class StuckIo(PlainIo):
    """A disk that hangs until it is told to go on; it keeps the offsets of the calls in order."""

    def __init__(self) -> None:
        self.stuck = False
        self.entered = threading.Event()
        self.go_on = threading.Event()
        self.offsets: list[int] = []

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int:
        self._wait(offset)
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int:
        self._wait(offset)
        return super().pwritev(fd, buffers, offset)

    def _wait(self, offset: int) -> None:
        if self.stuck:
            self.offsets.append(offset)
            self.entered.set()
            assert self.go_on.wait(60)


class TestStuckDisk:
    @pytest.fixture
    def io(self) -> StuckIo:
        return StuckIo()

    @pytest.fixture
    def stuck(self, harness: TierHarness, io: StuckIo) -> Iterator[int]:
        """The ticket of a write that has begun and does not end."""
        io.stuck = True
        ticket = harness.tier.submit([harness.op(Op.WRITE, 0, 0)], math.inf)
        assert io.entered.wait(60)
        yield ticket
        io.go_on.set()

    def test_trap_38_what_waits_behind_it_ends_by_its_deadline(self, harness: TierHarness, stuck: int) -> None:
        waiting = harness.tier.submit([harness.op(Op.READ, 1, 1), harness.op(Op.WRITE, 2, 2)], time.monotonic() + 0.01)
        assert harness.wait(waiting).statuses == (Status.DEADLINE, Status.DEADLINE)

    def test_what_waits_behind_it_can_be_cancelled(self, harness: TierHarness, io: StuckIo, stuck: int) -> None:
        waiting = harness.tier.submit([harness.op(Op.WRITE, 1, 1)], math.inf)
        harness.tier.cancel(stuck)
        harness.tier.cancel(waiting)
        assert harness.wait(waiting).statuses == (Status.CANCELLED,)
        assert harness.tier.poll() == []
        io.go_on.set()
        assert harness.wait(stuck).statuses == (Status.OK,)

    def test_close_waits_for_it_and_ends_the_rest(self, harness: TierHarness, io: StuckIo, stuck: int) -> None:
        waiting = harness.tier.submit([harness.op(Op.WRITE, 1, 1)], math.inf)
        closer = threading.Thread(target=harness.tier.close)
        closer.start()
        assert harness.wait(waiting).statuses == (Status.TIER_OFF,)
        assert closer.is_alive()
        io.go_on.set()
        closer.join()
        assert harness.wait(stuck).statuses == (Status.OK,)

    def test_reads_overtake_writes_but_do_not_starve_them(self, harness: TierHarness, io: StuckIo, stuck: int) -> None:
        def op(kind: Op, slot: int) -> TierOp:
            return harness.op(kind, slot, slot, place=slot)

        tickets = [harness.tier.submit([op(Op.WRITE, 1)], math.inf)]
        tickets += [harness.tier.submit([op(Op.READ, 2)], math.inf) for _ in range(9)]
        io.go_on.set()
        for ticket in tickets:
            harness.wait(ticket)
        order = [offset // (DISK_PAGE + IMAGE) for offset in io.offsets]
        assert order == [0, *[2] * 7, 1, 2, 2]


def test_read_waits_for_pieces_in_threads_and_ready_ones(
    harness_of: Callable[..., TierHarness],
) -> None:
    """Not for all that have been asked for before it: nothing is taken while the threads have enough to do."""
    io = StuckIo()
    harness = harness_of(io=io, threads=4, slots=11)
    io.stuck = True
    apart = [[harness.op(Op.WRITE, slot, slot, place=slot) for slot in range(0, 10, 2)] for _ in range(3)]
    tickets = [harness.tier.submit(batch, math.inf) for batch in apart]
    tickets.append(harness.tier.submit([harness.op(Op.WRITE, 9, 9, place=9)], math.inf))
    executor, give_up = cast(FileTier, harness.tier)._executor, time.monotonic() + 20
    while (are_ready := len(executor._ready)) < AHEAD and time.monotonic() < give_up:
        time.sleep(0.001)
    tickets.append(harness.tier.submit([harness.op(Op.READ, 10, 10, place=10)], math.inf))
    io.go_on.set()
    for ticket in tickets:
        harness.wait(ticket)
    assert are_ready == AHEAD
    order = [offset // (DISK_PAGE + IMAGE) for offset in io.offsets]
    assert order.index(10) < order.index(9)
