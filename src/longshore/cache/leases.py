"""Leases: what lookups keep from eviction, until it is released or until the step is over."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from longshore.cache.columns import column, marks, once
from longshore.cache.jobs import Held
from longshore.cache.jobs import LeaseRecord as Record
from longshore.cache.store import Store
from longshore.cache.types import Lease
from longshore.errors import CacheError, LeaseError


class Leases:
    """The leases on one `Store`, by their identity."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._records: dict[int, Record] = {}
        self._step = array("i")
        """Nodes that were looked at in this step, each once; some of them have gone since."""

    def __len__(self) -> int:
        """Leases that were not released, and chunks that are kept until the step ends."""
        return len(self._records) + int(np.count_nonzero(marks(self._store.seen)[np.unique(column(self._step))]))

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records.values())

    def take(self, identity: int, parts: Sequence[Held], request: str | None, *, joint: bool = False) -> Lease:
        """Keep `parts`, whose nodes are pinned; of several groups if it is `joint`."""
        self._records[identity] = Record(parts, request, self._store.served, joint=joint)
        return Lease(identity)

    def get(self, lease: Lease) -> Record:
        """What `lease` stands for. Raises `LeaseError` if it was released, or is none."""
        record = self._records.get(lease.id) if isinstance(lease, Lease) else None
        if record is None:
            raise LeaseError(f"expected a lease of this cache that was not released, got {lease!r}")
        return record

    def to_load(self, lease: Lease) -> Record:
        """What `lease` stands for. Raises `LeaseError` if it was loaded, or keeps single chunks."""
        record = self.get(lease)
        if not record.joint and record.parts[0].alone:
            raise LeaseError(f"lease {lease.id} keeps single chunks, and no path: load these by their keys")
        if record.load is not None:
            raise LeaseError(f"lease {lease.id} was loaded before")
        return record

    def drop(self, lease: Lease) -> None:
        """Let go of what `lease` stands for, which is a use of it by its request."""
        record = self._records.pop(lease.id)
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

    def of(self, request: str) -> list[Lease]:
        """The leases that were taken for `request`."""
        return [Lease(identity) for identity, record in self._records.items() if record.request == request]

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
        """Raise `CacheError` unless the pins that are in place are those of leases and peeks."""
        held = [pin for record in self for part in record.parts for pin in part.pins]
        ours = {pin for pin in held if pin.node}
        theirs = {pin for pins in self._store.pins.values() for pin in pins}
        if ours != theirs:
            raise CacheError(f"{len(theirs)} pins are in place, leases have {len(ours)}")
        seen = {node for node, mark in enumerate(self._store.seen) if mark}
        if not seen <= set(self._step):
            raise CacheError(f"{len(seen)} nodes are marked as seen, {len(set(self._step))} were")
