"""The `longshore` command."""

from __future__ import annotations

import inspect as inspection
import re
import sys

import typer

from longshore import __version__
from longshore.cli.bench import bench
from longshore.cli.ctl import ctl
from longshore.cli.demo import demo
from longshore.cli.doctor import doctor
from longshore.cli.engine_config import settings_reference, sglang_config, vllm_config
from longshore.cli.files import explain, fsck, gc, inspect
from longshore.cli.monitoring import metrics, top
from longshore.cli.output import run
from longshore.cli.plan import plan
from longshore.cli.replay import replay

app = typer.Typer(
    name="longshore",
    help="Move the KV cache of LLM inference between GPU memory, host memory and files.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(demo)
app.command()(doctor)
app.command()(ctl)
app.command()(explain)
app.command()(fsck)
app.command()(inspect)
app.command()(gc)
app.command()(top)
app.command()(metrics)
app.command()(replay)
app.command()(plan)
app.command("config")(settings_reference)
app.command()(vllm_config)
app.command()(sglang_config)
app.add_typer(bench)


def flowing(text: str) -> str:
    """A help text whose paragraphs are one line each, for any width of the terminal; examples remain lines."""
    example = r"(?:\[\w+\])?(?:longshore |vllm |eval |flags=)"
    return re.sub(rf"(?m)^(?!{example})(.+)\n(?!{example}|\n)", r"\1 ", inspection.cleandoc(text))


for _command in (*app.registered_commands, *bench.registered_commands):
    _command.help = flowing((_command.callback and _command.callback.__doc__) or "")


@app.callback(invoke_without_command=True)
def _options(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        print(f"longshore {__version__}")
        raise typer.Exit


def main() -> None:
    """Entry point. Errors are one line on standard error; exit status 2 for usage errors, 1 for run-time errors."""
    sys.exit(run(lambda: app(prog_name="longshore", standalone_mode=False)))
