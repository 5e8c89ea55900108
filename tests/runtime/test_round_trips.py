"""Bytes are the same after every pair of tiers: NaN payloads, negative zeros, anything; nothing beside them moves."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from failing_copy import FailingCopy
from longshore.boundary import DEVICE, FILE, HOST
from longshore.cache import DropReason, GroupKeys, MissReason, Protection, TieredCache
from longshore.config import Config
from longshore.errors import DeviceError
from longshore.keys import Scope
from longshore.layout import KVLayout, from_rows
from longshore.runtime.stack import Stack, open_stack
from longshore.transfer.device import CpuDevice, Stream, device_for
from longshore.transfer.device.base import Copy, CpuStream, DeviceEvent, InOnePiece
from longshore.transfer.pieces import CopyBatch
from residents import residents_of

BLOCKS, ROW = 24, 6 * 1000  # rows that are no multiple of anything
KEYS = [hashlib.sha256(bytes([i])).digest() for i in range(3)]
PATTERNS = {
    "nan payloads": torch.tensor([0x7FC12345, 0x7F800001, 0xFFC00001 - (1 << 32)], dtype=torch.int32),
    "negative zeros": torch.tensor([-(1 << 31), 0, 1], dtype=torch.int32),
    "noise": torch.randint(-(1 << 31), (1 << 31) - 1, (997,), dtype=torch.int32, generator=torch.manual_seed(3)),
}


@pytest.fixture(params=["inside", "background"])
def background(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "background")


@pytest.fixture(params=[1, 2, 3])
def stack(request: pytest.FixtureRequest, tmp_path: Path, background: bool) -> Iterator[tuple[Stack, torch.Tensor]]:
    rows = torch.full((BLOCKS, ROW), 0xAA, dtype=torch.uint8)
    layout = from_rows(rows, pages_per_block=6, block_size=10, blocks_per_chunk=request.param)
    scope = Scope(model="m", weights="w", dtype="d", layout=layout.fingerprint, block_size=10)
    config = Config.make(
        host_size="256KiB",
        file_path=tmp_path / "kv",
        file_size="1MiB",
        blocks_per_chunk=request.param,
        background=background,
    )
    with open_stack(config, layout, scope, device_for(layout)) as opened:
        yield opened, rows


def test_the_device_is_told_what_it_reaches(tmp_path: Path) -> None:
    class Told(CpuDevice):
        arena = None

        def set_registered_memory(self, in_one_piece: InOnePiece) -> None:
            self.arena = in_one_piece.__self__  # type: ignore[attr-defined]

        def stream(self, layout: KVLayout, destination: str) -> Stream:
            assert self.arena is not None
            return super().stream(layout, destination)

    device = Told()
    layout = from_rows(torch.zeros(4, 600, dtype=torch.uint8), pages_per_block=6, block_size=10)
    scope = Scope(model="m", weights="w", dtype="d", layout=layout.fingerprint, block_size=10)
    with open_stack(Config.make(host_size="256KiB"), layout, scope, device) as opened:
        assert device.arena is opened.arena


def offload(stack: Stack, blocks: list[int]) -> None:
    with stack.runtime.batch() as cache:
        job = cache.store({0: GroupKeys(KEYS)}, {0: blocks})[0].job
    assert job is not None
    assert stack.runtime.wait_jobs([job], 10)


def load(stack: Stack, blocks: list[int]) -> tuple[str, ...]:
    with stack.runtime.batch() as cache:
        hold = cache.lookup({0: GroupKeys(KEYS)}, stack.runtime.clock()).lease
        assert hold is not None
        cache.load(hold, {0: blocks})
    sources = stack.runtime.wait_load(hold, 10).outcome.sources
    with stack.runtime.batch() as cache:
        cache.release(hold)
    return sources


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("tier", [HOST, FILE])
def test_through_every_pair_of_tiers(stack: tuple[Stack, torch.Tensor], pattern: str, tier: str) -> None:
    opened, rows = stack
    count = 3 * opened.config.blocks_per_chunk
    source = list(range(1, 2 * count, 2))[:count]
    target = [block for block in range(BLOCKS - 1) if block not in source][-count:][::-1]
    content = PATTERNS[pattern].repeat(count * ROW // 4 // len(PATTERNS[pattern]) + 1)[: count * ROW // 4]
    rows[source] = content.view(torch.uint8).view(count, ROW)
    expected = rows[source].clone()
    offload(opened, source)
    if tier == FILE:
        assert opened.runtime.flush(10)
        with opened.runtime.batch() as cache:
            assert cache.discard(KEYS, HOST) == len(KEYS)
    rows[source] = 0x11
    rows[target] = 0xEE  # poison: every byte must be overwritten
    before = rows.clone()
    assert load(opened, target) == (tier,) * len(KEYS)
    assert torch.equal(rows[target], expected)
    others = [block for block in range(BLOCKS) if block not in target]
    assert torch.equal(rows[others], before[others])


def test_what_a_restart_finds(tmp_path: Path) -> None:
    rows = torch.zeros((BLOCKS, ROW), dtype=torch.uint8)
    layout = from_rows(rows, pages_per_block=6, block_size=10)
    config = Config.make(host_size="256KiB", file_path=tmp_path / "kv", file_size="1MiB")
    scope = Scope(model="m", weights="w", dtype="d", layout=layout.fingerprint, block_size=10)
    rows[:3] = torch.arange(3 * ROW).view(3, ROW).to(torch.uint8)
    with open_stack(config, layout, scope, device_for(layout)) as first:
        offload(first, [0, 1, 2])
    with open_stack(config, layout, scope, device_for(layout)) as second:
        assert load(second, [7, 8, 9]) == (FILE,) * 3
        assert torch.equal(rows[7:10], rows[:3])
        with second.runtime.batch() as cache:
            cache.reset()
            assert cache.lookup({0: GroupKeys(KEYS)}, 0.0).num_chunks == 0
    with open_stack(config, layout, scope, device_for(layout)) as third, third.runtime.batch() as cache:
        assert cache.lookup({0: GroupKeys(KEYS)}, 0.0).num_chunks == 0  # a reset outlives the process


class WithoutParent:
    """A file tier with a path of five chunks, opened again after the record of the second one was damaged."""

    path: ClassVar = [hashlib.sha256(b"%d" % i).digest() for i in range(5)]

    def __init__(self, directory: Path) -> None:
        self.rows = torch.randint(0, 256, (BLOCKS, ROW), dtype=torch.uint8, generator=torch.manual_seed(1))
        layout = from_rows(self.rows, pages_per_block=6, block_size=10)
        config = Config.make(host_size="256KiB", file_path=directory, file_size="1MiB", background=False)
        scope = Scope(model="m", weights="w", dtype="d", layout=layout.fingerprint, block_size=10)
        with open_stack(config, layout, scope, device_for(layout)) as self.stack:
            self.put(self.path)
            tier = self.cache.stats()[1]
            begin = self.in_files[self.path[1]] * (tier.nbytes // tier.slots)
        with (directory / "segment").open("r+b") as segment:
            segment.seek(begin)
            header = segment.read(4096)
            assert self.path[1] in header
            segment.seek(begin)
            segment.write(bytes(each ^ 1 for each in header))
        for name in ("index.0", "index.1", "journal.0", "journal.1"):  # else headers are not read before the images
            (directory / name).write_bytes(bytes((directory / name).stat().st_size))
        self.stack = open_stack(config, layout, scope, device_for(layout))
        assert set(self.in_files) == {self.path[0], *self.path[2:]}

    @property
    def cache(self) -> TieredCache:
        return self.stack.runtime._cache

    @property
    def in_files(self) -> dict[bytes, int]:
        return {each.key: each.slot.index for each in residents_of(self.cache) if each.slot.tier == FILE}

    def found(self, first: int) -> int:
        return self.cache.lookup({0: GroupKeys(self.path, first)}, 0.0, protect=Protection.NONE).num_chunks

    def put(self, keys: list[bytes]) -> list[bytes]:
        """Store these, in host memory and files; which were not there."""
        with self.stack.runtime.batch() as cache:
            order = cache.store({0: GroupKeys(keys)}, {0: range(len(keys))})[0]
        assert order.job is not None
        assert self.stack.runtime.wait_jobs([order.job], 10)
        assert self.stack.runtime.flush(10)
        return [keys[position] for position in order.positions]


@pytest.fixture
def without_parent(tmp_path: Path) -> Iterator[WithoutParent]:
    made = WithoutParent(tmp_path / "kv")
    yield made
    made.stack.close()


def test_chunks_are_whole_once_their_lost_parent_is_restored(
    without_parent: WithoutParent,
) -> None:
    cache, runtime, rows = without_parent.cache, without_parent.stack.runtime, without_parent.rows
    assert [without_parent.found(first) for first in range(5)] == [1, 0, 3, 2, 1]
    with runtime.batch():
        found = cache.lookup({0: GroupKeys(without_parent.path, 2)}, runtime.clock())
        assert found.lease is not None
        cache.load(found.lease, {0: [10, 11, 12]})
    assert runtime.wait_load(found.lease, 10).outcome == (3, (FILE,) * 3)
    assert torch.equal(rows[10:13], rows[2:5])
    written = cache.counters.routes["host->file"]
    assert runtime.flush(10)
    assert written.chunks == 0
    assert without_parent.put(without_parent.path) == [without_parent.path[1]]
    assert written.chunks == 1, "nothing but the parent is written again"
    assert without_parent.found(0) == 5
    cache.check_integrity()


def test_chunks_whose_parent_is_not_recovered_go_first(without_parent: WithoutParent) -> None:
    tier, prompt = without_parent.cache.stats()[1], 0
    room = tier.slots - tier.used
    while room >= 0:  # the last chunk takes the slot of another
        other = [hashlib.sha256(b"%d of %d" % (i, prompt)).digest() for i in range(min(8, room + 1))]
        assert without_parent.put(other) == other
        room, prompt = room - len(other), prompt + 1
    gone = set(without_parent.path) - set(without_parent.in_files)
    assert gone == {without_parent.path[1], without_parent.path[4]}, "of the orphans the last one goes first"


def test_another_scope_finds_nothing(tmp_path: Path) -> None:
    rows = torch.zeros((BLOCKS, ROW), dtype=torch.uint8)
    layout = from_rows(rows, pages_per_block=6, block_size=10)
    config = Config.make(host_size="256KiB", file_path=tmp_path / "kv", file_size="1MiB")
    for weights, found in (("a", 0), ("b", 0), ("b", 3)):
        scope = Scope(model="m", weights=weights, dtype="d", layout=layout.fingerprint, block_size=10)
        with open_stack(config, layout, scope, device_for(layout)) as opened:
            with opened.runtime.batch() as cache:
                match = cache.lookup({0: GroupKeys(KEYS)}, 0.0)
                assert match.num_chunks == found
                if match.lease is not None:
                    cache.release(match.lease)
            if not found:
                offload(opened, [0, 1, 2])


class FailingDevice(CpuDevice):
    """Copies to `destination` fail, while there is one: `at` once they are submitted, or when they end."""

    def __init__(self) -> None:
        self.destination = ""
        self.at = "copy"
        self.fired = 0

    def stream(self, layout: KVLayout, destination: str) -> Stream:
        return FailingStream(self, destination)

    def check(self, destination: str, at: str) -> None:
        if (destination, at) == (self.destination, self.at):
            self.fired += 1
            raise DeviceError("the device fell off the bus")


class FailingStream(CpuStream):
    def __init__(self, device: FailingDevice, destination: str) -> None:
        super().__init__()
        self._device = device
        self._destination = destination

    def copy(self, batch: CopyBatch, after: tuple[DeviceEvent, ...]) -> Copy:
        self._device.check(self._destination, "copy")
        return FailingCopy(super().copy(batch, after), partial(self._device.check, self._destination, "finish"))


@pytest.fixture(params=["copy", "finish"])
def failing(request: pytest.FixtureRequest) -> Iterator[tuple[FailingDevice, Stack, torch.Tensor]]:
    rows = torch.randint(0, 256, (BLOCKS, ROW), dtype=torch.uint8, generator=torch.manual_seed(2))
    layout = from_rows(rows, pages_per_block=6, block_size=10)
    scope = Scope(model="m", weights="w", dtype="d", layout=layout.fingerprint, block_size=10)
    device = FailingDevice()
    device.at = request.param
    with open_stack(Config.make(host_size="256KiB"), layout, scope, device) as opened:
        yield device, opened, rows


def test_chunks_that_failed_to_load_stay_in_host_memory(
    failing: tuple[FailingDevice, Stack, torch.Tensor],
) -> None:
    device, opened, rows = failing
    offload(opened, [0, 1, 2])
    device.destination = DEVICE
    assert load(opened, [7, 8, 9]) == ()
    assert device.fired == 1
    with opened.runtime.locked() as cache:
        assert {(each.key, each.slot.tier) for each in residents_of(cache)} == {(key, HOST) for key in KEYS}
        assert cache.counters.lost.total() == 0
        assert cache.counters.misses[MissReason.DEVICE_ERROR] == len(KEYS)
    device.destination = ""
    assert load(opened, [7, 8, 9]) == (HOST,) * 3
    assert torch.equal(rows[7:10], rows[:3])


def test_failed_store_leaves_nothing_in_host_memory(
    failing: tuple[FailingDevice, Stack, torch.Tensor],
) -> None:
    device, opened, _ = failing
    device.destination = HOST
    offload(opened, [0, 1, 2])
    assert device.fired == 1
    with opened.runtime.locked() as cache:
        assert residents_of(cache) == []
        assert cache.stats()[0].used == 0
        assert cache.counters.drops[HOST] == {DropReason.WRITE_FAILED: len(KEYS)} | dict.fromkeys(
            set(DropReason) - {DropReason.WRITE_FAILED}, 0
        )
    device.destination = ""
    offload(opened, [0, 1, 2])
    assert load(opened, [7, 8, 9]) == (HOST,) * 3
