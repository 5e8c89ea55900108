"""The reference page of metrics, docs/metrics.md, made from the table and the rules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from longshore.monitoring.rules import RULES
from longshore.monitoring.table import GROUPS, METRICS, VALUES, Metric, MetricKind

_HEAD = """# Metrics

This page is made from the code by `longshore metrics page`; a test fails if it is stale. Names and labels are stable:
a change is listed in CHANGELOG.md.

## Where they are

| engine | metrics | health |
|---|---|---|
| vLLM | vLLM's `/metrics`: those marked "vLLM" below, with its labels `engine` and `model_name` | vLLM's `/health` |
| SGLang | SGLang's `/metrics` with `--enable-metrics`, with the label `tp_rank` | SGLang's `/health` |
| transformers (`tiered`, `PrefixStore`), your own engine | `serve_metrics`, or your own registry | `serve_metrics` |

```python
from longshore.metrics import serve_metrics

with serve_metrics(tiers.collector, "127.0.0.1:0") as server:
    print(f"curl http://{server.address}/metrics http://{server.address}/health")
```

`PrefixStore.collector` is served in the same way. A scrape reads counters and starts no transfer. Where the scraper
accepts OpenMetrics, as Prometheus does, each bucket of `longshore_load_seconds` has the name of the last request in it
as an exemplar (`--enable-feature=exemplar-storage` keeps them). An exemplar costs one reference per load, so no switch
turns them off. `PrefixStore` has no names of requests.

`/health` answers with a status, and the reasons for it:

| status | HTTP | meaning |
|---|---|---|
| `ready` | 200 | all tiers serve reads and writes |
| `degraded` | 200 | a tier is unavailable, read-only or disabled; what it has is recomputed, the others serve |
| `disabled` | 503 | no tier serves: the control plane has failed, or no tiers are open |

Answers are correct in all three. Use it to prefer replicas, not to restart engines: a restart does not bring a remote
store back.

## Looking at them

```sh
longshore metrics board > longshore-board.json       # for Grafana: Dashboards, New, Import
longshore metrics rules > longshore-rules.yml        # for Prometheus: rule_files
```

The two files are in `deploy/`, too. The rules are tested by `promtool`. The board is checked against the metrics that
exist and against the types of `grafana-foundation-sdk`; it has not been opened in Grafana.

```sh
longshore top http://127.0.0.1:9464 http://vllm-1:8000      # one or many engines, live
longshore top http://vllm-1:8000 --once --json              # for scripts; status 1 if an engine is away
```

`longshore top` shows hit ratios by tier, bytes, queues by class, evictions and misses by reason. An engine that does
not answer is shown as away. Metrics have no labels of tenants or salts, whose number has no bound.
"""


def as_markdown() -> str:
    """The page."""
    return "\n".join([_HEAD, *_groups(), *_values(), *_alerts()]).rstrip("\n") + "\n"


def _groups() -> Iterator[str]:
    yield "## Every metric\n"
    yield "Prometheus appends `_total` to counters, and `_bucket`, `_sum` and `_count` to histograms.\n"
    for group, metrics in GROUPS.items():
        yield f"### {group}\n"
        yield from _table(
            ("metric", "type", "labels", "meaning", "vLLM"),
            (
                (f"`{_exported(name, each)}`", each.kind.value, ", ".join(each.labels), each.help, "yes" * each.vllm)
                for name, each in metrics.items()
            ),
        )
    yield "Buckets, as upper bounds:\n"
    yield from _table(
        ("histogram", "bounds"),
        (
            (f"`{name}`", ", ".join(f"{bound:.12g}" for bound in each.buckets))
            for name, each in METRICS.items()
            if each.kind is MetricKind.HISTOGRAM
        ),
    )


def _values() -> Iterator[str]:
    yield "## Reasons\n"
    for (name, label), values in VALUES.items():
        yield f"`{label}` of `{_exported(name, METRICS[name])}`:\n"
        yield from _table((label, "meaning"), ((f"`{value}`", meaning) for value, meaning in values.items()))


def _alerts() -> Iterator[str]:
    yield "## Alerts\n"
    yield from _table(
        ("alert", "severity", "fires when", "what to do"),
        ((f"`{rule.name}`", rule.severity, rule.summary.replace("|", ", "), rule.runbook) for rule in RULES),
    )


def _exported(name: str, metric: Metric) -> str:
    return f"{name}_total" if metric.kind is MetricKind.COUNTER else name


def _table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    head = list(columns)
    lines = [head, ["---"] * len(head), *rows]
    yield "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"
