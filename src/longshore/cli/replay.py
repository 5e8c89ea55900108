"""`longshore replay`: the hits that the requests of a trace would have had in a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from enum import StrEnum
from functools import partial
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.status import Status

from longshore.boundary import FILE, HOST, REMOTE
from longshore.cache import DropReason
from longshore.cache.eviction_policies import EvictionPolicy
from longshore.cache.eviction_policies.hit_rates import ReuseHint
from longshore.cli import options
from longshore.cli.output import ReportOptions, print_provenance, provenance, table, write_json
from longshore.cli.output import console as console_on
from longshore.cli.replay_report import replay_page
from longshore.errors import ConfigError, EngineError
from longshore.trace.analysis import BYTES_PER_REFERENCE, Paths, optimal_hits
from longshore.trace.experiment import CacheReplay, Experiment, HitCurves, Hits, hit_curves, policy_named
from longshore.trace.parsing import TraceRequest
from longshore.trace.replay import MOST_BLOCKS, Routing, TieredReplay
from longshore.trace.result import Replayed, Row, Sharing, bytes_to, overload, ratio
from longshore.trace.tally import ReplayTally


class ControlPath(StrEnum):
    """The code that serves the requests of the policy experiment instead of the policy alone."""

    CACHE = "cache"
    VLLM = "vllm"


_SHOW_EVERY = 500

_MUCH = 100_000_000
"""Block references above which the memory for the optimum is mentioned."""


@options.with_options
def replay(
    *,
    model: options.Model = None,
    host: Annotated[str | None, typer.Option(help="Host memory for blocks, for example 64GiB.")] = None,
    file: Annotated[
        str | None, typer.Option(help="Disk space for blocks, for example 1TiB; default: no file tier.")
    ] = None,
    remote: Annotated[
        str | None,
        typer.Option(
            help="A remote store that all replicas share: its size, and optionally its bandwidth in each direction and "
            "its round trip, for example 10TiB or 4TiB:3GB/s:1ms; default: none."
        ),
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1000,
            help="Number of replicas, each with --host, --file and --engines of its own; default: 1. With several, the "
            "same trace is also replayed without the store, and the hits of one cache of the same total are computed.",
        ),
    ] = None,
    route: options.Route = None,
    capacity_blocks: Annotated[
        int | None,
        typer.Option(min=1, help="Run the policy experiment instead: one tier of this many blocks, no timing."),
    ] = None,
    through: Annotated[
        ControlPath | None,
        typer.Option(
            help="With --capacity-blocks, what serves the requests instead of the bare policy, one at a time. cache: "
            "the control plane's lookup, load and store. vllm: vLLM's offloading interface, called as its scheduler "
            "calls it; needs vLLM."
        ),
    ] = None,
    file_blocks: Annotated[
        int | None,
        typer.Option(min=1, help="With --through cache, a file tier of this many blocks below the first tier."),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            help="Eviction policy. gittins (default): lowest learned hit rate first; arc: adaptive replacement cache; "
            "lru: least recently used. For comparison: lru-2, s3-fifo, fifo."
        ),
    ] = None,
    trace: options.TraceOptions,
    machine: options.MachineOptions,
    remote_read: Annotated[
        str | None, typer.Option(help="Read bandwidth of the remote store, for example 2GB/s.")
    ] = None,
    remote_write: Annotated[
        str | None, typer.Option(help="Write bandwidth of the remote store, for example 2GB/s.")
    ] = None,
    remote_delay: Annotated[
        str | None, typer.Option(help="Latency of the remote store, for example 500us or 2ms.")
    ] = None,
    gate: Annotated[
        bool, typer.Option(help="Recompute blocks when that is faster than loading them; --no-gate: always load.")
    ] = True,
    optimum: Annotated[
        bool,
        typer.Option(
            help="Compute Belady's optimum, the highest hit ratio that a policy can reach; takes 9 bytes of memory per "
            "block reference."
        ),
    ] = True,
    comparisons: Annotated[
        bool,
        typer.Option(
            help="Replay the trace again: without admission, if blocks were refused; with more engines, if they are "
            "overloaded; without the store, if replicas share one. Each takes as long as the first replay."
        ),
    ] = True,
    report: ReportOptions,
    as_json: options.Json = False,
) -> None:
    """Simulate a request trace and report hit rates.

    With [bold]--model[/] and [bold]--host[/]: replay in virtual time, with the production control plane on a model of
    the machine. With [bold]--capacity-blocks[/] alone: policy experiment, where the hits of a request are its leading
    resident blocks; the policy then sees one access per block, last block first. With [bold]--through[/] in addition:
    the same requests through the control plane, with an empty device cache.

    [dim]longshore replay trace.jsonl --model llama-3.1-8b --host 64GiB --file 1TiB[/]

    With [bold]--replicas[/]: does a store that replicas share pay? Hits of the replicas' own tiers, of the store, and
    of one cache of the same total; TTFT with and without the store; bytes over the network.

    [dim]longshore replay trace.jsonl --model llama-3.1-8b --host 64GiB --replicas 8 --remote 4TiB:3GB/s:1ms[/]

    [dim]longshore replay trace.jsonl --capacity-blocks 18000 --policy lru[/]
    """
    console = console_on(stderr=True)
    wanted, page = report.check(), None
    _check_file_blocks(file_blocks, through)
    if capacity_blocks is not None:
        given: dict[str, object] = {"--model": model, "--host": host, "--file": file, "--remote": remote}
        given |= {"--remote-read": remote_read, "--remote-write": remote_write, "--remote-delay": remote_delay}
        given |= {"--replicas": replicas, "--route": route}
        wrong = [option for option, value in given.items() if value is not None]
        if wrong := [*wrong, *options.arguments_of(machine)[::2], *options.arguments_of(report)[::2]]:
            raise ConfigError(f"--capacity-blocks simulates no time: remove {', '.join(dict.fromkeys(wrong))}")
        options.check_memory(
            options.SLOT_BYTES * capacity_blocks, "--capacity-blocks", capacity_blocks, capacity_blocks
        )
        with trace.opened(console) as requests, console.status("reading") as status:
            blocks = _RequestedBlocks(optimum, console)
            facts, rows = _experiment(
                _progress(requests, status), capacity_blocks, file_blocks or 0, policy, through, blocks
            )
    elif through is not None:
        raise ConfigError("--through needs --capacity-blocks")
    else:
        if host is None:
            raise ConfigError("expected --host and --model, or --capacity-blocks; see longshore replay --help")
        remote, remote_read, remote_write, remote_delay = _store(remote, remote_read, remote_write, remote_delay)
        if route is not None and (replicas or 1) < 2:
            raise ConfigError(f"--route {route.value} has no effect without --replicas of at least 2")
        speeds = {"remote_read": remote_read, "remote_write": remote_write, "remote_delay": remote_delay}
        timing, block_tokens = machine.timing(model, speeds), trace.block_tokens
        sizes = {"host": host, "file": file, "remote": remote}
        image = block_tokens * timing.geometry.kv_bytes_per_token
        tiers = {tier: options.size_of(text, f"--{tier}", image) for tier, text in sizes.items() if text is not None}
        name, kind = policy_named(policy)
        largest = max(tiers, key=tiers.__getitem__)
        options.check_memory(
            options.SLOT_BYTES
            * sum(
                (nbytes // image) * (1 if tier == REMOTE else replicas or 1)
                for tier, nbytes in tiers.items()
                if nbytes // image <= MOST_BLOCKS
            ),
            f"--{largest}",
            sizes[largest],
            tiers[largest],
            "MiB",
        )

        made = partial(
            TieredReplay,
            timing,
            block_tokens,
            policy=kind,
            gated=gate,
            replicas=replicas or 1,
            routing=route or Routing.ROUND_ROBIN,
        )
        run = made(tiers=tiers, engines=machine.engines)
        with trace.opened(console) as requests, console.status("reading") as status:
            one_cache = Experiment(kind, run.slots) if len(run.replicas) > 1 else None
            blocks = _RequestedBlocks(optimum, console)
            again = partial(made, tiers=tiers) if comparisons else None
            found = _replay(run, again, requests, name, blocks, status, one_cache)
            facts, rows = found.as_json(), found.rows()
            if wanted:
                hits = blocks.hit_curves(lambda at, of: status.update(f"hit ratio by capacity, {at} of {of}"))
                page = replay_page(found, hits)
    with report.written(page, provenance(), console):
        if as_json:
            options.print_overload(facts, console)
            write_json({**facts, "provenance": provenance()})
        else:
            _render(rows, facts)
            print_provenance(provenance())


def _store(
    remote: str | None, read: str | None, write: str | None, delay: str | None
) -> tuple[str | None, str | None, str | None, str | None]:
    """Size, bandwidths and delay of the store, from `--remote` and the options of its parts; raises `ConfigError`."""
    given = {"--remote-read": read, "--remote-write": write, "--remote-delay": delay}
    if remote is None:
        for option, value in given.items():
            if value is not None:
                (options.seconds_of if value is delay else options.rate_of)(value, option)
                raise ConfigError(f"{option} {value} has no effect without --remote")
        return None, None, None, None
    size, rate, trip = options.store_of(remote, "--remote")
    for (option, value), part in zip(given.items(), (rate, rate, trip), strict=True):
        if value is not None and part is not None:
            raise ConfigError(f"{option} {value} contradicts {part} in --remote {remote[:80]}: remove one of them")
    return size, read or rate, write or rate, delay or trip


def _check_file_blocks(blocks: int | None, through: ControlPath | None) -> None:
    """Raise `ConfigError` for a file tier of `blocks` without the control plane, or for which there is no memory."""
    if blocks is not None and through is not ControlPath.CACHE:
        raise ConfigError("--file-blocks needs --capacity-blocks and --through cache")
    if blocks is not None:
        options.check_memory(options.SLOT_BYTES * blocks, "--file-blocks", blocks, blocks)


def _experiment(
    requests: Iterable[TraceRequest],
    slots: int,
    file_slots: int,
    policy: str | None,
    through: ControlPath | None,
    blocks: _RequestedBlocks,
) -> tuple[dict[str, object], list[Row]]:
    name, kind = policy_named(policy)
    found = Hits(0, 0, 0)
    with _served(slots, file_slots, name, kind, through) as (serve, cache):
        for request in requests:
            path = request.hash_ids
            hits = serve(path, request.timestamp_ms / 1000, request.reuse_hint)
            found = Hits(found.requests + 1, found.block_refs + len(path), found.hits + hits)
            blocks.add(path)
    most = blocks.optimal(slots + file_slots)
    best = None if most is None else ratio(most, found.block_refs)
    facts: dict[str, object] = {
        "requests": found.requests,
        "block_refs": found.block_refs,
        "unique_blocks": blocks.unique,
        "hit_ratio": found.ratio,
        "hit_ratio_by_tier": {"host": found.ratio},
        "optimal_hit_ratio": best,
        "ttft_s": None,
        "file_write_bytes_per_day": None,
        "policy": name,
        "through": None if through is None else through.value,
        "capacity_blocks": slots,
    }
    if file_slots and cache is not None:
        facts["file_blocks"] = file_slots
        facts["hit_ratio_by_tier"] = {tier: ratio(hits, found.block_refs) for tier, hits in cache.hits.items()}
        facts["blocks_moved_per_hit"] = {route: ratio(blocks, found.hits) for route, blocks in cache.moved.items()}
    rows = [
        ("requests", f"{found.requests:,}", ""),
        ("blocks", f"{found.block_refs:,}", f"references, {blocks.unique:,} unique"),
        ("capacity", f"{slots:,}", "blocks"),
        ("policy", name, "" if through is None else f"through {through.value}"),
        ("hit ratio", f"{found.ratio:.4f}", "leading resident blocks per block reference"),
        ("best possible", "-" if best is None else f"{best:.4f}", "Belady's optimum"),
    ]
    if file_slots and cache is not None:
        rows.append(("file tier", f"{file_slots:,}", "blocks"))
        rows += [(f"hits, {tier}", f"{ratio(hits, found.block_refs):.4f}", "") for tier, hits in cache.hits.items()]
        rows += [(route, f"{ratio(count, found.hits):.3f}", "blocks per hit") for route, count in cache.moved.items()]
    return facts, rows


@contextmanager
def _served(
    slots: int, file_slots: int, name: str, kind: type[EvictionPolicy], through: ControlPath | None
) -> Iterator[tuple[Callable[[Sequence[int], float, ReuseHint | None], int], CacheReplay | None]]:
    """Serves a request and returns its hits: a tier of `slots` slots under the policy `kind`.

    Below it are files of `file_slots` slots, if any. Also the replay through the cache, if it is one.
    """
    if through is None:
        yield Experiment(kind, slots).serve, None
    elif through is ControlPath.CACHE:
        replay = CacheReplay(kind, slots, file_slots)
        yield replay.serve, replay
    else:
        try:
            from longshore.engines.vllm.scheduler_replay import open_replay  # noqa: PLC0415 - vLLM is not among our dependencies
        except ImportError as error:
            raise EngineError(
                f"{error}; --through vllm calls vLLM's own interface: run longshore with the Python that runs vLLM"
            ) from error
        with closing(open_replay(slots, name)) as engine:
            yield engine.serve, None


def _replay(
    run: TieredReplay,
    again: Callable[..., TieredReplay] | None,
    requests: options.Trace,
    policy: str,
    blocks: _RequestedBlocks,
    status: Status,
    one_cache: Experiment | None,
) -> Replayed:
    """What came of `run`; `again`, if given, makes the replays that it is compared with."""

    def other(how: str, engines: int = run.engines, **changes: Any) -> TieredReplay | None:
        if again is None:
            return None
        other = again(engines=engines, **changes)
        for _ in other.run(_progress(requests, status, how)):
            pass
        return other

    def with_engines(count: int) -> ReplayTally | None:
        found = other(f" with {count} engines", count)
        return None if found is None else found.tally

    def unfiltered() -> dict[str, int] | None:
        """Bytes written to files and a store in a replay without admission; `None` without comparisons."""
        refused = any(drops[DropReason.ADMISSION] for tier, drops in run.counters.drops.items() if tier != HOST)
        every = other(" without admission", admission=False) if refused else run
        return None if every is None else {tier: bytes_to(tier, every) for tier in (FILE, REMOTE)}

    for request in run.run(_progress(requests, status)):
        path = request.hash_ids[: request.input_length // run.block_tokens]
        blocks.add(path)
        if one_cache is not None:
            one_cache.serve(path, request.timestamp_ms / 1000, request.reuse_hint)
    too_much = overload(run.tally, run.engines, with_engines, replicas=len(run.replicas))
    best = blocks.optimal(run.slots)
    sharing = None
    if one_cache is not None:
        owned = {tier: slots * run.image_bytes for tier, slots in run.capacity.items() if tier != REMOTE}
        alone = None if run.remote is None else other(" without the store", tiers=owned)
        sharing = Sharing(one_cache.totals().hits, alone)
    return Replayed(run, policy, blocks.unique, best, too_much, requests.assumption, unfiltered(), sharing)


class _RequestedBlocks:
    """The blocks requested: the unique ones, and, for the optimum, all references in order.

    The order takes memory per reference, so a note is printed above `_MUCH` references.
    """

    def __init__(self, optimum: bool, console: Console) -> None:
        self._paths = Paths() if optimum else None
        self._seen: set[int] = set()
        self.console, self._told = console, False

    def add(self, path: tuple[int, ...]) -> None:
        """Add the blocks of one request."""
        if self._paths is None:
            self._seen.update(path)
            return
        self._paths.add(path)
        if not self._told and self._paths.references > _MUCH:
            self._told = True
            self.console.print(
                f"More than {_MUCH:,} block references. Computing the optimal hit ratio takes {BYTES_PER_REFERENCE} "
                "bytes of memory for each; --no-optimum skips it.",
                style="yellow",
            )

    @property
    def unique(self) -> int:
        """Number of unique blocks."""
        return len(self._seen) if self._paths is None else self._paths.unique

    def optimal(self, slots: int) -> int | None:
        """The maximum hits of `slots` slots; `None` without the optimum."""
        return None if self._paths is None else optimal_hits(self._paths, slots)

    def hit_curves(self, tell: Callable[[int, int], None]) -> HitCurves | None:
        """Hit ratios by capacity; `None` without the optimum. `tell` is called before each size."""
        return None if self._paths is None else hit_curves(self._paths, tell)


def _progress(requests: Iterable[TraceRequest], status: Status, how: str = "") -> Iterator[TraceRequest]:
    """`requests`, with their number shown in `status`."""
    for count, request in enumerate(requests):
        if count % _SHOW_EVERY == 0:
            status.update(f"{count:,} requests{how}")
        yield request


def _render(rows: Iterable[Row], facts: dict[str, object]) -> None:
    console = console_on()
    options.print_overload(facts, console)
    shown = table("", "", "")
    shown.show_header = False
    for column, style in zip(shown.columns, ("", "bold", "dim"), strict=True):
        column.style = style
    for row in rows:
        shown.add_row(*row)
    console.print(shown)
    assumptions = facts.get("assumptions")
    for each in assumptions if isinstance(assumptions, list) else ():
        console.print(f"assumed: {each}", style="dim")
