"""Reading a trace line by line: as it is asked for, with numbers, and with a word on every line that is no good."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TypeVar

from longshore.errors import TraceError

T = TypeVar("T")

Skip = Callable[[TraceError], None]
"""Told of each line that is left out."""

MAX_LINE = 64 << 20
"""Bytes; a longer line is no line of a trace."""


def parse_lines(
    lines: Iterable[bytes], source: str, parse: Callable[[str, bytes], T], skip: Skip | None = None
) -> Iterator[T]:
    """What `parse` makes of each line that is not blank, given where it stood.

    A `TraceError` of `parse` ends it all, or, where somebody is there to be told of what is left out, that line only.
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


def lines_of(file: BinaryIO) -> Iterator[bytes]:
    """The lines of `file`; of one that is too long only the beginning, which is too long still."""
    while line := file.readline(MAX_LINE):
        rest = line
        while len(rest) >= MAX_LINE and not rest.endswith(b"\n"):
            rest = file.readline(MAX_LINE)
        yield line


def read_lines(path: str | Path, parse: Callable[[str, bytes], T], skip: Skip | None = None) -> Iterator[T]:
    """`parse_lines` of the file at `path`; raises `TraceError` if it cannot be read."""
    with _opened(path) as file:
        yield from parse_lines(lines_of(file), str(path), parse, skip)


def read_placed_lines(
    path: str | Path, parse: Callable[[str, bytes], T], skip: Skip | None = None
) -> Iterator[tuple[int, T]]:
    """The same, and before each the byte at which its line begins, for `lines_at`."""
    place = 0

    def lines(file: BinaryIO) -> Iterator[bytes]:
        nonlocal place
        following = 0
        for line in lines_of(file):
            place, following = following, file.tell()
            yield line

    with _opened(path) as file:
        for found in parse_lines(lines(file), str(path), parse, skip):
            yield place, found


def lines_at(path: str | Path, places: Iterable[int]) -> Iterator[bytes]:
    """The lines that begin at `places`, in this order; raises `TraceError` if the file cannot be read."""
    with _opened(path) as file:
        for place in places:
            file.seek(place)
            yield file.readline(MAX_LINE)


@contextmanager
def _opened(path: str | Path) -> Iterator[BinaryIO]:
    try:
        with Path(path).open("rb") as file:
            yield file
    except OSError as error:
        raise TraceError(f"cannot read trace {path}: {error.strerror or error}") from error
