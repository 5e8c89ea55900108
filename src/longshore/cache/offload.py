"""Writes to colder tiers: which chunks are stored, when, and which are dropped.

    offload   device ──► host                   chunks that are complete, or about to be evicted, by the write rule
    backup    host ──► file ──► the next ...    heads first, by the write rules (`longshore.cache.settings`)

Offloads for which there is no room are dropped and counted. Backups without room are postponed; those beyond the byte
budget of a route, or to a tier that is off, are dropped and counted, and tried again when the chunk is used.

A full tier evicts chunks that a colder tier has. If these are too few, more are copied down first, for which the tier
below makes room in the same way: a cascade of at most one job for each tier. While such copies are in flight, a chunk
is evicted only after its copy is complete, and only for a chunk that will be stored. Where none can be made, chunks are
evicted without a copy.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import compress

import numpy as np
import numpy.typing as npt

from longshore.boundary import Addresses, Key, Section, Slots
from longshore.cache.columns import I32, as_i32, count_leading, i32_view, runs_of
from longshore.cache.nodes import ROOT
from longshore.cache.settings import OfferFilter, Retention, WriteBudget, WriteRule, priorities
from longshore.cache.transfers import TierSlots, Transfers
from longshore.cache.types import DropReason, GroupKeys, ScheduledStore

OFFER_FILTER_SIZE = 1 << 16
"""Number of chunks whose offers a selective write policy counts before they are stored."""

_FORGET = 64
"""A reserve shrinks by one chunk for each 64 chunks that found room by evicting clean ones."""

_ROOM_AHEAD_DIVISOR = 64
"""Backups copy one slot in 64 more than needed, so that there are fewer and larger jobs."""


class Offloader:
    """Orders offloads and backups, by the write rule of each tier."""

    def __init__(self, transfers: Transfers, rules: Sequence[WriteRule], *, is_shared: bool) -> None:
        """`is_shared`: remote tiers or other engines are offered what host memory stores: it rejects no chunk then."""
        self._transfers = transfers
        self._state = transfers.state
        self._rules = rules
        is_only_tier = not (is_shared or transfers.state.coldest or transfers.state.several_sizes)
        self._uses_admission = transfers.settings.admission and is_only_tier
        self._asks_all = transfers.state.coldest_ranks_all and not is_shared
        self._reserves = [0.0] * transfers.state.coldest
        """Number of slots of each tier to keep free or backed up, where bursts need more than the write rule says."""
        self._budgets = [WriteBudget(rule.bytes_per_second) for rule in rules]
        self._offer_filter = OfferFilter(rules[0].threshold, OFFER_FILTER_SIZE) if rules[0].selective else None

    def wants(self, *, before_eviction: bool) -> bool:
        """Whether to store chunks now: those that are now complete on the device, or, `before_eviction`, leave it."""
        return self._rules[0].policy.wants(before_eviction=before_eviction)

    def store(
        self,
        path: GroupKeys,
        nodes: Sequence[int] | I32,
        blocks: Sequence[int] | None,
        group: int,
        *,
        before_eviction: bool,
        all_or_retry: bool = False,
        defer_rest: bool = False,
        request_number: int | None = None,
    ) -> ScheduledStore:
        """Schedule the offload of chunks of a path that are in no tier. `nodes` is the result of `check`.

        `blocks` is `None` if the inference engine moves the bytes.
        """
        if not self.wants(before_eviction=before_eviction):
            return ScheduledStore(None)
        state, settings, keys, first, retention = (
            self._state,
            self._transfers.settings,
            path.keys,
            path.start,
            path.retention,
        )
        prompt_tokens, prompt, size = path.prompt_tokens if state.partials.on else None, path.prompt_end, 0
        if prompt_tokens is not None:
            size = settings.group(group)[1]
            prompt_tokens = prompt_tokens.checked(len(keys) * size)
        independent = settings.is_independent(group)
        state.set_request(request_number)
        end = len(keys) if prompt is None or not settings.prompt_only else max(first, min(prompt, len(keys)))
        if independent:
            offload = self._offload_independent(
                keys, first, nodes, blocks, retention, group=group, prompt=end, all_or_retry=all_or_retry
            )
        else:
            answer = keys[max(end, first + len(nodes)) :]
            self._transfers.count_drop(0, state.index.find(answer).count(ROOT), DropReason.GENERATED)
            nodes = nodes[: max(0, end - first)]
            offload = self._offload(
                keys[:end], first, nodes, blocks, retention, group, all_or_retry=all_or_retry, defer_rest=defer_rest
            )
        if prompt_tokens is not None:
            state.partials.learn(keys, first, prompt_tokens, size)
        return offload

    def check(self, path: GroupKeys, group: int) -> Sequence[int] | I32:
        """The nodes of the chunks of `path` in the index. Raises `CacheError` for invalid keys or tokens."""
        keys, first, settings = path.keys, path.start, self._transfers.settings
        if path.prompt_tokens is not None and self._state.partials.on:
            path.prompt_tokens.checked(len(keys) * settings.group(group)[1])
        known = self._known_independent if settings.is_independent(group) else self._follow
        return known(keys, first, group)

    def _follow(self, keys: Sequence[Key], first: int, group: int) -> I32:
        """The nodes of the leading chunks of `keys[first:]`, of `group`, that are in the index."""
        size_class, index = self._transfers.settings.size_class_of(group), self._state.index
        path = index.follow(keys, first)
        self._state.check_size_class([*path[:1], index.get(keys[first - 1]) if first else ROOT], size_class)
        return path

    def _known_independent(self, keys: Sequence[Key], first: int, group: int) -> list[int]:
        """The nodes of independent `keys`, from the first on that the chunk at `first` needs; `ROOT` if none."""
        kind, size = self._transfers.settings.group(group)
        nodes = self._state.index.find_independent(keys[kind.first_needed(first * size, size) :])
        self._state.check_size_class(nodes, self._transfers.settings.size_class_of(group))
        return nodes

    def _offload(
        self,
        keys: Sequence[Key],
        first: int,
        path: Sequence[int] | I32,
        blocks: Sequence[int] | None,
        retention: Sequence[Retention] = (),
        group: int = 0,
        *,
        all_or_retry: bool = False,
        defer_rest: bool = False,
    ) -> ScheduledStore:
        """`store` for chunks that need their ancestors. `path` are the nodes of chunks in the index."""
        state, index, known = self._state, self._state.index, first + len(path)
        parent = index.get(keys[known - 1]) if known else ROOT
        there: Sequence[int] = range(first, known)
        lacking: Sequence[int] = range(known, len(keys))
        fresh = keys[known:]
        if index.orphans:  # some chunks behind a gap may be in the index
            nodes = [*path, *index.find(fresh)]
            there = [position for position, node in enumerate(nodes, first) if node]
            lacking = [position for position, node in enumerate(nodes, first) if not node]
            path, fresh = list(filter(None, nodes)), [keys[position] for position in lacking]
        state.touch(path[::-1])
        if retention:
            state.priorities.apply(path, there, retention, self._transfers.now)
        fresh = fresh[: self._worth(fresh, lacking, retention)]
        state.log.evicted_for = keys[lacking[0]] if lacking else None
        size_class = self._transfers.settings.size_class_of(group)
        all_or_retry, defer_rest = (each and self._offer_filter is None for each in (all_or_retry, defer_rest))
        orphan = known > 0 and index.is_orphan(parent)
        needed = [parent, *path[known - first :]]
        count, waiting = self._admit(
            len(fresh), needed, size_class, orphan=orphan, all_or_retry=all_or_retry, defer_rest=defer_rest, path=fresh
        )
        if all_or_retry and waiting:
            return ScheduledStore(None, retry=True)
        stored_prefix, accepted = lacking[count] if count < len(lacking) else len(keys), lacking[:count]
        later = lacking[count : count + waiting]
        if not count:
            return ScheduledStore(None, stored_prefix=stored_prefix, already_stored=there, later=later)
        job, slots, parents = self._transfers.new_id(), list[int](), list[Key | None]()
        for start, end in runs_of(accepted):
            run = keys[accepted[start] : accepted[end - 1] + 1]
            parents += [keys[accepted[start] - 1] if accepted[start] else None, *run[:-1]]
            slots += state.allocate(run, parents[start], job, size_class)
        if retention:
            nodes = [state.pools[0].node[slot] for slot in slots]
            state.priorities.apply(nodes, accepted, retention, self._transfers.now)
        sections = () if blocks is None else self._sections(group, accepted, first, blocks)
        self._transfers.schedule(
            job, fresh[:count], parents, None, TierSlots(0, slots), sections=sections, command=blocks is not None
        )
        addresses = Addresses(Slots(state.tier_names[0], size_class, tuple(slots)))
        return ScheduledStore(job, accepted, addresses, stored_prefix, there, later=later)

    def _offload_independent(
        self,
        keys: Sequence[Key],
        first: int,
        nodes: Sequence[int] | I32,
        blocks: Sequence[int] | None,
        retention: Sequence[Retention] = (),
        *,
        group: int,
        prompt: int,
        all_or_retry: bool = False,
    ) -> ScheduledStore:
        """`store` for independent chunks. Chunks from position `prompt` on are not stored.

        `nodes` are the nodes of the last chunks. Chunks in the last window get room first, and are evicted last.
        """
        state, kind, size = self._state, *self._transfers.settings.group(group)
        in_window, size_class = kind.first_needed(len(keys) * size, size), self._transfers.settings.size_class_of(group)
        node_at = np.zeros(len(keys), np.int32)
        node_at[len(keys) - len(nodes) :] = as_i32(nodes)
        known = np.flatnonzero(node_at).tolist()
        fresh = (first + np.flatnonzero(node_at[first:] == ROOT)).tolist()
        window = node_at[known[bisect_left(known, in_window) :]].tolist()
        state.touch(window[::-1])
        state.windows.enter(window)
        self._retain(node_at, known, retention)
        wanted = self._worth_independent(keys, fresh, prompt, retention)
        state.log.evicted_for = keys[wanted[-1]] if wanted else None
        refs = [state.add_ref(node) for node in window]
        admitted, waiting = self._admit(len(wanted), (), size_class, all_or_retry=all_or_retry)
        for ref in refs:
            state.remove_ref(ref)
        if waiting:
            return ScheduledStore(None, retry=True)
        wanted = wanted[len(wanted) - admitted :]
        job, slots = self._schedule_independent(keys, wanted, first, blocks, group)
        known = [position for position in known if state.index.key[node_at[position]] == keys[position]]
        node_at[wanted] = i32_view(state.pools[0].node)[as_i32(slots)]
        self._retain(node_at, wanted, retention)
        there = as_i32([*known, *wanted])
        state.windows.slide(node_at[there[there < in_window]].tolist())
        had = np.zeros(len(keys), bool)
        had[there] = True
        addresses = Addresses(Slots(state.tier_names[0], size_class, tuple(slots)))
        lead, before = first + count_leading(had[first:]), tuple(known[bisect_left(known, first) :])
        return ScheduledStore(job, tuple(wanted), addresses, lead, before)

    def _schedule_independent(
        self, keys: Sequence[Key], wanted: Sequence[int], first: int, blocks: Sequence[int] | None, group: int
    ) -> tuple[int | None, list[int]]:
        """Schedule the offload of the chunks at `wanted`, for which there is room; returns job and slots."""
        if not wanted:
            return None, []
        job, mine = self._transfers.new_id(), list(map(keys.__getitem__, wanted))
        slots = self._state.allocate_independent(mine, job, self._transfers.settings.size_class_of(group))
        sections = () if blocks is None else self._sections(group, wanted, first, blocks)
        self._transfers.schedule(
            job, mine, [None] * len(mine), None, TierSlots(0, slots), sections=sections, command=blocks is not None
        )
        return job, slots

    def _retain(self, node_at: npt.NDArray[np.int32], positions: Sequence[int], retention: Sequence[Retention]) -> None:
        """Apply `retention` to the chunks at `positions`; `node_at` are the nodes of the path."""
        if retention and len(positions):
            self._state.priorities.apply(node_at[as_i32(positions)], positions, retention, self._transfers.now)

    def _sections(self, group: int, positions: Sequence[int], first: int, blocks: Sequence[int]) -> tuple[Section, ...]:
        """The device blocks of the chunks at `positions`. `blocks` begin with those of the chunk at `first`."""
        per_chunk = self._transfers.settings.blocks_per_chunk
        sections = []
        for start, end in runs_of(positions):
            begin, stop = positions[start] - first, positions[end - 1] - first + 1
            taken = tuple(blocks[begin * per_chunk : stop * per_chunk])
            sections.append(Section(group, positions[start] * per_chunk, taken))
        return tuple(sections)

    def _worth_independent(
        self, keys: Sequence[Key], fresh: Sequence[int], prompt: int, retention: Sequence[Retention]
    ) -> list[int]:
        """Those of the ascending positions `fresh` that the write policy stores; the others are counted as dropped."""
        floor, seen = self._transfers.settings.priority_floor, self._offer_filter
        worth = list(fresh[: bisect_left(fresh, prompt)])
        self._transfers.count_drop(0, len(fresh) - len(worth), DropReason.GENERATED)
        if floor:
            asked, worth = worth, list(compress(worth, priorities(retention, worth) >= floor))
            self._transfers.count_drop(0, len(asked) - len(worth), DropReason.PRIORITY)
        if seen is not None:
            asked, worth = worth, [each for each in worth if seen.leading([keys[each]])]
            self._transfers.count_drop(0, len(asked) - len(worth), DropReason.BELOW_THRESHOLD)
        return worth

    def make_room_from_clean(self, nodes: Sequence[int], *, back_up: bool) -> int:
        """Make room for `nodes` in the host tier without evicting dirty chunks; returns for how many leading ones.

        With `back_up`, backups of as many chunks as lack room are scheduled.
        """
        room = self._transfers.evictor.room_for(0, nodes, clean_only=True)
        if back_up and room < len(nodes) and self._state.coldest:
            self._back_up(0, len(nodes) - room)
            room = self._transfers.evictor.room_for(
                0, nodes, clean_only=True
            )  # chunks that may not be copied are not dirty any more
        return room

    def back_up(self, *, all_of_host: bool = False) -> None:
        """Schedule backups until as many chunks are clean as the write rules say, or all of the host tier."""
        dirty = self._state.backlog.counts
        for tier in reversed(range(self._state.coldest)):
            if dirty[tier]:
                self._back_up(tier, dirty[0] if all_of_host and not tier else 0)
        for node in sorted(self._state.index.wanted_by_orphans):
            chain, tier = self._state.backlog.chain(node)
            self._write(chain[: max(0, self._transfers.settings.max_writes - self._transfers.writing[tier + 1])], tier)

    def _back_up(self, tier: int, at_least: int) -> None:
        """Schedule backups from `tier` to the one below, of `at_least` chunks with those in flight, if possible."""
        state, below = self._state, tier + 1
        slots, writing = state.total_room(tier), self._transfers.writing[below]
        target = self._clean_target(tier, slots)
        wanted = max(target - (slots - state.backlog.counts[tier]), at_least - writing)
        if wanted > 0 and target < slots:
            wanted += slots // _ROOM_AHEAD_DIVISOR
        most = min(wanted, self._transfers.settings.max_writes - writing)
        self._write(state.backlog.choose(tier, most) if most > 0 else [], tier)

    def _write(self, chosen: list[int], tier: int) -> None:
        """Schedule backups of `chosen`, parents first, from `tier` to the one below, as far as that takes them."""
        state, below = self._state, tier + 1
        if not chosen:
            return
        by = state.log.evicted_for
        state.log.evicted_for = state.index.key[chosen[0]]
        by_size_class: dict[int, list[int]] = {} if state.several_sizes else {0: chosen}
        for node in chosen if state.several_sizes else ():
            by_size_class.setdefault(state.index.size_class_of(node), []).append(node)
        for size_class, nodes in by_size_class.items():
            # The ancestors of chosen chunks are in this tier, too, or are needed below: none is evicted for them. Some
            # of the chosen may be rejected.
            nbytes, allowed = state.pools[below].slabs.image_bytes[size_class], self._allowed(below, nodes, size_class)
            room = self._room(below, len(allowed), size_class)
            chosen = [node for node in allowed if not state.backlog.waits_for_use(node)][:room]
            self._budgets[below].spend(len(chosen) * nbytes)
            self._copy_down(chosen, tier)
        state.log.evicted_for = by

    def _allowed(self, tier: int, nodes: list[int], size_class: int) -> list[int]:
        """Those of `nodes`, of one size, that may be written to `tier`; the others are retried after their next use."""
        if tier in self._transfers.rejecting_tiers:
            granted, reason = 0, DropReason.TIER_OFF
        else:
            nbytes = self._state.pools[tier].slabs.image_bytes[size_class]
            granted, reason = self._budgets[tier].allows(self._transfers.now, len(nodes), nbytes), DropReason.RATE_LIMIT
        if granted == len(nodes):
            return nodes
        self._transfers.count_drop(tier, len(nodes) - granted, reason)
        for node in nodes[granted:]:
            self._state.backup_failed(node)
        return nodes[:granted]

    def _copy_down(self, chosen: Sequence[int], tier: int) -> None:
        """Schedule one job that copies `chosen` from `tier` to the one below, which has room."""
        if chosen:
            self._transfers.schedule_copies(chosen, tier, tier + 1)

    def _admit(
        self,
        wanted: int,
        needed: Sequence[int],
        size_class: int,
        *,
        orphan: bool = False,
        all_or_retry: bool = False,
        defer_rest: bool = False,
        path: Sequence[Key] = (),
    ) -> tuple[int, int]:
        """Make room in the host tier for `wanted` chunks; counts as dropped those that get none.

        Returns for how many there is room, and for how many it is being made.

        `path` are their keys, unless they are independent; the nodes `needed` are not evicted. The policy of the only
        tier, or of the coldest, admits chunks. An `orphan` and its descendants take free slots only, because they are
        evicted first. With `all_or_retry`, while room is being made for all of them, or for as many as the tier has
        slots, nothing is counted and there is room for none. Those that are deferred (`defer_rest`) are not counted.
        """
        state = self._state
        if not wanted:
            return 0, 0
        all_or_retry, defer_rest = (each and not orphan and bool(state.coldest) for each in (all_or_retry, defer_rest))
        nbytes, refs = state.pools[0].slabs.image_bytes[size_class], [state.add_ref(node) for node in needed if node]
        asked = wanted
        if self._asks_all and path and not orphan:
            wanted = self._promising(path, size_class)
        once = min(wanted, state.total_room(0))
        again = all_or_retry and self._room(0, once, size_class, observes=False) < once and self._may_get_room(0)
        granted = 0 if again else self._budgets[0].allows(self._transfers.now, wanted, nbytes)
        allowed = min(granted, max(0, self._transfers.settings.max_writes - self._transfers.writing[0]))
        if orphan:
            room = min(allowed, state.pools[0].room(size_class))
        elif self._uses_admission and path and allowed > state.pools[0].room(size_class):

            def make_room(most: int) -> int:
                return self._transfers.evictor.make_room(0, most, size_class, clean_only=False)

            room = state.policies[0].admit(path[:allowed], make_room)
        else:
            room = self._room(0, allowed, size_class, waits=all_or_retry or defer_rest) if allowed else 0
        for ref in refs:
            state.remove_ref(ref)
        if again:
            return 0, wanted
        waiting = granted - room if defer_rest and (room or self._may_get_room(0)) else 0
        self._transfers.count_drop(0, asked - wanted, DropReason.ADMISSION)
        self._transfers.count_drop(0, wanted - granted, DropReason.RATE_LIMIT)
        if room + waiting < granted:
            busy = allowed < granted or self._is_copying_down(0)
            reason = DropReason.BACKPRESSURE if busy else DropReason.NO_ROOM
            self._transfers.count_drop(0, granted - room - waiting, DropReason.NO_PARENT if orphan else reason)
        self._budgets[0].spend(room * nbytes)
        return room, waiting

    def _promising(self, path: Sequence[Key], size_class: int) -> int:
        """How many leading chunks of `path` host memory stores.

        For those, it has room, or chunks of any tier that promise fewer hits make room for them, now or when others
        were copied down.
        """
        evictor, writing, policy = self._transfers.evictor, self._transfers.writing, self._state.policies[-1]
        room = evictor.make_room(0, len(path), size_class, clean_only=True)
        if room == len(path):
            return room

        def make_room(most: int) -> int:
            found = evictor.make_room(0, most, size_class, clean_only=True, ahead=False)
            if found < most:
                self._back_up(0, most - found)
                found = evictor.make_room(0, most, size_class, clean_only=True, ahead=False)
            return min(most, found + writing[1] + self._state.pools[-1].room(size_class))

        return max(room, policy.admit(path, make_room, least=0))

    def _worth(self, fresh: Sequence[Key], positions: Sequence[int], retention: Sequence[Retention]) -> int:
        """How many leading new chunks of `fresh`, at `positions`, the write policy stores; counts the others."""
        worth, floor = len(fresh), self._transfers.settings.priority_floor
        if floor:
            above = count_leading(priorities(retention, positions) >= floor)
            self._transfers.count_drop(0, worth - above, DropReason.PRIORITY)
            worth = above
        if self._offer_filter is not None:
            often = self._offer_filter.leading(fresh[:worth])
            self._transfers.count_drop(0, worth - often, DropReason.BELOW_THRESHOLD)
            worth = often
        return worth

    def _room(
        self, tier: int, count: int, size_class: int, *, ahead: bool = True, waits: bool = False, observes: bool = True
    ) -> int:
        """Make room for up to `count` chunks of `size_class` in `tier`; returns for how many.

        Dirty chunks are copied down first, if the tier below can make room, and not evicted while copies are in flight.
        A caller that `waits` for room drops no chunk if it is short, so the reserve does not grow. Without `observes`,
        the call does not change the reserve.
        """
        state = self._state
        room = self._transfers.evictor.make_room(tier, count, size_class, clean_only=True, ahead=ahead)
        if (
            observes
            and not self._transfers.settings.stores_wait
            and tier < state.coldest
            and not (waits and room < count)
        ):
            self._observe_room(tier, count, room)
        if room < count and tier < state.coldest:
            self._back_up(tier, count - room)
            room = self._transfers.evictor.make_room(
                tier, count, size_class, clean_only=self._is_copying_down(tier), ahead=ahead
            )
        return room

    def _clean_target(self, tier: int, slots: int) -> int:
        """How many of the `slots` of a tier are to be free or backed up."""
        least = self._rules[tier + 1].policy.clean_target(slots, stores_wait=self._transfers.settings.stores_wait)
        return max(least, int(self._reserves[tier]))

    def _observe_room(self, tier: int, wanted: int, found: int) -> None:
        """Adapt the reserve of `tier` to a request for `wanted` slots, of which `found` were free or backed up.

        The reserve grows by half of the lacking slots, and shrinks by one for `_FORGET` chunks that found a clean slot.
        Few chunks then find none, if the tier is large enough for its bursts and writes keep up. At least one slot is
        not reserved.
        """
        if found >= wanted:
            self._reserves[tier] = max(0.0, self._reserves[tier] - wanted / _FORGET)
        else:
            slots = self._state.total_room(tier)
            grown = max(self._clean_target(tier, slots), self._reserves[tier]) + (wanted - found) / 2
            self._reserves[tier] = max(0.0, min(slots - 1, grown))

    def _may_get_room(self, tier: int) -> bool:
        """Whether backups from `tier` are in flight, or slots are being filled that may be backed up when ready."""
        return self._is_copying_down(tier) or (tier < self._state.coldest and bool(self._state.pools[tier].writer))

    def _is_copying_down(self, tier: int) -> bool:
        """Whether backups that may clean chunks of `tier` are in flight, to any colder tier."""
        return any(self._transfers.writing[below] for below in range(tier + 1, self._state.coldest + 1))
