"""Real Valkey and Redis servers: the conformance suite, and what becomes of requests when a server does not answer."""

import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from remotes import IMAGE, PATIENT, TIMEOUT, ask, moved_among_faults, remote, until

from certificates import self_signed
from longshore.boundary import Status
from longshore.testing import FaultyProxy, TierHarness, TierTests, WireFault
from longshore.testing.local_server import LocalServer, free_port
from longshore.testing.tier_harness import image, key
from longshore.tiers.arena import Arena
from longshore.tiers.base import Op, Tier
from longshore.tiers.remote import RemoteTier
from longshore.tiers.remote.resp import RespClient


class _Conformance(TierTests):
    by_key = True
    persistent = True
    url = ""

    @pytest.fixture(autouse=True)
    def _at(self, server: LocalServer) -> None:
        self.url = self.url_of(server)
        self.namespace = os.urandom(32)

    def url_of(self, server: LocalServer) -> str:
        return f"valkey://127.0.0.1:{server.port}/1?{PATIENT}"

    def open_tier(self, arena: Arena, directory: Path) -> Tier:
        return RemoteTier(self.url, arena=arena, image_bytes=self.image_bytes, namespace=self.namespace)


class TestTcp(_Conformance):
    pass


class TestUnixSocket(_Conformance):
    def url_of(self, server: LocalServer) -> str:
        return f"unix://{server.socket}?{PATIENT}&ttl=1h"


# What replicas share


def test_replicas_share_a_namespace_and_nothing_else(server: LocalServer, opened: Callable[..., TierHarness]) -> None:
    url, namespace = f"valkey://127.0.0.1:{server.port}?{PATIENT}", os.urandom(32)
    one, same, other = opened(url, namespace), opened(url, namespace, generation=5), opened(url)
    one.store(0, 1)
    same.assert_serves(0, 1)
    assert ask(same, 1, 2) == (True, False)
    other.assert_misses(0, 1)
    rank = opened(url, namespace, rank=0)
    rank.assert_misses(0, 1)
    rank.store(0, 2)
    rank.assert_serves(0, 2)
    assert ask(one, 2) == (False,)


def test_a_reset_that_keeps_the_namespace_keeps_what_is_stored(
    server: LocalServer, opened: Callable[..., TierHarness]
) -> None:
    harness = opened(f"valkey://127.0.0.1:{server.port}?{PATIENT}")
    harness.store(0, 1)
    remote(harness).reset(1, remote(harness).namespace)
    harness.assert_serves(0, 1)
    remote(harness).reset(2)
    assert ask(harness, 1) == (False,)
    harness.assert_misses(0, 1)


def test_what_is_there_is_not_sent_again(server: LocalServer, opened: Callable[..., TierHarness]) -> None:
    url, namespace = f"valkey://127.0.0.1:{server.port}?{PATIENT}", os.urandom(32)
    one, other = opened(url, namespace), opened(url, namespace)
    one.store(0, 1)
    other.store(0, 1)
    assert remote(one)._budget.spent == IMAGE + 128
    assert remote(other)._budget.spent == 0


def test_values_expire(server: LocalServer, opened: Callable[..., TierHarness]) -> None:
    harness = opened(f"valkey://127.0.0.1:{server.port}?ttl=1500ms&{PATIENT}")
    harness.store(0, 1)
    until(lambda: ask(harness, 1) == (False,))
    assert harness.load(0, 1)[0] is Status.NOT_FOUND


def test_something_else_under_our_key_is_a_miss(server: LocalServer, opened: Callable[..., TierHarness]) -> None:
    harness = opened(f"valkey://127.0.0.1:{server.port}?{PATIENT}")
    address = f"ls1/{remote(harness).namespace.hex()}/{key(1).hex()}".encode()
    for words, status in (
        ((b"SET", address, b"x" * (IMAGE + 128)), Status.CORRUPT),
        ((b"SET", address, b"short"), Status.SHORT),
        ((b"SET", address, b""), Status.SHORT),
    ):
        server.command(*words)
        assert harness.load(0, 1)[0] is status
    server.command(b"DEL", address)
    server.command(b"LPUSH", address, b"a list")
    assert ask(harness, 1) == (False,)
    assert harness.load(0, 1)[0] is Status.MISMATCH
    harness.store(0, 1)
    harness.assert_serves(0, 1)


def test_the_budget_bounds_what_is_sent(server: LocalServer, opened: Callable[..., TierHarness]) -> None:
    harness = opened(f"valkey://127.0.0.1:{server.port}?daily_writes={48 * (IMAGE + 128)}&{PATIENT}")
    statuses = [harness.run(harness.op(Op.WRITE, 0, number))[0] for number in range(4)]
    assert statuses == [Status.OK, Status.OK, Status.QUEUE_FULL, Status.QUEUE_FULL]
    assert remote(harness).failures["budget"] == 2


# Access


def test_a_user_with_a_password(
    tmp_path: Path, opened: Callable[..., TierHarness], caplog: pytest.LogCaptureFixture
) -> None:
    secret = "s3cret-word"  # noqa: S105
    password = tmp_path / "password"
    password.write_text(f"{secret}\n")
    wrong = tmp_path / "wrong"
    wrong.write_text("not-the-password")
    with LocalServer("redis", tmp_path / "server") as server:
        server.command(b"ACL", b"SETUSER", b"kv", b"on", f">{secret}".encode(), b"~ls1/*", b"+@all")
        good = opened(f"redis://kv@127.0.0.1:{server.port}?password_file={password}&{PATIENT}")
        good.store(0, 1)
        good.assert_serves(0, 1)
        bad = opened(f"redis://kv@127.0.0.1:{server.port}?password_file={wrong}&{PATIENT}")
        assert bad.run(bad.op(Op.READ, 0, 1)) == (Status.UNAVAILABLE,)
        assert remote(bad).failures["refused"] >= 3
        assert "WRONGPASS" in caplog.text
        assert secret not in caplog.text
        assert "not-the-password" not in caplog.text


def test_tls_verifies_the_server(tmp_path: Path, opened: Callable[..., TierHarness]) -> None:
    certificate, private = self_signed(tmp_path)
    port = free_port()
    files = {"tls_cert_file": str(certificate), "tls_key_file": str(private), "tls_ca_cert_file": str(certificate)}
    with LocalServer("redis", tmp_path / "server", tls_port=str(port), tls_auth_clients="no", **files):
        good = opened(f"rediss://127.0.0.1:{port}?ca_file={certificate}&{PATIENT}")
        good.store(0, 1)
        good.assert_serves(0, 1)
        assert ask(good, 1, 2) == (True, False)
        unknown = opened(f"rediss://127.0.0.1:{port}?{PATIENT}")
        assert unknown.run(unknown.op(Op.READ, 0, 1)) == (Status.UNAVAILABLE,)
        misnamed = opened(f"rediss://127.0.0.1:{port}?ca_file={certificate}&server_name=other&{PATIENT}")
        assert misnamed.run(misnamed.op(Op.READ, 0, 1)) == (Status.UNAVAILABLE,)


# A server that does not answer


def test_no_server_costs_nothing_but_misses(opened: Callable[..., TierHarness]) -> None:
    harness = opened(f"valkey://127.0.0.1:{free_port()}")
    assert harness.run(harness.op(Op.READ, 0, 1), harness.op(Op.WRITE, 0, 1)) == (
        Status.UNAVAILABLE,
        Status.UNAVAILABLE,
    )
    assert ask(harness, 1) is None
    assert remote(harness).is_unavailable


def test_a_stopped_server_is_left_alone(own_server: LocalServer, opened: Callable[..., TierHarness]) -> None:
    harness = opened(f"valkey://127.0.0.1:{own_server.port}?fetch_timeout=300ms&connect_timeout=300ms")
    tier = remote(harness)
    until(lambda: harness.run(harness.op(Op.WRITE, 0, 1)) == (Status.OK,))
    own_server.pause()
    ended = [harness.run(harness.op(Op.READ, 0, 1))[0] for _ in range(8)]
    assert ended[0] is Status.DEADLINE
    assert ended[-1] is Status.UNAVAILABLE
    assert set(ended) == {Status.DEADLINE, Status.UNAVAILABLE}
    assert tier.failures["breaker"] == 1
    own_server.resume()
    until(lambda: not tier.is_unavailable)
    until(lambda: harness.load(0, 1)[0] is Status.OK)


def test_a_killed_server_is_used_when_it_is_back(own_server: LocalServer, opened: Callable[..., TierHarness]) -> None:
    harness = opened(f"valkey://127.0.0.1:{own_server.port}?{PATIENT}")
    tier = remote(harness)
    harness.store(0, 1)
    own_server.kill()
    assert harness.run(harness.op(Op.READ, 0, 1)) == (Status.UNAVAILABLE,)
    assert tier.is_unavailable
    own_server.start()
    until(lambda: not tier.is_unavailable)
    assert harness.load(0, 1)[0] is Status.NOT_FOUND
    harness.store(0, 1)
    harness.assert_serves(0, 1)


def test_a_server_that_restarts_between_requests_costs_no_request(
    own_server: LocalServer, opened: Callable[..., TierHarness]
) -> None:
    harness = opened(f"valkey://127.0.0.1:{own_server.port}?{PATIENT}")
    harness.store(0, 1)
    own_server.kill()
    own_server.start()
    assert harness.load(0, 1)[0] is Status.NOT_FOUND
    harness.store(0, 1)
    assert remote(harness).failures == dict.fromkeys(remote(harness).failures, 0)


def test_a_full_server_refuses_writes_and_serves_reads(tmp_path: Path, opened: Callable[..., TierHarness]) -> None:
    with LocalServer("valkey", tmp_path / "full", maxmemory="4mb", maxmemory_policy="noeviction") as server:
        harness = opened(f"valkey://127.0.0.1:{server.port}?{PATIENT}")
        statuses: list[Status] = []
        while not statuses or statuses[-1] is Status.OK:
            statuses += harness.run(harness.op(Op.WRITE, 0, len(statuses)))
        assert statuses[-1] is Status.NO_SPACE
        assert ask(harness, 0) == (True,)
        assert not remote(harness).is_unavailable


@pytest.mark.parametrize("reason", ["MISCONF", "READONLY"])
def test_a_server_that_takes_no_writes_serves_reads(
    reason: str, tmp_path: Path, opened: Callable[..., TierHarness], caplog: pytest.LogCaptureFixture
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    with LocalServer("valkey", tmp_path / "server", save="3600 1", dir=str(disk)) as server:
        harness = opened(f"valkey://127.0.0.1:{server.port}?{PATIENT}")
        harness.store(0, 1)
        if reason == "MISCONF":
            disk.rmdir()
            server.command(b"BGSAVE")
        else:
            server.command(b"REPLICAOF", b"127.0.0.1", b"%d" % free_port())
        until(lambda: server.command(b"SET", b"x", b"y").startswith(b"-%b" % reason.encode()))
        tier, number = remote(harness), 2
        while tier.failures["refused"] < 4:
            (status,) = harness.run(harness.op(Op.WRITE, 0, number))
            assert status is Status.IO_ERROR
        harness.assert_serves(0, 1)
        assert ask(harness, 1, number) == (True, False)
        assert tier.failures["breaker"] == 0
        assert f"takes no writes: the server answered {reason}" in caplog.text
        session = RespClient(tier.settings, time.monotonic, IMAGE).connect()
        session.check(time.monotonic() + TIMEOUT)  # as an open breaker does
        session.close()


def test_close_does_not_wait_for_a_stopped_server(own_server: LocalServer, opened: Callable[..., TierHarness]) -> None:
    harness = opened(f"valkey://127.0.0.1:{own_server.port}?fetch_timeout=500ms&connect_timeout=500ms")
    until(lambda: harness.run(harness.op(Op.WRITE, 0, 1)) == (Status.OK,))
    own_server.pause()
    ticket = harness.tier.submit([harness.op(Op.READ, 0, 1)], math.inf)
    harness.tier.close()
    assert harness.wait(ticket).statuses[0] in {Status.DEADLINE, Status.TIER_OFF, Status.UNAVAILABLE}
    own_server.resume()


# A server that lies


@pytest.mark.parametrize("fault", WireFault)
def test_each_fault_is_a_miss(fault: WireFault, own_server: LocalServer, opened: Callable[..., TierHarness]) -> None:
    proxy = FaultyProxy(("127.0.0.1", own_server.port), lambda name, number: None)
    timeouts = "fetch_timeout=400ms" if fault in {WireFault.STALL, WireFault.SLOW} else "fetch_timeout=2s"
    harness = opened(
        f"valkey://127.0.0.1:{proxy.port}?write_timeout=20s&connect_timeout=20s&{timeouts}", failures=10**9
    )
    for number in range(4):
        harness.store(0, number)
    proxy.plan = lambda name, number: fault if name == b"GET" else None
    status, found = harness.load(0, 1)
    if status is Status.OK:  # slow, and in time; or sent twice
        assert fault in {WireFault.SLOW, WireFault.EXTRA}
        np.testing.assert_array_equal(found, image(1, IMAGE))
    assert proxy.fired[fault] > 0
    proxy.plan = lambda name, number: None
    until(lambda: harness.load(0, 1)[0] is Status.OK)
    harness.assert_serves(0, 1)
    proxy.close()


def test_no_wrong_byte_in_ten_thousand_faults(own_server: LocalServer, opened: Callable[..., TierHarness]) -> None:
    proxy = FaultyProxy(("127.0.0.1", own_server.port), lambda name, number: None)
    harness = opened(
        f"valkey://127.0.0.1:{proxy.port}?fetch_timeout=500ms&write_timeout=500ms&connect_timeout=20s", failures=10**9
    )
    moved_among_faults(harness, proxy, {b"GET", b"SET"}, faults=10_000, hits=1_000)
    proxy.close()
