"""`Watch`: keeps a tier host running. A tier host that dies is reaped and restarted after a delay.

    none ──begin──► running ──(it hangs up, or is silent)──► killed, reaped ──pause──► running ...

A tier host with work sends a message each second, whatever its disk does. One that is silent for `SILENCE` seconds is
stopped or deadlocked, and is killed. Delays double from one death to the next, to limit the cost of repeated deaths.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from longshore.runtime.tier_host.process import HostProcess
from longshore.runtime.tier_host.wire import Kind

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 30.0
"""Seconds from a death to the next start: first, and maximum."""

SILENCE = 30.0
"""Seconds without a message after which a process with work is killed."""

QUIET = 5.0
"""Seconds without a message after which no operation is submitted."""

STABLE = 60.0
"""Lifetime in seconds after which delays start again at the first one."""

_log = logging.getLogger(__name__)


class Heard(NamedTuple):
    """Answers since the last look, and whether the process was reaped."""

    frames: list[tuple[Kind, bytes]]
    died: bool


class Silence:
    """Seconds waited for an event, as observed by calls of `look`.

    Each call adds at most one second, so that the time of a suspended process does not count.
    """

    MOST = 1.0

    def __init__(self, clock: Callable[[], float]) -> None:
        self.seconds = 0.0
        self._clock = clock
        self._last = clock()

    def look(self, *, over: bool) -> None:
        """Update the time. `over`: the event has occurred, or nothing is expected."""
        now = self._clock()
        self.seconds = 0.0 if over else self.seconds + min(now - self._last, self.MOST)
        self._last = now


class Watch:
    """Watches the processes that `start` starts, one at a time; `start` raises `OSError` if it fails.

    Attributes:
        process: The current process; `None` between two.
        deaths: Processes that ended unexpectedly, or could not be started.
    """

    def __init__(self, start: Callable[[], HostProcess], clock: Callable[[], float]) -> None:
        self.process: HostProcess | None = None
        self.deaths = 0
        self._start = start
        self._clock = clock
        self._begun = self._restart_at = clock()
        self._pause = FIRST_PAUSE
        self._silence = Silence(clock)

    @property
    def quiet(self) -> bool:
        """Whether the process has work and has sent no message for `QUIET` seconds."""
        return self._silence.seconds >= QUIET

    def begin(self) -> HostProcess:
        """Start a process, now. Raises `OSError`."""
        self._begun = self._clock()
        self._silence.seconds = 0.0
        self.process = self._start()
        return self.process

    def look(self, *, owed: bool) -> Heard:
        """Receive answers. Starts a process if there is none and the delay is over.

        `owed`: whether answers are expected.
        """
        if self.process is None:
            self._begin_if_due()
            return Heard([], died=False)
        frames = self.process.receive()
        self.end_if_silent(self.process, over=bool(frames) or not owed)
        if self.process.hung_up:
            self.process.kill()  # it may live on with its pipe closed
            if self.process.reaped:
                self._bury(self.process)
                return Heard(frames, died=True)
        return Heard(frames, died=False)

    def end_if_silent(self, process: HostProcess, *, over: bool) -> None:
        """Kill a process that has been silent for too long; `over`: it has sent a message, or none is expected."""
        self._silence.look(over=over)
        if self._silence.seconds >= SILENCE:
            _log.error("tier host (process %d) killed: no message for %.0f s", process.pid, SILENCE)
            self._silence.seconds = 0.0
            process.kill()

    def _begin_if_due(self) -> None:
        if self._clock() < self._restart_at:
            return
        try:
            self.begin()
        except OSError as error:
            self._count(f"could not be started: {error}")

    def _bury(self, process: HostProcess) -> None:
        process.close()
        self.process = None
        if self._clock() - self._begun >= STABLE:
            self._pause = FIRST_PAUSE
        self._count(f"(process {process.pid}) ended {process.ending}")

    def _count(self, what: str) -> None:
        self.deaths += 1
        _log.error("tier host %s; file tier blocks are misses until it is restarted, in %.1f s", what, self._pause)
        self._restart_at = self._clock() + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
