"""Fixtures of the tests of the commands."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_kit import write_files


@pytest.fixture(autouse=True)
def no_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Output that is no terminal has no width, whatever the shell that runs the tests has exported."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with the files that the calls name."""
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    return tmp_path
