"""Slots of one tier: the state of each, whose it is, and which jobs work on it. Every operation is all-or-nothing.

A slot is `FREE` or somebody's. Jobs know slots, not chunks: a chunk may be forgotten while a mover still reads its
slot, which then drains. All per-slot data lie in arrays (13 bytes a slot); what only slots in flight have, a writer
or a fault, lies in small dictionaries.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from longshore.boundary import Status
from longshore.cache.columns import zeros
from longshore.cache.states import DRAINING, FILLING, FREE, READY, STATES, step
from longshore.errors import CacheError, CapacityError


class SlotPool:
    """`capacity` slots of one image size, indexed from zero; lowest free index first at start."""

    __slots__ = ("_free", "capacity", "fault", "node", "readers", "state", "writer")

    def __init__(self, capacity: int) -> None:
        if capacity < 0:
            raise CacheError(f"a pool has zero or more slots, got {capacity}")
        self.capacity = capacity
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
        self._free = array("i", range(capacity - 1, -1, -1))

    @property
    def free_count(self) -> int:
        """Slots that nobody owns."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Slots that somebody owns, what is in flight included."""
        return self.capacity - len(self._free)

    def allocate(self, count: int) -> list[int]:
        """`count` slots, to be filled; or `CapacityError` and no change."""
        free = self._free
        if count < 0:
            raise CacheError(f"cannot allocate {count} slots")
        if count > len(free):
            raise CapacityError(f"{count} slots were asked for, {len(free)} of {self.capacity} are free")
        if count == 0:
            return []
        taken = free[-count:].tolist()[::-1]
        del free[-count:]
        self.move_all(taken, FREE, FILLING)
        return taken

    def move_all(self, indices: Sequence[int], before: int, to: int) -> None:
        """Change the state of slots that are all in state `before`."""
        if not indices:
            return
        state, after = self.state, step(before, to)
        for index in indices:
            if state[index] != before:
                raise CacheError(f"slot {index} is {STATES[state[index]].value}, not {STATES[before].value}")
        for index in indices:
            state[index] = after

    def claim(self, indices: Sequence[int]) -> None:
        """Take these very slots (found occupied, and whole, at start), all or none."""
        wanted = set(indices)
        bad = [i for i in indices if not 0 <= i < self.capacity or self.state[i] != FREE]
        if bad or len(wanted) != len(indices):
            raise CacheError(f"slots to claim must be free, distinct and below {self.capacity}: {bad or indices}")
        self.move_all(indices, FREE, READY)
        self._free = array("i", [i for i in self._free if i not in wanted])

    def resize(self, capacity: int) -> None:
        """Have `capacity` slots from now on. Raises `CapacityError`, and changes nothing, while one above is taken."""
        if capacity < 0:
            raise CacheError(f"a pool has zero or more slots, got {capacity}")
        taken = sum(state != FREE for state in self.state[capacity:])
        if taken:
            raise CapacityError(f"{taken} slots from {capacity} on are taken, of {self.capacity}")
        more = max(0, capacity - self.capacity)
        self.state = self.state[:capacity] + bytearray(more)
        self.node = self.node[:capacity] + zeros(more)
        self.readers = self.readers[:capacity] + zeros(more)
        new = range(capacity - 1, self.capacity - 1, -1)
        self._free = array("i", [*new, *(i for i in self._free if i < capacity)])
        self.capacity = capacity

    def move(self, index: int, to: int) -> None:
        """Change the state of a slot; raises `StateError` for an edge that the table does not have."""
        self.state[index] = step(self.state[index], to)
        if to == FREE:
            self.node[index] = 0
            self._free.append(index)
            if self.fault:
                self.fault.pop(index, None)

    def free_all(self, indices: Sequence[int]) -> None:
        """Slots that were ready, and that no job touches, are free."""
        self.move_all(indices, READY, FREE)
        for index in indices:
            self.node[index] = 0
            if self.fault:
                self.fault.pop(index, None)
        self._free.extend(indices)

    def free(self, index: int) -> None:
        """Give one slot back. An id out of range or already free is a `CacheError`."""
        if not 0 <= index < self.capacity or self.state[index] == FREE:
            raise CacheError(f"slot {index} of {self.capacity} is not taken")
        self.move(index, FREE)

    def is_busy(self, index: int) -> bool:
        """Whether a job reads or writes this slot."""
        return self.readers[index] > 0 or index in self.writer

    def clear(self) -> None:
        """Nobody wants any slot any more: those that jobs touch drain, the others are free, the lowest first."""
        busy = {*self.writer, *(i for i, count in enumerate(self.readers) if count)}
        for index in sorted(busy):
            if self.state[index] != DRAINING:
                self.move(index, DRAINING)
        self.node = zeros(self.capacity)
        self.state = bytearray(self.capacity)
        for index in busy:
            self.state[index] = DRAINING
        self._free = array("i", [i for i in range(self.capacity - 1, -1, -1) if i not in busy])

    def draining(self) -> list[int]:
        """Slots that wait for the last job that touches them."""
        return [index for index, state in enumerate(self.state) if state == DRAINING]

    def check_integrity(self) -> None:
        """Raise `CacheError` unless the free list, the states and the marks agree."""
        marked = [i for i, state in enumerate(self.state) if state == FREE]
        if sorted(self._free) != marked:
            raise CacheError(f"the free list has {len(self._free)} slots, the marks say {len(marked)}")
        for i, state in enumerate(self.state):
            busy = self.is_busy(i)
            if (state == FREE and (busy or i in self.fault or self.node[i])) or (state == DRAINING and not busy):
                raise CacheError(f"slot {i} is {STATES[state].value}, with {self.readers[i]} readers")
            if (i in self.writer) > (state in (FILLING, DRAINING)):
                raise CacheError(f"slot {i} is {STATES[state].value}, and job {self.writer[i]} writes it")
