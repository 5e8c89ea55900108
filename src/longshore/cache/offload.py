"""Writes to colder tiers: which chunks, when, and what is dropped instead.

    offload   device ──► host                   what is complete, or about to be evicted, as the write rule says
    backup    host ──► file ──► the next ...    heads first, as the write rules of `writing` say

Under pressure offloads are dropped, and counted; backups are left for later.

A tier that is full makes room from what is safe below. Where that is not enough it has more copied down first, for
which the tier below makes room in the same way, and so on: a cascade, of one job for each tier at most. Nothing makes
way before its copy is in place, nor for a chunk that does not come; so whatever becomes of a cascade, nothing is lost.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import compress, pairwise

import numpy as np
import numpy.typing as npt

from longshore.boundary import Addresses, Key, Section, Slots
from longshore.cache.columns import column, leading, numbers
from longshore.cache.groups import GroupKeys, runs_of
from longshore.cache.nodes import ROOT
from longshore.cache.settings import AdmissionFilter, Retention, WriteBudget, WriteRule, priorities
from longshore.cache.transfers import TierSlots, Transfers
from longshore.cache.types import DropReason, StoreOrder

ADMISSION_FILTER_SIZE = 1 << 16
"""Chunks that no tier has of which a selective write policy remembers how often they were offered."""

_FORGET = 64
"""A reserve shrinks by one chunk for so many that found clean room."""

_AHEAD = 64
"""Where not all is copied down at once, copies of one slot in so many are made ahead: fewer jobs, and larger ones."""


class Offloader:
    """Orders offloads and backups on one `Transfers`, by the rules of the routes into each tier."""

    def __init__(self, transfers: Transfers, rules: Sequence[WriteRule], *, is_only: bool) -> None:
        """With `is_only`, there is no tier but the one of the only rule: what it does not take is in none."""
        self._transfers = transfers
        self._store = transfers.store
        self._rules = rules
        self._uses_admission = is_only and not transfers.store.several_sizes
        self._reserves = [0.0] * transfers.store.last
        """Slots of each tier above another to keep free or backed up, as far as bursts need more than the rule says."""
        self._budgets = [WriteBudget(rule.bytes_per_second) for rule in rules]
        self._admission_filter = (
            AdmissionFilter(rules[0].threshold, ADMISSION_FILTER_SIZE) if rules[0].selective else None
        )

    def wants(self, *, evicting: bool) -> bool:
        """Whether chunks on the device are to be copied now that they are complete, or `evicting`."""
        return self._rules[0].policy.wants(evicting=evicting)

    def store(
        self,
        path: GroupKeys,
        nodes: Sequence[int],
        blocks: Sequence[int] | None,
        group: int,
        *,
        evicting: bool,
        patient: bool = False,
        turn: int | None = None,
    ) -> StoreOrder:
        """Order what the tiers lack of a path, of which `check` has said the `nodes`, into the host tier.

        `blocks` is `None` if the host moves it.
        """
        if not self.wants(evicting=evicting):
            return StoreOrder(None)
        store, settings, keys, first, retention = (
            self._store,
            self._transfers.settings,
            path.names,
            path.first,
            path.retention,
        )
        text, prompt, size = path.text if store.partials.on else None, path.prompt, 0
        if text is not None:
            size = settings.group(group)[1]
            text = text.checked(len(keys) * size)
        alone = settings.stands_alone(group)
        store.serve(turn)
        end = len(keys) if prompt is None or not settings.prompt_only else max(first, min(prompt, len(keys)))
        if alone:
            offload = self._offload_alone(keys, first, nodes, blocks, retention, group=group, prompt=end)
        else:
            answer = keys[max(end, first + len(nodes)) :]
            self._transfers.drop(0, store.index.find(answer).count(ROOT), DropReason.ANSWER)
            nodes = nodes[: max(0, end - first)]
            offload = self._offload(keys[:end], first, nodes, blocks, retention, group, patient=patient)
        if text is not None:
            store.partials.learn(keys, first, text, size)
        return offload

    def check(self, path: GroupKeys, group: int) -> list[int]:
        """The nodes of what is known of `path`. Raises `CacheError` unless its keys and its text fit."""
        keys, first, settings = path.names, path.first, self._transfers.settings
        if path.text is not None and self._store.partials.on:
            path.text.checked(len(keys) * settings.group(group)[1])
        known = self._known_alone if settings.stands_alone(group) else self._follow
        return known(keys, first, group)

    def _follow(self, keys: Sequence[Key], first: int, group: int) -> list[int]:
        """The nodes of what is known of `keys[first:]`, chunks of `group`."""
        pool, index = self._transfers.settings.pool_of(group), self._store.index
        path = index.follow(keys, first)
        self._store.check_pool([*path[:1], index.get(keys[first - 1]) if first else ROOT], pool)
        return path

    def _known_alone(self, keys: Sequence[Key], first: int, group: int) -> list[int]:
        """The nodes of `keys`, which stand alone, from those on that the chunk at `first` needs; `ROOT` without one."""
        kind, size = self._transfers.settings.group(group)
        nodes = self._store.index.find_alone(keys[kind.first_needed(first * size, size) :])
        self._store.check_pool(nodes, self._transfers.settings.pool_of(group))
        return nodes

    def _offload(
        self,
        keys: Sequence[Key],
        first: int,
        path: Sequence[int],
        blocks: Sequence[int] | None,
        retention: Sequence[Retention] = (),
        group: int = 0,
        *,
        patient: bool = False,
    ) -> StoreOrder:
        """`store` for chunks that need those before them: `path` are the nodes of those that the tiers have."""
        store, index, known = self._store, self._store.index, first + len(path)
        parent = index.get(keys[known - 1]) if known else ROOT
        there: Sequence[int] = range(first, known)
        lacking: Sequence[int] = range(known, len(keys))
        fresh = keys[known:]
        if index.orphans:  # some may come behind a gap
            nodes = [*path, *index.find(fresh)]
            there = [at for at, node in enumerate(nodes, first) if node]
            lacking = [at for at, node in enumerate(nodes, first) if not node]
            path, fresh = list(filter(None, nodes)), [keys[at] for at in lacking]
        store.touch(path[::-1])
        if retention:
            store.priorities.apply(path, there, retention, self._transfers.now)
        fresh = fresh[: self._worth(fresh, lacking, retention)]
        store.log.by = keys[lacking[0]] if lacking else None
        pool = self._transfers.settings.pool_of(group)
        patient = patient and self._admission_filter is None
        orphan = known > 0 and index.is_orphan(parent)
        needed = [parent, *path[known - first :]]
        count = self._admit(len(fresh), needed, pool, orphan=orphan, patient=patient, path=fresh)
        if count is None:
            return StoreOrder(None, again=True)
        kept, accepted = lacking[count] if count < len(lacking) else len(keys), lacking[:count]
        if not count:
            return StoreOrder(None, kept=kept, known=there)
        job, slots, parents = self._transfers.new_id(), list[int](), list[Key | None]()
        for start, end in runs_of(accepted):
            run = keys[accepted[start] : accepted[end - 1] + 1]
            parents += [keys[accepted[start] - 1] if accepted[start] else None, *run[:-1]]
            slots += store.place(run, parents[start], job, pool)
        if retention:
            nodes = [store.pools[0].node[slot] for slot in slots]
            store.priorities.apply(nodes, accepted, retention, self._transfers.now)
        sections = () if blocks is None else self._sections(group, accepted, first, blocks)
        self._transfers.order(
            job, fresh[:count], parents, None, TierSlots(0, slots), sections=sections, command=blocks is not None
        )
        addresses = Addresses(Slots(store.levels[0].name, pool, tuple(slots)))
        return StoreOrder(job, accepted, addresses, kept, there)

    def _offload_alone(
        self,
        keys: Sequence[Key],
        first: int,
        nodes: Sequence[int],
        blocks: Sequence[int] | None,
        retention: Sequence[Retention] = (),
        *,
        group: int,
        prompt: int,
    ) -> StoreOrder:
        """The same for chunks that stand alone, each for itself; those from position `prompt` on are left out.

        `nodes` are those of the last of them. Those in the last window are the last to go, and get room first.
        """
        store, kind, size = self._store, *self._transfers.settings.group(group)
        in_window, pool = kind.first_needed(len(keys) * size, size), self._transfers.settings.pool_of(group)
        at = np.zeros(len(keys), np.int32)
        at[len(keys) - len(nodes) :] = numbers(nodes)
        known = np.flatnonzero(at).tolist()
        fresh = (first + np.flatnonzero(at[first:] == ROOT)).tolist()
        window = at[known[bisect_left(known, in_window) :]].tolist()
        store.touch(window[::-1])
        store.windows.enter(window)
        self._retain(at, known, retention)
        wanted = self._worth_alone(keys, fresh, prompt, retention)
        store.log.by = keys[wanted[-1]] if wanted else None
        pins = [store.pin(node) for node in window]
        admitted = self._admit(len(wanted), (), pool) or 0
        for pin in pins:
            store.unpin(pin)
        wanted = wanted[len(wanted) - admitted :]
        job, slots = self._order_alone(keys, wanted, first, blocks, group)
        known = [position for position in known if store.index.key[at[position]] == keys[position]]
        at[wanted] = column(store.pools[0].node)[numbers(slots)]
        self._retain(at, wanted, retention)
        there = numbers([*known, *wanted])
        store.windows.slide(at[there[there < in_window]].tolist())
        had = np.zeros(len(keys), bool)
        had[there] = True
        addresses = Addresses(Slots(store.levels[0].name, pool, tuple(slots)))
        lead, before = first + leading(had[first:]), tuple(known[bisect_left(known, first) :])
        return StoreOrder(job, tuple(wanted), addresses, lead, before)

    def _order_alone(
        self, keys: Sequence[Key], wanted: Sequence[int], first: int, blocks: Sequence[int] | None, group: int
    ) -> tuple[int | None, list[int]]:
        """Order the chunks at the positions `wanted`, for which there is room, into the host tier; job and slots."""
        if not wanted:
            return None, []
        job, mine = self._transfers.new_id(), list(map(keys.__getitem__, wanted))
        slots = self._store.place_alone(mine, job, self._transfers.settings.pool_of(group))
        sections = () if blocks is None else self._sections(group, wanted, first, blocks)
        self._transfers.order(
            job, mine, [None] * len(mine), None, TierSlots(0, slots), sections=sections, command=blocks is not None
        )
        return job, slots

    def _retain(self, at: npt.NDArray[np.int32], positions: Sequence[int], retention: Sequence[Retention]) -> None:
        """`retention` says something of some of `positions`, where the nodes are `at`."""
        if retention and len(positions):
            self._store.priorities.apply(at[numbers(positions)], positions, retention, self._transfers.now)

    def _sections(self, group: int, positions: Sequence[int], first: int, blocks: Sequence[int]) -> tuple[Section, ...]:
        """The device blocks of the chunks at `positions`, of which the one at `first` has the first of `blocks`."""
        per_chunk = self._transfers.settings.blocks_per_chunk
        sections = []
        for start, end in runs_of(positions):
            begin, stop = positions[start] - first, positions[end - 1] - first + 1
            taken = tuple(blocks[begin * per_chunk : stop * per_chunk])
            sections.append(Section(group, positions[start] * per_chunk, taken))
        return tuple(sections)

    def _worth_alone(
        self, keys: Sequence[Key], fresh: Sequence[int], prompt: int, retention: Sequence[Retention]
    ) -> list[int]:
        """Those of the positions `fresh`, which ascend, that the write policy takes; the others count as dropped."""
        floor, seen = self._transfers.settings.priority_floor, self._admission_filter
        worth = list(fresh[: bisect_left(fresh, prompt)])
        self._transfers.drop(0, len(fresh) - len(worth), DropReason.ANSWER)
        if floor:
            asked, worth = worth, list(compress(worth, priorities(retention, worth) >= floor))
            self._transfers.drop(0, len(asked) - len(worth), DropReason.PRIORITY)
        if seen is not None:
            asked, worth = worth, [each for each in worth if seen.leading([keys[each]])]
            self._transfers.drop(0, len(asked) - len(worth), DropReason.SELDOM)
        return worth

    def clean_room(self, nodes: Sequence[int], *, cleans: bool) -> int:
        """Make clean room for `nodes` in the host tier; for how many, from the first on.

        If that `cleans`, copies down are ordered of as many chunks as room is lacking for.
        """
        room = self._transfers.evictor.room_for(0, nodes, spare_dirty=True)
        if cleans and room < len(nodes) and self._store.last:
            self._clean(0, len(nodes) - room)
            room = self._transfers.evictor.room_for(
                0, nodes, spare_dirty=True
            )  # what may not be copied is not dirty any more
        return room

    def clean(self, *, all_of_host: bool = False) -> None:
        """Order copies down until what the write rules say (or all of the host tier) is safe to evict."""
        dirty = self._store.backlog.counts
        for tier in reversed(range(self._store.last)):
            if dirty[tier]:
                self._clean(tier, dirty[0] if all_of_host and not tier else 0)
        for node in sorted(self._store.index.called):
            chain, tier = self._store.backlog.chain(node)
            self._write(chain[: max(0, self._transfers.settings.max_writes - self._transfers.writing[tier + 1])], tier)

    def _clean(self, tier: int, at_least: int) -> None:
        """Order copies from `tier` to the one below, of `at_least` chunks with those under way, if so many can go."""
        store, below = self._store, tier + 1
        slots, writing = store.total_room(tier), self._transfers.writing[below]
        target = self._clean_target(tier, slots)
        wanted = max(target - (slots - store.backlog.counts[tier]), at_least - writing)
        if wanted > 0 and target < slots:
            wanted += slots // _AHEAD
        most = min(wanted, self._transfers.settings.max_writes - writing)
        self._write(store.backlog.choose(tier, most) if most > 0 else [], tier)

    def _write(self, chosen: list[int], tier: int) -> None:
        """Order copies of `chosen`, parents first, from `tier` to the one below, as far as it may have them."""
        store, below = self._store, tier + 1
        if not chosen:
            return
        by = store.log.by
        store.log.by = store.index.key[chosen[0]]
        pools: dict[int, list[int]] = {} if store.several_sizes else {0: chosen}
        for node in chosen if store.several_sizes else ():
            pools.setdefault(store.index.pool_of(node), []).append(node)
        for pool, nodes in pools.items():
            # What is chosen has its ancestors in this tier too, for which they are spared below; or they are needed.
            nbytes, allowed = store.pools[below].slabs.image_bytes[pool], self._allowed(below, nodes, pool)
            chosen = self._admitted(below, allowed, pool)
            self._budgets[below].spend(len(chosen) * nbytes)
            self._copy_down(chosen, tier)
        store.log.by = by

    def _allowed(self, tier: int, nodes: list[int], pool: int) -> list[int]:
        """Those of `nodes`, of one size, that may be written to `tier`; the others are not to be tried before a use."""
        if tier in self._transfers.refusing:
            granted, reason = 0, DropReason.TIER_OFF
        else:
            nbytes = self._store.pools[tier].slabs.image_bytes[pool]
            granted, reason = self._budgets[tier].allows(self._transfers.now, len(nodes), nbytes), DropReason.BUDGET
        if granted == len(nodes):
            return nodes
        self._transfers.drop(tier, len(nodes) - granted, reason)
        for node in nodes[granted:]:
            self._store.backup_failed(node)
        return nodes[:granted]

    def _admitted(self, tier: int, nodes: Sequence[int], pool: int) -> list[int]:
        """Those of `nodes`, parents first, that `tier` takes, room made.

        Where it is full, chunks that promise less than what would go for them are refused, with all behind them, and
        not offered again before they are used again.
        """
        store, parent = self._store, self._store.index.parent
        policy = store.order(tier, pool)
        if not (self._transfers.settings.admission and policy.refuses) or store.pools[tier].room(pool) >= len(nodes):
            return list(nodes[: self._room(tier, len(nodes), pool)])
        if tier < store.last:
            self._clean(tier, len(nodes))
        chosen, left_out, refused = list[int](), set[int](), list[int]()

        def make_room(most: int) -> int:
            return self._room(tier, len(chosen) + most, pool, ahead=False, observes=not chosen) - len(chosen)

        starts = [at for at, node in enumerate(nodes) if not at or parent[node] != nodes[at - 1]]
        for start, end in pairwise([*starts, len(nodes)]):
            path, taken, least = nodes[start:end], 0, 0
            if parent[path[0]] not in left_out:
                keys = [store.index.key[node] for node in path]
                taken, least = policy.admit(keys, make_room, copies=True)
            chosen += path[:taken]
            refused += path[taken : taken + min(least, 1)]
            left_out.update(path[taken:])
        if refused:
            self._transfers.drop(tier, store.refuse(refused), DropReason.ADMISSION)
        return chosen

    def _copy_down(self, chosen: Sequence[int], tier: int) -> None:
        """Order one job that copies `chosen` from `tier` to the one below, which has room for them."""
        if not chosen:
            return
        store, index, job = self._store, self._store.index, self._transfers.new_id()
        sources = [index.slot[tier][node] for node in chosen]
        for slot in sources:
            store.pools[tier].readers[slot] += 1
        copies = store.place_copies(chosen, tier + 1, job)
        keys = [index.key[node] for node in chosen]
        parents = [index.key[index.parent[node]] for node in chosen]
        self._transfers.order(job, keys, parents, TierSlots(tier, sources), TierSlots(tier + 1, copies))

    def _admit(
        self,
        wanted: int,
        needed: Sequence[int],
        pool: int,
        *,
        orphan: bool = False,
        patient: bool = False,
        path: Sequence[Key] = (),
    ) -> int | None:
        """How many of `wanted` chunks the host tier takes, room made; the others count as dropped.

        These are the keys `path`, unless they stand alone, and the nodes `needed` stay. The only tier takes those that
        its policy admits. An `orphan`, and what is behind it, takes free slots: nothing makes way for what goes first.
        If it is `patient`, and room is being made for all of them, or for all that fit at once, it is `None`, and
        nothing counts.
        """
        store = self._store
        if not wanted:
            return 0
        patient &= not orphan
        nbytes, pins = store.pools[0].slabs.image_bytes[pool], [store.pin(node) for node in needed if node]
        once = min(wanted, store.total_room(0))
        again = (
            patient and bool(store.last) and self._room(0, once, pool, observes=False) < once and self._may_get_room(0)
        )
        granted = 0 if again else self._budgets[0].allows(self._transfers.now, wanted, nbytes)
        allowed = min(granted, max(0, self._transfers.settings.max_writes - self._transfers.writing[0]))
        if orphan:
            room = min(allowed, store.pools[0].room(pool))
        elif self._uses_admission and path and allowed > store.pools[0].room(pool):

            def make_room(most: int) -> int:
                return self._transfers.evictor.make_room(0, most, pool, spare_dirty=False)

            room = store.policies[0].admit(path[:allowed], make_room)[0] or make_room(1)
        else:
            room = self._room(0, allowed, pool, waits=patient) if allowed else 0
        for pin in pins:
            store.unpin(pin)
        if again:
            return None
        self._transfers.drop(0, wanted - granted, DropReason.BUDGET)
        if room < granted:
            busy = allowed < granted or self._is_copying_down(0)
            reason = DropReason.BACKPRESSURE if busy else DropReason.NO_ROOM
            self._transfers.drop(0, granted - room, DropReason.ORPHAN if orphan else reason)
        self._budgets[0].spend(room * nbytes)
        return room

    def _worth(self, fresh: Sequence[Key], at: Sequence[int], retention: Sequence[Retention]) -> int:
        """How many leading chunks of `fresh`, which are new, the write policy takes; the others count as dropped.

        They are `at` these positions.
        """
        worth, floor = len(fresh), self._transfers.settings.priority_floor
        if floor:
            above = leading(priorities(retention, at) >= floor)
            self._transfers.drop(0, worth - above, DropReason.PRIORITY)
            worth = above
        if self._admission_filter is not None:
            often = self._admission_filter.leading(fresh[:worth])
            self._transfers.drop(0, worth - often, DropReason.SELDOM)
            worth = often
        return worth

    def _room(
        self, tier: int, count: int, pool: int, *, ahead: bool = True, waits: bool = False, observes: bool = True
    ) -> int:
        """Make room for up to `count` chunks of `pool` in `tier`, and says for how many.

        What `waits` for room loses nothing where it is short, so the reserve need not grow. With `observes` off, this
        is not the one request for room that counts for the reserve.

        What is dirty there is copied down first, if the tier below can make room; and is spared while any is.
        """
        store = self._store
        room = self._transfers.evictor.make_room(tier, count, pool, spare_dirty=True, ahead=ahead)
        if observes and not self._transfers.settings.stores_wait and tier < store.last and not (waits and room < count):
            self._observe_room(tier, count, room)
        if room < count and tier < store.last:
            self._clean(tier, count)
            room = self._transfers.evictor.make_room(
                tier, count, pool, spare_dirty=self._is_copying_down(tier), ahead=ahead
            )
        return room

    def _clean_target(self, tier: int, slots: int) -> int:
        """How many of a tier's `slots` are to be free, or backed up."""
        least = self._rules[tier + 1].policy.clean_target(slots)
        return max(least, int(self._reserves[tier]))

    def _observe_room(self, tier: int, wanted: int, found: int) -> None:
        """Chunks asked for `wanted` slots of `tier`, of which `found` were free or backed up.

        The reserve grows by half of what is lacking, and shrinks by one for `_FORGET` chunks that lack nothing. So few
        chunks find no clean slot, if the tier is large enough for its bursts and writes keep up. One
        slot may be dirty.
        """
        if found >= wanted:
            self._reserves[tier] = max(0.0, self._reserves[tier] - wanted / _FORGET)
        else:
            slots = self._store.total_room(tier)
            grown = max(self._clean_target(tier, slots), self._reserves[tier]) + (wanted - found) / 2
            self._reserves[tier] = max(0.0, min(slots - 1, grown))

    def _may_get_room(self, tier: int) -> bool:
        """Whether copies down are under way, or what is being filled may be copied down when it is ready."""
        return self._is_copying_down(tier) or (tier < self._store.last and bool(self._store.pools[tier].writer))

    def _is_copying_down(self, tier: int) -> bool:
        """Whether what is dirty in `tier` may soon be safe: copies of it, or of what it waits for, are under way."""
        return any(self._transfers.writing[below] for below in range(tier + 1, self._store.last + 1))
