"""`longshore bench remote`: block images to a store that replicas share, and back.

    get, put/SIZE            64 images as one batch, through the whole tier, with checksums, beside plain TCP: as many
                             bytes through a socket, without names, answers or checksums (a directory: plain files)
    get, put-cpu/SIZE        the client's CPU seconds per GB, beside those of plain TCP
    get, put-clients/SIZE    beside the better of redis-py (hiredis) and valkey-py (libvalkey), a pipeline a batch
    server-cpu/SIZE          the server's CPU seconds per GB read, beside one GET at a time
    checksum/SIZE            checksums alone, beside a copy of the same bytes
    probe/SIZE               which of 512 keys are there, beside the better client's pipeline
    late/probe, fetch        how long a request of a stopped server takes, 99th percentile, beside its deadline
    back/stopped             from the server's return to its use, beside two seconds

Sides take turns, in another order each time, and each measurement has connections of its own, after a batch that is not
measured: the kernel's state of one connection (windows, congestion control) may double its CPU time for all its life.
Servers are started on this machine and keep nothing on disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import math
import multiprocessing
import os
import shutil
import signal
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from longshore.bench.harness import Case, Seconds, chosen, compare, duration, medians, rate, timed
from longshore.boundary import Status
from longshore.checksums import digest
from longshore.config import parse_size
from longshore.errors import BenchError, with_extra
from longshore.testing.local_server import LocalServer
from longshore.tiers.arena import Arena
from longshore.tiers.base import BY_KEY, Op, TierOp
from longshore.tiers.remote import RemoteTier

SIZES = ("256KiB", "2MiB")
IMAGES = 64
"""In one batch."""

PROBED = 512
_KINDS = ("get", "put")
_SERVERS_ONLY = ("get-clients", "put-clients", "server-cpu")
_BY_SIZE = ("get", "get-cpu", "get-clients", "put", "put-cpu", "put-clients", "server-cpu", "checksum", "probe")
_AWAY = ("late/probe", "late/fetch", "back/stopped")
NAMES = (*(f"{kind}/{size}" for size in SIZES for kind in _BY_SIZE), *_AWAY)
_PATIENCE = 60.0
_PROBES, _FETCHES = 60, 8
_PATIENT = "probe_timeout=5s&fetch_timeout=60s&write_timeout=60s"
"""Deadlines that a busy machine does not miss: they have no effect on what is measured."""


def names_for(server: str) -> list[str]:
    """The cases that there are for `valkey`, `redis` or `dir`."""
    if server != "dir":
        return list(NAMES)
    return [name for name in NAMES if name not in _AWAY and name.split("/")[0] not in _SERVERS_ONLY]


def run(server: str, parent: Path, *, repeats: int = 9, only: Sequence[str] = ()) -> Iterator[Case]:
    """The cases of `names_for(server)`; a directory lies in `parent`, and is removed at the end."""
    names = chosen(names_for(server), only)
    scratch = Path(tempfile.mkdtemp(prefix="longshore-bench-", dir=parent))
    try:
        with contextlib.ExitStack() as undo:
            running = None if server == "dir" else undo.enter_context(LocalServer(server, scratch))
            for size in SIZES:
                kinds = [kind for kind in _BY_SIZE if f"{kind}/{size}" in names]
                if kinds:
                    yield from _of_size(size, kinds, running, scratch, repeats)
            away = [name for name in names if name in _AWAY]
            if running is not None and away:
                yield from _away(running, away)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _of_size(
    size: str, kinds: Sequence[str], server: LocalServer | None, scratch: Path, repeats: int
) -> Iterator[Case]:
    with contextlib.ExitStack() as undo:
        images = RemoteImages(parse_size(size))
        undo.callback(images.arena.close)
        ours = MeasuredTier(images, server, scratch)
        undo.callback(ours.close)
        plain: RemoteSide = PlainTcp(images) if server is not None else PlainFiles(images, scratch / f"plain-{size}")
        undo.callback(plain.close)
        clients: list[RemoteSide] = []
        if server is not None:
            clients = [PackagedClient(images, server, name) for name in ("redis", "valkey") if _installed(name)]
            for client in clients:
                undo.callback(client.close)
        empty = ours.empty
        for kind in _KINDS:
            if kind in kinds or f"{kind}-cpu" in kinds or f"{kind}-clients" in kinds:
                yield from _moved(kind, size, kinds, [ours, plain, *clients], images, repeats, empty)
        ours.put()
        if "server-cpu" in kinds and server is not None:
            yield _server_cpu(size, ours, server, images, repeats)
        if "checksum" in kinds:
            yield _checksum(size, images, repeats)
        if "probe" in kinds:
            yield _probe(size, ours, clients, repeats)


def _moved(
    kind: str,
    size: str,
    kinds: Sequence[str],
    sides: Sequence[RemoteSide],
    images: RemoteImages,
    repeats: int,
    empty: Callable[[], None],
) -> Iterator[Case]:
    """One kind of movement by all sides: rates, CPU time, and the better client."""
    cpu: list[list[float]] = [[] for _ in sides]

    def measured(index: int) -> Callable[[], float]:
        side = sides[index]

        def once() -> float:
            side.reconnect()
            empty()
            side.put()
            if kind == "get":
                side.get()
            else:
                empty()
            call = side.get if kind == "get" else side.put
            used, begun = time.process_time(), time.perf_counter()
            call()
            seconds = time.perf_counter() - begun
            cpu[index].append(time.process_time() - used)
            return seconds

        return once

    taken = medians([measured(index) for index in range(len(sides))], repeats=repeats)
    plain = sides[1]
    used = [statistics.median(each) / images.nbytes * 1e9 for each in cpu]
    if kind in kinds:
        yield rate(f"{kind}/{size}", Seconds(taken[0], taken[1]), plain.name, images.nbytes)
    if f"{kind}-cpu" in kinds:
        yield Case(f"{kind}-cpu/{size}", used[0], "s/GB", plain.name, used[1], used[1] / used[0])
    if f"{kind}-clients" in kinds:
        if len(sides) == 2:
            raise BenchError(f"no client to compare with: {with_extra('bench')}")
        best = min(range(2, len(sides)), key=lambda index: taken[index])
        yield rate(f"{kind}-clients/{size}", Seconds(taken[0], taken[best]), sides[best].name, images.nbytes)


def _server_cpu(size: str, ours: MeasuredTier, server: LocalServer, images: RemoteImages, repeats: int) -> Case:
    """What a batch costs the server, and the same values one by one."""
    single = MeasuredTier(images, server, Path(), options=f"{_PATIENT}&in_flight=1", namespace=ours.namespace)
    try:

        def used(side: MeasuredTier) -> float:
            before = _cpu_of(server.pid)
            side.get()
            return _cpu_of(server.pid) - before

        taken = medians([lambda: used(ours), lambda: used(single)], repeats=repeats)
    finally:
        single.close()
    batch, alone = (seconds / images.nbytes * 1e9 for seconds in taken)
    return Case(f"server-cpu/{size}", batch, "s/GB", "one GET at a time", alone, alone / batch)


def _checksum(size: str, images: RemoteImages, repeats: int) -> Case:
    other = np.empty(images.image_bytes, np.uint8)

    def copy() -> None:
        for index in range(IMAGES):
            other[:] = images.written(index)

    check = timed(lambda: [digest(images.written(index)) for index in range(IMAGES)])
    taken = compare(check, timed(copy), repeats=repeats)
    return rate(f"checksum/{size}", taken, "a copy in memory", images.nbytes)


def _probe(size: str, ours: MeasuredTier, clients: Sequence[RemoteSide], repeats: int) -> Case:
    def median_of(call: Callable[[], object]) -> Callable[[], float]:
        return lambda: medians([timed(call)], repeats=20, warm_ups=0)[0]

    others = [client for client in clients if isinstance(client, PackagedClient)]
    taken = medians([median_of(ours.probe), *(median_of(each.probe) for each in others)], repeats=repeats)
    if not others:
        return duration(f"probe/{size}", Seconds(taken[0], taken[0]), "itself")
    best = min(range(len(others)), key=lambda index: taken[1 + index])
    return duration(f"probe/{size}", Seconds(taken[0], taken[1 + best]), others[best].name)


def _away(server: LocalServer, names: Sequence[str]) -> Iterator[Case]:
    """How long requests of a stopped server take, at the default deadlines, and when it is used again."""
    images = RemoteImages(1 << 16)
    try:
        for name in names:
            failures = 3 if name == "back/stopped" else 10**9
            ours = MeasuredTier(images, server, Path(), options="", failures=failures)
            try:
                ours.put()
                os.kill(server.pid, signal.SIGSTOP)
                yield _late(name, ours, server)
            finally:
                os.kill(server.pid, signal.SIGCONT)
                ours.close()
    finally:
        images.arena.close()


def _late(name: str, ours: MeasuredTier, server: LocalServer) -> Case:
    if name == "back/stopped":
        while not ours.tier.is_away:
            ours.probe(expected=None)
        os.kill(server.pid, signal.SIGCONT)
        begun = time.perf_counter()
        while ours.tier.is_away:
            time.sleep(0.002)
        ours.probe()
        seconds = time.perf_counter() - begun
        return Case(name, seconds, "s", "two seconds", 2.0, 2.0 / seconds)
    settings = ours.tier.settings
    is_probe = name == "late/probe"
    limit = settings.probe_timeout if is_probe else settings.fetch_timeout
    seconds_taken = []
    for _ in range(_PROBES if is_probe else _FETCHES):
        begun = time.perf_counter()
        if is_probe:
            ours.probe(expected=None)
        else:
            ours.run(Op.READ, {Status.DEADLINE, Status.AWAY}, 1)
        seconds_taken.append(time.perf_counter() - begun)
    worst = float(np.percentile(seconds_taken, 99)) * 1e3
    return Case(name, worst, "ms", "its deadline", limit * 1e3, limit * 1e3 / worst)


# ---------------------------------------------------------------------- sides


class RemoteImages:
    """`IMAGES` images to write, as many places to read into, and their keys."""

    def __init__(self, image_bytes: int) -> None:
        self.image_bytes = image_bytes
        self.nbytes = IMAGES * image_bytes
        self.arena = Arena(2 * self.nbytes)
        self.arena.array[: self.nbytes] = np.random.default_rng(0).integers(0, 256, self.nbytes, np.uint8)
        self.keys = [hashlib.sha256(b"%d" % index).digest() for index in range(PROBED)]

    def written(self, index: int) -> memoryview:
        """An image to write."""
        return self.arena.view(index * self.image_bytes, self.image_bytes)

    def read(self, index: int) -> memoryview:
        """Where it is read to."""
        return self.arena.view(self.nbytes + index * self.image_bytes, self.image_bytes)


class RemoteSide(Protocol):
    """Somebody who moves all images once. `name` goes into the report."""

    name: str

    def get(self) -> None:
        """Read all images."""

    def put(self) -> None:
        """Write all images."""

    def reconnect(self) -> None:
        """Move the next images over new connections."""

    def close(self) -> None:
        """Give back connections and processes."""


class MeasuredTier:
    """`RemoteTier` as it is used: a batch is submitted, and collected when it has ended."""

    name = "the remote tier"

    def __init__(
        self,
        images: RemoteImages,
        server: LocalServer | None,
        scratch: Path,
        *,
        options: str = _PATIENT,
        namespace: bytes | None = None,
        failures: int = 3,
    ) -> None:
        self._directory = scratch / "shared"
        if server is None:
            self._directory.mkdir(exist_ok=True)
        where = f"file://{self._directory}" if server is None else f"valkey://127.0.0.1:{server.port}"
        self.namespace = namespace or os.urandom(32)
        self._images = images
        self._server = server
        self._url = f"{where}?{options}"
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
        tier.call_at_end(self._done.set)
        return tier

    def get(self) -> None:
        """Read all images, verified."""
        self.run(Op.READ, {Status.OK}, IMAGES)

    def put(self) -> None:
        """Write all images."""
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
        """Remove everything from the store."""
        if self._server is not None:
            self._server.command(b"FLUSHALL", b"SYNC")
        else:
            shutil.rmtree(self._directory / "ls1", ignore_errors=True)

    def reconnect(self) -> None:
        """Open the tier anew."""
        self.tier.close()
        self.tier = self._open()

    def close(self) -> None:
        """Close the tier."""
        self.tier.close()

    def _wait(self, collect: Callable[[], Any]) -> Any:
        give_up = time.monotonic() + _PATIENCE
        while not (found := collect()):
            self._done.wait(0.005)
            self._done.clear()
            if time.monotonic() > give_up:
                raise BenchError("the remote tier does not answer")
        return found


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
        """Have the images sent."""
        self._sock.sendall(b"g")
        for index in range(IMAGES):
            _receive(self._sock, self._images.read(index))

    def put(self) -> None:
        """Send the images, and wait until they were received."""
        self._sock.sendall(b"p")
        for index in range(IMAGES):
            self._sock.sendall(self._images.written(index))
        self._sock.recv(1)

    def reconnect(self) -> None:
        """Connect again."""
        self._sock.close()
        self._sock = self._connect()

    def close(self) -> None:
        """End the process."""
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
        """Read all files."""
        for index in range(IMAGES):
            with (self._directory / str(index)).open("rb", buffering=0) as file:
                file.readinto(self._images.read(index))

    def put(self) -> None:
        """Write all files anew."""
        for index in range(IMAGES):
            temporary = self._directory / f"{index}.tmp"
            with temporary.open("wb", buffering=0) as file:
                file.write(self._images.written(index))
            temporary.rename(self._directory / str(index))

    def reconnect(self) -> None:
        """There is no connection."""

    def close(self) -> None:
        """The directory is removed by whoever made it."""


class PackagedClient:
    """redis-py or valkey-py with its parser in C: one pipeline for the batch, values copied to where they belong."""

    def __init__(self, images: RemoteImages, server: LocalServer, package: str) -> None:
        self.name = {"redis": "redis-py (hiredis)", "valkey": "valkey-py (libvalkey)"}[package]
        self._images = images
        module = importlib.import_module(package)
        kind = module.Redis if package == "redis" else module.Valkey
        self._client = kind(host="127.0.0.1", port=server.port)

    def get(self) -> None:
        """Read all values, into the arena."""
        pipeline = self._client.pipeline(transaction=False)
        for index in range(IMAGES):
            pipeline.get(self._images.keys[index])
        for index, value in enumerate(pipeline.execute()):
            self._images.read(index)[:] = value

    def put(self) -> None:
        """Write all values."""
        pipeline = self._client.pipeline(transaction=False)
        for index in range(IMAGES):
            pipeline.set(self._images.keys[index], self._images.written(index))
        pipeline.execute()

    def probe(self) -> None:
        """Ask for the length of all values."""
        pipeline = self._client.pipeline(transaction=False)
        for key in self._images.keys:
            pipeline.strlen(key)
        pipeline.execute()

    def reconnect(self) -> None:
        """Close the connection; the client connects again with its next command."""
        self._client.close()

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


def _installed(package: str) -> bool:
    parser = {"redis": "hiredis", "valkey": "libvalkey"}[package]
    return all(importlib.util.find_spec(each) is not None for each in (package, parser))


def _cpu_of(pid: int) -> float:
    """CPU seconds that a process has used, in all its threads."""
    stats = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(each.read_text().split()[0]) for each in stats) / 1e9
