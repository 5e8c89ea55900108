"""A tier host that is stopped is ended, and another one serves; one whose disk hangs is left alone, without orders."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from tier_host_kit import TIMEOUT, HostedHarness, is_running, program, wait_until

from longshore.boundary import Status
from longshore.errors import TierError
from longshore.runtime.tier_host import supervisor as watch
from longshore.runtime.tier_host import tier
from longshore.runtime.tier_host.supervisor import HostProcess
from longshore.runtime.tier_host.wire import Kind
from longshore.tiers.base import Op, TierResult

LOOKS = int(watch.SILENCE)
"""Each stands for a second of `Clock`."""


class Clock:
    """Time that passes only when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Hanging(HostedHarness):
    """Its disk hangs while the file `gate` is there, in the place that `lines` say."""

    beats = 0
    """Signs of life of all processes until now."""

    def __init__(self, directory: Path, clock: Clock, *lines: str) -> None:
        self.clock = clock
        self.gate = directory.with_name("gate")
        hangs = (
            "import os, time",
            f"is_shut = lambda at: os.path.exists({str(self.gate)!r} + at)",
            "wait = lambda at='': [time.sleep(0.01) for _ in iter(lambda: is_shut(at), False)]",
            "child.HEARTBEAT = 0.01",
        )
        super().__init__(directory, program(*hangs, *lines), clock=clock)

    def has_carried_out_more(self, operations: int) -> bool:
        return self.tier._ended > operations

    def look(self, seconds: int) -> list[TierResult]:
        """Poll once a second."""
        results = []
        for _ in range(seconds):
            self.clock.now += 1.0
            results += self.tier.poll()
        self._unclaimed.update({result.ticket: result for result in results})
        return results

    def look_at(self, ticket: int) -> list[TierResult]:
        """What one look says of a ticket, without a second passing."""
        return [result for result in self.tier.poll() if result.ticket == ticket]

    def hear(self, beats: int) -> None:
        """A second passes for each of so many signs of life."""
        for _ in range(beats):
            before, give_up = self.beats, time.monotonic() + TIMEOUT
            self.clock.now += 1.0
            while self.beats == before:
                assert time.monotonic() < give_up, "it is silent"
                self._unclaimed.update({result.ticket: result for result in self.tier.poll()})
                time.sleep(0.001)


WORKERS = "work = child.FileTier._try; child.FileTier._try = lambda *each: (wait(), work(*each))[1]"
ONE_BY_ONE = (  # reads that have landed
    "settle, numbers = child.FileTier._record_results, iter(range(100)); "
    "child.FileTier._record_results = lambda self, turn, *rest: "
    "(turn[0].op.op.value == 'read' and wait(str(next(numbers))), settle(self, turn, *rest))[1]"
)
SUBMISSIONS = "take = child.FileTier.submit; child.FileTier.submit = lambda *each: (wait(), take(*each))[1]"


@pytest.fixture
def opener(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Hanging]]:
    """Opens tiers whose disk may hang, counts their signs of life, and closes them."""
    opened: list[Hanging] = []
    receive = HostProcess.receive

    def counted(self: HostProcess) -> list[tuple[Kind, bytes]]:
        frames = receive(self)
        Hanging.beats += sum(kind is Kind.ALIVE for kind, _ in frames)
        return frames

    def open_one(*lines: str) -> Hanging:
        opened.append(Hanging(tmp_path / "tier", Clock(), *lines))
        return opened[-1]

    monkeypatch.setattr(HostProcess, "receive", counted)
    yield open_one
    for gate in tmp_path.glob("gate*"):
        gate.unlink()
    for each in opened:
        each.close()


def read(harness: Hanging, slot: int = 0) -> int:
    return harness.tier.submit([harness.op(Op.READ, slot, slot)], math.inf)


def test_one_that_is_stopped_is_ended_and_another_one_serves(opener: Callable[..., Hanging]) -> None:
    harness = opener()
    harness.store(0, 0)
    pid = harness.pid
    harness.signal(signal.SIGSTOP)
    ticket = read(harness)
    assert harness.look(LOOKS - 1) == []
    assert is_running(pid)
    harness.look(2)
    harness.until(lambda: harness.tier.failures["tier_host"] == 1)
    assert not is_running(pid)
    assert harness.wait(ticket).statuses == (Status.UNAVAILABLE,)
    harness.clock.now += watch.FIRST_PAUSE
    harness.until_open()
    assert harness.pid != pid
    harness.assert_serves(0, 0)


def test_one_that_is_stopped_is_waited_for_once(opener: Callable[..., Hanging]) -> None:
    harness = opener()
    harness.store(0, 0)
    harness.signal(signal.SIGSTOP)
    read(harness)
    harness.look(int(watch.QUIET) - 1)
    assert not harness.tier.is_unavailable
    harness.look(1)
    assert harness.tier.is_unavailable
    for place in range(1, 4):
        (result,) = harness.look_at(harness.tier.submit([harness.op(Op.READ, 0, 0, place=place)], math.inf))
        assert result.statuses == (Status.UNAVAILABLE,), "at once"
    harness.signal(signal.SIGCONT)
    harness.until(lambda: not harness.tier.is_unavailable)
    harness.assert_serves(0, 0)
    assert harness.tier.failures["tier_host"] == 0


def test_its_slots_are_its_own_until_it_is_reaped(
    opener: Callable[..., Hanging], monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = opener()
    harness.store(0, 0)
    harness.signal(signal.SIGSTOP)
    ticket = read(harness)
    with monkeypatch.context() as patch:
        patch.setattr(HostProcess, "reaped", False)
        process = harness.tier._supervisor.process
        assert process is not None
        harness.look(LOOKS + 1)
        harness.until(lambda: process.is_eof)
        assert harness.look(5) == []
    assert harness.wait(ticket).statuses == (Status.UNAVAILABLE,)


def test_one_that_has_nothing_to_do_may_be_silent(opener: Callable[..., Hanging]) -> None:
    harness = opener()
    harness.store(0, 0)
    harness.until(lambda: not harness.tier._in_flight)
    harness.signal(signal.SIGSTOP)
    harness.look(3 * LOOKS)
    harness.signal(signal.SIGCONT)
    harness.assert_serves(0, 0)
    assert harness.tier.failures["tier_host"] == 0


def test_an_engine_that_was_suspended_has_not_waited(opener: Callable[..., Hanging]) -> None:
    harness = opener()
    harness.store(0, 0)
    harness.signal(signal.SIGSTOP)
    ticket = read(harness)
    harness.clock.now += 100 * watch.SILENCE
    harness.tier.poll()
    harness.signal(signal.SIGCONT)
    assert harness.wait(ticket).statuses == (Status.OK,)
    assert harness.tier.failures["tier_host"] == 0


@pytest.mark.parametrize("place", [WORKERS, SUBMISSIONS], ids=["workers", "the thread that takes orders"])
def test_a_disk_that_hangs_costs_misses_and_no_process(opener: Callable[..., Hanging], place: str) -> None:
    harness = opener(place)
    harness.store(0, 0)
    pid = harness.pid
    harness.gate.touch()
    ticket = read(harness)
    harness.hear(int(tier.STALLED) - 1)
    assert not harness.tier.is_unavailable
    harness.hear(2 * LOOKS)
    assert harness.tier.is_unavailable
    assert harness.run(harness.op(Op.READ, 0, 1), harness.op(Op.WRITE, 1, 1)) == (
        Status.UNAVAILABLE,
        Status.UNAVAILABLE,
    )
    assert ticket in harness.tier._in_flight  # it may read yet
    harness.gate.unlink()
    assert harness.wait(ticket).statuses == (Status.OK,)
    assert not harness.tier.is_unavailable
    harness.assert_serves(0, 0)
    assert (harness.pid, harness.tier.failures["tier_host"], harness.tier.failures["stalled"]) == (pid, 0, 1)


def test_operation_on_a_hung_disk_ends_at_its_deadline(opener: Callable[..., Hanging]) -> None:
    harness = opener(WORKERS)
    harness.store(0, 0)
    harness.gate.touch()
    stuck = read(harness)
    harness.hear(1)
    late = harness.tier.submit([harness.op(Op.READ, 0, 0, place=1)], time.monotonic() + 1.0)
    assert harness.wait(late).statuses == (Status.DEADLINE,)
    harness.gate.unlink()
    assert harness.wait(stuck).statuses == (Status.OK,)


def test_a_slow_disk_that_goes_on_is_given_more(opener: Callable[..., Hanging]) -> None:
    harness, slots = opener(ONE_BY_ONE), (0, 2, 4, 6)
    for slot in slots:
        harness.store(slot, slot)
    gates = [harness.gate.with_name(f"gate{number}") for number in range(len(slots))]
    for gate in gates:
        gate.touch()
    ops = [harness.op(Op.READ, slot, slot, place=slot) for slot in slots]
    tickets = [harness.tier.submit([op], math.inf) for op in ops]
    for gate in gates:
        harness.hear(int(tier.STALLED) - 2)
        assert not harness.tier.is_unavailable
        before = harness.tier._ended
        gate.unlink()
        if gate is not gates[-1]:
            harness.until(partial(harness.has_carried_out_more, before))
    assert {harness.wait(ticket).statuses for ticket in tickets} == {(Status.OK,)}
    assert harness.tier.failures["stalled"] == 0


def test_a_tier_is_closed_though_its_process_is_stopped(
    opener: Callable[..., Hanging], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "SILENCE", 0.5)
    harness = opener()
    harness.tier._supervisor._silence = watch.SilenceTimer(time.monotonic)
    harness.store(0, 0)
    pid = harness.pid
    harness.signal(signal.SIGSTOP)
    ticket = read(harness)
    harness.tier.close()
    assert not is_running(pid)
    assert {result.ticket: result.statuses for result in harness.tier.poll()} == {ticket: (Status.TIER_OFF,)}


def test_process_silent_before_it_opened_stops_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "SILENCE", 0.5)
    with pytest.raises(TierError, match="by signal 9 before it opened"):
        HostedHarness(tmp_path / "tier", ("sleep", "1000"))


def test_tier_host_ends_with_its_engine_though_a_child_lives(tmp_path: Path) -> None:
    """A process that the engine has forked has copies of the pipes to the tier host."""
    hear, said = os.pipe()
    engine = os.fork()
    if not engine:
        harness = HostedHarness(tmp_path)
        child = os.fork()
        if child:
            os.write(said, f"{harness.pid} {child}".encode())
        signal.pause()
    host, child = map(int, os.read(hear, 64).split())
    try:
        os.kill(engine, signal.SIGKILL)
        os.waitpid(engine, 0)
        assert wait_until(lambda: not is_running(host))
        assert is_running(child)
        after = HostedHarness(tmp_path)
        after.store(0, 0)
        after.assert_serves(0, 0)
        after.close()
    finally:
        for pid in (host, child):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os.close(hear)
        os.close(said)
