"""What a peer serves, beside plain TCP: python benchmarks/peers.py [--size 2MiB] [--repeats 9]

A process has 64 images in the host memory of its tiers, and serves them by `PeerServer`. This one reads all of them
through a `RemoteTier`, checksums included, and as many bytes through a plain socket, in turns. Each measurement has
connections of its own, after a batch that is not measured.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from longshore.bench.harness import medians
from longshore.bench.remote import _cpu_of
from longshore.bench.remote_sides import IMAGES, PATIENT, MeasuredTier, PlainTcp, RemoteImages
from longshore.boundary import HOST, Slabs, Status, TransferResult
from longshore.cache import CacheSettings, GroupKeys, TieredCache, TierSpec
from longshore.config import parse_size
from longshore.runtime.loop import Runtime
from longshore.runtime.peer_server import PeerServer, TierSource
from longshore.tiers.host import HostSlabs


def serve(pipe: Connection, namespace: bytes, image_bytes: int, port: int) -> None:
    """Serve the images until the pipe ends."""
    images = RemoteImages(image_bytes)
    slabs = Slabs(image_bytes, (image_bytes,), 2 * IMAGES)
    cache = TieredCache([TierSpec(HOST, slabs, image_bytes)], CacheSettings())
    runtime = Runtime(cache, [])
    with runtime.batch() as control:
        order = control.store({0: GroupKeys(images.keys[:IMAGES])})[0]
        if order.job is None or len(order.positions) < IMAGES:
            raise SystemExit("the host tier has no room")
        contents = [bytes(images.written(position)) for position in order.positions]
        for index, content in zip(order.slots.of.indices, contents, strict=True):
            images.arena.view(slabs.offset(0, index), image_bytes)[:] = content
        control.apply_results([TransferResult(order.job, (Status.OK,) * IMAGES)], runtime.clock())
    source = TierSource(runtime, HostSlabs(images.arena, slabs), lambda: namespace)
    server = PeerServer(f"valkey://127.0.0.1:{port}", source)
    pipe.send(True)
    pipe.recv()
    server.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="2MiB")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--in-flight", default="8MiB")
    parser.add_argument("--port", type=int, default=17007)
    given = parser.parse_args()
    namespace, images = os.urandom(32), RemoteImages(parse_size(given.size))
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, namespace, images.image_bytes, given.port), daemon=True)
    process.start()
    pipe.recv()
    there: Any = SimpleNamespace(port=given.port)
    options = f"{PATIENT}&in_flight={given.in_flight}"
    ours, plain = MeasuredTier(images, there, Path(), options=options, namespace=namespace), PlainTcp(images)

    used: dict[str, list[tuple[float, float]]] = {ours.name: [], plain.name: []}
    pids = {ours.name: process.pid, plain.name: plain._peer.pid}

    def measured(side: MeasuredTier | PlainTcp) -> float:
        side.reconnect()
        side.get()
        here, at_peer, begun = time.process_time(), _cpu_of(pids[side.name] or 0), time.perf_counter()
        side.get()
        seconds = time.perf_counter() - begun
        used[side.name].append((time.process_time() - here, _cpu_of(pids[side.name] or 0) - at_peer))
        return seconds

    taken = medians([lambda: measured(ours), lambda: measured(plain)], repeats=given.repeats)
    for index in range(IMAGES):
        if images.read(index)[:64] == bytes(64):
            raise SystemExit("nothing was read")
    rates = [images.nbytes / seconds / 1e9 for seconds in taken]
    print(f"{given.size}: peer {rates[0]:.2f} GB/s, plain TCP {rates[1]:.2f} GB/s, ratio {rates[0] / rates[1]:.2f}")
    for name, each in used.items():
        client, server = (statistics.median(column) / images.nbytes * 1e9 for column in zip(*each, strict=True))
        print(f"{name}: CPU of client {client:.2f} s/GB, of server {server:.2f} s/GB")
    pipe.send(None)
    ours.close()
    plain.close()
    process.join()


if __name__ == "__main__":
    main()
