"""Which operations of a batch are carried out together, and which of their records are moved as one.

    batch    slots 7 3 9 4 5   ──►   one task   3 4 5 7 9   ──►   pieces   3 4 5 │ 7 │ 9

The chunks of a prompt are written in order, mostly into slots that follow each other, and asked for together. Records
that lie one behind the other are one piece: a disk moves a large one faster than as many bytes in small ones, and for
less processor time. And whatever is done once for several records costs less than for each: locks, system calls, cold
caches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from longshore.boundary import Status
from longshore.tiers.arena import PAGE
from longshore.tiers.base import Op, TierOp
from longshore.tiers.file.queue import Move, Piece, Steps

TASK_BYTES = 8 << 20
"""Of images in one task. With 2 MiB, more processor time goes into handing over; more than 8 MiB were no better."""

TASK_RECORDS = 32
"""In one task, at most."""

Task = tuple[int, ...]
"""Positions in the batch, in the order of their records."""


def coalesce(batch: Sequence[TierOp], place: Callable[[TierOp], int], joins: Callable[[TierOp], bool]) -> list[Task]:
    """The tasks of `batch`, each position in one; the operations of each are of one kind, and of one generation.

    `place` is the byte where a record begins; `joins` says whether one can be moved together with others.
    """
    if len(batch) == 1:
        return [(0,)]
    order = sorted((op.op is Op.WRITE, place(op), at) for at, op in enumerate(batch))
    tasks: list[list[int]] = []
    kind = None  # of the operations in the task that may go on
    nbytes = 0  # of its images
    for _, _, at in order:
        op = batch[at]
        mine = (op.op, op.generation) if joins(op) else None
        fits = nbytes + op.length <= TASK_BYTES and mine is not None
        if fits and mine == kind and len(tasks[-1]) < TASK_RECORDS:
            tasks[-1].append(at)
        else:
            tasks.append([at])
            kind, nbytes = mine, 0
        nbytes += op.length
    return [tuple(task) for task in tasks]


def move_records(
    headers: Sequence[memoryview], bodies: Sequence[memoryview], places: Sequence[int], *, writing: bool
) -> Steps[list[Status]]:
    """Move records to or from `places`, ascending: neighbours as one piece. One status each."""
    pieces: list[Piece] = []
    piece_of: list[int] = []
    end = -1
    for header, body, place in zip(headers, bodies, places, strict=False):
        if place == end:
            pieces[-1].buffers.extend((header, body))
        else:
            pieces.append(Piece([header, body], place))
        piece_of.append(len(pieces) - 1)
        end = place + PAGE + len(body)
    statuses = yield Move(pieces, writing)
    return [statuses[piece] for piece in piece_of]
