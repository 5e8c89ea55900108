"""Who is where: one `Entry` per key, with a `Copy` per tier that has it, linked to its parent.

Invariant 6, "a child never outlives its parents", is kept for every tier and all colder ones together: the chunks
that have a copy in tier `t` or colder are closed under "parent of", for every `t`.

    host   A ── B ── C ── D        {A..D} in host or file is closed: every match can reach its end
    file   A ── B ── C             {A..C} in file is closed: so it is after a restart, too

`Entry.reach[t]` counts the children with a copy in `t` or colder, so that "may this copy go?" is one comparison.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from longshore.boundary import Key, Status
from longshore.cache.states import State, step
from longshore.errors import CacheError


class Copy:
    """One slot's worth of one chunk. `writer` is the job that fills it, `readers` the jobs that read it.

    `fault` is set once its bytes are known to be no good: what jobs still read from it is no good either.
    """

    __slots__ = ("entry", "fault", "readers", "slot", "state", "tier", "writer")

    def __init__(self, entry: Entry, tier: int, slot: int) -> None:
        self.entry = entry
        self.tier = tier
        self.slot = slot
        self.state = State.FREE
        self.readers = 0
        self.writer: int | None = None
        self.fault: Status | None = None

    def move(self, to: State) -> None:
        """Change state; raises `StateError` for an edge that the table does not have."""
        self.state = step(self.state, to)


class Entry:
    """One chunk: its live copies (filling or ready) by tier, its family, and the holds that end on it."""

    __slots__ = ("backup_failed", "children", "copies", "holds", "key", "parent", "reach")

    def __init__(self, key: Key, parent: Entry | None, tiers: int) -> None:
        self.key = key
        self.parent = parent
        self.children: dict[Key, Entry] = {}
        self.copies: list[Copy | None] = [None] * tiers
        self.reach = [0] * tiers
        self.holds = 0
        self.backup_failed = False

    @property
    def parent_key(self) -> Key | None:
        """The key of the chunk before this one; `None` for the first of its path."""
        return None if self.parent is None else self.parent.key

    @property
    def coldest(self) -> int:
        """The coldest tier with a live copy; -1 without one."""
        for tier in range(len(self.copies) - 1, -1, -1):
            if self.copies[tier] is not None:
                return tier
        return -1

    def ready(self, tier: int) -> Copy | None:
        """The copy in `tier`, if it is ready."""
        copy = self.copies[tier]
        return copy if copy is not None and copy.state is State.READY else None

    def warmest_ready(self) -> Copy | None:
        """The ready copy in the warmest tier."""
        for copy in self.copies:
            if copy is not None and copy.state is State.READY:
                return copy
        return None


class Index:
    """Entries by key, kept closed over prefixes."""

    def __init__(self, tiers: int) -> None:
        self.tiers = tiers
        self._entries: dict[Key, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def __getitem__(self, key: Key) -> Entry:
        return self._entries[key]

    def get(self, key: Key) -> Entry | None:
        """The entry of `key`, if any tier has a live copy."""
        return self._entries.get(key)

    def check_path(self, keys: Sequence[Key], first: int) -> None:
        """Raise `CacheError` if one of `keys[first:]` is known as the child of another key than the one before it."""
        for i in range(first, len(keys)):
            entry = self._entries.get(keys[i])
            if entry is not None and entry.parent_key != (keys[i - 1] if i else None):
                raise CacheError(f"key {i} of a path, {keys[i].hex()[:12]}, does not follow the one before it")

    def accepts(self, parent: Key | None, tier: int) -> bool:
        """Whether a child of `parent` may get a copy in `tier` without becoming an orphan."""
        if parent is None:
            return True
        entry = self._entries.get(parent)
        return entry is not None and entry.coldest >= tier

    def add(self, key: Key, parent: Key | None, tier: int, slot: int) -> Copy:
        """A new copy of `key` in `slot` of `tier`, still `FREE`. Raises `CacheError` for a second one, or an orphan."""
        if not self.accepts(parent, tier):
            raise CacheError(f"chunk {key.hex()[:12]} has no parent in tier {tier} or colder")
        entry = self._entries.get(key)
        if entry is None:
            above = None if parent is None else self._entries[parent]
            entry = self._entries[key] = Entry(key, above, self.tiers)
            if above is not None:
                above.children[key] = entry
        elif entry.copies[tier] is not None:
            raise CacheError(f"chunk {key.hex()[:12]} already has a copy in tier {tier}")
        before = entry.coldest
        copy = entry.copies[tier] = Copy(entry, tier, slot)
        self._shift_reach(entry, before, entry.coldest)
        return copy

    def drop(self, copy: Copy) -> None:
        """Take a copy out of its entry, and the entry out of the index with its last copy. Keeps the slot's state."""
        entry = copy.entry
        before = entry.coldest
        entry.copies[copy.tier] = None
        after = entry.coldest
        self._shift_reach(entry, before, after)
        if after < 0:
            del self._entries[entry.key]
            if entry.parent is not None:
                del entry.parent.children[entry.key]

    def orphaned_by(self, copy: Copy) -> list[Copy]:
        """Live copies of descendants that would be out of reach once `copy` is dropped, parents before children."""
        lost: list[Copy] = []
        queue = [(copy.entry, coldest_without(copy.entry, copy.tier))]
        for entry, limit in queue:  # what is left of `entry` reaches down to tier `limit`
            for child in entry.children.values():
                if child.coldest <= limit:
                    continue
                lost += [c for c in child.copies[limit + 1 :] if c is not None]
                left = [t for t in range(limit + 1) if child.copies[t] is not None]
                queue.append((child, left[-1] if left else -1))
        return lost

    def clear(self) -> None:
        """Forget every entry."""
        self._entries.clear()

    def check_integrity(self) -> None:
        """Raise `CacheError` unless family links, reach counts and closure hold everywhere."""
        for entry in self._entries.values():
            if entry.coldest < 0:
                raise CacheError(f"entry {entry.key.hex()[:12]} has no copy")
            parent = entry.parent
            if parent is not None and (
                self._entries.get(parent.key) is not parent or parent.children.get(entry.key) is not entry
            ):
                raise CacheError(f"entry {entry.key.hex()[:12]} outlived its parent")
            if parent is not None and parent.coldest < entry.coldest:
                raise CacheError(f"entry {entry.key.hex()[:12]} lies colder than its parent")
            counted = [sum(c.coldest >= t for c in entry.children.values()) for t in range(self.tiers)]
            if counted != entry.reach:
                raise CacheError(f"entry {entry.key.hex()[:12]} counts {entry.reach} children, has {counted}")
            for tier, copy in enumerate(entry.copies):
                if copy is not None and (copy.entry is not entry or copy.tier != tier):
                    raise CacheError(f"entry {entry.key.hex()[:12]} holds another's copy in tier {tier}")

    @staticmethod
    def _shift_reach(entry: Entry, before: int, after: int) -> None:
        if entry.parent is None:
            return
        reach = entry.parent.reach
        for tier in range(before + 1, after + 1):
            reach[tier] += 1
        for tier in range(after + 1, before + 1):
            reach[tier] -= 1


def coldest_without(entry: Entry, tier: int) -> int:
    """The coldest tier that `entry` is in, apart from `tier`; -1 without one."""
    for other in range(len(entry.copies) - 1, -1, -1):
        if other != tier and entry.copies[other] is not None:
            return other
    return -1
