"""A store whose connections are in a tier host: the same conformance suite, and what harm to the process does."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from peers_kit import free_port
from tier_host_kit import program, wait_until

from certificates import self_signed
from longshore.boundary import Status
from longshore.errors import ConfigError, TierError
from longshore.runtime.peer_server import PeerServer
from longshore.runtime.tier_host import HostedRemoteTier
from longshore.runtime.tier_host import supervisor as watch
from longshore.runtime.tier_host.supervisor import PROGRAM
from longshore.runtime.tier_host.wire import Kind, pack_answer
from longshore.testing import TierHarness, TierTests
from longshore.testing.tier_harness import key, span
from longshore.tiers.arena import Arena, ArenaSettings
from longshore.tiers.base import Op, Tier
from longshore.tiers.remote.resp import RespClient
from longshore.tiers.remote.settings import parse_url
from longshore.tiers.remote.work import RemoteError

IMAGE = TierTests.image_bytes
TIMEOUT = 30.0
PATIENT = "probe_timeout=20s&fetch_timeout=20s&write_timeout=20s"


class StoreHarness(TierHarness):
    tier: HostedRemoteTier

    @property
    def pid(self) -> int:
        process = self.tier._supervisor.process
        assert process is not None
        return process.pid

    def read(self, number: int) -> Status:
        return self.load(0, number)[0]

    def until(self, what: Callable[[], bool]) -> None:
        give_up = time.monotonic() + TIMEOUT
        while not what():
            assert time.monotonic() < give_up, "it did not come to that"
            for result in self.tier.poll():
                self._unclaimed[result.ticket] = result
            time.sleep(0.002)

    def ask(self, *numbers: int) -> tuple[bool, ...] | None:
        ticket = self.tier.ask([key(number) for number in numbers], self.tier.generation, math.inf)
        give_up = time.monotonic() + TIMEOUT
        while not (answers := self.tier.answers()):
            assert time.monotonic() < give_up
            time.sleep(0.002)
        assert [each for each, _ in answers] == [ticket]
        return answers[0][1]


Opener = Callable[..., StoreHarness]


@pytest.fixture
def opener(tmp_path: Path) -> Iterator[Opener]:
    made: list[StoreHarness] = []

    def opened(url: str | None = None, **options: object) -> StoreHarness:
        arena = Arena(32 * span(IMAGE), ArenaSettings(shared=True, huge_pages=False))
        about = {"name": "remote", "image_bytes": IMAGE, "arena": arena, "namespace": bytes(32), **options}
        harness = StoreHarness(
            lambda: HostedRemoteTier(url or f"file://{tmp_path}?{PATIENT}", **about),  # type: ignore[arg-type]
            arena,
            by_key=True,
        )
        made.append(harness)
        return harness

    yield opened
    for each in made:
        each.tier.close()


class TestHostedStore(TierTests):
    by_key = True
    persistent = True

    def make_arena(self, nbytes: int) -> Arena:
        return Arena(nbytes, ArenaSettings(shared=True, huge_pages=False))

    def open_tier(self, arena: Arena, directory: Path) -> Tier:
        directory.mkdir(exist_ok=True)
        url, name = f"file://{directory}?{PATIENT}", bytes(32)
        return HostedRemoteTier(url, name="remote", image_bytes=self.image_bytes, arena=arena, namespace=name)


def test_what_is_stored_is_probed_and_read_by_another_engine(opener: Opener) -> None:
    one, two, other = opener(), opener(), opener(namespace=b"o" * 32)
    assert one.ask(0, 1) == (False, False)
    one.store(0, 0)
    assert two.ask(0, 1) == (True, False)
    assert two.read(0) is Status.OK
    assert two.read(1) is Status.NOT_FOUND
    assert other.ask(0, 1) == (False, False)


def test_resets_keep_the_name_of_fixed_weights_alone(opener: Opener) -> None:
    fixed, free, shared = opener(fixed_weights=True), opener(), opener()
    for each in (fixed, free):
        each.tier.reset(1)
        assert each.tier.generation == 1
    assert fixed.tier.namespace == bytes(32)
    assert free.tier.namespace != bytes(32)
    for number, each in enumerate((fixed, free)):
        each.store(number, number, generation=1)
    assert shared.ask(0, 1) == (True, False)
    fixed.tier.weights_changed()
    fixed.tier.reset(2)
    private = fixed.tier.namespace
    assert private != bytes(32)
    fixed.store(2, 2, generation=2)
    assert shared.ask(2) == (False,)
    fixed.tier.reset(3)
    assert fixed.tier.namespace == private


def test_killed_process_restarts_with_the_latest_generation(opener: Opener) -> None:
    harness = opener()
    harness.store(0, 0)
    former = harness.pid
    os.kill(former, signal.SIGKILL)
    harness.until(lambda: harness.tier.failures["tier_host"] == 1)
    assert harness.tier.is_unavailable
    assert harness.ask(0) is None
    assert harness.read(0) is Status.UNAVAILABLE
    harness.tier.reset(5, bytes(32))
    harness.until(lambda: not harness.tier.is_unavailable)
    assert harness.pid != former
    assert harness.ask(0) == (True,)
    harness.store(1, 1, generation=5)


def test_questions_and_operations_of_a_process_that_dies_are_answered(opener: Opener) -> None:
    harness = opener()
    os.kill(harness.pid, signal.SIGSTOP)
    harness.tier.ask([key(0)], 0, math.inf)
    ticket = harness.tier.submit([harness.op(Op.WRITE, 0, 0)], math.inf)
    assert harness.tier.answers() == [] and harness.tier.poll() == []
    os.kill(harness.pid, signal.SIGKILL)
    harness.until(lambda: not harness.tier._asked and not harness.tier._in_flight)
    assert [present for _, present in harness.tier.answers()] == [None]
    assert harness._unclaimed.pop(ticket).statuses == (Status.UNAVAILABLE,)


def test_a_stopped_process_is_left_alone_and_then_killed(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = opener()
    monkeypatch.setattr(watch, "QUIET", 0.2)
    monkeypatch.setattr(watch, "SILENCE", 1.0)
    os.kill(harness.pid, signal.SIGSTOP)
    ticket = harness.tier.submit([harness.op(Op.WRITE, 0, 0)], math.inf)
    harness.until(lambda: harness.tier.is_stalled)
    assert harness.ask(0) is None
    harness.until(lambda: harness.tier.failures["tier_host"] == 1)
    assert harness._unclaimed.pop(ticket).statuses == (Status.UNAVAILABLE,)


def test_a_store_that_is_away_says_so_and_comes_back(opener: Opener, tmp_path: Path) -> None:
    directory = tmp_path / "unmounted"
    harness = opener(f"file://{directory}?{PATIENT}")
    while not harness.tier.is_unavailable:
        assert harness.ask(0) is None
    assert harness.tier.failures["breaker"] == 1
    assert harness.read(0) is Status.UNAVAILABLE
    directory.mkdir()
    harness.until(lambda: not harness.tier.is_unavailable)
    assert harness.ask(0) == (False,)


def test_what_cannot_be_is_refused_at_once(opener: Opener, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected no password"):
        opener("valkey://h?password=x")
    with pytest.raises(TierError, match="certificate"):
        opener(f"valkeys://127.0.0.1:1/0?ca_file={tmp_path}/none.pem")
    harness = opener()
    with pytest.raises(TierError, match=r"is newer than the last reset \("):
        harness.tier.ask([key(0)], 1, math.inf)


@pytest.mark.parametrize("status", ["ends", "is no program"])
def test_process_that_fails_to_start_is_started_later(opener: Opener, tmp_path: Path, status: str) -> None:
    began = tmp_path / "began"
    fails = (
        f"import os; began = os.path.exists({str(began)!r}); open({str(began)!r}, 'w').close(); began or sys.exit(3)"
    )
    command = program(fails) if status == "ends" else [str(tmp_path / "tier-host")]
    harness = opener(program=command)
    assert harness.tier.is_unavailable
    assert harness.ask(0) is None
    assert harness.read(0) is Status.UNAVAILABLE
    if status == "ends":
        assert harness.tier.failures["tier_host"] == 1
    else:
        harness.until(lambda: harness.tier.failures["tier_host"] >= 1)
        Path(command[0]).write_text(f'#!/bin/sh\nexec {" ".join(map(shlex.quote, PROGRAM))} "$@"\n')
        Path(command[0]).chmod(0o700)
    harness.until(lambda: not harness.tier.is_unavailable)
    harness.store(0, 0)
    assert harness.ask(0, 1) == (True, False)


def test_answer_without_a_value_per_key_is_invalid(opener: Opener) -> None:
    harness = opener()
    os.kill(harness.pid, signal.SIGSTOP)
    ticket = harness.tier.ask([key(0)], 0, math.inf)
    harness.tier._handle_all([(Kind.ANSWER, pack_answer(ticket, ()))])
    harness.until(lambda: harness.tier.failures["tier_host"] == 1)
    assert harness.tier.answers() == [(ticket, None)]


def test_certificates_on_a_hung_file_system_delay_no_start(opener: Opener, tmp_path: Path) -> None:
    hung = tmp_path / "ca.pem"
    os.mkfifo(hung)  # opening it for reading blocks, as a file on a mount does whose server is gone
    harness = opener(f"valkeys://127.0.0.1:1?ca_file={hung}&connect_timeout=100ms")
    assert harness.read(0) in {Status.DEADLINE, Status.UNAVAILABLE}
    # A writer can open it only while somebody waits to read it: the certificates are still being read.
    os.close(os.open(hung, os.O_WRONLY | os.O_NONBLOCK))


def test_renewed_certificates_are_used_without_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longshore.tiers.remote.settings.RENEW_SECONDS", 0.0)
    certificate, private = self_signed(tmp_path)
    where = f"valkeys://127.0.0.1:{free_port()}"
    settings = parse_url(f"{where}?ca_file={certificate}&connect_timeout=20s")
    source: Any = SimpleNamespace(at_once=1)
    server = PeerServer(f"{where}?cert_file={certificate}&key_file={private}", source)

    def answers(store: RespClient) -> bool:
        with contextlib.suppress(RemoteError), contextlib.closing(store.connect()) as session:
            return session.call(b"PING", deadline=time.monotonic() + TIMEOUT) == b"PONG"
        return False

    try:
        before = RespClient(settings, time.monotonic, IMAGE)
        assert answers(before)
        self_signed(tmp_path)  # by an authority that nobody trusted before
        after = RespClient(settings, time.monotonic, IMAGE)
        assert wait_until(lambda: answers(before) and answers(after))
        certificate.write_text("half of one")
        assert all(answers(before) for _ in range(4)), "what was read before stays in use"
    finally:
        server.close()
