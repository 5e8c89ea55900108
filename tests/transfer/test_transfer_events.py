"""Pooled events: used again only once they have passed, and never beyond the stock without being counted."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from longshore.transfer.device.torch_streams import Accelerator, Events, Fallbacks


class Flag:
    """An event that has passed when the test says so."""

    def __init__(self) -> None:
        self.done = False
        self.records = 0

    def record(self, stream: object) -> None:
        self.done = False
        self.records += 1

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = True

    def wait(self, stream: list[Flag]) -> None:
        stream.append(self)

    def elapsed_time(self, other: Flag) -> float:
        return 2.0


class Flags(Accelerator):
    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.made: list[Flag] = []

    def new_event(self) -> torch.Event:
        self.made.append(Flag())
        return self.made[-1]  # type: ignore[return-value]


def stock(count: int) -> tuple[Events, Flags, Fallbacks, list[Flag]]:
    flags, fallbacks = Flags(), Fallbacks()
    return Events(flags, fallbacks, count), flags, fallbacks, []


def test_events_are_allocated_at_start_and_reused_once_passed() -> None:
    events, flags, fallbacks, stream = stock(2)
    for _ in range(10):
        point = events.record(stream)  # type: ignore[arg-type]
        point.wait()
    assert len(flags.made) == 2
    assert not fallbacks.counts()


def test_pending_event_is_not_recorded_again() -> None:
    events, flags, fallbacks, stream = stock(2)
    points = [events.record(stream) for _ in range(5)]  # type: ignore[arg-type]
    assert [flag.records for flag in flags.made] == [1] * 5
    assert fallbacks.counts() == {"new_event": 3}
    assert not any(point.query() for point in points)
    for point in points:
        point.wait()
    for _ in range(2):
        events.record(stream)  # type: ignore[arg-type]
    assert len(flags.made) == 5
    events.record(stream)  # type: ignore[arg-type]
    assert fallbacks.counts() == {"new_event": 4}  # what was made beyond the stock was let go of


def test_old_point_of_a_reused_event_delays_no_stream() -> None:
    events, flags, _, stream = stock(1)
    old = events.record(stream)  # type: ignore[arg-type]
    flags.made[0].done = True
    new = events.record(stream)  # type: ignore[arg-type]
    assert old.query()
    assert not new.query()
    old.make_wait(stream)  # type: ignore[arg-type]
    assert stream == []
    new.make_wait(stream)  # type: ignore[arg-type]
    assert stream == [flags.made[0]]
    old.wait()
    assert not new.query()


def test_kept_event_keeps_its_time_until_released() -> None:
    events, _, fallbacks, stream = stock(2)
    begun = events.record(stream, keep=True)  # type: ignore[arg-type]
    begun.wait()
    ended = events.record(stream, keep=True)  # type: ignore[arg-type]
    ended.wait()
    events.record(stream)  # type: ignore[arg-type]
    assert fallbacks.counts() == {"new_event": 1}
    assert begun.seconds_until(ended) == 0.002
    events.release(begun, ended)
    events.record(stream)  # type: ignore[arg-type]
    assert fallbacks.counts() == {"new_event": 1}
    for one, other in ((begun, ended), (begun, events.record(stream)), (events.record(stream), ended)):  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match="released"):
            one.seconds_until(other)


def test_event_whose_record_fails_returns_to_the_pool() -> None:
    events, flags, fallbacks, stream = stock(1)

    def fail(stream: object) -> None:
        raise OSError("device lost")

    flags.made[0].record = fail  # type: ignore[method-assign]
    with pytest.raises(OSError, match="device lost"):
        events.record(stream)  # type: ignore[arg-type]
    flags.made[0].record = lambda stream: None  # type: ignore[method-assign]
    events.record(stream)  # type: ignore[arg-type]
    assert not fallbacks.counts()


def test_pool_keeps_no_reference_to_points_that_have_passed() -> None:
    events, _, _, stream = stock(1)
    point = events.record(stream)  # type: ignore[arg-type]
    point.wait()
    events.record(stream).wait()  # type: ignore[arg-type]
    former = weakref.ref(point)
    del point
    gc.collect()
    assert former() is None


def test_event_that_a_thread_waits_for_is_not_reused() -> None:
    events, flags, fallbacks, stream = stock(1)
    point = events.record(stream)  # type: ignore[arg-type]

    def recorded_meanwhile() -> None:
        flags.made[0].done = True
        events.record(stream)  # type: ignore[arg-type]

    flags.made[0].synchronize = recorded_meanwhile  # type: ignore[method-assign]
    point.wait()
    assert flags.made[0].records == 1
    assert fallbacks.counts() == {"new_event": 1}
