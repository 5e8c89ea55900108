"""Who holds what: the matches that were not released, and what `peek` protects until the step is over."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from longshore.cache.columns import column, marks, once
from longshore.cache.jobs import Held, Load
from longshore.cache.jobs import Hold as Record
from longshore.cache.store import Store
from longshore.cache.types import Hold
from longshore.errors import CacheError, HoldError


class Holds:
    """The holds on one `Store`, by their identity."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._records: dict[int, Record] = {}
        self._step = array("i")
        """Nodes that were looked at in this step, each once; some of them have gone since."""

    def __len__(self) -> int:
        """Holds that were not released, those of `peek` included."""
        return len(self._records) + int(np.count_nonzero(marks(self._store.seen)[np.unique(column(self._step))]))

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records.values())

    def take(self, identity: int, parts: Sequence[Held], request: str | None, *, joint: bool = False) -> Hold:
        """Hold `parts`, whose nodes are pinned; of several groups if it is `joint`."""
        self._records[identity] = Record(parts, request, self._store.served, joint=joint)
        return Hold(identity)

    def get(self, hold: Hold) -> Record:
        """What `hold` stands for. Raises `HoldError` if it was released, or is none."""
        record = self._records.get(hold.id) if isinstance(hold, Hold) else None
        if record is None:
            raise HoldError(f"expected a hold of this cache that was not released, got {hold!r}")
        return record

    def to_load(self, hold: Hold, *, joint: bool = False) -> Record:
        """What `hold` stands for. Raises `HoldError` unless it was not onboarded, and is `joint` or keeps a path."""
        record = self.get(hold)
        if record.joint != joint:
            raise HoldError(f"hold {hold.id} is of {'several groups' if record.joint else 'one group'}")
        if not joint and record.parts[0].alone:
            raise HoldError(f"hold {hold.id} keeps single chunks, and no path")
        if record.load is not None:
            raise HoldError(f"hold {hold.id} was onboarded before")
        return record

    def load(self, hold: Hold) -> Load:
        """What `hold` has ordered onto the device. Raises `HoldError` if it has not."""
        load = self.get(hold).load
        if load is None:
            raise HoldError(f"hold {hold.id} was not onboarded")
        return load

    def drop(self, hold: Hold) -> None:
        """Let go of what `hold` stands for, which is a use of it by its request."""
        record = self._records.pop(hold.id)
        self._store.serve(record.turn)
        for part in record.parts:
            nodes = [node for pin in part.pins if (node := pin.node)]
            if part.alone:
                self._store.sliding.serve(nodes)
            elif nodes:
                nodes = self._store.index.path(nodes[0], part.positions[-1] - part.positions[0] + 1)
            self._store.touch(nodes if not part.alone else nodes[::-1])
            for pin in part.pins:
                self._store.unpin(pin)

    def of(self, request: str) -> list[Hold]:
        """The holds that were taken for `request`."""
        return [Hold(identity) for identity, record in self._records.items() if record.request == request]

    def protect(self, at: npt.NDArray[np.int32]) -> None:
        """Keep the nodes `at` until `end_step`, and where they are in the warmest tier, there."""
        seen = marks(self._store.seen)
        fresh = once(at[seen[at] == 0])
        seen[fresh] = 1
        self._step.frombytes(fresh.tobytes())

    @property
    def protects(self) -> bool:
        """Whether something is protected until the step is over."""
        return bool(self._step)

    def forget_step(self) -> None:
        """The store was cleared, and with it what was protected."""
        self._step = array("i")

    def end_step(self) -> None:
        """What was protected no longer is."""
        if self._step:
            at, self._step = column(self._step), array("i")
            marks(self._store.seen)[at] = 0
            self._store.reconsider(at)
        self._store.lose_condemned()

    def check_integrity(self) -> None:
        """Raise `CacheError` unless the pins that are in place are those of holds and peeks."""
        held = [pin for record in self for part in record.parts for pin in part.pins]
        ours = {pin for pin in held if pin.node}
        theirs = {pin for pins in self._store.pins.values() for pin in pins}
        if ours != theirs:
            raise CacheError(f"{len(theirs)} pins are in place, holds have {len(ours)}")
        seen = {node for node, mark in enumerate(self._store.seen) if mark}
        if not seen <= set(self._step):
            raise CacheError(f"{len(seen)} nodes are marked as seen, {len(set(self._step))} were")
