"""`LongshoreWorker`: one rank. It copies between the engine's blocks and the shared arena, and reports completed jobs.

    submit_store  ─► TransferEngine ─► bytes in place ─► report (job, done or failed) ─► get_finished
    submit_load   ─► TransferEngine ─► bytes in place ─► report the load            ─► get_finished
    go_on         ─► the next part of a job, in a later step  ─► report the part     ─► get_finished, after the last

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
from longshore.engines.vllm.changes import AdapterWatch, WeightWatch, report_adapter
from longshore.engines.vllm.rendezvous import TIMEOUT
from longshore.errors import EngineError, LongshoreError, TierError, log_seldom
from longshore.runtime.rank_reports import RankReports
from longshore.runtime.stack import take_back
from longshore.tiers.arena import Arena
from longshore.transfer.engine import TransferEngine

_log = logging.getLogger(__name__)
_LOAD_TIMEOUT = 60.0


@dataclass(frozen=True)
class SlotsSpec(LoadStoreSpec):  # type: ignore[misc]
    """Where the chunks of one job lie in the arena.

    Attributes:
        job: The manager's ticket, a number that no other ever has.
        runs: The slots of each KV cache group, in order.
        epoch: How often weights had changed, and device memory had gone or come back, when the manager gave the ticket.
        begins: For a part of a job: how many chunks of each group other parts have had before.
        left: For the first part of a job: how many chunks of each group later parts have; empty if there are none.
    """

    job: int
    runs: tuple[Slots, ...]
    epoch: tuple[int, int] = (0, 0)
    begins: tuple[int, ...] = ()
    left: tuple[int, ...] = ()

    @property
    def counts(self) -> tuple[int, ...]:
        """Chunks of each group."""
        return tuple(len(run.indices) for run in self.runs)

    @property
    def indices(self) -> list[int]:
        """Slots of all groups."""
        return [index for run in self.runs for index in run.indices]


class JobPart(NamedTuple):
    """The next part of the job whose first ticket is `job`.

    Without `slots` no other part comes, and the job has failed if it is a load.
    """

    job: int
    slots: SlotsSpec | None
    is_store: bool = False


@dataclass(slots=True)
class _JobUnderWay:
    """A job of vLLM's, by our number and its own: chunks that are not in place yet, and parts being copied.

    `over`: parts that come later are refused; so are those of another `epoch`, as blocks may have been lost since.
    """

    number: int
    theirs: int
    epoch: tuple[int, int]
    blocks: GPULoadStoreSpec
    left: int
    is_store: bool
    copying: set[int] = field(default_factory=set)
    over: bool = False
    bytes: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class _PartUnderWay:
    whole: _JobUnderWay
    spec: SlotsSpec
    transfer: Transfer | None = None
    retried: bool = False


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
        """vLLM's numbers of the loads that failed, if somebody asks for them."""
        self.reports_failures = False
        self._rank = rank
        self._has_part = has_part
        self._per_chunk = blocks_per_chunk
        self._states = states
        self._jobs: dict[int, _PartUnderWay] = {}
        """Parts that are being copied, by ticket."""
        self._under_way: dict[int, _JobUnderWay] = {}
        """Jobs that have not ended, by the ticket of their first part."""
        self._done: list[VllmResult] = []
        self._asleep = False
        self._changes = WeightWatch(vllm, partial(reports.weights_changed, rank), self)
        self._adapters = AdapterWatch(vllm, self._loaded_adapter)

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        """Begin to copy blocks into the arena. Always true: what cannot be copied is reported as failed."""
        if not self._has_part:
            self._done.append(VllmResult(job_id, True, 0, 0.0))
            return True
        self._start(job_id, src_spec, dst_spec, is_store=True)
        return True

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        """Begin to copy blocks out of the arena. Always true."""
        self._start(job_id, dst_spec, src_spec, is_store=False)
        return True

    def go_on(self, parts: Iterable[JobPart]) -> None:
        """Begin the next parts of jobs, or end them; parts of jobs that have ended are reported as failed."""
        for number, spec, is_store in parts:
            job = self._under_way.get(number)
            if spec is None:
                if job is not None:
                    job.over = True
                    self._end_if_over(job)
            elif job is None or job.over or job.epoch != spec.epoch:
                self._report_failure(spec, is_store=is_store)
                if job is not None and not job.over:
                    job.over = True
                    self._end_if_over(job)
            else:
                self._begin(job, spec)

    def get_finished(self) -> list[VllmResult]:
        """Jobs that have ended since the last call."""
        self._poll()
        done, self._done = self._done, []
        return done

    def _poll(self) -> None:
        for result in self.engine.poll():
            part = self._jobs.pop(result.job)
            if part.whole.is_store:
                self._stored(part, result)
            else:
                self._loaded(part, result)

    def wait(self, job_ids: set[int]) -> None:
        """Block until these jobs have ended, stores without parts that were not submitted. Unknown jobs have ended."""
        for store in [job for job in self._under_way.values() if job.is_store and job.theirs in job_ids]:
            store.over = True
            self._end_if_over(store)
        ours = [number for number, part in self._jobs.items() if part.whole.theirs in job_ids]
        self.engine.wait(ours)

    def before_device_release(self) -> None:
        """Device memory is about to be freed: no copy uses it until it is restored. Idempotent.

        Jobs that do not end within a minute are cancelled. Host memory is given back as well, if the manager says so.
        """
        if self._asleep:
            return
        if not self.engine.wait(list(self._jobs), _LOAD_TIMEOUT):
            for number in self._jobs:
                self.engine.cancel(number)
            self.engine.wait(list(self._jobs))
        self._asleep = True
        self._poll()
        self.reports.sleep_changed(self._rank)
        if self.reports.frees_host_memory and not self.arena.is_given_back:
            try:
                self.arena.give_back()
            except TierError:
                _log.exception("host memory could not be freed for the sleep; it stays allocated")
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
        self._changes.close()
        self._adapters.close()
        self.engine.shutdown(_LOAD_TIMEOUT)
        self.reports.close()
        self.arena.close()

    def _loaded_adapter(self, lora: Any, number: int) -> None:
        """An adapter was loaded. The plain connector does not name adapters: other bytes clear all tiers."""
        if report_adapter(lora, self.reports, self._rank, number) and not self.reports_failures:
            self.reports.weights_changed(self._rank)

    def _start(self, theirs: int, blocks: GPULoadStoreSpec, spec: SlotsSpec, *, is_store: bool) -> None:
        """Begin the first part of a job, unless all of it comes later."""
        job = _JobUnderWay(spec.job, theirs, spec.epoch, blocks, sum(spec.left) + len(spec.indices), is_store)
        job.over = is_store and not self._is_divisible(blocks, spec)
        self._under_way[job.number] = job
        if spec.indices or not spec.left or job.over:
            self._begin(job, spec)

    def _is_divisible(self, blocks: GPULoadStoreSpec, spec: SlotsSpec) -> bool:
        """Whether it is known which `blocks` are those of later parts: none is missing but at the beginning."""
        groups = zip(blocks.group_sizes, blocks.block_indices, spec.counts, spec.left, strict=False)
        return all(
            size == (now + later) * self._per_chunk - index % self._per_chunk
            for size, index, now, later in groups
            if later
        )

    def _begin(self, job: _JobUnderWay, spec: SlotsSpec) -> None:
        """Begin to copy the chunks of `spec`, a part of `job`."""
        job.copying.add(spec.job)
        part = _PartUnderWay(job, spec)
        self._changes.check()
        if self._asleep or self.arena.is_given_back or self._is_outdated(part) or job.over:
            self._end_badly(part)
            return
        if not self._try(part):
            self._end_badly(part)

    def _is_outdated(self, part: _PartUnderWay) -> bool:
        """Whether weights have changed, or device memory was freed, since the manager ordered `part`."""
        return (self.reports.weight_changes, self.reports.sleep_changes) != part.spec.epoch

    def _try(self, part: _PartUnderWay) -> bool:
        """Submit the transfer of `part`; returns whether the engine accepted it. An error ends this part alone."""
        if self._asleep:
            return False
        try:
            part.transfer = part.transfer or self._transfer(part)
            if not part.transfer.items:
                return False
            self.engine.submit(part.transfer)
        except LongshoreError as error:
            _log.error("transfer job %d was refused, its blocks are not copied: %s", part.spec.job, error)
            return False
        except Exception:  # noqa: BLE001 - a bug: vLLM would stop the engine
            log_seldom(
                _log, "internal error: transfer job %d failed, its blocks are not copied; report this", part.spec.job
            )
            return False
        self._jobs[part.spec.job] = part
        return True

    def _transfer(self, part: _PartUnderWay) -> Transfer:
        """What is to be copied.

        A window may have slid past some blocks of chunks that are to be stored. Nobody says which, so that none of the
        images of that group would be known to be whole: all of them are left out. Of blocks that begin inside a chunk
        and then follow one another, only that chunk is left out. Of a state, vLLM stores the last block of a chunk
        alone.
        """
        blocks, is_store, begin = part.whole.blocks, part.whole.is_store, 0
        if part.spec.begins or part.spec.left:
            blocks = _part(blocks, part.spec, self._per_chunk)
        ids = blocks.block_ids.tolist()
        sections: list[Section] = []
        slots: list[Slot] = []
        for group, (size, index, chunks) in enumerate(
            zip(blocks.group_sizes, blocks.block_indices, part.spec.counts, strict=True)
        ):
            is_state = group in self._states and size == chunks == 1 and (index + 1) % self._per_chunk == 0
            skip = (
                -index % self._per_chunk if is_store and not is_state else 0
            )  # the beginning of their chunk is missing
            first = 1 if skip else 0
            is_whole = is_state or size - skip == (chunks - first) * self._per_chunk
            if size > skip and (is_whole or not is_store):
                sections.append(Section(group, index + skip, tuple(ids[begin + skip : begin + size])))
                slots += list(addresses(*part.spec.runs[group]))[first:]
            begin += size
        return Transfer(
            job=part.spec.job,
            route=Route(DEVICE, HOST) if is_store else Route(HOST, DEVICE),
            items=tuple(Item(b"", None, None, slot) if is_store else Item(b"", None, slot, None) for slot in slots),
            sections=tuple(sections),
            urgency=Urgency.WRITE if is_store else Urgency.DEMAND,
        )

    def _stored(self, part: _PartUnderWay, result: TransferResult) -> None:
        items = cast(Transfer, part.transfer).items
        slots = [cast(Slot, item.destination).index for item in items]
        good = {slot for slot, status in zip(slots, result.statuses, strict=True) if status is OK}
        if self._is_outdated(part):
            good.clear()
        self.reports.stored(part.spec.job, self._rank, list(good), [i for i in part.spec.indices if i not in good])
        self._end_part(part, result.bytes, result.seconds)

    def _loaded(self, part: _PartUnderWay, result: TransferResult) -> None:
        outdated = self._is_outdated(part)
        if outdated or any(status is not OK for status in result.statuses):
            if outdated or part.retried or not self._try(part):
                self._end_badly(part)
            part.retried = True
            return
        self.reports.loaded(part.spec.job, self._rank, good=True)
        self._end_part(part, result.bytes, result.seconds)

    def _end_badly(self, part: _PartUnderWay) -> None:
        self._report_failure(part.spec, is_store=part.whole.is_store)
        part.whole.over |= not part.whole.is_store
        self._end_part(part)

    def _report_failure(self, spec: SlotsSpec, *, is_store: bool) -> None:
        if not is_store:
            self.reports.loaded(spec.job, self._rank, good=False)
        elif self._has_part:
            self.reports.stored(spec.job, self._rank, [], spec.indices)

    def _end_part(self, part: _PartUnderWay, nbytes: int = 0, seconds: float = 0.0) -> None:
        job = part.whole
        job.bytes, job.seconds = job.bytes + nbytes, job.seconds + seconds
        job.left -= len(part.spec.indices)
        job.copying.discard(part.spec.job)
        self._end_if_over(job)

    def _end_if_over(self, job: _JobUnderWay) -> None:
        """Report `job` when nothing of it is being copied, and nothing is to come."""
        if job.copying or (job.left and not job.over):
            return
        del self._under_way[job.number]
        failed = job.over and not job.is_store
        if failed:
            if not self.reports_failures:
                raise EngineError(
                    f"load job {job.number} failed, which OffloadingConnector cannot report: use LongshoreConnector, "
                    "which has the request recomputed"
                )
            self.failed.add(job.theirs)
        moved = (0, 0.0) if failed else (job.bytes, job.seconds)
        self._done.append(VllmResult(job.theirs, True, *moved))

    def take_failed(self, jobs: Collection[int]) -> set[int]:
        """Which of these loads have failed; each is returned once."""
        failed = self.failed & set(jobs)
        self.failed -= failed
        return failed


def _part(blocks: GPULoadStoreSpec, spec: SlotsSpec, per_chunk: int) -> GPULoadStoreSpec:
    """The `blocks` of a job that the chunks of `spec` are copied to, or from."""
    ids, begin = blocks.block_ids.tolist(), 0
    mine: list[int] = []
    sizes, indices = [], []
    begins = spec.begins or (0,) * len(spec.runs)
    for size, index, before, chunks in zip(blocks.group_sizes, blocks.block_indices, begins, spec.counts, strict=True):
        missing = index % per_chunk  # blocks of the first chunk that the device has
        first = max(0, before * per_chunk - missing)
        end = max(first, min(size, (before + chunks) * per_chunk - missing)) if chunks else first
        mine += ids[begin + first : begin + end]
        sizes.append(end - first)
        indices.append(index + first)
        begin += size
    return GPULoadStoreSpec(mine, group_sizes=sizes, block_indices=indices)


OK = Status.OK
