"""`longshore doctor`: what is wrong with the stores and this machine, and what to do about it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from longshore.cli.options import (
    Json,
    MachineOptions,
    Model,
    PrefillRate,
    ProfileOption,
    check_memory,
    settings_of,
    size_of,
)
from longshore.cli.output import console, table, write_json
from longshore.config import Config, read_toml


def doctor(
    urls: Annotated[
        list[str] | None, typer.Argument(help="Stores to check, beside those of the settings.", show_default=False)
    ] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with settings; `longshore config` lists them.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Any setting, for example --set host_size=64GiB; repeatable.")
    ] = None,
    model: Model = "llama-3.1-8b",
    profile: ProfileOption = "h100",
    prefill_rate: PrefillRate = None,
    image: Annotated[str, typer.Option(help="Size of the images that are sent and fetched.")] = "2MiB",
    images: Annotated[int, typer.Option(min=1, max=1024, help="How many are sent and fetched.")] = 16,
    write: Annotated[bool, typer.Option(help="Measure with values of our own; --no-write: write nothing.")] = True,
    as_json: Json = False,
) -> None:
    """Check stores and this machine before an engine is started: what is wrong, and what to do about it.

    Of each store: whether it can be reached and used with the given user and password; whether it evicts (maxmemory and
    policy; the lifecycle rules of a bucket); how long a probe takes, and whether fetching is faster than computing the
    same tokens; values of other format versions. Of this machine: memory, limits, /dev/shm, and the disk of the file
    tier (direct and asynchronous I/O). For that, 16 images are written under a namespace of their own, and expire after
    a minute, or are removed; a server that is full evicts others for them.

    longshore doctor valkey://cache:6379/0?ttl=24h
    longshore doctor --config longshore.toml --model qwen3-32b --prefill-rate 9000

    Exit status: [bold]0[/bold] nothing is broken, though there may be warnings; [bold]1[/bold] something is broken;
    [bold]2[/bold] a setting or a URL is invalid.
    """
    from longshore.doctor import Diagnosis, Recompute, Severity, check_machine, check_store  # noqa: PLC0415 - needs a while

    made = Config.make(**{**(read_toml(config) if config is not None else {}), **settings_of(settings or ())})
    timing = MachineOptions(profile=profile, prefill_rate=prefill_rate).timing(model)
    speed = made.prefill_speed if prefill_rate is None and made.prefill_speed else 1 / timing.alpha
    recompute = Recompute(timing.geometry.name, speed, timing.geometry.kv_bytes_per_token)
    nbytes = size_of(image, "--image")
    if urls or made.remote:  # what is sent, and what is fetched
        check_memory(2 * images * nbytes, "--image", image, nbytes, "MiB")
    found: list[Diagnosis] = check_machine(made)
    stores = dict.fromkeys((*made.remote, *(urls or ())))
    for url in stores:
        found += check_store(url, recompute, image_bytes=nbytes, images=images, write=write)
    broken = sum(each.level is Severity.BROKEN for each in found)
    if as_json:
        write_json({"broken": broken, "findings": [{**each._asdict(), "level": each.level.value} for each in found]})
        raise typer.Exit(1 if broken else 0)
    styles = {Severity.OK: "green", Severity.WARNING: "yellow", Severity.BROKEN: "bold red"}
    out, rows = console(), table("", "what", "finding")
    for each in found:
        rows.add_row(Text(each.level.value, styles[each.level]), each.about, each.what)
        if each.advice:
            rows.add_row("", "", Text(each.advice, "dim"))
    out.print(rows)
    warnings = sum(each.level is Severity.WARNING for each in found)
    counts = f"{broken} broken, {warnings} warning{'s' * (warnings != 1)}"
    out.print(counts + ("" if stores else "; no store was given"))
    raise typer.Exit(1 if broken else 0)
