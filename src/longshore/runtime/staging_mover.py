"""Device <-> file without a host tier: through staging slots in the memory of the device.

    to the file     pages ──engine──► staging slot ──tier──► file          each arrow begins when the one before it has
    from the file   pages ◄──engine── staging slot ◄──tier── file          ended, by its result, never by its submission

File I/O has no stream order. The transfer engine's copies keep stream order, as always; file I/O begins when their
bytes are in place, and a staging slot is not reused until both have ended. Jobs longer than the staging area are split,
the more urgent jobs first.

The blocks of a job are touched by copies only, never by file I/O. So the blocks of a cancelled job are free as soon
as no copy of it is in flight (`touches_blocks`), however long the disk takes to end the rest.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from longshore.boundary import (
    DEVICE,
    HOST,
    Item,
    Route,
    Section,
    Slabs,
    Slot,
    Status,
    Transfer,
    TransferResult,
    leading_ok,
)
from longshore.config import Config, format_bytes
from longshore.errors import DeviceError, PlanError, TierClosedError, log_seldom
from longshore.layout.model import KVLayout
from longshore.runtime.error_handler import submit_status
from longshore.tiers.base import Op, Tier, TierOp, check_batch
from longshore.transfer.device.base import Device
from longshore.transfer.engine import D2D, D2H, H2D, TransferEngine

_log = logging.getLogger(__name__)

STAGING_BYTES = 64 << 20
"""Device memory of the staging area with `file_mode` gds."""

_LEAST_STAGING = 4  # images: two on each side


class StagingMemory(Protocol):
    """Memory of a staging area: an `ImageMemory` of the device; an `Arena`, where the device is host memory itself."""

    @property
    def address(self) -> int:
        """Of its first byte, a multiple of 4096."""

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""

    def zero(self, offset: int, length: int) -> None:
        """Zero a range."""


class StagingSlots:
    """Slots for images in the memory of the device, which the transfer engine uses like slots of the host tier."""

    def __init__(self, memory: StagingMemory, image_bytes: int) -> None:
        """Divide `memory` into slots; `PlanError` if it has no room for one."""
        self.arena = memory
        self.slabs = Slabs.of_one_size(image_bytes, memory.nbytes // image_bytes)
        if not self.slabs.slabs:
            raise PlanError(
                f"expected a staging area with room for an image of {image_bytes} bytes, got {memory.nbytes}"
            )
        self._free = list(range(self.slabs.slabs))

    @property
    def free(self) -> int:
        """Number of free slots."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Take `count` of the free slots."""
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def give_back(self, slots: Sequence[int]) -> None:
        """Free these slots."""
        self._free.extend(slots)


@dataclass(slots=True)
class _StagedJob:
    """A transfer, of which items up to `begun` have been begun, and `pieces` pieces have not ended."""

    transfer: Transfer
    submitted: float
    statuses: list[Status | None]
    begun: int = 0
    pieces: int = 0
    first: float | None = None
    cancelled: bool = False
    seconds: float = 0.0
    bytes: int = 0


@dataclass(slots=True)
class _StagedPiece:
    """Items of a job from `first` on, one in each of `slots` of the staging area, and their statuses so far."""

    job: _StagedJob
    number: int
    first: int
    slots: list[int]
    statuses: list[Status] = field(default_factory=list)


class StagingMover:
    """Moves device -> file, file -> device, and inside the device. One rank; the runtime's lock guards it.

    Layer-wise jobs are served like others: all layers arrive together, with the result.
    """

    def __init__(
        self,
        engine: TransferEngine,
        layout: KVLayout,
        staging: StagingSlots,
        tier: Tier,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Transfer `engine` copies between pages and `staging`; `tier` reads and writes the staging area's memory."""
        self._engine = engine
        self._layout = layout
        self._staging = staging
        self._tier = tier
        self._clock = clock
        self._write = Route(DEVICE, tier.name)
        self._read = Route(tier.name, DEVICE)
        self._jobs: dict[int, _StagedJob] = {}
        self._numbers = 0
        self._copying: dict[int, _StagedPiece] = {}  # by the transfer engine's job
        self._filing: dict[int, _StagedPiece] = {}  # by the tier's ticket
        self._results: list[TransferResult] = []
        self._closed = False

    @property
    def routes(self) -> frozenset[Route]:
        """Both directions, and inside the device."""
        return frozenset((self._write, self._read, D2D))

    def submit(self, transfer: Transfer) -> None:
        """Begin `transfer`. Raises as `TransferEngine.submit` and `Tier.submit` do, with nothing changed."""
        if transfer.route == D2D:
            self._engine.submit(transfer)
            return
        if self._closed:
            raise TierClosedError("the mover between device and file was closed")
        if transfer.route not in self.routes:
            raise PlanError(f"expected one of {sorted(map(str, self.routes))}, got {transfer.route}")
        if transfer.job in self._jobs or transfer.job < 0:
            raise PlanError(f"expected an unused job number of at least 0, got {transfer.job}")
        self._check(transfer)
        job = _StagedJob(transfer, self._clock(), [None] * len(transfer.items))
        self._jobs[transfer.job] = job
        self._begin_pieces()

    def poll(self) -> list[TransferResult]:
        """Results since the last call. Starts the second half of jobs whose first half has ended."""
        for result in self._engine.poll():
            piece = self._copying.pop(result.job, None)
            if piece is None:
                self._results.append(result)  # inside the device
            elif piece.job.transfer.route == self._write:
                piece.job.seconds += result.seconds
                self._to_file(piece, result.statuses)
            else:
                piece.job.seconds += result.seconds
                self._end(piece, [*result.statuses, *piece.statuses])
        for done in self._tier.poll():
            piece = self._filing.pop(done.ticket)
            piece.job.seconds += done.seconds
            if piece.job.transfer.route == self._write:
                statuses = iter(done.statuses)
                self._end(piece, [next(statuses) if each is Status.OK else each for each in piece.statuses])
            else:
                self._to_pages(piece, done.statuses)
        self._begin_pieces()
        results, self._results = self._results, []
        return results

    def cancel(self, job: int) -> None:
        """Items of `job` that have not begun need not begin."""
        found = self._jobs.get(job)
        if found is None:
            self._engine.cancel(job)
            return
        found.cancelled = True
        for number, piece in self._copying.items():
            if piece.job is found:
                self._engine.cancel(number)
        for ticket, piece in self._filing.items():
            if piece.job is found:
                self._tier.cancel(ticket)
        self._begin_pieces()

    def touches_blocks(self, job: int) -> bool:
        """Whether a copy reads or writes blocks of `job`, or will. Not of a write whose images are all staged.

        For engines that take their blocks back before the job has ended.
        """
        found = self._jobs.get(job)
        if found is None:
            return False
        if any(piece.job is found for piece in self._copying.values()):
            return True
        whole = found.begun == len(found.statuses)
        return not (whole if found.transfer.route == self._write else found.cancelled)

    def close(self) -> None:
        """Wait for copies that have begun; the last results can still be polled. Idempotent."""
        self._closed = True
        self._engine.close()
        ended = self.poll()
        self._tier.close()
        self._results = ended + self.poll()

    # ------------------------------------------------------------------ pieces

    def _begin_pieces(self) -> None:
        """Begin items that the staging area has room for, most urgent jobs first; end items that must not begin."""
        for job in sorted(self._jobs.values(), key=lambda job: job.transfer.urgency):
            while job.begun < len(job.statuses):
                stopped = self._why_stop(job)
                if stopped is not None:
                    job.statuses[job.begun :] = [stopped] * (len(job.statuses) - job.begun)
                    job.begun = len(job.statuses)
                elif self._staging.free:
                    self._begin(job)
                else:
                    break
            self._settle(job)

    def _why_stop(self, job: _StagedJob) -> Status | None:
        """The status with which items of `job` that have not begun must end, if any."""
        if self._closed:
            return Status.TIER_OFF
        failed = any(status not in (None, Status.OK) for status in job.statuses[: job.begun])
        if job.cancelled or (failed and job.transfer.route == self._read):
            return Status.CANCELLED  # a chunk is of no use without those before it
        return Status.DEADLINE if self._clock() > job.transfer.deadline else None

    def _begin(self, job: _StagedJob) -> None:
        slots = self._staging.take(len(job.statuses) - job.begun)
        self._numbers += 1
        piece = _StagedPiece(job, -self._numbers, job.begun, slots)
        job.begun += len(slots)
        job.pieces += 1
        if job.first is None:
            job.first = self._clock()
        if job.transfer.route == self._write:
            self._copy(piece, len(slots), D2H)
        else:
            self._file(piece, [Status.OK] * len(slots), Op.READ)

    def _to_file(self, piece: _StagedPiece, statuses: Sequence[Status]) -> None:
        """The copies into the staging area have ended: write the images that arrived."""
        piece.statuses = list(statuses)
        if Status.OK in statuses:
            self._file(piece, statuses, Op.WRITE)
        else:
            self._end(piece, piece.statuses)

    def _to_pages(self, piece: _StagedPiece, statuses: Sequence[Status]) -> None:
        """The reads into the staging area have ended: bring the leading good ones to their pages."""
        usable = 0 if piece.job.cancelled else leading_ok(statuses)
        for slot, status in zip(piece.slots, statuses, strict=True):
            if status is not Status.OK:  # nobody knows what it brought, and padding is zero
                self._staging.arena.zero(self._staging.slabs.offset(0, slot), self._staging.slabs.slab_bytes)
        piece.statuses = [Status.CANCELLED if status is Status.OK else status for status in statuses[usable:]]
        if usable:
            self._copy(piece, usable, H2D)
        else:
            self._end(piece, piece.statuses)

    def _copy(self, piece: _StagedPiece, count: int, route: Route) -> None:
        inner = self._inner(piece, count, route)
        self._copying[piece.number] = piece
        try:
            self._engine.submit(inner)
        except Exception as error:  # noqa: BLE001 - the piece must end, and the others go on
            del self._copying[piece.number]
            self._end(piece, [self._refused(piece, error)] * count + piece.statuses)

    def _file(self, piece: _StagedPiece, statuses: Sequence[Status], op: Op) -> None:
        """Have the tier read or write those items of `piece` that are good so far."""
        good = [index for index, status in enumerate(statuses) if status is Status.OK]
        transfer = piece.job.transfer
        try:
            batch = self._operations(transfer, op, [(piece.first + index, piece.slots[index]) for index in good])
            self._filing[self._tier.submit(batch, transfer.deadline)] = piece
        except Exception as error:  # noqa: BLE001 - as above
            refused = self._refused(piece, error)
            self._end(piece, [refused if status is Status.OK else status for status in statuses])

    def _refused(self, piece: _StagedPiece, error: Exception) -> Status:
        """Of what the transfer engine or the tier did not take, while `error` is being handled."""
        status = submit_status(error)
        if status in (Status.DEVICE_ERROR, Status.INTERNAL_ERROR):
            job, route = piece.job.transfer.job, piece.job.transfer.route
            log_seldom(_log, "transfer job %d (%s) failed; %s; report this", job, route, route.loss)
        return status

    def _end(self, piece: _StagedPiece, statuses: Sequence[Status]) -> None:
        """Both sides are done with the slots of `piece`."""
        self._staging.give_back(piece.slots)
        job = piece.job
        job.statuses[piece.first : piece.first + len(piece.slots)] = statuses
        job.bytes += self._staging.slabs.slab_bytes * sum(status is Status.OK for status in statuses)
        job.pieces -= 1

    def _settle(self, job: _StagedJob) -> None:
        if job.pieces or job.begun < len(job.statuses):
            return
        statuses = tuple(status for status in job.statuses if status is not None)
        queued = (self._clock() if job.first is None else job.first) - job.submitted
        rank = self._layout.rank
        self._results.append(TransferResult(job.transfer.job, statuses, job.bytes, job.seconds, queued, rank))
        del self._jobs[job.transfer.job]

    # ------------------------------------------------------------------ what the two sides are told

    def _check(self, transfer: Transfer) -> None:
        """Raise unless both sides would take all of `transfer`."""
        if len(transfer.sections) > 1 and len(transfer.items) > self._staging.slabs.slabs:
            limit = self._staging.slabs.slabs
            raise PlanError(f"{len(transfer.items)} items of several groups exceed a staging area of {limit} slots")
        op, route = (Op.WRITE, D2H) if transfer.route == self._write else (Op.READ, H2D)
        job, most = _StagedJob(transfer, 0.0, []), self._staging.slabs.slabs
        batch = self._operations(transfer, op, [(index, 0) for index in range(len(transfer.items))])
        tier, memory = self._tier, self._staging.arena
        check_batch(batch, transfer.deadline, slabs=tier.slabs, image_bytes=tier.image_bytes, arena_bytes=memory.nbytes)
        for first in range(0, len(transfer.items), most):
            slots = list(range(min(most, len(transfer.items) - first)))
            self._engine.check(self._inner(_StagedPiece(job, -1, first, slots), len(slots), route))

    def _operations(self, transfer: Transfer, op: Op, slots: Sequence[tuple[int, int]]) -> list[TierOp]:
        """Operations of the tier for items, by position and slot of the staging area."""
        batch = []
        for position, slot in slots:
            item = transfer.items[position]
            ours, other = (item.destination, item.source) if op is Op.WRITE else (item.source, item.destination)
            if ours is None or other is not None:
                raise PlanError(f"item {position}: expected the device and a slot of the file tier, got {item}")
            offset = self._staging.slabs.offset(0, slot)
            length = self._tier.image_bytes[ours.size_class]
            identity = ours.index, item.key, item.parent
            batch.append(TierOp(op, *identity, offset, length, transfer.generation, ours.size_class))
        return batch

    def _inner(self, piece: _StagedPiece, count: int, route: Route) -> Transfer:
        transfer = piece.job.transfer
        stop = piece.first + count
        items = []
        for item, slot in zip(transfer.items[piece.first : stop], piece.slots, strict=False):
            place = Slot(HOST, 0, slot)
            source, destination = (None, place) if route == D2H else (place, None)
            items.append(Item(item.key, item.parent, source, destination))
        last = stop == len(transfer.items)
        return replace(
            transfer,
            job=piece.number,
            route=route,
            items=tuple(items),
            sections=transfer.sections if last and not piece.first else self._sections(transfer, piece.first, stop),
            by_layer=False,
            tokens=transfer.tokens if last else None,
            after=(),
        )

    def _sections(self, transfer: Transfer, first: int, stop: int) -> tuple[Section, ...]:
        (section,) = transfer.sections
        per_chunk = self._layout.groups[section.group].blocks_per_chunk
        skipped = section.first_block % per_chunk
        begin, end = max(0, first * per_chunk - skipped), stop * per_chunk - skipped
        return (section._replace(first_block=section.first_block + begin, blocks=section.blocks[begin:end]),)


def open_staging(config: Config, layout: KVLayout, device: Device) -> StagingSlots | None:
    """Slots for images on the device, if the file tier is to be reached from there, and can be; else `None`."""
    if config.file_path is None or config.file_mode != "gds":
        return None
    try:
        memory = device.allocate_images(max(STAGING_BYTES // layout.image_bytes, _LEAST_STAGING) * layout.image_bytes)
    except DeviceError as error:
        _log.warning(
            "file_mode gds is not available, using posix with a host tier of %s: %s",
            format_bytes(config.host_size),
            error,
        )
        config.check_host()
        return None
    return StagingSlots(memory, layout.image_bytes)
