"""Standard output and standard error of every command, and how each command ends.

output                      `write_json`, or a table on `console()`, to `sys.stdout`, which `run` wraps
error of usage              one line on standard error, status 2
runtime failure             one line on standard error, status 1: a full disk, a dead engine, no memory
closed pipe                 nothing, status 141, as for SIGPIPE
interrupt                   nothing, status 130
SIGTERM, SIGHUP             temporary files are removed; status 143, 129
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table

from longshore import __version__
from longshore.bench.harness import machine_facts
from longshore.config import format_bytes
from longshore.errors import ConfigError, DeviceError, EngineError, LongshoreError, ReportError, SelfTestError
from longshore.report import Page, plotly_javascript
from longshore.report.images import check_browser, export_figures
from longshore.report.page import page_template

_WIDE = 10_000
_LONGEST_WORD = 16
"""Longer words, such as paths, may be broken before a column is left out."""

_PADDING = re.compile(r" +(?=\n)")
_BROKEN_PIPE, _INTERRUPTED = 141, 130
_RUNTIME_FAILURES = (DeviceError, EngineError, ReportError, SelfTestError, OSError, MemoryError, ImportError)
_TRACEBACK = "LONGSHORE_TRACEBACK"


class OutputError(LongshoreError):
    """Standard output cannot be written."""


def console(*, stderr: bool = False) -> Console:
    """A console on standard output or error. If it is not a terminal, no line is wrapped or cut, whatever COLUMNS is.

    Text is printed as it is: names of requests and directories may have brackets.
    """
    piped = not (sys.stderr if stderr else sys.stdout).isatty()
    return Console(stderr=stderr, width=_WIDE if piped else None, highlight=False, markup=False, emoji=False)


def write_json(content: object) -> None:
    """One JSON object, on one line."""
    print(json.dumps(content))


def provenance(seed: int | None = None) -> dict[str, object]:
    """Version, command, machine, date and seed of a report made now; without a `seed`, it has no random numbers."""
    facts = machine_facts()
    memory = format_bytes(float(str(facts["memory"])))
    return {
        "version": __version__,
        "command": shlex.join(["longshore", *sys.argv[1:]]),
        "machine": f"{facts['cpu']}, {facts['cores']} cores, {memory} of memory, Linux {facts['kernel']}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": seed,
    }


def provenance_lines(about: Mapping[str, object]) -> list[str]:
    """`provenance` as text."""
    seed = "no random numbers" if about["seed"] is None else f"seed {about['seed']}"
    return [f"longshore {about['version']}, {about['date']}, {seed}", str(about["machine"]), str(about["command"])]


def print_provenance(about: Mapping[str, object]) -> None:
    """The lines of `provenance` below a report on standard output."""
    for line in provenance_lines(about):
        console().print(line, style="dim", soft_wrap=True)


class WholeTable(Table):
    """A table of which no number is cut. Where the terminal is too narrow, gaps shrink and texts are wrapped.

    Before words are broken, columns named in `optional` are left out, the first ones first.
    """

    optional: Sequence[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table for a terminal of that width."""
        yield from Table.__rich_console__(self._fitted(console, options), console, options)

    def _fitted(self, console: Console, options: ConsoleOptions) -> Table:
        wide, room, gap = options.update(width=_WIDE), options.max_width, self.padding[1]
        if room >= _WIDE:
            return self
        columns, widths, least = list(self.columns), [], []
        for column in columns:
            header, *cells = (Measurement.get(console, wide, each) for each in (column.header, *column.cells))
            widths.append(max(header.maximum, *(each.maximum for each in cells), 1))
            is_number = column.justify == "right"
            whole = (each.maximum if is_number else min(each.minimum, _LONGEST_WORD) for each in cells)
            least.append(max(header.minimum, *whole, 1))
        if sum(widths) + gap * (len(widths) - 1) <= room:
            return self
        for name in self.optional:
            at = next((at for at, column in enumerate(columns) if column.header == name), None)
            if sum(least) + len(least) > room + 1 and at is not None:
                del columns[at], widths[at], least[at]
        broken = [most if each.justify == "right" else 1 for each, most in zip(columns, least, strict=True)]
        for floors in (least, broken):
            while sum(widths) + len(widths) > room + 1:
                at = max(range(len(widths)), key=lambda at: widths[at] - floors[at])
                if widths[at] <= floors[at]:
                    break
                widths[at] -= 1
        fitted = copy(self)
        fitted.padding = (0, min(gap, 1), 0, 0)
        fitted.columns = [
            replace(column, width=width, overflow="fold", no_wrap=False, _index=at)
            for at, (column, width) in enumerate(zip(columns, widths, strict=True))
        ]
        return fitted


def table(*columns: str, right: Container[str] = (), optional: Sequence[str] = ()) -> WholeTable:
    """An empty table; columns in `right` are aligned to the right, those in `optional` need not be shown."""
    found = WholeTable(header_style="dim", box=None, pad_edge=False, padding=(0, 3, 0, 0))
    found.optional = optional
    for column in columns:
        found.add_column(column, justify="right" if column in right else "left")
    return found


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """Where the page of a report is to be written, and the images of its figures; `None`: nowhere."""

    report: Annotated[Path | None, typer.Option(help="Write an HTML page with plots into this directory.")] = None
    svg: Annotated[
        Path | None,
        typer.Option(help="Write each figure of the page into this directory as an SVG; needs Chromium."),
    ] = None
    png: Annotated[Path | None, typer.Option(help="The same as PNGs of twice the size.")] = None

    def check(self) -> bool:
        """Whether a page is wanted. Raises an error, before anything is measured, if a directory cannot be used."""
        wanted = {"--report": self.report, "--svg": self.svg, "--png": self.png}
        for option, directory in wanted.items():
            if directory is not None:
                _check_directory(directory, option)
        if self.svg is not None or self.png is not None:
            check_browser()
        return any(wanted.values())

    @contextmanager
    def written(self, page: Page | None, about: Mapping[str, object], console: Console) -> Iterator[None]:
        """Context manager: as `write`, if there is a page, but what it raises is raised after results are printed."""
        failure: ReportError | None = None
        try:
            if page is not None:
                self.write(page, about, console)
        except ReportError as error:
            failure = error
        yield
        if failure is not None:
            raise failure

    def write(self, page: Page, about: Mapping[str, object], console: Console) -> None:
        """Write the page and the images, and print their paths on `console`. Raises `ReportError`."""
        page.provenance = provenance_lines(about)
        if self.report is not None:
            console.print(f"report: {page.write(self.report / 'index.html')}", soft_wrap=True)
        folders = {kind: folder for kind, folder in (("svg", self.svg), ("png", self.png)) if folder is not None}
        for made in export_figures(page, folders):
            console.print(f"figure: {made}", soft_wrap=True)


def _check_directory(directory: Path, option: str) -> None:
    """Raise an error if no report can be written into `directory`."""
    plotly_javascript()
    page_template()
    made = [path for path in (directory, *directory.parents) if not os.path.lexists(path)]
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option} {directory}: {getattr(error, 'strerror', None) or error}") from error
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(f"{option} {directory}: not writable for this user")
    for path in made:  # it is created again with the page
        path.rmdir()


def run(command: Callable[[], object]) -> int:
    """Run `command`; returns the exit status. Errors are printed in one line, without a traceback."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115 - until the process ends
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores one of them
                signal.signal(number, _leave)
    stdout, stderr = sys.stdout, sys.stderr
    sys.stderr = _EncodedStream(stderr, failing=False)
    try:
        if stdout is None:
            return _fail("standard output is closed", 1)
        sys.stdout = _EncodedStream(stdout)
        return _ended(command)
    finally:
        sys.stdout, sys.stderr = stdout, stderr


def _leave(number: int, frame: object) -> None:
    """End with an exception, so that temporary files are removed; a second signal ends the process at once."""
    signal.signal(number, signal.SIG_DFL)
    sys.exit(128 + number)


def _ended(command: Callable[[], object]) -> int:
    """The exit status of `command`."""
    try:
        code = command()
        sys.stdout.flush()
    except (SystemExit, KeyboardInterrupt) as left:
        code = _status_of(left)
    except Exception as error:  # noqa: BLE001 - the last one who could say what happened
        # A signal may come between the close of a file and its note: what fails at the end then is no error.
        before: BaseException | None = error
        while before is not None and not isinstance(before, SystemExit | KeyboardInterrupt):
            before = before.__context__
        code = _told(error) if before is None else _status_of(before)
    return code if isinstance(code, int) else 0 if code is None else 1


def _status_of(left: SystemExit | KeyboardInterrupt) -> Any:
    return left.code if isinstance(left, SystemExit) else _INTERRUPTED


class _EncodedStream:
    """A standard stream, with the methods that commands use; characters that it cannot encode are written as `?`.

    Blanks at the end of a line are omitted, because tables are padded to the width of the console.

    If a write fails, `OutputError` is raised, or the process ends if the reader of the pipe has closed it. Without
    `failing`, output is discarded instead.
    """

    def __init__(self, stream: Any, *, failing: bool = True) -> None:
        self._stream, self._raises = stream, failing
        self._failure: BaseException | None = None
        """Raised again by all later calls, because some callers ignore the first one."""
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")

    def write(self, text: str) -> int:
        """Write `text`."""
        with self._failing():
            self._stream.write(_PADDING.sub("", text))
        return len(text)

    def flush(self) -> None:
        """Write what is buffered."""
        with self._failing():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        if self._failure is not None:
            raise self._failure
        try:
            yield
        except OSError as error:
            self._drop()
            if not self._raises:
                return
            gone = isinstance(error, BrokenPipeError)
            self._failure = SystemExit(_BROKEN_PIPE) if gone else OutputError(f"standard output: {error.strerror}")
            raise self._failure from error

    def _drop(self) -> None:
        """Discard what is buffered; it would be written again at the end of the process."""
        try:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
        except (OSError, ValueError):
            return  # not a file: nothing is written at the end


def _told(error: Exception) -> int:
    """Print the error; returns the exit status."""
    if os.environ.get(_TRACEBACK):
        traceback.print_exception(error)
    if hasattr(error, "format_message"):  # an error of the option parser; its class depends on the version of typer
        return _usage(error)
    if isinstance(error, OutputError | OSError | MemoryError | ImportError):
        return _fail(_words(error), 1)
    if isinstance(error, LongshoreError):
        return _fail(_words(error), 1 if isinstance(error, _RUNTIME_FAILURES) else 2)
    return _fail(f"internal error, {type(error).__name__}: {_words(error)} ({_TRACEBACK}=1 shows where)", 1)


def _usage(error: Any) -> int:
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return 2
    where = "longshore" if context is None else context.command_path
    text = " ".join(error.format_message().split()).removesuffix(".")
    if isinstance(error.__cause__, ValidationError):  # some versions of typer parse numbers with pydantic
        detail = error.__cause__.errors()[0]
        text = text.replace(detail["msg"], f"{detail['msg'].split(', ')[0]}, got {detail['input']!r}")
        text = text.replace("Input should be", "expected", 1).replace("expected great", "expected a number great")
        text = text.replace("expected less", "expected a number less")
    text = re.sub(r": (?:Value error, )?('[^']*') is not one of (.+)$", r": expected one of \2, got \1", text)
    return _fail(f"{text}; see {where} --help", 2)


def _words(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return f"out of memory: {error}".removesuffix(": ")
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


def _fail(text: str, code: int) -> int:
    print(f"longshore: {text}", file=sys.stderr, flush=True)
    return code
