"""Which operations of a batch one worker carries out at once.

    batch    slots 7 3 9 4 5   ──►   turns   3 4 5 7 9       where the system has a queue
                                             3 4 5 │ 7 │ 9   where each thread moves one piece

The chunks of a prompt are written in order, mostly into slots that follow each other, and asked for together. Records
that lie one behind the other are one piece: a disk moves a large one faster than as many bytes in small ones, and for
less processor time. And whatever is done once for several records, by one thread, costs less than for each: locks, a
place in the interpreter, cold caches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from longshore.tiers.arena import PAGE
from longshore.tiers.base import Op, TierOp

TURN_BYTES = 8 << 20
"""Of images in one turn. With 2 MiB, more processor time goes into handing over; more than 8 MiB were no better."""

TURN_RECORDS = 32
"""In one turn, at most."""

Turn = tuple[int, ...]
"""Positions in the batch, in the order of their records."""


def cut(
    batch: Sequence[TierOp], place: Callable[[TierOp], int], joins: Callable[[TierOp], bool], *, apart: bool
) -> list[Turn]:
    """The turns of `batch`, each position in one; an operation in each is of one kind, and of one generation.

    `place` is the byte where a record begins; `joins` says whether one can be moved together with others; `apart`,
    whether a turn may have records that do not lie one behind the other.
    """
    if len(batch) == 1:
        return [(0,)]
    order = sorted((op.op is Op.WRITE, place(op), at) for at, op in enumerate(batch))
    turns: list[list[int]] = []
    kind = None  # of the operations in the turn that may go on
    end = nbytes = 0  # where its last record ends, and the bytes of its images
    for _, begin, at in order:
        op = batch[at]
        mine = (op.op, op.generation) if joins(op) else None
        fits = nbytes + op.length <= TURN_BYTES and (apart or begin == end)
        if fits and mine is not None and mine == kind and len(turns[-1]) < TURN_RECORDS:
            turns[-1].append(at)
        else:
            turns.append([at])
            kind, nbytes = mine, 0
        nbytes += op.length
        end = begin + PAGE + op.length
    return [tuple(turn) for turn in turns]
