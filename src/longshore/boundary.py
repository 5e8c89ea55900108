"""What crosses between the control plane and the data plane: plain, frozen, picklable data.

    control plane (longshore.cache)              data plane (longshore.transfer, longshore.tiers)

        take()   ── Transfer, Probe, Cancel, Forget, Discard ──►   movers move bytes and report
        apply()  ◄── TransferResult, ProbeResult ───────  they decide nothing

Both planes import this module; it imports neither, and no torch.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import NamedTuple, Protocol, overload

DEVICE = "device"
HOST = "host"
FILE = "file"

Key = bytes
"""A chunk's content hash: 32 bytes, chained over its prefix, rooted in a scope (`longshore.keys`)."""


class Slot(NamedTuple):
    """The place of one block image in an owned tier.

    `pool` is the physical pool inside the tier (one per image size), `index` the slot within it.
    """

    tier: str
    pool: int
    index: int  # type: ignore[assignment]  # hides `tuple.index`, which nobody needs here


class Route(NamedTuple):
    """A pair of tiers that one mover serves."""

    source: str
    destination: str

    def __str__(self) -> str:
        return f"{self.source}->{self.destination}"


class Item(NamedTuple):
    """One chunk of a transfer.

    A side that is `None` is the device: its blocks stand in `Transfer.sections`, in item order. Or it is a foreign
    tier, where `key` is the address. A copy inside the device has one item for each block; `source` is the slot to copy
    from, and `destination` `None`.
    `parent` is the key of the chunk before this one (`None` for the first of its path), which tiers that
    outlive the process store beside the image. `valid` is a bit mask of the chunk's sub-blocks whose bytes
    mean something; bit 0 is the first block.
    """

    key: Key
    parent: Key | None
    source: Slot | None
    destination: Slot | None
    valid: int


_new_slot: Callable[[Iterable[object]], Slot] = partial(tuple.__new__, Slot)
_new_item: Callable[[Iterable[object]], Item] = partial(tuple.__new__, Item)
# Named tuples from C: there may be thousands in one go, and their own constructors run in Python.


def addresses(tier: str, pool: int, indices: Iterable[int]) -> Iterator[Slot]:
    """The slots of one pool by their indices."""
    return map(_new_slot, zip(repeat(tier), repeat(pool), indices, strict=False))


class Slots(NamedTuple):
    """Slots of one pool, by their indices."""

    tier: str
    pool: int
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Addresses(Sequence[Slot]):
    """The same slots as a sequence, of which each is made when it is read."""

    of: Slots

    def __len__(self) -> int:
        return len(self.of.indices)

    def __iter__(self) -> Iterator[Slot]:
        return addresses(*self.of)

    @overload
    def __getitem__(self, at: int) -> Slot: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Slot, ...]: ...
    def __getitem__(self, at: int | slice) -> Slot | tuple[Slot, ...]:
        if isinstance(at, slice):
            return tuple(self)[at]
        return Slot(self.of.tier, self.of.pool, self.of.indices[at])

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, Sequence) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))


@dataclass(frozen=True, slots=True, eq=False)
class Items(Sequence[Item]):
    """Items of one transfer, kept as columns; each `Item` is made when it is read.

    A transfer may have thousands: as objects of their own they would cost whoever orders it a run of the garbage
    collector. `valid` holds for each. Equal to any sequence of equal items.
    """

    keys: tuple[Key, ...]
    parents: tuple[Key | None, ...]
    source: Slots | None
    destination: Slots | None
    valid: int

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[Item]:
        sides = (repeat(None) if side is None else addresses(*side) for side in (self.source, self.destination))
        return map(_new_item, zip(self.keys, self.parents, *sides, repeat(self.valid), strict=False))

    @overload
    def __getitem__(self, at: int) -> Item: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Item, ...]: ...
    def __getitem__(self, at: int | slice) -> Item | tuple[Item, ...]:
        if isinstance(at, slice):
            return tuple(self)[at]
        source, destination = (
            None if side is None else Slot(side.tier, side.pool, side.indices[at])
            for side in (self.source, self.destination)
        )
        return Item(self.keys[at], self.parents[at], source, destination, self.valid)

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, Sequence) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))


class Section(NamedTuple):
    """Device blocks of one KV cache group, in logical order.

    `first_block` is the logical index (in the request) of `blocks[0]`; when it is not a multiple of
    `blocks_per_chunk`, the first chunk's leading sub-blocks are skipped.
    """

    group: int
    first_block: int
    blocks: tuple[int, ...]


class Urgency(enum.IntEnum):
    """Class of a transfer; a lower number may overtake a higher one."""

    DEMAND = 0
    PREFETCH = 1
    WRITE = 2


@dataclass(frozen=True, slots=True)
class Transfer:
    """Move `items` along `route`, once every job in `after` has ended.

    Attributes:
        job: Identity, unique in the life of one control plane.
        layers: Half-open range of model layers to move; `None` moves all.
        by_layer: Move layer after layer, so that compute may begin before all have arrived. Items then arrive together,
            at the end.
        tokens: Leading tokens of the *last* device block to move; `None` moves whole blocks.
        deadline: Clock reading (seconds) after which what has not begun is not worth beginning.
        generation: The reset generation in which the transfer was ordered.
        ranks: How many ranks must report before the job has ended.
    """

    job: int
    route: Route
    items: Sequence[Item]
    sections: tuple[Section, ...] = ()
    layers: tuple[int, int] | None = None
    by_layer: bool = False
    tokens: int | None = None
    urgency: Urgency = Urgency.DEMAND
    deadline: float = math.inf
    after: tuple[int, ...] = ()
    generation: int = 0
    ranks: int = 1


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody waits for `job` any more: what has not begun need not begin. It still ends with a result."""

    job: int


@dataclass(frozen=True, slots=True)
class Forget:
    """A reset: tiers that outlive the process must never serve what was written before `generation`."""

    generation: int


@dataclass(frozen=True, slots=True)
class Discard:
    """Nobody wants what `slots` of `tier`, which outlives the process, hold: it is not to be found there again."""

    tier: str
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask the foreign tier `tier` which of `keys` it has, written in `generation`, and give the answer by `deadline`.

    It ends with exactly one `ProbeResult` from each rank, which answers for its own part of the images.
    """

    probe: int
    tier: str
    keys: tuple[Key, ...]
    deadline: float
    generation: int = 0
    ranks: int = 1


Command = Transfer | Probe | Cancel | Forget | Discard


class Status(enum.Enum):
    """How one item of a transfer ended. Closed: there is no "other"."""

    OK = "ok"
    CORRUPT = "corrupt"  # the bytes are not those that were written
    MISMATCH = "mismatch"  # a whole record, but of another key, scope or generation
    SHORT = "short"  # fewer bytes than the image has
    IO_ERROR = "io_error"  # the operating system or the device said no
    NO_SPACE = "no_space"  # the medium is full
    DEADLINE = "deadline"  # not begun, or not done, in time
    CANCELLED = "cancelled"  # the requester went away first
    TIER_OFF = "tier_off"  # the tier was closed or turned off
    AWAY = "away"  # the process that moves the bytes died; what it was to move is as good as before
    LAPSED = "lapsed"  # a foreign tier has it no longer, or never had
    QUEUE_FULL = "queue_full"  # a bounded queue had no room: nothing was begun

    @property
    def condemns_source(self) -> bool:
        """Whether a reader that got this must never read the same source again."""
        return self in _CONDEMNING


_CONDEMNING = frozenset({Status.CORRUPT, Status.MISMATCH, Status.SHORT, Status.IO_ERROR})


@dataclass(frozen=True, slots=True)
class TransferResult:
    """How a transfer ended on one rank.

    Attributes:
        statuses: One per item, in item order.
        bytes: Bytes that arrived (items that are `Status.OK`).
        seconds: Time spent moving; the device's clock where it has one.
        queued_seconds: Time between submission and the first byte.
    """

    job: int
    statuses: tuple[Status, ...]
    bytes: int = 0
    seconds: float = 0.0
    queued_seconds: float = 0.0
    rank: int = 0


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Which keys of a probe are there on one rank, in order; unless `status` is `OK` nothing is known, nor is any."""

    probe: int
    present: tuple[bool, ...]
    status: Status = Status.OK
    rank: int = 0


Result = TransferResult | ProbeResult


def leading_ok(statuses: Sequence[Status]) -> int:
    """Length of the leading run of `Status.OK`."""
    for i, status in enumerate(statuses):
        if status is not Status.OK:
            return i
    return len(statuses)


class Mover(Protocol):
    """What serves routes: the transfer engine at the device's edge, a tier below it.

    `submit` validates the whole transfer before it starts any of it and raises `PlanError` or `TierError` with nothing
    changed; afterwards exactly one `TransferResult` per rank comes out of `poll`, whatever happens. Items not begun
    by the transfer's deadline end as `Status.DEADLINE`, those cancelled before they began as `Status.CANCELLED`.
    `after` is not the mover's business: the runtime submits a transfer only when those jobs have ended.
    Nothing blocks except `close`, which waits for what has begun and is idempotent.
    """

    @property
    def routes(self) -> frozenset[Route]:
        """The routes that this mover serves."""

    def submit(self, transfer: Transfer) -> None:
        """Begin `transfer`."""

    def poll(self) -> list[TransferResult]:
        """Results that arrived since the last call, without waiting."""

    def cancel(self, job: int) -> None:
        """What has not begun of `job` need not begin; an unknown or ended job is ignored."""

    def close(self) -> None:
        """Wait for what has begun, end the rest as `Status.TIER_OFF`, give back every resource."""


class Prober(Protocol):
    """What asks one foreign tier, on one rank. Nothing blocks; an answer that never comes is the runtime's business."""

    @property
    def asks(self) -> str:
        """The name of the tier."""

    def ask(self, probe: Probe) -> None:
        """Begin `probe`."""

    def answers(self) -> list[ProbeResult]:
        """Answers that arrived since the last call, at most one for each probe, without waiting."""
