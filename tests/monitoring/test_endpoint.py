"""The endpoint: Prometheus text, OpenMetrics with exemplars, and health that says what is wrong."""

from __future__ import annotations

import http.client
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from longshore.boundary import Route, Status
from longshore.cache import GroupKeys, TieredCache, TierSpec
from longshore.errors import ConfigError
from longshore.metrics import FollowingCollector, LongshoreCollector, serve_metrics
from longshore.monitoring.endpoint import MetricsServer
from longshore.runtime import EventRecorder, Runtime
from scripted import Scripted

PATH = [bytes([i]) * 32 for i in range(2)]
OPEN_METRICS = {"Accept": "application/openmetrics-text; version=1.0.0"}


def get(server: MetricsServer, path: str, **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(server.address, timeout=60)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def health(server: MetricsServer) -> tuple[int, str, list[str]]:
    status, text = get(server, "/health")
    told = json.loads(text)
    return status, told["status"], told["reasons"]


def make() -> tuple[Runtime, Scripted]:
    mover = Scripted(Route("device", "host"), Route("host", "device"))
    return Runtime(TieredCache([TierSpec("host", 4, 4096)]), [mover]), mover


def load(runtime: Runtime, mover: Scripted, request: str) -> None:
    """A request that loads two chunks, which are stored before."""
    with runtime.batch() as cache:
        cache.store({0: GroupKeys(PATH)}, {0: (0, 1)})
    mover.end(Status.OK, Status.OK)
    runtime.pump()
    with runtime.batch() as cache:
        lease = cache.lookup({0: GroupKeys(PATH)}, runtime.clock(), request=request).lease
        assert lease is not None
        cache.load(lease, {0: (2, 3)})
    mover.end(Status.OK, Status.OK)
    assert runtime.wait_load(lease, 60.0).outcome == (2, ("host", "host"))


def test_a_load_has_its_request_as_an_exemplar() -> None:
    runtime, mover = make()
    load(runtime, mover, "chat-17" + "x" * 200)
    with serve_metrics(LongshoreCollector(runtime), "127.0.0.1:0") as server:
        status, text = get(server, "/metrics", **OPEN_METRICS)
        families = {family.name: family for family in text_string_to_metric_families(text)}
        assert status == 200
        examples = [
            (sample.labels["tier"], sample.exemplar.labels["request"][:7], sample.exemplar.value)
            for sample in families["longshore_load_seconds"].samples
            if sample.exemplar is not None
        ]
        (total,) = [s.value for s in families["longshore_load_seconds"].samples if s.name.endswith("_sum")]
        assert examples == [("host", "chat-17", pytest.approx(total))]
        plain = get(server, "/metrics")[1]
        assert 'longshore_load_seconds_count{tier="host"} 1.0' in plain
        assert "# {request" not in plain


def test_health_is_ready_until_the_control_plane_fails() -> None:
    runtime, _ = make()
    with serve_metrics(LongshoreCollector(runtime), "127.0.0.1:0") as server:
        assert health(server) == (200, "ready", [])
        runtime.fail(RuntimeError("broken for a test"))
        status, name, (reason,) = health(server)
        assert (status, name) == (503, "disabled")
        assert "RuntimeError" in reason
        assert 'longshore_tier_available{tier="host"} 0.0' in get(server, "/metrics")[1]


def test_health_is_disabled_without_open_tiers() -> None:
    runtime, _ = make()
    with serve_metrics(LongshoreCollector(runtime), "127.0.0.1:0") as server:
        runtime.close(1.0)
        assert health(server) == (503, "disabled", ["the tiers were closed"])
    with serve_metrics(FollowingCollector(), "127.0.0.1:0") as server:
        assert health(server) == (503, "disabled", ["no tiers are open"])


def test_events_that_cannot_be_written_degrade_the_health(tmp_path: Path) -> None:
    runtime, _ = make()
    recorder = EventRecorder(runtime, tmp_path / "missing" / "events", 1 << 20, start=False)
    with serve_metrics(LongshoreCollector(runtime, events=recorder), "127.0.0.1:0") as server:
        assert health(server) == (200, "degraded", ["events: the event file cannot be written"])


def test_a_slow_scraper_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, _ = make()
    monkeypatch.setattr("longshore.monitoring.endpoint._Quiet.timeout", 600.0)
    with serve_metrics(LongshoreCollector(runtime), "127.0.0.1:0") as server:
        host, _, port = server.address.rpartition(":")
        with socket.create_connection((host, int(port))) as slow:
            slow.sendall(b"GET /metr")
            assert get(server, "/metrics")[0] == 200


def test_another_path_says_what_there_is() -> None:
    runtime, _ = make()
    with serve_metrics(LongshoreCollector(runtime), "127.0.0.1:0") as server:
        status, text = get(server, "/")
        assert status == 404
        assert "/metrics or /health" in text


@pytest.mark.parametrize("address", ["", "9464", "localhost", ":9464", "localhost:x", "localhost:70000"])
def test_an_invalid_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"expected a host and a port, such as 127\.0\.0\.1:9464"):
        serve_metrics(LongshoreCollector(make()[0]), address)


def test_taken_port_is_refused_and_a_closed_one_free() -> None:
    source: Any = LongshoreCollector(make()[0])
    with serve_metrics(source, "127.0.0.1:0") as server, pytest.raises(ConfigError, match="choose a free port"):
        serve_metrics(source, server.address)
    server.close()
    serve_metrics(source, server.address).close()


def test_nothing_is_collected_before_a_scrape_also_over_ipv6() -> None:
    class Source(LongshoreCollector):
        reads = 0

        def collect(self) -> Any:
            self.reads += 1
            return super().collect()

    source = Source(make()[0])
    with serve_metrics(source, "[::1]:0" if socket.has_dualstack_ipv6() else "127.0.0.1:0") as server:
        assert source.reads == 0
        assert get(server, "/metrics")[0] == 200
        assert source.reads == 1
