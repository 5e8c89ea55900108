"""How a `TieredCache` behaves, and what its tiers are."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from longshore.boundary import Key
from longshore.cache.eviction import DEFAULT_POLICY, EvictionPolicy
from longshore.cache.groups import CacheGroup
from longshore.cache.pool import SlotPool
from longshore.cache.retention import HIGHEST_PRIORITY
from longshore.cache.slab_pool import SlabPool
from longshore.cache.writing import WritePolicy, WriteRule
from longshore.errors import CacheError
from longshore.slabs import Slabs


class PrefetchPolicy(enum.Enum):
    """How long a request waits for its prefetch. After the policies of SGLang's hierarchical cache."""

    BEST_EFFORT = "best_effort"  # not at all: it uses what is there when its turn comes
    WAIT = "wait_complete"  # until all is there, but no longer than for any load
    TIMEOUT = "timeout"  # until all is there, but no longer than so many seconds


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
        """The write rule of the route into each of `tiers`, warmest first, and into each of the `foreign` ones."""
        names = [*tiers, *foreign]
        unknown = sorted(set(self.into) - set(names))
        if unknown:
            raise CacheError(f"write rules are for routes into {names}, got some into {unknown}")
        usual = [self.offload, *[self.backup] * (len(tiers) - 1), *[WritePolicy.THROUGH] * len(foreign)]
        rules = [
            self.into.get(name, WriteRule(policy, self.threshold)) for name, policy in zip(names, usual, strict=True)
        ]
        if any(rule.policy is WritePolicy.BACK for rule in rules[len(tiers) :]):
            raise CacheError(
                f"what a foreign tier has cannot be counted on: there is no write-back into {list(foreign)}"
            )
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
