"""`longshore fsck` and `longshore inspect`: what is in the directory of a file tier that nobody uses."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from longshore.config import format_bytes
from longshore.tiers.file.audit import Audit, Condition, Finding
from longshore.tiers.file.inspection import inspect as sum_up

T = TypeVar("T")

_SHOWN = 20
"""Damaged slots that are listed one by one."""

DirectoryArgument = Annotated[Path, typer.Argument(metavar="DIR", help="The directory of a file tier (`file_path`).")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


def fsck(
    directory: DirectoryArgument,
    repair: Annotated[bool, typer.Option("--repair", help="Empty the slots of damaged records.")] = False,
    as_json: Json = False,
) -> None:
    """Verify every record of a file tier: header, place, and every byte of the image.

    A damaged record is never served, with or without this command: it is a cache, and what does not verify is a miss.
    It says how much was lost, and --repair makes the slots look like new.

    Exit status: [bold]0[/bold] all is well, or was repaired; [bold]1[/bold] there is damage; [bold]2[/bold] it could
    not be checked: no such directory, one that a live process uses, or one that is not a file tier's.
    """
    with Audit(directory) as audit:
        found = Counter(dict.fromkeys(Condition, 0))
        damaged = []
        for finding in _watched(audit.records(), audit.most, "verified"):
            found[finding.condition] += 1
            if finding.condition.is_damage:
                damaged.append(finding)
        if repair:
            audit.repair(damaged)
        missing, has_index = audit.missing, audit.entries() is not None
    if as_json:
        counts = {condition.name.lower(): found[condition] for condition in Condition}
        facts = {"directory": str(directory), "slots": counts, "missing": missing, "index": has_index}
        repaired = len(damaged) if repair else 0
        typer.echo(json.dumps({**facts, "damaged": [_plain(each) for each in damaged], "repaired": repaired}))
    else:
        console = Console(highlight=False)
        _show(console, found, damaged)
        if missing:
            console.print(f"the segment ends {missing:,} slabs early: the next start makes it whole")
        if not has_index:
            console.print("no index that can be used: the next start reads all headers")
        console.print(_conclusion(directory, len(damaged), repaired=repair), soft_wrap=True)
    raise typer.Exit(1 if missing or (damaged and not repair) else 0)


def _plain(finding: Finding) -> dict[str, object]:
    key = finding.header.key.hex() if finding.header is not None else None
    return {"slot": finding.slot, "condition": finding.condition.value, "key": key}


def _show(console: Console, found: Mapping[Condition, int], damaged: Sequence[Finding]) -> None:
    """How many slots are in which condition, and the first of the damaged ones."""
    table = _table("slots", "")
    for condition, count in found.items():
        if count:
            table.add_row(f"{count:,}", condition.value, style="bold red" if condition.is_damage else None)
    console.print(table)
    for each in damaged[:_SHOWN]:
        key = f"  key {each.header.key.hex()[:16]}" if each.header is not None else ""
        console.print(f"slot {each.slot}: {each.condition.value}{key}")
    if len(damaged) > _SHOWN:
        console.print(f"and {len(damaged) - _SHOWN:,} more: --json lists all")


def inspect(directory: DirectoryArgument, as_json: Json = False) -> None:
    """Show what a file tier holds: how full it is, whose records, how old they are, how often they were served.

    Reads the index, and no images: a second, whatever the size. A scope is a model, its weights, layout and salt: no
    process serves another scope's records. `longshore fsck` verifies the images.
    """
    with Audit(directory) as audit:
        found = sum_up(audit, _watched(audit.headers(), audit.most, "read"), time.time())
    if as_json:
        typer.echo(json.dumps({"directory": str(directory), **found.as_json()}))
        return
    facts = _table("", "")
    facts.add_row("slabs", f"{found.slabs:,} of {format_bytes(found.slab_bytes)}")
    facts.add_row("records", f"{found.records:,}")
    facts.add_row("of earlier generations", f"{found.stale:,}")
    facts.add_row("on disk", format_bytes(found.bytes_on_disk))
    facts.add_row("generation", f"{found.generation:,}, opened {found.opens:,} times")
    facts.add_row("known from", "the index" if found.from_index else "headers: there is no index that can be used")
    sizes = _table("images of up to", "slabs", "slots", "records")
    for size in found.sizes:
        slots = f"{size.slabs * size.per_slab:,}"
        sizes.add_row(format_bytes(size.image_bytes), f"{size.slabs:,}", slots, f"{size.records:,}")
    scopes = _table("scope", "records", "bytes", "reads", "newest written")
    for scope in found.scopes:
        written = f"{datetime.fromtimestamp(scope.written):%Y-%m-%d %H:%M}" if scope.written else "not known"
        figures = f"{scope.records:,}", format_bytes(scope.bytes), f"{scope.reads:,}"
        scopes.add_row(scope.scope[:16], *figures, written)
    ages = _table("written", "records")
    for age in found.ages:
        ages.add_row(age.written, f"{age.records:,}")
    console = Console()
    for table in (facts, sizes, scopes, ages):
        console.print(table)


def _conclusion(directory: Path, damaged: int, *, repaired: bool) -> str:
    if not damaged:
        return f"{directory}: no damage"
    records = "1 damaged record" if damaged == 1 else f"{damaged:,} damaged records"
    if repaired:
        return f"{directory}: {records}; their slots are empty now"
    return f"{directory}: {records}, which are never served; longshore fsck {directory} --repair empties their slots"


def _watched(work: Iterable[T], total: int, what: str) -> Iterable[T]:
    """`work`, with its progress on standard error if somebody watches it there."""
    console = Console(stderr=True)
    return track(work, what, total, console=console, transient=True, disable=not console.is_terminal)


def _table(*columns: str) -> Table:
    table = Table(header_style="dim", box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for column in columns:
        table.add_column(
            column, justify="right" if column in ("slabs", "slots", "records", "bytes", "reads") else "left"
        )
    return table
