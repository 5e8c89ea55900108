"""When a chunk is copied to a colder tier.

    write_through   as soon as it is complete (device -> host) or ready (host -> file)
    write_back      when the engine evicts it (device -> host), or before the host tier has to (host -> file)

Either way a file copy is made by one mechanism, `clean_target`: keep so many slots of the host tier free or backed up,
all of them for write-through, a quarter for write-back, so that an eviction never has to wait for a write.
"""

from __future__ import annotations

import enum

from longshore.boundary import Key
from longshore.cache.index import Entry
from longshore.cache.store import Store


class WritePolicy(enum.Enum):
    """Write policy of one route."""

    THROUGH = "write_through"
    BACK = "write_back"

    def wants(self, *, evicting: bool) -> bool:
        """Whether a chunk on the device is to be copied now that it is complete, or `evicting`."""
        return self is WritePolicy.THROUGH or evicting

    def clean_target(self, slots: int) -> int:
        """How many of the host tier's `slots` are to be free, or safe to evict."""
        return slots if self is WritePolicy.THROUGH else slots // 4


def backup_path(store: Store, entry: Entry) -> list[Entry]:
    """`entry` and those of its ancestors that the file tier lacks, heads first; empty if one of them cannot go there.

    Heads go first because the file tier alone must be closed over prefixes: it is all that a restart finds.
    """
    path: list[Entry] = []
    step: Entry | None = entry
    while step is not None and step.coldest < 1:
        if step.key not in store.dirty:
            return []
        path.append(step)
        step = step.parent
    return path[::-1]


def to_clean(store: Store, wanted: int) -> list[Entry]:
    """At most `wanted` dirty entries to copy to the file tier now: coldest first, but each after its ancestors."""
    chosen: dict[Key, Entry] = {}
    if wanted <= 0:
        return []
    for key in store.levels[0].policy.candidates():
        entry = store.dirty.get(key)
        if entry is None or key in chosen:
            continue
        for step in backup_path(store, entry):
            chosen.setdefault(step.key, step)
        if len(chosen) >= wanted:
            break
    return list(chosen.values())[:wanted]
