"""Who must wait for whom: a slot is written after its readers and its writer are done, read after its writer is.

A slot is (tier, pool, index), never a bare index: slot 5 of the host is not block 5 of the device. Jobs run in lanes,
one for each direction and class; a lane ends its jobs in the order of their tickets. So per slot and lane the newest
reader's ticket stands for all readers of that lane, and the newest writer's for all writers:

                       slot 0   slot 1   slot 2  ...
    writers   lane 0      4        0        4          "slot 0 was last written in lane 0 by ticket 4"
              lane 1      0        7        7
    readers   lane 0      ...

No entry is ever removed. It stops mattering when its lane has *ended* that ticket: the only proof that there is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Place(NamedTuple):
    """A pool of slots in a tier."""

    tier: str
    pool: int


class Access(NamedTuple):
    """The slots of one place that a job touches. `slots`: int64, shape `(slots,)`."""

    place: Place
    slots: npt.NDArray[np.int64]
    writes: bool


class Ticket(NamedTuple):
    """A job's turn.

    Attributes:
        lane: Where it runs.
        number: Its turn there; the first is 1.
        needs: For each lane, the turn that must have ended before the job begins.
    """

    lane: int
    number: int
    needs: tuple[int, ...]


class Hazards:
    """The newest reader and writer of every slot, per lane. Not thread-safe: the engine's lock guards it."""

    def __init__(self, sizes: Mapping[Place, int], lanes: int) -> None:
        """`sizes`: slots in each place."""
        self._given = [0] * lanes
        self._ended = [0] * lanes
        self._readers = {place: np.zeros((lanes, size), dtype=np.int64) for place, size in sizes.items()}
        self._writers = {place: np.zeros((lanes, size), dtype=np.int64) for place, size in sizes.items()}

    def admit(self, lane: int, accesses: Sequence[Access]) -> Ticket:
        """Record what the next job of `lane` touches, and say what must have ended before it begins."""
        needs = np.zeros(len(self._given), dtype=np.int64)
        for place, slots, writes in accesses:
            if not len(slots):
                continue
            np.maximum(needs, self._writers[place][:, slots].max(axis=1), out=needs)
            if writes:
                np.maximum(needs, self._readers[place][:, slots].max(axis=1), out=needs)
        self._given[lane] += 1
        for place, slots, writes in accesses:
            newest = self._writers if writes else self._readers
            newest[place][lane, slots] = self._given[lane]
        return Ticket(lane, self._given[lane], tuple(needs.tolist()))

    def is_clear(self, ticket: Ticket) -> bool:
        """Whether all that `ticket` must wait for has ended."""
        return all(ended >= need for ended, need in zip(self._ended, ticket.needs, strict=True))

    def end(self, ticket: Ticket) -> None:
        """The job of `ticket` touches nothing any more, nor does any before it in its lane."""
        self._ended[ticket.lane] = ticket.number
