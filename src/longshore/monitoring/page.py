"""The reference page of metrics, docs/metrics.md, made from `page_head.md`, the table and the rules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib import resources

from longshore.monitoring.metric_names import GROUPS, METRICS, VALUES, Metric, MetricKind
from longshore.monitoring.rules import RULES


def as_markdown() -> str:
    """The page."""
    head = resources.files(__package__).joinpath("page_head.md").read_text("utf-8")
    return "\n".join([head, *_groups(), *_values(), *_alerts()]).rstrip("\n") + "\n"


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
