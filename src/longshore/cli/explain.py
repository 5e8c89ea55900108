"""`longshore explain`: where each block of a request came from, or why it was missed, from recorded events."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from longshore.cache.explain import Account, read_events
from longshore.cache.explain import explain as account_for


def explain(
    events: Annotated[Path, typer.Argument(help="Recorded events, one JSON object a line.")],
    request: Annotated[str, typer.Option(help="The request to explain.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Say where each block of a request came from, or why it was missed."""
    accounts = account_for(read_events(events), request)
    if as_json:
        typer.echo(json.dumps({"request": request, "chunks": [_plain(account) for account in accounts]}))
        return
    table = Table(header_style="dim", box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for column in ("chunk", "key", "what became of it", "tier", "since", "cause", "for"):
        table.add_column(column, no_wrap=True)
    for account in accounts:
        table.add_row(*(str(value) for value in _plain(account).values()))
    Console().print(table)


def _plain(account: Account) -> dict[str, object]:
    return {
        "position": account.position,
        "key": account.key.hex()[:12],
        "verdict": account.verdict.value,
        "tier": account.tier,
        "at": "" if account.at is None else round(account.at, 3),
        "cause": account.cause,
        "by": "" if account.by is None else account.by.hex()[:12],
    }
