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


def to_clean(store: Store, wanted: int) -> list[Entry]:
    """At most `wanted` dirty entries to copy to the file tier now: coldest first, but each after its ancestors.

    Heads go first because the file tier alone must be closed over prefixes: it is all that a restart finds. An entry
    whose parent is still on its way to the file tier waits for it: should that write fail, the entry's host copy must
    still be there.
    """
    chosen: dict[Key, Entry] = {}
    stuck: set[Key] = set()
    if wanted <= 0:
        return []
    for key in store.levels[0].policy.candidates():
        path: list[Entry] = []
        step = store.dirty.get(key)
        while step is not None and step.key in store.dirty and step.key not in chosen and step.key not in stuck:
            path.append(step)
            step = step.parent
        if step is None or step.key in chosen or step.ready(1) is not None:
            chosen.update((entry.key, entry) for entry in reversed(path))
        else:
            stuck.update(entry.key for entry in path)
        if len(chosen) >= wanted:
            break
    return list(chosen.values())[:wanted]
