"""A disk that fills up or fails after the start: read-only, then off; said once, counted, and never a hang."""

import errno
import logging
import math
import os
import threading
from collections.abc import Callable, Sequence
from typing import cast

import pytest
from prometheus_client import CollectorRegistry

from longshore.boundary import HOST, Status, StoredChunk
from longshore.cache import CacheSettings, TieredCache, TierSpec
from longshore.metrics import LongshoreCollector
from longshore.runtime import Runtime
from longshore.testing import TierHarness
from longshore.testing.tier_harness import key
from longshore.tiers.base import Op
from longshore.tiers.file import FileTier
from longshore.tiers.file.tier import MAX_FAILURES, TierState
from plain_io import PlainIo


class FailingIo(PlainIo):
    """Images cannot be written, or read, while it says so."""

    def __init__(self) -> None:
        self.writes = 0
        self.reads = 0
        self.tried = 0

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int:
        return self._try(self.writes) or super().pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int:
        return self._try(self.reads) or super().preadv(fd, buffers, offset)

    def _try(self, error: int) -> int:
        self.tried += 1
        if error:
            raise OSError(error, os.strerror(error))
        return 0


@pytest.fixture
def io() -> FailingIo:
    return FailingIo()


@pytest.fixture
def harness(io: FailingIo, harness_of: Callable[..., TierHarness]) -> TierHarness:
    return harness_of(io=io, threads=1)


def tier(harness: TierHarness) -> FileTier:
    return cast(FileTier, harness.tier)


@pytest.mark.parametrize(
    ("number", "status"),
    [(errno.ENOSPC, Status.NO_SPACE), (errno.EDQUOT, Status.NO_SPACE), (errno.EIO, Status.IO_ERROR)],
)
def test_writes_that_go_on_failing_make_it_read_only(
    harness: TierHarness, io: FailingIo, caplog: pytest.LogCaptureFixture, number: int, status: Status
) -> None:
    harness.store(0, 0)
    io.writes = number
    for _ in range(MAX_FAILURES):
        assert tier(harness)._health.state is TierState.ON
        assert harness.run(harness.op(Op.WRITE, 1, 1)) == (status,)
    assert tier(harness)._health.state is TierState.READ_ONLY
    tried = io.tried
    io.writes = 0
    for _ in range(3):
        assert harness.run(harness.op(Op.WRITE, 0, 1)) == (Status.TIER_OFF,)
    assert io.tried == tried
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert " is read-only until it is reopened (restart the engine); check the disk" in caplog.text
    assert tier(harness).failures[f"write_{status.value}"] == MAX_FAILURES
    assert (tier(harness).failures["read_only"], tier(harness).failures["off"]) == (1, 0)
    harness.assert_serves(0, 0)
    assert tier(harness).recover() == [StoredChunk(0, key(0), None)], "what was refused replaced nothing"


def test_reads_that_go_on_failing_turn_it_off(
    harness: TierHarness, io: FailingIo, caplog: pytest.LogCaptureFixture
) -> None:
    harness.store(0, 0)
    io.reads = errno.EIO
    for _ in range(MAX_FAILURES):
        assert harness.load(0, 0)[0] is Status.IO_ERROR
    assert tier(harness)._health.state is TierState.OFF
    io.reads = 0
    assert harness.load(0, 0)[0] is Status.TIER_OFF
    assert harness.run(harness.op(Op.WRITE, 1, 1)) == (Status.TIER_OFF,)
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert tier(harness).failures["read_io_error"] == MAX_FAILURES
    assert tier(harness).failures["off"] == 1


def test_one_that_succeeds_begins_the_count_anew(harness: TierHarness, io: FailingIo) -> None:
    for _ in range(3):
        io.writes = errno.ENOSPC
        for _ in range(MAX_FAILURES - 1):
            harness.run(harness.op(Op.WRITE, 0, 0))
        io.writes = 0
        harness.store(0, 0)
    assert tier(harness)._health.state is TierState.ON


def test_a_write_that_a_reset_overtook_is_not_listed(harness: TierHarness, io: FailingIo) -> None:
    begun, go_on = threading.Event(), threading.Event()
    write = io.pwritev

    def slow(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        begun.set()
        go_on.wait(60)
        return write(fd, buffers, offset)

    io.pwritev = slow  # type: ignore[method-assign]
    ticket = harness.tier.submit([harness.op(Op.WRITE, 0, 0)], math.inf)
    assert begun.wait(60)
    harness.tier.reset(1)
    go_on.set()
    assert harness.wait(ticket).statuses == (Status.OK,)
    assert harness.tier.recover() == []


def test_misses_are_no_failures(harness: TierHarness) -> None:
    for _ in range(2 * MAX_FAILURES):
        harness.assert_misses(0, 0)
    assert tier(harness)._health.state is TierState.ON
    assert tier(harness).failures["read_mismatch"] == 2 * MAX_FAILURES


def test_a_tier_that_is_opened_again_is_on(harness: TierHarness, io: FailingIo) -> None:
    io.writes = errno.ENOSPC
    for _ in range(MAX_FAILURES):
        harness.run(harness.op(Op.WRITE, 0, 0))
    io.writes = 0
    harness.reopen()
    harness.store(0, 0)


def test_failures_are_exported_by_reason(harness: TierHarness) -> None:
    runtime = Runtime(TieredCache([TierSpec(HOST, 4, 4096)], CacheSettings()), [])
    registry = CollectorRegistry()
    registry.register(LongshoreCollector(runtime, file=harness.tier))
    harness.assert_misses(0, 0)
    for reason, count in (("read_mismatch", 1), ("read_corrupt", 0), ("read_only", 0), ("off", 0)):
        assert registry.get_sample_value("longshore_file_failures_total", {"reason": reason}) == count
    runtime.close(1.0)


def test_a_disk_that_fails_degrades_the_health(io: FailingIo, harness: TierHarness) -> None:
    collector = LongshoreCollector(Runtime(TieredCache([TierSpec(HOST, 4, 4096)]), []), file=harness.tier)
    registry = CollectorRegistry()
    registry.register(collector)
    harness.store(0, 0)
    assert collector.health() == ("ready", ())
    io.writes = errno.EIO
    for _ in range(MAX_FAILURES):
        harness.run(harness.op(Op.WRITE, 1, 1))
    assert tier(harness).failures["read_only"] == 1  # the fault fired
    assert collector.health() == ("degraded", ("file: read-only after repeated write errors",))
    assert registry.get_sample_value("longshore_tier_available", {"tier": "file"}) == 0
    io.reads = errno.EIO
    for _ in range(MAX_FAILURES):
        harness.run(harness.op(Op.READ, 0, 0))
    assert collector.health() == ("degraded", ("file: disabled after repeated I/O errors",))


def test_every_failure_reason_is_reported_from_the_start(harness: TierHarness) -> None:
    assert tier(harness).failures == dict.fromkeys(
        [
            *(f"read_{status}" for status in ("corrupt", "mismatch", "short", "io_error", "device_error")),
            *(f"write_{status}" for status in ("io_error", "no_space", "device_error")),
            *("read_only", "off", "checkpoint"),
        ],
        0,
    )


@pytest.mark.parametrize("kind", [Op.READ, Op.WRITE])
def test_internal_errors_are_no_failures_of_the_disk(
    harness: TierHarness, io: FailingIo, kind: Op, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    harness.store(0, 0)
    fired = list[int]()

    def broken(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        fired.append(offset)
        raise TypeError("an error of ours")

    with monkeypatch.context() as patched:
        patched.setattr(io, "preadv" if kind is Op.READ else "pwritev", broken)
        op = harness.op(kind, *((0, 0) if kind is Op.READ else (1, 1)))
        assert {harness.run(op) for _ in range(2 * MAX_FAILURES)} == {(Status.INTERNAL_ERROR,)}
    assert len(fired) == 2 * MAX_FAILURES
    assert tier(harness)._health.state is TierState.ON
    assert not any(tier(harness).failures.values())
    assert caplog.text.count("TypeError: an error of ours") == 1, "with a traceback, and not for each"
    harness.assert_serves(0, 0)
    harness.store(1, 1)
    assert [chunk.slot for chunk in tier(harness).recover()] == [0, 1]


def test_internal_errors_do_not_interrupt_failures_in_a_row(
    harness: TierHarness, io: FailingIo, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> int:
        raise TypeError("an error of ours")

    for number in range(MAX_FAILURES):
        assert tier(harness)._health.state is TierState.ON
        io.writes = errno.EIO
        assert harness.run(harness.op(Op.WRITE, 1, 1)) == (Status.IO_ERROR,)
        if number < MAX_FAILURES - 1:
            with monkeypatch.context() as patched:
                patched.setattr(io, "pwritev", broken)
                assert harness.run(harness.op(Op.WRITE, 1, 1)) == (Status.INTERNAL_ERROR,)
    assert tier(harness)._health.state is TierState.READ_ONLY
