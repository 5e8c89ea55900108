"""Who moves images in `longshore bench remote`: the tier, plain TCP, plain files, packaged clients, others' alone."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib
import math
import multiprocessing
import os
import shutil
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from longshore.bench.harness import SEED
from longshore.boundary import Status
from longshore.errors import BenchError
from longshore.testing.local_server import LocalMooncake, LocalS3, LocalServer
from longshore.tiers.arena import Arena, ArenaSettings
from longshore.tiers.base import BY_KEY, Op, TierOp
from longshore.tiers.remote import RemoteTier, parse_url
from longshore.tiers.remote.format import address

Server = LocalServer | LocalS3 | LocalMooncake

IMAGES = 64
"""In one batch."""

PROBED = 512
PATIENT = "probe_timeout=5s&fetch_timeout=60s&write_timeout=60s"
"""Deadlines that a busy machine does not miss: they have no effect on what is measured."""

_TIMEOUT = 60.0


class RemoteImages:
    """`IMAGES` images to write, as many places to read into, and their keys."""

    def __init__(self, image_bytes: int, *, shared: bool = False) -> None:
        """`shared`: for Mooncake, whose client is another process."""
        self.image_bytes = image_bytes
        self.nbytes = IMAGES * image_bytes
        self.arena = Arena(2 * self.nbytes, ArenaSettings(shared=shared))
        self.arena.array[: self.nbytes] = np.random.default_rng(SEED).integers(0, 256, self.nbytes, np.uint8)
        self.keys = [hashlib.sha256(b"%d" % index).digest() for index in range(PROBED)]

    def written(self, index: int) -> memoryview:
        return self.arena.view(index * self.image_bytes, self.image_bytes)

    def read(self, index: int) -> memoryview:
        return self.arena.view(self.nbytes + index * self.image_bytes, self.image_bytes)


class RemoteSide(Protocol):
    """Somebody who moves all images once. `name` goes into the report."""

    name: str

    def get(self) -> None: ...

    def put(self) -> None: ...

    def reconnect(self) -> None: ...

    def close(self) -> None: ...


class MeasuredTier:
    """`RemoteTier` as it is used: a batch is submitted, and collected when it has ended."""

    name = "the remote tier"

    def __init__(
        self,
        images: RemoteImages,
        server: Server | None,
        scratch: Path,
        *,
        options: str = PATIENT,
        namespace: bytes | None = None,
        failures: int = 3,
    ) -> None:
        self._directory = scratch / "shared"
        if server is None:
            self._directory.mkdir(exist_ok=True)
        where = f"file://{self._directory}" if server is None else f"valkey://127.0.0.1:{server.port}"
        self._url = server.url(options) if isinstance(server, LocalS3 | LocalMooncake) else f"{where}?{options}"
        self.namespace = namespace or os.urandom(32)
        self._images = images
        self._server = server
        self._failures = failures
        self._done = threading.Event()
        self.tier = self._open()

    def _open(self) -> RemoteTier:
        tier = RemoteTier(
            self._url,
            arena=self._images.arena,
            image_bytes=self._images.image_bytes,
            namespace=self.namespace,
            failures=self._failures,
        )
        tier.set_completion_callback(self._done.set)
        return tier

    def get(self) -> None:
        self.run(Op.READ, {Status.OK}, IMAGES)

    def put(self) -> None:
        self.run(Op.WRITE, {Status.OK}, IMAGES)

    def run(self, op: Op, expected: set[Status], count: int) -> None:
        """Move the first `count` images; raises `BenchError` unless they end as expected."""
        images, base = self._images, self._images.nbytes if op is Op.READ else 0
        keys, size = images.keys[:count], images.image_bytes
        batch = [TierOp(op, BY_KEY, key, None, base + index * size, size, 0) for index, key in enumerate(keys)]
        self.tier.submit(batch, math.inf)
        (result,) = self._wait(self.tier.poll)
        if not expected.issuperset(result.statuses):
            raise BenchError(f"expected {expected}, got {set(result.statuses)}")

    def probe(self, expected: int | None = IMAGES) -> None:
        """Ask for all keys; raises `BenchError` unless `expected` are there, or nothing is known."""
        self.tier.ask(self._images.keys, 0, math.inf)
        ((_, present),) = self._wait(self.tier.answers)
        if (None if present is None else sum(present)) != expected:
            raise BenchError(f"expected {expected} of the keys to be there, got {present}")

    def empty(self) -> None:
        """Remove everything from the store; what is in a bucket stays, under another namespace."""
        if isinstance(self._server, LocalS3):
            self.namespace = os.urandom(32)
            self.reconnect()
        elif isinstance(self._server, LocalMooncake):
            module = importlib.import_module("longshore.tiers.remote.mooncake")
            with module.open_session(parse_url(self._url)) as session:
                session.remove(self.namespace)
        elif self._server is not None:
            self._server.command(b"FLUSHALL", b"SYNC")
        else:
            shutil.rmtree(self._directory / "ls1", ignore_errors=True)

    def reconnect(self) -> None:
        if not isinstance(self._server, LocalMooncake):  # whose clients warm up for several batches, and live long
            self.tier.close()
            self.tier = self._open()

    def close(self) -> None:
        self.tier.close()

    def _wait(self, collect: Callable[[], Any]) -> Any:
        give_up = time.monotonic() + _TIMEOUT
        while not (found := collect()):
            self._done.wait(0.005)
            self._done.clear()
            if time.monotonic() > give_up:
                raise BenchError("the remote tier does not answer")
        return found


def plain_side(images: RemoteImages, server: Server | None, ours: MeasuredTier, directory: Path) -> RemoteSide:
    """The reference of most cases."""
    if isinstance(server, LocalMooncake):
        return BareMooncake(images, server, ours)
    if isinstance(server, LocalS3):
        return BareObstore(images, server, ours)
    return PlainFiles(images, directory) if server is None else PlainTcp(images)


class PlainTcp:
    """Another process that sends and receives as many bytes: `recv_into` and `sendall`, over loopback."""

    name = "plain TCP"

    def __init__(self, images: RemoteImages) -> None:
        self._images = images
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self._peer = context.Process(target=_plain_peer, args=(theirs, images.image_bytes), daemon=True)
        self._peer.start()
        theirs.close()
        self._port = ours.recv()
        self._sock = self._connect()

    def _connect(self) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self._port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    def get(self) -> None:
        self._sock.sendall(b"g")
        for index in range(IMAGES):
            _receive(self._sock, self._images.read(index))

    def put(self) -> None:
        self._sock.sendall(b"p")
        for index in range(IMAGES):
            self._sock.sendall(self._images.written(index))
        self._sock.recv(1)

    def reconnect(self) -> None:
        self._sock.close()
        self._sock = self._connect()

    def close(self) -> None:
        self._sock.close()
        self._peer.kill()
        self._peer.join()


def _plain_peer(pipe: Connection, image_bytes: int) -> None:
    memory = memoryview(bytearray(os.urandom(image_bytes)) * IMAGES)
    views = [memory[start : start + image_bytes] for start in range(0, len(memory), image_bytes)]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(listener.getsockname()[1])
        while True:
            sock, _ = listener.accept()
            with sock:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                _serve_plainly(sock, views)


def _serve_plainly(sock: socket.socket, views: Sequence[memoryview]) -> None:
    while order := sock.recv(1):
        for view in views:
            if order == b"g":
                sock.sendall(view)
            else:
                _receive(sock, view)
        if order == b"p":
            sock.sendall(b"k")


def _receive(sock: socket.socket, view: memoryview) -> None:
    while view:
        count = sock.recv_into(view)
        if not count:
            raise BenchError("the plain peer has ended")
        view = view[count:]


class PlainFiles:
    """A loop that writes a file for each image, and reads it."""

    name = "a plain loop"

    def __init__(self, images: RemoteImages, directory: Path) -> None:
        self._images = images
        self._directory = directory
        directory.mkdir()

    def get(self) -> None:
        for index in range(IMAGES):
            with (self._directory / str(index)).open("rb", buffering=0) as file:
                file.readinto(self._images.read(index))

    def put(self) -> None:
        for index in range(IMAGES):
            temporary = self._directory / f"{index}.tmp"
            with temporary.open("wb", buffering=0) as file:
                file.write(self._images.written(index))
            temporary.rename(self._directory / str(index))

    def reconnect(self) -> None: ...

    def close(self) -> None: ...


class BareObstore:
    """obstore with as many requests in flight, about the objects of `ours`: values stay in its memory, unverified."""

    name = "obstore alone"

    def __init__(self, images: RemoteImages, server: LocalS3, ours: MeasuredTier) -> None:
        self._images, self._ours = images, ours
        self._settings = parse_url(server.url(PATIENT))
        self._module = importlib.import_module("longshore.tiers.remote.s3")
        self.reconnect()

    def get(self) -> None:
        async def one(path: str) -> None:
            await (await self._client.get_async(path)).bytes_async()

        self._all(one, IMAGES, self._settings.requests)

    def put(self) -> None:
        left = iter(range(IMAGES))

        async def one(path: str) -> None:
            await self._client.put_async(path, self._images.written(next(left)), use_multipart=False)

        self._all(one, IMAGES, self._settings.requests)

    def probe(self) -> None:
        async def one(path: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                await self._client.head_async(path)

        self._all(one, PROBED, self._module.PROBES)

    def reconnect(self) -> None:
        self._client: Any = self._module.make_client(self._settings, _TIMEOUT)

    def close(self) -> None:
        del self._client

    def _all(self, one: Callable[[str], Awaitable[None]], count: int, in_flight: int) -> None:
        paths = iter([address(self._ours.namespace, key).decode() for key in self._images.keys[:count]])

        async def some() -> None:
            for path in paths:
                await one(path)

        async def everything() -> None:
            await asyncio.gather(*(some() for _ in range(in_flight)))

        asyncio.run(everything())


class BareMooncake:
    """Mooncake's client in this process, by its calls for batches: values without a header, unverified."""

    name = "Mooncake alone"

    def __init__(self, images: RemoteImages, server: LocalMooncake, ours: MeasuredTier) -> None:
        os.environ.setdefault("MC_TCP_ENABLE_CONNECTION_POOL", "1")  # as the tier sets it for its own
        self._client: Any = importlib.import_module("mooncake.store").MooncakeDistributedStore()
        self._images, self._ours = images, ours
        base = images.arena.array.ctypes.data
        code = self._client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", f"127.0.0.1:{server.port}")
        if code or self._client.register_buffer(base, images.arena.nbytes):
            raise BenchError(f"Mooncake's client cannot be set up: {code}")
        self._written = [base + index * images.image_bytes for index in range(IMAGES)]
        self._read = [each + images.nbytes for each in self._written]

    def get(self) -> None:
        found = self._client.batch_get_into(self._keys(IMAGES), self._read, [self._images.image_bytes] * IMAGES)
        if set(found) != {self._images.image_bytes}:
            raise BenchError(f"Mooncake reads with {set(found)}")

    def put(self) -> None:
        codes = self._client.batch_put_from(self._keys(IMAGES), self._written, [self._images.image_bytes] * IMAGES)
        if set(codes) != {0}:
            raise BenchError(f"Mooncake writes with {set(codes)}")

    def probe(self) -> None:
        self._client.batch_is_exist(self._keys(PROBED))

    def reconnect(self) -> None: ...

    def close(self) -> None:
        self._client.close()

    def _keys(self, count: int) -> list[str]:
        return [address(self._ours.namespace, key).decode() + ".plain" for key in self._images.keys[:count]]


PACKAGES = {"redis": "hiredis", "valkey": "libvalkey"}
"""Packages of clients, and of their parsers in C."""


class PackagedClient:
    """redis-py or valkey-py with its parser in C: one pipeline for the batch, values copied to where they belong."""

    def __init__(self, images: RemoteImages, server: LocalServer, package: str) -> None:
        self.name = f"{package}-py ({PACKAGES[package]})"
        self._images = images
        module = importlib.import_module(package)
        kind = module.Redis if package == "redis" else module.Valkey
        self._client = kind(host="127.0.0.1", port=server.port)

    def get(self) -> None:
        pipeline = self._client.pipeline(transaction=False)
        for index in range(IMAGES):
            pipeline.get(self._images.keys[index])
        for index, value in enumerate(pipeline.execute()):
            self._images.read(index)[:] = value

    def put(self) -> None:
        pipeline = self._client.pipeline(transaction=False)
        for index in range(IMAGES):
            pipeline.set(self._images.keys[index], self._images.written(index))
        pipeline.execute()

    def probe(self) -> None:
        pipeline = self._client.pipeline(transaction=False)
        for key in self._images.keys:
            pipeline.strlen(key)
        pipeline.execute()

    def reconnect(self) -> None:
        self._client.close()

    def close(self) -> None:
        self._client.close()
