"""A stack with a remote tier: what one engine has stored there another one is served, byte by byte."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

import pytest
import torch

from longshore.cache import GroupKeys
from longshore.config import Config
from longshore.errors import ConfigError, PlanError, TierClosedError
from longshore.keys import Scope
from longshore.layout import from_rows
from longshore.runtime.stack import Stack, open_stack
from longshore.testing import KeyStore
from longshore.testing.key_store import Images
from longshore.tiers.arena import Arena
from longshore.tiers.file import capacity_for
from longshore.transfer import CpuDevice

TIMEOUT = 60.0
KEYS = [hashlib.sha256(bytes([i])).digest() for i in range(3)]


def opened(rows: torch.Tensor, images: Images, **settings: object) -> Stack:
    """A stack over these rows, with a store that has `images`."""
    layout = from_rows(rows, pages_per_block=4, block_size=16)
    scope = Scope(model="m", weights="w", dtype="d", layout=layout.fingerprint, block_size=16)
    host = {} if "file_mode" in settings else {"host_size": 64 * layout.image_bytes}
    config = Config.make(**host, background=False, **settings)

    def open_store(arena: Arena, image_bytes: tuple[int, ...], scope: bytes, generation: int) -> KeyStore:
        return KeyStore(arena, image_bytes, name=f"store-{len(scope)}", images=images)

    return open_stack(config, layout, scope, CpuDevice(), open_remote=[open_store])


def rows_of(seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (8, 4 * 1024), dtype=torch.uint8, generator=torch.manual_seed(seed))


@pytest.mark.parametrize("with_files", [False, True])
def test_what_one_engine_stored_another_one_is_served(tmp_path: Path, with_files: bool) -> None:
    images: Images = {}
    here, there = rows_of(1), rows_of(2)
    files = {"file_path": tmp_path, "file_size": capacity_for(8, 8192)} if with_files else {}
    with opened(here, images, **files) as stack:
        with stack.runtime.batch() as cache:
            job = cache.store({0: GroupKeys(KEYS)}, {0: range(3)})[0].job
        assert job is not None
        assert stack.runtime.wait_jobs([job], TIMEOUT)
        while stack.runtime.pump():
            pass
        assert len(images) == 3
        assert [store.name for store in stack.remote] == ["store-32"]
    with opened(there, images) as stack:
        with stack.runtime.batch() as cache:
            probes = cache.lookup({0: GroupKeys(KEYS)}, stack.runtime.clock()).probes
        stack.runtime.wait_jobs(probes, TIMEOUT)
        with stack.runtime.batch() as cache:
            jobs = cache.prefetch({0: GroupKeys(KEYS)}, stack.runtime.clock())
        assert stack.runtime.wait_jobs(jobs, TIMEOUT)
        with stack.runtime.batch() as cache:
            found = cache.lookup({0: GroupKeys(KEYS)}, stack.runtime.clock())
            assert found.lease is not None
            cache.load(found.lease, {0: [4, 5, 6]})
        assert stack.runtime.wait_load(found.lease, TIMEOUT).outcome.num_chunks == 3
        with stack.runtime.batch() as cache:
            cache.release(found.lease)
    assert torch.equal(there[4:7], here[:3])


def test_a_store_that_cannot_be_opened_leaves_nothing_behind(tmp_path: Path) -> None:
    layout = from_rows(rows_of(1), pages_per_block=4, block_size=16)
    scope = Scope(model="m", weights="w", dtype="d", layout=layout.fingerprint, block_size=16)
    size = capacity_for(8, layout.image_bytes)
    config = Config.make(host_size=1 << 20, background=False, file_path=tmp_path, file_size=size)

    def refuse(**_: object) -> KeyStore:
        raise ConfigError("no such store")

    for _ in range(2):  # the second time the directory would be in use, had the first one stayed open
        with pytest.raises(ConfigError, match="no such store"):
            open_stack(config, layout, scope, CpuDevice(), open_remote=[refuse])


def test_a_remote_tier_is_told_the_generation_of_the_files(tmp_path: Path) -> None:
    layout = from_rows(rows_of(1), pages_per_block=4, block_size=16)
    scope = Scope(model="m", weights="w", dtype="d", layout=layout.fingerprint, block_size=16)
    config = Config.make(host_size=64 * layout.image_bytes, background=False, file_path=tmp_path, file_size=1 << 24)
    told: list[int] = []

    def store(arena: Arena, image_bytes: tuple[int, ...], generation: int, **_: object) -> KeyStore:
        told.append(generation)
        return KeyStore(arena, image_bytes, name="store")

    for _ in range(2):
        stack = open_stack(config, layout, scope, CpuDevice(), open_remote=[store])
        with contextlib.closing(stack), stack.runtime.batch() as cache:
            cache.reset()
    assert told == [0, 1]


def test_remote_tiers_need_host_memory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="remote tiers need a host tier"):
        opened(rows_of(1), {}, file_path=tmp_path, file_size=1 << 24, file_mode="gds")


def test_a_store_for_images_of_other_sizes_is_closed_again() -> None:
    layout = from_rows(rows_of(1), pages_per_block=4, block_size=16)
    scope = Scope(model="m", weights="w", dtype="d", layout=layout.fingerprint, block_size=16)
    made: list[KeyStore] = []

    def other(arena: Arena, **_: object) -> KeyStore:
        made.append(KeyStore(arena, [1 << 20]))
        return made[-1]

    with pytest.raises(PlanError, match="store has images of"):
        open_stack(Config.make(host_size=1 << 20), layout, scope, CpuDevice(), open_remote=[other])
    with pytest.raises(TierClosedError):
        made[0].ask([], 0, 0.0)
