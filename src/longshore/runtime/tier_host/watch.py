"""`Watch`: there is a tier host, or there will be one again. What dies is reaped, and started anew after a pause.

    none ──begin──► running ──(it hangs up)──► killed, reaped ──pause──► running ...

Pauses double from one death to the next, so that a disk that ends every process costs next to nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from longshore.runtime.tier_host.process import HostProcess
from longshore.runtime.tier_host.wire import Kind

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 30.0
"""Seconds from a death to the next start: at first, and growing to."""

STABLE = 60.0
"""Seconds that a process lives to count as good: after it the pauses begin anew."""

_log = logging.getLogger(__name__)


class Heard(NamedTuple):
    """Answers since the last look, and whether the process that gave them was reaped since."""

    frames: list[tuple[Kind, bytes]]
    died: bool


class Watch:
    """Over the processes that `start` starts, one after the other; it raises `OSError` when it cannot.

    Attributes:
        process: The one that there is; `None` in between.
        deaths: Processes that ended without being asked to, or could not be started.
    """

    def __init__(self, start: Callable[[], HostProcess], clock: Callable[[], float]) -> None:
        self.process: HostProcess | None = None
        self.deaths = 0
        self._start = start
        self._clock = clock
        self._begun = self._restart_at = clock()
        self._pause = FIRST_PAUSE

    def begin(self) -> HostProcess:
        """Start a process, now. Raises `OSError`."""
        self._begun = self._clock()
        self.process = self._start()
        return self.process

    def look(self) -> Heard:
        """What there is to hear. Starts a process when there is none and the pause is over."""
        if self.process is None:
            self._begin_if_due()
            return Heard([], died=False)
        frames = self.process.receive()
        if self.process.hung_up:
            self.process.kill()  # it may live on with its pipe closed
            if self.process.reaped:
                self._bury(self.process)
                return Heard(frames, died=True)
        return Heard(frames, died=False)

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
        _log.error("the tier host %s; the file tier misses until the next one is there, in %.1f s", what, self._pause)
        self._restart_at = self._clock() + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
