"""Peers: what the tiers of one engine have, another one reads, by the client of any Valkey server."""

from __future__ import annotations

import contextlib
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from peers_kit import (
    GETS,
    KEYS,
    PATIENT,
    TIMEOUT,
    VALUE,
    connected,
    free_port,
    get_without_reading,
    is_answered,
    jobs_of,
    opened,
    received,
    rows_of,
    session_of,
    soon,
    stored,
    until,
)

from certificates import self_signed
from longshore.boundary import HOST, Status
from longshore.cache import GroupKeys, Protection
from longshore.errors import ConfigError, HintError
from longshore.runtime import peer_server
from longshore.runtime.peer_server import PeerServer, TierSource
from longshore.runtime.stack import Stack
from longshore.tiers.arena import Arena, ArenaSettings
from longshore.tiers.base import BY_KEY, Op, TierOp
from longshore.tiers.file import capacity_for
from longshore.tiers.remote.cluster import ClusterNode
from longshore.tiers.remote.format import address
from longshore.tiers.remote.peers import PeerTier, parse_peer
from longshore.tiers.remote.resp import COMING, RespClient
from longshore.tiers.remote.settings import parse_url
from longshore.tiers.remote.work import RemoteError

Serve = Callable[..., PeerServer]


@pytest.fixture
def prefiller(tmp_path: Path) -> Iterator[Stack]:
    files = {"file_path": tmp_path / "tier", "file_size": capacity_for(8, 8192)}
    with opened(rows_of(1), **files) as stack:
        stored(stack)
        yield stack


@pytest.fixture
def serve(prefiller: Stack) -> Iterator[Serve]:
    made: list[PeerServer] = []

    def start(url: str = "valkey://127.0.0.1:{port}", coming: set[bytes] = frozenset()) -> PeerServer:  # type: ignore[assignment]
        assert prefiller.host is not None
        source = TierSource(prefiller.runtime, prefiller.host, lambda: prefiller.scope.digest, coming.__contains__)
        made.append(PeerServer(url.replace("{port}", str(free_port())), source))
        return made[-1]

    yield start
    for server in made:
        server.close()


def test_another_engine_reads_what_the_tiers_of_one_have(prefiller: Stack, serve: Serve) -> None:
    """By its setting `remote` alone. Some chunks come from host memory, the others from files."""
    server = serve()
    assert prefiller.runtime.flush(TIMEOUT)
    with prefiller.runtime.batch() as cache:
        assert cache.discard([KEYS[2]], HOST) == 1
    with opened(rows_of(2), remote=f"valkey://127.0.0.1:{server.settings.port}?{PATIENT}") as decoder:
        found = 0
        give_up = soon()
        while found < 3 and time.monotonic() < give_up:
            with decoder.runtime.batch() as cache:
                looked = cache.lookup({0: GroupKeys(KEYS[:3])}, decoder.runtime.clock(), protect=Protection.NONE)
                cache.prefetch({0: GroupKeys(KEYS[:3])}, decoder.runtime.clock())
                found = looked.num_chunks
            time.sleep(0.01)
        assert found == 3
        with decoder.runtime.batch() as cache:
            lease = cache.lookup({0: GroupKeys(KEYS[:3])}, decoder.runtime.clock()).lease
            assert lease is not None
            cache.load(lease, {0: range(3)})
        decoder.runtime.wait_load(lease)
        assert torch.equal(decoder_rows(decoder)[:3], rows_of(1)[:3])
        until(lambda: server.answers["read", "present"] == 3)
    until(lambda: not jobs_of(prefiller))
    with prefiller.runtime.locked() as cache:
        cache.check_integrity()


def decoder_rows(stack: Stack) -> torch.Tensor:
    (tensor,) = {id(each): each for each in stack.layout.tensors}.values()
    return tensor


def test_what_is_computed_or_stored_is_coming(prefiller: Stack, serve: Serve) -> None:
    server = serve(coming={KEYS[3]})
    session = session_of(server)
    try:
        name = address(prefiller.scope.digest, KEYS[3])
        assert session.call(b"STRLEN", name, deadline=soon()) == COMING
        names = [address(prefiller.scope.digest, key) for key in (*KEYS, bytes(32))]
        assert session.lengths(names, soon()) == [VALUE] * 3 + [0, 0]  # for clients that know no better, it is absent
    finally:
        session.close()


def test_another_namespace_has_nothing(serve: Serve) -> None:
    session = session_of(serve())
    try:
        assert session.lengths([address(bytes(32), KEYS[0]), b"ls1/what", b"*"], soon()) == [0, 0, 0]
    finally:
        session.close()


def test_nothing_is_written_or_told_without_the_password(
    prefiller: Stack, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "right").write_text("secret\n")
    (tmp_path / "wrong").write_text("guess\n")
    server = serve(f"valkey://0.0.0.0:{{port}}?password_file={tmp_path}/right")
    here = parse_url(f"valkey://127.0.0.1:{server.settings.port}?{PATIENT}")
    name = address(prefiller.scope.digest, KEYS[0])
    with pytest.raises(Exception, match="NOAUTH"):
        RespClient(here, time.monotonic, 8192).connect().lengths([name], soon())
    wrong = parse_url(f"valkey://127.0.0.1:{server.settings.port}?{PATIENT}&password_file={tmp_path}/wrong")
    with pytest.raises(Exception, match="WRONGPASS"):
        RespClient(wrong, time.monotonic, 8192).connect()
    right = parse_url(f"valkey://127.0.0.1:{server.settings.port}?{PATIENT}&password_file={tmp_path}/right")
    session = RespClient(right, time.monotonic, 8192).connect()
    assert session.lengths([name], soon()) == [VALUE]
    with pytest.raises(Exception, match="READONLY"):
        session.call(b"SET", name, b"x", deadline=soon())
    session.close()
    assert server.dropped["password"] == 1


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]"])  # noqa: S104
def test_all_addresses_need_a_password(serve: Serve, host: str) -> None:
    with pytest.raises(ConfigError, match="a password is needed"):
        serve(f"valkey://{host}:{{port}}")


GARBAGE = [
    *(b"*1\r\n$9999\r\n", b"*99\r\n", b"*0\r\n", b"*00\r\n", b"*-1\r\n", b"GET x\r\n", b"*2\r\n$3\r\nGETxx"),
    *(b"*2\r\n$3\r\nGET\r\n$2\r\nabcd", b"*" + b"1" * 20, b"*1\r\n:4\r\nPING\r\n"),
    b"\0" * 64,
    b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03" * 9,  # of TLS
]


@pytest.mark.parametrize("said", GARBAGE)
def test_garbage_ends_the_connection_and_nothing_else(
    serve: Serve, said: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    server = serve()
    with connected(server) as client:
        client.sendall(said)
        assert client.recv(100) == b""
    session = session_of(server)
    assert session.call(b"PING", deadline=soon()) == b"PONG"
    session.close()
    assert not [record for record in caplog.records if record.exc_info]


def test_commands_arrive_in_pieces(prefiller: Stack, serve: Serve) -> None:
    name = address(prefiller.scope.digest, KEYS[0])
    with connected(serve()) as client:
        for byte in b"*2\r\n$6\r\nSTRLEN\r\n$%d\r\n%b\r\n*1\r\n$4\r\nping\r\n" % (len(name), name):
            client.sendall(bytes([byte]))
        answer = b":%d\r\n+PONG\r\n" % VALUE
        assert received(client, len(answer)) == answer
        client.sendall(b"*1\r\n$4\r\nPING\r\n" * 500)
        assert received(client, 7 * 500) == b"+PONG\r\n" * 500


def test_values_that_are_asked_for_together_come_in_order(prefiller: Stack, serve: Serve) -> None:
    """Of host memory, of files, and missing ones, with other commands between them."""
    assert prefiller.runtime.flush(TIMEOUT)
    with prefiller.runtime.batch() as cache:
        assert cache.discard([KEYS[1]], HOST) == 1
    names = [address(prefiller.scope.digest, key) for key in (*KEYS, KEYS[1])] * 100
    gets = [b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(name), name) for name in names]
    ping = b"*1\r\n$4\r\nPING\r\n"
    server = serve()
    with connected(server) as client:
        sender = threading.Thread(target=client.sendall, args=(b"".join([*gets[:7], ping, *gets[7:], ping]),))
        sender.start()
        images = [each.numpy().tobytes() for each in rows_of(1)[:3]]
        for at in range(len(names)):
            which = at % 5
            if at == 7:
                assert received(client, 7) == b"+PONG\r\n"
            if which == 3:
                assert received(client, 5) == b"$-1\r\n"
                continue
            value = received(client, len(b"$%d\r\n" % VALUE) + VALUE + 2)
            assert value.endswith(images[1 if which == 4 else which] + b"\r\n")
        assert received(client, 7) == b"+PONG\r\n"
        sender.join()
    until(lambda: server.answers["read", "present"] == 400 and not jobs_of(prefiller))


def test_a_client_that_does_not_read_keeps_no_slot(
    prefiller: Stack, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_server, "SENDING", 1.0)
    monkeypatch.setattr(peer_server, "_LATE_SECONDS", 0.05)
    server = serve()
    with connected(server) as client:
        get_without_reading(client, address(prefiller.scope.digest, KEYS[0]))
        until(lambda: is_answered(client) and jobs_of(prefiller) == 1)
        until(lambda: not server.deadlines)
        with contextlib.suppress(ConnectionError):
            assert len(received(client, GETS * VALUE)) < GETS * VALUE  # it has not got all
    assert jobs_of(prefiller) == 0


def test_a_client_that_is_killed_keeps_no_slot(prefiller: Stack, serve: Serve) -> None:
    server = serve()
    client = connected(server)
    get_without_reading(client, address(prefiller.scope.digest, KEYS[0]))
    until(lambda: is_answered(client) and jobs_of(prefiller) == 1)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()  # as the kernel does for a process that is killed
    until(lambda: not server.deadlines)
    assert jobs_of(prefiller) == 0


def test_closing_drops_clients_and_what_is_sent(prefiller: Stack, serve: Serve) -> None:
    server = serve()
    with connected(server) as client, connected(server) as idle:
        get_without_reading(client, address(prefiller.scope.digest, KEYS[0]))
        until(lambda: is_answered(client) and jobs_of(prefiller) == 1 and len(server.deadlines) == 2)
        server.close()
        assert not server.deadlines
        assert jobs_of(prefiller) == 0
        assert idle.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        connected(server)


def test_whoever_does_not_log_in_is_dropped(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it keeps sending commands."""
    monkeypatch.setattr(peer_server, "LOGIN", 0.5)
    monkeypatch.setattr(peer_server, "_LATE_SECONDS", 0.05)
    (tmp_path / "password").write_text("secret\n")
    server = serve(f"valkey://127.0.0.1:{{port}}?password_file={tmp_path}/password")
    with connected(server) as client, contextlib.suppress(ConnectionError):
        give_up = soon()
        while client.sendall(b"*1\r\n$4\r\nPING\r\n") is None and client.recv(100):
            assert time.monotonic() < give_up
            time.sleep(0.05)
    until(lambda: not server.deadlines)


def test_a_password_file_that_is_emptied_lets_nobody_in(prefiller: Stack, serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("secret\n")
    server = serve(f"valkey://127.0.0.1:{{port}}?password_file={file}")
    file.write_text("")
    with connected(server) as client:
        client.sendall(b"*1\r\n$4\r\nPING\r\n")
        assert client.recv(100).startswith(b"-NOAUTH")
        client.sendall(b"*2\r\n$4\r\nAUTH\r\n$0\r\n\r\n")
        assert client.recv(100).startswith(b"-WRONGPASS")
    with pytest.raises(ConfigError, match="password_file is empty"):
        serve(f"valkey://127.0.0.1:{{port}}?password_file={file}")


def test_a_password_file_that_is_gone_is_counted_and_logged(
    serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "password"
    file.write_text("secret\n")
    server = serve(f"valkey://127.0.0.1:{{port}}?password_file={file}")
    file.unlink()
    for turn in range(2):
        with connected(server) as client:
            client.sendall(b"*2\r\n$4\r\nAUTH\r\n$6\r\nsecret\r\n")
            assert client.recv(100).startswith(b"-ERR the password cannot be read")
            assert client.recv(100) == b""
        assert server.dropped == {"credentials": turn + 1}
    (said,) = (each for each in caplog.records if each.levelname == "ERROR")
    assert "nobody can log in" in said.getMessage()
    assert "secret" not in caplog.text


@pytest.mark.parametrize(("fault", "reason"), [(OSError("it has gone"), "tls"), (RuntimeError("no thread"), "limit")])
def test_a_client_that_cannot_be_served_is_counted(
    fault: Exception, reason: str, serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise fault

    server = serve()
    monkeypatch.setattr(server, "_certificates", "there are some")
    monkeypatch.setattr(peer_server, "_encrypted", refuse)
    with connected(server) as client:
        assert client.recv(1) == b""
    assert server.dropped == {reason: 1}
    assert [each.levelname for each in caplog.records if each.levelname == "ERROR"] == ["ERROR"] * (reason == "limit")


def test_there_are_no_more_clients_than_threads_for_them(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_server, "MOST_CLIENTS", 2)
    server = serve()
    with connected(server), connected(server):
        until(lambda: len(server.deadlines) == 2)
        with connected(server) as third:
            assert third.recv(1) == b""
        assert server.dropped["limit"] == 1
    until(lambda: not server.deadlines)
    session = session_of(server)
    assert session.call(b"PING", deadline=soon()) == b"PONG"
    session.close()


def test_tls(prefiller: Stack, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, private = self_signed(tmp_path)
    server = serve(f"valkeys://127.0.0.1:{{port}}?cert_file={certificate}&key_file={private}")
    session = session_of(server, f"&ca_file={certificate}")
    try:
        assert session.lengths([address(prefiller.scope.digest, KEYS[0])], soon()) == [VALUE]
    finally:
        session.close()
    with connected(server) as client, contextlib.suppress(ConnectionError):
        client.sendall(b"*1\r\n$4\r\nPING\r\n")  # not encrypted
        assert b"PONG" not in client.recv(100)
    until(lambda: server.dropped == {"tls": 1})
    connected(server).close()  # leaves by itself
    monkeypatch.setattr(peer_server, "LOGIN", 0.2)
    monkeypatch.setattr(peer_server, "_LATE_SECONDS", 0.05)
    until(lambda: not server.deadlines)
    with connected(server) as client:  # no handshake at all
        assert client.recv(1) == b""
    assert server.dropped == {"tls": 1, "late": 1}
    server = serve(f"valkeys://127.0.0.1:{{port}}?cert_file={certificate}&key_file={private}&ca_file={certificate}")
    with pytest.raises(RemoteError):  # a client without a certificate
        session_of(server, f"&ca_file={certificate}").call(b"PING", deadline=soon())
    until(lambda: server.dropped == {"tls": 1})
    with pytest.raises(ConfigError, match="cannot be used"):
        serve(f"valkeys://127.0.0.1:{{port}}?cert_file={tmp_path}/none&key_file={private}")


def test_other_weights_are_not_served_under_an_old_name(prefiller: Stack, serve: Serve) -> None:
    """They have changed between a question and a read."""
    names = iter([prefiller.scope.digest])
    assert prefiller.host is not None
    source = TierSource(prefiller.runtime, prefiller.host, lambda: next(names, bytes(32)))
    name = address(prefiller.scope.digest, KEYS[0])
    assert source.lengths([name]) == [VALUE]
    with source.leased([name]) as (value,):
        assert value is None


@pytest.mark.parametrize("where", ["host", "file"])
def test_a_read_that_fails_keeps_no_slot(
    where: str, prefiller: Stack, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runtime raises at the end of the batch that has taken the slots, or has ordered the read of a file."""
    assert prefiller.runtime.flush(TIMEOUT)
    if where == "file":
        with prefiller.runtime.batch() as cache:
            assert cache.discard([KEYS[0]], HOST) == 1
    until(lambda: not jobs_of(prefiller))
    faults: list[OSError] = []
    pump = prefiller.runtime._pump

    def faulty(**options: bool) -> bool:
        done = pump(**options)
        if faults and options:  # of the batch: in the background thread it would disable the tiers
            raise faults.pop()
        return done

    assert prefiller.host is not None
    source = TierSource(prefiller.runtime, prefiller.host, lambda: prefiller.scope.digest)
    monkeypatch.setattr(prefiller.runtime, "_pump", faulty)
    faults.append(OSError("a mover"))
    with pytest.raises(OSError, match="a mover"), source.leased([address(prefiller.scope.digest, KEYS[0])]):
        pass
    assert not faults

    def is_free() -> bool:
        prefiller.runtime.pump()
        with prefiller.runtime.locked() as cache:
            return not (cache.jobs_in_flight or cache.leases)

    until(is_free)
    with prefiller.runtime.locked() as cache:
        cache.check_integrity()


def test_what_was_sent_to_a_client_that_leaves_is_counted(
    prefiller: Stack, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_server, "_SEND_BYTES", 1)  # each value at once
    server = serve()
    server._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # of clients, too
    name = address(prefiller.scope.digest, KEYS[0])
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", server.settings.port))
        client.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(name), name) * 160)
        received(client, 3 * len(b"$%d\r\n%b\r\n" % (VALUE, bytes(VALUE))))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    until(lambda: not server.deadlines)
    assert 3 <= server.answers["read", "present"] < 160
    assert 3 * VALUE <= server.sent_bytes < 160 * VALUE
    assert jobs_of(prefiller) == 0


def test_a_file_without_room_above_is_absent(prefiller: Stack, serve: Serve) -> None:
    assert prefiller.runtime.flush(TIMEOUT)
    assert prefiller.host is not None
    source = TierSource(prefiller.runtime, prefiller.host, lambda: prefiller.scope.digest)
    with prefiller.runtime.batch() as cache:
        assert cache.discard([KEYS[2]], HOST) == 1
        leased = [bytes([turn]) * 32 for turn in range(64)]
        blocks = cache.store({0: GroupKeys(leased)})[0]  # slots that the engine fills itself, and does not
        assert blocks.job is not None
    with source.leased([address(prefiller.scope.digest, KEYS[2])]) as (value,):
        assert value is None
    with prefiller.runtime.batch() as cache:
        cache.release(blocks.job)
    with source.leased([address(prefiller.scope.digest, KEYS[2])]) as (value,):
        assert value is not None


def test_reads_of_peers_are_no_requests(prefiller: Stack, serve: Serve) -> None:
    with prefiller.runtime.locked() as cache:
        before = cache.counters.hits.copy()
    session = session_of(serve())
    for key in KEYS[:3]:
        session.call(b"GET", address(prefiller.scope.digest, key), deadline=soon())
    session.close()
    with prefiller.runtime.locked() as cache:
        assert cache.counters.hits == before
    until(lambda: not jobs_of(prefiller))


def test_engines_that_cannot_serve_refuse_to(prefiller: Stack) -> None:
    for setting in ({"serve": "valkey://127.0.0.1:7007"}, {"peer_networks": "10.0.0.0/8"}):
        with pytest.raises(ConfigError, match="are for vLLM"):
            opened(rows_of(3), **setting)


def test_nothing_of_peers_is_imported_without_them() -> None:
    code = (
        "import sys, longshore.runtime.stack, longshore.engines.transformers\n"
        "assert not [name for name in sys.modules if 'peer' in name and name.startswith('longshore')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


class Peers:
    """A `PeerTier` over memory of its own."""

    def __init__(self, namespace: bytes, options: str = "") -> None:
        self.arena = Arena(4096, ArenaSettings(numa_node=None))
        self.tier = PeerTier(
            parse_url(f"valkey://peer?{PATIENT}{options}"),
            ["127.0.0.0/8"],
            arena=self.arena,
            image_bytes=4096,
            namespace=namespace,
        )

    def ask(self, keys: Sequence[bytes]) -> tuple[bool, ...] | None:
        ticket = self.tier.ask(keys, 0, soon())
        answers: dict[int, tuple[bool, ...] | None] = {}
        until(lambda: answers.update(self.tier.answers()) is None and ticket in answers)
        return answers[ticket]

    def read(self, key: bytes) -> Status:
        ticket = self.tier.submit([TierOp(Op.READ, BY_KEY, key, None, 0, 4096, 0)], soon())
        results: dict[int, Status] = {}

        def is_over() -> bool:
            results.update((each.ticket, each.statuses[0]) for each in self.tier.poll())
            return ticket in results

        until(is_over)
        return results[ticket]


@pytest.fixture
def peers(prefiller: Stack) -> Iterator[Peers]:
    made = Peers(prefiller.scope.digest)
    yield made
    made.tier.close()
    made.arena.close()


def test_keys_are_asked_of_the_peer_that_was_named(prefiller: Stack, serve: Serve, peers: Peers) -> None:
    server = serve(coming={KEYS[3]})
    assert peers.ask(KEYS) is None  # nobody was named
    peers.tier.route(KEYS, ClusterNode("127.0.0.1", server.settings.port))
    assert peers.ask(KEYS) == (True, True, True, False)
    assert peers.tier.are_coming(KEYS[3:])
    assert not peers.tier.are_coming(KEYS[:3])
    assert peers.read(KEYS[1]) is Status.OK
    assert peers.arena.view(0, 4096) == rows_of(1)[1].numpy().tobytes()
    server.close()
    assert peers.ask(KEYS) is None
    assert not peers.tier.are_coming(KEYS)  # a peer that has died is not waited for


def test_a_peer_that_hangs_holds_up_no_other(prefiller: Stack, serve: Serve, peers: Peers) -> None:
    server = serve()
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()  # connections are made, and nothing is ever answered
        peers.tier.route(KEYS[:1], ClusterNode("127.0.0.1", deaf.getsockname()[1]))
        peers.tier.route(KEYS[1:], ClusterNode("127.0.0.1", server.settings.port))
        waits = peers.tier.ask(KEYS[:1], 0, soon())
        assert peers.ask(KEYS[1:3]) == (True, True)
        assert peers.read(KEYS[1]) is Status.OK
        assert waits not in dict(peers.tier.answers())  # it is still being asked


def test_the_number_of_peers_is_bounded(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longshore.tiers.remote.peers.MOST_PEERS", 2)
    monkeypatch.setattr("longshore.tiers.remote.cluster._IDLE_SECONDS", 0.2)
    ports = [free_port() for _ in range(3)]
    for port in ports:
        peers.tier.route(KEYS[:1], ClusterNode("127.0.0.1", port))
        assert peers.ask(KEYS[:1]) is None
    assert len(peers.tier._nodes) == 2
    until(lambda: not peers.tier._nodes)  # connections that nobody uses are closed


def test_a_slot_is_not_written_while_it_is_sent(prefiller: Stack, serve: Serve) -> None:
    """A client that does not read: the chunk cannot be evicted from its slot meanwhile, and can afterwards."""
    assert prefiller.host is not None
    source = TierSource(prefiller.runtime, prefiller.host, lambda: prefiller.scope.digest)
    name = address(prefiller.scope.digest, KEYS[0])
    with source.leased([name]) as (value,):
        assert value is not None
        before = bytes(value[1])
        with prefiller.runtime.batch() as cache:
            cache.reset()
            assert cache.jobs_in_flight
        for turn in range(8):  # as many as there are slots for
            with prefiller.runtime.batch() as cache:
                cache.store({0: GroupKeys([bytes([turn]) * 32])}, {0: [turn]})
            prefiller.runtime.wait_idle(1.0)
        assert bytes(value[1]) == before
    with prefiller.runtime.locked() as cache:
        cache.check_integrity()


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ({"host": "10.0.0.1", "port": 7007}, ""),
        ({"host": "10.0.0.1", "port": 0}, "expected a peer as host"),
        ({"host": "10.0.0.1", "port": True}, "expected a peer as host"),
        ({"host": "10.0.0.1"}, "expected a peer as host"),
        ("10.0.0.1:7007", "expected a peer as host"),
        ({"host": "metadata.internal", "port": 80}, "as an IP address"),
        ({"host": "169.254.169.254", "port": 80}, "is in none of the networks"),
        ({"host": "0.0.0.0", "port": 80}, "of one machine"),  # noqa: S104
        ({"host": "::ffff:169.254.169.254", "port": 80}, "is in none of the networks"),
    ],
)
def test_a_request_names_peers_of_known_networks_only(said: object, problem: str) -> None:
    from ipaddress import ip_network

    networks = [ip_network("10.0.0.0/8")]
    if not problem:
        assert parse_peer(said, networks) == ClusterNode("10.0.0.1", 7007)
        return
    with pytest.raises(HintError, match=problem):
        parse_peer(said, networks)
