"""Keys that can be read, caches that can be built twice, and calls that can be made again.

A key is the path of branches from the root, padded to 32 bytes: `chunks("aba")` are the keys of a prompt.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from longshore.boundary import FILE, HOST, Key
from longshore.cache import CacheSettings, TieredCache, TierSpec, WritePolicy, WriteRule
from longshore.cache.eviction import ARC, LRU
from longshore.errors import CacheError

IMAGE_BYTES = 4096
LOAD, WRITE, PREFETCH = 10.0, 60.0, 2.0
COLDER = ("third", "fourth", "fifth")
"""Names of tiers below the file tier."""
FRESH = "zyxwvuts"
"""A path that no rule uses, for the end of a run."""


def key(path: str) -> Key:
    """The key of the chunk at the end of `path`."""
    return path.encode().ljust(32, b".")


def chunks(path: str) -> list[Key]:
    """The keys of a prompt, head first."""
    return [key(path[: i + 1]) for i in range(len(path))]


def path_of(of: Key) -> str:
    """The path that a key stands for."""
    return of.rstrip(b".").decode()


def depth(of: Key) -> int:
    """How many chunks come before."""
    return len(path_of(of)) - 1


def above(of: Key) -> list[Key]:
    """`of` and all its ancestors, head first."""
    return chunks(path_of(of))


def parent(of: Key) -> Key | None:
    """The chunk before `of`."""
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
    into: tuple[tuple[str, str, int], ...] = ()
    budget: float = math.inf
    threshold: int = 2
    prompt_only: bool = False
    priority_floor: int = 0
    events: int = 0

    @property
    def sizes(self) -> dict[str, int]:
        """Slots of each tier, warmest first."""
        slots = (self.host, *((self.file, *self.more) if self.file is not None else ()))
        return dict(zip((HOST, FILE, *COLDER), slots, strict=False))

    def build(self) -> TieredCache:
        """A new cache, with what was found in its file tier."""
        policy = {"lru": LRU, "arc": ARC}[self.policy]
        tiers = [TierSpec(name, slots, IMAGE_BYTES, policy) for name, slots in self.sizes.items()]
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
            into={
                **({FILE: backup} if self.file is not None else {}),
                **{tier: WriteRule(WritePolicy(rule), threshold) for tier, rule, threshold in self.into},
            },
            load_timeout=LOAD,
            write_timeout=WRITE,
            max_writes=self.max_writes,
            device_blocks=self.device_blocks,
        )
        cache = TieredCache(tiers, settings, generation=self.generation)
        if self.found:
            cache.adopt(FILE, self.found)
        return cache


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
