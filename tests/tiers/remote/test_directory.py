"""A shared directory: the conformance suite, and what only it has."""

import errno
import math
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longshore.boundary import Status
from longshore.errors import TierError
from longshore.testing import TierHarness, TierTests
from longshore.testing.tier_harness import key, span
from longshore.tiers.arena import Arena
from longshore.tiers.base import Op, Tier
from longshore.tiers.remote import RemoteTier
from longshore.tiers.remote.directory import DirectorySession

NAMESPACE = bytes(range(32))
IMAGE = TierTests.image_bytes


def url(directory: Path, options: str = "") -> str:
    directory.mkdir(exist_ok=True)
    return f"file://{directory}?fetch_timeout=20s&write_timeout=20s{options}"


class TestDirectory(TierTests):
    by_key = True
    persistent = True

    def open_tier(self, arena: Arena, directory: Path) -> Tier:
        return RemoteTier(url(directory), arena=arena, image_bytes=self.image_bytes, namespace=NAMESPACE)


def open_harness(directory: Path, options: str = "") -> TierHarness:
    arena = Arena(4 * span(IMAGE))
    return TierHarness(
        lambda: RemoteTier(url(directory, options), arena=arena, image_bytes=IMAGE, namespace=NAMESPACE),
        arena,
        by_key=True,
    )


def file_of(directory: Path, number: int) -> Path:
    return directory / "ls1" / NAMESPACE.hex() / key(number).hex()[:2] / key(number).hex()


def test_another_replica_reads_what_one_has_written(tmp_path: Path) -> None:
    one, other = open_harness(tmp_path), open_harness(tmp_path)
    one.store(0, 5)
    other.assert_serves(0, 5)
    for each in (one, other):
        each.tier.close()


def test_what_is_there_is_not_written_again(tmp_path: Path) -> None:
    harness = open_harness(tmp_path)
    harness.store(0, 5)
    file = file_of(tmp_path, 5)
    before = file.stat().st_ino
    harness.store(0, 5)
    assert file.stat().st_ino == before
    harness.tier.close()


@pytest.mark.parametrize("at", [0, 20, 30, 60, 100, 127, 128, 128 + IMAGE - 1])
def test_flipped_bit_is_a_miss_the_next_write_heals(tmp_path: Path, at: int) -> None:
    harness = open_harness(tmp_path)
    harness.store(0, 5)
    file = file_of(tmp_path, 5)
    value = bytearray(file.read_bytes())
    value[at] ^= 1
    file.write_bytes(value)
    assert harness.load(0, 5)[0] is Status.CORRUPT
    assert wait_answer(harness, 5) == (False,)
    harness.store(0, 5)
    harness.assert_serves(0, 5)
    assert wait_answer(harness, 5) == (True,)
    harness.tier.close()


def test_a_torn_file_and_one_of_another_key_are_misses(tmp_path: Path) -> None:
    harness = open_harness(tmp_path)
    harness.store(0, 5)
    harness.store(0, 6)
    os.truncate(file_of(tmp_path, 5), 128 + IMAGE - 1)
    assert harness.load(0, 5)[0] is Status.SHORT
    file_of(tmp_path, 5).write_bytes(file_of(tmp_path, 6).read_bytes())
    assert harness.load(0, 5)[0] is Status.MISMATCH
    harness.tier.close()


def test_what_has_expired_is_not_there(tmp_path: Path) -> None:
    harness = open_harness(tmp_path, "&ttl=1h")
    harness.store(0, 5)
    harness.assert_serves(0, 5)
    os.utime(file_of(tmp_path, 5), (0, 0))
    assert wait_answer(harness, 5) == (False,)
    assert harness.load(0, 5)[0] is Status.NOT_FOUND
    harness.store(0, 5)
    harness.assert_serves(0, 5)
    harness.tier.close()


@pytest.mark.parametrize("ahead", [-7200.0, 7200.0])
def test_values_expire_by_the_clock_of_the_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: float
) -> None:
    now, one = time.time, open_harness(tmp_path, "&ttl=1h")
    for number in (5, 6):
        one.store(0, number)
    os.utime(file_of(tmp_path, 6), (now() - 5400.0,) * 2)
    monkeypatch.setattr("longshore.tiers.remote.directory.time.time", lambda: now() + ahead)
    other = open_harness(tmp_path, "&ttl=1h")
    assert (wait_answer(other, 5), wait_answer(other, 6)) == ((True,), (False,))
    other.assert_serves(0, 5)
    assert other.load(0, 6)[0] is Status.NOT_FOUND
    assert [file_of(tmp_path, number).exists() for number in (5, 6)] == [True, False]
    for each in (one, other):
        each.tier.close()
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("name", ["open", "preadv", "stat"])
def test_file_removed_on_a_network_file_system_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    harness, fired = open_harness(tmp_path), list[object]()
    harness.store(0, 5)
    call = getattr(os, name)

    def stale(what: Any, *more: Any, **named: Any) -> Any:
        if name != "preadv" and key(5).hex() not in str(what):
            return call(what, *more, **named)
        fired.append(what)
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patched:
        patched.setattr(os, name, stale)
        if name == "stat":
            assert wait_answer(harness, 5) == (False,)
        else:
            assert [harness.load(0, 5)[0] for _ in range(4)] == [Status.NOT_FOUND] * 4
    assert fired
    assert set(harness.tier.failures.values()) == {0}
    harness.assert_serves(0, 5)
    harness.tier.close()


def test_folders_have_the_permissions_of_the_directory(tmp_path: Path) -> None:
    store, umask = tmp_path / "shared", os.umask(0o077)
    try:
        harness = open_harness(store)
        store.chmod(0o2770)
        harness.store(0, 5)
        harness.tier.close()
    finally:
        os.umask(umask)
    folders = [each for each in store.rglob("*") if each.is_dir()]
    assert [each.stat().st_mode & 0o7777 for each in folders] == [0o2770] * 3


def test_the_directory_is_not_created(tmp_path: Path) -> None:
    arena = Arena(4 * span(IMAGE))
    gone = tmp_path / "not-mounted"
    harness = TierHarness(
        lambda: RemoteTier(f"file://{gone}", arena=arena, image_bytes=IMAGE, namespace=NAMESPACE), arena, by_key=True
    )
    assert harness.run(harness.op(Op.WRITE, 0, 5)) == (Status.UNAVAILABLE,)
    assert not gone.exists()
    harness.tier.close()


def test_a_full_file_system_is_left_alone_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: str, value: memoryview) -> None:
        raise OSError(errno.ENOSPC, "no space")

    harness = open_harness(tmp_path)
    monkeypatch.setattr(DirectorySession, "_write_new", staticmethod(full))
    assert harness.run(harness.op(Op.WRITE, 0, 5)) == (Status.NO_SPACE,)
    assert harness.tier.failures["full"] >= 1
    assert not list(tmp_path.rglob("*.tmp"))
    harness.tier.close()


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_directory_that_becomes_read_only_serves_reads(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, refused = os.open, []

    def open_or_refuse(path: Any, flags: int, *rest: Any) -> int:
        if flags & os.O_CREAT and str(path).startswith(str(tmp_path)):
            refused.append(path)
            raise OSError(code, os.strerror(code))
        return make(path, flags, *rest)

    harness = open_harness(tmp_path)
    try:
        harness.store(0, 1)
        monkeypatch.setattr(os, "open", open_or_refuse)
        while len(refused) < 4:
            assert harness.run(harness.op(Op.WRITE, 0, 2)) == (Status.IO_ERROR,)
        harness.assert_serves(0, 1)
        assert harness.tier.failures["breaker"] == 0
        assert harness.tier.failures["refused"] >= 4
    finally:
        harness.tier.close()


def test_hung_read_ends_at_deadline_and_never_writes_arena(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = open_harness(tmp_path)
    harness.store(0, 5)
    harness.tier.close()
    harness.tier = RemoteTier(
        f"file://{tmp_path}?fetch_timeout=300ms", arena=harness.arena, image_bytes=IMAGE, namespace=NAMESPACE
    )
    read_file, go_on = os.preadv, threading.Event()

    def hang(descriptor: int, buffers: list[memoryview], at: int) -> int:
        go_on.wait()
        return read_file(descriptor, buffers, at)

    monkeypatch.setattr(os, "preadv", hang)
    read = harness.op(Op.READ, 0, 5)
    harness.bytes_of(read)[:] = 0xCC
    assert harness.run(read) == (Status.DEADLINE,)
    go_on.set()
    harness.tier.close()
    assert np.all(harness.bytes_of(read) == 0xCC)


def test_fifo_is_a_miss_and_blocks_no_thread(tmp_path: Path) -> None:
    harness = open_harness(tmp_path)
    harness.store(0, 9)
    for number in range(4):  # as many as there are threads
        file = file_of(tmp_path, number)
        file.parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(file)
        assert harness.load(0, number)[0] is Status.MISMATCH
    harness.assert_serves(0, 9)
    harness.store(0, 1)
    harness.assert_serves(0, 1)
    harness.tier.close()


def wait_answer(harness: TierHarness, number: int) -> tuple[bool, ...] | None:
    tier = harness.tier
    assert isinstance(tier, RemoteTier)
    ticket = tier.ask([key(number)], tier.generation, math.inf)
    while not (answers := tier.answers()):
        pass
    assert answers[0][0] == ticket
    return answers[0][1]


def test_a_generation_that_the_tier_was_not_told_is_refused(tmp_path: Path) -> None:
    harness = open_harness(tmp_path)
    tier = harness.tier
    assert isinstance(tier, RemoteTier)
    with pytest.raises(TierError, match="newer than the last reset"):
        tier.submit([harness.op(Op.WRITE, 0, 5, generation=1)], math.inf)
    with pytest.raises(TierError, match="newer than the last reset"):
        tier.ask([key(5)], 1, math.inf)
    tier.reset(1, NAMESPACE)
    harness.store(0, 5, generation=1)
    assert tier.ask([key(5)], 0, math.inf)  # of an earlier one: not there
    assert [present for _, present in tier.answers()] == [(False,)]
    tier.close()


def test_forked_process_closes_the_tier_whatever_threads_held(tmp_path: Path) -> None:
    harness = open_harness(tmp_path)
    harness.store(0, 5)
    tier = harness.tier
    assert isinstance(tier, RemoteTier)
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with tier._lock:
            held.set()
            over.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    child = os.fork()
    if not child:
        signal.alarm(20)  # ends a process that waits for ever
        tier.close()
        os._exit(0)
    over.set()
    holder.join()
    assert os.waitpid(child, 0)[1] == 0
    harness.assert_serves(0, 5)
    tier.close()
