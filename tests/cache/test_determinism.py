"""The same calls give the same log, byte for byte, whatever the process and its hash seed."""

from __future__ import annotations

import hashlib
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from cache_kit import Setup, chunks, key
from cache_machine import PATHS, PATTERNS, REQUESTS
from cache_model_groups import Groups

from longshore.boundary import FILE, HOST, Status
from longshore.cache import PrefetchPolicy


def upheave(world: Groups, dice: random.Random) -> None:
    """Time passes, the device is replaced, and a tier changes its size."""
    world.tick(dice.choice((1.0, 4.0)))
    world.copy_inside(1)
    world.replace_device()
    world.resize(dice.choice((HOST, FILE, "third")), dice.randrange(3, 7), dice.random() < 0.5)


def busy_world(seed: int) -> Groups:
    """A fixed random life of some hundred calls."""
    dice = random.Random(seed)
    backup = dice.choice(("write_through", "write_back"))
    world = Groups(Setup(host=4, file=6, more=(5,), ranks=2, per_chunk=2, backup=backup, events=10_000))
    for _ in range(60):
        path = dice.choice(PATHS)
        match dice.randrange(9):
            case 0 | 1:
                world.store(path, 0, dice.random() < 0.5)
            case 2:
                hold = world.lookup(path, 0, dice.choice(REQUESTS))
                if hold is not None and dice.random() < 0.7:
                    world.load(hold, len(world.holds[hold].keys), 0, 0)
            case 3:
                world.settle_all()
            case 4:
                world.lookup_each(key(path))
            case 5:
                for job, rank in world.runnable()[:1]:
                    world.deliver(job, rank, dice.choice(PATTERNS))
                    world.apply(world.results[-1:])
            case 6:
                for hold in [each for each, model in world.holds.items() if not model.has_load][:1]:
                    world.prefetch(hold, PrefetchPolicy.TIMEOUT, 1.5)
            case 7 | 8:
                upheave(world, dice)
            case _:
                world.end_step()
                world.release_request("one")
    return world


def ask_remote(world: Groups, path: str, name: str) -> None:
    """A remote tier has a part of `path`, says so, and it is fetched."""
    world.others_store(path, 4, name)
    world.lookup(path, 0, None)
    for number, question in list(world.questions.items()):
        for rank in sorted(question.waiting):
            world.answer(number, rank, True, Status.OK)
    world.prefetch_remote(path, 0)


def keep_house(world: Groups, path: str, group: int) -> None:
    """A host that moves bytes itself stores, keeps and reads independent chunks."""
    world.store_independent_by_host(path, group, 0)
    ready = [each for each in chunks(path, group) if world.is_readable(each)]
    world.lease_each(ready, group, "two")
    world.load_by_host(ready, group)


def busy_groups(seed: int) -> Groups:
    """The same of several groups with images of two sizes, remote tiers, and a host that moves bytes itself."""
    dice = random.Random(seed)
    sizes = Setup(host=4, file=5, more=(4,), groups=3, slabs=True, device_blocks=96)
    world = Groups(sizes._replace(ranks=2, per_chunk=2, events=10_000, remote=("near", "far")))
    for _ in range(80):
        path, group = dice.choice(("aaaaaa", "aaaabb", "aabaaa")), dice.randrange(1, 3)
        match dice.randrange(9):
            case 0 | 1:
                world.store_independent(path, group, 0, True)
                world.store(path, 0, True)
            case 2 | 3:
                device = [[dice.random() < 0.2 for _ in range(6)] for _ in range(3)]
                hold = world.lookup_groups(path, device, dice.choice(REQUESTS))
                if hold is not None:
                    world.load_groups(hold, by_layer=True)
            case 4:
                ask_remote(world, path, dice.choice(("near", "far")))
            case 5:
                keep_house(world, path, group)
            case 6:
                for job, rank in world.runnable()[:2]:
                    world.deliver(job, rank, dice.choice(PATTERNS))
                    world.apply(world.results[-1:])
            case 7:
                upheave(world, dice)
            case _:
                world.release_request(dice.choice(("one", "two")))
                world.settle_all()
    return world


def digest(answers: list[Any]) -> str:
    return hashlib.sha256("\n".join(map(repr, answers)).encode()).hexdigest()


@pytest.mark.parametrize("life", [busy_world, busy_groups])
@pytest.mark.parametrize("hash_seed", ["1", "20240229"])
def test_the_same_calls_give_the_same_log_in_another_process(hash_seed: str, life: Callable[[int], Groups]) -> None:
    lives = [life(seed) for seed in range(4)]
    script = (
        "import pickle, sys, cache_kit, test_determinism as t\n"
        "for setup, calls in pickle.load(sys.stdin.buffer):\n"
        "    print(t.digest(cache_kit.replay(setup, calls)))\n"
    )
    replayed = subprocess.run(
        [sys.executable, "-c", script],
        input=pickle.dumps([(world.setup, world.calls) for world in lives]),
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        check=True,
    )
    assert replayed.stdout.decode().split() == [digest(world.answers) for world in lives]
