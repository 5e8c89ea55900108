"""Requests that wait in transformers' queue: what files have of them is in host memory when their turn comes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from test_calls import GENERATION, batching, generate, make_model
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor

from longshore.boundary import FILE, HOST
from longshore.cache import Lease, Progress, RecomputeGate
from longshore.config import Config
from longshore.engines.transformers import Tiers, tiered
from longshore.engines.transformers.allocator import TieredAllocator
from longshore.hints import RequestHints
from longshore.runtime.loop import Runtime
from longshore.runtime.stack import Stack
from longshore.tiers.file import FileTier

PROMPTS = [[100 + number, *range(2, 99)] for number in range(8)]
BLOCKS = 6
"""Of each prompt, that need not be computed."""

TIMEOUT = 30.0


def config_of(tmp_path: Path, **settings: Any) -> Config:
    sizes = {"host_size": "4MiB", "file_path": tmp_path / "kv", "file_size": "8MiB", "gate": False}
    return Config.make(**{**sizes, **settings})


def store(model: Any, config: Config, prompts: list[list[int]] = PROMPTS) -> None:
    """Have the files of `config` the blocks of `prompts`, and nothing in host memory."""
    with tiered(model, config):
        generate(model, prompts, num_blocks=200)


class HeldFiles(FileTier):
    """Files whose reads and writes end only while `pass_on` is set."""

    pass_on: threading.Event

    def poll(self) -> Any:
        return super().poll() if self.pass_on.is_set() else []


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """What lets the reads of `HeldFiles` end."""
    event = threading.Event()
    event.set()
    monkeypatch.setattr(HeldFiles, "pass_on", event, raising=False)
    yield event
    event.set()


@contextmanager
def running(model: Any, prompts: Sequence[list[int]] = (), **settings: Any) -> Iterator[Any]:
    """A manager that has been asked for `prompts`, and is stopped in the end."""
    manager = model.init_continuous_batching(GENERATION, batching(num_blocks=200, **settings))
    for prompt in prompts:
        manager.add_request(prompt, max_new_tokens=4)
    manager.start()
    try:
        yield manager
    finally:
        manager.stop(block=True)
        manager.destroy()


@pytest.fixture
def loading(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once the engine's loop stands still for a load."""
    event, stock = threading.Event(), Runtime.wait_load

    def wait_load(self: Runtime, lease: Lease) -> Progress:
        event.set()
        return stock(self, lease)

    monkeypatch.setattr(Runtime, "wait_load", wait_load)
    return event


def results(manager: Any, count: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    deadline = time.monotonic() + TIMEOUT
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} requests have ended"
        if (result := manager.get_result(timeout=1.0)) is not None:
            found[result.request_id] = result
    return found


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def steps_as_long_as_reads(monkeypatch: pytest.MonkeyPatch, tiers: Tiers) -> None:
    """Each forward pass takes until nothing is in flight: what can be read beside it is."""
    stock = ContinuousBatchProcessor._generation_step

    def step(self: Any, model: Any) -> None:
        assert tiers.stack is not None
        lookups = tiers._allocator._lookups
        assert {name for name, lookup in lookups.items() if lookup.kept} <= set(self.scheduler.waiting_requests)
        tiers.stack.runtime.flush(TIMEOUT)
        stock(self, model)

    monkeypatch.setattr(ContinuousBatchProcessor, "_generation_step", step)


def serve(
    model: Any, config: Config, monkeypatch: pytest.MonkeyPatch, prompts: list[list[int]] = PROMPTS
) -> tuple[dict[str, Any], Any, Any]:
    """Results by name, where the blocks of each prompt came from, and the counters."""
    with tiered(model, config) as tiers, monkeypatch.context() as patched:
        steps_as_long_as_reads(patched, tiers)
        with running(model, prompts, max_requests_per_batch=1) as manager:
            found = results(manager, len(prompts))
        with tiers.stack.runtime.batch() as cache:
            cache.check_integrity()
            assert (cache.leases, cache.protected, cache.jobs_in_flight) == (0, 0, 0)
            counters = cache.counters.copy()
        assert all(result.error is None for result in found.values())
        return found, {record.request: record.sources for record in tiers.records}, counters


def test_what_waits_is_in_host_memory_when_its_turn_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, config = make_model(), config_of(tmp_path)
    store(model, config)
    found, sources, counters = serve(model, config, monkeypatch)
    assert sources.pop("req_0") == (FILE,) * BLOCKS, "it does not wait"
    assert list(sources.values()) == [(HOST,) * BLOCKS] * 7
    assert (counters.hits[FILE], counters.hits[HOST], counters.misses.total()) == (BLOCKS, 7 * BLOCKS, 0)
    with monkeypatch.context() as patched:
        patched.setattr(TieredAllocator, "prefetch_waiting", lambda self, waiting: set())
        expected, waited, without = serve(model, config, monkeypatch)
    assert set(waited.values()) == {(FILE,) * BLOCKS}, "the loop stood still for the files of each request"
    assert without.hits[FILE] == 8 * BLOCKS
    for name, result in found.items():
        assert result.generated_tokens == expected[name].generated_tokens
        assert result.logprobs == expected[name].logprobs


def test_nothing_is_prefetched_that_is_computed_sooner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, config = make_model(), config_of(tmp_path)
    store(model, config)
    quick = config_of(tmp_path, gate=True, prefill_speed=1e12)
    with tiered(model, quick) as tiers:
        generate(model, PROMPTS[:1])  # what reading takes is known from here on
        gate = tiers.stack.runtime.gate
        before, read = gate.recomputed, tiers.stack.runtime
        generate(model, PROMPTS[1:], num_blocks=201, max_requests_per_batch=1)
        assert gate.recomputed - before == 7 * BLOCKS, "each counts once, however often it was asked for"
        with read.locked() as cache:
            assert cache.counters.routes["file->host"].chunks <= BLOCKS
        assert {record.sources for record in tiers.records if "@2" in record.request} == {()}


def test_what_is_kept_for_waiting_requests_is_bounded_heads_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, kept = make_model(), []
    store(model, config_of(tmp_path))
    stock = TieredAllocator.prefetch_waiting

    def expect(self: TieredAllocator, waiting: Any) -> set[str]:
        queue = list(waiting)
        late = stock(self, iter(queue))
        if self._ahead is not None:
            lookups = [self._lookups[name] for name, _ in queue if name in self._lookups]
            kept.append([len(lookup.kept.keys) for lookup in lookups if lookup.kept is not None])
            assert len(self._ahead.keys) <= self._ahead.room == 8
        return late

    monkeypatch.setattr(TieredAllocator, "prefetch_waiting", expect)
    _, sources, _ = serve(model, config_of(tmp_path, host_size="128KiB"), monkeypatch)
    assert any(each[:2] == [BLOCKS, 2] for each in kept), "all of the first, and the head of the second"
    assert sum(len(each) for each in sources.values()) == 8 * BLOCKS


def leases(stack: Stack) -> int:
    with stack.runtime.locked() as cache:
        return cache.leases


@pytest.mark.parametrize("how", ["cancelled", "stopped", "failed"])
def test_a_prefetch_ends_with_its_request(
    tmp_path: Path, held: threading.Event, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    model, config = make_model(), config_of(tmp_path)
    store(model, config, PROMPTS[1:])
    with tiered(model, config, open_file_tier=HeldFiles) as tiers, running(model, max_requests_per_batch=1) as manager:
        manager.add_request(PROMPTS[0], request_id="first", max_new_tokens=2000)
        until(lambda: tiers.lookups == 1)
        stack, allocator = tiers.stack, tiers._allocator
        assert stack is not None
        assert allocator is not None
        held.clear()
        for number, prompt in enumerate(PROMPTS[1:]):
            manager.add_request(prompt, request_id=str(number), max_new_tokens=4)
        until(lambda: len(allocator._lookups) == 8 and allocator._lookups["6"].kept is not None)
        with stack.runtime.locked() as cache:
            assert cache.leases == 7
            assert cache.jobs_in_flight > 0
        if how == "cancelled":
            for number in range(7):
                manager.cancel_request(str(number))
            until(lambda: set(allocator._lookups) == {"first"})
        elif how == "failed":
            monkeypatch.setattr(ContinuousBatchProcessor, "_generation_step", lambda self, model: 1 // 0)
            assert all(result.error for result in results(manager, 8).values())
        else:
            manager.stop(block=True, hard_stop=True)
        if how != "cancelled":
            until(lambda: not allocator._lookups)
        ahead = allocator._ahead
        until(lambda: not ahead.keys and not leases(stack))
        held.set()
        until(lambda: not stack.runtime.pump())
        with stack.runtime.batch() as cache:
            cache.check_integrity()
            assert cache.jobs_in_flight == 0
        if how == "cancelled":
            manager.cancel_request("first")
            until(lambda: not allocator.block_table)
            assert stack.runtime.fault is None


@pytest.mark.parametrize("policy", ["best_effort", "wait_complete", "timeout"])
def test_a_request_waits_for_its_prefetch_while_others_run(tmp_path: Path, held: threading.Event, policy: str) -> None:
    model, config = make_model(), config_of(tmp_path, prefetch=policy, prefetch_timeout=TIMEOUT, load_timeout=TIMEOUT)
    store(model, config, PROMPTS[1:2])
    with tiered(model, config, open_file_tier=HeldFiles) as tiers, running(model) as manager:
        manager.add_request(PROMPTS[0], request_id="first", max_new_tokens=2000)
        until(lambda: tiers.lookups == 1)
        held.clear()
        manager.add_request(PROMPTS[1], request_id="second", max_new_tokens=4)
        allocator = tiers._allocator
        until(lambda: "second" in allocator._lookups)
        begun = manager.current_batch
        if policy == "best_effort":
            time.sleep(0.3)
            assert manager.current_batch <= begun + 1, "the loop stands still for the file"
        else:
            until(lambda: manager.current_batch > begun + 10)
            assert tiers.lookups == 1
        held.set()
        assert results(manager, 1)["second"].error is None
        (record,) = [record for record in tiers.records if record.request == "second"]
        assert set(record.sources) == {FILE if policy == "best_effort" else HOST}
        manager.cancel_request("first")
        until(lambda: not allocator.block_table)


def test_a_request_waits_no_longer_than_it_is_told_to(tmp_path: Path, held: threading.Event) -> None:
    model = make_model()
    config = config_of(tmp_path, prefetch="timeout", prefetch_timeout=0.1, load_timeout=0.2)
    store(model, config, PROMPTS[1:2])
    with tiered(model, config, open_file_tier=HeldFiles) as tiers, running(model) as manager:
        manager.add_request(PROMPTS[0], request_id="first", max_new_tokens=2000)
        until(lambda: tiers.lookups == 1)
        held.clear()
        manager.add_request(PROMPTS[1], request_id="second", max_new_tokens=4)
        assert results(manager, 1)["second"].error is None
        (record,) = [record for record in tiers.records if record.request == "second"]
        assert record.sources == ()
        manager.cancel_request("first")
        held.set()


def test_while_none_runs_only_the_first_is_waited_for(
    tmp_path: Path, held: threading.Event, loading: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, config = make_model(), config_of(tmp_path, prefetch="wait_complete", load_timeout=TIMEOUT)
    store(model, config, PROMPTS[:3])
    stock = TieredAllocator.prefetch_waiting

    def expect(self: TieredAllocator, waiting: Any) -> set[str]:
        if not self._lookups:  # the tiers have been tested
            held.clear()
            loading.clear()
        return stock(self, waiting)

    late, match = [], TieredAllocator.match_prefix_blocks

    def match_prefix_blocks(self: TieredAllocator, prompt: list[int]) -> list[int]:
        late.extend([self.asking] if self._lookups[self.asking or ""].is_late else [])
        return match(self, prompt)

    with tiered(model, config, open_file_tier=HeldFiles) as tiers:
        monkeypatch.setattr(TieredAllocator, "prefetch_waiting", expect)
        monkeypatch.setattr(TieredAllocator, "match_prefix_blocks", match_prefix_blocks)
        with running(model, PROMPTS[:3]) as manager:
            until(lambda: loading.is_set() and not held.is_set())
            monkeypatch.setattr(TieredAllocator, "prefetch_waiting", stock)
            held.set()
            assert all(result.error is None for result in results(manager, 3).values())
        sources = {record.request: record.sources for record in tiers.records}
    assert late == ["req_0"]
    assert sources == {"req_0": (FILE,) * BLOCKS, "req_1": (HOST,) * BLOCKS, "req_2": (HOST,) * BLOCKS}


def test_request_without_file_loads_reads_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, config = make_model(), config_of(tmp_path)
    store(model, config)
    stock = Tiers.hints_for
    hints = RequestHints.parse({"load": ["host"]})
    monkeypatch.setattr(Tiers, "hints_for", lambda self, name: hints if name == "req_5" else stock(self, name))
    _, sources, _ = serve(model, config, monkeypatch)
    assert sources.pop("req_5") == ()
    assert all(len(each) == BLOCKS for each in sources.values())


def test_prefetched_blocks_are_loaded_regardless_of_the_gate(
    tmp_path: Path, held: threading.Event, loading: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, config = make_model(), config_of(tmp_path, gate=True, load_timeout=TIMEOUT)
    store(model, config, PROMPTS[1:2])
    monkeypatch.setattr(
        RecomputeGate,
        "chunks_to_load",
        lambda self, context, runs, now, tries: 0 if tries else sum(run.num_chunks for run in runs),
    )
    with tiered(model, config, open_file_tier=HeldFiles) as tiers, running(model, max_requests_per_batch=1) as manager:
        manager.add_request(PROMPTS[0], request_id="first", max_new_tokens=2000)
        until(lambda: tiers.lookups == 1)
        allocator = tiers._allocator
        assert allocator is not None
        held.clear()
        loading.clear()
        manager.add_request(PROMPTS[1], request_id="second", max_new_tokens=4)
        until(lambda: "second" in allocator._lookups and allocator._lookups["second"].kept is not None)
        manager.cancel_request("first")
        until(loading.is_set)
        held.set()
        assert results(manager, 1)["second"].error is None
        assert tiers.records[-1].sources == (FILE,) * BLOCKS
