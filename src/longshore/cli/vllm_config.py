"""`longshore vllm-config`: the `--kv-transfer-config` for vLLM, checked before an engine is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from longshore.config import Config
from longshore.engines.kv_transfer import kv_transfer


def vllm_config(
    host_size: Annotated[str, typer.Option(help="Host memory for blocks, over all ranks, such as 64GiB.")],
    file_path: Annotated[Path | None, typer.Option(help="Directory of the file tier, on a local NVMe.")] = None,
    file_size: Annotated[str | None, typer.Option(help="Disk space for the file tier, such as 1TiB.")] = None,
    blocks_per_chunk: Annotated[int, typer.Option(help="vLLM's blocks in one block image.")] = 1,
    report_failures: Annotated[
        bool, typer.Option(help="Have requests recomputed whose blocks cannot be loaded.")
    ] = True,
    check: Annotated[bool, typer.Option(help="Compare the sizes with what this machine has.")] = True,
) -> None:
    """Print what to pass to vLLM as --kv-transfer-config.

    vllm serve MODEL --kv-transfer-config "$(longshore vllm-config --host-size 64GiB)"
    """
    sizes = {"host_size": host_size, "file_path": file_path, "file_size": file_size}
    given = {key: str(value) for key, value in sizes.items() if value is not None}
    config = Config.make(**given, blocks_per_chunk=blocks_per_chunk)
    if check:
        config.check_machine()
    extra: dict[str, object] = {**given}
    if blocks_per_chunk > 1:
        extra["blocks_per_chunk"] = blocks_per_chunk
    typer.echo(json.dumps(kv_transfer(extra, report_failures=report_failures)))
