"""`longshore explain`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli_kit import in_terminal
from typer.testing import CliRunner

from event_file import write_events
from longshore.boundary import Route, Status
from longshore.cache import CacheSettings, Event, EventKind, GroupKeys, Protection, TieredCache, TierSpec
from longshore.cli.app import app
from longshore.runtime import EventRecorder, Runtime
from scripted import Scripted

LONGSHORE = Path(sys.executable).with_name("longshore")
A, B = bytes([1]) * 32, bytes([2]) * 32


def record(path: Path) -> None:
    write_events(
        path,
        [
            Event(1, EventKind.STORED, 1.0, tier="host", key=A),
            Event(2, EventKind.REMOVED, 2.0, tier="host", key=A, cause="evicted", by=B),
            Event(3, EventKind.REQUEST, 3.0, request="r", keys=(A, B)),
        ],
    )


def test_a_request_is_explained_as_a_table_and_as_json(tmp_path: Path) -> None:
    record(tmp_path / "events")
    told = CliRunner().invoke(app, ["explain", str(tmp_path / "events"), "--request", "r"], env={"COLUMNS": "160"})
    assert told.exit_code == 0
    assert "evicted" in told.stdout
    assert "never seen" in told.stdout
    plain = CliRunner().invoke(app, ["explain", str(tmp_path / "events"), "--request", "r", "--json"])
    first, second = json.loads(plain.stdout)["chunks"]
    assert (first["verdict"], first["tier"], first["at"], first["by"]) == ("evicted", "host", 2.0, B.hex()[:12])
    assert second["verdict"] == "never seen"


def test_times_are_calendar_times_and_all_requests_are_listed(tmp_path: Path) -> None:
    record(tmp_path / "events")
    wide = {"COLUMNS": "160"}
    told = CliRunner().invoke(app, ["explain", str(tmp_path / "events"), "--request", "r"], env=wide)
    assert "1970-01-01 00:00:02.000" in told.stdout
    listed = CliRunner().invoke(app, ["explain", str(tmp_path / "events")], env=wide)
    assert listed.stdout.splitlines()[1].split() == ["r", "1970-01-01", "00:00:03.000", "2", "0", "0"]
    plain = CliRunner().invoke(app, ["explain", str(tmp_path / "events"), "--json"])
    (asked,) = json.loads(plain.stdout)["requests"]
    assert asked == {"request": "r", "at": 3.0, "chunks": 2, "device": 0, "found": 0}


def test_columns_are_whole_where_the_table_is_piped(tmp_path: Path) -> None:
    name = "request-" + 150 * "x"
    write_events(tmp_path / "events", [Event(1, EventKind.REQUEST, 3.0, request=name, keys=(A, B))])
    done = subprocess.run(
        [LONGSHORE, "explain", tmp_path / "events"],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "40"},
        check=True,
    )
    assert done.stdout.splitlines()[1].split() == [name, "1970-01-01", "00:00:03.000", "2", "0", "0"]


@pytest.mark.parametrize("columns", [60, 80])
def test_a_narrow_terminal_gets_whole_outcomes_keys_and_numbers(tmp_path: Path, columns: int) -> None:
    record(tmp_path / "events")
    text = in_terminal(columns, "explain", tmp_path / "events", "--request", "r")
    first, second = (line.split()[1:5] for line in text.splitlines() if line[0] in "01")
    assert first[:3] == [A.hex()[:12], "evicted", "host"]
    assert second[:2] == [B.hex()[:12], "never"]
    text = in_terminal(columns, "explain", tmp_path / "events", "--verdict", "evicted")
    assert text.splitlines()[1].split()[:5] == ["r", "0", A.hex()[:12], "evicted", "host"]
    assert "\N{HORIZONTAL ELLIPSIS}" not in text


@pytest.mark.parametrize("text", ["", '{"n": 1, "kind": "request"'])
def test_a_file_without_requests_is_said_to_have_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "events").write_text(text)
    told = CliRunner().invoke(app, ["explain", str(tmp_path / "events")])
    assert told.exit_code == 0
    assert "events: no request with a name is recorded" in told.stderr


def test_names_with_brackets_are_shown_as_they_are(tmp_path: Path) -> None:
    names = ["[/]", "chat[red]", ":smile:"]
    write_events(tmp_path / "events", [Event(1, EventKind.REQUEST, 3.0, request=name, keys=(A,)) for name in names])
    told = CliRunner().invoke(app, ["explain", str(tmp_path / "events")], env={"COLUMNS": "160"})
    assert told.exit_code == 0
    assert [line.split()[0] for line in told.stdout.splitlines()[1:]] == names


def test_a_request_that_nobody_made_is_an_error(tmp_path: Path) -> None:
    record(tmp_path / "events")
    assert CliRunner().invoke(app, ["explain", str(tmp_path / "events"), "--request", "x"]).exit_code != 0


def test_outcomes_are_chosen_of_one_request_or_of_all(tmp_path: Path) -> None:
    record(tmp_path / "events")
    write_events(tmp_path / "events", [Event(4, EventKind.REQUEST, 4.0, request="s", keys=(B, A))])

    def chosen(*options: str) -> list[tuple[str | None, int, str]]:
        done = CliRunner().invoke(app, ["explain", str(tmp_path / "events"), *options, "--json"])
        assert done.exit_code == 0, done.output
        chunks = json.loads(done.stdout)["chunks"]
        return [(each.get("request"), each["position"], each["verdict"]) for each in chunks]

    assert chosen("--verdict", "evicted") == [("r", 0, "evicted"), ("s", 1, "evicted")]
    assert chosen("--verdict", "evicted", "--request", "s") == [(None, 1, "evicted")]
    assert len(chosen("--verdict", "evicted", "--verdict", "never seen")) == 4
    assert chosen("--verdict", "device") == []
    command = ["explain", str(tmp_path / "events"), "--verdict"]
    told = CliRunner().invoke(app, [*command, "evicted"], env={"COLUMNS": "160"})
    assert [line.split()[:2] for line in told.stdout.splitlines()[1:]] == [["r", "0"], ["s", "1"]]
    assert CliRunner().invoke(app, [*command, "gone"]).exit_code == 2


def test_a_running_engine_is_explained(tmp_path: Path) -> None:
    path, mover = tmp_path / "events", Scripted(Route("device", "host"))
    runtime = Runtime(TieredCache([TierSpec("host", 4, 4096)], CacheSettings(events=64)), [mover])
    recorder = EventRecorder(runtime, path, 1 << 20, start=False)
    with runtime.batch() as cache:
        cache.store({0: GroupKeys([A])}, {0: (0,)})
    mover.end(Status.OK)
    runtime.pump()
    with runtime.batch() as cache:
        cache.lookup({0: GroupKeys([A, B])}, runtime.clock(), request="now", protect=Protection.NONE)
    recorder.pump()  # as its thread does, four times a second; nothing is closed
    plain = CliRunner().invoke(app, ["explain", str(path), "--request", "now", "--json"])
    assert [chunk["verdict"] for chunk in json.loads(plain.stdout)["chunks"]] == ["found", "never seen"]
    recorder.close()
    runtime.close(0.0)


def test_a_pipe_gets_every_row(tmp_path: Path) -> None:
    keys = tuple(bytes([at // 256, at % 256]) * 16 for at in range(3000))
    write_events(tmp_path / "events", [Event(1, EventKind.REQUEST, 3.0, request="long", keys=keys)])
    command = [LONGSHORE, "explain", tmp_path / "events", "--request", "long"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert [line.split()[0] for line in done.stdout.splitlines()[1:]] == [str(at) for at in range(3000)]
