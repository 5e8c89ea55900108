"""Replicas that share one store: their hits together, beside those of one cache of the store's size.

    python benchmarks/replicas.py [--trace FILE | --family NAME] [--requests N] [--replicas 10] [--share 0.2]
                                  [--at-once 10] [--host 0] [--samples 20] [--floor 0.97] [--json]

Each replica is a process: the control plane, a host tier, a transfer engine, and a client of one Valkey server with
`maxmemory` and `allkeys-lru`; its engine is a model that writes what it computes, and compares every byte that it is
served. Images are of 4 KiB. Requests are dealt in turn, `--at-once` at a time: each begins when the one so many before
it has ended. Clocks are those of the trace, so that knowledge of the store ages as it would; only the server's clock is
real. The store has room for `--share` of the trace's unique blocks. Host memory holds `--host` blocks, and at least
those of the longest request, as it must; hits there are counted apart.

The reference serves the same requests one after the other, with one cache of so many blocks: `lru` evicts the least
recently used block, tails before heads, `default` is our own policy. The server looks at `--samples` random values for
each that it evicts (`maxmemory-samples`): with its default of 5, blocks that are still used go with the others. Exit
status 1 if the replicas together have less than `--floor` of the hits of `lru`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Sequence
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch

from longshore.boundary import HOST, Key, Slabs
from longshore.cache import CacheSettings, GroupKeys, LookupResult, TieredCache, TierSpec
from longshore.cache.eviction_policies import DEFAULT_POLICY, LRU
from longshore.layout import KVLayout, from_rows
from longshore.runtime import KeyedMover, Runtime
from longshore.testing.local_server import LocalServer
from longshore.tiers.arena import Arena
from longshore.tiers.base import KEY_BYTES
from longshore.tiers.host import HostSlabs
from longshore.tiers.remote import RemoteTier
from longshore.trace import TraceRequest, read_mooncake
from longshore.trace.experiment import Experiment
from longshore.trace.replay import keys_of
from longshore.transfer.device import device_for
from longshore.transfer.engine import TransferEngine
from traffic import synthesize

IMAGE = 4096
TIMEOUT = 120.0
_SECONDS = "connect_timeout=30s&probe_timeout=30s&fetch_timeout=60s&write_timeout=60s"
"""Deadlines that a busy machine does not miss."""

_SAMPLE = 1000


class TraceClock:
    """The time of the trace, in seconds, which goes on as real time does while a request is served.

    It begins with the real clock, and is never behind it, as some parts have the real one.
    """

    def __init__(self) -> None:
        self._begun, self._ahead = time.monotonic(), 0.0

    def __call__(self) -> float:
        """Now."""
        return time.monotonic() + self._ahead

    def reach(self, seconds: float) -> None:
        """It is at least so late in the trace."""
        self._ahead += max(0.0, self._begun + seconds - self())


class Replica:
    """One engine with its tiers; nothing is a mock but the computing."""

    def __init__(self, url: str, blocks: int, host_blocks: int) -> None:
        self.clock = TraceClock()
        self.hits: Counter[str] = Counter()
        self._rows = torch.zeros((blocks, IMAGE), dtype=torch.uint8)
        self._bytes = self._rows.numpy()
        layout: KVLayout = from_rows(self._rows, pages_per_block=2, block_size=16)
        self._arena = Arena(host_blocks * IMAGE)
        host = HostSlabs(self._arena, Slabs.of_one_size(IMAGE, host_blocks))
        device = device_for(layout)
        device.set_registered_memory(self._arena.in_one_piece)
        self.tier = RemoteTier(url, arena=self._arena, image_bytes=IMAGE, namespace=bytes(32), clock=self.clock)
        settings = CacheSettings(probe_timeout=60.0, load_timeout=60.0, prefetch_timeout=60.0)
        cache = TieredCache([TierSpec(HOST, host_blocks, IMAGE)], settings, remote=[self.tier.name])
        mover = KeyedMover(self.tier, host)
        movers = [TransferEngine(layout, device, host), mover]
        self._runtime = Runtime(cache, movers, [self.tier], probers=[mover], clock=self.clock)

    def serve(self, keys: list[Key], seconds: float) -> int:
        """Serve one request that arrived at `seconds`: match, fetch, load, compute the rest, store it. Its hits."""
        self.clock.reach(seconds)
        runtime, hits = self._runtime, 0
        found = self._look(keys)
        warm = found.num_chunks
        if found.probes:
            self._over(found)
            runtime.wait_jobs(found.probes, TIMEOUT)
        with runtime.batch() as cache:
            jobs = cache.prefetch({0: GroupKeys(keys)}, runtime.clock())
        runtime.wait_jobs(jobs, TIMEOUT)
        if found.probes:
            found = self._look(keys)
        if found.lease is not None:
            with runtime.batch() as cache:
                cache.load(found.lease, {0: range(found.num_chunks)})
            outcome = runtime.wait_load(found.lease, TIMEOUT).outcome
            hits = 0 if outcome is None else outcome.num_chunks
        self._over(found)
        self._compare(keys[:hits])
        self.hits["host"] += min(hits, warm)
        self.hits["store"] += max(0, hits - warm)
        self._compute(keys, hits)
        return hits

    def close(self) -> Counter[str]:
        """Close all; what was counted."""
        self._runtime.close(TIMEOUT)
        counted = Counter({f"{kind} {status}": count for (kind, status), count in self.tier.counts.items()})
        counted.update({f"failure {name}": count for name, count in self.tier.failures.items() if count})
        self._arena.close()
        return counted + self.hits

    def _look(self, keys: list[Key]) -> LookupResult:
        with self._runtime.batch() as cache:
            return cache.lookup({0: GroupKeys(keys)}, self._runtime.clock())

    def _over(self, found: LookupResult) -> None:
        if found.lease is not None:
            with self._runtime.batch() as cache:
                cache.release(found.lease)

    def _compare(self, keys: Sequence[Key]) -> None:
        expected = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 1, KEY_BYTES)
        if not (self._bytes[: len(keys)].reshape(len(keys), IMAGE // KEY_BYTES, KEY_BYTES) == expected).all():
            raise SystemExit("a wrong byte was served")

    def _compute(self, keys: list[Key], first: int) -> None:
        """The engine computes from `first` on; then it waits until the store has it."""
        if first < len(keys):
            made = np.frombuffer(b"".join(keys[first:]), np.uint8).reshape(-1, KEY_BYTES)
            self._bytes[first : len(keys)] = np.tile(made, IMAGE // KEY_BYTES)
            again = True
            while again:
                with self._runtime.batch() as cache:
                    order = cache.store({0: GroupKeys(keys, first)}, {0: range(first, len(keys))})[0]
                again = order.retry
                if again or order.job is not None:
                    self._runtime.wait_idle(TIMEOUT)
        self._runtime.wait_idle(TIMEOUT)
        self._rows.zero_()


def _work(pipe: Connection, url: str, blocks: int, host_blocks: int) -> None:
    torch.set_num_threads(1)
    replica = Replica(url, blocks, host_blocks)
    replica.serve(keys_of([2**63 + os.getpid()]), 0.0)
    pipe.send(0)
    while (order := pipe.recv()) is not None:
        path, seconds = order
        pipe.send(replica.serve(keys_of(path), seconds))
    pipe.send(replica.close())


def measured(
    requests: Sequence[tuple[list[int], float]], replicas: int, slots: int, at_once: int, host: int, samples: int
) -> tuple[int, dict[str, object]]:
    """The hits of all replicas together, and what else was counted."""
    context = multiprocessing.get_context("fork")
    longest = max(len(path) for path, _ in requests)
    with (
        tempfile.TemporaryDirectory(prefix="longshore-replicas-") as scratch,
        LocalServer("valkey", Path(scratch), maxmemory_policy="allkeys-lru", maxmemory_samples=str(samples)) as server,
    ):
        url = f"valkey://127.0.0.1:{server.port}/0?{_SECONDS}"
        pipes, workers = [], []
        try:
            for _ in range(replicas):
                ours, theirs = context.Pipe()
                worker = context.Process(target=_work, args=(theirs, url, longest, max(host, 2 * longest)), daemon=True)
                worker.start()
                theirs.close()
                pipes.append(ours)
                workers.append(worker)
            for pipe in pipes:
                pipe.recv()
            _limit(server, slots)
            hits, under_way, held = 0, deque[Connection](), []
            begun = time.perf_counter()
            for number, (path, seconds) in enumerate(requests):
                if len(under_way) >= min(at_once, replicas):
                    hits += under_way.popleft().recv()
                pipe = pipes[number % replicas]
                pipe.send((path, seconds))
                under_way.append(pipe)
                if number % 100 == 99:
                    held.append(int(server.command(b"DBSIZE")[1:]))
            hits += sum(pipe.recv() for pipe in under_way)
            taken = time.perf_counter() - begun
            counted: Counter[str] = Counter()
            for pipe in pipes:
                pipe.send(None)
                counted.update(pipe.recv())
        finally:
            for worker in workers:
                worker.join(1)
                worker.kill()
    return hits, {"seconds": taken, "blocks_in_store": max(held, default=0), "counts": dict(counted)}


def _limit(server: LocalServer, slots: int) -> None:
    """Give the server room for so many values: `maxmemory` from what some of them use."""

    def used() -> int:
        info = server.command(b"INFO", b"memory").decode()
        return int(info.partition("used_memory:")[2].split()[0])

    server.command(b"FLUSHALL", b"SYNC")
    before = used()
    for number in range(_SAMPLE):
        server.command(b"SET", b"ls1/" + b"%0129d" % number, bytes(IMAGE + 128))
    each = (used() - before) / _SAMPLE
    server.command(b"FLUSHALL", b"SYNC")
    server.command(b"CONFIG", b"SET", b"maxmemory", b"%d" % (used() + slots * each))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="a trace in Mooncake's format")
    parser.add_argument("--family", default="mixed", help="traffic to make, without a trace")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--replicas", type=int, default=10)
    parser.add_argument("--share", type=float, default=0.2, help="of the unique blocks, that the store has room for")
    parser.add_argument("--at-once", type=int, default=10, help="requests under way")
    parser.add_argument("--host", type=int, default=0, help="blocks in the host memory of each replica, at least")
    parser.add_argument("--samples", type=int, default=20, help="maxmemory-samples of the server")
    parser.add_argument("--floor", type=float, default=0.97)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    made = read_mooncake(options.trace) if options.trace else synthesize(options.family, requests=options.requests)
    requests = [_request(each) for each in islice(made, options.requests)]
    requests = [(path, seconds) for path, seconds in requests if path]
    slots = int(options.share * len({block for path, _ in requests for block in path}))
    alone = {"lru": Experiment(LRU, slots), "default": Experiment(DEFAULT_POLICY, slots)}
    for path, seconds in requests:
        for cache in alone.values():
            cache.serve(path, seconds)
    of_one = {name: cache.totals().hits for name, cache in alone.items()}
    hits, more = measured(requests, options.replicas, slots, options.at_once, options.host, options.samples)
    blocks = sum(len(path) for path, _ in requests)
    shares = {name: hits / max(1, each) for name, each in of_one.items()}
    facts = {"requests": len(requests), "blocks": blocks, "slots": slots, "hits": hits, "one_cache": of_one} | more
    if options.json:
        print(json.dumps({**facts, "of_one_cache": shares}))
    else:
        for name, value in facts.items():
            print(f"{name:16} {value}")
        print("  ".join(f"{share:.3f} of {name}" for name, share in shares.items()))
    sys.exit(shares["lru"] < options.floor)


def _request(each: TraceRequest) -> tuple[list[int], float]:
    return list(each.hash_ids[: each.input_length // 512]), each.timestamp_ms / 1000


if __name__ == "__main__":
    main()
