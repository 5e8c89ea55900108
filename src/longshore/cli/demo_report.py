"""The page that `longshore demo --report DIR` writes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from longshore.cli.demo_result import SOURCES, DemoResult, RunRecord
from longshore.report import RUNS, Page, Points, TierSeries, levels, paired_points, stacked_bars
from longshore.report import SOURCES as SOURCE_COLOURS
from longshore.report.units import milliseconds, share, size, times


def render(result: DemoResult, console: Console) -> None:
    """Print TTFT, tokens by source, routes, misses and the verdict."""
    returning = sum(request.returning for request in result.tiered.requests)
    sections = {
        f"Time to first token of the {returning} returning prompts (of {len(result.tiered.requests)})": _ttft(result),
        "Prompt tokens by source, tiered run": _tokens(result),
        "Bytes transferred, tiered run": _routes(result),
        "Misses by reason, tiered run": _misses(result),
    }
    for title, table in sections.items():
        console.print()
        console.print(Text(title, style="bold"))
        console.print(Padding(table, (0, 0, 0, 2)))
    console.print()
    console.print(verdict(result))


def verdict(result: DemoResult) -> Text:
    """One or two lines on whether the tiers changed any output."""
    text = Text()
    if result.bit_exact:
        text.append("\u2713 bit-exact", style="bold green")
    else:
        text.append("\u2717 not equal", style="bold red")
    text.append("  " + verdict_sentence(result))
    return text


def verdict_sentence(result: DemoResult) -> str:
    """The comparison of tiered and resident as text."""
    restored = sum(result.restored.values())
    if result.bit_exact:
        compared = f"{result.generated_tokens:,} tokens and log-probabilities of {len(result.tiered.requests)} requests"
        if not restored:
            return f"{compared} equal the resident run, but no block was restored, so the comparison is meaningless."
        return f"All {compared} equal the resident run bit for bit, with {restored:,} blocks restored."
    difference = result.first_difference
    if difference is None:
        return "Nothing was generated, so nothing could be compared."
    request, position = difference
    where = f"Tiered and resident run first differ in request {request}, at generated token {position}"
    return f"{where}: {_what_differs(result, request, position)}"


def _what_differs(result: DemoResult, index: int, position: int) -> str:
    """The token or the log-probability of both runs at their first difference, and how much differs in all."""
    runs = (result.tiered.requests, result.resident.requests)
    answers = [next((each for each in requests if each.index == index), None) for requests in runs]
    ours, theirs = ([*zip(each.tokens, each.logprobs, strict=False)][position:] if each else [] for each in answers)
    if not ours or not theirs:
        return "one of them has no token with a log-probability there."
    (token, logprob), (other_token, other_logprob) = ours[0], theirs[0]
    if token != other_token:
        return f"token {token} instead of {other_token}."
    size = abs(logprob - other_logprob)
    text = f"the token is the same, its log-probability {logprob!r} instead of {other_logprob!r}"
    text += f", a difference of {size:.1e}"
    if math.isfinite(size):
        units = size / (math.ulp(max(abs(logprob), abs(other_logprob))) * 2**29)  # a float32 has 29 bits less
        text += f" ({units:,.0f} in the last place of float32)"
    tokens, logprobs = result.differences
    return (
        f"{text}. In all, {tokens:,} tokens and {logprobs:,} log-probabilities of {result.generated_tokens:,} differ."
    )


def _table(*columns: str) -> Table:
    table = Table(header_style="dim", box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    return table


def _ttft(result: DemoResult) -> Table:
    table = _table("", "recompute", "tiered", "faster")
    for percent in (50, 95):
        before, after = result.recompute.ttft(percent), result.tiered.ttft(percent)
        table.add_row(f"p{percent}", milliseconds(before), milliseconds(after), times(before, after))
    return table


def _tokens(result: DemoResult) -> Table:
    table = _table("", "tokens", "share", "blocks restored")
    total = sum(result.tiered.tokens_from(source) for source in SOURCES)
    for source in SOURCES:
        tokens = result.tiered.tokens_from(source)
        blocks = f"{result.restored[source]:,}" if source in result.restored else ""
        table.add_row(source, f"{tokens:,}", share(tokens, total), blocks)
    return table


def _routes(result: DemoResult) -> Table:
    table = _table("", "bytes", "GB/s")
    for name, total in result.tiered.routes.items():
        table.add_row(name, size(total.bytes), f"{total.gbps:.2f}" if total.bytes else "\u2013")
    return table


def _misses(result: DemoResult) -> Table:
    table = _table("", "count")
    for reason, count in result.tiered.misses.items():
        table.add_row(reason, f"{count:,}")
    if not result.tiered.misses:
        table.add_row("none", "0")
    return table


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
        TierSeries(
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
