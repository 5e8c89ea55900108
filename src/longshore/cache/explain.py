"""Explains a request: for each of its chunks the tier that it was loaded from, or the reason of the miss.

A pure function of recorded events (`longshore.cache.events`), of a cache or from a file of JSON lines
(`longshore.runtime.recorder`). It follows every key up to the request, to its last event.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from longshore.boundary import Key
from longshore.cache.events import Event, EventKind
from longshore.errors import TraceError


class Verdict(enum.Enum):
    """Outcome of one chunk of a request. Complete: there is no "other"."""

    DEVICE = "device"  # the engine had it
    FOUND = "found"  # in a tier, and found by the lookup
    MISSED = "missed"  # found, but not loaded
    AFTER_MISS = "after a miss"  # in a tier, but after a chunk that was missed
    IN_FLIGHT = "in flight"  # being written to its first tier
    FAILED = "failed"  # its last write or read failed
    EVICTED = "evicted"  # evicted
    REMOVED = "removed"  # removed for another reason
    RESET = "reset"  # removed by the last reset
    NEVER_SEEN = "never seen"  # as far back as the events go


class Account(NamedTuple):
    """One chunk: its position, its outcome and time; the tier, the cause, and the chunk that it was evicted for."""

    position: int
    key: Key
    verdict: Verdict
    at: float | None = None
    tier: str = ""
    cause: str = ""
    by: Key | None = None


class _History:
    """The state of one key: the tiers that have it, and its last event."""

    __slots__ = ("last", "tiers")

    def __init__(self) -> None:
        self.tiers: list[str] = []
        self.last: Event | None = None

    def apply(self, event: Event) -> None:
        """Apply an event of this key, or a reset."""
        if event.kind in (EventKind.STORED, EventKind.MOVED):
            self.tiers.append(event.tier)
        elif event.kind is EventKind.REMOVED and event.tier in self.tiers:
            self.tiers.remove(event.tier)
        elif event.kind is EventKind.RESET:
            self.tiers.clear()
        self.last = event


_GONE = {
    EventKind.ORDERED: Verdict.IN_FLIGHT,
    EventKind.FAILED: Verdict.FAILED,
    EventKind.RESET: Verdict.RESET,
    EventKind.REMOVED: Verdict.REMOVED,
}


def explain(events: Iterable[Event], only: str | None = None) -> dict[str, list[Account]]:
    """The outcome of each chunk of every named request, or of `only` one, in its last lookup; by name of the request,
    in order of their first lookups.

    Raises `TraceError` if there is no event of such a request.
    """
    histories: dict[Key, _History] = {}
    answers: dict[str, list[Account]] = {}
    for event in events:
        if event.kind is EventKind.REQUEST:
            if event.request is not None and only in (None, event.request):
                answers[event.request] = [_account(event, i, histories) for i in range(len(event.keys))]
        elif event.kind is EventKind.LOADED:
            if event.request in answers:
                _miss(answers[event.request], event)
        elif event.kind is EventKind.RESET:
            for history in histories.values():
                history.apply(event)
        elif event.key is not None and event.kind not in (EventKind.SHARED, EventKind.LAPSED):
            histories.setdefault(event.key, _History()).apply(event)
    if only is not None and only not in answers:
        raise TraceError(f"no event is about a request called {only!r}")
    return answers


class Asked(NamedTuple):
    """A request by its events: time of the lookup, its chunks, and how many of them were found."""

    request: str
    at: float
    chunks: int
    device: int
    found: int


def requests(events: Iterable[Event]) -> list[Asked]:
    """The named requests, in order."""
    return [
        Asked(event.request, event.at, len(event.keys), event.start, event.length)
        for event in events
        if event.kind is EventKind.REQUEST and event.request is not None
    ]


def former(path: Path) -> Path:
    """The name that a full file of events gets when the next one is begun."""
    return path.with_name(path.name + ".1")


def read_events(path: Path) -> list[Event]:
    """Events from a file of JSON lines, and from the file before it, if there is one.

    A last line without a newline is ignored: it is being written, or its writer has died. Raises `TraceError` for an
    invalid line.
    """
    older = _read(former(path)) if path.name and former(path).exists() else []
    return older + _read(path)


def _read(path: Path) -> list[Event]:
    events: list[Event] = []
    try:
        for number, line in enumerate(path.read_text().split("\n")[:-1], 1):
            try:
                events.append(Event.from_json(json.loads(line)))
            except (ValueError, RecursionError, TraceError) as error:
                raise TraceError(
                    f"{path}, line {number}: {error}. A file of events is what the setting events_path names; "
                    "`longshore replay` reads traces"
                ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: expected a file of events: {getattr(error, 'strerror', None) or error}") from error
    return events


def _miss(answer: list[Account], loaded: Event) -> None:
    """Chunks that were found but not loaded: the first has a cause, the others come after it."""
    causes = dict.fromkeys(loaded.keys[loaded.length :], "after_miss") | dict.fromkeys(
        loaded.keys[loaded.length : loaded.length + 1], loaded.cause
    )
    for i, account in enumerate(answer):
        if account.key in causes:
            answer[i] = account._replace(verdict=Verdict.MISSED, at=loaded.at, cause=causes[account.key])


def _account(event: Event, position: int, histories: Mapping[Key, _History]) -> Account:
    key = event.keys[position]
    if position < event.start:
        return Account(position, key, Verdict.DEVICE)
    history = histories.get(key, _History())
    last = history.last
    found = position < event.start + event.length
    if history.tiers or found:
        tier = history.tiers[-1] if history.tiers else ""
        return Account(position, key, Verdict.FOUND if found else Verdict.AFTER_MISS, last and last.at, tier)
    if last is None:
        return Account(position, key, Verdict.NEVER_SEEN)
    verdict = Verdict.EVICTED if last.cause == "evicted" else _GONE[last.kind]
    return Account(position, key, verdict, last.at, last.tier, last.cause, last.by)
