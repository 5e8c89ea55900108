"""Standard output and standard error of commands: when they cannot be written, and how a command ends."""

from __future__ import annotations

import fnmatch
import io
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_kit import LONGSHORE, SHORT, expanded
from rich.console import Console
from rich.padding import Padding
from typer.main import get_command

from longshore.cli.app import app
from longshore.cli.output import console, run, table
from longshore.errors import ReportError


def shell(command: str, files: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command line, with `longshore` in it, as a shell runs it."""
    return subprocess.run(
        ["bash", "-c", command.replace("longshore ", f"{shlex.quote(str(LONGSHORE))} ", 1)],
        capture_output=True,
        text=True,
        cwd=files,
        env={**os.environ, **environment},
        check=False,
    )


FULL = "longshore: standard output: No space left on device\n"
CLOSED = "longshore: standard output is closed\n"


@pytest.mark.parametrize(
    ("command", "status", "line"),
    [
        ("longshore POLICY > /dev/full", 1, FULL),
        ("longshore POLICY --json > /dev/full", 1, FULL),
        ("longshore REPLAY > /dev/full", 1, FULL),
        ("PYTHONUNBUFFERED=1 longshore POLICY --json > /dev/full", 1, FULL),
        ("PYTHONUNBUFFERED=1 longshore replay gone --capacity-blocks 5 2> /dev/full", 2, ""),
        ("longshore PLAN > /dev/full", 1, FULL),
        ("longshore vllm-config --host-size 1MiB > /dev/full", 1, FULL),
        ("longshore --version > /dev/full", 1, FULL),
        ("longshore replay --help > /dev/full", 1, FULL),
        ("longshore POLICY >&-", 1, CLOSED),
        ("longshore --version >&-", 1, CLOSED),
        ("longshore replay gone --capacity-blocks 5 2>&-", 2, ""),
        ("longshore replay gone --capacity-blocks 5 2> /dev/full", 2, ""),
        ("longshore POLICY --json 2>&- > /dev/null", 0, ""),
        ("longshore replay - --capacity-blocks 5 <&-", 2, "longshore: expected a trace on standard input, *\n"),
        ("longshore POLICY | true; exit ${PIPESTATUS[0]}", 141, ""),
        ("longshore replay --help | true; exit ${PIPESTATUS[0]}", 141, ""),
    ],
)
def test_a_failed_write_of_output_is_one_line(command: str, status: int, line: str, files: Path) -> None:
    command = expanded(command)
    # What reads from a pipe must have gone when it is written to.
    command = command.replace("| true;", "| (exec 0<&-; sleep 0.1);")
    done = shell(command, files, PYTHONUNBUFFERED="")
    assert done.returncode == status, done.stderr
    assert fnmatch.fnmatchcase(done.stderr, line), done.stderr


def test_a_failed_report_leaves_the_previous_page(files: Path) -> None:
    (files / "page").mkdir()
    (files / "page" / "index.html").write_text("former")
    done = shell(f"ulimit -f 500; longshore {SHORT['REPLAY']} --report page", files)
    assert done.returncode == 1
    assert done.stderr == "longshore: cannot write report page/index.html: File too large\n"
    assert [(path.name, path.read_text()) for path in (files / "page").iterdir()] == [("index.html", "former")]


def test_tables_have_no_trailing_blanks(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(lambda: console().print(Padding("x", (0, 0, 0, 2)))) == 0
    assert capsys.readouterr().out == "  x\n"
    done = shell(f"longshore {SHORT['REPLAY']}", files)
    assert not [line for line in done.stdout.splitlines() if line.endswith(" ")]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)])
def test_what_fails_after_a_signal_is_no_error(number: int, status: int) -> None:
    code = f"""
import errno, os, signal, sys
from longshore.cli.output import run
signal.signal({number:d}, signal.default_int_handler if {number:d} == signal.SIGINT else signal.SIG_DFL)
def command():
    try:
        os.kill(os.getpid(), {number:d})
    finally:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
sys.exit(run(command))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (status, "")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_terminated_command_leaves_no_temporary_file(number: int, status: int, files: Path) -> None:
    (files / "disk").mkdir()
    call = "bench file --dir disk --bytes 64MiB --repeats 100000 --allow-ram-disk --allow-page-cache"
    running = subprocess.Popen(
        [str(LONGSHORE), *call.split()],
        cwd=files,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # noqa: PLW1509 - nohup ignores one of them
    )
    deadline = time.monotonic() + 120
    while not list(files.glob("disk/*/*")):
        assert running.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    running.send_signal(number)
    _, told = running.communicate(timeout=120)
    assert (running.returncode, told) == (status, "")
    assert list((files / "disk").iterdir()) == []


def test_characters_outside_the_encoding_become_question_marks(files: Path) -> None:
    done = shell(f"longshore {SHORT['REPLAY']} --limit 1", files, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "? " in done.stdout


def test_interrupts_and_internal_errors_print_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    def broken() -> None:
        raise KeyError("x")

    def greedy() -> None:
        raise MemoryError

    assert run(interrupted) == 130
    assert run(greedy) == 1
    assert run(broken) == 1
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "longshore: out of memory",
        "longshore: internal error, KeyError: 'x' (LONGSHORE_TRACEBACK=1 shows where)",
    ]
    monkeypatch.setenv("LONGSHORE_TRACEBACK", "1")
    run(broken)
    assert "Traceback" in capsys.readouterr().err


def test_help_fits_any_width_of_the_terminal() -> None:
    broken = {
        name: line
        for name, command in _commands(get_command(app))
        for paragraph in (command.help or "").split("\n\n")
        for line in paragraph.splitlines()
        if "\n" in paragraph and not line.startswith(("longshore ", "flags=", "eval "))
    }
    assert broken == {}


def _commands(group: Any) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        yield from _commands(command) if hasattr(command, "commands") else [(name, command)]


@pytest.mark.parametrize("columns", [200, 72, 60, 45])
def test_narrow_tables_cut_no_number_and_no_text(columns: int) -> None:
    made = table("engine", "state", "size", "not stored", "queued", right=("size", "not stored"), optional=("queued",))
    made.add_row("10.20.30.40:9464", "away: Connection refused", "1,023.5 KiB", "12,345.6/s", "7 loads")
    out = io.StringIO()
    Console(file=out, width=columns).print(made)
    text = out.getvalue()
    lines = text.splitlines()
    assert max(map(len, lines)) <= columns
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    assert all(number in text for number in ("1,023.5 KiB", "12,345.6/s"))
    starts = [lines[0].index("state"), lines[0].index("size") - 7]
    assert "".join(line[: starts[0]].strip() for line in lines) == "engine10.20.30.40:9464"
    assert "".join(line[starts[0] : starts[1]].replace(" ", "") for line in lines) == "stateaway:Connectionrefused"
    assert ("loads" in text) is (columns > 45)


@pytest.mark.parametrize("call", ["REPLAY --limit 5", "PLAN --limit 5 --replays 1"])
def test_results_are_printed_though_a_report_cannot_be_written(
    call: str, files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> Any:
        raise ReportError("cannot write report: No space left on device")

    monkeypatch.setattr("longshore.report.Page.write", full)
    command = [*shlex.split(expanded(call)), "--json", "--report", "made"]
    monkeypatch.setattr("sys.argv", ["longshore", *command])
    assert run(lambda: app(prog_name="longshore", standalone_mode=False)) == 1
    told = capsys.readouterr()
    assert json.loads(told.out)["provenance"]
    assert told.err.splitlines()[-1] == "longshore: cannot write report: No space left on device"
