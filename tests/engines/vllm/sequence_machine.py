"""All sequences of calls that vLLM's scheduler makes: many requests at once over one manager, with real copies.

    rules ─► vLLM's OffloadingConnectorScheduler ─► LongshoreManager ─► tiers with a file tier that moves when told
                        └─ jobs of each rank ─► LongshoreWorker: late, in any order, failed, in part
                        └─ parts of loads ────► LongshoreWorker: in their order, each rank when it comes to it

The scheduler is vLLM's own. The machine adds the engine around it: device blocks that are reused, chunked prefills,
preemption, aborts and resets. A block's bytes are derived from its key and the request that computed it.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from sequences_kit import (
    BLOCKS,
    POISON,
    SEEN,
    WINDOW,
    Asked,
    Calls,
    Job,
    Loading,
    SlowTier,
    Spare,
    delayed_reports,
    holds,
    nowhere,
    write_block,
)
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock, get_request_block_hasher
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, make_offload_key
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus
from vllm_kit import TOKENS, Group, Rig, file_settings, vllm_config

from longshore.boundary import Slabs, Status
from longshore.cache.pool import FREE, READY
from longshore.engines.vllm import tiers as tiers_module

CALLS = Calls()


class Sequences(RuleBasedStateMachine):
    """One engine."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.patch = pytest.MonkeyPatch()
        self.tier: SlowTier | None = None
        self.asked: list[Asked] = []
        self.finished: set[str] = set()
        self.preempted: set[str] = set()
        self.free = list(range(BLOCKS - 1, 0, -1))
        self.device: dict[int, tuple[OffloadKey, str]] = {}
        self.writes: list[tuple[int, OffloadKey, str]] = []
        self.stored: dict[OffloadKey, set[str]] = defaultdict(set)
        self.jobs: list[Job] = []
        self.done: list[Job] = []
        self.copying: list[Job] = []
        """Transfers that ranks have begun, and have not ended."""
        self.tickets: dict[int, int] = {}
        """vLLM's numbers of transfers, by ours."""
        self.late: list[Spare] = []
        self.loads: dict[int, Loading] = {}
        self.epoch = self.names = 0

    @initialize(
        world=st.sampled_from([1, 2]),
        slides=st.booleans(),
        host=st.sampled_from([4, 12, 6, 320, 9]),
        file=st.sampled_from([8, 0, 400, 60]),
        backup=st.sampled_from(["write_back", "write_through"]),
        eviction=st.sampled_from(["gittins", "lru", "arc"]),
        streams=st.sampled_from([True, True, False]),
    )
    def start(
        self, world: int, slides: bool, host: int, file: int, backup: str, eviction: str, streams: bool = False
    ) -> None:
        self.groups = [Group(0), Group(1, window=WINDOW)][: 1 + slides]
        extra: dict[str, Any] = {
            "host_size": host * world * 4096,
            "gate": False,
            "load_timeout": 1.0,
            "eviction": eviction,
        }
        if file:
            self.file_slabs = file
            self.patch.setattr(tiers_module, "_open_file_tier", self._open)
            extra |= {**file_settings(Path(self.directory.name)), "file_size": "4MiB", "backup": backup}
        parallel = {"parallel_config.world_size": world}
        self.rig = Rig(world=world, groups=self.groups, blocks=BLOCKS, vllm=parallel, **extra)
        self.manager: Any = self.rig.manager
        self.manager._tiers.loop.close()  # calls alone make progress: a run can be repeated
        self.skipped, self.runtime, began = 0.0, self.manager._runtime, time.monotonic()
        self.runtime.clock = lambda: began + self.skipped
        self.manager.observes_device_resets = True
        if streams:
            self.manager.allow_parts(loads=True)
        self.views = [[tensor.numpy().view(np.uint8) for tensor in tensors] for tensors in self.rig.tensors]
        for worker in self.rig.workers:
            worker.reports_failures = True
        spec: Any = self.rig.specs[0]
        spec.get_manager = lambda: self.manager
        lookup = self.manager.lookup

        def watched(key: OffloadKey, context: Any) -> LookupResult:
            said = lookup(key, context)
            SEEN[said.name] += 1
            assert said is LookupResult.MISS or self.stored[key], "found, and not stored since the reset"
            return said

        self.manager.lookup = watched
        self.hasher = get_request_block_hasher(TOKENS, sha256)
        groups = [KVCacheGroupSpec(list(group.names), group.get_kv_cache_spec(None)) for group in self.groups]
        config = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)
        about = {"parallel_config.world_size": world, "cache_config.prefix_cache_retention_interval": None}
        self.scheduler = OffloadingConnectorScheduler(spec, vllm_config(self.groups, {"vllm": about}), config)

    def _open(self, config: Any, path: Path, note: Any, arena: Any, scope: Any) -> SlowTier:
        slabs = Slabs(note.slab_bytes, tuple(note.image_bytes), self.file_slabs)
        self.tier = SlowTier(slabs, tuple(note.image_bytes), arena)
        return self.tier

    # ------------------------------------------------------------------ requests

    @CALLS.of(
        family=st.integers(0, 1),
        shared=st.sampled_from([300, 2, 6]),
        variant=st.integers(0, 1),
        chunks=st.sampled_from([3, 1, 5, 8, 11, 14, 20, 30, 60, 90, 300]),
        answer=st.sampled_from([1, 20, 60]),
        priority=st.sampled_from([None, None, 10, 90]),
    )
    def arrive(self, family: int, shared: int, variant: int, chunks: int, answer: int, priority: int | None) -> None:
        self.names += 1
        alike = min(shared, chunks) * TOKENS
        tokens = [1 + 1000 * family + at % 900 for at in range(alike)]
        tokens += [1 + 1000 * family + 10_000 * (1 + variant) + at % 900 for at in range(alike, chunks * TOKENS + 5)]
        request = Request(f"{self.names}", tokens, SamplingParams(max_tokens=100), None, block_hasher=self.hasher)
        if priority is not None:
            request.kv_transfer_params = {"longshore": {"retention": [{"end": 4 * TOKENS, "priority": priority}]}}
        self.scheduler.on_new_request(request)
        self.asked.append(Asked(request, answer, [[] for _ in self.groups]))

    def abort(self, which: int) -> None:
        if which < len(self.asked):
            self._finish(self.asked[which], RequestStatus.FINISHED_ABORTED)

    def _finish(self, asked: Asked, status: RequestStatus) -> None:
        is_loading, asked.state = asked.state == "loading", "finished"
        asked.request.status = status
        self.manager.will_finish(asked.name)  # as `LongshoreConnector` says
        self.scheduler.request_finished(asked.request)
        self.finished.add(asked.name)
        self.asked.remove(asked)
        if not is_loading:
            self._free(asked)

    def _preempt(self, asked: Asked) -> None:
        SEEN["preemptions"] += 1
        self._free(asked)
        asked.state = "waiting"
        asked.request.status, asked.request.num_computed_tokens = RequestStatus.PREEMPTED, 0
        self.preempted.add(asked.name)

    # ------------------------------------------------------------------ steps

    @CALLS.of(
        pieces=st.sampled_from([1, 3, 8, 70, 400]),
        local=st.sampled_from([0, 0, 0, 1, 4, 30]),
        has_room=st.sampled_from([True, True, False]),
        preempt=st.sampled_from([None, None, 0, 1, 2]),
        decoded=st.sampled_from([1, 7, 20]),
    )
    def step(  # noqa: PLR0912 - as vLLM's own
        self, pieces: int, local: int, has_room: bool, preempt: int | None, decoded: int
    ) -> None:
        """Plan a step, and compute it: prefills in `pieces` of so many chunks.

        `local` chunks of a request that waits are still on the device; without room nothing that waits begins.
        """
        self.skipped += 0.01
        running = [each for each in self.asked if each.state == "running"]
        had = len(running)
        if preempt is not None and preempt < had:
            self._preempt(running.pop(preempt))
        new, cached, resumed, scheduled = [], [], set(), {}
        for asked in running:
            computed = asked.request.num_computed_tokens
            count = min(pieces * TOKENS, asked.request.num_tokens - computed)
            cached.append((asked.name, self._allocate(asked, computed + count, computed)))
            scheduled[asked.name] = (asked, count)
        for asked in [each for each in self.asked if each.state in ("waiting", "loaded")]:
            if len(running) < had:
                break  # nothing begins in a step that preempts
            request = asked.request
            if asked.state == "waiting":
                on_device = min(local, (request.num_tokens - 1) // TOKENS) * TOKENS
                hit, _ = self.scheduler.get_num_new_matched_tokens(request, on_device)
                if hit is None or not has_room:
                    continue
                request.num_computed_tokens = on_device + hit
                self._allocate(asked, on_device + hit, on_device + hit)
                self._found_on_device(asked, on_device // TOKENS)
                if hit:
                    self._load(asked, hit)
                    continue
            elif not has_room:
                continue
            computed = request.num_computed_tokens
            count = min(pieces * TOKENS, request.num_tokens - computed)
            self._allocate(asked, computed + count, computed)
            whole = tuple(map(list, asked.blocks))
            if asked.announced:
                cached.append((asked.name, whole))
                resumed.add(asked.name)
            else:
                new.append(SimpleNamespace(req_id=asked.name, block_ids=whole))
            asked.announced, asked.state, request.status = True, "running", RequestStatus.RUNNING
            scheduled[asked.name] = (asked, count)
        self._run(
            self.scheduler.build_connector_meta(
                SimpleNamespace(
                    scheduled_new_reqs=new,
                    scheduled_cached_reqs=SimpleNamespace(
                        req_ids=[name for name, _ in cached],
                        new_block_ids=[blocks for _, blocks in cached],
                        resumed_req_ids=resumed,
                    ),
                    num_scheduled_tokens={name: count for name, (_, count) in scheduled.items()},
                    finished_req_ids=self.finished,
                    preempted_req_ids=self.preempted or None,
                    kv_cache_block_copies=None,
                    kv_connector_block_state=None,
                )
            ),
            list(scheduled.values()),
        )
        self.finished, self.preempted = set(), set()
        for asked, count in scheduled.values():
            request = asked.request
            request.num_computed_tokens += count
            if request.num_computed_tokens == request.num_tokens:
                ends = request.num_output_tokens + 1 >= asked.answer
                request.append_output_token_ids([7] * (1 if ends else decoded))  # the last one is never computed
                if ends:
                    self._finish(asked, RequestStatus.FINISHED_STOPPED)

    @CALLS.of(
        pieces=st.sampled_from([400, 3]),
        steps=st.integers(1, 3),
        skip=st.integers(0, 3),
        how=st.sampled_from(["good", "bad", "part", "late", "never"]),
        reuse_hint=st.sampled_from([3, 14, 90, 0, 300]),
    )
    def go_on(self, pieces: int, steps: int, skip: int, how: str, reuse_hint: int) -> None:
        """Steps in which all transfers are made and reported, but for one that is made otherwise, or stays.

        The first so many chunks of the same prompt come again.
        """
        if reuse_hint:
            self.arrive(0, 300, 0, reuse_hint, 20, None)
        for _ in range(steps):
            self.step(pieces, 0, True, None, 20)
            if how != "never":
                self.work(1, skip, how)
            self.work(len(self.jobs) - (how == "never"), 0, "good")
            self.report(len(self.done), 0)

    @CALLS.of(rounds=st.sampled_from([4, 12, 30]), lags=st.sampled_from([None, 1]))
    def flow(self, rounds: int, lags: int | None = None) -> None:
        """Steps in which all that is to be done is, in files as well, but by the rank that `lags`: long loads end."""
        for _ in range(rounds):
            self.step(70, 0, True, None, 20)
            self.disk(len(self.jobs) + 999, False, False, 99)
            for job in [each for each in self.jobs if each.rank != lags]:
                self._move(job, "good")
            self.report(len(self.done), 0)

    def _load(self, asked: Asked, hit: int) -> None:
        """Lend what was found."""
        blocks = []
        for mine in asked.blocks:
            blocks.append([KVCacheBlock(block) for block in mine])
            for block in blocks[-1]:
                block.is_null = block.block_id == 0
        before = set(self.scheduler._current_batch_load_jobs)
        self.scheduler.update_state_after_alloc(asked.request, KVCacheBlocks(tuple(blocks)), hit)
        (job,) = set(self.scheduler._current_batch_load_jobs) - before
        into = set(self.scheduler._current_batch_load_jobs[job].dst_spec.block_ids.tolist())
        asked.state = "loading"
        asked.request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        keys = {self._key(asked, group, at): block for group, at, block in asked.each_block() if block in into}
        assert self.scheduler._jobs[job].keys == set(keys)
        self.loads[job] = Loading(asked, keys, {key: set(self.stored[key]) for key in keys}, len(self.rig.workers))

    def _found_on_device(self, asked: Asked, chunks: int) -> None:
        for group, at, block in asked.each_block():
            if at < chunks:
                self.writes.append((block, self._key(asked, group, at), f"device {self.epoch}"))

    def _run(self, meta: Any, scheduled: list[tuple[Asked, int]]) -> None:
        """What the workers are told: flush first, as blocks are written that were read."""
        loads, stores = dict(meta.load_jobs), dict(meta.store_jobs)
        for number in sorted(meta.jobs_to_flush):
            SEEN["flushes"] += 1
            if number in stores:
                self._begin(number, stores.pop(number), is_store=True)
            self._flush(number)
        for block, key, salt in self.writes:
            self._write(block, key, salt)
        self.writes.clear()
        for asked, count in scheduled:
            computed = asked.request.num_computed_tokens
            for group, at, block in asked.each_block():
                if computed // TOKENS <= at < (computed + count) // TOKENS:
                    self._write(block, self._key(asked, group, at), f"request {asked.name}")
        for number, each in stores.items():
            self._begin(number, each, is_store=True)
        parts = self.manager.take_parts()
        for number, each in loads.items():
            self.tickets[each.src_spec.ticket] = number
            SEEN["loads in parts"] += any(each.src_spec.chunks_after)
            self.loads[number].in_parts = any(each.src_spec.chunks_after)
            blocks = each.dst_spec.block_ids.tolist()
            for view in chain(*self.views):
                view[blocks] = POISON
            self._begin(number, each, is_store=False)
        for part in parts:
            what = "stores" if part.is_store else "loads"
            SEEN[f"ends of {what}" if part.spec is None else f"parts of {what}"] += 1
            number = self.tickets[part.first_ticket]
            self.jobs += [Job(number, rank, None, part.is_store, part) for rank in range(len(self.rig.workers))]

    def _flush(self, number: int) -> None:
        """Have this store end, as its blocks are given to others."""
        for job in [each for each in self.jobs if each.number == number]:
            self._move(job, "good")
        for rank, worker in enumerate(self.rig.workers):
            under_way = [job for job in worker._jobs.values() if job.vllm_job == number]
            SEEN["flushes of stores in parts"] += any(job.is_store and job.chunks_left for job in under_way)
            worker.wait({number})
            self._poll(rank)

    def _begin(self, number: int, transfer: Any, *, is_store: bool) -> None:
        if is_store:
            contents = [self.device[block] for block in transfer.src_spec.block_ids.tolist()]
            assert {key for key, _ in contents} == self.scheduler._jobs[number].keys
            self.tickets[transfer.dst_spec.ticket] = number
            SEEN["stores in parts"] += any(transfer.dst_spec.chunks_after)
            for key, salt in contents:
                self.stored[key].add(salt)
        made = [Job(number, rank, transfer, is_store) for rank in range(len(self.rig.workers))]
        self.jobs = [*self.jobs, *made] if is_store else [*made, *self.jobs]

    # ------------------------------------------------------------------ workers

    @CALLS.of(
        share=st.sampled_from([99, 1, 2]),
        skip=st.integers(0, 3),
        how=st.sampled_from(["good", "bad", "part", "late", "good"]),
    )
    def work(self, share: int, skip: int, how: str) -> None:
        """Ranks make transfers: well, not at all, in part, or so that their reports come later than vLLM's report."""
        skip = skip % len(self.jobs) if self.jobs else 0
        for job in [*self.jobs[skip:], *self.jobs[:skip]][:share]:
            self._move(job, how)

    def _move(self, job: Job, how: str) -> None:
        if not any(each is job for each in self.jobs):
            return  # it was made before another
        SEEN[f"{how} {'' if job.part is None else 'part of a '}{'store' if job.is_store else 'load'}"] += 1
        worker = self.rig.workers[job.rank]
        if job.part is not None:
            before = self.jobs[: next(at for at, each in enumerate(self.jobs) if each is job)]
            for each in [each for each in before if (each.number, each.rank) == (job.number, job.rank)]:
                self._move(each, "good")
            self.jobs.remove(job)
            whole = worker._jobs.get(job.part.first_ticket)
            if whole is not None and how == "bad":
                whole.blocks = nowhere(whole.blocks)
            with delayed_reports(worker, self.late if how == "late" else None):
                worker.submit_parts([job.part])
                self._poll(job.rank)
            return
        self.jobs.remove(job)
        source, destination = job.transfer.src_spec, job.transfer.dst_spec
        if not job.is_store:
            self.copying.append(job)
            worker.submit_load(job.number, source, nowhere(destination) if how == "bad" else destination)
            self._poll(job.rank)
            return
        slots, blocks = destination.indices, source.block_ids.tolist()
        if how == "bad":
            self.done.append(job)
            worker.reports.stored(destination.ticket, job.rank, [], slots)
            return
        self.copying.append(job)
        how = "late" if how == "part" and any(destination.chunks_after) else how  # its first blocks may have no slots
        half = len(blocks) // 2 if how == "part" else len(blocks)
        for view in self.views[job.rank]:
            view[blocks[half:]] = POISON
        with delayed_reports(worker, self.late if how == "late" else None, slots[:half]) as kept:
            worker.submit_store(job.number, source, destination)
            self._poll(job.rank)
        for block in blocks[half:]:
            self._write(block, *self.device[block], ranks=[job.rank])
        assert sum(len(good) for _, _, good, _ in kept) == len(slots), "a copy has failed by itself"

    def _poll(self, rank: int) -> None:
        """What a rank is copying is in place, or has failed."""
        worker = self.rig.workers[rank]
        worker.engine.wait(list(worker._parts))
        ended = {result.job_id for result in worker.get_finished()}
        for number in worker.take_failed(ended):
            self.loads[number].failed = True
        for job in [each for each in self.copying if each.rank == rank and each.number in ended]:
            self.copying.remove(job)
            self.done.append(job)

    def report_late(self, count: int) -> None:
        """What was kept back is reported."""
        for ticket, rank, good, bad in self.late[:count]:
            self.rig.workers[rank].reports.stored(ticket, rank, good, bad)
        del self.late[:count]

    @CALLS.of(share=st.sampled_from([99, 1, 2]), skip=st.integers(0, 3))
    def report(self, share: int, skip: int) -> None:
        """The scheduler hears what ranks have ended."""
        skip = skip % len(self.done) if self.done else 0
        told = [*self.done[skip:], *self.done[:skip]][:share]
        counts: dict[int, int] = defaultdict(int)
        for job in told:
            self.done.remove(job)
            counts[job.number] += 1
        said = OffloadingWorkerMetadata(completed_jobs=dict(counts))
        self.scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=said))
        for job in [each for each in told if not each.is_store]:
            self._loaded(job.number)

    def _loaded(self, number: int) -> None:
        load = self.loads[number]
        load.ranks -= 1
        if load.ranks:
            return
        del self.loads[number]
        asked = load.asked
        SEEN["loads of more than 64 chunks"] += len(load.blocks) > 64
        SEEN["loads of finished requests"] += asked.state == "finished"
        SEEN["failed loads"] += load.failed
        SEEN["whole loads in parts"] += load.in_parts and not load.failed
        for key, block in [] if load.failed else load.blocks.items():
            stored = load.valid[key] | (self.stored[key] if load.in_parts else set())
            salts = [salt for salt in stored if holds(self.views, block, key, salt)]
            SEEN["chunks loaded"] += 1
            assert salts, "not the bytes that were stored under this key"
            self.device[block] = (key, salts[0])
        if asked.state == "finished":
            self._free(asked)
        elif load.failed:
            self._free(asked)
            asked.state, asked.request.num_computed_tokens = "waiting", 0
        else:
            asked.state = "loaded"

    # ------------------------------------------------------------------ tiers, time and resets

    @CALLS.of(
        count=st.sampled_from([99, 3, 1]),
        last_first=st.booleans(),
        fails=st.sampled_from([False, False, False, True]),
        reports=st.sampled_from([0, 1, 99]),
    )
    def disk(self, count: int, last_first: bool, fails: bool, reports: int) -> None:
        """The file tier moves; and of what was kept back, so many `reports` come."""
        self.report_late(reports)
        if self.tier is not None:
            self.tier.move(count, Status.IO_ERROR if fails else Status.OK, last_first=last_first)
            self.runtime.pump()

    @CALLS.of(
        what=st.sampled_from(["time", "abort", "reset"]),
        seconds=st.sampled_from([0.3, 1.5, 40.0]),
        which=st.integers(0, 3),
        of=st.sampled_from(["connector", "all", "device"]),
    )
    def disturb(self, what: str, seconds: float, which: int, of: str) -> None:
        if what == "time":
            self.skipped += seconds
        elif what == "abort":
            self.abort(which)
        else:
            self.reset(of)

    def reset(self, of: str) -> None:
        """vLLM empties its prefix cache, with what runs or as far as it can, or that of the connector, or both."""
        if of == "all" and not self.loads and not self.scheduler._current_batch_jobs_to_flush:
            for asked in [each for each in self.asked if each.state == "running"]:
                self._preempt(asked)
        if not self.loads and not any(any(each.blocks) for each in self.asked):
            self.manager.device_was_reset()
            self.epoch += 1
        if of != "device" and not self.scheduler._current_batch_jobs_to_flush:  # vLLM allows one between two steps
            SEEN["resets with loads"] += bool(self.loads)
            SEEN["resets with parts"] += any(load.in_parts for load in self.loads.values())
            SEEN["resets with stores"] += any(job.is_store for job in self.jobs)
            self.scheduler.reset_cache()
            self.stored.clear()

    @rule(call=st.deferred(lambda: st.one_of(CALLS.made)))
    def call(self, call: tuple[str, dict[str, Any]]) -> None:
        getattr(self, call[0])(**call[1])

    # ------------------------------------------------------------------ device

    def _key(self, asked: Asked, group: int, at: int) -> OffloadKey:
        return make_offload_key(asked.request.block_hashes[at], self.groups[group].number)

    def _allocate(self, asked: Asked, tokens: int, computed: int) -> tuple[list[int], ...]:
        """Blocks for so many `tokens`; those that the window of the next one does not reach are given back."""
        fresh = []
        for group, mine in zip(self.groups, asked.blocks, strict=True):
            first = 0 if group.window is None else max(0, computed - group.window + 1) // TOKENS
            for at, block in enumerate(mine[:first]):
                if block:
                    self.free.append(block)
                    mine[at] = 0
            before = len(mine)
            mine += [0 if at < first else self.free.pop() for at in range(before, -(-tokens // TOKENS))]
            fresh.append(mine[before:])
        return tuple(fresh)

    def _free(self, asked: Asked) -> None:
        self.free += [block for _, _, block in asked.each_block()]
        asked.blocks = [[] for _ in self.groups]

    def _write(self, block: int, key: OffloadKey, salt: str, ranks: Sequence[int] | None = None) -> None:
        self.device[block] = (key, salt)
        write_block(self.views, block, key, salt, range(len(self.views)) if ranks is None else ranks)

    # ------------------------------------------------------------------ what holds

    @invariant()
    def control_plane_is_sound(self) -> None:
        if hasattr(self, "rig"):
            assert self.runtime.fault is None
            self.rig.cache.check_integrity()

    def teardown(self) -> None:
        try:
            if hasattr(self, "scheduler") and sys.exc_info()[0] is None:  # nothing has failed
                self._end_all()
        finally:
            if hasattr(self, "rig"):
                if self.tier is not None:
                    self.tier.at_once = True
                self.runtime.clock = time.monotonic
                self.rig.close()
            self.patch.undo()
            self.directory.cleanup()

    def _end_all(self) -> None:
        for asked in list(self.asked):
            self._finish(asked, RequestStatus.FINISHED_ABORTED)
        if self.tier is not None:
            self.tier.at_once = True
        for step in range(400):  # a long prompt is stored in many parts
            self.step(1, 0, True, None, 1)
            self.work(len(self.jobs), 0, "good")
            self.report_late(len(self.late))
            self.report(len(self.done), 0)
            if not (pending := self.scheduler.has_pending_push_work()) and step > 20:
                break
        assert not pending
        manager, cache = self.manager, self.rig.cache
        self.runtime.pump()
        assert (cache.leases, cache.protected, cache.jobs_in_flight) == (0, 0, 0)
        assert {state for pool in cache._state.pools for state in pool.state} <= {FREE, READY}
        assert not (manager._store_jobs or manager._store_jobs.by_first_key or manager._unreported or manager._requests)
        assert not self.scheduler._req_status
