"""Nodes: one small number per key that some tier has, or will have, and what is known of each.

Nodes live in arrays (29 bytes each, and 8 for each tier): a million of them are some twenty objects, not a million,
which is what the garbage collector and the memory bill see. Keys find their node in 256 dictionaries, by their first
byte (keys are digests), so that none of them ever takes long to grow.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from longshore.boundary import Key
from longshore.cache.columns import LISTS, FreeList, column, marks, numbers, zeros
from longshore.cache.pool import READY, SlotPool
from longshore.errors import CacheError, IntegrityError

_NOBODY = 0


class NodeTree:
    """Parents and children of nodes below `size`. 16 bytes each.

        parent ─ child ─► youngest ─ older ─► ... ─ older ─► eldest      `younger` leads back, so that any may leave

    Node numbers start at 1; 0 is no node, and the parent of all first ones.
    """

    __slots__ = ("child", "older", "parent", "younger")

    def __init__(self, size: int) -> None:
        self.parent, self.child, self.older, self.younger = (zeros(size) for _ in range(4))

    def grow(self, more: int) -> None:
        """Make room for `more` nodes."""
        for links in (self.parent, self.child, self.older, self.younger):
            links.extend(zeros(more))

    def children(self, node: int) -> Iterator[int]:
        """The nodes right behind `node`, youngest first. The tree must not change meanwhile."""
        each = self.child[node]
        for _ in range(len(self.older)):
            if not each:
                return
            yield each
            each = self.older[each]
        raise IntegrityError(f"the children of node {node} go round without an end: damaged links")

    def all_children(self, nodes: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """The nodes right behind any of `nodes`, in their order; of each the youngest first."""
        child = column(self.child)[nodes]
        youngest: npt.NDArray[np.int32] = child[child != _NOBODY]
        if not column(self.older)[youngest].any():  # none has a sibling
            return youngest
        found, older = array("i"), self.older
        for first in youngest.tolist():
            each = first
            while each:
                found.append(each)
                each = older[each]
                if len(found) > len(older):
                    raise IntegrityError(f"the siblings of node {first} go round without an end: damaged links")
        return column(found)

    def path(self, node: int, length: int) -> list[int]:
        """`node` and its ancestors, at most `length` in all, tail first."""
        parent, found = self.parent, list[int]()
        for _ in range(length):
            if node == _NOBODY:
                break
            found.append(node)
            node = parent[node]
        return found

    def is_line(self, at: npt.NDArray[np.int32]) -> bool:
        """Whether each of the nodes `at` is the only child of the one before it, and the last has none."""
        child = column(self.child)
        following = child[at[:-1]]
        apart = (following != at[1:]) | (column(self.older)[following] > 0)
        return not child[at[-1]] and not np.count_nonzero(apart)

    def append(self, parent: int, at: npt.NDArray[np.int32]) -> None:
        """The nodes `at`, which are new, follow `parent`, one after the other."""
        elder, head, tail = self.child[parent], int(at[0]), int(at[-1])
        column(self.parent)[at[1:]] = at[:-1]
        column(self.child)[at[:-1]] = at[1:]
        column(self.older)[at] = column(self.younger)[at] = _NOBODY
        self.parent[head], self.child[tail], self.older[head] = parent, _NOBODY, elder
        if elder:
            self.younger[elder] = head
        self.child[parent] = head

    def append_firsts(self, at: npt.NDArray[np.int32]) -> None:
        """The nodes `at`, which are new, follow nobody."""
        elder, first, last = self.child[_NOBODY], int(at[0]), int(at[-1])
        column(self.parent)[at] = column(self.child)[at] = _NOBODY
        column(self.older)[at[:-1]] = at[1:]
        column(self.younger)[at[1:]] = at[:-1]
        self.older[last], self.younger[first] = elder, _NOBODY
        if elder:
            self.younger[elder] = last
        self.child[_NOBODY] = first

    def link_trees(self, parents: npt.NDArray[np.integer], nodes: npt.NDArray[np.int32]) -> None:
        """Each of `nodes`, which are new, follows that of `parents`; of siblings the first is the youngest."""
        order = np.argsort(parents, kind="stable")
        at, above = nodes[order], parents[order]
        first = np.concatenate([[True], above[1:] != above[:-1]])
        youngest, eldest = at[first], at[np.concatenate([first[1:], [True]])]
        child, older, younger = column(self.child), column(self.older), column(self.younger)
        column(self.parent)[at], child[at] = above, _NOBODY
        older[at[:-1]], younger[at[1:]] = at[1:], at[:-1]
        elders = child[above[first]]
        older[eldest], younger[youngest] = elders, _NOBODY
        younger[elders[elders > 0]] = eldest[elders > 0]
        child[above[first]] = youngest

    def siblings(
        self, at: npt.NDArray[np.int32], parents: npt.NDArray[np.int32]
    ) -> Iterator[tuple[int, int, int, int]]:
        """The nodes `at`, children of `parents`, in runs, each from one to the next younger sibling.

        Of each run: the eldest, the youngest, their parent, and how many they are. What has been told of may leave
        before the next is asked for.
        """
        last = np.ones(len(at), bool)
        np.not_equal(column(self.younger)[at[:-1]], at[1:], out=last[:-1])
        ends = np.flatnonzero(last)
        begins = np.concatenate([[0], ends[:-1] + 1])
        runs = (at[begins], at[ends], parents[ends], ends - begins + 1)
        return zip(*(each.tolist() for each in runs), strict=True)

    def move(self, node: int, parent: int) -> None:
        """`node` and all behind it follow `parent` from now on."""
        self.unlink(node, self.parent[node])
        elder = self.child[parent]
        self.parent[node], self.older[node], self.younger[node] = parent, elder, _NOBODY
        if elder:
            self.younger[elder] = node
        self.child[parent] = node

    def unlink(self, node: int, parent: int) -> None:
        """`node` is no child of `parent` any more."""
        self.unlink_siblings(node, node, parent)

    def unlink_siblings(self, eldest: int, youngest: int, parent: int) -> None:
        """Nor are siblings that follow one another, from `eldest` to `youngest`."""
        older, younger = self.older[eldest], self.younger[youngest]
        if younger:
            self.older[younger] = older
        else:
            self.child[parent] = older
        if older:
            self.younger[older] = younger


ROOT = 0
"""The parent of every first chunk; also "no node"."""

ORPHANS = 1
"""The parent of every orphan: a chunk whose parent no tier has. No match from the first chunk leads through it."""

ROOTED, ORPHANED = 1, 2
"""Marks of nodes that can be read: from the first chunk on, or by those who have what is before their orphan."""

_FAR = -(1 << 30)
"""The depth of `ORPHANS`: all that follows an orphan has a negative depth, as its position is not known."""

NONE = -1
"""No slot."""

_MANY = 64
"""From so many on, whole arrays are faster."""

_SHARDS = 256


class Nodes:
    """Nodes by key over the slots of `pools`, warmest tier first."""

    __slots__ = (
        "_count",
        "_free",
        "_others",
        "_shards",
        "_tree",
        "called",
        "child",
        "children",
        "depth",
        "gone",
        "key",
        "older",
        "orphans",
        "parent",
        "path",
        "pools",
        "reach",
        "reachable",
        "size",
        "slot",
        "tiers",
        "waiting",
    )

    def __init__(self, pools: Sequence[SlotPool]) -> None:
        self.pools = list(pools)
        self.tiers = range(len(pools))
        self._others = [tuple(t for t in reversed(self.tiers) if t != tier) for tier in self.tiers]
        self.size = LISTS + sum(pool.capacity for pool in pools)
        """Numbers below this one may be nodes. Nodes begin at `LISTS`, so that policies can name lists below."""
        # One place for each slot there is, from the start: columns that grew would have to be copied now and then.
        self.key = np.full(self.size, None, object)
        self._tree = NodeTree(self.size)
        self.parent, self.children, self.path = self._tree.parent, self._tree.children, self._tree.path
        self.child, self.older = self._tree.child, self._tree.older
        """The youngest child of each node, and its next older sibling; `ROOT` for none."""
        self.depth = zeros(self.size)
        self.slot = [array("i", [NONE]) * self.size for _ in pools]
        self.reach = [zeros(self.size) for _ in pools]
        self.reachable = bytearray(self.size)
        self.depth[ROOT], self.depth[ORPHANS] = -1, _FAR
        self.reachable[ROOT], self.reachable[ORPHANS] = ROOTED, ORPHANED
        self.orphans: dict[int, Key] = {}
        """The key before each child of `ORPHANS`."""
        self.waiting: dict[Key, dict[int, None]] = {}
        """The same by that key."""
        self.called: set[int] = set()
        """Nodes that orphans in colder tiers wait for."""
        self._free = FreeList(array("i", range(self.size - 1, LISTS - 1, -1)))
        self._shards: tuple[dict[Key, int], ...] = tuple({} for _ in range(_SHARDS))
        self._count = 0
        self.gone = 0
        """Nodes that have been forgotten until now: while no more are, a number stands for the same key."""

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        """All nodes, in order of their numbers."""
        return (node for node in range(LISTS, self.size) if self.key[node] is not None)

    def get(self, key: Key) -> int:
        """The node of `key`; `ROOT` if no tier has it. Raises `CacheError` for what cannot be a key."""
        try:
            return self._shards[key[0]].get(key, ROOT)
        except (IndexError, TypeError):
            raise _no_key(key) from None

    def find(self, keys: Sequence[Key]) -> list[int]:
        """`get` for many."""
        shards = self._shards
        try:
            return [shards[key[0]].get(key, ROOT) for key in keys]
        except (IndexError, TypeError):
            raise CacheError("keys are digests in bytes") from None

    def before(self, nodes: Sequence[int]) -> list[Key | None]:
        """The key before each of `nodes`, whether or not a tier has it; `None` for first chunks."""
        key, parent, orphans = self.key, self.parent, self.orphans
        if not orphans:
            return [key[parent[node]] for node in nodes]
        return [orphans.get(node) or key[parent[node]] for node in nodes]

    def coldest_tier(self, node: int) -> int:
        """The coldest tier with a live copy; -1 without one."""
        for tier in reversed(self.tiers):
            if self.slot[tier][node] >= 0:
                return tier
        return -1

    def other_coldest_tier(self, node: int, tier: int) -> int:
        """The coldest tier that `node` is in, apart from `tier`; -1 without one."""
        for other in self._others[tier]:
            if self.slot[other][node] >= 0:
                return other
        return -1

    def is_ready(self, node: int, tier: int) -> bool:
        """Whether `node` has a ready copy in `tier`."""
        slot = self.slot[tier][node]
        return slot >= 0 and self.pools[tier].state[slot] == READY

    def are_ready(self, at: npt.NDArray[np.int32], tier: int) -> npt.NDArray[np.bool_]:
        """The same for nodes `at`."""
        slots = column(self.slot[tier])[at]
        state = marks(self.pools[tier].state)
        return (slots >= 0) & (state[slots] == READY) if len(state) else np.zeros(len(at), bool)

    def pool_of(self, node: int) -> int:
        """The pool that the slots of `node` are in, in whatever tier."""
        for tier in self.tiers:
            slot = self.slot[tier][node]
            if slot >= 0:
                return self.pools[tier].pool_of(slot)
        raise IntegrityError(f"node {node} has no slot")

    def pools_of(self, nodes: Sequence[int]) -> list[int]:
        """The same for many."""
        if len(nodes) < _MANY:
            return [self.pool_of(node) for node in nodes]
        at = np.array(nodes, np.int32)
        pools = np.full(len(at), NONE)
        for tier in self.tiers:
            slots = column(self.slot[tier])[at]
            here = np.flatnonzero((slots >= 0) & (pools == NONE))
            pools[here] = self.pools[tier].pools_of(slots[here])
        if (pools == NONE).any():
            raise IntegrityError(f"node {nodes[int((pools == NONE).argmax())]} has no slot")
        found: list[int] = pools.tolist()
        return found

    def warmest_ready(self, node: int) -> int:
        """The warmest tier with a ready copy; -1 without one."""
        for tier in self.tiers:
            if self.is_ready(node, tier):
                return tier
        return -1

    def resize(self) -> None:
        """The pools have other sizes now: make room for as many chunks, keeping the numbers of those that are here."""
        more = max(0, LISTS + sum(pool.capacity for pool in self.pools) - self.size)
        self.key = np.concatenate([self.key, np.full(more, None, object)])
        self._tree.grow(more)
        for counts in (self.depth, *self.reach):
            counts.extend(zeros(more))
        for slots in self.slot:
            slots.extend(array("i", [NONE]) * more)
        self.reachable.extend(bytes(more))
        self._free = FreeList(array("i", range(self.size + more - 1, self.size - 1, -1)) + array("i", self._free))
        self.size += more

    def _enter(self, keys: Sequence[Key], at: npt.NDArray[np.int32], tier: int, slots: Sequence[int]) -> list[int]:
        """The nodes `at` are those of `keys`, in `slots` of `tier`; as numbers."""
        nodes: list[int] = at.tolist()
        shards = self._shards
        for key, node in zip(keys, nodes, strict=True):
            shards[key[0]][key] = node
        where = numbers(slots)
        self.key[at] = keys
        column(self.slot[tier])[at] = where
        column(self.pools[tier].node)[where] = at
        self._count += len(nodes)
        return nodes

    def _numbers(self, count: int) -> npt.NDArray[np.int32]:
        """Numbers of `count` new nodes."""
        if len(self._free) < count:
            raise CacheError(f"the index has room for {self.size - LISTS} chunks, one for each slot")
        return numbers(self._free.take(count))[::-1]

    def wait(self, orphan: int, before: Key) -> None:
        """`orphan`, a child of `ORPHANS`, waits for the key `before` it."""
        self.orphans[orphan] = before
        self.waiting.setdefault(before, {})[orphan] = None
        if above := self.get(before):
            self.called.add(above)

    def _stop_waiting(self, orphan: int) -> None:
        before = self.orphans.pop(orphan)
        del self.waiting[before][orphan]
        if not self.waiting[before]:
            del self.waiting[before]
            self.called.discard(self.get(before))

    def _forget(self, node: int, key: Key, parent: int) -> None:
        if parent == ORPHANS:
            self._stop_waiting(node)
        self.called.discard(node)
        del self._shards[key[0]][key]
        self._tree.unlink(node, parent)
        self.key[node] = None
        self.reachable[node] = 0
        self._free.give(array("i", (node,)))
        self._count -= 1
        self.gone += 1


def _no_key(key: object) -> CacheError:
    return CacheError(f"a key is a digest in bytes, got {key!r}")
