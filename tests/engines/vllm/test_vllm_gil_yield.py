"""An engine that asks again and again without computing gives up the interpreter lock, and no other does."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_kit import file_settings, keys_of

from longshore.engines.vllm import connector
from longshore.engines.vllm.connector import GilYield
from longshore.engines.vllm.requests import cache_keys


class Clock:
    """Time that passes when it is slept, and when it is told to."""

    def __init__(self) -> None:
        self.now, self.sleeps = 100.0, 0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.sleeps += 1

    def taken(self) -> int:
        """Sleeps since the last call."""
        sleeps, self.sleeps = self.sleeps, 0
        return sleeps


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(connector, "time", SimpleNamespace(monotonic=clock.monotonic, sleep=clock.sleep))
    return clock


def test_idle_steps_yield_the_gil_while_copies_are_in_flight(clock: Clock) -> None:
    gil_yield = GilYield()
    gil_yield.step_planned(lambda: True)
    assert clock.taken() == 0
    for _ in range(3):
        clock.now += 1e-4
        gil_yield.step_planned(lambda: True)
        assert clock.taken() == 1
        clock.now += 1e-4
        gil_yield.step_planned(lambda: False)
        assert clock.taken() == 0


def test_computing_step_is_never_delayed(clock: Clock) -> None:
    gil_yield, asked = GilYield(), list[bool]()
    for _ in range(3):
        clock.now += 0.6e-3
        gil_yield.step_planned(lambda: bool(asked.append(True)))
    assert (clock.taken(), asked) == (0, [])


def test_loans_stores_and_chunks_on_their_way_up_are_awaited(rigs: Any, tmp_path: Path, clock: Clock) -> None:
    rig, keys = rigs(**file_settings(tmp_path)), keys_of(2)

    def sleeps() -> int:
        rig.end_step()
        clock.taken()
        rig.end_step()
        return clock.taken()

    writer, reader = rig.request("writer", keys), rig.request("reader", keys)
    assert sleeps() == 0
    stored = rig.manager.prepare_store(keys, writer)
    assert sleeps() == 1
    rig.copy_in(stored.store_spec, [1, 2])
    rig.manager.complete_store(set(keys), writer)
    assert sleeps() == 0
    assert rig.manager._runtime.flush(10.0)
    with rig.manager._runtime.batch() as cache:
        cache.discard(cache_keys(keys), "host")
    rig.lookup(keys, reader)
    assert sleeps() == 1
    assert rig.manager._runtime._wait(lambda: not rig.cache.jobs_in_flight, 10.0)
    lent = rig.manager.prepare_load(keys, reader)
    assert sleeps() == 1
    rig.run("submit_load", lent, rig._theirs(lent, [11, 12]))
    rig.manager.complete_load(set(keys), reader)
    assert sleeps() == 0
