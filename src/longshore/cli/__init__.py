"""The command line: `longshore demo`, and what joins it later. Heavy imports happen inside the commands."""

from longshore.cli.app import main

__all__ = ["main"]
