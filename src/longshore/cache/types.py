"""What the control plane says to its host: plain data, and two closed enumerations of what went wrong."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import NamedTuple

from longshore.boundary import Addresses, Key, Slot, Slots, Status
from longshore.cache.beginnings import Partial
from longshore.cache.groups import Need
from longshore.cache.states import State


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
    ORPHAN = "orphan"  # the chunk before it is not in the tier, so it could not be reached
    WRITE_FAILED = "write_failed"  # the copy was attempted and did not succeed
    SELDOM = "seldom"  # offered less often than the write policy asks for
    ANSWER = "answer"  # behind the prompt, of which alone the write policy takes chunks
    PRIORITY = "priority"  # of less priority than the write policy asks for
    BUDGET = "budget"  # more than the write rule allows in so much time
    TIER_OFF = "tier_off"  # the tier takes no writes any more


class Answer(enum.Enum):
    """What became of the question whether a foreign tier has a chunk. Closed: there is no "other"."""

    PRESENT = "present"
    ABSENT = "absent"
    NONE = "none"  # it did not come in time, or not from all ranks
    UNASKED = "unasked"  # too many are under way


class Presence(enum.Enum):
    """What `peek` found."""

    ABSENT = "absent"
    IN_FLIGHT = "in_flight"
    READY = "ready"  # in the warmest tier: can be onboarded at once
    COLDER = "colder"  # ready, but only below the warmest tier


class Run(NamedTuple):
    """`chunks` consecutive chunks whose warmest ready copy lies in `tier`."""

    tier: str
    chunks: int


class Hold(NamedTuple):
    """A claim on a matched prefix: nothing of it is evicted until `TieredCache.release(hold)`."""

    id: int


class Match(NamedTuple):
    """The longest ready prefix: `length` chunks from `start`. `hold` is `None` when it is empty.

    Behind these, and what is on its way, come `foreign` chunks that a foreign tier is known to have, for `fetch`. Its
    answers to `probes`, which are `in_flight`, may make these more at a later match. With a `partial` match, the first
    tokens of another chunk come right behind the prefix; it is held with it if a tier has it. `turn` is that of the
    request: its other calls are to name it.
    """

    start: int
    length: int
    hold: Hold | None
    foreign: int = 0
    probes: tuple[int, ...] = ()
    partial: Partial | None = None
    turn: int = 0


class GroupMatch(NamedTuple):
    """The longest prefix at which all KV cache groups of a request are served: so many `tokens`.

    A multiple of the chunks of all groups; and where parts of chunks may be reused, less than one such multiple more.
    `needs` says what each group needs of it. `hold` is `None` when nothing is to be loaded from the tiers.
    So many tokens more, `foreign`, could be served with what is on its way, and what foreign tiers are known to have,
    for `fetch_groups`; the answers to `probes`, which are `in_flight`, may make these more at a later match.
    `turn` is that of the request.
    """

    tokens: int
    needs: tuple[Need, ...]
    hold: Hold | None
    foreign: int = 0
    probes: tuple[int, ...] = ()
    turn: int = 0


class Part(NamedTuple):
    """One job of an onboarding: it fills the device blocks of `chunks` consecutive chunks."""

    job: int
    chunks: int


class Onboarding(NamedTuple):
    """What `onboard` ordered: `chunks` in all (fewer than asked when room ran out), in order, by `parts`."""

    chunks: int
    parts: tuple[Part, ...]


class Outcome(NamedTuple):
    """How an onboarding ended: the leading `chunks` are on the device, and came from the tiers `sources`."""

    chunks: int
    sources: tuple[str, ...]


class Loan(NamedTuple):
    """Slots that the host may read until it reports `job`."""

    job: int
    slots: Addresses


class Placement(NamedTuple):
    """Where an accepted chunk goes: `position` in the keys that were offered, and its slot."""

    position: int
    slot: Slot


class Offload(NamedTuple):
    """What `commit` or `offer` accepted: the chunks at `positions` of the keys, in order, go to `slots`.

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
