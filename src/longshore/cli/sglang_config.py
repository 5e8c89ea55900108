"""`longshore sglang-config`: the flags of SGLang's server for its hierarchical cache over our files, checked first."""

from __future__ import annotations

import json
import shlex
from typing import Annotated, Any

import typer

from longshore.boundary import PAGE
from longshore.cli.options import plain_setting, settings_with, size_of
from longshore.config import Config
from longshore.engines.sglang.flags import check_settings, check_theirs, server_flags
from longshore.errors import ConfigError


def sglang_config(
    file_path: Annotated[str | None, typer.Option(help="Directory of the file tier, on a local NVMe drive.")] = None,
    file_size: Annotated[
        str | None, typer.Option(help="Disk space for the file tier, total of all ranks, for example 1TiB.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any setting of docs/settings.md, for example --set gate=false; repeatable."),
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

    eval "sglang serve --model-path MODEL $(longshore sglang-config --file-path /nvme/longshore --file-size 1TiB)"
    """
    given = settings_with(settings or (), file_path=file_path, file_size=file_size)
    config = Config.make(**given)
    check_settings(given)
    of_sglang = dict(map(_their_key, theirs or ()))
    check_theirs(of_sglang)
    if "file_size" in given:
        size_of(given["file_size"], "--file-size", PAGE)
    if check:
        config.check_files()
        if config.remote:  # for which there is host memory of ours
            config.check_host()
    ours = {name: plain_setting(config, name, text) for name, text in given.items()}
    print(shlex.join(server_flags(ours, of_sglang)))


def _their_key(text: str) -> tuple[str, Any]:
    """A key of SGLang's extra configuration, and its value: JSON, or text. Raises `ConfigError`."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ConfigError(f"--sglang {text}: expected KEY=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
