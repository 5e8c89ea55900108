"""Types exchanged between the control plane and the data plane, and the numbering of the slots that they name.

    control plane (longshore.cache)              data plane (longshore.transfer, longshore.tiers)

        take_commands() ── Transfer, Probe, Cancel, Reset, DeleteRecords ►   movers move bytes and report;
        apply_results() ◄──────── TransferResult, ProbeResult ─────────   they decide nothing

The types are plain, frozen, picklable data. Both planes import this module; it imports neither, and no torch.
"""

from __future__ import annotations

import enum
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple, Protocol, Self, TypeVar, overload

import numpy as np
import numpy.typing as npt

from longshore.errors import LayoutError, PlanError, former_name, former_names

DEVICE = "device"
HOST = "host"
FILE = "file"
PEERS = "peers"
"""Name of the tier that reads from other replicas, which requests name."""
REMOTE = "remote"
"""The first store that replicas share; the next are `remote-2` and so on."""

Key = bytes
"""Hash of a chunk's tokens, chained over its prefix: of `longshore.keys` (32 bytes), or the engine's own."""


class Slot(NamedTuple):
    """The position of one chunk image in a tier that Longshore owns.

    `size_class` is the number of its image size in a tier, of its block pool on the device; `index` is the slot.
    """

    tier: str
    size_class: int
    index: int  # type: ignore[assignment]  # hides `tuple.index`, which nobody needs here


Slot.pool = former_name("pool", "size_class")  # type: ignore[attr-defined]


class Route(NamedTuple):
    """A pair of tiers; one mover serves it."""

    source: str
    destination: str

    def __str__(self) -> str:
        return f"{self.source}->{self.destination}"

    @property
    def loss(self) -> str:
        """What a failed transfer means for its blocks, for logs."""
        is_read = self.destination == DEVICE or (self.destination == HOST and self.source != DEVICE)
        return "its blocks are misses" if is_read else "its blocks were not stored"

    @staticmethod
    def mover_name(routes: Iterable[Route]) -> str:
        """What the mover of `routes` is, for logs: that of a tier below host memory, or of copies at the device."""
        names = sorted({name for route in routes for name in route} - {DEVICE, HOST})
        return f"{' and '.join(names)} tier" if names else "copies between device and host memory"


class Item(NamedTuple):
    """One chunk of a transfer.

    A side that is `None` is the device, whose blocks are in `Transfer.sections`, in item order, or a remote tier,
    where `key` is the address. A copy inside the device has one item for each block; `source` is the slot to copy
    from, and `destination` `None`.
    `parent` is the key of the chunk before this one (`None` for the first of its path), which tiers that
    outlive the process store with the image.
    """

    key: Key
    parent: Key | None
    source: Slot | None
    destination: Slot | None


_new_slot: Callable[[Iterable[object]], Slot] = partial(tuple.__new__, Slot)
_new_item: Callable[[Iterable[object]], Item] = partial(tuple.__new__, Item)
# Named tuples from C: there may be thousands in one go, and their own constructors run in Python.


def addresses(tier: str, size_class: int, indices: Iterable[int]) -> Iterator[Slot]:
    """The slots of one size class by their indices."""
    return map(_new_slot, zip(repeat(tier), repeat(size_class), indices, strict=False))


class Slots(NamedTuple):
    """Slots of one size class, by their indices."""

    tier: str
    size_class: int
    indices: tuple[int, ...]


R = TypeVar("R")


class _Rows(Sequence[R]):
    """A sequence whose items are created when they are read; equal to any sequence of equal items."""

    __slots__ = ()

    def _row(self, at: int) -> R:
        raise NotImplementedError

    @overload
    def __getitem__(self, at: int) -> R: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[R, ...]: ...
    def __getitem__(self, at: int | slice) -> R | tuple[R, ...]:
        return tuple(self)[at] if isinstance(at, slice) else self._row(at)

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, Sequence) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))


@dataclass(frozen=True, slots=True, eq=False)
class Addresses(_Rows[Slot]):
    """The same slots as a sequence."""

    of: Slots

    def __len__(self) -> int:
        return len(self.of.indices)

    def __iter__(self) -> Iterator[Slot]:
        return addresses(*self.of)

    def _row(self, at: int) -> Slot:
        return Slot(self.of.tier, self.of.size_class, self.of.indices[at])


class StoredChunk(NamedTuple):
    """A chunk that a tier recovered at start: `key` (child of `parent`) is in `slot` of `size_class`."""

    slot: int
    key: Key
    parent: Key | None
    size_class: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class StoredChunks(Sequence[StoredChunk]):
    """Chunks that a tier recovered, kept as columns, because there may be ten million of them.

    Attributes:
        slots: int64, shape `(n,)`; the other columns have this shape, too.
        keys: Dtype `V32` for digests of 32 bytes; object (bytes) if keys differ in length.
        parents: Keys of parents; meaningless without one.
        has_parent: bool.
        size_classes: int64.
    """

    slots: npt.NDArray[np.int64]
    keys: npt.NDArray[Any]
    parents: npt.NDArray[Any]
    has_parent: npt.NDArray[np.bool_]
    size_classes: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.slots)

    def __iter__(self) -> Iterator[StoredChunk]:
        parents = (each if has else None for each, has in zip(self.parents.tolist(), self.has_parent, strict=True))
        keys: list[Key] = self.keys.tolist()
        return map(StoredChunk, self.slots.tolist(), keys, parents, self.size_classes.tolist())

    @overload
    def __getitem__(self, at: int) -> StoredChunk: ...
    @overload
    def __getitem__(self, at: slice) -> list[StoredChunk]: ...
    def __getitem__(self, at: int | slice) -> StoredChunk | list[StoredChunk]:
        if isinstance(at, slice):
            return list(self)[at]
        parent = bytes(self.parents[at]) if self.has_parent[at] else None
        return StoredChunk(self.slots.item(at), bytes(self.keys[at]), parent, self.size_classes.item(at))

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    @classmethod
    def of(cls, chunks: Sequence[tuple[int, Key, Key | None, int]]) -> StoredChunks:
        """`chunks` as columns. Raises `TypeError`, `ValueError` or `OverflowError` where they are of other types."""
        slots, keys, parents, size_classes = zip(*chunks, strict=True) if chunks else ((), (), (), ())
        has_parent = np.array([parent is not None for parent in parents], bool)
        names = [*keys, *(keys[0] if parent is None else parent for parent in parents)]
        if not all(isinstance(key, bytes) and key for key in names):
            raise TypeError("expected keys and parents as digests (non-empty bytes)")
        lengths = set(map(len, names)) or {1}
        table = np.array(names, object if len(lengths) > 1 else f"V{max(lengths)}")
        columns = (np.frombuffer(array("q", each), np.int64) for each in (slots, size_classes))
        slot_column, class_column = columns
        return cls(slot_column, table[: len(keys)], table[len(keys) :], has_parent, class_column)

    def where(self, wanted: npt.NDArray[np.bool_] | npt.NDArray[np.int64] | slice) -> StoredChunks:
        """Those that are `wanted`: bool, shape `(n,)`; or those at these positions."""
        keys, parents = self.keys[wanted], self.parents[wanted]
        return StoredChunks(self.slots[wanted], keys, parents, self.has_parent[wanted], self.size_classes[wanted])


@dataclass(frozen=True, slots=True, eq=False)
class Items(_Rows[Item]):
    """Items of one transfer, kept as columns.

    A transfer may have thousands of items; as separate objects they would trigger garbage collection.
    """

    keys: tuple[Key, ...]
    parents: tuple[Key | None, ...]
    source: Slots | None
    destination: Slots | None

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[Item]:
        sides = (repeat(None) if side is None else addresses(*side) for side in (self.source, self.destination))
        return map(_new_item, zip(self.keys, self.parents, *sides, strict=False))

    def _row(self, at: int) -> Item:
        source, destination = (
            None if side is None else Slot(side.tier, side.size_class, side.indices[at])
            for side in (self.source, self.destination)
        )
        return Item(self.keys[at], self.parents[at], source, destination)


class Section(NamedTuple):
    """Device blocks of one KV cache group, in logical order.

    `first_block` is the logical index (in the request) of `blocks[0]`; when it is not a multiple of
    `blocks_per_chunk`, the first chunk's leading blocks are skipped.
    """

    group: int
    first_block: int
    blocks: tuple[int, ...]


class Urgency(enum.IntEnum):
    """Class of a transfer; a lower number has precedence."""

    DEMAND = 0
    PREFETCH = 1
    WRITE = 2


@dataclass(frozen=True, slots=True)
class Transfer:
    """Move `items` along `route`, once every job in `after` has ended.

    Attributes:
        job: Identity, unique in the life of one control plane.
        by_layer: Copy layer by layer, so that compute may begin before all layers have arrived. Items complete together
            at the end.
        tokens: Leading tokens of the *last* device block to move; `None` moves whole blocks.
        deadline: Clock reading in seconds; items that have not begun by then end as `Status.DEADLINE`.
        generation: The reset generation in which the transfer was ordered.
        ranks: How many ranks must report before the job has ended.
    """

    job: int
    route: Route
    items: Sequence[Item]
    sections: tuple[Section, ...] = ()
    by_layer: bool = False
    tokens: int | None = None
    urgency: Urgency = Urgency.DEMAND
    deadline: float = math.inf
    after: tuple[int, ...] = ()
    generation: int = 0
    ranks: int = 1


@dataclass(frozen=True, slots=True)
class Cancel:
    """Cancel `job`: items that have not begun need not begin. The job still ends with a result."""

    job: int


@dataclass(frozen=True, slots=True)
class Reset:
    """Tiers that outlive the process must not serve records from before `generation`.

    With `weights`, records of the new generation are of other weights than an engine that starts later may expect.
    """

    generation: int
    weights: bool = False


@dataclass(frozen=True, slots=True)
class DeleteRecords:
    """Delete the records in `slots` of `tier`, which outlives the process: they must not be recovered."""

    tier: str
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask the remote tier `tier` which of `keys`, written in `generation`, it has; the answer is due by `deadline`.

    It ends with exactly one `ProbeResult` from each rank, for the rank's own part of the images.
    """

    probe: int
    tier: str
    keys: tuple[Key, ...]
    deadline: float
    generation: int = 0
    ranks: int = 1


Command = Transfer | Probe | Cancel | Reset | DeleteRecords


class Status(enum.Enum):
    """How one item of a transfer ended. A closed enumeration."""

    OK = "ok"
    CORRUPT = "corrupt"  # the checksum does not match
    MISMATCH = "mismatch"  # a valid record of another key, scope or generation
    SHORT = "short"  # fewer bytes than the image has
    IO_ERROR = "io_error"  # the operating system or a store reported an error
    DEVICE_ERROR = "device_error"  # a copy to or from the device failed; the source is still valid
    INTERNAL_ERROR = "internal_error"  # an exception that only a bug explains; the source is still valid
    NO_SPACE = "no_space"  # the medium is full
    DEADLINE = "deadline"  # not begun or not completed in time
    CANCELLED = "cancelled"  # cancelled by the requester
    TIER_OFF = "tier_off"  # the tier is closed or disabled: permanent, for this process
    UNAVAILABLE = "unavailable"  # temporary: no tier host, a stalled disk, an open breaker; the source is still valid
    NOT_FOUND = "not_found"  # a remote tier does not have the chunk, or not any more
    QUEUE_FULL = "queue_full"  # a bounded queue was full; nothing was started

    @property
    def invalidates_source(self) -> bool:
        """Whether the source of a read with this status must not be read again."""
        return self in _INVALIDATING


_INVALIDATING = frozenset({Status.CORRUPT, Status.MISMATCH, Status.SHORT, Status.IO_ERROR})


@dataclass(frozen=True, slots=True)
class TransferResult:
    """How a transfer ended on one rank.

    Attributes:
        statuses: One per item, in item order.
        bytes: Bytes of the items that are `Status.OK`.
        seconds: Seconds spent moving, by the device's clock where it has one.
        queued_seconds: Seconds between submission and the first byte.
    """

    job: int
    statuses: tuple[Status, ...]
    bytes: int = 0
    seconds: float = 0.0
    queued_seconds: float = 0.0
    rank: int = 0


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Which keys of a probe one rank has, in order; valid only if `status` is `OK`."""

    probe: int
    present: tuple[bool, ...]
    status: Status = Status.OK
    rank: int = 0


Result = TransferResult | ProbeResult


def leading_ok(statuses: Sequence[Status]) -> int:
    """Length of the leading run of `Status.OK`."""
    return next((i for i, status in enumerate(statuses) if status is not Status.OK), len(statuses))


class Mover(Protocol):
    """Serves routes: the transfer engine at the device, tiers below it.

    `submit` validates the whole transfer before it starts any of it and raises `PlanError` or `TierError` with nothing
    changed; afterwards `poll` returns exactly one `TransferResult` per rank, whatever happens. Items not begun
    by the transfer's deadline end as `Status.DEADLINE`, those cancelled before they began as `Status.CANCELLED`.
    Movers ignore `after`: the runtime submits a transfer only when those jobs have ended.
    Only `close` blocks: it waits for items that have begun, and is idempotent.
    """

    @property
    def routes(self) -> frozenset[Route]:
        """The routes that this mover serves."""

    def submit(self, transfer: Transfer) -> None:
        """Begin `transfer`."""

    def poll(self) -> list[TransferResult]:
        """Results that arrived since the last call, without waiting."""

    def cancel(self, job: int) -> None:
        """Items of `job` that have not begun need not begin; an unknown or ended job is ignored."""

    def close(self) -> None:
        """Wait for items that have begun, end the rest as `Status.TIER_OFF`, release every resource."""


class Prober(Protocol):
    """Asks one remote tier, on one rank. Nothing blocks; the runtime handles answers that never come."""

    @property
    def tier_name(self) -> str:
        """Of the tier that is asked."""

    def ask(self, probe: Probe) -> None:
        """Begin `probe`."""

    def answers(self) -> list[ProbeResult]:
        """Answers that arrived since the last call, at most one for each probe, without waiting."""


I64 = npt.NDArray[np.int64]

DISK_PAGE = 4096
"""Alignment of every image in bytes, as required by direct I/O. (A page of a layer is another thing: `PageRef`.)"""

_LOSS = 1 / 16  # largest acceptable waste at the end of a slab, as a share
_LEAST_SLABS = 16  # for each image size, if possible


def align(size: int) -> int:
    """`size` rounded up to a multiple of `DISK_PAGE`."""
    return -(-size // DISK_PAGE) * DISK_PAGE


@dataclass(frozen=True, slots=True)
class Slabs:
    """Slots for chunk images of several sizes in one tier: in slabs, each of one image size while it is in use.

        bytes     │ slab 0            │ slab 1            │ slab 2            │
        used for  │ A │ A │ A │ A │ ··│ B       │ B       │ nothing           │
        index       0   1   2   3       4         5         8                     stride 4: the most images in a slab

    A *size class* is one image size. A slot is (tier, size class, index), with one space of indices for all sizes of
    the tier: `index = slab * stride + position`. Attributes of slots therefore need one column for all sizes; only
    allocation and byte offsets depend on sizes. With one size, a slab is one image, and indices count images.

    Attributes:
        slab_bytes: Bytes of one slab.
        image_bytes: Bytes of an image, by size class, including what the tier stores with it.
        slabs: How many slabs there are; may be zero.
        images: Images that a slab has room for, by size class.
        stride: The maximum of these: the indices of one slab.

    Raises:
        LayoutError: Sizes that are not positive, a slab that is too small for an image, a negative number of slabs.
    """

    slab_bytes: int
    image_bytes: tuple[int, ...]
    slabs: int
    images: tuple[int, ...] = field(init=False, repr=False, compare=False)
    stride: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.image_bytes or min(self.image_bytes) <= 0 or max(self.image_bytes) > self.slab_bytes:
            raise LayoutError(f"expected image sizes from 1 to {self.slab_bytes} bytes, got {self.image_bytes}")
        if self.slabs < 0:
            raise LayoutError(f"expected zero or more slabs, got {self.slabs}")
        images = tuple(self.slab_bytes // each for each in self.image_bytes)
        object.__setattr__(self, "images", images)
        object.__setattr__(self, "stride", max(images))

    @classmethod
    def of_one_size(cls, image_bytes: int, slots: int) -> Self:
        """`slots` images of one size: a slab for each."""
        return cls(image_bytes, (image_bytes,), slots)

    @classmethod
    def within(cls, nbytes: int, image_bytes: Sequence[int]) -> Self:
        """As many slabs as fit into `nbytes`, as small as possible without wasting much at their ends.

        Small slabs cost least to reclaim for another size. There may be none, if `nbytes` is too small.
        """
        sizes = tuple(image_bytes)
        best = largest = max(sizes, default=0)
        cls(largest, sizes, 0)  # which says what is wrong
        for slab_bytes in range(largest, max(largest, nbytes // (_LEAST_SLABS * len(sizes))) + 1, largest):
            if _loss(slab_bytes, sizes) < _loss(best, sizes):
                best = slab_bytes
            if _loss(best, sizes) <= _LOSS:
                break
        return cls(best, sizes, max(0, nbytes // best))

    @property
    def nbytes(self) -> int:
        """Bytes of all slabs."""
        return self.slabs * self.slab_bytes

    @property
    def indices(self) -> int:
        """Upper bound (exclusive) of the slot indices."""
        return self.slabs * self.stride

    def slab_of(self, index: int) -> int:
        """The slab of slot `index`, for any size class."""
        if not 0 <= index < self.indices:
            raise PlanError(f"expected a slot in [0, {self.indices}), got {index}")
        return index // self.stride

    def slots_of(self, slab: int, size_class: int) -> range:
        """The slot indices of a slab that is assigned to `size_class`."""
        self._check_size_class(size_class)
        if not 0 <= slab < self.slabs:
            raise PlanError(f"expected a slab in [0, {self.slabs}), got {slab}")
        return range(slab * self.stride, slab * self.stride + self.images[size_class])

    def check(self, size_class: int, index: int) -> None:
        """Raise `PlanError` unless `size_class` can have a slot `index`."""
        self.offset(size_class, index)

    def offset(self, size_class: int, index: int) -> int:
        """Bytes from the tier's start to the image in slot `index` of `size_class`. `PlanError` if there is none."""
        slab, position = divmod(index, self.stride)
        if not (0 <= size_class < len(self.images) and 0 <= slab < self.slabs and position < self.images[size_class]):
            self._check_size_class(size_class)
            raise self._no_slot(size_class, index)
        return slab * self.slab_bytes + position * self.image_bytes[size_class]

    def offsets(self, size_class: int, indices: Sequence[int] | I64) -> I64:
        """`offset` for many slots of one size class; int64, shape `(len(indices),)`."""
        self._check_size_class(size_class)
        at = np.asarray(indices, np.int64)
        slab, position = np.divmod(at, self.stride)
        bad = (at < 0) | (slab >= self.slabs) | (position >= self.images[size_class])
        if bad.any():
            raise self._no_slot(size_class, int(at[bad.argmax()]))
        offsets: I64 = slab * self.slab_bytes + position * self.image_bytes[size_class]
        return offsets

    def overlap_units(self, size_class: int, indices: Sequence[int] | I64) -> I64:
        """The bytes that slots of `size_class` share with other size classes, as indices of the smallest images there.

        Two images overlap only if they have one of these in common; if sizes do not divide, adjacent images may have
        one in common without overlapping. int64, in no particular order; with one size, the indices themselves.
        """
        at, unit = np.asarray(indices, np.int64), min(self.image_bytes)
        if self.image_bytes[size_class] == unit:
            return at
        slab, position = np.divmod(at, self.stride)
        first = position * self.image_bytes[size_class]
        low, high = first // unit, np.minimum((first + self.image_bytes[size_class] - 1) // unit, self.stride - 1)
        span = np.arange(int((high - low).max(initial=0)) + 1)
        return np.unique(slab[:, None] * self.stride + np.minimum(low[:, None] + span, high[:, None]))

    def _check_size_class(self, size_class: int) -> None:
        if not 0 <= size_class < len(self.image_bytes):
            raise PlanError(f"expected a size class in [0, {len(self.image_bytes)}), got {size_class}")

    def _no_slot(self, size_class: int, index: int) -> PlanError:
        return PlanError(
            f"size class {size_class} has slots 0 to {self.images[size_class] - 1} of each of {self.slabs} slabs, "
            f"{self.stride} indices apart; got {index}"
        )


def by_size(image_bytes: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The distinct image sizes, ascending, and the size class of each KV cache group, from the groups' image sizes."""
    sizes = tuple(sorted(set(image_bytes)))
    return sizes, tuple(sizes.index(each) for each in image_bytes)


def _loss(slab_bytes: int, sizes: Sequence[int]) -> float:
    """The part of a slab that is lost at its end, for the size that loses most."""
    return max(slab_bytes % each for each in sizes) / slab_bytes


__getattr__ = former_names(__name__, {"Discard": "DeleteRecords", "Forget": "Reset"})
