"""Events in a file: bounded, in order, out of the engine's way; and a disk that is full is no reason to stop."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from longshore.boundary import DEVICE, FILE, HOST, Route, StoredChunk
from longshore.cache import CacheSettings, EventKind, GroupKeys, TieredCache, TierSpec, Verdict, explain
from longshore.cache.explain import read_events
from longshore.metrics import LongshoreCollector
from longshore.runtime import EventRecorder, Runtime, recorder
from scripted import Scripted

NOW, WALL = 50.0, 1_000_000.0


class Rig:
    """A cache whose copies end at once, and a recorder that works when the test says so."""

    def __init__(self, path: Path, limit: int = 1 << 20, kept: int = 1000, *, start: bool = False) -> None:
        self.mover = Scripted(Route(DEVICE, HOST), Route(HOST, DEVICE))
        cache = TieredCache([TierSpec(HOST, 4, 4096)], CacheSettings(events=kept))
        self.runtime = Runtime(cache, [self.mover], clock=lambda: NOW)
        self.recorder = EventRecorder(self.runtime, path, limit, clock=lambda: WALL, start=start)
        self.path = path

    def store(self, number: int) -> None:
        with self.runtime.batch() as cache:
            assert cache.store({0: GroupKeys([bytes([number]) * 32])}, {0: (number % 4,)})[0].job is not None
        self.mover.end()
        self.runtime.pump()

    def sample(self, name: str) -> float | None:
        found = CollectorRegistry()
        found.register(LongshoreCollector(self.runtime, events=self.recorder))
        return found.get_sample_value(f"longshore_events_{name}")


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path / "events")


def test_recorded_times_are_wall_clock_times(rig: Rig) -> None:
    rig.store(1)
    with rig.runtime.batch() as cache:
        cache.lookup({0: GroupKeys([bytes([1]) * 32, bytes([2]) * 32])}, NOW, request="r")
    rig.recorder.close()
    events = read_events(rig.path)
    kinds = [EventKind.RESET, EventKind.ORDERED, EventKind.STORED, EventKind.REQUEST]
    assert [event.kind for event in events] == kinds
    assert {event.at for event in events} == {WALL}
    assert [account.verdict for account in explain(events, "r")["r"]] == [Verdict.FOUND, Verdict.NEVER_SEEN]
    assert (rig.sample("written_total"), rig.sample("missed_total"), rig.sample("off")) == (4, 0, 0)


def test_recovered_chunks_are_recorded_as_of_the_restart(tmp_path: Path) -> None:
    cache = TieredCache([TierSpec(HOST, 4, 4096), TierSpec(FILE, 4, 4096, outlives=True)], CacheSettings(events=100))
    assert cache.adopt(FILE, [StoredChunk(0, bytes([1]) * 32, None)]) == 1
    runtime = Runtime(cache, [Scripted(Route(DEVICE, HOST), Route(HOST, DEVICE))], clock=lambda: NOW)
    recorded = EventRecorder(runtime, tmp_path / "events", 1 << 20, clock=lambda: WALL, start=False)
    with runtime.batch() as cache:
        cache.lookup({0: GroupKeys([bytes([1]) * 32])}, NOW, request="r")
    recorded.close()
    (account,) = explain(read_events(tmp_path / "events"), "r")["r"]
    assert (account.verdict, account.tier, account.at) == (Verdict.FOUND, FILE, WALL)


def test_both_files_are_bounded_and_hold_the_newest(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "events", limit=4096)
    for number in range(100):
        rig.store(number)
        rig.recorder.pump()
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 4096
    rig.recorder.close()
    events = read_events(rig.path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events", "events.1"]
    assert [event.number for event in events] == list(range(events[0].number, events[-1].number + 1))
    assert len(events) > 20
    assert events[-1].key == bytes([99]) * 8
    assert rig.recorder.written > len(events)


def test_new_process_begins_a_file_and_keeps_the_last(tmp_path: Path) -> None:
    first = Rig(tmp_path / "events")
    first.store(1)
    first.recorder.close()
    second = Rig(tmp_path / "events")
    with second.runtime.batch() as cache:
        cache.lookup({0: GroupKeys([bytes([1]) * 32])}, NOW, request="r")
    second.recorder.close()
    (account,) = explain(read_events(second.path), "r")["r"]
    assert (account.verdict, account.cause) == (Verdict.RESET, "start")


def test_what_is_not_pulled_in_time_is_a_gap(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "events", kept=3)
    for number in range(4):
        rig.store(number)
    rig.recorder.close()
    events = read_events(rig.path)
    gap = events[1]
    assert (gap.kind, gap.length) == (EventKind.GAP, rig.recorder.missed)
    assert rig.recorder.missed > 0


class FullDisk:
    def write(self, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def close(self) -> None:
        """Nothing was kept."""


def test_a_full_disk_turns_it_off_and_is_said_once(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.recorder._file = FullDisk()  # type: ignore[assignment]
    for number in range(3):
        rig.store(number)
        rig.recorder.pump()
    rig.recorder.close()
    assert caplog.text.count("event recording to") == 1
    assert "No space left" in caplog.text
    assert (rig.sample("written_total"), rig.sample("missed_total"), rig.sample("off")) == (1, 6, 1)


def test_a_directory_that_is_gone_does_not_stop_anything(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "nowhere" / "events")
    rig.store(1)
    rig.recorder.close()
    assert isinstance(rig.recorder.failure, FileNotFoundError)
    assert rig.sample("off") == 1


def test_the_engine_does_not_wait_for_a_file_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "INTERVAL", 0.001)
    rig = Rig(tmp_path / "events")
    hanging, go_on = threading.Event(), threading.Event()

    class Hangs:
        def write(self, data: bytes) -> int:
            hanging.set()
            assert go_on.wait(30.0)
            return len(data)

        def close(self) -> None:
            """Nothing was kept."""

    rig.recorder._file = Hangs()  # type: ignore[assignment]
    rig.recorder._thread.start()
    rig.store(1)
    assert hanging.wait(30.0)
    rig.store(2)  # all of this goes on while the file hangs
    with rig.runtime.batch() as cache:
        assert cache.lookup({0: GroupKeys([bytes([1]) * 32])}, NOW).num_chunks == 1
    assert not go_on.is_set()
    go_on.set()
    rig.recorder.close()
    assert rig.recorder.written == 1 + 2 + 2 + 1


def test_batches_are_bounded(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "BATCH", 3)
    for number in range(3):
        rig.store(number)
    sizes: list[Any] = []
    write = rig.recorder._write
    monkeypatch.setattr(rig.recorder, "_write", lambda events: (sizes.append(len(events)), write(events)))
    assert rig.recorder.pump()
    rig.recorder.close()
    assert sizes[:2] == [3, 3]
    assert rig.recorder.written == 7
    assert rig.recorder.close() is None  # type: ignore[func-returns-value]


@pytest.mark.parametrize("mask", [0o000, 0o022])
def test_files_of_events_are_for_us_alone(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        rig = Rig(tmp_path / "events", limit=1 << 11)
        for number in range(40):
            rig.store(number)
            rig.recorder.pump()
        rig.recorder.close()
    finally:
        os.umask(before)
    assert {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {
        "events": 0o600,
        "events.1": 0o600,
    }


@pytest.mark.parametrize("kind", ["a link", "a dangling link", "a directory", "a pipe"])
def test_what_is_no_file_of_events_is_left_alone(tmp_path: Path, kind: str) -> None:
    path, precious = tmp_path / "events", tmp_path / "precious"
    if kind == "a link":
        precious.write_text("precious")
    if kind in ("a link", "a dangling link"):
        path.symlink_to(precious)
    elif kind == "a directory":
        path.mkdir()
    else:
        os.mkfifo(path)
    names = sorted(each.name for each in tmp_path.iterdir())
    rig = Rig(path)
    assert rig.recorder.failure is not None
    rig.store(1)
    rig.recorder.close()
    assert sorted(each.name for each in tmp_path.iterdir()) == names
    assert kind != "a link" or precious.read_text() == "precious"


def test_a_path_of_events_with_a_nul_is_said(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "a\0b")
    assert rig.recorder.failure is not None
    rig.recorder.close()
