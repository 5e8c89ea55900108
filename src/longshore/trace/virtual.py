"""Movers in virtual time: they take the control plane's commands, and say what ended when.

    route host->device   ├─ job 3 ─┤├─ job 7 ─────┤              one after the other on each route
    route file->host     ├─ job 6 ───────────┤                    routes side by side
                                 job 7 waits for job 6: `after`

No bytes, no threads, no clock: whoever drives it asks for the next end, and calls that time now.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from longshore.boundary import Cancel, Command, Route, Status, Transfer, TransferResult
from longshore.trace.timing import Timing


class VirtualMovers:
    """All routes of one cache, whose block images have `image_bytes`."""

    def __init__(self, timing: Timing, image_bytes: int) -> None:
        self._timing, self._image_bytes = timing, image_bytes
        self._free_at: dict[Route, float] = {}
        self._ends: list[tuple[float, int, TransferResult, Transfer]] = []
        self._pending: set[int] = set()
        self._waiting: dict[int, list[tuple[Transfer, float]]] = {}
        self._missing: dict[int, int] = {}
        self._cancelled: set[int] = set()
        self.busy: dict[Route, float] = {}
        """Seconds that each route has moved bytes."""
        self.queued: dict[Route, float] = {}
        """Seconds that transfers have waited for their turn on each route."""

    def submit(self, commands: Iterable[Command], now: float) -> None:
        """Begin what can begin; the rest begins when what it comes after has ended. Nothing is forgotten."""
        for command in commands:
            if isinstance(command, Cancel):
                self._cancel(command.job)
            elif isinstance(command, Transfer):
                self._pending.add(command.job)
                before = [job for job in command.after if job in self._pending]
                self._missing[command.job] = len(before)
                for job in before:
                    self._waiting.setdefault(job, []).append((command, now))
                if not before:
                    self._begin(command, now, now)

    @property
    def next_end(self) -> float | None:
        """When the next transfer ends; `None` while none is under way."""
        return self._ends[0][0] if self._ends else None

    def pop(self) -> tuple[Transfer, TransferResult]:
        """What ends next."""
        now, _, result, transfer = heapq.heappop(self._ends)
        self._pending.discard(transfer.job)
        self._cancelled.discard(transfer.job)
        for waiting, since in self._waiting.pop(transfer.job, ()):
            self._missing[waiting.job] -= 1
            if not self._missing[waiting.job]:
                self._begin(waiting, since, now)
        return transfer, result

    def wait(self, source: str, destination: str, now: float) -> float:
        """Seconds that a transfer would wait for its turn, ordered now."""
        return max(0.0, self._free_at.get(Route(source, destination), 0.0) - now)

    def _cancel(self, job: int) -> None:
        """What has not begun need not begin: it ends when its turn comes."""
        if self._missing.get(job):
            self._cancelled.add(job)

    def _begin(self, transfer: Transfer, since: float, now: float) -> None:
        del self._missing[transfer.job]
        start = max(now, self._free_at.get(transfer.route, 0.0))
        status = Status.OK
        if transfer.job in self._cancelled:
            status, start = Status.CANCELLED, now
        elif start > transfer.deadline:
            status, start = Status.DEADLINE, max(now, transfer.deadline)
        nbytes = len(transfer.items) * self._image_bytes if status is Status.OK else 0
        seconds = self._timing.profile.fixed + nbytes / self._timing.bandwidth(*transfer.route) if nbytes else 0.0
        if nbytes:
            self._free_at[transfer.route] = start + seconds
            self.busy[transfer.route] = self.busy.get(transfer.route, 0.0) + seconds
            self.queued[transfer.route] = self.queued.get(transfer.route, 0.0) + start - now
        statuses = (status,) * len(transfer.items)
        result = TransferResult(transfer.job, statuses, nbytes, seconds, start - now)
        heapq.heappush(self._ends, (start + seconds, transfer.job, result, transfer))
