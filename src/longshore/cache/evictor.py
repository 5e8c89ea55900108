"""Eviction: which copies are removed from a tier that needs room. Its policy names victims, which are checked here.

    policy.next_victims(n)  ──► victims, coldest first ──► can_evict? ─► yes: removed; its parent may be the next victim
                                                        └─────► no: held by the policy until its state changes

A held copy is not examined again until its state may have changed (`CacheState.recheck_evictable`), so the cost of an
eviction does not grow with the number of copies that cannot be evicted.

Victims are examined in batches, as arrays, with the same result and order as one by one:

    safe     a colder tier has a copy: no data is lost, and no descendant needs this copy
    spared   only a warmer tier has another copy, it is being read or copied down, or retained for a prefetch
    sole     the only copy: in the last tier, or if it is not to be copied down, it may go once no descendant is left

A batch ends before a sole copy that may be evicted. All safe copies before it are evicted at once, and all others held.
Slabs, and dirty copies that need not be spared, are examined one by one.

Priorities. Chunks of a higher priority are not evicted while ones of a lower priority are dirty, or are being copied
down: these are evicted first, when their copies have ended or without a copy.

Slabs. A tier with several image sizes moves a slab (`slab_pool`) from one size to another:

    needed: slots of A      a slab of B     if it was last used before any slab of A: its copies are evicted together
                            copies of A     otherwise, in policy order
                            a slab of B     of any age, if no copy of A can be evicted
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping, Sequence
from itertools import compress, islice

import numpy as np
import numpy.typing as npt

from longshore.boundary import Key
from longshore.cache.columns import as_i32, count_leading, i32_view, u8_view
from longshore.cache.events import EVICTED
from longshore.cache.eviction_policies import EvictionPolicy
from longshore.cache.nodes import ORPHANS, ROOT
from longshore.cache.pool import DRAINING, READY
from longshore.cache.settings import HIGHEST_PRIORITY
from longshore.cache.slab_pool import SlabPool
from longshore.cache.state import CacheState
from longshore.cache.types import DropReason
from longshore.errors import CapacityError, IntegrityError

Mask = npt.NDArray[np.bool_]

_AHEAD_SHARE, _MOST_AHEAD = 256, 64
"""Evict 1/`_AHEAD_SHARE` of the tier more than asked, at most `_MOST_AHEAD` chunks, to amortise the cost of a call."""

_ROUNDS = 4
"""Upper bound of rounds per chunk of a tier: each round evicts or holds a chunk, and may release others."""

_AT_FIRST, _AT_LEAST = 2048, 32
"""Size of the first batch of victims; smallest size of later ones, which are twice what the batch before processed."""

_MOST_HELD = 32_768
"""A call ends when it holds so many copies of the coldest of several tiers; the next step continues."""

_SLABS_EXAMINED = 8
"""Slabs of other sizes that are examined for one that can be reclaimed, least recently used first."""

_EVICTED_WITH_SLAB = 64
"""Copies outside a slab that may be evicted with it."""


class Evictor:
    """Makes room in the tiers of one `CacheState`."""

    def __init__(self, state: CacheState) -> None:
        self._state = state
        self._passed_over: list[list[dict[int, OrderedDict[Key, None]]]] = []
        """Keys of chunks that an eviction passed over, dirty or being copied down, by tier, size class and priority,
        coldest first; some were cleaned, used, or removed since, or have another priority."""
        self.clear()

    def clear(self) -> None:
        """The cache was cleared: remove the chunks that were passed over."""
        self._passed_over = [[{} for _ in pool.slabs.images] for pool in self._state.pools]

    # ------------------------------------------------------------------ room

    def make_room(self, tier: int, count: int, size_class: int, *, clean_only: bool, ahead: bool = True) -> int:
        """Evict until `tier` has `count` free slots of `size_class` or nothing can be evicted; returns how many it has.

        With `ahead`, a few more are freed than asked for.
        """
        slots = self._state.pools[tier]
        missing = count - slots.room(size_class)
        if missing <= 0:
            return count
        if isinstance(slots, SlabPool):
            self._reclaim_slabs(tier, slots, {size_class: count}, clean_only=clean_only)
        else:
            missing += min(_MOST_AHEAD, slots.capacity // _AHEAD_SHARE) if ahead else 0
            self.evict(tier, missing, clean_only=clean_only)
        return min(count, slots.room(size_class))

    def room_for(self, tier: int, nodes: Sequence[int], *, clean_only: bool) -> int:
        """Make room for copies of `nodes`, of any size classes, in `tier`; returns for how many leading ones."""
        slots = self._state.pools[tier]
        if not isinstance(slots, SlabPool):
            return self.make_room(tier, len(nodes), 0, clean_only=clean_only)
        size_classes = [self._state.index.size_class_of(node) for node in nodes]
        self._reclaim_slabs(tier, slots, Counter(size_classes), clean_only=clean_only)
        return slots.leading(size_classes)

    def discard(self, keys: Sequence[Key], tier: int) -> int:
        """Remove copies of `keys` that are not leased, read or needed by descendants; returns how many."""
        count, nodes = 0, [self._state.index.get(key) for key in keys]
        for node in reversed(nodes):
            if node and self._state.index.is_ready(node, tier) and self.can_evict(node, tier):
                self._state.remove_copy(node, tier, cause="discarded")
                count += 1
        return count

    def resize(self, tier: int, slots: int, *, discard: bool) -> None:
        """Resize `tier` to `slots` slots; with `discard`, chunks in slots above are removed.

        Raises `CapacityError`, with nothing changed, if a chunk in a slot above cannot be removed.
        """
        pool, index = self._state.pools[tier], self._state.index
        first = max(0, slots) * pool.slabs.stride
        removed = [node for node in pool.node[first:] if node] if discard else []
        going = set(removed)
        if not all(self.can_evict(node, tier, going) for node in removed):
            what = f"the {len(removed)} chunks from slot {slots} on: some are in use"
            raise CapacityError(f"{pool.where}cannot remove {what}")
        if slots < 0 or DRAINING in pool.state[first:]:
            pool.resize(slots)  # raises the error
        for node in sorted(removed, key=lambda node: -index.depth[node]):
            self._state.remove_copy(node, tier, cause="discarded")
        pool.resize(slots)
        index.resize()
        self._state.grow()
        self._state.changes += 1
        for each, policy in enumerate(self._state.policies):
            policy.resize(self._state.ranked_slots(each), index.key)

    # ------------------------------------------------------------------ in policy order

    def evict(self, tier: int, count: int, size_class: int = 0, *, clean_only: bool) -> int:
        """Evict at most `count` copies of `size_class` from `tier`, in policy order; returns how many.

        With `clean_only`, copies that are to be copied down first are not evicted. Chunks that the policy ranks and
        only warmer tiers have are rejected then, and count: no copy of them needs room.
        """
        policy, gone = self._state.policy_of(tier, size_class), 0
        rounds = _ROUNDS * len(policy) + _AT_LEAST
        ahead, done = list[int](), 0  # victims named and not yet processed; how many the last round processed
        held, most_held = 0, _MOST_HELD if clean_only and 0 < tier == self._state.coldest else math.inf
        while gone < count:
            if held > most_held:
                self._state.changes += 1  # so that backups are ordered again
                break
            left = count - gone
            ahead = ahead or policy.next_victims(min(max(left + min(left, _AT_LEAST), 2 * done), _AT_FIRST))
            priority = self._state.priorities.of(ahead[0]) if ahead else HIGHEST_PRIORITY
            if not clean_only and (some := self._evict_passed_over(tier, left, size_class, priority)):
                gone, ahead = gone + some, []
                continue
            if not ahead or (clean_only and self._is_lower_waiting(tier, size_class, priority)):
                break
            rounds -= 1
            if rounds < 0:
                raise IntegrityError(f"{self._state.pools[tier].where}the policy names the same victims repeatedly")
            free, kept, ahead, unclear = self._evict_batch(ahead, tier, size_class, left, clean_only=clean_only)
            gone, held, done = gone + free, held + kept, free + kept
            if unclear:
                gone += self._evict_few(tier, min(unclear, left, _AT_LEAST), size_class, clean_only=clean_only)
        return gone

    def can_evict(self, node: int, tier: int, going: Collection[int] = ()) -> bool:
        """Whether no transfer reads the copy of `node` in `tier`, no lease references it, and no descendant needs it.

        `going` are nodes whose copies in the same tier are evicted first.
        """
        state, index = self._state, self._state.index
        if not index.is_ready(node, tier) or state.pools[tier].readers[index.slot[tier][node]]:
            return False
        if self._is_retained_in_host(node, tier):
            return False
        other = index.other_coldest_tier(node, tier)
        last = other < 0 or not any(index.is_ready(node, t) for t in index.tiers if t != tier)
        if last and (other >= 0 or state.is_referenced(node)):
            return False
        if other >= tier or not index.num_children[other + 1][node]:
            return True
        return bool(going) and all(
            index.other_coldest_tier(child, tier) <= other and (child in going or index.slot[tier][child] < 0)
            for child in index.children(node)
        )

    def _is_retained_in_host(self, node: int, tier: int) -> bool:
        return tier == 0 and (bool(self._state.protected[node]) or node in self._state.retained_in_host)

    def _evict_few(self, tier: int, count: int, size_class: int, *, clean_only: bool) -> int:
        """Evict at most `count` of the next victims, one by one; returns how many."""
        policy, gone = self._state.policy_of(tier, size_class), 0
        for _ in range(count):
            node = policy.victim()
            if not node:
                break
            if self.can_evict(node, tier) and not self._pass_over(node, tier, size_class, clean_only=clean_only):
                self._evict_one(node, tier)
                gone += 1
            else:
                policy.hold(node)
                if self._state.priorities.used and self._is_being_copied_down(node, tier):
                    self._remember((node,), tier, size_class)
                if clean_only and self._state.coldest_ranks_all and tier == self._state.coldest:
                    _, rejected, freed = self._reject((node,), 1)
                    policy.release(freed)
                    gone += rejected
        return gone

    def _evict_one(self, node: int, tier: int) -> None:
        self._state.remove_copy(node, tier, cause=EVICTED)
        self._state.counters.evictions[self._state.tiers[tier].name] += 1

    # ------------------------------------------------------------------ what the coldest tier ranks, and does not have

    def _reject(self, nodes: Sequence[int], most: int) -> tuple[int, int, list[int]]:
        """Reject copies of at most `most` of `nodes`, the next victims of all tiers, that only warmer tiers have.

        They need no copy, and are evicted where they are. A chunk with a child that is copied down needs one. A held
        parent is rejected, too, if it is the next victim then. Ends where it may be that, and is not rejected. Returns
        how many leading ones are to be held, how many were rejected, and the parent to release then, if any.
        """
        state, policy, rejected = self._state, self._state.policies[self._state.coldest], list[int]()
        parent, waits = state.index.parent, state.backlog.waits_for_use
        needed = Counter(parent[child] for child in state.index.all_children(nodes).tolist() if not waits(child))
        freed, seen, may = list[int](), set[int](), self._may_be_rejected(as_i32(nodes)).tolist()
        for position, node in enumerate(nodes):
            seen.add(node)
            here = node if may[position] and not needed[node] else ROOT
            while here and not freed:
                rejected.append(here)
                child, ancestor, here = here, parent[here], ROOT
                needed[ancestor] -= 1
                if ancestor not in seen:
                    if not policy.is_held(ancestor):
                        break
                    seen.add(ancestor)
                    needed[ancestor] += sum(not waits(child) for child in state.index.children(ancestor))
                may_follow = len(rejected) < most and not needed[ancestor] and policy.victims_after(child, (ancestor,))
                if may_follow and self._may_be_rejected(as_i32((ancestor,)))[0]:
                    here = ancestor
                else:
                    freed.append(ancestor)
            if freed or len(rejected) == most:
                break
        state.reject(rejected)
        state.counters.drops[state.tier_names[state.coldest]][DropReason.ADMISSION] += len(rejected)
        return position + 1, len(rejected), freed

    def _may_be_rejected(self, nodes: npt.NDArray[np.int32]) -> Mask:
        """Which of `nodes` are dirty, and neither a transfer, a lease nor a lookup of this step needs them."""
        state = self._state
        may: Mask = u8_view(state.protected)[nodes] == 0
        tiers = state.backlog.dirty_in(nodes)
        may &= tiers >= 0
        for tier in range(state.coldest):
            if np.count_nonzero(here := tiers == tier):
                may[here] &= self._idle(nodes[here], tier)
        return self._unreferenced(may, nodes)

    def _remember(self, nodes: Sequence[int], tier: int, size_class: int) -> None:
        """Record chunks of one priority that were passed over."""
        if not nodes:
            return
        priority, index = self._state.priorities.of(nodes[0]), self._state.index
        queue = self._passed_over[tier][size_class].setdefault(priority, OrderedDict())
        if len(queue) > 2 * len(self._state.policies[tier]) + 64:
            held = self._state.policy_of(tier, size_class).are_held(index.key.find_all(list(queue))).tolist()
            kept = [k for k in compress(queue, held) if self._is_waiting(index.get(k), tier, size_class, priority)]
            queue = self._passed_over[tier][size_class][priority] = OrderedDict.fromkeys(kept)
        for key in index.key[as_i32(nodes)].tolist():
            queue[key] = None
            queue.move_to_end(key)

    def _is_lower_waiting(self, tier: int, size_class: int, priority: int) -> bool:
        """Whether a chunk of a priority below `priority` was passed over, and may be evicted after a copy."""
        for lower, queue in self._passed_over[tier][size_class].items():
            while lower < priority and queue:
                if self._is_waiting(self._state.index.get(next(iter(queue))), tier, size_class, lower):
                    return True
                queue.popitem(last=False)
        return False

    def _is_waiting(self, node: int, tier: int, size_class: int, priority: int) -> bool:
        """Whether `node`, which was passed over when it had `priority`, still is dirty or being copied down.

        A chunk that was removed is node 0.
        """
        if not node or self._state.priorities.of(node) != priority:
            return False
        if self._is_passed_over(node, tier, size_class):
            return True
        return self._is_being_copied_down(node, tier) and self._state.policy_of(tier, size_class).is_held(node)

    def _is_being_copied_down(self, node: int, tier: int) -> bool:
        index = self._state.index
        colder = [each for each in index.tiers[tier + 1 :] if index.slot[each][node] >= 0]
        return bool(colder) and not any(index.is_ready(node, each) for each in colder)

    def _evict_passed_over(self, tier: int, count: int, size_class: int, priority: int) -> int:
        """Evict dirty chunks that were passed over, up to `priority`: before all victims of it that the policy names.

        Returns how many.
        """
        gone, queues = 0, self._passed_over[tier][size_class]
        for each in sorted(lower for lower in queues if lower <= priority):
            queue, waiting = queues[each], list[Key]()
            while gone < count and queue:
                key, _ = queue.popitem(last=False)
                node = self._state.index.get(key)
                if node and (now := self._state.priorities.of(node)) != each:
                    if self._is_waiting(node, tier, size_class, now):
                        queues.setdefault(now, OrderedDict()).setdefault(key)
                    continue
                # A chunk that is back in a warmer tier is spared: its children there may be copied down soon.
                may = bool(node) and self._is_passed_over(node, tier, size_class) and not self._is_warmer(node, tier)
                if may and self.can_evict(node, tier):
                    self._evict_one(node, tier)
                    gone += 1
                elif self._state.priorities.used and self._is_waiting(node, tier, size_class, each):
                    waiting.append(key)
            for key in reversed(waiting):
                queue[key] = None
                queue.move_to_end(key, last=False)
        return gone

    def is_spared(self, node: int, tier: int, *, clean_only: bool) -> bool:
        """Whether to keep a copy without a backup: with `clean_only`, or if a warmer tier would write it again."""
        return self._is_warmer(node, tier) or (clean_only and self._state.backlog.is_dirty(node, tier))

    def _is_warmer(self, node: int, tier: int) -> bool:
        return 0 <= self._state.index.other_coldest_tier(node, tier) < tier

    def _pass_over(self, node: int, tier: int, size_class: int, *, clean_only: bool) -> bool:
        """Whether `node` is spared; records it if it is dirty."""
        if not self.is_spared(node, tier, clean_only=clean_only):
            return False
        if not self._is_warmer(node, tier):
            self._remember((node,), tier, size_class)
        return True

    def _is_passed_over(self, node: int, tier: int, size_class: int) -> bool:
        return self._state.backlog.is_dirty(node, tier) and self._state.policy_of(tier, size_class).is_held(node)

    # ------------------------------------------------------------------ in batches

    def _evict_batch(
        self, nodes: list[int], tier: int, size_class: int, most: int, *, clean_only: bool
    ) -> tuple[int, int, list[int], int]:
        """Evict or reject at most `most` of the victims `nodes`, and hold those between them: the leading ones up to
        sole copies that may be evicted; or these.

        Returns how many were evicted, how many were held, the others if they still are the next victims, and how many
        leading ones must be examined one by one.
        """
        state, policy, ids = self._state, self._state.policy_of(tier, size_class), as_i32(nodes)
        (safe, sole), clean = self._classify(ids, tier), state.backlog.are_clean(ids)
        if run := count_leading(~sole | ~clean if clean_only else ~sole):
            if state.coldest_ranks_all and tier == state.coldest:
                run, rejected, freed = self._reject(nodes[:run], most) if clean_only else (run, 0, [])
                policy.hold_victims(nodes[:run])
                policy.release(freed)
                return rejected, max(0, run - rejected), [] if freed else nodes[run:], 0
            going = safe[:run].nonzero()[0][:most]
            if len(going) == most:
                run = int(going[-1]) + 1
            if len(going) < run:
                policy.hold_victims(nodes[:run])
                passed_over = sole[:run]
                if state.priorities.used:
                    passed_over |= [self._is_being_copied_down(node, tier) for node in nodes[:run]] & ~safe[:run]
                self._remember(ids[:run][passed_over].tolist(), tier, size_class)
            if len(going):
                self._drop_copies(ids[going], tier)
            return len(going), run - len(going), nodes[run:], 0
        if not (alone := count_leading(sole & clean)):
            return 0, 0, [], count_leading(~safe)
        leaves, kept = self._leaves(nodes[:alone], ids[:alone], tier, policy, most)
        if not leaves:
            policy.hold_victims(nodes[:kept])
            return 0, kept, nodes[kept:], 0
        self._drop_leaves(leaves, tier)
        return len(leaves), 0, [], 0

    def _classify(self, nodes: npt.NDArray[np.int32], tier: int) -> tuple[Mask, Mask]:
        """Which of `nodes` are safe, and which have their only copy in `tier`; bool, of the same shape."""
        state, index = self._state, self._state.index
        ready, colder, others = (np.zeros(len(nodes), bool) for _ in range(3))
        for other in index.tiers:
            if other != tier:
                slots = i32_view(index.slot[other])[nodes]
                there = slots >= 0
                others |= there
                ready[there] |= u8_view(state.pools[other].state)[slots[there]] == READY
                if other > tier:
                    colder |= there
        if not np.count_nonzero(colder):
            return colder, ~others
        return self._idle(nodes, tier) & colder & ready, ~others

    def _idle(self, nodes: npt.NDArray[np.int32], tier: int) -> Mask:
        """Which copies are not being read, nor kept in the host tier by a prefetch or a lookup of this step."""
        state = self._state
        idle: Mask = i32_view(state.pools[tier].readers)[i32_view(state.index.slot[tier])[nodes]] == 0
        if not tier:
            idle &= u8_view(state.protected)[nodes] == 0
            if state.retained_in_host:
                idle &= [node not in state.retained_in_host for node in nodes.tolist()]
        return idle

    def _leaves(
        self, nodes: Sequence[int], ids: npt.NDArray[np.int32], tier: int, policy: EvictionPolicy, most: int
    ) -> tuple[list[int], int]:
        """The leading sole copies to evict, with the nodes that become evictable by that; or how many leading ones
        cannot be.

        A node can be evicted if it has no child, or only the victim before it.
        """
        index = self._state.index
        parents, num_children = i32_view(index.parent)[ids], i32_view(index.num_children[0])[ids]
        has_child_before = np.zeros(len(ids), bool)
        np.equal(parents[:-1], ids[1:], out=has_child_before[1:])
        idle = self._evictable_sole(ids, tier)
        free = count_leading(idle & (num_children <= has_child_before))
        if not free:
            return [], count_leading(~idle | (num_children > 0))
        tops = parents[:free] > ORPHANS
        tops[:-1] &= ~has_child_before[1:free]
        return self._with_freed(nodes[:free], tops.nonzero()[0].tolist(), tier, policy, most), 0

    def _with_freed(
        self, nodes: Sequence[int], tops: Sequence[int], tier: int, policy: EvictionPolicy, most: int
    ) -> list[int]:
        """At most `most` of the victims `nodes`, and behind each of `tops` the held ancestors that become evictable.

        Ends where a node becomes evictable whose place in the order is unknown; one that is dirty may go next.
        """
        parent, reach, is_held = self._state.index.parent, self._state.index.num_children[0], policy.is_held
        going: list[int] = []
        left: dict[int, int] = {}
        """The number of children left, of nodes that lose some."""
        begin = 0
        for top in tops:
            ancestor = parent[nodes[top]]
            left[ancestor] = left.get(ancestor, reach[ancestor]) - 1
            if left[ancestor] or not is_held(ancestor):
                continue
            going += nodes[begin : top + 1]
            begin = top + 1
            chain = self._held_chain(ancestor, tier, policy, left, most - len(going))
            follow = policy.victims_after(nodes[top], chain)
            going += chain[:follow]
            if len(going) >= most or follow < len(chain) or tier < self._state.coldest:
                return going[:most]
        return [*going, *nodes[begin:]][:most]

    def _drop_copies(self, ids: npt.NDArray[np.int32], tier: int) -> None:
        """Evict safe copies, of which a colder tier keeps another."""
        state, index, nodes = self._state, self._state.index, ids.tolist()
        slots = i32_view(index.slot[tier])[ids]
        self._log(nodes, tier)
        state.observe_ages(tier, slots)
        state.counters.demotions[state.tier_names[tier]] += len(nodes)
        state.counters.evictions[state.tier_names[tier]] += len(nodes)
        state.policies[tier].remove_victims(nodes, index.key[ids].tolist())
        index.drop_copies(ids, tier)
        state.pools[tier].free_all(slots)
        state.recheck_evictable(ids, apart_from=tier)

    def _drop_leaves(self, nodes: Sequence[int], tier: int) -> None:
        """Evict sole copies, which are clean."""
        state, index, policy = self._state, self._state.index, self._state.policies[tier]
        ids = as_i32(nodes)
        keys, slots = index.key[ids].tolist(), i32_view(index.slot[tier])[ids]
        self._log(nodes, tier)
        state.observe_ages(tier, slots)
        state.counters.evictions[state.tier_names[tier]] += len(nodes)
        policy.remove_victims(nodes, keys)
        if state.coldest_ranks_all and tier < state.coldest:
            state.policies[state.coldest].hold_all(nodes)
            state.policies[state.coldest].remove_victims(nodes, keys)
        parents = index.drop_leaves(ids, tier)
        state.pools[tier].free_all(slots)
        state.backlog.forget_all(nodes)
        state.forget(nodes)
        freed = [parent for parent in parents if parent > ORPHANS and not index.num_children[0][parent]]
        for parent in freed:
            if index.is_ready(parent, tier) and policy.is_held(parent):
                policy.release(self._held_chain(parent, tier, policy, {}, len(policy))[::-1])
        if state.coldest and freed:
            state.recheck_evictable(as_i32(freed), apart_from=tier if tier == state.coldest else -1)

    def _held_chain(self, node: int, tier: int, policy: EvictionPolicy, left: dict[int, int], most: int) -> list[int]:
        """The held `node`, which has no children left, and the ancestors that can be evicted right after it; at most
        `most`.

        `left` is the number of children that nodes will have left, of those that lose some; it is updated.
        """
        parent, reach, is_held = self._state.index.parent, self._state.index.num_children[0], policy.is_held
        # The copy cannot be evicted if, for instance, a warmer tier has the whole path.
        if most < 1 or not self._evictable_sole(as_i32((node,)), tier)[0]:
            return []
        chain: list[int] = []
        while node > ORPHANS and len(chain) < most and is_held(node):
            chain.append(node)
            node = parent[node]
            if left.get(node, reach[node]) > 1:
                break
        del chain[count_leading(self._evictable_sole(as_i32(chain), tier)) :]
        ancestor = parent[chain[-1]]
        left[ancestor] = left.get(ancestor, reach[ancestor]) - 1
        return chain

    def _evictable_sole(self, nodes: npt.NDArray[np.int32], tier: int) -> Mask:
        """Which ready copies of `nodes` in `tier` have no other copy, reader, lease or lookup of this step, and
        are not to be copied down."""
        state, index = self._state, self._state.index
        free = self._idle(nodes, tier)
        if tier:
            free &= u8_view(state.protected)[nodes] == 0
        if tier < state.coldest:
            free &= state.backlog.are_clean(nodes)
        for other in index.tiers:
            if other != tier:
                free &= i32_view(index.slot[other])[nodes] < 0
        return self._unreferenced(free, nodes)

    def _unreferenced(self, free: Mask, nodes: npt.NDArray[np.int32]) -> Mask:
        """`free` for those of `nodes` that no lease references."""
        if refs := self._state.refs:
            free &= [node not in refs for node in nodes.tolist()]
        return free

    def _log(self, nodes: Sequence[int], tier: int) -> None:
        if self._state.log.on:
            for node in nodes:
                self._state.log.lost(self._state.index, self._state.tier_names, node, tier, EVICTED)

    # ------------------------------------------------------------------ slabs

    def _reclaim_slabs(self, tier: int, slots: SlabPool, wanted: Mapping[int, int], *, clean_only: bool) -> None:
        """Evict until `tier` has free slots as `wanted`, by size class, or nothing can be evicted."""
        for _ in range(sum(wanted.values())):  # a slab reclaimed for one size may be missing for another
            size_class, missing = slots.shortage(wanted)
            if not missing:
                break
            if self._reclaim_one(tier, slots, size_class, slots.last_use(size_class), clean_only=clean_only):
                continue
            several = min(missing, slots.slabs.images[size_class])
            if self.evict(tier, several, size_class, clean_only=clean_only):
                continue
            if not self._reclaim_one(tier, slots, size_class, math.inf, clean_only=clean_only):
                break

    def _reclaim_one(self, tier: int, slots: SlabPool, size_class: int, before: float, *, clean_only: bool) -> bool:
        """Reclaim a slab of another size that was last used before `before`; returns whether there was one."""
        state = self._state
        going: list[int] = []
        for slab, used in islice(slots.slabs_of_others(size_class), _SLABS_EXAMINED):
            if used >= before or (going := self._slab_victims(tier, slots, slab, clean_only=clean_only)):
                break
        for node in sorted(going, key=lambda node: -state.index.depth[node]):
            state.remove_copy(node, tier, cause=EVICTED)
        state.counters.evictions[state.tier_names[tier]] += len(going)
        return bool(going)

    def _slab_victims(self, tier: int, slots: SlabPool, slab: int, *, clean_only: bool) -> list[int]:
        """All nodes to evict to empty `slab`; none if it cannot be emptied."""
        index = self._state.index
        inside = slots.contents(slab)
        if any(slots.state[slot] != READY for slot in inside):
            return []
        going = dict.fromkeys(slots.node[slot] for slot in inside)
        queue = list(going)
        for node in queue:
            if index.other_coldest_tier(node, tier) >= tier:
                continue
            below = [child for child in index.children(node) if child not in going and index.slot[tier][child] >= 0]
            going.update(dict.fromkeys(below))
            queue += below
            if len(going) > len(inside) + _EVICTED_WITH_SLAB:
                return []
        if all(
            self.can_evict(node, tier, going) and not self.is_spared(node, tier, clean_only=clean_only)
            for node in going
        ):
            return list(going)
        return []
