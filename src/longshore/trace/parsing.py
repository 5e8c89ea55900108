"""Parsing of traces, whatever their format: the request, typed fields of a JSON object, lines of a file.

Every error is a `TraceError` that names file and line. Files may be compressed with gzip, and are read as a stream, so
a trace may be larger than memory.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import math
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import BinaryIO, NoReturn, TypeVar, cast

from longshore.cache.eviction_policies.hit_rates import ReuseHint
from longshore.errors import HintError, TraceError
from longshore.hints import RequestHints


def unknown_name(what: str, name: str, known: Iterable[str]) -> TraceError:
    """The error for a `name` that is not in `known`, with all known names and the most similar one."""
    names = list(known)
    nearest = get_close_matches(name.lower(), names, 1)
    guess = f"; did you mean {nearest[0]}?" if nearest else ""
    return TraceError(f"expected {what} out of {', '.join(names)}, got {name!r}{guess}")


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        timestamp_ms: Arrival, in milliseconds since the trace began.
        input_length: Tokens of the prompt.
        output_length: Tokens of the answer.
        hash_ids: One id per block of the prompt, in order; the last block may be partial. Equal ids mean equal content
            after an equal prefix.
        assumed_time: Whether the trace has no timestamp for it.
        reuse_hint: Hints of its host about the next use of its blocks, if the trace has any.
    """

    timestamp_ms: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    assumed_time: bool = False
    reuse_hint: ReuseHint | None = None


MAX_HASH_ID = 2**64 - 1


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"expected numbers, got {name}")


_JSON = json.JSONDecoder(parse_constant=_no_number)
"""One for all lines: `json.loads` makes another for each call that has a `parse_constant`."""


class Fields:
    """Typed access to the fields of an object; a wrong type or a missing field is a `TraceError`."""

    def __init__(self, where: str, fields: object) -> None:
        self.where = where
        if not isinstance(fields, dict):
            self.refuse("expected a JSON object", fields)
        self._fields: dict[str, object] = fields

    @classmethod
    def parse(cls, where: str, text: bytes) -> Fields:
        """Parse the JSON object in `text`, in UTF-8, with or without a byte order mark."""
        try:
            found = _JSON.decode(text.removeprefix(codecs.BOM_UTF8).decode("utf-8"))
        except (ValueError, RecursionError) as error:  # also invalid UTF-8, and integers with too many digits
            raise TraceError(f"{where}: expected a JSON object in UTF-8: {error}") from error
        return cls(where, found)

    def __contains__(self, name: object) -> bool:
        return name in self._fields

    def get(self, name: str) -> object:
        """The value of a field."""
        if name not in self._fields:
            raise TraceError(f"{self.where}: expected a field {name!r}, got {sorted(self._fields)}")
        return self._fields[name]

    def integer(self, name: str, *, least: int, default: int | None = None) -> int:
        """An integer of at least `least`."""
        if default is not None and name not in self._fields:
            return default
        value = self.get(name)
        if type(value) is not int or value < least:  # bool is a subclass of int
            self.refuse(f"expected {name!r} to be an integer of at least {least}", value)
        return value

    def milliseconds(self, name: str, *, default: float | None = None) -> float:
        """A time in milliseconds."""
        if default is not None and name not in self._fields:
            return default
        value = self.get(name)
        expected = f"expected {name!r} to be milliseconds, a finite number of at least 0"
        if type(value) is not int and type(value) is not float:
            self.refuse(expected, value)
        try:
            found = float(value)
        except OverflowError:
            self.refuse(expected, value)
        if not math.isfinite(found) or found < 0:
            self.refuse(expected, value)
        return found

    def items(self, name: str) -> list[object]:
        """A list."""
        value = self.get(name)
        if not isinstance(value, list):
            self.refuse(f"expected {name!r} to be a list", value)
        return value

    def integers(self, name: str, *, most: int, one: str) -> tuple[int, ...]:
        """A list of integers from 0 to `most`; error messages call an element `one`."""
        value = self.items(name)
        for item in value:
            if type(item) is not int or not 0 <= item <= most:
                self.refuse(f"expected every {one} to be an integer from 0 to {most}", item)
        return tuple(value)  # type: ignore[arg-type]  # all are integers

    def reuse_hint(self) -> ReuseHint | None:
        """The hints `ends`, `returns_in` (seconds) and `class`, which are checked like those of a live request."""
        names = ("ends", "returns_in", "class")
        said: dict[str, object] = {name: self._fields[name] for name in names if name in self._fields}
        try:
            return RequestHints.parse(said).reuse_hint if said else None
        except HintError as error:
            raise TraceError(f"{self.where}: {error}") from error

    def covers(self, hashes: int, tokens: int, block_tokens: int) -> None:
        """Raise unless `hashes` is the number of blocks for `tokens`."""
        blocks = -(-tokens // block_tokens)
        if hashes != blocks:
            raise TraceError(
                f"{self.where}: expected {blocks} hash ids for {tokens} tokens of input "
                f"in blocks of {block_tokens}, got {hashes}"
            )

    def refuse(self, expected: str, value: object) -> NoReturn:
        """Raise `TraceError`, showing the value found."""
        shown = repr(value) if not isinstance(value, int) else _short_integer(value)
        raise TraceError(f"{self.where}: {expected}, got {shown[:80]}")


def _short_integer(value: int) -> str:
    """`repr`, without the limit on digits that Python sets."""
    return repr(value) if value.bit_length() < 256 else f"an integer of {value.bit_length()} bits"


T = TypeVar("T")
R = TypeVar("R", bound=TraceRequest | None)

Skip = Callable[[TraceError], None]
"""Called for each skipped line."""

_GZIP = b"\x1f\x8b"

MAX_LINE = 64 << 20
"""Largest length of a line in bytes."""


def parse_lines(
    lines: Iterable[bytes], source: str, parse: Callable[[str, bytes], T], skip: Skip | None = None
) -> Iterator[T]:
    """Apply `parse` to each line that is not blank, with its position.

    A `TraceError` of `parse` is raised, or, if there is a callback for skipped lines, skips that line.
    """
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            if len(line) >= MAX_LINE:
                raise TraceError(f"{source}, line {number}: expected a line of less than {MAX_LINE} bytes")
            found = parse(f"{source}, line {number}", line)
        except TraceError as error:
            if skip is None:
                raise
            skip(error)
        else:
            yield found


def in_order(parse: Callable[[str, bytes], R]) -> Callable[[str, bytes], R]:
    """`parse`, with a `TraceError` for a request with an earlier timestamp than the one before it."""
    last = 0.0

    def checked(where: str, line: bytes) -> R:
        nonlocal last
        request = parse(where, line)
        if request is not None:
            if request.timestamp_ms < last:
                raise TraceError(
                    f"{where}: timestamp {request.timestamp_ms:.15g} ms is earlier than the one before, {last:.15g}: "
                    "sort the trace by time, or skip such lines (--bad-lines skip)"
                )
            last = request.timestamp_ms
        return request

    return checked


def lines_of(file: BinaryIO) -> Iterator[bytes]:
    """The lines of `file`; a line that is too long is truncated, but remains too long."""
    while line := file.readline(MAX_LINE):
        rest = line
        while len(rest) >= MAX_LINE and not rest.endswith(b"\n"):
            rest = file.readline(MAX_LINE)
        yield line


def read_lines(path: str | Path, parse: Callable[[str, bytes], T], skip: Skip | None = None) -> Iterator[T]:
    """`parse_lines` of the file at `path`; raises `TraceError` if it cannot be read."""
    with opened(path) as file:
        yield from parse_lines(lines_of(file), str(path), parse, skip)


def read_placed_lines(
    path: str | Path, parse: Callable[[str, bytes], T], skip: Skip | None = None
) -> Iterator[tuple[int, T]]:
    """As `read_lines`, with the byte offset of each line for `lines_at`."""
    place = 0

    def lines(file: BinaryIO) -> Iterator[bytes]:
        nonlocal place
        following = 0
        for line in lines_of(file):
            place, following = following, file.tell()
            yield line

    with opened(path) as file:
        for found in parse_lines(lines(file), str(path), parse, skip):
            yield place, found


def lines_at(path: str | Path, places: Iterable[int]) -> Iterator[bytes]:
    """The lines at the byte offsets `places`, in this order; raises `TraceError` if the file cannot be read."""
    with opened(path) as file, tempfile.TemporaryFile() as plain:
        if not isinstance(file, io.BufferedReader) or not isinstance(file.raw, io.FileIO):
            shutil.copyfileobj(file, plain)  # seeking back in a compressed file reads it again from its start
            file = plain  # noqa: PLW2901
        for place in places:
            file.seek(place)
            yield file.readline(MAX_LINE)


@contextmanager
def opened(path: str | Path) -> Iterator[BinaryIO]:
    """The file at `path`, decompressed; raises `TraceError` if it cannot be read."""
    try:
        file = Path(path).open("rb")  # noqa: SIM115 - closed below
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    try:
        with file:
            if file.peek(2)[:2] != _GZIP:
                yield file
                return
            with gzip.open(file) as inside:
                yield cast(BinaryIO, inside)
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: str | Path, error: Exception) -> TraceError:
    return TraceError(f"cannot read trace {path}: {getattr(error, 'strerror', None) or error}")
