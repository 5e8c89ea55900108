"""`LongshoreWorker`: one rank. It copies between the engine's blocks and the shared arena, and reports completed jobs.

    submit_store  ─► TransferEngine ─► bytes in place ─► report (ticket, done or failed) ─► get_finished
    submit_load   ─► TransferEngine ─► bytes in place ─► report the load               ─► get_finished
    submit_parts  ─► the next part of a job, in a later step  ─► report the part       ─► get_finished, after the last

vLLM asserts that every job succeeds. A failed store is therefore reported in shared memory (`RankReports`): the manager
publishes nothing that not all ranks have reported as done. A load that fails is tried once more; then its request is
reported as failed, if the connector can (`LongshoreConnector`), or the engine stops: never a wrong token. A job has
ended when all its parts have. If a part of a load has failed, or vLLM waits for a store, it ends when nothing of it is
being copied: parts that come later are refused.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, cast

from vllm.v1.kv_offload.base import GPULoadStoreSpec, LoadStoreSpec, OffloadingWorker
from vllm.v1.kv_offload.base import TransferResult as VllmResult

from longshore.boundary import (
    DEVICE,
    HOST,
    Item,
    Route,
    Section,
    Slot,
    Slots,
    Status,
    Transfer,
    TransferResult,
    Urgency,
    addresses,
)
from longshore.engines.vllm.rendezvous import TIMEOUT
from longshore.engines.vllm.weight_changes import AdapterWatch, WeightWatch, report_adapter
from longshore.errors import EngineError, TierError, log_seldom
from longshore.runtime.error_handler import submit_status
from longshore.runtime.rank_reports import FAILED, INTERNAL_ERROR, RankReports
from longshore.runtime.stack import take_back
from longshore.tiers.arena import Arena
from longshore.transfer.engine import TransferEngine

_log = logging.getLogger(__name__)
_DRAIN_TIMEOUT = 60.0
"""Seconds to wait for copies in flight before device memory is freed, or the worker ends."""


@dataclass(frozen=True)
class SlotsSpec(LoadStoreSpec):  # type: ignore[misc]
    """The slots of one job, or one part of it, in the arena.

    Attributes:
        ticket: The number of the manager's `Ticket`; used for no other job or part.
        group_slots: The slots of each KV cache group, in order.
        epoch: How often weights had changed, and device memory had been freed or restored, when the ticket was made.
        chunks_before: For a part of a job: how many chunks of each group earlier parts have.
        chunks_after: For the first part of a job: how many chunks of each group later parts have; empty without any.
    """

    ticket: int
    group_slots: tuple[Slots, ...]
    epoch: tuple[int, int] = (0, 0)
    chunks_before: tuple[int, ...] = ()
    chunks_after: tuple[int, ...] = ()

    @property
    def counts(self) -> tuple[int, ...]:
        """Chunks of each group."""
        return tuple(len(slots.indices) for slots in self.group_slots)

    @property
    def indices(self) -> list[int]:
        """Slots of all groups."""
        return [index for slots in self.group_slots for index in slots.indices]


class JobPart(NamedTuple):
    """The next part of the job whose first part has the ticket `first_ticket`.

    Without a `spec` the job has no further parts, and has failed if it is a load.
    """

    first_ticket: int
    spec: SlotsSpec | None
    is_store: bool = False


@dataclass(slots=True)
class _JobInFlight:
    """A job of vLLM's that has not ended.

    Attributes:
        first_ticket: The ticket of its first part, by which later parts name it.
        vllm_job: vLLM's number of it.
        epoch: That of its first part. Parts of another epoch are refused: blocks may have been lost since.
        blocks: The device blocks of all its parts.
        chunks_left: How many chunks have not been copied, or failed.
        in_flight: Tickets of the parts that are being copied.
        refuses_parts: Whether parts that come later are refused; if it is a load, it has failed.
        bytes: Bytes that were copied.
        seconds: Seconds that the copies took.
    """

    first_ticket: int
    vllm_job: int
    epoch: tuple[int, int]
    blocks: GPULoadStoreSpec
    chunks_left: int
    is_store: bool
    in_flight: set[int] = field(default_factory=set)
    refuses_parts: bool = False
    bytes: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class _PartInFlight:
    """A part of `job`. `failure`: what is reported of slots that are not copied: `FAILED` or `INTERNAL_ERROR`."""

    job: _JobInFlight
    spec: SlotsSpec
    transfer: Transfer | None = None
    retried: bool = False
    failure: int = FAILED


class LongshoreWorker(OffloadingWorker):  # type: ignore[misc]
    """vLLM's offloading worker: the copies of one rank."""

    def __init__(
        self,
        engine: TransferEngine,
        arena: Arena,
        reports: RankReports,
        rank: int,
        blocks_per_chunk: int,
        *,
        has_part: bool = True,
        states: Collection[int] = (),
        vllm: Any = None,
    ) -> None:
        """`has_part` says whether images have a part of this rank; where all ranks hold the same bytes, one has.

        `states` are the KV cache groups of recurrent states: of a chunk of theirs, only the last block is ever read.
        `vllm` is the `VllmConfig` of the worker whose weights are watched.
        """
        self.engine = engine
        self.arena = arena
        self.reports = reports
        self.failed: set[int] = set()
        """vLLM's numbers of the loads that failed, until `take_failed` returns them."""
        self.reports_failures = False
        self._rank = rank
        self._has_part = has_part
        self._blocks_per_chunk = blocks_per_chunk
        self._states = states
        self._parts: dict[int, _PartInFlight] = {}
        """Parts that are being copied, by ticket."""
        self._jobs: dict[int, _JobInFlight] = {}
        """Jobs that have not ended, by the ticket of their first part."""
        self._finished: list[VllmResult] = []
        self._asleep = False
        self._weight_watch = WeightWatch(vllm, partial(reports.weights_changed, rank), self)
        self._adapter_watch = AdapterWatch(vllm, self._adapter_loaded)

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        """Begin to copy blocks into the arena. Always true: blocks that cannot be copied are reported as failed."""
        if not self._has_part:
            self._finished.append(VllmResult(job_id, True, 0, 0.0))
            return True
        self._begin_job(job_id, src_spec, dst_spec, is_store=True)
        return True

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        """Begin to copy blocks out of the arena. Always true."""
        self._begin_job(job_id, dst_spec, src_spec, is_store=False)
        return True

    def submit_parts(self, parts: Iterable[JobPart]) -> None:
        """Begin the next parts of jobs, or end them; parts of jobs that have ended are reported as failed."""
        for first_ticket, spec, is_store in parts:
            job = self._jobs.get(first_ticket)
            if spec is None:
                if job is not None:
                    job.refuses_parts = True
                    self._end_job_if_done(job)
            elif job is None or job.refuses_parts or job.epoch != spec.epoch:
                self._report_failure(spec, is_store=is_store)
                if job is not None and not job.refuses_parts:
                    job.refuses_parts = True
                    self._end_job_if_done(job)
            else:
                self._begin_part(job, spec)

    def get_finished(self) -> list[VllmResult]:
        """Jobs that have ended since the last call."""
        self._poll()
        done, self._finished = self._finished, []
        return done

    def _poll(self) -> None:
        for result in self.engine.poll():
            part = self._parts.pop(result.job)
            if Status.INTERNAL_ERROR in result.statuses:
                part.failure = INTERNAL_ERROR
            if part.job.is_store:
                self._store_copied(part, result)
            else:
                self._load_copied(part, result)

    def wait(self, job_ids: set[int]) -> None:
        """Block until these jobs have ended, stores without parts that were not submitted. Unknown jobs have ended."""
        for store in [job for job in self._jobs.values() if job.is_store and job.vllm_job in job_ids]:
            store.refuses_parts = True
            self._end_job_if_done(store)
        tickets = [ticket for ticket, part in self._parts.items() if part.job.vllm_job in job_ids]
        self.engine.wait(tickets)

    def before_device_release(self) -> None:
        """Device memory is about to be freed: no copy uses it until it is restored. Idempotent.

        Jobs that do not end within a minute are cancelled. Host memory is given back as well, if the manager says so.
        """
        if self._asleep:
            return
        if not self.engine.wait(list(self._parts), _DRAIN_TIMEOUT):
            for ticket in self._parts:
                self.engine.cancel(ticket)
            self.engine.wait(list(self._parts))
        self._asleep = True
        self._poll()
        self.reports.sleep_changed(self._rank)
        if self.reports.frees_host_memory and not self.arena.is_given_back:
            try:
                self.arena.give_back()
            except TierError:
                _log.exception("host memory could not be freed for the sleep; it stays allocated; report this")
            self.reports.set_lacks_memory(self._rank, lacks=self.arena.is_given_back)

    def after_device_restore(self) -> None:
        """Device memory was restored at its former addresses, without its content. Idempotent.

        If host memory cannot be allocated again, the engine continues without it: the tiers find and store nothing.
        """
        if not self._asleep:
            return
        self._asleep = False
        if self.arena.is_given_back:
            try:
                if self._rank == 0:
                    take_back(self.arena)
                else:
                    self._wait_for_first_rank()
                    self.arena.take_back()
            except TierError as error:
                _log.error(
                    "host tier disabled: host memory could not be allocated after the sleep: %s. Free memory, then put "
                    "the engine to sleep and wake it up again, or restart it.",
                    error,
                )
            self.reports.set_lacks_memory(self._rank, lacks=self.arena.is_given_back)
        self.reports.sleep_changed(self._rank)

    def _wait_for_first_rank(self) -> None:
        """Wait until rank 0 has allocated host memory again. Raises `TierError` if it could not."""
        deadline = time.monotonic() + TIMEOUT
        while self.reports.is_asleep(0) and time.monotonic() < deadline:
            time.sleep(0.02)
        if self.reports.lacks_memory(0):
            raise TierError("rank 0 could not allocate host memory again; free memory, or lower host_size")

    def shutdown(self) -> None:
        """Wait for copies in flight, then release all resources. Idempotent."""
        self._weight_watch.close()
        self._adapter_watch.close()
        self.engine.shutdown(_DRAIN_TIMEOUT)
        self.reports.close()
        self.arena.close()

    def _adapter_loaded(self, lora: Any, number: int) -> None:
        """An adapter was loaded. The plain connector does not name adapters, so other bytes clear all tiers."""
        if report_adapter(lora, self.reports, self._rank, number) and not self.reports_failures:
            self.reports.weights_changed(self._rank)

    def _begin_job(self, vllm_job: int, blocks: GPULoadStoreSpec, spec: SlotsSpec, *, is_store: bool) -> None:
        """Begin the first part of a job, if it has chunks."""
        job = _JobInFlight(
            spec.ticket, vllm_job, spec.epoch, blocks, sum(spec.chunks_after) + len(spec.indices), is_store
        )
        job.refuses_parts = is_store and not self._is_divisible(blocks, spec)
        self._jobs[job.first_ticket] = job
        if spec.indices or not spec.chunks_after or job.refuses_parts:
            self._begin_part(job, spec)

    def _is_divisible(self, blocks: GPULoadStoreSpec, spec: SlotsSpec) -> bool:
        """Whether it is known which `blocks` are those of later parts: none is missing but at the beginning."""
        groups = zip(blocks.group_sizes, blocks.block_indices, spec.counts, spec.chunks_after, strict=False)
        return all(
            size == (now + later) * self._blocks_per_chunk - index % self._blocks_per_chunk
            for size, index, now, later in groups
            if later
        )

    def _begin_part(self, job: _JobInFlight, spec: SlotsSpec) -> None:
        """Begin to copy the chunks of `spec`, a part of `job`."""
        job.in_flight.add(spec.ticket)
        part = _PartInFlight(job, spec)
        self._weight_watch.check()
        if self._asleep or self.arena.is_given_back or self._is_outdated(part) or job.refuses_parts:
            self._fail_part(part)
            return
        if not self._submit(part):
            self._fail_part(part)

    def _is_outdated(self, part: _PartInFlight) -> bool:
        """Whether weights have changed, or device memory was freed, since the manager ordered `part`."""
        return (self.reports.weight_changes, self.reports.sleep_changes) != part.spec.epoch

    def _submit(self, part: _PartInFlight) -> bool:
        """Submit the transfer of `part`; returns whether the engine accepted it. An error ends this part alone."""
        if self._asleep:
            return False
        try:
            part.transfer = part.transfer or self._transfer(part)
            if not part.transfer.items:
                return False
            self.engine.submit(part.transfer)
        except Exception as error:  # noqa: BLE001 - vLLM would stop the engine
            if submit_status(error) is Status.INTERNAL_ERROR:
                part.failure = INTERNAL_ERROR
                message = "internal error: transfer job %d failed, its blocks are not copied; report this"
                log_seldom(_log, message, part.spec.ticket)
            else:
                _log.error("transfer job %d was refused, its blocks are not copied: %s", part.spec.ticket, error)
            return False
        self._parts[part.spec.ticket] = part
        return True

    def _transfer(self, part: _PartInFlight) -> Transfer:
        """The transfer of `part`.

        Of a store, a sliding window may have moved past some blocks of the chunks. vLLM does not say which, so no image
        of that group is known to be whole, and all are left out. If the blocks begin inside a chunk and then follow one
        another, only that chunk is left out. Of a state, vLLM stores the last block of a chunk alone.
        """
        blocks, is_store, begin = part.job.blocks, part.job.is_store, 0
        if part.spec.chunks_before or part.spec.chunks_after:
            blocks = _blocks_of_part(blocks, part.spec, self._blocks_per_chunk)
        ids = blocks.block_ids.tolist()
        sections: list[Section] = []
        slots: list[Slot] = []
        for group, (size, index, chunks) in enumerate(
            zip(blocks.group_sizes, blocks.block_indices, part.spec.counts, strict=True)
        ):
            is_state = group in self._states and size == chunks == 1 and (index + 1) % self._blocks_per_chunk == 0
            skip = 0 if is_state or not is_store else -index % self._blocks_per_chunk  # the rest of a chunk
            first = 1 if skip else 0
            is_whole = is_state or size - skip == (chunks - first) * self._blocks_per_chunk
            if size > skip and (is_whole or not is_store):
                sections.append(Section(group, index + skip, tuple(ids[begin + skip : begin + size])))
                slots += list(addresses(*part.spec.group_slots[group]))[first:]
            begin += size
        return Transfer(
            job=part.spec.ticket,
            route=Route(DEVICE, HOST) if is_store else Route(HOST, DEVICE),
            items=tuple(Item(b"", None, None, slot) if is_store else Item(b"", None, slot, None) for slot in slots),
            sections=tuple(sections),
            urgency=Urgency.WRITE if is_store else Urgency.DEMAND,
        )

    def _store_copied(self, part: _PartInFlight, result: TransferResult) -> None:
        items = cast(Transfer, part.transfer).items
        slots = [cast(Slot, item.destination).index for item in items]
        good = {slot for slot, status in zip(slots, result.statuses, strict=True) if status is OK}
        if self._is_outdated(part):
            good.clear()
        bad = [slot for slot in part.spec.indices if slot not in good]
        self.reports.stored(part.spec.ticket, self._rank, list(good), bad, part.failure)
        self._end_part(part, result.bytes, result.seconds)

    def _load_copied(self, part: _PartInFlight, result: TransferResult) -> None:
        outdated = self._is_outdated(part)
        if outdated or any(status is not OK for status in result.statuses):
            if outdated or part.retried or not self._submit(part):
                self._fail_part(part)
            part.retried = True
            return
        self.reports.loaded(part.spec.ticket, self._rank, good=True)
        self._end_part(part, result.bytes, result.seconds)

    def _fail_part(self, part: _PartInFlight) -> None:
        self._report_failure(part.spec, part.failure, is_store=part.job.is_store)
        part.job.refuses_parts |= not part.job.is_store
        self._end_part(part)

    def _report_failure(self, spec: SlotsSpec, failure: int = FAILED, *, is_store: bool) -> None:
        if not is_store:
            self.reports.loaded(spec.ticket, self._rank, good=False, failure=failure)
        elif self._has_part:
            self.reports.stored(spec.ticket, self._rank, [], spec.indices, failure)

    def _end_part(self, part: _PartInFlight, nbytes: int = 0, seconds: float = 0.0) -> None:
        job = part.job
        job.bytes, job.seconds = job.bytes + nbytes, job.seconds + seconds
        job.chunks_left -= len(part.spec.indices)
        job.in_flight.discard(part.spec.ticket)
        self._end_job_if_done(job)

    def _end_job_if_done(self, job: _JobInFlight) -> None:
        """Report `job` when nothing of it is being copied, and nothing is to come."""
        if job.in_flight or (job.chunks_left and not job.refuses_parts):
            return
        del self._jobs[job.first_ticket]
        failed = job.refuses_parts and not job.is_store
        if failed:
            if not self.reports_failures:
                raise EngineError(
                    f"load job {job.first_ticket} failed, which OffloadingConnector cannot report: use "
                    "LongshoreConnector, which has the request recomputed"
                )
            self.failed.add(job.vllm_job)
        moved = (0, 0.0) if failed else (job.bytes, job.seconds)
        self._finished.append(VllmResult(job.vllm_job, True, *moved))

    def take_failed(self, jobs: Collection[int]) -> set[int]:
        """Which of these loads have failed; each is returned once."""
        failed = self.failed & set(jobs)
        self.failed -= failed
        return failed


def _blocks_of_part(blocks: GPULoadStoreSpec, spec: SlotsSpec, per_chunk: int) -> GPULoadStoreSpec:
    """The `blocks` of a job that the chunks of `spec` are copied to, or from."""
    ids, begin = blocks.block_ids.tolist(), 0
    mine: list[int] = []
    sizes, indices = [], []
    chunks_before = spec.chunks_before or (0,) * len(spec.group_slots)
    for size, index, before, chunks in zip(
        blocks.group_sizes, blocks.block_indices, chunks_before, spec.counts, strict=True
    ):
        missing = index % per_chunk  # blocks of the first chunk that the device has
        first = max(0, before * per_chunk - missing)
        end = max(first, min(size, (before + chunks) * per_chunk - missing)) if chunks else first
        mine += ids[begin + first : begin + end]
        sizes.append(end - first)
        indices.append(index + first)
        begin += size
    return GPULoadStoreSpec(mine, group_sizes=sizes, block_indices=indices)


OK = Status.OK
