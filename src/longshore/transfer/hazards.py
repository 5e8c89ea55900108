"""Who must wait for whom: a slot is written only after its readers and its writer are done, read only after its writer.

A slot is (tier, pool, index), never a bare index: slot 5 of the host is not block 5 of the device. Jobs run in lanes; a
lane ends its jobs in the order of their tickets. So per slot and lane the newest reader's ticket stands for all readers
of that lane, and the newest writer's for all writers:

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


class Hazards:
    """The newest reader and writer of every slot, per lane. Not thread-safe: the engine's lock guards it."""

    def __init__(self, sizes: Mapping[Place, int], lanes: int) -> None:
        """`sizes`: slots in each place. Tickets start at 1; 0 means that there was none."""
        self._lanes = lanes
        self._readers = {place: np.zeros((lanes, size), dtype=np.int64) for place, size in sizes.items()}
        self._writers = {place: np.zeros((lanes, size), dtype=np.int64) for place, size in sizes.items()}

    def admit(self, lane: int, ticket: int, accesses: Sequence[Access]) -> tuple[int, ...]:
        """Record what job `ticket` of `lane` touches. Returns the ticket that each lane must have ended before it."""
        needed = np.zeros(self._lanes, dtype=np.int64)
        for place, slots, writes in accesses:
            if not len(slots):
                continue
            np.maximum(needed, self._writers[place][:, slots].max(axis=1), out=needed)
            if writes:
                np.maximum(needed, self._readers[place][:, slots].max(axis=1), out=needed)
        for place, slots, writes in accesses:
            newest = self._writers if writes else self._readers
            newest[place][lane, slots] = ticket
        return tuple(needed.tolist())
