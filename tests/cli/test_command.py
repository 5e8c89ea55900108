"""The command itself: what it prints where, and how it exits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

LONGSHORE = Path(sys.executable).with_name("longshore")


def run(*arguments: str, directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([LONGSHORE, *arguments], capture_output=True, text=True, cwd=directory, check=False)


def test_one_json_object_on_standard_output_and_a_report(tmp_path: Path) -> None:
    done = run(
        "demo", "--json", "--requests", "20", "--report", "page", "--set", "backup=write_through", directory=tmp_path
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["bit_exact"] is True
    assert facts["requests"] == 20
    assert (tmp_path / "page" / "index.html").stat().st_size > 1 << 20
    assert [path.name for path in tmp_path.iterdir()] == ["page"]


def test_a_run_that_restored_nothing_shows_nothing(tmp_path: Path) -> None:
    done = run("demo", "--json", "--requests", "2", "--device-share", "1", directory=tmp_path)
    assert done.returncode == 1
    assert sum(json.loads(done.stdout)["restored_blocks"].values()) == 0


def test_errors_are_one_line_and_status_two(tmp_path: Path) -> None:
    for arguments, words in (
        (("--model", "nowhere"), "config.json"),
        (("--dir", "/proc/nope"), "--dir /proc/nope"),
        (("--set", "offload"), "KEY=VALUE"),
        (("--set", "of_load=write_back"), "did you mean 'offload'"),
        (("--config", "nowhere.toml"), "nowhere.toml"),
    ):
        done = run("demo", *arguments, directory=tmp_path)
        assert done.returncode == 2, done.stderr
        assert words in done.stderr
        assert "Traceback" not in done.stderr
        assert not list(tmp_path.iterdir())
