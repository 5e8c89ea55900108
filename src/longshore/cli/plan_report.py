"""The page that `longshore plan --report DIR` writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from longshore.cli.plan import COLUMNS, amount, cost, rows
from longshore.report import RUNS, SOURCES, Curve, Page, curves

if TYPE_CHECKING:
    from longshore.trace.sizing import Choice, Plan

_GIB = 1 << 30


def write_report(found: Plan, words: Sequence[str], directory: Path) -> Path:
    """Write `index.html` into `directory` and return its path. Raises `ReportError` if that cannot be done."""
    page = Page(
        "DRAM and NVMe sizing",
        f"{found.requests:,} requests, {found.unique_blocks:,} unique blocks; target for "
        f"TTFT p95: {found.target:.3g} s.",
        footer="Made by longshore plan. Times are those of a model of the machine, with the assumptions below.",
    )
    if found.overload is not None:
        page.verdict(False, found.overload.words, word="Overload")
    first, *others = (line for line in words if not line.startswith(("Overload", "Assumed")))
    page.verdict(found.recommended is not None, first, word="Recommended" if found.recommended else "Out of reach")
    page.text("Results", *others)
    page.figure(
        "Time to first token by cost",
        "Each point is the fastest size replayed for its cost. Where the line is flat, larger sizes improve little.",
        curves(
            [
                Curve(
                    name,
                    [each.cost for each in found.frontier],
                    [value(each) for each in found.frontier],
                    RUNS[colour],
                    [f"{amount(each)}: {value(each):.3f} s, {cost(found, each)}" for each in found.frontier],
                )
                for name, colour, value in (("TTFT p95", "recompute", _p95), ("TTFT p50", "tiered", _p50))
            ],
            x_title=f"cost, {found.prices.currency}",
            y_title="time to first token, s",
        ),
    )
    page.figure(
        "Hit ratio by capacity of one tier",
        "Share of blocks that LRU with tails first hits, for every capacity; exact, from stack distances.",
        curves(
            [
                Curve(
                    "hit ratio",
                    [count / _GIB for count, _ in found.curve],
                    [100 * ratio for _, ratio in found.curve],
                    SOURCES["host"],
                )
            ],
            x_title="capacity, GiB",
            y_title="blocks hit, %",
            logarithmic=True,
        ),
    )
    page.table("Sizes replayed", COLUMNS, rows(found), "By cost.")
    page.text("Assumptions", *(line.removeprefix("Assumed: ") for line in words if line.startswith("Assumed: ")))
    return page.write(directory / "index.html")


def _p50(choice: Choice) -> float:
    return choice.ttft_p50


def _p95(choice: Choice) -> float:
    return choice.ttft_p95
