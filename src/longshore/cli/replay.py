"""`longshore replay`: what a trace of requests would have found in a cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table


def replay(
    trace: Annotated[Path, typer.Argument(help="A trace of requests, one JSON object a line (Mooncake's format).")],
    capacity_blocks: Annotated[
        int, typer.Option(min=1, help="The plain policy experiment: one tier of so many blocks, and no time.")
    ],
    policy: Annotated[
        str | None, typer.Option(help="Eviction policy: arc, lru, or one to compare with: lru-2, s3-fifo, fifo.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Say what the requests of a trace would have found in a cache."""
    from longshore.trace.experiment import experiment  # noqa: PLC0415 - numpy takes longer to load than `--help` may
    from longshore.trace.mooncake import read_mooncake  # noqa: PLC0415
    from longshore.trace.optimum import optimal_hits  # noqa: PLC0415
    from longshore.trace.paths import Paths  # noqa: PLC0415
    from longshore.trace.policies import policy_named  # noqa: PLC0415

    name, kind = policy_named(policy)
    paths = Paths(request.hash_ids for request in read_mooncake(trace))
    found = experiment(paths, kind, capacity_blocks)
    best = optimal_hits(paths, capacity_blocks)
    facts: dict[str, object] = {
        "requests": found.requests,
        "block_refs": found.block_refs,
        "unique_blocks": paths.unique,
        "hit_ratio": found.ratio,
        "hit_ratio_by_tier": {"host": found.ratio},
        "optimal_hit_ratio": best / found.block_refs if found.block_refs else 0.0,
        "ttft_s": None,
        "file_write_bytes_per_day": None,
        "policy": name,
        "capacity_blocks": capacity_blocks,
    }
    if as_json:
        typer.echo(json.dumps(facts))
        return
    table = Table(header_style="dim", box=None, pad_edge=False, padding=(0, 3, 0, 0), show_header=False)
    for row in ("requests", "block_refs", "unique_blocks", "capacity_blocks", "policy"):
        value = facts[row]
        table.add_row(row.replace("_", " "), f"{value:,}" if isinstance(value, int) else str(value))
    table.add_row("hit ratio", f"{found.ratio:.4f}")
    table.add_row("best possible", f"{facts['optimal_hit_ratio']:.4f}")
    Console().print(table)
