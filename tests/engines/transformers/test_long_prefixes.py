"""Prefixes and prompts longer than host memory pass through it in parts, in both directions."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from test_calls import GENERATION, batching, close, generate, sources
from test_calls import make_model as batched_model
from test_prefix_store import bits, make_model, prefill
from transformers import DynamicCache

from longshore.boundary import FILE, Transfer
from longshore.config import Config
from longshore.engines.transformers import PrefixStore, Tiers, tiered
from longshore.errors import HintError
from longshore.hints import RequestHints
from longshore.runtime.stack import Stack
from longshore.runtime.tier_host import HostedFileTier
from longshore.testing import Fault, FaultPlan, FaultyTier, Rule
from longshore.tiers.base import Op, TierOp
from longshore.tiers.file import FileTier

CHUNK = 3 * 2 * 16 * 2 * 16 * 4
"""Bytes of a block of 16 tokens of `make_model`: layers, K and V, tokens, heads, their size, bytes of a number."""

BATCHED = CHUNK * 2 // 3
"""Of the model for continuous batching, which has two layers."""

LONG = 28
"""Blocks of a long prompt; host memory has twelve."""


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model()


def long_tokens(chunks: int, seed: int = 0) -> list[int]:
    random = torch.Generator().manual_seed(seed)
    return [int(t) for t in torch.randint(0, 256, (16 * chunks + 3,), generator=random)]


def settings(tmp_path: Path, host: int = 12, **more: Any) -> Config:
    return Config.make(**{"host_size": host * CHUNK, "file_path": tmp_path / "kv", "file_size": "64MiB", **more})


@pytest.mark.parametrize("host", [1, 2, 12])
@pytest.mark.parametrize("backup", ["write_back", "write_through"])
def test_a_prefix_longer_than_host_memory_is_restored_whole(model: Any, tmp_path: Path, host: int, backup: str) -> None:
    tokens = long_tokens(28)
    cache = prefill(model, tokens)
    with PrefixStore(model, settings(tmp_path, host, backup=backup), block_size=16, staging_blocks=8) as store:
        for seed in range(3):
            other = long_tokens(28, seed=1 + seed)
            assert store.store_prefix(other, prefill(model, other)) == 28 * 16
        assert store.store_prefix(tokens, cache) == 28 * 16
        for _ in range(3):
            restored, n = store.restore_prefix(tokens)
            assert n == 28 * 16
            assert bits(restored, n) == bits(cache, n)
        with store._stack.runtime.batch() as control:
            assert control.leases == control.protected == 0
            control.check_integrity()
            assert sum(control.counters.misses.values()) == 0


def test_hints_say_what_is_stored_kept_and_loaded(model: Any, tmp_path: Path) -> None:
    """Twelve chunks in host memory, of which a prefix has five; those of higher priority are kept in it."""
    prompts = [long_tokens(5, seed) for seed in range(4)]
    with PrefixStore(model, settings(tmp_path, backup="write_through"), block_size=16, staging_blocks=8) as store:
        first = prefill(model, prompts[0])
        assert store.store_prefix(prompts[0], first, {"store": False}) == 0
        assert store.restore_prefix(prompts[0])[1] == 0
        keep = {"retention": [{"end": 3 * 16, "priority": 90}]}
        for tokens in prompts:
            assert store.store_prefix(tokens, prefill(model, tokens), keep if tokens is prompts[0] else None) == 5 * 16
        tiers = {"load": ["host"]}
        assert store.restore_prefix(prompts[0], RequestHints.parse(tiers))[1] == 3 * 16
        assert store.restore_prefix(prompts[1], tiers)[1] < 5 * 16
        assert store.restore_prefix(prompts[0], {"load": []})[1] == 0
        restored, n = store.restore_prefix(prompts[0])
        assert (n, bits(restored, n)) == (5 * 16, bits(first, n))
        with pytest.raises(HintError, match="priority"):
            store.store_prefix(prompts[0], first, {"retention": [{"priority": 101}]})
        with store._stack.runtime.batch() as control:
            assert control.leases == control.protected == 0
    with PrefixStore(model, settings(tmp_path, request_hints={"store": False}), block_size=16) as store:
        assert store.store_prefix(prompts[0], first) == 0
        assert store.store_prefix(prompts[0], first, {}) == 5 * 16


class DyingTierHost(HostedFileTier):
    """A tier host that is killed when it is given the batch of this number of an operation, for reads or writes."""

    dies_at: ClassVar[dict[Op, int]] = {}
    killed: ClassVar[list[int]] = []

    def submit(self, batch: Sequence[TierOp], deadline: float) -> int:
        ticket = super().submit(batch, deadline)
        op, process = batch[0].op, self._supervisor.process
        if op in self.dies_at and process is not None:
            self.dies_at[op] -= 1
            if not self.dies_at[op]:
                os.kill(process.pid, signal.SIGKILL)
                self.killed.append(process.pid)
        return ticket


@pytest.fixture
def dying(monkeypatch: pytest.MonkeyPatch) -> type[DyingTierHost]:
    monkeypatch.setattr(DyingTierHost, "dies_at", {})
    monkeypatch.setattr(DyingTierHost, "killed", [])
    return DyingTierHost


def check_nothing_held(store: PrefixStore) -> None:
    assert store._stack.runtime.wait_idle(30.0)
    with store._stack.runtime.batch() as control:
        control.check_integrity()
        assert control.leases == control.protected == 0


def restored_whole(store: PrefixStore, tokens: list[int]) -> DynamicCache:
    """A whole prefix, once the files can be read again."""
    deadline = time.monotonic() + 60
    while (found := store.restore_prefix(tokens))[1] < LONG * 16:
        assert time.monotonic() < deadline
    return found[0]


@pytest.mark.parametrize("op", [Op.WRITE, Op.READ])
def test_dead_tier_host_costs_a_long_prefix_its_tail(
    model: Any, tmp_path: Path, dying: type[DyingTierHost], op: Op
) -> None:
    tokens = long_tokens(LONG)
    cache, config = prefill(model, tokens), settings(tmp_path, host_shared=True, load_timeout=60.0)
    with PrefixStore(model, config, block_size=16, staging_blocks=8, open_file_tier=dying) as store:
        if op is Op.WRITE:
            dying.dies_at[op] = 2
            kept = store.store_prefix(tokens, cache)
            assert dying.killed
            check_nothing_held(store)
            restored, n = store.restore_prefix(tokens)
            assert n <= kept
            assert not n or bits(restored, n) == bits(cache, n)
            deadline = time.monotonic() + 60
            while store.store_prefix(tokens, cache) < LONG * 16:
                assert time.monotonic() < deadline
        else:
            assert store.store_prefix(tokens, cache) == LONG * 16
            assert store._stack.runtime.flush(30)
            dying.dies_at[op] = 2
            restored, n = store.restore_prefix(tokens)
            assert dying.killed
            assert 0 < n < LONG * 16
            assert bits(restored, n) == bits(cache, n)
        check_nothing_held(store)
        assert bits(restored_whole(store, tokens), LONG * 16) == bits(cache, LONG * 16)
        check_nothing_held(store)


def test_a_corrupt_record_ends_a_long_prefix(model: Any, tmp_path: Path) -> None:
    tokens, made = long_tokens(LONG), list[FaultyTier]()
    cache = prefill(model, tokens)

    def open_file_tier(*args: Any, arena: Any, **kwargs: Any) -> FaultyTier:
        rule = Rule(Op.READ, Fault.CORRUPT, nth=frozenset({13}))
        made.append(FaultyTier(FileTier(*args, arena=arena, **kwargs), FaultPlan([rule], seed=1), arena))
        return made[-1]

    with PrefixStore(
        model, settings(tmp_path), block_size=16, staging_blocks=8, open_file_tier=open_file_tier
    ) as store:
        assert store.store_prefix(tokens, cache) == LONG * 16
        restored, n = store.restore_prefix(tokens)
        assert made[0].fired[Fault.CORRUPT] == 1
        assert 0 < n < LONG * 16
        assert bits(restored, n) == bits(cache, n)
        check_nothing_held(store)
        assert store.store_prefix(tokens, cache) == LONG * 16
        assert bits(restored_whole(store, tokens), LONG * 16) == bits(cache, LONG * 16)


def test_an_interrupted_restore_lets_go_of_everything(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, calls = long_tokens(LONG), 0
    cache, stock = prefill(model, tokens), Stack._schedule_load

    def interrupted(self: Stack, *args: Any, **kwargs: Any) -> list[str]:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return stock(self, *args, **kwargs)

    with PrefixStore(model, settings(tmp_path, host=4), block_size=16, staging_blocks=8) as store:
        assert store.store_prefix(tokens, cache) == LONG * 16
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(Stack, "_schedule_load", interrupted)
            store.restore_prefix(tokens)
        assert calls == 3
        check_nothing_held(store)
        assert bits(restored_whole(store, tokens), LONG * 16) == bits(cache, LONG * 16)


def test_the_next_part_loads_while_one_is_unpacked(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """From host memory: the load of a part is submitted before the part before it is unpacked, into the other half."""
    tokens, order = long_tokens(12), list[tuple[str, int]]()
    cache, unpack = prefill(model, tokens), PrefixStore._unpack

    def unpacked(self: PrefixStore, states: list[torch.Tensor], first: int, blocks: range) -> None:
        order.append(("unpack", blocks.start))
        unpack(self, states, first, blocks)

    config = Config.make(host_size=24 * CHUNK)
    with PrefixStore(model, config, block_size=16, staging_blocks=8) as store:
        assert store.store_prefix(tokens, cache) == 12 * 16
        engine, submit = store._stack.transfer_engine, store._stack.transfer_engine.submit

        def submitted(transfer: Transfer) -> None:
            order.append(("load", transfer.sections[0].blocks[0]))
            submit(transfer)

        monkeypatch.setattr(engine, "submit", submitted)
        monkeypatch.setattr(PrefixStore, "_unpack", unpacked)
        restored, n = store.restore_prefix(tokens)
        assert (n, bits(restored, n)) == (12 * 16, bits(cache, n))
        check_nothing_held(store)
    loads, unpacks = [("load", 0), ("load", 4), ("load", 0)], [("unpack", 0), ("unpack", 4), ("unpack", 0)]
    assert order == [*loads[:2], unpacks[0], loads[2], *unpacks[1:]]


def long_prompt(start: int) -> list[int]:
    """One whose last block needs to be computed, behind `LONG` others."""
    return [start, *(2 + i % 250 for i in range(16 * LONG + 2))]


def tier_settings(tmp_path: Path, **more: Any) -> Config:
    sizes = {"host_size": 12 * BATCHED, "file_path": tmp_path / "kv", "file_size": "64MiB", "gate": False}
    return Config.make(**{**sizes, **more})


def check_idle(tiers: Tiers) -> None:
    assert tiers.stack.runtime.flush(30.0)
    with tiers.stack.runtime.batch() as cache:
        cache.check_integrity()
        assert (cache.leases, cache.protected, cache.jobs_in_flight) == (0, 0, 0)


@pytest.mark.parametrize("offload", ["write_through", "write_back"])
def test_prompt_beyond_host_memory_is_served_by_next_engine(tmp_path: Path, offload: str) -> None:
    model, prompts = batched_model(), [long_prompt(start) for start in (200, 201)]
    expected = generate(model, prompts, num_blocks=80)
    with tiered(model, tier_settings(tmp_path, offload=offload)) as tiers:
        first = generate(model, prompts, num_blocks=80)
        second = generate(model, prompts, num_blocks=80)
        assert [len(each) for each in sources(tiers)] == [LONG, LONG]
        check_idle(tiers)
    assert close(first, expected)
    assert close(second, expected)
    assert [each.generated_tokens for each in second] == [each.generated_tokens for each in expected]


@pytest.mark.parametrize("offload", ["write_through", "write_back"])
def test_prompt_longer_than_host_memory_is_whole_after_eviction(tmp_path: Path, offload: str) -> None:
    """By an engine whose device has room for one such prompt."""
    model = batched_model()
    prompts = [long_prompt(start) for start in (200, 201, 200, 201)]
    expected = generate(model, prompts[:2], num_blocks=80)
    with tiered(model, tier_settings(tmp_path, offload=offload)) as tiers:
        found = []
        manager = model.init_continuous_batching(GENERATION, batching(num_blocks=40))
        manager.start()
        try:
            for prompt in prompts:
                name = manager.add_request(prompt, max_new_tokens=4)
                found.append(manager.get_result(request_id=name, timeout=60))
        finally:
            manager.stop(block=True)
            manager.destroy()
        assert [len(each.sources) for each in tiers.records] == [0, 0, LONG, LONG]
        assert all(FILE in each.sources for each in tiers.records[2:])
        check_idle(tiers)
    assert [each.generated_tokens for each in found] == [each.generated_tokens for each in expected] * 2
    assert close(found, expected * 2)


@pytest.mark.parametrize("op", [Op.WRITE, Op.READ])
def test_a_tier_host_that_dies_leaves_long_prompts_exact(tmp_path: Path, dying: type[DyingTierHost], op: Op) -> None:
    model, prompts = batched_model(), [long_prompt(start) for start in (200, 201)]
    expected = generate(model, prompts, num_blocks=80)
    config = tier_settings(tmp_path, host_shared=True)
    with tiered(model, config, open_file_tier=dying) as tiers:
        if op is Op.WRITE:
            dying.dies_at[op] = 2  # in the self-test there is one
        assert close(generate(model, prompts, num_blocks=80), expected)
        if op is Op.READ:
            dying.dies_at[op] = 2
        assert close(generate(model, prompts, num_blocks=80), expected)
        assert dying.killed
        check_idle(tiers)


def test_cancelled_load_of_long_prompt_releases_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt, stock = batched_model(), long_prompt(200), Stack._schedule_load
    (expected,) = generate(model, [prompt], num_blocks=80)
    parts = 0
    with tiered(model, tier_settings(tmp_path)) as tiers:
        generate(model, [prompt], num_blocks=80)
        manager = model.init_continuous_batching(GENERATION, batching(num_blocks=80))

        def cancelled(self: Stack, *args: Any, **kwargs: Any) -> list[str]:
            nonlocal parts
            parts += 1
            if parts == 2:
                manager.cancel_request("first")
            return stock(self, *args, **kwargs)

        monkeypatch.setattr(Stack, "_schedule_load", cancelled)
        manager.start()
        try:
            manager.add_request(prompt, request_id="first", max_new_tokens=4)
            deadline = time.monotonic() + 60
            while parts < 2:
                assert time.monotonic() < deadline
                time.sleep(0.002)
            manager.add_request(prompt, request_id="second", max_new_tokens=4)
            found = manager.get_result(request_id="second", timeout=60)
        finally:
            manager.stop(block=True)
            manager.destroy()
        assert found.generated_tokens == expected.generated_tokens
        assert close([found], [expected])
        check_idle(tiers)
