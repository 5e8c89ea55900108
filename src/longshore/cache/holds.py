"""Who holds what: the matches that were not released, and what `peek` protects until the step is over."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from longshore.boundary import Key
from longshore.cache.jobs import Hold as Record
from longshore.cache.jobs import Load
from longshore.cache.store import Pin, Store
from longshore.cache.types import Hold
from longshore.errors import CacheError, HoldError


class Holds:
    """The holds on one `Store`, by their identity."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._records: dict[int, Record] = {}
        self._step: list[Pin] = []

    def __len__(self) -> int:
        """Holds that were not released, those of `peek` included."""
        return len(self._records) + len(self._step)

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records.values())

    def take(self, identity: int, keys: Sequence[Key], start: int, request: str | None) -> Hold:
        """Hold `keys`, which are ready, and begin at position `start` of their path."""
        pin = self._store.pin(self._store.index.get(keys[-1]))
        self._records[identity] = Record(keys, start, pin, request)
        return Hold(identity)

    def get(self, hold: Hold) -> Record:
        """What `hold` stands for. Raises `HoldError` if it was released, or is none."""
        record = self._records.get(hold.id) if isinstance(hold, Hold) else None
        if record is None:
            raise HoldError(f"expected a hold of this cache that was not released, got {hold!r}")
        return record

    def load(self, hold: Hold) -> Load:
        """What `hold` has ordered onto the device. Raises `HoldError` if it has not."""
        load = self.get(hold).load
        if load is None:
            raise HoldError(f"hold {hold.id} was not onboarded")
        return load

    def drop(self, hold: Hold) -> None:
        """Let go of what `hold` stands for, which counts as a use of it."""
        record = self._records.pop(hold.id)
        self._store.touch(self._store.index.path(record.pin.node, len(record.keys)))
        self._store.unpin(record.pin)

    def of(self, request: str) -> list[Hold]:
        """The holds that were taken for `request`."""
        return [Hold(identity) for identity, record in self._records.items() if record.request == request]

    def protect(self, node: int) -> None:
        """Keep `node` until `end_step`."""
        self._step.append(self._store.pin(node))

    def end_step(self) -> None:
        """What was protected no longer is."""
        for pin in self._step:
            self._store.unpin(pin)
        self._step.clear()

    def check_integrity(self) -> None:
        """Raise `CacheError` unless the pins that are in place are those of holds and peeks."""
        ours = {pin for pin in (*(record.pin for record in self), *self._step) if pin.node}
        theirs = {pin for pins in self._store.pins.values() for pin in pins}
        if ours != theirs:
            raise CacheError(f"{len(theirs)} pins are in place, holds and peeks have {len(ours)}")
