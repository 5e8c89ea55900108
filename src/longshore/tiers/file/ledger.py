"""What the index knows, in memory: the entry of each slot, when it was used, and what the disk says of it.

    entries   slot 0: a    slot 1: -    slot 2: b    slot 3: c
    told      yes          no           yes          no            whether checkpoint and journal, as they lie on disk,
                                                                   list a record there

Only what the disk lists has to be struck from it. A slab has the entries of one pool: whoever writes for another ends
them all, with one strike.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from longshore.boundary import Key
from longshore.slabs import Slabs
from longshore.tiers.file.index_format import ENTRY, Entries

_SIZE = ENTRY.itemsize
_WHOLE = np.dtype((np.void, _SIZE))  # an entry as a piece of memory: as `ENTRY`, it is copied field by field
_NOTHING = bytes(_SIZE)
_KEY, _SCOPE = slice(0, 32), slice(64, 96)  # of an entry


class Ledger:
    """The entries of the slots of `slabs`, at first `entries`, least recently used first. Not thread-safe.

    Attributes:
        strikable: How many slots the disk lists a record of: none needs more than one strike.
    """

    def __init__(self, slabs: Slabs, entries: Entries) -> None:
        self._stride = slabs.stride
        self._table: Entries = np.zeros(slabs.indices, ENTRY)
        self._rows = self._table.view(np.uint8).data
        self._lengths, self._sequences, self._hits = (self._table[name] for name in ("length", "sequence", "hits"))
        self._used: npt.NDArray[np.int64] = np.zeros(slabs.indices, np.int64)
        self._clock = len(entries)
        self._told = np.zeros(slabs.indices, np.bool_)
        self._pools = np.zeros(slabs.slabs, np.uint16)  # of each slab; that of one without entries means nothing
        self._is_told, self._pool_of = self._told.view(np.uint8).data, self._pools.data  # the same, a place at a time
        slots = entries["slot"]
        self._table.view(_WHOLE)[slots] = np.ascontiguousarray(entries).view(_WHOLE)
        self._used[slots] = np.arange(1, self._clock + 1)
        self._told[slots] = True
        self._pools[slots // self._stride] = entries["pool"]
        self.strikable = len(entries)

    def sequence(self, slot: int) -> int:
        """The write sequence number of the record in `slot`; 0 without one."""
        return int(self._sequences[slot])

    def pool_of(self, slot: int) -> int:
        """The pool that the slab of `slot` was given to last."""
        return self._pool_of[slot // self._stride]

    def claimed(self, slot: int, pool: int, key: Key, scope: bytes) -> int:
        """The write sequence number of the record in `slot`, if there is one of `key` in `scope`; otherwise 0."""
        record = bytes(self._rows[slot * _SIZE : (slot + 1) * _SIZE])
        if record[_KEY] != key or record[_SCOPE] != scope or self.pool_of(slot) != pool:
            return 0
        return int(self._sequences[slot])

    def to_strike(self, slot: int, pool: int) -> range:
        """What the disk must no longer list before `slot` of `pool` may be written: slots, or none.

        That is the slot, or, if its slab is another pool's so far, all of that.
        """
        if self.pool_of(slot) == pool:
            return range(slot, slot + self._is_told[slot])
        slab = self._slab(slot)
        return range(slab.start, slab.stop if self._told[slab].any() else slab.start)

    def clear(self, slot: int, pool: int) -> list[int]:
        """`slot` of `pool` holds nothing, nor does its slab for other pools; the slots that did are returned."""
        if self.pool_of(slot) == pool:
            if not self._lengths[slot]:
                return []
            self._rows[slot * _SIZE : (slot + 1) * _SIZE] = _NOTHING
            return [slot]
        slab = self._slab(slot)
        ended: list[int] = (np.flatnonzero(self._lengths[slab]) + slab.start).tolist()
        self._table[slab] = np.zeros(1, ENTRY)
        self._pools[slot // self._stride] = pool
        return ended

    def note_struck(self, which: range) -> None:
        """The disk lists nothing of these slots any more."""
        for slot in which:
            self.strikable -= self._is_told[slot]
            self._is_told[slot] = 0

    def note_entered(self, slot: int) -> None:
        """The disk lists the record in `slot`."""
        self.strikable += not self._is_told[slot]
        self._is_told[slot] = 1

    def enter(self, slot: int, entry: bytes) -> None:
        """There is a record in `slot`, used just now; of its slab, nothing of other pools is left."""
        self._rows[slot * _SIZE : (slot + 1) * _SIZE] = entry
        self.use(slot)

    def use(self, slot: int) -> None:
        """The record in `slot` is the one used last."""
        self._clock += 1
        self._used[slot] = self._clock

    def count_hit(self, slot: int) -> None:
        """The record in `slot` was served."""
        self._hits[slot] += 1
        self.use(slot)

    def forget(self, generation: int) -> None:
        """Drop what is older than `generation`: nobody believes the disk if it lists that."""
        older = self._table["generation"] < generation
        self._table[older] = np.zeros(1, ENTRY)
        self._told[older] = False
        self.strikable = int(np.count_nonzero(self._told))

    def entries(self, *, told_only: bool = False) -> tuple[Entries, npt.NDArray[np.int64]]:
        """A copy of all entries, of whatever length, and when each was used; those that the disk lists, if so asked."""
        table = self._table.copy()
        if told_only:
            table["length"][~self._told] = 0
        return table, self._used.copy()

    def tell_all(self) -> None:
        """The disk is about to list all there is, besides what it lists now."""
        self._told |= self._lengths > 0
        self.strikable = int(np.count_nonzero(self._told))

    def _slab(self, slot: int) -> slice:
        first = slot // self._stride * self._stride
        return slice(first, first + self._stride)


def in_order(table: Entries, used: npt.NDArray[np.int64]) -> Entries:
    """The entries of `table` that describe a record, least recently used first."""
    live = np.flatnonzero(table["length"])
    return table.take(live.take(np.argsort(used.take(live))))  # `take` copies whole entries; indexing, field by field
