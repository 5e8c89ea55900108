"""`longshore bench`: measures parts of Longshore, each against a reference in the same run."""

from __future__ import annotations

import enum
import shlex
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from longshore.bench import sglang_runs, vllm_runs
from longshore.bench.harness import SEED, Case, Report, check_disk, machine_facts
from longshore.cli.options import (
    BlockTokens,
    Json,
    check_memory,
    check_room,
    counts_of,
    existing,
    size_of,
    with_options,
)
from longshore.cli.output import console as console_on
from longshore.cli.output import print_provenance, provenance, table, write_json
from longshore.config import Config
from longshore.errors import BenchError, ConfigError, EngineError, with_extra

bench = typer.Typer(
    name="bench",
    help="Measure parts of Longshore, each against a reference in the same run.",
    no_args_is_help=True,
)

Directory = Annotated[
    Path | None, typer.Option("--dir", help="Parent directory of the files, which are removed afterwards.")
]
Repeats = Annotated[int, typer.Option(min=1, help="Measurements of each side.")]
Only = Annotated[list[str] | None, typer.Option("--case", help="Run only this case; repeatable.")]


_WAYS = ("direct", "staged", "zero_copy")
"""Ways of copying, as `--calibrate` lists them."""


class CopyDevice(enum.StrEnum):
    """Device of the pages."""

    CPU = "cpu"
    CUDA = "cuda"


class RemoteKind(enum.StrEnum):
    """What is measured."""

    VALKEY = "valkey"
    REDIS = "redis"
    S3 = "s3"
    MOONCAKE = "mooncake"
    DIR = "dir"


@bench.command()
def plan(
    repeats: Repeats = 41,
    case: Only = None,
    as_json: Json = False,
) -> None:
    """Plan a transfer: turn block ids into addresses and sizes. In microseconds; lower is better."""
    from longshore.bench import plans  # noqa: PLC0415 - one benchmark needs not what another does

    _report(plans.run(repeats=repeats, only=case or ()), dict, as_json)


@bench.command()
def copy(
    device: Annotated[CopyDevice, typer.Option(help="Where the pages are.")] = CopyDevice.CPU,
    total: Annotated[str, typer.Option("--bytes", help="Bytes that each measurement moves.")] = "256MiB",
    repeats: Repeats = 9,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure which way of copying is fastest on a GPU, and save the result.")
    ] = False,
    case: Only = None,
    as_json: Json = False,
) -> None:
    """Copy device pages into chunk images and back. In GB/s."""
    if calibrate != (device is CopyDevice.CUDA):
        raise BenchError("--device cuda and --calibrate: set both or neither; `make gpu` measures the copies of a GPU")
    if calibrate:
        _calibrate(as_json)
        return
    from longshore.bench import copies  # noqa: PLC0415

    nbytes = size_of(total, "--bytes")
    check_memory(copies.COPIES * nbytes, "--bytes", total, nbytes, "MiB")
    _report(
        copies.run(total_bytes=nbytes, repeats=repeats, only=case or ()),
        lambda: {"device": device.value},
        as_json,
    )


@bench.command()
def file(
    directory: Annotated[Path, typer.Option("--dir", help="A directory on the disk to measure.")],
    total: Annotated[str, typer.Option("--bytes", help="Bytes that each measurement moves.")] = "512MiB",
    repeats: Repeats = 5,
    allow_ram_disk: Annotated[
        bool, typer.Option("--allow-ram-disk", help="Measure a RAM disk anyway, and mark the result.")
    ] = False,
    allow_page_cache: Annotated[
        bool, typer.Option("--allow-page-cache", help="Measure without direct I/O anyway, and mark the result.")
    ] = False,
    case: Only = None,
    as_json: Json = False,
) -> None:
    """Write chunk images to a file tier and read them back. In GB/s; RAM disks are refused."""
    from longshore.bench import files  # noqa: PLC0415

    nbytes = size_of(total, "--bytes")
    check_memory(nbytes, "--bytes", total, nbytes, "MiB")
    marks = check_disk(existing("--dir", directory), allow_ram_disk=allow_ram_disk)
    check_room(files.COPIES * nbytes, directory, "--bytes", total, nbytes, "MiB")
    cases = files.run(
        directory,
        total_bytes=nbytes,
        repeats=repeats,
        only=case or (),
        allow_page_cache=allow_page_cache,
        marks=marks,
    )
    _report(cases, lambda: marks, as_json)


@bench.command()
def remote(
    server: Annotated[RemoteKind, typer.Option(help="Store to measure: a server that is started, or a directory.")],
    directory: Directory = None,
    repeats: Repeats = 9,
    case: Only = None,
    as_json: Json = False,
) -> None:
    """Send chunk images to a store that replicas share, and fetch them. In GB/s and CPU seconds per GB."""
    from longshore.bench import remote as remotes  # noqa: PLC0415

    cases = remotes.run(server.value, _parent(directory), repeats=repeats, only=case or ())
    _report(cases, lambda: {"server": server.value}, as_json)


@bench.command()
def prefill(
    model: Annotated[Path, typer.Option(help="A Hugging Face config.json, or a directory with one.")],
    tokens: Annotated[str, typer.Option(help="Prompt lengths in tokens, comma-separated.")] = "512,2048",
    device: Annotated[CopyDevice, typer.Option(help="Device that computes.")] = CopyDevice.CPU,
    repeats: Repeats = 5,
    as_json: Json = False,
) -> None:
    """Prefill a model with random weights, for `longshore replay --bench`. In TFLOPS."""
    lengths = counts_of(tokens, "--tokens", 1)
    try:
        from longshore.bench import prefills  # noqa: PLC0415 - torch and transformers are extras
    except ImportError as error:
        raise EngineError(f"{error}; bench prefill needs an extra: {with_extra('transformers')}") from error

    if device is CopyDevice.CPU:
        needed = prefills.memory_of(model, max(lengths))
        check_memory(needed, f"--model {model} --tokens", max(lengths), max(lengths))
    cases = prefills.run(model, tokens=lengths, device=device.value, repeats=repeats)
    _report(cases, lambda: {"device": device.value}, as_json)


def _parent(directory: Path | None) -> Path:
    return Path(tempfile.gettempdir()) if directory is None else existing("--dir", directory)


def _calibrate(as_json: bool) -> None:
    """Measure the ways of copying, and print the expected rate of each."""
    from longshore.bench import calibration  # noqa: PLC0415 - needs torch

    with console_on(stderr=True).status("measuring"):
        found = calibration.run()
    if as_json:
        write_json(found)
        return
    figures = ("page", "bytes", *_WAYS)
    rows = table("direction", *figures, "chosen", right=figures)
    for line in found["chosen"]:
        rates = (f"{line['rates'][way]:,.1f}" if way in line["rates"] else "-" for way in _WAYS)
        rows.add_row(line["direction"], f"{line['page_bytes']:,}", f"{line['bytes']:,}", *rates, line["way"])
    console = console_on()
    console.print(rows)
    console.print(f"GB/s on {found['device']}, saved in {found['path']}", style="dim", soft_wrap=True)


@bench.command()
def cache(
    blocks: Annotated[str, typer.Option(help="Numbers of tracked blocks, comma-separated.")] = "10000,1000000",
    repeats: Repeats = 5,
    case: Only = None,
    as_json: Json = False,
) -> None:
    """Measure the cache manager: time and memory per block. Lower is better, except for ratios."""
    from longshore.bench import managers  # noqa: PLC0415

    counts = counts_of(blocks, "--blocks", managers.LEAST)
    check_memory(managers.BYTES_PER_BLOCK * max(counts), "--blocks", max(counts), max(counts))
    _report(managers.run(blocks=counts, repeats=repeats, only=case or ()), dict, as_json)


@bench.command()
@with_options
def vllm(
    *,
    model: Annotated[Path, typer.Option(help="The directory of a model.")],
    trace: Annotated[Path | None, typer.Option(help="Send the requests of this trace instead of sessions.")] = None,
    requests: Annotated[int, typer.Option(min=1, help="Number of requests to take from the trace.")] = 100,
    block_tokens: BlockTokens = 512,
    sent: vllm_runs.SessionPlan,
    directory: Directory = None,
    engine: Annotated[str, typer.Option(help="Additional arguments of vllm.LLM, as JSON.")] = "{}",
    as_json: Json = False,
) -> None:
    """Run a model under vLLM with and without Longshore: time to first token, and the cost of storing."""
    sent = replace(sent, engine=vllm_runs.options_of(engine))
    parent = _parent(directory)
    Config.make(host_size=sent.host_size, file_path=parent, file_size=sent.file_size).check_machine()
    with tempfile.TemporaryDirectory(prefix="longshore-bench-", dir=parent) as made:
        scratch = Path(made).resolve()

        def cases(tell: Callable[[str], None]) -> Iterable[Case]:
            if trace is None:
                return vllm_runs.run_sessions(model, scratch, sent, tell=tell)
            return vllm_runs.run_trace(
                model, trace, scratch, sent, requests=requests, block_tokens=block_tokens, tell=tell
            )

        _report_progress(cases, dict, as_json)


@bench.command()
@with_options
def sglang(
    *,
    model: Annotated[Path, typer.Option(help="The directory of a model.")],
    sent: sglang_runs.TurnPlan,
    directory: Directory = None,
    flags: Annotated[str, typer.Option(help="Flags of all servers, as on SGLang's command line.")] = "",
    of_cache: Annotated[
        str,
        typer.Option(
            "--hicache-flags", "--of-cache", help="Flags of HiCache, SGLang's hierarchical cache, such as its size."
        ),
    ] = "--hicache-ratio 2",
    as_json: Json = False,
) -> None:
    """Run a model under SGLang with Longshore, without, and with SGLang's own files: time to first token, throughput.

    Three servers run at the same time: give each less than a third of the GPU (--flags "--mem-fraction-static 0.25").
    """
    sent = replace(sent, flags=_flags("--flags", flags), of_cache=_flags("--hicache-flags", of_cache))
    parent = _parent(directory)
    Config.make(file_path=parent, file_size=sent.file_size).check_files()
    with tempfile.TemporaryDirectory(prefix="longshore-bench-", dir=parent) as made:
        scratch = Path(made).resolve()
        _report_progress(lambda tell: sglang_runs.run(model, scratch, sent, tell=tell), dict, as_json)


def _report(cases: Iterable[Case], marks: Callable[[], dict[str, object]], as_json: bool) -> None:
    """Run all `cases`, and print them with the machine and `marks`, which are read at the end."""
    _report_progress(lambda tell: cases, marks, as_json)


def _report_progress(
    begin: Callable[[Callable[[str], None]], Iterable[Case]], marks: Callable[[], dict[str, object]], as_json: bool
) -> None:
    """As `_report`, for cases that show their progress. Results before an interrupt are printed, too."""
    console, taken, interrupted = console_on(stderr=True), list[Case](), False
    with console.status("measuring") as progress:
        try:
            for case in begin(progress.update if console.is_terminal else console.print):
                taken.append(case)
                progress.update(f"measured {case.name}")
        except KeyboardInterrupt:
            interrupted = True
    report = Report({**machine_facts(), **marks()}, tuple(taken))
    if as_json:
        write_json({**report.as_json(), "provenance": provenance(SEED)})
    else:
        _render(report, console_on())
        print_provenance(provenance(SEED))
    if interrupted:
        console.print("interrupted: the results are incomplete")
        raise typer.Exit(130)


def _flags(option: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{option} {text}: expected flags as in a shell: {error}") from None


def _render(report: Report, console: Console) -> None:
    rows = table("case", "ours", "reference", "unit", "ratio", right=("ours", "reference", "ratio"))
    rows.add_column("reference is")
    for case in report.cases:
        places = 1 if case.value >= 1 else 2
        values = (f"{value:,.{places}f}" for value in (case.value, case.reference_value))
        figures = *values, case.unit, f"{case.ratio:.2f}"
        rows.add_row(case.name, *figures, case.reference)
    console.print(rows)
    console.print("  ".join(f"{name} {value}" for name, value in report.machine.items()), style="dim")
