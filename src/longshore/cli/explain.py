"""`longshore explain`: where each block of a request came from, or why it was missed, from recorded events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from longshore.cache.explain import Account, Asked, read_events, requests
from longshore.cache.explain import explain as account_for
from longshore.cli.output import console, write_json

_ACCOUNT = ("chunk", "key", "what became of it", "tier", "since", "cause", "for")
_ASKED = ("request", "at", "chunks", "on the device", "found below")


def explain(
    events: Annotated[Path, typer.Argument(help="Event file, as set by events_path.")],
    request: Annotated[str | None, typer.Option(help="Request to explain; default: list all requests.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Show where each block of a request came from, or why it was a miss."""
    recorded = read_events(events)
    if request is None:
        _print("requests", {}, _ASKED, [_asked(each) for each in requests(recorded)], as_json=as_json)
        return
    accounts = [_account(each) for each in account_for(recorded, request)]
    _print("chunks", {"request": request}, _ACCOUNT, accounts, as_json=as_json)


def _print(
    name: str,
    about: Mapping[str, object],
    columns: Iterable[str],
    rows: list[dict[str, object]],
    *,
    as_json: bool,
) -> None:
    if as_json:
        write_json({**about, name: rows})
        return
    table = Table(header_style="dim", box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for column in columns:
        table.add_column(column, no_wrap=True)
    for row in rows:
        table.add_row(*(_time(value) if name == "at" else str(value) for name, value in row.items()))
    console().print(table)


def _time(at: object) -> str:
    """Seconds since 1970 as date and time."""
    if not isinstance(at, float):
        return ""
    return datetime.fromtimestamp(at, UTC).isoformat(sep=" ", timespec="milliseconds").removesuffix("+00:00")


def _asked(asked: Asked) -> dict[str, object]:
    return asked._asdict() | {"at": round(asked.at, 3)}


def _account(account: Account) -> dict[str, object]:
    return {
        "position": account.position,
        "key": account.key.hex()[:12],
        "verdict": account.verdict.value,
        "tier": account.tier,
        "at": None if account.at is None else round(account.at, 3),
        "cause": account.cause,
        "by": "" if account.by is None else account.by.hex()[:12],
    }
