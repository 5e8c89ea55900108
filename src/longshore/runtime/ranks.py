"""The ranks of one engine as one mover. Each rank is a process with a part of every image.

    owner     Runtime ─┬─ RankMover ──tell──► Rank ── its mover ──► its part of a host slot ─┐
                       │      ▲                                                              │  memory that all share
                       │      └──────────── stamps ◄───── when its last byte is in place ────┘
                       └─ TierMover ── FileTier      one writer: images that all ranks have stamped, one checksum each

Files therefore contain complete images only, because only ready slots are copied to files. A rank that is killed while
it copies stamps nothing, and the slot is discarded; lost ranks are not waited for. The engine sends the commands to the
ranks, through a channel of its own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from longshore.boundary import DEVICE, Cancel, Mover, Route, Slot, Status, Transfer, TransferResult
from longshore.errors import LongshoreError, PlanError, QueueFullError, TierClosedError
from longshore.runtime.stamps import BAD, GOOD, SILENT, U64, Stamps
from longshore.tiers.host import HostTier

_log = logging.getLogger(__name__)

CLOSE_PATIENCE = 60.0
"""Seconds that `RankMover.close` waits for the stamps of living ranks."""

_AWAY = GOOD + 1
"""Entry for a lost rank without a stamp."""

_NAP = 0.001


@dataclass(slots=True)
class _Job:
    transfer: Transfer
    slots: list[Slot]
    submitted: float
    away: set[int] = field(default_factory=set)
    cancelled: bool = False


class RankMover:
    """Serves device <-> host for all ranks at once, in the process that owns the tiers. Jobs end with one result.

    `tell` sends a command to each rank, which passes it to its `Rank`; it does not wait. The process that starts the
    ranks reports each rank that is `lost` or has `joined` again, inside `Runtime.control()`.
    """

    def __init__(
        self,
        host: HostTier,
        stamps: Stamps,
        tell: Callable[[Transfer | Cancel], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host = host
        self._stamps = stamps
        self._tell = tell
        self._clock = clock
        self._store = Route(DEVICE, host.name)
        self._load = Route(host.name, DEVICE)
        self._jobs: dict[int, _Job] = {}
        self._lost: set[int] = set()
        self._results: list[TransferResult] = []
        self._closed = False

    @property
    def routes(self) -> frozenset[Route]:
        """Both directions."""
        return frozenset((self._store, self._load))

    def submit(self, transfer: Transfer) -> None:
        """Begin `transfer` on all ranks.

        Raises `PlanError`, `TierClosedError` while a rank is lost, or `QueueFullError` for a load whose stamps are used
        by a load in flight.
        """
        if self._closed or self._lost:
            raise TierClosedError(f"ranks {sorted(self._lost)} were lost" if self._lost else "the mover was closed")
        if transfer.route == self._load:
            self._check_stamps(transfer.job)
        job = _Job(transfer, self._slots(transfer), self._clock())
        self._tell(transfer)
        self._jobs[transfer.job] = job

    def poll(self) -> list[TransferResult]:
        """Results since the last call, of jobs that every rank has stamped, except lost ranks."""
        for number, job in list(self._jobs.items()):
            said = self._said(job)
            if (said != SILENT).all():
                del self._jobs[number]
                self._end(job, [_verdict(each, cancelled=job.cancelled) for each in said])
        results, self._results = self._results, []
        return results

    def cancel(self, job: int) -> None:
        """Items of `job` that ranks have not begun need not begin."""
        if job in self._jobs:
            self._jobs[job].cancelled = True
            self._tell(Cancel(job))

    def lost(self, rank: int) -> None:
        """Report that the process of `rank` has ended and was reaped, so that it writes nothing any more."""
        self._check(rank)
        self._lost.add(rank)
        for job in self._jobs.values():
            job.away.add(rank)

    def joined(self, rank: int) -> None:
        """Report a new process of `rank`, attached to the same memory."""
        self._check(rank)
        self._lost.discard(rank)

    def close(self) -> None:
        """Wait for at most `CLOSE_PATIENCE` seconds until no rank has a job in flight."""
        self._closed = True
        give_up = self._clock() + CLOSE_PATIENCE
        ended = self.poll()
        while self._jobs and self._clock() < give_up:
            time.sleep(_NAP)
            ended += self.poll()
        for number, job in list(self._jobs.items()):
            _log.error("transfer job %d failed: not all ranks reported within %.0f s", number, CLOSE_PATIENCE)
            self._end(job, [Status.TIER_OFF] * len(job.slots))
        self._jobs.clear()
        self._results = ended + self._results

    def _slots(self, transfer: Transfer) -> list[Slot]:
        """The host slots of `transfer`, if all of it can be told."""
        if transfer.route not in self.routes:
            raise PlanError(f"route {transfer.route} is not served, only {self._store} and {self._load}")
        slots = []
        for item in transfer.items:
            ours, other = item.destination, item.source
            if transfer.route == self._load:
                ours, other = other, ours
            if ours is None or other is not None:
                raise PlanError(f"expected the device and a slot of the host tier, got {item}")
            self._host.slabs.check(ours.pool, ours.index)
            slots.append(ours)
        return slots

    def _check_stamps(self, number: int) -> None:
        """Raise unless the stamps of load `number` are free: what a rank says of it must not hide an earlier word."""
        for other, job in self._jobs.items():
            if job.transfer.route == self._load and (number - other) % Stamps.LOADS == 0:
                raise QueueFullError(f"job {number} would reuse the stamps of load {other}, which is still in flight")

    def _said(self, job: _Job) -> U64:
        """What each rank said of each item, or that it is away; shape (items, ranks)."""
        ticket = _ticket(job.transfer)
        if job.transfer.route == self._store:
            said = self._stamps.said(ticket, [slot.index for slot in job.slots])
        else:
            said = np.tile(self._stamps.said_of_load(ticket), (len(job.slots), 1))
        away = [rank for rank in job.away if rank < said.shape[1]]
        said[:, away] = np.where(said[:, away] == SILENT, _AWAY, said[:, away])
        return said

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self._stamps.world:
            raise PlanError(f"expected a rank below {self._stamps.world}, got {rank}")

    def _end(self, job: _Job, statuses: Sequence[Status]) -> None:
        sizes = (self._host.image_bytes[slot.pool] for slot in job.slots)
        moved = sum(size for size, status in zip(sizes, statuses, strict=True) if status is Status.OK)
        seconds = self._clock() - job.submitted
        self._results.append(TransferResult(job.transfer.job, tuple(statuses), moved, seconds))


class Rank:
    """The part in one rank: `mover` serves device <-> host, and stamps report the results."""

    def __init__(self, mover: Mover, stamps: Stamps, rank: int) -> None:
        if not 0 <= rank < stamps.world:
            raise PlanError(f"expected a rank below {stamps.world}, got {rank}")
        self._mover = mover
        self._stamps = stamps
        self._rank = rank
        self._open: dict[int, Transfer] = {}

    def obey(self, command: Transfer | Cancel) -> None:
        """Begin a command of the owner; a transfer that cannot begin is stamped as bad."""
        if isinstance(command, Cancel):
            self._mover.cancel(command.job)
            return
        self._open[command.job] = command
        try:
            self._mover.submit(command)
        except LongshoreError as error:
            _log.error("transfer job %d could not be submitted: %s", command.job, error)
            self._stamp(command.job, [Status.TIER_OFF] * len(command.items))

    def pump(self) -> bool:
        """Stamp jobs that have ended; returns whether any are in flight."""
        for result in self._mover.poll():
            self._stamp(result.job, result.statuses)
        return bool(self._open)

    def _stamp(self, job: int, statuses: Sequence[Status]) -> None:
        transfer = self._open.pop(job)
        ticket = _ticket(transfer)
        if transfer.route.source != DEVICE:
            self._stamps.loaded(ticket, self._rank, good=all(status is Status.OK for status in statuses))
            return
        slots = [item.destination.index for item in transfer.items if item.destination is not None]
        good = [slot for slot, status in zip(slots, statuses, strict=True) if status is Status.OK]
        bad = [slot for slot, status in zip(slots, statuses, strict=True) if status is not Status.OK]
        self._stamps.stored(ticket, self._rank, good, bad)


def _ticket(transfer: Transfer) -> int:
    """What stamps say of a job: 0 is what they begin with."""
    return transfer.job + 1


def _verdict(said: U64, *, cancelled: bool) -> Status:
    """Of one item, from what all ranks said."""
    if (said == GOOD).all():
        return Status.OK
    if (said == BAD).any():
        return Status.CANCELLED if cancelled else Status.IO_ERROR
    return Status.AWAY
