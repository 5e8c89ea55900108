"""Transfers in flight, and what is to happen to the books when they end.

A job has ended when every rank has reported it; an item has succeeded when it did on all of them (invariant 1).
"""

from __future__ import annotations

from collections.abc import Iterator

from longshore.boundary import Key, Status, Transfer, TransferResult
from longshore.cache.index import Copy, Entry
from longshore.cache.types import MissReason, Outcome
from longshore.errors import JobError


class Load:
    """What a hold has ordered onto the device, in parts, and how far they have come.

    `sources` names the tier that each chunk comes from; `cut` says why chunks behind them could not be ordered.
    """

    def __init__(self) -> None:
        self.sources: list[str] = []
        self.cut: list[MissReason] = []
        self.parts: list[Job] = []
        self.outcome: Outcome | None = None

    @property
    def pending(self) -> list[Job]:
        """Parts that have not ended."""
        return [job for job in self.parts if job.waiting]

    def conclude(self, unfinished: MissReason) -> list[MissReason]:
        """Fix the outcome: the leading chunks that arrived. Returns the misses; pending ones are `unfinished`."""
        arrived = 0
        misses: list[MissReason] = []
        for reason in self._reasons(unfinished):
            if reason is None and not misses:
                arrived += 1
            elif misses and reason in (None, MissReason.CANCELLED):
                misses.append(MissReason.BEHIND)
            elif reason is not None:
                misses.append(reason)
        self.outcome = Outcome(arrived, tuple(self.sources[:arrived]))
        return misses + self.cut

    def revoke(self) -> list[MissReason]:
        """Nothing has arrived after all: a reset has made it worthless. Returns the misses that are not counted yet."""
        misses = [] if self.outcome is not None else [MissReason.CANCELLED] * len(self.sources) + self.cut
        self.outcome = Outcome(0, ())
        return misses

    def _reasons(self, unfinished: MissReason) -> Iterator[MissReason | None]:
        for job in self.parts:
            for status in job.statuses:
                if job.waiting:
                    yield unfinished
                else:
                    yield None if status is Status.OK else MissReason.of(status)


class Hold:
    """The control plane's side of a hold: the matched keys, and the entry on which the hold ends."""

    __slots__ = ("keys", "load", "request", "start", "tail")

    def __init__(self, keys: list[Key], start: int, tail: Entry, request: str | None) -> None:
        self.keys = keys
        self.start = start
        self.tail = tail
        self.request = request
        self.load: Load | None = None


class Job:
    """One transfer in flight. `sources[i]` and `destinations[i]` are the copies of item `i` (`None`: the device)."""

    __slots__ = ("destinations", "load", "sources", "statuses", "transfer", "waiting")

    def __init__(
        self,
        transfer: Transfer,
        sources: list[Copy | None],
        destinations: list[Copy | None],
        load: Load | None = None,
    ) -> None:
        self.transfer = transfer
        self.sources = sources
        self.destinations = destinations
        self.load = load
        self.waiting = set(range(transfer.ranks))
        self.statuses = [Status.OK] * len(transfer.items)

    def check(self, result: TransferResult) -> None:
        """Raise `JobError` unless `result` is one that this job still waits for."""
        if result.rank not in self.waiting:
            raise JobError(f"job {result.job} does not wait for rank {result.rank}, only for {sorted(self.waiting)}")
        if len(result.statuses) != len(self.statuses):
            raise JobError(f"job {result.job} has {len(self.statuses)} items, its result {len(result.statuses)}")

    def report(self, result: TransferResult) -> bool:
        """Merge one rank's result; says whether it was the last. Bad bytes on one rank outweigh any other failure."""
        self.check(result)
        self.waiting.discard(result.rank)
        for i, status in enumerate(result.statuses):
            known = self.statuses[i]
            if known is Status.OK or (status.condemns_source and not known.condemns_source):
                self.statuses[i] = status
        return not self.waiting

    def blame_sources(self) -> None:
        """What was read from a source that turned out unusable meanwhile has not arrived, whatever its mover says."""
        for i, source in enumerate(self.sources):
            if source is not None and source.fault is not None and self.statuses[i] is Status.OK:
                self.statuses[i] = source.fault
