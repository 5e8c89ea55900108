"""The interface below the device: a `Tier` moves block images between its slots and the host arena.

    host arena  ┌──────────┬──────────┬────
                │  image   │  image   │        offset, length
                └────▲─────┴────┬─────┴────
              READ   │          │  WRITE
                ┌────┴──────────▼──────────
    tier        │  slot, slot, slot, ...        address
                └──────────────────────────

A tier that Longshore does not own (`ForeignTier`) has no slots; images are addressed by key.

A tier decides nothing: the control plane chooses the slot of each key. A tier moves bytes, verifies
what it reads, and reports one `Status` per operation. Nothing here blocks, returns bytes objects or calls back.

To write a new tier: subclass `Tier`, and subclass `longshore.testing.TierTests` with a fixture that opens it.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from longshore.boundary import Key, Status
from longshore.slabs import Slabs


class Op(enum.Enum):
    """Direction of one operation, as seen from the arena's owner."""

    READ = "read"  # tier -> arena
    WRITE = "write"  # arena -> tier


BY_KEY = -1
"""The slot of an operation on a foreign tier."""


class TierOp(NamedTuple):
    """One image to move.

    `slot` is the index in an owned tier, or `BY_KEY`, and `pool` its image size (`longshore.slabs`). `offset` and
    `length` are bytes in the arena, and must lie within it; `length` must not exceed the pool's `image_bytes`. A `READ`
    serves only bytes that were written under the same `key` and `generation`. Anything else ends with another status,
    and the destination's bytes are undefined. A `WRITE` assigns the slab of its slot to its pool: images of other
    pools in the slab are lost.
    """

    op: Op
    slot: int
    key: Key
    parent: Key | None
    offset: int
    length: int
    generation: int
    pool: int = 0


class TierResult(NamedTuple):
    """How one batch ended: a status per operation, in order; bytes that moved; seconds moving and queued."""

    ticket: int
    statuses: tuple[Status, ...]
    bytes: int
    seconds: float
    queued_seconds: float


class StoredChunk(NamedTuple):
    """A chunk that a tier recovered at start: `key` (child of `parent`) is in `slot` of `pool`."""

    slot: int
    key: Key
    parent: Key | None
    pool: int = 0


class Tier(ABC):
    """Storage for block images, addressed by slot, accessed through the host arena.

    Thread-safe for one submitting and polling thread. `submit` validates the whole batch before it starts any of it
    and raises `TierError` on a bad slot, offset or length, or `TierClosedError` after `close`.

    Attributes:
        name: Of the tier, in routes and tables.
        slabs: Numbering and sizes of its slots.
        image_bytes: Bytes of the longest image in a slot, by pool.
    """

    name: str
    slabs: Slabs
    image_bytes: tuple[int, ...]

    @abstractmethod
    def submit(self, batch: Sequence[TierOp], deadline: float) -> int:
        """Begin `batch`; operations not begun by `deadline` (`time.monotonic()` seconds) end as `Status.DEADLINE`.

        Returns a ticket. `poll` returns exactly one `TierResult` for it, whatever happens.
        """

    @abstractmethod
    def poll(self) -> list[TierResult]:
        """Results that arrived since the last call, without waiting. After `close`, the remaining ones."""

    @abstractmethod
    def cancel(self, ticket: int) -> None:
        """End operations of `ticket` that have not begun as `CANCELLED`. Unknown and ended tickets are ignored."""

    @abstractmethod
    def close(self) -> None:
        """Wait for operations that have begun, end the rest as `Status.TIER_OFF`, release all resources. Idempotent."""

    def recover(self) -> list[StoredChunk]:
        """Chunks of an earlier process, least recently used first; none for most tiers."""
        return []

    def others(self) -> Sequence[int]:
        """Slots with records of other scopes, least recently used first; none for most tiers.

        Empty slots should be written before these.
        """
        return ()

    def discard(self, slots: Sequence[int]) -> None:  # noqa: B027 - nothing to do for a tier that keeps nothing
        """Discard the content of `slots`: `recover` must not return it after a restart."""

    def forget(self, generation: int) -> None:  # noqa: B027 - nothing to do for a tier that keeps nothing
        """Serve no record from before `generation`, from now on and after a restart."""

    @property
    def fallbacks(self) -> Mapping[str, int]:
        """Number of operations that used a slower fallback, by reason; every reason is present from the start."""
        return {}

    @property
    def troubles(self) -> Mapping[str, int]:
        """Number of failures, by reason; every reason is present from the start."""
        return {}

    @property
    def generation(self) -> int:
        """The generation that the next process should start in."""
        return 0


class ForeignTier(Tier):
    """Storage for block images that Longshore does not own: addressed by key, shared, and free to drop images.

    The slot of every operation is `BY_KEY`; there are no slabs. A `READ` of a key that the tier does not have ends as
    `Status.LAPSED`; a `WRITE` of a key that it has may end as `OK` without moving bytes.
    """

    @abstractmethod
    def ask(self, keys: Sequence[Key], generation: int, deadline: float) -> int:
        """Ask which of `keys`, written in `generation`, the tier has; the answer is due by `deadline`.

        Returns a ticket, separate from those of `submit`. An answer is not guaranteed.
        """

    @abstractmethod
    def answers(self) -> list[tuple[int, tuple[bool, ...]]]:
        """Answers that arrived since the last call, without waiting: a ticket, and whether each key is there."""
