"""`BlockGuard`: protects device blocks of an engine's pool that a job still reads or writes.

An engine may reallocate a block as soon as it is in its free list. The guard delays freed blocks until no job uses
them. Blocks that are not free in time are parked, and returned by a later `reclaim`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from longshore.runtime.loop import Runtime


class BlockGuard:
    """Jobs in flight, by the device blocks they use. Used from the engine's thread only.

    Waits and late blocks are counted in `Runtime.guard_counters`.
    """

    def __init__(self, runtime: Runtime, timeout: float) -> None:
        self._runtime = runtime
        self._timeout = timeout
        self._jobs: dict[int, list[int]] = {}
        self._parked: list[int] = []

    def add(self, job: int, blocks: Iterable[int]) -> None:
        """Record that `job` uses `blocks` until it has ended."""
        for block in blocks:
            self._jobs.setdefault(block, []).append(job)

    def settle(self, blocks: Sequence[int]) -> list[int]:
        """Wait for the jobs on `blocks`, at most for the timeout; returns the free blocks and parks the others."""
        jobs = [job for block in blocks for job in self._jobs.get(block, ())]
        if jobs:
            self._wait(jobs)
        free = [block for block in blocks if self._is_free(block)]
        if len(free) < len(blocks):
            kept = set(free)
            late = [block for block in blocks if block not in kept]
            self._parked += late
            self._runtime.guard_counters.late += len(late)
        return free

    def reclaim(self) -> list[int]:
        """Return parked blocks whose jobs have ended."""
        free = [block for block in self._parked if self._is_free(block)]
        kept = set(free)
        self._parked = [block for block in self._parked if block not in kept]
        return free

    def drain(self) -> None:
        """Wait, at most for the guard's timeout, for all jobs; drops all parked blocks."""
        self._wait([job for jobs in self._jobs.values() for job in jobs])
        self._jobs.clear()
        self._parked.clear()

    def _wait(self, jobs: Sequence[int]) -> None:
        guarded, begun = self._runtime.guard_counters, self._runtime.clock()
        self._runtime.wait_jobs(jobs, self._timeout)
        guarded.waits += 1
        guarded.seconds += self._runtime.clock() - begun

    def _is_free(self, block: int) -> bool:
        live = [job for job in self._jobs.get(block, ()) if self._runtime.in_flight(job)]
        if live:
            self._jobs[block] = live
        else:
            self._jobs.pop(block, None)
        return not live
