"""Dependencies between jobs: a slot is written after its readers and its writer have ended, and read after its writer.

A slot is (tier, pool, index): slot 5 of the host is not block 5 of the device. Jobs run in lanes, one per direction and
class, and a lane ends its jobs in the order of their tickets. Per slot and lane, the ticket of the last reader
therefore covers all readers of that lane, and that of the last writer all writers:

                       slot 0   slot 1   slot 2  ...
    writers   lane 0      4        0        4          "slot 0 was last written in lane 0 by ticket 4"
              lane 1      0        7        7
    readers   lane 0      ...

Entries are never removed. An entry is irrelevant once its lane has *ended* that ticket.
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


class LanePosition(NamedTuple):
    """The position of a job.

    Attributes:
        lane: The lane of the job.
        number: Position in the lane; the first is 1.
        needs: For each lane, the position that must have ended before the job begins.
    """

    lane: int
    number: int
    needs: tuple[int, ...]


class Hazards:
    """The last reader and writer of every slot, per lane. Not thread-safe: the engine's lock guards it."""

    def __init__(self, sizes: Mapping[Place, int], lanes: int) -> None:
        """`sizes`: slots in each place."""
        self._given = [0] * lanes
        self._ended = [0] * lanes
        self._readers = {place: np.zeros((lanes, size), dtype=np.int64) for place, size in sizes.items()}
        self._writers = {place: np.zeros((lanes, size), dtype=np.int64) for place, size in sizes.items()}

    def admit(self, lane: int, accesses: Sequence[Access]) -> LanePosition:
        """Record the slots of the next job of `lane`; returns its ticket, which names the jobs to wait for."""
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
        return LanePosition(lane, self._given[lane], tuple(needs.tolist()))

    def is_clear(self, ticket: LanePosition) -> bool:
        """Whether all jobs that `ticket` depends on have ended."""
        return all(ended >= need for ended, need in zip(self._ended, ticket.needs, strict=True))

    def end(self, ticket: LanePosition) -> None:
        """Record that the job of `ticket`, and all before it in its lane, have ended."""
        self._ended[ticket.lane] = ticket.number
