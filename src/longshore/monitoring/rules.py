"""Prometheus alert rules, with one line each that says what to do.

The names in their expressions are those of the table; a test runs all of them with Prometheus' own `promtool`.
"""

from __future__ import annotations

import json
from typing import NamedTuple


class AlertRule(NamedTuple):
    """One alert: it fires when `expression` has held for `duration`. `runbook` says what to do."""

    name: str
    expression: str
    duration: str
    severity: str
    summary: str
    runbook: str


_HITS = "sum by (instance) (rate(longshore_hit_chunks_total[{0}]))"
_MISSES = "sum by (instance) (rate(longshore_miss_chunks_total[{0}]))"
_RATIO = f"{_HITS} / ({_HITS} + {_MISSES})"

RULES = (
    AlertRule(
        "LongshoreControlPlaneFailed",
        "longshore_control_plane_faults_total > 0",
        "0m",
        "critical",
        "All tiers are disabled: every prompt is computed",
        "Keep the log and the call log that it names, restart the engine, and report both.",
    ),
    AlertRule(
        "LongshoreTierUnavailable",
        "longshore_tier_available == 0",
        "5m",
        "warning",
        "Tier {{ $labels.tier }} serves nothing, or takes no writes",
        "GET /health names the reason. For a store: check the server and the network. For files: check the disk.",
    ),
    AlertRule(
        "LongshoreFileTierDisabled",
        'longshore_file_failures_total{reason=~"off|read_only"} > 0',
        "0m",
        "critical",
        "The file tier is {{ $labels.reason }} after repeated I/O errors",
        "Look for `file tier` in the log, check the disk (dmesg, smartctl), then restart the engine.",
    ),
    AlertRule(
        "LongshoreFileErrors",
        'increase(longshore_file_failures_total{reason!~"off|read_only"}[15m]) > 0',
        "0m",
        "warning",
        "The file tier counts failures: {{ $labels.reason }}",
        "`write_no_space`: free the disk or lower `file_size`. `stalled`: the disk hangs. `tier_host`: see the log.",
    ),
    AlertRule(
        "LongshoreDamagedChunks",
        "increase(longshore_lost_chunks_total[1h]) > 0",
        "0m",
        "warning",
        "Chunks of tier {{ $labels.tier }} could not be read; they were recomputed",
        "Stop the engine and run `longshore fsck DIR`; if it finds damage again later, replace the disk.",
    ),
    AlertRule(
        "LongshoreStoreFailing",
        "sum by (instance, tier) (rate(longshore_store_failures_total[5m])) > 0.1",
        "10m",
        "warning",
        "Requests to store {{ $labels.tier }} fail",
        "Run `longshore doctor URL` on the engine's machine; it names what is broken and what to do.",
    ),
    AlertRule(
        "LongshoreLoadsTimeOut",
        'sum by (instance) (rate(longshore_miss_chunks_total{reason="deadline"}[10m])) > 0.05 * ('
        + _HITS.format("10m")
        + ")",
        "10m",
        "warning",
        "More than 5 % of the chunks to load are recomputed because loads time out",
        "Compare `longshore_load_seconds` with `load_timeout`; look for a slow disk or link, or raise `load_timeout`.",
    ),
    AlertRule(
        "LongshoreLoadsSlow",
        "histogram_quantile(0.95, sum by (le, instance, tier) (rate(longshore_load_seconds_bucket[10m]))) > 2",
        "15m",
        "warning",
        "The 95th percentile of loads from tier {{ $labels.tier }} is above 2 s",
        "If `longshore_transfer_queue_seconds` is high too, the tier has too little bandwidth; else its latency rose.",
    ),
    AlertRule(
        "LongshoreWritesDropped",
        'sum by (instance, tier) (rate(longshore_dropped_chunks_total{reason="backpressure"}[10m])) > 1',
        "15m",
        "warning",
        "Tier {{ $labels.tier }} is too slow for what is stored: chunks are dropped",
        "Store less (`offload = write_through_selective`), use a faster disk, or raise `max_writes` for short bursts.",
    ),
    AlertRule(
        "LongshoreTierTooSmall",
        "histogram_quantile(0.5, sum by (le, instance, tier) (rate(longshore_evicted_age_seconds_bucket[30m]))) < 60",
        "30m",
        "info",
        "Half of the chunks evicted from tier {{ $labels.tier }} are younger than a minute",
        "The working set exceeds the tier. `longshore plan` computes the size for a latency target from a trace.",
    ),
    AlertRule(
        "LongshoreHitRatioDropped",
        f"({_RATIO.format('30m')}) < 0.5 * ({_RATIO.format('1d')}) and {_MISSES.format('30m')} > 1",
        "30m",
        "warning",
        "The hit ratio of the last half hour is below half of the last day's",
        "Compare misses by reason with the day before: `absent` after a deployment means changed weights or prompts.",
    ),
    AlertRule(
        "LongshoreEventsStopped",
        "longshore_events_off > 0",
        "0m",
        "info",
        "Events are not recorded any more, so `longshore explain` knows nothing new",
        "Free the disk of `events_path` or fix its permissions, then restart the engine.",
    ),
)


def as_yaml() -> str:
    """The rules as a file for `rule_files` of Prometheus."""
    lines = [
        "# Made by `longshore metrics rules`; tested by promtool. What to do is in `runbook`, and in docs/metrics.md.",
        "groups:",
        "  - name: longshore",
        "    rules:",
    ]
    for rule in RULES:
        lines += [
            f"      - alert: {rule.name}",
            f"        expr: {json.dumps(rule.expression)}",
            f"        for: {rule.duration}",
            "        labels:",
            f"          severity: {rule.severity}",
            "        annotations:",
            f"          summary: {json.dumps(rule.summary)}",
            f"          runbook: {json.dumps(rule.runbook)}",
        ]
    return "\n".join(lines) + "\n"
