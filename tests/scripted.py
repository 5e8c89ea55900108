"""A mover that does what the test says, when the test says it."""

from __future__ import annotations

from collections import deque

from longshore.boundary import Route, Status, Transfer, TransferResult
from longshore.errors import TierClosedError


class Scripted:
    """Serves `routes`. A transfer waits until `end` says how it went; `refuse` makes `submit` raise."""

    def __init__(self, *routes: Route) -> None:
        self.routes = frozenset(routes)
        self.submitted: list[Transfer] = []
        self.open: dict[int, Transfer] = {}
        self.cancelled: list[int] = []
        self.refuse: Exception | None = None
        self.polls = 0
        self.closed = False
        self._results: deque[TransferResult] = deque()

    def submit(self, transfer: Transfer) -> None:
        if self.closed:
            raise TierClosedError("the scripted mover was closed")
        if self.refuse is not None:
            raise self.refuse
        self.submitted.append(transfer)
        self.open[transfer.job] = transfer

    def end(self, *statuses: Status, job: int | None = None, rank: int | None = None) -> None:
        """The oldest open transfer, or `job`, ends item by item as `statuses` (which repeat), on `rank` or all."""
        transfer = self.open[next(iter(self.open)) if job is None else job]
        if rank is None or rank == transfer.ranks - 1:
            del self.open[transfer.job]
        told = tuple((statuses or (Status.OK,))[i % (len(statuses) or 1)] for i in range(len(transfer.items)))
        for each in range(transfer.ranks) if rank is None else (rank,):
            self._results.append(TransferResult(transfer.job, told, told.count(Status.OK) * 4096, rank=each))

    def poll(self) -> list[TransferResult]:
        self.polls += 1
        results = list(self._results)
        self._results.clear()
        return results

    def cancel(self, job: int) -> None:
        self.cancelled.append(job)

    def close(self) -> None:
        self.closed = True
        for job in list(self.open):
            self.end(Status.TIER_OFF, job=job)
