"""Connections to servers over real sockets: slow readers, calls that hang, and what errors of servers say."""

import math
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from longshore.boundary import Status
from longshore.testing.tier_harness import key
from longshore.tiers.arena import Arena
from longshore.tiers.base import BY_KEY, Op, TierOp
from longshore.tiers.remote import RemoteTier
from longshore.tiers.remote.resp import RespSession
from longshore.tiers.remote.settings import RemoteSettings
from longshore.tiers.remote.stream import PlainStream
from longshore.tiers.remote.work import RemoteError

IMAGE = 4096


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        yield ours, theirs


def test_a_send_to_a_slow_reader_ends_by_its_deadline(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    done = threading.Event()

    def read_slowly() -> None:  # all of it would take 6 s
        while theirs.recv(1 << 15) and not done.wait(0.05):
            pass

    reader = threading.Thread(target=read_slowly)
    reader.start()
    stream = PlainStream(ours, time.monotonic)
    try:
        with pytest.raises(RemoteError) as late:
            stream.send([memoryview(bytearray(4 << 20))], time.monotonic() + 0.3)
    finally:
        done.set()
        stream.close()
        reader.join()
    assert late.value.status is Status.DEADLINE


def test_a_send_waits_for_room(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    value = bytes(range(256)) * (1 << 12)
    found = bytearray()

    def read() -> None:
        while len(found) < len(value) + 2:
            found.extend(theirs.recv(1 << 16))

    reader = threading.Thread(target=read)
    reader.start()
    PlainStream(ours, time.monotonic).send([memoryview(value), memoryview(b"\r\n")], time.monotonic() + 60)
    reader.join()
    assert found == value + b"\r\n"


class UnboundedStream(PlainStream):
    """A connection whose calls do not keep their deadline."""

    def receive_some(self, parts: list[memoryview], deadline: float, flags: int = 0) -> int:
        return super().receive_some(parts, math.inf, flags)


class UnboundedStore:
    """Connects to the other end of a socket pair."""

    threads = 1

    def __init__(self, settings: RemoteSettings, sock: socket.socket) -> None:
        self._settings, self._sock = settings, sock

    def connect(self) -> RespSession:
        return RespSession(self._settings, UnboundedStream(self._sock, time.monotonic), time.monotonic, IMAGE)


def test_close_ends_a_connection_that_hangs_and_every_operation_once(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    settings = RemoteSettings("valkey", "host", connect_timeout=0.1, fetch_timeout=0.1, write_timeout=0.1)
    tier = RemoteTier(
        settings, arena=Arena(IMAGE), image_bytes=IMAGE, namespace=bytes(32), store=UnboundedStore(settings, ours)
    )
    ticket = tier.submit([TierOp(Op.READ, BY_KEY, key(1), None, 0, IMAGE, 0)], math.inf)
    assert theirs.recv(4096).startswith(b"*2\r\n$3\r\nGET")
    tier.close()
    results = tier.poll()
    assert [(each.ticket, each.statuses) for each in results] == [(ticket, (Status.UNAVAILABLE,))]
    assert tier.poll() == []
    assert not any(thread.is_alive() for thread in tier._threads)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (b"NOPERM no permission", "the server answered NOPERM"),
        (b"ERR", "the server answered ERR"),
        (b"ERR\nFAKE 12:00 all is well", "the server answered an error"),
        (b"\x1b[2JERR no", "the server answered an error"),
        (b"hunter2 is not a command", "the server answered an error"),
        (b"E" * 900, "the server answered an error"),
        (b"", "the server answered an error"),
    ],
)
def test_of_a_server_s_error_only_its_code_is_repeated(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch, error: bytes, said: str
) -> None:
    ours, theirs = pair
    monkeypatch.setenv("LONGSHORE_REMOTE_PASSWORD", "secret")
    settings = RemoteSettings("valkey", "host")
    session = RespSession(settings, PlainStream(ours, time.monotonic), time.monotonic, IMAGE)
    theirs.sendall(b"-%b\r\n" % error * 3)
    for call in (
        lambda: session.check(time.monotonic() + 60),
        lambda: session.lengths([b"a"], time.monotonic() + 60),
        lambda: session.authenticate(settings, time.monotonic() + 60),
    ):
        with pytest.raises(RemoteError) as refused:
            call()
        assert str(refused.value).removesuffix(" to AUTH") == said
