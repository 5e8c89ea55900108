"""Slots of one tier: who is taken, who is free. Every operation is all-or-nothing."""

from __future__ import annotations

from longshore.errors import CacheError, CapacityError


class SlotPool:
    """`capacity` slots of one image size, indexed from zero; lowest free index first at start."""

    __slots__ = ("_free", "_taken", "capacity")

    def __init__(self, capacity: int) -> None:
        if capacity < 0:
            raise CacheError(f"a pool has zero or more slots, got {capacity}")
        self.capacity = capacity
        self._taken = bytearray(capacity)
        self._free = list(range(capacity - 1, -1, -1))

    @property
    def free_count(self) -> int:
        """Slots that nobody owns."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Slots that somebody owns, what is in flight included."""
        return self.capacity - len(self._free)

    def allocate(self, count: int) -> list[int]:
        """`count` slots, or `CapacityError` and no change."""
        if count < 0:
            raise CacheError(f"cannot allocate {count} slots")
        if count > len(self._free):
            raise CapacityError(f"{count} slots were asked for, {len(self._free)} of {self.capacity} are free")
        if count == 0:
            return []
        taken = self._free[-count:][::-1]
        del self._free[-count:]
        for index in taken:
            self._taken[index] = 1
        return taken

    def claim(self, indices: list[int]) -> None:
        """Take these very slots (found occupied at start), all or none."""
        wanted = set(indices)
        bad = [i for i in indices if not 0 <= i < self.capacity or self._taken[i]]
        if bad or len(wanted) != len(indices):
            raise CacheError(f"slots to claim must be free, distinct and below {self.capacity}: {bad or indices}")
        for index in indices:
            self._taken[index] = 1
        self._free = [i for i in self._free if i not in wanted]

    def free(self, index: int) -> None:
        """Give one slot back. An id out of range or already free is a `CacheError`."""
        if not 0 <= index < self.capacity or not self._taken[index]:
            raise CacheError(f"slot {index} of {self.capacity} is not taken")
        self._taken[index] = 0
        self._free.append(index)

    def check_integrity(self) -> None:
        """Raise `CacheError` unless the free list and the marks agree."""
        marked = [i for i in range(self.capacity) if not self._taken[i]]
        if sorted(self._free) != marked:
            raise CacheError(f"the free list has {len(self._free)} slots, the marks say {len(marked)}")
