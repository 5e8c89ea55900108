"""Which operations of a batch go in one system call: those whose records lie one behind the other.

    batch    slots 7 3 9 4 5   ──►   runs   3 4 5 │ 7 │ 9

The chunks of a prompt are written in order, mostly into slots that follow each other, and asked for together; a disk
moves a large piece faster than as many bytes in small ones, and for less processor time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from longshore.tiers.arena import PAGE
from longshore.tiers.base import Op, TierOp

RUN_BYTES = 2 << 20
"""Of images in one call. Longer ones were no faster: they leave threads without work."""

RUN_RECORDS = 32
"""In one call, at most."""

Run = tuple[int, ...]
"""Positions in the batch, in the order of their records."""


def cut(batch: Sequence[TierOp], place: Callable[[TierOp], int], joins: Callable[[TierOp], bool]) -> list[Run]:
    """The runs of `batch`, each position in one. `place` is the byte where a record begins; `joins` says whether one
    can be moved in a call with others."""
    if len(batch) == 1:
        return [(0,)]
    places = [place(op) for op in batch]
    runs: list[list[int]] = []
    nbytes = 0
    for at in sorted(range(len(batch)), key=lambda at: (batch[at].op is Op.WRITE, places[at])):
        op = batch[at]
        if runs and nbytes + op.length <= RUN_BYTES and len(runs[-1]) < RUN_RECORDS and joins(op):
            before = runs[-1][-1]
            if _is_followed(batch[before], op, places[at] - places[before]) and joins(batch[before]):
                runs[-1].append(at)
                nbytes += op.length
                continue
        runs.append([at])
        nbytes = op.length
    return [tuple(run) for run in runs]


def _is_followed(before: TierOp, op: TierOp, distance: int) -> bool:
    """Whether `op`, whose record begins `distance` bytes after that of `before`, may end as `before` does."""
    return distance == PAGE + before.length and op.op is before.op and op.generation == before.generation
