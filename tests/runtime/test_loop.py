"""The loop between the planes: order, failures upstream, deadlines, cancels, ranks, and an end that leaves nothing."""

from __future__ import annotations

import contextlib
import pickle
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from call_replay import replay

from longshore.boundary import DEVICE, FILE, HOST, Cancel, Item, Route, Slabs, Slot, Status, Transfer, TransferResult
from longshore.cache import (
    CacheGroup,
    CacheSettings,
    GroupKeys,
    Lease,
    MissReason,
    PrefetchPolicy,
    Text,
    TieredCache,
    TierSpec,
    Until,
    WritePolicy,
    loading,
)
from longshore.cache.eviction import LRU
from longshore.errors import CacheError, JobError, PlanError, StateError, TierClosedError, TierError, TraceError
from longshore.runtime import BackgroundLoop, Runtime, TierMover
from longshore.runtime.containment import CallLog
from longshore.runtime.stack import adopt_found
from longshore.tiers.arena import Arena
from longshore.tiers.file import FileTier, capacity_for
from longshore.tiers.host import HostTier
from scripted import Scripted

IMAGE = 4096
DOWN, UP = Route(DEVICE, HOST), Route(HOST, DEVICE)
OUT, IN = Route(HOST, FILE), Route(FILE, HOST)


def path(length: int, first: int = 0) -> list[bytes]:
    return [bytes([first + i]) * 32 for i in range(length)]


class Rig:
    """A runtime over scripted movers, with a clock that stands still."""

    def __init__(self, *, with_files: bool = True, **settings: Any) -> None:
        self.now = 100.0
        self.device = Scripted(DOWN, UP)
        self.files = Scripted(OUT, IN)
        settings = {"load_timeout": 5.0, "write_timeout": 7.0, **settings}
        self.cache = TieredCache(
            [TierSpec(HOST, 8, IMAGE), TierSpec(FILE, 8, IMAGE)], CacheSettings(backup=WritePolicy.THROUGH, **settings)
        )
        self.runtime = Runtime(
            self.cache, [self.device, self.files] if with_files else [self.device], clock=lambda: self.now
        )

    def store(self, keys: list[bytes]) -> None:
        """`keys` lie in the file tier, and in no other."""
        blocks = range(len(keys) * self.cache.settings.blocks_per_chunk)
        with self.runtime.control() as cache:
            cache.store({0: GroupKeys(keys)}, {0: list(blocks)})
        for mover in (self.device, self.files):
            mover.end()
            self.runtime.pump()
        with self.runtime.control() as cache:
            assert cache.discard(keys, HOST) == len(keys)
        self.device.submitted.clear()
        self.files.submitted.clear()

    def load(self, keys: list[bytes], blocks: list[int], skip: int = 0) -> Lease:
        with self.runtime.control() as cache:
            hold = cache.lookup({0: GroupKeys(keys)}, self.now).lease
            assert hold is not None
            cache.load(hold, {0: blocks}, skip=skip)
        return hold

    def misses(self) -> dict[str, int]:
        return {reason.value: n for reason, n in self.cache.counters.misses.items() if n}

    def check_idle(self) -> None:
        assert not self.runtime.pump()
        assert self.cache.jobs_in_flight == 0
        self.cache.check_integrity()
        for stats in self.cache.stats():
            assert stats.used == stats.ready


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_transfer_waits_for_those_that_it_comes_after(rig: Rig) -> None:
    rig.store(path(2))
    hold = rig.load(path(2), [5, 6])
    (reading,) = rig.files.submitted
    assert rig.device.submitted == []
    rig.runtime.pump()
    assert rig.device.submitted == []
    rig.files.end()
    rig.runtime.pump()
    (copying,) = rig.device.submitted
    assert copying.after == (reading.job,)
    assert copying.sections[0].blocks == (5, 6)
    rig.device.end()
    assert rig.runtime.wait_over(hold, 0.0).outcome == (2, (FILE, FILE))
    rig.check_idle()


def test_two_requests_for_the_same_chunks_share_one_read(rig: Rig) -> None:
    rig.store(path(2))
    first, second = rig.load(path(2), [1, 2]), rig.load(path(2), [3, 4])
    assert len(rig.files.submitted) == 1
    rig.files.end()
    rig.runtime.pump()
    assert [t.sections[0].blocks for t in rig.device.submitted] == [(1, 2), (3, 4)]
    rig.device.end()
    rig.device.end()
    assert rig.runtime.wait_over(first, 0.0).outcome == rig.runtime.wait_over(second, 0.0).outcome == (2, (FILE, FILE))


@pytest.mark.parametrize(
    ("per_chunk", "skip", "blocks", "left"),
    [(1, 0, [4, 5, 6], (4,)), (2, 0, [4, 5, 6, 7, 8], (4, 5)), (2, 1, [4, 5, 6, 7, 8], (4,))],
)
def test_what_failed_upstream_is_not_copied_nor_what_is_behind_it(
    per_chunk: int, skip: int, blocks: list[int], left: tuple[int, ...]
) -> None:
    rig = Rig(blocks_per_chunk=per_chunk)
    rig.store(path(3))
    hold = rig.load(path(3), blocks, skip)
    rig.files.end(Status.OK, Status.CORRUPT, Status.OK)
    rig.runtime.pump()
    (copying,) = rig.device.submitted
    assert [item.key for item in copying.items] == path(1)
    assert copying.sections[0].blocks == left
    rig.device.end()
    assert rig.runtime.wait_over(hold, 0.0).outcome.chunks == 1
    assert rig.misses() == {"corrupt": 1, "behind": 1}
    rig.check_idle()


def test_a_failure_of_the_first_item_upstream_leaves_nothing_to_copy(rig: Rig) -> None:
    rig.store(path(2))
    hold = rig.load(path(2), [1, 2])
    rig.files.end(Status.IO_ERROR, Status.OK)
    assert rig.runtime.wait_over(hold, 0.0).outcome == (0, ())
    assert rig.device.submitted == []
    assert rig.misses() == {"io_error": 1, "behind": 1}
    rig.check_idle()


# deadlines and cancels


def test_what_has_not_begun_by_its_deadline_ends_then(rig: Rig) -> None:
    rig.store(path(1))
    hold = rig.load(path(1), [1])
    rig.now += 4.9
    assert rig.runtime.pump()
    assert rig.files.cancelled == []
    rig.now += 0.2
    rig.runtime.pump()
    assert rig.runtime.wait_over(hold, 0.0).outcome == (0, ())
    assert rig.files.cancelled == [rig.files.submitted[0].job]  # it has begun, as far as anyone knows here
    rig.runtime.pump()
    assert len(rig.files.cancelled) == 1
    assert rig.misses() == {"deadline": 1}
    rig.files.end(Status.CANCELLED)
    rig.check_idle()
    assert [r.slot.tier for r in rig.cache.residents()] == [FILE]


def test_time_that_is_up_is_noticed_without_a_call_and_each_has_its_own(rig: Rig) -> None:
    rig.store(path(2))
    first = rig.load(path(2), [1, 2])
    rig.now += 3.0
    second = rig.load(path(2), [3, 4])
    (read,) = rig.files.submitted
    rig.now += 2.0
    rig.runtime.pump()
    assert rig.cache.progress(first).outcome == (0, ())
    assert (rig.cache.progress(second).outcome, rig.files.cancelled) == (None, [])
    rig.now += 3.0
    rig.runtime.pump()
    assert rig.cache.progress(second).outcome == (0, ())
    assert rig.files.cancelled == [read.job]
    rig.files.end(Status.CANCELLED)
    rig.check_idle()


def test_a_prefetch_is_waited_for_as_its_policy_says(rig: Rig) -> None:
    rig.store(path(2))
    with rig.runtime.control() as cache:
        hold = cache.lookup({0: GroupKeys(path(2))}, rig.now).lease
        assert hold is not None
        cache.prefetch(hold, rig.now)
    assert rig.runtime.wait_over(hold).leading(HOST) == 0
    with rig.runtime.control() as cache:
        cache.prefetch(hold, rig.now, policy=PrefetchPolicy.WAIT)
    rig.files.end()
    assert rig.runtime.wait_over(hold).leading(HOST) == 2
    rig.check_idle()


def test_what_was_cancelled_because_time_was_up_missed_its_deadline(rig: Rig) -> None:
    rig.store(path(2))
    hold = rig.load(path(2), [1, 2])
    rig.files.end()
    rig.runtime.pump()
    rig.now += 6.0
    rig.device.end(Status.OK, Status.CANCELLED)
    assert rig.runtime.wait_over(hold, 0.0).outcome == (1, (FILE,))
    assert rig.device.cancelled == [rig.device.submitted[0].job]
    assert rig.misses() == {"deadline": 1}
    rig.check_idle()


def test_what_was_not_submitted_did_not_miss_a_deadline(rig: Rig) -> None:
    rig.store(path(3))
    hold = rig.load(path(3), [1, 2, 3])
    rig.files.end(Status.OK, Status.CORRUPT, Status.OK)
    rig.runtime.pump()
    rig.now += 6.0
    rig.device.end(Status.CANCELLED)
    assert rig.runtime.wait_over(hold, 0.0).outcome == (0, ())
    assert rig.misses() == {"deadline": 1, "corrupt": 1, "behind": 1}


def test_writes_have_a_deadline_of_their_own(rig: Rig) -> None:
    with rig.runtime.control() as cache:
        cache.store({0: GroupKeys(path(1))}, {0: [0]})
    rig.now += 6.9
    rig.runtime.pump()
    assert rig.device.cancelled == []
    rig.now += 0.2
    rig.runtime.pump()
    assert len(rig.device.cancelled) == 1


def test_the_clock_of_a_deadline_starts_when_work_is_ordered(rig: Rig) -> None:
    rig.now += 1000.0
    with rig.runtime.control() as cache:
        cache.store({0: GroupKeys(path(1))}, {0: [0]})
    rig.runtime.pump()
    assert rig.device.submitted[0].deadline == rig.now + 7.0
    assert rig.device.cancelled == []


def test_a_cancelled_transfer_that_waits_is_never_submitted(rig: Rig) -> None:
    rig.store(path(1))
    hold = rig.load(path(1), [1])
    with rig.runtime.control() as cache:
        cache.release(hold)
    rig.files.end()
    rig.check_idle()
    assert rig.device.submitted == []
    assert {r.slot.tier for r in rig.cache.residents()} == {HOST, FILE}  # what was on its way in is there for the next


def test_a_cancelled_transfer_that_runs_still_ends(rig: Rig) -> None:
    rig.store(path(1))
    hold = rig.load(path(1), [1])
    rig.files.end()
    rig.runtime.pump()
    (copying,) = rig.device.submitted
    with rig.runtime.control() as cache:
        cache.release(hold)
    assert rig.device.cancelled == [copying.job]
    assert rig.runtime.in_flight(copying.job)
    assert not rig.runtime.wait_ended([copying.job], 0.0)
    rig.device.end(Status.CANCELLED)
    assert rig.runtime.wait_ended([copying.job], 0.0)
    rig.check_idle()


def test_waiting_ends_at_its_deadline_with_what_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "LOAD_BATCH", 1)
    rig = Rig(load_timeout=0.5)
    rig.runtime.clock = time.monotonic
    rig.now = begin = time.monotonic()
    rig.store(path(3))
    hold = rig.load(path(3), [1, 2, 3])
    rig.files.end()
    rig.runtime.pump()
    rig.device.end()
    assert rig.runtime.wait_over(hold, 0.02).outcome is None
    assert rig.runtime.wait_over(hold).outcome == (1, (FILE,))
    assert time.monotonic() - begin >= 0.5
    assert rig.misses() == {"deadline": 2}
    while rig.files.open:
        rig.files.end()
    rig.check_idle()


# refusals


@pytest.mark.parametrize(
    "error",
    [TierError("no"), PlanError("no"), TierClosedError("no"), RuntimeError("CUDA error")],
    ids=lambda e: type(e).__name__,
)
def test_a_load_that_its_mover_refuses_is_a_miss_and_nothing_is_copied_from_its_slots(error: Any) -> None:
    rig = Rig()
    rig.store(path(2))
    rig.files.refuse = error
    hold = rig.load(path(2), [1, 2])
    rig.runtime.pump()
    assert rig.device.submitted == [], "bytes that never came were copied to the device"
    assert rig.runtime.wait_over(hold, 0.0).outcome == (0, ())
    assert rig.misses() == {"tier_off": 2}
    assert {r.slot.tier for r in rig.cache.residents()} == {FILE}, "a refusal is not the fault of the stored bytes"
    rig.check_idle()


def test_a_copy_that_its_mover_refuses_is_a_miss_and_the_host_tier_keeps_its_chunk(rig: Rig) -> None:
    rig.store(path(1))
    rig.device.refuse = PlanError("block 99 does not exist")
    hold = rig.load(path(1), [1])
    rig.files.end()
    assert rig.runtime.wait_over(hold, 0.0).outcome == (0, ())
    assert {r.slot.tier for r in rig.cache.residents()} == {HOST, FILE}
    rig.check_idle()


def test_a_route_that_nobody_serves_is_a_miss() -> None:
    rig = Rig(with_files=False)
    with rig.runtime.control() as cache:
        cache.store({0: GroupKeys(path(1))}, {0: [0]})
    rig.device.end()
    rig.check_idle()
    assert rig.cache.counters.drops[FILE].total() == 1
    assert [r.slot.tier for r in rig.cache.residents()] == [HOST]


# ranks


def test_a_transfer_ends_when_all_ranks_have(rig: Rig) -> None:
    rig = Rig(ranks=2)
    rig.store(path(2))
    hold = rig.load(path(2), [1, 2])
    rig.files.end(rank=0)
    rig.runtime.pump()
    assert rig.device.submitted == []
    rig.files.end(rank=1)
    rig.runtime.pump()
    assert len(rig.device.submitted) == 1
    rig.device.end(rank=0)
    rig.runtime.pump()
    assert rig.cache.progress(hold).outcome is None
    rig.device.end(Status.OK, Status.SHORT, rank=1)
    assert rig.runtime.wait_over(hold, 0.0).outcome == (1, (FILE,))
    rig.check_idle()


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_on_one_rank_counts_for_those_who_join_before_the_other_has_ended(failing: int) -> None:
    rig = Rig(ranks=2)
    rig.store(path(2))
    first = rig.load(path(2), [1, 2])
    how = (Status.OK, Status.CORRUPT)
    rig.files.end(*(how if failing == 0 else (Status.OK,)), rank=0)
    rig.runtime.pump()
    second = rig.load(path(2), [3, 4])
    rig.files.end(*(how if failing == 1 else (Status.OK,)), rank=1)
    rig.runtime.pump()
    assert [len(copying.items) for copying in rig.device.submitted] == [1, 1]
    rig.device.end()
    rig.device.end()
    assert rig.runtime.wait_over(first, 0.0).outcome == rig.runtime.wait_over(second, 0.0).outcome == (1, (FILE,))
    rig.check_idle()


# the cache's contract, as far as the loop keeps it


class StubCache:
    """Gives out commands, and keeps what comes back."""

    def __init__(self, *commands: Any) -> None:
        self.commands = list(commands)
        self.results: list[TransferResult] = []
        self.settings = CacheSettings()
        self.made_of = ()

    def stats(self) -> tuple[()]:
        return ()

    def take(self) -> list[Any]:
        commands, self.commands = self.commands, []
        return commands

    def apply(self, results: list[TransferResult], now: float) -> None:
        self.results += results

    def tick(self, now: float) -> None: ...

    def flush(self) -> bool:
        return False


def in_chain(*jobs: int) -> list[Transfer]:
    """Transfers that come one after the other, from slot to slot."""
    return [
        Transfer(
            job,
            Route(HOST, HOST),
            (Item(path(1)[0], None, Slot(HOST, 0, i), Slot(HOST, 0, i + 1), 1),),
            deadline=10.0,
            after=jobs[i - 1 : i] if i else (),
        )
        for i, job in enumerate(jobs)
    ]


@pytest.mark.parametrize("end", ["deadline", "close"])
def test_each_transfer_of_a_chain_ends_once(end: str) -> None:
    cache, mover, now = StubCache(*in_chain(1, 2, 3, 4)), Scripted(Route(HOST, HOST)), 0.0
    runtime = Runtime(cache, [mover], clock=lambda: now)  # type: ignore[arg-type]
    runtime.pump()
    if end == "close":
        runtime.close(0.0)
    else:
        now = 11.0
        runtime.pump()
        assert mover.cancelled == [1]
        mover.end(Status.CANCELLED)
        runtime.pump()
    assert sorted(result.job for result in cache.results) == [1, 2, 3, 4]


def test_a_failure_passes_through_a_whole_chain() -> None:
    cache, mover = StubCache(*in_chain(1, 2, 3)), Scripted(Route(HOST, HOST))
    runtime = Runtime(cache, [mover], clock=lambda: 0.0)  # type: ignore[arg-type]
    runtime.pump()
    mover.end(Status.SHORT)
    runtime.pump()
    assert [(r.job, r.statuses) for r in cache.results] == [(job, (Status.SHORT,)) for job in (1, 2, 3)]
    assert len(mover.submitted) == 1


def test_a_cancel_of_what_has_ended_is_ignored() -> None:
    runtime = Runtime(StubCache(Cancel(7)), [])  # type: ignore[arg-type]
    assert not runtime.pump()


def test_what_was_ordered_before_an_error_is_under_way_all_the_same(rig: Rig) -> None:
    with pytest.raises(CacheError), rig.runtime.control() as cache:
        cache.store({0: GroupKeys(path(1))}, {0: [0]})
        cache.store({0: GroupKeys(path(1))}, {0: [0, 1, 2]})
    assert len(rig.device.submitted) == 1


# the end


def test_close_leaves_nothing_in_flight(rig: Rig) -> None:
    rig.store(path(2))
    hold = rig.load(path(2), [1, 2])  # one transfer runs, one waits
    with rig.runtime.control() as cache:
        cache.store({0: GroupKeys(path(2, first=9))}, {0: [6, 7]})
    assert not rig.runtime.close(0.0)
    assert rig.device.closed
    assert rig.files.closed
    rig.check_idle()
    assert rig.cache.progress(hold).outcome == (0, ())
    assert rig.misses() == {"tier_off": 2}
    assert rig.runtime.wait_over(hold, 0.0).outcome == (0, ())
    with pytest.raises(TierClosedError, match="the runtime was closed"), rig.runtime.control():
        pass


def test_close_flushes_first(rig: Rig) -> None:
    rig.runtime.clock = time.monotonic
    with rig.runtime.control() as cache:
        cache.store({0: GroupKeys(path(2))}, {0: [0, 1]})
    sooner = threading.Timer(0.02, rig.device.end)
    later = threading.Timer(0.05, rig.files.end)
    sooner.start()
    later.start()
    assert rig.runtime.close(10.0)
    sooner.join()
    later.join()
    assert {r.slot.tier for r in rig.cache.residents()} == {HOST, FILE}
    assert rig.runtime.close()


# the loop in a thread


class Prompt(Scripted):
    """A mover that ends everything well when it is polled."""

    def poll(self) -> list[TransferResult]:
        while self.open:
            self.end()
        return super().poll()


def until(done: Callable[[], bool]) -> bool:
    end = time.monotonic() + 60.0
    while not done() and time.monotonic() < end:
        time.sleep(1e-3)
    return done()


@pytest.fixture
def threads() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before, "a thread is left"


@pytest.mark.usefixtures("threads")
def test_chains_go_on_in_the_background_without_a_call() -> None:
    cache = TieredCache([TierSpec(HOST, 8, IMAGE), TierSpec(FILE, 8, IMAGE)], CacheSettings(backup=WritePolicy.THROUGH))
    runtime = Runtime(cache, [Prompt(DOWN, UP), Prompt(IN, OUT)])
    loop = BackgroundLoop(runtime)
    with runtime.control() as control:
        control.store({0: GroupKeys(path(2))}, {0: [0, 1]})
    assert until(lambda: cache.counters.routes["host->file"].chunks == 2)
    with runtime.control() as control:
        control.discard(path(2), HOST)
        hold = control.lookup({0: GroupKeys(path(2))}, runtime.clock()).lease
        assert hold is not None
        control.load(hold, {0: [4, 5]})

    def arrived() -> bool:
        with runtime.observe() as watched:
            return watched.progress(hold).outcome is not None

    assert until(arrived)
    loop.close()
    loop.close()
    runtime.close()


@pytest.mark.usefixtures("threads")
def test_a_loop_takes_over_what_is_under_way_and_sleeps_when_nothing_is(rig: Rig) -> None:
    with rig.runtime.control() as cache:
        cache.store({0: GroupKeys(path(1))}, {0: [0]})
    rig.runtime.wakeup.clear()
    loop = BackgroundLoop(rig.runtime)
    rig.device.end()
    assert until(lambda: len(rig.files.submitted) == 1)
    rig.files.end()
    assert until(lambda: rig.cache.jobs_in_flight == 0)
    time.sleep(0.02)
    polls = rig.device.polls
    time.sleep(0.05)
    assert rig.device.polls == polls
    loop.close()


# real tiers


class Memory:
    """A device of plain host memory: copies when it is told to, `DEVICE` <-> `HOST`."""

    routes = frozenset((DOWN, UP))

    def __init__(self, blocks: int, host: HostTier) -> None:
        self.blocks = np.zeros((blocks, IMAGE), dtype=np.uint8)
        self.host = host
        self.results: list[TransferResult] = []

    def submit(self, transfer: Transfer) -> None:
        for item, block in zip(transfer.items, transfer.sections[0].blocks, strict=True):
            slot = item.source or item.destination
            assert slot is not None
            image = np.frombuffer(self.host.arena.view(self.host.offset(slot.pool, slot.index), IMAGE), dtype=np.uint8)
            if transfer.route == DOWN:
                image[:] = self.blocks[block]
            else:
                self.blocks[block] = image
        statuses = (Status.OK,) * len(transfer.items)
        self.results.append(TransferResult(transfer.job, statuses, len(statuses) * IMAGE))

    def poll(self) -> list[TransferResult]:
        results, self.results = self.results, []
        return results

    def cancel(self, job: int) -> None: ...

    def close(self) -> None: ...


class Machine:
    """One process's worth of real tiers over `directory`."""

    def __init__(self, directory: Path) -> None:
        self.arena = Arena(4 * IMAGE)
        host = HostTier(self.arena, Slabs.of_one_size(IMAGE, 4))
        capacity = capacity_for(8, IMAGE)
        self.file = FileTier(directory, capacity=capacity, image_bytes=IMAGE, arena=self.arena, scope=bytes(32))
        self.memory = Memory(8, host)
        tiers = [TierSpec(HOST, 4, IMAGE), TierSpec(FILE, 8, IMAGE)]
        self.cache = TieredCache(tiers, CacheSettings(), generation=self.file.generation)
        self.found = self.cache.adopt(FILE, ((c.slot, c.key, c.parent) for c in self.file.recover()))
        self.runtime = Runtime(self.cache, [self.memory, TierMover(self.file, host)], [self.file])

    def load(self, keys: list[bytes], blocks: list[int]) -> tuple[int, tuple[str, ...]]:
        with self.runtime.control() as cache:
            hold = cache.lookup({0: GroupKeys(keys)}, self.runtime.clock()).lease
            if hold is None:
                return 0, ()
            cache.load(hold, {0: blocks})
        outcome = self.runtime.wait_over(hold, 10.0).outcome
        with self.runtime.control() as cache:
            cache.release(hold)
        return outcome

    def close(self) -> None:
        assert self.runtime.close()
        self.arena.close()


@pytest.mark.usefixtures("threads")
def test_bytes_go_to_the_file_and_come_back_also_after_a_restart(tmp_path: Path) -> None:
    image = np.random.default_rng(1).integers(0, 256, (3, IMAGE), dtype=np.uint8)
    machine = Machine(tmp_path)
    machine.memory.blocks[:3] = image
    with machine.runtime.control() as cache:
        cache.store({0: GroupKeys(path(3))}, {0: [0, 1, 2]})
    assert machine.runtime.flush(10.0)
    with machine.runtime.control() as cache:
        assert cache.discard(path(3), HOST) == 3
    assert machine.load(path(3), [5, 6, 7]) == (3, (FILE,) * 3)
    assert (machine.memory.blocks[5:8] == image).all()
    machine.close()
    machine = Machine(tmp_path)
    assert machine.found == 3
    assert machine.load(path(3), [4, 2, 0]) == (3, (FILE,) * 3)
    assert (machine.memory.blocks[[4, 2, 0]] == image).all()
    machine.close()


@pytest.mark.usefixtures("threads")
def test_nothing_from_before_a_reset_is_found_again(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    with machine.runtime.control() as cache:
        cache.store({0: GroupKeys(path(2))}, {0: [0, 1]})
    assert machine.runtime.flush(10.0)
    with machine.runtime.control() as cache:
        assert cache.reset() == 1
        assert cache.lookup({0: GroupKeys(path(2))}, 0.0).chunks == 0
        cache.store({0: GroupKeys(path(1, first=7))}, {0: [3]})
    assert machine.runtime.flush(10.0)
    assert machine.file.generation == 1
    machine.close()
    machine = Machine(tmp_path)
    assert (machine.found, machine.cache.generation) == (1, 1)
    assert machine.load(path(2), [0, 1]) == (0, ())
    assert machine.load(path(1, first=7), [0]) == (1, (FILE,))
    machine.close()


@pytest.mark.usefixtures("threads")
def test_a_tier_that_cannot_forget_is_off_and_the_reset_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(tmp_path)

    def fail(generation: int) -> None:
        raise TierError("the medium is full")

    monkeypatch.setattr(machine.file, "forget", fail)
    with machine.runtime.control() as cache:
        cache.reset()
        job = cache.store({0: GroupKeys(path(1))}, {0: [0]})[0].job
    assert job is not None
    assert machine.runtime.flush(10.0)
    assert [r.slot.tier for r in machine.cache.residents()] == [HOST]
    assert machine.cache.counters.drops[FILE].total() == 1
    with pytest.raises(TierClosedError):
        machine.file.recover()
    machine.close()


@pytest.mark.usefixtures("threads")
def test_a_file_that_was_harmed_is_a_counted_miss(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.memory.blocks[:] = 7
    with machine.runtime.control() as cache:
        cache.store({0: GroupKeys(path(2))}, {0: [0, 1]})
    assert machine.runtime.flush(10.0)
    machine.close()
    machine = Machine(tmp_path)
    segment = tmp_path / "segment"
    raw = bytearray(segment.read_bytes())
    where = raw.rfind(bytes([7]) * IMAGE)
    raw[where + 100] ^= 1
    segment.write_bytes(raw)
    chunks, _ = machine.load(path(2), [4, 5])
    assert chunks == 1
    assert machine.cache.counters.misses[MissReason.CORRUPT] == 1
    assert machine.load(path(1), [4]) == (1, (HOST,))
    machine.close()


def test_records_of_other_scopes_are_told_at_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine(tmp_path)
    with machine.runtime.control() as cache:
        cache.store({0: GroupKeys(path(3))}, {0: [0, 1, 2]})
    assert machine.runtime.flush(10.0)
    machine.close()
    caplog.set_level("INFO")
    for scope, found, told in ((0, 3, False), (1, 0, True)):
        caplog.clear()
        arena, capacity = Arena(4 * IMAGE), capacity_for(8, IMAGE)
        file = FileTier(tmp_path, capacity=capacity, image_bytes=IMAGE, arena=arena, scope=bytes([scope]) * 32)
        cache = TieredCache([TierSpec(HOST, 4, IMAGE), TierSpec(FILE, 8, IMAGE)], generation=file.generation)
        adopt_found(cache, file)
        said = [record.getMessage() for record in caplog.records if record.name == "longshore.runtime.stack"]
        assert said[0] == f"file tier: recovered {found} block images, took {found} of them"
        assert len(said) == 1 + told
        assert all("3 records belong to other models" in each and "longshore gc" in each for each in said[1:])
        assert len(cache.residents()) == found
        cache.check_integrity()
        file.close()
        arena.close()


def test_a_fault_of_the_control_plane_is_told_once_and_its_calls_can_be_replayed(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def make() -> TieredCache:
        return TieredCache([TierSpec(HOST, 8, 4096, LRU)])

    runtime, keys = Runtime(make(), []), [bytes([i]) * 32 for i in range(8)]
    with pytest.raises(CacheError), runtime.control() as cache:
        cache.store({0: GroupKeys([keys[0], keys[0]])})
    assert runtime.fault is None, "what a caller did wrong is the caller's"
    with runtime.control() as cache:
        job = cache.store({0: GroupKeys(keys)})[0].job
        assert job is not None
        cache.apply([TransferResult(job, (Status.OK,) * 8)], 0.0)
        policy = cache._store.policies[0]
        policy._chains.after[next(iter(policy.order()))] = 1  # type: ignore[attr-defined]
        policy._place[:] = bytes(len(policy._place))  # type: ignore[attr-defined]
    for _ in range(2):
        with pytest.raises(TierClosedError, match="all tiers disabled"), runtime.control() as cache:
            cache.store({0: GroupKeys([b"new".ljust(32)])})
    assert runtime.faults == 1
    assert not runtime.pump()
    assert not runtime.flush(1.0)
    (told,) = [record for record in caplog.records if "all tiers disabled" in record.message]
    assert told.exc_info
    (written,) = tmp_path.iterdir()
    _, calls, is_whole = pickle.loads(written.read_bytes())  # noqa: S301
    assert is_whole
    refused = [call for call in calls if call[0] == "store" and len(set(call[1][0][0].keys)) < len(call[1][0][0].keys)]
    assert len(refused) == 1
    again = replay(written)
    assert {each.key for each in again.residents()} <= {*keys, b"new".ljust(32)}
    assert again.residents()
    runtime.close(0.0)


def host_cache(**settings: Any) -> TieredCache:
    return TieredCache([TierSpec(HOST, 8, 4096, LRU)], CacheSettings(**settings))


@pytest.mark.parametrize("error", [CacheError, StateError, JobError, KeyError])
@pytest.mark.parametrize("method", ["apply", "take", "end_step"])
def test_whatever_leaves_the_loops_own_calls_is_a_fault(
    error: type[Exception], method: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    fired = []

    def damaged(*arguments: Any) -> Any:
        fired.append(method)
        raise error("damaged by the test")

    monkeypatch.setattr(TieredCache, method, damaged)
    runtime = Runtime(host_cache(), [])
    with contextlib.suppress(TierClosedError), runtime.control() as cache:
        cache.end_step()
    assert len(fired) == runtime.faults == 1
    assert not runtime.flush(1.0)


@pytest.mark.parametrize("error", [StateError, KeyError])
def test_an_internal_error_of_any_call_is_a_fault(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(TieredCache, "lookup", lambda self, *_: (_ for _ in ()).throw(error("damaged by the test")))
    runtime = Runtime(host_cache(), [])
    with pytest.raises(TierClosedError), runtime.control() as cache:
        cache.lookup({}, 0.0)
    assert runtime.faults == 1


@pytest.mark.parametrize("error", [KeyError, CacheError])
def test_an_exception_of_a_user_is_no_fault(error: type[Exception]) -> None:
    runtime = Runtime(host_cache(), [])
    with pytest.raises(error), runtime.control():
        raise error("of the code around the calls")
    assert runtime.fault is None


def test_a_mover_that_cannot_be_polled_is_no_fault() -> None:
    """Its exception is its caller's to see, and nothing is lost for the poll that follows."""
    cache, mover = StubCache(*in_chain(1)), Scripted(Route(HOST, HOST))
    runtime, poll = Runtime(cache, [mover]), mover.poll  # type: ignore[arg-type]
    polls = []

    def fail() -> list[TransferResult]:
        polls.append("failed")
        raise OSError("failed by the test")

    mover.poll = fail  # type: ignore[method-assign]
    with pytest.raises(OSError, match="failed by the test"):
        runtime.pump()
    mover.poll = poll  # type: ignore[method-assign]
    mover.end(Status.OK)
    runtime.pump()
    assert polls == ["failed"]
    assert runtime.fault is None
    assert [result.job for result in cache.results] == [1]


def test_a_mover_that_cannot_be_polled_in_the_background_turns_the_tiers_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is there to see its exception: what waits ends all the same."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cache, mover, polled = host_cache(), Scripted(Route(DEVICE, HOST)), threading.Event()
    runtime = Runtime(cache, [mover])

    def fail() -> list[TransferResult]:
        polled.set()
        raise OSError("failed by the test")

    mover.poll = fail  # type: ignore[method-assign]
    loop = BackgroundLoop(runtime)
    try:
        assert polled.wait(10)
        assert until(lambda: runtime.fault is not None)
        assert isinstance(runtime.fault, OSError)
        with pytest.raises(TierClosedError), runtime.control():
            pass
    finally:
        loop.close()


def test_a_mover_that_cannot_be_closed_leaves_no_other_open(caplog: pytest.LogCaptureFixture) -> None:
    movers = [Scripted(Route(DEVICE, HOST)), Scripted(Route(HOST, FILE))]

    def fail() -> None:
        raise OSError("failed by the test")

    movers[0].close = fail  # type: ignore[method-assign]
    runtime = Runtime(host_cache(), movers)
    assert runtime.close(0.0)
    assert movers[1].closed
    assert "Scripted could not be closed" in caplog.text


WAITS: dict[str, Callable[[Rig, Lease], Any]] = {
    "progress of a lease": lambda rig, lease: rig.runtime.wait_over(lease),
    "progress of a job": lambda rig, lease: rig.runtime.wait_ended([rig.files.submitted[0].job], 0.0),
    "flush": lambda rig, lease: rig.runtime.flush(1e9),
}


@pytest.mark.parametrize(
    ("wait", "error"),
    [*((wait, KeyError) for wait in WAITS), *((wait, StateError) for wait in WAITS), ("flush", CacheError)],
)
def test_a_wait_ends_when_the_cache_fails_to_answer(
    rig: Rig, wait: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    rig.store(path(1))
    hold, fired, method = rig.load(path(1), [0]), [], wait.split(maxsplit=1)[0]

    def damaged(*arguments: Any) -> Any:
        fired.append(method)
        raise error("damaged by the test")

    monkeypatch.setattr(rig.cache, method, rig.runtime._calls._watched(method, damaged))
    said = None
    with contextlib.suppress(TierClosedError):
        said = WAITS[wait](rig, hold)
    assert said is {"progress of a job": False, "flush": False}.get(wait), "a job that has not ended is in flight"
    assert len(fired) == rig.runtime.faults == 1
    assert rig.runtime.in_flight(rig.files.submitted[0].job)
    rig.files.end()
    assert rig.runtime.wait_ended([rig.files.submitted[0].job], 1e9)


def test_a_mover_that_cannot_be_polled_after_a_fault_is_asked_once(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    rig.store(path(1))
    rig.load(path(1), [0])
    (reading,) = rig.files.submitted
    with rig.runtime.control() as cache:
        cache.store({0: GroupKeys(path(1, first=7))}, {0: [3]})
    (storing,) = rig.device.submitted
    polls = []

    def fail(*arguments: Any) -> Any:
        polls.append(arguments)
        raise OSError("failed by the test")

    rig.files.poll = rig.files.cancel = fail  # type: ignore[method-assign]
    rig.runtime.fail(KeyError("damaged by the test"))
    assert polls == [(reading.job,)]
    assert rig.device.cancelled == [storing.job], "also behind a mover that cannot cancel"
    assert rig.runtime.pump()
    rig.device.end()
    for _ in range(3):
        assert not rig.runtime.pump(), "nothing will be heard of any more"
    assert polls == [(reading.job,), ()]
    assert not rig.runtime.wait_ended([reading.job], 0.0), "what has not ended may still write"
    assert rig.runtime.wait_ended([storing.job], 0.0)
    assert sum("Scripted cannot be polled" in record.getMessage() for record in caplog.records) == 1
    assert not rig.runtime.close(0.0)
    assert rig.files.closed


def test_idle_calls_do_not_push_others_out_of_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cache = host_cache(events=100)
    log = CallLog(cache, lambda error: None)
    job = cache.store({0: GroupKeys(path(3))})[0].job
    assert job is not None
    for step in range(1000):
        cache.apply((), float(step))
        cache.end_step()
        assert cache.take() == []
        cache.apply([], step + 0.5)
        cache.events()
    cache.apply([TransferResult(job, (Status.OK,) * 3)], 2000.0)
    names = [call.name for call in log.calls]
    assert names[0] == "store" and names[-1] == "apply"
    assert len(names) <= 16
    written = log.write()
    assert written is not None
    assert {each.key for each in replay(written).residents()} == set(path(3))


def test_a_log_has_arguments_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    group = CacheGroup(block_size=16, window=1 << 40)
    cache = host_cache(groups=(group, CacheGroup(block_size=16)))
    log, keys = CallLog(cache, lambda error: None), path(4)
    offload = cache.store({0: GroupKeys(keys)})[0]
    results = [TransferResult(offload.job or 0, (Status.OK,) * 4)]
    cache.apply(results, 0.0)
    results.clear()
    sight = cache.lookup({0: GroupKeys(keys)}, 0.0, until=Until.STEP, each=True).residency[0]
    cache.end_step()
    wanted = [GroupKeys([], device=[]), GroupKeys(path(4, first=20), device=np.ones(4, bool))]
    cache.lookup(dict(enumerate(wanted)), 1.0)
    cache.load({0: GroupKeys(sight.part(0, 2))})
    assert cache.discard(iter(keys[3:]), HOST) == 1
    keys[:] = path(4, first=9)
    wanted[1].device[:] = False  # type: ignore[index]
    written = log.write()
    assert written is not None
    again = replay(written)
    assert {each.key for each in again.residents()} == {each.key for each in cache.residents()} == set(path(3))
    assert again.jobs_in_flight == cache.jobs_in_flight == 1
    calls = pickle.loads(written.read_bytes())[1]  # noqa: S301
    (matched,) = [call for call in calls if call[0] == "lookup" and len(call[1][0]) == 2]
    assert matched[1][0][1].device.all()


def test_a_log_is_bounded_and_says_whether_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cache = host_cache()
    log = CallLog(cache, lambda error: None)
    keys = [bytes([i]) * 32 for i in range(200)]
    for _ in range(500):
        cache.lookup({0: GroupKeys(keys)}, 0.0, until=Until.STEP, each=True)
    assert len(log.calls) == 500
    for _ in range(20):
        cache.lookup({0: GroupKeys(keys * 100)}, 0.0, until=Until.STEP, each=True)
    assert 0 < len(log.calls) < 20
    assert sum(call.bytes for call in log.calls) <= 16 << 20
    for _ in range(600):
        cache.lookup({0: GroupKeys(keys[:9])}, 0.0, until=Until.STEP, each=True)
    assert len(log.calls) == 512
    written = log.write()
    assert written is not None
    with pytest.raises(TraceError, match="the last 512"):
        replay(written)
    replay(written, host_cache())


def test_a_log_has_no_tokens_of_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    group = CacheGroup(block_size=16)
    cache = host_cache(groups=(group,), partial=True)
    log, tokens = CallLog(cache, lambda error: None), list(range(77_001, 77_033))
    text = Text(tokens, b"root")
    keys = [bytes([i]) * 32 for i in range(2)]
    cache.store({0: GroupKeys(keys, text=text)}, {0: [0, 1]})
    cache.lookup({0: GroupKeys(keys, text=Text(tokens, b"root"))}, 0.0)
    cache.lookup({0: GroupKeys(keys, device=(), text=text)}, 0.0)
    written = log.write()
    assert written is not None
    assert pickle.dumps(tokens)[20:60] not in written.read_bytes()
    assert b"Text" not in written.read_bytes()
    assert {call[0] for call in pickle.loads(written.read_bytes())[1]} == {"store", "lookup"}  # noqa: S301
    replay(written)
