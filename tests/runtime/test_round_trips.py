"""Bytes are the same after every pair of tiers: NaN payloads, negative zeros, anything; nothing beside them moves."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from longshore.boundary import FILE, HOST
from longshore.cache import GroupKeys
from longshore.config import Config
from longshore.keys import Scope
from longshore.layout import KVLayout, from_rows
from longshore.runtime.stack import Stack, open_stack
from longshore.transfer.device import CpuDevice, Stream, device_for
from longshore.transfer.device.base import InOnePiece

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

        def reach(self, in_one_piece: InOnePiece) -> None:
            self.arena = in_one_piece.__self__  # type: ignore[attr-defined]

        def stream(self, layout: KVLayout, into: str) -> Stream:
            assert self.arena is not None
            return super().stream(layout, into)

    device = Told()
    layout = from_rows(torch.zeros(4, 600, dtype=torch.uint8), pages_per_block=6, block_size=10)
    scope = Scope(model="m", weights="w", dtype="d", layout=layout.fingerprint, block_size=10)
    with open_stack(Config.make(host_size="256KiB"), layout, scope, device) as opened:
        assert device.arena is opened.arena


def offload(stack: Stack, blocks: list[int]) -> None:
    with stack.runtime.control() as cache:
        job = cache.store({0: GroupKeys(KEYS)}, {0: blocks})[0].job
    assert job is not None
    assert stack.runtime.wait_ended([job], 10)


def load(stack: Stack, blocks: list[int]) -> tuple[str, ...]:
    with stack.runtime.control() as cache:
        hold = cache.lookup({0: GroupKeys(KEYS)}, stack.runtime.clock()).lease
        assert hold is not None
        cache.load(hold, {0: blocks})
    sources = stack.runtime.wait_over(hold, 10).outcome.sources
    with stack.runtime.control() as cache:
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
        with opened.runtime.control() as cache:
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
        with second.runtime.control() as cache:
            cache.reset()
            assert cache.lookup({0: GroupKeys(KEYS)}, 0.0).chunks == 0
    with open_stack(config, layout, scope, device_for(layout)) as third, third.runtime.control() as cache:
        assert cache.lookup({0: GroupKeys(KEYS)}, 0.0).chunks == 0  # a reset outlives the process


def test_another_scope_finds_nothing(tmp_path: Path) -> None:
    rows = torch.zeros((BLOCKS, ROW), dtype=torch.uint8)
    layout = from_rows(rows, pages_per_block=6, block_size=10)
    config = Config.make(host_size="256KiB", file_path=tmp_path / "kv", file_size="1MiB")
    for weights, found in (("a", 0), ("b", 0), ("b", 3)):
        scope = Scope(model="m", weights=weights, dtype="d", layout=layout.fingerprint, block_size=10)
        with open_stack(config, layout, scope, device_for(layout)) as opened:
            with opened.runtime.control() as cache:
                match = cache.lookup({0: GroupKeys(KEYS)}, 0.0)
                assert match.chunks == found
                if match.lease is not None:
                    cache.release(match.lease)
            if not found:
                offload(opened, [0, 1, 2])
