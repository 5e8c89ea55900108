"""Slots of one tier: the state of each, whose it is, and which jobs work on it. Every operation is all-or-nothing.

A slot is `FREE` or somebody's. Jobs know slots, not chunks: a chunk may be forgotten while a mover still reads its
slot, which then drains. All per-slot data lie in arrays (13 bytes a slot); what only slots in flight have, a writer
or a fault, lies in small dictionaries.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from longshore.boundary import Slabs, Status
from longshore.cache.columns import FreeList, column, marks, numbers, zeros
from longshore.errors import CacheError, CapacityError, IntegrityError, StateError


class State(enum.Enum):
    """State of a slot."""

    FREE = "free"
    FILLING = "filling"
    READY = "ready"
    DRAINING = "draining"


# The life of one slot, as one table.
#
#     FREE ──► FILLING ──► READY ──► FREE         the good life
#                 │           │
#                 └► DRAINING ◄┘ ──► FREE         unwanted, but a mover still works on it
#
# Only `READY` can be matched. A `DRAINING` slot is in no index, yet nobody else may have it until the last job that
# touches it has ended. The table is used by the code, by the tests (which report the edges that they took) and by
# docs/architecture.md.

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


class SlotPool:
    """Slots of one image size, indexed from zero; lowest free index first at start. Others: `slab_pool.SlabPool`.

    What takes a `pool` here takes it for those of several sizes; it is 0.
    """

    __slots__ = ("_free", "capacity", "fault", "freed", "node", "readers", "slabs", "state", "writer")

    def __init__(self, slots: int | Slabs) -> None:
        """`slots`: how many, where their size does not matter."""
        if not isinstance(slots, Slabs):
            if slots < 0:
                raise CacheError(f"a pool has zero or more slots, got {slots}")
            slots = Slabs.of_one_size(1, slots)
        self.slabs = slots
        self.capacity = capacity = slots.indices
        """Indices of slots lie below this one."""
        self.state = bytearray(capacity)
        """Index into `STATES`, by slot."""
        self.node = zeros(capacity)
        """The index's number of the chunk in each slot; 0 without one."""
        self.readers = zeros(capacity)
        """Jobs that read each slot."""
        self.writer: dict[int, int] = {}
        """The job that fills a slot."""
        self.fault: dict[int, Status] = {}
        """Slots whose bytes are known to be no good: what jobs still read from them is no good either."""
        self.freed: list[int] | None = None
        """Slots that have become free since `take_freed`, some of them taken again; `None` where nobody asks."""
        self._all_free(())

    @property
    def used(self) -> int:
        """Slots that somebody owns, what is in flight included."""
        return self.capacity - len(self._free)

    @property
    def used_bytes(self) -> int:
        """Bytes of these."""
        return self.used * self.slabs.slab_bytes

    def used_by(self, pool: int) -> tuple[int, int]:
        """Slabs that are given to `pool`, and slots taken in them."""
        return self.used, self.used

    def room(self, pool: int = 0) -> int:
        """How many slots of `pool` can be had."""
        return len(self._free)

    def pool_of(self, index: int) -> int:
        """The pool that a slot belongs to, which somebody owns."""
        return 0

    def pools_of(self, at: npt.NDArray[np.int32]) -> npt.NDArray[np.integer[Any]]:
        """The same for slots `at`."""
        return np.zeros(len(at), np.int32)

    def allocate(self, count: int, pool: int = 0) -> list[int]:
        """`count` slots of `pool`, to be filled; or `CapacityError` and no change."""
        if count < 0:
            raise CacheError(f"cannot allocate {count} slots")
        if count > self.room(pool):
            raise CapacityError(f"{count} slots were asked for, {self.room(pool)} of {self.capacity} are free")
        taken = self._take(count, pool)
        self.move_all(taken, FREE, FILLING)
        return taken

    def move_all(self, indices: Sequence[int] | npt.NDArray[np.int32], before: int, to: int) -> None:
        """Change the state of slots that are all in state `before`."""
        state, after, at = marks(self.state), step(before, to), numbers(indices)
        if state[at].tobytes().count(before) < len(at):
            index = next(index for index in at.tolist() if state[index] != before)
            raise IntegrityError(f"slot {index} is {STATES[state[index]].value}, not {STATES[before].value}")
        state[at] = after

    def claim(self, indices: Sequence[int], pools: Sequence[int]) -> None:
        """Take these very slots of `pools`, which a start found whole, the one used last at the end; all or none."""
        bad = [i for i in indices if not 0 <= i < self.capacity or self.state[i] != FREE]
        if bad or len(set(indices)) != len(indices):
            raise CacheError(f"slots to claim must be free, distinct and below {self.capacity}: {bad or indices}")
        self._claim(indices, pools)
        self.move_all(indices, FREE, READY)

    def check_slots(self, indices: Sequence[int]) -> None:
        """Raise `CacheError` unless these are slots."""
        bad = [index for index in indices if not 0 <= index < self.capacity]
        if bad:
            raise CacheError(f"slots lie in [0, {self.capacity}), got {bad[0]}")

    def give_last(self, indices: Sequence[int]) -> None:
        """Of the free slots, give these out after all others, the first of them first. `CacheError` if out of range."""
        self.check_slots(indices)
        self._give_last([index for index in indices if self.state[index] == FREE])

    def resize(self, slabs: int) -> None:
        """Have `slabs` slabs from now on. Raises `CapacityError`, and changes nothing, while one above is taken."""
        if slabs < 0:
            raise CacheError(f"a pool has zero or more slots, got {slabs}")
        resized = replace(self.slabs, slabs=slabs)
        capacity = resized.indices
        taken = sum(state != FREE for state in self.state[capacity:])
        if taken:
            raise CapacityError(f"{taken} slots from {capacity} on are taken, of {self.capacity}")
        more = max(0, capacity - self.capacity)
        self.state = self.state[:capacity] + bytearray(more)
        self.node = self.node[:capacity] + zeros(more)
        self.readers = self.readers[:capacity] + zeros(more)
        self._resize(slabs)
        self.slabs, self.capacity = resized, capacity

    def move(self, index: int, to: int) -> None:
        """Change the state of a slot; raises `StateError` for an edge that the table does not have."""
        self.state[index] = step(self.state[index], to)
        if to == FREE:
            self.node[index] = 0
            self._give_back(array("i", (index,)))
            if self.freed is not None:
                self.freed.append(index)
            if self.fault:
                self.fault.pop(index, None)

    def free_all(self, indices: Sequence[int] | npt.NDArray[np.int32]) -> None:
        """Slots that were ready, and that no job touches, are free."""
        at = numbers(indices)
        self.move_all(at, READY, FREE)
        column(self.node)[at] = 0
        if self.fault:
            for index in at.tolist():
                self.fault.pop(index, None)
        self._give_back(array("i", at.tobytes()))
        if self.freed is not None:
            self.freed += at.tolist()

    def take_freed(self) -> tuple[int, ...]:
        """Slots that have become free since the last call, and still are."""
        if not self.freed:
            return ()
        freed, self.freed = self.freed, []
        return tuple(each for each in dict.fromkeys(freed) if each < self.capacity and self.state[each] == FREE)

    def record_use(self, indices: Sequence[int]) -> None:
        """These slots, the last of them the warmest, were used: of interest where slabs may change their size."""

    def free(self, index: int) -> None:
        """Give one slot back. An id out of range or already free is an `IntegrityError`."""
        if not 0 <= index < self.capacity or self.state[index] == FREE:
            raise IntegrityError(f"slot {index} of {self.capacity} is not taken")
        self.move(index, FREE)

    def is_busy(self, index: int) -> bool:
        """Whether a job reads or writes this slot."""
        return self.readers[index] > 0 or index in self.writer

    def clear(self) -> None:
        """Nobody wants any slot any more: those that jobs touch drain, the others are free, the lowest first."""
        busy = {*self.writer, *(i for i, count in enumerate(self.readers) if count)}
        self.node = zeros(self.capacity)
        self.state = bytearray(self.capacity)
        for index in busy:
            self.state[index] = DRAINING
        self.fault = {index: fault for index, fault in self.fault.items() if index in busy}
        self._all_free(sorted(busy))
        if self.freed is not None:
            self.freed = []

    def draining(self) -> list[int]:
        """Slots that wait for the last job that touches them."""
        return [index for index, state in enumerate(self.state) if state == DRAINING]

    def check_integrity(self) -> None:
        """Raise `CacheError` unless the free list, the states and the marks agree."""
        self._check_free([i for i, state in enumerate(self.state) if state == FREE])
        for i, state in enumerate(self.state):
            busy = self.is_busy(i)
            if (state == FREE and (busy or i in self.fault or self.node[i])) or (state == DRAINING and not busy):
                raise CacheError(f"slot {i} is {STATES[state].value}, with {self.readers[i]} readers")
            if (i in self.writer) > (state in (FILLING, DRAINING)):
                raise CacheError(f"slot {i} is {STATES[state].value}, and job {self.writer[i]} writes it")

    # ------------------------------------------------------------------ which are free; all of it differs with slabs

    def _all_free(self, taken: Sequence[int]) -> None:
        """All slots are free but `taken`, which ascend."""
        busy = set(taken)
        self._free = FreeList(array("i", [i for i in range(self.capacity - 1, -1, -1) if i not in busy]))

    def _take(self, count: int, pool: int) -> list[int]:
        """`count` free slots, which there are, free no longer."""
        return self._free.take(count).tolist()[::-1]

    def _give_back(self, indices: array[int]) -> None:
        """These slots are free again."""
        self._free.give(indices)

    def _claim(self, indices: Sequence[int], pools: Sequence[int]) -> None:
        """These slots, which are free, are so no longer; or `CacheError`."""
        if any(pools):
            raise CacheError(f"there is one image size, pool 0; got pools {sorted(set(pools))}")
        wanted = set(indices)
        self._free = FreeList(array("i", [i for i in self._free if i not in wanted]))

    def _give_last(self, indices: Sequence[int]) -> None:
        """These slots, which are free, are given out last."""
        last = dict.fromkeys(indices)
        self._free = FreeList(array("i", [*reversed(last), *(i for i in self._free if i not in last)]))

    def _resize(self, slabs: int) -> None:
        """From now on there are `slabs` slots; those that are not any more are free."""
        new = range(slabs - 1, self.capacity - 1, -1)
        self._free = FreeList(array("i", [*new, *(i for i in self._free if i < slabs)]))

    def _check_free(self, marked: Sequence[int]) -> None:
        """Raise `CacheError` unless `marked`, which ascend, are the free slots."""
        if sorted(self._free) != marked:
            raise CacheError(f"the free list has {len(self._free)} slots, the marks say {len(marked)}")
