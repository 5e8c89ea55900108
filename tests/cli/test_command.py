"""The command itself: what it prints where, and how it exits."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from longshore.cli.app import app
from longshore.errors import LongshoreError

LONGSHORE = Path(sys.executable).with_name("longshore")
SMALL = ("--block-tokens", "8", "--set", "gate=false")
"""Prompts a quarter as long; so short ones are sooner computed than loaded."""


def run(*arguments: str, directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([LONGSHORE, *arguments], capture_output=True, text=True, cwd=directory, check=False)


def test_one_json_object_on_standard_output_and_a_report(tmp_path: Path) -> None:
    done = run(
        "demo",
        "--json",
        "--requests",
        "8",
        "--report",
        "page",
        "--set",
        "backup=write_through",
        *SMALL,
        directory=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["bit_exact"] is True
    assert facts["requests"] == 8
    assert (tmp_path / "page" / "index.html").stat().st_size > 1 << 20
    assert [path.name for path in tmp_path.iterdir()] == ["page"]


def test_a_run_that_restored_nothing_shows_nothing() -> None:
    done = CliRunner().invoke(app, ["demo", "--json", "--requests", "2", "--device-share", "1", *SMALL])
    assert done.exit_code == 1, done.output
    assert sum(json.loads(done.stdout)["restored_blocks"].values()) == 0


def test_errors_are_one_line_and_status_two(tmp_path: Path) -> None:
    done = run("demo", "--set", "of_load=write_back", directory=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "did you mean 'offload'" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "nowhere"), "config.json"),
        (("--dir", "/proc/nope"), "--dir /proc/nope"),
        (("--set", "offload"), "KEY=VALUE"),
        (("--config", "nowhere.toml"), "nowhere.toml"),
    ],
)
def test_impossible_wishes_are_typed_errors(
    arguments: tuple[str, str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which `main` turns into what the test above sees of a whole process."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LongshoreError, match=re.escape(words)):
        CliRunner().invoke(app, ["demo", *arguments], catch_exceptions=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [("--set", "offload"), ("--dir", "/proc/nope")])
def test_wrong_settings_are_refused_before_torch_is_imported(
    arguments: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "longshore.cli.demo_runs", None)
    with pytest.raises(LongshoreError, match=r"KEY=VALUE|/proc/nope"):
        CliRunner().invoke(app, ["demo", *arguments], catch_exceptions=False)
