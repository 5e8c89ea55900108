"""The seam below the device: a `Tier` moves block images between its slots and the host arena.

    host arena  ┌──────────┬──────────┬────
                │  image   │  image   │        offset, length
                └────▲─────┴────┬─────┴────
              READ   │          │  WRITE
                ┌────┴──────────▼──────────
    tier        │  slot, slot, slot, ...        address
                └──────────────────────────

A tier that is not ours (`ForeignTier`) has no slots: the key is the address there.

A tier decides nothing: which key lives in which slot is the control plane's business. It moves bytes, verifies
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
    serves only bytes that were written under the same `key` and `generation`; anything else ends as a status and leaves
    no promise about the destination's bytes. A `WRITE` gives the slab of its slot to its pool: what other pools had
    there is gone.
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
    """What a tier that outlives the process found at start: `key` (child of `parent`) lies in `slot` of `pool`."""

    slot: int
    key: Key
    parent: Key | None
    pool: int = 0


class Tier(ABC):
    """A place for block images, addressed by slot, reached through the host arena.

    Thread-safe for one submitting and polling thread. `submit` validates the whole batch before it starts any of it
    and raises `TierError` on a bad slot, offset or length, or `TierClosedError` after `close`.

    Attributes:
        name: Of the tier, in routes and tables.
        slabs: How its slots are numbered, and what each takes of its capacity.
        image_bytes: Bytes of the longest image in a slot, by pool.
    """

    name: str
    slabs: Slabs
    image_bytes: tuple[int, ...]

    @abstractmethod
    def submit(self, batch: Sequence[TierOp], deadline: float) -> int:
        """Begin `batch`; operations not begun by `deadline` (`time.monotonic()` seconds) end as `Status.DEADLINE`.

        Returns a ticket. Exactly one `TierResult` for it will come out of `poll`, whatever happens.
        """

    @abstractmethod
    def poll(self) -> list[TierResult]:
        """Results that arrived since the last call, without waiting. After `close`, too: the last ones."""

    @abstractmethod
    def cancel(self, ticket: int) -> None:
        """What has not begun of `ticket` ends as `Status.CANCELLED`. An unknown or ended ticket is ignored."""

    @abstractmethod
    def close(self) -> None:
        """Wait for what has begun, end the rest as `Status.TIER_OFF`, give back every resource. Idempotent."""

    def recover(self) -> list[StoredChunk]:
        """What survived from an earlier process, least recently used first; nothing, for most tiers."""
        return []

    def others(self) -> Sequence[int]:
        """Slots that hold records of other scopes, least recently used first; none, for most tiers.

        What is empty is to be written to before them.
        """
        return ()

    def discard(self, slots: Sequence[int]) -> None:  # noqa: B027 - nothing to do for a tier that keeps nothing
        """Nobody wants what is in `slots` any more: after a restart, `recover` says nothing of it."""

    def forget(self, generation: int) -> None:  # noqa: B027 - nothing to do for a tier that keeps nothing
        """From now on, also after a restart, serve nothing written before `generation`."""

    @property
    def fallbacks(self) -> Mapping[str, int]:
        """What was done the slower way, by reason; every reason from the start on."""
        return {}

    @property
    def troubles(self) -> Mapping[str, int]:
        """How often something went wrong, by what it was; everything that can is there from the start on."""
        return {}

    @property
    def generation(self) -> int:
        """The generation that the next process should start in."""
        return 0


class ForeignTier(Tier):
    """A place for block images that is not ours: addressed by key, shared, and free to drop what it has.

    Every operation has `BY_KEY` for a slot; there are no slabs. A `READ` of what is not there, or no longer, ends as
    `Status.LAPSED`; a `WRITE` of what is there already may end as `OK` without moving anything.
    """

    @abstractmethod
    def ask(self, keys: Sequence[Key], generation: int, deadline: float) -> int:
        """Ask which of `keys`, written in `generation`, are there; nobody wants the answer after `deadline`.

        Returns a ticket, which is not one of `submit`. Nothing is promised: an answer may never come.
        """

    @abstractmethod
    def answers(self) -> list[tuple[int, tuple[bool, ...]]]:
        """Answers that arrived since the last call, without waiting: a ticket, and which of its keys are there."""
