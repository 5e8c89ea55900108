"""`longshore vllm-config`: the `--kv-transfer-config` for vLLM, checked before an engine is started."""

from __future__ import annotations

from typing import Annotated

import typer

from longshore.boundary import PAGE
from longshore.cli.options import plain_setting, settings_with, size_of
from longshore.cli.output import write_json
from longshore.config import Config
from longshore.engines.kv_transfer import check_settings, kv_transfer
from longshore.errors import ConfigError


def vllm_config(
    host_size: Annotated[
        str | None, typer.Option(help="Host memory for blocks, total of all ranks, for example 64GiB.")
    ] = None,
    file_path: Annotated[str | None, typer.Option(help="Directory of the file tier, on a local NVMe drive.")] = None,
    file_size: Annotated[str | None, typer.Option(help="Disk space for the file tier, for example 1TiB.")] = None,
    blocks_per_chunk: Annotated[int | None, typer.Option(help="vLLM blocks per chunk image; default: 1.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="Any setting of docs/settings.md, for example --set backup=write_through; repeatable."
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
    check_settings(given)
    if "host_size" not in given:
        raise ConfigError("expected --host-size, such as --host-size 64GiB")
    for name in ("host_size", "file_size"):
        if name in given:
            size_of(given[name], f"--{name.replace('_', '-')}", PAGE)
    if check:
        config.check_machine()
    extra = {name: plain_setting(config, name, text) for name, text in given.items()}
    write_json(kv_transfer(extra, report_failures=report_failures))
