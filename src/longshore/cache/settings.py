"""How a `TieredCache` behaves, and what its tiers are."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from longshore.boundary import Key, Slabs
from longshore.cache.eviction import DEFAULT_POLICY, EvictionPolicy
from longshore.cache.eviction.ghosts import Ghosts
from longshore.cache.pool import SlotPool
from longshore.cache.slab_pool import SlabPool
from longshore.errors import CacheError


class WritePolicy(enum.Enum):
    """Write policy of one route."""

    THROUGH = "write_through"
    SELECTIVE = "write_through_selective"
    BACK = "write_back"

    def wants(self, *, evicting: bool) -> bool:
        """Whether a chunk on the device is to be copied now that it is complete, or `evicting`."""
        return self is not WritePolicy.BACK or evicting

    def clean_target(self, slots: int) -> int:
        """How many of the upper tier's `slots` are to be free, or safe to evict."""
        return slots // 4 if self is WritePolicy.BACK else slots


@dataclass(frozen=True, slots=True)
class WriteRule:
    """The write policy of one route. A selective one copies what was offered, or used, `threshold` times.

    `bytes_per_second` bounds what is copied (`WriteBudget`); what it does not allow is refused, and counted:
    it may go without a copy until it is used again.
    """

    policy: WritePolicy
    threshold: int = 2
    bytes_per_second: float = math.inf

    def __post_init__(self) -> None:
        if not self.bytes_per_second > 0:
            raise CacheError(f"a write budget is a positive number of bytes per second, got {self.bytes_per_second}")
        if self.selective and not 2 <= self.threshold <= _MOST_USES:
            raise CacheError(f"a selective policy has a threshold from 2 to {_MOST_USES}, got {self.threshold}")

    @property
    def selective(self) -> bool:
        """Whether chunks have to come back before they are copied."""
        return self.policy is WritePolicy.SELECTIVE


_MOST_USES = 255
"""Uses are counted in a byte."""


SAVED_SECONDS = 3600.0
"""So much of the rate can be saved up."""


class WriteBudget:
    """A budget of `rate` bytes per second; infinite for no limit. An SSD lasts as long as it should.

        rate     bytes per second, on the average of any long time
        bucket   holds an hour's worth at most, and is full at the start: what is saved up can be spent at once

    The clock is the caller's: whatever readings it passes, and never one of our own.
    """

    __slots__ = ("_left", "_now", "rate")

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._left = rate * SAVED_SECONDS
        self._now: float | None = None

    def allows(self, now: float, count: int, nbytes: int) -> int:
        """How many of `count` writes of `nbytes` each may be made at `now`."""
        if self.rate == math.inf:
            return count
        if self._now is not None and now > self._now:
            self._left = min(self._left + (now - self._now) * self.rate, self.rate * SAVED_SECONDS)
        self._now = now if self._now is None else max(now, self._now)
        return min(count, int(self._left // nbytes))

    def spend(self, nbytes: int) -> None:
        """So many bytes, which were allowed, will be written."""
        self._left -= nbytes


class AdmissionFilter:
    """How often chunks that no tier has were offered: for write policies that store what comes back.

    Counts are kept for the last `limit` different chunks, in a ring; who was forgotten starts again at one.
    """

    def __init__(self, threshold: int, limit: int) -> None:
        if threshold < 2:
            raise CacheError(f"a threshold of sightings is at least 2, got {threshold}")
        self._steps = [Ghosts(limit) for _ in range(threshold - 1)]
        """The keys that were seen once, twice, ..."""

    def leading(self, keys: Sequence[Key]) -> int:
        """Count another sighting of each of `keys`; says how many lead that were seen often enough now."""
        enough = [self._see(key) for key in keys]
        return next((i for i, each in enumerate(enough) if not each), len(enough))

    def _see(self, key: Key) -> bool:
        """Whether this is at least the sighting that the threshold asks for. Goes on being so."""
        last = self._steps[-1]
        for seen, following in zip(self._steps, [*self._steps[1:], last], strict=True):
            if seen.take(key):
                following.add(key, 1)
                return seen is last
        self._steps[0].add(key, 1)
        return False


DEFAULT_PRIORITY = 35
HIGHEST_PRIORITY = 100


class Retention(NamedTuple):
    """Chunks `[first, end)` of a request have `priority`, for some `seconds` or for good.

    `end` is `None` for all chunks behind.

        tokens     0 ──────── 512 ─────────────────── 4096
        priority   90         10, for 30 seconds           35 where nothing is said

    What has the lowest priority is evicted first, whatever its age. When its time is over, a chunk has the priority of
    those of which nothing was said. After the retention settings of TensorRT-LLM.
    """

    first: int
    end: int | None
    priority: int
    seconds: float | None = None

    @classmethod
    def of_tokens(
        cls, first: int, end: int | None, priority: int, seconds: float | None = None, *, chunk_tokens: int
    ) -> Retention:
        """The same for tokens `[first, end)`: every chunk that has one of them."""
        return cls(first // chunk_tokens, None if end is None else -(-end // chunk_tokens), priority, seconds)


def check(retention: Sequence[Retention]) -> None:
    """Raise `CacheError` for a range, a priority or a time that cannot be."""
    for each in retention:
        good = each.first >= 0 and (each.end is None or each.end > each.first)
        good &= isinstance(each.priority, int) and 0 <= each.priority <= HIGHEST_PRIORITY
        if not good or (each.seconds is not None and not each.seconds > 0):
            raise CacheError(
                f"a retention names chunks, a priority in [0, {HIGHEST_PRIORITY}] and a positive time, got {each}"
            )


def said(retention: Sequence[Retention], positions: npt.ArrayLike) -> npt.NDArray[np.intp]:
    """Which of `retention` is meant for the chunk at each of `positions`; -1 for none. Shape `(len(positions),)`.

    If several ranges have it, the one with the highest priority is, and the first of equals.
    """
    at = np.asarray(positions, np.int64)
    which = np.full(len(at), -1)
    for number in sorted(range(len(retention)), key=lambda each: (retention[each].priority, -each)):
        first, end = retention[number][:2]
        which[(at >= first) & (at < (math.inf if end is None else end))] = number
    return which


def priorities(retention: Sequence[Retention], positions: npt.ArrayLike) -> npt.NDArray[np.uint8]:
    """The priority of the chunk at each of `positions`. Shape `(len(positions),)`."""
    of = np.array([*(each.priority for each in retention), DEFAULT_PRIORITY], np.uint8)
    return of[said(retention, positions)]


class DeviceBlocks:
    """Blocks 0 .. `count` - 1 of the device pool; any number of them if that is `None`."""

    def __init__(self, count: int | None) -> None:
        if count is not None and (not isinstance(count, int) or count < 0):
            raise CacheError(f"a device pool has zero or more blocks, got {count!r}")
        self._count = count
        self.asleep = False
        """Whether their memory was given up."""

    def check(self, blocks: Sequence[int]) -> None:
        """Raise `CacheError` unless `blocks` are there, and distinct."""
        if self.asleep:
            raise CacheError("the device's memory was given up by `sleep`, and not taken back by `wake`")
        if any(not issubclass(kind, int | np.integer) or kind is bool for kind in set(map(type, blocks))):
            raise CacheError(f"device blocks are whole numbers, got {list(blocks)[:8]}")
        if len(set(blocks)) != len(blocks):
            raise CacheError(f"device blocks are distinct, got {list(blocks)[:8]}")
        if blocks and (min(blocks) < 0 or (self._count is not None and max(blocks) >= self._count)):
            raise CacheError(f"device blocks lie in [0, {self._count}), got {min(blocks)} to {max(blocks)}")


class PrefetchPolicy(enum.Enum):
    """How long a request waits for its prefetch. After the policies of SGLang's hierarchical cache."""

    BEST_EFFORT = "best_effort"  # not at all: it uses what is there when its turn comes
    WAIT = "wait_complete"  # until all is there, but no longer than for any load
    TIMEOUT = "timeout"  # until all is there, but no longer than so many seconds


def check_time(now: float) -> None:
    """Raise `CacheError` unless `now` is a finite number: time would not return from infinity."""
    if not isinstance(now, int | float) or not math.isfinite(now):
        raise CacheError(f"now: expected a finite number of seconds, got {now!r}")


def seconds(given: float | None, usual: float) -> float:
    """The seconds that a caller has `given`, or the `usual` ones. Raises `CacheError` for what is no length of time."""
    if given is None:
        return usual
    if not isinstance(given, int | float) or not 0 < given < math.inf:
        raise CacheError(f"a timeout is a positive number of seconds, got {given!r}")
    return given


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSettings:
    """How a `TieredCache` behaves.

    Attributes:
        blocks_per_chunk: Device blocks per chunk.
        groups: The KV cache groups, in the order of the layout's; none if all have full attention, and no match is for
            several of them.
        partial: Whether the tokens of chunks are kept, as far as `store` is told them, for partial matches. Asks for
            `groups`.
        ranks: How many ranks hold a part of each image, and report each job.
        offload: Write policy device -> warmest tier.
        backup: Write policy warmest tier -> the one below, and from there on down.
        threshold: How often a chunk is offered, or used, before a selective write policy copies it.
        into: Write rules of routes that differ from these, by the name of the tier that the route leads into.
        admission: Whether a full tier below the warmest refuses copies that promise fewer hits than what would go for
            them, where its eviction policy can say so.
        stores_wait: Whether the engine offers chunks again that have found no room. Then no reserve of clean slots is
            kept beyond that of the write policy: a store that waits loses nothing.
        prompt_only: Whether chunks behind the prompt are left out of offloads.
        priority_floor: The least priority that is offloaded.
        prefetch: How long a request waits for its prefetch, unless it says otherwise.
        prefetch_timeout: Seconds after which it waits no longer, if that is a policy of `TIMEOUT`.
        load_timeout: Seconds after which a load is given up.
        write_timeout: Seconds after which a write that has not begun is not worth beginning.
        probe_timeout: Seconds within which a foreign tier says what it has.
        probe_life: Seconds for which its answer counts.
        max_probes: Keys that a foreign tier is asked for at a time; more are not asked for, and counted.
        max_writes: Chunks in flight per write route; more are dropped (offloads) or left for later (backups).
        events: Events to keep for a reader (`TieredCache.events`); none are recorded at zero.
        device_blocks: Blocks of the device pool, to check ids against; `None` leaves that to the data plane.
        self_test_key: A chunk that a test of the tiers sends through them: no hit, route or event counts it.
        pools: For each KV cache group the pool, that is the image size, of its chunks in the tiers; all are in pool 0
            if nothing is said.
    """

    blocks_per_chunk: int = 1
    groups: tuple[CacheGroup, ...] = ()
    partial: bool = False
    ranks: int = 1
    offload: WritePolicy = WritePolicy.THROUGH
    backup: WritePolicy = WritePolicy.BACK
    threshold: int = 2
    into: Mapping[str, WriteRule] = field(default_factory=dict)
    admission: bool = True
    stores_wait: bool = False
    prompt_only: bool = False
    priority_floor: int = 0
    prefetch: PrefetchPolicy = PrefetchPolicy.BEST_EFFORT
    prefetch_timeout: float = 1.0
    load_timeout: float = 10.0
    write_timeout: float = 60.0
    probe_timeout: float = 0.1
    probe_life: float = 30.0
    max_probes: int = 8192
    max_writes: int = 1024
    events: int = 0
    device_blocks: int | None = None
    self_test_key: Key | None = None
    pools: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if min(self.blocks_per_chunk, self.ranks, self.max_writes, self.max_probes) < 1:
            raise CacheError(f"blocks_per_chunk, ranks, max_writes and max_probes are at least 1, got {self}")
        for policy in (self.offload, self.backup):
            WriteRule(policy, self.threshold)
        loads, probes = (self.prefetch_timeout, self.load_timeout), (self.probe_timeout, self.probe_life)
        if not all(0 < each < math.inf for each in (*loads, self.write_timeout, *probes)):
            raise CacheError(f"timeouts are positive numbers of seconds, got {self}")
        if not 0 <= self.priority_floor <= HIGHEST_PRIORITY:
            raise CacheError(f"priority_floor lies in [0, {HIGHEST_PRIORITY}], got {self.priority_floor}")

        if self.partial and not self.groups:
            raise CacheError("partial matches ask for the groups, which say how many tokens a chunk has")

    def rules(self, tiers: Sequence[str], foreign: Sequence[str] = ()) -> tuple[WriteRule, ...]:
        """The write rule of the route into each of `tiers`, warmest first, and into each of the `foreign` ones.

        Write-back into a foreign tier is a copy of what is about to be evicted from the warmest, as far as there is
        time: what a foreign tier has cannot be counted on, so nothing waits for the copy.
        """
        names = [*tiers, *foreign]
        unknown = sorted(set(self.into) - set(names))
        if unknown:
            raise CacheError(f"write rules are for routes into {names}, got some into {unknown}")
        usual = [self.offload, *[self.backup] * (len(tiers) - 1), *[WritePolicy.THROUGH] * len(foreign)]
        rules = [
            self.into.get(name, WriteRule(policy, self.threshold)) for name, policy in zip(names, usual, strict=True)
        ]
        return tuple(rules)

    def group(self, index: int) -> tuple[CacheGroup, int]:
        """A group, and how many tokens its chunks have. Raises `CacheError` for one that is not in `groups`."""
        if not 0 <= index < len(self.groups):
            raise CacheError(f"group {index} is none of the {len(self.groups)} groups of the settings")
        return self.groups[index], self.groups[index].block_size * self.blocks_per_chunk

    @property
    def token_width(self) -> int:
        """Tokens that are kept of each chunk: as many as the longest has, or none."""
        return max((self.group(index)[1] for index in range(len(self.groups))), default=0) if self.partial else 0

    def stands_alone(self, index: int) -> bool:
        """Whether chunks of this group stand alone. Without `groups` none does, whatever the group."""
        return bool(self.groups) and self.group(index)[0].alone

    def pool_of(self, group: int) -> int:
        """The pool of a group's chunks. Raises `CacheError` for a group that there is not."""
        if group < 0 or (self.pools and group >= len(self.pools)):
            raise CacheError(f"groups lie in [0, {len(self.pools) or 'any number'}), got {group}")
        return self.pools[group] if self.pools else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """One KV cache group, as the control plane sees it.

    Attributes:
        block_size: Tokens per block.
        window: How many tokens before it the next token sees, itself not counted; `None` for all of them.
        recurrent: Whether a chunk is the state at its end, as in Mamba layers: of all chunks only the last is needed.
    """

    block_size: int
    window: int | None = None
    recurrent: bool = False

    def __post_init__(self) -> None:
        if self.block_size < 1 or (self.window is not None and (self.window < 1 or self.recurrent)):
            raise CacheError(f"a group has blocks of a token or more, and one kind of attention; got {self}")

    @property
    def alone(self) -> bool:
        """Whether a chunk is of use without those before it, and so stands alone in the tiers."""
        return self.recurrent or self.window is not None

    def first_needed(self, tokens: int, chunk_tokens: int) -> int:
        """The first chunk that is needed after `tokens` tokens, of `chunk_tokens` each."""
        if not self.alone:
            return 0
        return max(0, tokens - (self.window or 1)) // chunk_tokens


@dataclass(frozen=True, slots=True)
class TierSpec:
    """One owned tier: its name, its slots, the bytes of one image, and the eviction policy to make for it.

    Where images have several sizes, `slots` are the tier's `Slabs`, and `image_bytes` is left out. What lies in a tier
    that `outlives` the process may be found by the next one, so it is told of slots whose bytes nobody wants any more.
    """

    name: str
    slots: int | Slabs
    image_bytes: int = 1
    policy: type[EvictionPolicy] = DEFAULT_POLICY
    outlives: bool = False

    def make_pool(self) -> SlotPool:
        """The tier's slots, all of them free. Raises `CacheError` for a number or a size that cannot be."""
        pool = self._make_pool()
        if self.outlives:
            pool.freed = []
        return pool

    def _make_pool(self) -> SlotPool:
        if isinstance(self.slots, Slabs):
            alike = len(self.slots.image_bytes) == self.slots.stride == 1  # a slab is a slot
            return (SlotPool if alike else SlabPool)(self.slots)
        if self.slots < 0 or self.image_bytes < 1:
            raise CacheError(f"tier {self.name!r} has {self.slots} slots of {self.image_bytes} bytes")
        return SlotPool(Slabs.of_one_size(self.image_bytes, self.slots))
