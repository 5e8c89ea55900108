"""No option of the commands that read traces goes without a test that uses it."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from longshore.cli.app import app

HERE = Path(__file__).parent


@pytest.mark.parametrize("command", ["replay", "plan"])
def test_every_option_is_used_by_a_test_of_its_command(command: str) -> None:
    group = typer.main.get_command(app)
    options = [
        name
        for parameter in group.commands[command].params  # type: ignore[attr-defined]
        for name in (*parameter.opts, *parameter.secondary_opts)
        if name.startswith("--")
    ]
    tested = HERE.joinpath(f"test_{command}_command.py").read_text()
    assert len(options) > 15
    assert [name for name in options if f'"{name}' not in tested] == []
