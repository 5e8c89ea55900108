"""What a turn does, as steps: what is to be moved next, and, once that has moved or not, what comes of it.

    steps ──Move──► whoever moves pieces ──a status for each piece──► steps ──► a status for each record

So it is written once, for threads that wait for the disk (`workers.py`) and for the one that does not (`rolling.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple, TypeVar

from longshore.boundary import Status
from longshore.tiers.file.system import Piece

T = TypeVar("T")


class Move(NamedTuple):
    """Pieces to be moved between memory and the segment, in any order."""

    pieces: Sequence[Piece]
    writing: bool


Steps = Generator[Move, list[Status], T]
"""Yields what is to be moved, is sent how that ended, piece by piece, and returns what it was for."""


def carry_out(steps: Steps[T], move: Callable[[Move], list[Status]]) -> T:
    """All of `steps`, waiting for each."""
    try:
        wanted = next(steps)
        while True:
            wanted = steps.send(move(wanted))
    except StopIteration as end:
        result: T = end.value
        return result
