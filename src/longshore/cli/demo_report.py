"""The page that `longshore demo --report DIR` writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from longshore.cli.demo_result import SOURCES, DemoResult, RunRecord
from longshore.cli.demo_table import verdict_sentence
from longshore.report import RUNS, Level, Page, Points, levels, paired_points, stacked_bars
from longshore.report import SOURCES as SOURCE_COLOURS
from longshore.report.units import milliseconds, share, size, times

TIERS = ("device", "host", "file")
MIB = 1024 * 1024


def write_report(result: DemoResult, directory: Path) -> Path:
    """Write `index.html` into `directory` and return its path.

    Raises:
        ReportError: Plotly is missing, or the directory cannot be written.
    """
    page = Page(
        "A KV cache larger than the device cache",
        f"{len(result.tiered.requests)} prompts of a chat service, served three times: with a host and a file tier "
        "behind a small device cache, with the small cache alone, and with a cache that never evicts.",
        footer="Made by longshore demo. Times are of this machine and this run. Drag across a figure to zoom in; "
        "double-click to zoom out.",
    )
    page.verdict(result.bit_exact, verdict_sentence(result), word="Bit-exact" if result.bit_exact else "Not equal")
    page.facts(_headline(result))
    page.figure("Prompt tokens by source", _SOURCES_CAPTION, _sources_figure(result))
    page.figure("Time to first token by request", _ttft_caption(result), _ttft_figure(result))
    page.figure("Bytes used by tier", _OCCUPANCY_CAPTION, _occupancy_figure(result))
    _tables(page, result)
    return page.write(directory / "index.html")


_SOURCES_CAPTION = (
    "One bar per request of the tiered run, in order of arrival; its height is the prompt length. Blue: found in "
    "the device cache; light blue: restored from host memory; orange: restored from the file tier; grey: computed."
)

_OCCUPANCY_CAPTION = (
    "Bytes used during the tiered run. The dashed line is the capacity of the tier, which is never exceeded. "
    "Blocks evicted from one tier are still found in the next."
)


def _ttft_caption(result: DemoResult) -> str:
    returning = sum(request.returning for request in result.tiered.requests)
    return (
        f"Strong points are the {returning} returning requests, whose prompt begins with blocks of an earlier one. A "
        "line joins the same request in both runs; green below orange is time saved by the tiers. Pale points are "
        "first requests, which have no stored blocks. Dotted lines are the medians of the strong points."
    )


def _headline(result: DemoResult) -> list[tuple[str, str, str]]:
    before, after = result.recompute.ttft(50), result.tiered.ttft(50)
    slow, less_slow = result.recompute.ttft(95), result.tiered.ttft(95)
    total = sum(result.tiered.tokens_from(source) for source in SOURCES)
    computed = result.tiered.tokens_from("computed")
    restored = sum(result.restored.values())
    return [
        (
            "Faster to the first token (p50)",
            times(before, after),
            f"{milliseconds(after)} instead of {milliseconds(before)} for returning prompts",
        ),
        (
            "Faster to the first token (p95)",
            times(slow, less_slow),
            f"{milliseconds(less_slow)} instead of {milliseconds(slow)}",
        ),
        (
            "Prompt tokens not computed",
            share(total - computed, total),
            f"{total - computed:,} of {total:,}; without tiers {_reused_without_tiers(result.recompute)}",
        ),
        (
            "Blocks restored",
            f"{restored:,}",
            f"{result.restored['host']:,} from host memory, {result.restored['file']:,} from files",
        ),
    ]


def _reused_without_tiers(run: RunRecord) -> str:
    total = sum(run.tokens_from(source) for source in SOURCES)
    return share(total - run.tokens_from("computed"), total)


def _sources_figure(result: DemoResult) -> Any:
    requests = result.tiered.requests
    return stacked_bars(
        [request.index for request in requests],
        {source: [request.tokens_from(source) for request in requests] for source in SOURCES},
        SOURCE_COLOURS,
        x_title="request, in order of arrival",
        y_title="prompt tokens",
    )


def _ttft_figure(result: DemoResult) -> Any:
    recomputed = {request.index: request.ttft_ms for request in result.recompute.requests}
    requests = [request for request in result.tiered.requests if request.index in recomputed]
    before = Points("recompute", [recomputed[r.index] for r in requests], RUNS["recompute"], "diamond")
    after = Points("tiered", [r.ttft_ms for r in requests], RUNS["tiered"], "circle")
    medians = {run.name: run.ttft(50) for run in (result.recompute, result.tiered)}
    return paired_points(
        [request.index for request in requests],
        before,
        after,
        [request.returning for request in requests],
        x_title="request, in order of arrival",
        y_title="time to first token, ms",
        rest="first request",
        marks={name: level for name, level in medians.items() if level is not None},
    )


def _occupancy_figure(result: DemoResult) -> Any:
    samples = result.tiered.occupancy
    rows = [
        Level(
            name=tier,
            values=[sample.bytes_in(tier) / MIB for sample in samples],
            limit=result.capacities.get(tier, 0) / MIB,
            colour=SOURCE_COLOURS[tier],
        )
        for tier in TIERS
    ]
    return levels([sample.seconds for sample in samples], rows, x_title="seconds into the run", unit="MiB")


def _tables(page: Page, result: DemoResult) -> None:
    page.table(
        "Bytes transferred",
        ("route", "bytes", "time", "GB/s"),
        [
            (name, size(total.bytes), milliseconds(1000 * total.seconds), f"{total.gbps:.2f}")
            for name, total in result.tiered.routes.items()
        ],
        "Payload of the tiered run by route. The rate is over the time spent transferring, without waiting.",
    )
    page.table(
        "Misses",
        ("reason", "count"),
        [(reason, f"{count:,}") for reason, count in result.tiered.misses.items()] or [("none", "0")],
        "Blocks that no tier could serve, by reason. A miss costs time, but never changes a token.",
    )
    page.table(
        "Three runs",
        ("run", "p50", "p95", "computed", "whole run"),
        _runs(result),
        "Time to first token of returning prompts, prompt tokens computed, time for all requests.",
    )
    capacities = {f"{tier} capacity": size(count) for tier, count in result.capacities.items()}
    page.table("Set-up", ("", ""), list({**result.setup, **capacities}.items()))


def _runs(result: DemoResult) -> list[tuple[str, str, str, str, str]]:
    return [
        (
            run.name,
            milliseconds(run.ttft(50)),
            milliseconds(run.ttft(95)),
            f"{run.tokens_from('computed'):,}",
            f"{run.seconds:.1f} s",
        )
        for run in (result.tiered, result.recompute, result.resident)
    ]
