"""Runs the lanes of a transfer engine: threads in production, a scheduler in tests that try every order.

A lane is a generator. It yields what it waits for, and does not block on another lane between two yields:

    lane    ──yield WaitCondition──►  driver        sleeps until it is met, then resumes the lane
            ◄────── next() ────────

The same lanes and engine run under every driver.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import NamedTuple

from longshore.transfer.hazards import Hazards


class WaitCondition(NamedTuple):
    """A condition that a lane waits for.

    Attributes:
        is_open: Whether the lane may continue. Reads state under the engine's lock, unless `is_device`.
        is_device: Whether the wait is a blocking call of the device.
    """

    is_open: Callable[[], bool]
    is_device: bool = False


class LaneDriver(ABC):
    """The lock of one engine, waits for the state that it guards, and the threads that run its lanes.

    Attributes:
        lock: The lock; may be entered again by the thread that holds it.
    """

    lock: AbstractContextManager[object]

    @abstractmethod
    def wait_for(self, is_met: Callable[[], bool], timeout: float | None = None) -> bool:
        """With the lock held, release it until `is_met`, for at most `timeout` seconds. Returns whether it is met."""

    @abstractmethod
    def notify(self) -> None:
        """With the lock held: report that the guarded state has changed."""

    @abstractmethod
    def start(self, name: str, lane: Generator[WaitCondition, None, None], stop: Callable[[], None]) -> None:
        """Start to run `lane`; `stop` makes it return soon."""

    @abstractmethod
    def join(self) -> None:
        """Wait until all lanes have returned."""

    def watch(self, hazards: Hazards) -> Hazards:
        """The hazards for the engine: `hazards`, or a wrapper that observes it."""
        return hazards


class Threads(LaneDriver):
    """A thread for each lane."""

    def __init__(self) -> None:
        self.lock = lock = threading.RLock()
        self._changed = threading.Condition(lock)
        self._threads: list[threading.Thread] = []
        self.stop: Callable[[], None] = lambda: None

    def wait_for(self, is_met: Callable[[], bool], timeout: float | None = None) -> bool:
        """Sleep until another thread reports a change."""
        return self._changed.wait_for(is_met, timeout)

    def notify(self) -> None:
        """Wake all waiting threads."""
        self._changed.notify_all()

    def start(self, name: str, lane: Generator[WaitCondition, None, None], stop: Callable[[], None]) -> None:
        """Start a thread called `name`, which is stopped and joined when the interpreter exits."""
        self.stop = stop
        _running.add(self)
        thread = threading.Thread(target=self._run, args=(lane,), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def join(self, timeout: float | None = None) -> None:
        """Join the threads, each at most `timeout` seconds."""
        for thread in self._threads:
            thread.join(timeout)

    def _run(self, lane: Generator[WaitCondition, None, None]) -> None:
        for condition in lane:
            if not condition.is_device:
                try:
                    with self._changed:
                        self._changed.wait_for(condition.is_open)
                except Exception as error:  # noqa: BLE001 - the lane is told, and returns
                    with contextlib.suppress(StopIteration):
                        lane.throw(error)


_EXIT_PATIENCE = 30.0
"""Seconds that the interpreter waits for one thread at exit."""

_running: weakref.WeakSet[Threads] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """End the lanes of open engines: the interpreter would stop their threads within torch, and abort."""
    drivers = list(_running)
    for driver in drivers:
        driver.stop()
    for driver in drivers:
        driver.join(_EXIT_PATIENCE)
