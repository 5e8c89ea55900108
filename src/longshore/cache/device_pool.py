"""Device blocks, for an engine that lets Longshore manage them: references, a prefix cache by key, evictions.

    free ──allocate──► used ──release──► free                 a block that was not stored
                        ▲ └───release──► idle ──► free        one that was stored: evicted least recently used first
                        └──lookup, hold────┘

The device is then the warmest tier: `lookup` finds chunks on the device before those in the tiers, and evicted chunks
have been offloaded, as the write policy says. A step of an engine:

    found = pool.lookup(keys, now)              found.blocks are on the device, with a reference; found.below in tiers
    blocks = pool.allocate(n)                   on CapacityError, call pool.make_way(n) and retry later
    pool.load(found.below.lease, blocks[:k])    ... compute ...
    pool.store(keys, found.blocks + blocks)     other requests find them from now on
    pool.release(found.blocks + blocks)         the request has ended

A block that a job still reads or writes is not allocated. Blocks of several KV cache groups that share memory come from
one pool: a block number is not specific to a group. Chunks stored on the device and evicted from it are recorded as
events, with the tier `device`.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from longshore.boundary import DEVICE, Key, Slot
from longshore.cache.columns import zeros
from longshore.cache.events import EVICTED, RESET
from longshore.cache.eviction.hit_rates import Return
from longshore.cache.groups import GroupKeys
from longshore.cache.index import Presence
from longshore.cache.manager import TieredCache
from longshore.cache.types import DeviceCopy, Found, Lease, LoadOrder, StoreOrder, Until
from longshore.errors import CacheError, CapacityError


class FoundOnDevice(NamedTuple):
    """The leading chunks of a path are in `blocks`, each with a new reference; `below` are those in tiers."""

    blocks: tuple[int, ...]
    below: Found


class DeviceStats(NamedTuple):
    """Blocks of a device pool: all, free, used, idle (evictable), in use by jobs only; and all references."""

    blocks: int
    free: int
    used: int
    idle: int
    parked: int
    references: int


class _Known(NamedTuple):
    """The blocks of a committed chunk, the one at `position` of `path`."""

    blocks: tuple[int, ...]
    path: tuple[Key, ...]
    position: int
    group: int


class DevicePool:
    """`blocks` device blocks, above the tiers of `cache`. Sans I/O, like it, and used under the same lock."""

    def __init__(self, cache: TieredCache, blocks: int, *, pool: int = 0) -> None:
        """`pool` is the physical pool on the device, as in `KVLayout.pools`. `CacheError` for a negative number."""
        if blocks < 0:
            raise CacheError(f"expected zero or more device blocks, got {blocks}")
        self.blocks = blocks
        self._cache = cache
        self._pool = pool
        self._per_chunk = cache.settings.blocks_per_chunk
        self._references = zeros(blocks)
        self._jobs: dict[int, list[int]] = {}
        self._fills: dict[int, tuple[int, ...]] = {}
        """The jobs in flight that fill each block."""
        self._asleep = False
        self._begin()

    def _begin(self) -> None:
        """Free all unused blocks, and remove all chunks."""
        self._known: dict[Key, _Known] = {}
        self._key_of: dict[int, Key] = {}
        self._idle: OrderedDict[Key, None] = OrderedDict()
        self._free = array("i")
        self._parked: list[int] = []
        self._let_go(block for block in reversed(range(self.blocks)) if not self._references[block])

    # ------------------------------------------------------------------ references

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` blocks, each with one reference; evicts idle chunks that tiers have.

        Raises `CapacityError`, with nothing changed, if there are fewer; `CacheError` for a negative number, or while
        the device is asleep.
        """
        if count < 0:
            raise CacheError(f"cannot allocate {count} blocks")
        if self._asleep:
            raise CacheError("the device is asleep: its memory was freed by `sleep`, call `wake` first")
        if count > self.blocks:
            raise CapacityError(f"cannot allocate {count} blocks: the device pool has {self.blocks}")
        self._reclaim()
        going = self._going(count - len(self._free))
        had = len(self._free) + len(going) * self._per_chunk
        if had < count:
            raise CapacityError(f"cannot allocate {count} blocks: {had} of {self.blocks} are free or can be evicted")
        for key in going:
            self._forget(key)
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._references[block] = 1
        return taken

    def hold(self, blocks: Sequence[int]) -> None:
        """Add a reference to each of `blocks`. Raises `CacheError`, with nothing changed, for a free block."""
        self._check(blocks)
        bad = [block for block in blocks if not self._references[block] and block not in self._key_of]
        if bad:
            raise CacheError(f"device block {bad[0]} is free: expected a used or idle block")
        for block in blocks:
            self._references[block] += 1
            if block in self._key_of:
                self._idle.pop(self._key_of[block], None)

    def release(self, blocks: Sequence[int]) -> None:
        """Remove a reference from each of `blocks`, a path, head first. Stored chunks stay until they are evicted,
        tails first.

        Raises `CacheError`, with nothing changed, if a block has no reference.
        """
        self._check(blocks)
        for block, times in Counter(blocks).items():
            if self._references[block] < times:
                raise CacheError(f"device block {block} has {self._references[block]} references, not {times}")
        for block in blocks:
            self._references[block] -= 1
        unused = list(dict.fromkeys(block for block in reversed(blocks) if not self._references[block]))
        for block in unused:
            key = self._key_of.get(block)
            if key is not None and not any(self._references[each] for each in self._known[key].blocks):
                self._idle[key] = None
        self._let_go(block for block in unused if block not in self._key_of)

    # ------------------------------------------------------------------ what is known

    def find(self, keys: Sequence[Key]) -> list[tuple[int, ...] | None]:
        """The blocks of each chunk, `None` if it is not on the device; for `GroupKeys.device`."""
        return [known.blocks if (known := self._known.get(key)) else None for key in keys]

    def lookup(
        self,
        keys: Sequence[Key],
        now: float,
        *,
        request: str | None = None,
        turn: int | None = None,
        returns: Return | None = None,
    ) -> FoundOnDevice:
        """Look up a path on the device, and behind that in the tiers. Each block found gets a reference."""
        blocks: list[int] = []
        for known in self.find(keys):
            if known is None:
                break
            blocks += known
        path = GroupKeys(keys, len(blocks) // self._per_chunk)
        below = self._cache.lookup({0: path}, now, request=request, turn=turn, returns=returns)
        self.hold(blocks)
        return FoundOnDevice(tuple(blocks), below)

    def load(self, lease: Lease, blocks: Sequence[int], *, group: int = 0, **how: Any) -> LoadOrder:
        """As `TieredCache.load` of one path, into allocated blocks that were not stored."""
        self._check_private(blocks)
        ordered = self._cache.load(lease, {group: blocks}, **how)
        for part in ordered.parts:
            self._touch(part.job, blocks)
        self._fills.update(dict.fromkeys(blocks, tuple(part.job for part in ordered.parts)))
        return ordered

    def copy(self, sources: Sequence[int], blocks: Sequence[int], *, tokens: int | None = None, group: int = 0) -> int:
        """Copy between device blocks, as `TieredCache.load` of a `DeviceCopy`; returns the job."""
        self._check_used(sources)
        self._check_private(blocks)
        copy = DeviceCopy([Slot(DEVICE, self._pool, block) for block in sources], tokens)
        job = self._cache.load({group: copy}, {group: blocks}).parts[0].job
        self._touch(job, (*sources, *blocks))
        self._fills.update(dict.fromkeys(blocks, (job,)))
        return job

    def store(
        self,
        path: GroupKeys,
        blocks: Sequence[int],
        *,
        group: int = 0,
        evicting: bool = False,
        turn: int | None = None,
    ) -> StoreOrder:
        """As `TieredCache.store` of one path; lookups find its chunks on the device from now on.

        Raises `CacheError` while a load or copy into one of `blocks` is in flight: it may fail.
        """
        self._check_used(blocks)
        filling = [block for block in blocks if any(map(self._is_moving, self._fills.get(block, ())))]
        if filling:
            raise CacheError(f"device block {filling[0]} cannot be stored: a load or copy into it is in flight")
        per_chunk, keys, first = self._per_chunk, tuple(path.names), path.first
        chunks = [tuple(blocks[at : at + per_chunk]) for at in range(0, len(blocks), per_chunk)]
        for key, mine in zip(keys[first:], chunks, strict=False):
            if any(self._key_of.get(block, key) != key for block in mine):
                raise CacheError(f"chunk {key.hex()[:12]}: one of its blocks {mine} has another chunk")
        offload = self._cache.store({group: path}, {group: blocks}, evicting=evicting, turn=turn)[group]
        came, alone = list[tuple[Key, Key | None]](), self._cache.settings.stands_alone(group)
        for position, (key, mine) in enumerate(zip(keys[first:], chunks, strict=True), first):
            if key not in self._known:
                self._known[key] = _Known(mine, keys, position, group)
                self._key_of.update(dict.fromkeys(mine, key))
                came.append((key, None if alone or not position else keys[position - 1]))
        self._log(came)
        self._note(offload, chunks, first)
        return offload

    # ------------------------------------------------------------------ room

    def make_way(self, count: int) -> int:
        """Order offloads of idle chunks that no tier has, so that `count` blocks can be allocated later.

        Chunks that no tier stores are evicted at once. Returns how many blocks are available now.
        """
        self._reclaim()
        coming = sum(self._is_touched(block) for block in self._parked)
        offered: set[Key] = set()
        for key in list(self._idle):
            if len(self._free) + coming >= count:
                break
            blocks = self._known[key].blocks
            if key not in offered and not self._is_below(key):
                self._offload(self._known[key], offered)
            self._forget(key)
            coming += sum(map(self._is_touched, blocks))
        return len(self._free)

    def _offload(self, known: _Known, offered: set[Key]) -> None:
        """Offload a chunk and the chunks before it that are on the device and were not `offered`."""
        path = known.path[: known.position + 1]
        first = len(path)
        while first and path[first - 1] in self._known and path[first - 1] not in offered:
            first -= 1
        offered.update(path[first:])
        chunks = [self._known[key].blocks for key in path[first:]]
        blocks = [block for chunk in chunks for block in chunk]
        orders = self._cache.store({known.group: GroupKeys(path, first)}, {known.group: blocks}, evicting=True)
        self._note(orders[known.group], chunks, first)

    def _going(self, blocks: int) -> list[Key]:
        """Idle chunks to evict for `blocks` blocks, least recently used first; all that can be if there are fewer."""
        going: list[Key] = []
        for key in self._idle:
            if len(going) * self._per_chunk >= blocks:
                break
            if self._is_below(key) and not any(map(self._is_touched, self._known[key].blocks)):
                going.append(key)
        return going

    def _forget(self, key: Key) -> None:
        """Remove an idle chunk from the prefix cache."""
        self._log(gone=[key])
        del self._idle[key]
        blocks = self._known.pop(key).blocks
        for block in blocks:
            del self._key_of[block]
        self._let_go(blocks)

    # ------------------------------------------------------------------ life

    def sleep(self) -> bool:
        """As `TieredCache.sleep`. When it returns true, all blocks are free, and the prefix cache of the device is
        empty.

        Raises `CacheError` while a block is used. The tiers keep their chunks; use `reset` to remove them, too.
        """
        used = self.stats().used
        if used:
            raise CacheError(f"cannot sleep: {used} device blocks are in use")
        self._asleep = True
        asleep = self._cache.sleep()
        if asleep:
            self._log(gone=list(self._known), cause="asleep")
            self._begin()
        return asleep

    def wake(self) -> None:
        """As `TieredCache.wake`: device memory was restored, empty."""
        self._cache.wake()
        self._asleep = False

    def reset(self, *, keep: Sequence[str] = (), weights: bool = False) -> int:
        """As `TieredCache.reset`; also empties the prefix cache of the device. References stay."""
        generation = self._cache.reset(keep=keep, weights=weights)
        if keep:  # else the cache has recorded an event
            self._log(gone=list(self._known), cause=RESET)
        self._begin()
        return generation

    # ------------------------------------------------------------------ watching

    def stats(self) -> DeviceStats:
        """Numbers of blocks by state."""
        used = self.blocks - self._references.count(0)
        idle = sum(len(self._known[key].blocks) for key in self._idle)
        return DeviceStats(self.blocks, len(self._free), used, idle, len(self._parked), sum(self._references))

    def check_integrity(self) -> None:
        """Raise `CacheError` unless every block has one state, and the prefix cache is consistent."""
        idle = [block for key in self._idle for block in self._known[key].blocks]
        used = [block for block in range(self.blocks) if self._references[block]]
        # A partially used chunk has blocks without references.
        part = [block for block, key in self._key_of.items() if not self._references[block] and key not in self._idle]
        if sorted([*self._free, *self._parked, *idle, *used, *part]) != list(range(self.blocks)):
            raise CacheError(f"some of {self.blocks} blocks have two states, or none")
        if min(self._references, default=0) < 0:
            raise CacheError("a block has a negative number of references")
        blocks = {block: key for key, known in self._known.items() for block in known.blocks}
        if blocks != self._key_of or any(self._references[block] for block in idle):
            raise CacheError(f"some of {len(self._known)} chunks have other blocks, or are both idle and used")

    # ------------------------------------------------------------------ inside

    def _check(self, blocks: Sequence[int]) -> None:
        bad = [block for block in blocks if not isinstance(block, int) or not 0 <= block < self.blocks]
        if bad:
            raise CacheError(f"expected device blocks in [0, {self.blocks}), got {bad[0]}")

    def _check_used(self, blocks: Sequence[int]) -> None:
        self._check(blocks)
        bad = [block for block in blocks if not self._references[block]]
        if bad:
            raise CacheError(f"device block {bad[0]} is not allocated")

    def _check_private(self, blocks: Sequence[int]) -> None:
        self._check_used(blocks)
        bad = [block for block in blocks if block in self._key_of]
        if bad:
            raise CacheError(f"device block {bad[0]} has a stored chunk, which other requests may use")

    def _let_go(self, blocks: Iterable[int]) -> None:
        """Free these blocks, now or when no job uses them any more."""
        for block in blocks:
            if self._is_touched(block):
                self._parked.append(block)
            else:
                self._free.append(block)

    def _reclaim(self) -> None:
        parked, self._parked = self._parked, []
        self._let_go(parked)

    def _note(self, offload: StoreOrder, chunks: Sequence[Sequence[int]], first: int) -> None:
        if offload.job is not None:
            for placement in offload.accepted:
                self._touch(offload.job, chunks[placement.position - first])

    def _log(self, came: Sequence[tuple[Key, Key | None]] = (), gone: Sequence[Key] = (), cause: str = EVICTED) -> None:
        """Record chunks stored on the device (key, parent) and those that have `gone` as events."""
        self._cache._store.log_device(came, gone, cause)

    def _is_moving(self, job: int) -> bool:
        return not self._cache.progress(job).is_over

    def _is_below(self, key: Key) -> bool:
        """Whether `key` is in a tier, or being written to one."""
        found = self._cache.lookup({0: GroupKeys([key])}, 0.0, until=Until.NOTHING, each=True)
        return found.residency[0].presences[0] is not Presence.ABSENT

    def _touch(self, job: int, blocks: Iterable[int]) -> None:
        for block in blocks:
            before = [each for each in self._jobs.get(block, ()) if self._is_moving(each)]
            self._jobs[block] = [*before, job]

    def _is_touched(self, block: int) -> bool:
        jobs = [job for job in self._jobs.get(block, ()) if self._is_moving(job)]
        if jobs:
            self._jobs[block] = jobs
        else:
            self._jobs.pop(block, None)
        return bool(jobs)
