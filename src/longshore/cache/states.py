"""The life of one slot, as one table.

    FREE ──► FILLING ──► READY ──► FREE         the good life
                │           │
                └► DRAINING ◄┘ ──► FREE         unwanted, but a mover still works on it

Only `READY` can be matched. A `DRAINING` slot is in no index, yet nobody else may have it until the last job that
touches it has ended. The table is used by the code, by the tests (which report the edges that they took) and by
docs/architecture.md.
"""

from __future__ import annotations

import enum
from types import MappingProxyType

from longshore.errors import StateError


class State(enum.Enum):
    """State of a slot."""

    FREE = "free"
    FILLING = "filling"
    READY = "ready"
    DRAINING = "draining"


EDGES = MappingProxyType(
    {
        (State.FREE, State.FILLING): "a job was ordered to write it",
        (State.FREE, State.READY): "found whole at start, from an earlier process",
        (State.FILLING, State.READY): "all bytes are in place, of this generation, from all ranks",
        (State.FILLING, State.FREE): "the write failed, and nobody waits to read it",
        (State.FILLING, State.DRAINING): "no longer wanted, or failed with readers waiting",
        (State.READY, State.FREE): "evicted or removed, without readers",
        (State.READY, State.DRAINING): "removed while readers are at work",
        (State.DRAINING, State.FREE): "the last job that touched it has ended",
    }
)
"""Every legal edge, with its meaning."""

STATES = tuple(State)
"""A slot's state is kept as one byte: its index here."""

FREE, FILLING, READY, DRAINING = range(len(STATES))

_LEGAL = bytes((before, after) in EDGES for before in STATES for after in STATES)


def step(state: int, to: int) -> int:
    """`to`, if the table has the edge; raises `StateError` otherwise. Both are indices into `STATES`."""
    if not _LEGAL[state * len(STATES) + to]:
        raise StateError(f"a slot cannot go from {STATES[state].value} to {STATES[to].value}")
    return to
