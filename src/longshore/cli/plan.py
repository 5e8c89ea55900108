"""`longshore plan`: how much host memory and how many files a trace wants, and what they would give."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from longshore.cli.traces import (
    BadLines,
    BadLinesOption,
    Bench,
    BlockTokens,
    Engines,
    FileRead,
    FileWrite,
    FormChoice,
    FormOption,
    Limit,
    Link,
    Model,
    PrefillRate,
    ProfileOption,
    TraceFile,
    open_trace,
    seconds_of,
    timing_of,
)

if TYPE_CHECKING:
    from longshore.trace.sizing import Choice, Plan
    from longshore.trace.timing import Timing


def plan(
    trace: TraceFile,
    model: Model = None,
    ttft_p95: Annotated[str, typer.Option(help="The time to first token that 19 of 20 requests must keep.")] = "500ms",
    prices: Annotated[
        Path | None, typer.Option(help="TOML file: dram_per_gib, nvme_per_gib, currency. DRAM counts 25 times without.")
    ] = None,
    form: FormOption = FormChoice.AUTO,
    block_tokens: BlockTokens = 512,
    bad_lines: BadLinesOption = BadLines.REFUSE,
    limit: Limit = None,
    profile: ProfileOption = "h100",
    bench: Bench = None,
    link: Link = None,
    file_read: FileRead = None,
    file_write: FileWrite = None,
    prefill_rate: PrefillRate = None,
    engines: Engines = 1,
    report: Annotated[Path | None, typer.Option(help="Write an HTML page with plots into this directory.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Say how much DRAM and NVMe to buy for a trace, and what it will give.

    Reads the trace once, finds what every size would hit, and puts a model of the machine behind a grid of sizes. The
    answer is the cheapest that keeps --ttft-p95, the knee (where more money begins to buy little), and the frontier
    between them, with the assumptions that it rests on.

    [dim]longshore plan trace.jsonl --model llama-3.1-8b --ttft-p95 500ms --prices prices.toml[/]
    """
    from longshore.trace.sizing import Arrivals, Prices  # noqa: PLC0415 - see `replay`
    from longshore.trace.sizing import plan as plan_for  # noqa: PLC0415

    console = Console(stderr=True)
    if report is not None:
        from longshore.cli.demo import check_report  # noqa: PLC0415 - plotly is an extra

        check_report(report)
    target = seconds_of(ttft_p95, "--ttft-p95")
    rates = {"link": link, "file_read": file_read, "file_write": file_write}
    timing = timing_of(model, profile, bench, rates, prefill_rate)
    costs = Prices() if prices is None else Prices.read(prices)
    arrivals = Arrivals(block_tokens)
    with console.status("reading"):
        for request in open_trace(trace, form, block_tokens, bad_lines, limit, console):
            arrivals.add(request.timestamp_ms / 1000, request.input_length, request.hash_ids)
    with console.status("trying sizes"):
        found = plan_for(arrivals, timing, target, costs, engines=engines)
    words = (*recommendation(found), *assumptions(found, timing, engines))
    if report is not None:
        from longshore.cli.plan_report import write_report  # noqa: PLC0415

        console.print(f"report: {write_report(found, words, report)}")
    if as_json:
        typer.echo(json.dumps({**found.as_json(), "kv_bytes_per_token": timing.geometry.kv_bytes_per_token,
                               "words": list(words)}))  # fmt: skip
    else:
        _render(found, words)


def recommendation(found: Plan) -> tuple[str, ...]:
    """What to buy, in plain words."""
    nothing, best, knee = found.frontier[0], found.frontier[-1], found.knee
    lines = []
    if found.recommended is None:
        way = (
            f"with {amount(best)}" if best != nothing else "to compute all, as nothing that is worth keeping comes back"
        )
        lines.append(
            f"No size keeps {found.target:.3g} s for 19 of 20 requests: the best reaches {best.ttft_p95:.3g} s, {way}. "
            "More engines, faster ones, or shorter prompts would be needed."
        )
    elif found.recommended == nothing:
        lines.append(f"Nothing needs to be bought: all computed, {nothing.ttft_p95:.3g} s is kept already.")
    else:
        choice = found.recommended
        lines.append(
            f"Buy {amount(choice)}: {cost(found, choice)}. Then 19 of 20 requests have their first token within "
            f"{choice.ttft_p95:.3g} s, against {nothing.ttft_p95:.3g} s if all is computed; "
            f"{100 * choice.hit_ratio:.1f} % of the blocks are found."
        )
    if best != nothing:
        lines.append(
            f"The knee is at {amount(knee)} ({cost(found, knee)}, {knee.ttft_p95:.3g} s): beyond it, more buys little. "
            f"The most that this trace can use is {amount(best)}, for {best.ttft_p95:.3g} s."
        )
    return tuple(lines)


def assumptions(found: Plan, timing: Timing, engines: int) -> tuple[str, ...]:
    """What the answer rests on."""
    geometry = timing.geometry
    many = "one engine computing" if engines == 1 else f"{engines:,} engines, each computing"
    return (
        f"Assumed: the next weeks look like these {found.requests:,} requests, on {many} one "
        "prompt at a time and keeping nothing on the device; decoding takes no time.",
        f"Assumed: {geometry.name} has {geometry.kv_bytes_per_token:,} bytes of KV cache for each token "
        f"({geometry.source}).",
        f"Assumed: {timing.profile.source}.",
        "Assumed: LRU with tails first over both tiers, everything is written in time, and reads of different requests "
        "do not wait for one another; `longshore replay` of the size that was chosen knows better.",
    )


def amount(choice: Choice) -> str:
    """Both sizes, in words."""
    from longshore.report.units import size  # noqa: PLC0415

    if not choice.host_bytes:
        return "nothing"
    files = f" and {size(choice.file_bytes)} of NVMe" if choice.file_bytes else ""
    return f"{size(choice.host_bytes)} of DRAM{files}"


def cost(found: Plan, choice: Choice) -> str:
    """What it costs, with the currency."""
    return f"{choice.cost:,.0f} {found.prices.currency}"


def frontier_rows(found: Plan) -> list[tuple[str, ...]]:
    """The frontier as a table: sizes, cost, hits, TTFT, and which is which."""
    from longshore.report.units import size  # noqa: PLC0415

    names = {found.knee: "knee"} | ({found.recommended: "recommended"} if found.recommended else {})
    return [
        (
            size(each.host_bytes),
            size(each.file_bytes),
            f"{each.cost:,.0f}",
            f"{100 * each.hit_ratio:.1f} %",
            f"{each.ttft_p50:.3f} s",
            f"{each.ttft_p95:.3f} s",
            names.get(each, ""),
        )
        for each in found.frontier
    ]


COLUMNS = ("DRAM", "NVMe", "cost", "hits", "TTFT p50", "TTFT p95", "")


def _render(found: Plan, words: Sequence[str]) -> None:
    console = Console()
    table = Table(header_style="dim", box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for column in COLUMNS:
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for row in frontier_rows(found):
        table.add_row(*row)
    console.print(table)
    for line in words:
        console.print(line, markup=False, style="dim" if line.startswith("Assumed") else None)
