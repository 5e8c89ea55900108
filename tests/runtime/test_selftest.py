"""The self-test: passes on sound tiers at every start, fails on unsound ones, and leaves no trace."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from longshore.boundary import FILE, HOST, Section, Slot
from longshore.cache import GroupKeys
from longshore.config import Config
from longshore.errors import PlanError, SelfTestError
from longshore.keys import Scope
from longshore.layout import from_rows
from longshore.runtime.selftest import copy_test, self_test
from longshore.runtime.stack import Stack, open_stack
from longshore.tiers.base import TierResult
from longshore.tiers.file.fsck import Fsck
from longshore.transfer.device import device_for
from residents import residents_of


class Rows:
    """Device blocks as rows of a tensor; `flip` harms one byte of what is read after the first `sound` reads."""

    def __init__(self, sound: int = 1 << 30) -> None:
        self.rows = torch.full((8, 600), 0xAA, dtype=torch.uint8)
        self.sound = sound

    def read(self, blocks: Sequence[int]) -> npt.NDArray[np.uint8]:
        data: npt.NDArray[np.uint8] = self.rows[list(blocks)].numpy().copy()
        self.sound -= 1
        if self.sound < 0:
            data[0, 17] ^= 1
        return data

    def write(self, blocks: Sequence[int], data: npt.NDArray[np.uint8]) -> None:
        self.rows[list(blocks)] = torch.from_numpy(np.ascontiguousarray(data))


@contextmanager
def stack_over(rows: Rows, directory: Path, backup: str, salt: str = "") -> Iterator[Stack]:
    layout = from_rows(rows.rows, pages_per_block=6, block_size=10, blocks_per_chunk=1)
    scope = Scope(model="m", weights="w", dtype="d", layout=layout.fingerprint, block_size=10, salt=salt)
    config = Config.make(host_size="64KiB", file_path=directory, file_size="256KiB", background=False, backup=backup)
    with open_stack(config, layout, scope, device_for(layout)) as stack:
        yield stack


@pytest.mark.parametrize("backup", ["write_back", "write_through"])
def test_it_passes_at_every_start_over_the_same_directory(tmp_path: Path, backup: str) -> None:
    for _ in range(3):
        rows = Rows()
        with stack_over(rows, tmp_path / "kv", backup) as stack:
            self_test(stack, rows, [5])
            with stack.runtime.locked() as cache:
                assert residents_of(cache) == []
                assert (cache.leases, cache.protected, cache.jobs_in_flight) == (0, 0, 0)
                assert cache.counters.hits == {HOST: 0, FILE: 0}
                assert not any(total.bytes or total.chunks for total in cache.counters.routes.values())
        assert (rows.rows == 0xAA).all()


def test_a_slow_backup_of_the_test_block_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows()
    with stack_over(rows, tmp_path / "kv", "write_through") as stack:
        assert stack.file is not None
        poll, begun = stack.file.poll, list[float]()

        def slow_poll() -> Sequence[TierResult]:
            begun.append(time.monotonic())
            return poll() if time.monotonic() > begun[0] + 0.5 else []

        monkeypatch.setattr(stack.file, "poll", slow_poll)
        self_test(stack, rows, [5], files=False)
        assert begun
        with stack.runtime.locked() as cache:
            assert residents_of(cache) == []


@pytest.mark.parametrize(("sound", "tier"), [(1, HOST), (2, FILE)])
def test_a_byte_that_comes_back_wrong_fails_it(tmp_path: Path, sound: int, tier: str) -> None:
    rows = Rows(sound)
    with stack_over(rows, tmp_path / "kv", "write_back") as stack:
        with pytest.raises(
            SelfTestError, match=f"1 of 600 bytes of the test block were wrong when read back from the {tier} tier"
        ):
            self_test(stack, rows, [5])
        assert stack.runtime.flush(10.0)
    assert (rows.rows == 0xAA).all()


def records(directory: Path) -> dict[int, tuple[bytes, bytes]]:
    """Scope and key of each slot that the index lists."""
    with Fsck(directory) as fsck:
        entries = fsck.entries()
        assert entries is not None
        return {
            slot: (scope, key)
            for slot, scope, key in zip(*(entries[name].tolist() for name in ("slot", "scope", "key")), strict=True)
        }


def write_as(directory: Path, salt: str, count: int) -> None:
    """Another start, with a self-test, of an engine with this salt, that stores so many chunks."""
    rows = Rows()
    with stack_over(rows, directory, "write_through", salt) as stack:
        self_test(stack, rows, [5])
        for number in range(count):
            key = hashlib.sha256(f"{salt} {number}".encode()).digest()
            stack.transfer_engine.begin_step(None)
            with stack.runtime.batch() as cache:
                job = cache.store({0: GroupKeys([key])}, {0: [number % 8]}, before_eviction=True)[0].job
            assert stack.runtime.wait_jobs([] if job is None else [job], 30.0)
            assert stack.runtime.flush(30.0)


def test_start_under_another_scope_spares_records_beside_empty_slots(tmp_path: Path) -> None:
    write_as(tmp_path / "kv", "a", 5)
    before = records(tmp_path / "kv")
    assert len(before) == 5
    write_as(tmp_path / "kv", "b", 5)
    after = records(tmp_path / "kv")
    assert before.items() <= after.items()
    assert len(after) == 10
    with stack_over(Rows(), tmp_path / "kv", "write_back", "a") as stack, stack.runtime.locked() as cache:
        assert len(residents_of(cache)) == 5


def test_without_empty_slots_the_records_of_others_go_oldest_first(tmp_path: Path) -> None:
    write_as(tmp_path / "kv", "a", 5)
    with Fsck(tmp_path / "kv") as fsck:
        slots = fsck.slabs.slabs
    oldest_first = list(records(tmp_path / "kv"))
    write_as(tmp_path / "kv", "b", slots - 3)  # two more than are empty
    left = records(tmp_path / "kv")
    assert [slot for slot in oldest_first if left[slot] not in records_of(left, "b")] == oldest_first[2:]


def records_of(found: dict[int, tuple[bytes, bytes]], salt: str) -> list[tuple[bytes, bytes]]:
    keys = {hashlib.sha256(f"{salt} {number}".encode()).digest() for number in range(100)}
    return [record for record in found.values() if record[1] in keys]


@pytest.mark.parametrize("salts", ["aa", "ab"])
def test_it_costs_no_record_where_every_slot_holds_one(tmp_path: Path, salts: str) -> None:
    first, second = salts
    write_as(tmp_path / "kv", first, 1)
    with Fsck(tmp_path / "kv") as fsck:
        slots = fsck.slabs.slabs
    write_as(tmp_path / "kv", first, slots)
    before = records(tmp_path / "kv")
    assert len(before) == slots
    write_as(tmp_path / "kv", second, 0)
    assert records(tmp_path / "kv") == before
    rows = Rows(sound=1)
    with stack_over(rows, tmp_path / "kv", "write_back", second) as stack, pytest.raises(SelfTestError, match="host"):
        self_test(stack, rows, [5])


def test_copies_alone_are_tested_into_a_slot_and_back(tmp_path: Path) -> None:
    rows = Rows()
    with stack_over(rows, tmp_path / "kv", "write_back") as stack:
        copy_test(stack.transfer_engine, rows, Section(0, 0, (5,)), Slot(HOST, 0, 2))
    assert (rows.rows == 0xAA).all()


def test_wrong_copy_is_reported_and_blocks_are_restored(tmp_path: Path) -> None:
    rows = Rows(sound=1)
    with stack_over(rows, tmp_path / "kv", "write_back") as stack:
        with pytest.raises(
            SelfTestError, match="1 of 600 bytes of the test block were wrong when read back from host memory"
        ):
            copy_test(stack.transfer_engine, rows, Section(0, 0, (5,)), Slot(HOST, 0, 2))
        with pytest.raises(PlanError):
            copy_test(stack.transfer_engine, Rows(), Section(0, 0, (5,)), Slot(HOST, 0, 10_000))
    assert (rows.rows == 0xAA).all()
