"""Movers in virtual time: take the commands of the control plane, and return results with their times.

    route host->device   ├─ job 3 ─┤├─ job 7 ─────┤              one after the other on each route
    route file->host     ├─ job 6 ───────────┤                    routes side by side
                                 job 7 waits for job 6: `after`

A probe of a remote store takes its delay only. There are no bytes, threads or clocks: the replay asks for the next end,
and continues at that time.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import replace

from longshore.boundary import HOST, Cancel, Command, Probe, ProbeResult, Route, Status, Transfer, TransferResult
from longshore.trace.remote import REMOTE, RemoteStore
from longshore.trace.timing import Timing

_FETCH = Route(REMOTE, HOST)


class VirtualMovers:
    """All routes of one cache with block images of `image_bytes`, including `remote`, if there is one.

    Attributes:
        busy: Seconds that each route was busy.
        queued: Seconds that transfers waited for each route.
    """

    def __init__(self, timing: Timing, image_bytes: int, remote: RemoteStore | None = None) -> None:
        self._paces, self._image_bytes, self._remote = timing.paces, image_bytes, remote
        self._free_at: dict[Route, float] = {}
        self._ends: list[tuple[float, int, Transfer | Probe]] = []
        self._results: dict[int, TransferResult] = {}
        self._pending: set[int] = set()
        self._waiting: dict[int, list[Transfer]] = {}
        self._missing: dict[int, int] = {}
        self._cancelled: set[int] = set()
        self.busy: dict[Route, float] = {}
        self.queued: dict[Route, float] = {}

    def submit(self, commands: Iterable[Command], now: float) -> None:
        """Begin commands that can begin; the others begin after the jobs they depend on."""
        for command in commands:
            if isinstance(command, Transfer):
                self._pending.add(command.job)
                before = [job for job in command.after if job in self._pending]
                self._missing[command.job] = len(before)
                for job in before:
                    self._waiting.setdefault(job, []).append(command)
                if not before:
                    self._begin(command, now)
            elif isinstance(command, Cancel):
                self._cancel(command.job)
            elif isinstance(command, Probe):
                end = min(now + self._paces[_FETCH].fixed, command.deadline)
                heapq.heappush(self._ends, (end, command.probe, command))

    @property
    def next_end(self) -> float | None:
        """Time at which the next transfer or probe ends; `None` if none is in flight."""
        return self._ends[0][0] if self._ends else None

    def pop(self) -> tuple[Transfer, TransferResult] | tuple[Probe, ProbeResult]:
        """The next transfer or probe to end."""
        now, _, command = heapq.heappop(self._ends)
        if isinstance(command, Probe):
            if self._remote is None or now >= command.deadline:
                return command, ProbeResult(command.probe, (False,) * len(command.keys), Status.DEADLINE)
            return command, ProbeResult(command.probe, self._remote.probe(command.keys))
        result = self._results.pop(command.job)
        self._pending.discard(command.job)
        self._cancelled.discard(command.job)
        for waiting in self._waiting.pop(command.job, ()):
            self._missing[waiting.job] -= 1
            if not self._missing[waiting.job]:
                self._begin(waiting, now)
        return command, result if self._remote is None else self._exchange(self._remote, command, result)

    def wait(self, source: str, destination: str, now: float) -> float:
        """Seconds that a transfer submitted now would wait."""
        return max(0.0, self._free_at.get(Route(source, destination), 0.0) - now)

    def _cancel(self, job: int) -> None:
        """What has not begun need not begin: it ends when its turn comes."""
        if self._missing.get(job):
            self._cancelled.add(job)

    def _exchange(self, remote: RemoteStore, transfer: Transfer, result: TransferResult) -> TransferResult:
        """What a transfer that has moved its bytes has found in the remote store, or left there."""
        route, keys = transfer.route, [item.key for item in transfer.items] if REMOTE in transfer.route else []
        if not keys or not result.bytes:
            return result
        if route.destination == REMOTE:
            remote.write(keys)
            return result
        statuses = remote.read(keys)
        return replace(result, statuses=statuses, bytes=statuses.count(Status.OK) * self._image_bytes)

    def _begin(self, transfer: Transfer, now: float) -> None:
        del self._missing[transfer.job]
        route, seconds, status = transfer.route, 0.0, Status.OK
        start = max(now, self._free_at.get(route, 0.0))
        if transfer.job in self._cancelled:
            status, start = Status.CANCELLED, now
        elif start > transfer.deadline:
            status, start = Status.DEADLINE, max(now, transfer.deadline)
        nbytes = len(transfer.items) * self._image_bytes if status is Status.OK else 0
        if nbytes:
            seconds = self._paces[route].seconds(nbytes)
            self._free_at[route] = start + seconds
            self.busy[route] = self.busy.get(route, 0.0) + seconds
            self.queued[route] = self.queued.get(route, 0.0) + start - now
        statuses = (status,) * len(transfer.items)
        self._results[transfer.job] = TransferResult(transfer.job, statuses, nbytes, seconds, start - now)
        heapq.heappush(self._ends, (start + seconds, transfer.job, transfer))
