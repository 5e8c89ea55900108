"""Slots of several image sizes: slabs, each assigned to one size, a *size class*, while one of its slots is not free.

    slab     0          1          2          3
    size class     A          B          A          unassigned
    slots    x x x ·    x -        · x x x    -

A size class allocates from its own slabs first, the one assigned last, then from an unassigned one. The last use of
each slab is known: the least recently used slab is reclaimed first for another size.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from longshore.boundary import Slabs
from longshore.cache.columns import LISTS, LinkedLists, as_i32, filled, i32_view, resized, u8_view
from longshore.cache.pool import FREE, SlotPool
from longshore.errors import CacheError

NOBODY = 255
"""The size class of an unassigned slab."""

_NONE = -1

_Numbers = npt.NDArray[np.int64]


class SlabPool(SlotPool):
    """Slots of all sizes of `slabs`. Every operation on a slot is O(1); 20 bytes per slab, and 4 per slot."""

    __slots__ = (
        "_ages",
        "_clock",
        "_fresh",
        "_next",
        "_open",
        "_partial",
        "_returned",
        "_spare",
        "_taken",
        "_used_at",
        "owner",
    )

    def __init__(self, slabs: Slabs) -> None:
        if len(slabs.image_bytes) >= min(NOBODY, LISTS):
            raise CacheError(f"expected fewer than {NOBODY} image sizes, got {len(slabs.image_bytes)}")
        super().__init__(slabs)

    @property
    def used(self) -> int:
        """Number of slots that are not free."""
        return sum(self._taken)

    @property
    def used_bytes(self) -> int:
        """Bytes of these."""
        sizes = self.slabs.image_bytes
        return sum(taken * sizes[owner] for taken, owner in zip(self._taken, self.owner, strict=True) if taken)

    def used_by(self, size_class: int) -> tuple[int, int]:
        """Slabs assigned to `size_class`, and their slots that are not free."""
        taken = [count for count, owner in zip(self._taken, self.owner, strict=True) if owner == size_class]
        return len(taken), sum(taken)

    def room(self, size_class: int = 0) -> int:
        """Number of slots of `size_class` available, in its slabs and in unassigned ones."""
        return self._open[size_class] + len(self._spare) * self.slabs.images[size_class]

    def shortage(self, wanted: Mapping[int, int]) -> tuple[int, int]:
        """A size class that lacks slots if `wanted`, by size class, are allocated together, and how many; 0 if none."""
        spare = len(self._spare)
        for size_class, count in sorted(wanted.items()):
            images = self.slabs.images[size_class]
            begun = max(0, -(-(count - self._open[size_class]) // images))
            if begun > spare:
                return size_class, count - self._open[size_class] - spare * images
            spare -= begun
        return 0, 0

    def leading(self, size_classes: Sequence[int]) -> int:
        """How many leading slots, one of each of `size_classes`, can be allocated together."""
        left, spare = list(self._open), len(self._spare)
        for position, size_class in enumerate(size_classes):
            if not left[size_class]:
                if not spare:
                    return position
                spare -= 1
                left[size_class] = self.slabs.images[size_class]
            left[size_class] -= 1
        return len(size_classes)

    def size_class_of(self, index: int) -> int:
        """The size class of a slot that is not free."""
        return self.owner[index // self.slabs.stride]

    def size_classes_of(self, slots: npt.NDArray[np.int32]) -> npt.NDArray[np.integer[Any]]:
        """The same for `slots`."""
        return u8_view(self.owner)[slots // self.slabs.stride]

    def record_use(self, indices: Sequence[int]) -> None:
        """Slots and their slabs were used, the last of them most recently."""
        self._clock += 1
        stride = self.slabs.stride
        for slab in dict.fromkeys(index // stride for index in indices):
            self._ages.remove(slab + LISTS)
            self._ages.append(self.owner[slab], slab + LISTS)
            self._used_at[slab] = self._clock

    def last_use(self, size_class: int) -> float:
        """Last use of the least recently used slab of `size_class`; infinity if there is none."""
        slab = self._ages.first(size_class) - LISTS
        return self._used_at[slab] if slab >= 0 else float("inf")

    def slabs_of_others(self, size_class: int) -> Iterator[tuple[int, int]]:
        """Slabs of other size classes and their last uses, least recently used first. Not to be changed meanwhile."""
        lists = (
            ((self._used_at[each - LISTS], each - LISTS) for each in self._ages.walk(other))
            for other in range(len(self.slabs.images))
            if other != size_class
        )
        return ((slab, used) for used, slab in heapq.merge(*lists))

    def contents(self, slab: int) -> list[int]:
        """The slots of a slab that are not free."""
        return [i for i in self.slabs.slots_of(slab, self.owner[slab]) if self.state[i] != FREE]

    # ------------------------------------------------------------------ which are free

    def _all_free(self, taken: Sequence[int]) -> None:
        count, size_classes = self.slabs.slabs, len(self.slabs.images)
        before = [self.size_class_of(index) for index in taken]
        self.owner = filled(count, NOBODY, np.uint8)
        """The size class of each slab."""
        self._taken = filled(count)
        self._fresh = filled(count)
        self._returned = filled(count, _NONE)
        self._next = filled(self.capacity, _NONE)
        self._used_at = array("q", bytes(8 * count))
        self._clock = 0
        self._spare = array("i", range(count - 1, -1, -1))
        self._open = [0] * size_classes
        self._partial, self._ages = LinkedLists(LISTS + count), LinkedLists(LISTS + count)
        self._claim(taken, before)

    def _take(self, count: int, size_class: int) -> list[int]:
        taken: list[int] = []
        while len(taken) < count:
            slab = self._partial.last(size_class) - LISTS
            if slab < 0:
                slab = self._begin(self._spare.pop(), size_class)
            taken += self._take_from(slab, count - len(taken))
        return taken

    def _begin(self, slab: int, size_class: int) -> int:
        """Assign `slab` to `size_class`. It was unassigned, and was removed from the list of these."""
        self.owner[slab] = size_class
        self._fresh[slab], self._returned[slab] = 0, _NONE
        self._open[size_class] += self.slabs.images[size_class]
        self._partial.append(size_class, slab + LISTS)
        self._clock += 1
        self._used_at[slab] = self._clock
        self._ages.append(size_class, slab + LISTS)
        return slab

    def _take_from(self, slab: int, count: int) -> list[int]:
        """At most `count` free slots of `slab`: the last freed first, then those never used."""
        size_class = self.owner[slab]
        images, first = self.slabs.images[size_class], slab * self.slabs.stride
        taken: list[int] = []
        index = self._returned[slab]
        while index != _NONE and len(taken) < count:
            taken.append(index)
            index = self._next[index]
        self._returned[slab] = index
        fresh = self._fresh[slab]
        more = min(count - len(taken), images - fresh)
        taken += range(first + fresh, first + fresh + more)
        self._fresh[slab] = fresh + more
        self._taken[slab] += len(taken)
        self._open[size_class] -= len(taken)
        if self._taken[slab] == images:
            self._partial.remove(slab + LISTS)
        return taken

    def _give_back(self, indices: array[int]) -> None:
        stride = self.slabs.stride
        for index in indices:
            slab = index // stride
            size_class = self.owner[slab]
            images = self.slabs.images[size_class]
            if self._taken[slab] == images:
                self._partial.prepend(size_class, slab + LISTS)
            self._taken[slab] -= 1
            self._open[size_class] += 1
            self._next[index] = self._returned[slab]
            self._returned[slab] = index
            if not self._taken[slab]:
                self._end(slab)

    def _end(self, slab: int) -> None:
        size_class = self.owner[slab]
        self._partial.remove(slab + LISTS)
        self._ages.remove(slab + LISTS)
        self._open[size_class] -= self.slabs.images[size_class]
        self.owner[slab] = NOBODY
        self._spare.append(slab)

    def _claim(self, indices: Sequence[int] | _Numbers, size_classes: Sequence[int] | _Numbers) -> None:
        given, of, images = (
            np.asarray(indices, np.int64),
            np.asarray(size_classes, np.int64),
            np.array(self.slabs.images),
        )
        slab, position = np.divmod(given, self.slabs.stride)
        bad = (of < 0) | (of >= len(images))
        bad |= position >= images[np.where(bad, 0, of)]
        if bad.any():
            raise CacheError(f"{self.where}size class {of[bad.argmax()]} has no slot {given[bad.argmax()]}")
        slabs, last, slab_of = np.unique(slab[::-1], return_index=True, return_inverse=True)
        last, slab_of = len(given) - 1 - last, slab_of[::-1]
        owner = u8_view(self.owner)[slab]
        bad = (of != of[last][slab_of]) | ((owner != NOBODY) & (owner != of))
        if bad.any():
            raise CacheError(f"slot {given[bad.argmax()]} has another image size than its slab {slab[bad.argmax()]}")
        slots = np.sort(given)
        fresh = owner[last] == NOBODY
        self._begin_all(slab[np.sort(last[fresh])], of[np.sort(last[fresh])], slots)
        ends = np.searchsorted(slots, (slabs[~fresh] + 1) * self.slabs.stride).tolist()
        for each, end in zip(slabs[~fresh].tolist(), ends, strict=True):
            self._take_exactly(each, set(slots[np.searchsorted(slots, each * self.slabs.stride) : end].tolist()))
        self.record_use(given[np.sort(last[~fresh])].tolist())

    def _give_last(self, indices: Sequence[int]) -> None:
        """Of slabs: those that are assigned already."""
        last = dict.fromkeys(index // self.slabs.stride for index in indices)
        spare = [slab for slab in reversed(last) if self.owner[slab] == NOBODY]
        self._spare = array("i", [*spare, *(slab for slab in self._spare if slab not in last)])

    def _begin_all(self, slabs: _Numbers, size_classes: _Numbers, slots: _Numbers) -> None:
        """Assign `slabs` to `size_classes`, the most recently used last; the ascending `slots` of them are not free."""
        if not len(slabs):
            return
        stride, images = self.slabs.stride, np.array(self.slabs.images)
        u8_view(self.owner)[slabs] = size_classes
        spare = as_i32(self._spare)
        self._spare = array("i", spare[u8_view(self.owner)[spare] == NOBODY].tobytes())
        times = np.frombuffer(self._used_at, np.int64)
        times[slabs] = self._clock + 1 + np.arange(len(slabs))
        self._clock += len(slabs)
        is_free = np.zeros((len(slabs), stride), np.bool_)
        order = np.argsort(slabs)
        rising, room = slabs[order], images[size_classes[order]]
        is_free[:] = np.arange(stride) < room[:, None]
        mine = slots[np.isin(slots // stride, rising)]
        is_free[np.searchsorted(rising, mine // stride), mine % stride] = False
        row, position = np.nonzero(is_free)
        left = rising[row] * stride + position
        following = np.append(left[1:], _NONE)
        following[:-1][row[1:] != row[:-1]] = _NONE
        i32_view(self._next)[left] = following
        count = is_free.sum(axis=1)
        i32_view(self._fresh)[rising], i32_view(self._taken)[rising] = room, room - count
        first = np.full(len(rising), _NONE)
        rows, heads = np.unique(row, return_index=True)
        first[rows] = left[heads]
        i32_view(self._returned)[rising] = first
        for size_class in range(len(images)):
            own = size_classes[order] == size_class
            self._open[size_class] += int(count[own].sum())
            self._partial.prepend_all(size_class, rising[own & (count > 0)] + LISTS)
            self._ages.extend(size_class, slabs[size_classes == size_class] + LISTS)

    def _take_exactly(self, slab: int, wanted: set[int]) -> None:
        size_class = self.owner[slab]
        free = self._take_from(slab, self.slabs.images[size_class])
        self._give_back(array("i", (index for index in reversed(free) if index not in wanted)))

    def _resize(self, slabs: int) -> None:
        before = len(self.owner)
        more = max(0, slabs - before)
        self.owner = resized(self.owner, slabs, NOBODY)
        for name in ("_taken", "_fresh", "_returned"):
            setattr(self, name, resized(getattr(self, name), slabs))
        self._used_at = self._used_at[:slabs] + array("q", bytes(8 * more))
        self._next = resized(self._next, slabs * self.slabs.stride)
        self._partial.grow(LISTS + slabs)
        self._ages.grow(LISTS + slabs)
        self._spare = array("i", [*range(slabs - 1, before - 1, -1), *(i for i in self._spare if i < slabs)])

    def _check_free(self, marked: Sequence[int]) -> None:
        stride, images = self.slabs.stride, self.slabs.images
        counts = np.bincount(np.array(marked, np.int64) // stride, minlength=len(self.owner)).tolist()
        ends, spare = np.cumsum(counts).tolist(), set(self._spare)
        open_slots = [0] * len(images)
        partial = [set(self._partial.walk(size_class)) for size_class in range(len(images))]
        ages = [set(self._ages.walk(size_class)) for size_class in range(len(images))]
        for size_class in range(len(images)):
            self._partial.check_integrity(size_class)
            self._ages.check_integrity(size_class)
        for slab, size_class in enumerate(self.owner):
            if (size_class == NOBODY) != (counts[slab] == stride) or (size_class == NOBODY) != (slab in spare):
                raise CacheError(f"slab {slab} of size class {size_class} has {counts[slab]} of {stride} slots free")
            if size_class == NOBODY:
                continue
            free = set(marked[ends[slab] - counts[slab] : ends[slab]])
            slots = self.slabs.slots_of(slab, size_class)
            listed = {*range(slots.start + self._fresh[slab], slots.stop), *self._walk(slab)}
            if listed != free.intersection(slots) or len(slots) - len(listed) != self._taken[slab]:
                raise CacheError(f"slab {slab} lists {len(listed)} free slots, but counts {self._taken[slab]} in use")
            if len(free) - len(listed) != stride - len(slots):
                raise CacheError(f"{self.where}slab {slab} has data after its {len(slots)} slots of class {size_class}")
            open_slots[size_class] += len(listed)
            if (slab + LISTS in partial[size_class]) != bool(listed) or slab + LISTS not in ages[size_class]:
                raise CacheError(f"{self.where}slab {slab} of size class {size_class} is in the wrong lists")
        if open_slots != self._open or sum(map(len, ages)) + len(self._spare) != len(self.owner):
            raise CacheError(f"{self.where}size classes count {self._open} free slots, but have {open_slots}")

    def _walk(self, slab: int) -> Iterator[int]:
        index = self._returned[slab]
        while index != _NONE:
            yield index
            index = self._next[index]
