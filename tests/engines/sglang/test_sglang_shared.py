"""The storage back end over stores that servers share, as SGLang's threads call it, without a server."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from storage_kit import PAGE, Rig, look_up, names

from longshore.boundary import HOST, REMOTE
from longshore.cache import Run
from longshore.engines.sglang import storage
from longshore.runtime.stack import Stack

Rigs = Callable[..., Rig]
KEYS = names(8)


def pages_of(store: Path) -> int:
    """Files of images in a store that is a directory."""
    return sum(path.is_file() for path in store.rglob("*"))


@pytest.fixture
def shared(rigs: Rigs, tmp_path: Path) -> Callable[..., Rig]:
    """Makes rigs without files over one store."""
    (tmp_path / "store").mkdir()
    none = {
        "file_path": None,
        "size": None,
        "host_size": "4MiB",
        "remote": f"{(tmp_path / 'store').as_uri()}?probe_timeout=10s",
    }
    return lambda **named: rigs(**{**none, **named})


def test_servers_share_pages_by_a_store(shared: Callable[..., Rig], tmp_path: Path) -> None:
    one, other = shared(), shared()
    held = one.store(KEYS, range(8))
    assert pages_of(tmp_path / "store") >= 8
    with look_up(None):
        assert other.exists(KEYS) == 8
    assert other.get(KEYS, range(20, 28)) == [True] * 8
    assert torch.equal(other.read(range(20, 28)), held)
    # Longer than what is kept beside SGLang's host memory, and behind what SGLang has itself.
    longer = names(60, seed=5)
    held = one.store(longer, range(60), seed=5)
    with look_up(None):
        assert other.exists(longer[:9]) == 9
    assert other.get(longer[:9], range(9)) == [True] * 9
    with look_up(longer[8]):
        assert other.exists(longer[9:]) == 51
    assert other.get(longer[9:], range(9, 60)) == [True] * 51
    assert torch.equal(other.read(range(60)), held)
    with other.storage._kv.stack.runtime.batch() as cache:
        cache.check_integrity()


def test_store_pages_are_found_whose_predecessors_no_tier_has(shared: Callable[..., Rig]) -> None:
    rig = shared()
    held = rig.fill(range(8), seed=1)
    assert rig.set(KEYS[4:], range(4, 8), before=KEYS[:4]) == [True] * 4
    assert rig.storage.flush(30)
    for first in (4, 6):
        with look_up(KEYS[first - 1]):
            assert rig.exists([*KEYS[first:], *names(2, seed=5)]) == 8 - first
        assert rig.get(KEYS[first:], range(20 + first, 28)) == [True] * (8 - first)
        assert torch.equal(rig.read(range(20 + first, 28)), held[first:])
    assert rig.set(KEYS[:4], range(4)) == [True] * 4
    assert rig.storage.flush(30)
    with look_up(None):
        assert rig.exists(KEYS) == 8
    assert rig.get(KEYS, range(20, 28)) == [True] * 8
    assert torch.equal(rig.read(range(20, 28)), held)
    with rig.storage._kv.stack.runtime.batch() as cache:
        cache.check_integrity()


@pytest.mark.parametrize("order", ["AB", "BA"])
def test_prompts_that_begin_alike_read_their_own_pages(shared: Callable[..., Rig], order: str) -> None:
    """SGLang looks several prompts up before it reads the first one."""
    one, other = shared(), shared()
    prompts = {
        "A": KEYS[:4],
        "B": [KEYS[0], *(hashlib.sha256(bytes.fromhex(KEYS[0]) + bytes([page])).hexdigest() for page in range(3))],
    }
    held = one.store(prompts["A"], range(4))
    one.fill(range(5, 8), seed=2)
    assert one.set(prompts["B"][1:], range(5, 8), before=KEYS[:1]) == [True] * 3
    assert one.storage.flush(30)
    for prompt in order:
        with look_up(None):
            assert other.exists(prompts[prompt]) == 4
    assert other.get(prompts["A"], range(20, 24)) == [True] * 4
    assert torch.equal(other.read(range(20, 24)), held)


def test_store_pages_pass_through_little_memory_to_files(shared: Callable[..., Rig], tmp_path: Path) -> None:
    one = shared()
    other = shared(size="16MiB", host_size="256KiB", file_path=str(tmp_path / "other"))
    assert other.storage._kv.stack.host.slabs.indices < 30  # type: ignore[union-attr]
    held = one.store(names(60), range(60))
    with look_up(None):
        found = other.exists(names(60))
    assert found == 60
    done = 0
    while done < found:  # as SGLang asks for what is left of a prompt
        got = sum(other.get(names(60)[:found], range(found)))
        assert got > done
        done = got
        assert other.storage.flush(30)
    assert torch.equal(other.read(range(found)), held[:found])


def test_store_is_not_asked_for_pages_without_known_prefix(
    shared: Callable[..., Rig],
) -> None:
    one, other = shared(), shared()
    one.store(KEYS, range(8))
    assert other.exists(KEYS[4:]) == 0
    with look_up(KEYS[3]):
        assert other.exists(KEYS[4:]) == 0
    with look_up(None):
        assert other.exists(KEYS) == 8
    assert other.get(KEYS, range(8)) == [True] * 8


def test_offered_pages_are_read_without_a_second_gate_call(shared: Callable[..., Rig]) -> None:
    """It counts them as ordered since the look-up: they would seem to wait behind themselves."""
    one, seconds = shared(), 10.0
    other = shared(prefill_speed=40 * PAGE / (1.3 * seconds))  # computing all takes little longer than fetching it
    gate, now = other.storage._kv.runtime.gate, other.storage._kv.runtime.clock()
    assert gate is not None
    size = 40 * other.storage._kv.pages.layout.image_bytes
    for _ in range(3):
        gate.observe_load(HOST, size, 1e-6, 0.0, now)
        gate.observe_load(REMOTE, size, seconds, 0.0, now - 50)
    held = one.store(names(40), range(40))
    with look_up(None):
        assert other.exists(names(40)) == 40
    run = [Run(REMOTE, 40)]
    assert gate.worth_loading(0, run, other.storage._kv.runtime.clock()) < 40  # what it would say now
    assert other.get(names(40), range(40)) == [True] * 40
    assert torch.equal(other.read(range(40)), held)


def test_a_store_that_is_gone_makes_fewer_pages(shared: Callable[..., Rig], tmp_path: Path) -> None:
    one, other = shared(load_timeout=2), shared(load_timeout=2)
    held = one.store(KEYS, range(8))
    with look_up(None):
        assert other.exists(KEYS) == 8
    (tmp_path / "store").rename(tmp_path / "gone")
    assert other.get(KEYS, range(8)) == [False] * 8
    with look_up(None):
        assert other.exists(names(8, seed=3)) == 0
    assert len(other.set(names(8, seed=3), range(8))) == 8
    assert sum(other.storage._kv.stack.remote[0].failures.values()) > 0  # type: ignore[attr-defined]
    assert one.get(KEYS, range(8)) == [True] * 8  # as it still has them beside SGLang's memory
    assert torch.equal(one.read(range(8)), held)


def test_ranks_share_a_store_and_no_page(shared: Callable[..., Rig]) -> None:
    made = [shared(rank=rank, ranks=2) for rank in (0, 1)]
    held = [rig.store(KEYS, range(8), seed=rank) for rank, rig in enumerate(made)]
    for rank, expected in enumerate(held):
        again = shared(rank=rank, ranks=2)
        with look_up(None):
            assert again.exists(KEYS) == 8
        assert again.get(KEYS, range(8)) == [True] * 8
        assert torch.equal(again.read(range(8)), expected)


def test_what_is_kept_of_look_ups_is_bounded(shared: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the prompts are of which few pages are asked for; of the last one there is all."""
    monkeypatch.setattr("longshore.engines.sglang.storage._ASKED", 3000)
    rig = shared()

    def kept() -> int:
        paths = {id(each.path.chunks): each.path.keys for each in rig.storage._asked.values() if each.path}
        assert rig.storage._shares == sum(each.share for each in rig.storage._asked.values())
        return sum(map(len, paths.values()))

    for seed in range(60):
        with look_up(None):
            assert rig.exists(names(200, seed)) == 0
            assert rig.exists(names(200, seed)) == 0
        assert 200 <= kept() <= 3000
    assert kept() > 1500
    longest = names(5000, seed=100)
    with look_up(None):
        rig.exists(longest)
    assert kept() == 5000
    assert all(bytes.fromhex(longest[at]) in rig.storage._asked for at in range(0, 5000, 128))


@pytest.mark.parametrize("hung", [("store",), ("files",), ("store", "files")], ids="+".join)
def test_one_deadline_for_files_and_stores(
    shared: Callable[..., Rig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hung: tuple[str, ...]
) -> None:
    """Files give what they have, however long a store takes."""
    settings = {"size": "16MiB", "file_path": str(tmp_path / "other"), "gate": False}
    held = shared().store(KEYS, range(8))
    first = shared(**settings)
    first.store(KEYS[:4], range(4))
    first.close()
    rig = shared(**settings, load_timeout=3)
    with look_up(None):
        assert rig.exists(KEYS) == 8
    ends: list[float] = []
    clock = rig.storage._kv.runtime.clock
    start_load, fetch_and_wait = Stack.start_load, storage.fetch_and_wait

    def timed_load(*arguments: Any, timeout: float | None = None, **named: Any) -> Any:
        ends.append(clock() + (3.0 if timeout is None else timeout))
        return start_load(*arguments, timeout=timeout, **named)

    def timed_fetch(runtime: Any, path: Any, context: int, size: int, timeout: float, **named: Any) -> Any:
        ends.append(clock() + timeout)
        return fetch_and_wait(runtime, path, context, size, timeout, **named)

    monkeypatch.setattr(Stack, "start_load", timed_load)
    monkeypatch.setattr(storage, "fetch_and_wait", timed_fetch)
    stack = rig.storage._kv.stack
    tiers = {"store": stack.remote[0], "files": stack.file}
    pids = [tiers[name]._supervisor.process.pid for name in hung]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    begun = clock()
    try:
        found = sum(rig.get(KEYS, range(20, 28)))
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    assert found == (0 if "files" in hung else 4)
    assert torch.equal(rig.read(range(20, 28))[:found], held[:found])
    assert max(ends) < begun + 5.5  # and not two waits of `load_timeout`
