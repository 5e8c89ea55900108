"""Reader of the Mooncake trace format: JSON lines, one request each.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, ..., 2354]}

`timestamp` is in milliseconds. `hash_ids` has one id per 512-token block of the prompt, the partial last
block included. Lines are read as they are asked for, so a trace may be larger than memory. Further keys are
allowed and ignored; anything else that does not fit is a `TraceError` that names the line.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from importlib import resources
from pathlib import Path
from typing import NoReturn

from longshore.errors import TraceError
from longshore.trace.request import TraceRequest

TRACE_BLOCK_TOKENS = 512
"""Tokens behind one hash id."""

MAX_HASH_ID = 2**64 - 1

EXCERPT = "conversation_excerpt.jsonl"
"""The excerpt inside the package: lines of Mooncake's conversation trace (see `data/NOTICE`)."""


def read_mooncake(path: str | Path, *, block_tokens: int = TRACE_BLOCK_TOKENS) -> Iterator[TraceRequest]:
    """Yield the requests of the trace at `path`, in file order.

    Args:
        path: A file of JSON lines. Blank lines are skipped.
        block_tokens: Tokens behind one hash id, for traces of this format with other block sizes.

    Raises:
        TraceError: The file cannot be read, or a line is no request.
    """
    try:
        with Path(path).open("rb") as lines:
            yield from parse_mooncake(lines, source=str(path), block_tokens=block_tokens)
    except OSError as error:
        raise TraceError(f"cannot read trace {path}: {error.strerror or error}") from error


def read_excerpt() -> Iterator[TraceRequest]:
    """Yield the requests of the excerpt that ships with the package."""
    with resources.files("longshore.trace").joinpath("data", EXCERPT).open("rb") as lines:
        yield from parse_mooncake(lines, source=EXCERPT)


def parse_mooncake(
    lines: Iterable[bytes], *, source: str = "trace", block_tokens: int = TRACE_BLOCK_TOKENS
) -> Iterator[TraceRequest]:
    """Yield one request per line that is not blank; `source` stands in error messages."""
    if block_tokens < 1:
        raise TraceError(f"block_tokens: expected at least 1, got {block_tokens}")
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield _Line(f"{source}, line {number}", line).request(block_tokens)


class _Line:
    """One line, and where it stood, so that every complaint can say so."""

    def __init__(self, where: str, text: bytes) -> None:
        self._where = where
        self._fields = self._parse(text)

    def request(self, block_tokens: int) -> TraceRequest:
        input_length = self._integer("input_length", least=1)
        return TraceRequest(
            timestamp_ms=self._timestamp(),
            input_length=input_length,
            output_length=self._integer("output_length", least=0),
            hash_ids=self._hash_ids(input_length, block_tokens),
        )

    def _parse(self, text: bytes) -> dict[str, object]:
        try:
            fields = json.loads(text.decode("utf-8"), parse_constant=self._constant)
        except TraceError:
            raise
        except (ValueError, RecursionError) as error:  # also bad UTF-8, and integers of absurd length
            raise TraceError(f"{self._where}: expected a JSON object in UTF-8: {error}") from error
        if not isinstance(fields, dict):
            self._refuse("expected a JSON object", fields)
        return fields

    def _constant(self, name: str) -> NoReturn:
        raise TraceError(f"{self._where}: expected JSON numbers, got {name}")

    def _field(self, name: str) -> object:
        if name not in self._fields:
            raise TraceError(f"{self._where}: expected a field {name!r}, got {sorted(self._fields)}")
        return self._fields[name]

    def _integer(self, name: str, *, least: int) -> int:
        value = self._field(name)
        if type(value) is not int or value < least:  # bool is an int, and no length
            self._refuse(f"expected {name!r} to be an integer of at least {least}", value)
        return value

    def _timestamp(self) -> float:
        value = self._field("timestamp")
        expected = "expected 'timestamp' to be milliseconds, a finite number of at least 0"
        if type(value) is not int and type(value) is not float:
            self._refuse(expected, value)
        try:
            milliseconds = float(value)
        except OverflowError:
            self._refuse(expected, value)
        if not math.isfinite(milliseconds) or milliseconds < 0:
            self._refuse(expected, value)
        return milliseconds

    def _hash_ids(self, input_length: int, block_tokens: int) -> tuple[int, ...]:
        value = self._field("hash_ids")
        if not isinstance(value, list):
            self._refuse("expected 'hash_ids' to be a list", value)
        for item in value:
            if type(item) is not int or not 0 <= item <= MAX_HASH_ID:
                self._refuse(f"expected every hash id to be an integer from 0 to {MAX_HASH_ID}", item)
        blocks = -(-input_length // block_tokens)
        if len(value) != blocks:
            raise TraceError(
                f"{self._where}: expected {blocks} hash ids to cover {input_length} tokens of input "
                f"in blocks of {block_tokens}, got {len(value)}"
            )
        return tuple(value)

    def _refuse(self, expected: str, value: object) -> NoReturn:
        shown = repr(value) if not isinstance(value, int) else _short_integer(value)
        raise TraceError(f"{self._where}: {expected}, got {shown[:80]}")


def _short_integer(value: int) -> str:
    """`repr`, without the limit on digits that Python sets."""
    return repr(value) if value.bit_length() < 256 else f"an integer of {value.bit_length()} bits"
