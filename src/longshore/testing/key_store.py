"""A remote tier in this process: images by key in a dictionary, with losses, delays and silence on demand.

lapse     probes say that a chunk is there, and a read finds that it is not
late      answers and results come some seconds later
silent    nothing comes at all, until it is cancelled or closed
"""

from __future__ import annotations

import enum
import time
from collections import Counter
from collections.abc import Callable, Sequence

from longshore.boundary import Key, Status
from longshore.errors import TierClosedError
from longshore.tiers.arena import Arena
from longshore.tiers.base import KeyedTier, Op, OpBatch, TierOp, TierResult, check_batch, check_generation

Images = dict[tuple[Key, int], bytes]
"""Content of a store, by key and generation; several stores may share it, as several machines do."""


class StoreFault(enum.Enum):
    """Faults of a key store."""

    LAPSE = "lapse"
    LATE = "late"
    SILENT = "silent"


class KeyStore(KeyedTier):
    """Copies the bytes of images of `image_bytes` (by size class) between `arena` and a dictionary, inside `poll`.

    Attributes:
        images: What it has.
        seconds: How late answers and results are.
        silent: Whether there are none.
        fired: How often each fault has struck: by chunk, answer or batch.
    """

    def __init__(
        self,
        arena: Arena,
        image_bytes: Sequence[int],
        *,
        name: str = "store",
        images: Images | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.image_bytes = tuple(image_bytes)
        self.images: Images = {} if images is None else images
        self.seconds = 0.0
        self.silent = False
        self.fired: Counter[StoreFault] = Counter()
        self._arena = arena
        self._clock = clock
        self._lapsed: set[tuple[Key, int]] = set()
        self._oldest_valid = 0
        self._tickets = 0
        self._open: dict[int, tuple[OpBatch, float]] = {}
        self._asked: dict[int, tuple[tuple[bool, ...], float]] = {}
        self._results: list[TierResult] = []
        self._closed = False

    def lapse(self, key: Key, generation: int = 0) -> None:
        """Lose the image of `key`, and still report that it is there."""
        del self.images[key, generation]
        self._lapsed.add((key, generation))

    def ask(self, keys: Sequence[Key], generation: int, deadline: float) -> int:
        """Ask which of `keys` are there; `answers` returns the answer."""
        self._check_open()
        self._tickets += 1
        known = (self.images.keys() | self._lapsed) if generation >= self._oldest_valid else set()
        present = tuple((key, generation) in known for key in keys)
        self._asked[self._tickets] = present, self._clock() + self.seconds
        return self._tickets

    def answers(self) -> list[tuple[int, tuple[bool, ...]]]:
        """Answers that are due."""
        tickets = [ticket for ticket, (_, due) in self._asked.items() if self._may_end(due)]
        return [(ticket, self._asked.pop(ticket)[0]) for ticket in tickets]

    def submit(self, batch: Sequence[TierOp], deadline: float) -> int:
        """Take in `batch`; its bytes move when it is polled."""
        self._check_open()
        arena_bytes = self._arena.array.nbytes
        check_batch(batch, deadline, slabs=None, image_bytes=self.image_bytes, arena_bytes=arena_bytes)
        self._tickets += 1
        now = self._clock()
        self._open[self._tickets] = OpBatch(self._tickets, batch, deadline, now), now + self.seconds
        return self._tickets

    def poll(self) -> list[TierResult]:
        """Do what is due; results since the last call."""
        for state, due in list(self._open.values()):
            if self._may_end(due):
                self._move(state)
        self._settle()
        results, self._results = self._results, []
        return results

    def cancel(self, ticket: int) -> None:
        """End operations of `ticket` that have not begun."""
        if ticket in self._open:
            self._open[ticket][0].end_pending(Status.CANCELLED, self._clock())
            self._settle()

    def close(self) -> None:
        """End everything."""
        self._closed = True
        for state, _ in self._open.values():
            state.end_pending(Status.TIER_OFF, self._clock())
        self._settle()
        self._asked.clear()

    def reset(self, generation: int) -> None:
        """Serve nothing that was written before `generation`."""
        check_generation(generation)
        self._oldest_valid = max(self._oldest_valid, generation)

    def _check_open(self) -> None:
        if self._closed:
            raise TierClosedError(f"the {self.name} tier was closed")

    def _may_end(self, due: float) -> bool:
        late = not self.silent and due > self._clock()
        self.fired[StoreFault.SILENT] += self.silent
        self.fired[StoreFault.LATE] += late
        return not self.silent and not late

    def _move(self, state: OpBatch) -> None:
        now = self._clock()
        if state.late(now):
            state.end_pending(Status.DEADLINE, now)
        for index, op in enumerate(state.ops):
            if state.pending(index):
                state.begin(index, now)
                state.end(index, self._write(op) if op.op is Op.WRITE else self._read(op), self._clock())

    def _write(self, op: TierOp) -> Status:
        if op.generation < self._oldest_valid:
            return Status.CANCELLED  # nobody could ever read it
        self.images[op.key, op.generation] = bytes(self._arena.view(op.offset, op.length))
        self._lapsed.discard((op.key, op.generation))
        return Status.OK

    def _read(self, op: TierOp) -> Status:
        image = self.images.get((op.key, op.generation)) if op.generation >= self._oldest_valid else None
        if image is None:
            self.fired[StoreFault.LAPSE] += (op.key, op.generation) in self._lapsed
            self._lapsed.discard((op.key, op.generation))
            return Status.NOT_FOUND
        if len(image) != op.length:
            return Status.SHORT
        self._arena.view(op.offset, op.length)[:] = image
        return Status.OK

    def _settle(self) -> None:
        for ticket in [ticket for ticket, (state, _) in self._open.items() if state.ended]:
            self._results.append(self._open.pop(ticket)[0].result())
