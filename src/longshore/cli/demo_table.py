"""The output of `longshore demo`."""

from __future__ import annotations

import math

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from longshore.cli.demo_result import SOURCES, DemoResult
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
