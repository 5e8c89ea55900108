"""Reads metrics endpoints, and sums up what engines do, for `longshore top`.

scrape(url) ─► Scrape ── and the one before ──► summary: what happened between the two, or since the start
"""

from __future__ import annotations

import math
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from longshore.boundary import DEVICE
from longshore.errors import ConfigError
from longshore.monitoring.metric_names import LOAD_SECONDS

_LONGEST = 64 << 20
"""Bytes of one answer that are read."""

Samples = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


class Scrape(NamedTuple):
    """What an endpoint said at `at` (seconds of a monotonic clock); `error` says why it said nothing."""

    url: str
    at: float
    samples: Samples
    error: str = ""


def address_of(text: str) -> str:
    """The URL of metrics that `text` names: a host and port, or a URL. Raises `ConfigError`."""
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        valid = False
    if not valid:
        raise ConfigError(
            f"{text or repr(text)}: expected the address of a metrics endpoint, such as http://127.0.0.1:9464"
        )
    return url if parts.path.strip("/") else f"{url.rstrip('/')}/metrics"


def scrape(url: str, timeout: float) -> Scrape:
    """Read one endpoint, within `timeout` seconds for each step. Never raises for what the other side does."""
    try:
        with urllib.request.urlopen(url, timeout=timeout) as answer:  # noqa: S310 - `address_of` has checked the scheme
            text = answer.read(_LONGEST).decode("utf-8", "replace")
        samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name.startswith("longshore_") and math.isfinite(sample.value)
        }
    except urllib.error.HTTPError as error:
        return Scrape(url, time.monotonic(), {}, f"HTTP {error.code}")
    except (OSError, HTTPException, ValueError, KeyError, IndexError) as error:
        return Scrape(url, time.monotonic(), {}, _words(error))
    return Scrape(url, time.monotonic(), samples, "" if samples else "no metrics of Longshore there")


def summary(now: Scrape, before: Scrape | None = None) -> dict[str, Any]:
    """What happened between two scrapes; without `before`, or if the engine was restarted, since its start.

    `seconds` is the time between the two, `None` since the start. Ratios are `None` where nothing was looked up.
    """
    found: dict[str, Any] = {"url": now.url, "state": "away" if now.error else "up"}
    if now.error:
        return {**found, "error": now.error}
    if before is not None and (before.error or _is_restarted(before.samples, now.samples)):
        before = None
    counts = _Sums(now.samples, {} if before is None else before.samples)
    levels = _Sums(now.samples, {})
    hits, misses = counts.by("longshore_hit_chunks_total", "tier"), counts.by("longshore_miss_chunks_total", "reason")
    asked = sum(hits.values()) + sum(misses.values())
    used, size = levels.by("longshore_used_bytes", "tier"), levels.by("longshore_capacity_bytes", "tier")
    evicted, dropped = (counts.by(f"longshore_{what}_chunks_total", "tier") for what in ("evicted", "dropped"))
    loads, spent = (counts.by(f"{LOAD_SECONDS}_{what}", "tier") for what in ("count", "sum"))
    available = levels.by("longshore_tier_available", "tier")
    moved = counts.by("longshore_moved_bytes_total", "route")
    return {
        **found,
        "version": next(iter(levels.by("longshore_build_info", "version")), ""),
        "seconds": None if before is None else now.at - before.at,
        "faults": levels.total("longshore_control_plane_faults_total"),
        "hit_ratio": sum(hits.values()) / asked if asked else None,
        "bytes_in": sum(count for route, count in moved.items() if route.endswith(f"->{DEVICE}")),
        "bytes_out": sum(count for route, count in moved.items() if route.startswith(f"{DEVICE}->")),
        "jobs_in_flight": levels.total("longshore_jobs_in_flight"),
        "queued": levels.by("longshore_queued_transfers", "class"),
        "tiers": [
            {
                "tier": tier,
                "available": available.get(tier, 1.0) > 0,
                "hits": hits[tier],
                "hit_ratio": hits[tier] / asked if asked else None,
                "used_bytes": used.get(tier),
                "capacity_bytes": size.get(tier),
                "evicted": evicted.get(tier, 0.0),
                "dropped": dropped.get(tier, 0.0),
                "load_seconds": spent[tier] / loads[tier] if loads.get(tier) else None,
            }
            for tier in hits
        ],
        "misses": dict(sorted(misses.items(), key=lambda each: -each[1])),
        "bytes": moved,
    }


class _Sums:
    """Sums of samples by one label, of the increments since `before`."""

    def __init__(self, now: Samples, before: Samples) -> None:
        self._now = now
        self._before = before

    def by(self, name: str, label: str) -> dict[str, float]:
        """The sum for each value of `label`."""
        found: defaultdict[str, float] = defaultdict(float)
        for (each, labels), value in self._now.items():
            if each == name:
                found[dict(labels).get(label, "")] += value - self._before.get((each, labels), 0.0)
        return dict(found)

    def total(self, name: str) -> float:
        """The sum of all."""
        return sum(self.by(name, "").values())


def _is_restarted(before: Samples, now: Samples) -> bool:
    """Whether a counter has gone back."""
    return any(
        value < before.get((name, labels), 0.0) for (name, labels), value in now.items() if name.endswith("_total")
    )


def _words(error: Exception) -> str:
    reason = getattr(error, "reason", error)
    if isinstance(reason, TimeoutError):
        return "no answer in time"
    return getattr(reason, "strerror", None) or str(reason) or type(error).__name__
