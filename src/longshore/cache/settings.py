"""Settings of a `TieredCache` and of its tiers; write policies, with their admission filter and their byte budget."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from longshore.boundary import Key, Slabs
from longshore.cache.columns import has_duplicates
from longshore.cache.eviction_policies import DEFAULT_POLICY, EvictionPolicy
from longshore.cache.eviction_policies.ghosts import Ghosts
from longshore.cache.pool import SlotPool
from longshore.cache.slab_pool import SlabPool
from longshore.errors import CacheError, former_name


class WritePolicy(enum.Enum):
    """Write policy of one route."""

    THROUGH = "write_through"
    SELECTIVE = "write_through_selective"
    BACK = "write_back"

    def wants(self, *, before_eviction: bool) -> bool:
        """Whether to store a chunk now, which has become complete on the device, or, `before_eviction`, leaves it."""
        return self is not WritePolicy.BACK or before_eviction

    def clean_target(self, slots: int, *, stores_wait: bool) -> int:
        """How many of the `slots` of the warmer tier to keep free or backed up; fewer if stores wait for room."""
        if self is not WritePolicy.BACK:
            return slots
        return -(-slots // 16) if stores_wait else slots // 4


@dataclass(frozen=True, slots=True)
class WriteRule:
    """The write policy of one route. A selective policy copies chunks that were offered or used `threshold` times.

    `bytes_per_second` limits the copies (`WriteBudget`). Chunks beyond it are counted as dropped, and may be evicted
    without a copy until their next use.
    """

    policy: WritePolicy
    threshold: int = 2
    bytes_per_second: float = math.inf

    def __post_init__(self) -> None:
        if not self.bytes_per_second > 0:
            raise CacheError(f"bytes_per_second: expected more than 0, got {self.bytes_per_second}")
        if self.selective and not 2 <= self.threshold <= _MOST_USES:
            raise CacheError(f"threshold: expected 2 to {_MOST_USES} for a selective policy, got {self.threshold}")

    @property
    def selective(self) -> bool:
        """Whether chunks are copied only after several uses."""
        return self.policy is WritePolicy.SELECTIVE


_MOST_USES = 255
"""Uses are counted in one byte."""


SAVED_SECONDS = 3600.0
"""The bucket holds the budget of one hour."""


class WriteBudget:
    """A token bucket of `rate` bytes per second, infinite for no limit; it bounds the wear of an SSD.

        rate     bytes per second, on average over a long time
        bucket   at most one hour of the rate, full at the start, which can be spent at once

    The time is passed by the caller.
    """

    __slots__ = ("_left", "_now", "rate")

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._left = rate * SAVED_SECONDS
        self._now: float | None = None

    def allows(self, now: float, count: int, nbytes: int) -> int:
        """How many of `count` writes of `nbytes` each are allowed at `now`."""
        if self.rate == math.inf:
            return count
        if self._now is not None and now > self._now:
            self._left = min(self._left + (now - self._now) * self.rate, self.rate * SAVED_SECONDS)
        self._now = now if self._now is None else max(now, self._now)
        return min(count, int(self._left // nbytes))

    def spend(self, nbytes: int) -> None:
        """Spend `nbytes` that were allowed."""
        self._left -= nbytes


class OfferFilter:
    """Admission filter of selective write policies: counts how often chunks that no tier has were offered.

    The counts of the last `limit` distinct chunks are kept, in a ring; a chunk that has left it starts at one again.
    """

    def __init__(self, threshold: int, limit: int) -> None:
        if threshold < 2:
            raise CacheError(f"threshold: expected at least 2 offers, got {threshold}")
        self._steps = [Ghosts(limit) for _ in range(threshold - 1)]
        """The keys that were offered once, twice, ..."""

    def leading(self, keys: Sequence[Key]) -> int:
        """Count an offer of each of `keys`; returns how many leading ones have reached the threshold."""
        enough = [self._see(key) for key in keys]
        return next((i for i, each in enumerate(enough) if not each), len(enough))

    def _see(self, key: Key) -> bool:
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
    """Chunks `[first, end)` of a request have `priority`, for `seconds` seconds, or without limit if that is `None`.

    `end` is `None` for all chunks from `first` on.

        tokens     0 ──────── 512 ─────────────────── 4096
        priority   90         10, for 30 seconds           35, the default

    The lowest priority is evicted first, whatever its age. When the time is over, a chunk has the default priority.
    After the retention settings of TensorRT-LLM.
    """

    first: int
    end: int | None
    priority: int
    seconds: float | None = None

    @classmethod
    def of_tokens(
        cls, first: int, end: int | None, priority: int, seconds: float | None = None, *, chunk_tokens: int
    ) -> Retention:
        """The retention of all chunks with one of the tokens `[first, end)`."""
        return cls(first // chunk_tokens, None if end is None else -(-end // chunk_tokens), priority, seconds)


def check_retention(retention: Sequence[Retention]) -> None:
    """Raise `CacheError` for an invalid range, priority or time."""
    for each in retention:
        good = each.first >= 0 and (each.end is None or each.end > each.first)
        good &= isinstance(each.priority, int) and 0 <= each.priority <= HIGHEST_PRIORITY
        if not good or (each.seconds is not None and not each.seconds > 0):
            raise CacheError(
                f"retention: expected a range, a priority in [0, {HIGHEST_PRIORITY}] and a positive time, got {each}"
            )


def retention_ranges(retention: Sequence[Retention], positions: npt.ArrayLike) -> npt.NDArray[np.intp]:
    """The index of the range of `retention` for the chunk at each of `positions`; -1 for none; shape
    `(len(positions),)`.

    Of several ranges with a chunk, the first with the highest priority.
    """
    at = np.asarray(positions, np.int64)
    which = np.full(len(at), -1)
    for number in sorted(range(len(retention)), key=lambda each: (retention[each].priority, -each)):
        first, end = retention[number][:2]
        which[(at >= first) & (at < (math.inf if end is None else end))] = number
    return which


def priorities(retention: Sequence[Retention], positions: npt.ArrayLike) -> npt.NDArray[np.uint8]:
    """The priority of the chunk at each of `positions`; shape `(len(positions),)`."""
    of = np.array([*(each.priority for each in retention), DEFAULT_PRIORITY], np.uint8)
    return of[retention_ranges(retention, positions)]


class DeviceBlocks:
    """Checks block numbers of a device pool with `count` blocks, or without a limit if `None`."""

    def __init__(self, count: int | None) -> None:
        if count is not None and (not isinstance(count, int) or count < 0):
            raise CacheError(f"expected zero or more blocks of a device pool, got {count!r}")
        self._count = count

    def check(self, blocks: Sequence[int]) -> None:
        """Raise `CacheError` unless `blocks` are distinct blocks of the pool."""
        if any(not issubclass(kind, int | np.integer) or kind is bool for kind in set(map(type, blocks))):
            raise CacheError(f"expected device blocks as integers, got {list(blocks)[:8]}")
        try:
            numbers = np.fromiter(blocks, np.int64, len(blocks))
        except OverflowError:
            raise CacheError(f"expected device blocks in [0, {self._count}), got {list(blocks)[:8]}") from None
        if has_duplicates(numbers):
            raise CacheError(f"expected distinct device blocks, got {list(blocks)[:8]}")
        if len(numbers) and (numbers.min() < 0 or (self._count is not None and numbers.max() >= self._count)):
            raise CacheError(f"expected device blocks in [0, {self._count}), got {numbers.min()} to {numbers.max()}")


class PrefetchPolicy(enum.Enum):
    """How long a request waits for its prefetch. After the policies of SGLang's hierarchical cache."""

    BEST_EFFORT = "best_effort"  # not at all: it uses the chunks that have arrived when it is scheduled
    WAIT = "wait_complete"  # until all chunks have arrived, at most `load_timeout`
    TIMEOUT = "timeout"  # until all chunks have arrived, at most the given seconds


def timeout_of(given: float | None, usual: float) -> float:
    """The seconds `given`, or `usual` if `None`. Raises `CacheError` unless they are positive."""
    if given is None:
        return usual
    if not isinstance(given, int | float) or not 0 < given < math.inf:
        raise CacheError(f"timeout: expected a positive number of seconds, got {given!r}")
    return given


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSettings:
    """Settings of a `TieredCache`.

    Attributes:
        blocks_per_chunk: Device blocks per chunk.
        groups: The KV cache groups, in the order of the layout; may be empty if all have full attention, and no lookup
            is of several groups.
        partial: Whether the tokens of chunks that `store` gets are kept, for partial matches. Requires `groups`.
        ranks: How many ranks hold a part of each image, and report each job.
        offload: Write policy device -> host tier.
        backup: Write policy of each tier -> the next colder one.
        threshold: Offers or uses of a chunk before a selective write policy copies it.
        write_rules: Write rules of routes with other rules, by name of the destination tier.
        admission: Whether full tiers reject chunks with fewer expected hits than those to evict for them, if the policy
            of the coldest has expected hits, and remote tiers that have lost chunks are not sent such. Host
            memory rejects none if there are remote tiers, or with `is_served`.
        is_served: Whether other engines read what the tiers have.
        stores_wait: Whether the engine offers chunks again for which there was no room. Such a store loses nothing, so
            write-back keeps a sixteenth of a tier clean instead of a quarter, and no reserve beyond that.
        prompt_only: Whether only chunks of the prompt are offloaded.
        priority_floor: The lowest priority that is offloaded.
        prefetch: The policy of prefetches without one.
        prefetch_timeout: Seconds of a prefetch with the policy `TIMEOUT`.
        load_timeout: Seconds of a load.
        write_timeout: Seconds until a copy to a colder tier must have begun (docs/settings.md has the other uses).
        probe_timeout: Seconds until a remote tier must have answered a probe.
        probe_life: Seconds for which its answer is valid.
        max_probes: Keys in flight in probes of one remote tier; probes beyond it are counted, and not sent.
        max_writes: Chunks in flight per write route; more are dropped (offloads) or postponed (backups).
        events: Events kept for a reader (`TieredCache.events`); 0 records none.
        read_only: Remote tiers that nothing is stored in, and of which it is not remembered what they lack.
        remote_events: Whether events tell of copies in remote tiers, too.
        device_blocks: Blocks of the device pool, to check block numbers; `None` leaves that to the data plane.
        self_test_key: The chunk of the self-test, which no hit, route or event counts.
        size_classes: The number of the image size of the chunks of each KV cache group; if empty, 0 for all.
    """

    blocks_per_chunk: int = 1
    groups: tuple[CacheGroup, ...] = ()
    partial: bool = False
    ranks: int = 1
    offload: WritePolicy = WritePolicy.THROUGH
    backup: WritePolicy = WritePolicy.BACK
    threshold: int = 2
    write_rules: Mapping[str, WriteRule] = field(default_factory=dict)
    admission: bool = True
    is_served: bool = False
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
    read_only: tuple[str, ...] = ()
    remote_events: bool = False
    device_blocks: int | None = None
    self_test_key: Key | None = None
    size_classes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("blocks_per_chunk", "ranks", "max_writes", "max_probes"):
            if getattr(self, name) < 1:
                raise CacheError(f"{name}: expected at least 1, got {getattr(self, name)}")
        for policy in (self.offload, self.backup):
            WriteRule(policy, self.threshold)
        for name in ("prefetch_timeout", "load_timeout", "write_timeout", "probe_timeout", "probe_life"):
            if not 0 < getattr(self, name) < math.inf:
                raise CacheError(f"{name}: expected a positive number of seconds, got {getattr(self, name)}")
        if not 0 <= self.priority_floor <= HIGHEST_PRIORITY:
            raise CacheError(f"priority_floor: expected 0 to {HIGHEST_PRIORITY}, got {self.priority_floor}")

        if self.partial and not self.groups:
            raise CacheError("partial: expected groups as well, which say how many tokens a chunk has")

    def rules(self, tiers: Sequence[str], remote: Sequence[str] = ()) -> tuple[WriteRule, ...]:
        """The write rule of the route into each of `tiers`, warmest first, and into each of the `remote` ones.

        Write-back into a remote tier is a copy of what is about to be evicted from the host tier, as far as there is
        time: what a remote tier has cannot be counted on, so nothing waits for the copy.
        """
        names = [*tiers, *remote]
        unknown = sorted(set(self.write_rules) - set(names))
        if unknown:
            raise CacheError(f"write_rules: expected tiers of {names}, got {unknown}")
        usual = [self.offload, *[self.backup] * (len(tiers) - 1), *[WritePolicy.THROUGH] * len(remote)]
        rules = [
            self.write_rules.get(name, WriteRule(policy, self.threshold))
            for name, policy in zip(names, usual, strict=True)
        ]
        return tuple(rules)

    def group(self, index: int) -> tuple[CacheGroup, int]:
        """A group, and the tokens of its chunks. Raises `CacheError` if it is not in `groups`."""
        if not 0 <= index < len(self.groups):
            raise CacheError(f"expected a group in [0, {len(self.groups)}), got {index}")
        return self.groups[index], self.groups[index].block_size * self.blocks_per_chunk

    def check_tokens(self, tokens: int | None, group: int) -> None:
        """Raise `CacheError` unless `tokens` tokens fit a block of `group`, where its size is known."""
        most = self.group(group)[0].block_size if self.groups else tokens
        if tokens is not None and not 0 < tokens <= (most or 0):
            raise CacheError(f"tokens: expected 1 to {most} of a block of group {group}, got {tokens}")

    @property
    def first_tokens(self) -> int:
        """Tokens of a chunk of the first group; 0 without `groups`."""
        return self.group(0)[1] if self.groups else 0

    @property
    def token_width(self) -> int:
        """Tokens kept of each chunk: those of the longest chunk, or none."""
        return max((self.group(index)[1] for index in range(len(self.groups))), default=0) if self.partial else 0

    def is_independent(self, index: int) -> bool:
        """Whether chunks of this group are independent; false without `groups`."""
        return bool(self.groups) and self.group(index)[0].is_independent

    def size_class_of(self, group: int) -> int:
        """The size class of the chunks of a group. Raises `CacheError` for an unknown group."""
        if group < 0 or (self.size_classes and group >= len(self.size_classes)):
            most = f"in [0, {len(self.size_classes)})" if self.size_classes else "of 0 or more"
            raise CacheError(f"expected a group {most}, got {group}")
        return self.size_classes[group] if self.size_classes else 0


CacheSettings.into = former_name("into", "write_rules")  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """One KV cache group, as the control plane sees it.

    Attributes:
        block_size: Tokens per block.
        window: Tokens that the next token attends to, itself not counted; `None` for all.
        recurrent: Whether a chunk is the state at its end, as in Mamba layers; only the last chunk is needed then.
    """

    block_size: int
    window: int | None = None
    recurrent: bool = False

    def __post_init__(self) -> None:
        if self.block_size < 1 or (self.window is not None and (self.window < 1 or self.recurrent)):
            raise CacheError(f"expected block_size of at least 1, and window or recurrent, not both; got {self}")

    @property
    def is_independent(self) -> bool:
        """Whether a chunk can be used without those before it: each is evicted by itself."""
        return self.recurrent or self.window is not None

    def first_needed(self, tokens: int, chunk_tokens: int) -> int:
        """The first chunk that is needed after `tokens` tokens, of `chunk_tokens` each."""
        if not self.is_independent:
            return 0
        return max(0, tokens - (self.window or 1)) // chunk_tokens


@dataclass(frozen=True, slots=True)
class TierSpec:
    """One own tier: its name, its slots, the bytes of one image, and its eviction policy.

    With several image sizes, `slots` are the `Slabs` of the tier, and `image_bytes` is not given. A tier that
    `outlives` the process gets `DeleteRecords` commands, so that the next process does not recover removed chunks.
    """

    name: str
    slots: int | Slabs
    image_bytes: int = 1
    policy: type[EvictionPolicy] = DEFAULT_POLICY
    outlives: bool = False

    def make_pool(self) -> SlotPool:
        """The slots of the tier, all free. Raises `CacheError` for an invalid number or size."""
        pool = self._make_pool()
        pool.where = f"{self.name} tier: "
        if self.outlives:
            pool.freed = []
        return pool

    def _make_pool(self) -> SlotPool:
        if isinstance(self.slots, Slabs):
            alike = len(self.slots.image_bytes) == self.slots.stride == 1  # a slab is a slot
            return (SlotPool if alike else SlabPool)(self.slots)
        if self.slots < 0 or self.image_bytes < 1:
            raise CacheError(f"tier {self.name!r} cannot have {self.slots} slots of {self.image_bytes} bytes")
        return SlotPool(Slabs.of_one_size(self.image_bytes, self.slots))
