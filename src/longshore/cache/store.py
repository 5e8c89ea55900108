"""The tiers' books: slots, index and eviction orders, changed together so that they never disagree.

Everything above (`writing`, `manager`) goes through these few verbs; each leaves the books whole:

    place    a slot for a chunk that a job will fill          FREE    -> FILLING
    adopt    chunks that were found at start                  FREE    -> READY
    arrive   the job filled it                                FILLING -> READY
    fail, lose  its bytes are no good                         any -> FREE or DRAINING, its descendants too
    unread   a reader has let go of it                        DRAINING -> FREE when it was the last
    make_room   evict until a number of slots is free, or change nothing
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from longshore.boundary import Key, Slot, Status
from longshore.cache.eviction import EvictionPolicy
from longshore.cache.index import Copy, Entry, Index, coldest_without
from longshore.cache.pool import SlotPool
from longshore.cache.states import State
from longshore.cache.types import Counters, MissReason, TierStats
from longshore.errors import CacheError


@dataclass(slots=True)
class Level:
    """One owned tier, as the control plane sees it; warmer levels have lower numbers."""

    name: str
    pool: SlotPool
    policy: EvictionPolicy
    image_bytes: int


class Store:
    """Slots, index and eviction orders of all tiers."""

    def __init__(self, levels: Sequence[Level], counters: Counters) -> None:
        self.levels = list(levels)
        self.counters = counters
        self.index = Index(len(self.levels))
        self.dirty: dict[Key, Entry] = {}
        """Entries that are ready in the warmest tier, and could yet be copied to the one below."""
        self._draining: set[Copy] = set()

    def slot(self, copy: Copy) -> Slot:
        """The address of a copy."""
        return Slot(self.levels[copy.tier].name, 0, copy.slot)

    def place(self, key: Key, parent: Key | None, tier: int, writer: int) -> Copy:
        """A slot in `tier` for `writer` to fill. The caller has made room, and asked `Index.accepts`."""
        level = self.levels[tier]
        (slot,) = level.pool.allocate(1)
        try:
            copy = self.index.add(key, parent, tier, slot)
        except CacheError:
            level.pool.free(slot)
            raise
        copy.move(State.FILLING)
        copy.writer = writer
        self._note(copy.entry)
        return copy

    def adopt(self, tier: int, found: Sequence[tuple[int, Key, Key | None]]) -> None:
        """Take in chunks found in slots of `tier` at start, as (slot, key, parent), parents first: all or none."""
        for _, key, parent in found:
            entry = self.index.get(key)
            if entry is not None and (entry.copies[tier] is not None or entry.parent_key != parent):
                raise CacheError(f"chunk {key.hex()[:12]} is known already, in tier {tier} or as another's child")
        if len({key for _, key, _ in found}) != len(found):
            raise CacheError(f"the {len(found)} chunks to adopt have different keys, two of these have the same")
        self.levels[tier].pool.claim([slot for slot, _, _ in found])
        for slot, key, parent in found:
            self.index.add(key, parent, tier, slot).move(State.READY)
            self.levels[tier].policy.insert(key)
            self._note(self.index[key])

    def age(self, tier: int, keys: Sequence[Key]) -> None:
        """Put adopted chunks in order of age, oldest first; but tails before heads, as `touch` does."""
        newest_first: dict[Key, None] = {}
        for key in reversed(keys):
            path: list[Key] = []
            entry: Entry | None = self.index[key]
            while entry is not None and entry.key not in newest_first:
                path.append(entry.key)
                entry = entry.parent
            newest_first.update(dict.fromkeys(reversed(path)))
        for key in reversed(newest_first):
            self.levels[tier].policy.touch(key)

    def copies(self) -> list[Copy]:
        """Every copy that owns a slot."""
        live = [copy for entry in self.index for copy in entry.copies if copy is not None]
        return [*live, *self._draining]

    def arrive(self, copy: Copy) -> None:
        """The writer put all bytes in place."""
        copy.writer = None
        if copy.state is State.DRAINING:
            self._settle(copy)
            return
        copy.move(State.READY)
        self.levels[copy.tier].policy.insert(copy.entry.key)
        self._note(copy.entry)

    def fail(self, copy: Copy, fault: Status) -> None:
        """The writer has ended without putting the bytes in place."""
        copy.writer = None
        copy.fault = fault
        if copy.state is State.DRAINING:
            self._settle(copy)
        else:
            self.lose(copy)

    def keep_dirty(self, entry: Entry) -> None:
        """A backup of `entry` has failed: it is not tried again."""
        entry.backup_failed = True
        self._note(entry)

    def unread(self, copy: Copy, fault: Status | None = None) -> None:
        """A reader has let go of `copy`; having found it unusable, if there is a `fault`."""
        copy.readers -= 1
        copy.fault = copy.fault or fault
        if copy.state is State.DRAINING:
            self._settle(copy)
        elif fault is not None:
            self.lose(copy)

    def miss(self, key: Key) -> MissReason:
        """Why a request that got no further than to some chunk before `key` does without it."""
        entry = self.index.get(key)
        if entry is None:
            return MissReason.ABSENT
        return MissReason.IN_FLIGHT if entry.warmest_ready() is None else MissReason.BEHIND

    def lose(self, copy: Copy) -> None:
        """Take a live copy, and what would be out of reach without it, out of the index."""
        for each in (*reversed(self.index.orphaned_by(copy)), copy):
            self.counters.lost[self.levels[each.tier].name] += 1
            self._detach(each)

    def touch(self, path: Sequence[Entry]) -> None:
        """The chunks of `path` were used: tail first, so that heads stay longest."""
        for entry in reversed(path):
            for tier, level in enumerate(self.levels):
                if entry.ready(tier) is not None:
                    level.policy.touch(entry.key)

    def make_room(self, tier: int, count: int, *, spare_dirty: bool) -> bool:
        """Evict until `count` slots of `tier` are free. Changes nothing, and says so, when that cannot be."""
        missing = count - self.levels[tier].pool.free_count
        if missing <= 0:
            return True
        victims = self._victims(tier, missing, spare_dirty=spare_dirty)
        if len(victims) < missing:
            return False
        for copy in victims:
            self.counters.evictions[self.levels[tier].name] += 1
            self._detach(copy)
        return True

    def room(self, tier: int, count: int, *, spare_dirty: bool) -> int:
        """How many of `count` slots `make_room` could provide now."""
        free = self.levels[tier].pool.free_count
        if free >= count:
            return count
        return free + len(self._victims(tier, count - free, spare_dirty=spare_dirty))

    def discard(self, keys: Sequence[Key], tier: int) -> int:
        """Remove the copies of `keys` that nothing holds, reads or needs to be reached; says how many."""
        plan = Eviction(tier)
        for key in reversed(keys):
            entry = self.index.get(key)
            copy = entry.copies[tier] if entry is not None else None
            if copy is not None and copy not in plan.copies:
                plan.take(copy)
        for copy in plan.copies:
            self._detach(copy)
        return len(plan.copies)

    def clear(self) -> None:
        """Take every copy out of the index. Slots that jobs still touch drain."""
        for entry in list(self.index):
            for copy in entry.copies:
                if copy is not None:
                    self._release(copy)
        self.index.clear()
        self.dirty.clear()

    def stats(self) -> tuple[TierStats, ...]:
        """Occupancy per tier, warmest first."""
        return tuple(
            TierStats(level.name, level.pool.capacity, level.pool.used, len(level.policy), level.image_bytes)
            for level in self.levels
        )

    def check_integrity(self) -> None:
        """Walk all books; raise `CacheError` where two of them disagree."""
        self.index.check_integrity()
        for tier, level in enumerate(self.levels):
            level.pool.check_integrity()
            live = [c for e in self.index if (c := e.copies[tier]) is not None]
            owned = [*live, *(c for c in self._draining if c.tier == tier)]
            if len({c.slot for c in owned}) != len(owned) or len(owned) != level.pool.used:
                raise CacheError(f"{level.name}: {len(owned)} copies own {level.pool.used} slots")
            ready = {c.entry.key for c in live if c.state is State.READY}
            if ready != set(level.policy.candidates()):
                raise CacheError(f"{level.name}: the eviction policy knows {len(level.policy)} of {len(ready)} keys")
        for entry in self.index:
            if self._is_dirty(entry) != (entry.key in self.dirty):
                raise CacheError(f"chunk {entry.key.hex()[:12]} is wrongly marked as dirty or clean")

    def _victims(self, tier: int, count: int, *, spare_dirty: bool) -> list[Copy]:
        """At most `count` copies that may go, coldest first; an old head goes as soon as the last of its tails has."""
        plan = Eviction(tier)
        refused: set[Key] = set()
        for key in self.levels[tier].policy.candidates():
            entry = self.index.get(key)
            while entry is not None and len(plan.copies) < count:
                copy = entry.copies[tier]
                if copy is None or self._is_spared(entry, tier, spare_dirty) or not plan.take(copy):
                    refused.add(entry.key)
                    break
                entry = entry.parent if entry.parent is not None and entry.parent.key in refused else None
            if len(plan.copies) == count:
                break
        return plan.copies

    def _is_spared(self, entry: Entry, tier: int, spare_dirty: bool) -> bool:
        """In the file tier, what the host tier has too is spared: it would only have to be written again."""
        return spare_dirty and entry.key in self.dirty if tier == 0 else entry.copies[0] is not None

    def _detach(self, copy: Copy) -> None:
        self.index.drop(copy)
        self._release(copy)
        self._note(copy.entry)

    def _release(self, copy: Copy) -> None:
        """Give the slot back, now or when the jobs that touch it have ended."""
        level = self.levels[copy.tier]
        if copy.state is State.READY:
            level.policy.remove(copy.entry.key)
        if copy.writer is None and not copy.readers:
            copy.move(State.FREE)
            level.pool.free(copy.slot)
        else:
            copy.move(State.DRAINING)
            self._draining.add(copy)

    def _settle(self, copy: Copy) -> None:
        """Free the slot of a copy that drains, once no job touches it any more."""
        if copy.writer is None and not copy.readers:
            copy.move(State.FREE)
            self._draining.discard(copy)
            self.levels[copy.tier].pool.free(copy.slot)

    def _is_dirty(self, entry: Entry) -> bool:
        return (
            len(self.levels) > 1 and not entry.backup_failed and entry.ready(0) is not None and entry.copies[1] is None
        )

    def _note(self, entry: Entry) -> None:
        if self._is_dirty(entry):
            self.dirty.setdefault(entry.key, entry)
        else:
            self.dirty.pop(entry.key, None)


class Eviction:
    """Copies of one tier that are to go together: says of each whether it may, given those before it."""

    def __init__(self, tier: int) -> None:
        self.tier = tier
        self.copies: list[Copy] = []
        self._reach: dict[Key, list[int]] = {}

    def take(self, copy: Copy) -> bool:
        """Add `copy` unless something works on it, holds it, or needs it to be reached."""
        entry = copy.entry
        if copy.state is not State.READY or copy.readers:
            return False
        above = coldest_without(entry, self.tier)
        last = not any(c is not None and c is not copy and c.state is State.READY for c in entry.copies)
        if last and (entry.holds or above >= 0):
            return False
        if above < self.tier:  # nothing of it stays in this tier or colder: then no child may be there
            if self._reach.get(entry.key, entry.reach)[above + 1] > 0:
                return False
            if entry.parent is not None:
                theirs = self._reach.setdefault(entry.parent.key, list(entry.parent.reach))
                for tier in range(above + 1, self.tier + 1):
                    theirs[tier] -= 1
        self.copies.append(copy)
        return True
