"""Commands on the files that engines leave: `longshore fsck`, `inspect` and `gc` on directories of file tiers, and
`longshore explain` on recorded events: where each block of a request came from, or why it was missed.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from longshore.cache.explain import Account, Asked, Verdict, read_events, requests
from longshore.cache.explain import explain as accounts_of
from longshore.cli.options import Json
from longshore.cli.output import console, table, write_json
from longshore.config import format_bytes
from longshore.errors import ConfigError, FormatError, TierError
from longshore.tiers.file.directory import COPIES
from longshore.tiers.file.fsck import Condition, Finding, Fsck
from longshore.tiers.file.fsck import inspect as sum_up

T = TypeVar("T")

_SCOPE_DIGITS = 8
"""Least number of hexadecimal digits of a scope's name."""

_SHOWN = 20
"""Largest number of damaged slots listed one by one."""

DirectoryArgument = Annotated[Path, typer.Argument(metavar="DIR", help="The directory of a file tier (`file_path`).")]


def fsck(
    directory: DirectoryArgument,
    repair: Annotated[bool, typer.Option("--repair", help="Empty the slots of damaged records.")] = False,
    as_json: Json = False,
) -> None:
    """Verify every record of a file tier: header, position, and every byte of the image.

    The file tier never serves a damaged record, with or without this command: reading one is a miss. The command
    reports how many records are damaged. --repair empties their slots, rewrites a damaged copy of the superblock from
    the other copy, and rebuilds a lost index from the record headers.

    Exit status: [bold]0[/bold] no damage, or all damage repaired; [bold]1[/bold] damage found; [bold]2[/bold] not
    checked: no such directory, in use by a live process, or not the directory of a file tier.
    """
    with Fsck(directory) as fsck:
        found = Counter(dict.fromkeys(Condition, 0))
        damaged, whole = [], []
        for finding in _with_progress(fsck.records(), fsck.most, "verified"):
            found[finding.condition] += 1
            if finding.condition.is_damage:
                damaged.append(finding)
            elif finding.condition is Condition.WHOLE and finding.header is not None and fsck.entries() is None:
                whole.append(finding.header)
        missing, has_index, superblocks = fsck.missing, fsck.entries() is not None, list(fsck.superblocks.damaged)
        if repair:
            fsck.repair(damaged, whole)
    if as_json:
        counts = {condition.name.lower(): found[condition] for condition in Condition}
        facts = {"directory": str(directory), "slots": counts, "missing": missing, "index": has_index}
        facts["superblocks"] = superblocks
        repaired = len(damaged) if repair else 0
        write_json({**facts, "damaged": [_plain(each) for each in damaged], "repaired": repaired})
    else:
        out = console()
        _show(out, found, damaged)
        if missing:
            out.print(f"the segment file is {missing:,} slabs short: the next start extends it")
        for name in superblocks:
            out.print(f"{name} is damaged: {'rewritten from the other copy' if repair else 'the other copy is used'}")
        if not has_index:
            made = f"rebuilt from {len(whole):,} records" if repair else "the next start reads all record headers"
            out.print(f"no usable index: {made}")
        lost = len(superblocks) + (not has_index)
        out.print(_conclusion(directory, len(damaged), lost, repaired=repair), soft_wrap=True)
    raise typer.Exit(1 if missing or ((damaged or superblocks or not has_index) and not repair) else 0)


def _plain(finding: Finding) -> dict[str, object]:
    key = finding.header.key.hex() if finding.header is not None else None
    return {"slot": finding.slot, "condition": finding.condition.value, "key": key}


def _show(out: Console, found: Mapping[Condition, int], damaged: Sequence[Finding]) -> None:
    """Print the number of slots by condition, and the first damaged ones."""
    rows = _table("slots", "")
    for condition, count in found.items():
        if count:
            rows.add_row(f"{count:,}", condition.value, style="bold red" if condition.is_damage else None)
    out.print(rows)
    for each in damaged[:_SHOWN]:
        key = f"  key {each.header.key.hex()[:16]}" if each.header is not None else ""
        out.print(f"slot {each.slot}: {each.condition.value}{key}")
    if len(damaged) > _SHOWN:
        out.print(f"and {len(damaged) - _SHOWN:,} more; --json lists all")


def inspect(directory: DirectoryArgument, as_json: Json = False) -> None:
    """Show what a file tier holds: fill level, records by scope, their age, and how often they were read.

    Reads the index and no images, so it takes about a second for any size. Can be run while a process has the
    directory open. A scope is a model with its weights, layout and salt; no process serves records of another scope.
    `longshore fsck` verifies the images.
    """
    with Fsck(directory, shared=True) as fsck:
        found = sum_up(fsck, _with_progress(fsck.headers(), fsck.most, "read"), time.time())
        superblocks = list(fsck.superblocks.damaged)
    if as_json:
        write_json({"directory": str(directory), **found.as_json(), "damaged_superblocks": superblocks})
        return
    facts = _table("", "")
    facts.add_row("slabs", f"{found.slabs:,} of {format_bytes(found.slab_bytes)}")
    facts.add_row("records", f"{found.records:,}")
    facts.add_row("full", f"{found.full:.1%}")
    facts.add_row("in use", "by a live process: figures may lag" if found.live else "by no process")
    facts.add_row("of earlier generations", f"{found.stale:,}")
    facts.add_row("on disk", format_bytes(found.bytes_on_disk))
    facts.add_row("generation", f"{found.generation:,}, opened {found.opens:,} times")
    facts.add_row("known from", "the index" if found.from_index else "record headers: there is no usable index")
    for name in superblocks:
        facts.add_row("damaged", f"{name}: the other copy is used; longshore fsck --repair rewrites it")
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
    out = console()
    for each in (facts, sizes, scopes, ages):
        out.print(each)


def _conclusion(directory: Path, damaged: int, lost: int, *, repaired: bool) -> str:
    """The last line: the number of damaged records, and of damaged files of superblock and index (`lost`)."""
    if not damaged and not lost:
        return f"{directory}: no damage"
    if not damaged:
        what = "was repaired" if repaired else f"costs no record: run longshore fsck {directory} --repair"
        return f"{directory}: no damaged record; the damage to superblock or index {what}"
    records = "1 damaged record" if damaged == 1 else f"{damaged:,} damaged records"
    if repaired:
        return f"{directory}: {records}; their slots were emptied"
    return (
        f"{directory}: {records}, which are never served; to empty their slots, run longshore fsck {directory} --repair"
    )


def gc(
    directories: Annotated[
        list[Path],
        typer.Argument(metavar="DIR", help="Directories of file tiers, or directories that contain them."),
    ],
    remove: Annotated[
        list[str] | None,
        typer.Option(
            "--remove", metavar="SCOPE", help="Remove this scope, named by at least its first 8 digits; repeatable."
        ),
    ] = None,
    older_than: Annotated[
        str | None,
        typer.Option(
            metavar="AGE", help="Remove scopes whose newest record is older than this, for example 30d or 12h."
        ),
    ] = None,
    all_but_current: Annotated[
        bool, typer.Option("--all-but-current", help="Remove all scopes except the one written to last.")
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="Remove; without this option, only show what would be removed.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Delete cached blocks of models no longer in use (dry run without --yes).

    A scope is a model with its weights, layout and salt. The next process can use the space of removed records; a
    directory without other records is removed with its files. A directory that a live process has open is not changed.

    Exit status: [bold]0[/bold] done; [bold]1[/bold] a scope was not removed because its directory is in use or its
    index is damaged, or one of several directories cannot be read; [bold]2[/bold] no such directory or invalid options.
    """
    wanted = tuple(scope.lower() for scope in remove or ())
    if any(len(scope) < _SCOPE_DIGITS or set(scope) - set("0123456789abcdef") for scope in wanted):
        raise ConfigError(
            f"--remove {', '.join(wanted)}: expected at least {_SCOPE_DIGITS} hexadecimal digits of a scope"
        )
    limit, now = _seconds(older_than), time.time()
    rows: list[dict[str, Any]] = []
    unreadable = 0
    paths = list(chain.from_iterable(map(_tiers_in, directories)))
    for path in paths:
        try:
            fsck = Fsck(path, shared=True)
        except (TierError, FormatError) as error:
            if len(paths) == 1:
                raise
            unreadable += 1
            console(stderr=True).print(f"longshore: {error}")
            continue
        with fsck:
            found, known = sum_up(fsck, fsck.headers(), now), fsck.entries() is not None
            doomed = [
                scope.scope
                for scope in found.scopes
                if (wanted and scope.scope.startswith(wanted))
                or (limit is not None and scope.written and now - scope.written > limit)
                or (all_but_current and not scope.current)
            ]
            busy = fsck.live or not known
            if doomed and yes and not busy:
                fsck.remove([bytes.fromhex(scope) for scope in doomed])
        for scope in found.scopes:
            fate = "kept" if scope.scope not in doomed else _fate(live=fsck.live, known=known, yes=yes)
            seconds = max(0.0, now - scope.written) if scope.written else None
            facts = {"scope": scope.scope, "records": scope.records, "bytes": scope.bytes, "age": seconds}
            rows.append({"directory": str(path), **facts, "in_use": fsck.live, "fate": fate})
    if as_json:
        write_json(rows)
    else:
        listed = _table("directory", "scope", "records", "bytes", "newest", "in use", "")
        for row in rows:
            age = "not known" if row["age"] is None else f"{row['age'] / 86_400:.1f} days old"
            figures = f"{row['records']:,}", format_bytes(row["bytes"]), age, "yes" if row["in_use"] else "no"
            listed.add_row(row["directory"], row["scope"][:16], *figures, row["fate"])
        console().print(listed)
    missing = [scope for scope in wanted if not any(str(row["scope"]).startswith(scope) for row in rows)]
    if missing:
        raise ConfigError(f"--remove {', '.join(missing)}: no such scope; omit --remove to list all scopes")
    raise typer.Exit(1 if unreadable or any(row["fate"].startswith("not removed") for row in rows) else 0)


def _fate(*, live: bool, known: bool, yes: bool) -> str:
    """The result for a scope that was selected for removal."""
    if live:
        return "not removed: in use"
    if not known:
        return "not removed: the index is damaged, see longshore fsck"
    return "removed" if yes else "would be removed by --yes"


def _tiers_in(path: Path) -> list[Path]:
    """The directories of file tiers in `path`, for instance one per rank; `path` itself if there are none."""
    try:
        inside = [each for each in sorted(path.iterdir()) if any(os.path.lexists(each / name) for name in COPIES)]
    except (OSError, ValueError):
        return [path]  # opening it gives the error
    return inside or [path]


def _seconds(age: str | None) -> float | None:
    """Seconds of an age such as 30d or 12h. Raises `ConfigError`."""
    if age is None:
        return None
    units = {"d": 86_400, "h": 3600}
    if age[-1:] not in units or not age[:-1].isascii() or not age[:-1].isdecimal():
        raise ConfigError(f"--older-than {age}: expected a number of days or hours, such as 30d or 12h")
    return float(int(age[:-1]) * units[age[-1]])


def _with_progress(work: Iterable[T], total: int, what: str) -> Iterable[T]:
    """`work`, with a progress bar on standard error if that is a terminal."""
    err = console(stderr=True)
    return track(work, what, total, console=err, transient=True, disable=not err.is_terminal)


def _table(*columns: str) -> Table:
    return table(*columns, right=("slabs", "slots", "records", "bytes", "reads"))


_ACCOUNT = ("chunk", "key", "outcome", "tier", "since", "cause", "for")
_ASKED = ("request", "at", "chunks", "on the device", "found below")
_OPTIONAL = ("for", "since", "key")
"""Columns that a narrow terminal need not show."""


def explain(
    events: Annotated[Path, typer.Argument(help="Event file, as set by events_path.")],
    request: Annotated[str | None, typer.Option(help="Request to explain; default: list all requests.")] = None,
    verdict: Annotated[
        list[Verdict] | None,
        typer.Option(help="Only chunks with this outcome; repeatable. Without --request: of all requests."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show where each block of a request came from, or why it was a miss.

    The engine may be running or have ended. What happened in the last quarter of a second may not be in the file yet.
    """
    recorded = read_events(events)
    if request is None and not verdict:
        asked = [_asked(each) for each in requests(recorded)]
        if not asked and not as_json:
            console(stderr=True).print(f"{events}: no request with a name is recorded in whole lines")
        _print("requests", {}, _ASKED, asked, as_json=as_json)
        return
    found = accounts_of(recorded, request)
    rows = [
        ({"request": name} if request is None else {}) | _account(each)
        for name, accounts in found.items()
        for each in accounts
        if not verdict or each.verdict in verdict
    ]
    columns = ("request", *_ACCOUNT) if request is None else _ACCOUNT
    _print("chunks", {"request": request} if request else {}, columns, rows, as_json=as_json)


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
    found = table(*columns, optional=_OPTIONAL)
    for row in rows:
        found.add_row(*(_time(value) if name == "at" else str(value) for name, value in row.items()))
    console().print(found)


def _time(at: object) -> str:
    """A Unix time as date and time."""
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
