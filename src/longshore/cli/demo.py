"""`longshore demo`: a model whose KV cache exceeds its device cache, with tiers and without."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from longshore.cli.demo_report import SEED, DemoOptions, demo_page, render
from longshore.cli.options import existing, settings_of, with_options
from longshore.cli.output import ReportOptions, print_provenance, provenance, write_json
from longshore.cli.output import console as console_on
from longshore.errors import ConfigError, EngineError, with_extra


@with_options
def demo(
    *,
    options: DemoOptions,
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir", help="Parent of the file tier's directory, which is removed at the end; default: the current one."
        ),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="One tier setting, as in --set offload=write_back; repeatable.")
    ] = None,
    report: ReportOptions,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Serve a multi-turn workload three times and compare the results.

    [bold]tiered[/]: a small device cache over a host and a file tier. [bold]resident[/]: a device cache that never
    evicts, which tiered must equal bit for bit. [bold]recompute[/]: the small device cache alone, which tiered must
    beat. Exit status 1 if a token or log-probability differs.
    """
    wanted, parent = report.check(), existing("--dir", directory or Path.cwd())
    options = replace(options, settings=settings_of(settings or ()))
    prepare_environment(options.attention)
    try:
        from longshore.cli.demo_runs import run_demo  # noqa: PLC0415 - torch is slow to import
    except ImportError as error:
        raise EngineError(f"{error}; the demo needs an extra: {with_extra('transformers')}") from error
    console = console_on(stderr=True)
    with _scratch(parent) as scratch:
        result = run_demo(options, scratch, console)
    about = provenance(SEED)
    if as_json:
        write_json({**result.as_json(), "provenance": about})
    else:
        render(result, console_on())
        print_provenance(about)
    if wanted:
        report.write(demo_page(result), about, console)
    proves = sum(result.tiered.restored_blocks.values()) and (result.fetched_bytes or not options.remote)
    if not result.bit_exact or not proves:
        raise typer.Exit(1)  # a run that restores no block proves nothing


def prepare_environment(attention: str) -> None:
    """Set environment variables that numeric libraries read when they are loaded; call it before torch is imported."""
    # Threads that spin while they wait slow down all others on a busy machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # By default, kernels of oneMKL depend on the alignment of their inputs, and results then differ in the last bits.
    os.environ.setdefault("MKL_CBWR", "COMPATIBLE")
    if attention == "sdpa":  # on the CPU, float32 results depend on how the work is divided among threads
        os.environ.setdefault("OMP_NUM_THREADS", "1")


@contextmanager
def _scratch(parent: Path) -> Iterator[Path]:
    """A temporary directory in `parent`, removed at the end."""
    try:
        path = Path(tempfile.mkdtemp(prefix="longshore-demo-", dir=parent))
    except OSError as error:
        raise ConfigError(f"--dir {parent}: {error.strerror}") from error
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
