"""Writes to colder tiers: which chunks, when, and what is dropped instead.

    offload   device ──► host       what is complete, or about to be evicted, as the write policy says
    backup    host ──► file         heads first, within the limits of `writing`

Under pressure offloads are dropped, and counted; backups are left for later.
"""

from __future__ import annotations

from collections.abc import Sequence

from longshore.boundary import Key, Section
from longshore.cache.flow import Flow
from longshore.cache.index import ROOT
from longshore.cache.jobs import Side
from longshore.cache.retention import DEFAULT_PRIORITY, Retention, at
from longshore.cache.sightings import Sightings
from longshore.cache.types import DropReason, Offload
from longshore.cache.writing import WritePolicy

SIGHTINGS = 1 << 16
"""Chunks that no tier has of which a selective write policy remembers how often they were offered."""


class Storing:
    """Orders offloads and backups on one `Flow`."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._store = flow.store
        selective = flow.settings.offload is WritePolicy.SELECTIVE
        self._sightings = Sightings(flow.settings.threshold, SIGHTINGS) if selective else None

    def offload(
        self,
        keys: Sequence[Key],
        first: int,
        path: Sequence[int],
        blocks: Sequence[int] | None,
        retention: Sequence[Retention] = (),
        group: int = 0,
    ) -> Offload:
        """Order what the tiers lack of `keys[first:]` into the host tier; `blocks` is `None` if the host moves it.

        `path` are the nodes of what they do not lack; `group` is the KV cache group of keys and blocks.
        """
        store = self._store
        known = first + len(path)
        store.touch(path[::-1])
        if retention:
            store.retention.apply(path, first, retention, self._flow.now)
        parent = path[-1] if path else store.index.get(keys[first - 1]) if first else ROOT
        wanted = self._worth(keys[known:], known, retention)
        store.log.by = keys[known] if known < len(keys) else None
        fresh = self._admit(wanted, parent, orphan=known > 0 and parent == ROOT)
        if not fresh:
            return Offload(None, kept=known)
        job = self._flow.new_id()
        mine = keys[known : known + fresh]
        slots = store.place(mine, parent, job)
        if retention:
            nodes = [store.pools[0].node[slot] for slot in slots]
            store.retention.apply(nodes, known, retention, self._flow.now)
        sections: tuple[Section, ...] = ()
        if blocks is not None:
            per_chunk = self._flow.settings.blocks_per_chunk
            taken = blocks[(known - first) * per_chunk : (known - first + fresh) * per_chunk]
            sections = (Section(group, known * per_chunk, tuple(taken)),)
        parents = [store.index.key[parent], *mine[:-1]]
        self._flow.order(job, mine, parents, None, Side(0, slots), sections=sections, command=blocks is not None)
        return Offload(job, known, tuple(store.addresses(0, slots)), known + fresh)

    def clean(self, at_least: int = 0) -> None:
        """Order backups until the target of the write policy (or `at_least` chunks) is safe to evict."""
        store = self._store
        if not store.backlog.count:
            return
        slots = store.pools[0].capacity
        target = self._flow.settings.backup.clean_target(slots)
        wanted = max(target - (slots - store.backlog.count), at_least - self._flow.writing[1])
        chosen = store.backlog.choose(min(wanted, self._flow.settings.max_writes - self._flow.writing[1]))
        store.log.by = store.index.key[chosen[0]] if chosen else None
        # What is chosen has its ancestors in the host tier, too, where they are spared; or they are needed.
        chosen = chosen[: store.make_room(1, len(chosen), spare_dirty=False)]
        if not chosen:
            return
        job = self._flow.new_id()
        sources = [store.index.slot[0][node] for node in chosen]
        for slot in sources:
            store.pools[0].readers[slot] += 1
        copies = [store.place_copy(node, 1, job) for node in chosen]
        index = store.index
        keys = [index.key[node] for node in chosen]
        parents = [index.key[index.parent[node]] for node in chosen]
        self._flow.order(job, keys, parents, Side(0, sources), Side(1, copies))

    def _admit(self, wanted: int, parent: int, *, orphan: bool) -> int:
        """How many of `wanted` chunks behind `parent` the host tier takes, room made; the others count as dropped."""
        store = self._store
        if not wanted:
            return 0
        if orphan:
            self._flow.drop(0, wanted, DropReason.ORPHAN)
            return 0
        allowed = min(wanted, max(0, self._flow.settings.max_writes - self._flow.writing[0]))
        pin = store.pin(parent) if parent else None
        room = self._offload_room(allowed)
        if pin is not None:
            store.unpin(pin)
        if room < wanted:
            busy = allowed < wanted or (len(store.levels) > 1 and self._flow.writing[1] > 0)
            self._flow.drop(0, wanted - room, DropReason.BACKPRESSURE if busy else DropReason.NO_ROOM)
        return room

    def _worth(self, fresh: Sequence[Key], first: int, retention: Sequence[Retention]) -> int:
        """How many leading chunks of `fresh`, which are new, the write policy takes; the others count as dropped."""
        worth, floor = len(fresh), self._flow.settings.priority_floor
        if floor:
            priorities = (
                said.priority if (said := at(retention, first + i)) else DEFAULT_PRIORITY for i in range(worth)
            )
            above = next((i for i, priority in enumerate(priorities) if priority < floor), worth)
            self._flow.drop(0, worth - above, DropReason.PRIORITY)
            worth = above
        if self._sightings is not None:
            often = self._sightings.leading(fresh[:worth])
            self._flow.drop(0, worth - often, DropReason.SELDOM)
            worth = often
        return worth

    def _offload_room(self, count: int) -> int:
        """Make room for up to `count` new chunks. What is not backed up yet is spared while a backup is under way."""
        room = self._store.make_room(0, count, spare_dirty=True)
        if room < count:
            self.clean(at_least=count)
            spare = len(self._store.levels) > 1 and self._flow.writing[1] > 0
            room = self._store.make_room(0, count, spare_dirty=spare)
        return room

    def leave_out(self, count: int) -> None:
        """So many chunks of an answer are not offloaded."""
        self._flow.drop(0, count, DropReason.ANSWER)
