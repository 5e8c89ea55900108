"""A store that two engines share: what one has stored the other is served, and never what other weights computed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm_kit import Group, Rig, file_settings, keys_of

from longshore.boundary import HOST, PEERS, REMOTE
from longshore.cache import MissReason
from longshore.engines.vllm import spec
from longshore.engines.vllm.requests import cache_keys
from longshore.keys import Scope

HIT, MISS, PENDING = LookupResult.HIT, LookupResult.MISS, LookupResult.HIT_PENDING
TIMEOUT = 30.0
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


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def until(what: Callable[[], bool]) -> None:
    give_up = time.monotonic() + TIMEOUT
    while not what():
        assert time.monotonic() < give_up, "it did not come to that"
        time.sleep(0.005)


def stored(rig: Rig, count: int = 4, group: int = 0) -> list[torch.Tensor]:
    """Store chunks of the prompt, here and in the store; what their blocks hold."""
    rig.store(keys_of(count, group), range(count), rig.request("first"))
    assert rig.manager.flush(TIMEOUT)
    return [part for block in range(count) for part in rig.bytes_of(0, block)]


def answered(rig: Rig, keys: Any, context: Any) -> list[LookupResult]:
    """What the manager says once it no longer says that chunks are on their way."""
    said: list[LookupResult] = []

    def is_over() -> bool:
        said[:] = rig.lookup(keys, context)
        return PENDING not in said

    until(is_over)
    return said


def named(rig: Rig, keys: Any, port: int) -> Any:
    """A request that names a peer."""
    context = rig.request("second", keys)
    context.kv_transfer_params = {"remote_kv_source": {"host": "127.0.0.1", "port": port}}
    rig.manager.on_new_request(context)
    return context


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


def test_a_request_is_served_what_the_peer_it_names_has(opened: Opener) -> None:
    port = free_port()
    one = opened(remote=(), serve=f"valkey://127.0.0.1:{port}")
    other = opened(remote=(), peer_networks="127.0.0.0/8", peer_url=f"valkey://peer?{PATIENT}")
    one.store(keys_of(4), range(4), one.request("first"))
    expected = [part for block in range(4) for part in one.bytes_of(0, block)]
    keys = keys_of(6)
    nobody = other.request("nobody", keys)
    assert answered(other, keys, nobody) == [MISS] * 6
    context = named(other, keys, port)
    assert answered(other, keys, context) == [HIT] * 4 + [MISS] * 2
    other.load(keys[:4], range(8, 12), context)
    found = [part for block in range(8, 12) for part in other.bytes_of(0, block)]
    assert all(map(torch.equal, found, expected))
    other.manager.on_request_finished(context)
    assert other.manager.loaded_tokens[PEERS] == 64
    served, read = (peer_metrics(each) for each in (one, other))
    assert served["values", ("read", "present")] == 4
    assert served["values", ("probe", "present")] == 4
    assert served["values", ("probe", "absent")] == 2
    assert served["sent_bytes", ()] == 4 * (128 + 4096)
    assert not any(value for (name, _), value in served.items() if name in {"dropped_clients", "waits"})
    assert not any(read.values())
    assert read.keys() == served.keys()


def peer_metrics(rig: Any) -> dict[tuple[str, tuple[str, ...]], float]:
    """The metrics of peers, at the first question."""
    stats = rig.manager.get_stats()
    assert stats is not None
    all_of_them = stats.data["data"].items()
    name_of = "longshore_peer_"
    return {
        (name.removeprefix(name_of), labels): value
        for name, values in all_of_them
        if name.startswith(name_of)
        for labels, value in values.items()
    }


def test_what_a_peer_is_computing_is_waited_for(opened: Opener) -> None:
    port = free_port()
    one = opened(remote=(), serve=f"valkey://127.0.0.1:{port}")
    other = opened(remote=(), peer_networks="127.0.0.0/8", peer_url=f"valkey://peer?{PATIENT}")
    keys = keys_of(4)
    prefill = one.request("first", keys)
    assert one.lookup(keys, prefill) == [MISS] * 4  # it computes them now
    context = named(other, keys, port)
    for _ in range(20):
        assert other.lookup(keys, context) == [PENDING] * 4
        time.sleep(0.01)
    one.store(keys, range(4), prefill)
    assert answered(other, keys, context) == [HIT] * 4
    assert peer_metrics(one)["values", ("probe", "coming")] >= 4
    waits = {labels: value for (name, labels), value in peer_metrics(other).items() if name == "waits"}
    assert waits == {("arrived",): 1, ("gone",): 0, ("late",): 0}


def test_what_a_peer_does_not_compute_is_not_waited_for(opened: Opener) -> None:
    port = free_port()
    one = opened(remote=(), serve=f"valkey://127.0.0.1:{port}")
    other = opened(remote=(), peer_networks="127.0.0.0/8", peer_url=f"valkey://peer?{PATIENT}")
    keys = keys_of(4)
    prefill = one.request("first", keys)
    assert one.lookup(keys, prefill) == [MISS] * 4
    context = named(other, keys, port)
    assert other.lookup(keys, context) == [PENDING] * 4
    one.manager.on_request_finished(prefill)  # aborted
    assert answered(other, keys, context) == [MISS] * 4


@pytest.mark.parametrize("said", [{"host": "192.0.2.1", "port": 7}, {"host": "127.0.0.1"}, "127.0.0.1:7"])
def test_a_peer_that_may_not_be_named_is_not_asked(opened: Opener, said: Any, caplog: pytest.LogCaptureFixture) -> None:
    other = opened(remote=(), peer_networks="127.0.0.0/8")
    keys = keys_of(4)
    context = other.request("second", keys)
    context.kv_transfer_params = {"remote_kv_source": said}
    other.manager.on_new_request(context)
    assert answered(other, keys, context) == [MISS] * 4
    assert "is not used" in caplog.text


def test_what_was_offered_and_not_stored_is_not_coming(opened: Opener) -> None:
    port = free_port()
    one = opened(remote=(), serve=f"valkey://127.0.0.1:{port}")
    keys = keys_of(4)
    prefill = one.request("first", keys)
    assert one.lookup(keys, prefill) == [MISS] * 4
    assert one.manager.is_coming(cache_keys(keys)[0])
    one.store(keys, range(4), prefill)
    assert not any(map(one.manager.is_coming, cache_keys(keys)))
    one.manager.on_request_finished(prefill)
    assert not one.manager._computed_by


def test_a_request_that_names_nobody_asks_no_peer(opened: Opener) -> None:
    """Though another request has named the peer that has its blocks, which is gone since."""
    port = free_port()
    one = opened(remote=(), serve=f"valkey://127.0.0.1:{port}")
    other = opened(remote=(), peer_networks="127.0.0.0/8", peer_url=f"valkey://peer?{PATIENT}")
    one.store(keys_of(4), range(4), one.request("first"))
    keys = keys_of(4)
    context = named(other, keys, port)
    until(lambda: other.lookup(keys, context)[0] is HIT)
    other.manager.on_request_finished(context)
    with other.manager._runtime.batch() as cache:
        assert cache.discard(cache_keys(keys), HOST) == 4
    one.close()
    assert other.lookup(keys, other.request("third", keys)) == [MISS] * 4


def test_what_a_peer_stored_before_a_reset_is_gone(opened: Opener) -> None:
    """It may mean other weights. What is stored under the same keys afterwards is the peer's own."""
    port = free_port()
    one = opened(remote=(), serve=f"valkey://127.0.0.1:{port}")
    other = opened(remote=(), peer_networks="127.0.0.0/8", peer_url=f"valkey://peer?{PATIENT}")
    keys = keys_of(4)
    one.store(keys, range(4), one.request("first"))
    one.manager.reset_cache()
    one.store(keys, range(4, 8), one.request("second"))
    assert answered(one, keys, one.request("third", keys)) == [HIT] * 4
    assert answered(other, keys, named(other, keys, port)) == [MISS] * 4


def test_engines_without_peers_import_nothing_of_them() -> None:
    code = (
        "import sys, longshore.engines.vllm.spec\n"
        "assert not [name for name in sys.modules if 'peer' in name and name.startswith('longshore')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_peer_of_other_weights_has_nothing(opened: Opener) -> None:
    port = free_port()
    one = opened(b"a" * 64, remote=(), serve=f"valkey://127.0.0.1:{port}")
    one.store(keys_of(4), range(4), one.request("first"))
    for weights, found in ((b"a" * 64, HIT), (b"b" * 64, MISS)):
        other = opened(weights, remote=(), peer_networks="127.0.0.0/8", peer_url=f"valkey://peer?{PATIENT}")
        context = named(other, keys_of(4), port)
        assert answered(other, keys_of(4), context) == [found] * 4


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
    assert one.manager.flush(TIMEOUT)
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
    (store,) = one.manager._tiers.remote_stores
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
    assert free.manager._tiers.remote_stores[0].namespace != name


def test_without_known_weights_there_is_no_store(opened: Opener, caplog: pytest.LogCaptureFixture) -> None:
    rig = opened(vllm={"load_config.load_format": "dummy"})
    assert rig.manager._tiers.remote_stores == ()
    assert "remote tiers disabled: weights of load_format dummy" in caplog.text
    stored(rig)
    keys = keys_of(6)
    assert rig.lookup(keys, rig.request("second", keys)) == [HIT] * 4 + [MISS] * 2


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_dead_or_stopped_tier_host_holds_nothing_up(opened: Opener, number: signal.Signals) -> None:
    one, other = opened(), opened()
    stored(one)
    process = other.manager._tiers.remote_stores[0]._supervisor.process
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
    process = rig.manager._tiers.remote_stores[0]._supervisor.process
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
