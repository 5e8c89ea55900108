"""`longshore plan`: recommends host memory and drives for a trace, by replays."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from longshore.boundary import FILE, HOST, REMOTE
from longshore.cli import options
from longshore.cli.output import ReportOptions, print_provenance, provenance, table, write_json
from longshore.cli.output import console as console_on
from longshore.cli.plan_report import COLUMNS, DRIVE_CLASSES, amount, cost, plan_page, rows, sizes_words
from longshore.config import available_memory
from longshore.errors import ConfigError
from longshore.report.units import quantity, seconds, share
from longshore.trace.experiment import hit_curves, policy_named
from longshore.trace.machine import Timing
from longshore.trace.replay import Routing, TieredReplay
from longshore.trace.sizing import WARRANTY_YEARS, Arrivals, Choice, Plan, Prices, Size
from longshore.trace.sizing import plan as plan_for

_ADVANCE = 50
_READ_INTENSIVE, _MIXED_USE = DRIVE_CLASSES.values()


@options.with_options
def plan(
    *,
    model: options.Model = None,
    ttft_p95: Annotated[str, typer.Option(help="Target for the 95th percentile of the time to first token.")] = "500ms",
    prices: Annotated[
        Path | None,
        typer.Option(
            help="TOML file with dram_per_gib, nvme_per_gib, store_per_gib (as dram_per_gib, unless given), currency; "
            "default: DRAM and a store cost 25 times as much as NVMe."
        ),
    ] = None,
    replicas: Annotated[
        int,
        typer.Option(
            min=1,
            max=1000,
            help="Number of replicas, each with DRAM, drives and --engines of its own. With several, a remote store "
            "that they share is considered, too.",
        ),
    ] = 1,
    route: options.Route = None,
    remote: Annotated[
        str | None,
        typer.Option(
            help="The remote store's bandwidth in each direction, and optionally its round trip, for example "
            "3GB/s:1ms; default: those of the profile."
        ),
    ] = None,
    trace: options.TraceOptions,
    machine: options.MachineOptions,
    replays: Annotated[int, typer.Option(min=1, help="Maximum number of sizes to replay.")] = 16,
    report: ReportOptions,
    as_json: options.Json = False,
) -> None:
    """Recommend how much DRAM and which NVMe drives to buy for a trace, and whether a store that replicas share pays.

    Estimates all sizes on sale, and replays the promising ones through the production control plane, as longshore
    replay does. Prints the cheapest size whose replay meets --ttft-p95, the knee of the cost curve, the sizes near
    them, and the assumptions.

    [dim]longshore plan trace.jsonl --model llama-3.1-8b --ttft-p95 500ms --prices prices.toml[/]

    [dim]longshore plan trace.jsonl --model llama-3.1-8b --replicas 8 --remote 3GB/s:1ms[/]
    """
    console = console_on(stderr=True)
    wanted = report.check()
    target = options.seconds_of(ttft_p95, "--ttft-p95")
    if replicas < 2 and (route is not None or remote is not None):
        raise ConfigError("--route and --remote have no effect without --replicas of at least 2")
    timing, engines = machine.timing(model, _speeds(remote)), machine.engines
    costs = Prices() if prices is None else Prices.read(prices)
    dealt = replicas, route or Routing.ROUND_ROBIN
    arrivals = Arrivals(trace.block_tokens, *dealt)
    with trace.opened(console) as requests:
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
                partial(_replay, requests, timing, trace.block_tokens, dealt, progress),
                engines=engines,
                replays=replays,
                most_blocks=max(1, available_memory() // (4 * options.SLOT_BYTES * replicas)),
            )
    given = [*options.arguments_of(trace), *options.arguments_of(machine)]
    given += ["--route", route.value] if route is not None else []
    command = replay_command(found, [str(trace.trace), "--model", str(model), *given], remote)
    words = (*recommendation(found, command), *assumptions(found, timing, engines, requests.assumption))
    about = provenance()
    page = None
    if wanted:
        with console.status("hit ratio by capacity"):
            hits = hit_curves(arrivals.paths, lambda at, of: None)
        page = plan_page(found, words, hits, trace.block_tokens * timing.geometry.kv_bytes_per_token)
    facts = found.as_json()
    with report.written(page, about, console):
        if as_json:
            options.print_overload(facts, console)
            more = {"kv_bytes_per_token": timing.geometry.kv_bytes_per_token, "assumed_timestamps": requests.assumed}
            write_json({**facts, **more, "replay": command, "words": list(words), "provenance": about})
        else:
            _render(found, words)
            print_provenance(about)


def _speeds(remote: str | None) -> dict[str, str | None]:
    """Bandwidths and round trip of the store; raises `ConfigError`."""
    if remote is None:
        return {}
    rate, colon, delay = remote.partition(":")
    options.rate_of(rate, "--remote")
    if colon:
        options.seconds_of(delay, "--remote")
    return {"remote_read": rate, "remote_write": rate, "remote_delay": delay or None}


def _replay(
    requests: options.Trace,
    timing: Timing,
    block_tokens: int,
    dealt: tuple[int, Routing],
    progress: Progress,
    size: Size,
    engines: int,
) -> TieredReplay:
    """The same replay as by `longshore replay`."""
    tiers = {tier: count for tier, count in zip((HOST, FILE, REMOTE), size, strict=True) if count}
    policy, (replicas, routing) = policy_named(None)[1], dealt
    run = TieredReplay(timing, block_tokens, tiers, policy, engines=engines, replicas=replicas, routing=routing)
    task = progress.add_task(sizes_words(size, replicas), total=requests.requests)
    for count, _ in enumerate(run.run(requests)):
        if count % _ADVANCE == 0:
            progress.update(task, completed=count)
    progress.remove_task(task)
    return run


def replay_command(found: Plan, arguments: Sequence[str], remote: str | None) -> list[str]:
    """Arguments of `longshore` that replay the recommended size, or else the best; none without tiers.

    `remote` are the speeds of the store, if they were given.
    """
    choice = found.recommended or found.frontier[-1]
    if not choice.host_bytes:
        return []
    sizes = ["--host", f"{choice.host_bytes >> 30}GiB"]
    sizes += ["--file", f"{choice.file_bytes // 10**9}GB"] if choice.file_bytes else []
    sizes += ["--replicas", str(found.replicas)] if found.replicas > 1 else []
    if choice.store_bytes:
        sizes += ["--remote", ":".join([f"{choice.store_bytes >> 30}GiB", *([remote] if remote else [])])]
    return ["replay", *arguments, *sizes]


def recommendation(found: Plan, command: Sequence[str]) -> tuple[str, ...]:
    """The recommendation as text."""
    nothing, best, knee = found.choices[0], found.frontier[-1], found.knee
    against = "more than the engines can compute" if nothing.busy > 1 else f"{seconds(nothing.ttft_p95)}"
    lines = [] if found.overload is None else [f"Overload. {found.overload.words}"]
    if found.recommended is None:
        way = (
            f"with {amount(found, best)}" if best != nothing else "without tiers, because too few blocks are used again"
        )
        lines.append(
            f"No size meets a TTFT p95 of {seconds(found.target)}, {len(found.choices) - 1} replayed: the best "
            f"reaches {seconds(best.ttft_p95)}, {way}. More engines, faster ones, or shorter prompts "
            "are needed."
        )
    elif found.recommended == nothing:
        lines.append(f"Nothing needs to be bought: without tiers, TTFT p95 is {seconds(nothing.ttft_p95)} already.")
    else:
        choice = found.recommended
        lines.append(
            f"Buy {amount(found, choice)}: {cost(found, choice)}. In its replay, TTFT p95 is "
            f"{seconds(choice.ttft_p95)}, against {against} without tiers; "
            f"{share(choice.hit_ratio, 1)} of the blocks are hits."
        )
        lines += [endurance(choice)] if choice.file_write_bytes_per_day else []
        lines += [whether_a_store_pays(found)] if found.replicas > 1 else []
    if nothing not in (best, knee):
        lines.append(
            f"The knee is at {amount(found, knee)} ({cost(found, knee)}, {seconds(knee.ttft_p95)}): beyond it, larger "
            f"sizes improve little. The fastest size replayed is {amount(found, best)}, with {seconds(best.ttft_p95)}."
        )
    if command:
        lines.append(f"To reproduce: {shlex.join(['longshore', *command])}")
    return tuple(lines)


def whether_a_store_pays(found: Plan) -> str:
    """The cheapest sizes with a store and without one that meet the target, of those replayed."""
    without, shared = found.by_store
    if shared is None:
        return "A store that the replicas share does not pay: no size replayed with one meets the target."
    if without is None:
        return "A store that the replicas share is needed: no size replayed without one meets the target."
    words = "pays" if shared.cost < without.cost else "does not pay"
    return (
        f"A store that the replicas share {words}: the cheapest size with one is {amount(found, shared)} "
        f"({cost(found, shared)}), without one {amount(found, without)} ({cost(found, without)})."
    )


def endurance(choice: Choice) -> str:
    """Bytes written to the drives of a replica, and the drives whose warranty covers them."""
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
        f"Endurance: {quantity(daily / 1e12)} TB written per day at the rate of the trace, {quantity(writes)} drive "
        f"writes per day (DWPD), {quantity(daily * 365 * WARRANTY_YEARS / 1e15)} PB over a warranty of "
        f"{WARRANTY_YEARS} years: {kind}."
    )


def assumptions(found: Plan, timing: Timing, engines: int, assumed: str = "") -> tuple[str, ...]:
    """The assumptions."""
    geometry = timing.geometry
    many = "one engine computing" if engines == 1 else f"{engines:,} engines, each computing"
    many = f"{found.replicas:,} replicas with {many}" if found.replicas > 1 else many
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


def _render(found: Plan, words: Sequence[str]) -> None:
    console = console_on()
    sizes = table(*COLUMNS, right=COLUMNS[:-1], optional=("DWPD", "store"))
    for row in rows(found):
        sizes.add_row(*row)
    for line in words:
        if line.startswith("Overload"):
            console.print(line, style="bold yellow")
    console.print(sizes)
    for line in words:
        if not line.startswith("Overload"):
            console.print(line, style="dim" if line.startswith("Assumed") else None)
