"""Reading a trace line by line, as a stream, with line numbers and errors for invalid lines.

A gzip-compressed file, of any name, is decompressed.
"""

from __future__ import annotations

import gzip
import io
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TypeVar, cast

from longshore.errors import TraceError
from longshore.trace.request import TraceRequest

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
            shutil.copyfileobj(file, plain)  # to go back in what is compressed is to begin again
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
