"""The file tier's process and its disk fail under the manager: counted misses, and an engine that goes on."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.kv_offload.base import LookupResult, OffloadKey
from vllm_kit import Rig, file_settings, keys_of

from longshore.engines.vllm.metrics import zero
from longshore.engines.vllm.requests import cache_keys
from longshore.runtime.tier_host import HostedFileTier
from longshore.runtime.tier_host.supervisor import HostProcess
from longshore.tiers.file.directory import COPIES

HIT, MISS, PENDING = LookupResult.HIT, LookupResult.MISS, LookupResult.HIT_PENDING
TIMEOUT = 30.0
KEYS = keys_of(4)


class HostedRig(Rig):
    """A rig with a file tier, whose process can be harmed."""

    @property
    def file(self) -> HostedFileTier:
        (tier,) = self.manager._runtime._tiers
        assert isinstance(tier, HostedFileTier)
        return tier

    @property
    def process(self) -> HostProcess:
        process = self.file._supervisor.process
        assert process is not None
        return process

    def wait(self, what: Any) -> None:
        assert self.manager._runtime._wait(what, TIMEOUT)

    def settle(self) -> None:
        self.wait(lambda: not self.cache.jobs_in_flight)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """Kill the tier host; it stays away until `revive`."""
        deaths = self.file.failures["tier_host"]
        self.file._supervisor._pause = 1e9
        self.signal(signal.SIGKILL)
        self.wait(lambda: self.file.failures["tier_host"] > deaths)

    def revive(self) -> None:
        self.file._supervisor._restart_at = 0.0
        self.wait(lambda: self.file._is_open)

    def store_in_files(self, keys: list[OffloadKey] = KEYS) -> list[list[torch.Tensor]]:
        """Store `keys`, so that only the file tier has them; their bytes."""
        blocks = list(range(1, 1 + len(keys)))
        assert self.store(keys, blocks, self.request(f"writer of {keys[0]!r}", keys)) == keys
        assert self.manager._runtime.flush(TIMEOUT)
        with self.manager._runtime.batch() as cache:
            assert cache.discard(cache_keys(keys), "host") == len(keys)
        return [self.bytes_of(0, block) for block in blocks]

    def answers(self, name: str, keys: list[OffloadKey] = KEYS) -> list[LookupResult]:
        """What a new request is told in the end."""
        context = self.request(name, keys)
        self.lookup(keys, context)
        self.settle()
        said = self.lookup(keys, context)
        self.manager.on_request_finished(context)
        return said

    @property
    def failed(self) -> int:
        return int(self.cache.counters.routes["file->host"].failed)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[HostedRig]:
    made = HostedRig(**file_settings(tmp_path))
    yield made
    made.cache.check_integrity()
    made.close()


def test_a_tier_host_killed_while_it_reads_costs_these_reads(rig: HostedRig) -> None:
    before = rig.store_in_files()
    rig.signal(signal.SIGSTOP)
    reader = rig.request("reader", KEYS)
    assert rig.lookup(KEYS, reader) == [PENDING] * 4
    assert rig.cache.jobs_in_flight == 1
    rig.kill()
    rig.settle()
    assert rig.lookup(KEYS, reader) == [MISS] * 4
    assert rig.failed == 4
    assert rig.answers("while it is away") == [MISS] * 4
    assert rig.failed == 8
    rig.revive()
    late = rig.request("late", KEYS)
    assert rig.lookup(KEYS, late) == [PENDING] * 4
    rig.settle()
    assert rig.lookup(KEYS, late) == [HIT] * 4
    rig.load(KEYS, [11, 12, 13, 14], late)
    assert all(all(map(torch.equal, rig.bytes_of(0, 11 + at), before[at])) for at in range(4))
    for context in (reader, late):
        rig.manager.on_request_finished(context)
    assert rig.cache.leases == rig.cache.protected == 0


def test_hung_tier_host_delays_a_request_by_load_timeout(tmp_path: Path) -> None:
    rig = HostedRig(load_timeout=0.2, **file_settings(tmp_path))
    rig.store_in_files()
    rig.signal(signal.SIGSTOP)
    reader = rig.request("reader", KEYS)
    assert rig.lookup(KEYS, reader) == [PENDING] * 4
    rig.wait(lambda: rig.lookup(KEYS, reader) == [MISS] * 4)
    assert rig.cache.jobs_in_flight == 1  # it may write yet
    rig.manager.on_request_finished(reader)
    rig.signal(signal.SIGCONT)
    rig.settle()
    assert rig.cache.leases == rig.cache.protected == 0
    rig.close()


def no_directory(path: Path) -> None:
    path.write_text("")


def below_a_file(path: Path) -> None:
    path.parent.joinpath("file").write_text("")
    path.symlink_to("file/tier")


def a_directory_of_others(path: Path) -> None:
    path.mkdir(mode=0o777)
    path.chmod(0o777)


def superblocks_with_a_flipped_bit(path: Path) -> None:
    for copy in COPIES:
        superblock = bytearray((path / copy).read_bytes())
        superblock[9] ^= 4
        (path / copy).write_bytes(superblock)


@pytest.mark.parametrize("harm", [no_directory, below_a_file, a_directory_of_others, superblocks_with_a_flipped_bit])
def test_engine_starts_with_host_memory_where_file_tier_cannot_open(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, harm: Any
) -> None:
    settings, path = file_settings(tmp_path), tmp_path / "tier"
    if harm is superblocks_with_a_flipped_bit:
        Rig(**settings).close()
    harm(path)
    with caplog.at_level(logging.ERROR, "longshore"):
        rig = Rig(**settings)
    (said,) = [each.getMessage() for each in caplog.records if each.getMessage().startswith("file tier disabled")]
    assert str(path) in said
    assert f"rm -r {path}" in said
    told = rig.manager.get_stats().data["data"]
    assert told["longshore_file_failures"]["off",] == 1
    assert rig.store(KEYS, [1, 2, 3, 4], rig.request("writer", KEYS)) == KEYS
    assert rig.lookup(KEYS, rig.request("reader", KEYS)) == [HIT] * 4
    rig.close()


def test_reset_keeps_slots_of_file_reads_until_they_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig, new = HostedRig(host_size=4 * 4096, **file_settings(tmp_path)), keys_of(4, name="new")
    rig.store_in_files()
    rig.signal(signal.SIGSTOP)
    rig.lookup(KEYS, rig.request("reader", KEYS))
    with monkeypatch.context() as patch:
        patch.setattr(HostProcess, "reaped", False)
        patch.setattr(HostedFileTier, "is_stalled", True)  # its process is not waited for, but ended
        process = rig.process
        rig.manager.reset_cache()
        rig.wait(lambda: process.is_eof)
        assert rig.store(new, [5, 6, 7, 8], rig.request("early", new)) == []
    rig.settle()
    assert rig.store(new, [5, 6, 7, 8], rig.request("in time", new)) == new
    assert rig.answers("of the old ones") == [MISS] * 4
    rig.close()


@pytest.mark.parametrize("fixed", [False, True])
def test_blocks_after_a_reset_are_private_without_fixed_weights(tmp_path: Path, fixed: bool) -> None:
    settings = {**file_settings(tmp_path), "fixed_weights": fixed}
    old, new = keys_of(2, name="old"), keys_of(2, name="new")
    rig = HostedRig(**settings)
    rig.store_in_files(old)
    rig.manager.reset_cache()
    assert rig.answers("after it", old) == [MISS] * 2
    rig.store_in_files(new)
    assert rig.answers("of the same engine", new) == [HIT] * 2
    rig.close()
    rig = HostedRig(**settings)
    assert rig.answers("of the next engine", old) == [MISS] * 2
    assert rig.answers("of the next engine", new) == ([HIT] * 2 if fixed else [MISS] * 2)
    rig.close()


def test_what_went_wrong_is_told_to_vllm(rig: HostedRig) -> None:
    totals = zero()
    rig.store_in_files()
    rig.kill()
    assert rig.answers("reader") == [MISS] * 4
    totals.aggregate(rig.manager.get_stats())
    told = totals.data["data"]
    assert told["longshore_file_failures"]["tier_host",] == 1
    assert told["longshore_failed_chunks"]["file->host",] == 4
    assert told["longshore_miss_chunks"]["unavailable",] == 1
    assert told["longshore_miss_chunks"]["after_miss",] == 3
