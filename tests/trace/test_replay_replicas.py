"""Replicas in virtual time: caches of their own, one store, whose bandwidth they share."""

from __future__ import annotations

import pytest

from longshore.boundary import HOST, REMOTE, Items, Route, Status, Transfer, TransferResult
from longshore.cache.eviction_policies import LRU
from longshore.errors import TraceError
from longshore.trace import TraceRequest
from longshore.trace.machine import PROFILES, RemoteStore, Timing, VirtualMovers, geometry_of
from longshore.trace.replay import Router, Routing, TieredReplay
from longshore.trace.result import Overload, Replayed, Sharing
from longshore.trace.tally import Loss
from traffic import synthesize

BLOCK = 512
TIMING = Timing(geometry_of("llama-3.1-8b"), PROFILES["h100"])
IMAGE = BLOCK * TIMING.geometry.kv_bytes_per_token
READ, WRITE = Route(REMOTE, HOST), Route(HOST, REMOTE)


def ask(seconds: float, blocks: list[int]) -> TraceRequest:
    return TraceRequest(1000 * seconds, len(blocks) * BLOCK + 10, 1, (*blocks, 10**9 + int(1000 * seconds)))


def serve(
    requests: list[TraceRequest], replicas: int, routing: Routing = Routing.ROUND_ROBIN, **blocks: int
) -> TieredReplay:
    tiers = {name: count * IMAGE for name, count in blocks.items()}
    replay = TieredReplay(TIMING, BLOCK, tiers, LRU, gated=False, replicas=replicas, routing=routing)
    assert list(replay.run(requests)) == requests
    for replica in replay.replicas:
        replica.cache.check_integrity()
        assert replica.cache.leases == replica.cache.protected == replica.cache.jobs_in_flight == 0
    assert sum(replay.losses.values()) + sum(replay.tally.hits.values()) == replay.tally.block_refs
    return replay


def test_a_replica_fetches_what_another_one_stored() -> None:
    prompt = list(range(8))
    replay = serve([ask(20.0 * i, prompt) for i in range(6)], 3, host=16, remote=100)
    assert replay.tally.hits == {REMOTE: 16, HOST: 24}  # one computes, two fetch, then each has it
    assert replay.losses[Loss.FIRST_USE] == 8
    assert replay.remote is not None
    assert (replay.remote.blocks[WRITE], replay.remote.blocks[READ]) == (8, 16)


def test_without_a_store_the_other_replicas_are_the_loss() -> None:
    prompt = list(range(8))
    replay = serve([ask(20.0 * i, prompt) for i in range(6)], 3, host=16)
    assert (replay.losses[Loss.FIRST_USE], replay.losses[Loss.OTHER_REPLICA]) == (8, 16)
    assert replay.tally.hits == {HOST: 24}


def test_evictions_of_what_the_store_sent_are_reported() -> None:
    prompt, others = list(range(8)), [list(range(100 * i, 100 * i + 8)) for i in range(1, 6)]
    asked = [prompt, prompt, *others, prompt]
    replay = serve([ask(20.0 * i, each) for i, each in enumerate(asked)], 2, host=12, remote=12)
    assert replay.tally.hits[REMOTE] >= 8  # the second replica has fetched the prompt, which both tiers then evicted
    assert replay.losses[Loss.OTHER_REPLICA] == 0
    assert replay.losses[Loss.EVICTED] + replay.losses[Loss.FORGOTTEN] >= 8


def test_one_replica_is_the_replay_of_one_machine() -> None:
    requests = list(synthesize("mixed", requests=150, seed=3))
    one, several = (serve(requests, count, host=200, file=400, remote=3000) for count in (1, 3))
    assert len(one.replicas) == 1 and one.losses[Loss.OTHER_REPLICA] == 0
    assert several.slots == 3 * 600 + 3000
    assert list(serve(requests, 3, host=200, file=400, remote=3000).tally.ttft) == list(several.tally.ttft)


def test_replicas_queue_for_the_bandwidth_of_one_store() -> None:
    """Two fetches at a time take turns for bytes; their round trips overlap."""
    store = RemoteStore(100)
    store.write([b"a", b"b"])
    ours, theirs = (VirtualMovers(TIMING, IMAGE, store) for _ in range(2))
    for movers, key in ((ours, b"a"), (theirs, b"b")):
        movers.submit([Transfer(1, READ, Items((key,), (None,), None, None))], 1.0)
    pace = TIMING.paces[READ]
    assert ours.next_end == pytest.approx(1.0 + pace.seconds(IMAGE))
    assert theirs.next_end == pytest.approx(1.0 + pace.seconds(IMAGE) + IMAGE / pace.rate)
    assert theirs.wait(REMOTE, HOST, 1.0) == pytest.approx(2 * IMAGE / pace.rate)
    assert store.busy[READ] == pytest.approx(2 * IMAGE / pace.rate)


def test_an_image_in_the_store_is_not_sent_again() -> None:
    store = RemoteStore(100)
    store.write([b"a"])
    movers = VirtualMovers(TIMING, IMAGE, store)
    movers.submit([Transfer(1, WRITE, Items((b"a", b"b"), (None, None), None, None))], 0.0)
    assert (store.blocks[WRITE], store.busy[WRITE]) == (1, IMAGE / TIMING.paces[WRITE].rate)
    _, result = movers.pop()
    assert isinstance(result, TransferResult)
    assert (result.bytes, result.statuses) == (IMAGE, (Status.OK,) * 2)
    assert store.probe([b"a", b"b"]) == (True, True)


def test_an_image_that_comes_during_a_fetch_costs_no_bytes() -> None:
    store = RemoteStore(100)
    store.write([b"a"])
    movers = VirtualMovers(TIMING, IMAGE, store)
    movers.submit([Transfer(1, READ, Items((b"a", b"b"), (None, None), None, None))], 0.0)
    store.write([b"b"])
    _, result = movers.pop()
    assert isinstance(result, TransferResult)
    assert result.bytes == IMAGE


def test_the_network_is_told_in_bytes_and_as_a_share() -> None:
    prompt = list(range(8))
    replay = serve([ask(20.0 * i, prompt) for i in range(6)], 3, host=16, remote=100)
    alone = serve([ask(20.0 * i, prompt) for i in range(6)], 3, host=16)
    found = Replayed(replay, "lru", 14, None, sharing=Sharing(40, alone))
    network = found.network
    assert network is not None
    assert network["host->remote"]["bytes"] == 8 * IMAGE
    assert network["remote->host"]["share_of_bandwidth"] == pytest.approx(16 * IMAGE / TIMING.profile.remote_read / 100)
    facts = found.as_json()
    assert (facts["replicas"], facts["requests_by_replica"], facts["route"]) == (3, [2, 2, 2], "round-robin")
    assert facts["one_cache_hit_ratio"] == 40 / 48
    without = facts["without_store"]
    assert isinstance(without, dict)
    assert without["hit_ratio"] == 24 / 48 < found.hit_ratio
    rows = {name: (value, note) for name, value, note in found.rows()}
    assert rows["replicas"] == ("3", "requests dealt in turn: 2 to 2 each")
    assert rows["hits, no store"][0] == "50.0 %"
    assert "of the store's bandwidth" in rows["remote->host"][1]


def test_requests_are_dealt_in_turn_or_to_the_longest_prefix() -> None:
    paths = [[1, 2, 3, 4], [5, 6], [1, 2, 3, 4, 7], [8], [1, 2, 9, 9, 9], [5, 6, 10]]
    in_turn, by_prefix = Router(2, Routing.ROUND_ROBIN), Router(2, Routing.PREFIX)
    assert [in_turn.deal(path) for path in paths] == [0, 1, 0, 1, 0, 1]
    assert [by_prefix.deal(path) for path in paths] == [0, 1, 0, 1, 0, 1]
    assert by_prefix.deal([9, 9]) == 0
    assert by_prefix.deal([5, 6, 11]) == by_prefix.deal([5, 6]) == 1
    assert by_prefix.deal([]) == 0


def test_dealing_by_prefix_keeps_sessions_in_their_replica() -> None:
    turns = [ask(20.0 * i, [100 * (i % 5) + block for block in range(4 + i // 5)]) for i in range(20)]
    in_turn = serve(turns, 3, host=40)
    by_prefix = serve(turns, 3, Routing.PREFIX, host=40)
    assert by_prefix.losses[Loss.OTHER_REPLICA] == 0 < in_turn.losses[Loss.OTHER_REPLICA]


def test_overload_counts_the_engines_of_all_replicas() -> None:
    requests = [ask(0.1 * i, [100 * i + block for block in range(30)]) for i in range(40)]
    one, four = serve(requests, 1, host=60), serve(requests, 4, host=60)
    facts = Replayed(four, "lru", 0, None).as_json()
    assert facts["engine_busy"] == pytest.approx(one.tally.computing / one.tally.seconds / 4)
    words = Overload(2, 1.5, 4, None, None, 4).words
    assert "2 engines in each of 4 replicas" in words


def test_no_replicas_are_refused() -> None:
    with pytest.raises(TraceError, match="one replica"):
        TieredReplay(TIMING, BLOCK, {"host": 9 * IMAGE}, LRU, replicas=0)
