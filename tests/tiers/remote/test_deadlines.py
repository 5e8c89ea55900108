"""Deadlines on a virtual clock: no call ends after its deadline, however replies come, and whatever hangs."""

import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore import errors
from longshore.boundary import Status
from longshore.testing.tier_harness import image, key
from longshore.tiers.arena import Arena
from longshore.tiers.base import BY_KEY, Op, OpBatch, TierOp
from longshore.tiers.remote import RemoteTier, directory, resp
from longshore.tiers.remote.directory import DirectorySession
from longshore.tiers.remote.format import Identity, pack_header
from longshore.tiers.remote.resp import RespSession
from longshore.tiers.remote.settings import RemoteSettings
from longshore.tiers.remote.work import Image, RemoteError, Session, WorkQueue

IMAGE = 4096
NAMESPACE = bytes(32)
POLL = 0.02
"""Seconds between two polls of whoever drives a tier."""


@pytest.fixture(autouse=True, scope="module")
def small_pieces() -> Iterator[None]:
    """An image has several pieces, as those of megabytes have."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resp, "_PIECE", IMAGE // 4)
        yield


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class SlowStream:
    """A connection over which `replies` come in pieces, each after some seconds; the kernel's deadline holds."""

    def __init__(self, clock: Clock, replies: bytes, pieces: Iterator[tuple[float, int]]) -> None:
        self._clock = clock
        self._replies = replies
        self._pieces = pieces
        self._ready = 0
        self.sent = b""

    def receive_some(self, parts: list[memoryview], deadline: float) -> int:
        assert deadline < math.inf
        while not self._ready:
            seconds, count = next(self._pieces)
            if self._clock.now + seconds > deadline:
                self._clock.now = max(self._clock.now, deadline)
                raise RemoteError("timeout", "no answer in time", Status.DEADLINE)
            self._clock.now += seconds
            self._ready = min(count, len(self._replies))
            if not self._replies:
                raise RemoteError("connection", "the server closed the connection")
        came = 0
        for part in parts:
            count = min(len(part), self._ready)
            part[:count], self._replies = self._replies[:count], self._replies[count:]
            self._ready -= count
            came += count
        return came

    def receive(self, parts: list[memoryview], deadline: float) -> None:
        for part in parts:
            while part:
                part = part[self.receive_some([part], deadline) :]  # noqa: PLW2901

    def send(self, parts: list[memoryview], deadline: float) -> None:
        self.sent += b"".join(parts)


class Images:
    """A queue with images to fetch, each with a deadline of its own, and the replies that belong to them."""

    def __init__(self, clock: Clock, op: Op, within: Sequence[float]) -> None:
        count = len(within)
        self.memory = memoryview(bytearray(IMAGE * count))
        self.ended: dict[int, tuple[Status, float]] = {}
        self.deadlines = [clock.now + seconds for seconds in within]
        ops = [TierOp(op, BY_KEY, key(index), None, 0, IMAGE, 0) for index in range(count)]
        batch = OpBatch(1, ops, math.inf, clock.now)
        self.queue = WorkQueue(op, threading.RLock(), clock, lambda i, s: self.ended.update({i.index: (s, clock.now)}))
        self.identities = [Identity(NAMESPACE, key(index), IMAGE) for index in range(count)]
        views = [self.memory[index * IMAGE : (index + 1) * IMAGE] for index in range(count)]
        if op is Op.WRITE:
            for index, view in enumerate(views):
                view[:] = memoryview(image(index, IMAGE))
        self.queue.put(
            Image(batch, index, self.identities[index], views[index], self.deadlines[index], 0)
            for index in range(count)
        )

    def replies(self) -> bytes:
        bodies = [bytes(image(index, IMAGE)) for index in range(len(self.identities))]
        headers = map(pack_header, self.identities, map(memoryview, bodies))
        return b"".join(b"$%d\r\n%b%b\r\n" % (128 + IMAGE, *value) for value in zip(headers, bodies, strict=True))


OK_OR_FULL = [b"+OK\r\n", b"-OOM no\r\n"]
pieces = st.lists(st.tuples(st.floats(0, 0.4), st.integers(1, 6000)), min_size=1, max_size=40)
limits = st.lists(st.floats(0.05, 3), min_size=1, max_size=6)


def session_on(clock: Clock, stream: SlowStream, in_flight: int = 2 * IMAGE) -> RespSession:
    settings = RemoteSettings("valkey", "host", in_flight=in_flight)
    return RespSession(settings, stream, clock, IMAGE)  # type: ignore[arg-type]


def forever(some: Sequence[tuple[float, int]]) -> Iterator[tuple[float, int]]:
    while True:
        yield from some


@given(some=pieces, within=limits, cut=st.integers(0, 8000))
def test_a_fetch_ends_by_its_deadline_however_its_reply_comes(
    some: list[tuple[float, int]], within: list[float], cut: int
) -> None:
    clock = Clock()
    images = Images(clock, Op.READ, within)
    replies = images.replies()
    stream = SlowStream(clock, replies[: len(replies) - max(0, cut - 4000)], forever(some))
    session = session_on(clock, stream)
    try:
        session.fetch(images.queue)
    except RemoteError as error:
        images.queue.fail(error.status)
        images.queue.expire()  # as a poll would have done meanwhile
        images.queue.end_waiting(Status.UNAVAILABLE)
    assert len(images.ended) == len(within)
    for index, (status, when) in images.ended.items():
        assert when <= images.deadlines[index] + 1e-6 or status is Status.DEADLINE
        if status is Status.OK:
            found = images.memory[index * IMAGE : (index + 1) * IMAGE]
            np.testing.assert_array_equal(np.frombuffer(found, np.uint8), image(index, IMAGE))
    assert clock.now <= max(images.deadlines) + 1e-6


def test_next_value_is_requested_before_the_last_piece_came() -> None:
    clock = Clock()
    images = Images(clock, Op.READ, [1.0] * 3)
    requests: list[int] = []

    class Counting(SlowStream):
        def receive(self, parts: list[memoryview], deadline: float) -> None:
            requests.append(self.sent.count(b"GET"))
            super().receive(parts, deadline)

    session_on(clock, Counting(clock, images.replies(), forever([(0.0, 512)])), in_flight=IMAGE // 2).fetch(
        images.queue
    )
    assert requests == [1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 3]
    assert [status for status, _ in images.ended.values()] == [Status.OK] * 3


def test_a_value_that_has_come_is_received_in_one_call() -> None:
    clock = Clock()
    images = Images(clock, Op.READ, [1.0] * 3)
    calls = 0

    class Counting(SlowStream):
        def receive_some(self, parts: list[memoryview], deadline: float) -> int:
            nonlocal calls
            calls += 1
            return super().receive_some(parts, deadline)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resp, "_PIECE", IMAGE)
        session_on(clock, Counting(clock, images.replies(), forever([(0.0, 1 << 20)]))).fetch(images.queue)
    assert [status for status, _ in images.ended.values()] == [Status.OK] * 3
    assert calls == 3


OTHERS = {Status.NOT_FOUND: b"$-1\r\n", Status.MISMATCH: b"-WRONGTYPE a list\r\n", Status.SHORT: b"$3\r\nabc\r\n"}


@given(
    some=pieces, expected=st.lists(st.sampled_from([Status.OK, Status.OK, *OTHERS]), min_size=1, max_size=8), all_=...
)
def test_what_comes_with_a_miss_belongs_to_the_next_values(
    some: list[tuple[float, int]], expected: list[Status], all_: bool
) -> None:
    clock = Clock()
    images = Images(clock, Op.READ, [1e9] * len(expected))
    values = images.replies()
    size = len(values) // len(expected)
    replies = [OTHERS.get(each, values[i * size : (i + 1) * size]) for i, each in enumerate(expected)]
    pieces_of = forever([(0.0, 1 << 20)] if all_ else some)
    session_on(clock, SlowStream(clock, b"".join(replies), pieces_of), in_flight=8 * IMAGE).fetch(images.queue)
    assert [images.ended[index][0] for index in range(len(expected))] == expected
    for index, status in enumerate(expected):
        found = images.memory[index * IMAGE : (index + 1) * IMAGE]
        assert status is not Status.OK or found == memoryview(image(index, IMAGE))


@given(some=pieces, within=limits, answers=st.lists(st.sampled_from(OK_OR_FULL), min_size=6, max_size=6))
def test_a_store_ends_by_its_deadline_however_its_replies_come(
    some: list[tuple[float, int]], within: list[float], answers: list[bytes]
) -> None:
    clock = Clock()
    images = Images(clock, Op.WRITE, within)
    stream = SlowStream(clock, b":0\r\n" * len(within) + b"".join(answers), forever(some))
    session = session_on(clock, stream)
    try:
        session.store(images.queue, lambda _: False, lambda _: None)
    except RemoteError as error:
        images.queue.fail(error.status)
    assert len(images.ended) == len(within)
    assert clock.now <= max(images.deadlines) + 1e-6
    asked_and_sent = [i for i, each in enumerate(images.identities) if stream.sent.count(each.address) == 2]
    answer_to = dict(zip(asked_and_sent, answers, strict=False))
    for index, (status, when) in images.ended.items():
        if status is Status.OK:
            assert answer_to[index] == b"+OK\r\n"
            assert when <= images.deadlines[index] + 1e-6


def test_image_waiting_behind_another_ends_by_its_own_deadline() -> None:
    clock = Clock()
    images = Images(clock, Op.WRITE, [3.0, 0.3])

    class Polled(SlowStream):
        def receive_some(self, parts: list[memoryview], deadline: float) -> int:
            count = super().receive_some(parts, deadline)
            assert images.queue.expire() == 0  # the server is not to blame
            return count

    stream = Polled(clock, b":0\r\n:0\r\n+OK\r\n", iter([(0.0, 8), (1.0, 5)]))  # the first SET takes 1 s
    session_on(clock, stream, in_flight=IMAGE).store(images.queue, lambda _: False, lambda _: None)
    assert {index: status for index, (status, _) in images.ended.items()} == {0: Status.OK, 1: Status.DEADLINE}
    assert stream.sent.count(b"$3\r\nSET\r\n") == 1


@given(data=st.binary(max_size=400), some=pieces)
def test_whatever_a_server_says_is_an_answer_or_an_error(data: bytes, some: list[tuple[float, int]]) -> None:
    for call in ("check", "lengths", "fetch"):
        clock = Clock()
        images = Images(clock, Op.READ, [1.0])
        session = session_on(clock, SlowStream(clock, data, forever(some)))
        try:
            if call == "check":
                session.check(clock.now + 1)
            elif call == "lengths":
                session.lengths([b"a"], clock.now + 1)
            else:
                session.fetch(images.queue)
        except RemoteError:
            pass
        assert images.ended.get(0, (Status.NOT_FOUND, 0))[0] is not Status.OK


@pytest.mark.parametrize("reads", [1, 3])
def test_late_directory_read_is_a_miss_and_moves_no_byte(
    reads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    session = DirectorySession(RemoteSettings("file", path=str(tmp_path)), IMAGE)
    written = Images(clock, Op.WRITE, [1.0])
    session.store(written.queue, lambda _: False, lambda _: None)
    assert written.ended[0][0] is Status.OK
    piece, preadv, left = IMAGE // 4, os.preadv, reads

    def late(*arguments: Any) -> int:
        nonlocal left
        left -= 1
        clock.now += 2.0 * (left == 0)
        return preadv(*arguments)

    monkeypatch.setattr(directory, "_PIECE", piece)
    monkeypatch.setattr(directory.os, "preadv", late)
    images = Images(clock, Op.READ, [1.0])
    images.memory[:] = b"\xcc" * IMAGE
    session.fetch(images.queue)
    assert left == 0
    assert images.ended[0][0] is Status.DEADLINE
    assert images.memory[(reads - 1) * piece :] == b"\xcc" * (IMAGE - (reads - 1) * piece)


# The tier, with a store whose calls hang


class HungStore:
    """Connections are made, or not, as the test says; until then `connect` hangs, as name resolution may."""

    threads = 1

    def __init__(self) -> None:
        self.go_on = threading.Event()

    def connect(self) -> Session:
        self.go_on.wait(30)
        raise RemoteError("connection", "it did not work out")


class Driver:
    """Polls a tier each 20 ms of virtual time, as the tier host does."""

    def __init__(self, tier: RemoteTier, clock: Clock) -> None:
        self.tier, self.clock = tier, clock
        self.ended: dict[int, tuple[Any, float]] = {}

    def run(self, seconds: float) -> None:
        until = self.clock.now + seconds
        while self.clock.now < until:
            self.clock.now += POLL
            for result in self.tier.poll():
                self.ended[result.ticket] = result.statuses, self.clock.now
            for ticket, present in self.tier.answers():
                self.ended[ticket] = present, self.clock.now


@pytest.fixture
def hung() -> Iterator[tuple[Driver, HungStore]]:
    clock, store = Clock(), HungStore()
    arena = Arena(8 * IMAGE)
    tier = RemoteTier(
        "valkey://host", arena=arena, image_bytes=IMAGE, namespace=os.urandom(32), clock=clock, store=store
    )
    yield Driver(tier, clock), store
    store.go_on.set()
    tier.close()


def test_calls_that_hang_end_within_a_poll_of_their_deadline(hung: tuple[Driver, HungStore]) -> None:
    driver, _ = hung
    tier, clock = driver.tier, driver.clock
    due = {}
    for round_ in range(3):
        for op, limit in ((Op.READ, 2.0), (Op.WRITE, 5.0)):
            for deadline in (math.inf, clock.now + 0.3 + round_):
                ticket = tier.submit([TierOp(op, BY_KEY, key(round_), None, 0, IMAGE, 0)] * 2, deadline)
                due[ticket] = min(deadline, clock.now + limit)
        driver.run(0.11)
    for _ in range(2):
        due[tier.ask([key(1)], 0, math.inf)] = clock.now + 0.05
        driver.run(0.2)
    driver.run(8.0)
    assert driver.ended.keys() == due.keys()
    for ticket, (outcome, when) in driver.ended.items():
        assert due[ticket] <= when <= due[ticket] + 0.05
        assert outcome in {None, (Status.DEADLINE, Status.DEADLINE)}


def test_probes_that_hang_open_the_breaker_and_then_nothing_waits(hung: tuple[Driver, HungStore]) -> None:
    driver, _ = hung
    tier = driver.tier
    waiting = tier.submit([TierOp(Op.READ, BY_KEY, key(1), None, 0, IMAGE, 0)], math.inf)
    for _ in range(3):
        assert not tier.is_unavailable
        tier.ask([key(1)], 0, math.inf)
        while tier._asking is None and not tier._is_stuck:  # until the thread has it
            pass
        driver.run(0.1)
    assert tier.is_unavailable
    assert driver.ended[waiting][0] == (Status.UNAVAILABLE,)
    late = tier.submit([TierOp(Op.READ, BY_KEY, key(1), None, 0, IMAGE, 0)], math.inf)
    asked = tier.ask([key(1)], 0, math.inf)
    assert [result.ticket for result in tier.poll()] == [late]
    assert list(tier.answers()) == [(asked, None)]


class BrokenStore:
    """A client whose code is wrong, for as long as `is_wrong`; then nobody is there."""

    threads = 1

    def __init__(self) -> None:
        self.is_wrong, self.calls = True, 0

    def connect(self) -> Session:
        self.calls += 1
        if self.is_wrong:
            raise RuntimeError("a bug")
        raise RemoteError("connection", "nobody is there")


def test_a_fault_in_health_checks_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    clock, store = Clock(), BrokenStore()
    store.is_wrong = False
    tier = RemoteTier(
        "valkey://host", arena=Arena(IMAGE), image_bytes=IMAGE, namespace=os.urandom(32), clock=clock, store=store
    )
    driver = Driver(tier, clock)
    try:
        while not tier.is_unavailable:
            tier.submit([TierOp(Op.READ, BY_KEY, key(1), None, 0, IMAGE, 0)], math.inf)
            driver.run(0.02)
        assert not [each for each in caplog.records if each.exc_info]
        store.is_wrong, store.calls = True, 0
        give_up = time.monotonic() + 60
        while store.calls < 3:  # checks
            driver.run(0.1)
            time.sleep(0.001)
            assert time.monotonic() < give_up
        (said,) = (each for each in caplog.records if each.exc_info)
        assert "internal error in an I/O thread" in said.getMessage()
        assert isinstance(said.exc_info[1], RuntimeError)  # type: ignore[index]
    finally:
        tier.close()


class FaultySession:
    """A session whose next `fetch` raises if `is_wrong`; closing it always does."""

    def __init__(self, store: "FaultyStore") -> None:
        self.store_client = store

    def fetch(self, work: WorkQueue) -> None:
        while (image := work.take()) is not None:
            if self.store_client.is_wrong:
                self.store_client.is_wrong = False
                raise ValueError("a bug")
            work.end(image, Status.OK)

    def is_stale(self) -> bool:
        return False

    def close(self) -> None:
        self.store_client.closed += 1
        raise BufferError("a bug in closing")


class FaultyStore:
    threads = 1

    def __init__(self) -> None:
        self.is_wrong, self.closed = False, 0

    def connect(self) -> Session:
        return cast("Session", FaultySession(self))


@pytest.fixture
def faulty() -> Iterator[tuple[FaultyStore, Callable[[], Status]]]:
    """A store with bugs, and what reads one image from it."""
    store = FaultyStore()
    tier = RemoteTier("valkey://host", arena=Arena(IMAGE), image_bytes=IMAGE, namespace=NAMESPACE, store=store)

    def read() -> Status:
        tier.submit([TierOp(Op.READ, BY_KEY, key(1), None, 0, IMAGE, 0)], math.inf)
        give_up = time.monotonic() + 60
        while not (results := tier.poll()):
            assert time.monotonic() < give_up
            time.sleep(0.001)
        return results[0].statuses[0]

    yield store, read
    tier.close()


def fail_three_times(store: FaultyStore, read: Callable[[], Status]) -> None:
    """Each time, the session is closed, and the next read is served by another one."""
    for turn in range(3):
        store.is_wrong = True
        assert read() is Status.IO_ERROR
        assert read() is Status.OK
        assert store.closed == turn + 1


def test_a_session_that_cannot_be_closed_ends_no_thread(
    faulty: tuple[FaultyStore, Callable[[], Status]], caplog: pytest.LogCaptureFixture
) -> None:
    store, read = faulty
    fail_three_times(store, read)
    assert store.closed == 3
    assert len([each for each in caplog.messages if "a connection could not be closed" in each]) == 1


def test_a_fault_that_comes_again_is_logged_again(
    faulty: tuple[FaultyStore, Callable[[], Status]],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once a minute at most, with how often it happened meanwhile."""
    store, read = faulty
    fail_three_times(store, read)
    monkeypatch.setattr(errors, "_LOG_SECONDS", 0.0)  # a minute later
    store.is_wrong = True
    assert read() is Status.IO_ERROR
    first, second = (each for each in caplog.messages if "internal error in an I/O thread" in each)
    assert "2 more since" in second
    assert "more since" not in first
