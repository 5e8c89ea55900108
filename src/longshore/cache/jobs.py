"""Transfers in flight, and what is to happen to the books when they end.

A job has ended when every rank has reported it; an item has succeeded when it did on all of them (invariant 1).

`Waits` says who waits for what is being read into the warmest tier, and until when.

    request 1 ── until 10.0 ──┐
    request 2 ── until 14.5 ──┴──► job 7        called off when the last of them has gone

A read has no deadline of its own: it may be joined by requests that it knows nothing of when it is ordered, so it goes
on as long as one of them waits. A request that gives up early leaves its reads to whoever comes next, up to its
deadline; a prefetch is called off at once.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

from longshore.boundary import Key, Status, Transfer, TransferResult
from longshore.cache.index import Index
from longshore.cache.store import Pin
from longshore.cache.types import MissReason, Outcome
from longshore.errors import JobError


class Load:
    """What a hold has ordered onto the device, in parts, and how far they have come.

    `asked` are the keys that requests, by name, want of it; `sources` names the tier that each comes from; `cut` says
    why the last of them could not be ordered; `wait` is the number of the wait for it. A load that `is_whole` has
    arrived when every chunk has; any other as far as its leading chunks have.
    """

    def __init__(self, wait: int = 0, *, is_whole: bool = False) -> None:
        self.wait = wait
        self.is_whole = is_whole
        self.asked: Sequence[tuple[str | None, Sequence[Key]]] = ()
        self.sources: list[str] = []
        self.cut: list[MissReason] = []
        self.parts: list[Job] = []
        self.outcome: Outcome | None = None

    @property
    def pending(self) -> list[Job]:
        """Parts that have not ended."""
        return [job for job in self.parts if job.waiting]

    def conclude(self, unfinished: MissReason) -> list[MissReason]:
        """Fix the outcome: the chunks that have arrived. Returns the misses; pending ones are `unfinished`."""
        lead = next((i for i, job in enumerate(self.parts) if not job.arrived), len(self.parts))
        if self.is_whole and lead < len(self.parts):
            lead = 0
        arrived = sum(len(job.statuses) for job in self.parts[:lead])
        misses: list[MissReason] = []
        has_failed = False
        for reason in self._reasons(self.parts[lead:], unfinished):
            if reason is None and not has_failed and not self.is_whole:
                arrived += 1
            elif reason is None or (has_failed and reason is MissReason.CANCELLED):
                misses.append(MissReason.BEHIND)
            else:
                has_failed = True
                misses.append(reason)
        self.outcome = Outcome(arrived, tuple(self.sources[:arrived]))
        return misses + self.cut

    def revoke(self) -> list[MissReason]:
        """Nothing has arrived after all: a reset has made it worthless. Returns the misses that are not counted yet."""
        misses = [] if self.outcome is not None else [MissReason.CANCELLED] * len(self.sources) + self.cut
        self.outcome = Outcome(0, ())
        return misses

    @staticmethod
    def _reasons(parts: Sequence[Job], unfinished: MissReason) -> Iterator[MissReason | None]:
        for job in parts:
            for status in job.statuses:
                if job.waiting:
                    yield unfinished
                else:
                    yield None if status is Status.OK else MissReason.of(status)


class Held:
    """What a hold keeps of one KV cache group: the chunks `keys`, at `positions` of their path, by pins on nodes.

    One pin on the last keeps a path; chunks that are held `alone`, each for itself, have one each. `blocks` says how
    many device blocks they take, where that is settled.
    """

    __slots__ = ("alone", "blocks", "group", "keys", "pins", "positions")

    def __init__(
        self,
        keys: Sequence[Key],
        positions: Sequence[int],
        pins: Sequence[Pin],
        group: int = 0,
        *,
        alone: bool = False,
        blocks: int = 0,
    ) -> None:
        self.keys = keys
        self.positions = positions
        self.pins = pins
        self.group = group
        self.alone = alone
        self.blocks = blocks

    def nodes(self, index: Index) -> list[int]:
        """The nodes of the chunks, head first, as far as none was lost."""
        if self.alone:
            return list(takewhile(bool, (pin.node for pin in self.pins)))
        tail = self.pins[0].node
        if not tail:
            return index.readable(self.keys)
        last = self.positions[-1]
        path = index.path(tail, last - self.positions[0] + 1)
        return path[::-1] if len(path) == len(self.keys) else [path[last - at] for at in self.positions]


class LeaseRecord:
    """The control plane's side of a hold: what it keeps, of several groups if it is `joint`, and what was ordered."""

    __slots__ = ("joint", "load", "parts", "prefetch", "request", "turn")

    def __init__(self, parts: Sequence[Held], request: str | None, turn: int, *, joint: bool) -> None:
        self.parts = parts
        self.request = request
        self.turn = turn
        self.joint = joint
        self.load: Load | None = None
        self.prefetch: Wait | None = None

    @property
    def keys(self) -> list[Key]:
        """The held chunks of all groups, one group after the other."""
        return [key for part in self.parts for key in part.keys]

    def nodes(self, index: Index) -> list[int]:
        """Their nodes, of each group as far as none was lost."""
        return [node for part in self.parts for node in part.nodes(index)]


class Side(NamedTuple):
    """The slots of `tier` that a job reads or fills, in item order."""

    tier: int
    slots: list[int]


class Job:
    """One transfer in flight between two sides, of which one may be the device (`None`).

    It is `commanded` unless the host was offered the slots, and moves the bytes itself. `waiting` are the ranks that
    have not reported, `waits` those of requests for what this reads, by number; `turn` is that of the request that
    ordered it.
    """

    __slots__ = ("commanded", "destination", "load", "source", "statuses", "transfer", "turn", "waiting", "waits")

    def __init__(
        self,
        transfer: Transfer,
        source: Side | None,
        destination: Side | None,
        load: Load | None = None,
        *,
        commanded: bool = True,
        turn: int = 0,
    ) -> None:
        self.transfer = transfer
        self.source = source
        self.destination = destination
        self.load = load
        self.commanded = commanded
        self.turn = turn
        self.waiting = set(range(transfer.ranks))
        self.statuses = [Status.OK] * len(transfer.items)
        self.waits: dict[int, Wait] = {}

    @property
    def arrived(self) -> bool:
        """Whether this has ended, and every item has succeeded."""
        return not self.waiting and self.statuses.count(Status.OK) == len(self.statuses)

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
        if result.statuses.count(Status.OK) == len(self.statuses):
            return not self.waiting
        for i, status in enumerate(result.statuses):
            if status is Status.OK:
                continue
            known = self.statuses[i]
            if known is Status.OK or (status.invalidates_source and not known.invalidates_source):
                self.statuses[i] = status
        return not self.waiting

    def blame_sources(self, faults: Mapping[int, Status]) -> None:
        """What was read from a slot that turned out unusable meanwhile has not arrived, whatever its mover says."""
        if self.source is not None and faults:
            for i, slot in enumerate(self.source.slots):
                if slot in faults and self.statuses[i] is Status.OK:
                    self.statuses[i] = faults[slot]


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
