"""Blocks straight between the device and files: from configuration to bytes, on a stand-in for cuFile."""

from __future__ import annotations

import hashlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry

from longshore.cache import GroupKeys
from residents import residents_of

sys.path.append(str(Path(__file__).parents[1] / "tiers"))
from cufile_stand_in import StandInCuFile, cuFileError

from longshore import config as config_module
from longshore.boundary import DEVICE, FILE, Item, Route, Section, Slot, Status, Transfer, TransferResult, Urgency
from longshore.cache import DropReason, Lease
from longshore.config import Config
from longshore.errors import ConfigError, DeviceError, LongshoreError, PlanError, TierClosedError
from longshore.keys import Scope
from longshore.layout import KVLayout, from_rows
from longshore.metrics import LongshoreCollector
from longshore.runtime.selftest import self_test
from longshore.runtime.stack import Stack, open_stack
from longshore.runtime.staging_mover import StagingMover, StagingSlots
from longshore.testing import flip_image_bit
from longshore.tiers.file import GdsFileTier, capacity_for
from longshore.transfer.device import CpuDevice
from longshore.transfer.device.base import CpuImages
from longshore.transfer.engine import TransferEngine

BLOCKS, ROW, PER_CHUNK = 40, 6 * 500, 2
CHUNKS = 12
TIMEOUT = 60.0  # seconds
KEYS = [hashlib.sha256(bytes([i])).digest() for i in range(CHUNKS)]
WRITE, READ = Route(DEVICE, FILE), Route(FILE, DEVICE)


class Pages:
    """The engine's pool: rows of bytes."""

    def __init__(self) -> None:
        self.rows = torch.zeros((BLOCKS, ROW), dtype=torch.uint8)
        self.layout = from_rows(self.rows, pages_per_block=6, block_size=10, blocks_per_chunk=PER_CHUNK)
        self.fill(1)

    def fill(self, seed: int) -> None:
        self.rows.numpy()[:] = np.random.default_rng(seed).integers(0, 256, (BLOCKS, ROW), dtype=np.uint8)

    def read(self, blocks: Any) -> Any:
        return self.rows.numpy()[list(blocks)].copy()

    def write(self, blocks: Any, data: Any) -> None:
        self.rows.numpy()[list(blocks)] = data


@pytest.fixture
def pages() -> Pages:
    return Pages()


@pytest.fixture
def library() -> StandInCuFile:
    return StandInCuFile()


@pytest.fixture(autouse=True)
def small_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four images, so that jobs go in pieces."""
    monkeypatch.setattr("longshore.runtime.staging_mover.STAGING_BYTES", 0)


def opened(pages: Pages, directory: Path, library: object, *, host_size: int | None = None, **changes: Any) -> Stack:
    """A stack; `host_size` instead of the default, which is large."""
    config = Config.make(
        file_path=directory,
        file_size=capacity_for(2 * CHUNKS, pages.layout.image_bytes),
        file_mode="gds",
        blocks_per_chunk=PER_CHUNK,
        **{"background": False, **changes},
    )
    if host_size is not None:
        config = config.model_copy(update={"host_size": host_size})
    scope = Scope(model="m", weights="w", dtype="d", layout=pages.layout.fingerprint, block_size=10)
    return open_stack(config, pages.layout, scope, CpuDevice(), open_gds_tier=partial(GdsFileTier, library=library))


def store(stack: Stack, blocks: list[int]) -> None:
    with stack.runtime.batch() as cache:
        job = cache.store({0: GroupKeys(KEYS)}, {0: blocks})[0].job
    assert job is not None
    assert stack.runtime.wait_jobs([job], 30)


def load(stack: Stack, blocks: list[int], start: int = 0) -> int:
    """How many chunks came."""
    with stack.runtime.batch() as cache:
        hold: Lease | None = cache.lookup({0: GroupKeys(KEYS, start)}, stack.runtime.clock()).lease
        assert hold is not None
        cache.load(hold, {0: blocks})
    outcome = stack.runtime.wait_load(hold, 30).outcome
    with stack.runtime.batch() as cache:
        cache.release(hold)
    assert set(outcome.sources) <= {FILE}
    return len(outcome.sources)


def fallbacks(stack: Stack) -> dict[str, int]:
    assert isinstance(stack.file, GdsFileTier)
    return {reason: count for reason, count in stack.file.fallbacks.items() if count}


@pytest.mark.parametrize("background", [False, True])
def test_from_configuration_to_bytes_and_back(
    pages: Pages, tmp_path: Path, library: StandInCuFile, background: bool
) -> None:
    blocks = list(range(2 * CHUNKS))
    with opened(pages, tmp_path, library, background=background) as stack:
        assert stack.host is stack.arena is None
        self_test(stack, pages, [30, 31])
        before = pages.read(blocks)
        store(stack, blocks)
        pages.fill(2)
        elsewhere = blocks[::-1]
        assert load(stack, elsewhere) == CHUNKS
        np.testing.assert_array_equal(pages.read(elsewhere), before)
        assert fallbacks(stack) == {}
    assert library.calls["write"] == CHUNKS + 1  # and the self-test's
    assert library.is_clean, library.breaches


@pytest.mark.parametrize("name", ["longshore-runtime", "longshore-events"])
def test_a_stack_without_threads_to_spare_leaves_nothing_behind(
    pages: Pages, tmp_path: Path, library: StandInCuFile, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    before = set(threading.enumerate())
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            opened(pages, tmp_path / "tier", library, background=True, events_path=tmp_path / "events")
    assert set(threading.enumerate()) == before
    opened(pages, tmp_path / "tier", library).close()
    assert library.is_clean, library.breaches


def test_daily_write_budget_holds_without_host_tier(pages: Pages, tmp_path: Path, library: StandInCuFile) -> None:
    hourly = 3 * (4096 + pages.layout.image_bytes)
    with opened(pages, tmp_path, library, file_daily_writes=24 * hourly) as stack:
        store(stack, list(range(2 * CHUNKS)))
        with stack.runtime.locked() as cache:
            drops = {reason: n for reason, n in cache.counters.drops[FILE].items() if n}
    assert library.calls["write"] == 3
    assert drops == {DropReason.RATE_LIMIT: CHUNKS - 3}


def test_the_next_process_finds_what_was_written(pages: Pages, tmp_path: Path, library: StandInCuFile) -> None:
    blocks = list(range(2 * CHUNKS))
    before = pages.read(blocks)
    with opened(pages, tmp_path, library) as stack:
        store(stack, blocks)
    pages.fill(2)
    with opened(pages, tmp_path, library) as stack:
        assert load(stack, blocks) == CHUNKS
    np.testing.assert_array_equal(pages.read(blocks), before)


def test_every_other_image_by_way_of_the_host(pages: Pages, tmp_path: Path, library: StandInCuFile) -> None:
    fired: list[str] = []

    def fault(name: str) -> None:
        if name in ("read", "write") and library.calls[name] % 2:
            fired.append(name)
            raise cuFileError("every other one")

    blocks = list(range(2 * CHUNKS))
    before = pages.read(blocks)
    with opened(pages, tmp_path, library) as stack:
        library.fault = fault
        store(stack, blocks)
        pages.fill(2)
        assert load(stack, blocks) == CHUNKS
        np.testing.assert_array_equal(pages.read(blocks), before)
        assert fallbacks(stack) == {"gds_write": fired.count("write"), "gds_read": fired.count("read")}
        assert {"read", "write"} <= set(fired)


def test_what_went_by_way_of_the_host_is_a_metric(pages: Pages, tmp_path: Path, library: StandInCuFile) -> None:
    with opened(pages, tmp_path, library) as stack:
        found = CollectorRegistry()
        found.register(LongshoreCollector(stack.runtime, engine=stack.transfer_engine, file=stack.file))

        def count(reason: str) -> float | None:
            return found.get_sample_value("longshore_file_fallbacks_total", {"reason": reason})

        reasons = ("no_direct_io", "no_queue", "no_gds", "gds_write", "gds_read", "unaligned", "host_checksum")
        assert [count(reason) for reason in reasons] == [0] * 7

        def fault(name: str) -> None:
            if name == "write":
                raise cuFileError("full")

        library.fault = fault
        store(stack, list(range(2 * CHUNKS)))
        assert count("gds_write") == CHUNKS


def test_what_rots_ends_the_load_there_and_nothing_else_changes(
    pages: Pages, tmp_path: Path, library: StandInCuFile
) -> None:
    blocks = list(range(2 * CHUNKS))
    before = pages.read(blocks)
    with opened(pages, tmp_path, library) as stack:
        store(stack, blocks)
        with stack.runtime.batch() as cache:
            (slot,) = [each.slot.index for each in residents_of(cache) if each.key == KEYS[5]]
        flip_image_bit(tmp_path, slot, 12345)
        pages.fill(2)
        after = pages.read(blocks)
        assert load(stack, blocks) == 5
        np.testing.assert_array_equal(pages.read(blocks[:10]), before[:10])
        np.testing.assert_array_equal(pages.read(blocks[10:]), after[10:])
        store(stack, blocks)  # and the tier goes on


def test_a_device_that_keeps_no_images_goes_by_host_memory(
    pages: Pages, tmp_path: Path, library: StandInCuFile, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def refuse(self: CpuDevice, nbytes: int) -> CpuImages:
        raise DeviceError("no room")

    monkeypatch.setattr(CpuDevice, "allocate_images", refuse)
    with caplog.at_level(logging.WARNING), opened(pages, tmp_path, library, host_size=1 << 20) as stack:
        assert stack.host is not None
        assert "file_mode gds is not available, using posix with a host tier of 1.0 MiB: no room" in caplog.text
        store(stack, list(range(2 * CHUNKS)))
    assert not library.calls


def test_gds_without_a_path_is_refused() -> None:
    with pytest.raises(ConfigError, match="file_mode is gds, but there is no file tier"):
        Config.make(file_mode="gds")


def test_gds_needs_no_host_memory_unless_it_falls_back(
    pages: Pages, tmp_path: Path, library: StandInCuFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config_module, "available_memory", lambda: 1 << 10)
    with opened(pages, tmp_path, library) as stack:
        assert stack.host is None
        store(stack, list(range(2 * CHUNKS)))

    def refuse(self: CpuDevice, nbytes: int) -> CpuImages:
        raise DeviceError("no room")

    monkeypatch.setattr(CpuDevice, "allocate_images", refuse)
    with pytest.raises(ConfigError, match=r"host_size is 4.0 GiB, but only 1.0 KiB of memory is free"):
        opened(pages, tmp_path, library)


def test_host_memory_in_front_of_gds_is_refused(tmp_path: Path) -> None:
    settings = {"file_path": tmp_path, "file_size": "1GiB", "host_size": "1GiB"}
    Config.make(**settings)
    with pytest.raises(ConfigError, match="file_mode gds has no host tier: remove host_size, or use file_mode posix"):
        Config.make(**settings, file_mode="gds")


class Machine:
    """A mover alone, over a staging area of four images."""

    def __init__(self, pages: Pages, directory: Path) -> None:
        layout = pages.layout
        self.memory = CpuImages(4 * layout.image_bytes)
        self.staging = StagingSlots(self.memory, layout.image_bytes)
        self.tier = GdsFileTier(
            directory,
            capacity=capacity_for(CHUNKS, layout.image_bytes),
            image_bytes=layout.image_bytes,
            memory=self.memory,
            scope=bytes(32),
            library=StandInCuFile(),
        )
        self.engine = TransferEngine(layout, CpuDevice(), self.staging)
        self.now = 0.0
        self.mover = StagingMover(self.engine, layout, self.staging, self.tier, clock=lambda: self.now)
        self.layout: KVLayout = layout

    def transfer(self, job: int, route: Route, chunks: range, **changes: Any) -> Transfer:
        items = []
        for chunk in chunks:
            slot = Slot(FILE, 0, chunk)
            source, destination = (None, slot) if route == WRITE else (slot, None)
            items.append(Item(KEYS[chunk], None, source, destination))
        blocks = tuple(range(PER_CHUNK * chunks.start, PER_CHUNK * chunks.stop))
        return Transfer(job, route, tuple(items), (Section(0, 0, blocks),), **changes)

    def run(self, transfer: Transfer) -> TransferResult:
        self.mover.submit(transfer)
        return self.wait(transfer.job)

    def wait(self, job: int) -> TransferResult:
        give_up = time.monotonic() + TIMEOUT
        while time.monotonic() < give_up:
            for result in self.mover.poll():
                if result.job == job:
                    return result
            time.sleep(0.0005)
        raise AssertionError(f"job {job} does not end")


@pytest.fixture
def machine(pages: Pages, tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(pages, tmp_path / "mover")
    yield machine
    machine.mover.close()
    assert machine.staging.free == 4


def test_a_job_longer_than_the_ring(machine: Machine, pages: Pages) -> None:
    before = pages.read(range(2 * CHUNKS))
    result = machine.run(machine.transfer(1, WRITE, range(CHUNKS)))
    assert result.statuses == (Status.OK,) * CHUNKS
    assert result.bytes == CHUNKS * machine.layout.image_bytes
    pages.fill(2)
    assert machine.run(machine.transfer(2, READ, range(CHUNKS))).statuses == (Status.OK,) * CHUNKS
    np.testing.assert_array_equal(pages.read(range(2 * CHUNKS)), before)


@pytest.mark.parametrize("first_block", [1, 3])
def test_a_section_that_begins_within_a_chunk_goes_in_pieces(machine: Machine, pages: Pages, first_block: int) -> None:
    machine.run(machine.transfer(1, WRITE, range(CHUNKS)))
    before = pages.read(range(2 * CHUNKS))
    pages.fill(2)
    whole = machine.transfer(2, READ, range(CHUNKS))
    (section,) = whole.sections
    section = section._replace(first_block=first_block, blocks=section.blocks[1:])
    result = machine.run(Transfer(2, READ, whole.items, (section,)))
    assert set(result.statuses) == {Status.OK}
    np.testing.assert_array_equal(pages.read(range(1, 2 * CHUNKS)), before[1:])
    assert (pages.read([0]) != before[:1]).any()


def test_an_empty_job_ends(machine: Machine) -> None:
    assert machine.run(Transfer(1, WRITE, ())).statuses == ()


def test_urgent_jobs_get_the_ring_first(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.run(machine.transfer(1, WRITE, range(4)))
    begun: list[int] = []
    begin = machine.mover._begin

    def noted(job: Any) -> None:
        begun.append(job.transfer.job)
        begin(job)

    monkeypatch.setattr(machine.mover, "_begin", noted)
    machine.mover.submit(machine.transfer(2, WRITE, range(12), urgency=Urgency.WRITE))
    machine.mover.submit(machine.transfer(3, READ, range(4), urgency=Urgency.DEMAND))
    machine.wait(3)
    machine.wait(2)
    assert begun == [2, 3, 2, 2]


def test_unstarted_transfers_can_be_cancelled_and_late(machine: Machine) -> None:
    machine.mover.submit(machine.transfer(1, WRITE, range(CHUNKS)))
    machine.mover.cancel(1)
    statuses = machine.wait(1).statuses
    assert set(statuses[4:]) == {Status.CANCELLED}
    machine.mover.submit(machine.transfer(2, WRITE, range(CHUNKS), deadline=1e9))
    machine.now = 2e9
    assert set(machine.wait(2).statuses[4:]) == {Status.DEADLINE}


def test_a_cancelled_read_lets_go_of_its_blocks_at_once(
    machine: Machine, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.run(machine.transfer(1, WRITE, range(3)))
    pages.fill(2)
    after = pages.read(range(6))
    monkeypatch.setattr(machine.tier, "cancel", lambda ticket: None)  # the reads have begun
    machine.mover.submit(machine.transfer(2, READ, range(3)))
    assert machine.mover.touches_blocks(2)
    machine.mover.cancel(2)
    assert not machine.mover.touches_blocks(2)
    assert machine.wait(2).statuses == (Status.CANCELLED,) * 3
    np.testing.assert_array_equal(pages.read(range(6)), after)


def test_write_releases_its_blocks_once_images_are_in_ring(
    machine: Machine, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, poll = pages.read(range(6)), machine.tier.poll
    monkeypatch.setattr(machine.tier, "poll", list)  # no file operation ends
    machine.mover.submit(machine.transfer(1, WRITE, range(3)))
    while machine.mover.touches_blocks(1):
        assert machine.mover.poll() == []
    pages.fill(2)
    monkeypatch.setattr(machine.tier, "poll", poll)
    assert machine.wait(1).statuses == (Status.OK,) * 3
    assert machine.run(machine.transfer(2, READ, range(3))).statuses == (Status.OK,) * 3
    np.testing.assert_array_equal(pages.read(range(6)), before)


def test_a_read_that_fails_ends_what_comes_after_it(machine: Machine, pages: Pages) -> None:
    machine.run(machine.transfer(1, WRITE, range(3)))
    before = pages.read(range(2 * CHUNKS))
    pages.fill(2)
    after = pages.read(range(2 * CHUNKS))
    statuses = machine.run(machine.transfer(2, READ, range(CHUNKS))).statuses
    assert statuses == (Status.OK,) * 3 + (Status.MISMATCH,) + (Status.CANCELLED,) * 8
    np.testing.assert_array_equal(pages.read(range(6)), before[:6])
    np.testing.assert_array_equal(pages.read(range(6, 24)), after[6:])


def test_slots_that_a_failed_read_left_are_zero(machine: Machine) -> None:
    machine.run(machine.transfer(1, WRITE, range(1)))
    read = machine.transfer(2, READ, range(1))
    other = replace(read, items=(read.items[0]._replace(key=KEYS[1]),))
    assert machine.run(other).statuses == (Status.MISMATCH,)
    used = machine.staging._free[-1]  # the record is whole, so its image has come
    found = bytearray(machine.layout.image_bytes)
    machine.memory.load(used * len(found), memoryview(found))
    assert not any(found)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda t: replace(t, route=Route("host", FILE)),
        lambda t: replace(t, sections=(t.sections[0]._replace(blocks=(0, 1, 2)),)),
        lambda t: Transfer(
            t.job, t.route, (*t.items[:-1], t.items[-1]._replace(destination=Slot(FILE, 0, 999))), t.sections
        ),
        lambda t: Transfer(t.job, t.route, (*t.items[:-1], t.items[-1]._replace(destination=None)), t.sections),
        lambda t: replace(t, sections=(*t.sections, Section(0, 0, ()))),
        lambda t: replace(t, job=-1),
    ],
)
def test_a_transfer_that_does_not_fit_is_refused_whole(machine: Machine, spoil: Callable[[Transfer], Transfer]) -> None:
    with pytest.raises(LongshoreError):
        machine.mover.submit(spoil(machine.transfer(1, WRITE, range(CHUNKS))))
    assert machine.mover.poll() == []
    assert machine.staging.free == 4
    assert set(machine.run(machine.transfer(1, WRITE, range(CHUNKS))).statuses) == {Status.OK}


def test_a_job_twice_is_refused(machine: Machine) -> None:
    machine.mover.submit(machine.transfer(1, WRITE, range(CHUNKS)))
    with pytest.raises(PlanError, match="an unused job number"):
        machine.mover.submit(machine.transfer(1, WRITE, range(1)))
    machine.wait(1)


@pytest.mark.parametrize(
    ("route", "side"), [(WRITE, "engine"), (WRITE, "tier"), (READ, "engine"), (READ, "tier")], ids=str
)
def test_an_internal_error_fails_its_pieces_alone(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, route: Route, side: str
) -> None:
    machine.run(machine.transfer(1, WRITE, range(CHUNKS)))
    fired = list[str]()

    def broken(*arguments: Any) -> None:
        fired.append(side)
        raise ZeroDivisionError("an error of ours")

    with monkeypatch.context() as patched:
        patched.setattr(machine.mover._engine if side == "engine" else machine.mover._tier, "submit", broken)
        result = machine.run(machine.transfer(2, route, range(CHUNKS)))
    assert fired
    assert set(result.statuses) <= {Status.INTERNAL_ERROR, Status.CANCELLED}
    assert result.statuses[0] is Status.INTERNAL_ERROR
    assert machine.staging.free == 4
    assert caplog.text.count("ZeroDivisionError: an error of ours") == 1
    if route == READ:
        assert set(machine.run(machine.transfer(3, READ, range(CHUNKS))).statuses) == {Status.OK}, "records are whole"
    assert set(machine.run(machine.transfer(4, WRITE, range(CHUNKS))).statuses) == {Status.OK}


def test_close_ends_everything_and_the_results_can_be_polled(machine: Machine) -> None:
    machine.mover.submit(machine.transfer(1, WRITE, range(CHUNKS)))
    machine.mover.submit(machine.transfer(2, READ, range(CHUNKS)))
    machine.mover.close()
    results = machine.mover.poll()
    assert sorted(result.job for result in results) == [1, 2]  # each of them once
    assert {status for result in results for status in result.statuses} <= {
        Status.OK,
        Status.TIER_OFF,
        Status.MISMATCH,
        Status.CANCELLED,
    }
    with pytest.raises(TierClosedError):
        machine.mover.submit(machine.transfer(3, WRITE, range(1)))


def test_closing_a_stack_ends_its_job_in_flight(pages: Pages, tmp_path: Path, library: StandInCuFile) -> None:
    stack = opened(pages, tmp_path, library)
    with stack.runtime.batch() as cache:
        job = cache.store({0: GroupKeys(KEYS)}, {0: list(range(2 * CHUNKS))})[0].job
    assert job is not None
    assert stack.runtime.in_flight(job)
    assert not stack.close(flush_timeout=0.0)
    assert not stack.runtime.in_flight(job)
    assert library.is_clean, library.breaches


def test_a_ring_without_room_is_refused() -> None:
    with pytest.raises(PlanError, match="room for an image of 8192 bytes, got 4096"):
        StagingSlots(CpuImages(4096), 8192)
