"""Whoever of an engine's processes is killed: nobody lives on, and no memory stays behind.

engine ──forks──► rank 0, rank 1       which end when the engine has gone, as vLLM's own workers do
   └────starts──► tier host
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import save
from vllm.config import set_current_vllm_config
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from vllm_kit import Group, config_of, file_settings, vllm_config

from longshore.engines.vllm import LongshoreSpec
from longshore.engines.vllm.rendezvous import memory_info_path
from longshore.errors import TierInUseError
from longshore.tiers.file.directory import Directory

WORLD = 2
GROUPS = (Group(layers=1),)
SHARED = Path("/dev/shm")  # noqa: S108 - nothing is made there
TIMEOUT = 60.0


def forked(work: Callable[[], object]) -> int:
    """A process that does `work`; its number."""
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
        os._exit(0)
    except BaseException:  # noqa: BLE001 - it must not go on as its parent
        traceback.print_exc()
        os._exit(1)


def spec_of(rank: int, engine: str, extra: dict[str, Any]) -> LongshoreSpec:
    with set_current_vllm_config(vllm_config(GROUPS, extra)):
        return LongshoreSpec(config_of(rank, WORLD, GROUPS, engine, 1, extra))


def rank(number: int, engine: str, extra: dict[str, Any], life: int) -> None:
    """A worker, for as long as its engine lives."""
    caches = CanonicalKVCaches(
        [CanonicalKVCacheTensor(torch.zeros((16, 192), dtype=torch.int8), 192)], [[CanonicalKVCacheRef(0, 192)]]
    )
    spec = spec_of(number, engine, extra)
    with set_current_vllm_config(vllm_config(GROUPS, extra)):
        worker = spec.get_worker(caches)
    os.read(life, 1)
    worker.shutdown()


def engine_process(engine: str, extra: dict[str, Any], said: int, orders: int) -> None:
    """The engine, until `orders` ends; tells who is there, and what memory."""
    life, alive = os.pipe()

    def become(number: int) -> None:
        os.close(alive)
        rank(number, engine, extra, life)

    ranks = [forked(lambda number=number: become(number)) for number in range(WORLD)]
    info = memory_info_path(engine, extra["vllm"]["instance_id"])
    assert comes_to(info.exists), "rank 0 did not start"  # vLLM starts the scheduler after all ranks
    manager = spec_of(0, engine, extra).get_manager()
    store = manager._tiers
    (file,) = store.runtime._tiers
    memory = [os.fstat(arena.fd).st_ino for arena in (store.arena, store.reports.memory)]
    about = {"ranks": ranks, "tier host": file._supervisor.process.pid, "memory": memory}
    os.write(said, json.dumps(about).encode())
    os.close(said)
    while os.read(orders, 1):
        pass
    manager.shutdown()
    os.close(alive)
    for pid in ranks:
        os.waitpid(pid, 0)


def holders(memory: list[int]) -> set[int]:
    """Processes that have any of this memory open, or mapped."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            links = [each.stat().st_ino for each in (process / "fd").iterdir() if "longshore" in str(each.readlink())]
            maps = [line.split() for line in (process / "maps").read_text().splitlines() if "memfd:longshore" in line]
        except OSError:
            continue
        if not set(memory).isdisjoint([*links, *(int(fields[4]) for fields in maps)]):
            found.add(int(process.name))
    return found


def memory_of(pid: int) -> set[str]:
    """The shared memory that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "memfd:longshore" in line}


def comes_to(what: Callable[[], bool]) -> bool:
    give_up = time.monotonic() + TIMEOUT
    while not what():
        if time.monotonic() > give_up:
            return False
        time.sleep(0.02)
    return True


def is_running(pid: int) -> bool:
    """Whether there is this process, and it does not only wait to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def is_free(directory: Path) -> bool:
    """Whether nobody has it; the last threads of a killed process may have it a little longer than that has a state."""
    try:
        Directory(directory).close()
    except TierInUseError:
        return False
    return True


@contextlib.contextmanager
def begun(name: str, directory: Path) -> Iterator[Callable[[], SimpleNamespace]]:
    """An engine with two ranks and a tier host, which starts; the function that is given waits for that."""
    settings = {**file_settings(directory), "vllm": {"instance_id": str(time.time_ns() + 10**9)}}
    hear, said = os.pipe()
    orders, order = os.pipe()

    def engine() -> None:
        os.close(order)
        os.close(hear)
        engine_process(name, settings, said, orders)

    pid, pids = forked(engine), list[int]()
    os.close(said)
    os.close(orders)

    def wait() -> SimpleNamespace:
        told = os.read(hear, 4096)
        os.close(hear)
        assert told, "the engine did not start"
        about = json.loads(told)
        pids.extend([*about["ranks"], about["tier host"]])
        return SimpleNamespace(
            pid=pid,
            ranks=about["ranks"],
            tier_host=about["tier host"],
            memory=about["memory"],
            stop=lambda: os.close(order),
            name=name,
            directory=directory / "tier",
        )

    try:
        yield wait
    finally:
        for each in (pid, *pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[SimpleNamespace]:
    """An engine with two ranks and a tier host."""
    with begun(f"engine of {tmp_path}", tmp_path) as wait:
        yield wait()


def test_engines_of_one_id_that_start_together_share_nothing(tmp_path: Path) -> None:
    name, directories = f"engines of {tmp_path}", [tmp_path / "one", tmp_path / "other"]
    for each in directories:
        each.mkdir()
    with begun(name, directories[0]) as one, begun(name, directories[1]) as other:
        engines = [one(), other()]
        for each in engines:
            assert holders(each.memory) == {each.pid, *each.ranks, each.tier_host}
        for each in reversed(engines):  # the other has copies of the first one's pipes
            each.stop()
            assert os.waitpid(each.pid, 0)[1] == 0


@pytest.mark.parametrize("victims", ["nobody", "engine", "rank", "tier host", "rank and tier host", "all"])
def test_nothing_stays_behind(started: SimpleNamespace, victims: str) -> None:
    everybody = {started.pid, *started.ranks, started.tier_host}
    assert holders(started.memory) == everybody
    doomed = {
        "nobody": [],
        "engine": [started.pid],
        "rank": started.ranks[:1],
        "tier host": [started.tier_host],
        "rank and tier host": [started.ranks[0], started.tier_host],
        "all": list(everybody),
    }[victims]
    for pid in doomed:
        os.kill(pid, signal.SIGKILL)
    if started.pid not in doomed:
        started.stop()
    status = os.waitpid(started.pid, 0)[1]
    assert (status == signal.SIGKILL) if started.pid in doomed else status == 0
    assert comes_to(lambda: not holders(started.memory))
    assert comes_to(lambda: not any(is_running(pid) for pid in everybody))
    assert list(SHARED.glob("*longshore*")) == []
    note = memory_info_path(started.name)
    assert not list(note.parent.glob(f"{note.name.partition('-')[0]}*"))
    assert comes_to(lambda: is_free(started.directory))


def test_nothing_stays_behind_of_a_real_engine_that_is_killed(tmp_path: Path) -> None:
    model, directory = save("llama", tmp_path), tmp_path / "tier"
    command = [sys.executable, Path(__file__).with_name("engine_to_kill.py"), model, directory]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as front:
        assert front.stdin is not None
        assert front.stdout is not None
        told = next((line for line in front.stdout if line.startswith(b"{")), None)
        assert told is not None, "the engine did not start"
        about = json.loads(told)
        everybody = {about["engine"], about["tier host"], *about["workers"]}
        memory = [int(inode) for inode in memory_of(about["tier host"])]
        held_by = holders(memory)
        os.kill(about["engine"], signal.SIGKILL)
        assert held_by == everybody
        assert comes_to(lambda: not any(is_running(pid) for pid in everybody))
        front.stdin.close()
    assert comes_to(lambda: not holders(memory))
    assert comes_to(lambda: is_free(directory))
