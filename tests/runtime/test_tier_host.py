"""A tier host dies, is stopped, or loses its disk: misses in between, never a wrong byte, and it comes back."""

from __future__ import annotations

import errno
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tier_host_kit import IMAGE, SLOTS, HostedHarness, is_running, program

from depth import deep
from longshore.boundary import Status, StoredChunk, StoredChunks
from longshore.errors import FormatError, PlanError, TierClosedError, TierError, TierInUseError
from longshore.runtime.tier_host import FAILURE_REASONS, HostedFileTier, tier, wire
from longshore.runtime.tier_host import supervisor as watch
from longshore.runtime.tier_host.supervisor import HostProcess
from longshore.runtime.tier_host.wire import Kind, frame
from longshore.testing.tier_harness import image, key
from longshore.tiers.arena import Arena
from longshore.tiers.base import Op
from longshore.tiers.file import FAILURE_REASONS as OF_FILES
from longshore.tiers.file import FileTier, capacity_for

Opener = Callable[..., HostedHarness]


@pytest.fixture
def opener(tmp_path: Path) -> Iterator[Opener]:
    """Opens tiers in one directory, and closes them."""
    opened: list[HostedHarness] = []

    def open_one(**settings: object) -> HostedHarness:
        opened.append(HostedHarness(tmp_path / "tier", **settings))
        return opened[-1]

    yield open_one
    for each in opened:
        each.close()


@pytest.fixture
def harness(opener: Opener) -> HostedHarness:
    return opener()


def reads(harness: HostedHarness) -> list[int]:
    """Read slots 0 to 3 into places of their own; tickets."""
    return [harness.tier.submit([harness.op(Op.READ, slot, slot, slot)], math.inf) for slot in range(4)]


def test_results_are_told_when_they_come(tmp_path: Path) -> None:
    harness = HostedHarness(tmp_path / "tier", program("child._LOOK = 1e6"))
    for slot in range(SLOTS):
        harness.store(slot, slot)
    assert {harness.wait(ticket).statuses for ticket in reads(harness)} == {(Status.OK,)}
    harness.close()


def test_work_of_a_killed_process_ends_and_another_serves(harness: HostedHarness) -> None:
    for slot in range(SLOTS):
        harness.store(slot, slot)
    first = harness.pid
    harness.signal(signal.SIGSTOP)
    tickets = reads(harness)
    assert harness.tier.poll() == []
    harness.kill()
    assert [harness.wait(ticket).statuses for ticket in tickets] == [(Status.UNAVAILABLE,)] * 4
    assert harness.run(harness.op(Op.READ, 0, 0), harness.op(Op.WRITE, 1, 1)) == (
        Status.UNAVAILABLE,
        Status.UNAVAILABLE,
    )
    harness.until_open()
    assert harness.pid != first
    for slot in range(SLOTS):
        harness.assert_serves(slot, slot)
    assert harness.tier.failures["tier_host"] == 1


def test_no_result_before_the_process_is_reaped(harness: HostedHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    harness.store(0, 0)
    harness.signal(signal.SIGSTOP)
    tickets = reads(harness)
    with monkeypatch.context() as patch:
        patch.setattr(HostProcess, "reaped", False)
        harness.signal(signal.SIGKILL)
        process = harness.tier._supervisor.process
        harness.until(lambda: process.is_eof)
        assert [harness.tier.poll() for _ in range(5)] == [[]] * 5
        assert harness._unclaimed == {}
    assert [harness.wait(ticket).statuses for ticket in tickets] == [(Status.UNAVAILABLE,)] * 4


def test_kills_at_any_instant_never_leave_a_wrong_byte(opener: Opener) -> None:
    harness, dice, away, served = opener(), random.Random(4), 0, 0
    known = [(slot, number) for slot in range(SLOTS) for number in range(4)]
    for turn in range(6):
        harness.until_open()
        if not turn:
            harness.signal(signal.SIGSTOP)  # so that some writes have certainly not ended
        tickets = {}
        for _ in range(dice.randrange(1, 60)):
            slot, number = dice.randrange(SLOTS), dice.randrange(4)
            write = harness.op(Op.WRITE, slot, number, number)
            harness.bytes_of(write)[:] = image(number, IMAGE)
            tickets[harness.tier.submit([write], math.inf)] = slot
        ended = dice.randrange(len(tickets) + 1) if turn else 0
        harness.until(lambda ended=ended: len(harness._unclaimed) >= ended)  # type: ignore[misc]
        harness.kill()
        away += sum(harness.wait(ticket).statuses == (Status.UNAVAILABLE,) for ticket in tickets)
        harness.until_open()
        wanted = [harness.op(Op.READ, *each, place) for place, each in enumerate(known)]
        for read, status in zip(wanted, harness.run(*wanted), strict=True):
            served += status is Status.OK
            right = harness.bytes_of(read) == image(known[wanted.index(read)][1], IMAGE)
            assert status is not Status.OK or right.all()
    assert away > 0
    assert served > 0


def test_orders_that_the_full_pipe_delays_are_not_lost(harness: HostedHarness) -> None:
    harness.store(0, 0)
    harness.signal(signal.SIGSTOP)
    batch = [harness.op(Op.READ, 0, 0)] * 400
    tickets = [harness.tier.submit(batch, math.inf) for _ in range(8)]
    assert harness.tier._supervisor.process._unsent
    harness.signal(signal.SIGCONT)
    assert {harness.wait(ticket).statuses for ticket in tickets} == {(Status.OK,) * 400}


def test_invalid_order_is_refused_before_the_process_sees_it(harness: HostedHarness) -> None:
    write, most = harness.op(Op.WRITE, 0, 0), harness.tier.slabs.indices
    for wrong in (
        {"generation": 1},
        {"slot": most},
        {"offset": harness.arena.nbytes},
        {"size_class": 1},
        {"length": 0},
    ):
        with pytest.raises(TierError):
            harness.tier.submit([write, write._replace(**wrong)], math.inf)
    with pytest.raises(PlanError):
        harness.tier.delete_records([most])
    harness.store(0, 0)
    assert harness.tier.failures["tier_host"] == 0


def test_signals_meant_for_the_engine_do_not_end_it(harness: HostedHarness) -> None:
    harness.store(0, 0)
    for each in (signal.SIGINT, signal.SIGTERM):
        harness.signal(each)
    harness.assert_serves(0, 0)
    assert harness.tier.failures["tier_host"] == 0


def test_pauses_grow_and_begin_anew_after_a_good_process(tmp_path: Path) -> None:
    now, started = 0.0, 0

    def start() -> HostProcess:
        nonlocal started
        started += 1
        if started != 12:
            raise OSError("no more processes")
        return HostProcess(("true",), os.open(os.devnull, os.O_RDONLY))

    guard = watch.HostSupervisor(start, lambda: now)
    with pytest.raises(OSError, match="no more"):
        guard.begin()
    pauses = []
    for death in range(1, 11):
        guard.poll(expects_reply=False)
        assert guard.deaths == death
        pauses.append(guard._restart_at - now)
        now = guard._restart_at - 0.01
        guard.poll(expects_reply=False)
        assert guard.deaths == death
        now = guard._restart_at
    assert pauses == pytest.approx([min(0.1 * 2**death, watch.LONGEST_PAUSE) for death in range(10)])
    guard.poll(expects_reply=False)
    assert guard.process is not None
    now += watch.STABLE
    while not guard.poll(expects_reply=False).died:
        pass
    assert guard._restart_at - now == pytest.approx(watch.FIRST_PAUSE)


# ---------------------------------------------------------------------- resets


def test_reset_reaches_files_while_the_process_is_away(opener: Opener) -> None:
    harness = opener(fixed_weights=True)
    harness.store(0, 0)
    harness.kill()
    harness.tier.reset(1)
    harness.until_open()
    harness.assert_misses(0, 0, generation=0)
    harness.store(1, 1)
    harness.reopen()
    assert harness.tier.generation == 1
    assert [chunk.key for chunk in harness.tier.recover()] == [key(1)]


def test_late_reset_kills_tier_host_and_next_one_applies_it(
    harness: HostedHarness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write = HostedFileTier._write_pending_reset

    def patient(self: HostedFileTier, order: Callable[[Any], None]) -> str:
        monkeypatch.setattr(tier, "RESET_TIMEOUT", 60.0)  # the short one is for the process, which never confirms
        return write(self, order)

    monkeypatch.setattr(HostedFileTier, "_write_pending_reset", patient)
    monkeypatch.setattr(tier, "RESET_TIMEOUT", 0.05)
    harness.store(0, 0)
    harness.signal(signal.SIGSTOP)
    harness.tier.reset(1)
    assert re.search(r"killed: it has not confirmed a reset after \d+\.\d s; the engine writes", caplog.text)
    harness.until(lambda: harness.tier.failures["tier_host"] == 1)
    harness.until_open()
    harness.assert_misses(0, 0, generation=0)
    harness.assert_misses(0, 0, generation=1)


def test_reset_during_opening_restarts_tier_host_with_the_reset(
    harness: HostedHarness,
) -> None:
    harness.store(0, 0)
    harness.kill()
    harness.until(lambda: harness.tier._supervisor.process is not None)
    assert harness.tier.is_unavailable  # it may have opened the files, but has not been heard
    opening = harness.pid
    harness.tier.reset(1)
    harness.until_open()
    assert harness.pid != opening
    harness.store(1, 1)
    harness.assert_serves(1, 1)
    assert harness.tier.failures["tier_host"] == 2


def test_records_after_a_reset_are_for_this_engine_alone(opener: Opener) -> None:
    harness = opener()
    harness.tier.reset(1)
    harness.store(0, 0)
    harness.kill()
    harness.until_open()
    harness.assert_serves(0, 0)  # to this one, also by the next process
    harness.reopen()
    assert harness.tier.recover() == []
    harness.assert_misses(0, 0)


def test_unless_weights_do_not_change(opener: Opener) -> None:
    harness = opener(fixed_weights=True)
    harness.tier.reset(1)
    harness.store(0, 0)
    harness.reopen()
    assert [chunk.key for chunk in harness.tier.recover()] == [key(0)]
    harness.assert_serves(0, 0)


def test_reset_that_is_not_durable_raises_until_it_is(opener: Opener) -> None:
    harness = opener()
    resource.prlimit(harness.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    for _ in range(2):
        with pytest.raises(TierError, match="superblock"):
            harness.tier.reset(1)
    resource.prlimit(harness.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    harness.tier.reset(1)
    harness.store(0, 0)
    assert harness.tier.failures["tier_host"] == 0


def found_after_a_kill(harness: HostedHarness) -> tuple[int, list[StoredChunk]]:
    """Generation and records that the next engine finds if everything is killed now.

    A process that is stopped keeps the lock until then.
    """
    process = harness.tier._supervisor.process
    if process is not None:
        process.kill()
        process.wait_reaped(30.0)
    capacity = capacity_for(SLOTS, IMAGE)
    with closing(
        FileTier(harness.directory, capacity=capacity, image_bytes=IMAGE, arena=harness.arena, scope=bytes(32))
    ) as tier:
        return tier.generation, tier.recover()


@pytest.mark.parametrize("times", [1, 2])
def test_reset_without_the_process_survives_a_kill_of_everything(harness: HostedHarness, times: int) -> None:
    harness.store(0, 0)
    harness.kill()
    for generation in range(1, times + 1):
        harness.tier.reset(generation)
    assert found_after_a_kill(harness) == (times, [])


def test_reset_unconfirmed_by_stopped_tier_host_survives_a_kill(
    harness: HostedHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier, "RESET_TIMEOUT", 1.0)
    harness.store(0, 0)
    harness.signal(signal.SIGSTOP)
    harness.tier.reset(1)
    assert found_after_a_kill(harness) == (1, [])


def test_a_reset_while_the_process_is_away_outlives_a_close(harness: HostedHarness) -> None:
    harness.store(0, 0)
    harness.kill()
    harness.tier.reset(1)
    harness.tier.close()
    assert found_after_a_kill(harness) == (1, [])


def test_unwritten_reset_is_written_on_close(harness: HostedHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    harness.store(0, 0)
    harness.kill()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: os.close(-1))
        with pytest.raises(TierError, match="reset: cannot be used"):
            harness.tier.reset(1)
    harness.tier.close()
    assert found_after_a_kill(harness) == (1, [])


def test_reset_that_cannot_be_written_leaves_nothing_readable(
    harness: HostedHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.store(0, 0)
    harness.kill()
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda fd, data, offset: os.close(-1))
        with pytest.raises(TierError, match="reset: cannot be used"):
            harness.tier.reset(1)
        harness.tier.close()
    assert found_after_a_kill(harness)[1] == []


def test_reset_on_a_hung_disk_is_an_error(harness: HostedHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = threading.Event()
    monkeypatch.setattr(tier, "RESET_TIMEOUT", 0.2)
    monkeypatch.setattr(tier.PendingReset, "write", lambda self, generation: hangs.wait())
    harness.store(0, 0)
    harness.kill()
    with pytest.raises(TierError, match="was not written to disk within"):
        harness.tier.reset(1)
    hangs.set()


# ---------------------------------------------------------------------- nonsense

NONSENSE = {
    "a kind that there is not": frame(Kind.ALIVE)[1:] + b"\xff" * 9,
    "a frame without end": struct.pack("<BQ", Kind.RESULT, 2**63),
    "half a result": frame(Kind.RESULT, b"123"),
    "a result of nothing": frame(Kind.RESULT, struct.pack("<QQdd", 2**40, 0, 0.0, 0.0)),
    "a result without statuses": frame(Kind.RESULT, struct.pack("<QQdd", 1, 0, 0.0, 0.0)),
    "a status that there is not": frame(Kind.RESULT, struct.pack("<QQdd", 1, 0, 0.0, 0.0) + b"\xff"),
    "no number of seconds": frame(Kind.RESULT, struct.pack("<QQdd", 1, 0, math.nan, 0.0) + b"\0"),
    "counts that are no JSON": frame(Kind.FAILURES, b"{"),
    "counts of nothing": frame(Kind.FAILURES, b"{}"),
    "counts that are no numbers": frame(Kind.FAILURES, json.dumps(dict.fromkeys(OF_FILES, "many")).encode()),
    "nested counts": frame(Kind.FAILURES, b"[" * 100_000),
    "a sign of life of 3 bytes": frame(Kind.ALIVE, b"abc"),
    "no text": frame(Kind.RESET_DONE, b"\xff\xfe"),
    "files opened twice": frame(Kind.OPENED, struct.pack("<Q", 2) + b"{}"),
    "an opening of 1 byte": frame(Kind.OPENED, b"1"),
    "a refusal of a number": frame(Kind.REFUSED, b"7"),
    "an order": frame(Kind.SUBMIT, struct.pack("<Qd", 2**63, math.nan)),
}


@pytest.mark.parametrize("what", deep(["a frame without end", "a status that there is not", "no text"], list(NONSENSE)))
def test_process_that_sends_nonsense_is_replaced_and_serves(tmp_path: Path, what: str) -> None:
    gate, said = tmp_path / "gate", tmp_path / "said"
    said.write_bytes(NONSENSE[what])
    lines = (
        "import os, pathlib",
        f"gate, said = pathlib.Path({str(gate)!r}), pathlib.Path({str(said)!r})",
        "report = child.TierHostServer._report",
        "say = lambda self: (gate.unlink(), os.write(self._replies, said.read_bytes()))",
        "child.TierHostServer._report = lambda self, tier: (gate.exists() and say(self), report(self, tier))[-1]",
    )
    harness = HostedHarness(tmp_path / "tier", program(*lines))
    harness.store(0, 0)
    gate.touch()
    ticket = harness.tier.submit([harness.op(Op.READ, 0, 0)], math.inf)
    harness.until(lambda: harness.tier.failures["tier_host"] == 1)
    assert not gate.exists(), "it was said"
    assert harness.wait(ticket).statuses in ((Status.UNAVAILABLE,), (Status.OK,))
    harness.until_open()
    harness.assert_serves(0, 0)
    assert harness.tier.failures["tier_host"] == 1
    harness.close()


@pytest.mark.parametrize("what", NONSENSE)
def test_a_process_that_begins_with_nonsense_is_refused(tmp_path: Path, what: str) -> None:
    (tmp_path / "said").write_bytes(NONSENSE[what])
    with pytest.raises(TierError, match=r"invalid message|before it opened"):
        HostedHarness(tmp_path / "tier", ("sh", "-c", f"cat {tmp_path / 'said'}"))


def test_slots_that_cannot_be_are_nonsense(harness: HostedHarness) -> None:
    opened = wire.OpenedReply(harness.tier.slabs, 0, {}, dict.fromkeys(OF_FILES, 0), StoredChunks.of(()), [])
    assert wire.parse_opened(wire.pack_opened(opened), OF_FILES) == opened
    found = StoredChunk(harness.tier.slabs.indices, key(0), None)
    for wrong in (
        {"found": StoredChunks.of([found])},
        {"other_scope_slots": [harness.tier.slabs.indices]},
        {"generation": -1},
    ):
        with pytest.raises(wire.WireError):
            wire.parse_opened(wire.pack_opened(opened._replace(**wrong)), OF_FILES)


@pytest.mark.parametrize("after", [0.0, 0.02, 0.1, 0.3])
def test_interrupt_does_not_end_a_starting_process(
    opener: Opener, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, after: float
) -> None:
    started, start = [], HostedFileTier._start

    def interrupted(self: HostedFileTier) -> HostProcess:
        process = start(self)
        time.sleep(after)
        for each in (signal.SIGINT, signal.SIGTERM):
            os.kill(process.pid, each)
        started.append(process.pid)
        return process

    monkeypatch.setattr(HostedFileTier, "_start", interrupted)
    harness = opener()
    harness.store(0, 0)
    assert started == [harness.pid]
    assert "Traceback" not in capfd.readouterr().err


# ---------------------------------------------------------------------- disks


def test_full_disk_is_counted_and_written_records_are_served(harness: HostedHarness) -> None:
    harness.store(0, 0)
    resource.prlimit(harness.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    assert harness.run(harness.op(Op.WRITE, 1, 1)) == (Status.NO_SPACE,)
    assert harness.tier.failures["write_no_space"] == 1
    harness.assert_serves(0, 0)
    harness.kill()
    harness.until_open()
    harness.store(1, 1)
    assert harness.tier.failures["write_no_space"] == 1  # what the dead one counted is not lost


def test_a_directory_that_goes_away_costs_what_was_in_it(harness: HostedHarness) -> None:
    harness.store(0, 0)
    shutil.rmtree(harness.directory)
    harness.assert_serves(0, 0)  # files that are open
    harness.kill()
    harness.until_open()
    harness.assert_misses(0, 0)
    harness.store(0, 0)
    harness.assert_serves(0, 0)


def test_a_directory_that_cannot_be_opened_again_is_tried_again(harness: HostedHarness) -> None:
    harness.store(0, 0)
    aside = harness.directory.rename(harness.directory.with_name("aside"))
    harness.directory.write_text("in the way")
    harness.kill()
    harness.until(lambda: harness.tier.failures["tier_host"] >= 2)
    assert harness.run(harness.op(Op.READ, 0, 0)) == (Status.UNAVAILABLE,)
    harness.directory.unlink()
    aside.rename(harness.directory)
    harness.until_open()
    harness.assert_serves(0, 0)


# ---------------------------------------------------------------------- the beginning and the end


def test_why_it_cannot_be_opened_is_said(opener: Opener, tmp_path: Path) -> None:
    with pytest.raises(TierError, match=r"room for .* the file system has"):
        HostedHarness(tmp_path / "large", capacity=1 << 50, image_bytes=1 << 28)
    (tmp_path / "file").write_text("")
    with pytest.raises(TierError, match="Not a directory"):
        HostedHarness(tmp_path / "file" / "tier")
    with pytest.raises(TierError, match="/proc/"):
        HostedHarness(Path("/proc/longshore"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "superblock").write_bytes(b"not ours" * 512)
    with pytest.raises(FormatError, match="other"):
        HostedHarness(tmp_path / "other")
    opener()
    with pytest.raises(TierInUseError, match="sub-directory"):
        HostedHarness(tmp_path / "tier", program("child.LOCK_TIMEOUT = 0"))


def test_a_process_that_says_nothing_is_an_error_and_ended(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    with pytest.raises(TierError, match="by signal 9 before it opened"):
        HostedHarness(tmp_path, ("sh", "-c", f"echo $$ > {note}; exec sleep 100 >&-"))
    assert not is_running(int(note.read_text()))
    with pytest.raises(TierError, match="could not be started"):
        HostedHarness(tmp_path, ("/no/such/program",))


def test_descriptors_of_high_numbers_serve_as_well(opener: Opener) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, limits[1]))
    others = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        harness = opener()
        harness.store(0, 0)
        harness.tier.reset(1)
        harness.assert_misses(0, 0, generation=1)
        harness.close()
    finally:
        for each in others:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("pipes", [0, 1, 2])
def test_a_process_that_cannot_be_started_leaves_no_descriptor_behind(
    monkeypatch: pytest.MonkeyPatch, pipes: int
) -> None:
    made = []

    def pipe() -> tuple[int, int]:
        if len(made) == pipes:
            raise OSError(errno.EMFILE, "too many open files")
        made.append(make())
        return made[-1]

    make, before = os.pipe, len(list(Path("/proc/self/fd").iterdir()))
    monkeypatch.setattr(os, "pipe", pipe)
    with pytest.raises(OSError, match="too many open files"):
        HostProcess(("/no/such/program",), 0)
    assert len(made) == pipes
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier, "__version__", "0.0")
    with pytest.raises(TierError, match=r"runs Longshore 0\.0, .* restart the engine"):
        HostedHarness(tmp_path)


def test_a_private_arena_is_refused(tmp_path: Path) -> None:
    arena = Arena(IMAGE)
    with pytest.raises(TierError, match="shared"):
        HostedFileTier(tmp_path, capacity=1 << 20, image_bytes=IMAGE, arena=arena, scope=bytes(32))
    arena.close()


def test_tier_host_that_does_not_end_is_killed_on_close(
    harness: HostedHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier, "CLOSE_TIMEOUT", 0.1)
    harness.store(0, 0)
    pid = harness.pid
    harness.signal(signal.SIGSTOP)
    tickets = reads(harness)
    harness.tier.close()
    assert not is_running(pid)
    assert sorted(result.ticket for result in harness.tier.poll() if result.statuses == (Status.TIER_OFF,)) == tickets


def test_a_forked_child_leaves_the_process_alone(harness: HostedHarness) -> None:
    harness.store(0, 0)
    pid = os.fork()
    if not pid:
        try:
            harness.tier.poll()
        except TierClosedError:
            harness.tier.close()
            os._exit(0)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    harness.assert_serves(0, 0)


def test_every_failure_reason_is_reported_from_the_start(harness: HostedHarness) -> None:
    assert harness.tier.failures == dict.fromkeys(FAILURE_REASONS, 0)
