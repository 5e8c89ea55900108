"""Engines that serve what their tiers have, and clients of them."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import time
from collections.abc import Callable

import torch

from longshore.cache import GroupKeys
from longshore.config import Config
from longshore.keys import Scope
from longshore.layout import from_rows
from longshore.runtime.peer_server import PeerServer
from longshore.runtime.stack import Stack, open_stack
from longshore.tiers.remote.format import HEADER_BYTES
from longshore.tiers.remote.resp import RespClient, RespSession
from longshore.tiers.remote.settings import parse_url
from longshore.transfer import CpuDevice

TIMEOUT = 60.0
VALUE = HEADER_BYTES + 4096
KEYS = [hashlib.sha256(bytes([i])).digest() for i in range(4)]
GETS = 8000
PATIENT = "probe_timeout=20s&fetch_timeout=20s&connect_timeout=5s"


def opened(rows: torch.Tensor, **settings: object) -> Stack:
    layout = from_rows(rows, pages_per_block=4, block_size=16)
    scope = Scope(model="m", weights="w", dtype="d", layout=layout.fingerprint, block_size=16)
    config = Config.make(host_size=16 * layout.image_bytes, gate=False, **settings)
    return open_stack(config, layout, scope, CpuDevice())


def rows_of(seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (8, 4 * 1024), dtype=torch.uint8, generator=torch.manual_seed(seed))


def stored(stack: Stack, count: int = 3) -> None:
    with stack.runtime.batch() as cache:
        job = cache.store({0: GroupKeys(KEYS[:count])}, {0: range(count)})[0].job
    assert job is not None
    assert stack.runtime.wait_jobs([job], TIMEOUT)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def session_of(server: PeerServer, options: str = "") -> RespSession:
    host = server.settings.host.strip("[]")
    scheme = server.settings.scheme
    settings = parse_url(f"{scheme}://{host}:{server.settings.port}?{PATIENT}{options}")
    return RespClient(settings, time.monotonic, 8192).connect()


def connected(server: PeerServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.settings.port), timeout=TIMEOUT)


def received(client: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count and (came := client.recv(count - len(found))):
        found += came
    return found


def get_without_reading(client: socket.socket, name: bytes) -> None:
    """Ask for more than the buffers of two sockets have room for, and read nothing of it."""
    client.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(name), name) * GETS)


def is_answered(client: socket.socket) -> bool:
    """Whether the first bytes of an answer have come."""
    with contextlib.suppress(BlockingIOError):
        return bool(client.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    return False


def until(what: Callable[[], bool]) -> None:
    give_up = soon()
    while not what():
        assert time.monotonic() < give_up
        time.sleep(0.005)


def jobs_of(stack: Stack) -> int:
    with stack.runtime.locked() as cache:
        return cache.jobs_in_flight


def soon() -> float:
    return time.monotonic() + TIMEOUT
