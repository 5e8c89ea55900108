"""The interface below the device: a `Tier` moves chunk images between its slots and the host arena.

    host arena  ┌──────────┬──────────┬────
                │  image   │  image   │        offset, length
                └────▲─────┴────┬─────┴────
              READ   │          │  WRITE
                ┌────┴──────────▼──────────
    tier        │  slot, slot, slot, ...        address
                └──────────────────────────

A tier that Longshore does not own (`KeyedTier`) has no slots; images are addressed by key.

A tier decides nothing: the control plane chooses the slot of each key. A tier moves bytes, verifies
what it reads, and reports one `Status` per operation. Nothing here blocks, returns bytes objects or calls back.

`check_batch` and `OpBatch` validate and track batches for every tier:

    pending ──begin──► begun ──end──► ended with a status
       └───────────────end────────────►

A pending operation can be ended at any time (deadline, cancel, close). An operation that has begun owns its slot and
its arena bytes, and only the thread that began it can end it.

To write a new tier: subclass `Tier`, and subclass `longshore.testing.TierTests` with a fixture that opens it.
"""

from __future__ import annotations

import enum
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from longshore.boundary import Key, Slabs, Status, StoredChunk
from longshore.errors import PlanError, TierError, former_name


class Op(enum.Enum):
    """Direction of one operation, as seen from the arena's owner."""

    READ = "read"  # tier -> arena
    WRITE = "write"  # arena -> tier


BY_KEY = -1
"""The slot of an operation on a remote tier."""


class TierOp(NamedTuple):
    """One image to move.

    `slot` is the index in an owned tier, or `BY_KEY`, and `size_class` its image size (`longshore.boundary`). `offset`
    and `length` are bytes in the arena, and must lie within it; `length` must not exceed the `image_bytes` of the size
    class. A `READ` serves only bytes that were written under the same `key` and `generation`. Anything else ends with
    another status, and the destination's bytes are undefined. A `WRITE` assigns the slab of its slot to its size class:
    images of other size classes in the slab are lost.
    """

    op: Op
    slot: int
    key: Key
    parent: Key | None
    offset: int
    length: int
    generation: int
    size_class: int = 0


TierOp.pool = former_name("pool", "size_class")  # type: ignore[attr-defined]


class TierResult(NamedTuple):
    """How one batch ended: a status per operation, in order; bytes that moved; seconds moving and queued."""

    ticket: int
    statuses: tuple[Status, ...]
    bytes: int
    seconds: float
    queued_seconds: float


_FORMER_METHODS = {
    "discard": "delete_records",
    "forget": "reset",
    "is_away": "is_unavailable",
    "others": "other_scope_slots",
    "trouble": "degraded_reason",
}


class Tier(ABC):
    """Storage for chunk images, addressed by slot, accessed through the host arena.

    Thread-safe for one submitting and polling thread. `submit` validates the whole batch before it starts any of it
    and raises `TierError` on a bad slot, offset or length, or `TierClosedError` after `close`.

    Attributes:
        name: Of the tier, in routes and tables.
        slabs: Numbering and sizes of its slots.
        image_bytes: Bytes of the longest image in a slot, by size class.
    """

    name: str
    slabs: Slabs
    image_bytes: tuple[int, ...]

    def __init_subclass__(cls, **options: Any) -> None:
        """Raises `TypeError` for a tier that defines methods under their former names: they would not be called."""
        for old, new in _FORMER_METHODS.items():
            if getattr(cls, old, None) is not getattr(Tier, old, None):
                raise TypeError(f"{cls.__name__}.{old} is not called any more: rename it to {new}")
        super().__init_subclass__(**options)

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

    def recover(self) -> Sequence[StoredChunk]:
        """Chunks of an earlier process, least recently used first; none for most tiers."""
        return []

    def other_scope_slots(self) -> Sequence[int]:
        """Slots with records of other scopes, least recently used first; none for most tiers.

        Empty slots should be written before these.
        """
        return ()

    others = former_name("others", "other_scope_slots")

    def delete_records(self, slots: Sequence[int]) -> None:  # noqa: B027 - nothing to do for a tier that keeps nothing
        """Delete the records in `slots`: `recover` must not return them after a restart."""

    def reset(self, generation: int) -> None:  # noqa: B027 - nothing to do for a tier that keeps nothing
        """Serve no record from before `generation`, from now on and after a restart."""

    def weights_changed(self) -> None:  # noqa: B027 - nothing to do for a tier that keeps nothing
        """Weights have changed: no engine that starts later may read records written after the next `reset`."""

    @property
    def fallbacks(self) -> Mapping[str, int]:
        """Number of operations that used a slower fallback, by reason; every reason is present from the start."""
        return {}

    @property
    def failures(self) -> Mapping[str, int]:
        """Number of failures, by reason; every reason is present from the start."""
        return {}

    @property
    def is_unavailable(self) -> bool:
        """Whether operations end as `Status.UNAVAILABLE` at present."""
        return False

    is_away = former_name("is_away", "is_unavailable")

    @property
    def degraded_reason(self) -> str:
        """Why the tier serves no reads, or takes no writes, at present; empty if it does."""
        found = self.failures
        if found.get("off"):
            return "disabled after repeated I/O errors"
        if self.is_unavailable:
            return "unavailable: its process or disk does not respond, or its circuit breaker is open"
        return "read-only after repeated write errors" if found.get("read_only") else ""

    trouble = former_name("trouble", "degraded_reason")

    @property
    def generation(self) -> int:
        """The generation that the next process should start in."""
        return 0


class KeyedTier(Tier):
    """Storage for chunk images that Longshore does not own: addressed by key, shared, and free to drop images.

    The slot of every operation is `BY_KEY`; there are no slabs. A `READ` of a key that the tier does not have ends as
    `Status.NOT_FOUND`; a `WRITE` of a key that it has may end as `OK` without moving bytes.
    """

    @abstractmethod
    def ask(self, keys: Sequence[Key], generation: int, deadline: float) -> int:
        """Ask which of `keys`, written in `generation`, the tier has; the answer is due by `deadline`.

        Returns a ticket, separate from those of `submit`. An answer is not guaranteed.
        """

    @abstractmethod
    def answers(self) -> Sequence[tuple[int, tuple[bool, ...] | None]]:
        """Answers that arrived since the last call, without waiting: a ticket, and whether each key is there.

        `None` instead: the tier cannot say, because it is unavailable.
        """


KEY_BYTES = 32
"""Length of a key, of a parent and of a scope fingerprint."""

MAX_GENERATION = 2**64 - 1


def check_batch(
    batch: Sequence[TierOp],
    deadline: float,
    *,
    slabs: Slabs | None,
    image_bytes: Sequence[int],
    arena_bytes: int,
    last_reset: int = MAX_GENERATION,
) -> None:
    """Raise `TierError` unless every operation of `batch` is valid; remote tiers have no `slabs`.

    `last_reset` is the generation last given to `reset`: nothing newer is valid.
    """
    if math.isnan(deadline):
        raise TierError("expected a deadline in clock seconds, got NaN")
    for index, op in enumerate(batch):
        try:
            _check_op(op, slabs, image_bytes, arena_bytes)
        except (TierError, PlanError) as error:
            raise TierError(f"operation {index} of {len(batch)}: {error}") from None
    _check_known(max((op.generation for op in batch), default=0), last_reset)


def check_question(keys: Sequence[Key], generation: int, last_reset: int) -> None:
    """Raise `TierError` unless `keys` and `generation` may be asked for, after the reset to generation `last_reset`."""
    for each in keys:
        check_digest("a key", each)
    check_generation(generation)
    _check_known(generation, last_reset)


def _check_known(generation: int, last_reset: int) -> None:
    if generation > last_reset:
        raise TierError(f"generation {generation} is newer than the last reset ({last_reset})")


def check_generation(generation: int) -> None:
    """Raise `TierError` unless `generation` can be stored."""
    _check_whole("a generation", generation)
    if not 0 <= generation <= MAX_GENERATION:
        raise TierError(f"expected a generation in [0, 2**64), got {generation}")


def check_slots(slots: Sequence[int], slabs: Slabs) -> None:
    """Raise `TierError` for a slot that is not an integer, and `PlanError` for one out of range."""
    for slot in slots:
        _check_whole("a slot", slot)
        slabs.slab_of(slot)


def _check_whole(what: str, number: int) -> None:
    if not isinstance(number, int | np.integer):
        raise TierError(f"expected {what} to be a whole number, got {number!r}")


def check_digest(what: str, digest: bytes) -> None:
    """Raise `TierError` unless `digest` (named `what` in the message) is 32 bytes."""
    if not isinstance(digest, bytes) or len(digest) != KEY_BYTES:
        raise TierError(f"expected {what} of {KEY_BYTES} bytes, got {digest!r}")


def _check_op(op: TierOp, slabs: Slabs | None, image_bytes: Sequence[int], arena_bytes: int) -> None:
    if not isinstance(op.op, Op):
        raise TierError(f"expected Op.READ or Op.WRITE, got {op.op!r}")
    numbers = op.slot, op.offset, op.length, op.generation, op.size_class
    if set(map(type, numbers)) != {int}:
        names = "a slot", "an offset", "a length", "a generation", "a size class"
        for what, number in zip(names, numbers, strict=True):
            _check_whole(what, number)
    if slabs is not None:
        slabs.check(op.size_class, op.slot)
    elif op.slot != BY_KEY or not 0 <= op.size_class < len(image_bytes):
        raise TierError(f"a remote tier is addressed by key, got slot {op.slot} of size class {op.size_class}")
    if not 0 < op.length <= image_bytes[op.size_class]:
        raise TierError(f"expected a length in [1, {image_bytes[op.size_class]}], got {op.length}")
    if op.offset < 0 or op.offset + op.length > arena_bytes:
        raise TierError(f"bytes [{op.offset}, {op.offset + op.length}) are outside an arena of {arena_bytes} bytes")
    check_digest("a key", op.key)
    if op.parent is not None:
        check_digest("a parent", op.parent)
    check_generation(op.generation)


class OpBatch:
    """State of one submitted batch. Not thread-safe: threads that share it need a lock.

    Attributes:
        ticket: What `submit` returned.
        ops: The operations, in the order of submission.
        deadline: Clock reading after which no operation may begin.
    """

    __slots__ = ("_begun", "_first_begin", "_last_end", "_open", "_statuses", "_submitted", "deadline", "ops", "ticket")

    def __init__(self, ticket: int, ops: Sequence[TierOp], deadline: float, now: float) -> None:
        self.ticket = ticket
        self.ops = tuple(ops)
        self.deadline = deadline
        self._statuses: list[Status | None] = [None] * len(self.ops)
        self._begun: set[int] = set()
        self._open = len(self.ops)
        self._submitted = now
        self._first_begin: float | None = None
        self._last_end = now

    @property
    def ended(self) -> bool:
        """Whether every operation has a status."""
        return self._open == 0

    def pending(self, index: int) -> bool:
        """Whether operation `index` has neither begun nor ended."""
        return self._statuses[index] is None and index not in self._begun

    def late(self, now: float) -> bool:
        """Whether the deadline has passed, so that no operation may begin."""
        return now > self.deadline

    def begin(self, index: int, now: float) -> None:
        """Record that operation `index` begins to move bytes."""
        self._begun.add(index)
        if self._first_begin is None:
            self._first_begin = now

    def end(self, index: int, status: Status, now: float) -> None:
        """Record that operation `index` has ended. A second status is ignored."""
        if self._statuses[index] is None:
            self._statuses[index] = status
            self._open -= 1
            self._last_end = now

    def end_pending(self, status: Status, now: float) -> bool:
        """End operations that have not begun with `status`; returns whether there were any."""
        pending = [index for index in range(len(self.ops)) if self.pending(index)]
        for index in pending:
            self.end(index, status, now)
        return bool(pending)

    def result(self) -> TierResult:
        """The result for `poll`. Only for a batch that has ended."""
        statuses = tuple(status for status in self._statuses if status is not None)
        if len(statuses) != len(self.ops):
            raise TierError(f"ticket {self.ticket}: {self._open} operations are still in flight")
        moved = sum(op.length for op, status in zip(self.ops, statuses, strict=True) if status is Status.OK)
        begin = self._last_end if self._first_begin is None else self._first_begin
        return TierResult(self.ticket, statuses, moved, self._last_end - begin, begin - self._submitted)
