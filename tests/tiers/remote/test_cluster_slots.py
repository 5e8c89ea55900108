"""Slots of keys, and nodes of a cluster that answer nonsense or send operations round in circles."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore import errors
from longshore.boundary import Status
from longshore.testing.tier_harness import key
from longshore.tiers.arena import Arena
from longshore.tiers.base import BY_KEY, Op, TierOp
from longshore.tiers.remote import ClusterTier
from longshore.tiers.remote import cluster as cluster_module
from longshore.tiers.remote.cluster import SLOTS, ClusterNode, read_slots, slot_of
from longshore.tiers.remote.resp import RespSession
from longshore.tiers.remote.settings import RemoteSettings
from longshore.tiers.remote.stream import PlainStream
from longshore.tiers.remote.work import RemoteError

IMAGE = 4096


@pytest.mark.parametrize(
    ("name", "slot"),
    [
        (b"123456789", 12739), (b"foo", 12182), (b"bar", 5061), (b"hello", 866), (b"", 0),
        (b"{user1000}.following", 3443), (b"{user1000}.followers", 3443), (b"foo{bar}{zap}", 5061),
        (b"foo{}{bar}", 8363), (b"foo{{bar}}zap", 4015), (b"{}a", 10875), (b"a{b", 13340),
    ],
)  # fmt: skip
def test_slots_of_keys(name: bytes, slot: int) -> None:
    assert slot_of(name) == slot  # as valkey-server 9.1 answers to CLUSTER KEYSLOT


def map_in(reply: bytes) -> list[ClusterNode | None]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(reply)
        theirs.shutdown(socket.SHUT_WR)
        session = RespSession(RemoteSettings("valkey", "h"), PlainStream(ours, time.monotonic), time.monotonic, IMAGE)
        return read_slots(session, "h", time.monotonic() + 60)


def ranges(*each: bytes) -> bytes:
    return b"*%d\r\n" % len(each) + b"".join(each)


def range_of(first: int, last: int, host: bytes, port: int = 7000) -> bytes:
    node = b"*4\r\n%b:%d\r\n$2\r\nid\r\n*2\r\n$8\r\nhostname\r\n$1\r\nx\r\n" % (host, port)
    return b"*4\r\n:%d\r\n:%d\r\n" % (first, last) + node + node


def test_a_map_of_slots() -> None:
    found = map_in(
        ranges(range_of(0, 9, b"$1\r\na\r\n"), range_of(20, 20, b"$-1\r\n"), range_of(21, 21, b"$0\r\n\r\n"))
    )
    assert found[:10] == [ClusterNode("a", 7000)] * 10
    assert found[20:22] == [ClusterNode("h", 7000)] * 2  # it does not know its address: that of the connection
    assert found.count(None) == SLOTS - 12


@pytest.mark.parametrize(
    "reply",
    [
        b"-ERR This instance has cluster support disabled\r\n", b"$-1\r\n", b":3\r\n", b"*1\r\n:3\r\n", b"*1\r\n*0\r\n",
        ranges(range_of(0, SLOTS, b"$1\r\na\r\n")), ranges(range_of(-1, 5, b"$1\r\na\r\n")),
        ranges(range_of(9, 5, b"$1\r\na\r\n")), ranges(range_of(0, 5, b"$1\r\na\r\n", 70_000)),
        ranges(range_of(0, 10**17, b"$1\r\na\r\n")), ranges(range_of(0, 5, b":1\r\n")),
        ranges(range_of(0, 5, b"*0\r\n")), ranges(range_of(0, 5, b"$1\r\n\xff\r\n")), b"*9\r\n", b"",
    ],
)  # fmt: skip
def test_what_is_no_map_is_refused(reply: bytes) -> None:
    with pytest.raises(RemoteError):
        map_in(reply)


@given(st.binary(max_size=200))
def test_whatever_is_answered_is_a_map_or_an_error(reply: bytes) -> None:
    with contextlib.suppress(RemoteError):
        assert len(map_in(reply)) == SLOTS


class Redirecting:
    """A server that answers `reply` to each command."""

    def __init__(self) -> None:
        self.reply = b""
        self.asked = self.answered = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError), sock, sock.makefile("rb") as commands:
            while line := commands.readline():
                words = [commands.read(int(commands.readline()[1:]) + 2) for _ in range(int(line[1:]))]
                self.asked += words[0] in {b"GET\r\n", b"STRLEN\r\n"}
                sock.sendall(self.reply)
                self.answered += 1


@pytest.fixture
def servers() -> Iterator[tuple[Redirecting, Redirecting]]:
    pair = Redirecting(), Redirecting()
    yield pair
    for each in pair:
        each.close()


def statuses(tier: ClusterTier) -> tuple[Status, ...]:
    ops = [TierOp(op, BY_KEY, key(1), None, place * IMAGE, IMAGE, 0) for place, op in enumerate(Op)]
    tier.submit(ops, math.inf)
    return wait(tier.poll)[0].statuses  # type: ignore[no-any-return]


def until(reached: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 30
    while not reached():
        assert time.monotonic() < give_up
        time.sleep(0.001)


def wait(collect: Callable[[], list]) -> list:  # type: ignore[type-arg]
    give_up = time.monotonic() + 30
    while not (found := collect()):
        assert time.monotonic() < give_up
        time.sleep(0.001)
    return found


@pytest.mark.parametrize(
    ("error", "read"),
    [
        ("MOVED 1 127.0.0.1:{other}", Status.NOT_FOUND),
        ("MOVED 1 127.0.0.1:{self}", Status.NOT_FOUND),
        ("ASK 1 127.0.0.1:{other}", Status.IO_ERROR),  # in reply to ASKING
        ("MOVED 1 :{other}", Status.NOT_FOUND),
        ("MOVED 1 ?:{other}", Status.NOT_FOUND),
        ("MOVED", Status.IO_ERROR),
        ("MOVED 1 nowhere", Status.NOT_FOUND),
        ("MOVED 1 127.0.0.1:99999", Status.NOT_FOUND),
        ("MOVED 1 127.0.0.1:0", Status.NOT_FOUND),
        ("ASK \u00e9", Status.NOT_FOUND),
        ("CLUSTERDOWN Hash slot not served", Status.NOT_FOUND),
        ("CLUSTERDOWN The cluster is down", Status.IO_ERROR),
    ],
)
def test_redirections_without_end_are_misses(
    error: str, read: Status, servers: tuple[Redirecting, Redirecting]
) -> None:
    for server, other in (servers, servers[::-1]):
        server.reply = b"-%b\r\n" % error.format(self=server.port, other=other.port).encode()
    url = f"valkey-cluster://127.0.0.1:{servers[0].port}?fetch_timeout=20s&write_timeout=20s&connect_timeout=20s"
    tier = ClusterTier(url, arena=Arena(2 * IMAGE), image_bytes=IMAGE, namespace=bytes(32), failures=10**9)
    try:
        for _ in range(3):
            assert statuses(tier) in {(read, Status.UNAVAILABLE), (read, Status.IO_ERROR)}
        tier.ask([key(1)], 0, math.inf)
        wait(tier.answers)
        assert 1 <= sum(each.asked for each in servers) <= 3 * 2 * 5 + 5
    finally:
        tier.close()


def test_what_is_redirected_at_closing_is_not_sent_on(servers: tuple[Redirecting, Redirecting]) -> None:
    first, other = servers
    first.reply = b"-MOVED 1 127.0.0.1:%d\r\n" % other.port
    url = f"valkey-cluster://127.0.0.1:{first.port}?fetch_timeout=20s&write_timeout=20s&connect_timeout=20s"
    tier = ClusterTier(url, arena=Arena(IMAGE), image_bytes=IMAGE, namespace=bytes(32))
    tier.submit([TierOp(Op.WRITE, BY_KEY, key(1), None, 0, IMAGE, 0)], math.inf)
    give_up = time.monotonic() + 30
    while tier.completed == 0:  # at its first node
        assert time.monotonic() < give_up
        time.sleep(0.001)
    tier.close()
    assert tier.poll()[0].statuses == (Status.TIER_OFF,)
    assert other.asked == 0


@pytest.mark.parametrize("empty", [0, 1])
def test_a_node_without_a_map_hides_no_other(servers: tuple[Redirecting, Redirecting], empty: int) -> None:
    """As after `CLUSTER RESET` of a node, or where it has lost its configuration."""
    full = servers[1 - empty]
    servers[empty].reply = b"*0\r\n"
    full.reply = b"*1\r\n*3\r\n:0\r\n:%d\r\n*2\r\n$9\r\n127.0.0.1\r\n:%d\r\n" % (SLOTS - 1, full.port)
    url = "valkey-cluster://{},{}?connect_timeout=20s".format(*(f"127.0.0.1:{each.port}" for each in servers))
    tier = ClusterTier(url, arena=Arena(IMAGE), image_bytes=IMAGE, namespace=bytes(32))
    try:
        give_up = time.monotonic() + 30
        while tier._owners != {ClusterNode("127.0.0.1", full.port)}:
            assert time.monotonic() < give_up
            time.sleep(0.01)
    finally:
        tier.close()


def test_an_impossible_host_is_a_node_that_is_away(servers: tuple[Redirecting, Redirecting]) -> None:
    servers[0].reply = b"-MOVED 1 a..b:7000\r\n"
    url = f"valkey-cluster://127.0.0.1:{servers[0].port}?connect_timeout=20s&fetch_timeout=20s&write_timeout=20s"
    tier = ClusterTier(url, arena=Arena(2 * IMAGE), image_bytes=IMAGE, namespace=bytes(32))
    try:
        assert statuses(tier) == (Status.UNAVAILABLE, Status.UNAVAILABLE)
        assert tier._thread.is_alive()
    finally:
        tier.close()


@pytest.mark.parametrize("host", [b"", b"?"])
def test_a_redirection_without_host_stays_at_the_host(host: bytes, servers: tuple[Redirecting, Redirecting]) -> None:
    """So answers a node that does not know its address, or has no hostname where hostnames are preferred."""
    first, other = servers
    first.reply = b"-MOVED 1 %b:%d\r\n" % (host, other.port)
    other.reply = b"-MOVED 1 127.0.0.1:%d\r\n" % other.port
    url = f"valkey-cluster://127.0.0.1:{first.port}?fetch_timeout=20s&write_timeout=20s&connect_timeout=20s"
    tier = ClusterTier(url, arena=Arena(2 * IMAGE), image_bytes=IMAGE, namespace=bytes(32))
    try:
        statuses(tier)
        assert other.asked > 0
    finally:
        tier.close()


def test_an_unreadable_map_is_logged_once_per_outage(
    servers: tuple[Redirecting, Redirecting], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_module, "REFRESH_SECONDS", 0.01)
    full = b"*1\r\n*3\r\n:0\r\n:%d\r\n*2\r\n$9\r\n127.0.0.1\r\n:%d\r\n" % (SLOTS - 1, servers[0].port)
    refused = b"-NOPERM this user has no permissions to run CLUSTER\r\n"
    servers[0].reply = refused
    url = f"valkey-cluster://127.0.0.1:{servers[0].port}?connect_timeout=20s"
    tier = ClusterTier(url, arena=Arena(IMAGE), image_bytes=IMAGE, namespace=bytes(32))
    try:
        for outage in (1, 2):
            servers[0].reply = refused
            for _ in range(5):
                answered = servers[0].answered
                tier._wanted.set()
                until(lambda answered=answered: servers[0].answered > answered)  # type: ignore[misc]
            servers[0].reply = full
            tier._wanted.set()
            until(lambda: not tier._map_failed)
            said = [each for each in caplog.messages if "no node gives the map of slots" in each]
            assert len(said) == outage
            assert f"127.0.0.1:{servers[0].port}: the server answered NOPERM" in said[-1]
    finally:
        tier.close()


def test_a_fault_in_looking_after_nodes_ends_no_thread(
    servers: tuple[Redirecting, Redirecting], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_module, "REFRESH_SECONDS", 0.01)
    calls = []

    def broken(*_: object) -> None:
        calls.append(None)
        raise RuntimeError("a bug")

    monkeypatch.setattr(cluster_module, "read_slots", broken)
    url = f"valkey-cluster://127.0.0.1:{servers[0].port}?connect_timeout=20s"
    tier = ClusterTier(url, arena=Arena(IMAGE), image_bytes=IMAGE, namespace=bytes(32))
    try:
        for count in range(1, 4):
            tier._wanted.set()
            until(lambda count=count: len(calls) >= count)  # type: ignore[misc]
        assert tier._thread.is_alive()

        def said() -> list[str]:
            return [each for each in caplog.messages if "checking its nodes failed" in each]

        assert len(said()) == 1
        monkeypatch.setattr(errors, "_LOG_SECONDS", 0.0)  # a minute later
        tier._wanted.set()
        until(lambda: len(said()) >= 2)
        assert "more since the last line" in said()[1]
    finally:
        tier.close()
