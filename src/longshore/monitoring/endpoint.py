"""An HTTP server for `/metrics` and `/health`, for engines that have none of their own.

    GET /metrics    every metric, as Prometheus text; as OpenMetrics, with exemplars, if the scraper accepts it
    GET /health     {"status": "ready" | "degraded" | "disabled", "reasons": [...]}

    ready       200   all tiers serve reads and writes
    degraded    200   a tier is unavailable, read-only or disabled: its chunks are recomputed, the others serve
    disabled    503   no tier serves: the control plane has failed, or the tiers are closed or not open yet

The engine computes correct answers in all three states. A load balancer may prefer replicas that are ready. Do
not restart an engine because it is degraded: that does not bring a remote store back.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from longshore.errors import ConfigError

_HTTP = {"ready": "200 OK", "degraded": "200 OK", "disabled": "503 Service Unavailable"}
_SECONDS = 10.0
"""A connection that sends nothing for so long is closed."""


class HealthReport(NamedTuple):
    """Whether the tiers serve requests: `ready`, `degraded` or `disabled`, and why."""

    status: str
    reasons: tuple[str, ...] = ()

    @classmethod
    def of(cls, reasons: Sequence[str]) -> HealthReport:
        """Ready, or degraded for `reasons`."""
        return cls("degraded" if reasons else "ready", tuple(reasons))

    @classmethod
    def disabled(cls, reason: str) -> HealthReport:
        """No tier serves."""
        return cls("disabled", (reason,))


class MetricsSource(Protocol):
    """What is served: the collectors of `longshore.metrics`."""

    def collect(self) -> Iterable[Any]:
        """Metric families."""

    def health(self) -> HealthReport:
        """The health of the tiers."""


class _Server6(ThreadingWSGIServer):
    address_family = socket.AF_INET6


class _Quiet(WSGIRequestHandler):
    timeout = _SECONDS

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - of the base class
        """Log nothing: there is a scrape every few seconds."""


class MetricsServer:
    """A server that runs in a thread of its own. A context manager; `close` is idempotent.

    Attributes:
        address: Host and port, the port being the one chosen by the system if 0 was asked for.
    """

    def __init__(self, source: MetricsSource, address: str = "127.0.0.1:9464") -> None:
        """Serve `/metrics` and `/health` of `source` at `address`, a host and a port, until it is closed.

        `source` is `tiers.collector`, `PrefixStore.collector` or a `LongshoreCollector`. Only this machine reaches the
        default address. There is neither encryption nor a password. Raises `ConfigError` if it cannot be used.
        """
        host, port = _parse(address)
        registry = CollectorRegistry(auto_describe=False)  # registration reads no metrics
        registry.register(source)
        kind = _Server6 if ":" in host else ThreadingWSGIServer
        try:
            self._server = make_server(host, port, _application(registry, source), kind, _Quiet)
        except OSError as error:
            raise ConfigError(f"metrics address {address}: {error.strerror or error}; choose a free port") from error
        name = f"[{host}]" if ":" in host else host
        self.address = f"{name}:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="longshore-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving, and free the port."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


serve_metrics = MetricsServer


def _parse(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 0xFFFF:
        raise ConfigError(f"metrics address: expected a host and a port, such as 127.0.0.1:9464, got {address!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _application(registry: CollectorRegistry, source: MetricsSource) -> Callable[..., Any]:
    metrics = make_wsgi_app(registry)

    def respond(environ: dict[str, Any], start: Callable[..., Any]) -> Any:
        path = environ.get("PATH_INFO", "/")
        if path == "/metrics":
            return metrics(environ, start)
        if path == "/health":
            health = source.health()
            status, body = _HTTP[health.status], json.dumps(health._asdict())
        else:
            status, body = "404 Not Found", json.dumps({"error": "expected /metrics or /health"})
        start(status, [("Content-Type", "application/json"), ("Cache-Control", "no-store")])
        return [body.encode() + b"\n"]

    return respond
