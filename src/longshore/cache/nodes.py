"""Nodes: one small integer for each key that is in a tier, or on its way into one, and its attributes.

The attributes are in arrays (29 bytes per node, and 8 for each tier), and so are the keys (`KeyTable`): a million
nodes are about twenty Python objects, which saves memory and garbage collection.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from longshore.boundary import Key
from longshore.cache.columns import (
    FEW,
    I32,
    LISTS,
    FreeList,
    KeyTable,
    as_i32,
    filled,
    follow,
    i32_view,
    resized,
    u8_view,
)
from longshore.cache.pool import READY, SlotPool
from longshore.errors import CacheError, IntegrityError

_NOBODY = 0


class NodeTree:
    """Parents and children of nodes below `size`. 16 bytes each.

        parent ─ child ─► youngest ─ older ─► ... ─ older ─► eldest      `younger` is the reverse link

    Nodes of chunks start at `LISTS`; 0 is no node, and the parent of all first nodes, 1 is `ORPHANS`.
    """

    __slots__ = ("child", "older", "parent", "younger")

    def __init__(self, size: int) -> None:
        self.parent, self.child, self.older, self.younger = (filled(size) for _ in range(4))

    def grow(self, size: int) -> None:
        """Make room for nodes below `size`."""
        self.parent, self.child = resized(self.parent, size), resized(self.child, size)
        self.older, self.younger = resized(self.older, size), resized(self.younger, size)

    def children(self, node: int) -> Iterator[int]:
        """The children of `node`, youngest first. The tree must not change during the iteration."""
        each = self.child[node]
        for _ in range(len(self.older)):
            if not each:
                return
            yield each
            each = self.older[each]
        raise IntegrityError(f"the children of node {node} form a cycle: damaged links")

    def all_children(self, nodes: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """The children of any of `nodes`, in their order; of each the youngest first."""
        child = i32_view(self.child)[nodes]
        youngest: npt.NDArray[np.int32] = child[child != _NOBODY]
        if not i32_view(self.older)[youngest].any():  # none has a sibling
            return youngest
        found, older = array("i"), self.older
        for first in youngest.tolist():
            each = first
            while each:
                found.append(each)
                each = older[each]
                if len(found) > len(older):
                    raise IntegrityError(f"the siblings of node {first} form a cycle: damaged links")
        return as_i32(found)

    def check_integrity(self, live: npt.NDArray[np.int32]) -> None:
        """Raise `CacheError` unless each of all `live` nodes is once among the children of its parent."""
        parent, older, younger = i32_view(self.parent), i32_view(self.older), i32_view(self.younger)
        is_first = younger[live] == _NOBODY
        linked = np.where(is_first, i32_view(self.child)[parent[live]], older[younger[live]])
        is_cut = (linked != live) | (~is_first & (parent[younger[live]] != parent[live]))
        for node in live[is_cut].tolist():
            raise CacheError(f"node {node} is not among the children of its parent {self.parent[node]}")
        nodes = np.concatenate([as_i32((ROOT, ORPHANS)), live])
        child = i32_view(self.child)[nodes]
        is_wrong = (child != _NOBODY) & ((parent[child] != nodes) | (younger[child] != _NOBODY))
        for node in nodes[is_wrong].tolist():
            raise CacheError(f"node {node} is not the parent of its child {self.child[node]}")
        count, each = 0, live[is_first]
        while len(each) and count <= len(live):
            count += len(each)
            each = older[each]
            each = each[each != _NOBODY]
        if count != len(live):
            raise IntegrityError(f"{count} of {len(live)} nodes are found among children: damaged links")

    def path(self, node: int, length: int) -> I32:
        """`node` and its ancestors, at most `length` nodes, tail first."""
        return follow(self.parent, node, _NOBODY, length)

    def is_line(self, nodes: npt.NDArray[np.int32]) -> bool:
        """Whether each of `nodes` is the only child of the one before it, and the last has none."""
        child = i32_view(self.child)
        following = child[nodes[:-1]]
        apart = (following != nodes[1:]) | (i32_view(self.older)[following] > 0)
        return not child[nodes[-1]] and not np.count_nonzero(apart)

    def append(self, parent: int, nodes: npt.NDArray[np.int32]) -> None:
        """Add the new `nodes` as a chain of descendants of `parent`."""
        elder, head, tail = self.child[parent], int(nodes[0]), int(nodes[-1])
        i32_view(self.parent)[nodes[1:]] = nodes[:-1]
        i32_view(self.child)[nodes[:-1]] = nodes[1:]
        i32_view(self.older)[nodes] = i32_view(self.younger)[nodes] = _NOBODY
        self.parent[head], self.child[tail], self.older[head] = parent, _NOBODY, elder
        if elder:
            self.younger[elder] = head
        self.child[parent] = head

    def link_trees(self, parents: npt.NDArray[np.integer], nodes: npt.NDArray[np.int32]) -> None:
        """Add each new node of `nodes` as a child of its node of `parents`; the first of siblings is the youngest."""
        order = np.argsort(parents, kind="stable")
        ordered, ordered_parents = nodes[order], parents[order]
        first = np.concatenate([[True], ordered_parents[1:] != ordered_parents[:-1]])
        youngest, eldest = ordered[first], ordered[np.concatenate([first[1:], [True]])]
        child, older, younger = i32_view(self.child), i32_view(self.older), i32_view(self.younger)
        i32_view(self.parent)[ordered], child[ordered] = ordered_parents, _NOBODY
        older[ordered[:-1]], younger[ordered[1:]] = ordered[1:], ordered[:-1]
        elders = child[ordered_parents[first]]
        older[eldest], younger[youngest] = elders, _NOBODY
        younger[elders[elders > 0]] = eldest[elders > 0]
        child[ordered_parents[first]] = youngest

    def siblings(
        self, nodes: npt.NDArray[np.int32], parents: npt.NDArray[np.int32]
    ) -> Iterator[tuple[int, int, int, int]]:
        """The `nodes`, children of `parents`, as runs of adjacent siblings.

        Yields (eldest, youngest, parent, count) of each run. A run may be unlinked before the next is requested.
        """
        last = np.ones(len(nodes), bool)
        np.not_equal(i32_view(self.younger)[nodes[:-1]], nodes[1:], out=last[:-1])
        ends = np.flatnonzero(last)
        begins = np.concatenate([[0], ends[:-1] + 1])
        runs = (nodes[begins], nodes[ends], parents[ends], ends - begins + 1)
        return zip(*(each.tolist() for each in runs), strict=True)

    def move(self, node: int, parent: int) -> None:
        """Move `node` and its descendants to `parent`."""
        self.unlink(node, self.parent[node])
        elder = self.child[parent]
        self.parent[node], self.older[node], self.younger[node] = parent, elder, _NOBODY
        if elder:
            self.younger[elder] = node
        self.child[parent] = node

    def unlink(self, node: int, parent: int) -> None:
        """Remove `node` from the children of `parent`."""
        self.unlink_siblings(node, node, parent)

    def unlink_siblings(self, eldest: int, youngest: int, parent: int) -> None:
        """Remove adjacent siblings, from `eldest` to `youngest`, from the children of `parent`."""
        older, younger = self.older[eldest], self.younger[youngest]
        if younger:
            self.older[younger] = older
        else:
            self.child[parent] = older
        if older:
            self.younger[older] = younger


ROOT = 0
"""The parent of every first chunk of a path; also stands for "no node"."""

ORPHANS = 1
"""The parent of every orphan, a chunk whose parent is in no tier. No path from the root leads through it."""

ROOTED, ORPHANED = 1, 2
"""Marks of loadable nodes: from the first chunk, or from an orphan, by requests that have the chunks before it."""

_FAR = -(1 << 30)
"""The depth of `ORPHANS`: orphans and their descendants have negative depths, as their positions are unknown."""

NONE = -1
"""No slot."""


class Nodes:
    """Nodes by key over the slots of `pools`, warmest tier first."""

    __slots__ = (
        "_free",
        "_others",
        "_tree",
        "child",
        "children",
        "depth",
        "find",
        "get",
        "key",
        "loadable",
        "num_children",
        "older",
        "orphans",
        "orphans_by_parent",
        "parent",
        "path",
        "pools",
        "removed",
        "size",
        "slot",
        "tiers",
        "wanted_by_orphans",
    )

    def __init__(self, pools: Sequence[SlotPool]) -> None:
        self.pools = list(pools)
        self.tiers = range(len(pools))
        self._others = [tuple(t for t in reversed(self.tiers) if t != tier) for tier in self.tiers]
        self.size = LISTS + sum(pool.capacity for pool in pools)
        """Nodes are below this number. They begin at `LISTS`, because policies number their lists below that."""
        # Allocated for all slots from the start: growing columns would have to be copied from time to time.
        self.key = KeyTable(self.size)
        self.get, self.find = self.key.get, self.key.find
        """The node of a key, and of many; `ROOT` if no tier has it. Raise `CacheError` for a key that is not bytes."""
        self._tree = NodeTree(self.size)
        self.parent, self.children, self.path = self._tree.parent, self._tree.children, self._tree.path
        self.child, self.older = self._tree.child, self._tree.older
        """The youngest child of each node, and its next older sibling; `ROOT` for none."""
        self.depth = filled(self.size)
        self.slot = [filled(self.size, NONE) for _ in pools]
        self.num_children = [filled(self.size) for _ in pools]
        self.loadable = filled(self.size, dtype=np.uint8)
        self.depth[ROOT], self.depth[ORPHANS] = -1, _FAR
        self.loadable[ROOT], self.loadable[ORPHANS] = ROOTED, ORPHANED
        self.orphans: dict[int, Key] = {}
        """The parent key of each child of `ORPHANS`."""
        self.orphans_by_parent: dict[Key, dict[int, None]] = {}
        """Orphans by parent key."""
        self.wanted_by_orphans: set[int] = set()
        """Parents of orphans whose children are in colder tiers than they: they are to be copied down."""
        self._free = FreeList(array("i", range(self.size - 1, LISTS - 1, -1)))
        self.removed = 0
        """Number of nodes removed so far: while it is unchanged, all node numbers stand for the same keys."""

    def __len__(self) -> int:
        return len(self.key)

    def __iter__(self) -> Iterator[int]:
        """All nodes, in order of their numbers."""
        return iter(self.all_nodes().tolist())

    def all_nodes(self) -> npt.NDArray[np.int32]:
        """All nodes, ascending; int32."""
        return self.key.nodes()

    def parent_keys(self, nodes: Sequence[int]) -> list[Key | None]:
        """The parent key of each of `nodes`, also if no tier has it; `None` for first chunks."""
        parents = i32_view(self.parent)[as_i32(nodes)]
        keys: list[Key | None] = self.key[parents].tolist()
        for position in np.flatnonzero(~self.key.has(parents)).tolist():  # of `ROOT` and `ORPHANS`
            keys[position] = self.orphans.get(nodes[position])
        return keys

    def coldest_tier(self, node: int) -> int:
        """The coldest tier that has a copy; -1 if none has."""
        for tier in reversed(self.tiers):
            if self.slot[tier][node] >= 0:
                return tier
        return -1

    def other_coldest_tier(self, node: int, tier: int) -> int:
        """The coldest tier except `tier` that has a copy; -1 if none has."""
        for other in self._others[tier]:
            if self.slot[other][node] >= 0:
                return other
        return -1

    def is_ready(self, node: int, tier: int) -> bool:
        """Whether `node` has a ready copy in `tier`."""
        slot = self.slot[tier][node]
        return slot >= 0 and self.pools[tier].state[slot] == READY

    def are_ready(self, nodes: npt.NDArray[np.int32], tier: int) -> npt.NDArray[np.bool_]:
        """`is_ready` for `nodes`; bool, of the same shape."""
        slots, state = i32_view(self.slot[tier]).take(nodes), u8_view(self.pools[tier].state)
        if not len(state):
            return np.zeros(len(nodes), bool)
        ready: npt.NDArray[np.bool_] = state.take(slots) == READY
        ready &= slots >= 0
        return ready

    def are_ready_in_any(self, nodes: npt.NDArray[np.int32], tiers: Sequence[int]) -> npt.NDArray[np.bool_]:
        """Whether `nodes` have a ready copy in one of `tiers`; bool, of the same shape."""
        ready = self.are_ready(nodes, tiers[0])
        for tier in tiers[1:]:
            ready |= self.are_ready(nodes, tier)
        return ready

    def size_class_of(self, node: int) -> int:
        """The size class of the slots of `node`, the same in all tiers."""
        for tier in self.tiers:
            slot = self.slot[tier][node]
            if slot >= 0:
                return self.pools[tier].size_class_of(slot)
        raise IntegrityError(f"node {node} has no slot")

    def size_classes_of(self, nodes: Sequence[int]) -> list[int]:
        """`size_class_of` for many."""
        if len(nodes) < FEW:
            return list(map(self.size_class_of, nodes))
        ids = as_i32(nodes)
        size_classes = np.full(len(ids), NONE)
        for tier in self.tiers:
            slots = i32_view(self.slot[tier])[ids]
            here = np.flatnonzero((slots >= 0) & (size_classes == NONE))
            size_classes[here] = self.pools[tier].size_classes_of(slots[here])
        if (size_classes == NONE).any():
            raise IntegrityError(f"node {nodes[int((size_classes == NONE).argmax())]} has no slot")
        found: list[int] = size_classes.tolist()
        return found

    def warmest_ready(self, node: int) -> int:
        """The warmest tier with a ready copy; -1 if there is none."""
        for tier in self.tiers:
            if self.is_ready(node, tier):
                return tier
        return -1

    def resize(self) -> None:
        """The pools were resized: make room for as many chunks. Existing nodes keep their numbers."""
        more = max(0, LISTS + sum(pool.capacity for pool in self.pools) - self.size)
        free = array("i", range(self.size + more - 1, self.size - 1, -1)) + array("i", self._free)
        self._free, self.size = FreeList(free), self.size + more
        self.key.grow(self.size)
        self._tree.grow(self.size)
        self.parent, self.child, self.older = self._tree.parent, self._tree.child, self._tree.older
        self.depth, self.loadable = resized(self.depth, self.size), resized(self.loadable, self.size)
        self.num_children = [resized(counts, self.size) for counts in self.num_children]
        self.slot = [resized(slots, self.size, NONE) for slots in self.slot]

    def _enter(
        self,
        keys: Sequence[Key] | npt.NDArray[Any],
        ids: npt.NDArray[np.int32],
        tier: int,
        slots: Sequence[int] | npt.NDArray[np.int32],
    ) -> list[int]:
        """Enter the nodes `ids` for `keys`, in `slots` of `tier`; returns the nodes as a list."""
        nodes: list[int] = ids.tolist()
        where = as_i32(slots)
        self.key.insert(ids, keys)
        i32_view(self.slot[tier])[ids] = where
        i32_view(self.pools[tier].node)[where] = ids
        return nodes

    def _numbers(self, count: int) -> npt.NDArray[np.int32]:
        """Allocate `count` nodes; int32, shape `(count,)`."""
        if len(self._free) < count:
            raise CacheError(f"the index is full: it has room for {self.size - LISTS} chunks, one for each slot")
        return as_i32(self._free.take(count))[::-1]

    def add_orphan(self, orphan: int, parent_key: Key) -> None:
        """Record that `orphan`, a child of `ORPHANS`, has the parent key `parent_key`."""
        self.orphans[orphan] = parent_key
        self.orphans_by_parent.setdefault(parent_key, {})[orphan] = None
        if parent := self.get(parent_key):
            self.wanted_by_orphans.add(parent)

    def _remove_orphan(self, orphan: int) -> None:
        parent_key = self.orphans.pop(orphan)
        del self.orphans_by_parent[parent_key][orphan]
        if not self.orphans_by_parent[parent_key]:
            del self.orphans_by_parent[parent_key]
            self.wanted_by_orphans.discard(self.get(parent_key))

    def _forget(self, node: int, parent: int) -> None:
        if parent == ORPHANS:
            self._remove_orphan(node)
        self.wanted_by_orphans.discard(node)
        self._tree.unlink(node, parent)
        self.key.remove((node,))
        self.loadable[node] = 0
        self._free.give(array("i", (node,)))
        self.removed += 1
