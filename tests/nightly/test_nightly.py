"""The nightly run goes on after what fails, hangs or is not there, and its report says how to repeat a failure."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import leaks
import pytest

import nightly
from nightly import PARTS, PROJECT, Part


def part(name: str, code: str, share: float = 1.0, needs: tuple[Path, ...] = ()) -> Part:
    """One whose rounds run `code`, which knows `seed`."""
    return Part(
        name,
        share,
        lambda seed, left: [sys.executable, "-c", f"seed = {seed}; left = {left}\n{code}"],
        r"(?P<things>[\d,]+) things",
        {"PYTHONPATH": "tests"},
        needs,
    )


def test_failing_hanging_or_missing_part_does_not_stop_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nightly, "LEAST_TIMEOUT", 2.0)
    monkeypatch.setattr(nightly, "TIMEOUT", 1)
    parts = (
        part("fails", "print('1,000 things'); raise SystemExit('broken: seed %d' % seed)"),
        part("hangs", "import subprocess, sys, time; print('here', flush=True); subprocess.run(['sleep', '600'])"),
        part("absent", "print('2 things')", needs=(tmp_path / "none",)),
        part("good", "import time; time.sleep(left / 4); print('2 things')"),
    )
    assert nightly.main(parts, ["--hours", str(6 / 3600), "--seed", "7", "--out", str(tmp_path)]) == 1
    told = {each["name"]: each for each in json.loads((tmp_path / "report.json").read_text())["parts"]}
    assert list(told) == ["fails", "hangs", "absent", "good"]
    assert told["fails"]["rounds"] == len(told["fails"]["failures"]) == len(told["fails"]["seeds"]) >= 1
    assert told["fails"]["counts"] == {"things": 1000 * told["fails"]["rounds"]}
    assert told["fails"]["failures"][0]["seed"] == told["fails"]["seeds"][0] == 7
    assert [each["status"] for each in told["hangs"]["failures"]] == ["killed: it had not ended after 2 s"]
    assert told["hangs"]["failures"][0]["output"] == "here"
    assert told["absent"]["rounds"] == 0 and told["absent"]["missing"] == str(tmp_path / "none")
    assert told["good"]["rounds"] >= 1 and not told["good"]["failures"]
    page = (tmp_path / "report.md").read_text()
    assert f"| absent | 0 | 0 |  | 0 | not run: {tmp_path / 'none'} is missing |" in page
    assert "broken: seed 7" in page and "broken: seed 7" in (tmp_path / "fails.log").read_text()
    command = told["fails"]["failures"][0]["command"]
    assert f"    {command.splitlines()[0]}" in page
    again = subprocess.run(["env", *shlex.split(command)], cwd=PROJECT, capture_output=True, text=True, check=False)
    assert again.returncode == 1 and again.stderr == "broken: seed 7\n"


def test_a_run_without_failures_says_so(tmp_path: Path) -> None:
    assert nightly.main((part("good", "print('2 things')"),), ["--hours", "0", "--out", str(tmp_path)]) == 0
    assert "nothing failed" in (tmp_path / "report.md").read_text()


def test_each_part_runs_something_that_is_there() -> None:
    for each in PARTS:
        for argument in each.command(3, 60.0):
            if argument.startswith("tests/"):
                assert (PROJECT / argument).exists(), argument


@pytest.mark.parametrize("what", ["descriptors", "memory"])
def test_growth_with_rounds_is_a_leak_what_settles_not(what: str) -> None:
    step = leaks.NOISE + 1 if what == "memory" else 1
    assert leaks.growth([{what: 7 * step + at * step} for at in range(12)])
    assert not leaks.growth([{what: 7 * step + min(at, 4) * step} for at in range(12)])
    assert not leaks.growth([{what: 7 * step + at % 2 * step} for at in range(12)])


def test_a_descriptor_that_stays_open_is_noticed() -> None:
    opened = []
    try:
        samples = leaks.watch(lambda: opened.append(os.open("/proc/self/stat", os.O_RDONLY)), 0.0)
    finally:
        for each in opened:
            os.close(each)
    assert list(leaks.growth(samples)) == ["descriptors"]
