"""`longshore top`, a live view of engines, and `longshore metrics`, files for Prometheus and Grafana."""

from __future__ import annotations

import enum
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table

from longshore.cli.options import Json
from longshore.cli.output import console, table, write_json
from longshore.config import format_bytes
from longshore.errors import ConfigError
from longshore.monitoring import board, page, rules
from longshore.monitoring.scrape import Scrape, address_of, scrape, summary

_MOST_MISSES = 5
"""Reasons of misses listed for each engine."""

_OPTIONAL = ("queued", "jobs", "size", "load time", "not stored", "out", "used")
"""Columns that a narrow terminal need not show, the least important first."""

_MOST_AT_ONCE = 32
"""Endpoints read at the same time."""


class MetricsFile(enum.Enum):
    """What `longshore metrics` prints."""

    PAGE = "page"
    BOARD = "board"
    RULES = "rules"


_MADE = {MetricsFile.PAGE: page.as_markdown, MetricsFile.BOARD: board.as_json, MetricsFile.RULES: rules.as_yaml}


def metrics(what: Annotated[MetricsFile, typer.Argument(metavar="page|board|rules")]) -> None:
    """Print the reference of all metrics, a Grafana dashboard, or Prometheus alert rules.

    [bold]page[/bold]: every metric with its labels, the reasons of misses, and what to do at each alert (Markdown).
    [bold]board[/bold]: import it under Dashboards, New, Import. [bold]rules[/bold]: name the file under `rule_files`.
    """
    sys.stdout.write(_MADE[what]())


def top(
    addresses: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ADDRESS",
            help="Metrics endpoints: host:port, or a URL. Default: 127.0.0.1:9464, that of serve_metrics.",
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print totals since each engine's start, and end.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, max=3600.0, help="Seconds between two readings.")] = 2.0,
    timeout: Annotated[float, typer.Option(min=0.1, max=60.0, help="Seconds to wait for an engine's answer.")] = 2.0,
    as_json: Json = False,
) -> None:
    """Watch engines: hit ratio by tier, bytes in and out, queues, evictions, and misses by reason.

    Reads the `/metrics` of each engine: vLLM's and SGLang's own, or that of `longshore.metrics.serve_metrics`. Figures
    are per second between two readings; the first ones, and those of --once, are totals since the engine's start. An
    engine that does not answer is shown as away. With --json, one line per reading.

    Exit status of --once: [bold]0[/bold] all engines have answered; [bold]1[/bold] an engine is away.
    """
    urls = list(dict.fromkeys(map(address_of, addresses or ["127.0.0.1:9464"])))
    if not once and not as_json and not sys.stdout.isatty():
        raise ConfigError("standard output is no terminal: use --once for one reading, --json for a line each")
    if once:
        (found,) = _summaries(urls, interval, timeout, most=1)
        if as_json:
            write_json(found)
        else:
            console().print(_tables(found))
        raise typer.Exit(1 if any(engine["state"] == "away" for engine in found["engines"]) else 0)
    if as_json:
        for found in _summaries(urls, interval, timeout):
            write_json(found)
            sys.stdout.flush()
    with Live(console=console(), screen=True, auto_refresh=False) as live:
        for found in _summaries(urls, interval, timeout):
            live.update(_tables(found), refresh=True)


def _summaries(urls: Sequence[str], interval: float, timeout: float, most: int | None = None) -> Iterator[Any]:
    """What all engines did since the reading before, `interval` seconds ago; `most` readings, or without end."""
    before: dict[str, Scrape] = {}
    for count in itertools.count(1):
        with ThreadPoolExecutor(min(len(urls), _MOST_AT_ONCE)) as threads:
            found = list(threads.map(lambda url: scrape(url, timeout), urls))
        yield {"engines": [summary(each, before.get(each.url)) for each in found]}
        if count == most:
            return
        before = {each.url: each for each in found}
        time.sleep(interval)


def _tables(found: dict[str, Any]) -> Group:
    """All figures, as tables."""
    right = ("hits", "in", "out", "jobs", "used", "size", "evicted", "not stored", "load time", "chunks", "share")
    engines = table("engine", "state", "hits", "in", "out", "jobs", "queued", right=right, optional=_OPTIONAL)
    tiers = table(
        *("engine", "tier", "hits", "used", "size", "evicted", "not stored", "load time"),
        right=right,
        optional=_OPTIONAL,
    )
    misses = table("engine", "missed because", "chunks", "share", right=right)
    for engine in found["engines"]:
        name = engine["url"].removeprefix("http://").removesuffix("/metrics")
        if engine["state"] == "away":
            engines.add_row(name, f"away: {engine['error']}", style="bold red")
            continue
        span = engine["seconds"]
        queues = ", ".join(f"{count:g} {kind}" for kind, count in engine["queued"].items() if count)
        engines.add_row(
            name,
            _state(engine),
            _percent(engine["hit_ratio"]),
            _bytes(engine["bytes_in"], span),
            _bytes(engine["bytes_out"], span),
            f"{engine['jobs_in_flight']:g}",
            queues or "0",
        )
        for tier in engine["tiers"]:
            _add_tier(tiers, name, tier, span)
        lost = sum(engine["misses"].values())
        for reason, count in list(engine["misses"].items())[:_MOST_MISSES]:
            if count:
                misses.add_row(name, reason, _count(count, span), _percent(count / lost))
    others = [each for each in (tiers, misses) if each.row_count]
    return Group(engines, *(part for each in others for part in ("", each)))


def _add_tier(tiers: Table, name: str, tier: dict[str, Any], span: float | None) -> None:
    used, size, mean = tier["used_bytes"], tier["capacity_bytes"], tier["load_seconds"]
    tiers.add_row(
        name,
        tier["tier"] if tier["available"] else f"{tier['tier']} (unavailable)",
        _percent(tier["hit_ratio"]),
        "" if not size else _percent((used or 0) / size),
        "" if size is None else format_bytes(int(size)),
        _count(tier["evicted"], span),
        _count(tier["dropped"], span),
        "" if mean is None else f"{1000 * mean:.1f} ms",
        style=None if tier["available"] else "bold red",
    )


def _state(engine: dict[str, Any]) -> str:
    if engine["faults"]:
        return "disabled: the control plane failed"
    away = [tier["tier"] for tier in engine["tiers"] if not tier["available"]]
    return f"degraded: {', '.join(away)}" if away else "up"


def _percent(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.1%}"


def _bytes(count: float, span: float | None) -> str:
    return format_bytes(int(count)) if span is None else f"{format_bytes(int(count / span))}/s"


def _count(count: float, span: float | None) -> str:
    return f"{count:,.0f}" if span is None else f"{count / span:,.1f}/s"
