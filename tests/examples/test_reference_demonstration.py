"""The command that shows the reference engine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from examples.reference_engine import __main__ as demonstration

ROOT = Path(__file__).parents[2]


def test_it_says_what_happened() -> None:
    paths = os.pathsep.join([str(ROOT / "src"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    done = subprocess.run(
        [sys.executable, "-m", "examples.reference_engine"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("same schedule: yes") == 2
    assert "slept" in done.stdout


def test_it_says_what_it_takes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["reference_engine", "--help"])
    with pytest.raises(SystemExit, match="0"):
        demonstration.main()
    assert "--device" in capsys.readouterr().out


def test_it_fails_when_a_bit_differs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(demonstration, "same_bits", lambda one, other: False)
    monkeypatch.setattr(sys, "argv", ["reference_engine"])
    assert demonstration.main() == 1
    assert "same schedule: NO" in capsys.readouterr().out
