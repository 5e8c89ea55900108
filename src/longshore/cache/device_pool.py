"""The device's blocks, for an engine that hands them over: who uses each, and which hold a known prefix.

    free ──allocate──► used ──release──► free                 a block that nobody will ask for again
                        ▲ └───release──► idle ──► free        one that was stored: evicted, last used first to stay
                        └──lookup, hold────┘

With it the device is the warmest tier: `lookup` finds what is on it before what is below, and what leaves it has been
offloaded, as the write policy says. An engine's step looks like this, all of it by way of the pool:

    found = pool.lookup(keys, now)              found.blocks are on the device, and held; found.below is below
    blocks = pool.allocate(n)                   CapacityError: pool.make_way(n), and try again later
    pool.load(found.below.lease, blocks[:k])    ... compute ...
    pool.store(keys, found.blocks + blocks)     from now on others find them
    pool.release(found.blocks + blocks)         the request is over

A block that a job still reads or writes is not handed out, whoever let go of it. Blocks of several KV cache groups come
from one pool where they share memory: a block is its number, whatever group it serves. What comes to the device and
leaves it stands among the cache's events, with the tier `device`.
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
    """The device has the leading chunks of a path in `blocks`, each with one more reference; `below` follows."""

    blocks: tuple[int, ...]
    below: Found


class DeviceStats(NamedTuple):
    """Blocks of a device pool: all, free, used, idle (evictable), still touched by jobs; and references to the used."""

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
            raise CacheError(f"a pool has zero or more blocks, got {blocks}")
        self.blocks = blocks
        self._cache = cache
        self._pool = pool
        self._per_chunk = cache.settings.blocks_per_chunk
        self._references = zeros(blocks)
        self._jobs: dict[int, list[int]] = {}
        self._fills: dict[int, tuple[int, ...]] = {}
        """The jobs that were ordered last to fill a block."""
        self._asleep = False
        self._begin()

    def _begin(self) -> None:
        """All blocks that nobody uses are free, and nothing is known."""
        self._known: dict[Key, _Known] = {}
        self._key_of: dict[int, Key] = {}
        self._idle: OrderedDict[Key, None] = OrderedDict()
        self._free = array("i")
        self._parked: list[int] = []
        self._let_go(block for block in reversed(range(self.blocks)) if not self._references[block])

    # ------------------------------------------------------------------ references

    def allocate(self, count: int) -> list[int]:
        """`count` blocks, each with one reference; chunks that are idle, and have copies below, make way.

        Raises `CapacityError`, and nothing has changed, if there are fewer; `CacheError` for a negative number,
        or while the device sleeps.
        """
        if count < 0:
            raise CacheError(f"cannot allocate {count} blocks")
        if self._asleep:
            raise CacheError("the device's memory was given up by `sleep`, and not taken back by `wake`")
        if count > self.blocks:
            raise CapacityError(f"{count} blocks were asked for, there are {self.blocks}")
        self._reclaim()
        going = self._going(count - len(self._free))
        had = len(self._free) + len(going) * self._per_chunk
        if had < count:
            raise CapacityError(f"{count} blocks were asked for, {had} of {self.blocks} can be had")
        for key in going:
            self._forget(key)
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._references[block] = 1
        return taken

    def hold(self, blocks: Sequence[int]) -> None:
        """One more reference to each of `blocks`, which are used or idle. `CacheError`, and no change, for another."""
        self._check(blocks)
        bad = [block for block in blocks if not self._references[block] and block not in self._key_of]
        if bad:
            raise CacheError(f"device block {bad[0]} is nobody's, and nothing is in it")
        for block in blocks:
            self._references[block] += 1
            if block in self._key_of:
                self._idle.pop(self._key_of[block], None)

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less to each of `blocks`, a path from its head on; `CacheError` and no change if one has none.

        What was committed stays, to be found, until its room is needed: tails go before heads.
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
        """For each chunk the blocks that it is in, `None` if it is not on the device; for `GroupKeys.device`."""
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
        """The leading chunks that the device has, each of whose blocks has one more reference; then what is below."""
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
        """As `TieredCache.load` of one path, into blocks that were allocated, and that nobody can find yet."""
        self._check_private(blocks)
        ordered = self._cache.load(lease, {group: blocks}, **how)
        for part in ordered.parts:
            self._touch(part.job, blocks)
        self._fills.update(dict.fromkeys(blocks, tuple(part.job for part in ordered.parts)))
        return ordered

    def copy(self, sources: Sequence[int], blocks: Sequence[int], *, tokens: int | None = None, group: int = 0) -> int:
        """Copy from block to block: `TieredCache.load` of a `DeviceCopy`; the job."""
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
        """As `TieredCache.store` of one path; from now on its chunks are found on the device, too.

        `CacheError` while a load or a copy into one of `blocks` has not ended: it may fail, and others would find it.
        """
        self._check_used(blocks)
        filling = [block for block in blocks if any(map(self._is_moving, self._fills.get(block, ())))]
        if filling:
            raise CacheError(f"device block {filling[0]} is still being filled")
        per_chunk, keys, first = self._per_chunk, tuple(path.names), path.first
        chunks = [tuple(blocks[at : at + per_chunk]) for at in range(0, len(blocks), per_chunk)]
        for key, mine in zip(keys[first:], chunks, strict=False):
            if any(self._key_of.get(block, key) != key for block in mine):
                raise CacheError(f"chunk {key.hex()[:12]} is in blocks {mine}, of which one has another chunk")
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
        """Have `count` blocks become free: what is idle and not below is offloaded, and goes when that has ended.

        What no tier takes goes at once. Says how many blocks could be had now.
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
        """Offload a chunk, and what is before it, as far as the device still has that and it was not `offered`."""
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
        """Idle chunks, the coldest first, that can make way at once for so many `blocks`; or all that can."""
        going: list[Key] = []
        for key in self._idle:
            if len(going) * self._per_chunk >= blocks:
                break
            if self._is_below(key) and not any(map(self._is_touched, self._known[key].blocks)):
                going.append(key)
        return going

    def _forget(self, key: Key) -> None:
        """An idle chunk is no longer found."""
        self._log(gone=[key])
        del self._idle[key]
        blocks = self._known.pop(key).blocks
        for block in blocks:
            del self._key_of[block]
        self._let_go(blocks)

    # ------------------------------------------------------------------ life

    def sleep(self) -> bool:
        """As `TieredCache.sleep`; when it says so, all blocks are free, and nothing is known of the device any more.

        Raises `CacheError` while a block is used. The tiers keep what they have; to forget that too, `reset`.
        """
        used = self.stats().used
        if used:
            raise CacheError(f"{used} device blocks are in use")
        self._asleep = True
        asleep = self._cache.sleep()
        if asleep:
            self._log(gone=list(self._known), cause="asleep")
            self._begin()
        return asleep

    def wake(self) -> None:
        """As `TieredCache.wake`: the memory is back, and empty."""
        self._cache.wake()
        self._asleep = False

    def reset(self, *, keep: Sequence[str] = (), weights: bool = False) -> int:
        """As `TieredCache.reset`; what the device has is not found any more, either. References stay."""
        generation = self._cache.reset(keep=keep, weights=weights)
        if keep:  # else the cache has told of it
            self._log(gone=list(self._known), cause=RESET)
        self._begin()
        return generation

    # ------------------------------------------------------------------ watching

    def stats(self) -> DeviceStats:
        """Blocks by what has become of them."""
        used = self.blocks - self._references.count(0)
        idle = sum(len(self._known[key].blocks) for key in self._idle)
        return DeviceStats(self.blocks, len(self._free), used, idle, len(self._parked), sum(self._references))

    def check_integrity(self) -> None:
        """Raise `CacheError` unless every block is in one place, and all that is known agrees."""
        idle = [block for key in self._idle for block in self._known[key].blocks]
        used = [block for block in range(self.blocks) if self._references[block]]
        # Of a chunk that is used in part, some blocks have no references.
        part = [block for block, key in self._key_of.items() if not self._references[block] and key not in self._idle]
        if sorted([*self._free, *self._parked, *idle, *used, *part]) != list(range(self.blocks)):
            raise CacheError(f"of {self.blocks} blocks some are in two places, or in none")
        if min(self._references, default=0) < 0:
            raise CacheError("a block has less than no references")
        blocks = {block: key for key, known in self._known.items() for block in known.blocks}
        if blocks != self._key_of or any(self._references[block] for block in idle):
            raise CacheError(f"{len(self._known)} chunks are known in other blocks, or idle and used")

    # ------------------------------------------------------------------ inside

    def _check(self, blocks: Sequence[int]) -> None:
        bad = [block for block in blocks if not isinstance(block, int) or not 0 <= block < self.blocks]
        if bad:
            raise CacheError(f"device blocks lie in [0, {self.blocks}), got {bad[0]}")

    def _check_used(self, blocks: Sequence[int]) -> None:
        self._check(blocks)
        bad = [block for block in blocks if not self._references[block]]
        if bad:
            raise CacheError(f"device block {bad[0]} is not allocated")

    def _check_private(self, blocks: Sequence[int]) -> None:
        self._check_used(blocks)
        bad = [block for block in blocks if block in self._key_of]
        if bad:
            raise CacheError(f"device block {bad[0]} holds a chunk that others may find")

    def _let_go(self, blocks: Iterable[int]) -> None:
        """These are free, or will be when no job touches them any more."""
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
        """Chunks came, each told with the one before it, or have `gone`: for the cache's events alone."""
        self._cache._store.log_device(came, gone, cause)

    def _is_moving(self, job: int) -> bool:
        return not self._cache.progress(job).is_over

    def _is_below(self, key: Key) -> bool:
        """Whether a tier has `key`, or will have."""
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
