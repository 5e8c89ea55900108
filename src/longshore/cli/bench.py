"""`longshore bench`: Longshore's own parts, each beside a reference taken in the same run."""

from __future__ import annotations

import enum
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from longshore.bench.harness import Case, Report
from longshore.bench.machine import check_disk, machine_facts
from longshore.cli.options import check_memory, check_room, counts_of, existing, size_of
from longshore.cli.output import console as console_on
from longshore.cli.output import write_json
from longshore.cli.traces import BlockTokens
from longshore.config import Config
from longshore.errors import BenchError, EngineError

bench = typer.Typer(
    name="bench",
    help="Measure Longshore's own parts, each beside a reference taken in the same run.",
    no_args_is_help=True,
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
Only = Annotated[list[str] | None, typer.Option("--case", help="Only this case; may be given several times.")]


class CopyDevice(enum.StrEnum):
    """Where the pages are."""

    CPU = "cpu"
    CUDA = "cuda"


@bench.command()
def plan(
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of each side.")] = 41,
    case: Only = None,
    as_json: Json = False,
) -> None:
    """From a transfer's ids to addresses and sizes, in microseconds; less is better."""
    from longshore.bench import plans  # noqa: PLC0415 - one benchmark needs not what another does

    _report(plans.run(repeats=repeats, only=case or ()), dict, as_json)


@bench.command()
def copy(
    device: Annotated[CopyDevice, typer.Option(help="Where the pages are.")] = CopyDevice.CPU,
    total: Annotated[str, typer.Option("--bytes", help="Bytes that each measurement moves.")] = "256MiB",
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of each side.")] = 9,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure which way of copying is the fastest on a GPU, and keep it.")
    ] = False,
    case: Only = None,
    as_json: Json = False,
) -> None:
    """Device pages into block images and back, in GB/s."""
    if calibrate != (device is CopyDevice.CUDA):
        raise BenchError("expected --device cuda and --calibrate together: `make gpu` measures the copies of a GPU")
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
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of each side.")] = 5,
    allow_ram_disk: Annotated[bool, typer.Option("--allow-ram-disk", help="Measure a RAM disk, and mark it.")] = False,
    allow_page_cache: Annotated[
        bool, typer.Option("--allow-page-cache", help="Measure without direct I/O, and mark it.")
    ] = False,
    case: Only = None,
    as_json: Json = False,
) -> None:
    """Block images to a file tier and back, in GB/s; refuses what is no disk."""
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
def prefill(
    model: Annotated[Path, typer.Option(help="A config.json of Hugging Face, or a directory that has one.")],
    tokens: Annotated[str, typer.Option(help="Lengths of prompts, with commas between.")] = "512,2048",
    device: Annotated[CopyDevice, typer.Option(help="What computes.")] = CopyDevice.CPU,
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of each side.")] = 5,
    as_json: Json = False,
) -> None:
    """Prefill of a model with random weights, in TFLOPS; for `longshore replay --bench`."""
    lengths = counts_of(tokens, "--tokens", 1)
    try:
        from longshore.bench import prefills  # noqa: PLC0415 - torch and transformers are extras
    except ImportError as error:
        raise EngineError(f"{error}; bench prefill needs: pip install 'longshore[transformers]'") from error

    if device is CopyDevice.CPU:
        needed = prefills.memory_of(model, max(lengths))
        check_memory(needed, f"--model {model} --tokens", max(lengths), max(lengths))
    cases = prefills.run(model, tokens=lengths, device=device.value, repeats=repeats)
    _report(cases, lambda: {"device": device.value}, as_json)


def _calibrate(as_json: bool) -> None:
    """Measure the ways of copying, and print what each is expected to do."""
    from longshore.bench import calibration  # noqa: PLC0415 - needs torch

    with console_on(stderr=True).status("measuring"):
        found = calibration.run()
    if as_json:
        write_json(found.as_json())
        return
    table = Table(header_style="dim", box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for column in ("direction", "page", "bytes", "direct", "staged", "zero_copy", "chosen"):
        table.add_column(column, justify="left" if column in ("direction", "chosen") else "right", no_wrap=True)
    for line in found.lines():
        rates = {way.value: f"{rate:,.1f}" for way, rate in line.rates.items()}
        figures = (rates.get(way, "-") for way in ("direct", "staged", "zero_copy"))
        table.add_row(line.direction, f"{line.page_bytes:,}", f"{line.nbytes:,}", *figures, line.way.value)
    console = console_on()
    console.print(table)
    console.print(f"GB/s on {found.calibration.device}, kept in {found.path}", style="dim", soft_wrap=True)


@bench.command()
def cache(
    blocks: Annotated[str, typer.Option(help="Numbers of tracked blocks, with commas between.")] = "10000,1000000",
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of each side.")] = 5,
    case: Only = None,
    as_json: Json = False,
) -> None:
    """The cache manager's time per block and bytes per block; less is better, but for ratios."""
    from longshore.bench import managers  # noqa: PLC0415

    counts = counts_of(blocks, "--blocks", managers.LEAST)
    check_memory(managers.BYTES_PER_BLOCK * max(counts), "--blocks", max(counts), max(counts))
    _report(managers.run(blocks=counts, repeats=repeats, only=case or ()), dict, as_json)


@bench.command()
def vllm(
    model: Annotated[Path, typer.Option(help="The directory of a model.")],
    trace: Annotated[Path | None, typer.Option(help="Ask what this trace asks, instead of sessions.")] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests of the trace.")] = 100,
    block_tokens: BlockTokens = 512,
    sessions: Annotated[int, typer.Option(min=1, max=10**6, help="Conversations that take turns.")] = 20,
    prompt: Annotated[int, typer.Option(min=1, max=10**7, help="Tokens of a first turn.")] = 512,
    more: Annotated[int, typer.Option(min=1, max=10**7, help="Tokens that each later turn adds.")] = 64,
    answer: Annotated[int, typer.Option(min=1, max=10**7, help="Tokens of each answer.")] = 16,
    host_size: Annotated[str, typer.Option(help="Host memory for blocks.")] = "1GiB",
    file_size: Annotated[str, typer.Option(help="Disk space for blocks.")] = "2GiB",
    directory: Annotated[Path | None, typer.Option("--dir", help="Where the file tier goes; removed after.")] = None,
    engine: Annotated[str, typer.Option(help="Further arguments of vllm.LLM, as JSON.")] = "{}",
    as_json: Json = False,
) -> None:
    """A model under vLLM with Longshore, beside the same without: time to first token, and what storing costs."""
    from longshore.bench import vllm_arms, vllm_sessions, vllm_trace  # noqa: PLC0415

    plan = vllm_sessions.Plan(
        sessions=sessions,
        prompt=prompt,
        more=more,
        answer=answer,
        host_size=host_size,
        file_size=file_size,
        engine=vllm_arms.options_of(engine),
    )
    parent = Path(tempfile.gettempdir()) if directory is None else existing("--dir", directory)
    Config.make(host_size=host_size, file_path=parent, file_size=file_size).check_machine()
    vllm_arms.check(model)
    with tempfile.TemporaryDirectory(prefix="longshore-bench-", dir=parent) as made:
        scratch = Path(made).resolve()

        def cases(tell: Callable[[str], None]) -> Iterable[Case]:
            if trace is None:
                return vllm_sessions.run(model, scratch, plan, tell=tell)
            return vllm_trace.run(model, trace, scratch, plan, requests=requests, block_tokens=block_tokens, tell=tell)

        _report_telling(cases, dict, as_json)


def _report(cases: Iterable[Case], marks: Callable[[], dict[str, object]], as_json: bool) -> None:
    """Run all `cases`, and print them with the machine; `marks` are asked for when all have run."""
    _report_telling(lambda tell: cases, marks, as_json)


def _report_telling(
    begin: Callable[[Callable[[str], None]], Iterable[Case]], marks: Callable[[], dict[str, object]], as_json: bool
) -> None:
    """The same for cases that tell how far they are. What was measured before an interrupt is printed, too."""
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
        write_json(report.as_json())
    else:
        _render(report, console_on())
    if interrupted:
        console.print("interrupted: not all was measured")
        raise typer.Exit(130)


def _render(report: Report, console: Console) -> None:
    table = Table(header_style="dim", box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for column in ("case", "ours", "reference", "unit", "ratio"):
        table.add_column(column, justify="left" if column in ("case", "unit") else "right", no_wrap=True)
    table.add_column("reference is")
    for case in report.cases:
        places = 1 if case.value >= 1 else 2
        values = (f"{value:,.{places}f}" for value in (case.value, case.reference_value))
        figures = *values, case.unit, f"{case.ratio:.2f}"
        table.add_row(case.name, *figures, case.reference)
    console.print(table)
    console.print("  ".join(f"{name} {value}" for name, value in report.machine.items()), style="dim")
