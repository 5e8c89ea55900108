"""Options of the commands: parsing of values (sizes, rates, times, numbers), checks against the machine, and groups.

A group is a dataclass whose fields are options. A command made `with_options` takes it as one parameter.
"""

from __future__ import annotations

import enum
import inspect
import math
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, is_dataclass
from inspect import Parameter
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, get_origin, get_type_hints

import typer
from rich.console import Console

from longshore.config import Config, available_memory, format_bytes, parse_size
from longshore.errors import ConfigError, TraceError
from longshore.trace.machine import MODELS, Timing, geometry_of, profile_named, with_bench, with_changes
from longshore.trace.parsing import TraceRequest
from longshore.trace.readers import Form, form_of, read_trace
from longshore.trace.replay import Routing

_NUMBER = re.compile(r"[0-9]*\.?[0-9]+")
_RATE = re.compile(rf"{_NUMBER.pattern}\s*[A-Za-z]+(/s)?")
_BITS_OR_BYTES = re.compile(rf"({_NUMBER.pattern})\s*([kKMGT])b(/s)?")
_LONGEST_TIME = 365 * 86_400.0
_MOST = 10**12


def size_of(text: str, option: str, least: int = 1) -> int:
    """Bytes of a size such as `64GiB`, at least `least`; raises `ConfigError`."""
    try:
        count = parse_size(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}, got {text[:80]!r}") from None
    if not count:
        raise ConfigError(f"{option}: expected a size above zero, such as 64GiB, got {text[:80]!r}")
    if count < least:
        hint = f"; did you mean {text.strip()}GiB?" if _NUMBER.fullmatch(text.strip()) else ""
        raise ConfigError(f"{option} {text[:80]}: expected at least {format_bytes(least)}, one block{hint}")
    return count


def rate_of(text: str, option: str) -> int:
    """Bytes per second of a rate with a unit, such as `50GB/s`. Raises `ConfigError`."""
    given = text.strip()
    if re.fullmatch(r"[0.]+[^0-9]*", given):
        raise ConfigError(f"{option}: expected a rate above zero, such as 50GB/s, got {text[:80]!r}")
    if _NUMBER.fullmatch(given):
        raise ConfigError(f"{option}: expected a unit, got {text[:80]!r}; did you mean {given[:80]}GB/s?")
    if found := _BITS_OR_BYTES.fullmatch(given):
        number, prefix, _ = found.groups()
        raise ConfigError(f"{option}: expected {number}{prefix}B/s (bytes) or {number}{prefix}bit/s, got {text[:80]!r}")
    if not _RATE.fullmatch(given):
        raise ConfigError(f"{option}: expected a rate such as 50GB/s or 25Gbit/s, got {text[:80]!r}")
    try:
        if rate := parse_size(given.removesuffix("/s")):
            return rate
    except ValueError as error:
        raise ConfigError(f"{option}: expected a rate such as 50GB/s, got {text[:80]!r}: {error}") from None
    raise ConfigError(f"{option}: expected at least one byte per second, got {text[:80]!r}")


def seconds_of(text: str, option: str) -> float:
    """Seconds of a time such as `500ms` or `2s`; raises `ConfigError`."""
    for unit, factor in (("us", 1e-6), ("ms", 1e-3), ("s", 1.0)):
        if text.endswith(unit):
            try:
                seconds = float(text.removesuffix(unit)) * factor
            except ValueError:
                break
            if 0 < seconds <= _LONGEST_TIME:
                return seconds
            break
    raise ConfigError(f"{option}: expected a time such as 500ms or 2s, got {text[:80]!r}")


def store_of(text: str, option: str) -> tuple[str, str | None, str | None]:
    """Size, rate and delay of a store such as `4TiB:3GB/s:1ms`, of which only the size must be there.

    Raises `ConfigError`. The size is checked by `size_of`.
    """
    size, *others = parts = [part.strip() for part in text.split(":")]
    if len(parts) > 3 or not all(parts):
        raise ConfigError(
            f"{option}: expected SIZE, SIZE:BANDWIDTH or SIZE:BANDWIDTH:ROUNDTRIP, such as 4TiB:3GB/s:1ms, "
            f"got {text[:80]!r}"
        )
    rate, delay = [*others, None, None][:2]
    if rate is not None:
        rate_of(rate, option)
    if delay is not None:
        seconds_of(delay, option)
    return size, rate, delay


def counts_of(text: str, option: str, least: int) -> list[int]:
    """Comma-separated whole numbers of at least `least`, such as `10000,1000000`; raises `ConfigError`."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and len(part) < 20 and least <= int(part) < _MOST for part in parts):
        raise ConfigError(
            f"{option}: expected comma-separated whole numbers of at least {least}, such as {max(least, 512)},"
            f"{4 * max(least, 512)}; got {text[:80]!r}"
        )
    return [int(part) for part in parts]


def settings_of(texts: Sequence[str]) -> dict[str, str]:
    """Unchecked settings from texts `KEY=VALUE`; the last one of a key applies. Raises `ConfigError`."""
    settings = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set {text[:80]}: expected KEY=VALUE, as in --set offload=write_back")
        settings[key] = value
    return settings


def settings_with(texts: Sequence[str], **options: object) -> dict[str, str]:
    """`settings_of`, and `options` of the same names unless they are `None`; raises `ConfigError` if one is in both."""
    given = settings_of(texts)
    for name, value in options.items():
        if value is not None and name in given:
            raise ConfigError(f"--set {name}={given[name]}: already set by --{name.replace('_', '-')} {value}")
        if value is not None:
            given[name] = str(value)
    return given


def check_memory(needed: float, option: str, given: object, count: int, unit: str = "") -> None:
    """Raise `ConfigError` if the machine does not have `needed` bytes of memory.

    `needed` is proportional to `count`, the value `given` for `option`, as a number or in a `unit` of sizes.
    """
    _check(needed, available_memory(), "of memory", "available", option, given, count, unit)


def check_room(needed: float, directory: Path, option: str, given: object, count: int, unit: str = "") -> None:
    """Raise `ConfigError` if the file system of `directory` does not have `needed` bytes free; as `check_memory`."""
    free = shutil.disk_usage(directory).free
    _check(needed, free, "on disk", f"free at {directory}", option, given, count, unit)


def _check(needed: float, had: int, what: str, where: str, option: str, given: object, count: int, unit: str) -> None:
    if needed > had:
        most = int(count * (had / needed)) // (1 << 20 if unit == "MiB" else 1)
        raise ConfigError(
            f"{option} {given} needs {format_bytes(needed)} {what}, but only {format_bytes(had)} is {where}: "
            + (f"pass at most {option} {most}{unit}" if most else "this machine is too small")
        )


def existing(option: str, path: Path) -> Path:
    """`path`, which is a directory; raises `ConfigError`."""
    try:
        with os.scandir(path):
            return path
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option} {path}: {getattr(error, 'strerror', None) or error}") from error


class FormChoice(enum.StrEnum):
    """Format of a trace."""

    AUTO = "auto"
    MOONCAKE = "mooncake"
    SESSIONS = "sessions"
    LENGTHS = "lengths"
    EVENTS = "events"
    PROMPTS = "prompts"


class BadLines(enum.StrEnum):
    """Treatment of invalid lines."""

    REFUSE = "refuse"
    SKIP = "skip"


BlockTokens = Annotated[int, typer.Option(min=1, help="Tokens per block of the trace.")]
ProfileOption = Annotated[
    str, typer.Option("--profile", help="Machine profile: h100 or a100; the speed options override parts of it.")
]
PrefillRate = Annotated[
    float | None,
    typer.Option(
        min=1e-3,
        max=1e9,
        help="Prefill speed of one engine for short prompts, in prompt tokens per second; of a running engine, the "
        "setting prefill_speed.",
    ),
]

Route = Annotated[
    Routing | None,
    typer.Option(
        help="How requests are dealt to replicas. round-robin (default): in turn. prefix: to the replica that was "
        "last dealt at least half of the prompt as a prefix, else to the one with the fewest requests."
    ),
]
Model = Annotated[
    str | None,
    typer.Option(help="A built-in model (llama-3.1-8b, ...) or a Hugging Face config.json."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """`command` for typer: a parameter that is a dataclass is replaced by those of its fields that are `Annotated`."""
    parameters: list[Parameter] = []
    groups: dict[str, tuple[Any, list[str]]] = {}
    hints = get_type_hints(command, include_extras=True)
    for name, own in inspect.signature(command).parameters.items():
        if not is_dataclass(kind := hints[name]):
            parameters.append(own.replace(annotation=hints[name]))
            continue
        types = get_type_hints(kind, include_extras=True)
        options = [each for each in fields(kind) if get_origin(types[each.name]) is Annotated]
        groups[name] = kind, [each.name for each in options]
        for each in options:
            default = Parameter.empty if each.default is MISSING else each.default
            parameters.append(
                Parameter(each.name, Parameter.KEYWORD_ONLY, default=default, annotation=types[each.name])
            )
    parameters.sort(key=lambda each: each.default is not Parameter.empty)  # arguments before options

    def run(**given: Any) -> None:
        made = {name: kind(**{each: given.pop(each) for each in own}) for name, (kind, own) in groups.items()}
        command(**given, **made)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def arguments_of(group: Any) -> list[str]:
    """The options of `group` on a command line, without those that have their default."""
    found: list[str] = []
    for field in fields(group):
        value = getattr(group, field.name)
        if field.default is not MISSING and value != field.default:
            for each in value if isinstance(value, list) else [value]:
                found += [f"--{field.name.replace('_', '-')}", str(each)]
    return found


@dataclass(frozen=True, slots=True)
class MachineOptions:
    """The modelled machine."""

    profile: ProfileOption = "h100"
    bench: Annotated[
        list[Path] | None,
        typer.Option(
            help="File with the output of `longshore bench NAME --json`; its speeds override the profile: bench file "
            "for files, copy for the link, prefill for prefill. Repeatable."
        ),
    ] = None
    link: Annotated[str | None, typer.Option(help="Bandwidth between device and host memory, for example 50GB/s.")] = (
        None
    )
    file_read: Annotated[str | None, typer.Option(help="Read bandwidth of files, for example 6.8GB/s.")] = None
    file_write: Annotated[str | None, typer.Option(help="Write bandwidth of files, for example 4GB/s.")] = None
    prefill_rate: PrefillRate = None
    engines: Annotated[
        int,
        typer.Option(
            min=1, max=10_000, help="Number of engines that share the tiers; each computes one prompt at a time."
        ),
    ] = 1

    def timing(self, model: str | None, remote: Mapping[str, str | None] | None = None) -> Timing:
        """The timing of `model`; `remote` may have `remote_read`, `remote_write` and `remote_delay`.

        Raises `ConfigError` or `TraceError`.
        """
        if model is None:
            raise ConfigError(f"--model: expected one of {', '.join(MODELS)}, or the path of a config.json")
        geometry, machine = geometry_of(model), profile_named(self.profile)
        for path in self.bench or ():
            machine = with_bench(machine, path)
        rates = {"link": self.link, "file_read": self.file_read, "file_write": self.file_write, **(remote or {})}
        given: dict[str, float | None] = {}
        for name, text in rates.items():
            parse = seconds_of if name == "remote_delay" else rate_of
            given[name] = None if text is None else float(parse(text, f"--{name.replace('_', '-')}"))
        rate = self.prefill_rate
        if rate is not None and not math.isfinite(rate):
            raise ConfigError(f"--prefill-rate: expected a finite number of tokens a second, got {rate}")
        given["flops"] = None if rate is None else 2 * geometry.parameters * rate
        return Timing(geometry, with_changes(machine, given, "as given"))


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """A trace of requests."""

    trace: Annotated[
        Path,
        typer.Argument(help="Trace of requests, plain or gzip-compressed; - for standard input.", show_default=False),
    ]
    form: Annotated[
        FormChoice,
        typer.Option(
            "--format", "--form", help="Trace format, see docs/replay.md; auto: detect it from the first line."
        ),
    ] = FormChoice.AUTO
    block_tokens: BlockTokens = 512
    bad_lines: Annotated[
        BadLines, typer.Option("--bad-lines", help="Refuse a trace with an invalid line, or skip such lines.")
    ] = BadLines.REFUSE
    limit: Annotated[int | None, typer.Option(min=1, help="Number of requests to take; default: all.")] = None

    @contextmanager
    def opened(self, console: Console) -> Iterator[Trace]:
        """Its requests. Standard input is copied into a temporary file, which can be read again."""
        if str(self.trace) != "-":
            yield Trace(self.trace, self, console)
            return
        if sys.stdin is None:
            raise ConfigError("expected a trace on standard input, but it is closed")
        with tempfile.TemporaryDirectory(prefix="longshore-") as directory:
            copy = Path(directory) / _STANDARD_INPUT
            try:
                with copy.open("wb") as file:
                    shutil.copyfileobj(sys.stdin.buffer, file)
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(copy)) from error
            try:
                yield Trace(copy, self, console)
            except TraceError as error:
                raise TraceError(self.named(error, copy)) from error

    def named(self, error: TraceError, path: Path) -> str:
        """The text of `error` about the file at `path`, which is called standard input if it is a copy of that."""
        return str(error).replace(str(path), path.name) if str(self.trace) == "-" else str(error)


SLOT_BYTES = 80
"""Memory per block of a replay tier's capacity, in bytes."""

_STANDARD_INPUT = "standard input"
"""Name of a trace that is read from standard input."""

_SHOWN = 3
"""Largest number of invalid lines shown."""


class Trace:
    """The requests of a trace; each iteration reads the file again.

    The first iteration prints skipped lines and assumptions on `console`. An iteration raises `TraceError` for a trace
    without requests.
    """

    def __init__(self, path: Path, options: TraceOptions, console: Console) -> None:
        self.assumed = 0
        """Requests without a timestamp."""
        self.requests = 0
        self._path, self._options, self._console = path, options, console
        self._told = False

    def __iter__(self) -> Iterator[TraceRequest]:
        told, self._told = self._told, True

        def tell(line: str) -> None:
            if not told:
                self._console.print(line, style="yellow")

        form, skips = self._options.form, self._options.bad_lines is BadLines.SKIP
        known = form_of(self._path) if form is FormChoice.AUTO else Form(form.value)
        if not known.shows_reuse:
            tell(f"{self._path.name} has lengths only, without information on shared prefixes: there will be no hits.")
        skipped = self.assumed = self.requests = 0

        def skip(error: TraceError) -> None:
            nonlocal skipped
            skipped += 1
            if skipped <= _SHOWN:
                tell(f"skipped: {self._options.named(error, self._path)}")

        requests = read_trace(self._path, known, block_tokens=self._options.block_tokens, skip=skip if skips else None)
        for request in islice(requests, self._options.limit):
            self.requests += 1
            self.assumed += request.assumed_time
            yield request
        if skipped > _SHOWN:
            tell(f"skipped: {skipped:,} lines in all")
        if not self.requests:
            raise TraceError(f"{self._path}: expected a trace of at least one request, got none")
        if self.assumed:
            tell(self.assumption)

    @property
    def assumption(self) -> str:
        """The assumption about missing timestamps as text; empty if there is none."""
        if not self.assumed:
            return ""
        return (
            f"{self.assumed:,} of {self.requests:,} requests have no timestamp: each is taken to arrive 1 s after the "
            "one before it; waits, times to first token and writes a day follow from that"
        )


def print_overload(facts: Mapping[str, object], console: Console) -> None:
    """Print the overload of the engines, if there is one."""
    overload = facts.get("overload")
    if isinstance(overload, Mapping):
        console.print(f"Overload. {overload['words']}", style="bold yellow")


def plain_setting(config: Config, name: str, text: str) -> object:
    """A setting as a JSON value: sizes as given, paths absolute."""
    value = getattr(config, name)
    if isinstance(value, Path):
        return str(value.absolute())
    return value if isinstance(value, bool | float) or type(value) is int else text
