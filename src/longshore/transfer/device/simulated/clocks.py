"""Vector clocks over streams and host threads, and detection of accesses without an order.

A clock has, for each actor, the number of operations that are known to have ended:

    host     {compute: 3}                   "the third operation of the compute stream, and all before it, have ended"
    copies   {compute: 3, copies: 1}        an operation knows what its stream knew, what whoever gave it knew, and the
                                            events that it waits for

Two accesses to the same bytes, one of which writes, must be so ordered when the second is *given*, whatever happens to
run first this time. The method is that of happens-before race detectors (Lamport 1978; Flanagan and Freund,
"FastTrack", PLDI 2009), with one entry for each actor that read or wrote.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

Clock = dict[str, int]


def join(clock: Clock, other: Clock) -> None:
    """Merge `other` into `clock`."""
    for actor, number in other.items():
        if clock.get(actor, 0) < number:
            clock[actor] = number


class Conflict(NamedTuple):
    """Two accesses without an order. `kind`: `RAW`, `WAR` or `WAW`, the later access first."""

    kind: str
    earlier: str
    later: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.later} is not ordered after {self.earlier}"


class _Entry(NamedTuple):
    number: int
    label: str


@dataclass(slots=True)
class _Cell:
    """The newest write and read of some bytes, by actor."""

    writes: dict[str, _Entry] = field(default_factory=dict)
    reads: dict[str, _Entry] = field(default_factory=dict)


class Checker:
    """All accesses so far, by cell. A cell is read or written as a unit."""

    def __init__(self) -> None:
        self.conflicts: list[Conflict] = []
        self._cells: dict[Hashable, _Cell] = {}

    def access(
        self, actor: str, clock: Clock, label: str, *, reads: Iterable[Hashable], writes: Iterable[Hashable]
    ) -> None:
        """Record that operation `clock[actor]` of `actor`, with the knowledge `clock`, accesses these cells."""
        entry = _Entry(clock[actor], label)
        for name in reads:
            cell = self._cell(name)
            self._compare("RAW", cell.writes, clock, label)
            cell.reads[actor] = entry
        for name in writes:
            cell = self._cell(name)
            self._compare("WAW", cell.writes, clock, label)
            self._compare("WAR", cell.reads, clock, label)
            cell.writes[actor] = entry

    def _cell(self, name: Hashable) -> _Cell:
        cell = self._cells.get(name)
        if cell is None:
            cell = self._cells[name] = _Cell()
        return cell

    def _compare(self, kind: str, earlier: dict[str, _Entry], clock: Clock, label: str) -> None:
        for actor, entry in earlier.items():
            if clock.get(actor, 0) < entry.number:
                self.conflicts.append(Conflict(kind, entry.label, label))
