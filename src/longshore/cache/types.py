"""Arguments and results of the methods of `TieredCache`: keys, leases, jobs, progress; and checks of arguments."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from longshore.boundary import Addresses, Key, Slot, Slots
from longshore.cache.index import Residency
from longshore.cache.partial import Partial, PromptTokens
from longshore.cache.settings import Retention
from longshore.errors import CacheError

UNKNOWN_START = -(1 << 30)
"""`GroupKeys.start` of a lookup whose caller does not say what is before its keys."""


class GroupKeys(NamedTuple):
    """Chunks of one KV cache group of a request, as the methods of `TieredCache` take them.

    Attributes:
        chunks: Keys of the path from the first chunk of the prompt on; or single ones, for an `independent` lookup and
            a load without a lease. The `Residency` of a lookup saves that load another search.
        start: Position of the first chunk to look up or store. The engine has the chunks before it. `UNKNOWN_START` in
            a lookup of one path: the index knows what is before the first key.
        device: For a lookup of all groups: whether the device has each chunk, from the first on (a numpy array is
            fastest). False for chunks beyond its end.
        prompt_tokens: The tokens, for partial matches (`CacheSettings.partial`).
        prompt_end: For a store: position of the first chunk of the answer; `None` if all are of the prompt.
        retention: For a store: priorities and times to live.
        past_window: For a store: chunks that the sliding window has moved past, from an engine that does not store
            whole paths. They are evicted first, unless a lookup was served from them. Keys in no tier are ignored.
    """

    chunks: Sequence[Key] | Residency
    start: int = 0
    device: Sequence[bool] | None = None
    prompt_tokens: PromptTokens | None = None
    prompt_end: int | None = None
    retention: Sequence[Retention] = ()
    past_window: Sequence[Key] = ()

    @property
    def keys(self) -> Sequence[Key]:
        """The keys of `chunks`."""
        return self.chunks.keys if isinstance(self.chunks, Residency) else self.chunks


class Need(NamedTuple):
    """What a prefix needs of one group: the chunks `[first, end)`, of which those at `load` come from the tiers.

    With `partial`, also the first tokens of another chunk, behind them.
    """

    first: int
    end: int
    load: tuple[int, ...]
    partial: Partial | None = None


class Run(NamedTuple):
    """`num_chunks` consecutive chunks whose warmest ready copy is in `tier`."""

    tier: str
    num_chunks: int


class Lease(NamedTuple):
    """A lease on the chunks that a lookup found: none is evicted until `TieredCache.release(lease)`."""

    id: int


class Protection(enum.Enum):
    """How long the chunks that a lookup has found are not evicted."""

    NONE = "none"  # they may be evicted at once
    STEP = "step"  # until the next `end_step`
    LEASE = "lease"  # until the lease of the lookup is released


class Found(NamedTuple):
    """Result of a lookup.

    Attributes:
        lease: A lease on the chunks to load, if there are any and the lookup was `Protection.LEASE`.
        num_chunks: For a lookup of one group: the number of chunks from `GroupKeys.start` on that are ready in a tier.
        tokens: For a lookup of all groups: the longest prefix that device and tiers serve, in tokens. A multiple of the
            chunk sizes of all groups, plus, with texts, fewer tokens than another multiple.
        needs: What each group needs for that prefix, in order of group.
        partial: For a lookup of one group: a chunk whose first tokens come next; it is in the lease.
        remote: For a lookup of one group: how many chunks more remote tiers are known to have behind it, for
            `prefetch`.
        probes: Probes of remote tiers in flight, for `progress`. Their answers may increase `remote`.
        before: For a lookup of one group from `UNKNOWN_START`: the keys before the first one, as the tiers know them.
        request_number: The number of the request, in the order in which requests began, for its other calls; `None` for
            `Protection.NONE`.
        residency: For a lookup with `independent`: where each chunk is, by group.
        remote_sources: For a lookup with `independent` that keeps nothing, if there are remote tiers: the name of the
            first that is known to have each chunk, by group; empty for none.
    """

    lease: Lease | None = None
    num_chunks: int = 0
    tokens: int = 0
    needs: tuple[Need, ...] = ()
    partial: Partial | None = None
    remote: int = 0
    probes: tuple[int, ...] = ()
    before: Sequence[Key] = ()
    request_number: int | None = None
    residency: Mapping[int, Residency] = {}
    remote_sources: Mapping[int, Sequence[str]] = {}


class DeviceCopy(NamedTuple):
    """Device slots to copy into device blocks, one for each. Only `tokens` tokens of the last, unless `None`."""

    sources: Sequence[Slot]
    tokens: int | None = None


class LoadJob(NamedTuple):
    """A job of a load of `num_chunks` consecutive chunks. `slots`: where to read them if the engine moves the bytes."""

    job: int
    num_chunks: int
    slots: Addresses = Addresses(Slots("", 0, ()))


class ScheduledLoad(NamedTuple):
    """Result of `load`: `num_chunks` leading chunks, fewer than requested if room was short, are loaded by `jobs`."""

    num_chunks: int
    jobs: tuple[LoadJob, ...]


class Progress(NamedTuple):
    """Progress of a job or a lease.

    Attributes:
        is_over: Whether the job has ended, the load has an outcome, or the prefetch of a lease without a load is over.
        outcome: The outcome of the load of a lease.
        runs: For a lease without a load whose prefetch is over: where its chunks are, as runs by the warmest tier;
            chunks removed since are left out.
    """

    is_over: bool
    outcome: Outcome | None = None
    runs: tuple[Run, ...] = ()

    def leading(self, tier: str) -> int:
        """The number of leading chunks that are in `tier`."""
        return self.runs[0].num_chunks if self.runs and self.runs[0].tier == tier else 0


class Outcome(NamedTuple):
    """Outcome of a load: the leading `num_chunks` chunks are on the device, read from the tiers `sources`."""

    num_chunks: int
    sources: tuple[str, ...]


class ScheduledStore(NamedTuple):
    """Result of `store` for one group: the chunks at `positions` of the keys, in order, are written to `slots`.

    `job` is `None` if no chunk was accepted. `kept` is the number of leading chunks of the path that are in a tier or
    on their way into one, including those before `start`; `known` are the positions of given chunks that a tier had
    before. With `retry`, there is no room yet, and backups that make room are in flight: nothing was accepted, and the
    call can be repeated. `later` are the positions that follow the accepted ones of a `stream`, for which room is being
    made: the call can be repeated for them.
    """

    job: int | None
    positions: Sequence[int] = ()
    slots: Addresses = Addresses(Slots("", 0, ()))
    kept: int = 0
    known: Sequence[int] = ()
    retry: bool = False
    later: Sequence[int] = ()


def origins_of(keys: Sequence[Key], tiers: list[str], origins: Mapping[Key, str] | None) -> list[str]:
    """The tiers that the first of `keys` are read from; of those with an origin, that."""
    return [origins.get(*each) for each in zip(keys, tiers, strict=False)] if origins else tiers


_MAPPINGS, _KEYS = (dict, Mapping), (list, tuple, Residency, Sequence)
"""Built-in types first: to ask an abstract one takes three times as long."""


def check_paths(paths: Mapping[int, GroupKeys]) -> None:
    """Raise `CacheError` unless `paths` are `GroupKeys` by number of group, with keys in order."""
    if not isinstance(paths, _MAPPINGS):
        raise CacheError(f"expected keys by number of KV cache group, got {_brief(paths)}")
    for group, path in paths.items():
        if type(group) is not int:
            raise CacheError(f"expected keys by number of KV cache group, got {_brief(paths)}")
        if not isinstance(path, GroupKeys) or not isinstance(path.chunks, _KEYS):
            raise CacheError(f"group {group}: expected GroupKeys with a sequence of keys, got {_brief(path)}")
        if type(path.start) is not int or not (path.prompt_end is None or type(path.prompt_end) is int):
            raise CacheError(
                f"group {group}: expected integers, got start={path.start!r}, prompt_end={path.prompt_end!r}"
            )


def check_blocks(blocks: Mapping[int, Sequence[int]], groups: Iterable[int]) -> Mapping[int, Sequence[int]]:
    """`blocks`, checked. Raises `CacheError` unless they are sequences by number of one of `groups`."""
    if not isinstance(blocks, Mapping) or not all(isinstance(each, Sequence) for each in blocks.values()):
        raise CacheError(f"expected sequences of device blocks by number of KV cache group, got {_brief(blocks)}")
    if unknown := {group for group, mine in blocks.items() if len(mine)}.difference(groups):
        raise CacheError(f"got device blocks of groups {list(unknown)}, but no chunks of these")
    return blocks


def check_distinct(keys: Sequence[Key]) -> None:
    """Raise `CacheError` unless all keys of a request are distinct."""
    if len(set(keys)) != len(keys):
        raise CacheError(f"expected {len(keys)} distinct keys over all groups, got {len(set(keys))}")


def check_time(now: float) -> None:
    """Raise `CacheError` unless `now` is a finite number: time would not return from infinity."""
    if not isinstance(now, int | float) or not math.isfinite(now):
        raise CacheError(f"now: expected a finite number of seconds, got {now!r}")


def _brief(value: object) -> str:
    return f"{value!r:.60}"
