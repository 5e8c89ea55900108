"""The reference of all settings, and the configuration of an engine, checked before that is started.

config            every setting: values, default, meaning
vllm-config       the value of vLLM's `--kv-transfer-config`
sglang-config     the flags of SGLang's server for its hierarchical cache over our files
"""

from __future__ import annotations

import difflib
import json
import shlex
from itertools import groupby
from operator import attrgetter
from typing import Annotated, Any

import typer
from rich.padding import Padding
from rich.text import Text

from longshore.boundary import DISK_PAGE
from longshore.cli.options import Json, plain_setting, settings_with, size_of
from longshore.cli.output import console, write_json
from longshore.config import Config
from longshore.engines import kv_transfer_config
from longshore.engines.sglang import flags
from longshore.errors import ConfigError
from longshore.runtime.control import socket_path

FilePath = Annotated[str | None, typer.Option(help="Directory of the file tier, on a local NVMe drive.")]


def settings_reference(
    names: Annotated[list[str] | None, typer.Argument(metavar="SETTING", help="Only these settings.")] = None,
    as_json: Json = False,
) -> None:
    """List all settings: the values allowed, the default, and the meaning with its unit.

    They are given with --set SETTING=VALUE, in the table `longshore` of a TOML file, or as arguments of `Config.make`.
    """
    known = {each.name: each for each in Config.reference()}
    for name in names or ():
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "longshore config lists all"
            raise ConfigError(f"{name[:80]!r} is not a setting; {hint}")
    shown = [each for name, each in known.items() if not names or name in names]
    if as_json:
        write_json({"settings": [each._asdict() for each in shown]})
        return
    out = console()
    for section, settings in groupby(shown, attrgetter("section")):
        out.print(section, style="bold")
        for each in settings:
            out.print(f"  {each.name}", style="cyan", end="")
            out.print(f": {each.values}; default: {each.default or 'unset'}")
            out.print(Padding(Text(each.meaning), (0, 0, 0, 6)))
        out.print()


def vllm_config(
    host_size: Annotated[
        str | None, typer.Option(help="Host memory for blocks, total of all ranks, for example 64GiB.")
    ] = None,
    file_path: FilePath = None,
    file_size: Annotated[str | None, typer.Option(help="Disk space for the file tier, for example 1TiB.")] = None,
    blocks_per_chunk: Annotated[int | None, typer.Option(help="vLLM blocks per chunk image; default: 1.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Any setting that `longshore config` lists, for example --set backup=write_through; repeatable.",
        ),
    ] = None,
    report_failures: Annotated[
        bool,
        typer.Option(help="Recompute requests whose blocks cannot be loaded; --no-report-failures: the engine stops."),
    ] = True,
    check: Annotated[bool, typer.Option(help="Compare the sizes with the memory and disk of this machine.")] = True,
) -> None:
    """Print the value of --kv-transfer-config for vLLM. Paths are made absolute.

    vllm serve MODEL --kv-transfer-config "$(longshore vllm-config --host-size 64GiB)"
    """
    options = {"host_size": host_size, "file_path": file_path, "file_size": file_size}
    given = settings_with(settings or (), **options, blocks_per_chunk=blocks_per_chunk)
    config = Config.make(**given)
    kv_transfer_config.check_settings(given)
    if "host_size" not in given:
        raise ConfigError("expected --host-size, such as --host-size 64GiB")
    for name in ("host_size", "file_size"):
        if name in given:
            size_of(given[name], f"--{name.replace('_', '-')}", DISK_PAGE)
    if check:
        config.check_machine()
        _check_control(config)
    extra = {name: plain_setting(config, name, text) for name, text in given.items()}
    write_json(kv_transfer_config.kv_transfer_config(extra, report_failures=report_failures))


def sglang_config(
    file_path: FilePath = None,
    file_size: Annotated[
        str | None, typer.Option(help="Disk space for the file tier, total of all ranks, for example 1TiB.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="Any setting that `longshore config` lists, for example --set gate=false; repeatable."
        ),
    ] = None,
    theirs: Annotated[
        list[str] | None,
        typer.Option(
            "--sglang", help="A key of SGLang's extra configuration, for example --sglang prefetch_threshold=64."
        ),
    ] = None,
    check: Annotated[bool, typer.Option(help="Compare the size with the disk of this machine.")] = True,
) -> None:
    """Print flags for `sglang serve`, quoted for a shell. Paths are made absolute.

    flags=$(longshore sglang-config --file-path /nvme/longshore --file-size 1TiB) &&
    eval "sglang serve --model-path MODEL $flags"
    """
    given = settings_with(settings or (), file_path=file_path, file_size=file_size)
    config = Config.make(**given)
    flags.check_settings(given)
    of_sglang = dict(map(_their_key, theirs or ()))
    flags.check_theirs(of_sglang)
    if "file_size" in given:
        size_of(given["file_size"], "--file-size", DISK_PAGE)
    if check:
        config.check_files()
        _check_control(config)
        if config.remote:  # for which there is host memory of ours
            config.check_host()
    ours = {name: plain_setting(config, name, text) for name, text in given.items()}
    print(shlex.join(flags.server_flags(ours, of_sglang)))


def _check_control(config: Config) -> None:
    """Raise `ConfigError` for a setting control that names no socket."""
    if config.control:
        socket_path(config.control)


def _their_key(text: str) -> tuple[str, Any]:
    """A key of SGLang's extra configuration, and its value: JSON, or text. Raises `ConfigError`."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ConfigError(f"--sglang {text}: expected KEY=VALUE")
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        return name, value
