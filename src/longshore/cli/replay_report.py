"""The page that `longshore replay --report DIR` writes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from longshore.report import REASONS, RUNS, SOURCES, Curve, Page, curves, stacked_bars

if TYPE_CHECKING:
    from longshore.trace.result import Replayed

_POINTS = 200


def write_report(found: Replayed, directory: Path) -> Path:
    """Write `index.html` into `directory` and return its path. Raises `ReportError` if that cannot be done."""
    ttft = found.ttft
    page = Page(
        "Replay of a trace",
        f"{found.replay.tally.requests:,} requests through the control plane, in virtual time.",
        footer="Made by longshore replay. Times are those of a model of the machine, described below.",
    )
    if found.overload is not None:
        page.verdict(False, found.overload.words, word="Overload")
    page.facts(
        [
            ("Blocks hit", f"{100 * found.hit_ratio:.1f} %", "of all complete blocks of prompts"),
            ("TTFT p50", f"{ttft['p50']:.2f} s", f"{ttft['recompute_p50']:.2f} s without tiers"),
            ("TTFT p95", f"{ttft['p95']:.2f} s", f"{ttft['recompute_p95']:.2f} s without tiers"),
        ]
    )
    caption = "Share of requests with a first token by that time. Further left is better."
    page.figure("Time to first token", caption, _ttft(found))
    hits = {tier: [100 * count / max(1, found.replay.tally.block_refs)] for tier, count in found.hits.items()}
    page.figure(
        "Hits by tier",
        "Share of all blocks of prompts, by the tier they were loaded from.",
        stacked_bars(["all requests"], hits, SOURCES, x_title="", y_title="blocks, %"),
    )
    page.figure(
        "Evictions",
        "A colder tier has a copy of demoted blocks, no tier of forgotten ones; unusable blocks could not be read.",
        _by(found.evictions, y_title="blocks"),
    )
    page.figure(
        "Routes",
        "Seconds that each route was busy, and seconds that transfers waited for it, in total.",
        _by(found.routes, y_title="seconds"),
    )
    page.table("Results", ("", "", ""), found.rows())
    page.text("Assumptions", *found.assumptions)
    return page.write(directory / "index.html")


def _by(rows: Mapping[str, Mapping[str, float]], *, y_title: str) -> Any:
    """A bar for each row, made of its parts."""
    names = dict.fromkeys(name for row in rows.values() for name in row)
    parts = {name: [row.get(name, 0) for row in rows.values()] for name in names}
    return stacked_bars(list(rows), parts, REASONS, x_title="", y_title=y_title)


def _ttft(found: Replayed) -> Any:
    shares, tally = np.linspace(0, 100, _POINTS), found.replay.tally
    runs = (("tiered", tally.ttft), ("recompute", tally.recompute))
    return curves(
        [
            Curve(name, np.percentile(np.frombuffer(values, np.float64), shares).tolist(), shares.tolist(), RUNS[name])
            for name, values in runs
            if len(values)
        ],
        x_title="time to first token, s",
        y_title="requests, %",
        logarithmic=True,
    )
