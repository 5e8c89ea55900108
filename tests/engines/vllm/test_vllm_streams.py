"""Loads of more chunks than host memory has room for: vLLM's own scheduler part, our manager, workers of two ranks.

Red when slots of a part are given back before all ranks have read it, and when parts are lent to a load that has ended.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from sequences_kit import content
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock, get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_offload.base import GPULoadStoreSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus
from vllm_kit import PAGE, TOKENS, Group, Rig, file_settings, vllm_config

from longshore.boundary import FILE, HOST, Slots
from longshore.engines.vllm import manager as manager_module
from longshore.engines.vllm.worker import JobPart, SlotsSpec
from longshore.runtime.rank_reports import DONE, FAILED

CHUNKS, HOST_CHUNKS = 28, 12
"""Of the prompt, and of host memory."""


class Engine:
    """Steps of an engine: a prompt is stored piece by piece; then it is loaded, by ranks that take their time."""

    def __init__(self, rig: Rig) -> None:
        self.rig, self.manager = rig, rig.manager
        self.manager.pass_parts(loads=True)
        spec: Any = rig.specs[0]
        spec.get_manager = lambda: rig.manager
        for worker in rig.workers:
            worker.reports_failures = True
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(TOKENS, sha256)
        groups = [KVCacheGroupSpec(list(group.names), group.get_kv_cache_spec(None)) for group in rig.groups]
        config = KVCacheConfig(num_blocks=len(rig.tensors[0][0]), kv_cache_tensors=[], kv_cache_groups=groups)
        vllm = vllm_config(rig.groups, {"vllm": {"parallel_config.world_size": len(rig.workers)}})
        self.scheduler = OffloadingConnectorScheduler(spec, vllm, config)
        self.numbers, self.free = itertools.count(1), itertools.count(1)
        self.told: list[list[Any]] = [[] for _ in rig.workers]
        """What each rank was told, step by step, and has not taken in."""
        self.ended: Counter[int] = Counter()
        self.failed: set[int] = set()
        self.blocks: dict[str, list[list[KVCacheBlock]]] = {}
        self.parts_of_stores = 0
        self.after_flush: Callable[[int], None] = lambda rank: None

    def request(self, chunks: int, *, first: int = 1) -> Request:
        tokens = [first + at for at in range(chunks * TOKENS + 5)]
        request = Request(f"{next(self.numbers)}", tokens, SamplingParams(max_tokens=1), None, block_hasher=self.hasher)
        self.scheduler.on_new_request(request)
        return request

    def step(self, ranks: tuple[int, ...] = (0, 1), **what: Any) -> None:
        """A step is planned, and these ranks take in all that they were told until then."""
        about = {"new": (), "scheduled": {}, "finished": set(), **what}
        meta = self.scheduler.build_connector_meta(
            SimpleNamespace(
                scheduled_new_reqs=about["new"],
                scheduled_cached_reqs=SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set()),
                num_scheduled_tokens=about["scheduled"],
                finished_req_ids=about["finished"],
                preempted_req_ids=None,
                kv_cache_block_copies=None,
                kv_connector_block_state=None,
            )
        )
        parts = self.manager.take_parts()
        self.parts_of_stores += sum(part.is_store for part in parts)
        for rank, told in enumerate(self.told):
            told.append((meta, parts))
            if rank in ranks:
                self.take_in(rank)

    def take_in(self, rank: int) -> None:
        worker, counts = self.rig.workers[rank], Counter[int]()
        for meta, parts in self.told[rank]:
            if meta.jobs_to_flush:
                worker.wait(meta.jobs_to_flush)
                self.after_flush(rank)
            for job, each in meta.store_jobs.items():
                worker.submit_store(job, each.src_spec, each.dst_spec)
            for job, each in meta.load_jobs.items():
                worker.submit_load(job, each.src_spec, each.dst_spec)
            worker.go_on(parts)
            worker.engine.wait(list(worker._jobs))
            for result in worker.get_finished():
                counts[result.job_id] += 1
        self.told[rank].clear()
        self.failed |= worker.take_failed(range(1000))
        self.ended += counts
        said = OffloadingWorkerMetadata(completed_jobs=dict(counts))
        self.scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=said))

    def store(self, chunks: int, *, first: int = 1) -> None:
        """Compute a prompt a few chunks at a time, each of which is in files before the next."""
        for end in [*range(HOST_CHUNKS // 2, chunks, HOST_CHUNKS // 2), chunks]:
            request = self.request(end, first=first)
            blocks = self._allocate(request, 0)
            for rank, group, block, at in self._each(request, blocks):
                for layer, tensor in enumerate(self.rig.tensors[rank][: group.layers]):
                    tensor[block, : PAGE - 8] = self._content(request, group, at, rank, layer)
            ids = tuple([block.block_id for block in mine] for mine in blocks)
            new = SimpleNamespace(req_id=request.request_id, block_ids=ids)
            self.step(new=[new], scheduled={request.request_id: request.num_tokens})
            self.finish(request)
            self.step()
            assert self.manager.flush(10.0)

    def compute(self, chunks: int, pieces: int, *, first: int = 1) -> Request:
        """Compute a prompt, so many chunks in a step; its stores, which have a minute to get slots, have not ended."""
        self.manager._stores._patience = 60.0
        request = self.request(chunks, first=first)
        blocks = self.blocks[request.request_id] = self._allocate(request, 0)
        self.fill(request, 0, 1)
        ids = tuple([block.block_id for block in mine] for mine in blocks)
        new = [SimpleNamespace(req_id=request.request_id, block_ids=ids)]
        while request.num_computed_tokens < request.num_tokens:
            count = min(pieces * TOKENS, request.num_tokens - request.num_computed_tokens)
            self.step(new=new, scheduled={request.request_id: count})
            request.num_computed_tokens += count
            new = []
        for _ in range(20 * (len(blocks) - 1)):  # it decodes: windows for which there was no room are offered again
            self.step(scheduled={request.request_id: 0})
            time.sleep(0.005)
        return request

    def fill(self, request: Request, *ranks: int) -> None:
        """Compute the blocks of a prompt."""
        for rank, group, block, at in self._each(request, self.blocks[request.request_id]):
            for layer, tensor in enumerate(self.rig.tensors[rank][: group.layers]):
                if rank in ranks:
                    tensor[block, : PAGE - 8] = self._content(request, group, at, rank, layer)

    def finish(self, request: Request, status: RequestStatus = RequestStatus.FINISHED_STOPPED) -> None:
        self.manager.will_finish(request.request_id)
        request.num_computed_tokens = request.num_tokens if status is RequestStatus.FINISHED_STOPPED else 0
        request.status = status
        self.scheduler.request_finished(request)
        self.step(finished={request.request_id})

    def begin(self, request: Request) -> int:
        """Ask what the tiers have of a prompt, and have that loaded into blocks; how many chunks."""
        hit, _ = self.scheduler.get_num_new_matched_tokens(request, 0)
        if not hit:
            return 0
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        blocks = self._allocate(request, hit)
        for rank, _, block, _ in self._each(request, blocks):
            for tensor in self.rig.tensors[rank]:
                tensor[block] = 0x55
        self.scheduler.update_state_after_alloc(request, KVCacheBlocks(tuple(blocks)), hit)
        self.blocks[request.request_id] = blocks
        return hit // TOKENS

    def is_loading(self, request: Request) -> bool:
        status = self.scheduler._req_status.get(request.request_id)
        return status is not None and any(not self.scheduler._jobs[job].is_store for job in status.transfer_jobs)

    def wrong(self, request: Request, hit: int) -> int:
        """How many blocks of the first `hit` chunks do not have what was computed."""
        return sum(
            not np.array_equal(
                tensor[block, : PAGE - 8].numpy().view(np.uint8), self._content(request, group, at, rank, layer, False)
            )
            for rank, group, block, at in self._each(request, self.blocks[request.request_id])
            if at < hit
            for layer, tensor in enumerate(self.rig.tensors[rank][: group.layers])
        )

    def _content(self, request: Request, group: Group, at: int, rank: int, layer: int, signed: bool = True) -> Any:
        import torch

        key = bytes(request.block_hashes[at]) + bytes([group.number])
        made = content(key, "", rank, layer)
        return torch.from_numpy(made.view(np.int8).copy()) if signed else made

    def _allocate(self, request: Request, hit: int) -> list[list[KVCacheBlock]]:
        blocks = []
        for group in self.rig.groups:
            first = 0 if group.window is None else max(0, hit - group.window + 1) // TOKENS
            mine = [
                KVCacheBlock(0 if at < first else next(self.free)) for at in range(-(-request.num_tokens // TOKENS))
            ]
            for block in mine[:first]:
                block.is_null = True
            blocks.append(mine)
        return blocks

    def _each(self, request: Request, blocks: list[list[KVCacheBlock]]) -> list[tuple[int, Group, int, int]]:
        return [
            (rank, group, block.block_id, at)
            for rank in range(len(self.rig.workers))
            for group, mine in zip(self.rig.groups, blocks, strict=True)
            for at, block in enumerate(mine[: request.num_tokens // TOKENS])
            if not block.is_null
        ]


@pytest.fixture
def engine(request: pytest.FixtureRequest, rigs: Any, tmp_path: Path) -> Engine:
    """Whose files have a prompt; with a sliding window beside full attention if asked for."""
    groups = [Group(0), Group(1, window=40)][: getattr(request, "param", 1)]
    size = f"{2 * HOST_CHUNKS * 4096}"
    settings = {**file_settings(tmp_path), "file_size": "4MiB", "backup": "write_through", "gate": False}
    vllm = {"parallel_config.world_size": 2}
    rig = rigs(world=2, groups=groups, blocks=2000, host_size=size, load_timeout=1.0, vllm=vllm, **settings)
    assert rig.cache.stats()[0].slots == HOST_CHUNKS
    made = Engine(rig)
    made.store(CHUNKS)
    return made


def settled(engine: Engine) -> None:
    """Nothing is held, or in flight."""
    for _ in range(5):
        engine.step()
    assert engine.manager.flush(10.0)
    assert engine.rig.cache.held == 0
    assert engine.rig.cache.jobs_in_flight == 0
    assert not len(engine.manager._loads)
    assert not engine.manager._requests
    assert not engine.manager._stale
    engine.rig.cache.check_integrity()


def finish_load(engine: Engine, *requests: Request, ranks: tuple[int, ...] = (0, 1)) -> int:
    """Steps until nothing is loaded any more for `requests`; how many."""
    for steps in range(3000):
        if not any(map(engine.is_loading, requests)):
            return steps
        engine.step(ranks)
        time.sleep(0.001)
    raise AssertionError("a load does not end")


@pytest.mark.parametrize("engine", [1, 2], indirect=True, ids=["full attention", "a window"])
def test_a_prompt_longer_than_host_memory_is_loaded_whole(engine: Engine) -> None:
    request = engine.request(CHUNKS)
    assert engine.begin(request) == CHUNKS
    assert sum(engine.manager.loaded_tokens.values()) <= HOST_CHUNKS * TOKENS, "what was lent"
    assert finish_load(engine, request) > 3, "in parts"
    assert not engine.failed
    loaded = engine.manager.loaded_tokens
    assert loaded[HOST] + loaded[FILE] == CHUNKS * TOKENS
    assert loaded[FILE] >= (CHUNKS - HOST_CHUNKS) * TOKENS
    assert engine.wrong(request, CHUNKS) == 0
    engine.finish(request)
    settled(engine)


@pytest.mark.parametrize("engine", [1, 2], indirect=True, ids=["full attention", "a window"])
def test_two_are_loaded_whole_at_once(engine: Engine) -> None:
    engine.store(CHUNKS, first=1000)
    requests = [engine.request(CHUNKS), engine.request(CHUNKS, first=1000)]
    assert [engine.begin(each) for each in requests] == [CHUNKS] * 2
    finish_load(engine, *requests)
    assert not engine.failed
    assert [engine.wrong(each, CHUNKS) for each in requests] == [0, 0]
    for each in requests:
        engine.finish(each)
    settled(engine)


@pytest.mark.parametrize("engine", [1, 2], indirect=True, ids=["full attention", "a window"])
def test_slots_are_given_back_when_the_last_rank_has_read_them(engine: Engine) -> None:
    request = engine.request(CHUNKS)
    assert engine.begin(request) == CHUNKS
    for _ in range(50):
        engine.step(ranks=(0,))
        (load,) = engine.manager._loads._loads.values()
        assert len(load.parts) > 0, "the second rank has read nothing"
        assert sum(len(part.slots) for part in load.parts) <= HOST_CHUNKS
    assert load.rest
    engine.take_in(1)
    finish_load(engine, request)
    assert not engine.failed
    assert engine.wrong(request, CHUNKS) == 0
    engine.finish(request)
    settled(engine)


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_an_aborted_request_is_loaded_no_further(engine: Engine, steps: int) -> None:
    request = engine.request(CHUNKS)
    assert engine.begin(request) == CHUNKS
    for _ in range(steps):
        engine.step(ranks=(0,))
    engine.finish(request, RequestStatus.FINISHED_ABORTED)
    assert finish_load(engine, request) <= 3
    settled(engine)
    again = engine.request(CHUNKS)
    assert engine.begin(again) == CHUNKS
    finish_load(engine, again)
    assert engine.wrong(again, CHUNKS) == 0


@pytest.mark.parametrize("steps", [1, 4])
def test_a_load_that_a_reset_cuts_off_has_failed(engine: Engine, steps: int) -> None:
    request = engine.request(CHUNKS)
    assert engine.begin(request) == CHUNKS
    for _ in range(steps):
        engine.step(ranks=(0,))
    (job,) = engine.scheduler._req_status[request.request_id].transfer_jobs
    engine.scheduler.reset_cache()
    for _ in range(3):
        engine.step(ranks=(0,))
        assert engine.rig.cache.jobs_in_flight > 0, "the second rank may still read what it was lent"
    for _ in range(3):
        engine.step()
    assert engine.ended[job] == 2, "both ranks have reported it"
    assert job in engine.failed
    assert engine.begin(request) == 0, "nothing is stored any more"
    engine.finish(request, RequestStatus.FINISHED_ABORTED)
    settled(engine)


def test_a_part_that_cannot_be_copied_fails_the_load(engine: Engine) -> None:
    request = engine.request(CHUNKS)
    assert engine.begin(request) == CHUNKS
    engine.step()
    worker: Any = engine.rig.workers[1]
    submit, worker._try = worker._try, lambda job: False
    finish_load(engine, request)
    worker._try = submit
    assert engine.failed
    assert engine.begin(request) == 0, "it is computed"
    engine.finish(request, RequestStatus.FINISHED_ABORTED)
    settled(engine)


def test_a_rotten_record_fails_the_load(engine: Engine, tmp_path: Path) -> None:
    (segment,) = (tmp_path / "tier").glob("segment*")
    content = np.fromfile(segment, np.uint8)
    content[2048::4096] ^= 1
    content.tofile(segment)
    request = engine.request(CHUNKS)
    assert engine.begin(request) == CHUNKS
    finish_load(engine, request)
    assert engine.failed
    engine.finish(request, RequestStatus.FINISHED_ABORTED)
    settled(engine)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_tier_host_that_dies_or_hangs_fails_the_load(engine: Engine, how: signal.Signals) -> None:
    file = cast(Any, engine.manager._store.file)
    request = engine.request(CHUNKS)
    process = file._supervisor.process.pid
    os.kill(process, how)
    assert engine.begin(request) == CHUNKS
    finish_load(engine, request)
    assert engine.failed
    if how is signal.SIGSTOP:
        os.kill(process, signal.SIGCONT)
    engine.finish(request, RequestStatus.FINISHED_ABORTED)
    settled(engine)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_tier_host_that_dies_or_hangs_between_two_parts_fails_the_load(engine: Engine, how: signal.Signals) -> None:
    file = cast(Any, engine.manager._store.file)
    request = engine.request(CHUNKS)
    assert engine.begin(request) == CHUNKS
    (load,) = engine.manager._loads._loads.values()
    first = sum(load.lent)
    while sum(load.lent) == first:
        engine.step()
        time.sleep(0.001)
    process, arrived = file._supervisor.process.pid, sum(load.lent)
    os.kill(process, how)
    assert len(load.rest) > HOST_CHUNKS // 2, "more than has been read ahead"
    finish_load(engine, request)
    if how is signal.SIGSTOP:
        os.kill(process, signal.SIGCONT)
        assert engine.failed
    else:  # a machine that was busy may find it running again
        assert file.failures["tier_host"] == 1
    assert engine.wrong(request, arrived if engine.failed else CHUNKS) == 0
    engine.finish(request, RequestStatus.FINISHED_ABORTED)
    settled(engine)


def test_after_a_fault_of_the_control_plane_open_loads_fail(engine: Engine) -> None:
    request = engine.request(CHUNKS)
    assert engine.begin(request) == CHUNKS
    engine.step()
    engine.manager._runtime.fail(RuntimeError("made by the test"))
    finish_load(engine, request)
    assert engine.failed


def test_only_what_is_worth_reading_is_loaded(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager_module, "load_limit", lambda *_: 20 * TOKENS)
    request = engine.request(CHUNKS)
    assert engine.begin(request) == 20
    finish_load(engine, request)
    engine.finish(request, RequestStatus.FINISHED_ABORTED)
    settled(engine)


def test_without_the_connector_as_much_is_loaded_as_fits(engine: Engine) -> None:
    engine.manager.may_stream = False
    request = engine.request(CHUNKS)
    give_up = time.monotonic() + 10.0
    while not (found := engine.begin(request)) and time.monotonic() < give_up:
        engine.step()
    assert 0 < found <= HOST_CHUNKS
    finish_load(engine, request)
    assert not engine.failed
    assert engine.wrong(request, found) == 0
    engine.finish(request, RequestStatus.FINISHED_ABORTED)
    settled(engine)


def begin_when_known(engine: Engine, request: Request) -> int:
    """Steps until the request has not to wait any more; then as `Engine.begin`."""
    deadline = time.monotonic() + 30.0
    while engine.scheduler.get_num_new_matched_tokens(request, 0)[0] is None:
        engine.step()
        assert time.monotonic() < deadline
    return engine.begin(request)


def finish_stores(engine: Engine) -> int:
    """Steps until nothing is stored any more; how many."""
    for steps in range(3000):
        if not len(engine.manager._stores):
            return steps
        engine.step()
        time.sleep(0.001)
    raise AssertionError("a store does not end")


@pytest.mark.parametrize("engine", [1, 2], indirect=True, ids=["full attention", "a window"])
@pytest.mark.parametrize("pieces", [CHUNKS, 5])
def test_a_prompt_longer_than_host_memory_is_stored_whole(engine: Engine, pieces: int) -> None:
    stored = engine.compute(CHUNKS, pieces, first=1000)
    engine.finish(stored)
    finish_stores(engine)
    assert engine.parts_of_stores > 1 or pieces < HOST_CHUNKS
    assert engine.manager._stores.cut_off == 0, dict(engine.rig.cache.counters.drops)
    request = engine.request(CHUNKS, first=1000)
    assert begin_when_known(engine, request) == CHUNKS
    finish_load(engine, request)
    assert engine.wrong(request, CHUNKS) == 0
    engine.finish(request)
    settled(engine)


@pytest.mark.parametrize("how", ["in time", "late"])
def test_a_lookup_waits_for_chunks_that_are_still_stored(engine: Engine, how: str) -> None:
    """Of a prompt that comes again before all of it has a slot; not for longer than `load_timeout`."""
    engine.finish(engine.compute(CHUNKS, CHUNKS, first=1000))
    assert engine.manager._stores.coming
    request = engine.request(CHUNKS, first=1000)
    assert engine.scheduler.get_num_new_matched_tokens(request, 0)[0] is None, "it waits"
    if how == "late":
        engine.manager._stores.proceed = lambda *_: None  # type: ignore[method-assign]
    hit = begin_when_known(engine, request)
    assert hit == (CHUNKS if how == "in time" else HOST_CHUNKS)
    finish_load(engine, request)
    assert engine.wrong(request, hit) == 0
    engine.finish(request)
    if how == "late":
        del engine.manager._stores.proceed
    settled(engine)


def test_only_what_is_worth_reading_is_waited_for(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager_module, "load_limit", lambda *_: HOST_CHUNKS * TOKENS)
    engine.finish(engine.compute(CHUNKS, CHUNKS, first=1000))
    assert engine.manager._stores.coming
    request = engine.request(CHUNKS, first=1000)
    engine.step()
    assert engine.scheduler.get_num_new_matched_tokens(request, 0)[0] == HOST_CHUNKS * TOKENS
    engine.finish(request, RequestStatus.FINISHED_ABORTED)
    finish_stores(engine)
    settled(engine)


@pytest.mark.parametrize("ranks", [(0, 1), (0,)], ids=["both ranks", "one rank"])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_store_ends_when_its_blocks_are_given_to_others(engine: Engine, steps: int, ranks: tuple[int, ...]) -> None:
    """What has no slot by then is not stored; what is copied later would be another's bytes."""
    stored = engine.compute(CHUNKS, CHUNKS, first=1000)
    engine.finish(stored)
    for _ in range(steps):
        engine.step(ranks)
    assert engine.manager._stores.coming, "there are parts to come"
    (job,) = engine.scheduler._jobs
    other = engine.request(CHUNKS, first=5000)
    blocks = engine.blocks[other.request_id] = engine.blocks[stored.request_id]
    ids = tuple([block.block_id for block in mine] for mine in blocks)
    new = SimpleNamespace(req_id=other.request_id, block_ids=ids)
    engine.step((), new=[new], scheduled={other.request_id: TOKENS})
    engine.after_flush = lambda rank: engine.fill(other, rank)
    for rank in (0, 1):
        engine.take_in(rank)
    finish_stores(engine)
    assert engine.ended[job] == 2
    engine.finish(other, RequestStatus.FINISHED_ABORTED)
    request = engine.request(CHUNKS, first=1000)
    hit = begin_when_known(engine, request)
    assert 0 < hit < CHUNKS
    finish_load(engine, request)
    assert engine.wrong(request, hit) == 0
    engine.finish(request)
    settled(engine)


CUTS: dict[str, Callable[[Engine], Callable[[], None] | None]] = {
    "weights": lambda engine: engine.rig.workers[0].reports.weights_changed(0),
    "reset": lambda engine: engine.scheduler.reset_cache(),
    "sleep": lambda engine: engine.rig.workers[1].before_device_release(),
    "kill": lambda engine: kill_tier_host(engine, signal.SIGKILL),
    "hang": lambda engine: kill_tier_host(engine, signal.SIGSTOP),
    "fault": lambda engine: engine.manager._runtime.fail(RuntimeError("made by the test")),
}


def kill_tier_host(engine: Engine, how: signal.Signals) -> Callable[[], None]:
    process = cast(Any, engine.manager._store.file)._supervisor.process.pid
    os.kill(process, how)
    return lambda: os.kill(process, signal.SIGCONT) if how is signal.SIGSTOP else None


@pytest.mark.parametrize("what", [*CUTS, "part"])
def test_a_store_that_something_cuts_off_ends(engine: Engine, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.finish(engine.compute(CHUNKS, CHUNKS, first=1000))
    engine.step((0,))
    assert engine.manager._stores.coming
    (job,) = engine.scheduler._jobs
    with monkeypatch.context() as patch:
        if what == "part":
            patch.setattr(engine.rig.workers[1], "_try", lambda part: False)
        undo = CUTS[what](engine) if what != "part" else None
        engine.manager._stores._patience = 1.0
        for _ in range(3000):
            engine.step()
            time.sleep(0.001)
            if engine.ended[job] == 2:
                break
    assert engine.ended[job] == 2, "both ranks have reported it"
    assert not any(worker._under_way for worker in engine.rig.workers)
    if what == "fault":
        return
    assert engine.manager._stores.cut_off > 0 or what == "kill", "another tier host has written the others"
    if what == "sleep":
        engine.rig.workers[1].after_device_restore()
    if undo is not None:
        undo()
    request = engine.request(CHUNKS, first=1000)
    hit = begin_when_known(engine, request)
    assert hit == 0 or what not in ("weights", "reset")
    finish_load(engine, request)
    assert engine.failed or not hit or engine.wrong(request, hit) == 0
    engine.finish(request, RequestStatus.FINISHED_ABORTED)
    settled(engine)


def test_a_store_that_lacks_a_block_has_no_parts(engine: Engine) -> None:
    """Which blocks are those of a later part would be a guess."""
    worker, blocks = engine.rig.workers[0], [1, 2, 3, 5, 6, 7]
    for ticket, mine in ((900, blocks), (950, blocks[:-1])):
        first, second = (SlotsSpec(ticket + at, (Slots("host", 0, (at, at + 1, at + 2)),)) for at in (0, 5))
        whole = GPULoadStoreSpec(mine, group_sizes=[len(mine)], block_indices=[0])
        worker.submit_store(ticket, whole, replace(first, left=(3,)))
        worker.go_on([JobPart(ticket, replace(second, begins=(3,)), is_store=True)])
        worker.wait({ticket})
        assert [each.job_id for each in worker.get_finished()] == [ticket]
        for part in (first, second):
            said = worker.reports.outcomes(part.job, part.indices)[:, 0]
            assert (said == (DONE if ticket == 900 else FAILED)).all()
