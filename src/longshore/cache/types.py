"""What the control plane says to its host: plain data, and two closed enumerations of what went wrong."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import NamedTuple

from longshore.boundary import Addresses, Key, Slot, Slots, Status
from longshore.cache.groups import Need
from longshore.cache.index import Residency
from longshore.cache.partial import Partial
from longshore.cache.pool import State


class MissReason(enum.Enum):
    """Why a chunk that a request wanted did not come from a tier. Closed: there is no "other"."""

    ABSENT = "absent"  # no tier has it
    FOREIGN = "foreign"  # only a foreign tier has it, as far as is known; it was not fetched
    IN_FLIGHT = "in_flight"  # still on its way into its first tier
    NO_ROOM = "no_room"  # the host tier could not make room to read it into
    BEHIND = "behind"  # resident, but behind a chunk that missed
    CORRUPT = "corrupt"
    MISMATCH = "mismatch"
    SHORT = "short"
    IO_ERROR = "io_error"
    NO_SPACE = "no_space"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    TIER_OFF = "tier_off"
    AWAY = "away"
    LAPSED = "lapsed"
    QUEUE_FULL = "queue_full"

    @classmethod
    def of(cls, status: Status) -> MissReason:
        """The reason that a failed item's status stands for."""
        return cls(status.value)


class DropReason(enum.Enum):
    """Why a chunk was not stored. Closed: there is no "other"."""

    NO_ROOM = "no_room"  # nothing in the tier may be evicted at present, or promises as little
    BACKPRESSURE = "backpressure"  # too many writes are in flight
    ORPHAN = "orphan"  # no tier has the chunk before it, and no slot was free
    WRITE_FAILED = "write_failed"  # the copy was attempted and did not succeed
    SELDOM = "seldom"  # offered less often than the write policy asks for
    ANSWER = "answer"  # behind the prompt, of which alone the write policy takes chunks
    PRIORITY = "priority"  # of less priority than the write policy asks for
    ADMISSION = "admission"  # promises fewer hits than what would have to go for it
    BUDGET = "budget"  # more than the write rule allows in so much time
    TIER_OFF = "tier_off"  # the tier takes no writes any more


class Answer(enum.Enum):
    """What became of the question whether a foreign tier has a chunk. Closed: there is no "other"."""

    PRESENT = "present"
    ABSENT = "absent"
    NONE = "none"  # it did not come in time, or not from all ranks
    UNASKED = "unasked"  # too many are under way


class Run(NamedTuple):
    """`chunks` consecutive chunks whose warmest ready copy lies in `tier`."""

    tier: str
    chunks: int


class Lease(NamedTuple):
    """A claim on what a lookup found: nothing of it is evicted until `TieredCache.release(lease)`."""

    id: int


class Until(enum.Enum):
    """How long a lookup keeps what it found from being evicted."""

    NOTHING = "nothing"  # not at all
    STEP = "step"  # until the next `end_step`
    RELEASE = "release"  # until `release`


class Found(NamedTuple):
    """What a lookup found.

    Attributes:
        lease: On the chunks that can be loaded, if there are any and the lookup was `Until.RELEASE`.
        chunks: Of a lookup for one group: how many chunks from `GroupKeys.first` on are ready in some tier.
        tokens: Of a lookup for all groups: the longest prefix, in tokens, that device and tiers have for each of them.
            A multiple of the chunks of all groups; with texts, up to one such multiple less a token more.
        needs: What each group needs of that prefix, in order of group.
        partial: Of a lookup for one group: another chunk whose first tokens come behind those; it is leased with them.
        foreign: How much more foreign tiers are known to have behind that, for `prefetch`: chunks, or tokens for all
            groups; what is on its way already is included for all groups.
        probes: Questions to foreign tiers that are under way, for `progress`; their answers may make `foreign` more.
        turn: The turn of the request, which its other calls name; `None` for `Until.NOTHING`.
        residency: Of a lookup of single chunks: where each of them is, by group.
    """

    lease: Lease | None = None
    chunks: int = 0
    tokens: int = 0
    needs: tuple[Need, ...] = ()
    partial: Partial | None = None
    foreign: int = 0
    probes: tuple[int, ...] = ()
    turn: int | None = None
    residency: Mapping[int, Residency] = {}


class DeviceCopy(NamedTuple):
    """Device slots to copy into other device blocks, one for each. `tokens` of the last; `None` for all."""

    sources: Sequence[Slot]
    tokens: int | None = None


class Part(NamedTuple):
    """One job of a load, for `chunks` consecutive chunks; the host reads them from `slots` where it moves the bytes."""

    job: int
    chunks: int
    slots: Addresses = Addresses(Slots("", 0, ()))


class LoadOrder(NamedTuple):
    """What `load` ordered: `chunks` in all (fewer than asked when room ran out), in order, by `parts`."""

    chunks: int
    parts: tuple[Part, ...]


class Progress(NamedTuple):
    """How far a job or a lease has come.

    Attributes:
        is_over: Whether nothing is waited for: the job has ended, the load has an outcome, or, of a lease that was not
            loaded, its prefetch is over.
        outcome: How the load of a lease ended.
        runs: Of a lease that was not loaded and whose prefetch is over: where its chunks are now, as runs by the
            warmest tier that has them; those that were lost are left out.
    """

    is_over: bool
    outcome: Outcome | None = None
    runs: tuple[Run, ...] = ()

    def leading(self, tier: str) -> int:
        """How many chunks lead that are in `tier`."""
        return self.runs[0].chunks if self.runs and self.runs[0].tier == tier else 0


class Outcome(NamedTuple):
    """How a load ended: the leading `chunks` are on the device, and came from the tiers `sources`."""

    chunks: int
    sources: tuple[str, ...]


class Placement(NamedTuple):
    """Where an accepted chunk goes: `position` in the keys that were offered, and its slot."""

    position: int
    slot: Slot


class StoreOrder(NamedTuple):
    """What `store` accepted of one group: the chunks at `positions` of the keys, in order, go to `slots`.

    `job` is `None` when nothing was accepted. `kept` counts the leading chunks of the path that a tier has or will
    have, those before the first that was named included; `known` are the positions, of those that were named, of chunks
    that a tier had before. With `again` there is no room yet for what was offered, and copies that will make some are
    under way: nothing was taken, and the same can be offered again.
    """

    job: int | None
    positions: Sequence[int] = ()
    slots: Addresses = Addresses(Slots("", 0, ()))
    kept: int = 0
    known: Sequence[int] = ()
    again: bool = False

    @property
    def accepted(self) -> tuple[Placement, ...]:
        """Position and slot of each accepted chunk."""
        return tuple(map(Placement, self.positions, self.slots))


@dataclass(slots=True)
class RouteTotals:
    """What one route has moved: chunks that arrived and that did not, bytes, seconds moving."""

    chunks: int = 0
    failed: int = 0
    bytes: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Counters:
    """Counts since the start. Every known label is present from the start, at zero.

    `hits` are chunks onboarded by the tier they came from, `misses` chunks wanted and not onboarded, `drops` chunks
    not stored by the tier that did not take them, `evictions` copies evicted by tier, `demotions` those of
    them that a colder tier still had, `lost` copies removed because their bytes, or their parent's, turned out to be
    unusable, `probes` keys that foreign tiers were asked for.
    """

    hits: Counter[str]
    misses: Counter[MissReason]
    drops: dict[str, Counter[DropReason]]
    evictions: Counter[str]
    demotions: Counter[str]
    lost: Counter[str]
    routes: dict[str, RouteTotals] = field(default_factory=dict)
    probes: dict[str, Counter[Answer]] = field(default_factory=dict)

    def copy(self) -> Counters:
        """A snapshot, for taking differences."""
        return deepcopy(self)

    @classmethod
    def zero(cls, tiers: tuple[str, ...], routes: tuple[str, ...], foreign: tuple[str, ...] = ()) -> Counters:
        """All counters at zero for these tiers, `routes` between them, and `foreign` tiers."""
        return cls(
            hits=Counter(dict.fromkeys(tiers, 0)),
            misses=Counter(dict.fromkeys(MissReason, 0)),
            drops={tier: Counter(dict.fromkeys(DropReason, 0)) for tier in (*tiers, *foreign)},
            evictions=Counter(dict.fromkeys(tiers, 0)),
            demotions=Counter(dict.fromkeys(tiers, 0)),
            lost=Counter(dict.fromkeys(tiers, 0)),
            routes={route: RouteTotals() for route in routes},
            probes={tier: Counter(dict.fromkeys(Answer, 0)) for tier in foreign},
        )


class SizeStats(NamedTuple):
    """What one image size has of a tier: the slabs that are given to it, and the slots in them that are taken."""

    image_bytes: int
    slabs: int
    used: int


class TierStats(NamedTuple):
    """Slots of one tier: all, taken (in flight included), and ready (it can go, unless held or being read).

    `slots` is how many there are if all images are of the smallest size. `nbytes` is the tier's capacity, `used_bytes`
    what of it is taken. `sizes` has one entry for each image size, by pool.
    """

    name: str
    slots: int
    used: int
    ready: int
    nbytes: int
    used_bytes: int
    sizes: tuple[SizeStats, ...]


class Resident(NamedTuple):
    """One chunk in one tier: filling or ready."""

    key: Key
    parent: Key | None
    slot: Slot
    state: State
