"""Peers: what the tiers of one engine have, another one reads, by the client of any Valkey server."""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from longshore.boundary import HOST
from longshore.cache import GroupKeys, Until
from longshore.config import Config
from longshore.errors import ConfigError, HintError
from longshore.keys import Scope
from longshore.layout import from_rows
from longshore.runtime.peer_server import PeerServer, TierSource
from longshore.runtime.stack import Stack, open_stack
from longshore.tiers.file import capacity_for
from longshore.tiers.remote.cluster import ClusterNode
from longshore.tiers.remote.format import HEADER_BYTES, address
from longshore.tiers.remote.peers import parse_peer
from longshore.tiers.remote.resp import RespSession, RespStore
from longshore.tiers.remote.settings import parse_url
from longshore.transfer import CpuDevice

PATIENCE = 60.0
VALUE = HEADER_BYTES + 4096
KEYS = [hashlib.sha256(bytes([i])).digest() for i in range(4)]
PATIENT = "probe_timeout=20s&fetch_timeout=20s&connect_timeout=5s"


def opened(rows: torch.Tensor, **settings: object) -> Stack:
    layout = from_rows(rows, pages_per_block=4, block_size=16)
    scope = Scope(model="m", weights="w", dtype="d", layout=layout.fingerprint, block_size=16)
    config = Config.make(host_size=16 * layout.image_bytes, gate=False, **settings)
    return open_stack(config, layout, scope, CpuDevice())


def rows_of(seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (8, 4 * 1024), dtype=torch.uint8, generator=torch.manual_seed(seed))


def stored(stack: Stack, count: int = 3) -> None:
    with stack.runtime.control() as cache:
        job = cache.store({0: GroupKeys(KEYS[:count])}, {0: range(count)})[0].job
    assert job is not None
    assert stack.runtime.wait_ended([job], PATIENCE)


@pytest.fixture
def prefiller(tmp_path: Path) -> Iterator[Stack]:
    files = {"file_path": tmp_path / "tier", "file_size": capacity_for(8, 8192)}
    with opened(rows_of(1), **files) as stack:
        stored(stack)
        yield stack


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


Serve = Callable[..., PeerServer]


@pytest.fixture
def serve(prefiller: Stack) -> Iterator[Serve]:
    made: list[PeerServer] = []

    def start(url: str = "valkey://127.0.0.1:{port}", coming: set[bytes] = frozenset()) -> PeerServer:  # type: ignore[assignment]
        assert prefiller.host is not None
        source = TierSource(prefiller.runtime, prefiller.host, lambda: prefiller.scope.root, coming.__contains__)
        made.append(PeerServer(url.replace("{port}", str(free_port())), source))
        return made[-1]

    yield start
    for server in made:
        server.close()


def session_of(server: PeerServer, options: str = "") -> RespSession:
    host = server.settings.host.strip("[]")
    scheme = server.settings.scheme
    settings = parse_url(f"{scheme}://{host}:{server.settings.port}?{PATIENT}{options}")
    return RespStore(settings, time.monotonic, 8192).connect()


def soon() -> float:
    return time.monotonic() + PATIENCE


def test_another_engine_reads_what_the_tiers_of_one_have(prefiller: Stack, serve: Serve) -> None:
    """By its setting `remote` alone. Some chunks come from host memory, the others from files."""
    server = serve()
    assert prefiller.runtime.flush(PATIENCE)
    with prefiller.runtime.control() as cache:
        assert cache.discard([KEYS[2]], HOST) == 1
    with opened(rows_of(2), remote=f"valkey://127.0.0.1:{server.settings.port}?{PATIENT}") as decoder:
        found = 0
        give_up = soon()
        while found < 3 and time.monotonic() < give_up:
            with decoder.runtime.control() as cache:
                looked = cache.lookup({0: GroupKeys(KEYS[:3])}, decoder.runtime.clock(), until=Until.NOTHING)
                cache.prefetch({0: GroupKeys(KEYS[:3])}, decoder.runtime.clock())
                found = looked.chunks
            time.sleep(0.01)
        assert found == 3
        with decoder.runtime.control() as cache:
            lease = cache.lookup({0: GroupKeys(KEYS[:3])}, decoder.runtime.clock()).lease
            assert lease is not None
            cache.load(lease, {0: range(3)})
        decoder.runtime.wait_over(lease)
        assert torch.equal(decoder_rows(decoder)[:3], rows_of(1)[:3])
        assert server.served == 3
    with prefiller.runtime.observe() as cache:
        cache.check_integrity()
        assert not cache.jobs_in_flight


def decoder_rows(stack: Stack) -> torch.Tensor:
    (tensor,) = {id(each): each for each in stack.layout.tensors}.values()
    return tensor


def test_what_is_computed_or_stored_is_coming(prefiller: Stack, serve: Serve) -> None:
    session = session_of(serve(coming={KEYS[3]}))
    names = [address(prefiller.scope.root, key) for key in (*KEYS, bytes(32))]
    try:
        assert session.lengths(names, soon()) == [VALUE] * 3 + [COMING, 0]
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
    name = address(prefiller.scope.root, KEYS[0])
    with pytest.raises(Exception, match="NOAUTH"):
        RespStore(here, time.monotonic, 8192).connect().lengths([name], soon())
    wrong = parse_url(f"valkey://127.0.0.1:{server.settings.port}?{PATIENT}&password_file={tmp_path}/wrong")
    with pytest.raises(Exception, match="WRONGPASS"):
        RespStore(wrong, time.monotonic, 8192).connect()
    right = parse_url(f"valkey://127.0.0.1:{server.settings.port}?{PATIENT}&password_file={tmp_path}/right")
    session = RespStore(right, time.monotonic, 8192).connect()
    assert session.lengths([name], soon()) == [VALUE]
    with pytest.raises(Exception, match="READONLY"):
        session.call(b"SET", name, b"x", deadline=soon())
    session.close()
    assert server.refused == 1


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]"])  # noqa: S104
def test_all_addresses_need_a_password(serve: Serve, host: str) -> None:
    with pytest.raises(ConfigError, match="a password is needed"):
        serve(f"valkey://{host}:{{port}}")


@pytest.mark.parametrize(
    "said",
    [b"*1\r\n$9999\r\n", b"*99\r\n", b"GET x\r\n", b"*2\r\n$3\r\nGETxx", b"\0" * 64, b"*2\r\n$3\r\nGET\r\n$2\r\nabcd"],
)
def test_garbage_ends_the_connection_and_nothing_else(serve: Serve, said: bytes) -> None:
    server = serve()
    with socket.create_connection(("127.0.0.1", server.settings.port), timeout=PATIENCE) as client:
        client.sendall(said)
        assert client.recv(100) == b""
    session = session_of(server)
    assert session.call(b"PING", deadline=soon()) == b"PONG"
    session.close()


def test_a_slot_is_not_written_while_it_is_sent(prefiller: Stack, serve: Serve) -> None:
    """A client that does not read: the chunk cannot be evicted from its slot meanwhile, and can afterwards."""
    assert prefiller.host is not None
    source = TierSource(prefiller.runtime, prefiller.host, lambda: prefiller.scope.root)
    name = address(prefiller.scope.root, KEYS[0])
    with source.held(name) as value:
        assert value is not None
        before = bytes(value[1])
        with prefiller.runtime.control() as cache:
            cache.reset()
            assert cache.jobs_in_flight
        for turn in range(8):  # as many as there are slots for
            with prefiller.runtime.control() as cache:
                cache.store({0: GroupKeys([bytes([turn]) * 32])}, {0: [turn]})
            prefiller.runtime.wait_idle(1.0)
        assert bytes(value[1]) == before
    with prefiller.runtime.observe() as cache:
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
