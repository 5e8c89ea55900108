"""The storage back end as SGLang's threads call it: a leading run of the right bytes, or fewer pages."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang_on_cpu import leave_rank_out
from storage_kit import PAGE, Rig, eventually, indices, names

from longshore.boundary import Status
from longshore.engines.sglang import identity
from longshore.engines.sglang.storage import LongshoreStorage
from longshore.errors import ConfigError, EngineError, TierInUseError
from longshore.runtime.tier_host import HostedFileTier
from longshore.transfer.device.base import copy_pieces

Rigs = Callable[..., Rig]
KEYS = names(8)


def again(rigs: Rigs, **named: object) -> Rig:
    """A rig over the same files with other, short timeouts: what it finds there was stored without hurry."""
    rigs.made[-1].close()  # type: ignore[attr-defined]
    return rigs(**named)


@pytest.mark.parametrize("layout", ["page_first_direct", "page_first", "page_head", "layer_first", "page_first mla"])
def test_pages_come_back_as_they_went(rigs: Rigs, layout: str) -> None:
    rig = rigs(layout=layout)
    held = rig.store(KEYS, range(10, 18))
    rig.fill(range(64), seed=99)
    assert rig.exists([*KEYS, *names(1, seed=7)]) == 8
    assert rig.get(KEYS, [40, 3, 22, 50, 51, 52, 9, 1]) == [True] * 8
    assert torch.equal(rig.read([40, 3, 22, 50, 51, 52, 9, 1]), held)
    with rig.storage._kv.runtime.locked() as cache:
        assert cache.counters.hit_tokens["file"] == 8 * PAGE


def test_pages_come_back_after_a_restart(rigs: Rigs) -> None:
    rig = rigs()
    held = rig.store(KEYS, range(8))
    rig.close()
    rig = rigs()
    assert rig.exists(KEYS) == 8
    assert rig.get(KEYS, range(8)) == [True] * 8
    assert torch.equal(rig.read(range(8)), held)


def test_requested_page_needs_no_prefix(rigs: Rigs) -> None:
    """SGLang leaves out the pages of the last node that it has."""
    rig = rigs()
    held = rig.store(KEYS, range(8))
    rig.fill(range(8), seed=99)
    assert rig.exists(KEYS[4:]) == 4
    assert rig.get(KEYS[4:], range(20, 24), before=KEYS[:2]) == [True] * 4
    assert torch.equal(rig.read(range(20, 24)), held[4:])


def test_pages_are_found_whose_predecessors_no_tier_has(rigs: Rigs) -> None:
    """SGLang has stored a node, and the tiers did not take the one before it: a disk stood still, say."""
    rig = rigs()
    held = rig.fill(range(8), seed=1)
    assert rig.set(KEYS[4:], range(4, 8), before=KEYS[:4]) == [True] * 4
    rig.close()
    rig = rigs()
    for first in (4, 6):
        rig.fill(range(20, 28), seed=9)
        assert rig.exists(KEYS[first:]) == 8 - first
        assert rig.get(KEYS[first:], range(20 + first, 28)) == [True] * (8 - first)
        assert torch.equal(rig.read(range(20 + first, 28)), held[first:])
    assert rig.exists(KEYS) == 0
    assert rig.set(KEYS[:4], range(4)) == [True] * 4
    assert rig.storage.flush(30)
    assert rig.exists(KEYS) == 8


def test_pages_stored_while_a_read_begins_are_read(rigs: Rigs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another of SGLang's threads stores them; no tier has what is before them."""
    rig, load_part = rigs(), LongshoreStorage._load_part
    held = rig.fill(range(8), seed=1)

    def late(self: LongshoreStorage, *arguments: Any) -> int:
        assert rig.set(KEYS[4:], range(4, 8), before=KEYS[:4]) == [True] * 4
        assert self.flush(30)
        return load_part(self, *arguments)

    monkeypatch.setattr(LongshoreStorage, "_load_part", late)
    assert rig.get(KEYS[4:], range(20, 24)) == [True] * 4
    assert torch.equal(rig.read(range(20, 24)), held[4:])


def test_a_page_is_stored_behind_those_before_it(rigs: Rigs) -> None:
    rig = rigs()
    rig.store(KEYS[:4], range(4))
    rig.fill(range(4, 8), seed=2)
    assert rig.set(KEYS[4:], range(4, 8), before=KEYS[:4]) == [True] * 4
    assert rig.storage.flush(30)
    assert rig.exists(KEYS) == 8
    assert rig.set(KEYS, range(8)) == [True] * 8  # all of them are known


def test_page_without_a_known_prefix_is_not_stored(rigs: Rigs, caplog: pytest.LogCaptureFixture) -> None:
    rig = rigs()
    assert rig.set(KEYS, range(8), before=None) == [False] * 8
    assert "hicache_storage_pass_prefix_keys" in caplog.text
    assert rig.exists(KEYS) == 0


def test_a_corrupt_record_ends_the_run(rigs: Rigs) -> None:
    rig = rigs()
    held = rig.store(KEYS, range(8))
    rig.close()
    rig = rigs()
    page = bytes(held[3].flatten().view(torch.uint8).tolist())
    path = rig.segment()
    data = bytearray(path.read_bytes())
    at = data.find(page[: len(page) // 2])  # the keys of a page come before its values
    assert at > 0
    data[at + 100] ^= 1
    with path.open("r+b") as file:
        file.write(data)
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert rig.get(KEYS, range(8)) == [True] * 3 + [False] * 5
    assert torch.equal(rig.read(range(3)), held[:3])
    assert rig.exists(KEYS) == 3
    assert rig.storage._kv.stack.file.failures["read_corrupt"] == 1  # type: ignore[union-attr]


def test_a_dead_tier_host_makes_fewer_pages(rigs: Rigs) -> None:
    rig = rigs()
    held = rig.store(KEYS, range(8))
    dead = rig.host_pid
    os.kill(dead, signal.SIGKILL)
    while Path(f"/proc/{dead}").exists() and "Z" not in Path(f"/proc/{dead}/stat").read_text().rpartition(")")[2][:3]:
        time.sleep(0.01)
    assert rig.get(KEYS, range(8)) == [False] * 8
    rig.fill(range(20, 28), seed=3)
    rig.set(names(8, seed=5), range(20, 28))  # whatever it says
    while not any(rig.get(KEYS, range(8))):  # until the next one is there
        time.sleep(0.05)
    assert torch.equal(rig.read(range(8)), held)
    assert rig.storage._kv.stack.file.failures["tier_host"] == 1  # type: ignore[union-attr]


@pytest.fixture
def slow_copies(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on, a copy in memory begins only half a second after it was ordered."""

    def slow(*pieces: Any) -> None:
        time.sleep(0.5)
        copy_pieces(*pieces)

    return lambda: monkeypatch.setattr("longshore.transfer.device.base.copy_pieces", slow)


def test_a_read_that_ends_after_its_call_writes_no_page(rigs: Rigs, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang has taken its pages back by then, and uses them for something else."""
    rigs().store(KEYS, range(8))
    rig = again(rigs, load_timeout=0.5)
    poll, held_back = HostedFileTier.poll, list[Any]()
    with monkeypatch.context() as patch:
        patch.setattr(HostedFileTier, "poll", lambda tier: held_back.extend(poll(tier)) or [])
        patch.setattr(HostedFileTier, "cancel", lambda tier, ticket: None)  # it has begun
        assert rig.get(KEYS, range(8)) == [False] * 8
        other = rig.fill(range(8), seed=77)
    while not held_back:
        held_back += poll(rig.storage._kv.stack.file)  # type: ignore[arg-type]
    assert held_back[0].statuses == (Status.OK,) * 8
    monkeypatch.setattr(HostedFileTier, "poll", lambda tier: [*poll(tier), *(held_back.pop() for _ in list(held_back))])
    runtime = rig.storage._kv.stack.runtime
    assert runtime.wait_idle(30)
    assert runtime._cache.counters.routes["file->device"].failed == 8
    assert torch.equal(rig.read(range(8)), other)


def test_a_call_waits_for_a_copy_that_has_begun(rigs: Rigs, slow_copies: Callable[[], None]) -> None:
    rigs().store(KEYS, range(8))
    rig = again(rigs, load_timeout=0.3)
    slow_copies()
    assert rig.get(KEYS, range(8)) == [False] * 8
    other = rig.fill(range(8), seed=77)
    assert rig.storage._kv.stack.runtime.wait_idle(30)
    assert torch.equal(rig.read(range(8)), other)


def test_a_store_takes_its_bytes_before_it_returns(rigs: Rigs, slow_copies: Callable[[], None]) -> None:
    """SGLang may use the pages for something else at once, and need not wait for the disk."""
    rig = rigs()
    os.kill(rig.host_pid, signal.SIGSTOP)
    try:
        held = rig.fill(range(8), seed=1)
        slow_copies()
        assert rig.set(KEYS, range(8)) == [True] * 8
        rig.fill(range(8), seed=88)
    finally:
        os.kill(rig.host_pid, signal.SIGCONT)
    assert rig.storage.flush(30)
    assert rig.get(KEYS, range(30, 38)) == [True] * 8
    assert torch.equal(rig.read(range(30, 38)), held)


def test_a_stopped_tier_host_holds_no_call_up(rigs: Rigs) -> None:
    held = rigs().store(KEYS, range(8))
    rig = again(rigs, load_timeout=0.5)
    os.kill(rig.host_pid, signal.SIGSTOP)
    try:
        assert rig.get(KEYS, range(8)) == [False] * 8
    finally:
        os.kill(rig.host_pid, signal.SIGCONT)
    assert rig.storage._kv.stack.runtime.wait_idle(30)
    eventually(lambda: rig.get(KEYS, range(8)), [True] * 8)
    assert torch.equal(rig.read(range(8)), held)


@pytest.mark.parametrize("tiers", ["files", "stores"])
def test_flush_ends_the_read_of_an_aborted_request(rigs: Rigs, tmp_path: Path, tiers: str) -> None:
    """SGLang waits 10 s for its threads, and stops the server if one of them is not back then."""
    stores = {} if tiers == "files" else {"remote": f"{tmp_path.as_uri()}?fetch_timeout=60s", "host_size": "4MiB"}
    held = rigs(**stores).store(KEYS, range(8))
    rig = again(rigs, load_timeout=60, **stores)
    os.kill(rig.host_pid, signal.SIGSTOP)
    said: list[list[bool]] = []
    controller = object.__new__(HiCacheController)
    controller.storage_stop_event = threading.Event()
    controller.prefetch_io_aux_thread = threading.Thread(target=lambda: said.append(rig.get(KEYS, range(8))))
    try:
        controller.prefetch_io_aux_thread.start()
        runtime = rig.storage._kv.runtime
        while not runtime._running:
            time.sleep(0.01)
        controller._stop_storage_threads()
        assert said == [[False] * 8]
        other = rig.fill(range(8), seed=77)
    finally:
        os.kill(rig.host_pid, signal.SIGCONT)
        controller.prefetch_io_aux_thread.join()
    assert runtime.wait_idle(30)
    assert torch.equal(rig.read(range(8)), other)
    eventually(lambda: rig.get(KEYS, range(8)), [True] * 8)
    assert torch.equal(rig.read(range(8)), held)


def test_store_ends_when_the_full_ring_stands_still(rigs: Rigs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longshore.engines.sglang.tiers.STAGING_BYTES", 1)
    rig = rigs(write_timeout=0.5, size="32MiB")
    os.kill(rig.host_pid, signal.SIGSTOP)
    try:
        rig.fill(range(60), seed=1)
        assert len(rig.set(names(60), range(60))) == 60
        assert rig.storage._kv.stack.staging_mover._staging.free < 8  # type: ignore[union-attr]
    finally:
        os.kill(rig.host_pid, signal.SIGCONT)
    assert rig.storage._kv.stack.runtime.wait_idle(30)
    assert rig.exists(names(60)) < 60


@pytest.mark.parametrize("late", ["a store", "a read"])
def test_calls_after_one_timed_out_do_not_wait(rigs: Rigs, monkeypatch: pytest.MonkeyPatch, late: str) -> None:
    """Until something has moved: a disk that hangs may do so for hours."""
    monkeypatch.setattr("longshore.engines.sglang.tiers.STAGING_BYTES", 1)
    held = rigs(size="32MiB").store(KEYS, range(8))
    rig = again(rigs, write_timeout=2, load_timeout=2, size="32MiB")
    os.kill(rig.host_pid, signal.SIGSTOP)
    try:
        if late == "a store":
            rig.set(names(60, seed=1), range(60))
        else:
            assert rig.set(names(8, seed=1), range(8)) == [True] * 8  # all of the staging area
            assert rig.get(KEYS, range(8)) == [False] * 8
        assert not rig.storage._kv.stack.staging_mover._staging.free  # type: ignore[union-attr]
        rig.storage._kv.no_wait_until *= 1000  # whatever the time
        jobs = dict(rig.storage._kv.stack.staging_mover._jobs)  # type: ignore[union-attr]
        for seed in (2, 3):
            assert rig.set(names(60, seed), range(60)) == [False] * 60
            assert rig.exists(KEYS) == 0
            assert rig.get(KEYS, range(8)) == [False] * 8
        assert rig.storage._kv.stack.staging_mover._jobs == jobs  # type: ignore[union-attr]
    finally:
        os.kill(rig.host_pid, signal.SIGCONT)
    assert rig.storage._kv.stack.runtime.wait_idle(30)
    rig.fill(range(8), seed=4)
    eventually(lambda: rig.set(names(8, seed=4), range(8)) and rig.exists(names(8, seed=4)), 8)
    eventually(lambda: rig.get(KEYS, range(8)), [True] * 8)
    assert torch.equal(rig.read(range(8)), held)


def test_metrics_that_cannot_be_made_leave_no_tier_open(rigs: Rigs, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise OSError("no room for metrics")

    with monkeypatch.context() as patch:
        patch.setattr("longshore.engines.sglang.storage.LongshoreCollector", broken)
        with pytest.raises(OSError, match="no room for metrics"):
            rigs(metrics=True)
    rigs(metrics=True).store(KEYS, range(8))  # over the same directory


def test_a_full_tier_takes_fewer_pages_or_evicts(rigs: Rigs) -> None:
    rig = rigs(size="512KiB")
    for seed in range(12):
        rig.fill(range(8), seed=seed)
        assert len(rig.set(names(8, seed), range(8))) == 8
    assert rig.storage.flush(30)
    found = [rig.exists(names(8, seed)) for seed in range(12)]
    assert 0 < sum(found) < 96
    for seed, count in enumerate(found):
        if count:
            held = rig.fill(range(8), seed=seed)
            rig.fill(range(8), seed=99)
            got = rig.get(names(8, seed), range(8))
            assert got == [True] * count + [False] * (8 - count)
            assert torch.equal(rig.read(range(count)), held[:count])


def test_ranks_with_the_same_keys_never_meet(rigs: Rigs) -> None:
    first, second = rigs(rank=0, ranks=2), rigs(rank=1, ranks=2)
    held = first.store(KEYS, range(8), seed=1), second.store(KEYS, range(8), seed=2)
    assert not torch.equal(*held)
    for rig, expected in zip((first, second), held, strict=True):
        rig.fill(range(8), seed=9)
        assert rig.get(KEYS, range(8)) == [True] * 8
        assert torch.equal(rig.read(range(8)), expected)


def swap_ranks(rigs: Rigs, tmp_path: Path) -> tuple[int, bool]:
    """How many pages rank 1 finds in the directory of rank 0, and whether they are those of rank 0."""
    first = rigs(rank=0, ranks=2)
    held = first.store(KEYS, range(8))
    first.close()
    (tmp_path / "tier" / "rank-0-of-2").rename(tmp_path / "tier" / "rank-1-of-2")
    second = rigs(rank=1, ranks=2)
    found = second.exists(KEYS)
    second.get(KEYS, range(8))
    return found, torch.equal(second.read(range(8)), held)


def test_the_rank_is_in_the_address(rigs: Rigs, tmp_path: Path) -> None:
    assert swap_ranks(rigs, tmp_path) == (0, False)


def test_without_a_rank_in_the_address_wrong_bytes_come_back(
    rigs: Rigs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test before: that test can fail."""
    monkeypatch.setattr(identity, "scope_of", identity.scope_of)  # so that it is put back
    leave_rank_out()
    assert swap_ranks(rigs, tmp_path) == (8, True)


def test_weights_that_change_begin_another_namespace_when_caches_are_flushed(rigs: Rigs) -> None:
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    rig = rigs()
    rig.store(KEYS, range(8))
    with pytest.raises(AttributeError):  # of SGLang's, which has no model here
        WeightUpdater.update_weights_from_disk(None, "model", "auto")
    for _ in range(2):
        assert rig.exists(KEYS) == 0
        assert rig.get(KEYS, range(8)) == [False] * 8
        assert rig.set(names(8, seed=1), range(8)) == [False] * 8
    with pytest.raises(AttributeError):  # not flushed
        HiCacheController.reset(None)
    assert rig.set(KEYS, range(8)) == [False] * 8
    rig.storage.caches_flushed()
    assert rig.exists(KEYS) == 0
    held = rig.store(KEYS, range(8), seed=7)
    assert rig.get(KEYS, range(20, 28)) == [True] * 8
    assert torch.equal(rig.read(range(20, 28)), held)
    rig.close()
    assert rigs().exists(KEYS) == 0  # nobody knows which weights a later server has


def test_clear_forgets_all(rigs: Rigs) -> None:
    rig = rigs()
    rig.store(KEYS, range(8))
    rig.storage.clear()
    assert rig.exists(KEYS) == 0
    rig.store(names(8, seed=1), range(8))
    rig.close()
    rig = rigs()
    assert (rig.exists(KEYS), rig.exists(names(8, seed=1))) == (0, 8)


def test_close_ends_calls_in_flight_and_later_ones_miss(rigs: Rigs) -> None:
    rig = rigs(load_timeout=60)
    rig.store(KEYS, range(8))
    os.kill(rig.host_pid, signal.SIGSTOP)
    said: list[list[bool]] = []
    thread = threading.Thread(target=lambda: said.append(rig.get(KEYS, range(8))))
    thread.start()
    while not rig.storage._kv.stack.staging_mover._filing:  # type: ignore[union-attr]
        time.sleep(0.01)
    closer = threading.Thread(target=rig.close)
    closer.start()
    while rig.storage._why_off != "closed":
        time.sleep(0.01)
    os.kill(rig.host_pid, signal.SIGCONT)
    for each in (closer, thread):
        each.join(120)
        assert not each.is_alive()
    assert said in ([[True] * 8], [[False] * 8])
    assert rig.exists(KEYS) == 0
    assert rig.get(KEYS, range(8)) == rig.set(KEYS, range(8)) == [False] * 8


def test_threads_of_sglang_store_and_read_at_once(rigs: Rigs) -> None:
    rig = rigs()
    held = {seed: rig.store(names(8, seed), range(8), seed=seed) for seed in range(4)}
    wrong: list[int] = []

    def read(first: int) -> None:
        for turn in range(20):
            seed = turn % 4
            if rig.get(names(8, seed), range(first, first + 8)) == [True] * 8:
                wrong.extend([seed] * (not torch.equal(rig.read(range(first, first + 8)), held[seed])))
            else:
                wrong.append(-1)

    def write() -> None:
        for seed in range(10, 20):
            rig.set(names(8, seed), range(8))

    threads = [threading.Thread(target=read, args=(first,)) for first in (16, 24, 32)]
    threads.append(threading.Thread(target=write))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    with rig.storage._kv.stack.runtime.batch() as cache:
        cache.check_integrity()
        assert cache.leases == cache.protected == 0


@pytest.mark.parametrize(
    ("told", "config", "named"),
    [
        ({"dp_size": 2}, {}, "dp_size=2"),
        ({"speculative_algorithm": "EAGLE"}, {}, "speculative_algorithm"),
        ({"enable_lora": True}, {}, "enable_lora needs the setting salt"),
        ({"uno_lora_path": "/adapter"}, {}, "uno_lora_path"),
        ({"load_format": "dummy"}, {}, "load_format"),
        ({"weight_cache_mode": "client"}, {}, "weight_cache_mode"),
        ({"disaggregation_mode": "prefill"}, {}, "disaggregation_mode"),
        ({"hicache_host_memory_mode": "buffer_only"}, {}, "hicache_host_memory_mode"),
        ({}, {"pp_size": 2}, "pp_size=2"),
        ({}, {"attn_cp_size": 2}, "attn_cp_size=2"),
        ({}, {"dcp_size": 2}, "dcp_size=2"),
        ({}, {"is_mla_model": True, "tp_size": 2}, "MLA"),
        ({}, {"should_split_heads": True}, "tp_lcm_size"),
        ({}, {"extra_config": {}}, "interface_v1"),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    rigs: Rigs, told: dict[str, Any], config: dict[str, Any], named: str
) -> None:
    rig = rigs()
    storage = SimpleNamespace(**vars(rig.storage._storage_config))
    identity.check_served(storage, identity.settings())
    vars(storage).update(config)
    with pytest.raises(EngineError, match=named):
        identity.check_served(storage, {**identity.settings(), **told})


def test_keys_that_are_none_make_no_pages_and_no_exception(rigs: Rigs, caplog: pytest.LogCaptureFixture) -> None:
    rig = rigs()
    held = rig.store(KEYS, range(8))
    for bad in (["no digits"], [None], [b"ab"]):
        assert rig.exists(bad) == 0  # type: ignore[arg-type]
        assert rig.get(bad, [1]) == rig.set(bad, [1]) == [False]  # type: ignore[arg-type]
        assert rig.set(KEYS[:1], [1], before=bad) == [False]  # type: ignore[arg-type]
    assert caplog.text.count("expected keys of pages in hexadecimal") >= 12
    assert rig.get(KEYS, range(8)) == [True] * 8
    assert torch.equal(rig.read(range(8)), held)


def test_other_pools_and_settings_are_refused(rigs: Rigs, model: Path, tmp_path: Path) -> None:
    rig = rigs()
    with pytest.raises(EngineError, match="mamba"):
        rig.storage.register_mem_host_pool_v2(rig.pool, PoolName.MAMBA)
    for setting in ("host_size", "blocks_per_chunk", "offload"):
        with pytest.raises(ConfigError, match=setting):
            Rig(model, tmp_path / "other", **{setting: "write_back" if setting == "offload" else 4})
    with pytest.raises(ConfigError, match="file_pth"):
        Rig(model, tmp_path / "other", file_pth="here")
    with pytest.raises(TierInUseError):
        rigs(under="a"), rigs(under="a")


def test_invalid_page_is_refused_before_anything_has_changed(rigs: Rigs, caplog: Any) -> None:
    rig = rigs()
    told = SimpleNamespace(prefix_keys=[])
    for bad in (indices([64]), indices([1])[:-1], indices([1]) + 1):
        assert rig.storage.batch_set_v1(KEYS[:1], bad, told) == [False]
    assert caplog.text.count("EngineError") >= 3
    assert rig.exists(KEYS) == 0
