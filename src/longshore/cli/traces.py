"""What the commands that read traces have in common: their options, and how a trace is opened."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from longshore.errors import ConfigError, TraceError

if TYPE_CHECKING:
    from longshore.trace.request import TraceRequest
    from longshore.trace.timing import Timing


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


TraceFile = Annotated[Path, typer.Argument(help="A trace of requests.", show_default=False)]
FormOption = Annotated[
    FormChoice, typer.Option("--form", help="What its lines are; auto looks at the first one. See docs/replay.md.")
]
BlockTokens = Annotated[int, typer.Option(min=1, help="Tokens of one block of the trace.")]
BadLinesOption = Annotated[
    BadLines, typer.Option("--bad-lines", help="Refuse the trace at the first line that is no request, or skip it.")
]
Limit = Annotated[int | None, typer.Option(min=1, help="How many requests to take; all by default.")]
Model = Annotated[
    str | None,
    typer.Option(help="A model of the built-in table (llama-3.1-8b, ...), or a config.json of Hugging Face."),
]
ProfileOption = Annotated[
    str, typer.Option("--profile", help="The machine: h100 or a100. Options below replace parts.")
]
Bench = Annotated[
    list[Path] | None,
    typer.Option(
        help="Take speeds from what `longshore bench NAME --json` printed: of files (file), the link (copy), "
        "prefill (prefill). May be given several times."
    ),
]
Link = Annotated[str | None, typer.Option(help="Bytes a second between device and host memory, as in 50GB.")]
FileRead = Annotated[str | None, typer.Option(help="Bytes a second from files.")]
FileWrite = Annotated[str | None, typer.Option(help="Bytes a second into files.")]
PrefillRate = Annotated[
    float | None, typer.Option(min=1e-3, help="Tokens a second that one engine computes of a short prompt.")
]
Engines = Annotated[
    int, typer.Option(min=1, max=10_000, help="Engines that share the tiers; each computes a prompt at a time.")
]

_TOO_MUCH = 1 << 63
"""Bytes that nobody has."""

_SHOWN = 3
"""Bad lines that are shown; of more there is the number."""


def open_trace(
    path: Path, form: FormChoice, block_tokens: int, bad_lines: BadLines, limit: int | None, console: Console
) -> Iterator[TraceRequest]:
    """The requests of a trace, as they are asked for; what was skipped, or cannot be shown, is said on `console`."""
    from longshore.trace.readers import Form, form_of, read_trace  # noqa: PLC0415 - see `replay`

    known = form_of(path) if form is FormChoice.AUTO else Form(form.value)
    if not known.shows_reuse:
        console.print(f"{path.name} has lengths only: nothing in it says what is shared, so nothing will be hit.")
    skipped = 0

    def skip(error: TraceError) -> None:
        nonlocal skipped
        skipped += 1
        if skipped <= _SHOWN:
            console.print(f"skipped: {error}", style="yellow", markup=False)

    told = skip if bad_lines is BadLines.SKIP else None
    yield from islice(read_trace(path, known, block_tokens=block_tokens, skip=told), limit)
    if skipped > _SHOWN:
        console.print(f"skipped: {skipped:,} lines in all", style="yellow")


def timing_of(
    model: str | None,
    profile: str,
    bench: Sequence[Path] | None,
    rates: Mapping[str, str | None],
    prefill_rate: float | None,
    remote_delay: str | None = None,
) -> Timing:
    """The timing model that the options ask for; `rates` are those of `Profile`, by name."""
    from longshore.trace.geometry import MODELS, geometry_of  # noqa: PLC0415
    from longshore.trace.timing import Timing, profile_named, with_bench, with_changes  # noqa: PLC0415

    if model is None:
        raise ConfigError(f"--model: expected one of {', '.join(MODELS)}, or the path of a config.json")
    geometry, machine = geometry_of(model), profile_named(profile)
    for path in bench or ():
        machine = with_bench(machine, path)
    given: dict[str, float | None] = {
        name: None if text is None else float(size_of(text, f"--{name.replace('_', '-')}"))
        for name, text in rates.items()
    }
    given["remote_delay"] = None if remote_delay is None else seconds_of(remote_delay, "--remote-delay")
    given["flops"] = None if prefill_rate is None else 2 * geometry.parameters * prefill_rate
    return Timing(geometry, with_changes(machine, given, "as given"))


def seconds_of(text: str, option: str) -> float:
    """Seconds of a time such as `500ms` or `2s`; raises `ConfigError`."""
    for unit, factor in (("us", 1e-6), ("ms", 1e-3), ("s", 1.0)):
        if text.endswith(unit):
            try:
                seconds = float(text.removesuffix(unit)) * factor
            except ValueError:
                break
            if 0 < seconds < float("inf"):
                return seconds
            break
    raise ConfigError(f"{option}: expected a time such as 500ms or 2s, got {text!r}")


def size_of(text: str, option: str) -> int:
    """Bytes of a size such as `64GiB`; raises `ConfigError`."""
    from pydantic import ByteSize, TypeAdapter, ValidationError  # noqa: PLC0415

    try:
        count = int(TypeAdapter(ByteSize).validate_python(text.removesuffix("/s")))
    except ValidationError:
        count = 0
    if not 0 < count < _TOO_MUCH:
        raise ConfigError(f"{option}: expected a size such as 64GiB or 1.5TB, got {text[:80]!r}")
    return count
