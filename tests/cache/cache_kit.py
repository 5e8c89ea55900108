"""Keys that can be read, caches that can be built twice, and calls that can be made again.

A key is the path of branches from the root, padded to 32 bytes: `chunks("aba")` are the keys of a prompt. What it is
padded with says which KV cache group it is of:

    .   group 0   full attention     a chunk for each letter, which needs those before it
    ~   group 1   sliding window     a chunk for each letter, which is independent
    =   group 2   recurrent          a chunk for every two letters, which is independent
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from longshore.boundary import FILE, HOST, Key, Slabs, Slot
from longshore.cache import (
    CacheGroup,
    CacheSettings,
    GroupKeys,
    LookupResult,
    PromptTokens,
    Protection,
    Residency,
    ScheduledStore,
    TieredCache,
    TierSpec,
    WritePolicy,
    WriteRule,
)
from longshore.cache.eviction_policies import ARC, LRU, Gittins
from longshore.errors import CacheError
from longshore.tiers.base import StoredChunk

IMAGE_BYTES = 4096
LOAD, WRITE, PREFETCH, PROBE, PROBE_LIFE = 10.0, 60.0, 2.0, 0.5, 6.0
GROUPS = (CacheGroup(block_size=4), CacheGroup(block_size=4, window=6), CacheGroup(block_size=8, recurrent=True))
IMAGE_UNITS, SLAB_UNITS = (2, 3), 6
"""Where images have two sizes: theirs, and a slab's, in units of `IMAGE_BYTES`. Group 1 has the large one."""
PADS = b".~="
ROOT = b"root"
"""What first keys are rooted in."""
COLDER = ("third", "fourth", "fifth")
"""Names of tiers below the file tier."""
FRESH = "zyxwvuts"
"""A path that no rule uses, for the end of a run."""


def key(path: str, group: int = 0) -> Key:
    """The key of the chunk at the end of `path`."""
    return path.encode().ljust(32, PADS[group : group + 1])


def letters(group: int) -> int:
    """How many letters of a prompt one chunk has."""
    return GROUPS[group].block_size // GROUPS[0].block_size


def chunks(path: str, group: int = 0) -> list[Key]:
    """The keys of a prompt, head first."""
    step = letters(group)
    return [key(path[:end], group) for end in range(step, len(path) + 1, step)]


def text_of(path: str, per_chunk: int) -> PromptTokens:
    """The tokens of a prompt of group 0: any two letters begin alike, and differ from the middle on."""
    half = GROUPS[0].block_size * per_chunk // 2
    return PromptTokens([token for letter in path for token in (0, ord(letter)) for _ in range(half)], ROOT)


def path_of(of: Key) -> str:
    """The path that a key stands for."""
    return of.rstrip(PADS).decode()


def group_of(of: Key) -> int:
    """The group that a key is of."""
    return max(0, PADS.find(of[-1:]))


def depth(of: Key) -> int:
    """How many chunks come before."""
    return len(path_of(of)) // letters(group_of(of)) - 1


def above(of: Key) -> list[Key]:
    """`of` and all that it needs to be reached, head first."""
    return chunks(path_of(of)) if not group_of(of) else [of]


def parent(of: Key) -> Key | None:
    """The chunk before `of`, if it needs that."""
    path = above(of)
    return path[-2] if len(path) > 1 else None


class Setup(NamedTuple):
    """How to build a cache; picklable."""

    host: int
    file: int | None = None
    ranks: int = 1
    per_chunk: int = 1
    offload: str = "write_through"
    backup: str = "write_back"
    max_writes: int = 1024
    device_blocks: int = 48
    found: tuple[tuple[int, Key, Key | None], ...] = ()
    generation: int = 0
    policy: str = "lru"
    more: tuple[int, ...] = ()
    write_rules: tuple[tuple[str, str, int], ...] = ()
    budget: float = math.inf
    threshold: int = 2
    prompt_only: bool = False
    priority_floor: int = 0
    events: int = 0
    groups: int = 0
    partial: bool = False
    slabs: bool = False
    remote: tuple[str, ...] = ()
    max_probes: int = 8192

    @property
    def sizes(self) -> dict[str, int]:
        """Slots of each tier, or slabs if images have two sizes, warmest first."""
        slots = (self.host, *((self.file, *self.more) if self.file is not None else ()))
        return dict(zip((HOST, FILE, *COLDER), slots, strict=False))

    def build(self) -> TieredCache:
        """A new cache, with what was found in its file tier."""
        policy = {"lru": LRU, "arc": ARC, "gittins": Gittins}[self.policy]
        tiers = [TierSpec(name, self.layout(slots), IMAGE_BYTES, policy) for name, slots in self.sizes.items()]
        backup = WriteRule(WritePolicy(self.backup), self.threshold, self.budget)
        settings = CacheSettings(
            blocks_per_chunk=self.per_chunk,
            ranks=self.ranks,
            offload=WritePolicy(self.offload),
            backup=WritePolicy(self.backup),
            threshold=self.threshold,
            prompt_only=self.prompt_only,
            priority_floor=self.priority_floor,
            events=self.events,
            prefetch_timeout=PREFETCH,
            write_rules={
                **({FILE: backup} if self.file is not None else {}),
                **{tier: WriteRule(WritePolicy(rule), threshold) for tier, rule, threshold in self.write_rules},
            },
            load_timeout=LOAD,
            write_timeout=WRITE,
            max_writes=self.max_writes,
            device_blocks=self.device_blocks,
            groups=GROUPS[: max(self.groups, self.partial)],
            partial=self.partial,
            size_classes=(0, 1, 0) if self.slabs else (),
            probe_timeout=PROBE,
            probe_life=PROBE_LIFE,
            max_probes=self.max_probes,
        )
        cache = TieredCache(tiers, settings, remote=self.remote, generation=self.generation)
        if self.found:
            cache.adopt(FILE, [StoredChunk(*each) for each in self.found])
        return cache

    def layout(self, slots: int) -> int | Slabs:
        """What a `TierSpec` is told of so many slots, or slabs."""
        sizes = tuple(units * IMAGE_BYTES for units in IMAGE_UNITS)
        return Slabs(SLAB_UNITS * IMAGE_BYTES, sizes, slots) if self.slabs else slots

    def indices(self, slots: int) -> range:
        """The indices that slots have in a tier of so many slots, or slabs."""
        return range(slots * (SLAB_UNITS // min(IMAGE_UNITS) if self.slabs else 1))

    def units(self, slot: Slot) -> range:
        """Which units of a tier's bytes the image in `slot` has."""
        if not self.slabs:
            return range(slot.index, slot.index + 1)
        slab, position = divmod(slot.index, SLAB_UNITS // min(IMAGE_UNITS))
        start = slab * SLAB_UNITS + position * IMAGE_UNITS[slot.size_class]
        return range(start, start + IMAGE_UNITS[slot.size_class])


def lookup(cache: TieredCache, keys: Sequence[Key], now: float, first: int = 0, **how: Any) -> LookupResult:
    """`TieredCache.lookup` of one path."""
    path = {name: how.pop(name) for name in ("prompt_tokens",) if name in how}
    return cache.lookup({how.pop("group", 0): GroupKeys(keys, first, **path)}, now, **how)


def residency(cache: TieredCache, keys: Sequence[Key], until: Protection = Protection.NONE, **how: Any) -> Residency:
    """`TieredCache.lookup` of single chunks: where each of them is."""
    return cache.lookup({0: GroupKeys(keys)}, 0.0, protect=until, independent=True, **how).residency[0]


def store(
    cache: TieredCache, keys: Sequence[Key], blocks: Sequence[int] | None = None, first: int = 0, **how: Any
) -> ScheduledStore:
    """`TieredCache.store` of one path; without `blocks` the host moves the bytes."""
    group = how.pop("group", 0)
    path = {name: how.pop(name) for name in ("prompt_tokens", "prompt_end", "retention") if name in how}
    order = cache.store({group: GroupKeys(keys, first, **path)}, None if blocks is None else {group: blocks}, **how)
    return order[group]


class Call(NamedTuple):
    """One call of a public method, to be made again."""

    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def replay(setup: Setup, calls: Iterable[Call]) -> list[Any]:
    """Answers of a new cache to the same calls; errors as their text."""
    cache = setup.build()
    answers: list[Any] = []
    for call in calls:
        try:
            answers.append(getattr(cache, call.method)(*call.args, **call.kwargs))
        except CacheError as error:
            answers.append(f"{type(error).__name__}: {error}")
    return answers
