"""Two groups with images of different sizes, from the device through host memory and files and back, byte by byte."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from longshore.boundary import FILE, HOST
from longshore.cache import GroupKeys
from longshore.cache.eviction_policies import POLICIES
from longshore.config import Config
from longshore.keys import Scope
from longshore.layout import KVGroup, KVLayout, PageRef
from longshore.runtime.stack import Stack, open_stack
from longshore.tiers.arena import DISK_PAGE
from longshore.tiers.file import capacity_for
from longshore.transfer import CpuDevice

BLOCKS = 24
FULL, WINDOW = 0, 1
LAYERS = {FULL: (0, 1, 2), WINDOW: (3,)}
SLABS = 5
TIMEOUT = 60.0


class Machine:
    """A device of two groups, three layers and one; host memory for five of the larger images."""

    def __init__(self, directory: Path | None, file_slots: int = 12, **more: Any) -> None:
        self.tensors = [torch.zeros(BLOCKS * DISK_PAGE, dtype=torch.uint8) for _ in range(4)]
        refs = [PageRef(tensor, 0, DISK_PAGE, DISK_PAGE) for tensor in range(4)]
        groups = [KVGroup("full", 4, 1, tuple(refs[:3])), KVGroup("window", 4, 1, tuple(refs[3:]))]
        self.layout = KVLayout(groups, self.tensors, BLOCKS)
        file = {"file_path": directory, "file_size": capacity_for(file_slots, 3 * DISK_PAGE)} if directory else {}
        config = Config.make(host_size=SLABS * 3 * DISK_PAGE, background=False, backup="write_through", **file, **more)
        scope = Scope(model="m", weights="w", dtype="d", layout=self.layout.fingerprint, block_size=4)
        self.stack = open_stack(config, self.layout, scope, CpuDevice())

    def page(self, layer: int, block: int) -> torch.Tensor:
        return self.tensors[layer][block * DISK_PAGE : (block + 1) * DISK_PAGE]

    def fill(self, group: int, block: int, key: bytes) -> None:
        """What a chunk of `key` has in each layer."""
        for layer in LAYERS[group]:
            self.page(layer, block).copy_(content(key, layer))

    def poison(self) -> None:
        for tensor in self.tensors:
            tensor.fill_(0xCC)

    def store(self, group: int, keys: list[bytes]) -> None:
        blocks = list(range(len(keys)))
        for block, key in enumerate(keys):
            self.fill(group, block, key)
        with self.stack.runtime.batch() as cache:
            offload = cache.store({group: GroupKeys(keys)}, {group: blocks})[group]
        if offload.job is not None:
            assert self.stack.runtime.wait_jobs([offload.job], TIMEOUT)

    def load(self, group: int, keys: list[bytes]) -> tuple[int, set[str]]:
        """How many of `keys` come back, each byte as it was; and from where."""
        self.poison()
        with self.stack.runtime.batch() as cache:
            found = cache.lookup({group: GroupKeys(keys)}, self.stack.runtime.clock())
            if found.lease is None:
                return 0, set()
            cache.load(found.lease, {group: list(range(BLOCKS - found.num_chunks, BLOCKS))})
        outcome = self.stack.runtime.wait_load(found.lease, TIMEOUT).outcome
        for position in range(outcome.num_chunks):
            for layer in LAYERS[group]:
                assert torch.equal(
                    self.page(layer, BLOCKS - found.num_chunks + position), content(keys[position], layer)
                )
        with self.stack.runtime.batch() as cache:
            cache.release(found.lease)
        return outcome.num_chunks, set(outcome.sources)

    def close(self) -> None:
        assert self.stack.close()


def content(key: bytes, layer: int) -> torch.Tensor:
    chance = torch.Generator().manual_seed(int.from_bytes(key[:3], "big") * 4 + layer)
    return torch.randint(0, 256, (DISK_PAGE,), dtype=torch.uint8, generator=chance)


def path(group: int, prompt: int, length: int) -> list[bytes]:
    return [bytes([group + 1, prompt, at + 1]).ljust(32, b".") for at in range(length)]


@pytest.fixture
def machine() -> Iterator[Machine]:
    made = Machine(None)
    yield made
    made.close()


def sizes(stack: Stack, tier: str) -> list[tuple[int, int]]:
    with stack.runtime.locked() as cache:
        (stats,) = (each for each in cache.stats() if each.name == tier)
    assert stats.used_bytes <= stats.nbytes
    return [(each.slabs, each.used) for each in stats.sizes]


def test_each_group_comes_back_from_slots_of_its_size(machine: Machine) -> None:
    machine.store(FULL, path(FULL, 0, 2))
    machine.store(WINDOW, path(WINDOW, 0, 7))
    assert sizes(machine.stack, HOST) == [(3, 7), (2, 2)]
    assert machine.load(FULL, path(FULL, 0, 3)) == (2, {HOST})
    assert machine.load(WINDOW, path(WINDOW, 0, 8)) == (7, {HOST})


def test_host_memory_goes_between_image_sizes_and_back(machine: Machine) -> None:
    for prompt in range(5):
        machine.store(WINDOW, path(WINDOW, prompt, 3))
    assert sizes(machine.stack, HOST) == [(5, 15), (0, 0)]
    machine.store(FULL, path(FULL, 0, 4))
    assert sizes(machine.stack, HOST) == [(1, 3), (4, 4)]
    assert machine.load(FULL, path(FULL, 0, 4))[0] == 4
    assert [machine.load(WINDOW, path(WINDOW, prompt, 3))[0] for prompt in range(5)] == [0, 0, 0, 0, 3]
    machine.store(WINDOW, path(WINDOW, 1, 12))
    assert sizes(machine.stack, HOST)[0][0] >= 4
    assert machine.load(WINDOW, path(WINDOW, 1, 12))[0] == 12


def test_files_keep_both_sizes_over_a_restart(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.store(FULL, path(FULL, 0, 3))
    machine.store(WINDOW, path(WINDOW, 0, 6))
    machine.close()
    machine = Machine(tmp_path)
    assert machine.load(FULL, path(FULL, 0, 3)) == (3, {FILE})
    assert machine.load(WINDOW, path(WINDOW, 0, 6)) == (6, {FILE})
    assert machine.load(WINDOW, path(WINDOW, 0, 6)) == (6, {HOST})
    machine.close()


def test_what_was_discarded_does_not_come_back_with_a_restart(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.store(FULL, path(FULL, 0, 3))
    machine.store(WINDOW, path(WINDOW, 0, 3))
    assert machine.stack.runtime.flush(TIMEOUT)
    with machine.stack.runtime.batch() as cache:
        for tier in (HOST, FILE):
            assert cache.discard(path(FULL, 0, 3)[2:], tier) == 1
    machine.close()
    machine = Machine(tmp_path)
    assert machine.load(FULL, path(FULL, 0, 3)) == (2, {FILE})
    assert machine.load(WINDOW, path(WINDOW, 0, 3)) == (3, {FILE})
    machine.close()


@pytest.mark.parametrize("files", [False, True])
def test_random_prompts_of_both_groups_never_get_a_wrong_byte(tmp_path: Path, files: bool) -> None:
    machine = Machine(tmp_path if files else None)
    chance, came, changes = random.Random(4), {FULL: 0, WINDOW: 0}, set()
    for _ in range(200):
        group, prompt = chance.choice([FULL, WINDOW]), chance.randrange(3)
        keys = path(group, prompt, chance.randint(1, 2) if group == FULL else chance.randint(1, 6))
        if chance.random() < 0.5:
            machine.store(group, keys)
        else:
            came[group] += machine.load(group, keys)[0]
        changes.add(tuple(slabs for slabs, _ in sizes(machine.stack, HOST)))
        with machine.stack.runtime.locked() as cache:
            cache.check_integrity()
    assert min(came.values()) > 20, "both groups were served"
    assert len(changes) > 3, "slabs have changed their size"
    machine.close()


@pytest.mark.parametrize("eviction", POLICIES)
def test_every_tier_evicts_by_the_policy_of_the_settings(eviction: str, tmp_path: Path) -> None:
    machine = Machine(tmp_path, eviction=eviction)
    with machine.stack, machine.stack.runtime.locked() as cache:
        of_sizes = [policy.part(pool) for policy in cache._state.policies for pool in (0, 1)]
        assert [type(policy) for policy in of_sizes] == [POLICIES[eviction]] * 4
