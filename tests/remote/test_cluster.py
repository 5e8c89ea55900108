"""A real cluster of three nodes: the conformance suite, slots that move, nodes that fail, replies that lie."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from remotes import IMAGE, PATIENT, ask, moved_among_faults, remote, until
from typer.testing import CliRunner

from certificates import self_signed
from longshore.boundary import Status
from longshore.cli.app import app
from longshore.runtime.tier_host import HostedRemoteTier
from longshore.testing import FaultyProxy, TierHarness, TierTests, WireFault
from longshore.testing.local_server import LocalCluster, LocalServer, free_port
from longshore.testing.tier_harness import image, key
from longshore.tiers.arena import Arena, ArenaSettings
from longshore.tiers.base import Op, Tier
from longshore.tiers.remote import cluster as cluster_module
from longshore.tiers.remote import open_store
from longshore.tiers.remote.cluster import slot_of
from longshore.tiers.remote.format import address
from longshore.tiers.remote.work import RemoteError

NUMBERS = range(24)


class TestConformance(TierTests):
    by_key = True
    persistent = True
    url = ""

    @pytest.fixture(autouse=True)
    def _at(self, cluster: LocalCluster) -> None:
        self.url = f"{cluster.url}?{PATIENT}"
        self.namespace = os.urandom(32)

    def open_tier(self, arena: Arena, directory: Path) -> Tier:
        return open_store(self.url, arena=arena, image_bytes=self.image_bytes, namespace=self.namespace)


class TestInTierHost(TestConformance):
    def make_arena(self, nbytes: int) -> Arena:
        return Arena(nbytes, ArenaSettings(shared=True, huge_pages=False))

    def open_tier(self, arena: Arena, directory: Path) -> Tier:
        return HostedRemoteTier(
            self.url, name="remote", image_bytes=self.image_bytes, arena=arena, namespace=self.namespace
        )


def name_of(harness: TierHarness, number: int) -> bytes:
    return address(remote(harness).namespace, key(number))


def of_node(cluster: LocalCluster, harness: TierHarness, index: int) -> list[int]:
    """Those of `NUMBERS` whose keys are of one node."""
    return [each for each in NUMBERS if cluster.of(name_of(harness, each)) is cluster.nodes[index]]


def redirections(node: LocalServer, kind: str) -> int:
    """How often a node has answered MOVED or ASK."""
    for line in node.command(b"INFO", b"errorstats").decode().splitlines():
        if line.startswith(f"errorstat_{kind}:count="):
            return int(line.partition("=")[2])
    return 0


def store_all(harness: TierHarness) -> None:
    for number in NUMBERS:
        harness.store(0, number)


def test_slots_are_those_of_the_server(cluster: LocalCluster) -> None:
    chance = np.random.default_rng(5)
    for length in (*range(8), 70, 300):
        text = bytes(chance.choice(np.frombuffer(b"ab{}", np.uint8), length))
        assert cluster.nodes[0].command(b"CLUSTER", b"KEYSLOT", text) == b":%d\r\n" % slot_of(text)


def test_values_spread_over_nodes_and_probes_take_one_trip(
    cluster: LocalCluster, opened: Callable[..., TierHarness]
) -> None:
    harness = opened(f"{cluster.url}?{PATIENT}")
    store_all(harness)
    for number in NUMBERS:
        harness.assert_serves(0, number)
    tier = remote(harness)
    before = tier.counts["probe", "present"]
    assert ask(harness, *NUMBERS, 99) == (*[True] * len(NUMBERS), False)
    assert tier.counts["probe", "present"] - before == len(NUMBERS)
    for index, node in enumerate(cluster.nodes):
        of = of_node(cluster, harness, index)
        assert of
        assert all(node.command(b"EXISTS", name_of(harness, each)) == b":1\r\n" for each in of)


def test_a_reset_gives_all_nodes_the_same_private_namespace(
    cluster: LocalCluster, opened: Callable[..., TierHarness]
) -> None:
    harness = opened(f"{cluster.url}?{PATIENT}")
    store_all(harness)
    remote(harness).reset(1)
    assert ask(harness, *NUMBERS) == (False,) * len(NUMBERS)
    store_all(harness)
    other = opened(f"{cluster.url}?{PATIENT}", remote(harness).namespace)
    for number in NUMBERS:
        other.assert_serves(0, number)


def test_the_budget_is_one_for_all_nodes(cluster: LocalCluster, opened: Callable[..., TierHarness]) -> None:
    harness = opened(f"{cluster.url}?daily_writes={48 * (IMAGE + 128)}&{PATIENT}")
    statuses = [harness.run(harness.op(Op.WRITE, 0, number))[0] for number in NUMBERS]
    assert statuses.count(Status.OK) == 2
    assert statuses.count(Status.QUEUE_FULL) == len(NUMBERS) - 2
    assert remote(harness)._budget.spent == 2 * (IMAGE + 128)


# Slots that move


def test_without_a_map_nodes_redirect(
    own_cluster: LocalCluster, opened: Callable[..., TierHarness], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(*_: object) -> None:
        raise RemoteError("broken", "no map")

    monkeypatch.setattr(cluster_module, "read_slots", unreadable)
    harness = opened(f"{own_cluster.url}?{PATIENT}")
    ops = [harness.op(Op.WRITE, 0, number, place=number) for number in NUMBERS]
    assert set(harness.run(*ops)) == {Status.OK}
    assert redirections(own_cluster.nodes[0], "MOVED") > 0
    other = opened(f"{own_cluster.url}?{PATIENT}", remote(harness).namespace)
    assert ask(other, *NUMBERS, 99) == (*[True] * len(NUMBERS), False)
    third = opened(f"{own_cluster.url}?{PATIENT}", remote(harness).namespace)
    reads = [third.op(Op.READ, 0, number, place=number) for number in NUMBERS]
    assert set(third.run(*reads)) == {Status.OK}
    assert remote(third).failures["breaker"] == 0


def test_a_slot_that_moves(own_cluster: LocalCluster, opened: Callable[..., TierHarness]) -> None:
    harness = opened(f"{own_cluster.url}?{PATIENT}")
    stored, *_ = of_node(own_cluster, harness, 0)
    source, target = own_cluster.nodes[:2]
    slot = slot_of(name_of(harness, stored))
    new, absent = [each for each in range(100, 200_000) if slot_of(name_of(harness, each)) == slot][:2]
    harness.store(0, stored)
    ids = [node.command(b"CLUSTER", b"MYID").split()[1] for node in (source, target)]

    def set_slot(node: LocalServer, *words: bytes) -> None:
        assert node.command(b"CLUSTER", b"SETSLOT", b"%d" % slot, *words) == b"+OK\r\n"

    set_slot(target, b"IMPORTING", ids[0])
    set_slot(source, b"MIGRATING", ids[1])
    where = (b"127.0.0.1", b"%d" % target.port, name_of(harness, stored), b"0", b"20000")
    assert source.command(b"MIGRATE", *where) == b"+OK\r\n"
    harness.assert_serves(0, stored)  # ASK
    harness.store(0, new)
    assert source.command(b"EXISTS", name_of(harness, new)).startswith(b"-ASK")
    harness.assert_serves(0, new)
    assert harness.load(0, absent)[0] is Status.NOT_FOUND
    assert ask(harness, stored, new, absent) == (True, True, False)
    assert redirections(source, "ASK") > 4
    for node in (target, source):
        set_slot(node, b"NODE", ids[1])
    before = redirections(source, "MOVED")
    harness.assert_serves(0, stored)  # MOVED
    assert redirections(source, "MOVED") > before
    harness.assert_serves(0, new)
    assert ask(harness, stored, new, absent) == (True, True, False)
    assert remote(harness).failures == dict.fromkeys(remote(harness).failures, 0)


@pytest.mark.parametrize("kind", [b"hostname", b"unknown-endpoint"])
def test_nodes_that_tell_no_host_are_reached(
    own_cluster: LocalCluster, opened: Callable[..., TierHarness], kind: bytes
) -> None:
    """Hostnames are preferred and none is set: a question mark; or no node tells where it is: nothing."""
    for node in own_cluster.nodes:
        assert node.command(b"CONFIG", b"SET", b"cluster-preferred-endpoint-type", kind) == b"+OK\r\n"
    harness = opened(f"{own_cluster.url}?{PATIENT}")
    store_all(harness)
    for number in NUMBERS:
        harness.assert_serves(0, number)
    moved = own_cluster.nodes[0].command(b"GET", name_of(harness, of_node(own_cluster, harness, 1)[0]))
    assert moved.startswith(b"-MOVED")
    assert b"127.0.0.1" not in moved
    assert {each.host for each in remote(harness)._nodes} == {"127.0.0.1"}


# Nodes that fail


def test_a_killed_node_costs_its_slots_until_others_have_them(
    own_cluster: LocalCluster, opened: Callable[..., TierHarness]
) -> None:
    later = 0.0
    harness = opened(f"{own_cluster.url}?{PATIENT}", name="moving", clock=lambda: time.monotonic() + later)
    store_all(harness)
    tier, dead = remote(harness), own_cluster.nodes[2]
    lost = of_node(own_cluster, harness, 2)
    dead_id = dead.command(b"CLUSTER", b"MYID").split()[1]
    dead.kill()
    until(lambda: {harness.load(0, each)[0] for each in lost} == {Status.UNAVAILABLE})
    for number in set(NUMBERS) - set(lost):
        harness.assert_serves(0, number)
        harness.store(0, number)
    assert ask(harness, *NUMBERS) == tuple(number not in lost for number in NUMBERS)
    assert not tier.is_unavailable
    assert tier.failures["breaker"] == 1
    first, last = 2 * 16384 // 3, 16383
    for node in own_cluster.nodes[:2]:
        until(lambda node=node: node.command(b"CLUSTER", b"FORGET", dead_id) == b"+OK\r\n")  # type: ignore[misc]
    assert own_cluster.nodes[0].command(b"CLUSTER", b"ADDSLOTSRANGE", b"%d" % first, b"%d" % last) == b"+OK\r\n"
    until(lambda: {harness.load(0, each)[0] for each in lost} == {Status.NOT_FOUND})
    store_all(harness)
    for number in NUMBERS:
        harness.assert_serves(0, number)
    threads = [each for each in threading.enumerate() if each.name == "longshore-moving"]
    later = 100.0
    harness.load(0, 0)
    tier._wanted.set()
    until(lambda: sum(each.is_alive() for each in threads) < len(threads))  # those of the node that is no more


def test_a_killed_node_that_comes_back_is_used_again(
    own_cluster: LocalCluster, opened: Callable[..., TierHarness]
) -> None:
    harness = opened(f"{own_cluster.url}?{PATIENT}")
    store_all(harness)
    lost = of_node(own_cluster, harness, 1)
    own_cluster.nodes[1].kill()
    until(lambda: harness.load(0, lost[0])[0] is Status.UNAVAILABLE)
    own_cluster.nodes[1].start()
    until(lambda: {harness.load(0, each)[0] for each in lost} == {Status.NOT_FOUND})
    store_all(harness)
    for number in NUMBERS:
        harness.assert_serves(0, number)


def test_others_go_on_while_a_node_is_stopped(own_cluster: LocalCluster, opened: Callable[..., TierHarness]) -> None:
    harness = opened(f"{own_cluster.url}?{PATIENT}")
    store_all(harness)
    stopped = of_node(own_cluster, harness, 1)
    own_cluster.nodes[1].pause()
    try:
        reads = [harness.op(Op.READ, 0, number, place=number) for number in stopped]
        ticket = harness.tier.submit(reads, math.inf)
        for number in set(NUMBERS) - set(stopped):
            harness.assert_serves(0, number)
        assert harness.tier.poll() == []  # those of the node that is stopped are under way
    finally:
        own_cluster.nodes[1].resume()
    assert set(harness.wait(ticket).statuses) == {Status.OK}


def test_a_slot_without_a_node_is_a_miss(own_cluster: LocalCluster, opened: Callable[..., TierHarness]) -> None:
    harness = opened(f"{own_cluster.url}?{PATIENT}")
    store_all(harness)
    number, *others = of_node(own_cluster, harness, 0)
    slot = b"%d" % slot_of(name_of(harness, number))
    for node in own_cluster.nodes:
        assert node.command(b"CLUSTER", b"DELSLOTS", slot) == b"+OK\r\n"
    assert harness.load(0, number)[0] is Status.NOT_FOUND
    until(lambda: harness.load(0, number)[0] is Status.UNAVAILABLE)  # the map says so now
    assert ask(harness, number, *others) == (False, *[True] * len(others))
    assert remote(harness).failures == dict.fromkeys(remote(harness).failures, 0)
    assert own_cluster.nodes[1].command(b"CLUSTER", b"ADDSLOTS", slot) == b"+OK\r\n"
    until(lambda: harness.load(0, number)[0] is Status.NOT_FOUND)
    harness.store(0, number)
    harness.assert_serves(0, number)


def test_no_node_at_all(opened: Callable[..., TierHarness]) -> None:
    harness = opened(f"valkey-cluster://127.0.0.1:{free_port()},127.0.0.1:{free_port()}")
    assert harness.run(harness.op(Op.READ, 0, 1), harness.op(Op.WRITE, 0, 1)) == (
        Status.UNAVAILABLE,
        Status.UNAVAILABLE,
    )
    assert ask(harness, 1) is None
    until(lambda: harness.load(0, 1)[0] is Status.UNAVAILABLE and remote(harness).is_unavailable)


def test_the_first_node_may_be_down(own_cluster: LocalCluster, opened: Callable[..., TierHarness]) -> None:
    own_cluster.nodes[0].kill()
    harness = opened(f"{own_cluster.url}?{PATIENT}")
    number = of_node(own_cluster, harness, 1)[0]
    until(lambda: harness.run(harness.op(Op.WRITE, 0, number)) == (Status.OK,))


def test_tls(tmp_path: Path, opened: Callable[..., TierHarness]) -> None:
    certificate, private = self_signed(tmp_path)
    files = {"tls_cert_file": str(certificate), "tls_key_file": str(private), "tls_ca_cert_file": str(certificate)}
    files |= {"tls_auth_clients": "no", "tls_cluster": "yes"}
    ports = [{"tls_port": str(free_port())} for _ in range(3)]
    with LocalCluster(tmp_path / "cluster", kind="redis", each=ports, **files) as cluster:
        harness = opened(
            f"rediss-cluster://127.0.0.1:{ports[0]['tls_port']}?ca_file={certificate}&server_name=localhost&{PATIENT}"
        )
        store_all(harness)
        for number in NUMBERS:
            harness.assert_serves(0, number)
        assert all(node.command(b"DBSIZE") != b":0\r\n" for node in cluster.nodes)


# Nodes that lie


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalCluster, list[FaultyProxy]]]:
    """A cluster whose nodes are reached through proxies."""
    ports = [free_port() for _ in range(3)]
    proxies = [FaultyProxy(("127.0.0.1", port), lambda name, number: None) for port in ports]
    each = [{"port": str(port), "cluster_announce_port": str(p.port)} for port, p in zip(ports, proxies, strict=True)]
    with LocalCluster(tmp_path_factory.mktemp("proxied"), each=each) as running:
        yield running, proxies
    for proxy in proxies:
        proxy.close()


def through(proxies: list[FaultyProxy]) -> str:
    return "valkey-cluster://" + ",".join(f"127.0.0.1:{each.port}" for each in proxies)


@pytest.mark.parametrize("fault", WireFault)
def test_each_fault_of_a_node_is_a_miss_there(
    fault: WireFault, proxied: tuple[LocalCluster, list[FaultyProxy]], opened: Callable[..., TierHarness]
) -> None:
    cluster, proxies = proxied
    timeouts = "fetch_timeout=400ms" if fault in {WireFault.STALL, WireFault.SLOW} else "fetch_timeout=2s"
    harness = opened(f"{through(proxies)}?write_timeout=20s&connect_timeout=20s&{timeouts}", failures=10**9)
    store_all(harness)
    bad = of_node(cluster, harness, 1)
    before = proxies[1].fired[fault]
    proxies[1].plan = lambda name, number: fault if name == b"GET" else None
    status, found = harness.load(0, bad[0])
    if status is Status.OK:  # slow, and in time; or sent twice
        assert fault in {WireFault.SLOW, WireFault.EXTRA}
        np.testing.assert_array_equal(found, image(bad[0], IMAGE))
    assert proxies[1].fired[fault] > before
    for number in set(NUMBERS) - set(bad):
        until(lambda number=number: harness.load(0, number)[0] is Status.OK)  # type: ignore[misc]
    proxies[1].plan = lambda name, number: None
    until(lambda: harness.load(0, bad[0])[0] is Status.OK)
    harness.assert_serves(0, bad[0])


def test_no_wrong_byte_among_faults_of_a_node(
    proxied: tuple[LocalCluster, list[FaultyProxy]], opened: Callable[..., TierHarness]
) -> None:
    _, proxies = proxied
    harness = opened(f"{through(proxies)}?fetch_timeout=500ms&write_timeout=500ms&connect_timeout=20s", failures=10**9)
    moved_among_faults(harness, proxies[1], {b"GET", b"SET"}, faults=500, hits=500)
    proxies[1].plan = lambda name, number: None


# longshore doctor


def findings(*arguments: str) -> tuple[int, list[Mapping[str, str]]]:
    small = ("--image", "64KiB", "--images", "4", "--json")
    result = CliRunner().invoke(app, ["doctor", *arguments, *small], catch_exceptions=False)
    found = json.loads(result.output)["findings"]
    return result.exit_code, [each for each in found if "://" in each["about"]]


def test_doctor(tmp_path: Path) -> None:
    good = {"maxmemory": "256mb", "maxmemory_policy": "allkeys-lru", "maxmemory_samples": "20"}
    with LocalCluster(tmp_path / "cluster", **good) as cluster:
        status, found = findings(f"{cluster.url}?{PATIENT}", "--prefill-rate", "0.5")
        assert [each for each in found if each["level"] != "ok"] == []
        assert status == 0
        text = " ".join(each["what"] for each in found)
        assert "a cluster with 3 nodes" in text
        assert "a probe of 512 keys" in text
        assert text.count("policy allkeys-lru") == 3
        port = cluster.nodes[0].port
        _, found = findings(f"valkey://127.0.0.1:{port}/0?{PATIENT}", "--no-write")
        assert [each["what"] for each in found if each["level"] == "broken"] == ["it is a node of a cluster"]
        assert "valkey-cluster://" in str(found)
        cluster.nodes[1].command(b"CONFIG", b"SET", b"cluster-require-full-coverage", b"yes")
        status, found = findings(f"{cluster.url}?{PATIENT}", "--no-write")
        (warning,) = (each for each in found if each["level"] == "warning")
        assert status == 0
        assert "cluster-require-full-coverage is yes" in warning["what"]
        assert warning["what"].startswith(f"127.0.0.1:{cluster.nodes[1].port}: ")
        cluster.nodes[1].command(b"CONFIG", b"SET", b"cluster-require-full-coverage", b"no")
        cluster.nodes[2].command(b"CLUSTER", b"DELSLOTS", b"5", b"6")
        status, found = findings(f"{cluster.url}?{PATIENT}", "--no-write")
        (warning,) = (each for each in found if each["level"] == "warning")
        where = f"127.0.0.1:{cluster.nodes[2].port}"
        assert warning["what"] == f"{where}: its map of slots is not that of the first node: 2 of 16384 slots differ"
        assert warning["advice"].endswith(f"valkey-cli --cluster check {where}")
        for node in cluster.nodes:
            node.command(b"CLUSTER", b"DELSLOTS", b"5")
        status, found = findings(f"{cluster.url}?{PATIENT}", "--no-write")
        assert (status, "1 of 16384 slots have no node" in str(found)) == (1, True)
        cluster.nodes[2].kill()
        status, found = findings(f"{cluster.url}?connect_timeout=500ms", "--no-write")
        assert status == 1
        (dead,) = (each["what"] for each in found if "start it" in each["advice"])
        assert dead.startswith(f"127.0.0.1:{cluster.nodes[2].port}: ")
    status, found = findings(f"{cluster.url}?connect_timeout=500ms")
    assert (status, {each["level"] for each in found}) == (1, {"broken"})
