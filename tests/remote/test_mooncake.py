"""A real Mooncake Store: the conformance suite, what others leave under our keys, and what faults do to requests."""

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from remotes import IMAGE, PATIENT, PLACES, TIMEOUT, ask, remote, until

from longshore.boundary import Status
from longshore.errors import TierError
from longshore.runtime.tier_host import HostedRemoteTier
from longshore.testing import TierHarness, TierTests
from longshore.testing.local_server import LocalMooncake
from longshore.testing.tier_harness import image, key, span
from longshore.tiers.arena import Arena, ArenaSettings
from longshore.tiers.base import Op, Tier
from longshore.tiers.remote import mooncake as client_module
from longshore.tiers.remote import open_store
from longshore.tiers.remote.format import address

SHARED = ArenaSettings(shared=True)
SHORT = "connect_timeout=20s&probe_timeout=20s&write_timeout=20s&fetch_timeout=1s"

FOREIGN = """
import os, sys
from mooncake.store import MooncakeDistributedStore
client = MooncakeDistributedStore()
assert client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 1 << 20, "tcp", "", sys.argv[1]) == 0
client.remove(sys.argv[2], True)
assert client.put(sys.argv[2], sys.stdin.buffer.read()) == 0
os._exit(0)
"""


def clients() -> list[int]:
    """The processes of Mooncake's client that this process has started."""
    started = [each.read_text().split() for each in Path("/proc/self/task").glob("*/children")]
    return [int(pid) for pids in started for pid in pids if b"mooncake_child" in command_of(int(pid))]


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def is_dead(pid: int) -> bool:
    """Whether a process and all its threads have ended: it has no memory and no open files any more."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
        return state == "Z" and len(list(Path(f"/proc/{pid}/task").iterdir())) == 1
    except OSError:
        return True


def written(harness: TierHarness, number: int) -> bool:
    write = harness.op(Op.WRITE, 0, number)
    harness.bytes_of(write)[:] = image(number, IMAGE)
    return harness.run(write) == (Status.OK,)


def served(harness: TierHarness, number: int) -> bool:
    """Whether a read serves the image; not where it ends at a short deadline, before a client has started."""
    status, found = harness.load(0, number)
    if status is Status.OK:
        np.testing.assert_array_equal(found, image(number, IMAGE))
    return status is Status.OK


@pytest.fixture
def shared() -> Iterator[Callable[..., TierHarness]]:
    """Opens tiers over shared memory, and closes them at the end."""
    harnesses = []

    def open_harness(url: str, namespace: bytes | None = None, **options: object) -> TierHarness:
        arena, name = Arena(PLACES * span(IMAGE), SHARED), namespace or os.urandom(32)
        harness = TierHarness(
            lambda: open_store(url, arena=arena, image_bytes=IMAGE, namespace=name, **options), arena, by_key=True
        )
        harnesses.append(harness)
        return harness

    yield open_harness
    for each in harnesses:
        each.tier.close()
        each.arena.close()
    assert clients() == []


class TestMooncake(TierTests):
    by_key = True
    persistent = True

    @pytest.fixture(autouse=True)
    def _at(self, mooncake: LocalMooncake) -> None:
        self.url = mooncake.url(PATIENT)
        self.namespace = os.urandom(32)

    def make_arena(self, nbytes: int) -> Arena:
        return Arena(nbytes, SHARED)

    def open_tier(self, arena: Arena, directory: Path) -> Tier:
        return open_store(self.url, arena=arena, image_bytes=self.image_bytes, namespace=self.namespace)


# What replicas share


def test_two_processes_share_a_namespace_and_send_nothing_twice(
    mooncake: LocalMooncake, shared: Callable[..., TierHarness]
) -> None:
    url, namespace = mooncake.url(PATIENT), os.urandom(32)
    one, other = shared(url, namespace), shared(url)
    one.store(0, 1)
    hosted = Arena(PLACES * span(IMAGE), SHARED)
    there = TierHarness(
        lambda: HostedRemoteTier(url, name="remote", image_bytes=IMAGE, arena=hosted, namespace=namespace),
        hosted,
        by_key=True,
    )
    try:
        there.assert_serves(0, 1)
        there.store(0, 2)
    finally:
        there.tier.close()
        hosted.close()
    one.assert_serves(0, 2)
    assert ask(one, 1, 2, 3) == (True, True, False)
    other.assert_misses(0, 1)
    same = shared(url, namespace)
    same.store(0, 1)
    assert (remote(one)._budget.spent, remote(same)._budget.spent) == (IMAGE + 128, 0)


def test_a_probe_of_many_keys(mooncake: LocalMooncake, shared: Callable[..., TierHarness]) -> None:
    harness = shared(mooncake.url(PATIENT))
    for number in range(0, 8, 2):
        harness.store(0, number)
    assert ask(harness, *range(512)) == tuple(number in {0, 2, 4, 6} for number in range(512))


def test_a_batch_takes_several_calls(mooncake: LocalMooncake, shared: Callable[..., TierHarness]) -> None:
    harness = shared(mooncake.url(f"in_flight={3 * IMAGE}&{PATIENT}"))
    writes = [harness.op(Op.WRITE, 0, number, number) for number in range(PLACES)]
    for number, write in enumerate(writes):
        harness.bytes_of(write)[:] = image(number, IMAGE)
    assert set(harness.run(*writes)) == {Status.OK}
    reads = [harness.op(Op.READ, 0, number, PLACES - 1 - number) for number in range(PLACES)]
    assert set(harness.run(*reads)) == {Status.OK}
    for number, read in enumerate(reads):
        np.testing.assert_array_equal(harness.bytes_of(read), image(number, IMAGE))


@pytest.mark.parametrize("large", [False, True])
def test_jobs_ordered_together_are_read_by_one_call(
    mooncake: LocalMooncake, shared: Callable[..., TierHarness], monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    """Each has a deadline of its own, a moment after that of the job before."""
    monkeypatch.setattr(client_module, "_SMALL", 0 if large else client_module._SMALL)
    orders, order = list[tuple[object, ...]](), client_module.MooncakeSession._order

    def watched(session: client_module.MooncakeSession, deadline: float, *words: object) -> None:
        orders.append(words)
        order(session, deadline, *words)

    monkeypatch.setattr(client_module.MooncakeSession, "_order", watched)
    harness = shared(mooncake.url(PATIENT))
    writes = [harness.op(Op.WRITE, 0, number, number) for number in range(PLACES)]
    for number, write in enumerate(writes):
        harness.bytes_of(write)[:] = image(number, IMAGE)
    assert set(harness.run(*writes)) == {Status.OK}
    assert [words[0] for words in orders] == ["exist", "put" if large else "write"]
    harness.assert_serves(0, 0)
    orders.clear()
    reading = max(clients())  # the process that was started last
    os.kill(reading, signal.SIGSTOP)  # until all have been submitted
    reads = [harness.op(Op.READ, 0, number, PLACES - 1 - number) for number in range(PLACES)]
    tickets = [harness.tier.submit([read], math.inf) for read in reads]
    os.kill(reading, signal.SIGCONT)
    assert {harness.wait(ticket).statuses for ticket in tickets} == {(Status.OK,)}
    for number, read in enumerate(reads):
        np.testing.assert_array_equal(harness.bytes_of(read), image(number, IMAGE))
    assert {words[0] for words in orders} == {"get" if large else "read"}
    assert len(orders) <= 4, "two before the client was stopped, and the rest"


def test_one_key_twice_in_a_batch(mooncake: LocalMooncake, shared: Callable[..., TierHarness]) -> None:
    harness = shared(mooncake.url(PATIENT))
    writes = [harness.op(Op.WRITE, 0, number, place) for place, number in enumerate((1, 2, 1))]
    for write, number in zip(writes, (1, 2, 1), strict=True):
        harness.bytes_of(write)[:] = image(number, IMAGE)
    assert harness.run(*writes) == (Status.OK,) * 3
    reads = [harness.op(Op.READ, 0, number, 4 + place) for place, number in enumerate((1, 2, 1, 1))]
    assert harness.run(*reads) == (Status.OK,) * 4
    for read, number in zip(reads, (1, 2, 1, 1), strict=True):
        np.testing.assert_array_equal(harness.bytes_of(read), image(number, IMAGE))


def test_something_else_under_our_key_is_a_miss(mooncake: LocalMooncake, shared: Callable[..., TierHarness]) -> None:
    harness = shared(mooncake.url(PATIENT))
    assert harness.load(0, 1)[0] is Status.NOT_FOUND
    path = address(remote(harness).namespace, key(1)).decode()
    master = f"127.0.0.1:{mooncake.port}"
    for value, status in (
        (b"x" * (IMAGE + 128), Status.CORRUPT),
        (b"short", Status.SHORT),
        (b"y" * IMAGE, Status.SHORT),
        (b"z" * (IMAGE + 129), Status.MISMATCH),
    ):
        subprocess.run([sys.executable, "-c", FOREIGN, master, path], input=value, check=True)
        assert harness.load(0, 1)[0] is status
        assert ask(harness, 1) == (False,), "until it is written again"
    harness.store(0, 1)
    harness.assert_serves(0, 1)
    assert ask(harness, 1) == (True,)


def test_a_value_of_another_key_is_a_miss(mooncake: LocalMooncake, shared: Callable[..., TierHarness]) -> None:
    harness = shared(mooncake.url(PATIENT))
    harness.store(0, 1)
    name = remote(harness).namespace
    copy = """
import os, sys
from mooncake.store import MooncakeDistributedStore
client = MooncakeDistributedStore()
assert client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", sys.argv[1]) == 0
assert client.put(sys.argv[3], client.get(sys.argv[2])) == 0
os._exit(0)
"""
    words = (f"127.0.0.1:{mooncake.port}", address(name, key(1)).decode(), address(name, key(2)).decode())
    subprocess.run([sys.executable, "-c", copy, *words], check=True)
    assert harness.load(0, 2)[0] is Status.MISMATCH


def test_a_full_store_says_so(tmp_path: Path, shared: Callable[..., TierHarness]) -> None:
    with LocalMooncake(tmp_path / "small", memory="16 MB") as small:
        harness = shared(small.url(PATIENT))
        ended, number = set[Status](), 0
        while Status.NO_SPACE not in ended:
            writes = [harness.op(Op.WRITE, 0, number + place, place) for place in range(PLACES)]
            ended |= set(harness.run(*writes))
            number += PLACES
            assert number < 1 << 14
        assert remote(harness).failures["full"] > 0
        assert ended == {Status.OK, Status.NO_SPACE}


# Faults


def test_a_stopped_master_ends_requests_in_time_without_late_writers(
    own_mooncake: LocalMooncake, shared: Callable[..., TierHarness]
) -> None:
    harness = shared(own_mooncake.url(SHORT), failures=10**9)
    harness.store(0, 1)
    until(lambda: served(harness, 1))
    busy = set(clients())
    assert len(busy) == 2, "of reads and of writes"
    own_mooncake.pause()
    read = harness.op(Op.READ, 0, 1)
    begun = time.monotonic()
    ticket = harness.tier.submit([read], math.inf)
    assert harness.wait(ticket).statuses == (Status.DEADLINE,)
    assert time.monotonic() - begun >= 0.9
    assert sum(map(is_dead, busy)) == 1, "the process that had the image"
    assert harness.run(harness.op(Op.WRITE, 0, 2), deadline=time.monotonic() + 0.3) == (Status.DEADLINE,)
    assert all(map(is_dead, busy))
    assert remote(harness).failures["timeout"] >= 2
    own_mooncake.resume()
    until(lambda: harness.load(0, 1)[0] is Status.OK)
    harness.assert_serves(0, 1)


def test_a_probe_of_a_stopped_master_ends_as_unknown(
    own_mooncake: LocalMooncake, shared: Callable[..., TierHarness]
) -> None:
    harness = shared(own_mooncake.url(PATIENT.replace("probe_timeout=20s", "probe_timeout=2s")))
    until(lambda: ask(harness, 1) == (False,))
    own_mooncake.pause()
    assert ask(harness, 1) is None
    own_mooncake.resume()
    until(lambda: ask(harness, 1) == (False,))


def test_a_master_that_is_killed_and_started_again(
    own_mooncake: LocalMooncake, shared: Callable[..., TierHarness]
) -> None:
    harness = shared(own_mooncake.url(PATIENT))
    harness.store(0, 1)
    harness.assert_serves(0, 1)
    own_mooncake.kill()
    ended = [harness.run(harness.op(Op.READ, 0, 1), harness.op(Op.WRITE, 0, 2)) for _ in range(8)]
    assert {status for statuses in ended for status in statuses} == {Status.UNAVAILABLE}
    tier = remote(harness)
    until(lambda: tier.is_unavailable)
    assert ask(harness, 1) is None
    assert tier.failures["connection"] >= 3
    assert (tier.counts["read", "unavailable"], tier.counts["write", "unavailable"]) == (8, 8)
    own_mooncake.start()
    until(lambda: not tier.is_unavailable)
    assert harness.load(0, 1)[0] is Status.NOT_FOUND, "the master keeps nothing"
    until(lambda: written(harness, 1))
    harness.assert_serves(0, 1)


def test_a_machine_that_dies_costs_its_values_alone(
    own_mooncake: LocalMooncake, shared: Callable[..., TierHarness]
) -> None:
    harness = shared(own_mooncake.url(PATIENT))
    harness.store(0, 1)
    assert own_mooncake.machine is not None
    own_mooncake.machine.kill()
    own_mooncake.machine.wait()
    ended = [harness.load(0, 1)[0] for _ in range(4)]
    assert set(ended) == {Status.UNAVAILABLE}
    assert set(remote(harness).failures.values()) == {0}
    assert not remote(harness).is_unavailable
    assert ask(harness, 2) == (False,)


def test_a_client_killed_while_idle_is_replaced_without_misses(
    mooncake: LocalMooncake, shared: Callable[..., TierHarness]
) -> None:
    harness = shared(mooncake.url(PATIENT))
    harness.store(0, 1)
    harness.assert_serves(0, 1)
    assert ask(harness, 1) == (True,)
    killed = clients()
    assert len(killed) == 3
    for each in killed:
        os.kill(each, signal.SIGKILL)
    until(lambda: all(map(is_dead, killed)))
    harness.assert_serves(0, 1)
    harness.store(0, 2)
    assert ask(harness, 1, 2) == (True, True)
    assert set(remote(harness).failures.values()) == {0}
    assert not set(killed) & set(clients())


@pytest.mark.parametrize("fault", ["hangs", "dies"])
def test_a_client_that_fails_in_a_call_is_replaced(
    fault: str, mooncake: LocalMooncake, shared: Callable[..., TierHarness]
) -> None:
    harness = shared(mooncake.url(SHORT if fault == "hangs" else PATIENT))
    harness.store(0, 1)
    writing = clients()
    until(lambda: served(harness, 1))
    (reading,) = set(clients()) - set(writing)
    os.kill(reading, signal.SIGSTOP)
    ticket = harness.tier.submit([harness.op(Op.READ, 0, 1)], math.inf)
    if fault == "dies":
        time.sleep(0.1)
        assert harness.tier.poll() == []
        os.kill(reading, signal.SIGKILL)
    expected = Status.DEADLINE if fault == "hangs" else Status.UNAVAILABLE
    assert harness.wait(ticket).statuses == (expected,)
    assert is_dead(reading)
    until(lambda: harness.load(0, 1)[0] is Status.OK)
    harness.assert_serves(0, 1)


def test_a_fault_in_checking_a_value_costs_its_call_alone(
    mooncake: LocalMooncake, shared: Callable[..., TierHarness], monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = shared(mooncake.url(PATIENT))
    harness.store(0, 1)
    writing = clients()
    harness.assert_serves(0, 1)
    (reading,) = set(clients()) - set(writing)
    faults = [RuntimeError("a bug")]
    verify = client_module.verify

    def faulty(*arguments: Any) -> Status:
        if faults:
            raise faults.pop()
        return verify(*arguments)

    monkeypatch.setattr(client_module, "verify", faulty)
    assert harness.load(0, 1)[0] is Status.IO_ERROR
    assert not faults
    assert is_dead(reading)
    harness.assert_serves(0, 1)


def test_an_answer_that_has_come_is_taken_though_late(
    mooncake: LocalMooncake, shared: Callable[..., TierHarness], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checking the values of one call takes until the deadline; the answer to the next one has come meanwhile."""
    late = 0.0
    harness = shared(mooncake.url(f"in_flight={IMAGE}&{PATIENT}"), clock=lambda: time.monotonic() + late)
    harness.store(0, 1)
    harness.store(0, 2)
    harness.assert_serves(0, 1)
    verify = client_module.verify

    def slow(*arguments: Any) -> Status:
        nonlocal late
        if not late:
            until(lambda: any(each.is_stale() for each in list(remote(harness)._sessions)))  # type: ignore[union-attr]
            late = 1000.0
        return verify(*arguments)

    monkeypatch.setattr(client_module, "verify", slow)
    reads = [harness.op(Op.READ, 0, number, number) for number in (1, 2)]
    assert harness.run(*reads) == (Status.OK,) * 2
    assert late
    for number, read in enumerate(reads, 1):
        np.testing.assert_array_equal(harness.bytes_of(read), image(number, IMAGE))
    assert set(remote(harness).failures.values()) == {0}


def test_a_late_write_of_a_repeated_key_keeps_the_client(
    mooncake: LocalMooncake, shared: Callable[..., TierHarness], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of two equal keys waits for the call that writes the first, which takes until the deadline."""
    late = 0.0
    harness = shared(mooncake.url(PATIENT), clock=lambda: time.monotonic() + late)
    call = client_module.MooncakeSession._codes

    def slow(session: client_module.MooncakeSession, deadline: float) -> list[int]:
        nonlocal late
        codes = call(session, deadline)
        late = 1000.0
        return codes

    monkeypatch.setattr(client_module.MooncakeSession, "_codes", slow)
    writes = [harness.op(Op.WRITE, 0, 1, place) for place in range(2)]
    for write in writes:
        harness.bytes_of(write)[:] = image(1, IMAGE)
    statuses = harness.run(*writes)
    assert late
    assert sorted(statuses, key=lambda status: status.name) == [Status.DEADLINE, Status.OK]
    assert set(remote(harness).failures.values()) == {0}


def test_a_late_batch_takes_no_other_with_it(mooncake: LocalMooncake, shared: Callable[..., TierHarness]) -> None:
    harness = shared(mooncake.url(PATIENT))
    harness.assert_misses(0, 9)
    (reading,) = clients()
    harness.store(0, 1)
    os.kill(reading, signal.SIGSTOP)
    begun = time.monotonic()
    soon, later = (
        harness.tier.submit([harness.op(Op.READ, 0, 1, place) for place in places], begun + seconds)
        for places, seconds in (((0, 1), 1.0), ((2, 3), TIMEOUT))
    )
    assert harness.wait(soon).statuses == (Status.DEADLINE,) * 2
    assert harness.wait(later).statuses == (Status.OK,) * 2, "by another process"


def test_a_hung_client_keeps_its_slot_until_it_is_dead(
    mooncake: LocalMooncake, shared: Callable[..., TierHarness], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process is not killed here, as one that hangs in the kernel: its image does not end."""
    harness = shared(mooncake.url(SHORT))
    until(lambda: harness.load(0, 1)[0] is Status.NOT_FOUND)
    (reading,) = clients()
    os.kill(reading, signal.SIGSTOP)
    kept = threading.Event()
    kill = subprocess.Popen.kill

    def later(process: subprocess.Popen[bytes]) -> None:
        if not kept.is_set() and process.pid == reading:
            kept.wait(TIMEOUT)
        kill(process)

    monkeypatch.setattr(subprocess.Popen, "kill", later)
    ticket = harness.tier.submit([harness.op(Op.READ, 0, 1)], math.inf)
    give_up = time.monotonic() + 2.0
    while time.monotonic() < give_up:
        assert harness.tier.poll() == []
        time.sleep(0.02)
    kept.set()
    assert harness.wait(ticket).statuses == (Status.DEADLINE,)
    assert is_dead(reading)


def test_operations_of_a_killed_tier_host_outlast_its_clients(mooncake: LocalMooncake) -> None:
    """They write to the arena, too; the engine is not their parent, and does not see when they are dead."""
    with closing(Arena(PLACES * span(IMAGE), SHARED)) as arena:
        tier = HostedRemoteTier(
            mooncake.url(PATIENT), name="remote", image_bytes=IMAGE, arena=arena, namespace=os.urandom(32)
        )
        harness = TierHarness(lambda: tier, arena, by_key=True)
        harness.store(0, 1)
        harness.assert_serves(0, 1)
        process = tier._supervisor.process
        assert process is not None
        threads = Path(f"/proc/{process.pid}/task").iterdir()
        pids = [int(pid) for each in threads for pid in (each / "children").read_text().split()]
        assert len(pids) == 2, "of reads and of writes"
        replies = os.fstat(process._replies).st_ino
        for pid in pids:
            assert replies in {inode_of(each) for each in Path(f"/proc/{pid}/fd").iterdir()}
        os.kill(pids[0], signal.SIGSTOP)
        ticket = tier.submit([harness.op(Op.READ, 0, 1, place) for place in range(4)], math.inf)
        os.kill(process.pid, signal.SIGKILL)
        assert harness.wait(ticket).statuses == (Status.UNAVAILABLE,) * 4
        assert [memory_of(pid) for pid in pids] == ["", ""]
        tier.close()


def inode_of(link: Path) -> int:
    try:
        return link.stat().st_ino
    except OSError:
        return -1


def memory_of(pid: int) -> str:
    """What a process has mapped; empty once it has no memory any more."""
    try:
        return Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return ""


def test_closing_with_work_under_way(own_mooncake: LocalMooncake, shared: Callable[..., TierHarness]) -> None:
    harness = shared(own_mooncake.url(SHORT.replace("20s", "1s")))
    before = set(threading.enumerate())
    harness.reopen()
    until(lambda: written(harness, 1))
    until(lambda: served(harness, 1))
    own_mooncake.pause()
    tickets = [harness.tier.submit([harness.op(Op.READ, 0, 1, place)], math.inf) for place in range(4)]
    harness.tier.close()
    statuses = {status for ticket in tickets for status in harness.wait(ticket).statuses}
    assert statuses <= {Status.DEADLINE, Status.TIER_OFF}
    assert clients() == []
    assert not set(threading.enumerate()) - before
    own_mooncake.resume()


# What is missing


def test_what_is_not_installed_is_named(tmp_path: Path) -> None:
    script = """
from longshore.errors import TierError
from longshore.tiers.arena import Arena
from longshore.tiers.remote import open_store
try:
    open_store("mooncake://127.0.0.1", arena=Arena(4096), image_bytes=4096, namespace=bytes(32))
except TierError as error:
    print(error)
"""

    def said(**changes: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", script], env={**os.environ, **changes}, capture_output=True, text=True, check=True
        )
        return done.stdout

    (tmp_path / "libibverbs.so.1").write_text("")
    source = str(Path(__file__).parents[2] / "src")
    assert "pip install '.[mooncake]'" in said(PYTHONPATH=source)
    text = said(LD_LIBRARY_PATH=str(tmp_path))
    for each in ("libibverbs1", "libnl-3-200", "libnl-route-3-200"):
        assert each in text


def test_its_package_is_not_imported_unless_a_store_is_configured() -> None:
    script = (
        "import sys; from longshore.tiers.arena import Arena; from longshore.tiers.remote import open_store\n"
        "open_store('valkey://127.0.0.1:1', arena=Arena(4096), image_bytes=4096, namespace=bytes(32)).close()\n"
        "assert not [each for each in sys.modules if 'mooncake' in each], sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_an_arena_that_is_not_shared_is_refused(mooncake: LocalMooncake) -> None:
    arena = Arena(IMAGE)
    with pytest.raises(TierError, match="shared=True"):
        open_store(mooncake.url(), arena=arena, image_bytes=IMAGE, namespace=bytes(32))
    arena.close()
