"""`longshore bench remote`: chunk images to a store that replicas share, and back.

    get, put/SIZE            64 images as one batch, through the whole tier, with checksums, beside plain TCP: as many
                             bytes through a socket, without names, answers or checksums (a directory: plain files;
                             S3: obstore alone, with as many requests in flight, which does not look before it writes;
                             Mooncake: its `batch_get_into` and `batch_put_from` in this process)
    get, put-cpu/SIZE        the client's CPU seconds per GB, beside those of plain TCP
    get, put-clients/SIZE    beside the better of redis-py (hiredis) and valkey-py (libvalkey), a pipeline a batch
    server-cpu/SIZE          the server's CPU seconds per GB read, beside one GET at a time
    checksum/SIZE            checksums alone, beside a copy of the same bytes
    probe/SIZE               which of 512 keys are there, beside the better client's pipeline, or `batch_is_exist`
    late/probe, fetch        how long a request of a stopped server takes, 99th percentile, beside its deadline
    back/stopped             from the server's return to its use, beside two seconds

Sides take turns, in another order each time, and each measurement has connections of its own, after a batch that is not
measured: the kernel's state of one connection (windows, congestion control) may double its CPU time for all its life.
Servers are started on this machine and keep nothing on disk.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from longshore.bench.harness import Case, Seconds, chosen, compare, duration, is_installed, medians, rate, timed
from longshore.bench.remote_sides import (
    IMAGES,
    PACKAGES,
    PATIENT,
    BareMooncake,
    BareObstore,
    MeasuredTier,
    PackagedClient,
    RemoteImages,
    RemoteSide,
    Server,
    plain_side,
)
from longshore.boundary import Status
from longshore.checksums import digest
from longshore.config import parse_size
from longshore.errors import BenchError, with_extra
from longshore.testing.local_server import LocalMooncake, LocalS3, LocalServer
from longshore.tiers.base import Op

SIZES = ("256KiB", "2MiB")
_KINDS = ("get", "put")
_SERVERS_ONLY = ("get-clients", "put-clients", "server-cpu")
_BY_SIZE = ("get", "get-cpu", "get-clients", "put", "put-cpu", "put-clients", "server-cpu", "checksum", "probe")
_AWAY = ("late/probe", "late/fetch", "back/stopped")
NAMES = (*(f"{kind}/{size}" for size in SIZES for kind in _BY_SIZE), *_AWAY)
_PROBES, _FETCHES = 60, 8


def names_for(server: str) -> list[str]:
    """The cases that there are for `valkey`, `redis`, `s3`, `mooncake` or `dir`."""
    without = {
        "dir": (*_AWAY, *_SERVERS_ONLY),
        "s3": _SERVERS_ONLY,
        "mooncake": _SERVERS_ONLY,
    }.get(server, ())
    return [name for name in NAMES if name not in without and name.split("/")[0] not in without]


def run(server: str, parent: Path, *, repeats: int = 9, only: Sequence[str] = ()) -> Iterator[Case]:
    """The cases of `names_for(server)`; a directory lies in `parent`, and is removed at the end."""
    names = chosen(names_for(server), only)
    with contextlib.ExitStack() as undo:
        made = tempfile.TemporaryDirectory(prefix="longshore-bench-", dir=parent, ignore_cleanup_errors=True)
        scratch = Path(undo.enter_context(made))
        running = None if server == "dir" else _server_of(server, scratch)
        if running is not None:
            undo.enter_context(running)
        for size in SIZES:
            kinds = [kind for kind in _BY_SIZE if f"{kind}/{size}" in names]
            if kinds:
                yield from _of_size(size, kinds, running, scratch, repeats)
        away = [name for name in names if name in _AWAY]
        if running is not None and away:
            yield from _away(running, away)


def _server_of(kind: str, scratch: Path) -> Server:
    if kind == "mooncake":
        return LocalMooncake(scratch)
    if kind != "s3":
        return LocalServer(kind, scratch)
    logging.getLogger("longshore.tiers.remote.s3").setLevel(logging.ERROR)  # small images are measured on purpose
    return LocalS3("seaweedfs", scratch)


def _of_size(size: str, kinds: Sequence[str], server: Server | None, scratch: Path, repeats: int) -> Iterator[Case]:
    with contextlib.ExitStack() as undo:
        images = RemoteImages(parse_size(size), shared=isinstance(server, LocalMooncake))
        undo.callback(images.arena.close)
        ours = MeasuredTier(images, server, scratch)
        undo.callback(ours.close)
        plain = plain_side(images, server, ours, scratch / f"plain-{size}")
        undo.callback(plain.close)
        clients: list[RemoteSide] = []
        if isinstance(server, LocalServer):
            clients = [PackagedClient(images, server, each) for each in PACKAGES if is_installed(each, PACKAGES[each])]
            for client in clients:
                undo.callback(client.close)
        empty = ours.empty
        if is_s3 := isinstance(server, LocalS3):
            ours.put()
        for kind in _KINDS:
            if kind in kinds or f"{kind}-cpu" in kinds or f"{kind}-clients" in kinds:
                sides = [ours, plain, *clients]
                yield from _moved(kind, size, kinds, sides, images, repeats, empty, server, puts_once=is_s3)
        ours.put()
        if "server-cpu" in kinds and isinstance(server, LocalServer):
            yield _server_cpu(size, ours, server, images, repeats)
        if "checksum" in kinds:
            yield _checksum(size, images, repeats)
        if "probe" in kinds:
            yield _probe(size, ours, [plain] if isinstance(server, LocalS3 | LocalMooncake) else clients, repeats)


def _moved(
    kind: str,
    size: str,
    kinds: Sequence[str],
    sides: Sequence[RemoteSide],
    images: RemoteImages,
    repeats: int,
    empty: Callable[[], None],
    server: Server | None,
    *,
    puts_once: bool,
) -> Iterator[Case]:
    """One kind of movement by all sides: rates, CPU time, and the better client. `puts_once`: what is read is there."""
    cpu: list[list[float]] = [[] for _ in sides]

    def measured(index: int) -> Callable[[], float]:
        side = sides[index]

        def once() -> float:
            side.reconnect()
            if not puts_once:
                empty()
                side.put()
            if kind == "get":
                side.get()
            else:
                empty()
            call = side.get if kind == "get" else side.put
            used, begun = _cpu_of_client(server), time.perf_counter()
            call()
            seconds = time.perf_counter() - begun
            cpu[index].append(_cpu_of_client(server) - used)
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
    single = MeasuredTier(images, server, Path(), options=f"{PATIENT}&in_flight=1", namespace=ours.namespace)
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

    others = [client for client in clients if isinstance(client, PackagedClient | BareObstore | BareMooncake)]
    taken = medians([median_of(ours.probe), *(median_of(each.probe) for each in others)], repeats=repeats)
    if not others:
        return duration(f"probe/{size}", Seconds(taken[0], taken[0]), "itself")
    best = min(range(len(others)), key=lambda index: taken[1 + index])
    return duration(f"probe/{size}", Seconds(taken[0], taken[1 + best]), others[best].name)


def _away(server: Server, names: Sequence[str]) -> Iterator[Case]:
    """How long requests of a stopped server take, at the default deadlines, and when it is used again."""
    images = RemoteImages(1 << 16, shared=isinstance(server, LocalMooncake))
    try:
        for name in names:
            failures = 3 if name == "back/stopped" else 10**9
            ours = MeasuredTier(images, server, Path(), options="", failures=failures)
            try:
                ours.put()
                server.pause()
                yield _late(name, ours, server)
            finally:
                server.resume()
                ours.close()
    finally:
        images.arena.close()


def _late(name: str, ours: MeasuredTier, server: Server) -> Case:
    if name == "back/stopped":
        while not ours.tier.is_unavailable:
            ours.probe(expected=None)
        server.resume()
        begun = time.perf_counter()
        while ours.tier.is_unavailable:
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
            ours.run(Op.READ, {Status.DEADLINE, Status.UNAVAILABLE}, 1)
        seconds_taken.append(time.perf_counter() - begun)
    worst = float(np.percentile(seconds_taken, 99)) * 1e3
    return Case(name, worst, "ms", "its deadline", limit * 1e3, limit * 1e3 / worst)


def _cpu_of_client(server: Server | None) -> float:
    """CPU seconds that this process has used, and those that it has started and are not the server's."""
    used = time.process_time()
    if isinstance(server, LocalMooncake):
        started = " ".join(each.read_text() for each in Path("/proc/self/task").glob("*/children")).split()
        used += sum(_cpu_of(pid) for pid in set(map(int, started)) - server.pids)
    return used


def _cpu_of(pid: int) -> float:
    """CPU seconds that a process has used, in all its threads."""
    stats = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(each.read_text().split()[0]) for each in stats) / 1e9
