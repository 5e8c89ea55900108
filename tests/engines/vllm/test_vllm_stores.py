"""A store that two engines share: what one has stored the other is served, and never what other weights computed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm_kit import Group, Rig, file_settings, keys_of

from longshore.boundary import HOST, REMOTE
from longshore.cache import MissReason
from longshore.engines.vllm import spec
from longshore.keys import Scope

HIT, MISS, PENDING = LookupResult.HIT, LookupResult.MISS, LookupResult.HIT_PENDING
PATIENCE = 30.0
PATIENT = "probe_timeout=20s&fetch_timeout=20s&write_timeout=20s"

Opener = Callable[..., Rig]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opener]:
    """Opens engines that share a directory and nothing else; each with its own host memory, no files, no gate."""
    made: list[Rig] = []
    (tmp_path / "shared").mkdir()

    def open_rig(weights: bytes = bytes(64), **settings: Any) -> Rig:
        path = tmp_path / f"model {weights.hex()[:8]}"
        path.mkdir(exist_ok=True)
        model = file_settings(path)["model"]
        Path(model, "model.safetensors").write_bytes(weights)
        url = f"file://{tmp_path}/shared?{PATIENT}"
        made.append(Rig(**{"remote": url, "gate": False, "model": model, "load_timeout": 30.0, **settings}))
        return made[-1]

    yield open_rig
    for rig in made:
        rig.close()


def until(what: Callable[[], bool]) -> None:
    give_up = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < give_up, "it did not come to that"
        time.sleep(0.005)


def stored(rig: Rig, count: int = 4, group: int = 0) -> list[torch.Tensor]:
    """Store chunks of the prompt, here and in the store; what their blocks hold."""
    rig.store(keys_of(count, group), range(count), rig.request("first"))
    assert rig.manager.flush(PATIENCE)
    return [part for block in range(count) for part in rig.bytes_of(0, block)]


def answered(rig: Rig, keys: Any, context: Any) -> list[LookupResult]:
    """What the manager says once it no longer says that chunks are on their way."""
    said: list[LookupResult] = []

    def is_over() -> bool:
        said[:] = rig.lookup(keys, context)
        return PENDING not in said

    until(is_over)
    return said


def test_another_engine_is_served_what_one_has_stored(opened: Opener) -> None:
    one, other = opened(), opened()
    expected = stored(one)
    keys = keys_of(6)
    context = other.request("second", keys)
    assert other.lookup(keys, context)[0] is PENDING
    assert answered(other, keys, context) == [HIT] * 4 + [MISS] * 2
    assert other.manager.get_load_source(keys[0], context) is CacheHitSource.EXTERNAL_UNSPECIFIED
    other.load(keys[:4], range(8, 12), context)
    found = [part for block in range(8, 12) for part in other.bytes_of(0, block)]
    assert all(map(torch.equal, found, expected))
    other.manager.on_request_finished(context)
    assert other.manager.loaded_tokens[REMOTE] == 64
    again = other.request("third", keys[:4])
    assert other.lookup(keys[:4], again) == [HIT] * 4  # from host memory, at once
    other.load(keys[:4], range(8, 12), again)
    assert other.manager.loaded_tokens[HOST] == 64
    stats = other.manager.get_stats()
    assert stats is not None and "valkey" not in str(stats.data)


def test_a_damaged_value_is_a_miss_that_is_counted_once(opened: Opener, tmp_path: Path) -> None:
    one, other = opened(), opened()
    stored(one)
    values = [path for path in (tmp_path / "shared").rglob("*") if path.is_file()]
    assert len(values) >= 4
    for path in values:
        data = bytearray(path.read_bytes())
        data[-200] ^= 1
        path.write_bytes(data)
    keys = keys_of(6)
    context = other.request("second", keys)
    assert answered(other, keys, context) == [MISS] * 6
    misses = +other.cache.counters.misses
    assert misses == {MissReason.CORRUPT: 4, MissReason.ABSENT: 2}


def test_several_groups_are_fetched_as_far_as_all_need(opened: Opener) -> None:
    groups = [Group(0), Group(1, window=32)]
    one, other = opened(groups=groups), opened(groups=groups)
    first = one.request("first")
    for group in (0, 1):
        one.store(keys_of(4, group), range(4), first)
    assert one.manager.flush(PATIENCE)
    keys = [*keys_of(5), *keys_of(5, 1)]
    context = other.request("second", keys)
    assert answered(other, keys, context)[:4] == [HIT] * 4
    said = dict(zip(keys, other.lookup(keys, context), strict=True))
    assert [said[key] for key in keys_of(5, 1)][2:4] == [HIT] * 2
    other.load(keys_of(4), range(8, 12), context)


@pytest.mark.parametrize("guarded", [True, False])
def test_engines_of_other_weights_exchange_nothing(
    opened: Opener, guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not guarded:  # the negative control
        same = Scope(model="m", weights="the same for all", dtype="d", layout="l", block_size=16)
        monkeypatch.setattr(spec, "scope_of", lambda *_: same)
    one, other, alike = opened(b"a" * 64), opened(b"b" * 64), opened(b"a" * 64)
    stored(one)
    keys = keys_of(4)
    assert answered(alike, keys, alike.request("second", keys)) == [HIT] * 4
    assert answered(other, keys, other.request("second", keys)) == [MISS if guarded else HIT] * 4


def test_changed_weights_are_stored_under_a_name_that_nobody_has(opened: Opener) -> None:
    one, other = opened(fixed_weights=True), opened()
    (store,) = one.manager._tiers.stores
    name = store.namespace
    one.manager.reset_cache()
    assert store.namespace == name
    one.manager._tiers.reports.weights_changed(0)  # as a worker tells of update_weights
    one.manager.on_schedule_end(type("Step", (), {"preempted_req_ids": ()})())
    assert store.namespace != name
    one.manager.device_was_reset()
    stored(one)
    keys = keys_of(4)
    assert answered(other, keys, other.request("second", keys)) == [MISS] * 4
    free = opened()
    free.manager.reset_cache()
    assert free.manager._tiers.stores[0].namespace != name


def test_without_known_weights_there_is_no_store(opened: Opener, caplog: pytest.LogCaptureFixture) -> None:
    rig = opened(vllm={"load_config.load_format": "dummy"})
    assert rig.manager._tiers.stores == ()
    assert "remote tiers disabled: weights of load_format dummy" in caplog.text
    stored(rig)
    keys = keys_of(6)
    assert rig.lookup(keys, rig.request("second", keys)) == [HIT] * 4 + [MISS] * 2


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_dead_or_stopped_tier_host_holds_nothing_up(opened: Opener, number: signal.Signals) -> None:
    one, other = opened(), opened()
    stored(one)
    process = other.manager._tiers.stores[0]._supervisor.process
    os.kill(process.pid, number)
    keys = keys_of(4)
    context = other.request("second", keys)
    try:
        assert answered(other, keys, context) == [MISS] * 4
        other.store(keys, range(4), context)
        assert other.lookup(keys, other.request("third", keys)) == [HIT] * 4
    finally:
        if number is signal.SIGSTOP:
            os.kill(process.pid, signal.SIGCONT)


def test_what_host_memory_has_is_never_asked_for(opened: Opener) -> None:
    rig = opened()
    stored(rig)
    process = rig.manager._tiers.stores[0]._supervisor.process
    os.kill(process.pid, signal.SIGSTOP)
    try:
        keys = keys_of(4)
        assert rig.lookup(keys, rig.request("second", keys)) == [HIT] * 4
    finally:
        os.kill(process.pid, signal.SIGCONT)


def test_prompt_shorter_than_a_chunk_is_probed_with_a_gate(opened: Opener) -> None:
    rig = opened(gate=True)
    (key,) = keys_of(1)
    context = rig.request("short")
    context.set_offload_key_position(key, 8)  # as vLLM names the first tokens of a block of a recurrent layer
    assert answered(rig, [key], context) == [MISS]
    assert rig.manager._tiers.runtime.fault is None
