"""A remote tier below the whole runtime: the bytes that come back are those that went there, or it is a miss."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator

import pytest
import torch

from longshore.boundary import HOST, Slabs
from longshore.cache import CacheSettings, DropReason, GroupKeys, LookupResult, MissReason, TieredCache, TierSpec
from longshore.cache.types import Answer
from longshore.layout import KVLayout, from_rows
from longshore.runtime import BackgroundLoop, KeyedMover, Runtime
from longshore.testing import KeyStore, StoreFault
from longshore.testing.key_store import Images
from longshore.tiers.arena import Arena
from longshore.tiers.host import HostSlabs
from longshore.transfer.device import device_for
from longshore.transfer.engine import TransferEngine

BLOCKS, ROW, SLOTS = 24, 6 * 1000, 8
KEYS = [hashlib.sha256(bytes([i])).digest() for i in range(4)]
TIMEOUT = 60.0


class Machine:
    """An engine's rows, a host tier, and a store that others may share: all real but the network."""

    def __init__(self, images: Images, *, background: bool = False, **settings: float) -> None:
        self.rows = torch.full((BLOCKS, ROW), 0xAA, dtype=torch.uint8)
        layout: KVLayout = from_rows(self.rows, pages_per_block=6, block_size=10)
        size = layout.image_bytes
        self.arena = Arena(SLOTS * size)
        host = HostSlabs(self.arena, Slabs.of_one_size(size, SLOTS))
        device = device_for(layout)
        device.set_registered_memory(self.arena.in_one_piece)
        self.store = KeyStore(self.arena, host.slabs.image_bytes, images=images)
        self.cache = TieredCache([TierSpec(HOST, SLOTS, size)], CacheSettings(**settings), remote=[self.store.name])
        remote = KeyedMover(self.store, host)
        movers = [TransferEngine(layout, device, host), remote]
        self.runtime = Runtime(self.cache, movers, [self.store], probers=[remote])
        self.loop = BackgroundLoop(self.runtime) if background else None

    def close(self) -> None:
        if self.loop is not None:
            self.loop.close()
        self.runtime.close(TIMEOUT)
        self.cache.check_integrity()
        assert self.cache.jobs_in_flight == 0
        self.arena.close()

    def offload(self, count: int, seed: int = 0) -> torch.Tensor:
        """The first `count` chunks come from the device, with bytes of `seed`."""
        noise = torch.randint(0, 256, (count, ROW), dtype=torch.uint8, generator=torch.manual_seed(seed))
        self.rows[:count] = noise
        with self.runtime.batch() as cache:
            job = cache.store({0: GroupKeys(KEYS[:count])}, {0: range(count)})[0].job
        assert job is not None
        assert self.runtime.wait_jobs([job], TIMEOUT)
        return noise

    def settle(self) -> None:
        """Until nothing is in flight."""
        give_up = time.monotonic() + TIMEOUT
        while self.runtime.pump():
            assert time.monotonic() < give_up
            time.sleep(0.0005)

    def lookup(self, count: int = len(KEYS)) -> LookupResult:
        with self.runtime.batch() as cache:
            found = cache.lookup({0: GroupKeys(KEYS[:count])}, self.runtime.clock())
            if found.lease is not None:
                cache.release(found.lease)
        return found

    def prefetch(self) -> int:
        """Ask, wait for the answer, fetch, wait: how many chunks can be matched then."""
        self.runtime.wait_jobs(self.lookup().probes, TIMEOUT)
        with self.runtime.batch() as cache:
            jobs = cache.prefetch({0: GroupKeys(KEYS)}, self.runtime.clock())
        assert self.runtime.wait_jobs(jobs, TIMEOUT)
        return self.lookup().num_chunks

    def load(self) -> torch.Tensor:
        """All that is matched, in rows that were poisoned before."""
        self.rows[:] = 0xEE
        with self.runtime.batch() as cache:
            found = cache.lookup({0: GroupKeys(KEYS)}, self.runtime.clock())
            assert found.lease is not None
            cache.load(found.lease, {0: range(12, 12 + found.num_chunks)})
        outcome = self.runtime.wait_load(found.lease, TIMEOUT).outcome
        with self.runtime.batch() as cache:
            cache.release(found.lease)
        assert outcome.num_chunks == found.num_chunks
        return self.rows[12 : 12 + found.num_chunks].clone()

    def misses(self) -> dict[MissReason, int]:
        return {reason: count for reason, count in self.cache.counters.misses.items() if count}


@pytest.fixture(params=["inside", "background"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Machine, Machine]]:
    """Two machines that share one store."""
    images: Images = {}
    machines = [Machine(images, background=request.param == "background", probe_timeout=5.0) for _ in range(2)]
    yield machines[0], machines[1]
    for machine in machines:
        machine.close()


def test_what_one_machine_stored_another_one_finds(pair: tuple[Machine, Machine]) -> None:
    here, there = pair
    written = here.offload(3)
    here.settle()
    assert len(here.store.images) == 3
    assert there.prefetch() == 3
    assert torch.equal(there.load(), written)
    assert there.cache.counters.routes["store->host"].bytes == 3 * there.store.image_bytes[0]


def test_a_broken_image_would_be_noticed_here(pair: tuple[Machine, Machine]) -> None:
    here, there = pair
    written = here.offload(3)
    here.settle()
    first, *_ = here.store.images
    here.store.images[first] = bytes(len(here.store.images[first]))
    assert there.prefetch() == 3
    assert not torch.equal(there.load(), written)


def test_chunk_that_lapses_between_probe_and_read_misses(pair: tuple[Machine, Machine]) -> None:
    here, there = pair
    written = here.offload(4)
    here.settle()
    there.store.lapse(KEYS[2])
    assert there.prefetch() == 2
    assert there.store.fired[StoreFault.LAPSE] == 1
    assert there.misses()[MissReason.NOT_FOUND] == 1
    assert torch.equal(there.load(), written[:2])


def test_a_reset_reaches_the_store(pair: tuple[Machine, Machine]) -> None:
    here, there = pair
    here.offload(2)
    here.settle()
    with there.runtime.batch() as cache:
        cache.reset()
    assert there.prefetch() == 0
    assert there.cache.counters.probes["store"][Answer.ABSENT] > 0
    assert here.prefetch() == 2


@pytest.mark.parametrize("background", [False, True])
def test_an_answer_that_comes_too_late_changes_nothing(background: bool) -> None:
    machine = Machine({(key, 0): b"" for key in KEYS}, background=background, probe_timeout=0.02)
    machine.store.seconds = 0.2
    (probe,) = machine.lookup().probes
    assert machine.runtime.wait_jobs([probe], TIMEOUT)
    time.sleep(0.25)
    machine.settle()
    assert machine.store.fired[StoreFault.LATE] > 0
    assert machine.cache.counters.probes["store"] == {
        Answer.NO_ANSWER: len(KEYS),
        Answer.PRESENT: 0,
        Answer.ABSENT: 0,
        Answer.NOT_SENT: 0,
    }
    assert machine.lookup().remote == 0
    machine.close()


def test_a_silent_store_costs_nothing_but_counted_misses() -> None:
    machine = Machine({}, probe_timeout=0.02, write_timeout=0.05)
    machine.store.silent = True
    written = machine.offload(3)
    for _ in range(3):
        found = machine.lookup()
        assert (found.num_chunks, found.remote) == (3, 0)  # what is ours is there all the while
        assert machine.runtime.wait_jobs(found.probes, TIMEOUT)
    machine.settle()
    assert machine.store.fired[StoreFault.SILENT] > 0
    assert machine.cache.counters.probes["store"][Answer.NO_ANSWER] == 3
    assert machine.cache.counters.drops["store"][DropReason.WRITE_FAILED] == 3
    assert torch.equal(machine.load(), written)
    assert machine.misses() == {MissReason.ABSENT: 4}
    assert machine.cache.stats()[0].used == machine.cache.stats()[0].ready == 3
    machine.close()


def test_store_that_falls_silent_during_a_fetch_misses() -> None:
    images: Images = {}
    writer = Machine(images)
    writer.offload(2)
    writer.settle()
    writer.close()
    reader = Machine(images, probe_timeout=5.0, load_timeout=0.05)
    reader.runtime.wait_jobs(reader.lookup().probes, TIMEOUT)
    reader.store.silent = True
    assert reader.prefetch() == 0
    assert reader.misses()[MissReason.DEADLINE] == 2
    assert reader.cache.stats()[0].used == 0
    reader.store.silent = False
    give_up = time.monotonic() + TIMEOUT
    while reader.prefetch() < 2:  # a busy machine may take longer than `load_timeout`
        assert time.monotonic() < give_up
    reader.close()


def test_a_store_that_is_closed_answers_at_once() -> None:
    machine = Machine({})
    machine.store.close()
    (probe,) = machine.lookup().probes
    assert machine.cache.progress(probe).is_over
    assert machine.cache.counters.probes["store"][Answer.NO_ANSWER] == len(KEYS)
    machine.offload(1)
    machine.settle()
    assert machine.cache.counters.drops["store"][DropReason.WRITE_FAILED] == 1
    machine.close()


def test_a_store_that_nobody_asks_answers_at_once(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine({})
    machine.runtime._probers.clear()
    machine.lookup()
    assert machine.cache.counters.probes["store"][Answer.NO_ANSWER] == len(KEYS)
    assert "could not be submitted" in caplog.text
    machine.close()
