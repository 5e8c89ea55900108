"""Two stacks over a real server: what one has stored the other fetches, as far as that is quicker than computing."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from longshore.boundary import HOST, REMOTE
from longshore.cache import GroupKeys, Protection, Run
from longshore.config import Config
from longshore.keys import Scope
from longshore.layout import from_rows
from longshore.runtime.remote_fetch import fetch, fetch_and_wait, fetch_timeout
from longshore.runtime.stack import Stack, open_stack
from longshore.testing.local_server import LocalMooncake, LocalServer
from longshore.tiers.remote import RemoteTier
from longshore.transfer import CpuDevice

TOKENS, CHUNKS, TIMEOUT = 16, 48, 60.0
ROWS: list[torch.Tensor] = []
"""The device blocks of each stack that a test has opened."""
PATIENT = "connect_timeout=20s&probe_timeout=20s&fetch_timeout=20s&write_timeout=20s"


def keys_of(prompt: int) -> list[bytes]:
    return [hashlib.sha256(b"%d %d" % (prompt, i)).digest() for i in range(CHUNKS)]


@pytest.fixture
def opened(server: LocalServer) -> Iterator[Callable[..., Stack]]:
    made: list[Stack] = []
    ROWS.clear()
    salt = os.urandom(8).hex()

    def open_one(options: str = PATIENT, **settings: Any) -> Stack:
        rows = torch.randint(0, 256, (CHUNKS, 4 * 65536), dtype=torch.uint8, generator=torch.manual_seed(len(made)))
        ROWS.append(rows)
        layout = from_rows(rows, pages_per_block=4, block_size=TOKENS)
        scope = Scope(model="m", weights="w", dtype="d", layout=layout.fingerprint, block_size=TOKENS, salt=salt)
        url = f"valkey://127.0.0.1:{server.port}/2?{options}"
        settings = {"host_size": 4 * CHUNKS * layout.image_bytes, **settings}
        config = Config.make(background=False, remote=url, **settings)
        made.append(open_stack(config, layout, scope, CpuDevice()))
        return made[-1]

    yield open_one
    for stack in made:
        stack.close()


def store(stack: Stack, prompt: int) -> None:
    with stack.runtime.batch() as cache:
        job = cache.store({0: GroupKeys(keys_of(prompt))}, {0: range(CHUNKS)})[0].job
    assert job is not None and stack.runtime.wait_jobs([job], TIMEOUT)
    assert stack.runtime.flush(TIMEOUT)


def served(stack: Stack, prompt: int) -> int:
    """Chunks of the prompt in host memory, once it was brought there as far as that pays."""
    path = GroupKeys(keys_of(prompt))
    fetch_and_wait(stack.runtime, path, 0, TOKENS, TIMEOUT)
    with stack.runtime.batch() as cache:
        found = cache.lookup({0: path}, stack.runtime.clock(), remote_tiers=())
        if found.lease is not None:
            cache.release(found.lease)
    return found.num_chunks


def probes(stack: Stack) -> int:
    (tier,) = stack.remote
    assert isinstance(tier, RemoteTier)
    return sum(count for (kind, _), count in tier.counts.items() if kind == "probe")


@pytest.mark.parametrize("ratio", [100.0, 0.01])
def test_a_store_is_used_when_it_is_quicker_than_computing(opened: Callable[..., Stack], ratio: float) -> None:
    writer = opened()
    for prompt in range(12):
        store(writer, prompt)
    reader = opened()
    assert sum(served(reader, prompt) for prompt in range(2)) > 0  # nothing is known yet
    gate = reader.runtime.gate
    assert gate is not None
    gate.observe_load(HOST, 1 << 20, 1e-6, 0.0, 0.0)
    measured = gate.load_seconds([Run(REMOTE, CHUNKS)], reader.runtime.clock())  # on this machine, now
    assert measured is not None
    for chunks in (1, 8, CHUNKS):
        gate.observe_prefill(0, chunks * TOKENS, chunks / CHUNKS * 2 * ratio * measured)
    before = probes(reader)
    got = sum(served(reader, prompt) for prompt in range(2, 12))
    assert reader.runtime.flush(TIMEOUT)  # a question that nobody waited for counts, too
    if ratio > 1:
        assert got >= 0.95 * 10 * CHUNKS
    else:
        assert got <= 0.1 * 10 * CHUNKS
        assert probes(reader) - before <= 0.1 * 10 * CHUNKS


@pytest.mark.parametrize("first", [0, 2])
def test_what_is_behind_an_orphan_is_fetched(opened: Callable[..., Stack], first: int) -> None:
    """Also what is before it, if the engine does not have that: by one call up to the orphan, by another one behind."""
    store(opened(), 5)
    reader, keys = opened(), keys_of(5)
    with reader.runtime.batch() as cache:
        job = cache.store({0: GroupKeys(keys[:4], 2)}, {0: range(2, 4)})[0].job
    assert job is not None and reader.runtime.wait_jobs([job], TIMEOUT)
    path = GroupKeys(keys, first)
    ROWS[1][:] = 0
    with reader.runtime.batch() as cache:
        assert (
            cache.lookup({0: path}, 0.0, protect=Protection.NONE).num_chunks == first
        )  # the two, from their own parent on
    names = {}
    for part in [keys[:2]] * (not first) + [keys[4:]]:
        sent = fetch_and_wait(reader.runtime, path, first * TOKENS, TOKENS, TIMEOUT)
        assert set(sent) >= set(part)
        names.update(sent)
    with reader.runtime.batch() as cache:
        found = cache.lookup({0: path}, reader.runtime.clock(), remote_tiers=())
    assert found.num_chunks == CHUNKS - first
    jobs: list[int] = []
    sources = reader.load_path(found, path, range(CHUNKS - first), lambda job, _: jobs.append(job), origins=names)
    assert sources[4 - first :] == [REMOTE] * (CHUNKS - 4)
    assert reader.runtime.wait_jobs(jobs, TIMEOUT)
    assert torch.equal(ROWS[1][4 - first : CHUNKS - first], ROWS[0][4:])
    with reader.runtime.batch() as cache:
        cache.release(found.lease)
        cache.check_integrity()


def test_a_prompt_in_host_memory_waits_for_no_store(opened: Callable[..., Stack], server: LocalServer) -> None:
    stack = opened()
    store(stack, 0)
    os.kill(server.pid, signal.SIGSTOP)
    try:
        before = probes(stack)
        assert served(stack, 0) == CHUNKS
        assert probes(stack) == before
    finally:
        os.kill(server.pid, signal.SIGCONT)


def test_a_fetch_ends_after_twice_what_the_gate_expects(opened: Callable[..., Stack], server: LocalServer) -> None:
    store(opened(), 1)
    reader = opened("connect_timeout=20s&probe_timeout=3s&fetch_timeout=60s")
    runtime, path, runs = reader.runtime, GroupKeys(keys_of(1)), [Run(REMOTE, CHUNKS)]
    gate = runtime.gate
    assert gate is not None
    gate.observe_load(HOST, 1 << 20, 1e-6, 0.0, 0.0)
    gate.observe_load(REMOTE, CHUNKS << 18, 2.0, 0.0, 0.0)
    with runtime.batch() as cache:
        probes = fetch(runtime, cache, path, 0, TOKENS).probes
    assert runtime.wait_jobs(probes, TIMEOUT)
    os.kill(server.pid, signal.SIGSTOP)
    try:
        with runtime.batch() as cache:
            expected = gate.load_seconds(runs, runtime.clock())
            jobs = fetch(runtime, cache, path, 0, TOKENS, probe=False).jobs
        assert expected is not None
        assert not gate.is_late(REMOTE)
        latest = runtime.clock() + max(2 * expected, 3.5)
        deadlines = [runtime._running[job].transfer.deadline for job in jobs]
        assert deadlines
        assert max(deadlines) <= latest
        assert runtime.wait_jobs(jobs, TIMEOUT)
    finally:
        os.kill(server.pid, signal.SIGCONT)
    with runtime.batch() as cache:  # the gate cannot measure what did not arrive
        assert gate.is_late(REMOTE)
        assert fetch_timeout(runtime, cache, runs, runtime.clock()) is None


def test_hung_store_does_not_delay_long_prompts(
    opened: Callable[..., Stack], server: LocalServer, tmp_path: Path
) -> None:
    patient = "connect_timeout=20s&write_timeout=50s"
    stack = opened(patient, host_size="4MiB", file_path=tmp_path / "tier", file_size="64MiB")
    os.kill(server.pid, signal.SIGSTOP)
    try:
        stored = stack.store_path(
            GroupKeys(keys_of(0)), range(CHUNKS), lambda job, blocks: None, before_eviction=True, timeout=TIMEOUT
        )
        under_way = [each.transfer.route.destination for each in stack.runtime._running.values()]
        assert (stored, REMOTE in under_way) == (CHUNKS, True)
        assert stack.remote[0].failures["timeout"] == 0  # what is under way is the first write
    finally:
        os.kill(server.pid, signal.SIGCONT)


def test_a_stopped_server_costs_a_miss(opened: Callable[..., Stack], server: LocalServer, tmp_path: Path) -> None:
    stack = opened("probe_timeout=50ms")
    os.kill(server.pid, signal.SIGSTOP)
    try:
        assert served(stack, 99) == 0
        store(stack, 99)
        assert served(stack, 99) == CHUNKS
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert stack.remote[0].failures["timeout"] >= 1


def test_stacks_over_mooncake_share_blocks_and_memory_with_its_client(mooncake: LocalMooncake) -> None:
    rows = torch.randint(0, 256, (8, 4 * 65536), dtype=torch.uint8, generator=torch.manual_seed(3))
    layout = from_rows(rows, pages_per_block=4, block_size=16)
    scope = Scope(model="m", weights="w", dtype="d", layout=layout.fingerprint, block_size=16, salt=os.urandom(8).hex())
    config = Config.make(background=False, remote=mooncake.url(PATIENT), gate=False, host_size=16 * layout.image_bytes)
    assert not config.host_shared
    path = GroupKeys([hashlib.sha256(bytes([number])).digest() for number in range(8)])
    with open_stack(config, layout, scope, CpuDevice()) as writer, writer.runtime.batch() as cache:
        job = cache.store({0: path}, {0: range(8)})[0].job
        assert job is not None
        assert writer.runtime.wait_jobs([job], TIMEOUT)
        assert writer.runtime.flush(TIMEOUT)
    with open_stack(config, layout, scope, CpuDevice()) as reader:
        fetch_and_wait(reader.runtime, path, 0, 16, TIMEOUT)
        with reader.runtime.batch() as cache:
            assert cache.lookup({0: path}, reader.runtime.clock(), remote_tiers=()).num_chunks == 8
