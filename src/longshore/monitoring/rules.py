"""Prometheus alert rules (`rules.toml`), with one line each that says what to do; a test runs them with `promtool`."""

from __future__ import annotations

import json
import tomllib
from importlib import resources
from typing import NamedTuple


class AlertRule(NamedTuple):
    """One alert: it fires when `expression` has held for `duration`. `runbook` says what to do."""

    name: str
    expression: str
    duration: str
    severity: str
    summary: str
    runbook: str


RULES = tuple(
    AlertRule(name, **rule)
    for name, rule in tomllib.loads(resources.files(__package__).joinpath("rules.toml").read_text("utf-8")).items()
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
