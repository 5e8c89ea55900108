"""vLLM sleeps: device memory goes, tiers stay, and host memory is given back where it is not kept."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import Serve, asked, prompts, tiers
from test_vllm_remote_stores import free_port
from test_vllm_weight_changes import CONNECTOR
from tiny_models import save
from vllm.v1.kv_offload.base import LookupResult
from vllm_kit import Rig, file_settings, keys_of

from longshore.boundary import HOST
from longshore.cache import MissReason
from longshore.engines.vllm import tiers as tiers_module
from longshore.errors import ConfigError, RegistrationError
from longshore.runtime import stack
from longshore.tiers.remote.format import address
from residents import residents_of

HIT, MISS, PENDING = LookupResult.HIT, LookupResult.MISS, LookupResult.HIT_PENDING
KEYS, BLOCKS = keys_of(3), [1, 2, 3]
Rigs = Callable[..., "DeviceMemoryUser"]


class DeviceMemoryUser(Rig):
    """A rig that is put to sleep as vLLM's engine is: caches are reset, then the workers' memory goes."""

    def reset_for_sleep(self, level: int = 1) -> None:
        """What `EngineCore.sleep` does first."""
        token = tiers_module._sleep_level.set(level)
        try:
            self.manager.reset_cache()
            self.manager.device_was_reset()
        finally:
            tiers_module._sleep_level.reset(token)

    def sleep(self, level: int = 1) -> None:
        self.reset_for_sleep(level)
        for rank, each in enumerate(self.workers):
            each.before_device_release()
            if level > 1:
                each.reports.weights_changed(rank)
            for tensor in self.tensors[rank]:
                tensor.zero_()

    def wake(self) -> None:
        for each in self.workers:
            each.after_device_restore()

    def write(self, keys: Any = KEYS, blocks: Any = BLOCKS) -> list[list[list[torch.Tensor]]]:
        """Store `keys`; the bytes of each rank."""
        writer = self.request(f"writer {len(self.manager._requests)}", keys)
        assert self.store(keys, blocks, writer) == list(keys)
        self.manager.on_request_finished(writer)
        return [[self.bytes_of(rank, block) for block in blocks] for rank in range(len(self.workers))]

    def answers(self, name: str, keys: Any = KEYS) -> list[LookupResult]:
        """What a new request is told in the end."""
        context = self.request(name, keys)
        said = self.lookup(keys, context)
        while PENDING in said:
            self.manager._runtime.pump()
            said = self.lookup(keys, context)
        self.manager.on_request_finished(context)
        return said

    def read(self, name: str, keys: Any = KEYS) -> list[list[list[torch.Tensor]]]:
        """Load `keys` into other blocks; the bytes of each rank."""
        context, into = self.request(name, keys), list(range(8, 8 + len(keys)))
        while (said := self.lookup(keys, context)) != [HIT] * len(keys):
            assert MISS not in said
        self.load(keys, into, context)
        self.manager.on_request_finished(context)
        return [[self.bytes_of(rank, block) for block in into] for rank in range(len(self.workers))]

    @property
    def resident(self) -> int:
        """Bytes of host memory that the system has allocated."""
        return 512 * os.fstat(self.workers[0].arena.fd).st_blocks

    def kill_tier_host(self) -> None:
        (file,) = self.manager._runtime._tiers
        file._supervisor._pause = 1e9
        os.kill(file._supervisor.process.pid, signal.SIGKILL)
        assert self.manager._runtime._wait(lambda: file._supervisor.deaths, 30.0)


@pytest.fixture
def rigs() -> Iterator[Rigs]:
    made: list[DeviceMemoryUser] = []

    def make(**settings: Any) -> DeviceMemoryUser:
        made.append(DeviceMemoryUser(**settings))
        return made[-1]

    yield make
    for rig in made:
        assert rig.manager._runtime.fault is None
        rig.close()


def same(one: Any, other: Any) -> bool:
    flat = ([page for rank in ranks for block in rank for page in block] for ranks in (one, other))
    return all(map(torch.equal, *flat))


# ---------------------------------------------------------------------- tiers stay


@pytest.mark.parametrize("world", [1, 2])
def test_tiers_outlive_a_sleep_that_keeps_weights(rigs: Rigs, world: int) -> None:
    rig = rigs(world=world)
    before = rig.write()
    rig.sleep()
    rig.wake()
    assert same(rig.read("reader"), before)
    assert rig.resident >= rig.workers[0].arena.nbytes


def test_a_sleep_that_drops_weights_leaves_nothing(rigs: Rigs, tmp_path: Path) -> None:
    rig = rigs(**file_settings(tmp_path))
    rig.write()
    rig.sleep(2)
    rig.wake()
    assert rig.answers("reader") == [MISS] * 3
    assert rig.cache.generation == 2  # of the reset, and of the change that the workers tell


def test_a_reset_by_an_operator_leaves_nothing(rigs: Rigs, tmp_path: Path) -> None:
    rig = rigs(**file_settings(tmp_path))
    rig.write()
    rig.manager.reset_cache()
    assert rig.answers("reader") == [MISS] * 3


def test_operator_reset_keeps_files_with_fixed_weights(rigs: Rigs, tmp_path: Path) -> None:
    rig = rigs(fixed_weights=True, reset_keep="file", **file_settings(tmp_path))
    before = rig.write()
    rig.manager.reset_cache()
    assert [stats.used for stats in rig.cache.stats()] == [0, 3], "what was in host memory alone is in files before"
    assert same(rig.read("reader"), before)


def test_what_a_reset_keeps_needs_weights_that_do_not_change(rigs: Rigs) -> None:
    with pytest.raises(ConfigError, match="fixed_weights is not set"):
        rigs(reset_keep="all")


def test_weights_that_changed_after_all_empty_what_a_sleep_kept(rigs: Rigs) -> None:
    rig = rigs()
    rig.write()
    rig.sleep()
    rig.workers[0]._weight_watch.on_change()
    rig.wake()
    assert rig.answers("reader") == [MISS] * 3


# ---------------------------------------------------------------------- work in flight


def test_store_begun_after_a_sleep_is_not_published(rigs: Rigs) -> None:
    rig = rigs(host_size=3 * 4096)
    context = rig.request("writer", KEYS)
    rig.tell(KEYS, context)
    output = rig.manager.prepare_store(KEYS, context)
    rig.sleep()
    assert rig.manager.has_pending_work()
    rig.wake()
    rig.copy_in(output.store_spec, BLOCKS)  # vLLM's worker had put it off to the next step: its blocks are gone
    rig.end_step()
    assert not rig.manager.has_pending_work()
    assert rig.answers("reader") == [MISS] * 3
    rig.manager.on_request_finished(context)
    rig.write()
    rig.cache.check_integrity()


def test_stores_and_loads_end_before_device_memory_goes(rigs: Rigs) -> None:
    rig = rigs(page=1 << 20, blocks=64, host_size="160MiB")  # copies take tens of milliseconds
    before = rig.write()
    reader, writer = rig.request("reader", KEYS), rig.request("writer", more := keys_of(48, name="more"))
    rig.tell(more, writer)
    rig.lookup(KEYS, reader)
    load, store = rig.manager.prepare_load(KEYS, reader), rig.manager.prepare_store(more, writer).store_spec
    each = rig.workers[0]
    each.submit_load(91, load, rig._theirs(load, [8, 9, 10]))
    each.submit_store(92, rig._theirs(store, range(12, 60)), store)
    rig.reset_for_sleep()
    each.before_device_release()
    assert not each.engine._state.jobs and not each._parts
    assert all(map(torch.equal, rig.bytes_of(0, 8), before[0][0]))
    assert {done.job_id for done in each.get_finished()} == {91, 92}
    rig.wake()
    rig.end_step()
    assert not rig.manager.has_pending_work()
    assert rig.answers("of the kept ones") == [HIT] * 3
    assert rig.answers("of those in flight", more) == [MISS] * 48
    rig.cache.check_integrity()


def test_nothing_is_copied_while_device_memory_is_gone(rigs: Rigs) -> None:
    rig = rigs()
    rig.write()
    rig.workers[0].reports_failures = True
    reader = rig.request("reader", KEYS)
    rig.lookup(KEYS, reader)
    spec = rig.manager.prepare_load(KEYS, reader)
    rig.sleep()
    rig.run("submit_load", spec, rig._theirs(spec, [8, 9, 10]))
    assert rig.workers[0].take_failed({1}) == {1}
    assert not rig.bytes_of(0, 8)[0].any()
    rig.wake()
    rig.end_step()
    assert same(rig.read("another"), rig.read("a third"))


def test_a_load_of_before_the_sleep_writes_nothing_after_it(rigs: Rigs) -> None:
    """vLLM may have given its blocks to others by then."""
    rig = rigs()
    rig.write()
    rig.workers[0].reports_failures = True
    reader = rig.request("reader", KEYS)
    rig.lookup(KEYS, reader)
    spec = rig.manager.prepare_load(KEYS, reader)
    rig.sleep()
    rig.wake()
    rig.run("submit_load", spec, rig._theirs(spec, [8, 9, 10]))
    assert rig.workers[0].take_failed({1}) == {1}
    assert not rig.bytes_of(0, 8)[0].any()


def test_sleep_drops_a_peer_that_does_not_read(rigs: Rigs, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What it was to be sent is in host memory, which is freed."""
    port = free_port()
    times = {"write_timeout": 4.0, "load_timeout": 2.0}
    rig = rigs(serve=f"valkey://127.0.0.1:{port}", sleep_keep="file", **times, **file_settings(tmp_path))
    rig.write()
    assert rig.manager.flush(30.0)
    server = rig.manager.peer_server
    with rig.manager._runtime.locked() as cache:
        key = next(each.key for each in residents_of(cache) if each.slot.tier == HOST)
    name = address(rig.manager._tiers.peers.namespace, key)
    wants = b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(name), name)
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.setblocking(False)
        give_up = time.monotonic() + 30.0
        while rig.cache.jobs_in_flight == 0 or is_writable(client):  # until all buffers are full
            with contextlib.suppress(BlockingIOError):
                client.send(wants * 64)
            assert time.monotonic() < give_up
        rig.sleep()
    assert rig.resident < rig.workers[0].arena.nbytes
    assert rig.manager._tiers.reports.frees_host_memory
    assert server.dropped == {"sleep": 1}
    assert not [each for each in caplog.messages if "not all blocks were written" in each or "not freed" in each]
    rig.wake()
    assert rig.answers("late") == [HIT] * 3


def is_writable(sock: socket.socket) -> bool:
    return bool(select.select([], [sock], [], 0.3)[1])


def test_a_request_that_comes_during_the_sleep_misses(rigs: Rigs) -> None:
    rig = rigs()
    rig.write()
    rig.sleep()
    assert rig.answers("early") == [MISS] * 3
    assert rig.cache.counters.misses[MissReason.ABSENT] == 3
    rig.wake()
    assert rig.answers("late") == [HIT] * 3


def test_an_abort_during_the_sleep_leaves_nothing_behind(rigs: Rigs) -> None:
    rig = rigs()
    rig.write()
    reader = rig.request("reader", KEYS)
    rig.lookup(KEYS, reader)
    rig.manager.prepare_load(KEYS, reader)
    rig.sleep()
    rig.manager.on_request_finished(reader)
    rig.wake()
    assert not rig.manager._requests
    assert rig.answers("another") == [HIT] * 3


def test_sleeping_twice_and_waking_without_a_sleep(rigs: Rigs, tmp_path: Path) -> None:
    rig = rigs(sleep_keep="file", **file_settings(tmp_path))
    rig.wake()
    before = rig.write()
    rig.sleep()
    rig.sleep()
    assert rig.resident == 0
    rig.wake()
    rig.wake()
    assert same(rig.read("reader"), before)
    rig.cache.check_integrity()


# ---------------------------------------------------------------------- host memory


@pytest.mark.parametrize("world", [1, 2])
def test_freed_host_memory_blocks_are_read_from_files(rigs: Rigs, tmp_path: Path, world: int) -> None:
    rig = rigs(world=world, sleep_keep="file", **file_settings(tmp_path))
    before = rig.write()
    rig.sleep()
    assert rig.resident == 0
    assert rig.cache.stats()[0].slots == 0
    rig.wake()
    assert same(rig.read("reader"), before)
    assert rig.resident >= rig.workers[0].arena.nbytes
    assert rig.cache.counters.routes["file->host"].chunks == 3
    rig.write(keys_of(3, name="more"), [4, 5, 6])


@pytest.mark.parametrize("level", [1, 2])
def test_files_are_cleared_with_host_memory_where_nothing_is_kept(rigs: Rigs, tmp_path: Path, level: int) -> None:
    rig = rigs(sleep_keep="none", **file_settings(tmp_path))
    rig.write()
    rig.sleep(level)
    assert rig.resident == 0
    assert rig.cache.generation == 1
    rig.wake()
    assert rig.answers("reader") == [MISS] * 3
    rig.write()
    assert rig.answers("another") == [HIT] * 3


def test_files_can_be_cleared_during_the_sleep(rigs: Rigs, tmp_path: Path) -> None:
    rig = rigs(sleep_keep="file", **file_settings(tmp_path))
    rig.write()
    rig.sleep()
    rig.manager.reset_cache()
    rig.wake()
    assert rig.answers("reader") == [MISS] * 3


def test_without_memory_at_the_wake_up_the_engine_goes_on(
    rigs: Rigs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = rigs(world=2, sleep_keep="file", **file_settings(tmp_path))
    before = rig.write()
    rig.sleep()
    with monkeypatch.context() as patch:
        patch.setattr(stack, "available_memory", lambda: 4096)
        rig.wake()
    assert caplog.text.count("host tier disabled") == 2
    assert rig.answers("reader") == [MISS] * 3
    context = rig.request("writer", keys := keys_of(1, name="new"))
    assert rig.store(keys, [4], context) == []
    assert rig.resident == 0
    rig.sleep()
    rig.wake()
    assert same(rig.read("later"), before)


def test_memory_that_cannot_be_freed_returns_after_sleep(
    rigs: Rigs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = rigs(sleep_keep="file", **file_settings(tmp_path))
    before = rig.write()

    def fail() -> None:
        raise RegistrationError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(rig.workers[0].arena, "give_back", fail)
        rig.sleep()
    rig.wake()
    assert same(rig.read("reader"), before)


def test_host_memory_stays_while_a_worker_may_write_there(rigs: Rigs, tmp_path: Path) -> None:
    rig = rigs(sleep_keep="file", **file_settings(tmp_path))
    before = rig.write()
    context = rig.request("writer", more := keys_of(2, name="more"))
    rig.tell(more, context)
    output = rig.manager.prepare_store(more, context)
    rig.sleep()
    assert rig.resident >= rig.workers[0].arena.nbytes
    rig.wake()
    rig.copy_in(output.store_spec, [4, 5])
    rig.end_step()
    assert same(rig.read("reader"), before)
    rig.cache.check_integrity()


def test_sleep_with_dead_tier_host_loses_only_host_memory_blocks(rigs: Rigs, tmp_path: Path) -> None:
    rig = rigs(sleep_keep="file", **file_settings(tmp_path))
    before = rig.write()
    assert rig.manager.flush(30.0)
    rig.kill_tier_host()
    rig.write(more := keys_of(2, name="more"), [4, 5])
    rig.sleep()
    assert rig.resident == 0
    rig.wake()
    (file,) = rig.manager._runtime._tiers
    file._supervisor._restart_at = 0.0
    assert rig.manager._runtime._wait(lambda: file._is_open, 30.0)
    assert rig.answers("of the lost ones", more) == [MISS] * 2
    assert same(rig.read("reader"), before)


def test_unkept_memory_is_lost_without_a_file_tier(rigs: Rigs) -> None:
    rig = rigs(sleep_keep="none")
    rig.write()
    rig.sleep()
    assert rig.resident == 0
    rig.wake()
    assert rig.answers("reader") == [MISS] * 3


# ---------------------------------------------------------------------- real engines


SLEEP = [["sleep", 1], ["lose_device"], ["wake"]]


def test_blocks_survive_sleep_in_a_running_engine(serve: Serve, tmp_path: Path) -> None:
    """The CPU backend frees no memory when it sleeps: the test overwrites the blocks, as a GPU loses them."""
    ask = asked(prompts())
    fresh = serve("llama", ask, None, 600).answers
    for name, settings, connector in (
        ("all", {}, CONNECTOR),
        ("plain", {}, {}),
        ("file", {"sleep_keep": "file"}, CONNECTOR),
        ("none", {"sleep_keep": "none"}, CONNECTOR),
    ):
        served = serve("llama", [*ask, *SLEEP, *ask], {**tiers(tmp_path / name), **settings}, 160, connector=connector)
        assert [each["tokens"] for each in served.answers[:3]] == [each["tokens"] for each in fresh]
        assert [each["tokens"] for each in served.answers[3:]] == [each["tokens"] for each in fresh]
        assert (served.answers[3]["cached"] > 0) == (name != "none")
        assert (served.counters["arrived"].get("file->host", 0) > 0) == (name == "file")
        assert served.counters["faults"] == 0


def test_weights_written_during_sleep_clear_tiers_in_a_running_engine(serve: Serve, tmp_path: Path) -> None:
    ask, model = asked(prompts()), save("llama", tmp_path)
    change: list[list[Any]] = [["sleep", 1], ["lose_device"], ["scale_weights", 0.5], ["wake"]]
    again: list[list[Any]] = [["sleep", 2], ["lose_device"], ["wake"], ["reload_weights"]]
    served = serve(
        "llama", [*ask, *change, *ask, *again, *ask], tiers(tmp_path / "tier"), 160, connector=CONNECTOR, saved=model
    ).answers
    fresh = serve("llama", [*ask, ["scale_weights", 0.5], ["reset"], *ask], None, 600, saved=model).answers
    assert [each["tokens"] for each in served[3:6]] == [each["tokens"] for each in fresh[3:]]
    assert [each["tokens"] for each in served[6:]] == [each["tokens"] for each in fresh[:3]]
    assert served[3]["cached"] == served[6]["cached"] == 0
