"""`longshore plan`: recommends host memory and drives for a trace, by replays."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from longshore.cli import options
from longshore.cli.output import check_report, table, write_json
from longshore.cli.output import console as console_on
from longshore.config import available_memory
from longshore.report import RUNS, SOURCES, Curve, Page, curves
from longshore.trace.experiment import policy_named
from longshore.trace.machine import Timing
from longshore.trace.replay import TieredReplay
from longshore.trace.result import brief
from longshore.trace.sizing import LARGEST_DRIVE, WARRANTY_YEARS, Arrivals, Choice, Plan, Prices
from longshore.trace.sizing import plan as plan_for

_ADVANCE = 50
_READ_INTENSIVE, _MIXED_USE = 1, 3
"""Drive writes per day (DWPD) that the warranty of read-intensive and of mixed-use drives covers."""


def plan(
    trace: options.TraceFile,
    model: options.Model = None,
    ttft_p95: Annotated[str, typer.Option(help="Target for the 95th percentile of the time to first token.")] = "500ms",
    prices: Annotated[
        Path | None,
        typer.Option(
            help="TOML file with dram_per_gib, nvme_per_gib, currency; default: DRAM costs 25 times as much as NVMe."
        ),
    ] = None,
    form: options.FormOption = options.FormChoice.AUTO,
    block_tokens: options.BlockTokens = 512,
    bad_lines: options.BadLinesOption = options.BadLines.REFUSE,
    limit: options.Limit = None,
    profile: options.ProfileOption = "h100",
    bench: options.Bench = None,
    link: options.Link = None,
    file_read: options.FileRead = None,
    file_write: options.FileWrite = None,
    prefill_rate: options.PrefillRate = None,
    engines: options.Engines = 1,
    replays: Annotated[int, typer.Option(min=1, help="Maximum number of sizes to replay.")] = 16,
    report: options.ReportDirectory = None,
    as_json: options.Json = False,
) -> None:
    """Recommend how much DRAM and which NVMe drives to buy for a trace.

    Estimates all sizes on sale, and replays the promising ones through the production control plane, as longshore
    replay does. Prints the cheapest size whose replay meets --ttft-p95, the knee of the cost curve, the sizes near
    them, and the assumptions.

    [dim]longshore plan trace.jsonl --model llama-3.1-8b --ttft-p95 500ms --prices prices.toml[/]
    """
    console = console_on(stderr=True)
    if report is not None:
        check_report(report)
    target = options.seconds_of(ttft_p95, "--ttft-p95")
    rates = {"link": link, "file_read": file_read, "file_write": file_write}
    timing = options.timing_of(model, profile, bench, rates, prefill_rate)
    costs = Prices() if prices is None else Prices.read(prices)
    arrivals = Arrivals(block_tokens)
    with options.trace_at(trace) as path:
        requests = options.Trace(path, form, block_tokens, bad_lines, limit, console)
        with console.status("reading"):
            for request in requests:
                arrivals.add(request.timestamp_ms / 1000, request.input_length, request.hash_ids)
        columns = (TextColumn("replaying {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            found = plan_for(
                arrivals,
                timing,
                target,
                costs,
                partial(_replay, requests, timing, block_tokens, progress),
                engines=engines,
                replays=replays,
                most_blocks=max(1, available_memory() // (4 * options.SLOT_BYTES)),
            )
    given: dict[str, object] = {
        "--form": None if form is options.FormChoice.AUTO else form.value,
        "--block-tokens": None if block_tokens == 512 else block_tokens,
        "--bad-lines": None if bad_lines is options.BadLines.REFUSE else bad_lines.value,
        "--limit": limit,
        "--profile": profile,
        **{f"--{name.replace('_', '-')}": rate for name, rate in rates.items()},
        "--prefill-rate": prefill_rate,
        "--engines": engines,
    }
    arguments = [text for name, value in given.items() if value is not None for text in (name, str(value))]
    arguments += [text for each in bench or () for text in ("--bench", str(each))]
    command = replay_command(found, [str(trace), "--model", str(model), *arguments])
    words = (*recommendation(found, command), *assumptions(found, timing, engines, requests.assumption))
    if report is not None:
        console.print(f"report: {write_report(found, words, report)}")
    facts = found.as_json()
    if as_json:
        options.print_overload(facts, console)
        more = {"kv_bytes_per_token": timing.geometry.kv_bytes_per_token, "assumed_timestamps": requests.assumed}
        write_json({**facts, **more, "replay": command, "words": list(words)})
    else:
        _render(found, words)


def _replay(
    requests: options.Trace, timing: Timing, block_tokens: int, progress: Progress, host: int, file: int, engines: int
) -> TieredReplay:
    """The same replay as by `longshore replay`."""
    tiers = {"host": host} | ({"file": file} if file else {})
    run = TieredReplay(timing, block_tokens, tiers, policy_named(None)[1], engines=engines)
    task = progress.add_task(_sizes(host, file), total=requests.requests)
    for count, _ in enumerate(run.run(requests)):
        if count % _ADVANCE == 0:
            progress.update(task, completed=count)
    progress.remove_task(task)
    return run


def replay_command(found: Plan, arguments: Sequence[str]) -> list[str]:
    """Arguments of `longshore` that replay the recommended size, or else the best; none without tiers."""
    choice = found.recommended or found.frontier[-1]
    if not choice.host_bytes:
        return []
    sizes = ["--host", f"{choice.host_bytes >> 30}GiB"]
    sizes += ["--file", f"{choice.file_bytes // 10**9}GB"] if choice.file_bytes else []
    return ["replay", *arguments, *sizes]


def recommendation(found: Plan, command: Sequence[str]) -> tuple[str, ...]:
    """The recommendation as text."""
    nothing, best, knee = found.choices[0], found.frontier[-1], found.knee
    against = "more than the engines can compute" if nothing.busy > 1 else f"{brief(nothing.ttft_p95)}"
    lines = [] if found.overload is None else [f"Overload. {found.overload.words}"]
    if found.recommended is None:
        way = f"with {amount(best)}" if best != nothing else "without tiers, because too few blocks are used again"
        lines.append(
            f"No size meets a TTFT p95 of {brief(found.target)}, {len(found.choices) - 1} replayed: the best "
            f"reaches {brief(best.ttft_p95)}, {way}. More engines, faster ones, or shorter prompts "
            "are needed."
        )
    elif found.recommended == nothing:
        lines.append(f"Nothing needs to be bought: without tiers, TTFT p95 is {brief(nothing.ttft_p95)} already.")
    else:
        choice = found.recommended
        lines.append(
            f"Buy {amount(choice)}: {cost(found, choice)}. In its replay, TTFT p95 is {brief(choice.ttft_p95)}, "
            f"against {against} without tiers; "
            f"{100 * choice.hit_ratio:.1f} % of the blocks are hits."
        )
        lines += [endurance(choice)] if choice.file_write_bytes_per_day else []
    if nothing not in (best, knee):
        lines.append(
            f"The knee is at {amount(knee)} ({cost(found, knee)}, {brief(knee.ttft_p95)}): beyond it, larger sizes "
            f"improve little. The fastest size replayed is {amount(best)}, with {brief(best.ttft_p95)}."
        )
    if command:
        lines.append(f"To reproduce: {shlex.join(['longshore', *command])}")
    return tuple(lines)


def endurance(choice: Choice) -> str:
    """Bytes written to the drives, and the drives whose warranty covers them."""
    daily, writes = choice.file_write_bytes_per_day, choice.drive_writes_per_day
    if writes > _MIXED_USE:
        kind = (
            f"more than the warranty of mixed-use drives ({_MIXED_USE} DWPD); file_daily_writes can limit it, "
            "which was not replayed"
        )
    elif writes > _READ_INTENSIVE:
        kind = f"mixed-use drives ({_MIXED_USE} DWPD) are needed"
    else:
        kind = f"read-intensive drives ({_READ_INTENSIVE} DWPD) suffice"
    return (
        f"Endurance: {daily / 1e12:.3g} TB written per day at the rate of the trace, {writes:.2g} drive writes per day "
        f"(DWPD), {daily * 365 * WARRANTY_YEARS / 1e15:.3g} PB over a warranty of {WARRANTY_YEARS} years: {kind}."
    )


def assumptions(found: Plan, timing: Timing, engines: int, assumed: str = "") -> tuple[str, ...]:
    """The assumptions."""
    geometry = timing.geometry
    many = "one engine computing" if engines == 1 else f"{engines:,} engines, each computing"
    return (
        f"Assumed: future traffic is like these {found.requests:,} requests, on {many} one "
        "prompt at a time, without a device cache; decoding takes no time.",
        f"Assumed: {geometry.name} has {geometry.kv_bytes_per_token:,} bytes of KV cache per token "
        f"({geometry.source}).",
        f"Assumed: {timing.profile.source}.",
        "Assumed: the whole size is used for blocks; memory and disk space for system, engine and file system are "
        "additional. Several drives together have the speed of the profile.",
        *([f"Assumed: {assumed}."] if assumed else []),
    )


def amount(choice: Choice) -> str:
    """Both sizes as text."""
    return _sizes(choice.host_bytes, choice.file_bytes)


def _sizes(host: int, file: int) -> str:
    if not host:
        return "nothing"
    return f"{host >> 30} GiB of DRAM" + (f" and {drives(file)} of NVMe" if file else "")


def drives(file: int) -> str:
    """Drives with `file` bytes in total: `3.84 TB`, `2 x 15.36 TB`."""
    count, each = max(1, file // LARGEST_DRIVE), min(file, LARGEST_DRIVE)
    return f"{each / 1e12:.4g} TB" if count == 1 else f"{count} x {each / 1e12:.4g} TB"


def cost(found: Plan, choice: Choice) -> str:
    """Its cost with the currency."""
    return f"{choice.cost:,.0f} {found.prices.currency}"


COLUMNS = ("DRAM", "NVMe", "cost", "hits", "TTFT p50", "TTFT p95", "DWPD", "")


def rows(found: Plan) -> list[tuple[str, ...]]:
    """Rows of the table of replayed sizes: sizes, cost, hits, TTFT, drive writes per day, and a mark."""
    names = {found.knee: "knee"} | ({found.recommended: "recommended"} if found.recommended else {})
    return [
        (
            f"{each.host_bytes >> 30} GiB" if each.host_bytes else "-",
            drives(each.file_bytes) if each.file_bytes else "-",
            f"{each.cost:,.0f}",
            f"{100 * each.hit_ratio:.1f} %",
            f"{each.ttft_p50:.3f} s",
            f"{each.ttft_p95:.3f} s",
            f"{each.drive_writes_per_day:.2f}" if each.file_bytes else "-",
            names.get(each, ""),
        )
        for each in found.choices
    ]


def _render(found: Plan, words: Sequence[str]) -> None:
    console = console_on()
    sizes = table(*COLUMNS, right=COLUMNS[:-1])
    for row in rows(found):
        sizes.add_row(*row)
    for line in words:
        if line.startswith("Overload"):
            console.print(line, markup=False, style="bold yellow")
    console.print(sizes)
    for line in words:
        if not line.startswith("Overload"):
            console.print(line, markup=False, style="dim" if line.startswith("Assumed") else None)


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
