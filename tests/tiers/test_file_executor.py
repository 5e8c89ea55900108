"""One thread, many tasks in the disk: what is under way together, what is gone on with first, what never gets stuck."""

from __future__ import annotations

import errno
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import numpy as np
import pytest

from longshore.boundary import Status
from longshore.errors import TierClosedError
from longshore.testing import TierHarness, TierTests
from longshore.testing.tier_harness import image
from longshore.tiers.arena import DISK_PAGE
from longshore.tiers.base import Op, TierOp
from longshore.tiers.file import FileTier, executor
from longshore.tiers.file.io import IoQueue, Piece
from plain_io import PlainIo

STRIDE = DISK_PAGE + TierTests.image_bytes
SLOTS = 24
TIMEOUT = 60.0


class HeldIo(PlainIo):
    """The system, with a queue that a test opens and shuts; other calls work as ever."""

    def __init__(self) -> None:
        self.queue: Held

    def open_queue(self, fd: int, pieces: int, buffers: int, /) -> IoQueue:
        self.queue = Held(self, fd, pieces, buffers)
        return self.queue


class Held:
    """A disk that moves nothing while it is held, and then what was begun first.

    Attributes:
        begun: Offsets of pieces, in the order in which they were begun.
        most: How many were under way at once.
        wrong: What comes of pieces at an offset, once each.
    """

    def __init__(self, io: PlainIo, fd: int, pieces: int, buffers: int) -> None:
        self.begun: list[int] = []
        self.most = 0
        self.wrong: dict[int, int] = {}
        self.closed = False
        self._io = io
        self._fd = fd
        self._limits = pieces, buffers
        self._changed = threading.Condition()
        self._under_way: list[tuple[int, Piece, bool]] = []
        self._numbers = 0
        self._allowed = math.inf
        self._is_awake = False

    def hold(self) -> None:
        """From now on, nothing moves."""
        self._allowed = 0

    def let(self, count: float = math.inf) -> None:
        """So many more pieces move."""
        with self._changed:
            self._allowed += count
            self._changed.notify_all()

    def until(self, begun: int) -> None:
        """So many pieces were begun, and no more."""
        give_up = time.monotonic() + TIMEOUT
        while len(self.begun) < begun:
            assert time.monotonic() < give_up, f"only {len(self.begun)} were begun"
            time.sleep(0.001)
        assert len(self.begun) == begun

    def until_left(self, count: int) -> None:
        """No more than so many are under way."""
        give_up = time.monotonic() + TIMEOUT
        while len(self._under_way) > count:
            assert time.monotonic() < give_up, f"{len(self._under_way)} are under way"
            time.sleep(0.001)

    def last_first(self) -> None:
        """What was begun last moves first, of what is under way now."""
        with self._changed:
            self._under_way.reverse()

    def drop(self) -> None:
        """`close`, with all that is under way."""
        self._under_way.clear()
        self.closed = True

    def submit(self, pieces: Sequence[Piece], /, *, writing: bool) -> list[int]:
        with self._changed:
            first, self._numbers = self._numbers, self._numbers + len(pieces)
            numbers = list(range(first, self._numbers))
            self._under_way += [(number, piece, writing) for number, piece in zip(numbers, pieces, strict=True)]
            self.begun += [piece.offset for piece in pieces]
            self.most = max(self.most, len(self._under_way))
            assert self.most <= self._limits[0]
            assert all(len(piece.buffers) <= self._limits[1] for piece in pieces)
            return numbers

    def reap(self) -> list[tuple[int, int]]:
        with self._changed:
            while not self._is_awake and not (self._under_way and self._allowed):
                self._changed.wait()
            self._is_awake = False
            count = int(min(self._allowed, len(self._under_way)))
            self._allowed -= count
            moving, self._under_way = self._under_way[:count], self._under_way[count:]
        return [(number, self._move(*rest)) for number, *rest in moving]

    def wake(self) -> None:
        with self._changed:
            assert not self.closed
            self._is_awake = True
            self._changed.notify_all()

    def close(self) -> None:
        assert not self._under_way
        self.closed = True

    def _move(self, piece: Piece, writing: bool) -> int:
        moved = self.wrong.pop(piece.offset, piece.nbytes)
        if moved <= 0:
            return moved
        left, some = moved, []
        for buffer in piece.buffers:
            some.append(buffer[:left])
            left -= len(some[-1])
        return (self._io.pwritev if writing else self._io.preadv)(self._fd, some, piece.offset)


@pytest.fixture
def io() -> HeldIo:
    return HeldIo()


@pytest.fixture
def harness(io: HeldIo, harness_of: Callable[..., TierHarness]) -> Iterator[TierHarness]:
    harness = harness_of(io=io, slots=SLOTS)
    for slot in range(SLOTS):
        harness.store(slot, slot)
    io.queue.begun.clear()
    io.queue.most = 0
    yield harness
    io.queue.let()  # or a test that fails would never end


def ask(harness: TierHarness, *ops: TierOp, deadline: float = math.inf) -> int:
    for op in ops:
        harness.bytes_of(op)[:] = image(op.slot, op.length) if op.op is Op.WRITE else 0xCC
    return harness.tier.submit(ops, deadline)


def served(harness: TierHarness, ticket: int, *ops: TierOp) -> None:
    assert set(harness.wait(ticket).statuses) == {Status.OK}
    for op in ops:
        np.testing.assert_array_equal(harness.bytes_of(op), image(op.slot, op.length))


def reads(harness: TierHarness) -> list[TierOp]:
    return [harness.op(Op.READ, slot, slot, place=slot) for slot in range(SLOTS)]


def windows(harness: TierHarness) -> dict[bool, int]:
    """Room of reads and writes, to be made less."""
    room: dict[bool, int] = cast(FileTier, harness.tier)._executor._room
    return room


def test_tasks_in_flight_fill_the_window_and_no_more(harness: TierHarness, io: HeldIo) -> None:
    io.queue.hold()
    ops = reads(harness)
    tickets = [ask(harness, op) for op in ops]
    for more in range(3):
        io.queue.until(executor.WINDOW_TASKS + more)
        io.queue.let(1)
    assert io.queue.begun[: executor.WINDOW_TASKS] == [slot * STRIDE for slot in range(executor.WINDOW_TASKS)]
    io.queue.let()
    for ticket, op in zip(tickets, ops, strict=True):
        served(harness, ticket, op)
    assert io.queue.most == executor.WINDOW_TASKS < SLOTS


def test_bytes_in_flight_fill_the_window_plus_one_task(harness: TierHarness, io: HeldIo) -> None:
    windows(harness)[False] = 2 * TierTests.image_bytes + 1
    io.queue.hold()
    ops = reads(harness)
    tickets = [ask(harness, op) for op in ops]
    for begun in range(3, SLOTS):
        io.queue.until(begun)
        io.queue.let(1)
    io.queue.let()
    for ticket, op in zip(tickets, ops, strict=True):
        served(harness, ticket, op)
    assert io.queue.most == 3


def test_complete_batch_ends_while_others_are_under_way(harness: TierHarness, io: HeldIo) -> None:
    io.queue.hold()
    first, second = reads(harness)[:2]
    before, after = ask(harness, first), ask(harness, second)
    io.queue.until(2)
    io.queue.let(1)
    served(harness, before, first)
    assert harness.tier.poll() == []
    io.queue.let()
    served(harness, after, second)


def test_task_continues_when_its_last_piece_arrives(harness: TierHarness, io: HeldIo) -> None:
    io.queue.hold()
    ops = reads(harness)[::2][:3]
    ticket = ask(harness, *ops)
    io.queue.until(3)
    for left in (2, 1):
        io.queue.let(1)
        io.queue.until_left(left)
        assert harness.tier.poll() == []
    io.queue.let(1)
    served(harness, ticket, *ops)


def test_reads_go_before_writes_that_wait(harness: TierHarness, io: HeldIo) -> None:
    io.queue.hold()
    for slot in range(executor.WINDOW_TASKS):
        ask(harness, harness.op(Op.WRITE, slot, slot, place=slot))
    io.queue.until(executor.WINDOW_TASKS)
    write, read = (harness.op(op, slot, slot, place=slot) for op, slot in ((Op.WRITE, 22), (Op.READ, 23)))
    waiting, urgent = ask(harness, write), ask(harness, read)
    io.queue.let()
    served(harness, urgent, read)
    served(harness, waiting)
    assert io.queue.begun[executor.WINDOW_TASKS :] == [23 * STRIDE, 22 * STRIDE]


@pytest.mark.parametrize("moved", [-errno.EAGAIN, -errno.EINTR, -errno.EFAULT, 0, STRIDE - DISK_PAGE])
@pytest.mark.parametrize("kind", [Op.READ, Op.WRITE])
def test_interrupted_or_refused_pieces_are_retried(harness: TierHarness, io: HeldIo, kind: Op, moved: int) -> None:
    io.queue.wrong = {2 * STRIDE: moved, 4 * STRIDE: moved}
    ops = [harness.op(kind, slot, slot, place=slot) for slot in (0, 2, 4)]
    served(harness, ask(harness, *ops), *ops)
    assert not io.queue.wrong
    assert cast(FileTier, harness.tier).failures[f"{kind.value}_io_error"] == 0
    for slot in (0, 2, 4):
        harness.assert_serves(slot, slot)


@pytest.mark.parametrize("kind", [Op.READ, Op.WRITE])
def test_short_piece_continues_from_the_page_where_it_stopped(harness: TierHarness, io: HeldIo, kind: Op) -> None:
    io.queue.wrong = {2 * STRIDE: DISK_PAGE + 512, 3 * STRIDE: 2 * DISK_PAGE}
    op = harness.op(kind, 2, 2)
    served(harness, ask(harness, op), op)
    assert io.queue.begun == [2 * STRIDE, 2 * STRIDE + DISK_PAGE]
    harness.assert_serves(2, 2)


@pytest.mark.parametrize("kind", [Op.READ, Op.WRITE])
def test_endlessly_interrupted_piece_fails_and_progressing_one_does_not(
    harness: TierHarness, io: HeldIo, monkeypatch: pytest.MonkeyPatch, kind: Op
) -> None:
    monkeypatch.setattr(io.queue, "_move", lambda piece, writing: -errno.EINTR)
    assert harness.run(harness.op(kind, 2, 2)) == (Status.IO_ERROR,)
    assert io.queue.begun == [2 * STRIDE] * 101
    monkeypatch.undo()
    harness.store(2, 2)
    io.queue.begun.clear()
    moves = itertools.chain.from_iterable([*[-errno.EINTR] * 60, DISK_PAGE] for _ in range(STRIDE // DISK_PAGE - 1))
    move = io.queue._move

    def slow(piece: Piece, writing: bool) -> int:
        io.queue.wrong = {piece.offset: moved} if (moved := next(moves, None)) is not None else {}
        return move(piece, writing)

    monkeypatch.setattr(io.queue, "_move", slow)
    op = harness.op(kind, 2, 2)
    served(harness, ask(harness, op), op)
    assert len(io.queue.begun) == 61 * (STRIDE // DISK_PAGE - 1) + 1


def test_an_executor_that_was_closed_takes_nothing_more(harness: TierHarness) -> None:
    executor = cast(FileTier, harness.tier)._executor
    executor.close()
    with pytest.raises(TierClosedError):
        executor.submit([], [], math.inf)


def test_failed_record_is_retried_alone_while_others_continue(harness: TierHarness, io: HeldIo) -> None:
    bad, good = [harness.op(Op.READ, slot, slot, place=slot) for slot in (0, 2)], harness.op(Op.READ, 4, 4, place=4)
    io.queue.wrong = {0: -errno.EIO}
    io.queue.hold()
    failing = ask(harness, *bad)
    io.queue.until(2)
    io.queue.let(2)
    io.queue.until(3)
    io.queue.wrong = {0: -errno.EIO}
    other = ask(harness, good)
    io.queue.until(4)
    io.queue.last_first()
    io.queue.let(1)
    served(harness, other, good)
    assert harness.tier.poll() == []
    io.queue.let()
    assert harness.wait(failing).statuses == (Status.IO_ERROR, Status.OK)
    assert cast(FileTier, harness.tier).failures["read_io_error"] == 1


def test_staging_comes_back_from_tasks_that_fail(harness: TierHarness, io: HeldIo) -> None:
    for _ in range(2 * executor.WINDOW_TASKS):
        io.queue.wrong = {0: -errno.EIO}
        assert harness.run(harness.op(Op.READ, 0, 0)) == (Status.IO_ERROR,)
        harness.assert_serves(1, 1)  # or the disk would be given up
        harness.store(0, 0)  # what could not be read is not looked for again
    missing = [harness.op(Op.READ, slot, slot + 1) for slot in range(SLOTS)]
    assert {harness.run(op) for op in missing} == {(Status.MISMATCH,)}
    harness.assert_serves(0, 0)


def test_reads_overtake_writes_that_wait_for_their_window(harness: TierHarness, io: HeldIo) -> None:
    windows(harness)[True] = 1
    io.queue.hold()
    writes = [ask(harness, harness.op(Op.WRITE, slot, slot, place=slot)) for slot in (0, 2)]
    io.queue.until(1)
    read = harness.op(Op.READ, 4, 4, place=4)
    urgent = ask(harness, read)
    io.queue.until(2)
    assert io.queue.begun == [0, 4 * STRIDE]
    io.queue.let()
    for ticket in (*writes, urgent):
        served(harness, ticket)
    np.testing.assert_array_equal(harness.bytes_of(read), image(4, read.length))
    assert windows(harness)[True] == 1


def test_tasks_ready_for_the_window_are_bounded(harness: TierHarness, io: HeldIo) -> None:
    windows(harness)[False] = 1
    io.queue.hold()
    tickets = [ask(harness, op) for op in reads(harness)[: 2 + executor.AHEAD]]
    io.queue.until(1)
    give_up = time.monotonic() + TIMEOUT
    while len(cast(FileTier, harness.tier)._executor._reads) > 1:
        assert time.monotonic() < give_up
    for ticket in tickets:
        harness.tier.cancel(ticket)
    assert harness.wait(tickets[-1]).statuses == (Status.CANCELLED,)
    io.queue.let()
    assert {harness.wait(ticket).statuses for ticket in tickets[:-1]} == {(Status.OK,)}
    assert len(io.queue.begun) == 1 + executor.AHEAD


def test_pieces_that_cannot_be_begun_end_their_task_alone(
    harness: TierHarness, io: HeldIo, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> list[int]:
        raise BufferError("nobody expects this")

    monkeypatch.setattr(io.queue, "submit", refuse)
    for _ in range(2 * executor.WINDOW_TASKS):
        assert harness.run(harness.op(Op.READ, 1, 1)) == (Status.INTERNAL_ERROR,)
    assert "nobody expects this" in caplog.text
    monkeypatch.undo()
    harness.assert_serves(1, 1)


def test_a_queue_that_breaks_ends_all_and_closes_the_tier(
    harness: TierHarness, io: HeldIo, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    io.queue.hold()
    under_way = [ask(harness, op) for op in reads(harness)[: executor.WINDOW_TASKS]]
    waiting = ask(harness, reads(harness)[-1])
    io.queue.until(executor.WINDOW_TASKS)

    def breaks() -> list[tuple[int, int]]:
        raise KeyError(7)

    monkeypatch.setattr(io.queue, "reap", breaks)
    monkeypatch.setattr(io.queue, "close", io.queue.drop)
    io.queue.wake()
    assert {harness.wait(ticket).statuses for ticket in under_way} == {(Status.INTERNAL_ERROR,)}
    assert harness.wait(waiting).statuses == (Status.TIER_OFF,)
    assert "file tier disabled: asynchronous I/O queue failed (KeyError: 7); restart the process" in caplog.text
    with pytest.raises(TierClosedError):
        ask(harness, reads(harness)[0])
    harness.tier.close()


def test_unexpected_error_ends_one_task_alone(
    harness: TierHarness, io: HeldIo, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settle, tier = FileTier._record_results, cast(FileTier, harness.tier)

    def explode(self: FileTier, task: Sequence[object], *rest: object) -> list[Status]:
        if task[0][0].slot == 1:  # type: ignore[index]
            raise ZeroDivisionError("nobody expects this")
        return settle(self, task, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(FileTier, "_record_results", explode)
    for _ in range(2 * executor.WINDOW_TASKS):
        assert harness.run(harness.op(Op.READ, 1, 1)) == (Status.INTERNAL_ERROR,)
    assert caplog.text.count("ZeroDivisionError: nobody expects this") == 1, "with a traceback, and not for each"
    harness.assert_serves(0, 0)
    monkeypatch.undo()
    harness.assert_serves(1, 1)
    assert tier.failures["read_io_error"] == 0


class TestStuck:
    """A queue from which nothing comes back."""

    @pytest.fixture
    def stuck(self, harness: TierHarness, io: HeldIo) -> list[int]:
        """As many tasks as there may be under way."""
        io.queue.hold()
        tickets = [ask(harness, op) for op in reads(harness)[: executor.WINDOW_TASKS]]
        io.queue.until(executor.WINDOW_TASKS)
        return tickets

    def test_what_waits_ends_by_its_deadline(self, harness: TierHarness, io: HeldIo, stuck: list[int]) -> None:
        late = ask(harness, reads(harness)[-1], deadline=time.monotonic() + 0.01)
        assert harness.wait(late).statuses == (Status.DEADLINE,)
        io.queue.let()
        assert {harness.wait(ticket).statuses for ticket in stuck} == {(Status.OK,)}
        assert len(io.queue.begun) == executor.WINDOW_TASKS

    def test_what_waits_can_be_cancelled(self, harness: TierHarness, io: HeldIo, stuck: list[int]) -> None:
        waiting = ask(harness, reads(harness)[-1])
        for ticket in (waiting, stuck[0]):
            harness.tier.cancel(ticket)
        assert harness.wait(waiting).statuses == (Status.CANCELLED,)
        assert harness.tier.poll() == []
        io.queue.let()
        assert {harness.wait(ticket).statuses for ticket in stuck} == {(Status.OK,)}

    def test_close_waits_for_running_tasks_and_ends_others(
        self, harness: TierHarness, io: HeldIo, stuck: list[int]
    ) -> None:
        waiting = ask(harness, reads(harness)[-1])
        closing = threading.Thread(target=harness.tier.close)
        closing.start()
        assert harness.wait(waiting).statuses == (Status.TIER_OFF,)
        assert closing.is_alive()
        assert not io.queue.closed
        io.queue.let()
        closing.join(TIMEOUT)
        assert io.queue.closed
        assert {harness.wait(ticket).statuses for ticket in stuck} == {(Status.OK,)}
        with pytest.raises(TierClosedError):
            ask(harness, reads(harness)[0])

    def test_a_reset_meanwhile_makes_them_misses(self, harness: TierHarness, io: HeldIo, stuck: list[int]) -> None:
        harness.tier.reset(1)
        io.queue.let()
        assert {harness.wait(ticket).statuses for ticket in stuck} == {(Status.MISMATCH,)}


def test_idle_tier_is_closed_at_once(harness: TierHarness, io: HeldIo) -> None:
    io.queue.hold()
    closing = threading.Thread(target=harness.tier.close)
    closing.start()
    closing.join(TIMEOUT)
    assert not closing.is_alive()


@pytest.mark.parametrize("io", [PlainIo(), None], ids=["threads", "a queue"])
def test_subscriber_is_called_when_there_is_a_result(
    io: PlainIo | None, harness_of: Callable[..., TierHarness]
) -> None:
    harness = harness_of(io=io, slots=SLOTS)
    called = threading.Semaphore(0)
    cast(FileTier, harness.tier).set_completion_callback(called.release)
    for op, deadline in ((Op.WRITE, math.inf), (Op.READ, math.inf), (Op.READ, time.monotonic() - 1)):
        ticket = harness.tier.submit([harness.op(op, 0, 0), harness.op(op, 2, 2, place=1)], deadline)
        assert called.acquire(timeout=TIMEOUT)
        assert [result.ticket for result in harness.tier.poll()] == [ticket]
    assert not called.acquire(blocking=False)


def test_who_fails_when_it_is_called_stops_nobody(harness: TierHarness, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise RuntimeError("the event loop is closed")

    cast(FileTier, harness.tier).set_completion_callback(fail)
    for slot in range(SLOTS):
        harness.assert_serves(slot, slot)
    assert "the event loop is closed" in caplog.text
