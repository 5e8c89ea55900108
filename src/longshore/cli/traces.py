"""What the commands that read traces have in common: their options, and how a trace is opened."""

from __future__ import annotations

import enum
import math
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from longshore.cli.options import rate_of, seconds_of
from longshore.errors import ConfigError, TraceError

if TYPE_CHECKING:
    from longshore.trace.machine import Timing
    from longshore.trace.parsing import TraceRequest


class FormChoice(enum.StrEnum):
    """What a trace's lines are."""

    AUTO = "auto"
    MOONCAKE = "mooncake"
    SESSIONS = "sessions"
    LENGTHS = "lengths"
    EVENTS = "events"
    PROMPTS = "prompts"


class BadLines(enum.StrEnum):
    """What becomes of lines that are no request."""

    REFUSE = "refuse"
    SKIP = "skip"


TraceFile = Annotated[
    Path,
    typer.Argument(help="Trace of requests, plain or gzip-compressed; - for standard input.", show_default=False),
]
FormOption = Annotated[
    FormChoice, typer.Option("--form", help="Trace format, see docs/replay.md; auto: detect it from the first line.")
]
BlockTokens = Annotated[int, typer.Option(min=1, help="Tokens per block of the trace.")]
BadLinesOption = Annotated[
    BadLines, typer.Option("--bad-lines", help="Refuse a trace with an invalid line, or skip such lines.")
]
Limit = Annotated[int | None, typer.Option(min=1, help="Number of requests to take; default: all.")]
Model = Annotated[
    str | None,
    typer.Option(help="A built-in model (llama-3.1-8b, ...) or a Hugging Face config.json."),
]
ProfileOption = Annotated[
    str, typer.Option("--profile", help="Machine profile: h100 or a100; the speed options override parts of it.")
]
Bench = Annotated[
    list[Path] | None,
    typer.Option(
        help="File with the output of `longshore bench NAME --json`; its speeds override the profile: bench file for "
        "files, copy for the link, prefill for prefill. Repeatable."
    ),
]
Link = Annotated[str | None, typer.Option(help="Bandwidth between device and host memory, for example 50GB/s.")]
FileRead = Annotated[str | None, typer.Option(help="Read bandwidth of files, for example 6.8GB/s.")]
FileWrite = Annotated[str | None, typer.Option(help="Write bandwidth of files, for example 4GB/s.")]
PrefillRate = Annotated[
    float | None,
    typer.Option(min=1e-3, max=1e9, help="Prefill speed of one engine for short prompts, in tokens per second."),
]
Engines = Annotated[
    int,
    typer.Option(min=1, max=10_000, help="Number of engines that share the tiers; each computes one prompt at a time."),
]

SLOT_BYTES = 80
"""Memory per block of a replay tier's capacity, in bytes."""

_SHOWN = 3
"""Largest number of invalid lines shown."""


class Trace:
    """The requests of a trace, read anew each time that they are asked for.

    What was skipped, or cannot be shown, or had to be assumed, is said on `console` the first time.
    """

    def __init__(
        self, path: Path, form: FormChoice, block_tokens: int, bad_lines: BadLines, limit: int | None, console: Console
    ) -> None:
        self.assumed = 0
        """Requests without a timestamp."""
        self.requests = 0
        self._path, self._form, self._block_tokens = path, form, block_tokens
        self._skips, self._limit, self._console = bad_lines is BadLines.SKIP, limit, console
        self._told = False

    def __iter__(self) -> Iterator[TraceRequest]:
        from longshore.trace.readers import Form, form_of, read_trace  # noqa: PLC0415 - see `replay`

        told, self._told = self._told, True

        def tell(line: str) -> None:
            if not told:
                self._console.print(line, style="yellow", markup=False)

        known = form_of(self._path) if self._form is FormChoice.AUTO else Form(self._form.value)
        if not known.shows_reuse:
            tell(f"{self._path.name} has lengths only: nothing in it says what is shared, so nothing will be hit.")
        skipped = self.assumed = self.requests = 0

        def skip(error: TraceError) -> None:
            nonlocal skipped
            skipped += 1
            if skipped <= _SHOWN:
                tell(f"skipped: {error}")

        skips = skip if self._skips else None
        for request in islice(read_trace(self._path, known, block_tokens=self._block_tokens, skip=skips), self._limit):
            self.requests += 1
            self.assumed += request.assumed_time
            yield request
        if skipped > _SHOWN:
            tell(f"skipped: {skipped:,} lines in all")
        if self.assumed:
            tell(self.assumption)

    @property
    def assumption(self) -> str:
        """What was assumed of times, in words; empty if nothing was."""
        if not self.assumed:
            return ""
        return (
            f"{self.assumed:,} of {self.requests:,} requests have no timestamp: each is taken to arrive 1 s after the "
            "one before it; waits, times to first token and writes a day follow from that"
        )


def tell_overload(facts: Mapping[str, object], console: Console) -> None:
    """Say so where waiting for an engine hides what the tiers do."""
    overload = facts.get("overload")
    if isinstance(overload, Mapping):
        console.print(f"Overload. {overload['words']}", style="bold yellow", markup=False)


@contextmanager
def trace_at(path: Path) -> Iterator[Path]:
    """Where a trace lies: `path`, or, for `-`, a temporary copy of standard input, which can be read again."""
    if str(path) != "-":
        yield path
        return
    if sys.stdin is None:
        raise ConfigError("expected a trace on standard input, but it is closed")
    with tempfile.TemporaryDirectory(prefix="longshore-") as directory:
        copy = Path(directory) / "standard-input"
        try:
            with copy.open("wb") as file:
                shutil.copyfileobj(sys.stdin.buffer, file)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(copy)) from error
        yield copy


def timing_of(
    model: str | None,
    profile: str,
    bench: Sequence[Path] | None,
    rates: Mapping[str, str | None],
    prefill_rate: float | None,
    remote_delay: str | None = None,
) -> Timing:
    """The timing model that the options ask for; `rates` are those of `Profile`, by name."""
    from longshore.trace.machine import MODELS, Timing, geometry_of, profile_named, with_bench, with_changes  # noqa: PLC0415  # noqa: PLC0415

    if model is None:
        raise ConfigError(f"--model: expected one of {', '.join(MODELS)}, or the path of a config.json")
    geometry, machine = geometry_of(model), profile_named(profile)
    for path in bench or ():
        machine = with_bench(machine, path)
    given: dict[str, float | None] = {
        name: None if text is None else float(rate_of(text, f"--{name.replace('_', '-')}"))
        for name, text in rates.items()
    }
    given["remote_delay"] = None if remote_delay is None else seconds_of(remote_delay, "--remote-delay")
    if prefill_rate is not None and not math.isfinite(prefill_rate):
        raise ConfigError(f"--prefill-rate: expected a finite number of tokens a second, got {prefill_rate}")
    given["flops"] = None if prefill_rate is None else 2 * geometry.parameters * prefill_rate
    return Timing(geometry, with_changes(machine, given, "as given"))
