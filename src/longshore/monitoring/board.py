"""A Grafana dashboard, made from `board.json` and the table: an overview, and a folded row for each group."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from longshore.monitoring.metric_names import GROUPS, Metric, MetricKind

_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_WHERE = '{instance=~"$instance"}'
_WIDTH, _HEIGHT = 8, 7
_QUANTILES = (0.5, 0.95, 0.99)

_HITS = f"rate(longshore_hit_chunks_total{_WHERE}[$__rate_interval])"
_MISSES = f"rate(longshore_miss_chunks_total{_WHERE}[$__rate_interval])"
_OVERVIEW = (
    (
        "Hit ratio by tier",
        "percentunit",
        f"sum by (tier) ({_HITS}) / scalar(sum({_HITS}) + sum({_MISSES}))",
        "{{tier}}",
        "Chunks loaded from each tier, as a share of all chunks looked up below the device",
    ),
    (
        "Misses by reason",
        "cps",
        f"sum by (reason) ({_MISSES}) > 0",
        "{{reason}}",
        "Chunks computed again, and why; docs/metrics.md explains each reason",
    ),
    (
        "Bytes by route",
        "Bps",
        f"sum by (route) (rate(longshore_moved_bytes_total{_WHERE}[$__rate_interval]))",
        "{{route}}",
        "Bytes transferred per second",
    ),
    (
        "Load latency, 95th percentile",
        "s",
        f"histogram_quantile(0.95, sum by (le, tier) (rate(longshore_load_seconds_bucket{_WHERE}[$__rate_interval])))",
        "{{tier}}",
        "From the order of a load until its chunks are on the device",
    ),
    (
        "Tier usage",
        "percentunit",
        f"sum by (tier) (longshore_used_bytes{_WHERE}) / sum by (tier) (longshore_capacity_bytes{_WHERE})",
        "{{tier}}",
        "Used part of each tier",
    ),
    (
        "Evictions by tier",
        "cps",
        f"sum by (tier) (rate(longshore_evicted_chunks_total{_WHERE}[$__rate_interval]))",
        "{{tier}}",
        "Chunks evicted per second",
    ),
)


def as_json() -> str:
    """The dashboard, for the import dialogue or the provisioning folder of Grafana."""
    panels: list[dict[str, Any]] = [_row("Overview", 0, 0)]
    top = 1
    for at, (title, unit, expression, legend, about) in enumerate(_OVERVIEW):
        panels.append(_panel(title, about, unit, [(expression, legend)], at, top))
    top += 2 * _HEIGHT
    for group, metrics in GROUPS.items():
        inside = [_of_metric(name, metric, at, top + 1) for at, (name, metric) in enumerate(metrics.items())]
        panels.append({**_row(group, 0, top), "collapsed": True, "panels": inside})
        top += 1
    for number, panel in enumerate([*panels, *(each for row in panels for each in row.get("panels", ()))], 1):
        panel["id"] = number
    board = json.loads(resources.files(__package__).joinpath("board.json").read_text("utf-8"))
    return json.dumps({**board, "panels": panels}, indent=1) + "\n"


def _row(title: str, x: int, y: int) -> dict[str, Any]:
    place = {"x": x, "y": y, "w": 24, "h": 1}
    return {"type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}


def _of_metric(name: str, metric: Metric, at: int, top: int) -> dict[str, Any]:
    """The panel of one metric of the table."""
    legend = " ".join(f"{{{{{label}}}}}" for label in metric.labels) or "{{instance}}"
    by = ", ".join(metric.labels or ("instance",))
    if metric.kind is MetricKind.HISTOGRAM:
        rate = f"sum by ({', '.join(('le', *metric.labels))}) (rate({name}_bucket{_WHERE}[$__rate_interval]))"
        targets = [
            (f"histogram_quantile({quantile}, {rate})", f"p{quantile * 100:g} {legend}") for quantile in _QUANTILES
        ]
        unit = "s" if name.endswith("_seconds") else "bytes"
    elif metric.kind is MetricKind.COUNTER:
        targets = [(f"sum by ({by}) (rate({name}_total{_WHERE}[$__rate_interval]))", legend)]
        unit = "Bps" if name.endswith("_bytes") else "percentunit" if name.endswith("_seconds") else "cps"
    else:
        targets = [(f"sum by ({by}) ({name}{_WHERE})", legend)]
        unit = "bytes" if name.endswith("_bytes") else "short"
    return _panel(name.removeprefix("longshore_").replace("_", " "), metric.help, unit, targets, at, top)


def _panel(title: str, about: str, unit: str, targets: list[tuple[str, str]], at: int, top: int) -> dict[str, Any]:
    """A time series, the one number `at` of those below `top`: three in a line."""
    return {
        "type": "timeseries",
        "title": title,
        "description": about,
        "datasource": _SOURCE,
        "gridPos": {"x": at % 3 * _WIDTH, "y": top + at // 3 * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": _SOURCE, "expr": expression, "legendFormat": legend}
            for i, (expression, legend) in enumerate(targets)
        ],
    }
