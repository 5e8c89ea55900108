"""Loads in parts meet sleeps and resets: vLLM's own scheduler part, our manager, workers of two ranks.

Red when a part that was ordered before a sleep is copied after it, and when what a load holds is kept at its end.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from parts_kit import CHUNKS, HOST_CHUNKS, Engine, finish_load, settled
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.request import Request, RequestStatus
from vllm_kit import Group, file_settings, keys_of

from longshore.cache import MissReason
from longshore.engines.vllm import tiers as tiers_module
from longshore.runtime import stack


def make(rigs: Any, path: Path, groups: int = 1, **more: Any) -> Engine:
    """Whose files have a prompt that is longer than host memory."""
    settings = {**file_settings(path), "file_size": "4MiB", "backup": "write_through", "gate": False, **more}
    vllm = {"parallel_config.world_size": 2}
    size = f"{2 * HOST_CHUNKS * 4096}"
    rig = rigs(
        world=2,
        groups=[Group(0), Group(1, window=40)][:groups],
        blocks=12000,
        host_size=size,
        load_timeout=1.0,
        vllm=vllm,
        **settings,
    )
    made = Engine(rig)
    made.store(CHUNKS)
    return made


def reset(engine: Engine, level: int = 0) -> None:
    token = tiers_module._sleep_level.set(level)
    try:
        engine.scheduler.reset_cache()
        engine.manager.device_was_reset()
    finally:
        tiers_module._sleep_level.reset(token)


def sleep(engine: Engine, level: int = 1) -> None:
    reset(engine, level)
    for rank, worker in enumerate(engine.rig.workers):
        worker.before_device_release()
        if level > 1:
            worker.reports.weights_changed(rank)
        for tensor in engine.rig.tensors[rank]:
            tensor.fill_(0x33)


def wake(engine: Engine) -> None:
    for worker in engine.rig.workers:
        worker.after_device_restore()


def begin(engine: Engine, request: Request) -> int:
    """How many chunks are promised, once they are in host memory or the load streams."""
    for _ in range(200):
        found = engine.begin(request)
        if found:
            break
        engine.step()
    return found


def load_whole(engine: Engine) -> None:
    request = engine.request(CHUNKS)
    before = set(engine.failed)
    assert begin(engine, request) == CHUNKS
    finish_load(engine, request)
    assert engine.failed == before
    assert engine.wrong(request, CHUNKS) == 0
    engine.finish(request)


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        ("copy fails", "DEVICE_ERROR"),
        ("weights change", "CANCELLED"),
        ("sleep", "CANCELLED"),
        ("files hang", "DEADLINE"),
    ],
)
def test_chunks_of_a_failed_load_are_misses_by_cause(rigs: Any, tmp_path: Path, event: str, reason: str) -> None:
    engine = make(rigs, tmp_path)
    counters, workers = engine.rig.cache.counters, engine.rig.workers
    chunks = CHUNKS if event == "files hang" else HOST_CHUNKS // 2
    request, hits = engine.request(chunks), counters.hits.total()
    assert begin(engine, request) == chunks
    before = counters.misses.copy()
    if event == "copy fails":
        workers[1]._submit = lambda part: False
    elif event == "weights change":
        engine.step(ranks=())
        for rank, worker in enumerate(workers):
            worker.reports.weights_changed(rank)
    elif event == "sleep":
        engine.step(ranks=())
        sleep(engine)
    child = engine.manager._tiers.file._supervisor.process.pid
    if event == "files hang":
        os.kill(child, signal.SIGSTOP)
    try:
        finish_load(engine, request)
    finally:
        os.kill(child, signal.SIGCONT)
    wake(engine)
    for _ in range(6):
        engine.step()
    missed = counters.misses - before
    if event == "files hang":
        assert counters.hits.total() - hits + missed.total() == chunks
        assert set(missed) == {MissReason[reason]}
    else:
        assert missed == {MissReason[reason]: chunks}
        assert counters.hits.total() == hits


@pytest.mark.parametrize("keep", ["all", "file"])
@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("lag", [True, False])
def test_a_sleep_cuts_off_a_load_in_parts(rigs: Any, tmp_path: Path, keep: str, steps: int, lag: bool) -> None:
    engine = make(rigs, tmp_path, sleep_keep=keep)
    request = engine.request(CHUNKS)
    assert engine.begin(request) == CHUNKS
    for _ in range(steps):
        engine.step(ranks=(0,) if lag else (0, 1))
    (job,) = engine.scheduler._req_status[request.request_id].transfer_jobs
    sleep(engine)
    wake(engine)
    for _ in range(5):
        engine.step()
    assert engine.ended[job] == 2
    assert job in engine.failed
    for rank, _, block, _ in engine._each(request, engine.blocks[request.request_id]):
        for tensor in engine.rig.tensors[rank]:
            assert (tensor[block] == 0x33).all(), "written after the sleep"
    engine.finish(request, RequestStatus.FINISHED_ABORTED)
    settled(engine)
    load_whole(engine)
    settled(engine)


@pytest.mark.parametrize("keep", ["all", "file"])
@pytest.mark.parametrize("asleep", [True, False])
def test_an_engine_closes_with_a_load_in_parts(rigs: Any, tmp_path: Path, keep: str, asleep: bool) -> None:
    engine = make(rigs, tmp_path, sleep_keep=keep)
    request = engine.request(CHUNKS)
    assert engine.begin(request) == CHUNKS
    for _ in range(2):
        engine.step(ranks=(0,))
    if asleep:
        sleep(engine)
    assert len(engine.manager._tickets)
    engine.manager.shutdown()
    assert engine.rig.cache.leases == engine.rig.cache.protected == 0
    assert engine.rig.cache.jobs_in_flight == 0
    assert engine.manager._runtime.fault is None


def test_flush_does_not_publish_a_store_in_flight_at_sleep(rigs: Any) -> None:
    rig = rigs(world=1)
    context = rig.request("writer", keys := keys_of(3))
    rig.manager.prepare_store(keys, context)
    token = tiers_module._sleep_level.set(1)
    rig.manager.reset_cache()
    tiers_module._sleep_level.reset(token)
    rig.manager.on_reset_flushed()
    other = rig.request("reader", keys)
    assert rig.lookup(keys, other) == [LookupResult.MISS] * 3
    rig.cache.check_integrity()


class Life:
    """Requests that are loaded or stored, and what cuts them off; ranks take in at different times what they are told.

    `loads` has for each request that waits its hit, in chunks, and vLLM's job.
    """

    def __init__(self, engine: Engine, draw: random.Random) -> None:
        self.engine, self.draw = engine, draw
        self.loads: dict[Request, tuple[int, int]] = {}

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.draw.choice([(), (0,), (1,), (0, 1)])

    def load(self) -> None:
        request = self.engine.request(CHUNKS, first=self.draw.choice([1, 1000, 2000]))
        if hit := self.engine.begin(request):
            (job,) = self.engine.scheduler._req_status[request.request_id].transfer_jobs
            self.loads[request] = hit, job
        else:
            self.engine.finish(request, RequestStatus.FINISHED_ABORTED)

    def compute(self) -> None:
        engine = self.engine
        request = engine.request(self.draw.choice([5, 12, CHUNKS]), first=self.draw.choice([1, 1000, 2000]))
        blocks = engine.blocks[request.request_id] = engine._allocate(request, 0)
        engine.fill(request, *range(len(engine.rig.workers)))
        ids = tuple([block.block_id for block in mine] for mine in blocks)
        new = SimpleNamespace(req_id=request.request_id, block_ids=ids)
        engine.step(self.ranks, new=[new], scheduled={request.request_id: request.num_tokens})
        request.num_computed_tokens, request.status = request.num_tokens, RequestStatus.FINISHED_STOPPED
        engine.scheduler.request_finished(request)
        engine.step(self.ranks, finished={request.request_id})

    def step(self) -> None:
        self.engine.step()

    def lag(self) -> None:
        self.engine.step(self.ranks)

    def abort(self) -> None:
        if self.loads:
            request = self.draw.choice(list(self.loads))
            del self.loads[request]
            self.engine.finish(request, RequestStatus.FINISHED_ABORTED)

    def weights(self) -> None:
        self.engine.rig.workers[0].reports.weights_changed(0)
        self.engine.step()
        self.engine.manager.device_was_reset()

    def sleep(self) -> None:
        self.engine.step(self.ranks)
        sleep(self.engine, self.draw.choice([1, 1, 2]))
        self._go_on()

    def reset(self) -> None:
        self.engine.step(self.ranks)
        reset(self.engine)
        self._go_on()

    def _go_on(self) -> None:
        while self.loads:
            self.engine.finish(self.loads.popitem()[0], RequestStatus.FINISHED_ABORTED)
        wake(self.engine)
        self.engine.step()
        if self.draw.random() < 0.7:
            self.engine.step()
            self.engine.store(CHUNKS)

    def check(self) -> None:
        for request, (hit, job) in list(self.loads.items()):
            if self.engine.ended[job] == 2:
                del self.loads[request]
                assert job in self.engine.failed or not self.engine.wrong(request, hit)
                self.engine.finish(request, RequestStatus.FINISHED_ABORTED)
        assert all(times <= 2 for times in self.engine.ended.values()), "each rank reports a job once"
        assert self.engine.manager._runtime.fault is None


@pytest.mark.parametrize("seed", range(6))
def test_loads_stores_sleeps_and_resets_in_any_order(rigs: Any, tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    keeps = {"sleep_keep": draw.choice(["all", "file"]), "reset_keep": draw.choice(["none", "all", "file"])}
    engine = make(rigs, tmp_path, groups=seed % 2 + 1, fixed_weights=True, **keeps)
    life = Life(engine, draw)
    how_often = {"load": 4, "step": 14, "compute": 3, "lag": 8, "abort": 2, "sleep": 1, "reset": 1, "weights": 0.3}
    for what in draw.choices(list(how_often), list(how_often.values()), k=120):
        if what != "load" or len(life.loads) < 3:
            getattr(life, what)()
        life.check()
    finish_load(engine, *life.loads)
    life.check()
    settled(engine)
    give_up = time.monotonic() + 30
    while any(worker._jobs or worker._parts for worker in engine.rig.workers):  # of jobs that were cancelled
        assert time.monotonic() < give_up
        engine.step()


def test_long_prompts_are_not_promised_while_host_memory_lacks(
    rigs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(rigs, tmp_path, sleep_keep="file")
    with monkeypatch.context() as patch:
        patch.setattr(stack, "available_memory", lambda: 4096)
        sleep(engine)
        wake(engine)
    for chunks in (HOST_CHUNKS // 2, CHUNKS):
        request = engine.request(chunks)
        assert engine.begin(request) == 0
        engine.finish(request, RequestStatus.FINISHED_ABORTED)
        settled(engine)
    sleep(engine)
    wake(engine)
    load_whole(engine)
