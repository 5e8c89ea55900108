"""Reads traces in all formats; detects the format from the first line."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from longshore.errors import TraceError
from longshore.trace.fields import Fields
from longshore.trace.formats import read_lengths, read_prompts, read_requests, read_sessions
from longshore.trace.lines import MAX_LINE, Skip, opened
from longshore.trace.mooncake import TRACE_BLOCK_TOKENS, read_mooncake
from longshore.trace.request import TraceRequest


class Form(enum.StrEnum):
    """Format of a trace."""

    MOONCAKE = "mooncake"
    SESSIONS = "sessions"
    LENGTHS = "lengths"
    EVENTS = "events"
    PROMPTS = "prompts"

    @property
    def shows_reuse(self) -> bool:
        """Whether the format has information on shared content."""
        return self is not Form.LENGTHS


_READERS: dict[Form, Callable[..., Iterator[TraceRequest]]] = {
    Form.MOONCAKE: read_mooncake,
    Form.SESSIONS: read_sessions,
    Form.LENGTHS: read_lengths,
    Form.EVENTS: read_requests,
    Form.PROMPTS: read_prompts,
}

_MARKS = {"hash_ids": Form.MOONCAKE, "turns": Form.SESSIONS, "kind": Form.EVENTS}
_MARKS |= {"prompt": Form.PROMPTS, "tokens": Form.PROMPTS}


def form_of(path: str | Path) -> Form:
    """The format of the trace at `path`, by its name and its first line. Raises `TraceError` if it is unknown."""
    if Path(path).name.lower().removesuffix(".gz").endswith(".csv"):
        return Form.LENGTHS
    with opened(path) as file:
        beginnings = iter(partial(file.readline, MAX_LINE), b"")  # of a device, lines may have no end
        first = next((line for line in beginnings if line.strip()), None)
    if first is None:
        raise TraceError(f"{path}: expected a trace, but the file is empty")
    try:
        fields = Fields.parse(str(path), first)
    except TraceError:
        if b"," in first and b"{" not in first:
            return Form.LENGTHS
        raise
    found = next((form for mark, form in _MARKS.items() if mark in fields), None)
    if found is None:
        raise TraceError(
            f"{path}: expected the first line to have a field {', '.join(map(repr, _MARKS))}; else name the form: "
            f"{', '.join(Form)}"
        )
    return found


def read_trace(
    path: str | Path,
    form: Form | None = None,
    *,
    block_tokens: int = TRACE_BLOCK_TOKENS,
    skip: Skip | None = None,
) -> Iterator[TraceRequest]:
    """The requests of the trace at `path`, as a stream.

    Args:
        path: The file.
        form: The format; detected if not given.
        block_tokens: Tokens per block.
        skip: Called for invalid lines, which are then skipped; without it, an invalid line is an error.

    Raises:
        TraceError: The file cannot be read, its format is unknown, or a line is invalid; names the line.
    """
    if block_tokens < 1:
        raise TraceError(f"block_tokens: expected at least 1, got {block_tokens}")
    return _READERS[form or form_of(path)](path, block_tokens=block_tokens, skip=skip)
