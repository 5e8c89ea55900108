"""A remote store behind a replay: a remote tier in virtual time, with queues, a delay, and a gate before it."""

from __future__ import annotations

import pytest

from depth import deep
from longshore.boundary import REMOTE, Items, Probe, ProbeResult, Route, Status, Transfer, TransferResult
from longshore.cache import DropReason
from longshore.cache.eviction_policies import LRU, Gittins
from longshore.trace import TraceRequest
from longshore.trace.machine import PROFILES, RemoteStore, Timing, VirtualMovers, geometry_of, with_changes
from longshore.trace.replay import TieredReplay
from longshore.trace.result import Replayed
from traffic import synthesize

BLOCK = 512
TIMING = Timing(geometry_of("llama-3.1-8b"), PROFILES["h100"])
IMAGE = BLOCK * TIMING.geometry.kv_bytes_per_token


def ask(seconds: float, blocks: list[int]) -> TraceRequest:
    return TraceRequest(1000 * seconds, len(blocks) * BLOCK + 10, 1, (*blocks, 10**9 + int(seconds)))


def rounds(prompts: int, times: int, *, blocks: int = 8, gap: float = 20.0) -> list[TraceRequest]:
    """So many prompts, again and again in the same order."""
    paths = [[100 * prompt + block for block in range(blocks)] for prompt in range(prompts)]
    return [ask(gap * i, paths[i % prompts]) for i in range(prompts * times)]


def serve(requests: list[TraceRequest], *, gated: bool = False, timing: Timing = TIMING, **blocks: int) -> TieredReplay:
    tiers = {name: count * IMAGE for name, count in blocks.items()}
    replay = TieredReplay(timing, BLOCK, tiers, LRU, gated=gated)
    assert list(replay.run(requests)) == requests
    replay.replicas[0].cache.check_integrity()
    cache = replay.replicas[0].cache
    assert cache.leases == cache.protected == cache.jobs_in_flight == 0
    return replay


def test_what_host_memory_lost_comes_from_the_store() -> None:
    requests = rounds(5, 4)
    replay = serve(requests, host=16, remote=100)
    assert replay.tally.hits == {REMOTE: 15 * 8}
    first, later = replay.tally.ttft[0], replay.tally.ttft[5]
    probe, fetch = TIMING.paces[Route(REMOTE, "host")].fixed, TIMING.paces[Route(REMOTE, "host")].seconds(8 * IMAGE)
    load = TIMING.paces[Route("host", "device")].seconds(8 * IMAGE)
    assert first == pytest.approx(probe + TIMING.prefill(0, 8 * BLOCK + 10))
    assert later == pytest.approx(probe + fetch + load + TIMING.prefill(8 * BLOCK, 10))
    assert sum(serve(requests, host=16).tally.hits.values()) == 0
    assert replay.counters.routes["host->remote"].chunks == 40


def test_what_host_memory_has_is_not_fetched_again() -> None:
    """The first half of each prompt is shared and stays; only what is behind it comes from the store."""
    requests = [ask(20.0 * i, [1, 2, 3, *(100 * (i % 4) + block for block in range(4))]) for i in range(12)]
    replay = serve(requests, host=12, remote=100)
    assert replay.tally.hits["host"] == 3 * 11
    assert replay.tally.hits[REMOTE] == 4 * 8


def test_a_store_that_forgets_gives_what_it_still_has() -> None:
    replay = serve(rounds(5, 4), host=16, remote=20)
    assert replay.remote is not None
    assert len(replay.remote) == 20
    assert replay.remote.evictions == replay.counters.routes["host->remote"].chunks - 20 > 0
    assert sum(replay.tally.hits.values()) == 0  # a loop that does not fit, least recently used first
    found = Replayed(replay, "lru", 40, None)
    assert found.evictions[REMOTE]["forgotten"] == replay.remote.evictions
    assert set(found.hits) == {"host", REMOTE}


def test_a_slow_store_is_left_alone_by_the_gate() -> None:
    slow = Timing(TIMING.geometry, with_changes(TIMING.profile, {"remote_read": 0.2e9}, "for a test"))
    requests = rounds(5, 12)
    always, gated = (serve(requests, gated=gated, timing=slow, host=16, remote=100) for gated in (False, True))
    without = sum(always.tally.recompute)
    assert sum(always.tally.ttft) > 2 * without
    assert sum(gated.tally.ttft) < 1.3 * without  # the first fetch, of which nothing was known, is in it
    assert gated.tally.computed_by_choice > 0
    fast = Timing(TIMING.geometry, with_changes(TIMING.profile, {"remote_read": 20e9}, "for a test"))
    quick = serve(requests, gated=True, timing=fast, host=16, remote=100)
    assert sum(quick.tally.ttft) < without / 2


@pytest.mark.parametrize("family", deep(["chats"], ["chats", "mixed"]))
def test_store_that_lost_chunks_gets_fewer_for_equal_hits(family: str) -> None:
    requests = list(synthesize(family, requests=600, seed=3))
    unique = len({block for request in requests for block in request.hash_ids})

    def served(share: float, admission: bool = True) -> tuple[int, int, int]:
        tiers = {"host": unique // 50 * IMAGE, REMOTE: round(share * unique) * IMAGE}
        replay = TieredReplay(TIMING, BLOCK, tiers, Gittins, gated=False, admission=admission)
        assert list(replay.run(requests)) == requests
        replay.replicas[0].cache.check_integrity()
        refused = replay.counters.drops[REMOTE][DropReason.ADMISSION]
        return sum(replay.tally.hits.values()), replay.counters.routes["host->remote"].chunks, refused

    hits, stored, refused = served(0.1)
    all_hits, all_stored, _ = served(0.1, admission=False)
    assert refused > 0
    assert stored < 0.97 * all_stored
    assert hits >= 0.99 * all_hits
    assert served(2.0)[2] == 0  # a store that loses nothing


def test_concurrent_requests_queue_and_share_one_fetch() -> None:
    paths = [[100 * prompt + block for block in range(8)] for prompt in range(5)]
    begin = [ask(20.0 * i, path) for i, path in enumerate(paths)]
    again = [ask(200.0, paths[0]), ask(200.0, paths[0]), ask(200.0, paths[1])]
    replay = TieredReplay(TIMING, BLOCK, {"host": 16 * IMAGE, "remote": 100 * IMAGE}, LRU, engines=3, gated=False)
    assert len(list(replay.run(begin + again))) == 8
    moved = replay.counters.routes["remote->host"]
    assert moved.chunks == 16
    assert replay.routes[Route(REMOTE, "host")][1] > 0
    assert replay.tally.hits == {REMOTE: 24}


def test_files_and_a_store_together_are_deterministic() -> None:
    requests = list(synthesize("mixed", requests=300, seed=3))

    def once() -> tuple[object, list[float]]:
        replay = serve(requests, gated=True, host=200, file=400, remote=3000)
        return Replayed(replay, "x", 0, None).as_json(), list(replay.tally.ttft)

    first = once()
    assert first == once()
    hits = serve(requests, gated=True, host=200, file=400, remote=3000).tally.hits
    assert min(hits["host"], hits["file"], hits[REMOTE]) > 0


def test_the_store_keeps_what_was_used_last() -> None:
    store = RemoteStore(2)
    store.write([b"a", b"b"])
    assert store.read([b"a", b"x"]) == (Status.OK, Status.NOT_FOUND)
    store.write([b"c"])
    assert store.probe([b"a", b"b", b"c"]) == (True, False, True)
    assert (len(store), store.evictions) == (2, 1)


def test_probe_of_the_store_is_a_use() -> None:
    store = RemoteStore(2)
    store.write([b"a", b"b"])
    store.probe([b"a"])
    store.write([b"c"])
    assert store.probe([b"a", b"b", b"c"]) == (True, False, True)


def test_movers_ask_the_store_and_bring_what_it_still_has() -> None:
    store = RemoteStore(1)
    movers = VirtualMovers(TIMING, IMAGE, store)
    keys = (b"a", b"b")
    items = Items(keys, (None, None), None, None)
    movers.submit([Transfer(1, Route("host", REMOTE), items), Probe(2, REMOTE, keys, 9.0)], 0.0)
    command, answer = movers.pop()
    assert isinstance(command, Probe)
    assert answer == ProbeResult(2, (False, False))  # nothing was there yet when it was asked
    movers.pop()
    movers.submit([Transfer(3, Route(REMOTE, "host"), items), Probe(4, REMOTE, keys, 1.0001)], 1.0)
    assert movers.pop()[1] == ProbeResult(4, (False, False), Status.DEADLINE)
    result = movers.pop()[1]
    assert isinstance(result, TransferResult)
    assert (result.statuses, result.bytes) == ((Status.NOT_FOUND, Status.OK), IMAGE)
