"""Adaptive replacement: recency and frequency, weighted by recent misses.

    once ──► hits ──► often         resident: seen once, or more often; both in order of use
      │                 │
      ▼ evicted         ▼ evicted
    ghosts of once    ghosts of often       keys only, of as many chunks again each

A chunk that comes back while its ghost is in `once` says that list is too short, and `target` (the slots that are meant
for it) grows; a ghost of `often` makes it shrink. After N. Megiddo and D. Modha, "ARC: a self-tuning, low overhead
replacement cache" (FAST 2003), with two differences: each list has ghosts for all slots, which hits more often on
prefix traces; and what the cache will not part with is held, and passed over.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from longshore.boundary import Key
from longshore.cache.columns import (
    I32,
    LISTS,
    LinkedLists,
    as_i32,
    as_list,
    check_in,
    check_new,
    filled,
    not_in_policy,
    resized,
    u8_view,
    unique,
)
from longshore.cache.eviction_policies.base import EvictionPolicy, NodeKeys
from longshore.cache.eviction_policies.ghosts import Ghosts
from longshore.errors import CacheError

_OUT, _ONCE, _OFTEN = range(3)
_HELD = 4


class ARC(EvictionPolicy):
    """Evicts the oldest chunk of the list that is above its target: chunks used once, or used more often.

    Every operation is O(1); 9 bytes per node, and about 170 for each ghost, of which there are at most two per slot.
    """

    def __init__(self, slots: int, keys: NodeKeys) -> None:
        super().__init__(slots, keys)
        self.target = 0.0
        """Slots intended for chunks used once."""
        self._linked = LinkedLists()
        self._place = filled(LISTS, dtype=np.uint8)
        self._counts = [0, 0, 0]
        self._ghosts = Ghosts(slots)

    def resize(self, slots: int, keys: NodeKeys) -> None:
        """Resize to `slots` slots, and clear the ghost lists."""
        super().resize(slots, keys)
        self.target = min(self.target, float(slots))
        self._ghosts = Ghosts(slots)

    def grow(self, nodes: int) -> None:
        """Make room for node numbers below `nodes`."""
        self._linked.grow(nodes)
        self._place = resized(self._place, max(nodes, len(self._place)))

    def insert(self, nodes: Sequence[int], *, leaf: bool = False, continues: bool = False) -> None:
        """Insert `nodes`; those in a ghost list count as used often."""
        check_new(self._place, nodes)
        if len(nodes) == 1:  # five times faster than by whole arrays
            self._insert_one(nodes[0])
            return
        at = np.array(nodes, np.int32)
        back = self._ghosts.among(self.keys[at].tolist())
        u8_view(self._place)[at] = np.where(back, _OFTEN, _ONCE)
        for key in self.keys[at[back]].tolist():
            self._learn(self._ghosts.take(key))
        for which, ours in ((_ONCE, at[~back]), (_OFTEN, at[back])):
            self._linked.extend(which, ours)
            self._counts[which] += len(ours)

    def touch(self, nodes: Sequence[int] | I32) -> None:
        """Record uses of `nodes`, which count as used often now. Adjacent nodes of one list move together."""
        nodes = as_list(nodes)
        place, after, before = self._place, self._linked.after, self._linked.before
        at, count = 0, len(nodes)
        while at < count:
            begin, first = at, nodes[at]
            last, was = first, place[first]
            at += 1
            if was == _OUT:
                raise not_in_policy(first)
            if was < _HELD:
                while at < count and after[last] == nodes[at]:
                    last = nodes[at]
                    at += 1
                behind, ahead = before[first], after[last]
                after[behind] = ahead
                before[ahead] = behind
            if was != _OFTEN:
                for node in nodes[begin:at]:
                    place[node] = _OFTEN
                self._counts[was & ~_HELD] -= at - begin
                self._counts[_OFTEN] += at - begin
            hottest = before[_OFTEN]
            after[hottest] = first
            before[first] = hottest
            after[last] = _OFTEN
            before[_OFTEN] = last

    def hold(self, node: int) -> None:
        """Hold `node`: it cannot be evicted until it is released."""
        at = self._place[node]
        if at == _OUT:
            raise not_in_policy(node)
        if at < _HELD:
            self._linked.remove(node)
            self._place[node] = at | _HELD

    def release(self, nodes: Sequence[int]) -> None:
        """Release those of `nodes` that are held, each to the cold end of its list."""
        if len(nodes) == 1:  # as in `insert`
            self._release_one(nodes[0])
            return
        check_in(self._place, nodes)
        at, place = np.array(nodes, np.int32), u8_view(self._place)
        for which in (_ONCE, _OFTEN):
            held = unique(at[place[at] == which | _HELD])
            place[held] = which
            self._linked.prepend_all(which, held)

    def remove(self, node: int, *, evicted: Key | None = None) -> None:
        """Remove `node`; its key enters a ghost list if it was evicted."""
        at = self._place[node]
        if at == _OUT:
            raise not_in_policy(node)
        if at < _HELD:
            after, before = self._linked.after, self._linked.before
            behind, ahead = before[node], after[node]
            after[behind] = ahead
            before[ahead] = behind
        which = at & ~_HELD
        self._place[node] = _OUT
        self._counts[which] -= 1
        if evicted is not None:
            self._ghosts.add(evicted, which)

    def remove_victims(self, nodes: Sequence[int], keys: Sequence[Key]) -> None:
        """Remove the first nodes of one list, and held ones among them; their keys enter a ghost list."""
        check_in(self._place, nodes)
        which, at, place = self._place[nodes[0]] & ~_HELD, unique(as_i32(nodes)), u8_view(self._place)
        if len(first := at[place[at] == which]):
            self._linked.drop_first(which, int(first[-1]))
        place[at] = _OUT
        self._counts[which] -= len(at)
        self._ghosts.add_all(keys if len(at) == len(keys) else list(dict.fromkeys(keys)), which)

    def hold_victims(self, nodes: Sequence[int]) -> None:
        """Hold the first nodes of one list."""
        which, at = self._place[nodes[0]], unique(as_i32(nodes))
        self._linked.drop_first(which, int(at[-1]))
        u8_view(self._place)[at] = which | _HELD

    def next_victims(self, count: int) -> list[int]:
        """The oldest nodes of the list above its target, as far as it is; otherwise of the other list."""
        surplus = math.ceil(self._counts[_ONCE] - self.target)
        first, most = (_ONCE, min(count, surplus)) if surplus > 0 else (_OFTEN, count)
        return self._linked.first_few(first, most) or self._linked.first_few(_ONCE + _OFTEN - first, count)

    def victim(self) -> int:
        """The oldest node of the list above its target, otherwise of the other list; 0 if there is none."""
        after = self._linked.after
        first = _ONCE if self._counts[_ONCE] > self.target else _OFTEN
        node = after[first]
        if node != first:
            return node
        other = _ONCE + _OFTEN - first
        node = after[other]
        return 0 if node == other else node

    def order(self) -> Iterator[int]:
        """Nodes used once, then those used often, each oldest first."""
        yield from self._linked.walk(_ONCE)
        yield from self._linked.walk(_OFTEN)

    def is_held(self, node: int) -> bool:
        """Whether `node` is in the policy, and held."""
        return self._place[node] >= _HELD

    def are_held(self, at: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        """Which of the nodes `at` are in the policy, and held."""
        held: npt.NDArray[np.bool_] = u8_view(self._place).take(at) >= _HELD
        return held

    def __contains__(self, node: object) -> bool:
        return isinstance(node, int) and node < len(self._place) and self._place[node] != _OUT

    def resident(self, nodes: int) -> npt.NDArray[np.bool_]:
        """For each node below `nodes`, whether it is in the policy, held or not."""
        there: npt.NDArray[np.bool_] = u8_view(self._place)[:nodes] != _OUT
        return there

    def __len__(self) -> int:
        return self._counts[_ONCE] + self._counts[_OFTEN]

    def check_integrity(self) -> None:
        """Raise `CacheError` unless lists, marks, counts and ghost lists agree."""
        for which in (_ONCE, _OFTEN):
            self._linked.check_integrity(which)
            marked = set(np.flatnonzero(u8_view(self._place) == which).tolist())
            held = int(np.count_nonzero(u8_view(self._place) == which | _HELD))
            if set(self._linked.walk(which)) != marked or len(marked) + held != self._counts[which]:
                found = f"{len(marked)} marked and {held} held"
                raise CacheError(f"internal error: ARC: counted {self._counts[which]} nodes, found {found}")
        self._ghosts.check_integrity()
        if not 0 <= self.target <= self.slots:
            raise CacheError(f"internal error: ARC: target of {self.target} slots, expected 0 to {self.slots}")

    def _insert_one(self, node: int) -> None:
        left = self._ghosts.take(self.keys[node])
        if left:
            self._learn(left)
        which = _OFTEN if left else _ONCE
        self._place[node] = which
        self._linked.append(which, node)
        self._counts[which] += 1

    def _release_one(self, node: int) -> None:
        at = self._place[node]
        if at == _OUT:
            raise not_in_policy(node)
        if at >= _HELD:
            self._place[node] = at & ~_HELD
            self._linked.prepend(at & ~_HELD, node)

    def _learn(self, left: int) -> None:
        """A chunk evicted from list `left` was stored again: increase the target of that list."""
        _, once, often = self._ghosts.counts
        if left == _ONCE:
            self.target = min(float(self.slots), self.target + max(1.0, often / (once + 1)))
        else:
            self.target = max(0.0, self.target - max(1.0, once / (often + 1)))
