"""Readers of all trace formats, and detection of the format from the first line.

mooncake   {"timestamp", "input_length", "output_length", "hash_ids"}: one id per block, partial last block included
sessions   {"turns": [{"timestamp", "input_length", "output_length", "hashes"}]}, one session per line; chained hashes
lengths    CSV: time, input tokens, output tokens; every block is new, so there is no reuse
events     Longshore's own event file: its requests and their keys
prompts    {"prompt": text} or {"tokens": [ids]}, "timestamp", "output_length"; keys of Longshore

Times are milliseconds, except in CSV (seconds, or dates). An id is 64 bits of a digest over the whole prefix: equal ids
mean equal content after an equal prefix, for any hashes in the trace. Requests in `mooncake` and `prompts`, and turns
of `sessions`, may have the hints `ends`, `returns_in` (seconds) and `class`. Other keys are ignored.
"""

from __future__ import annotations

import csv
import enum
import hashlib
import heapq
import math
from array import array
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from functools import partial
from importlib import resources
from pathlib import Path

import numpy as np

from longshore.cache.events import Event, EventKind
from longshore.errors import TraceError
from longshore.keys import chain
from longshore.trace.parsing import (
    MAX_HASH_ID,
    MAX_LINE,
    Fields,
    Skip,
    TraceRequest,
    in_order,
    lines_at,
    opened,
    parse_lines,
    read_lines,
    read_placed_lines,
)

TRACE_BLOCK_TOKENS = 512
"""Tokens per hash id."""

EXCERPT = "conversation_excerpt.jsonl"
"""The excerpt inside the package: lines of Mooncake's conversation trace (see `data/NOTICE`)."""


def read_mooncake(
    path: str | Path, *, block_tokens: int = TRACE_BLOCK_TOKENS, skip: Skip | None = None
) -> Iterator[TraceRequest]:
    """Yield the requests of the trace at `path`, in file order.

    Args:
        path: A file of JSON lines. Blank lines are skipped.
        block_tokens: Tokens per hash id, for traces of this format with other block sizes.
        skip: Called for invalid lines, which are then skipped.

    Raises:
        TraceError: The file cannot be read, or, without `skip`, a line is invalid or has an earlier timestamp than the
            one before it.
    """
    yield from read_lines(path, _request(block_tokens), skip)


def read_excerpt() -> Iterator[TraceRequest]:
    """Yield the requests of the excerpt that ships with the package."""
    with resources.files("longshore.trace").joinpath("data", EXCERPT).open("rb") as lines:
        yield from parse_mooncake(lines, source=EXCERPT)


def parse_mooncake(
    lines: Iterable[bytes],
    *,
    source: str = "trace",
    block_tokens: int = TRACE_BLOCK_TOKENS,
    skip: Skip | None = None,
) -> Iterator[TraceRequest]:
    """Yield one request per line that is not blank; `source` is for error messages."""
    yield from parse_lines(lines, source, _request(block_tokens), skip)


def _request(block_tokens: int) -> Callable[[str, bytes], TraceRequest]:
    if block_tokens < 1:
        raise TraceError(f"block_tokens: expected at least 1, got {block_tokens}")

    def request(where: str, line: bytes) -> TraceRequest:
        fields = Fields.parse(where, line)
        input_length = fields.integer("input_length", least=1)
        timestamp, output_length = fields.milliseconds("timestamp"), fields.integer("output_length", least=0)
        hash_ids = fields.integers("hash_ids", most=MAX_HASH_ID, one="hash id")
        fields.covers(len(hash_ids), input_length, block_tokens)
        return TraceRequest(timestamp, input_length, output_length, hash_ids, reuse_hint=fields.reuse_hint())

    return in_order(request)


_ROOT = hashlib.sha256(b"longshore trace 1").digest()

MAX_BLOCKS = 1 << 22
"""Largest number of blocks of one prompt in formats that give only its length."""


def read_sessions(path: str | Path, *, block_tokens: int, skip: Skip | None = None) -> Iterator[TraceRequest]:
    """Requests of all sessions, by time of arrival. Sessions overlap, so the file is read twice.

    Hashes are text or integers, one per block of `block_tokens` tokens, or of the session's own `block_size`. The start
    and the file position of each session are kept in memory, and active sessions completely.
    """
    begins = array("d")
    places = array("q")
    for place, turns in read_placed_lines(path, _session(block_tokens), skip):
        if turns:
            begins.append(turns[0].timestamp_ms)
            places.append(place)
    order = np.argsort(np.frombuffer(begins, np.float64), kind="stable").tolist()
    lines = lines_at(path, (places[at] for at in order))
    running: list[tuple[float, int, int, list[TraceRequest]]] = []
    for number, (at, line) in enumerate(zip(order, lines, strict=True)):
        while running and running[0][0] <= begins[at]:
            yield _next_turn(running)
        turns = _session(block_tokens)(f"{path}, byte {places[at]}", line)
        heapq.heappush(running, (turns[0].timestamp_ms, number, 0, turns))
    while running:
        yield _next_turn(running)


def _next_turn(running: list[tuple[float, int, int, list[TraceRequest]]]) -> TraceRequest:
    """The earliest next turn of the active sessions."""
    _, number, at, turns = running[0]
    if at + 1 < len(turns):
        heapq.heapreplace(running, (turns[at + 1].timestamp_ms, number, at + 1, turns))
    else:
        heapq.heappop(running)
    return turns[at]


def _session(default_tokens: int) -> Callable[[str, bytes], list[TraceRequest]]:
    def session(where: str, line: bytes) -> list[TraceRequest]:
        fields = Fields.parse(where, line)
        block_tokens = fields.integer("block_size", least=1, default=default_tokens)
        turns = fields.items("turns")
        found = [_turn(Fields(f"{where}, turn {i}", turn), block_tokens) for i, turn in enumerate(turns, 1)]
        return sorted(found, key=lambda turn: turn.timestamp_ms)

    return session


def _turn(turn: Fields, block_tokens: int) -> TraceRequest:
    length = turn.integer("input_length", least=1)
    hashes = turn.items("hashes")
    turn.covers(len(hashes), length, block_tokens)
    ids, parent = [], _ROOT
    for each in hashes:
        if type(each) not in (int, str) or each == "":
            turn.refuse("expected every hash to be text or an integer", each)
        parent = hashlib.blake2b(parent + str(each).encode("utf-8", "surrogatepass"), digest_size=32).digest()
        ids.append(_id(parent))
    output_length = turn.integer("output_length", least=0, default=0)
    return TraceRequest(turn.milliseconds("timestamp"), length, output_length, tuple(ids), reuse_hint=turn.reuse_hint())


_COLUMNS = {
    "when": ("timestamp", "timestamp_s", "time", "arrival_time", "arrived_at"),
    "in": ("input_length", "input_tokens", "contexttokens", "request tokens", "num_prefill_tokens", "prompt_tokens"),
    "out": ("output_length", "output_tokens", "generatedtokens", "response tokens", "num_decode_tokens"),
}


def read_lengths(path: str | Path, *, block_tokens: int, skip: Skip | None = None) -> Iterator[TraceRequest]:
    """Requests of a CSV file with lengths only. Every block is new, so there is no reuse.

    The first line names the columns: `timestamp` (seconds, or a date), `input_length`, `output_length`, or their names
    in published traces.
    """
    reader = _Lengths(block_tokens)
    yield from (request for request in read_lines(path, in_order(reader.line), skip) if request is not None)


class _Lengths:
    """Parser of lines: keeps the columns of the header, the first timestamp, and the number of blocks."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._columns: dict[str, int] | None = None
        self._begin: float | None = None
        self._blocks = 0

    def line(self, where: str, text: bytes) -> TraceRequest | None:
        try:
            cells = next(csv.reader([text.decode("utf-8-sig").rstrip("\r\n")], strict=True))
        except (csv.Error, UnicodeDecodeError, StopIteration) as error:
            raise TraceError(f"{where}: expected a line of CSV in UTF-8: {error}") from error
        if self._columns is None:
            self._columns = self._header(where, cells)
            return None
        try:
            when, tokens, answer = (cells[self._columns[name]].strip() for name in ("when", "in", "out"))
        except IndexError as error:
            raise TraceError(f"{where}: expected {max(self._columns.values()) + 1} cells, got {len(cells)}") from error
        length, output = _length(where, tokens, 1), _length(where, answer, 0)
        if length > MAX_BLOCKS * self._block_tokens:
            raise TraceError(
                f"{where}: expected at most {MAX_BLOCKS} blocks of {self._block_tokens} tokens, got {length} tokens"
            )
        seconds = _seconds(where, when)
        if self._begin is None:
            self._begin = seconds
        ids = range(self._blocks, self._blocks - (-length // self._block_tokens))
        self._blocks = ids.stop
        return TraceRequest(1000 * (seconds - self._begin), length, output, tuple(ids))

    @staticmethod
    def _header(where: str, cells: list[str]) -> dict[str, int]:
        names = [cell.strip().lower() for cell in cells]
        found = {
            what: next((names.index(name) for name in known if name in names), -1) for what, known in _COLUMNS.items()
        }
        if min(found.values()) < 0:
            missing = ", ".join(_COLUMNS[what][0] for what, at in found.items() if at < 0)
            raise TraceError(f"{where}: expected a header with a column {missing}, got {names}")
        return found


def _length(where: str, text: str, least: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 16) or int(text) < least:
        raise TraceError(f"{where}: expected a number of tokens of at least {least}, got {text[:80]!r}")
    return int(text)


def _seconds(where: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            raise TraceError(f"{where}: expected seconds or a date, got {text[:80]!r}") from None
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    if not math.isfinite(value):
        raise TraceError(f"{where}: expected seconds or a date, got {text[:80]!r}")
    return value


def read_requests(path: str | Path, *, block_tokens: int, skip: Skip | None = None) -> Iterator[TraceRequest]:
    """The requests in Longshore's own event file; other events are skipped.

    The file has no output length, so it is 0, and the last chunk is taken as complete.
    """
    begin: list[float] = []

    def request(where: str, line: bytes) -> TraceRequest | None:
        fields = Fields.parse(where, line)
        try:
            event = Event.from_json({name: fields.get(name) for name in Event._fields if name in fields})
        except TraceError as error:
            raise TraceError(f"{where}: {error}") from error
        if event.kind is not EventKind.REQUEST or not event.keys:
            return None
        if not begin:
            begin.append(event.at)
        ids = tuple(map(_id, event.keys))
        return TraceRequest(1000 * (event.at - begin[0]), len(ids) * block_tokens, 0, ids)

    yield from (found for found in read_lines(path, in_order(request), skip) if found is not None)


def read_prompts(path: str | Path, *, block_tokens: int, skip: Skip | None = None) -> Iterator[TraceRequest]:
    """Prompts as text or tokens, with Longshore's keys. One without a time arrives a second after the one before it.

    Text is not tokenised: four bytes of UTF-8 count as a token, which preserves shared prefixes.
    """
    last: float | None = None

    def request(where: str, line: bytes) -> TraceRequest:
        nonlocal last
        fields = Fields.parse(where, line)
        tokens = _tokens(fields)
        if not len(tokens):
            fields.refuse("expected a prompt of at least one token", "")
        assumed = "timestamp" not in fields
        timestamp = fields.milliseconds("timestamp", default=0.0 if last is None else last + 1000.0)
        output_length = fields.integer("output_length", least=0, default=0)
        last = max(timestamp, last or 0.0)
        whole = len(tokens) // block_tokens * block_tokens
        keys = chain(_ROOT, tokens[:whole], block_tokens)
        if whole < len(tokens):
            keys += chain(keys[-1] if keys else _ROOT, tokens[whole:], len(tokens) - whole)
        return TraceRequest(timestamp, len(tokens), output_length, tuple(map(_id, keys)), assumed, fields.reuse_hint())

    yield from read_lines(path, in_order(request), skip)


def _tokens(fields: Fields) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    if "tokens" in fields:
        return np.array(fields.integers("tokens", most=2**32 - 1, one="token"), np.uint32)
    text = fields.get("prompt")
    if not isinstance(text, str):
        fields.refuse("expected 'prompt' to be text", text)
    data = text.encode("utf-8", "surrogatepass")
    return np.frombuffer(data + bytes(-len(data) % 4), "<u4").astype(np.uint32)


def _id(key: bytes) -> int:
    return int.from_bytes(key[:8], "big")


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
        beginnings = iter(partial(file.readline, MAX_LINE), b"")  # the lines of a device may have no end
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
            f"{path}: expected the first line to have a field {', '.join(map(repr, _MARKS))}; or --format with one of "
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
