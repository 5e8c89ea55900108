"""Close, the background loop, and real tiers across a restart or a reset."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest
from loop_kit import (
    DOWN,
    IMAGE,
    IN,
    OUT,
    UP,
    Machine,
    Prompt,
    Rig,
    path,
    until,
)

from longshore.boundary import FILE, HOST
from longshore.cache import (
    CacheSettings,
    GroupKeys,
    MissReason,
    TieredCache,
    TierSpec,
    WritePolicy,
)
from longshore.errors import TierClosedError, TierError
from longshore.runtime import BackgroundLoop, Runtime
from longshore.runtime.stack import adopt_found, close_runtime
from longshore.tiers.arena import Arena
from longshore.tiers.file import FileTier, capacity_for
from residents import residents_of


def test_close_leaves_nothing_in_flight(rig: Rig) -> None:
    rig.store(path(2))
    hold = rig.load(path(2), [1, 2])  # one transfer runs, one waits
    with rig.runtime.batch() as cache:
        cache.store({0: GroupKeys(path(2, first=9))}, {0: [6, 7]})
    assert not rig.runtime.close(0.0)
    assert rig.device.closed
    assert rig.files.closed
    rig.check_idle()
    assert rig.cache.progress(hold).outcome == (0, ())
    assert rig.misses() == {"tier_off": 2}
    assert rig.runtime.wait_load(hold, 0.0).outcome == (0, ())
    with pytest.raises(TierClosedError, match="the tiers were closed"), rig.runtime.batch():
        pass


def test_log_names_tiers_that_were_not_written(caplog: pytest.LogCaptureFixture) -> None:
    host_only = TieredCache([TierSpec(HOST, 8, IMAGE)], CacheSettings())
    machines = [Rig(), Rig()]
    runtimes = [*(each.runtime for each in machines), Runtime(host_only, [machines[0].device], clock=lambda: 100.0)]
    for runtime in runtimes:
        with runtime.batch() as cache:
            cache.store({0: GroupKeys(path(1))}, {0: [0]})
    runtimes[1].fail(KeyError("by the test"))
    assert not any(close_runtime(each, 0.0) for each in runtimes)
    assert [each.getMessage() for each in caplog.records if each.getMessage().startswith("tiers closed")] == [
        "tiers closed before all blocks were written to file (waited 0 s); blocks not written are misses after a "
        "restart: allow more time to shut down, or set backup to write_through",
        "tiers closed before all blocks were written to file (the control plane has failed); blocks not written are "
        "misses after a restart",
        "tiers closed while copies were in flight (waited 0 s)",
    ]


def test_close_flushes_first(rig: Rig) -> None:
    rig.runtime.clock = time.monotonic
    with rig.runtime.batch() as cache:
        cache.store({0: GroupKeys(path(2))}, {0: [0, 1]})
    sooner = threading.Timer(0.02, rig.device.end)
    later = threading.Timer(0.05, rig.files.end)
    sooner.start()
    later.start()
    assert rig.runtime.close(10.0)
    sooner.join()
    later.join()
    assert {r.slot.tier for r in residents_of(rig.cache)} == {HOST, FILE}
    assert rig.runtime.close()


@pytest.mark.usefixtures("threads")
def test_background_loop_advances_chains_without_calls() -> None:
    cache = TieredCache([TierSpec(HOST, 8, IMAGE), TierSpec(FILE, 8, IMAGE)], CacheSettings(backup=WritePolicy.THROUGH))
    runtime = Runtime(cache, [Prompt(DOWN, UP), Prompt(IN, OUT)])
    loop = BackgroundLoop(runtime)
    with runtime.batch() as control:
        control.store({0: GroupKeys(path(2))}, {0: [0, 1]})
    assert until(lambda: cache.counters.routes["host->file"].chunks == 2)
    with runtime.batch() as control:
        control.discard(path(2), HOST)
        hold = control.lookup({0: GroupKeys(path(2))}, runtime.clock()).lease
        assert hold is not None
        control.load(hold, {0: [4, 5]})

    def arrived() -> bool:
        with runtime.locked() as watched:
            return watched.progress(hold).outcome is not None

    assert until(arrived)
    loop.close()
    loop.close()
    runtime.close()


@pytest.mark.usefixtures("threads")
def test_background_loop_takes_over_running_jobs_and_sleeps_when_idle(rig: Rig) -> None:
    with rig.runtime.batch() as cache:
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


@pytest.mark.usefixtures("threads")
def test_file_tier_serves_the_same_bytes_after_a_restart(tmp_path: Path) -> None:
    image = np.random.default_rng(1).integers(0, 256, (3, IMAGE), dtype=np.uint8)
    machine = Machine(tmp_path)
    machine.memory.blocks[:3] = image
    with machine.runtime.batch() as cache:
        cache.store({0: GroupKeys(path(3))}, {0: [0, 1, 2]})
    assert machine.runtime.flush(10.0)
    with machine.runtime.batch() as cache:
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
def test_no_record_from_before_a_reset_is_found(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    with machine.runtime.batch() as cache:
        cache.store({0: GroupKeys(path(2))}, {0: [0, 1]})
    assert machine.runtime.flush(10.0)
    with machine.runtime.batch() as cache:
        assert cache.reset() == 1
        assert cache.lookup({0: GroupKeys(path(2))}, 0.0).num_chunks == 0
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
def test_tier_that_cannot_store_a_reset_is_disabled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path)

    def fail(generation: int) -> None:
        raise TierError("the medium is full")

    monkeypatch.setattr(machine.file, "reset", fail)
    with machine.runtime.batch() as cache:
        cache.reset()
        job = cache.store({0: GroupKeys(path(1))}, {0: [0]})[0].job
    assert job is not None
    assert machine.runtime.flush(10.0)
    assert [r.slot.tier for r in residents_of(machine.cache)] == [HOST]
    assert machine.cache.counters.drops[FILE].total() == 1
    with pytest.raises(TierClosedError):
        machine.file.recover()
    machine.close()


@pytest.mark.usefixtures("threads")
def test_corrupt_file_is_a_counted_miss(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.memory.blocks[:] = 7
    with machine.runtime.batch() as cache:
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


def test_records_of_other_scopes_are_logged_at_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine(tmp_path)
    with machine.runtime.batch() as cache:
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
        assert said[0] == f"file tier: recovered {found} of {found} chunk images"
        assert len(said) == 1 + told
        assert all("3 records belong to other models" in each and "longshore gc" in each for each in said[1:])
        assert len(residents_of(cache)) == found
        cache.check_integrity()
        file.close()
        arena.close()
