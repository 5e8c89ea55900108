"""The queue of the system: several pieces at once, each with an outcome of its own; what it refuses goes without it."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from longshore.boundary import Status
from longshore.testing import TierHarness, TierTests
from longshore.testing.tier_harness import image
from longshore.tiers.arena import DISK_PAGE
from longshore.tiers.base import Op
from longshore.tiers.file import FileTier
from longshore.tiers.file import io as file_io
from longshore.tiers.file.io import AioQueue, IoQueue, Piece, SystemIo
from mappings import open_files

STRIDE = DISK_PAGE + TierTests.image_bytes
pytestmark = pytest.mark.usefixtures("on_ext4")

SLOTS = 8
APART = [0, 2, 4, 6]
PIECES, BUFFERS = 4, 2


def contexts() -> int:
    """Contexts of this process: each is a mapping of its own."""
    return sum("[aio]" in line for line in Path("/proc/self/maps").read_text().splitlines())


def memory(pages: int, byte: int = 0) -> memoryview:
    found = memoryview(mmap.mmap(-1, pages * DISK_PAGE))
    found[:] = bytes([byte]) * len(found)
    return found


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    """A file of sixteen pages, numbered."""
    (tmp_path / "file").write_bytes(b"".join(bytes([page]) * DISK_PAGE for page in range(16)))
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_DIRECT)
    yield fd
    os.close(fd)


@pytest.fixture
def queue(fd: int) -> Iterator[AioQueue]:
    queue = SystemIo().open_queue(fd, PIECES, BUFFERS)
    assert isinstance(queue, AioQueue), "this system has one"
    yield queue
    queue.close()


def move(queue: IoQueue, pieces: Sequence[Piece], *, writing: bool) -> list[int]:
    """What came of each, when all have ended."""
    numbers = queue.submit(pieces, writing=writing)
    ended: dict[int, int] = {}
    while len(ended) < len(pieces):
        ended.update(queue.reap())
    return [ended[number] for number in numbers]


class Calls:
    """The system's calls, of which some are answered by a test: by number, results or errors in turn."""

    def __init__(self) -> None:
        self.answers: dict[int, list[Callable[..., int]]] = {}
        self._real = file_io._syscall

    def __call__(self, number: int, *arguments: int) -> int:
        if self.answers.get(number):
            return self.answers[number].pop(0)(lambda *changed: self._real(number, *changed), *arguments)
        return int(self._real(number, *arguments))


def fails(number: int) -> Callable[..., int]:
    def call(real: Callable[..., int], *arguments: int) -> int:
        ctypes.set_errno(number)
        return -1

    return call


def takes_one(real: Callable[..., int], context: int, count: int, *rest: int) -> int:
    return real(context, 1, *rest)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls = Calls()
    monkeypatch.setattr(file_io, "_syscall", calls)
    return calls


NUMBERS = file_io._CALLS[os.uname().machine]


def test_pieces_of_several_buffers_go_where_they_belong(queue: AioQueue) -> None:
    one, two, three = memory(1), memory(2), memory(1)
    assert move(queue, [Piece([one, two], 3 * DISK_PAGE), Piece([three], 9 * DISK_PAGE)], writing=False) == [
        3 * DISK_PAGE,
        DISK_PAGE,
    ]
    assert [one[0], two[0], two[DISK_PAGE], three[0]] == [3, 4, 5, 9]
    assert move(queue, [Piece([memory(1, 77)], 4 * DISK_PAGE), Piece([memory(1, 78)], 0)], writing=True) == [
        DISK_PAGE,
        DISK_PAGE,
    ]
    assert move(queue, [Piece([one, two], 3 * DISK_PAGE), Piece([three], 0)], writing=False) == [
        3 * DISK_PAGE,
        DISK_PAGE,
    ]
    assert [one[0], two[0], two[DISK_PAGE], three[0]] == [3, 77, 5, 78]


def test_each_piece_has_an_outcome_of_its_own(queue: AioQueue) -> None:
    """One that the file ends in, one behind its end, one that direct I/O cannot move."""
    pieces = [
        Piece([memory(2)], 15 * DISK_PAGE),
        Piece([memory(1)], 16 * DISK_PAGE),
        Piece([memory(1)], 17),
        Piece([memory(1)], 0),
    ]
    assert move(queue, pieces, writing=False) == [DISK_PAGE, 0, -errno.EINVAL, DISK_PAGE]


def test_a_system_that_takes_them_bit_by_bit_gets_all(queue: AioQueue, calls: Calls) -> None:
    calls.answers[NUMBERS.submit] = [takes_one, takes_one]
    pieces = [Piece([memory(1)], page * DISK_PAGE) for page in range(4)]
    assert move(queue, pieces, writing=False) == [DISK_PAGE] * 4
    assert [piece.buffers[0][0] for piece in pieces] == [0, 1, 2, 3]
    assert not calls.answers[NUMBERS.submit]


def test_refused_pieces_fail_and_the_others_end(queue: AioQueue, calls: Calls) -> None:
    calls.answers[NUMBERS.submit] = [takes_one, fails(errno.EAGAIN)]
    pieces = [Piece([memory(1)], page * DISK_PAGE) for page in (5, 6, 7)]
    assert move(queue, pieces, writing=False) == [DISK_PAGE, -errno.EAGAIN, -errno.EAGAIN]
    assert [piece.buffers[0][0] for piece in pieces] == [5, 0, 0]


def test_a_wait_that_is_interrupted_goes_on(queue: AioQueue, calls: Calls) -> None:
    calls.answers[NUMBERS.getevents] = [fails(errno.EINTR), fails(errno.EINTR)]
    assert move(queue, [Piece([memory(1)], 0), Piece([memory(1)], DISK_PAGE)], writing=False) == [DISK_PAGE] * 2
    assert not calls.answers[NUMBERS.getevents]


def test_failed_wait_ends_io_in_flight_and_destroys_the_context(queue: AioQueue, calls: Calls) -> None:
    before = contexts()
    calls.answers[NUMBERS.getevents] = [fails(errno.EFAULT)]
    piece = Piece([memory(1)], 9 * DISK_PAGE)
    assert move(queue, [piece, piece], writing=False) == [-errno.EFAULT] * 2
    assert contexts() < before
    assert piece.buffers[0][0] == 9, "nothing arrives later"
    assert move(queue, [piece, piece], writing=False) == [DISK_PAGE] * 2, "there is a new one"


def test_pieces_fail_until_there_is_a_new_context(queue: AioQueue, calls: Calls) -> None:
    calls.answers = {NUMBERS.getevents: [fails(errno.EFAULT)], NUMBERS.setup: [fails(errno.EAGAIN)]}
    piece = Piece([memory(1)], 9 * DISK_PAGE)
    for outcome in (-errno.EFAULT, -errno.EAGAIN, DISK_PAGE):
        assert move(queue, [piece], writing=False) == [outcome]


def test_pieces_begun_one_by_one_run_together(queue: AioQueue) -> None:
    """And the numbers of those that have ended are given again, however often."""
    for _ in range(10 * PIECES):
        pieces = [Piece([memory(1)], page * DISK_PAGE) for page in range(PIECES)]
        numbers = [number for piece in pieces for number in queue.submit([piece], writing=False)]
        assert sorted(numbers) == list(range(PIECES))
        left = set(numbers)
        while left:
            for number, moved in queue.reap():
                assert moved == DISK_PAGE
                left.remove(number)
        assert [piece.buffers[0][0] for piece in pieces] == list(range(PIECES))
        queue.wake()
        assert queue.reap() == []


def test_numbers_of_what_was_refused_are_given_once(queue: AioQueue, calls: Calls) -> None:
    calls.answers[NUMBERS.submit] = [takes_one, fails(errno.EAGAIN), fails(errno.EAGAIN)]
    for expected in ([DISK_PAGE, -errno.EAGAIN, -errno.EAGAIN], [-errno.EAGAIN] * 3, [DISK_PAGE] * 3):
        assert move(queue, [Piece([memory(1)], 0)] * 3, writing=False) == expected
    numbers = queue.submit([Piece([memory(1)], 0)] * PIECES, writing=False)
    assert sorted(numbers) == list(range(PIECES))


def test_waiter_can_be_woken_before_and_while_waiting(queue: AioQueue) -> None:
    queue.wake()
    assert queue.reap() == []
    waiting = threading.Thread(target=queue.reap)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    queue.wake()
    waiting.join(60)
    assert not waiting.is_alive()


def test_no_context_is_left_after_close_or_failed_setup(fd: int, calls: Calls) -> None:
    before = contexts(), open_files()
    queue = SystemIo().open_queue(fd, PIECES, BUFFERS)
    assert queue is not None
    assert contexts() > before[0]
    queue.close()
    queue.close()
    calls.answers[NUMBERS.setup] = [fails(errno.EAGAIN)]
    with pytest.raises(OSError, match="temporarily unavailable"):
        SystemIo().open_queue(fd, PIECES, BUFFERS)
    assert (contexts(), open_files()) == before


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EAGAIN, errno.EPERM])
def test_a_tier_without_a_queue_does_what_others_do(
    harness_of: Callable[..., TierHarness], calls: Calls, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    calls.answers[NUMBERS.setup] = [fails(number)]
    harness = harness_of(slots=SLOTS)
    assert not calls.answers[NUMBERS.setup]
    assert harness.tier.fallbacks == {"no_direct_io": 0, "no_queue": 1}
    assert [record.levelname for record in caplog.records if "falling back to a thread pool" in record.message] == [
        "WARNING"
    ]
    assert store(harness, APART) == (Status.OK,) * 4
    assert load(harness, APART) == (Status.OK,) * 4


@pytest.mark.parametrize(("kind", "no_queue"), [("xfs", 0), ("ext4", 0), ("fuse", 1), ("tmpfs", 1)])
def test_threads_serve_where_a_submission_may_block(
    harness_of: Callable[..., TierHarness], monkeypatch: pytest.MonkeyPatch, kind: str, no_queue: int
) -> None:
    monkeypatch.setattr(file_io, "file_system_of", lambda device: kind)
    harness = harness_of(slots=SLOTS)
    assert harness.tier.fallbacks == {"no_direct_io": 0, "no_queue": no_queue}
    assert store(harness, APART) == load(harness, APART) == (Status.OK,) * 4


def test_the_file_system_is_the_one_that_is_mounted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with Path("/proc/self/stat").open("rb") as file:
        assert file_io.file_system_of(os.fstat(file.fileno()).st_dev) == "proc"
    reading, writing = os.pipe()
    assert file_io.file_system_of(os.fstat(reading).st_dev) == "an unknown file system"
    os.close(reading)
    os.close(writing)


def test_a_buffered_file_gets_no_queue(
    harness_of: Callable[..., TierHarness], monkeypatch: pytest.MonkeyPatch, io: Spied
) -> None:
    monkeypatch.setattr(Spied, "enable_direct", lambda self, fd: False)
    harness = harness_of(io=io, slots=SLOTS)
    assert harness.tier.fallbacks == {"no_direct_io": 1, "no_queue": 1}
    assert store(harness, APART) == load(harness, APART) == (Status.OK,) * 4
    assert io.moved == []


class Spied(SystemIo):
    """The system, with a note of what went through its queue; pieces that touch a bad byte fail, there and alone."""

    def __init__(self) -> None:
        self.moved: list[list[int]] = []
        self.alone: list[int] = []
        self.bad: dict[int, int] = {}
        self.short: dict[int, int] = {}

    def open_queue(self, fd: int, pieces: int, buffers: int, /) -> IoQueue | None:
        queue = super().open_queue(fd, pieces, buffers)
        assert queue is not None
        return Spy(self, queue)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int:
        return self._try(super().preadv, fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int:
        return self._try(super().pwritev, fd, buffers, offset)

    def _try(self, call: Callable[..., int], fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.alone.append(offset)
        if offset in self.bad:
            raise OSError(self.bad[offset], os.strerror(self.bad[offset]))
        return call(fd, buffers, offset)


class Spy:
    def __init__(self, io: Spied, queue: IoQueue) -> None:
        self._io = io
        self._queue = queue
        self._offsets: dict[int, int] = {}
        self._together = 0
        self.wake, self.close = queue.wake, queue.close

    def submit(self, pieces: Sequence[Piece], /, *, writing: bool) -> list[int]:
        self._io.moved.append([piece.offset for piece in pieces])
        self._together = len(self._io.short)
        numbers = self._queue.submit(pieces, writing=writing)
        self._offsets.update(zip(numbers, self._io.moved[-1], strict=True))
        return numbers

    def reap(self) -> list[tuple[int, int]]:
        ended = self._queue.reap()
        while len(ended) < self._together:
            ended += self._queue.reap()
        bad, short, self._together = self._io.bad, self._io.short, 0
        said = [(number, -bad.get(self._offsets[number], -moved)) for number, moved in ended]
        return [(number, short.pop(self._offsets[number], moved)) for number, moved in said]


@pytest.fixture
def io() -> Spied:
    return Spied()


@pytest.fixture
def harness(io: Spied, harness_of: Callable[..., TierHarness]) -> TierHarness:
    harness = harness_of(io=io, slots=SLOTS)
    io.alone.clear()
    return harness


def store(harness: TierHarness, slots: Sequence[int]) -> tuple[Status, ...]:
    ops = [harness.op(Op.WRITE, slot, slot, place=at) for at, slot in enumerate(slots)]
    for op, slot in zip(ops, slots, strict=True):
        harness.bytes_of(op)[:] = image(slot, op.length)
    return harness.run(*ops)


def load(harness: TierHarness, slots: Sequence[int]) -> tuple[Status, ...]:
    """Statuses; what was served is what was written."""
    ops = [harness.op(Op.READ, slot, slot, place=at) for at, slot in enumerate(slots)]
    for op in ops:
        harness.bytes_of(op)[:] = 0xCC
    statuses = harness.run(*ops)
    for op, slot, status in zip(ops, slots, statuses, strict=True):
        if status is Status.OK:
            np.testing.assert_array_equal(harness.bytes_of(op), image(slot, op.length))
    return statuses


def test_distant_records_move_in_parallel_and_adjacent_ones_together(harness: TierHarness, io: Spied) -> None:
    slots = [5, 0, 3, 1, 7]
    for run in (store, load):
        assert run(harness, slots) == (Status.OK,) * 5
    assert io.moved == [[0, 3 * STRIDE, 5 * STRIDE, 7 * STRIDE]] * 2
    assert io.alone == []
    assert load(harness, [3]) == (Status.OK,)
    assert io.moved[2:] == [[3 * STRIDE]]
    assert io.alone == []
    assert harness.tier.fallbacks == {"no_direct_io": 0, "no_queue": 0}


@pytest.mark.parametrize("kind", [Op.READ, Op.WRITE])
@pytest.mark.parametrize(("number", "status"), [(errno.EIO, Status.IO_ERROR), (errno.ENOSPC, Status.NO_SPACE)])
def test_a_bad_sector_fails_the_record_that_it_is_in(
    harness: TierHarness, io: Spied, kind: Op, number: int, status: Status
) -> None:
    store(harness, APART)
    io.bad = {2 * STRIDE: number}
    run = load if kind is Op.READ else store
    assert run(harness, APART) == (Status.OK, status, Status.OK, Status.OK)
    assert io.moved[1:] == [[slot * STRIDE for slot in APART], [2 * STRIDE]], "among others, and then by itself"
    assert io.alone == [], "a plain call would keep the others waiting for a sick disk"
    assert cast(FileTier, harness.tier).failures[f"{kind.value}_io_error"] == int(status is Status.IO_ERROR)
    io.bad = {}
    assert {chunk.slot for chunk in harness.tier.recover()} == ({0, 4, 6} if run is store else _left(status))


def test_several_short_pieces_continue_independently(harness: TierHarness, io: Spied) -> None:
    """Though the queue gives the numbers of those that have ended to what is left of others."""
    store(harness, APART)
    cut = {slot * STRIDE: (1 + slot // 2) * DISK_PAGE for slot in APART}
    io.short = dict(cut)
    assert load(harness, APART) == (Status.OK,) * 4
    rest = {offset + nbytes for offset, nbytes in cut.items() if nbytes < STRIDE}
    assert {offset for moved in io.moved[2:] for offset in moved} == rest
    assert io.alone == []


def _left(status: Status) -> set[int]:
    """A record that could not be read is not looked for again, if that is the disk's fault."""
    return {0, 4, 6} if status.invalidates_source else set(APART)


def test_what_only_the_queue_cannot_do_is_done_without_it(
    harness: TierHarness, io: Spied, calls: Calls, caplog: pytest.LogCaptureFixture
) -> None:
    """A submission that is refused, a wait that fails, and then no new context."""
    store(harness, APART)
    for answers in (
        {NUMBERS.submit: [fails(errno.EAGAIN)]},
        {NUMBERS.getevents: [fails(errno.EFAULT)]},
        {NUMBERS.setup: [fails(errno.EAGAIN)]},  # the one there was has gone with the wait
    ):
        calls.answers = dict(answers)
        assert load(harness, APART) == (Status.OK,) * 4
        assert io.alone == [slot * STRIDE for slot in APART]
        assert list(calls.answers.values()) == [[]]
        io.alone.clear()
    assert load(harness, APART) == (Status.OK,) * 4
    assert io.alone == []
    refused = [record.levelname for record in caplog.records if "asynchronous I/O refused" in record.message]
    assert refused == ["WARNING"]
    assert cast(FileTier, harness.tier).failures["read_io_error"] == 0


def test_forked_child_closing_its_copy_spares_the_queue(harness: TierHarness, io: Spied) -> None:
    store(harness, APART)
    child = os.fork()
    if not child:
        harness.tier.close()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    io.moved.clear()
    assert load(harness, APART) == (Status.OK,) * 4
    assert len(io.moved) == 1
