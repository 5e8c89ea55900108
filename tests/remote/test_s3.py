"""Real servers of S3: the conformance suite, refusals by name, and what becomes of requests when a server fails."""

import itertools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import obstore
import pytest
from remotes import IMAGE, PATIENT, TIMEOUT, ask, moved_among_faults, remote, until

from certificates import self_signed
from longshore.boundary import Status
from longshore.testing import FaultyHttpProxy, HttpFault, TierHarness, TierTests, WireFault
from longshore.testing.local_server import LocalS3, free_port
from longshore.testing.tier_harness import image, key
from longshore.tiers.arena import Arena
from longshore.tiers.base import Op, Tier
from longshore.tiers.remote import RemoteTier, parse_url
from longshore.tiers.remote.s3 import S3Session
from longshore.tiers.remote.work import RemoteError

NEVER = 10**9


def descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


class TestS3(TierTests):
    by_key = True
    persistent = True

    @pytest.fixture(autouse=True)
    def _at(self, s3: LocalS3) -> None:
        self.url = s3.url(f"requests=4&{PATIENT}")
        self.namespace = os.urandom(32)

    def open_tier(self, arena: Arena, directory: Path) -> Tier:
        return RemoteTier(self.url, arena=arena, image_bytes=self.image_bytes, namespace=self.namespace)

    def test_close_gives_back_threads_and_descriptors(self, tmp_path: Path) -> None:
        """obstore closes connections in threads of its own, which stay."""
        harness = self._open_harness(tmp_path / "first")
        harness.store(0, 0)
        harness.tier.close()
        before = descriptors()
        for _ in range(8):
            harness.reopen()
            harness.store(0, 1)
        harness.tier.close()
        harness.arena.close()
        until(lambda: len(descriptors()) <= len(before))


@pytest.fixture
def proxied(weed: LocalS3) -> Iterator[FaultyHttpProxy]:
    proxy = FaultyHttpProxy(("127.0.0.1", weed.port), lambda name, number: None)
    yield proxy
    proxy.close()


def session_of(server: LocalS3, options: str = PATIENT) -> S3Session:
    return S3Session(parse_url(server.url(options)), time.monotonic)


# What replicas share


def test_replicas_share_a_namespace_and_send_nothing_twice(s3: LocalS3, opened: Callable[..., TierHarness]) -> None:
    url, namespace = s3.url(PATIENT), os.urandom(32)
    one, same, other = opened(url, namespace), opened(url, namespace, generation=5), opened(url)
    one.store(0, 1)
    same.assert_serves(0, 1)
    assert ask(same, 1, 2) == (True, False)
    other.assert_misses(0, 1)
    same.tier.reset(6, namespace)
    write = same.op(Op.WRITE, 0, 1, generation=6)
    same.bytes_of(write)[:] = image(1, IMAGE)
    assert same.run(write) == (Status.OK,)
    assert (remote(one)._budget.spent, remote(same)._budget.spent) == (IMAGE + 128, 0)


def test_a_probe_of_many_keys(s3: LocalS3, opened: Callable[..., TierHarness]) -> None:
    harness = opened(s3.url(PATIENT))
    for number in range(0, 8, 2):
        harness.store(0, number)
    assert ask(harness, *range(256)) == tuple(number in {0, 2, 4, 6} for number in range(256))


def test_a_probe_that_is_late_keeps_what_was_answered(
    proxied: FaultyHttpProxy, weed: LocalS3, opened: Callable[..., TierHarness]
) -> None:
    harness = opened(weed.url(PATIENT.replace("probe_timeout=20s", "probe_timeout=5s"), port=proxied.port))
    for number in range(4):
        harness.store(0, number)
    heads, allowed = itertools.count(1), 96
    proxied.plan = lambda name, _: WireFault.STALL if name == b"HEAD" and next(heads) > allowed else None
    found = ask(harness, *range(256))
    assert found is not None
    assert any(found[:4])  # one of them may have been behind the 96 where its connection opened late
    assert not any(found[4:])
    assert remote(harness).failures["timeout"] == 0
    assert proxied.fired[WireFault.STALL] > 0
    assert ask(harness, *range(4)) is None, "nothing was answered"
    assert remote(harness).failures["timeout"] == 1


def test_a_changed_access_key_is_used_by_open_sessions(weed: LocalS3, tmp_path: Path) -> None:
    settings = parse_url(weed.url(PATIENT))
    changed = replace(settings, password_file=str(tmp_path / "secret"))
    (tmp_path / "secret").write_text("of nobody")
    session = S3Session(changed, time.monotonic)
    with pytest.raises(RemoteError, match="set the right access key"):
        session.check(math.inf)
    (tmp_path / "secret").write_text(Path(settings.password_file).read_text())
    until(lambda: is_open(session))  # obstore asks for the key again after 100 ms


def is_open(session: S3Session) -> bool:
    try:
        session.check(math.inf)
    except RemoteError:
        return False
    return True


def test_a_late_write_is_not_sent(proxied: FaultyHttpProxy, weed: LocalS3, opened: Callable[..., TierHarness]) -> None:
    harness = opened(weed.url(f"requests=1&{PATIENT}", port=proxied.port))
    late, names = threading.Event(), list[bytes]()

    def hold(name: bytes, number: int) -> None:
        names.append(name)
        assert late.wait(TIMEOUT)

    proxied.plan = hold
    assert harness.run(harness.op(Op.WRITE, 0, 1), deadline=time.monotonic() + 0.5) == (Status.DEADLINE,)
    late.set()
    harness.store(0, 2)  # by the same thread, after it has done with the other one
    assert names == [b"HEAD", b"HEAD", b"PUT"]


def test_values_expire(s3: LocalS3, opened: Callable[..., TierHarness]) -> None:
    harness = opened(s3.url(f"ttl=3s&{PATIENT}"))
    harness.store(0, 1)
    until(lambda: ask(harness, 1) == (False,))
    assert harness.load(0, 1)[0] is Status.NOT_FOUND
    written = remote(harness)._budget.spent
    harness.store(0, 1)
    assert remote(harness)._budget.spent == 2 * written


def test_something_else_under_our_key_is_a_miss(s3: LocalS3, opened: Callable[..., TierHarness]) -> None:
    harness = opened(s3.url(PATIENT))
    client = session_of(s3)._client(20.0)
    path = f"ls1/{remote(harness).namespace.hex()}/{key(1).hex()}"
    for value, status in (
        (b"x" * (IMAGE + 128), Status.CORRUPT),
        (b"short", Status.SHORT),
        (b"y" * (IMAGE + 129), Status.MISMATCH),
    ):
        obstore.put(client, path, value)
        assert harness.load(0, 1)[0] is status
    harness.store(0, 1)
    harness.assert_serves(0, 1)


# Refusals, by name


@pytest.mark.parametrize(
    ("user", "secret", "bucket", "reason", "said"),
    [
        ("AKadmin", "wrong", "images", "denied", "SignatureDoesNotMatch: set the right access key"),
        ("AKnobody", "wrong", "images", "denied", "InvalidAccessKeyId: set the right access key"),
        ("AKadmin", "secret-of-admin", "absent", "refused", "NoSuchBucket: create the bucket absent"),
    ],
)
def test_a_store_that_is_set_up_wrongly_says_so_once(
    user: str,
    secret: str,
    bucket: str,
    reason: str,
    said: str,
    weed: LocalS3,
    opened: Callable[..., TierHarness],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    file = tmp_path / "secret"
    file.write_text(secret)
    endpoint = f"endpoint=http://127.0.0.1:{weed.port}"
    harness = opened(f"s3://{bucket}?{endpoint}&user={user}&password_file={file}&{PATIENT}")
    ended = {harness.run(harness.op(Op.READ, 0, number))[0] for number in range(8)}
    assert ended == {Status.IO_ERROR, Status.UNAVAILABLE}
    assert remote(harness).failures[reason] >= 3
    assert remote(harness).failures["breaker"] == 1
    assert caplog.text.count(said) == 1
    for word in (secret, "secret-of-admin", user):
        assert word not in caplog.text + repr(remote(harness).settings) + str(dict(remote(harness).failures))


def test_a_user_who_may_not_write_reads(
    weed: LocalS3, opened: Callable[..., TierHarness], caplog: pytest.LogCaptureFixture
) -> None:
    namespace = os.urandom(32)
    opened(weed.url(PATIENT), namespace).store(0, 1)
    harness = opened(weed.url(PATIENT, user="reader"), namespace)
    tier = remote(harness)
    while tier.failures["denied"] < 3:
        assert harness.run(harness.op(Op.WRITE, 0, 2)) == (Status.IO_ERROR,)
    harness.assert_serves(0, 1)
    assert ask(harness, 1, 2) == (True, False)
    assert tier.failures["breaker"] == 0
    assert caplog.text.count("takes no writes: the server answered 403 AccessDenied: allow s3:GetObject") == 1


def test_access_keys_come_from_our_variables_and_awss(
    weed: LocalS3, opened: Callable[..., TierHarness], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"s3://images?endpoint=http://127.0.0.1:{weed.port}&{PATIENT}"
    assert opened(url, failures=NEVER).load(0, 1)[0] is Status.IO_ERROR
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKadmin")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-admin")
    assert opened(url).load(0, 1)[0] is Status.NOT_FOUND
    monkeypatch.setenv("LONGSHORE_REMOTE_USER", "AKreader")
    assert opened(url).load(0, 1)[0] is Status.UNAVAILABLE  # half of an access key
    monkeypatch.setenv("LONGSHORE_REMOTE_PASSWORD", "secret-of-reader")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of another key")
    harness = opened(url)
    assert harness.load(0, 1)[0] is Status.NOT_FOUND
    assert harness.run(harness.op(Op.WRITE, 0, 1)) == (Status.IO_ERROR,)
    assert remote(harness).failures["denied"] == 1


def test_tls_verifies_the_server(tmp_path: Path, opened: Callable[..., TierHarness]) -> None:
    with LocalS3("seaweedfs", tmp_path / "server", self_signed(tmp_path)) as server:
        good = opened(server.url(PATIENT))
        good.store(0, 1)
        good.assert_serves(0, 1)
        assert ask(good, 1, 2) == (True, False)
        unknown = opened(server.url(PATIENT).replace(f"&ca_file={tmp_path / 'cert.pem'}", ""))
        assert unknown.run(unknown.op(Op.READ, 0, 1)) == (Status.UNAVAILABLE,)
        assert remote(unknown).failures["connection"] >= 1


@pytest.mark.parametrize(
    ("fault", "reason", "status"),
    [
        (HttpFault.DENIED, "denied", Status.IO_ERROR),
        (HttpFault.SKEWED, "clock", Status.IO_ERROR),
        (HttpFault.NO_BUCKET, "refused", Status.IO_ERROR),
        (HttpFault.THROTTLED, "throttled", Status.IO_ERROR),
        (HttpFault.SLOW_DOWN, "throttled", Status.IO_ERROR),
        (HttpFault.MISSING, "", Status.NOT_FOUND),
        (WireFault.ERROR, "server", Status.IO_ERROR),
        (WireFault.STALL, "timeout", Status.DEADLINE),
        (WireFault.SLOW, "timeout", Status.DEADLINE),
        (WireFault.HALF, "connection", Status.UNAVAILABLE),
    ],
)
def test_each_refusal_is_a_miss_that_is_counted_by_name(
    fault: HttpFault | WireFault,
    reason: str,
    status: Status,
    proxied: FaultyHttpProxy,
    weed: LocalS3,
    opened: Callable[..., TierHarness],
) -> None:
    short = fault in {WireFault.STALL, WireFault.SLOW}
    url = weed.url(PATIENT.replace("fetch_timeout=20s", "fetch_timeout=500ms" if short else "fetch_timeout=20s"))
    harness = opened(url.replace(f":{weed.port}", f":{proxied.port}"), failures=NEVER)
    harness.store(0, 1)
    proxied.plan = lambda name, number: fault if name == b"GET" else None
    assert harness.load(0, 1)[0] is status
    assert proxied.fired[fault] == 1
    failed = {name: count for name, count in remote(harness).failures.items() if count}
    assert failed == ({reason: 1} if reason else {})
    proxied.plan = lambda name, number: None
    until(lambda: harness.load(0, 1)[0] is Status.OK)
    harness.assert_serves(0, 1)


def test_a_clock_that_differs_is_named(
    proxied: FaultyHttpProxy, weed: LocalS3, opened: Callable[..., TierHarness], caplog: pytest.LogCaptureFixture
) -> None:
    """HEAD, of which probes and writes consist, has no text to name it."""
    harness = opened(weed.url(PATIENT, port=proxied.port), failures=NEVER)
    proxied.plan = lambda name, number: HttpFault.SKEWED
    assert ask(harness, 1, 2) is None
    assert remote(harness).failures["clock"] == 1
    assert harness.run(harness.op(Op.WRITE, 0, 1)) == (Status.IO_ERROR,)
    assert remote(harness).failures["clock"] == 2
    own = opened(weed.url(PATIENT, port=proxied.port))
    for number in range(4):
        own.load(0, number)
    assert caplog.text.count("synchronise it (timedatectl") == 1
    assert proxied.fired[HttpFault.SKEWED] >= 6


def test_throttled_writes_pause_and_reads_go_on(
    proxied: FaultyHttpProxy, weed: LocalS3, opened: Callable[..., TierHarness]
) -> None:
    harness = opened(weed.url(PATIENT, port=proxied.port))
    harness.store(0, 1)
    proxied.plan = lambda name, number: HttpFault.SLOW_DOWN if name == b"PUT" else None
    while remote(harness).failures["throttled"] < 4:
        assert harness.run(harness.op(Op.WRITE, 0, 2)) == (Status.IO_ERROR,)
    harness.assert_serves(0, 1)
    assert remote(harness).failures["breaker"] == 0
    proxied.plan = lambda name, number: WireFault.FULL if name == b"PUT" else None
    until(lambda: harness.run(harness.op(Op.WRITE, 0, 2)) == (Status.NO_SPACE,))
    assert remote(harness).failures["full"] >= 1


# A server that does not answer


def test_no_server_costs_nothing_but_misses(opened: Callable[..., TierHarness]) -> None:
    harness = opened(f"s3://images?endpoint=http://127.0.0.1:{free_port()}")
    assert harness.run(harness.op(Op.READ, 0, 1), harness.op(Op.WRITE, 0, 1)) == (
        Status.UNAVAILABLE,
        Status.UNAVAILABLE,
    )
    assert ask(harness, 1) is None
    assert remote(harness).failures["connection"] >= 1


def test_a_server_that_stops_dies_and_restarts(tmp_path: Path, opened: Callable[..., TierHarness]) -> None:
    with LocalS3("seaweedfs", tmp_path / "server") as server:
        patient = opened(server.url(PATIENT))
        patient.store(0, 1)
        harness = opened(
            server.url("fetch_timeout=300ms&probe_timeout=300ms&connect_timeout=300ms"), remote(patient).namespace
        )
        server.pause()
        ended = [harness.run(harness.op(Op.READ, 0, 1))[0] for _ in range(8)]
        assert ask(harness, 1) is None
        server.resume()
        assert ended[0] is Status.DEADLINE
        assert ended[-1] is Status.UNAVAILABLE
        assert remote(harness).failures["breaker"] == 1
        until(lambda: not remote(harness).is_unavailable)
        server.kill()
        assert {patient.run(patient.op(Op.READ, 0, 1))[0] for _ in range(4)} == {Status.UNAVAILABLE}
        assert remote(patient).is_unavailable
        server.start()
        until(lambda: not remote(patient).is_unavailable)
        patient.assert_serves(0, 1)


def test_idle_connections_that_a_server_closed_cost_no_request(
    opened: Callable[..., TierHarness], tmp_path: Path
) -> None:
    with LocalS3("moto", tmp_path / "server") as server:
        harness = opened(server.url(PATIENT))
        harness.store(0, 1)
        harness.assert_serves(0, 1)
        server.kill()
        server.start()
        assert ask(harness, 1) == (False,)
        assert harness.load(0, 1)[0] is Status.NOT_FOUND
        harness.store(0, 1)
        assert remote(harness).failures == dict.fromkeys(remote(harness).failures, 0)


def test_hung_request_ends_at_its_deadline_without_arena_writes(
    proxied: FaultyHttpProxy, weed: LocalS3, opened: Callable[..., TierHarness]
) -> None:
    harness = opened(weed.url(PATIENT, port=proxied.port), failures=NEVER)
    harness.store(0, 1)
    stopped: list[int] = []

    def stop(name: bytes, number: int) -> None:
        if name == b"GET" and not stopped:
            weed.pause()
            stopped.append(number)

    proxied.plan = stop
    read = harness.op(Op.READ, 0, 1)
    harness.bytes_of(read)[:] = 0xCC
    try:
        assert harness.run(read, deadline=time.monotonic() + 5.0) == (Status.DEADLINE,)
        assert stopped
    finally:
        stopped.append(0)
        weed.resume()
    harness.tier.close()
    assert np.all(harness.bytes_of(read) == 0xCC)
    assert remote(harness).failures["timeout"] == 1


def test_a_request_that_outlives_its_image_is_one_failure(
    proxied: FaultyHttpProxy, weed: LocalS3, opened: Callable[..., TierHarness]
) -> None:
    harness = opened(weed.url("connect_timeout=20s&fetch_timeout=3s", port=proxied.port), failures=NEVER)
    proxied.plan = lambda name, number: WireFault.STALL
    assert harness.run(harness.op(Op.READ, 0, 1), deadline=time.monotonic() + 2.0) == (Status.DEADLINE,)
    harness.tier.close()  # waits for the request
    assert proxied.fired[WireFault.STALL] == 1
    assert remote(harness).failures["timeout"] == 1


# A server that lies


@pytest.mark.parametrize("fault", WireFault)
def test_each_fault_is_a_miss(
    fault: WireFault, proxied: FaultyHttpProxy, weed: LocalS3, opened: Callable[..., TierHarness]
) -> None:
    url = weed.url("fetch_timeout=2s&write_timeout=20s&connect_timeout=20s", port=proxied.port)
    harness = opened(url, failures=NEVER)
    for number in range(4):
        harness.store(0, number)
    proxied.plan = lambda name, number: fault if name == b"GET" else None
    status, found = harness.load(0, 1)
    if status is Status.OK:  # slow, and in time; or sent twice
        assert fault in {WireFault.SLOW, WireFault.EXTRA}
        np.testing.assert_array_equal(found, image(1, IMAGE))
    assert proxied.fired[fault] > 0
    proxied.plan = lambda name, number: None
    until(lambda: harness.load(0, 1)[0] is Status.OK)
    harness.assert_serves(0, 1)


def test_no_wrong_byte_among_faults(
    proxied: FaultyHttpProxy, weed: LocalS3, opened: Callable[..., TierHarness]
) -> None:
    url = weed.url("fetch_timeout=500ms&write_timeout=500ms&connect_timeout=20s&requests=8", port=proxied.port)
    harness = opened(url, failures=NEVER)
    moved_among_faults(harness, proxied, {b"GET", b"PUT"}, faults=3_000, hits=500)


# What is small


def test_images_below_a_mebibyte_are_warned_of(s3: LocalS3, caplog: pytest.LogCaptureFixture) -> None:
    for size, said in ((1 << 20, 0), (256 << 10, 1)):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "longshore.tiers.remote.s3"):  # the benchmark sets another level
            tier = RemoteTier(s3.url(), arena=Arena(1 << 20), image_bytes=(2 << 20, size), namespace=bytes(32))
            tier.close()
        assert caplog.text.count("chunk images have 256 KiB: below 1024 KiB") == said


def test_an_image_larger_than_a_part_is_one_object(weed: LocalS3) -> None:
    size = 12 << 20
    arena = Arena(2 * size)
    arena.array[:size] = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    name = os.urandom(32)
    tier = RemoteTier(weed.url(PATIENT), arena=arena, image_bytes=size, namespace=name)
    harness = TierHarness(lambda: tier, arena, by_key=True)
    for op, at in ((Op.WRITE, 0), (Op.READ, size)):
        assert harness.run(harness.op(op, 0, 1, offset=at, length=size)) == (Status.OK,)
    assert np.array_equal(arena.array[:size], arena.array[size:])
    tier.close()
    assert tier.failures == dict.fromkeys(tier.failures, 0)
    assert tier._budget.spent == size + 128
    found = obstore.head(session_of(weed)._client(20.0), f"ls1/{name.hex()}/{key(1).hex()}")
    assert "-" not in str(found["e_tag"])  # as after an upload in parts
