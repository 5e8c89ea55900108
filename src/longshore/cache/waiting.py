"""Who waits for what is being read into the warmest tier, and until when.

    request 1 ── until 10.0 ──┐
    request 2 ── until 14.5 ──┴──► job 7        called off when the last of them has gone

A read has no deadline of its own: it may be joined by requests that it knows nothing of when it is ordered, so it goes
on as long as one of them waits. A request that gives up early leaves its reads to whoever comes next, up to its
deadline; a prefetch is called off at once.
"""

from __future__ import annotations

import enum
import heapq
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from longshore.errors import CacheError

if TYPE_CHECKING:
    from longshore.cache.jobs import Job, Load


class PrefetchPolicy(enum.Enum):
    """How long a request waits for its prefetch. After the policies of SGLang's hierarchical cache."""

    BEST_EFFORT = "best_effort"  # not at all: it uses what is there when its turn comes
    WAIT = "wait_complete"  # until all is there, but no longer than for any load
    TIMEOUT = "timeout"  # until all is there, but no longer than so many seconds


def seconds(given: float | None, usual: float) -> float:
    """The seconds that a caller has `given`, or the `usual` ones. Raises `CacheError` for what is no length of time."""
    if given is None:
        return usual
    if not isinstance(given, int | float) or not 0 < given < math.inf:
        raise CacheError(f"a timeout is a positive number of seconds, got {given!r}")
    return given


class Wait:
    """One request's wait for reads, until `deadline`.

    `jobs` are those that have not ended, `load` is what they are read for, if it is to go on to the device, and
    `patient` says whether the request does nothing else meanwhile. It `lacks` what there was no room to order yet.
    """

    __slots__ = ("deadline", "jobs", "lacks", "load", "number", "patient")

    def __init__(self, number: int, deadline: float, load: Load | None, *, patient: bool) -> None:
        self.number = number
        self.deadline = deadline
        self.load = load
        self.patient = patient
        self.lacks = False
        self.jobs: set[int] = set()

    @property
    def over(self) -> bool:
        """Whether nothing is waited for any more."""
        return not self.jobs and (self.load is None or self.load.outcome is not None)


class Waits:
    """The waits that are not over; those whose deadline comes next are found at once."""

    def __init__(self) -> None:
        self.open: dict[int, Wait] = {}
        """By number."""
        self._due: list[tuple[float, int]] = []

    def begin(self, wait: Wait) -> None:
        """Remember `wait`, unless it is over."""
        if wait.over:
            return
        if len(self._due) > 2 * len(self.open) + 64:
            self._due = sorted((each.deadline, each.number) for each in self.open.values())
        self.open[wait.number] = wait
        heapq.heappush(self._due, (wait.deadline, wait.number))

    def join(self, wait: Wait, jobs: Iterable[Job]) -> None:
        """`wait` is also for these reads."""
        for job in jobs:
            job.waits[wait.number] = wait
            wait.jobs.add(job.transfer.job)

    def ended(self, job: Job) -> None:
        """A read has ended, for all who waited for it."""
        for wait in job.waits.values():
            wait.jobs.discard(job.transfer.job)
            self.close(wait.number)

    def close(self, number: int) -> None:
        """Forget a wait, if it is over."""
        wait = self.open.get(number)
        if wait is not None and wait.over:
            del self.open[number]

    def due(self, now: float) -> list[Wait]:
        """Those whose deadline has come, in order; each is told of once."""
        found: list[Wait] = []
        while self._due and self._due[0][0] <= now:
            wait = self.open.get(heapq.heappop(self._due)[1])
            if wait is not None:
                found.append(wait)
        return found

    def clear(self) -> None:
        """Nothing is worth waiting for any more."""
        for wait in self.open.values():
            wait.jobs.clear()
        self.open.clear()
        self._due.clear()
