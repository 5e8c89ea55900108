"""The host tier: slots for block images inside the arena itself.

    arena   │ ... │ slot 0 │ slot 1 │ ... │ slot n-1 │ ...
                  base     base + image_bytes

Movers at the device's edge reach a slot by its arena offset (`HostTier.offset`) and need no `Tier` for that. As a
`Tier` it copies between a slot and another range of the same arena, which makes it the reference that every other
tier is compared with.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from longshore.boundary import HOST, Key, Status
from longshore.errors import TierClosedError, TierError
from longshore.tiers.arena import PAGE, Arena, ArenaReport
from longshore.tiers.base import Op, Tier, TierOp, TierResult
from longshore.tiers.ops import Batch, check_batch, check_generation


class _Content(NamedTuple):
    """What the last `WRITE` to a slot said it was."""

    key: Key
    generation: int
    length: int


class HostTier(Tier):
    """`slots` images of `image_bytes` in `arena`, the first one at `base`.

    Copies are done inside `submit`, in order, so `cancel` always comes too late. Keys are those of `WRITE`
    operations: what a mover puts into a slot by its offset is not known here, and a `READ` of it is a mismatch.
    """

    def __init__(self, arena: Arena, *, slots: int, image_bytes: int, base: int = 0) -> None:
        if slots <= 0:
            raise TierError(f"a host tier needs at least one slot, got {slots}")
        if image_bytes <= 0 or image_bytes % PAGE:
            raise TierError(f"image_bytes must be a positive multiple of {PAGE}, got {image_bytes}")
        if base < 0 or base % PAGE:
            raise TierError(f"base must be a non-negative multiple of {PAGE}, got {base}")
        if base + slots * image_bytes > arena.nbytes:
            raise TierError(
                f"{slots} slots of {image_bytes} bytes at {base} need {base + slots * image_bytes} bytes, "
                f"the arena has {arena.nbytes}"
            )
        self.name = HOST
        self.slots = slots
        self.image_bytes = image_bytes
        self.arena = arena
        self._base = base
        self._contents: list[_Content | None] = [None] * slots
        self._forgotten = 0
        self._tickets = 0
        self._results: list[TierResult] = []
        self._closed = False

    def offset(self, slot: int) -> int:
        """Arena offset of the first byte of `slot`."""
        if not 0 <= slot < self.slots:
            raise TierError(f"slot {slot} does not lie in [0, {self.slots})")
        return self._base + slot * self.image_bytes

    @property
    def report(self) -> ArenaReport:
        """What was had for the arena, and every fallback."""
        return self.arena.report

    def submit(self, batch: Sequence[TierOp], deadline: float) -> int:
        """Copy `batch`, now."""
        if self._closed:
            raise TierClosedError("the host tier was closed")
        arena_bytes = self.arena.array.nbytes  # raises when the arena was closed under us
        check_batch(batch, deadline, slots=self.slots, image_bytes=self.image_bytes, arena_bytes=arena_bytes)
        for op in batch:
            self._check_outside_slots(op)
        now = time.monotonic()
        books = Batch(self._tickets, batch, deadline, now)
        self._tickets += 1
        for index, op in enumerate(books.ops):
            now = time.monotonic()
            if books.late(now):
                books.end_pending(Status.DEADLINE, now)
                break
            books.begin(index, now)
            status = self._read(op) if op.op is Op.READ else self._write(op)
            books.end(index, status, time.monotonic())
        self._results.append(books.result())
        return books.ticket

    def poll(self) -> list[TierResult]:
        """Results since the last call."""
        results, self._results = self._results, []
        return results

    def cancel(self, ticket: int) -> None:
        """Nothing: what was submitted has ended."""

    def close(self) -> None:
        """Take no more batches. The arena stays its owner's."""
        self._closed = True

    def forget(self, generation: int) -> None:
        """Serve nothing written before `generation`."""
        if self._closed:
            raise TierClosedError("the host tier was closed")
        check_generation(generation)
        self._forgotten = max(self._forgotten, generation)

    def _check_outside_slots(self, op: TierOp) -> None:
        # A copy into our own slots would change one behind the back of the key that guards it.
        end = self._base + self.slots * self.image_bytes
        if op.offset < end and op.offset + op.length > self._base:
            raise TierError(
                f"bytes [{op.offset}, {op.offset + op.length}) overlap the tier's own slots [{self._base}, {end})"
            )

    def _read(self, op: TierOp) -> Status:
        if op.generation < self._forgotten or self._contents[op.slot] != _Content(op.key, op.generation, op.length):
            return Status.MISMATCH
        self._copy(op.offset, self.offset(op.slot), op.length)
        return Status.OK

    def _write(self, op: TierOp) -> Status:
        if op.generation < self._forgotten:
            return Status.CANCELLED  # nobody could ever read it
        self._contents[op.slot] = _Content(op.key, op.generation, op.length)
        self._copy(self.offset(op.slot), op.offset, op.length)
        return Status.OK

    def _copy(self, destination: int, source: int, length: int) -> None:
        array = self.arena.array
        array[destination : destination + length] = array[source : source + length]
