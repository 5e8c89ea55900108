"""Readers of trace formats other than Mooncake's.

sessions   {"turns": [{"timestamp", "input_length", "output_length", "hashes"}]}, one session per line; chained hashes
lengths    CSV: time, input tokens, output tokens; every block is new, so there is no reuse
events     Longshore's own event file: its requests and their keys
prompts    {"prompt": text} or {"tokens": [ids]}, "timestamp", "output_length"; keys of Longshore

Turns of sessions, and prompts, may have `ends`, `returns_in` (seconds) and `class`, as in Mooncake's format.

Times are milliseconds, except in CSV (seconds, or dates). An id is 64 bits of a digest over the whole prefix: equal ids
mean equal content after an equal prefix, for any hashes in the trace.
"""

from __future__ import annotations

import csv
import hashlib
import heapq
import math
from array import array
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from longshore.cache.events import Event, EventKind
from longshore.errors import TraceError
from longshore.keys import chain
from longshore.trace.fields import Fields
from longshore.trace.lines import Skip, in_order, lines_at, read_lines, read_placed_lines
from longshore.trace.request import TraceRequest

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
    """The turn that comes next, of the sessions that go on."""
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
    return TraceRequest(turn.milliseconds("timestamp"), length, output_length, tuple(ids), returns=turn.returns())


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
    """What the header said, where time begins, and how many blocks there were."""

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
        return TraceRequest(timestamp, len(tokens), output_length, tuple(map(_id, keys)), assumed, fields.returns())

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
