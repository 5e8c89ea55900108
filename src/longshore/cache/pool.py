"""Slots of one tier: the state, the chunk, and the jobs of each. Every operation is all-or-nothing.

Jobs name slots, not chunks: a chunk may be removed while a mover still reads its slot, which then drains. The data of
slots are in arrays (13 bytes per slot); writers and faults, which few slots have, are in dictionaries.
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
from longshore.cache.columns import FreeList, as_i32, filled, has_duplicates, i32_view, resized, u8_view
from longshore.errors import CacheError, CapacityError, IntegrityError, StateError


class SlotState(enum.Enum):
    """State of a slot."""

    FREE = "free"
    FILLING = "filling"
    READY = "ready"
    DRAINING = "draining"


# The states of a slot, as one table.
#
#     FREE ──► FILLING ──► READY ──► FREE         without failures
#                 │           │
#                 └► DRAINING ◄┘ ──► FREE         removed, while a mover still uses it
#
# Lookups find `READY` slots only. A `DRAINING` slot is not in the index, and cannot be allocated until the last job
# that uses it has ended. The table is used by the code, by the tests (which report the edges taken) and by
# docs/architecture.md.

EDGES = MappingProxyType(
    {
        (SlotState.FREE, SlotState.FILLING): "a job was ordered to write it",
        (SlotState.FREE, SlotState.READY): "recovered at start from an earlier process",
        (SlotState.FILLING, SlotState.READY): "all bytes are in place, of this generation, from all ranks",
        (SlotState.FILLING, SlotState.FREE): "the write failed, and no reader waits",
        (SlotState.FILLING, SlotState.DRAINING): "no longer wanted, or failed while readers wait",
        (SlotState.READY, SlotState.FREE): "evicted or removed, without readers",
        (SlotState.READY, SlotState.DRAINING): "removed with active readers",
        (SlotState.DRAINING, SlotState.FREE): "the last job that used it has ended",
    }
)
"""Every legal edge, with its meaning."""

STATES = tuple(SlotState)
"""The state of a slot is stored as its index here."""

FREE, FILLING, READY, DRAINING = range(len(STATES))

_LEGAL = bytes((before, after) in EDGES for before in STATES for after in STATES)


def transition(state: int, to: int, where: str = "") -> int:
    """`to`, if the table has the edge; raises `StateError` otherwise. Both are indices into `STATES`."""
    if not _LEGAL[state * len(STATES) + to]:
        raise StateError(f"{where}a slot cannot go from {STATES[state].value} to {STATES[to].value}")
    return to


_PER_SECOND, _LATEST = 16, 2**31 - 1
"""Times of slots are in sixteenths of a second, in 31 bits, which last for four years."""


class SlotPool:
    """Slots of one image size, indexed from zero; the lowest free index is allocated first at start.

    `slab_pool.SlabPool` has slots of several sizes. The parameters `size_class` are for these; here they are 0.
    """

    __slots__ = (
        "_free",
        "capacity",
        "freed",
        "invalid",
        "node",
        "readers",
        "slabs",
        "state",
        "where",
        "writer",
        "written",
    )

    def __init__(self, slots: int | Slabs) -> None:
        """`slots`: slabs of one slot each, or their number if the image size does not matter."""
        if not isinstance(slots, Slabs):
            if slots < 0:
                raise CacheError(f"expected zero or more slots, got {slots}")
            slots = Slabs.of_one_size(1, slots)
        self.slabs = slots
        self.where = ""
        """The tier of the slots, as errors begin with it: `host tier: `; empty if it is not known."""
        self.capacity = capacity = slots.indices
        """Indices of slots are below this one."""
        self.state = filled(capacity, FREE, np.uint8)
        """Index into `STATES`, by slot."""
        self.node = filled(capacity)
        """The node of the chunk in each slot; 0 for none."""
        self.readers = filled(capacity)
        """Number of jobs that read each slot."""
        self.written = filled(capacity)
        """When each slot was filled, in sixteenths of a second; 0 if it was not by this process."""
        self.writer: dict[int, int] = {}
        """The job that fills a slot."""
        self.invalid: dict[int, Status] = {}
        """The status of slots whose bytes are invalid: reads of them in flight fail with it."""
        self.freed: list[int] | None = None
        """Slots freed since `take_freed`, some of them allocated again; `None` if it is not called."""
        self._all_free(())

    @property
    def used(self) -> int:
        """Number of slots that are not free."""
        return self.capacity - len(self._free)

    @property
    def used_bytes(self) -> int:
        """Bytes of these."""
        return self.used * self.slabs.slab_bytes

    def used_by(self, size_class: int) -> tuple[int, int]:
        """Slabs assigned to `size_class`, and their slots that are not free."""
        return self.used, self.used

    def room(self, size_class: int = 0) -> int:
        """Number of slots of `size_class` available."""
        return len(self._free)

    def size_class_of(self, index: int) -> int:
        """The size class of a slot that is not free."""
        return 0

    def size_classes_of(self, slots: npt.NDArray[np.int32]) -> npt.NDArray[np.integer[Any]]:
        """The same for `slots`."""
        return np.zeros(len(slots), np.int32)

    def allocate(self, count: int, size_class: int = 0) -> list[int]:
        """Allocate `count` slots of `size_class`, to be filled. Raises `CapacityError` with nothing changed."""
        if count < 0:
            raise CacheError(f"{self.where}cannot allocate {count} slots")
        if count > self.room(size_class):
            free = f"{self.room(size_class)} of {self.capacity} are free"
            raise CapacityError(f"{self.where}cannot allocate {count} slots: {free}")
        taken = self._take(count, size_class)
        self.move_all(taken, FREE, FILLING)
        return taken

    def move_all(self, indices: Sequence[int] | npt.NDArray[np.int32], before: int, to: int) -> None:
        """Change the state of slots that are all in state `before`."""
        state, after, slots = u8_view(self.state), transition(before, to, self.where), as_i32(indices)
        if state[slots].tobytes().count(before) < len(slots):
            index = next(index for index in slots.tolist() if state[index] != before)
            found = STATES[state[index]].value
            raise IntegrityError(f"{self.where}slot {index} is {found}, not {STATES[before].value}")
        state[slots] = after

    def claim(
        self, indices: Sequence[int] | npt.NDArray[np.int64], size_classes: Sequence[int] | npt.NDArray[np.int64]
    ) -> None:
        """Allocate recovered slots of `size_classes`, the most recently used one last; all or none."""
        slots = np.asarray(indices, np.int64)
        bad = (slots < 0) | (slots >= self.capacity)
        bad[~bad] = u8_view(self.state)[slots[~bad]] != FREE
        if bad.any() or has_duplicates(slots):
            wrong = (slots[bad] if bad.any() else slots).tolist()
            raise CacheError(f"{self.where}expected free, distinct slots below {self.capacity}, got {wrong[:9]}")
        self._claim(slots, np.asarray(size_classes, np.int64))
        self.move_all(slots.astype(np.int32), FREE, READY)
        i32_view(self.written)[slots] = 0

    def check_slots(self, indices: Sequence[int]) -> None:
        """Raise `CacheError` unless these are indices of slots."""
        bad = [index for index in indices if not 0 <= index < self.capacity]
        if bad:
            raise CacheError(f"{self.where}expected slots in [0, {self.capacity}), got {bad[0]}")

    def give_last(self, indices: Sequence[int]) -> None:
        """Allocate those of these slots that are free last, in order. Raises `CacheError` if one is out of range."""
        self.check_slots(indices)
        if len(indices):
            self._give_last([index for index in indices if self.state[index] == FREE])

    def resize(self, slabs: int) -> None:
        """Resize to `slabs` slabs. Raises `CapacityError`, with nothing changed, if a slot above is not free."""
        if slabs < 0:
            raise CacheError(f"{self.where}expected zero or more slots, got {slabs}")
        after = replace(self.slabs, slabs=slabs)
        capacity = after.indices
        taken = sum(state != FREE for state in self.state[capacity:])
        if taken:
            how = f"from {self.capacity} to {capacity} slots: {taken} above are in use"
            raise CapacityError(f"{self.where}cannot resize {how}")
        self.state, self.node = resized(self.state, capacity, FREE), resized(self.node, capacity)
        self.readers, self.written = resized(self.readers, capacity), resized(self.written, capacity)
        self._resize(slabs)
        self.slabs, self.capacity = after, capacity

    def mark_written(self, slots: npt.NDArray[np.int32], now: float) -> None:
        """`slots` were filled at `now`, in seconds."""
        i32_view(self.written)[slots] = min(int(now * _PER_SECOND), _LATEST)

    def age(self, index: int, now: float) -> float | None:
        """Seconds since a slot was filled; `None` if this process has not filled it."""
        written = self.written[index]
        return max(now - written / _PER_SECOND, 0.0) if written else None

    def ages(self, slots: npt.NDArray[np.int32], now: float) -> npt.NDArray[np.float64]:
        """Seconds since `slots` were filled, without those that this process has not filled."""
        written = i32_view(self.written)[slots]
        ages: npt.NDArray[np.float64] = np.maximum(now - written[written > 0] / _PER_SECOND, 0.0)
        return ages

    def move(self, index: int, to: int) -> None:
        """Change the state of a slot; raises `StateError` for an edge that the table does not have."""
        self.state[index] = transition(self.state[index], to, self.where)
        if to == FREE:
            self.node[index] = 0
            self._give_back(array("i", (index,)))
            if self.freed is not None:
                self.freed.append(index)
            if self.invalid:
                self.invalid.pop(index, None)

    def free_all(self, indices: Sequence[int] | npt.NDArray[np.int32]) -> None:
        """Free slots that were ready, and that no job uses."""
        slots = as_i32(indices)
        self.move_all(slots, READY, FREE)
        i32_view(self.node)[slots] = 0
        if self.invalid:
            for index in slots.tolist():
                self.invalid.pop(index, None)
        self._give_back(array("i", slots.tobytes()))
        if self.freed is not None:
            self.freed += slots.tolist()

    def take_freed(self) -> tuple[int, ...]:
        """Slots that were freed since the last call, and are still free."""
        if not self.freed:
            return ()
        freed, self.freed = self.freed, []
        return tuple(each for each in dict.fromkeys(freed) if each < self.capacity and self.state[each] == FREE)

    def record_use(self, indices: Sequence[int]) -> None:
        """Slots were used, the last of them most recently. `SlabPool` orders slabs by it."""

    def free(self, index: int) -> None:
        """Free a slot. Raises `IntegrityError` if it is out of range or free."""
        if not 0 <= index < self.capacity or self.state[index] == FREE:
            raise IntegrityError(f"{self.where}slot {index} of {self.capacity} is not in use")
        self.move(index, FREE)

    def is_busy(self, index: int) -> bool:
        """Whether a job reads or writes this slot."""
        return self.readers[index] > 0 or index in self.writer

    def clear(self) -> None:
        """Free all slots; those that jobs use drain."""
        busy = {*self.writer, *(i for i, count in enumerate(self.readers) if count)}
        self.node = filled(self.capacity)
        self.state = filled(self.capacity, FREE, np.uint8)
        for index in busy:
            self.state[index] = DRAINING
        self.invalid = {index: status for index, status in self.invalid.items() if index in busy}
        self._all_free(sorted(busy))
        if self.freed is not None:
            self.freed = []

    def check_integrity(self) -> None:
        """Raise `CacheError` if free list, states and counts are inconsistent."""
        state, busy = u8_view(self.state), i32_view(self.readers) > 0
        written = as_i32([*self.writer])
        busy[written] = True
        is_free, blamed = state == FREE, i32_view(self.node) != 0
        blamed[as_i32([*self.invalid])] = True
        self._check_free(np.flatnonzero(is_free).tolist())
        wrong = np.flatnonzero((is_free & (busy | blamed)) | ((state == DRAINING) & ~busy)).tolist()
        wrong += written[(state[written] != FILLING) & (state[written] != DRAINING)].tolist()
        for i in wrong:
            told = f"{self.readers[i]} readers, writer {self.writer.get(i)}, node {self.node[i]}"
            raise CacheError(f"{self.where}slot {i} is {STATES[self.state[i]].value}, with {told}")

    # ------------------------------------------------------------------ which are free; all of it differs with slabs

    def _all_free(self, taken: Sequence[int]) -> None:
        """Make all slots free except the ascending `taken`."""
        busy = set(taken)
        self._free = FreeList(array("i", [i for i in range(self.capacity - 1, -1, -1) if i not in busy]))

    def _take(self, count: int, size_class: int) -> list[int]:
        """Remove `count` slots from the free list, which has as many."""
        return self._free.take(count).tolist()[::-1]

    def _give_back(self, indices: array[int]) -> None:
        """Add slots to the free list."""
        self._free.give(indices)

    def _claim(self, slots: npt.NDArray[np.int64], size_classes: npt.NDArray[np.int64]) -> None:
        """Remove the free `slots` from the free list. Raises `CacheError` for another size class."""
        if size_classes.any():
            raise CacheError(f"expected size class 0, as all images have one size; got {np.unique(size_classes)}")
        wanted, free = np.zeros(self.capacity, bool), as_i32(array("i", self._free))
        wanted[slots] = True
        self._free = FreeList(array("i", free[~wanted[free]].tobytes()))

    def _give_last(self, indices: Sequence[int]) -> None:
        """Move these free slots to the end of the free list."""
        last = dict.fromkeys(indices)
        self._free = FreeList(array("i", [*reversed(last), *(i for i in self._free if i not in last)]))

    def _resize(self, slabs: int) -> None:
        """Resize the free list to `slabs` slots; those removed are free."""
        new = range(slabs - 1, self.capacity - 1, -1)
        self._free = FreeList(array("i", [*new, *(i for i in self._free if i < slabs)]))

    def _check_free(self, marked: Sequence[int]) -> None:
        """Raise `CacheError` unless the ascending `marked` are the free slots."""
        if sorted(self._free) != marked:
            raise CacheError(f"{self.where}free list: counted {len(self._free)} slots, found {len(marked)} free")
